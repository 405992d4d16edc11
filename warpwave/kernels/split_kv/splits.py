"""The number of splits of the keys, in closed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from warpwave.gpu import WGMMA_ROWS, Gpu
from warpwave.kernels.arguments import padded
from warpwave.kernels.split_kv import few_rows_host as few_rows
from warpwave.kernels.split_kv.config import Config, longest_steps, may_map, tiles
from warpwave.problem import DTYPE_BYTES, AttentionProblem, by_kind

FEW = 1 / 4  # tiles of rows per SM
# The following values were fitted to an H200's times on 2026-11-21 (docs/notes/serving.md).
MOST_BLOCKS_PER_SM = 3  # blocks of four warps
SATURATING_BLOCKS = 2  # blocks an SM needs, each with some 64 KB in flight, to saturate memory
# Blocks of 64 rows are bound by arithmetic: a step of two that share an SM takes 1.5 times as long as a step of one. 64
# tiles on 32,768 keys take 204 us with two splits and 154 with four (2026-11-29-h200-few-tiles-of-rows.json).
SATURATING_OF_64_ROWS = 4 / 3
START_STEPS = 3  # time to start a block and fill its pipeline, in steps
HIDDEN_START_STEPS = 0.5  # what remains of it while other blocks of the SM keep memory busy
SCATTERED_START_STEPS = 3  # in addition, if the page ids of many pages must be loaded first
UNEVEN = 0.45  # fraction of a small last wave's unused capacity that adds to the time after one full wave
DRIFT = 0.1  # of a block's steps: blocks that start together do not end together
MERGE_STEPS = 2.4
PARTS_PER_STEP = 30
MAX_SPLITS = 128
# Partial results of a tile whose bits must not depend on the batch: True for one tile of rows, as at decode, and False
# otherwise, where their bytes grow with the number of rows.
INVARIANT_PIECES = {True: 32, False: 4}


# Loads by tensor maps take no registers, and one block of large tiles keeps enough of them in flight for its SM.
MAPPED_BYTES = 128 * 1024  # bytes in flight on an SM that saturate memory
MAPPED_STEP_BYTES = 64 * 1024  # bytes per SM that take as long as a step of saturating blocks that load by pointers
# Fraction of the saturating blocks that keep memory as busy as all of them: first if few tiles of rows are cut into
# many splits, second if there are more tiles, with two warps each: 192 blocks were faster than 240 and 288 for 48 and
# 96 tiles.
MAPPED_ENOUGH, MAPPED_ENOUGH_SMALL = 0.9, 0.75
# Tiles of rows per SM from which blocks of two warps need no splits: with two they take 1.02 to 1.08 times as long in
# eight calls of up to 3 tiles per SM at head_dim 64 (2026-12-01-h200-narrow-decode.json).
WHOLE_OF_TWO_WARPS = 1.8
MAPPED_START_STEPS = 1.2
MAPPED_HIDDEN_START_STEPS = 0.1


class Pace(NamedTuple):
    """The speed of blocks, in steps. A step is the time in which a block processes `block_n` keys while `saturating`
    blocks run."""

    places: int
    saturating: int
    start: float
    hidden_start: float
    drift: float
    merge: float
    part_of_tile: float  # to merge one more part of a tile of rows, beyond 1 / PARTS_PER_STEP, if parts are large
    together: float  # if memory alone sets the pace and concurrent blocks end together: the fraction of the saturating
    # blocks that is enough; else 0


class Splits(NamedTuple):
    """A number of splits, and the arithmetic behind it."""

    num_splits: int
    reason: str


def blocks_with_rows(problem: AttentionProblem, config: Config) -> int:
    """Returns the number of blocks that have rows, before keys are split."""
    heads = problem.heads_together
    found = -(-problem.seqlen_q * heads // config.block_m) * problem.batch
    if problem.packed:  # the longest sequence is one of several: each may end in a partial tile
        found = min(found, problem.total_q * heads // config.block_m + problem.batch)
    return max(1, found * (problem.num_heads_q // heads))


def scattered(problem: AttentionProblem, config: Config) -> bool:
    """Returns whether the keys of a tile lie in several pages."""
    return problem.page_size > 0 and problem.page_size % config.block_n != 0


def blocks_per_sm(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns the blocks resident on an SM, limited by registers and shared memory."""
    if config.roles:
        return few_rows.blocks_per_sm(problem, gpu, config)
    by_registers = 2 if config.block_m > 32 else MOST_BLOCKS_PER_SM
    needed = smem_expected(problem, config)
    return max(1, min(by_registers * 4 // config.num_warps, gpu.smem_per_block_bytes // needed))


def smem_expected(problem: AttentionProblem, config: Config) -> int:
    """Returns approximately the shared memory of 16-bit tiles: tiles in flight, Q, and probabilities of fewer rows than
    a wgmma has (compiled for sm_90)."""
    if config.roles:
        return few_rows.smem_bytes(problem, config.block_m, config.block_n, config.num_stages)
    in_flight = config.num_stages - 1 if config.block_m < 64 else config.num_stages
    needed = config.block_n * (padded(problem.head_dim) + padded(problem.head_dim_v)) * max(1, in_flight)
    of_rows = config.block_m * (padded(problem.head_dim) + (config.block_n if config.block_m < WGMMA_ROWS else 0))
    return DTYPE_BYTES[problem.dtype_of_k] * needed + DTYPE_BYTES[problem.dtype] * of_rows + 1024


def tiles_in_flight(config: Config) -> int:
    """Returns the tiles of K and V that a block keeps in flight by tensor maps."""
    return config.num_stages if config.roles else max(1, config.num_stages - 1)


@by_kind
def pace(problem: AttentionProblem, gpu: Gpu, config: Config, few: bool) -> Pace:
    """Returns the constants fitted to measured times, for loads by pointers or by tensor maps. Tiles of 64 rows are
    bound by arithmetic and use the pointer constants in either case.

    Args:
        few: whether there are at most `FEW` tiles of rows per SM.
    """
    sms, blocks = gpu.assumed_sms, blocks_per_sm(problem, gpu, config)
    # Partial results of 64 rows are as large as tiles of keys, those of 32 half as large, and take as long to write and
    # to read as other bytes. With 2,048 keys for 8 tiles of 64 rows, 16 splits take 11.2 us at head_dim 128 and 14.0 at
    # 256, and 32 splits 14.8 and 19.8 (2026-11-29-h200-few-tiles-of-rows.json).
    of_tile = 2 * 4 * config.block_m * problem.head_dim_v / (sms * MAPPED_STEP_BYTES) if config.block_m > 16 else 0.0
    if not (config.by_map and may_map(problem, gpu, config)) or config.block_m >= 64:
        more = SCATTERED_START_STEPS if scattered(problem, config) and config.block_m < 64 else 0
        # A block of two warps with tiles of 8 bits has half of the bytes in flight, so twice as many blocks saturate
        # memory: 1 x 65,536 keys with factors of tokens take 52 us with 66 splits and 61 us with 132.
        saturating: float = SATURATING_BLOCKS * (2 if problem.dtype_kv and config.num_warps == 2 else 1)
        if config.block_m >= WGMMA_ROWS:
            saturating = SATURATING_OF_64_ROWS
        return Pace(
            sms * blocks, round(sms * min(blocks, saturating)), START_STEPS + more, HIDDEN_START_STEPS + more, DRIFT,
            MERGE_STEPS, of_tile, 0.0,
        )  # fmt: skip
    tile = config.block_n * (padded(problem.head_dim) + padded(problem.head_dim_v)) * DTYPE_BYTES[problem.dtype]
    saturating = min(blocks, max(1, round(MAPPED_BYTES / (tile * tiles_in_flight(config)))))
    step = saturating * tile / MAPPED_STEP_BYTES
    return Pace(
        sms * blocks, sms * saturating, MAPPED_START_STEPS / step, MAPPED_HIDDEN_START_STEPS / step, 0.0,
        MERGE_STEPS / step, of_tile / step,
        MAPPED_ENOUGH_SMALL if config.num_warps == 2 and not few else MAPPED_ENOUGH,
    )  # fmt: skip


def choose_splits(problem: AttentionProblem, gpu: Gpu, config: Config) -> Splits:
    """Returns the number of splits with the shortest estimated time, in closed form.

    `places` blocks are resident at once; a smaller number, `saturating`, saturates memory. With at least that many,
    time is proportional to the number of blocks; with fewer, to the steps of one block. Too few splits leave SMs idle.
    A last wave of few blocks leaves memory idle, less so after more full waves. Many splits cost starts and merging:

        steps(S) = max(1, first / saturating) * (ceil(longest / S) + start) + merge(S)
                   + (blocks * S - first) / saturating * (ceil(longest / S) + hidden start) + uneven end

    `longest` is the number of steps of the tile that sees most keys. `first` is the number of blocks of the first wave,
    equal on every SM.
    """
    sms, blocks, longest = _sizes(problem, gpu, config)
    number, of = _number(problem, gpu, config), pace(problem, gpu, config, blocks <= FEW * sms)
    reason = (
        f"{blocks} tiles of rows for {of.places} resident blocks on {sms} SMs, "
        f"{longest} step{'s' if longest != 1 else ''} of {config.block_n} keys each: "
    )
    if config.roles:
        blocks *= number
        why = "one or two per SM nearly saturate memory"
        if number > 1 and blocks > of.places:
            why = f"in {blocks / of.places:.1f} waves they end together"
        return Splits(number, f"{reason}{blocks} blocks; {why}")
    steps, alone = (_steps(s, config.pieces, blocks, longest, sms, of) for s in (number, 1))
    reason += f"about {steps:.0f} steps in total, including starts and merge"
    return Splits(number, reason + (f"; with num_splits = 1, {alone:.0f}" if number > 1 else ""))


def _sizes(problem: AttentionProblem, gpu: Gpu, config: Config) -> tuple[int, int, int]:
    """Returns the number of SMs, of tiles of rows, and of steps of the longest of these."""
    blocks, longest = blocks_with_rows(problem, config), max(1, longest_steps(problem, config))
    return gpu.assumed_sms, blocks, longest


def _number(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns the number of splits."""
    sms, blocks, longest = _sizes(problem, gpu, config)
    if config.roles:
        return few_rows.num_splits(problem, blocks, longest, config.block_n, sms)
    if config.by_map and config.num_warps == 2 and not config.pieces and blocks >= WHOLE_OF_TWO_WARPS * sms:
        return 1
    return _soonest(config.pieces, blocks, longest, sms, pace(problem, gpu, config, blocks <= FEW * sms))


def _steps(s: int, pieces: int, blocks: int, longest: int, sms: int, of: Pace) -> float:
    """Returns steps(S) of `choose_splits`."""
    places, saturating, start, hidden_start, drift, merge, part_of_tile, together = of
    each = -(-longest // s)
    waves, rest = divmod(blocks * s, places)
    if together:
        first = min(max(blocks * s, together * saturating), places)
        total = first / saturating * (each + start)
    else:
        first = min(-(-blocks * s // sms) * sms, places)  # an SM that has one more block ends last
        total = max(1.0, first / saturating) * (each + start)
    total += max(0, blocks * s - places) / saturating * (each + hidden_start)
    if waves and rest:
        total += (UNEVEN / waves * max(0, saturating - rest) / saturating + drift) * each
    return total + (merge + (pieces or s) * (1 / PARTS_PER_STEP + blocks * part_of_tile) if s > 1 or pieces else 0)


@lru_cache(4096)
def _soonest(pieces: int, blocks: int, longest: int, sms: int, of: Pace) -> int:
    """Returns the smallest number of splits with the fewest steps.

    While all blocks run at once, a number that does not shorten the splits is skipped: every other term grows with it.
    With more blocks, the search ends when a lower bound of steps(S), with even waves and exact splits, exceeds the
    fewest steps.
    """
    places, saturating = of.places, of.saturating
    best, fewest, before = 1, _steps(1, pieces, blocks, longest, sms, of), longest
    full = places / saturating if of.together else max(1.0, places / saturating)
    least = full * of.start + blocks * longest / saturating + of.merge
    for s in range(2, min(pieces or MAX_SPLITS, longest) + 1):
        each = -(-longest // s)
        beyond = blocks * s - places
        if beyond < 0 and each == before:
            continue
        merging = (pieces or s) * (1 / PARTS_PER_STEP + blocks * of.part_of_tile)
        if beyond >= 0 and least + beyond / saturating * of.hidden_start + merging > fewest:
            break
        before, steps = each, _steps(s, pieces, blocks, longest, sms, of)
        if steps < fewest:
            best, fewest = s, steps
    return best


def with_splits(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """Returns the tiling with the keys split for this problem."""
    if problem.batch_invariant:
        # The longest sequence of a packed call must not affect the others.
        config = changed(config, pieces=INVARIANT_PIECES[not problem.packed and tiles(problem, config) == 1])
    return changed(config, num_splits=_number(problem, gpu, config))


# `dataclasses.replace`, which computes each result once.
changed: Callable[..., Config] = lru_cache(4096)(replace)
