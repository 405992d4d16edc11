"""The door to transformers: model families with random weights agree with their eager attention, padded, packed,
generating and training; masks stay small; and what is unknown is refused."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.testing

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'warpwave[integrations]'")

import warpwave
from tests.integrations.families import FAMILIES, PAGE, inputs_of, make, output, page_with_table, switch, watched
from warpwave import InvalidInput, InvalidType, UnsupportedProblem
from warpwave.integrations import transformers as door

GENERATING = [name for name, family in FAMILIES.items() if "decoder" in family.kind]
WITH_IDS = [name for name in FAMILIES if "input_ids" in inputs_of(name)]
PACKABLE = [name for name in WITH_IDS if FAMILIES[name].kind == "decoder"]
# Of float32 logits of magnitude 5 to 10, by two orders of summation through the layers.
LOGITS: Any = {"rtol": 1e-5, "atol": 1e-4}
# With padding on the right, `generate` continues from padding. In Llama-4's chunks it may see no token at all.
RIGHT = {"Llama-4": "left"}


def masks_by_position() -> bool:
    """Returns whether masks of packed documents count positions in each document, as from transformers 5.23 on; before,
    chunks count from the beginning of the row."""
    return hasattr(importlib.import_module("transformers.masking_utils"), "packed_sequence_compatibility_function")


def of_documents(positions: torch.Tensor, segments: torch.Tensor) -> Any:
    """Returns the function of a causal mask of packed documents, in the form of the installed transformers."""
    masks: Any = importlib.import_module("transformers.masking_utils")
    if masks_by_position():
        return masks.packed_sequence_compatibility_function(masks.causal_mask_function, positions, segments)
    return masks.and_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(segments))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    registration = door.register()
    yield
    registration.remove()


def padding(side: str, length: int = 13) -> torch.Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, slice(None, 4) if side == "left" else slice(-4, None)] = 0
    return mask


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients(name: str) -> None:
    model, inputs = make(name), inputs_of(name)
    calls: list[dict[str, Any]] = []
    results, gradients = [], []
    for implementation in ("eager", "warpwave"):
        with watched(calls):
            out = output(model, implementation, **inputs)
        model.zero_grad()
        out.square().mean().backward()
        results.append(out)
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(calls) >= 2, "the model's layers do not reach warpwave"
    torch.testing.assert_close(results[1], results[0], **LOGITS)
    largest = max(float(g.abs().max()) for g in gradients[0])
    for mine, eager in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-3, atol=1e-5 * largest)


@pytest.mark.parametrize("name", WITH_IDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(name: str, side: str) -> None:
    model, inputs, mask = make(name), inputs_of(name), padding(side)
    calls: list[dict[str, Any]] = []
    with torch.no_grad(), watched(calls):
        pair = [output(model, how, attention_mask=mask, **inputs) for how in ("eager", "warpwave")]
    if "decoder_input_ids" not in inputs:  # the queries of padding differ: they see nothing, and eager sees everything
        pair = [out * mask[..., None] for out in pair]
    torch.testing.assert_close(pair[1], pair[0], **LOGITS)
    if name != "Llama-4":
        assert all(call["mask"] is None or call["mask"].shape[1:3] == (1, 1) for call in calls)


@pytest.mark.parametrize("name", PACKABLE)
def test_packed_documents(name: str) -> None:
    """Without a cache, position ids that begin anew begin a document; no dense masks unless the model needs them."""
    model, inputs = make(name), inputs_of(name)
    positions = torch.cat([torch.arange(5), torch.arange(8)])[None]
    ids = inputs["input_ids"][:1]
    calls: list[dict[str, Any]] = []
    packed: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        if name == "GPT-OSS":  # whose model does not give position ids to its masks
            offsets = torch.tensor([0, 5, 13], dtype=torch.int32)
            packed |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 8, "max_length_k": 8}
        else:
            expected = output(model, "eager", **packed)
        with watched(calls):
            mine = output(model, "warpwave", **packed)
        apart = torch.cat([output(model, "warpwave", input_ids=part) for part in (ids[:, :5], ids[:, 5:])], 1)
    if name != "Llama-4" or masks_by_position():
        torch.testing.assert_close(mine, apart, **LOGITS)
    if name != "GPT-OSS":
        torch.testing.assert_close(mine, expected, **LOGITS)
    functions = [call["function"] for call in calls]
    assert "attention_varlen" in functions and (name == "Llama-4" or set(functions) == {"attention_varlen"})


def generated(name: str, tokens: int, cache: str, side: str | None, **options: Any) -> list[torch.Tensor]:
    masks: Any = importlib.import_module("transformers.masking_utils")
    taken = inspect.signature(masks.create_chunked_causal_mask).parameters
    if name == "Llama-4" and cache == "static" and "block_sequence_ids" not in taken:
        pytest.skip("this transformers raises a TypeError for chunks in a static cache, whatever the implementation")
    model = make(name)
    inputs = {key: value for key, value in inputs_of(name).items() if key != "decoder_input_ids"}
    if side is not None and "input_ids" in inputs:
        inputs["attention_mask"] = padding(side)
    found = []
    for implementation in ("eager", "warpwave"):
        switch(model, implementation)
        found.append(
            model.generate(
                **inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, disable_compile=True,
                cache_implementation="static" if cache == "static" else None, **options,
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize("name", GENERATING)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens(name: str, cache: str) -> None:
    eager, mine = generated(name, 10, cache, "left" if cache == "static" else RIGHT.get(name, "right"))
    assert torch.equal(mine, eager)


@pytest.mark.full
@pytest.mark.parametrize("name", GENERATING)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_64_greedy_tokens(name: str, cache: str, side: str | None) -> None:
    eager, mine = generated(name, 64, cache, RIGHT.get(name, side) if side == "right" else side)
    assert torch.equal(mine, eager)


def test_beams_and_chunked_prefill() -> None:
    eager, mine = generated("Gemma-2", 8, "dynamic", "left", num_beams=3)
    assert torch.equal(mine, eager)
    for cache, side in (("dynamic", None), ("static", None), ("static", "left")):
        eager, mine = generated("Mistral", 8, cache, side, prefill_chunk_size=4)
        assert torch.equal(mine, eager), (cache, side)


@pytest.mark.parametrize("name", ["Llama", "GPT-OSS"])
def test_16_bits_are_no_further_from_float32_than_eager(name: str) -> None:
    inputs = inputs_of(name)
    with torch.no_grad():
        exact = output(make(name), "eager", **inputs)
        model = make(name, torch.bfloat16)
        eager, mine = (output(model, how, **inputs) for how in ("eager", "warpwave"))
    errors = [(out.float() - exact).square().mean().sqrt() for out in (eager, mine)]
    assert mine.dtype == torch.bfloat16 and errors[1] <= 1.25 * errors[0]


def test_checkpointed_training_of_packed_documents() -> None:
    model = make("Mistral").train()
    ids, positions = inputs_of("Mistral")["input_ids"][:1], torch.cat([torch.arange(6), torch.arange(7)])[None]
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None)  # of newer versions
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        model.zero_grad()
        output(model, "warpwave", input_ids=ids, position_ids=positions, use_cache=False).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for once, again in zip(*gradients, strict=True):
        assert torch.equal(once, again)


def sampled(chosen: set[str], names: Iterable[str]) -> list[Any]:
    """Names as parameters of a test, all but the chosen ones behind the marker of the full matrix."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.full) for name in names]


