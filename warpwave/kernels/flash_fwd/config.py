"""Configs of `flash_fwd`: their values, their shared memory, and the choice of the default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from warpwave.gpu import WGMMA_ROWS, Gpu
from warpwave.kernels import rules
from warpwave.kernels.arguments import dot_precision, padded, total_widths
from warpwave.kernels.cost import bytes_per_score
from warpwave.kernels.descales import FLOAT8
from warpwave.kernels.prepass.split_ahead import PARTS
from warpwave.kernels.rules import (
    IN_CODE_OF_MMA,
    MASKS_99_KIB,
    MASKS_OF_MMA,
    MMA_CONFIGS,
    MMA_CONFIGS_2,
    NOT_MEASURED,
    TWO_TILES,
    Rule,
    by_width,
)
from warpwave.problem import DTYPE_BYTES, AttentionProblem, by_kind


@dataclass(frozen=True)
class Config:
    """Tile shape and launch shape.

    Args:
        block_m: queries of a program, a power of two, at least 16.
        block_n: keys per step, a power of two, at least 16.
        num_warps: warps of a program, a power of two.
        num_stages: K/V tiles in flight.
        split_ahead: whether a preceding launch splits K and V into the parts for bf16x3 and bf16x6 products, once for
            all queries. A tile then goes directly from memory to the matrix unit instead of through the registers of
            every block that needs it.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split_ahead: bool = False

    def __post_init__(self) -> None:
        rules.check_sizes(self, {"block_m": 16, "block_n": 16, "num_warps": 1}, ("num_stages",))


# Shared memory --------------------------------------------------------------------------------------------------------


