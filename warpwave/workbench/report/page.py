"""The report as one HTML file: without scripts or network, printable, with a light and a dark theme."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from warpwave.workbench.report import plots
from warpwave.workbench.report.content import MachineSection, Report, Table, report
from warpwave.workbench.report.curves import Ceiling, Family, RooflineData
from warpwave.workbench.report.machines import Source
from warpwave.workbench.report.svg import Scale
from warpwave.workbench.report.verdicts import CaseResult, how_fast
from warpwave.workbench.report.waterfall import shown

LARGEST_BYTES = 500_000
SHORT_GROUP = 6  # cases; a longer group is collapsed
ALIKE = 3  # this many cases without a time for the same reason share a row of the list
WRAPPED = ("arithmetic", "first to change", "lost by", "where", "why")  # columns whose text may break
HERE = Path(__file__).parent


class TooLarge(ValueError):
    """The page would be too large. The message gives the next step."""


def html(sources: Sequence[Source]) -> str:
    """Returns the page of all sources; its tables are shortened if it would otherwise be too large.

    Raises:
        TooLarge: the shortened page is too large.
    """
    size = 0
    for shorten in (False, True):
        page = render(report(sources, shorten=shorten))
        size = len(page.encode())
        if size <= LARGEST_BYTES:
            return page
    raise TooLarge(
        f"the report would have {size / 1000:,.0f} KB; the limit is {LARGEST_BYTES / 1000:,.0f} KB, so that browsers "
        "and mail can handle it; report fewer files at once"
    )


def template(name: str) -> jinja2.Template:
    """Returns a template of this folder."""
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader(HERE),
    )
    return environment.get_template(name)


def render(content: Report) -> str:
    """Returns the page of a report."""
    return template("template.html").render(
        report=content,
        style=Markup((HERE / "style.css").read_text(encoding="utf-8")),  # from this package, not from a record
        table_class=table_class,
        is_ours=lambda name: name.startswith("warpwave "),
        verdict_axis=VerdictAxis,
        parts=parts,
        case_groups=case_groups,
        case_numbers=case_numbers,
        roofline=lambda *args, **kwargs: Markup(plots.roofline(*args, **kwargs)),
        family=lambda *args, **kwargs: Markup(plots.family(*args, **kwargs)),
        key=lambda *args, **kwargs: Markup(plots.key(*args, **kwargs)),
        ceilings_by=ceilings_by,
        highest=highest,
        shown=shown,
    )


def table_class(table: Table) -> str:
    """Returns the classes of a table: t1, t2, ... for columns of text, w1, w2, ... for columns whose text may wrap."""
    columns = list(enumerate(table.columns, start=1))
    text = [f"t{i}" for i, column in columns if not column.is_figure]
    return " ".join(text + [f"w{i}" for i, column in columns if column.name in WRAPPED])


# Parts ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One part of a machine's section: an entry of the contents.

    Attributes:
        name: the end of its anchor; unique in the section.
        title: its heading.
        remark: text of its summary beside the heading.
        table: the table it holds, or None.
    """

    name: str
    title: str
    remark: str = ""
    table: Table | None = None


def parts(section: MachineSection) -> list[Part]:
    """Returns the parts of a machine's section, in the order of the page."""
    found = [Part("cases", "Case by case")]
    if section.roofline.points:
        found.append(Part("roofline", "Roofline" if section.roofline.ceilings else "Speed by intensity"))
    elif section.rates_notes:
        found.append(Part("rates", "Rates of this machine"))
    if section.families:
        found.append(Part("length", "Over length", f"{len(section.families)} panels"))
    if section.falls:
        found.append(Part("falls", "From the bound to the clock", f"{len(section.falls)} cases"))
    for table in (*section.tables, section.bounds, section.untimed):
        if table is not None:
            name = re.sub(r"[^a-z]+", "-", table.title.lower()).strip("-")
            found.append(Part(name, table.title, f"{table.rows} rows", table))
    return [*found, Part("environment", "Environment"), Part("reproduce", "To reproduce")]


@dataclass(frozen=True)
class Untimed:
    """Cases that have no time of ours for the same reason."""

    numbers: str
    cases: Sequence[str]
    sentence: str


@dataclass(frozen=True)
class CaseGroup:
    """The cases of one suite in one mode.

    Attributes:
        title: the suite, and the mode if it is not the default.
        summary: the outcome in one line.
        cases: number and result of each case that has a row of its own.
        untimed: the other cases, which have no time for a reason that several of them share.
        is_short: whether the list is initially open.
    """

    title: str
    summary: str
    cases: Sequence[tuple[int, CaseResult]]
    untimed: Sequence[Untimed]
    is_short: bool


