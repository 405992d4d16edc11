"""Few queries a sequence on Hopper, with pages of any size: keys by TMA, one copy for each page, and wgmma.

    S^T = K Q^T;   P^T = 2^(S^T - m);   out^T = alpha * out^T + V^T P^T

A decode step has few rows: the query heads of a kv head times few queries. wgmma takes 64 rows. The rows of the
products are therefore keys, then columns of v, and 16 or 32 queries are the columns. Both products read shared memory
in TMA's layout. A program owns one split of the keys of one kv head of one sequence; splits take steps in turn. One
warp loads page ids and keeps two rings full, and a warpgroup multiplies. Each page is copied to its place in the tile,
and all copies of a tile arrive at one barrier, so a tile of many pages costs its reader the same as a tile of one
page.

    barrier      meaning                     arrivals              waits
    ring.full    a tile of K, or V, arrived  TMA, by its bytes     warpgroup
    ring.empty   the tile was read           warpgroup             producer

Dao et al., "Flash-Decoding for long-context inference" (2023); pages as in Kwon et al., "Efficient memory management
for large language model serving with PagedAttention" (2023).

Bound: memory, `2 * (head_dim + head_dim_v)` bytes for each key of a kv head.
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from typing import NamedTuple

from warpwave.kernels.groups import AnyTokens, Pages, Partials, Window
from warpwave.kernels.hopper.pages import length_of, table_row_of
from warpwave.kernels.hopper.parts import (
    LOG2_E,
    accumulator_layout,
    arrive_alone,
    barriers,
    matrix,
    tanh,
    tile_bytes,
    wait_full,
)
from warpwave.kernels.hopper.rows import row_vectors, zero_rows_outside
from warpwave.kernels.hopper.softmax import natural_lse, softmax_of_columns, state_with_sink
from warpwave.runtime.gluon_or_stub import (
    aggregate,
    block_barrier,
    constexpr_function,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BOX = gl.constexpr(64)  # columns of a box: 128 bytes, a line of swizzled shared memory
UNSPECIALIZED = ["seqlen_q", "seqlen_k", "num_heads_kv", "rows_heads", "first_key"]


class Options(NamedTuple):
    """The options of a call that are the same for all its programs.

    Attributes:
        scale: the factor that converts raw scores to bits, or with a softcap to the argument of its tanh.
        softcap: the softcap in bits.
        KEYS: keys of a tile.
        ROWS: queries of all heads of a program, padding included: 16 or 32.
        GROUP: query heads that read a kv head.
        PACKED: whether q is packed: sequences then have different numbers of queries.
        SPLIT: whether a program stores a partial result instead of its output.
    """

    scale: float
    softcap: float
    KEYS: gl.constexpr
    ROWS: gl.constexpr
    GROUP: gl.constexpr
    HEAD_DIM: gl.constexpr
    HEAD_DIM_V: gl.constexpr
    PACKED: gl.constexpr
    SPLIT: gl.constexpr
    HAS_SINKS: gl.constexpr
    HAS_SOFTCAP: gl.constexpr
    WRITE_LSE: gl.constexpr
    LAUNCHED_AHEAD: gl.constexpr


@aggregate
class Tiles:
    """A ring of tiles of K or V, each of `boxes` boxes [keys, 64 columns], and their barriers. Tile n, counted over the
    whole launch, is in stage n % stages."""

    memory: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr
    boxes: gl.constexpr


@aggregate
class Call:
    """The properties of a call that a program needs.

    Args:
        batch, head, split: the program's sequence, kv head, and split of the keys.
        seqlen_q: queries of a sequence, of the longest if they are packed.
        rows_heads: queries of all heads and sequences.
    """

    batch: gl.tensor
    head: gl.tensor
    split: gl.tensor
    num_splits: gl.tensor
    seqlen_q: gl.tensor
    capacity: gl.tensor
    num_heads_kv: gl.tensor
    rows_heads: gl.tensor
    first_key: gl.tensor


@constexpr_function
def _asm(what):
    return f"griddepcontrol.{what}; mov.b32 $0, $1;"


@jit
def neighbor(WHAT: gl.constexpr, THREADS: gl.constexpr = 128):
    """Runs a programmatic-dependent-launch instruction. `wait` blocks until the preceding launch has ended and its
    writes are visible, because this launch may start while that one runs. `launch_dependents` lets the next launch
    start. Every role waits for itself, so that all have started when the wait ends."""
    one = gl.full([THREADS], 0, gl.int32, gl.BlockedLayout([1], [32], [THREADS // 32], [0]))
    gl.inline_asm_elementwise(_asm(WHAT), "=r,r", [one], dtype=gl.int32, is_pure=False, pack=1)


@jit
def queries_of_sequence(cu_seqlens_q_ptr, call, options: Options):
    """Returns the sequence's first query, counted over all sequences, and the number of its queries."""
    first = call.batch * call.seqlen_q
    count = call.seqlen_q
    if options.PACKED:
        total = (call.rows_heads // (call.num_heads_kv * options.GROUP)).to(gl.int32)
        first = gl.minimum(gl.maximum(gl.load(cu_seqlens_q_ptr + call.batch), 0), total)
        end = gl.minimum(gl.maximum(gl.load(cu_seqlens_q_ptr + call.batch + 1), first), total)
        count = gl.minimum(end - first, call.seqlen_q)
    return first, count


@jit
def keys_of_sequence(pages: Pages, table_row, call):
    """Returns the number of keys of the sequence, at most what the table holds."""
    length = call.capacity
    if pages.PAGE_SIZE > 0:
        length = length_of(pages, table_row, length)
    return length


@jit
def band(window: Window, seqlen_q, length):
    """Returns (low, high): query i sees keys i + low to i + high, as in primitives.band_edges."""
    offset = length - seqlen_q
    low = offset - window.left
    high = offset + window.right
    if window.TOP_LEFT:
        high = gl.minimum(high, 0)
    return low, high


@jit
def keys_of(window: Window, call, seqlen_q, length, options: Options):
    """Returns (first, begin, end): this split's first step, and the keys that any query of the program sees."""
    low, high = band(window, seqlen_q, length)
    begin = call.first_key
    end = length
    if window.HAS_LOW:
        begin = gl.maximum(begin, low)
    if window.HAS_HIGH:
        end = gl.minimum(end, seqlen_q + high)
    if window.HAS_LOW and window.HAS_HIGH:
        # A window that begins past the diagonal (top-left causal) shows nothing at all.
        end = gl.where(low > high, 0, end)
    if options.PACKED:
        end = gl.where(seqlen_q == 0, 0, end)
    return (begin // options.KEYS + call.split) * options.KEYS, begin, end


@jit
def page_ids(page_table_ptr, key, stride, capacity, PAGE_SIZE: gl.constexpr, PAGES: gl.constexpr, COPY: gl.constexpr):
    """Loads [32], in one warp: the ids of the PAGES pages of each step, COPY keys of each page, for as many steps as
    fit; steps are `stride` keys apart. Ids that the table does not have are 0. The load is asynchronous until the ids
    are used."""
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    at = key + lanes // PAGES * stride + lanes % PAGES * COPY
    return gl.load(page_table_ptr + at // PAGE_SIZE, mask=at < capacity, other=0)


@jit
def load_tile(ring, tensor_map, n, pools, head, row, COPY: gl.constexpr, KEYS: gl.constexpr):
    """Loads tile n of a ring as soon as its stage is free: COPY keys of each of `pools`, batch items or pages."""
    stage = n % ring.stages
    full = ring.full.index(stage)
    mbarrier.wait(ring.empty.index(stage), ((n // ring.stages) & 1) ^ 1)
    mbarrier.expect(full, KEYS // COPY * ring.boxes * tile_bytes((tensor_map,)))
    for i in gl.static_range(KEYS // COPY):
        for j in gl.static_range(ring.boxes):
            box = ring.memory.index(stage * ring.boxes + j)
            tma_load(tensor_map, [pools[i], head, row, j * BOX], full, box.slice(i * COPY, COPY, dim=2))


@jit
def producer(
    k_map, v_map, cu_seqlens_q_ptr, k_ring, v_ring, window: Window, pages: Pages, options: Options, call
):  # fmt: skip
    """Loads the split's keys and values, tile after tile. Each lane holds one page id. The next 32 are loaded while
    these are used, because a load from saturated memory takes as long as the data in flight: several steps."""
    KEYS: gl.constexpr = options.KEYS
    COPY: gl.constexpr = k_map.block_type.shape[2]  # keys of a page in a tile, or all of the tile's keys
    PAGES: gl.constexpr = KEYS // COPY  # pages of a step
    STEPS: gl.constexpr = 32 // PAGES
    stride = call.num_splits * KEYS
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    if options.LAUNCHED_AHEAD:
        neighbor("wait", 32)
    table_row = table_row_of(pages, call.batch)
    if pages.PAGE_SIZE > 0:
        table_ptr = pages.table_ptr + table_row.to(gl.int64) * pages.stride_table
        if not window.HAS_LOW:  # otherwise the start of the split depends on the length
            key = (call.first_key // KEYS + call.split) * KEYS
            ids = page_ids(table_ptr, key, stride, call.capacity, pages.PAGE_SIZE, PAGES, COPY)
            more = page_ids(table_ptr, key + STEPS * stride, stride, call.capacity, pages.PAGE_SIZE, PAGES, COPY)
    length = keys_of_sequence(pages, table_row, call)
    _, seqlen_q = queries_of_sequence(cu_seqlens_q_ptr, call, options)
    first, _, end = keys_of(window, call, seqlen_q, length, options)
    if pages.PAGE_SIZE > 0 and window.HAS_LOW:
        ids = page_ids(table_ptr, first, stride, call.capacity, pages.PAGE_SIZE, PAGES, COPY)
        more = page_ids(table_ptr, first + STEPS * stride, stride, call.capacity, pages.PAGE_SIZE, PAGES, COPY)
    for n in range(gl.cdiv(gl.maximum(end - first, 0), stride)):
        key = first + n * stride
        if pages.PAGE_SIZE > 0:
            pools = ()
            for i in gl.static_range(PAGES):
                mine = gl.sum(gl.where(lanes == n % STEPS * PAGES + i, ids, 0), axis=0)
                pools = pools + (gl.minimum(gl.maximum(mine, 0), pages.num_pages - 1).to(gl.int32),)
            row = key % pages.PAGE_SIZE  # 0 if several pages make a tile
            if n % STEPS == STEPS - 1:
                ids = more
                later = key + (STEPS + 1) * stride
                more = page_ids(table_ptr, later, stride, call.capacity, pages.PAGE_SIZE, PAGES, COPY)
        else:
            pools = (call.batch,)
            row = key
        load_tile(k_ring, k_map, n, pools, call.head, row, COPY, KEYS)
        load_tile(v_ring, v_map, n, pools, call.head, row, COPY, KEYS)


@jit
def tile_box(ring, n, j):
    """Returns box j of tile n, [keys, 64]."""
    return matrix(ring.memory.index(n % ring.stages * ring.boxes + j))


@jit
def hand_back(ring, n):
    """Hands back tile n, which only the warpgroup's products have read since its last barrier; see
    parts.hand_back_multiplied."""
    arrive_alone(ring.empty.index(n % ring.stages))


@jit
def zero_unseen(ring, n, begin, end):
    """Zeroes a tile's keys before `begin` and from `end` on."""
    for j in gl.static_range(ring.boxes):
        zero_rows_outside(tile_box(ring, n, j), begin, end)
    fence_async_shared()
    block_barrier()


@jit
def store_queries(q_tensor: AnyTokens, q_tiles, first_query, seqlen_q, call, options: Options):
    """Stores q of the program's rows to shared memory, with zeros for absent rows."""
    BOXES: gl.constexpr = q_tiles.shape[0]
    layout: gl.constexpr = row_vectors(BOX)
    rows = gl.arange(0, options.ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, BOX, gl.SliceLayout(0, layout))
    heads = call.head * options.GROUP + rows % options.GROUP
    of_rows = rows // options.GROUP * q_tensor.stride_m + heads * q_tensor.stride_h
    if options.PACKED:
        q_ptr = q_tensor.ptr + first_query.to(gl.int64) * q_tensor.stride_m
    else:
        q_ptr = q_tensor.ptr + call.batch.to(gl.int64) * q_tensor.stride_b
    inside = rows < seqlen_q * options.GROUP
    for j in gl.static_range(BOXES):
        there = inside[:, None] & (j * BOX + columns < options.HEAD_DIM)[None, :]
        q = gl.load(q_ptr + (of_rows[:, None] + (j * BOX + columns)[None, :]), mask=there, other=0.0)
        q_tiles.index(j).store(q)
    fence_async_shared()
    block_barrier()


@jit
def scores_of(q_tiles, ring, n, KEYS: gl.constexpr, ROWS: gl.constexpr):
    """Returns K Q^T of one step, [keys, rows]."""
    x = gl.zeros([KEYS, ROWS], gl.float32, accumulator_layout(ROWS))
    wait_full(ring, n)
    for j in gl.static_range(ring.boxes):
        q = q_tiles.index(j).permute((1, 0))
        x = warpgroup_mma(tile_box(ring, n, j), q, x, use_acc=j > 0, is_async=True)
    x = warpgroup_mma_wait(0, deps=[x])
    hand_back(ring, n)
    return x


@jit
def add_values(p_tile, ring, n, acc, alpha):
    """Returns alpha * acc + V^T P^T of one step: one accumulator [64 columns, rows] for each box."""
    under_way = ()
    for j in gl.static_range(ring.boxes):
        v = tile_box(ring, n, j).permute((1, 0))
        under_way = under_way + (warpgroup_mma(v, p_tile, acc[j] * alpha[None, :], is_async=True),)
    done = ()
    for j in gl.static_range(ring.boxes):
        done = done + (warpgroup_mma_wait(ring.boxes - 1 - j, deps=[under_way[j]]),)
    hand_back(ring, n)
    return done


@jit
def consumer(
    q_tensor: AnyTokens, out_ptr, lse_ptr, partials: Partials, cu_seqlens_q_ptr, sinks_ptr, window: Window,
    pages: Pages, options: Options, q_tiles, k_ring, v_ring, p_tile, call,
):  # fmt: skip
    """Computes the split's state of all rows, or their output if no other split has keys."""
    ROWS: gl.constexpr = options.ROWS
    layout: gl.constexpr = accumulator_layout(ROWS)
    by_key: gl.constexpr = gl.SliceLayout(1, layout)
    by_row: gl.constexpr = gl.SliceLayout(0, layout)
    KEYS: gl.constexpr = options.KEYS
    GROUP: gl.constexpr = options.GROUP
    if options.LAUNCHED_AHEAD:
        neighbor("wait")
        neighbor("launch_dependents")
    length = keys_of_sequence(pages, table_row_of(pages, call.batch), call)
    first_query, seqlen_q = queries_of_sequence(cu_seqlens_q_ptr, call, options)
    store_queries(q_tensor, q_tiles, first_query, seqlen_q, call, options)
    low, high = band(window, seqlen_q, length)
    first, begin, end = keys_of(window, call, seqlen_q, length, options)
    whole_begin = begin
    whole_end = end
    if window.HAS_LOW:
        whole_begin = gl.maximum(begin, seqlen_q - 1 + low)
    if window.HAS_HIGH:
        whole_end = gl.minimum(end, high + 1)
    rows = gl.arange(0, ROWS, by_row)
    queries = rows // GROUP
    acc = ()
    for _ in gl.static_range(v_ring.boxes):
        acc = acc + (gl.zeros([BOX, ROWS], gl.float32, layout),)
    m_i = gl.full([ROWS], float("-inf"), gl.float32, by_row)
    l_i = gl.zeros([KEYS, ROWS], gl.float32, layout)  # sums over a thread's own keys
    stride = call.num_splits * KEYS
    for n in range(gl.cdiv(gl.maximum(end - first, 0), stride)):
        key = first + n * stride
        x = scores_of(q_tiles, k_ring, n, KEYS, ROWS)
        if options.HAS_SOFTCAP:
            x = options.softcap * tanh(x * options.scale)
        else:
            x = x * options.scale
        if (key < whole_begin) | (key + KEYS > whole_end):
            keys = key + gl.arange(0, KEYS, by_key)
            visible = ((keys >= begin) & (keys < end))[:, None] & (rows >= 0)[None, :]
            if window.HAS_LOW:
                visible = visible & (keys[:, None] >= (queries + low)[None, :])
            if window.HAS_HIGH:
                visible = visible & (keys[:, None] <= (queries + high)[None, :])
            x = gl.where(visible, x, float("-inf"))
        p, alpha, m_i, l_i = softmax_of_columns(x, m_i, l_i)
        p_tile.store(p.to(p_tile.dtype))
        wait_full(v_ring, n)
        if (key < begin) | (key + KEYS > end):
            zero_unseen(v_ring, n, begin - key, end - key)
        fence_async_shared()
        block_barrier()
        acc = add_values(p_tile, v_ring, n, acc, alpha)

    num_heads = call.num_heads_kv * GROUP
    inside = queries < seqlen_q
    heads = call.head * GROUP + rows % GROUP
    l_row = gl.sum(l_i, axis=0)
    of_row = ((first_query + queries).to(gl.int64) * num_heads) + heads
    columns = gl.arange(0, BOX, by_key)
    factor = gl.full([ROWS], 1.0, gl.float32, by_row)
    if options.SPLIT:
        of_part = call.split.to(gl.int64) * call.rows_heads
        gl.store(partials.state_ptr + (2 * of_part + of_row), m_i, mask=inside)
        gl.store(partials.state_ptr + (2 * of_part + call.rows_heads + of_row), l_row, mask=inside)
        to = partials.acc_ptr + (of_part + of_row) * options.HEAD_DIM_V
    else:
        if options.HAS_SINKS:
            sink = gl.load(sinks_ptr + heads, mask=inside, other=0.0) * LOG2_E
            factor, m_i, l_row = state_with_sink(sink, m_i, l_row)
        factor = factor / gl.where(l_row == 0.0, 1.0, l_row)
        if options.WRITE_LSE:
            if options.PACKED:
                at = (call.rows_heads // num_heads).to(gl.int64) * heads + first_query + queries
            else:
                at = (call.batch.to(gl.int64) * num_heads + heads) * call.seqlen_q + queries
            gl.store(lse_ptr + at, natural_lse(m_i, l_row), mask=inside)
        to = out_ptr + of_row * options.HEAD_DIM_V
    for j in gl.static_range(v_ring.boxes):
        there = inside[None, :] & (j * BOX + columns < options.HEAD_DIM_V)[:, None]
        x = acc[j] * factor[None, :]
        gl.store(to[None, :] + (j * BOX + columns)[:, None], x.to(to.dtype.element_ty), mask=there)


# ptxas loads two adjacent numbers at once (hopper/groups.py). In this order, all numbers form pairs.
@jit(do_not_specialize=UNSPECIALIZED)
def few_rows_kernel(
    k_map,
    v_map,
    q_tensor: AnyTokens,
    seqlen_q,
    out_ptr,
    lse_ptr,
    seqlen_k,
    num_heads_kv,
    partials: Partials,
    rows_heads,
    cu_seqlens_q_ptr,
    sinks_ptr,
    window: Window,
    pages: Pages,
    first_key,
    call_options: Options,
    STAGES: gl.constexpr,
):
    """Processes one split of the keys of one sequence and kv head, for up to ROWS rows: the queries of the heads
    that read it.

    Maps have the axes (batch or page, head, key, column). Elements of a row of q are adjacent. Partial results have the
    layout of partials.py: acc (split, sequence and query, head, column), state (split, 2, sequence and query, head).
    """
    BOXES: gl.constexpr = (call_options.HEAD_DIM + BOX - 1) // BOX
    V_BOXES: gl.constexpr = (call_options.HEAD_DIM_V + BOX - 1) // BOX
    k_tiles = gl.allocate_shared_memory(k_map.dtype, [STAGES * BOXES, 1, 1, call_options.KEYS, BOX], k_map.layout)
    v_tiles = gl.allocate_shared_memory(k_map.dtype, [STAGES * V_BOXES, 1, 1, call_options.KEYS, BOX], v_map.layout)
    q_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ROWS: gl.constexpr = call_options.ROWS
    q_tiles = gl.allocate_shared_memory(k_map.dtype, [BOXES, ROWS, BOX], q_layout)
    p_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * ROWS, element_bitwidth=16, rank=2)
    p_tile = gl.allocate_shared_memory(k_map.dtype, [call_options.KEYS, ROWS], p_layout)
    k_ring = Tiles(k_tiles, barriers(STAGES, 1), barriers(STAGES, 1), STAGES, BOXES)
    v_ring = Tiles(v_tiles, barriers(STAGES, 1), barriers(STAGES, 1), STAGES, V_BOXES)
    fence_async_shared()
    pid = gl.program_id(0)
    head = pid % num_heads_kv
    split = pid // num_heads_kv % partials.num_splits
    batch = pid // (num_heads_kv * partials.num_splits)
    call = Call(batch, head, split, partials.num_splits, seqlen_q, seqlen_k, num_heads_kv, rows_heads, first_key)
    gl.warp_specialize(
        [
            (
                consumer,
                (
                    q_tensor, out_ptr, lse_ptr, partials, cu_seqlens_q_ptr, sinks_ptr, window, pages, call_options,
                    q_tiles, k_ring, v_ring, p_tile, call,
                ),
            ),
            (producer, (k_map, v_map, cu_seqlens_q_ptr, k_ring, v_ring, window, pages, call_options, call)),
        ],
        [1],
        [56],
    )  # fmt: skip
