"""The consumer warpgroups of the Hopper forward, of 64 rows each.

A consumer walks the keys that its 64 rows see, from the last to the first. While it turns scores into probabilities,
the tensor cores multiply the previous tile's probabilities by its values. Under a causal mask the tiles at the diagonal
come first and are not overlapped. With a window, the tiles at its edges are overlapped like all others (mask_bias.py).
The same holds for all tiles of a boolean mask; tiles that it hides entirely are skipped.
"""

from warpwave.kernels.hopper import scheduler
from warpwave.kernels.hopper.dropout import drop, has_dropout, key_of, of_head
from warpwave.kernels.hopper.factors import (
    has_blocks_of_values,
    has_factors,
    in_range,
    of_output,
    rules_of_queries,
    rules_of_tile,
)
from warpwave.kernels.hopper.flash_fwd.float32_tiles import masked_split_tiles, split_tiles
from warpwave.kernels.hopper.flash_fwd.mask_bias import (
    aligned,
    has_bias_tiles,
    has_masked_steps,
    hide_by_position,
    is_added,
    is_far,
    is_masked,
    level_wanted,
    read_ahead,
    read_bias,
    scores_in_bits,
    shown_before,
    with_lines,
    without_unseen,
    word_of,
)
from warpwave.kernels.hopper.flash_fwd.splits import store_partial, tiles_of_split, work_of_split
from warpwave.kernels.hopper.flash_fwd.widener import queries_in_float16
from warpwave.kernels.hopper.groups import Queries, Schedule, Splits
from warpwave.kernels.hopper.parts import (
    LOG2_E,
    ROWS,
    Ring,
    accumulator_layout,
    arrive_alone,
    finished_scores,
    hand_back,
    hand_back_multiplied,
    like,
    matrix,
    operand,
    scores_async,
    skip,
    values_async,
    wait_for,
    wait_full,
    zero_accumulator,
    zero_scores,
)
from warpwave.kernels.hopper.rows import store_out, zero_head, zero_values
from warpwave.kernels.hopper.serial import serial_tiles, too_wide_to_overlap
from warpwave.kernels.hopper.softmax import (
    LOWER,
    factors_of_out,
    of_rows,
    own_maxima,
    own_probabilities,
    rescaled,
    rounding_of_the_largest,
    settled_maximum,
    store_lse,
    with_sink,
)
from warpwave.kernels.hopper.split_float32 import (
    inverse_of_values,
    is_float32,
    is_scaled,
    scaled_rules,
    store_float32,
    wait_for_launch_before,
)
from warpwave.kernels.hopper.token_factors import has_token_factors
from warpwave.kernels.hopper.visible import (
    Place,
    Rules,
    first_query,
    heads_of_rows,
    keys_of_sequence,
    place_of_group,
)
from warpwave.runtime.gluon_or_stub import (
    aggregate,
    gl,
    jit,
    mbarrier,
    tma,
    with_fields,
)


