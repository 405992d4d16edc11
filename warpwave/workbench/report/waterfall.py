"""The losses of our cases, as waterfalls and as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from warpwave.workbench.explain.recorded_time import losses_of
from warpwave.workbench.model.losses import REMEDIES, Losses
from warpwave.workbench.model.steps import LOSSES
from warpwave.workbench.report.figures import figure, percent
from warpwave.workbench.report.machines import Machine
from warpwave.workbench.report.verdicts import CaseResult

NAMES = (*LOSSES, "remainder")


@dataclass(frozen=True)
class Segment:
    """A loss on the common axis.

    Attributes:
        name: name of the loss.
        number: its index in `NAMES`, for its color.
        start, wide: in percent of the axis. The axis is the logarithm of time over bound, so lengths are factors.
        title: the figures.
    """

    name: str
    number: int
    start: float
    wide: float
    title: str


@dataclass(frozen=True)
class Fall:
    """The losses of one case, from the bound to the measured time.

    Attributes:
        case: its name.
        kernel: the kernel that ran.
        losses: all losses.
        segments: the visible ones.
    """

    case: str
    kernel: str
    losses: Losses
    segments: tuple[Segment, ...]


def _of(case: CaseResult, machine: Machine) -> Losses | None:
    return None if case.ours is None else losses_of(case.ours, machine.gpu)


def falls(cases: Sequence[CaseResult], machine: Machine) -> list[Fall]:
    """Returns every case whose time can be split into losses, on a common axis."""
    found = [(case, losses) for case in cases if (losses := _of(case, machine)) is not None]
    if not found:
        return []
    # A factor above 32 would leave no room for the others, so the axis ends there; the figures are still complete.
    longest = min(
        math.log(32), max(math.log(max(x.after_us for x in losses.losses) / losses.bound_us) for _, losses in found)
    )
    made = []
    for case, losses in found:
        segments = []
        for number, loss in enumerate(losses.losses):
            begin, end = sorted(math.log(t / losses.bound_us) / longest * 100 for t in (loss.before_us, loss.after_us))
            begin, end = min(begin, 100.0), min(end, 100.0)
            if end - begin >= 0.3:
                factor = f"{loss.name} x {loss.factor:.2f}: {figure(loss.before_us)} to {figure(loss.after_us)} µs"
                segments.append(Segment(loss.name, number, begin, end - begin, factor))
        assert case.ours is not None
        made.append(Fall(case.name, case.ours.kernel, losses, tuple(segments)))
    return made


def shown(found: Sequence[Fall]) -> list[tuple[int, str]]:
    """Returns number and name of the losses that any case shows, for the legend."""
    there = {segment.number for fall in found for segment in fall.segments}
    return [(number, name) for number, name in enumerate(NAMES) if number in there]


COLUMNS = (
    "case",
    "kernel",
    "µs",
    "bound µs",
    "x",
    "first to change",
    "lost by",
    "remainder",
    "of data sheet",
    "power-matched",
)
NOTE = (
    "Measured time over bound is exactly the product of the factors and the remainder. The factors are the model's "
    "losses between the data sheet's bound and the predicted time; the remainder is what the model did not predict. "
    "Power-matched is the bound at the clock that was read after the case's rounds. No share exceeds 100 %."
)


def rows(found: Sequence[Fall]) -> list[list[str]]:
    """Returns the cells of the table, in the order of `COLUMNS`."""
    cells = []
    for fall in found:
        named = [f"{loss.name} {loss.factor:.2f}" for loss in fall.losses.noticeable[:-1]]
        sheet, power = fall.losses.yardsticks
        cells.append(
            [
                fall.case,
                fall.kernel,
                figure(fall.losses.measured_us, 4),
                figure(fall.losses.bound_us, 4),
                f"{fall.losses.ratio:.2f}",
                "-" if fall.losses.largest is None else fall.losses.largest.name,
                " x ".join(named) or "-",
                f"{fall.losses.remainder:.2f}",
                percent(sheet.share),
                percent(power.share),
            ]
        )
    return cells


def note(found: Sequence[Fall]) -> str:
    """Returns the note of the table, and how to reduce the largest losses."""
    largest = dict.fromkeys(fall.losses.largest.name for fall in found if fall.losses.largest is not None)
    return " ".join([NOTE, *(f"{name[0].upper()}{name[1:]}: {REMEDIES[name]}." for name in largest)])
