"""Products of 8-bit operands: V transposed on chip, probabilities as an operand, sums promoted to float32.

wgmma multiplies 8-bit operands only if both run along the summed axis in shared memory ("K-major"). K does. V, whose
rows are keys, is transposed after TMA has brought it: `transpose` reads 8 x 8 matrices of byte pairs transposed
(ldmatrix), separates the two bytes of each pair (prmt), and writes 8 x 8 matrices again (stmatrix). Per 16 KiB that is
32 of each of the two and 128 prmt, and no bank conflicts.

Two permutations make this cheap; each is undone for free.

    keys      Place 4 l + 2 h + e of 16 keys holds key 8 h + 2 l + e. A thread's four bytes of two matrices are then the
              four bytes that it writes, and a thread's probabilities, which it holds in wgmma's order of accumulators,
              are in wgmma's order of operands: `operand` moves no data.
    columns   Row 8 b + c of 16 transposed rows holds column 2 c + b. The rows of one written matrix are then adjacent.
              The columns of the output come in that order: `in_order` renames a thread's registers.

The tensor cores add 8-bit products with about 14 bits: a product smaller than 2^-13 of the sum is cut off. After 8,192
equal terms the sum would no longer grow. Each product with V therefore starts from zero, covers at most 128 keys and
is added to a float32 accumulator by ordinary instructions (`promoted`).
"""

from warpwave.kernels.hopper.parts import ROWS
from warpwave.kernels.hopper.serial import unseen_zero
from warpwave.runtime.gluon_or_stub import (
    aggregate,
    constexpr_function,
    gl,
    jit,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)

TRANSPOSING_WARPS = gl.constexpr(2)  # with the producer in one warpgroup
# Bytes of V that they have in registers, 64 a thread. Between two such parts of a tile they meet at a barrier.
BYTES_AT_ONCE = gl.constexpr(4096)


@aggregate
class TransposedRing:
    """A `Ring` of V transposed: pieces are [stages, columns, keys].

    Args:
        chunk: most columns of V in one product; its sums take half as many registers beside the accumulator.
    """

    pieces: gl.tuple
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr
    named: gl.constexpr  # 0: as in Ring
    chunk: gl.constexpr

    @constexpr_function
    def __init__(self, pieces, full, empty, stages, named, chunk):
        self.pieces = pieces
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)
        self.named = gl.constexpr(named)
        self.chunk = gl.constexpr(chunk)


@constexpr_function
def accumulator_layout(width):
    """Returns wgmma's layout of 64 rows of `width` float32 over a warpgroup, for 8-bit operands."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, int(width), 32])


@jit
def zero_accumulator(WIDTH: gl.constexpr):
    """Returns [64, WIDTH] of zeros."""
    return gl.zeros([ROWS, WIDTH], gl.float32, accumulator_layout(WIDTH))


@constexpr_function
def chunk_width(piece, chunk):
    """Returns the columns of one product with a piece of V."""
    return min(int(piece.shape[1]), int(chunk))


@constexpr_function
def chunks_of(pieces, chunk):
    """Returns (piece, first column, columns) of each product with a tile of V."""
    return [
        (i, first, chunk_width(piece, chunk))
        for i, piece in enumerate(pieces)
        for first in range(0, int(piece.shape[1]), chunk_width(piece, chunk))
    ]


@constexpr_function
def first_chunk(pieces, chunk, i):
    """Returns the number of the first chunk of piece i."""
    return [piece for piece, _, _ in chunks_of(pieces, chunk)].index(int(i))


# Transposition of V ---------------------------------------------------------------------------------------------------


@constexpr_function
def swizzle(row_bytes):
    """Returns the widest swizzle for rows of so many bytes."""
    return min(128, int(row_bytes))


@constexpr_function
def pairs_layout(keys, pairs, warps):
    """Returns the registers layout of ldmatrix for [keys, pairs of columns], transposed: a thread has two adjacent keys
    of a pair in one register and the keys 8 further in the next. Warps share the columns, then the keys."""
    more = [[0, bit] for bit in (8, 16, 32, 64) if bit < pairs] + [[bit, 0] for bit in (16, 32, 64) if bit < keys]
    of_warps = int(warps).bit_length() - 1
    split = len(more) - of_warps
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [8, 0], *more[:split]],
        lane_bases=[[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=more[split:],
        block_bases=[],
        shape=[int(keys), int(pairs)],
    )


@jit
def bytes_apart(pairs):
    """Returns the low and the high bytes of [keys, pairs], four keys of a thread at a time."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;",
        "=&r,=&r,r,r",
        [pairs],
        dtype=(gl.int8, gl.int8),
        is_pure=True,
        pack=4,
    )


