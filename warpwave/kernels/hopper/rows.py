"""Rows of a tile in shared memory: zeroes rows of a loaded tile past the end of a packed sequence or before the first
visible row, and stores rows of out, in a packed call up to the end of the sequence."""

from warpwave.kernels.hopper.parts import ROWS, first_column, halves_of, matrix
from warpwave.kernels.hopper.visible import place_of_queries, queries_of_warpgroup
from warpwave.runtime.gluon_or_stub import (
    block_barrier,
    constexpr_function,
    fence_async_shared,
    gl,
    jit,
    reinterpret,
    tma,
    tma_store,
)

BOX = gl.constexpr(64)  # columns of 16 bits that one line of swizzled shared memory holds


@constexpr_function
def row_vectors(width, warps=4):
    """Returns a layout for [rows, width] with reads and writes of 16-byte vectors of 16-bit numbers along rows."""
    return gl.BlockedLayout([1, 8], [256 // int(width), int(width) // 8], [int(warps), 1], [1, 0])


@jit
def zero_values(v_ring, n, rows_used):
    """Zeroes the rows of a V tile past the end of its sequence. A tensor map stops only at the end of the packed
    tensor, and a probability of 0 times another sequence's NaN is NaN. Every consumer does so itself; they write the
    same values. Without the barrier in this branch, the compiler puts one after it, where every tile waits."""
    for i in gl.static_range(len(v_ring.pieces)):
        for part in gl.static_range(v_ring.parts):
            zero_tail(v_ring.pieces[i].index(n % v_ring.stages * v_ring.parts + part), rows_used)
    fence_async_shared()
    block_barrier()


@jit
def zero_tail(tile, rows_used):
    """Zeroes the rows of a tile from `rows_used` on, [..., rows, width] in shared memory.

    Sixteen rows at a time take few registers, and a loop takes little code. Unrolled, it was a fourth of the joint
    launch of gradients at head_dim 64, which spilled 240 bytes instead of 104.
    """
    CHUNKS: gl.constexpr = tile.shape[-2] // 16
    i = gl.maximum(rows_used, 0) // 16
    while i < CHUNKS:
        for box in gl.static_range((tile.shape[-1] + BOX - 1) // BOX):
            zero_rows(sixteen_rows(tile, box, i), rows_used - i * 16)
        i = following(i)


@jit
def following(i):
    """Returns i + 1 plus an opaque zero, so that neither LLVM nor ptxas recognizes a counted loop and unrolls it. The
    zero is the upper half of %smid, which is below 65,536."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 high; mov.u32 high, %smid; shr.u32 high, high, 16; add.s32 high, high, 1; add.s32 $0, $1, high; }",
        "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def sixteen_rows(tile, BOX_NUMBER: gl.constexpr, i):
    """Returns the i-th 16 rows of a box of columns of a 16-bit tile, as TMA stores it: box after box, each of all
    rows. A slice would need `i` at compile time."""
    COLUMNS: gl.constexpr = min(tile.shape[-1], BOX)
    CHUNKS: gl.constexpr = tile.shape[-2] // 16
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * COLUMNS, element_bitwidth=16, rank=2)
    chunks = reinterpret(tile, tile.dtype, [CHUNKS * (tile.shape[-1] // COLUMNS), 16, COLUMNS], layout)
    return chunks.index(BOX_NUMBER * CHUNKS + i)


@jit
def zero_head(pieces, tile, unseen, MOST: gl.constexpr = 16):
    """Zeroes the first `unseen` rows of a tile, at least 1 and at most MOST. With dropout (dropout.py), or if blocks of
    keys have factors, tiles may begin before what is seen first, and 0 times NaN is NaN. Every consumer does so itself;
    they write the same values."""
    for i in gl.static_range(len(pieces)):
        x = matrix(pieces[i].index(tile))
        zero_rows_before(x.slice(0, 16, dim=0), unseen)
        for first in gl.static_range(16, MOST, 16):  # few rows at a time, to limit registers
            if first < unseen:
                zero_rows_before(x.slice(first, 16, dim=0), unseen - first)
    fence_async_shared()


@jit
def zero_rows_outside(box, begin, end):
    """Zeroes the rows of a box, [rows, 64] in shared memory, before `begin` and from `end` on: a probability of 0 times
    a NaN is NaN. Its writers must fence and meet afterward."""
    layout: gl.constexpr = row_vectors(BOX)
    COUNT: gl.constexpr = box.shape[0]
    for first in gl.static_range(0, COUNT, 16):  # few rows at a time, to limit registers
        rows = box.slice(first, 16, dim=0)
        keys = first + gl.arange(0, 16, gl.SliceLayout(1, layout))
        values = rows.load(layout)
        seen = (keys >= begin) & (keys < end)
        rows.store(gl.where(seen[:, None], values, gl.zeros_like(values)))


@jit
def zero_rows_before(x, first):
    """Zeroes the rows of x, in shared memory, before `first`."""
    layout: gl.constexpr = row_vectors(x.shape[1])
    seen = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout)) >= first
    values = x.load(layout)
    x.store(gl.where(seen[:, None], values, gl.zeros_like(values)))


@jit
def zero_rows(x, rows_used):
    """Zeroes the rows of x, in shared memory, from `rows_used` on."""
    layout: gl.constexpr = row_vectors(x.shape[1])
    used = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout)) < rows_used
    values = x.load(layout)
    x.store(gl.where(used[:, None], values, gl.zeros_like(values)))


@jit
def store_out(out, out_maps, out_tiles, out_ptr, work, row, num_heads, GROUP: gl.constexpr, rules):
    """Stores the output tile through shared memory.

    It is stored by TMA, which stops at the tensor's end. If a packed sequence ends inside the tile, masked stores are
    used instead, because another sequence's rows follow. If the buffer holds half of the columns, the halves are stored
    in turn.
    """
    if len(out_maps) > len(out):
        halves = halves_of(out[0])
        for i in gl.static_range(2):
            if i == 1:
                tma.store_wait(0)  # the compiler's barrier before the next store to the buffer informs the other warps
            matrix(out_tiles[0].index(GROUP)).store(halves[i].to(out_maps[i].dtype))
            fence_async_shared()
            store_piece(out_tiles[0].index(GROUP), i, out_maps, out_ptr, work, row, num_heads, rules)
    else:
        for i in gl.static_range(len(out_maps)):
            matrix(out_tiles[i].index(GROUP)).store(out[i].to(out_maps[i].dtype))
        fence_async_shared()
        for i in gl.static_range(len(out_maps)):
            store_piece(out_tiles[i].index(GROUP), i, out_maps, out_ptr, work, row, num_heads, rules)


@jit
def store_piece(tile, I: gl.constexpr, out_maps, out_ptr, work, row, num_heads, rules):
    """Stores piece I of the output, from query `row` on, from shared memory."""
    if rules.IS_VARLEN:
        queries_left = work.seqlen_q - row
        if queries_left >= queries_of_warpgroup(rules):
            place = place_of_queries(0, work.head, work.q_begin + row, first_column(out_maps, I), rules)
            tma_store(out_maps[I], place, tile)
        else:
            store_rows(
                matrix(tile), out_ptr, work.q_begin + row, queries_left, work.head, num_heads,
                out_maps[I].shape[-1].to(gl.int64), first_column(out_maps, I), rules.HEADS,
            )  # fmt: skip
    else:
        tma_store(out_maps[I], place_of_queries(work.batch, work.head, row, first_column(out_maps, I), rules), tile)


@jit
def store_accumulator(
    x, out_ptr, query, queries_left, head, num_heads, WIDTH: gl.constexpr, COLUMN: gl.constexpr, HEADS: gl.constexpr
):
    """Stores the first queries of an accumulator of 64 rows, with HEADS heads each, to a contiguous float32 (queries,
    num_heads * HEADS, WIDTH), from column COLUMN on. `head` counts HEADS heads as one. A quad of threads fills a sector
    of 32 bytes."""
    layout: gl.constexpr = x.type.layout
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = COLUMN + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    lines = ((query + rows // HEADS).to(gl.int64) * num_heads + head) * HEADS + rows % HEADS
    inside = (rows < queries_left * HEADS)[:, None] & (columns < WIDTH)[None, :]
    gl.store(out_ptr + (lines[:, None] * WIDTH + columns[None, :]), x, mask=inside)


@jit
def store_rows(x, out_ptr, query, queries_left, head, num_heads, head_dim_v, column, HEADS: gl.constexpr):
    """Stores the first queries of a piece, with HEADS heads each, to a contiguous (total_q, num_heads * HEADS,
    head_dim_v), from `column` on. `head` counts HEADS heads as one."""
    layout: gl.constexpr = row_vectors(x.shape[1])
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    lines = ((query + rows // HEADS).to(gl.int64) * num_heads + head) * HEADS + rows % HEADS
    offsets = lines[:, None] * head_dim_v + columns[None, :]
    inside = (rows < queries_left * HEADS)[:, None] & (columns < head_dim_v)[None, :]
    gl.store(out_ptr + offsets, x.load(layout), mask=inside)