# Compiled, exported ---------------------------------------------------------------------------------------------------


def small(calls: list[dict[str, Any]]) -> bool:
    """Returns whether no call has a mask with an axis of queries."""
    return all(call.get("mask") is None or call["mask"].shape[1:3] == (1, 1) for call in calls)


class Output(torch.nn.Module):
    """A model with tensors alone as arguments and result."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.model, self.names, self.options = make(name), list(inputs_of(name)), options

    def forward(self, *given: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        options = self.options if attention_mask is None else self.options | {"attention_mask": attention_mask}
        found = self.model(**dict(zip(self.names, given, strict=True)), **options)
        tensor: torch.Tensor = found.logits if "logits" in found else found.last_hidden_state
        return tensor


# position_ids that a model makes itself may begin anew, for all that a graph can see; a mask of ones ends that.
def ones(name: str) -> dict[str, torch.Tensor]:
    return {"attention_mask": torch.ones(2, 13, dtype=torch.long)} if name in WITH_IDS else {}


@pytest.mark.parametrize("name", sampled({"Llama-4", "Gemma-2", "GPT-OSS", "Whisper", "ModernBERT"}, FAMILIES))
def test_export(name: str) -> None:
    model, inputs = Output(name, **({"use_cache": False} if "decoder" in FAMILIES[name].kind else {})), inputs_of(name)
    calls: list[dict[str, Any]] = []
    with torch.no_grad():
        expected = output(model.model, "eager", **inputs)
        switch(model.model, "warpwave")
        with watched(calls):
            program = torch.export.export(model, tuple(inputs.values()), ones(name))
        torch.testing.assert_close(program.module()(*inputs.values(), **ones(name)), expected, **LOGITS)
        if "decoder_input_ids" not in inputs and name in WITH_IDS:  # a mask's contents are read by the program
            mask = padding("left")
            expected = output(model.model, "eager", attention_mask=mask, **inputs)
            mine = program.module()(*inputs.values(), attention_mask=mask)
            torch.testing.assert_close(mine * mask[..., None], expected * mask[..., None], **LOGITS)
    assert torch.ops.warpwave.attention.default in [node.target for node in program.graph.nodes]
    # Chunks are a mask; Whisper's decoder makes position ids itself and gets no mask.
    assert calls and (small(calls) or name in ("Llama-4", "Whisper"))


@pytest.mark.parametrize("name", sampled({"Gemma-2"}, FAMILIES))
def test_compiled_training_by_families(name: str) -> None:
    """One graph, with padding, whose gradients are eager's; windows are no masks."""
    model, inputs = Output(name, **({"use_cache": False} if "decoder" in FAMILIES[name].kind else {})), inputs_of(name)
    said = {"attention_mask": padding("right")} if name in WITH_IDS and "decoder_input_ids" not in inputs else {}
    rows = said["attention_mask"][..., None] if said else 1
    results: list[Any] = []
    calls: list[dict[str, Any]] = []
    for implementation in ("eager", "warpwave"):
        switch(model.model, implementation)
        torch._dynamo.reset()
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if implementation == "warpwave" else model
        out = call(*inputs.values(), **said) * rows
        parameters = [p for p in model.parameters() if p.requires_grad]
        results.append((out, *torch.autograd.grad(out.square().mean(), parameters, allow_unused=True)))
    with watched(calls):  # the same graph, with calls that can be seen
        torch._dynamo.reset()
        torch.compile(model, backend="eager")(*inputs.values(), **said)
    assert small(calls) or name in ("Llama-4", "Whisper")
    torch.testing.assert_close(results[1][0], results[0][0], **LOGITS)
    largest = max(float(g.abs().max()) for g in results[0][1:] if g is not None)
    for mine, eager in zip(results[1][1:], results[0][1:], strict=True):
        if eager is not None:
            torch.testing.assert_close(mine, eager, rtol=1e-3, atol=1e-5 * largest)


