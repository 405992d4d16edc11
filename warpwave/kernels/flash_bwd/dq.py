"""Device code of the launch that owns queries: dq, and the statistics of each row for the other launches.

A block owns BLOCK_M queries of one head and walks the keys that they see. Before the walk it computes

    delta = rowsum(dO * out) - dlse

from the rows that it has loaded, and stores it for the later launches, so that no separate launch reads out and dO.

In float32 it walks the keys twice. The first walk computes the log-sum-exp and delta = rowsum(P * dP) - dlse from the
same products as P and dS, so common errors cancel to rounding, whichever kernel computed out. With a rounded out and
log-sum-exp instead, gradients of rows that one key dominates would be off by that rounding, times the values.
"""

from __future__ import annotations

from warpwave.kernels.column_tiles import (
    columns_of,
    have_nan,
    load_tiles,
    only_where,
    operands,
    pointers_of,
    row_products,
    store_tiles,
    times,
    with_products,
    zeros,
)
from warpwave.kernels.dropout import dropout_keeps, dropout_of_head, load_dropout_key
from warpwave.kernels.flash_bwd.tiles import (
    any_of,
    infinite_if_blind,
    load_rows,
    probabilities,
    score_gradient,
    score_tile,
    statistics_of_rows,
    store_statistics,
    through_softcap,
)
from warpwave.kernels.groups import Dropout, InUnits, OfHeads, ScoreRules, Sequences, Window
from warpwave.kernels.primitives import (
    LOG2_E,
    band_edges,
    in_elements,
    key_ranges,
    keys_of_groups,
    operand,
    packed_sequence,
    rules_of_head,
    softmax_step,
    steps_of,
    tile_again,
    tile_of,
)
from warpwave.runtime.triton_or_stub import jit, tl

# Arguments that the compiler must not specialize on; otherwise new lengths would recompile.
UNSPECIALIZED = ["num_heads_q", "group_size"]


