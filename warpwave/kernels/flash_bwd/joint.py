"""Device code of the launch that computes every gradient, for calls in which one tile holds a whole sequence.

A block owns a sequence and the query heads of one kv head. It loads q, k, v and dO of a head once, and has S, P, dP and
dS of all pairs in registers:

    delta = rowsum(P * dP) - dlse;   dQ = scale * dS K;   dK = scale * dS^T Q;   dV = P^T dO

That is five products and one launch, where separate owners of queries and keys take seven and two. The statistics of
each row come from its scores, so neither out nor the log-sum-exp of the forward is read.

If the gradient of a bias is wanted, a block owns a batch item and head of the bias, or a part of the items and heads
that read it. It walks these in a fixed order and adds up their dS in registers.

Bound: memory bandwidth.
"""

from __future__ import annotations

from warpwave.kernels.column_tiles import (
    columns_of,
    load_tiles,
    operands,
    pointers_of,
    row_products,
    store_tiles,
    times,
    with_products,
    zeros,
)
from warpwave.kernels.dropout import dropout_keeps, dropout_of_head, load_dropout_key
from warpwave.kernels.flash_bwd.dbias import store_cells
from warpwave.kernels.flash_bwd.dq import UNSPECIALIZED
from warpwave.kernels.flash_bwd.tiles import any_of, load_rows, score_gradient, score_tile, through_softcap
from warpwave.kernels.groups import Dropout, InUnits, OfHeads, ScoreRules, Sequences, Window
from warpwave.kernels.primitives import (
    LOG2_E,
    band_edges,
    in_elements,
    key_ranges,
    keys_of_groups,
    operand,
    packed_sequence,
    part_of,
    rules_of_head,
    softmax_step,
    transposed,
)
from warpwave.runtime.triton_or_stub import jit, tl


