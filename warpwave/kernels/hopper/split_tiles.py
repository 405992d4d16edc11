"""How many blocks of hopper/flash_fwd split the keys of a tile, by an estimate of their time, and which calls it
computes faster than `split_kv`. Holds no device code."""

from __future__ import annotations

from typing import NamedTuple

from warpwave.gpu import WGMMA_ROWS, Gpu
from warpwave.kernels.hopper.shared_tiles import heads_of_tile, query_tiles
from warpwave.problem import AttentionProblem, by_kind

# In a microsecond: operations of an SM, elements of K and V that it loads in 16 bits or converts from 8, and bytes of
# partial results that a GPU writes and reads. Fitted to 124 calls in 16 bits on an H200, whose default configs take
# 1.01 times as long as the fastest tried, in the geometric mean (2026-12-01-h200-split-tiles.json). The rate of
# conversion is that of two calls at head_dim 64, with factors of heads and of tokens, in which one block uses an SM
# (2026-12-01-h200-packed-and-8-bit.json).
FLOPS_PER_US, LOADED_PER_US, WIDENED_PER_US, MERGED_PER_US = 5.2e6, 30e3, 12e3, 3.5e6
# What a block takes beside its steps, in steps: for its first loads and for out; partial results have twice as many
# bytes, and their stores do not overlap.
START, START_OF_SPLIT = 1, 3
MERGE_US = 4  # of the second launch
LEAST_KEYS = 512  # of a split
MOST_WAVES, MOST_SPLITS = 4, 64
LEAST_GAIN = 1.1
# Where hopper/flash_fwd is faster than split_kv: so many keys of all tiles of 64 rows for each SM. The first number is
# for full tiles that nearly fill the SMs, and for caches of 8 bits; the others are for other calls whose keys can be
# split, above head_dim 64 and up to it.
LEAST_SHARE_OF_SMS, LEAST_KEYS_PER_SM = 0.75, 480
LEAST_KEYS_OF_FEW_WIDE, LEAST_KEYS_OF_FEW_NARROW = 960, 1200
FEWEST_ROWS = 17  # of a sequence; with fewer, most of a tile is empty


class Tile(NamedTuple):
    """The tile of a call whose keys are split: see `flash_fwd.config.Config`."""

    block_m: int
    block_n: int
    num_stages: int
    blocks_per_sm: int


class Splitting(NamedTuple):
    """How the keys of a call are split.

    Attributes:
        tile, num_splits: of the blocks.
        time_us, whole_us: the estimated time, and that without splits.
    """

    tile: Tile
    num_splits: int
    time_us: float
    whole_us: float


@by_kind
def can_split(problem: AttentionProblem) -> bool:
    """Returns whether the keys of a tile can be split."""
    is_unmasked = problem.mask_shape is None and problem.bias_shape is None
    is_16_bits = problem.dtype != "float32" and not problem.is_quantized
    return is_unmasked and is_16_bits and not problem.dropout_p and not problem.batch_invariant


@by_kind
def hides_keys(problem: AttentionProblem) -> bool:
    """Returns whether position hides many keys from a few queries at the end of a sequence."""
    has_window = problem.window_size != (-1, -1)
    return has_window or (problem.causal is not None and problem.causal.alignment == "top_left")


@by_kind
def _tiles(problem: AttentionProblem) -> tuple[Tile, Tile] | None:
    """Returns the tile for up to 64 rows a sequence, and for more; None if keys of such calls are not split: a window
    leaves few keys, and caches of 8 bits were not tried above head_dim 128."""
    widest, is_of_8_bits = max(problem.head_dim, problem.head_dim_v), problem.dtype_kv is not None
    if not can_split(problem) or hides_keys(problem) or widest > (128 if is_of_8_bits else 256):
        return None
    if is_of_8_bits:
        return (Tile(64, 64, 3, 1), Tile(128, 64, 3, 1)) if widest > 64 else (Tile(64, 64, 3, 2), Tile(128, 128, 2, 1))
    if widest > 160:
        return Tile(64, 64, 2, 1), Tile(128, 64, 2, 1)
    if widest > 128:
        return Tile(64, 64, 2, 1), Tile(128, 128, 2, 1)
    if widest > 64:
        return Tile(64, 128, 2, 1), Tile(128, 128, 3, 1)
    return Tile(64, 128, 2, 2), Tile(128, 128, 3, 1)


