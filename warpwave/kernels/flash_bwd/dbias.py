"""Device code of the launch that owns the bias: its gradient, the sum of dS over the axes along which the bias is
broadcast.

A block owns one tile of the bias and a part of the batch items and query heads that read it. It walks these, their
queries and keys in a fixed order, and computes S and dP again. That takes two more products and no atomics. If there
are several parts, their sums in float32 are added after the launch.
"""

from __future__ import annotations

from warpwave.kernels.column_tiles import columns_of, load_tiles, operands, pointers_of, row_products
from warpwave.kernels.dropout import dropout_keeps, dropout_of_head, load_dropout_key
from warpwave.kernels.flash_bwd.dq import UNSPECIALIZED
from warpwave.kernels.flash_bwd.tiles import load_statistics, probabilities, score_gradient, score_tile
from warpwave.kernels.groups import Dropout, InUnits, OfHeads, ScoreRules, Sequences, Window
from warpwave.kernels.primitives import (
    band_edges,
    in_elements,
    key_ranges,
    keys_of_groups,
    part_of,
    rounded,
    rules_of_head,
)
from warpwave.runtime.triton_or_stub import jit, tl


@jit(do_not_specialize=[*UNSPECIALIZED, "batch_size", "bias_batch", "bias_heads", "num_parts"])
def flash_bwd_dbias_kernel(
    q_tensor: InUnits,
    k_tensor: InUnits,
    v_tensor: InUnits,
    dout_tensor: InUnits,
    rules: ScoreRules,
    sequences: Sequences,
    window: Window,
    dropout: Dropout,
    statistics: OfHeads,
    dbias_ptr,
    batch_size,
    bias_batch,
    bias_heads,
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
    PER_QUERY: tl.constexpr,
    PER_KEY: tl.constexpr,
):
    """Computes the gradient of one tile of the bias, (bias_batch, bias_heads, 1 or seqlen_q, 1 or seqlen_k),
    contiguous, or one of `num_parts` sums of it.

    PER_QUERY and PER_KEY state whether the bias has an axis of queries and of keys. Packed calls have no bias.
    """
    q_tensor = in_elements(q_tensor, STRIDE_UNIT)
    k_tensor = in_elements(k_tensor, STRIDE_UNIT)
    v_tensor = in_elements(v_tensor, STRIDE_UNIT)
    dout_tensor = in_elements(dout_tensor, STRIDE_UNIT)
    seqlen_q, seqlen_k = sequences.seqlen_q, sequences.seqlen_k

    num_tiles_m = 1
    num_tiles_n = 1
    if PER_QUERY:
        num_tiles_m = tl.cdiv(seqlen_q, BLOCK_M)
    if PER_KEY:
        num_tiles_n = tl.cdiv(seqlen_k, BLOCK_N)
    pid = tl.program_id(0)
    tile_n = pid % num_tiles_n
    tile_m = pid // num_tiles_n % num_tiles_m
    line = pid // num_tiles_n // num_tiles_m
    bias_item = line % (bias_batch * bias_heads)
    part = line // (bias_batch * bias_heads)

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

    low, high = band_edges(seqlen_q, seqlen_k, window.left, window.right, window.TOP_LEFT)
    CHECK_D: tl.constexpr = HEAD_DIM < BLOCK_D + REST_D
    CHECK_DV: tl.constexpr = HEAD_DIM_V < BLOCK_DV + REST_DV
    dims = columns_of(BLOCK_D, REST_D)
    dims_v = columns_of(BLOCK_DV, REST_DV)
    first_rows = tl.arange(0, BLOCK_M)
    first_keys = tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if dropout.HAS_DROPOUT:
        dropout_key = load_dropout_key(dropout.seed_ptr)
    item_begin, item_end = part_of((batch_end - batch_begin) * (head_end - head_begin), part, num_parts)
    for item in range(item_begin, item_end):
        batch = (batch_begin + item // (head_end - head_begin)).to(tl.int64)
        head = (head_begin + item % (head_end - head_begin)).to(tl.int64)
        if dropout.HAS_DROPOUT:
            dropped_head = dropout_of_head(dropout_key, batch, head)
        kv_head = head // group_size
        of_head = batch * statistics.stride_b + head * statistics.stride_h
        q_pointers = q_tensor.ptr + (batch * q_tensor.stride_b + head * q_tensor.stride_h)
        q_pointers = pointers_of(q_pointers, first_rows, dims, q_tensor.stride_m, q_tensor.stride_d)
        dout_pointers = dout_tensor.ptr + (batch * dout_tensor.stride_b + head * dout_tensor.stride_h)
        dout_pointers = pointers_of(dout_pointers, first_rows, dims_v, dout_tensor.stride_m, 1)
        k_pointers = k_tensor.ptr + (batch * k_tensor.stride_b + kv_head * k_tensor.stride_h)
        k_pointers = pointers_of(k_pointers, first_keys, dims, k_tensor.stride_m, k_tensor.stride_d)
        v_pointers = v_tensor.ptr + (batch * v_tensor.stride_b + kv_head * v_tensor.stride_h)
        v_pointers = pointers_of(v_pointers, first_keys, dims_v, v_tensor.stride_m, v_tensor.stride_d)
        mask_ptr, bias_ptr, slope_log2 = rules_of_head(rules, batch, head, PAIR_GROUP)
        for row_tile in range(row_begin, row_end, BLOCK_M):
            rows = row_tile + first_rows
            row_last = tl.minimum(row_tile + BLOCK_M, seqlen_q) - 1
            key_begin, key_end, first, _, _ = key_ranges(
                row_tile, row_last, seqlen_k, low, high, BLOCK_N, window.HAS_LOW, window.HAS_HIGH
            )
            row_offset = tl.cast(row_tile, tl.int64)
            q = load_tiles(
                q_pointers, row_offset * q_tensor.stride_m, rows, dims, 0, seqlen_q, HEAD_DIM, CHECK_D
            )  # of [BLOCK_M, BLOCK_D]
            dout = load_tiles(
                dout_pointers, row_offset * dout_tensor.stride_m, rows, dims_v, 0, seqlen_q, HEAD_DIM_V, CHECK_DV
            )  # of [BLOCK_M, BLOCK_DV]
            q = operands(q, PRECISION, IS_NVIDIA)
            dout = operands(dout, PRECISION, IS_NVIDIA)
            lse_log2, delta = load_statistics(
                statistics.ptr + of_head + rows, rows, 0, seqlen_q, True
            )  # [BLOCK_M], each
            for key_tile in range(tl.maximum(first, own_key_begin), tl.minimum(key_end, own_key_end), BLOCK_N):
                keys = key_tile + first_keys
                tile_offset = tl.cast(key_tile, tl.int64)
                k = load_tiles(
                    k_pointers, tile_offset * k_tensor.stride_m, keys, dims, key_begin, key_end, HEAD_DIM, CHECK_D
                )  # of [BLOCK_N, BLOCK_D]
                v = load_tiles(
                    v_pointers, tile_offset * v_tensor.stride_m, keys, dims_v, key_begin, key_end, HEAD_DIM_V, CHECK_DV
                )  # of [BLOCK_N, BLOCK_DV]
                raw = row_products(q, operands(k, PRECISION, IS_NVIDIA), PRECISION)  # [BLOCK_M, BLOCK_N]
                row_inside = (rows < seqlen_q)[:, None]
                inside = row_inside & (keys < key_end)[None, :]
                readable_keys = (keys_of_groups(keys, PAIR_GROUP) < key_end)[None, :]
                scores, scale, _derivative = score_tile(
                    raw, rows[:, None], keys[None, :], inside, row_inside, readable_keys, True, low, high,
                    seqlen_k - seqlen_q, mask_ptr, bias_ptr, slope_log2, rules, window, MASK_PER_QUERY,
                )  # fmt: skip
                p = probabilities(scores, scale, lse_log2[:, None], True)
                dp = row_products(dout, operands(v, PRECISION, IS_NVIDIA), PRECISION)  # [BLOCK_M, BLOCK_N]
                if dropout.HAS_DROPOUT:
                    kept = dropout_keeps(
                        dropped_head, row_tile, first_rows[:, None], key_tile, first_keys[None, :],
                        dropout.threshold,
                    )  # fmt: skip
                    dp = tl.where(kept, dp * dropout.scale, 0.0)
                acc += score_gradient(p, dp, delta[:, None], True, True)

    rows = tile_m * BLOCK_M + first_rows
    keys = tile_n * BLOCK_N + first_keys
    store_cells(dbias_ptr, acc, tl.cast(line, tl.int64), rows, keys, seqlen_q, seqlen_k, PER_QUERY, PER_KEY)


@jit
def store_cells(
    dbias_ptr, acc, line, rows, keys, seqlen_q, seqlen_k, PER_QUERY: tl.constexpr, PER_KEY: tl.constexpr
):  # fmt: skip
    """Stores the gradient of a tile of the bias. Tiles that share a cell lie in the same place of `acc`, or in a row or
    column of it.

    Args:
        acc: sums of dS, [BLOCK_M, BLOCK_N], float32.
        line: batch item and head in `dbias`, int64.
    """
    if PER_QUERY and PER_KEY:
        offsets = (line * seqlen_q + rows.to(tl.int64)[:, None]) * seqlen_k + keys[None, :]
        inside = (rows < seqlen_q)[:, None] & (keys < seqlen_k)[None, :]
        tl.store(dbias_ptr + offsets, rounded(acc, dbias_ptr.dtype.element_ty), mask=inside)
    elif PER_QUERY:
        total = tl.sum(acc, 1)
        tl.store(dbias_ptr + line * seqlen_q + rows, rounded(total, dbias_ptr.dtype.element_ty), mask=rows < seqlen_q)
    elif PER_KEY:
        total = tl.sum(acc, 0)
        tl.store(dbias_ptr + line * seqlen_k + keys, rounded(total, dbias_ptr.dtype.element_ty), mask=keys < seqlen_k)
    else:
        total = tl.sum(tl.sum(acc, 1), 0)
        tl.store(dbias_ptr + line, rounded(total, dbias_ptr.dtype.element_ty))
