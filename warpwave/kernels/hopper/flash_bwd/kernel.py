"""Host code of `hopper/flash_bwd`: statistics, gradients, and dQ from its sums, one launch behind another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from warpwave.gpu import Gpu
from warpwave.kernels import arguments
from warpwave.kernels.hopper import host
from warpwave.kernels.hopper.flash_bwd import joint, rows
from warpwave.kernels.hopper.flash_bwd.config import BLOCK_N, Config, configs, default, smem_bytes, why_not, width
from warpwave.kernels.hopper.flash_bwd.costs import cost
from warpwave.problem import AttentionProblem, Operands
from warpwave.runtime import launch, tensor_maps
from warpwave.runtime.scratch import maker

__all__ = [
    "GRADIENTS",
    "IS_DETERMINISTIC",
    "NAME",
    "Config",
    "bind",
    "configs",
    "cost",
    "default",
    "smem_bytes",
    "specify",
    "why_not",
]

NAME = "hopper/flash_bwd"
NEEDS_GPU = True
GRADIENTS = ("q", "k", "v", "sinks")  # of which operands
IS_DETERMINISTIC = False  # blocks add to dQ as they come; each dK and dV is one block's

Results = tuple[torch.Tensor, torch.Tensor]


class Workspace(NamedTuple):
    """What the launches leave to one another: see rows.py."""

    lse_log2: torch.Tensor  # (batch * num_heads_q, rows)
    delta: torch.Tensor
    dq_sums: torch.Tensor  # (lines, 128)
    of_sinks: torch.Tensor | None  # (batch * num_heads_q, tiles)


def _tiles(problem: AttentionProblem, config: Config) -> int:
    """Returns the query tiles of a head, of all packed sequences together."""
    if problem.packed:
        return problem.total_q // config.block_m + problem.batch
    return -(-problem.seqlen_q // config.block_m)


def _heads(problem: AttentionProblem) -> int:
    """Returns the query heads of all items that tensors tell apart."""
    return problem.num_heads_q * (1 if problem.packed else problem.batch)


def _workspace_shapes(problem: AttentionProblem, config: Config) -> Workspace:
    tiles, heads = _tiles(problem, config), _heads(problem)
    statistics = (heads, tiles * config.block_m)
    lines = (heads * tiles * config.block_m * width(problem) // joint.LINE.value, joint.LINE.value)
    return Workspace(statistics, statistics, lines, (heads, tiles) if problem.has_sinks else None)  # type: ignore


def has_hidden_rows(problem: AttentionProblem) -> bool:
    """Returns whether a query or key may see nothing, whose gradients no block writes."""
    if problem.packed:
        return True
    band = problem.band(problem.seqlen_q, problem.seqlen_k)
    rows = problem.seqlen_q - max(0, -(band.high or 0) if band.high is not None else 0)
    hides_queries = rows < problem.seqlen_q or (
        band.low is not None and problem.seqlen_k - band.low < problem.seqlen_q
    )  # fmt: skip
    return hides_queries or band.keys_seen(problem.seqlen_q, problem.seqlen_k) < problem.seqlen_k


def bind(
    problem: AttentionProblem, gpu: Gpu, operands: Operands, wanted: Sequence[bool], config: Config
) -> Callable[[Operands, Results, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor | None, ...]]:
    """Prepares the gradients of one problem and layout; compiles in the first call, and in the first with a dlse.

    Returns:
        run: `run(operands, (out, lse), dout, dlse)` gives dq, dk, dv, dbias, dslopes, dsinks; None where not wanted.
    """
    mappable, device = host.mappable(problem, operands), operands.q.device
    shapes = _workspace_shapes(problem, config)
    floats = [None if s is None else maker(s, torch.float32, device) for s in shapes]  # type: ignore[arg-type]
    zeroed = has_hidden_rows(problem)
    make = [maker(t.shape, t.dtype, t.device) for t in operands[:3]]
    bound: dict[bool, tuple[launch.Launcher, ...]] = {}  # by whether there is a dlse

    def run(
        operands: Operands, results: Results, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        operands, out, lse = mappable(operands), _aligned(results[0]), _aligned(results[1])
        dout, dlse = _aligned(dout.to(out.dtype)), None if dlse is None else _aligned(dlse)
        workspace = Workspace(*(None if f is None else f() for f in floats))  # type: ignore[arg-type]
        dq, dk, dv = (f() for f in make)
        if zeroed:
            torch._foreach_zero_([dq, dk, dv])
        launchers = bound.get(dlse is not None)
        if launchers is None:
            of = specify(problem, gpu, operands, (out, lse), dout, dlse, config, workspace, (dq, dk, dv))
            statistics, finish = launch.bind(of.statistics), launch.bind(of.finish)
            launchers = statistics, tensor_maps.bind(of.gradients, of.plans, of.sources), finish
            bound[dlse is not None] = launchers
        statistics, attend, finish = launchers
        q, k, v, _, _, slopes, sinks, *offsets = operands
        lse_log2, delta, dq_sums, of_sinks = workspace
        statistics(out, dout, lse, dlse, sinks, *offsets, *workspace)
        attend(q, k, v, dout, lse_log2, delta, dq_sums, dk, dv, dk, dv, slopes, *offsets)
        finish(dq_sums, dq, *offsets)
        dsinks = None
        if wanted[5] and of_sinks is not None:
            dsinks = of_sinks.view(-1, problem.num_heads_q, of_sinks.shape[1]).sum((0, 2))
        found = (dq, dk, dv, None, None, dsinks)
        return tuple(g if want else None for g, want in zip(found, wanted, strict=True))

    return run


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor at a multiple of 16 bytes, which the launches are compiled for: a copy if need be."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() & 15 else tensor


class Specified(NamedTuple):
    """The three launches; what tensor maps of the second describe, and its first arguments."""

    statistics: launch.Launch
    gradients: launch.Launch
    finish: launch.Launch
    plans: list[tensor_maps.MapPlan]
    sources: tuple[torch.Tensor, ...]


def lse_shape(problem: AttentionProblem) -> tuple[int, ...]:
    """Returns the shape of the log-sum-exp."""
    if problem.packed:
        return (problem.num_heads_q, problem.total_q)
    return (problem.batch, problem.num_heads_q, problem.seqlen_q)


def specify(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: Operands,
    results: Results,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    config: Config,
    workspace: Workspace,
    grads: Sequence[torch.Tensor],
) -> Specified:
    """Returns the launches, from tensors that may be without memory (device "meta") when only to be compiled."""
    out, lse = results
    dq, dk, dv = grads
    lse_log2, delta, dq_sums, of_sinks = workspace
    sources = (*operands[:3], dout, lse_log2, delta, dq_sums, dk, dv)
    plans = _plans(problem, config, sources)
    offsets = (operands.cu_seqlens_q, operands.cu_seqlens_k)
    band = arguments.band_constants(problem)
    tiles = _tiles(problem, config)
    window = arguments.window(problem)
    sizes = [problem.seqlen_q, problem.seqlen_k, problem.total_q, problem.total_k, problem.batch, *window]
    of_rows = {"BLOCK_M": config.block_m}
    is_varlen = {"IS_VARLEN": problem.packed}
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    of_out = arguments.token_strides(problem, out)
    of_dout = arguments.token_strides(problem, dout)
    of_dlse = [0, 0, 0] if dlse is None else [*arguments.lse_strides(problem), 1]
    statistics = launch.Launch(
        kernel=rows.statistics_kernel,
        grid=_heads(problem) * tiles,
        tensors=(out, dout, lse, dlse, operands.sinks, *offsets, lse_log2, delta, dq_sums, of_sinks),
        scalars=[*of_out, *of_dout, *arguments.lse_strides(problem), *of_dlse, problem.num_heads_q, tiles, *sizes],
        constants={
            **of_rows,
            "HEAD_DIM_V": problem.head_dim_v,
            "WIDTH": width(problem),
            "WIDTH_V": arguments.padded(problem.head_dim_v),
            **band,
            "HAS_SINKS": problem.has_sinks,
            **is_varlen,
        },
        options=options,
    )
    finish = launch.Launch(
        kernel=rows.finish_dq_kernel,
        grid=_heads(problem) * tiles,
        tensors=(dq_sums, dq, *offsets),
        scalars=[
            *arguments.token_strides(problem, dq)[:3],
            problem.num_heads_q,
            tiles,
            *sizes,
            problem.softmax_scale,
        ],
        constants={**of_rows, "HEAD_DIM": problem.head_dim, "WIDTH": width(problem), **band, **is_varlen},
        options=options,
    )
    return Specified(
        statistics, _gradients(problem, gpu, operands, config, plans, sources, dk, dv), finish, plans, sources
    )


def _plans(problem: AttentionProblem, config: Config, sources: Sequence[torch.Tensor]) -> list[tensor_maps.MapPlan]:
    """Returns the tensor maps. Q and dO end with the last query that sees a key, K and V with the last key seen."""
    band = problem.band(problem.seqlen_q, problem.seqlen_k)
    queries_end = problem.seqlen_q if band.low is None else min(problem.seqlen_q, problem.seqlen_k - band.low)
    plans = []
    for source, tensor in enumerate(sources[:4]):
        of_keys = source in (1, 2)
        end = host.keys_end(problem) if of_keys else queries_end
        shape, strides = host.seen(tensor, problem.packed, end)
        block = (1, 1, BLOCK_N if of_keys else config.block_m, width(problem))
        plans.append(tensor_maps.MapPlan(source, shape, strides, block))
    for source, tensor in enumerate(sources[4:6], 4):
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        plans.append(tensor_maps.MapPlan(source, shape, strides, (1, config.block_m), is_swizzled=False))
    sums = sources[6]
    lines = config.block_m * width(problem) // 2 // joint.LINE.value
    plans.append(
        tensor_maps.MapPlan(6, tuple(sums.shape), tuple(sums.stride()), (lines, sums.shape[1]), is_swizzled=False)
    )
    for source, tensor in enumerate(sources[7:], 7):
        shape, strides = host.seen(tensor, problem.packed, host.keys_end(problem))
        plans.append(tensor_maps.MapPlan(source, shape, strides, (1, 1, joint.GROUP_KEYS.value, joint.COLUMNS.value)))
    return plans


def _gradients(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: Operands,
    config: Config,
    plans: Sequence[tensor_maps.MapPlan],
    sources: Sequence[torch.Tensor],
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> launch.Launch:
    descriptors = [launch.Mapped(plan, sources[plan.source]) for plan in plans]
    tiles_per_head = -(-problem.seqlen_k // BLOCK_N)
    tiles = tiles_per_head * problem.batch * problem.num_heads_kv
    if problem.packed:
        tiles = (problem.total_k // BLOCK_N + problem.batch) * problem.num_heads_kv
    group_size = problem.num_heads_q // problem.num_heads_kv
    # Q, dO and dQ's sums of the heads that run together fit L2.
    bytes_of_head = max(1, group_size * problem.seqlen_q * width(problem) * (2 + 2 + 4))
    scale, softcap_log2 = host.score_units(problem)
    features = arguments.feature_constants(problem)
    return launch.Launch(
        kernel=joint.joint_kernel,
        grid=min(tiles, gpu.num_sms or host.NUM_SMS),
        tensors=(
            *descriptors,
            dk,
            dv,
            operands.alibi_slopes,
            operands.cu_seqlens_q,
            operands.cu_seqlens_k,
            host.counter(sources[0]),
        ),
        scalars=[
            arguments.slope_strides(operands.alibi_slopes)[0],
            *_head_strides(problem, dk),
            *_head_strides(problem, dv),
            tiles,
            problem.num_heads_q,
            problem.num_heads_kv,
            group_size,
            problem.batch,
            tiles_per_head,
            min(problem.batch * problem.num_heads_kv, max(1, host.L2_BYTES // bytes_of_head)),
            problem.seqlen_q,
            problem.seqlen_k,
            problem.total_q,
            problem.total_k,
            *arguments.window(problem),
            _tiles(problem, config) * config.block_m,
            scale,
            softcap_log2,
            problem.softmax_scale,
        ],
        constants={
            "BLOCK_M": config.block_m,
            "BLOCK_N": BLOCK_N,
            "STAGES": config.num_stages,
            "HEAD_DIM": problem.head_dim,
            "HEAD_DIM_V": problem.head_dim_v,
            **arguments.band_constants(problem),
            "HAS_ALIBI": features["HAS_ALIBI"],
            "HAS_SOFTCAP": features["HAS_SOFTCAP"],
            "IS_VARLEN": problem.packed,
        },
        options={"num_warps": 4, "enable_fp_fusion": True},
    )


def _head_strides(problem: AttentionProblem, tensor: torch.Tensor) -> tuple[int, int, int]:
    """Returns the strides of batch, head and row."""
    batch, row, head, _ = arguments.token_strides(problem, tensor)
    return batch, head, row


def example(problem: AttentionProblem, config: Config, device: Any) -> tuple[Workspace, tuple[torch.Tensor, ...]]:
    """Returns a workspace and gradients to compile with."""
    shapes = _workspace_shapes(problem, config)
    workspace = Workspace(
        *(None if s is None else torch.empty(s, dtype=torch.float32, device=device) for s in shapes)  # type: ignore
    )
    dtype = getattr(torch, problem.dtype)
    lead = ((problem.total_q,), (problem.total_k,)) if problem.packed else (
        (problem.batch, problem.seqlen_q), (problem.batch, problem.seqlen_k)
    )  # fmt: skip
    shapes_of = (
        (*lead[0], problem.num_heads_q, problem.head_dim),
        (*lead[1], problem.num_heads_kv, problem.head_dim),
        (*lead[1], problem.num_heads_kv, problem.head_dim_v),
    )
    return workspace, tuple(torch.empty(s, dtype=dtype, device=device) for s in shapes_of)
