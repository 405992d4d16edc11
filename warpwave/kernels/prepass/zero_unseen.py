"""A launch before gradients that copies two tensors of tokens, with zeros for tokens that belong to no visible pair.

A mask or a bias of minus infinity may hide every key from a query, or a key from every query. Their probabilities are
0, but tensor cores multiply whole tiles, and 0 * NaN is NaN. Tokens of visible pairs are not changed.

Bound: memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpwave.kernels.arguments import broadcast_strides, padded
from warpwave.kernels.groups import InUnits
from warpwave.kernels.primitives import in_elements
from warpwave.runtime import launch
from warpwave.runtime.parameters import Pointer
from warpwave.runtime.triton_or_stub import jit, tl

BLOCK_ROWS = 64
UNIT = tl.constexpr(8)  # elements: rows that tensor maps read begin at multiples of 16 bytes


class Flags(NamedTuple):
    """int8 flags of the tokens that belong to a visible pair, (batch, query head, token) with strides of 0 along
    broadcast axes; or None."""

    ptr: Pointer
    stride_b: int
    stride_h: int
    stride_m: int


@jit
def _seen(flags: Flags, batch, head, rows, inside):
    shown = tl.full(rows.shape, 1, tl.int32)
    if flags.ptr is not None:
        ptr = flags.ptr + batch.to(tl.int64) * flags.stride_b + head.to(tl.int64) * flags.stride_h
        shown = tl.load(ptr + rows * flags.stride_m, mask=inside, other=0).to(tl.int32)
    return shown


@jit
def _copy(
    tokens: InUnits, to_ptr, batch, head, rows, inside, seen, num_heads, num_rows, D: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    columns = tl.arange(0, WIDTH)
    x = in_elements(tokens, UNIT)
    ptr = x.ptr + batch * x.stride_b + head * x.stride_h
    within = inside[:, None] & (columns < D)[None, :]
    read = (rows * x.stride_m)[:, None] + columns[None, :] * x.stride_d
    copied = tl.load(ptr + read, mask=within & (seen != 0)[:, None], other=0.0)
    to_ptr += (batch.to(tl.int64) * num_rows * num_heads + head) * D
    tl.store(to_ptr + (rows.to(tl.int64) * num_heads)[:, None] * D + columns[None, :], copied, mask=within)


@jit(do_not_specialize=["num_heads", "group", "num_rows", "row_blocks"])
def zero_unseen_kernel(
    first: InUnits,
    second: InUnits,
    first_to_ptr,
    second_to_ptr,
    of_mask: Flags,
    of_bias: Flags,
    num_heads,
    group,
    num_rows,
    row_blocks,
    D_FIRST: tl.constexpr,
    D_SECOND: tl.constexpr,
    WIDTH_FIRST: tl.constexpr,
    WIDTH_SECOND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Copies BLOCK_ROWS tokens of one head of both tensors to contiguous ones. A token is seen if a query head of the
    head's group is flagged in each of the flags.

    Bound: memory.
    """
    block = tl.program_id(0) % row_blocks
    head = tl.program_id(0) // row_blocks % num_heads
    batch = tl.program_id(0) // row_blocks // num_heads
    rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = rows < num_rows
    seen = tl.zeros([BLOCK_ROWS], tl.int32)
    for member in range(group):
        of_head = head * group + member
        seen |= _seen(of_mask, batch, of_head, rows, inside) & _seen(of_bias, batch, of_head, rows, inside)
    _copy(first, first_to_ptr, batch, head, rows, inside, seen, num_heads, num_rows, D_FIRST, WIDTH_FIRST)
    _copy(second, second_to_ptr, batch, head, rows, inside, seen, num_heads, num_rows, D_SECOND, WIDTH_SECOND)


def specify(
    tokens: tuple[torch.Tensor, torch.Tensor],
    copies: tuple[torch.Tensor, torch.Tensor],
    flags: tuple[torch.Tensor | None, torch.Tensor | None],
    group: int = 1,
) -> launch.Launch:
    """Returns the launch that fills `copies`.

    Args:
        tokens: two tensors (batch, tokens, heads, head_dim), 16-bit; rows begin at multiples of 16 bytes.
        copies: contiguous tensors of their shapes.
        flags: of a mask and of a bias, each (batch, query heads, tokens) int8 or None; axes of 1 are broadcast.
        group: query heads of a head.
    """
    batch, rows, heads, _ = tokens[0].shape
    row_blocks = -(-rows // BLOCK_ROWS)
    dims = [t.shape[-1] for t in tokens]
    return launch.Launch(
        kernel=zero_unseen_kernel,
        grid=batch * heads * row_blocks,
        tensors=(*tokens, *copies, *flags),
        scalars=[
            *_in_units(tokens[0]), *_in_units(tokens[1]), *broadcast_strides(flags[0])[:3],
            *broadcast_strides(flags[1])[:3], heads, group, rows, row_blocks,
        ],
        constants={
            "D_FIRST": dims[0], "D_SECOND": dims[1], "WIDTH_FIRST": padded(dims[0]), "WIDTH_SECOND": padded(dims[1]),
            "BLOCK_ROWS": BLOCK_ROWS,
        },
        options={"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True},
    )  # fmt: skip


def _in_units(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides of batch, token and head in units, and of the elements. Axes of size 1 may have any."""
    strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
    unit = UNIT.value
    assert not any(stride % unit for stride in strides), tensor.stride()
    return *(stride // unit for stride in strides), 1
