"""Describes the launches of three_kernel's portable products, softmax and scaling. Holds no device code."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from warpwave.gpu import Gpu
from warpwave.kernels.arguments import (
    band_constants,
    dot_precision,
    feature_constants,
    lengths,
    lse_strides,
    padded,
    score_rules,
    token_strides,
)
from warpwave.kernels.three_kernel.config import block_k_of, block_v_of, may_hide_keys
from warpwave.kernels.three_kernel.device import chunk_scores_kernel, chunk_values_kernel
from warpwave.kernels.three_kernel.online import chunk_online_kernel
from warpwave.kernels.three_kernel.plan import Config, Plan, Workspace, normalizes, pieces, up, whole_rows
from warpwave.kernels.three_kernel.softmax import chunk_scale_kernel, chunk_softmax_kernel
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch

Launches = tuple[launch.Launch | None, launch.Launch | None, launch.Launch | None, list[launch.Launch]]


def names_taken(config: Config) -> dict[str, str]:
    """Returns the arguments of each stage's launch, by name, in the kernel's order."""
    raw = "p" if config.scores == "fused" else "scores"
    beside, ends = "mask bias alibi_slopes", "cu_seqlens_q cu_seqlens_k"
    values = f"p row_scale tile_max tile_sum v out lse sinks {ends}"
    if config.values == "online":
        values = f"scores v out lse {beside} sinks {ends}"
    return {
        "scores": f"q k {raw} tile_max tile_sum {beside} {ends}",
        "softmax": f"scores p row_scale lse {beside} sinks {ends}",
        "values": values,
    }


def is_one_step(problem: AttentionProblem, config: Config, width: int) -> bool:
    """Returns whether the values of a tile of rows are one step of the unfused second product, so that they can be
    loaded early."""
    steps_alone = config.scores == "triton" and config.split_d > 1 and width <= config.block_k
    return steps_alone and not problem.packed and not may_hide_keys(problem)


def scaled_columns(problem: AttentionProblem) -> int:
    """Returns the columns of a row of out that a block scales."""
    return min(1024, padded(problem.head_dim_v))


def scale_warps(columns: int) -> int:
    """Returns the warps of a block that scales."""
    return max(1, columns // 256)


def launches(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: Operands,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: Config,
    cut: Plan,
    workspace: Workspace,
) -> Iterator[Launches]:
    """Returns, for each chunk, the launches of the first product, softmax, second product, and scaling of each piece of
    its sums; None for what torch or an epilogue computes."""
    q, k, v, mask, bias, slopes, sinks, *ends = operands
    fused, band, varlen = config.scores == "fused", band_constants(problem), {"IS_VARLEN": problem.packed}
    features = feature_constants(problem)
    of_sinks = {"HAS_SINKS": features.pop("HAS_SINKS")}
    hides = {"MAY_HIDE_KEYS": may_hide_keys(problem)}
    arithmetic = {"PRECISION": dot_precision(problem, gpu), "IS_NVIDIA": gpu.vendor == "nvidia"}
    raw, p = workspace.scores, workspace.p
    strides = (cut.rows * cut.width, cut.width)  # of a head and a row of the workspace
    split = (cut.heads * cut.rows * cut.width,)
    online = config.values == "online"
    p_strides = () if p is None else p.stride()[-3:-1]
    # If launch latency dominates, each launch starts while the preceding one ends.
    ahead = gpu.capability >= 90 and (online or config.split_d > 1)
    begins = {"launch_pdl": True} if ahead else {}
    of_sequences = lengths(problem)
    heads = (problem.num_heads_q, problem.num_heads_q // problem.num_heads_kv)
    rules = score_rules(problem, mask, bias, slopes)
    of_out = (*token_strides(out)[:-1], 1, *lse_strides(problem))
    # No fused multiply-adds: a score must be the same number as the maximum and as the minuend, so that the largest
    # probability is exactly 1.
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": False}
    block_k, block_v = block_k_of(problem, config), block_v_of(problem, config)
    for chunk in cut.chunks:
        where = (chunk.first_head, chunk.row_begin, chunk.rows, chunk.key_base)
        tiles_m = -(-chunk.rows // config.block_m)
        tiles_n = cut.width // config.block_n
        score = softmax = sum_values = None
        if config.scores != "library":
            score = launch.Launch(
                kernel=chunk_scores_kernel,
                grid=chunk.heads * tiles_m * tiles_n * config.split_d,
                tensors=(q, k, p if fused else raw, workspace.tile_max, workspace.tile_sum, mask, bias, slopes,
                         *ends),
                scalars=[*token_strides(q), *token_strides(k), *strides, *split, *rules, *of_sequences,
                         *where, *heads, tiles_m, tiles_n],
                constants={"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": block_k,
                           "HEAD_DIM": problem.head_dim, "SPLIT_D": config.split_d, "FUSED": fused, **hides, **band,
                           **features, **varlen, "LAUNCHED_AHEAD": ahead, **arithmetic},
                options=options | begins,
            )  # fmt: skip
        if not (fused or online):
            tiles = -(-chunk.rows // config.softmax_rows)
            # torch's second product reads all keys that any row of the chunk sees; ours, those that a row of a tile
            # sees.
            together = up(chunk.rows, config.softmax_rows) if config.values == "library" else config.block_m
            softmax = launch.Launch(
                kernel=chunk_softmax_kernel,
                grid=chunk.heads * tiles,
                tensors=(raw, p, workspace.row_scale, lse, mask, bias, slopes, sinks, *ends),
                scalars=[*strides, *split, *p_strides, *lse_strides(problem), *rules, *of_sequences, *where,
                         problem.num_heads_q, tiles, max(together, config.softmax_rows)],
                constants={"ROWS": config.softmax_rows, "KEYS": config.softmax_keys, "SPLIT_D": config.split_d,
                           "WHOLE": whole_rows(config, cut.width), "NORMALIZE": normalizes(problem, config),
                           **hides, **band, **features, **of_sinks, **varlen, "WRITE_LSE": problem.return_lse,
                           "LAUNCHED_AHEAD": ahead},
                options={"num_warps": config.softmax_warps, "num_stages": 1, "enable_fp_fusion": False, **begins},
            )  # fmt: skip
        if online:
            tiles = -(-chunk.rows // config.softmax_rows)
            sum_values = launch.Launch(
                kernel=chunk_online_kernel,
                grid=chunk.heads * tiles * -(-problem.head_dim_v // block_v),
                tensors=(raw, v, out, lse, mask, bias, slopes, sinks, *ends),
                scalars=[*strides, *split, *token_strides(v), *of_out, *rules, *of_sequences, *where, *heads,
                         tiles],
                constants={"ROWS": config.softmax_rows, "KEYS": config.softmax_keys, "BLOCK_V": block_v,
                           "HEAD_DIM_V": problem.head_dim_v, "SPLIT_D": config.split_d, **hides, **band, **features,
                           **of_sinks, **varlen, "WRITE_LSE": problem.return_lse, "LAUNCHED_AHEAD": ahead,
                           **arithmetic},
                options={"num_warps": config.softmax_warps, "num_stages": 1, "enable_fp_fusion": False, **begins},
            )  # fmt: skip
        if config.values == "triton":
            sum_values = launch.Launch(
                kernel=chunk_values_kernel,
                grid=chunk.heads * tiles_m * -(-problem.head_dim_v // block_v),
                tensors=(p, workspace.row_scale, workspace.tile_max, workspace.tile_sum, v, out, lse, sinks,
                         *ends),
                scalars=[*p_strides, *token_strides(v), *of_out, *of_sequences, *where, *heads, tiles_m, tiles_n],
                constants={"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
                           "BLOCK_V": block_v, "HEAD_DIM_V": problem.head_dim_v, "FUSED": fused,
                           "ONE_STEP": is_one_step(problem, config, cut.width), **hides, **band, **of_sinks, **varlen,
                           "WRITE_LSE": problem.return_lse, "LAUNCHED_AHEAD": ahead, **arithmetic},
                options=options | begins,
            )  # fmt: skip
        scales = []
        if workspace.sums is not None and not chunk.nothing_to_see:
            columns = scaled_columns(problem)
            scales = [
                launch.Launch(
                    kernel=chunk_scale_kernel,
                    grid=piece.heads * piece.rows * -(-problem.head_dim_v // columns),
                    tensors=(workspace.sums, workspace.row_scale, out),
                    scalars=[*token_strides(out)[:-1], cut.rows, problem.num_heads_q,
                             chunk.first_head + piece.first_head, chunk.row_begin + piece.row_begin, piece.rows,
                             piece.first_head * cut.rows + piece.row_begin],
                    constants={"HEAD_DIM_V": problem.head_dim_v, "COLUMNS": columns},
                    options={"num_warps": scale_warps(columns), "num_stages": 1, "enable_fp_fusion": False},
                )
                for piece in pieces(problem, config, chunk.heads, chunk.rows)
            ]  # fmt: skip
        yield score, softmax, sum_values, scales
