"""Device code for rows whose columns are in several tiles, as tuples.

A tile's width is a power of two. Rows of 160 columns take a tile of 128 and one of 32, where one tile would have 256
(`arguments.column_widths`). `split_kv` has the even columns of 8-bit caches in one tile, and the odd ones in another.
"""

from __future__ import annotations

from warpwave.kernels.primitives import load_tile, operand, product, rounded, tile_pointers, transposed
from warpwave.runtime.triton_or_stub import jit, tl


@jit
def columns_of(WIDTH: tl.constexpr, REST: tl.constexpr):
    """Returns the columns of each tile: of one tile if REST is 0, else of two."""
    if REST > 0:
        return tl.arange(0, WIDTH), WIDTH + tl.arange(0, REST)
    else:
        return (tl.arange(0, WIDTH),)


@jit
def zeros(ROWS: tl.constexpr, columns):
    """Returns float32 tiles of zeros."""
    found = ()
    for i in tl.static_range(len(columns)):
        found = found + (tl.zeros([ROWS, columns[i].shape[0]], tl.float32),)  # type: ignore[assignment]
    return found


@jit
def pointers_of(ptr, rows, columns, stride_row, stride_column):
    """Returns the `tile_pointers` of each tile."""
    found = ()
    for i in tl.static_range(len(columns)):
        found = found + (tile_pointers(ptr, rows, columns[i], stride_row, stride_column),)
    return found


@jit
def load_tiles(
    pointers, offset, rows, columns, row_begin, row_end, NUM_COLUMNS: tl.constexpr, CHECK_COLUMNS: tl.constexpr,
    CHECK_ROWS: tl.constexpr = True,
):  # fmt: skip
    """Loads each tile at its pointers plus an offset by `load_tile`. Only the last one may have columns past the end
    of a row."""
    found = ()
    for i in tl.static_range(len(columns)):
        tile = load_tile(
            pointers[i] + offset, rows, columns[i], row_begin, row_end, NUM_COLUMNS,
            CHECK_COLUMNS and i + 1 == len(columns), CHECK_ROWS,
        )  # fmt: skip
        found = found + (tile,)  # type: ignore[assignment]
    return found


@jit
def store_tiles(ptr, rows, row_end, columns, stride_row, tiles, NUM_COLUMNS: tl.constexpr):
    """Stores the rows before `row_end` at a stride of `stride_row`, rounded to the dtype of the pointer."""
    for i in tl.static_range(len(columns)):
        offsets = rows.to(tl.int64)[:, None] * stride_row + columns[i][None, :]
        inside = (rows < row_end)[:, None] & (columns[i] < NUM_COLUMNS)[None, :]
        tl.store(ptr + offsets, rounded(tiles[i], ptr.dtype.element_ty), mask=inside)


@jit
def times(tiles, factor):
    """Returns every tile times a factor."""
    found = ()
    for i in tl.static_range(len(tiles)):
        found = found + (tiles[i] * factor,)
    return found


@jit
def only_where(condition, tiles):
    """Returns every tile where the condition holds, and zeros elsewhere."""
    found = ()
    for i in tl.static_range(len(tiles)):
        found = found + (tl.where(condition, tiles[i], tl.zeros_like(tiles[i])),)
    return found


@jit
def only_finite(tiles):
    """Returns every tile with zeros for infinities and NaN."""
    found = ()
    for i in tl.static_range(len(tiles)):
        is_finite = tl.abs(tiles[i]) < float("inf")
        found = found + (tl.where(is_finite, tiles[i], tl.zeros_like(tiles[i])),)
    return found


@jit
def have_nan(tiles):
    """Returns whether any number of any tile is NaN."""
    found = 0
    for i in tl.static_range(len(tiles)):
        found = tl.maximum(found, tl.max((tiles[i] != tiles[i]).to(tl.int32)))
    return found != 0


@jit
def operands(tiles, PRECISION: tl.constexpr, IS_NVIDIA: tl.constexpr):
    """Returns the `operand` of every tile."""
    found = ()
    for i in tl.static_range(len(tiles)):
        found = found + (operand(tiles[i], PRECISION, IS_NVIDIA),)  # type: ignore[assignment]
    return found


@jit
def row_products(a, b, PRECISION: tl.constexpr):
    """Returns the scalar products of the rows of A with those of B, `A B^T`, of operands in tiles."""
    total = None
    for i in tl.static_range(len(b)):
        total = product(a[i], transposed(b[i]), total, PRECISION)
    return total


@jit
def with_products(weights, rows, acc, factor, PRECISION: tl.constexpr):
    """Returns `acc + factor * weights rows` in tiles, of operands. The factor is None for 1."""
    found = ()
    for i in tl.static_range(len(rows)):
        if factor is None:
            found = found + (product(weights, rows[i], acc[i], PRECISION),)  # type: ignore[assignment]
        else:
            found = found + (acc[i] + product(weights, rows[i], None, PRECISION) * factor,)  # type: ignore[assignment]
    return found