@jit(do_not_specialize=[*UNSPECIALIZED, "batch_size", "owner_batch", "owner_heads", "num_parts"])
def flash_bwd_joint_kernel(
    q_tensor: InUnits,
    k_tensor: InUnits,
    v_tensor: InUnits,
    dout_tensor: InUnits,
    rules: ScoreRules,
    sequences: Sequences,
    window: Window,
    dropout: Dropout,
    dlse: OfHeads,
    sinks_ptr,
    dq_tensor: InUnits,
    dk_tensor: InUnits,
    dv_tensor: InUnits,
    dbias_ptr,
    of_slopes_ptr,
    of_sinks_ptr,
    batch_size,
    owner_batch,
    owner_heads,
    num_heads_q,
    group_size,
    num_parts,
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
    PAIR_GROUP: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
    HAS_GROUP: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WRITE_DQ: tl.constexpr,
    WRITE_DK: tl.constexpr,
    WRITE_DV: tl.constexpr,
    WRITE_DBIAS: tl.constexpr,
    PER_QUERY: tl.constexpr,
    PER_KEY: tl.constexpr,
    WRITE_DSLOPES: tl.constexpr,
    WRITE_DSINKS: tl.constexpr,
):
    """Computes the gradients of the sequences and heads that a block owns.

    Owners are `owner_batch` x `owner_heads` equal shares of the batch items and the query heads, each in `num_parts`
    parts: (batch, num_heads_kv) in one part each, or the axes of the bias whose gradient is wanted.

    HAS_GROUP states whether the query heads of an owner share a kv head, so that dK and dV are sums over them; a bias's
    gradient is then not wanted. `of_slopes` and `of_sinks` receive one number a head, (batch, num_heads_q).
    """
    q_tensor = in_elements(q_tensor, STRIDE_UNIT)
    k_tensor = in_elements(k_tensor, STRIDE_UNIT)
    v_tensor = in_elements(v_tensor, STRIDE_UNIT)
    dout_tensor = in_elements(dout_tensor, STRIDE_UNIT)
    if WRITE_DQ:
        dq_tensor = in_elements(dq_tensor, STRIDE_UNIT)
    if WRITE_DK:
        dk_tensor = in_elements(dk_tensor, STRIDE_UNIT)
    if WRITE_DV:
        dv_tensor = in_elements(dv_tensor, STRIDE_UNIT)

    owner = tl.program_id(0) % (owner_batch * owner_heads)
    part = tl.program_id(0) // (owner_batch * owner_heads)
    heads = num_heads_q // owner_heads
    item_begin, item_end = part_of(batch_size // owner_batch * heads, part, num_parts)
    first_batch = owner // owner_heads * (batch_size // owner_batch)
    first_head = owner % owner_heads * heads

    CHECK_D: tl.constexpr = HEAD_DIM < BLOCK_D + REST_D
    CHECK_DV: tl.constexpr = HEAD_DIM_V < BLOCK_DV + REST_DV
    MAY_HIDE: tl.constexpr = rules.HAS_MASK or rules.HAS_BIAS
    dims = columns_of(BLOCK_D, REST_D)
    dims_v = columns_of(BLOCK_DV, REST_DV)
    rows = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    dk = zeros(BLOCK_N, dims)  # of [BLOCK_N, BLOCK_D]
    dv = zeros(BLOCK_N, dims_v)  # of [BLOCK_N, BLOCK_DV]
    dbias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if dropout.HAS_DROPOUT:
        dropout_key = load_dropout_key(dropout.seed_ptr)
    WALKS: tl.constexpr = HAS_GROUP or WRITE_DBIAS
    # The compiler drops a loop from 0 to 1. It would move addresses and conditions that no item changes out of a real
    # loop, and they would fill the registers; so rows and keys depend on the item, by the sign of a positive number.
    num_items = 1
    if WALKS:
        num_items = item_end - item_begin
    for i in range(num_items):
        item = item_begin + i
        if WALKS:
            rows = tl.arange(0, BLOCK_M) + (item >> 31)
            keys = tl.arange(0, BLOCK_N) + (item >> 31)
        batch = (first_batch + item // heads).to(tl.int64)
        head = (first_head + item % heads).to(tl.int64)
        kv_head = head // group_size
        q_ptr = q_tensor.ptr + (batch * q_tensor.stride_b + head * q_tensor.stride_h)
        k_ptr = k_tensor.ptr + (batch * k_tensor.stride_b + kv_head * k_tensor.stride_h)
        v_ptr = v_tensor.ptr + (batch * v_tensor.stride_b + kv_head * v_tensor.stride_h)
        dout_ptr = dout_tensor.ptr + (batch * dout_tensor.stride_b + head * dout_tensor.stride_h)
        dq_ptr, dk_ptr, dv_ptr = dq_tensor.ptr, dk_tensor.ptr, dv_tensor.ptr
        if WRITE_DQ:
            dq_ptr += batch * dq_tensor.stride_b + head * dq_tensor.stride_h
        if WRITE_DK:
            dk_ptr += batch * dk_tensor.stride_b + kv_head * dk_tensor.stride_h
        if WRITE_DV:
            dv_ptr += batch * dv_tensor.stride_b + kv_head * dv_tensor.stride_h
        line = batch * dlse.stride_b + head * dlse.stride_h
        seqlen_q, seqlen_k = sequences.seqlen_q, sequences.seqlen_k
        if sequences.IS_VARLEN:
            q_begin, seqlen_q = packed_sequence(sequences.cu_seqlens_q_ptr, batch, seqlen_q, sequences.total_q)
            k_begin, seqlen_k = packed_sequence(sequences.cu_seqlens_k_ptr, batch, seqlen_k, sequences.total_k)
            q_ptr += q_begin * q_tensor.stride_m
            k_ptr += k_begin * k_tensor.stride_m
            v_ptr += k_begin * v_tensor.stride_m
            dout_ptr += q_begin * dout_tensor.stride_m
            line += q_begin
            if WRITE_DQ:
                dq_ptr += q_begin * dq_tensor.stride_m
            if WRITE_DK:
                dk_ptr += k_begin * dk_tensor.stride_m
            if WRITE_DV:
                dv_ptr += k_begin * dv_tensor.stride_m
        mask_ptr, bias_ptr, slope_log2 = rules_of_head(rules, batch, head, PAIR_GROUP)

        # Keys that the band hides from every query, and queries that see no key, are not read: NaN there must have no
        # effect.
        low, high = band_edges(seqlen_q, seqlen_k, window.left, window.right, window.TOP_LEFT)
        key_begin, key_end, _, _, _ = key_ranges(
            0, seqlen_q - 1, seqlen_k, low, high, BLOCK_N, window.HAS_LOW, window.HAS_HIGH
        )
        row_begin, row_end, _, _, _ = key_ranges(
            0, seqlen_k - 1, seqlen_q, -high, -low, BLOCK_M, window.HAS_HIGH, window.HAS_LOW
        )
        q_pointers = pointers_of(q_ptr, rows, dims, q_tensor.stride_m, q_tensor.stride_d)
        q = load_tiles(q_pointers, 0, rows, dims, row_begin, row_end, HEAD_DIM, CHECK_D)  # of [BLOCK_M, BLOCK_D]
        k_pointers = pointers_of(k_ptr, keys, dims, k_tensor.stride_m, k_tensor.stride_d)
        k = load_tiles(k_pointers, 0, keys, dims, key_begin, key_end, HEAD_DIM, CHECK_D)  # of [BLOCK_N, BLOCK_D]
        v = pointers_of(v_ptr, keys, dims_v, v_tensor.stride_m, v_tensor.stride_d)
        v = load_tiles(v, 0, keys, dims_v, key_begin, key_end, HEAD_DIM_V, CHECK_DV)  # of [BLOCK_N, BLOCK_DV]
        dout_pointers = pointers_of(dout_ptr, rows, dims_v, dout_tensor.stride_m, 1)
        dout = load_tiles(
            dout_pointers, 0, rows, dims_v, row_begin, row_end, HEAD_DIM_V, CHECK_DV
        )  # of [BLOCK_M, BLOCK_DV]

        q_parts = operands(q, PRECISION, IS_NVIDIA)
        k_parts = operands(k, PRECISION, IS_NVIDIA)
        raw = row_products(q_parts, k_parts, PRECISION)  # [BLOCK_M, BLOCK_N]
        row_inside = (rows < row_end)[:, None]
        inside = row_inside & (keys < key_end)[None, :]
        readable_keys = (keys_of_groups(keys, PAIR_GROUP) < key_end)[None, :]
        scores, scale, derivative = score_tile(
            raw, rows[:, None], keys[None, :], inside, row_inside, readable_keys, True, low, high, seqlen_k - seqlen_q,
            mask_ptr, bias_ptr, slope_log2, rules, window, MASK_PER_QUERY,
        )  # fmt: skip
        nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
        p, _, m_i, l_i = softmax_step(scores, scale, nothing, tl.zeros([BLOCK_M], tl.float32))
        alpha = 1.0
        p_sink = 0.0
        if HAS_SINKS:
            sink_log2 = tl.load(sinks_ptr + head) * LOG2_E
            m_all = tl.maximum(m_i, sink_log2)
            m_shift = tl.where(m_all == float("-inf"), 0.0, m_all)
            alpha = tl.math.exp2(m_i - m_shift)
            p_sink = tl.math.exp2(sink_log2 - m_shift)
            l_i = l_i * alpha + p_sink
        inverse = tl.math.div_rn(1.0, tl.where(l_i == 0.0, 1.0, l_i))
        p = p * (alpha * inverse)[:, None]

        dp = row_products(operands(dout, PRECISION, IS_NVIDIA), operands(v, PRECISION, IS_NVIDIA), PRECISION)
        p_kept = p
        if dropout.HAS_DROPOUT:
            dropped_head = dropout_of_head(dropout_key, batch, head)
            kept = dropout_keeps(
                dropped_head, 0, rows[:, None], 0, keys[None, :], dropout.threshold
            )  # fmt: skip
            p_kept = tl.where(kept, p, 0.0)
            dp = tl.where(kept, dp * dropout.scale, 0.0)
        delta = tl.sum(score_gradient(p, dp, 0.0, True, MAY_HIDE), 1)  # [BLOCK_M]
        if HAS_DLSE:
            delta -= load_rows(dlse.ptr + line, rows, seqlen_q, 0.0)
        ds = score_gradient(p, dp, delta[:, None], True, MAY_HIDE)
        if WRITE_DSINKS:
            # The value of a sink is 0, so its dP is 0 too. The upstream gradient of a row that sees nothing may be NaN.
            of_sink = tl.where((rows < seqlen_q) & (p_sink != 0.0), p_sink * inverse * delta, 0.0)
            tl.store(of_sinks_ptr + (batch * num_heads_q + head), -tl.sum(of_sink, 0))
        if WRITE_DSLOPES:
            distance = tl.abs(rows[:, None] + (seqlen_k - seqlen_q) - keys[None, :]).to(tl.float32)
            tl.store(of_slopes_ptr + (batch * num_heads_q + head), -tl.sum(tl.sum(ds * distance, 1), 0))
        if WRITE_DBIAS:
            dbias += ds
        ds = through_softcap(ds, derivative, p, rules.HAS_SOFTCAP)
        if MAY_HIDE:
            # A key that no query sees, and a query that sees no key, must have no effect, but 0 * NaN is NaN.
            # They are loaded again, because registers do not suffice to keep them.
            key_end = tl.where(any_of(p, 0), key_end, 0)  # [BLOCK_N]
            row_end = tl.where(any_of(p, 1), row_end, 0)  # [BLOCK_M]
            k = load_tiles(k_pointers, 0, keys, dims, key_begin, key_end, HEAD_DIM, CHECK_D)
            q = load_tiles(q_pointers, 0, rows, dims, row_begin, row_end, HEAD_DIM, CHECK_D)
            dout = load_tiles(dout_pointers, 0, rows, dims_v, row_begin, row_end, HEAD_DIM_V, CHECK_DV)
            k_parts = operands(k, PRECISION, IS_NVIDIA)
            q_parts = operands(q, PRECISION, IS_NVIDIA)
        ds = operand(ds.to(k[0].dtype), PRECISION, IS_NVIDIA)
        if WRITE_DQ:
            # The scale comes after the products: before, it would push a small ds out of the range of 16 bits.
            dq = with_products(ds, k_parts, zeros(BLOCK_M, dims), None, PRECISION)
            store_tiles(dq_ptr, rows, seqlen_q, dims, dq_tensor.stride_m, times(dq, rules.softmax_scale), HEAD_DIM)
        if not HAS_GROUP:
            dk = zeros(BLOCK_N, dims)
            dv = zeros(BLOCK_N, dims_v)
            last = True
        else:
            last = item % group_size == group_size - 1
        if WRITE_DV:
            p_parts = transposed(operand(p_kept.to(dout[0].dtype), PRECISION, IS_NVIDIA))
            dv = with_products(p_parts, operands(dout, PRECISION, IS_NVIDIA), dv, None, PRECISION)
            if last:
                factor = dropout.scale if dropout.HAS_DROPOUT else 1.0
                store_tiles(dv_ptr, keys, seqlen_k, dims_v, dv_tensor.stride_m, times(dv, factor), HEAD_DIM_V)
        if WRITE_DK:
            dk = with_products(transposed(ds), q_parts, dk, None, PRECISION)
            if last:
                store_tiles(dk_ptr, keys, seqlen_k, dims, dk_tensor.stride_m, times(dk, rules.softmax_scale), HEAD_DIM)

    if WRITE_DBIAS:
        line = tl.cast(part, tl.int64) * (owner_batch * owner_heads) + owner
        store_cells(dbias_ptr, dbias, line, rows, keys, sequences.seqlen_q, sequences.seqlen_k, PER_QUERY, PER_KEY)
