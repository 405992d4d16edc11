"""The joint launch of dQ, dK and dV: five products a tile.

A block owns 128 keys of one kv head, 64 for each of two consumer warpgroups, and walks the queries of the heads that
read them, or of its share of these heads: all heads of a tile before the next tile, or in the order of a mask's list.
A part of a block walks some of these steps (config.divided_tail).
Scores are computed transposed, keys by queries, so that P and dS are operands of dV and dK as they are, in registers
(above head_dim 128 dS in shared memory):

    S^T = K Q^T,  dP^T = V dO^T;   P^T = exp(S^T - lse),  dS^T = P^T (dP^T - delta);   dV += P^T dO,  dK += dS^T Q

dQ needs the keys of both groups: dS goes through shared memory, each group multiplies its share of dQ, and a warp adds
it to float32 sums in memory by TMA (turns.py). A sum lies in memory in the order in which wgmma holds it in registers
(rows.py undoes that).

Shah et al., "FlashAttention-3" (2024), appendix B.1; Dao, "FlashAttention-2" (2023), algorithm 2.

Bound: tensor cores and shared memory take about as long, above head_dim 128 shared memory longer
(docs/notes/backward.md); latency between the products.
"""

# No postponed annotations here: an aggregate's fields are checked against its annotations.

from warpwave.kernels.hopper import scheduler
from warpwave.kernels.hopper.dropout import has_dropout, key_of, of_call, of_head
from warpwave.kernels.hopper.flash_bwd.band import (
    Options,
    Rules,
    band_of,
    first_statistic,
    query_span,
)
from warpwave.kernels.hopper.flash_bwd.bias import Bias, BiasOfCall
from warpwave.kernels.hopper.flash_bwd.joint_steps import (
    ADDERS,
    COLUMNS,
    GROUP_KEYS,
    GROUPS,
    LINE,
    ds_part,
    has_second_piece,
    no_gradient,
    step,
)
from warpwave.kernels.hopper.flash_bwd.producer import producer_of_keys
from warpwave.kernels.hopper.flash_bwd.steps import (
    Results,
    Stream,
    factor_of,
    has_parts,
    heads_of,
    heads_of_call,
    hide_rows_behind,
    is_of_split,
    listed_step,
    mask_lines,
    mask_words,
    meet,
    place_of_step,
    row_of,
    slope_of,
    store_rows_of_pieces,
    stream_of,
    times,
    walk_of,
    zero_keys_before,
)
from warpwave.kernels.hopper.flash_bwd.turns import Turns, pass_turn, rank_of, wait_for_turn
from warpwave.kernels.hopper.groups import Dropout, KeyGradients, KeySchedule, Mask
from warpwave.kernels.hopper.parts import barriers, buffers, halves_of, matrix, present
from warpwave.kernels.hopper.rows import zero_tail
from warpwave.runtime.gluon_or_stub import (
    aggregate,
    constexpr_function,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma,
    tma_add,
    tma_store,
    with_fields,
)

READERS = gl.constexpr(4)  # of a message: two consumers and the warps that add dQ


@aggregate
class Tiles:
    """Shared memory of a block, and its barriers.

    Args:
        keys, values: K and V of the block's 128 keys, tuples of pieces; `full` signals that they arrived, `empty` that
            they may be replaced.
        queries, dout: rings of Q with the log-sum-exp, and of dO with delta.
        ds: dS in parts of 64 keys x 64 queries (`ds_part`): of two tiles, so that one barrier a tile suffices. dK and
            dV are stored through it.
        bias: its tiles are of 128 keys, in one stage.
        dq: each group's share of a tile's dQ, for each piece of `dq_shares` [2, lines, LINE] float32. `dq_full` has a
            barrier for each adding warp and group, `dq_empty` one for each group.
        box: the producer's messages.
        dq_shares: the pieces of columns of each group's share (`config.dq_shares`).
        pieces, pieces_v: the columns that products with K and Q, and with V and dO, cover (`config.product_pieces`).
    """

    keys: gl.tuple
    values: gl.tuple
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    queries: Stream
    dout: Stream
    ds: gl.shared_memory_descriptor
    bias: Bias
    dq: gl.tuple
    dq_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor
    box: scheduler.Mailbox
    dq_shares: gl.constexpr
    pieces: gl.constexpr
    pieces_v: gl.constexpr


