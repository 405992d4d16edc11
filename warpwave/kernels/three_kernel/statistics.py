"""Device code of three_kernel between Hopper's two products: combines the statistics of a row's tiles.

    R = max r_t       L = sum 2^(r_t - R) l_t       factor_t = 2^(r_t - R)       row_scale = 1 / L

A tile's probabilities are relative to its own reference r_t, in bits, and l_t is their sum. Milakov & Gimelshein,
"Online normalizer calculation for softmax" (2018).

Bound: launch latency; 12 bytes a row and tile of 256 keys are read.
"""

from __future__ import annotations

from warpwave.kernels.partials import await_launch_before, inverse_sum, join, lse_of
from warpwave.kernels.primitives import LOG2_E, rounded
from warpwave.runtime.triton_or_stub import jit, tl

ROWS = 64  # of a program, equal to the rows that a warpgroup of the second product multiplies
MOST_TILES = 32  # tiles that are read together
UNSPECIALIZED = [
    *("stride_lb", "stride_lh", "num_heads_q", "first_head", "row_begin", "row_end", "diagonal", "key_tiles"),
    *("chunk_rows", "num_groups"),
]


@jit(do_not_specialize=UNSPECIALIZED)
def chunk_statistics_kernel(
    p_ptr,
    reference_ptr,
    top_ptr,
    sum_ptr,
    lowered_ptr,
    row_scale_ptr,
    lse_ptr,
    sinks_ptr,
    stride_lb,
    stride_lh,
    num_heads_q,
    first_head,
    row_begin,
    row_end,
    diagonal,
    key_tiles,
    chunk_rows,
    num_groups,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    LAUNCHED_AHEAD: tl.constexpr,
):
    """Computes, for ROWS queries of one head: the factor of each tile, which overwrites its largest probability;
    whether a factor of the tile is not 1; the factor of P V; and the log-sum-exp.

    reference, top and sum are (heads, key_tiles, chunk_rows), lowered (heads, key_tiles, groups of ROWS rows). `p_ptr`
    only gives the dtype of P. Block b of two groups sees (diagonal + b) / 2 tiles, at least 1 and at most key_tiles.
    """
    if LAUNCHED_AHEAD:
        await_launch_before()
    group = tl.program_id(0) % num_groups
    chunk_head = (tl.program_id(0) // num_groups).to(tl.int64)
    in_chunk = group * ROWS + tl.arange(0, ROWS)
    rows = row_begin + in_chunk
    inside = rows < row_end
    tiles = tl.minimum(tl.maximum((diagonal + group // 2) >> 1, 1), key_tiles)
    here = chunk_head * key_tiles * chunk_rows + in_chunk

    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    top = tl.zeros([ROWS], tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        there = here[None, :] + (tile * chunk_rows.to(tl.int64))[:, None]
        seen = inside[None, :] & (tile < tiles)[:, None]
        reference = tl.load(reference_ptr + there, mask=seen, other=float("-inf"))  # [TILES, ROWS]
        m_new = tl.maximum(m_i, tl.max(reference, 0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        factor = tl.math.exp2(reference - shift[None, :])
        before = tl.math.exp2(m_i - shift)
        sums = tl.load(sum_ptr + there, mask=seen, other=0.0)
        tops = tl.load(top_ptr + there, mask=seen, other=0.0)
        l_i = l_i * before + tl.sum(sums * factor, 0)
        top = tl.maximum(top * before, tl.max(tops * factor, 0))
        m_i = m_new

    shift = tl.where(m_i == float("-inf"), 0.0, m_i)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        there = here[None, :] + (tile * chunk_rows.to(tl.int64))[:, None]
        seen = inside[None, :] & (tile < tiles)[:, None]
        reference = tl.load(reference_ptr + there, mask=seen, other=float("-inf"))
        # A tile of which a row sees no key holds zeros for it, which need no factor.
        factor = tl.where(reference == float("-inf"), 1.0, tl.math.exp2(reference - shift[None, :]))
        tl.store(top_ptr + there, factor, mask=seen)
        is_lowered = tl.max((factor != 1.0).to(tl.float32), 1)  # [TILES]
        of_group = lowered_ptr + (chunk_head * key_tiles + tile) * num_groups + group
        tl.store(of_group, is_lowered, mask=tile < tiles)

    # 16-bit rounding adds to a row's largest probability. As a share of the sum, that error is added to the divisor of
    # out, so that it cancels if that probability outweighs the others, whatever a sink adds.
    added = (rounded(top, p_ptr.dtype.element_ty).to(tl.float32) - top) * inverse_sum(l_i)
    scale = tl.full([ROWS], 1.0, tl.float32)
    head = (first_head + chunk_head) % num_heads_q
    if HAS_SINKS:
        # The sink is one more key, whose value is zero.
        sink_log2 = tl.load(sinks_ptr + head) * LOG2_E
        m_i, l_i, scale, _ = join(m_i, l_i, sink_log2, 1.0)
    row_scale = tl.where(l_i == 0.0, 0.0, scale * inverse_sum(l_i * (1.0 + added)))
    tl.store(row_scale_ptr + chunk_head * chunk_rows + in_chunk, row_scale, mask=inside)
    if WRITE_LSE:
        batch = (first_head + chunk_head) // num_heads_q
        tl.store(lse_ptr + batch * stride_lb + head * stride_lh + rows, lse_of(m_i, l_i), mask=inside)
