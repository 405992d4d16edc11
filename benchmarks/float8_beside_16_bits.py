"""Times `hopper/flash_fwd_fp8` beside `hopper/flash_fwd` on the same numbers, and checks their results.

    PYTHONPATH=. python -m benchmarks.float8_beside_16_bits RECORD [--rounds 7] [--seconds 120] [--configs] [--blocks 0]

Heads times head_dim is 2,048, at 16 x 1024, 4 x 4096 and 1 x 16384 queries and keys. Both kernels take turns in every
round. q, k and v of the 8-bit call are the 16-bit ones times their factors; out may differ by 8 % of its root mean
square, the rounding of q, k, v and the probabilities to 4 bits. With --configs every config of the 8-bit kernel is
timed, not only the default. With --blocks 64 or 128, blocks of so many tokens have factors of their own.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from warpwave import attention
from warpwave.checks import Options, describe_call
from warpwave.gpu import current_gpu
from warpwave.kernels.hopper import flash_fwd_fp8
from warpwave.problem import QuantizedOperands
from warpwave.workbench.bench import environment
from warpwave.workbench.bench.timing import time_interleaved
from warpwave.workbench.output_files import write_whole

HEAD_DIMS = (64, 128, 256)
SIZES = ((16, 1024), (4, 4096), (1, 16384))
LARGEST = 448.0  # of float8_e4m3fn
MOST_ERROR = 0.08


def quantized(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x, (batch, tokens, heads, width), in 8 bits, and a factor for each head or for each block of tokens."""
    tokens = x.shape[1]
    heads_first = x.float().transpose(1, 2)
    many = tokens // block if block else 1
    factor = heads_first.unflatten(2, (many, -1)).abs().amax((3, 4)) / LARGEST
    eights = (heads_first / factor.repeat_interleave(tokens // many, 2)[..., None]).to(torch.float8_e4m3fn)
    return eights.transpose(1, 2).contiguous(), factor if block else factor[..., 0]


def point(head_dim: int, batch: int, seqlen: int, causal: bool, args: Any) -> dict[str, Any]:
    """Returns the measurements of one size."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, seqlen, 2048 // head_dim, head_dim)
    wide = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3)]
    narrow, factors = zip(*(quantized(x, args.blocks) for x in wide), strict=True)
    named = dict(zip(("q_descale", "k_descale", "v_descale"), factors, strict=True))
    problem = describe_call(QuantizedOperands(*narrow, **named), Options(causal="bottom_right" if causal else ""))
    configs = flash_fwd_fp8.configs(problem, current_gpu(torch.device("cuda")))
    runs = {"bfloat16": partial(attention, *wide, causal=causal, kernel="hopper/flash_fwd")}
    for config in configs if args.configs else configs[:1]:
        name = f"float8 {config.block_m}x{config.block_n}, {config.num_stages} stages"
        runs[name] = partial(attention, *narrow, **named, causal=causal, kernel="hopper/flash_fwd_fp8", config=config)
    flops = 4 * batch * (2048 // head_dim) * seqlen**2 * head_dim / (2 if causal else 1)
    expected = runs["bfloat16"]().float()
    errors = {
        name: ((run().float() - expected).pow(2).mean() / expected.pow(2).mean()).sqrt() for name, run in runs.items()
    }
    timed = time_interleaved(runs, device="cuda", rounds=args.rounds, flush_l2=False)
    found: dict[str, Any] = {"head_dim": head_dim, "batch": batch, "seqlen": seqlen, "causal": causal}
    for name, samples in timed.items():
        found[name] = {
            "us": [round(x, 2) for x in samples.samples_us],
            "tflops": round(flops / samples.median_us / 1e6, 1),
            "speedup": round(timed["bfloat16"].median_us / samples.median_us, 3),
            "error": round(errors[name].item(), 4),
            "is_right": bool(errors[name] <= MOST_ERROR),
        }
    return found


def main() -> None:
    """Times all sizes, the longest sequences first, and writes the record after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--configs", action="store_true")
    parser.add_argument("--blocks", type=int, choices=(0, 64, 128), default=0)
    args = parser.parse_args()
    begin, found = time.monotonic(), []
    for batch, seqlen in reversed(SIZES):
        for head_dim in HEAD_DIMS:
            for causal in (False, True):
                if time.monotonic() - begin > args.seconds:
                    continue
                found.append(point(head_dim, batch, seqlen, causal, args))
                what = f"head_dim {head_dim}, {batch} x {seqlen}, {'causal' if causal else 'full'}"
                print(what, {k: v for k, v in found[-1].items() if isinstance(v, dict)}, flush=True)
                write_whole(args.record, json.dumps({"environment": environment.describe("cuda"), "points": found}))


if __name__ == "__main__":
    main()
