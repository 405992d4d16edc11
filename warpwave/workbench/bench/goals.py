"""Goals: the result that a run was meant to show, stated beforehand, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warpwave.workbench.bench.records import Measurement
    from warpwave.workbench.bench.timing import Ratio

FEWEST_ROUNDS = 9  # a verdict needs at least this many
SLACK = 0.02  # the interval's lower end may lie this far below the goal


@dataclass(frozen=True)
class Goal:
    """A goal of one of two kinds.

    Attributes:
        ratio: speed relative to the fastest peer that is accurate enough.
        over_launch_us: microseconds above an empty kernel in the same harness.
    """

    ratio: float | None = None
    over_launch_us: float | None = None

    def __str__(self) -> str:
        return f"{self.ratio:g} x" if self.ratio is not None else f"empty kernel + {self.over_launch_us:g} us"


@dataclass(frozen=True)
class GoalVerdict:
    """The verdict on a goal.

    Attributes:
        met: None if the run cannot decide it.
        reason: why the run cannot decide it, else empty.
        ratio: speed relative to `against`: above 1 is faster.
        against: the contender it was compared with.
    """

    met: bool | None
    reason: str = ""
    ratio: Ratio | None = None
    against: str = ""

    def __str__(self) -> str:
        return self.reason if self.met is None else "met" if self.met else "missed"


def best_peer(measurements: Sequence[Measurement]) -> Measurement | None:
    """Returns the fastest peer whose result passed, among measurements of one case in one mode."""
    accurate = [m for m in measurements if m.timing is not None and m.is_peer and m.verdict and m.verdict.passed]
    return min(accurate, key=lambda m: m.timing.median_us if m.timing else 0.0, default=None)


def judge(contender: Measurement, measurements: Sequence[Measurement]) -> GoalVerdict:
    """Decides whether the goal was met.

    A ratio is met if the median of the paired ratios reaches it and the interval's lower end is at most 0.02 below.

    Args:
        contender: the measurement that has the goal.
        measurements: all measurements of its case, in its mode and its run.
    """
    from warpwave.workbench.bench.timing import ratio_if_paired

    goal = contender.goal
    if goal is None:
        return GoalVerdict(None, "no goal")
    if contender.timing is None:
        return GoalVerdict(False, ratio=None, against=contender.refusal)
    if contender.timing.method == "host clock":
        return GoalVerdict(None, "goals are for GPUs")
    if len(contender.timing.samples_us) < FEWEST_ROUNDS:
        return GoalVerdict(None, f"needs {FEWEST_ROUNDS} rounds")
    if goal.over_launch_us is not None:
        empty = next((m for m in measurements if m.is_yardstick and m.timing is not None), None)
        if empty is None or empty.timing is None:
            return GoalVerdict(None, "no empty kernel was timed")
        allowed = empty.timing.median_us + goal.over_launch_us
        ratio = ratio_if_paired(empty.timing, contender.timing)
        return GoalVerdict(contender.timing.median_us <= allowed, "", ratio, empty.contender)
    peer = best_peer(measurements)
    if peer is None or peer.timing is None or goal.ratio is None:
        return GoalVerdict(None, "no peer could be timed")
    ratio = ratio_if_paired(peer.timing, contender.timing)
    if ratio is None:
        return GoalVerdict(None, "its rounds and the best peer's do not pair")
    met = ratio.median >= goal.ratio and ratio.low95 is not None and ratio.low95 >= goal.ratio - SLACK
    return GoalVerdict(met, "", ratio, peer.contender)
