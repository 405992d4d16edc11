"""The online softmax of a consumer warpgroup: scores in bits, a lagging maximum, and per-thread sums.

Its state has two forms. If tiles are not overlapped, maximum and lead are per row, [64]: `new_maximum`,
`probabilities`. If two tiles overlap, each of the four threads that share a row keeps its own copy, [64, 4], and
communicates only when its own scores rise: `settled_maximum`, `own_probabilities`.
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from warpwave.kernels.hopper.factors import has_blocks_of_values
from warpwave.kernels.hopper.parts import LN_2, ROWS, exp2, multiply_add, rescale, tanh, tanh_of_tile
from warpwave.kernels.hopper.token_factors import has_token_factors
from warpwave.kernels.hopper.visible import heads_of_rows
from warpwave.runtime.gluon_or_stub import aggregate, constexpr_function, gl, jit

# Maximum lag, in bits, of a row's maximum behind its largest score before the accumulator is rescaled: probabilities
# reach 2^4. Random scores of one variance rarely rise by 4 bits after the first tile.
LAG = gl.constexpr(4.0)
# Exponent of the factor of probabilities in float16 beside bfloat16 queries or with factors of tokens: the least normal
# probability is 2^-25 instead of 2^-14, and with the lag the largest number is 2^15.
RAISE = gl.constexpr(11.0)
LOWER = gl.constexpr(2.0**-11)
# parts.OFFSET_OF_INT8 as float32: sums of int8 products are too large by this number.
OFFSET = gl.constexpr(1.5 * 2**23)


@aggregate
class FromOffset:
    """The remaining conversion of scores to bits: `scale * scores - offset`.

    The softmax subtracts `offset` together with the maximum, which `settled_maximum` rounds so that the sum is exact,
    up to 2^11 bits. `offset` is the scaled OFFSET of int8 scores, or minus the logarithm of a tile's factor of V. The
    factor of V is then part of the tile's probabilities, and `weight` undoes it in their sum.
    """

    scale: gl.tensor
    offset: gl.tensor
    weight: gl.tensor


@aggregate
class Weighted:
    """Scores in bits that include the logarithms of factors of V; `weights`, [1, keys], undo these in sums of
    probabilities. The maximum lags if LAGS (`rounding_of_the_largest`)."""

    weights: gl.tensor
    LAGS: gl.constexpr


@constexpr_function
def has_weights(scale):
    """Returns whether a factor is a `Weighted`."""
    return hasattr(scale, "weights")


@constexpr_function
def has_offset(scale):
    """Returns whether a factor is a `FromOffset`."""
    return hasattr(scale, "offset")


@jit
def without_offset(scores):
    """Returns the scores of int8 operands in float32, without OFFSET. Returns other scores unchanged."""
    if scores.dtype == gl.int32:
        scores = scores.to(gl.float32, bitcast=True) - OFFSET
    return scores


@jit
def with_values(scores, scale, rules, AT_EDGE: gl.constexpr):
    """Returns the scores of a tile and their factor: a `FromOffset` with the tile's factor of V, a `Weighted` if tokens
    have factors, or the scale."""
    if has_token_factors(rules.factors):
        bits, weights = rules.factors.of_tile
        x = scores * scale + bits
        if AT_EDGE:  # the factor of a hidden token may be infinite or NaN
            x = gl.where(scores == float("-inf"), float("-inf"), x)
        return x, Weighted(weights, rules.NARROWS_QUERIES)
    elif has_blocks_of_values(rules.factors):
        bits = rules.factors.bits
        return scores, FromOffset(gl.to_tensor(scale), -bits, exp2(-bits))
    else:
        return scores, scale


@constexpr_function
def keeps_offset(dtype, rules, at_edge):
    """Returns whether a tile's scores of int8 operands stay too large by OFFSET until their softmax. Scores with
    factors of blocks of V do not: the logarithm of the factor would be rounded together with OFFSET."""
    changes = bool(rules.HAS_SOFTCAP) or bool(rules.HAS_ALIBI) or bool(at_edge)
    return dtype == gl.int32 and not changes and not has_blocks_of_values(rules.factors)


@jit
def in_bits(scores, tile, place, keys, rules, AT_EDGE: gl.constexpr):
    """Returns the scores of one tile for the softmax, and the remaining factor, which is a `FromOffset` if more than a
    factor remains.

    In tiles that need neither mask nor position, the scale is part of the softmax's fused multiply-add. In other tiles
    it is applied here, because 0 * -inf, with a scale of 0, would be NaN.
    """
    if keeps_offset(scores.dtype, rules, AT_EDGE):
        # Without its last two bits, the scale times OFFSET is exact.
        scale = (rules.scale.to(gl.int32, bitcast=True) & -4).to(gl.float32, bitcast=True)
        return scores.to(gl.float32, bitcast=True), FromOffset(scale, scale * OFFSET, gl.to_tensor(1.0))
    else:
        scores, scale = _in_bits(without_offset(scores), tile, place, keys, rules, AT_EDGE)
        return with_values(scores, scale, rules, AT_EDGE)


@jit
def _in_bits(scores, tile, place, keys, rules, AT_EDGE: gl.constexpr):
    layout: gl.constexpr = scores.type.layout
    scale = rules.scale
    if rules.HAS_SOFTCAP:
        if rules.HEAD_DIM_V > 0:  # float32
            scores = tanh(scores * scale)
        else:
            scores = tanh_of_tile(scores * scale)
        scale = rules.softcap
    if rules.HAS_ALIBI or AT_EDGE:
        scores = scores * scale
        scale = 1.0
        key_first = keys.begin + tile * rules.BLOCK_N
        rows = place.row_first + gl.arange(0, ROWS, gl.SliceLayout(1, layout)) // rules.HEADS
        columns = gl.arange(0, rules.BLOCK_N, gl.SliceLayout(0, layout))
        if rules.HAS_ALIBI:
            own_key = rows + (place.offset - key_first)
            scores = scores - place.slope_log2 * gl.abs(columns[None, :] - own_key[:, None]).to(gl.float32)
        if AT_EDGE:
            # Two limits per row: each score then costs one comparison for each.
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
    """Returns per-thread row sums, [64, 8]; they are added across threads once, at the end."""
    return gl.sum(gl.reshape(p, [ROWS, BLOCK_N // 8, 8]), axis=1)


@jit
def new_maximum(scores, scale, m_i, lead, MAYBE_EMPTY: gl.constexpr):
    """Returns the lagging maximum of the online softmax, in bits and rounded once. Unless a row's largest score leads
    its maximum m_i by more than LAG, the maximum stays and the factor of the previous sum is exactly 1.

    Args:
        lead: by how many bits the row's largest score leads m_i, at least 0. It is the exponent of that score's
            probability, from the same multiply-add, for `rounding_of_the_largest`.

    Returns:
        shift: the value to subtract from scores.
        alpha: the factor of the previous sum.
        m_new, lead: the new maximum, and the lead over it.
    """
    top = gl.max(scores, axis=1)
    of_tile = multiply_add(top, scale, -m_i, True)
    rises = of_tile > LAG
    m_new = gl.where(rises, top * scale, m_i)
    lead = gl.where(rises, 0.0, gl.maximum(lead, of_tile))  # of_tile is NaN, which maximum ignores, if nothing was seen
    shift = m_new
    if MAYBE_EMPTY:
        # A row that saw nothing keeps the maximum minus infinity; only the subtracted value becomes 0. Its sum is
        # empty, so its factor need not be 0, and 1 saves the multiplication.
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = gl.where(m_i == float("-inf"), 1.0, exp2(m_i - shift))
    else:
        alpha = exp2(m_i - shift)
    return shift, alpha, m_new, lead


@jit
def probabilities(scores, scale, shift, alpha, l_i, BLOCK_N: gl.constexpr):
    """Returns unnormalized probabilities and the new sums."""
    p = exp2(multiply_add(scores, scale, -shift[:, None], True))
    sums = partial_sums(p, BLOCK_N)
    return p, l_i * gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))[:, None] + sums


# Per-thread state ----------------------------------------------------------------------------------------------------


@jit
def own_maxima(x, BLOCK_N: gl.constexpr):
    """Returns, for each row, the maximum over each of its four threads' elements, [64, 4], without communication. Two
    parallel chains of dependent maxima per row replace one of 31: 1 to 2 %."""
    return gl.max(gl.max(gl.reshape(x, [ROWS, BLOCK_N // 8, 4, 2]), axis=1), axis=2)


@jit
def beside_columns(own, x):
    """Broadcasts per-thread row values, [64, 4], to the layout of x."""
    blocks: gl.constexpr = x.shape[1] // 8
    spread = gl.reshape(own, [ROWS, 1, 4, 1]).broadcast_to([ROWS, blocks, 4, 2])
    return gl.convert_layout(gl.reshape(spread, [ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)


@jit
def of_rows(own, x):
    """Returns the maximum over a row's threads, [64], in the row layout of x."""
    return gl.convert_layout(gl.max(own, axis=1), gl.SliceLayout(1, x.type.layout))