# The warps that add dQ ------------------------------------------------------------------------------------------------


@constexpr_function
def lines_of(share, piece=None):
    """Returns the lines of a piece of a group's share of dQ, or of all pieces."""
    widths = [int(width) for width in share]
    return (sum(widths) if piece is None else widths[int(piece)]) * int(GROUP_KEYS) // int(LINE)


@jit
def adder(
    WARP: gl.constexpr, dq_map, turns, mask: Mask, tiles, seqlen_q, seqlen_k, heads, rules, HAS_PARTS: gl.constexpr
):  # fmt: skip
    """Adds each group's share of dQ to the sums in memory: of every ADDERS-th tile, from the WARP-th on."""
    # A copy is as long as the shortest piece of a share; others are multiples of it.
    COPY: gl.constexpr = dq_map.block_type.shape[0]
    LINES: gl.constexpr = lines_of(tiles.dq_shares[0])
    ALL_LINES: gl.constexpr = LINES + lines_of(tiles.dq_shares[1])
    n = 0
    messages = 0
    scheduler.wait_posted(tiles.box, messages)
    work = scheduler.read(tiles.box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN, 1)
    while work.tile != scheduler.NO_MORE:
        first_step = gl.to_tensor(0)
        end_step = gl.to_tensor(0)
        if HAS_PARTS:
            first_step, end_step = scheduler.steps_of_part(tiles.box, messages, 1)
        scheduler.discard(tiles.box, messages)
        band = band_of(work, rules)
        key_first = band.k_begin + work.tile * rules.BLOCK_N
        span = query_span(band, key_first, rules)
        first_head, members = heads_of(work, heads)
        steps = (span.end - span.begin) * members
        if HAS_PARTS:
            steps = end_step - first_step
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
                if rules.HAS_MASK:
                    head, row_first = listed_step(walk, i, work, heads, rules)
                    tile = gl.maximum(row_first - band.q_begin, 0) // rules.BLOCK_M
                else:
                    head, tile = place_of_step(first_step + i, first_head, members, span, True, rules)
                place = (batch * heads.num_heads + head) * tiles_of_head + first + tile
                line = place * ALL_LINES
                rank = rank_of(turns, work.tile, tile, walk, i, band, rules)
                if rank > 0:
                    wait_for_turn(turns.counts_ptr + place, rank)
                for group in gl.static_range(GROUPS):
                    mbarrier.wait(tiles.dq_full.index(WARP * GROUPS + group), (n // ADDERS) & 1)
                    to = line + group * LINES
                    for piece in gl.static_range(len(tiles.dq_shares[group])):
                        for copy in gl.static_range(lines_of(tiles.dq_shares[group], piece) // COPY):
                            share = tiles.dq[piece].index(group).slice(copy * COPY, COPY, dim=0)
                            if rank == 0:
                                tma_store(dq_map, [to, 0], share)
                            elif rank > 0:
                                tma_add(dq_map, [to, 0], share)
                            to += COPY
                tma.store_wait(lines_of(tiles.dq_shares[1]) // COPY)
                mbarrier.arrive(tiles.dq_empty.index(0), count=1)
                tma.store_wait(0)
                mbarrier.arrive(tiles.dq_empty.index(1), count=1)
                if rank >= 0 and (turns.IS_DETERMINISTIC or rank == 0):
                    pass_turn(turns.counts_ptr + place, rank)
            n += 1
        messages += 1
        scheduler.wait_posted(tiles.box, messages)
        work = scheduler.read(tiles.box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN, 1)


# A consumer -----------------------------------------------------------------------------------------------------------


@jit
def store_result(
    x, maps, ptr, strides, tiles, work, part, GROUP: gl.constexpr, WIDTH: gl.constexpr, HAS_PARTS: gl.constexpr, rules
):  # fmt: skip
    """Stores dK or dV of a group's 64 keys, a tuple of pieces: by TMA through parts of dS, or row by row, as
    `steps.store_pieces`. Of a divided block, its part is stored row by row."""
    band = band_of(work, rules)
    key = work.k_begin + band.k_begin + work.tile * rules.BLOCK_N + GROUP * GROUP_KEYS
    key_end = work.k_begin + band.k_end
    batch = work.batch
    if rules.IS_VARLEN:
        batch = gl.to_tensor(0)
    if HAS_PARTS:
        if part >= 0:
            store_rows_of_pieces(
                x, ptr, strides, part, gl.to_tensor(0), GROUP * GROUP_KEYS, rules.BLOCK_N, WIDTH, factor_of(WIDTH)
            )
        else:
            store_by_map(x, maps[0], tiles, work.batch, work.head, key, GROUP, rules)
    elif is_of_split(ptr, tiles.keys):
        store_rows_of_pieces(x, ptr, strides, batch, work.head, key, key_end, WIDTH, factor_of(WIDTH))
    elif rules.IS_VARLEN:
        if key + GROUP_KEYS <= key_end:
            store_by_map(x, maps[0], tiles, 0, work.head, key, GROUP, rules)
        else:
            store_rows_of_pieces(x, ptr, strides, batch, work.head, key, key_end, WIDTH, 1)
    else:
        store_by_map(x, maps[0], tiles, work.batch, work.head, key, GROUP, rules)


@jit
def store_by_map(x, result_map, tiles, batch, head, key, GROUP: gl.constexpr, rules):
    """Stores 64 rows by TMA, which stops at the tensor's end: what a narrow piece leaves of a part is not stored."""
    parts = columns_by_64(x)
    for first in gl.static_range(0, len(parts), 2):
        store_parts(parts[first : first + 2], first * COLUMNS, result_map, tiles, batch, head, key, GROUP, rules)


@jit
def store_parts(parts, column, result_map, tiles, batch, head, key, GROUP: gl.constexpr, rules):
    """Stores at most two parts of 64 rows, from `column` on, through the parts of dS."""
    tma.store_wait(0)  # the compiler's barrier before the next store to the buffer informs the other warps
    for i in gl.static_range(len(parts)):
        part = matrix(ds_part(tiles, i, GROUP, 0, rules)).slice(0, parts[i].shape[1], dim=1)
        part.store(parts[i].to(result_map.dtype))
    fence_async_shared()
    for i in gl.static_range(len(parts)):
        tma_store(result_map, [batch, head, key, column + i * COLUMNS], ds_part(tiles, i, GROUP, 0, rules))


@jit
def columns_by_64(x):
    """Returns the pieces of dK or dV with those of 128 columns halved."""
    parts = ()
    for i in gl.static_range(len(x)):
        if x[i].shape[1] == 2 * COLUMNS:
            parts = parts + halves_of(x[i])
        else:
            parts = parts + (x[i],)
    return parts


@jit
def zero_keys_behind(tiles, work, rules):
    """Zeroes the rows of K and V past the end of a packed sequence, which belong to another one."""
    band = band_of(work, rules)
    keys_used = band.k_end - (band.k_begin + work.tile * rules.BLOCK_N)
    if keys_used < rules.BLOCK_N:
        for i in gl.static_range(len(tiles.keys)):
            zero_tail(tiles.keys[i].index(0), keys_used)
        for i in gl.static_range(len(tiles.values)):
            zero_tail(tiles.values[i].index(0), keys_used)
        fence_async_shared()  # `meet` follows


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
    # head_dim 128 one is up to 1.2 times as fast. Without a band its rate is 0.93, and at head_dim 64 about 0.8. Above
    # 128, one loop had 41 accesses to local memory per tile, two had 4; they were not timed against each other. All of
    # this was found when blocks walked head after head.
    ONE_LOOP: gl.constexpr = rules.BLOCK_M == 64 and (rules.HAS_HIGH or rules.HAS_LOW) and not has_second_piece(tiles)
    work = scheduler.read(tiles.box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN)
    band = band_of(work, rules)
    block_first = band.k_begin + work.tile * rules.BLOCK_N
    key_first = block_first + GROUP * GROUP_KEYS
    span = query_span(band, block_first, rules)
    steps = span.end - span.begin
    # One loop over tiles and heads. With two nested loops, the compilers compute what depends on the tile before the
    # inner loop, and keep it in local memory. Its counter is the tile's number, which would take another register.
    row_first = row_of(span, 0, band, rules)
    h = gl.to_tensor(0)
    first_head, g = heads_of(work, heads)
    if ONE_LOOP:
        # As `band.is_cut`, from the first query: the tile's place in the span would take another register.
        whole_first = band.q_begin + span.whole_begin * rules.BLOCK_M
        whole_end = band.q_begin + span.whole_end * rules.BLOCK_M
        count = steps * g
        for number in range(n, n + count):
            cut = (row_first < whole_first) | (row_first >= whole_end)
            dk, dv, row_first, h = walk_tile(
                dk, dv, tiles, messages, number, dropout_key, results, row_first, first_head, h, g, key_first, band,
                cut, GROUP, seqlen_q, seqlen_k, rules,
            )  # fmt: skip
    else:
        # Cut tiles, whole tiles, then cut tiles at the other end of the queries.
        behind = (span.end - span.whole_end) * g
        upto = (span.end - span.whole_begin) * g
        if rules.ASCENDS:
            behind = (span.whole_begin - span.begin) * g
            upto = (span.whole_end - span.begin) * g
        count = steps * g
        if has_parts(results.dk_ptr, tiles.keys, rules):
            first, end = scheduler.steps_of_part(tiles.box, messages)
            row_first = row_of(span, first // g, band, rules)
            h = first % g
            behind = gl.minimum(gl.maximum(behind, first), end) - first
            upto = gl.minimum(gl.maximum(upto, first), end) - first
            count = end - first
        for is_second in range(2):
            cut_end = gl.where(is_second == 0, behind, count)
            for number in range(n + is_second * upto, n + cut_end):
                dk, dv, row_first, h = walk_tile(
                    dk, dv, tiles, messages, number, dropout_key, results, row_first, first_head, h, g, key_first,
                    band, True, GROUP, seqlen_q, seqlen_k, rules,
                )  # fmt: skip
            for number in range(n + cut_end, n + upto):
                dk, dv, row_first, h = walk_tile(
                    dk, dv, tiles, messages, number, dropout_key, results, row_first, first_head, h, g, key_first,
                    band, False, GROUP, seqlen_q, seqlen_k, rules,
                )  # fmt: skip
    return dk, dv, n + count


@jit
def walk_tile(
    dk, dv, tiles, messages, n, dropout_key, results, row_first, first_head, h, g, key_first, band, cut,
    GROUP: gl.constexpr, seqlen_q, seqlen_k, rules,
):  # fmt: skip
    """As `walk_band`, of a tile of queries of the h-th of a block's g heads; also returns the next row_first and h, in
    the order of `place_of_step`."""
    # Reading the message again is cheaper than keeping its words in registers through the loops.
    work = scheduler.read(tiles.box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN)
    head = first_head + h
    slope = slope_of(results.alibi_slopes_ptr, results.stride_alibi_b, work, head, rules)
    rules_of_head = with_fields(rules, dropout=of_head(rules.dropout, dropout_key, work.batch, head))
    dk, dv = step(dk, dv, tiles, n, work, head, row_first, key_first, slope, 0, band, GROUP, cut, rules_of_head)
    h += 1
    following = row_first - rules.BLOCK_M
    if rules.ASCENDS:
        following = row_first + rules.BLOCK_M
    row_first = gl.where(h == g, following, row_first)
    return dk, dv, row_first, gl.where(h == g, 0, h)


@jit
def walk_list(dk, dv, tiles, work, n, dropout_key, results, mask: Mask, GROUP: gl.constexpr, heads, rules):
    """As `walk_band`, of the tiles in which a mask shows a pair. Its words also hide what position hides."""
    band = band_of(work, rules)
    block_first = band.k_begin + work.tile * rules.BLOCK_N
    key_first = block_first + GROUP * GROUP_KEYS
    walk = walk_of(mask, work, block_first // rules.BLOCK_N, rules)
    lines = mask_lines(mask, work, key_first, work.seqlen_k, GROUP_KEYS, rules)
    of_block = gl.to_tensor(0)
    if not rules.MASK_PER_STEP:
        of_block = mask_words(mask, lines, work.head * heads.group_size, gl.to_tensor(0), rules.BLOCK_M, rules)
        of_block = hide_rows_behind(of_block, key_first, work.seqlen_k, rules)
    steps = gl.load(walk)
    for i in range(steps):
        head, row_first = listed_step(walk, i, work, heads, rules)
        words = of_block
        if rules.MASK_PER_STEP:
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
    HAS_PARTS: gl.constexpr = has_parts(results.dk_ptr, tiles.keys, rules)
    dropout_key = key_of(rules.dropout)
    n = 0  # tiles of queries processed so far
    messages = 0
    scheduler.wait_posted(tiles.box, messages)
    work = scheduler.read(tiles.box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN)
    while work.tile != scheduler.NO_MORE:
        dk = no_gradient(tiles.pieces)
        dv = no_gradient(tiles.pieces_v)
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
        part = gl.to_tensor(0)
        if HAS_PARTS:
            part = scheduler.part(tiles.box, messages)
        scheduler.discard(tiles.box, messages)
        meet()  # the other group's last dQ has read what these results overwrite
        if has_dropout(rules.dropout):
            dv = times(dv, rules.dropout.scale)
        strides = (results.stride_dv_b, results.stride_dv_h, results.stride_dv_n)
        store_result(
            dv, results.dv_maps, results.dv_ptr, strides, tiles, work, part, GROUP, HEAD_DIM_V, HAS_PARTS, rules
        )
        dk = times(dk, rules.softmax_scale)
        strides = (results.stride_dk_b, results.stride_dk_h, results.stride_dk_n)
        store_result(dk, results.dk_maps, results.dk_ptr, strides, tiles, work, part, GROUP, HEAD_DIM, HAS_PARTS, rules)
        messages += 1
        scheduler.wait_posted(tiles.box, messages)
        work = scheduler.read(tiles.box, messages, seqlen_q, seqlen_k, rules.IS_VARLEN)
    tma.store_wait(0)


# The kernel -----------------------------------------------------------------------------------------------------------


@jit
def joint_kernel(
    q_map,
    q_map_2,
    k_map,
    k_map_2,
    v_map,
    v_map_2,
    dout_map,
    dout_map_2,
    lse_map,
    delta_map,
    dq_map,
    dk_map,
    dv_map,
    bias_map,
    q_copy_map,
    q_copy_map_2,
    k_copy_map,
    k_copy_map_2,
    v_copy_map,
    v_copy_map_2,
    dout_copy_map,
    dout_copy_map_2,
    gradients: KeyGradients,
    schedule: KeySchedule,
    call_options: Options,
    dropout: Dropout,
    mask: Mask,
    bias: BiasOfCall,
    turns_ptr,
    copies_needed_ptr,
    counter_ptr,
    STAGES: gl.constexpr,
    STAGES_DOUT: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    PIECES: gl.constexpr,
    PIECES_V: gl.constexpr,
    DQ_SHARES: gl.constexpr,
    IS_DETERMINISTIC: gl.constexpr,
):
    """Processes blocks of 128 keys of one kv head until the counter is exhausted. Tensor maps have the axes (batch,
    head, row, column), one for each piece of a row, absent ones None; those of statistics (batch * head, row), that of
    dQ's sums (line, LINE). The operands have copies under a mask or a bias (prepass/zero_unseen.py). In the schedule
    keys take the place of queries (band.work_on_keys).
    """
    rules = Rules(call_options, of_call(dropout))
    heads = heads_of_call(schedule, call_options)
    turns = Turns(turns_ptr, IS_DETERMINISTIC)
    dtype: gl.constexpr = q_map.dtype
    q_maps = present(q_map, q_map_2, None)
    k_maps = present(k_map, k_map_2, None)
    v_maps = present(v_map, v_map_2, None)
    dout_maps = present(dout_map, dout_map_2, None)
    queries = stream_of(q_maps, lse_map, STAGES, GROUPS)
    dout = stream_of(dout_maps, delta_map, STAGES_DOUT, GROUPS)
    dq = ()
    for i in gl.static_range(len(DQ_SHARES[0])):
        of_piece = gl.allocate_shared_memory(gl.float32, [GROUPS, lines_of(DQ_SHARES[0], i), LINE], dq_map.layout)
        dq = dq + (of_piece,)
    box = scheduler.mailbox(READERS)
    bias_maps = ()
    bias_tiles = queries.statistics
    bias_full = box.full
    bias_empty = box.empty
    if call_options.BIAS == "cells":
        bias_maps = (bias_map,)
        bias_tiles = buffers(bias_maps, 1)[0]
        bias_full = barriers(1, 1)
        bias_empty = barriers(1, GROUPS)
    tiles = Tiles(
        buffers(k_maps, 1),
        buffers(v_maps, 1),
        barriers(1, 1),
        barriers(1, GROUPS),
        queries,
        dout,
        gl.allocate_shared_memory(dtype, [call_options.BLOCK_M // 16, 1, 1, 64, 64], gl.NVMMASharedLayout(128, 16, 4)),
        Bias(bias, bias_maps, (), bias_tiles, bias_full, bias_empty),
        dq,
        barriers(ADDERS * GROUPS, 1),
        barriers(GROUPS, 1),
        box,
        DQ_SHARES,
        PIECES,
        PIECES_V,
    )
    fence_async_shared()
    results = Results(gradients, present(dk_map, None, None), present(dv_map, None, None))
    HAS_PARTS: gl.constexpr = has_parts(gradients.dk_ptr, k_maps, rules)
    seqlen_q = schedule.seqlen_k
    seqlen_k = schedule.seqlen_q
    maps = q_maps, k_maps, v_maps, dout_maps, lse_map, delta_map
    copies = maps
    if copies_needed_ptr is not None:
        copied_q = present(q_copy_map, q_copy_map_2, None)
        copied_k = present(k_copy_map, k_copy_map_2, None)
        copied_v = present(v_copy_map, v_copy_map_2, None)
        copied_dout = present(dout_copy_map, dout_copy_map_2, None)
        copies = copied_q, copied_k, copied_v, copied_dout, lse_map, delta_map
    gl.warp_specialize(
        [
            (consumer, (0, results, mask, tiles, seqlen_q, seqlen_k, heads, rules, HEAD_DIM, HEAD_DIM_V)),
            (consumer, (1, results, mask, tiles, seqlen_q, seqlen_k, heads, rules, HEAD_DIM, HEAD_DIM_V)),
            (
                producer_of_keys,
                (maps, copies, copies_needed_ptr, mask, tiles, gradients, schedule, counter_ptr, heads, rules, True),
            ),
            (adder, (0, dq_map, turns, mask, tiles, seqlen_q, seqlen_k, heads, rules, HAS_PARTS)),
            (adder, (1, dq_map, turns, mask, tiles, seqlen_q, seqlen_k, heads, rules, HAS_PARTS)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
