"""Device code of the launch that owns keys: dk and dv.

A block owns BLOCK_N keys of one kv head and walks the queries that see them, of each query head of the group in turn.
The gradients of the group add up in its registers, so no other block writes to them and their sum has a fixed order.
Scores are computed transposed, [BLOCK_N, BLOCK_M]: P^T and dS^T then enter the products from registers.
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
from warpwave.kernels.flash_bwd.dq import UNSPECIALIZED
from warpwave.kernels.flash_bwd.tiles import (
    any_of,
    load_statistics,
    probabilities,
    score_gradient,
    score_tile,
    through_softcap,
)
from warpwave.kernels.groups import Dropout, InUnits, OfHeads, ScoreRules, Sequences, Window
from warpwave.kernels.primitives import (
    band_edges,
    in_elements,
    key_ranges,
    keys_of_groups,
    operand,
    packed_sequence,
    rules_of_head,
    steps_of,
    tile_again,
    tile_of,
)
from warpwave.runtime.triton_or_stub import jit, tl


@jit(do_not_specialize=UNSPECIALIZED)
def flash_bwd_dkv_kernel(
    q_tensor: InUnits,
    k_tensor: InUnits,
    v_tensor: InUnits,
    dout_tensor: InUnits,
    rules: ScoreRules,
    sequences: Sequences,
    window: Window,
    dropout: Dropout,
    statistics: OfHeads,
    dk_tensor: InUnits,
    dv_tensor: InUnits,
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
    WRITE_DK: tl.constexpr,
    WRITE_DV: tl.constexpr,
):
    """Computes dk and dv of one tile of keys of one kv head."""
    q_tensor = in_elements(q_tensor, STRIDE_UNIT)
    k_tensor = in_elements(k_tensor, STRIDE_UNIT)
    v_tensor = in_elements(v_tensor, STRIDE_UNIT)
    dout_tensor = in_elements(dout_tensor, STRIDE_UNIT)
    if WRITE_DK:
        dk_tensor = in_elements(dk_tensor, STRIDE_UNIT)
    if WRITE_DV:
        dv_tensor = in_elements(dv_tensor, STRIDE_UNIT)

    num_tiles = tl.cdiv(sequences.seqlen_k, BLOCK_N)
    num_heads_kv = num_heads_q // group_size
    tile = tl.program_id(0) % num_tiles
    batch_head = tl.program_id(0) // num_tiles
    kv_head = (batch_head % num_heads_kv).to(tl.int64)
    batch = (batch_head // num_heads_kv).to(tl.int64)

    q_ptr, k_ptr, v_ptr, dout_ptr = q_tensor.ptr, k_tensor.ptr, v_tensor.ptr, dout_tensor.ptr
    dk_ptr, dv_ptr, statistics_ptr = dk_tensor.ptr, dv_tensor.ptr, statistics.ptr
    seqlen_q, seqlen_k = sequences.seqlen_q, sequences.seqlen_k
    if sequences.IS_VARLEN:
        q_begin, seqlen_q = packed_sequence(sequences.cu_seqlens_q_ptr, batch, seqlen_q, sequences.total_q)
        k_begin, seqlen_k = packed_sequence(sequences.cu_seqlens_k_ptr, batch, seqlen_k, sequences.total_k)
        if tile * BLOCK_N >= seqlen_k:
            return
        q_ptr += q_begin * q_tensor.stride_m
        k_ptr += k_begin * k_tensor.stride_m
        v_ptr += k_begin * v_tensor.stride_m
        dout_ptr += q_begin * dout_tensor.stride_m
        statistics_ptr += q_begin
        if WRITE_DK:
            dk_ptr += k_begin * dk_tensor.stride_m
        if WRITE_DV:
            dv_ptr += k_begin * dv_tensor.stride_m
    q_ptr += batch * q_tensor.stride_b
    k_ptr += batch * k_tensor.stride_b + kv_head * k_tensor.stride_h
    v_ptr += batch * v_tensor.stride_b + kv_head * v_tensor.stride_h
    dout_ptr += batch * dout_tensor.stride_b

    # The band seen from the keys: -high <= row - key <= -low.
    key_begin = tile * BLOCK_N
    key_last = tl.minimum(key_begin + BLOCK_N, seqlen_k) - 1
    first_keys = tl.arange(0, BLOCK_N)
    keys = key_begin + first_keys
    low, high = band_edges(seqlen_q, seqlen_k, window.left, window.right, window.TOP_LEFT)
    row_begin, row_end, first, whole_begin, whole_end = key_ranges(
        key_begin, key_last, seqlen_q, -high, -low, BLOCK_M, window.HAS_HIGH, window.HAS_LOW
    )

    CHECK_D: tl.constexpr = HEAD_DIM < BLOCK_D + REST_D
    CHECK_DV: tl.constexpr = HEAD_DIM_V < BLOCK_DV + REST_DV
    dims = columns_of(BLOCK_D, REST_D)
    dims_v = columns_of(BLOCK_DV, REST_DV)
    k = pointers_of(k_ptr, keys, dims, k_tensor.stride_m, k_tensor.stride_d)
    k = load_tiles(k, 0, keys, dims, 0, seqlen_k, HEAD_DIM, CHECK_D)  # of [BLOCK_N, BLOCK_D]
    k = operands(k, PRECISION, IS_NVIDIA)
    if WRITE_DK:
        v = pointers_of(v_ptr, keys, dims_v, v_tensor.stride_m, v_tensor.stride_d)
        v = load_tiles(v, 0, keys, dims_v, 0, seqlen_k, HEAD_DIM_V, CHECK_DV)  # of [BLOCK_N, BLOCK_DV]
        v = operands(v, PRECISION, IS_NVIDIA)
    dk = zeros(BLOCK_N, dims)  # of [BLOCK_N, BLOCK_D]
    dv = zeros(BLOCK_N, dims_v)  # of [BLOCK_N, BLOCK_DV]
    first_rows = tl.arange(0, BLOCK_M)
    if dropout.HAS_DROPOUT:
        dropout_key = load_dropout_key(dropout.seed_ptr)
    # Walk 2 repeats walk 1 if dk or dv has a NaN, perhaps of a query that sees no key of the tile, and has no steps
    # otherwise (flash_fwd).
    for WALK in tl.static_range(1, 3 if rules.HAS_MASK or rules.HAS_BIAS else 2):
        members = group_size
        if WALK == 2:
            again = have_nan(dk) | have_nan(dv)
            members = tl.where(again, group_size, 0)
            dk = only_where(~again, dk)
            dv = only_where(~again, dv)
        for member in range(members):
            head = kv_head * group_size + member
            if dropout.HAS_DROPOUT:
                dropped_head = dropout_of_head(dropout_key, batch, head)
            line = batch * statistics.stride_b + head * statistics.stride_h
            statistics_pointers = statistics_ptr + line + first_rows
            q_pointers = pointers_of(
                q_ptr + head * q_tensor.stride_h, first_rows, dims, q_tensor.stride_m, q_tensor.stride_d
            )
            dout_pointers = pointers_of(
                dout_ptr + head * dout_tensor.stride_h, first_rows, dims_v, dout_tensor.stride_m, 1
            )
            mask_ptr, bias_ptr, slope_log2 = rules_of_head(rules, batch, head, PAIR_GROUP)
            for CHECK in tl.static_range(0 if TWO_LOOPS and WALK == 1 else 1, 2):
                begin, end = steps_of(first, whole_begin, whole_end, row_end, CHECK, TWO_LOOPS and WALK == 1)
                for step in range(begin, end, BLOCK_M):
                    row_tile = tile_of(step, whole_begin, whole_end, CHECK, TWO_LOOPS and WALK == 1)
                    if WALK == 2:
                        row_tile = tile_again(step, first, whole_begin, whole_end, TWO_LOOPS)
                    at_edge = CHECK
                    if WALK == 2 or not TWO_LOOPS:
                        at_edge = (row_tile < whole_begin) | (row_tile >= whole_end)
                    rows = row_tile + first_rows
                    tile_offset = tl.cast(row_tile, tl.int64)
                    # Queries that see no key of the tile are not read: NaN there must have no effect.
                    q = load_tiles(
                        q_pointers, tile_offset * q_tensor.stride_m, rows, dims, row_begin, row_end, HEAD_DIM, CHECK_D,
                        CHECK,
                    )  # of [BLOCK_M, BLOCK_D]  # fmt: skip
                    dout = load_tiles(
                        dout_pointers, tile_offset * dout_tensor.stride_m, rows, dims_v, row_begin, row_end, HEAD_DIM_V,
                        CHECK_DV, CHECK,
                    )  # of [BLOCK_M, BLOCK_DV]  # fmt: skip
                    lse_log2, delta = load_statistics(
                        statistics_pointers + tile_offset, rows, row_begin, row_end, CHECK
                    )  # [BLOCK_M], each
                    q_parts = operands(q, PRECISION, IS_NVIDIA)
                    raw = row_products(k, q_parts, PRECISION)  # [BLOCK_N, BLOCK_M]
                    row_inside = (rows < row_end)[None, :]
                    inside = (keys < seqlen_k)[:, None] & row_inside
                    readable_keys = (keys_of_groups(keys, PAIR_GROUP) < seqlen_k)[:, None]
                    scores, scale, derivative = score_tile(
                        raw, rows[None, :], keys[:, None], inside, row_inside, readable_keys, at_edge, low, high,
                        seqlen_k - seqlen_q, mask_ptr, bias_ptr, slope_log2, rules, window, MASK_PER_QUERY,
                    )  # fmt: skip
                    p = probabilities(scores, scale, lse_log2[None, :], rules.HAS_MASK or rules.HAS_BIAS)
                    if WALK == 2:
                        # A query that sees no key of the tile must have no effect, but 0 * NaN is NaN.
                        sees = any_of(p, 0)[:, None]  # [BLOCK_M, 1]
                        q_parts = operands(only_where(sees, q), PRECISION, IS_NVIDIA)
                        dout = only_where(sees, dout)
                    dout_parts = operands(dout, PRECISION, IS_NVIDIA)
                    p_kept = p
                    if dropout.HAS_DROPOUT:
                        kept = dropout_keeps(
                            dropped_head, row_tile, first_rows[None, :], key_begin, first_keys[:, None],
                            dropout.threshold,
                        )  # fmt: skip
                        p_kept = tl.where(kept, p, 0.0)
                    if WRITE_DV:
                        p_parts = operand(p_kept.to(dout[0].dtype), PRECISION, IS_NVIDIA)
                        dv = with_products(p_parts, dout_parts, dv, None, PRECISION)
                    if WRITE_DK:
                        dp = row_products(v, dout_parts, PRECISION)  # [BLOCK_N, BLOCK_M]
                        if dropout.HAS_DROPOUT:
                            dp = tl.where(kept, dp * dropout.scale, 0.0)
                        ds = score_gradient(p, dp, delta[None, :], at_edge, rules.HAS_MASK or rules.HAS_BIAS)
                        ds = through_softcap(ds, derivative, p, rules.HAS_SOFTCAP)
                        ds = operand(ds.to(q[0].dtype), PRECISION, IS_NVIDIA)
                        dk = with_products(ds, q_parts, dk, None, PRECISION)

    if WRITE_DK:
        dk_ptr += batch * dk_tensor.stride_b + kv_head * dk_tensor.stride_h
        store_tiles(dk_ptr, keys, seqlen_k, dims, dk_tensor.stride_m, times(dk, rules.softmax_scale), HEAD_DIM)
    if WRITE_DV:
        if dropout.HAS_DROPOUT:
            dv = times(dv, dropout.scale)
        dv_ptr += batch * dv_tensor.stride_b + kv_head * dv_tensor.stride_h
        store_tiles(dv_ptr, keys, seqlen_k, dims_v, dv_tensor.stride_m, dv, HEAD_DIM_V)
