"""Configs of `hopper/flash_fwd`: what one is, what it takes of an SM, and which is the default where."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from warpwave import precision
from warpwave.gpu import Gpu
from warpwave.kernels.prepass import scale_ahead
from warpwave.problem import DTYPE_BYTES, AttentionProblem, by_kind

MAX_PIECES = 3
NUM_SMS = 132  # of an H100 or H200 SXM, where no device is asked
SHORT_KEYS = 2048
SMEM_PER_SM = 228 * 1024  # of which the driver keeps 1 KiB a block
# Ways of computing float32 products that it has, and parts of an operand: scaled float16, or bfloat16.
PARTS = {**scale_ahead.PARTS, "bf16x6": 3}
ABLE = tuple(PARTS)


@dataclass(frozen=True)
class Config:
    """Tile shape and how blocks share an SM.

    Args:
        block_m: queries of a block, 64 for each consumer warpgroup: 64, 128 or 192.
        block_n: keys a step walks: 32, 64 or 128.
        num_stages: K and V tiles in flight: at least 2; where operands of float32 have several parts, at least 1.
        blocks_per_sm: blocks that share an SM, and its registers and shared memory: 1 to 3; more than 1 only with
            64 queries a block.
    """

    block_m: int
    block_n: int
    num_stages: int
    blocks_per_sm: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (("block_m", (64, 128, 192)), ("block_n", (32, 64, 128)), ("blocks_per_sm", (1, 2, 3))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be one of {allowed}")
        if self.num_stages < 1:
            raise ValueError(f"num_stages is {self.num_stages}; it must be at least 1, and 2 where tiles overlap")
        if self.blocks_per_sm > 1 and self.block_m != 64:
            raise ValueError(f"blocks_per_sm is {self.blocks_per_sm}; more than 1 needs block_m 64, not {self.block_m}")
        if self.blocks_per_sm > 1 and self.num_stages > 4:
            raise ValueError(f"num_stages is {self.num_stages}; blocks that share an SM have barriers for 4")

    @property
    def groups(self) -> int:
        """Consumer warpgroups."""
        return self.block_m // 64


@cache
def pieces(head_dim: int) -> tuple[int, ...]:
    """The powers of two a row of this width is made of, widest first: 80 = 64 + 16. Widths that are no sum of three
    such powers from 16 up are padded with zeros, which the copy engine supplies."""
    width = -(-head_dim // 16) * 16
    while True:
        parts = tuple(1 << bit for bit in range(8, 3, -1) if width & 1 << bit)
        if len(parts) <= MAX_PIECES:
            return parts
        width += 16


def num_parts(problem: AttentionProblem, gpu: Gpu) -> int:
    """Parts of an operand: 1 for 16-bit types, in float32 0 where it cannot be multiplied here."""
    if problem.dtype != "float32":
        return 1
    return PARTS.get(precision.arithmetic(problem, gpu, ABLE), 0)


def query_tiles(problem: AttentionProblem, config: Config) -> int:
    """Places of tiles in the schedule, over all heads and sequences."""
    if problem.packed:
        return (problem.total_q // config.block_m + problem.batch) * problem.num_heads_q
    return -(-problem.seqlen_q // config.block_m) * problem.num_heads_q * problem.batch


# What one takes of an SM ----------------------------------------------------------------------------------------------


def registers(config: Config) -> tuple[int, int]:
    """Registers of a consumer's and the producer's threads after they are handed over, multiples of 8. An SM has
    65,536; the producer's warpgroup counts in full."""
    return {1: (240, 24), 2: (240, 24), 3: (160, 32)}[config.groups]


def out_pieces(problem: AttentionProblem, config: Config) -> tuple[int, ...]:
    """The pieces that a row of out is stored in: those of a row of V, or, one half after the other, two."""
    of_values = pieces(problem.head_dim_v)
    return (128, 128) if out_columns(problem, config) == 128 and of_values == (256,) else of_values


