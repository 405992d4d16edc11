"""Configs of `hopper/flash_fwd`: their values, the SM resources they need, and those that fit."""

from __future__ import annotations

from dataclasses import dataclass

from warpwave import precision
from warpwave.gpu import Gpu
from warpwave.kernels.hopper.host import bias_bytes, pieces
from warpwave.kernels.hopper.shared_tiles import heads_of_tile
from warpwave.kernels.hopper.split_tiles import MOST_SPLITS
from warpwave.kernels.prepass import scale_ahead
from warpwave.problem import DTYPE_BYTES, AttentionProblem, by_kind

SMEM_PER_SM = 228 * 1024  # the driver keeps 1 KiB of it for each block
# Supported ways to compute float32 products, and the number of parts of an operand: scaled float16, or bfloat16.
PARTS = {**scale_ahead.PARTS, "bf16x6": 3}
ABLE = tuple(PARTS)


@dataclass(frozen=True)
class Config:
    """Tile shape and how blocks share an SM.

    Args:
        block_m: rows per block, 64 per consumer warpgroup: 64, 128 or 192. A row is a query of one head.
        block_n: keys per step: 32, 64 or 128.
        num_stages: K and V tiles in flight: at least 2; at least 1 if float32 operands have several parts.
        blocks_per_sm: blocks that share an SM, its registers and its shared memory: 1 to 3; more than 1 requires
            64 rows per block.
        narrowest_v: columns of the narrowest piece of a row of V: 16, 32 or 64. With wider ones rows are padded
            with zeros: 112 is 64 + 32 + 16, or one piece of 128.
        heads: query heads of a kv head that share a tile (`pack_gqa` of FlashAttention): a power of two up to 64.
            A tile then holds `block_m / heads` queries of each.
        num_splits: blocks that split the keys of a tile; another launch merges their results if it is more than 1.
    """

    block_m: int
    block_n: int
    num_stages: int
    blocks_per_sm: int = 1
    narrowest_v: int = 16
    heads: int = 1
    num_splits: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (
            ("block_m", (64, 128, 192)),
            ("block_n", (32, 64, 128)),
            ("blocks_per_sm", (1, 2, 3)),
            ("narrowest_v", (16, 32, 64)),
            ("heads", (1, 2, 4, 8, 16, 32, 64)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be one of {allowed}")
        if not 1 <= self.num_splits <= MOST_SPLITS:
            raise ValueError(f"num_splits is {self.num_splits}; it must be 1 to {MOST_SPLITS}")
        if self.num_stages < 1:
            raise ValueError(f"num_stages is {self.num_stages}; it must be at least 1, and at least 2 if tiles overlap")
        if self.blocks_per_sm > 1 and self.block_m != 64:
            raise ValueError(f"blocks_per_sm is {self.blocks_per_sm}; more than 1 needs block_m 64, not {self.block_m}")

    @property
    def groups(self) -> int:
        """Number of consumer warpgroups."""
        return self.block_m // 64


def num_parts(problem: AttentionProblem, gpu: Gpu) -> int:
    """Returns the number of parts of an operand: 1 for 16-bit types; for float32, 0 if it cannot be multiplied here."""
    if problem.dtype != "float32":
        return 1
    return PARTS.get(precision.arithmetic(problem, gpu, ABLE), 0)


def widens_values(problem: AttentionProblem) -> bool:
    """Returns whether v has 8 bits, not in a cache: a preceding launch writes it in float16."""
    return problem.is_quantized and DTYPE_BYTES[problem.dtype_of_v] == 1


def has_widener(problem: AttentionProblem) -> bool:
    """Returns whether blocks have a widener, which converts the tiles of an 8-bit cache (widener.py)."""
    return problem.dtype_kv is not None


# Resources of an SM ---------------------------------------------------------------------------------------------------


def registers(problem: AttentionProblem, config: Config) -> tuple[int, int]:
    """Returns the registers that a consumer thread and a thread of the producer's warpgroup request, both multiples of
    8. An SM has 65,536 registers; the producer's warpgroup, which the widener is part of, counts in full.

    With one consumer warpgroup, only the producer requests a number. Triton gives the consumer the rest of the block's
    registers: 255 a thread with one block per SM, 232 with two and 136 with three (`launches._register_cap`), 216 and
    120 beside a widener. With fewer, or with 152 for three warpgroups and 128 keys a step, ptxas made every single
    wgmma wait (head_dim 64).
    """
    if has_widener(problem):
        of_three = (160, 32) if config.block_n > 64 else (152, 56)
        return {1: (240, 40), 2: (224, 56), 3: of_three}[config.groups]
    return {1: (240, 24), 2: (240, 24), 3: (160, 32)}[config.groups]


def row_pieces(problem: AttentionProblem, config: Config) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the pieces of a row of Q and K, and those of a row of V. wgmma sums 32 columns of 8 bits at a time, and
    a swizzled line of shared memory has 32 bytes at least."""
    of_keys = 32 if problem.is_quantized or has_widener(problem) else 16
    of_values = max(config.narrowest_v, 32 if has_widener(problem) else 16)
    return pieces(problem.head_dim, of_keys), pieces(problem.head_dim_v, of_values)


def out_pieces(problem: AttentionProblem, config: Config) -> tuple[int, ...]:
    """Returns the pieces in which a row of out is stored: those of a row of V, or two halves stored one after the
    other."""
    _, of_values = row_pieces(problem, config)
    return (128, 128) if out_columns(problem, config) == 128 and of_values == (256,) else of_values


def stores_registers(problem: AttentionProblem, config: Config) -> bool:
    """Returns whether out is stored from registers, without shared memory: in float32, and if it is a partial
    result."""
    return problem.dtype == "float32" or config.num_splits > 1


@by_kind
def out_columns(problem: AttentionProblem, config: Config) -> int:
    """Returns how many columns of out have their own shared memory, so that the next block's Q loads during the last
    product: all columns, half of 256, or none, in which case out reuses the memory of Q's first pieces, unless Q is of
    8 bits. Worth 10 % at 16 x 1024 (head_dim 128)."""
    limit = SMEM_PER_SM // config.blocks_per_sm - 1024
    of_queries, of_values = row_pieces(problem, config)
    width = sum(of_values)
    if of_queries[: len(of_values)] != of_values or _smem(problem, config, width) <= limit:
        return width
    halves = of_queries == of_values == (256,)
    if halves and _smem(problem, config, 128) <= limit:
        return 128
    return width if problem.is_quantized else 0


@by_kind
def smem_bytes(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns an upper bound on the shared memory of one block; tests compare it with what every config compiles to."""
    if problem.dtype == "float32":
        return _smem(problem, config, 0, max(1, num_parts(problem, gpu)))
    of_out = 0 if stores_registers(problem, config) else out_columns(problem, config)
    return _smem(problem, config, of_out, narrow_stages=narrow_stages(problem, config))


@by_kind
def narrow_stages(problem: AttentionProblem, config: Config) -> int:
    """Returns the number of 8-bit tiles that wait for the widener, of K and of V each: two if they fit, else one; 0
    without a widener."""
    if not has_widener(problem):
        return 0
    limit = SMEM_PER_SM // config.blocks_per_sm - 1024
    return 2 if _smem(problem, config, out_columns(problem, config), narrow_stages=2) <= limit else 1


def _smem(problem: AttentionProblem, config: Config, out_columns: int, parts: int = 1, narrow_stages: int = 1) -> int:
    width, width_v = map(sum, row_pieces(problem, config))
    of_keys = config.block_m + config.num_stages * config.block_n  # rows of Q and K
    of_values = config.block_m * out_columns + config.num_stages * config.block_n * width_v
    beside = config.num_stages * config.block_m * config.block_n * bias_bytes(problem)
    if has_widener(problem):
        beside += narrow_stages * config.block_n * (width + width_v)
    if problem.kv_factors == "token":
        beside += 4 * config.block_n * (2 * narrow_stages + 3 * (config.num_stages + 1))  # token_factors.TokenFactors
    size = 1 if problem.is_quantized else 2 * parts
    return of_keys * width * size + of_values * 2 * parts + beside + 2048  # 2048 for barriers and reductions


def has_bias_cells(problem: AttentionProblem) -> bool:
    """Returns whether each score has its own bias, which is loaded with K and takes registers."""
    return bias_bytes(problem) > 0


def values_first(problem: AttentionProblem, config: Config) -> bool:
    """Returns whether a step waits for the product with V before its exponentials instead of after them.

    Conversions then overlap with exponentials: 1.09 times as fast at head_dim 128, 1 x 16384, 1.07 at 80, 1.06 with a
    window of 1,024. At 256 the product takes several times as long as the exponentials: 0.98 times, and 0.95 times with
    a bias for each score. With blocks of one warpgroup, 1.02 times if three share an SM (head_dim 64, 16 x 1024,
    causal).
    """
    if config.groups == 1 and (config.blocks_per_sm < 3 or problem.dtype == "float32"):
        return False
    return sum(row_pieces(problem, config)[1]) <= 128 and not has_bias_cells(problem)


@by_kind
def fitting(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the candidates that fit the GPU's shared memory and registers."""
    return [c for c in _space(problem, num_parts(problem, gpu)) if _fits(problem, gpu, c)]


def _space(problem: AttentionProblem, parts: int) -> list[Config]:
    has_short_steps = parts > 1 or tile_width(problem) > 256 or problem.kv_factors == "token"
    return [
        Config(block_m, block_n, num_stages, blocks_per_sm, heads=heads_of_tile(problem))
        for block_m in (64, 128, 192)
        for block_n in ((32, 64, 128) if has_short_steps else (64, 128))
        for num_stages in ((1, 2, 3) if parts > 1 else (2, 3, 4))
        for blocks_per_sm in (1, 2, 3)
        if not (block_m > 64 and blocks_per_sm > 1)
    ]


def tile_width(problem: AttentionProblem) -> int:
    """Returns the columns of the wider of a row of K and a row of V, padded."""
    return max(sum(pieces(problem.head_dim)), sum(pieces(problem.head_dim_v)))


@by_kind
def runs(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    """Checks the shared memory of all blocks of an SM, and that the keys of a tile share a factor."""
    if problem.descale_blocks is not None and any(many % config.block_n for many in problem.descale_blocks[1:]):
        return False
    return config.blocks_per_sm * (smem_bytes(problem, gpu, config) + 1024) <= SMEM_PER_SM


def _fits(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    """Checks what `runs` does, and a consumer thread's registers: scores, probabilities and accumulator."""
    if not runs(problem, gpu, config):
        return False
    width_v, block_n, parts = sum(row_pieces(problem, config)[1]), config.block_n, num_parts(problem, gpu)
    # A thread holds half as many numbers as a row has: scores and out in 32 bits, probabilities in 16. The constants at
    # the end of the sums are estimates of all other registers.
    needed = block_n // 2 + block_n // 4 + width_v // 2 + 40 + block_n // 8 * bias_bytes(problem)
    if parts > 1:  # two accumulators of scores, or parts of probabilities and a slice of the product (float32_tiles.py)
        needed = width_v // 2 + max(block_n, parts * block_n // 4 + min(width_v, 64)) + 16
    elif width_v > 320:  # scores and probabilities are never live together (serial.py)
        needed = block_n // 2 + width_v // 2 + 32
    # By blocks per SM: what a consumer of two warpgroups requests, or gets alone with three blocks. With two blocks it
    # gets 232; the margin of 32 was not measured. A widener takes 16 of what a consumer gets alone.
    alone = {1: 240, 2: 200, 3: 136}[config.blocks_per_sm] - 16 * (has_widener(problem) and config.blocks_per_sm > 1)
    return needed <= alone and needed <= registers(problem, config)[0]
