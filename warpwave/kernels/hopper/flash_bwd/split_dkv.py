"""The launch of dK and dV in float32, for head_dim and head_dim_v up to 128: four products a tile, each of three
products of float16 parts (split_steps.py).

The roles are those of dkv.py: a block owns 64 keys of one kv head and walks the queries of its heads, 64 a step. One
consumer warpgroup computes probabilities and dV, the other dS and dK:

    group 0: S^T = K Q^T,    P^T = exp(S^T - lse),       dV += P^T dO
    group 1: dP^T = V dO^T,  dS^T = P^T (dP^T - delta),  dK += dS^T Q

P passes through shared memory in float32. A group's products do not overlap its own softmax: three products take so
long that the other group's products hide it.

Bound: tensor cores (docs/notes/float32.md).
"""

# No postponed annotations here: an aggregate's fields are checked against its annotations.

from warpwave.kernels.hopper import scheduler
from warpwave.kernels.hopper.dropout import has_dropout, key_of, of_call, of_head
from warpwave.kernels.hopper.flash_bwd.band import (
    Options,
    Rules,
    band_of,
    first_statistic,
    is_cut,
    query_span,
    visible,
    work_on_keys,
)
from warpwave.kernels.hopper.flash_bwd.split_rows import OF_DK, OF_SCORES, OF_VALUES, PARTS, ROWS
from warpwave.kernels.hopper.flash_bwd.split_steps import (
    LIFT,
    add_products,
    load_parts,
    parts_of,
    scaled_rows,
    scores_of_parts,
    store_slices,
    units_of,
)
from warpwave.kernels.hopper.flash_bwd.steps import (
    Stream,
    gradient,
    heads_of,
    heads_of_call,
    kept,
    listed,
    load_rows,
    mask_lines,
    mask_words,
    place_of_step,
    probabilities,
    row_of,
    signed,
    slope_of,
    statistics_of,
    step_of,
    stream_of,
    walk_of,
)
from warpwave.kernels.hopper.groups import Dropout, KeyGradients, KeySchedule, Mask
from warpwave.kernels.hopper.parts import (
    accumulator_layout,
    arrive_alone,
    barriers,
    buffers,
    hand_back_multiplied,
    matrix,
    present,
    tile_bytes,
    wait_full,
)
from warpwave.kernels.hopper.split_float32 import zero_slices
from warpwave.runtime.gluon_or_stub import aggregate, fence_async_shared, gl, jit, mbarrier, with_fields

GROUPS = gl.constexpr(2)


@aggregate
class Tiles:
    """Shared memory of a block, and its barriers.

    Args:
        keys, values: pieces of the parts of K and V, [PARTS, 1, 1, 64, width]. `full` signals that they arrived,
            `empty` that they may be replaced.
        queries, dout: rings of the parts of Q with the log-sum-exp, and of those of dO with delta.
        p: probabilities of two tiles, [2, 1, 1, 64, 64] float32, with their barriers.
        box: the producer's messages.
    """

    keys: gl.tuple
    values: gl.tuple
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    queries: Stream
    dout: Stream
    p: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    p_empty: gl.shared_memory_descriptor
    box: scheduler.Mailbox


@aggregate
class Given:
    """The destination of dK and dV, and the units of tiles of queries (split_rows.py)."""

    gradients: KeyGradients
    units_ptr: gl.tensor


# The producer ---------------------------------------------------------------------------------------------------------


