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
from warpwave.kernels.hopper.parts import LOG2_E, accumulator_layout, barriers, matrix, wait_full
from warpwave.kernels.hopper.softmax import natural_lse, softmax_of_columns, state_with_sink
from warpwave.kernels.large_head_dim.latent_keys import (
    BOX,
    KEYS,
    meet_neighbors,
    producer,
    share_of,
    zero_unseen,
)
from warpwave.runtime.gluon_or_stub import (
    block_barrier,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

HEADS = gl.constexpr(16)  # query heads of a program, padding included


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
    out_ptr, lse_ptr, partials: Partials, sinks_ptr, num_heads, rows_heads, scale, k_map, q_tiles, q_full, ring, p_tile,
    share, split, BOXES: gl.constexpr, V_BOXES: gl.constexpr, HEAD_DIM_V: gl.constexpr, SPLIT: gl.constexpr,
    HAS_SINKS: gl.constexpr, WRITE_LSE: gl.constexpr,
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
            zero_unseen(ring, n, share.begin - key, share.end - key, k_map, 1, V_BOXES)
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
        of_part = split.to(gl.int64) * rows_heads
        gl.store(partials.state_ptr + (2 * of_part + of_row), m_i, mask=inside)
        gl.store(partials.state_ptr + (2 * of_part + rows_heads + of_row), l_row, mask=inside)
        to = partials.acc_ptr + (of_part + of_row) * HEAD_DIM_V
        factor = gl.full([HEADS], 1.0, gl.float32, by_head)
        inside = inside & (l_row != 0.0)  # the merge does not read the others
    else:
        factor = gl.full([HEADS], 1.0, gl.float32, by_head)
        if HAS_SINKS:
            sink = gl.load(sinks_ptr + heads, mask=inside, other=0.0) * LOG2_E
            factor, m_i, l_row = state_with_sink(sink, m_i, l_row)
        factor = factor / gl.where(l_row == 0.0, 1.0, l_row)
        if WRITE_LSE:
            gl.store(lse_ptr + of_row, natural_lse(m_i, l_row), mask=inside)
        to = out_ptr + of_row * HEAD_DIM_V
    for i in gl.static_range(V_BOXES):
        there = inside[None, :] & (i * BOX + columns < HEAD_DIM_V)[:, None]
        x = acc[i] * factor[None, :]
        gl.store(to[None, :] + (i * BOX + columns)[:, None], x.to(to.dtype.element_ty), mask=there)


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
    box_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    boxes = gl.allocate_shared_memory(k_map.dtype, [STAGES, KEYS, BOX], box_layout)
    p_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    p_tile = gl.allocate_shared_memory(k_map.dtype, [KEYS, HEADS], p_layout)
    q_full = barriers(1, 1)
    ring = Chunks(boxes, barriers(STAGES, 1), barriers(STAGES, 1), STAGES)
    fence_async_shared()
    meet_neighbors(128)
    split = gl.program_id(0) % partials.num_splits
    batch = gl.program_id(0) // partials.num_splits
    share = share_of(pages, window, 1, seqlen_k, batch, split, partials.num_splits, batch * 0, batch * 0)
    gl.warp_specialize(
        [
            (
                consumer,
                (
                    out_ptr, lse_ptr, partials, sinks_ptr, num_heads, rows_heads, scale, k_map, q_tiles, q_full, ring,
                    p_tile, share, split, BOXES, V_BOXES, HEAD_DIM_V, SPLIT, HAS_SINKS, WRITE_LSE,
                ),
            ),
            (producer, (q_map, k_map, q_tiles, q_full, ring, ring, pages, share, batch, 0, BOXES, 0)),
        ],
        [1],
        [40],
    )  # fmt: skip
