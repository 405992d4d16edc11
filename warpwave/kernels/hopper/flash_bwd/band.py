"""Which queries see the keys of a block, and which tiles of scores need a mask, in Hopper's backward.

Unlike in the forward, a block owns keys, and its loop runs over queries. Tiles of queries begin at the first query that
sees a key, and tiles of keys at the first key that a query sees, so that rows outside the band are never multiplied: 0
* NaN is NaN.
"""

# No postponed annotations here: an aggregate's fields are checked against its annotations.

from typing import NamedTuple

from warpwave.kernels.hopper import scheduler
from warpwave.kernels.hopper.dropout import PERIOD, has_dropout
from warpwave.kernels.hopper.groups import KeyGradients, KeySchedule
from warpwave.kernels.hopper.parts import columns_apart
from warpwave.kernels.hopper.words import TILE_KEYS
from warpwave.runtime.gluon_or_stub import aggregate, constexpr_function, gl, jit


class Options(NamedTuple):
    """The options of a call that hold for all its tiles; compile-time options are in capitals."""

    window_left: int
    window_right: int
    statistic_rows: int  # rows of statistics of one head of an item, whole tiles (rows.py)
    scale: float  # softmax_scale * log2(e); with softcap, softmax_scale / softcap
    softcap_log2: float
    softmax_scale: float
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    HAS_LOW: gl.constexpr
    HAS_HIGH: gl.constexpr
    TOP_LEFT: gl.constexpr
    HAS_ALIBI: gl.constexpr
    HAS_SOFTCAP: gl.constexpr
    IS_VARLEN: gl.constexpr
    IS_UNEVEN: gl.constexpr  # whether blocks of keys have different numbers of query heads
    ASCENDS: gl.constexpr  # whether blocks of keys walk their queries from the first tile to the last (config.ascends)
    HAS_MASK: gl.constexpr
    MASK_PER_STEP: gl.constexpr  # launches.mask_per_step
    BIAS: gl.constexpr  # host.bias_kind


@aggregate
class Rules:
    """The options, and dropout: `dropout.OfCall`, in a consumer that of a head; () without dropout."""

    options: Options
    dropout: object


@aggregate
class Band:
    """The band of one sequence: low <= key - query <= high, and the rows that lie in it.

    Args:
        low, high: see problem.Band.
        offset: seqlen_k - seqlen_q, the distance from a query to its own key.
        q_begin, q_end: the queries that see a key. Tiles of queries begin at q_begin.
        k_begin, k_end: the keys that a query sees. Tiles of keys begin at k_begin.
        q_seen, k_seen: the first query that sees a key, and the first key that a query sees, if q_begin and k_begin
            were rounded down.
    """

    low: gl.tensor
    high: gl.tensor
    offset: gl.tensor
    q_begin: gl.tensor
    q_end: gl.tensor
    k_begin: gl.tensor
    k_end: gl.tensor
    q_seen: gl.tensor
    k_seen: gl.tensor


@jit
def band_of(work, rules):
    """Returns the band of a work item's sequence."""
    offset = work.seqlen_k - work.seqlen_q
    low = offset - rules.window_left
    high = offset + rules.window_right
    if rules.TOP_LEFT:
        high = gl.minimum(high, 0)
    q_begin = gl.to_tensor(0)
    q_end = work.seqlen_q
    k_begin = gl.to_tensor(0)
    k_end = work.seqlen_k
    if rules.HAS_HIGH:
        q_begin = gl.minimum(gl.maximum(-high, 0), work.seqlen_q)
        k_end = gl.maximum(gl.minimum(k_end, work.seqlen_q + high), 0)
    if rules.HAS_LOW:
        q_end = gl.maximum(gl.minimum(q_end, work.seqlen_k - low), q_begin)
        k_begin = gl.minimum(gl.maximum(low, 0), k_end)
    if rules.HAS_LOW and rules.TOP_LEFT:  # the window may lie past the causal edge of every query
        q_end = gl.where(low > high, q_begin, q_end)
    # Tiles of a mask share no words. Tiles of a bias begin at a multiple of 16 bytes, otherwise the copy engine raises
    # an illegal instruction. Rows that nothing sees are then zeros (prepass/zero_unseen.py).
    q_seen = q_begin
    k_seen = k_begin
    if rules.HAS_MASK or rules.BIAS != "":
        q_begin = q_begin // TILE_KEYS * TILE_KEYS
        k_begin = k_begin // TILE_KEYS * TILE_KEYS
    elif has_dropout(rules.dropout):
        q_begin = q_begin // PERIOD * PERIOD
        k_begin = k_begin // PERIOD * PERIOD
    return Band(low, high, offset, q_begin, q_end, k_begin, k_end, q_seen, k_seen)


@constexpr_function
def begins_early(has_edge, rules):
    """Returns whether the first tile may begin with rows that nothing sees, which may be NaN. With a mask or bias such
    rows are zeros (prepass/zero_unseen.py).

    Args:
        has_edge: HAS_HIGH for queries, HAS_LOW for keys.
    """
    return bool(has_edge) and has_dropout(rules.dropout) and not (rules.HAS_MASK or rules.BIAS != "")


@aggregate
class Span:
    """The query tiles of a block of keys, which walks them from the last to the first, or the other way (turns.py).

    Args:
        begin, end: all tiles; none if end <= begin.
        whole_begin, whole_end: the tiles that need no mask: no edge of the band cuts them, nor a sequence's end.
    """

    begin: gl.tensor
    end: gl.tensor
    whole_begin: gl.tensor
    whole_end: gl.tensor


