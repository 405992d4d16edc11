"""Device functions of both launches for latent caches on Hopper: the keys of a program, and the warp that loads them
and q.

A program owns one split of a sequence's keys, and loads them 64 at a time in pieces, 64 keys x 64 or more columns. TMA
copies boxes of 64 columns, so a wide piece is several boxes. If pages are shorter than 64 tokens, a box is several
copies.
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from warpwave.kernels.groups import Pages, Window
from warpwave.kernels.hopper.parts import matrix, tile_bytes, wait_full
from warpwave.kernels.hopper.rows import zero_rows_outside
from warpwave.runtime.gluon_or_stub import (
    aggregate,
    block_barrier,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    reinterpret,
    tma_load,
)

KEYS = gl.constexpr(64)  # keys of a box and of a step
BOX = gl.constexpr(64)  # columns of a box: 128 bytes, a line of swizzled shared memory


@aggregate
class Share:
    """The keys of a program.

    Args:
        batch: the sequence.
        table_row: row of the page table, if there is one.
        length: keys of the sequence.
        first, last: steps start at key `first` and end before `last`.
        begin, end: keys that some query of the program sees. Steps outside are not loaded.
    """

    batch: gl.tensor
    table_row: gl.tensor
    length: gl.tensor
    first: gl.tensor
    last: gl.tensor
    begin: gl.tensor
    end: gl.tensor


@jit
def keys_seen(first_query, last_query, seqlen_q, length, window: Window):
    """Returns begin and end of the keys that some of these queries see (`primitives.visible_keys`); the queries may be
    tensors with one element per row."""
    low = length - seqlen_q - window.left
    high = length - seqlen_q + window.right
    if window.TOP_LEFT:
        high = gl.minimum(high, 0)
    begin = first_query * 0
    end = last_query * 0 + length
    if window.HAS_LOW:
        begin = gl.maximum(first_query + low, 0)
    if window.HAS_HIGH:
        end = gl.minimum(end, last_query + high + 1)
    if window.HAS_LOW and window.HAS_HIGH:
        end = gl.where(low > high, 0, end)
    return begin, end


@jit
def share_of(pages: Pages, window: Window, seqlen_q, seqlen_k, batch, split, num_splits, first_query, last_query):
    """Returns the keys of a program that computes some consecutive queries, or none. The steps that they see are
    divided evenly among splits; invalid lengths and rows are clamped."""
    table_row = batch
    if pages.PAGE_SIZE > 0:
        if pages.HAS_ROWS:
            table_row = gl.minimum(gl.maximum(gl.load(pages.rows_ptr + batch), 0), pages.num_rows - 1).to(gl.int32)
        seqlen_k = gl.minimum(gl.maximum(gl.load(pages.seqused_k_ptr + table_row), 0), seqlen_k).to(gl.int32)
    begin, end = keys_seen(first_query, last_query, seqlen_q, seqlen_k, window)
    tile = begin // KEYS
    tiles = gl.maximum(gl.cdiv(end, KEYS) - tile, 0)
    tiles = gl.where((end > begin) & (first_query <= last_query), tiles, 0)
    first = (tile + tiles * split // num_splits) * KEYS
    last = (tile + tiles * (split + 1) // num_splits) * KEYS
    return Share(batch, table_row, seqlen_k, first, last, begin, end)


@jit
def load_queries(q_map, q_tiles, q_full, batch, row, BOXES: gl.constexpr):
    """Loads q, from row `row` on, in boxes of 64 columns."""
    mbarrier.expect(q_full.index(0), BOXES * tile_bytes((q_map,)))
    for i in gl.static_range(BOXES):
        tma_load(q_map, [batch, 0, row, i * BOX], q_full.index(0), q_tiles.index(i))


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
def box_of(piece, I: gl.constexpr, k_map):
    """Returns box I of a piece, [64, width], in the shape that TMA copies. The piece is stored box after box."""
    boxes = reinterpret(piece, piece.dtype, [piece.shape[1] // BOX, 1, 1, KEYS, BOX], k_map.layout)
    return boxes.index(I)


@jit
def load_piece(ring, k_map, n, pools, row, column, ROWS: gl.constexpr):
    """Loads piece n of the ring as soon as its stage is free: ROWS keys of each of `pools`, batch items or pages."""
    stage = n % ring.stages
    full = ring.full.index(stage)
    piece = ring.chunks.index(stage)
    BOXES: gl.constexpr = piece.shape[1] // BOX
    mbarrier.wait(ring.empty.index(stage), ((n // ring.stages) & 1) ^ 1)
    mbarrier.expect(full, BOXES * (KEYS // ROWS) * tile_bytes((k_map,)))
    for j in gl.static_range(BOXES):
        box = box_of(piece, j, k_map)
        for i in gl.static_range(KEYS // ROWS):
            tma_load(k_map, [pools[i], 0, row, column + j * BOX], full, box.slice(i * ROWS, ROWS, dim=2))


@jit
def producer(
    q_map, k_map, q_tiles, q_full, ring, rest, pages: Pages, share, q_batch, q_row, PIECES: gl.constexpr,
    REST: gl.constexpr,
):  # fmt: skip
    """Loads q, then the split's keys: for each step PIECES pieces into `ring` and REST into `rest`. Page ids are loaded
    one step ahead."""
    ROWS: gl.constexpr = k_map.block_type.shape[2]  # keys of a page in a box, or all of the box's keys
    WIDTH: gl.constexpr = ring.chunks.shape[2]
    if share.first < share.last:
        load_queries(q_map, q_tiles, q_full, q_batch, q_row, q_tiles.shape[0])
    if pages.PAGE_SIZE > 0:
        table_ptr = pages.table_ptr + share.table_row.to(gl.int64) * pages.stride_table
        end = gl.minimum(share.end, share.last)
        ids = page_ids(table_ptr, share.first, end, pages.PAGE_SIZE, ROWS)
    n = 0
    n_rest = 0
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
        for i in gl.static_range(PIECES):
            load_piece(ring, k_map, n + i, pools, row, i * WIDTH, ROWS)
        n += PIECES
        for i in gl.static_range(REST):
            load_piece(rest, k_map, n_rest + i, pools, row, PIECES * WIDTH + i * BOX, ROWS)
        n_rest += REST


@jit
def zero_unseen(ring, n, begin, end, k_map, STEP: gl.constexpr, PIECES: gl.constexpr):
    """Zeroes the keys of a step before `begin` and from `end` on, in pieces n, n + STEP, ..."""
    for i in gl.static_range(PIECES):
        wait_full(ring, n + i * STEP)
        piece = ring.chunks.index((n + i * STEP) % ring.stages)
        for j in gl.static_range(piece.shape[1] // BOX):
            zero_rows_outside(matrix(box_of(piece, j, k_map)), begin, end)
    fence_async_shared()
    block_barrier()


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