@constexpr_function
def _settle_asm(lag, has_offset):
    # For two rows: $0, $1 are the maxima m, $2, $3 alpha, $4, $5 lead, $10, $11 the thread's largest scores, $12, $13
    # the scale, and $14, $15 `FromOffset.offset`, if any: then r is m rounded so that n, which is added to scores, is
    # exact. A row whose maximum stays has factor 1, also if the maximum is minus infinity.
    rows = range(2)
    scaled = [f"mul.rn.f32 a{i}, a{i}, ${12 + i}; " for i in rows]
    if has_offset:
        start = "".join(
            f"add.rn.f32 n{i}, ${i}, ${14 + i}; sub.rn.f32 r{i}, n{i}, ${14 + i}; neg.f32 n{i}, n{i}; " for i in rows
        )
        any_rounded = "".join(f"setp.neu.or.f32 p, r{i}, ${i}, p; " for i in rows)
        # e is the exponent of the largest score's probability: what the rounding of the maximum leaves.
        maxima = [
            f"mov.b32 e{i}, a{i}; {scaled[i]}neg.f32 s{i}, a{i}; fma.rn.f32 e{i}, e{i}, ${12 + i}, s{i}; "
            f"sub.rn.f32 a{i}, a{i}, ${14 + i}; selp.f32 a{i}, a{i}, r{i}, q{i}; setp.neu.f32 p, a{i}, ${i}; "
            for i in rows
        ]
        changes, leads, before = ("p", "p"), ("e0", "e1"), "0fFF800000"
    else:
        start = "".join(f"neg.f32 n{i}, ${i}; " for i in rows)
        any_rounded = ""
        maxima = [f"{scaled[i]}selp.f32 a{i}, a{i}, ${i}, q{i}; " for i in rows]
        changes, leads, before = ("q0", "q1"), ("0f00000000",) * 2, "0f00000000"
    unless_any_changes = (
        f"{start}fma.rn.f32 t0, $10, $12, n0; fma.rn.f32 t1, $11, $13, n1; "
        "mov.b32 $2, 0f3F800000; mov.b32 $3, 0f3F800000; "
        f"setp.gt.f32 p, t0, {float(lag)}; setp.gt.or.f32 p, t1, {float(lag)}, p; {any_rounded}"
        "vote.sync.any.pred p, p, 0xffffffff; @!p bra SETTLED; "
    )
    among_threads = "".join(
        f"shfl.sync.bfly.b32 s0, {a}0, {lanes}, 0x1f, 0xffffffff; "
        f"shfl.sync.bfly.b32 s1, {a}1, {lanes}, 0x1f, 0xffffffff; max.f32 a0, {a}0, s0; max.f32 a1, {a}1, s1; "
        for a, lanes in (("$1", 2), ("a", 1))
    )
    change = "".join(
        f"fma.rn.f32 t{i}, a{i}, ${12 + i}, n{i}; setp.gt.f32 q{i}, t{i}, {float(lag)}; "
        f"{maxima[i]}sub.rn.f32 s{i}, ${i}, a{i}; selp.f32 s{i}, s{i}, 0f00000000, {changes[i]}; "
        f"ex2.approx.ftz.f32 ${2 + i}, s{i}; mov.b32 ${i}, a{i}; "
        f"selp.f32 t{i}, {leads[i]}, t{i}, q{i}; selp.f32 ${4 + i}, {before}, ${4 + i}, q{i}; "
        for i in rows
    )
    return (
        f"{{ .reg .pred p, q0, q1; .reg .f32 t0, t1, s0, s1, n0, n1, r0, r1, a0, a1, e0, e1; {unless_any_changes}"
        f"{among_threads}{change}SETTLED: max.f32 $4, $4, t0; max.f32 $5, $5, t1; }}"
    )


