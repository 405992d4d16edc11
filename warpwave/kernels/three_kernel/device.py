"""Device code of three_kernel's own products; the first may have the softmax in its epilogue.

Both kernels work on one chunk: some query rows of some heads, heads counted over the batch. Scores of a chunk are in a
workspace of (heads, rows, width), whose first key is `key_base`. Tiles that position hides are neither computed nor
read.

Bound: tensor cores once head_dim is in the thousands; else the traffic of the scores, which stays in L2 if the chunk is
small enough.
"""

from __future__ import annotations

from warpwave.kernels.groups import OfHeads, ScoreRules, Sequences, Tokens, Window
from warpwave.kernels.partials import await_launch_before, final_state, join, lse_of
from warpwave.kernels.primitives import (
    band_edges,
    load_tile,
    operand,
    product,
    rounded,
    rows_and_keys,
    softmax_step,
    tile_pointers,
    transposed,
    visible_keys,
)
from warpwave.kernels.scores import rules_of_rows, score_bits
from warpwave.kernels.three_kernel.softmax import (
    HIDDEN,
    LINE,
    UNSPECIALIZED,
    ChunkPlace,
    Probabilities,
    Scores,
    whole_lines,
)
from warpwave.runtime.triton_or_stub import jit, tl

TILES_TOGETHER = tl.constexpr(8)  # rows of tiles that run together and share reads through L2


@jit
def _tile_of(pid, num_tiles_m, num_tiles_n):
    """Returns row and column of a tile: TILES_TOGETHER rows of tiles are traversed column by column."""
    together = TILES_TOGETHER * num_tiles_n
    first_m = pid // together * TILES_TOGETHER
    rows = tl.minimum(num_tiles_m - first_m, TILES_TOGETHER)
    return first_m + pid % together % rows, pid % together // rows


