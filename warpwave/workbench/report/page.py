"""The report as one HTML file: no script, no network, readable on paper and in either theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from warpwave.workbench.report import plots
from warpwave.workbench.report.content import Report, Table, report
from warpwave.workbench.report.curves import Ceiling, Family, RooflineData
from warpwave.workbench.report.machines import Source
from warpwave.workbench.report.svg import Scale
from warpwave.workbench.report.verdicts import CaseResult
from warpwave.workbench.report.waterfall import shown

LARGEST_BYTES = 500_000
HERE = Path(__file__).parent


class TooLarge(ValueError):
    """The page would be larger than a page should be. The message says what to do."""


def html(sources: Sequence[Source]) -> str:
    """The page of all sources, its tables shortened where it would be too large otherwise.

    Raises:
        TooLarge: even so.
    """
    size = 0
    for shorten in (False, True):
        page = render(report(sources, shorten=shorten))
        size = len(page.encode())
        if size <= LARGEST_BYTES:
            return page
    raise TooLarge(
        f"the report would have {size / 1000:,.0f} KB, and {LARGEST_BYTES / 1000:,.0f} are the most that a browser or "
        "a mail carries lightly; report fewer files at once"
    )


def render(content: Report) -> str:
    """The page of these facts."""
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader(HERE),
    )
    return environment.get_template("template.html").render(
        report=content,
        style=Markup((HERE / "style.css").read_text(encoding="utf-8")),  # ours, not a record's
        table_class=table_class,
        is_ours=lambda name: name.startswith("warpwave "),
        verdict_axis=VerdictAxis,
        roofline=lambda *args, **kwargs: Markup(plots.roofline(*args, **kwargs)),
        family=lambda *args, **kwargs: Markup(plots.family(*args, **kwargs)),
        key=lambda series: Markup(plots.key(series)),
        ceilings_by=ceilings_by,
        highest=highest,
        shown=shown,
    )


def table_class(table: Table) -> str:
    """Classes that say which columns hold text: one letter a column, not one a cell."""
    text = [f"t{i}" for i, column in enumerate(table.columns, start=1) if not column.is_figure]
    names = [column.name for column in table.columns]
    if "arithmetic" in names:
        text.append("arithmetic")
    if "why" in names or "lost by" in names:
        text.append("wrap")
    return " ".join(text)


def ceilings_by(data: RooflineData) -> list[tuple[str, list[Ceiling]]]:
    """The ceilings of each set of rates."""
    names = dict.fromkeys(ceiling.rates for ceiling in data.ceilings)
    return [(name, [c for c in data.ceilings if c.rates == name]) for name in names]


def highest(families: Sequence[Family], unit: str) -> float:
    """The largest figure of all families of a unit, so that their panels compare."""
    return max(y for f in families if f.unit == unit for curve in f.curves.values() for _, y in curve)


@dataclass(frozen=True)
class VerdictAxis:
    """Where ratios lie between the ends of the verdicts' common axis, in percent of its width."""

    cases: Sequence[CaseResult]

    @property
    def _scale(self) -> Scale | None:
        ends = [1.0]
        for case in self.cases:
            if case.ratio is not None:
                ends += [x for x in (case.ratio.low95, case.ratio.median, case.ratio.high95) if x is not None]
        if len(ends) == 1:
            return None
        # At least from 0.8 to 1.25, or a difference of one per cent would look like a chasm.
        return Scale(min(0.8, *ends) / 1.03, max(1.25, *ends) * 1.03, 0, 100, log=True)

    @property
    def one(self) -> str:
        """Where the speeds are equal."""
        return "" if self._scale is None else f"{self._scale(1.0):.1f}%"

    @property
    def ticks(self) -> list[tuple[str, str]]:
        """Texts and places; few enough to stand apart."""
        scale = self._scale
        if scale is None:
            return []
        wide = math.log(scale.high / scale.low)
        steps = (0.8, 0.9, 1, 1.1, 1.25) if wide < 0.6 else (0.5, 0.7, 1, 1.4, 2) if wide < 1.8 else ()
        values = [float(s) for s in steps] or [10.0**n * f for n in range(-3, 4) for f in (1, 3)]
        return [(f"{v:g}", f"{scale(v):.1f}%") for v in values if scale.low <= v <= scale.high]

    def places(self, case: CaseResult) -> str:
        """The case's dot and interval as style properties; empty without a ratio."""
        scale, ratio = self._scale, case.ratio
        if scale is None or ratio is None:
            return ""
        places = f"--at:{scale(ratio.median):.1f}%"
        if ratio.low95 is not None and ratio.high95 is not None:
            low, high = scale(ratio.low95), scale(ratio.high95)
            places += f";--from:{low:.1f}%;--wide:{high - low:.1f}%"
        return places
