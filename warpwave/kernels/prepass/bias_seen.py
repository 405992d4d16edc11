"""A launch before gradients that finds the queries that see no key, and the keys that no query sees, because of a bias
of minus infinity, alone or together with a mask.

Their probabilities are 0, but tensor cores multiply whole tiles, and 0 * NaN is NaN. A block reads a tile of the bias
once and flags each of its rows and columns; pairs that the mask or position hides count as hidden. Bound: memory. The
bias is read once; axes along which it is broadcast are not read again, unless the mask has them.
"""

from __future__ import annotations

import torch

from warpwave.kernels.arguments import broadcast_strides
from warpwave.kernels.primitives import band_visible
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch
from warpwave.runtime.triton_or_stub import jit, tl

BLOCK = 128  # queries and keys of a tile


@jit(do_not_specialize=["num_heads", "num_queries", "tiles_m", "tiles_n", "low", "high"])
def bias_seen_kernel(
    bias_ptr,
    mask_ptr,
    queries_ptr,
    keys_ptr,
    stride_bias_b,
    stride_bias_h,
    stride_bias_m,
    stride_bias_n,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    num_heads,
    num_queries,
    num_keys,
    tiles_m,
    tiles_n,
    low,
    high,
    BLOCK: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr,
):
    """Flags the queries and keys of a tile that belong to a visible pair, in int8 tensors of zeros, (item, query) and
    (item, key). Other programs may store the same 1."""
    pid = tl.program_id(0)
    tile_n = pid % tiles_n
    tile_m = pid // tiles_n % tiles_m
    item = (pid // tiles_n // tiles_m).to(tl.int64)
    rows = tile_m * BLOCK + tl.arange(0, BLOCK)
    keys = tile_n * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < num_queries)[:, None] & (keys < num_keys)[None, :]
    bias_ptr += item // num_heads * stride_bias_b + item % num_heads * stride_bias_h
    cells = rows.to(tl.int64)[:, None] * stride_bias_m + keys.to(tl.int64)[None, :] * stride_bias_n
    bias = tl.load(bias_ptr + cells, mask=inside, other=float("-inf")).to(tl.float32)
    shown = bias != float("-inf")
    if mask_ptr is not None:
        mask_ptr += item // num_heads * stride_mask_b + item % num_heads * stride_mask_h
        cells = rows.to(tl.int64)[:, None] * stride_mask_m + keys.to(tl.int64)[None, :] * stride_mask_n
        shown = shown & (tl.load(mask_ptr + cells, mask=inside, other=0) != 0)
    if HAS_LOW or HAS_HIGH:
        shown = shown & band_visible(rows, keys, low, high, HAS_LOW, HAS_HIGH)
    shown = shown.to(tl.int32)
    seen = tl.max(shown, 1).to(tl.int8)
    tl.store(queries_ptr + item * num_queries + rows, seen, mask=(rows < num_queries) & (seen != 0))
    seen = tl.max(shown, 0).to(tl.int8)
    tl.store(keys_ptr + item * num_keys + keys, seen, mask=(keys < num_keys) & (seen != 0))


def shapes(problem: AttentionProblem) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Returns the shapes of the flags: (batch, heads, queries) and (batch, heads, keys). Axes are those of the bias
    broadcast with a mask; queries and keys are all if position hides something."""
    assert problem.bias_shape is not None
    batch, heads, *lines = map(max, problem.bias_shape, problem.mask_shape or problem.bias_shape)
    queries, keys = (problem.seqlen_q, problem.seqlen_k) if problem.has_band else lines
    return (batch, heads, queries), (batch, heads, keys)


def specify(
    problem: AttentionProblem,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    of_queries: torch.Tensor,
    of_keys: torch.Tensor,
) -> launch.Launch:
    """Returns the launch that flags the queries and the keys of `bias` and `mask`, in int8 tensors of zeros of the
    `shapes`."""
    batch, heads, queries = of_queries.shape
    keys = of_keys.shape[2]
    tiles_m, tiles_n = -(-queries // BLOCK), -(-keys // BLOCK)
    low, high = problem.band(problem.seqlen_q, problem.seqlen_k)
    return launch.Launch(
        kernel=bias_seen_kernel,
        grid=batch * heads * tiles_m * tiles_n,
        tensors=(bias, mask, of_queries, of_keys),
        scalars=[
            *broadcast_strides(bias), *broadcast_strides(mask),
            heads, queries, keys, tiles_m, tiles_n, low or 0, high or 0,
        ],
        constants={"BLOCK": BLOCK, "HAS_LOW": low is not None, "HAS_HIGH": high is not None},
        options={"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True},
    )  # fmt: skip
