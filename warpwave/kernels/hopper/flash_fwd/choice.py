"""The choice of a config of `hopper/flash_fwd`: the rows that decide, and what `explain` prints about them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from warpwave.gpu import Gpu
from warpwave.kernels import rules
from warpwave.kernels.hopper.flash_fwd.call import Call
from warpwave.kernels.hopper.flash_fwd.config import (
    Config,
    fitting,
    num_parts,
    row_pieces,
    runs,
)
from warpwave.kernels.hopper.shared_tiles import query_tiles
from warpwave.kernels.hopper.split_tiles import Tile, can_split, splitting
from warpwave.kernels.rules import Rule, deciding, undecided
from warpwave.problem import AttentionProblem, by_kind

SPLITS = (1, 2, 3, 4, 8)  # candidates
GAIN_OF_SHARING = "0.98 to 1.08 times as fast as one head a tile at 1,024 queries and more, 0.94 to 1.74 at fewer"
GAIN_OF_PADDING = "narrower pieces take 1.07 times as long at 48, 1.04 at 176; at 112 it allows blocks of 192 queries"


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the default first, then every other candidate that fits the GPU's shared memory and registers, then
    the default with other numbers of splits; empty if none fits."""
    parts, first = num_parts(problem, gpu), default(problem, gpu)
    found = fitting(problem, gpu)
    if first is not None and can_split(problem):
        found += [replace(first, num_splits=splits) for splits in SPLITS if splits * first.block_n <= problem.seqlen_k]
    if parts > 1:  # one stage only if nothing else fits
        found = [c for c in found if c.num_stages > 1 or replace(c, num_stages=2) not in found]
    return [] if first is None else list(dict.fromkeys([first, *found]))


def default(problem: AttentionProblem, gpu: Gpu) -> Config | None:
    """Returns the config used when the caller names none; None if no config fits."""
    whole = without_splits(problem, gpu)
    found = None if whole is None else splitting(problem, gpu, _tile_of(whole))
    return whole if found is None else _with_splits(_of_tile(problem, gpu, found.tile), found.num_splits)


def without_splits(problem: AttentionProblem, gpu: Gpu) -> Config | None:
    """Returns the config that the tables choose, which splits no keys; None if none fits."""
    candidates = _candidates(problem, gpu)
    if len(candidates) == 1:  # by what does not depend on lengths
        return candidates[0][1]
    call = Call(problem, gpu)
    for rule, config in candidates[:-1]:
        if rule.holds(call):
            return config
    return candidates[-1][1]  # its rule holds for every call


@by_kind
def _of_tile(problem: AttentionProblem, gpu: Gpu, tile: Tile) -> Config:
    """Returns the config of a tile whose keys are split."""
    return _completed(Call(problem, gpu), Config(*tile))


@cache
def _tile_of(config: Config) -> Tile:
    return Tile(config.block_m, config.block_n, config.num_stages, config.blocks_per_sm)


@cache
def _with_splits(config: Config, splits: int) -> Config:
    return replace(config, num_splits=splits)


def always_fits(problem: AttentionProblem, gpu: Gpu) -> bool:
    """Returns whether `default` finds a config for all sizes."""
    return all(config is not None for _, config in _candidates(problem, gpu))


@by_kind
def _candidates(problem: AttentionProblem, gpu: Gpu) -> list[tuple[Rule[Config], Config | None]]:
    """Returns the rules that depend on lengths, each with its first config that fits the GPU, else any that fits."""
    other = next(iter(fitting(problem, gpu)), None)
    call = Call(problem, gpu)
    rows = undecided(_table(call), call)
    return [(rule, next((_completed(call, c) for c in rule.choices if runs(problem, gpu, c)), other)) for rule in rows]


def _completed(call: Call, config: Config) -> Config:
    """Returns the config with heads that share tiles, and rows of V in wider pieces if that is faster and fits."""
    config = replace(config, heads=call.heads)
    wider = replace(config, narrowest_v=64)
    return wider if call.pads_values and runs(call.problem, call.gpu, wider) else config


