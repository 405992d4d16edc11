"""Bound launchers: compile a kernel once, then launch it without further decisions.

`bind` compiles a Triton kernel for the arguments of one call and returns a function that launches it again on other
tensors of the same shapes, strides and alignment. Triton's own call path binds, specializes and looks up every argument
again, which takes 10 us a call and 20 more for each tensor map. A bound launcher reads the tensors' addresses and
launches what was prepared for them (driver.py).
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from warpwave.errors import UnsupportedProblem
from warpwave.runtime import driver, parameters
from warpwave.runtime.bounded import Bounded
from warpwave.runtime.counters import Counters
from warpwave.runtime.triton_or_stub import INTERPRETED, triton

log = logging.getLogger("warpwave")

_interpreter = threading.Lock()  # Triton's interpreter keeps its program in globals: two threads crash the process
MAX_VARIANTS = 4096
_variants: Bounded[tuple[Any, ...], Variant] = Bounded(MAX_VARIANTS)
_compiling = [threading.Lock() for _ in range(64)]  # by hash of a variant's key


class Launch(NamedTuple):
    """All properties of one kernel launch.

    Args:
        kernel: a `triton.jit` function of tensors, scalars and compile-time constants, or of tuples of these
            (parameters.py).
        grid: number of programs, at most 2^31 - 1.
        tensors: the pointer arguments, in order; None if absent, a `Mapped` if the kernel copies it by TMA.
        scalars: the run-time sizes, strides and floats, in order; None if absent.
        constants: the compile-time constants, in order, by name.
        options: Triton's compile options: num_warps, num_stages, enable_fp_fusion, maxnreg (the most registers of a
            thread) and launch_pdl (the launch begins while the preceding one runs).
    """

    kernel: Any
    grid: int
    tensors: Sequence[Any]  # of torch.Tensor, Mapped or None
    scalars: Sequence[Any]  # of int, float or None
    constants: Mapping[str, Any]
    options: Mapping[str, Any]

    def values(self) -> list[Any]:
        """Returns the value of each parameter as Triton takes it: a tensor descriptor for each `Mapped`."""
        tensors = [t.plan.descriptor(t.base) if isinstance(t, Mapped) else t for t in self.tensors]
        return parameters.in_order(self.kernel, tensors, self.scalars, self.constants)


class Mapped(NamedTuple):
    """A tensor that a kernel copies by TMA. Its descriptor takes 15 us to make and is needed only to compile."""

    plan: driver.TensorMap
    base: torch.Tensor

    def variant(self) -> tuple[Any, ...]:
        """Returns the properties for which Triton compiles again. A mapped address is always aligned."""
        return self.base.dtype, self.plan.block


def layouts(tensors: Iterable[torch.Tensor | None]) -> Iterator[Any]:
    """Yields for each tensor all that its launcher depends on."""
    return (None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15) for t in tensors)


COUNTER = "counter"
# The source of a kernel's tensor parameter: the launcher's argument of that number, a tensor map of one, the stream's
# counter, or None.
Take = int | driver.TensorMap | str | None
Launcher = Callable[..., None]
Sizes = tuple[int, Sequence[Any], Sequence[driver.TensorMap]]  # of a launch: grid, scalars, tensor maps


def bind(spec: Launch, takes: Sequence[Take] | None = None, counters: Counters | None = None) -> Launcher:
    """Compiles a launch and returns its launcher.

    Args:
        takes: the source of each of the spec's tensors; None if they are the arguments in order.
        counters: provide the `COUNTER`.

    Returns:
        `launch(*arguments)`: launches on tensors of the same dtypes, shapes, strides and 16-byte alignment, on the
        current stream of their device. Absent tensors are None; those after the last present one may be left out.

    Raises:
        RuntimeError: the kernel is not compiled yet and a CUDA graph is being captured.
        UnsupportedProblem: the compiled kernel needs more shared memory than the GPU has.
    """
    return Family(spec, takes, counters).first()


class Family:
    """Launches of one compiled kernel that differ in grid, run-time scalars, and shapes and strides of tensor maps.

    Args:
        spec, takes, counters: one of these launches, as `bind` takes it.
    """

    def __init__(self, spec: Launch, takes: Sequence[Take] | None = None, counters: Counters | None = None) -> None:
        kernel, _, tensors, scalars, self._constants, self._options = spec
        given: Sequence[Take] = range(len(tensors)) if takes is None else takes
        self._given = [take if tensor is not None else None for take, tensor in zip(given, tensors, strict=True)]
        self._maps = [place for place, take in enumerate(self._given) if isinstance(take, tuple)]
        self._kernel, self._counters = kernel, counters if COUNTER in self._given else None
        self._device = next(getattr(t, "base", t) for t in tensors if t is not None).device
        integers = [i for i, value in enumerate(scalars) if value.__class__ is int]
        # Of two indices or more, an itemgetter returns a tuple.
        self._integers = operator.itemgetter(*integers, integers[0]) if integers else lambda _: (0,)
        specialized = () if INTERPRETED else _specialized(kernel)
        self._specialized = [i for i in specialized if scalars[i].__class__ is int]
        self._spec: Launch | None = spec  # until `first`: a family keeps no tensors

    def first(self) -> Launcher:
        """Compiles the launch that the family was made from and returns its launcher. Call it once."""
        spec, self._spec = self._spec, None
        assert spec is not None
        sizes: Any = (spec.grid, spec.scalars, [self._given[place] for place in self._maps])
        self._bits = self._bits_of(spec.scalars)
        if not INTERPRETED:
            variant = self._variant = variant_of(spec, self._given, self._device)
            if variant.layout is not None:
                self._starting = self._starter()
        return self.launcher(*sizes)  # type: ignore[return-value]

    def _bits_of(self, scalars: Sequence[Any]) -> Sequence[Any]:
        """Returns the properties of the scalars for which Triton compiles again."""
        integers = self._integers(scalars)
        bits: list[Any] = []
        if max(integers) >= 2**31 or min(integers) < -(2**31):
            bits += (not -(2**31) <= value < 2**31 for value in integers)
        for i in self._specialized:
            bits += (scalars[i] == 1, scalars[i] % 16 == 0)
        return bits

    def launcher(self, grid: int, scalars: Sequence[Any], maps: Sequence[driver.TensorMap] = ()) -> Launcher | None:
        """Returns the launcher of another launch; None if Triton would compile again for its scalars.

        Args:
            maps: the launch's tensor maps, in order.
        """
        sizes = (grid, scalars, maps)
        if INTERPRETED:
            return functools.partial(self._in_interpreter, sizes)
        if self._bits_of(scalars) != self._bits:
            return None
        variant = self._variant
        if variant.layout is not None and grid > 0:
            return self._starting(driver.Launches(variant.layout, self._device.index, *sizes), sizes)
        elsewhere = functools.partial(self._elsewhere, sizes)
        if not all(take is None or isinstance(take, int) for take in self._given):
            return elsewhere
        arrange = parameters.arranger(self._kernel)(*scalars)
        return _by_run(grid, self._given, arrange, variant.compiled, variant.run, self._device.index, elsewhere)

    def _starter(self) -> Callable[[driver.Launches, Sizes], Any]:
        """Returns a function that makes launchers of prepared launches. They use Triton's public call if another device
        is current, if a profiler has a launch hook, or if the driver reports an error, for example because the thread
        has no context."""
        counters = self._counters
        make = _maker(tuple(self._variant.numbers), counters is not None)
        return make(
            self._elsewhere,
            self._device.index,
            triton.knobs.runtime.launch_enter_hook,
            torch._C._cuda_getDevice,
            torch._C._cuda_getCurrentRawStream,
            torch.cuda.is_current_stream_capturing,
            counters,
            None if counters is None else counters.of_stream,
            driver.start_call(),
        )

    def _arguments(self, sizes: Sizes, arguments: Sequence[torch.Tensor | None]) -> list[Any]:
        """Returns what the kernel takes by Triton's own calls."""
        _, scalars, maps = sizes
        given = self._given.copy()
        for place, plan in zip(self._maps, maps, strict=True):
            given[place] = plan
        tensors = [_taken(take, arguments, self._counters) for take in given]
        values = parameters.in_order(self._kernel, tensors, scalars, self._constants)
        return parameters.grouped(self._kernel, values)

    def _elsewhere(self, sizes: Sizes, *arguments: torch.Tensor | None) -> None:
        with torch.cuda.device(self._device.index):
            driver.attach(self._device.index)
            # Not `kernel[grid]`, which would compile again for integers in tuples (parameters.py).
            self._variant.compiled[(sizes[0], 1, 1)](*self._arguments(sizes, arguments))

    def _in_interpreter(self, sizes: Sizes, *arguments: torch.Tensor | None) -> None:
        with _interpreter:
            self._kernel[(sizes[0],)](*self._arguments(sizes, arguments), **self._options)

    if INTERPRETED:  # Dynamo would trace the interpreter's NumPy arithmetic, parts of which it cannot compute
        # torch.compiler.disable would import Dynamo here, which takes a second; this does so at the first launch.
        _in_interpreter = torch._disable_dynamo(_in_interpreter)


