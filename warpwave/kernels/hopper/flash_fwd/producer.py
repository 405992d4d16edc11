"""The producer warp of the Hopper forward.

It draws tiles of queries, announces them to the consumers (consumer.py), and keeps the rings of K and V tiles full, or
those of a widener (widener.py). It skips tiles that a boolean mask hides entirely from a block.
"""

from warpwave.kernels.groups import Pages
from warpwave.kernels.hopper import scheduler
from warpwave.kernels.hopper.factors import is_v_quantized, read_factors, store_factors
from warpwave.kernels.hopper.flash_fwd.mask_bias import (
    aligned,
    bytes_beside,
    is_added,
    is_masked,
    load_bias,
    shown_before,
    tiles_shown,
    word_of,
)
from warpwave.kernels.hopper.flash_fwd.splits import tiles_of_split, work_of_split
from warpwave.kernels.hopper.flash_fwd.widener import announce_end
from warpwave.kernels.hopper.groups import Queries, Schedule, Splits
from warpwave.kernels.hopper.pages import in_pages, load_tile_of_pages, of_sequence
from warpwave.kernels.hopper.parts import (
    Ring,
    first_column,
    load_tile,
    tile_bytes,
)
from warpwave.kernels.hopper.split_float32 import (
    is_scaled,
    wait_for_launch_before,
)
from warpwave.kernels.hopper.visible import (
    Rules,
    keys_of_sequence,
    place_of_queries,
    queries_of_block,
    queries_of_warpgroup,
    tiles_of_block,
)
from warpwave.runtime.gluon_or_stub import (
    aggregate,
    gl,
    jit,
    mbarrier,
    tma_load,
)


@aggregate
class Producer:
    """State of the producer.

    Args:
        q_maps, k_maps, v_maps: the tensor maps of the pieces of a tile's width.
        q_tiles, q_full, q_empty: shared memory for a block's queries, and their barriers.
        k_ring, v_ring, box: the rings that it fills, and its messages to the consumers.
        beside: `mask_bias.Beside`, or () without a mask or bias.
        widener: the state of the role that empties rings of 8-bit tiles (`widener.Widener`); () without one.
    """

    q_maps: gl.tuple
    k_maps: gl.tuple
    v_maps: gl.tuple
    q_tiles: gl.tuple
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_ring: Ring
    v_ring: Ring
    box: scheduler.Mailbox
    rules: Rules
    beside: object
    widener: object


@jit
def producer(role, queries: Queries, schedule: Schedule, pages: Pages, splits: Splits, counter_ptr):
    """Draws tiles of queries and loads their operands. With a mask or bias, it also reloads every block whose consumer
    reports a non-finite output (mask_bias.py). A message is overwritten only when the outcome of its block is known."""
    box = role.box
    rules = role.rules
    beside = role.beside
    if is_scaled(rules) or is_v_quantized(rules.factors):
        wait_for_launch_before(32)
    n = 0  # tiles of K and V loaded so far
    messages = 0
    known = 0  # messages known to be finished by all consumers
    t = gl.program_id(0)
    while is_more(t, schedule.num_tiles, known, messages, beside):
        tile = t
        if is_added(beside):
            tile = gl.minimum(t, schedule.num_tiles - 1)  # there may be no tile left to draw
        if pages.PAGE_SIZE > 0:
            work = scheduler.paged_tile(schedule, queries, pages, tile, queries_of_block(rules))
        else:
            work = scheduler.tile_of(schedule, queries, tile, queries_of_block(rules), rules.HAS_HIGH, rules.IS_VARLEN)
        is_work = scheduler.is_work(work, queries_of_block(rules), rules.IS_VARLEN)
        if is_added(beside):
            level = gl.to_tensor(0)
            answers = (known < messages - 1) | ((known < messages) & (t >= schedule.num_tiles))
            if answers:
                level, tile, batch, head = scheduler.wait_for_request(box, known)
                is_work = level != 0
                zero = gl.to_tensor(0)
                work = scheduler.Work(tile, batch, head, zero, schedule.seqlen_q, zero, schedule.seqlen_k)
                known += 1
        if is_work:
            if is_added(beside):
                bits = gl.to_tensor(0)
                if is_masked(beside):
                    bits = last_tiles_shown(work, beside, rules)
                scheduler.post_how(box, messages, level, bits)
            scheduler.post(box, messages, work, rules.IS_VARLEN)
            work, split = work_of_split(work, splits)
            kv_head = work.head // schedule.group_size
            if is_masked(beside):
                n = load_masked_block(role, work, kv_head, n, messages, bits)
            else:
                n = load_block(role, work, split, splits, pages, schedule.seqlen_k, kv_head, n, messages)
            messages += 1
        if is_added(beside):
            if not answers:
                t = scheduler.draw(counter_ptr, schedule.num_tiles)
        else:
            t = scheduler.draw(counter_ptr, schedule.num_tiles)
    announce_end(role.widener, n)
    scheduler.post_end(box, messages, rules.IS_VARLEN)


@jit
def is_more(t, num_tiles, known, messages, beside):
    """Returns whether the producer has a tile to load, or a consumer may still request that it repeat a block."""
    if is_added(beside):
        return (t < num_tiles) | (known < messages)
    else:
        return t < num_tiles


