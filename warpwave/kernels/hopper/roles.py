"""What the warps of the Hopper forward do: one producer warp, and consumer warpgroups of 64 queries each.

The producer draws tiles of queries and keeps the rings of K and V tiles full. A consumer walks the keys its 64 queries
see from the last to the first: the tiles that may need a mask at the diagonal or the ragged end come first, then those
that every query sees, then those at the left edge of a window. While it turns scores into probabilities, the tensor
cores multiply the probabilities of the tile before by its values.
"""

from warpwave.kernels.hopper import scheduler
from warpwave.kernels.hopper.compat import (
    gl,
    jit,
    mbarrier,
    tma,
    tma_load,
    warpgroup_mma_wait,
)
from warpwave.kernels.hopper.parts import (
    LN_2,
    LOG2_E,
    ROWS,
    accumulator_layout,
    drain,
    exp2,
    first_column,
    hand_back,
    like,
    load_tile,
    matrix,
    rescale,
    scores_async,
    tile_bytes,
    values_async,
    wait_for,
    wait_full,
    zero_accumulator,
)
from warpwave.kernels.hopper.rows import store_out, zero_values
from warpwave.kernels.hopper.serial import serial_tiles, too_wide_to_overlap
from warpwave.kernels.hopper.softmax import (
    in_bits,
    new_maximum,
    partial_sums,
    probabilities,
    rounding_of_the_largest,
)
from warpwave.kernels.hopper.split_float32 import split_tiles, store_float32
from warpwave.kernels.hopper.visible import Place, keys_of_sequence, place_of_group, tiles_of_block

# The producer ---------------------------------------------------------------------------------------------------------


@jit
def producer(q_maps, k_maps, v_maps, q_tiles, q_full, q_empty, k_ring, v_ring, box, schedule, rules):
    """Draws tiles of queries and loads what they need, K one tile ahead of V where two tiles overlap."""
    n = 0  # tiles of K and V loaded so far
    messages = 0
    t = gl.program_id(0)
    while t < schedule.num_tiles:
        work = scheduler.tile_of(schedule, t, ROWS * rules.GROUPS, rules.HAS_HIGH, rules.IS_VARLEN)
        if scheduler.is_work(work, ROWS * rules.GROUPS, rules.IS_VARLEN):
            scheduler.post(box, messages, work, rules.IS_VARLEN)
            keys = keys_of_sequence(work, rules)
            begin, end = tiles_of_block(keys, work, rules)
            batch = work.batch
            if rules.IS_VARLEN:
                batch = 0
            kv_head = work.head // schedule.group_size
            row = work.q_begin + work.tile * ROWS * rules.GROUPS
            key = work.k_begin + keys.begin
            for g in gl.static_range(rules.GROUPS):
                mbarrier.wait(q_empty.index(g), (messages & 1) ^ 1)
                mbarrier.expect(q_full.index(g), tile_bytes(q_maps) * rules.PARTS)
                for part in gl.static_range(rules.PARTS):
                    for i in gl.static_range(len(q_maps)):
                        place = [batch, work.head * rules.PARTS + part, row + g * ROWS, first_column(q_maps, i)]
                        tma_load(q_maps[i], place, q_full.index(g), q_tiles[i].index(g * rules.PARTS + part))
                if g == 0:
                    load_tile(k_ring, k_maps, n, batch, kv_head, key + (end - 1) * rules.BLOCK_N)
            for j in range(1, end - begin):
                if rules.PARTS == 1:
                    load_tile(k_ring, k_maps, n + 1, batch, kv_head, key + (end - 1 - j) * rules.BLOCK_N)
                    load_tile(v_ring, v_maps, n, batch, kv_head, key + (end - j) * rules.BLOCK_N)
                else:  # in the order in which they are used: a ring may have a single stage
                    load_tile(v_ring, v_maps, n, batch, kv_head, key + (end - j) * rules.BLOCK_N)
                    load_tile(k_ring, k_maps, n + 1, batch, kv_head, key + (end - 1 - j) * rules.BLOCK_N)
                n += 1
            load_tile(v_ring, v_maps, n, batch, kv_head, key + begin * rules.BLOCK_N)
            n += 1
            messages += 1
        t = scheduler.draw(schedule.counter_ptr, t, schedule.num_tiles)
    drain(k_ring, n)
    drain(v_ring, n)
    zero = gl.to_tensor(0)
    scheduler.post(
        box,
        messages,
        scheduler.Work(gl.to_tensor(scheduler.NO_MORE), zero, zero, zero, zero, zero, zero),
        rules.IS_VARLEN,
    )


