"""The products of a tile of queries in the joint launch (joint.py), by head size."""

# No postponed annotations here: device functions' parameters are checked against them.

from warpwave.kernels.hopper.flash_bwd.bias import bias_of
from warpwave.kernels.hopper.flash_bwd.steps import (
    gradient,
    kept,
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
def put_dq(share, tiles, GROUP: gl.constexpr, n):
    """Hands a group's share of dQ, 64 rows, to an adding warp: lines of LINE in the order of the registers, so that no
    bank of shared memory is written twice."""
    LINES: gl.constexpr = share.shape[0] * share.shape[1] // LINE
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    x = gl.permute(gl.reshape(share, [4, 2, 8, share.shape[1] // 8, 4, 2]), [3, 0, 2, 4, 1, 5])
    x = gl.convert_layout(gl.reshape(x, [LINES, LINE]), layout, assert_trivial=True)
    mbarrier.wait(tiles.dq_empty.index(GROUP), (n & 1) ^ 1)
    tiles.dq.index(GROUP).slice(0, LINES, dim=0).store(x)
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


@constexpr_function
def pieces_of(dim, width):
    """Returns the pieces of columns that products of rows of head size `dim` cover in tiles of `width` columns. Where a
    quarter or more of 128 columns are padding, they are left out (config.dq_widths for dQ)."""
    if dim > 96 or width < 128:
        return (width,)
    return (64, 32) if dim > 80 else (64, 16) if dim > 64 else (64,)


@jit
def no_gradient(PIECES: gl.constexpr):
    """Returns dK or dV of 64 keys before the first tile, a tuple of pieces."""
    zeros = ()
    for i in gl.static_range(len(PIECES)):
        zeros = zeros + (zero_accumulator(PIECES[i]),)
    return zeros


@jit
def scores_over(keys, rows, zero, PIECES: gl.constexpr):
    """Starts the product of keys with rows of Q or dO."""
    x = zero
    for i in gl.static_range(len(PIECES)):
        of_keys = keys.slice(COLUMNS * i, PIECES[i], dim=1)
        of_rows = rows.slice(COLUMNS * i, PIECES[i], dim=1)
        x = warpgroup_mma(of_keys, of_rows.permute((1, 0)), x, use_acc=i > 0, is_async=True)
    return x


@jit
def add_product(x, rows, sums, dtype: gl.constexpr, PIECES: gl.constexpr):
    """Starts the product of x, [64 keys, queries], with rows of Q or dO, which is added to dK or dV."""
    found = ()
    for i in gl.static_range(len(PIECES)):
        of_rows = rows.slice(COLUMNS * i, PIECES[i], dim=1)
        found = found + (warpgroup_mma(as_operand(x, dtype, PIECES[i]), of_rows, sums[i], is_async=True),)
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
    """Processes a tile of 64 queries, head_dim 65 to 128. Each group multiplies its share of dQ's columns."""
    dtype: gl.constexpr = tiles.keys[0].dtype
    DQ_WIDTH: gl.constexpr = tiles.dq_widths[GROUP]
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
    share_of_keys = keys.slice(GROUP * COLUMNS, DQ_WIDTH, dim=1)
    dq = dq_async(zero_accumulator(DQ_WIDTH), share_of_keys, tiles, n, 0, rules)
    dk_next = add_product(ds, q, dk, dtype, tiles.pieces)
    dv = wait_for(dv_next, GROUPS + len(dk))
    arrive_alone(stage_do)
    share = warpgroup_mma_wait(len(dk), deps=[dq])
    put_dq(share, tiles, GROUP, n)
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
    s = scores_over(own_keys, q, zero, tiles.pieces)
    wait_rows(tiles.dout, n, rows_used, rules.BLOCK_M, rules.IS_VARLEN, is_cut)
    zero_queries_before(tiles.dout, n, row_first, band, rules)
    do = rows_of(tiles.dout, n)
    do0 = do.slice(0, HALF, dim=0)
    do1 = do.slice(HALF, HALF, dim=0)
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
    dq = dq_async(zero_accumulator(WIDTH), keys, tiles, n, GROUP, rules)
    dk_next = add_product(ds0, q0, dk, dtype, tiles.pieces)
    dk_next = add_product(ds1, q1, dk_next, dtype, tiles.pieces)
    dv = wait_for(dv_next, 4)
    arrive_alone(stage_do)
    share = warpgroup_mma_wait(2, deps=[dq])
    put_dq(share, tiles, GROUP, n)
    dk = wait_for(dk_next)
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