@jit
def step(
    q, q_empty, GROUP: gl.constexpr, k_ring, v_ring, n, p, m_i, lead, l_i, acc, tile, is_last, whole_begin, whole_end,
    place, keys, rules,
):  # fmt: skip
    """Computes the scores of tile n + 1 and, while taking their softmax, the product of tile n's probabilities and
    values."""
    ahead = read_ahead(tile, place, keys, rules, False)
    wait_full(k_ring, n + 1)
    scores = scores_async(q, k_ring, n + 1, zero_scores(k_ring, rules.BLOCK_N))
    pending = values_async(p, v_ring, n, acc)
    ahead = read_bias(ahead, place, k_ring, n + 1, rules)
    x = finished_scores(scores, len(pending))
    hand_back_keys(k_ring, n + 1, place)
    release(q_empty, GROUP, is_last, rules)
    x, scale = scores_in_bits(x, ahead, tile, place, keys, rules_of_tile(n + 1, rules), False)
    if rules.HAS_LOW and not is_masked(place):  # noqa: SIM102 (known when compiled, and the other is not)
        if (tile < whole_begin) | (tile >= whole_end):
            x = hide_by_position(x, tile, place, keys, rules)
    m_i, alpha, lead = settled_maximum(x, scale, m_i, lead)
    hand_back_bias(k_ring, n + 1, place)
    if rules.VALUES_FIRST:
        # With the rescale before them, the exponentials and the conversions of their results form one basic block, and
        # ptxas interleaves the conversions with the exponentials: 3 % at head_dim 64.
        wait_step_values(v_ring, n + 1, tile, place, keys, rules)
        acc = wait_for(pending)
        hand_back_multiplied(v_ring, n)
        acc = rescaled(acc, alpha)
        p32, l_i = own_probabilities(x, scale, m_i, alpha, l_i, has_masked_steps(place, rules), rules.RAISES)
    else:
        # This position keeps ptxas from hoisting the wait for wgmma above the exponentials (tests/compile check the
        # order).
        p32, l_i = own_probabilities(x, scale, m_i, alpha, l_i, has_masked_steps(place, rules), rules.RAISES)
        wait_step_values(v_ring, n + 1, tile, place, keys, rules)
        acc = wait_for(pending)
        hand_back_multiplied(v_ring, n)
        acc = rescaled(acc, alpha)
    return operand(dropped(p32, tile, place, keys, rules), v_ring), m_i, lead, l_i, acc


@jit
def dropped(p, tile, place, keys, rules):
    """Returns the probabilities of a tile with zeros where dropout drops them. Their sum was taken before."""
    if has_dropout(rules.dropout):
        p = drop(p, rules.dropout, place.row_first, keys.begin + tile * rules.BLOCK_N, False, False)
    return p


@jit
def hand_back_keys(k_ring, n, place):
    """Hands back a tile of K once its products are finished, unless a bias was loaded with it."""
    if not has_bias_tiles(place):
        hand_back_multiplied(k_ring, n)


@jit
def hand_back_bias(k_ring, n, place):
    """Hands back a tile of K with its bias, after the maximum of the tile's scores has been settled.

    The maximum needs all of the bias, so every load from shared memory has returned. An arrival does not wait for
    loads: when it came between them and their use, the copy engine overwrote some that were still under way, and 1 of
    20 calls had a wrong row (docs/notes/hopper.md).
    """
    if has_bias_tiles(place):
        hand_back(k_ring, n)


@jit
def release(q_empty, GROUP: gl.constexpr, is_last, rules):
    """Releases Q after the scores of the last tile, unless out reuses its memory. The next block's loads then overlap
    with the rest of this block. Compared with releasing after the last softmax: 2 to 6 % at 16 x 1024."""
    if rules.OWN_OUT:  # noqa: SIM102 (known when compiled, and the other is not)
        if is_last:
            arrive_alone(q_empty.index(GROUP))


@jit
def edge_scores(q, k_ring, n, tile, place, keys, rules):
    """Computes the masked scores of tile n in bits, except for a factor, with no other work in flight."""
    ahead = read_ahead(tile, place, keys, rules, True)
    wait_full(k_ring, n)
    scores = scores_async(q, k_ring, n, zero_scores(k_ring, rules.BLOCK_N))
    ahead = read_bias(ahead, place, k_ring, n, rules)
    x = finished_scores(scores, 0)
    hand_back_keys(k_ring, n, place)
    return scores_in_bits(x, ahead, tile, place, keys, rules_of_tile(n, rules), True)


@jit
def wait_step_values(v_ring, n, tile, place, keys, rules):
    """Waits for V of a tile that does not pass the end of its sequence. With dropout or factors of blocks of keys, the
    first tile of a window may begin before the first visible key; a call with a mask or bias repeats the block instead
    (mask_bias.py)."""
    wait_full(v_ring, n)
    if rules.HAS_LOW and (has_dropout(rules.dropout) or rules.ALIGN_KEYS) and not is_added(place):
        unseen = gl.maximum(keys.low, 0) - keys.begin
        if (tile == 0) & (unseen > 0):
            zero_head(v_ring.pieces, n % v_ring.stages, unseen, rules.BLOCK_N if rules.ALIGN_KEYS else 16)