# A consumer -----------------------------------------------------------------------------------------------------------


@jit
def skip(k_ring, v_ring, n, count):
    """Hands back, unread, tiles that other groups of the block see and this one does not."""
    for _ in range(count):
        wait_full(k_ring, n)
        hand_back(k_ring, n)
        wait_full(v_ring, n)
        hand_back(v_ring, n)
        n += 1
    return n


@jit
def step(q, k_ring, v_ring, n, p, m_i, m_top, l_i, acc, tile, place, keys, rules):
    """Tile n + 1, which every query sees: its scores and, beside their softmax, the product of tile n's probabilities
    and values."""
    wait_full(k_ring, n + 1)
    scores = scores_async(q, k_ring, n + 1, zero_accumulator(rules.BLOCK_N))
    pending = values_async(p, v_ring, n, acc)
    x = warpgroup_mma_wait(len(pending), deps=[scores])
    hand_back(k_ring, n + 1)
    x, scale = in_bits(x, tile, place, keys, rules, False)
    shift, alpha, m_i, m_top = new_maximum(x, scale, m_i, m_top, False)
    if not rules.VALUES_FIRST:
        p32, l_i = probabilities(x, scale, shift, alpha, l_i, rules.BLOCK_N)
        # The spin loop of this wait ends the basic block. Without it ptxas hoists the wgmma wait below above the
        # exponentials, and the product of P and V overlaps nothing (tests/compile hold the order).
        wait_full(v_ring, n + 1)
        acc = wait_for(pending)
        hand_back(v_ring, n)
    else:
        # Three groups keep the tensor cores busy by themselves, and what each gives back early the others use.
        wait_full(v_ring, n + 1)
        acc = wait_for(pending)
        hand_back(v_ring, n)
        p32, l_i = probabilities(x, scale, shift, alpha, l_i, rules.BLOCK_N)
    return operand(p32, v_ring), m_i, m_top, l_i, rescaled(acc, alpha)


@jit
def edge_scores(q, k_ring, n, tile, place, keys, rules):
    """Masked scores of tile n in bits, with nothing under way beside them."""
    wait_full(k_ring, n)
    scores = scores_async(q, k_ring, n, zero_accumulator(rules.BLOCK_N))
    x = warpgroup_mma_wait(0, deps=[scores])
    hand_back(k_ring, n)
    x, _ = in_bits(x, tile, place, keys, rules, True)
    return x


@jit
def wait_values(v_ring, n, tile, keys, rules):
    """Waits for V of a tile that may reach behind its sequence."""
    wait_full(v_ring, n)
    if rules.IS_VARLEN:
        rows_used = keys.end - keys.begin - tile * rules.BLOCK_N
        if rows_used < rules.BLOCK_N:
            zero_values(v_ring, n, rows_used, rules.BLOCK_N)


@jit
def edge_step(q, k_ring, v_ring, n, m_i, m_top, l_i, acc, tile, place, keys, rules):
    """Tile n, one after another: a tile's worth of registers for the mask leaves no room to overlap two tiles."""
    x = edge_scores(q, k_ring, n, tile, place, keys, rules)
    shift, alpha, m_i, m_top = new_maximum(x, 1.0, m_i, m_top, True)
    p32, l_i = probabilities(x, 1.0, shift, alpha, l_i, rules.BLOCK_N)
    acc = rescaled(acc, alpha)
    wait_values(v_ring, n, tile, keys, rules)
    acc = wait_for(values_async(operand(p32, v_ring), v_ring, n, acc))
    hand_back(v_ring, n)
    return m_i, m_top, l_i, acc


