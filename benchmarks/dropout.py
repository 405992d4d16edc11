"""What dropout costs: forward, and forward with backward, with and without it, beside SDPA's flash backend, on a GPU.

    python -m benchmarks.dropout OUT.json [--rounds 7] [--quick]

bfloat16, heads * head_dim = 2048, full and causal. Ours are the kernels that `auto` takes, and the portable ones,
`flash_fwd` and `flash_bwd`. Before a head size is timed, results of `auto` with dropout are compared with `eager`'s for
the same seed. Rounds are interleaved; a cost is the median time with dropout over the median without. `--quick` times
calls with dropout alone, causal 4 x 4096.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import warpwave
from benchmarks.gradients import Step, paired
from warpwave import dispatch
from warpwave.gpu import current_gpu
from warpwave.kernels import flash_bwd
from warpwave.operands import DropoutOperands, Operands
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.bench import environment

P = 0.1
SHAPES = ((64, 16, 1024), (64, 1, 16384), (128, 16, 1024), (128, 4, 4096), (128, 1, 16384), (256, 4, 4096))
QUICK_SHAPES = ((64, 4, 4096), (128, 4, 4096), (256, 4, 4096))
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


def steps_of(head_dim: int, batch: int, seqlen: int, causal: bool, probabilities: tuple[float, ...]) -> dict[str, Step]:
    """Returns what is timed of one shape, by name."""
    heads = 2048 // head_dim
    q, k, v, dout = (torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    trained = tuple(t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v))
    seed, gpu = torch.tensor([5, 7], device="cuda"), current_gpu(q.device)

    def ours(p: float, kernel: str) -> tuple[Step, Step]:
        problem = AttentionProblem(
            batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=heads, num_heads_kv=heads, head_dim=head_dim,
            head_dim_v=head_dim, dtype="bfloat16", softmax_scale=head_dim**-0.5, return_lse=True, dropout_p=p,
            causal=Causal() if causal else None,
        )  # fmt: skip
        operands = DropoutOperands(*Operands(q, k, v), seed) if p else Operands(q, k, v)
        module = flash_bwd if kernel == "flash_fwd" else dispatch.gradient_kernels(problem, gpu)[0]
        of_qkv = (True, True, True, False, False, False)
        gradients = module.bind(problem, gpu, operands, of_qkv, module.default(problem, gpu))

        def forward() -> Any:
            return warpwave.attention(
                q, k, v, causal=causal, dropout_p=p, dropout_seed=seed if p else None, kernel=kernel, return_lse=True
            )

        return forward, lambda: gradients(operands, forward(), dout, None)

    def sdpa(p: float) -> tuple[Step, Step]:
        def forward() -> Any:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                a, b, c = trained
                return torch.nn.functional.scaled_dot_product_attention(a, b, c, dropout_p=p, is_causal=causal)

        def alone() -> Any:
            with torch.no_grad():
                return forward()

        return alone, lambda: torch.autograd.grad(forward(), trained, dout.transpose(1, 2))

    makers: dict[str, Callable[[float], tuple[Step, Step]]] = {
        "auto": lambda p: ours(p, "auto"),
        "portable": lambda p: ours(p, "flash_fwd"),
        "sdpa flash": sdpa,
    }
    found: dict[str, Step] = {}
    for name, make in makers.items():
        for p in probabilities:
            forward, both = make(p)
            suffix = ", dropout" if p else ""
            found |= {f"forward {name}{suffix}": forward, f"both {name}{suffix}": both}
    return found


def timed(case: str, steps: dict[str, Step], rounds: int) -> dict[str, Any]:
    """Returns the times of one shape."""
    times = paired(steps, rounds)
    median = {name: statistics.median(values) for name, values in times.items()}
    cost = {name: median[f"{name}, dropout"] / median[name] for name in median if f"{name}, dropout" in median}
    print(
        case, {name: round(ms, 3) for name, ms in median.items()}, {n: round(c, 2) for n, c in cost.items()}, flush=True
    )
    return {"case": case, "ms": times, "cost": cost}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    shapes = QUICK_SHAPES if arguments.quick else SHAPES
    masks, probabilities = ((True,), (P,)) if arguments.quick else ((False, True), (0.0, P))
    cases: dict[str, dict[str, Step]] = {}
    for head_dim, batch, seqlen in shapes:
        for causal in masks:
            name = f"{head_dim}, {batch} x {seqlen}, {'causal' if causal else 'full'}"
            cases[name] = steps_of(head_dim, batch, seqlen, causal, probabilities)
    with ThreadPoolExecutor(8) as pool:  # kernels are compiled side by side
        checks = {(d, causal): pool.submit(check, d, causal) for d, _, _ in shapes for causal in masks}
        list(pool.map(lambda step: step(), [step for steps in cases.values() for step in steps.values()]))
        errors = {f"{head_dim}, causal={causal}": found.result() for (head_dim, causal), found in checks.items()}
    torch.cuda.synchronize()
    rows = [timed(name, steps, arguments.rounds) for name, steps in cases.items()]
    record = {"p": P, "rows": rows, "errors": errors, "environment": environment.describe("cuda")}
    arguments.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
