"""Blocks that split the keys of a tile of queries. Each stores the state of its rows, which a following launch merges
(kernels/partials.py).

The schedule counts a head once for each of its splits, so a tile's splits are drawn like tiles of other heads. Split s
of S has the steps from `steps * s // S` to `steps * (s + 1) // S` of those that the tile sees.

Dao et al., "Flash-Decoding for long-context inference" (2023).
"""

from warpwave.kernels.hopper.groups import Splits
from warpwave.kernels.hopper.rows import store_accumulator
from warpwave.kernels.hopper.split_float32 import out_column
from warpwave.kernels.hopper.visible import heads_of_rows, keys_of_sequence, tiles_of_block
from warpwave.runtime.gluon_or_stub import gl, jit, with_fields


@jit
def work_of_split(work, splits: Splits):
    """Returns the work with the head of the call, and which split of its keys it is."""
    split = gl.to_tensor(0)
    if splits.COLUMNS > 0:
        split = work.head % splits.num_splits
        work = with_fields(work, head=work.head // splits.num_splits)
    return work, split


@jit
def tiles_of_split(keys, work, split, splits: Splits, rules):
    """Returns the key tiles that a block loads, at least one, and whether its share of `tiles_of_block` is empty."""
    begin, end = tiles_of_block(keys, work, rules)
    is_empty = False
    if splits.COLUMNS > 0:
        steps = end - begin
        first = begin + steps * split // splits.num_splits
        last = begin + steps * (split + 1) // splits.num_splits
        is_empty = last == first
        begin = gl.where(is_empty, begin, first)
        end = gl.where(is_empty, begin + 1, last)
    return begin, end, is_empty


@jit
def store_partial(out, m_i, l_row, v_ring, work, split, row_first, num_heads, splits: Splits, rules):
    """Stores the state of 64 rows: out, the mean of the values that this split weights, times its weights' sum.
    `num_heads` counts as in `groups.Schedule`."""
    _, _, is_empty = tiles_of_split(keys_of_sequence(work, rules), work, split, splits, rules)
    l_row = gl.where(is_empty, 0.0, l_row)
    m_i = gl.where(l_row == 0.0, -float("inf"), m_i)  # as a part that saw no key
    heads = num_heads // splits.num_splits
    queries_left = work.seqlen_q - row_first
    row = work.q_begin + row_first
    if not rules.IS_VARLEN:
        row = work.batch * work.seqlen_q + row_first
    row += split.to(gl.int64) * splits.rows
    for i in gl.static_range(len(out)):
        weighted = out[i] * gl.convert_layout(l_row, gl.SliceLayout(1, out[i].type.layout))[:, None]
        store_accumulator(
            weighted, splits.acc_ptr, row, queries_left, work.head, heads, splits.COLUMNS,
            out_column(v_ring.pieces, rules.PARTS, i), rules.HEADS,
        )  # fmt: skip
    rows = gl.arange(0, l_row.shape[0], l_row.type.layout)
    lines = (row + rows // rules.HEADS) * (heads * rules.HEADS) + heads_of_rows(work.head, rows, rules)
    of_split = (heads * rules.HEADS).to(gl.int64) * splits.rows
    inside = rows < queries_left * rules.HEADS
    at = splits.state_ptr + lines + split * of_split  # a split has maxima, then sums
    gl.store(at, m_i, mask=inside)
    gl.store(at + of_split, l_row, mask=inside)