def _number(take: Take) -> int | None:
    """Returns the number of the argument that a parameter takes or describes."""
    return take if take is None or isinstance(take, int) else None if isinstance(take, str) else take.source


def _taken(take: Take, arguments: Sequence[torch.Tensor | None], counters: Counters | None) -> Any:
    """Returns a parameter's value for Triton's public call."""
    if isinstance(take, str):
        assert counters is not None
        return counters.get(torch.cuda.current_stream().cuda_stream)
    if take is None or isinstance(take, int):
        return None if take is None else arguments[take]
    return take.descriptor(arguments[take.source])


# One function is generated for each number of arguments: gathering addresses in a loop takes three times as long as
# naming them (2.5 and 0.8 us for four of eleven).
_LAUNCH = """
def make(elsewhere, index, hook, current_device, current_stream, capturing, counters, of_stream, start):
    def launcher(launches, sizes):
        prepared, prepare, function = launches.prepared, launches.prepare, launches.function

        def launch({parameters}):
            if current_device() != index or hook.calls:
                return elsewhere(sizes, {names})
            stream = current_stream(index)
            {counter}
            key = ({key},)
            config, parameters, kept = prepared.get(key) or prepare(key)
            if start(config, function, parameters, None):
                elsewhere(sizes, {names})

        return launch

    return launcher
"""
_COUNTER = """counter = of_stream.get(stream)
            if counter is None or capturing():
                counter = counters.get(stream)"""


