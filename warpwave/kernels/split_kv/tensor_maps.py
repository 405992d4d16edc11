"""The tensor maps of K and V for `split_kv`'s portable kernel (runtime/tensor_maps.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from warpwave.gpu import Gpu
from warpwave.kernels.arguments import tile_widths
from warpwave.kernels.split_kv.config import Config, may_map
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch
from warpwave.runtime.tensor_maps import MapPlan, has_map


def plans(problem: AttentionProblem, gpu: Gpu, operands: Any, config: Config) -> tuple[MapPlan, ...]:
    """Returns the maps of K and V, in that order; none if the config uses none or nothing can be mapped."""
    if not config.by_map or not may_map(problem, gpu, config) or not all(map(has_map, operands[1:3])):
        return ()
    widths = tile_widths(problem, gpu, config.block_m)
    return tuple(_plan(problem, source, operands[source], config, width) for source, width in enumerate(widths, 1))


def _plan(problem: AttentionProblem, source: int, tensor: torch.Tensor, config: Config, block_width: int) -> MapPlan:
    if problem.packed and not problem.page_size:
        tensor = tensor[None]
    outer, rows, heads, width = tensor.shape
    strides = tensor.stride()
    outer_stride = strides[1] if problem.packed and not problem.page_size else strides[0]  # any stride if the size is 1
    block = (1, config.block_n, 1, block_width)
    return MapPlan(source, (outer, rows, heads, width), (outer_stride, strides[1], strides[2], 1), block, False)


def family(spec: launch.Launch, plans: Sequence[MapPlan]) -> launch.Family:
    """Returns the family of a launch whose first two tensors are descriptors of K and V; without plans they are
    None. Its launchers take the other tensors; K is the second of them and V the third."""
    others = len(spec.tensors) - 2
    return launch.Family(spec, (*(plans or (None, None)), *range(others)))
