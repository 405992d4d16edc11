"""Boolean masks and biases of the Hopper forward: how they change scores, and how hidden values stay without effect.

The mask is packed into words (prepass/mask_bits.py). Plain loads, which overlap with the product of queries and keys,
read the words, and a bias that is the same for all queries or for all keys. A bias with a number for each score is
loaded by TMA with the tile of K (`load_bias`). If no tensor map can describe it, the host copies it first
(`mappable_bias` in ../host.py).

A value that no query of a block sees must have no effect. V goes from global memory to the tensor cores unchanged,
and a probability of 0 times NaN is NaN. A block whose output is finite is therefore correct. A block whose output is
not finite reports this instead of storing it, and the producer loads the block again as a careful pass: the rows of V
that none of its queries sees are first zeroed in shared memory. If all values are finite, the only cost is a sum over
the output.

A block is also repeated if a bias moves all scores of a row far from 0 (`is_far`). Its other rows are then computed in
bits too, and may differ by rounding from those of a block without such a row.
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from typing import NamedTuple

from warpwave import problem
from warpwave.kernels.hopper import scheduler
from warpwave.kernels.hopper.parts import (
    LN_2,
    LOG2_E,
    ROWS,
    accumulator_layout,
    is_a,
    matrix,
    multiply_add,
    tanh_of_tile,
    wait_full,
    zero_accumulator,
)
from warpwave.kernels.hopper.rows import row_vectors
from warpwave.kernels.hopper.softmax import in_bits, with_values, without_offset
from warpwave.kernels.hopper.visible import Keys
from warpwave.kernels.hopper.words import TILE_KEYS, beside_an_accumulator, hide_words
from warpwave.runtime.gluon_or_stub import aggregate, constexpr_function, fence_async_shared, gl, jit, tma_load
from warpwave.runtime.parameters import Pointer

LARGEST_BIAS = gl.constexpr(problem.LARGEST_BIAS)
# Careful levels of a pass over a block (../scheduler.py); the first pass has level 0.
HIDING = gl.constexpr(1)  # zeroes the values that no query of the block sees, and a bias of -inf hides any score
FAR = gl.constexpr(2)  # also converts scores to bits before their maximum is taken
# At this magnitude scores round to 2^-8 bits, which changes a probability by less than 16-bit rounding does.
FAR_BITS = gl.constexpr(2.0**16)


class MaskAndBias(NamedTuple):
    """Mask and bias of a call.

    Attributes:
        words_ptr: the packed mask (prepass/mask_bits.py), and flags of what it shows from `flags_begin` on.
        bias_ptr: the bias; its stride along keys is 1 or 0. Strides along broadcast axes are 0.
        stride_words_t, stride_flags_m: strides along tiles of 128 keys, and along 64 rows.
        BIAS: "" without a bias; "cells" for one per score; "keys" if it is the same for all queries, "rows" if it is
            the same for all keys.
    """

    stride_words_b: int
    stride_words_h: int
    stride_words_t: int
    stride_words_m: int
    flags_begin: int
    stride_flags_b: int
    stride_flags_h: int
    stride_flags_m: int
    stride_bias_b: int
    stride_bias_h: int
    stride_bias_m: int
    words_ptr: Pointer
    bias_ptr: Pointer
    HAS_MASK: gl.constexpr
    BIAS: gl.constexpr


@aggregate
class Beside:
    """Mask and bias of a call, at least one of them.

    Args:
        maps, tiles: if each score has its own bias, its tensor map and its tiles of 64 queries in shared memory: the
            stages of the ring of K times the groups. They are loaded with K.
    """

    mask_and_bias: MaskAndBias
    maps: gl.tuple
    tiles: gl.shared_memory_descriptor


@aggregate
class MaskedPlace:
    """A `visible.Place` with its mask and bias.

    Args:
        words, bias: offsets of the lines of its queries; 0 without such a tensor.
        beside: `Beside` of the call.
        box, message: the mailbox and the number of the message that announced the block.
        seqlen_q: queries of the sequence.
        group: which 64 queries of the block.
    """

    row_first: gl.tensor
    offset: gl.tensor
    slope_log2: gl.tensor
    words: gl.tensor
    bias: gl.tensor
    beside: Beside
    box: scheduler.Mailbox
    message: gl.tensor
    seqlen_q: gl.tensor
    group: gl.constexpr


@constexpr_function
def is_added(beside):
    """Returns whether there is a mask or a bias. `beside` is a `Beside`, () for neither, or a place."""
    return is_a(beside, "words_ptr") or is_a(beside, "beside")


@constexpr_function
def is_masked(beside):
    """Returns whether there is a mask; `beside` as for `is_added`."""
    return is_added(beside) and bool(getattr(beside, "beside", beside).HAS_MASK)


@jit
def aligned(keys):
    """Returns the keys rounded down to a multiple of a word tile, so that tiles share no words and bias is read in
    pairs."""
    return Keys(keys.begin // TILE_KEYS * TILE_KEYS, keys.end, keys.low, keys.high)


@jit
def with_lines(place, beside, work, box, message, GROUP: gl.constexpr, rules):
    """Returns the place with the offsets of its queries' lines. Queries past the last one use the last one's lines."""
    zero = gl.to_tensor(0)
    words = zero
    bias = zero
    batch = work.batch.to(gl.int64)
    head = work.head.to(gl.int64)
    if beside.HAS_MASK:
        layout: gl.constexpr = beside_an_accumulator(zero_accumulator(rules.BLOCK_N)).type.layout
        of_words: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, layout))
        rows = place.row_first + gl.arange(0, ROWS, gl.SliceLayout(1, of_words))
        rows = gl.minimum(rows, work.seqlen_q - 1)
        begins = rows.to(gl.int64) * beside.stride_words_m
        words = beside.words_ptr + (batch * beside.stride_words_b + head * beside.stride_words_h)
        words = words + begins[:, None] + gl.arange(0, 4, gl.SliceLayout(0, of_words))[None, :]
    if beside.BIAS != "":
        bias = beside.bias_ptr + batch * beside.stride_bias_b + head * beside.stride_bias_h
        if beside.BIAS == "rows":
            of_rows: gl.constexpr = gl.SliceLayout(1, accumulator_layout(rules.BLOCK_N))
            rows = place.row_first + gl.arange(0, ROWS, of_rows)
            rows = gl.minimum(rows, work.seqlen_q - 1)
            bias = bias + rows.to(gl.int64) * beside.stride_bias_m
    return MaskedPlace(
        place.row_first, place.offset, place.slope_log2, words, bias, beside, box, message, work.seqlen_q, GROUP
    )


@jit
def read_ahead(tile, place, keys, rules, AT_EDGE: gl.constexpr):
    """Starts the loads of a tile's mask and bias: (words [64, 4], bias [64, BLOCK_N] or one line of it), () without
    either."""
    if not is_added(place):
        return ()
    else:
        return _read_ahead(tile, place, place.beside, keys, rules, AT_EDGE)


@jit
def _read_ahead(tile, place, beside, keys, rules, AT_EDGE: gl.constexpr):
    words = gl.to_tensor(0)
    bias = gl.to_tensor(0)
    key_first = keys.begin + tile * rules.BLOCK_N
    if beside.HAS_MASK:
        words = gl.load(place.words + (key_first // TILE_KEYS).to(gl.int64) * beside.stride_words_t)
    if beside.BIAS == "rows":
        bias = gl.load(place.bias)[:, None]
    elif beside.BIAS == "keys":
        columns = gl.arange(0, rules.BLOCK_N, gl.SliceLayout(0, accumulator_layout(rules.BLOCK_N)))
        line = place.bias + key_first + columns
        if AT_EDGE:
            bias = gl.load(line, mask=columns < keys.end - key_first, other=0.0)[None, :]
        else:
            bias = gl.load(line)[None, :]
    return words, bias


@constexpr_function
def bytes_beside(beside, groups):
    """Returns the bytes of bias that are loaded with a tile of K."""
    return int(groups) * sum(m.block_type.nbytes for m in beside.maps) if is_added(beside) else 0


@jit
def load_bias(beside, ring, n, work, key, rules):
    """Loads the bias of tile n of K by TMA once K's stage is free; its rows start at `key`."""
    if is_added(beside):
        for i in gl.static_range(len(beside.maps)):
            batch = gl.where(beside.stride_bias_b == 0, 0, work.batch)
            head = gl.where(beside.stride_bias_h == 0, 0, work.head)
            stage = n % ring.stages
            for g in gl.static_range(rules.GROUPS):
                place = [batch, head, (work.tile * rules.GROUPS + g) * ROWS, key]
                tma_load(beside.maps[i], place, ring.full.index(stage), beside.tiles.index(stage * rules.GROUPS + g))