@by_kind
def out_columns(problem: AttentionProblem, config: Config) -> int:
    """How many columns of out have shared memory of their own, so that the next block's Q loads while the last product
    runs: all of them, half of 256, or none, where out takes Q's. Worth 10 % at 16 x 1024 (head_dim 128)."""
    limit = SMEM_PER_SM // config.blocks_per_sm - 1024
    width = sum(pieces(problem.head_dim_v))
    if pieces(problem.head_dim) != pieces(problem.head_dim_v) or _smem(problem, config, width) <= limit:
        return width
    return 128 if pieces(problem.head_dim_v) == (256,) and _smem(problem, config, 128) <= limit else 0


@by_kind
def q_in_registers(problem: AttentionProblem, config: Config) -> int:
    """How many columns of Q consumers keep in registers, half of 256 or none. The product of scores then reads 96 bytes
    of shared memory a clock instead of 128, all that there are: 1.004 to 1.009 times as fast at 16 x 1024 to 1 x 16384,
    full and causal. A quarter takes 1.02 times as long, half at head_dim 128 1.01 times. Where more is done to scores,
    registers run out."""
    wide = problem.dtype != "float32" and pieces(problem.head_dim) == pieces(problem.head_dim_v) == (256,)
    bare = problem.mask_shape is problem.bias_shape is problem.alibi_shape is None and problem.softcap == 0.0
    bare = bare and problem.window_size == (-1, -1) and not problem.packed
    return 128 if wide and bare and (config.block_m, config.block_n) == (128, 64) else 0


