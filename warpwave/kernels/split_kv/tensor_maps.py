"""Tensor maps of K and V for Triton kernels that read them by TMA: what they describe.

A tensor map tells the copy engine where a tensor lies and what a copy moves (CUDA programming guide, "Tensor Memory
Access"). hopper/launcher.py has those of Gluon kernels, which also say how shared memory is laid out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from warpwave.gpu import Gpu
from warpwave.kernels.arguments import tile_widths
from warpwave.kernels.split_kv.config import Config, may_map
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch
from warpwave.runtime.tensor_maps import has_map


class Plan(NamedTuple):
    """How a tensor map sees K or V.

    Args:
        source: which of the launcher's arguments, by number.
        shape, strides: (batch or page, row, head, column), strides in elements; behind `shape` a copy finds zeros.
        block: what one copy moves, (1, rows, heads, columns).
    """

    source: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]

    def descriptor(self, tensor: torch.Tensor) -> Any:
        """Triton's own object, for compiling, the interpreter, and the public call."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(tensor, list(self.shape), list(self.strides), list(self.block))


def plans(problem: AttentionProblem, gpu: Gpu, operands: Any, config: Config) -> tuple[Plan, ...]:
    """The maps of K and V, in that order; none where the config asks for none or nothing can be mapped."""
    if not config.by_map or not may_map(problem, gpu, config) or not all(map(has_map, operands[1:3])):
        return ()
    widths = tile_widths(problem, gpu, config.block_m)
    return tuple(_plan(problem, source, operands[source], config, width) for source, width in enumerate(widths, 1))


def _plan(problem: AttentionProblem, source: int, tensor: torch.Tensor, config: Config, block_width: int) -> Plan:
    if problem.packed and not problem.page_size:
        tensor = tensor[None]
    outer, rows, heads, width = tensor.shape
    strides = tensor.stride()
    outer_stride = strides[1] if problem.packed and not problem.page_size else strides[0]  # of one, any stride will do
    block = (1, config.block_n, config.kv_heads, block_width)
    return Plan(source, (outer, rows, heads, width), (outer_stride, strides[1], strides[2], 1), block)


def bind(spec: launch.Launch, plans: Sequence[Plan]) -> launch.Launcher:
    """`launch.bind` for a launch whose last two tensors are descriptors of K and V, None where there are no plans. Its
    launcher takes the others; K is the second of them and V the third."""
    others = len(spec.tensors) - 2
    return launch.bind(spec, (*range(others), *(plans or (None, None))))