TUNING = "2026-11-21-h200-hopper-flash-fwd-tuning.log"
MASKS = "2026-11-21-h200-hopper-masks-windows.log"
WIDE = "2026-11-21-h200-hopper-float32-parts.log"
HALVES = "2026-11-21-h200-hopper-float32-halves.log"
OF_192 = "2026-11-22-h200-hopper-tiles-of-192.log"
BETWEEN = "2026-11-23-h200-named-forward.jsonl"
LOSING = "2026-11-25-h100-losing-rows.json"
BETWEEN_SECTORS = "2026-11-26-h100-rows-between-sectors.json"
THREE_STAGES = "2026-11-26-h100-one-tile-of-v.json"
SHORT_CALLS = "2026-11-26-h100-short-calls.json"
FEW_TILES = "2026-11-26-h100-few-tiles.json"
TOGETHER = "2026-11-26-h100-heads-together.json"
ONE_WAVE = "2026-11-28-h200-short-causal-calls.json"
OF_TOKENS = "2026-11-29-h200-factors-of-tokens.json"
CHUNKS = "2026-11-29-h200-chunks.jsonl"
FEW_KEYS = "2026-11-29-h200-few-keys.jsonl"
FLOAT32_BIAS = "2026-11-29-h200-float32-bias.json"
SHORT_SEQUENCES = "2026-11-29-h200-short-sequences.jsonl"
MORE_CALLS = "2026-11-28-h200-few-tiles-of-more-calls.json"
DROPOUT = "2026-11-30-h200-dropout.json"
NARROW_FORWARD = "2026-11-30-h200-narrow-forward.json"
SPLIT_TILES = "2026-12-01-h200-split-tiles.json"
FLOAT32_MASKS = "2026-12-01-h200-masked-float32.json"
SPLITS_OF_8_BITS = "2026-12-01-h200-packed-and-8-bit.json"
STAGES_OF_FEW = "2026-12-01-h200-third-stage.json"

