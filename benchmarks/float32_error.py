"""Emulates each arithmetic of float32 products on a CPU and measures its error.

    PYTHONPATH=. python benchmarks/float32_error.py --out benchmarks/records/RECORD.json

The emulated matrix unit multiplies exactly, adds the products of one instruction exactly, and truncates the sum to 24
bits when it adds it to its accumulator: Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores"
(2021). It has none of the extra bits of later units, so real hardware is at least as accurate. CUDA cores round each
multiply-add to nearest. The softmax is that of `flash_fwd`: online, tiles of 64 keys. Products of scaled float16, which
only `hopper/flash_fwd` computes, are summed in its order.

The error is defined as in the promise (warpwave.precision): |out - exact| / |exact|, Euclidean norms of the output.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.conformance.datasets import DATA_SETS, Data, fill
from warpwave.precision import ARITHMETICS

BLOCK_N = 64
HEAD_DIMS = (16, 64, 128, 256)
# (independent problems, rows of each, keys): single rows, whose error is one draw, and many rows.
SIZES = ((256, 1, 2), (256, 1, 8), (64, 1, 64), (8, 32, 64), (16, 1, 512), (2, 64, 512), (1, 64, 2048), (1, 16, 8192))
LOG2_E = math.log2(math.e)
FLOAT16_PARTS = {"fp16x1": 1, "fp16x3": 2}
LIFTS = {"fp16x1": 1.0, "fp16x3": 2048.0}  # factor of probabilities before they become float16

Round = Callable[[Tensor], Tensor]


def nearest(x: Tensor) -> Tensor:
    """Rounds float64 to the nearest float32, as float64."""
    return x.float().double()


def cut(x: Tensor) -> Tensor:
    """Rounds float64 toward zero to a float32, as float64."""
    rounded = x.float()
    inner = torch.nextafter(rounded, torch.zeros_like(rounded))
    return torch.where(rounded.double().abs() > x.abs(), inner, rounded).double()


def _tf32(x: Tensor) -> Tensor:
    return ((x.float().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32).double()


def _tf32_cut(x: Tensor) -> Tensor:
    return (x.float().view(torch.int32) & -0x2000).view(torch.float32).double()


def _bfloat16(x: Tensor) -> Tensor:
    return x.float().bfloat16().double()


def parts(x: Tensor, arithmetic: str, scale: float | None = None) -> list[Tensor]:
    """Returns the parts of an operand, as `kernels.primitives.operand` or `kernels.scale_ahead`, the largest first.

    Args:
        scale: of float16, for probabilities; None for the power of two that brings the largest magnitude to 2^14.
    """
    if arithmetic in FLOAT16_PARTS:
        of_head = torch.tensor(scale) if scale else 2.0 ** (14 - x.abs().amax((-2, -1), keepdim=True).log2().floor())
        found, x = [], x * of_head
        for _ in range(FLOAT16_PARTS[arithmetic]):
            found.append(x.float().half().double())
            x = x - found[-1]
        return [part / of_head for part in found]
    if arithmetic == "tf32":
        return [_tf32(x)]
    if arithmetic == "tf32x3":
        high = _tf32_cut(x)
        return [high, _tf32(x - high)]
    found = []
    for _ in range({"ieee": 0, "bf16x3": 2, "bf16x6": 3}[arithmetic]):
        found.append(_bfloat16(x))
        x = x - found[-1]
    return found or [x]


def product(a: Tensor, b: Tensor, acc: Tensor, arithmetic: str, scale: float | None = None) -> Tensor:
    """Returns `acc + a b` as `kernels.primitives.product` computes it, or `kernels.hopper.split_float32` for two parts
    of float16. All values are float32 numbers held in float64.

    Args:
        scale: of a, if a is not an input of the call.
    """
    step, rounding = (1, nearest) if arithmetic == "ieee" else (8 if arithmetic.startswith("tf32") else 16, cut)
    left, right = parts(a, arithmetic, scale), parts(b, arithmetic)
    if arithmetic == "fp16x3":
        total = torch.zeros_like(acc)  # of the small products, then of each 128 columns' large ones
        for i, j in ((1, 0), (0, 1)):
            for k in range(0, a.shape[-1], step):
                total = rounding(total + left[i][..., k : k + step] @ right[j][..., k : k + step, :])
        for group in range(0, a.shape[-1], 128):
            large = torch.zeros_like(acc)
            for k in range(group, min(group + 128, a.shape[-1]), step):
                large = rounding(large + left[0][..., k : k + step] @ right[0][..., k : k + step, :])
            total = nearest(total + large)
        return nearest(acc + total)
    order = [(i, j) for total in range(len(left) - 1, -1, -1) for i in range(total, -1, -1) for j in (total - i,)]
    if arithmetic == "bf16x6":
        order = [(2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0)]
    # Sums of split products go through a fresh accumulator, and meet acc at the end, in plain float32.
    sums = acc if len(left) == 1 else torch.zeros_like(acc)
    for i, j in order:
        for k in range(0, a.shape[-1], step):
            sums = rounding(sums + left[i][..., k : k + step] @ right[j][..., k : k + step, :])
    return sums if len(left) == 1 else nearest(acc + sums)


def attention(q: Tensor, k: Tensor, v: Tensor, arithmetic: str) -> Tensor:
    """Returns out for q [..., rows, head_dim], k [..., keys, head_dim] and v [..., keys, head_dim_v]; float64."""
    scale = nearest(torch.tensor(q.shape[-1] ** -0.5 * LOG2_E, dtype=torch.float64))
    m = q.new_full(q.shape[:-1], -math.inf)
    total, acc = torch.zeros_like(m), q.new_zeros(*q.shape[:-1], v.shape[-1])
    for begin in range(0, k.shape[-2], BLOCK_N):
        keys, values = k[..., begin : begin + BLOCK_N, :], v[..., begin : begin + BLOCK_N, :]
        scores = q.new_zeros(*q.shape[:-1], keys.shape[-2])
        scores = nearest(product(q, keys.transpose(-1, -2), scores, arithmetic) * scale)
        m_new = torch.maximum(m, scores.amax(-1))
        p = nearest(torch.exp2(nearest(scores - m_new[..., None])))
        alpha = nearest(torch.exp2(nearest(m - m_new)))
        total = nearest(total * alpha + nearest(p.sum(-1)))
        acc = product(p, values, nearest(acc * alpha[..., None]), arithmetic, LIFTS.get(arithmetic))
        m = m_new
    return nearest(acc / total[..., None])


def relative_errors(
    arithmetic: str, data: Data, head_dim: int, problems: int, rows: int, keys: int, seed: int
) -> Tensor:
    """Returns one error for each of `problems` independent calls on a data set of the contract."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(problems, n, head_dim, generator=g) for n in (rows, keys, keys))
    fill(data, head_dim, q, k, v)
    q, k, v = q.double(), k.double(), v.double()
    exact = torch.softmax(q @ k.transpose(-1, -2) * head_dim**-0.5, -1) @ v
    return (attention(q, k, v, arithmetic) - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))


def measure(
    arithmetics: Iterable[str], head_dims: tuple[int, ...], sizes: tuple[tuple[int, int, int], ...], seeds: int
) -> Iterator[dict[str, Any]]:
    """Returns one row per combination: the largest and the median error over all calls and seeds."""
    for arithmetic in arithmetics:
        for head_dim in head_dims:
            for problems, rows, keys in sizes:
                for data in DATA_SETS:
                    errors = torch.cat(
                        [relative_errors(arithmetic, data, head_dim, problems, rows, keys, s) for s in range(seeds)]
                    )
                    yield {
                        "arithmetic": arithmetic, "data": data, "head_dim": head_dim, "rows": rows, "keys": keys,
                        "calls": len(errors), "median": errors.median().item(), "max": errors.max().item(),
                    }  # fmt: skip


def main() -> None:
    """Writes one JSON object per line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--arithmetic", choices=ARITHMETICS, nargs="+", default=list(ARITHMETICS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with arguments.out.open("x") as file:  # never overwrites a file
        for row in measure(arguments.arithmetic, HEAD_DIMS, SIZES, arguments.seeds):
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
