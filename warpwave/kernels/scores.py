"""Transforms of raw scores before the softmax, for kernels whose rows may belong to several heads.

    raw = q . k;   s = softmax_scale * raw, softcap, + bias, ALiBi;   -inf where the band, the mask or the bias hides

A row is one query of one query head. Kernels that put the query heads of a group in one tile, so that their keys are
read once, give each row its own position, slope, and line of mask and bias. These are therefore vectors, where other
kernels have one number per block.
"""

from __future__ import annotations

from warpwave.kernels.groups import ScoreRules, Window
from warpwave.kernels.primitives import LOG2_E, add_bias, band_visible, pairs_of_head, slope_in_bits, tanh
from warpwave.runtime.triton_or_stub import jit, tl


@jit
def rules_of_rows(rules: ScoreRules, batch, heads, rows):
    """Returns pointers to key 0 of mask and bias, and ALiBi's slope in bits, of each row. Absent ones
    are 0.0.

    Args:
        heads: of all rows, or of each, [BLOCK_M].
    """
    mask_rows, bias_rows, slopes_log2 = 0.0, 0.0, 0.0
    if rules.HAS_MASK:
        mask_rows = pairs_of_head(rules.mask, batch, heads) + rows.to(tl.int64) * rules.mask.stride_m
    if rules.HAS_BIAS:
        bias_rows = pairs_of_head(rules.bias, batch, heads) + rows.to(tl.int64) * rules.bias.stride_m
    if rules.HAS_ALIBI:
        slopes_log2 = tl.zeros(rows.shape, tl.float32) + slope_in_bits(rules.alibi_slopes, batch, heads)
    return mask_rows, bias_rows, slopes_log2


@jit
def score_bits(
    raw,
    rows,
    keys,
    row_inside,
    key_end,
    key_offset,
    low,
    high,
    mask_rows,
    bias_rows,
    slopes_log2,
    rules: ScoreRules,
    window: Window,
):
    """Returns scores in bits, minus infinity where hidden.

    They are scaled before anything is added or hidden: a scale of 0 is legal, and 0 * -inf is NaN.

    Args:
        raw: q . k, float32 [BLOCK_M, BLOCK_N].
        rows, keys: positions in the sequence, [BLOCK_M] and [BLOCK_N].
        row_inside: which rows exist, [BLOCK_M].
        key_end: the first key past the end.
        key_offset: seqlen_k - seqlen_q, the origin of ALiBi's distance.
        low, high: the band, `low <= key - row <= high`.
        mask_rows, bias_rows: pointers to key 0 of each row, [BLOCK_M], if there is such a tensor.
        slopes_log2: ALiBi's, in bits, [BLOCK_M].
        window: which edges the band has.
    """
    if rules.HAS_SOFTCAP:
        scores = rules.softcap * tanh(raw * (rules.softmax_scale / rules.softcap)) * LOG2_E
    else:
        scores = raw * (rules.softmax_scale * LOG2_E)
    inside = row_inside[:, None] & (keys < key_end)[None, :]
    if rules.HAS_BIAS:
        bias = bias_rows[:, None] + keys.to(tl.int64)[None, :] * rules.bias.stride_n
        bias = tl.load(bias, mask=inside, other=float("-inf")).to(tl.float32)  # [BLOCK_M, BLOCK_N]
        scores = add_bias(scores, bias)
    if rules.HAS_ALIBI:
        distance = tl.abs(rows[:, None] + key_offset - keys[None, :])
        scores -= slopes_log2[:, None] * distance.to(tl.float32)
    visible = inside & band_visible(rows, keys, low, high, window.HAS_LOW, window.HAS_HIGH)
    if rules.HAS_MASK:
        mask = mask_rows[:, None] + keys.to(tl.int64)[None, :] * rules.mask.stride_n
        visible = visible & (tl.load(mask, mask=inside, other=0) != 0)  # [BLOCK_M, BLOCK_N]
    return tl.where(visible, scores, float("-inf"))


@jit
def without_unseen(v, scores):
    """Returns the values of keys that some row of the tile sees, zero for the others: 0 * NaN would leak hidden
    values."""
    seen = tl.max((scores != float("-inf")).to(tl.int32), 0)  # [BLOCK_N]
    return tl.where((seen != 0)[:, None], v, 0.0)
