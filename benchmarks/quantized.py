"""Times quantized attention and `quantize` beside 16-bit attention, in one interleaved run.

    PYTHONPATH=. python -m benchmarks.quantized --out RECORD.jsonl            # a GPU; minutes
    PYTHONPATH=. python -m benchmarks.quantized --head-dim 128 --batch 4 --batch 1 --out RECORD.jsonl
    PYTHONPATH=. python -m benchmarks.quantized --device cpu --tokens 256 --width 64

Calls have `--tokens` tokens and heads * head_dim = `--width`, full and causal. The contenders are bfloat16 and every
kind of quantized numbers, each by the kernel that "auto" selects, and quantizing followed by attention. Each output is
compared with float64 on the numbers that the call attends with, on sampled rows, and a call that is further off than
`ALLOWED` has no time. Quantizing is timed for itself, with its bandwidth beside that of a copy of q, k and v: as a
caller sees it, and on a GPU the device's time alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import warpwave
from warpwave.kernels import descales
from warpwave.operands import Operands, QuantizedOperands
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.bench import environment
from warpwave.workbench.bench.correctness import Sample
from warpwave.workbench.bench.table import Table, print_table
from warpwave.workbench.bench.timing import paired_ratio, time_interleaved

FP8, INT8 = torch.float8_e4m3fn, torch.int8
# Name -> the options of `warpwave.quantize`.
WAYS: dict[str, dict[str, Any]] = {
    "fp8, head": {"granularity": "head"},
    "fp8, block 128": {},
    "fp8, v bfloat16": {"dtype_v": torch.bfloat16},
    "int8, v bfloat16": {"dtype": INT8},
    "int8, v int8": {"dtype": INT8, "dtype_v": INT8},
}
MORE: dict[str, dict[str, Any]] = {
    "fp8, block 128, smoothed, rotated": {"smooth_k": True, "rotate": True},
    "int8, v bfloat16, smoothed, rotated": {"dtype": INT8, "smooth_k": True, "rotate": True},
}  # timed as quantizing only: attention does not know how its numbers were made
# Relative RMS error of a correct kernel on the numbers that it gets, by their dtype: rounding the probabilities to
# e4m3 costs 1.7e-2, and rounding out to bfloat16 2e-3.
ALLOWED = {"float8_e4m3fn": 0.04, "int8": 0.006, "bfloat16": 0.006}
COPY, PLAIN = "copy of q, k and v", "bfloat16"
TOGETHER = ("fp8, block 128", "int8, v bfloat16")  # quantized in the timed call too
DEVICE_ALONE = ", device alone"  # of a name: launches of a graph, without the host
HEAD_DIMS, BATCHES = (64, 128, 256), (16, 4, 1)


def problems(
    tokens: int, width: int, head_dims: Sequence[int] = HEAD_DIMS, batches: Sequence[int] = BATCHES
) -> Iterator[AttentionProblem]:
    """Yields the calls: `tokens` in so many sequences, for each head_dim that divides `width`."""
    for head_dim in head_dims:
        for batch in batches:
            for causal in (None, Causal()):
                if width % head_dim == 0:
                    heads = width // head_dim
                    yield AttentionProblem(
                        batch=batch, seqlen_q=tokens // batch, seqlen_k=tokens // batch, num_heads_q=heads,
                        num_heads_kv=heads, head_dim=head_dim, head_dim_v=head_dim, dtype="bfloat16",
                        softmax_scale=head_dim**-0.5, causal=causal,
                    )  # fmt: skip


def measure(problem: AttentionProblem, device: torch.device, rounds: int) -> dict[str, Any]:
    """Returns the errors and times of all contenders of one call, as a line of the record."""
    p, g = problem, torch.Generator(device).manual_seed(0)
    shape = (p.batch, p.seqlen_q, p.num_heads_q, p.head_dim)
    q, k, v = (torch.randn(shape, generator=g, device=device).bfloat16() for _ in range(3))
    causal = p.causal or False
    attends: dict[str, Callable[[], Any]] = {PLAIN: partial(warpwave.attention, q, k, v, causal=causal)}
    errors = {PLAIN: Sample(p, Operands(q, k, v)).relative_error(attends[PLAIN]())}
    limits = {PLAIN: ALLOWED["bfloat16"]}
    quantizing: dict[str, Callable[[], Any]] = {}
    moved = {COPY: 2 * 3 * q.numel() * q.element_size()}
    for name, options in (WAYS | MORE).items():
        quantizing[f"quantize {name}"] = partial(warpwave.quantize, q, k, v, **options)
        found = warpwave.quantize(q, k, v, **options)
        moved[f"quantize {name}"] = found.moved_bytes
        if name in MORE:
            continue
        attends[name] = partial(warpwave.attention, **found.arguments(), causal=causal)
        errors[name] = _error(problem, found, attends[name]())
        limits[name] = ALLOWED[str(found.q.dtype).removeprefix("torch.")]
        if name in TOGETHER:
            both = f"quantize, then {name}"
            attends[both] = partial(_quantize_and_attend, q, k, v, options, causal)
            errors[both], limits[both] = _error(problem, found, attends[both]()), limits[name]
    wrong = [name for name, error in errors.items() if not error <= limits[name]]
    calls = {name: attend for name, attend in attends.items() if name not in wrong}
    apart = [torch.empty_like(x) for x in (q, k, v)]
    quantizing[COPY] = lambda: [to.copy_(x) for to, x in zip(apart, (q, k, v), strict=True)]
    timed = time_interleaved(calls, device=device, rounds=rounds)
    timed |= time_interleaved(quantizing, device=device, rounds=rounds, mode="eager")
    if device.type == "cuda":
        of_device = time_interleaved(quantizing, device=device, rounds=rounds, mode="graph")
        timed |= {f"{name}{DEVICE_ALONE}": samples for name, samples in of_device.items()}
        moved |= {f"{name}{DEVICE_ALONE}": bytes_ for name, bytes_ in moved.items()}
    return {
        "problem": p.describe(),
        "flops": p.flops,
        "errors": errors,
        "wrong": wrong,
        "times_us": {name: samples.samples_us for name, samples in timed.items()},
        "median_us": {name: samples.median_us for name, samples in timed.items()},
        "over_bfloat16": {name: paired_ratio(timed[PLAIN], timed[name]).median for name in calls if PLAIN in calls},
        "moved_bytes": moved,
    }


def _quantize_and_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any], causal: Any
) -> torch.Tensor:
    out: torch.Tensor = warpwave.attention(**warpwave.quantize(q, k, v, **options).arguments(), causal=causal)
    return out


def _error(problem: AttentionProblem, found: warpwave.Quantized, out: torch.Tensor) -> float:
    """Returns the relative error of a quantized call on the numbers that it attends with."""
    factors = (found.q_descale, found.k_descale, found.v_descale)
    operands = QuantizedOperands(found.q, found.k, found.v, **dict(zip(descales.NAMES, factors, strict=True)))
    # Factors of blocks have one axis more than those of heads and tensors.
    of_q, of_k, of_v = (128 if factor is not None and factor.dim() == 3 else 0 for factor in factors)
    dtype, dtype_v = (str(t.dtype).removeprefix("torch.") for t in (found.q, found.v))
    described = replace(problem, dtype=dtype, dtype_v=dtype_v, dtype_out="bfloat16", descale_blocks=(of_q, of_k, of_v))
    wide, numbers = descales.dequantized(described, operands, torch.float32)
    return Sample(wide, numbers).relative_error(out)


def table(line: dict[str, Any]) -> Table:
    """Returns one line of the record as text."""
    rows: list[tuple[str, ...]] = []
    for name, us in line["median_us"].items():
        bytes_ = line["moved_bytes"].get(name)
        error, ratio = line["errors"].get(name), line["over_bfloat16"].get(name)
        rows.append(
            (
                name,
                f"{us:,.1f}",
                "" if bytes_ else f"{line['flops'] / us / 1e6:,.0f}",
                "" if ratio is None else f"{ratio:.2f}",
                f"{bytes_ / us / 1e3:,.0f}" if bytes_ else "",
                "" if error is None else f"{error:.1e}",
            )
        )
    rows += [(name, "wrong", "", "", "", f"{line['errors'][name]:.1e}") for name in line["wrong"]]
    return Table(line["problem"], ("contender", "us", "TFLOP/s", "x bfloat16", "GB/s", "error"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every call. Returns the exit code: 1 if an output was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--width", type=int, default=2048, help="heads * head_dim")
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, action="append", help="only this; may be repeated")
    parser.add_argument("--batch", type=int, choices=BATCHES, action="append", help="only this; may be repeated")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="a new file for the lines, as JSON Lines")
    asked = parser.parse_args(arguments)
    if asked.out is not None and asked.out.exists():
        parser.error(f"{asked.out} exists; name a new file")
    if asked.tokens < 16 or asked.tokens % 16 or asked.width % 64 or asked.width < 64 or asked.rounds < 1:
        parser.error("--tokens must be a multiple of 16, --width of 64, and --rounds at least 1")
    device = torch.device(asked.device)
    lines: list[dict[str, Any]] = [{"environment": environment.describe(device)}]
    for problem in problems(asked.tokens, asked.width, asked.head_dim or HEAD_DIMS, asked.batch or BATCHES):
        lines.append(measure(problem, device, asked.rounds))
        print_table(table(lines[-1]))
        if asked.out is not None:  # after each call, so that a run that is cut off keeps its lines
            text = "".join(json.dumps(line) + "\n" for line in lines)
            asked.out.write_text(text, encoding="utf-8")
    return 1 if any(line.get("wrong") for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
