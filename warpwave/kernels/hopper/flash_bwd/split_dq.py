"""The launch of dQ in float32, for head_dim and head_dim_v up to 128: three products a tile, each of three products of
float16 parts (split_steps.py).

As in dq.py, a block owns 128 queries of one head, 64 for each of two consumer warpgroups, and walks the keys that they
see, 64 a step:

    S = Q K^T,  dP = dO V^T;   dS = exp(S - lse) (dP - delta);   dQ += dS K

The products of a group do not overlap its own softmax, but the other group's. On request, the launch also sums dS as
parts of the gradient of ALiBi's slopes.

The log-sum-exp and delta are another kernel's, rounded differently, so a row's dS add up to a rounding error r too
much. If keys have a common offset c, far larger than their differences, r c is not small beside dQ. Therefore r is
summed, and r c is subtracted from dQ; c is the mean of a few keys (split_rows.py). The launch of dK and dV, which
follows, reads delta + r, with which the row's dS add up exactly.

Bound: tensor cores (docs/notes/float32.md).
"""

# No postponed annotations here: an aggregate's fields are checked against its annotations.

from typing import NamedTuple

from warpwave.kernels.hopper import scheduler
from warpwave.kernels.hopper.dropout import key_of, of_call, of_head
from warpwave.kernels.hopper.flash_bwd.band import Options, Rules, band_of, first_statistic, key_tiles, visible
from warpwave.kernels.hopper.flash_bwd.dq import OfQueries, is_cut, row_sums, statistic
from warpwave.kernels.hopper.flash_bwd.split_rows import OF_DQ, OF_DS, OF_SCORES, PARTS, ROWS
from warpwave.kernels.hopper.flash_bwd.split_steps import (
    add_products,
    load_parts,
    parts_of,
    power_of_two,
    scaled_rows,
    scores_of_parts,
    store_slices,
    units_of,
)
from warpwave.kernels.hopper.flash_bwd.steps import (
    gradient,
    listed,
    mask_lines,
    mask_words,
    places,
    probabilities,
    signed,
    slope_of,
    walk_of,
)
from warpwave.kernels.hopper.groups import Dropout, Mask, Schedule
from warpwave.kernels.hopper.parts import (
    Ring,
    accumulator_layout,
    arrive_alone,
    barriers,
    buffers,
    hand_back_multiplied,
    like,
    load_tile,
    present,
    ring_of,
    skip,
    tile_bytes,
    wait_full,
    zero_accumulator,
)
from warpwave.kernels.hopper.softmax import partial_sums
from warpwave.kernels.hopper.split_float32 import slice_column, zero_slices
from warpwave.runtime.gluon_or_stub import (
    aggregate,
    constexpr_function,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    with_fields,
)
from warpwave.runtime.parameters import Pointer

GROUPS = gl.constexpr(2)


@aggregate
class Tiles:
    """Shared memory of a block, and its barriers.

    Args:
        queries, dout: pieces of the parts of Q and dO, [2 * PARTS, 1, 1, 64, width], those of one group adjacent.
            `full` signals that a group's pieces arrived, `empty` that they may be replaced.
        keys, values: rings of the parts of K and V. box: the producer's messages.
    """

    queries: gl.tuple
    dout: gl.tuple
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    keys: Ring
    values: Ring
    box: scheduler.Mailbox


class OfParts(NamedTuple):
    """Units of tiles of queries, and centers of k (split_rows.py)."""

    units_ptr: Pointer
    centers_ptr: Pointer


@aggregate
class Place:
    """The data of queries and of their parts. Items have `num_heads` heads and up to `longest` queries."""

    of_queries: OfQueries
    of_parts: OfParts
    num_heads: gl.tensor
    group_size: gl.tensor
    longest: gl.tensor


# The producer ---------------------------------------------------------------------------------------------------------