def case_groups(cases: Sequence[CaseResult]) -> list[CaseGroup]:
    """Returns the cases suite by suite, numbered through."""
    groups: dict[tuple[str, str], list[tuple[int, CaseResult]]] = {}
    for number, case in enumerate(cases, start=1):
        groups.setdefault(case.timing_group[1:], []).append((number, case))
    found = []
    for (suite, mode), members in groups.items():
        alike: dict[str, list[tuple[int, CaseResult]]] = {}
        for number, case in members:
            if case.word == "NOT TIMED":
                alike.setdefault(case.reason, []).append((number, case))
        together = [numbered for numbered in alike.values() if len(numbered) >= ALIKE]
        hidden = {number for numbered in together for number, _ in numbered}
        title = suite or "cases"
        found.append(
            CaseGroup(
                title=f"{title} ({mode})" if mode not in ("auto", "") else title,
                summary=" ".join([f"{len(members)} cases." if len(members) > 1 else "1 case.", *_summary(members)]),
                cases=[(number, case) for number, case in members if number not in hidden],
                untimed=[_untimed(numbered) for numbered in together],
                is_short=len(members) - len(hidden) <= SHORT_GROUP,
            )
        )
    return found


def _summary(members: Sequence[tuple[int, CaseResult]]) -> list[str]:
    """Returns the first sentences of a group's outcome."""
    return how_fast([case for _, case in members])[:2]


def _untimed(numbered: Sequence[tuple[int, CaseResult]]) -> Untimed:
    first, last = numbered[0][0], numbered[-1][0]
    return Untimed(f"{first}-{last}", [case.name for _, case in numbered], f"No time: {numbered[0][1].reason}.")


def case_numbers(cases: Sequence[CaseResult]) -> dict[str, int]:
    """Returns the number of each case, by name."""
    return {case.name: number for number, case in enumerate(cases, start=1)}


def ceilings_by(data: RooflineData) -> list[tuple[str, list[Ceiling]]]:
    """Returns the ceilings of each set of rates."""
    names = dict.fromkeys(ceiling.rates for ceiling in data.ceilings)
    return [(name, [c for c in data.ceilings if c.rates == name]) for name in names]


def highest(families: Sequence[Family], unit: str) -> float:
    """Returns the largest figure of all families of a unit, so that their panels share one scale."""
    return max(y for f in families if f.unit == unit for curve in f.curves.values() for _, y in curve)


@dataclass(frozen=True)
class VerdictAxis:
    """Places of ratios on the common axis of the verdicts, in percent of its width."""

    cases: Sequence[CaseResult]

    @property
    def _scale(self) -> Scale | None:
        ends = [1.0]
        for case in self.cases:
            if case.ratio is not None:
                ends += [x for x in (case.ratio.low95, case.ratio.median, case.ratio.high95) if x is not None]
        if len(ends) == 1:
            return None
        # At least from 0.8 to 1.25, so that a difference of one per cent looks small.
        return Scale(min(0.8, *ends) / 1.03, max(1.25, *ends) * 1.03, 0, 100, log=True)

    @property
    def one(self) -> str:
        """The place of the ratio 1."""
        return "" if self._scale is None else f"{self._scale(1.0):.1f}%"

    @property
    def ticks(self) -> list[tuple[str, str]]:
        """Texts and places of the ticks; few enough not to overlap."""
        scale = self._scale
        if scale is None:
            return []
        wide = math.log(scale.high / scale.low)
        steps = (0.8, 0.9, 1, 1.1, 1.25) if wide < 0.6 else (0.5, 0.7, 1, 1.4, 2) if wide < 1.8 else ()
        values = [float(s) for s in steps] or [10.0**n * f for n in range(-3, 4) for f in (1, 3)]
        return [(f"{v:g}", f"{scale(v):.1f}%") for v in values if scale.low <= v <= scale.high]

    def places(self, case: CaseResult) -> str:
        """Returns the case's dot and interval as style properties; empty without a ratio."""
        scale, ratio = self._scale, case.ratio
        if scale is None or ratio is None:
            return ""
        places = f"--at:{scale(ratio.median):.1f}%"
        if ratio.low95 is not None and ratio.high95 is not None:
            low, high = scale(ratio.low95), scale(ratio.high95)
            places += f";--from:{low:.1f}%;--wide:{high - low:.1f}%"
        return places
