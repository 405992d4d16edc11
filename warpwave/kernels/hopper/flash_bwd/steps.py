"""Building blocks of Hopper's backward kernels: probabilities, rings of queries, stores of gradients."""

# No postponed annotations here: an aggregate's fields are checked against its annotations.

import math

from warpwave.kernels.hopper.dropout import drop, has_dropout
from warpwave.kernels.hopper.flash_bwd.band import Options, begins_early, tile_at, visible
from warpwave.kernels.hopper.flash_bwd.bias import exp2_at_most_one
from warpwave.kernels.hopper.groups import KeyGradients, KeySchedule, Mask
from warpwave.kernels.hopper.parts import (
    LOG2_E,
    ROWS,
    Ring,
    buffers,
    exp2,
    load_tile,
    matrix,
    ring_of,
    tanh,
    wait_full,
    zero_accumulator,
)
from warpwave.kernels.hopper.rows import zero_head, zero_values
from warpwave.kernels.hopper.words import hide_words, lines_of_rows, load_words
from warpwave.runtime.gluon_or_stub import (
    aggregate,
    constexpr_function,
    fence_async_shared,
    gl,
    jit,
    tma_load,
    tma_store,
)

FREE_BARRIER = gl.constexpr(8)  # Triton 3.6 to 3.9 uses lower numbers for its warp groups


@aggregate
class Heads:
    """The query heads of a call and of its blocks of keys, and dQ's sums.

    Args:
        num_heads: query heads.
        group_size: query heads of a block, unless blocks have different numbers.
        key_heads: (kv heads, each counted once for each of its splits,) if blocks have different numbers, else ().
        rows: rows of statistics of one (batch, head), whole tiles.
    """

    num_heads: gl.tensor
    group_size: gl.tensor
    key_heads: gl.tuple
    rows: gl.tensor


@jit
def heads_of_call(schedule: KeySchedule, call_options: Options):
    """Returns the heads of a launch that draws blocks of keys."""
    key_heads = ()
    if call_options.IS_UNEVEN:
        key_heads = (schedule.num_heads,)
    return Heads(schedule.num_heads_q, schedule.group_size, key_heads, call_options.statistic_rows)


@jit
def heads_of(work, heads):
    """Returns the first query head of a block of keys, and how many it has. If splits do not divide the query heads of
    a kv head, some have one more than others."""
    first = work.head * heads.group_size
    count = heads.group_size
    if len(heads.key_heads) > 0:
        first = work.head * heads.num_heads // heads.key_heads[0]
        count = (work.head + 1) * heads.num_heads // heads.key_heads[0] - first
    return first, count


@aggregate
class Results:
    """The destination of dK and dV with the tensor maps of their pieces."""

    gradients: KeyGradients
    dk_maps: object
    dv_maps: object


@jit
def mask_lines(mask: Mask, work, row_first, rows_end, WIDTH: gl.constexpr, rules):
    """Returns the addresses of the words of 64 rows of the first head, 0 without a mask."""
    lines = gl.to_tensor(0)
    if rules.HAS_MASK:
        first = mask.words_ptr + work.batch.to(gl.int64) * mask.stride_words_b
        lines = lines_of_rows(first, mask.stride_words_m, row_first, rows_end, WIDTH)
    return lines


@jit
def mask_words(mask: Mask, lines, head, column_first, WIDTH: gl.constexpr, rules):
    """Returns the words of a tile of a head, 0 without a mask."""
    words = gl.to_tensor(0)
    if rules.HAS_MASK:
        words = load_words(lines + head.to(gl.int64) * mask.stride_words_h, mask.stride_words_t, column_first, WIDTH)
    return words


@jit
def walk_of(mask: Mask, work, block, rules):
    """Returns the address of the list of a block's steps (prepass/mask_steps.py), 0 without a mask."""
    walk = gl.to_tensor(0)
    if rules.HAS_MASK:
        walk = mask.walks_ptr + work.batch.to(gl.int64) * mask.stride_walks_b
        walk += work.head.to(gl.int64) * mask.stride_walks_h + block.to(gl.int64) * mask.stride_walks_t
    return walk


@aggregate
class Stream:
    """A ring of row tiles, Q or dO, each with one float32 statistic a row: the log-sum-exp or delta.

    Args:
        ring: its barriers also signal that the statistics arrived.
        statistics: [stages, 1, rows] float32.
    """

    ring: Ring
    statistics: gl.shared_memory_descriptor


