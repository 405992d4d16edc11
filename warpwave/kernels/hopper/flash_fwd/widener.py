"""The widener of the Hopper forward: two warps that convert the tiles of an 8-bit cache to 16 bits in shared memory.

The producer copies tiles of 8 bits into rings of their own. The widener empties these into the rings that the consumers
read. K and V become float16, which holds every number of float8 and int8. A conversion of float8 to float16 takes half
an instruction a number, one to bfloat16 takes two. Consumers therefore convert queries of bfloat16 to float16 as well,
divided by a power of two. Probabilities are in float16 too. Beside bfloat16 queries or factors of tokens, small ones
would leave its range, so they are multiplied by 2^softmax.RAISE.

The producer has one warp of a warpgroup, and the widener two of the others, which are idle in other calls.
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from warpwave.kernels.hopper.parts import (
    Ring,
    arrive_alone,
    buffers,
    is_a,
    make_room,
    matrix,
    ring_of,
    wait_full,
)
from warpwave.kernels.hopper.rows import row_vectors
from warpwave.kernels.hopper.token_factors import has_token_factors, prepare
from warpwave.runtime.gluon_or_stub import (
    aggregate,
    block_barrier,
    constexpr_function,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    reinterpret,
)

WIDENER_WARPS = gl.constexpr(2)
AT_ONCE = gl.constexpr(2048)  # elements, to limit registers
NOT_KNOWN = gl.constexpr(-1)


@aggregate
class Widener:
    """State of the widener.

    Args:
        k_narrow, v_narrow: the rings that the producer fills.
        k_ring, v_ring: the rings that the consumers read.
        end: a word of shared memory: the number of tiles of the launch, or NOT_KNOWN.
        factors: `TokenFactors` if tokens have factors, else ().
    """

    k_narrow: Ring
    v_narrow: Ring
    k_ring: Ring
    v_ring: Ring
    end: gl.shared_memory_descriptor
    factors: object


@jit
def narrow_ring(maps, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocates a ring of 8-bit tiles, which one role empties; a tile is complete after ARRIVALS of the producer."""
    return ring_of(buffers(maps, STAGES, BLOCK_N), STAGES, 1, ARRIVALS=ARRIVALS)


