"""Tiles of 64 rows on a latent cache, on Hopper: many heads, or several queries a sequence.

    S = Q K^T;   P = 2^(S - m);   out = alpha * out + P K[:, :head_dim_v]

A row is one query of one head, and all of them read one latent. The accumulator of 64 rows and 512 columns takes half
of an SM's registers, so two warpgroups have half of the columns each, and a third one computes scores and softmax. A
fourth role is a warp that loads latents by TMA, as many tiles of 64 keys ahead as shared memory holds: two at 576/512.
Both products read a tile where TMA wrote it. It comes in pieces of some columns of v, and one of the columns beside v,
which only scores read. A program owns 64 rows and one split of a sequence's keys; tiles of one sequence are neighbors,
so that they share reads of L2.

    barrier      meaning                             arrivals                     waits
    q_full       q has arrived                       TMA, by its bytes            scores
    ring.full    a piece has arrived                 TMA, by its bytes            scores, and its warpgroup of values
    ring.empty   a piece was read                    2: both of them              producer
    rest.full    the columns beside v have arrived   TMA, by its bytes            scores
    rest.empty   they were read                      scores                       producer
    p_full       a message was written               scores                       both of values
    p_empty      a message was read                  2: both of values            scores

A message is the probabilities of a tile of keys with the factor of the previous sums, or, at last, the factor that
normalizes them. A stage of the ring always holds the same columns, so each of its uses has the same readers. No
reader can therefore wait for a use while the previous one is missing; the parity of a barrier would not show this.

At an edge, the warpgroups of values zero the keys that no row sees. The warpgroup of scores may read these keys at the
same time, because it masks their scores.

Latent caches are DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1; splits of keys Dao et al., "Flash-Decoding" (2023).

Bound: memory up to 64 rows, `2 * head_dim` bytes per key; above, tensor cores and shared memory. At 576/512 a tile of
keys takes 2,176 cycles of the tensor cores, and 2,400 to 2,800 of shared memory.
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from typing import NamedTuple

from warpwave.kernels.groups import Pages, Partials, Window
from warpwave.kernels.hopper import scheduler
from warpwave.kernels.hopper.large_head_dim.roles import Chunks, hand_back, rescaled
from warpwave.kernels.hopper.parts import (
    LOG2_E,
    ROWS,
    accumulator_layout,
    barriers,
    like,
    matrix,
    wait_full,
)
from warpwave.kernels.hopper.softmax import natural_lse, partial_sums, softmax_of_rows, state_with_sink
from warpwave.kernels.large_head_dim.latent_keys import (
    BOX,
    KEYS,
    keys_seen,
    meet_neighbors,
    producer,
    share_of,
    zero_unseen,
)
from warpwave.runtime.gluon_or_stub import (
    aggregate,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from warpwave.runtime.parameters import Pointer

# Registers a thread. The warpgroup of scores has the others: 512 - 2 * 168 - 32 of 512.
VALUES_REGISTERS = gl.constexpr(168)
PRODUCER_REGISTERS = gl.constexpr(32)


class Sequences(NamedTuple):
    """The queries of a call: `seqlen_q` a sequence, or those between `cu_seqlens_q` if IS_VARLEN."""

    cu_seqlens_q_ptr: Pointer
    seqlen_q: int
    total_q: int
    batch: int
    IS_VARLEN: gl.constexpr


@aggregate
class Tile:
    """The rows of a program.

    Args:
        batch, split: the sequence, and the split of its keys.
        q_begin: the first query of the sequence among those of all.
        seqlen_q: queries of the sequence.
        row_first: the first row within the sequence, whose rows are query * num_heads + head.
    """

    batch: gl.tensor
    split: gl.tensor
    q_begin: gl.tensor
    seqlen_q: gl.tensor
    row_first: gl.tensor


@jit
def tile_of(sequences: Sequences, num_heads, num_splits):
    """Returns this program's tile; of packed sequences it may have no rows, as `scheduler.packed_tile` divides them.
    Tiles of rows are the fastest axis: they read the same keys at about the same time."""
    pid = gl.program_id(0)
    if sequences.IS_VARLEN:
        slots = sequences.total_q * num_heads // ROWS + sequences.batch
        split = pid // slots
        slot = pid % slots
        batch = scheduler.owner_of(sequences, sequences.cu_seqlens_q_ptr, slot, ROWS, 1, num_heads, 4)
        q_begin, seqlen_q = scheduler.queries_of(sequences, sequences.cu_seqlens_q_ptr, batch)
        # Offsets that do not ascend give a sequence slots before its own: they have no rows.
        row_first = (slot - (q_begin * num_heads // ROWS + batch)) * ROWS
        seqlen_q = gl.where(row_first < 0, 0, seqlen_q)
        row_first = gl.maximum(row_first, 0)
    else:
        seqlen_q = sequences.seqlen_q
        tiles = gl.cdiv(seqlen_q * num_heads, ROWS)
        split = pid // tiles % num_splits
        batch = pid // tiles // num_splits
        q_begin = batch * seqlen_q
        row_first = pid % tiles * ROWS
    return Tile(batch, split, q_begin, seqlen_q, row_first)


@jit
def scores_of(q_tiles, ring, rest, n, step, PIECES: gl.constexpr):
    """Returns Q K^T of one step, [64 rows, 64 keys], whose pieces start at n, as two sums. Tensor cores truncate what
    they add toward 0; for a sum half as long and half as large they truncate a quarter as much."""
    BOXES: gl.constexpr = ring.chunks.shape[2] // BOX  # of a piece
    x = gl.zeros([ROWS, KEYS], gl.float32, accumulator_layout(KEYS))
    others = gl.zeros([ROWS, KEYS], gl.float32, accumulator_layout(KEYS))
    for i in gl.static_range(PIECES):
        wait_full(ring, n + i)
        piece = ring.chunks.index((n + i) % ring.stages)
        for j in gl.static_range(BOXES):
            q = matrix(q_tiles.index(i * BOXES + j))
            k = piece.slice(j * BOX, BOX, dim=1).permute((1, 0))
            if 2 * i < PIECES:
                x = warpgroup_mma(q, k, x, use_acc=i + j > 0, is_async=True)
            else:
                others = warpgroup_mma(q, k, others, use_acc=2 * i > PIECES or j > 0, is_async=True)
    wait_full(rest, step)
    k = rest.chunks.index(step % rest.stages).permute((1, 0))
    others = warpgroup_mma(matrix(q_tiles.index(PIECES * BOXES)), k, others, is_async=True)
    x, others = warpgroup_mma_wait(0, deps=[x, others])
    return x + others


@jit
def queries_of_tile(tile, num_heads):
    """Returns the first and the last query of a tile; the last is before the first if the tile has no rows."""
    return tile.row_first // num_heads, gl.minimum((tile.row_first + ROWS - 1) // num_heads, tile.seqlen_q - 1)


@jit
def scores(
    lse_ptr, partials: Partials, sinks_ptr, sequences: Sequences, num_heads, rows_heads, window: Window, scale, q_tiles,
    q_full, ring, rest, p_tile, factors, p_full, p_empty, tile, share, PIECES: gl.constexpr, SPLIT: gl.constexpr,
    HAS_SINKS: gl.constexpr, WRITE_LSE: gl.constexpr,
):  # fmt: skip
    """Computes scores and softmax, and stores the log-sum-exp or the state of a split."""
    layout: gl.constexpr = accumulator_layout(KEYS)
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    rows = tile.row_first + gl.arange(0, ROWS, by_row)
    inside = rows < tile.seqlen_q * num_heads
    query = gl.minimum(rows // num_heads, tile.seqlen_q - 1)
    first_query, last_query = queries_of_tile(tile, num_heads)
    begin, end = keys_seen(query, query, tile.seqlen_q, share.length, window)
    last_begin, _ = keys_seen(last_query, last_query, tile.seqlen_q, share.length, window)
    _, first_end = keys_seen(first_query, first_query, tile.seqlen_q, share.length, window)
    m_i = gl.full([ROWS], float("-inf"), gl.float32, by_row)
    l_i = partial_sums(gl.zeros([ROWS, KEYS], gl.float32, layout), KEYS)
    if share.first < share.last:
        mbarrier.wait(q_full.index(0), 0)
    step = 0
    for key in range(share.first, share.last, KEYS):
        x = scores_of(q_tiles, ring, rest, step * PIECES, step, PIECES)
        for i in gl.static_range(PIECES):
            hand_back(ring, step * PIECES + i)
        hand_back(rest, step)
        x = x * scale
        if (key < last_begin) | (key + KEYS > first_end):
            keys = key + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
            visible = (keys[None, :] >= begin[:, None]) & (keys[None, :] < end[:, None])
            x = gl.where(visible, x, float("-inf"))
        p, alpha, m_i, l_i = softmax_of_rows(x, m_i, l_i)
        mbarrier.wait(p_empty.index(0), (step & 1) ^ 1)
        p_tile.store(p.to(p_tile.dtype))
        factors.store(alpha)
        fence_async_shared()
        mbarrier.arrive(p_full.index(0), count=1)
        step += 1

    l_row = gl.convert_layout(gl.sum(l_i, axis=1), by_row)
    factor = gl.full([ROWS], 1.0, gl.float32, by_row)
    if SPLIT:
        of_part = tile.split.to(gl.int64) * rows_heads
        of_row = tile.q_begin.to(gl.int64) * num_heads + rows
        gl.store(partials.state_ptr + (2 * of_part + of_row), m_i, mask=inside)
        gl.store(partials.state_ptr + (2 * of_part + rows_heads + of_row), l_row, mask=inside)
    else:
        head = rows % num_heads
        if HAS_SINKS:
            sink = gl.load(sinks_ptr + head, mask=inside, other=0.0) * LOG2_E
            factor, m_i, l_row = state_with_sink(sink, m_i, l_row)
        factor = factor / gl.where(l_row == 0.0, 1.0, l_row)
        if WRITE_LSE:
            if sequences.IS_VARLEN:
                at = head.to(gl.int64) * sequences.total_q + tile.q_begin
            else:
                at = (tile.batch * num_heads + head).to(gl.int64) * tile.seqlen_q
            gl.store(lse_ptr + at + query, natural_lse(m_i, l_row), mask=inside)
    mbarrier.wait(p_empty.index(0), (step & 1) ^ 1)
    factors.store(factor)
    mbarrier.arrive(p_full.index(0), count=1)


@jit
def add_values(p_tile, ring, n, acc):
    """Returns acc + P V of one step, one accumulator for each piece n, n + 2, ..., which is handed back."""
    under_way = ()
    for i in gl.static_range(len(acc)):
        wait_full(ring, n + 2 * i)
        v = ring.chunks.index((n + 2 * i) % ring.stages)
        under_way = under_way + (warpgroup_mma(p_tile, v, acc[i], is_async=True),)
    done = ()
    for i in gl.static_range(len(acc)):
        done = done + (warpgroup_mma_wait(len(acc) - 1 - i, deps=[under_way[i]]),)
        hand_back(ring, n + 2 * i)
    return done


@jit
def values(
    GROUP: gl.constexpr, out_ptr, partials: Partials, k_map, num_heads, rows_heads, ring, p_tile, factors, p_full,
    p_empty, tile, share, PIECES: gl.constexpr, HEAD_DIM_V: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Computes half of the columns of the output: every second piece."""
    WIDTH: gl.constexpr = ring.chunks.shape[2]
    layout: gl.constexpr = accumulator_layout(WIDTH)
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    acc = ()
    for _ in gl.static_range(PIECES // 2):
        acc = acc + (gl.zeros([ROWS, WIDTH], gl.float32, layout),)
    step = 0
    for key in range(share.first, share.last, KEYS):
        n = step * PIECES + GROUP
        if (key < share.begin) | (key + KEYS > share.end):
            zero_unseen(ring, n, share.begin - key, share.end - key, k_map, 2, PIECES // 2)
        mbarrier.wait(p_full.index(0), step & 1)
        acc = rescaled(acc, factors.load(by_row))
        acc = add_values(p_tile, ring, n, acc)
        mbarrier.arrive(p_empty.index(0), count=1)
        step += 1

    mbarrier.wait(p_full.index(0), step & 1)
    factor = factors.load(by_row)
    rows = tile.row_first + gl.arange(0, ROWS, by_row)
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    of_row = tile.q_begin.to(gl.int64) * num_heads + rows
    if SPLIT:
        to = partials.acc_ptr + (tile.split.to(gl.int64) * rows_heads + of_row) * HEAD_DIM_V
    else:
        to = out_ptr + of_row * HEAD_DIM_V
    inside = (rows < tile.seqlen_q * num_heads)[:, None]
    for i in gl.static_range(PIECES // 2):
        x = acc[i] * like(factor, acc[i])
        column = (2 * i + GROUP) * WIDTH + columns
        gl.store(to[:, None] + column[None, :], x.to(to.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["seqlen_k", "num_heads", "rows_heads"])
def latent_rows_kernel(
    q_map,
    k_map,
    out_ptr,
    lse_ptr,
    sequences: Sequences,
    seqlen_k,
    num_heads,
    partials: Partials,
    rows_heads,
    window: Window,
    sinks_ptr,
    pages: Pages,
    scale,
    TILES: gl.constexpr,
    WIDTH: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    SPLIT: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    WRITE_LSE: gl.constexpr,
):
    """Processes one split of the keys of one sequence for 64 rows, which read one kv head.

    Maps have the axes (batch, 1, row, column) and (batch or page, 1, key, column); if sequences are packed, the rows of
    all of them are one batch item. `scale` converts raw scores to bits. Partial results have the layout of partials.py.
    TILES tiles of keys are in flight, in pieces of WIDTH columns.
    """
    PIECES: gl.constexpr = HEAD_DIM_V // WIDTH
    BOXES: gl.constexpr = HEAD_DIM_V // BOX + 1
    q_tiles = gl.allocate_shared_memory(q_map.dtype, [BOXES] + q_map.block_type.shape, q_map.layout)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    pieces = gl.allocate_shared_memory(k_map.dtype, [TILES * PIECES, KEYS, WIDTH], tile_layout)
    beside = gl.allocate_shared_memory(k_map.dtype, [TILES, KEYS, BOX], tile_layout)
    p_tile = gl.allocate_shared_memory(k_map.dtype, [ROWS, KEYS], tile_layout)
    factors = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = barriers(1, 1)
    p_full = barriers(1, 1)
    p_empty = barriers(1, 2)
    ring = Chunks(pieces, barriers(TILES * PIECES, 1), barriers(TILES * PIECES, 2), TILES * PIECES)
    rest = Chunks(beside, barriers(TILES, 1), barriers(TILES, 1), TILES)
    fence_async_shared()
    meet_neighbors(128)
    tile = tile_of(sequences, num_heads, partials.num_splits)
    first_query, last_query = queries_of_tile(tile, num_heads)
    share = share_of(
        pages, window, tile.seqlen_q, seqlen_k, tile.batch, tile.split, partials.num_splits, first_query, last_query
    )
    q_batch, q_row = tile.batch, tile.row_first
    if sequences.IS_VARLEN:
        q_batch = tile.batch * 0
        q_row = tile.q_begin * num_heads + tile.row_first
    gl.warp_specialize(
        [
            (scores, (
                lse_ptr, partials, sinks_ptr, sequences, num_heads, rows_heads, window, scale, q_tiles, q_full, ring,
                rest, p_tile, factors, p_full, p_empty, tile, share, PIECES, SPLIT, HAS_SINKS, WRITE_LSE,
            )),
            (values, (
                0, out_ptr, partials, k_map, num_heads, rows_heads, ring, p_tile, factors, p_full, p_empty, tile, share,
                PIECES, HEAD_DIM_V, SPLIT,
            )),
            (values, (
                1, out_ptr, partials, k_map, num_heads, rows_heads, ring, p_tile, factors, p_full, p_empty, tile, share,
                PIECES, HEAD_DIM_V, SPLIT,
            )),
            (producer, (q_map, k_map, q_tiles, q_full, ring, rest, pages, share, q_batch, q_row, PIECES, 1)),
        ],
        [4, 4, 1],
        [VALUES_REGISTERS, VALUES_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
