"""The dequantization factors of a consumer's 64 queries and of its tiles of keys, in quantized calls and 8-bit caches.
token_factors.py handles caches in which each token has its own factor.

Tiles of queries and keys begin at multiples of their length, which divides the blocks of tokens that share a factor, so
a tile has one factor. The factors of Q and K are part of the scale of the scores. The factor of V multiplies the output
if all keys of a head share it. Otherwise the factor of the head's first block multiplies the output. The ratio of a
tile's factor to it is part of the tile's probabilities: its logarithm is added to scores, and sums are divided by it
(softmax.FromOffset).
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from warpwave.kernels.hopper.parts import LARGEST_SCALE, SMALLEST_SCALE, lg2
from warpwave.kernels.hopper.token_factors import has_token_factors, rules_with_tokens
from warpwave.runtime.gluon_or_stub import aggregate, constexpr_function, gl, jit, with_fields


@aggregate
class OfTensor:
    """The factors of Q, K or V of a call (kernels/descales.py, kernels/cache_descales.py).

    Args:
        ptr: float32.
        strides: `groups.QDescaleStrides` of Q, `groups.KeyDescaleStrides` of K and V.
        BLOCK: tokens that share a factor; 0 if all tokens of a head do.
    """

    ptr: gl.tensor
    strides: gl.tuple
    BLOCK: gl.constexpr


@aggregate
class Factors:
    """The factors of a call.

    Args:
        of_q, of_k, of_v: those of Q, K and V; of Q or V () if it is not quantized.
        group_size: query heads of a kv head.
    """

    of_q: object
    of_k: OfTensor
    of_v: object
    group_size: gl.tensor


@aggregate
class OfHead:
    """The factors of one head of K or V: `ptr` is that of its first block. Beside K, `of_v` are those of V, or (). Of
    V, `first` is the factor of the first block and `tile` that of a tile; of K they are ()."""

    ptr: gl.tensor
    stride: gl.tensor
    seqlen_k: gl.tensor
    of_v: object
    first: object
    tile: object
    BLOCK: gl.constexpr


@constexpr_function
def has_factors(factors):
    """Returns whether scores have factors; `factors` is a `Factors`, an `OfHead`, or () for none."""
    if hasattr(factors, "values"):  # Triton's tuple: Triton 3.6 raises on hasattr for a missing name
        return False
    return hasattr(factors, "of_q") or hasattr(factors, "BLOCK")


@constexpr_function
def is_v_quantized(factors):
    """Returns whether V is quantized; `factors` is a `Factors` or an `OfHead`, or () for none."""
    return has_factors(factors) and has_factors(factors.of_v)


@constexpr_function
def has_blocks_of_values(factors):
    """Returns whether blocks of V have factors; `factors` as for `is_v_quantized`."""
    return is_v_quantized(factors) and int(factors.of_v.BLOCK) > 0


@jit
def of_head(of_keys, of_v, group_size, work):
    """Returns the factors of K or V that the head of `work` reads."""
    batch = work.batch.to(gl.int64)
    kv_head = (work.head // group_size).to(gl.int64)
    ptr = of_keys.ptr + (batch * of_keys.strides[0] + kv_head * of_keys.strides[1])
    return OfHead(ptr, of_keys.strides[2], work.seqlen_k, of_v, (), (), of_keys.BLOCK)


@jit
def rules_of_queries(factors, row_first, work, rules):
    """Returns the rules for 64 queries, from `row_first` on, of one head: their factors are those of its keys, and
    their scale includes the factor of Q, and that of K if the head has only one."""
    factor = gl.to_tensor(1.0)
    if has_factors(factors.of_q):
        factor = factor_of_queries(factors.of_q, factors.group_size, row_first, work)
    of_v = ()
    if is_v_quantized(factors):
        of_v = of_head(factors.of_v, (), factors.group_size, work)
        of_v = with_fields(of_v, first=first_of(of_v))
    head = of_head(factors.of_k, of_v, factors.group_size, work)
    if head.BLOCK == 0:
        factor = factor * gl.load(head.ptr)
    return with_fields(rules, scale=in_range(rules.scale * factor), factors=head)


@jit
def factor_of_queries(of_q, group_size, row_first, work):
    """Returns the factor of 64 queries, from `row_first` on, of one head."""
    batch = work.batch.to(gl.int64)
    kv_head = work.head // group_size
    member = (work.head - kv_head * group_size).to(gl.int64)
    strides = of_q.strides
    pointer = of_q.ptr + (batch * strides[0] + kv_head.to(gl.int64) * strides[1] + member * strides[2])
    if of_q.BLOCK > 0:
        # Queries past the last one have no factor.
        row = gl.minimum(row_first, gl.maximum(work.seqlen_q - 1, 0))
        pointer += (row // of_q.BLOCK).to(gl.int64) * strides[3]
    return gl.load(pointer)


@jit
def factors_of_tile(tile, n, keys, rules):
    """Starts to read the factors of a tile of K and of V, 1 where blocks have none of their own; () if the call has no
    factors. Those of tokens are read when K has arrived: returns `n`, the tile's number in the rings.
    """
    if has_token_factors(rules.factors):
        return n
    elif has_factors(rules.factors):
        return _factors_of_tile(rules.factors, tile, keys, rules)
    else:
        return ()


@jit
def _factors_of_tile(head, tile, keys, rules):
    of_k = gl.to_tensor(1.0)
    of_v = gl.to_tensor(1.0)
    if head.BLOCK > 0:
        of_k = of_block(head, tile, keys, rules)
    if has_blocks_of_values(head):
        of_v = of_block(head.of_v, tile, keys, rules)
    return of_k, of_v


@jit
def rules_of_tile(read, rules):
    """Returns the rules for a tile of keys: their scale includes its factor of K, and `tile` is its factor of V. `read`
    is what `factors_of_tile` returned."""
    if has_token_factors(rules.factors):
        return rules_with_tokens(read, rules)
    elif has_factors(rules.factors):
        return _rules_of_tile(rules.factors, read, rules)
    else:
        return rules


@jit
def _rules_of_tile(head, read, rules):
    if head.BLOCK > 0:
        rules = with_fields(rules, scale=in_range(rules.scale * read[0]))
    if has_blocks_of_values(head):
        rules = with_fields(rules, factors=with_fields(head, of_v=with_fields(head.of_v, tile=read[1])))
    return rules


@jit
def of_output(factors, work):
    """Returns the factor of the output, that of the first block of V; `factors` is a `Factors`."""
    if is_v_quantized(factors):
        return first_of(of_head(factors.of_v, (), factors.group_size, work))
    else:
        return 1.0


@jit
def first_of(head):
    """Returns the factor of a head's first block; 1 if there are no blocks, because there are no keys."""
    return gl.load(head.ptr, mask=(head.seqlen_k > 0) | (head.BLOCK == 0), other=1.0)


@jit
def bits_of_values(rules):
    """Returns the logarithm of a tile's factor of V relative to that of the first block, in bits, to a multiple of
    2^-13: the factor is off by 2^-14 at most. Relative, because a factor may be close to the limits of float32.
    The sum of a row that sees n keys, all of them with a ratio r, overflows if n / r reaches about 2^128."""
    bits = lg2(rules.factors.of_v.tile / rules.factors.of_v.first)
    # Adding 1.5 * 2^10 leaves 13 bits behind the point.
    return (bits + 1536.0) - 1536.0


@jit
def of_block(head, tile, keys, rules):
    """Returns the factor of a tile of keys."""
    key = keys.begin + tile * rules.BLOCK_N
    # A call without keys computes one tile and has no factors.
    return gl.load(head.ptr + (key // head.BLOCK).to(gl.int64) * head.stride, mask=key < head.seqlen_k, other=1.0)


@jit
def in_range(scale):
    """Returns a scale that cannot give 0 * -inf."""
    return gl.minimum(gl.maximum(scale, SMALLEST_SCALE), LARGEST_SCALE)
