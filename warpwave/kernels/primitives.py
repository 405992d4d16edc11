"""Building blocks of device code: tile loads, score transforms, and the online-softmax step.

All values here are in base two: a score in bits is `log2(e)` times the natural-log score, because the hardware's
exponential is `exp2`. Names of base-two values end in `_log2`. Natural logarithms appear only at the edges: sinks when
they are read, and the log-sum-exp when it is written.

The online softmax is Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018), in the form of
FlashAttention-2 (Dao 2023), algorithm 1: `acc` and `l_i` are relative to the running maximum `m_i` and divided once at
the end.
"""

from __future__ import annotations

from warpwave import problem
from warpwave.kernels.groups import InUnits, OfHeads, Pairs, ScoreRules, Sequences, Tokens
from warpwave.runtime.triton_or_stub import INTERPRETED, jit, tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LARGEST = tl.constexpr(3.4028234663852886e38)  # float32's largest number
LARGEST_BIAS = tl.constexpr(problem.LARGEST_BIAS)
# The interpreter computes in numpy, which has no bfloat16: its products are silently wrong and its conversion
# truncates. In the interpreter, every tile is up-cast when it is loaded, which is exact, and rounded explicitly when it
# is stored.
IN_INTERPRETER = tl.constexpr(INTERPRETED)


@jit
def tile_pointers(ptr, rows, columns, stride_row, stride_column):
    """Returns pointers to `[rows[i], columns[j]]`. Indices become 64-bit before the multiplication by a stride: in an
    ordinary cache, a row times a stride exceeds 2^31."""
    return ptr + (rows.to(tl.int64)[:, None] * stride_row + columns.to(tl.int64)[None, :] * stride_column)


@jit
def load_tile(
    pointers,
    rows,
    columns,
    row_begin,
    row_end,
    num_columns,
    CHECK_COLUMNS: tl.constexpr,
    CHECK_ROWS: tl.constexpr = True,
):
    """Loads the tile at `pointers`, zero outside `row_begin <= row < row_end` and `column < num_columns`, each only if
    checked. A tile of int16 holds words (`halves`), not numbers."""
    if CHECK_ROWS:
        inside = ((rows >= row_begin) & (rows < row_end))[:, None]
        if CHECK_COLUMNS:
            inside = inside & (columns < num_columns)[None, :]
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif CHECK_COLUMNS:
        tile = tl.load(pointers, mask=(columns < num_columns)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    if IN_INTERPRETER and tile.dtype != tl.int16:
        tile = tile.to(tl.float32)
    return tile


@jit
def rounded(x, DTYPE: tl.constexpr):
    """Rounds float32 to the dtype of an output, to nearest even."""
    if IN_INTERPRETER and DTYPE == tl.bfloat16:
        x = _to_nearest(x, 16)
    elif IN_INTERPRETER and DTYPE == tl.float8e4nv:
        x = tl.where(tl.abs(x) < 2.0**-6, (x + 1.5 * 2.0**14) - 1.5 * 2.0**14, _to_nearest(x, 20))
    elif IN_INTERPRETER and DTYPE == tl.float8e5:
        x = tl.where(tl.abs(x) < 2.0**-14, (x + 1.5 * 2.0**7) - 1.5 * 2.0**7, _to_nearest(x, 21))
    return x.to(DTYPE)


@jit
def _to_nearest(x, BITS: tl.constexpr):
    """Returns float32 with its last BITS bits rounded away, to nearest even."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + ((1 << (BITS - 1)) - 1) + ((bits >> BITS) & 1)) & -(1 << BITS)
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


# Triton compiles a device function once for arguments of the same types, and a tuple's type does not state its fields.
# Every caller therefore passes the class of group that is annotated (tests/test_parameters.py).


@jit
def tokens_of_head(tensor: Tokens, batch, head):
    """Returns a pointer to the tokens of one head."""
    return tensor.ptr + (batch * tensor.stride_b + head * tensor.stride_h)


@jit
def pairs_of_head(tensor: Pairs, batch, head, GROUP: tl.constexpr = 1):
    """Returns a pointer to a mask or bias of one head. Args: GROUP: `arguments.pair_group`, which divides strides."""
    # A no-op that tells the compiler about the multiple.
    return tensor.ptr + (batch * tensor.stride_b + head * tensor.stride_h) // GROUP * GROUP


@jit
def keys_of_groups(keys, GROUP: tl.constexpr):
    """Returns, for each key, the first of the GROUP neighbors that are loaded together from a mask or bias
    (`arguments.pair_group`). The compiler loads them together only if they are all in the range, or none of them."""
    return keys // GROUP * GROUP


@jit
def slope_in_bits(slopes: OfHeads, batch, head):
    """Returns ALiBi's slope of one head, or those of several."""
    return tl.load(slopes.ptr + (batch * slopes.stride_b + head * slopes.stride_h)) * LOG2_E


@jit
def rules_of_head(rules: ScoreRules, batch, head, PAIR_GROUP: tl.constexpr):
    """Returns pointers to the first row and key of mask and bias, and ALiBi's slope in bits, of one head. Absent ones
    are 0.0."""
    mask_ptr, bias_ptr, slope_log2 = 0.0, 0.0, 0.0
    if rules.HAS_MASK:
        mask_ptr = pairs_of_head(rules.mask, batch, head, PAIR_GROUP)
    if rules.HAS_BIAS:
        bias_ptr = pairs_of_head(rules.bias, batch, head, PAIR_GROUP)
    if rules.HAS_ALIBI:
        slope_log2 = slope_in_bits(rules.alibi_slopes, batch, head)
    return mask_ptr, bias_ptr, slope_log2


@jit
def add_bias(scores, bias):
    """Returns scores in bits plus a bias in natural units, both float32. The result is minus infinity where the bias
    is, whatever the score: NaN + -inf would be NaN.

    Any finite bias leaves its pair visible. `finfo.min`, the usual substitute for minus infinity, would overflow to it
    in bits, and a row with only such biases would give 0 instead of the mean of its values. The bias is therefore
    clamped.
    """
    bounded = tl.minimum(tl.maximum(bias, -LARGEST_BIAS), LARGEST_BIAS)
    bias = tl.where(tl.abs(bias) < float("inf"), bounded, bias)
    return tl.where(bias == float("-inf"), float("-inf"), scores + bias * LOG2_E)


@jit
def band_visible(rows, keys, low, high, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr):
    """Returns where `low <= key - row <= high`: causal and windowed visibility of a tile, [BLOCK_M, BLOCK_N]."""
    distance = keys[None, :] - rows[:, None]
    visible = distance == distance
    if HAS_LOW:
        visible = visible & (distance >= low)
    if HAS_HIGH:
        visible = visible & (distance <= high)
    return visible


@jit
def packed_sequence(cu_seqlens_ptr, item, longest, total):
    """Returns where a packed sequence begins, and its length, 0 to `longest`. Both ends are clamped before the
    subtraction, so that any 32-bit numbers in place of offsets still read and write inside the tensors."""
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + item), 0), total)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + item + 1), begin), total)
    return begin.to(tl.int64), tl.minimum(end - begin, longest)