@jit
def producer(maps, mask: Mask, tiles, offsets: OfQueries, schedule: Schedule, counter_ptr, rules):
    """Draws tiles of queries, and loads Q and dO of each and the keys that they see, or that the list of a mask
    has."""
    q_maps, k_maps, v_maps, dout_maps = maps
    n = 0
    messages = 0
    t = gl.program_id(0)
    while t < schedule.num_tiles:
        work = scheduler.tile_of(schedule, offsets, t, rules.BLOCK_M, rules.HAS_HIGH, rules.IS_VARLEN)
        band = band_of(work, rules)
        row_first = band.q_begin + work.tile * rules.BLOCK_M
        begin, end = key_tiles(band, row_first, row_first + rules.BLOCK_M, rules)
        if (work.tile >= 0) & (row_first < band.q_end) & (begin < end):
            scheduler.post(tiles.box, messages, work, rules.IS_VARLEN)
            batch = work.batch
            key = gl.to_tensor(0)
            if rules.IS_VARLEN:
                batch = 0
                key = (work.k_begin // ROWS + work.batch) * ROWS
            kv_head = work.head // schedule.group_size
            row = first_statistic(work, ROWS, rules) + work.tile * rules.BLOCK_M
            walk = walk_of(mask, work, row_first // rules.BLOCK_M, rules)
            key_next = key + begin * ROWS
            if rules.HAS_MASK:
                # A list without a visible pair has tile 0, which may lie before the parts: those rows are zeros.
                end = begin + gl.load(walk)
                key_next = listed(walk, 0) * ROWS - band.k_begin
            load_tile(tiles.keys, k_maps, n, batch, kv_head, key_next)
            load_queries(q_maps, dout_maps, tiles, batch, work.head, row, messages)
            for j in range(begin, end):
                load_tile(tiles.values, v_maps, n, batch, kv_head, key_next)
                if rules.HAS_MASK:
                    key_next = listed(walk, j + 1 - begin, j + 1 < end) * ROWS - band.k_begin
                else:
                    key_next = key + (j + 1) * ROWS
                if j + 1 < end:
                    load_tile(tiles.keys, k_maps, n + 1, batch, kv_head, key_next)
                n += 1
            messages += 1
        t = scheduler.draw(counter_ptr, schedule.num_tiles)
    scheduler.post_end(tiles.box, messages, rules.IS_VARLEN)


@jit
def load_queries(q_maps, dout_maps, tiles, batch, head, row, messages):
    """Loads Q and dO of both groups, each as soon as its tiles of the previous block are no longer needed. The second
    group's tile may be another sequence's, or past the last one; then its results are not stored."""
    for g in gl.static_range(GROUPS):
        full = tiles.full.index(g)
        mbarrier.wait(tiles.empty.index(g), (messages & 1) ^ 1)
        mbarrier.expect(full, (tile_bytes(q_maps) + tile_bytes(dout_maps)) * PARTS)
        load_parts(q_maps, tiles.queries, full, g, batch, head, row + g * ROWS)
        load_parts(dout_maps, tiles.dout, full, g, batch, head, row + g * ROWS)


# A consumer -----------------------------------------------------------------------------------------------------------


@jit
def sum_queries(GROUP: gl.constexpr, tiles, work, n, place, mask: Mask, rules):
    """Returns dQ before the scale of a group's queries, the factors of the keys' center to be subtracted, and the
    number of the next tile of keys."""
    layout: gl.constexpr = gl.SliceLayout(1, accumulator_layout(ROWS))
    band = band_of(work, rules)
    block_first = band.q_begin + work.tile * rules.BLOCK_M
    row_first = block_first + GROUP * ROWS
    block_begin, block_end = key_tiles(band, block_first, block_first + rules.BLOCK_M, rules)
    begin, end = key_tiles(band, row_first, row_first + ROWS, rules)
    begin = gl.minimum(gl.maximum(begin, block_begin), block_end - 1)  # at least one tile, which may be hidden
    end = gl.minimum(gl.maximum(end, begin + 1), block_end)
    walk = walk_of(mask, work, block_first // rules.BLOCK_M, rules)
    if rules.HAS_MASK:  # both groups walk the keys that the block sees
        begin = block_begin
        end = begin + gl.load(walk)
        block_end = end
    batch = work.batch
    if rules.IS_VARLEN:
        batch = 0
    line = (batch * place.num_heads + work.head).to(gl.int64) * rules.statistic_rows
    row = first_statistic(work, ROWS, rules) + (row_first - band.q_begin)
    # A group behind the last query may be behind the last tile of statistics, too.
    rows_left = band.q_end - row_first
    lse = statistic(place.lse_ptr, line + row, rows_left, float("inf"), ROWS)
    delta = statistic(place.delta_ptr, line + row, rows_left, 0.0, ROWS)
    own = gl.where(rows_left > 0, row, 0)
    units = units_of(place.units_ptr, batch, work.head, own, place.num_heads, rules.statistic_rows)
    of_tile = with_fields(rules, scale=rules.scale * gl.load(units + OF_SCORES))
    exponent = gl.load(units + OF_DQ).to(gl.int32)
    slope = slope_of(place.alibi_slopes_ptr, place.stride_alibi_b, work, work.head, rules)
    dq = zero_slices(tiles.keys)
    of_this_head = of_head(rules.dropout, key_of(rules.dropout), work.batch, work.head)
    rules_of_head = with_fields(rules, dropout=of_this_head)
    none = gl.to_tensor(0)
    total = partial_sums(zero_accumulator(ROWS), ROWS)  # of dS; of the others for the slopes
    of_slope = total
    p_distance = total
    n = skip(tiles.keys, tiles.values, n, begin - block_begin)
    lines = mask_lines(mask, work, row_first, work.seqlen_q, ROWS, rules)
    for j in range(begin, end):
        key_first = band.k_begin + j * ROWS
        if rules.HAS_MASK:
            key_first = listed(walk, j - begin) * ROWS
        words = mask_words(mask, lines, work.head, key_first, ROWS, rules)
        wait_full(tiles.keys, n)
        x = scores_of_parts(tiles.queries, GROUP, tiles.keys, n)
        p, _ = probabilities(x, lse, band, row_first, key_first, slope, words, none, False, False, of_tile)
        wait_full(tiles.values, n)
        y = scores_of_parts(tiles.dout, GROUP, tiles.values, n)
        hand_back_multiplied(tiles.values, n)
        ds = gradient(signed(p, row_first, key_first, False, rules_of_head), y, delta, rules_of_head)
        if not rules.HAS_MASK:  # the words also hide what position hides  # noqa: SIM102
            if is_cut(row_first, key_first, band, rules):
                # Applied here and not to P: dP of hidden pairs may be NaN.
                shown = visible(ds, band, row_first, key_first, False, rules)
                ds = gl.where(shown, ds, 0.0)
                if place.WRITE_DSLOPES:
                    p = gl.where(shown, p, 0.0)
        total = total + partial_sums(ds, ROWS)
        if place.WRITE_DSLOPES:
            rows, keys = places(ds, row_first, key_first, False)
            distance = gl.abs(rows + band.offset - keys).to(gl.float32)
            of_slope = of_slope + partial_sums(ds * distance, ROWS)
            p_distance = p_distance + partial_sums(p * distance, ROWS)
        ds, factor = scaled_rows(ds, exponent)
        dq = add_products(parts_of(ds), tiles.keys, n, dq, factor)
        hand_back_multiplied(tiles.keys, n)
        n += 1
    n = skip(tiles.keys, tiles.values, n, block_end - end)
    unit = power_of_two(gl.full([ROWS], 127 + gl.load(units + OF_DS).to(gl.int32), gl.int32, layout))
    lanes = gl.arange(0, ROWS, layout)
    excess = row_sums(total, ROWS) - gl.load(place.sums_ptr + (line + row + lanes), mask=lanes < rows_left, other=0.0)
    own_delta = place.delta_ptr + (line + row + lanes)
    gl.store(own_delta, gl.load(own_delta, mask=lanes < rows_left, other=0.0) + excess, mask=lanes < rows_left)
    if place.WRITE_DSLOPES:
        line = (work.batch * place.num_heads + work.head).to(gl.int64) * place.longest
        rows = row_first + lanes
        of_slope = excess * row_sums(p_distance, ROWS) - row_sums(of_slope, ROWS)
        gl.store(place.of_slopes_ptr + (line + rows), of_slope * unit, mask=rows < band.q_end)
    return dq, excess * unit, n


@jit
def without_excess(dq, excess, place, work, tiles):
    """Returns dQ less what rows of dS add up to in excess, times the keys' center."""
    kv_head = work.batch * (place.num_heads // place.group_size) + work.head // place.group_size
    centers = place.centers_ptr + kv_head * row_width(tiles.keys.pieces)
    found = ()
    for i in gl.static_range(len(dq)):
        found = found + (_slice_without(dq[i], excess, centers + slice_column(tiles.keys.pieces, i)),)
    return found


@jit
def _slice_without(x, excess, centers):
    columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    return x - like(excess, x) * gl.load(centers + columns)[None, :]


@constexpr_function
def row_width(pieces):
    """Returns the columns of a tile."""
    return sum(piece.shape[-1] for piece in list(pieces))


@jit
def consumer(GROUP: gl.constexpr, place, mask: Mask, tiles, schedule: Schedule, rules, HEAD_DIM: gl.constexpr):
    """Computes dQ of the GROUP-th 64 queries of each block."""
    n = 0  # tiles of keys processed so far
    messages = 0
    scheduler.wait_posted(tiles.box, messages)
    work = scheduler.read(tiles.box, messages, schedule.seqlen_q, schedule.seqlen_k, rules.IS_VARLEN)
    while work.tile != scheduler.NO_MORE:
        mbarrier.wait(tiles.full.index(GROUP), messages & 1)
        dq, excess, n = sum_queries(GROUP, tiles, work, n, place, mask, rules)
        arrive_alone(tiles.empty.index(GROUP))  # only products have read Q or dO
        # Reading the message again is cheaper than keeping its words in registers through the loop.
        work = scheduler.read(tiles.box, messages, schedule.seqlen_q, schedule.seqlen_k, rules.IS_VARLEN)
        scheduler.discard(tiles.box, messages)
        dq = without_excess(dq, excess, place, work, tiles)
        band = band_of(work, rules)
        row = band.q_begin + work.tile * rules.BLOCK_M + GROUP * ROWS
        row_end = band.q_end
        batch = work.batch
        if rules.IS_VARLEN:
            batch = gl.to_tensor(0)
            row += work.q_begin
            row_end += work.q_begin
        strides = (place.stride_dq_b, place.stride_dq_h, place.stride_dq_m)
        store_slices(
            dq, tiles.keys, rules.softmax_scale, place.dq_ptr, strides, batch, work.head, row, row_end, HEAD_DIM
        )  # fmt: skip
        messages += 1
        scheduler.wait_posted(tiles.box, messages)
        work = scheduler.read(tiles.box, messages, schedule.seqlen_q, schedule.seqlen_k, rules.IS_VARLEN)


# The kernel -----------------------------------------------------------------------------------------------------------


@jit
def split_dq_kernel(
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
    of_queries: OfQueries,
    schedule: Schedule,
    call_options: Options,
    mask: Mask,
    of_parts: OfParts,
    dropout: Dropout,
    counter_ptr,
    STAGES: gl.constexpr,
    STAGES_V: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """Processes tiles of 128 queries of one head until the counter is exhausted.

    Tensor maps have the axes (batch, head and part, row of whole tiles, column), one for each piece of a tile's width,
    absent ones None. Statistics are (batch * head, row).
    """
    q_maps = present(q_map, q_map_2, q_map_3)
    k_maps = present(k_map, k_map_2, k_map_3)
    v_maps = present(v_map, v_map_2, v_map_3)
    dout_maps = present(dout_map, dout_map_2, dout_map_3)
    rules = Rules(call_options, of_call(dropout))
    tiles = Tiles(
        buffers(q_maps, GROUPS * PARTS),
        buffers(dout_maps, GROUPS * PARTS),
        barriers(GROUPS, 1),
        barriers(GROUPS, 1),
        ring_of(buffers(k_maps, STAGES * PARTS), STAGES, GROUPS, PARTS),
        ring_of(buffers(v_maps, STAGES_V * PARTS), STAGES_V, GROUPS, PARTS),
        scheduler.mailbox(GROUPS),
    )
    fence_async_shared()
    place = Place(of_queries, of_parts, schedule.num_heads, schedule.group_size, schedule.seqlen_q)
    maps = q_maps, k_maps, v_maps, dout_maps
    gl.warp_specialize(
        [
            (consumer, (0, place, mask, tiles, schedule, rules, HEAD_DIM)),
            (consumer, (1, place, mask, tiles, schedule, rules, HEAD_DIM)),
            (producer, (maps, mask, tiles, of_queries, schedule, counter_ptr, rules)),
        ],
        [4, 1],
        [240, 24],
    )
