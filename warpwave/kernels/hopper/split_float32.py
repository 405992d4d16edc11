"""float32 by parts in the Hopper forward: products of operands that preceding launches have split.

    x = x0 + x1 (+ x2);   x y ~ x0 y0 + (x0 y1 + x1 y0) (+ x1 y1 + x0 y2 + x2 y0)

Two parts are float16; the operands are scaled by a power of two per head (prepass/scale_ahead.py). Three parts are
bfloat16, which needs no scale (prepass/split_ahead.py). A single part, scaled float16, uses the code of 16-bit types
(flash_fwd/consumer.py) and shares this file's handling of scales and of out.

Q, K and V arrive as tiles of parts, consecutive in a ring's stage; probabilities are split in their registers. The
small products and the product of the largest parts have separate accumulators, fresh for every tile, and plain float32
additions combine them. There are two reasons:

- A tensor core truncates what it accumulates, so a sum kept in it over all keys would be off by 1e-8 of itself per key.
- An infinity in float32 must not become NaN. The remainder of an Inf is NaN, which must not be added to the product
  that holds the float32 result (`number`).
"""

from warpwave.kernels.hopper.factors import in_range
from warpwave.kernels.hopper.parts import ROWS, accumulator_layout, like, matrix, unseen_zero, zero_accumulator
from warpwave.kernels.hopper.rows import store_accumulator
from warpwave.runtime.gluon_or_stub import constexpr_function, gl, jit, warpgroup_mma, warpgroup_mma_wait, with_fields

# Scales ---------------------------------------------------------------------------------------------------------------

# Probabilities reach 2^4 (softmax.LAG). With two parts they are multiplied by 2^11, which keeps their second parts, and
# the first parts of small ones, normal float16 numbers as far down as possible. A single part does not need this: its
# rounding error is larger.
LIFT = gl.constexpr(2048.0)


@constexpr_function
def is_float32(rules):
    """Returns whether out is float32, whatever the number of parts."""
    return rules.HEAD_DIM_V > 0


@constexpr_function
def is_scaled(rules):
    """Returns whether Q, K and V are scaled, in one or two parts of float16."""
    return rules.HEAD_DIM_V > 0 and rules.PARTS < 3


