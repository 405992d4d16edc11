"""Host code of `hopper/flash_bwd`: what its launches share, and the order in which they run.

The launches that read a mask or a bias come first (hidden.py), then one that zeroes what no other launch writes, and
the statistics of rows. Then either one launch makes all gradients and another dQ from its sums (joint_launch.py), or
one makes dK and dV and another dQ (apart_launch.py). In float32 a launch that splits operands computes the statistics
(split_launch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from warpwave.gpu import Gpu
from warpwave.kernels.hopper import host
from warpwave.kernels.hopper.flash_bwd import apart_launch, hidden, joint_launch, joint_steps, launches, split_launch
from warpwave.kernels.hopper.flash_bwd.config import (
    Config,
    config_of_bias,
    divided_tail,
    dq_columns,
    group_splits,
    scheduled_blocks,
    steps_of_dq,
)
from warpwave.kernels.hopper.flash_bwd.launches import Hidden, Step, Tensors, Workspace
from warpwave.operands import DIFFERENTIABLE, Operands
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch, tensor_maps
from warpwave.runtime.scratch import Need, maker

NAME = "hopper/flash_bwd"
NEEDS_GPU = True
GRADIENTS = DIFFERENTIABLE

Results = tuple[torch.Tensor, torch.Tensor]


def _workspace_shapes(problem: AttentionProblem, config: Config) -> list[tuple[int, ...] | None]:
    """Returns the shapes of the workspace's tensors, None for absent ones."""
    tiles, heads = launches.query_tiles(problem, config.block_m), launches.heads_of(problem)
    statistics = (heads, tiles * config.block_m)
    line = joint_steps.LINE.value
    lines = (heads * tiles * config.block_m * dq_columns(problem, config) // line, line) if config.is_joint else None
    turns = (heads, tiles) if config.is_joint else None
    of_sinks = (heads, tiles) if problem.has_sinks else None
    of_parts = split_launch.workspace_shapes(problem) if problem.dtype == "float32" else [None] * 8
    splits = group_splits(problem, config)
    of_splits: list[tuple[int, ...] | None] = [None, None]
    if splits > 1:
        lead = (problem.total_k,) if problem.packed else (problem.batch, problem.seqlen_k)
        of_splits = [(*lead, splits * problem.num_heads_kv, d) for d in (problem.head_dim, problem.head_dim_v)]
    whole, parts = divided_tail(problem, config)
    if parts > 1:
        items = parts * (scheduled_blocks(problem, config) - whole)
        of_splits = [(items, config.block_n, 1, d) for d in (problem.head_dim, problem.head_dim_v)]
    return [statistics, statistics, lines, turns, of_sinks, *of_parts, *of_splits]


# By what is in Workspace.
_DTYPES = (
    *(*(torch.float32,) * 3, torch.int32, torch.float32),
    *(*(torch.float16,) * 4, *(torch.float32,) * 6),
)


def bind(
    problem: AttentionProblem, gpu: Gpu, operands: Operands, wanted: Sequence[bool], config: Config
) -> Callable[[Operands, Results, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor | None, ...]]:
    """Prepares the gradients of one problem and layout; compiles in the first call, and in the first with a dlse. The
    gradients of a bias and of ALiBi's slopes take separate launches, whatever the config.

    Returns:
        run: `run(operands, (out, lse), dout, dlse)` returns dq, dk, dv, dbias, dslopes, dsinks; None if not wanted.
    """
    *_, wants_bias, wants_slopes, wants_sinks = wanted
    if (wants_bias and problem.bias_shape is not None) or (wants_slopes and problem.alibi_shape is not None):
        config = config_of_bias(problem, gpu)
    # Parts of float32 are in tensors of their own, whatever the strides of the operands.
    mapped = () if problem.dtype == "float32" else ("q", "k", "v")
    mappable, device = host.mappable(operands, mapped), operands.q.device
    shapes = _workspace_shapes(problem, config)
    allocate_left = [s and maker(s, dtype, device) for s, dtype in zip(shapes, _DTYPES, strict=True)]
    hides = problem.mask_shape is not None or problem.bias_shape is not None
    allocate_hidden: list[Callable[[], torch.Tensor] | None] = []  # made in the first call
    allocate_grads = [maker(tuple(t.shape), t.dtype, device) for t in operands[:3]]
    before, plain, with_dlse = _Bound(), _Bound(), _Bound()

    def run(
        operands: Operands, results: Results, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        out, lse = map(_aligned, results)
        dout, dlse = _aligned(dout.to(out.dtype)), None if dlse is None else _aligned(dlse)
        workspace = Workspace(*(f and f() for f in allocate_left))  # type: ignore[arg-type]
        dq, dk, dv = (f() for f in allocate_grads)
        tensors = Tensors(mappable(operands), out, lse, dout, dlse, workspace, dq, dk, dv)
        if hides:
            tensors = with_bias(problem, tensors, wants_bias)
            if not allocate_hidden:
                keys = launches.steps_over_keys(problem, tensors, config)[0]
                allocate_hidden[:] = [need and maker(*need, device) for need in hidden.needs(problem, config, keys)]
            workspace = workspace._replace(hidden=Hidden(*(f and f() for f in allocate_hidden)))
            tensors = tensors._replace(workspace=workspace)
            if flags := workspace.hidden.flags:
                torch._foreach_zero_(flags)
            before.run(tensors, lambda: hidden.steps(problem, tensors, config))
        if wants_slopes:
            tensors = with_slopes(problem, tensors)
        bound = plain if dlse is None else with_dlse
        bound.run(tensors, lambda: specify(problem, gpu, tensors, config))
        dsinks = None
        if wants_sinks and workspace.of_sinks is not None:
            dsinks = workspace.of_sinks.view(-1, problem.num_heads_q, workspace.of_sinks.shape[1]).sum((0, 2))
        found = (dq, dk, dv, bias_gradient(problem, tensors), slope_gradient(problem, tensors), dsinks)
        return tuple(g if want else None for g, want in zip(found, wanted, strict=True))

    return run


def with_bias(problem: AttentionProblem, tensors: Tensors, is_wanted: bool) -> Tensors:
    """Returns the tensors of a call with its bias as the launches read it and, if its gradient is wanted, with memory
    for dS. A bias whose gradient is wanted is expanded along queries and keys."""
    bias, dbias = tensors.operands.bias, None
    if bias is None:
        return tensors
    if is_wanted:
        batch, heads = bias.shape[:2]
        bias = bias.expand(batch, heads, problem.seqlen_q, problem.seqlen_k)
        dbias = host.padded_rows(bias, (problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k))
        if problem.has_band or problem.mask_shape is not None:  # no block visits hidden tiles
            dbias.zero_()
    if is_wanted or host.bias_kind(bias) == "cells":
        bias = host.mappable_bias(bias)
    return tensors._replace(operands=tensors.operands._replace(bias=bias), dbias=dbias)


def bias_gradient(problem: AttentionProblem, tensors: Tensors) -> torch.Tensor | None:
    """Returns dS summed over the axes along which the bias is broadcast; None if it is not wanted."""
    if tensors.dbias is None or problem.bias_shape is None:
        return None
    sizes = zip(problem.bias_shape, tensors.dbias.shape, strict=True)
    axes = [axis for axis, (own, all) in enumerate(sizes) if own != all]
    return (tensors.dbias.sum(axes, keepdim=True) if axes else tensors.dbias).contiguous()


def with_slopes(problem: AttentionProblem, tensors: Tensors) -> Tensors:
    """Returns the tensors of a call with memory for the gradient of ALiBi's slopes, if it has slopes."""
    if problem.alibi_shape is None:
        return tensors
    shape, workspace = (problem.batch, problem.num_heads_q, problem.seqlen_q), tensors.workspace
    if workspace.sums is None:
        workspace = workspace._replace(sums=torch.empty_like(workspace.delta))
    of_slopes = torch.zeros(shape, dtype=torch.float32, device=tensors.dq.device)
    return tensors._replace(workspace=workspace, of_slopes=of_slopes)


def slope_gradient(problem: AttentionProblem, tensors: Tensors) -> torch.Tensor | None:
    """Returns the gradient of ALiBi's slopes, of their shape; None if it is not wanted."""
    if tensors.of_slopes is None or problem.alibi_shape is None:
        return None
    return tensors.of_slopes.sum((0, 2) if len(problem.alibi_shape) == 1 else 2)


class _Bound:
    """Launches that run one after another, bound when they first run. Keeps no tensors."""

    def __init__(self) -> None:
        self._launchers: list[tuple[launch.Launcher, Callable[[Tensors], Sequence[Any]]]] | None = None

    def run(self, tensors: Tensors, steps: Callable[[], list[Step]]) -> None:
        """Launches on the tensors; `steps` returns the launches in the first call."""
        if self._launchers is None:
            self._launchers = [(_bind(step, tensors), step.given) for step in steps()]
        for launcher, given in self._launchers:
            launcher(*given(tensors))


def _bind(step: Step, tensors: Tensors) -> launch.Launcher:
    if not step.plans:
        return launch.bind(step.launch)
    sources = 1 + max(plan.source for plan in step.plans if plan is not None)
    return tensor_maps.bind(step.launch, step.plans, tuple(step.given(tensors)[:sources]))


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor at a multiple of 16 bytes, for which the launches are compiled; a copy if
    necessary."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() & 15 else tensor


def specify(problem: AttentionProblem, gpu: Gpu, tensors: Tensors, config: Config) -> list[Step]:
    """Returns the launches from tensors, which may be without memory (device "meta") if they are only compiled."""
    zeros, sums = launches.zeros(problem, tensors), launches.sums_of_splits(problem, tensors, config)
    if problem.dtype == "float32":
        return [*zeros, *split_launch.steps(problem, gpu, tensors, config), *sums]
    of = joint_launch if config.is_joint else apart_launch
    statistics = launches.statistics(problem, tensors, config)
    return [*zeros, statistics, *of.steps(problem, gpu, tensors, config), *sums]


def example(problem: AttentionProblem, config: Config, device: Any) -> tuple[Workspace, tuple[torch.Tensor, ...]]:
    """Returns a workspace and gradients to compile with."""
    shapes = _workspace_shapes(problem, config)
    of_hidden: list[Need | None] = []
    if problem.mask_shape is not None or problem.bias_shape is not None:
        of_hidden = hidden.needs(problem, config, steps_of_dq(problem, config, host.bias_bytes(problem))[0])
    workspace = Workspace(
        *(s and torch.empty(s, dtype=t, device=device) for s, t in zip(shapes, _DTYPES, strict=True)),  # type: ignore
        hidden=Hidden(*(need and torch.empty(need[0], dtype=need[1], device=device) for need in of_hidden)),
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
    return workspace, tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes_of)
