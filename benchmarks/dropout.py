"""What dropout costs: forward and backward with and without it, beside SDPA's flash backend, on a GPU.

    python -m benchmarks.dropout OUT.json [--rounds 7]

bfloat16, heads * head_dim = 2048, full and causal. Before a shape is timed, its results with dropout are compared with
`eager`'s for the same seed. Rounds are interleaved; a cost is the median time with dropout over the median without.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import warpwave
from benchmarks.gradients import Step, paired
from warpwave.workbench.bench import environment

P = 0.1
SHAPES = ((64, 16, 1024), (64, 1, 16384), (128, 16, 1024), (128, 4, 4096), (128, 1, 16384), (256, 4, 4096))
LARGEST_ERROR = 0.02  # relative, of bfloat16 results of two kernels


def check(head_dim: int, causal: bool) -> dict[str, float]:
    """Returns the relative differences of out and gradients from eager's, and raises if one is large."""
    seed = torch.tensor([5, 7], device="cuda")
    q, k, v = (torch.randn(2, 777, 4, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    found = []
    for kernel in ("auto", "eager"):
        out = warpwave.attention(q, k, v, causal=causal, dropout_p=P, dropout_seed=seed, kernel=kernel)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    names = ("out", "dq", "dk", "dv")
    errors = {n: ((a - b).float().norm() / b.float().norm()).item() for n, a, b in zip(names, *found, strict=True)}
    if not max(errors.values()) < LARGEST_ERROR:
        raise RuntimeError(f"head_dim {head_dim}, causal={causal}: results with dropout are wrong: {errors}")
    return errors


def row(head_dim: int, batch: int, seqlen: int, causal: bool, rounds: int) -> dict[str, Any]:
    """Returns the times of one shape."""
    shape = (batch, seqlen, 2048 // head_dim, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    dout = torch.randn_like(q)

    def ours(p: float, kernel: str) -> torch.Tensor:
        out: torch.Tensor = warpwave.attention(q, k, v, causal=causal, dropout_p=p, deterministic=True, kernel=kernel)
        return out

    def sdpa(p: float) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            a, b, c = (x.transpose(1, 2) for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(a, b, c, dropout_p=p, is_causal=causal)
        return out.transpose(1, 2)

    forwards = {
        "flash_fwd": lambda: ours(0.0, "flash_fwd"),
        "flash_fwd, dropout": lambda: ours(P, "flash_fwd"),
        "sdpa flash": lambda: sdpa(0.0),
        "sdpa flash, dropout": lambda: sdpa(P),
    }
    steps: dict[str, Step] = {f"forward {name}": forward for name, forward in forwards.items()}
    for name, forward in forwards.items():
        out = forward()
        steps[f"backward {name.replace('fwd', 'bwd')}"] = lambda out=out: torch.autograd.grad(  # type: ignore[misc]
            out, (q, k, v), dout, retain_graph=True
        )
    times = paired(steps, rounds)
    median = {name: statistics.median(values) for name, values in times.items()}
    cost = {name: median[f"{name}, dropout"] / median[name] for name in median if f"{name}, dropout" in median}
    case = f"{head_dim}, {batch} x {seqlen}, {'causal' if causal else 'full'}"
    print(
        case, {name: round(ms, 3) for name, ms in median.items()}, {n: round(c, 2) for n, c in cost.items()}, flush=True
    )
    return {"case": case, "ms": times, "cost": cost}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    rows, errors = [], {}
    for head_dim, batch, seqlen in SHAPES:
        for causal in (False, True):
            errors[f"{head_dim}, causal={causal}"] = check(head_dim, causal)
            rows.append(row(head_dim, batch, seqlen, causal, arguments.rounds))
    record = {"p": P, "rows": rows, "errors": errors, "environment": environment.describe("cuda")}
    arguments.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
