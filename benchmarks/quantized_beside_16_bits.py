"""Times quantized calls of `hopper/flash_fwd` beside the same calls in bfloat16, cuDNN and, if it is installed,
SageAttention 1, and checks their results.

    PYTHONPATH=. python -m benchmarks.quantized_beside_16_bits RECORD [--rounds 5] [--seconds 120]
        [--blocks 0 128] [--head-dims 64 128 256] [--ways "float8" "int8, v bfloat16"] [--vary FIELD ...] [--quantize]

Heads times head_dim is 2,048, at 16 x 1024, 4 x 4096 and 1 x 16384 queries and keys. All calls are compiled first, in
as many processes as there are CPU cores. All contenders then take turns in every round. q, k and v of a quantized call
are the 16-bit ones divided by their factors and rounded; `MOST_ERROR` allows for that. With --vary, each config that
differs from the default in these fields alone is timed too. With --quantize, `quantize` and the call together are timed
too; SageAttention always quantizes. With --blocks 64 or 128, blocks of so many tokens have factors of their own. At the
end a table states the TFLOP/s of 16 bits and the ratios to them, and marks results that
are wrong.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from warpwave import attention, quantize
from warpwave.checks.calls import describe_call
from warpwave.gpu import current_gpu
from warpwave.kernels.hopper import flash_fwd
from warpwave.operands import QuantizedOperands
from warpwave.options import Options
from warpwave.workbench.bench import environment
from warpwave.workbench.bench.timing import time_interleaved
from warpwave.workbench.output_files import write_whole

HEAD_DIMS = (64, 128, 256)
SIZES = ((1, 16384), (4, 4096), (16, 1024))  # batch, tokens
WIDTH = 2048  # heads times head_dim
FP8, INT8 = torch.float8_e4m3fn, torch.int8
# Name -> the dtypes of q and k, and of v.
WAYS: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "float8": (FP8, FP8),
    "float8, v bfloat16": (FP8, torch.bfloat16),
    "int8, v bfloat16": (INT8, torch.bfloat16),
    "int8": (INT8, INT8),
}
MOST_ERROR = {FP8: 0.08, INT8: 0.04}  # of out, relative to its root mean square
VARIABLE = [field.name for field in fields(flash_fwd.Config)]
SIXTEEN_BITS, CUDNN, SAGE = "bfloat16", "cuDNN", "SageAttention"
SAGE_HEAD_DIMS = (64, 128)


class Point(NamedTuple):
    """A size, and what is timed there.

    Attributes:
        ways: names of `WAYS`.
        varied: the fields in which a config may differ from the default.
        with_quantize: whether `quantize` and the call together are timed too.
    """

    head_dim: int
    batch: int
    seqlen: int
    causal: bool
    block: int
    ways: tuple[str, ...]
    varied: tuple[str, ...]
    with_quantize: bool = False

    @property
    def flops(self) -> float:
        return 4 * self.batch * WIDTH * self.seqlen**2 / (2 if self.causal else 1)


def wide_operands(head_dim: int, batch: int, seqlen: int) -> list[torch.Tensor]:
    """Returns q, k and v in bfloat16, the same at every call."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, seqlen, WIDTH // head_dim, head_dim)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3)]


def options_of(way: str, block: int) -> dict[str, Any]:
    """Returns the options with which `quantize` makes a way's tensors; block 0 stands for factors of heads."""
    dtype, dtype_v = WAYS[way]
    return {"dtype": dtype, "dtype_v": dtype_v, "granularity": block or "head"}


def contenders(at: Point) -> dict[str, Callable[[], torch.Tensor]]:
    """Returns the calls of a point, by name."""
    wide = wide_operands(at.head_dim, at.batch, at.seqlen)
    found: dict[str, Any] = {
        SIXTEEN_BITS: partial(attention, *wide, causal=at.causal, kernel=flash_fwd.NAME),
        CUDNN: partial(by_cudnn, *wide, causal=at.causal),
    }
    if at.head_dim in SAGE_HEAD_DIMS and importlib.util.find_spec("sageattention") is not None:
        q, k, v = wide
        found[SAGE] = partial(by_sage, q, k.clone(), v, causal=at.causal)  # it changes k
    for way in at.ways:
        asked = options_of(way, at.block)
        narrow = quantize(*wide, **asked).arguments()
        problem = describe_call(QuantizedOperands(**narrow), Options(causal="bottom_right" if at.causal else ""))
        configs = flash_fwd.configs(problem, current_gpu(torch.device("cuda")))
        for config in configs:
            if config == replace(configs[0], **{name: getattr(config, name) for name in at.varied}):
                of_config: dict[str, Any] = {"causal": at.causal, "kernel": flash_fwd.NAME, "config": config}
                found[name_of(way, config)] = partial(attention, **narrow, **of_config)
        if at.with_quantize:
            found[f"{way}: quantize and attention"] = partial(quantize_and_attend, wide, asked, at.causal)
    return found


