"""The launch of dK and dV, for head_dim and head_dim_v up to 256: four products a tile, no atomics.

A block owns 64 keys of one kv head and walks the queries of the heads that read them, or of its share of these heads.
Scores are computed transposed, keys by queries, as in joint.py, but each of the two consumer warpgroups holds one
result:

    group 0: S^T = K Q^T,    P^T = exp(S^T - lse),       dV += P^T dO
    group 1: dP^T = V dO^T,  dS^T = P^T (dP^T - delta),  dK += dS^T Q

P passes from one to the other through shared memory, in float32: beside a sink, all probabilities of a row may be too
small for float16, and bfloat16 would round dS twice. A group starts its next scores before it waits for its sum, so
that the tensor cores have work while either group computes exponentials or dS. A bias is copied to the stages of P
(bias.py). dq.py computes dQ.

Bound: tensor cores (docs/notes/backward.md).
"""

# No postponed annotations here: an aggregate's fields are checked against its annotations.

from warpwave.kernels.hopper import scheduler
from warpwave.kernels.hopper.dropout import has_dropout, key_of, of_call, of_head
from warpwave.kernels.hopper.flash_bwd.band import (
    Options,
    Rules,
    band_of,
    is_cut,
    query_span,
    visible,
)
from warpwave.kernels.hopper.flash_bwd.bias import Bias, BiasOfCall, as_stages_of_p, bias_of
from warpwave.kernels.hopper.flash_bwd.producer import producer_of_keys
from warpwave.kernels.hopper.flash_bwd.steps import (
    Results,
    Stream,
    gradient,
    heads_of,
    heads_of_call,
    kept,
    listed,
    mask_lines,
    mask_words,
    matrices,
    meet,
    probabilities,
    row_of,
    signed,
    slope_of,
    statistics_of,
    step_of,
    store_pieces,
    stream_of,
    times,
    wait_rows,
    walk_of,
    zero_keys_before,
    zero_queries_before,
    zero_sums,
)
from warpwave.kernels.hopper.groups import Dropout, KeyGradients, KeySchedule, Mask
from warpwave.kernels.hopper.parts import (
    accumulator_layout,
    arrive_alone,
    barriers,
    buffers,
    hand_back_multiplied,
    matrix,
    operand,
    present,
    scores_async,
    values_async,
    wait_for,
    zero_accumulator,
)
from warpwave.runtime.gluon_or_stub import (
    aggregate,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    reinterpret,
    tma,
    warpgroup_mma_wait,
    with_fields,
)

GROUPS = gl.constexpr(2)


@aggregate
class Tiles:
    """Shared memory of a block, and its barriers.

    Args:
        keys, values: pieces of K and V, [1, 1, 1, 64, width]; dK and dV are stored through them. `full` signals that
            they arrived, `empty` that they may be replaced.
        queries, dout: rings of Q with the log-sum-exp, and of dO with delta.
        p: probabilities of two tiles, [2, 1, 1, 64, queries] float32, with their barriers.
        bias: its tiles are the stages of `p` if each score has its own number.
        box: the producer's messages.
    """

    keys: gl.tuple
    values: gl.tuple
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    queries: Stream
    dout: Stream
    p: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    p_empty: gl.shared_memory_descriptor
    bias: Bias
    box: scheduler.Mailbox


# The consumers --------------------------------------------------------------------------------------------------------


@jit
def scores_of(fixed, stream, n, row_first, band, rules):
    """Waits for tile n of a stream and starts its product with the block's K or V, [64 keys, queries]."""
    wait_rows(stream, n, band.q_end - row_first, rules.BLOCK_M, rules.IS_VARLEN)
    zero_queries_before(stream, n, row_first, band, rules)
    return scores_async(matrices(fixed, 0), stream.ring, n, zero_accumulator(rules.BLOCK_M))


