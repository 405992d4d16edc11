"""Launches kernels that Triton compiled by the CUDA driver's own call.

Triton's launcher reads every argument of a kernel at every call, about sixty Python objects with the compile-time
constants, which takes longer than the launch itself. Here the parameters are written to memory once for each stream and
set of addresses, and `cuLaunchKernelEx` (CUDA driver API, "Execution Control") gets a pointer to them. This memory is
never changed, so threads share it.

The call is public, but the list of a compiled kernel's parameters is private to Triton: all of the signature except
compile-time constants, each tensor map followed by its shape and strides, and two pointers to scratch memory at the
end. Only Triton versions whose source was read are launched this way; others launch through Triton
(warpwave.runtime.launch).
"""

from __future__ import annotations

import ctypes
import operator
import struct
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

from warpwave.runtime.parameters import flat
from warpwave.runtime.triton_or_stub import triton

READ_VERSIONS = ((3, 6), (3, 7), (3, 8), (3, 9))
MAX_PREPARED = 1024  # prepared launches of one plan; a model needs one or two for each layer

# (config, function, parameters, None) -> 0, or an error: addresses of a `_Config`, of the loaded kernel, and of an
# array of the addresses of its parameters.
Start = Callable[[int, int, int, None], int]
Key = tuple[int, ...]  # the stream, then addresses
Prepared = tuple[int, int, Any]  # the addresses for `Start`, and the memory that they point to

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID: may begin while the previous launch ends
_FORMATS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d"}
_MAP_OFFSET = 128  # of the map in Triton's object for it; both take 128 bytes and are aligned to 128


class TensorMap(Protocol):
    """What a tensor map states about a tensor.

    Attributes:
        source: number of the launch's argument that it describes.
        shape, strides: of at most five axes, strides in elements; nothing outside `shape` is read or written.
        block: what one copy moves.
    """

    @property
    def source(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def block(self) -> tuple[int, ...]: ...
    def descriptor(self, tensor: Any) -> Any:
        """Returns Triton's own object, for compiling and for its public call."""


# (map, address) -> Triton's object for the tensor map of the tensor at that address.
Encode = Callable[[TensorMap, int], Any]


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


_CONFIG = "7I4xQQI4x"  # `_Config` as the struct module packs it


@cache
def library() -> Any:
    """Returns the driver's library, or None. Its calls release Python's lock, because a launch waits if a thousand
    others are queued."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


@cache
def start_call() -> Start | None:
    """Returns `cuLaunchKernelEx`, or None if the driver lacks it."""
    call = getattr(library(), "cuLaunchKernelEx", None)
    if call is not None:
        call.argtypes = (ctypes.c_void_p,) * 4
        call.restype = ctypes.c_int
    return call


class _Thread(threading.local):
    attached = False


_thread = _Thread()


def attach(index: int) -> None:
    """Gives this thread the device's context if it has none, once. A thread that has not called CUDA has none: torch
    sets it at its first launch, and allocations may come from torch's cache."""
    if _thread.attached:
        return
    _thread.attached = True
    cuda, context, device = library(), ctypes.c_void_p(), ctypes.c_int()
    if cuda is None or cuda.cuCtxGetCurrent(ctypes.byref(context)) or context.value is not None:
        return
    found = cuda.cuDeviceGet(ctypes.byref(device), index)
    if not (found or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)):
        cuda.cuCtxSetCurrent(context)


class Layout:
    """The memory layout of one compiled kernel's parameters, which its launches on all sizes share.

    Each parameter has a slot of 8 bytes. The slots of addresses and tensor maps stay empty, because addresses are known
    only at a launch.

    Attributes:
        function: the loaded kernel, as `Start` takes it.
        kinds: for each parameter, Triton's own included: a number's format in the struct module, "" for an address.
        pointers: the parameters that are addresses, and the place of each in the keys.
        maps: the parameters that are tensor maps, the place of the tensor's address, and the encoder.
    """

    def __init__(self, function: int, threads: int, smem_bytes: int, ahead: bool) -> None:
        """Makes a layout without parameters.

        Args:
            function: the loaded kernel.
            threads: of a block.
            smem_bytes: shared memory of a block.
            ahead: whether it may begin before the previous launch in its stream has ended.
        """
        self.function, self.threads, self.smem_bytes = function, threads, smem_bytes
        self.attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION) if ahead else None
        if self.attribute is not None:
            self.attribute.value[0] = 1
        self.pointers: list[tuple[int, int]] = []  # (parameter, place of its address in the keys)
        self.maps: list[tuple[int, int, Encode]] = []
        self.kinds: list[str] = []
        self.numbers: list[int] = []  # indices of the values that are numbers

    def add_pointer(self, place: int) -> None:
        """Adds a parameter that is an address."""
        self.pointers.append((len(self.kinds), place))
        self.kinds.append("")

    def add_number(self, value: int, kind: str) -> None:
        """Adds the number that is `values[value]` of `Launches`."""
        self.numbers.append(value)
        self.kinds.append(kind)

    def add_map(self, plan: TensorMap, place: int, encode: Encode) -> None:
        """Adds a tensor map, which its shape and strides follow as numbers."""
        assert not self.numbers, "a kernel's tensor maps come before its numbers"
        self.maps.append((len(self.kinds), place, encode))
        self.kinds += ["", *"i" * len(plan.shape), *"q" * len(plan.strides)]

    def done(self) -> Layout:
        """Ends the list with Triton's two pointers to scratch memory, which these kernels do not use."""
        self.kinds += "QQ"
        self.numbers_of = operator.itemgetter(*self.numbers, -1, -1)
        self.packed = struct.Struct("<" + "".join(f"{k}{8 - struct.calcsize(k)}x" if k else "8x" for k in self.kinds))
        places = [*(place for _, place in self.pointers), *(place for _, place, _ in self.maps)]
        # A prepared launch: its config, its key, the address of each parameter, and the slots.
        config, key = struct.calcsize("<" + _CONFIG), 8 * (1 + max(places, default=0))
        self.addresses_at, self.slots_at = config + key, config + key + 8 * len(self.kinds)
        self.key_at = config
        self.of_launch = struct.Struct(f"<{_CONFIG}{(self.slots_at - config) // 8}Q{self.packed.size}s")
        self.memory = ctypes.c_char * self.of_launch.size
        return self


