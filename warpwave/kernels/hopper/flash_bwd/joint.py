"""The joint launch of dQ, dK and dV, for head_dim up to 128: five products a tile.

A block owns 128 keys of one kv head, 64 for each of two consumer warpgroups, and walks the queries of the heads that
read them, or of its share of these heads. Scores are computed transposed, keys by queries, so that P and dS are the
register operands of dV and dK:

    S^T = K Q^T,  dP^T = V dO^T;   P^T = exp(S^T - lse),  dS^T = P^T (dP^T - delta);   dV += P^T dO,  dK += dS^T Q

dQ needs the keys of both groups: dS goes through shared memory, each group multiplies its share of dQ, and a warp adds
it to float32 sums in memory by TMA (turns.py). A sum lies in memory in the order in which wgmma holds it in registers
(rows.py undoes that).

Shah et al., "FlashAttention-3" (2024), appendix B.1; Dao, "FlashAttention-2" (2023), algorithm 2.

Bound: tensor cores and shared memory take about as long (docs/notes/backward.md); latency between the products.
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
    tile_at,
)
from warpwave.kernels.hopper.flash_bwd.bias import Bias, BiasOfCall, bias_of
from warpwave.kernels.hopper.flash_bwd.producer import producer
from warpwave.kernels.hopper.flash_bwd.steps import (
    Heads,
    Results,
    Stream,
    gradient,
    hide_rows_behind,
    is_of_split,
    kept,
    mask_lines,
    mask_words,
    meet,
    probabilities,
    row_of,
    rows_of,
    signed,
    slope_of,
    statistics_of,
    step_of,
    store_rows,
    stream_of,
    wait_rows,
    walk_of,
    zero_keys_before,
    zero_queries_before,
    zero_tail,
)
from warpwave.kernels.hopper.flash_bwd.turns import Turns, pass_turn, rank_of, wait_for_turn
from warpwave.kernels.hopper.groups import Dropout, KeyGradients, KeySchedule, Mask
from warpwave.kernels.hopper.parts import (
    accumulator_layout,
    arrive_alone,
    barriers,
    buffers,
    halves_of,
    matrix,
    present,
    unseen_zero,
    zero_accumulator,
)
from warpwave.runtime.gluon_or_stub import (
    aggregate,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma,
    tma_add,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
    with_fields,
)

GROUPS = gl.constexpr(2)
GROUP_KEYS = gl.constexpr(64)
COLUMNS = gl.constexpr(64)  # of dK and dV that one copy stores: as wide as a swizzle
LINE = gl.constexpr(128)  # float32 of a line of dQ's sums
ADDERS = gl.constexpr(2)  # warps that add dQ: a tile takes one longer than the consumers take for a tile
READERS = gl.constexpr(4)  # of a message: two consumers and the warps that add dQ


@aggregate
class Tiles:
    """Shared memory of a block, and its barriers.

    Args:
        keys, values: K and V of the block's 128 keys, tuples of one; `full` signals that they arrived, `empty` that
            they may be replaced.
        queries, dout: rings of Q with the log-sum-exp, and of dO with delta.
        ds: dS in parts of 64 keys x 64 queries (`ds_part`): of two tiles, so that one barrier a tile suffices. dK and
            dV are stored through it.
        bias: its tiles are of 128 keys, in one stage.
        dq: each group's share of a tile's dQ, [2, lines, LINE] float32. `dq_full` has a barrier for each adding warp
            and group, `dq_empty` one for each group.
        box: the producer's messages.
    """

    keys: gl.tuple
    values: gl.tuple
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    queries: Stream
    dout: Stream
    ds: gl.shared_memory_descriptor
    bias: Bias
    dq: gl.shared_memory_descriptor
    dq_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor
    box: scheduler.Mailbox


# The warps that add dQ ------------------------------------------------------------------------------------------------


@jit
def adder(WARP: gl.constexpr, dq_map, turns, mask: Mask, tiles, seqlen_q, seqlen_k, heads, rules):
    """Adds each group's share of dQ to the sums in memory: of every ADDERS-th tile, from the WARP-th on."""
    LINES: gl.constexpr = tiles.dq.shape[1]
    n = 0
    messages = 0
    scheduler.wait_posted(tiles.box, messages)
    work = scheduler.read(tiles.box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN, 1)
    while work.tile != scheduler.NO_MORE:
        scheduler.discard(tiles.box, messages)
        band = band_of(work, rules)
        key_first = band.k_begin + work.tile * rules.BLOCK_N
        span = query_span(band, key_first, rules)
        count = span.end - span.begin
        steps = count * heads.group_size
        walk = walk_of(mask, work, key_first // rules.BLOCK_N, rules)
        if rules.HAS_MASK:
            steps = gl.load(walk)
        batch = work.batch
        if rules.IS_VARLEN:
            batch = 0
        first = first_statistic(work, rules.BLOCK_M, rules) // rules.BLOCK_M
        tiles_of_head = heads.rows // rules.BLOCK_M
        for i in range(steps):
            if n % ADDERS == WARP:
                head = work.head * heads.group_size + i // count
                tile = tile_at(span, i % count)
                if rules.HAS_MASK:
                    head, row_first = step_of(gl.load(walk + i + 1), work, heads, rules)
                    tile = gl.maximum(row_first - band.q_begin, 0) // rules.BLOCK_M
                place = (batch * heads.num_heads + head) * tiles_of_head + first + tile
                line = place * (2 * LINES)
                rank = rank_of(turns, work.tile, tile, band, rules)
                if not rules.HAS_MASK:  # noqa: SIM102 (known when compiled, and the other is not)
                    if rank > 0:
                        wait_for_turn(turns.counts_ptr + place, rank)
                for group in gl.static_range(GROUPS):
                    mbarrier.wait(tiles.dq_full.index(WARP * GROUPS + group), (n // ADDERS) & 1)
                    if rank == 0:
                        tma_store(dq_map, [line + group * LINES, 0], tiles.dq.index(group))
                    else:
                        tma_add(dq_map, [line + group * LINES, 0], tiles.dq.index(group))
                tma.store_wait(1)
                mbarrier.arrive(tiles.dq_empty.index(0), count=1)
                tma.store_wait(0)
                mbarrier.arrive(tiles.dq_empty.index(1), count=1)
                if turns.IS_DETERMINISTIC or rank == 0:
                    pass_turn(turns.counts_ptr + place, rank)
            n += 1
        messages += 1
        scheduler.wait_posted(tiles.box, messages)
        work = scheduler.read(tiles.box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN, 1)


# A consumer -----------------------------------------------------------------------------------------------------------


@jit
def put_dq(share, tiles, GROUP: gl.constexpr, n):
    """Hands a group's share of dQ, 64 x 64, to an adding warp: lines of LINE in the order of the registers, so that no
    bank of shared memory is written twice."""
    LINES: gl.constexpr = tiles.dq.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    x = gl.permute(gl.reshape(share, [4, 2, 8, share.shape[1] // 8, 4, 2]), [3, 0, 2, 4, 1, 5])
    x = gl.convert_layout(gl.reshape(x, [LINES, LINE]), layout, assert_trivial=True)
    mbarrier.wait(tiles.dq_empty.index(GROUP), (n & 1) ^ 1)
    tiles.dq.index(GROUP).store(x)
    fence_async_shared()
    mbarrier.arrive(tiles.dq_full.index(n % ADDERS * GROUPS + GROUP), count=1)


@jit
def ds_part(tiles, stage, GROUP: gl.constexpr, HALF: gl.constexpr, rules):
    """Returns the part of the buffers with dS of a group's keys and the HALF-th 64 queries of a tile."""
    return tiles.ds.index((stage * 2 + GROUP) * (rules.BLOCK_M // 64) + HALF)


@jit
def dq_async(zero, keys, tiles, n, HALF: gl.constexpr, rules):
    """Starts dQ of the HALF-th 64 queries of a tile: the product of both groups' dS with the columns in `keys`."""
    dq = zero
    for group in gl.static_range(GROUPS):
        ds = matrix(ds_part(tiles, n % 2, group, HALF, rules)).permute((1, 0))
        of_group = keys.slice(group * GROUP_KEYS, GROUP_KEYS, dim=0)
        dq = warpgroup_mma(ds, of_group, dq, use_acc=group > 0, is_async=True)
    return dq


@jit
def bias_of_group(
    tiles, n, work, head, row_first, key_first, GROUP: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr, rules
):
    """Returns the bias of a group's keys and of COUNT queries of tile n, from the FIRST-th on, as `bias.bias_of` does.
    The last queries of a tile release it."""
    bias = gl.to_tensor(0.0)
    if rules.BIAS == "cells":
        if FIRST == 0:
            mbarrier.wait(tiles.bias.full.index(0), n & 1)
        of_rows = matrix(tiles.bias.tiles.index(0)).slice(FIRST, COUNT, dim=0)
        of_keys = of_rows.slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=1)
        bias = of_keys.permute((1, 0)).load(accumulator_layout(COUNT))
        if FIRST + COUNT == rules.BLOCK_M:
            mbarrier.arrive(tiles.bias.empty.index(0), count=1)
    elif rules.BIAS != "":
        bias = bias_of(tiles.bias, 0, work, head, row_first + FIRST, key_first, True, COUNT, rules)
    return bias


@jit
def as_operand(x, dtype: gl.constexpr, WIDTH: gl.constexpr):
    """Returns x, [64, queries], as the register operand of a product with an accumulator of WIDTH columns."""
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator_layout(WIDTH), k_width=2)
    return gl.convert_layout(x.to(dtype), layout, assert_trivial=True)


@jit
def gradient_of_scores(p, cap, dp, delta, rules):
    """Returns dS^T of the products before the scale. Where P is 0, dP is finite, because rows outside the band are
    never loaded, or are zeros."""
    ds = gradient(p, dp, delta, rules)
    if rules.HAS_SOFTCAP:
        ds = ds * cap
    return ds


@jit
def wide_step(
    dk, dv, tiles, n, work, head, row_first, key_first, slope, words, band, GROUP: gl.constexpr, is_cut, rules
):  # fmt: skip
    """Processes a tile of 64 queries, head_dim 65 to 128. Each group multiplies half of dQ's columns."""
    dtype: gl.constexpr = tiles.keys[0].dtype
    WIDTH: gl.constexpr = tiles.keys[0].shape[-1]
    BLOCK_M: gl.constexpr = rules.BLOCK_M
    across: gl.constexpr = gl.SliceLayout(0, accumulator_layout(BLOCK_M))
    keys = matrix(tiles.keys[0].index(unseen_zero(n)))
    own_keys = keys.slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=0)
    own_values = matrix(tiles.values[0].index(unseen_zero(n))).slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=0)
    stage_q = tiles.queries.ring.empty.index(n % tiles.queries.ring.stages)
    stage_do = tiles.dout.ring.empty.index(n % tiles.dout.ring.stages)
    rows_used = band.q_end - row_first

    wait_rows(tiles.queries, n, rows_used, BLOCK_M, rules.IS_VARLEN, is_cut)
    zero_queries_before(tiles.queries, n, row_first, band, rules)
    q = rows_of(tiles.queries, n)
    zero = zero_accumulator(BLOCK_M)
    s = warpgroup_mma(own_keys, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    lse = statistics_of(tiles.queries, n, 0, BLOCK_M, across)
    wait_rows(tiles.dout, n, rows_used, BLOCK_M, rules.IS_VARLEN, is_cut)
    zero_queries_before(tiles.dout, n, row_first, band, rules)
    do = rows_of(tiles.dout, n)
    dp = warpgroup_mma(own_values, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    x = warpgroup_mma_wait(1, deps=[s])
    bias = bias_of_group(tiles, n, work, head, row_first, key_first, GROUP, 0, BLOCK_M, rules)
    p, cap = probabilities(x, lse[None, :], band, row_first, key_first, slope, words, bias, True, is_cut, rules)
    p = signed(p, row_first, key_first, True, rules)
    delta = statistics_of(tiles.dout, n, 0, BLOCK_M, across)
    y = warpgroup_mma_wait(0, deps=[dp])
    ds = gradient_of_scores(p, cap, y, delta[None, :], rules).to(dtype)
    matrix(ds_part(tiles, n % 2, GROUP, 0, rules)).store(ds)
    # The tensor cores multiply dV while dS is stored and the groups meet.
    dv_next = warpgroup_mma(as_operand(kept(p, rules), dtype, WIDTH), do, dv, is_async=True)
    fence_async_shared()
    meet()
    half = keys.slice(GROUP * (WIDTH // 2), WIDTH // 2, dim=1)
    dq = dq_async(zero_accumulator(WIDTH // 2), half, tiles, n, 0, rules)
    dk_next = warpgroup_mma(as_operand(ds, dtype, WIDTH), q, dk, is_async=True)
    dv = warpgroup_mma_wait(3, deps=[dv_next])
    arrive_alone(stage_do)
    share = warpgroup_mma_wait(1, deps=[dq])
    put_dq(share, tiles, GROUP, n)
    dk = warpgroup_mma_wait(0, deps=[dk_next])
    arrive_alone(stage_q)
    return dk, dv


@jit
def narrow_step(
    dk, dv, tiles, n, work, head, row_first, key_first, slope, words, band, GROUP: gl.constexpr, is_cut, rules
):  # fmt: skip
    """Processes a tile of 128 queries, head_dim up to 64. Each group multiplies dQ of 64 queries.

    S and dP are one product each: of 64 queries, wgmma would read shared memory all the time, of 128 three quarters of
    it. What follows is computed in two halves, so that their statistics do not take registers at the same time.
    """
    dtype: gl.constexpr = tiles.keys[0].dtype
    WIDTH: gl.constexpr = tiles.keys[0].shape[-1]
    HALF: gl.constexpr = rules.BLOCK_M // 2
    across: gl.constexpr = gl.SliceLayout(0, accumulator_layout(HALF))
    keys = matrix(tiles.keys[0].index(0))
    own_keys = keys.slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=0)
    own_values = matrix(tiles.values[0].index(0)).slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=0)
    stage_q = tiles.queries.ring.empty.index(n % tiles.queries.ring.stages)
    stage_do = tiles.dout.ring.empty.index(n % tiles.dout.ring.stages)
    rows_used = band.q_end - row_first

    wait_rows(tiles.queries, n, rows_used, rules.BLOCK_M, rules.IS_VARLEN, is_cut)
    zero_queries_before(tiles.queries, n, row_first, band, rules)
    q = rows_of(tiles.queries, n)
    q0 = q.slice(0, HALF, dim=0)
    q1 = q.slice(HALF, HALF, dim=0)
    zero = zero_accumulator(rules.BLOCK_M)
    s = warpgroup_mma(own_keys, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    wait_rows(tiles.dout, n, rows_used, rules.BLOCK_M, rules.IS_VARLEN, is_cut)
    zero_queries_before(tiles.dout, n, row_first, band, rules)
    do = rows_of(tiles.dout, n)
    do0 = do.slice(0, HALF, dim=0)
    do1 = do.slice(HALF, HALF, dim=0)
    dp = warpgroup_mma(own_values, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    x0, x1 = halves_of(warpgroup_mma_wait(1, deps=[s]))
    lse0 = statistics_of(tiles.queries, n, 0, HALF, across)
    bias = bias_of_group(tiles, n, work, head, row_first, key_first, GROUP, 0, HALF, rules)
    p0, cap0 = probabilities(x0, lse0[None, :], band, row_first, key_first, slope, words, bias, True, is_cut, rules)
    p0 = signed(p0, row_first, key_first, True, rules)
    lse1 = statistics_of(tiles.queries, n, HALF, HALF, across)
    half = words >> (HALF // 4)
    bias = bias_of_group(tiles, n, work, head, row_first, key_first, GROUP, HALF, HALF, rules)
    p1, cap1 = probabilities(
        x1, lse1[None, :], band, row_first + HALF, key_first, slope, half, bias, True, is_cut, rules
    )  # fmt: skip
    p1 = signed(p1, row_first + HALF, key_first, True, rules)
    y0, y1 = halves_of(warpgroup_mma_wait(0, deps=[dp]))
    delta0 = statistics_of(tiles.dout, n, 0, HALF, across)
    ds0 = gradient_of_scores(p0, cap0, y0, delta0[None, :], rules).to(dtype)
    matrix(ds_part(tiles, n % 2, GROUP, 0, rules)).store(ds0)
    delta1 = statistics_of(tiles.dout, n, HALF, HALF, across)
    ds1 = gradient_of_scores(p1, cap1, y1, delta1[None, :], rules).to(dtype)
    matrix(ds_part(tiles, n % 2, GROUP, 1, rules)).store(ds1)
    # As in wide_step.
    dv_next = warpgroup_mma(as_operand(kept(p0, rules), dtype, WIDTH), do0, dv, is_async=True)
    dv_next = warpgroup_mma(as_operand(kept(p1, rules), dtype, WIDTH), do1, dv_next, is_async=True)
    fence_async_shared()
    meet()
    dq = dq_async(zero_accumulator(WIDTH), keys, tiles, n, GROUP, rules)
    dk_next = warpgroup_mma(as_operand(ds0, dtype, WIDTH), q0, dk, is_async=True)
    dk_next = warpgroup_mma(as_operand(ds1, dtype, WIDTH), q1, dk_next, is_async=True)
    dv = warpgroup_mma_wait(4, deps=[dv_next])
    arrive_alone(stage_do)
    share = warpgroup_mma_wait(2, deps=[dq])
    put_dq(share, tiles, GROUP, n)
    dk = warpgroup_mma_wait(0, deps=[dk_next])
    arrive_alone(stage_q)
    return dk, dv


@jit
def step(
    dk, dv, tiles, n, work, head, row_first, key_first, slope, words, band, GROUP: gl.constexpr, is_cut, rules
):  # fmt: skip
    """Processes a tile of queries by the step for the head size."""
    if rules.BLOCK_M == 64:
        dk, dv = wide_step(
            dk, dv, tiles, n, work, head, row_first, key_first, slope, words, band, GROUP, is_cut, rules
        )  # fmt: skip
    else:
        dk, dv = narrow_step(
            dk, dv, tiles, n, work, head, row_first, key_first, slope, words, band, GROUP, is_cut, rules
        )  # fmt: skip
    return dk, dv


@jit
def store_result(
    x, maps, ptr, strides, tiles, work, GROUP: gl.constexpr, WIDTH: gl.constexpr, rules
):  # fmt: skip
    """Stores dK or dV of a group's 64 keys: by TMA through parts of dS, or row by row, as `steps.store_pieces`."""
    band = band_of(work, rules)
    key = work.k_begin + band.k_begin + work.tile * rules.BLOCK_N + GROUP * GROUP_KEYS
    key_end = work.k_begin + band.k_end
    stride_b, stride_h, stride_n = strides
    batch = work.batch
    if rules.IS_VARLEN:
        batch = gl.to_tensor(0)
    if is_of_split(ptr, tiles.keys):
        store_rows(x, ptr, stride_b, stride_h, stride_n, batch, work.head, key, key_end, WIDTH)
    elif rules.IS_VARLEN:
        if key + GROUP_KEYS <= key_end:
            store_by_map(x, maps[0], tiles, 0, work.head, key, GROUP, rules)
        else:
            store_rows(x, ptr, stride_b, stride_h, stride_n, batch, work.head, key, key_end, WIDTH)
    else:
        store_by_map(x, maps[0], tiles, work.batch, work.head, key, GROUP, rules)


@jit
def store_by_map(x, result_map, tiles, batch, head, key, GROUP: gl.constexpr, rules):
    """Stores 64 rows by TMA, which stops at the tensor's end."""
    if x.shape[1] == COLUMNS:
        parts = (x,)
    else:
        parts = halves_of(x)
    tma.store_wait(0)  # the compiler's barrier before the next store to the buffer informs the other warps
    for i in gl.static_range(len(parts)):
        matrix(ds_part(tiles, i, GROUP, 0, rules)).store(parts[i].to(result_map.dtype))
    fence_async_shared()
    for i in gl.static_range(len(parts)):
        tma_store(result_map, [batch, head, key, i * COLUMNS], ds_part(tiles, i, GROUP, 0, rules))


@jit
def zero_keys_behind(tiles, work, rules):
    """Zeroes the rows of K and V past the end of a packed sequence, which belong to another one."""
    band = band_of(work, rules)
    keys_used = band.k_end - (band.k_begin + work.tile * rules.BLOCK_N)
    if keys_used < rules.BLOCK_N:
        zero_tail(matrix(tiles.keys[0].index(0)), keys_used, rules.BLOCK_N)
        zero_tail(matrix(tiles.values[0].index(0)), keys_used, rules.BLOCK_N)


@jit
def zero_unseen_keys(tiles, work, rules):
    """Zeroes the rows of K and V before the first visible key."""
    band = band_of(work, rules)
    key_first = band.k_begin + work.tile * rules.BLOCK_N
    zero_keys_before(tiles.keys, 0, key_first, band, rules)
    zero_keys_before(tiles.values, 0, key_first, band, rules)


@jit
def walk_band(
    dk, dv, tiles, messages, n, dropout_key, results, GROUP: gl.constexpr, seqlen_q, seqlen_k, heads, rules
):  # fmt: skip
    """Adds to dK and dV what the tiles of the band contribute, of all heads of a block. Returns them and the number of
    the next tile."""
    # One loop over cut and whole tiles is half the code of two. Blocks under a band alternate between two loops, so at
    # head_dim 128 one is up to 1.2 times as fast. Without a band its rate is 0.93, and at head_dim 64 about 0.8.
    ONE_LOOP: gl.constexpr = rules.BLOCK_M == 64 and (rules.HAS_HIGH or rules.HAS_LOW)
    for h in range(heads.group_size):
        # Reading the message again is cheaper than keeping its words in registers through the loops.
        work = scheduler.read(tiles.box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN)
        band = band_of(work, rules)
        block_first = band.k_begin + work.tile * rules.BLOCK_N
        key_first = block_first + GROUP * GROUP_KEYS
        span = query_span(band, block_first, rules)
        slope = slope_of(
            results.alibi_slopes_ptr, results.stride_alibi_b, work, work.head * heads.group_size + h, rules
        )
        head = work.head * heads.group_size + h
        rules_of_head = with_fields(rules, dropout=of_head(rules.dropout, dropout_key, work.batch, head))
        steps = span.end - span.begin
        if ONE_LOOP:
            for i in range(steps):
                row_first = row_of(span, i, band, rules)
                cut = is_cut(span, i)
                dk, dv = step(
                    dk, dv, tiles, n, work, head, row_first, key_first, slope, 0, band, GROUP, cut, rules_of_head
                )  # fmt: skip
                n += 1
        else:
            # Cut tiles at the end of the queries and whole tiles, then cut tiles at their beginning.
            behind = span.end - span.whole_end
            upto = span.end - span.whole_begin
            for is_second in range(2):
                cut_end = gl.where(is_second == 0, behind, steps)
                for i in range(is_second * upto, cut_end):
                    row_first = row_of(span, i, band, rules)
                    dk, dv = step(
                        dk, dv, tiles, n, work, head, row_first, key_first, slope, 0, band, GROUP, True, rules_of_head
                    )  # fmt: skip
                    n += 1
                for i in range(cut_end, upto):
                    row_first = row_of(span, i, band, rules)
                    dk, dv = step(
                        dk, dv, tiles, n, work, head, row_first, key_first, slope, 0, band, GROUP, False, rules_of_head
                    )  # fmt: skip
                    n += 1
    return dk, dv, n


@jit
def walk_list(dk, dv, tiles, work, n, dropout_key, results, mask: Mask, GROUP: gl.constexpr, heads, rules):
    """As `walk_band`, of the tiles in which a mask shows a pair. Its words also hide what position hides."""
    band = band_of(work, rules)
    block_first = band.k_begin + work.tile * rules.BLOCK_N
    key_first = block_first + GROUP * GROUP_KEYS
    walk = walk_of(mask, work, block_first // rules.BLOCK_N, rules)
    lines = mask_lines(mask, work, key_first, work.seqlen_k, GROUP_KEYS, rules)
    steps = gl.load(walk)
    for i in range(steps):
        head, row_first = step_of(gl.load(walk + i + 1), work, heads, rules)
        words = mask_words(mask, lines, head, row_first, rules.BLOCK_M, rules)
        words = hide_rows_behind(words, key_first, work.seqlen_k, rules)  # beside K of zeros, P might be infinite
        slope = slope_of(results.alibi_slopes_ptr, results.stride_alibi_b, work, head, rules)
        rules_of_head = with_fields(rules, dropout=of_head(rules.dropout, dropout_key, work.batch, head))
        dk, dv = step(
            dk, dv, tiles, n, work, head, row_first, key_first, slope, words, band, GROUP, False, rules_of_head
        )  # fmt: skip
        n += 1
    return dk, dv, n


@jit
def consumer(
    GROUP: gl.constexpr, results, mask: Mask, tiles, seqlen_q, seqlen_k, heads, rules, HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Computes dK and dV of the GROUP-th 64 keys of each block, and its share of dQ."""
    WIDTH: gl.constexpr = tiles.keys[0].shape[-1]
    dropout_key = key_of(rules.dropout)
    n = 0  # tiles of queries processed so far
    messages = 0
    scheduler.wait_posted(tiles.box, messages)
    work = scheduler.read(tiles.box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN)
    while work.tile != scheduler.NO_MORE:
        dk = zero_accumulator(WIDTH)
        dv = zero_accumulator(WIDTH)
        mbarrier.wait(tiles.full.index(0), messages & 1)
        if rules.IS_VARLEN:
            zero_keys_behind(tiles, work, rules)
        zero_unseen_keys(tiles, work, rules)
        tma.store_wait(0)
        meet()  # the previous block's results have left the buffers of dS
        if rules.HAS_MASK:
            dk, dv, n = walk_list(dk, dv, tiles, work, n, dropout_key, results, mask, GROUP, heads, rules)
        else:
            dk, dv, n = walk_band(
                dk, dv, tiles, messages, n, dropout_key, results, GROUP, seqlen_q, seqlen_k, heads, rules
            )  # fmt: skip
        mbarrier.arrive(tiles.empty.index(0), count=1)
        work = scheduler.read(tiles.box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN)
        scheduler.discard(tiles.box, messages)
        meet()  # the other group's last dQ has read what these results overwrite
        if has_dropout(rules.dropout):
            dv = dv * rules.dropout.scale
        strides = (results.stride_dv_b, results.stride_dv_h, results.stride_dv_n)
        store_result(dv, results.dv_maps, results.dv_ptr, strides, tiles, work, GROUP, HEAD_DIM_V, rules)
        dk = dk * rules.softmax_scale
        strides = (results.stride_dk_b, results.stride_dk_h, results.stride_dk_n)
        store_result(dk, results.dk_maps, results.dk_ptr, strides, tiles, work, GROUP, HEAD_DIM, rules)
        messages += 1
        scheduler.wait_posted(tiles.box, messages)
        work = scheduler.read(tiles.box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN)
    tma.store_wait(0)


# The kernel -----------------------------------------------------------------------------------------------------------


@jit
def joint_kernel(
    q_map,
    k_map,
    v_map,
    dout_map,
    lse_map,
    delta_map,
    dq_map,
    dk_map,
    dv_map,
    bias_map,
    gradients: KeyGradients,
    schedule: KeySchedule,
    call_options: Options,
    dropout: Dropout,
    mask: Mask,
    bias: BiasOfCall,
    turns_ptr,
    counter_ptr,
    STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    IS_DETERMINISTIC: gl.constexpr,
):
    """Processes blocks of 128 keys of one kv head until the counter is exhausted. Tensor maps have the axes (batch,
    head, row, column), those of statistics (batch * head, row), that of dQ's sums (line, LINE). In the schedule keys
    take the place of queries (band.work_on_keys).
    """
    rules = Rules(call_options, of_call(dropout))
    heads = Heads(schedule.num_heads_q, schedule.group_size, call_options.statistic_rows)
    turns = Turns(turns_ptr, IS_DETERMINISTIC)
    dtype: gl.constexpr = q_map.dtype
    queries = stream_of((q_map,), lse_map, STAGES, GROUPS)
    dout = stream_of((dout_map,), delta_map, STAGES, GROUPS)
    words: gl.constexpr = scheduler.words_of(False)
    box = scheduler.Mailbox(
        gl.allocate_shared_memory(gl.int32, [words, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        barriers(2),
        barriers(2),
    )
    bias_maps = ()
    bias_tiles = queries.statistics
    bias_full = box.full
    bias_empty = box.empty
    if call_options.BIAS == "cells":
        bias_maps = (bias_map,)
        bias_tiles = buffers(bias_maps, 1)[0]
        bias_full = barriers(1)
        bias_empty = barriers(1)
        mbarrier.init(bias_full.index(0), count=1)
        mbarrier.init(bias_empty.index(0), count=GROUPS)
    tiles = Tiles(
        buffers((k_map,), 1),
        buffers((v_map,), 1),
        barriers(1),
        barriers(1),
        queries,
        dout,
        gl.allocate_shared_memory(dtype, [call_options.BLOCK_M // 16, 1, 1, 64, 64], gl.NVMMASharedLayout(128, 16, 4)),
        Bias(bias, bias_maps, (), bias_tiles, bias_full, bias_empty),
        gl.allocate_shared_memory(gl.float32, [GROUPS] + dq_map.block_type.shape, dq_map.layout),
        barriers(ADDERS * GROUPS),
        barriers(GROUPS),
        box,
    )
    mbarrier.init(tiles.full.index(0), count=1)
    mbarrier.init(tiles.empty.index(0), count=GROUPS)
    for i in gl.static_range(ADDERS * GROUPS):
        mbarrier.init(tiles.dq_full.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(tiles.dq_empty.index(i), count=1)
        mbarrier.init(box.full.index(i), count=1)
        mbarrier.init(box.empty.index(i), count=READERS)
    fence_async_shared()
    results = Results(gradients, present(dk_map, None, None), present(dv_map, None, None))
    seqlen_q = schedule.seqlen_k
    seqlen_k = schedule.seqlen_q
    maps = (q_map,), (k_map,), (v_map,), (dout_map,), lse_map, delta_map
    gl.warp_specialize(
        [
            (consumer, (0, results, mask, tiles, seqlen_q, seqlen_k, heads, rules, HEAD_DIM, HEAD_DIM_V)),
            (consumer, (1, results, mask, tiles, seqlen_q, seqlen_k, heads, rules, HEAD_DIM, HEAD_DIM_V)),
            (producer, (maps, mask, tiles, gradients, schedule, counter_ptr, heads, rules)),
            (adder, (0, dq_map, turns, mask, tiles, seqlen_q, seqlen_k, heads, rules)),
            (adder, (1, dq_map, turns, mask, tiles, seqlen_q, seqlen_k, heads, rules)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
