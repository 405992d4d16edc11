"""The launches of float32 gradients: the largest magnitudes of K and V (prepass/scale_ahead.py), parts and statistics
(split_rows.py), dQ (split_dq.py), and dK and dV (split_dkv.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from warpwave.gpu import Gpu
from warpwave.kernels import arguments, dropout
from warpwave.kernels.hopper import host
from warpwave.kernels.hopper.flash_bwd import launches, split_dkv, split_dq, split_rows
from warpwave.kernels.hopper.flash_bwd.config import (
    GROUP_ROWS,
    Config,
    group_splits,
    scheduled_blocks,
    steps_of_dq,
    widths,
)
from warpwave.kernels.hopper.flash_bwd.launches import Step, Tensors
from warpwave.kernels.prepass import scale_ahead
from warpwave.kernels.prepass.split_ahead import operand_strides
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch
from warpwave.runtime.tensor_maps import MapPlan

OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


def workspace_shapes(problem: AttentionProblem) -> list[tuple[int, ...]]:
    """Returns the shapes of the parts of q, k, v and dout, (batch, heads * parts, rows of whole tiles, width), and of
    what else split_rows.py writes: sums of rows, units of tiles of queries, and centers of k; and of the maxima of
    tiles of k and v."""
    parts, (of_keys, of_values) = split_rows.PARTS.value, widths(problem)
    batch = 1 if problem.packed else problem.batch
    tiles, rows_k = launches.query_tiles(problem, GROUP_ROWS), key_tiles(problem) * GROUP_ROWS
    rows_q, heads, heads_kv = tiles * GROUP_ROWS, problem.num_heads_q * parts, problem.num_heads_kv * parts
    return [
        (batch, heads, rows_q, of_keys),
        (batch, heads_kv, rows_k, of_keys),
        (batch, heads_kv, rows_k, of_values),
        (batch, heads, rows_q, of_values),
        (launches.heads_of(problem), rows_q),
        (launches.heads_of(problem), tiles, split_rows.UNITS.value),
        (problem.batch * problem.num_heads_kv, of_keys),
        (2, scale_ahead.num_tiles(problem)[1]),
    ]


def key_tiles(problem: AttentionProblem) -> int:
    """Returns the tiles of keys of a head, of all packed sequences together."""
    if problem.packed:
        return problem.total_k // GROUP_ROWS + problem.batch
    return -(-problem.seqlen_k // GROUP_ROWS)


def steps(problem: AttentionProblem, gpu: Gpu, tensors: Tensors, config: Config) -> list[Step]:
    """Returns the launches, in their order."""
    return [
        _maxima(problem, gpu, tensors),
        _parts(problem, gpu, tensors),
        _of_queries(problem, gpu, tensors, config),  # before the other, whose delta it corrects
        _of_keys(problem, gpu, tensors, config),
    ]


def _maxima(problem: AttentionProblem, gpu: Gpu, tensors: Tensors) -> Step:
    maxima = tensors.workspace.maxima
    assert maxima is not None
    seen = tensors.workspace.hidden.seen_keys
    of = scale_ahead.specify_maxima(problem, gpu, tensors.operands, maxima, widths(problem), seen)
    return Step(of, lambda t: (*t.operands[1:3], *t.offsets, t.workspace.hidden.seen_keys, t.workspace.maxima))


def _parts(problem: AttentionProblem, gpu: Gpu, tensors: Tensors) -> Step:
    def given(t: Tensors) -> tuple[Any, ...]:
        work = t.workspace
        parts = work.q_parts, work.k_parts, work.v_parts, work.dout_parts
        read = *t.operands[:3], t.dout, t.out, t.lse, t.dlse, *t.offsets, work.hidden.seen_keys, work.maxima
        return *read, *parts, work.lse_log2, work.delta, work.sums, work.units, work.centers

    strides, unit = operand_strides((*tensors.operands[:3], tensors.dout, tensors.out))
    tiles_q, tiles_k = launches.query_tiles(problem, GROUP_ROWS), key_tiles(problem)
    heads_kv = problem.num_heads_kv * (1 if problem.packed else problem.batch)
    of_keys, of_values = widths(problem)
    of = launch.Launch(
        kernel=split_rows.split_rows_kernel,
        grid=launches.heads_of(problem) * tiles_q + 2 * heads_kv * tiles_k,
        tensors=given(tensors),
        scalars=[
            *strides,
            *arguments.lse_strides(problem),
            *arguments.lengths(problem),
            *scale_ahead.seen_scalars(tensors.workspace.hidden.seen_keys),
            *[problem.batch, problem.num_heads_q, problem.num_heads_kv],
            *[tiles_q, tiles_k, scale_ahead.num_tiles(problem)[1]],
        ],
        constants={
            "UNIT": unit,
            "HEAD_DIM": problem.head_dim,
            "HEAD_DIM_V": problem.head_dim_v,
            "WIDTH": of_keys,
            "WIDTH_V": of_values,
            "BLOCK_D": arguments.padded(of_keys),
            "BLOCK_DV": arguments.padded(of_values),
            "ALIGN": launches.first_row_multiple(problem),
            "IS_NVIDIA": gpu.vendor == "nvidia",
            "IS_VARLEN": problem.packed,
            **arguments.band_constants(problem),
        },
        options={"num_warps": 8, "num_stages": 1, "enable_fp_fusion": False},
    )
    return Step(of, given)


def _plans(sources: Sequence[torch.Tensor]) -> list[MapPlan | None]:
    """Returns the tensor maps of the parts of q, k, v and dout, for tiles of 64 rows."""
    plans: list[MapPlan | None] = []
    for source, tensor in enumerate(sources):
        pieces = host.pieces(tensor.shape[-1])
        plans += host.piece_maps(source, tuple(tensor.shape), tuple(tensor.stride()), GROUP_ROWS, pieces)
    return plans


def _sources(t: Tensors) -> tuple[torch.Tensor, ...]:
    work = t.workspace
    return work.q_parts, work.k_parts, work.v_parts, work.dout_parts  # type: ignore[return-value]


def _row_bytes(problem: AttentionProblem) -> int:
    """Returns the bytes of the parts of a key of a head, K and V, or of a query, Q and dO."""
    return 2 * split_rows.PARTS.value * sum(widths(problem))


def _of_keys(problem: AttentionProblem, gpu: Gpu, tensors: Tensors, config: Config) -> Step:
    def mapped(t: Tensors) -> tuple[torch.Tensor, ...]:
        return *_sources(t), t.workspace.lse_log2, t.workspace.delta

    def beside(t: Tensors) -> tuple[Any, ...]:
        hidden = t.workspace.hidden
        of_mask = hidden.words_transposed, hidden.walks_transposed
        return *t.of_keys, t.operands.alibi_slopes, *t.offsets, *of_mask, t.operands.dropout_seed, t.workspace.units

    sources = mapped(tensors)
    of_rows = [launches.statistic_plan(source, sources[source], GROUP_ROWS) for source in (4, 5)]
    plans = [*_plans(sources[:4]), *of_rows]
    of = launch.Launch(
        kernel=split_dkv.split_dkv_kernel,
        grid=min(scheduled_blocks(problem, config), gpu.assumed_sms),
        tensors=(*launches.mapped(plans, sources), *beside(tensors), host.counter(tensors.out)),
        scalars=[
            *launches.of_keys(problem, tensors, config, _row_bytes(problem)),
            *launches.of_mask(problem, tensors, transposed=True),
            *dropout.scalars(problem.dropout_p),
        ],
        constants={
            "BLOCK_M": GROUP_ROWS,
            "BLOCK_N": GROUP_ROWS,
            "STAGES": config.num_stages,
            "HEAD_DIM": problem.head_dim,
            "HEAD_DIM_V": problem.head_dim_v,
            **launches.constants_of(problem, group_splits(problem, config)),
            "BIAS": "",
        },
        options=OPTIONS,
    )
    return Step(of, lambda t: (*mapped(t), *beside(t)), plans)


def _of_queries(problem: AttentionProblem, gpu: Gpu, tensors: Tensors, config: Config) -> Step:
    def beside(t: Tensors) -> tuple[Any, ...]:
        work = t.workspace
        of_rows = (work.lse_log2, work.delta, work.sums, t.dq, t.operands.alibi_slopes, t.of_slopes)
        of_mask = work.hidden.words, work.hidden.walks
        return *of_rows, *t.offsets, *of_mask, work.units, work.centers, t.operands.dropout_seed

    plans, block_m = _plans(_sources(tensors)), 2 * GROUP_ROWS
    tiles = launches.query_tiles(problem, block_m) * launches.heads_of(problem)
    statistic_rows = launches.query_tiles(problem, GROUP_ROWS) * GROUP_ROWS
    _, stages_v = steps_of_dq(problem, config, 0)
    of = launch.Launch(
        kernel=split_dq.split_dq_kernel,
        grid=min(tiles, gpu.assumed_sms),
        tensors=(*launches.mapped(plans, _sources(tensors)), *beside(tensors), host.counter(tensors.out)),
        scalars=[
            *launches.of_queries(problem, tensors, _row_bytes(problem), block_m, statistic_rows),
            *launches.of_mask(problem, tensors, transposed=False),
            *dropout.scalars(problem.dropout_p),
        ],
        constants={
            "BLOCK_M": block_m,
            "BLOCK_N": GROUP_ROWS,
            "STAGES": config.num_stages,
            "STAGES_V": stages_v,
            "HEAD_DIM": problem.head_dim,
            **launches.constants_of(problem),
            "BIAS": "",
            "WRITE_DSLOPES": tensors.of_slopes is not None,
        },
        options=OPTIONS,
    )
    return Step(of, lambda t: (*_sources(t), *beside(t)), plans)