@jit
def read_bias(ahead, place, ring, n, rules):
    """Returns what `read_ahead` loaded, with the bias that was loaded with tile n of K."""
    if is_added(place):
        return ahead[0], bias_of_tile(ahead[1], place.beside, ring, n, place.group, rules)
    else:
        return ahead


@jit
def bias_of_tile(bias, beside, ring, n, GROUP: gl.constexpr, rules):
    """Returns the tile's bias: from shared memory if each score has its own, else as read ahead."""
    if beside.BIAS == "cells":
        tile = matrix(beside.tiles.index(n % ring.stages * rules.GROUPS + GROUP))
        bias = tile.load(accumulator_layout(rules.BLOCK_N))
    return bias


@jit
def scores_in_bits(scores, ahead, tile, place, keys, rules, AT_EDGE: gl.constexpr):
    """Returns what `softmax.in_bits` returns, for a call with mask or bias.

    The first pass over a block and a pass that only hides values compute all tiles alike, so that a repeated block has
    the same bits. The bias is added in natural units, and the factor to bits is then part of the softmax's fused
    multiply-add. A pass at level FAR adds the bias in bits. The scale is never 0 here, because 0 * -inf is NaN: in 16
    bits the host passes 2^-100 instead (`launches.after_schedule`), in float32 `scaled_rules` bounds it.
    """
    if not is_added(place):
        return in_bits(scores, tile, place, keys, rules, AT_EDGE)
    else:
        beside = place.beside
        scores = without_offset(scores)
        layout: gl.constexpr = scores.type.layout
        scale = rules.scale
        _, bias = ahead
        key_first = keys.begin + tile * rules.BLOCK_N
        rows = place.row_first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        columns = gl.arange(0, rules.BLOCK_N, gl.SliceLayout(0, layout))
        if rules.HAS_SOFTCAP:
            scores = tanh_of_tile(scores * scale) * rules.softcap
            scale = 1.0
        if beside.BIAS != "":
            bias = bias.to(gl.float32)
            to_bits = LOG2_E
            if AT_EDGE:
                in_bits_here = scheduler.careful_level(place.box, place.message) == FAR
                unit = gl.where(in_bits_here, LOG2_E, 1.0)
                to_bits = gl.where(in_bits_here, 1.0, LOG2_E)
                # A finite bias leaves its pair visible, so bits must not overflow (primitives.add_bias).
                bounded = gl.minimum(gl.maximum(bias, -LARGEST_BIAS), LARGEST_BIAS)
                bounded = gl.where(gl.abs(bias) < float("inf"), bounded, bias)
                scores = multiply_add(scores, scale * unit, bounded * unit, True)
                # -inf hides the pair, whatever the score: NaN + -inf would be NaN. On the other passes the output
                # reveals either case (`level_wanted`), and the whole block is repeated with every tile treated as an
                # edge tile.
                scores = gl.where(bias == float("-inf"), float("-inf"), scores)
            else:
                scores = multiply_add(scores, scale, bias, not rules.HAS_SOFTCAP)
            scale = to_bits
        if rules.HAS_ALIBI:
            slope = -place.slope_log2
            if beside.BIAS != "":
                slope = slope * LN_2
                if AT_EDGE:
                    slope = slope * unit
            own_key = rows + (place.offset - key_first)
            distance = gl.abs(columns[None, :] - own_key[:, None]).to(gl.float32)
            if beside.BIAS != "":
                scores = scores + slope * distance
            else:
                scores = multiply_add(scores, scale, slope * distance, not rules.HAS_SOFTCAP)
                scale = 1.0
        if AT_EDGE and not beside.HAS_MASK:
            last = gl.full([ROWS], keys.end - 1 - key_first, gl.int32, gl.SliceLayout(1, layout))
            if rules.HAS_HIGH:
                last = gl.minimum(last, rows + (keys.high - key_first))
            visible = columns[None, :] <= last[:, None]
            if rules.HAS_LOW:
                first = rows + (keys.low - key_first)
                visible = visible & (columns[None, :] >= first[:, None])
            scores = gl.where(visible, scores, float("-inf"))
        scores = hidden_by_mask(scores, ahead, tile, place, keys, rules)
        return with_values(scores, scale, rules, AT_EDGE)


