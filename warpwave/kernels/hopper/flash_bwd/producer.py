"""The producer warp of the launches whose blocks own keys: joint.py and dkv.py."""

from warpwave.kernels.hopper import scheduler
from warpwave.kernels.hopper.flash_bwd.band import band_of, first_statistic, query_span, work_on_keys
from warpwave.kernels.hopper.flash_bwd.bias import bytes_of, load_bias
from warpwave.kernels.hopper.flash_bwd.steps import has_parts, heads_of, listed_step, load_rows, place_of_step, walk_of
from warpwave.kernels.hopper.groups import KeyGradients, KeySchedule, Mask
from warpwave.kernels.hopper.parts import first_column, tile_bytes
from warpwave.runtime.gluon_or_stub import gl, jit, mbarrier, tma_load


@jit
def producer_of_keys(
    maps, copies, copies_needed_ptr, mask: Mask, tiles, offsets: KeyGradients, schedule: KeySchedule, counter_ptr,
    heads, rules, TILES_FIRST: gl.constexpr,
):  # fmt: skip
    """Runs `producer` with the maps of the operands, or of their copies if these are needed."""
    if copies_needed_ptr is None:  # noqa: SIM114 (known when compiled, and the other is not)
        producer(maps, mask, tiles, offsets, schedule, counter_ptr, heads, rules, TILES_FIRST)
    elif gl.load(copies_needed_ptr) == 0:
        producer(maps, mask, tiles, offsets, schedule, counter_ptr, heads, rules, TILES_FIRST)
    else:
        producer(copies, mask, tiles, offsets, schedule, counter_ptr, heads, rules, TILES_FIRST)


@jit
def producer(
    maps, mask: Mask, tiles, offsets: KeyGradients, schedule: KeySchedule, counter_ptr, heads, rules,
    TILES_FIRST: gl.constexpr,
):  # fmt: skip
    """Draws blocks of keys, and loads K and V of each and the queries that see them, in the order of `place_of_step`
    or of the list of a mask."""
    q_maps, k_maps, v_maps, dout_maps, lse_map, delta_map = maps
    n = 0
    messages = 0
    t = gl.to_tensor(-1)
    items = schedule.num_tiles
    if TILES_FIRST and has_parts(offsets.dk_ptr, tiles.keys, rules):
        items = schedule.whole + schedule.parts * (schedule.num_tiles - schedule.whole)
    while t < items:
        # One draw for the first tile and all others: of one before the loop, ptxas 12.8 leaves the warp diverged.
        t = scheduler.draw_in_order(counter_ptr, items)
        block = t
        part = t - schedule.whole
        if TILES_FIRST and has_parts(offsets.dk_ptr, tiles.keys, rules):
            block = gl.where(part < 0, t, schedule.whole + part // schedule.parts)
        work = work_on_keys(schedule, offsets, block, rules)
        band = band_of(work, rules)
        key_first = band.k_begin + work.tile * rules.BLOCK_N
        span = query_span(band, key_first, rules)
        count = span.end - span.begin
        first_head, members = heads_of(work, heads)
        if (t < items) & (work.tile >= 0) & (key_first < band.k_end) & (count > 0):
            steps = count * members
            first_step = gl.to_tensor(0)
            if TILES_FIRST and has_parts(offsets.dk_ptr, tiles.keys, rules):
                whole_steps = steps
                if part >= 0:
                    first_step = part % schedule.parts * whole_steps // schedule.parts
                    steps = (part % schedule.parts + 1) * whole_steps // schedule.parts - first_step
                scheduler.post_part(tiles.box, messages, first_step, first_step + steps, part)
            scheduler.post(tiles.box, messages, work, rules.IS_VARLEN)
            batch = work.batch
            if rules.IS_VARLEN:
                batch = 0
            statistic = first_statistic(work, rules.BLOCK_M, rules)
            row = work.q_begin + band.q_begin
            walk = walk_of(mask, work, key_first // rules.BLOCK_N, rules)
            if rules.HAS_MASK:
                steps = gl.load(walk)
            for i in range(steps):
                if rules.HAS_MASK:
                    head, row_first = listed_step(walk, i, work, heads, rules)
                    down = row_first - band.q_begin
                else:
                    head, tile = place_of_step(first_step + i, first_head, members, span, TILES_FIRST, rules)
                    down = tile * rules.BLOCK_M
                line = [batch * heads.num_heads + head, statistic + down]
                load_rows(tiles.queries, q_maps, lse_map, n, batch, head, row + down, line)
                if rules.BIAS == "cells":
                    stages: gl.constexpr = tiles.bias.full.shape[0]
                    mbarrier.wait(tiles.bias.empty.index(n % stages), ((n // stages) & 1) ^ 1)
                    full = tiles.bias.full.index(n % stages)
                    mbarrier.expect(full, bytes_of(tiles.bias.maps, 1))
                    place = tiles.bias.tiles.shape[0] // stages * (n % stages)
                    load_bias(tiles.bias, place, full, batch, head, row + down, key_first)
                if i == 0:
                    mbarrier.wait(tiles.empty.index(0), (messages & 1) ^ 1)
                    mbarrier.expect(tiles.full.index(0), tile_bytes(k_maps) + tile_bytes(v_maps))
                    kv_head = work.head // schedule.splits
                    load_resident(k_maps, tiles.keys, tiles.full.index(0), batch, kv_head, work.k_begin + key_first)
                    load_resident(v_maps, tiles.values, tiles.full.index(0), batch, kv_head, work.k_begin + key_first)
                load_rows(tiles.dout, dout_maps, delta_map, n, batch, head, row + down, line)
                n += 1
            messages += 1
    scheduler.post_end(tiles.box, messages, rules.IS_VARLEN)


@jit
def load_resident(maps, pieces, full, batch, head, row):
    """Loads the pieces of a tile that stays for the whole block."""
    for i in gl.static_range(len(maps)):
        tma_load(maps[i], [batch, head, row, first_column(maps, i)], full, pieces[i].index(0))