@jit
def sum_values(tiles, work, n, results, mask: Mask, heads, rules):
    """Returns, in group 0, dV of a block, and the number of the next tile of queries."""
    across: gl.constexpr = gl.SliceLayout(0, accumulator_layout(rules.BLOCK_M))
    band = band_of(work, rules)
    key_first = band.k_begin + work.tile * rules.BLOCK_N
    span = query_span(band, key_first, rules)
    count = span.end - span.begin
    dv = zero_sums(tiles.dout.ring.pieces)
    dropout_key = key_of(rules.dropout)
    zero_keys_before(tiles.keys, 0, key_first, band, rules)
    place = gl.to_tensor(0)
    head, members = heads_of(work, heads)
    row_first = row_of(span, place, band, rules)
    steps = count * members
    walk = walk_of(mask, work, key_first // rules.BLOCK_N, rules)
    if rules.HAS_MASK:
        steps = gl.load(walk)
        head, row_first = step_of(listed(walk, 0), work, heads, rules)
    s = scores_of(tiles.keys, tiles.queries, n, row_first, band, rules)
    x = warpgroup_mma_wait(0, deps=[s])
    lines = mask_lines(mask, work, key_first, work.seqlen_k, rules.BLOCK_M, rules)
    for i in range(steps):
        words = mask_words(mask, lines, head, row_first, rules.BLOCK_M, rules)
        lse = statistics_of(tiles.queries, n, 0, rules.BLOCK_M, across)
        slope = slope_of(results.alibi_slopes_ptr, results.stride_alibi_b, work, head, rules)
        if rules.BIAS == "cells":
            mbarrier.wait(tiles.bias.full.index(n % 2), (n // 2) & 1)
        bias_tile = tiles.bias.tiles.shape[0] // 2 * (n % 2)
        bias = bias_of(tiles.bias, bias_tile, work, head, row_first, key_first, True, rules.BLOCK_M, rules)
        p, cap = probabilities(x, lse[None, :], band, row_first, key_first, slope, words, bias, True, False, rules)
        if not rules.HAS_MASK:  # the words also hide what position hides  # noqa: SIM102
            if is_cut(span, place, rules):
                p = gl.where(visible(p, band, row_first, key_first, True, rules), p, 0.0)
        of_this_head = of_head(rules.dropout, dropout_key, work.batch, head)
        p = signed(p, row_first, key_first, True, with_fields(rules, dropout=of_this_head))
        passed = p
        if rules.HAS_SOFTCAP:
            passed = p * cap
        if rules.BIAS != "cells":  # the producer's tile, which was waited for
            mbarrier.wait(tiles.p_empty.index(n % 2), ((n // 2) & 1) ^ 1)
        matrix(tiles.p.index(n % 2)).store(passed)
        if rules.BIAS == "cells":
            fence_async_shared()  # the copy engine writes the next bias to it
        mbarrier.arrive(tiles.p_full.index(n % 2), count=1)
        # The log-sum-exp was read before the barrier within the arrival, and S of this tile is finished.
        arrive_alone(tiles.queries.ring.empty.index(n % tiles.queries.ring.stages))
        wait_rows(tiles.dout, n, band.q_end - row_first, rules.BLOCK_M, rules.IS_VARLEN)
        zero_queries_before(tiles.dout, n, row_first, band, rules)
        pending = values_async(operand(kept(p, rules), tiles.dout.ring), tiles.dout.ring, n, dv)
        if rules.HAS_MASK:
            head, row_first = step_of(listed(walk, i + 1, i + 1 < steps), work, heads, rules)
        else:
            head = gl.where(place + 1 == count, head + 1, head)
            place = gl.where(place + 1 == count, 0, place + 1)
            row_first = row_of(span, place, band, rules)
        if i + 1 < steps:
            wait_rows(tiles.queries, n + 1, band.q_end - row_first, rules.BLOCK_M, rules.IS_VARLEN)
            zero_queries_before(tiles.queries, n + 1, row_first, band, rules)
        # After the last tile, the scores are of arbitrary data and are not read.
        s = scores_async(matrices(tiles.keys, 0), tiles.queries.ring, n + 1, zero_accumulator(rules.BLOCK_M))
        dv = wait_for(pending, len(tiles.keys))
        hand_back_multiplied(tiles.dout.ring, n)
        x = warpgroup_mma_wait(0, deps=[s])
        n += 1
    return dv, n


@jit
def sum_keys(tiles, work, n, mask: Mask, heads, rules):
    """Returns, in group 1, dK of a block before the scale, and the number of the next tile of queries."""
    layout: gl.constexpr = accumulator_layout(rules.BLOCK_M)
    band = band_of(work, rules)
    key_first = band.k_begin + work.tile * rules.BLOCK_N
    span = query_span(band, key_first, rules)
    count = span.end - span.begin
    dk = zero_sums(tiles.queries.ring.pieces)
    zero_keys_before(tiles.values, 0, key_first, band, rules)
    place = gl.to_tensor(0)
    row_first = row_of(span, place, band, rules)
    dp = scores_of(tiles.values, tiles.dout, n, row_first, band, rules)
    y = warpgroup_mma_wait(0, deps=[dp])
    _, members = heads_of(work, heads)
    steps = count * members
    if rules.HAS_MASK:
        steps = gl.load(walk_of(mask, work, key_first // rules.BLOCK_N, rules))
    for i in range(steps):
        mbarrier.wait(tiles.p_full.index(n % 2), (n // 2) & 1)
        p = matrix(tiles.p.index(n % 2)).load(layout)
        delta = statistics_of(tiles.dout, n, 0, rules.BLOCK_M, gl.SliceLayout(0, layout))
        mbarrier.arrive(tiles.p_empty.index(n % 2), count=1)
        # Delta was read before the barrier within the arrival, and dP of this tile is finished.
        arrive_alone(tiles.dout.ring.empty.index(n % tiles.dout.ring.stages))
        ds = gradient(p, y, delta[None, :], rules)  # where P is 0, dP is finite: rows behind the band were never loaded
        wait_rows(tiles.queries, n, band.q_end - row_first, rules.BLOCK_M, rules.IS_VARLEN)
        zero_queries_before(tiles.queries, n, row_first, band, rules)
        pending = values_async(operand(ds, tiles.queries.ring), tiles.queries.ring, n, dk)
        place = gl.where(place + 1 == count, 0, place + 1)
        row_first = row_of(span, place, band, rules)
        if i + 1 < steps:
            wait_rows(tiles.dout, n + 1, band.q_end - row_first, rules.BLOCK_M, rules.IS_VARLEN)
            zero_queries_before(tiles.dout, n + 1, row_first, band, rules)
        dp = scores_async(matrices(tiles.values, 0), tiles.dout.ring, n + 1, zero_accumulator(rules.BLOCK_M))
        dk = wait_for(pending, len(tiles.values))
        hand_back_multiplied(tiles.queries.ring, n)
        y = warpgroup_mma_wait(0, deps=[dp])
        n += 1
    return dk, n


@jit
def consumer(
    GROUP: gl.constexpr, results, mask: Mask, tiles, seqlen_q, seqlen_k, heads, rules, HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Computes dV (group 0) or dK (group 1) of each block."""
    n = 0  # tiles of queries processed so far
    messages = 0
    scheduler.wait_posted(tiles.box, messages)
    work = scheduler.read(tiles.box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN)
    while work.tile != scheduler.NO_MORE:
        mbarrier.wait(tiles.full.index(0), messages & 1)
        if GROUP == 0:
            result, n = sum_values(tiles, work, n, results, mask, heads, rules)
            if has_dropout(rules.dropout):
                result = times(result, rules.dropout.scale)
        else:
            result, n = sum_keys(tiles, work, n, mask, heads, rules)
            result = times(result, rules.softmax_scale)
        # Reading the message again is cheaper than keeping its words in registers through the loop.
        work = scheduler.read(tiles.box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN)
        scheduler.discard(tiles.box, messages)
        band = band_of(work, rules)
        key = work.k_begin + band.k_begin + work.tile * rules.BLOCK_N
        key_end = work.k_begin + band.k_end
        meet()  # the other group has multiplied what this result overwrites
        if GROUP == 0:
            strides = (results.stride_dv_b, results.stride_dv_h, results.stride_dv_n)
            store_pieces(
                result, results.dv_maps, tiles.values, 0, results.dv_ptr, strides, work.batch, work.head, key, key_end,
                HEAD_DIM_V, rules.IS_VARLEN,
            )  # fmt: skip
        else:
            strides = (results.stride_dk_b, results.stride_dk_h, results.stride_dk_n)
            store_pieces(
                result, results.dk_maps, tiles.keys, 0, results.dk_ptr, strides, work.batch, work.head, key, key_end,
                HEAD_DIM, rules.IS_VARLEN,
            )  # fmt: skip
        tma.store_wait(0)
        mbarrier.arrive(tiles.empty.index(0), count=1)
        messages += 1
        scheduler.wait_posted(tiles.box, messages)
        work = scheduler.read(tiles.box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN)


# The kernel -----------------------------------------------------------------------------------------------------------


@jit
def dkv_kernel(
    q_map,
    q_map_2,
    q_map_3,
    k_map,
    k_map_2,
    k_map_3,
    v_map,
    v_map_2,
    v_map_3,
    dout_map,
    dout_map_2,
    dout_map_3,
    lse_map,
    delta_map,
    dk_map,
    dk_map_2,
    dk_map_3,
    dv_map,
    dv_map_2,
    dv_map_3,
    bias_map,
    q_copy_map,
    q_copy_map_2,
    q_copy_map_3,
    k_copy_map,
    k_copy_map_2,
    k_copy_map_3,
    v_copy_map,
    v_copy_map_2,
    v_copy_map_3,
    dout_copy_map,
    dout_copy_map_2,
    dout_copy_map_3,
    gradients: KeyGradients,
    schedule: KeySchedule,
    call_options: Options,
    mask: Mask,
    bias: BiasOfCall,
    dropout: Dropout,
    copies_needed_ptr,
    counter_ptr,
    STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):
    """Processes blocks of 64 keys of one kv head until the counter is exhausted.

    Tensor maps have the axes (batch, head, row, column), one for each piece of a tile's width, absent ones None; maps
    of statistics (batch * head, row); the map of the bias, if each score has its own number, (batch, head, query, key).
    In the schedule keys take the place of queries (band.work_on_keys).
    """
    q_maps = present(q_map, q_map_2, q_map_3)
    k_maps = present(k_map, k_map_2, k_map_3)
    v_maps = present(v_map, v_map_2, v_map_3)
    dout_maps = present(dout_map, dout_map_2, dout_map_3)
    rules = Rules(call_options, of_call(dropout))
    heads = heads_of_call(schedule, call_options)
    p = gl.allocate_shared_memory(
        gl.float32, [2, 1, 1, call_options.BLOCK_N, call_options.BLOCK_M], gl.NVMMASharedLayout(128, 32, 4)
    )
    bias_maps = ()
    bias_tiles = p
    p_empty = barriers(2, 1)
    box = scheduler.mailbox(GROUPS)
    bias_full = box.full
    if call_options.BIAS == "cells":
        bias_maps = (bias_map,)
        count: gl.constexpr = as_stages_of_p(p, bias_map)
        bias_tiles = reinterpret(p, bias_map.dtype, [count] + bias_map.block_type.shape, bias_map.layout)
        bias_full = barriers(2, 1)
    tiles = Tiles(
        buffers(k_maps, 1),
        buffers(v_maps, 1),
        barriers(1, 1),
        barriers(1, GROUPS),
        stream_of(q_maps, lse_map, STAGES, GROUPS),
        stream_of(dout_maps, delta_map, STAGES, GROUPS),
        p,
        barriers(2, 1),
        p_empty,
        Bias(bias, bias_maps, (), bias_tiles, bias_full, p_empty),
        box,
    )
    fence_async_shared()
    results = Results(gradients, present(dk_map, dk_map_2, dk_map_3), present(dv_map, dv_map_2, dv_map_3))
    seqlen_q = schedule.seqlen_k
    seqlen_k = schedule.seqlen_q
    maps = q_maps, k_maps, v_maps, dout_maps, lse_map, delta_map
    copies = maps
    if copies_needed_ptr is not None:
        copied_q = present(q_copy_map, q_copy_map_2, q_copy_map_3)
        copied_k = present(k_copy_map, k_copy_map_2, k_copy_map_3)
        copied_v = present(v_copy_map, v_copy_map_2, v_copy_map_3)
        copied_dout = present(dout_copy_map, dout_copy_map_2, dout_copy_map_3)
        copies = copied_q, copied_k, copied_v, copied_dout, lse_map, delta_map
    gl.warp_specialize(
        [
            (consumer, (0, results, mask, tiles, seqlen_q, seqlen_k, heads, rules, HEAD_DIM, HEAD_DIM_V)),
            (consumer, (1, results, mask, tiles, seqlen_q, seqlen_k, heads, rules, HEAD_DIM, HEAD_DIM_V)),
            (
                producer_of_keys,
                (maps, copies, copies_needed_ptr, mask, tiles, gradients, schedule, counter_ptr, heads, rules, False),
            ),
        ],
        [4, 1],
        [240, 24],
    )
