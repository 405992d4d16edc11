"""Device code of the launch that computes every gradient of calls with few queries or few keys: a tile holds all of
them, and blocks walk the others.

    P = exp(S - lse);   dV = P^T dO;   dS = P * (dO V^T - delta);   dK = scale * dS^T Q;   dQ = scale * dS K

A block holds the queries of a head and walks a part of its keys, or holds the keys of a kv head and walks a part of the
queries of its group. Each tile that is walked belongs to one block, which writes its gradients at once. The gradients
of what is held add up in registers; if several blocks hold the same tile, their parts in float32 are added after the
launch (parts.py). That is five products, where separate owners of queries and keys take seven, and what is walked is
read once. Scores are transposed, [BLOCK_N, BLOCK_M], so P^T and dS^T enter the products of dV and dK from registers.
Tiles that a band hides are walked too, because their gradients are zeros that a block must write.

Under a mask, 0 * NaN of a token that belongs to no visible pair must not reach a gradient. Queries that see nothing are
read as zeros. K is 0 in the product of dQ where it is not finite. A query that sees a NaN of K has a log-sum-exp of
NaN, so its dQ is NaN anyway. An infinite key whose probability is 0 adds nothing to dQ, where torch's has 0 * inf.

Bound: memory bandwidth with few queries at head_dim 128; elsewhere the latency of the products of a step, which follow
one another.
"""

from __future__ import annotations

from warpwave.kernels.column_tiles import (
    columns_of,
    load_tiles,
    only_finite,
    operands,
    pointers_of,
    row_products,
    store_tiles,
    times,
    with_products,
    zeros,
)
from warpwave.kernels.dropout import dropout_keeps, dropout_of_head, load_dropout_key
from warpwave.kernels.flash_bwd.dq import UNSPECIALIZED
from warpwave.kernels.flash_bwd.tiles import (
    end_of_seen,
    probabilities,
    score_gradient,
    score_tile,
    statistics_of_rows,
    through_softcap,
)
from warpwave.kernels.groups import Dropout, InUnits, OfHeads, ScoreRules, Sequences, Window
from warpwave.kernels.primitives import (
    band_edges,
    in_elements,
    key_ranges,
    keys_of_groups,
    operand,
    part_of,
    rules_of_head,
    transposed,
)
from warpwave.runtime.triton_or_stub import jit, tl


