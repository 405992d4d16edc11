"""The keys that 64 rows of the Hopper forward see: tiles that need a mask, tiles that need none, tiles to skip."""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from typing import NamedTuple

from warpwave.kernels.hopper.dropout import PERIOD, has_dropout
from warpwave.kernels.hopper.parts import ROWS
from warpwave.runtime.gluon_or_stub import aggregate, constexpr_function, gl, jit


class Options(NamedTuple):
    """The options of a call that are the same for all its tiles; compile-time options are in capitals."""

    window_left: int
    window_right: int
    # The factor of raw scores: softmax_scale * log2(e), or softmax_scale with a bias, which is added in natural units
    # (flash_fwd/mask_bias.py). With a softcap, softmax_scale / softcap.
    scale: float
    softcap: float  # the factor of the softcap's tanh: softcap * log2(e), or softcap with a bias; 0 without a softcap
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
    PARTS: gl.constexpr  # of a float32 operand: 1 or 2 of float16, 3 of bfloat16; 1 for 16-bit types
    HEAD_DIM_V: gl.constexpr  # in float32; 0 for 16-bit types
    HEADS: gl.constexpr  # query heads of a kv head whose rows alternate in a tile of queries


@aggregate
class Rules:
    """The options, and what a consumer replaces for a head or a tile: the scale, dropout and factors.

    `aggregate` replaces the field `options` by its own fields: code reads `rules.BLOCK_N`, not `rules.options.BLOCK_N`.
    """

    options: Options
    ALIGN_KEYS: gl.constexpr = False  # whether tiles of keys begin at multiples of their length
    NARROWS_QUERIES: gl.constexpr = False  # whether consumers convert bfloat16 queries to float16
    RAISES: gl.constexpr = False  # whether probabilities are multiplied by 2^softmax.RAISE
    dropout: object = None  # dropout.OfCall, in a consumer that of its head; () without dropout
    # factors.Factors or token_factors.TokenFactors; () if k has no factors
    factors: object = None


@constexpr_function
def queries_of_warpgroup(rules):
    """Returns the queries of a consumer warpgroup's rows: row r is query r // HEADS of head r % HEADS."""
    return int(ROWS) // int(rules.HEADS)


@constexpr_function
def queries_of_block(rules):
    """Returns the queries of a block's rows."""
    return queries_of_warpgroup(rules) * int(rules.GROUPS)


@jit
def first_query(work, GROUP: gl.constexpr, rules):
    """Returns the first query of a consumer."""
    return (work.tile * rules.GROUPS + GROUP) * queries_of_warpgroup(rules)


@jit
def heads_of_rows(head, rows, rules):
    """Returns the query head of each row. `head` counts as in `groups.Schedule`."""
    if rules.HEADS > 1:
        head = head * rules.HEADS + rows % rules.HEADS
    return head


@jit
def place_of_queries(batch, head, query, column, rules):
    """Returns where a tile of queries begins in a tensor map, whose axes are (batch, head, query, head of the tile,
    column) if several heads share a tile."""
    if rules.HEADS > 1:
        return batch, head, query, 0, column
    else:
        return batch, head, query, column


@aggregate
class Keys:
    """The keys of a sequence that some query sees, [begin, end), and the band: low <= key - query <= high."""

    begin: gl.tensor
    end: gl.tensor
    low: gl.tensor
    high: gl.tensor


@jit
def keys_of_sequence(work, rules):
    """Returns the visible keys of a sequence. Tiles of keys start at `begin`; keys before it, and from `end` on, are
    seen by no query and are never multiplied. With dropout, `begin` is rounded down (dropout.py)."""
    offset = work.seqlen_k - work.seqlen_q
    low = offset - rules.window_left
    high = offset + rules.window_right
    if rules.TOP_LEFT:
        high = gl.minimum(high, 0)
    begin = gl.to_tensor(0)
    end = work.seqlen_k
    if rules.HAS_LOW:
        begin = gl.minimum(gl.maximum(low, 0), work.seqlen_k)
        if rules.ALIGN_KEYS:
            begin = begin // rules.BLOCK_N * rules.BLOCK_N
        if has_dropout(rules.dropout):
            begin = begin // PERIOD * PERIOD
    if rules.HAS_HIGH:
        end = gl.maximum(gl.minimum(end, work.seqlen_q + high), begin)
    return Keys(begin, end, low, high)


@jit
def tiles_seen(keys, row_first, row_last, rules):
    """Returns [begin, end) of the key tiles of which rows row_first to row_last see some key; may be empty."""
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
    """Returns the key tiles loaded for a block of queries: those that its rows see, or one fully masked tile if they
    see nothing, so that all blocks run the same code."""
    row_first = work.tile * queries_of_block(rules)
    row_last = gl.minimum(row_first + queries_of_block(rules), work.seqlen_q) - 1
    begin, end = tiles_seen(keys, row_first, row_last, rules)
    none = end <= begin
    return gl.where(none, 0, begin), gl.where(none, 1, end)


@aggregate
class Place:
    """Position of 64 rows: their first query, the offset from a query to its own key, and ALiBi's slope."""

    row_first: gl.tensor
    offset: gl.tensor
    slope_log2: gl.tensor


@jit
def place_of_group(work, keys, block_begin, block_end, GROUP: gl.constexpr, rules):
    """Returns a consumer's queries, and the key tiles they see among those loaded for the block.

    Returns:
        place.
        begin, end: key tiles to process, at least one.
        whole_begin, whole_end: the tiles among them that need no mask. `end - 1` is excluded and always masked.
    """
    row_first = first_query(work, GROUP, rules)
    row_last = gl.minimum(row_first + queries_of_warpgroup(rules), work.seqlen_q) - 1
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
