"""The launches before and after Hopper's backward, on rows of queries: statistics, and dQ from its float32 sums.

Statistics of a row, float32: its log-sum-exp in bits, +inf where the row sees nothing, and delta = rowsum(dO * O) -
dLSE; on request also the exact sum of its dS. They lie in whole tiles, so that TMA copies them: row r of tile t of a
sequence is query `q_begin + t * BLOCK_M + r`, where q_begin is the first query that sees a key (band.Band), rounded
down to ALIGN. In a packed call, tiles of sequence b begin at tile `cu_seqlens_q[b] // BLOCK_M + b`, as in
`scheduler.packed_tile`.

Bound: memory.
"""

from __future__ import annotations

from typing import NamedTuple

from warpwave.kernels.groups import Sequences, Window
from warpwave.kernels.prepass.in_use import begin_and_length, item_of_slot, seen_by_position
from warpwave.kernels.primitives import LOG2_E
from warpwave.runtime.parameters import Specialized
from warpwave.runtime.triton_or_stub import jit, tl

UNSPECIALIZED = ["stride_lb", "stride_lh", "stride_dlb", "stride_dlh", "num_heads", "num_tiles", "batch"]


class TokenStrides(NamedTuple):
    """Strides of batch items, tokens, heads and elements."""

    b: Specialized
    m: Specialized
    h: Specialized
    d: Specialized


@jit
def place_of(place, sequences: Sequences, batch, window: Window, BLOCK_M: tl.constexpr, ALIGN: tl.constexpr):
    """Returns the position of tile `place`: the first row and the number of queries of its sequence, the queries that
    see a key, [q_begin, q_end), the tile's number in the sequence, negative if it belongs to none, the number of the
    packed sequence, and q_begin before it is rounded down to ALIGN."""
    begin = 0
    item = 0
    tile = place
    seqlen_q = sequences.seqlen_q
    seqlen_k = sequences.seqlen_k
    if sequences.IS_VARLEN:
        item, first_place = item_of_slot(place, sequences.cu_seqlens_q_ptr, sequences.total_q, batch, BLOCK_M)
        tile = place - first_place
        begin, seqlen_q = begin_and_length(sequences.cu_seqlens_q_ptr, item, 0, sequences.total_q, True)
        _, seqlen_k = begin_and_length(sequences.cu_seqlens_k_ptr, item, 0, sequences.total_k, True)
    q_seen, q_end = seen_by_position(seqlen_q, seqlen_k, window, False)
    q_begin = q_seen // ALIGN * ALIGN
    return begin, seqlen_q, q_begin, q_end, tile, item, q_seen