class Launches:
    """The launches of one compiled kernel on one grid. Each is prepared when its addresses are first used.

    Attributes:
        function: the loaded kernel, as `Start` takes it.
        prepared: stream and addresses -> prepared launch.
    """

    def __init__(self, layout: Layout, index: int, grid: int, values: Sequence[Any], maps: Sequence[TensorMap]) -> None:
        """Packs the numbers, which never change.

        Args:
            layout: the kernel's.
            index: of the device.
            grid: number of thread blocks.
            values: the values of the scalars, one for each `Number` of the layout.
            maps: the tensor maps, in order.
        """
        self.function = layout.function
        self.prepared: dict[Key, Prepared] = {}
        self._layout, self._index, self._grid, self._maps = layout, index, grid, maps
        shapes: list[int] = []
        for plan in maps:
            shapes += plan.shape
            shapes += plan.strides
        self._packed = layout.packed.pack(*shapes, *layout.numbers_of((*values, 0)))  # 0 for Triton's pointers

    def prepare(self, key: Key) -> Prepared:
        """Writes a launch on the key's stream and addresses to memory."""
        attach(self._index)  # the driver needs a context to encode maps
        layout = self._layout
        memory = layout.memory()
        first = ctypes.addressof(memory)
        slots, addresses = first + layout.slots_at, first + layout.key_at
        at = list(range(slots, slots + 8 * len(layout.kinds), 8))
        for i, place in layout.pointers:
            at[i] = addresses + 8 * place
        kept: list[Any] = [memory]
        for (i, place, encode), plan in zip(layout.maps, self._maps, strict=True):
            found = encode(plan, key[place])
            at[i] = id(found) + _MAP_OFFSET
            kept.append(found)
        attribute = layout.attribute
        attributes = (0, 0) if attribute is None else (ctypes.addressof(attribute), 1)
        layout.of_launch.pack_into(
            memory, 0, self._grid, 1, 1, layout.threads, 1, 1, layout.smem_bytes, key[0], *attributes, *key, *at,
            self._packed,
        )  # fmt: skip
        if len(self.prepared) >= MAX_PREPARED:
            self.prepared.clear()
        prepared = self.prepared[key] = first, first + layout.addresses_at, kept
        return prepared


def layout(compiled: Any, run: Any, values: Sequence[Any]) -> Layout | None:
    """Returns a compiled kernel's layout; None if this version of Triton is not known, or does more for this kernel
    than launch it.

    Args:
        compiled: Triton's compiled kernel, its module loaded.
        run: its `run`.
        values: the value of each parameter of its signature: a `Number`, an `Address`, or a `(TensorMap, Address)`. The
            values of compile-time constants and absent pointers are not read.
    """
    metadata, signature = compiled.metadata, list(flat(compiled.src.signature.values()))
    if not passes_on(run) or getattr(metadata, "num_ctas", 1) != 1 or run.launch_cooperative_grid:
        return None
    # No SM of NVIDIA has more than 228 KiB of shared memory; Triton handles whatever claims more.
    if metadata.shared > 228 * 1024 or len(signature) != len(values):
        return None
    made = Layout(compiled.function, metadata.num_warps * 32, metadata.shared, bool(run.launch_pdl))
    encoders = iter(getattr(metadata, "tensordesc_meta", None) or ())
    for kind, value in zip(signature, values, strict=True):
        if kind == "constexpr":
            continue
        if isinstance(value, Address):
            made.add_pointer(value.place)
        elif isinstance(kind, str) and kind.startswith("tensordesc"):
            plan, address = value
            if (encode := _encoder(next(encoders, None))) is None:
                return None
            made.add_map(plan, address.place, encode)
        elif kind in _FORMATS:
            made.add_number(value.place, _FORMATS[kind])
        else:
            return None
    return made.done()


class Address:
    """The place of an address in the launches' keys."""

    def __init__(self, place: int) -> None:
        self.place = place


class Number:
    """The place of a number in the values of a launch."""

    def __init__(self, place: int) -> None:
        self.place = place


def passes_on(run: Any) -> bool:
    """Returns whether `run` only launches, in a known version of Triton: it allocates no memory and adds no sanitizer's
    arguments."""
    import torch

    wants = [getattr(run, name, True) for name in ("global_scratch_size", "profile_scratch_size")]
    wants.append(getattr(run, "gsan_enabled", False))
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version in READ_VERSIONS and torch.version.hip is None and start_call() is not None and not any(wants)


def _encoder(meta: Any) -> Encode | None:
    """Returns the encoder of one kind of tensor maps; None if this version of Triton does not expose it."""
    utils = triton.runtime.driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor_tiled", None) or getattr(utils, "fill_tma_descriptor", None)
    if fill is None or not meta or meta.get("fp4_padded"):
        return None
    from triton.backends.nvidia import driver

    holds_map = getattr(driver, "PyCUtensorMap", None)
    if holds_map is None or holds_map.__basicsize__ != 2 * _MAP_OFFSET:
        return None
    swizzle, size, block = meta["swizzle"], meta["elem_size"], meta["block_size"]
    dtype = driver.TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    return lambda plan, address: fill(address, swizzle, size, dtype, block, plan.shape, plan.strides, 0)