def smem_bytes(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns an upper bound on the shared memory of one block; tests compare it with what every target compiles to."""
    size, arithmetic = DTYPE_BYTES[problem.dtype], dot_precision(problem, gpu)
    block_d, block_dv = total_widths(problem, gpu, config.block_m)
    if problem.is_quantized:
        return _smem_bytes_of_quantized(problem, gpu, config)
    if arithmetic in PARTS:
        return _smem_bytes_of_parts(problem, gpu, config, 2 * PARTS[arithmetic])
    q = size * config.block_m * block_d
    p = size * config.block_m * config.block_n
    kv = size * config.block_n * (block_d + block_dv)
    if problem.mask_shape is not None or problem.bias_shape is not None:
        score_bytes = bytes_per_score(problem)
        kv += config.block_m * config.block_n * score_bytes  # their tiles are in flight as well
        p += size * config.block_n * block_dv  # V goes through registers, which clear what no query sees, and back
    if gpu.arch == "gfx950":
        # Loads are copied directly to shared memory (Triton 3.9), which holds every tile in flight, with padded rows.
        return max(q, config.num_stages * kv * 17 // 16) + p
    if gpu.vendor == "amd":
        return max(q, max(1, config.num_stages - 1) * kv) + p
    if arithmetic in ("tf32x3", "tf32"):
        if gpu.capability == 90:
            return 2 * (q + p) + config.num_stages * kv  # an operand and its remainder coexist
        beside = kv // 2 + 1024 if config.block_m >= 64 else 0  # K or V changes layout (compiled figures)
        return q + config.num_stages * kv + max(q, kv) // 2 + beside
    if gpu.has_mma:
        return q + p + max(1, config.num_stages - 1) * kv + 1024  # a tile is in registers when the next one arrives
    return q + p // 2 + config.num_stages * kv + 1024  # 1024 for barriers


def _smem_bytes_of_quantized(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns `smem_bytes` of a quantized call. V also goes through registers, to be transposed or converted."""
    block_d, block_dv = total_widths(problem, gpu, config.block_m)
    size_v = DTYPE_BYTES[problem.dtype_of_v]
    of_product = 1 if problem.dtype_of_v in FLOAT8.values() else 2  # bytes of an element of P and V in the matrix unit
    q, k = config.block_m * block_d, config.block_n * block_d
    p, v = of_product * config.block_m * config.block_n, of_product * config.block_n * block_dv
    arriving = k + size_v * config.block_n * block_dv
    if problem.mask_shape is not None or problem.bias_shape is not None:
        arriving += config.block_m * config.block_n * bytes_per_score(problem)
    if gpu.arch == "gfx950":
        return max(q, config.num_stages * arriving * 17 // 16) + p + v
    if gpu.vendor == "amd":
        bound = max(q, max(1, config.num_stages - 1) * arriving) + p + v
        # gfx942 multiplies these float8 formats in float16, to which tiles are converted.
        return 2 * bound if gpu.arch == "gfx942" and of_product == 1 else bound
    return q + config.num_stages * arriving + p + v + 1024  # 1024 for barriers


def _smem_bytes_of_parts(problem: AttentionProblem, gpu: Gpu, config: Config, size: int) -> int:
    """Returns `smem_bytes` if an element becomes parts of `size` bytes in total. Either float32 tiles arrive, and their
    parts, which the matrix unit takes, are stored in addition; or parts arrive, and nothing else is stored."""
    block_d, block_dv = total_widths(problem, gpu, config.block_m)
    q, p = config.block_m * block_d, config.block_m * config.block_n
    k, v = config.block_n * block_d, config.block_n * block_dv
    stages = config.num_stages if gpu.vendor == "nvidia" or gpu.arch == "gfx950" else max(1, config.num_stages - 1)
    arriving = size * (k + v) if config.split_ahead else 4 * (k + v)
    beside = 0 if config.split_ahead else size * max(k, v)
    if problem.mask_shape is not None or problem.bias_shape is not None:
        arriving += p * bytes_per_score(problem)
        # Parts that arrive reach Hopper's matrix unit as they are (compiled figures).
        is_direct = config.split_ahead and gpu.capability == 90 and config.block_m >= WGMMA_ROWS
        beside = 0 if is_direct else size * (k + v)
    if gpu.vendor == "nvidia":
        scores = 0 if gpu.capability == 90 else max(size, 8) * p  # parts of p and, from Blackwell on, accumulators
        return max(size, 4) * q + stages * arriving + beside + scores + 1024
    # Parts of p change layout too, and q is stored where tiles have not arrived yet.
    return max(size * q, stages * arriving * 17 // 16 + beside) + size * p


# Choice of a config ---------------------------------------------------------------------------------------------------


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the default first, then every other candidate that fits the GPU's shared memory."""
    first = default(problem, gpu)
    return [] if first is None else [first, *(c for c in fitting(problem, gpu) if c != first)]


def default(problem: AttentionProblem, gpu: Gpu) -> Config | None:
    """Returns the config used when the caller names none; None if no config fits."""
    candidates = fitting(problem, gpu)
    if not candidates:
        return None
    config: Config | None = of_table(problem, gpu)
    while config is not None and config not in candidates:
        config = _smaller(config)
    return config or candidates[-1]  # the config that fits is not smaller in this order, for example with split_ahead


def _with_one_factor(problem: AttentionProblem, config: Config) -> Config:
    """Returns the config with tiles that a quantized call can have: a tile has one factor, and a matrix instruction
    sums at least 32 products of 8-bit operands."""
    if problem.descale_blocks is None:
        return config
    block_q, *of_keys = (block or 128 for block in problem.descale_blocks)
    if config.block_m > block_q:
        config = replace(config, block_m=block_q, num_warps=4)  # as many rows a warp as before
    return replace(config, block_n=min(max(32, config.block_n), *of_keys))


def _smaller(config: Config) -> Config | None:
    """Returns the next config to try if one does not fit: fewer tiles in flight, then fewer keys, then fewer queries;
    None after the smallest."""
    if config.num_stages > 1:
        return replace(config, num_stages=config.num_stages - 1)
    if config.block_n > 16:
        return replace(config, block_n=config.block_n // 2)
    if config.block_m > 16:
        return replace(config, block_m=config.block_m // 2, num_warps=4)
    return None


@by_kind
def fitting(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the candidates that fit the GPU's shared memory, except those that compute wrong results or are slow."""
    ways = (False, True) if dot_precision(problem, gpu) in PARTS else (False,)
    found = [c for c in space(ways) if smem_bytes(problem, gpu, c) <= gpu.smem_per_block_bytes]
    if problem.descale_blocks is not None:
        found = [c for c in found if c == _with_one_factor(problem, c)]
    if gpu.capability == 90 and _uses_tensor_cores(problem, gpu):
        # Two warpgroups on 64 queries split the keys of a wgmma between them. That is slow (1.9 times the time at
        # head_dim 256, sweep 2), and in tf32, at 64x16, Triton 3.6 computes wrong products and reads out of bounds.
        found = [c for c in found if not (c.num_warps == 8 and c.block_m == 64)]
    return found


def _uses_tensor_cores(problem: AttentionProblem, gpu: Gpu) -> bool:
    return problem.dtype != "float32" or dot_precision(problem, gpu) != "ieee"


@cache
def space(split_ahead: tuple[bool, ...] = (False,)) -> list[Config]:
    """Returns every candidate."""
    return [OF_16, OF_32] + [
        Config(block_m, block_n, num_warps, num_stages, ahead)
        for ahead in split_ahead
        for block_m in (16, 32, 64, 128)
        for block_n in (16, 32, 64, 128)
        for num_warps in (4, 8)
        for num_stages in (1, 2, 3, 4)
    ]


# The table ------------------------------------------------------------------------------------------------------------


class Call:
    """The properties of a call that the rows of `RULES` read. Sizes are computed when a row reads them."""

    def __init__(self, problem: AttentionProblem, gpu: Gpu) -> None:
        self.problem, self.gpu = problem, gpu
        width = max(padded(problem.head_dim), padded(problem.head_dim_v))
        self.bucket = 0 if width <= 64 else 1 if width <= 128 else 2
        self.width = max(total_widths(problem, gpu, WGMMA_ROWS))  # columns of the wider of K and V
        self.arithmetic = dot_precision(problem, gpu)
        self.is_float32 = problem.dtype == "float32"
        self.is_16_bit = not self.is_float32 and not problem.is_quantized
        self.is_amd, self.is_hopper = gpu.vendor == "amd", gpu.capability == 90
        self.is_rdna = gpu.is_rdna
        self.is_masked = problem.mask_shape is not None or problem.bias_shape is not None
        self.is_light = not self.is_masked and problem.alibi_shape is None and not problem.dropout_p
        self.has_tiles_of_64 = self.bucket == 0 or (self.bucket == 1 and self.is_masked)

    def fits(self, size: int) -> bool:
        """Returns whether all queries and keys of a sequence fit a tile of this size, of a call in 16 bits without mask
        or bias."""
        is_plain = self.is_16_bit and not self.is_masked
        return is_plain and max(self.problem.seqlen_q, self.problem.seqlen_k) <= size

    @property
    def leaves_sms_idle(self) -> bool:
        """Returns whether tiles of 128 queries are at most half as many as the SMs."""
        p = self.problem
        return 2 * -(-p.seqlen_q // 128) * p.num_heads_q * p.batch <= self.gpu.num_sms


SWEEP_1 = "2026-11-21-h200-flash-fwd-sweep-1.log"
SWEEP_2 = "2026-11-21-h200-flash-fwd-sweep-2.log"
SWEEP_3 = "2026-11-21-h200-flash-fwd-sweep-3.log"
FLOAT32 = "2026-11-21-h200-float32.jsonl"
ONE_HEAD = "2026-11-21-h200-float32-one-head.jsonl"
PARTS_OF_FLOAT32 = "2026-11-21-h200-hopper-float32-parts.log"
SHORT_SEQUENCES = "2026-11-29-h200-short-sequences.jsonl"
FLOAT32_MASKS = "2026-11-29-h200-float32-masks.json"
# Tiles of 16 rows a warp, for sequences that fit one. No other config has so few warps.
OF_16, OF_32 = Config(16, 16, 1, 2), Config(32, 32, 2, 2)
# The tile of a call without mask or bias. The figures are ratios of time on an H200. Nothing was timed on a B200, and
# predictions for it (docs/notes/model.md) contradict each other.
RULES: tuple[Rule[Config], ...] = (
    Rule(
        "16 bits, at most 16 queries and 16 keys, on AMD RDNA up to head_dim 64",
        lambda c: (c.bucket == 0 or not c.is_rdna) and c.fits(16),
        (OF_16,),
        "1.5 to 2.8 times as fast as 64 x 64 by hopper/flash_fwd in four calls; predicted on seven other cards: 1.0 to "
        "8.2 times as fast as the tiles of longer sequences (short_sequences.md)",
        SHORT_SEQUENCES,
    ),
    Rule(
        "16 bits, at most 32 queries and 32 keys, head_dim up to 64",
        lambda c: c.bucket == 0 and c.fits(32),
        (OF_32,),
        "1.12 times as fast as 64 x 64 by hopper/flash_fwd at 9,216 x 25; predicted on seven other cards: 1.0 to 2.3 "
        "times as fast as the tiles of longer sequences (short_sequences.md)",
        SHORT_SEQUENCES,
    ),
    Rule("float32, AMD RDNA", lambda c: c.is_float32 and c.is_rdna, (Config(32, 16, 8, 1),), NOT_MEASURED),
    *by_width(
        "float32 in bfloat16 parts, AMD CDNA",
        lambda c: c.is_float32 and c.is_amd and c.arithmetic in PARTS,
        (Config(64, 32, 4, 1), Config(64, 16, 4, 1), Config(32, 16, 4, 1)),
        NOT_MEASURED,
    ),
    *by_width(
        "float32, AMD CDNA",
        lambda c: c.is_float32 and c.is_amd,
        (Config(64, 32, 4, 2), Config(64, 16, 4, 2), Config(32, 16, 4, 1)),
        NOT_MEASURED,
    ),
    Rule(
        "float32 in ieee, head_dim up to 64",
        lambda c: c.is_float32 and c.arithmetic == "ieee" and c.bucket == 0,
        (Config(128, 64, 8, 2),),
        "64 x 32 on four warps takes 1.2 times as long (4 x 2048, 16 heads)",
        SWEEP_1,
    ),
    Rule(
        "float32 in ieee, head_dim 65 to 128",
        lambda c: c.is_float32 and c.arithmetic == "ieee" and c.bucket == 1,
        (Config(64, 32, 8, 2),),
        "128 x 32 spills and takes 1.9 times as long (4 x 2048, 16 heads)",
        SWEEP_1,
    ),
    Rule(
        "float32 in ieee, head_dim above 128",
        lambda c: c.is_float32 and c.arithmetic == "ieee",
        (Config(32, 32, 4, 1),),
        "eight warps take 1.7 times as long (2 x 1024, 8 heads)",
        FLOAT32,
    ),
    Rule(
        "float32, Hopper, head_dim up to 64, at most half as many tiles of 128 queries as SMs",
        lambda c: c.is_float32 and c.is_hopper and c.bucket == 0 and c.leaves_sms_idle,
        (Config(32, 32, 4, 2),),
        "tiles of 128 queries take 1.65 times as long at 1 head x 512, tf32x3",
        ONE_HEAD,
    ),
    Rule(
        "float32 in bfloat16 parts, Hopper, head_dim up to 128",
        lambda c: c.is_float32 and c.is_hopper and c.arithmetic in PARTS and c.bucket < 2,
        (Config(128, 32, 8, 2, True),),
        "bf16x6 takes 0.69 times as long as tf32x3 at head_dim 64, and 0.59 at 128",
        PARTS_OF_FLOAT32,
    ),
    Rule(
        "float32 in bfloat16 parts, Hopper, head_dim above 128",
        lambda c: c.is_float32 and c.is_hopper and c.arithmetic in PARTS,
        (Config(64, 16, 4, 1, True),),
        "bf16x6 takes 0.69 times as long as tf32x3 at head_dim 256",
        PARTS_OF_FLOAT32,
    ),
    *by_width(
        "float32 in bfloat16 parts",
        lambda c: c.is_float32 and c.arithmetic in PARTS,
        (Config(64, 32, 4, 2, True), Config(32, 32, 4, 2, True), Config(32, 16, 4, 1, True)),
        NOT_MEASURED,
    ),
    *by_width(
        "float32 in one tf32 product, NVIDIA with mma",
        lambda c: c.arithmetic == "tf32" and c.gpu.has_mma,
        (Config(64, 64, 4, 2), Config(64, 32, 4, 2), Config(64, 16, 4, 1)),
        "the tiles of tf32x3 take 1.83, 1.38 and 1.00 times as long full, " + IN_CODE_OF_MMA,
        MMA_CONFIGS_2,
    ),
    *by_width(
        "float32 in tf32x3, NVIDIA with mma and 163 KiB of shared memory",
        lambda c: c.is_float32 and c.gpu.has_mma and c.gpu.has_163_kib,
        (Config(64, 32, 4, 2), Config(64, 16, 4, 1), Config(32, 16, 4, 1)),
        "the former tiles take 1.71, 1.60 and 1.52 times as long full, " + IN_CODE_OF_MMA,
        MMA_CONFIGS_2,
    ),
    *by_width(
        "float32 in tf32x3, NVIDIA with mma",
        lambda c: c.is_float32 and c.gpu.has_mma,
        (Config(64, 32, 4, 2), Config(64, 16, 4, 2), Config(32, 16, 8, 1)),
        "the former tiles take 1.69, 1.27 and 1.00 times as long full, " + IN_CODE_OF_MMA,
        MMA_CONFIGS_2,
    ),
    *by_width(
        "float32 in tf32",
        lambda c: c.is_float32,
        (Config(32, 32, 4, 2), Config(32, 16, 4, 2), Config(32, 16, 8, 1)),
        NOT_MEASURED,
    ),
    Rule(
        "16 bits, AMD RDNA 4, head_dim above 128",
        lambda c: c.is_rdna and c.gpu.arch.startswith("gfx12") and c.bucket == 2,
        (Config(64, 32, 8, 1),),
        "predicted: 32 x 16 scores on eight waves are computed four times, and take 2.2 times as long",
        "other_cards.md",
    ),
    *by_width(
        "16 bits, AMD RDNA",
        lambda c: c.is_rdna,
        (Config(64, 32, 4, 1), Config(64, 32, 8, 1), Config(32, 32, 8, 1)),
        NOT_MEASURED,
    ),
    Rule(
        "16 bits, AMD CDNA, head_dim up to 64; to 128 with a mask or bias, or few tiles of 128 queries",
        lambda c: c.is_amd and (c.has_tiles_of_64 or (c.bucket == 1 and c.leaves_sms_idle)),
        (Config(64, 64, 4, 1),),
        "predicted: two stages hold half as many blocks a CU, and take 1.2 times as long",
        "other_cards.md",
    ),
    Rule(
        "16 bits, AMD CDNA, head_dim 65 to 128",
        lambda c: c.is_amd and c.bucket == 1,
        (Config(128, 32, 4, 1),),
        "predicted: 64 x 64 with two stages leaves one wave a SIMD on CDNA 1 to 3, and takes 1.5 times as long",
        "other_cards.md",
    ),
    Rule(
        "16 bits, AMD CDNA 4, head_dim above 128, no mask, bias, ALiBi or dropout",
        lambda c: c.gpu.arch == "gfx950" and c.is_light,
        (Config(128, 64, 8, 1),),
        "predicted: half the reads of L2; 64 x 32 on eight waves takes 1.7 times as long",
        "other_cards.md",
    ),
    Rule(
        "16 bits, AMD CDNA, head_dim above 128",
        lambda c: c.is_amd,
        (Config(64, 32, 4, 1),),
        "predicted: 64 x 32 on eight waves with two stages takes 1.3 times as long",
        "other_cards.md",
    ),
    Rule(
        "16 bits, NVIDIA with mma, 80 or 96 columns in two tiles",
        lambda c: c.gpu.has_mma and 80 <= c.width <= 96,
        (Config(128, 32, 4, 3),),
        "the config for 128 columns takes 1.08 times as long full with 163 KiB of shared memory and 1.14 with 99 KiB, "
        + IN_CODE_OF_MMA,
        TWO_TILES,
    ),
    Rule(
        "16 bits, Hopper, or NVIDIA with mma and 163 KiB of shared memory, 160 or 192 columns in two tiles",
        lambda c: (c.is_hopper or c.gpu.has_mma) and c.gpu.has_163_kib and c.width in (160, 192),
        (Config(128, 64, 8, 3),),
        "the config for 256 columns takes 1.14 times as long full on Hopper, and 1.19 and 1.27 " + IN_CODE_OF_MMA,
        TWO_TILES,
    ),
    Rule(
        "16 bits, NVIDIA with mma and 99 KiB of shared memory, 160 or 192 columns in two tiles",
        lambda c: c.gpu.has_mma and c.width in (160, 192),
        (Config(64, 32, 4, 2),),
        "the config for 256 columns takes 1.28 and 1.10 times as long full, " + IN_CODE_OF_MMA,
        TWO_TILES,
    ),
    *by_width(
        "16 bits, NVIDIA with mma and 163 KiB of shared memory",
        lambda c: c.gpu.has_mma and c.gpu.has_163_kib,
        (Config(128, 64, 4, 3), Config(128, 64, 8, 3), Config(64, 32, 4, 2)),
        "the former tiles take 1.26, 1.65 and 1.60 times as long full, " + IN_CODE_OF_MMA,
        MMA_CONFIGS,
    ),
    *by_width(
        "16 bits, NVIDIA with mma",
        lambda c: c.gpu.has_mma,
        (Config(128, 64, 4, 3), Config(128, 32, 4, 2), Config(64, 16, 4, 3)),
        "the former tiles take 1.27, 1.74 and 1.16 times as long full, " + IN_CODE_OF_MMA,
        MMA_CONFIGS,
    ),
    Rule(
        "16 bits, head_dim up to 128",
        lambda c: c.bucket < 2,
        (Config(64, 64, 4, 3),),
        "two blocks share an SM, and the softmax of one overlaps with the products of the other: 128 x 64 on eight "
        "warps takes 1.13 times as long at 16 x 1024, 1.05 at 4 x 4096 (head_dim 128, causal)",
        SWEEP_2,
    ),
    Rule(
        "16 bits, head_dim above 128",
        lambda c: True,
        (Config(128, 64, 8, 2),),
        "the accumulator leaves no room for two blocks an SM: 64 x 32 takes 1.16 times as long (16 x 1024)",
        SWEEP_3,
    ),
)
# How a mask or bias, whose tiles also take registers and shared memory, changes the tile.
RULES_OF_MASKS: tuple[Rule[Callable[[Config, AttentionProblem], Config]], ...] = (
    Rule(
        "a mask or bias, float32, AMD RDNA",
        lambda c: c.is_rdna and c.is_float32,
        (lambda config, _: config,),
        NOT_MEASURED,
    ),
    Rule("a mask or bias, AMD RDNA", lambda c: c.is_rdna, (lambda config, _: Config(32, 16, 4, 1),), NOT_MEASURED),
    *by_width(
        "a mask or bias, 16 bits, NVIDIA with mma and 163 KiB of shared memory",
        lambda c: c.gpu.has_mma and c.is_16_bit and c.gpu.has_163_kib,
        (
            lambda config, _: Config(128, 32, 4, 3),
            lambda config, _: Config(128, 16, 4, 3),
            lambda config, _: Config(64, 16, 4, 2),
        ),
        "the former tiles take 1.26, 1.48 and 1.00 times as long with a mask, " + IN_CODE_OF_MMA,
        MASKS_OF_MMA,
    ),
    *by_width(
        "a mask or bias, 16 bits, NVIDIA with mma",
        lambda c: c.gpu.has_mma and c.is_16_bit,
        (
            lambda config, _: Config(128, 32, 4, 3),
            lambda config, _: Config(128, 16, 4, 2),
            lambda config, _: Config(128, 16, 8, 2),
        ),
        "the former tile above 128 takes 1.22 times as long with a mask, and no other tile up to 128 gains 3 %, "
        + IN_CODE_OF_MMA,
        MASKS_99_KIB,
    ),
    Rule(
        "a mask or bias, 8 bits, NVIDIA other than Hopper, head_dim above 128",
        lambda c: c.problem.is_quantized and c.gpu.vendor == "nvidia" and not c.is_hopper and c.bucket == 2,
        (lambda config, _: Config(32, 32, 4, 2),),
        "not measured; 64 x 32 spills up to 408 bytes, 32 x 32 up to 24",
    ),
    Rule(
        "a mask or bias, NVIDIA other than Hopper",
        lambda c: c.gpu.vendor == "nvidia" and not c.is_hopper,
        (
            lambda config, _: replace(
                config,
                block_n=16,
                num_warps=8 if config.block_m == 128 else config.num_warps,
                num_stages=min(2, config.num_stages),
            ),
        ),
        "not measured; 32 keys a step, or 128 queries on four warps, spill at some head_dim",
    ),
    Rule(
        "a mask or bias, float32 in bfloat16 parts, Hopper, head_dim up to 64, more than half as many tiles of 128 "
        "queries as SMs",
        lambda c: c.is_hopper and c.arithmetic in PARTS and c.bucket == 0 and not c.leaves_sms_idle,
        (lambda config, _: Config(64, 32, 4, 2, True),),
        "128 x 32, the tile without a mask, takes 1.07 to 1.16 times as long, 128 x 16 1.41 to 1.71 times",
        FLOAT32_MASKS,
    ),
    Rule(
        "a mask or bias, float32 in bfloat16 parts, Hopper, head_dim 65 to 128: the same tile",
        lambda c: c.is_hopper and c.arithmetic in PARTS and c.bucket == 1,
        (lambda config, _: config,),
        "128 x 16 takes 1.41 to 1.51 times as long",
        FLOAT32_MASKS,
    ),
    Rule(
        "a mask or bias",
        lambda c: True,
        (
            lambda config, _: replace(
                config, block_n=max(16, config.block_n // 2), num_stages=min(2, config.num_stages)
            ),
        ),
        NOT_MEASURED,
    ),
)
# How the factors of quantized tensors change it.
OF_FACTORS: Rule[Callable[[Config, AttentionProblem], Config]] = Rule(
    "quantized q, k or v: a tile has one factor, and a product sums at least 32 terms",
    lambda problem: problem.descale_blocks is not None,
    (lambda config, problem: _with_one_factor(problem, config),),
    "not measured",
)
rule_of = rules.chooser(RULES, Call)
rule_of_masks = rules.chooser(RULES_OF_MASKS, Call)


def rows_of(problem: AttentionProblem, gpu: Gpu) -> list[Rule[Any]]:
    """Returns the rows that choose the default config: of the tile, and of its changes."""
    is_masked = problem.mask_shape is not None or problem.bias_shape is not None
    rows: list[Rule[Any]] = [rule_of(problem, gpu), *([rule_of_masks(problem, gpu)] if is_masked else [])]
    return [*rows, OF_FACTORS] if OF_FACTORS.holds(problem) else rows


def of_table(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the config that the tables choose, whether or not it fits shared memory."""
    first, *changes = rows_of(problem, gpu)
    return rules.changed(first.choices[0], changes, problem)


def notes(problem: AttentionProblem, gpu: Gpu, config: Config) -> list[str]:
    """Returns what `explain` prints about a config: the rows that chose it."""
    chosen = default(problem, gpu)
    return rules.notes(rows_of(problem, gpu), config == chosen, chosen == of_table(problem, gpu))
