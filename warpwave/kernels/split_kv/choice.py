"""The choice of a config for a call: the default, and those that fit the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from warpwave.gpu import Gpu, reads_shared_memory
from warpwave.kernels import rules
from warpwave.kernels.arguments import padded
from warpwave.kernels.rules import IN_CODE_OF_MMA, NOT_MEASURED, Rule
from warpwave.kernels.split_kv import few_rows_host as few_rows
from warpwave.kernels.split_kv.config import (
    Config,
    longest_steps,
    may_be_launched_ahead,
    may_map,
    one_step,
    smem_bytes,
)
from warpwave.kernels.split_kv.splits import (
    FEW,
    blocks_with_rows,
    changed,
    with_splits,
)
from warpwave.problem import AttentionProblem, by_kind


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the default first, then every other tiling that fits the GPU's shared memory, and other splits of the
    default."""
    if not fitting(problem, gpu):
        return []
    first = default(problem, gpu)
    if problem.batch_invariant:  # another tile would give other bits
        return [first]
    others = [replace(first, num_splits=n) for n in (1, 2, 3, 2 * first.num_splits)]
    others += [with_splits(problem, gpu, c) for c in fitting(problem, gpu)]
    return list(dict.fromkeys([first, *others]))


def default(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the first of `configs`, of a problem that has one, without listing the others."""
    tiling = _decided(problem, gpu)[0].config
    while smem_bytes(problem, gpu, tiling) > gpu.smem_per_block_bytes:
        tiling = _smaller(tiling)
    return _shallow(problem, gpu, with_splits(problem, gpu, tiling))


def _shallow(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """Returns the config with fewer tiles in flight if splits have one step (Hopper only, as measured)."""
    if config.num_stages <= 2 or gpu.vendor != "nvidia" or gpu.capability != 90 or not one_step(problem, gpu, config):
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
    return [c for c in _tilings() if smem_bytes(problem, gpu, c) <= gpu.smem_per_block_bytes]


def smallest_smem_bytes(problem: AttentionProblem, gpu: Gpu) -> int:
    """Returns the shared memory of the smallest tiling."""
    return min(smem_bytes(problem, gpu, config) for config in _tilings())


def _tilings() -> list[Config]:
    # Always four warps: eight warps on 64 rows or fewer split the keys of a product between them, which is slow on
    # Hopper, and at 64x16 in tf32 Triton 3.6 computes wrong products (flash_fwd/config.py).
    return [
        Config(block_m, block_n, 4, num_stages)
        for block_m in (16, 32, 64)
        for block_n in (16, 32, 64, 128)
        for num_stages in (1, 2, 3, 4)
    ]


# What the tables read -------------------------------------------------------------------------------------------------

SHORT = 128  # keys of one step
FULL = 0.9  # fraction of the SMs that have a block, in one wave
FEW_KEYS = 60  # keys for each of two blocks per SM: fewer are bound by latency
MOSTLY_EDGES = 2048  # keys that a tile of rows sees through a window


class Tile(NamedTuple):
    """The tiling of a kind of calls, on four warps."""

    most_m: int
    block_n: int
    num_stages: int


class Kind:
    """The properties that calls of one kind share, for tiles of `block_m` rows, and the rows that may hold for them."""

    def __init__(self, problem: AttentionProblem, gpu: Gpu, block_m: int) -> None:
        widths = padded(problem.head_dim), padded(problem.head_dim_v)
        self.widest, self.wide, self.block_m = max(widths), sum(widths), block_m
        self.bucket = 0 if self.widest <= 64 else 1 if self.widest <= 128 else 2
        self.is_masked = problem.mask_shape is not None or problem.bias_shape is not None
        self.is_float32, self.is_amd = problem.dtype == "float32", gpu.vendor == "amd"
        self.is_rdna, self.is_hopper = gpu.is_rdna, gpu.vendor == "nvidia" and gpu.capability == 90
        self.has_mma, self.has_163_kib = gpu.has_mma, gpu.has_163_kib
        self.has_token_factors = problem.kv_factors == "token"
        self.is_of_8_bits = problem.dtype_kv is not None and gpu.vendor == "nvidia"
        self.reads_shared_memory = reads_shared_memory(gpu, block_m)  # which leaves registers free
        self.may_be_ahead, self.page_size = may_be_launched_ahead(gpu), problem.page_size
        self.has_left_window, self.is_invariant = problem.window_size[0] >= 0, problem.batch_invariant
        first: Rule[Tile] = rules.deciding(TILES, self)
        changes: list[Rule[Change]] = [rule for rule in RULES_OF_TILES if rule.holds(self)]
        most_m, block_n, stages = first.choices[0]
        self.tile = rules.changed(Config(min(block_m, most_m), block_n, 4, stages), changes, self)
        self.tile_rows: list[Rule[Any]] = [first, *changes]
        self.has_64_rows = self.tile.block_m == 64
        plain = self.is_hopper and not (self.is_float32 or self.is_masked or self.is_invariant or problem.packed)
        self.may_be_prompt = plain and self.widest <= 64 and not self.page_size
        others = self.page_size or self.is_invariant or self.is_float32
        self.may_be_one_tile = self.is_hopper and not others
        self.may_be_short = plain and self.tile.block_m == 16 and 0 < self.page_size < 128 and 128 < self.wide <= 256
        self.may_have_roles = self.is_hopper and not self.has_64_rows and self.wide <= 256
        self.block_n = 128 if self.wide <= 256 else 64
        if self.page_size:
            self.block_n = min(self.block_n, self.page_size)
        self.may_map = self.is_hopper and self._may_map(problem, gpu)
        call = Call(problem, gpu, self)
        self.maps, self.shorter, self.ahead = (rules.undecided(rows, call) for rows in (MAPS, SHORTER, AHEAD))

    def _may_map(self, problem: AttentionProblem, gpu: Gpu) -> bool:
        """Returns whether maps can load the tiles, and were measured."""
        if self.has_64_rows:  # dense prompts were not compared
            return self.page_size > 0 and self.wide <= 256 and may_map(problem, gpu, self.tile)
        return self.block_n >= 64 and may_map(problem, gpu, changed(self.tile, block_n=self.block_n))


class Call:
    """The properties of a call that the rows read: those of its kind, and sizes, which are None for a kind."""

    def __init__(self, problem: AttentionProblem, gpu: Gpu, kind: Kind) -> None:
        self.problem, self.gpu, self.kind, self.config = problem, gpu, kind, kind.tile
        self.sms = gpu.assumed_sms
        self.seqlen_k: Any = vars(problem)["seqlen_k"]
        # A row that computes with None raises TypeError, so it is evaluated for each call.
        self.tiles: Any = None  # tiles of rows
        self.keys: Any = None  # of the tile of rows that sees most
        self.roles: Any = None  # the tiling of the launch for few rows
        if self.seqlen_k is None:
            return
        self.tiles = blocks_with_rows(problem, kind.tile)
        if kind.is_hopper and not kind.has_64_rows:
            self.keys = longest_steps(problem, kind.tile) * kind.tile.block_n
            if kind.may_have_roles:
                self.roles = few_rows.tiling(problem, gpu, kind.tile.block_m, self.tiles, self.keys)


# The tables -----------------------------------------------------------------------------------------------------------

Change = Callable[[Config, Any], Config]
ROLES = "2026-11-22-h200-split-kv-roles.log"
MAPPED = "2026-11-21-h200-split-kv-tensor-maps.log"
FEW_ROWS = "2026-12-01-h200-few-rows.json"
SPECIAL_CASES = "2026-11-30-h200-special-cases.json"
LOG = "serving.md"
EIGHT_BITS = "2026-11-23-h200-decode-8-bit-configs.log"
OTHER_CARDS = "other_cards.md"
SHORT_SEQUENCES = "2026-11-29-h200-short-sequences.jsonl"


def _kept(config: Config, call: Any) -> Config:
    return config


# The figures are times on an H200.
TILES: tuple[Rule[Tile], ...] = (
    *rules.by_width(
        "float32", lambda c: c.is_float32, (Tile(32, 32, 2), Tile(32, 16, 2), Tile(32, 16, 1)), NOT_MEASURED
    ),
    *rules.by_width(
        "more than 32 rows, NVIDIA with wgmma or tcgen05",
        lambda c: c.reads_shared_memory,
        (Tile(64, 64, 3), Tile(64, 64, 3), Tile(64, 32, 2)),
        "a chunk of a prompt beside decode took 182 to 207 us with 64 keys a step, at least 215 with 32, and 200 with "
        "128 rows on eight warps",
        LOG,
    ),
    *rules.by_width(
        "more than 32 rows, NVIDIA with mma and 163 KiB of shared memory, no mask or bias",
        lambda c: c.block_m == 64 and c.has_mma and c.has_163_kib and not c.is_masked,
        (Tile(64, 64, 3), Tile(64, 64, 2), Tile(64, 16, 4)),
        "the former tiles, with two stages and 32 keys above 64 columns, take 1.23, 1.12 to 1.56 and 1.25 times as "
        "long (one, six and one calls, 8-bit keys at 128 alone), " + IN_CODE_OF_MMA,
        OTHER_CARDS,
    ),
    *rules.by_width(
        "more than 32 rows, NVIDIA with mma, no mask or bias, 16-bit keys",
        lambda c: c.block_m == 64 and c.has_mma and not (c.is_masked or c.is_of_8_bits),
        (Tile(64, 64, 2), Tile(64, 64, 3), Tile(64, 16, 4)),
        "the former tiles, with two stages and 32 keys above 64 columns, take 1.00, 1.05 to 2.09 and 1.24 times as "
        "long (one, five and one calls); with 8-bit keys 0.95, " + IN_CODE_OF_MMA,
        OTHER_CARDS,
    ),
    *rules.by_width(
        "more than 32 rows",
        lambda c: c.block_m == 64,
        (Tile(64, 64, 2), Tile(64, 32, 2), Tile(64, 32, 2)),
        NOT_MEASURED,
    ),
    *rules.by_width(
        "at most 32 rows",
        lambda c: True,
        (Tile(32, 64, 3), Tile(32, 64, 3), Tile(32, 32, 3)),
        "not measured in a record; of 15 tilings none was faster by more than 3 %",
    ),
)
RULES_OF_TILES: tuple[Rule[Change], ...] = (
    Rule(
        "AMD: at most two stages",
        lambda c: c.is_amd,
        (lambda config, _: replace(config, num_stages=min(2, config.num_stages)),),
        NOT_MEASURED,
    ),
    Rule(
        "AMD RDNA: at most 32 rows and keys, one stage",
        lambda c: c.is_rdna,
        (lambda config, c: replace(config, block_m=min(c.block_m, 32), block_n=(32, 32, 16)[c.bucket], num_stages=1),),
        NOT_MEASURED,
    ),
    Rule(
        "a mask or bias: half of the keys, at most two stages",
        lambda c: c.is_masked,
        (
            lambda config, c: replace(
                config,
                block_m=min(config.block_m, (64, 64, 32)[c.bucket]),
                block_n=max(16, config.block_n // 2),
                num_stages=min(2, config.num_stages),
            ),
        ),
        NOT_MEASURED,
    ),
    Rule(
        "NVIDIA with mma and 99 KiB of shared memory, at most 32 rows, with 8-bit numbers 16, head_dim 65 to 128: two "
        "stages",
        lambda c: c.has_mma and not c.has_163_kib and c.block_m <= (16 if c.is_of_8_bits else 32) and c.bucket == 1,
        (lambda config, _: replace(config, num_stages=min(2, config.num_stages)),),
        "two blocks share an SM: three stages take 0.95 to 1.35 times as long (ten calls, 1.12 in the mean), with "
        "8-bit numbers 1.08 and 1.12, and on 32 rows of 8-bit numbers 0.88, " + IN_CODE_OF_MMA,
        OTHER_CARDS,
    ),
    Rule(
        "NVIDIA, a cache of 8-bit numbers, at most 16 rows: two warps",
        lambda c: c.is_of_8_bits and c.block_m == 16,
        (lambda config, _: replace(config, num_warps=2),),
        "with a factor for each token 64 x 8,192 keys in pages of 64 284 us, and 429 with four warps; 1 x 65,536 52 "
        "and 84; with a factor for each head 0 to 3 %",
        EIGHT_BITS,
    ),
    Rule(
        "Hopper, 8-bit numbers with a factor for each token, more than 32 rows, head_dim up to 128: 128 keys, two "
        "stages",
        lambda c: c.is_of_8_bits and c.has_token_factors and c.block_m == 64 and c.is_hopper and c.wide <= 256,
        (lambda config, _: replace(config, block_n=128, num_stages=2),),
        "a chunk beside decode 355 us, and 567 with 64 keys, whose factors four warps load one by one (both with "
        "words, which these tiles do not load any more; 236 us now)",
        EIGHT_BITS,
    ),
)


def _by_few_warps(config: Config, call: Call) -> Config:
    return changed(config, block_n=min(call.kind.block_n, 64), num_warps=2, num_stages=3, by_map=True)


def _by_map(config: Config, call: Call) -> Config:
    kind = call.kind
    # Instead of four stages, three of 128 keys at head_dim 64, with their splits, are 1.05 times as fast in the mean of
    # 13 calls, 0.95 to 1.33 (2026-11-26-h100-split-kv-stages.log), and three of 64 keys for 32 rows 1.01 to 1.22 times
    # in nine (2026-11-30-h200-decode-32-rows.json).
    stages = 4 if kind.block_n <= 64 and kind.wide <= 256 and kind.block_m == 16 else 3
    return changed(config, block_n=kind.block_n, num_stages=stages, by_map=True)


@lru_cache(4096)
def _with_roles(block_m: int, block_n: int, num_warps: int, num_stages: int) -> Config:
    return Config(block_m, block_n, num_warps, num_stages, by_map=True, roles=True)


@lru_cache(4096)
def _leaves_sms_idle(tiles_of_rows: int, sms: int) -> bool:
    """Returns whether no number of splits gives nearly every SM one block and none two.

    Smaller blocks, of which an SM runs three, then took 27.5 us and one block per SM took 30.2 (12 x 2,048 keys), 27.4
    and 31.1 (6 x 4,096), 22.3 and 27.9 (20 x 1,024).
    """
    if tiles_of_rows > sms:
        return tiles_of_rows <= 1.5 * sms
    return all(tiles_of_rows * n < FULL * sms for n in range(1, sms // tiles_of_rows + 1))


def _suits_few_warps(c: Call) -> bool:
    """Returns whether few tiles are split over all SMs, and each of two blocks per SM has enough keys. Rows wider than
    128 columns do not fit two warps' registers."""
    if c.kind.wide > 256 or c.kind.is_invariant:
        return False
    few = c.tiles <= FEW * c.sms or (_leaves_sms_idle(c.tiles, c.sms) and 128 < c.kind.wide)
    return few and c.tiles * c.keys >= 2 * c.sms * FEW_KEYS


# How keys are loaded.
MAPS: tuple[Rule[Change], ...] = (
    Rule(
        "Hopper, a chunk of a prompt from pages, 16 bits, head_dim up to 128, no mask or bias: tensor maps",
        lambda c: c.kind.has_64_rows and c.kind.may_map,
        (lambda config, _: changed(config, num_stages=3, by_map=True),),
        "a chunk beside decode takes 138 us, and 185 by pointers",
        LOG,
    ),
    Rule("by pointers", lambda c: not c.kind.is_hopper or c.kind.has_64_rows, (_kept,), "not measured"),
    Rule(
        "Hopper, 16 bits, at most 32 rows, no mask or bias; pages of 16 or 32, a block for each tile of rows, or long "
        "keys: warp-specialized blocks",
        lambda c: c.kind.may_have_roles and c.keys >= 0 and c.roles is not None,
        (lambda _, c: _with_roles(*c.roles),),
        "pages of 16: 4 x 4,096 keys 20.7 us, and 21.8 by pointers, 20 x 1,024 22.3 and 30.1; contiguous keys: 32 x "
        "3,000 89.6 and 91.4; 17 to 32 rows 0.96 to 1.47 times as fast, 1.07 in the mean of 29 calls "
        "(2026-11-30-h200-decode-32-rows.json); others 2026-11-30-h200-tiles-of-few-rows.json and "
        "2026-12-01-h200-narrow-decode.json",
        ROLES,
    ),
    Rule("keys that maps cannot load", lambda c: not c.kind.may_map, (_kept,), "not measured"),
    Rule(
        "a window that shows mostly tiles at its edges",
        lambda c: c.kind.has_left_window and c.keys < MOSTLY_EDGES,
        (_kept,),
        "not measured; maps cannot load these tiles",
    ),
    Rule(
        "Hopper, 16 bits, few tiles of rows, head_dim up to 128: tensor maps and blocks of two warps",
        _suits_few_warps,
        (_by_few_warps,),
        "1 x 4,096 keys 6.6 us, and 7.8 with one block per SM; 4 x 4,096 20.0 and 21.3; 1 x 65,536 65.4 and 66.2",
        LOG,
    ),
    Rule(
        "Hopper, 16 bits, other calls of more tiles of up to 16 rows than SMs, head_dim up to 64: tensor maps and "
        "blocks of two warps",
        lambda c: c.kind.block_m == 16 and c.kind.wide <= 128 and not c.kind.is_invariant and c.tiles > c.sms,
        (_by_few_warps,),
        "0.97 to 1.11 times as fast as blocks of four warps in 15 calls, 1.03 in the mean",
        FEW_ROWS,
    ),
    Rule(
        "Hopper, 16 bits: tensor maps and four warps",
        lambda c: True,
        (_by_map,),
        "64 x 8,192 keys 477 us, and 487 by pointers with three blocks per SM; 16 x 4,096 63.6 and 64.2",
        MAPPED,
    ),
)


def _narrow(config: Config, call: Call) -> Config:
    """Returns the tiling of all keys of a prompt in one step, in tiles of 16 rows."""
    block_n = max(16, 1 << (max(1, call.seqlen_k) - 1).bit_length())
    return changed(config, block_m=16, block_n=block_n, num_warps=4, num_stages=2, by_map=False)


LARGEST_TILE = 64  # of a whole sequence: queries and keys
# Queries of packed sequences, on average: hopper/flash_fwd stores only whole tiles of 64 rows fast.
MOST_RAGGED = 60


def tile_of_sequence(problem: AttentionProblem, gpu: Gpu) -> Tile | None:
    """Returns the tile of short sequences, with stages: 16 x 16 and 32 x 32 hold one, and 64 x 32 the queries of packed
    ones that on average do not fill it. None for other calls; not None only on Hopper, in 16 bits without pages."""
    if gpu.capability != 90 or problem.page_size or problem.batch_invariant or problem.dtype == "float32":
        return None
    longest, widest = max(problem.seqlen_q, problem.seqlen_k), max(padded(problem.head_dim), padded(problem.head_dim_v))
    if longest > LARGEST_TILE or 0 in (problem.seqlen_q, problem.seqlen_k):
        return None
    if longest <= 16:
        return Tile(16, 16, 2)
    if longest <= 32 and widest <= (128 if problem.packed else 64):
        return Tile(32, 32, 2)
    is_ragged = problem.packed and problem.total_q <= MOST_RAGGED * problem.batch
    return Tile(64, 32, 2) if is_ragged else None


def _is_of_one_tile(c: Call) -> bool:
    short = c.kind.may_be_one_tile and c.seqlen_k <= LARGEST_TILE
    return short and tile_of_sequence(c.problem, c.gpu) is not None


def _in_one_tile(config: Config, call: Call) -> Config:
    tile = tile_of_sequence(call.problem, call.gpu)
    assert tile is not None
    rows = min(tile.most_m, call.kind.block_m)
    return changed(
        config, block_m=rows, block_n=tile.block_n, num_warps=rows // 16, num_stages=tile.num_stages, by_map=False,
        roles=False,
    )  # fmt: skip


def _of_32_keys(config: Config, call: Call) -> Config:
    return changed(config, block_n=32, num_warps=2, num_stages=2, by_map=False)


def _is_short_prompt(c: Call) -> bool:
    is_prompt = c.kind.may_be_prompt and (c.kind.has_64_rows or c.problem.seqlen_q == c.seqlen_k)
    return is_prompt and c.seqlen_k <= SHORT


def _is_short_cache(c: Call) -> bool:
    """Returns whether all blocks run at once with one step of 32 keys each."""
    if not c.kind.may_be_short or c.config.roles or c.tiles * -(-c.seqlen_k // 32) > 2 * c.sms:
        return False
    return one_step(c.problem, c.gpu, with_splits(c.problem, c.gpu, _of_32_keys(c.config, c)))


# One step for all keys of a split.
SHORTER: tuple[Rule[Change], ...] = (
    Rule(
        "Hopper, a dense prompt of at most 128 keys, 16 bits, head_dim up to 64, tiles of 16 rows run at once: one",
        lambda c: _is_short_prompt(c) and blocks_with_rows(c.problem, _narrow(c.config, c)) <= c.sms,
        (_narrow,),
        "one head of 128 queries 2.37 us, and 2.72 with 64 rows in two steps; 16 heads 2.73 and 2.84",
        LOG,
    ),
    Rule(
        "Hopper, 16 bits, at most 16 queries and keys; at most 32 up to head_dim 64, packed up to 128; packed at most "
        "64, and at most 60 queries on average: a tile of a sequence, a warp for each 16 rows",
        _is_of_one_tile,
        (_in_one_tile,),
        "1.01 to 1.88 times as fast as on four warps in ten dense calls, 0.91 at 4 x 16 of head_dim 128; packed "
        "1.36 to 1.93 times as fast as hopper/flash_fwd in eleven calls, and with at most 16 tokens 3.9 and 5.3 times "
        "(2026-11-29-h200-packed-short-sequences.json)",
        SHORT_SEQUENCES,
    ),
    Rule(
        "Hopper, a short cache in pages of less than 128, 16 bits, head_dim 65 to 128: one step of 32 keys by pointers",
        _is_short_cache,
        (_of_32_keys,),
        "1 x 1,024 keys in pages of 64 4.4 us, 5.0 with 64 keys and 5.7 by maps; pages of 16 4.7, 5.1 and 6.3",
        LOG,
    ),
    Rule("longer prompts and caches", lambda c: True, (_kept,), "not measured"),
)


def _ahead(config: Config, call: Call) -> Config:
    return changed(config, launched_ahead=True)


def _not_ahead(config: Config, call: Call) -> Config:
    return config


# Whether the launch starts before the preceding one has ended.
AHEAD: tuple[Rule[Change], ...] = (
    Rule(
        "a GPU without programmatic dependent launch",
        lambda c: not c.kind.may_be_ahead,
        (_not_ahead,),
        "not measured; the launch starts when the preceding one has ended",
    ),
    Rule(
        "launched ahead",
        lambda c: True,
        (_ahead,),
        "4 to 6 % in decode from a cold cache, one seventh in a small prefill, 1 to 8 % from pages; chunks from pages "
        "and calls whose SMs get different numbers of blocks 0.97 to 1.13 times as fast in 19 calls, 1.01 in the mean "
        f"({SPECIAL_CASES})",
        LOG,
    ),
)
SHALLOW: Rule[Change] = Rule(
    "Hopper, splits of one step: two stages",
    lambda c: _is_shallow(c),
    (lambda config, c: _shallow(c.problem, c.gpu, config),),
    "three stages are 0.65 to 1.05 times as fast in nine calls, 0.93 in the mean",
    SPECIAL_CASES,
)
TABLES = (TILES, RULES_OF_TILES, MAPS, SHORTER, AHEAD, (SHALLOW,))
RULES = tuple(rule for table in TABLES for rule in table if _kept not in rule.choices)
_kind = by_kind(Kind)


def _decided(problem: AttentionProblem, gpu: Gpu) -> tuple[Call, list[Rule[Any]]]:
    """Returns the call with the tiling of the tables, and the rows that chose it: the fastest on an H200 that fits
    registers without spills (tests/compile)."""
    rows = problem.seqlen_q * problem.heads_together
    if problem.batch_invariant and problem.packed:
        rows = 64  # the longest sequence depends on the rest of the batch
    kind = _kind(problem, gpu, 16 if rows <= 16 else 32 if rows <= 32 else 64)
    call, decided = Call(problem, gpu, kind), list(kind.tile_rows)
    for table in (kind.maps, kind.shorter, kind.ahead):
        for rule in table:  # as rules.deciding, with fewer calls at a new length
            if rule is table[-1] or rule.holds(call):
                break
        if rule.choices[0] is not _kept:
            call.config = rule.choices[0](call.config, call)
            if table is kind.shorter:  # undoes how keys are loaded
                decided = list(kind.tile_rows)
            decided.append(rule)
    return call, decided


def _is_shallow(call: Call) -> bool:
    """Returns whether the default has fewer stages than the tiling, although this fits shared memory."""
    fits = smem_bytes(call.problem, call.gpu, call.config) <= call.gpu.smem_per_block_bytes
    return fits and default(call.problem, call.gpu).num_stages < call.config.num_stages


def rows_of(problem: AttentionProblem, gpu: Gpu) -> list[Rule[Any]]:
    """Returns the rows that choose the default config: of the tile, how keys are loaded, the start, and the stages."""
    call, decided = _decided(problem, gpu)
    return [*decided, SHALLOW] if SHALLOW.holds(call) else decided


def rows_said(problem: AttentionProblem, gpu: Gpu, config: Config) -> list[str]:
    """Returns what `explain` prints about the rows: all but the number of splits, which is in closed form."""
    call, chosen = _decided(problem, gpu)[0], default(problem, gpu)
    of_tile = [vars(c) | {"num_splits": 0, "pieces": 0} for c in (config, chosen)]
    fits = smem_bytes(problem, gpu, call.config) <= gpu.smem_per_block_bytes
    return rules.notes(rows_of(problem, gpu), of_tile[0] == of_tile[1], fits)
