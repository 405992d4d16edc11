"""Building blocks of the float32 launches (split_dkv.py, split_dq.py): products of operands that split_rows.py has
split, and tiles of 64 rows that lie in whole tiles.

    x y ~ (x0 y1 + x1 y0) + x0 y0        x = (x0 + x1) / scale, two float16 parts

The small products and the large one have separate accumulators, fresh for every tile, as in the forward
(../split_float32.py): a tensor core truncates what it accumulates, and the remainder of an infinity is NaN. The large
sum is added to the small one and multiplied by what undoes the scales, where it is added to the gradient's sum in plain
float32. A scale may thus differ from tile to tile: of dS, each row has the power of two that its largest magnitude
takes to [2^14, 2^15).
"""

from warpwave.kernels.hopper.flash_bwd.split_rows import PARTS, ROWS, UNITS
from warpwave.kernels.hopper.flash_bwd.steps import store_rows
from warpwave.kernels.hopper.parts import accumulator_layout, like, matrix, unseen_zero, wait_full, zero_accumulator
from warpwave.kernels.hopper.split_float32 import (
    half_part,
    num_slices,
    number,
    slice_column,
    values_slice,
    zero_slice,
)
from warpwave.runtime.gluon_or_stub import gl, jit, tma_load, warpgroup_mma, warpgroup_mma_wait

LIFT = gl.constexpr(32768.0)  # of probabilities, which are at most 1: their parts keep 22 bits down to 2^-28


@jit
def units_of(units_ptr, batch, head, row, num_heads, statistic_rows):
    """Returns the address of the units of the tile that begins at a row of statistics."""
    tile = (batch * num_heads + head).to(gl.int64) * (statistic_rows // ROWS) + row // ROWS
    return units_ptr + tile * UNITS


@jit
def load_parts(maps, pieces, full, I: gl.constexpr, batch, head, row):
    """Loads the parts of a tile that stays for the whole block as the I-th of `pieces`."""
    column = 0
    for i in gl.static_range(len(maps)):
        for part in gl.static_range(PARTS):
            tma_load(maps[i], [batch, head * PARTS + part, row, column], full, pieces[i].index(I * PARTS + part))
        column += maps[i].block_type.shape[-1]


@jit
def scores_of_parts(rows, I: gl.constexpr, ring, n):
    """Returns the product of the I-th tile of `rows` with tile n of a ring, transposed: [64, 64], scaled."""
    own = I * PARTS + unseen_zero(n)
    tile = n % ring.stages * PARTS + unseen_zero(n)
    small = zero_accumulator(ROWS)
    large = small
    for a in gl.static_range(PARTS):
        for i in gl.static_range(len(rows)):
            other = matrix(ring.pieces[i].index(tile + (1 - a))).permute((1, 0))
            small = warpgroup_mma(matrix(rows[i].index(own + a)), other, small, use_acc=a + i > 0, is_async=True)
    for i in gl.static_range(len(rows)):
        other = matrix(ring.pieces[i].index(tile)).permute((1, 0))
        large = warpgroup_mma(matrix(rows[i].index(own)), other, large, use_acc=i > 0, is_async=True)
    small, large = warpgroup_mma_wait(0, deps=[small, large])
    return large + number(small)


@jit
def parts_of(x):
    """Returns the parts of x as operands of a product, the largest first, in the same registers."""
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator_layout(ROWS), k_width=2)
    parts = ()
    for _ in gl.static_range(PARTS):
        part, x = half_part(x)
        parts = parts + (gl.convert_layout(part, layout, assert_trivial=True),)
    return parts


@jit
def power_of_two(biased):
    """Returns 2^(biased - 127), also where it is subnormal; at most 2^127."""
    bits = gl.minimum(biased, 254) << 23
    subnormal = (1 << 22) >> gl.minimum(gl.maximum(-biased, 0), 31)
    return gl.where(biased > 0, bits, subnormal).to(gl.float32, bitcast=True)


@jit
def scaled_rows(ds, exponent):
    """Returns dS with each row scaled by the power of two that its largest magnitude takes to [2^14, 2^15), and the
    factors of the products of these rows: the inverses times 2^exponent."""
    largest = gl.max(gl.abs(ds), axis=1)
    # Below 2^-113 the scale would exceed float32.
    biased = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 14)
    scale = (268 - biased << 23).to(gl.float32, bitcast=True)
    return ds * scale[:, None], power_of_two(biased - 14 + exponent)


@jit
def add_products(parts, ring, n, sums, factor):
    """Returns sums + factor * (x Y), for x in parts and tile n of a ring. There is one sum for each slice of Y's
    columns, and a factor for each row."""
    summed = ()
    for i in gl.static_range(len(sums)):
        if i > 0:
            # This wait never blocks; its spin loop ends the basic block, as in float32_tiles.split_step.
            wait_full(ring, n)
        summed = summed + (_add_slice(parts, ring, n, sums[i], factor, i),)
    return summed


@jit
def _add_slice(parts, ring, n, total, factor, i: gl.constexpr):
    tile = n % ring.stages * PARTS + unseen_zero(n)
    zero = zero_slice(ring, i)
    large = warpgroup_mma(parts[0], values_slice(ring, tile, i), zero, use_acc=False, is_async=True)
    small = warpgroup_mma(parts[1], values_slice(ring, tile, i), zero, use_acc=False, is_async=True)
    small = warpgroup_mma(parts[0], values_slice(ring, tile + 1, i), small, is_async=True)
    small, large = warpgroup_mma_wait(0, deps=[small, large])
    return add_scaled(total, like(factor, total), large + number(small))


@jit
def add_scaled(total, factor, x):
    """Returns total + factor * x, computed immediately: the compiler would defer it to the end of the tile and keep the
    products of all slices until then."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $2, $3, $1;", "=r,r,r,r", [total, factor, x], dtype=gl.float32, is_pure=False, pack=1
    )


@jit
def store_slices(x, ring, factor, ptr, strides, batch, head, row, row_end, WIDTH: gl.constexpr):
    """Stores sums times a factor as rows `row` to `row_end` of a head of WIDTH columns, directly from registers, one
    sum for each slice of a ring's columns: the parts fill shared memory."""
    stride_b, stride_h, stride_m = strides
    for i in gl.static_range(num_slices(ring.pieces)):
        column = slice_column(ring.pieces, i)
        store_rows(
            x[i] * factor, ptr + column, stride_b, stride_h, stride_m, batch, head, row, row_end, WIDTH - column, 1
        )  # fmt: skip