@jit
def settle(m, lead, top, factors, lag: gl.constexpr):
    """Runs `settled_maximum` for two rows per thread. `factors` are the scale and `FromOffset.offset`, if any, as
    tensors."""
    return gl.inline_asm_elementwise(
        _settle_asm(lag, len(factors) > 1),
        "=r,=r,=&r,=&r,=r,=r,0,1,4,5" + ",r,r" * (1 + len(factors)),
        [m, lead, top] + list(factors),
        dtype=(gl.float32, gl.float32, gl.float32),
        is_pure=False,
        pack=2,
    )


@jit
def settled_maximum(scores, scale, m, lead):
    """Computes `new_maximum` on per-thread state, [64, 4]. Unless a score of its 16 rows leads its maximum by more than
    LAG (by anything, with factors of tokens beside float16 queries), a warp neither compares values across the threads
    of a row nor computes a factor, which is 1. Worth 6 to 7 % at head_dim 64, 1 % at 256.

    Returns:
        m: the new maxima, equal in a row's threads.
        alpha: the factor of the previous sum.
        lead: the lead of the thread's own scores, at least 0 unless `scale` is a `FromOffset`; a row's lead is the
            maximum over its threads.
    """
    top = gl.convert_layout(own_maxima(scores, scores.shape[1]), m.type.layout, assert_trivial=True)
    lag: gl.constexpr = LAG if not has_weights(scale) or scale.LAGS else 0.0
    if has_offset(scale):
        factors = (everywhere(scale.scale, top), everywhere(scale.offset, top))
    elif has_weights(scale):
        factors = (everywhere(1.0, top),)
    else:
        factors = (everywhere(scale, top),)
    return settle(m, lead, top, factors, lag)


