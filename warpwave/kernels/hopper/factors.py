"""The dequantization factors of a consumer's 64 queries, and of each of its tiles of keys.

Tiles of queries and keys begin at multiples of their length, which divides the blocks of tokens that share a factor, so
a tile has one factor. That of Q and K is part of the scale of the scores. That of V multiplies a tile's product where
it is added to the accumulator, or the output if all keys of a head share it.
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from warpwave.runtime.gluon_or_stub import aggregate, constexpr_function, gl, jit, with_fields


@aggregate
class OfKeys:
    """The factors of K or V of a call (kernels/descales.py).

    Args:
        ptr: float32.
        strides: `groups.KeyDescaleStrides`.
        BLOCK: keys that share a factor; 0 if all keys of a head do.
    """

    ptr: gl.tensor
    strides: gl.tuple
    BLOCK: gl.constexpr


@aggregate
class Factors:
    """The factors of the scores of a call.

    Args:
        q_ptr, q_strides: those of Q, float32, and their `groups.QDescaleStrides`.
        of_k: those of K.
        group_size: query heads of a kv head.
        Q_BLOCK: queries that share a factor; 0 if all queries of a head do.
    """

    q_ptr: gl.tensor
    q_strides: gl.tuple
    of_k: OfKeys
    group_size: gl.tensor
    Q_BLOCK: gl.constexpr


@aggregate
class OfHead:
    """The factors of one head of K or V: `ptr` is that of its first block."""

    ptr: gl.tensor
    stride: gl.tensor
    seqlen_k: gl.tensor
    BLOCK: gl.constexpr


@constexpr_function
def has_factors(factors):
    """Returns whether scores have factors; `factors` is a `Factors`, an `OfHead`, or () for none."""
    if hasattr(factors, "values"):  # Triton's tuple: Triton 3.6 raises on hasattr for a missing name
        return False
    return hasattr(factors, "Q_BLOCK") or hasattr(factors, "BLOCK")


@jit
def of_head(of_keys, group_size, work):
    """Returns the factors of K or V that the head of `work` reads."""
    batch = work.batch.to(gl.int64)
    kv_head = (work.head // group_size).to(gl.int64)
    ptr = of_keys.ptr + (batch * of_keys.strides[0] + kv_head * of_keys.strides[1])
    return OfHead(ptr, of_keys.strides[2], work.seqlen_k, of_keys.BLOCK)


@jit
def rules_of_queries(factors, row_first, work, rules):
    """Returns the rules for 64 queries, from `row_first` on, of one head: their factors are those of its keys, and
    their scale includes the factor of Q, and that of K if the head has only one."""
    batch = work.batch.to(gl.int64)
    kv_head = work.head // factors.group_size
    member = (work.head - kv_head * factors.group_size).to(gl.int64)
    q_strides = factors.q_strides
    pointer = factors.q_ptr + (batch * q_strides[0] + kv_head.to(gl.int64) * q_strides[1] + member * q_strides[2])
    if factors.Q_BLOCK > 0:
        # Queries past the last one have no factor.
        row = gl.minimum(row_first, gl.maximum(work.seqlen_q - 1, 0))
        pointer += (row // factors.Q_BLOCK).to(gl.int64) * q_strides[3]
    factor = gl.load(pointer)
    head = of_head(factors.of_k, factors.group_size, work)
    if head.BLOCK == 0:
        factor = factor * gl.load(head.ptr)
    return with_fields(rules, scale=in_range(rules.scale * factor), factors=head)


@jit
def rules_of_tile(tile, keys, rules):
    """Returns the rules for a tile of keys: their scale includes its factor of K."""
    if has_factors(rules.factors):
        return _rules_of_tile(rules.factors, tile, keys, rules)
    else:
        return rules


@jit
def _rules_of_tile(head, tile, keys, rules):
    if head.BLOCK == 0:
        return rules
    else:
        return with_fields(rules, scale=in_range(rules.scale * of_block(head, tile, keys, rules)))


@jit
def of_values(values, tile, keys, rules):
    """Returns the factor of V of a tile of keys; 1 if the head has only one, which multiplies the output."""
    if values.BLOCK == 0:
        return 1.0
    else:
        return of_block(values, tile, keys, rules)


@jit
def of_output(values):
    """Returns the factor of V of a whole head; 1 if its blocks have their own."""
    if values.BLOCK == 0:
        return gl.load(values.ptr)
    else:
        return 1.0


@jit
def of_block(head, tile, keys, rules):
    """Returns the factor of a tile of keys."""
    key = keys.begin + tile * rules.BLOCK_N
    # A call without keys computes one tile and has no factors.
    return gl.load(head.ptr + (key // head.BLOCK).to(gl.int64) * head.stride, mask=key < head.seqlen_k, other=1.0)


@jit
def in_range(scale):
    """Returns a scale that cannot give 0 * -inf."""
    return gl.minimum(gl.maximum(scale, 1.1754943508222875e-38), 1.2676506002282294e30)
