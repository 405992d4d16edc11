"""Device code of large_head_dim: one tile of rows, head_dim in pieces, one accumulator for each piece of v's columns.

Bound: L2 and shared memory; see host.py.
"""

from __future__ import annotations

from warpwave.kernels.groups import InUnits, OfHeads, Pages, Partials, ScoreRules, Sequences, Window
from warpwave.kernels.paged_keys import cached_sequence, pages_of
from warpwave.kernels.partials import final_state, lse_of
from warpwave.kernels.primitives import (
    band_edges,
    in_elements,
    load_tile,
    operand,
    packed_sequence,
    product,
    rounded,
    softmax_step,
    transposed,
    visible_keys,
)
from warpwave.kernels.scores import rules_of_rows, score_bits, without_unseen
from warpwave.runtime.triton_or_stub import jit, tl

UNSPECIALIZED = ["num_units", "group_size", "rows_heads"]


@jit
def _load_piece(row_pointers, rows, row_begin, row_end, first, stride_d, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Loads BLOCK columns of some rows from column `first`; zero outside the rows and past WIDTH, [rows, BLOCK]."""
    columns = first + tl.arange(0, BLOCK)
    pointers = row_pointers[:, None] + columns.to(tl.int64)[None, :] * stride_d
    return load_tile(pointers, rows, columns, row_begin, row_end, WIDTH, WIDTH % BLOCK != 0)


@jit(do_not_specialize=UNSPECIALIZED)
def large_head_dim_kernel(
    q_tensor: InUnits,
    k_tensor: InUnits,
    v_tensor: InUnits,
    out_tensor: InUnits,
    lse_tensor: OfHeads,
    splits: Partials,
    rules: ScoreRules,
    sinks_ptr,
    sequences: Sequences,
    window: Window,
    pages: Pages,
    num_units,
    group_size,
    rows_heads,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    V_PIECES: tl.constexpr,
    V_PARTS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    STRIDE_UNIT_V: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    HEADS: tl.constexpr,
    Q_RESIDENT: tl.constexpr,
    V_IN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
):
    """Processes one tile of rows, one part of the columns of v, one split of the keys.

    A row is query `row // HEADS` of head `row % HEADS` of its unit. A unit is HEADS query heads that read one kv head.
    """
    q_tensor = in_elements(q_tensor, STRIDE_UNIT)
    k_tensor = in_elements(k_tensor, STRIDE_UNIT)
    v_tensor = in_elements(v_tensor, STRIDE_UNIT_V)
    out_tensor = in_elements(out_tensor, STRIDE_UNIT_V)

    # Position of this program -----------------------------------------------------------------------------------------
    pieces: tl.constexpr = (HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    num_tiles = tl.cdiv(sequences.seqlen_q * HEADS, BLOCK_M)
    pid = tl.program_id(0)
    part = pid % V_PARTS  # neighbors read the same keys
    split = pid // V_PARTS % splits.num_splits
    pid = pid // V_PARTS // splits.num_splits
    tile = num_tiles - 1 - pid % num_tiles  # longest first if causal
    unit = (pid // num_tiles % num_units).to(tl.int64)
    batch = (pid // num_tiles // num_units).to(tl.int64)
    kv_head = unit * HEADS // group_size
    q_ptr, k_ptr, v_ptr, out_ptr = q_tensor.ptr, k_tensor.ptr, v_tensor.ptr, out_tensor.ptr
    lse_ptr, page_table_ptr = lse_tensor.ptr, pages.table_ptr
    seqlen_q, seqlen_k = sequences.seqlen_q, sequences.seqlen_k
    first_row = batch * seqlen_q  # over all sequences: the row where a split stores its state
    if sequences.IS_VARLEN:
        q_begin, seqlen_q = packed_sequence(sequences.cu_seqlens_q_ptr, batch, seqlen_q, sequences.total_q)
        if tile * BLOCK_M >= seqlen_q * HEADS:
            return
        q_ptr += q_begin * q_tensor.stride_m
        out_ptr += q_begin * out_tensor.stride_m
        first_row = q_begin
        if WRITE_LSE:
            lse_ptr += q_begin
    if pages.PAGE_SIZE > 0:
        page_table_ptr, seqlen_k = cached_sequence(pages, batch, seqlen_k)
    elif sequences.IS_VARLEN:
        k_begin, seqlen_k = packed_sequence(sequences.cu_seqlens_k_ptr, batch, seqlen_k, sequences.total_k)
        k_ptr += k_begin * k_tensor.stride_m
        v_ptr += k_begin * v_tensor.stride_m
    else:
        k_ptr += batch * k_tensor.stride_b
        v_ptr += batch * v_tensor.stride_b
    lines = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = lines // HEADS
    heads = unit * HEADS + lines % HEADS  # 64-bit
    row_inside = rows < seqlen_q
    row_offsets = rows.to(tl.int64)
    q_rows = q_ptr + (
        batch * q_tensor.stride_b + row_offsets * q_tensor.stride_m + heads * q_tensor.stride_h
    )  # [BLOCK_M]
    k_ptr += kv_head * k_tensor.stride_h
    v_ptr += kv_head * v_tensor.stride_h
    mask_rows, bias_rows, slopes_log2 = rules_of_rows(rules, batch, heads, rows)

    low, high = band_edges(seqlen_q, seqlen_k, window.left, window.right, window.TOP_LEFT)
    row_begin = tile * BLOCK_M // HEADS
    row_last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // HEADS, seqlen_q - 1)
    key_begin, key_end = visible_keys(row_begin, row_last, seqlen_k, low, high, window.HAS_LOW, window.HAS_HIGH)
    first = key_begin // BLOCK_N * BLOCK_N
    last = key_end
    if SPLIT:
        tiles_a_split = tl.cdiv(tl.cdiv(tl.maximum(key_end - first, 0), BLOCK_N), splits.num_splits)
        first += split * tiles_a_split * BLOCK_N
        last = tl.minimum(first + tiles_a_split * BLOCK_N, key_end)

    # State of the online softmax --------------------------------------------------------------------------------------
    if Q_RESIDENT:
        q = ()
        for c in tl.static_range(pieces):
            piece = _load_piece(q_rows, rows, 0, seqlen_q, c * BLOCK_D, q_tensor.stride_d, HEAD_DIM, BLOCK_D)
            q = q + (operand(piece, PRECISION, IS_NVIDIA),)  # type: ignore[assignment]  # [BLOCK_M, BLOCK_D] each
    accs = ()
    for _ in tl.static_range(V_PIECES):
        accs = accs + (tl.zeros([BLOCK_M, BLOCK_V], tl.float32),)  # type: ignore[assignment]
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    first_column = part * (V_PIECES * BLOCK_V)

    for key_tile in range(first, last, BLOCK_N):
        keys = key_tile + tl.arange(0, BLOCK_N)
        # Keys that no row of the tile sees are not read: NaN there must have no effect.
        if pages.PAGE_SIZE > 0:
            inside = (keys >= key_begin) & (keys < key_end)
            there = pages_of(page_table_ptr, key_tile, keys, inside, pages.num_pages, pages.PAGE_SIZE, BLOCK_N)
            cells = (keys % pages.PAGE_SIZE).to(tl.int64)
            k_rows = k_ptr + (there * k_tensor.stride_b + cells * k_tensor.stride_m)
            v_rows = v_ptr + (there * v_tensor.stride_b + cells * v_tensor.stride_m)
        else:
            k_rows = k_ptr + keys.to(tl.int64) * k_tensor.stride_m
            v_rows = v_ptr + keys.to(tl.int64) * v_tensor.stride_m
        raw = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        values = ()
        if Q_RESIDENT:
            for c in tl.static_range(pieces):
                k = _load_piece(k_rows, keys, key_begin, key_end, c * BLOCK_D, k_tensor.stride_d, HEAD_DIM, BLOCK_D)
                raw = product(q[c], transposed(operand(k, PRECISION, IS_NVIDIA)), raw, PRECISION)
                if V_IN_K and c < V_PIECES:
                    values = values + (k,)  # type: ignore[assignment]  # [BLOCK_N, BLOCK_V]
        else:
            # Values are requested before the scores are summed, so that the load overlaps.
            for j in tl.static_range(V_PIECES):
                column = first_column + j * BLOCK_V
                v = _load_piece(v_rows, keys, key_begin, key_end, column, v_tensor.stride_d, HEAD_DIM_V, BLOCK_V)
                values = values + (v,)  # type: ignore[assignment]
            for d in range(0, HEAD_DIM, BLOCK_D):
                a = _load_piece(
                    q_rows, rows, 0, seqlen_q, d, q_tensor.stride_d, HEAD_DIM, BLOCK_D
                )  # [BLOCK_M, BLOCK_D]
                k = _load_piece(k_rows, keys, key_begin, key_end, d, k_tensor.stride_d, HEAD_DIM, BLOCK_D)
                k = transposed(operand(k, PRECISION, IS_NVIDIA))
                raw = product(operand(a, PRECISION, IS_NVIDIA), k, raw, PRECISION)  # [BLOCK_M, BLOCK_N]
        scores = score_bits(
            raw, rows, keys, row_inside, key_end, seqlen_k - seqlen_q, low, high, mask_rows, bias_rows, slopes_log2,
            rules, window,
        )  # fmt: skip
        p, alpha, m_i, l_i = softmax_step(scores, 1.0, m_i, l_i)
        new_accs = ()
        for j in tl.static_range(V_PIECES):
            if Q_RESIDENT and not V_IN_K:
                column = first_column + j * BLOCK_V
                v = _load_piece(v_rows, keys, key_begin, key_end, column, v_tensor.stride_d, HEAD_DIM_V, BLOCK_V)
            else:
                v = values[j]
            if rules.HAS_MASK or rules.HAS_BIAS:
                v = without_unseen(v, scores)
            weights = operand(p.to(v.dtype), PRECISION, IS_NVIDIA)
            acc = product(
                weights, operand(v, PRECISION, IS_NVIDIA), accs[j] * alpha[:, None], PRECISION
            )  # [BLOCK_M, BLOCK_V]
            new_accs = new_accs + (acc,)  # type: ignore[assignment]
        accs = new_accs

    # Results ----------------------------------------------------------------------------------------------------------
    if SPLIT:
        slots = split * tl.cast(rows_heads, tl.int64) + (first_row + row_offsets) * (num_units * HEADS) + heads
        if part == 0:
            states = splits.state_ptr + (split * tl.cast(rows_heads, tl.int64) + slots)
            tl.store(states, m_i, mask=row_inside)
            tl.store(states + rows_heads, l_i, mask=row_inside)
        out_rows = splits.acc_ptr + slots * HEAD_DIM_V
        row_inside = row_inside & (l_i != 0.0)  # the merge does not read the others
    else:
        m_i, l_i, scale = final_state(m_i, l_i, sinks_ptr, heads, HAS_SINKS)
        out_rows = out_ptr + (
            batch * out_tensor.stride_b + row_offsets * out_tensor.stride_m + heads * out_tensor.stride_h
        )
        if WRITE_LSE:  # noqa: SIM102 (known when compiled; the next is not)
            if part == 0:
                lse_rows = lse_ptr + (batch * lse_tensor.stride_b + heads * lse_tensor.stride_h + row_offsets)
                tl.store(lse_rows, lse_of(m_i, l_i), mask=row_inside)
    for j in tl.static_range(V_PIECES):
        columns = first_column + j * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = row_inside[:, None] & (columns < HEAD_DIM_V)[None, :]
        pointers = out_rows[:, None] + columns[None, :]
        if SPLIT:
            tl.store(pointers, accs[j], mask=inside)
        else:
            tl.store(pointers, rounded(accs[j] * scale[:, None], out_ptr.dtype.element_ty), mask=inside)
