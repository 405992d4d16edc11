"""Products of 8-bit operands: V transposed in memory, probabilities as an operand, sums promoted to float32.

wgmma multiplies 8-bit operands only if both run along the summed axis in shared memory ("K-major"). K does. A launch
before the attention writes V in this order, with the keys of every 16 permuted (prepass/transpose_values.py): a
thread's probabilities, which it holds in wgmma's order of accumulators, are then in wgmma's order of operands, and
`operand` moves no data.

The tensor cores add 8-bit products with about 14 bits: a product smaller than 2^-13 of the sum is cut off. After 8,192
equal terms the sum would no longer grow. Each product with V therefore starts from zero, covers at most 128 keys and
is added to a float32 accumulator by ordinary instructions (`promoted`).
"""

from warpwave.kernels.hopper.parts import ROWS, eight_bit_accumulator_layout, matrix, unseen_zero, wait_for
from warpwave.kernels.hopper.softmax import beside_columns
from warpwave.runtime.gluon_or_stub import constexpr_function, gl, jit, warpgroup_mma, warpgroup_mma_wait

AT_ONCE = gl.constexpr(128)  # columns of V whose products start together; wider tiles are multiplied by CHUNK columns
CHUNK = gl.constexpr(64)


@jit
def zero_accumulator(WIDTH: gl.constexpr):
    """Returns [64, WIDTH] of zeros."""
    return gl.zeros([ROWS, WIDTH], gl.float32, eight_bit_accumulator_layout(WIDTH))


@constexpr_function
def starts_together(pieces):
    """Returns whether the products with all columns of V start together: their sums then fit the registers beside the
    accumulator and the scores. `pieces` are those of V's ring, [stages, 1, 1, columns, keys]."""
    return sum(int(piece.shape[-2]) for piece in pieces) <= int(AT_ONCE)


@constexpr_function
def chunk_width(pieces, i):
    """Returns the columns of one product with piece i of V."""
    columns = int(pieces[int(i)].shape[-2])
    return columns if starts_together(pieces) else min(columns, int(CHUNK))


@constexpr_function
def chunks_of(pieces):
    """Returns (piece, first column, columns) of each product with a tile of V."""
    return [
        (i, first, chunk_width(pieces, i))
        for i, piece in enumerate(pieces)
        for first in range(0, int(piece.shape[-2]), chunk_width(pieces, i))
    ]


