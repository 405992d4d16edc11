"""The bytes that `eager` moves and the operations that it computes for one problem.

Its tiles are counted by arithmetic progressions, as in `cost.walk`, with one difference: a block of rows begins its
tiles of keys at the first key that it sees.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from warpwave.gpu import Gpu
from warpwave.kernels.cost import Cost, in_turn, progressions
from warpwave.problem import DTYPE_BYTES, AttentionProblem, Band

if TYPE_CHECKING:
    from warpwave.kernels.eager import Config

# torch launches per tile except products and passes over all its scores: maximum, shift (compare and select), rescale
# (subtract, exponential), total and out (each multiply and add).
STEPS_OF_TILE = 9
STEPS_OF_BLOCK = 12  # three sums initialized; out and log-sum-exp finished, rounded and stored
# Two ranges and their difference, the hidden pairs (init, compare, join); copy, fill, compare and any; V without it.
PASSES_OF_EDGE = 12


class Tiles(NamedTuple):
    """The tiles of some blocks of rows, over one head of one sequence.

    Attributes:
        blocks: blocks of rows.
        tiles: (block of rows, tile of keys) pairs that position does not hide entirely.
        cut: the pairs among `tiles` in which it hides something.
        keys: keys of all tiles, counted once in each tile.
        rows: rows of all tiles, counted once in each tile.
        scores: rows times keys, of all tiles.
        cut_scores: those of cut tiles.
    """

    blocks: int = 0
    tiles: int = 0
    cut: int = 0
    keys: int = 0
    rows: int = 0
    scores: int = 0
    cut_scores: int = 0


def tiles_of_sequence(band: Band, seqlen_q: int, seqlen_k: int, block_m: int, block_n: int) -> Tiles:
    """Counts the tiles of one sequence.

    Args:
        band: what position shows, as in `AttentionProblem.band`.
        seqlen_q, seqlen_k: queries and keys of the sequence.
        block_m, block_n: queries and keys of a tile.
    """
    full, rest = divmod(seqlen_q, block_m)
    total = [0] * len(Tiles._fields)
    if rest:
        total = list(_of_block(band, full * block_m, rest, seqlen_k, block_n))
    period = block_n // math.gcd(block_m, block_n)
    for first, last, length in progressions(full, period, _irregular(band, seqlen_k, block_m, block_n)):
        begin, end = (_of_block(band, block * block_m, block_m, seqlen_k, block_n) for block in (first, last))
        for i, (a, b) in enumerate(zip(begin, end, strict=True)):
            total[i] += length * (a + b) // 2
    return Tiles(*total)


def _irregular(band: Band, seqlen_k: int, block_m: int, block_n: int) -> list[range]:
    """Returns the blocks of rows near which an edge of the mask starts or stops to have an effect."""
    low, high = band
    rows: list[int] = []  # the first rows of blocks at which an expression of `_of_block` changes sign
    if low is not None:
        widest = -(-(block_m - 1) // block_n) * block_n  # keys of the tiles that a lower edge cuts
        rows += (-low, 1 - block_m - low, seqlen_k - low, seqlen_k - low - widest)
    if high is not None:
        rows += (-high - block_m, -high - 1, seqlen_k - high - block_m, seqlen_k - high - 1)
    return [range(row // block_m - 1, row // block_m + 2) for row in rows]


def _of_block(band: Band, first: int, rows: int, seqlen_k: int, block_n: int) -> Tiles:
    """Counts the tiles of the block of rows that begins at row `first`."""
    low, high = band
    if low is not None and high is not None and low > high:
        return Tiles(blocks=1)
    begin = 0 if low is None else max(0, first + low)
    end = seqlen_k if high is None else min(seqlen_k, first + rows + high)
    keys = max(0, end - begin)
    tiles = -(-keys // block_n)
    # The lower edge cuts the first tiles, down to the begin of the last row's keys; the upper edge cuts the last ones,
    # from the end of the first row's keys. The tiles in between show every pair.
    cut_low = 0 if low is None else max(0, -(-(first + rows - 1 + low - begin) // block_n))
    shown = seqlen_k if high is None else first + high + 1
    before_high = tiles if end <= shown else max(0, (shown - begin) // block_n)
    whole = max(0, before_high - cut_low)
    whole_keys = whole * block_n
    if whole and before_high == tiles:  # the last tile may be short
        whole_keys -= tiles * block_n - keys
    return Tiles(1, tiles, tiles - whole, keys, rows * tiles, rows * keys, rows * (keys - whole_keys))


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns the cost of the operations, each one launch: products, passes over all scores of a tile, and additional
    launches per tile and per block of rows."""
    if problem.is_quantized:
        return _of_quantized(problem, gpu, config)
    scores = tile_reads = tiles = blocks = cut = cut_tiles = acc_rows = 0
    for (seqlen_q, seqlen_k), times in problem.counted_items().items():
        band = problem.band(seqlen_q, seqlen_k)
        each = times if problem.packed else 1  # a dense call processes its sequences together
        found = tiles_of_sequence(band, seqlen_q, seqlen_k, config.block_m, config.block_n)
        blocks += each * found.blocks
        tiles += each * found.tiles
        cut_tiles += each * found.cut
        scores += times * problem.num_heads_q * found.scores
        cut += times * problem.num_heads_q * found.cut_scores
        acc_rows += times * problem.num_heads_q * found.rows
        tile_reads += times * problem.num_heads_kv * found.keys
    # A cache of 8-bit numbers is gathered in float32.
    size, rows = 4 if problem.dtype_kv else DTYPE_BYTES[problem.dtype], problem.rows * problem.num_heads_q
    width, width_v, group = problem.head_dim, problem.head_dim_v, problem.num_heads_q // problem.num_heads_kv
    workspace = 3 * 4 * min(scores, problem.batch * problem.num_heads_q * config.block_m * config.block_n)
    operands = size * (acc_rows * width + tile_reads * (width + group * width_v))
    # A product needs one batch stride: heads of several sequences, and V of a group, are copied.
    copies = 2 * (problem.batch > 1 and not problem.packed) + (group > 1 or (problem.batch > 1 and not problem.packed))
    products = Cost(
        blocks=0,
        flops=2 * scores * (width + width_v),
        exponentials=0,
        read_bytes=operands * (2 if copies else 1) + size * scores,
        write_bytes=4 * scores + 4 * acc_rows * width_v + (operands if copies else 0),
        scratch_bytes=(4 + size) * scores,
        launches=(2 + copies) * tiles,
    )
    # Scale, maximum, subtract the maximum, exponential, sum, 16 bits; at an edge also fill, compare and search.
    narrow = size < 4
    passes = Cost(
        blocks=0,
        flops=0,
        exponentials=scores,
        read_bytes=(24 if narrow else 20) * scores + 14 * cut,
        write_bytes=(14 if narrow else 12) * scores + 9 * cut,
        launches=(5 + narrow) * tiles + (PASSES_OF_EDGE + 2 * (problem.window_size[0] >= 0)) * cut_tiles,
    )
    passes = replace(passes, scratch_bytes=passes.read_bytes + passes.write_bytes)
    beside = Cost(
        blocks=0,
        flops=0,
        exponentials=0,
        read_bytes=12 * acc_rows * width_v + 14 * rows * width_v,
        write_bytes=8 * acc_rows * width_v + 8 * rows * width_v + 4 * rows,
        launches=STEPS_OF_TILE * tiles + STEPS_OF_BLOCK * blocks,
    )
    loop = "few rows" if problem.seqlen_q <= 16 else "float32" if problem.dtype == "float32" else ""
    return in_turn((products, passes, beside), workspace, loop)


def _of_quantized(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns the cost of a quantized call: of the float32 call on the numbers, and of making them."""
    plain = replace(problem, dtype="float32", dtype_v=None, dtype_out=None, descale_blocks=None)
    attend = cost(plain, gpu, config)
    keys = (problem.total_k if problem.packed else problem.batch * problem.seqlen_k) * problem.num_heads_kv
    queries = problem.rows * problem.num_heads_q
    elements = queries * problem.head_dim + keys * (problem.head_dim + problem.head_dim_v)
    read = queries * problem.head_dim * DTYPE_BYTES[problem.dtype] + keys * problem.bytes_of_key
    outs = queries * problem.head_dim_v
    # Each of q, k and v is converted, and then multiplied by its factors; out is converted.
    convert = Cost(
        blocks=0,
        flops=0,
        exponentials=0,
        read_bytes=read + 4 * elements + 4 * outs,
        write_bytes=8 * elements + outs * DTYPE_BYTES[problem.dtype_of_out],
        workspace_bytes=4 * (elements + outs),
        scratch_bytes=12 * elements + 4 * outs,
        launches=7,
    )
    return in_turn((convert, *attend.parts), convert.workspace_bytes + attend.workspace_bytes)
