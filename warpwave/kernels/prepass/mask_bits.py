"""Launches before Hopper's kernels that pack a boolean mask into bits, in the thread order of wgmma's accumulators, and
flag the tiles, queries and keys that it does not hide entirely. The bits also contain what position hides.

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


@jit
def load_quads(
    mask_ptr, rows, first_key, stride_m, stride_n, num_rows, num_keys, num_quads, low, high, KEYS: tl.constexpr,
    ALIGNED: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr,
):  # fmt: skip
    """Returns the cells of some rows and of KEYS keys from first_key on, int32 [rows, KEYS / 4]: four keys in a number,
    the first in the lowest byte, each byte 0 or 1. Cells outside the mask or the band are 0.

    ALIGNED: whether four keys are loaded at once: they are adjacent, begin at a multiple of 4 bytes, and no four of
        them are cut by the end. Then `mask_ptr` and `stride_m` are of four keys.
    """
    quads = first_key // 4 + tl.arange(0, KEYS // 4)
    if ALIGNED:
        inside = (rows < num_rows)[:, None] & (quads < num_quads)[None, :]
        x = tl.load(mask_ptr + rows.to(tl.int64)[:, None] * stride_m + quads[None, :], mask=inside, other=0)
        # The lowest bit of a byte becomes the union of its bits.
        x |= (x >> 4) & 0x0F0F0F0F
        x |= (x >> 2) & 0x03030303
        x = (x | (x >> 1)) & 0x01010101
    else:
        keys = first_key + tl.arange(0, KEYS)
        inside = (rows < num_rows)[:, None] & (keys < num_keys)[None, :]
        cells = rows.to(tl.int64)[:, None] * stride_m + keys.to(tl.int64)[None, :] * stride_n
        x = (tl.load(mask_ptr + cells, mask=inside, other=0) != 0).to(tl.int32) << (keys % 4 * 8)[None, :]
        x = tl.sum(tl.reshape(x, [rows.shape[0], KEYS // 4, 4]), axis=2)
    if HAS_LOW or HAS_HIGH:
        for i in tl.static_range(4):
            shown = band_visible(rows, 4 * quads + i, low, high, HAS_LOW, HAS_HIGH)
            x = tl.where(shown, x, x & (-1 - (1 << (8 * i))))
    return x


@jit
def words_of_queries(x):
    """Returns the words of the rows of `load_quads`, [rows, 4]. Each bit occurs once, so a sum is a union."""
    ROWS: tl.constexpr = x.shape[0]
    EIGHTS: tl.constexpr = x.shape[1] // 2
    bit = (tl.arange(0, x.shape[1]) // 2 * 2)[None, :]
    of_even = ((x & 1) | ((x >> 7) & 2)) << bit
    of_odd = (((x >> 16) & 1) | ((x >> 23) & 2)) << bit
    of_even = tl.sum(tl.reshape(of_even, [ROWS, EIGHTS, 2]), axis=1)
    of_odd = tl.sum(tl.reshape(of_odd, [ROWS, EIGHTS, 2]), axis=1)
    return tl.reshape(tl.join(of_even, of_odd), [ROWS, 4])


@jit
def words_of_keys(x):
    """Returns the words of the keys of `load_quads` of TILE columns of queries, [4, keys]. The bits of four keys are
    moved together, a byte of each key's word at a time."""
    QUADS: tl.constexpr = x.shape[1]
    column = tl.arange(0, x.shape[0])
    x = tl.reshape(x << (column // 8 % 4 * 2 + column % 2)[:, None], [4, 4, 4, 2, QUADS])
    of_bytes = tl.sum(tl.sum(x, axis=3), axis=1)[:, :, :, None]  # [byte, word, four keys, 1]
    byte = tl.arange(0, 4)
    each = ((of_bytes >> (byte * 8)[None, None, None, :]) & 255) << (byte * 8)[:, None, None, None]
    return tl.reshape(tl.sum(each, axis=0), [4, QUADS * 4])


@jit(do_not_specialize=["num_heads", "row_blocks", "tiles", "flags_begin", "low", "high"])
def pack_mask_kernel(
    mask_ptr,
    words_ptr,
    queries_seen_ptr,
    keys_seen_ptr,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    num_heads,
    num_queries,
    num_keys,
    num_quads,
    row_blocks,
    tiles,
    flags_begin,
    low,
    high,
    BLOCK_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr,
):
    """Packs the words of BLOCK_ROWS rows and TILE columns of one head, and flags whether any bit is set. Rows are
    queries, or keys if TRANSPOSED; then it also flags, if given int8 tensors of zeros (batch, heads, queries) and
    (batch, heads, keys), the queries and the keys of visible pairs. Columns past the last one are hidden, and so are
    pairs outside the band `low <= key - query <= high`.

    Strides of the mask are in units of four keys if ALIGNED (`load_quads`), and `num_quads` is num_keys / 4. The
    numbers of queries, keys and fours may be specialized: loads of whole vectors need them.

    Bound: memory.
    """
    pid = tl.program_id(0)
    tile = pid % tiles
    block = pid // tiles % row_blocks
    item = (pid // tiles // row_blocks).to(tl.int64)
    if ALIGNED:
        mask_ptr = mask_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    mask_ptr += item // num_heads * stride_mask_b + item % num_heads * stride_mask_h
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    four = tl.arange(0, 4)
    if TRANSPOSED:
        queries = tile * TILE + tl.arange(0, TILE)
        x = load_quads(
            mask_ptr, queries, block * BLOCK_ROWS, stride_mask_m, stride_mask_n, num_queries, num_keys, num_quads, low,
            high, BLOCK_ROWS, ALIGNED, HAS_LOW, HAS_HIGH,
        )  # fmt: skip
        words = words_of_keys(x)
        to = ((item * tiles + tile) * num_keys + row)[None, :] * 4 + four[:, None]
        tl.store(words_ptr + to, words, mask=(row < num_keys)[None, :])
        if queries_seen_ptr is not None:  # other programs may store the same 1
            seen = tl.max((x != 0).to(tl.int32), axis=1)
            tl.store(queries_seen_ptr + item * num_queries + queries, seen.to(tl.int8), mask=seen != 0)
            seen = tl.max((words != 0).to(tl.int32), axis=0)
            tl.store(keys_seen_ptr + item * num_keys + row, seen.to(tl.int8), mask=seen != 0)
    else:
        x = load_quads(
            mask_ptr, row, tile * TILE, stride_mask_m, stride_mask_n, num_queries, num_keys, num_quads, low, high, TILE,
            ALIGNED, HAS_LOW, HAS_HIGH,
        )  # fmt: skip
        words = words_of_queries(x)
        to = ((item * tiles + tile) * num_queries + row)[:, None] * 4 + four[None, :]
        tl.store(words_ptr + to, words, mask=(row < num_queries)[:, None])
    flag = (item * row_blocks + block) * tiles + tile
    tl.store(words_ptr + flags_begin + flag, tl.max(tl.max((x != 0).to(tl.int32), axis=1), axis=0))


@jit(do_not_specialize=["num_rows", "num_keys", "tiles"])
def keys_seen_kernel(words_ptr, seen_ptr, num_rows, num_keys, tiles, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Flags the keys of one tile of packed words that some query sees: int8 (batch, heads, keys).

    Bound: latency: a program reads all rows of its tile, ROWS at a time.
    """
    pid = tl.program_id(0)
    words_ptr += pid.to(tl.int64) * num_rows * 4
    four = tl.arange(0, 4)
    union = tl.zeros([ROWS, 4], tl.int32)
    for first in range(0, num_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        union |= tl.load(words_ptr + rows[:, None] * 4 + four[None, :], mask=(rows < num_rows)[:, None], other=0)
    # Word q holds columns 8 j + 2 q + c in bit 2 j + c.
    bit = 2 * tl.arange(0, TILE // 8)[:, None] + tl.arange(0, 2)[None, :]
    each = (union[:, None, :, None] >> bit[None, :, None, :]) & 1
    seen = tl.reshape(tl.max(each, axis=0), [TILE])
    key = pid % tiles * TILE + tl.arange(0, TILE)
    tl.store(seen_ptr + (pid // tiles).to(tl.int64) * num_keys + key, seen.to(tl.int8), mask=key < num_keys)


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
    problem: AttentionProblem,
    mask: torch.Tensor,
    words: torch.Tensor,
    transposed: bool = False,
    seen: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> launch.Launch:
    """Returns the launch that packs `mask`, or its transpose, into `words`, of `packed(problem, transposed).size`. With
    the transpose, `seen` may be the flags of queries and of keys, zeros of `seen_shapes`."""
    p = packed(problem, transposed)
    low, high = problem.band(problem.seqlen_q, problem.seqlen_k)
    num_queries, num_keys = (problem.seqlen_q, p.rows) if transposed else (p.rows, problem.seqlen_k)
    strides = broadcast_strides(mask)
    # A launcher may be given tensors at other addresses, but not with another remainder of 16.
    aligned = strides[3] == 1 and mask.data_ptr() % 16 == 0 and not any(n % 4 for n in (num_keys, *strides[:3]))
    units = [stride // 4 for stride in strides[:3]] + [1] if aligned else strides
    return launch.Launch(
        kernel=pack_mask_kernel,
        grid=p.batch * p.heads * p.tiles * p.row_blocks,
        tensors=(mask, words, *seen),
        scalars=[
            *units, p.heads, num_queries, num_keys, num_keys // 4, p.row_blocks, p.tiles, p.flags_begin, low or 0,
            high or 0,
        ],
        constants={
            "BLOCK_ROWS": BLOCK_ROWS, "TILE": TILE_KEYS, "TRANSPOSED": transposed, "ALIGNED": aligned,
            "HAS_LOW": low is not None, "HAS_HIGH": high is not None,
        },
        options={"num_warps": 1, "num_stages": 1, "enable_fp_fusion": True},
    )  # fmt: skip


def specify_keys_seen(problem: AttentionProblem, words: torch.Tensor, seen: torch.Tensor) -> launch.Launch:
    """Returns the launch that flags in `seen`, int8 of `keys_seen_shape`, the keys that some query sees. `words` are
    those of `packed(problem)`."""
    p = packed(problem)
    return launch.Launch(
        kernel=keys_seen_kernel,
        grid=p.batch * p.heads * p.tiles,
        tensors=(words, seen),
        scalars=[p.rows, problem.seqlen_k, p.tiles],
        constants={"ROWS": 1 if p.rows == 1 else BLOCK_ROWS, "TILE": TILE_KEYS},
        options={"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True},
    )


def keys_seen_shape(problem: AttentionProblem) -> tuple[int, int, int]:
    """Returns the shape of the flags of `specify_keys_seen`: (batch, heads, keys). Batch and heads are the mask's."""
    p = packed(problem)
    return p.batch, p.heads, problem.seqlen_k


def seen_shapes(problem: AttentionProblem) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Returns the shapes of the flags of queries and of keys: (batch, heads, queries) and (batch, heads, keys). Batch
    and heads are the mask's; so are keys, unless position hides something."""
    p = packed(problem, transposed=True)
    return (p.batch, p.heads, problem.seqlen_q), (p.batch, p.heads, p.rows)
