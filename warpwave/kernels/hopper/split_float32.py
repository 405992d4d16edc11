"""float32 by parts in the Hopper forward: products of operands that launches before have split.

    x = x0 + x1 (+ x2);   x y ~ x0 y0 + (x0 y1 + x1 y0) (+ x1 y1 + x0 y2 + x2 y0)

Two parts are float16, of operands that are scaled by a power of two for each head (prepass/scale_ahead.py); three
are bfloat16, which need no scale (prepass/split_ahead.py). A single part, scaled float16, takes the way of 16-bit types
(flash_fwd/roles.py), and shares with the others what is here of scales and of out.

Q, K and V come as tiles of parts, one behind another in a ring's stage; probabilities are split in the registers they
are in. Of every product the small ones and the one of the largest parts have an accumulator each, fresh for every tile,
which plain float32 additions bring together: a tensor core cuts off what it accumulates, so a sum that stayed in it
over all keys would end 1e-8 of itself off for each of them; and what float32 makes infinite must not become NaN, which
it would where the remainder of an Inf, NaN, is added to the product that says what float32 would (`number`).

One tile comes after another, nothing of a group overlaps: a tile's products take so much longer than its softmax that
the other group's products hide it. Probabilities and values are multiplied in slices of the columns, for registers.
"""

from warpwave.kernels.hopper.parts import ROWS, accumulator_layout, hand_back, like, matrix, wait_full, zero_accumulator
from warpwave.kernels.hopper.rows import zero_values
from warpwave.kernels.hopper.serial import unseen_zero
from warpwave.kernels.hopper.softmax import in_bits, new_maximum, partial_sums, probabilities
from warpwave.kernels.hopper.visible import Rules
from warpwave.runtime.gluon_or_stub import constexpr_function, gl, jit, warpgroup_mma, warpgroup_mma_wait

# Scales ---------------------------------------------------------------------------------------------------------------

# Probabilities reach 2^4 (softmax.LAG). In two parts they are multiplied by 2^11, so that their second parts, and small
# ones' first, are float16's normal numbers as far down as may be. A single part is rounded by more than that costs.
LIFT = gl.constexpr(2048.0)


@constexpr_function
def is_float32(rules):
    """Whether out is float32, by however many parts."""
    return rules.HEAD_DIM_V > 0


@constexpr_function
def is_scaled(rules):
    """Whether Q, K and V are scaled, in one or two parts of float16."""
    return rules.HEAD_DIM_V > 0 and rules.PARTS < 3


