"""What the warps of the Hopper forward do: one producer warp, and consumer warpgroups of 64 queries each.

The producer draws tiles of queries and keeps the rings of K and V tiles full. A consumer walks the keys its 64 queries
see from the last to the first: the tiles that may need a mask at the diagonal or the ragged end come first, then those
that every query sees, then those at the left edge of a window. While it turns scores into probabilities, the tensor
cores multiply the probabilities of the tile before by its values.
"""

# No postponed annotations here: an aggregate's fields are checked against its annotations.

from warpwave.kernels.hopper import scheduler
from warpwave.kernels.hopper.compat import (
    aggregate,
    constexpr_function,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma,
    tma_load,
    tma_store,
    warpgroup_mma_wait,
)
from warpwave.kernels.hopper.parts import (
    LN_2,
    LOG2_E,
    drain,
    exp2,
    first_column,
    hand_back,
    load_tile,
    matrix,
    rescale,
    scores_async,
    tanh,
    tile_bytes,
    values_async,
    wait_full,
)

ROWS = gl.constexpr(64)  # of a consumer warpgroup: what one wgmma takes
# How far, in bits, a row's maximum may lag behind its largest score before the accumulator is rescaled: probabilities
# reach 2^4. Random scores of one variance hardly ever rise by 4 bits after the first tile.
LAG = gl.constexpr(4.0)


@aggregate
class Rules:
    """The options of a call that are the same for all its tiles, compile-time ones in capitals."""

    scale: gl.tensor  # softmax_scale * log2(e); with softcap, softmax_scale / softcap
    softcap_log2: gl.tensor
    window_left: gl.tensor
    window_right: gl.tensor
    GROUPS: gl.constexpr
    BLOCK_N: gl.constexpr
    HAS_LOW: gl.constexpr
    HAS_HIGH: gl.constexpr
    TOP_LEFT: gl.constexpr
    HAS_ALIBI: gl.constexpr
    HAS_SOFTCAP: gl.constexpr
    HAS_SINKS: gl.constexpr
    IS_VARLEN: gl.constexpr
    WRITE_LSE: gl.constexpr
    OWN_OUT: gl.constexpr
    VALUES_FIRST: gl.constexpr

    @constexpr_function
    def __init__(
        self,
        scale,
        softcap_log2,
        window_left,
        window_right,
        GROUPS,
        BLOCK_N,
        HAS_LOW,
        HAS_HIGH,
        TOP_LEFT,
        HAS_ALIBI,
        HAS_SOFTCAP,
        HAS_SINKS,
        IS_VARLEN,
        WRITE_LSE,
        OWN_OUT,
        VALUES_FIRST,
    ):
        self.scale = scale
        self.softcap_log2 = softcap_log2
        self.window_left = window_left
        self.window_right = window_right
        self.GROUPS = gl.constexpr(GROUPS)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.HAS_LOW = gl.constexpr(HAS_LOW)
        self.HAS_HIGH = gl.constexpr(HAS_HIGH)
        self.TOP_LEFT = gl.constexpr(TOP_LEFT)
        self.HAS_ALIBI = gl.constexpr(HAS_ALIBI)
        self.HAS_SOFTCAP = gl.constexpr(HAS_SOFTCAP)
        self.HAS_SINKS = gl.constexpr(HAS_SINKS)
        self.IS_VARLEN = gl.constexpr(IS_VARLEN)
        self.WRITE_LSE = gl.constexpr(WRITE_LSE)
        self.OWN_OUT = gl.constexpr(OWN_OUT)
        self.VALUES_FIRST = gl.constexpr(VALUES_FIRST)


# Which keys -----------------------------------------------------------------------------------------------------------


@aggregate
class Keys:
    """The keys of a sequence that some query sees, [begin, end), and the band: low <= key - query <= high."""

    begin: gl.tensor
    end: gl.tensor
    low: gl.tensor
    high: gl.tensor

    @constexpr_function
    def __init__(self, begin, end, low, high):
        self.begin = begin
        self.end = end
        self.low = low
        self.high = high


@jit
def keys_of_sequence(work, rules):
    """Tiles of keys start at `begin`: keys before it and from `end` on, which no query sees, are never multiplied."""
    offset = work.seqlen_k - work.seqlen_q
    low = offset - rules.window_left
    high = offset + rules.window_right
    if rules.TOP_LEFT:
        high = gl.minimum(high, 0)
    begin = gl.to_tensor(0)
    end = work.seqlen_k
    if rules.HAS_LOW:
        begin = gl.minimum(gl.maximum(low, 0), work.seqlen_k)
    if rules.HAS_HIGH:
        end = gl.maximum(gl.minimum(end, work.seqlen_q + high), begin)
    return Keys(begin, end, low, high)


