"""Tensor maps of K and V for Triton kernels that read them by TMA: what they describe, and launches that remember them.

A tensor map tells the copy engine where a tensor lies and what a copy moves (CUDA programming guide, "Tensor Memory
Access"). Triton encodes one for every descriptor of every call, in Python; a launcher bound here encodes it once for
each address that it meets, as hopper/launcher.py does for Gluon kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from warpwave import launch
from warpwave.hardware.gpu import Gpu
from warpwave.kernels.arguments import padded
from warpwave.kernels.hopper.launcher import MAX_MAPS, direct_of, has_map
from warpwave.kernels.split_kv_configs import Config, may_map
from warpwave.kernels.triton_or_stub import INTERPRETED, triton
from warpwave.problem import AttentionProblem


class Plan(NamedTuple):
    """How a tensor map sees K or V.

    Args:
        shape, strides: (batch or page, head, row, column), strides in elements; behind `shape` a copy finds zeros.
        block: what one copy moves, (1, 1, rows, columns).
    """

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
    return tuple(_plan(problem, tensor, config) for tensor in operands[1:3])


def _plan(problem: AttentionProblem, tensor: torch.Tensor, config: Config) -> Plan:
    if problem.packed and not problem.page_size:
        tensor = tensor[None]
    outer, rows, heads, width = tensor.shape
    strides = tensor.stride()
    outer_stride = strides[1] if problem.packed and not problem.page_size else strides[0]  # of one, any stride will do
    block = (1, 1, config.block_n, padded(width))
    return Plan((outer, heads, rows, width), (outer_stride, strides[2], strides[1], 1), block)


def bind(spec: launch.Launch, plans: Sequence[Plan]) -> Callable[..., None]:
    """`launch.bind` for a launch whose last tensors are descriptors of K and V, one for each plan.

    Returns:
        `launch(*tensors)`: launches on other tensors of the same dtypes, shapes, strides and alignment, given without
        the descriptors; K is the second of them and V the third.

    Raises:
        RuntimeError: the kernel is not compiled yet and a CUDA graph is being captured.
        UnsupportedProblem: the compiled kernel needs more shared memory than the GPU has.
    """
    if not plans:
        return _without_maps(launch.bind(spec))
    kernel, grid, tensors, scalars, constants, options = spec

    def public(*tensors: torch.Tensor | None) -> None:
        maps = [plan.descriptor(tensor) for plan, tensor in zip(plans, tensors[1:3], strict=True)]  # type: ignore[arg-type]
        kernel[(grid,)](*tensors, *maps, *scalars, **constants, **options)

    if INTERPRETED:
        return public
    device = tensors[1].device  # type: ignore[union-attr]
    index = device.index
    direct = direct_of(*launch.loaded(spec, device))

    def on_device(*tensors: torch.Tensor | None) -> None:
        with torch.cuda.device(index):
            public(*tensors)

    if direct is None:
        return on_device

    encoders, start = direct
    rest = (*scalars, *constants.values())
    current_stream, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    enter_hook = triton.knobs.runtime.launch_enter_hook
    known: dict[tuple[int, int], tuple[Any, ...]] = {}

    def encoded(addresses: tuple[int, int]) -> tuple[Any, ...]:
        """What the launcher takes behind the pointers: each map, its shape and strides, then what never changes."""
        flat: list[Any] = []
        for address, plan, encode in zip(addresses, plans, encoders, strict=True):
            flat += (encode(address, plan), *plan.shape, *plan.strides)
        if len(known) >= MAX_MAPS:
            known.clear()
        found = known[addresses] = (*flat, *rest)
        return found

    def fast(*tensors: torch.Tensor | None) -> None:
        if current_device() != index or enter_hook.calls:
            # Another device is current, or a profiler listens to launches: the public call path serves both.
            return on_device(*tensors)
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        addresses = (pointers[1], pointers[2])
        behind = known.get(addresses) or encoded(addresses)  # type: ignore[arg-type]
        start(grid, current_stream(index), (*pointers, *behind))

    return fast


def _without_maps(started: Callable[..., None]) -> Callable[..., None]:
    return lambda *tensors: started(*tensors, None, None)
