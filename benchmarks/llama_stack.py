"""A Llama-shaped stack of transformers with warpwave's attention beside torch's and FlashAttention-4's, on a GPU.

    python -m benchmarks.llama_stack OUT.json [--seconds 240] [--rounds 5] [--rows prefill train decode generate]

8 layers of hidden size 4096, 32 heads on 8, head_dim 128, bfloat16, random weights. Four rows: a prefill of 8,192
tokens; a training step of 8,192 tokens with fused AdamW; 256 greedy steps after the prefill, with a dynamic cache, not
compiled; 256 greedy steps of `generate` with a static cache, which transformers compiles and replays as CUDA graphs on
a GPU. Before anything is timed, logits are compared with those of the same weights in float32. Rounds go through the
implementations forward and back in turn; a ratio is the median over rounds of the other's time over ours. The share of
attention in a step is the time of the layers' attention calls alone, over the step's.

OUT.json is rewritten after every part, so an interrupted run keeps its measurements. `--seconds` bounds the run: each
row gets an equal part of the time that is left, and takes as many rounds as fit, one at least. Compiling the steps of
`generate` takes about a minute for each implementation, beyond that bound if necessary. An implementation that fails in
a row is left out of that row, with the error. FlashAttention-4 takes part if transformers accepts `flash_attention_4`,
which needs the distribution `flash-attn-4`.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.train import first_line
from warpwave.integrations import transformers as door
from warpwave.workbench.bench import environment

OURS, TORCHS = "warpwave", "sdpa"
ROWS = ("prefill", "train", "decode", "generate")
NAMES = (OURS, TORCHS, "flash_attention_4")
MOST_ERROR = 1.25  # RMS error of our logits against float32, in units of sdpa's
CHECKED_TOKENS = 2048  # of the comparison with float32
Step = Callable[[], float]


def build(sizes: argparse.Namespace) -> Any:
    """Returns the model in bfloat16."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=sizes.hidden, intermediate_size=sizes.hidden * 7 // 2, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, vocab_size=sizes.vocabulary,
        max_position_embeddings=2 * (sizes.seqlen + sizes.steps), attn_implementation=TORCHS,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(sizes.device):
        model: Any = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None  # every run has as many steps
    return model.to(torch.bfloat16)


def clock(step: Callable[[], Any]) -> float:
    """Returns the milliseconds of a step, the device's work included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def warmed(steps: dict[str, Step]) -> tuple[dict[str, Step], dict[str, str]]:
    """Runs every step twice, which compiles its kernels and makes its plans. Returns the steps that ran, and the errors
    of the others."""
    ran, failed = {}, {}
    for name, step in steps.items():
        try:
            step()
            step()
            ran[name] = step
        except Exception as error:  # of a peer: whatever its compiler raises
            if name in (OURS, TORCHS):
                raise
            failed[name] = first_line(error)
    return ran, failed


def paired(steps: dict[str, Step], rounds: int, until: float) -> dict[str, list[float]]:
    """Returns the times of each step, in at least one round; rounds go through all steps, forward and back in turn."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds):
        for name in list(steps) if i % 2 else list(steps)[::-1]:
            found[name].append(steps[name]())
        if time.monotonic() > until:
            break
    return found


def errors(model: Any, ids: torch.Tensor, names: Sequence[str]) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the RMS error of each implementation's logits against the same weights in float32, on the first tokens,
    and the reasons of those that failed."""
    ids = ids[:, :CHECKED_TOKENS]
    found: dict[str, float] = {}
    with torch.no_grad():
        exact_model = copy.deepcopy(model).float()
        exact_model.set_attn_implementation(TORCHS)
        exact = exact_model(input_ids=ids, use_cache=False).logits
        del exact_model

        def measure(name: str) -> float:
            model.set_attn_implementation(name)
            difference = model(input_ids=ids, use_cache=False).logits.float() - exact
            found[name] = difference.square().mean().sqrt().item()
            return found[name]

        _, failed = warmed({name: lambda name=name: measure(name) for name in names})  # type: ignore[misc]
    return found, failed


def prefill(model: Any, name: str, ids: torch.Tensor) -> float:
    """Returns the milliseconds of a prefill."""
    model.set_attn_implementation(name)
    with torch.no_grad():
        return clock(lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1))


def decode(model: Any, name: str, ids: torch.Tensor, steps: int, tokens: dict[str, list[int]]) -> float:
    """Returns the milliseconds of a greedy step after a prefill, and keeps the tokens."""
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


def generate(model: Any, name: str, ids: torch.Tensor, steps: int) -> float:
    """Returns the milliseconds of a step of `generate` with a static cache, after the first token."""
    model.set_attn_implementation(name)
    ended: list[float] = []

    def note(tokens: torch.Tensor, scores: Any, **others: Any) -> torch.Tensor:
        if tokens.shape[1] in (ids.shape[1] + 1, ids.shape[1] + 1 + steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ended.append(time.perf_counter())
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps + 1, do_sample=False,
        cache_implementation="static", stopping_criteria=[note],
    )  # fmt: skip
    first, last = ended
    return (last - first) * 1e3 / steps


def train(model: Any, optimizer: Any, name: str, ids: torch.Tensor) -> float:
    """Returns the milliseconds of a training step."""
    model.set_attn_implementation(name)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return clock(step)


def attention_alone(sizes: argparse.Namespace, model: Any, name: str, what: str) -> Step:
    """Returns the step of all layers' attention calls, without the rest of the model; a decode step is the one in the
    middle."""
    import transformers

    backward = what == "train"
    queries, keys = (1, sizes.seqlen + sizes.steps // 2) if what == "decode" else (sizes.seqlen, sizes.seqlen)
    head_dim = sizes.hidden // sizes.heads
    q, k, v = (
        torch.randn(1, length, heads, head_dim, device=sizes.device, dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_(backward)
        for heads, length in ((sizes.heads, queries), (sizes.kv_heads, keys), (sizes.kv_heads, keys))
    )
    layer = model.model.layers[0].self_attn

    def step() -> None:
        with torch.set_grad_enabled(backward):
            for _ in range(sizes.layers):
                out, _ = attend(layer, q, k, v, None, scaling=head_dim**-0.5)
                if backward:
                    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    def timed() -> float:
        model.set_attn_implementation(name)
        return clock(step)

    attend = transformers.AttentionInterface()[name]
    return timed


def available(model: Any) -> dict[str, str]:
    """Returns implementation -> why transformers refuses it, empty where it does not."""
    found = {}
    for name in NAMES:
        try:
            model.set_attn_implementation(name)
            found[name] = ""
        except Exception as error:  # whatever a package's import raises
            found[name] = first_line(error)
    return found


def row_of(what: str, samples: dict[str, list[float]], alone: dict[str, list[float]]) -> dict[str, Any]:
    """Returns a row of the record: times in milliseconds, ratios to ours, and attention's share."""
    ratios = {
        name: statistics.median(other / mine for other, mine in zip(found, samples[OURS], strict=True))
        for name, found in samples.items()
        if name != OURS
    }
    median = {name: statistics.median(found) for name, found in samples.items()}
    share = {name: statistics.median(found) / median[name] for name, found in alone.items()}
    return {
        "what": what, "ms": samples, "median_ms": median, "ratio": ratios, "attention_ms": alone,
        "attention_share": share,
    }  # fmt: skip


