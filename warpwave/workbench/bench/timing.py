"""Times several callables interleaved, so that drift of clocks and temperature affects all of them alike.

On a power-capped card, one kernel timed twice in one process differed by 10 % because of run order alone. Therefore
every round times every callable once, in an order that changes from round to round, and callables are compared by the
ratios within each round (`paired_ratio`), never by two medians taken at different times.

The caller requests a mode of `MODES`; the `method` of every `Samples` states how its times were taken:

- `"auto"` is `"graph"` if the fastest callable takes less than 50 us, else `"events"`: device time, not hidden by the
  cost of launching.
- `"eager"`: the time that a Python caller sees: calls back to back, limited by the slower of host and device.
- `"graph"`: a CUDA graph of many calls is replayed: device time per call, kernel to kernel, without the host. With one
  set of inputs, a working set that fits in L2 is timed hot. Several sets are used in turn, and L2 is flushed before
  each replay: cold.
- `"streams"`: a CUDA graph with the calls on two streams at once: time per call, to compare with `"graph"`.

On a CPU, host and device are the same, and so are `"auto"` and `"eager"`: blocks of calls on the host's clock.

This module never sets clocks, power limits or any other state of the card.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from warpwave.workbench.bench.meters import MODES, Call, CaptureFailed, Meter, Method, device_meters, host_meters

CPU_BLOCK_US = 2000.0  # a block of CPU calls lasts this long, so that reading the clock is negligible
QUEUED_CALLS = 64  # far below the ~1000 launches of a stream's queue, beyond which launching blocks
QUEUED_US = 20000.0  # limit of the device time that one block of host timing queues

__all__ = [
    "MODES",
    "Call",
    "CaptureFailed",
    "Method",
    "Ratio",
    "Samples",
    "host_time_interleaved",
    "host_time_us",
    "median_interval",
    "paired_ratio",
    "ratio_if_paired",
    "time_interleaved",
    "time_modes",
]


@dataclass(frozen=True)
class Samples:
    """Times of one callable, in microseconds per call.

    Attributes:
        samples_us: one figure per round, in order: the median of the round's repeats.
        method: how times were taken.
        repeats: timings in each round.
        calls_per_repeat: calls in each timing; the timing is divided by it.
        l2_flushed: whether L2 was flushed before each call, or before each cycle through the input sets.
        input_sets: number of input sets that the calls used in turn.
    """

    samples_us: tuple[float, ...]
    method: Method
    repeats: int
    calls_per_repeat: int
    l2_flushed: bool
    input_sets: int = 1

    @property
    def median_us(self) -> float:
        return median(self.samples_us)


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios, and its 95 % confidence interval, whose ends are None with too few rounds."""

    median: float
    low95: float | None
    high95: float | None


def time_interleaved(
    callables: Mapping[str, Call | Sequence[Call]],
    *,
    device: torch.device | str,
    rounds: int = 9,
    mode: str = "auto",
    flush_l2: bool = True,
    warmup_s: float = 0.1,
    sample_s: float = 0.025,
    on_round: Callable[[int], None] | None = None,
) -> dict[str, Samples]:
    """Times each callable in one mode, interleaved; see `time_modes`."""
    return time_modes(
        callables,
        (mode,),
        device=device,
        rounds=rounds,
        flush_l2=flush_l2,
        warmup_s=warmup_s,
        sample_s=sample_s,
        on_round=on_round,
    )[mode]


def time_modes(
    callables: Mapping[str, Call | Sequence[Call]],
    modes: Sequence[str],
    *,
    device: torch.device | str,
    rounds: int = 9,
    flush_l2: bool = True,
    warmup_s: float = 0.1,
    sample_s: float = 0.025,
    on_round: Callable[[int], None] | None = None,
    leave_out: Collection[tuple[str, str]] = (),
) -> dict[str, dict[str, Samples]]:
    """Times each callable on `device`, mode -> name -> samples. All callables in all modes take turns in every round.

    Within a mode all are timed by the same method, because times by different methods cannot be compared.

    Args:
        callables: name -> a function without arguments that does the same work each time; or several, each with its
            own inputs, which are called in turn so that even a short call finds a cold L2.
        modes: any of `MODES`; on a CPU only `"auto"` and `"eager"`.
        device: the device of the calls.
        rounds: number of rounds; at least 6 for a confidence interval.
        flush_l2: with `"events"`, overwrite L2 before each call.
        warmup_s: each callable runs at least this long before timing starts, so that compilation, first-call set-up
            and the initial rise of the clocks are not timed.
        sample_s: approximate duration of each turn.
        on_round: called with the number of finished rounds, outside the timed sections.
        leave_out: (mode, name) pairs that are not timed.

    Raises:
        CaptureFailed: a mode needs a graph and one of the callables cannot be captured.
        ValueError: no callables, no modes or unknown ones, or rounds < 1.
    """
    if not callables or not modes or rounds < 1:
        raise ValueError(
            f"there must be something to time: got {len(callables)} callables, {len(modes)} modes, {rounds} rounds"
        )
    device = torch.device(device)
    known = MODES if device.type != "cpu" else ("auto", "eager")
    if unknown := [mode for mode in modes if mode not in known]:
        raise ValueError(f"mode {unknown[0]!r} is not one of {', '.join(known)} on {device.type}")
    sets = {name: (calls,) if callable(calls) else tuple(calls) for name, calls in callables.items()}
    if device.type == "cpu":
        once = host_meters(sets, device, warmup_s, sample_s, block_us=CPU_BLOCK_US)
        meters = {
            (mode, name): meter for mode in modes for name, meter in once.items() if (mode, name) not in leave_out
        }
        timed = _interleave(meters, rounds, on_round)
    else:
        wanted = [(mode, name) for mode in modes for name in sets if (mode, name) not in leave_out]
        with torch.cuda.device(device):
            timed = _interleave(device_meters(sets, wanted, device, flush_l2, warmup_s, sample_s), rounds, on_round)
    return {mode: {name: timed[mode, name] for name in callables if (mode, name) in timed} for mode in modes}


