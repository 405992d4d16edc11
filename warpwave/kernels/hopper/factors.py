"""The dequantization factors of a consumer's 64 queries and of its tiles of keys, in quantized calls and 8-bit caches.
token_factors.py handles caches in which each token has its own factor.

Tiles of queries and keys begin at multiples of their length, which divides the blocks of tokens that share a factor, so
a tile has one factor. The factors of Q and K are part of the scale of the scores. The factor of V multiplies the output
if all keys of a head share it. Otherwise the factor of the head's first block multiplies the output. The ratio of a
tile's factor to it is part of the tile's probabilities: its logarithm is added to scores, and sums are divided by it
(softmax.FromOffset).

Factors of blocks come through shared memory. The producer reads those of a tile from memory, ahead of the consumers,
and writes them after it has started the tile's copies.
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from warpwave.kernels.hopper.parts import LARGEST_SCALE, SMALLEST_SCALE, is_a, lg2
from warpwave.kernels.hopper.token_factors import (
    has_token_factors,
    read_factors_of_tokens,
    rules_with_tokens,
    store_factors_of_tokens,
)
from warpwave.runtime.gluon_or_stub import aggregate, constexpr_function, gl, jit, mbarrier, with_fields


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
        of_tiles: [2 * (stages + 1), 1] float32 in shared memory, of each of the last tiles its factor of K and
            `bits_of_values`; () if no block of K or V has a factor of its own. The producer has waited for V of tile
            n - stages - 1 before it writes those of tile n, and a consumer hands back V when it no longer needs the
            factors of its tile.
        bits: a tile's `bits_of_values` as a consumer has read them; () before.
    """

    of_q: object
    of_k: OfTensor
    of_v: object
    group_size: gl.tensor
    of_tiles: object
    bits: object


@constexpr_function
def has_factors(factors):
    """Returns whether heads or blocks of tokens have factors; `factors` is a `Factors`, a `TokenFactors`, or ()."""
    return is_a(factors, "of_q")


@constexpr_function
def is_q_quantized(factors):
    """Returns whether Q is quantized; `factors` as for `has_factors`."""
    return has_factors(factors) and is_a(factors.of_q, "BLOCK")


@constexpr_function
def is_v_quantized(factors):
    """Returns whether V is quantized; `factors` as for `has_factors`."""
    return has_factors(factors) and is_a(factors.of_v, "BLOCK")


@constexpr_function
def has_blocks_of_values(factors):
    """Returns whether blocks of V have factors; `factors` as for `has_factors`."""
    return is_v_quantized(factors) and int(factors.of_v.BLOCK) > 0


@constexpr_function
def has_factors_of_tiles(factors):
    """Returns whether blocks of K or V have factors; `factors` as for `has_factors`."""
    return has_factors(factors) and (int(factors.of_k.BLOCK) > 0 or has_blocks_of_values(factors))


@constexpr_function
def arrivals_of_keys(factors):
    """Returns how often the producer announces a tile of K: by its copies, and once its factors are written."""
    return 2 if has_factors_of_tiles(factors) else 1