# 16-bit types, and float32 in one part. The figures are ratios of time on an H200, or on an H100 where a row names it.
RULES: tuple[Rule[Config], ...] = (
    Rule(
        "float32, head_dim above 128, a causal mask or window, one wave of blocks",
        lambda c: c.problem.dtype == "float32" and c.width > 128 and c.problem.has_band and c.is_one_wave,
        (Config(64, 64, 2),),
        "the longest block sets the length of a wave: 128 queries take 1.34 times as long (2 x 8 heads x 1024, tf32)",
        HALVES,
    ),
    Rule(
        "head_dim above 256",
        lambda c: c.width > 256,
        (Config(128, 32, 2), Config(64, 32, 2)),
        "64 queries take 1.3 to 1.4 times as long",
        WIDE,
    ),
    Rule(
        "a mask or 16-bit bias, head_dim 65 to 128, all queries of a sequence in one block of 64",
        lambda c: c.is_masked and 64 < c.width <= 128 and c.problem.seqlen_q * c.heads <= 64,
        (Config(64, 64, 2, 2),),
        "1.44 and 1.65 times as fast as 128 queries, a bias and a mask, 64 x 64 of 16 heads at head_dim 128; with 256 "
        "queries 0.91 and 0.98",
        SHORT_SEQUENCES,
    ),
    Rule(
        "float32, a mask, head_dim 65 to 128, at most 2,048 keys",
        lambda c: c.problem.dtype == "float32" and c.is_masked and 64 < c.width <= 128 and c.problem.seqlen_k <= 2048,
        (Config(64, 64, 2, 2),),
        "1.03 to 1.12 times as fast as 128 x 128 in five calls of 512 to 2,048 keys at head_dim 96 and 128, 0.94 at "
        "4,096 and 80",
        FLOAT32_MASKS,
    ),
    Rule(
        "a 16-bit bias for each score, head_dim up to 64",
        lambda c: c.bias_bytes == 2 and c.width <= 64,
        (Config(64, 64, 3, 3), Config(64, 64, 2, 3), Config(64, 64, 2, 2)),
        "1.07 to 1.60 times as fast as 128 x 128 in ten calls of 256 to 4,096 keys, 3.9 and 4.4 times at 64 and 49",
        SHORT_SEQUENCES,
    ),
    Rule(
        "a float32 bias for each score, head_dim up to 64, at most 1,024 keys",
        lambda c: c.bias_bytes == 4 and c.width <= 64 and c.problem.seqlen_k <= 1024,
        (Config(64, 64, 2, 3), Config(64, 64, 2, 2)),
        "1.23 to 1.61 times as fast as 128 x 128 in four calls of 256 to 1,024 keys, 3.7 and 4.5 times at 49",
        FLOAT32_BIAS,
    ),
    Rule(
        "a float32 bias for each score, head_dim up to 64",
        lambda c: c.bias_bytes and c.width <= 64,
        (Config(128, 128, 2), Config(128, 64, 2)),
        "1.12 and 1.19 times as fast as 128 x 64 at 2,048 and 4,096 keys; 64 x 64 has 1.01 and 1.03 times its speed",
        FLOAT32_BIAS,
    ),
    Rule(
        "dropout, head_dim up to 64",
        lambda c: c.problem.dropout_p > 0 and c.width <= 64,
        (Config(64, 64, 3, 3), Config(64, 64, 2, 3)),
        "1.17 to 1.22 times as fast as 192 x 128 in three calls of 4,096 keys, 0.95 to 1.08 times as 64 x 128 in six; "
        "few queries and packed calls were not measured",
        DROPOUT,
    ),
    Rule(
        "dropout, head_dim 65 to 128, no mask or bias",
        lambda c: c.problem.dropout_p > 0 and c.is_unmasked and 64 < c.width <= 128,
        (Config(64, 64, 2, 2),),
        "1.11 and 1.12 times as fast as 192 x 64, 1.05 as 128 x 64, head_dim 128; others were not measured",
        DROPOUT,
    ),
    Rule(
        "a mask, or a bias of keys or queries alone, head_dim up to 64, at most 1,024 keys",
        lambda c: c.is_masked and c.width <= 64 and c.problem.seqlen_k <= 1024,
        (Config(64, 64, 3, 3), Config(64, 64, 2, 3)),
        "masks 1.07 to 1.39 times as fast as 64 x 128 or 192 x 128 in four calls, 0.95 at 4 x 2048; biases were not "
        "measured",
        SHORT_SEQUENCES,
    ),
    Rule(
        "a 16-bit bias for each score",
        lambda c: c.bias_bytes == 2,
        (Config(128, 64, 3), Config(128, 64, 2)),
        "as fast as two blocks of 64 queries an SM (4 x 4096, head_dim 128)",
        MASKS,
    ),
    Rule(
        "a float32 bias for each score",
        lambda c: c.bias_bytes == 4,
        (Config(128, 64, 2),),
        "three stages leave no shared memory for out: 0.97 times as fast",
        MASKS,
    ),
    Rule(
        "head_dim 65 to 128, 16 bits, no mask or bias, at least 2,048 keys, all queries of a sequence in one block of "
        "64, more than two blocks an SM",
        lambda c: (
            64 < c.width <= 128
            and c.fills_64_once
            and c.rows_per_sm(64) > 128
            and c.reach >= 2048
            and c.problem.dtype_kv is None
        ),
        (Config(64, 128, 2),),
        "1.02 to 1.09 times as fast as two blocks with 64 keys a step in four calls; 0.78 and 0.95 with one or two "
        "blocks an SM",
        SPLIT_TILES,
    ),
    Rule(
        "head_dim 65 to 176, or to 192 with head_dim_v up to 128, no mask or bias, all queries of a sequence in one "
        "block of 64, more blocks than SMs",
        lambda c: 64 < c.width <= (192 if c.width_v <= 128 else 176) and c.fills_64_once,
        (Config(64, 64, 3, 2), Config(64, 64, 2, 2)),
        "two causal points on an H100: 1.39 times as fast as 128 x 128 at 25 x 46 queries on 370 keys (64/128), 1.02 "
        "times as fast as 128 x 64 at 48 x 40 on 320 (176); packed calls were not measured",
        LOSING,
    ),
    Rule(
        "head_dim 129 to 256, dense, 16 bits, no mask or bias, at most one block of 64 queries an SM",
        lambda c: 128 < c.width <= 256 and c.has_few_tiles,
        (Config(64, 64, 3), Config(64, 64, 2)),
        "1.10 to 1.35 times as fast as 128 queries in 36 calls on an H100, 32 to 132 blocks, at head_dim 192, 224 and "
        "256; others were not measured",
        FEW_TILES,
    ),
    Rule(
        "head_dim 65 to 128, dense, 16 bits, no mask or bias, at most one block of 64 queries an SM",
        lambda c: 64 < c.width <= 128 and c.has_few_tiles,
        (Config(64, 128, 2),),
        "1.14 to 1.38 times as fast as 128 queries in 18 calls on an H100, 112 to 132 blocks, at head_dim 96 and 128",
        FEW_TILES,
    ),
    Rule(
        "head_dim 65 to 256, 16 bits, a causal mask without a window, mask or bias, as many keys as queries (up to 128 "
        "at least 640), at most two blocks of 64 queries an SM",
        lambda c: (
            64 < c.width <= 256
            and c.is_triangle
            and c.rows_per_sm(64) <= 128
            and (c.width > 128 or c.problem.seqlen_k >= 640)
        ),
        (Config(64, 64, 3), Config(64, 64, 2)),
        "in one wave of blocks of 128 queries, the longest sets the time; an SM now runs a long and then a short one: "
        "1.06 to 1.31 times as fast in 12 calls above head_dim 128 on an H200, 0.98 to 1.19 in 15 up to 128; with at "
        "most 576 keys, packed, with ALiBi or a softcap 0.86 to 1.30 in 28, 1.13 in the geometric mean "
        f"({MORE_CALLS})",
        ONE_WAVE,
    ),
    Rule(
        "head_dim 65 to 128, 16 bits, a causal mask without a window, mask or bias, as many keys as queries and at "
        "most 768, at most five blocks of 64 queries an SM",
        lambda c: 64 < c.width <= 128 and c.is_triangle and c.problem.seqlen_k <= 768 and c.rows_per_sm(64) <= 320,
        (Config(64, 64, 2, 2),),
        "0.98 to 1.36 times as fast as the former 128 x 128 or 192 x 64 in 24 calls on an H200, 1.13 in the geometric "
        "mean; 0.96 to 1.20 times as fast as 128 x 128, 1.06 in the mean; 0.88 to 0.95 with more blocks; packed, with "
        f"ALiBi or a softcap 0.99 to 1.44 in 19, 1.20 in the mean ({MORE_CALLS})",
        ONE_WAVE,
    ),
    Rule(
        "head_dim 129 to 160, or to 192 with head_dim_v up to 128, dense, at most a causal mask, at least 1,024 keys",
        lambda c: 128 < c.width <= (192 if c.width_v <= 128 else 160) and c.is_bare and c.reach >= 1024,
        (Config(128, 128, 2),),
        "64 keys a step take 1.15 times as long at head_dim 160, 4 x 4096, 1.19 at 192/128; causal 1.08 and 1.14; at "
        "16 x 1024 1.07, causal 0.99",
        BETWEEN,
    ),
    Rule(
        "head_dim_v 177 to 224, head_dim at most 224, dense, no mask, or a causal mask and over 2,048 keys a query",
        lambda c: c.width <= 224 and c.width_v > 176 and c.is_bare and not c.sees_few_keys,
        (Config(128, 64, 3), Config(128, 64, 2)),
        "0.98 to 1.09 times as fast as 2 stages in 23 full calls on an H100, 0.99 to 1.04 in 13 causal ones, 0.93 at "
        "3 x 512 on 4,096; causal with fewer keys 0.94 to 1.04",
        THREE_STAGES,
    ),
    Rule(
        "head_dim 129 to 256",
        lambda c: c.width > 128,
        (Config(128, 64, 2), Config(128, 32, 2)),
        "the widest tile whose accumulators fit registers; beside factors of tokens at 256 only 32 keys a step fit: "
        f"1.36 to 1.62 times as fast as 64 x 64 in eight calls, 0.75 and 0.81 times at 1 x 512 ({OF_TOKENS})",
        TUNING,
    ),
    Rule(
        "head_dim 65 to 128, factors of tokens, no query sees more than 2,048 keys, or blocks of 192 queries do not "
        "balance over the SMs",
        lambda c: c.width > 64 and c.has_token_factors and (c.sees_few_keys or not c.suits_192),
        (Config(128, 64, 3), Config(128, 64, 2)),
        "1.12 times as fast as 192 queries at 16 x 1024, 1.29 times as 128 keys a step at 8 x 128 on 4,096",
        OF_TOKENS,
    ),
    Rule(
        "head_dim 65 to 128, factors of tokens",
        lambda c: c.width > 64 and c.has_token_factors,
        (Config(192, 64, 4), Config(192, 64, 3), Config(128, 64, 2)),
        "1.11 times as fast as 128 queries at 1 x 8192, 1.33 times as 128 keys a step",
        OF_TOKENS,
    ),
    Rule(
        "head_dim 65 to 128 with head_dim_v up to 64, dense, no mask or bias, and blocks of 192 queries balance over "
        "the SMs",
        lambda c: c.width > 64 >= c.width_v and c.is_plain and c.suits_192,
        (Config(192, 128, 3), Config(192, 128, 2)),
        "on an H100 1.13 times as fast as 64 keys a step at 2 x 7,996 (96/64), 1.08 at 4 x 6,464 causal (128/64), 1.04 "
        "at 4 x 2,722 causal (96/64); fewer keys were not measured",
        LOSING,
    ),
    Rule(
        "head_dim 65 to 128, dense, 16 bits, no mask, bias or window, at least 8,192 keys and more than twice as many "
        "as queries; the busiest SM gets over 1.06 times as many rows from blocks of 192 queries as of 128",
        lambda c: (
            c.width > 64
            and c.is_plain
            and c.problem.dtype_kv is None
            and c.problem.seqlen_k >= 8192
            and c.is_chunk
            and c.rows_per_sm(192) > 1.06 * c.rows_per_sm(128)
        ),
        (Config(128, 128, 3),),
        "blocks take equally long, so the last ones find no gaps: with two stages 1.03 to 1.11 times as fast as 192 x "
        "64 in 20 calls, 1.06 in the geometric mean; on 4,096 or 6,144 keys 0.95 to 1.03 in five; 8-bit caches 0.76 to "
        "0.88 in nine; packed 0.95 to 1.06 in four (2026-11-29-h200-packed-chunks.json). With three stages 0.93 to "
        f"1.17 times as fast as with two in 16 drawn calls, 1.02 in the mean ({STAGES_OF_FEW})",
        CHUNKS,
    ),
    Rule(
        "head_dim 65 to 128, dense, no mask or bias, and blocks of 192 queries balance over the SMs",
        lambda c: c.width > 64 and c.is_plain and c.suits_192,
        (Config(192, 64, 4),),
        "1.07 times as fast as 128 queries at 1 x 16384 and 4 x 4096, 1.035 at 16 x 1024; causal 1.07, 1.04, 1.01; in "
        "windows 1.06 to 1.08; with a random mask 0.96; at head_dim 112, V padded, 1.15 and 1.08, causal 1.17 and 1.07",
        OF_192,
    ),
    Rule(
        "head_dim 65 to 128, packed, heads of a group share tiles, at least 512 keys a query, and blocks of 192 "
        "queries balance over the SMs",
        lambda c: c.width > 64 and c.problem.packed and c.heads > 1 and c.reach >= 512 and c.suits_192,
        (Config(192, 64, 4),),
        "1.04 to 1.10 times as fast as 128 x 128 in six calls of 32 on 8 heads of 128 on an H100; 0.93 with documents "
        "of 256",
        SHORT_CALLS,
    ),
    Rule("head_dim 65 to 128", lambda c: c.width > 64, (Config(128, 128, 2),), "the fastest of a sweep", TUNING),
    Rule(
        "head_dim 24, 40 or 56, or such a head_dim_v, dense, over 64 queries; a causal mask and at most 2,048 keys a "
        "query, or at most a causal mask and at most 640 keys, or blocks of 192 queries do not balance over the SMs",
        lambda c: (
            c.is_bare
            and c.has_rows_between_sectors
            and c.problem.seqlen_q * c.heads > 64
            and (c.sees_few_keys or c.reach <= 640 or c.is_unbalanced(192))
        ),
        (Config(128, 128, 3),),
        "1.05 to 1.66 times as fast as blocks of 64 queries in 16 calls on an H100, 0.97 at 64 x 64 on 2,048 keys; "
        f"1.33 at 64 x 512 on an H200, 0.51 at 1,024 x 48 ({SHORT_SEQUENCES})",
        BETWEEN_SECTORS,
    ),
    Rule(
        "head_dim up to 64, 16 bits, no mask or bias, at most 640 keys a query",
        lambda c: c.is_unmasked and c.reach <= 640,
        (Config(64, 64, 3, 3),),
        "0.98 to 1.10 times as fast as 192 queries in nine full calls of 384 and 512 keys on an H100, 1.14 to 1.45 in "
        "eight of grouped heads with 128, 256 and 600; 0.94 at 768 keys; windows were not measured",
        SHORT_CALLS,
    ),
    Rule(
        "head_dim up to 64, a causal mask or window, at most 2,048 keys a query, no chunk (over twice as many keys as "
        "queries)",
        lambda c: c.sees_few_keys and not c.is_chunk,
        (Config(64, 64, 3, 3),),
        "less waste at the diagonal: 1.23 x as fast as 192 queries at 16 x 1024, 1.04 at 8 x 2048, 0.98 at 5 x 3072, "
        "0.88 at 1 x 16384; in a window of 1,024 1.09, of 4,096 0.96",
        MASKS,
    ),
    Rule(
        "head_dim up to 64, a softcap, a causal mask or window, 16 bits",
        lambda c: c.problem.softcap > 0 and c.problem.has_band and c.problem.dtype != "float32",
        (Config(64, 64, 3, 3),),
        "1.52 times as fast as 192 x 128 at 4 x 4096, head_dim 64, on an H100; other calls were not measured",
        LOSING,
    ),
    Rule(
        "head_dim up to 64, 16 bits, no mask or bias, over twice as many keys as queries, blocks of 192 queries do not "
        "balance over the SMs, those of 128 do",
        lambda c: c.is_chunk and c.is_unbalanced(192) and c.rows_per_sm(128) <= c.rows_per_sm(64),
        (Config(128, 128, 3),),
        "0.97 to 1.31 times as fast as blocks of 64 queries in 12 chunks on an H100, 16 x 32 on 2,048 keys to 4 x 128 "
        "on 8,192",
        SHORT_CALLS,
    ),
    Rule(
        "head_dim up to 64, blocks of 192 queries do not balance over the SMs",
        lambda c: c.is_unbalanced(192),
        (Config(64, 128, 2, 2),),
        "1.3 times as fast as 192 queries at 1 x 1024 with 32 heads, a ratio of 1.5; at 1.14, 16 x 1024, 0.97; 1.30 to "
        f"1.37 in four causal calls whose blocks of 192 run in one wave ({MORE_CALLS})",
        TUNING,
    ),
    Rule(
        "head_dim 48 to 64 (not 56, nor a head_dim_v of 24, 40 or 56), dense, 16 bits, no mask, bias, window, ALiBi or "
        "softcap, at most 1,024 keys, no chunk; "
        "blocks of 192 queries give the busiest SM more rows than blocks of 64, or run in one wave",
        lambda c: (
            48 <= c.width
            and not c.has_rows_between_sectors
            and c.is_bare
            and not c.problem.has_band
            and c.problem.dtype_kv is None
            and c.problem.seqlen_k <= 1024
            and not c.is_chunk
            and (c.rows_per_sm(192) > c.rows_per_sm(64) or c.rows_per_sm(192) == 192)
        ),
        (Config(64, 64, 3, 3),),
        "1.02 to 1.22 times as fast as 192 x 128 in 24 calls of 700 to 1,024 keys at head_dim 64, 1.08 in the "
        "geometric mean; 0.97 to 1.14 in six others; with 1,280 to 4,096 keys 0.85 to 1.07 in eight; at 48 1.03 to "
        f"1.10 in four ({NARROW_FORWARD})",
        FEW_KEYS,
    ),
    Rule(
        "head_dim up to 64, factors of tokens",
        lambda c: c.has_token_factors,
        (Config(192, 64, 3),),
        "1.36 times as fast as 192 x 128 at 1 x 8192: three numbers for each of 128 keys do not fit registers",
        OF_TOKENS,
    ),
    Rule("head_dim up to 64", lambda c: True, (Config(192, 128, 3),), "the fastest of a sweep", TUNING),
)
# float32 in two or three parts: 64 keys a step and two warpgroups if shared memory allows. 32 keys a step take 1.2
# times as long per key, because every product then reads more of Q than of K. A second stage gains nothing.
RULES_OF_PARTS: tuple[Rule[Config], ...] = (
    Rule(
        "two parts, a mask, head_dim up to 128, up to 64 at most 1,024 keys",
        lambda c: (
            c.parts == 2 and c.is_masked and (64 < c.width <= 128 or (c.width <= 64 and c.problem.seqlen_k <= 1024))
        ),
        (Config(64, 64, 1, 2),),
        "up to 64 1.05 to 1.09 times as fast as 128 x 128 in nine calls of 128 to 1,024 keys, 0.91 at 2,048 and "
        "4,096; above, 1.02 to 1.11 times as fast as 128 x 64 in six calls of 512 to 4,096",
        FLOAT32_MASKS,
    ),
    Rule(
        "three parts, head_dim up to 64, blocks of 128 queries do not balance over the SMs, or a causal mask or window "
        "and at most 2,048 keys",
        lambda c: c.width <= 64 and c.parts == 3 and (c.is_unbalanced(128) or c.has_few_keys),
        (Config(64, 64, 1, 2),),
        "128 queries take 1.35 times as long at 1 head x 512, 1.04 causal at 4 x 2048",
        WIDE,
    ),
    Rule(
        "two parts, head_dim up to 64, blocks of 128 queries do not balance over the SMs",
        lambda c: c.width <= 64 and c.is_unbalanced(128),
        (Config(64, 64, 2, 2),),
        "as for three parts",
        HALVES,
    ),
    Rule(
        "three parts, head_dim up to 64",
        lambda c: c.width <= 64 and c.parts == 3,
        (Config(128, 64, 2),),
        "the fastest of a sweep",
        WIDE,
    ),
    Rule(
        "two parts, head_dim up to 64",
        lambda c: c.width <= 64,
        (Config(128, 128, 2),),
        "64 keys a step take 1.11 times as long at 4 x 2048, 1.15 at 1 x 8192",
        HALVES,
    ),
    Rule(
        "head_dim above 64, blocks of 128 queries do not balance over the SMs",
        lambda c: c.is_unbalanced(128),
        (Config(64, 64, 2), Config(64, 64, 1), Config(64, 32, 1)),
        "the largest of these that fits",
        HALVES,
    ),
    Rule(
        "three parts, head_dim above 128",
        lambda c: c.width > 128 and c.parts == 3,
        (Config(64, 64, 1), Config(64, 32, 1)),
        "the largest of these that fits",
        WIDE,
    ),
    Rule(
        "head_dim above 64",
        lambda c: True,
        (Config(128, 64, 2), Config(128, 64, 1), Config(64, 64, 1)),
        "the largest of these that fits",
        HALVES,
    ),
)
NOT_MEASURED = "not measured with 8-bit products; as in 16 bits, with a bias as beside one of 16 bits"
QUANTIZED_TILES = "2026-11-26-h200-quantized-tiles.json"
# Quantized q and k. A second choice is for a factor of each 64 keys: a tile of keys has one.
RULES_OF_QUANTIZED: tuple[Rule[Config], ...] = (
    Rule(
        "quantized, head_dim above 128",
        lambda c: c.width > 128,
        (Config(128, 64, 3), Config(128, 64, 2)),
        "3 stages are 0.98 to 1.12 times as fast as 2 at 256; 129 to 192 were not measured",
        QUANTIZED_TILES,
    ),
    Rule(
        "quantized, head_dim 65 to 128, a bias for each score",
        lambda c: c.width > 64 and c.bias_bytes,
        (Config(128, 64, 3), Config(128, 64, 2)),
        NOT_MEASURED,
    ),
    Rule(
        "quantized, head_dim 65 to 128, dense, no mask or bias, no factors of blocks of v, and blocks of 192 queries "
        "balance over the SMs",
        lambda c: c.width > 64 and c.is_plain and c.suits_192 and not (c.problem.descale_blocks or (0, 0, 0))[2],
        (Config(192, 64, 3),),
        "at head_dim 128 0.99 to 1.16 times as fast as 128 x 128 in 24 calls with factors of heads, 0.99 to 1.07 in 12 "
        "with factors of blocks of k; with those of v 0.89 to 1.01 when consumers read them from memory",
        QUANTIZED_TILES,
    ),
    Rule(
        "quantized, head_dim 65 to 128",
        lambda c: c.width > 64,
        (Config(128, 128, 2), Config(128, 64, 3)),
        "with factors of blocks of v 0.99 to 1.12 times as fast as 192 x 64 when consumers read them from memory, and "
        "since then 0.95 to 1.07 at head_dim 128, 1.02 and 1.06 at 96 (2026-11-30-h200-tiles-of-blocks.json)",
        QUANTIZED_TILES,
    ),
    Rule(
        "quantized, head_dim up to 64, a bias for each score",
        lambda c: c.bias_bytes,
        (Config(128, 128, 2), Config(128, 64, 2)),
        NOT_MEASURED,
    ),
    Rule(
        "quantized, head_dim up to 64, at most 1,024 keys a query, or 2,048 with a causal mask or window, or blocks of "
        "192 queries do not balance over the SMs",
        lambda c: c.sees_few_keys or c.reach <= 1024 or c.is_unbalanced(192),
        (Config(64, 64, 3, 3),),
        "at 16 x 1024 1.02 to 1.20 times as fast as 192 x 128, causal 1.24 to 1.36; unbalanced blocks were not "
        "measured",
        QUANTIZED_TILES,
    ),
    Rule(
        "quantized, head_dim up to 64",
        lambda c: True,
        (Config(192, 128, 3), Config(192, 64, 4)),
        "1.05 to 1.24 times as fast as 64 x 64 at 1 x 16384, 0.90 to 1.17 at 4 x 4096",
        QUANTIZED_TILES,
    ),
)


