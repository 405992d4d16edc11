"""What launches of Hopper's kernels share: how tensor maps see tensors, and the counters by which blocks draw tiles.

A tensor map tells the copy engine where a tensor lies and what a copy moves (CUDA programming guide, "Tensor Memory
Access"). Triton's own call path encodes those of every call anew, 80 to 100 us for four tensors; a bound launcher
(warpwave.runtime.launch) encodes each once for an address.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from warpwave.runtime import launch
from warpwave.runtime.gluon_or_stub import TensorDescriptor, gl


class MapPlan(NamedTuple):
    """How one tensor map sees a tensor.

    Args:
        source: which of the launcher's arguments, by number: its sources, then its pointers.
        shape, strides: (batch, heads, rows, columns), strides in elements; nothing outside `shape` is read or written.
        block: what one copy moves, (1, 1, rows, columns).
    """

    source: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]

    def descriptor(self, tensor: torch.Tensor) -> Any:
        """Triton's own object, for compiling and for the public call."""
        dtype = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[tensor.dtype]
        layout = gl.NVMMASharedLayout.get_default_for(list(self.block), dtype)
        return TensorDescriptor(tensor, list(self.shape), list(self.strides), list(self.block), layout)


def has_map(tensor: torch.Tensor) -> bool:
    """Whether a tensor map can describe a tensor: rows of stride 1, other strides and the base 16-byte multiples."""
    *outer, inner = tensor.stride()
    size = tensor.element_size()
    return (
        (inner == 1 or tensor.shape[-1] == 1)
        and tensor.data_ptr() % 16 == 0
        and all(stride * size % 16 == 0 and 0 < stride * size < 2**40 for stride in outer)
    )


class Counters:
    """Tile counters, zero between launches: one a stream, and one for each launch that a CUDA graph captures.

    A graph may be replayed on any stream beside any other work, so its launches share a counter with nobody.
    """

    CAPTURED = 4096

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.of_stream: dict[int, torch.Tensor] = {}
        self.for_graphs = torch.zeros(self.CAPTURED, dtype=torch.int32, device=device)
        self.taken = 0
        torch.cuda.current_stream(device).synchronize()  # zero before any other stream draws

    def get(self, stream: int) -> torch.Tensor:
        """The counter for a launch on this stream."""
        if torch.cuda.is_current_stream_capturing():
            if self.taken < self.CAPTURED:
                self.taken += 1
                return self.for_graphs[self.taken - 1 : self.taken]
            return torch.zeros(1, dtype=torch.int32, device=self.device)  # zeroed by the graph itself, at each replay
        counter = self.of_stream.get(stream)
        if counter is None:
            counter = self.of_stream[stream] = torch.zeros(1, dtype=torch.int32, device=self.device)
        return counter


_counters: dict[int, Counters] = {}


def counters(device: torch.device) -> Counters:
    """The device's tile counters, made on first use."""
    index = device.index
    if index not in _counters:
        with torch.cuda.device(device):
            _counters[index] = Counters(device)
    return _counters[index]


def bind(spec: launch.Launch, maps: Sequence[MapPlan | None], sources: Sequence[torch.Tensor]) -> launch.Launcher:
    """`launch.bind` for a launch whose first `len(maps)` tensors are descriptors, None where `maps` is, and whose last
    is the counter.

    Args:
        sources: the first arguments of the launcher, for maps to describe; the spec's other tensors follow as they are.
    """
    pointers = range(len(sources), len(sources) + len(spec.tensors) - len(maps) - 1)
    return launch.bind(spec, (*maps, *pointers, launch.COUNTER), counters(sources[0].device))
