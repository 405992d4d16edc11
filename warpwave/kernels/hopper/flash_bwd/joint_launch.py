"""The launches of the joint backward: dQ's sums, dK and dV (joint.py), then dQ from its sums (rows.py)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from warpwave.gpu import Gpu
from warpwave.kernels import arguments, dropout
from warpwave.kernels.hopper import host
from warpwave.kernels.hopper.flash_bwd import joint, joint_steps, launches, rows, sum_splits
from warpwave.kernels.hopper.flash_bwd.config import (
    GROUP_ROWS,
    Config,
    ascends,
    divided_tail,
    dq_columns,
    dq_shares,
    fits_joint,
    group_splits,
    is_broad,
    product_pieces,
    scheduled_blocks,
    stages_of_dout,
    tile_pieces,
)
from warpwave.kernels.hopper.flash_bwd.launches import Step, Tensors
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch
from warpwave.runtime.tensor_maps import MapPlan


def steps(problem: AttentionProblem, gpu: Gpu, tensors: Tensors, config: Config) -> list[Step]:
    """Returns the launches, in their order."""
    assert not is_broad(problem) or fits_joint(problem), "joint_steps.broad_step leaves out other features"
    found = [_gradients(problem, gpu, tensors, config), _finish(problem, tensors, config)]
    return found if divided_tail(problem, config)[1] == 1 else [*found, _sums_of_parts(problem, tensors, config)]


def _plans(
    problem: AttentionProblem, config: Config, sources: Sequence[torch.Tensor], has_bias: bool, copies: int
) -> list[MapPlan | None]:
    """Returns the tensor maps of `sources`, the last of which are `copies` (launches.Hidden), in the kernel's order,
    None for absent ones. Those of Q and dO end with the last query that sees a key, those of K and V with the last
    visible key."""
    end = len(sources) - copies
    plans = _operand_plans(problem, config, sources[:4], 0)
    plans += [launches.statistic_plan(source, sources[source], config.block_m) for source in (4, 5)]
    sums = sources[6]
    lines = GROUP_ROWS * min(chain(*dq_shares(problem, config))) // joint_steps.LINE.value
    plans.append(MapPlan(6, tuple(sums.shape), tuple(sums.stride()), (lines, sums.shape[1]), is_swizzled=False))
    of_bias = host.bias_plan(7, sources[7], (config.block_m, config.block_n)) if has_bias else None
    stored: list[MapPlan | None] = []
    for source in range(7 + has_bias, end):
        shape, strides = host.seen(sources[source], problem.packed, host.keys_end(problem))
        stored.append(MapPlan(source, shape, strides, (1, 1, joint_steps.GROUP_KEYS.value, joint_steps.COLUMNS.value)))
    of_copies = _operand_plans(problem, config, sources[end:], end) if copies else [None] * 8
    return [*plans, *(stored or [None, None]), of_bias, *of_copies]


def _operand_plans(
    problem: AttentionProblem, config: Config, tensors: Sequence[torch.Tensor], first: int
) -> list[MapPlan | None]:
    """Returns the tensor maps of q, k, v and dout, whose sources are numbered from `first` on."""
    plans: list[MapPlan | None] = []
    pieces_qk, pieces_v = tile_pieces(problem)
    for place, tensor in enumerate(tensors):
        of_keys = place in (1, 2)
        end = host.keys_end(problem) if of_keys else launches.queries_end(problem)
        shape, strides = host.seen(tensor, problem.packed, end)
        block_rows = config.block_n if of_keys else config.block_m
        pieces = pieces_qk if place < 2 else pieces_v
        plans += [MapPlan(first + place, shape, strides, (1, 1, block_rows, width)) for width in pieces]
        plans += [None] * (2 - len(pieces))
    return plans


def _gradients(problem: AttentionProblem, gpu: Gpu, tensors: Tensors, config: Config) -> Step:
    kind, (whole, parts) = launches.bias_kind(tensors), divided_tail(problem, config)
    items = whole + parts * (scheduled_blocks(problem, config) - whole)
    has_splits = tensors.workspace.dk_splits is not None and parts == 1

    def mapped(t: Tensors) -> tuple[Any, ...]:
        of_bias = (t.operands.bias,) if kind == "cells" else ()
        stored = () if has_splits else (t.dk, t.dv)
        work = t.workspace
        statistics = work.lse_log2, work.delta
        return *t.operands[:3], t.dout, *statistics, work.dq_sums, *of_bias, *stored, *work.hidden.copies

    def beside(t: Tensors) -> tuple[Any, ...]:
        work, hidden = t.workspace, t.workspace.hidden
        of_call = t.operands.alibi_slopes, *t.offsets, t.operands.dropout_seed
        of_scores = hidden.words_transposed, hidden.walks_transposed, None if kind == "cells" else t.operands.bias
        return *t.of_keys, *of_call, *of_scores, work.turns, hidden.copies_needed

    sources = mapped(tensors)
    plans = _plans(problem, config, sources, kind == "cells", len(tensors.workspace.hidden.copies))
    scalars = launches.of_keys(problem, tensors, config, _bytes_of_query(problem, config))
    pieces, pieces_v = product_pieces(problem)
    of = launch.Launch(
        kernel=joint.joint_kernel,
        grid=min(items, gpu.assumed_sms),
        tensors=(
            *launches.mapped(plans, sources),
            *beside(tensors),
            host.counter(tensors.out),
        ),
        scalars=[
            *scalars,
            *dropout.scalars(problem.dropout_p),
            *launches.of_mask(problem, tensors, transposed=True),
            *arguments.broadcast_strides(tensors.operands.bias)[:3],
        ],
        constants={
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "STAGES": config.num_stages,
            "STAGES_DOUT": stages_of_dout(problem, config),
            "HEAD_DIM": problem.head_dim,
            "HEAD_DIM_V": problem.head_dim_v,
            "PIECES": pieces,
            "PIECES_V": pieces_v,
            "DQ_SHARES": dq_shares(problem, config),
            **launches.constants_of(problem, group_splits(problem, config), ascends(problem, config)),
            "BIAS": kind,
            "IS_DETERMINISTIC": problem.deterministic,
        },
        options={"num_warps": 4, "enable_fp_fusion": True},
    )
    return Step(of, lambda t: (*mapped(t), *beside(t)), plans)


def _bytes_of_query(problem: AttentionProblem, config: Config) -> int:
    """Returns the bytes of a query of a head in L2: of Q, dO and dQ's sums."""
    return 2 * sum(map(sum, tile_pieces(problem))) + 4 * dq_columns(problem, config)


