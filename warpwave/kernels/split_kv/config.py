"""Configs of `split_kv`: what one is, how many shares keys are split into, and which is the default where."""

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
        block_n: keys a step walks, a power of two, at least 16.
        num_warps: warps of a program, a power of two.
        num_stages: K/V tiles in flight.
        num_splits: shares that the keys of a tile of rows are split into, a block for each.
        pieces: partial results of a tile of rows, 0 for one a share. Else its keys are cut into at most so many pieces
            of equal length, shares are whole pieces, and each piece leaves its own result: sums, and bits, then do not
            depend on how many shares there are.
        by_map: K and V come by tensor maps (TMA, sm_90 or newer, 16 bits) where a tile lies in one page; tiles at the
            edges of what is seen, and tensors that no map can describe, by pointers.
        kv_heads: kv heads whose rows and keys a tile holds side by side, a power of two that divides those there are:
            their keys, neighbours in memory, are asked for together, and their scores come of one product, which at
            few rows is padding otherwise.
        launched_ahead: begin while the launch before in the stream still ends, and wait in the kernel (sm_90 or newer).
        roles: on Hopper, of up to 16 rows: one warp brings keys by tensor maps, a copy for each page of 16 keys or
            more, and a warpgroup multiplies them (few_rows_device.py). `num_stages` tiles of K and of V are in flight.
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
            raise ValueError(f"kv_heads is {self.kv_heads} with pieces = {self.pieces}; pieces are of one kv head")
        has = (self.block_m, self.num_warps, self.kv_heads, self.pieces, self.by_map)
        if self.roles and (has != (few_rows.ROWS, 4, 1, 0, True) or not 64 <= self.block_n <= 256):
            raise ValueError(
                f"{self} has roles; they are of tiles of {few_rows.ROWS} x 64, 128 or 256 on 4 warps, by_map, of one "
                "kv head, without pieces"
            )


# Sizes ----------------------------------------------------------------------------------------------------------------