@jit(do_not_specialize=UNSPECIALIZED)
def statistics_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    sinks_ptr,
    lse_log2_ptr,
    delta_ptr,
    sums_ptr,
    turns_ptr,
    of_sinks_ptr,
    strides_o: TokenStrides,
    strides_g: TokenStrides,
    stride_lb,
    stride_lh,
    stride_dlb,
    stride_dlh,
    stride_dlm,
    num_heads,
    num_tiles,
    sequences: Sequences,
    batch,
    window: Window,
    BLOCK_M: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    WIDTH_V: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Computes the statistics of one tile of queries of one head, and zeroes its count of turns.

    Args:
        sums_ptr: the exact sum of dS of each row, dLSE + P(sink) * delta, stored if given, as the statistics are.
        of_sinks_ptr: (batch * num_heads, num_tiles): the contribution of the tile's rows to the gradient of their
            head's sink.
    """
    place = tl.program_id(0) % num_tiles
    batch_head = (tl.program_id(0) // num_tiles).to(tl.int64)
    head = batch_head % num_heads
    item = batch_head // num_heads
    begin, num_queries, q_begin, q_end, tile, _, q_seen = place_of(place, sequences, batch, window, BLOCK_M, ALIGN)
    first = q_begin + tile * BLOCK_M
    lanes = tl.arange(0, BLOCK_M)
    inside = (first + lanes < q_end) & (tile >= 0)
    rows = (begin + first + lanes).to(tl.int64)
    dims = tl.arange(0, WIDTH_V)
    # What arrives at a query that sees nothing must have no effect, NaN included. A mask or bias leaves its output 0.
    cells = (inside & (first + lanes >= q_seen))[:, None] & (dims < HEAD_DIM_V)[None, :]
    out_ptr += item * strides_o.b + head * strides_o.h
    dout_ptr += item * strides_g.b + head * strides_g.h
    out = tl.load(out_ptr + rows[:, None] * strides_o.m + dims[None, :] * strides_o.d, mask=cells, other=0.0)
    dout = tl.load(dout_ptr + rows[:, None] * strides_g.m + dims[None, :] * strides_g.d, mask=cells, other=0.0)
    delta = tl.sum(tl.where(out == 0.0, 0.0, out.to(tl.float32) * dout.to(tl.float32)), 1)
    sums = tl.zeros([BLOCK_M], tl.float32)
    if dlse_ptr is not None:
        dlse = tl.load(
            dlse_ptr + item * stride_dlb + head * stride_dlh + rows * stride_dlm, mask=inside, other=0.0
        )  # fmt: skip
        sums += dlse.to(tl.float32)
        delta -= sums
    lse = tl.load(lse_ptr + item * stride_lb + head * stride_lh + rows, mask=inside, other=float("-inf"))
    sees = lse != float("-inf")
    delta = tl.where(sees, delta, 0.0)
    at = (batch_head * num_tiles + place) * BLOCK_M + lanes
    tl.store(lse_log2_ptr + at, tl.where(sees, lse * LOG2_E, float("inf")))
    tl.store(delta_ptr + at, delta)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head)
        of_sink = tl.where(sees, -tl.exp(sink - tl.where(sees, lse, 0.0)) * delta, 0.0)
        sums -= of_sink
        if dlse_ptr is not None:  # the log-sum-exp of a row that sees nothing is the sink's logit
            others = tile * BLOCK_M + lanes
            unseen = (others >= 0) & (others < num_queries) & ((others < q_begin) | (others >= q_end))
            beside = (begin + others).to(tl.int64) * stride_dlm
            of_sink += tl.load(dlse_ptr + item * stride_dlb + head * stride_dlh + beside, mask=unseen, other=0.0)
        tl.store(of_sinks_ptr + batch_head * num_tiles + place, tl.sum(of_sink, 0))
    if sums_ptr is not None:
        tl.store(sums_ptr + at, tl.where(sees, sums, 0.0))
    if turns_ptr is not None:
        tl.store(turns_ptr + batch_head * num_tiles + place, 0)


@jit(do_not_specialize=UNSPECIALIZED)
def finish_dq_kernel(
    dq_sums_ptr,
    turns_ptr,
    dq_ptr,
    stride_qb,
    stride_qm,
    stride_qh,
    num_heads,
    num_tiles,
    sequences: Sequences,
    batch,
    window: Window,
    softmax_scale,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DQ_SHARES: tl.constexpr,
    SUMS_OF_TILE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Computes dQ of one tile of queries of one head: its sums, in the order in which wgmma's accumulators lie in
    registers (joint_steps.put_dq), times the scale, rounded once. Zeros if no block stored a sum, as the count of turns
    tells."""
    place = tl.program_id(0) % num_tiles
    batch_head = (tl.program_id(0) // num_tiles).to(tl.int64)
    head = batch_head % num_heads
    item = batch_head // num_heads
    begin, _, q_begin, q_end, tile, _, _ = place_of(place, sequences, batch, window, BLOCK_M, ALIGN)
    first = tl.where(tile < 0, q_end, q_begin + tile * BLOCK_M)
    # The shares of two groups: side by side in a tile of 64 queries, one below the other in a tile of 128.
    ACROSS: tl.constexpr = 128 // BLOCK_M
    is_stored = tl.load(turns_ptr + batch_head * num_tiles + place) > 0
    sums = dq_sums_ptr + (batch_head * num_tiles + place) * SUMS_OF_TILE
    dq_ptr += item * stride_qb + head * stride_qh
    for group in tl.static_range(2):
        lanes = first + group // ACROSS * 64 + tl.arange(0, 64)
        rows = dq_ptr + (begin + lanes).to(tl.int64) * stride_qm
        for piece in tl.static_range(len(DQ_SHARES[group])):
            # A piece follows the earlier pieces of both groups. In it, the second group's columns follow the first's.
            column = 64 * ACROSS * piece + group % ACROSS * DQ_SHARES[0][piece]
            finish_piece(sums, is_stored, rows, lanes < q_end, column, softmax_scale, DQ_SHARES[group][piece], HEAD_DIM)
            sums += 64 * DQ_SHARES[group][piece]


@jit
def finish_piece(sums, is_stored, rows, inside, column, softmax_scale, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Stores WIDTH columns of 64 rows of dQ, from `column` on."""
    x = tl.load(sums + tl.arange(0, 64 * WIDTH), mask=is_stored, other=0.0)
    x = tl.reshape(tl.permute(tl.reshape(x, [WIDTH // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5]), [64, WIDTH])
    dims = column + tl.arange(0, WIDTH)
    result = (x * softmax_scale).to(rows.dtype.element_ty)
    tl.store(rows[:, None] + dims[None, :], result, mask=inside[:, None] & (dims < HEAD_DIM)[None, :])