def splitting(problem: AttentionProblem, gpu: Gpu, whole: Tile) -> Splitting | None:
    """Returns how the keys of a call are split, by the least estimated time; None if they are not, because that is not
    LEAST_GAIN times as fast as one block for each of the tiles `whole`."""
    found = _tiles(problem) if _has_keys_to_split(problem) else None
    if found is None:
        return None
    heads, sms = heads_of_tile(problem), gpu.assumed_sms
    tile = found[problem.seqlen_q * heads > WGMMA_ROWS]
    tiles, places = max(1, query_tiles(problem, tile.block_m, heads)), sms * tile.blocks_per_sm
    if 2 * tiles > MOST_WAVES * places:  # for two splits
        return None
    most = min(MOST_SPLITS, problem.seqlen_k // LEAST_KEYS)
    numbers = {max(2, min(most, waves * places // tiles)) for waves in range(1, MOST_WAVES + 1)}
    us, splits = min((_time_us(problem, sms, tile, tiles, splits), splits) for splits in numbers)
    whole_us = _time_us(problem, sms, whole, query_tiles(problem, whole.block_m, heads), 1)
    return Splitting(tile, splits, us, whole_us) if whole_us >= LEAST_GAIN * us else None


def _has_keys_to_split(problem: AttentionProblem) -> bool:
    """Returns whether there are keys for two splits, and all tiles see nearly as many."""
    is_even = problem.causal is None or 2 * problem.seqlen_q <= problem.seqlen_k
    return problem.seqlen_k >= 2 * LEAST_KEYS and is_even


def outruns_split_kv(problem: AttentionProblem, gpu: Gpu) -> bool:
    """Returns whether hopper/flash_fwd is faster than `split_kv`, if both run a call.

    On an H200, in 16 bits (2026-12-01-h200-split-tiles.json), hopper/flash_fwd is 0.87 to 3.1 times as fast in 64 calls
    for which this holds, 1.32 in the geometric mean, and 0.36 to 1.28 times in 86 others, 0.71 in the mean. In 119
    calls drawn afterwards, which `split_kv` computed before, it is 0.92 to 2.6 times as fast, 1.24 in the mean. On
    caches of 8 bits (2026-12-01-h200-packed-and-8-bit.json) it is 0.69 to 2.6 times as fast in 47 calls, 1.29 in the
    mean, four of which it computed before without splits.
    """
    heads, sms = heads_of_tile(problem), gpu.assumed_sms
    rows, tiles = problem.rows * heads // max(1, problem.batch), query_tiles(problem, WGMMA_ROWS, heads)
    fills = tiles >= LEAST_SHARE_OF_SMS * sms
    if rows >= WGMMA_ROWS and fills:
        return tiles * problem.seqlen_k >= LEAST_KEYS_PER_SM * sms
    # In a batch of prompts and decoding sequences the mean of the rows says little.
    shares_all = heads * problem.num_heads_kv == problem.num_heads_q and not problem.packed
    if rows < (FEWEST_ROWS if shares_all else WGMMA_ROWS) or _tiles(problem) is None:
        return False
    if not fills and not _has_keys_to_split(problem):
        return False
    of_few = LEAST_KEYS_OF_FEW_WIDE if max(problem.head_dim, problem.head_dim_v) > 64 else LEAST_KEYS_OF_FEW_NARROW
    return tiles * problem.seqlen_k >= (of_few if problem.dtype_kv is None else LEAST_KEYS_PER_SM) * sms


def _time_us(problem: AttentionProblem, sms: int, tile: Tile, tiles: int, splits: int) -> float:
    """Returns the estimated time of a call with so many tiles of rows."""
    width = problem.head_dim + problem.head_dim_v
    of_keys = LOADED_PER_US if problem.dtype_kv is None else WIDENED_PER_US
    step = tile.block_n * width * max(2 * tile.block_m / FLOPS_PER_US, 1 / of_keys)
    blocks = tiles * splits
    # Blocks that share an SM take longer, but not if each has one of its own.
    turns = -(-blocks // (sms * tile.blocks_per_sm)) * min(tile.blocks_per_sm, -(-blocks // sms))
    if splits == 1:
        return turns * (problem.seqlen_k / tile.block_n + START) * step
    time = turns * (problem.seqlen_k / tile.block_n / splits + START_OF_SPLIT) * step
    partials = 8 * splits * problem.rows * problem.num_heads_q * problem.head_dim_v
    return time + MERGE_US + partials / MERGED_PER_US