@jit
def unknown_end():
    """Allocates `Widener.end`."""
    end = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    end.store(gl.full([1], NOT_KNOWN, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    return end


@constexpr_function
def is_present(role):
    """Returns whether there is a widener; `role` is a `Widener`, or () for none."""
    return is_a(role, "end")


@jit
def announce_end(role, n):
    """Tells the widener, if there is one, that tile n does not come; called by the producer."""
    if is_present(role):
        role.end.store(gl.full([1], n, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
        make_room(role.k_narrow, n, 0)
        if has_token_factors(role.factors):
            mbarrier.arrive(role.k_narrow.full.index(n % role.k_narrow.stages), count=1)


@jit
def widener(role):
    """Widens tiles until the producer announces the end. K comes before V, as consumers need them."""
    n = 0
    while is_more(role, n):
        prepare(role.factors, n, WIDENER_WARPS)
        widen(role.k_narrow, role.k_ring, n)
        widen(role.v_narrow, role.v_ring, n)
        n += 1


@jit
def is_more(role, n):
    """Waits for tile n of K, and returns whether it came instead of the end."""
    wait_full(role.k_narrow, n)
    return gl.max(role.end.load(gl.BlockedLayout([1], [32], [WIDENER_WARPS], [0])), axis=0) != n


@jit
def widen(narrow, ring, n):
    """Widens tile n."""
    wait_full(narrow, n)
    stage = n % ring.stages
    mbarrier.wait(ring.empty.index(stage), ((n // ring.stages) & 1) ^ 1)
    for i in gl.static_range(len(ring.pieces)):
        widen_piece(matrix(narrow.pieces[i].index(n % narrow.stages)), matrix(ring.pieces[i].index(stage)))
    fence_async_shared()
    mbarrier.arrive(ring.full.index(stage), count=1)  # behind a barrier of the widener's threads
    arrive_alone(narrow.empty.index(n % narrow.stages))


@jit
def widen_piece(source, target):
    """Writes a matrix in shared memory in 16 bits."""
    layout: gl.constexpr = row_vectors(target.shape[1], WIDENER_WARPS)
    ROWS_AT_ONCE: gl.constexpr = min(target.shape[0], AT_ONCE // target.shape[1])
    CHUNKS: gl.constexpr = target.shape[0] // ROWS_AT_ONCE
    numbers = source.slice(0, ROWS_AT_ONCE, dim=0).load(layout)
    for j in gl.static_range(CHUNKS):
        following = numbers
        if j + 1 < CHUNKS:  # before the store, because the compiler moves no load before one
            following = source.slice((j + 1) * ROWS_AT_ONCE, ROWS_AT_ONCE, dim=0).load(layout)
        target.slice(j * ROWS_AT_ONCE, ROWS_AT_ONCE, dim=0).store(in_float16(numbers))
        numbers = following


# Conversions ----------------------------------------------------------------------------------------------------------


@jit
def in_float16(numbers):
    """Returns 8-bit numbers in float16. Triton's own conversion of int8 is scalar and slow."""
    if numbers.dtype == gl.int8:
        return int8_in_float16(numbers)
    else:
        return numbers.to(gl.float16)


@constexpr_function
def _int8_in_float16_asm():
    # With its sign bit flipped, an int8 x is x + 128. As the low byte of 1024.0, it is added to that, and one
    # subtraction leaves x.
    halves = "".join(
        f"prmt.b32 ${i}, t, 0x64646464, {0x4140 + 0x202 * i:#x}; sub.rn.f16x2 ${i}, ${i}, m; " for i in (0, 1)
    )
    return f"{{ .reg .b32 t, m; mov.b32 m, 0x64806480; xor.b32 t, $2, 0x80808080; {halves}}}"


@jit
def int8_in_float16(numbers):
    """Returns int8 in float16."""
    return gl.inline_asm_elementwise(
        _int8_in_float16_asm(), "=&r,=r,r", [numbers], dtype=gl.float16, is_pure=True, pack=4
    )


@jit
def queries_in_float16(q, rows):
    """Converts the queries of a consumer from bfloat16 to float16 in place, and returns (q, power).

    Args:
        q: the pieces of 64 rows of Q in shared memory.
        rows: the rows before the end of the sequence; other sequences' queries must not change the power.

    Returns:
        q: the pieces, divided by `power`: the largest finite number of those rows is 2^13 to 2^14, less if it was below
            2^-100, up to 2^15 from 2^127 on. Numbers stay exact down to 2^-27 of it, and smaller ones are off by at
            most 2^-38 of it. Infinities and NaN stay as they are.
        power: a power of two from 2^-113 to 2^113.
    """
    largest = gl.to_tensor(0.0)
    pieces = ()
    for i in gl.static_range(len(q)):
        x = q[i].load(row_vectors(q[i].shape[1])).to(gl.float32)
        pieces = pieces + (x,)
        inside = (gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout)) < rows)[:, None]
        finite = gl.where(inside & (gl.abs(x) < float("inf")), gl.abs(x), 0.0)
        largest = gl.maximum(largest, gl.max(gl.reshape(finite, [x.shape[0] * x.shape[1]]), axis=0))
    power = largest.to(gl.int32, bitcast=True) & 0x7F800000
    power = gl.minimum(gl.maximum(power, 0x0D800000), 0x7E800000)  # 2^-100 to 2^126
    inverse = (0x7F000000 - power).to(gl.float32, bitcast=True) * 2.0**13
    narrow = ()
    for i in gl.static_range(len(q)):
        piece = reinterpret(q[i], gl.float16, q[i].shape, q[i].layout)
        piece.store((pieces[i] * inverse).to(gl.float16))
        narrow = narrow + (piece,)
    fence_async_shared()
    block_barrier()
    return narrow, power.to(gl.float32, bitcast=True) * 2.0**-13
