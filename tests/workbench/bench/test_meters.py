"""The GPU's meters on a GPU that is made up: a clock that moves when work runs, and graphs that hold their work."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from warpwave.workbench.bench import meters
from warpwave.workbench.bench.meters import CaptureFailed, device_meters

LAUNCH_US = 3.0  # what starting a graph costs


class FakeGpu:
    """Runs work at once, or notes it in the graph being captured. Work on a second stream overlaps with the first's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_us, self.on_second_stream = 0.0, False
        self.graph: Any = None
        self.ran: list[str] = []
        gpu = self

        class Event:
            def __init__(self, **_: Any) -> None:
                self.us = 0.0

            def record(self) -> None:
                self.us = gpu.now_us

            def elapsed_time(self, end: "Event") -> float:
                return (end.us - self.us) / 1000

        class Graph:
            def __init__(self) -> None:
                self.streams: tuple[list[tuple[str, float]], list[tuple[str, float]]] = ([], [])

            def replay(self) -> None:
                gpu.now_us += LAUNCH_US + max(sum(us for _, us in stream) for stream in self.streams)
                gpu.ran += [name for stream in self.streams for name, _ in stream]

        class Stream:
            def __init__(self, *_: Any) -> None:
                pass

            def wait_stream(self, other: "Stream") -> None:
                pass

        @contextmanager
        def graph(captured: Graph, stream: Stream) -> Iterator[None]:
            gpu.graph = captured
            yield
            gpu.graph = None

        @contextmanager
        def stream(_: Stream) -> Iterator[None]:
            inside = gpu.on_second_stream
            gpu.on_second_stream = gpu.graph is not None
            yield
            gpu.on_second_stream = inside

        cuda = {"Event": Event, "CUDAGraph": Graph, "Stream": Stream, "graph": graph, "stream": stream}
        for name, fake in cuda.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(meters, "_flusher", lambda device: self.work(70.0, "flush"))

    def work(self, us: float, name: str = "work") -> Callable[[], None]:
        def call() -> None:
            if self.graph is not None:
                self.graph.streams[self.on_second_stream].append((name, us))
            else:
                self.now_us += us
                self.ran.append(name)

        return call


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


def read(calls: dict[str, Any], *wanted: tuple[str, str], flush_l2: bool = True) -> dict[tuple[str, str], Any]:
    return device_meters(calls, wanted, torch.device("cuda"), flush_l2, warmup_s=0.0, sample_s=0.01)


def test_long_calls_are_timed_between_events_and_flushed(gpu: FakeGpu) -> None:
    meter = read({"a": [gpu.work(200.0)], "b": [gpu.work(50.0)]}, ("auto", "a"), ("auto", "b"))["auto", "a"]
    assert meter.method == "events" and meter.l2_flushed and meter.calls_per_repeat == 1
    gpu.ran.clear()
    assert list(meter.read()) == pytest.approx([200.0] * meter.repeats)
    assert gpu.ran == ["flush"] * 2 + ["flush", "work"] * meter.repeats
    hot = read({"a": [gpu.work(200.0)]}, ("auto", "a"), flush_l2=False)["auto", "a"]
    gpu.ran.clear()
    hot.read()
    assert gpu.ran == ["flush"] * 2 + ["work"] * hot.repeats and not hot.l2_flushed


def test_one_short_call_puts_all_into_graphs(gpu: FakeGpu) -> None:
    found = read({"a": [gpu.work(200.0)], "b": [gpu.work(10.0)]}, ("auto", "a"), ("auto", "b"))
    assert {m.method for m in found.values()} == {"graph"} and not any(m.l2_flushed for m in found.values())
    assert (found["auto", "a"].calls_per_repeat, found["auto", "b"].calls_per_repeat) == (5, 100)
    for meter, us in zip(found.values(), (200.0, 10.0), strict=True):
        assert list(meter.read()) == pytest.approx([us + LAUNCH_US / meter.calls_per_repeat] * meter.repeats)


def test_long_calls_go_into_a_graph_where_one_is_asked_for(gpu: FakeGpu) -> None:
    meter = read({"a": [gpu.work(5000.0)]}, ("graph", "a"))["graph", "a"]
    assert meter.method == "graph" and meter.calls_per_repeat == 2


def test_sets_of_inputs_take_turns_and_begin_cold(gpu: FakeGpu) -> None:
    calls = [gpu.work(10.0, f"set {i}") for i in range(3)]
    meter = read({"a": calls}, ("auto", "a"))["auto", "a"]
    assert meter.input_sets == 3 and meter.l2_flushed and meter.calls_per_repeat == 99
    gpu.ran.clear()
    meter.read()
    assert gpu.ran[99 : 99 + 5] == ["flush", "set 0", "set 1", "set 2", "set 0"]  # behind the untimed replay
    assert gpu.ran.count("flush") == meter.repeats


def test_two_streams_count_the_calls_of_both(gpu: FakeGpu) -> None:
    meter = read({"a": [gpu.work(100.0)]}, ("streams", "a"))["streams", "a"]
    assert meter.method == "streams" and meter.calls_per_repeat == 20
    # On this GPU the streams overlap without a loss, so that two calls take the time of one.
    assert list(meter.read()) == pytest.approx([50.0 + LAUNCH_US / 20] * meter.repeats)


def test_eager_calls_run_back_to_back(gpu: FakeGpu) -> None:
    meter = read({"a": [gpu.work(100.0)]}, ("eager", "a"))["eager", "a"]
    gpu.ran.clear()
    assert list(meter.read()) == pytest.approx([100.0] * meter.repeats)
    assert meter.calls_per_repeat == 20 and gpu.ran == ["work"] * (1 + 20 * meter.repeats)


def test_what_cannot_be_captured_is_named_with_its_mode(gpu: FakeGpu) -> None:
    work = gpu.work(100.0)

    def reads_back() -> None:
        if gpu.graph is not None:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        work()

    with pytest.raises(CaptureFailed) as caught:
        read({"ok": [work], "reader": [reads_back]}, ("auto", "reader"), ("graph", "ok"), ("graph", "reader"))
    assert (caught.value.name, caught.value.mode) == ("reader", "graph")
    assert caught.value.reason.endswith(": operation not permitted when stream is capturing")