@jit
def rows_and_keys(q_tensor: Tokens, k_tensor: Tokens, sequences: Sequences, batch, head, group_size):
    """Returns pointers to the first query of a head and to the first key that it reads, the position of that query
    among packed tokens, else 0, and the lengths of the sequence. The tensors may also be out and v."""
    q_ptr = tokens_of_head(q_tensor, batch, head)
    k_ptr = tokens_of_head(k_tensor, batch, head // group_size)
    q_begin, seqlen_q, seqlen_k = 0, sequences.seqlen_q, sequences.seqlen_k
    if sequences.IS_VARLEN:
        q_begin, seqlen_q = packed_sequence(sequences.cu_seqlens_q_ptr, batch, seqlen_q, sequences.total_q)
        k_begin, seqlen_k = packed_sequence(sequences.cu_seqlens_k_ptr, batch, seqlen_k, sequences.total_k)
        q_ptr += q_begin * q_tensor.stride_m
        k_ptr += k_begin * k_tensor.stride_m
    return q_ptr, k_ptr, q_begin, seqlen_q, seqlen_k


@jit
def band_edges(seqlen_q, seqlen_k, window_left, window_right, TOP_LEFT: tl.constexpr):
    """Returns the band of visible keys, `low <= key - row <= high` (problem.Band)."""
    low = seqlen_k - seqlen_q - window_left
    high = seqlen_k - seqlen_q + window_right
    if TOP_LEFT:
        high = tl.minimum(high, 0)
    return low, high


@jit
def visible_keys(row_begin, row_last, seqlen_k, low, high, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr):
    """Returns begin and end of the keys that some row of `row_begin <= row <= row_last` sees by position; an empty
    range if no row sees a key."""
    key_begin = 0
    key_end = seqlen_k
    if HAS_LOW:
        key_begin = tl.maximum(row_begin + low, 0)
    if HAS_HIGH:
        key_end = tl.minimum(key_end, row_last + high + 1)
    if HAS_LOW and HAS_HIGH:
        # A window that begins past the diagonal (top-left causal) shows nothing at all.
        key_end = tl.where(low > high, 0, key_end)
    return key_begin, key_end


@jit
def key_ranges(
    row_begin, row_last, seqlen_k, low, high, BLOCK_N: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr
):
    """Returns where the keys of a query tile begin and end, and which tiles in between every query sees whole.

    Returns:
        key_begin, key_end: keys outside are seen by no query of the tile.
        first: key_begin rounded down to a tile.
        whole_begin, whole_end: tiles between them need no mask.
    """
    key_begin = 0
    key_end = seqlen_k
    whole_begin = 0
    whole_end = seqlen_k
    if HAS_LOW:
        key_begin = tl.maximum(row_begin + low, 0)
        whole_begin = tl.maximum(row_last + low, 0)
    if HAS_HIGH:
        key_end = tl.minimum(key_end, row_last + high + 1)
        whole_end = tl.minimum(whole_end, row_begin + high + 1)
    if HAS_LOW and HAS_HIGH:
        # A window that begins past the diagonal (top-left causal) shows nothing at all.
        key_end = tl.where(low > high, 0, key_end)
    first = key_begin // BLOCK_N * BLOCK_N
    last = tl.cdiv(tl.maximum(key_end, 0), BLOCK_N) * BLOCK_N
    whole_begin = tl.minimum(tl.cdiv(whole_begin, BLOCK_N) * BLOCK_N, tl.maximum(first, last))
    whole_end = tl.maximum(tl.maximum(whole_end, 0) // BLOCK_N * BLOCK_N, whole_begin)
    return key_begin, key_end, first, whole_begin, whole_end


@jit
def part_of(items, part, num_parts):
    """Returns where one of `num_parts` parts of the items begins and ends; the first parts have one item more if the
    parts are uneven. `items * part` could overflow in 32 bits, and a division in 64 bits is a call of some hundred
    instructions."""
    least = items // num_parts
    begin = part * least + tl.minimum(part, items % num_parts)
    return begin, begin + least + (part < items % num_parts).to(tl.int32)


@jit
def steps_of(first, whole_begin, whole_end, end, CHECK: tl.constexpr, TWO_LOOPS: tl.constexpr):
    """Returns where a loop over tiles begins and ends.

    With TWO_LOOPS, one loop processes the whole tiles, and a later one, with CHECK, those before and behind them. A
    single loop computes the mask in every tile, because compilers turn a branch around it into predicates.
    """
    if not TWO_LOOPS:
        return first, end
    if CHECK:
        return first, end - (whole_end - whole_begin)
    return whole_begin, whole_end


@jit
def tile_of(step, whole_begin, whole_end, CHECK: tl.constexpr, TWO_LOOPS: tl.constexpr):
    """Returns the first position of the tile of a step of `steps_of`."""
    if CHECK and TWO_LOOPS:
        return tl.where(step < whole_begin, step, step + (whole_end - whole_begin))
    return step


@jit
def tile_again(step, first, whole_begin, whole_end, TWO_LOOPS: tl.constexpr):
    """Returns the first position of the tile of a step of one loop, from `first` on, that takes the tiles in the order
    of the two loops: sums then have the same bits."""
    if TWO_LOOPS:
        whole = whole_end - whole_begin
        later = tile_of(step - whole, whole_begin, whole_end, True, True)
        return tl.where(step - first < whole, whole_begin + (step - first), later)
    return step


@jit
def in_elements(tensor: InUnits, UNIT: tl.constexpr) -> Tokens:
    """Returns a tensor whose strides count elements, as `Tokens`. They are 64-bit: a stride in elements may exceed 2^31
    although the stride in units does not."""
    return Tokens(
        tensor.ptr,
        tl.cast(tensor.stride_b, tl.int64) * UNIT,
        tl.cast(tensor.stride_m, tl.int64) * UNIT,
        tl.cast(tensor.stride_h, tl.int64) * UNIT,
        tensor.stride_d,
    )


@jit
def tanh(x):
    """Computes tanh to a relative 2^-22: by exponentials, and by its series where `1 - exp(-2|x|)` would cancel."""
    z = tl.math.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    by_exp = (1.0 - z) / (1.0 + z)
    by_exp = tl.where(x < 0, -by_exp, by_exp)
    x2 = x * x
    series = x + x * x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835))))
    return tl.where(tl.abs(x) < 0.25, series, by_exp)


