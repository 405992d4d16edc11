"""The warp roles of the Hopper kernel for large heads: a producer warp, one warpgroup of scores, two of values.

The producer fills rings of chunks, 64 keys x 128 columns: one ring of K, and one ring of V for each of its two readers.
It loads K of the first tile of keys, then for each tile K of the next tile and V of the current one. The warpgroup of
scores multiplies Q by K, takes the softmax and writes the probabilities to shared memory. Each warpgroup of values
multiplies them by its half of V's columns. While one of the three waits, the tensor cores work for another.

Each ring has one reader. With one ring for all three, a reader could wait for use k of a stage before use k - 1, which
belonged to another reader, had completed. A barrier's parity distinguishes a phase only from the next one, so the wait
passed at once. One launch in a few hundred was then wrong or never ended.

Messages from the warpgroup of scores to the warpgroups of values alternate between two slots. There is one for each
tile of keys (probabilities, and the factor for the previous sum), and a last one whose factor normalizes the sum.

    barrier      meaning                                     arrivals                     waits
    ring.full    a chunk has arrived                         TMA, by its bytes            its reader
    ring.empty   a chunk was read                            its reader                   producer
    q_full       Q has arrived                               TMA, by its bytes            scores
    q_empty      the queries have their last scores          scores                       producer
    p_full       a message was written                       scores                       both of values
    p_empty      a message was read                          2: both of values            scores
    box.full     a tile of queries was drawn                 producer                     all three
    box.empty    all know which                              3: all three                 producer

Shared memory that is written by ordinary stores and read by wgmma (probabilities; V past a packed sequence's end) is
fenced by each of its writers before the barrier that announces it.
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from typing import NamedTuple

from warpwave.kernels.hopper import scheduler
from warpwave.kernels.hopper.groups import Queries, Schedule
from warpwave.kernels.hopper.parts import LOG2_E, ROWS, accumulator_layout, like, matrix, rescale, tile_bytes, wait_full
from warpwave.kernels.hopper.rows import zero_tail
from warpwave.kernels.hopper.softmax import (
    in_bits,
    natural_lse,
    new_maximum,
    partial_sums,
    probabilities,
    rounding_of_the_largest,
    with_sink,
)
from warpwave.kernels.hopper.visible import Place, keys_of_sequence, tiles_of_block
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

CHUNK = gl.constexpr(128)  # columns of a chunk: two panels of 128 bytes, the widest that TMA swizzles
KEYS = gl.constexpr(64)  # keys of a chunk, and of a step


# Pieces of a tile per warpgroup of values: whole chunks alternate between the two groups; the last of an odd number is
# split between them.


@constexpr_function
def count_of(chunks, group):
    """Returns the number of a group's pieces of a tile: whole chunks, and half of one if their number is odd."""
    return (int(chunks) + 1) // 2


@constexpr_function
def chunk_of(chunks, group, i):
    """Returns the chunk that contains piece i."""
    return min(2 * int(i) + int(group), int(chunks) - 1)


@constexpr_function
def width_of(chunks, group, i):
    """Returns the columns of piece i."""
    return 64 if 2 * int(i) + 1 == int(chunks) else 128


@constexpr_function
def first_of(chunks, group, i):
    """Returns the first column of piece i within its chunk."""
    return 64 * int(group) if 2 * int(i) + 1 == int(chunks) else 0


class Widths(NamedTuple):
    """How head_dim and head_dim_v are divided.

    Attributes:
        K_CHUNKS, K_LAST: chunks of a row of Q and K, and the columns of the last chunk that are multiplied.
        V_CHUNKS: chunks of a row of V and out that a block processes.
        V_PARTS: number of blocks that share a row of V.
        AHEAD: whether the next tile's scores are multiplied during the softmax.
    """

    K_CHUNKS: gl.constexpr
    K_LAST: gl.constexpr
    V_CHUNKS: gl.constexpr
    V_PARTS: gl.constexpr
    AHEAD: gl.constexpr