@constexpr_function
def first_chunk(pieces, i):
    """Returns the number of the first chunk of piece i."""
    return [piece for piece, _, _ in chunks_of(pieces)].index(int(i))


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
    """Returns probabilities [64, BLOCK_N] in 8 bits, four in each of [64, BLOCK_N / 4], for keys in the order of V
    transposed. Loops carry them in this form, because single bytes would be unpacked and packed again."""
    p = gl.permute(gl.reshape(p, [ROWS, BLOCK_N // 16, 2, 4, 2]), [0, 1, 3, 2, 4])
    even, odd = gl.split(gl.reshape(p, [ROWS, BLOCK_N // 4, 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return to_e4m3(a, b, c, d)


@jit
def operand(p, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr):
    """Returns what `rounded` returned as the operand of a product of WIDTH columns, in the same registers."""
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=eight_bit_accumulator_layout(WIDTH), k_width=4)
    return gl.convert_layout(bytes_of_operand(p, BLOCK_N), layout, assert_trivial=True)


@jit
def bytes_of_operand(p, BLOCK_N: gl.constexpr):
    """Returns the bytes of [64, BLOCK_N / 4] words as float8_e4m3. LLVM knows that nothing moves."""
    low = gl.join(p.to(gl.int8), (p >> 8).to(gl.int8))
    high = gl.join((p >> 16).to(gl.int8), (p >> 24).to(gl.int8))
    p = gl.reshape(gl.permute(gl.join(low, high), [0, 1, 3, 2]), [ROWS, BLOCK_N])
    return p.to(gl.float8e4nv, bitcast=True)


@jit
def operands(p, v_ring, BLOCK_N: gl.constexpr):
    """Returns `operand` for each width of a product, in the order of the pieces: an operand's layout names its
    product's, and registers are shared."""
    found = ()
    for i in gl.static_range(len(v_ring.pieces)):
        found = found + (operand(p, BLOCK_N, chunk_width(v_ring.pieces, i)),)
    return found


@jit
def value_product(p, v_ring, n, CHUNK_INDEX: gl.constexpr):
    """Starts the product of probabilities and one chunk of tile n of V."""
    chunk: gl.constexpr = chunks_of(v_ring.pieces)[CHUNK_INDEX]
    v = chunk_of_values(v_ring, n, CHUNK_INDEX)
    return warpgroup_mma(p[chunk[0]], v, zero_accumulator(chunk[2]), use_acc=False, is_async=True)


@jit
def value_products(p, v_ring, n):
    """Starts the products of probabilities and all chunks of tile n of V."""
    found = ()
    for c in gl.static_range(len(chunks_of(v_ring.pieces))):
        found = found + (value_product(p, v_ring, n, c),)
    return found


@jit
def chunk_of_values(v_ring, n, CHUNK_INDEX: gl.constexpr):
    """Returns a chunk of tile n of V, [keys, columns]."""
    chunk: gl.constexpr = chunks_of(v_ring.pieces)[CHUNK_INDEX]
    v = matrix(v_ring.pieces[chunk[0]].index(n % v_ring.stages))
    return v.slice(chunk[1], chunk[2], dim=0).permute((1, 0))


@jit
def promoted(acc, alpha, product, factor, HAS_FACTOR: gl.constexpr):
    """Returns acc times alpha, [64, 4], plus a product, in float32; the product times the factor of its values if they
    have one. Rescaling and adding are one instruction, which is kept here: the compiler would move it after the last
    product, and keep every product of a tile in registers."""
    return scaled_sum(acc, beside_columns(alpha, acc), product, factor, HAS_FACTOR)


@jit
def scaled_sum(acc, alpha, product, factor, HAS_FACTOR: gl.constexpr):
    """Returns acc * alpha + product, the product times its factor if HAS_FACTOR."""
    if HAS_FACTOR:
        factor = gl.full(product.shape, factor, gl.float32, product.type.layout)
        return gl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.rn.f32 t, $3, $4; fma.rn.f32 $0, $1, $2, t; }", "=r,r,r,r,r",
            [acc, alpha, product, factor], dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;", "=r,r,r,r", [acc, alpha, product], dtype=gl.float32, is_pure=False, pack=1
        )


@jit
def with_products(acc, alpha, products, factor, HAS_FACTOR: gl.constexpr):
    """Waits for the products of `value_products` and adds them to their accumulators times alpha."""
    products = wait_for(products)
    found = ()
    for c in gl.static_range(len(acc)):
        found = found + (promoted(acc[c], alpha, products[c], factor, HAS_FACTOR),)
    return found


@jit
def with_chunks(
    acc, alpha, pending, p, v_ring, n, factor, HAS_FACTOR: gl.constexpr, FIRST: gl.constexpr, END: gl.constexpr
):
    """Adds the products of tile n with chunks FIRST to END - 1 to their accumulators times alpha, one after another.

    Args:
        pending: the product with chunk FIRST, in flight.

    Returns:
        acc, and the product with chunk END, in flight; or the last product, finished, if there is no such chunk.
    """
    for c in gl.static_range(FIRST, END):
        product = warpgroup_mma_wait(0, deps=[pending])
        acc = replaced(acc, c, promoted(acc[c], alpha, product, factor, HAS_FACTOR))
        pending = product
        if c + 1 < len(chunks_of(v_ring.pieces)):
            pending = next_product(p, product, v_ring, n, c + 1)
    return acc, pending


@jit
def next_product(p, before, v_ring, n, CHUNK_INDEX: gl.constexpr):
    """Starts the product with a chunk of tile n of V in the registers of the previous chunk's product, which it takes
    as its accumulator and does not add. Otherwise ptxas starts it before the previous product is fully added, and at
    head_dim 256 both do not fit."""
    chunk: gl.constexpr = chunks_of(v_ring.pieces)[CHUNK_INDEX]
    if chunk[2] == before.shape[1]:
        v = chunk_of_values(v_ring, n, CHUNK_INDEX)
        return warpgroup_mma(p[chunk[0]], v, before, use_acc=unseen_zero(n) != 0, is_async=True)
    else:
        return value_product(p, v_ring, n, CHUNK_INDEX)


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
def as_pieces(chunks, v_ring):
    """Returns the accumulators of chunks as one [64, columns] for each piece of V."""
    out = ()
    for i in gl.static_range(len(v_ring.pieces)):
        out = out + (as_piece(chunks, v_ring, i),)
    return out


@jit
def as_piece(chunks, v_ring, PIECE: gl.constexpr):
    """Returns the accumulators of one piece of V as one [64, columns]."""
    first: gl.constexpr = first_chunk(v_ring.pieces, PIECE)
    many: gl.constexpr = v_ring.pieces[PIECE].shape[-2] // chunk_width(v_ring.pieces, PIECE)
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
