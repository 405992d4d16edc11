"""The products of a tile of queries in the joint launch (joint.py), by head size."""

# No postponed annotations here: device functions' parameters are checked against them.

from warpwave.kernels.hopper.flash_bwd.bias import bias_of
from warpwave.kernels.hopper.flash_bwd.steps import (
    gradient,
    kept,
    matrices,
    meet,
    probabilities,
    rows_of,
    signed,
    statistics_of,
    wait_rows,
    zero_queries_before,
)
from warpwave.kernels.hopper.parts import (
    accumulator_layout,
    arrive_alone,
    halves_of,
    matrix,
    unseen_zero,
    wait_for,
    zero_accumulator,
)
from warpwave.runtime.gluon_or_stub import (
    constexpr_function,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

GROUPS = gl.constexpr(2)
GROUP_KEYS = gl.constexpr(64)
COLUMNS = gl.constexpr(64)  # as wide as a swizzle; of dK and dV, what one copy stores
LINE = gl.constexpr(128)  # float32 of a line of dQ's sums
ADDERS = gl.constexpr(2)  # warps that add dQ: a tile takes one longer than the consumers take for a tile


@jit
def put_dq(shares, tiles, GROUP: gl.constexpr, n):
    """Hands a group's share of dQ, pieces of 64 rows, to an adding warp: lines of LINE in the order of the registers,
    so that no bank of shared memory is written twice."""
    mbarrier.wait(tiles.dq_empty.index(GROUP), (n & 1) ^ 1)
    for i in gl.static_range(len(shares)):
        put_lines(shares[i], tiles.dq[i].index(GROUP))
    fence_async_shared()
    mbarrier.arrive(tiles.dq_full.index(n % ADDERS * GROUPS + GROUP), count=1)


@jit
def put_lines(x, buffer):
    """Stores a piece of a share of dQ as lines."""
    LINES: gl.constexpr = x.shape[0] * x.shape[1] // LINE
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    x = gl.permute(gl.reshape(x, [4, 2, 8, x.shape[1] // 8, 4, 2]), [3, 0, 2, 4, 1, 5])
    x = gl.convert_layout(gl.reshape(x, [LINES, LINE]), layout, assert_trivial=True)
    buffer.slice(0, LINES, dim=0).store(x)


@jit
def ds_part(tiles, stage, GROUP: gl.constexpr, HALF: gl.constexpr, rules):
    """Returns the part of the buffers with dS of a group's keys and the HALF-th 64 queries of a tile."""
    return tiles.ds.index((stage * 2 + GROUP) * (rules.BLOCK_M // 64) + HALF)


@constexpr_function
def first_of_share(part, piece, widths):
    """Returns the column of a piece of K at which the part-th share of dQ begins. The first share has 64 columns of the
    first piece; of a second piece both have as many."""
    return int(part) * (int(COLUMNS) if int(piece) == 0 else int(widths[int(piece)]))


@jit
def dq_async(keys, tiles, n, HALF: gl.constexpr, PART: gl.constexpr, WIDTHS: gl.constexpr, rules):
    """Starts dQ of the HALF-th 64 queries of a tile, in the PART-th share of columns: the product of both groups' dS
    with K. Returns its pieces."""
    dq = ()
    for i in gl.static_range(len(WIDTHS)):
        x = zero_accumulator(WIDTHS[i])
        share = keys[i].slice(first_of_share(PART, i, WIDTHS), WIDTHS[i], dim=1)
        for group in gl.static_range(GROUPS):
            ds = matrix(ds_part(tiles, n % 2, group, HALF, rules)).permute((1, 0))
            of_group = share.slice(group * GROUP_KEYS, GROUP_KEYS, dim=0)
            x = warpgroup_mma(ds, of_group, x, use_acc=group > 0, is_async=True)
        dq = dq + (x,)
    return dq


@jit
def bias_of_group(
    tiles, n, work, head, row_first, key_first, GROUP: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr, rules
):
    """Returns the bias of a group's keys and of COUNT queries of tile n, from the FIRST-th on, as `bias.bias_of`
    does."""
    bias = gl.to_tensor(0.0)
    if rules.BIAS == "cells":
        if FIRST == 0:
            mbarrier.wait(tiles.bias.full.index(0), n & 1)
        of_rows = matrix(tiles.bias.tiles.index(0)).slice(FIRST, COUNT, dim=0)
        of_keys = of_rows.slice(GROUP * GROUP_KEYS, GROUP_KEYS, dim=1)
        bias = of_keys.permute((1, 0)).load(accumulator_layout(COUNT))
    elif rules.BIAS != "":
        bias = bias_of(tiles.bias, 0, work, head, row_first + FIRST, key_first, True, COUNT, rules)
    return bias


@jit
def release_bias(tiles, rules):
    """Releases a tile's bias behind `meet`: every warp has stored dS, for which its loads of the bias have returned. An
    arrival does not wait for loads (flash_fwd/consumer.hand_back_bias)."""
    if rules.BIAS == "cells":
        arrive_alone(tiles.bias.empty.index(0))


@jit
def no_gradient(PIECES: gl.constexpr):
    """Returns dK or dV of 64 keys before the first tile, a tuple of pieces."""
    zeros = ()
    for i in gl.static_range(len(PIECES)):
        zeros = zeros + (zero_accumulator(PIECES[i]),)
    return zeros


@jit
def columns_of(pieces, I: gl.constexpr, PIECES: gl.constexpr):
    """Returns the columns of the I-th piece of a product: a loaded piece, or columns of the only loaded one."""
    if len(pieces) == 1:
        part = pieces[0].slice(COLUMNS * I, PIECES[I], dim=1)
    else:
        part = pieces[I]
    return part


@jit
def scores_over(keys, rows, zero, PIECES: gl.constexpr):
    """Starts the product of keys with rows of Q or dO, tuples of loaded pieces."""
    x = zero
    for i in gl.static_range(len(PIECES)):
        of_rows = columns_of(rows, i, PIECES).permute((1, 0))
        x = warpgroup_mma(columns_of(keys, i, PIECES), of_rows, x, use_acc=i > 0, is_async=True)
    return x


@jit
def add_product(x, rows, sums, dtype: gl.constexpr, PIECES: gl.constexpr):
    """Starts the product of x, [64 keys, queries], with rows of Q or dO, which is added to dK or dV."""
    found = ()
    for i in gl.static_range(len(PIECES)):
        of_rows = columns_of(rows, i, PIECES)
        found = found + (warpgroup_mma(as_operand(x, dtype, PIECES[i]), of_rows, sums[i], is_async=True),)
    return found


@jit
def add_shared_product(x, rows, sums, PIECES: gl.constexpr):
    """As `add_product`, of x in shared memory."""
    found = ()
    for i in gl.static_range(len(PIECES)):
        found = found + (warpgroup_mma(x, columns_of(rows, i, PIECES), sums[i], is_async=True),)
    return found


@jit
def rows_from(pieces, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Returns COUNT rows of each piece of a tile, from row FIRST on."""
    found = ()
    for i in gl.static_range(len(pieces)):
        found = found + (pieces[i].slice(FIRST, COUNT, dim=0),)
    return found


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
    """Processes a tile of 64 queries of at most 128 columns. Each group multiplies its share of dQ's columns."""
    dtype: gl.constexpr = tiles.keys[0].dtype
    SHARE: gl.constexpr = tiles.dq_shares[GROUP]
    BLOCK_M: gl.constexpr = rules.BLOCK_M
    across: gl.constexpr = gl.SliceLayout(0, accumulator_layout(BLOCK_M))
    keys = matrices(tiles.keys, unseen_zero(n))
    own_keys = rows_from(keys, GROUP * GROUP_KEYS, GROUP_KEYS)
    own_values = rows_from(matrices(tiles.values, unseen_zero(n)), GROUP * GROUP_KEYS, GROUP_KEYS)
    stage_q = tiles.queries.ring.empty.index(n % tiles.queries.ring.stages)
    stage_do = tiles.dout.ring.empty.index(n % tiles.dout.ring.stages)
    rows_used = band.q_end - row_first

    wait_rows(tiles.queries, n, rows_used, BLOCK_M, rules.IS_VARLEN, is_cut)
    zero_queries_before(tiles.queries, n, row_first, band, rules)
    q = rows_of(tiles.queries, n)
    zero = zero_accumulator(BLOCK_M)
    s = scores_over(own_keys, q, zero, tiles.pieces)
    lse = statistics_of(tiles.queries, n, 0, BLOCK_M, across)
    wait_rows(tiles.dout, n, rows_used, BLOCK_M, rules.IS_VARLEN, is_cut)
    zero_queries_before(tiles.dout, n, row_first, band, rules)
    do = rows_of(tiles.dout, n)
    dp = scores_over(own_values, do, zero, tiles.pieces_v)
    x = warpgroup_mma_wait(len(dv), deps=[s])
    bias = bias_of_group(tiles, n, work, head, row_first, key_first, GROUP, 0, BLOCK_M, rules)
    p, cap = probabilities(x, lse[None, :], band, row_first, key_first, slope, words, bias, True, is_cut, rules)
    p = signed(p, row_first, key_first, True, rules)
    delta = statistics_of(tiles.dout, n, 0, BLOCK_M, across)
    y = warpgroup_mma_wait(0, deps=[dp])
    ds = gradient_of_scores(p, cap, y, delta[None, :], rules).to(dtype)
    matrix(ds_part(tiles, n % 2, GROUP, 0, rules)).store(ds)
    # The tensor cores multiply dV while dS is stored and the groups meet.
    dv_next = add_product(kept(p, rules), do, dv, dtype, tiles.pieces_v)
    fence_async_shared()
    meet()
    release_bias(tiles, rules)
    dq = dq_async(keys, tiles, n, 0, GROUP, SHARE, rules)
    dk_next = add_product(ds, q, dk, dtype, tiles.pieces)
    dv = wait_for(dv_next, GROUPS * len(dq) + len(dk))
    arrive_alone(stage_do)
    put_dq(wait_for(dq, len(dk)), tiles, GROUP, n)
    dk = wait_for(dk_next)
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
    SHARE: gl.constexpr = tiles.dq_shares[GROUP]
    HALF: gl.constexpr = rules.BLOCK_M // 2
    across: gl.constexpr = gl.SliceLayout(0, accumulator_layout(HALF))
    keys = matrices(tiles.keys, 0)
    own_keys = rows_from(keys, GROUP * GROUP_KEYS, GROUP_KEYS)
    own_values = rows_from(matrices(tiles.values, 0), GROUP * GROUP_KEYS, GROUP_KEYS)
    stage_q = tiles.queries.ring.empty.index(n % tiles.queries.ring.stages)
    stage_do = tiles.dout.ring.empty.index(n % tiles.dout.ring.stages)
    rows_used = band.q_end - row_first

    wait_rows(tiles.queries, n, rows_used, rules.BLOCK_M, rules.IS_VARLEN, is_cut)
    zero_queries_before(tiles.queries, n, row_first, band, rules)
    q = rows_of(tiles.queries, n)
    q0 = rows_from(q, 0, HALF)
    q1 = rows_from(q, HALF, HALF)
    zero = zero_accumulator(rules.BLOCK_M)
    s = scores_over(own_keys, q, zero, tiles.pieces)
    wait_rows(tiles.dout, n, rows_used, rules.BLOCK_M, rules.IS_VARLEN, is_cut)
    zero_queries_before(tiles.dout, n, row_first, band, rules)
    do = rows_of(tiles.dout, n)
    do0 = rows_from(do, 0, HALF)
    do1 = rows_from(do, HALF, HALF)
    dp = scores_over(own_values, do, zero, tiles.pieces_v)
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
    dv_next = add_product(kept(p0, rules), do0, dv, dtype, tiles.pieces_v)
    dv_next = add_product(kept(p1, rules), do1, dv_next, dtype, tiles.pieces_v)
    fence_async_shared()
    meet()
    release_bias(tiles, rules)
    dq = dq_async(keys, tiles, n, GROUP, 0, SHARE, rules)
    dk_next = add_product(ds0, q0, dk, dtype, tiles.pieces)
    dk_next = add_product(ds1, q1, dk_next, dtype, tiles.pieces)
    dv = wait_for(dv_next, 4)
    arrive_alone(stage_do)
    put_dq(wait_for(dq, 2), tiles, GROUP, n)
    dk = wait_for(dk_next)
    arrive_alone(stage_q)
    return dk, dv


@jit
def start_half_of_dp(tiles, n, zero, GROUP: gl.constexpr, FIRST: gl.constexpr, rules):
    """Returns 32 queries of dO, from the FIRST-th of a tile on, and their product with V, in flight. `zero` is an
    `unseen_zero`: dO has one stage, and thus a fixed address, as V has."""
    HALF: gl.constexpr = rules.BLOCK_M // 2
    do = rows_from(matrices(tiles.dout.ring.pieces, n % tiles.dout.ring.stages + zero), FIRST, HALF)
    own_values = rows_from(matrices(tiles.values, zero), GROUP * GROUP_KEYS, GROUP_KEYS)
    return do, scores_over(own_values, do, zero_accumulator(HALF), tiles.pieces_v)


@jit
def p_and_ds_of_half(
    x, dp, tiles, n, row_first, key_first, slope, band, GROUP: gl.constexpr, FIRST: gl.constexpr,
    LATER: gl.constexpr, is_cut, rules,
):  # fmt: skip
    """Returns P of 32 queries, from the FIRST-th of a tile on, rounded, and stores their dS.

    Args:
        x: their scores.
        dp: their dP in flight, and LATER products behind it.
    """
    HALF: gl.constexpr = rules.BLOCK_M // 2
    across: gl.constexpr = gl.SliceLayout(0, accumulator_layout(HALF))
    lse = statistics_of(tiles.queries, n, FIRST, HALF, across)
    none = gl.to_tensor(0)
    p, cap = probabilities(
        x, lse[None, :], band, row_first + FIRST, key_first, slope, none, none, True, is_cut, rules
    )  # fmt: skip
    delta = statistics_of(tiles.dout, n, FIRST, HALF, across)
    y = warpgroup_mma_wait(LATER, deps=[dp])
    ds = gradient_of_scores(p, cap, y, delta[None, :], rules).to(tiles.ds.dtype)
    matrix(ds_part(tiles, n % 2, GROUP, 0, rules)).slice(FIRST, HALF, dim=1).store(ds)
    return p.to(tiles.ds.dtype)


@jit
def broad_step(dk, dv, tiles, n, row_first, key_first, slope, band, GROUP: gl.constexpr, is_cut, rules):
    """Processes a tile of 64 queries whose rows have a second piece. Each group multiplies its share of dQ's columns.

    dK and dV take up to 160 registers. So that the rest fits, dP is computed in two halves, dV is finished before dQ
    begins, dK takes dS from shared memory, and the addresses of K, V and dO are computed anew for each product that
    reads them (`unseen_zero`, of another number each time, which the compiler cannot merge). Otherwise ptxas spills, or
    waits for each product (docs/notes/backward.md). Masks, biases and dropout take separate launches.
    """
    SHARE: gl.constexpr = tiles.dq_shares[GROUP]
    HALF: gl.constexpr = rules.BLOCK_M // 2
    dtype: gl.constexpr = tiles.ds.dtype
    stage_q = tiles.queries.ring.empty.index(n % tiles.queries.ring.stages)
    stage_do = tiles.dout.ring.empty.index(n % tiles.dout.ring.stages)
    rows_used = band.q_end - row_first
    q = rows_of(tiles.queries, n)
    own_keys = rows_from(matrices(tiles.keys, unseen_zero(n)), GROUP * GROUP_KEYS, GROUP_KEYS)

    wait_rows(tiles.queries, n, rows_used, rules.BLOCK_M, rules.IS_VARLEN, is_cut)
    zero_queries_before(tiles.queries, n, row_first, band, rules)
    s = scores_over(own_keys, q, zero_accumulator(rules.BLOCK_M), tiles.pieces)
    wait_rows(tiles.dout, n, rows_used, rules.BLOCK_M, rules.IS_VARLEN, is_cut)
    zero_queries_before(tiles.dout, n, row_first, band, rules)
    do0, dp0 = start_half_of_dp(tiles, n, unseen_zero(n), GROUP, 0, rules)
    x0, x1 = halves_of(warpgroup_mma_wait(len(dv), deps=[s]))
    p0 = p_and_ds_of_half(
        x0, dp0, tiles, n, row_first, key_first, slope, band, GROUP, 0, 0, is_cut, rules
    )  # fmt: skip
    do1, dp1 = start_half_of_dp(tiles, n, unseen_zero(n + 1), GROUP, HALF, rules)
    dv_next = add_product(p0, do0, dv, dtype, tiles.pieces_v)
    p1 = p_and_ds_of_half(
        x1, dp1, tiles, n, row_first, key_first, slope, band, GROUP, HALF, len(dv), is_cut, rules
    )  # fmt: skip
    dv_next = add_product(p1, do1, dv_next, dtype, tiles.pieces_v)
    fence_async_shared()
    dv = wait_for(dv_next)
    meet()  # also, every warp has read delta
    arrive_alone(stage_do)
    dq = dq_async(matrices(tiles.keys, unseen_zero(n + 2)), tiles, n, 0, GROUP, SHARE, rules)
    dk_next = add_shared_product(matrix(ds_part(tiles, n % 2, GROUP, 0, rules)), q, dk, tiles.pieces)
    put_dq(wait_for(dq, len(dk)), tiles, GROUP, n)
    dk = wait_for(dk_next)
    arrive_alone(stage_q)
    return dk, dv


@constexpr_function
def has_second_piece(tiles):
    """Returns whether a row of Q, K, V or dO has a second piece."""
    return len(tiles.keys) + len(tiles.values) > 2


@jit
def step(
    dk, dv, tiles, n, work, head, row_first, key_first, slope, words, band, GROUP: gl.constexpr, is_cut, rules
):  # fmt: skip
    """Processes a tile of queries by the step for the head size."""
    if has_second_piece(tiles):
        dk, dv = broad_step(dk, dv, tiles, n, row_first, key_first, slope, band, GROUP, is_cut, rules)
    elif rules.BLOCK_M == 64:
        dk, dv = wide_step(
            dk, dv, tiles, n, work, head, row_first, key_first, slope, words, band, GROUP, is_cut, rules
        )  # fmt: skip
    else:
        dk, dv = narrow_step(
            dk, dv, tiles, n, work, head, row_first, key_first, slope, words, band, GROUP, is_cut, rules
        )  # fmt: skip
    return dk, dv
