"""split_kv's launch for few rows on Hopper, which is warp-specialized (few_rows_device.py): its tensor maps, arguments,
SM resources and limits. Holds no device code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from warpwave.gpu import Gpu
from warpwave.kernels import reasons
from warpwave.kernels.arguments import band_constants, padded, window
from warpwave.kernels.hopper import host
from warpwave.kernels.split_kv.few_rows_device import few_rows_kernel
from warpwave.operands import CachedOperands
from warpwave.problem import DTYPE_BYTES, AttentionProblem, by_kind
from warpwave.runtime import launch
from warpwave.runtime.tensor_maps import MapPlan, has_map

if TYPE_CHECKING:
    from warpwave.kernels.split_kv.config import Config

ROWS = (16, 32)  # queries of all heads of a program
KEYS, BOX = 64, 64  # fewest keys of a tile; columns of one copy
WIDEST = 256
UNKNOWN = "the launch for few rows does not support"
MOST_BLOCKS_PER_SM = 3  # more would leave the warpgroup too few registers
THREADS = 256  # of a block: a warpgroup, and a second one that contains the warp that loads
# Positions of the pointers among split_kv's arguments (q, k, v, out, lse, acc, state, the operands after v).
ACC = 5
TABLES = ("cu_seqlens_q", "sinks", "page_table", "seqused_k", "rows")
POINTERS = (0, 3, 4, 5, 6, *(CachedOperands._fields.index(name) + 4 for name in TABLES))


def rows_of(problem: AttentionProblem) -> int:
    """Returns the queries of all heads of a kv head."""
    return problem.seqlen_q * problem.num_heads_q // max(1, problem.num_heads_kv)


def cannot(problem: AttentionProblem, gpu: Gpu, most_rows: int = ROWS[-1]) -> list[str]:
    """Returns why this launch, with blocks of `most_rows` rows, cannot compute a problem on this GPU."""
    rows = rows_of(problem)
    if rows > most_rows:
        return [f"{UNKNOWN} {rows} queries of the heads of a kv head", *_cannot_kind(problem, gpu)]
    return _cannot_kind(problem, gpu)


@by_kind
def _cannot_kind(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns the reasons of `cannot` that do not depend on lengths."""
    others = {
        f"a GPU of {gpu.arch}": gpu.vendor != "nvidia" or gpu.capability != 90,
        "float32": DTYPE_BYTES[problem.dtype] != 2,
        f"a cache of {problem.dtype_kv}": problem.dtype_kv is not None,
        "pieces that do not depend on the batch": problem.batch_invariant,
        "packed keys": problem.packed and not problem.page_size,
        f"pages of {problem.page_size}": 0 < problem.page_size < 16,
        f"head_dim {problem.head_dim}": problem.head_dim % 8 != 0 or problem.head_dim > WIDEST,
        f"head_dim_v {problem.head_dim_v}": problem.head_dim_v % 8 != 0 or problem.head_dim_v > WIDEST,
    }
    return reasons.of_features(problem, UNKNOWN, others, without=("packed sequences", "softcap"))


def takes(problem: AttentionProblem, gpu: Gpu, operands: Any, most_rows: int = ROWS[-1]) -> bool:
    """Returns whether this launch, with blocks of `most_rows` rows, takes these operands."""
    of_keys = operands[1:3]
    described = all(has_map(tensor) and tensor.numel() for tensor in of_keys)
    return described and not cannot(problem, gpu, most_rows) and operands.q.stride(-1) == 1


