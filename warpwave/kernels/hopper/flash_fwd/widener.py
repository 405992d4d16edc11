"""The widener of the Hopper forward: two warps that convert the tiles of an 8-bit cache to 16 bits in shared memory.

The producer copies tiles of 8 bits into rings of their own. The widener empties these into the rings that the consumers
read. K becomes the type of Q and V float16, which hold every number of float8 and int8. A conversion of float8 to
float16 takes half an instruction a number, one to bfloat16 takes two. Beside bfloat16 queries, probabilities are
therefore in float16 too; its range would lose small ones, so they are multiplied by 2^softmax.RAISE.

The producer has one warp of a warpgroup, and the widener two of the others, which are idle in other calls.
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from warpwave.kernels.hopper.parts import (
    Ring,
    arrive_alone,
    barriers,
    buffers,
    make_room,
    matrix,
    ring_init,
    wait_full,
)
from warpwave.kernels.hopper.rows import row_vectors
from warpwave.runtime.gluon_or_stub import (
    aggregate,
    constexpr_function,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
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
    """

    k_narrow: Ring
    v_narrow: Ring
    k_ring: Ring
    v_ring: Ring
    end: gl.shared_memory_descriptor


@jit
def narrow_ring(maps, STAGES: gl.constexpr, BLOCK_N: gl.constexpr):
    """Allocates a ring of 8-bit tiles, which one role empties."""
    ring = Ring(buffers(maps, STAGES, BLOCK_N), barriers(STAGES), barriers(STAGES), STAGES, 0, 1)
    ring_init(ring, 1)
    return ring


@jit
def unknown_end():
    """Allocates `Widener.end`."""
    end = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    end.store(gl.full([1], NOT_KNOWN, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    return end


@constexpr_function
def is_present(role):
    """Returns whether there is a widener; `role` is a `Widener`, or () for none."""
    return not hasattr(role, "values") and hasattr(role, "end")  # as in factors.has_factors


@jit
def announce_end(role, n):
    """Tells the widener, if there is one, that tile n does not come; called by the producer."""
    if is_present(role):
        role.end.store(gl.full([1], n, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
        make_room(role.k_narrow, n, 0)


@jit
def widener(role):
    """Widens tiles until the producer announces the end. K comes before V, as consumers need them."""
    n = 0
    while is_more(role, n):
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
        target.slice(j * ROWS_AT_ONCE, ROWS_AT_ONCE, dim=0).store(in_16_bits(numbers, target.dtype))
        numbers = following


# Conversions ----------------------------------------------------------------------------------------------------------


@jit
def in_16_bits(numbers, DTYPE: gl.constexpr):
    """Returns 8-bit numbers in a 16-bit type. Triton's own conversions of int8, and of float8 to bfloat16, are scalar
    and slow."""
    if numbers.dtype == gl.int8:
        if DTYPE == gl.float16:
            return int8_in_float16(numbers)
        else:
            return int8_in_bfloat16(numbers)
    elif DTYPE == gl.float16:
        return numbers.to(gl.float16)
    else:
        return float8_in_bfloat16(numbers)


# With its sign bit flipped, an int8 x is x + 128. As the low byte of 1024.0 in float16, or of 2^23 in float32, it is
# added to that, and one subtraction leaves x.


_PAIRS_ASM = "cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2; "


@constexpr_function
def _int8_in_float16_asm():
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


@constexpr_function
def _int8_in_bfloat16_asm():
    floats = "".join(
        f"prmt.b32 f{i}, t, 0x4B000000, {0x7540 + i:#x}; sub.rn.f32 f{i}, f{i}, 0f4B000080; " for i in range(4)
    )
    return f"{{ .reg .b32 t, f0, f1, f2, f3; xor.b32 t, $2, 0x80808080; {floats}{_PAIRS_ASM}}}"


@jit
def int8_in_bfloat16(numbers):
    """Returns int8 in bfloat16."""
    return gl.inline_asm_elementwise(
        _int8_in_bfloat16_asm(), "=r,=r,r", [numbers], dtype=gl.bfloat16, is_pure=True, pack=4
    )


@constexpr_function
def _float8_in_bfloat16_asm():
    halves = "".join(
        f"cvt.rn.f16x2.e4m3x2 h, {part}; mov.b32 {{x, y}}, h; cvt.f32.f16 f{i}, x; cvt.f32.f16 f{i + 1}, y; "
        for part, i in (("low", 0), ("high", 2))
    )
    names = ".reg .b16 low, high, x, y; .reg .b32 h, f0, f1, f2, f3; mov.b32 {low, high}, $2; "
    return f"{{ {names}{halves}{_PAIRS_ASM}}}"


@jit
def float8_in_bfloat16(numbers):
    """Returns float8_e4m3fn in bfloat16."""
    return gl.inline_asm_elementwise(
        _float8_in_bfloat16_asm(), "=r,=r,r", [numbers], dtype=gl.bfloat16, is_pure=True, pack=4
    )