@jit
def transpose(v, v_transposed, rows_used, CUT: gl.constexpr):
    """Writes a piece of V, [keys, columns] of bytes in shared memory, as [columns, keys], both permuted (module
    docstring). If CUT, rows from `rows_used` on become zeros."""
    keys: gl.constexpr = v.shape[0]
    columns: gl.constexpr = v.shape[1]
    many: gl.constexpr = min(keys, BYTES_AT_ONCE // columns)
    as_pairs: gl.constexpr = gl.NVMMASharedLayout(swizzle(columns), 16, 2)
    as_bytes: gl.constexpr = gl.NVMMASharedLayout(swizzle(keys), 8, 2)
    layout: gl.constexpr = pairs_layout(many, columns // 2, TRANSPOSING_WARPS)
    source = reinterpret(v, gl.int16, [keys, columns // 2], as_pairs)
    target = reinterpret(v_transposed, gl.int8, [columns, keys], as_bytes)
    for first in gl.static_range(0, keys, many):
        pairs = source.slice(first, many, dim=0).load(layout)
        if CUT:
            used = first + gl.arange(0, many, gl.SliceLayout(1, layout)) < rows_used
            pairs = gl.where(used[:, None], pairs, gl.zeros_like(pairs))
        low, high = bytes_apart(pairs)
        # [16 keys, h, l, e, 16 columns, c, b] -> [16 columns, b, c, 16 keys, l, h, e]
        both = gl.reshape(gl.join(low, high), [many // 16, 2, 4, 2, columns // 16, 8, 2])
        both = gl.reshape(gl.permute(both, [4, 6, 5, 0, 2, 1, 3]), [columns, many])
        target.slice(first, many, dim=1).store(both)


@jit
def transposed_tiles(v_maps, COUNT: gl.constexpr):
    """Allocates COUNT transposed tiles of V in shared memory: a tuple of pieces [COUNT, columns, keys]."""
    found = ()
    for i in gl.static_range(len(v_maps)):
        found = found + (transposed_tile(v_maps[i], COUNT),)
    return found


@jit
def transposed_tile(v_map, COUNT: gl.constexpr):
    """Allocates COUNT transposed pieces of V."""
    keys: gl.constexpr = v_map.block_type.shape[2]
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle(keys), 8, 2)
    return gl.allocate_shared_memory(v_map.dtype, [COUNT, v_map.block_type.shape[3], keys], layout)


@jit
def in_order(x):
    """Returns [64, columns] with the columns that `transpose` permuted in their own order."""
    x = gl.reshape(x, [ROWS, x.shape[1] // 16, 2, 4, 2])
    return gl.reshape(gl.permute(x, [0, 1, 3, 4, 2]), [ROWS, x.shape[1] * x.shape[2] * x.shape[3] * x.shape[4]])


# Products -------------------------------------------------------------------------------------------------------------


@jit
def to_e4m3(a, b, c, d):
    """Rounds four tensors to float8_e4m3, to nearest even and at most 448, and returns them as the bytes of one."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high}; }",
        "=r,r,r,r,r",
        [a, b, c, d],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@jit
def rounded(p, BLOCK_N: gl.constexpr):
    """Returns probabilities [64, BLOCK_N] in 8 bits, four in each of [64, BLOCK_N / 4], for keys in the order of
    `transpose`. Loops carry them so: single bytes would be unpacked and packed again."""
    p = gl.permute(gl.reshape(p, [ROWS, BLOCK_N // 16, 2, 4, 2]), [0, 1, 3, 2, 4])
    even, odd = gl.split(gl.reshape(p, [ROWS, BLOCK_N // 4, 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return to_e4m3(a, b, c, d)


@jit
def operand(p, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr):
    """Returns what `rounded` returned as the operand of a product of WIDTH columns, in the same registers."""
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator_layout(WIDTH), k_width=4)
    return gl.convert_layout(bytes_of_operand(p, BLOCK_N), layout, assert_trivial=True)


@jit
def bytes_of_operand(p, BLOCK_N: gl.constexpr):
    """Returns the bytes of [64, BLOCK_N / 4] words as float8_e4m3. LLVM knows that nothing moves."""
    low = gl.join(p.to(gl.int8), (p >> 8).to(gl.int8))
    high = gl.join((p >> 16).to(gl.int8), (p >> 24).to(gl.int8))
    p = gl.reshape(gl.permute(gl.join(low, high), [0, 1, 3, 2]), [ROWS, BLOCK_N])
    return p.to(gl.float8e4nv, bitcast=True)


@jit
def operands(p, vt_ring, BLOCK_N: gl.constexpr):
    """Returns `operand` for each width of a product, in the order of the pieces: an operand's layout names its
    product's, and registers are shared."""
    found = ()
    for i in gl.static_range(len(vt_ring.pieces)):
        found = found + (operand(p, BLOCK_N, chunk_width(vt_ring.pieces[i], vt_ring.chunk)),)
    return found


@jit
def value_product(p, vt_ring, n, CHUNK_INDEX: gl.constexpr):
    """Starts the product of probabilities and one chunk of tile n of V."""
    chunk: gl.constexpr = chunks_of(vt_ring.pieces, vt_ring.chunk)[CHUNK_INDEX]
    v = chunk_of_values(vt_ring, n, CHUNK_INDEX)
    return warpgroup_mma(p[chunk[0]], v, zero_accumulator(chunk[2]), use_acc=False, is_async=True)


@jit
def chunk_of_values(vt_ring, n, CHUNK_INDEX: gl.constexpr):
    """Returns a chunk of tile n of V, [keys, columns]."""
    chunk: gl.constexpr = chunks_of(vt_ring.pieces, vt_ring.chunk)[CHUNK_INDEX]
    return vt_ring.pieces[chunk[0]].index(n % vt_ring.stages).slice(chunk[1], chunk[2], dim=0).permute((1, 0))


@jit
def promoted(acc, product, factor, HAS_FACTOR: gl.constexpr):
    """Returns acc plus a product, in float32, times the factor of its values if they have one. Added here, and not
    where the compiler would like to: behind the last product it would keep every product of a tile in registers."""
    if HAS_FACTOR:
        factor = gl.full(product.shape, factor, gl.float32, product.type.layout)
        return gl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;", "=r,r,r,r", [product, factor, acc], dtype=gl.float32, is_pure=False, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "add.rn.f32 $0, $1, $2;", "=r,r,r", [product, acc], dtype=gl.float32, is_pure=False, pack=1
        )


@jit
def with_values(acc, pending, p, vt_ring, n, factor, HAS_FACTOR: gl.constexpr, FIRST: gl.constexpr, END: gl.constexpr):
    """Adds the products of tile n with chunks FIRST to END - 1 to their accumulators, one after another.

    A product takes the registers of the one before: as its accumulator, which it does not add. Otherwise ptxas starts
    it while half of the other is still to be added, and at head_dim 256 both do not fit.

    Args:
        pending: the product with chunk FIRST, under way.

    Returns:
        acc, and the product with chunk END, under way; the last one, finished, if there is no such chunk.
    """
    of: gl.constexpr = chunks_of(vt_ring.pieces, vt_ring.chunk)
    for c in gl.static_range(FIRST, END):
        product = warpgroup_mma_wait(0, deps=[pending])
        acc = replaced(acc, c, promoted(acc[c], product, factor, HAS_FACTOR))
        pending = product
        if c + 1 < len(of):
            if of[c + 1][2] == of[c][2]:
                v = chunk_of_values(vt_ring, n, c + 1)
                pending = warpgroup_mma(p[of[c + 1][0]], v, product, use_acc=unseen_zero(n) != 0, is_async=True)
            else:
                pending = value_product(p, vt_ring, n, c + 1)
    return acc, pending


@jit
def replaced(items, INDEX: gl.constexpr, item):
    """Returns a tuple with another item at INDEX."""
    found = ()
    for i in gl.static_range(len(items)):
        if i == INDEX:
            found = found + (item,)
        else:
            found = found + (items[i],)
    return found


@jit
def as_pieces(chunks, vt_ring):
    """Returns the accumulators of chunks as one [64, columns] for each piece of V, columns in order."""
    out = ()
    for i in gl.static_range(len(vt_ring.pieces)):
        out = out + (in_order(as_piece(chunks, vt_ring, i)),)
    return out


@jit
def as_piece(chunks, vt_ring, PIECE: gl.constexpr):
    """Returns the accumulators of one piece of V as one [64, columns]."""
    first: gl.constexpr = first_chunk(vt_ring.pieces, vt_ring.chunk, PIECE)
    many: gl.constexpr = vt_ring.pieces[PIECE].shape[1] // chunk_width(vt_ring.pieces[PIECE], vt_ring.chunk)
    if many == 1:
        return chunks[first]
    elif many == 2:
        return side_by_side(chunks[first], chunks[first + 1])
    else:
        left = side_by_side(chunks[first], chunks[first + 1])
        return side_by_side(left, side_by_side(chunks[first + 2], chunks[first + 3]))


@jit
def side_by_side(left, right):
    """Returns [64, 2 n] of two [64, n]."""
    both = gl.permute(gl.join(left, right), [0, 2, 1])
    return gl.reshape(both, [ROWS, left.shape[1] + right.shape[1]])