def rule_of(problem: AttentionProblem, gpu: Gpu) -> Rule[Config]:
    """Returns the row that chooses the default config."""
    call = Call(problem, gpu)
    return deciding(_table(call), call)


def _table(call: Call) -> tuple[Rule[Config], ...]:
    if call.problem.is_quantized:
        return RULES_OF_QUANTIZED
    return RULES_OF_PARTS if call.parts > 1 else RULES


def notes(problem: AttentionProblem, gpu: Gpu, config: Config) -> list[str]:
    """Returns what `explain` prints about a config: the row that chose it."""
    rule, chosen = rule_of(problem, gpu), without_splits(problem, gpu)
    fits = chosen is not None and replace(chosen, narrowest_v=16, heads=1) in rule.choices
    found = [] if config.num_splits > 1 else rules.notes([rule], config == chosen, fits)
    if config.narrowest_v > 16:
        of_values = " + ".join(map(str, row_pieces(problem, config)[1]))
        found.append(f"rows of V are padded to {of_values} columns: {GAIN_OF_PADDING} ({BETWEEN})")
    if config.num_splits > 1:
        found.append(_note_of_splits(problem, gpu, config))
    if config.heads > 1:
        found.append(f"{config.heads} query heads of a kv head share a tile: {GAIN_OF_SHARING} ({TOGETHER})")
    return found


def _note_of_splits(problem: AttentionProblem, gpu: Gpu, config: Config) -> str:
    """Returns what `explain` prints about the number of splits: the estimates that chose it, or that it was given."""
    whole = without_splits(problem, gpu)
    found = None if whole is None else splitting(problem, gpu, _tile_of(whole))
    said = f"num_splits = {config.num_splits}"
    if whole is None or found is None or config != default(problem, gpu):
        return f"{said}, as given"
    return (
        f"{said}: {query_tiles(problem, config.block_m, config.heads)} tiles of {config.block_m} rows on "
        f"{gpu.assumed_sms} SMs; estimated {found.time_us:.0f} us, and {found.whole_us:.0f} us with num_splits = 1 and "
        f"tiles of {whole.block_m} rows ({SPLIT_TILES if problem.dtype_kv is None else SPLITS_OF_8_BITS})"
    )
