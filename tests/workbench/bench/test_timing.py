import itertools
import random
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from warpwave.workbench.bench import meters
from warpwave.workbench.bench.timing import Samples, _interval_rank, host_time_us, paired_ratio, time_interleaved


def samples(*times_us: float, method: str = "events") -> Samples:
    return Samples(times_us, method, repeats=3, calls_per_repeat=1, l2_flushed=True)  # type: ignore[arg-type]


class Clock:
    """A clock that moves only while something runs, so that a known time is known exactly on a busy machine too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        fake = SimpleNamespace(perf_counter=lambda: self.now_ns * 1e-9, perf_counter_ns=lambda: self.now_ns)
        monkeypatch.setattr(meters, "time", fake)

    def work(self, us: float) -> Callable[[], None]:
        def call() -> None:
            self.now_ns += round(us * 1000)

        return call


def test_a_known_time_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    timed = time_interleaved({"short": clock.work(200), "long": clock.work(600)}, device="cpu", rounds=7)
    short, long = timed["short"], timed["long"]
    assert short.samples_us == pytest.approx([200] * 7)
    assert long.samples_us == pytest.approx([600] * 7)
    assert short.median_us == pytest.approx(200) and paired_ratio(long, short).median == pytest.approx(3)
    assert short.method == "host clock" and not short.l2_flushed
    assert short.calls_per_repeat == 10  # blocks of 2 ms
    assert short.repeats == 12  # that fill a turn of 25 ms


def test_a_hiccup_within_a_round_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    work, hiccup, calls = clock.work(1000), clock.work(50_000), itertools.count()

    def call() -> None:
        work()
        if next(calls) % 10 == 0:
            hiccup()

    assert time_interleaved({"a": call}, device="cpu", rounds=7)["a"].samples_us == pytest.approx([1000] * 7)


def test_the_real_clock_is_read() -> None:
    timed = time_interleaved({"sleep": lambda: time.sleep(0.001)}, device="cpu", rounds=2, warmup_s=0.0, sample_s=0.0)
    assert 1000 <= timed["sleep"].median_us < 100_000


def test_rounds_are_interleaved_and_the_order_changes() -> None:
    calls: list[str] = []
    rounds_done: list[int] = []

    def named(name: str) -> Callable[[], None]:
        return lambda: calls.append(name)

    def on_round(done: int) -> None:
        rounds_done.append(done)
        calls.append("|")

    time_interleaved(
        {name: named(name) for name in "abc"},
        device="cpu",
        rounds=4,
        warmup_s=0.0,
        sample_s=0.0,
        on_round=on_round,
    )
    turns = ["".join(name for name, _ in itertools.groupby(part)) for part in "".join(calls).split("|")]
    assert turns[0].removeprefix("abc") == "abc"  # after the warm-up
    assert turns[1:4] == ["acb", "cab", "cba"]
    assert rounds_done == [1, 2, 3, 4]


def test_nothing_to_time_is_an_error() -> None:
    with pytest.raises(ValueError, match="got 0 callables"):
        time_interleaved({}, device="cpu")
    with pytest.raises(ValueError, match="0 rounds"):
        time_interleaved({"a": lambda: None}, device="cpu", rounds=0)


def test_host_time_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_time_us(Clock(monkeypatch).work(13), device="cpu", rounds=5) == pytest.approx(13)


@pytest.mark.parametrize("n", range(1, 13))
def test_interval_rank_against_every_outcome(n: int) -> None:
    """Each sample lies below or above the median with equal chance: count over all 2^n outcomes."""

    def coverage(rank: int) -> float:
        # The median is inside [rank-th smallest, rank-th largest] unless at most `rank` samples lie on one side of it.
        outcomes = itertools.product((0, 1), repeat=n)
        return sum(rank < sum(below) < n - rank for below in outcomes) / 2**n

    covering = [rank for rank in range(n // 2) if coverage(rank) >= 0.95]
    assert _interval_rank(n) == (max(covering) if covering else None)


def test_interval_covers_the_true_ratio_as_often_as_it_says() -> None:
    rng = random.Random(0)
    experiments, hits = 2000, 0
    for _ in range(experiments):
        b = samples(*(100 * rng.lognormvariate(0, 0.05) for _ in range(9)))
        a = samples(*(1.2 * y * rng.lognormvariate(0, 0.02) for y in b.samples_us))
        ratio = paired_ratio(a, b)
        assert ratio.low95 is not None and ratio.high95 is not None
        assert ratio.low95 <= ratio.median <= ratio.high95
        hits += ratio.low95 <= 1.2 <= ratio.high95
    assert hits / experiments == pytest.approx(0.961, abs=0.015)  # 1 - 2 * P(Binomial(9, 1/2) <= 1)


def test_ratios_are_paired_within_rounds() -> None:
    """The card slows down by 5 from round to round, and the ratio does not notice."""
    b = samples(*(100 * 5**r for r in range(6)))
    a = samples(*(110 * 5**r for r in range(6)))
    ratio = paired_ratio(a, b)
    assert [ratio.median, ratio.low95, ratio.high95] == pytest.approx([1.1] * 3)


def test_too_few_rounds_have_no_interval() -> None:
    ratio = paired_ratio(samples(1, 2, 3, 4, 5), samples(1, 1, 1, 1, 1))
    assert (ratio.median, ratio.low95, ratio.high95) == (3, None, None)


def test_what_does_not_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="equal rounds, got 2 and 1"):
        paired_ratio(samples(1, 2), samples(1))
    with pytest.raises(ValueError, match="graph and events"):
        paired_ratio(samples(1, method="graph"), samples(1))


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "method"), [(64, "graph"), (4096, "events")])
def test_methods_on_a_gpu(size: int, method: str) -> None:
    x = torch.randn(size, size, device="cuda", dtype=torch.float16)
    timed = time_interleaved({"one": lambda: x @ x, "two": lambda: x @ x @ x}, device="cuda", rounds=7)
    assert {t.method for t in timed.values()} == {method}
    assert timed["one"].l2_flushed == (method == "events")
    assert paired_ratio(timed["two"], timed["one"]).median == pytest.approx(2.0, rel=0.2)


@pytest.mark.gpu
def test_host_time_does_not_wait_for_the_device() -> None:
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)  # about 2 ms a product
    assert host_time_us(lambda: x @ x, device="cuda") < 200


@pytest.mark.gpu
def test_a_call_that_cannot_be_captured_is_named() -> None:
    """In a process of its own: a broken capture leaves torch's default random generator unusable behind it."""
    script = """
import torch
from warpwave.workbench.bench.timing import CaptureFailed, time_interleaved
x = torch.randn(64, device="cuda")
try:
    time_interleaved({"adder": lambda: x + x, "reader": lambda: x.sum().item()}, device="cuda", rounds=1)
except CaptureFailed as failure:
    print(failure.name, torch.cuda.current_stream() == torch.cuda.default_stream())
print(time_interleaved({"adder": lambda: x + x}, device="cuda", rounds=1)["adder"].method)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["reader", "True", "graph"], done.stderr
