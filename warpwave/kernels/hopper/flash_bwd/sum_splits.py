"""The last launch of a call whose blocks of keys are divided: it adds up dK and dV of a kv head over its splits
(config.group_splits), or of a block over its parts (config.divided_tail).

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


@jit
def _sum_parts(
    parts_ptr, sum_ptr, block, row, key, seqlen_k, heads, parts, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Adds up ROWS rows of one gradient of the block-th divided block, from its row `row` on, in the order of the
    parts. They belong to the keys from `key` on of a head; sum_ptr is that head's."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    inside = (key + rows < seqlen_k)[:, None] & (columns < COLUMNS)[None, :]
    cells = parts_ptr + (block.to(tl.int64) * parts * BLOCK_N + row) * COLUMNS
    cells += rows[:, None] * COLUMNS + columns[None, :]
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for part in range(parts):
        total += tl.load(cells + part * (BLOCK_N * COLUMNS), mask=inside, other=0.0)
    place = (key + rows).to(tl.int64)[:, None] * heads * COLUMNS + columns[None, :]
    tl.store(sum_ptr + place, total.to(sum_ptr.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["blocks", "whole", "parts", "tiles_per_head", "heads_in_l2", "batch", "heads", "seqlen_k"])
def sum_parts_kernel(
    dk_parts_ptr,
    dv_parts_ptr,
    dk_ptr,
    dv_ptr,
    blocks,
    whole,
    parts,
    tiles_per_head,
    heads_in_l2,
    batch,
    heads,
    seqlen_k,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr,
):
    """Adds up ROWS rows of dK of a divided block of a dense call, or in the second half of the programs of dV.

    Args:
        dk_parts_ptr, dv_parts_ptr: (divided blocks, parts, BLOCK_N, head_dim) and the same of head_dim_v, float32,
            contiguous.
        dk_ptr, dv_ptr: (batch, seqlen_k, heads, head_dim) and the same of head_dim_v, contiguous.
        blocks, whole, parts, tiles_per_head, heads_in_l2, heads: `groups.KeySchedule`; heads are kv heads.
    """
    programs = tl.num_programs(0) // 2
    program = tl.program_id(0)
    is_of_values = program >= programs
    program = tl.where(is_of_values, program - programs, program)
    block = program // (BLOCK_N // ROWS)
    row = program % (BLOCK_N // ROWS) * ROWS
    # As band.work_on_keys: the same order of blocks.
    later = blocks - 1 - whole - block
    group = later // (heads_in_l2 * tiles_per_head)
    place = later - group * (heads_in_l2 * tiles_per_head)
    together = tl.minimum(heads_in_l2, batch * heads - group * heads_in_l2)
    key = (tiles_per_head - 1 - place // together) * BLOCK_N + row
    batch_head = group * heads_in_l2 + place % together
    first = (batch_head // heads).to(tl.int64) * seqlen_k * heads + batch_head % heads
    if is_of_values:
        _sum_parts(
            dv_parts_ptr, dv_ptr + first * HEAD_DIM_V, block, row, key, seqlen_k, heads, parts, ROWS, BLOCK_N,
            HEAD_DIM_V, WIDTH_V,
        )  # fmt: skip
    else:
        _sum_parts(
            dk_parts_ptr, dk_ptr + first * HEAD_DIM, block, row, key, seqlen_k, heads, parts, ROWS, BLOCK_N, HEAD_DIM,
            WIDTH,
        )  # fmt: skip
