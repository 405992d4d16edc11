"""The launch of dQ, for head_dim and head_dim_v up to 256: three products a tile, no atomics.

A block owns 128 queries of one head, 64 for each of two consumer warpgroups, and walks the keys that they see, as the
forward does:

    S = Q K^T,  dP = dO V^T;   dS = exp(S - lse) (dP - delta);   dQ += dS K

S of a tile is multiplied together with dQ of the previous tile. dkv.py computes dK and dV. On request, the launch also
stores dS as the gradient of the bias (bias.py), and sums over its rows as parts of the gradient of ALiBi's slopes.

Bound: tensor cores (docs/notes/backward.md).
"""

# No postponed annotations here: an aggregate's fields are checked against its annotations.

from typing import NamedTuple

from warpwave.kernels.hopper import scheduler
from warpwave.kernels.hopper.dropout import key_of, of_call, of_head
from warpwave.kernels.hopper.flash_bwd.band import Options, Rules, band_of, first_statistic, key_tiles, visible
from warpwave.kernels.hopper.flash_bwd.bias import Bias, BiasOfCall, bias_of, bytes_of, load_bias, store_gradient
from warpwave.kernels.hopper.flash_bwd.steps import (
    gradient,
    listed,
    mask_lines,
    mask_words,
    matrices,
    places,
    probabilities,
    signed,
    slope_of,
    store_pieces,
    times,
    walk_of,
    zero_keys_before,
    zero_sums,
)
from warpwave.kernels.hopper.groups import Dropout, Mask, Schedule
from warpwave.kernels.hopper.parts import (
    ROWS,
    Ring,
    accumulator_layout,
    barriers,
    buffers,
    first_column,
    hand_back,
    hand_back_multiplied,
    load_tile,
    operand,
    present,
    ring_of,
    scores_async,
    skip,
    tile_bytes,
    values_async,
    wait_for,
    wait_full,
    zero_accumulator,
)
from warpwave.kernels.hopper.rows import zero_values
from warpwave.kernels.hopper.softmax import partial_sums
from warpwave.runtime.gluon_or_stub import (
    aggregate,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma,
    tma_load,
    warpgroup_mma_wait,
    with_fields,
)
from warpwave.runtime.parameters import Pointer

GROUPS = gl.constexpr(2)


@aggregate
class Tiles:
    """Shared memory of a block, and its barriers.

    Args:
        queries, dout: pieces of Q and dO, [2, 1, 1, 64, width], one for each group; dQ is stored through those of Q.
            `full` signals that a group's pieces arrived, `empty` that they may be replaced.
        keys, values: rings of K and V.
        bias: its tiles, the stages of K times the groups, are copied with those of K. box: the producer's messages.
    """

    queries: gl.tuple
    dout: gl.tuple
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    keys: Ring
    values: Ring
    bias: Bias
    box: scheduler.Mailbox


class OfQueries(NamedTuple):
    """The destination of dQ, and the data of queries besides Q and dO, without tensor maps.

    Attributes:
        lse_ptr, delta_ptr: statistics (rows.py).
        sums_ptr: the exact sum of dS of each row, laid out as they are; given if WRITE_DSLOPES.
        dq_ptr: dQ, with strides of batch, head and row.
        alibi_slopes_ptr: ALiBi's slopes, (batch, head).
        of_slopes_ptr: each query's contribution to the gradient of its head's ALiBi slope, (batch, head, query) of the
            longest sequence; given if WRITE_DSLOPES.
        cu_seqlens_q_ptr, cu_seqlens_k_ptr: offsets of packed sequences, int32.
    """

    lse_ptr: Pointer
    delta_ptr: Pointer
    sums_ptr: Pointer
    dq_ptr: Pointer
    alibi_slopes_ptr: Pointer
    of_slopes_ptr: Pointer
    cu_seqlens_q_ptr: Pointer
    cu_seqlens_k_ptr: Pointer
    stride_alibi_b: int
    stride_dq_b: int
    stride_dq_h: int
    stride_dq_m: int
    WRITE_DSLOPES: gl.constexpr