@jit
def tiles_seen(keys, row_first, row_last, rules):
    """[begin, end) of the key tiles that rows row_first to row_last see something of; may be empty."""
    first = keys.begin
    last = keys.end
    if rules.HAS_LOW:
        first = gl.maximum(first, row_first + keys.low)
    if rules.HAS_HIGH:
        last = gl.minimum(last, row_last + keys.high + 1)
    begin = (first - keys.begin) // rules.BLOCK_N
    end = gl.cdiv(gl.maximum(last - keys.begin, 0), rules.BLOCK_N)
    return begin, end


@jit
def tiles_of_block(keys, work, rules):
    """The key tiles that come for a block of queries: what its rows see, and one where they see nothing, so that every
    block of queries is worked on alike; its scores are then all masked."""
    row_first = work.tile * ROWS * rules.GROUPS
    row_last = gl.minimum(row_first + ROWS * rules.GROUPS, work.seqlen_q) - 1
    begin, end = tiles_seen(keys, row_first, row_last, rules)
    none = end <= begin
    return gl.where(none, 0, begin), gl.where(none, 1, end)


@aggregate
class Place:
    """Where 64 queries of one head are: the first one, what to add to a query to get its own key, and ALiBi's slope."""

    row_first: gl.tensor
    offset: gl.tensor
    slope_log2: gl.tensor

    @constexpr_function
    def __init__(self, row_first, offset, slope_log2):
        self.row_first = row_first
        self.offset = offset
        self.slope_log2 = slope_log2


