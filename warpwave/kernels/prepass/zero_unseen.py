"""Launches before gradients that copy q, k, v and dout, with zeros for tokens that belong to no visible pair, if such a
token holds a number that products would not cancel.

A mask or a bias of minus infinity may hide every key from a query, or a key from every query. Their probabilities are
0, but tensor cores multiply whole tiles, and 0 * NaN is NaN. A first launch therefore checks these tokens. A second one
fills the copies, or ends at once if none of their numbers is NaN or above LARGEST in magnitude. The launches of the
gradients then read the originals.

Bound: memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpwave.kernels.arguments import broadcast_strides, padded
from warpwave.runtime import launch
from warpwave.runtime.parameters import Pointer
from warpwave.runtime.triton_or_stub import jit, tl

BLOCK_ROWS = 64
MOST_BLOCKS = 1024  # of the launch that copies, which mostly ends at once: a block takes one tile after another
UNIT = tl.constexpr(8)  # elements: rows that tensor maps read begin at multiples of 16 bytes
# The largest finite number of float16. Scalar products of 256 such numbers with seen ones below 1e31 are finite.
LARGEST = tl.constexpr(65504.0)


class Tokens(NamedTuple):
    """A tensor of tokens with the strides of batch items, tokens and heads in units of UNIT elements. Rows are
    contiguous."""

    ptr: Pointer
    stride_b: int
    stride_m: int
    stride_h: int


class Flags(NamedTuple):
    """int8 flags of the tokens that belong to a visible pair, (batch, query head, token) with strides of 0 along
    broadcast axes."""

    ptr: Pointer
    stride_b: int
    stride_h: int
    stride_m: int


class Side(NamedTuple):
    """The tensors of queries, q and dout, or of keys, k and v; their copies; and the flags of tokens. A token is
    seen if it is flagged for a query head of its head's group."""

    first: Tokens
    second: Tokens
    first_copy_ptr: Pointer
    second_copy_ptr: Pointer
    flags: Flags
    num_heads: int
    group_size: int
    num_rows: int
    row_blocks: int


class Tensors(NamedTuple):
    """The tensors of a side: tokens of (batch, tokens, heads, head_dim) whose rows begin at multiples of UNIT
    elements; contiguous copies of their shapes; and int8 flags (batch, query heads, tokens), whose axes of 1 are
    broadcast."""

    tokens: tuple[torch.Tensor, torch.Tensor]
    copies: tuple[torch.Tensor, torch.Tensor]
    flags: torch.Tensor

    @property
    def flat(self) -> tuple[torch.Tensor, ...]:
        """Returns them in the order of `Side`."""
        return *self.tokens, *self.copies, self.flags


@jit
def _tile_of(side: Side, block, BLOCK_ROWS: tl.constexpr):
    """Returns the batch item, head and rows of a block, which of them exist, and which are seen."""
    head = block // side.row_blocks % side.num_heads
    batch = block // side.row_blocks // side.num_heads
    rows = block % side.row_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = rows < side.num_rows
    flags = side.flags
    seen = tl.zeros([BLOCK_ROWS], tl.int32)
    for member in range(side.group_size):
        of_head = head * side.group_size + member
        ptr = flags.ptr + batch.to(tl.int64) * flags.stride_b + of_head.to(tl.int64) * flags.stride_h
        seen |= tl.load(ptr + rows * flags.stride_m, mask=inside, other=0).to(tl.int32)
    return batch, head, rows, inside, seen != 0