@jit(do_not_specialize=UNSPECIALIZED)
def flash_bwd_dq_kernel(
    q_tensor: InUnits,
    k_tensor: InUnits,
    v_tensor: InUnits,
    dout_tensor: InUnits,
    rules: ScoreRules,
    sequences: Sequences,
    window: Window,
    dropout: Dropout,
    lse_tensor: OfHeads,
    statistics_ptr,
    out_tensor: InUnits,
    dlse_ptr,
    sinks_ptr,
    dq_tensor: InUnits,
    of_slopes_ptr,
    of_sinks_ptr,
    num_heads_q,
    group_size,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    REST_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
    TWO_LOOPS: tl.constexpr,
    PAIR_GROUP: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
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
    q_tensor = in_elements(q_tensor, STRIDE_UNIT)
    k_tensor = in_elements(k_tensor, STRIDE_UNIT)
    v_tensor = in_elements(v_tensor, STRIDE_UNIT)
    dout_tensor = in_elements(dout_tensor, STRIDE_UNIT)
    out_tensor = in_elements(out_tensor, STRIDE_UNIT)
    if WRITE_DQ:
        dq_tensor = in_elements(dq_tensor, STRIDE_UNIT)

    num_tiles = tl.cdiv(sequences.seqlen_q, BLOCK_M)
    tile = tl.program_id(0) % num_tiles
    batch_head = tl.program_id(0) // num_tiles
    part = tl.cast(batch_head, tl.int64) * num_tiles + tile
    if window.HAS_HIGH:
        tile = num_tiles - 1 - tile  # the longest walks first
    head = (batch_head % num_heads_q).to(tl.int64)
    batch = (batch_head // num_heads_q).to(tl.int64)
    kv_head = head // group_size

    q_ptr, k_ptr, v_ptr, dout_ptr = q_tensor.ptr, k_tensor.ptr, v_tensor.ptr, dout_tensor.ptr
    out_ptr, dq_ptr, lse_ptr = out_tensor.ptr, dq_tensor.ptr, lse_tensor.ptr
    seqlen_q, seqlen_k = sequences.seqlen_q, sequences.seqlen_k
    if sequences.IS_VARLEN:
        q_begin, seqlen_q = packed_sequence(sequences.cu_seqlens_q_ptr, batch, seqlen_q, sequences.total_q)
        k_begin, seqlen_k = packed_sequence(sequences.cu_seqlens_k_ptr, batch, seqlen_k, sequences.total_k)
        if tile * BLOCK_M >= seqlen_q:
            if WRITE_DSLOPES:
                tl.store(of_slopes_ptr + part, 0.0)
            if WRITE_DSINKS:
                tl.store(of_sinks_ptr + part, 0.0)
            return
        q_ptr += q_begin * q_tensor.stride_m
        k_ptr += k_begin * k_tensor.stride_m
        v_ptr += k_begin * v_tensor.stride_m
        dout_ptr += q_begin * dout_tensor.stride_m
        out_ptr += q_begin * out_tensor.stride_m
        statistics_ptr += q_begin
        if not OWN_STATISTICS:
            lse_ptr += q_begin
        if HAS_DLSE:
            dlse_ptr += q_begin
        if WRITE_DQ:
            dq_ptr += q_begin * dq_tensor.stride_m
    q_ptr += batch * q_tensor.stride_b + head * q_tensor.stride_h
    k_ptr += batch * k_tensor.stride_b + kv_head * k_tensor.stride_h
    v_ptr += batch * v_tensor.stride_b + kv_head * v_tensor.stride_h
    dout_ptr += batch * dout_tensor.stride_b + head * dout_tensor.stride_h
    out_ptr += batch * out_tensor.stride_b + head * out_tensor.stride_h
    line = batch * lse_tensor.stride_b + head * lse_tensor.stride_h
    mask_ptr, bias_ptr, slope_log2 = rules_of_head(rules, batch, head, PAIR_GROUP)

    if dropout.HAS_DROPOUT:
        dropped_head = dropout_of_head(load_dropout_key(dropout.seed_ptr), batch, head)

    row_begin = tile * BLOCK_M
    row_last = tl.minimum(row_begin + BLOCK_M, seqlen_q) - 1
    first_rows = tl.arange(0, BLOCK_M)
    rows = row_begin + first_rows
    low, high = band_edges(seqlen_q, seqlen_k, window.left, window.right, window.TOP_LEFT)
    key_begin, key_end, first, whole_begin, whole_end = key_ranges(
        row_begin, row_last, seqlen_k, low, high, BLOCK_N, window.HAS_LOW, window.HAS_HIGH
    )

    CHECK_D: tl.constexpr = HEAD_DIM < BLOCK_D + REST_D
    CHECK_DV: tl.constexpr = HEAD_DIM_V < BLOCK_DV + REST_DV
    dims = columns_of(BLOCK_D, REST_D)
    dims_v = columns_of(BLOCK_DV, REST_DV)
    q = pointers_of(q_ptr, rows, dims, q_tensor.stride_m, q_tensor.stride_d)
    q = load_tiles(q, 0, rows, dims, 0, seqlen_q, HEAD_DIM, CHECK_D)  # of [BLOCK_M, BLOCK_D]
    dout = pointers_of(dout_ptr, rows, dims_v, dout_tensor.stride_m, 1)
    dout = load_tiles(dout, 0, rows, dims_v, 0, seqlen_q, HEAD_DIM_V, CHECK_DV)  # of [BLOCK_M, BLOCK_DV]
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    delta = tl.zeros([BLOCK_M], tl.float32)
    lse_log2 = m_i
    if not OWN_STATISTICS:
        out = pointers_of(out_ptr, rows, dims_v, out_tensor.stride_m, 1)
        out = load_tiles(out, 0, rows, dims_v, 0, seqlen_q, HEAD_DIM_V, CHECK_DV)  # of [BLOCK_M, BLOCK_DV]
        lse_log2, delta = statistics_of_rows(dout, out, lse_ptr, dlse_ptr, line, rows, seqlen_q, HAS_DLSE)
    sink_log2 = float("-inf")
    if HAS_SINKS:
        sink_log2 = tl.load(sinks_ptr + head) * LOG2_E

    q = operands(q, PRECISION, IS_NVIDIA)
    dout = operands(dout, PRECISION, IS_NVIDIA)
    first_keys = tl.arange(0, BLOCK_N)
    k_pointers = pointers_of(k_ptr, first_keys, dims, k_tensor.stride_m, k_tensor.stride_d)
    v_pointers = pointers_of(v_ptr, first_keys, dims_v, v_tensor.stride_m, v_tensor.stride_d)
    dq = zeros(BLOCK_M, dims)  # of [BLOCK_M, BLOCK_D]
    of_slope = tl.zeros([BLOCK_M], tl.float32)
    ds_sum = of_slope
    p_distance = of_slope  # sums of P times the distance
    # Walk 2 repeats walk 1 if dq has a NaN, perhaps of a key that no query of its tile sees, and has no steps otherwise
    # (flash_fwd).
    MAY_REPEAT: tl.constexpr = WRITE_DQ and (rules.HAS_MASK or rules.HAS_BIAS)
    LAST_WALK: tl.constexpr = 2 if MAY_REPEAT else 1 if WRITE_DQ or WRITE_DSLOPES else 0
    for WALK in tl.static_range(0 if OWN_STATISTICS else 1, LAST_WALK + 1):
        walk_end = key_end
        if WALK == 2:
            again = have_nan(dq)
            walk_end = tl.where(again, key_end, first)
            dq = only_where(~again, dq)
        for CHECK in tl.static_range(0 if TWO_LOOPS and WALK < 2 else 1, 2):
            begin, end = steps_of(first, whole_begin, whole_end, walk_end, CHECK, TWO_LOOPS and WALK < 2)
            for step in range(begin, end, BLOCK_N):
                key_tile = tile_of(step, whole_begin, whole_end, CHECK, TWO_LOOPS and WALK < 2)
                if WALK == 2:
                    key_tile = tile_again(step, first, whole_begin, whole_end, TWO_LOOPS)
                at_edge = CHECK
                if WALK == 2 or not TWO_LOOPS:
                    at_edge = (key_tile < whole_begin) | (key_tile >= whole_end)
                keys = key_tile + first_keys
                tile_offset = tl.cast(key_tile, tl.int64)
                # Keys that no query of the tile sees are not read: NaN there must have no effect.
                k = load_tiles(
                    k_pointers, tile_offset * k_tensor.stride_m, keys, dims, key_begin, key_end, HEAD_DIM, CHECK_D,
                    CHECK,
                )  # of [BLOCK_N, BLOCK_D]  # fmt: skip
                v = load_tiles(
                    v_pointers, tile_offset * v_tensor.stride_m, keys, dims_v, key_begin, key_end, HEAD_DIM_V, CHECK_DV,
                    CHECK,
                )  # of [BLOCK_N, BLOCK_DV]  # fmt: skip
                k_parts = operands(k, PRECISION, IS_NVIDIA)
                v_parts = operands(v, PRECISION, IS_NVIDIA)
                raw = row_products(q, k_parts, PRECISION)  # [BLOCK_M, BLOCK_N]
                row_inside = (rows < seqlen_q)[:, None]
                inside = row_inside & (keys < key_end)[None, :]
                readable_keys = (keys_of_groups(keys, PAIR_GROUP) < key_end)[None, :]
                scores, scale, derivative = score_tile(
                    raw, rows[:, None], keys[None, :], inside, row_inside, readable_keys, at_edge, low, high,
                    seqlen_k - seqlen_q, mask_ptr, bias_ptr, slope_log2, rules, window, MASK_PER_QUERY,
                )  # fmt: skip
                dp = row_products(dout, v_parts, PRECISION)  # [BLOCK_M, BLOCK_N]
                if dropout.HAS_DROPOUT:
                    kept = dropout_keeps(
                        dropped_head, row_begin, first_rows[:, None], key_tile, first_keys[None, :],
                        dropout.threshold,
                    )  # fmt: skip
                    dp = tl.where(kept, dp * dropout.scale, 0.0)
                if WALK == 0:
                    p, alpha, m_i, l_i = softmax_step(scores, scale, m_i, l_i)
                    delta = delta * alpha + tl.sum(
                        score_gradient(p, dp, 0.0, at_edge, rules.HAS_MASK or rules.HAS_BIAS), 1
                    )
                else:
                    p = probabilities(scores, scale, lse_log2[:, None], rules.HAS_MASK or rules.HAS_BIAS)
                    ds = score_gradient(p, dp, delta[:, None], at_edge, rules.HAS_MASK or rules.HAS_BIAS)
                    if WRITE_DSLOPES and WALK == 1:
                        distance = tl.abs(rows[:, None] + (seqlen_k - seqlen_q) - keys[None, :]).to(tl.float32)
                        of_slope -= tl.sum(ds * distance, 1)
                        ds_sum += tl.sum(ds, 1)
                        p_distance += tl.sum(p * distance, 1)
                    if WRITE_DQ:
                        ds = through_softcap(ds, derivative, p, rules.HAS_SOFTCAP)
                        if WALK == 2:
                            k_parts = operands(only_where(any_of(p, 0)[:, None], k), PRECISION, IS_NVIDIA)
                        ds = operand(ds.to(k[0].dtype), PRECISION, IS_NVIDIA)
                        dq = with_products(ds, k_parts, dq, None, PRECISION)
        if WALK == 0:
            m_all = tl.maximum(m_i, sink_log2)
            m_shift = tl.where(m_all == float("-inf"), 0.0, m_all)
            alpha = tl.math.exp2(m_i - m_shift)
            l_i = l_i * alpha + tl.math.exp2(sink_log2 - m_shift)
            delta = delta * alpha * tl.math.div_rn(1.0, tl.where(l_i == 0.0, 1.0, l_i))
            if HAS_DLSE:
                delta -= load_rows(dlse_ptr + line, rows, seqlen_q, 0.0)
            lse_log2 = infinite_if_blind(m_all + tl.math.log2(l_i))

    store_statistics(statistics_ptr + line, rows, seqlen_q, lse_log2, delta)
    # The value of a sink is 0, so its dP is 0 too. A row that sees nothing may have NaN in delta.
    p_sink = tl.math.exp2(sink_log2 - lse_log2)
    of_sink = tl.where(p_sink == 0.0, 0.0, p_sink * delta)
    if WRITE_DSINKS:
        tl.store(of_sinks_ptr + part, -tl.sum(of_sink, 0))
    if WRITE_DSLOPES:
        # out is rounded, so the computed dS of a row do not add up to the exact sum, dLSE + P(sink) * delta. The excess
        # would be multiplied by whole distances, which may exceed their differences by far.
        excess = ds_sum - of_sink
        if HAS_DLSE:
            excess -= load_rows(dlse_ptr + line, rows, seqlen_q, 0.0)
        of_slope += tl.where(p_distance == 0.0, 0.0, excess * p_distance)
        tl.store(of_slopes_ptr + part, tl.sum(of_slope, 0))
    if WRITE_DQ:
        # The scale comes after the products: before, it would push a small ds out of the range of 16 bits.
        dq_ptr += batch * dq_tensor.stride_b + head * dq_tensor.stride_h
        store_tiles(dq_ptr, rows, seqlen_q, dims, dq_tensor.stride_m, times(dq, rules.softmax_scale), HEAD_DIM)
