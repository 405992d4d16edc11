"""The launches of the joint way: dQ's sums, dK and dV (joint.py), then dQ from its sums (rows.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from warpwave.gpu import Gpu
from warpwave.kernels import arguments, dropout
from warpwave.kernels.hopper import host
from warpwave.kernels.hopper.flash_bwd import joint, launches, rows
from warpwave.kernels.hopper.flash_bwd.config import Config, group_splits, scheduled_blocks, width
from warpwave.kernels.hopper.flash_bwd.launches import Step, Tensors
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch
from warpwave.runtime.tensor_maps import MapPlan


def steps(problem: AttentionProblem, gpu: Gpu, tensors: Tensors, config: Config) -> list[Step]:
    """Returns the launches, in their order."""
    return [_gradients(problem, gpu, tensors, config), _finish(problem, tensors, config)]


def _sources(t: Tensors) -> tuple[torch.Tensor, ...]:
    """Returns what the tensor maps describe."""
    assert t.workspace.dq_sums is not None
    of_bias = (t.operands.bias,) if launches.bias_kind(t) == "cells" else ()
    work = t.workspace
    return (*t.operands[:3], t.dout, work.lse_log2, work.delta, work.dq_sums, t.dk, t.dv, *of_bias)


def _plans(problem: AttentionProblem, config: Config, sources: Sequence[torch.Tensor]) -> list[MapPlan | None]:
    """Returns the tensor maps. Those of Q and dO end with the last query that sees a key, those of K and V with the
    last visible key."""
    plans: list[MapPlan | None] = []
    for source, tensor in enumerate(sources[:4]):
        of_keys = source in (1, 2)
        end = host.keys_end(problem) if of_keys else launches.queries_end(problem)
        shape, strides = host.seen(tensor, problem.packed, end)
        block = (1, 1, config.block_n if of_keys else config.block_m, width(problem))
        plans.append(MapPlan(source, shape, strides, block))
    plans += [launches.statistic_plan(source, sources[source], config.block_m) for source in (4, 5)]
    sums = sources[6]
    lines = config.block_m * width(problem) // 2 // joint.LINE.value
    plans.append(MapPlan(6, tuple(sums.shape), tuple(sums.stride()), (lines, sums.shape[1]), is_swizzled=False))
    for source, tensor in enumerate(sources[7:9], 7):
        shape, strides = host.seen(tensor, problem.packed, host.keys_end(problem))
        plan = MapPlan(source, shape, strides, (1, 1, joint.GROUP_KEYS.value, joint.COLUMNS.value))
        plans.append(None if group_splits(problem, config) > 1 else plan)
    of_bias: list[MapPlan | None] = [host.bias_plan(9, bias, (config.block_m, config.block_n)) for bias in sources[9:]]
    return [*plans, *(of_bias or [None])]


def _gradients(problem: AttentionProblem, gpu: Gpu, tensors: Tensors, config: Config) -> Step:
    sources, kind = _sources(tensors), launches.bias_kind(tensors)
    plans = _plans(problem, config, sources)

    def beside(t: Tensors) -> tuple[Any, ...]:
        work, hidden = t.workspace, t.workspace.hidden
        of_call = t.operands.alibi_slopes, *t.offsets, t.operands.dropout_seed
        of_scores = hidden.words_transposed, hidden.walks_transposed, None if kind == "cells" else t.operands.bias
        return t.dk, t.dv, *of_call, *of_scores, work.turns

    # Of a query: Q, dO and dQ's sums.
    scalars = launches.of_keys(problem, tensors, config, width(problem) * (2 + 2 + 4))
    of = launch.Launch(
        kernel=joint.joint_kernel,
        grid=min(scheduled_blocks(problem, config), gpu.num_sms or host.NUM_SMS),
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
            "HEAD_DIM": problem.head_dim,
            "HEAD_DIM_V": problem.head_dim_v,
            **launches.constants_of(problem),
            "BIAS": kind,
            "IS_DETERMINISTIC": problem.deterministic,
        },
        options={"num_warps": 4, "enable_fp_fusion": True},
    )
    return Step(of, lambda t: (*_sources(t), *beside(t)), plans)


def _finish(problem: AttentionProblem, tensors: Tensors, config: Config) -> Step:
    tiles = launches.query_tiles(problem, config.block_m)

    def given(t: Tensors) -> tuple[Any, ...]:
        return t.workspace.dq_sums, t.dq, *t.offsets

    of = launch.Launch(
        kernel=rows.finish_dq_kernel,
        grid=launches.heads_of(problem) * tiles,
        tensors=given(tensors),
        scalars=[
            *arguments.token_strides(problem, tensors.dq)[:3],
            problem.num_heads_q,
            tiles,
            *launches.block_sizes(problem),
            problem.softmax_scale,
        ],
        constants={
            "BLOCK_M": config.block_m,
            "HEAD_DIM": problem.head_dim,
            "WIDTH": width(problem),
            **arguments.band_constants(problem),
            "IS_VARLEN": problem.packed,
            "ALIGN": launches.first_row_multiple(problem),
        },
        options={"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True},
    )
    return Step(of, given)
