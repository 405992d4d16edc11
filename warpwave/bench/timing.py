"""Time several callables against each other, interleaved, so that drift of clocks and temperature meets all alike.

One kernel timed twice in one process has read 10 % apart by run order alone on a power-capped card. So every round
times every callable once, in an order that changes from round to round, and callables are compared by the ratios
within each round (`paired_ratio`), never by two medians taken at different times.

Three methods, and every `Samples` says which one made it:

- `"graph"`: calls so short that launching them costs about as much as running them. A CUDA graph holds many calls
  and is replayed: device time per call, kernel to kernel, without the host. The same inputs are read again and again,
  so a working set that fits in L2 is timed hot.
- `"events"`: longer calls, each between two CUDA events, with L2 flushed before it.
- `"host clock"`: CPU calls, and host time on any device: blocks of calls between two readings of the host's clock.

Nothing here sets clocks, power limits or any other state of the card.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch

Call = Callable[[], object]
Method = Literal["graph", "events", "host clock"]

GRAPH_BELOW_US = 50.0  # shorter calls than this are timed inside a graph
GRAPH_REPLAY_US = 1000.0  # device time of one replay, so that the cost of starting it (about 3 us) is lost in it
GRAPH_CALLS = (10, 200)  # fewest and most calls a graph holds
QUEUED_CALLS = 64  # far below the ~1000 launches a stream's queue holds, where launching would begin to wait
QUEUED_US = 20000.0  # device time queued by one block of host timing: long calls need not make it last
CPU_BLOCK_US = 2000.0  # a block of CPU calls lasts this long, so that reading the clock is lost in it
L2_FLUSH_BYTES = 256 << 20  # several times the largest L2; the same figure as triton.testing.do_bench


class CaptureFailed(RuntimeError):
    """A callable could not be captured in a CUDA graph, so it cannot be compared with others timed in one.

    Attributes:
        name: its key in the mapping given to `time_interleaved`.
        reason: what went wrong, without the name.
    """

    def __init__(self, name: str, cause: BaseException) -> None:
        self.name = name
        self.reason = f"cannot be captured in a CUDA graph: {_first_line(cause)}"
        super().__init__(f"{name} {self.reason}")


@dataclass(frozen=True)
class Samples:
    """Times of one callable, in microseconds a call.

    Attributes:
        samples_us: one figure a round, in round order: the median over the round's repeats.
        method: how time was taken.
        repeats: timings taken in each round.
        calls_per_repeat: calls each of these timings spans, and is divided by.
        l2_flushed: whether L2 was flushed before each call.
    """

    samples_us: tuple[float, ...]
    method: Method
    repeats: int
    calls_per_repeat: int
    l2_flushed: bool

    @property
    def median_us(self) -> float:
        return median(self.samples_us)


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios with a 95 % confidence interval, whose ends are None where there are too few rounds."""

    median: float
    low95: float | None
    high95: float | None


def time_interleaved(
    callables: Mapping[str, Call],
    *,
    device: torch.device | str,
    rounds: int = 9,
    flush_l2: bool = True,
    warmup_s: float = 0.1,
    sample_s: float = 0.025,
    on_round: Callable[[int], None] | None = None,
) -> dict[str, Samples]:
    """Time of each call on `device`, all callables interleaved.

    All are timed by one method, for times taken by different methods do not compare: `"graph"` if the fastest takes
    less than 50 us, else `"events"`; `"host clock"` on a CPU.

    Args:
        callables: name -> a call without arguments. It must do the same work each time. One that cycles through
            several sets of inputs is timed with a cold L2 in a graph too.
        device: where the calls run.
        rounds: times each callable takes its turn; at least 6 for a confidence interval.
        flush_l2: with `"events"`, overwrite L2 before each call.
        warmup_s: each callable runs at least this long before anything is timed, so that compilation, first-call
            set-up and the first climb of the clocks stay outside.
        sample_s: about how long each turn lasts.
        on_round: called with the number of finished rounds, outside anything timed.

    Raises:
        CaptureFailed: a graph is needed and one of the callables cannot be captured.
        ValueError: no callables, or rounds < 1.
    """
    if not callables or rounds < 1:
        raise ValueError(f"there must be something to time: got {len(callables)} callables, {rounds} rounds")
    device = torch.device(device)
    if device.type == "cpu":
        meters = _host_meters(callables, device, warmup_s, sample_s, block_us=CPU_BLOCK_US)
        return _interleave(meters, rounds, on_round)
    with torch.cuda.device(device):
        return _interleave(_device_meters(callables, device, flush_l2, warmup_s, sample_s), rounds, on_round)