@jit
def hidden_by_mask(scores, ahead, tile, place, keys, rules):
    """Sets the scores of a tile to minus infinity where a mask hides them. `ahead` is the result of `read_ahead`."""
    if is_masked(place):
        words = ahead[0]
        if rules.BLOCK_N < TILE_KEYS:
            words = words >> ((keys.begin + tile * rules.BLOCK_N) % TILE_KEYS // 4)
        scores = hide_words(scores, words, rules.BLOCK_N)
    return scores


@jit
def hide_by_position(scores, tile, place, keys, rules):
    """Sets scores to minus infinity where position hides them, for a tile that does not pass the last key.

    Words are made quickly from two limits a row; applying them costs a select per score, and nothing in a warp whose
    rows see the whole tile.
    """
    layout: gl.constexpr = beside_an_accumulator(zero_accumulator(rules.BLOCK_N)).type.layout
    of_words: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, layout))
    rows = place.row_first + gl.arange(0, ROWS, gl.SliceLayout(1, of_words)) // rules.HEADS
    columns = 2 * gl.arange(0, 4, gl.SliceLayout(0, of_words))
    key_first = keys.begin + tile * rules.BLOCK_N
    words = ~bits_below((rows + (keys.low - key_first))[:, None] - columns[None, :], rules.BLOCK_N)
    if rules.HAS_HIGH:
        words = words & bits_below((rows + (keys.high + 1 - key_first))[:, None] - columns[None, :], rules.BLOCK_N)
    return hide_words(scores, words, rules.BLOCK_N)


