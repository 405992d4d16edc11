"""Launches of a call as one CUDA graph: which launches it holds, when it is taken, and when not."""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import warpwave
from tests.test_driver import Counters, Device, Driver, bound, device, known
from warpwave.gpu import current_gpu
from warpwave.kernels.three_kernel.choice import own_products
from warpwave.runtime import driver, graphs, launch, scratch

__all__ = ["device", "known"]  # fixtures
OURS = 77  # the stream on which graphs are captured


class Graphs(Driver):
    """A driver with graphs: a captured launch is read when it is captured, and noted when its graph starts."""

    def __init__(self) -> None:
        super().__init__(5)
        self.formats = ("Q", "Q", "i", "Q", "Q")
        self.captured: list[Any] | None = None
        self.graphs: dict[int, list[Any]] = {}
        self.replayed: list[tuple[int, list[Any]]] = []  # stream, and what its launches took
        self.destroyed: list[int] = []
        self.failing = ""
        self.mode = 0

    def start(self, config: int, function: int, parameters: int, extra: None) -> int:
        stream = driver._Config.from_address(config).stream
        if stream != OURS:
            return super().start(config, function, parameters, extra)
        assert self.captured is not None, "nothing ever runs in the stream of graphs"
        super().start(config, function, parameters, extra)
        self.captured.append((self.started.pop().function, self.read.pop()))
        return int(self.failing == "start")

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def cuStreamCreate(self, stream: Any, flags: int) -> int:
        assert flags == 1, "it waits for nothing in the default stream"
        stream._obj.value = OURS
        return 0

    def cuStreamBeginCapture_v2(self, stream: Any, mode: int) -> int:
        assert (stream.value, mode, self.mode) == (OURS, 2, 2), "another thread's capture may go on meanwhile"
        assert self.captured is None
        self.captured = []
        return int(self.failing == "begin")

    def cuStreamEndCapture(self, stream: Any, graph: Any) -> int:
        assert self.captured is not None
        graph._obj.value = number = 1000 + len(self.graphs)
        self.graphs[number], self.captured = self.captured, None
        return 0

    def cuGraphInstantiateWithFlags(self, made: Any, graph: Any, flags: Any) -> int:
        assert flags.value == 0
        if self.failing == "instantiate":
            return 2
        made._obj.value = 5000 + graph.value
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:
        return 0

    def cuGraphExecDestroy(self, graph: Any) -> int:
        assert isinstance(graph, ctypes.c_void_p)
        assert self.mode == 2, "somebody's capture may go on meanwhile"
        self.destroyed.append(int(graph.value or 0))
        return 0

    def launch(self, graph: int, stream: int) -> int:
        if threading.get_ident() in self.refused:
            return 201
        self.replayed.append((stream, self.graphs[graph - 5000]))
        return 0


class Place:
    """Stands for a CUDA device whose memory is the CPU's."""

    type, index = "cuda", None


@pytest.fixture
def fake(known: Driver, monkeypatch: pytest.MonkeyPatch) -> Graphs:
    found, cpu = Graphs(), torch.device("cpu")
    buffer, maker = scratch.buffer, scratch.maker
    monkeypatch.setattr(driver, "start_call", lambda: found.start)
    monkeypatch.setattr(driver, "graph_call", lambda: found.launch)
    monkeypatch.setattr(driver, "library", lambda: found)
    monkeypatch.setattr(driver, "_capturing_stream", driver._capturing_stream.__wrapped__)
    monkeypatch.setattr(scratch, "_buffers", scratch._Kept())
    monkeypatch.setattr(scratch, "buffer", lambda device, *args: buffer(cpu, *args))
    monkeypatch.setattr(scratch, "maker", lambda shape, dtype, device: maker(shape, dtype, cpu))
    return found


def two(device: Device, monkeypatch: Any, counters: Any = None) -> Callable[..., None]:
    """`launch(x, nothing, z)`: a launch of x and y, then one of y and z, or of y and the stream's counter."""
    t = torch.zeros(4)
    first = bound(device, monkeypatch, None, (t, t), ["*fp32", "*fp32"])
    takes = None if counters is None else (0, launch.COUNTER)
    second = bound(device, monkeypatch, takes, (t, t), ["*fp32", "*fp32"], counters)
    between = graphs.Between("y", [((4,), torch.float32)], Place())  # type: ignore[arg-type]
    return graphs.bind("x nothing z", between, (first, "x y"), (second, "y z" if counters is None else "y"))


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.zeros(4) for _ in range(count)]


