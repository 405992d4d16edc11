"""Device code of three_kernel's second launch if it includes the softmax: for few scores of long sums.

    out = softmax(S') V        S is the first launch's result, in splits of head_dim that are added up here

A launch costs some 2 us, most of the time of a few scores. Milakov & Gimelshein, "Online normalizer calculation for
softmax" (2018), describes how tiles of keys are processed one after another.

Bound: launch latency and L2.
"""

from __future__ import annotations

from warpwave.kernels.groups import OfHeads, ScoreRules, Sequences, Tokens, Window
from warpwave.kernels.partials import final_state, lse_of
from warpwave.kernels.primitives import (
    band_edges,
    load_tile,
    operand,
    product,
    rounded,
    rows_and_keys,
    softmax_step,
    tile_pointers,
    visible_keys,
)
from warpwave.kernels.scores import rules_of_rows, without_unseen
from warpwave.kernels.three_kernel.softmax import LINE, UNSPECIALIZED, ChunkPlace, Scores, scores_of_tile, whole_lines
from warpwave.runtime.triton_or_stub import jit, tl


@jit(do_not_specialize=UNSPECIALIZED)
def chunk_online_kernel(
    scores_tensor: Scores,
    v_tensor: Tokens,
    out_tensor: Tokens,
    lse_tensor: OfHeads,
    rules: ScoreRules,
    sinks_ptr,
    sequences: Sequences,
    window: Window,
    chunk: ChunkPlace,
    num_heads_q,
    group_size,
    num_tiles_m,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    SPLIT_D: tl.constexpr,
    MAY_HIDE_KEYS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    LAUNCHED_AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
):
    """Computes BLOCK_V columns of the output of ROWS queries of one head, from raw scores in SPLIT_D splits, KEYS at a
    time.

    If LAUNCHED_AHEAD, it starts while the first launch still runs, and loads values meanwhile.
    """
    tiles_v: tl.constexpr = (HEAD_DIM_V + BLOCK_V - 1) // BLOCK_V
    tile_v = tl.program_id(0) % tiles_v
    tile_m = tl.program_id(0) // tiles_v % num_tiles_m
    chunk_head = (tl.program_id(0) // tiles_v // num_tiles_m).to(tl.int64)
    batch_head = chunk.first_head + chunk_head
    head = batch_head % num_heads_q
    batch = batch_head // num_heads_q
    out_ptr, v_ptr, q_begin, seqlen_q, seqlen_k = rows_and_keys(
        out_tensor, v_tensor, sequences, batch, head, group_size
    )
    row_begin, chunk_rows = chunk.row_begin, chunk.rows
    first_row = row_begin + tile_m * ROWS
    row_end = tl.minimum(row_begin + chunk_rows, seqlen_q)
    if first_row >= row_end:
        return
    rows = first_row + tl.arange(0, ROWS)
    row_inside = rows < row_end
    low, high = band_edges(seqlen_q, seqlen_k, window.left, window.right, window.TOP_LEFT)
    key_begin, key_end = visible_keys(
        first_row, tl.minimum(first_row + ROWS, row_end) - 1, seqlen_k, low, high, window.HAS_LOW, window.HAS_HIGH
    )
    begin, end = whole_lines(key_begin, key_end)
    key_base = chunk.key_base // LINE * LINE  # a no-op that tells the compiler about the multiple: see softmax.py
    scores_ptr = scores_tensor.ptr + chunk_head * scores_tensor.stride_h
    mask_rows, bias_rows, slopes_log2 = rules_of_rows(rules, batch, head, rows)

    columns = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    check: tl.constexpr = HEAD_DIM_V % BLOCK_V != 0
    keys = begin + tl.arange(0, KEYS)
    pointers = tile_pointers(v_ptr, keys, columns, v_tensor.stride_m, v_tensor.stride_d)
    v = load_tile(pointers, keys, columns, key_begin, key_end, HEAD_DIM_V, check)  # [KEYS, BLOCK_V]
    if LAUNCHED_AHEAD:
        tl.extra.cuda.gdc_wait()
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    for key_tile in range(begin, end, KEYS):
        keys = key_tile + tl.arange(0, KEYS)
        scores = scores_of_tile(
            scores_ptr, scores_tensor, rows, keys, row_begin, key_base, begin, end, row_inside, key_end,
            seqlen_k - seqlen_q, low, high, mask_rows, bias_rows, slopes_log2, rules, window, SPLIT_D,
        )  # fmt: skip
        p, alpha, m_i, l_i = softmax_step(scores, 1.0, m_i, l_i)
        if MAY_HIDE_KEYS:
            v = without_unseen(v, scores)
        acc = product(
            operand(rounded(p, v.dtype), PRECISION, IS_NVIDIA), operand(v, PRECISION, IS_NVIDIA), acc * alpha[:, None],
            PRECISION,
        )  # fmt: skip
        keys += KEYS
        pointers = tile_pointers(v_ptr, keys, columns, v_tensor.stride_m, v_tensor.stride_d)
        v = load_tile(pointers, keys, columns, key_begin, key_end, HEAD_DIM_V, check)

    m_i, l_i, scale = final_state(m_i, l_i, sinks_ptr, head, HAS_SINKS)
    if WRITE_LSE:  # noqa: SIM102 (known when compiled; the next is not)
        if tile_v == 0:
            lse_rows = lse_tensor.ptr + (batch * lse_tensor.stride_b + head * lse_tensor.stride_h + q_begin + rows)
            tl.store(lse_rows, lse_of(m_i, l_i), mask=row_inside)
    inside = row_inside[:, None] & (columns < HEAD_DIM_V)[None, :]
    pointers = tile_pointers(out_ptr, rows, columns, out_tensor.stride_m, 1)
    tl.store(pointers, rounded(acc * scale[:, None], out_ptr.dtype.element_ty), mask=inside)