@jit
def wait_values(v_ring, n, tile, place, keys, rules):
    """Waits for V of a tile that may pass the end of its sequence."""
    wait_step_values(v_ring, n, tile, place, keys, rules)
    if rules.IS_VARLEN:
        rows_used = keys.end - keys.begin - tile * rules.BLOCK_N
        if rows_used < rules.BLOCK_N:
            zero_values(v_ring, n, rows_used)


@jit
def edge_step(q, k_ring, v_ring, n, m_i, lead, l_i, acc, tile, place, keys, rules):
    """Processes tile n without overlap: the mask takes a tile's worth of registers, so two tiles do not fit."""
    without_unseen(v_ring, n, tile, place, keys, rules)
    x, scale = edge_scores(q, k_ring, n, tile, place, keys, rules)
    m_i, alpha, lead = settled_maximum(x, scale, m_i, lead)
    hand_back_bias(k_ring, n, place)
    acc = rescaled(acc, alpha)
    p32, l_i = own_probabilities(x, scale, m_i, alpha, l_i, True, rules.RAISES)
    wait_values(v_ring, n, tile, place, keys, rules)
    acc = wait_for(values_async(operand(dropped(p32, tile, place, keys, rules), v_ring), v_ring, n, acc))
    hand_back_multiplied(v_ring, n)
    return m_i, lead, l_i, acc


@jit
def first_state(v_ring, BLOCK_N: gl.constexpr):
    """Returns maximum, lead and per-thread sums, and the accumulator, before the first tile."""
    nothing = own_maxima(zero_accumulator(BLOCK_N), BLOCK_N)
    acc = ()
    for i in gl.static_range(len(v_ring.pieces)):
        acc = acc + (zero_accumulator(v_ring.pieces[i].shape[-1]),)
    return nothing - float("inf"), nothing, nothing, acc


@jit
def overlapped_tiles(
    q, q_empty, GROUP: gl.constexpr, k_ring, v_ring, n, begin, whole_begin, whole_end, end, place, keys, rules
):  # fmt: skip
    """Processes all key tiles [begin, end) of 64 rows, the last first. Tiles that every query sees, or all tiles
    with a window, are overlapped in pairs. Returns the softmax state and the number of the next tile of the rings."""
    # Tiles at the diagonal and the ragged end. The last one's product with V is left in flight.
    m_i, lead, l_i, acc = first_state(v_ring, rules.BLOCK_N)
    tile = end - 1
    last = whole_end  # the tile whose product with V is in flight
    if rules.HAS_LOW:
        last = tile
        if is_added(place):  # noqa: SIM102
            if scheduler.is_careful(place.box, place.message):
                last = begin
    if (rules.HAS_HIGH and not rules.HAS_LOW) or is_added(place):
        while tile > last:
            m_i, lead, l_i, acc = edge_step(q, k_ring, v_ring, n, m_i, lead, l_i, acc, tile, place, keys, rules)
            n += 1
            tile -= 1
    without_unseen(v_ring, n, tile, place, keys, rules)
    is_last = tile == begin
    x, scale = edge_scores(q, k_ring, n, tile, place, keys, rules)
    release(q_empty, GROUP, is_last, rules)
    m_i, alpha, lead = settled_maximum(x, scale, m_i, lead)
    hand_back_bias(k_ring, n, place)
    p32, l_i = own_probabilities(x, scale, m_i, alpha, l_i, True, rules.RAISES)
    if (rules.HAS_HIGH and not rules.HAS_LOW) or is_added(place):
        acc = rescaled(acc, alpha)
    p = operand(dropped(p32, tile, place, keys, rules), v_ring)
    wait_values(v_ring, n, tile, place, keys, rules)
    # The other tiles, each overlapped with the previous tile's product.
    first = whole_begin
    if rules.HAS_LOW:
        first = begin
    for i in range(last - first):
        p, m_i, lead, l_i, acc = step(
            q, q_empty, GROUP, k_ring, v_ring, n, p, m_i, lead, l_i, acc, last - 1 - i, last - 1 - i == begin,
            whole_begin, whole_end, place, keys, rules,
        )  # fmt: skip
        n += 1
    pending = values_async(p, v_ring, n, acc)
    acc = wait_for(pending)
    tma.store_wait(0)  # out's buffer is free again; the hand-back's barrier informs the other warps
    hand_back(v_ring, n)
    return n + 1, of_rows(m_i, x), of_rows(lead, x), l_i, acc