@functools.cache
def _maker(numbers: tuple[int, ...], counted: bool) -> Callable[..., Callable[..., None]]:
    """Returns a function that makes a maker of launchers, which read the addresses of these arguments and of a counter.

    There is one for each number of arguments, not for each plan: the launchers of plans are closures.
    """
    names = [f"a{i}" for i in range(numbers[-1] + 1)]
    key = ["stream", *(f"a{i}.data_ptr()" for i in numbers), *(["counter.data_ptr()"] if counted else [])]
    source = _LAUNCH.format(
        parameters=", ".join([*names, "*absent"]),
        names=", ".join(names),
        counter=_COUNTER if counted else "",
        key=", ".join(key),
    )
    scope: dict[str, Any] = {}
    exec(source, scope)
    made: Callable[..., Callable[..., None]] = scope["make"]
    return made


def _by_run(
    grid: int,
    takes: Sequence[Take],
    arrange: Callable[..., tuple[Any, ...]],
    compiled: Any,
    run: Any,
    index: int,
    elsewhere: Launcher,
) -> Launcher:
    """Returns a launcher that calls Triton's own with pointers in place of tensors: on AMD, and for kernels that
    driver.py refuses.

    Args:
        arrange: makes the arguments from the pointers (`parameters.arranger`).
    """
    function, metadata = compiled.function, compiled.packed_metadata
    current_stream, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    hook = triton.knobs.runtime.launch_enter_hook

    def launch(*arguments: torch.Tensor | None) -> None:
        if current_device() != index or hook.calls:
            return elsewhere(*arguments)
        pointers = [None if take is None else arguments[take].data_ptr() for take in takes]  # type: ignore
        run(grid, 1, 1, current_stream(index), function, metadata, None, None, None, *arrange(*pointers))

    return launch


class Variant(NamedTuple):
    """A compiled kernel, which launches of different sizes share.

    Attributes:
        compiled: Triton's compiled kernel, its module loaded.
        run: its `run`.
        layout: of its parameters; None if Triton's own launcher starts it.
        numbers: the launcher's arguments whose addresses are read, in order.
    """

    compiled: Any
    run: Any
    layout: driver.Layout | None
    numbers: Sequence[int]