@jit(do_not_specialize=UNSPECIALIZED)
def chunk_scores_kernel(
    q_tensor: Tokens,
    k_tensor: Tokens,
    scores_tensor: Scores,
    tile_max_ptr,
    tile_sum_ptr,
    rules: ScoreRules,
    sequences: Sequences,
    window: Window,
    chunk: ChunkPlace,
    num_heads_q,
    group_size,
    num_tiles_m,
    num_tiles_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLIT_D: tl.constexpr,
    FUSED: tl.constexpr,
    MAY_HIDE_KEYS: tl.constexpr,
    LAUNCHED_AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
):
    """Computes a tile of q . k, over one of SPLIT_D splits of head_dim.

    The result is raw scores in float32. If FUSED, it is unnormalized probabilities relative to the maximum of the row
    within the tile, in the dtype of the inputs, with that maximum and their sum stored separately.
    """
    # No block may end before the preceding launch has, or the next launch would not wait for that launch.
    MAY_END_EARLY: tl.constexpr = window.HAS_LOW or window.HAS_HIGH or sequences.IS_VARLEN
    if LAUNCHED_AHEAD and MAY_END_EARLY:
        await_launch_before()
    share = tl.program_id(0) % SPLIT_D
    pid = tl.program_id(0) // SPLIT_D
    tile_m, tile_n = _tile_of(pid % (num_tiles_m * num_tiles_n), num_tiles_m, num_tiles_n)
    chunk_head = (pid // (num_tiles_m * num_tiles_n)).to(tl.int64)
    batch_head = chunk.first_head + chunk_head
    head = batch_head % num_heads_q
    batch = batch_head // num_heads_q
    q_ptr, k_ptr, _, seqlen_q, seqlen_k = rows_and_keys(q_tensor, k_tensor, sequences, batch, head, group_size)
    first_row = chunk.row_begin + tile_m * BLOCK_M
    row_last = tl.minimum(first_row + BLOCK_M, seqlen_q) - 1
    first_key = chunk.key_base + tile_n * BLOCK_N
    low, high = band_edges(seqlen_q, seqlen_k, window.left, window.right, window.TOP_LEFT)
    key_begin, key_end = visible_keys(first_row, row_last, seqlen_k, low, high, window.HAS_LOW, window.HAS_HIGH)
    if (first_row > row_last) | (first_key >= key_end) | (first_key + BLOCK_N <= key_begin):
        return

    rows = first_row + tl.arange(0, BLOCK_M)
    keys = first_key + tl.arange(0, BLOCK_N)
    # Splits are whole steps; the last one takes the remainder.
    steps: tl.constexpr = (HEAD_DIM + BLOCK_K * SPLIT_D - 1) // (BLOCK_K * SPLIT_D)
    dims = share * (steps * BLOCK_K) + tl.arange(0, BLOCK_K)
    check: tl.constexpr = HEAD_DIM % (BLOCK_K * SPLIT_D) != 0
    q_pointers = tile_pointers(q_ptr, rows, dims, q_tensor.stride_m, q_tensor.stride_d)
    k_pointers = tile_pointers(k_ptr, keys, dims, k_tensor.stride_m, k_tensor.stride_d)
    raw = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if LAUNCHED_AHEAD and not MAY_END_EARLY:
        await_launch_before()
    for _ in range(steps):
        q = load_tile(q_pointers, rows, dims, 0, seqlen_q, HEAD_DIM, check)  # [BLOCK_M, BLOCK_K]
        # Keys that no query of the tile sees are not read: NaN there must have no effect.
        k = load_tile(k_pointers, keys, dims, key_begin, key_end, HEAD_DIM, check)  # [BLOCK_N, BLOCK_K]
        k = transposed(operand(k, PRECISION, IS_NVIDIA))
        raw = product(operand(q, PRECISION, IS_NVIDIA), k, raw, PRECISION)  # [BLOCK_M, BLOCK_N]
        dims += BLOCK_K
        q_pointers += tl.cast(q_tensor.stride_d, tl.int64) * BLOCK_K
        k_pointers += tl.cast(k_tensor.stride_d, tl.int64) * BLOCK_K

    row_inside = rows < seqlen_q
    scores_ptr = scores_tensor.ptr
    here = scores_ptr + (chunk_head * scores_tensor.stride_h + share.to(tl.int64) * scores_tensor.stride_split)
    # Columns are counted from the workspace's begin: the compiler cannot see that key_base is a multiple of 16, and it
    # moves data without known alignment one element per thread.
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    here = tile_pointers(here, tile_m * BLOCK_M + tl.arange(0, BLOCK_M), columns, scores_tensor.stride_m, 1)
    if FUSED:
        mask_rows, bias_rows, slopes_log2 = rules_of_rows(rules, batch, head, rows)
        scores = score_bits(
            raw, rows, keys, row_inside, key_end, seqlen_k - seqlen_q, low, high, mask_rows, bias_rows, slopes_log2,
            rules, window,
        )  # fmt: skip
        nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
        p, _, m_i, l_i = softmax_step(scores, 1.0, nothing, tl.zeros([BLOCK_M], tl.float32))
        if MAY_HIDE_KEYS:
            p = tl.where(scores == float("-inf"), HIDDEN, p)
        tl.store(here, rounded(p, scores_ptr.dtype.element_ty), mask=row_inside[:, None])
        states = (chunk_head * num_tiles_n + tile_n) * chunk.rows + (rows - chunk.row_begin)
        tl.store(tile_max_ptr + states, m_i, mask=row_inside)
        tl.store(tile_sum_ptr + states, l_i, mask=row_inside)
    else:
        tl.store(here, raw, mask=row_inside[:, None])


@jit(do_not_specialize=UNSPECIALIZED)
def chunk_values_kernel(
    p_tensor: Probabilities,
    row_scale_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    v_tensor: Tokens,
    out_tensor: Tokens,
    lse_tensor: OfHeads,
    sinks_ptr,
    sequences: Sequences,
    window: Window,
    chunk: ChunkPlace,
    num_heads_q,
    group_size,
    num_tiles_m,
    num_tiles_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    FUSED: tl.constexpr,
    ONE_STEP: tl.constexpr,
    MAY_HIDE_KEYS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    LAUNCHED_AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
):
    """Computes BLOCK_V columns of the output of BLOCK_M queries of one head, over all keys that some of them sees.

    If ONE_STEP, no tile of rows has more than BLOCK_K keys: their values are loaded, and split, before the launch that
    computes P has ended.

    If FUSED, P of each tile of BLOCK_N keys is relative to that tile's maximum: it is summed separately, and enters the
    output with a float32 factor. Scaling P instead would round it twice.
    """
    if LAUNCHED_AHEAD and not ONE_STEP:
        await_launch_before()
    tiles_v: tl.constexpr = (HEAD_DIM_V + BLOCK_V - 1) // BLOCK_V
    tile_m, tile_v = _tile_of(tl.program_id(0) % (num_tiles_m * tiles_v), num_tiles_m, tiles_v)
    chunk_head = (tl.program_id(0) // (num_tiles_m * tiles_v)).to(tl.int64)
    batch_head = chunk.first_head + chunk_head
    head = batch_head % num_heads_q
    batch = batch_head // num_heads_q
    out_ptr, v_ptr, q_begin, seqlen_q, seqlen_k = rows_and_keys(
        out_tensor, v_tensor, sequences, batch, head, group_size
    )
    row_begin, chunk_rows = chunk.row_begin, chunk.rows
    first_row = row_begin + tile_m * BLOCK_M
    row_end = tl.minimum(row_begin + chunk_rows, seqlen_q)
    if first_row >= row_end:
        return
    row_last = tl.minimum(first_row + BLOCK_M, row_end) - 1
    low, high = band_edges(seqlen_q, seqlen_k, window.left, window.right, window.TOP_LEFT)
    key_begin, key_end = visible_keys(first_row, row_last, seqlen_k, low, high, window.HAS_LOW, window.HAS_HIGH)
    rows = first_row + tl.arange(0, BLOCK_M)
    row_inside = rows < row_end
    columns = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    p_ptr = p_tensor.ptr + chunk_head * p_tensor.stride_h
    key_base = chunk.key_base // LINE * LINE  # a no-op that tells the compiler about the multiple: see softmax.py

    begin, end = whole_lines(key_begin, key_end)
    if FUSED:
        # Whole tiles, all of which some row sees. First combine their maxima and sums.
        begin = key_base + tl.maximum(key_begin - key_base, 0) // BLOCK_N * BLOCK_N
        end = key_base + tl.cdiv(tl.maximum(key_end - key_base, 0), BLOCK_N) * BLOCK_N
        states = (chunk_head * num_tiles_n) * chunk_rows + (rows - row_begin)
        m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        for tile_n in range((begin - key_base) // BLOCK_N, (end - key_base) // BLOCK_N):
            there = states + tile_n * tl.cast(chunk_rows, tl.int64)
            m_tile = tl.load(tile_max_ptr + there, mask=row_inside, other=float("-inf"))
            l_tile = tl.load(tile_sum_ptr + there, mask=row_inside, other=0.0)
            m_i, l_i, _, _ = join(m_i, l_i, m_tile, l_tile)
        m_shift = tl.where(m_i == float("-inf"), 0.0, m_i)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if ONE_STEP:
        keys = begin + tl.arange(0, BLOCK_K)
        v = tile_pointers(v_ptr, keys, columns, v_tensor.stride_m, v_tensor.stride_d)
        v = load_tile(v, keys, columns, key_begin, key_end, HEAD_DIM_V, HEAD_DIM_V % BLOCK_V != 0)
        parts = operand(v, PRECISION, IS_NVIDIA)
        if LAUNCHED_AHEAD:
            await_launch_before()
        p = tile_pointers(p_ptr, rows - row_begin, keys - key_base, p_tensor.stride_m, 1)
        p = load_tile(p, rows, keys, 0, row_end, end, True)  # [BLOCK_M, BLOCK_K]
        acc = product(operand(p, PRECISION, IS_NVIDIA), parts, acc, PRECISION)  # [BLOCK_M, BLOCK_V]
        end = begin  # no keys are left
    STEP: tl.constexpr = BLOCK_N if FUSED else BLOCK_K
    for key_tile in range(begin, end, STEP):
        part = acc
        if FUSED:
            part = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        for step in tl.static_range(0, STEP, BLOCK_K):
            keys = key_tile + step + tl.arange(0, BLOCK_K)
            p = tile_pointers(p_ptr, rows - row_begin, keys - key_base, p_tensor.stride_m, 1)
            p = load_tile(p, rows, keys, 0, row_end, end, not FUSED)  # [BLOCK_M, BLOCK_K]
            v = tile_pointers(v_ptr, keys, columns, v_tensor.stride_m, v_tensor.stride_d)
            v = load_tile(v, keys, columns, key_begin, key_end, HEAD_DIM_V, HEAD_DIM_V % BLOCK_V != 0)
            if MAY_HIDE_KEYS:
                # A value that no query of the tile sees must have no effect, but 0 * NaN is NaN.
                seen = tl.max(((p != HIDDEN) & row_inside[:, None]).to(tl.int32), 0)  # [BLOCK_K]
                v = tl.where((seen != 0)[:, None], v, 0.0).to(v.dtype)  # [BLOCK_K, BLOCK_V]
                p = tl.where(p == HIDDEN, 0.0, p).to(v.dtype)
            part = product(
                operand(p, PRECISION, IS_NVIDIA), operand(v, PRECISION, IS_NVIDIA), part, PRECISION
            )  # [BLOCK_M, BLOCK_V]
        if FUSED:
            there = states + (key_tile - key_base) // BLOCK_N * tl.cast(chunk_rows, tl.int64)
            m_tile = tl.load(tile_max_ptr + there, mask=row_inside, other=float("-inf"))
            part = acc + part * tl.math.exp2(m_tile - m_shift)[:, None]
        acc = part

    if FUSED:
        m_i, l_i, scale = final_state(m_i, l_i, sinks_ptr, head, HAS_SINKS)
        if WRITE_LSE:  # noqa: SIM102 (known when compiled; the next is not)
            if tile_v == 0:
                lse_rows = lse_tensor.ptr + (batch * lse_tensor.stride_b + head * lse_tensor.stride_h + q_begin + rows)
                tl.store(lse_rows, lse_of(m_i, l_i), mask=row_inside)
    else:
        scale = row_scale_ptr + (chunk_head * (p_tensor.stride_h // p_tensor.stride_m) + rows - row_begin)
        scale = tl.load(scale, mask=row_inside, other=0.0)
    inside = row_inside[:, None] & (columns < HEAD_DIM_V)[None, :]
    pointers = tile_pointers(out_ptr, rows, columns, out_tensor.stride_m, 1)
    tl.store(pointers, rounded(acc * scale[:, None], out_ptr.dtype.element_ty), mask=inside)