@jit
def rescaled(acc, alpha):
    """Every piece of the accumulator times alpha, [64]."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        scaled = scaled + (rescale(acc[i], like(alpha, acc[i])),)
    return scaled


@jit
def operand(p, v_ring):
    """Probabilities as the product with V takes them: rounded, in the registers they are in."""
    layout: gl.constexpr = gl.DotOperandLayout(
        operand_index=0, parent=accumulator_layout(v_ring.pieces[0].shape[-1]), k_width=2
    )
    return gl.convert_layout(p.to(v_ring.pieces[0].dtype), layout, assert_trivial=True)


@jit
def overlapped_tiles(
    q, q_empty, GROUP: gl.constexpr, k_ring, v_ring, n, begin, whole_begin, whole_end, end, place, keys, rules
):  # fmt: skip
    """All key tiles of 64 queries, [begin, end), the last first: of those that every query sees two at a time are
    worked on. Returns the softmax's state and the number of the next tile of the rings."""
    # Tiles at the diagonal and the ragged end. Of the last, the product with V is left under way.
    m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, accumulator_layout(rules.BLOCK_N)))
    m_top = m_i
    l_i = partial_sums(zero_accumulator(rules.BLOCK_N), rules.BLOCK_N)
    acc = ()
    for i in gl.static_range(len(v_ring.pieces)):
        acc = acc + (zero_accumulator(v_ring.pieces[i].shape[-1]),)
    tile = end - 1
    if rules.HAS_HIGH:
        while tile > whole_end:
            m_i, m_top, l_i, acc = edge_step(q, k_ring, v_ring, n, m_i, m_top, l_i, acc, tile, place, keys, rules)
            n += 1
            tile -= 1
    x = edge_scores(q, k_ring, n, tile, place, keys, rules)
    shift, alpha, m_i, m_top = new_maximum(x, 1.0, m_i, m_top, True)
    p32, l_i = probabilities(x, 1.0, shift, alpha, l_i, rules.BLOCK_N)
    if rules.HAS_HIGH:
        acc = rescaled(acc, alpha)
    p = operand(p32, v_ring)
    wait_values(v_ring, n, tile, keys, rules)
    # Tiles that every query sees.
    for i in range(whole_end - whole_begin):
        p, m_i, m_top, l_i, acc = step(
            q, k_ring, v_ring, n, p, m_i, m_top, l_i, acc, whole_end - 1 - i, place, keys, rules
        )
        n += 1
    if rules.OWN_OUT and not rules.HAS_LOW:  # Q is done with: the next block's loads under the last product
        mbarrier.arrive(q_empty.index(GROUP), count=1)
    pending = values_async(p, v_ring, n, acc)
    acc = wait_for(pending)
    tma.store_wait(0)  # the buffer for out is free again; the hand-back's barrier tells it to the other warps
    hand_back(v_ring, n)
    n += 1
    # Tiles at the left edge of a window.
    if rules.HAS_LOW:
        for i in range(whole_begin - begin):
            m_i, m_top, l_i, acc = edge_step(
                q, k_ring, v_ring, n, m_i, m_top, l_i, acc, whole_begin - 1 - i, place, keys, rules
            )
            n += 1
        if rules.OWN_OUT:
            mbarrier.arrive(q_empty.index(GROUP), count=1)
    return n, m_i, m_top, l_i, acc


