"""A launch before Hopper's gradients that lists the steps of blocks in which a packed mask shows a pair.

Bound: latency.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpwave.kernels.prepass.mask_bits import Packed
from warpwave.runtime import launch
from warpwave.runtime.triton_or_stub import jit, tl

CHUNK = 128  # steps that a block lists at a time


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
):
    """Lists the steps of a block of PER_BLOCK row blocks that show a pair: their number, at least 1, then the steps. A
    tile of TILE_KEYS columns is REPEAT steps. The steps of the heads of a group follow one another.

    Bound: latency.
    """
    pid = tl.program_id(0)
    block = pid % blocks
    head = pid // blocks % heads
    words_ptr += flags_begin + (pid // blocks // heads).to(tl.int64) * stride_flags_b
    lists_ptr += pid.to(tl.int64) * (1 + group * steps)
    count = tl.full((), 0, tl.int32)
    for g in range(group):
        flags_ptr = words_ptr + (head * group + g).to(tl.int64) * stride_flags_h
        for first in range(0, steps, CHUNK):
            step = first + tl.arange(0, CHUNK)
            shown = tl.zeros([CHUNK], tl.int32)
            for r in tl.static_range(PER_BLOCK):
                row = block * PER_BLOCK + r
                inside = (step < steps) & (row < row_blocks)
                shown |= tl.load(flags_ptr + row * stride_flags_r + step // REPEAT, mask=inside, other=0)
            shown = (shown != 0).to(tl.int32)
            place = count + tl.cumsum(shown, 0) - shown
            tl.store(lists_ptr + 1 + place, step + g * steps, mask=shown != 0)
            count += tl.sum(shown, 0)
    if count == 0:
        tl.store(lists_ptr + 1, 0)
    tl.store(lists_ptr, tl.maximum(count, 1))


class Lists(NamedTuple):
    """The lists of the steps of a packed mask's blocks, (batch, heads, blocks, 1 + group * steps); batch and heads of 1
    stand for all.

    Args:
        per_block: row blocks of a block.
        repeat: steps of a tile of 128 columns.
        steps: of one head.
        group: heads of the mask whose steps a block walks.
    """

    packed: Packed
    per_block: int
    repeat: int
    steps: int
    group: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        p = self.packed
        return p.batch, max(1, p.heads // self.group), -(-p.row_blocks // self.per_block), 1 + self.group * self.steps


def specify(of: Lists, words: torch.Tensor, lists: torch.Tensor) -> launch.Launch:
    """Returns the launch that lists the steps of packed `words` in `lists`, int32 of `of.shape`."""
    batch, heads, blocks, _ = of.shape
    return launch.Launch(
        kernel=list_steps_kernel,
        grid=batch * heads * blocks,
        tensors=(words, lists),
        scalars=[
            of.packed.flags_begin, *of.packed.flag_strides, heads, blocks, of.packed.row_blocks, of.steps, of.group,
        ],
        constants={"REPEAT": of.repeat, "PER_BLOCK": of.per_block, "CHUNK": CHUNK},
        options={"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True},
    )  # fmt: skip