@jit
def stream_of(maps, statistic_map, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, PARTS: gl.constexpr = 1):
    """Allocates a stream; `CONSUMERS` groups hand each tile back."""
    ring = ring_of(buffers(maps, STAGES * PARTS), STAGES, CONSUMERS, PARTS)
    shape: gl.constexpr = [STAGES] + statistic_map.block_type.shape
    return Stream(ring, gl.allocate_shared_memory(gl.float32, shape, statistic_map.layout))


@jit
def load_rows(stream, row_maps, statistic_map, n, batch, head, row, statistic_place):
    """Loads tile n by TMA, with its statistics, as soon as its stage is free. Rows outside the tensor are zeros."""
    ring = stream.ring
    load_tile(ring, row_maps, n, batch, head, row, statistic_map.block_type.nbytes)
    stage = n % ring.stages
    tma_load(statistic_map, statistic_place, ring.full.index(stage), stream.statistics.index(stage))


@jit
def wait_rows(stream, n, rows_used, BLOCK_M: gl.constexpr, IS_VARLEN: gl.constexpr, is_cut=True):
    """Waits for tile n. Zeroes its rows from `rows_used` on, which belong to the next packed sequence. A tile that is
    not cut has none."""
    wait_full(stream.ring, n)
    if IS_VARLEN:  # noqa: SIM102 (known when compiled, and the others may not be)
        if is_cut:  # noqa: SIM102
            if rows_used < BLOCK_M:
                zero_values(stream.ring, n, rows_used)


@jit
def zero_queries_before(stream, n, row_first, band, rules):
    """Zeroes the rows of tile n of a stream that see nothing, in the first tile of a sequence."""
    if begins_early(rules.HAS_HIGH, rules):  # noqa: SIM102 (known when compiled, and the other is not)
        if row_first < band.q_seen:
            zero_head(stream.ring.pieces, n % stream.ring.stages, band.q_seen - row_first)


@jit
def zero_keys_before(pieces, tile, key_first, band, rules):
    """Zeroes the rows of a tile of K or V that nothing sees, in the first tile of a sequence."""
    if begins_early(rules.HAS_LOW, rules):  # noqa: SIM102 (known when compiled, and the other is not)
        if key_first < band.k_seen:
            zero_head(pieces, tile, band.k_seen - key_first)


@jit
def row_of(span, place, band, rules):
    """Returns the first query of the place-th tile of a span."""
    return band.q_begin + tile_at(span, place, rules) * rules.BLOCK_M


