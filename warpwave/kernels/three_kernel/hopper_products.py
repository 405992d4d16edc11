"""three_kernel's products on Hopper: P from Q and K, and out from P and V.

    P = 2^(S' - r),  S' = Q K^T scaled and masked, in bits;   out = 1/L * sum over tiles of 2^(r - R) P V

Both launches are matrix products that differ in their epilogue. A program processes tiles of 128 x 256. One warp keeps
a ring of operands full by TMA, and two warpgroups of 64 rows each multiply. A tile is stored by TMA, 64 columns at a
time, while the ring fills for the next tile. Concurrent tiles are adjacent, so that they share reads in L2: 16 blocks
of rows, traversed one column of tiles after another.

A tile of scores does not see the other tiles of its row. Its reference r is its own maximum, rounded down to a multiple
of a step so coarse that the tiles of a row nearly always have the same reference (QUANTUM). A separate launch
(statistics.py) combines the references, sums and largest probabilities of a row. If a tile's reference is below its
row's, 2^(r - R) is a power of two, and the second launch applies it to P in shared memory without rounding. A score
costs 2 bytes written and 2 read for each 256 columns of v, and needs no separate pass.

The combination of tiles with separate references follows Milakov & Gimelshein, "Online normalizer calculation for
softmax" (2018).

Bound: tensor cores and L2, 85 FLOP for each byte of operands.
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from warpwave.kernels.hopper.parts import ROWS, accumulator_layout, barriers, exp2, like, matrix
from warpwave.kernels.hopper.split_float32 import wait_for_launch_before
from warpwave.kernels.three_kernel.hopper_tiles import (
    BLOCK_M,
    BLOCK_N,
    Chunk,
    OfChunk,
    place_scores,
    place_values,
    value_turns,
)
from warpwave.runtime.gluon_or_stub import (
    aggregate,
    block_barrier,
    constexpr_function,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BLOCK_K = gl.constexpr(64)  # head_dim elements or keys that a step sums over: 128 bytes, a line of swizzled memory
STAGES = gl.constexpr(4)
PIECE = gl.constexpr(64)  # columns of a tile that are stored together; each warpgroup has room for two such pieces


@aggregate
class Ring:
    """STAGES steps in shared memory: 64 rows of A for each warpgroup, BLOCK_K of B, and their barriers."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


# The ring -------------------------------------------------------------------------------------------------------------


@jit
def make_ring(a_map, b_map):
    """Allocates shared memory in the maps' layouts, and barriers for hand-backs by two warpgroups."""
    a = gl.allocate_shared_memory(a_map.dtype, [2 * STAGES] + a_map.block_type.shape, a_map.layout)
    b = gl.allocate_shared_memory(b_map.dtype, [STAGES] + b_map.block_type.shape, b_map.layout)
    ring = Ring(a, b, barriers(STAGES, 1), barriers(STAGES, 2))
    fence_async_shared()
    return ring