def quantize_and_attend(wide: Sequence[torch.Tensor], asked: dict[str, Any], causal: bool) -> torch.Tensor:
    """Returns attention of 16-bit operands that are quantized in this call."""
    return attention(**quantize(*wide, **asked).arguments(), causal=causal)


def name_of(way: str, config: flash_fwd.Config) -> str:
    """Returns the name of a contender; no two configs of a way share one."""
    shared = f", {config.blocks_per_sm} blocks an SM" if config.blocks_per_sm > 1 else ""
    return f"{way}: {config.block_m}x{config.block_n}, {config.num_stages} stages{shared}"


def by_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Returns attention by cuDNN in 16 bits."""
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def by_sage(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Returns attention by SageAttention 1, which quantizes q and k to int8 by itself."""
    sage = importlib.import_module("sageattention")
    out: torch.Tensor = sage.sageattn(q, k, v, tensor_layout="NHD", is_causal=causal)
    return out


def names_of(at: Point) -> list[str]:
    """Returns the names of the contenders of a point."""
    return list(contenders(at))


def compile_one(task: tuple[Point, str]) -> None:
    """Calls a contender once, which leaves its code in Triton's cache."""
    at, name = task
    contenders(at)[name]()
    torch.cuda.synchronize()


def compile_all(points: Sequence[Point]) -> None:
    """Compiles the contenders of all points. Sizes change the code of a default config alone, which 16 bits have."""
    # Forked before this process has a context of the GPU.
    with multiprocessing.get_context("fork").Pool(max(1, (os.cpu_count() or 2) - 1)) as pool:
        names = pool.map(names_of, points, chunksize=1)
        tasks = {
            (at.head_dim, at.causal, at.block, name, at.batch if name == SIXTEEN_BITS else 0): (at, name)
            for at, found in zip(points, names, strict=True)
            for name in found
        }
        pool.map(compile_one, tasks.values(), chunksize=1)


def measure(at: Point, rounds: int) -> dict[str, Any]:
    """Returns the measurements of a point."""
    runs = contenders(at)
    expected = runs[SIXTEEN_BITS]().float()
    power = expected.pow(2).mean().sqrt()
    timed = time_interleaved(runs, device="cuda", rounds=rounds, flush_l2=False, warmup_s=0.05)
    defaults = {way: next(name for name in runs if name.startswith(f"{way}: ")) for way in at.ways}
    found: dict[str, Any] = at._asdict() | {"defaults": defaults}
    for name, samples in timed.items():
        error = ((runs[name]().float() - expected).pow(2).mean().sqrt() / power).item()
        found[name] = {
            "us": [round(x, 2) for x in samples.samples_us],
            "tflops": round(at.flops / samples.median_us / 1e6, 1),
            "speedup": round(timed[SIXTEEN_BITS].median_us / samples.median_us, 3),
            "error": round(error, 4),
            "is_right": error <= MOST_ERROR[INT8 if name.startswith(("int8", SAGE)) else FP8],
        }
    return found


def table(points: list[dict[str, Any]]) -> str:
    """Returns a line for each point: TFLOP/s of 16 bits, then each contender's ratio to them."""
    lines = []
    for point in points:
        timed = {name: x for name, x in point.items() if isinstance(x, dict) and name != "defaults"}
        at = f"{point['batch']} x {point['seqlen']}, head_dim {point['head_dim']}{', causal' * point['causal']}"
        ratios = [f"{name} {x['speedup']:.2f}{'' if x['is_right'] else ' WRONG'}" for name, x in timed.items()]
        lines.append(f"{at}: {timed[SIXTEEN_BITS]['tflops']:.0f} TFLOP/s; {'; '.join(ratios)}")
    return "\n".join(lines)


def main() -> None:
    """Times all sizes, the longest sequences first, and writes the record after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--blocks", type=int, nargs="+", choices=(0, 64, 128), default=(0, 128))
    parser.add_argument("--head-dims", type=int, nargs="+", choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=tuple(WAYS))
    parser.add_argument("--vary", nargs="+", choices=VARIABLE, default=[], metavar="FIELD")
    parser.add_argument("--quantize", action="store_true")
    args = parser.parse_args()
    begin = time.monotonic()
    points = [
        Point(head_dim, *size, causal, block, tuple(args.ways), tuple(args.vary), args.quantize)
        for size in SIZES
        for head_dim in args.head_dims
        for causal in (False, True)
        for block in args.blocks
    ]
    compile_all(points)
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    found = []
    for point in points:
        if time.monotonic() - begin > args.seconds:
            break
        found.append(measure(point, args.rounds))
        print(table(found[-1:]), flush=True)
        write_whole(args.record, json.dumps({"environment": environment.describe("cuda"), "points": found}))
    print(table(found))


if __name__ == "__main__":
    main()