@jit
def place_of_step(i, first_head, count, span, TILES_FIRST: gl.constexpr, rules):
    """Returns the query head and the tile of queries of the i-th step of a block with `count` query heads (`heads_of`).

    With TILES_FIRST all heads of a group come at a tile before the next tile, as the joint launch needs it: otherwise a
    block that sees fewer tiles than the first block, and walks to the first tile, would get ahead of it, and wait at
    each head until that block stores (turns.py). In the other launches of keys nothing waits, and the orders were not
    timed.
    """
    if TILES_FIRST:
        h = i % count
        tile = tile_at(span, i // count, rules)
    else:
        tiles = span.end - span.begin
        h = i // tiles
        tile = tile_at(span, i % tiles, rules)
    return first_head + h, tile


@jit
def listed(walk, i, is_there=True):
    """Returns the i-th step of a list, 0 if it is not there."""
    return gl.load(walk + 1 + 2 * i, mask=is_there, other=0)


@jit
def rank_listed(walk, i):
    """Returns the rank of the i-th step of a list: how many earlier blocks list it, -1 if the block shows nothing."""
    return gl.load(walk + 2 + 2 * i)


@jit
def step_of(step, work, heads, rules):
    """Returns the query head and the first query of a listed step of a block of keys."""
    return work.head * heads.group_size + step % heads.group_size, step // heads.group_size * rules.BLOCK_M


@jit
def listed_step(walk, i, work, heads, rules):
    """Returns the query head and the first query of the i-th step of a list. If all steps have the same words, a block
    lists all of them, or, if it shows nothing, any one, and the list need not be read."""
    if rules.MASK_PER_STEP:
        step = listed(walk, i)
    else:
        step = heads.rows // rules.BLOCK_M * heads.group_size - 1 - i
    return step_of(step, work, heads, rules)


@jit
def rows_of(stream, n):
    """Returns the pieces of tile n as matrices."""
    return matrices(stream.ring.pieces, n % stream.ring.stages)


@jit
def statistics_of(stream, n, FIRST: gl.constexpr, COUNT: gl.constexpr, layout: gl.constexpr):
    """Returns the statistics of COUNT rows of tile n, from row FIRST on."""
    line = stream.statistics.index(n % stream.ring.stages)
    return line.reshape([line.shape[-1]]).slice(FIRST, COUNT, dim=0).load(layout)


@jit
def matrices(pieces, tile):
    """Returns the pieces of a tile as matrices."""
    found = ()
    for i in gl.static_range(len(pieces)):
        found = found + (matrix(pieces[i].index(tile)),)
    return found


@jit
def zero_sums(pieces):
    """Returns an accumulator of zeros for each piece."""
    found = ()
    for i in gl.static_range(len(pieces)):
        found = found + (zero_accumulator(pieces[i].shape[-1]),)
    return found


@jit
def times(x, factor):
    """Returns every piece of x times a factor."""
    found = ()
    for i in gl.static_range(len(x)):
        found = found + (x[i] * factor,)
    return found


@jit
def hide_rows_behind(words, row_first, rows_end, rules):
    """Returns the words of 64 rows from row_first on, 0 for rows from rows_end on; unused without a mask."""
    if rules.HAS_MASK:
        rows = row_first + gl.arange(0, ROWS, gl.SliceLayout(1, words.type.layout))
        words = gl.where((rows < rows_end)[:, None], words, 0)
    return words


@jit
def probabilities(
    x, lse_log2, band, row_first, key_first, slope_log2, words, bias, KEYS_FIRST: gl.constexpr, is_cut, rules,
):  # fmt: skip
    """Returns P and 1 - tanh^2 of a tile of raw scores; the latter is P itself, unused, without a softcap.

    Args:
        x: scores before the scale, float32: [keys, queries] if KEYS_FIRST, else [queries, keys].
        lse_log2: log-sum-exp of the queries in bits, as a row or a column beside x; +inf for a query that sees nothing.
            words: words of a mask (words.py); unused without one.
        bias: in natural units, to be broadcast to x; unused without one.
        is_cut: whether an edge of the band passes through the tile, or the keys end within it. Known when
            compiled, or chosen at run time by a branch.
    """
    cap = x
    if rules.HAS_SOFTCAP:
        t = tanh(x * rules.scale)
        cap = 1.0 - t * t
        exponent = t * rules.softcap_log2 - lse_log2
    else:
        exponent = x * rules.scale - lse_log2
    if rules.HAS_ALIBI:
        rows, keys = places(x, row_first, key_first, KEYS_FIRST)
        exponent -= slope_log2 * gl.abs(rows + band.offset - keys).to(gl.float32)
    if rules.BIAS != "":
        exponent += bias.to(gl.float32) * LOG2_E
    if rules.HAS_MASK:
        exponent = hide_words(exponent, words, x.shape[1])
    if rules.BIAS == "":
        p = exp2(exponent)
    else:
        p = exp2_at_most_one(exponent)
    if is_cut:
        p = gl.where(visible(p, band, row_first, key_first, KEYS_FIRST, rules), p, 0.0)
    return p, cap


@jit
def signed(p, row_first, key_first, KEYS_FIRST: gl.constexpr, rules):
    """Returns P, negated where dropout drops a pair; P without dropout."""
    if has_dropout(rules.dropout):
        p = drop(p, rules.dropout, row_first, key_first, KEYS_FIRST, True)
    return p


@jit
def kept(p, rules):
    """Returns `signed` P with zeros for dropped pairs, before dropout's scale."""
    if has_dropout(rules.dropout):
        p = gl.maximum(p, 0.0)
    return p


@jit
def gradient(p, dp, delta, rules):
    """Returns P (dP - delta) from `signed` P and from dP of the probabilities that dropout leaves."""
    if has_dropout(rules.dropout):
        # Without a comparison and a selection, which run at half the rate of products.
        ds = kept(p, rules) * (dp * rules.dropout.scale) - gl.abs(p) * delta
    else:
        ds = p * (dp - delta)
    return ds


@jit
def places(x, row_first, key_first, KEYS_FIRST: gl.constexpr):
    """Returns the query and the key of each score of a tile, to be broadcast against each other."""
    upright = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    across = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    if KEYS_FIRST:
        return row_first + across, key_first + upright
    else:
        return row_first + upright, key_first + across


@jit
def slope_of(slopes_ptr, stride_alibi_b, work, head, rules):
    """Returns a head's ALiBi slope in bits, 0 without ALiBi."""
    slope = gl.to_tensor(0.0)
    if rules.HAS_ALIBI:
        slope = gl.load(slopes_ptr + work.batch.to(gl.int64) * stride_alibi_b + head) * LOG2_E
    return slope


@jit
def meet():
    """Waits for both consumers at a barrier that the compiler's placement of barriers does not see."""
    number = gl.full([128], FREE_BARRIER, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        "barrier.sync $1, 256; mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@jit
def store_pieces(
    x, maps, buffers, I: gl.constexpr, ptr, strides, batch, head, row, row_end, WIDTH: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):  # fmt: skip
    """Stores 64 rows of a gradient, a tuple of pieces [64, width], as rows `row` to `row_end` of a head of WIDTH
    columns. They are stored by TMA, which stops at the tensor's end, through the I-th tile of `buffers`; or from
    registers if a packed sequence ends inside, because another one follows, and if the gradient is one of several
    splits (`is_of_split`)."""
    if IS_VARLEN:
        batch = gl.to_tensor(0)
    if is_of_split(ptr, buffers):
        store_rows_of_pieces(x, ptr, strides, batch, head, row, row_end, WIDTH, factor_of(WIDTH))
    else:
        for i in gl.static_range(len(maps)):
            matrix(buffers[i].index(I)).store(x[i].to(maps[i].dtype))
        fence_async_shared()
        if IS_VARLEN:
            if row + ROWS <= row_end:
                for i in gl.static_range(len(maps)):
                    tma_store(maps[i], [0, head, row, columns_before(x, i)], buffers[i].index(I))
            else:
                store_rows_of_pieces(x, ptr, strides, batch, head, row, row_end, WIDTH, 1)
        else:
            for i in gl.static_range(len(maps)):
                tma_store(maps[i], [batch, head, row, columns_before(x, i)], buffers[i].index(I))


@constexpr_function
def is_of_split(ptr, buffers):
    """Returns whether dK or dV are float32 in memory: those of one split of several (`config.group_splits`), or of one
    part of a divided block, where whole blocks have others (`config.divided_tail`)."""
    return ptr.dtype.element_ty != buffers[0].dtype


@constexpr_function
def has_parts(dk_ptr, keys, rules):
    """Returns whether blocks of the joint launch are divided into parts: `config.divided_tail`. The results of splits
    are float32 too, but splits are those of calls that `config.divides_steps` excludes."""
    return is_of_split(dk_ptr, keys) and not (rules.HAS_LOW or rules.HAS_HIGH or rules.IS_VARLEN or rules.HAS_MASK)


@constexpr_function
def factor_of(width):
    """Returns the largest power of two up to 8 that divides a width, and so the strides of a contiguous tensor."""
    return math.gcd(int(width), 8)


@constexpr_function
def columns_before(x, i):
    """Returns the columns of the pieces before the i-th."""
    return sum(int(piece.shape[-1]) for piece in list(x)[: int(i)])


@jit
def store_rows_of_pieces(
    x, ptr, strides, batch, head, row, row_end, WIDTH: gl.constexpr, FACTOR: gl.constexpr
):  # fmt: skip
    """Stores pieces of 64 rows, as `store_rows`."""
    stride_b, stride_h, stride_m = strides
    for i in gl.static_range(len(x)):
        store_rows(
            x[i], ptr + columns_before(x, i), stride_b, stride_h, stride_m, batch, head, row, row_end,
            WIDTH - columns_before(x, i), FACTOR,
        )  # fmt: skip


@jit
def store_rows(
    x, ptr, stride_b, stride_h, stride_m, batch, head, row, row_end, WIDTH: gl.constexpr, FACTOR: gl.constexpr
):  # fmt: skip
    """Stores rows of x, [64, padded width], as rows `row` to `row_end` of a head; the last stride is 1, and the others
    are multiples of FACTOR."""
    # No-ops that tell the compiler about a common factor: a thread then stores its two columns at once. The whole
    # backward of four calls with splits is 1.02 to 1.13 times as fast with it. At the ends of packed sequences, calls
    # at head_dim 128 became slower (docs/notes/backward.md).
    stride_b = stride_b // FACTOR * FACTOR
    stride_h = stride_h // FACTOR * FACTOR
    stride_m = stride_m // FACTOR * FACTOR
    layout: gl.constexpr = x.type.layout
    rows = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    ptr += batch.to(gl.int64) * stride_b + head.to(gl.int64) * stride_h
    inside = (rows < row_end)[:, None] & (columns < WIDTH)[None, :]
    offsets = rows.to(gl.int64)[:, None] * stride_m + columns[None, :]
    gl.store(ptr + offsets, x.to(ptr.dtype.element_ty), mask=inside)
