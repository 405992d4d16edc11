"""Configs of `hopper/flash_fwd_fp8`: their values, the SM resources they need, and the rules that choose one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from warpwave.gpu import Gpu
from warpwave.kernels.hopper.flash_fwd.config import query_tiles
from warpwave.kernels.hopper.host import MAX_PIECES, NUM_SMS
from warpwave.kernels.rules import Rule, deciding, note
from warpwave.problem import AttentionProblem

SMEM_PER_BLOCK = 227 * 1024


@dataclass(frozen=True)
class Config:
    """Tile shape.

    Args:
        block_m: queries per block, 64 per consumer warpgroup: 64 or 128.
        block_n: keys per step, and most keys that the tensor cores sum before their sum is added in float32: 64 or 128.
        num_stages: tiles of K, of V and of V transposed in flight: 2 to 4.
    """

    block_m: int
    block_n: int
    num_stages: int

    def __post_init__(self) -> None:
        for name, allowed in (("block_m", (64, 128)), ("block_n", (64, 128)), ("num_stages", (2, 3, 4))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be one of {allowed}")

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


def registers(problem: AttentionProblem, config: Config) -> tuple[int, int, int]:
    """Returns the registers of a thread of a consumer, of the transposing warps and of the producer, after reallocation,
    multiples of 8: with two consumers together 512, as 512 threads start with 128 each."""
    transposer = 40 if is_wide(problem) else 72
    return (256 - (transposer + 24) // 2 if config.groups == 2 else 240), transposer, 24


def bytes_at_once(problem: AttentionProblem) -> int:
    """Returns the bytes of V that the transposing warps have in registers, 16 or 32 a thread."""
    return 8192 if is_wide(problem) else 16384


def is_wide(problem: AttentionProblem) -> bool:
    """Returns whether consumers need every register: head_dim_v above 128."""
    return sum(pieces(problem.head_dim_v)) > 128


def smem_bytes(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns an upper bound on the shared memory of one block; tests compare it with what every config compiles to."""
    width, width_v = sum(pieces(problem.head_dim)), sum(pieces(problem.head_dim_v))
    of_rows = config.block_m * (width + 2 * width_v)  # Q, and out in 16 bits
    return of_rows + config.num_stages * config.block_n * (width + 2 * width_v) + 2048  # barriers and reductions


def chunk(problem: AttentionProblem, config: Config) -> int:
    """Returns the most columns of V in one product (products.TransposedRing)."""
    return 64


def values_first(problem: AttentionProblem, config: Config) -> bool:
    """Returns whether a step waits for the products with V before its exponentials instead of after them."""
    return True


# Choice of a config ---------------------------------------------------------------------------------------------------


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the default first, then every other candidate that fits shared memory, registers, and the blocks of keys
    that share a factor."""
    first = default(problem, gpu)
    space = [Config(m, n, stages) for m in (64, 128) for n in (64, 128) for stages in (2, 3, 4)]
    return [first, *(c for c in space if c != first and fits(problem, gpu, c))]


def fits(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    """Returns whether a config fits shared memory and a consumer's registers (scores, probabilities, accumulator and
    one product), and a tile of keys has one factor."""
    width_v, block_n = sum(pieces(problem.head_dim_v)), config.block_n
    needed = block_n // 2 + block_n // 8 + width_v // 2 + min(chunk(problem, config), width_v) // 2 + 24
    blocks = (problem.descale_blocks or (0, 0, 0))[1:]
    return (
        needed <= registers(problem, config)[0]
        and all(block % block_n == 0 for block in blocks)
        and smem_bytes(problem, gpu, config) <= SMEM_PER_BLOCK
    )


class Call:
    """The properties of a call that the rows of `RULES` read."""

    def __init__(self, problem: AttentionProblem, gpu: Gpu) -> None:
        self.problem, self.num_sms = problem, gpu.num_sms or NUM_SMS
        self.width = max(sum(pieces(problem.head_dim)), sum(pieces(problem.head_dim_v)))
        self.of_64_keys = self.width > 128 or 64 in (problem.descale_blocks or (0, 0, 0))[1:]

    def rows_per_sm(self, block_m: int) -> int:
        """Returns the queries that the busiest SM processes if all blocks take equally long."""
        return -(-query_tiles(self.problem, block_m) // self.num_sms) * block_m

    @property
    def is_uneven(self) -> bool:
        """Returns whether the busiest SM gets at least a fifth more queries from blocks of 128 than from blocks of
        64."""
        return self.rows_per_sm(128) > 1.2 * self.rows_per_sm(64)


RULES: tuple[Rule[Config], ...] = (
    Rule(
        "uneven blocks of 128 queries, and head_dim above 128 or a factor for each 64 keys",
        lambda c: c.is_uneven and c.of_64_keys,
        (Config(64, 64, 3), Config(64, 64, 2)),
        "the longest block sets the length of a wave",
    ),
    Rule(
        "uneven blocks of 128 queries",
        lambda c: c.is_uneven,
        (Config(64, 128, 3), Config(64, 128, 2)),
        "the longest block sets the length of a wave",
    ),
    Rule(
        "head_dim above 128, or a factor for each 64 keys",
        lambda c: c.of_64_keys,
        (Config(128, 64, 3), Config(128, 64, 2)),
        "the widest tile whose accumulators fit registers",
    ),
    Rule(
        "head_dim up to 128",
        lambda c: True,
        (Config(128, 128, 3), Config(128, 128, 2)),
        "the widest tile whose accumulators fit registers",
    ),
)


def rule_of(problem: AttentionProblem, gpu: Gpu) -> Rule[Config]:
    """Returns the row that chooses the default config."""
    return deciding(RULES, Call(problem, gpu))


def default(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the config used when the caller names none."""
    return next(config for config in rule_of(problem, gpu).configs if fits(problem, gpu, config))


def notes(problem: AttentionProblem, gpu: Gpu, config: Config) -> list[str]:
    """Returns what `explain` prints about a config: the row that chose it."""
    return [note(rule_of(problem, gpu), config)]
