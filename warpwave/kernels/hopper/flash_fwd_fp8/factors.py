"""The dequantization factors of a consumer's 64 queries, and of each of its tiles of keys.

Tiles of queries and keys begin at multiples of their length, which divides the blocks of tokens that share a factor, so
a tile has one factor. That of Q and K is part of the scale of the scores. That of V multiplies a tile's product where
it is added to the accumulator, or the output if all keys of a head share it.
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from warpwave.kernels.hopper.visible import with_scale
from warpwave.runtime.gluon_or_stub import aggregate, constexpr_function, gl, jit


@aggregate
class Factors:
    """The factors of a call, and their strides (kernels/descales.py).

    Args:
        q_ptr, k_ptr, v_ptr: float32.
        q_strides: along batches, kv heads, query heads of a group, and blocks of queries.
        k_strides, v_strides: along batches, kv heads, and blocks of keys.
        group_size: query heads of a kv head.
        Q_BLOCK, K_BLOCK, V_BLOCK: tokens that share a factor; 0 if all tokens of a head do.
    """

    q_ptr: gl.tensor
    k_ptr: gl.tensor
    v_ptr: gl.tensor
    q_strides: gl.tuple
    k_strides: gl.tuple
    v_strides: gl.tuple
    group_size: gl.tensor
    Q_BLOCK: gl.constexpr
    K_BLOCK: gl.constexpr
    V_BLOCK: gl.constexpr

    @constexpr_function
    def __init__(
        self, q_ptr, k_ptr, v_ptr, q_strides, k_strides, v_strides, group_size, Q_BLOCK, K_BLOCK, V_BLOCK
    ):  # fmt: skip
        self.q_ptr = q_ptr
        self.k_ptr = k_ptr
        self.v_ptr = v_ptr
        self.q_strides = q_strides
        self.k_strides = k_strides
        self.v_strides = v_strides
        self.group_size = group_size
        self.Q_BLOCK = gl.constexpr(Q_BLOCK)
        self.K_BLOCK = gl.constexpr(K_BLOCK)
        self.V_BLOCK = gl.constexpr(V_BLOCK)


@aggregate
class OfHead:
    """The factors of one head's keys: `k_ptr` and `v_ptr` are those of its first block."""

    k_ptr: gl.tensor
    v_ptr: gl.tensor
    k_stride: gl.tensor
    v_stride: gl.tensor
    seqlen_k: gl.tensor
    K_BLOCK: gl.constexpr
    V_BLOCK: gl.constexpr

    @constexpr_function
    def __init__(self, k_ptr, v_ptr, k_stride, v_stride, seqlen_k, K_BLOCK, V_BLOCK):
        self.k_ptr = k_ptr
        self.v_ptr = v_ptr
        self.k_stride = k_stride
        self.v_stride = v_stride
        self.seqlen_k = seqlen_k
        self.K_BLOCK = gl.constexpr(K_BLOCK)
        self.V_BLOCK = gl.constexpr(V_BLOCK)


@jit
def of_head(factors, work):
    """Returns the factors of the keys that the head of `work` reads."""
    batch = work.batch.to(gl.int64)
    kv_head = (work.head // factors.group_size).to(gl.int64)
    k_ptr = factors.k_ptr + (batch * factors.k_strides[0] + kv_head * factors.k_strides[1])
    v_ptr = factors.v_ptr + (batch * factors.v_strides[0] + kv_head * factors.v_strides[1])
    return OfHead(
        k_ptr, v_ptr, factors.k_strides[2], factors.v_strides[2], work.seqlen_k, factors.K_BLOCK, factors.V_BLOCK
    )


@jit
def rules_of_queries(factors, head, row_first, work, rules):
    """Returns the rules for 64 queries, from `row_first` on, of one head: their scale includes the factor of Q, and
    that of K if the head has only one."""
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
    if head.K_BLOCK == 0:
        factor = factor * gl.load(head.k_ptr)
    return with_scale(rules, in_range(rules.scale * factor))


@jit
def rules_of_tile(head, tile, keys, rules):
    """Returns the rules for a tile of keys: their scale includes its factor of K."""
    if head.K_BLOCK == 0:
        return rules
    else:
        factor = _of_block(head.k_ptr, head.k_stride, head.K_BLOCK, head, tile, keys, rules)
        return with_scale(rules, in_range(rules.scale * factor))


@jit
def of_values(head, tile, keys, rules):
    """Returns the factor of V of a tile of keys; 1 if the head has only one, which multiplies the output."""
    if head.V_BLOCK == 0:
        return 1.0
    else:
        return _of_block(head.v_ptr, head.v_stride, head.V_BLOCK, head, tile, keys, rules)


@jit
def of_output(head):
    """Returns the factor of V of a whole head; 1 if its blocks have their own."""
    if head.V_BLOCK == 0:
        return gl.load(head.v_ptr)
    else:
        return 1.0


@jit
def _of_block(pointer, stride, BLOCK: gl.constexpr, head, tile, keys, rules):
    key = keys.begin + tile * rules.BLOCK_N
    # A call without keys computes one tile and has no factors.
    return gl.load(pointer + (key // BLOCK).to(gl.int64) * stride, mask=key < head.seqlen_k, other=1.0)


@jit
def in_range(scale):
    """Returns a scale that cannot give 0 * -inf."""
    return gl.minimum(gl.maximum(scale, 1.1754943508222875e-38), 1.2676506002282294e30)