@jit
def scaled_rules(inverses_ptr, q_inverses_ptr, work, GROUP: gl.constexpr, num_heads, group_size, rules):
    """The rules for 64 queries of one head: their scale also undoes those of Q and K."""
    tiles = gl.cdiv(work.seqlen_q, ROWS)
    tile = gl.minimum(work.tile * rules.GROUPS + GROUP, tiles - 1)
    if rules.IS_VARLEN:
        number = (work.q_begin // ROWS + work.batch + tile) * num_heads + work.head
    else:
        number = (work.batch * num_heads + work.head) * tiles + tile
    of_key = inverses_ptr + (work.batch * (num_heads // group_size) + work.head // group_size) * 2
    inverse = gl.load(q_inverses_ptr + number) * gl.load(of_key)
    # Where scores are beyond float32 anyway the factor need not be: 0 times Inf would make NaN of a score of 0.
    scale = rules.scale * gl.minimum(gl.maximum(inverse, 1.1754943508222875e-38), 1.2676506002282294e30)
    return Rules(
        scale, rules.softcap_log2, rules.window_left, rules.window_right, rules.GROUPS, rules.BLOCK_N, rules.HAS_LOW,
        rules.HAS_HIGH, rules.TOP_LEFT, rules.HAS_ALIBI, rules.HAS_SOFTCAP, rules.HAS_SINKS, rules.IS_VARLEN,
        rules.WRITE_LSE, rules.OWN_OUT, rules.VALUES_FIRST, rules.PARTS, rules.HEAD_DIM_V,
    )  # fmt: skip


@jit
def inverse_of_values(inverses_ptr, work, num_heads, group_size, PARTS: gl.constexpr):
    """What undoes the scale of V, and of probabilities."""
    # Right behind that of K, whose load brought both.
    inverse = gl.load(inverses_ptr + (work.batch * (num_heads // group_size) + work.head // group_size) * 2 + 1)
    if PARTS == 2:
        inverse = inverse * (1.0 / LIFT)
    return inverse


@jit
def wait_for_launch_before(THREADS: gl.constexpr):
    """Until the launch before has ended and what it wrote is there: this one begins while that one runs (programmatic
    dependent launch), so that barriers and maps are ready by then."""
    one = gl.full([THREADS], 0, gl.int32, gl.BlockedLayout([1], [32], [THREADS // 32], [0]))
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [one], dtype=gl.int32, is_pure=False, pack=1
    )


# Slices of the columns of V and out ----------------------------------------------------------------------------------


@constexpr_function
def slices(pieces):
    """Of a tile's pieces, by width: (piece, first column within it, width, first column of the tile).

    As wide as registers allow: both sums of a slice's products are kept beside the accumulator of all columns. Where
    ptxas runs out of them, it waits for every single wgmma, everywhere.
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
    """How many slices there are."""
    return len(slices(pieces))


@constexpr_function
def slice_width(pieces, i):
    """Columns of slice i."""
    return slices(pieces)[int(i)][2]


@constexpr_function
def slice_column(pieces, i):
    """First column of slice i within the tile."""
    return slices(pieces)[int(i)][3]


@jit
def zero_slices(v_ring):
    """An accumulator of zeros for every slice of V's columns."""
    acc = ()
    for i in gl.static_range(num_slices(v_ring.pieces)):
        acc = acc + (zero_slice(v_ring, i),)
    return acc


@jit
def zero_slice(v_ring, i: gl.constexpr):
    """Of slice i, an accumulator of zeros."""
    return zero_accumulator(slice_width(v_ring.pieces, i))


@jit
def values_slice(v_ring, tile, i: gl.constexpr):
    """Slice i of the columns of a tile of V in shared memory, [keys, width]."""
    place: gl.constexpr = slices(v_ring.pieces)[i]
    piece = matrix(v_ring.pieces[place[0]].index(tile))
    if piece.shape[1] > place[2]:
        piece = piece.slice(place[1], place[2], dim=1)
    return piece


# Products ------------------------------------------------------------------------------------------------------------


@jit
def number(x):
    """x, and float32's most negative number for NaN: to add it to Inf or NaN changes neither."""
    return gl.maximum(x, -3.4028234663852886e38)


@jit
def scaled(x, scale):
    """x * scale, rounded, and not part of a fused multiply-add: a row's largest probability is exactly 1, and where it
    outweighs all others, out is its value to the bit."""
    factor = gl.full(x.shape, scale, gl.float32, x.type.layout)
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=r,r,r", [x, factor], dtype=gl.float32, is_pure=True, pack=1
    )


@jit
def add_up(acc, alpha, large, small):
    """acc * alpha + (large + number(small)), here and now: the compiler would put it off to the end of the tile, where
    all slices' products would have to be kept till then."""
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
    """The bfloat16 nearest to x, 8 of its 24 bits, and what it leaves of x, exactly. Two at a time by inline PTX: the
    compiler would convert numbers that are met again as float32 singly, at a quarter of the rate."""
    part = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )
    return part, x - part.to(gl.float32)


@jit
def half_part(x):
    """The same with the float16 nearest to x, 11 bits."""
    part = gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
    )
    return part, x - part.to(gl.float32)


@jit
def split_operand(p, PARTS: gl.constexpr):
    """Probabilities as products with V take them: their parts, the largest first, in the registers they are in."""
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
    """Of a tile's pieces, the columns that are summed in one go: (piece, first column within it, width, group). Of two
    parts a group is 128 columns: what a tensor core cuts off of longer sums would be more than what the parts leave
    out. Three parts leave out less, and their longer sums were closer than those of torch's own kernel."""
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
    """How many `chunks` there are."""
    return len(chunks(pieces, PARTS))


@constexpr_function
def group_of(pieces, PARTS, c):
    """The group of chunk c."""
    return chunks(pieces, PARTS)[int(c)][3]


@constexpr_function
def begins_group(pieces, PARTS, c):
    """Whether chunk c is the first of its group."""
    return int(c) == 0 or chunks(pieces, PARTS)[int(c) - 1][3] != chunks(pieces, PARTS)[int(c)][3]


@constexpr_function
def num_groups(pieces, PARTS):
    """How many groups of `chunks` there are."""
    return chunks(pieces, PARTS)[-1][3] + 1


@jit
def columns_of(tile, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """WIDTH columns of a matrix in shared memory."""
    if tile.shape[1] > WIDTH:
        tile = tile.slice(FIRST, WIDTH, dim=1)
    return tile


@jit
def large_scores(q_tiles, own, k_ring, tile, sums, GROUP: gl.constexpr, PARTS: gl.constexpr):
    """Products of the largest parts, one group of columns, in `sums`, whatever that held; under way."""
    for c in gl.static_range(num_chunks(k_ring.pieces, PARTS)):
        if group_of(k_ring.pieces, PARTS, c) == GROUP:
            sums = large_chunk(q_tiles, own, k_ring, tile, sums, c, PARTS)
    return sums


@jit
def large_chunk(q_tiles, own, k_ring, tile, sums, c: gl.constexpr, PARTS: gl.constexpr):
    """The same of chunk c alone, which begins a sum where it is the first of its group."""
    chunk: gl.constexpr = chunks(k_ring.pieces, PARTS)[c]
    begins: gl.constexpr = begins_group(k_ring.pieces, PARTS, c)
    q = columns_of(matrix(q_tiles[chunk[0]].index(own)), chunk[1], chunk[2])
    k = columns_of(matrix(k_ring.pieces[chunk[0]].index(tile)), chunk[1], chunk[2]).permute((1, 0))
    return warpgroup_mma(q, k, sums, use_acc=not begins, is_async=True)


@jit
def split_scores(q_tiles, GROUP: gl.constexpr, k_ring, n, rules):
    """Q K^T of tile n, [64, BLOCK_N]. The small products are summed from the smallest."""
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
    """acc * alpha + P V of tile n, slice i of its columns."""
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
def split_step(
    q_tiles, GROUP: gl.constexpr, k_ring, v_ring, n, m_i, lead, l_i, acc, tile, place, keys, rules,
    AT_EDGE: gl.constexpr,
):  # fmt: skip
    """Tile n of the ring, the `tile`-th of the sequence, masked where it is at an edge."""
    wait_full(k_ring, n)
    x = split_scores(q_tiles, GROUP, k_ring, n, rules)
    hand_back(k_ring, n)
    if not AT_EDGE and not rules.HAS_SOFTCAP and not rules.HAS_ALIBI:
        x = scaled(x, rules.scale)
    else:
        x, _ = in_bits(x, tile, place, keys, rules, AT_EDGE)
    shift, alpha, m_i, lead = new_maximum(x, 1.0, m_i, lead, AT_EDGE)
    p32, l_i = probabilities(x, 1.0, shift, alpha, l_i, rules.BLOCK_N)
    p = split_operand(p32, rules.PARTS)
    wait_full(v_ring, n)
    if AT_EDGE and rules.IS_VARLEN:
        rows_used = keys.end - keys.begin - tile * rules.BLOCK_N
        if rows_used < rules.BLOCK_N:
            zero_values(v_ring, n, rows_used, rules.BLOCK_N)
    summed = ()
    for i in gl.static_range(len(acc)):
        if i > 0:
            # Nothing to wait for: its spin loop ends the basic block. Without it ptxas starts the next slice's products
            # before it adds up this one's, and spills both.
            wait_full(v_ring, n)
        summed = summed + (add_values(p, v_ring, n, acc[i], alpha, i, rules.PARTS),)
    hand_back(v_ring, n)
    return m_i, lead, l_i, summed


@jit
def split_tiles(
    q_tiles, GROUP: gl.constexpr, k_ring, v_ring, n, begin, whole_begin, whole_end, end, place, keys, rules
):  # fmt: skip
    """All key tiles of 64 queries, [begin, end), the last first. Returns the softmax's state and the number of the next
    tile of the rings."""
    m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, accumulator_layout(rules.BLOCK_N)))
    lead = gl.zeros_like(m_i)
    l_i = partial_sums(zero_accumulator(rules.BLOCK_N), rules.BLOCK_N)
    acc = zero_slices(v_ring)
    at_edge = end - whole_end  # the diagonal and the ragged end, one tile at least
    if num_slices(v_ring.pieces) > 2:
        at_edge += unseen_zero(n)  # a loop that the compiler knows to run once it unrolls, and that code spills
    for i in range(at_edge):
        m_i, lead, l_i, acc = split_step(
            q_tiles, GROUP, k_ring, v_ring, n, m_i, lead, l_i, acc, end - 1 - i, place, keys, rules, True
        )
        n += 1
    for i in range(whole_end - whole_begin):
        m_i, lead, l_i, acc = split_step(
            q_tiles, GROUP, k_ring, v_ring, n, m_i, lead, l_i, acc, whole_end - 1 - i, place, keys, rules, False
        )
        n += 1
    if rules.HAS_LOW:
        for i in range(whole_begin - begin):
            m_i, lead, l_i, acc = split_step(
                q_tiles, GROUP, k_ring, v_ring, n, m_i, lead, l_i, acc, whole_begin - 1 - i, place, keys, rules, True
            )
            n += 1
    return n, m_i, lead, l_i, acc


@jit
def store_float32(out, v_ring, out_ptr, work, row_first, num_heads, rules):
    """Rows of out straight from the accumulators, one for each slice or, where there is a single part, each piece, to a
    contiguous (..., rows, num_heads, HEAD_DIM_V): a quad of threads fills a sector of 32 bytes. It needs no shared
    memory, which parts fill, and no tensor map."""
    row = work.q_begin + row_first
    if not rules.IS_VARLEN:
        row = work.batch.to(gl.int64) * work.seqlen_q + row_first
    for i in gl.static_range(len(out)):
        store_slice(
            out[i], out_ptr, row, work.seqlen_q - row_first, work.head, num_heads, rules.HEAD_DIM_V,
            out_column(v_ring.pieces, rules.PARTS, i),
        )  # fmt: skip


@constexpr_function
def out_column(pieces, PARTS, i):
    """First column of the i-th accumulator of out."""
    if int(PARTS) == 1:
        return sum(piece.shape[-1] for piece in list(pieces)[: int(i)])
    return slice_column(pieces, i)


@jit
def store_slice(x, out_ptr, row, rows_left, head, num_heads, HEAD_DIM_V: gl.constexpr, COLUMN: gl.constexpr):
    """`store_float32` of the slice whose first column is COLUMN."""
    layout: gl.constexpr = x.type.layout
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = COLUMN + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    offsets = ((row + rows).to(gl.int64) * num_heads + head)[:, None] * HEAD_DIM_V + columns[None, :]
    gl.store(out_ptr + offsets, x, mask=(rows < rows_left)[:, None] & (columns < HEAD_DIM_V)[None, :])