@jit
def place_of_group(work, keys, block_begin, block_end, GROUP: gl.constexpr, rules):
    """A consumer's queries, and the key tiles they see within those that come for the block.

    Returns:
        place.
        begin, end: key tiles to work on, one at least.
        whole_begin, whole_end: those between them need no mask. `end - 1` is left out, and gets one in any case.
    """
    row_first = (work.tile * rules.GROUPS + GROUP) * ROWS
    row_last = gl.minimum(row_first + ROWS, work.seqlen_q) - 1
    begin, end = tiles_seen(keys, row_first, row_last, rules)
    end = gl.minimum(gl.maximum(end, block_begin + 1), block_end)
    begin = gl.minimum(gl.maximum(begin, block_begin), end - 1)
    begin = gl.where(row_last < row_first, end - 1, begin)
    whole_end = end - 1
    whole_begin = begin
    if rules.HAS_HIGH:
        first_hidden = gl.minimum(keys.end, row_first + keys.high + 1) - keys.begin
        whole_end = gl.maximum(gl.minimum(whole_end, gl.maximum(first_hidden, 0) // rules.BLOCK_N), begin)
    if rules.HAS_LOW:
        last_hidden = gl.maximum(row_last + keys.low - keys.begin, 0)
        whole_begin = gl.minimum(gl.maximum(begin, gl.cdiv(last_hidden, rules.BLOCK_N)), whole_end)
    place = Place(row_first, work.seqlen_k - work.seqlen_q, gl.to_tensor(0.0))
    return place, begin, whole_begin, whole_end, end


# The producer ---------------------------------------------------------------------------------------------------------


@jit
def producer(q_maps, k_maps, v_maps, q_tiles, q_full, q_empty, k_ring, v_ring, box, schedule, rules):
    """Draws tiles of queries and loads what they need, K one tile ahead of V."""
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
                mbarrier.expect(q_full.index(g), tile_bytes(q_maps))
                for i in gl.static_range(len(q_maps)):
                    place = [batch, work.head, row + g * ROWS, first_column(q_maps, i)]
                    tma_load(q_maps[i], place, q_full.index(g), q_tiles[i].index(g))
                if g == 0:
                    load_tile(k_ring, k_maps, n, batch, kv_head, key + (end - 1) * rules.BLOCK_N)
            for j in range(1, end - begin):
                load_tile(k_ring, k_maps, n + 1, batch, kv_head, key + (end - 1 - j) * rules.BLOCK_N)
                load_tile(v_ring, v_maps, n, batch, kv_head, key + (end - j) * rules.BLOCK_N)
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
def in_bits(scores, tile, place, keys, rules, AT_EDGE: gl.constexpr):
    """Scores of one tile as the softmax takes them, and what is left to multiply them by.

    In tiles that need neither mask nor position the scale rides in the softmax's fused multiply-add. Elsewhere it is
    applied here: 0 * -inf, with a scale of 0, would be NaN.
    """
    layout: gl.constexpr = scores.type.layout
    scale = rules.scale
    if rules.HAS_SOFTCAP:
        scores = tanh(scores * scale) * rules.softcap_log2
        scale = 1.0
    elif rules.HAS_ALIBI or AT_EDGE:
        scores = scores * scale
        scale = 1.0
    if rules.HAS_ALIBI or AT_EDGE:
        key_first = keys.begin + tile * rules.BLOCK_N
        rows = place.row_first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        columns = gl.arange(0, rules.BLOCK_N, gl.SliceLayout(0, layout))
        if rules.HAS_ALIBI:
            own_key = rows + (place.offset - key_first)
            scores = scores - place.slope_log2 * gl.abs(columns[None, :] - own_key[:, None]).to(gl.float32)
        if AT_EDGE:
            # Two limits a row, so that a score costs a comparison with a constant each.
            last = gl.full([ROWS], keys.end - 1 - key_first, gl.int32, gl.SliceLayout(1, layout))
            if rules.HAS_HIGH:
                last = gl.minimum(last, rows + (keys.high - key_first))
            visible = columns[None, :] <= last[:, None]
            if rules.HAS_LOW:
                first = rows + (keys.low - key_first)
                visible = visible & (columns[None, :] >= first[:, None])
            scores = gl.where(visible, scores, float("-inf"))
    return scores, scale


@jit
def partial_sums(p, BLOCK_N: gl.constexpr):
    """Row sums that stay in their threads, [64, 8]: they are added across threads once, at the end."""
    return gl.sum(gl.reshape(p, [ROWS, BLOCK_N // 8, 8]), axis=1)


@jit
def new_maximum(scores, scale, m_i, m_top, MAYBE_EMPTY: gl.constexpr):
    """The maximum of the online softmax, one that lags, in bits and rounded once: unless a row's largest score m_top
    leads its maximum m_i by more than LAG, the maximum stays and the factor of what was summed is exactly 1.

    Returns:
        shift: what to subtract from scores.
        alpha: the factor of what was summed so far.
        m_new, m_top.
    """
    m_top = gl.maximum(m_top, gl.max(scores, axis=1) * scale)
    m_new = gl.where(m_top - m_i > LAG, m_top, m_i)
    shift = m_new
    if MAYBE_EMPTY:
        # A row that saw nothing keeps the maximum minus infinity; only what is subtracted becomes 0. Nothing was summed
        # for it, so that its factor need not be 0, and 1 spares the multiplication.
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = gl.where(m_i == float("-inf"), 1.0, exp2(m_i - shift))
    else:
        alpha = exp2(m_i - shift)
    return shift, alpha, m_new, m_top


@jit
def probabilities(scores, scale, shift, alpha, l_i, BLOCK_N: gl.constexpr):
    """Un-normalised, and the new sums."""
    p = exp2(scores * scale - shift[:, None])
    sums = partial_sums(p, BLOCK_N)
    return p, l_i * gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))[:, None] + sums


@jit
def rounding_of_the_largest(m_i, m_top, DTYPE: gl.constexpr):
    """What 16 bits added to the largest probability of a row, to be added to the sum that out is divided by.

    Kept relative to the row's true maximum it would be exactly 1. With one that lags it is rounded, and where it
    outweighs all others the output is off by as much: the worst row's error was 3 to 4 times the rounding model's, on
    sharp data. Divided by a sum with the same error it cancels, and 2.2 times remain.
    """
    largest = exp2(m_top - gl.where(m_i == float("-inf"), 0.0, m_i))
    return largest.to(DTYPE).to(gl.float32) - largest


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
def like(per_row, x):
    """[64] as a column beside the accumulator x."""
    return gl.convert_layout(per_row, gl.SliceLayout(1, x.type.layout))[:, None]


@jit
def zero_accumulator(WIDTH: gl.constexpr):
    """[64, WIDTH] of zeros."""
    return gl.zeros([ROWS, WIDTH], gl.float32, accumulator_layout(WIDTH))


@jit
def wait_for(pending):
    """The finished accumulators of all products under way."""
    if len(pending) == 1:
        acc = (warpgroup_mma_wait(0, deps=[pending[0]]),)
    elif len(pending) == 2:
        acc = warpgroup_mma_wait(0, deps=[pending[0], pending[1]])
    else:
        acc = warpgroup_mma_wait(0, deps=[pending[0], pending[1], pending[2]])
    return acc


@constexpr_function
def row_vectors(width):
    """A warpgroup's layout for [rows, width] that reads and writes rows in vectors of 16 bytes."""
    return gl.BlockedLayout([1, 8], [256 // int(width), int(width) // 8], [4, 1], [1, 0])


@jit
def zero_values(v_ring, n, rows_used, BLOCK_N: gl.constexpr):
    """Zeroes the rows of a V tile behind its sequence: a tensor map stops at the end of the packed tensor only, and
    a probability of 0 times another sequence's NaN is NaN. Each consumer does it for itself; they write the same."""
    for i in gl.static_range(len(v_ring.pieces)):
        v = matrix(v_ring.pieces[i].index(n % v_ring.stages))
        for first in gl.static_range(0, BLOCK_N, 16):  # few rows at a time, for the sake of registers
            if first + 16 > rows_used:
                zero_rows(v.slice(first, 16, dim=0), rows_used - first)
    fence_async_shared()


@jit
def zero_rows(x, rows_used):
    """Zeroes the rows of x, in shared memory, from `rows_used` on."""
    layout: gl.constexpr = row_vectors(x.shape[1])
    used = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout)) < rows_used
    values = x.load(layout)
    x.store(gl.where(used[:, None], values, gl.zeros_like(values)))


@jit
def store_out(out, out_maps, out_tiles, out_ptr, work, row, num_heads, GROUP: gl.constexpr, rules):
    """The output tile through shared memory: by TMA, which stops at the tensor's end; where a packed sequence ends
    inside the tile, by masked stores, for behind it lie another sequence's rows."""
    for i in gl.static_range(len(out_maps)):
        matrix(out_tiles[i].index(GROUP)).store(out[i].to(out_maps[i].dtype))
    fence_async_shared()
    rows_left = work.seqlen_q - row
    for i in gl.static_range(len(out_maps)):
        if rules.IS_VARLEN:
            if rows_left >= ROWS:
                place = [0, work.head, work.q_begin + row, first_column(out_maps, i)]
                tma_store(out_maps[i], place, out_tiles[i].index(GROUP))
            else:
                store_rows(
                    matrix(out_tiles[i].index(GROUP)), out_ptr, work.q_begin + row, rows_left, work.head, num_heads,
                    out_maps[i].shape[3].to(gl.int64), first_column(out_maps, i),
                )  # fmt: skip
        else:
            tma_store(out_maps[i], [work.batch, work.head, row, first_column(out_maps, i)], out_tiles[i].index(GROUP))


@jit
def store_rows(x, out_ptr, row, rows_left, head, num_heads, head_dim_v, column):
    """The first rows of a piece, to rows and columns of one head of a contiguous (total_q, num_heads, head_dim_v)."""
    layout: gl.constexpr = row_vectors(x.shape[1])
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    offsets = ((row + rows).to(gl.int64) * num_heads + head)[:, None] * head_dim_v + columns[None, :]
    inside = (rows < rows_left)[:, None] & (columns < head_dim_v)[None, :]
    gl.store(out_ptr + offsets, x.load(layout), mask=inside)


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

        # Tiles at the diagonal and the ragged end. Of the last, the product with V is left under way.
        m_i = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
        m_top = m_i
        l_i = partial_sums(zero_accumulator(BLOCK_N), BLOCK_N)
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
        p32, l_i = probabilities(x, 1.0, shift, alpha, l_i, BLOCK_N)
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
        n = skip(k_ring, v_ring, n, begin - block_begin)

        work = scheduler.read(box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN)
        row_first = (work.tile * rules.GROUPS + GROUP) * ROWS
        l_row = gl.convert_layout(gl.sum(l_i, axis=1), row_layout)
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
        if row_first < work.seqlen_q:
            store_out(out, out_maps, out_tiles, out_ptr, work, row_first, num_heads, GROUP, rules)
        if not rules.OWN_OUT:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(GROUP), count=1)
        scheduler.discard(box, messages)
        messages += 1
        scheduler.wait_posted(box, messages)
        work = scheduler.read(box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN)
    tma.store_wait(0)


@constexpr_function
def accumulator_layout(width):
    """How wgmma lays 64 rows of `width` float32 over a warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, int(width), 16])
