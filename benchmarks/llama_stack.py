"""A Llama-shaped stack of transformers with warpwave's attention beside torch's, on a GPU: prefill, decode, training.

    python -m benchmarks.llama_stack OUT.json [--rounds 5]

8 layers of hidden size 4096, 32 heads on 8, head_dim 128, bfloat16, random weights. Prefill of 8,192 tokens; 256 greedy
steps behind it, with a dynamic cache, not compiled; a training step of 8,192 tokens with fused AdamW. Before anything
is timed, logits of both are compared with the same model in float32. Rounds go through the implementations to and fro;
a ratio is the median over rounds of `sdpa`'s time over ours. The share of attention in a step is the time of the
layers' attention calls alone, over the step's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from warpwave.integrations import transformers as door
from warpwave.workbench.bench import environment

PEERS = ("sdpa", "flash_attention_4")
OURS = "warpwave"
MOST_ERROR = 1.25  # RMS error of our logits against float32, in units of sdpa's
Step = Callable[[], Any]


def build(sizes: argparse.Namespace, dtype: torch.dtype) -> Any:
    """Returns the model, with the same weights for the same seed."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=sizes.hidden, intermediate_size=sizes.hidden * 7 // 2, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, vocab_size=sizes.vocabulary,
        max_position_embeddings=2 * (sizes.seqlen + sizes.steps),
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(sizes.device):
        model: Any = transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32)
    return model.to(dtype)


def clock(step: Step) -> float:
    """Returns the milliseconds of a step, the device's work included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def paired(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Returns each implementation's times, in rounds that go through all of them, to and fro, after a warm-up."""
    for step in steps.values():
        step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds):
        for name in list(steps) if i % 2 else list(steps)[::-1]:
            found[name].append(steps[name]())
    return found


def errors(sizes: argparse.Namespace, ids: torch.Tensor, names: Sequence[str]) -> dict[str, float]:
    """Returns each implementation's RMS error of logits against the model in float32, on the first tokens."""
    ids = ids[:, : min(2048, sizes.seqlen)]
    with torch.no_grad():
        exact_model = build(sizes, torch.float32)
        exact_model.set_attn_implementation("sdpa")
        exact = exact_model(input_ids=ids, use_cache=False).logits
        del exact_model
        model, found = build(sizes, torch.bfloat16), {}
        for name in names:
            model.set_attn_implementation(name)
            difference = model(input_ids=ids, use_cache=False).logits.float() - exact
            found[name] = difference.square().mean().sqrt().item()
    return found


def prefill(model: Any, name: str, ids: torch.Tensor) -> float:
    """Returns the milliseconds of a prefill."""
    model.set_attn_implementation(name)
    with torch.no_grad():
        return clock(lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1))


def decode(model: Any, name: str, ids: torch.Tensor, steps: int, tokens: dict[str, list[int]]) -> float:
    """Returns the milliseconds of a greedy step behind a prefill, and keeps the tokens."""
    model.set_attn_implementation(name)
    chosen: list[torch.Tensor] = []
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)

        def run() -> None:
            nonlocal token
            for _ in range(steps):
                token = model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
                chosen.append(token)

        elapsed = clock(run) / steps
    tokens[name] = torch.cat(chosen, 1)[0].tolist()
    return elapsed


def train(model: Any, optimizer: Any, name: str, ids: torch.Tensor) -> float:
    """Returns the milliseconds of a training step."""
    model.set_attn_implementation(name)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return clock(step)


def attention_alone(sizes: argparse.Namespace, name: str, backward: bool, rounds: int) -> float:
    """Returns the milliseconds of all layers' attention calls of the prompt, without the rest of the model."""
    import transformers

    attend = transformers.AttentionInterface()[name]
    head_dim = sizes.hidden // sizes.heads
    q, k, v = (
        torch.randn(1, sizes.seqlen, heads, head_dim, device=sizes.device, dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_(backward)
        for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    )
    module: Any = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, sizes.heads // sizes.kv_heads
    module.config = transformers.LlamaConfig(attn_implementation=name)

    def step() -> None:
        for _ in range(sizes.layers):
            out, _ = attend(module, q, k, v, None, scaling=head_dim**-0.5)
            if backward:
                torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    return statistics.median(paired({name: lambda: clock(step)}, rounds)[name])


def available(model: Any) -> dict[str, str]:
    """Returns implementation -> why it cannot run, empty where it can."""
    found = {OURS: ""}
    for name in PEERS:
        try:
            model.set_attn_implementation(name)
            found[name] = ""
        except Exception as error:  # whatever a package's import raises
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return found


def measure(sizes: argparse.Namespace) -> dict[str, Any]:
    """Returns the record."""
    import transformers

    ids = torch.randint(3, sizes.vocabulary, (1, sizes.seqlen), device=sizes.device)
    model = build(sizes, torch.bfloat16)
    reasons = available(model)
    names = [name for name, reason in reasons.items() if not reason]
    wrong = errors(sizes, ids, names)
    verdict = wrong[OURS] <= MOST_ERROR * wrong["sdpa"]
    print("RMS error of logits against float32:", wrong, "correct" if verdict else "WRONG", flush=True)
    tokens: dict[str, list[int]] = {}
    times = {"prefill": paired({n: lambda n=n: prefill(model, n, ids) for n in names}, sizes.rounds)}  # type: ignore[misc]
    times["decode"] = paired(
        {n: lambda n=n: decode(model, n, ids, sizes.steps, tokens) for n in names},  # type: ignore[misc]
        sizes.rounds,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=sizes.device == "cuda")
    times["train"] = paired({n: lambda n=n: train(model, optimizer, n, ids) for n in names}, sizes.rounds)  # type: ignore[misc]
    rows = []
    for what, found in times.items():
        median = {name: statistics.median(samples) for name, samples in found.items()}
        ratio = {name: median[name] / median[OURS] for name in names if name != OURS}
        row: dict[str, Any] = {"what": what, "ms": found, "median_ms": median, "ratio": ratio}
        if what != "decode":
            alone = {n: attention_alone(sizes, n, what == "train", sizes.rounds) for n in names}
            row |= {"attention_ms": alone, "attention_share": {n: alone[n] / median[n] for n in names}}
        print({key: value for key, value in row.items() if key != "ms"}, flush=True)
        rows.append(row)
    same = sum(a == b for a, b in zip(tokens[OURS], tokens["sdpa"], strict=True)) / sizes.steps
    return {
        "rows": rows, "errors": wrong, "correct": verdict, "same_tokens_as_sdpa": same, "not_run": reasons,
        "sizes": {name: value for name, value in vars(sizes).items() if name != "out"},
        "transformers": transformers.__version__, "environment": environment.describe(sizes.device),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    for name, default in (
        ("rounds", 5), ("layers", 8), ("hidden", 4096), ("heads", 32), ("kv_heads", 8), ("vocabulary", 32000),
        ("seqlen", 8192), ("steps", 256),
    ):  # fmt: skip
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--device", default="cuda")
    sizes = parser.parse_args(arguments)
    registration = door.register(OURS)
    try:
        record = measure(sizes)
    finally:
        registration.remove()
    sizes.out.write_text(json.dumps(record, indent=1))
    if not record["correct"]:
        raise SystemExit("logits are further from float32 than allowed: the times are void")


if __name__ == "__main__":
    main()