@aggregate
class Place:
    """The data of queries with the tensor maps of dQ. Items have `num_heads` heads and up to `longest` queries."""

    of_queries: OfQueries
    dq_maps: gl.tuple
    num_heads: gl.tensor
    longest: gl.tensor


# The producer ---------------------------------------------------------------------------------------------------------


@jit
def producer_of_queries(
    maps, copies, copies_needed_ptr, mask: Mask, tiles, offsets: OfQueries, schedule: Schedule, counter_ptr, rules
):
    """Runs `producer` with the maps of the operands, or of their copies if these are needed."""
    if copies_needed_ptr is None:  # noqa: SIM114 (known when compiled, and the other is not)
        producer(maps, mask, tiles, offsets, schedule, counter_ptr, rules)
    elif gl.load(copies_needed_ptr) == 0:
        producer(maps, mask, tiles, offsets, schedule, counter_ptr, rules)
    else:
        producer(copies, mask, tiles, offsets, schedule, counter_ptr, rules)


@jit
def producer(maps, mask: Mask, tiles, offsets: OfQueries, schedule: Schedule, counter_ptr, rules):
    """Draws tiles of queries, and loads Q and dO of each and the keys that they see."""
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
            if rules.IS_VARLEN:
                batch = 0
            kv_head = work.head // schedule.group_size
            key = work.k_begin + band.k_begin
            walk = walk_of(mask, work, row_first // rules.BLOCK_M, rules)
            key_next = key + begin * rules.BLOCK_N
            if rules.HAS_MASK:
                end = begin + gl.load(walk)
                key_next = listed(walk, 0) * rules.BLOCK_N
            load_keys(tiles, k_maps, n, batch, kv_head, key_next, work.head, row_first)
            load_queries(q_maps, dout_maps, tiles, batch, work.head, work.q_begin + row_first, messages)
            for j in range(begin, end):
                if rules.HAS_MASK:
                    load_tile(tiles.values, v_maps, n, batch, kv_head, key_next)
                    key_next = listed(walk, j + 1 - begin, j + 1 < end) * rules.BLOCK_N
                else:
                    load_tile(tiles.values, v_maps, n, batch, kv_head, key + j * rules.BLOCK_N)
                    key_next = key + (j + 1) * rules.BLOCK_N
                if j + 1 < end:
                    load_keys(tiles, k_maps, n + 1, batch, kv_head, key_next, work.head, row_first)
                n += 1
            messages += 1
        t = scheduler.draw(counter_ptr, schedule.num_tiles)
    scheduler.post_end(tiles.box, messages, rules.IS_VARLEN)


@jit
def load_keys(tiles, k_maps, n, batch, kv_head, key, head, row):
    """Loads tile n of K with the bias of both groups, whose queries begin at `row`."""
    load_tile(tiles.keys, k_maps, n, batch, kv_head, key, bytes_of(tiles.bias.maps, GROUPS))
    if len(tiles.bias.maps) > 0:
        stage = n % tiles.keys.stages
        for g in gl.static_range(GROUPS):
            full = tiles.keys.full.index(stage)
            load_bias(tiles.bias, stage * GROUPS + g, full, batch, head, row + g * ROWS, key)


@jit
def load_queries(q_maps, dout_maps, tiles, batch, head, row, messages):
    """Loads Q and dO of both groups, each as soon as its tiles of the previous block are no longer needed."""
    for g in gl.static_range(GROUPS):
        full = tiles.full.index(g)
        mbarrier.wait(tiles.empty.index(g), (messages & 1) ^ 1)
        mbarrier.expect(full, tile_bytes(q_maps) + tile_bytes(dout_maps))
        for i in gl.static_range(len(q_maps)):
            tma_load(q_maps[i], [batch, head, row + g * ROWS, first_column(q_maps, i)], full, tiles.queries[i].index(g))
        for i in gl.static_range(len(dout_maps)):
            place = [batch, head, row + g * ROWS, first_column(dout_maps, i)]
            tma_load(dout_maps[i], place, full, tiles.dout[i].index(g))


# A consumer -----------------------------------------------------------------------------------------------------------


@jit
def wait_keys(tiles, n, keys_used, rules):
    """Waits for tile n of K. Zeroes its rows from `keys_used` on, which belong to the next packed sequence: dS is 0
    there, but 0 times another sequence's NaN is NaN."""
    wait_full(tiles.keys, n)
    if rules.IS_VARLEN:  # noqa: SIM102 (known when compiled, and the other is not)
        if keys_used < rules.BLOCK_N:
            zero_values(tiles.keys, n, keys_used)


@jit
def statistic(ptr, first, rows_left, other, WIDTH: gl.constexpr):
    """Returns the 64 statistics from `first` on beside accumulators of WIDTH columns; `other` past the last query."""
    lanes = gl.arange(0, ROWS, gl.SliceLayout(1, accumulator_layout(WIDTH)))
    return gl.load(ptr + first + lanes, mask=lanes < rows_left, other=other)[:, None]


@jit
def row_sums(partial, WIDTH: gl.constexpr):
    """Returns the sums of 64 rows from `partial_sums`, beside accumulators of WIDTH columns."""
    return gl.convert_layout(gl.sum(partial, axis=1), gl.SliceLayout(1, accumulator_layout(WIDTH)))


@jit
def is_cut(row_first, key_first, band, rules):
    """Returns whether an edge of the band passes through a group's tile, or the keys end within."""
    cut = key_first + rules.BLOCK_N > band.k_end
    if rules.HAS_HIGH:
        cut = cut | (key_first + rules.BLOCK_N - 1 > row_first + band.high)
    if rules.HAS_LOW:
        cut = cut | (key_first < row_first + ROWS - 1 + band.low)
    return cut


@jit
def sum_queries(GROUP: gl.constexpr, tiles, work, n, place, mask: Mask, rules):
    """Returns dQ before the scale of a group's queries, and the number of the next tile of keys."""
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
    # Tiles of statistics have the length of a step: queries in dkv.py, keys here.
    first = line + first_statistic(work, rules.BLOCK_N, rules) + (row_first - band.q_begin)
    lse = statistic(place.lse_ptr, first, band.q_end - row_first, float("inf"), rules.BLOCK_N)
    delta = statistic(place.delta_ptr, first, band.q_end - row_first, 0.0, rules.BLOCK_N)
    slope = slope_of(place.alibi_slopes_ptr, place.stride_alibi_b, work, work.head, rules)
    q = matrices(tiles.queries, GROUP)
    dout = matrices(tiles.dout, GROUP)
    dq = zero_sums(tiles.keys.pieces)
    of_this_head = of_head(rules.dropout, key_of(rules.dropout), work.batch, work.head)
    rules_of_head = with_fields(rules, dropout=of_this_head)
    zero = zero_accumulator(rules.BLOCK_N)
    n = skip(tiles.keys, tiles.values, n, begin - block_begin)
    wait_keys(tiles, n, band.k_end - band.k_begin - begin * rules.BLOCK_N, rules)
    zero_keys_before(tiles.keys.pieces, n % tiles.keys.stages, band.k_begin + begin * rules.BLOCK_N, band, rules)
    s = scores_async(q, tiles.keys, n, zero)
    x = warpgroup_mma_wait(0, deps=[s])
    takes_ds: gl.constexpr = len(tiles.bias.gradient_maps) > 0 or place.WRITE_DSLOPES  # before the softcap
    of_slope = partial_sums(zero, rules.BLOCK_N)
    ds_sum = of_slope
    p_distance = of_slope  # sums of P times the distance
    lines = mask_lines(mask, work, row_first, work.seqlen_q, rules.BLOCK_N, rules)
    for j in range(begin, end):
        key_first = band.k_begin + j * rules.BLOCK_N
        if rules.HAS_MASK:
            key_first = listed(walk, j - begin) * rules.BLOCK_N
        words = mask_words(mask, lines, work.head, key_first, rules.BLOCK_N, rules)
        wait_full(tiles.values, n)
        dp = scores_async(dout, tiles.values, n, zero)
        bias_tile = n % tiles.keys.stages * GROUPS + GROUP
        bias = bias_of(tiles.bias, bias_tile, work, work.head, row_first, key_first, False, rules.BLOCK_N, rules)
        p, cap = probabilities(x, lse, band, row_first, key_first, slope, words, bias, False, False, rules)
        y = warpgroup_mma_wait(0, deps=[dp])
        hand_back_multiplied(tiles.values, n)
        ds = gradient(signed(p, row_first, key_first, False, rules_of_head), y, delta, rules_of_head)
        if rules.HAS_SOFTCAP and not takes_ds:
            ds = ds * cap
        if not rules.HAS_MASK:  # the words also hide what position hides  # noqa: SIM102
            if is_cut(row_first, key_first, band, rules):
                # Applied here and not to P, so that P need not be kept while other work is in flight. dP of hidden
                # pairs may be NaN.
                shown = visible(ds, band, row_first, key_first, False, rules)
                ds = gl.where(shown, ds, 0.0)
                if place.WRITE_DSLOPES:
                    p = gl.where(shown, p, 0.0)
        if len(tiles.bias.gradient_maps) > 0:
            store_gradient(ds, tiles.bias, bias_tile, work, row_first, key_first)
        if place.WRITE_DSLOPES:
            rows, keys = places(ds, row_first, key_first, False)
            distance = gl.abs(rows + band.offset - keys).to(gl.float32)
            of_slope = of_slope + partial_sums(ds * distance, rules.BLOCK_N)
            ds_sum = ds_sum + partial_sums(ds, rules.BLOCK_N)
            p_distance = p_distance + partial_sums(p * distance, rules.BLOCK_N)
        if rules.HAS_SOFTCAP and takes_ds:  # the softcap's derivative of hidden pairs may be NaN
            ds = gl.where(p == 0.0, 0.0, ds * cap)
        pending = values_async(operand(ds, tiles.keys), tiles.keys, n, dq)
        if j + 1 < end:
            wait_keys(tiles, n + 1, band.k_end - key_first - rules.BLOCK_N, rules)
        # After the last tile, the scores are of arbitrary data and are not read.
        s = scores_async(q, tiles.keys, n + 1, zero)
        dq = wait_for(pending, len(q))
        if len(tiles.bias.gradient_maps) > 0:
            tma.store_wait(0)
        if rules.BIAS == "cells":  # threads read the stage too, so a barrier of the group comes first
            hand_back(tiles.keys, n)
        else:
            hand_back_multiplied(tiles.keys, n)
        x = warpgroup_mma_wait(0, deps=[s])
        n += 1
    n = skip(tiles.keys, tiles.values, n, block_end - end)
    if place.WRITE_DSLOPES:
        # out is rounded, so the computed dS of a row do not add up to the exact sum. The excess would be multiplied by
        # whole distances, which may exceed their differences by far.
        lanes = gl.arange(0, ROWS, gl.SliceLayout(1, accumulator_layout(rules.BLOCK_N)))
        inside = lanes < band.q_end - row_first
        sums = gl.load(place.sums_ptr + first + lanes, mask=inside, other=0.0)
        excess = row_sums(ds_sum, rules.BLOCK_N) - sums
        found = excess * row_sums(p_distance, rules.BLOCK_N)
        line = (work.batch * place.num_heads + work.head).to(gl.int64) * place.longest
        pointers = place.of_slopes_ptr + (line + row_first + lanes)
        gl.store(pointers, found - row_sums(of_slope, rules.BLOCK_N), mask=inside)
    return dq, n


@jit
def consumer(GROUP: gl.constexpr, place, mask: Mask, tiles, schedule: Schedule, rules, HEAD_DIM: gl.constexpr):
    """Computes dQ of the GROUP-th 64 queries of each block."""
    n = 0  # tiles of keys processed so far
    messages = 0
    scheduler.wait_posted(tiles.box, messages)
    work = scheduler.read(tiles.box, messages, schedule.seqlen_q, schedule.seqlen_k, rules.IS_VARLEN)
    while work.tile != scheduler.NO_MORE:
        mbarrier.wait(tiles.full.index(GROUP), messages & 1)
        dq, n = sum_queries(GROUP, tiles, work, n, place, mask, rules)
        # Reading the message again is cheaper than keeping its words in registers through the loop.
        work = scheduler.read(tiles.box, messages, schedule.seqlen_q, schedule.seqlen_k, rules.IS_VARLEN)
        scheduler.discard(tiles.box, messages)
        band = band_of(work, rules)
        row = work.q_begin + band.q_begin + work.tile * rules.BLOCK_M + GROUP * ROWS
        strides = (place.stride_dq_b, place.stride_dq_h, place.stride_dq_m)
        store_pieces(
            times(dq, rules.softmax_scale), place.dq_maps, tiles.queries, GROUP, place.dq_ptr, strides, work.batch,
            work.head, row, work.q_begin + band.q_end, HEAD_DIM, rules.IS_VARLEN,
        )  # fmt: skip
        tma.store_wait(0)
        mbarrier.arrive(tiles.empty.index(GROUP), count=1)
        messages += 1
        scheduler.wait_posted(tiles.box, messages)
        work = scheduler.read(tiles.box, messages, schedule.seqlen_q, schedule.seqlen_k, rules.IS_VARLEN)


# The kernel -----------------------------------------------------------------------------------------------------------


@jit
def dq_kernel(
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
    dq_map,
    dq_map_2,
    dq_map_3,
    bias_map,
    dbias_map,
    q_copy_map,
    q_copy_map_2,
    q_copy_map_3,
    k_copy_map,
    k_copy_map_2,
    k_copy_map_3,
    v_copy_map,
    v_copy_map_2,
    v_copy_map_3,
    dout_copy_map,
    dout_copy_map_2,
    dout_copy_map_3,
    of_queries: OfQueries,
    schedule: Schedule,
    call_options: Options,
    mask: Mask,
    bias: BiasOfCall,
    dropout: Dropout,
    copies_needed_ptr,
    counter_ptr,
    STAGES: gl.constexpr,
    STAGES_V: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    WRITE_DBIAS: gl.constexpr,
):
    """Processes tiles of 128 queries of one head until the counter is exhausted.

    Tensor maps have the axes (batch, head, row, column), one for each piece of a tile's width, absent ones None; the
    maps of dS and of a bias with a number for each score, (batch, head, query, key). Statistics are (batch * head,
    row).
    """
    q_maps = present(q_map, q_map_2, q_map_3)
    k_maps = present(k_map, k_map_2, k_map_3)
    v_maps = present(v_map, v_map_2, v_map_3)
    dout_maps = present(dout_map, dout_map_2, dout_map_3)
    rules = Rules(call_options, of_call(dropout))
    box = scheduler.mailbox(GROUPS)
    q_tiles = buffers(q_maps, GROUPS)
    bias_maps = ()
    dbias_maps = ()
    bias_tiles = q_tiles
    if call_options.BIAS == "cells":
        bias_maps = (bias_map,)
        bias_tiles = buffers(bias_maps, STAGES * GROUPS)
        if WRITE_DBIAS:
            dbias_maps = (dbias_map,)
    tiles = Tiles(
        q_tiles,
        buffers(dout_maps, GROUPS),
        barriers(GROUPS, 1),
        barriers(GROUPS, 1),
        ring_of(buffers(k_maps, STAGES), STAGES, GROUPS),
        ring_of(buffers(v_maps, STAGES_V), STAGES_V, GROUPS),
        Bias(bias, bias_maps, dbias_maps, bias_tiles[0], box.full, box.empty),
        box,
    )
    fence_async_shared()
    maps = q_maps, k_maps, v_maps, dout_maps
    copies = maps
    if copies_needed_ptr is not None:
        copied_q = present(q_copy_map, q_copy_map_2, q_copy_map_3)
        copied_k = present(k_copy_map, k_copy_map_2, k_copy_map_3)
        copied_v = present(v_copy_map, v_copy_map_2, v_copy_map_3)
        copies = copied_q, copied_k, copied_v, present(dout_copy_map, dout_copy_map_2, dout_copy_map_3)
    place = Place(of_queries, present(dq_map, dq_map_2, dq_map_3), schedule.num_heads, schedule.seqlen_q)
    gl.warp_specialize(
        [
            (consumer, (0, place, mask, tiles, schedule, rules, HEAD_DIM)),
            (consumer, (1, place, mask, tiles, schedule, rules, HEAD_DIM)),
            (
                producer_of_queries,
                (maps, copies, copies_needed_ptr, mask, tiles, of_queries, schedule, counter_ptr, rules),
            ),
        ],
        [4, 1],
        [240, 24],
    )
