"""Host code of `hopper/flash_bwd`: what its launches share, and the order in which they run.

The statistics of rows come first. Then either one launch makes all gradients and another dQ from its sums
(joint_launch.py), or one makes dK and dV and another dQ (apart_launch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from warpwave.gpu import Gpu
from warpwave.kernels.hopper import host
from warpwave.kernels.hopper.flash_bwd import apart_launch, joint, joint_launch, launches
from warpwave.kernels.hopper.flash_bwd.config import (
    Config,
    configs,
    default,
    has_hidden_rows,
    smem_bytes,
    why_not,
    width,
)
from warpwave.kernels.hopper.flash_bwd.costs import cost
from warpwave.kernels.hopper.flash_bwd.launches import Step, Tensors, Workspace
from warpwave.kernels.prepass import mask_bits
from warpwave.problem import AttentionProblem, Operands
from warpwave.runtime import launch, tensor_maps
from warpwave.runtime.scratch import maker

__all__ = [
    "GRADIENTS",
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

Results = tuple[torch.Tensor, torch.Tensor]


def _workspace_shapes(problem: AttentionProblem, config: Config) -> list[tuple[int, ...] | None]:
    """Returns the shapes of the workspace's tensors, None for those that there are not."""
    tiles, heads = launches.query_tiles(problem, config.block_m), launches.heads_of(problem)
    statistics = (heads, tiles * config.block_m)
    line = joint.LINE.value
    lines = (heads * tiles * config.block_m * width(problem) // line, line) if config.is_joint else None
    words: list[tuple[int, ...] | None] = [None, None]
    if problem.mask_shape is not None:
        words = [(mask_bits.packed(problem, transposed).size,) for transposed in (False, True)]
    return [statistics, statistics, lines, (heads, tiles) if problem.has_sinks else None, *words]


# By what is in Workspace.
_DTYPES = (*(torch.float32,) * 4, *(torch.int32,) * 2)


def bind(
    problem: AttentionProblem, gpu: Gpu, operands: Operands, wanted: Sequence[bool], config: Config
) -> Callable[[Operands, Results, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor | None, ...]]:
    """Prepares the gradients of one problem and layout; compiles in the first call, and in the first with a dlse.

    Returns:
        run: `run(operands, (out, lse), dout, dlse)` gives dq, dk, dv, dbias, dslopes, dsinks; None where not wanted.
    """
    mappable, device = host.mappable(problem, operands), operands.q.device
    shapes = _workspace_shapes(problem, config)
    allocate_left = [s and maker(s, dtype, device) for s, dtype in zip(shapes, _DTYPES, strict=True)]
    zeroed = has_hidden_rows(problem)
    allocate_grads = [maker(t.shape, t.dtype, t.device) for t in operands[:3]]
    masks, plain, with_dlse = _Bound(), _Bound(), _Bound()

    def run(
        operands: Operands, results: Results, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        out, lse = map(_aligned, results)
        dout, dlse = _aligned(dout.to(out.dtype)), None if dlse is None else _aligned(dlse)
        workspace = Workspace(*(f and f() for f in allocate_left))  # type: ignore[arg-type]
        dq, dk, dv = (f() for f in allocate_grads)
        tensors = Tensors(mappable(operands), out, lse, dout, dlse, workspace, dq, dk, dv)
        if zeroed:
            torch._foreach_zero_([dq, dk, dv])
        if problem.mask_shape is not None:
            masks.run(tensors, lambda: launches.masks(problem, tensors))
            tensors = launches.without_unseen(problem, tensors)
        bound = plain if dlse is None else with_dlse
        bound.run(tensors, lambda: specify(problem, gpu, tensors, config))
        dsinks = None
        if wanted[5] and workspace.of_sinks is not None:
            dsinks = workspace.of_sinks.view(-1, problem.num_heads_q, workspace.of_sinks.shape[1]).sum((0, 2))
        found = (dq, dk, dv, None, None, dsinks)
        return tuple(g if want else None for g, want in zip(found, wanted, strict=True))

    return run


class _Bound:
    """Launches one behind another, bound when they first run. Keeps no tensors."""

    def __init__(self) -> None:
        self._launchers: list[tuple[launch.Launcher, Callable[[Tensors], Sequence[Any]]]] | None = None

    def run(self, tensors: Tensors, steps: Callable[[], list[Step]]) -> None:
        """Launches on the tensors; `steps` says what, in the first call."""
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
    """Returns a contiguous tensor at a multiple of 16 bytes, which the launches are compiled for: a copy if need be."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() & 15 else tensor


def specify(problem: AttentionProblem, gpu: Gpu, tensors: Tensors, config: Config) -> list[Step]:
    """Returns the launches, from tensors that may be without memory (device "meta") when only to be compiled."""
    of = joint_launch if config.is_joint else apart_launch
    return [launches.statistics(problem, tensors, config), *of.steps(problem, gpu, tensors, config)]


def example(problem: AttentionProblem, config: Config, device: Any) -> tuple[Workspace, tuple[torch.Tensor, ...]]:
    """Returns a workspace and gradients to compile with."""
    shapes = _workspace_shapes(problem, config)
    workspace = Workspace(
        *(s and torch.empty(s, dtype=t, device=device) for s, t in zip(shapes, _DTYPES, strict=True))  # type: ignore
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
