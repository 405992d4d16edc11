"""Device code that the launches share: the probabilities of a tile, and the gradient of its scores.

A tile is [BLOCK_M, BLOCK_N] if a block owns queries, and transposed, [BLOCK_N, BLOCK_M], if it owns keys. The functions
take positions as two-dimensional tensors that broadcast to the tile, so they serve both.
"""

from __future__ import annotations

from warpwave.kernels.groups import ScoreRules, Window
from warpwave.kernels.primitives import LOG2_E, add_bias, tanh
from warpwave.runtime.triton_or_stub import jit, tl


@jit
def load_rows(pointers, rows, row_end, other):
    """Loads one float32 for each row, `other` from `row_end` on."""
    return tl.load(pointers + rows, mask=rows < row_end, other=other)


@jit
def store_statistics(pointers, rows, row_end, lse_log2, delta):
    """Stores two float32 of each row as one word of 64 bits: the log-sum-exp in bits below, delta above.

    A block that owns keys reads them in the layout of a tile's columns, in which a thread loads many rows. Words halve
    the number of its loads.
    """
    below = lse_log2.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    above = delta.to(tl.int32, bitcast=True).to(tl.int64) << 32
    tl.store(pointers + rows, above | below, mask=rows < row_end)


@jit
def load_statistics(pointers, rows, row_begin, row_end, CHECK_ROWS: tl.constexpr):
    """Loads the words of `store_statistics`. Args: pointers: to the word of each row.

    Returns:
        lse_log2, delta: if CHECK_ROWS, infinity and 0 outside `row_begin <= row < row_end`, so that P and dS are 0.
    """
    if CHECK_ROWS:
        infinity: tl.constexpr = 0x7F800000
        words = tl.load(pointers, mask=(rows >= row_begin) & (rows < row_end), other=infinity)
    else:
        words = tl.load(pointers)
    lse_log2 = words.to(tl.int32).to(tl.float32, bitcast=True)
    delta = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return lse_log2, delta


@jit
def statistics_of_rows(dout, out, lse_ptr, dlse_ptr, line, rows, seqlen_q, HAS_DLSE: tl.constexpr):
    """Returns the log-sum-exp in bits, and delta, of rows of the forward.

    Args:
        dout, out: of [BLOCK_M, BLOCK_DV], in tiles.
        line: of the head's first row, from `lse_ptr` and `dlse_ptr`.
    """
    delta = tl.zeros([rows.shape[0]], tl.float32)
    # The output of a row that sees nothing is 0, so its upstream gradient must have no effect, NaN included.
    for i in tl.static_range(len(out)):
        terms = dout[i].to(tl.float32) * out[i].to(tl.float32)
        delta += tl.sum(tl.where(out[i] == 0.0, 0.0, terms), 1)  # [BLOCK_M]
    lse = load_rows(lse_ptr + line, rows, seqlen_q, float("-inf"))  # [BLOCK_M]
    if HAS_DLSE:
        delta -= load_rows(dlse_ptr + line, rows, seqlen_q, 0.0)
    return infinite_if_blind(lse * LOG2_E), delta


@jit
def end_of_seen(lse_pointers, rows, row_end, MAY_HIDE: tl.constexpr):
    """Returns the end of the rows to read: `row_end`, and under a mask 0 for each row that sees nothing, [BLOCK_M]."""
    end = row_end
    if MAY_HIDE:
        lse = load_rows(lse_pointers, rows, row_end, float("-inf"))
        end = tl.where(lse == float("-inf"), 0, row_end)
    return end


@jit
def infinite_if_blind(lse_log2):
    """Returns plus infinity in place of minus infinity: `exp2(score - lse)` is then 0, and `-inf - -inf` is never
    computed."""
    return tl.where(lse_log2 == float("-inf"), float("inf"), lse_log2)