@jit
def rounded_to_tf32(x):
    """Rounds float32 to the nearest number with 10 mantissa bits. The tensor core would truncate instead: twice the
    error, and a bias toward zero that accumulates over terms of one sign, such as probabilities."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@jit
def bfloat16_part(x, IS_NVIDIA: tl.constexpr):
    """Returns the bfloat16 nearest to x, 8 of its 24 bits, and the exact remainder of x; NaN if x is not finite."""
    if IN_INTERPRETER:
        part = rounded(x, tl.bfloat16).to(tl.float32)
    elif IS_NVIDIA:
        # The numbers are used again as float32, so the compiler would convert them one by one, at a quarter of the
        # rate.
        part = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        part = x.to(tl.bfloat16)
    return part, x - part.to(tl.float32)


@jit
def operand(x, PRECISION: tl.constexpr, IS_NVIDIA: tl.constexpr):
    """Returns an operand of products of `PRECISION` as a tuple of its parts, the largest first (warpwave.precision).

    Two bfloat16 parts carry 16 bits of a float32 number, three all 24.
    """
    if PRECISION == "tf32":
        parts = (rounded_to_tf32(x),)
    elif PRECISION == "tf32x3":
        high = (x.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
        rest = ((x - high).to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        parts = (high, rest.to(tl.float32, bitcast=True))  # type: ignore[assignment]
    elif PRECISION == "bf16x3":
        high, rest = bfloat16_part(x, IS_NVIDIA)
        parts = (high, bfloat16_part(rest, IS_NVIDIA)[0])  # type: ignore[assignment]
    elif PRECISION == "bf16x6":
        high, rest = bfloat16_part(x, IS_NVIDIA)
        middle, rest = bfloat16_part(rest, IS_NVIDIA)
        parts = (high, middle, bfloat16_part(rest, IS_NVIDIA)[0])  # type: ignore[assignment]
    else:
        parts = (x,)
    return parts


@jit
def halves(words, FLOAT8: tl.constexpr, IS_NVIDIA: tl.constexpr):
    """Returns the 8-bit numbers of 16-bit words as float16, exactly: the first of each word, and the second.

    Operands in registers come from shared memory 16 bits at a time. Words are converted where they arrive; single bytes
    would be read one by one, or converted before they are exchanged, through shared memory twice.
    """
    if IN_INTERPRETER or not IS_NVIDIA:
        low, high = (words & 0xFF).to(tl.int8), (words >> 8).to(tl.int8)
        if FLOAT8:
            low, high = low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
        low, high = in_float16(low, IS_NVIDIA), in_float16(high, IS_NVIDIA)
    elif FLOAT8:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 x; .reg .b16 a, b; prmt.b32 x, $2, 0, 0x3120; mov.b32 {a, b}, x; "
            "cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        # As the last bits of 1,024 + 128 + x, whose last bit is 1.
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 x, y; xor.b32 x, $2, 0x80808080; mov.b32 y, 0x64806480; prmt.b32 $0, x, 0x64646464, 0x4240; "
            "sub.f16x2 $0, $0, y; prmt.b32 $1, x, 0x64646464, 0x4341; sub.f16x2 $1, $1, y; }",
            "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return low, high


@jit
def in_float16(x, IS_NVIDIA: tl.constexpr):
    """Returns x as float16, an operand of products."""
    if IN_INTERPRETER:
        x = x.to(tl.float32)
    elif IS_NVIDIA and x.dtype == tl.int8:
        # As in `halves`. The compiler would convert them one by one, at a quarter of the rate.
        x = tl.inline_asm_elementwise(
            "{ .reg .b32 x, y; xor.b32 x, $2, 0x80808080; mov.b32 y, 0x64806480; prmt.b32 $0, x, 0x64646464, 0x4140; "
            "sub.f16x2 $0, $0, y; prmt.b32 $1, x, 0x64646464, 0x4342; sub.f16x2 $1, $1, y; }",
            "=&r,=&r,r", [x], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        x = x.to(tl.float16)
    return x


@jit
def scaled_to_float16(parts):
    """Returns the parts of rows divided by a power of two so that the largest number of each row is 2^13 to 2^14, as
    float16, and the powers, float32.

    16-bit numbers stay exact down to 2^-27 of the largest number of their row, where float16 becomes subnormal
    (2^-14). Smaller ones are off by at most 2^-38 of the largest. An infinity stays one. The power is limited to 2^-113
    to 2^113: rows whose largest number is below 2^-100 keep fewer bits, and one of 2^127 or more is 2^14 to 2^15.
    """
    largest = tl.max(tl.abs(parts[0].to(tl.float32)), 1)
    for i in tl.static_range(1, len(parts)):
        largest = tl.maximum(largest, tl.max(tl.abs(parts[i].to(tl.float32)), 1))
    power = largest.to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.minimum(tl.maximum(power, 0x0D800000), 0x7E800000)  # 2^-100 to 2^126
    inverse = (0x7F000000 - power).to(tl.float32, bitcast=True)[:, None] * 2.0**13
    scaled = ()
    for i in tl.static_range(len(parts)):
        scaled = scaled + (in_float16(parts[i].to(tl.float32) * inverse, False),)
    return scaled, power.to(tl.float32, bitcast=True) * 2.0**-13


@jit
def load_parts(
    pointers, stride_part, rows, columns, row_begin, row_end, PRECISION: tl.constexpr, CHECK_ROWS: tl.constexpr
):
    """Loads the parts of a tile that was split ahead, zero outside `row_begin <= row < row_end` if that is checked.
    Consecutive parts are `stride_part` times 16 elements apart, so that the compiler sees their alignment."""
    stride_part = tl.cast(stride_part, tl.int64) * 16
    high = load_tile(pointers, rows, columns, row_begin, row_end, 0, False, CHECK_ROWS)
    next_ = load_tile(pointers + stride_part, rows, columns, row_begin, row_end, 0, False, CHECK_ROWS)
    if PRECISION == "bf16x6":
        third = load_tile(pointers + 2 * stride_part, rows, columns, row_begin, row_end, 0, False, CHECK_ROWS)
        parts = (high, next_, third)
    else:
        parts = (high, next_)  # type: ignore[assignment]
    return parts


@jit
def transposed(parts):
    """Returns the parts of the transposed operand."""
    found = ()
    for i in tl.static_range(len(parts)):
        found = found + (tl.trans(parts[i]),)
    return found


@jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """Returns `acc + a b` of two operands in parts, or `a b` if acc is None, in float32.

    Products of parts are summed from the smallest to the largest, and acc is added last. A tensor core truncates what
    it accumulates, so a sum kept in it over all keys would be off by 1e-8 of itself per key.

    An infinity in float32 must not become NaN. If an operand is Inf, its remainder is NaN, and so is the sum of the
    small products. The product of the largest parts has the float32 result, and `number` protects it.
    """
    if PRECISION == "bf16x3":
        small = tl.dot(a[1], b[0])
        small = tl.dot(a[0], b[1], small)
        total = tl.dot(a[0], b[0], number(small))
        if acc is not None:
            total += acc
    elif PRECISION == "tf32x3":
        small = tl.dot(a[1], b[0], input_precision="tf32")
        small = tl.dot(a[0], b[1], small, input_precision="tf32")
        total = tl.dot(a[0], b[0], number(small), input_precision="tf32")
        if acc is not None:
            total += acc
    elif PRECISION == "bf16x6":
        small = tl.dot(a[2], b[0])
        small = tl.dot(a[0], b[2], small)
        small = tl.dot(a[1], b[1], small)
        small = tl.dot(a[1], b[0], small)
        small = tl.dot(a[0], b[1], small)
        total = tl.dot(a[0], b[0], number(small))
        if acc is not None:
            total += acc
    else:
        total = tl.dot(a[0], b[0], acc, input_precision=PRECISION)
    return total


@jit
def number(x):
    """Returns x, with NaN replaced by float32's most negative number: adding that to Inf or NaN changes neither. This
    is one instruction, because on a GPU the maximum of a number and NaN is the number; in the interpreter it is NaN."""
    if IN_INTERPRETER:
        x = tl.where(x == x, x, -LARGEST)
    return tl.maximum(x, -LARGEST)


@jit
def softmax_step(scores, scale, m_i, l_i):
    """Runs one tile of the online softmax; returns unnormalized probabilities, the rescale factor, and the new state.

    A row that saw no key yet has the maximum minus infinity, and keeps it. Only the subtraction uses 0 instead, because
    `-inf - -inf` is NaN. (A maximum changed to 0 permanently would flush later scores below -126 to zero.)

    Args:
        scores: [BLOCK_M, BLOCK_N], minus infinity where masked.
        scale: converts scores to bits; not negative.
        m_i, l_i: running maximum in bits, and sum, [BLOCK_M].

    Returns:
        p: exp2(scale * scores - new maximum), [BLOCK_M, BLOCK_N].
        alpha: exp2(old maximum - new maximum), exactly 1 if the maximum did not change.
        m_new, l_new.
    """
    m_new = tl.maximum(m_i, tl.max(scores, 1) * scale)
    m_shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.math.exp2(scores * scale - m_shift[:, None])
    alpha = tl.math.exp2(m_i - m_shift)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)