@pytest.mark.parametrize("name", sampled({"Mistral"}, ["Llama", "Mistral", "Gemma-2", "Qwen3"]))
def test_compiled_training_of_packed_documents(name: str) -> None:
    """Without offsets the documents are a mask, as for sdpa; with them no mask reaches a call."""
    model = make(name)
    ids, positions = inputs_of(name)["input_ids"][:1], torch.cat([torch.arange(5), torch.arange(8)])[None]
    offsets = torch.tensor([0, 5, 13], dtype=torch.int32)
    given: dict[str, Any] = {
        "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 8, "max_length_k": 8
    }  # fmt: skip
    expected = output(model, "eager", input_ids=ids, position_ids=positions, use_cache=False)
    switch(model, "warpwave")

    def forward(**said: Any) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False, **said).logits
        return logits

    for said in ({}, given):
        torch._dynamo.reset()
        out = torch.compile(forward, backend="aot_eager", fullgraph=True)(**said)
        torch.testing.assert_close(out, expected, **LOGITS)
        weight = model.model.layers[0].self_attn.q_proj.weight
        pair = [torch.autograd.grad(o.square().mean(), weight, retain_graph=True)[0] for o in (out, expected)]
        torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-5 * float(pair[1].abs().max()))
    targets: list[Any] = []

    def keep(graph: Any, example: Any) -> Any:
        targets.extend(node for node in graph.graph.nodes if "warpwave.attention" in str(node.target))
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(forward, backend=keep, fullgraph=True)(**given)
    shapes = [[tuple(arg.meta["example_value"].shape) for arg in node.args if hasattr(arg, "meta")] for node in targets]
    assert len(targets) == 2 and not any(shape[-2:] == (13, 13) for found in shapes for shape in found)


