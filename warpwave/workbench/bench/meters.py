"""Times one callable's turn: on the host's clock, between CUDA events, in a CUDA graph, or on two streams."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch

Call = Callable[[], object]
Method = Literal["graph", "events", "host clock", "eager", "streams"]
MODES = ("auto", "eager", "graph", "streams")

GRAPH_BELOW_US = 50.0  # shorter calls than this are timed inside a graph
GRAPH_REPLAY_US = 1000.0  # device time of one replay, so that its launch (about 3 us) is negligible
GRAPH_CALLS = (2, 200)  # fewest and most calls a graph holds
EAGER_BLOCK_US = 2000.0  # a block of eager calls between two events
EAGER_CALLS = (3, 200)
L2_FLUSH_BYTES = 256 << 20  # several times the largest L2; the same figure as triton.testing.do_bench


class CaptureFailed(RuntimeError):
    """A callable could not be captured in a CUDA graph, so it cannot be compared with callables that were.

    Attributes:
        name: its key in the mapping of callables.
        mode: the mode that needed the graph.
        reason: what went wrong, without the name.
    """

    def __init__(self, name: str, mode: str, cause: BaseException) -> None:
        self.name, self.mode = name, mode
        self.reason = f"cannot be captured in a CUDA graph: {_first_line(cause)}"
        super().__init__(f"{name} {self.reason}")


@dataclass(frozen=True)
class Meter:
    """Times one callable: `read()` returns `repeats` timings in microseconds per call."""

    read: Callable[[], Sequence[float]]
    method: Method
    repeats: int
    calls_per_repeat: int = 1
    l2_flushed: bool = False
    input_sets: int = 1


def host_meters(
    callables: Mapping[str, Sequence[Call]],
    device: torch.device,
    warmup_s: float,
    sample_s: float,
    *,
    block_us: float,
    most_calls: int = 1_000_000,
) -> dict[str, Meter]:
    """Returns meters that time blocks of calls on the host clock; the device is idle when a block starts."""

    def meter(sets: Sequence[Call]) -> Meter:
        call_us = _warm_up(sets, device, warmup_s)
        calls = max(1, min(most_calls, round(block_us / call_us)))
        repeats = _repeats(sample_s, calls * call_us)

        def block() -> float:
            turns = [call for call, _ in zip(itertools.cycle(sets), range(calls), strict=False)]
            _synchronize(device)
            start = time.perf_counter_ns()
            for call in turns:
                call()
            return (time.perf_counter_ns() - start) / calls / 1000

        return Meter(lambda: [block() for _ in range(repeats)], "host clock", repeats, calls, input_sets=len(sets))

    return {name: meter(sets) for name, sets in callables.items()}


def device_meters(
    callables: Mapping[str, Sequence[Call]],
    wanted: Sequence[tuple[str, str]],
    device: torch.device,
    flush_l2: bool,
    warmup_s: float,
    sample_s: float,
) -> dict[tuple[str, str], Meter]:
    """Returns one meter for each requested (mode, name of a callable).

    Raises:
        CaptureFailed: a mode needs a graph, and a callable cannot be captured.
    """
    flush = _flusher(device)
    estimates_us = {}
    for name in dict.fromkeys(name for _, name in wanted):
        sets = callables[name]
        _warm_up(sets, device, warmup_s)
        # Each call follows a flush, even with flush_l2 false: otherwise a slow host would determine the estimate.
        estimates_us[name] = median(_between_events(sets[0], 5, device, flush, True))
    short = min(estimates_us.values()) < GRAPH_BELOW_US

    meters: dict[tuple[str, str], Meter] = {}
    for mode, name in wanted:
        sets, us = callables[name], estimates_us[name]
        if mode == "eager":
            meter = _eager_meter(sets, device, us, sample_s)
        elif mode == "graph" or (mode == "auto" and short):
            meter = _graph_meter(name, mode, sets, device, us, sample_s, flush, streams=1)
        elif mode == "streams":
            meter = _graph_meter(name, mode, sets, device, us, sample_s, flush, streams=2)
        else:
            meter = _event_meter(sets[0], device, us, sample_s, flush, flush_l2)
        meters[mode, name] = meter
    return meters


def _event_meter(
    call: Call, device: torch.device, estimate_us: float, sample_s: float, flush: Call, flush_l2: bool
) -> Meter:
    repeats = _repeats(sample_s, estimate_us)
    return Meter(
        lambda: _between_events(call, repeats, device, flush, flush_l2), "events", repeats, l2_flushed=flush_l2
    )


def _between_events(call: Call, repeats: int, device: torch.device, flush: Call, flush_l2: bool) -> list[float]:
    # The flushes keep the device busy while the host runs ahead. Two extra flushes give the host a head start; without
    # them, the wait for the first launches would be timed. Events are recorded in stream order, so a host that is
    # ahead adds nothing.
    events = [_event_pair() for _ in range(repeats)]
    for _ in range(2):
        flush()
    for start, end in events:
        if flush_l2:
            flush()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) * 1000 for start, end in events]


def _eager_meter(sets: Sequence[Call], device: torch.device, estimate_us: float, sample_s: float) -> Meter:
    fewest, most = EAGER_CALLS
    calls = max(fewest, min(most, round(EAGER_BLOCK_US / estimate_us)))
    repeats = _repeats(sample_s, calls * estimate_us, most=20)
    turns = [call for call, _ in zip(itertools.cycle(sets), range(calls), strict=False)]

    def read() -> list[float]:
        events = [_event_pair() for _ in range(repeats)]
        sets[0]()  # untimed: the first launch on an idle device takes longer than the following ones
        for start, end in events:
            start.record()
            for call in turns:
                call()
            end.record()
        torch.cuda.synchronize(device)
        return [start.elapsed_time(end) * 1000 / calls for start, end in events]

    return Meter(read, "eager", repeats, calls, input_sets=len(sets))


def _graph_meter(
    name: str,
    mode: str,
    sets: Sequence[Call],
    device: torch.device,
    estimate_us: float,
    sample_s: float,
    flush: Call,
    *,
    streams: int,
) -> Meter:
    fewest, most = GRAPH_CALLS
    calls = max(fewest, len(sets), min(most, round(GRAPH_REPLAY_US / estimate_us)))
    calls -= calls % len(sets)  # each set as often as the others
    with _capturing(name, mode):
        graph = _capture(sets, calls, device) if streams == 1 else _capture_on_two_streams(sets, calls, device)
    repeats = _repeats(sample_s, calls * streams * estimate_us, most=20)
    cold = len(sets) > 1

    def read() -> list[float]:
        events = [_event_pair() for _ in range(repeats)]
        graph.replay()  # untimed: the host gets ahead meanwhile, and a hot working set returns to L2
        for start, end in events:
            if cold:
                flush()
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize(device)
        return [start.elapsed_time(end) * 1000 / (calls * streams) for start, end in events]

    method: Method = "graph" if streams == 1 else "streams"
    return Meter(read, method, repeats, calls * streams, l2_flushed=cold, input_sets=len(sets))


@contextmanager
def _capturing(name: str, mode: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # Ending a broken capture raises too; the original error is the context of that one.
        raise CaptureFailed(name, mode, error.__context__ or error) from error


def _capture(sets: Sequence[Call], calls: int, device: torch.device) -> torch.cuda.CUDAGraph:
    # Capture needs its own stream. A library's set-up on its first call on a stream (handles, workspaces, compilation)
    # must end before capture begins, so the warm-up runs on the same stream.
    stream = torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):  # restores the stream even if capture fails
        for call in (*sets, *sets, *sets):
            call()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, stream=stream):
            for call, _ in zip(itertools.cycle(sets), range(calls), strict=False):
                call()
    return graph


def _capture_on_two_streams(sets: Sequence[Call], calls: int, device: torch.device) -> torch.cuda.CUDAGraph:
    """Captures `calls` calls on each of two streams that start together; the graph ends when both are done."""
    stream, other = torch.cuda.Stream(device), torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    for warmed in (other, stream):
        with torch.cuda.stream(warmed):
            for call in (*sets, *sets, *sets):
                call()
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        other.wait_stream(stream)
        for call, _ in zip(itertools.cycle(sets), range(calls), strict=False):
            call()
            with torch.cuda.stream(other):
                call()
        stream.wait_stream(other)
    return graph


def _flusher(device: torch.device) -> Call:
    buffer = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device=device)
    return buffer.zero_


def _repeats(sample_s: float, repeat_us: float, *, most: int = 200) -> int:
    """Returns the timings that fit in a turn; at least 3, so that a single outlier does not move the median."""
    return max(3, min(most, round(sample_s * 1e6 / max(repeat_us, 0.1))))


def _warm_up(sets: Sequence[Call], device: torch.device, seconds: float) -> float:
    """Runs for at least `seconds` after the first calls, which may compile. Returns microseconds per call."""
    for call in sets:
        call()
    _synchronize(device)
    calls, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or calls == 0:
        sets[calls % len(sets)]()
        _synchronize(device)
        calls += 1
    return elapsed / calls * 1e6


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def _event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
