"""A launch before Hopper's gradients that lists the steps of blocks in which a packed mask shows a pair.

A list has the number of its steps, at least 1, and then two numbers for each step: the step, and its rank, the number
of earlier blocks of the same heads that list it (hopper/flash_bwd/turns.py). A step is `tile * group + head`, where
head is the number of the head in its group. Lists begin with the last tile, and have all heads of a tile before the
next tile. A block that shows nothing lists step 0 with a rank of -1. Bound: latency.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpwave.kernels.prepass.mask_bits import Packed
from warpwave.runtime import launch
from warpwave.runtime.triton_or_stub import jit, tl

CHUNK = 128  # steps that a block lists at a time
EARLIER = 16  # earlier blocks whose flags are read at a time


@jit(
    do_not_specialize=[
        *("flags_begin", "stride_flags_b", "stride_flags_h", "stride_flags_r"),
        *("heads", "blocks", "row_blocks", "steps", "group"),
    ]
)
def list_steps_kernel(
    words_ptr,
    lists_ptr,
    flags_begin,
    stride_flags_b,
    stride_flags_h,
    stride_flags_r,
    heads,
    blocks,
    row_blocks,
    steps,
    group,
    REPEAT: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLIER: tl.constexpr,
):
    """Lists the steps of a block of PER_BLOCK row blocks. A tile of 128 columns is REPEAT steps of a head.

    Bound: latency.
    """
    pid = tl.program_id(0)
    block = pid % blocks
    head = pid // blocks % heads
    words_ptr += flags_begin + (pid // blocks // heads).to(tl.int64) * stride_flags_b
    words_ptr += (head * group).to(tl.int64) * stride_flags_h
    lists_ptr += pid.to(tl.int64) * (1 + 2 * group * steps)
    count = tl.full((), 0, tl.int32)
    for first in range(0, group * steps, CHUNK):
        step = group * steps - 1 - first - tl.arange(0, CHUNK)
        flags_ptr = words_ptr + (step % group).to(tl.int64) * stride_flags_h + step // group // REPEAT
        shown = _shown(flags_ptr, block, step, block + 1, row_blocks, stride_flags_r, PER_BLOCK)
        rank = tl.zeros([CHUNK], tl.int32)
        for first_block in range(0, block, EARLIER):
            earlier = first_block + tl.arange(0, EARLIER)[:, None]
            rank += tl.sum(
                _shown(flags_ptr[None, :], earlier, step[None, :], block, row_blocks, stride_flags_r, PER_BLOCK), 0
            )
        entry = lists_ptr + 1 + 2 * (count + tl.cumsum(shown, 0) - shown)
        tl.store(entry, step, mask=shown != 0)
        tl.store(entry + 1, rank, mask=shown != 0)
        count += tl.sum(shown, 0)
    if count == 0:
        tl.store(lists_ptr + 1, 0)
        tl.store(lists_ptr + 2, -1)
    tl.store(lists_ptr, tl.maximum(count, 1))


@jit
def _shown(flags_ptr, block, step, end, row_blocks, stride_flags_r, PER_BLOCK: tl.constexpr):
    """Returns 1 for each block before `end` and step at 0 or above that shows a pair, and 0 for others."""
    shown = tl.zeros((step + block).shape, tl.int32)
    for r in tl.static_range(PER_BLOCK):
        row = block * PER_BLOCK + r
        inside = (step >= 0) & (block < end) & (row < row_blocks)
        shown |= tl.load(flags_ptr + row * stride_flags_r, mask=inside, other=0)
    return (shown != 0).to(tl.int32)


class Lists(NamedTuple):
    """The lists of the steps of a packed mask's blocks, (batch, heads, blocks, 1 + 2 * group * steps); batch and heads
    of 1 stand for all.

    Args:
        row_blocks: of all rows; those of the mask are one if it is broadcast along rows.
        per_block: row blocks of a block.
        repeat: steps of a tile of 128 columns.
        steps: of one head.
        group: heads of the mask whose steps a block walks.
    """

    packed: Packed
    row_blocks: int
    per_block: int
    repeat: int
    steps: int
    group: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        heads, blocks = max(1, self.packed.heads // self.group), -(-self.row_blocks // self.per_block)
        return self.packed.batch, heads, blocks, 1 + 2 * self.group * self.steps


def specify(of: Lists, words: torch.Tensor, lists: torch.Tensor) -> launch.Launch:
    """Returns the launch that lists the steps of packed `words` in `lists`, int32 of `of.shape`."""
    batch, heads, blocks, _ = of.shape
    return launch.Launch(
        kernel=list_steps_kernel,
        grid=batch * heads * blocks,
        tensors=(words, lists),
        scalars=[
            of.packed.flags_begin, *of.packed.flag_strides, heads, blocks, of.row_blocks, of.steps, of.group,
        ],
        constants={"REPEAT": of.repeat, "PER_BLOCK": of.per_block, "CHUNK": CHUNK, "EARLIER": EARLIER},
        options={"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True},
    )  # fmt: skip
