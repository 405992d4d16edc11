"""Device code of `split_kv`: one split of the keys of one tile of rows.

The loop is `flash_fwd`'s. The layout of rows and keys differs. Rows are queries of all heads that read one kv head.
Keys are one split of the keys that the rows see, in pages of a pool or contiguous.
"""

from __future__ import annotations

from warpwave.kernels.column_tiles import only_where, operands, row_products, times, with_products
from warpwave.kernels.groups import (
    CacheDescales,
    InUnits,
    Pages,
    Pairs,
    Partials,
    ScoreRules,
    Sequences,
    Window,
)
from warpwave.kernels.paged_keys import cached_sequence, factors_of_cells, page_ids, pages_named
from warpwave.kernels.partials import await_launch_before_knowing, final_state, lse_of, lse_offset
from warpwave.kernels.primitives import (
    IN_INTERPRETER,
    LOG2_E,
    add_bias,
    band_edges,
    band_visible,
    halves,
    in_elements,
    in_float16,
    load_tile,
    operand,
    packed_sequence,
    rounded,
    scaled_to_float16,
    slope_in_bits,
    softmax_step,
    tanh,
    tile_pointers,
    visible_keys,
)
from warpwave.runtime.triton_or_stub import jit, tl

# 8-bit values are multiplied by weights in float16, which keeps all 11 bits of numbers from 2^-14 to 65,504. Weights
# relative to the largest are multiplied by this factor and keep all bits down to 2^-29; without it, down to 2^-14.
# Small weights matter beside an attention sink: a key with most of the weight and a value near 0.
WEIGHT = tl.constexpr(2.0**15)
# Arguments that the compiler must not specialize on; otherwise new lengths would recompile.
UNSPECIALIZED = ["num_units", "first_key", "lse_rows"]


