"""Building blocks of Hopper kernels: rings of tiles, exponentials, the lazy rescale.

A producer fills a ring by TMA, and consumers empty it by wgmma. A ring has `stages` tiles. Each tile has a barrier that
signals its arrival and one that signals that it may be overwritten. Tile `n` of a ring, counted over the whole launch,
is in stage `n % stages`, and the phase of its barriers is the parity of `n // stages`.

A tile is as wide as head_dim, but shared-memory layouts and wgmma need powers of two. A tile is therefore a tuple of
pieces: 80 columns are 64 + 16. Products over head_dim sum over the pieces; products whose result has that width give
one result per piece.
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

import math

from warpwave.runtime.gluon_or_stub import (
    aggregate,
    constexpr_function,
    gl,
    jit,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # rows of a consumer warpgroup: the rows of one wgmma
# Sums of int8 products start here, in int32: the bits of a sum s are then those of the float32 1.5 * 2^23 + s, and no
# conversion is needed. |s| is at most 2^22: 256 columns.
OFFSET_OF_INT8 = gl.constexpr(0x4B400000)
# Bounds of a scale that includes factors of the operands: a scale of 0 times a score of -inf, and an infinite scale
# times a score of 0, are NaN.
SMALLEST_SCALE = gl.constexpr(2.0**-126)
LARGEST_SCALE = gl.constexpr(2.0**100)


@aggregate
class Ring:
    """`stages` tiles in shared memory, each a tuple of pieces [stages, 1, 1, rows, width], and their barriers."""

    pieces: gl.tuple
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr
    parts: gl.constexpr  # parts of a float32 tile, consecutive in its stage; 1 for 16-bit types


@constexpr_function
def shape_of_tiles(tensor_map, count, rows):
    """Returns the shape of `count` tiles of a map's block, or of `rows` rows if that is not 0."""
    block = [int(size) for size in tensor_map.block_type.shape]
    return [int(count), *block[:-2], int(rows) or block[-2], block[-1]]


@jit
def buffers(maps, COUNT: gl.constexpr, ROWS_OF_TILE: gl.constexpr = 0):
    """Allocates COUNT tiles in shared memory in the maps' layouts: a tuple of pieces. Several copies by the maps may
    fill a tile of ROWS_OF_TILE rows."""
    pieces = ()
    for i in gl.static_range(len(maps)):
        pieces = pieces + (
            gl.allocate_shared_memory(maps[i].dtype, shape_of_tiles(maps[i], COUNT, ROWS_OF_TILE), maps[i].layout),
        )
    return pieces


@jit
def wide_buffers(maps, DTYPE: gl.constexpr, COUNT: gl.constexpr, ROWS_OF_TILE: gl.constexpr):
    """Allocates tiles as `buffers` does, of a dtype of 16 bits instead of that of the maps."""
    pieces = ()
    for i in gl.static_range(len(maps)):
        pieces = pieces + (
            gl.allocate_shared_memory(DTYPE, shape_of_tiles(maps[i], COUNT, ROWS_OF_TILE), sixteen_bit_layout(maps[i])),
        )
    return pieces


@constexpr_function
def sixteen_bit_layout(tensor_map):
    """Returns the layout that wgmma reads of 16-bit tiles as wide as a map's block."""
    width = int(tensor_map.block_type.shape[-1])
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * width), element_bitwidth=16, rank=4)


@jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocates COUNT barriers, of ARRIVALS each. `fence_async_shared` must follow before TMA arrives at one.

    A barrier that nothing uses must not be allocated: its memory is reused as scratch while it still holds a barrier's
    bits, which once made the first tile of 5 % of launches garbage.
    """
    allocated = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(allocated.index(i), count=ARRIVALS)
    return allocated


@constexpr_function
def is_a(value, name):
    """Returns whether a value is the aggregate that has a field of that name."""
    # Triton's tuple has `values`. Triton 3.6 raises on hasattr for a name that a tuple has not.
    return not hasattr(value, "values") and hasattr(value, name)


@jit
def present(first, second, third):
    """Returns the pieces that are present."""
    if first is None:
        return ()
    elif second is None:
        return (first,)
    elif third is None:
        return (first, second)
    else:
        return (first, second, third)


@jit
def ring_of(
    pieces, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, PARTS: gl.constexpr = 1, ARRIVALS: gl.constexpr = 1
):  # fmt: skip
    """Returns a ring of allocated pieces: a tile is complete after ARRIVALS, and `CONSUMERS` hand it back."""
    return Ring(pieces, barriers(STAGES, ARRIVALS), barriers(STAGES, CONSUMERS), STAGES, PARTS)


@jit
def make_room(ring, n, BYTES: gl.constexpr):
    """Waits until the stage of tile n is free, and sets the number of bytes that its barrier waits for."""
    stage = n % ring.stages
    mbarrier.wait(ring.empty.index(stage), ((n // ring.stages) & 1) ^ 1)
    mbarrier.expect(ring.full.index(stage), BYTES)


@jit
def load_tile(ring, maps, n, batch, head, row, MORE: gl.constexpr = 0):
    """Loads tile n of the ring by TMA as soon as its stage is free. Elements outside the tensor are zeros. Parts are
    heads of the tensor; those of one head are adjacent. The tile's barrier also waits for MORE bytes."""
    make_room(ring, n, tile_bytes(maps) * ring.parts + MORE)
    stage = n % ring.stages
    for part in gl.static_range(ring.parts):
        for i in gl.static_range(len(maps)):
            place = [batch, head * ring.parts + part, row, first_column(maps, i)]
            tma_load(maps[i], place, ring.full.index(stage), ring.pieces[i].index(stage * ring.parts + part))


