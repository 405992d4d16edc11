"""Tensor maps of tensors, for kernels that copy by TMA.

A tensor map tells the copy engine where a tensor is and what a copy moves (CUDA programming guide, "Tensor Memory
Access"). Triton's own call path encodes the maps of every call anew, 80 to 100 us for four tensors; a bound launcher
(warpwave.runtime.launch) encodes each map once per address.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from warpwave.runtime import launch
from warpwave.runtime.counters import counters_of
from warpwave.runtime.gluon_or_stub import TensorDescriptor, gl

GLUON_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float8_e4m3fn: "float8e4nv",
    torch.float8_e5m2: "float8e5",
    torch.int8: "int8",
}


class MapPlan(NamedTuple):
    """The layout of one tensor map.

    Args:
        source: number of the launcher's argument that the map describes.
        shape: sizes; (batch, heads, rows, columns) of tensors in Gluon kernels, with an axis of heads before the
            columns if several share a tile; (batch or page, rows, heads, columns) in `split_kv`. A copy reads zeros
            past them and writes nothing there.
        strides: of the same axes, in elements.
        block: the elements that one copy moves.
        has_layout: whether the descriptor states the layout of shared memory, as Gluon kernels require; for others
            Triton's compiler chooses it.
        is_swizzled: whether a Gluon kernel's shared memory is swizzled as wgmma reads it; if not, rows lie as they are.
    """

    source: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    has_layout: bool = True
    is_swizzled: bool = True

    def descriptor(self, tensor: torch.Tensor) -> Any:
        """Returns Triton's own object, for compiling, the interpreter and the public call."""
        described = (tensor, list(self.shape), list(self.strides), list(self.block))
        if not self.has_layout:
            from triton.tools.tensor_descriptor import TensorDescriptor as WithoutLayout

            return WithoutLayout(*described)
        layout = gl.NVMMASharedLayout.get_default_for(list(self.block), getattr(gl, GLUON_NAMES[tensor.dtype]))
        if not self.is_swizzled:
            layout = gl.NVMMASharedLayout(0, 8 * tensor.element_size(), len(self.block))
        return TensorDescriptor(*described, layout)


def has_map(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor map can describe a tensor: rows of stride 1, other strides and the base 16-byte
    multiples."""
    *outer, inner = tensor.stride()
    size = tensor.element_size()
    if (inner != 1 and tensor.shape[-1] != 1) or tensor.data_ptr() % 16:
        return False
    for stride in outer:  # noqa: SIM110 - a generator takes twice as long
        if stride * size % 16 or not 0 < stride * size < 2**40:
            return False
    return True


def bind(
    spec: launch.Launch, maps: Sequence[MapPlan | None], sources: Sequence[torch.Tensor], has_counter: bool = True
) -> launch.Launcher:
    """Binds a launch whose first `len(maps)` tensors are descriptors, or None where `maps` has None.

    Args:
        sources: the first arguments of the launcher, which maps describe; the spec's other tensors follow unchanged.
        has_counter: whether the last tensor is the tile counter.
    """
    return family(spec, maps, sources, has_counter).first()


def family(
    spec: launch.Launch, maps: Sequence[MapPlan | None], sources: Sequence[torch.Tensor], has_counter: bool = True
) -> launch.Family:
    """Returns the family of the launch that `bind` takes."""
    pointers = range(len(sources), len(sources) + len(spec.tensors) - len(maps) - has_counter)
    counter = (launch.COUNTER,) if has_counter else ()
    return launch.Family(spec, (*maps, *pointers, *counter), counters_of(sources[0].device) if has_counter else None)