def _sums_of_parts(problem: AttentionProblem, tensors: Tensors, config: Config) -> Step:
    blocks, (whole, parts) = scheduled_blocks(problem, config), divided_tail(problem, config)
    heads, bytes_of_head = problem.num_heads_kv, problem.seqlen_q * _bytes_of_query(problem, config)

    def given(t: Tensors) -> tuple[Any, ...]:
        return *t.of_keys, t.dk, t.dv

    of = launch.Launch(
        kernel=sum_splits.sum_parts_kernel,
        grid=2 * (blocks - whole) * (config.block_n // sum_splits.BLOCK),
        tensors=given(tensors),
        scalars=[
            blocks,
            whole,
            parts,
            -(-problem.seqlen_k // config.block_n),
            launches.heads_at_once(problem, config, heads, blocks, bytes_of_head),
            problem.batch,
            heads,
            problem.seqlen_k,
        ],
        constants={
            "ROWS": sum_splits.BLOCK,
            "BLOCK_N": config.block_n,
            "HEAD_DIM": problem.head_dim,
            "HEAD_DIM_V": problem.head_dim_v,
            "WIDTH": arguments.padded(problem.head_dim),
            "WIDTH_V": arguments.padded(problem.head_dim_v),
        },
        options={"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False},
    )
    return Step(of, given)


def _finish(problem: AttentionProblem, tensors: Tensors, config: Config) -> Step:
    tiles = launches.query_tiles(problem, config.block_m)

    def given(t: Tensors) -> tuple[Any, ...]:
        return t.workspace.dq_sums, t.workspace.turns, t.dq, *t.offsets

    of = launch.Launch(
        kernel=rows.finish_dq_kernel,
        grid=launches.heads_of(problem) * tiles,
        tensors=given(tensors),
        scalars=[
            *arguments.token_strides(tensors.dq)[:3],
            problem.num_heads_q,
            tiles,
            *launches.block_sizes(problem),
            problem.softmax_scale,
        ],
        constants={
            "BLOCK_M": config.block_m,
            "HEAD_DIM": problem.head_dim,
            "DQ_SHARES": dq_shares(problem, config),
            "SUMS_OF_TILE": config.block_m * dq_columns(problem, config),
            **arguments.band_constants(problem),
            "IS_VARLEN": problem.packed,
            "ALIGN": launches.first_row_multiple(problem),
        },
        options={"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True},
    )
    return Step(of, given)