@jit
def masked_tiles(q, q_empty, GROUP: gl.constexpr, k_ring, v_ring, n, begin, end, work, place, keys, rules):
    """Processes, like `overlapped_tiles`, the tiles of [begin, end) that a mask shows to the block, at least one."""
    m_i, lead, l_i, acc = first_state(v_ring, rules.BLOCK_N)
    beside = place.beside
    bits = scheduler.shown_last(place.box, place.message)
    word, _ = word_of(end - 1, keys, rules)
    tile, word, bits = shown_before(end, word, bits, begin, work, keys, beside, rules, 4)
    tile = gl.maximum(tile, begin)
    following, word, bits = shown_before(tile, word, bits, begin, work, keys, beside, rules, 4)
    while (following >= begin) & scheduler.is_careful(place.box, place.message):
        m_i, lead, l_i, acc = edge_step(q, k_ring, v_ring, n, m_i, lead, l_i, acc, tile, place, keys, rules)
        n += 1
        tile = following
        following, word, bits = shown_before(tile, word, bits, begin, work, keys, beside, rules, 4)
    without_unseen(v_ring, n, tile, place, keys, rules)
    x, scale = edge_scores(q, k_ring, n, tile, place, keys, rules)
    release(q_empty, GROUP, following < begin, rules)
    m_i, alpha, lead = settled_maximum(x, scale, m_i, lead)
    hand_back_bias(k_ring, n, place)
    p32, l_i = own_probabilities(x, scale, m_i, alpha, l_i, True, rules.RAISES)
    acc = rescaled(acc, alpha)
    p = operand(dropped(p32, tile, place, keys, rules), v_ring)
    wait_values(v_ring, n, tile, place, keys, rules)
    while following >= begin:
        tile = following
        following, word, bits = shown_before(tile, word, bits, begin, work, keys, beside, rules, 4)
        p, m_i, lead, l_i, acc = step(
            q, q_empty, GROUP, k_ring, v_ring, n, p, m_i, lead, l_i, acc, tile, following < begin, begin, end, place,
            keys, rules,
        )  # fmt: skip
        n += 1
    pending = values_async(p, v_ring, n, acc)
    acc = wait_for(pending)
    tma.store_wait(0)  # out's buffer is free again; the hand-back's barrier informs the other warps
    hand_back(v_ring, n)
    return n + 1, of_rows(m_i, x), of_rows(lead, x), l_i, acc


@aggregate
class Consumer:
    """State of a consumer.

    Args:
        out_maps, out_tiles: out's tensor maps and their buffers.
        inverses_ptr, q_inverses_ptr: inverse scales of K and V, and of Q, if float32 is scaled; else absent.
        q_tiles, q_full, q_empty: the queries of a block and their barriers.
        k_ring, v_ring, box: the rings that the producer fills, and its messages.
        beside: `mask_bias.Beside`, or () without a mask or bias.
    """

    out_maps: gl.tuple
    inverses_ptr: object
    q_inverses_ptr: object
    q_tiles: gl.tuple
    out_tiles: gl.tuple
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_ring: Ring
    v_ring: Ring
    box: scheduler.Mailbox
    rules: Rules
    beside: object


