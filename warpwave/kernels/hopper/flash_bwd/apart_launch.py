"""The separate launches of the gradients: dK and dV (dkv.py), and dQ (dq.py)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from warpwave.gpu import Gpu
from warpwave.kernels import arguments, dropout
from warpwave.kernels.hopper import host
from warpwave.kernels.hopper.flash_bwd import dkv, dq, launches
from warpwave.kernels.hopper.flash_bwd.config import Config, group_splits, scheduled_blocks
from warpwave.kernels.hopper.flash_bwd.launches import Step, Tensors
from warpwave.problem import DTYPE_BYTES, AttentionProblem
from warpwave.runtime import launch
from warpwave.runtime.tensor_maps import MapPlan

ROWS = 64  # of a tile that stays in shared memory for a block: the rows of a warpgroup's product
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


def steps(problem: AttentionProblem, gpu: Gpu, tensors: Tensors, config: Config) -> list[Step]:
    """Returns the launches, in their order."""
    return [_of_keys(problem, gpu, tensors, config), _of_queries(problem, gpu, tensors, config)]


def _plans(
    problem: AttentionProblem, sources: Sequence[torch.Tensor], of_keys: Sequence[int], steps: Sequence[int] = (),
    step: int = ROWS, first: int = 0,
) -> list[list[MapPlan | None]]:  # fmt: skip
    """Returns the tensor maps of each source, one for each piece of its width. Maps of keys end with the last visible
    key, the others with the last query that sees a key. Sources that a block walks, `steps`, have tiles of `step` rows.
    Sources are numbered from `first` on.
    """
    plans = []
    for source, tensor in enumerate(sources, first):
        end = host.keys_end(problem) if source in of_keys else launches.queries_end(problem)
        shape, strides = host.seen(tensor, problem.packed, end)
        rows = step if source in steps else ROWS
        plans.append(host.piece_maps(source, shape, strides, rows, host.pieces(tensor.shape[-1])))
    return plans


def _copy_plans(
    problem: AttentionProblem, sources: Sequence[torch.Tensor], first: int, walked: Sequence[int], step: int
) -> list[MapPlan | None]:
    """Returns the tensor maps of the copies of q, k, v and dout, which are the sources from `first` on, if any."""
    of_keys, steps = (first + 1, first + 2), [first + place for place in walked]
    found = _plans(problem, sources[first:], of_keys, steps, step, first)
    return [*chain(*found)] if found else [None] * 12


def _of_keys(problem: AttentionProblem, gpu: Gpu, tensors: Tensors, config: Config) -> Step:
    kind, is_divided = launches.bias_kind(tensors), tensors.workspace.dk_splits is not None

    def mapped(t: Tensors) -> tuple[Any, ...]:
        of_bias = (t.operands.bias,) if kind == "cells" else ()
        stored = () if is_divided else t.of_keys
        work = t.workspace
        return *t.operands[:3], t.dout, work.lse_log2, work.delta, *of_bias, *stored, *work.hidden.copies

    def beside(t: Tensors) -> tuple[Any, ...]:
        bias = None if kind == "cells" else t.operands.bias
        hidden = t.workspace.hidden
        of_scores = (hidden.words_transposed, hidden.walks_transposed, bias)
        of_call = (t.operands.dropout_seed, hidden.copies_needed)
        return *t.of_keys, t.operands.alibi_slopes, *t.offsets, *of_scores, *of_call

    sources = mapped(tensors)
    read = _plans(problem, sources[:4], of_keys=(1, 2), steps=(0, 3), step=config.block_m)
    of_rows = [launches.statistic_plan(source, sources[source], config.block_m) for source in (4, 5)]
    of_bias = host.bias_plan(6, sources[6], (config.block_m, config.block_n)) if kind == "cells" else None
    first, copies = 6 + (kind == "cells"), len(sources) - len(tensors.workspace.hidden.copies)
    stored = _plans(problem, sources[first:copies], of_keys=(first, first + 1), first=first)
    plans = [*chain(*read), *of_rows, *(chain(*stored) if stored else [None] * 6), of_bias]
    plans += _copy_plans(problem, sources, copies, walked=(0, 3), step=config.block_m)
    size = DTYPE_BYTES[problem.dtype]
    of = launch.Launch(
        kernel=dkv.dkv_kernel,
        grid=min(scheduled_blocks(problem, config), gpu.assumed_sms),
        tensors=(*launches.mapped(plans, sources), *beside(tensors), host.counter(tensors.out)),
        # Of a query: Q and dO.
        scalars=[
            *launches.of_keys(problem, tensors, config, (problem.head_dim + problem.head_dim_v) * size),
            *launches.of_mask(problem, tensors, transposed=True),
            *arguments.broadcast_strides(tensors.operands.bias)[:3],
            *dropout.scalars(problem.dropout_p),
        ],
        constants={
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "STAGES": config.num_stages,
            "HEAD_DIM": problem.head_dim,
            "HEAD_DIM_V": problem.head_dim_v,
            **launches.constants_of(problem, group_splits(problem, config)),
            "BIAS": kind,
        },
        options=OPTIONS,
    )
    return Step(of, lambda t: (*mapped(t), *beside(t)), plans)


def _of_queries(problem: AttentionProblem, gpu: Gpu, tensors: Tensors, config: Config) -> Step:
    kind, block_m = launches.bias_kind(tensors), 2 * ROWS
    block_n, stages_v = launches.steps_over_keys(problem, tensors, config)

    def mapped(t: Tensors) -> tuple[torch.Tensor, ...]:
        of_bias = (t.operands.bias, t.dbias) if kind == "cells" else ()
        given = (found for found in of_bias if found is not None)
        return *t.operands[:3], t.dout, t.dq, *given, *t.workspace.hidden.copies

    def beside(t: Tensors) -> tuple[Any, ...]:
        work, hidden = t.workspace, t.workspace.hidden
        of_rows = (work.lse_log2, work.delta, work.sums, t.dq, t.operands.alibi_slopes, t.of_slopes)
        of_scores = (hidden.words, hidden.walks, None if kind == "cells" else t.operands.bias)
        return *of_rows, *t.offsets, *of_scores, t.operands.dropout_seed, hidden.copies_needed

    sources = mapped(tensors)
    plans = [*chain(*_plans(problem, sources[:5], of_keys=(1, 2), steps=(1, 2), step=block_n))]
    copies = len(sources) - len(tensors.workspace.hidden.copies)
    of_bias = [host.bias_plan(source, sources[source], (ROWS, block_n)) for source in range(5, copies)]
    plans += [*of_bias, *[None] * (2 - len(of_bias))]
    plans += _copy_plans(problem, sources, copies, walked=(1, 2), step=block_n)
    tiles = launches.query_tiles(problem, block_m) * launches.heads_of(problem)
    key_bytes = (problem.head_dim + problem.head_dim_v) * DTYPE_BYTES[problem.dtype]
    statistic_rows = launches.query_tiles(problem, config.block_m) * config.block_m
    of = launch.Launch(
        kernel=dq.dq_kernel,
        grid=min(tiles, gpu.assumed_sms),
        tensors=(*launches.mapped(plans, sources), *beside(tensors), host.counter(tensors.out)),
        scalars=[
            *launches.of_queries(problem, tensors, key_bytes, block_m, statistic_rows),
            *launches.of_mask(problem, tensors, transposed=False),
            *arguments.broadcast_strides(tensors.operands.bias)[:3],
            *dropout.scalars(problem.dropout_p),
        ],
        constants={
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "STAGES": config.num_stages,
            "STAGES_V": stages_v,
            "HEAD_DIM": problem.head_dim,
            **launches.constants_of(problem),
            "BIAS": kind,
            "WRITE_DBIAS": tensors.dbias is not None,
            "WRITE_DSLOPES": tensors.of_slopes is not None,
        },
        options=OPTIONS,
    )
    return Step(of, lambda t: (*mapped(t), *beside(t)), plans)
