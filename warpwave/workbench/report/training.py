"""Loss curves of training runs on one HTML page: each run's losses, and their differences from the first run's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

import warpwave
from warpwave.errors import InvalidInput
from warpwave.workbench.report.command import save
from warpwave.workbench.report.figures import figure, tick
from warpwave.workbench.report.page import HERE, template
from warpwave.workbench.report.plots import Frame, key
from warpwave.workbench.report.svg import Scale, Svg, dash, line_class, linear_ticks

WIDTH, HEIGHT = 980, 330


@dataclass(frozen=True)
class TrainingRun:
    """A training run.

    Attributes:
        name: what distinguishes it from the other runs.
        losses: of each step.
        tokens_per_second: its speed.
        peak_mib: the most memory that it held at once, or None if that is not known.
    """

    name: str
    losses: Sequence[float]
    tokens_per_second: float
    peak_mib: float | None = None


def write_training_page(path: Path, title: str, runs: Sequence[TrainingRun]) -> Path:
    """Writes the page of some runs of the same data. It replaces a file only if that is an unedited report.

    Returns:
        Its absolute path.

    Raises:
        InvalidInput: as `training_page`.
        CannotWrite: the path cannot be written.
    """
    save(path, training_page(title, runs))
    return path.resolve()


def training_page(title: str, runs: Sequence[TrainingRun]) -> str:
    """Returns the page.

    Raises:
        InvalidInput: there are fewer than two runs, their numbers of steps differ or are below two, two of them have
            one name, or a loss is negative or not finite.
    """
    steps = {len(run.losses) for run in runs}
    if len(runs) < 2 or len(steps) > 1 or min(steps) < 2:
        raise InvalidInput(
            f"there are {len(runs)} runs of {sorted(steps)} steps; a page compares at least two runs of equally many "
            "steps, at least two"
        )
    if len({run.name for run in runs}) < len(runs):
        raise InvalidInput(f"the runs are named {[run.name for run in runs]}; each needs another name")
    for run in runs:
        if not all(math.isfinite(loss) and loss >= 0 for loss in run.losses):
            raise InvalidInput(f"a loss of {run.name} is negative or not finite; it cannot be drawn")
    first = runs[0]
    losses = {run.name: list(run.losses) for run in runs}
    differences = {run.name: [abs(a - b) for a, b in zip(run.losses, first.losses, strict=True)] for run in runs[1:]}
    return template("training.html").render(
        title=title,
        version=warpwave.__version__,
        style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
        runs=runs,
        largest={name: figure(max(found)) for name, found in differences.items()},
        key=lambda series: Markup(key(series)),
        figure=figure,
        losses=Markup(over_steps(losses, list(losses), "loss", name="losses")),
        differences=Markup(over_steps(differences, list(losses), "difference", name="differences")),
    )


def over_steps(curves: dict[str, list[float]], order: Sequence[str], what: str, *, name: str) -> str:
    """Draws one value for each step.

    Args:
        curves: the values of each run; none is negative.
        order: all runs, in the order of colors.
        what: the name of the vertical axis.
        name: an id that is unique on the page.
    """
    count = len(next(iter(curves.values())))
    ticks = linear_ticks(max(max(values) for values in curves.values()))
    frame = Frame(64, 12, WIDTH - 14, HEIGHT - 44)
    x, y = Scale(1, count, frame.left, frame.right), Scale(0, ticks[-1], frame.bottom, frame.top)
    ends = "; ".join(f"{run} {figure(values[0])} to {figure(values[-1])}" for run, values in curves.items())
    svg = Svg(WIDTH, HEIGHT, title=f"{what} over {count} steps: {ends}", name=name)
    for value in ticks:
        svg.line(frame.left, y(value), frame.right, y(value), "axis" if value == 0 else "grid")
        svg.text(frame.left - 7, y(value) + 4, tick(value), anchor="end")
    for step in sorted({1, *(round(value) for value in linear_ticks(count) if 1 < value <= count)}):
        svg.line(x(step), frame.bottom, x(step), frame.bottom + 4, "axis")
        svg.text(x(step), frame.bottom + 17, f"{step:,}", anchor="middle")
    svg.text((frame.left + frame.right) / 2, HEIGHT - 7, "step", anchor="middle")
    svg.text(11, (frame.top + frame.bottom) / 2, what, anchor="middle", turn=-90)
    for run, values in curves.items():
        series = order.index(run)
        svg.polyline([(x(i), y(v)) for i, v in enumerate(values, start=1)], line_class(series), dash(series))
    return str(svg)