@jit
def wait_full(ring, n):
    """Waits until tile n has arrived."""
    mbarrier.wait(ring.full.index(n % ring.stages), (n // ring.stages) & 1)


@jit
def hand_back(ring, n):
    """Hands tile n back; called by a consumer.

    One thread executes mbarrier.arrive, so the compiler inserts a group-wide barrier before it and another before the
    next use of shared memory. If only wgmma read the tile, `hand_back_multiplied` needs neither.
    """
    mbarrier.arrive(ring.empty.index(n % ring.stages), count=1)


@jit
def hand_back_multiplied(ring, n):
    """Hands back a tile that only wgmma has read, after the wait for its products.

    The products belong to the whole group, so one thread can arrive for all, without a barrier: of four group-wide
    barriers per tile, one remains. Alone this is worth 0 to 1 % (head_dim 64); the gains of softmax.py's steps were
    measured with it.
    """
    arrive_alone(ring.empty.index(n % ring.stages))


@jit
def arrive_alone(barrier):
    """Arrives with one thread, without a group-wide barrier before or after it."""
    mbarrier.expect(barrier, 0)


@jit
def skip(k_ring, v_ring, n, count):
    """Hands back, unread, the tiles that other groups of the block see and this one does not."""
    for _ in range(count):
        wait_full(k_ring, n)
        hand_back(k_ring, n)
        wait_full(v_ring, n)
        hand_back(v_ring, n)
        n += 1
    return n


@constexpr_function
def tile_bytes(maps):
    """Returns the bytes of a tile, all pieces together: the amount its barrier waits for."""
    return sum(m.block_type.nbytes for m in maps)


@constexpr_function
def first_column(maps, i):
    """Returns the column of the tensor at which piece i starts."""
    return sum(m.block_type.shape[-1] for m in list(maps)[: int(i)])


# Products -------------------------------------------------------------------------------------------------------------


@constexpr_function
def accumulator_layout(width):
    """Returns wgmma's layout of 64 rows of `width` float32 over a warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, int(width), 16])


@jit
def halves_of(x):
    """Returns the two halves of an accumulator's columns, which moves no data."""
    WIDTH: gl.constexpr = x.shape[1] // 2
    a, b = gl.split(gl.permute(gl.reshape(x, [ROWS, 2, WIDTH]), (0, 2, 1)))
    layout: gl.constexpr = accumulator_layout(WIDTH)
    return gl.convert_layout(a, layout, assert_trivial=True), gl.convert_layout(b, layout, assert_trivial=True)


@jit
def columns_apart(x):
    """Returns the columns of an accumulator as two terms that broadcast against it: a constant of each register, and a
    number of each thread. Compared as they are, columns take a register or a word of local memory each."""
    columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    of_thread = columns & 6  # four threads share 8 columns
    return columns - of_thread, of_thread


@jit
def like(per_row, x):
    """Returns [64] as a column in the layout of the accumulator x."""
    return gl.convert_layout(per_row, gl.SliceLayout(1, x.type.layout))[:, None]


@constexpr_function
def rows_of(piece):
    """Returns the rows of a tile as TMA copies it."""
    return math.prod(int(size) for size in piece.shape[:-1])


@jit
def matrix(piece):
    """Returns TMA's [..., rows, width] as a matrix."""
    return piece.reshape([rows_of(piece), piece.shape[-1]])


@jit
def scores_async(q, k_ring, n, zero):
    """Starts Q K^T of tile n, [64, rows], one wgmma group for each piece of head_dim. `zero` gives shape and layout;
    int32 sums are added to it."""
    stage = n % k_ring.stages
    scores = zero
    for i in gl.static_range(len(k_ring.pieces)):
        k = matrix(k_ring.pieces[i].index(stage)).permute((1, 0))
        scores = warpgroup_mma(q[i], k, scores, use_acc=i > 0 or zero.dtype == gl.int32, is_async=True)
    return scores


@jit
def values_async(p, v_ring, n, acc):
    """Starts acc + P V of tile n: one accumulator and one wgmma group for each piece of head_dim_v."""
    stage = n % v_ring.stages
    out = ()
    for i in gl.static_range(len(v_ring.pieces)):
        out = out + (warpgroup_mma(p, matrix(v_ring.pieces[i].index(stage)), acc[i], is_async=True),)
    return out


@jit
def wait_for(pending, AFTER: gl.constexpr = 0):
    """Waits for all products in flight but the last AFTER, and returns the accumulators of the pending ones."""
    if len(pending) == 1:
        acc = (warpgroup_mma_wait(AFTER, deps=[pending[0]]),)
    elif len(pending) == 2:
        acc = warpgroup_mma_wait(AFTER, deps=[pending[0], pending[1]])
    else:
        acc = warpgroup_mma_wait(AFTER, deps=[pending[0], pending[1], pending[2]])
    return acc


@jit
def operand(p, v_ring):
    """Returns probabilities as the operand of the product with V: rounded, in the same registers."""
    layout: gl.constexpr = gl.DotOperandLayout(
        operand_index=0, parent=accumulator_layout(v_ring.pieces[0].shape[-1]), k_width=2
    )
    return gl.convert_layout(p.to(v_ring.pieces[0].dtype), layout, assert_trivial=True)


@jit
def unseen_zero(n):
    """Returns 0 in a form the compiler cannot fold.

    wgmma takes two registers for each 16 columns of a tile in shared memory. For a tile at a fixed address, such as Q
    of the forward, the compiler would compute them once before the loop and keep them, in local memory if there are
    many. A load from local memory waits behind the products that are being issued.
    """
    return n >> 30


@constexpr_function
def eight_bit_accumulator_layout(width):
    """Returns wgmma's layout of 64 rows of `width` float32 or int32, for 8-bit operands: element by element that of
    16-bit operands."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, int(width), 32])


@constexpr_function
def is_float8(pieces):
    """Returns whether a tile holds float8."""
    return str(pieces[0].dtype).startswith("fp8")


@jit
def zero_scores(k_ring, BLOCK_N: gl.constexpr):
    """Returns what the products of queries and keys are added to: zeros, or OFFSET_OF_INT8 in int32 for int8
    operands."""
    if k_ring.pieces[0].dtype == gl.int8:
        return gl.full([ROWS, BLOCK_N], OFFSET_OF_INT8, gl.int32, eight_bit_accumulator_layout(BLOCK_N))
    elif is_float8(k_ring.pieces):
        return gl.zeros([ROWS, BLOCK_N], gl.float32, eight_bit_accumulator_layout(BLOCK_N))
    else:
        return zero_accumulator(BLOCK_N)


@jit
def finished_scores(scores, AFTER: gl.constexpr):
    """Waits for all products in flight but the last AFTER, and returns scores in the layout of 16-bit operands."""
    x = warpgroup_mma_wait(AFTER, deps=[scores])
    return gl.convert_layout(x, accumulator_layout(x.shape[1]), assert_trivial=True)


@jit
def zero_accumulator(WIDTH: gl.constexpr):
    """Returns [64, WIDTH] of zeros."""
    return gl.zeros([ROWS, WIDTH], gl.float32, accumulator_layout(WIDTH))


# Inline PTX -----------------------------------------------------------------------------------------------------------


@jit
def exp2(x):
    """Returns 2^x in one instruction. The library's exp2 also scales subnormal results, which softmax does not need."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@jit
def lg2(x):
    """Returns log2(x) in one instruction, within 2^-22 for x from 1/2 to 2 and within 2^-22 of the result elsewhere."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@jit
def multiply_add(x, factor, y, MULTIPLY: gl.constexpr):
    """Returns x * factor + y, always with a single rounding; x + y if not MULTIPLY."""
    if MULTIPLY:
        x, y = gl.broadcast(x, y)
        return gl.fma(x, gl.full(x.shape, factor, gl.float32, x.type.layout), y)
    else:
        return x + y


@constexpr_function
def _tanh_asm(n):
    # tanh(x) / x in powers of x^2, the highest first, fitted for |x| <= 1: with float32 arithmetic within a relative
    # 2^-22. In decimals 0.00104102, -0.00620338, 0.02028998, -0.05345703, 0.13325204, -0.33332839, 0.99999995.
    highest = "0f3A8872EC"
    series = ("0fBBCB45B7", "0f3CA6372C", "0fBD5AF5C2", "0f3E087339", "0fBEAAAA05", "0f3F7FFFFF")
    one, minus_two_in_bits = "0f3F800000", "0fC038AA3B"  # -2 / ln(2)
    lines = [".reg .pred far, any_far", ".reg .f32 size, z, w", f"abs.f32 size, ${n}"]
    for i in range(n + 1, 2 * n):
        lines += [f"abs.f32 z, ${i}", "max.f32 size, size, z"]
    lines += [f"setp.gt.f32 any_far, size, {one}", "vote.sync.any.pred any_far, any_far, 0xffffffff"]
    for i in range(n):
        lines += [f"mul.f32 z, ${n + i}, ${n + i}", f"mov.f32 w, {highest}"]
        lines += [f"fma.rn.f32 w, w, z, {x}" for x in series]
        lines += [f"mul.f32 ${i}, w, ${n + i}"]
    lines += ["@!any_far bra NEAR"]
    for i in range(n):
        lines += [f"abs.f32 size, ${n + i}", f"setp.gt.f32 far, size, {one}"]
        lines += [f"mul.f32 z, size, {minus_two_in_bits}", "ex2.approx.ftz.f32 z, z"]
        lines += [f"add.f32 w, z, {one}", "rcp.approx.ftz.f32 w, w", f"sub.f32 z, {one}, z"]
        lines += ["mul.f32 z, z, w", f"copysign.f32 z, ${n + i}, z", f"selp.f32 ${i}, z, ${i}, far"]
    return "{ " + "; ".join(lines) + "; NEAR: }"


@constexpr_function
def _tanh_constraints(n):
    return ",".join(["=&f"] * n + ["f"] * n)  # a result is written before the last number is read


@jit
def tanh(x):
    """Computes tanh within a relative 2^-22, for numbers of at most 1 by a polynomial, for others by exponentials; a
    warp skips the latter if it has none in its next eight.

    Scores are seldom larger than the softcap, and two instructions of the unit that makes exponentials would cost as
    much as 16 multiplications.
    """
    each: gl.constexpr = min(8, x.shape[0] * x.shape[1] // 128)
    return gl.inline_asm_elementwise(
        _tanh_asm(each),
        _tanh_constraints(each),
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=each,
    )


@constexpr_function
def _tanh_of_tile_asm(n):
    # tanh(x) / x in powers of x^2, the highest first, fitted for |x| <= 1/2: within a relative 5.5e-7. In decimals
    # -0.04440223, 0.13190297, -0.33326318, 0.99999946. Larger ones are 1 - 2 / (1 + 2^(2 x / ln(2))).
    highest, *series = "0fBD35DF1C", "0f3E071192", "0fBEAAA179", "0f3F7FFFF7"
    half, one, minus_two, two_in_bits = "0f3F000000", "0f3F800000", "0fC0000000", "0f4038AA3B"

    def near(i):
        lines = [f"mul.rn.f32 z, ${i}, ${i}", f"fma.rn.f32 w, z, {highest}, {series[0]}"]
        return lines + [f"fma.rn.f32 w, w, z, {x}" for x in series[1:]]

    lines = [".reg .pred far", ".reg .f32 size, other, w, z", "abs.f32 size, $0", "abs.f32 other, $1"]
    for i in range(2, n):
        name = "other" if i % 2 else "size"
        lines += [f"abs.f32 z, ${i}", f"max.f32 {name}, {name}, z"]
    lines += ["max.f32 size, size, other", f"setp.gt.f32 far, size, {half}"]
    lines += ["vote.sync.any.pred far, far, 0xffffffff", "@far bra FAR"]
    for i in range(n):
        lines += [*near(i), f"mul.rn.f32 ${i}, w, ${i}"]
    lines += ["bra DONE"]
    for i in range(n):
        first, *rest = near(i)
        lines += [f"{'FAR: ' if i == 0 else ''}{first}", *rest, f"mul.rn.f32 w, w, ${i}"]
        lines += [f"mul.rn.f32 z, ${i}, {two_in_bits}", "ex2.approx.ftz.f32 z, z", f"add.rn.f32 z, z, {one}"]
        lines += ["rcp.approx.ftz.f32 z, z", f"fma.rn.f32 z, z, {minus_two}, {one}"]
        lines += [f"abs.f32 size, ${i}", f"setp.gt.f32 far, size, {half}", f"selp.f32 ${i}, z, w, far"]
    return "{ " + "; ".join(lines) + "; DONE: }"


@constexpr_function
def _tied_constraints(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)])


@jit
def tanh_of_tile(x):
    """Computes tanh of a tile of scores for products of 16 bits, within a relative 7e-7: by a polynomial up to 1/2, by
    exponentials above. A warp skips the exponentials if it has no such argument in the tile.

    One branch a tile keeps the loop over keys short. Which form a number takes depends on that number alone, so a
    result does not depend on hidden keys or on other rows. float32 in several parts and gradients need `tanh`.
    """
    each: gl.constexpr = x.shape[0] * x.shape[1] // 128
    return gl.inline_asm_elementwise(
        _tanh_of_tile_asm(each), _tied_constraints(each), [x], dtype=gl.float32, is_pure=False, pack=each
    )


@constexpr_function
def _rescale_asm(n):
    # A thread holds two rows of an accumulator, alternating every two columns: factors 0 and 2 belong to the two rows.
    multiplies = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return (
        f"{{ .reg .pred p; setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p; "
        f"vote.sync.any.pred p, p, 0xffffffff; @!p bra SKIP; {multiplies} SKIP: }}"
    )


@constexpr_function
def _rescale_constraints(n):
    return ",".join(["=r"] * n + [str(i) for i in range(n)] + ["r"] * n)


@jit
def rescale(acc, alpha):
    """Returns acc [64, width] times alpha [64, 1]; a warp skips the multiplication if all factors of its rows are 1.

    The maximum of a row settles after a few tiles, so nearly every tile is skipped. At head_dim 256 that saves 128 of
    410 instructions per tile (measured: +5 to +8 % there, +2 to +4 % at 128).
    """
    each: gl.constexpr = acc.shape[1] // 2
    return gl.inline_asm_elementwise(
        _rescale_asm(each),
        _rescale_constraints(each),
        [acc, alpha],
        dtype=gl.float32,
        is_pure=False,
        pack=each,
    )
