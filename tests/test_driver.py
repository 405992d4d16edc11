"""Launches by the CUDA driver's call: what is laid out in memory for it, read back by a driver that only notes it."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from warpwave.kernels import dropout
from warpwave.runtime import driver, launch, triton_or_stub


class Started(NamedTuple):
    """One launch, as the driver would have found it in memory."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    smem_bytes: int
    stream: int
    attributes: tuple[tuple[int, int], ...]
    function: int
    parameters: tuple[int, ...]  # addresses

    def read(self, *formats: str) -> tuple[Any, ...]:
        return tuple(
            struct.unpack(f"<{kind}", ctypes.string_at(address, struct.calcsize(kind)))[0]
            for kind, address in zip(formats, self.parameters, strict=True)
        )


class Driver:
    """Notes launches, and says no to those of a thread in `refused`. Threads in `without` have no context yet."""

    def __init__(self, num_parameters: int) -> None:
        self.num_parameters = num_parameters
        self.started: list[Started] = []
        self.read: list[tuple[Any, ...]] = []
        self.formats: tuple[str, ...] = ()
        self.refused: set[int] = set()
        self.without: set[int] = set()
        self.attached: list[int] = []

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = None if threading.get_ident() in self.without else 4096
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 10 + index
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = 100 * device.value
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.attached.append(context.value)
        self.without.discard(threading.get_ident())
        return 0

    def start(self, config: int, function: int, parameters: int, extra: None) -> int:
        if threading.get_ident() in self.refused:
            return 201
        found = driver._Config.from_address(config)
        attributes = tuple((found.attributes[i].id, found.attributes[i].value[0]) for i in range(found.num_attributes))
        addresses = (ctypes.c_void_p * self.num_parameters).from_address(parameters)
        started = Started(
            tuple(found.grid), tuple(found.block), found.smem_bytes, found.stream or 0, attributes, function,
            tuple(addresses),
        )  # fmt: skip
        self.started.append(started)
        if self.formats:
            self.read.append(started.read(*self.formats))
        return 0


class Run:
    """Stands for `compiled.run`, of a kernel that wants nothing of Triton's."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, False

    def __init__(self, **others: Any) -> None:
        self.__dict__.update(others)


class Map(NamedTuple):
    source: int
    shape: tuple[int, ...] = (2, 3)
    strides: tuple[int, ...] = (3, 1)
    block: tuple[int, ...] = (2, 3)

    def descriptor(self, tensor: Any) -> Any:
        return ("map of", tensor.data_ptr())


def compiled(signature: dict[str, str], **metadata: Any) -> Any:
    return SimpleNamespace(
        function=4096,
        packed_metadata=None,
        src=SimpleNamespace(signature=signature),
        metadata=SimpleNamespace(**{"num_warps": 4, "shared": 2048, "num_ctas": 1} | metadata),
    )


def launches_of(kernel: Any, run: Any, index: int, grid: int, values: Any) -> driver.Launches | None:
    tensors = 2
    numbers = [driver.Number(i) for i in range(len(values) - tensors)]
    layout = driver.layout(kernel, run, [*values[:tensors], *numbers])
    maps = [value[0] for value in values if isinstance(value, tuple)]
    return None if layout is None else driver.Launches(layout, index, grid, values[tensors:], maps)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver, and a Triton that is known."""
    fake = Driver(0)
    monkeypatch.setattr(driver.triton, "__version__", "3.6.0", raising=False)
    monkeypatch.setattr(driver, "start_call", lambda: fake.start)
    monkeypatch.setattr(driver, "library", lambda: fake)
    return fake


SIGNATURE = {
    "x": "*fp16",
    "y": "*fp32",
    "gone": "constexpr",
    "n": "i32",
    "far": "i64",
    "scale": "fp32",
    "B": "constexpr",
}
VALUES = [driver.Address(1), driver.Address(2), None, -7, 1 << 40, 0.125, 64]


