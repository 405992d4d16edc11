"""The consumers of the 8-bit Hopper forward, of 64 queries each.

A consumer walks the keys that its 64 queries see, from the last to the first, as in `flash_fwd`. The products of a
tile's scores start together with those of the previous tile's probabilities and values, which are added to a float32
accumulator. Consumers take turns to start their products (turns.py).
"""

from warpwave.kernels.hopper import scheduler
from warpwave.kernels.hopper.factors import OfKeys, of_head, of_output, of_values, rules_of_queries, rules_of_tile
from warpwave.kernels.hopper.flash_fwd.consumer import release
from warpwave.kernels.hopper.flash_fwd.mask_bias import hide_by_position
from warpwave.kernels.hopper.flash_fwd_fp8.products import (
    as_pieces,
    chunks_of,
    next_product,
    operands,
    promoted,
    replaced,
    rounded,
    starts_together,
    value_product,
    value_products,
    with_chunks,
    with_products,
    zero_accumulator,
)
from warpwave.kernels.hopper.flash_fwd_fp8.turns import end_turn, last_turn, skip_in_turn, start_turns, take_turn
from warpwave.kernels.hopper.groups import Queries, Schedule
from warpwave.kernels.hopper.parts import (
    LOG2_E,
    ROWS,
    Ring,
    eight_bit_accumulator_layout,
    hand_back,
    hand_back_multiplied,
    like,
    matrix,
    scores_async,
    wait_full,
)
from warpwave.kernels.hopper.rows import store_out
from warpwave.kernels.hopper.softmax import (
    factors_of_out,
    in_bits,
    of_rows,
    own_maxima,
    own_probabilities,
    settled_maximum,
    store_lse,
    with_sink,
)
from warpwave.kernels.hopper.visible import (
    Place,
    Rules,
    first_query,
    keys_of_sequence,
    place_of_group,
    tiles_of_block,
)
from warpwave.runtime.gluon_or_stub import (
    aggregate,
    gl,
    jit,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

# A probability relative to its row's maximum is multiplied by 2^OFFSET: at most 256, of the 448 that float8_e4m3
# reaches. It keeps 4 significant bits down to 2^-14 of the row's largest probability. That one is exact, and the
# rounding of those just below it is half as coarse as above it: a maximum that lags by up to 2 bits, as in 16 bits by
# 4, makes the RMS error 1.08 (normal data) and 1.25 times as large (sharp data).
OFFSET = gl.constexpr(8.0)


@jit
def settled(x, scale, m_i):
    """Computes `settled_maximum` without a lag. Returns the maxima, and the factor of the previous sum."""
    m_i, alpha, _ = settled_maximum(x, scale, m_i, gl.zeros_like(m_i), 0.0)
    return m_i, alpha


@jit
def raised(m_i):
    """Returns the maximum to subtract from scores, so that probabilities fill the range of float8_e4m3."""
    return m_i - OFFSET


@jit
def step(
    q, q_empty, GROUP: gl.constexpr, k_ring, v_ring, n, p, m_i, alpha, l_i, acc, tile, is_last,
    whole_begin, whole_end, place, keys, values, rules,
):  # fmt: skip
    """Computes the scores of tile n + 1 with their softmax, and the product of tile n's probabilities and values. acc
    is multiplied by alpha when that product is added; the factor for the next product is returned.

    Up to 128 columns of values are multiplied at once, and their product is waited for before the exponentials. Of
    wider tiles the first chunk starts before the scores, and its product is added while the scores are computed; the
    others start one after another, between exponentials.
    """
    MANY: gl.constexpr = len(chunks_of(v_ring.pieces))
    TOGETHER: gl.constexpr = starts_together(v_ring.pieces)
    BLOCKWISE: gl.constexpr = values.BLOCK > 0
    p = operands(p, v_ring, rules.BLOCK_N)
    of_tile = rules_of_tile(tile, keys, rules)
    factor = of_values(values, tile + 1, keys, rules)
    wait_full(k_ring, n + 1)
    take_turn(GROUP, rules.GROUPS)
    if TOGETHER:
        scores = scores_async(q, k_ring, n + 1, zero_accumulator(rules.BLOCK_N))
        pending = value_products(p, v_ring, n)
        x = warpgroup_mma_wait(MANY, deps=[scores])
    else:
        pending = value_product(p, v_ring, n, 0)
        scores = scores_async(q, k_ring, n + 1, zero_accumulator(rules.BLOCK_N))
        product = warpgroup_mma_wait(len(k_ring.pieces), deps=[pending])
        acc = replaced(acc, 0, promoted(acc[0], alpha, product, factor, BLOCKWISE))
        pending = next_product(p, product, v_ring, n, 1)
        x = warpgroup_mma_wait(1, deps=[scores])
    hand_back_multiplied(k_ring, n + 1)
    release(q_empty, GROUP, is_last, rules)
    x, scale = in_bits(x, tile, place, keys, of_tile, False)
    if rules.HAS_LOW:  # noqa: SIM102 (known when compiled, and the other is not)
        if (tile < whole_begin) | (tile >= whole_end):
            x = hide_by_position(x, tile, place, keys, rules)
    m_i, next_alpha = settled(x, scale, m_i)
    end_turn(GROUP, rules.GROUPS)
    if TOGETHER:
        acc = with_products(acc, alpha, pending, factor, BLOCKWISE)
        hand_back_multiplied(v_ring, n)
    else:
        acc, pending = with_chunks(acc, alpha, pending, p, v_ring, n, factor, BLOCKWISE, 1, 2)
    p32, l_i = own_probabilities(x, scale, raised(m_i), next_alpha, l_i, rules.HAS_LOW)
    if not TOGETHER:
        # ptxas moves this wait up between the exponentials.
        acc, pending = with_chunks(acc, alpha, pending, p, v_ring, n, factor, BLOCKWISE, 2, 3)
    if TOGETHER:
        next_p = rounded(p32, rules.BLOCK_N)
    wait_full(v_ring, n + 1)  # keeps ptxas from moving the wait below up
    if not TOGETHER:
        acc, _ = with_chunks(acc, alpha, pending, p, v_ring, n, factor, BLOCKWISE, 3, MANY)
        hand_back_multiplied(v_ring, n)
        next_p = rounded(p32, rules.BLOCK_N)
    return next_p, m_i, next_alpha, l_i, acc


@jit
def edge_scores(q, GROUP: gl.constexpr, k_ring, n, tile, place, keys, rules):
    """Computes the masked scores of tile n in bits, except for a factor, with no other work in flight."""
    of_tile = rules_of_tile(tile, keys, rules)
    wait_full(k_ring, n)
    take_turn(GROUP, rules.GROUPS)
    scores = scores_async(q, k_ring, n, zero_accumulator(rules.BLOCK_N))
    x = warpgroup_mma_wait(0, deps=[scores])
    end_turn(GROUP, rules.GROUPS)
    hand_back_multiplied(k_ring, n)
    return in_bits(x, tile, place, keys, of_tile, True)


@jit
def add_values(p, v_ring, n, acc, alpha, tile, keys, values, rules):
    """Returns acc times alpha plus the product of tile n's probabilities and values, with no other work in flight."""
    MANY: gl.constexpr = len(chunks_of(v_ring.pieces))
    p = operands(p, v_ring, rules.BLOCK_N)
    factor = of_values(values, tile, keys, rules)
    if starts_together(v_ring.pieces):
        return with_products(acc, alpha, value_products(p, v_ring, n), factor, values.BLOCK > 0)
    else:
        first = value_product(p, v_ring, n, 0)
        acc, _ = with_chunks(acc, alpha, first, p, v_ring, n, factor, values.BLOCK > 0, 0, MANY)
        return acc


@jit
def edge_step(
    q, GROUP: gl.constexpr, k_ring, v_ring, n, m_i, l_i, acc, tile, place, keys, values, rules
):  # fmt: skip
    """Processes tile n without overlap: the mask takes a tile's worth of registers, so two tiles do not fit."""
    x, scale = edge_scores(q, GROUP, k_ring, n, tile, place, keys, rules)
    m_i, alpha = settled(x, scale, m_i)
    p32, l_i = own_probabilities(x, scale, raised(m_i), alpha, l_i, True)
    wait_full(v_ring, n)
    acc = add_values(rounded(p32, rules.BLOCK_N), v_ring, n, acc, alpha, tile, keys, values, rules)
    hand_back_multiplied(v_ring, n)
    return m_i, l_i, acc


@jit
def first_state(v_ring, BLOCK_N: gl.constexpr):
    """Returns maxima and per-thread sums, and the accumulators, before the first tile."""
    nothing = own_maxima(zero_accumulator(BLOCK_N), BLOCK_N)
    of: gl.constexpr = chunks_of(v_ring.pieces)
    acc = ()
    for c in gl.static_range(len(of)):
        acc = acc + (zero_accumulator(of[c][2]),)
    return nothing - float("inf"), nothing, acc


@jit
def all_tiles(
    q, q_empty, GROUP: gl.constexpr, k_ring, v_ring, n, begin, whole_begin, whole_end, end, place,
    keys, values, rules,
):  # fmt: skip
    """Processes all key tiles [begin, end) of 64 queries, the last first. Tiles that every query sees, or all tiles
    with a window, are overlapped in pairs. Returns the softmax state and the number of the next tile of the rings."""
    m_i, l_i, acc = first_state(v_ring, rules.BLOCK_N)
    tile = end - 1
    last = whole_end  # the tile whose product with V is in flight
    first = whole_begin
    if rules.HAS_LOW:
        last = tile
        first = begin
    elif rules.HAS_HIGH:
        while tile > last:
            m_i, l_i, acc = edge_step(q, GROUP, k_ring, v_ring, n, m_i, l_i, acc, tile, place, keys, values, rules)
            n += 1
            tile -= 1
    is_last = tile == begin
    x, scale = edge_scores(q, GROUP, k_ring, n, tile, place, keys, rules)
    release(q_empty, GROUP, is_last, rules)
    m_i, alpha = settled(x, scale, m_i)
    p32, l_i = own_probabilities(x, scale, raised(m_i), alpha, l_i, True)
    p = rounded(p32, rules.BLOCK_N)
    wait_full(v_ring, n)
    for i in range(last - first):
        p, m_i, alpha, l_i, acc = step(
            q, q_empty, GROUP, k_ring, v_ring, n, p, m_i, alpha, l_i, acc, last - 1 - i, last - 1 - i == begin,
            whole_begin, whole_end, place, keys, values, rules,
        )  # fmt: skip
        n += 1
    acc = add_values(p, v_ring, n, acc, alpha, first, keys, values, rules)
    tma.store_wait(0)  # out's buffer is free again; the hand-back's barrier informs the other warps
    hand_back(v_ring, n)
    return n + 1, of_rows(m_i, x), l_i, acc


@aggregate
class Consumer:
    """State of a consumer.

    Args:
        out_maps, out_tiles: out's tensor maps and their buffers.
        values: the dequantization factors of V.
        q_tiles, q_full, q_empty: the queries of a block and their barriers.
        k_ring, v_ring, box: tiles of K and of V transposed, and the producer's messages.
    """

    out_maps: gl.tuple
    values: OfKeys
    q_tiles: gl.tuple
    out_tiles: gl.tuple
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_ring: Ring
    v_ring: Ring
    box: scheduler.Mailbox
    rules: Rules


@jit
def consumer(GROUP: gl.constexpr, role, queries: Queries, schedule: Schedule):
    """Computes attention for the GROUP-th 64 queries of each block that the producer announces."""
    q_tiles = role.q_tiles
    q_empty = role.q_empty
    k_ring = role.k_ring
    v_ring = role.v_ring
    box = role.box
    rules = role.rules
    row_layout: gl.constexpr = gl.SliceLayout(1, eight_bit_accumulator_layout(rules.BLOCK_N))
    n = 0  # tiles of K and V consumed so far
    messages = 0
    start_turns(GROUP, rules.GROUPS)
    scheduler.wait_posted(box, messages)
    work = scheduler.read(box, messages, schedule.seqlen_q, schedule.seqlen_k, rules.IS_VARLEN)
    while work.tile != scheduler.NO_MORE:
        keys = keys_of_sequence(work, rules)
        block_begin, block_end = tiles_of_block(keys, work, rules)
        place, begin, whole_begin, whole_end, end = place_of_group(work, keys, block_begin, block_end, GROUP, rules)
        if rules.HAS_ALIBI:
            slope = gl.load(queries.alibi_slopes_ptr + work.batch * queries.stride_alibi_b + work.head)
            place = Place(place.row_first, place.offset, slope * LOG2_E)
        values = of_head(role.values, rules.factors.group_size, work)
        of_queries = rules_of_queries(rules.factors, place.row_first, work, rules)
        n = skip_in_turn(GROUP, k_ring, v_ring, n, block_end - end, rules.GROUPS)
        mbarrier.wait(role.q_full.index(GROUP), messages & 1)
        q = ()
        for i in gl.static_range(len(q_tiles)):
            q = q + (matrix(q_tiles[i].index(GROUP)),)
        n, m_i, l_i, acc = all_tiles(
            q, q_empty, GROUP, k_ring, v_ring, n, begin, whole_begin, whole_end, end, place, keys, values,
            of_queries,
        )  # fmt: skip
        n = skip_in_turn(GROUP, k_ring, v_ring, n, begin - block_begin, rules.GROUPS)

        work = scheduler.read(box, messages, schedule.seqlen_q, schedule.seqlen_k, rules.IS_VARLEN)
        row_first = first_query(work, GROUP, rules)
        m_i = raised(m_i)
        l_row = gl.convert_layout(gl.sum(l_i, axis=1), row_layout)
        factor = gl.full([ROWS], 1.0, gl.float32, row_layout)
        if rules.HAS_SINKS:
            sink = gl.load(queries.sinks_ptr + work.head) * LOG2_E
            m_i, l_row, _, factor = with_sink(m_i, l_row, l_row, sink)
        saw_nothing, factor = factors_of_out(l_row, l_row, factor, rules)
        factor = factor * of_output(values)
        chunks = ()
        for c in gl.static_range(len(acc)):
            chunks = chunks + (gl.where(like(saw_nothing, acc[c]), 0.0, acc[c] * like(factor, acc[c])),)
        if rules.WRITE_LSE:
            store_lse(m_i, l_row, queries.lse_ptr, queries.stride_lb, queries.stride_lh, work, row_first, rules)
        if row_first < work.seqlen_q:
            out = as_pieces(chunks, v_ring)
            store_out(
                out, role.out_maps, role.out_tiles, queries.out_ptr, work, row_first, schedule.num_heads, GROUP, rules
            )
        scheduler.discard(box, messages)
        messages += 1
        scheduler.wait_posted(box, messages)
        work = scheduler.read(box, messages, schedule.seqlen_q, schedule.seqlen_k, rules.IS_VARLEN)
    last_turn(GROUP, rules.GROUPS)
    tma.store_wait(0)
