"""Times three_kernel over tile shapes and softmax launches, stage by stage, at case report 2's shape or any other.

    PYTHONPATH=. python benchmarks/three_kernel_sweep.py --out benchmarks/records/FILE.jsonl
    PYTHONPATH=. python benchmarks/three_kernel_sweep.py --head-dim 1024 --seqlen 2048 --dtype bfloat16

It reports for each config whether its result is right, the time of a whole call in a replayed CUDA graph and called
from Python, the time of each stage alone in a graph, and the remainder, which is the gaps between stages. All configs
and stages of one tile shape take turns in each round. Times are medians in microseconds per head, hot: the same inputs
are used repeatedly, as in the report. One line of JSON per config has the raw samples.

Triton cannot express the report's softmax with 16 threads per block, because its blocks are whole warps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from warpwave.errors import UnsupportedProblem
from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels.three_kernel import config as three_kernel_configs
from warpwave.kernels.three_kernel import host as three_kernel
from warpwave.kernels.three_kernel.host import STAGES
from warpwave.kernels.three_kernel.plan import Config
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.bench import environment
from warpwave.workbench.bench.correctness import Sample
from warpwave.workbench.bench.inputs import make_operands
from warpwave.workbench.bench.timing import Samples, time_modes

# Queries, keys and the sum's step of a tile, as the report writes them, and warps of ours for it.
REPORTED = ((64, 128, 64, 4), (64, 64, 32, 4), (64, 128, 32, 4), (128, 256, 64, 8))
OTHERS = (
    *((32, 64, 32, 4), (32, 128, 64, 4), (64, 32, 32, 4), (64, 64, 64, 4), (64, 256, 64, 8)),
    *((128, 64, 32, 4), (128, 64, 64, 8), (128, 128, 32, 8), (128, 128, 64, 8), (256, 64, 64, 8), (256, 128, 64, 8)),
)
THREADS = (32, 64, 128, 256)  # of a block of the softmax, which takes one row
UNSAYABLE = 16
WAYS = (("triton", "triton"), ("fused", "triton"), ("library", "triton"), ("library", "library"))


def space(problem: AttentionProblem, gpu: Gpu) -> Iterator[tuple[Config, str]]:
    """Returns every config with the reason why it cannot run, empty if it can. Fields without an effect are not varied:
    softmax threads if the softmax is fused, tiles if both products are torch's."""
    default = three_kernel.configs(problem, gpu)[0]
    for way in WAYS:
        for block_m, block_n, block_k, num_warps in (*REPORTED, *OTHERS):
            if way == ("library", "library") and (block_m, block_n, block_k, num_warps) != REPORTED[0]:
                continue
            for threads in THREADS[:1] if way[0] == "fused" else THREADS:
                config = dataclasses.replace(
                    default,
                    scores=way[0],
                    values=way[1],
                    split_d=1,
                    block_m=block_m,
                    block_n=block_n,
                    block_k=block_k,
                    block_v=min(block_n, 128),
                    num_warps=num_warps,
                    num_stages=3,
                    softmax_rows=1,
                    softmax_keys=min(4096, 1 << (problem.seqlen_k - 1).bit_length()),
                    softmax_warps=max(1, threads // gpu.warp_size),
                )
                config = three_kernel_configs.with_workspace(problem, gpu, config)
                yield config, _refusal(problem, gpu, config)


def _refusal(problem: AttentionProblem, gpu: Gpu, config: Config) -> str:
    if reasons := three_kernel_configs.library_cannot(problem, gpu, config):
        return "; ".join(reasons)
    needed = three_kernel.smem_bytes(problem, gpu, config)
    if needed > gpu.smem_per_block_bytes:
        return f"up to {needed / 1024:.0f} KiB of shared memory, of {gpu.smem_per_block_bytes / 1024:.0f}"
    return ""


def measure(problem: AttentionProblem, operands: Any, sample: Sample, config: Config, rounds: int) -> dict[str, Any]:
    """Measures one config; returns a line of the record."""
    line: dict[str, Any] = {"kind": "sweep", "config": dataclasses.asdict(config)}
    try:
        run = three_kernel.bind(problem, operands, config)
        out, _ = run(operands)
        verdict = sample.judge(out)
        line["verdict"] = dataclasses.asdict(verdict)
        if not verdict.passed:
            return line | {"refusal": f"wrong: {verdict.reason}"}
        stages = three_kernel.stage_calls(problem, operands, config)
        del out
        times = time_modes(
            {"whole": lambda: run(operands), **stages},
            ("graph", "eager"),
            device=operands.q.device,
            rounds=rounds,
            flush_l2=False,
            sample_s=0.01,
        )
    except (UnsupportedProblem, ValueError) as error:
        return line | {"refusal": str(error)}
    graph: dict[str, Samples] = times["graph"]
    line["graph"] = {name: dataclasses.asdict(samples) for name, samples in graph.items()}
    line["eager"] = dataclasses.asdict(times["eager"]["whole"])
    whole = graph["whole"].median_us
    line["us"] = {name: samples.median_us for name, samples in graph.items()} | {
        "gaps": whole - sum(graph[stage].median_us for stage in stages),
        "eager": times["eager"]["whole"].median_us,
    }
    return line


COLUMNS = ("whole", *STAGES, "gaps", "eager")


def row(config: Config, line: dict[str, Any], heads: int, warp_size: int) -> str:
    """Returns a config as a line of the table."""
    softmax = "epilogue" if config.scores == "fused" else f"{config.softmax_warps * warp_size}"
    name = f"{config.scores}/{config.values} {config.block_m}x{config.block_n}x{config.block_k}, {softmax}"
    if "refusal" in line:
        return f"{name:<44} {line['refusal']}"
    figures = (f"{line['us'][c] / heads:9.3f}" if c in line["us"] else f"{'-':>9}" for c in COLUMNS)
    return f"{name:<44} {' '.join(figures)}"


def sweep(problem: AttentionProblem, device: torch.device, rounds: int, record: TextIO | None) -> list[dict[str, Any]]:
    """Measures the whole space, and prints each config when it is measured.

    Returns:
        The lines of the record, fastest first, refused configs last.
    """
    gpu, heads = current_gpu(device), problem.batch * problem.num_heads_q
    operands = make_operands(problem, device)
    sample = Sample(problem, operands)
    print(f"{problem.describe()} on {gpu.name}; us for each of {heads} heads")
    print(f"{'products, tile, softmax threads':<44} {' '.join(f'{c:>9}' for c in COLUMNS)}")
    print(
        f"{f'any, {UNSAYABLE}':<44} is not possible in Triton: a block is whole warps, at least {gpu.warp_size} threads"
    )
    lines = []
    for config, refusal in space(problem, gpu):
        line = (
            {"kind": "sweep", "config": dataclasses.asdict(config), "refusal": refusal}
            if refusal
            else measure(problem, operands, sample, config, rounds)
        )
        print(row(config, line, heads, gpu.warp_size), flush=True)
        lines.append(line)
        if record is not None:
            record.write(json.dumps(line) + "\n")
            record.flush()
    return sorted(lines, key=lambda line: line["us"]["whole"] if "us" in line else float("inf"))


def main(arguments: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, value in (("batch", 1), ("heads", 16), ("seqlen", 1024), ("head-dim", 64), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16", "float32"))
    parser.add_argument("--precision", default="default")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--out", type=Path, help="a file for the record, JSON lines")
    a = parser.parse_args(arguments)
    if min(a.batch, a.heads, a.seqlen, a.head_dim, a.rounds) < 1:
        parser.error("sizes and rounds must be at least 1")
    if not torch.cuda.is_available():
        print("this machine has no GPU to time three_kernel on", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    problem = AttentionProblem(
        batch=a.batch, seqlen_q=a.seqlen, seqlen_k=a.seqlen, num_heads_q=a.heads, num_heads_kv=a.heads,
        head_dim=a.head_dim, head_dim_v=a.head_dim, dtype=a.dtype, softmax_scale=a.head_dim**-0.5,
        precision=a.precision, causal=Causal() if a.causal else None,
    )  # fmt: skip
    if a.out is not None and a.out.exists():
        parser.error(f"{a.out} already exists; name another file")
    record = None if a.out is None else a.out.open("x", encoding="utf-8")
    try:
        if record is not None:
            about = {"kind": "environment", **environment.describe(device)}
            about["problem"] = dataclasses.asdict(problem)
            record.write(json.dumps(about, default=str) + "\n")
        best = sweep(problem, device, a.rounds, record)[:5]
    finally:
        if record is not None:
            record.close()
    print("\nfastest in a graph:")
    for line in best:
        print(row(Config(**line["config"]), line, a.batch * a.heads, current_gpu(device).warp_size))
    return 0


if __name__ == "__main__":
    sys.exit(main())