def at(*addresses: int) -> tuple[Any, ...]:
    return (*addresses, 7, 0, 0)


def left(fake: Graphs, launches: Any = None) -> int:
    """Where the memory between the last two launches lies: the second argument of one and the first of the other."""
    first, second = launches or fake.read[-2:]
    assert first[1] == second[0]
    return int(first[1])


def test_what_comes_again_starts_as_one(device: Device, fake: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    start, (x, z) = two(device, monkeypatch), tensors(2)
    for i in range(graphs.MADE_AFTER + 3):
        start(x, None, z)
        direct, y = min(i + 1, graphs.MADE_AFTER), left(fake)
        one_call = [at(x.data_ptr(), y), at(y, z.data_ptr())]
        assert fake.read == one_call * direct and len(fake.replayed) == i + 1 - direct
    assert {started.stream for started in fake.started} == {3}
    assert fake.replayed == [(3, [(4096, launch) for launch in one_call])] * 3
    assert fake.mode == 0, "the thread's mode is put back"
    assert not device.public


def test_other_addresses_and_streams_have_graphs_of_their_own(
    device: Device, fake: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, (x, z, other) = two(device, monkeypatch), tensors(3)
    for _ in range(graphs.MADE_AFTER + 1):
        start(x, None, z)
    assert len(fake.replayed) == 1
    y = left(fake)
    for a, b in ((other, z), (x, other)):
        start(a, None, b)
        assert len(fake.replayed) == 1
        assert fake.read[-2:] == [at(a.data_ptr(), y), at(y, b.data_ptr())]
    device.stream = 9
    for _ in range(graphs.MADE_AFTER + 1):
        start(x, None, z)
    assert [stream for stream, _ in fake.replayed] == [3, 9]
    assert left(fake) != y


def test_a_capture_a_profiler_and_a_refusal_have_kernels_one_by_one(
    device: Device, fake: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, (x, z) = two(device, monkeypatch), tensors(2)
    for _ in range(graphs.MADE_AFTER):
        start(x, None, z)
    y = left(fake)
    fake.started.clear()
    device.capturing = True
    for _ in range(2 * graphs.MADE_AFTER):
        start(x, None, z)
        assert left(fake) != y
    device.capturing = False
    assert len(fake.started) == 4 * graphs.MADE_AFTER and not device.public
    device.hook.calls.append("a profiler")
    start(x, None, z)
    device.hook.calls.clear()
    device.index = 1
    start(x, None, z)
    device.index = None
    fake.refused.add(threading.get_ident())  # as of a thread that has no context yet
    start(x, None, z)
    fake.refused.clear()
    assert len(fake.started) == 4 * graphs.MADE_AFTER and len(device.public) == 6 and not fake.replayed
    start(x, None, z)
    assert len(fake.replayed) == 1


def test_a_counter_is_the_streams_own(device: Device, fake: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters(device)
    start, (x, z) = two(device, monkeypatch, counters), tensors(2)
    for stream in (3, 9):
        device.stream = stream
        for _ in range(graphs.MADE_AFTER + 1):
            start(x, None, z)
    assert [(stream, launches[1][1][1]) for stream, launches in fake.replayed] == [
        (stream, counters.of_stream[stream].data_ptr()) for stream in (3, 9)
    ]


def test_graphs_stay_bounded_and_are_destroyed(device: Device, fake: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 3)
    monkeypatch.setattr(graphs, "ANEW_AFTER", 40)
    start, (z, *xs) = two(device, monkeypatch), tensors(11)
    for _ in range(graphs.MADE_AFTER + 1):
        for x in xs[:3]:
            start(x, None, z)
    for x in xs[3:5]:
        for _ in range(2 * graphs.MADE_AFTER):
            start(x, None, z)
    assert len(fake.graphs) == len(fake.replayed) == 3, "those that are there are not exchanged"
    for _ in range(8):
        start(xs[5], None, z)
    gc.collect()
    assert fake.destroyed == [6000, 6001, 6002], "but not kept for ever either"
    for _ in range(graphs.MADE_AFTER):
        start(xs[6], None, z)
    assert len(fake.graphs) == 4
    del start
    gc.collect()
    assert fake.destroyed == [6000, 6001, 6002, 6003], "with the plan, all"
    assert fake.mode == 0


def test_addresses_that_never_come_again_cost_nothing(
    device: Device, fake: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_COUNTED", 16)
    start, (z, *xs) = two(device, monkeypatch), tensors(51)
    for _ in range(graphs.MADE_AFTER + 1):
        for x in xs:
            start(x, None, z)
    assert not fake.graphs and len(fake.started) == 2 * 50 * (graphs.MADE_AFTER + 1)


def test_memory_that_is_not_kept_has_no_graph(device: Device, fake: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch lends it to others between two calls."""
    monkeypatch.setattr(scratch, "LARGEST", 8)
    start, (x, z) = two(device, monkeypatch), tensors(2)
    for _ in range(2 * graphs.MADE_AFTER):
        start(x, None, z)
        left(fake)
    assert not fake.graphs and len(fake.started) == 4 * graphs.MADE_AFTER


@pytest.mark.parametrize("failing", ["begin", "start", "instantiate"])
def test_where_no_graph_can_be_made_launches_go_on(
    failing: str, device: Device, fake: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, (x, z) = two(device, monkeypatch), tensors(2)
    fake.failing = failing
    for _ in range(2 * graphs.MADE_AFTER):
        start(x, None, z)
        fake.captured = None
        left(fake)
    assert len(fake.read) == 4 * graphs.MADE_AFTER and not fake.replayed
    assert fake.mode == 0 and not driver._capturing.locked()


def test_an_unknown_triton_starts_kernels_itself(device: Device, fake: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "layout", lambda *args: None)
    ran: list[Any] = []
    monkeypatch.setattr(launch, "_by_run", lambda *args: lambda *given: ran.append(given))
    start, (x, z) = two(device, monkeypatch), tensors(2)
    for _ in range(graphs.MADE_AFTER + 1):
        start(x, None, z)
    assert len(ran) == 2 * (graphs.MADE_AFTER + 1) and not fake.graphs
    (a, b), (c, d) = ran[-2:]
    assert a is x and b.data_ptr() == c.data_ptr() and d is z


def test_threads_have_memory_and_graphs_of_their_own(
    device: Device, fake: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of the same operands: a graph is never started by two calls at a time."""
    from concurrent.futures import ThreadPoolExecutor

    start, (x, z), begin = two(device, monkeypatch), tensors(2), threading.Barrier(8)

    def call(_: int) -> None:
        begin.wait()
        for _ in range(50):
            start(x, None, z)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))
    lefts = {left(fake, [took for _, took in launches]) for _, launches in fake.replayed}
    assert len(lefts) == len(fake.graphs) == 8
    assert len(fake.replayed) == 8 * (50 - graphs.MADE_AFTER)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "dtype", "shape"),
    [
        ("hopper/flash_fwd", torch.float32, (1, 1016, 4, 64)),
        ("split_kv", torch.float32, (1, 504, 1, 64)),
        ("three_kernel", torch.bfloat16, (1, 248, 2, 512)),
    ],
)
def test_graphs_give_the_bits_of_single_launches(
    kernel: str, dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a loop, on two streams in turns, beside a capture of the caller's, and when operands change in place."""
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
    explained = warpwave.explain(q, k, v)
    if explained.reasons[kernel]:
        pytest.skip(f"{kernel} does not run here")
    config = None
    if kernel == "three_kernel":  # whose default may be torch's products
        config = own_products(explained.problem, current_gpu(q.device))
    attend = functools.partial(warpwave.attention, q, k, v, kernel=kernel, config=config)
    start, replayed = driver.graph_call(), []
    assert start is not None

    def noting(graph: int, stream: int) -> int:
        replayed.append(stream)
        return start(graph, stream)

    monkeypatch.setattr(driver, "graph_call", lambda: noting)
    first = attend()
    outs = [first] * 4
    for i in range(8 * graphs.MADE_AFTER):
        outs[i % 4] = attend()
    assert len(replayed) > 2 * graphs.MADE_AFTER
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(4 * graphs.MADE_AFTER):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[i] = attend()
    torch.cuda.synchronize()
    assert {stream.cuda_stream for stream in streams} < set(replayed)
    assert all(torch.equal(out, first) for out in outs)
    count, graph = len(replayed), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=streams[0]):
        inside = attend()
    assert len(replayed) == count
    v.neg_()
    graph.replay()
    again = attend()
    assert torch.equal(inside, -first) and torch.equal(again, -first)
