"""Time several callables against each other, interleaved, so that drift of clocks and temperature meets all alike.

One kernel timed twice in one process has read 10 % apart by run order alone on a power-capped card. So every round
times every callable once, in an order that changes from round to round, and callables are compared by the ratios
within each round (`paired_ratio`), never by two medians taken at different times.

What is asked for is a mode, one of `MODES`; the `method` of every `Samples` says how its times were taken:

- `"auto"` is `"graph"` where the fastest callable takes less than 50 us, and else `"events"`: device time, where the
  cost of launching does not hide it.
- `"eager"`: what a Python caller sees: calls back to back, as fast as the slower of host and device allows.
- `"graph"`: a CUDA graph holds many calls and is replayed: device time per call, kernel to kernel, without the host.
  One set of inputs is read again and again, so a working set that fits in L2 is timed hot. Several sets are cycled
  through, and L2 is flushed before each replay: cold.
- `"streams"`: a graph again, the calls on two streams at once: time per call, to be held against `"graph"`.

On a CPU, where host and device are one, `"auto"` and `"eager"` are the same: blocks of calls on the host's clock.

Nothing here sets clocks, power limits or any other state of the card.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from warpwave.workbench.bench.meters import MODES, Call, CaptureFailed, Meter, Method, device_meters, host_meters

CPU_BLOCK_US = 2000.0  # a block of CPU calls lasts this long, so that reading the clock is lost in it
QUEUED_CALLS = 64  # far below the ~1000 launches a stream's queue holds, where launching would begin to wait
QUEUED_US = 20000.0  # device time queued by one block of host timing: long calls need not make it last

__all__ = [
    "MODES",
    "Call",
    "CaptureFailed",
    "Method",
    "Ratio",
    "Samples",
    "host_time_interleaved",
    "host_time_us",
    "paired_ratio",
    "ratio_if_paired",
    "time_interleaved",
    "time_modes",
]


@dataclass(frozen=True)
class Samples:
    """Times of one callable, in microseconds a call.

    Attributes:
        samples_us: one figure a round, in round order: the median over the round's repeats.
        method: how time was taken.
        repeats: timings taken in each round.
        calls_per_repeat: calls each of these timings spans, and is divided by.
        l2_flushed: whether L2 was flushed before each call, or before each cycle through the sets of inputs.
        input_sets: how many sets of inputs the calls cycled through.
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
    """Median of paired ratios with a 95 % confidence interval, whose ends are None where there are too few rounds."""

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
    """Time of each call in one mode, all callables interleaved; see `time_modes`."""
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
    """Time of each call on `device`, mode -> name -> samples. All callables in all modes take turns in every round.

    Within a mode all are timed by one method, for times taken by different methods do not compare.

    Args:
        callables: name -> a call without arguments that does the same work each time; or several such calls, each on
            a set of inputs of its own, which are cycled through so that a short call too meets a cold L2.
        modes: any of `MODES`; on a CPU `"auto"` and `"eager"` alone.
        device: where the calls run.
        rounds: times each callable takes its turn; at least 6 for a confidence interval.
        flush_l2: with `"events"`, overwrite L2 before each call.
        warmup_s: each callable runs at least this long before anything is timed, so that compilation, first-call
            set-up and the first climb of the clocks stay outside.
        sample_s: about how long each turn lasts.
        on_round: called with the number of finished rounds, outside anything timed.
        leave_out: (mode, name) of callables that are not to be timed in that mode.

    Raises:
        CaptureFailed: a graph is needed and one of the callables cannot be captured.
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
    warmup_s: float = 0.05,
    sample_s: float = 0.005,
) -> dict[str, Samples]:
    """Host time of an eager call: until it returns, the device left to catch up later. All callables interleaved.

    Calls are timed in blocks of at most 64 and the device is waited for between blocks, so the launch queue never
    fills and no wait is ever inside a timing. On a CPU there is no queue and this is simply the time of the call.
    """
    device = torch.device(device)
    sets = {name: (calls,) if callable(calls) else tuple(calls) for name, calls in callables.items()}
    meters = host_meters(sets, device, warmup_s, sample_s, block_us=QUEUED_US, most_calls=QUEUED_CALLS)
    timed = _interleave({("host", name): meter for name, meter in meters.items()}, rounds, None)
    return {name: samples for (_, name), samples in timed.items()}


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


def ratio_if_paired(a: Samples, b: Samples) -> Ratio | None:
    """`paired_ratio`, or None where the two did not take turns: no pair of times was taken together."""
    if len(a.samples_us) != len(b.samples_us) or a.method != b.method:
        return None
    return paired_ratio(a, b)


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


def _interleave(
    meters: Mapping[tuple[str, str], Meter], rounds: int, on_round: Callable[[int], None] | None
) -> dict[tuple[str, str], Samples]:
    names = list(meters)
    samples: dict[tuple[str, str], list[float]] = {name: [] for name in names}
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
        name: Samples(tuple(samples[name]), m.method, m.repeats, m.calls_per_repeat, m.l2_flushed, m.input_sets)
        for name, m in meters.items()
    }