@jit
def query_span(band, key_first, rules):
    """Returns the tiles of queries that see a key of the block that begins at key_first."""
    first = band.q_begin
    last = band.q_end
    key_last = key_first + rules.BLOCK_N - 1
    if rules.HAS_HIGH:
        first = gl.maximum(first, key_first - band.high)
    if rules.HAS_LOW:
        last = gl.minimum(last, gl.minimum(key_last, band.k_end - 1) - band.low + 1)
    begin = gl.maximum(first - band.q_begin, 0) // rules.BLOCK_M
    end = gl.maximum(gl.cdiv(gl.maximum(last - band.q_begin, 0), rules.BLOCK_M), begin)
    whole_begin = begin
    whole_end = end
    if rules.HAS_HIGH:
        whole_begin = gl.cdiv(gl.maximum(key_last - band.high - band.q_begin, 0), rules.BLOCK_M)
        whole_begin = gl.minimum(gl.maximum(whole_begin, begin), end)
    if rules.HAS_LOW:
        whole_end = gl.maximum(key_first - band.low - band.q_begin + 1, 0) // rules.BLOCK_M
        whole_end = gl.minimum(gl.maximum(whole_end, whole_begin), end)
    if rules.IS_VARLEN:  # queries of another sequence follow the last one
        ragged = gl.maximum(band.q_end - band.q_begin, 0) // rules.BLOCK_M
        whole_end = gl.maximum(gl.minimum(whole_end, ragged), whole_begin)
    # If the keys end within the block, every tile is cut.
    whole_end = gl.where(key_last < band.k_end, whole_end, whole_begin)
    return Span(begin, end, whole_begin, whole_end)


@jit
def tile_at(span, i, rules):
    """Returns the i-th tile that is walked."""
    if rules.ASCENDS:
        return span.begin + i
    else:
        return span.end - 1 - i


@jit
def is_cut(span, i, rules):
    """Returns whether the i-th tile that is walked needs a mask."""
    tile = tile_at(span, i, rules)
    return (tile < span.whole_begin) | (tile >= span.whole_end)


@jit
def key_tiles(band, row_first, row_end, rules):
    """Returns [begin, end) of the key tiles that the queries from row_first to row_end see. May be empty."""
    first = band.k_begin
    last = band.k_end
    if rules.HAS_LOW:
        first = gl.maximum(first, row_first + band.low)
    if rules.HAS_HIGH:
        row_last = gl.minimum(row_end, band.q_end) - 1
        last = gl.minimum(last, row_last + band.high + 1)
    begin = gl.maximum(first - band.k_begin, 0) // rules.BLOCK_N
    end = gl.cdiv(gl.maximum(last - band.k_begin, 0), rules.BLOCK_N)
    return begin, end


@jit
def visible(x, band, row_first, key_first, KEYS_FIRST: gl.constexpr, rules):
    """Returns which pairs of a tile lie in the band.

    Args:
        x: the tile, [keys, queries] if KEYS_FIRST, else [queries, keys]; row_first and key_first are its first ones.
    """
    upright = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    constant, of_thread = columns_apart(x)
    if KEYS_FIRST:
        keys = key_first + upright
        first = gl.zeros_like(keys)
        if rules.HAS_HIGH:
            first = keys - (band.high + row_first)
        first = gl.where(keys < band.k_end, first, x.shape[1])
        seen = constant >= first[:, None] - of_thread
        if rules.HAS_LOW:
            last = keys - (band.low + row_first)
            seen = seen & (constant <= last[:, None] - of_thread)
    else:
        rows = row_first + upright
        last = gl.zeros_like(rows) + (band.k_end - 1 - key_first)
        if rules.HAS_HIGH:
            last = gl.minimum(last, rows + (band.high - key_first))
        seen = constant <= last[:, None] - of_thread
        if rules.HAS_LOW:
            first = rows + (band.low - key_first)
            seen = seen & (constant >= first[:, None] - of_thread)
    return seen


@jit
def work_on_keys(schedule: KeySchedule, offsets: KeyGradients, t, rules):
    """Returns tile t of the schedule as a block of keys of one split of a kv head: `work.head` is the kv head times the
    splits, plus the split. The blocks of a head come in the order that turns.py requires: in that of their keys, which
    under a causal mask is the longest first, or from the last keys to the first.

    Args:
        schedule, offsets: their fields of queries are those of keys.
    """
    work = scheduler.tile_of(schedule, offsets, t, rules.BLOCK_N, True, rules.IS_VARLEN)
    tile = work.tile
    if not rules.ASCENDS:
        tile = gl.cdiv(work.seqlen_q, rules.BLOCK_N) - 1 - tile  # the schedule begins with the last
    return scheduler.Work(
        tile, work.batch, work.head, work.k_begin, work.seqlen_k, work.q_begin, work.seqlen_q
    )  # fmt: skip


@jit
def first_statistic(work, TILE: gl.constexpr, rules):
    """Returns where the statistics of a sequence begin in a row of `rows.py`, whose tiles have TILE queries."""
    first = gl.to_tensor(0)
    if rules.IS_VARLEN:
        first = (work.q_begin // TILE + work.batch) * TILE
    return first
