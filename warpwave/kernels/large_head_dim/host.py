"""FlashAttention for large heads in portable Triton: head_dim above 256 in pieces, keys split if rows are few.

A program owns BLOCK_M rows and some or all columns of v. For each tile of keys it sums the scores over pieces of
head_dim, takes one step of the online softmax, and updates one accumulator for each piece of v:

    S = sum_c Q_c K_c^T;   P = softmax step of S;   acc_j = alpha * acc_j + P V_j;   out_j = acc_j / l

The query heads that read one kv head share a tile, so a decode step reads K and V once for all of them. If v is the
first columns of k, one tensor as in a latent cache, their tiles are read once for both products. If few rows leave the
GPU idle, keys are split over blocks, and kernels/partials.py merges their states.

Dao, "FlashAttention-2" (2023), algorithm 1; Dao et al., "Flash-Decoding for long-context inference" (2023); latent
caches are DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.

Bound: L2 and shared memory. The accumulator, BLOCK_M x head_dim_v float32, must fit the registers of a block. This
limits the number of rows that share each read of K and V. It adds heads of any width to split_kv.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import partials
from warpwave.kernels.arguments import (
    Results,
    Run,
    allocator,
    band_constants,
    dot_precision,
    feature_constants,
    lengths,
    lse_strides,
    matrix_options,
    padded,
    score_rules,
    straightener,
    stride_unit,
    strides_in,
)
from warpwave.kernels.cost import (
    ODD_ROWS,
    Cost,
    bytes_per_score,
    conversions,
    launch_order,
    merging,
    odd_rows,
    waits_for_memory,
    walk,
)
from warpwave.kernels.large_head_dim import latent_host as latent
from warpwave.kernels.large_head_dim.choice import of_table
from warpwave.kernels.large_head_dim.config import (
    Config,
    columns_of,
    registers,
    row_tiles,
    smem_bytes,
)
from warpwave.kernels.large_head_dim.device import large_head_dim_kernel
from warpwave.operands import CachedOperands
from warpwave.problem import DTYPE_BYTES, AttentionProblem
from warpwave.runtime import launch

NAME = "large_head_dim"
NEEDS_GPU = True
SHARES_TILES = True
TABLES_END = CachedOperands._fields.index("rows") + 1  # the factors after the tables belong to caches it refuses


# Host -----------------------------------------------------------------------------------------------------------------


def bind(problem: AttentionProblem, operands: Any, config: Config, out: torch.Tensor | None = None) -> Run:
    """Compiles for one problem and layout; returns `run(operands, out=None) -> (out, lse)`, where lse is None unless
    requested."""
    allocate, straight, device = allocator(problem, operands.q), straightener(operands), operands.q.device
    gpu = current_gpu(device)
    bound: dict[bool, tuple[int, list[Callable[..., None]]]] = {}

    def launchers(operands: Any, out: torch.Tensor | None) -> tuple[int, list[Callable[..., None]]]:
        # Whether k and v are one tensor is not part of their layout, so every call checks it.
        one_tensor = latent.is_one_tensor(operands)
        if one_tensor not in bound:
            given = straight(operands)
            taken = config if latent.takes(problem, gpu, given, config.block_m) else _by_pointers(problem, gpu, config)
            launches = _specify(problem, gpu, given, *allocate(out), taken)
            bound[one_tensor] = taken.num_splits, [launch.bind(spec, takes) for spec, takes in launches]
        return bound[one_tensor]

    launchers(operands, out)

    def run(operands: Any, out: torch.Tensor | None = None) -> Results:
        operands = straight(operands)
        num_splits, (attend, *merge) = launchers(operands, out)
        out, lse = allocate(out)
        acc, state = partials.allocate(problem, num_splits, device) if num_splits > 1 else (None, None)
        attend(*operands[:3], out, lse, acc, state, *_beyond(operands))
        for launch_merge in merge:
            launch_merge(acc, state, out, lse, operands.sinks)
        return out, lse

    return run


def _by_pointers(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """Returns the replacement of a config if v is not part of k: for the default of latent caches, the default of other
    calls."""
    if config.by_map and config == of_table(problem, gpu):
        return of_table(problem, gpu, by_map=False)
    return replace(config, by_map=False)


def specify(
    problem: AttentionProblem, gpu: Gpu, operands: Any, out: torch.Tensor, lse: torch.Tensor | None, config: Config
) -> tuple[launch.Launch, ...]:
    """Returns the launch, and the merge if keys are split, from tensors that may be without memory."""
    return tuple(spec for spec, _ in _specify(problem, gpu, operands, out, lse, config))


def _specify(
    problem: AttentionProblem, gpu: Gpu, operands: Any, out: torch.Tensor, lse: torch.Tensor | None, config: Config
) -> list[tuple[launch.Launch, latent.Takes]]:
    """Returns each launch, and the positions of its tensors among the arguments it is given, None if they are the
    same."""
    acc = state = None
    by_map = config.by_map and latent.takes(problem, gpu, operands, config.block_m)
    merge = list[tuple[launch.Launch, latent.Takes]]()
    if config.num_splits > 1:
        acc, state = partials.allocate(problem, config.num_splits, out.device)
        specify_merge = latent.specify_merge if by_map else _merge
        merge = [(specify_merge(problem, config.num_splits, acc, state, out, lse, operands.sinks), None)]
    if by_map:
        arguments = (*operands[:3], out, lse, acc, state, *_beyond(operands))
        return [latent.specify(problem, gpu, operands, arguments, config.block_m, config.num_splits), *merge]
    heads = problem.heads_together
    units = problem.num_heads_q // heads
    # v may have another width than k, so its rows begin at other multiples.
    unit, unit_v = stride_unit(*operands[:2]), stride_unit(operands.v, out)
    strides = [*strides_in(unit, *operands[:2]), *strides_in(unit_v, operands.v, out)]
    strides[-1] = 1  # elements of out are adjacent
    attend = launch.Launch(
        kernel=large_head_dim_kernel,
        grid=_blocks(problem, config),
        tensors=(*operands[:3], out, lse, acc, state, *_beyond(operands)),
        scalars=[
            *strides,
            *lse_strides(problem),
            config.num_splits,
            *score_rules(problem, *operands[3:6]),
            *lengths(problem),
            *_pages(problem, operands),
            units,
            problem.num_heads_q // problem.num_heads_kv,
            problem.rows * problem.num_heads_q,
        ],
        constants={
            **_constants(problem, gpu, config, heads, operands),
            "STRIDE_UNIT": unit,
            "STRIDE_UNIT_V": unit_v,
        },
        # No fused multiply-adds: a score must be the same number as the maximum and as the minuend, so that the largest
        # probability is exactly 1.
        options={
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": False,
            **matrix_options(problem, gpu, config.block_m, config.block_n, config.num_warps),
        },
    )
    return [(attend, None), *merge]


def _merge(
    problem: AttentionProblem, num_splits: int, acc: Any, state: Any, out: Any, lse: Any, sinks: Any
) -> launch.Launch:
    """Returns the merge, with more warps for wider rows."""
    spec = partials.specify_merge(problem, num_splits, acc, state, out, lse, sinks)
    width = padded(problem.head_dim_v)
    return spec._replace(options=dict(spec.options) | {"num_warps": min(8, max(4, width // 128))})


def _beyond(operands: Any) -> tuple[Any, ...]:
    """Returns the tensors other than q, k and v, with the tables of a cache if there is one."""
    return (*operands[3:TABLES_END], *[None] * (TABLES_END - len(operands)))


def _pages(problem: AttentionProblem, operands: Any) -> tuple[int, int, int]:
    """Returns the stride and rows of the page table, and the pages of the pool; zeros without a cache."""
    if not problem.page_size:
        return (0, 0, 0)
    return (operands.page_table.stride(0), operands.k.shape[0], operands.page_table.shape[0])


def _constants(
    problem: AttentionProblem, gpu: Gpu, config: Config, heads: int, operands: Any
) -> dict[str, int | bool | str]:
    """Returns the compile-time arguments of the kernel, by name."""
    block_v, v_pieces = columns_of(problem, config)
    in_k = latent.is_one_tensor(operands) and _can_share_tiles(config, block_v)
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": config.block_d,
        "BLOCK_V": block_v,
        "V_PIECES": v_pieces,
        "V_PARTS": config.v_parts,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "HEADS": heads,
        "Q_RESIDENT": config.q_resident,
        "V_IN_K": in_k,
        "SPLIT": config.num_splits > 1,
        **band_constants(problem),
        **feature_constants(problem),
        "IS_VARLEN": problem.packed,
        "PAGE_SIZE": problem.page_size,
        "HAS_ROWS": getattr(operands, "rows", None) is not None,
        "WRITE_LSE": problem.return_lse,
        "PRECISION": dot_precision(problem, gpu),
        "IS_NVIDIA": gpu.vendor == "nvidia",
    }


def _blocks(problem: AttentionProblem, config: Config) -> int:
    return row_tiles(problem, config) * problem.batch * config.v_parts * config.num_splits


# What it costs --------------------------------------------------------------------------------------------------------


def _can_share_tiles(config: Config, block_v: int) -> bool:
    """Returns whether a tile of k is read once for both products if v is part of k."""
    return config.q_resident and config.v_parts == 1 and block_v == config.block_d


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns what the launches move and compute: whole tiles, padding included; q once for each tile of keys if it is
    not resident, k once for each part of the columns of v."""
    size, heads = DTYPE_BYTES[problem.dtype], problem.heads_together
    block_v, v_pieces = columns_of(problem, config)
    columns, width = block_v * v_pieces * config.v_parts, -(-problem.head_dim // config.block_d) * config.block_d
    of_tiles = walk(problem, config.block_m, config.block_n, heads)
    visited, longest = of_tiles.tiles, of_tiles.longest
    scores = visited * config.block_m * config.block_n * config.v_parts
    rows = problem.rows * problem.num_heads_q
    resident = rows if config.q_resident else visited * config.block_m
    beside = bytes_per_score(problem)
    by_latents = problem.v_in_k and config.by_map and not latent.cannot(problem, gpu, config.block_m)
    is_once = by_latents or (problem.v_in_k and _can_share_tiles(config, block_v))
    out_bytes = rows * (problem.head_dim_v * size + (4 if problem.return_lse else 0))
    workspace = partials.workspace_bytes(problem, config.num_splits) if config.num_splits > 1 else 0
    multiply_adds = " multiply-adds" if size == 4 and dot_precision(problem, gpu) == "ieee" else ""
    # Without q resident a step waits for V and for each piece of q and k; all stages but one are in flight.
    waits = 1 if config.q_resident else -(-(1 + width // config.block_d) // max(1, config.num_stages - 1))
    float32 = multiply_adds or (" float32" if size == 4 else "")
    split = config.block_n * (width + columns // config.v_parts) + config.block_m * config.block_n
    split += 0 if config.q_resident else config.block_m * width
    blocks = _blocks(problem, config)
    if by_latents:
        blocks = latent.tiles_of_rows(problem, config.block_m) * config.num_splits
    main = Cost(
        blocks=blocks,
        flops=2 * (scores * width + visited * config.block_m * config.block_n * columns),
        exponentials=scores,
        read_bytes=size * config.v_parts * (resident + visited * config.block_n) * problem.head_dim
        + visited * config.block_n * (0 if is_once else size * problem.head_dim_v)
        + scores * beside,
        write_bytes=workspace or out_bytes,
        smem_bytes=smem_bytes(problem, gpu, config),
        workspace_bytes=workspace,
        steps=visited * config.v_parts * waits,
        longest=-(-longest // config.num_splits) * waits,
        threads=config.num_warps * gpu.warp_size,
        # In float32, parts of operands in flight.
        registers=min(
            gpu.registers_per_thread or 255,
            registers(problem, gpu, config) + (64 if size == 4 and not multiply_adds else 0),
        ),
        scratch_bytes=workspace,
        smem_margin=4 * config.block_m * config.block_n + 1024,
        order=launch_order(problem, config.block_m, config.block_n, heads, config.num_splits * config.v_parts, True),
        loop=_loop(problem, config, float32) if not by_latents else LOOPS_OF_LATENTS[config.block_m],
        conversions=conversions(problem, gpu, visited * config.v_parts * split, config.block_m, config.num_warps),
        cut=of_tiles.cut * config.v_parts,
        items=of_tiles.items * config.v_parts * config.num_splits,
        # In pieces q comes with k, from L2.
        far=waits_for_memory(config.num_stages) * (1.0 if config.q_resident else 0.6),
    )
    if not workspace:
        return main
    columns = partials.column_blocks(problem, config.num_splits)
    merge = merging(rows, config.num_splits, workspace, out_bytes, column_blocks=columns)
    return replace(
        main,
        blocks=main.blocks + merge.blocks,
        exponentials=main.exponentials + merge.exponentials,
        read_bytes=main.read_bytes + workspace,
        write_bytes=workspace + out_bytes,
        scratch_bytes=2 * workspace,
        launches=2,
        parts=(replace(main, workspace_bytes=0), merge),
    )


LOOPS_OF_LATENTS = {latent.FEW: "latents", latent.MANY: "latents of many rows"}  # `Cost.loop`, by rows of a block


def _loop(problem: AttentionProblem, config: Config, float32: str) -> str:
    """Returns `Cost.loop`: separate names for Q in pieces, by arithmetic; for few rows; and for rows that pointers load
    in narrower accesses."""
    if not config.q_resident:
        return f"pieces{float32}"
    if config.block_m <= 32:
        return "few rows"
    return ODD_ROWS if odd_rows(problem) else ""