@jit
def bits_below(limit, BLOCK_N: gl.constexpr):
    """Returns a word whose bits mark the columns below a limit, counted from the word's first column: two columns out
    of every eight."""
    limit = gl.minimum(gl.maximum(limit, 0), BLOCK_N)
    return low_bits((limit >> 3) * 2 + gl.minimum(limit & 7, 2))


@jit
def low_bits(count):
    """Returns words whose lowest `count` bits, 0 to 32, are set."""
    return gl.inline_asm_elementwise("bmsk.clamp.b32 $0, 0, $1;", "=r,r", [count], dtype=gl.int32, is_pure=True, pack=1)


@constexpr_function
def has_masked_steps(place, rules):
    """Returns whether overlapped tiles may have hidden scores, including rows that are hidden entirely."""
    return is_added(place) or bool(rules.HAS_LOW)


@constexpr_function
def has_bias_tiles(place):
    """Returns whether a bias was loaded with K; each warp reads it from shared memory itself."""
    return is_added(place) and place.beside.BIAS == "cells"


# Tiles that a mask hides ----------------------------------------------------------------------------------------------


@jit
def tiles_shown(word, work, beside, rules, WARPS: gl.constexpr):
    """Returns one bit for each of 32 tiles of 128 keys, from number 32 * word on: whether some query of the block sees
    some of its keys."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    lanes = gl.arange(0, 32, layout)
    tile = word * 32 + lanes
    flags = beside.words_ptr + beside.flags_begin
    flags += work.batch.to(gl.int64) * beside.stride_flags_b + work.head.to(gl.int64) * beside.stride_flags_h
    there = tile < gl.cdiv(work.seqlen_k, TILE_KEYS)
    shown = gl.zeros([32], gl.int32, layout)
    for g in gl.static_range(rules.GROUPS):
        block = gl.minimum(work.tile * rules.GROUPS + g, (work.seqlen_q - 1) // ROWS)
        shown = shown | gl.load(flags + block.to(gl.int64) * beside.stride_flags_m + tile, mask=there, other=0)
    return gl.sum(shown << lanes, axis=0)


@jit
def word_of(tile, keys, rules):
    """Returns the word of `tiles_shown` that holds a tile's bit, and the bit's number."""
    at = (keys.begin + tile * rules.BLOCK_N) // TILE_KEYS
    return at // 32, at % 32


@jit
def shown_before(tile, word, bits, begin, work, keys, beside, rules, WARPS: gl.constexpr):
    """Returns the last tile before `tile` that some query of the block sees, or `begin - 1`; and the word examined
    last."""
    tile = tile - 1
    looking = tile >= begin
    while looking:
        of_tile, bit = word_of(tile, keys, rules)
        if of_tile != word:
            word = of_tile
            bits = tiles_shown(word, work, beside, rules, WARPS)
        looking = (bits >> bit) & 1 == 0
        if looking:
            tile = tile - 1
            looking = tile >= begin
    return tile, word, bits


# Repeated blocks ------------------------------------------------------------------------------------------------------


@jit
def is_far(m_i):
    """Returns which rows have a maximum, in bits, too far from 0 to be rounded safely. The softmax rounds the maximum
    to bits but not the scores; in a row of biases near -1e9 they would differ by tens of bits."""
    return (gl.abs(m_i) >= FAR_BITS) & (m_i != float("-inf"))


@jit
def level_wanted(out, doubtful_rows, far, level, beside):
    """Returns the careful level at which a block must be repeated; 0 if its output is correct.

    Args:
        out: the output. If it is not finite, values that no query sees may have entered it.
        doubtful_rows: [64] rows that saw nothing; with a bias, a score may have overflowed in bits.
        far: [64] `is_far`.
        level: level of this pass.
    """
    total = gl.sum(out[0] * 0.0, axis=1)
    for i in gl.static_range(1, len(out)):
        total += gl.convert_layout(gl.sum(out[i] * 0.0, axis=1), total.type.layout)
    wanted = gl.where(total != 0.0, HIDING, 0)  # a sum of 0 and NaN is NaN
    if beside.BIAS != "":
        of_rows = gl.where(far, FAR, gl.where(doubtful_rows, HIDING, 0))
        wanted = gl.maximum(wanted, gl.convert_layout(of_rows, total.type.layout))
    wanted = gl.max(wanted, axis=0)
    return gl.where(wanted > level, wanted, 0)


@jit
def without_unseen(v_ring, n, tile, place, keys, rules):
    """Zeroes, in a repeated block, the values of tile n that no query of the block sees, after waiting for them. Every
    consumer does so itself; they write the same values."""
    if is_added(place):  # noqa: SIM102 (known when compiled, and the other is not)
        if scheduler.is_careful(place.box, place.message):
            seen = keys_seen(tile, place, place.beside, keys, rules)
            wait_full(v_ring, n)
            for i in gl.static_range(len(v_ring.pieces)):
                for part in gl.static_range(v_ring.parts):
                    keep_rows(matrix(v_ring.pieces[i].index(n % v_ring.stages * v_ring.parts + part)), seen)
            fence_async_shared()


@jit
def keys_seen(tile, place, beside, keys, rules):
    """Returns which keys of a tile some query of the whole block sees, int32 [BLOCK_N]. Every group computes the
    same."""
    layout: gl.constexpr = gl.BlockedLayout([16, 1], [1, 32], [1, 4], [1, 0])  # one key per thread
    # The length of the keys is not used below, so the length of the queries is passed in its place.
    work = scheduler.read(place.box, place.message, place.seqlen_q, place.seqlen_q, False)
    columns = gl.arange(0, rules.BLOCK_N, gl.SliceLayout(0, layout))
    key = keys.begin + tile * rules.BLOCK_N + columns
    batch = work.batch.to(gl.int64)
    head = work.head.to(gl.int64)
    words = beside.words_ptr
    bias = beside.bias_ptr
    if beside.HAS_MASK:
        words = words + (batch * beside.stride_words_b + head * beside.stride_words_h)
        words = words + ((key // TILE_KEYS).to(gl.int64) * beside.stride_words_t + key % 8 // 2)
    if beside.BIAS != "":
        bias = bias + (batch * beside.stride_bias_b + head * beside.stride_bias_h)
    seen = gl.zeros([rules.BLOCK_N], gl.int32, gl.SliceLayout(0, layout))
    for first in range(0, ROWS * rules.GROUPS, 16):
        rows = work.tile * ROWS * rules.GROUPS + first + gl.arange(0, 16, gl.SliceLayout(1, layout))
        rows = gl.minimum(rows, place.seqlen_q - 1)
        distance = key[None, :] - rows[:, None]
        there = (key < keys.end)[None, :] & (distance == distance)
        visible = there
        if rules.HAS_LOW and not beside.HAS_MASK:
            visible = visible & (distance >= keys.low)
        if rules.HAS_HIGH and not beside.HAS_MASK:
            visible = visible & (distance <= keys.high)
        wide = rows.to(gl.int64)
        if beside.HAS_MASK:
            found = gl.load(words[None, :] + (wide * beside.stride_words_m)[:, None], mask=there, other=0)
            bit = key % TILE_KEYS // 8 * 2 + key % 2
            visible = visible & (((found >> bit[None, :]) & 1) != 0)
        if beside.BIAS != "":
            place_of_row = wide * beside.stride_bias_m
            if beside.BIAS == "rows":
                cells = bias + (place_of_row[:, None] + (columns * 0)[None, :])
            else:
                cells = bias + (place_of_row[:, None] + key[None, :])
            visible = visible & (gl.load(cells, mask=there, other=0.0).to(gl.float32) != float("-inf"))
        seen = gl.maximum(seen, gl.max(visible.to(gl.int32), axis=0))
    return seen


@jit
def keep_rows(x, keep):
    """Zeroes the rows of x, in shared memory, for which `keep` is 0."""
    layout: gl.constexpr = row_vectors(x.shape[1])
    kept = gl.convert_layout(keep, gl.SliceLayout(1, layout)) != 0
    values = x.load(layout)
    x.store(gl.where(kept[:, None], values, gl.zeros_like(values)))