@by_kind
def smem_bytes(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """An upper bound on the shared memory of one block, which tests hold against what every target compiles to."""
    if config.roles:
        return few_rows.smem_bytes(problem, config.block_n, config.num_stages)
    size, arithmetic = DTYPE_BYTES[problem.dtype], dot_precision(problem, gpu)
    block_d, block_dv = tile_widths(problem, gpu, config.block_m)
    q = size * config.block_m * block_d
    p = size * config.block_m * columns(config)
    kv = size * columns(config) * (block_d + block_dv)
    # Page ids of the next tile change layout; barriers and reductions over warps take the rest.
    more = 1024 + (16 * columns(config) if problem.page_size else 0)
    more += 8 * config.block_m * config.num_warps
    if config.pieces:  # whose accumulators are stored inside the loop, and are laid out for that in shared memory
        more += 4 * config.block_m * block_dv
    if problem.mask_shape is not None or problem.bias_shape is not None:
        kv += config.block_m * columns(config) * bytes_per_score(problem)
        p += size * columns(config) * block_dv  # V goes through registers to lose what nobody sees, and back
    if gpu.arch == "gfx950":
        return max(q, config.num_stages * kv * 17 // 16) + p + more
    if gpu.vendor == "amd":
        return max(q, max(1, config.num_stages - 1) * kv) + p + more
    if problem.dtype == "float32" and arithmetic != "ieee":
        return q + p + config.num_stages * kv + max(q, kv) + more  # the parts of an operand stand side by side
    return q + p + config.num_stages * kv + more


def columns(config: Config) -> int:
    """Keys of all kv heads of a tile, of which a score each for every row."""
    return config.block_n * config.kv_heads


def tile_heads(problem: AttentionProblem, config: Config) -> int:
    """Query heads whose rows a tile holds."""
    return problem.num_heads_q // problem.num_heads_kv * config.kv_heads


def head_groups(problem: AttentionProblem, config: Config) -> int:
    """Groups of kv heads, each with tiles of its own."""
    return problem.num_heads_kv // config.kv_heads


def tiles(problem: AttentionProblem, config: Config) -> int:
    """Tiles of rows of one group of kv heads of the longest sequence."""
    return -(-problem.seqlen_q * tile_heads(problem, config) // config.block_m)


def num_parts(config: Config) -> int:
    """Partial results of a tile of rows, which are merged where there is more than one."""
    return config.pieces or config.num_splits


def one_step(problem: AttentionProblem, config: Config) -> bool:
    """Whether a share has one tile of keys at the most, so that Q can be asked for with it, and once."""
    alone = config.pieces == 0 and config.kv_heads == 1 and not config.roles and problem.dtype != "float32"
    return alone and config.num_stages > 1 and -(-problem.seqlen_k // config.block_n) <= config.num_splits


def steps_over_keys(problem: AttentionProblem, config: Config) -> Walk:
    """Counts the steps over keys of all tiles of rows, before the keys are split."""
    return walk(problem, config.block_m, config.block_n, tile_heads(problem, config))


def longest_steps(problem: AttentionProblem, config: Config) -> int:
    """Counts the steps over keys of the tile of rows that sees most of them. Without a window to the left that is the
    last tile of the longest sequence, whose keys begin with the first."""
    if problem.window_size[0] >= 0 or problem.lengths is not None or not problem.batch:
        return steps_over_keys(problem, config).longest
    seqlen_q, seqlen_k = problem.seqlen_q, problem.seqlen_k
    if problem.packed:  # as `AttentionProblem.items`, of which the first is the longest
        seqlen_q, seqlen_k = -(-problem.total_q // problem.batch), -(-problem.total_k // problem.batch)
    right = problem.window_size[1]
    if problem.causal is not None and problem.causal.alignment == "top_left":
        high = 0 if right < 0 else min(0, seqlen_k - seqlen_q + right)
        seqlen_k = min(seqlen_k, seqlen_q + high)
    return max(0, -(-seqlen_k // config.block_n)) if seqlen_q else 0


# Splits ---------------------------------------------------------------------------------------------------------------

UNKNOWN_SMS = 132  # where no device was asked: an H100's and an H200's
# What follows was fitted to an H200's times on 2026-11-21 (docs/notes/serving.md).
MOST_BLOCKS_PER_SM = 3  # of four warps
SATURATING_BLOCKS = 2  # of them an SM needs, each with some 64 KB in flight, for memory to be busy
START_STEPS = 3  # a block begins, and fills its pipeline, in about as long as so many steps take
HIDDEN_START_STEPS = 0.5  # what is left of that where other blocks of the SM keep memory busy meanwhile
SCATTERED_START_STEPS = 3  # in addition, where page ids of many pages must be there first
UNEVEN = 0.45  # how much of what a small last wave leaves unused is felt after one full wave
DRIFT = 0.1  # of a block's steps: blocks that began together do not end together
MERGE_STEPS = 2.4
PARTS_PER_STEP = 30
MAX_SPLITS = 128
# Partial results of a tile whose bits may not depend on the batch: of one tile of rows, as at decode, and otherwise,
# where they are as many more bytes as there are rows.
INVARIANT_PIECES = {True: 32, False: 4}


# By tensor maps, whose copies take no registers, and which one block of large tiles keeps in flight for its SM.
MAPPED_BYTES = 128 * 1024  # in flight an SM, for memory to be busy
MAPPED_STEP_BYTES = 64 * 1024  # of an SM, what takes as long as a step of pointers' saturating blocks
# Of the saturating blocks so many keep memory as busy as all of them; where few tiles of rows are cut in many shares,
# and where there are more, of two warps each: 192 blocks were ahead of 240 and 288 for 48 and 96 tiles.
MAPPED_ENOUGH, MAPPED_ENOUGH_SMALL = 0.9, 0.75
MAPPED_START_STEPS = 1.2
MAPPED_HIDDEN_START_STEPS = 0.1


class Pace(NamedTuple):
    """How blocks walk keys, in steps: a block's of `block_n` keys while as many as `saturating` run."""

    places: int
    saturating: int
    start: float
    hidden_start: float
    drift: float
    merge: float
    parts_per_step: float
    together: float  # above 0 where blocks that run at once end at once, as memory alone sets their pace: how many of
    # the saturating ones are enough for it


class Splits(NamedTuple):
    """A number of shares, and the arithmetic behind it."""

    num_splits: int
    reason: str


def blocks_with_rows(problem: AttentionProblem, config: Config) -> int:
    """Blocks that have rows, before keys are split."""
    heads = problem.num_heads_q // problem.num_heads_kv * config.kv_heads
    found = -(-problem.seqlen_q * heads // config.block_m) * problem.batch
    if problem.packed:  # the longest sequence is one of several: a tile may end early in each
        found = min(found, problem.total_q * heads // config.block_m + problem.batch)
    return max(1, found * (problem.num_heads_kv // config.kv_heads))


def scattered(problem: AttentionProblem, config: Config) -> bool:
    """Whether the keys of a tile lie in several pages."""
    return problem.page_size > 0 and problem.page_size % config.block_n != 0


def blocks_per_sm(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Blocks that an SM runs at once: what registers allow, and shared memory."""
    if config.roles:
        return few_rows.blocks_per_sm(problem, gpu, config)
    by_registers = 2 if config.block_m > 32 else MOST_BLOCKS_PER_SM
    needed = smem_expected(problem, config)
    return max(1, min(by_registers * 4 // config.num_warps, gpu.smem_per_block_bytes // needed))


def smem_expected(problem: AttentionProblem, config: Config) -> int:
    """About what 16-bit tiles take of shared memory: tiles in flight, Q and probabilities (compiled for sm_90)."""
    if config.roles:
        return few_rows.smem_bytes(problem, config.block_n, config.num_stages)
    in_flight = config.num_stages - 1 if config.block_m < 64 else config.num_stages
    needed = columns(config) * (padded(problem.head_dim) + padded(problem.head_dim_v)) * max(1, in_flight)
    needed += config.block_m * (padded(problem.head_dim) + columns(config))
    return DTYPE_BYTES[problem.dtype] * needed + 1024


def tiles_in_flight(config: Config) -> int:
    """Tiles of K and V that a block by tensor maps has asked for."""
    return config.num_stages if config.roles else max(1, config.num_stages - 1)


def pace(problem: AttentionProblem, gpu: Gpu, config: Config) -> Pace:
    """By what was fitted to times of pointers, and of tensor maps. Tiles of 64 rows are a matter of arithmetic, however
    their keys come."""
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
    """The number of shares with which keys are walked soonest, in closed form.

    `places` blocks run at once, and `saturating` of them, fewer, keep memory busy: as long as there are that many, time
    goes with the number of blocks, and below it with the steps of one block. So few shares leave SMs idle; a last wave
    of few blocks leaves memory idle, the less the more waves came before; and many shares start and merge:

        steps(S) = max(1, first / saturating) * (ceil(longest / S) + start) + merge(S)
                   + (blocks * S - first) / saturating * (ceil(longest / S) + hidden start) + uneven end

    `longest` are the steps of the tile that sees most keys, `first` the blocks of the first wave, as many on every SM.
    """
    shares, blocks, longest, of = _chosen(problem, gpu, config)
    sms = gpu.num_sms or UNKNOWN_SMS
    reason = (
        f"{blocks} tiles of rows for {of.places} places on {sms} SMs, {longest} steps of {config.block_n} keys each: "
    )
    if config.roles:
        return Splits(shares, f"{reason}{blocks * shares} blocks, of which an SM's one keeps memory nearly busy")
    steps = _steps(shares, config.pieces, blocks, longest, sms, of)
    reason += f"about {steps:.0f} steps from begin to end, starts and merge counted"
    alone = f"; with one share, {_steps(1, config.pieces, blocks, longest, sms, of):.0f}" if shares > 1 else ""
    return Splits(shares, reason + alone)


def _chosen(problem: AttentionProblem, gpu: Gpu, config: Config) -> tuple[int, int, int, Pace]:
    """The number of shares, and what it follows from: tiles of rows, steps of the longest, and the pace."""
    blocks, sms = blocks_with_rows(problem, config), gpu.num_sms or UNKNOWN_SMS
    of, longest = pace(problem, gpu, config), max(1, longest_steps(problem, config))
    if config.roles:
        return few_rows.shares(blocks, longest, config.block_n, sms), blocks, longest, of
    return _soonest(config.pieces, blocks, longest, sms, of), blocks, longest, of


def _steps(s: int, pieces: int, blocks: int, longest: int, sms: int, of: Pace) -> float:
    """steps(S) of `choose_splits`."""
    places, saturating, start, hidden_start, drift, merge, parts_per_step, together = of
    each = -(-longest // s)
    waves, rest = divmod(blocks * s, places)
    if together:
        first = min(max(blocks * s, together * saturating), places)
        total = first / saturating * (each + start)
    else:
        first = min(-(-blocks * s // sms) * sms, places)  # an SM that has one more is the last to end
        total = max(1.0, first / saturating) * (each + start)
    total += max(0, blocks * s - places) / saturating * (each + hidden_start)
    if waves and rest:
        total += (UNEVEN / waves * max(0, saturating - rest) / saturating + drift) * each
    return total + (merge + (pieces or s) / parts_per_step if s > 1 or pieces else 0)


@lru_cache(4096)
def _soonest(pieces: int, blocks: int, longest: int, sms: int, of: Pace) -> int:
    """The first number of shares with the fewest steps.

    Where all blocks run at once, the smallest of the shares that are as long is the best: everything else grows with
    their number. Beyond, steps(S) is at least what it would be if no share were rounded up and no wave were uneven.
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
    """The tiling with the keys split for this problem."""
    if problem.batch_invariant:
        # Of a packed call's longest sequence nothing may follow for the others.
        config = changed(config, pieces=INVARIANT_PIECES[not problem.packed and tiles(problem, config) == 1])
    return changed(config, num_splits=_chosen(problem, gpu, config)[0])


# As `dataclasses.replace`, each once.
changed: Callable[..., Config] = lru_cache(4096)(replace)


# Configs --------------------------------------------------------------------------------------------------------------


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """The default first, then every other tiling that fits the GPU's shared memory, and other splits of the default."""
    first = default(problem, gpu)
    if first is None:
        return []
    if problem.batch_invariant:  # another tile has other bits
        return [first]
    others = [replace(first, num_splits=n) for n in (1, 2, 3, 2 * first.num_splits)]
    others += [with_splits(problem, gpu, c) for c in fitting(problem, gpu)]
    return list(dict.fromkeys([first, *others]))


def default(problem: AttentionProblem, gpu: Gpu) -> Config | None:
    """The first of `configs`, by itself; None where there are none."""
    if not fitting(problem, gpu):
        return None
    tiling = _default(problem, gpu)
    while smem_bytes(problem, gpu, tiling) > gpu.smem_per_block_bytes:
        tiling = _smaller(tiling)
    return _shallow(problem, gpu, with_splits(problem, gpu, tiling))


FEW_STEPS = 4


def _shallow(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """The config with fewer tiles in flight where shares have too few steps to fill them, on Hopper, where measured.

    One step: 1 x 1,024 keys 3.92 us by two stages, 4.07 by three; a prompt of 512 3.97 and 4.09. A few from pages by
    pointers: 1 x 8,192 keys in pages of 16 11.2 us, 12.5.
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
    """The next tiling to try where one does not fit: fewer tiles in flight, then fewer keys, then fewer rows."""
    if config.num_stages > 1:
        return replace(config, num_stages=config.num_stages - 1)
    if config.block_n > 16:
        return replace(config, block_n=config.block_n // 2)
    return replace(config, block_m=config.block_m // 2)


@by_kind
def fitting(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Tilings that the GPU's shared memory holds."""
    return [c for c in _tilings(problem) if smem_bytes(problem, gpu, c) <= gpu.smem_per_block_bytes]


def smallest_smem_bytes(problem: AttentionProblem, gpu: Gpu) -> int:
    """What the smallest tiling takes."""
    return min(smem_bytes(problem, gpu, config) for config in _tilings(problem))


def _tilings(problem: AttentionProblem) -> list[Config]:
    # Eight warps on 64 rows or fewer split the keys of a product between them, which is slow on Hopper, and at 64x16
    # in tf32 Triton 3.6 computes wrong products (kernels/flash_fwd/config.py): four, then, everywhere.
    return [
        Config(block_m, block_n, 4, num_stages)
        for block_m in (16, 32, 64)
        for block_n in (16, 32, 64, 128)
        for num_stages in (1, 2, 3, 4)
    ]


@by_kind
def _of_rows(problem: AttentionProblem, gpu: Gpu, block_m: int) -> Config:
    """`_default` as far as it reads no length: for tiles of so many rows."""
    wide = max(padded(problem.head_dim), padded(problem.head_dim_v))
    bucket = 0 if wide <= 64 else 1 if wide <= 128 else 2
    masked = problem.mask_shape is not None or problem.bias_shape is not None
    if problem.dtype == "float32":
        config = Config(min(block_m, 32), (32, 16, 16)[bucket], 4, (2, 2, 1)[bucket])
    elif block_m == 64:
        # A chunk of a prompt beside sequences that decode took 182 to 207 us by 64 x 64, 215 and more by 64 x 32, and
        # 200 by 128 x 64 on eight warps, whose one block an SM waits for what it loads.
        roomy = gpu.vendor == "nvidia" and gpu.capability in (90, 100, 103)  # whose products leave registers free
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
    """The tiling, by what was fastest on an H200 and what fits registers without spills (tests/compile)."""
    rows = problem.seqlen_q * (problem.num_heads_q // problem.num_heads_kv)
    if problem.batch_invariant and problem.packed:
        rows = 64  # whose longest sequence depends on who else is there
    config = _of_rows(problem, gpu, 16 if rows <= 16 else 32 if rows <= 32 else 64)
    if gpu.vendor == "nvidia" and gpu.capability == 90:  # where they were measured
        config = _short_cache(problem, gpu, _short_prompt(problem, gpu, _mapped(problem, gpu, config)))
    ahead = may_be_launched_ahead(gpu) and _gains_ahead(problem, gpu, config)
    return changed(config, launched_ahead=ahead)


def _gains_ahead(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    """Whether a launch that begins ahead was found faster: 4 to 6 % of decode from a cold cache, a seventh of a small
    prefill, 1 to 8 % from pages. It cost a chunk beside decode from pages 1 %; and 32 x 3,000 keys in pages of 16, of
    which every block runs at once and no merge lies between, 26 %: blocks go where those before them ended first, three
    to one SM and one to another."""
    if not problem.page_size:
        return True
    if config.block_m >= 64:
        return False
    blocks, sms = blocks_with_rows(problem, config), gpu.num_sms or UNKNOWN_SMS
    uneven = sms < blocks <= sms * blocks_per_sm(problem, gpu, config)
    return config.by_map or not uneven or with_splits(problem, gpu, config).num_splits > 1


def _short_cache(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """A short cache in pages of less than 128 as shares of one step of 32 keys, by pointers, where all run at once.

    1 x 1,024 keys in pages of 64 took 4.4 us so, 5.0 by 64 keys and 5.7 by maps; of 16 4.7 to 5.1, 5.1 and 6.3.
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


SHORT = 128  # keys that one step walks


def _short_prompt(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """All keys of a dense prompt in one step, by tiles of 16 rows where all of them run at once; else as it is.

    Where a call takes 2 to 3 us, one head of 128 queries took 2.37 us so and 2.72 by 64 x 64 in two steps, 16 heads
    2.73 and 2.84, 32 heads (by 64 x 128) 2.86 and 2.92, one head of 64 2.15 and 2.19; of 32 1.48 by 16 x 32 and 1.71 by
    16 x 64, of 4 1.24 by 16 x 16.
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


FEW = 1 / 4  # tiles of rows for each SM
FULL = 0.9  # of the SMs have a block, of one wave
FEW_KEYS = 60  # for each of two blocks an SM: fewer are a matter of latency
MOSTLY_EDGES = 2048  # keys that a tile of rows sees through a window


def _mapped(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """The tiling by tensor maps, or as it is where they cannot serve, or were not found faster.

    On an H200 one block an SM with two tiles of 128 keys in flight read 64 x 8,192 keys in 477 us, three blocks of 64
    keys in 487, and 16 x 4,096 in 63.6 and 64.2. Where few tiles are split over all SMs smaller blocks, of two warps,
    were ahead: 1 x 4,096 keys 6.6 us against 7.8, 4 x 4,096 20.0 against 21.3, 1 x 65,536 65.4 against 66.2. Pages of
    16 of four heads at once were read in 247.7 us where pointers took 252.9 (128 x 2,048; twice), level with them at 64
    x 8,192 (485 and 492, then 495 and 492), and 1 to 5 % behind where keys had to be split.
    """
    wide = padded(problem.head_dim) + padded(problem.head_dim_v)
    if config.block_m == 64:  # dense prompts were not compared; 185 us by pointers and 138 for a chunk beside decode
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
    seen = keys
    if problem.window_size[0] >= 0 and seen < MOSTLY_EDGES:  # which maps cannot bring
        return config
    few = tiles_of_rows <= FEW * sms or (_leaves_sms_idle(tiles_of_rows, sms) and 128 < wide)
    few = few and tiles_of_rows * seen >= 2 * sms * FEW_KEYS
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
    """Whether no number of shares gives nearly every SM one block and none two. Smaller blocks, of which an SM runs
    three, took 27.5 us then where blocks of one an SM took 30.2 (12 x 2,048 keys), 27.4 and 31.1 (6 x 4,096), 22.3 and
    27.9 (20 x 1,024)."""
    if tiles_of_rows > sms:
        return tiles_of_rows <= 1.5 * sms
    return all(tiles_of_rows * n < FULL * sms for n in range(1, sms // tiles_of_rows + 1))


def may_be_launched_ahead(gpu: Gpu) -> bool:
    """Whether a launch there may begin before the one in front of it has ended."""
    return gpu.vendor == "nvidia" and gpu.capability >= 90


def may_map(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    """Whether tensor maps can bring this config's tiles of K and V, as far as shapes tell.

    A mask or a bias hides values that a map would bring: what no row sees may be NaN.
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