@jit
def zero_accumulator(WIDTH: gl.constexpr):
    """Returns [64, WIDTH] of zeros."""
    return gl.zeros([ROWS, WIDTH], gl.float32, accumulator_layout(WIDTH))


# Chunks ---------------------------------------------------------------------------------------------------------------


@aggregate
class Chunks:
    """A ring of chunks of K or V, [stages, 1, 1, 64, 128], and its barriers. Chunk n, counted over the whole launch, is
    in stage n % stages."""

    chunks: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr


@jit
def load_chunk(ring, tensor_map, n, batch, head, row, column):
    """Loads chunk n of a ring as soon as its stage is free. Elements outside the tensor are zeros."""
    stage = n % ring.stages
    mbarrier.wait(ring.empty.index(stage), ((n // ring.stages) & 1) ^ 1)
    mbarrier.expect(ring.full.index(stage), tile_bytes((tensor_map,)))
    tma_load(tensor_map, [batch, head, row, column], ring.full.index(stage), ring.chunks.index(stage))


@jit
def load_queries(tensor_map, q_tiles, q_full, q_empty, messages, batch, head, row, widths: Widths):
    """Loads Q of one tile of queries once the previous tile's is no longer needed."""
    mbarrier.wait(q_empty.index(0), (messages & 1) ^ 1)
    mbarrier.expect(q_full.index(0), widths.K_CHUNKS * tile_bytes((tensor_map,)))
    for i in gl.static_range(widths.K_CHUNKS):
        tma_load(tensor_map, [batch, head, row, i * CHUNK], q_full.index(0), q_tiles.index(i))


@jit
def load_keys(ring, tensor_map, n, batch, head, row, widths: Widths):
    """Loads K of one tile of keys into its ring's chunks from n on."""
    for i in gl.static_range(widths.K_CHUNKS):
        load_chunk(ring, tensor_map, n + i, batch, head, row, i * CHUNK)


@jit
def load_values(ring_0, ring_1, tensor_map, n, batch, head, row, column, widths: Widths):
    """Loads V of one tile of keys: each warpgroup's chunks into its ring, from n on."""
    for i in gl.static_range(count_of(widths.V_CHUNKS, 0)):
        first = column + chunk_of(widths.V_CHUNKS, 0, i) * CHUNK
        load_chunk(ring_0, tensor_map, n + i, batch, head, row, first)
        second = column + chunk_of(widths.V_CHUNKS, 1, i) * CHUNK
        load_chunk(ring_1, tensor_map, n + i, batch, head, row, second)


@jit
def hand_back(ring, n):
    """Releases chunk n; called by the ring's reader."""
    mbarrier.arrive(ring.empty.index(n % ring.stages), count=1)


@jit
def chunk(ring, n):
    """Returns chunk n, [64, 128]."""
    return matrix(ring.chunks.index(n % ring.stages))


# The producer ---------------------------------------------------------------------------------------------------------


@jit
def producer(
    q_map, k_map, v_map, q_tiles, q_full, q_empty, k_ring, v_ring_0, v_ring_1, box, widths: Widths, rules,
    queries: Queries, schedule: Schedule, counter_ptr,
):  # fmt: skip
    """Draws tiles of queries and loads their operands."""
    n_k = 0  # chunks of K requested so far
    n_v = 0  # chunks of V requested so far, for each of its two readers
    messages = 0
    t = gl.program_id(0)
    while t < schedule.num_tiles:
        work = scheduler.tile_of(schedule, queries, t, ROWS, rules.HAS_HIGH, rules.IS_VARLEN)
        if scheduler.is_work(work, ROWS, rules.IS_VARLEN):
            scheduler.post(box, messages, work, rules.IS_VARLEN)
            keys = keys_of_sequence(work, rules)
            begin, end = tiles_of_block(keys, work, rules)
            batch = work.batch
            if rules.IS_VARLEN:
                batch = 0
            head = work.head // widths.V_PARTS
            kv_head = head // schedule.group_size
            column = work.head % widths.V_PARTS * (widths.V_CHUNKS * CHUNK)
            key = work.k_begin + keys.begin
            row = work.q_begin + work.tile * ROWS
            # K first if its ring holds a tile: the ring's stages are free before Q's buffer is.
            if k_ring.stages < widths.K_CHUNKS:
                load_queries(q_map, q_tiles, q_full, q_empty, messages, batch, head, row, widths)
            load_keys(k_ring, k_map, n_k, batch, kv_head, key + (end - 1) * KEYS, widths)
            n_k += widths.K_CHUNKS
            if k_ring.stages >= widths.K_CHUNKS:
                load_queries(q_map, q_tiles, q_full, q_empty, messages, batch, head, row, widths)
            for j in range(1, end - begin):
                load_keys(k_ring, k_map, n_k, batch, kv_head, key + (end - 1 - j) * KEYS, widths)
                n_k += widths.K_CHUNKS
                load_values(v_ring_0, v_ring_1, v_map, n_v, batch, kv_head, key + (end - j) * KEYS, column, widths)
                n_v += count_of(widths.V_CHUNKS, 0)
            load_values(v_ring_0, v_ring_1, v_map, n_v, batch, kv_head, key + begin * KEYS, column, widths)
            n_v += count_of(widths.V_CHUNKS, 0)
            messages += 1
        t = scheduler.draw(counter_ptr, schedule.num_tiles)
    scheduler.post_end(box, messages, rules.IS_VARLEN)


# Scores ---------------------------------------------------------------------------------------------------------------


@jit
def whole_tiles(keys, row_first, begin, end, rules):
    """Returns [whole_begin, whole_end): the tiles among [begin, end) that need no mask for the 64 queries from
    row_first on. `end - 1` is excluded and always masked."""
    whole_end = end - 1
    whole_begin = begin
    if rules.HAS_HIGH:
        first_hidden = gl.minimum(keys.end, row_first + keys.high + 1) - keys.begin
        whole_end = gl.maximum(gl.minimum(whole_end, gl.maximum(first_hidden, 0) // KEYS), begin)
    if rules.HAS_LOW:
        last_hidden = gl.maximum(row_first + ROWS - 1 + keys.low - keys.begin, 0)
        whole_begin = gl.minimum(gl.maximum(begin, gl.cdiv(last_hidden, KEYS)), whole_end)
    return whole_begin, whole_end


@jit
def product_with_keys(q_tiles, ring, n, widths: Widths):
    """Returns Q K^T of one tile of keys, whose chunks start at n. Each chunk is handed back as soon as the next product
    is in flight."""
    scores = zero_accumulator(KEYS)
    for i in gl.static_range(widths.K_CHUNKS):
        scores = add_chunk(q_tiles, ring, n, scores, i, widths)
        if i > 0:
            scores = warpgroup_mma_wait(1, deps=[scores])
            hand_back(ring, n + i - 1)
    scores = warpgroup_mma_wait(0, deps=[scores])
    hand_back(ring, n + widths.K_CHUNKS - 1)
    return scores


@jit
def add_chunk(q_tiles, ring, n, scores, I: gl.constexpr, widths: Widths):
    """Starts adding the product of chunk I of a row of Q and K to the scores."""
    wait_full(ring, n + I)
    q = matrix(q_tiles.index(I))
    k = chunk(ring, n + I)
    if I == widths.K_CHUNKS - 1 and widths.K_LAST < CHUNK:
        q = q.slice(0, widths.K_LAST, dim=1)
        k = k.slice(0, widths.K_LAST, dim=1)
    return warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=I > 0, is_async=True)


@jit
def step(
    q_tiles, ring, n, x, p_tiles, factors, p_full, p_empty, s, m_i, lead, l_i, tile, place, keys, widths: Widths, rules,
    AT_EDGE: gl.constexpr,
):  # fmt: skip
    """Sends the probabilities of the tile with scores x to the warpgroups of values as message s. Returns the scores of
    the next tile, whose chunks start at n, multiplied during the softmax (AHEAD) or after it."""
    EARLY: gl.constexpr = widths.K_CHUNKS // 2  # chunks that are handed back half-way
    if widths.AHEAD:
        following = zero_accumulator(KEYS)
        for i in gl.static_range(widths.K_CHUNKS):
            following = add_chunk(q_tiles, ring, n, following, i, widths)
    x, scale = in_bits(x, tile, place, keys, rules, AT_EDGE)
    shift, alpha, m_i, lead = new_maximum(x, scale, m_i, lead, AT_EDGE)
    if widths.AHEAD and EARLY > 0:
        following = warpgroup_mma_wait(widths.K_CHUNKS - EARLY, deps=[following])
        for i in gl.static_range(EARLY):
            hand_back(ring, n + i)
    p, l_i = probabilities(x, scale, shift, alpha, l_i, KEYS)
    send(p, alpha, p_tiles, factors, p_full, p_empty, s)
    if widths.AHEAD:
        # The spin loop inside `send` keeps ptxas from hoisting this wait above the exponentials.
        following = warpgroup_mma_wait(0, deps=[following])
        for i in gl.static_range(EARLY, widths.K_CHUNKS):
            hand_back(ring, n + i)
    else:
        following = product_with_keys(q_tiles, ring, n, widths)
    return following, m_i, lead, l_i


@jit
def send(p, alpha, p_tiles, factors, p_full, p_empty, s):
    """Sends message s to the warpgroups of values."""
    mbarrier.wait(p_empty.index(s & 1), ((s >> 1) & 1) ^ 1)
    p_tiles.index(s & 1).store(p.to(p_tiles.dtype))
    factors.index(s & 1).store(alpha)
    fence_async_shared()
    mbarrier.arrive(p_full.index(s & 1), count=1)


@jit
def scores(
    queries: Queries, schedule: Schedule, q_tiles, q_full, q_empty, ring, p_tiles, factors, p_full, p_empty, box,
    widths: Widths, rules,
):  # fmt: skip
    """Computes scores and softmax of 64 queries at a time."""
    row_layout: gl.constexpr = gl.SliceLayout(1, accumulator_layout(KEYS))
    k = 0  # chunks of K consumed so far
    s = 0  # messages sent to the warpgroups of values
    messages = 0
    scheduler.wait_posted(box, messages)
    work = scheduler.read(box, messages, schedule.seqlen_q, schedule.seqlen_k, rules.IS_VARLEN)
    while work.tile != scheduler.NO_MORE:
        keys = keys_of_sequence(work, rules)
        begin, end = tiles_of_block(keys, work, rules)
        row_first = work.tile * ROWS
        whole_begin, whole_end = whole_tiles(keys, row_first, begin, end, rules)
        place = Place(row_first, work.seqlen_k - work.seqlen_q, gl.to_tensor(0.0))
        if rules.HAS_ALIBI:
            slopes_ptr = queries.alibi_slopes_ptr + work.batch * queries.stride_alibi_b
            slope = gl.load(slopes_ptr + work.head // widths.V_PARTS)
            place = Place(place.row_first, place.offset, slope * LOG2_E)
        mbarrier.wait(q_full.index(0), messages & 1)
        m_i = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
        lead = gl.zeros_like(m_i)
        l_i = partial_sums(zero_accumulator(KEYS), KEYS)
        x = product_with_keys(q_tiles, ring, k, widths)
        k += widths.K_CHUNKS
        tile = end - 1
        while tile >= gl.maximum(whole_end, begin + 1):
            x, m_i, lead, l_i = step(
                q_tiles, ring, k, x, p_tiles, factors, p_full, p_empty, s, m_i, lead, l_i, tile, place, keys, widths,
                rules, True,
            )  # fmt: skip
            k += widths.K_CHUNKS
            s += 1
            tile -= 1
        while tile >= gl.maximum(whole_begin, begin + 1):
            x, m_i, lead, l_i = step(
                q_tiles, ring, k, x, p_tiles, factors, p_full, p_empty, s, m_i, lead, l_i, tile, place, keys, widths,
                rules, False,
            )  # fmt: skip
            k += widths.K_CHUNKS
            s += 1
            tile -= 1
        if rules.HAS_LOW:
            while tile > begin:
                x, m_i, lead, l_i = step(
                    q_tiles, ring, k, x, p_tiles, factors, p_full, p_empty, s, m_i, lead, l_i, tile, place, keys,
                    widths, rules, True,
                )  # fmt: skip
                k += widths.K_CHUNKS
                s += 1
                tile -= 1
        mbarrier.arrive(q_empty.index(0), count=1)  # the next queries load during the remaining work
        x, _ = in_bits(x, tile, place, keys, rules, True)
        shift, alpha, m_i, lead = new_maximum(x, 1.0, m_i, lead, True)
        p, l_i = probabilities(x, 1.0, shift, alpha, l_i, KEYS)
        send(p, alpha, p_tiles, factors, p_full, p_empty, s)
        s += 1

        work = scheduler.read(box, messages, schedule.seqlen_q, schedule.seqlen_k, rules.IS_VARLEN)
        head = work.head // widths.V_PARTS
        l_row = gl.convert_layout(gl.sum(l_i, axis=1), row_layout)
        l_out = l_row + rounding_of_the_largest(lead, p_tiles.dtype)
        factor = gl.full([ROWS], 1.0, gl.float32, row_layout)
        if rules.HAS_SINKS:
            m_i, l_row, l_out, factor = with_sink(m_i, l_row, l_out, gl.load(queries.sinks_ptr + head) * LOG2_E)
        # A row that saw no key has sum 0, or saw only its sink: a factor of 0 sets its output to 0, whatever was
        # accumulated for it.
        factor = gl.where(l_row == 0.0, 0.0, factor / gl.where(l_row == 0.0, 1.0, l_out))
        mbarrier.wait(p_empty.index(s & 1), ((s >> 1) & 1) ^ 1)
        factors.index(s & 1).store(factor)
        mbarrier.arrive(p_full.index(s & 1), count=1)
        s += 1
        if rules.WRITE_LSE:
            rows = work.tile * ROWS + gl.arange(0, ROWS, row_layout)
            lse = natural_lse(m_i, l_row)
            first = head.to(gl.int64) * queries.stride_lh + work.q_begin
            if not rules.IS_VARLEN:
                first += work.batch.to(gl.int64) * queries.stride_lb
            # Every part of the columns of V computes the same lse.
            is_first = work.head % widths.V_PARTS == 0
            gl.store(queries.lse_ptr + first + rows, lse, mask=(rows < work.seqlen_q) & is_first)
        scheduler.discard(box, messages)
        messages += 1
        scheduler.wait_posted(box, messages)
        work = scheduler.read(box, messages, schedule.seqlen_q, schedule.seqlen_k, rules.IS_VARLEN)


# Values ---------------------------------------------------------------------------------------------------------------


@jit
def zero_behind(v, rows_used):
    """Zeroes the rows of a chunk past its packed sequence: a probability of 0 times another sequence's NaN is NaN."""
    if rows_used < KEYS:
        zero_tail(v, rows_used)
        fence_async_shared()
        block_barrier()


@jit
def product_with_values(p, ring, n, acc, rows_used, GROUP: gl.constexpr, CHUNKS: gl.constexpr, rules):
    """Returns acc + P V of one tile of keys, whose chunks start at n; there is one accumulator per piece."""
    under_way = ()
    for i in gl.static_range(len(acc)):
        wait_full(ring, n + i)
        v = chunk(ring, n + i)
        if rules.IS_VARLEN:
            zero_behind(v, rows_used)
        if width_of(CHUNKS, GROUP, i) < CHUNK:
            v = v.slice(first_of(CHUNKS, GROUP, i), width_of(CHUNKS, GROUP, i), dim=1)
        under_way = under_way + (warpgroup_mma(p, v, acc[i], is_async=True),)
    done = ()
    for i in gl.static_range(len(acc)):
        done = done + (warpgroup_mma_wait(len(acc) - 1 - i, deps=[under_way[i]]),)
        hand_back(ring, n + i)
    return done


@jit
def rescaled(acc, alpha):
    """Returns every accumulator times alpha, [64]."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        scaled = scaled + (rescale(acc[i], like(alpha, acc[i])),)
    return scaled


@jit
def values(
    GROUP: gl.constexpr, ring, out_ptr, schedule: Schedule, num_heads, head_dim_v, p_tiles, factors, p_full, p_empty,
    box, widths: Widths, rules,
):  # fmt: skip
    """Computes half of the columns of the output, for 64 queries at a time."""
    COUNT: gl.constexpr = count_of(widths.V_CHUNKS, GROUP)
    row_layout: gl.constexpr = gl.SliceLayout(1, accumulator_layout(width_of(widths.V_CHUNKS, GROUP, 0)))
    v = 0  # chunks of its ring consumed so far
    s = 0
    messages = 0
    scheduler.wait_posted(box, messages)
    work = scheduler.read(box, messages, schedule.seqlen_q, schedule.seqlen_k, rules.IS_VARLEN)
    while work.tile != scheduler.NO_MORE:
        keys = keys_of_sequence(work, rules)
        begin, end = tiles_of_block(keys, work, rules)
        acc = ()
        for i in gl.static_range(COUNT):
            acc = acc + (zero_accumulator(width_of(widths.V_CHUNKS, GROUP, i)),)
        rows_used = keys.end - keys.begin - (end - 1) * KEYS
        for _ in range(end - begin):
            mbarrier.wait(p_full.index(s & 1), (s >> 1) & 1)
            acc = rescaled(acc, factors.index(s & 1).load(row_layout))
            acc = product_with_values(p_tiles.index(s & 1), ring, v, acc, rows_used, GROUP, widths.V_CHUNKS, rules)
            mbarrier.arrive(p_empty.index(s & 1), count=1)
            v += COUNT
            rows_used += KEYS
            s += 1

        mbarrier.wait(p_full.index(s & 1), (s >> 1) & 1)
        factor = factors.index(s & 1).load(row_layout)
        mbarrier.arrive(p_empty.index(s & 1), count=1)
        s += 1
        work = scheduler.read(box, messages, schedule.seqlen_q, schedule.seqlen_k, rules.IS_VARLEN)
        scheduler.discard(box, messages)
        column = work.head % widths.V_PARTS * (widths.V_CHUNKS * CHUNK)
        for i in gl.static_range(COUNT):
            scale = like(factor, acc[i])
            out = gl.where(scale == 0.0, 0.0, acc[i] * scale)
            store_columns(
                out, out_ptr, work, schedule.seqlen_q, num_heads, work.head // widths.V_PARTS, head_dim_v,
                column + chunk_of(widths.V_CHUNKS, GROUP, i) * CHUNK + first_of(widths.V_CHUNKS, GROUP, i), rules,
            )  # fmt: skip
        messages += 1
        scheduler.wait_posted(box, messages)
        work = scheduler.read(box, messages, schedule.seqlen_q, schedule.seqlen_k, rules.IS_VARLEN)


@jit
def store_columns(x, out_ptr, work, seqlen_q, num_heads, head, head_dim_v, column, rules):
    """Stores [64, width] to the tile's rows of a contiguous out, from `column` on. It stores from registers: out is
    read or written once per seqlen_k * 2 values of K and V, so its path does not matter, and K and V take the shared
    memory."""
    layout: gl.constexpr = x.type.layout
    rows = work.tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    if rules.IS_VARLEN:
        first = work.q_begin.to(gl.int64)
    else:
        first = work.batch.to(gl.int64) * seqlen_q
    offsets = ((first + rows) * num_heads + head) * head_dim_v
    inside = (rows < work.seqlen_q)[:, None] & (columns < head_dim_v)[None, :]
    gl.store(out_ptr + offsets[:, None] + columns[None, :], x.to(out_ptr.dtype.element_ty), mask=inside)
