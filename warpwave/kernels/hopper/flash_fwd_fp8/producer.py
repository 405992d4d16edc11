"""The producer warp of the 8-bit Hopper forward. As in `flash_fwd` it draws tiles of queries, announces them to the
consumers, and keeps the rings of K and V full; tiles of V are [columns, keys], as the preceding launch wrote them."""

from warpwave.kernels.hopper import scheduler
from warpwave.kernels.hopper.flash_fwd.producer import load_queries
from warpwave.kernels.hopper.groups import Queries, Schedule
from warpwave.kernels.hopper.parts import load_tile, tile_bytes
from warpwave.kernels.hopper.split_float32 import wait_for_launch_before
from warpwave.kernels.hopper.visible import keys_of_sequence, queries_of_block, tiles_of_block
from warpwave.kernels.prepass.transpose_values import KEYS
from warpwave.runtime.gluon_or_stub import constexpr_function, gl, jit, mbarrier, tma_load


@jit
def producer(role, queries: Queries, schedule: Schedule, counter_ptr):
    """Draws tiles of queries and loads their operands. `role` is `flash_fwd.producer.Producer`."""
    box = role.box
    rules = role.rules
    wait_for_launch_before(32)
    n = 0  # tiles of K and V loaded so far
    messages = 0
    t = gl.program_id(0)
    while t < schedule.num_tiles:
        work = scheduler.tile_of(schedule, queries, t, queries_of_block(rules), rules.HAS_HIGH, rules.IS_VARLEN)
        if scheduler.is_work(work, queries_of_block(rules), rules.IS_VARLEN):
            scheduler.post(box, messages, work, rules.IS_VARLEN)
            n = load_block(role, work, work.head // schedule.group_size, n, messages)
            messages += 1
        t = scheduler.draw(counter_ptr, t, schedule.num_tiles)
    zero = gl.to_tensor(0)
    scheduler.post(
        box,
        messages,
        scheduler.Work(gl.to_tensor(scheduler.NO_MORE), zero, zero, zero, zero, zero, zero),
        rules.IS_VARLEN,
    )


@jit
def load_block(role, work, kv_head, n, messages):
    """Loads the operands of a block of queries, K one tile ahead of V. Returns the number of the next tile of K and
    V."""
    rules = role.rules
    keys = keys_of_sequence(work, rules)
    begin, end = tiles_of_block(keys, work, rules)
    batch = work.batch
    first = keys.begin  # of the visible keys, in V transposed
    if rules.IS_VARLEN:
        batch = 0
        first = first + (work.k_begin // KEYS + work.batch) * KEYS
    key = work.k_begin + keys.begin
    load_tile(role.k_ring, role.k_maps, n, batch, kv_head, key + (end - 1) * rules.BLOCK_N)
    load_queries(role, batch, work, work.q_begin + work.tile * queries_of_block(rules), messages)
    for j in range(1, end - begin):
        tile = end - j
        load_tile(role.k_ring, role.k_maps, n + 1, batch, kv_head, key + (tile - 1) * rules.BLOCK_N)
        load_values(role.v_ring, role.v_maps, n, batch, kv_head, first + tile * rules.BLOCK_N)
        n += 1
    load_values(role.v_ring, role.v_maps, n, batch, kv_head, first + begin * rules.BLOCK_N)
    return n + 1


@jit
def load_values(v_ring, v_maps, n, batch, head, key):
    """Loads tile n of V transposed by TMA as soon as its stage is free. Rows past head_dim_v are zeros."""
    stage = n % v_ring.stages
    mbarrier.wait(v_ring.empty.index(stage), ((n // v_ring.stages) & 1) ^ 1)
    mbarrier.expect(v_ring.full.index(stage), tile_bytes(v_maps))
    for i in gl.static_range(len(v_maps)):
        place = [batch, head, first_row(v_maps, i), key]
        tma_load(v_maps[i], place, v_ring.full.index(stage), v_ring.pieces[i].index(stage))


@constexpr_function
def first_row(maps, i):
    """Returns the row of V transposed at which piece i starts."""
    return sum(m.block_type.shape[-2] for m in list(maps)[: int(i)])