@jit
def consumer(
    GROUP: gl.constexpr, out_maps, out_ptr, lse_ptr, alibi_slopes_ptr, sinks_ptr, stride_alibi_b, stride_lb, stride_lh,
    num_heads, seqlen_q, seqlen_k, q_tiles, out_tiles, q_full, q_empty, k_ring, v_ring, box, rules,
):  # fmt: skip
    """Attention of 64 queries after another: the GROUP-th 64 of each block the producer announces."""
    BLOCK_N: gl.constexpr = rules.BLOCK_N
    scores_layout: gl.constexpr = accumulator_layout(BLOCK_N)
    row_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    n = 0  # tiles of K and V met so far
    messages = 0
    scheduler.wait_posted(box, messages)
    work = scheduler.read(box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN)
    while work.tile != scheduler.NO_MORE:
        keys = keys_of_sequence(work, rules)
        block_begin, block_end = tiles_of_block(keys, work, rules)
        place, begin, whole_begin, whole_end, end = place_of_group(work, keys, block_begin, block_end, GROUP, rules)
        if rules.HAS_ALIBI:
            slope = gl.load(alibi_slopes_ptr + work.batch * stride_alibi_b + work.head)
            place = Place(place.row_first, place.offset, slope * LOG2_E)
        n = skip(k_ring, v_ring, n, block_end - end)
        mbarrier.wait(q_full.index(GROUP), messages & 1)
        q = ()
        for i in gl.static_range(len(q_tiles)):
            q = q + (matrix(q_tiles[i].index(GROUP)),)

        if rules.PARTS > 1:
            n, m_i, m_top, l_i, acc = split_tiles(
                q_tiles, GROUP, k_ring, v_ring, n, begin, whole_begin, whole_end, end, place, keys, rules
            )
            mbarrier.arrive(q_empty.index(GROUP), count=1)
        elif too_wide_to_overlap(v_ring.pieces):
            n, m_i, m_top, l_i, acc = serial_tiles(
                q_tiles, GROUP, k_ring, v_ring, n, begin, whole_begin, whole_end, end, place, keys, rules
            )
            if rules.OWN_OUT:
                tma.store_wait(0)  # the buffer for out is free again; the barrier before the arrival tells all warps
                mbarrier.arrive(q_empty.index(GROUP), count=1)
        else:
            n, m_i, m_top, l_i, acc = overlapped_tiles(
                q, q_empty, GROUP, k_ring, v_ring, n, begin, whole_begin, whole_end, end, place, keys, rules
            )
        n = skip(k_ring, v_ring, n, begin - block_begin)

        work = scheduler.read(box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN)
        row_first = (work.tile * rules.GROUPS + GROUP) * ROWS
        l_row = gl.convert_layout(gl.sum(l_i, axis=1), row_layout)
        l_out = l_row
        if rules.PARTS == 1:
            l_out = l_row + rounding_of_the_largest(m_i, m_top, v_ring.pieces[0].dtype)
        factor = gl.full([ROWS], 1.0, gl.float32, row_layout)
        if rules.HAS_SINKS:
            # One more key, whose value is zero. It comes last: as the first maximum it would push the probabilities of
            # lower scores out of the range of 16 bits.
            sink_log2 = gl.load(sinks_ptr + work.head) * LOG2_E
            m_new = gl.maximum(m_i, sink_log2)
            m_shift = gl.where(m_new == float("-inf"), 0.0, m_new)
            factor = exp2(m_i - m_shift)
            sink = exp2(sink_log2 - m_shift)
            l_row = l_row * factor + sink
            l_out = l_out * factor + sink
            m_i = m_new
        # A row that saw no key has sum 0, or saw its sink alone: its output is 0, whatever its tile held.
        saw_nothing = l_row == 0.0
        if rules.HAS_SINKS:
            saw_nothing = saw_nothing | (factor == 0.0)
        factor = factor / gl.where(l_row == 0.0, 1.0, l_out)
        out = ()
        for i in gl.static_range(len(acc)):
            out = out + (gl.where(like(saw_nothing, acc[i]), 0.0, acc[i] * like(factor, acc[i])),)
        if rules.WRITE_LSE:
            rows = row_first + gl.arange(0, ROWS, row_layout)
            lse = gl.where(l_row == 0.0, float("-inf"), (m_i + gl.log2(l_row)) * LN_2)
            first = work.head.to(gl.int64) * stride_lh + work.q_begin
            if not rules.IS_VARLEN:
                first += work.batch.to(gl.int64) * stride_lb
            gl.store(lse_ptr + first + rows, lse, mask=rows < work.seqlen_q)
        if rules.PARTS > 1:
            store_float32(out, v_ring, out_ptr, work, row_first, num_heads, rules)
        elif row_first < work.seqlen_q:
            store_out(out, out_maps, out_tiles, out_ptr, work, row_first, num_heads, GROUP, rules)
        if not rules.OWN_OUT:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(GROUP), count=1)
        scheduler.discard(box, messages)
        messages += 1
        scheduler.wait_posted(box, messages)
        work = scheduler.read(box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN)
    tma.store_wait(0)
