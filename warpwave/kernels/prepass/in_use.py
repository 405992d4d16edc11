"""The rows of an operand that a launch before the attention converts: tiles of a packed tensor, and the rows of a
sequence that are in use."""

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
def rows_in_use(item, sequences: Sequences, window: Window, IS_KEYS: tl.constexpr):
    """Returns where a sequence begins, and its rows in use [low_row, high_row): for keys those that some query sees, as
    in hopper/visible.py."""
    begin_q, length_q = begin_and_length(
        sequences.cu_seqlens_q_ptr, item, sequences.seqlen_q, sequences.total_q, sequences.IS_VARLEN
    )
    if IS_KEYS:
        begin, length = begin_and_length(
            sequences.cu_seqlens_k_ptr, item, sequences.seqlen_k, sequences.total_k, sequences.IS_VARLEN
        )
        low_row = 0
        high_row = length
        if window.HAS_LOW:
            low_row = tl.minimum(tl.maximum(length - length_q - window.left, 0), length)
        if window.HAS_HIGH:
            high = length - length_q + window.right
            if window.TOP_LEFT:
                high = tl.minimum(high, 0)
            high_row = tl.maximum(tl.minimum(high_row, length_q + high), low_row)
        return begin, low_row, high_row
    else:
        return begin_q, 0, length_q