def host_time_interleaved(
    callables: Mapping[str, Call],
    *,
    device: torch.device | str,
    rounds: int = 9,
    warmup_s: float = 0.05,
    sample_s: float = 0.005,
) -> dict[str, Samples]:
    """Host time of an eager call: until it returns, the device left to catch up later. All callables interleaved.

    Calls are timed in blocks of at most 64 and the device is waited for between blocks, so the launch queue never
    fills and no wait is ever inside a timing. On a CPU there is no queue and this is simply the time of the call.
    """
    device = torch.device(device)
    meters = _host_meters(callables, device, warmup_s, sample_s, block_us=QUEUED_US, most_calls=QUEUED_CALLS)
    return _interleave(meters, rounds, None)


def host_time_us(call: Call, *, device: torch.device | str, rounds: int = 9) -> float:
    """Median host time of one eager call; see `host_time_interleaved`."""
    return host_time_interleaved({"call": call}, device=device, rounds=rounds)["call"].median_us


def paired_ratio(a: Samples, b: Samples) -> Ratio:
    """Time of `a` over time of `b`, round by round: above 1 where b is the faster.

    The interval is between two order statistics of the per-round ratios, chosen by the binomial distribution: it
    holds the true median in at least 95 % of experiments whatever the distribution of the ratios, and needs no random
    numbers. With 9 rounds it runs from the second smallest to the second largest (96.1 %); under 6 there is none.

    Raises:
        ValueError: `a` and `b` have different numbers of rounds, or were timed by different methods.
    """
    if len(a.samples_us) != len(b.samples_us):
        raise ValueError(f"paired samples need equal rounds, got {len(a.samples_us)} and {len(b.samples_us)}")
    if a.method != b.method:
        raise ValueError(f"times taken by different methods do not compare: {a.method} and {b.method}")
    ratios = sorted(x / y for x, y in zip(a.samples_us, b.samples_us, strict=True))
    rank = _interval_rank(len(ratios))
    if rank is None:
        return Ratio(median(ratios), None, None)
    return Ratio(median(ratios), ratios[rank], ratios[-1 - rank])