@jit
def _pieces(key_begin, key_end, split, num_splits, PIECES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the start of the pieces of [key_begin, key_end), the keys of each, their number, and the range of keys of
    this block's split, which is whole pieces. The pieces depend only on the keys."""
    first = key_begin // BLOCK_N * BLOCK_N
    seen = tl.maximum(key_end - first, 0)
    seen_tiles = tl.cdiv(seen, BLOCK_N)
    # Use all pieces once each has 256 keys, and half of them before: more would cost more to merge than they save.
    piece_tiles = tl.minimum(tl.cdiv(seen_tiles, tl.cdiv(PIECES, 2)), tl.cdiv(256, BLOCK_N))
    piece_tiles = tl.maximum(tl.maximum(tl.cdiv(seen_tiles, PIECES), piece_tiles), 1)
    piece_keys = piece_tiles * BLOCK_N
    used = tl.cdiv(seen, piece_keys)
    each = tl.cdiv(used, num_splits)
    begin = first + tl.minimum(split * each, used) * piece_keys
    end = first + tl.minimum((split + 1) * each, used) * piece_keys
    return first, piece_keys, used, begin, tl.minimum(end, key_end)


@jit
def _store_rows(ptr, row_head, acc, in_range, dims_v, HEAD_DIM_V: tl.constexpr):
    """Stores the columns of contiguous rows that the accumulators hold in turn."""
    for i in tl.static_range(len(acc)):
        columns = dims_v + i
        offsets = row_head[:, None] * HEAD_DIM_V + columns[None, :]
        inside = in_range[:, None] & (columns < HEAD_DIM_V)[None, :]
        tl.store(ptr + offsets, rounded(acc[i], ptr.dtype.element_ty), mask=inside)


@jit
def _store_part(
    splits: Partials, part, acc, m_i, l_i, rows_heads, row_head, in_range, dims_v, HEAD_DIM_V: tl.constexpr
):
    """Stores the partial result of the rows over one part of the keys, for the merge."""
    _store_rows(splits.acc_ptr, part * rows_heads + row_head, acc, in_range, dims_v, HEAD_DIM_V)
    tl.store(splits.state_ptr + 2 * part * rows_heads + row_head, m_i, mask=in_range)
    tl.store(splits.state_ptr + (2 * part + 1) * rows_heads + row_head, l_i, mask=in_range)


@jit
def _zeros(COUNT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns accumulators of zeros."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (tl.zeros([ROWS, WIDTH], tl.float32),)
    return found


@jit
def _load_queries(
    pointers, queries, dims, stride_qd, seqlen_q, HEAD_DIM: tl.constexpr, CHECK_COLUMNS: tl.constexpr,
    FACTORS: tl.constexpr, IN_WORDS: tl.constexpr, PRECISION: tl.constexpr, IS_NVIDIA: tl.constexpr,
):  # fmt: skip
    """Returns the queries as a tuple of operands, with IN_WORDS the even columns and then the odd ones, and the factor
    of each row: a power of two on a cache of 8-bit numbers, else 1."""
    q = (load_tile(pointers, queries, dims, 0, seqlen_q, HEAD_DIM, CHECK_COLUMNS),)
    if IN_WORDS:
        q = q + (load_tile(pointers + stride_qd, queries, dims + 1, 0, seqlen_q, HEAD_DIM, CHECK_COLUMNS),)
    power = 1.0
    if FACTORS != "":
        q, power = scaled_to_float16(q)
    return operands(q, PRECISION, IS_NVIDIA), power


@jit
def _load_keys(
    ptr, offsets, stride, keys, dims, key_begin, key_end, HEAD_DIM: tl.constexpr, CHECK_COLUMNS: tl.constexpr,
    FACTORS: tl.constexpr, IN_WORDS: tl.constexpr, FLOAT8: tl.constexpr, IS_NVIDIA: tl.constexpr,
):  # fmt: skip
    """Loads K or V as a tuple of tiles, zero outside `key_begin <= key < key_end`: with IN_WORDS the even columns and
    then the odd ones, else one tile. 8-bit numbers become float16."""
    pointers = ptr + (offsets[:, None] + dims.to(tl.int64)[None, :] * stride)
    COLUMNS: tl.constexpr = 2 if IN_WORDS else 1
    tile = load_tile(pointers, keys, dims, key_begin, key_end, HEAD_DIM // COLUMNS, CHECK_COLUMNS)
    if IN_WORDS:
        return halves(tile, FLOAT8, IS_NVIDIA)
    elif FACTORS != "":
        return (in_float16(tile, IS_NVIDIA),)
    else:
        return (tile,)


@jit
def _ids_of(page_table_ptr, key_tile, cells, capacity, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns `page_ids` of a tile that may extend past the last key, limited to the cells of the table."""
    keys, last = key_tile + cells, tl.maximum(capacity, 1) - 1
    return page_ids(page_table_ptr, tl.minimum(key_tile, last), keys, keys < capacity, PAGE_SIZE, BLOCK_N)


@jit
def _map_tile(map, outer, row, kv_head, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads [ROWS, COLUMNS] from a tensor map (batch or page, row, head, column), heads of a row adjacent; zeros past
    the tensor's end."""
    tile = map.load([outer, row, kv_head.to(tl.int32), 0]).reshape(ROWS, COLUMNS)
    if IN_INTERPRETER:
        tile = tile.to(tl.float32)
    return tile


@jit
def _pairs_of_rows(pairs: Pairs, batch, heads, queries, keys):
    """Returns pointers to a mask or bias of rows and keys, [BLOCK_M, BLOCK_N]."""
    rows = batch * pairs.stride_b + heads * pairs.stride_h + queries.to(tl.int64) * pairs.stride_m
    return pairs.ptr + (rows[:, None] + keys.to(tl.int64)[None, :] * pairs.stride_n)


@jit(do_not_specialize=UNSPECIALIZED)
def split_kv_kernel(
    k_map,
    v_map,
    q_tensor: InUnits,
    k_tensor: InUnits,
    v_tensor: InUnits,
    out_ptr,
    lse_ptr,
    splits: Partials,
    rules: ScoreRules,
    sinks_ptr,
    sequences: Sequences,
    window: Window,
    pages: Pages,
    descales: CacheDescales,
    num_units,
    first_key,
    lse_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEADS: tl.constexpr,
    UNITS_OF_KV_HEAD: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ALIKE: tl.constexpr,
    IN_PARTS: tl.constexpr,
    PIECES: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
    LAUNCHED_AHEAD: tl.constexpr,
    BY_MAP: tl.constexpr,
    ONE_STEP: tl.constexpr,
    FLOAT8: tl.constexpr,
    IN_WORDS: tl.constexpr,
):
    """Processes one split of the keys of one tile of rows. The tiles of a unit, then units, then splits are adjacent
    in the grid, which has one dimension because 65,535 is the limit of the others. A unit is HEADS query heads that
    read one kv head.

    Pools of 8-bit numbers are converted to float16 in registers, exactly. Tiles of fewer than 64 rows load two
    neighbors as a word (IN_WORDS), and the even and odd columns are then separate operands. The factors of the pools
    multiply what is float32: of K the scores, of V the output if they belong to heads (FACTORS "head"), or the
    probabilities if they belong to tokens.
    """
    # Strides come in units, as in flash_fwd, so that the compiler sees that rows are 16-byte aligned. Page strides are
    # multiplied by their 32-bit factors as they are loaded.
    k_units = (tl.cast(k_tensor.stride_b, tl.int64), tl.cast(k_tensor.stride_m, tl.int64))
    v_units = (tl.cast(v_tensor.stride_b, tl.int64), tl.cast(v_tensor.stride_m, tl.int64))
    q_tensor = in_elements(q_tensor, STRIDE_UNIT)
    k_tensor = in_elements(k_tensor, STRIDE_UNIT)
    v_tensor = in_elements(v_tensor, STRIDE_UNIT)
    q_ptr, k_ptr, v_ptr, page_table_ptr = q_tensor.ptr, k_tensor.ptr, v_tensor.ptr, pages.table_ptr

    # Position of this program -----------------------------------------------------------------------------------------
    seqlen_q, seqlen_k, num_splits = sequences.seqlen_q, sequences.seqlen_k, splits.num_splits
    num_tiles = tl.cdiv(seqlen_q * HEADS, BLOCK_M)
    pid = tl.program_id(0)
    tile = pid % num_tiles
    unit = pid // num_tiles % num_units
    split = pid // (num_tiles * num_units) % num_splits if IN_PARTS else 0
    batch = pid // (num_tiles * num_units)
    if IN_PARTS:
        batch = batch // num_splits
    if LAUNCHED_AHEAD:
        batch = await_launch_before_knowing(batch, tile | unit | split)
    batch = batch.to(tl.int64)
    unit = unit.to(tl.int64)
    kv_head = unit // UNITS_OF_KV_HEAD
    first_row = batch * seqlen_q  # counted over all sequences: rows of out are contiguous

    if sequences.IS_VARLEN:
        first_row, seqlen_q = packed_sequence(sequences.cu_seqlens_q_ptr, batch, seqlen_q, sequences.total_q)
        if tile * BLOCK_M >= seqlen_q * HEADS:
            return
        q_ptr += first_row * q_tensor.stride_m
    else:
        q_ptr += batch * q_tensor.stride_b
    k_ptr += kv_head * k_tensor.stride_h
    v_ptr += kv_head * v_tensor.stride_h
    COLUMNS: tl.constexpr = 2 if IN_WORDS else 1  # of what is loaded at once
    UNIT: tl.constexpr = STRIDE_UNIT // COLUMNS
    if IN_WORDS:
        k_ptr = k_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        v_ptr = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    capacity = seqlen_k
    if pages.PAGE_SIZE > 0:
        page_table_ptr, seqlen_k = cached_sequence(pages, batch, seqlen_k)
    elif sequences.IS_VARLEN:
        k_begin, seqlen_k = packed_sequence(sequences.cu_seqlens_k_ptr, batch, seqlen_k, sequences.total_k)
        k_ptr += k_begin * k_tensor.stride_m
        v_ptr += k_begin * v_tensor.stride_m
    else:
        k_ptr += batch * k_tensor.stride_b
        v_ptr += batch * v_tensor.stride_b

    # Rows are the queries of all heads of the unit, head fastest, so that a tile of few queries is full.
    tile_rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    queries = tile_rows // HEADS
    heads = unit * HEADS + tile_rows % HEADS  # [BLOCK_M]
    query_begin = tile * BLOCK_M // HEADS
    query_last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // HEADS, seqlen_q - 1)
    low, high = band_edges(seqlen_q, seqlen_k, window.left, window.right, window.TOP_LEFT)
    key_begin, key_end = visible_keys(query_begin, query_last, seqlen_k, low, high, window.HAS_LOW, window.HAS_HIGH)
    key_begin = tl.maximum(key_begin, first_key)
    whole_begin = key_begin
    whole_end = key_end
    if window.HAS_LOW:
        whole_begin = tl.maximum(whole_begin, query_last + low)
    if window.HAS_HIGH:
        whole_end = tl.minimum(whole_end, query_begin + high + 1)
    num_heads_q = num_units * HEADS
    rows_heads = tl.cast(sequences.total_q, tl.int64) * num_heads_q
    row_head = (first_row + queries) * num_heads_q + heads  # the row's index in out
    if PIECES > 0:
        first, piece_keys, used, begin, end = _pieces(key_begin, key_end, split, num_splits, PIECES, BLOCK_N)
        stride = BLOCK_N
    else:
        # Splits take tiles in turn, so a split's start does not depend on the length of a cached sequence. Tiles are
        # multiples of BLOCK_N, so each holds the same keys for any number of splits.
        begin, end = key_begin // BLOCK_N * BLOCK_N + split * BLOCK_N, key_end
        stride = num_splits * BLOCK_N

    # State of the online softmax --------------------------------------------------------------------------------------
    dims = tl.arange(0, BLOCK_D // COLUMNS)
    dims_v = tl.arange(0, BLOCK_DV // COLUMNS)
    in_range = queries < seqlen_q
    q_tile = (
        tile_pointers(q_ptr, queries, COLUMNS * dims, q_tensor.stride_m, q_tensor.stride_d)
        + (heads * q_tensor.stride_h)[:, None]
    )
    if not ONE_STEP:
        q, q_power = _load_queries(
            q_tile, queries, COLUMNS * dims, q_tensor.stride_d, seqlen_q, HEAD_DIM, HEAD_DIM < BLOCK_D,
            descales.FACTORS, IN_WORDS, PRECISION, IS_NVIDIA,
        )  # fmt: skip
    acc = _zeros(COLUMNS, BLOCK_M, BLOCK_DV // COLUMNS)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    scale_log2 = rules.softmax_scale * LOG2_E
    if rules.HAS_ALIBI:
        slope_log2 = slope_in_bits(rules.alibi_slopes, batch, heads)  # [BLOCK_M]

    columns = tl.arange(0, BLOCK_N)
    if descales.FACTORS == "head":
        k_factor = tl.load(descales.k.ptr + kv_head * descales.k.stride_h)
        v_factor = tl.load(descales.v.ptr + kv_head * descales.v.stride_h) / WEIGHT

    # One loop body, three sections with tensor maps: a first tile that begins with hidden keys, tiles loaded by maps,
    # and a last tile that is followed by another sequence's keys. A map masks nothing: it fills with zeros past the
    # tensor's end, where a dense sequence ends too. Edge tiles are loaded by pointers, key by key.
    map_begin, map_end, map_first = begin, end, begin
    if BY_MAP:
        map_begin = tl.cdiv(key_begin, BLOCK_N) * BLOCK_N
        map_end = end // BLOCK_N * BLOCK_N
        if pages.PAGE_SIZE == 0 and not sequences.IS_VARLEN:
            map_end = tl.where(end == seqlen_k, end, map_end)
        map_first = tl.where(begin < map_begin, begin + stride, begin)
    if pages.PAGE_SIZE > 0:
        # Load page ids one step ahead of their keys, so that the keys wait neither for the table nor for the length.
        # Computing with the ids happens one step later, because it waits for the load.
        ids = _ids_of(page_table_ptr, begin, columns, capacity, pages.PAGE_SIZE, BLOCK_N)
    for section in tl.static_range(3 if BY_MAP else 1):
        first_tile, tiles_end = begin, end
        if BY_MAP and section == 0:
            tiles_end = tl.minimum(map_begin, end)
        elif BY_MAP and section == 1:
            first_tile, tiles_end = map_first, map_end
        elif BY_MAP:
            mine = (map_end >= tl.maximum(map_begin, begin)) & ((map_end - begin) % stride == 0)
            first_tile = tl.where(mine, map_end, end)
        # Edge sections have at most one tile, so a pipeline would wait for tiles that do not come.
        for key_tile in tl.range(
            first_tile, tiles_end, stride, num_stages=1 if BY_MAP and section != 1 else None
        ):  # fmt: skip
            keys = key_tile + columns
            # Keys that no query of the tile sees are not read: NaN there must have no effect.
            key_inside = (keys >= key_begin) & (keys < end)
            if pages.PAGE_SIZE > 0:
                page = pages_named(ids, pages.num_pages)
                ids = _ids_of(page_table_ptr, key_tile + stride, columns, capacity, pages.PAGE_SIZE, BLOCK_N)
            if BY_MAP and section == 1:
                if pages.PAGE_SIZE > 0:
                    # The cast serves the interpreter: an `int` has no `%` with a constant of a group.
                    map_outer, map_row = page.to(tl.int32), tl.cast(key_tile, tl.int32) % pages.PAGE_SIZE
                elif sequences.IS_VARLEN:
                    map_outer, map_row = 0, k_begin.to(tl.int32) + key_tile
                else:
                    map_outer, map_row = batch.to(tl.int32), key_tile
                k = (_map_tile(k_map, map_outer, map_row, kv_head, BLOCK_N, BLOCK_D),)
            elif pages.PAGE_SIZE > 0:
                cells = (keys % pages.PAGE_SIZE).to(tl.int64)
                k_offsets = (page * k_units[0] + cells * k_units[1]) * UNIT
                v_offsets = k_offsets
                if not ALIKE:
                    v_offsets = (page * v_units[0] + cells * v_units[1]) * UNIT
            else:
                k_offsets = keys.to(tl.int64) * k_tensor.stride_m
                v_offsets = k_offsets
                if not ALIKE:
                    v_offsets = keys.to(tl.int64) * v_tensor.stride_m
            if not (BY_MAP and section == 1):
                k = _load_keys(
                    k_ptr, k_offsets, k_tensor.stride_d, keys, dims, key_begin, end, HEAD_DIM, HEAD_DIM < BLOCK_D,
                    descales.FACTORS, IN_WORDS, FLOAT8, IS_NVIDIA,
                )  # fmt: skip
            if BY_MAP and section != 1:  # loaded at once: no pipeline overlaps the two
                v = _load_keys(
                    v_ptr, v_offsets, v_tensor.stride_d, keys, dims_v, key_begin, end, HEAD_DIM_V,
                    HEAD_DIM_V < BLOCK_DV, descales.FACTORS, IN_WORDS, FLOAT8, IS_NVIDIA,
                )  # fmt: skip
            if ONE_STEP:
                # Load Q together with K, not before it. The mask, which depends on keys, keeps the compiler from
                # hoisting it.
                asking = tl.where(key_tile < end, seqlen_q, 0)
                q, q_power = _load_queries(
                    q_tile, queries, COLUMNS * dims, q_tensor.stride_d, asking, HEAD_DIM, HEAD_DIM < BLOCK_D,
                    descales.FACTORS, IN_WORDS, PRECISION, IS_NVIDIA,
                )  # fmt: skip
            scores = row_products(q, operands(k, PRECISION, IS_NVIDIA), PRECISION)  # [BLOCK_M, BLOCK_N]
            if descales.FACTORS == "head":
                scores = scores * (q_power * k_factor)[:, None]
            elif descales.FACTORS == "token":
                factors = factors_of_cells(descales.k, page, cells, kv_head)
                scores = scores * q_power[:, None] * tl.load(factors, mask=key_inside, other=0.0)[None, :]

            # As in flash_fwd: the scale is part of the softmax's multiply-add if nothing is added or hidden.
            scale_left = scale_log2
            if rules.HAS_SOFTCAP:
                scores = rules.softcap * tanh(scores * (rules.softmax_scale / rules.softcap)) * LOG2_E
                scale_left = 1.0
            elif rules.HAS_MASK or rules.HAS_BIAS or rules.HAS_ALIBI:
                scores = scores * scale_log2
                scale_left = 1.0
            inside = in_range[:, None] & key_inside[None, :]
            if rules.HAS_BIAS:
                bias = _pairs_of_rows(rules.bias, batch, heads, queries, keys)
                bias = tl.load(bias, mask=inside, other=float("-inf")).to(tl.float32)  # [BLOCK_M, BLOCK_N]
                scores = add_bias(scores, bias)
            if rules.HAS_ALIBI:
                distance = tl.abs(queries[:, None] + (seqlen_k - seqlen_q) - keys[None, :])
                scores -= slope_log2[:, None] * distance.to(tl.float32)
            if (key_tile < whole_begin) | (key_tile + BLOCK_N > whole_end) | (key_tile + BLOCK_N > end):
                visible = band_visible(queries, keys, low, high, window.HAS_LOW, window.HAS_HIGH) & key_inside[None, :]
                scores = tl.where(visible, scores * scale_left, float("-inf"))
                scale_left = 1.0
            if rules.HAS_MASK:
                shown = _pairs_of_rows(rules.mask, batch, heads, queries, keys)
                shown = tl.load(shown, mask=inside, other=0)  # [BLOCK_M, BLOCK_N]
                scores = tl.where(shown != 0, scores, float("-inf"))

            p, alpha, m_i, l_i = softmax_step(scores, scale_left, m_i, l_i)
            if BY_MAP and section == 1:
                v = (_map_tile(v_map, map_outer, map_row, kv_head, BLOCK_N, BLOCK_DV),)
            elif not BY_MAP:
                v = _load_keys(
                    v_ptr, v_offsets, v_tensor.stride_d, keys, dims_v, key_begin, end, HEAD_DIM_V,
                    HEAD_DIM_V < BLOCK_DV, descales.FACTORS, IN_WORDS, FLOAT8, IS_NVIDIA,
                )  # fmt: skip
            if rules.HAS_MASK or rules.HAS_BIAS:
                # A value that no query of the tile sees must have no effect, but 0 * NaN is NaN.
                seen = tl.max((scores != float("-inf")).to(tl.int32), 0)  # [BLOCK_N]
                v = only_where((seen != 0)[:, None], v)
            kept, factor = times(acc, alpha[:, None]), None
            if descales.FACTORS == "token":
                # Relative to the largest weight of the row: small factors would make 16-bit weights subnormal.
                factors = factors_of_cells(descales.v, page, cells, kv_head)
                weights = p * tl.load(factors, mask=key_inside, other=0.0)[None, :]
                largest = tl.maximum(tl.max(weights, 1), 2.0**-100)
                p = weights * (1.0 / largest * WEIGHT)[:, None]
                factor = (largest / WEIGHT)[:, None]
            elif descales.FACTORS == "head":
                p = p * WEIGHT
            p = operand(p.to(v[0].dtype), PRECISION, IS_NVIDIA)
            acc = with_products(p, operands(v, PRECISION, IS_NVIDIA), kept, factor, PRECISION)

            if PIECES > 0:
                piece_ends = ((key_tile + BLOCK_N - first) % piece_keys == 0) | (key_tile + BLOCK_N >= end)
                if piece_ends:
                    part = (key_tile - first) // piece_keys
                    if descales.FACTORS == "head":
                        acc = times(acc, v_factor)
                    _store_part(
                        splits, part, acc, m_i, l_i, rows_heads, row_head, in_range, COLUMNS * dims_v, HEAD_DIM_V
                    )
                acc = only_where(~piece_ends, acc)
                m_i = tl.where(piece_ends, float("-inf"), m_i)
                l_i = tl.where(piece_ends, 0.0, l_i)

    # Results ----------------------------------------------------------------------------------------------------------
    if descales.FACTORS == "head":
        acc = times(acc, v_factor)
    if PIECES > 0:
        # Unused parts: every block of the tile writes a few of them. Their accumulators have no weight.
        for part in range(used + split, PIECES, num_splits):
            tl.store(splits.state_ptr + 2 * part * rows_heads + row_head, m_i, mask=in_range)
            tl.store(splits.state_ptr + (2 * part + 1) * rows_heads + row_head, l_i, mask=in_range)
    elif IN_PARTS:
        # A split without keys is stored too, so that the merge can load accumulators before it has the state.
        _store_part(splits, split, acc, m_i, l_i, rows_heads, row_head, in_range, COLUMNS * dims_v, HEAD_DIM_V)
    if not IN_PARTS:
        m_i, l_i, scale = final_state(m_i, l_i, sinks_ptr, heads, HAS_SINKS)
        _store_rows(out_ptr, row_head, times(acc, scale[:, None]), in_range, COLUMNS * dims_v, HEAD_DIM_V)
        if WRITE_LSE:
            offsets = lse_offset(first_row + queries, heads, num_heads_q, lse_rows)
            tl.store(lse_ptr + offsets, lse_of(m_i, l_i), mask=in_range)