@jit
def _load(tokens: Tokens, batch, head, rows, wanted, D: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    first = batch.to(tl.int64) * tokens.stride_b + head.to(tl.int64) * tokens.stride_h
    units = first + rows.to(tl.int64) * tokens.stride_m
    pointers = tokens.ptr + (units * UNIT)[:, None] + columns[None, :]
    return tl.load(pointers, mask=wanted[:, None] & (columns < D)[None, :], other=0.0)


@jit
def _are_large(x):
    """Returns which rows have NaN or a number above LARGEST in magnitude."""
    return tl.max((~(tl.abs(x.to(tl.float32)) <= LARGEST)).to(tl.int32), 1)


@jit
def _check(side: Side, block, copies_needed_ptr, D: tl.constexpr, D_V: tl.constexpr, W: tl.constexpr, W_V: tl.constexpr,
           BLOCK_ROWS: tl.constexpr):  # fmt: skip
    batch, head, rows, inside, seen = _tile_of(side, block, BLOCK_ROWS)
    unseen = inside & ~seen
    if tl.max(unseen.to(tl.int32)) != 0:
        first = _load(side.first, batch, head, rows, unseen, D, W)
        second = _load(side.second, batch, head, rows, unseen, D_V, W_V)
        large = tl.max(_are_large(first) | _are_large(second)) != 0
        tl.store(copies_needed_ptr, 1, mask=large)


@jit
def _copy_one(
    tokens: Tokens, copy_ptr, side: Side, batch, head, rows, inside, seen, D: tl.constexpr, WIDTH: tl.constexpr
):
    x = _load(tokens, batch, head, rows, inside & seen, D, WIDTH)
    columns = tl.arange(0, WIDTH)
    copy_ptr += (batch.to(tl.int64) * side.num_rows * side.num_heads + head) * D
    written = copy_ptr + (rows.to(tl.int64) * side.num_heads)[:, None] * D + columns[None, :]
    tl.store(written, x, mask=inside[:, None] & (columns < D)[None, :])


@jit
def _copy(side: Side, block, D: tl.constexpr, D_V: tl.constexpr, W: tl.constexpr, W_V: tl.constexpr,
          BLOCK_ROWS: tl.constexpr):  # fmt: skip
    batch, head, rows, inside, seen = _tile_of(side, block, BLOCK_ROWS)
    _copy_one(side.first, side.first_copy_ptr, side, batch, head, rows, inside, seen, D, W)
    _copy_one(side.second, side.second_copy_ptr, side, batch, head, rows, inside, seen, D_V, W_V)


@jit(do_not_specialize=["blocks_of_queries", "num_blocks"])
def check_unseen_kernel(
    queries: Side,
    keys: Side,
    copies_needed_ptr,
    blocks_of_queries,
    num_blocks,
    D: tl.constexpr,
    D_V: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Stores 1 in an int8 of 0 if a token that is not seen has NaN or a number above LARGEST in magnitude."""
    block = tl.program_id(0)
    if block < blocks_of_queries:
        _check(queries, block, copies_needed_ptr, D, D_V, WIDTH, WIDTH_V, BLOCK_ROWS)
    else:
        _check(keys, block - blocks_of_queries, copies_needed_ptr, D, D_V, WIDTH, WIDTH_V, BLOCK_ROWS)


@jit(do_not_specialize=["blocks_of_queries", "num_blocks"])
def zero_unseen_kernel(
    queries: Side,
    keys: Side,
    copies_needed_ptr,
    blocks_of_queries,
    num_blocks,
    D: tl.constexpr,
    D_V: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Fills the copies, if the number at `copies_needed_ptr` is not 0."""
    end = tl.where(tl.load(copies_needed_ptr) != 0, num_blocks, 0)
    for block in range(tl.program_id(0), end, tl.num_programs(0)):
        if block < blocks_of_queries:
            _copy(queries, block, D, D_V, WIDTH, WIDTH_V, BLOCK_ROWS)
        else:
            _copy(keys, block - blocks_of_queries, D, D_V, WIDTH, WIDTH_V, BLOCK_ROWS)


def specify(queries: Tensors, keys: Tensors, copies_needed: torch.Tensor) -> list[launch.Launch]:
    """Returns the launches, both with the arguments `(*queries.flat, *keys.flat, copies_needed)`.

    Args:
        queries, keys: those of q and dout, and of k and v.
        copies_needed: int8, (1,), 0 before the launches.
    """
    head_dims = [t.shape[-1] for t in keys.tokens]
    blocks = [_blocks(of) for of in (queries, keys)]
    scalars = [*_scalars(queries, 1), *_scalars(keys, queries.tokens[0].shape[2] // keys.tokens[0].shape[2])]
    return [
        launch.Launch(
            kernel=kernel,
            grid=sum(blocks) if kernel is check_unseen_kernel else min(sum(blocks), MOST_BLOCKS),
            tensors=(*queries.flat, *keys.flat, copies_needed),
            scalars=[*scalars, blocks[0], sum(blocks)],
            constants={
                "D": head_dims[0], "D_V": head_dims[1], "WIDTH": padded(head_dims[0]), "WIDTH_V": padded(head_dims[1]),
                "BLOCK_ROWS": BLOCK_ROWS,
            },
            options={"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True},
        )
        for kernel in (check_unseen_kernel, zero_unseen_kernel)
    ]  # fmt: skip


def _blocks(of: Tensors) -> int:
    batch, rows, heads, _ = of.tokens[0].shape
    return batch * heads * -(-rows // BLOCK_ROWS)


def _scalars(of: Tensors, group: int) -> list[int]:
    """Returns the numbers of a `Side`."""
    _, rows, heads, _ = of.tokens[0].shape
    strides = [stride for t in of.tokens for stride in _in_units(t)]
    return [*strides, *broadcast_strides(of.flags)[:3], heads, group, rows, -(-rows // BLOCK_ROWS)]


def _in_units(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides of batch, token and head in units. Axes of size 1 may have any."""
    strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
    unit = UNIT.value
    assert not any(stride % unit for stride in strides), tensor.stride()
    return tuple(stride // unit for stride in strides)
