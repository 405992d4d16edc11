"""Device code of the launch that owns queries: dq, and the statistics of each row for the other launches.

A block owns BLOCK_M queries of one head and walks the keys that they see. Before the walk it computes

    delta = rowsum(dO * out) - dlse

from the rows that it has loaded, and stores it for the later launches, so that no separate launch reads out and dO.

In float32 it walks the keys twice. The first walk computes the log-sum-exp and delta = rowsum(P * dP) - dlse from the
same products as P and dS, so common errors cancel to rounding, whichever kernel computed out. With a rounded out and
log-sum-exp instead, gradients of rows that one key dominates would be off by that rounding, times the values.
"""

from __future__ import annotations

from warpwave.kernels.dropout import dropout_keeps, load_dropout_key
from warpwave.kernels.flash_bwd.tiles import (
    any_of,
    infinite_if_blind,
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
    softmax_step,
    tile_pointers,
    transposed,
)
from warpwave.runtime.triton_or_stub import jit, tl

# Arguments that the compiler must not specialize on; otherwise new lengths would recompile. These are sizes, and every
# stride whose alignment is already in its unit or is not useful.
UNSPECIALISED = [
    *("stride_qb", "stride_qm", "stride_qh", "stride_kb", "stride_kn", "stride_kh", "stride_vb", "stride_vn"),
    *("stride_vh", "stride_dob", "stride_dom", "stride_doh", "stride_lb", "stride_lh", "stride_mask_b"),
    *("stride_mask_h", "stride_bias_b", "stride_bias_h", "stride_alibi_b", "stride_alibi_h"),
    *("seqlen_q", "seqlen_k", "total_q", "total_k", "num_heads_q", "group_size", "window_left", "window_right"),
    "dropout_threshold",
]


