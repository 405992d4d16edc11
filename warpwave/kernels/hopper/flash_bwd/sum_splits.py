"""The launch after those of a grouped call whose query heads are divided among several blocks (config.group_splits):
dK and dV of a kv head from those of its splits.

Bound: memory.
"""

from __future__ import annotations

from warpwave.runtime.triton_or_stub import jit, tl

BLOCK = 32  # rows of a program


@jit
def _sum(splits_ptr, sum_ptr, tile, rows, splits, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Adds up ROWS rows of one gradient, in the order of the splits."""
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (columns < COLUMNS)[None, :]
    cells = splits_ptr + row[:, None] * (splits * COLUMNS) + columns[None, :]
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for split in range(splits):
        total += tl.load(cells + split * COLUMNS, mask=inside, other=0.0)
    result = total.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row[:, None] * COLUMNS + columns[None, :], result, mask=inside)


@jit(do_not_specialize=["rows", "splits"])
def sum_splits_kernel(
    dk_splits_ptr,
    dv_splits_ptr,
    dk_ptr,
    dv_ptr,
    rows,
    splits,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr,
):
    """Adds up ROWS rows of dK, or in the second half of the programs of dV. A row is a key of a kv head.

    Args:
        dk_splits_ptr, dv_splits_ptr: (rows, splits, head_dim) and (rows, splits, head_dim_v), float32, contiguous.
        dk_ptr, dv_ptr: (rows, head_dim) and (rows, head_dim_v), contiguous.
    """
    tiles = tl.num_programs(0) // 2
    tile = tl.program_id(0)
    if tile < tiles:
        _sum(dk_splits_ptr, dk_ptr, tile, rows, splits, ROWS, HEAD_DIM, WIDTH)
    else:
        _sum(dv_splits_ptr, dv_ptr, tile - tiles, rows, splits, ROWS, HEAD_DIM_V, WIDTH_V)