@jit
def store(out, role, out_ptr, work, row_first, num_heads, GROUP: gl.constexpr):
    """Stores 64 rows of out."""
    if is_float32(role.rules):
        store_float32(out, role.v_ring, out_ptr, work, row_first, num_heads, role.rules)
    elif row_first < work.seqlen_q:
        store_out(out, role.out_maps, role.out_tiles, out_ptr, work, row_first, num_heads, GROUP, role.rules)


@jit
def consumer(GROUP: gl.constexpr, role, queries: Queries, schedule: Schedule, splits: Splits):
    """Computes attention for the GROUP-th 64 rows of each block that the producer announces."""
    q_tiles = role.q_tiles
    q_empty = role.q_empty
    k_ring = role.k_ring
    v_ring = role.v_ring
    box = role.box
    rules = role.rules
    beside = role.beside
    BLOCK_N: gl.constexpr = rules.BLOCK_N
    scores_layout: gl.constexpr = accumulator_layout(BLOCK_N)
    row_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    if is_scaled(rules):
        wait_for_launch_before(128)
    dropout_key = key_of(rules.dropout)
    n = 0  # tiles of K and V consumed so far
    messages = 0
    scheduler.wait_posted(box, messages)
    work = scheduler.read(box, messages, schedule.seqlen_q, schedule.seqlen_k, rules.IS_VARLEN)
    while work.tile != scheduler.NO_MORE:
        keys = keys_of_sequence(work, rules)
        if is_added(beside):
            keys = aligned(keys)
        work, split = work_of_split(work, splits)
        block_begin, block_end, _ = tiles_of_split(keys, work, split, splits, rules)
        place, begin, whole_begin, whole_end, end = place_of_group(work, keys, block_begin, block_end, GROUP, rules)
        if rules.HAS_ALIBI:
            slope = gl.load(queries.alibi_slopes_ptr + work.batch * queries.stride_alibi_b + work.head)
            place = Place(place.row_first, place.offset, slope * LOG2_E)
        if is_added(beside):
            place = with_lines(place, beside, work, box, messages, GROUP, rules)
            if is_masked(beside):
                begin = block_begin
                end = block_end
            if scheduler.is_careful(box, messages):  # tiles without overlap
                whole_begin = begin
                whole_end = begin
        rules_of_head = rules
        if is_scaled(rules):
            rules_of_head = scaled_rules(
                role.inverses_ptr, role.q_inverses_ptr, work, GROUP, schedule.num_heads, schedule.group_size, rules
            )
        if has_factors(rules.factors):
            rules_of_head = rules_of_queries(rules.factors, place.row_first, work, rules)
        if has_dropout(rules.dropout):
            of_this_head = of_head(rules.dropout, dropout_key, work.batch, work.head)
            rules_of_head = with_fields(rules_of_head, dropout=of_this_head)
        n = skip(k_ring, v_ring, n, block_end - end)
        mbarrier.wait(role.q_full.index(GROUP), messages & 1)
        q = ()
        for i in gl.static_range(len(q_tiles)):
            q = q + (matrix(q_tiles[i].index(GROUP)),)
        if rules.NARROWS_QUERIES:
            q, power = queries_in_float16(q, (work.seqlen_q - place.row_first) * rules.HEADS)
            rules_of_head = with_fields(rules_of_head, scale=in_range(rules_of_head.scale * power))

        if rules.PARTS > 1:
            if is_masked(beside):
                n, m_i, lead, l_i, acc = masked_split_tiles(
                    q_tiles, GROUP, k_ring, v_ring, n, begin, end, work, place, keys, rules_of_head
                )
            else:
                n, m_i, lead, l_i, acc = split_tiles(
                    q_tiles, GROUP, k_ring, v_ring, n, begin, whole_begin, whole_end, end, place, keys, rules_of_head
                )
            mbarrier.arrive(q_empty.index(GROUP), count=1)
        elif too_wide_to_overlap(v_ring.pieces):
            n, m_i, lead, l_i, acc = serial_tiles(
                q_tiles, GROUP, k_ring, v_ring, n, begin, whole_begin, whole_end, end, place, keys, rules
            )
            if rules.OWN_OUT:
                tma.store_wait(0)  # out's buffer is free again; the barrier before the arrival informs all warps
                mbarrier.arrive(q_empty.index(GROUP), count=1)
        elif is_masked(beside):
            n, m_i, lead, l_i, acc = masked_tiles(
                q, q_empty, GROUP, k_ring, v_ring, n, begin, end, work, place, keys, rules_of_head
            )
        else:
            n, m_i, lead, l_i, acc = overlapped_tiles(
                q, q_empty, GROUP, k_ring, v_ring, n, begin, whole_begin, whole_end, end, place, keys, rules_of_head
            )
        n = skip(k_ring, v_ring, n, begin - block_begin)

        work = scheduler.read(box, messages, schedule.seqlen_q, schedule.seqlen_k, rules.IS_VARLEN)
        work, split = work_of_split(work, splits)
        row_first = first_query(work, GROUP, rules)
        l_row = gl.convert_layout(gl.sum(l_i, axis=1), row_layout)
        if rules.RAISES:
            l_row = l_row * LOWER
        l_out = l_row
        if rules.PARTS == 1 and not (has_blocks_of_values(rules.factors) or has_token_factors(rules.factors)):
            l_out = l_row + rounding_of_the_largest(lead, v_ring.pieces[0].dtype)
        factor = gl.full([ROWS], 1.0, gl.float32, row_layout)
        far = is_far(m_i)  # the sink's logit does not come from the bias
        if rules.HAS_SINKS:
            sink = gl.load(queries.sinks_ptr + heads_of_rows(work.head, gl.arange(0, ROWS, row_layout), rules)) * LOG2_E
            m_i, l_row, l_out, factor = with_sink(m_i, l_row, l_out, sink)
        saw_nothing, factor = factors_of_out(l_row, l_out, factor, rules)
        if rules.RAISES:
            factor = factor * LOWER
        if has_dropout(rules.dropout):
            factor = factor * rules.dropout.scale
        if has_factors(rules.factors):
            factor = factor * of_output(rules.factors, work)
        inverse = 1.0
        if is_scaled(rules):
            inverse = inverse_of_values(role.inverses_ptr, work, schedule.num_heads, schedule.group_size, rules.PARTS)
        out = ()
        for i in gl.static_range(len(acc)):
            out = out + (gl.where(like(saw_nothing, acc[i]), 0.0, acc[i] * like(factor, acc[i]) * inverse),)
        if rules.WRITE_LSE:
            store_lse(m_i, l_row, queries.lse_ptr, queries.stride_lb, queries.stride_lh, work, row_first, rules)
        if splits.COLUMNS > 0:
            store_partial(out, m_i, l_row, v_ring, work, split, row_first, schedule.num_heads, splits, rules)
        elif is_added(beside):
            wanted = level_wanted(out, saw_nothing, far, scheduler.careful_level(box, messages), beside)
            if wanted == 0:
                store(out, role, queries.out_ptr, work, row_first, schedule.num_heads, GROUP)
            else:
                scheduler.request_repeat(box, messages, wanted)
        else:
            store(out, role, queries.out_ptr, work, row_first, schedule.num_heads, GROUP)
        if not rules.OWN_OUT:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(GROUP), count=1)
        scheduler.discard(box, messages)
        messages += 1
        scheduler.wait_posted(box, messages)
        work = scheduler.read(box, messages, schedule.seqlen_q, schedule.seqlen_k, rules.IS_VARLEN)
    tma.store_wait(0)