def _boxes(problem: AttentionProblem) -> int:
    """Returns the number of boxes of K and V in one tile."""
    return sum(-(-width // BOX) for width in (problem.head_dim, problem.head_dim_v))


def smem_bytes(problem: AttentionProblem, rows: int, keys: int, stages: int) -> int:
    """Returns the shared memory of a block: rings, q, probabilities, and the needs of barriers, reductions and
    Triton."""
    q = 2 * rows * BOX * -(-problem.head_dim // BOX)
    return 2 * keys * BOX * stages * _boxes(problem) + q + 2 * keys * rows + 2048


@by_kind
def stages(problem: AttentionProblem, gpu: Gpu, rows: int, keys: int, blocks: int) -> int:
    """Returns the tiles of each ring if `blocks` blocks share a multiprocessor's memory, each with 1 KiB that CUDA
    keeps; 0 if they do not fit."""
    room = (gpu.smem_per_block_bytes + 1024) // blocks - 1024
    beside = smem_bytes(problem, rows, keys, 0)
    return max(0, (room - beside) // (smem_bytes(problem, rows, keys, 1) - beside))


@by_kind
def blocks_per_sm(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns the blocks resident on a multiprocessor, by shared memory and by registers; longer tiles and more rows
    take more."""
    needed = smem_bytes(problem, config.block_m, config.block_n, config.num_stages) + 1024
    most = MOST_BLOCKS_PER_SM - (config.block_n > KEYS or config.block_m > ROWS[0])
    return max(1, min(most, (gpu.smem_per_block_bytes + 1024) // needed))


def registers(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns the registers of a thread that the launch requests."""
    return min(255, 65536 // (THREADS * blocks_per_sm(problem, gpu, config)) // 8 * 8)


def plans(problem: AttentionProblem, operands: Any, config: Config) -> tuple[MapPlan, MapPlan]:
    """Returns the maps of K and V: (batch or page, head, key, column), with copies of 64 columns of a page's or a
    tile's keys. The maps and `POINTERS` select the launch's tensors among split_kv's arguments."""
    block = (1, 1, min(config.block_n, problem.page_size or config.block_n), BOX)
    of_k, of_v = (MapPlan(i, *host.seen(operands[i], packed=False), block) for i in (1, 2))
    return of_k, of_v


# In tiles of rows per multiprocessor, on an H200 (2026-11-22-h200-split-kv-roles.log): a tile is one block from
# ALONE on, unless it would end late; from pages already from SHORT_ALONE on if there are 129 to 960 keys
# (2026-11-30-h200-tiles-of-few-rows.json). Two blocks end in one wave up to FULL; smaller blocks do up to UNEVEN. Of
# narrow heads, tiles are again one block each from CROWD on.
ALONE, SHORT_ALONE, UNEVEN, FULL, CROWD = 0.7, 0.45, 1.5, 2.0, 3.0
LONG = 1024  # keys, in whole tiles
KEYS_PER_SM = 1024  # fewest, of at most 16 rows, if there are fewer tiles than SHORT_ALONE
# With somewhat more blocks than multiprocessors, some run two and end late. Long tiles are therefore split, and their
# blocks, several waves, end together (record 2026-11-28-h200-decode-splits.json).
LATE, EVEN_SPLITS, LATE_STEPS = 1.1, 7, 128
# Two blocks per multiprocessor instead of one (2026-11-30-h200-decode-32-rows.json): of few tiles; and of tiles of at
# least EVENED_STEPS steps, if rows are narrow, so that a tile has half of the bytes (1.00 to 1.29 times as fast in 11
# calls at head_dim 64), or if two fill the multiprocessors by a sixth more than one (1.02 to 1.17 times in nine). The
# steps are those of a cache's capacity: three splits of sequences of 2,048 keys are 0.90 times as fast as one.
FEW, EVENED_STEPS = 1 / 16, 64
# Most splits of a tile, which one launch merges. A single tile of at least LONGEST_STEPS steps takes twice as many,
# 1.17 times as fast at 131,072 keys; at 32,768 they would be 0.97 to 1.02 times as fast.
MOST_SPLITS, LONGEST_STEPS = 64, 1024


def num_splits(problem: AttentionProblem, tiles: int, longest: int, keys: int, sms: int) -> int:
    """Returns the number of splits for `tiles` tiles of rows, the longest of which has `longest` steps of `keys` keys.
    There are at most one or two blocks per multiprocessor, and one for two multiprocessors if steps are long; more only
    where tiles would end late."""
    # The longest sequence of a paged cache is a capacity, and short ones would pay for the merge.
    if not problem.page_size and LATE * sms < tiles <= UNEVEN * sms and longest >= LATE_STEPS:
        return EVEN_SPLITS
    one, two = sms // tiles, 2 * sms // tiles
    if keys > KEYS:
        most = sms // 2 // tiles
    else:
        is_narrow = problem.head_dim <= 64 and problem.head_dim_v <= 64
        gains = longest >= EVENED_STEPS and (is_narrow or 3 * two >= 7 * one)
        most = two if tiles <= FEW * sms or gains else one
    largest = 2 * MOST_SPLITS if tiles == 1 and longest >= LONGEST_STEPS else MOST_SPLITS
    return max(1, min(most, longest, largest))


def tiling(
    problem: AttentionProblem, gpu: Gpu, rows: int, tiles: int, keys_seen: int
) -> tuple[int, int, int, int] | None:
    """Returns rows, keys, warps and stages of the tiling for `tiles` tiles of `rows` rows; None if this launch cannot
    run the problem or was not measured to be faster.

    Up to 16 rows, from pages of 16, on an H200: 16 x 4,096 keys 63.4 us with one split, 66.6 by pointers with two; 4 x
    4,096 20.7 and 21.8; 12 x 2,048 26.5 and 30.6; 20 x 1,024 22.3 and 30.1; 1 x 8,192 9.3 and 11.3; 1 x 65,536 65.7 and
    66.7. Beyond two tiles per multiprocessor, copies of several kv heads are level within 2 % at head_dim 128 (128 x
    2,048: 243.8 us, and 246.9; 64 x 8,192: 489.0 and 486.5); contiguous keys and larger pages are 0.79 to 1.00 times as
    fast there from 2,048 keys on (2026-11-30-h200-special-cases.json). From larger pages and contiguous keys this
    launch is faster if blocks are not split: 32 x 3,000 89.6 us and 91.4, pages of 64 12 x 2,048 25.7 and 27.7.

    Blocks of 32 rows (2026-11-30-h200-decode-32-rows.json): from pages of 16 and 32 0.96 to 1.47 times as fast in 21
    calls, 1.08 in the geometric mean. From larger pages and contiguous keys 0.97 to 1.11 times in eight calls, 1.05 in
    the mean. Between LATE and UNEVEN they would be 0.94 (24 x 5,001 keys) to 1.06 times as fast.

    Contiguous keys and pages of 64 or 128 of 129 to 960 keys, head_dim above 64, any number of tiles
    (2026-11-30-h200-tiles-of-few-rows.json): 0.92 to 1.82 times as fast in 37 calls, 1.18 in the mean. At most 128
    keys are one step of another launch, and 0.75 to 1.09 times as fast in 13 calls.

    Head_dim up to 64, pages of 16 to 64, ALONE to FULL tiles per multiprocessor, 128 keys per step: 0.81 to 1.56 times
    as fast in 34 calls, 1.12 in the mean, half of them compared with this launch and 64 keys per step. With more tiles
    0.61 to 1.13 in 20 calls. From contiguous keys and larger pages, up to one tile per multiprocessor, 1.02 to 1.18 in
    eight, two of them with twice the stages, 1.08 in the mean; with more 0.78 to 1.21
    (2026-12-01-h200-split-tiles.json).

    Contiguous keys, head_dim 33 to 64, at most 16 rows, more than CROWD tiles per multiprocessor, 128 keys per step:
    0.99 to 1.29 times as fast as blocks of two warps in 15 calls at head_dim 64, 1.13 in the mean
    (2026-12-01-h200-narrow-decode.json).

    Contiguous keys and pages of 64 or 128, head_dim above 64, at most 16 rows, fewer tiles and 1,024 keys for each
    multiprocessor: 0.99 to 1.11 times as fast in 21 calls, 1.03 in the mean; in the seven timed after the rule was
    written, 1.01 to 1.10. With fewer keys 0.72 to 1.09 in 15 calls.
    """
    sms, wide = gpu.assumed_sms, padded(problem.head_dim) + padded(problem.head_dim_v)
    small, is_narrow = 16 <= problem.page_size < KEYS, wide <= 128
    is_short = not is_narrow and keys_seen < LONG
    is_crowded = 64 < wide <= 128 and rows == ROWS[0] and not problem.page_size and tiles > CROWD * sms
    if is_narrow:
        fits = (tiles <= sms or is_crowded) and keys_seen > 2 * KEYS
        whole = tiles >= ALONE * sms and (16 <= problem.page_size < 2 * KEYS or fits)
    else:
        late = rows > 16 and LATE * sms < tiles <= UNEVEN * sms
        alone = SHORT_ALONE if is_short and problem.page_size else ALONE
        whole = tiles >= alone * sms and keys_seen > 2 * KEYS and not late
    is_long = rows == ROWS[0] and not is_narrow and tiles < SHORT_ALONE * sms and tiles * keys_seen >= KEYS_PER_SM * sms
    many = tiles > FULL * sms and not is_crowded and (is_narrow or not (small or is_short))
    if wide > 256 or many or not (small or whole or is_long) or cannot(problem, gpu, rows):
        return None
    three = rows == 16 and (tiles < ALONE * sms or sms < tiles <= UNEVEN * sms)
    keys, blocks = (2 * KEYS, 2) if is_narrow and whole else (KEYS, 3 if three else 2)
    if tiles * -(-keys_seen // (2 * KEYS)) <= sms:  # splits of one or two steps
        keys, blocks = 2 * KEYS, 2
    return rows, keys, 4, stages(problem, gpu, rows, keys, blocks)


def specify(
    problem: AttentionProblem, gpu: Gpu, operands: Any, arguments: Sequence[Any], config: Config, first_key: int
) -> launch.Launch:
    """Returns the launch. `arguments` are split_kv's: q, k, v, out, lse, acc, state, then the operands after v."""
    q, k, page_size = operands.q, operands.k, problem.page_size
    maps = plans(problem, operands, config)
    split = arguments[ACC] is not None  # a single part too, where another launch attends to the other keys
    return launch.Launch(
        kernel=few_rows_kernel,
        grid=grid(problem, config),
        tensors=(
            *(launch.Mapped(plan, arguments[plan.source]) for plan in maps),
            *(arguments[number] for number in POINTERS),
        ),
        scalars=scalars(problem, q, k, arguments[POINTERS[-3]], config, first_key),
        constants={
            "KEYS": config.block_n,
            "ROWS": config.block_m,
            "STAGES": config.num_stages,
            "GROUP": problem.num_heads_q // problem.num_heads_kv,
            "HEAD_DIM": problem.head_dim,
            "HEAD_DIM_V": problem.head_dim_v,
            "PACKED": problem.packed,
            "SPLIT": split,
            **band_constants(problem),
            "HAS_SINKS": problem.has_sinks,
            "HAS_SOFTCAP": problem.softcap > 0,
            "PAGE_SIZE": page_size,
            "HAS_ROWS": getattr(operands, "rows", None) is not None,
            "WRITE_LSE": problem.return_lse and not split,
            "LAUNCHED_AHEAD": config.launched_ahead,
        },
        # A score is rounded before the maximum is subtracted, so that the largest probability is exactly 1.
        options={
            "num_warps": 4,
            "enable_fp_fusion": False,
            "maxnreg": registers(problem, gpu, config),
            **({"launch_pdl": True} if config.launched_ahead else {}),
        },
    )


def grid(problem: AttentionProblem, config: Config) -> int:
    """Returns the number of programs: one for each split of the keys of each kv head of each sequence."""
    return problem.batch * problem.num_heads_kv * config.num_splits


def scalars(
    problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, table: Any, config: Config, first_key: int
) -> list[int | float]:
    """Returns the run-time arguments after the pointers, in the kernel's order."""
    return [
        *((0, *q.stride()) if problem.packed else q.stride()),
        problem.seqlen_q,
        problem.seqlen_k,
        problem.num_heads_kv,
        config.num_splits,
        problem.rows * problem.num_heads_q,
        *window(problem),
        *((0, 0, 0) if table is None else (table.stride(0), k.shape[0], table.shape[0])),
        first_key,
        *host.score_units(problem),
    ]