@jit(
    do_not_specialize=[*UNSPECIALISED, "stride_ob", "stride_om", "stride_oh", "stride_dqb", "stride_dqm", "stride_dqh"]
)
def flash_bwd_dq_kernel(
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
    out_ptr,
    dlse_ptr,
    sinks_ptr,
    own_lse_ptr,
    dq_ptr,
    of_slopes_ptr,
    of_sinks_ptr,
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
    stride_ob,
    stride_om,
    stride_oh,
    stride_dqb,
    stride_dqm,
    stride_dqh,
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
    OWN_STATISTICS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WRITE_DQ: tl.constexpr,
    WRITE_DSLOPES: tl.constexpr,
    WRITE_DSINKS: tl.constexpr,
):
    """Computes delta and dq of one tile of queries of one head, and its part of the gradients of the head's slope and
    sink.

    With OWN_STATISTICS it also computes the log-sum-exp in bits, and reads neither out nor the forward's log-sum-exp.
    `of_slopes` and `of_sinks` receive one number a block, (batch, num_heads_q, tiles).
    """
    stride_qb, stride_qm, stride_qh = in_elements(stride_qb, stride_qm, stride_qh, STRIDE_UNIT)
    stride_kb, stride_kn, stride_kh = in_elements(stride_kb, stride_kn, stride_kh, STRIDE_UNIT)
    stride_vb, stride_vn, stride_vh = in_elements(stride_vb, stride_vn, stride_vh, STRIDE_UNIT)
    stride_dob, stride_dom, stride_doh = in_elements(stride_dob, stride_dom, stride_doh, STRIDE_UNIT)
    stride_ob, stride_om, stride_oh = in_elements(stride_ob, stride_om, stride_oh, STRIDE_UNIT)
    stride_dqb, stride_dqm, stride_dqh = in_elements(stride_dqb, stride_dqm, stride_dqh, STRIDE_UNIT)

    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile = tl.program_id(0) % num_tiles
    batch_head = tl.program_id(0) // num_tiles
    part = tl.cast(batch_head, tl.int64) * num_tiles + tile
    if HAS_HIGH:
        tile = num_tiles - 1 - tile  # the longest walks first
    head = (batch_head % num_heads_q).to(tl.int64)
    batch = (batch_head // num_heads_q).to(tl.int64)
    kv_head = head // group_size

    if IS_VARLEN:
        q_begin, seqlen_q = packed_sequence(cu_seqlens_q_ptr, batch, seqlen_q, total_q)
        k_begin, seqlen_k = packed_sequence(cu_seqlens_k_ptr, batch, seqlen_k, total_k)
        if tile * BLOCK_M >= seqlen_q:
            if WRITE_DSLOPES:
                tl.store(of_slopes_ptr + part, 0.0)
            if WRITE_DSINKS:
                tl.store(of_sinks_ptr + part, 0.0)
            return
        q_ptr += q_begin * stride_qm
        k_ptr += k_begin * stride_kn
        v_ptr += k_begin * stride_vn
        dout_ptr += q_begin * stride_dom
        out_ptr += q_begin * stride_om
        delta_ptr += q_begin
        if OWN_STATISTICS:
            own_lse_ptr += q_begin
        else:
            lse_ptr += q_begin
        if HAS_DLSE:
            dlse_ptr += q_begin
        if WRITE_DQ:
            dq_ptr += q_begin * stride_dqm
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh
    dout_ptr += batch * stride_dob + head * stride_doh
    out_ptr += batch * stride_ob + head * stride_oh
    line = batch * stride_lb + head * stride_lh
    if HAS_MASK:
        mask_ptr += batch * stride_mask_b + head * stride_mask_h
    if HAS_BIAS:
        bias_ptr += batch * stride_bias_b + head * stride_bias_h
    slope_log2 = 0.0
    if HAS_ALIBI:
        slope_log2 = tl.load(alibi_slopes_ptr + batch * stride_alibi_b + head * stride_alibi_h) * LOG2_E

    if HAS_DROPOUT:
        dropout_key = load_dropout_key(dropout_seed_ptr)

    row_begin = tile * BLOCK_M
    row_last = tl.minimum(row_begin + BLOCK_M, seqlen_q) - 1
    first_rows = tl.arange(0, BLOCK_M)
    rows = row_begin + first_rows
    low, high = band_edges(seqlen_q, seqlen_k, window_left, window_right, TOP_LEFT)
    key_begin, key_end, first, whole_begin, whole_end = key_ranges(
        row_begin, row_last, seqlen_k, low, high, BLOCK_N, HAS_LOW, HAS_HIGH
    )

    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    q = tile_pointers(q_ptr, rows, dims, stride_qm, stride_qd)
    q = load_tile(q, rows, dims, 0, seqlen_q, HEAD_DIM, HEAD_DIM < BLOCK_D)  # [BLOCK_M, BLOCK_D]
    dout = tile_pointers(dout_ptr, rows, dims_v, stride_dom, 1)
    dout = load_tile(dout, rows, dims_v, 0, seqlen_q, HEAD_DIM_V, HEAD_DIM_V < BLOCK_DV)  # [BLOCK_M, BLOCK_DV]
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    delta = tl.zeros([BLOCK_M], tl.float32)
    lse_log2 = m_i
    if not OWN_STATISTICS:
        out = tile_pointers(out_ptr, rows, dims_v, stride_om, 1)
        out = load_tile(out, rows, dims_v, 0, seqlen_q, HEAD_DIM_V, HEAD_DIM_V < BLOCK_DV)  # [BLOCK_M, BLOCK_DV]
        # The output of a row that sees nothing is 0, so its upstream gradient must have no effect, NaN included.
        delta = tl.sum(tl.where(out == 0.0, 0.0, dout.to(tl.float32) * out.to(tl.float32)), 1)  # [BLOCK_M]
        lse_log2 = load_lse_log2(lse_ptr + line, rows, 0, seqlen_q, False)  # [BLOCK_M]
        if HAS_DLSE:
            delta -= load_rows(dlse_ptr + line, rows, 0, seqlen_q, 0.0)
    sink_log2 = float("-inf")
    if HAS_SINKS:
        sink_log2 = tl.load(sinks_ptr + head) * LOG2_E

    q = operand(q, PRECISION, IS_NVIDIA)
    dout = operand(dout, PRECISION, IS_NVIDIA)
    first_keys = tl.arange(0, BLOCK_N)
    k_pointers = tile_pointers(k_ptr, first_keys, dims, stride_kn, stride_kd)
    v_pointers = tile_pointers(v_ptr, first_keys, dims_v, stride_vn, stride_vd)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    of_slope = tl.zeros([BLOCK_M], tl.float32)
    for WALK in tl.static_range(0 if OWN_STATISTICS else 1, 2 if WRITE_DQ or WRITE_DSLOPES else 1):
        for key_tile in range(first, key_end, BLOCK_N):
            at_edge = (key_tile < whole_begin) | (key_tile >= whole_end)
            keys = key_tile + first_keys
            tile_offset = tl.cast(key_tile, tl.int64)
            # Keys that no query of the tile sees are not read: NaN there must have no effect.
            k = k_pointers + tile_offset * stride_kn
            k = load_tile(k, keys, dims, key_begin, key_end, HEAD_DIM, HEAD_DIM < BLOCK_D)  # [BLOCK_N, BLOCK_D]
            v = v_pointers + tile_offset * stride_vn
            v = load_tile(v, keys, dims_v, key_begin, key_end, HEAD_DIM_V, HEAD_DIM_V < BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
            k_parts = operand(k, PRECISION, IS_NVIDIA)
            v_parts = operand(v, PRECISION, IS_NVIDIA)
            raw = product(q, transposed(k_parts, PRECISION), None, PRECISION)  # [BLOCK_M, BLOCK_N]
            inside = (rows < seqlen_q)[:, None] & (keys < key_end)[None, :]
            scores, scale, derivative = score_tile(
                raw, rows[:, None], keys[None, :], inside, at_edge, low, high, seqlen_k - seqlen_q, mask_ptr,
                stride_mask_m, stride_mask_n, bias_ptr, stride_bias_m, stride_bias_n, slope_log2, softmax_scale,
                softcap, HAS_LOW, HAS_HIGH, HAS_MASK, HAS_BIAS, HAS_ALIBI, HAS_SOFTCAP,
            )  # fmt: skip
            dp = product(dout, transposed(v_parts, PRECISION), None, PRECISION)  # [BLOCK_M, BLOCK_N]
            if HAS_DROPOUT:
                kept = dropout_keeps(
                    dropout_key, batch, head, row_begin, first_rows[:, None], key_tile, first_keys[None, :],
                    dropout_threshold,
                )  # fmt: skip
                dp = tl.where(kept, dp * dropout_scale, 0.0)
            if WALK == 0:
                p, alpha, m_i, l_i = softmax_step(scores, scale, m_i, l_i)
                delta = delta * alpha + tl.sum(score_gradient(p, dp, 0.0, at_edge, HAS_MASK or HAS_BIAS), 1)
            else:
                p = probabilities(scores, scale, lse_log2[:, None], HAS_MASK or HAS_BIAS)
                ds = score_gradient(p, dp, delta[:, None], at_edge, HAS_MASK or HAS_BIAS)
                if WRITE_DSLOPES:
                    distance = tl.abs(rows[:, None] + (seqlen_k - seqlen_q) - keys[None, :]).to(tl.float32)
                    of_slope -= tl.sum(ds * distance, 1)
                if WRITE_DQ:
                    ds = through_softcap(ds, derivative, p, HAS_SOFTCAP)
                    if HAS_MASK or HAS_BIAS:
                        # A key that no query of the tile sees must have no effect, but 0 * NaN is NaN.
                        k_parts = operand(tl.where(any_of(p, 0)[:, None], k, 0.0), PRECISION, IS_NVIDIA)
                    dq = product(operand(ds.to(k.dtype), PRECISION, IS_NVIDIA), k_parts, dq, PRECISION)
        if WALK == 0:
            m_all = tl.maximum(m_i, sink_log2)
            m_shift = tl.where(m_all == float("-inf"), 0.0, m_all)
            alpha = tl.math.exp2(m_i - m_shift)
            l_i = l_i * alpha + tl.math.exp2(sink_log2 - m_shift)
            delta = delta * alpha * tl.math.div_rn(1.0, tl.where(l_i == 0.0, 1.0, l_i))
            if HAS_DLSE:
                delta -= load_rows(dlse_ptr + line, rows, 0, seqlen_q, 0.0)
            lse_log2 = infinite_if_blind(m_all + tl.math.log2(l_i))
            tl.store(own_lse_ptr + line + rows, lse_log2, mask=rows < seqlen_q)

    tl.store(delta_ptr + line + rows, delta, mask=rows < seqlen_q)
    if WRITE_DSINKS:
        # The value of a sink is 0, so its dP is 0 too. A row that sees nothing may have NaN in delta.
        p_sink = tl.math.exp2(sink_log2 - lse_log2)
        tl.store(of_sinks_ptr + part, -tl.sum(tl.where(p_sink == 0.0, 0.0, p_sink * delta), 0))
    if WRITE_DSLOPES:
        tl.store(of_slopes_ptr + part, tl.sum(of_slope, 0))
    if WRITE_DQ:
        # The scale comes after the products: before, it would push a small ds out of the range of 16 bits.
        dq_ptr += batch * stride_dqb + head * stride_dqh
        offsets = rows.to(tl.int64)[:, None] * stride_dqm + dims[None, :]
        inside = (rows < seqlen_q)[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(dq_ptr + offsets, rounded(dq * softmax_scale, dq_ptr.dtype.element_ty), mask=inside)
