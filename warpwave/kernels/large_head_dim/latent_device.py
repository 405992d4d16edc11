"""One query a sequence on a latent cache, on Hopper: K and V are one tensor, read once, by TMA.

    S^T = K Q^T;   P^T = 2^(S^T - m);   out^T = alpha * out^T + K[:, :head_dim_v]^T P^T

A decode step has at most 16 rows, one per head, and wgmma takes 64. The rows of the products are therefore keys, then
columns of v, and queries are the columns. Both products read the latent in TMA's layout, once as stored and once
transposed; q is read from shared memory once per 64 keys. A program owns one split of a sequence's keys. One warp keeps
a ring of boxes, 64 keys x 64 columns, full, and a warpgroup multiplies them. Two programs share a multiprocessor: while
one computes, the other's boxes arrive.

    barrier      meaning                    arrivals              waits
    q_full       q has arrived              TMA, by its bytes     warpgroup
    ring.full    a box has arrived          TMA, by its bytes     warpgroup
    ring.empty   a box was read             warpgroup             producer

Latent caches are DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1; splits of keys Dao et al., "Flash-Decoding" (2023).

Bound: memory, `2 * head_dim` bytes per key. The 32 * (head_dim + head_dim_v) FLOP per key are a quarter of what tensor
cores do in that time. Shared memory is written once and read twice, half of its time.
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from warpwave.kernels.groups import Pages, Partials, Window
from warpwave.kernels.hopper.large_head_dim.roles import Chunks, chunk, hand_back
from warpwave.kernels.hopper.parts import (
    LN_2,
    LOG2_E,
    accumulator_layout,
    matrix,
    tile_bytes,
    wait_full,
)
from warpwave.kernels.hopper.rows import row_vectors
from warpwave.kernels.hopper.softmax import columns_with_sink, softmax_of_columns
from warpwave.runtime.gluon_or_stub import (
    aggregate,
    block_barrier,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)

KEYS = gl.constexpr(64)  # keys of a box and of a step
BOX = gl.constexpr(64)  # columns of a box: 128 bytes, a line of swizzled shared memory
HEADS = gl.constexpr(16)  # query heads of a program, padding included


@aggregate
class Share:
    """The keys of a program.

    Args:
        batch, split: the sequence, and the split of its keys.
        table_row: row of the page table, if there is one.
        first, last: steps start at key `first` and end before `last`.
        begin, end: keys that the query sees. Steps outside are not loaded; other keys of these steps are masked.
    """

    batch: gl.tensor
    split: gl.tensor
    table_row: gl.tensor
    first: gl.tensor
    last: gl.tensor
    begin: gl.tensor
    end: gl.tensor


@jit
def share_of(pages: Pages, window: Window, seqlen_k, num_splits):
    """Returns this program's keys. The steps of a sequence are divided evenly; invalid lengths and rows are clamped."""
    pid = gl.program_id(0)
    split = pid % num_splits
    batch = pid // num_splits
    table_row = batch
    if pages.PAGE_SIZE > 0:
        if pages.HAS_ROWS:
            table_row = gl.minimum(gl.maximum(gl.load(pages.rows_ptr + batch), 0), pages.num_rows - 1).to(gl.int32)
        seqlen_k = gl.minimum(gl.maximum(gl.load(pages.seqused_k_ptr + table_row), 0), seqlen_k).to(gl.int32)
    # As in primitives.band_edges, for query 0 of one query.
    offset = seqlen_k - 1
    begin = offset * 0
    end = seqlen_k
    if window.HAS_LOW:
        begin = gl.maximum(offset - window.left, 0)
    if window.HAS_HIGH:
        high = offset + window.right
        if window.TOP_LEFT:
            high = gl.minimum(high, 0)
        end = gl.minimum(end, high + 1)
    tile = begin // KEYS
    tiles = gl.maximum(gl.cdiv(end, KEYS) - tile, 0)
    tiles = gl.where(end > begin, tiles, 0)
    first = (tile + tiles * split // num_splits) * KEYS
    last = (tile + tiles * (split + 1) // num_splits) * KEYS
    return Share(batch, split, table_row, first, last, begin, end)


@jit
def load_queries(q_map, q_tiles, q_full, batch, BOXES: gl.constexpr):
    """Loads q of all heads, in boxes of 16 heads x 64 columns."""
    mbarrier.expect(q_full.index(0), BOXES * tile_bytes((q_map,)))
    for i in gl.static_range(BOXES):
        tma_load(q_map, [batch, 0, 0, i * BOX], q_full.index(0), q_tiles.index(i))


@jit
def page_ids(page_table_ptr, key, end, PAGE_SIZE: gl.constexpr, ROWS: gl.constexpr):
    """Loads the ids of the pages that hold a step's keys, ROWS keys each. The id is 0 for keys from `end` on, which the
    table need not contain. The load is asynchronous until the ids are used."""
    found = ()
    for i in gl.static_range(KEYS // ROWS):
        at = key + i * ROWS
        found = found + (gl.load(page_table_ptr + at // PAGE_SIZE, mask=at < end, other=0),)
    return found


@jit
def load_box(ring, k_map, n, pools, row, column, ROWS: gl.constexpr):
    """Loads box n of the ring as soon as its stage is free: ROWS keys of each of `pools`, batch items or pages."""
    stage = n % ring.stages
    full = ring.full.index(stage)
    box = ring.chunks.index(stage)
    mbarrier.wait(ring.empty.index(stage), ((n // ring.stages) & 1) ^ 1)
    mbarrier.expect(full, KEYS // ROWS * tile_bytes((k_map,)))
    for i in gl.static_range(KEYS // ROWS):
        tma_load(k_map, [pools[i], 0, row, column], full, box.slice(i * ROWS, ROWS, dim=2))


@jit
def producer(q_map, k_map, q_tiles, q_full, ring, pages: Pages, share, ROWS: gl.constexpr, BOXES: gl.constexpr):
    """Loads q, then the split's keys, box after box. Page ids are loaded one step ahead."""
    if share.first < share.last:
        load_queries(q_map, q_tiles, q_full, share.batch, BOXES)
    if pages.PAGE_SIZE > 0:
        table_ptr = pages.table_ptr + share.table_row.to(gl.int64) * pages.stride_table
        end = gl.minimum(share.end, share.last)
        ids = page_ids(table_ptr, share.first, end, pages.PAGE_SIZE, ROWS)
    n = 0
    for key in range(share.first, share.last, KEYS):
        if pages.PAGE_SIZE > 0:
            pools = ()
            for i in gl.static_range(KEYS // ROWS):
                pools = pools + (gl.minimum(gl.maximum(ids[i], 0), pages.num_pages - 1).to(gl.int32),)
            row = key % pages.PAGE_SIZE  # 0 if several pages make a box
            ids = page_ids(table_ptr, key + KEYS, end, pages.PAGE_SIZE, ROWS)
        else:
            pools = (share.batch,)
            row = key
        for i in gl.static_range(BOXES):
            load_box(ring, k_map, n + i, pools, row, i * BOX, ROWS)
        n += BOXES


@jit
def zero_unseen(ring, n, begin, end, BOXES: gl.constexpr):
    """Zeroes the keys of a step before `begin` and from `end` on: a probability of 0 times a NaN is NaN."""
    layout: gl.constexpr = row_vectors(BOX)
    for i in gl.static_range(BOXES):
        wait_full(ring, n + i)
        for first in gl.static_range(0, KEYS, 16):  # few rows at a time, to limit registers
            rows = chunk(ring, n + i).slice(first, 16, dim=0)
            keys = first + gl.arange(0, 16, gl.SliceLayout(1, layout))
            values = rows.load(layout)
            seen = (keys >= begin) & (keys < end)
            rows.store(gl.where(seen[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    block_barrier()


@jit
def scores_of(q_tiles, ring, n, BOXES: gl.constexpr):
    """Returns K Q^T of one step, [64 keys, 16 heads], as two sums. Tensor cores truncate what they add toward 0; for a
    sum half as long and half as large they truncate a quarter as much."""
    HALF: gl.constexpr = (BOXES + 1) // 2
    x = gl.zeros([KEYS, HEADS], gl.float32, accumulator_layout(HEADS))
    rest = gl.zeros([KEYS, HEADS], gl.float32, accumulator_layout(HEADS))
    for i in gl.static_range(HALF):
        wait_full(ring, n + i)
        q = matrix(q_tiles.index(i)).permute((1, 0))
        x = warpgroup_mma(chunk(ring, n + i), q, x, use_acc=i > 0, is_async=True)
    for i in gl.static_range(HALF, BOXES):
        wait_full(ring, n + i)
        q = matrix(q_tiles.index(i)).permute((1, 0))
        rest = warpgroup_mma(chunk(ring, n + i), q, rest, use_acc=i > HALF, is_async=True)
    x, rest = warpgroup_mma_wait(0, deps=[x, rest])
    return x + rest


@jit
def add_values(p_tile, ring, n, acc, alpha, V_BOXES: gl.constexpr):
    """Returns alpha * acc + V^T P^T of one step: one accumulator [64 columns, 16 heads] for each box, which is handed
    back."""
    under_way = ()
    for i in gl.static_range(V_BOXES):
        v = chunk(ring, n + i).permute((1, 0))
        under_way = under_way + (warpgroup_mma(v, p_tile, acc[i] * alpha[None, :], is_async=True),)
    done = ()
    for i in gl.static_range(V_BOXES):
        done = done + (warpgroup_mma_wait(V_BOXES - 1 - i, deps=[under_way[i]]),)
        hand_back(ring, n + i)
    return done


@jit
def consumer(
    out_ptr, lse_ptr, partials: Partials, sinks_ptr, num_heads, rows_heads, scale, q_tiles, q_full, ring, p_tile, share,
    BOXES: gl.constexpr, V_BOXES: gl.constexpr, HEAD_DIM_V: gl.constexpr, SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr,
    WRITE_LSE: gl.constexpr,
):  # fmt: skip
    """Computes the split's state of all heads, or their output if no other split has keys."""
    layout: gl.constexpr = accumulator_layout(HEADS)
    by_key: gl.constexpr = gl.SliceLayout(1, layout)
    by_head: gl.constexpr = gl.SliceLayout(0, layout)
    acc = ()
    for _ in gl.static_range(V_BOXES):
        acc = acc + (gl.zeros([BOX, HEADS], gl.float32, layout),)
    m_i = gl.full([HEADS], float("-inf"), gl.float32, by_head)
    l_i = gl.zeros([KEYS, HEADS], gl.float32, layout)  # sums over a thread's own keys
    if share.first < share.last:
        mbarrier.wait(q_full.index(0), 0)
    n = 0
    for key in range(share.first, share.last, KEYS):
        at_edge = (key < share.begin) | (key + KEYS > share.end)
        if at_edge:
            zero_unseen(ring, n, share.begin - key, share.end - key, V_BOXES)
        x = scores_of(q_tiles, ring, n, BOXES)
        for i in gl.static_range(V_BOXES, BOXES):
            hand_back(ring, n + i)
        x = x * scale
        if at_edge:
            keys = key + gl.arange(0, KEYS, by_key)
            visible = (keys >= share.begin) & (keys < share.end)
            x = gl.where(visible[:, None], x, float("-inf"))
        p, alpha, m_i, l_i = softmax_of_columns(x, m_i, l_i)
        p_tile.store(p.to(p_tile.dtype))
        fence_async_shared()
        block_barrier()
        acc = add_values(p_tile, ring, n, acc, alpha, V_BOXES)
        n += BOXES

    heads = gl.arange(0, HEADS, by_head)
    inside = heads < num_heads
    l_row = gl.sum(l_i, axis=0)
    of_row = (share.batch * num_heads + heads).to(gl.int64)
    columns = gl.arange(0, BOX, by_key)
    if SPLIT:
        of_part = share.split.to(gl.int64) * rows_heads
        gl.store(partials.state_ptr + (2 * of_part + of_row), m_i, mask=inside)
        gl.store(partials.state_ptr + (2 * of_part + rows_heads + of_row), l_row, mask=inside)
        to = partials.acc_ptr + (of_part + of_row) * HEAD_DIM_V
        factor = gl.full([HEADS], 1.0, gl.float32, by_head)
        inside = inside & (l_row != 0.0)  # the merge does not read the others
    else:
        factor = gl.full([HEADS], 1.0, gl.float32, by_head)
        if HAS_SINKS:
            sink = gl.load(sinks_ptr + heads, mask=inside, other=0.0) * LOG2_E
            factor, m_i, l_row = columns_with_sink(sink, m_i, l_row)
        factor = factor / gl.where(l_row == 0.0, 1.0, l_row)
        if WRITE_LSE:
            lse = gl.where(l_row == 0.0, float("-inf"), (m_i + gl.log2(l_row)) * LN_2)
            gl.store(lse_ptr + of_row, lse, mask=inside)
        to = out_ptr + of_row * HEAD_DIM_V
    for i in gl.static_range(V_BOXES):
        there = inside[None, :] & (i * BOX + columns < HEAD_DIM_V)[:, None]
        x = acc[i] * factor[None, :]
        gl.store(to[None, :] + (i * BOX + columns)[:, None], x.to(to.dtype.element_ty), mask=there)


@jit
def meet_neighbors(THREADS: gl.constexpr):
    """Waits until the preceding launch has ended and its writes are visible, because this launch may start while that
    one runs (programmatic dependent launch); then lets the next launch start."""
    one = gl.full([THREADS], 0, gl.int32, gl.BlockedLayout([1], [32], [THREADS // 32], [0]))
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1;",
        "=r,r",
        [one],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit(do_not_specialize=["seqlen_k", "num_heads", "rows_heads"])
def latent_decode_kernel(
    q_map,
    k_map,
    out_ptr,
    lse_ptr,
    seqlen_k,
    num_heads,
    partials: Partials,
    rows_heads,
    window: Window,
    sinks_ptr,
    pages: Pages,
    scale,
    STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    SPLIT: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    WRITE_LSE: gl.constexpr,
):
    """Processes one split of the keys of one sequence, for up to 16 query heads that read one kv head.

    Maps have the axes (batch, 1, head, column) and (batch or page, 1, key, column). `scale` converts raw scores to
    bits. Partial results have the layout of partials.py: acc (split, sequence, head, column), state (split, 2,
    sequence, head).
    """
    BOXES: gl.constexpr = (HEAD_DIM + BOX - 1) // BOX
    V_BOXES: gl.constexpr = (HEAD_DIM_V + BOX - 1) // BOX
    q_tiles = gl.allocate_shared_memory(q_map.dtype, [BOXES] + q_map.block_type.shape, q_map.layout)
    ROWS: gl.constexpr = k_map.block_type.shape[2]  # keys of a page in a box, or all of the box's keys
    boxes = gl.allocate_shared_memory(k_map.dtype, [STAGES, 1, 1, KEYS, BOX], k_map.layout)
    p_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    p_tile = gl.allocate_shared_memory(k_map.dtype, [KEYS, HEADS], p_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    ring = Chunks(boxes, full, empty, STAGES)
    meet_neighbors(128)
    share = share_of(pages, window, seqlen_k, partials.num_splits)
    gl.warp_specialize(
        [
            (
                consumer,
                (
                    out_ptr, lse_ptr, partials, sinks_ptr, num_heads, rows_heads, scale, q_tiles, q_full, ring, p_tile,
                    share, BOXES, V_BOXES, HEAD_DIM_V, SPLIT, HAS_SINKS, WRITE_LSE,
                ),
            ),
            (producer, (q_map, k_map, q_tiles, q_full, ring, pages, share, ROWS, BOXES)),
        ],
        [1],
        [40],
    )  # fmt: skip