@jit
def load_block(role, work, split, splits: Splits, pages: Pages, capacity, kv_head, n, messages):
    """Loads the operands of a block of queries, K one tile ahead of V if tiles overlap. Returns the number of the next
    tile of K and V."""
    rules = role.rules
    beside = role.beside
    keys = keys_of_sequence(work, rules)
    if is_added(beside):
        keys = aligned(keys)
    begin, end, _ = tiles_of_split(keys, work, split, splits, rules)
    batch = work.batch
    if rules.IS_VARLEN:
        batch = 0
    source = batch
    if pages.PAGE_SIZE > 0:
        source = of_sequence(pages, work.batch, capacity)
    row = work.q_begin + work.tile * queries_of_block(rules)
    key = work.k_begin + keys.begin
    last = key + (end - 1) * rules.BLOCK_N
    load_keys(role.k_ring, role.k_maps, n, work, source, kv_head, last, beside, rules)
    store_factors(rules, role.k_ring, n, read_factors(rules, work, source, kv_head, last))
    load_queries(role, batch, work, row, messages)
    for j in range(1, end - begin):
        before = key + (end - 1 - j) * rules.BLOCK_N
        if rules.PARTS == 1:
            load_keys(role.k_ring, role.k_maps, n + 1, work, source, kv_head, before, beside, rules)
            factors = read_factors(rules, work, source, kv_head, before)
            load_rows(role.v_ring, role.v_maps, n, source, kv_head, before + rules.BLOCK_N)
            store_factors(rules, role.k_ring, n + 1, factors)
        else:  # in the order of use: a ring may have a single stage
            load_rows(role.v_ring, role.v_maps, n, source, kv_head, before + rules.BLOCK_N)
            load_keys(role.k_ring, role.k_maps, n + 1, work, source, kv_head, before, beside, rules)
        n += 1
    load_rows(role.v_ring, role.v_maps, n, source, kv_head, key + begin * rules.BLOCK_N)
    return n + 1


@jit
def load_queries(role, batch, work, row, messages):
    """Loads a block's queries once the previous block's are no longer needed."""
    rules = role.rules
    for g in gl.static_range(rules.GROUPS):
        mbarrier.wait(role.q_empty.index(g), (messages & 1) ^ 1)
        mbarrier.expect(role.q_full.index(g), tile_bytes(role.q_maps) * rules.PARTS)
        for part in gl.static_range(rules.PARTS):
            for i in gl.static_range(len(role.q_maps)):
                head, query = work.head * rules.PARTS + part, row + g * queries_of_warpgroup(rules)
                place = place_of_queries(batch, head, query, first_column(role.q_maps, i), rules)
                tma_load(role.q_maps[i], place, role.q_full.index(g), role.q_tiles[i].index(g * rules.PARTS + part))


@jit
def last_tiles_shown(work, beside, rules):
    """Returns the `tiles_shown` word that holds the block's last tile."""
    keys = aligned(keys_of_sequence(work, rules))
    _, end = tiles_of_block(keys, work, rules)
    word, _ = word_of(end - 1, keys, rules)
    return tiles_shown(word, work, beside, rules, 1)


@jit
def load_masked_block(role, work, kv_head, n, messages, bits):
    """Loads, like `load_block`, the tiles that a mask shows, at least one."""
    rules = role.rules
    beside = role.beside
    keys = aligned(keys_of_sequence(work, rules))
    begin, end = tiles_of_block(keys, work, rules)
    word, _ = word_of(end - 1, keys, rules)
    tile, word, bits = shown_before(end, word, bits, begin, work, keys, beside, rules, 1)
    tile = gl.maximum(tile, begin)
    key = keys.begin + tile * rules.BLOCK_N
    load_keys(role.k_ring, role.k_maps, n, work, work.batch, kv_head, key, beside, rules)
    store_factors(rules, role.k_ring, n, read_factors(rules, work, work.batch, kv_head, key))
    row = work.tile * queries_of_block(rules)
    load_queries(role, work.batch, work, row, messages)
    tile, word, bits = shown_before(tile, word, bits, begin, work, keys, beside, rules, 1)
    while tile >= begin:
        before = keys.begin + tile * rules.BLOCK_N
        if rules.PARTS == 1:
            load_keys(role.k_ring, role.k_maps, n + 1, work, work.batch, kv_head, before, beside, rules)
            factors = read_factors(rules, work, work.batch, kv_head, before)
            load_tile(role.v_ring, role.v_maps, n, work.batch, kv_head, key)
            store_factors(rules, role.k_ring, n + 1, factors)
        else:  # in the order of use
            load_tile(role.v_ring, role.v_maps, n, work.batch, kv_head, key)
            load_keys(role.k_ring, role.k_maps, n + 1, work, work.batch, kv_head, before, beside, rules)
        key = before
        n += 1
        tile, word, bits = shown_before(tile, word, bits, begin, work, keys, beside, rules, 1)
    load_tile(role.v_ring, role.v_maps, n, work.batch, kv_head, key)
    return n + 1


@jit
def load_keys(k_ring, k_maps, n, work, source, kv_head, key, beside, rules):
    """Loads tile n of K, and its bias if each score has its own."""
    load_rows(k_ring, k_maps, n, source, kv_head, key, bytes_beside(beside, rules.GROUPS))
    load_bias(beside, k_ring, n, work, key, rules)


@jit
def load_rows(ring, maps, n, source, kv_head, key, MORE: gl.constexpr = 0):
    """Loads tile n of K or V from `source`: a batch item, or `pages.OfSequence`."""
    if in_pages(source):
        load_tile_of_pages(ring, maps, n, source, kv_head, key, MORE)
    else:
        load_tile(ring, maps, n, source, kv_head, key, MORE)
