"""Backward times of our gradient kernels beside SDPA's backends, paired in one process on a GPU.

    python -m benchmarks.gradients OUT.json [--rounds 7]

Rows: heads * head_dim = 2048, 64 / 128 / 256 x {16 x 1024, 4 x 4096, 1 x 16384} x full / causal, backward alone; GQA
with 32 query and 8 kv heads of 128 at 1 x 8192, forward and backward through the public call, with the host's time of
a step at 1 x 128. Rounds are interleaved; a ratio is the median over rounds of the peer's time over ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import warpwave
from warpwave import dispatch
from warpwave.gpu import current_gpu
from warpwave.kernels import three_kernel
from warpwave.kernels.hopper import flash_bwd
from warpwave.problem import AttentionProblem, Causal, Operands
from warpwave.workbench.bench import environment

PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
SHAPES = ((16, 1024), (4, 4096), (1, 16384))
WANTED = (True, True, True, False, False, False)
Step = Callable[[], Any]


def elapsed(step: Step, repeats: int) -> float:
    """Returns milliseconds a call, by events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def paired(steps: dict[str, Step], rounds: int, budget_ms: float = 8.0) -> dict[str, list[float]]:
    """Returns the times of each step, in rounds that go through all of them, to and fro."""
    for step in steps.values():
        step()
        step()
    repeats = max(2, int(budget_ms / elapsed(next(iter(steps.values())), 2)))
    found: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds):
        for name in list(steps) if i % 2 else list(steps)[::-1]:
            found[name].append(elapsed(steps[name], repeats))
    return found


def peer_backward(name: str, q: Any, k: Any, v: Any, dout: Any, causal: bool) -> Step | None:
    """Returns SDPA's backward by one backend, None where it refuses."""
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    try:
        with sdpa_kernel(PEERS[name]):
            out = torch.nn.functional.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=causal)
        torch.autograd.grad(out, leaves, dout.transpose(1, 2), retain_graph=True)
    except RuntimeError:
        return None
    return lambda: torch.autograd.grad(out, leaves, dout.transpose(1, 2), retain_graph=True)


def backward_row(head_dim: int, batch: int, seqlen: int, causal: bool, rounds: int) -> dict[str, Any]:
    """Returns one row: every gradient kernel of ours that can, and the peers."""
    heads, gpu = 2048 // head_dim, current_gpu(torch.device("cuda"))
    q, k, v, dout = (torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    problem = AttentionProblem(
        batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=heads, num_heads_kv=heads, head_dim=head_dim,
        head_dim_v=head_dim, dtype="bfloat16", softmax_scale=head_dim**-0.5, return_lse=True,
        causal=Causal() if causal else None,
    )  # fmt: skip
    operands = Operands(q, k, v)
    results = warpwave.attention(q, k, v, causal=causal, return_lse=True)
    steps: dict[str, Step] = {}
    for module in dispatch.gradient_kernels(problem, gpu):
        default = module.default(problem, gpu)
        others = [c for c in module.configs(problem, gpu) if c != default] if module is flash_bwd else []
        for config in (default, *others):
            name = module.NAME if config == default else f"{module.NAME}, apart, {config.block_m}"
            run = module.bind(problem, gpu, operands, WANTED, config)
            steps[name] = lambda run=run: run(operands, results, dout, None)  # type: ignore[misc]
    if not three_kernel.gradients_why_not(problem, gpu):
        steps["three_kernel"] = lambda: three_kernel.gradients(problem, gpu, operands, dout, None, WANTED)
    for name in PEERS:
        step = peer_backward(name, q, k, v, dout, causal)
        if step is not None:
            steps[name] = step
    expected = next(steps[n] for n in steps if n in PEERS)()
    ours = [n for n in steps if n not in PEERS]
    errors = {n: largest_error(steps[n](), expected) for n in ours}
    flops = 2.5 * problem.flops
    times = paired(steps, rounds)
    median = {n: statistics.median(t) for n, t in times.items()}
    best = min(median[n] for n in median if n in PEERS)
    case = f"{head_dim}, {batch} x {seqlen}, {'causal' if causal else 'full'}"
    tflops = {n: flops / t / 1e9 for n, t in median.items()}
    ratio = {n: best / median[n] for n in ours}
    print(case, {n: round(x) for n, x in tflops.items()}, {n: round(x, 3) for n, x in ratio.items()}, flush=True)
    return {"case": case, "ms": times, "errors": errors, "tflops": tflops, "ratio": ratio}


def largest_error(ours: Any, theirs: Any) -> float:
    """Returns the largest relative difference of dq, dk and dv."""
    pairs = zip(ours[:3], theirs, strict=True)
    return max(((a.float() - b.transpose(1, 2).float()).norm() / b.float().norm()).item() for a, b in pairs)


def whole_steps(rounds: int) -> list[dict[str, Any]]:
    """Returns forward and backward through the public calls, and the host's time of a small step."""
    rows = []
    for name, batch, seqlen, heads, kv_heads in (
        ("gqa 32/8, 1 x 8192", 1, 8192, 32, 8),
        ("host, 1 x 128", 1, 128, 16, 16),
    ):
        q, k, v = (
            torch.randn(batch, seqlen, n, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for n in (heads, kv_heads, kv_heads)
        )
        dout = torch.randn_like(q)

        def ours(q: Any = q, k: Any = k, v: Any = v, dout: Any = dout) -> Any:
            return torch.autograd.grad(warpwave.attention(q, k, v, causal=True), (q, k, v), dout)

        def sdpa(q: Any = q, k: Any = k, v: Any = v, dout: Any = dout) -> Any:
            a, b, c = (x.transpose(1, 2) for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)
            return torch.autograd.grad(out.transpose(1, 2), (q, k, v), dout)

        steps: dict[str, Step] = {"warpwave": ours, "sdpa": sdpa}
        row: dict[str, Any] = {"case": name, "ms": paired(steps, rounds)}
        for label, step in steps.items():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            torch.cuda.synchronize()
            row[f"peak_mib_{label}"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            samples = []
            for _ in range(rounds):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(50):
                    step()
                samples.append((time.perf_counter() - begin) / 50 * 1e6)
            row[f"host_us_{label}"] = samples
        print({k: v if isinstance(v, str | float) else str(v)[:160] for k, v in row.items()}, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    arguments = parser.parse_args()
    steps = whole_steps(arguments.rounds)
    rows = [
        backward_row(head_dim, batch, seqlen, causal, arguments.rounds)
        for head_dim in arguments.head_dims
        for batch, seqlen in SHAPES
        for causal in (False, True)
    ]
    mean = {
        n: statistics.geometric_mean([r["ratio"][n] for r in rows if n in r["ratio"]])
        for n in {n for r in rows for n in r["ratio"]}
    }
    print("geometric means of the best peer's time over ours", mean)
    record = {"backward": rows, "steps": steps, "geometric_mean": mean, "environment": environment.describe("cuda")}
    arguments.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
