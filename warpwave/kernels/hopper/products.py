"""three_kernel's two launches on Hopper: scores with the softmax in their epilogue, then values. No kernel by itself.

    P = exp(S' - m),  S' = Q K^T scaled and masked;   out = P V / sum        m lags behind the running maximum

A program of the first launch owns 128 queries and walks their keys tile by tile, as a fused kernel would, but writes
P to memory instead of multiplying it on; so a row's maximum, sum and log-sum-exp are known when its last tile is. Where
the maximum moved between two tiles, the factor of what was summed before is written beside P, and the second launch, a
product of tiles of 128 queries x 256 columns, multiplies its accumulator by it where one differs from 1. A score costs
2 bytes written and 2 read for each 256 columns of v, and no pass of its own.

In both, one warp keeps a ring of operands full by TMA and two warpgroups of 64 rows each multiply.

Dao, "FlashAttention-2" (2023), algorithm 1, in two halves; Milakov & Gimelshein, "Online normalizer calculation for
softmax" (2018).

Bound: tensor cores and L2, 85 FLOP for each byte of operands.
"""

# No postponed annotations here: an aggregate's fields are checked against its annotations.

from warpwave.kernels.hopper.compat import (
    aggregate,
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
from warpwave.kernels.hopper.parts import LN_2, LOG2_E, ROWS, accumulator_layout, exp2, like, matrix, rescale
from warpwave.kernels.hopper.softmax import LAG

BLOCK_M = gl.constexpr(128)  # queries of a program, 64 for each of two warpgroups
BLOCK_N = gl.constexpr(256)  # keys of a tile of scores, and columns of v of a tile of out
BLOCK_K = gl.constexpr(64)  # of head_dim or keys that a step sums over: 128 bytes, a line of swizzled shared memory
STAGES = gl.constexpr(3)
UNSPECIALISED = [
    *("stride_lb", "stride_lh", "num_heads", "group_size", "first_head", "row_begin", "row_end", "seqlen_k", "high"),
    *("heads", "blocks", "columns", "heavy_first", "num_tiles", "chunk_rows", "steps"),
]


@aggregate
class Ring:
    """STAGES steps in shared memory: 64 rows of A for each warpgroup, BLOCK_K of B, and their barriers."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @constexpr_function
    def __init__(self, a, b, full, empty):
        self.a = a
        self.b = b
        self.full = full
        self.empty = empty


@aggregate
class Chunk:
    """What is computed: heads counted over the batch from first_head on, rows from row_begin to row_end of each.

    Args:
        high: a row sees the keys up to itself plus this, and those before seqlen_k.
        heads, blocks, columns: of the chunk, of BLOCK_M rows of a head, of tiles of out of such a block. An item is one
            of their product.
        heavy_first: 1 where later blocks see more keys.
    """

    first_head: gl.tensor
    row_begin: gl.tensor
    row_end: gl.tensor
    seqlen_k: gl.tensor
    high: gl.tensor
    num_heads: gl.tensor
    group_size: gl.tensor
    heads: gl.tensor
    blocks: gl.tensor
    columns: gl.tensor
    heavy_first: gl.tensor

    @constexpr_function
    def __init__(
        self, first_head, row_begin, row_end, seqlen_k, high, num_heads, group_size, heads, blocks, columns, heavy_first
    ):  # fmt: skip
        self.first_head = first_head
        self.row_begin = row_begin
        self.row_end = row_end
        self.seqlen_k = seqlen_k
        self.high = high
        self.num_heads = num_heads
        self.group_size = group_size
        self.heads = heads
        self.blocks = blocks
        self.columns = columns
        self.heavy_first = heavy_first


@aggregate
class Rules:
    """What is known when compiled. In a tuple of arguments it would not be."""

    HAS_HIGH: gl.constexpr
    HAS_SINKS: gl.constexpr
    WRITE_LSE: gl.constexpr

    @constexpr_function
    def __init__(self, HAS_HIGH, HAS_SINKS, WRITE_LSE):
        self.HAS_HIGH = gl.constexpr(HAS_HIGH)
        self.HAS_SINKS = gl.constexpr(HAS_SINKS)
        self.WRITE_LSE = gl.constexpr(WRITE_LSE)


@jit
def rounds(chunk):
    """How many items a program has, at the most."""
    return gl.cdiv(chunk.heads * chunk.blocks * chunk.columns, gl.num_programs(0))


@jit
def place(chunk, turn):
    """(head of the chunk, first row, column, tiles of keys) of a program's item: no rows and no tiles where there is
    none left.

    Items are dealt out back and forth. Where later blocks see more keys, those come first, over all heads: a program
    that got a long one gets a short one with it. Elsewhere a head's come together, for they share K and V in L2; and
    the columns of a block always do, for they share P.
    """
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    item = turn * programs + gl.where(turn % 2 == 0, pid, programs - 1 - pid)
    is_there = item < chunk.heads * chunk.blocks * chunk.columns
    column = item % chunk.columns * BLOCK_N
    pair = item // chunk.columns
    by_block = chunk.heavy_first != 0
    head = gl.where(by_block, pair % chunk.heads, pair // chunk.blocks)
    block = gl.where(by_block, chunk.blocks - 1 - pair // chunk.heads, pair % chunk.blocks)
    head = gl.where(is_there, head, 0)
    row = gl.where(is_there, chunk.row_begin + block * BLOCK_M, chunk.row_end)
    last = gl.minimum(row + BLOCK_M, chunk.row_end) - 1
    keys = gl.minimum(chunk.seqlen_k, last + chunk.high + 1)
    tiles = gl.where(is_there, gl.cdiv(gl.maximum(keys, 1), BLOCK_N), 0)  # one where its rows see no key
    return head, row, column, tiles


# The ring -------------------------------------------------------------------------------------------------------------


@jit
def make_ring(a_map, b_map):
    """Shared memory as the maps fill it, and barriers that two warpgroups hand back."""
    a = gl.allocate_shared_memory(a_map.dtype, [2 * STAGES] + a_map.block_type.shape, a_map.layout)
    b = gl.allocate_shared_memory(b_map.dtype, [STAGES] + b_map.block_type.shape, b_map.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    return Ring(a, b, full, empty)


@jit
def load(ring, n, a_map, a_batch, a_head, a_row, a_column, b_map, b_batch, b_head, b_row, b_column):
    """Step n of the ring, as soon as its stage is free. What lies outside a tensor comes as zeros."""
    stage = n % STAGES
    mbarrier.wait(ring.empty.index(stage), ((n // STAGES) & 1) ^ 1)
    full = ring.full.index(stage)
    mbarrier.expect(full, 2 * a_map.block_type.nbytes + b_map.block_type.nbytes)
    for group in gl.static_range(2):
        tma_load(a_map, [a_batch, a_head, a_row + group * ROWS, a_column], full, ring.a.index(2 * stage + group))
    tma_load(b_map, [b_batch, b_head, b_row, b_column], full, ring.b.index(stage))


@jit
def wait_full(ring, n):
    """Waits until step n has come."""
    mbarrier.wait(ring.full.index(n % STAGES), (n // STAGES) & 1)


@jit
def hand_back(ring, n):
    """A warpgroup is done with step n."""
    mbarrier.arrive(ring.empty.index(n % STAGES), count=1)


@jit
def out_buffers(out_map):
    """A tile on its way to memory for each warpgroup."""
    return gl.allocate_shared_memory(out_map.dtype, [2] + out_map.block_type.shape, out_map.layout)


# Scores ---------------------------------------------------------------------------------------------------------------


@jit
def scores_producer(q_map, k_map, ring, chunk, steps):
    """Loads Q and K, a step of head_dim after another, for each tile of each block of the program."""
    n = 0
    for turn in range(rounds(chunk)):
        chunk_head, row, _column, tiles = place(chunk, turn)
        batch = (chunk.first_head + chunk_head) // chunk.num_heads
        head = (chunk.first_head + chunk_head) % chunk.num_heads
        for tile in range(tiles):
            for step in range(steps):
                load(
                    ring, n, q_map, batch, head, row, step * BLOCK_K,
                    k_map, batch, head // chunk.group_size, tile * BLOCK_N, step * BLOCK_K,
                )  # fmt: skip
                n += 1


@jit
def scores_of_tile(ring, n, steps, GROUP: gl.constexpr):
    """Q K^T of one tile, [64, BLOCK_N]; a step's stage is handed back while the next is multiplied."""
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
    acc = warpgroup_mma_wait(0, deps=[acc])
    tma.store_wait(0)  # the buffer of P is free again; the hand-back's barrier tells it to the other warps
    hand_back(ring, n - 1)
    return acc, n


@jit
def scores_consumer(
    GROUP: gl.constexpr, p_map, factor_ptr, row_scale_ptr, lse_ptr, sinks_ptr, stride_lb, stride_lh, num_tiles,
    chunk_rows, scale, p_tiles, ring, chunk, steps, rules,
):  # fmt: skip
    """P of 64 rows after another, with the factors and sums that the second launch needs."""
    layout: gl.constexpr = accumulator_layout(BLOCK_N)
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_key: gl.constexpr = gl.SliceLayout(0, layout)
    n = 0
    for turn in range(rounds(chunk)):
        chunk_head, block_row, _column, tiles = place(chunk, turn)
        row = block_row + GROUP * ROWS
        rows = row + gl.arange(0, ROWS, by_row)
        inside = rows < chunk.row_end
        in_chunk = rows - chunk.row_begin
        m_i = gl.full([ROWS], float("-inf"), gl.float32, by_row)
        m_top = m_i
        l_i = gl.zeros([ROWS], gl.float32, by_row)
        for tile in range(tiles):
            x, n = scores_of_tile(ring, n, steps, GROUP)
            x = x * scale
            first = tile * BLOCK_N
            partly = first + BLOCK_N > chunk.seqlen_k
            if rules.HAS_HIGH:
                partly = partly | (first + BLOCK_N - 1 > row + chunk.high)
            if partly:
                end = gl.full([ROWS], 0, gl.int32, by_row) + (chunk.seqlen_k - first)
                if rules.HAS_HIGH:
                    end = gl.minimum(end, rows + (chunk.high + 1 - first))
                visible = gl.arange(0, BLOCK_N, by_key)[None, :] < end[:, None]
                x = gl.where(visible, x, float("-inf"))
            m_top = gl.maximum(m_top, gl.max(x, axis=1))
            m_new = gl.where(m_top - m_i > LAG, m_top, m_i)
            shift = gl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = gl.where(m_i == float("-inf"), 1.0, exp2(m_i - shift))  # nothing was summed where nothing was seen
            m_i = m_new
            p = exp2(x - shift[:, None])
            l_i = l_i * alpha + gl.sum(p, axis=1)
            matrix(p_tiles.index(GROUP)).store(p.to(p_map.dtype))
            fence_async_shared()
            tma_store(p_map, [0, chunk_head, row - chunk.row_begin, first], p_tiles.index(GROUP))
            factors = factor_ptr + (chunk_head * num_tiles + tile).to(gl.int64) * chunk_rows
            gl.store(factors + in_chunk, alpha, mask=inside)
        # What 16 bits added to a row's largest probability, which is 1 only where the maximum does not lag, is added to
        # the sum that out is divided by, so that it cancels.
        m_shift = gl.where(m_i == float("-inf"), 0.0, m_i)
        largest = exp2(m_top - m_shift)
        l_out = l_i + (largest.to(p_map.dtype).to(gl.float32) - largest)
        factor = gl.full([ROWS], 1.0, gl.float32, by_row)
        if rules.HAS_SINKS:
            # One more key, whose value is zero.
            head = (chunk.first_head + chunk_head) % chunk.num_heads
            sink_log2 = gl.load(sinks_ptr + head) * LOG2_E
            m_new = gl.maximum(m_i, sink_log2)
            m_shift = gl.where(m_new == float("-inf"), 0.0, m_new)
            factor = exp2(m_i - m_shift)
            sink = exp2(sink_log2 - m_shift)
            l_i = l_i * factor + sink
            l_out = l_out * factor + sink
            m_i = m_new
        row_scale = gl.where(l_i == 0.0, 0.0, factor / gl.where(l_i == 0.0, 1.0, l_out))
        gl.store(row_scale_ptr + chunk_head.to(gl.int64) * chunk_rows + in_chunk, row_scale, mask=inside)
        if rules.WRITE_LSE:
            lse = gl.where(l_i == 0.0, float("-inf"), (m_i + gl.log2(l_i)) * LN_2)
            batch = ((chunk.first_head + chunk_head) // chunk.num_heads).to(gl.int64)
            head = ((chunk.first_head + chunk_head) % chunk.num_heads).to(gl.int64)
            gl.store(lse_ptr + batch * stride_lb + head * stride_lh + rows, lse, mask=inside)
    tma.store_wait(0)


@jit(do_not_specialize=UNSPECIALISED)
def hopper_scores_kernel(
    q_map,
    k_map,
    p_map,
    factor_ptr,
    row_scale_ptr,
    lse_ptr,
    sinks_ptr,
    counter_ptr,
    stride_lb,
    stride_lh,
    first_head,
    row_begin,
    row_end,
    seqlen_k,
    high,
    num_heads,
    group_size,
    heads,
    blocks,
    columns,
    heavy_first,
    num_tiles,
    chunk_rows,
    steps,
    scale,
    HAS_HIGH: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    WRITE_LSE: gl.constexpr,
):
    """P of a chunk, and for each of its rows what P V is to be multiplied by.

    Maps are of (batch, head, row, column); P's batch is 1 and its heads and rows are the chunk's. `scale` makes bits of
    raw scores. Factors are (heads, num_tiles, chunk_rows): by what to multiply what was summed before a tile.
    """
    if not HAS_SINKS:
        sinks_ptr = counter_ptr
    if not WRITE_LSE:
        lse_ptr = counter_ptr
    chunk = Chunk(
        first_head, row_begin, row_end, seqlen_k, high, num_heads, group_size, heads, blocks, columns, heavy_first
    )  # fmt: skip
    rules = Rules(HAS_HIGH, HAS_SINKS, WRITE_LSE)
    p_tiles = out_buffers(p_map)
    ring = make_ring(q_map, k_map)
    of_consumer = (
        p_map, factor_ptr, row_scale_ptr, lse_ptr, sinks_ptr, stride_lb, stride_lh, num_tiles, chunk_rows, scale,
        p_tiles, ring, chunk, steps, rules,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (scores_consumer, (0,) + of_consumer),
            (scores_consumer, (1,) + of_consumer),
            (scores_producer, (q_map, k_map, ring, chunk, steps)),
        ],
        [4, 1],
        [240, 24],
    )


# Values ---------------------------------------------------------------------------------------------------------------


@jit
def values_producer(p_map, v_map, ring, chunk):
    """Loads P and V, a step of keys after another, for each tile of out of the program."""
    n = 0
    for turn in range(rounds(chunk)):
        chunk_head, row, column, tiles = place(chunk, turn)
        batch = (chunk.first_head + chunk_head) // chunk.num_heads
        head = (chunk.first_head + chunk_head) % chunk.num_heads
        for step in range(tiles * (BLOCK_N // BLOCK_K)):
            load(
                ring, n, p_map, 0, chunk_head, row - chunk.row_begin, step * BLOCK_K,
                v_map, batch, head // chunk.group_size, step * BLOCK_K, column,
            )  # fmt: skip
            n += 1


@jit
def values_consumer(
    GROUP: gl.constexpr, out_map, factor_ptr, row_scale_ptr, num_tiles, chunk_rows, out_tiles, ring, chunk
):  # fmt: skip
    """64 rows and BLOCK_N columns of out after another."""
    by_row: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_N))
    n = 0
    for turn in range(rounds(chunk)):
        chunk_head, block_row, column, tiles = place(chunk, turn)
        row = block_row + GROUP * ROWS
        in_chunk = row - chunk.row_begin + gl.arange(0, ROWS, by_row)
        inside = in_chunk < chunk.row_end - chunk.row_begin
        factors = factor_ptr + (chunk_head * num_tiles).to(gl.int64) * chunk_rows + in_chunk
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, accumulator_layout(BLOCK_N))
        alpha = gl.full([ROWS], 1.0, gl.float32, by_row)  # of the first tile, before which there is nothing
        for tile in range(tiles):
            # The next tile's factors come while this one is multiplied.
            factors += chunk_rows
            alpha_next = gl.load(factors, mask=inside & (tile + 1 < tiles), other=1.0)
            acc = rescale(acc, like(alpha, acc))
            for step in gl.static_range(BLOCK_N // BLOCK_K):
                wait_full(ring, n)
                stage = n % STAGES
                p = matrix(ring.a.index(2 * stage + GROUP))
                acc = warpgroup_mma(p, matrix(ring.b.index(stage)), acc, is_async=True)
                if step > 0:
                    acc = warpgroup_mma_wait(1, deps=[acc])
                    hand_back(ring, n - 1)
                n += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            tma.store_wait(0)  # the buffer of out is free again; the hand-back's barrier tells it to the other warps
            hand_back(ring, n - 1)
            alpha = alpha_next
        if tiles > 0:  # else the turn is empty, and the buffer of out may still be on its way
            row_scale = gl.load(row_scale_ptr + chunk_head.to(gl.int64) * chunk_rows + in_chunk, mask=inside, other=0.0)
            row_scale = like(row_scale, acc)
            out = gl.where(row_scale == 0.0, 0.0, acc * row_scale)  # of a row that saw no key, whatever the values held
            matrix(out_tiles.index(GROUP)).store(out.to(out_map.dtype))
            fence_async_shared()
            if row < chunk.row_end:
                batch = (chunk.first_head + chunk_head) // chunk.num_heads
                head = (chunk.first_head + chunk_head) % chunk.num_heads
                tma_store(out_map, [batch, head, row, column], out_tiles.index(GROUP))
    tma.store_wait(0)


@jit(do_not_specialize=UNSPECIALISED)
def hopper_values_kernel(
    p_map,
    v_map,
    out_map,
    factor_ptr,
    row_scale_ptr,
    counter_ptr,
    first_head,
    row_begin,
    row_end,
    seqlen_k,
    high,
    num_heads,
    group_size,
    heads,
    blocks,
    columns,
    heavy_first,
    num_tiles,
    chunk_rows,
):
    """The chunk's rows of out, from what hopper_scores_kernel left."""
    chunk = Chunk(
        first_head, row_begin, row_end, seqlen_k, high, num_heads, group_size, heads, blocks, columns, heavy_first
    )  # fmt: skip
    out_tiles = out_buffers(out_map)
    ring = make_ring(p_map, v_map)
    of_consumer = (
        out_map, factor_ptr, row_scale_ptr, num_tiles, chunk_rows, out_tiles, ring, chunk,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (values_consumer, (0,) + of_consumer),
            (values_consumer, (1,) + of_consumer),
            (values_producer, (p_map, v_map, ring, chunk)),
        ],
        [4, 1],
        [240, 24],
    )