@pytest.mark.parametrize("name", sampled({"Gemma-2"}, ["Llama", "Mistral", "Gemma-2", "GPT-OSS", "DeepSeek-V3"]))
@pytest.mark.parametrize("side", ["left", pytest.param(None, marks=pytest.mark.full)])
def test_compiled_decoding_with_a_static_cache(name: str, side: str | None) -> None:
    """One graph for all decode steps; the mask of a step is one row of keys per sequence."""
    from transformers import StaticCache

    model, ids = make(name), inputs_of(name)["input_ids"]
    mask = padding(side) if side else torch.ones(2, 13, dtype=torch.long)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    found = []
    for implementation in ("eager", "warpwave"):
        switch(model, implementation)
        cache, tokens, seen = StaticCache(config=model.config, max_cache_len=24), ids, mask
        torch._dynamo.reset()
        step = torch.compile(model, backend=counter, fullgraph=True) if implementation == "warpwave" else model
        logits, chosen = [], []
        with torch.no_grad():
            for i in range(6):
                call = step if i else model  # as `generate`: the prefill is not compiled
                positions = (seen.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
                out = call(input_ids=tokens, attention_mask=seen, position_ids=positions, past_key_values=cache)
                logits.append(out.logits[:, -1])
                tokens = out.logits[:, -1:].argmax(-1)
                chosen.append(tokens)
                seen = torch.cat([seen, torch.ones(2, 1, dtype=torch.long)], 1)
        found.append((torch.stack(logits), torch.cat(chosen, 1)))
    assert torch.equal(found[1][1], found[0][1])
    torch.testing.assert_close(found[1][0], found[0][0], **LOGITS)
    assert counter.frame_count <= 3  # the mask grows by a token a step: one size, then any size


# Masks, and what is refused -------------------------------------------------------------------------------------------


def windowed(function: Any, size: int) -> dict[str, Any]:
    """The arguments with which transformers describes a window."""
    return {"mask_function": function(size), "local_size": size, "config": SimpleNamespace(sliding_window=size)}


def masks_agree(pattern: dict[str, Any], **said: Any) -> None:
    """Compares attention by `make_mask` with attention by transformers' own dense mask."""
    from transformers import masking_utils

    torch.manual_seed(0)
    queries, keys = said["q_length"], said["kv_length"]
    q, (k, v) = torch.randn(2, 4, queries, 16), torch.randn(2, 2, 2, keys, 16)
    dense = masking_utils.sdpa_mask(2, allow_is_causal_skip=False, **pattern, **said)
    local: Any = torch.nn.Module()
    causal = local.is_causal = pattern["mask_function"] is not masking_utils.bidirectional_mask_function
    expected = door.attend(local, q, k, v, dense)[0]
    skips: Any = {"allow_is_causal_skip": causal, "allow_is_bidirectional_skip": not causal}
    mask = door.make_mask(2, **pattern, **skips, **said)
    assert mask is None or mask.dim() == 2
    torch.testing.assert_close(door.attend(local, q, k, v, mask)[0], expected)
    if isinstance(said.get("q_offset", 0), torch.Tensor):  # dense: positions in a graph are not known
        return

    def traced(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        mask = door.make_mask(2, **pattern, **skips, **{**said, "attention_mask": padding})
        assert mask is None or (mask.dim() == 5 and mask.shape[2] in (0, keys))
        return door.attend(local, q, k, v, mask)[0]

    torch._dynamo.reset()
    compiled = torch.compile(traced, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, said["attention_mask"]), expected)


def test_masks_of_caches() -> None:
    from transformers import masking_utils

    window = masking_utils.sliding_window_causal_mask_function
    causal = {"mask_function": masking_utils.causal_mask_function}
    both = {"mask_function": masking_utils.bidirectional_mask_function}
    padded = torch.ones(2, 12, dtype=torch.bool)
    padded[0, :3] = False
    for pattern in (causal, windowed(window, 4), windowed(window, 50)):
        for attention_mask in (None, padded):
            said: dict[str, Any] = {"attention_mask": attention_mask}
            masks_agree(pattern, q_length=5, kv_length=5, **said)
            masks_agree(pattern, q_length=5, kv_length=12, q_offset=7, **said)  # chunked prefill
            masks_agree(pattern, q_length=1, kv_length=12, q_offset=11, **said)  # decode
            masks_agree(pattern, q_length=5, kv_length=20, q_offset=torch.tensor(0), **said)  # a static cache
            masks_agree(pattern, q_length=3, kv_length=20, q_offset=torch.tensor(9), **said)
            masks_agree(pattern, q_length=1, kv_length=20, q_offset=torch.tensor(11), **said)
            masks_agree(pattern, q_length=2, kv_length=6, q_offset=10, kv_offset=6, **said)  # a cache of a window
    masks_agree(both, q_length=5, kv_length=12, attention_mask=padded)


def test_an_unknown_pattern_is_a_dense_mask() -> None:
    from transformers import masking_utils

    odd = masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k % 2 == 0)
    mask = door.make_mask(2, 5, 5, mask_function=odd)
    assert mask is not None and mask.shape == (2, 1, 5, 5)
    window = windowed(masking_utils.sliding_window_bidirectional_mask_function, 2)
    skips: Any = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    mask = door.make_mask(2, 5, 9, **window, **skips)  # not aligned to the last key
    dense = masking_utils.sdpa_mask(2, 5, 9, **window, allow_is_causal_skip=False)
    assert mask is not None and torch.equal(mask, dense)
    chunks = masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int))
    config = SimpleNamespace(attention_chunk_size=3, sliding_window=3)
    mask = door.make_mask(2, 5, 5, mask_function=chunks, local_size=3, config=config)
    assert mask is not None and mask.shape == (2, 1, 5, 5)
    assert torch.equal(mask, masking_utils.sdpa_mask(2, 5, 5, mask_function=chunks, allow_is_causal_skip=False))
    mask = door.make_mask(2, 5, 5, allow_is_causal_skip=False)  # the model changes the mask
    assert mask is not None and mask.shape == (2, 1, 5, 5)


