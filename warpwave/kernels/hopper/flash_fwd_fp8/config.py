"""Configs of `hopper/flash_fwd_fp8`: their values, the SM resources they need, and the rules that choose one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from warpwave.gpu import Gpu
from warpwave.kernels import rules
from warpwave.kernels.hopper.flash_fwd.config import query_tiles
from warpwave.kernels.hopper.flash_fwd_fp8.products import AT_ONCE, CHUNK
from warpwave.kernels.hopper.host import MAX_PIECES, NUM_SMS
from warpwave.kernels.rules import Rule, deciding
from warpwave.problem import AttentionProblem

SMEM_PER_BLOCK = 227 * 1024


@dataclass(frozen=True)
class Config:
    """Tile shape and stages.

    Args:
        block_m: queries per block, 64 per consumer warpgroup: 64, 128 or 192.
        block_n: keys per step, and most keys that the tensor cores sum before their sum is added in float32: 64 or 128.
        num_stages: tiles of K and of V in flight: 2 to 4.
    """

    block_m: int
    block_n: int
    num_stages: int

    def __post_init__(self) -> None:
        allowed = {"block_m": (64, 128, 192), "block_n": (64, 128), "num_stages": (2, 3, 4)}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be one of {values}")

    @property
    def groups(self) -> int:
        """Number of consumer warpgroups."""
        return self.block_m // 64


@cache
def pieces(head_dim: int) -> tuple[int, ...]:
    """Returns the powers of two that add up to a row width, widest first: 96 = 64 + 32. wgmma sums 32 columns of 8 bits
    at a time. A width that is not a sum of at most three such powers is padded with zeros, which TMA supplies."""
    width = -(-head_dim // 32) * 32
    while True:
        parts = tuple(1 << bit for bit in range(8, 4, -1) if width & 1 << bit)
        if len(parts) <= MAX_PIECES:
            return parts
        width += 32


def registers(config: Config) -> tuple[int, int]:
    """Returns the registers of a consumer thread and of a producer thread after reallocation, both multiples of 8. An
    SM has 65,536; the producer's warpgroup counts in full."""
    return {1: (240, 24), 2: (240, 24), 3: (160, 32)}[config.groups]