@by_kind
def smem_bytes(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """An upper bound on the shared memory of one block, which tests hold against what every config compiles to."""
    if problem.dtype == "float32":
        return _smem(problem, config, 0, max(1, num_parts(problem, gpu)))
    return _smem(problem, config, out_columns(problem, config))


def _smem(problem: AttentionProblem, config: Config, out_columns: int, parts: int = 1) -> int:
    width, width_v = sum(pieces(problem.head_dim)), sum(pieces(problem.head_dim_v))
    elements = config.block_m * (width + out_columns) + config.num_stages * config.block_n * (width + width_v)
    beside = config.num_stages * config.block_m * config.block_n * _bias_bytes(problem)
    return 2 * parts * elements + beside + 2048  # the last for barriers and reductions


def has_bias_cells(problem: AttentionProblem) -> bool:
    """Whether each score has a bias of its own, which comes with K and takes registers."""
    return problem.bias_shape is not None and min(problem.bias_shape[2:]) > 1


def _bias_bytes(problem: AttentionProblem) -> int:
    return DTYPE_BYTES[problem.bias_dtype or problem.dtype] if has_bias_cells(problem) else 0


def values_first(problem: AttentionProblem, config: Config) -> bool:
    """Whether a step waits for the product with V before its exponentials, not behind them. Conversions then hide
    between exponentials: 1.09 times as fast at head_dim 128, 1 x 16384, 1.07 at 80, 1.06 in a window of 1,024. At 256,
    where the product is several times as long as the exponentials, 0.98 times, and 0.95 times with a bias for each
    score. Of blocks of one warpgroup 1.02 times where three share an SM (head_dim 64, 16 x 1024, causal)."""
    if config.groups == 1 and (config.blocks_per_sm < 3 or problem.dtype == "float32"):
        return False
    return sum(pieces(problem.head_dim_v)) <= 128 and not has_bias_cells(problem)


# Which ----------------------------------------------------------------------------------------------------------------


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """The default first, then every other candidate that fits the GPU's shared memory and registers; empty where none
    fits."""
    parts, first = num_parts(problem, gpu), default(problem, gpu)
    found = fitting(problem, gpu)
    if parts > 1:  # one stage only where no other fits
        found = [c for c in found if c.num_stages > 1 or replace(c, num_stages=2) not in found]
    return [] if first is None else [first, *(c for c in found if c != first)]


def default(problem: AttentionProblem, gpu: Gpu) -> Config | None:
    """The config with which a problem runs where nobody names another; None where none fits."""
    measured = next((c for c in _defaults(problem, gpu) if _fits_shared_memory(problem, gpu, c)), None)
    return measured or next(iter(fitting(problem, gpu)), None)


@by_kind
def fitting(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """The candidates that fit the GPU's shared memory and registers."""
    return [c for c in _space(problem, num_parts(problem, gpu)) if _fits(problem, gpu, c)]


def _space(problem: AttentionProblem, parts: int) -> list[Config]:
    return [
        Config(block_m, block_n, num_stages, blocks_per_sm)
        for block_m in (64, 128, 192)
        for block_n in ((32, 64, 128) if parts > 1 or _width(problem) > 256 else (64, 128))
        for num_stages in ((1, 2, 3) if parts > 1 else (2, 3, 4))
        for blocks_per_sm in (1, 2, 3)
        if not (block_m > 64 and blocks_per_sm > 1)
    ]


def _width(problem: AttentionProblem) -> int:
    return max(sum(pieces(problem.head_dim)), sum(pieces(problem.head_dim_v)))


@by_kind
def _fits_shared_memory(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    return config.blocks_per_sm * (smem_bytes(problem, gpu, config) + 1024) <= SMEM_PER_SM


def _fits(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    """Shared memory of all blocks of an SM, and a consumer thread's registers: scores, probabilities, accumulator."""
    if not _fits_shared_memory(problem, gpu, config):
        return False
    width_v, block_n, parts = sum(pieces(problem.head_dim_v)), config.block_n, num_parts(problem, gpu)
    needed = block_n // 2 + block_n // 4 + width_v // 2 + 40 + block_n // 8 * _bias_bytes(problem)
    if parts > 1:  # scores in two accumulators, or parts of probabilities and a slice of the product (split_float32.py)
        needed = width_v // 2 + max(block_n, parts * block_n // 4 + min(width_v, 64)) + 16
    elif width_v > 320:  # scores and probabilities are not there together (serial.py)
        needed = block_n // 2 + width_v // 2 + 32
    return needed <= {1: 240, 2: 200, 3: 136}[config.blocks_per_sm] and needed <= registers(config)[0]


def _defaults(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """By head_dim, mask, keys, and work per SM, the first that fits; figures are ratios of time on an H200
    (docs/notes/hopper.md)."""
    width, parts = _width(problem), num_parts(problem, gpu)
    if parts > 1:
        return _defaults_of_parts(problem, gpu, width, parts)
    one_wave = query_tiles(problem, Config(128, 64, 2)) <= (gpu.num_sms or NUM_SMS)
    if problem.dtype == "float32" and 128 < width and problem.has_band and one_wave:
        # One wave of blocks is as long as its longest: tf32 at head_dim 256, causal, 2 x 8 heads x 1024, 128 queries
        # take 1.34 times as long.
        return [Config(64, 64, 2)]
    if width > 256:
        return [Config(128, 32, 2), Config(64, 32, 2)]
    if has_bias_cells(problem):
        # 4 x 4096, a bias in bfloat16 for each score: head_dim 64 1.13 times as fast as with 64 keys a step; 128 level
        # with two blocks of 64 queries an SM. In float32 three stages leave no room for out: 0.97.
        if width <= 64:
            return [Config(128, 128, 2), Config(128, 64, 2)]
        return [Config(128, 64, 3 if _bias_bytes(problem) == 2 else 2), Config(128, 64, 2)]
    return [_default(problem, gpu, width)]


def _defaults_of_parts(problem: AttentionProblem, gpu: Gpu, width: int, parts: int) -> list[Config]:
    """64 keys a step and two warpgroups, as far as shared memory goes: with 32 keys a key takes 1.2 times as long, for
    then every product reads more of Q than of K; a second stage gains nothing (head_dim 64 and 128)."""
    num_sms = gpu.num_sms or NUM_SMS
    few = _rows_per_sm(problem, 128, num_sms) > 1.2 * _rows_per_sm(problem, 64, num_sms)
    if width <= 64:
        if few or (parts == 3 and problem.has_band and problem.seqlen_k <= SHORT_KEYS):
            # bf16x6, 128 queries in one block take 1.35 times as long at 1 head x 512, 1.04 times causal at 4 x 2048.
            return [Config(64, 64, 1, 2) if parts == 3 else Config(64, 64, 2, 2)]
        # Two parts, 64 keys a step take 1.11 times as long at 4 x 2048, 1.15 times at 1 x 8192.
        return [Config(128, 64, 2) if parts == 3 else Config(128, 128, 2)]
    if few:
        return [Config(64, 64, 2), Config(64, 64, 1), Config(64, 32, 1)]
    if width > 128 and parts == 3:
        return [Config(64, 64, 1), Config(64, 32, 1)]
    return [Config(128, 64, 2), Config(128, 64, 1), Config(64, 64, 1)]


def _default(problem: AttentionProblem, gpu: Gpu, width: int) -> Config:
    if width > 128:
        return Config(128, 64, 2)
    if width > 64:
        return _default_of_128(problem, gpu, width)
    if problem.has_band and _reach(problem) <= SHORT_KEYS:
        # Blocks of 64 queries waste less at the diagonal and idle less at the end: 1.23 times as fast as 192 queries at
        # 16 x 1024, 1.04 at 8 x 2048, but 0.98 at 5 x 3072, 0.97 at 4 x 4096 and 0.88 at 1 x 16384. With a window of
        # 1,024 of 16,384 keys 1.09 times, of 4,096 0.96 times.
        return Config(64, 64, 3, 3)
    num_sms = gpu.num_sms or NUM_SMS
    if _rows_per_sm(problem, 192, num_sms) > 1.2 * _rows_per_sm(problem, 64, num_sms):
        # Too few blocks of 192 to go round: 1 x 1024 with 32 heads takes 1.3 times as long with them; the ratio is
        # 1.5. At 1.14, 16 x 1024, they are 1.03 times as fast.
        return Config(64, 128, 2, 2)
    return Config(192, 128, 3)


def _default_of_128(problem: AttentionProblem, gpu: Gpu, width: int) -> Config:
    """From head_dim 65 to 128."""
    plain = problem.dtype != "float32" and not problem.packed and problem.mask_shape is problem.bias_shape is None
    num_sms = gpu.num_sms or NUM_SMS
    # Of rows on the busiest SM with 192 queries, by those with 128: 1.125 at 16 x 1024, 1.03 at 4 x 4096 and 1 x 16384.
    more = _rows_per_sm(problem, 192, num_sms) / max(1, _rows_per_sm(problem, 128, num_sms))
    if plain and len(pieces(width)) < 3 and more <= (1.13 if width > 96 else 1.06):
        # Three warpgroups hide each other's softmax, and a third less of K and V comes from L2. At head_dim 128 1.07
        # times as fast as 128 queries at 1 x 16384 and 4 x 4096, 1.035 at 16 x 1024; causal 1.07, 1.04, 1.01; in
        # windows 1.06 to 1.08. At 80 and 96 1.02 to 1.03, at 112 0.99 to 1.015, with a random mask 0.96.
        return Config(192, 64, 4)
    return Config(128, 128, 2)


def _reach(problem: AttentionProblem) -> int:
    """Keys that a query sees at the most, by position."""
    low, high = problem.band(problem.seqlen_q, problem.seqlen_k)
    return problem.seqlen_k if low is None or high is None else max(0, min(problem.seqlen_k, high - low + 1))


def _rows_per_sm(problem: AttentionProblem, block_m: int, num_sms: int) -> int:
    """Queries that the busiest SM works on, all blocks being as long."""
    return -(-query_tiles(problem, Config(block_m, 64, 2)) // num_sms) * block_m