@jit
def scaled_rules(inverses_ptr, q_inverses_ptr, work, GROUP: gl.constexpr, num_heads, group_size, rules):
    """Returns the rules for 64 queries of one head; their scale also undoes the scales of Q and K."""
    tiles = gl.cdiv(work.seqlen_q, ROWS)
    tile = gl.minimum(work.tile * rules.GROUPS + GROUP, tiles - 1)
    if rules.IS_VARLEN:
        number = (work.q_begin // ROWS + work.batch + tile) * num_heads + work.head
    else:
        number = (work.batch * num_heads + work.head) * tiles + tile
    of_key = inverses_ptr + (work.batch * (num_heads // group_size) + work.head // group_size) * 2
    inverse = gl.load(q_inverses_ptr + number) * gl.load(of_key)
    return with_fields(rules, scale=in_range(rules.scale * inverse))


@jit
def inverse_of_values(inverses_ptr, work, num_heads, group_size, PARTS: gl.constexpr):
    """Returns the inverse scale of V and of probabilities."""
    # It directly follows the inverse of K, whose load fetched both.
    inverse = gl.load(inverses_ptr + (work.batch * (num_heads // group_size) + work.head // group_size) * 2 + 1)
    if PARTS == 2:
        inverse = inverse * (1.0 / LIFT)
    return inverse


@jit
def wait_for_launch_before(THREADS: gl.constexpr):
    """Waits until the preceding launch has ended and its writes are visible. This launch starts while that one runs
    (programmatic dependent launch), so barriers and maps are ready by then."""
    one = gl.full([THREADS], 0, gl.int32, gl.BlockedLayout([1], [32], [THREADS // 32], [0]))
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [one], dtype=gl.int32, is_pure=False, pack=1
    )


# Slices of the columns of V and out ----------------------------------------------------------------------------------


@constexpr_function
def slices(pieces):
    """Returns slices of a tile's pieces: (piece, first column within it, width, first column of the tile).

    They are as wide as registers allow: both sums of a slice's products coexist with the accumulator of all columns. If
    ptxas runs out of registers, it makes every single wgmma wait.
    """
    found, column = [], 0
    for i, piece in enumerate(pieces):
        width = piece.shape[-1]
        step = min(64, width)
        found += [(i, first, step, column + first) for first in range(0, width, step)]
        column += width
    return found


@constexpr_function
def num_slices(pieces):
    """Returns the number of slices."""
    return len(slices(pieces))


@constexpr_function
def slice_width(pieces, i):
    """Returns the columns of slice i."""
    return slices(pieces)[int(i)][2]


@constexpr_function
def slice_column(pieces, i):
    """Returns the first column of slice i within the tile."""
    return slices(pieces)[int(i)][3]


@jit
def zero_slices(v_ring):
    """Returns an accumulator of zeros for every slice of V's columns."""
    acc = ()
    for i in gl.static_range(num_slices(v_ring.pieces)):
        acc = acc + (zero_slice(v_ring, i),)
    return acc


@jit
def zero_slice(v_ring, i: gl.constexpr):
    """Returns an accumulator of zeros for slice i."""
    return zero_accumulator(slice_width(v_ring.pieces, i))


@jit
def values_slice(v_ring, tile, i: gl.constexpr):
    """Returns slice i of the columns of a tile of V in shared memory, [keys, width]."""
    place: gl.constexpr = slices(v_ring.pieces)[i]
    piece = matrix(v_ring.pieces[place[0]].index(tile))
    if piece.shape[1] > place[2]:
        piece = piece.slice(place[1], place[2], dim=1)
    return piece


# Products ------------------------------------------------------------------------------------------------------------


@jit
def number(x):
    """Returns x, with NaN replaced by float32's most negative number: adding that to Inf or NaN changes neither."""
    return gl.maximum(x, -3.4028234663852886e38)


@jit
def scaled(x, scale):
    """Returns x * scale, rounded, never as part of a fused multiply-add. A row's largest probability is then exactly 1,
    and if it outweighs all others, out equals its value bit for bit."""
    factor = gl.full(x.shape, scale, gl.float32, x.type.layout)
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=r,r,r", [x, factor], dtype=gl.float32, is_pure=True, pack=1
    )


@jit
def add_up(acc, alpha, large, small):
    """Returns acc * alpha + (large + number(small)), computed immediately. The compiler would defer it to the end of
    the tile and keep the products of all slices until then."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; max.f32 t, $4, 0fFF7FFFFF; add.rn.f32 t, t, $3; fma.rn.f32 $0, $1, $2, t; }",
        "=r,r,r,r,r",
        [acc, alpha, large, small],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@jit
def bfloat16_part(x):
    """Returns the bfloat16 nearest to x, 8 of its 24 bits, and the exact remainder of x. Inline PTX converts two at a
    time: the compiler would convert numbers that are used again as float32 one by one, at a quarter of the rate."""
    part = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )
    return part, x - part.to(gl.float32)


@jit
def half_part(x):
    """Returns the float16 nearest to x, 11 bits, and the exact remainder, by the same method."""
    part = gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
    )
    return part, x - part.to(gl.float32)


@jit
def split_operand(p, PARTS: gl.constexpr):
    """Returns the parts of probabilities as operands of the product with V, the largest first, in the same
    registers."""
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator_layout(64), k_width=2)
    if PARTS == 2:
        p = p * LIFT
    parts = ()
    for _ in gl.static_range(PARTS):
        if PARTS == 2:
            part, p = half_part(p)
        else:
            part, p = bfloat16_part(p)
        parts = parts + (gl.convert_layout(part, layout, assert_trivial=True),)
    return parts


@constexpr_function
def chunks(pieces, PARTS):
    """Returns the columns of a tile's pieces that are summed in one go: (piece, first column within it, width, group).

    With two parts a group is 128 columns: the truncation in longer tensor-core sums would exceed what the parts leave
    out. Three parts leave out less, and their longer sums were more accurate than those of torch's own kernel.
    """
    in_group = 128 if int(PARTS) == 2 else 256
    found, column = [], 0
    for i, piece in enumerate(pieces):
        width = piece.shape[-1]
        step = min(in_group, width)
        for first in range(0, width, step):
            found.append((i, first, step, column // in_group))
            column += step
    return found


@constexpr_function
def num_chunks(pieces, PARTS):
    """Returns the number of `chunks`."""
    return len(chunks(pieces, PARTS))


@constexpr_function
def group_of(pieces, PARTS, c):
    """Returns the group of chunk c."""
    return chunks(pieces, PARTS)[int(c)][3]


@constexpr_function
def begins_group(pieces, PARTS, c):
    """Returns whether chunk c is the first of its group."""
    return int(c) == 0 or chunks(pieces, PARTS)[int(c) - 1][3] != chunks(pieces, PARTS)[int(c)][3]


@constexpr_function
def num_groups(pieces, PARTS):
    """Returns the number of groups of `chunks`."""
    return chunks(pieces, PARTS)[-1][3] + 1


@jit
def columns_of(tile, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Returns WIDTH columns of a matrix in shared memory."""
    if tile.shape[1] > WIDTH:
        tile = tile.slice(FIRST, WIDTH, dim=1)
    return tile


@jit
def large_scores(q_tiles, own, k_ring, tile, sums, GROUP: gl.constexpr, PARTS: gl.constexpr):
    """Starts the products of the largest parts for one group of columns; they overwrite `sums`."""
    for c in gl.static_range(num_chunks(k_ring.pieces, PARTS)):
        if group_of(k_ring.pieces, PARTS, c) == GROUP:
            sums = large_chunk(q_tiles, own, k_ring, tile, sums, c, PARTS)
    return sums


@jit
def large_chunk(q_tiles, own, k_ring, tile, sums, c: gl.constexpr, PARTS: gl.constexpr):
    """Starts the same product for chunk c alone; the first chunk of a group begins a new sum."""
    chunk: gl.constexpr = chunks(k_ring.pieces, PARTS)[c]
    begins: gl.constexpr = begins_group(k_ring.pieces, PARTS, c)
    q = columns_of(matrix(q_tiles[chunk[0]].index(own)), chunk[1], chunk[2])
    k = columns_of(matrix(k_ring.pieces[chunk[0]].index(tile)), chunk[1], chunk[2]).permute((1, 0))
    return warpgroup_mma(q, k, sums, use_acc=not begins, is_async=True)


@jit
def split_scores(q_tiles, GROUP: gl.constexpr, k_ring, n, rules):
    """Returns Q K^T of tile n, [64, BLOCK_N]. The small products are summed first, from the smallest."""
    PARTS: gl.constexpr = rules.PARTS
    tile = n % k_ring.stages * PARTS + unseen_zero(n)
    own = GROUP * PARTS + unseen_zero(n)
    zero = zero_accumulator(rules.BLOCK_N)
    small = zero
    for s in gl.static_range(PARTS - 1):
        for a in gl.static_range(PARTS - s):
            for i in gl.static_range(len(k_ring.pieces)):
                k = matrix(k_ring.pieces[i].index(tile + (PARTS - 1 - s - a))).permute((1, 0))
                q = matrix(q_tiles[i].index(own + a))
                small = warpgroup_mma(q, k, small, use_acc=s + a + i > 0, is_async=True)
    large = large_scores(q_tiles, own, k_ring, tile, zero, 0, PARTS)
    small, large = warpgroup_mma_wait(0, deps=[small, large])
    scores = large + number(small)
    for group in gl.static_range(1, num_groups(k_ring.pieces, PARTS)):
        more = large_scores(q_tiles, own, k_ring, tile, zero, group, PARTS)
        scores = scores + warpgroup_mma_wait(0, deps=[more])
    return scores


@jit
def add_values(p, v_ring, n, acc, alpha, i: gl.constexpr, PARTS: gl.constexpr):
    """Returns acc * alpha + P V of tile n, for slice i of its columns."""
    tile = n % v_ring.stages * PARTS + unseen_zero(n)
    zero = zero_slice(v_ring, i)
    small = zero
    for s in gl.static_range(PARTS - 1):
        for a in gl.static_range(PARTS - s):
            v = values_slice(v_ring, tile + (PARTS - 1 - s - a), i)
            small = warpgroup_mma(p[a], v, small, use_acc=s + a > 0, is_async=True)
    large = warpgroup_mma(p[0], values_slice(v_ring, tile, i), zero, use_acc=False, is_async=True)
    small, large = warpgroup_mma_wait(0, deps=[small, large])
    return add_up(acc, like(alpha, acc), large, small)


@jit
def store_float32(out, v_ring, out_ptr, work, row_first, num_heads, rules):
    """Stores rows of out directly from the accumulators to a contiguous (..., rows, num_heads, HEAD_DIM_V). There is
    one accumulator per slice, or per piece with a single part. A quad of threads fills a sector of 32 bytes. This needs
    no shared memory, which the parts fill, and no tensor map."""
    row = work.q_begin + row_first
    if not rules.IS_VARLEN:
        row = work.batch.to(gl.int64) * work.seqlen_q + row_first
    for i in gl.static_range(len(out)):
        store_accumulator(
            out[i], out_ptr, row, work.seqlen_q - row_first, work.head, num_heads, rules.HEAD_DIM_V,
            out_column(v_ring.pieces, rules.PARTS, i), rules.HEADS,
        )  # fmt: skip


@constexpr_function
def out_column(pieces, PARTS, i):
    """Returns the first column of the i-th accumulator of out."""
    if int(PARTS) == 1:
        return sum(piece.shape[-1] for piece in list(pieces)[: int(i)])
    return slice_column(pieces, i)
