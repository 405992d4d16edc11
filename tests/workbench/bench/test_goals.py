from dataclasses import replace

import pytest

from tests.workbench.bench.test_table import PROBLEM, measured, refused
from warpwave.workbench.bench.correctness import Verdict
from warpwave.workbench.bench.goals import Goal, best_peer, judge
from warpwave.workbench.bench.records import Measurement
from warpwave.workbench.bench.timing import Samples

PEER = measured("peer", 110.0)


def ours(ratios: list[float], goal: Goal = Goal(ratio=1.1)) -> Measurement:  # noqa: B008
    """Ours, as much faster than the peer in each round as planted."""
    times = tuple(110.0 / ratio for ratio in ratios)
    return replace(measured("warpwave auto", 1.0), timing=Samples(times, "events", 20, 1, True), goal=goal)


@pytest.mark.parametrize(
    ("ratios", "met"),
    [
        ([1.1] * 9, True),
        ([1.0999] * 9, False),
        ([1.2] * 9, True),
        ([1.05, 1.05] + [1.2] * 7, False),  # the second smallest of nine is the lower bound: 1.05 < 1.08
        ([1.05, 1.081] + [1.2] * 7, True),
        ([1.08] * 5 + [1.3] * 4, False),  # the median misses
    ],
)
def test_median_and_lower_bound_decide(ratios: list[float], met: bool) -> None:
    m = ours(ratios)
    verdict = judge(m, [m, PEER])
    assert verdict.met is met and verdict.against == "peer" and str(verdict) == ("met" if met else "missed")


def test_the_best_accurate_peer_counts() -> None:
    wrong = replace(measured("quick and wrong", 1.0), verdict=Verdict(False, "no", 1.0, 1.0, 1e-3, 2e-3, 64))
    yardstick = replace(measured("yardstick empty_kernel", 0.5), verdict=None)
    field = [measured("slow", 500.0), PEER, wrong, yardstick, refused("absent", "not here"), ours([2.0] * 9)]
    best = best_peer(field)
    assert best is not None and best.contender == "peer"
    assert best_peer([wrong, yardstick]) is None


def test_above_an_empty_kernel() -> None:
    empty = replace(measured("yardstick empty_kernel", 1.5), verdict=None)
    goal = Goal(over_launch_us=2.0)
    for us, met in ((3.4, True), (3.6, False)):
        m = ours([110.0 / us] * 9, goal)
        assert judge(m, [m, empty, PEER]).met is met
    assert judge(m, [m, PEER]).reason == "no empty kernel was timed"


def test_what_a_run_cannot_tell() -> None:
    m = ours([2.0] * 8)
    assert judge(m, [m, replace(PEER, timing=Samples((110.0,) * 8, "events", 20, 1, True))]).reason == "needs 9 rounds"
    m = replace(m, timing=Samples((1.0,) * 9, "host clock", 20, 1, False))
    assert judge(m, [m, PEER]).reason == "goals are for GPUs"
    assert judge(ours([2.0] * 9), [ours([2.0] * 9)]).reason == "no peer could be timed"
    longer = replace(PEER, timing=Samples((110.0,) * 10, "events", 20, 1, True))
    assert judge(ours([2.0] * 9), [longer]).reason == "its rounds and the best peer's do not pair"
    launch, empty = Goal(over_launch_us=2.0), replace(longer, contender="yardstick empty_kernel", verdict=None)
    verdict = judge(ours([2.0] * 9, launch), [empty])
    assert verdict.met is True and verdict.ratio is None
    assert judge(replace(m, goal=None), [PEER]).met is None


def test_no_time_is_a_goal_missed() -> None:
    m = Measurement(
        suite="s", case="one", problem=PROBLEM, contender="warpwave auto", refusal="too large", goal=Goal(ratio=1.0)
    )
    assert judge(m, [m, PEER]).met is False