def measure(sizes: argparse.Namespace) -> dict[str, Any]:
    """Measures all rows and writes the record as it grows. Returns it."""
    import transformers

    until = time.monotonic() + sizes.seconds
    ids = torch.randint(3, sizes.vocabulary, (1, sizes.seqlen), device=sizes.device)
    model = build(sizes)
    reasons = available(model)
    record: dict[str, Any] = {
        "complete": False, "rows": [], "not_run": reasons, "transformers": transformers.__version__,
        "sizes": {name: value for name, value in vars(sizes).items() if name != "out"},
        "environment": environment.describe(sizes.device),
    }  # fmt: skip

    def write() -> None:
        sizes.out.write_text(json.dumps(record, indent=1))

    write()
    found, failed = errors(model, ids, [name for name, reason in reasons.items() if not reason])
    reasons.update(failed)
    record |= {"errors": found, "correct": found[OURS] <= MOST_ERROR * found[TORCHS]}
    print("RMS error of logits against float32:", found, "correct" if record["correct"] else "WRONG", flush=True)
    write()
    names = [name for name, reason in reasons.items() if not reason]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=sizes.device == "cuda")
    tokens: dict[str, list[int]] = {}
    kinds: dict[str, Callable[[str], float]] = {
        "prefill": lambda name: prefill(model, name, ids),
        "train": lambda name: train(model, optimizer, name, ids),
        "decode": lambda name: decode(model, name, ids, sizes.steps, tokens),
        "generate": lambda name: generate(model, name, ids, sizes.steps),
    }
    for i, what in enumerate(sizes.rows):
        begin, kind = time.monotonic(), kinds[what]
        row_until = begin + max(0.0, until - begin) / (len(sizes.rows) - i)
        steps, failed = warmed({name: lambda name=name, kind=kind: kind(name) for name in names})  # type: ignore[misc]
        samples = paired(steps, sizes.rounds, row_until)
        # Attention in the graphs of `generate` is not called by itself.
        alone = {} if what == "generate" else {name: attention_alone(sizes, model, name, what) for name in steps}
        alone_steps, alone_failed = warmed(alone)
        failed |= {f"{name}, attention alone": reason for name, reason in alone_failed.items()}
        row = row_of(what, samples, paired(alone_steps, sizes.rounds, row_until)) | {"failed": failed}
        row["seconds"] = time.monotonic() - begin
        record["rows"].append(row)
        if what == "decode":
            same = sum(a == b for a, b in zip(tokens[OURS], tokens[TORCHS], strict=True))
            record["same_tokens_as_sdpa"] = same / sizes.steps
        print({key: value for key, value in row.items() if key not in ("ms", "attention_ms")}, flush=True)
        write()
    record["complete"] = True
    write()
    return record


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    for name, default in (
        ("rounds", 5), ("layers", 8), ("hidden", 4096), ("heads", 32), ("kv_heads", 8), ("vocabulary", 32000),
        ("seqlen", 8192), ("steps", 256),
    ):  # fmt: skip
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--seconds", type=float, default=240.0, help="the time of the run, compilation included")
    parser.add_argument("--device", default="cuda")
    sizes = parser.parse_args(arguments)
    for name, value in vars(sizes).items():
        if isinstance(value, int) and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    sizes.out.parent.mkdir(parents=True, exist_ok=True)
    registration = door.register(OURS)
    try:
        record = measure(sizes)
    finally:
        registration.remove()
    if not record["correct"]:
        raise SystemExit("logits are further from float32 than allowed: the times are void")


if __name__ == "__main__":
    main()