@jit
def producer(maps, mask: Mask, tiles, offsets: KeyGradients, schedule: KeySchedule, counter_ptr, heads, rules):
    """Draws blocks of keys, and loads K and V of each and the queries that see them, head after head, or in the order
    of the list of a mask."""
    q_maps, k_maps, v_maps, dout_maps, lse_map, delta_map = maps
    n = 0
    messages = 0
    t = gl.to_tensor(-1)
    while t < schedule.num_tiles:
        # One draw for the first tile and all others: of one before the loop, ptxas 12.8 leaves the warp diverged.
        t = scheduler.draw_in_order(counter_ptr, schedule.num_tiles)
        work = work_on_keys(schedule, offsets, t, rules)
        band = band_of(work, rules)
        key_first = band.k_begin + work.tile * ROWS
        span = query_span(band, key_first, rules)
        count = span.end - span.begin
        if (t < schedule.num_tiles) & (work.tile >= 0) & (key_first < band.k_end) & (count > 0):
            scheduler.post(tiles.box, messages, work, rules.IS_VARLEN)
            batch = work.batch
            key = work.tile * ROWS
            if rules.IS_VARLEN:
                batch = 0
                key += (work.k_begin // ROWS + work.batch) * ROWS
            statistic = first_statistic(work, ROWS, rules)
            first_head, members = heads_of(work, heads)
            steps = count * members
            walk = walk_of(mask, work, key_first // ROWS, rules)
            if rules.HAS_MASK:
                steps = gl.load(walk)
            for i in range(steps):
                if rules.HAS_MASK:
                    # A list without a visible pair has tile 0, which may lie before the parts: those rows are zeros.
                    head, row = step_of(listed(walk, i), work, heads, rules)
                    row -= band.q_begin
                else:
                    head, tile = place_of_step(i, first_head, members, span, False, rules)
                    row = statistic + tile * ROWS
                line = [batch * heads.num_heads + head, row]
                load_rows(tiles.queries, q_maps, lse_map, n, batch, head, row, line)
                if i == 0:
                    full = tiles.full.index(0)
                    mbarrier.wait(tiles.empty.index(0), (messages & 1) ^ 1)
                    mbarrier.expect(full, (tile_bytes(k_maps) + tile_bytes(v_maps)) * PARTS)
                    kv_head = work.head // schedule.splits
                    load_parts(k_maps, tiles.keys, full, 0, batch, kv_head, key)
                    load_parts(v_maps, tiles.values, full, 0, batch, kv_head, key)
                load_rows(tiles.dout, dout_maps, delta_map, n, batch, head, row, line)
                n += 1
            messages += 1
    scheduler.post_end(tiles.box, messages, rules.IS_VARLEN)


# The consumers --------------------------------------------------------------------------------------------------------


@jit
def units_at(given, work, head, row_first, band, heads, rules):
    """Returns the address of the units of the tile that begins at a query."""
    batch = work.batch
    if rules.IS_VARLEN:
        batch = 0
    row = first_statistic(work, ROWS, rules) + gl.maximum(row_first - band.q_begin, 0)
    return units_of(given.units_ptr, batch, head, row, heads.num_heads, heads.rows)


@jit
def first_step(mask: Mask, work, span, band, key_first, heads, rules):
    """Returns the number of a block's steps, the address of their list, and the query head and the first query of the
    first."""
    head, members = heads_of(work, heads)
    walk = walk_of(mask, work, key_first // ROWS, rules)
    row_first = row_of(span, gl.to_tensor(0), band, rules)
    steps = (span.end - span.begin) * members
    if rules.HAS_MASK:
        steps = gl.load(walk)
        head, row_first = step_of(listed(walk, 0), work, heads, rules)
    return steps, walk, head, row_first


@jit
def following_step(i, steps, walk, head, place, span, band, work, heads, rules):
    """Returns the query head, the place in the span, unused with a mask, and the first query of the step after the
    i-th."""
    if rules.HAS_MASK:
        head, row_first = step_of(listed(walk, i + 1, i + 1 < steps), work, heads, rules)
    else:
        ends_head = place + 1 == span.end - span.begin
        head = gl.where(ends_head, head + 1, head)
        place = gl.where(ends_head, 0, place + 1)
        row_first = row_of(span, place, band, rules)
    return head, place, row_first


@jit
def sum_values(tiles, work, n, given, mask: Mask, heads, rules):
    """Returns, in group 0, dV of a block, and the number of the next tile of queries."""
    across: gl.constexpr = gl.SliceLayout(0, accumulator_layout(ROWS))
    band = band_of(work, rules)
    key_first = band.k_begin + work.tile * ROWS
    span = query_span(band, key_first, rules)
    dv = zero_slices(tiles.dout.ring)
    dropout_key = key_of(rules.dropout)
    none = gl.to_tensor(0)
    place = gl.to_tensor(0)
    steps, walk, head, row_first = first_step(mask, work, span, band, key_first, heads, rules)
    lines = mask_lines(mask, work, key_first, work.seqlen_k, ROWS, rules)
    for i in range(steps):
        words = mask_words(mask, lines, head, row_first, ROWS, rules)
        units = units_at(given, work, head, row_first, band, heads, rules)
        of_tile = with_fields(rules, scale=rules.scale * gl.load(units + OF_SCORES))
        factor = gl.load(units + OF_VALUES)
        slope = slope_of(given.alibi_slopes_ptr, given.stride_alibi_b, work, head, rules)
        wait_full(tiles.queries.ring, n)
        x = scores_of_parts(tiles.keys, 0, tiles.queries.ring, n)
        lse = statistics_of(tiles.queries, n, 0, ROWS, across)
        p, _ = probabilities(x, lse[None, :], band, row_first, key_first, slope, words, none, True, False, of_tile)
        if not rules.HAS_MASK:  # the words also hide what position hides  # noqa: SIM102
            if is_cut(span, place, rules):
                p = gl.where(visible(p, band, row_first, key_first, True, rules), p, 0.0)
        of_this_head = of_head(rules.dropout, dropout_key, work.batch, head)
        p = signed(p, row_first, key_first, True, with_fields(rules, dropout=of_this_head))
        mbarrier.wait(tiles.p_empty.index(n % 2), ((n // 2) & 1) ^ 1)
        matrix(tiles.p.index(n % 2)).store(p)
        mbarrier.arrive(tiles.p_full.index(n % 2), count=1)
        # The log-sum-exp was read before the barrier within the arrival, and S of this tile is finished.
        arrive_alone(tiles.queries.ring.empty.index(n % tiles.queries.ring.stages))
        parts = parts_of(kept(p, rules) * LIFT)
        wait_full(tiles.dout.ring, n)
        dv = add_products(parts, tiles.dout.ring, n, dv, per_row(factor))
        hand_back_multiplied(tiles.dout.ring, n)
        head, place, row_first = following_step(i, steps, walk, head, place, span, band, work, heads, rules)
        n += 1
    return dv, n


@jit
def sum_keys(tiles, work, n, given, mask: Mask, heads, rules):
    """Returns, in group 1, dK of a block before the scale, and the number of the next tile of queries."""
    layout: gl.constexpr = accumulator_layout(ROWS)
    band = band_of(work, rules)
    key_first = band.k_begin + work.tile * ROWS
    span = query_span(band, key_first, rules)
    dk = zero_slices(tiles.queries.ring)
    place = gl.to_tensor(0)
    steps, walk, head, row_first = first_step(mask, work, span, band, key_first, heads, rules)
    for i in range(steps):
        exponent = gl.load(units_at(given, work, head, row_first, band, heads, rules) + OF_DK).to(gl.int32)
        wait_full(tiles.dout.ring, n)
        y = scores_of_parts(tiles.values, 0, tiles.dout.ring, n)
        mbarrier.wait(tiles.p_full.index(n % 2), (n // 2) & 1)
        p = matrix(tiles.p.index(n % 2)).load(layout)
        delta = statistics_of(tiles.dout, n, 0, ROWS, gl.SliceLayout(0, layout))
        mbarrier.arrive(tiles.p_empty.index(n % 2), count=1)
        # Delta was read before the barrier within the arrival, and dP of this tile is finished.
        arrive_alone(tiles.dout.ring.empty.index(n % tiles.dout.ring.stages))
        ds, factor = scaled_rows(gradient(p, y, delta[None, :], rules), exponent)
        parts = parts_of(ds)
        wait_full(tiles.queries.ring, n)
        dk = add_products(parts, tiles.queries.ring, n, dk, factor)
        hand_back_multiplied(tiles.queries.ring, n)
        head, place, row_first = following_step(i, steps, walk, head, place, span, band, work, heads, rules)
        n += 1
    return dk, n


@jit
def per_row(factor):
    """Returns a factor that all rows share as one for each row."""
    return gl.full([ROWS], factor, gl.float32, gl.SliceLayout(1, accumulator_layout(ROWS)))


@jit
def consumer(
    GROUP: gl.constexpr, given, mask: Mask, tiles, seqlen_q, seqlen_k, heads, rules, HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Computes dV (group 0) or dK (group 1) of each block."""
    n = 0  # tiles of queries processed so far
    messages = 0
    scheduler.wait_posted(tiles.box, messages)
    work = scheduler.read(tiles.box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN)
    while work.tile != scheduler.NO_MORE:
        mbarrier.wait(tiles.full.index(0), messages & 1)
        if GROUP == 0:
            sums, n = sum_values(tiles, work, n, given, mask, heads, rules)
        else:
            sums, n = sum_keys(tiles, work, n, given, mask, heads, rules)
        arrive_alone(tiles.empty.index(0))  # only products have read K or V
        # Reading the message again is cheaper than keeping its words in registers through the loop.
        work = scheduler.read(tiles.box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN)
        scheduler.discard(tiles.box, messages)
        band = band_of(work, rules)
        key = band.k_begin + work.tile * ROWS
        key_end = band.k_end
        batch = work.batch
        if rules.IS_VARLEN:
            batch = gl.to_tensor(0)
            key += work.k_begin
            key_end += work.k_begin
        if GROUP == 0:
            factor = 1.0
            if has_dropout(rules.dropout):
                factor = rules.dropout.scale
            strides = (given.stride_dv_b, given.stride_dv_h, given.stride_dv_n)
            store_slices(
                sums, tiles.dout.ring, factor, given.dv_ptr, strides, batch, work.head, key, key_end, HEAD_DIM_V
            )  # fmt: skip
        else:
            strides = (given.stride_dk_b, given.stride_dk_h, given.stride_dk_n)
            store_slices(
                sums, tiles.queries.ring, rules.softmax_scale, given.dk_ptr, strides, batch, work.head, key, key_end,
                HEAD_DIM,
            )  # fmt: skip
        messages += 1
        scheduler.wait_posted(tiles.box, messages)
        work = scheduler.read(tiles.box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN)


# The kernel -----------------------------------------------------------------------------------------------------------


@jit
def split_dkv_kernel(
    q_map,
    q_map_2,
    q_map_3,
    k_map,
    k_map_2,
    k_map_3,
    v_map,
    v_map_2,
    v_map_3,
    dout_map,
    dout_map_2,
    dout_map_3,
    lse_map,
    delta_map,
    gradients: KeyGradients,
    schedule: KeySchedule,
    call_options: Options,
    mask: Mask,
    dropout: Dropout,
    units_ptr,
    counter_ptr,
    STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):
    """Processes blocks of 64 keys of one kv head until the counter is exhausted.

    Tensor maps have the axes (batch, head and part, row of whole tiles, column), one for each piece of a tile's width,
    absent ones None; maps of statistics (batch * head, row). In the schedule keys take the place of queries
    (band.work_on_keys).
    """
    q_maps = present(q_map, q_map_2, q_map_3)
    k_maps = present(k_map, k_map_2, k_map_3)
    v_maps = present(v_map, v_map_2, v_map_3)
    dout_maps = present(dout_map, dout_map_2, dout_map_3)
    rules = Rules(call_options, of_call(dropout))
    heads = heads_of_call(schedule, call_options)
    tiles = Tiles(
        buffers(k_maps, PARTS),
        buffers(v_maps, PARTS),
        barriers(1, 1),
        barriers(1, GROUPS),
        stream_of(q_maps, lse_map, STAGES, GROUPS, PARTS),
        stream_of(dout_maps, delta_map, STAGES, GROUPS, PARTS),
        gl.allocate_shared_memory(gl.float32, [2, 1, 1, ROWS, ROWS], gl.NVMMASharedLayout(128, 32, 4)),
        barriers(2, 1),
        barriers(2, 1),
        scheduler.mailbox(GROUPS),
    )
    fence_async_shared()
    given = Given(gradients, units_ptr)
    seqlen_q = schedule.seqlen_k
    seqlen_k = schedule.seqlen_q
    maps = q_maps, k_maps, v_maps, dout_maps, lse_map, delta_map
    gl.warp_specialize(
        [
            (consumer, (0, given, mask, tiles, seqlen_q, seqlen_k, heads, rules, HEAD_DIM, HEAD_DIM_V)),
            (consumer, (1, given, mask, tiles, seqlen_q, seqlen_k, heads, rules, HEAD_DIM, HEAD_DIM_V)),
            (producer, (maps, mask, tiles, gradients, schedule, counter_ptr, heads, rules)),
        ],
        [4, 1],
        [240, 24],
    )