def variant_of(spec: Launch, takes: Sequence[Take], device: torch.device) -> Variant:
    """Returns the variant of a launch, compiled on first use. If another thread is compiling it, waits for that thread.

    Raises:
        RuntimeError: the kernel is not compiled yet and a CUDA graph is being captured.
        UnsupportedProblem: the compiled kernel needs more shared memory than the GPU has.
    """
    key = _key_of(spec, takes, device)
    found = _variants.get(key)
    if found is None:
        with _compiling[hash(key) % len(_compiling)]:
            found = _variants.get(key)
            if found is None:
                found = _compiled_variant(spec, takes, device)
                _variants.put(key, found)
    return found


def _compiled_variant(spec: Launch, takes: Sequence[Take], device: torch.device) -> Variant:
    compiled, run = _load(spec, device)
    numbers = sorted({n for n in map(_number, takes) if n is not None})
    # The key of a launch: its stream, the addresses of the present arguments, and the counter's.
    places = {number: driver.Address(1 + i) for i, number in enumerate(numbers)}
    tensors: list[Any] = []
    for take in takes:
        address = places.get(_number(take), driver.Address(1 + len(numbers)))  # type: ignore[arg-type]
        tensors.append((take, address) if isinstance(take, tuple) else address)
    scalars = [driver.Number(i) for i in range(len(spec.scalars))]
    values = parameters.in_order(spec.kernel, tensors, scalars, spec.constants)
    layout = driver.layout(compiled, run, values)
    return Variant(compiled, run, layout, numbers)


def _load(spec: Launch, device: torch.device) -> tuple[Any, Any]:
    with torch.cuda.device(device):
        compiled = _compile(spec)
        try:
            return compiled, compiled.run  # loads the module
        except triton.runtime.errors.OutOfResources as error:
            name = spec.kernel.__name__
            raise UnsupportedProblem(
                f"{name} with {dict(spec.options)} does not fit this GPU",
                {name: [str(error)]},
                "a config with a smaller block_m or block_n, or fewer num_stages",
            ) from None


def _key_of(spec: Launch, takes: Sequence[Take], device: torch.device) -> tuple[Any, ...]:
    """Returns the properties for which Triton compiles again, and the sources of the parameters."""
    kernel, _, tensors, scalars, constants, options = spec
    classes = [
        t if t is None else t.variant() if t.__class__ is Mapped else (t.dtype, not t.data_ptr() & 15) for t in tensors
    ]
    numbers = [not -(2**31) <= value < 2**31 for value in scalars if value.__class__ is int]
    values = [scalars[i] for i in _specialized(kernel)]
    kinds = [(value == 1, value % 16 == 0) for value in values if value.__class__ is int]
    # 1000 is more than a kernel has arguments: it distinguishes a tensor map of an argument from its address.
    sources = [take.source + 1000 if isinstance(take, tuple) else take for take in takes]
    return (kernel, device.index, *sources, *classes, *numbers, *kinds, *constants.items(), *options.items())


@functools.cache
def _specialized(kernel: Any) -> tuple[int, ...]:
    """Returns the scalars of a kernel that Triton specializes for 1 and for multiples of 16."""
    scalars = (parameter for parameter in parameters.parameters(kernel) if parameter.kind == "scalar")
    return tuple(i for i, parameter in enumerate(scalars) if parameter.specialized)


class Anywhere:
    """Stands for a tensor when a kernel is compiled for AMD, and has its type and alignment.

    For a tensor whose storage is below 2 GiB, Triton compiles offsets of 32 bits there. A variant is launched on other
    tensors too, and on pools that have grown.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.dtype = tensor, tensor.dtype

    def data_ptr(self) -> int:
        return self._tensor.data_ptr()

    def ptr_range(self) -> int:
        """Returns the number of bytes behind the address that may be used."""
        return 2**31


def _compile(spec: Launch) -> Any:
    """Returns Triton's compiled kernel for a launch, from its caches if possible."""
    kernel, options = spec.kernel, spec.options
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{kernel.__name__} is not compiled for this call yet and a CUDA graph is being captured: make the same "
            "call once before the capture to warm it up"
        )
    start = time.perf_counter()
    values = parameters.unspecialized(kernel, spec.values())
    if torch.version.hip:
        values = [Anywhere(value) if isinstance(value, torch.Tensor) else value for value in values]
    compiled = kernel.warmup(*parameters.grouped(kernel, values), **options, grid=(1,))
    log.info("compiled %s in %.2f s", kernel.__name__, time.perf_counter() - start)
    return compiled