def host_time_interleaved(
    callables: Mapping[str, Call | Sequence[Call]],
    *,
    device: torch.device | str,
    rounds: int = 9,
) -> dict[str, Samples]:
    """Measures the host time of eager calls: until the call returns, without waiting for the device. Interleaved.

    Calls are timed in blocks of at most 64, and the device is synchronized between blocks, so the launch queue never
    fills and no timing includes a wait. On a CPU there is no queue, and the result is the time of the call.
    """
    device = torch.device(device)
    sets = {name: (calls,) if callable(calls) else tuple(calls) for name, calls in callables.items()}
    meters = host_meters(sets, device, warmup_s=0.05, sample_s=0.005, block_us=QUEUED_US, most_calls=QUEUED_CALLS)
    timed = _interleave({("host", name): meter for name, meter in meters.items()}, rounds, None)
    return {name: samples for (_, name), samples in timed.items()}


def host_time_us(call: Call, *, device: torch.device | str, rounds: int = 9) -> float:
    """Returns the median host time of one eager call; see `host_time_interleaved`."""
    return host_time_interleaved({"call": call}, device=device, rounds=rounds)["call"].median_us


def paired_ratio(a: Samples, b: Samples) -> Ratio:
    """Returns the time of `a` over the time of `b`, round by round: above 1 if b is faster.

    The interval lies between two order statistics of the per-round ratios, chosen by the binomial distribution. It
    contains the true median in at least 95 % of experiments, for any distribution of the ratios, without random
    numbers. With 9 rounds it runs from the second smallest to the second largest (96.1 %); below 6 there is none.

    Raises:
        ValueError: `a` and `b` have different numbers of rounds, or were timed by different methods.
    """
    if len(a.samples_us) != len(b.samples_us):
        raise ValueError(f"paired samples need equal rounds, got {len(a.samples_us)} and {len(b.samples_us)}")
    if a.method != b.method:
        raise ValueError(f"times by different methods cannot be compared: {a.method} and {b.method}")
    ratios = [x / y for x, y in zip(a.samples_us, b.samples_us, strict=True)]
    return Ratio(median(ratios), *(median_interval(ratios) or (None, None)))


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns the 95 % confidence interval of a median, in the unit of the values; None for fewer than 6 values.

    Its ends are order statistics, see `paired_ratio`.
    """
    rank = _interval_rank(len(values))
    return None if rank is None else (sorted(values)[rank], sorted(values)[-1 - rank])


def ratio_if_paired(a: Samples, b: Samples) -> Ratio | None:
    """Returns `paired_ratio`, or None if the two were not timed in the same rounds."""
    if len(a.samples_us) != len(b.samples_us) or a.method != b.method:
        return None
    return paired_ratio(a, b)


def _interval_rank(n: int, confidence: float = 0.95) -> int | None:
    """Returns the largest r for which [r-th smallest, r-th largest] (from 0) of n samples covers the median with this
    confidence.

    The median is outside with probability 2 * P(Binomial(n, 1/2) <= r).
    """
    rank, outside = None, 0.0
    for r in range(n // 2):
        outside += 2 * math.comb(n, r) / 2**n
        if outside > 1 - confidence:
            break
        rank = r
    return rank


def _interleave(
    meters: Mapping[tuple[str, str], Meter], rounds: int, on_round: Callable[[int], None] | None
) -> dict[tuple[str, str], Samples]:
    names = list(meters)
    samples: dict[tuple[str, str], list[float]] = {name: [] for name in names}
    for r in range(rounds):
        first = r % len(names)
        order = names[first:] + names[:first]
        if r % 2:  # with a rotation alone each callable would always follow the same one, and inherit its heat
            order.reverse()
        for name in order:
            samples[name].append(median(meters[name].read()))
        if on_round is not None:
            on_round(r + 1)
    return {
        name: Samples(tuple(samples[name]), m.method, m.repeats, m.calls_per_repeat, m.l2_flushed, m.input_sets)
        for name, m in meters.items()
    }
