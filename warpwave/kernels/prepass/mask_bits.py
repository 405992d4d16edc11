"""A launch before Hopper's kernels that packs a boolean mask into bits, in the thread order of wgmma's accumulators,
and flags the tiles that are entirely hidden. The bits also contain what position hides.

A thread of a warpgroup holds two columns out of every eight of each of its two rows. Each of the four threads that
share a row has one word: word q of a row holds columns `8 j + 2 q + c` of a tile of 128 keys, in bit `2 j + c`. A tile
of 64 x 128 scores then costs a thread two loads of four bytes instead of 64 of one, and an eighth of the tensor's
bytes. Kernels that compute scores transposed take the words of the transposed mask, whose rows are keys.

Bound: memory: a byte per cell is read, an eighth written; axes along which the mask is broadcast are packed once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpwave.kernels.arguments import broadcast_strides
from warpwave.kernels.primitives import band_visible
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch
from warpwave.runtime.triton_or_stub import jit, tl

TILE_KEYS = 128  # keys covered by four words of a row
BLOCK_ROWS = 64  # rows that share a flag: those of a consumer warpgroup


# The compiler may specialize on the numbers of rows and keys: whichever axis is contiguous is then read in vectors.
@jit(do_not_specialize=["num_heads", "row_blocks", "tiles", "flags_begin", "low", "high"])
def pack_mask_kernel(
    mask_ptr,
    words_ptr,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    num_heads,
    num_rows,
    num_keys,
    row_blocks,
    tiles,
    flags_begin,
    low,
    high,
    BLOCK_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr,
):
    """Packs the words of BLOCK_ROWS rows and TILE_KEYS keys of one head, and flags whether any bit is set. Keys past
    the last one are hidden, and so are those outside the band `low <= key - row <= high`.

    Bound: memory.
    """
    pid = tl.program_id(0)
    tile = pid % tiles
    block = pid // tiles % row_blocks
    batch_head = (pid // tiles // row_blocks).to(tl.int64)
    rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, TILE_KEYS)
    keys = tile * TILE_KEYS + columns
    mask_ptr += batch_head // num_heads * stride_mask_b + batch_head % num_heads * stride_mask_h
    cells = rows.to(tl.int64)[:, None] * stride_mask_m + keys.to(tl.int64)[None, :] * stride_mask_n
    inside = (rows < num_rows)[:, None] & (keys < num_keys)[None, :]
    shown = tl.load(mask_ptr + cells, mask=inside, other=0) != 0
    if HAS_LOW or HAS_HIGH:
        shown = shown & band_visible(rows, keys, low, high, HAS_LOW, HAS_HIGH)
    bits = shown.to(tl.int32) << (columns // 8 * 2 + columns % 2)[None, :]
    bits = tl.reshape(bits, [BLOCK_ROWS, TILE_KEYS // 8, 4, 2])
    words = tl.sum(tl.sum(bits, axis=3), axis=1)  # each bit occurs once, so the sum is their union
    first = (batch_head * tiles + tile) * num_rows
    to = (first + rows)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(words_ptr + to, words, mask=(rows < num_rows)[:, None])
    flag = (batch_head * row_blocks + block) * tiles + tile
    tl.store(words_ptr + flags_begin + flag, tl.max(tl.max((words != 0).to(tl.int32), axis=1), axis=0))


class Packed(NamedTuple):
    """The memory layout of a packed mask: words (batch, heads, tiles, rows, 4), followed by flags (batch, heads, row
    blocks, tiles), int32. Batch and heads are the mask's; rows are too, unless position hides something.

    Args:
        size: words and flags, of 4 bytes.
        flags_begin: offset of the flags.
        word_strides: batch, head, tile, row; 0 along broadcast axes.
        flag_strides: batch, head, row block; 0 along broadcast axes.
    """

    batch: int
    heads: int
    tiles: int
    rows: int
    row_blocks: int
    size: int
    flags_begin: int
    word_strides: tuple[int, int, int, int]
    flag_strides: tuple[int, int, int]


def packed(problem: AttentionProblem, transposed: bool = False) -> Packed:
    """Returns the layout of the problem's packed mask, or of its transpose."""
    assert problem.mask_shape is not None
    batch, heads, *lines = problem.mask_shape
    lengths = [problem.seqlen_q, problem.seqlen_k]
    rows, length = (lengths if problem.has_band else lines)[transposed], lengths[not transposed]
    tiles, row_blocks = max(1, -(-length // TILE_KEYS)), -(-rows // BLOCK_ROWS)
    words, flags = tiles * rows * 4, row_blocks * tiles
    b, h, r = (int(n > 1) for n in (batch, heads, rows))
    return Packed(
        batch, heads, tiles, rows, row_blocks,
        size=batch * heads * (words + flags),
        flags_begin=batch * heads * words,
        word_strides=(b * heads * words, h * words, rows * 4, r * 4),
        flag_strides=(b * heads * flags, h * flags, r * tiles),
    )  # fmt: skip


def strides(problem: AttentionProblem) -> tuple[int, ...]:
    """Returns the strides of words and flags in `hopper/flash_fwd`'s order; zeros if there is no mask."""
    if problem.mask_shape is None:
        return (0,) * 8
    p = packed(problem)
    return (*p.word_strides, p.flags_begin, *p.flag_strides)


def specify(
    problem: AttentionProblem, mask: torch.Tensor, words: torch.Tensor, transposed: bool = False
) -> launch.Launch:
    """Returns the launch that packs `mask`, or its transpose, into `words`, of `packed(problem, transposed).size`."""
    p = packed(problem, transposed)
    low, high = problem.band(problem.seqlen_q, problem.seqlen_k)
    stride_b, stride_h, *along = broadcast_strides(mask)
    if transposed:
        low, high = None if high is None else -high, None if low is None else -low
    return launch.Launch(
        kernel=pack_mask_kernel,
        grid=p.batch * p.heads * p.tiles * p.row_blocks,
        tensors=(mask, words),
        scalars=[
            stride_b, stride_h, along[transposed], along[not transposed], p.heads, p.rows,
            problem.seqlen_q if transposed else problem.seqlen_k, p.row_blocks, p.tiles, p.flags_begin,
            low or 0, high or 0,
        ],
        constants={
            "BLOCK_ROWS": BLOCK_ROWS, "TILE_KEYS": TILE_KEYS, "HAS_LOW": low is not None, "HAS_HIGH": high is not None,
        },
        options={"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True},
    )  # fmt: skip


CHUNK = 128  # steps that a block lists at a time


@jit(do_not_specialize=["flags_begin", "heads", "blocks", "row_blocks", "steps", "group"])
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


def specify_lists(of: Lists, words: torch.Tensor, lists: torch.Tensor) -> launch.Launch:
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


def rows_seen(words: torch.Tensor, p: Packed) -> torch.Tensor:
    """Returns which rows of a packed mask see a column, (batch, heads, rows); an axis of 1 stands for all.

    It reduces the words as they are, because comparing each with 0 would take memory that no cost states; and first
    over tiles, because torch reads along an outer axis faster than in groups of four.
    """
    return words[: p.flags_begin].view(p.batch, p.heads, p.tiles, p.rows, 4).any(2).any(-1)