def _interval_rank(n: int, confidence: float = 0.95) -> int | None:
    """The largest r for which [r-th smallest, r-th largest] (from 0) of n samples covers the median that surely.

    The median is outside with probability 2 * P(Binomial(n, 1/2) <= r).
    """
    rank, outside = None, 0.0
    for r in range(n // 2):
        outside += 2 * math.comb(n, r) / 2**n
        if outside > 1 - confidence:
            break
        rank = r
    return rank


# A turn of one callable ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Meter:
    """Takes one callable's turn: `read()` gives `repeats` timings in microseconds a call."""

    read: Callable[[], Sequence[float]]
    method: Method
    repeats: int
    calls_per_repeat: int = 1
    l2_flushed: bool = False


def _interleave(
    meters: Mapping[str, _Meter], rounds: int, on_round: Callable[[int], None] | None
) -> dict[str, Samples]:
    names = list(meters)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for r in range(rounds):
        first = r % len(names)
        order = names[first:] + names[:first]
        if r % 2:  # a rotation alone would give each callable the same predecessor, and its heat, in every round
            order.reverse()
        for name in order:
            samples[name].append(median(meters[name].read()))
        if on_round is not None:
            on_round(r + 1)
    return {
        name: Samples(tuple(samples[name]), m.method, m.repeats, m.calls_per_repeat, m.l2_flushed)
        for name, m in meters.items()
    }


def _repeats(sample_s: float, repeat_us: float, *, most: int = 200) -> int:
    """Timings that fit in a turn; at least 3, or their median would follow a single hiccup."""
    return max(3, min(most, round(sample_s * 1e6 / max(repeat_us, 0.1))))


def _warm_up(call: Call, device: torch.device, seconds: float) -> float:
    """Run for at least `seconds` after the first call, which may compile. Microseconds a call, waits included."""
    call()
    _synchronize(device)
    calls, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or calls == 0:
        call()
        _synchronize(device)
        calls += 1
    return elapsed / calls * 1e6


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def _host_meters(
    callables: Mapping[str, Call],
    device: torch.device,
    warmup_s: float,
    sample_s: float,
    *,
    block_us: float,
    most_calls: int = 1_000_000,
) -> dict[str, _Meter]:
    """Blocks of calls between two readings of the host clock; the device is idle when a block starts."""

    def meter(call: Call) -> _Meter:
        call_us = _warm_up(call, device, warmup_s)
        calls = max(1, min(most_calls, round(block_us / call_us)))
        repeats = _repeats(sample_s, calls * call_us)

        def block() -> float:
            _synchronize(device)
            start = time.perf_counter_ns()
            for _ in itertools.repeat(None, calls):
                call()
            return (time.perf_counter_ns() - start) / calls / 1000

        return _Meter(lambda: [block() for _ in range(repeats)], "host clock", repeats, calls)

    return {name: meter(call) for name, call in callables.items()}


def _device_meters(
    callables: Mapping[str, Call], device: torch.device, flush_l2: bool, warmup_s: float, sample_s: float
) -> dict[str, _Meter]:
    flush_buffer = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device=device)

    def timed_by_events(call: Call, repeats: int) -> list[float]:
        # The flushes keep the device busy while the host runs ahead; two extra give it a start, or the wait for the
        # first launches would be timed. Events read in stream order, so a host that is ahead adds nothing.
        events = [_event_pair() for _ in range(repeats)]
        for _ in range(2):
            flush_buffer.zero_()
        for start, end in events:
            if flush_l2:
                flush_buffer.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(device)
        return [start.elapsed_time(end) * 1000 for start, end in events]

    estimates_us = {}
    for name, call in callables.items():
        _warm_up(call, device, warmup_s)
        estimates_us[name] = median(timed_by_events(call, 5))

    if min(estimates_us.values()) < GRAPH_BELOW_US:
        return {
            name: _graph_meter(name, call, device, estimates_us[name], sample_s) for name, call in callables.items()
        }

    def meter(call: Call, estimate_us: float) -> _Meter:
        repeats = _repeats(sample_s, estimate_us)
        return _Meter(lambda: timed_by_events(call, repeats), "events", repeats, l2_flushed=flush_l2)

    return {name: meter(call, estimates_us[name]) for name, call in callables.items()}


def _graph_meter(name: str, call: Call, device: torch.device, estimate_us: float, sample_s: float) -> _Meter:
    fewest, most = GRAPH_CALLS
    calls = max(fewest, min(most, round(GRAPH_REPLAY_US / estimate_us)))
    graph = _capture(name, call, calls, device)
    repeats = _repeats(sample_s, calls * estimate_us, most=20)

    def read() -> list[float]:
        events = [_event_pair() for _ in range(repeats)]
        graph.replay()  # untimed: the host gets ahead while it runs, and it brings the inputs back into L2
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize(device)
        return [start.elapsed_time(end) * 1000 / calls for start, end in events]

    return _Meter(read, "graph", repeats, calls)


def _capture(name: str, call: Call, calls: int, device: torch.device) -> torch.cuda.CUDAGraph:
    # Capture needs a stream of its own, and whatever a library sets up on its first call on a stream (handles,
    # workspaces, compilation) must be over before capture begins: so warm up on that very stream.
    stream = torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    try:
        with torch.cuda.stream(stream):  # the outer context gives the stream back even where capture fails half-way
            for _ in range(3):
                call()
            torch.cuda.synchronize(device)
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(calls):
                    call()
    except RuntimeError as error:
        # Ending a broken capture raises too; what broke it is that error's context.
        raise CaptureFailed(name, error.__context__ or error) from error
    return graph


def _event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
