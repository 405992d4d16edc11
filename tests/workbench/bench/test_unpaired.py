import itertools
import random

import pytest

from warpwave.workbench.bench import unpaired
from warpwave.workbench.bench.timing import Ratio
from warpwave.workbench.bench.unpaired import (
    Spread,
    _interval_rank,
    _rank_sum_counts,
    outcome,
    student_t,
    unpaired_ratio,
)


@pytest.mark.parametrize(("n", "m"), [(50, 50), (40, 60), (10, 240), (9, 277), (6, 400), (4, 620)])
def test_many_orders_are_told_by_the_normal_distribution(n: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the safe side, and by hardly more than a hundredth of the pairs' number."""
    monkeypatch.setattr(unpaired, "MOST_COUNTED", n * m)
    counted = _interval_rank(n, m, 0.95)
    monkeypatch.setattr(unpaired, "MOST_COUNTED", 0)
    told = _interval_rank(n, m, 0.95)
    assert counted is not None and told is not None and counted - 0.01 * n * m < told <= counted


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (4, 4), (5, 3)])
def test_rank_sums_against_every_order(n: int, m: int) -> None:
    counts = [0] * (n * m + 1)
    for places in itertools.combinations(range(n + m), n):
        others = [place for place in range(n + m) if place not in places]
        counts[sum(a > b for a in places for b in others)] += 1
    assert _rank_sum_counts(n, m) == counts


def test_a_published_interval() -> None:
    # n = m = 9: P(U <= 17) = 0.0200, P(U <= 18) = 0.0252 one-sided, so the 18th of the 81 on either side.
    assert _interval_rank(9, 9, 0.95) == 17
    assert _interval_rank(3, 3, 0.95) is None and _interval_rank(4, 4, 0.95) == 0


def test_interval_covers_the_true_ratio_as_often_as_it_says() -> None:
    rng = random.Random(0)
    experiments, hits = 1500, 0
    for _ in range(experiments):
        a = [1.2 * rng.lognormvariate(0, 0.03) for _ in range(9)]
        b = [rng.lognormvariate(0, 0.03) for _ in range(9)]
        ratio = unpaired_ratio(a, b)
        assert ratio.low95 is not None and ratio.high95 is not None
        hits += ratio.low95 <= 1.2 <= ratio.high95
    assert hits / experiments == pytest.approx(0.96, abs=0.015)


def test_too_few_samples_have_no_interval() -> None:
    ratio = unpaired_ratio([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    assert (ratio.median, ratio.low95, ratio.high95) == (2.0, None, None)
    assert outcome(ratio) == "UNCLEAR"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.03, 1.10, "FASTER"),
        (1.001, 1.05, "FASTER"),
        (0.90, 0.97, "SLOWER"),
        (0.99, 1.01, "SAME"),
        (1.001, 1.019, "SAME"),  # a difference, and too small to matter
        (0.98, 1.01, "UNCLEAR"),  # 1 / 1.02 = 0.9804
        (0.99, 1.05, "UNCLEAR"),
    ],
)
def test_outcomes(low: float, high: float, expected: str) -> None:
    assert outcome(Ratio((low + high) / 2, low, high)) == expected


def test_a_wider_margin_takes_in_more() -> None:
    assert outcome(Ratio(1.0, 0.96, 1.04), margin=0.05) == "SAME"
    assert outcome(Ratio(1.0, 0.96, 1.04), margin=0.03) == "UNCLEAR"


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.706), (3, 3.182), (5, 2.571), (6, 2.447), (10, 2.228), (30, 2.042), (1000, 1.962)]
)
def test_student_t(degrees: int, expected: float) -> None:
    assert student_t(degrees) == pytest.approx(expected, rel=0.005)


def test_unchanged_code_is_rarely_called_changed() -> None:
    """Runs whose level moves by 3 % for each contender apart, rounds that scatter by 0.3 %: four peers tell."""
    rng = random.Random(1)
    experiments, alarms, naive_alarms = 400, 0, 0
    for _ in range(experiments):
        runs = []
        for _ in range(2):
            levels = [rng.lognormvariate(0, 0.03) for _ in range(5)]
            runs.append([[level * rng.lognormvariate(0, 0.003) for _ in range(9)] for level in levels])
        (a, *peers_a), (b, *peers_b) = runs
        spread = Spread.of([[sum(x) / sum(y) for x, y in zip(peers_a, peers_b, strict=True)]])
        ratio = unpaired_ratio(a, b)
        naive_alarms += outcome(ratio) in ("FASTER", "SLOWER")
        alarms += outcome(spread.widen(ratio, 4)) in ("FASTER", "SLOWER")
    assert naive_alarms / experiments > 0.5
    assert alarms / experiments < 0.08


def test_nothing_known_of_the_spread_widens_nothing() -> None:
    ratio = Ratio(1.1, 1.05, 1.15)
    assert Spread.of([[1.0], []]).widen(ratio, 1) == ratio
    wide = Spread.of([[1.0, 1.1, 0.9]]).widen(ratio, 3)
    assert wide.low95 is not None and wide.high95 is not None
    assert wide.low95 < 1.05 and wide.high95 > 1.15 and wide.median == 1.1
