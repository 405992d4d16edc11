"""Device code of three_kernel between its products, and after the second one if that is torch's.

    P = exp(S' - max), and the factor of a row of P V        out = sums * factor

Scores of a chunk are in a workspace of (heads, rows, width), whose first key is `key_base`; P overwrites them or is
stored separately. Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018), describes how the maximum
and sum of a row of several tiles are found in one sweep.

Bound: L2. A score of 4 bytes is read once if a row stays in registers and twice otherwise, and 2 bytes are written.
"""

from __future__ import annotations

from typing import NamedTuple

from warpwave.kernels.groups import OfHeads, ScoreRules, Sequences, Window
from warpwave.kernels.partials import await_launch_before, final_state, lse_of
from warpwave.kernels.primitives import (
    band_edges,
    packed_sequence,
    rounded,
    softmax_step,
    tile_pointers,
    visible_keys,
)
from warpwave.kernels.scores import rules_of_rows, score_bits
from warpwave.runtime.parameters import Pointer, Specialized
from warpwave.runtime.triton_or_stub import jit, tl

HIDDEN = tl.constexpr(-1.0)  # marks a hidden pair in P if a mask or bias may hide a value from all queries
LINE = tl.constexpr(16)  # scores of a line: rows begin and ranges end at whole lines, so that a thread moves 16 bytes
UNSPECIALIZED = [
    *("num_heads_q", "group_size", "num_tiles_m", "num_tiles_n", "range_rows", "rows_before"),
    *("seqlen_q", "seqlen_k", "window_left", "window_right", "first_head", "row_begin", "chunk_rows", "key_base"),
]


class Scores(NamedTuple):
    """Raw scores of a chunk, in splits of head_dim that are still to be summed."""

    ptr: Pointer
    stride_h: Specialized
    stride_m: Specialized
    stride_split: Specialized


class Probabilities(NamedTuple):
    """Probabilities of a chunk."""

    ptr: Pointer
    stride_h: Specialized
    stride_m: Specialized


class ChunkPlace(NamedTuple):
    """Some queries of some heads, heads counted over the batch, and the first key of their workspace."""

    first_head: int
    row_begin: int
    rows: int
    key_base: int


@jit
def whole_lines(key_begin, key_end):
    """Returns a range of keys rounded outward to whole lines of scores."""
    return key_begin // LINE * LINE, tl.cdiv(tl.maximum(key_end, 0), LINE) * LINE


@jit
def scores_of_tile(
    scores_ptr,
    tensor: Scores,
    rows,
    keys,
    row_begin,
    key_base,
    own_begin,
    own_end,
    row_inside,
    key_end,
    key_offset,
    low,
    high,
    mask_rows,
    bias_rows,
    slopes_log2,
    rules: ScoreRules,
    window: Window,
    SPLIT_D: tl.constexpr,
):
    """Returns the scores in bits of a tile of the workspace, with its splits of head_dim summed. Scores outside the
    lines from own_begin to own_end, which none of the rows sees, are not read.

    Args:
        scores_ptr: the first score of the head.
    """
    in_own = row_inside[:, None] & ((keys >= own_begin) & (keys < own_end))[None, :]
    pointers = tile_pointers(scores_ptr, rows - row_begin, keys - key_base, tensor.stride_m, 1)
    raw = tl.load(pointers, mask=in_own, other=0.0)  # [ROWS, KEYS]
    for share in tl.static_range(1, SPLIT_D):
        raw += tl.load(pointers + share * tl.cast(tensor.stride_split, tl.int64), mask=in_own, other=0.0)
    return score_bits(
        raw, rows, keys, row_inside, key_end, key_offset, low, high, mask_rows, bias_rows, slopes_log2, rules, window
    )


@jit
def _store_probabilities(
    p_ptr,
    p,
    scores,
    scale,
    rows,
    keys,
    row_begin,
    key_base,
    line_end,
    row_inside,
    stride_pm,
    NORMALIZE: tl.constexpr,
    MAY_HIDE_KEYS: tl.constexpr,
):
    """Stores a tile of P up to the end of its lines."""
    if NORMALIZE:
        p = p * scale[:, None]
    if MAY_HIDE_KEYS:
        p = tl.where(scores == float("-inf"), HIDDEN, p)
    in_lines = row_inside[:, None] & (keys < line_end)[None, :]
    out = tile_pointers(p_ptr, rows - row_begin, keys - key_base, stride_pm, 1)
    tl.store(out, rounded(p, p_ptr.dtype.element_ty), mask=in_lines)


