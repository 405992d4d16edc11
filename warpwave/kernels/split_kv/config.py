"""Configs of `split_kv`: their values, the number of splits of the keys, and the choice of the default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from warpwave.gpu import Gpu
from warpwave.kernels.arguments import dot_precision, padded, tile_widths
from warpwave.kernels.cost import Walk, bytes_per_score, walk
from warpwave.kernels.split_kv import few_rows_host as few_rows
from warpwave.problem import DTYPE_BYTES, AttentionProblem, by_kind
from warpwave.runtime.triton_or_stub import INTERPRETED


@dataclass(frozen=True)
class Config:
    """Tile shape, launch shape, and how the keys are split.

    Args:
        block_m: rows of a tile (queries times the query heads of a kv head), a power of two, at least 16.
        block_n: keys per step, a power of two, at least 16.
        num_warps: warps of a program, a power of two.
        num_stages: K/V tiles in flight.
        num_splits: number of splits of the keys of a tile of rows; one block per split.
        pieces: partial results of a tile of rows; 0 for one per split. Otherwise its keys are cut into at most this
            many pieces of equal length. A split is a number of whole pieces, and each piece stores its own result, so
            sums and bits do not depend on the number of splits.
        by_map: load K and V by tensor maps (TMA, sm_90 or newer, 16 bits) if a tile lies in one page. Tiles at the
            edges of the visible keys, and tensors that no map can describe, are loaded by pointers.
        kv_heads: kv heads whose rows and keys share a tile, a power of two that divides the call's number of kv heads.
            Their keys, adjacent in memory, are loaded together, and their scores come from one product, which is mostly
            padding otherwise if rows are few.
        launched_ahead: start before the preceding launch in the stream ends, and wait in the kernel (sm_90 or newer).
        roles: warp-specialize on Hopper, for up to 16 rows: one warp loads keys by tensor maps, one copy for each page
            of 16 keys or more, and a warpgroup multiplies them (few_rows_device.py). `num_stages` tiles of K and of V
            are in flight.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int = 1
    pieces: int = 0
    launched_ahead: bool = False
    by_map: bool = False
    kv_heads: int = 1
    roles: bool = False

    def __post_init__(self) -> None:
        for name, least in (("block_m", 16), ("block_n", 16), ("num_warps", 1), ("kv_heads", 1)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(f"{name} is {value}; it must be a power of two, at least {least}")
        for name in ("num_stages", "num_splits"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.pieces < 0 or (self.pieces and self.pieces < max(2, self.num_splits)):
            raise ValueError(f"pieces is {self.pieces}; it must be 0, or at least 2 and num_splits = {self.num_splits}")
        if self.pieces and self.kv_heads > 1:
            raise ValueError(f"kv_heads is {self.kv_heads} with pieces = {self.pieces}; pieces need kv_heads = 1")
        has = (self.block_m, self.num_warps, self.kv_heads, self.pieces, self.by_map)
        if self.roles and (has != (few_rows.ROWS, 4, 1, 0, True) or not 64 <= self.block_n <= 256):
            raise ValueError(
                f"{self} has roles; roles need tiles of {few_rows.ROWS} x 64, 128 or 256 on 4 warps, by_map, one kv "
                "head, and no pieces"
            )


# Sizes ----------------------------------------------------------------------------------------------------------------


@by_kind
def smem_bytes(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns an upper bound on the shared memory of one block; tests compare it with what every target compiles to."""
    if config.roles:
        return few_rows.smem_bytes(problem, config.block_n, config.num_stages)
    size, arithmetic = DTYPE_BYTES[problem.dtype], dot_precision(problem, gpu)
    block_d, block_dv = tile_widths(problem, gpu, config.block_m)
    q = size * config.block_m * block_d
    p = size * config.block_m * columns(config)
    kv = size * columns(config) * (block_d + block_dv)
    # Page ids of the next tile change layout. Barriers and reductions over warps take the rest.
    more = 1024 + (16 * columns(config) if problem.page_size else 0)
    more += 8 * config.block_m * config.num_warps
    if config.pieces:  # their accumulators are stored inside the loop and need a layout change in shared memory
        more += 4 * config.block_m * block_dv
    if problem.mask_shape is not None or problem.bias_shape is not None:
        kv += config.block_m * columns(config) * bytes_per_score(problem)
        p += size * columns(config) * block_dv  # V goes through registers, which clear what no row sees, and back
    if gpu.arch == "gfx950":
        return max(q, config.num_stages * kv * 17 // 16) + p + more
    if gpu.vendor == "amd":
        return max(q, max(1, config.num_stages - 1) * kv) + p + more
    if problem.dtype == "float32" and arithmetic != "ieee":
        return q + p + config.num_stages * kv + max(q, kv) + more  # the parts of an operand coexist
    return q + p + config.num_stages * kv + more


def columns(config: Config) -> int:
    """Returns the keys of all kv heads of a tile; every row has one score for each."""
    return config.block_n * config.kv_heads


def tile_heads(problem: AttentionProblem, config: Config) -> int:
    """Returns the query heads whose rows a tile holds."""
    return problem.num_heads_q // problem.num_heads_kv * config.kv_heads


def head_groups(problem: AttentionProblem, config: Config) -> int:
    """Returns the number of groups of kv heads; each group has its own tiles."""
    return problem.num_heads_kv // config.kv_heads


def tiles(problem: AttentionProblem, config: Config) -> int:
    """Returns the tiles of rows that the longest sequence has for one group of kv heads."""
    return -(-problem.seqlen_q * tile_heads(problem, config) // config.block_m)


def num_parts(config: Config) -> int:
    """Returns the partial results of a tile of rows; more than one are merged."""
    return config.pieces or config.num_splits


def one_step(problem: AttentionProblem, config: Config) -> bool:
    """Returns whether a split has at most one tile of keys, so that Q can be loaded together with it, once."""
    alone = config.pieces == 0 and config.kv_heads == 1 and not config.roles and problem.dtype != "float32"
    return alone and config.num_stages > 1 and -(-problem.seqlen_k // config.block_n) <= config.num_splits


def steps_over_keys(problem: AttentionProblem, config: Config) -> Walk:
    """Counts the key steps of all tiles of rows, before the keys are split."""
    return walk(problem, config.block_m, config.block_n, tile_heads(problem, config))


def longest_steps(problem: AttentionProblem, config: Config) -> int:
    """Counts the key steps of the tile of rows that sees most keys. Without a left window that is the last tile of the
    longest sequence, which sees keys from the first one on."""
    if problem.window_size[0] >= 0 or problem.lengths is not None or not problem.batch:
        return steps_over_keys(problem, config).longest
    seqlen_q, seqlen_k = problem.seqlen_q, problem.seqlen_k
    if problem.packed:  # as in `AttentionProblem.items`, whose first sequence is the longest
        seqlen_q, seqlen_k = -(-problem.total_q // problem.batch), -(-problem.total_k // problem.batch)
    right = problem.window_size[1]
    if problem.causal is not None and problem.causal.alignment == "top_left":
        high = 0 if right < 0 else min(0, seqlen_k - seqlen_q + right)
        seqlen_k = min(seqlen_k, seqlen_q + high)
    return max(0, -(-seqlen_k // config.block_n)) if seqlen_q else 0


# Splits ---------------------------------------------------------------------------------------------------------------

UNKNOWN_SMS = 132  # assumed if no GPU is given; that of an H100 and an H200
# The following values were fitted to an H200's times on 2026-11-21 (docs/notes/serving.md).
MOST_BLOCKS_PER_SM = 3  # blocks of four warps
SATURATING_BLOCKS = 2  # blocks an SM needs, each with some 64 KB in flight, to saturate memory
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
    parts_per_step: float
    together: float  # if memory alone sets the pace and concurrent blocks end together: the fraction of the saturating
    # blocks that is enough; else 0


class Splits(NamedTuple):
    """A number of splits, and the arithmetic behind it."""

    num_splits: int
    reason: str


def blocks_with_rows(problem: AttentionProblem, config: Config) -> int:
    """Returns the number of blocks that have rows, before keys are split."""
    heads = problem.num_heads_q // problem.num_heads_kv * config.kv_heads
    found = -(-problem.seqlen_q * heads // config.block_m) * problem.batch
    if problem.packed:  # the longest sequence is one of several: each may end in a partial tile
        found = min(found, problem.total_q * heads // config.block_m + problem.batch)
    return max(1, found * (problem.num_heads_kv // config.kv_heads))


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
    """Returns approximately the shared memory of 16-bit tiles: tiles in flight, Q and probabilities (compiled for
    sm_90)."""
    if config.roles:
        return few_rows.smem_bytes(problem, config.block_n, config.num_stages)
    in_flight = config.num_stages - 1 if config.block_m < 64 else config.num_stages
    needed = columns(config) * (padded(problem.head_dim) + padded(problem.head_dim_v)) * max(1, in_flight)
    needed += config.block_m * (padded(problem.head_dim) + columns(config))
    return DTYPE_BYTES[problem.dtype] * needed + 1024


def tiles_in_flight(config: Config) -> int:
    """Returns the tiles of K and V that a block keeps in flight by tensor maps."""
    return config.num_stages if config.roles else max(1, config.num_stages - 1)


def pace(problem: AttentionProblem, gpu: Gpu, config: Config) -> Pace:
    """Returns the constants fitted to measured times, for loads by pointers or by tensor maps. Tiles of 64 rows are
    bound by arithmetic and use the pointer constants in either case."""
    sms, blocks = gpu.num_sms or UNKNOWN_SMS, blocks_per_sm(problem, gpu, config)
    if not (config.by_map and may_map(problem, gpu, config)) or config.block_m >= 64:
        more = SCATTERED_START_STEPS if scattered(problem, config) and config.block_m < 64 else 0
        return Pace(
            sms * blocks, sms * min(blocks, SATURATING_BLOCKS), START_STEPS + more, HIDDEN_START_STEPS + more, DRIFT,
            MERGE_STEPS, PARTS_PER_STEP, 0.0,
        )  # fmt: skip
    tile = columns(config) * (padded(problem.head_dim) + padded(problem.head_dim_v)) * DTYPE_BYTES[problem.dtype]
    saturating = min(blocks, max(1, round(MAPPED_BYTES / (tile * tiles_in_flight(config)))))
    step = saturating * tile / MAPPED_STEP_BYTES
    many = config.num_warps == 2 and blocks_with_rows(problem, config) > FEW * sms
    return Pace(
        sms * blocks, sms * saturating, MAPPED_START_STEPS / step, MAPPED_HIDDEN_START_STEPS / step, 0.0,
        MERGE_STEPS / step, PARTS_PER_STEP, MAPPED_ENOUGH_SMALL if many else MAPPED_ENOUGH,
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
    shares, blocks, longest, of = _chosen(problem, gpu, config)
    sms = gpu.num_sms or UNKNOWN_SMS
    reason = (
        f"{blocks} tiles of rows for {of.places} resident blocks on {sms} SMs, "
        f"{longest} steps of {config.block_n} keys each: "
    )
    if config.roles:
        return Splits(shares, f"{reason}{blocks * shares} blocks; one per SM nearly saturates memory")
    steps, alone = (_steps(s, config.pieces, blocks, longest, sms, of) for s in (shares, 1))
    reason += f"about {steps:.0f} steps in total, including starts and merge"
    return Splits(shares, reason + (f"; with num_splits = 1, {alone:.0f}" if shares > 1 else ""))


def _chosen(problem: AttentionProblem, gpu: Gpu, config: Config) -> tuple[int, int, int, Pace]:
    """Returns the number of splits and its inputs: tiles of rows, steps of the longest one, and the pace."""
    blocks, sms = blocks_with_rows(problem, config), gpu.num_sms or UNKNOWN_SMS
    of, longest = pace(problem, gpu, config), max(1, longest_steps(problem, config))
    if config.roles:
        return few_rows.shares(blocks, longest, config.block_n, sms), blocks, longest, of
    return _soonest(config.pieces, blocks, longest, sms, of), blocks, longest, of


def _steps(s: int, pieces: int, blocks: int, longest: int, sms: int, of: Pace) -> float:
    """Returns steps(S) of `choose_splits`."""
    places, saturating, start, hidden_start, drift, merge, parts_per_step, together = of
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
    return total + (merge + (pieces or s) / parts_per_step if s > 1 or pieces else 0)


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
        if beyond >= 0 and least + beyond / saturating * of.hidden_start + (pieces or s) / of.parts_per_step > fewest:
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
    return changed(config, num_splits=_chosen(problem, gpu, config)[0])


# `dataclasses.replace`, which computes each result once.
changed: Callable[..., Config] = lru_cache(4096)(replace)


# Configs --------------------------------------------------------------------------------------------------------------


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the default first, then every other tiling that fits the GPU's shared memory, and other splits of the
    default."""
    first = default(problem, gpu)
    if first is None:
        return []
    if problem.batch_invariant:  # another tile would give other bits
        return [first]
    others = [replace(first, num_splits=n) for n in (1, 2, 3, 2 * first.num_splits)]
    others += [with_splits(problem, gpu, c) for c in fitting(problem, gpu)]
    return list(dict.fromkeys([first, *others]))


def default(problem: AttentionProblem, gpu: Gpu) -> Config | None:
    """Returns the first of `configs` without listing the others; None if there is none."""
    if not fitting(problem, gpu):
        return None
    tiling = _default(problem, gpu)
    while smem_bytes(problem, gpu, tiling) > gpu.smem_per_block_bytes:
        tiling = _smaller(tiling)
    return _shallow(problem, gpu, with_splits(problem, gpu, tiling))


FEW_STEPS = 4


def _shallow(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """Returns the config with fewer tiles in flight if splits have too few steps to fill them (Hopper only, as
    measured).

    One step: 1 x 1,024 keys 3.92 us with two stages, 4.07 with three; a prompt of 512 3.97 and 4.09. A few steps from
    pages by pointers: 1 x 8,192 keys in pages of 16 11.2 us and 12.5.
    """
    steps = -(-longest_steps(problem, config) // config.num_splits)
    few = one_step(problem, config) or (scattered(problem, config) and config.block_m < 64 and steps <= FEW_STEPS)
    if config.roles:
        return config
    if not few or config.num_stages <= 2 or config.pieces or gpu.vendor != "nvidia" or gpu.capability != 90:
        return config
    shallow = changed(config, num_stages=2)
    return shallow if with_splits(problem, gpu, shallow) == shallow else config


def _smaller(config: Config) -> Config:
    """Returns the next tiling to try if one does not fit: fewer tiles in flight, then fewer keys, then fewer rows."""
    if config.num_stages > 1:
        return replace(config, num_stages=config.num_stages - 1)
    if config.block_n > 16:
        return replace(config, block_n=config.block_n // 2)
    return replace(config, block_m=config.block_m // 2)


@by_kind
def fitting(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the tilings that fit the GPU's shared memory."""
    return [c for c in _tilings(problem) if smem_bytes(problem, gpu, c) <= gpu.smem_per_block_bytes]


def smallest_smem_bytes(problem: AttentionProblem, gpu: Gpu) -> int:
    """Returns the shared memory of the smallest tiling."""
    return min(smem_bytes(problem, gpu, config) for config in _tilings(problem))


def _tilings(problem: AttentionProblem) -> list[Config]:
    # Always four warps: eight warps on 64 rows or fewer split the keys of a product between them, which is slow on
    # Hopper, and at 64x16 in tf32 Triton 3.6 computes wrong products (flash_fwd/config.py).
    return [
        Config(block_m, block_n, 4, num_stages)
        for block_m in (16, 32, 64)
        for block_n in (16, 32, 64, 128)
        for num_stages in (1, 2, 3, 4)
    ]


@by_kind
def _of_rows(problem: AttentionProblem, gpu: Gpu, block_m: int) -> Config:
    """Returns the part of `_default` that does not depend on lengths, for tiles of `block_m` rows."""
    wide = max(padded(problem.head_dim), padded(problem.head_dim_v))
    bucket = 0 if wide <= 64 else 1 if wide <= 128 else 2
    masked = problem.mask_shape is not None or problem.bias_shape is not None
    if problem.dtype == "float32":
        config = Config(min(block_m, 32), (32, 16, 16)[bucket], 4, (2, 2, 1)[bucket])
    elif block_m == 64:
        # A chunk of a prompt batched with decoding sequences took 182 to 207 us with 64 x 64, 215 and more with 64 x
        # 32, and 200 with 128 x 64 on eight warps, whose single block per SM waits for its loads.
        roomy = gpu.vendor == "nvidia" and gpu.capability in (90, 100, 103)  # products leave registers free there
        config = Config(64, (64, 64 if roomy else 32, 32)[bucket], 4, 3 if roomy and bucket < 2 else 2)
    else:
        # Of 15 tilings none was faster by more than 3 %.
        config = Config(block_m, (64, 64, 32)[bucket], 4, 3)
    if gpu.vendor == "amd":
        config = changed(config, num_stages=min(2, config.num_stages))
        if gpu.arch.startswith("gfx1"):
            config = changed(config, block_m=min(block_m, 32), block_n=(32, 32, 16)[bucket], num_stages=1)
    if masked:
        config = changed(config, block_m=min(config.block_m, (64, 64, 32)[bucket]))
        config = changed(config, block_n=max(16, config.block_n // 2), num_stages=min(2, config.num_stages))
    return config


def _default(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the tiling: the fastest on an H200 that fits registers without spills (tests/compile)."""
    rows = problem.seqlen_q * (problem.num_heads_q // problem.num_heads_kv)
    if problem.batch_invariant and problem.packed:
        rows = 64  # the longest sequence depends on the rest of the batch
    config = _of_rows(problem, gpu, 16 if rows <= 16 else 32 if rows <= 32 else 64)
    if gpu.vendor == "nvidia" and gpu.capability == 90:  # measured on Hopper only
        config = _short_cache(problem, gpu, _short_prompt(problem, gpu, _mapped(problem, gpu, config)))
    ahead = may_be_launched_ahead(gpu) and _gains_ahead(problem, gpu, config)
    return changed(config, launched_ahead=ahead)


def _gains_ahead(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    """Returns whether starting ahead of the preceding launch's end was measured to be faster.

    It gained 4 to 6 % in decode from a cold cache, one seventh in a small prefill, and 1 to 8 % from pages. It cost 1 %
    in a chunk batched with decode from pages. It cost 26 % at 32 x 3,000 keys in pages of 16, where all blocks run at
    once without a merge between launches: blocks go where the preceding blocks ended first, three to one SM and one to
    another.
    """
    if not problem.page_size:
        return True
    if config.block_m >= 64:
        return False
    blocks, sms = blocks_with_rows(problem, config), gpu.num_sms or UNKNOWN_SMS
    uneven = sms < blocks <= sms * blocks_per_sm(problem, gpu, config)
    return config.by_map or not uneven or with_splits(problem, gpu, config).num_splits > 1


def _short_cache(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """Splits a short cache in pages of less than 128 into one step of 32 keys each, loaded by pointers, if all blocks
    run at once.

    1 x 1,024 keys in pages of 64 took 4.4 us this way, 5.0 with 64 keys and 5.7 by maps; in pages of 16 4.7 to 5.1, 5.1
    and 6.3.
    """
    if config.roles or config.block_m != 16 or not 0 < problem.page_size < 128:
        return config
    tile = changed(config, block_n=32, num_warps=2, num_stages=2, by_map=False, kv_heads=1)
    shares = blocks_with_rows(problem, tile) * -(-problem.seqlen_k // 32)
    measured = (
        problem.dtype != "float32"
        and 128 < padded(problem.head_dim) + padded(problem.head_dim_v) <= 256
        and problem.mask_shape is None
        and problem.bias_shape is None
        and not problem.batch_invariant
        and not problem.packed
        and shares <= 2 * (gpu.num_sms or UNKNOWN_SMS)
    )
    if not measured:
        return config
    split = with_splits(problem, gpu, tile)
    return tile if one_step(problem, split) else config


SHORT = 128  # keys of one step


def _short_prompt(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """Processes all keys of a dense prompt in one step, with tiles of 16 rows if all of them run at once; else returns
    the config unchanged.

    For calls of 2 to 3 us: one head of 128 queries took 2.37 us this way and 2.72 with 64 x 64 in two steps, 16 heads
    2.73 and 2.84, 32 heads (with 64 x 128) 2.86 and 2.92, one head of 64 2.15 and 2.19; of 32 1.48 with 16 x 32 and
    1.71 with 16 x 64, of 4 1.24 with 16 x 16.
    """
    measured = (
        (config.block_m == 64 or problem.seqlen_q == problem.seqlen_k)
        and problem.seqlen_k <= SHORT
        and max(padded(problem.head_dim), padded(problem.head_dim_v)) <= 64
        and problem.dtype != "float32"
        and problem.mask_shape is None
        and problem.bias_shape is None
        and not (problem.page_size or problem.packed or problem.batch_invariant)
    )
    if not measured:
        return config
    block_n = max(16, 1 << (max(1, problem.seqlen_k) - 1).bit_length())
    whole = changed(config, block_n=block_n, num_warps=4, num_stages=2, by_map=False, kv_heads=1)
    narrow = changed(whole, block_m=16)
    return narrow if blocks_with_rows(problem, narrow) <= (gpu.num_sms or UNKNOWN_SMS) else whole


FEW = 1 / 4  # tiles of rows per SM
FULL = 0.9  # fraction of the SMs that have a block, in one wave
FEW_KEYS = 60  # keys for each of two blocks per SM: fewer are bound by latency
MOSTLY_EDGES = 2048  # keys that a tile of rows sees through a window


def _mapped(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """Returns the tiling with tensor maps, or the config unchanged if they cannot be used or were not measured to be
    faster.

    On an H200 one block per SM with two tiles of 128 keys in flight read 64 x 8,192 keys in 477 us, three blocks of 64
    keys in 487, and 16 x 4,096 in 63.6 and 64.2. If few tiles are split over all SMs, smaller blocks of two warps were
    faster: 1 x 4,096 keys 6.6 us against 7.8, 4 x 4,096 20.0 against 21.3, 1 x 65,536 65.4 against 66.2. Pages of 16 of
    four heads at once were read in 247.7 us, by pointers in 252.9 (128 x 2,048; twice). They were level at 64 x 8,192
    (485 and 492, then 495 and 492), and 1 to 5 % slower if keys had to be split.
    """
    wide = padded(problem.head_dim) + padded(problem.head_dim_v)
    if config.block_m == 64:  # dense prompts were not compared; a chunk with decode: 185 us by pointers, 138 by maps
        mapped = changed(config, num_stages=3, by_map=True)
        return mapped if problem.page_size and wide <= 256 and may_map(problem, gpu, mapped) else config
    block_n = 128 if wide <= 256 else 64
    sms, tiles_of_rows = gpu.num_sms or UNKNOWN_SMS, blocks_with_rows(problem, config)
    if problem.page_size:
        block_n = min(block_n, problem.page_size)
    keys = longest_steps(problem, config) * config.block_n
    roles = few_rows.tiling(problem, gpu, tiles_of_rows, keys)
    if roles is not None:
        return _with_roles(*roles)
    if 16 <= block_n < 64:
        mapped = changed(config, block_n=block_n, kv_heads=64 // block_n, num_stages=4, by_map=True)
        fits = problem.num_heads_kv % mapped.kv_heads == 0 and tiles(problem, mapped) == 1 and 128 < wide <= 256
        fits = fits and may_map(problem, gpu, mapped) and not problem.batch_invariant and problem.window_size[0] < 0
        return mapped if fits and with_splits(problem, gpu, mapped).num_splits == 1 else config
    if block_n < 64:
        return config
    if problem.window_size[0] >= 0 and keys < MOSTLY_EDGES:  # edge tiles, which maps cannot load
        return config
    few = tiles_of_rows <= FEW * sms or (_leaves_sms_idle(tiles_of_rows, sms) and 128 < wide)
    few = few and tiles_of_rows * keys >= 2 * sms * FEW_KEYS
    if few and wide <= 256 and not problem.batch_invariant:  # wider rows do not fit two warps' registers
        stages, mapped = 3, changed(config, block_n=min(block_n, 64), num_warps=2)
    else:
        stages, mapped = (3 if block_n * wide > 64 * 256 else 4), changed(config, block_n=block_n)
    mapped = changed(mapped, num_stages=stages, by_map=True)
    return mapped if may_map(problem, gpu, mapped) else config


@lru_cache(4096)
def _with_roles(block_m: int, block_n: int, num_warps: int, num_stages: int) -> Config:
    return Config(block_m, block_n, num_warps, num_stages, by_map=True, roles=True)


def _leaves_sms_idle(tiles_of_rows: int, sms: int) -> bool:
    """Returns whether no number of splits gives nearly every SM one block and none two.

    Smaller blocks, of which an SM runs three, then took 27.5 us and one block per SM took 30.2 (12 x 2,048 keys), 27.4
    and 31.1 (6 x 4,096), 22.3 and 27.9 (20 x 1,024).
    """
    if tiles_of_rows > sms:
        return tiles_of_rows <= 1.5 * sms
    return all(tiles_of_rows * n < FULL * sms for n in range(1, sms // tiles_of_rows + 1))


def may_be_launched_ahead(gpu: Gpu) -> bool:
    """Returns whether a launch on this GPU may start before the preceding one has ended."""
    return gpu.vendor == "nvidia" and gpu.capability >= 90


def may_map(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    """Returns whether tensor maps can load this config's tiles of K and V, judging by shapes.

    A mask or a bias excludes them: it hides values that a map would load, and values that no row sees may be NaN.
    """
    return (
        (INTERPRETED or (gpu.vendor == "nvidia" and gpu.capability >= 90))
        and problem.dtype != "float32"
        and problem.mask_shape is None
        and problem.bias_shape is None
        and (config.roles or problem.page_size % config.block_n == 0)
        and problem.head_dim % 8 == 0
        and problem.head_dim_v % 8 == 0
        and config.block_n <= 256
    )
