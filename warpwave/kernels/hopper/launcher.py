"""Launches with tensor maps: each map encoded once a base address, the rest decided once a call's shape.

Triton's own call path builds a descriptor object, encodes a map and flattens shapes and strides for every argument of
every call, 80 to 100 us for four tensors. Here a plan holds what does not change, remembers the maps of base addresses
it has met, and calls the compiled launcher directly. Which function that is, and how it takes its arguments, is private
to Triton, so it is looked for behind a version check; where it is not found the public call serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from warpwave import launch
from warpwave.kernels.hopper.compat import TensorDescriptor, gl
from warpwave.kernels.triton_or_stub import triton

MAX_MAPS = 256  # sets of addresses remembered for one plan; a training step meets a few


class MapPlan(NamedTuple):
    """How one tensor map sees a tensor.

    Args:
        source: which of the launch's tensors, by number: its sources, the counter, its pointers.
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
        _counters[index] = Counters(device)
    return _counters[index]


def bind(spec: launch.Launch, maps: Sequence[MapPlan | None], sources: Sequence[torch.Tensor]) -> Callable[..., None]:
    """Compiles a launch and returns its launcher.

    Args:
        spec: the launch. Its first `len(maps)` tensors are descriptors, None where `maps` is None; its last is the
            counter.
        maps: how to make the descriptors.
        sources: the tensors that `MapPlan.source` counts.

    Returns:
        `launch(sources, pointers)`: launches on other tensors of the same dtypes, shapes and strides, on the current
        stream of their device. `pointers` are the spec's tensors between the maps and the counter.

    Raises:
        RuntimeError: the kernel is not compiled yet and a CUDA graph is being captured.
        UnsupportedProblem: the compiled kernel needs more shared memory than the GPU has.
    """
    kernel, grid, _, scalars, constants, options = spec
    device = sources[0].device
    index = device.index
    compiled, run = launch.loaded(spec, device)
    with torch.cuda.device(device):
        of_device = counters(device)
    present = [(i, plan) for i, plan in enumerate(maps) if plan is not None]
    current_stream, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    capturing = torch.cuda.is_current_stream_capturing
    enter_hook = triton.knobs.runtime.launch_enter_hook
    direct = direct_of(compiled, run)

    def public(sources: Sequence[torch.Tensor], pointers: Sequence[torch.Tensor | None]) -> None:
        with torch.cuda.device(index):
            tensors: list[Any] = [*sources, None, *pointers]
            descriptors = [None if plan is None else plan.descriptor(tensors[plan.source]) for plan in maps]
            counter = of_device.get(current_stream(index))
            kernel[(grid,)](*descriptors, *pointers, counter, *scalars, **constants, **options)

    if direct is None:
        return public

    encode, start = direct
    encoders = [(plan, encode[j]) for j, (_, plan) in enumerate(present)]
    known: dict[tuple[int | None, ...], tuple[Any, ...]] = {}
    rest = (*scalars, *constants.values())
    of_stream = of_device.of_stream

    def flattened(addresses: tuple[Any, ...]) -> tuple[Any, ...]:
        """All arguments at these addresses as the launcher takes them: of a map itself, its shape and strides, None
        where there is none; then the pointers, the counter, and what never changes."""
        arguments: list[Any] = []
        remaining = iter(encoders)
        for plan in maps:
            if plan is None:
                arguments.append(None)
            else:
                plan, encode_map = next(remaining)
                arguments += (encode_map(addresses[plan.source], plan), *plan.shape, *plan.strides)
        if len(known) >= MAX_MAPS:
            known.clear()
        found = known[addresses] = (*arguments, *addresses[5:], addresses[4], *rest)
        return found

    def fast(sources: Sequence[torch.Tensor], pointers: Sequence[torch.Tensor | None]) -> None:
        if current_device() != index or enter_hook.calls:
            # Another device is current, or a profiler listens to launches: the public call path serves both.
            return public(sources, pointers)
        stream = current_stream(index)
        counter = of_stream.get(stream)
        if counter is None or capturing():
            counter = of_device.get(stream)
        q, k, v, out = sources
        others = [None if t is None else t.data_ptr() for t in pointers]
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), counter.data_ptr(), *others)
        start(grid, stream, known.get(addresses) or flattened(addresses))

    return fast


def direct_of(compiled: Any, run: Any) -> tuple[list[Callable[[int, Any], Any]], launch.Start] | None:
    """How to encode each map, from an address and a plan's shape and strides, and how to start the kernel with
    flattened arguments; None where this Triton hides it."""
    inner = getattr(run, "launch", None)
    metas = getattr(compiled.metadata, "tensordesc_meta", None)
    if not launch.only_passes_on(run) or inner is None or not metas or None in metas:
        return None
    closure = {
        name: cell.cell_contents
        for name, cell in zip(
            getattr(getattr(inner, "__code__", None), "co_freevars", ()),
            getattr(inner, "__closure__", None) or (),
            strict=True,
        )
    }
    launcher = closure.get("launcher")
    utils = triton.runtime.driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor_tiled", None) or getattr(utils, "fill_tma_descriptor", None)
    if launcher is None or fill is None:
        return None
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    def encoder(meta: Any) -> Callable[[int, Any], Any]:
        swizzle, size, block = meta["swizzle"], meta["elem_size"], meta["block_size"]
        dtype = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
        return lambda address, plan: fill(address, swizzle, size, dtype, block, plan.shape, plan.strides, 0)

    return [encoder(meta) for meta in metas], launch.starter(run, launcher, compiled.function, compiled.packed_metadata)
