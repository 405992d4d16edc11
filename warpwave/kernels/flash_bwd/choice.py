"""Which configs `flash_bwd` has for a problem, and the tables that choose the default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from warpwave.gpu import TCGEN05, WGMMA_ROWS, Gpu
from warpwave.kernels import rules
from warpwave.kernels.arguments import dot_precision, padded, total_widths
from warpwave.kernels.flash_bwd.config import (
    Config,
    Tile,
    adds_up,
    arithmetic_of,
    has_mask_of_queries,
    may_walk,
    smem_of_joint,
    smem_of_tile,
    splits_of,
    walked_of,
)
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
from warpwave.problem import AttentionProblem, Causal, by_kind


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the default first, then every config that differs from it in the tile of one launch, or if it is joint in
    the warps."""
    first = default(problem, gpu)
    if first is None:
        return []
    if first.joint:
        tiles = [replace(first.dq, num_warps=warps) for warps in (1, 2, 4, 8)]
        others = [replace(first, dq=tile, dkv=tile) for tile in tiles]
        if walked_of(problem, first):
            others += [replace(first, splits=splits) for splits in (first.splits // 2, 2 * first.splits) if splits]
        return [first, *(c for c in others if c != first)]
    others = [replace(first, dq=tile) for tile in fitting(problem, gpu, False)]
    others += [replace(first, dkv=tile) for tile in fitting(problem, gpu, True)]
    return [first, *(c for c in others if c != first)]


def default(problem: AttentionProblem, gpu: Gpu) -> Config | None:
    """Returns the config used for the gradients of a problem; None if no config fits."""
    table = of_table(problem, gpu)
    if table.joint:
        return table
    tiles = [_fitted(problem, gpu, tile, owns) for tile, owns in ((table.dq, False), (table.dkv, True))]
    return None if tiles[0] is None or tiles[1] is None else Config(tiles[0], tiles[1], table.split_dkv)


def _fitted(problem: AttentionProblem, gpu: Gpu, tile: Tile, owns_keys: bool) -> Tile | None:
    """Returns the tile, or the largest smaller one that fits: fewer tiles in flight, then fewer rows of the walked
    operands, then fewer of the owned ones; None if none fits."""
    candidates = fitting(problem, gpu, owns_keys)
    owned, walked = ("block_n", "block_m") if owns_keys else ("block_m", "block_n")
    while tile not in candidates:
        if tile.num_stages > 1:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        elif getattr(tile, walked) > 16:
            tile = replace(tile, **{walked: getattr(tile, walked) // 2})
        elif getattr(tile, owned) > 16:
            tile = replace(tile, **{owned: getattr(tile, owned) // 2}, num_warps=4)
        else:
            return None
    return tile


@by_kind
def fitting(problem: AttentionProblem, gpu: Gpu, owns_keys: bool) -> list[Tile]:
    """Returns the tiles of one launch that fit the GPU's shared memory, except those that are slow on Hopper."""
    found = [tile for tile in space() if smem_of_tile(problem, gpu, tile, owns_keys) <= gpu.smem_per_block_bytes]
    if gpu.capability == 90 and (problem.dtype != "float32" or dot_precision(problem, gpu) != "ieee"):
        # Two warpgroups on 64 rows split the columns of a wgmma between them (flash_fwd's config).
        found = [t for t in found if not (t.num_warps == 8 and (t.block_n if owns_keys else t.block_m) == 64)]
    return found


@cache
def space() -> list[Tile]:
    """Returns every candidate."""
    return [
        Tile(block_m, block_n, num_warps, num_stages)
        for block_m in (16, 32, 64, 128)
        for block_n in (16, 32, 64, 128)
        for num_warps in (4, 8)
        for num_stages in (1, 2, 3)
    ]


# The table ------------------------------------------------------------------------------------------------------------


class Call:
    """The properties of a call that the rows of `RULES` read."""

    def __init__(self, problem: AttentionProblem, gpu: Gpu) -> None:
        self.gpu, self.is_float32 = gpu, problem.dtype == "float32"
        width = max(padded(problem.head_dim), padded(problem.head_dim_v))
        self.bucket = 0 if width <= 64 else 1 if width <= 128 else 2
        self.width = max(total_widths(problem, gpu, WGMMA_ROWS))  # columns of the wider of K and V
        self.is_between = max(problem.head_dim, problem.head_dim_v) in (*range(33, 49), *range(65, 81))
        self.is_16_bit_mma = gpu.has_mma and not self.is_float32
        self.is_16_bit, self.is_hopper, self.problem = not self.is_float32, gpu.capability == 90, problem
        self.is_masked = problem.mask_shape is not None or problem.bias_shape is not None
        self.has_mask_of_queries = has_mask_of_queries(problem)
        self.has_bf16_parts = self.is_float32 and arithmetic_of(problem, gpu).startswith("bf16")

    def fits(self, longest: int, scores: int = 128 * 128) -> bool:
        """Returns whether the joint launch can run with a tile of at most `longest` rows, `longest` keys and so many
        scores."""
        rows, keys = one_tile(self.problem)
        if not adds_up(self.problem) or max(rows, keys) > longest or rows * keys > scores:
            return False
        return smem_of_joint(self.problem, self.gpu, Tile(rows, keys, 4, 1)) <= self.gpu.smem_per_block_bytes

    def may_walk(self, walked: str) -> bool:
        """Returns whether the joint launch may walk the keys, or the queries, on Hopper in 16 bits. There must be more
        than 128, so that no tile holds them, head sizes in multiples of 8, as were timed, and no band that hides many
        of them, because the launch walks all: beside few queries a causal mask up to the last key."""
        problem = self.problem
        others = problem.seqlen_k if walked == "keys" else problem.seqlen_q
        of_last_keys = walked == "keys" and problem.causal == Causal("bottom_right") and problem.window_size == (-1, -1)
        shows_most = not problem.has_band or of_last_keys
        is_even = problem.head_dim % 8 == 0 and problem.head_dim_v % 8 == 0
        return self.is_hopper and is_even and others > 128 and shows_most and may_walk(problem, walked)

    def fits_on_hopper(self) -> bool:
        """Returns whether the joint launch fits, and computes all gradients faster than several launches do."""
        if self.is_float32:
            return self.bucket == 0 and self.fits(64 if self.has_bf16_parts else 16)
        scores = (16384 if self.is_masked else 8192, 4096, 1024 if self.is_masked else 4096)[self.bucket]
        return self.fits(128 if self.bucket < 2 else 64, scores)


def one_tile(problem: AttentionProblem) -> tuple[int, int]:
    """Returns the tile that holds all queries and all keys of a sequence, of a packed call the longest: powers of two,
    at least 16."""
    rows, keys = (1 << (max(16, n) - 1).bit_length() for n in (problem.seqlen_q, problem.seqlen_k))
    return rows, keys


def _joint(call: Call) -> Config:
    """Returns the joint launch with the tile of a sequence."""
    rows, keys = one_tile(call.problem)
    longest = max(rows, keys)
    num_warps = longest // 16 if longest <= 32 else 4 if rows * keys <= 8192 else 8
    tile = Tile(rows, keys, num_warps, 1)
    return Config(tile, tile, joint=True)


def _walking_keys(keys: int, num_warps: int, num_stages: int) -> Callable[[Call], Config]:
    """Returns what makes the joint launch with a tile that holds all queries and walks so many keys at a time."""
    return lambda call: _in_parts(call, Tile(one_tile(call.problem)[0], keys, num_warps, num_stages))


def _walking_queries(rows: int, num_warps: int, num_stages: int) -> Callable[[Call], Config]:
    """Returns what makes the joint launch with a tile that holds all keys and walks so many queries at a time."""
    return lambda call: _in_parts(call, Tile(rows, one_tile(call.problem)[1], num_warps, num_stages))


def _in_parts(call: Call, tile: Tile) -> Config:
    return Config(tile, tile, joint=True, splits=splits_of(call.problem, call.gpu, tile))


ONE_SIDE = "2026-11-29-h200-one-side-gradients.json"
MASKED = " (2026-11-30-h200-masked-gradients.json)"
JOINT = "2026-11-29-h200-joint-gradients.json"
FLOAT32 = "2026-11-29-h200-float32-masks.json"
# The tiles of a call without mask or bias. What was not measured compiles without spills, or with the fewest.
RULES: tuple[Rule[Any], ...] = (
    Rule(
        "Hopper, float32 in bfloat16 parts, head_dim up to 64, a tile of at most 64 x 64 holds a sequence; in other "
        "float32 arithmetic 16 x 16",
        lambda c: c.is_hopper and c.is_float32 and c.fits_on_hopper(),
        (_joint,),
        "1.9 to 5.1 times as fast as launches apart in fourteen calls, masks and biases among them",
        FLOAT32,
    ),
    Rule(
        "Hopper, 16 bits, a tile of at most 4,096 scores and 128 rows and keys holds a sequence; to head_dim 64 8,192 "
        "scores, with a mask or bias 16,384; above 128 64 rows and keys, with a mask or bias 1,024 scores",
        lambda c: c.is_hopper and c.fits_on_hopper(),
        (_joint,),
        "1.6 to 2.7 times as fast as separate launches with the same tile in thirteen calls without a mask or bias; "
        "with one, measured up to head_dim 64, 1.3 to 6.3 times as fast as hopper/flash_bwd in seven",
        JOINT,
    ),
    Rule(
        "Hopper, 16 bits, head_dim up to 64, at most 64 queries on more than 128 keys",
        lambda c: c.may_walk("keys") and c.bucket == 0 and c.problem.seqlen_q <= 64,
        (_walking_keys(64, 4, 3),),
        "1.7 to 4.9 times as fast as hopper/flash_bwd in seven calls; with padding 2.4 to 5.8 in seven, with a mask of "
        "each query 1.35 to 3.6" + MASKED,
        ONE_SIDE,
    ),
    Rule(
        "Hopper, 16 bits, head_dim up to 32, 65 to 128 queries on more than 128 keys, no mask of each query",
        lambda c: c.may_walk("keys") and not c.has_mask_of_queries and c.width <= 32 and c.problem.seqlen_q <= 128,
        (_walking_keys(128, 8, 3),),
        "1.79 and 1.48 times as fast as hopper/flash_bwd; with padding 2.32 and 1.25, with a mask 0.75 and 1.01"
        + MASKED,
        ONE_SIDE,
    ),
    Rule(
        "Hopper, 16 bits, head_dim 65 to 128, at most 32 queries on more than 128 keys",
        lambda c: c.may_walk("keys") and c.bucket == 1 and c.problem.seqlen_q <= 32,
        (_walking_keys(32, 4, 3),),
        "1.06 and 1.60 times as fast as hopper/flash_bwd; with padding 1.35 and 1.70, with a mask 1.09 and 1.52"
        + MASKED,
        ONE_SIDE,
    ),
    Rule(
        "Hopper, 16 bits, head_dim 65 to 128, 33 to 64 queries on more than 128 keys",
        lambda c: c.may_walk("keys") and c.bucket == 1 and c.problem.seqlen_q <= 64,
        (_walking_keys(128, 8, 2),),
        "1.09 to 1.15 times as fast as hopper/flash_bwd in three calls; with padding 1.08 to 2.12, with a mask 1.05 to "
        "1.53" + MASKED,
        ONE_SIDE,
    ),
    Rule(
        "Hopper, 16 bits, head_dim above 128, at most 32 queries on more than 128 keys",
        lambda c: c.may_walk("keys") and c.problem.seqlen_q <= 32,
        (_walking_keys(64, 8, 2),),
        "1.75 and 1.79 times as fast as hopper/flash_bwd at 256 and 192; with padding 1.77 and 2.16, with a mask 1.58 "
        "and 2.02" + MASKED,
        ONE_SIDE,
    ),
    Rule(
        "Hopper, 16 bits, head_dim up to 64, more than 128 queries on at most 16 keys",
        lambda c: c.may_walk("queries") and c.bucket == 0 and c.problem.seqlen_k <= 16,
        (_walking_queries(32, 4, 2),),
        "1.87 and 2.05 times as fast as hopper/flash_bwd; with padding or a mask 1.5 to 2.9 in four calls" + MASKED,
        ONE_SIDE,
    ),
    Rule(
        "Hopper, 16 bits, more than 128 queries, on 17 to 64 keys at head_dim up to 64, on at most 32 keys to 128",
        lambda c: c.may_walk("queries") and c.problem.seqlen_k <= (64, 32, 0)[c.bucket],
        (_walking_queries(64, 4, 1),),
        "1.38 to 1.85 times as fast as hopper/flash_bwd in five calls, at 112 on 64 keys 0.95; with padding or a mask "
        "1.2 to 3.4 in eight" + MASKED,
        ONE_SIDE,
    ),
    Rule(
        "Hopper, 16 bits, head_dim of 33 to 48 and 65 to 80, more than 128 queries on at most 128 keys",
        lambda c: c.may_walk("queries") and c.is_between and c.problem.seqlen_k <= 128,
        (_walking_queries(64, 8, 2),),
        "1.05 to 1.25 times as fast as hopper/flash_bwd in four calls, at 64 and 128 0.81 to 0.92, at 144 0.82; with "
        "padding 1.5 to 2.3, with a mask 1.25 to 2.0" + MASKED,
        ONE_SIDE,
    ),
    Rule(
        "other NVIDIA cards and AMD CDNA, 16 bits, head_dim up to 128, a tile of at most 64 x 64 holds a sequence",
        lambda c: not (c.is_hopper or c.gpu.is_rdna) and c.is_16_bit and c.bucket < 2 and c.fits(64),
        (_joint,),
        "predicted on six cards: 1.2 to 20 times as fast as separate launches, by constants that favor it",
        "short_sequences.md",
    ),
    Rule(
        "AMD RDNA, 16 bits, head_dim up to 64, a tile of at most 32 x 32 holds a sequence",
        lambda c: c.gpu.is_rdna and c.is_16_bit and c.bucket == 0 and c.fits(32),
        (_joint,),
        "one launch of five products in place of two of seven; larger tiles and rows spill",
        "short_sequences.md",
    ),
    Rule(
        "float32, NVIDIA with mma and 163 KiB of shared memory, head_dim up to 64",
        lambda c: c.is_float32 and c.gpu.has_mma and c.gpu.has_163_kib and c.bucket == 0,
        (Config(Tile(64, 32, 4, 1), Tile(16, 64, 4, 1)),),
        "32 x 32 takes 1.50 times as long full, " + IN_CODE_OF_MMA,
        MMA_CONFIGS_2,
    ),
    Rule(
        "float32 in bfloat16 parts, Hopper, head_dim 33 to 64",
        lambda c: c.is_hopper and c.has_bf16_parts and 32 < c.width <= 64,
        (Config(Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)),),
        "32 x 32 takes 1.51 times as long with a softcap, 32 x 16 and 16 x 32 2.6 to 3.2 times with a mask or bias",
        FLOAT32,
    ),
    Rule(
        "float32 in bfloat16 parts, Hopper, head_dim up to 32",
        lambda c: c.is_hopper and c.has_bf16_parts and c.bucket == 0,
        (Config(Tile(64, 32, 4, 1), Tile(64, 64, 4, 1)),),
        "64 x 64 for both takes 1.05 to 1.07 times as long with a mask or bias, 32 x 16 and 16 x 32 2.5 to 3.5 times",
        FLOAT32,
    ),
    Rule(
        "float32 in bfloat16 parts, Hopper, head_dim 65 to 128",
        lambda c: c.is_hopper and c.has_bf16_parts and c.bucket == 1,
        (Config(Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),),
        "64 x 64 takes 1.06 to 1.18 times as long with a mask or bias, 32 x 16 and 16 x 32 1.45 to 1.93 times",
        FLOAT32,
    ),
    *by_width(
        "float32",
        lambda c: c.is_float32,
        (
            Config(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
            Config(Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),
            Config(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), True),
        ),
        NOT_MEASURED,
    ),
    *by_width(
        "16 bits, AMD RDNA",
        lambda c: c.gpu.is_rdna,
        (
            Config(Tile(64, 32, 8, 1), Tile(32, 64, 8, 1)),
            Config(Tile(64, 32, 8, 1), Tile(32, 64, 8, 1)),
            Config(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
        ),
        NOT_MEASURED,
    ),
    *by_width(
        "16 bits, AMD CDNA",
        lambda c: c.gpu.vendor == "amd",
        (
            Config(Tile(128, 32, 4, 1), Tile(32, 128, 4, 1)),
            Config(Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
            Config(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
        ),
        NOT_MEASURED,
    ),
    Rule(
        "16 bits, Hopper, 192 columns in two tiles",
        lambda c: c.gpu.capability == 90 and c.width == 192,
        (Config(Tile(128, 32, 8, 3), Tile(32, 128, 8, 3), True),),
        "the config for 256 columns, with two stages, takes 1.40 and 1.48 times as long full at 160 and 192",
        TWO_TILES,
    ),
    *by_width(
        "16 bits, Hopper",
        lambda c: c.gpu.capability == 90,
        (
            Config(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
            Config(Tile(128, 64, 8, 3), Tile(32, 64, 4, 3)),
            Config(Tile(128, 32, 8, 2), Tile(32, 128, 8, 2), True),
        ),
        "the former tiles, of eight warps, take 1.43 times as long full at 64, 1.34 at 128; above, no other tile "
        "gains 3 % full and causal",
        "2026-11-27-h200-portable-tiles.json",
    ),
    *by_width(
        "16 bits, NVIDIA with tcgen05",
        lambda c: c.gpu.capability in TCGEN05,
        (
            Config(Tile(128, 64, 8, 3), Tile(32, 128, 8, 2)),
            Config(Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
            Config(Tile(128, 32, 8, 2), Tile(64, 128, 8, 1), True),
        ),
        NOT_MEASURED,
    ),
    Rule(
        "16 bits, NVIDIA with mma, 80 or 96 columns in two tiles",
        lambda c: c.gpu.has_mma and 80 <= c.width <= 96,
        (Config(Tile(128, 32, 4, 3), Tile(32, 64, 4, 3)),),
        "the config for 128 columns takes 1.14 times as long full with 163 KiB of shared memory and 1.31 with 99 KiB, "
        + IN_CODE_OF_MMA,
        TWO_TILES,
    ),
    Rule(
        "16 bits, NVIDIA with mma and 163 KiB of shared memory, 160 columns in two tiles",
        lambda c: c.gpu.has_mma and c.gpu.has_163_kib and c.width == 160,
        (Config(Tile(128, 32, 8, 3), Tile(16, 128, 8, 3)),),
        "the config for 256 columns takes 1.49 times as long full, " + IN_CODE_OF_MMA,
        TWO_TILES,
    ),
    Rule(
        "16 bits, NVIDIA with mma and 163 KiB of shared memory, 192 columns in two tiles",
        lambda c: c.gpu.has_mma and c.gpu.has_163_kib and c.width == 192,
        (Config(Tile(128, 32, 8, 3), Tile(32, 128, 8, 3), True),),
        "the config for 256 columns takes 1.53 times as long full, " + IN_CODE_OF_MMA,
        TWO_TILES,
    ),
    Rule(
        "16 bits, NVIDIA with mma and 99 KiB of shared memory, 160 columns in two tiles",
        lambda c: c.gpu.has_mma and c.width == 160,
        # In one launch, dK and dV on 16 x 64 take 0.93 of the time full, and spill more if causal.
        (Config(Tile(64, 16, 4, 3), Tile(32, 64, 4, 2), True),),
        "the former config for 256 columns takes 1.70 times as long full, " + IN_CODE_OF_MMA,
        TWO_TILES,
    ),
    Rule(
        "16 bits, NVIDIA with mma and 99 KiB of shared memory, 192 columns in two tiles",
        lambda c: c.gpu.has_mma and c.width == 192,
        (Config(Tile(64, 16, 4, 3), Tile(16, 64, 4, 3), True),),  # 32 x 64 is faster full, and spills if causal
        "the former config for 256 columns takes 1.88 times as long full, " + IN_CODE_OF_MMA,
        TWO_TILES,
    ),
    *by_width(
        "16 bits, NVIDIA with mma and 163 KiB of shared memory",
        lambda c: c.gpu.has_163_kib,
        (
            Config(Tile(128, 32, 4, 3), Tile(32, 128, 4, 2)),
            Config(Tile(128, 32, 4, 2), Tile(32, 128, 8, 2)),
            Config(Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), True),
        ),
        "the former tiles take 1.75, 1.80 and 1.31 times as long full, " + IN_CODE_OF_MMA,
        MMA_CONFIGS,
    ),
    *by_width(
        "16 bits, NVIDIA with mma",
        lambda c: True,
        (
            Config(Tile(128, 32, 4, 3), Tile(32, 128, 4, 2)),
            Config(Tile(128, 16, 4, 3), Tile(32, 128, 8, 2)),
            Config(Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), True),
        ),
        "the former tiles take 1.00, 1.03 and 1.29 times as long full, " + IN_CODE_OF_MMA,
        TWO_TILES,
    ),
)


def _halved(config: Config, call: Call) -> Config:
    dq = replace(config.dq, block_n=max(16, config.dq.block_n // 2), num_stages=min(2, config.dq.num_stages))
    dkv = replace(config.dkv, block_m=max(16, config.dkv.block_m // 2), num_stages=min(2, config.dkv.num_stages))
    return replace(config, dq=dq, dkv=dkv)


# How a mask or bias, whose tiles also take registers and shared memory, changes the tiles.
RULES_OF_MASKS: tuple[Rule[Callable[[Config, Call], Config]], ...] = (
    *by_width(
        "a mask or bias, 16 bits, NVIDIA with mma and 163 KiB of shared memory",
        lambda c: c.is_16_bit_mma and c.gpu.has_163_kib,
        (
            lambda config, call: Config(Tile(128, 32, 4, 3), Tile(16, 128, 4, 2)),
            lambda config, call: Config(Tile(128, 16, 4, 2), Tile(64, 64, 8, 2)),
            lambda config, call: Config(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), True),
        ),
        "the former tiles take 1.14, 1.10 and 1.14 times as long with a mask, " + IN_CODE_OF_MMA,
        MASKS_OF_MMA,
    ),
    *by_width(
        "a mask or bias, 16 bits, NVIDIA with mma",
        lambda c: c.is_16_bit_mma,
        (
            lambda config, call: Config(Tile(128, 16, 4, 3), Tile(16, 128, 4, 2)),
            lambda config, call: Config(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
            lambda config, call: Config(Tile(32, 32, 4, 2), Tile(32, 32, 8, 2), True),
        ),
        "the former tiles above 128 take 1.19 times as long with a mask, and no other tiles up to 128 gain 3 %, "
        + IN_CODE_OF_MMA,
        MASKS_99_KIB,
    ),
    Rule(
        "a mask or bias, float32 in bfloat16 parts, Hopper, head_dim up to 128: the same tiles",
        lambda c: c.is_hopper and c.has_bf16_parts and c.bucket < 2,
        (lambda config, call: config,),
        "chosen with masks and biases",
        FLOAT32,
    ),
    Rule("a mask or bias: half as many walked rows", lambda c: True, (_halved,), NOT_MEASURED),
)
rule_of = rules.chooser(RULES, Call)
rule_of_masks = rules.chooser(RULES_OF_MASKS, Call)


def rows_of(problem: AttentionProblem, gpu: Gpu) -> list[Rule[Any]]:
    """Returns the rows that choose the default config: of `RULES`, and of `RULES_OF_MASKS` for a mask or bias."""
    is_masked, first = problem.mask_shape is not None or problem.bias_shape is not None, rule_of(problem, gpu)
    return [first, *([rule_of_masks(problem, gpu)] if is_masked and not callable(first.choices[0]) else ())]


def of_table(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the config that the tables choose, whether or not it fits shared memory."""
    first, *changes = rows_of(problem, gpu)
    config = first.choices[0]
    return rules.changed(config(Call(problem, gpu)) if callable(config) else config, changes, None)


def notes(problem: AttentionProblem, gpu: Gpu, config: Config) -> list[str]:
    """Returns what `explain` prints about a config: the rows that chose it."""
    chosen = default(problem, gpu)
    return rules.notes(rows_of(problem, gpu), config == chosen, chosen == of_table(problem, gpu))
