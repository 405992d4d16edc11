"""The online softmax of a consumer warpgroup: scores in bits, a maximum that lags, sums that stay in their threads."""

from warpwave.kernels.hopper.compat import gl, jit
from warpwave.kernels.hopper.parts import LN_2, ROWS, exp2, multiply_add, tanh

# How far, in bits, a row's maximum may lag behind its largest score before the accumulator is rescaled: probabilities
# reach 2^4. Random scores of one variance hardly ever rise by 4 bits after the first tile.
LAG = gl.constexpr(4.0)


@jit
def in_bits(scores, tile, place, keys, rules, AT_EDGE: gl.constexpr):
    """Scores of one tile as the softmax takes them, and what is left to multiply them by.

    In tiles that need neither mask nor position the scale rides in the softmax's fused multiply-add. Elsewhere it is
    applied here: 0 * -inf, with a scale of 0, would be NaN.
    """
    layout: gl.constexpr = scores.type.layout
    scale = rules.scale
    if rules.HAS_SOFTCAP:
        scores = tanh(scores * scale) * rules.softcap_log2
        scale = 1.0
    elif rules.HAS_ALIBI or AT_EDGE:
        scores = scores * scale
        scale = 1.0
    if rules.HAS_ALIBI or AT_EDGE:
        key_first = keys.begin + tile * rules.BLOCK_N
        rows = place.row_first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        columns = gl.arange(0, rules.BLOCK_N, gl.SliceLayout(0, layout))
        if rules.HAS_ALIBI:
            own_key = rows + (place.offset - key_first)
            scores = scores - place.slope_log2 * gl.abs(columns[None, :] - own_key[:, None]).to(gl.float32)
        if AT_EDGE:
            # Two limits a row, so that a score costs a comparison with a constant each.
            last = gl.full([ROWS], keys.end - 1 - key_first, gl.int32, gl.SliceLayout(1, layout))
            if rules.HAS_HIGH:
                last = gl.minimum(last, rows + (keys.high - key_first))
            visible = columns[None, :] <= last[:, None]
            if rules.HAS_LOW:
                first = rows + (keys.low - key_first)
                visible = visible & (columns[None, :] >= first[:, None])
            scores = gl.where(visible, scores, float("-inf"))
    return scores, scale


@jit
def partial_sums(p, BLOCK_N: gl.constexpr):
    """Row sums that stay in their threads, [64, 8]: they are added across threads once, at the end."""
    return gl.sum(gl.reshape(p, [ROWS, BLOCK_N // 8, 8]), axis=1)


@jit
def new_maximum(scores, scale, m_i, lead, MAYBE_EMPTY: gl.constexpr):
    """The maximum of the online softmax, one that lags, in bits and rounded once: unless a row's largest score leads
    its maximum m_i by more than LAG, the maximum stays and the factor of what was summed is exactly 1.

    Args:
        lead: by how many bits the row's largest score leads m_i, at least 0: the exponent of its probability, by the
            multiply-add that makes that, for `rounding_of_the_largest`.

    Returns:
        shift: what to subtract from scores.
        alpha: the factor of what was summed so far.
        m_new, lead: the latter of m_new.
    """
    top = gl.max(scores, axis=1)
    of_tile = multiply_add(top, scale, -m_i, True)
    rises = of_tile > LAG
    m_new = gl.where(rises, top * scale, m_i)
    lead = gl.where(rises, 0.0, gl.maximum(lead, of_tile))  # of_tile is NaN, which is no maximum, if nothing was seen
    shift = m_new
    if MAYBE_EMPTY:
        # A row that saw nothing keeps the maximum minus infinity; only what is subtracted becomes 0. Nothing was summed
        # for it, so that its factor need not be 0, and 1 spares the multiplication.
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = gl.where(m_i == float("-inf"), 1.0, exp2(m_i - shift))
    else:
        alpha = exp2(m_i - shift)
    return shift, alpha, m_new, lead


@jit
def probabilities(scores, scale, shift, alpha, l_i, BLOCK_N: gl.constexpr):
    """Un-normalised, and the new sums."""
    p = exp2(multiply_add(scores, scale, -shift[:, None], True))
    sums = partial_sums(p, BLOCK_N)
    return p, l_i * gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))[:, None] + sums


@jit
def rounding_of_the_largest(lead, DTYPE: gl.constexpr):
    """What 16 bits added to the largest probability of a row, to be added to the sum that out is divided by.

    Kept relative to the row's true maximum it would be exactly 1. With one that lags it is rounded, and where it
    outweighs all others the output is off by as much: the worst row's error was 3 to 4 times the rounding model's, on
    sharp data. Divided by a sum with the same error it cancels, and 1.6 times remain; from a lead that differs by one
    rounding from the exponent of the probability itself, a probability near the middle of two numbers of 16 bits would
    be taken to have gone the other way, and the error would double (3.9 times, one row in some thirty thousand).
    """
    largest = exp2(lead)
    return largest.to(DTYPE).to(gl.float32) - largest


@jit
def with_sink(m_i, l_row, l_out, sink_log2):
    """The state of a row with one more key, whose value is zero, and the factor of what was summed. It comes last: as
    the first maximum it would push the probabilities of lower scores out of the range of 16 bits.

    Args:
        m_i: the row's maximum in bits.
        l_row, l_out: its sum, and the sum that out is divided by.
        sink_log2: the sink's logit in bits.
    """
    m_new = gl.maximum(m_i, sink_log2)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    factor = exp2(m_i - shift)
    sink = exp2(sink_log2 - shift)
    return m_new, l_row * factor + sink, l_out * factor + sink, factor


@jit
def natural_lse(m_i, l_row):
    """Natural log-sum-exp of a row's state in bits; minus infinity where it saw no key."""
    return gl.where(l_row == 0.0, float("-inf"), (m_i + gl.log2(l_row)) * LN_2)
