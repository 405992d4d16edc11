"""Model families of transformers with tiny random weights, and what each asks of an attention implementation.

`python -m tests.integrations.families` writes the table of docs/guide/integrations.md; a test compares it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from warpwave.integrations import transformers as door

PAGE = Path(__file__).parents[2] / "docs/guide/integrations.md"
BEGIN, END = "<!-- families -->", "<!-- end families -->"

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = SIZES | {
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0}
VISION = {name: SIZES[name] for name in SIZES if name != "vocab_size"} | {"image_size": 32, "patch_size": 8}
PAIR = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip


class Family(NamedTuple):
    """A family: its classes, and the options of its config.

    Attributes:
        model, config: names of transformers' classes.
        options: of the config.
        kind: "decoder", "encoder", "encoder-decoder" or "vision".
        moe: whether it has experts, which only the table says.
    """

    model: str
    config: str
    options: dict[str, Any]
    kind: str = "decoder"
    moe: bool = False


def _decoder(name: str, moe: bool = False, **options: Any) -> Family:
    return Family(f"{name}ForCausalLM", f"{name}Config", DECODER | options, moe=moe)


FAMILIES: dict[str, Family] = {
    "Llama": _decoder("Llama"),
    "Mistral": _decoder("Mistral", sliding_window=5),
    "Qwen3": _decoder("Qwen3", head_dim=16),
    "Phi-3": _decoder("Phi3"),
    "Granite": _decoder("Granite"),
    "OLMo-2": _decoder("Olmo2"),
    "Cohere-2": _decoder("Cohere2", sliding_window=5),
    "Starcoder-2": _decoder("Starcoder2", sliding_window=5),
    "Gemma-2": _decoder("Gemma2", head_dim=16, sliding_window=5, query_pre_attn_scalar=16),
    "Gemma-3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", DECODER | {"head_dim": 16, "sliding_window": 5}),
    "GPT-OSS": _decoder("GptOss", True, head_dim=16, sliding_window=5, num_local_experts=4, num_experts_per_tok=2),
    "Mixtral": _decoder("Mixtral", True, num_local_experts=4),
    "Qwen3-MoE": _decoder(
        "Qwen3Moe", True, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "DeepSeek-V3": _decoder("DeepseekV3", True, **MLA),
    "Llama-4": Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        DECODER
        | {"head_dim": 16, "attention_chunk_size": 6, "num_local_experts": 2, "intermediate_size_mlp": 48}
        | {"no_rope_layers": [1, 0]},
        moe=True,
    ),
    "GPT-2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "pad_token_id": 0}
        | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "GPT-NeoX": _decoder("GPTNeoX"),
    "BERT": Family("BertForMaskedLM", "BertConfig", ENCODER, "encoder"),
    "RoBERTa": Family("RobertaForMaskedLM", "RobertaConfig", ENCODER, "encoder"),
    "ModernBERT": Family(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        SIZES
        | {"num_hidden_layers": 4, "local_attention": 6, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        | {"cls_token_id": 1, "sep_token_id": 2},
        "encoder",
    ),
    "BART": Family(
        "BartForConditionalGeneration",
        "BartConfig",
        PAIR | {"max_position_embeddings": 128, "decoder_start_token_id": 2, "forced_eos_token_id": None},
        "encoder-decoder",
    ),
    "T5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        | {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2},
        "encoder-decoder",
    ),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        PAIR
        | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 128, "decoder_start_token_id": 1}
        | {"suppress_tokens": None, "begin_suppress_tokens": None},
        "encoder-decoder",
    ),
    "ViT": Family(
        "ViTForImageClassification",
        "ViTConfig",
        VISION | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "vision",
    ),
    "SigLIP (vision)": Family("SiglipVisionModel", "SiglipVisionConfig", VISION, "vision"),
}


def make(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Returns a model of a family with random weights, large enough that attention is far from uniform."""
    import transformers

    family = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**family.options)
    model: Any = getattr(transformers, family.model)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model.to(dtype)


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    """Returns a batch of two for a family's model."""
    torch.manual_seed(1)
    ids = torch.randint(3, 64, (2, 13))
    if FAMILIES[name].kind == "vision":
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    if name == "Whisper":
        return {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": ids}
    if FAMILIES[name].kind == "encoder-decoder":
        return {"input_ids": ids, "decoder_input_ids": torch.randint(3, 64, (2, 7))}
    return {"input_ids": ids}


def switch(model: Any, implementation: str) -> None:
    """Sets the attention implementation of a model and of all models in it. transformers 5.17 leaves out a model whose
    config is a copy of the outer one: the two stacks of T5."""
    import transformers

    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            part.set_attn_implementation(implementation)


def output(model: Any, implementation: str, **inputs: Any) -> torch.Tensor:
    """Returns a model's logits, or its last hidden state, by an attention implementation."""
    switch(model, implementation)
    found = model(**inputs)
    tensor: torch.Tensor = found.logits if "logits" in found else found.last_hidden_state
    return tensor


@contextmanager
def watched(calls: list[dict[str, Any]]) -> Iterator[None]:
    """Collects the arguments of every attention call."""
    originals: dict[str, Callable[..., Any]] = {name: getattr(door, name) for name in ("attention", "attention_varlen")}

    def watching(function: str) -> Callable[..., Any]:
        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **said: Any) -> Any:
            calls.append({"function": function, "q": q.shape, "k": k.shape, "v": v.shape, **said})
            return originals[function](q, k, v, **said)

        return call

    for name in originals:
        setattr(door, name, watching(name))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(door, name, function)


def needs(name: str) -> list[str]:
    """Returns what a family's models ask of an attention implementation, as their calls show it."""
    calls: list[dict[str, Any]] = []
    model = make(name)
    with watched(calls), torch.no_grad():
        output(model, "warpwave", **inputs_of(name))
    assert calls, name

    def some(holds: Callable[[dict[str, Any]], Any]) -> bool:
        return any(bool(holds(call)) for call in calls)

    found = {
        "causal": some(lambda c: c["causal"]),
        "both directions": some(lambda c: not c["causal"] and c["mask"] is None),
        "windows": some(lambda c: max(c.get("window_size", (-1, -1))) >= 0),
        "grouped heads": some(lambda c: c["q"][-2] != c["k"][-2]),
        "two head sizes": some(lambda c: c["q"][-1] != c["v"][-1]),
        "softcap": some(lambda c: c["softcap"]),
        "sinks": some(lambda c: c["sinks"] is not None),
        "position bias": some(lambda c: c["bias"] is not None),
        "chunks, as a mask": some(lambda c: c["mask"] is not None),
    }
    return [need for need, present in found.items() if present]


def table() -> str:
    """Returns the table of the docs."""
    rows = ["| family | kind | what its attention needs |", "| --- | --- | --- |"]
    for name, family in FAMILIES.items():
        kind = f"{family.kind}, MoE" if family.moe else family.kind
        rows.append(f"| {name} | {kind} | {', '.join(needs(name))} |")
    return "\n".join(rows)


def page_with_table(page: str) -> str:
    """Returns the page with the present table."""
    return re.sub(f"(?<={BEGIN}\n).*?(?=\n{END})", lambda _: table(), page, flags=re.DOTALL)


if __name__ == "__main__":
    registration = door.register()
    PAGE.write_text(page_with_table(PAGE.read_text()))
    registration.remove()