@jit
def everywhere(number, x):
    """Returns a number as a tensor like x."""
    return gl.full(x.shape, number, gl.float32, x.type.layout)


@jit
def own_probabilities(scores, scale, m, alpha, l_i, MAYBE_EMPTY: gl.constexpr, RAISES: gl.constexpr):
    """Computes `probabilities` on per-thread state; the sums are [64, 4] too. A row that saw nothing has probabilities
    0."""
    shift = m
    if MAYBE_EMPTY:
        shift = gl.where(m == float("-inf"), 0.0, m)
    if RAISES:
        # Rounded, so the exponent of the largest may differ from the lead by 3e-7. The rounding of a bfloat16 out hides
        # that; with float16 queries there is no lead.
        shift = shift - RAISE
    factor = scale
    if has_offset(scale):
        shift = shift + scale.offset
        factor = scale.scale
    p = exp2(multiply_add(scores, factor, -beside_columns(shift, scores), not has_weights(scale)))
    counted = p
    if has_weights(scale):
        counted = p * scale.weights
    sums = gl.sum(gl.sum(gl.reshape(counted, [ROWS, scores.shape[1] // 8, 4, 2]), axis=1), axis=2)
    if has_offset(scale):
        sums = sums * scale.weight
    return p, l_i * alpha + gl.convert_layout(sums, l_i.type.layout, assert_trivial=True)


@jit
def rescaled(acc, alpha):
    """Returns every piece of the accumulator times alpha, [64, 4]."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        scaled = scaled + (rescale(acc[i], beside_columns(alpha, acc[i])),)
    return scaled


# The end of a row -----------------------------------------------------------------------------------------------------


@jit
def rounding_of_the_largest(lead, DTYPE: gl.constexpr):
    """Returns the rounding error of the largest probability of a row in 16 bits, to be added to the divisor of out.

    Relative to the row's true maximum that probability would be exactly 1. With a lagging maximum it is rounded, and if
    it outweighs all others, the output has the same relative error: on sharp data the worst row's error was 3 to 4
    times the rounding model's. Dividing by a sum with the same error cancels it; 1.6 times remain. The lead must equal
    the exponent of the probability exactly. If they differed by one rounding, a probability near the midpoint of two
    16-bit numbers would be taken as rounded the other way, and the error would double (3.9 times, one row in some
    thirty thousand).

    With factors of tokens, the correction would need the weight of that probability's key. The rounding of a bfloat16
    out hides the error; beside float16 queries the maximum does not lag, so the largest product of a probability and
    its factor is rounded to exactly 2^RAISE.
    """
    largest = exp2(lead)
    return largest.to(DTYPE).to(gl.float32) - largest


@jit
def with_sink(m_i, l_row, l_out, sink_log2):
    """Returns the state of a row after one more key, whose value is zero, and the factor of the previous sum. The sink
    is added last: as the first maximum it would push the probabilities of lower scores out of the range of 16 bits.

    Args:
        m_i: the row's maximum in bits.
        l_row, l_out: the row's sum, and the divisor of out.
        sink_log2: the sink's logit in bits.
    """
    m_new = gl.maximum(m_i, sink_log2)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    factor = exp2(m_i - shift)
    sink = exp2(sink_log2 - shift)
    return m_new, l_row * factor + sink, l_out * factor + sink, factor


@jit
def natural_lse(m_i, l_row):
    """Returns the natural log-sum-exp of a row's state in bits; minus infinity if it saw no key."""
    return gl.where(l_row == 0.0, float("-inf"), (m_i + gl.log2(l_row)) * LN_2)


@jit
def factors_of_out(l_row, l_out, factor, rules):
    """Returns which rows see nothing, and the factor of each row's output.

    Args:
        factor: of a row's sum beside its sink, from `with_sink`; ones without sinks.
    """
    # A row that saw no key has sum 0, or saw only its sink: its output is 0, whatever its tile held.
    saw_nothing = l_row == 0.0
    if rules.HAS_SINKS:
        saw_nothing = saw_nothing | (factor == 0.0)
    return saw_nothing, factor / gl.where(l_row == 0.0, 1.0, l_out)


@jit
def store_lse(m_i, l_row, lse_ptr, stride_lb, stride_lh, work, row_first, rules):
    """Stores the log-sum-exp of 64 rows, from query `row_first` on."""
    rows = gl.arange(0, ROWS, l_row.type.layout)
    queries = row_first + rows // rules.HEADS
    first = heads_of_rows(work.head, rows, rules).to(gl.int64) * stride_lh + work.q_begin
    if not rules.IS_VARLEN:
        first += work.batch.to(gl.int64) * stride_lb
    gl.store(lse_ptr + first + queries, natural_lse(m_i, l_row), mask=queries < work.seqlen_q)


# A maximum that does not lag ------------------------------------------------------------------------------------------


@jit
def softmax_of_rows(x, m_i, l_i):
    """Returns (p, alpha, m_i, l_i) for a step whose scores in bits are [queries, keys]. alpha is the factor of the
    previous state; m_i and l_i are the new state, where l_i are `partial_sums`."""
    m_new = gl.maximum(m_i, gl.max(x, axis=1))
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = exp2(m_i - shift)
    p = exp2(x - shift[:, None])
    sums = partial_sums(p, x.shape[1])
    return p, alpha, m_new, l_i * gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))[:, None] + sums


@jit
def softmax_of_columns(x, m_i, l_i):
    """Returns (p, alpha, m_i, l_i) for a step whose scores are [keys, queries]. alpha is the factor of the previous
    state; m_i and l_i are the new state. The sums l_i, [keys, queries], cover only a thread's own keys."""
    m_new = gl.maximum(m_i, gl.max(x, axis=0))
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = exp2(m_i - shift)
    p = exp2(x - shift[None, :])
    return p, alpha, m_new, l_i * alpha[None, :] + p


@jit
def state_with_sink(sink, m_i, l_i):
    """Returns (factor, m_i, l_i) of a state after adding one key whose score is the sink and whose value is zero."""
    m_new = gl.maximum(m_i, sink)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    factor = exp2(m_i - shift)
    return factor, m_new, l_i * factor + exp2(sink - shift)