@jit
def load(ring, n, a_map, a_batch, a_head, a_row, a_column, b_map, b_batch, b_head, b_row, b_column):
    """Loads step n of the ring as soon as its stage is free. Elements outside a tensor are zeros."""
    stage = n % STAGES
    mbarrier.wait(ring.empty.index(stage), ((n // STAGES) & 1) ^ 1)
    full = ring.full.index(stage)
    mbarrier.expect(full, 2 * a_map.block_type.nbytes + b_map.block_type.nbytes)
    for group in gl.static_range(2):
        tma_load(a_map, [a_batch, a_head, a_row + group * ROWS, a_column], full, ring.a.index(2 * stage + group))
    tma_load(b_map, [b_batch, b_head, b_row, b_column], full, ring.b.index(stage))


@jit
def wait_full(ring, n):
    """Waits until step n has arrived."""
    mbarrier.wait(ring.full.index(n % STAGES), (n // STAGES) & 1)


@jit
def hand_back(ring, n):
    """Hands back step n; called by a warpgroup."""
    mbarrier.arrive(ring.empty.index(n % STAGES), count=1)


# Stores of tiles ------------------------------------------------------------------------------------------------------


@jit
def halves(x):
    """Returns the left and the right columns of x."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@jit
def quarters(x):
    """Returns x [64, 4 * PIECE] as four pieces, each in the layout of an accumulator of that width."""
    left, right = halves(x)
    a, b = halves(left)
    c, d = halves(right)
    layout: gl.constexpr = accumulator_layout(PIECE)
    return (
        gl.convert_layout(a, layout),
        gl.convert_layout(b, layout),
        gl.convert_layout(c, layout),
        gl.convert_layout(d, layout),
    )


@jit
def out_buffers(out_map):
    """Allocates two pieces for each warpgroup."""
    return gl.allocate_shared_memory(out_map.dtype, [4] + out_map.block_type.shape, out_map.layout)


@jit
def store_piece(x, out_map, batch, head, row, column, buffers, GROUP: gl.constexpr, I: gl.constexpr):
    """Stores piece I of a tile, [64, PIECE], asynchronously, while the next one is written."""
    buffer = buffers.index(2 * GROUP + I % 2)
    tma.store_wait(1)  # the buffer's previous piece has been stored
    matrix(buffer).store(x)
    fence_async_shared()
    tma_store(out_map, [batch, head, row, column + I * PIECE], buffer)


# Scores ---------------------------------------------------------------------------------------------------------------


@jit
def scores_producer(q_map, k_map, ring, chunk, all_tiles, steps, HAS_HIGH: gl.constexpr):
    """Loads Q and K, one step of head_dim after another, for each tile of the program."""
    n = 0
    for item in range(gl.program_id(0), chunk.heads * all_tiles, gl.num_programs(0)):
        chunk_head, block, tile = place_scores(chunk, item, all_tiles, HAS_HIGH)
        row = chunk.row_begin + block * BLOCK_M
        batch = (chunk.first_head + chunk_head) // chunk.num_heads
        head = (chunk.first_head + chunk_head) % chunk.num_heads
        for step in range(steps):
            load(
                ring, n, q_map, batch, head, row, step * BLOCK_K,
                k_map, batch, head // chunk.group_size, tile * BLOCK_N, step * BLOCK_K,
            )  # fmt: skip
            n += 1


@jit
def scores_of_tile(ring, n, steps, GROUP: gl.constexpr):
    """Returns Q K^T of one tile, [64, BLOCK_N], with its last step still in flight. A step's stage is handed back while
    the next is multiplied."""
    acc = gl.zeros([ROWS, BLOCK_N], gl.float32, accumulator_layout(BLOCK_N))
    wait_full(ring, n)
    stage = n % STAGES
    q = matrix(ring.a.index(2 * stage + GROUP))
    acc = warpgroup_mma(q, matrix(ring.b.index(stage)).permute((1, 0)), acc, use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    n += 1
    for _step in range(1, steps):
        wait_full(ring, n)
        stage = n % STAGES
        q = matrix(ring.a.index(2 * stage + GROUP))
        acc = warpgroup_mma(q, matrix(ring.b.index(stage)).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        hand_back(ring, n - 1)
        n += 1
    return acc, n


@constexpr_function
def quantum_of(dtype):
    """Returns the bits between references, and the amount added to a score before it is rounded down to a reference.

    The largest probability of a row in a tile lies within a quantum, so the dtype's range limits the quantum: bfloat16
    has the same accuracy at all exponents, and float16 ends at 2^16 and is most accurate from 2^-14 on.
    """
    return (64.0, 32.0) if dtype == gl.bfloat16 else (14.0, 0.0)


@jit
def scores_consumer(
    GROUP: gl.constexpr, p_map, tile_reference_ptr, tile_top_ptr, tile_sum_ptr, chunk_rows, seqlen_k, high,
    all_tiles, steps, scale, buffers, ring, chunk, HAS_HIGH: gl.constexpr,
):  # fmt: skip
    """Computes P of 64 rows and BLOCK_N keys, tile after tile, with each row's reference, largest probability and
    sum."""
    layout: gl.constexpr = accumulator_layout(BLOCK_N)
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_key: gl.constexpr = gl.SliceLayout(0, layout)
    QUANTUM: gl.constexpr = quantum_of(p_map.dtype)[0]
    RAISED: gl.constexpr = quantum_of(p_map.dtype)[1]
    n = 0
    for item in range(gl.program_id(0), chunk.heads * all_tiles, gl.num_programs(0)):
        x, n = scores_of_tile(ring, n, steps, GROUP)
        chunk_head, block, tile = place_scores(chunk, item, all_tiles, HAS_HIGH)  # while the last step is multiplied
        x = warpgroup_mma_wait(0, deps=[x])
        hand_back(ring, n - 1)
        in_chunk = block * BLOCK_M + GROUP * ROWS
        row = chunk.row_begin + in_chunk
        rows = row + gl.arange(0, ROWS, by_row)
        first = tile * BLOCK_N
        partly = first + BLOCK_N > seqlen_k
        if HAS_HIGH:
            partly = partly | (first + BLOCK_N - 1 > row + high)
        if partly:
            end = gl.full([ROWS], 0, gl.int32, by_row) + (seqlen_k - first)
            if HAS_HIGH:
                end = gl.minimum(end, rows + (high + 1 - first))
            visible = gl.arange(0, BLOCK_N, by_key)[None, :] < end[:, None]
            x = gl.where(visible, x, float("-inf"))
        highest = gl.max(x, axis=1)
        reference = gl.floor((highest * scale + RAISED) * (1.0 / QUANTUM)) * QUANTUM
        shift = gl.where(reference == float("-inf"), 0.0, reference)
        p = exp2(gl.fma(x, gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout) + scale, 0.0 - shift[:, None]))
        top = exp2(gl.fma(highest, gl.full([ROWS], 0.0, gl.float32, by_row) + scale, 0.0 - shift))
        total = gl.sum(p, axis=1)
        pieces = quarters(p.to(p_map.dtype))
        for i in gl.static_range(len(pieces)):
            store_piece(pieces[i], p_map, 0, chunk_head, in_chunk, first, buffers, GROUP, i)
        inside = rows < chunk.row_end
        there = (chunk_head * chunk.key_tiles + tile).to(gl.int64) * chunk_rows + (rows - chunk.row_begin)
        gl.store(tile_reference_ptr + there, reference, mask=inside)
        gl.store(tile_top_ptr + there, top, mask=inside)
        gl.store(tile_sum_ptr + there, total, mask=inside)
    tma.store_wait(0)


@jit(do_not_specialize=["chunk_rows", "seqlen_k", "high", "all_tiles", "steps"])
def hopper_scores_kernel(
    q_map,
    k_map,
    p_map,
    tile_reference_ptr,
    tile_top_ptr,
    tile_sum_ptr,
    of_chunk: OfChunk,
    chunk_rows,
    seqlen_k,
    high,
    all_tiles,
    steps,
    scale,
    HAS_HIGH: gl.constexpr,
):
    """Computes P of a chunk, relative to a power of two in each tile, and the inputs of the row statistics.

    Maps have the axes (batch, head, row, column); P's batch is 1 and its heads and rows are the chunk's. `scale`
    converts raw scores to bits and must not be 0. A row sees the keys up to itself plus `high`, limited by seqlen_k;
    `all_tiles` tiles of a head are seen by some row. Per-tile values are (heads, key_tiles, chunk_rows), in float32:
    the reference in bits, and relative to it the largest probability and the sum.
    """
    chunk = Chunk(of_chunk)
    buffers = out_buffers(p_map)
    ring = make_ring(q_map, k_map)
    of_consumer = (
        p_map, tile_reference_ptr, tile_top_ptr, tile_sum_ptr, chunk_rows, seqlen_k, high, all_tiles, steps, scale,
        buffers, ring, chunk, HAS_HIGH,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (scores_consumer, (0,) + of_consumer),
            (scores_consumer, (1,) + of_consumer),
            (scores_producer, (q_map, k_map, ring, chunk, all_tiles, steps, HAS_HIGH)),
        ],
        [4, 1],
        [232, 40],
    )


# Values ---------------------------------------------------------------------------------------------------------------


@jit
def values_producer(p_map, v_map, ring, chunk, HAS_HIGH: gl.constexpr):
    """Loads P and V, one step of keys after another, for each tile of out of the program."""
    n = 0
    for turn in range(value_turns(chunk)):
        chunk_head, block, column, tiles = place_values(chunk, turn, HAS_HIGH)
        batch = (chunk.first_head + chunk_head) // chunk.num_heads
        head = (chunk.first_head + chunk_head) % chunk.num_heads
        for step in range(tiles * (BLOCK_N // BLOCK_K)):
            load(
                ring, n, p_map, 0, chunk_head, block * BLOCK_M, step * BLOCK_K,
                v_map, batch, head // chunk.group_size, step * BLOCK_K, column * BLOCK_N,
            )  # fmt: skip
            n += 1


@jit
def lower(p, factor_ptr, inside_rows):
    """Multiplies P [64, BLOCK_K] in shared memory by a power of two for each row."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    factor = gl.load(factor_ptr + rows, mask=rows < inside_rows, other=1.0)
    lowered = p.load(layout).to(gl.float32) * factor[:, None]
    p.store(lowered.to(p.dtype))
    fence_async_shared()
    block_barrier()  # placed here because every step would execute the compiler's own barrier


@jit
def next_values(
    chunk, turn, row_scale_ptr, lowered_ptr, chunk_rows, GROUP: gl.constexpr, HAS_HIGH: gl.constexpr
):  # fmt: skip
    """Returns the position of a turn's tile, the factors of its rows, and whether its first P is to be lowered. Called
    before the previous turn ends, its divisions and loads are ready when the turn starts."""
    chunk_head, block, column, tiles = place_values(chunk, turn, HAS_HIGH)
    in_chunk = block * BLOCK_M + GROUP * ROWS
    rows = in_chunk + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator_layout(BLOCK_N)))
    inside = (rows < chunk.row_end - chunk.row_begin) & (tiles > 0)
    row_scale = gl.load(row_scale_ptr + chunk_head.to(gl.int64) * chunk_rows + rows, mask=inside, other=0.0)
    groups = 2 * gl.cdiv(chunk_rows, BLOCK_M)
    lowered = lowered_ptr + ((chunk_head * chunk.key_tiles).to(gl.int64) * groups + 2 * block + GROUP)
    is_lowered = gl.load(lowered, mask=tiles > 0, other=0.0)
    return chunk_head, block, column, tiles, row_scale, is_lowered


@jit
def values_consumer(
    GROUP: gl.constexpr, out_map, factor_ptr, lowered_ptr, row_scale_ptr, chunk_rows, buffers, ring, chunk,
    HAS_HIGH: gl.constexpr,
):  # fmt: skip
    """Computes 64 rows and BLOCK_N columns of out, tile after tile."""
    groups = 2 * gl.cdiv(chunk_rows, BLOCK_M)
    n = 0
    chunk_head, block, column, tiles, row_scale, is_lowered = next_values(
        chunk, 0, row_scale_ptr, lowered_ptr, chunk_rows, GROUP, HAS_HIGH
    )  # fmt: skip
    for turn in range(value_turns(chunk)):
        in_chunk = block * BLOCK_M + GROUP * ROWS
        inside_rows = chunk.row_end - chunk.row_begin - in_chunk
        of_head = chunk_head * chunk.key_tiles
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, accumulator_layout(BLOCK_N))
        for tile in range(tiles):
            lowered = lowered_ptr + ((of_head + tile + 1).to(gl.int64) * groups + 2 * block + GROUP)
            is_lowered_next = gl.load(lowered, mask=tile + 1 < tiles, other=0.0)  # the load overlaps with the product
            for step in gl.static_range(BLOCK_N // BLOCK_K):
                wait_full(ring, n)
                stage = n % STAGES
                p = matrix(ring.a.index(2 * stage + GROUP))
                if is_lowered != 0.0:
                    factors = factor_ptr + ((of_head + tile).to(gl.int64) * chunk_rows + in_chunk)
                    lower(p, factors, inside_rows)
                acc = warpgroup_mma(p, matrix(ring.b.index(stage)), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                if step > 0:  # noqa: SIM114 (known when compiled; the next is not)
                    hand_back(ring, n - 1)
                elif tile > 0:
                    hand_back(ring, n - 1)
                n += 1
            is_lowered = is_lowered_next
        of_row = row_scale
        has_tile = tiles > 0
        batch = (chunk.first_head + chunk_head) // chunk.num_heads
        head = (chunk.first_head + chunk_head) % chunk.num_heads
        first_column = column * BLOCK_N
        chunk_head, block, column, tiles, row_scale, is_lowered = next_values(
            chunk, turn + 1, row_scale_ptr, lowered_ptr, chunk_rows, GROUP, HAS_HIGH
        )  # fmt: skip
        acc = warpgroup_mma_wait(0, deps=[acc])
        if has_tile:
            hand_back(ring, n - 1)
            scale = like(of_row, acc)
            out = acc * scale
            if HAS_HIGH:
                out = gl.where(scale == 0.0, 0.0, out)  # for a row that saw no key, whatever the values are
            if inside_rows > 0:
                row = chunk.row_begin + in_chunk
                pieces = quarters(out.to(out_map.dtype))
                for i in gl.static_range(len(pieces)):
                    store_piece(pieces[i], out_map, batch, head, row, first_column, buffers, GROUP, i)
    tma.store_wait(0)


@jit(do_not_specialize=["chunk_rows"])
def hopper_values_kernel(
    p_map,
    v_map,
    out_map,
    factor_ptr,
    lowered_ptr,
    row_scale_ptr,
    of_chunk: OfChunk,
    chunk_rows,
    HAS_HIGH: gl.constexpr,
):
    """Computes the chunk's rows of out from the results of hopper_scores_kernel and chunk_statistics_kernel; it starts
    while the latter still runs."""
    wait_for_launch_before(128)
    chunk = Chunk(of_chunk)
    buffers = out_buffers(out_map)
    ring = make_ring(p_map, v_map)
    of_consumer = (
        out_map, factor_ptr, lowered_ptr, row_scale_ptr, chunk_rows, buffers, ring, chunk, HAS_HIGH,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (values_consumer, (0,) + of_consumer),
            (values_consumer, (1,) + of_consumer),
            (values_producer, (p_map, v_map, ring, chunk, HAS_HIGH)),
        ],
        [4, 1],
        [232, 40],
    )