@jit
def tile_factors(STAGES: gl.constexpr):
    """Allocates `Factors.of_tiles`."""
    return gl.allocate_shared_memory(gl.float32, [2 * (STAGES + 1), 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@jit
def rules_of_queries(factors, row_first, work, rules):
    """Returns the rules for 64 queries, from `row_first` on, of one head: their scale includes the factor of Q, and
    that of K if the head has only one."""
    factor = gl.to_tensor(1.0)
    if is_q_quantized(factors):
        factor = factor_of_queries(factors.of_q, factors.group_size, row_first, work)
    if factors.of_k.BLOCK == 0:
        factor = factor * factor_at(factors.of_k, work, work.head // factors.group_size, gl.to_tensor(0))
    return with_fields(rules, scale=in_range(rules.scale * factor))


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
def read_factors(rules, work, source, kv_head, key):
    """Starts to read the factors of a tile of keys, from row `key` of K on; called by the producer. `source` is a
    `pages.OfSequence` if tokens have factors."""
    if has_token_factors(rules.factors):
        return read_factors_of_tokens(rules.factors, source, kv_head, key, rules.BLOCK_N)
    elif has_factors_of_tiles(rules.factors):
        of_k = gl.to_tensor(1.0)
        of_v = gl.to_tensor(1.0)
        first = gl.to_tensor(1.0)
        if rules.factors.of_k.BLOCK > 0:
            of_k = factor_at(rules.factors.of_k, work, kv_head, key - work.k_begin)
        if has_blocks_of_values(rules.factors):
            of_v = factor_at(rules.factors.of_v, work, kv_head, key - work.k_begin)
            first = factor_at(rules.factors.of_v, work, kv_head, gl.to_tensor(0))
        return of_k, of_v, first
    else:
        return ()


@jit
def factor_at(of_keys, work, kv_head, key):
    """Returns the factor of K or V at a key of the sequence. Without keys there are no blocks, and it is 1."""
    strides = of_keys.strides
    ptr = of_keys.ptr + (work.batch.to(gl.int64) * strides[0] + kv_head.to(gl.int64) * strides[1])
    if of_keys.BLOCK > 0:
        factor = gl.load(ptr + (key // of_keys.BLOCK).to(gl.int64) * strides[2], mask=key < work.seqlen_k, other=1.0)
    else:
        factor = gl.load(ptr)
    return factor


@jit
def store_factors(rules, k_ring, n, read):
    """Writes what consumers read of `read_factors`' results for tile n, whose K was started before, and announces
    it."""
    if has_token_factors(rules.factors):
        store_factors_of_tokens(rules.factors, k_ring, n, read)
    elif has_factors_of_tiles(rules.factors):
        place = place_of_tile(rules.factors.of_tiles, n)
        store_number(rules.factors.of_tiles, place, read[0])
        if has_blocks_of_values(rules.factors):
            store_number(rules.factors.of_tiles, place + 1, bits_of_values(read[1], read[2]))
        mbarrier.arrive(k_ring.full.index(n % k_ring.stages), count=1)


@jit
def store_number(numbers, place, number):
    """Writes a number, as the producer."""
    numbers.index(place).store(gl.full([1], number, gl.float32, gl.BlockedLayout([1], [32], [1], [0])))


@jit
def place_of_tile(of_tiles, n):
    """Returns the first of the two places of tile n."""
    return 2 * (n % (of_tiles.shape[0] // 2))


@jit
def rules_of_tile(n, rules):
    """Returns the rules for tile n, whose K has arrived: their scale includes its factors of K, and its factors of V
    are known."""
    if has_token_factors(rules.factors):
        return rules_with_tokens(n, rules)
    elif has_factors_of_tiles(rules.factors):
        return _rules_of_tile(rules.factors, n, rules)
    else:
        return rules


@jit
def _rules_of_tile(factors, n, rules):
    place = place_of_tile(factors.of_tiles, n)
    if factors.of_k.BLOCK > 0:
        rules = with_fields(rules, scale=in_range(rules.scale * number_at(factors.of_tiles, place)))
    if has_blocks_of_values(factors):
        rules = with_fields(rules, factors=with_fields(factors, bits=number_at(factors.of_tiles, place + 1)))
    return rules


@jit
def number_at(numbers, place):
    """Returns a number, for a consumer."""
    return gl.max(numbers.index(place).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@jit
def of_output(factors, work):
    """Returns the factor of the output, that of the first block of V."""
    if is_v_quantized(factors):
        return factor_at(factors.of_v, work, work.head // factors.group_size, gl.to_tensor(0))
    else:
        return 1.0


@jit
def bits_of_values(of_tile, first):
    """Returns the logarithm of a tile's factor of V relative to that of the first block, in bits, to a multiple of
    2^-13: the factor is off by 2^-14 at most. Relative, because a factor may be close to the limits of float32.
    The sum of a row that sees n keys, all of them with a ratio r, overflows if n / r reaches about 2^128."""
    # Adding 1.5 * 2^10 leaves 13 bits behind the point.
    return (lg2(of_tile / first) + 1536.0) - 1536.0


@jit
def in_range(scale):
    """Returns a scale that cannot give 0 * -inf."""
    return gl.minimum(gl.maximum(scale, SMALLEST_SCALE), LARGEST_SCALE)