@jit(do_not_specialize=UNSPECIALIZED)
def chunk_softmax_kernel(
    scores_tensor: Scores,
    p_tensor: Probabilities,
    row_scale_ptr,
    lse_tensor: OfHeads,
    rules: ScoreRules,
    sinks_ptr,
    sequences: Sequences,
    window: Window,
    chunk: ChunkPlace,
    num_heads_q,
    num_tiles_m,
    range_rows,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT_D: tl.constexpr,
    WHOLE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    MAY_HIDE_KEYS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    LAUNCHED_AHEAD: tl.constexpr,
):
    """Converts raw scores of ROWS queries of one head to unnormalized probabilities in the dtype of p, and writes the
    factor of each row of P V to `row_scale`. If NORMALIZE, the probabilities need no such factor.

    It writes the lines of the keys that some query of its `range_rows` sees, which the second product reads, and reads
    the lines that its own queries see. Raw scores that no product wrote are hidden by position, whatever the memory
    holds.

    If WHOLE, a row is one tile that is read once and stays in registers. P may then overwrite the scores, because no
    probability is stored before the row's maximum is known, which takes all of its scores.
    """
    if LAUNCHED_AHEAD:
        await_launch_before()
    tile = tl.program_id(0) % num_tiles_m
    chunk_head = (tl.program_id(0) // num_tiles_m).to(tl.int64)
    batch_head = chunk.first_head + chunk_head
    head = batch_head % num_heads_q
    batch = batch_head // num_heads_q
    lse_ptr, row_begin, chunk_rows = lse_tensor.ptr, chunk.row_begin, chunk.rows
    seqlen_q, seqlen_k = sequences.seqlen_q, sequences.seqlen_k
    if sequences.IS_VARLEN:
        q_begin, seqlen_q = packed_sequence(sequences.cu_seqlens_q_ptr, batch, seqlen_q, sequences.total_q)
        _, seqlen_k = packed_sequence(sequences.cu_seqlens_k_ptr, batch, seqlen_k, sequences.total_k)
        if WRITE_LSE:
            lse_ptr += q_begin
    first_row = row_begin + tile * ROWS
    row_end = tl.minimum(row_begin + chunk_rows, seqlen_q)
    if first_row >= row_end:
        return
    rows = first_row + tl.arange(0, ROWS)
    row_inside = rows < row_end
    range_begin = row_begin + tile * ROWS // range_rows * range_rows
    range_last = tl.minimum(range_begin + range_rows, row_end) - 1
    low, high = band_edges(seqlen_q, seqlen_k, window.left, window.right, window.TOP_LEFT)
    key_begin, key_end = visible_keys(range_begin, range_last, seqlen_k, low, high, window.HAS_LOW, window.HAS_HIGH)
    line_begin, line_end = whole_lines(key_begin, key_end)
    last_row = tl.minimum(first_row + ROWS, row_end) - 1
    own_begin, own_end = visible_keys(first_row, last_row, seqlen_k, low, high, window.HAS_LOW, window.HAS_HIGH)
    own_begin, own_end = whole_lines(own_begin, own_end)
    # key_base is a multiple of a tile. The compiler cannot see this, and without it would move single elements.
    key_base = chunk.key_base // LINE * LINE
    scores_ptr = scores_tensor.ptr + chunk_head * scores_tensor.stride_h
    p_ptr = p_tensor.ptr + chunk_head * p_tensor.stride_h
    mask_rows, bias_rows, slopes_log2 = rules_of_rows(rules, batch, head, rows)

    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    # First maximum and sum. If a row is not one tile, probabilities take a second sweep that recomputes a score from
    # the raw one, which is cheaper than storing it in between.
    if WHOLE:
        keys = line_begin + tl.arange(0, KEYS)
        scores = scores_of_tile(
            scores_ptr, scores_tensor, rows, keys, row_begin, key_base, own_begin, own_end, row_inside, key_end,
            seqlen_k - seqlen_q, low, high, mask_rows, bias_rows, slopes_log2, rules, window, SPLIT_D,
        )  # fmt: skip
        p, _alpha, m_i, l_i = softmax_step(scores, 1.0, m_i, l_i)
    else:
        for key_tile in range(own_begin, own_end, KEYS):
            scores = scores_of_tile(
                scores_ptr, scores_tensor, rows, key_tile + tl.arange(0, KEYS), row_begin, key_base, own_begin,
                own_end, row_inside, key_end, seqlen_k - seqlen_q, low, high, mask_rows, bias_rows, slopes_log2,
                rules, window, SPLIT_D,
            )  # fmt: skip
            _p, _alpha, m_i, l_i = softmax_step(scores, 1.0, m_i, l_i)

    # P stays relative to the maximum over keys.
    m_all, l_all, scale = final_state(m_i, l_i, sinks_ptr, head, HAS_SINKS)
    if WRITE_LSE:
        lse_rows = lse_ptr + (batch * lse_tensor.stride_b + head * lse_tensor.stride_h + rows)
        tl.store(lse_rows, lse_of(m_all, l_all), mask=row_inside)
    if not NORMALIZE:
        tl.store(
            row_scale_ptr + (chunk_head * (scores_tensor.stride_h // scores_tensor.stride_m) + rows - row_begin),
            scale,
            mask=row_inside,
        )

    if WHOLE:
        _store_probabilities(
            p_ptr, p, scores, scale, rows, keys, row_begin, key_base, line_end, row_inside, p_tensor.stride_m,
            NORMALIZE, MAY_HIDE_KEYS,
        )  # fmt: skip
    else:
        m_shift = tl.where(m_i == float("-inf"), 0.0, m_i)  # for a row that sees no key
        for key_tile in range(line_begin, line_end, KEYS):
            keys = key_tile + tl.arange(0, KEYS)
            scores = scores_of_tile(
                scores_ptr, scores_tensor, rows, keys, row_begin, key_base, own_begin, own_end, row_inside, key_end,
                seqlen_k - seqlen_q, low, high, mask_rows, bias_rows, slopes_log2, rules, window, SPLIT_D,
            )  # fmt: skip
            p = tl.math.exp2(scores - m_shift[:, None])
            _store_probabilities(
                p_ptr, p, scores, scale, rows, keys, row_begin, key_base, line_end, row_inside, p_tensor.stride_m,
                NORMALIZE, MAY_HIDE_KEYS,
            )  # fmt: skip


@jit(do_not_specialize=UNSPECIALIZED)
def chunk_scale_kernel(
    sums_ptr,
    row_scale_ptr,
    out_ptr,
    stride_ob,
    stride_om,
    stride_oh,
    stride_rh,
    num_heads_q,
    first_head,
    row_begin,
    chunk_rows,
    rows_before,
    HEAD_DIM_V: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes columns of one row of the output: the sums of torch's second product times the row's factor.

    The sums of `chunk_rows` queries of some heads are contiguous. `row_scale` points to those heads' factors,
    `stride_rh` apart, the first `rows_before` of which belong to preceding queries.
    """
    tiles: tl.constexpr = (HEAD_DIM_V + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) % tiles
    line = (tl.program_id(0) // tiles).to(tl.int64)
    row = line % chunk_rows
    piece_head = line // chunk_rows
    head = (first_head + piece_head) % num_heads_q
    batch = (first_head + piece_head) // num_heads_q
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < HEAD_DIM_V
    sums = tl.load(sums_ptr + line * HEAD_DIM_V + columns, mask=inside, other=0.0)  # [COLUMNS]
    scale = tl.load(row_scale_ptr + piece_head * stride_rh + rows_before + row)
    out_ptr += batch * stride_ob + head * stride_oh + (row_begin + row) * stride_om
    tl.store(out_ptr + columns, rounded(sums * scale, out_ptr.dtype.element_ty), mask=inside)