@jit(do_not_specialize=[*UNSPECIALIZED, "batch_size", "num_splits"])
def flash_bwd_one_side_kernel(
    q_tensor: InUnits,
    k_tensor: InUnits,
    v_tensor: InUnits,
    dout_tensor: InUnits,
    rules: ScoreRules,
    sequences: Sequences,
    window: Window,
    dropout: Dropout,
    lse_tensor: OfHeads,
    out_tensor: InUnits,
    dlse_ptr,
    dq_tensor: InUnits,
    dk_tensor: InUnits,
    dv_tensor: InUnits,
    batch_size,
    num_splits,
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
    PAIR_GROUP: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
    WALKS_KEYS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    WRITE_DQ: tl.constexpr,
    WRITE_DK: tl.constexpr,
    WRITE_DV: tl.constexpr,
):
    """Computes the gradients of one of `num_splits` parts of the keys of a head, or of the queries of a kv head.

    With WALKS_KEYS a tile holds all queries, and heads are not grouped; otherwise it holds all keys. Sequences are not
    packed. The gradients of what is held go to `dq_tensor`, or to `dk_tensor` and `dv_tensor`: contiguous, the gradient
    or float32 (num_splits, *gradient.shape).
    """
    q_tensor = in_elements(q_tensor, STRIDE_UNIT)
    k_tensor = in_elements(k_tensor, STRIDE_UNIT)
    v_tensor = in_elements(v_tensor, STRIDE_UNIT)
    dout_tensor = in_elements(dout_tensor, STRIDE_UNIT)
    out_tensor = in_elements(out_tensor, STRIDE_UNIT)
    if WRITE_DQ:
        dq_tensor = in_elements(dq_tensor, STRIDE_UNIT)
    if WRITE_DK:
        dk_tensor = in_elements(dk_tensor, STRIDE_UNIT)
    if WRITE_DV:
        dv_tensor = in_elements(dv_tensor, STRIDE_UNIT)

    split = tl.program_id(0) % num_splits
    batch_head = tl.program_id(0) // num_splits
    num_heads_kv = num_heads_q // group_size
    kv_head = (batch_head % num_heads_kv).to(tl.int64)
    batch = (batch_head // num_heads_kv).to(tl.int64)
    # The gradients of what is held are the split's part of them, and have a line for each part and batch item.
    line_of_part = split * tl.cast(batch_size, tl.int64) + batch
    q_ptr = q_tensor.ptr + batch * q_tensor.stride_b
    k_ptr = k_tensor.ptr + (batch * k_tensor.stride_b + kv_head * k_tensor.stride_h)
    v_ptr = v_tensor.ptr + (batch * v_tensor.stride_b + kv_head * v_tensor.stride_h)
    dout_ptr = dout_tensor.ptr + batch * dout_tensor.stride_b
    out_ptr = out_tensor.ptr + batch * out_tensor.stride_b
    dq_ptr, dk_ptr, dv_ptr = dq_tensor.ptr, dk_tensor.ptr, dv_tensor.ptr
    if WRITE_DQ:
        dq_ptr += (line_of_part if WALKS_KEYS else batch) * dq_tensor.stride_b
    if WRITE_DK:
        dk_ptr += (batch if WALKS_KEYS else line_of_part) * dk_tensor.stride_b + kv_head * dk_tensor.stride_h
    if WRITE_DV:
        dv_ptr += (batch if WALKS_KEYS else line_of_part) * dv_tensor.stride_b + kv_head * dv_tensor.stride_h
    seqlen_q, seqlen_k = sequences.seqlen_q, sequences.seqlen_k

    # Queries that see no key, and keys that no query sees, are not read: NaN there must have no effect.
    low, high = band_edges(seqlen_q, seqlen_k, window.left, window.right, window.TOP_LEFT)
    key_begin, key_end, _, whole_begin, whole_end = key_ranges(
        0, seqlen_q - 1, seqlen_k, low, high, BLOCK_N, window.HAS_LOW, window.HAS_HIGH
    )
    row_begin, row_end, _, _, _ = key_ranges(
        0, seqlen_k - 1, seqlen_q, -high, -low, BLOCK_M, window.HAS_HIGH, window.HAS_LOW
    )
    num_tiles = tl.cdiv(seqlen_k, BLOCK_N) if WALKS_KEYS else tl.cdiv(seqlen_q, BLOCK_M)
    item_begin, item_end = part_of(num_tiles * group_size, split, num_splits)

    CHECK_D: tl.constexpr = HEAD_DIM < BLOCK_D + REST_D
    CHECK_DV: tl.constexpr = HEAD_DIM_V < BLOCK_DV + REST_DV
    MAY_HIDE: tl.constexpr = rules.HAS_MASK  # no call has a bias
    dims = columns_of(BLOCK_D, REST_D)
    dims_v = columns_of(BLOCK_DV, REST_DV)
    first_rows = tl.arange(0, BLOCK_M)
    first_keys = tl.arange(0, BLOCK_N)
    q_pointers = pointers_of(q_ptr, first_rows, dims, q_tensor.stride_m, q_tensor.stride_d)
    dout_pointers = pointers_of(dout_ptr, first_rows, dims_v, dout_tensor.stride_m, 1)
    out_pointers = pointers_of(out_ptr, first_rows, dims_v, out_tensor.stride_m, 1)
    k_pointers = pointers_of(k_ptr, first_keys, dims, k_tensor.stride_m, k_tensor.stride_d)
    v_pointers = pointers_of(v_ptr, first_keys, dims_v, v_tensor.stride_m, v_tensor.stride_d)
    if WALKS_KEYS:
        line = batch * lse_tensor.stride_b + kv_head * lse_tensor.stride_h
        seen_end = end_of_seen(lse_tensor.ptr + line, first_rows, row_end, MAY_HIDE)  # [BLOCK_M], or one number
        q = load_tiles(
            q_pointers, kv_head * q_tensor.stride_h, first_rows, dims, row_begin, seen_end, HEAD_DIM, CHECK_D
        )  # of [BLOCK_M, BLOCK_D]
        dout = load_tiles(
            dout_pointers, kv_head * dout_tensor.stride_h, first_rows, dims_v, row_begin, seen_end, HEAD_DIM_V, CHECK_DV
        )  # of [BLOCK_M, BLOCK_DV]
        out = load_tiles(
            out_pointers, kv_head * out_tensor.stride_h, first_rows, dims_v, row_begin, row_end, HEAD_DIM_V, CHECK_DV
        )  # of [BLOCK_M, BLOCK_DV]
        lse_log2, delta = statistics_of_rows(
            dout, out, lse_tensor.ptr, dlse_ptr, line, first_rows, seqlen_q, HAS_DLSE
        )  # [BLOCK_M], each
        dq = zeros(BLOCK_M, dims)  # of [BLOCK_M, BLOCK_D]
    else:
        k = load_tiles(k_pointers, 0, first_keys, dims, key_begin, key_end, HEAD_DIM, CHECK_D)  # of [BLOCK_N, BLOCK_D]
        v = load_tiles(
            v_pointers, 0, first_keys, dims_v, key_begin, key_end, HEAD_DIM_V, CHECK_DV
        )  # of [BLOCK_N, BLOCK_DV]
        dk = zeros(BLOCK_N, dims)  # of [BLOCK_N, BLOCK_D]
        dv = zeros(BLOCK_N, dims_v)  # of [BLOCK_N, BLOCK_DV]
        k_finite = k
        if MAY_HIDE:
            k_finite = only_finite(k)
    if dropout.HAS_DROPOUT:
        dropout_key = load_dropout_key(dropout.seed_ptr)
    factor_v = dropout.scale if dropout.HAS_DROPOUT else 1.0
    for item in range(item_begin, item_end):
        head = kv_head
        row_tile = 0
        key_tile = 0
        at_edge = True
        rows = first_rows
        keys = first_keys
        if WALKS_KEYS:
            key_tile = item * BLOCK_N
            at_edge = (key_tile < whole_begin) | (key_tile >= whole_end)
            keys = key_tile + first_keys
            offset = tl.cast(key_tile, tl.int64)
            k = load_tiles(k_pointers, offset * k_tensor.stride_m, keys, dims, key_begin, key_end, HEAD_DIM, CHECK_D)
            v = load_tiles(
                v_pointers, offset * v_tensor.stride_m, keys, dims_v, key_begin, key_end, HEAD_DIM_V, CHECK_DV
            )
            k_finite = k
            if MAY_HIDE:
                k_finite = only_finite(k)
        else:
            head = kv_head * group_size + item // num_tiles
            row_tile = item % num_tiles * BLOCK_M
            rows = row_tile + first_rows
            offset = tl.cast(row_tile, tl.int64)
            line = batch * lse_tensor.stride_b + head * lse_tensor.stride_h
            seen_end = end_of_seen(lse_tensor.ptr + line, rows, row_end, MAY_HIDE)
            q = load_tiles(
                q_pointers, offset * q_tensor.stride_m + head * q_tensor.stride_h, rows, dims, row_begin, seen_end,
                HEAD_DIM, CHECK_D,
            )  # fmt: skip
            dout = load_tiles(
                dout_pointers, offset * dout_tensor.stride_m + head * dout_tensor.stride_h, rows, dims_v, row_begin,
                seen_end, HEAD_DIM_V, CHECK_DV,
            )  # fmt: skip
            out = load_tiles(
                out_pointers, offset * out_tensor.stride_m + head * out_tensor.stride_h, rows, dims_v, row_begin,
                row_end, HEAD_DIM_V, CHECK_DV,
            )  # fmt: skip
            lse_log2, delta = statistics_of_rows(
                dout, out, lse_tensor.ptr, dlse_ptr, line, rows, seqlen_q, HAS_DLSE
            )  # fmt: skip
        mask_ptr, bias_ptr, slope_log2 = rules_of_head(rules, batch, head, PAIR_GROUP)
        k_parts = operands(k, PRECISION, IS_NVIDIA)
        q_parts = operands(q, PRECISION, IS_NVIDIA)
        dout_parts = operands(dout, PRECISION, IS_NVIDIA)
        raw = row_products(k_parts, q_parts, PRECISION)  # [BLOCK_N, BLOCK_M]
        row_inside = (rows < row_end)[None, :]
        inside = (keys < key_end)[:, None] & row_inside
        readable_keys = (keys_of_groups(keys, PAIR_GROUP) < key_end)[:, None]
        scores, scale, derivative = score_tile(
            raw, rows[None, :], keys[:, None], inside, row_inside, readable_keys, at_edge, low, high,
            seqlen_k - seqlen_q, mask_ptr, bias_ptr, slope_log2, rules, window, MASK_PER_QUERY,
        )  # fmt: skip
        p = probabilities(scores, scale, lse_log2[None, :], MAY_HIDE)
        p_kept = p
        if dropout.HAS_DROPOUT:
            dropped_head = dropout_of_head(dropout_key, batch, head)
            kept = dropout_keeps(
                dropped_head, row_tile, first_rows[None, :], key_tile, first_keys[:, None],
                dropout.threshold,
            )  # fmt: skip
            p_kept = tl.where(kept, p, 0.0)
        if WALKS_KEYS:
            dk = zeros(BLOCK_N, dims)
            dv = zeros(BLOCK_N, dims_v)
        else:
            dq = zeros(BLOCK_M, dims)
        if WRITE_DV:
            p_parts = operand(p_kept.to(dout[0].dtype), PRECISION, IS_NVIDIA)
            dv = with_products(p_parts, dout_parts, dv, None, PRECISION)
            if WALKS_KEYS:
                store_tiles(dv_ptr, keys, seqlen_k, dims_v, dv_tensor.stride_m, times(dv, factor_v), HEAD_DIM_V)
        dp = row_products(operands(v, PRECISION, IS_NVIDIA), dout_parts, PRECISION)  # [BLOCK_N, BLOCK_M]
        if dropout.HAS_DROPOUT:
            dp = tl.where(kept, dp * dropout.scale, 0.0)
        ds = score_gradient(p, dp, delta[None, :], at_edge, MAY_HIDE)
        ds = through_softcap(ds, derivative, p, rules.HAS_SOFTCAP)
        ds = operand(ds.to(q[0].dtype), PRECISION, IS_NVIDIA)
        # The scale comes after the products: before, it would push a small ds out of the range of 16 bits.
        if WRITE_DK:
            dk = with_products(ds, q_parts, dk, None, PRECISION)
            if WALKS_KEYS:
                of_keys = times(dk, rules.softmax_scale)
                store_tiles(dk_ptr, keys, seqlen_k, dims, dk_tensor.stride_m, of_keys, HEAD_DIM)
        if WRITE_DQ:
            dq = with_products(transposed(ds), operands(k_finite, PRECISION, IS_NVIDIA), dq, None, PRECISION)
            if not WALKS_KEYS:
                of_rows = times(dq, rules.softmax_scale)
                to = dq_ptr + head * dq_tensor.stride_h
                store_tiles(to, rows, seqlen_q, dims, dq_tensor.stride_m, of_rows, HEAD_DIM)

    if WALKS_KEYS and WRITE_DQ:
        dq_ptr += kv_head * dq_tensor.stride_h
        store_tiles(dq_ptr, first_rows, seqlen_q, dims, dq_tensor.stride_m, times(dq, rules.softmax_scale), HEAD_DIM)
    if not WALKS_KEYS and WRITE_DK:
        of_keys = times(dk, rules.softmax_scale)
        store_tiles(dk_ptr, first_keys, seqlen_k, dims, dk_tensor.stride_m, of_keys, HEAD_DIM)
    if not WALKS_KEYS and WRITE_DV:
        store_tiles(dv_ptr, first_keys, seqlen_k, dims_v, dv_tensor.stride_m, times(dv, factor_v), HEAD_DIM_V)