@jit
def score_tile(
    raw,
    rows,
    keys,
    inside,
    row_inside,
    readable_keys,
    at_edge,
    low,
    high,
    key_offset,
    mask_ptr,
    bias_ptr,
    slope_log2,
    rules: ScoreRules,
    window: Window,
    MASK_PER_QUERY: tl.constexpr,
):
    """Returns scores as the forward computes them, minus infinity where hidden.

    Args:
        raw: q . k, float32.
        rows, keys: positions in the sequence, broadcast to the shape of `raw`.
        inside, row_inside: pairs, and rows, that exist and are in the range that the walk covers.
        readable_keys: keys whose mask and bias may be read: whole groups (`arguments.pair_group`).
        at_edge: whether the band or the end of the sequence hides a pair of the tile.
        key_offset: seqlen_k - seqlen_q, the origin of ALiBi's distance.
        low, high: the band, `low <= key - row <= high`.
        mask_ptr, bias_ptr: addresses of the head's first row and key.
        window: which edges the band has.
        MASK_PER_QUERY: whether a mask has an axis of queries.

    Returns:
        scores, scale: scores in bits are `scores * scale`. Multiplying and subtracting the log-sum-exp is one fused
            multiply-add.
        derivative: of the softcap, 1 - tanh^2; 1 without one.
    """
    scale = rules.softmax_scale * LOG2_E
    derivative = 1.0
    scores = raw
    if rules.HAS_SOFTCAP:
        squashed = tanh(raw * (rules.softmax_scale / rules.softcap))
        derivative = 1.0 - squashed * squashed
        scores = rules.softcap * squashed * LOG2_E
        scale = 1.0
    elif rules.HAS_MASK or rules.HAS_BIAS or rules.HAS_ALIBI:
        scores = raw * scale
        scale = 1.0
    if rules.HAS_BIAS:
        offsets = rows.to(tl.int64) * rules.bias.stride_m + keys.to(tl.int64) * rules.bias.stride_n
        bias = tl.load(bias_ptr + offsets, mask=row_inside & readable_keys, other=float("-inf")).to(tl.float32)
        scores = add_bias(scores, bias)
    if rules.HAS_ALIBI:
        scores -= slope_log2 * tl.abs(rows + key_offset - keys).to(tl.float32)
    if at_edge:
        distance = keys - rows
        visible = inside
        if window.HAS_LOW:
            visible = visible & (distance >= low)
        if window.HAS_HIGH:
            visible = visible & (distance <= high)
        scores = tl.where(visible, scores * scale, float("-inf"))
        scale = 1.0
    if rules.HAS_MASK:
        offsets = keys.to(tl.int64) * rules.mask.stride_n
        if MASK_PER_QUERY:
            offsets = offsets + rows.to(tl.int64) * rules.mask.stride_m
            shown = tl.load(mask_ptr + offsets, mask=row_inside & readable_keys, other=0)
        else:  # padding: one row, which broadcasts over the tile
            shown = tl.load(mask_ptr + offsets, mask=readable_keys, other=0)
        scores = tl.where(shown != 0, scores, float("-inf"))
    return scores, scale, derivative


@jit
def probabilities(scores, scale, lse_log2, MAY_HIDE: tl.constexpr):
    """Returns P of a tile. Under a mask or a bias, a row may hide the whole tile and have NaN as its log-sum-exp; its
    hidden pairs stay 0."""
    p = tl.math.exp2(scores * scale - lse_log2)
    if MAY_HIDE:
        p = tl.where(scores == float("-inf"), 0.0, p)
    return p


@jit
def score_gradient(p, dp, delta, at_edge, MAY_HIDE: tl.constexpr):
    """Returns dS = P * (dP - delta), 0 where P is 0: dP or delta of a hidden pair may be NaN, and 0 * NaN is NaN."""
    ds = p * (dp - delta)
    if MAY_HIDE:
        ds = tl.where(p == 0.0, 0.0, ds)
    else:  # one condition for both would mix a constant with a value of the loop
        if at_edge:
            ds = tl.where(p == 0.0, 0.0, ds)
    return ds


@jit
def through_softcap(ds, derivative, p, HAS_SOFTCAP: tl.constexpr):
    """Returns the gradient of `softmax_scale * q . k`. The derivative of a hidden score may be NaN."""
    if HAS_SOFTCAP:
        ds = tl.where(p == 0.0, 0.0, ds * derivative)
    return ds


@jit
def any_of(p, AXIS: tl.constexpr):
    """Returns whether a row or a column of P has an entry that is not 0, NaN included."""
    return tl.max((p != 0.0).to(tl.int32), AXIS) != 0