def smem_bytes(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns an upper bound on the shared memory of one block; tests compare it with what every config compiles to."""
    width, width_v = sum(pieces(problem.head_dim)), sum(pieces(problem.head_dim_v))
    of_rows = config.block_m * (width + 2 * width_v)  # Q, and out in 16 bits
    return of_rows + config.num_stages * config.block_n * (width + width_v) + 2048  # barriers and reductions


# Choice of a config ---------------------------------------------------------------------------------------------------


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the default first, then every other candidate that fits shared memory, registers, and the blocks of keys
    that share a factor."""
    first = default(problem, gpu)
    space = [
        Config(block_m, block_n, num_stages)
        for block_m in (64, 128, 192)
        for block_n in (64, 128)
        for num_stages in (2, 3, 4)
    ]
    return [first, *(c for c in space if c != first and fits(problem, gpu, c))]


def fits(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    """Returns whether a config fits shared memory and a consumer's registers (scores, probabilities, accumulator,
    products, and 8 each for a window's left end, which is hidden in the overlapped loop, and for factors of blocks),
    and a tile of keys has one factor."""
    width_v, block_n = sum(pieces(problem.head_dim_v)), config.block_n
    products = width_v if width_v <= AT_ONCE.value else CHUNK.value
    blocks = (problem.descale_blocks or (0, 0, 0))[1:]
    needed = block_n // 2 + block_n // 8 + width_v // 2 + products // 2 + 16
    needed += 8 * (problem.window_size[0] >= 0) + 8 * any(blocks)
    return (
        needed <= registers(config)[0]
        and all(block % block_n == 0 for block in blocks)
        and smem_bytes(problem, gpu, config) <= SMEM_PER_BLOCK
    )


class Call:
    """The properties of a call that the rows of `RULES` read."""

    def __init__(self, problem: AttentionProblem, gpu: Gpu) -> None:
        self.problem, self.num_sms = problem, gpu.num_sms or NUM_SMS
        self.width = max(sum(pieces(problem.head_dim)), sum(pieces(problem.head_dim_v)))
        blocks = (problem.descale_blocks or (0, 0, 0))[1:]
        self.of_64_keys, self.has_one_factor = self.width > 128 or 64 in blocks, not any(blocks)
        self.has_left_end = problem.window_size[0] >= 0
        self.changes_scores = problem.softcap != 0.0 or problem.alibi_shape is not None

    def rows_per_sm(self, block_m: int) -> int:
        """Returns the queries that the busiest SM processes if all blocks take equally long."""
        return -(-query_tiles(self.problem, block_m) // self.num_sms) * block_m

    @property
    def is_uneven(self) -> bool:
        """Returns whether the busiest SM gets at least a fifth more queries from blocks of 128 than from blocks of
        64."""
        return self.rows_per_sm(128) > 1.2 * self.rows_per_sm(64)

    @property
    def suits_192(self) -> bool:
        """Returns whether the busiest SM gets about as many queries from blocks of 192 as from blocks of 128."""
        return self.rows_per_sm(192) <= 1.06 * self.rows_per_sm(128)


VARIANTS = "2026-11-23-h200-float8-variants.log"
TILES = "2026-11-23-h200-float8-tiles-64.json"
TURNS = "2026-11-25-h100-float8-turns.json"

# The figures are ratios of time on an H200, at 4 x 4096 and before V was transposed by a launch unless a row names
# other calls; those had 3 stages. All rows have 4 stages, which are 1 to 5 % faster than 3
# (2026-11-23-h200-float8-transposed-64.json and -stages.json). Warpgroups take turns (turns.py) in the row of TURNS
# alone: the other figures are older.
RULES: tuple[Rule[Config], ...] = (
    Rule(
        "uneven blocks of 128 queries, and head_dim above 128 or a factor for each 64 keys",
        lambda c: c.is_uneven and c.of_64_keys,
        (Config(64, 64, 4),),
        "not measured; the longest block sets the length of a wave",
    ),
    Rule(
        "uneven blocks of 128 queries",
        lambda c: c.is_uneven,
        (Config(64, 128, 4),),
        "not measured; the longest block sets the length of a wave",
    ),
    Rule(
        "head_dim above 128, or a factor for each 64 keys",
        lambda c: c.of_64_keys,
        (Config(128, 64, 4),),
        "not measured; 128 keys a step do not fit the registers above head_dim 128, and a tile of keys has one factor",
    ),
    Rule(
        "head_dim up to 64, no mask by position, one factor for a head's keys, and blocks of 192 queries balance over "
        "the SMs",
        lambda c: c.width <= 64 and not c.problem.has_band and c.has_one_factor and c.suits_192,
        (Config(192, 128, 4),),
        "a third warpgroup hides latency, as with 64 keys a step: 128 queries took 1.08 times as long",
        VARIANTS,
    ),
    Rule(
        "head_dim up to 64, a causal mask or the right end of a window, no left end, softcap or ALiBi, one factor for "
        "a head's keys, and blocks of 192 queries balance over the SMs",
        lambda c: c.width <= 64 and not (c.has_left_end or c.changes_scores) and c.has_one_factor and c.suits_192,
        (Config(192, 128, 4),),
        "causal 1 x 16384 on an H100: 192 x 64 took 1.20 times as long, and 1.18 times before warpgroups took turns",
        TURNS,
    ),
    Rule(
        "head_dim up to 64, another mask by position, one factor for a head's keys, and blocks of 192 queries balance "
        "over the SMs",
        lambda c: c.width <= 64 and c.has_one_factor and c.suits_192,
        (Config(192, 64, 4),),
        "a third warpgroup: causal 1 x 16384, 4 x 4096 and 16 x 1024 took 1.14, 1.08 and 1.02 times as long with 128 x "
        "128; 192 x 128 spills in the loop over keys",
        TILES,
    ),
    Rule(
        "head_dim up to 128",
        lambda c: True,
        (Config(128, 128, 4),),
        "64 keys a step took 1.09 times as long at head_dim 64, 1.2 times at 128",
        VARIANTS,
    ),
)


def rule_of(problem: AttentionProblem, gpu: Gpu) -> Rule[Config]:
    """Returns the row that chooses the default config."""
    return deciding(RULES, Call(problem, gpu))


def default(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the config used when the caller names none."""
    return rule_of(problem, gpu).choices[0]


def notes(problem: AttentionProblem, gpu: Gpu, config: Config) -> list[str]:
    """Returns what `explain` prints about a config: the row that chose it."""
    return rules.notes([rule_of(problem, gpu)], config == default(problem, gpu))
