"""The rows of sequences for launches beside the attention: tiles of a packed tensor, and the rows of a sequence that
are in use, or that the positional mask shows."""

from __future__ import annotations

from warpwave.kernels.groups import Sequences, Window
from warpwave.runtime.triton_or_stub import jit, tl


@jit
def begin_and_length(cu_seqlens_ptr, item, seqlen, total, PACKED: tl.constexpr):
    """Returns begin and length of sequence `item`, clamped to a packed tensor: invalid offsets still read inside it."""
    if PACKED:
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + item), 0), total)
        length = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + item + 1), begin), total) - begin
    else:
        begin = 0
        length = seqlen
    return begin, length


@jit
def item_of_slot(slot, cu_seqlens_ptr, total, batch, BLOCK_ROWS: tl.constexpr):
    """Returns the packed sequence that owns a slot of BLOCK_ROWS rows, and its first slot.

    Sequence b owns the slots from `cu_seqlens[b] // BLOCK_ROWS + b` on (hopper/scheduler.py): as many as it has tiles,
    or one more.
    """
    lanes = tl.arange(0, 128)
    before = 0
    for first_item in range(0, batch, 128):
        item = first_item + lanes
        begin = tl.load(cu_seqlens_ptr + item, mask=item < batch, other=0)
        begin = tl.minimum(tl.maximum(begin, 0), total)
        before += tl.sum(((begin // BLOCK_ROWS + item <= slot) & (item < batch)).to(tl.int32), 0)
    owner = tl.maximum(before - 1, 0)
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + owner), 0), total)
    return owner, begin // BLOCK_ROWS + owner


@jit
def seen_by_position(length_q, length_k, window: Window, IS_KEYS: tl.constexpr):
    """Returns the range of keys that some query sees, or of queries that see some key, by position alone, as
    hopper/flash_bwd/band.py does; (0, 0) if it is empty."""
    high = length_k - length_q + window.right
    if window.TOP_LEFT:
        high = tl.minimum(high, 0)
    low = length_k - length_q - window.left
    begin = 0
    if IS_KEYS:
        end = length_k
        if window.HAS_HIGH:
            end = tl.minimum(end, length_q + high)
        if window.HAS_LOW:
            begin = tl.maximum(low, 0)
        sees = length_q > 0
    else:
        end = length_q
        if window.HAS_HIGH:
            begin = tl.maximum(-high, 0)
        if window.HAS_LOW:
            end = tl.minimum(end, length_k - low)
        sees = length_k > 0
    sees &= begin < end
    if window.HAS_LOW and window.TOP_LEFT:  # the window may lie past the causal edge of every query
        sees &= low <= high
    return tl.where(sees, begin, 0), tl.where(sees, end, 0)


@jit
def rows_in_use(item, sequences: Sequences, window: Window, IS_KEYS: tl.constexpr):
    """Returns where a sequence begins, and its rows in use [low_row, high_row): all queries, and the keys that some
    query sees."""
    begin_q, length_q = begin_and_length(
        sequences.cu_seqlens_q_ptr, item, sequences.seqlen_q, sequences.total_q, sequences.IS_VARLEN
    )
    if IS_KEYS:
        begin, length_k = begin_and_length(
            sequences.cu_seqlens_k_ptr, item, sequences.seqlen_k, sequences.total_k, sequences.IS_VARLEN
        )
        low_row, high_row = seen_by_position(length_q, length_k, window, True)
        return begin, low_row, high_row
    else:
        return begin_q, 0, length_q