def test_a_mask_that_lost_its_pattern_is_read_from_the_call() -> None:
    from transformers import masking_utils

    q, k, v = torch.randn(3, 2, 2, 13, 16)
    layer = torch.nn.Module()
    mask = door.make_mask(
        2, 13, 13, attention_mask=padding("left").bool(),
        **windowed(masking_utils.sliding_window_causal_mask_function, 4),
    )  # fmt: skip
    assert mask is not None
    moved = mask.clone()  # as another device's copy
    expected = door.attend(layer, q, k, v, mask)[0]
    assert torch.equal(door.attend(layer, q, k, v, moved, sliding_window=4)[0], expected)
    assert not torch.equal(door.attend(layer, q, k, v, moved)[0], expected)
    positions, segments = torch.cat([torch.arange(5), torch.arange(8)])[None], torch.tensor([[0] * 5 + [1] * 8])
    function = of_documents(positions, segments)
    documents = door.make_mask(1, 13, 13, mask_function=function, allow_is_causal_skip=False)
    assert documents is not None
    expected = door.attend(layer, q[:1], k[:1], v[:1], documents)[0]
    torch.testing.assert_close(door.attend(layer, q[:1], k[:1], v[:1], documents.clone())[0], expected)
    offsets: Any = {"cu_seq_lens_q": torch.tensor([0, 5, 13]).int(), "max_length_q": 8}
    offsets |= {"cu_seq_lens_k": offsets["cu_seq_lens_q"], "max_length_k": 8}
    torch.testing.assert_close(door.attend(layer, q[:1], k[:1], v[:1], None, **offsets)[0], expected)
    with pytest.raises(UnsupportedProblem, match="cu_seq_lens_q was given with a mask"):
        door.attend(layer, q[:1], k[:1], v[:1], torch.ones(1, 13, dtype=torch.bool), **offsets)
    with pytest.raises(UnsupportedProblem, match="position_bias"):
        door.attend(layer, q[:1], k[:1], v[:1], documents, position_bias=torch.zeros(1, 2, 13, 13))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_without_the_interface_is_refused(compiled: bool) -> None:
    """MPNet adds its mask to the scores itself. It added a row per sequence, which was wrong for 16 sequences of 16
    tokens, and torch's error for others."""
    import transformers

    config = transformers.MPNetConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, attn_implementation="warpwave"
    )
    model: Any = transformers.MPNetModel(config).eval()
    ids, visible = torch.randint(2, 64, (16, 16)), torch.arange(16).tile(16, 1) < torch.arange(1, 17)[:, None]
    run = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(UnsupportedProblem, match="the attention of mpnet is its own code"):
        run(input_ids=ids, attention_mask=visible.long())
    model.config._attn_implementation = "eager"
    model(input_ids=ids, attention_mask=visible.long())


