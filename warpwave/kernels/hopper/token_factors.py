"""The dequantization factors of an 8-bit cache in which each head of each token has its own.

The producer reads the factors of a tile's keys and writes them into shared memory. The widener computes from them what
consumers read, before it hands over the tile's K. Consumers multiply scores by the factors of K, and add the logarithms
of the factors of V to scores in bits. A probability thus includes the factor of its value, and sums of probabilities
are weighted by the inverse.
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from warpwave.kernels.hopper.groups import KeyDescaleStrides
from warpwave.kernels.hopper.parts import accumulator_layout, is_a, lg2
from warpwave.runtime.gluon_or_stub import aggregate, constexpr_function, gl, jit, mbarrier, with_fields

# Bounds of the factors of V whose inverses are weights. Those of hidden tokens may be anything, and 0 times the inverse
# of 0 or NaN is NaN. The logarithm of a factor of infinity or NaN makes out and lse of a row that sees the token NaN.
# Sums reach 2^15 for each key, divided by the smallest. A factor above the largest has a weight that is too large.
SMALLEST = gl.constexpr(2.0**-80)
LARGEST = gl.constexpr(2.0**126)


@aggregate
class TokenFactors:
    """The factors of a cache.

    Args:
        k_ptr, v_ptr: float32.
        k_strides, v_strides: of pages, heads and tokens.
        raw: [2 * narrow stages, keys] in shared memory: the factors of K and V.
        prepared: [3 * (stages + 1), keys]: the factors of K, logarithms of those of V in bits, and their inverses. A
            consumer hands back V when it no longer needs the factors of its tile. The widener has waited for V of tile
            n - stages - 1 before it writes those of tile n, so they need no barrier of their own.
        of_tile: the last two as a consumer has read them, each [1, keys]; () before.
    """

    k_ptr: gl.tensor
    k_strides: gl.tuple
    v_ptr: gl.tensor
    v_strides: gl.tuple
    raw: gl.shared_memory_descriptor
    prepared: gl.shared_memory_descriptor
    of_tile: object


@constexpr_function
def has_token_factors(factors):
    """Returns whether tokens have factors; `factors` is a `TokenFactors`, other factors, or () for none."""
    return is_a(factors, "prepared")


@jit
def token_factors(
    k_ptr, k_strides: KeyDescaleStrides, v_ptr, v_strides: KeyDescaleStrides, NARROW_STAGES: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Allocates the shared memory of a `TokenFactors`."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    raw = gl.allocate_shared_memory(gl.float32, [2 * NARROW_STAGES, BLOCK_N], layout)
    prepared = gl.allocate_shared_memory(gl.float32, [3 * (STAGES + 1), BLOCK_N], layout)
    return TokenFactors(k_ptr, k_strides, v_ptr, v_strides, raw, prepared, ())


@jit
def read_factors_of_tokens(factors, source, head, key, BLOCK_N: gl.constexpr):
    """Implements `factors.read_factors`."""
    keys = gl.minimum(key + gl.arange(0, BLOCK_N, gl.BlockedLayout([1], [32], [1], [0])), source.last_key)
    page = gl.load(source.table_ptr + keys // source.PAGE_SIZE)
    page = gl.minimum(gl.maximum(page, 0), source.num_pages - 1).to(gl.int64)
    cell = (keys % source.PAGE_SIZE).to(gl.int64)
    found = ()
    for of in gl.static_range(2):
        ptr = factors.v_ptr if of else factors.k_ptr
        strides = factors.v_strides if of else factors.k_strides
        found = found + (gl.load(ptr + (page * strides[0] + head.to(gl.int64) * strides[1] + cell * strides[2])),)
    return found


@jit
def store_factors_of_tokens(factors, k_narrow, n, read):
    """Implements `factors.store_factors`."""
    stage = n % k_narrow.stages
    for of in gl.static_range(2):
        factors.raw.index(2 * stage + of).store(read[of])
    mbarrier.arrive(k_narrow.full.index(stage), count=1)


@jit
def prepare(factors, n, warps: gl.constexpr):
    """Computes from the factors of tile n what consumers read; called by the widener before it hands over K."""
    if has_token_factors(factors):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
        raw = 2 * (n % (factors.raw.shape[0] // 2))
        first = first_prepared(factors, n)
        of_v = factors.raw.index(raw + 1).load(layout)
        of_v = gl.where(of_v < SMALLEST, SMALLEST, of_v)
        factors.prepared.index(first).store(factors.raw.index(raw).load(layout))
        factors.prepared.index(first + 1).store(lg2(of_v))
        factors.prepared.index(first + 2).store(1.0 / gl.minimum(gl.maximum(of_v, SMALLEST), LARGEST))


@jit
def first_prepared(factors, n):
    """Returns the first of the three rows of `prepared` of tile n."""
    return 3 * (n % (factors.prepared.shape[0] // 3))


@jit
def rules_with_tokens(n, rules):
    """Returns the rules for tile n, whose K has arrived: their scale includes the factors of K, [1, keys]."""
    layout: gl.constexpr = gl.SliceLayout(0, accumulator_layout(rules.BLOCK_N))
    prepared = rules.factors.prepared
    first = first_prepared(rules.factors, n)
    of_tile = (prepared.index(first + 1).load(layout)[None, :], prepared.index(first + 2).load(layout)[None, :])
    scale = rules.scale * prepared.index(first).load(layout)[None, :]
    return with_fields(rules, scale=scale, factors=with_fields(rules.factors, of_tile=of_tile))
