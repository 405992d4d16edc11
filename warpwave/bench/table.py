"""Measurements as text: one table a case, and a summary of every case against its best peer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from warpwave.bench.records import Measurement
from warpwave.bench.timing import Ratio, Samples, paired_ratio

OURS = "warpwave "  # how the names of our own contenders begin


@dataclass(frozen=True)
class Table:
    """Cells as text, and notes to print below them."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: tuple[str, ...] = ()


def case_table(measurements: Sequence[Measurement]) -> Table:
    """All contenders of one case. Who was not timed is listed below with the reason, never left out."""
    ours = [m for m in measurements if _is_ours(m) and m.timing is not None]
    speeds = (f"{m.contender.removeprefix(OURS)} is x as fast [95 %]" for m in ours)
    header = ("contender", "ran", "TFLOP/s", "GB/s", "us", "host us", "error / model", *speeds)
    rows = []
    for m in measurements:
        if m.timing is None:
            continue
        ratios = tuple("" if m is mine else _ratio(paired_ratio(m.timing, _timing(mine))) for mine in ours)
        rows.append(
            (
                m.contender,
                m.kernel,
                _figure(m.tflops),
                _figure(m.bandwidth_gbps),
                _figure(m.timing.median_us),
                "" if m.host is None else f"{m.host.median_us:.1f}",
                "" if m.verdict is None or m.verdict.error_ratio is None else f"{m.verdict.error_ratio:.2f}",
                *ratios,
            )
        )
    refusals: dict[str, list[str]] = {}
    for m in measurements:
        if m.refusal:
            refusals.setdefault(m.refusal, []).append(m.contender)
    notes = tuple(f"{', '.join(names)}: {reason}" for reason, names in refusals.items())
    timed = next((m.timing for m in measurements if m.timing is not None), None)
    how = "" if timed is None else f" ({_how(timed)})"
    return Table(measurements[0].case + how, header, rows, notes)


def summary_tables(measurements: Sequence[Measurement]) -> list[Table]:
    """For each kernel of ours: its speed over the best peer's, case by case, losses included."""
    cases: dict[str, list[Measurement]] = {}
    for m in measurements:
        if m.timing is not None:
            cases.setdefault(m.case, []).append(m)
    contenders = dict.fromkeys(m.contender for m in measurements if _is_ours(m))
    tables = []
    for contender in contenders:
        rows: list[tuple[str, ...]] = []
        ratios: dict[str, float] = {}
        for case, timed in cases.items():
            mine = next((m for m in timed if m.contender == contender), None)
            peers = [m for m in timed if not _is_ours(m)]
            if mine is None or not peers:
                continue
            best = min(peers, key=lambda m: _timing(m).median_us)
            ratio = paired_ratio(_timing(best), _timing(mine))
            ratios[case] = ratio.median
            rows.append((case, mine.kernel, best.contender, _ratio(ratio)))
        if ratios:
            worst = min(ratios, key=ratios.__getitem__)
            note = (
                f"geometric mean {geometric_mean(ratios.values()):.3f} over {len(ratios)} cases, "
                f"worst {ratios[worst]:.3f} ({worst})"
            )
            header = ("case", "kernel", "best peer", "x as fast [95 %]")
            tables.append(Table(f"{contender} against the best peer", header, rows, (note,)))
    return tables


def print_table(table: Table) -> None:
    """To standard output: drawn by rich on a terminal, plain columns elsewhere."""
    if not sys.stdout.isatty():
        print(plain(table))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(title=Text(table.title), title_justify="left", box=box.SIMPLE_HEAD)
    for column in range(len(table.header)):
        drawn.add_column(Text(table.header[column]), justify="right" if _is_numeric(table, column) else "left")
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    console = Console()
    console.print(drawn)
    for note in table.notes:
        console.print(Text(f"  {note}"))


def plain(table: Table) -> str:
    """The table in aligned columns, without colour or lines."""
    columns = range(len(table.header))
    lines = [table.header, *table.rows] if table.rows else []
    widths = [max((len(line[c]) for line in lines), default=0) for c in columns]
    text = [table.title]
    for line in lines:
        cells = [line[c].rjust(widths[c]) if _is_numeric(table, c) else line[c].ljust(widths[c]) for c in columns]
        text.append("  " + "  ".join(cells).rstrip())
    text += [f"  {note}" for note in table.notes]
    return "\n".join(text) + "\n"


def _is_ours(m: Measurement) -> bool:
    return m.contender.startswith(OURS)


def _timing(m: Measurement) -> Samples:
    assert m.timing is not None  # callers keep only what was timed
    return m.timing


def _is_numeric(table: Table, column: int) -> bool:
    return any(row[column][:1].isdigit() for row in table.rows)


def _figure(value: float | None) -> str:
    """Four digits, and no exponent where a reader would have to count."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _how(timing: Samples) -> str:
    flushed = ", L2 flushed" if timing.l2_flushed else ""
    return f"{timing.method}{flushed}, median of {len(timing.samples_us)} rounds"


def _ratio(ratio: Ratio) -> str:
    if ratio.low95 is None or ratio.high95 is None:
        return f"{ratio.median:.3f} [needs 6 rounds]"
    return f"{ratio.median:.3f} [{ratio.low95:.3f}, {ratio.high95:.3f}]"