def test_what_is_unknown_is_refused() -> None:
    q, k, v = torch.randn(3, 2, 2, 5, 16)
    layer = torch.nn.Module()
    unknown: dict[str, Any] = {"cache": object(), "output_attentions": True, "relative_key": torch.ones(2)}
    for name in unknown:
        with pytest.raises(UnsupportedProblem, match=name):
            door.attend(layer, q, k, v, None, **{name: unknown[name]})
    with pytest.raises(InvalidType, match=r"attention_mask is .*64 .* boolean"):
        door.attend(layer, q, k, v, padding("left", 5))  # a tokenizer's
    door.attend(layer, q, k, v, None, position_ids=torch.arange(5)[None], use_cache=True, output_attentions=False)


def test_dropout() -> None:
    """Dropout reaches dense and packed calls, and none is left in evaluation."""
    q, k, v = torch.randn(3, 1, 2, 13, 16)
    layer = torch.nn.Module()
    tokens = [t.transpose(1, 2) for t in (q, k, v)]
    offsets: Any = torch.tensor([0, 5, 13], dtype=torch.int32)
    both = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 8, "max_seqlen_k": 8}
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 8, "max_length_k": 8}
    calls: list[Any] = [
        lambda: door.attend(layer, q, k, v, None, dropout=0.3)[0],
        lambda: warpwave.attention(*tokens, causal=True, dropout_p=0.3),
        lambda: door.attend(layer, q, k, v, None, dropout=0.3, **packed)[0],
        lambda: warpwave.attention_varlen(*(t[0] for t in tokens), causal=True, dropout_p=0.3, **both)[None],
    ]
    found = []
    for call in calls:
        torch.manual_seed(0)
        found.append(call())
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[2], found[3])
    assert not torch.equal(found[0], calls[0]())

    model, inputs = make("BERT"), inputs_of("BERT")
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), torch.nn.Dropout) and hasattr(module, "is_causal"):
            module.dropout.p = 0.3  # of attention probabilities alone
    watching: list[dict[str, Any]] = []
    with watched(watching):
        model.train()
        output(model, "warpwave", **inputs).square().mean().backward()
        assert {call["dropout_p"] for call in watching} == {0.3}
        model.eval()
        watching.clear()
        output(model, "warpwave", **inputs)
        assert {call["dropout_p"] for call in watching} == {0.0}


