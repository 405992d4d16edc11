"""Compares the time of a decode step with large heads with the time to read the cache once.

    python -m benchmarks.decode_large_heads [--rounds 9] [--only TEXT] [--seconds 60] [--beside] [--out RECORD.jsonl]

All calls are in bfloat16, contiguous or in shuffled pages of 64 and 16 tokens. K and V have head_dim 512 and 4 kv
heads, or are a latent cache of 576 columns, of which the first 512 are V. Calls have one query of 16 heads; those on
latents also have up to 128 heads, or up to 16 queries with a causal mask. Each result is first compared with the
float64 oracle. Times are of CUDA graphs of eight calls or more, because a replay itself costs some microseconds; the
calls use enough sets of inputs in turn to keep L2 cold. It prints TB/s of keys and values read once, as a share of the
card's data sheet and of the rate at which `torch.sum` reads a GiB between the rounds. From batch 16 on it prints
whether calls of 16 heads and one query reach 85 % of the data sheet. With `--beside` it also times, in turn with the
call, the config for a v that is not part of k, and half and twice as many splits of the keys.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import warpwave
from benchmarks.two_head_sizes import medians
from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import large_head_dim
from warpwave.kernels.large_head_dim import choice
from warpwave.operands import CachedOperands, Operands
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.bench.correctness import Sample
from warpwave.workbench.bench.inputs import make_operands
from warpwave.workbench.explain.explanation import explain
from warpwave.workbench.hardware import catalog

COLD_BYTES = 250e6  # that calls cycle through: four times an H200's L2
CALLS = 8  # of a graph, at the least
GOAL, FROM_BATCH = 0.85, 16


class Point(NamedTuple):
    """One kind of step: (head_dim, head_dim_v, kv heads), batch, cached tokens, tokens of a page or 0, query heads,
    queries of a sequence."""

    dims: tuple[int, int, int]
    batch: int
    cached: int
    page_size: int
    heads: int = 16
    queries: int = 1

    @property
    def latent(self) -> bool:
        return self.dims[0] != self.dims[1]

    def __str__(self) -> str:
        head_dim, head_dim_v, heads = self.dims
        what = f"{head_dim}/{head_dim_v}, one tensor" if self.latent else f"{head_dim} on {heads}"
        if self.rows > 16:
            what += f", {self.queries} queries of {self.heads} heads"
        return f"{what}, {self.batch} x {self.cached}" + (f", pages of {self.page_size}" if self.page_size else "")

    @property
    def rows(self) -> int:
        return self.heads * self.queries

    @property
    def problem(self) -> AttentionProblem:
        head_dim, head_dim_v, heads = self.dims
        return AttentionProblem(
            batch=self.batch, seqlen_q=self.queries, seqlen_k=self.cached, num_heads_q=self.heads, num_heads_kv=heads,
            head_dim=head_dim, head_dim_v=head_dim_v, dtype="bfloat16", softmax_scale=head_dim**-0.5,
            page_size=self.page_size, causal=Causal() if self.queries > 1 else None, v_in_k=self.latent,
        )  # fmt: skip

    @property
    def cache_bytes(self) -> int:
        head_dim, head_dim_v, heads = self.dims
        return 2 * self.batch * self.cached * heads * (head_dim if self.latent else head_dim + head_dim_v)


WIDE, LATENT = (512, 512, 4), (576, 512, 1)
# What must be shown first: the clock may end the run.
POINTS = [
    *(Point(LATENT, 16, s, page) for s in (65536, 4096) for page in (0, 64)),
    *(Point(WIDE, 16, s, page) for s in (16384, 4096) for page in (0, 64)),
    *(Point(LATENT, 64, s, page) for s in (16384, 4096) for page in (0, 64)),
    *(Point(WIDE, 64, s, 0) for s in (16384, 4096)),
    *(Point(dims, 16, 16384, 16) for dims in (LATENT, WIDE)),
    *(Point(dims, 1, s, 0) for dims in (LATENT, WIDE) for s in (65536, 4096)),
    # DeepSeek's 128 heads on one to eight GPUs, one query or some of speculative decoding.
    *(Point(LATENT, batch, s, 64, 128) for batch, s in ((128, 4096), (32, 4096), (8, 4096), (1, 16384), (1, 65536))),
    *(Point(LATENT, batch, s, 64, 64) for batch, s in ((64, 8192), (16, 4096))),
    *(Point(LATENT, batch, s, 64, 16, 2) for batch, s in ((256, 4096), (64, 4096), (16, 8192), (16, 1024), (1, 65536))),
    *(Point(LATENT, batch, s, 64, 128, 2) for batch, s in ((32, 8192), (4, 4096))),
    *(Point(LATENT, batch, s, 0, 128) for batch, s in ((128, 4096), (1, 1024))),
    *(Point(LATENT, batch, s, page, 16, 4) for batch, s, page in ((4, 65536, 64), (64, 2048, 16), (1, 4096, 0))),
    Point(LATENT, 16, 8192, 64, 64, 16),
    Point(LATENT, 100, 1024, 64, 32),
]


def call_of(operands: Operands | CachedOperands) -> Callable[[], Tensor]:
    """Returns the step as a public call."""
    causal = operands.q.shape[1] > 1
    if isinstance(operands, CachedOperands):
        layer = warpwave.CacheLayer(operands.k, operands.v, operands.page_table, operands.seqused_k)
        return lambda: warpwave.attention_with_kv_cache(operands.q, layer, causal=causal)
    return lambda: warpwave.attention(operands.q, operands.k, operands.v, causal=causal)


def configs_beside(problem: AttentionProblem, gpu: Gpu) -> dict[str, large_head_dim.Config]:
    """Returns the config for a v that is not part of k, and the default with half and twice as many splits."""
    default = large_head_dim.configs(problem, gpu)[0]
    splits = {max(1, default.num_splits // 2), 2 * default.num_splits} - {default.num_splits}
    beside = {f"x{n}": replace(default, num_splits=n) for n in sorted(splits)}
    return beside | {"pointers": choice.of_table(problem, gpu, by_map=False)}


def graph_of(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """Returns a CUDA graph of all calls in turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def measure(
    point: Point, read: Callable[[], Any], read_bytes: int, rounds: int, sheet_tbs: float, has_beside: bool
) -> dict[str, Any]:
    """Measures the time and the shares of one kind of step, and of other configs if `has_beside`.

    Raises:
        RuntimeError: its result is wrong.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    sets = max(1, min(16, -(-int(COLD_BYTES) // point.cache_bytes)))
    operands = [make_operands(point.problem, device, seed=seed) for seed in range(sets)]
    verdict = Sample(point.problem, operands[0]).judge(call_of(operands[0])())
    if not verdict.passed:
        raise RuntimeError(f"{point} is wrong: {verdict.reason}")
    calls = [call_of(x) for x in operands] * -(-CALLS // sets)
    graph = graph_of(calls)
    runs = {"step": graph.replay, "read": read}
    gpu = current_gpu(device)
    if has_beside:
        for name, config in configs_beside(point.problem, gpu).items():
            run = large_head_dim.bind(point.problem, operands[0], config)
            of_config = [partial(run, x) for x in operands]
            runs[name] = graph_of(of_config * -(-CALLS // sets)).replay
    us = {name: 1000 * ms for name, ms in medians(runs, rounds).items()}
    step_us = us["step"] / len(calls)
    tbs, read_tbs = point.cache_bytes / step_us / 1e6, read_bytes / us["read"] / 1e6
    chosen = explain(point.problem, gpu=gpu)
    beside = {name: us[name] / len(calls) for name in runs if name not in ("step", "read")}
    return {
        "case": str(point), **point._asdict(), "kernel": chosen.kernel, "num_splits": chosen.config.num_splits,
        "us": step_us, "tbs": tbs, "of_data_sheet": tbs / sheet_tbs, "of_reading": tbs / read_tbs, "read_tbs": read_tbs,
        "tflops": point.problem.flops / step_us / 1e6, "sets": sets, "error_of_model": verdict.rms_error,
        "us_beside": beside,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Measures the points in the order of the list, as far as the seconds go; 1 if one is wrong or misses the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--beside", action="store_true", help="time other configs too")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("it times a GPU, and there is none")
        return 2
    gpu = current_gpu(torch.device("cuda", torch.cuda.current_device()))
    sheet = catalog.data_sheet(gpu)
    if sheet is None:
        print(f"the catalog knows no memory bandwidth of {gpu.name}")
        return 2
    big = torch.empty(1 << 27, dtype=torch.int64, device="cuda")
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    read = graph_of([lambda: torch.sum(big, 0, out=total)] * CALLS).replay
    begin, code = time.monotonic(), 0
    for point in POINTS:
        if a.only not in str(point):
            continue
        if time.monotonic() - begin > a.seconds:
            print(f"out of time before {point}")
            break
        try:
            found = measure(point, read, CALLS * 8 * big.numel(), a.rounds, sheet.bandwidth_gbps / 1000, a.beside)
        except RuntimeError as error:
            print(error, flush=True)
            code = 1
            continue
        missed = point.batch >= FROM_BATCH and point.rows <= 16 and found["of_data_sheet"] < GOAL
        code = 1 if missed else code
        print(
            f"{point}: {found['kernel']} {found['us']:.1f} us, {found['tbs']:.2f} TB/s, {found['of_data_sheet']:.3f} "
            f"of the data sheet, {found['of_reading']:.3f} of reading, {found['tflops']:.0f} TFLOP/s"
            + (", missed" if missed else "")
            + "".join(f"; {name} {us:.1f}" for name, us in found["us_beside"].items()),
            flush=True,
        )
        if a.out is not None:
            with a.out.open("a") as record:
                record.write(json.dumps(found | {"gpu": gpu.name, "torch": torch.__version__}) + "\n")
        torch.cuda.empty_cache()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
