"""Device code of the launch that owns keys: dk and dv.

A block owns BLOCK_N keys of one kv head and walks the queries that see them, of each query head of the group in turn.
The gradients of the group add up in its registers, so no other block writes to them and their sum has a fixed order.
Scores are computed transposed, [BLOCK_N, BLOCK_M]: P^T and dS^T then enter the products from registers.
"""

from __future__ import annotations

from warpwave.kernels.dropout import dropout_keeps, load_dropout_key
from warpwave.kernels.flash_bwd.dq import UNSPECIALISED
from warpwave.kernels.flash_bwd.tiles import (
    any_of,
    load_lse_log2,
    load_rows,
    probabilities,
    score_gradient,
    score_tile,
    through_softcap,
)
from warpwave.kernels.primitives import (
    LOG2_E,
    band_edges,
    in_elements,
    key_ranges,
    load_tile,
    operand,
    packed_sequence,
    product,
    rounded,
    tile_pointers,
    transposed,
)
from warpwave.runtime.triton_or_stub import jit, tl


@jit(
    do_not_specialize=[
        *UNSPECIALISED,
        *("stride_dkb", "stride_dkn", "stride_dkh", "stride_dvb", "stride_dvn", "stride_dvh"),
    ]
)
def flash_bwd_dkv_kernel(
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
    dk_ptr,
    dv_ptr,
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
    stride_dkb,
    stride_dkn,
    stride_dkh,
    stride_dvb,
    stride_dvn,
    stride_dvh,
    seqlen_q,
    seqlen_k,
    total_q,
    total_k,
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
    WRITE_DK: tl.constexpr,
    WRITE_DV: tl.constexpr,
):
    """Computes dk and dv of one tile of keys of one kv head."""
    stride_qb, stride_qm, stride_qh = in_elements(stride_qb, stride_qm, stride_qh, STRIDE_UNIT)
    stride_kb, stride_kn, stride_kh = in_elements(stride_kb, stride_kn, stride_kh, STRIDE_UNIT)
    stride_vb, stride_vn, stride_vh = in_elements(stride_vb, stride_vn, stride_vh, STRIDE_UNIT)
    stride_dob, stride_dom, stride_doh = in_elements(stride_dob, stride_dom, stride_doh, STRIDE_UNIT)
    stride_dkb, stride_dkn, stride_dkh = in_elements(stride_dkb, stride_dkn, stride_dkh, STRIDE_UNIT)
    stride_dvb, stride_dvn, stride_dvh = in_elements(stride_dvb, stride_dvn, stride_dvh, STRIDE_UNIT)

    num_tiles = tl.cdiv(seqlen_k, BLOCK_N)
    num_heads_kv = num_heads_q // group_size
    tile = tl.program_id(0) % num_tiles
    batch_head = tl.program_id(0) // num_tiles
    kv_head = (batch_head % num_heads_kv).to(tl.int64)
    batch = (batch_head // num_heads_kv).to(tl.int64)

    if IS_VARLEN:
        q_begin, seqlen_q = packed_sequence(cu_seqlens_q_ptr, batch, seqlen_q, total_q)
        k_begin, seqlen_k = packed_sequence(cu_seqlens_k_ptr, batch, seqlen_k, total_k)
        if tile * BLOCK_N >= seqlen_k:
            return
        q_ptr += q_begin * stride_qm
        k_ptr += k_begin * stride_kn
        v_ptr += k_begin * stride_vn
        dout_ptr += q_begin * stride_dom
        lse_ptr += q_begin
        if WRITE_DK:
            delta_ptr += q_begin
            dk_ptr += k_begin * stride_dkn
        if WRITE_DV:
            dv_ptr += k_begin * stride_dvn
    q_ptr += batch * stride_qb
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh
    dout_ptr += batch * stride_dob

    # The band seen from the keys: -high <= row - key <= -low.
    key_begin = tile * BLOCK_N
    key_last = tl.minimum(key_begin + BLOCK_N, seqlen_k) - 1
    first_keys = tl.arange(0, BLOCK_N)
    keys = key_begin + first_keys
    low, high = band_edges(seqlen_q, seqlen_k, window_left, window_right, TOP_LEFT)
    row_begin, row_end, first, whole_begin, whole_end = key_ranges(
        key_begin, key_last, seqlen_q, -high, -low, BLOCK_M, HAS_HIGH, HAS_LOW
    )

    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    k = tile_pointers(k_ptr, keys, dims, stride_kn, stride_kd)
    k = load_tile(k, keys, dims, 0, seqlen_k, HEAD_DIM, HEAD_DIM < BLOCK_D)  # [BLOCK_N, BLOCK_D]
    k = operand(k, PRECISION, IS_NVIDIA)
    if WRITE_DK:
        v = tile_pointers(v_ptr, keys, dims_v, stride_vn, stride_vd)
        v = load_tile(v, keys, dims_v, 0, seqlen_k, HEAD_DIM_V, HEAD_DIM_V < BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
        v = operand(v, PRECISION, IS_NVIDIA)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    first_rows = tl.arange(0, BLOCK_M)
    if HAS_DROPOUT:
        dropout_key = load_dropout_key(dropout_seed_ptr)
    for member in range(group_size):
        head = kv_head * group_size + member
        line = batch * stride_lb + head * stride_lh
        q_pointers = tile_pointers(q_ptr + head * stride_qh, first_rows, dims, stride_qm, stride_qd)
        dout_pointers = tile_pointers(dout_ptr + head * stride_doh, first_rows, dims_v, stride_dom, 1)
        mask_of_head = mask_ptr
        if HAS_MASK:
            mask_of_head = mask_ptr + (batch * stride_mask_b + head * stride_mask_h)
        bias_of_head = bias_ptr
        if HAS_BIAS:
            bias_of_head = bias_ptr + (batch * stride_bias_b + head * stride_bias_h)
        slope_log2 = 0.0
        if HAS_ALIBI:
            slope_log2 = tl.load(alibi_slopes_ptr + batch * stride_alibi_b + head * stride_alibi_h) * LOG2_E
        for row_tile in range(first, row_end, BLOCK_M):
            at_edge = (row_tile < whole_begin) | (row_tile >= whole_end)
            rows = row_tile + first_rows
            tile_offset = tl.cast(row_tile, tl.int64)
            # Queries that see no key of the tile are not read: NaN there must have no effect.
            q = q_pointers + tile_offset * stride_qm
            q = load_tile(q, rows, dims, row_begin, row_end, HEAD_DIM, HEAD_DIM < BLOCK_D)  # [BLOCK_M, BLOCK_D]
            dout = dout_pointers + tile_offset * stride_dom
            dout = load_tile(
                dout, rows, dims_v, row_begin, row_end, HEAD_DIM_V, HEAD_DIM_V < BLOCK_DV
            )  # [BLOCK_M, BLOCK_DV]
            lse_log2 = load_lse_log2(lse_ptr + line, rows, row_begin, row_end, LSE_IN_BITS)  # [BLOCK_M]
            q_parts = operand(q, PRECISION, IS_NVIDIA)
            raw = product(k, transposed(q_parts, PRECISION), None, PRECISION)  # [BLOCK_N, BLOCK_M]
            inside = (keys < seqlen_k)[:, None] & (rows < row_end)[None, :]
            scores, scale, derivative = score_tile(
                raw, rows[None, :], keys[:, None], inside, at_edge, low, high, seqlen_k - seqlen_q, mask_of_head,
                stride_mask_m, stride_mask_n, bias_of_head, stride_bias_m, stride_bias_n, slope_log2, softmax_scale,
                softcap, HAS_LOW, HAS_HIGH, HAS_MASK, HAS_BIAS, HAS_ALIBI, HAS_SOFTCAP,
            )  # fmt: skip
            p = probabilities(scores, scale, lse_log2[None, :], HAS_MASK or HAS_BIAS)
            if HAS_MASK or HAS_BIAS:
                # A query that sees no key of the tile must have no effect, but 0 * NaN is NaN.
                sees = any_of(p, 0)[:, None]  # [BLOCK_M, 1]
                q_parts = operand(tl.where(sees, q, 0.0), PRECISION, IS_NVIDIA)
                dout = tl.where(sees, dout, 0.0)
            dout_parts = operand(dout, PRECISION, IS_NVIDIA)
            p_kept = p
            if HAS_DROPOUT:
                kept = dropout_keeps(
                    dropout_key, batch, head, row_tile, first_rows[None, :], key_begin, first_keys[:, None],
                    dropout_threshold,
                )  # fmt: skip
                p_kept = tl.where(kept, p, 0.0)
            if WRITE_DV:
                dv = product(operand(p_kept.to(dout.dtype), PRECISION, IS_NVIDIA), dout_parts, dv, PRECISION)
            if WRITE_DK:
                delta = load_rows(delta_ptr + line, rows, row_begin, row_end, 0.0)  # [BLOCK_M]
                dp = product(v, transposed(dout_parts, PRECISION), None, PRECISION)  # [BLOCK_N, BLOCK_M]
                if HAS_DROPOUT:
                    dp = tl.where(kept, dp * dropout_scale, 0.0)
                ds = score_gradient(p, dp, delta[None, :], at_edge, HAS_MASK or HAS_BIAS)
                ds = through_softcap(ds, derivative, p, HAS_SOFTCAP)
                dk = product(operand(ds.to(q.dtype), PRECISION, IS_NVIDIA), q_parts, dk, PRECISION)

    if WRITE_DK:
        dk_ptr += batch * stride_dkb + kv_head * stride_dkh
        offsets = keys.to(tl.int64)[:, None] * stride_dkn + dims[None, :]
        inside = (keys < seqlen_k)[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(dk_ptr + offsets, rounded(dk * softmax_scale, dk_ptr.dtype.element_ty), mask=inside)
    if WRITE_DV:
        if HAS_DROPOUT:
            dv = dv * dropout_scale
        dv_ptr += batch * stride_dvb + kv_head * stride_dvh
        offsets = keys.to(tl.int64)[:, None] * stride_dvn + dims_v[None, :]
        inside = (keys < seqlen_k)[:, None] & (dims_v < HEAD_DIM_V)[None, :]
        tl.store(dv_ptr + offsets, rounded(dv, dv_ptr.dtype.element_ty), mask=inside)