def test_parameters_are_laid_out_as_the_signature_says(known: Driver) -> None:
    launches = launches_of(compiled(SIGNATURE), Run(), 0, 5, VALUES)
    assert launches is not None
    known.num_parameters = 7
    config, parameters, kept = launches.prepare((11, 1024, 2048))
    assert known.start(config, launches.function, parameters, None) == 0 and kept
    (started,) = known.started
    assert started[:6] == ((5, 1, 1), (128, 1, 1), 2048, 11, (), 4096)
    assert started.read("Q", "Q", "i", "q", "f", "Q", "Q") == (1024, 2048, -7, 1 << 40, 0.125, 0, 0)


def test_an_early_launch_says_so(known: Driver) -> None:
    launches = launches_of(compiled(SIGNATURE), Run(launch_pdl=True), 0, 5, VALUES)
    assert launches is not None
    known.start(*launches.prepare((0, 1, 2))[:1], launches.function, launches.prepare((0, 1, 2))[1], None)
    assert known.started[0].attributes == ((6, 1),)


def test_a_map_lies_where_triton_s_object_has_it_and_is_encoded_once(
    known: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[Any] = []

    def encoder(meta: Any) -> Any:
        def encode(plan: Any, address: int) -> bytes:
            encoded.append((meta, plan, address))
            return bytes(300)

        return encode

    monkeypatch.setattr(driver, "_encoder", encoder)
    signature = {"m": "tensordesc<fp16[2, 3]>", "x": "*fp16"}
    values = [(Map(0), driver.Address(1)), driver.Address(2)]
    launches = launches_of(compiled(signature, tensordesc_meta=["how"]), Run(), 0, 1, values)
    assert launches is not None
    found = launches.prepare((0, 64, 128))
    known.num_parameters = 8
    known.start(found[0], launches.function, found[1], None)
    held = found[2][-1]
    assert known.started[0].parameters[0] == id(held) + 128
    assert known.started[0].read("Q", "i", "i", "q", "q", "Q", "Q", "Q")[1:] == (2, 3, 3, 1, 128, 0, 0)
    assert encoded == [("how", Map(0), 64)]


@pytest.mark.parametrize(
    ("what", "run", "metadata", "version"),
    [
        ("memory to allocate", {"global_scratch_size": 64}, {}, "3.6.0"),
        ("memory for a profile", {"profile_scratch_size": 64}, {}, "3.6.0"),
        ("a sanitizer", {"gsan_enabled": True}, {}, "3.9.0"),
        ("all blocks at once", {"launch_cooperative_grid": True}, {}, "3.6.0"),
        ("clusters", {}, {"num_ctas": 2}, "3.6.0"),
        ("an unknown Triton", {}, {}, "4.0.0"),
        ("more shared memory than a launch without a word may have", {}, {"shared": 230 * 1024}, "3.9.0"),
    ],
)
def test_what_the_driver_is_not_asked(
    what: str, run: dict[str, Any], metadata: dict[str, Any], version: str, known: Driver, monkeypatch: Any
) -> None:
    monkeypatch.setattr(driver.triton, "__version__", version, raising=False)
    assert launches_of(compiled(SIGNATURE, **metadata), Run(**run), 0, 5, VALUES) is None


def test_an_unknown_type_is_left_to_triton(known: Driver) -> None:
    assert launches_of(compiled(SIGNATURE | {"n": "fp8"}), Run(), 0, 5, VALUES) is None


def test_prepared_launches_stay_bounded(known: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "MAX_PREPARED", 8)
    launches = launches_of(compiled(SIGNATURE), Run(), 0, 5, VALUES)
    assert launches is not None
    for i in range(50):
        launches.prepare((i, i, i))
    assert len(launches.prepared) <= 8, "a server may make streams without end"


class Device:
    """A device whose current stream, capture and index are what a test says."""

    def __init__(self) -> None:
        self.stream, self.capturing = 3, False
        self.index: int | None = None  # of the current one; that of tensors here
        self.hook = SimpleNamespace(calls=[])  # what listens to launches
        self.public: list[tuple[Any, ...]] = []  # what Triton's public call was given


class Counters:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.of_stream: dict[int, torch.Tensor] = {}
        self.of_graphs: list[torch.Tensor] = []

    def get(self, stream: int) -> torch.Tensor:
        made = torch.zeros(1)
        if self.device.capturing:
            self.of_graphs.append(made)
            return made
        return self.of_stream.setdefault(stream, made)


@pytest.fixture
def device(known: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Where `launch.bind` binds: tensors of the CPU, a device that is told, a kernel that is made up."""
    import contextlib

    found = Device()
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: found.index, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: found.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=found.stream))
    knobs = SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=found.hook))
    monkeypatch.setattr(launch.triton, "knobs", knobs, raising=False)
    for called_by_gluon in (dropout.load_dropout_key, dropout.dropout_of_head, dropout.dropout_numbers):
        # Under the interpreter these are objects that the key of a compiled kernel refuses.
        monkeypatch.setattr(called_by_gluon, "__triton_builtin__", True, raising=False)
    yield found


class Kernel:
    """Stands for a `triton.jit` function that specializes no argument."""

    def __init__(self, fn: Callable[..., None], arguments: int) -> None:
        self.fn, self.params = fn, (SimpleNamespace(do_not_specialize=True),) * arguments


def bound(device: Device, monkeypatch: Any, takes: Any, tensors: Any, kinds: list[str], counters: Any = None) -> Any:
    """A launcher of a kernel with these tensors, the number 7, and a constant."""

    class Compiled(SimpleNamespace):
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args: device.public.append(args)

    scope: dict[str, Any] = {"tl": triton_or_stub.tl}
    exec(f"def kernel({', '.join(f't{i}_ptr' for i in range(len(tensors)))}, n, B: tl.constexpr): ...", scope)
    kernel = Kernel(scope["kernel"], len(tensors) + 2)
    signature = {**{f"t{i}": kind for i, kind in enumerate(kinds)}, "n": "i32", "B": "constexpr"}
    monkeypatch.setattr(launch, "_load", lambda spec, device: (Compiled(**vars(compiled(signature))), Run()))
    spec = launch.Launch(kernel, 4, tensors, [7], {"B": 1}, {})
    return launch.bind(spec, takes, counters)


def test_a_launcher_passes_addresses_on(device: Device, known: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, z = (torch.zeros(4) for _ in range(3))
    start = bound(device, monkeypatch, None, (x, None, y), ["*fp32", "constexpr", "*fp32"])
    known.num_parameters, known.formats = 5, ("Q", "Q", "i", "Q", "Q")
    for a, b in ((x, y), (x, z), (x, y)):
        start(a, None, b)
        assert known.read[-1] == (a.data_ptr(), b.data_ptr(), 7, 0, 0)
    assert not device.public
    device.stream = 9
    start(x, None, y)
    assert known.started[-1].stream == 9 and known.started[-2].stream == 3


def test_arguments_behind_the_last_may_be_left_out(device: Device, known: Driver, monkeypatch: Any) -> None:
    x = torch.zeros(4)
    start = bound(device, monkeypatch, None, (x, None, None), ["*fp32", "constexpr", "constexpr"])
    known.num_parameters, known.formats = 4, ("Q", "i", "Q", "Q")
    start(x)
    start(x, None, None)
    assert [read[0] for read in known.read] == [x.data_ptr()] * 2


def test_another_device_a_profiler_and_a_refusal_go_by_tritons_own_call(
    device: Device, known: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(4)
    start = bound(device, monkeypatch, None, (x,), ["*fp32"])
    known.num_parameters = 4
    start(x)
    device.index = 1
    start(x)
    device.index = None
    device.hook.calls.append("a profiler")
    start(x)
    device.hook.calls.clear()
    known.refused.add(threading.get_ident())  # as of a thread that has no context yet
    start(x)
    assert len(known.started) == 1 and [args[0] is x for args in device.public] == [True] * 3


def test_a_counter_is_the_streams_own_or_the_graphs(device: Device, known: Driver, monkeypatch: Any) -> None:
    x, counters = torch.zeros(4), Counters(device)
    start = bound(device, monkeypatch, (0, launch.COUNTER), (x, x), ["*fp32", "*i32"], counters)
    known.num_parameters, known.formats = 5, ("Q", "Q", "i", "Q", "Q")
    start(x)
    start(x)
    device.stream = 4
    start(x)
    device.capturing = True
    start(x)
    start(x)
    mine = [counters.of_stream[s].data_ptr() for s in (3, 3, 4)] + [c.data_ptr() for c in counters.of_graphs]
    assert [read[1] for read in known.read] == mine
    assert len(set(mine)) == 4, "a graph's launches share a counter with nobody"


def test_an_unknown_triton_starts_kernels_itself(
    device: Device, known: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pointers where tensors are, and every argument of the signature; maps by its public call."""
    monkeypatch.setattr(driver.triton, "__version__", "4.0.0", raising=False)
    called: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Run, "__call__", lambda self, *arguments: called.append(arguments), raising=False)
    x, y = torch.zeros(4), torch.zeros(4)
    start = bound(device, monkeypatch, None, (x, None, y), ["*fp32", "constexpr", "*fp32"])
    start(x, None, y)
    pointers = (x.data_ptr(), None, y.data_ptr())
    assert called == [(4, 1, 1, 3, 4096, None, None, None, None, *pointers, 7, None)]
    device.index = 1
    start(x, None, y)
    assert len(called) == 1 and device.public[0][0] is x
    device.index = None
    by_map = bound(device, monkeypatch, (Map(0), 1), (launch.Mapped(Map(0), x), y), ["tensordesc<fp32[2, 3]>", "*fp32"])
    by_map(x, y)
    assert len(called) == 1 and device.public[1][0] == ("map of", x.data_ptr())


def test_maps_see_the_arguments_they_name(device: Device, known: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def encode(plan: Any, address: int) -> bytes:
        seen.append(address)
        return bytes(300)

    monkeypatch.setattr(driver, "_encoder", lambda meta: encode)
    x, y, z = (torch.zeros(4) for _ in range(3))
    takes = (Map(1), None, 2)
    start = bound(
        device,
        monkeypatch,
        takes,
        (launch.Mapped(Map(0), x), None, y),
        ["tensordesc<fp32[2, 3]>", "constexpr", "*fp32"],
    )
    known.num_parameters = 9
    start(x, y, z)
    start(x, y, z)
    start(x, z, y)
    assert seen == [y.data_ptr(), z.data_ptr()]
    device.index = 1
    start(x, y, z)
    assert device.public[0][:3] == (("map of", y.data_ptr()), None, z)


def test_a_thread_without_a_context_gets_the_devices_before_anything_is_encoded(known: Driver) -> None:
    launches = launches_of(compiled(SIGNATURE), Run(), 1, 5, VALUES)
    assert launches is not None

    def prepare(has_context: bool) -> None:
        if not has_context:
            known.without.add(threading.get_ident())
        launches.prepare((0, 1, 2))
        launches.prepare((0, 1, 3))

    attached = []
    for has_context in (True, False):
        thread = threading.Thread(target=prepare, args=(has_context,))
        thread.start()
        thread.join()
        attached.append(known.attached.copy())
    assert attached == [[], [100 * (10 + 1)]]


def test_threads_share_launches(device: Device, known: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen threads, each with tensors of its own: what one prepares, no other may see in its place."""
    from concurrent.futures import ThreadPoolExecutor

    pairs = [(torch.zeros(4), torch.zeros(4)) for _ in range(16)]
    start = bound(device, monkeypatch, None, pairs[0], ["*fp32", "*fp32"])
    known.num_parameters, known.formats = 5, ("Q", "Q", "i", "Q", "Q")
    monkeypatch.setattr(driver, "MAX_PREPARED", 4)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda pair: [start(*pair) for _ in range(50)], pairs))
    expected = {(x.data_ptr(), y.data_ptr(), 7, 0, 0) for x, y in pairs}
    assert len(known.read) == 800 and set(known.read) == expected
