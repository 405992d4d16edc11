"""Times candidate configs of `flash_fwd` for each float32 arithmetic, with SDPA as the peer. Needs a GPU.

    PYTHONPATH=. python benchmarks/float32_sweep.py [--arithmetic bf16x6] [--head-dim 64] > RECORD.log

The candidates compile with few spills or none, and allow two blocks per SM if the tile does (docs/notes/float32.md).
Each is compared with float64 on sampled rows before it is timed. Times are medians of 9 rounds with SDPA in each.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from warpwave import attention
from warpwave.kernels.flash_fwd.kernel import Config
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.correctness import Sample
from warpwave.workbench.bench.inputs import make_operands

SHAPES = {64: ((4, 2048, 16), (1, 512, 1)), 128: ((4, 2048, 16),), 256: ((2, 1024, 8),)}
AHEAD = True  # K and V are split by a separate launch
# For grids that leave SMs idle (1 head x 512): more, smaller tiles, on mma.sync.
SMALL = (Config(32, 32, 4, 2), Config(16, 32, 4, 2), Config(32, 64, 4, 2), Config(16, 64, 4, 3))
CANDIDATES: dict[tuple[str, int], tuple[Config, ...]] = {
    ("bf16x3", 64): (
        Config(128, 32, 8, 2, AHEAD), Config(128, 64, 8, 2, AHEAD), Config(64, 64, 4, 2, AHEAD),
        Config(64, 32, 4, 3, AHEAD), Config(128, 32, 8, 2), Config(64, 32, 4, 2), Config(32, 32, 4, 2, AHEAD),
    ),
    ("bf16x6", 64): (
        Config(128, 32, 8, 2, AHEAD), Config(128, 64, 8, 2, AHEAD), Config(64, 64, 4, 1, AHEAD),
        Config(64, 32, 4, 3, AHEAD), Config(128, 32, 8, 2), Config(64, 32, 4, 2), Config(32, 32, 4, 2, AHEAD),
    ),
    ("bf16x3", 128): (
        Config(128, 32, 8, 2, AHEAD), Config(128, 64, 8, 2, AHEAD), Config(64, 64, 4, 1, AHEAD),
        Config(64, 32, 4, 2, AHEAD), Config(128, 32, 8, 2),
    ),
    ("bf16x6", 128): (
        Config(128, 32, 8, 2, AHEAD), Config(64, 32, 4, 1, AHEAD), Config(64, 32, 4, 2, AHEAD), Config(128, 32, 8, 2),
    ),
    ("bf16x3", 256): (
        Config(64, 16, 4, 1, AHEAD), Config(64, 32, 4, 1, AHEAD), Config(128, 32, 8, 1, AHEAD),
        Config(32, 32, 4, 1, AHEAD),
    ),
    ("bf16x6", 256): (Config(64, 16, 4, 1, AHEAD), Config(32, 16, 4, 1, AHEAD), Config(16, 32, 4, 1, AHEAD)),
}  # fmt: skip


def timed(call: Any) -> float:
    """Microseconds of one call in a replayed CUDA graph of eight."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / 8


def main() -> None:
    """Prints one JSON object per config."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arithmetic", action="append")
    parser.add_argument("--head-dim", type=int, action="append")
    arguments = parser.parse_args()
    for (arithmetic, head_dim), configs in CANDIDATES.items():
        if arithmetic not in (arguments.arithmetic or [arithmetic]) or head_dim not in (
            arguments.head_dim or [head_dim]
        ):
            continue
        for batch, seqlen, heads in SHAPES[head_dim]:
            problem = AttentionProblem(
                batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=heads, num_heads_kv=heads,
                head_dim=head_dim, head_dim_v=head_dim, dtype="float32", softmax_scale=head_dim**-0.5,
                precision=arithmetic,
            )  # fmt: skip
            operands = make_operands(problem, "cuda")
            sample = Sample(problem, operands)
            q, k, v = (x.transpose(1, 2).contiguous() for x in operands[:3])

            def peer(q: Any = q, k: Any = k, v: Any = v) -> Any:
                return scaled_dot_product_attention(q, k, v)

            error = sample.relative_error(peer().transpose(1, 2))
            small = SMALL if batch * heads * seqlen <= 4096 and arithmetic != "ieee" else ()
            for config in dict.fromkeys((*configs, *small)):
                row: dict[str, Any] = {"arithmetic": arithmetic, "config": vars(config), "case": problem.describe()}

                def ours(config: Config = config, tensors: Any = operands[:3], how: str = arithmetic) -> Any:
                    return attention(*tensors, precision=how, kernel="flash_fwd", config=config)

                try:
                    verdict, measured = sample.judge(ours()), sample.relative_error(ours())
                    pairs = [(timed(ours), timed(peer)) for _ in range(9)]
                except Exception as failure:  # a config that does not fit is a result too
                    print(json.dumps(row | {"failed": str(failure).splitlines()[0]}), flush=True)
                    continue
                us = statistics.median(pair[0] for pair in pairs)
                row |= {"passed": verdict.passed, "relative_error": measured, "sdpa_relative_error": error, "us": us}
                row |= {"tflops": problem.flops / us * 1e-6, "sdpa_us": statistics.median(pair[1] for pair in pairs)}
                row |= {"times_sdpa": statistics.median(b / a for a, b in pairs)}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
