"""Device code of the launch that owns the bias: its gradient, the sum of dS over the axes along which the bias is
broadcast.

A block owns one tile of the bias. It walks the batch items, query heads, queries and keys that read the tile, in a
fixed order, and computes S and dP again. That takes two more products and no atomics.
"""

from __future__ import annotations

from warpwave.kernels.dropout import dropout_keeps, load_dropout_key
from warpwave.kernels.flash_bwd.dq import UNSPECIALISED
from warpwave.kernels.flash_bwd.tiles import load_lse_log2, load_rows, probabilities, score_gradient, score_tile
from warpwave.kernels.primitives import (
    LOG2_E,
    band_edges,
    in_elements,
    key_ranges,
    load_tile,
    operand,
    product,
    rounded,
    tile_pointers,
    transposed,
)
from warpwave.runtime.triton_or_stub import jit, tl


@jit(do_not_specialize=[*UNSPECIALISED, "batch_size", "bias_batch", "bias_heads"])
def flash_bwd_dbias_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    bias_ptr,
    alibi_slopes_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    dropout_seed_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dbias_ptr,
    stride_qb,
    stride_qm,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_kd,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_vd,
    stride_dob,
    stride_dom,
    stride_doh,
    stride_lb,
    stride_lh,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    stride_bias_b,
    stride_bias_h,
    stride_bias_m,
    stride_bias_n,
    stride_alibi_b,
    stride_alibi_h,
    seqlen_q,
    seqlen_k,
    total_q,
    total_k,
    batch_size,
    bias_batch,
    bias_heads,
    num_heads_q,
    group_size,
    window_left,
    window_right,
    softmax_scale,
    softcap,
    dropout_threshold,
    dropout_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
    LSE_IN_BITS: tl.constexpr,
    PER_QUERY: tl.constexpr,
    PER_KEY: tl.constexpr,
):
    """Computes the gradient of one tile of the bias, (bias_batch, bias_heads, 1 or seqlen_q, 1 or seqlen_k),
    contiguous.

    PER_QUERY and PER_KEY state whether the bias has an axis of queries and of keys. Packed calls have no bias.
    """
    stride_qb, stride_qm, stride_qh = in_elements(stride_qb, stride_qm, stride_qh, STRIDE_UNIT)
    stride_kb, stride_kn, stride_kh = in_elements(stride_kb, stride_kn, stride_kh, STRIDE_UNIT)
    stride_vb, stride_vn, stride_vh = in_elements(stride_vb, stride_vn, stride_vh, STRIDE_UNIT)
    stride_dob, stride_dom, stride_doh = in_elements(stride_dob, stride_dom, stride_doh, STRIDE_UNIT)

    num_tiles_m = 1
    num_tiles_n = 1
    if PER_QUERY:
        num_tiles_m = tl.cdiv(seqlen_q, BLOCK_M)
    if PER_KEY:
        num_tiles_n = tl.cdiv(seqlen_k, BLOCK_N)
    pid = tl.program_id(0)
    tile_n = pid % num_tiles_n
    tile_m = pid // num_tiles_n % num_tiles_m
    bias_item = pid // num_tiles_n // num_tiles_m  # of bias_batch * bias_heads

    # The batch items, heads, rows and keys that read the tile: from the first to the one before the end.
    head_begin = bias_item % bias_heads
    head_end = head_begin + 1
    if bias_heads == 1:
        head_end = num_heads_q
    batch_begin = bias_item // bias_heads
    batch_end = batch_begin + 1
    if bias_batch == 1:
        batch_end = batch_size
    row_begin = tile_m * BLOCK_M
    row_end = seqlen_q
    if PER_QUERY:
        row_end = tl.minimum(row_begin + BLOCK_M, seqlen_q)
    own_key_begin = tile_n * BLOCK_N
    own_key_end = seqlen_k
    if PER_KEY:
        own_key_end = tl.minimum(own_key_begin + BLOCK_N, seqlen_k)

    low, high = band_edges(seqlen_q, seqlen_k, window_left, window_right, TOP_LEFT)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    first_rows = tl.arange(0, BLOCK_M)
    first_keys = tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if HAS_DROPOUT:
        dropout_key = load_dropout_key(dropout_seed_ptr)
    for item in range((batch_end - batch_begin) * (head_end - head_begin)):
        batch = (batch_begin + item // (head_end - head_begin)).to(tl.int64)
        head = (head_begin + item % (head_end - head_begin)).to(tl.int64)
        kv_head = head // group_size
        line = batch * stride_lb + head * stride_lh
        q_pointers = q_ptr + (batch * stride_qb + head * stride_qh)
        q_pointers = tile_pointers(q_pointers, first_rows, dims, stride_qm, stride_qd)
        dout_pointers = dout_ptr + (batch * stride_dob + head * stride_doh)
        dout_pointers = tile_pointers(dout_pointers, first_rows, dims_v, stride_dom, 1)
        k_pointers = k_ptr + (batch * stride_kb + kv_head * stride_kh)
        k_pointers = tile_pointers(k_pointers, first_keys, dims, stride_kn, stride_kd)
        v_pointers = v_ptr + (batch * stride_vb + kv_head * stride_vh)
        v_pointers = tile_pointers(v_pointers, first_keys, dims_v, stride_vn, stride_vd)
        mask_of_head = mask_ptr
        if HAS_MASK:
            mask_of_head = mask_ptr + (batch * stride_mask_b + head * stride_mask_h)
        bias_of_head = bias_ptr + (batch * stride_bias_b + head * stride_bias_h)
        slope_log2 = 0.0
        if HAS_ALIBI:
            slope_log2 = tl.load(alibi_slopes_ptr + batch * stride_alibi_b + head * stride_alibi_h) * LOG2_E
        for row_tile in range(row_begin, row_end, BLOCK_M):
            rows = row_tile + first_rows
            row_last = tl.minimum(row_tile + BLOCK_M, seqlen_q) - 1
            key_begin, key_end, first, whole_begin, whole_end = key_ranges(
                row_tile, row_last, seqlen_k, low, high, BLOCK_N, HAS_LOW, HAS_HIGH
            )
            row_offset = tl.cast(row_tile, tl.int64)
            q = load_tile(
                q_pointers + row_offset * stride_qm, rows, dims, 0, seqlen_q, HEAD_DIM, HEAD_DIM < BLOCK_D
            )  # [BLOCK_M, BLOCK_D]
            dout = load_tile(
                dout_pointers + row_offset * stride_dom, rows, dims_v, 0, seqlen_q, HEAD_DIM_V,
                HEAD_DIM_V < BLOCK_DV,
            )  # [BLOCK_M, BLOCK_DV]  # fmt: skip
            q = operand(q, PRECISION, IS_NVIDIA)
            dout = operand(dout, PRECISION, IS_NVIDIA)
            lse_log2 = load_lse_log2(lse_ptr + line, rows, 0, seqlen_q, LSE_IN_BITS)  # [BLOCK_M]
            delta = load_rows(delta_ptr + line, rows, 0, seqlen_q, 0.0)  # [BLOCK_M]
            for key_tile in range(tl.maximum(first, own_key_begin), tl.minimum(key_end, own_key_end), BLOCK_N):
                at_edge = (key_tile < whole_begin) | (key_tile >= whole_end)
                keys = key_tile + first_keys
                tile_offset = tl.cast(key_tile, tl.int64)
                k = load_tile(
                    k_pointers + tile_offset * stride_kn, keys, dims, key_begin, key_end, HEAD_DIM,
                    HEAD_DIM < BLOCK_D,
                )  # [BLOCK_N, BLOCK_D]  # fmt: skip
                v = load_tile(
                    v_pointers + tile_offset * stride_vn, keys, dims_v, key_begin, key_end, HEAD_DIM_V,
                    HEAD_DIM_V < BLOCK_DV,
                )  # [BLOCK_N, BLOCK_DV]  # fmt: skip
                k = transposed(operand(k, PRECISION, IS_NVIDIA), PRECISION)
                v = transposed(operand(v, PRECISION, IS_NVIDIA), PRECISION)
                raw = product(q, k, None, PRECISION)  # [BLOCK_M, BLOCK_N]
                inside = (rows < seqlen_q)[:, None] & (keys < key_end)[None, :]
                scores, scale, _derivative = score_tile(
                    raw, rows[:, None], keys[None, :], inside, at_edge, low, high, seqlen_k - seqlen_q,
                    mask_of_head, stride_mask_m, stride_mask_n, bias_of_head, stride_bias_m, stride_bias_n,
                    slope_log2, softmax_scale, softcap, HAS_LOW, HAS_HIGH, HAS_MASK, HAS_BIAS, HAS_ALIBI,
                    HAS_SOFTCAP,
                )  # fmt: skip
                p = probabilities(scores, scale, lse_log2[:, None], True)
                dp = product(dout, v, None, PRECISION)  # [BLOCK_M, BLOCK_N]
                if HAS_DROPOUT:
                    kept = dropout_keeps(
                        dropout_key, batch, head, row_tile, first_rows[:, None], key_tile, first_keys[None, :],
                        dropout_threshold,
                    )  # fmt: skip
                    dp = tl.where(kept, dp * dropout_scale, 0.0)
                acc += score_gradient(p, dp, delta[:, None], at_edge, True)

    # Tiles that share a cell of the bias lie in the same place of acc, or in a row or column of it.
    rows = tile_m * BLOCK_M + first_rows
    keys = tile_n * BLOCK_N + first_keys
    lines = tl.cast(bias_item, tl.int64)
    if PER_QUERY and PER_KEY:
        offsets = (lines * seqlen_q + rows.to(tl.int64)[:, None]) * seqlen_k + keys[None, :]
        inside = (rows < seqlen_q)[:, None] & (keys < seqlen_k)[None, :]
        tl.store(dbias_ptr + offsets, rounded(acc, dbias_ptr.dtype.element_ty), mask=inside)
    elif PER_QUERY:
        total = tl.sum(acc, 1)
        tl.store(dbias_ptr + lines * seqlen_q + rows, rounded(total, dbias_ptr.dtype.element_ty), mask=rows < seqlen_q)
    elif PER_KEY:
        total = tl.sum(acc, 0)
        tl.store(dbias_ptr + lines * seqlen_k + keys, rounded(total, dbias_ptr.dtype.element_ty), mask=keys < seqlen_k)
    else:
        total = tl.sum(tl.sum(acc, 1), 0)
        tl.store(dbias_ptr + lines, rounded(total, dbias_ptr.dtype.element_ty))
