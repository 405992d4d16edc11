"""large_head_dim's launches for latent caches on Hopper: their tensor maps, arguments, limits and splits.

Blocks have 16 rows, for one query a sequence (latent_device.py), or 64 (latent_rows_device.py). `rows` is that number,
`Config.block_m`. Holds no device code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from warpwave.gpu import Gpu
from warpwave.kernels import partials, reasons
from warpwave.kernels.arguments import band_constants, window
from warpwave.kernels.large_head_dim.latent_device import latent_decode_kernel
from warpwave.kernels.large_head_dim.latent_rows_device import latent_rows_kernel
from warpwave.kernels.large_head_dim.splits import splits_by_rounds
from warpwave.operands import CachedOperands
from warpwave.problem import DTYPE_BYTES, AttentionProblem
from warpwave.runtime import launch
from warpwave.runtime.tensor_maps import MapPlan, has_map

KEYS, BOX = 64, 64  # keys of a step, columns of a box
FEW, MANY = 16, 64  # rows of a block of each launch
MOST_STAGES = 16  # boxes in the ring of a block of few rows
MOST_TILES = 4  # tiles of keys in the ring of a block of many rows
MOST_WIDTH = 128  # columns of a piece
MOST_COLUMNS = 512  # of v in a block of many rows: 128 registers a thread of two warpgroups
BLOCKS_OF_SM = 2  # blocks of few rows that share a multiprocessor
Takes = Sequence[launch.Take] | None
# Positions of the pointers among large_head_dim's arguments (q, k, v, out, lse, acc, state, the operands after v).
POINTERS = (3, 4, 5, 6)
CU_SEQLENS_Q = CachedOperands._fields.index("cu_seqlens_q") + 4
OTHERS = tuple(CachedOperands._fields.index(name) + 4 for name in ("sinks", "page_table", "seqused_k", "rows"))


def cannot(problem: AttentionProblem, gpu: Gpu, rows: int) -> list[str]:
    """Returns why the launch with blocks of `rows` rows cannot compute a problem on this GPU, if v is part of k."""
    beside = problem.head_dim - problem.head_dim_v
    others = {
        f"a GPU of {gpu.arch}": gpu.capability != 90,
        "float32": DTYPE_BYTES[problem.dtype] != 2,
        "several heads of keys": problem.num_heads_kv != 1,
        f"pages of {problem.page_size}": problem.page_size not in (0, 16, 32) and problem.page_size % KEYS != 0,
        f"head_dim {problem.head_dim}": problem.head_dim % 8 != 0,
        "values wider than keys": beside < 0,
        f"blocks of {rows} rows": rows not in (FEW, MANY),
    }
    if rows == FEW:
        others |= {
            "several queries a sequence": problem.seqlen_q != 1,
            f"more than {FEW} query heads": problem.num_heads_q > FEW,
        }
    else:
        others |= {
            f"head_dim_v {problem.head_dim_v}": problem.head_dim_v % (2 * BOX) != 0
            or problem.head_dim_v > MOST_COLUMNS,
            f"{beside} columns of k beside v": not 0 < beside <= BOX,
            "packed keys": problem.packed and not problem.page_size,
        }
    without = ("packed sequences",) if rows == MANY else ()
    found = reasons.of_features(problem, "the launch for latents does not support", others, without)
    if not found and rows == FEW and stages(problem, gpu) < boxes(problem):
        found.append(f"head_dim {problem.head_dim} does not fit half of a multiprocessor's shared memory")
    return found


def tiles_of_rows(problem: AttentionProblem, rows: int) -> int:
    """Returns the tiles of rows of all sequences; of packed ones, the slots that the launch has for them."""
    if problem.packed:
        return problem.total_q * problem.num_heads_q // rows + problem.batch
    return problem.batch * -(-problem.seqlen_q * problem.num_heads_q // rows)


def boxes(problem: AttentionProblem) -> int:
    """Returns the boxes of a step, which is the fewest that a ring must hold."""
    return -(-problem.head_dim // BOX)


def _beside(problem: AttentionProblem, rows: int) -> int:
    """Returns the bytes of q, probabilities and barriers, and the needs of reductions and Triton."""
    return 2 * rows * boxes(problem) * BOX + 2 * KEYS * rows + 2048


def stages(problem: AttentionProblem, gpu: Gpu) -> int:
    """Returns the boxes of the ring if two blocks of few rows share a multiprocessor's memory, each with 1 KiB that
    CUDA keeps."""
    room = (gpu.smem_per_block_bytes + 1024) // BLOCKS_OF_SM - 1024 - _beside(problem, FEW)
    return min(MOST_STAGES, room // (2 * KEYS * BOX))


def tiles_in_flight(problem: AttentionProblem, gpu: Gpu) -> int:
    """Returns the tiles of keys that the ring of a block of many rows holds."""
    return min(MOST_TILES, (gpu.smem_per_block_bytes - _beside(problem, MANY)) // (2 * KEYS * BOX * boxes(problem)))


def width_of(problem: AttentionProblem) -> int:
    """Returns the columns of a piece: each of two warpgroups has half of the columns of v in whole pieces."""
    return math.gcd(MOST_WIDTH, problem.head_dim_v // 2)


def smem_bytes(problem: AttentionProblem, gpu: Gpu, rows: int) -> int:
    """Returns the shared memory of a block."""
    ring = stages(problem, gpu) if rows == FEW else tiles_in_flight(problem, gpu) * boxes(problem)
    return 2 * KEYS * BOX * ring + _beside(problem, rows)


def takes(problem: AttentionProblem, gpu: Gpu, operands: Any, rows: int) -> bool:
    """Returns whether the launch takes these operands. Tensors without memory are treated as a latent cache."""
    q = operands.q
    if cannot(problem, gpu, rows) or not (has_map(q) and has_map(operands.k)):
        return False
    if q.shape[-3] > 1 and q.stride(-3) != problem.num_heads_q * q.stride(-2):
        return False  # rows of queries and heads are not one axis
    return operands.k.device.type == "meta" or is_one_tensor(operands)


def is_one_tensor(operands: Any) -> bool:
    """Returns whether v is the first columns of k, as in a latent cache. Every call needs this. Comparing addresses is
    faster than `operands.is_part`, which also serves tensors without memory."""
    k, v = operands.k, operands.v
    return bool(
        k.device.type != "meta"
        and k.data_ptr() == v.data_ptr()
        and k.stride() == v.stride()
        and v.shape[-1] <= k.shape[-1]
        and k.numel()
    )


def specify(
    problem: AttentionProblem, gpu: Gpu, operands: Any, arguments: tuple[Any, ...], rows: int, num_splits: int
) -> tuple[launch.Launch, Takes]:
    """Returns the launch, and the position of each of its tensors among large_head_dim's arguments: q, k, v, out, lse,
    acc, state, and the operands after v."""
    q, k = operands.q, operands.k
    # (batch or page, 1, row or key, column); an axis of size 1 may have any stride.
    batch, rows_of_q = (1, problem.total_q) if problem.packed else (problem.batch, problem.seqlen_q)
    of_q = (batch, 1, rows_of_q * problem.num_heads_q, problem.head_dim), (q.stride(0), q.stride(0), q.stride(-2), 1)
    of_k = (k.shape[0], 1, k.shape[1], problem.head_dim), (k.stride(0), k.stride(0), k.stride(1), 1)
    copied = min(KEYS, problem.page_size or KEYS)
    maps = (MapPlan(0, *of_q, (1, 1, rows, BOX)), MapPlan(1, *of_k, (1, 1, copied, BOX)))
    table = arguments[OTHERS[1]]
    pointers = (*POINTERS, *OTHERS)
    if rows == MANY:
        pointers = (*POINTERS[:2], CU_SEQLENS_Q, *POINTERS[2:], *OTHERS)
    spec = launch.Launch(
        kernel=latent_decode_kernel if rows == FEW else latent_rows_kernel,
        grid=tiles_of_rows(problem, rows) * num_splits,
        tensors=(
            *(launch.Mapped(plan, arguments[plan.source]) for plan in maps),
            *(arguments[number] for number in pointers),
        ),
        scalars=[
            *([] if rows == FEW else [problem.seqlen_q, problem.total_q, problem.batch]),
            problem.seqlen_k,
            problem.num_heads_q,
            num_splits,
            problem.rows * problem.num_heads_q,
            *window(problem),
            *((0, 0, 0) if table is None else (table.stride(0), k.shape[0], table.shape[0])),
            problem.softmax_scale * math.log2(math.e),
        ],
        constants={
            **(_of_few_rows(problem, gpu) if rows == FEW else _of_many_rows(problem, gpu)),
            "HEAD_DIM_V": problem.head_dim_v,
            "SPLIT": num_splits > 1,
            **band_constants(problem),
            "HAS_SINKS": problem.has_sinks,
            "PAGE_SIZE": problem.page_size,
            "HAS_ROWS": getattr(operands, "rows", None) is not None,
            "WRITE_LSE": problem.return_lse and num_splits == 1,
        },
        # A score is rounded before the maximum is subtracted, so that the largest probability is exactly 1.
        options={
            "num_warps": 4,
            "enable_fp_fusion": False,
            "launch_pdl": True,
            **({"maxnreg": 65536 // (256 * BLOCKS_OF_SM)} if rows == FEW else {}),
        },
    )
    return spec, (*maps, *pointers)


def _of_few_rows(problem: AttentionProblem, gpu: Gpu) -> dict[str, int]:
    return {"STAGES": stages(problem, gpu), "HEAD_DIM": problem.head_dim}


def _of_many_rows(problem: AttentionProblem, gpu: Gpu) -> dict[str, int | bool]:
    return {"TILES": tiles_in_flight(problem, gpu), "WIDTH": width_of(problem), "IS_VARLEN": problem.packed}


def specify_merge(
    problem: AttentionProblem, num_splits: int, acc: Any, state: Any, out: Any, lse: Any, sinks: Any
) -> launch.Launch:
    """Returns the merge. After short splits it starts while they end, which saves one to two microseconds. After long
    ones that would cost as much: 278.9 us and 281.6 at 16 x 65,536, 20.4 and 19.7 at 8 x 4,096 (H200, 576/512)."""
    short = _tiles(problem) < SHORT * num_splits
    spec = partials.specify_merge(problem, num_splits, acc, state, out, lse, sinks, launched_ahead=short)
    return spec._replace(options=dict(spec.options) | {"num_warps": 4})


# Rules ----------------------------------------------------------------------------------------------------------------


def sequences(problem: AttentionProblem) -> int:
    """Returns the number of sequences for which tiles and splits are chosen: one if a result must not depend on the
    rest of the batch."""
    return 1 if problem.batch_invariant else max(1, problem.batch)


def takes_longer_tiles(problem: AttentionProblem, gpu: Gpu) -> bool:
    """Returns whether a decode step processes a latent 64 keys at a time, unless that leaves fewer splits than resident
    blocks.

    q is then read from shared memory half as often as with 32 keys: 4.16 TB/s of the 4.26 that torch.sum reads. 32 keys
    gave 3.18 with two blocks per multiprocessor and 3.97 with four; from pages of 64, 4.06 and 3.97 (H200, 576/512, 16
    sequences of 65,536 keys).
    """
    places = 2 * gpu.assumed_sms
    shares = sequences(problem) * (problem.seqlen_k // 128)
    return gpu.capability == 90 and problem.looks_latent and problem.head_dim <= 640 and shares >= places


FEW_PARTS = 8  # partial results that merge at once
SHORT = 7  # tiles of a split: below, a second block per multiprocessor gains less than its partial results cost
PART_AGAINST_TILE = 18  # merging one more partial result costs as much as an eighteenth of a tile


def _tiles(problem: AttentionProblem) -> int:
    return -(-problem.seqlen_k // KEYS)


def num_splits(problem: AttentionProblem, gpu: Gpu, rows: int) -> int:
    """Returns the number of splits of the keys for the launch with blocks of `rows` rows."""
    if rows == FEW:
        return splits_of_few_rows(problem, gpu)
    blocks = tiles_of_rows(replace(problem, batch=sequences(problem)), MANY)
    return splits_by_rounds(blocks, problem.seqlen_k, KEYS, gpu.assumed_sms)


def splits_of_few_rows(problem: AttentionProblem, gpu: Gpu) -> int:
    """Returns the number of splits that fills a GPU once with two blocks per multiprocessor, which read 1.1 times as
    fast as one.

    If splits would be many and short, it is one block per multiprocessor, because partial results are written, read and
    merged afterwards. It never exceeds the number that minimizes the cost of both together. 16 x 4,096 keys take 30.8
    us with 8 splits and 32.6 with 16, 8 x 4,096 20.0 with 16 and 25.5 with 33, 1 x 65,536 40 with 132 and 63 with 264,
    1 x 16,384 19.3 with 64 and 24.9 with 128; 16 x 65,536 291 with 16 and 318 with 8, 64 x 4,096 86.6 with 4 and 92.2
    with 2 (H200, 576/512).

    With more sequences than multiprocessors, rounds of blocks decide: 150 x 4,096 take 180 us with 3 splits and 226
    with 1, 200 x 4,096 249 us with 1, which it chooses, and 240 with 2 (2026-11-29-h200-latents-tried.log).
    """
    others = sequences(problem)
    sms = gpu.assumed_sms
    if others > sms:
        return splits_by_rounds(others, problem.seqlen_k, KEYS, BLOCKS_OF_SM * sms)
    tiles = _tiles(problem)
    shares = BLOCKS_OF_SM * sms // others
    if shares > FEW_PARTS and tiles < SHORT * shares:
        shares = sms // others
    return max(1, min(shares, tiles // 2, math.isqrt(PART_AGAINST_TILE * tiles)))