def test_names_that_transformers_interprets_are_refused() -> None:
    for name in ("warpwave_flash", "org/warpwave", "eager", "sdpa", "paged|warpwave", ""):
        with pytest.raises(InvalidInput, match="name is"):
            door.register(name)
    number: Any = 5
    with pytest.raises(InvalidType, match="name is 5"):
        door.register(number)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    removed = door.register("another")
    for version in ("4.57.1", "5.16.2", "6.0.0.dev0"):
        monkeypatch.setattr(transformers, "__version__", version)
        with pytest.raises(ImportError, match=re.escape(f"transformers is {version}; warpwave's functions need")):
            door.register()
    assert "another" in transformers.AttentionInterface()
    removed.remove()  # whatever the version
    assert "another" not in transformers.AttentionInterface()


def test_removing_restores() -> None:
    import transformers

    before = [dict(i()) for i in (transformers.AttentionInterface, transformers.AttentionMaskInterface)]
    model, inputs = make("Llama"), inputs_of("Llama")
    first = output(model, "sdpa", **inputs)
    again = door.register()
    other = door.register("another")
    other.remove()
    again.remove()
    again.remove()
    assert torch.equal(output(model, "sdpa", **inputs), first)
    after = [dict(i()) for i in (transformers.AttentionInterface, transformers.AttentionMaskInterface)]
    assert after == before
    removed = door.register("another")
    switch(model, "another")
    removed.remove()
    with pytest.raises(KeyError, match="another"):
        model(**inputs)


def test_registrations_are_removed_in_any_order() -> None:
    import transformers

    interfaces = (transformers.AttentionInterface, transformers.AttentionMaskInterface)
    before = [dict(i()) for i in interfaces]
    for order in ((0, 1), (1, 0), (0, 0, 1)):
        registrations = [door.register("twice"), door.register("twice")]
        for i in order[:-1]:
            registrations[i].remove()
            assert all("twice" in interface() for interface in interfaces), order
        registrations[order[-1]].remove()
        assert [dict(i()) for i in interfaces] == before, order
    # What others gave the name to, before or since, stays.
    theirs, later = (lambda *given: None), (lambda *given: None)
    interfaces[0].register("twice", theirs)
    removed = door.register("twice")
    removed.remove()
    assert interfaces[0]()["twice"] is theirs and "twice" not in interfaces[1]()
    removed = door.register("twice")
    interfaces[0].register("twice", later)
    removed.remove()
    assert interfaces[0]()["twice"] is later and "twice" not in interfaces[1]()
    interfaces[0]._global_mapping.pop("twice")


def test_the_table_of_families_is_current() -> None:
    page = PAGE.read_text()
    assert page == page_with_table(page), "run python -m tests.integrations.families"
