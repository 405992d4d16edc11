"""Measurements as text: one table per case and mode, and a summary of every case against its best peer."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import Literal

from warpwave.workbench.bench.goals import best_peer, judge
from warpwave.workbench.bench.records import OURS, Measurement
from warpwave.workbench.bench.timing import Ratio, Samples, paired_ratio
from warpwave.workbench.terminal import OutputLost, columns, printable, say

__all__ = ["OURS", "Table", "case_table", "case_tables", "plain", "print_table", "summary_tables"]

MODE_TITLES = {"eager": "eager, back to back", "graph": "in a CUDA graph", "streams": "on two streams at once"}


@dataclass(frozen=True)
class Table:
    """Cells as text, and notes to print below them.

    Attributes:
        dispensable: headers of columns to leave out, in this order, if the terminal is too narrow.
    """

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: tuple[str, ...] = ()
    dispensable: tuple[str, ...] = ()


def case_tables(measurements: Sequence[Measurement]) -> list[Table]:
    """Returns a table for each mode of a case. Contenders without any time are listed below the first table."""
    modes = list(dict.fromkeys(m.mode for m in measurements))
    one_stream = {m.contender: m.timing for m in measurements if m.mode == "graph" and m.timing is not None}
    return [
        case_table([m for m in measurements if m.mode == mode], one_stream if mode == "streams" else None)
        for mode in modes
    ]


def case_table(measurements: Sequence[Measurement], one_stream: dict[str, Samples] | None = None) -> Table:
    """Returns the contenders of one case in one mode. Contenders without a time are listed below with the reason.

    Args:
        measurements: the measurements of one case and mode.
        one_stream: times of the same calls on one stream, by contender, to compare with those on two.
    """
    ours = [m for m in measurements if m.is_ours and m.timing is not None]
    speeds = (f"{m.contender.removeprefix(OURS)} is x as fast [95 %]" for m in ours)
    streams = () if one_stream is None else ("against one stream",)
    header = ("contender", "ran", "TFLOP/s", "GB/s", "tokens/s", "us", "host us", "peak MB", "error / model")
    rows = []
    for m in measurements:
        if m.timing is None:
            continue
        ratios = tuple("" if m is mine else _ratio(paired_ratio(m.timing, _timing(mine))) for mine in ours)
        gain = () if one_stream is None else (_against_one(one_stream.get(m.contender), m.timing),)
        error = None if m.verdict is None else m.verdict.error_ratio
        rows.append(
            (
                m.contender,
                m.kernel,
                _figure(m.tflops),
                _figure(m.bandwidth_gbps),
                _large(m.tokens_per_s),
                _figure(m.timing.median_us),
                "" if m.host is None else f"{m.host.median_us:.1f}",
                "" if m.peak_memory_bytes is None else _figure(m.peak_memory_bytes / 1e6),
                "" if error is None else f"{error:.2f}" + (" *" if m.inaccurate else ""),
                *gain,
                *ratios,
            )
        )
    table = Table(
        f"{measurements[0].case}{_how(measurements)}",
        (*header, *streams, *speeds),
        rows,
        _notes(measurements),
        ("tokens/s", "GB/s", "peak MB", "host us", "error / model", "ran"),
    )
    return _without_empty_columns(table)


def summary_tables(measurements: Sequence[Measurement]) -> list[Table]:
    """Returns for each kernel and mode of ours its speed against the best peer, with losses and goals."""
    cases: dict[tuple[str, str], list[Measurement]] = {}
    for m in measurements:
        cases.setdefault((m.mode, m.case), []).append(m)
    tables = []
    for contender in dict.fromkeys(m.contender for m in measurements if m.is_ours):
        for mode in dict.fromkeys(m.mode for m in measurements):
            of_mode = {case: found for (m, case), found in cases.items() if m == mode}
            if table := _summary(contender, mode, of_mode):
                tables.append(table)
    return tables


def print_table(table: Table) -> None:
    """Prints a table to standard output: drawn by rich on a terminal, in plain columns elsewhere.

    With NO_COLOR set to any text, rich draws without escape sequences.
    """
    if not sys.stdout.isatty():
        say(plain(table))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(color_system=None if os.environ.get("NO_COLOR") else "auto")
    table = _fitted(table, console.width)
    drawn = RichTable(title=Text(printable(table.title)), title_justify="left", box=box.SIMPLE_HEAD)
    for column in range(len(table.header)):
        justify: Literal["left", "right"] = "right" if _is_numeric(table, column) else "left"
        drawn.add_column(Text(printable(table.header[column])), justify=justify, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    try:
        console.print(drawn)
        for note in table.notes:
            console.print(Text(f"  {printable(note)}"))
    except OSError as error:
        raise OutputLost(error.strerror or str(error)) from error


def plain(table: Table) -> str:
    """Returns the table in aligned columns, without color or lines."""
    lines = [table.header, *table.rows] if table.rows else []
    right = [c for c in range(len(table.header)) if _is_numeric(table, c)]
    notes = [f"  {printable(note)}" for note in table.notes]
    return "\n".join([printable(table.title), *columns(lines, right=right, indent="  "), *notes]) + "\n"


def _fitted(table: Table, width: int) -> Table:
    """Returns the table without the columns that do not fit the terminal's width, and a note that names them."""
    left_out = []
    for header in table.dispensable:
        widths = [max(len(line[c]) for line in (table.header, *table.rows)) for c in range(len(table.header))]
        if sum(widths) + 2 * len(widths) + 2 <= width:
            break
        if header in table.header:
            column = table.header.index(header)
            rows = [row[:column] + row[column + 1 :] for row in table.rows]
            table = replace(table, header=table.header[:column] + table.header[column + 1 :], rows=rows)
            left_out.append(header)
    if not left_out:
        return table
    return replace(table, notes=(*table.notes, f"a wider terminal has room for {', '.join(left_out)}"))


def _summary(contender: str, mode: str, cases: dict[str, list[Measurement]]) -> Table | None:
    rows: list[tuple[str, ...]] = []
    ratios: dict[str, float] = {}
    met: list[bool] = []
    for case, found in cases.items():
        mine = next((m for m in found if m.contender == contender), None)
        peer = best_peer(found)
        if mine is None:
            continue
        verdict = judge(mine, found)
        if verdict.met is not None:
            met.append(verdict.met)
        goal = "" if mine.goal is None else f"{mine.goal}: {verdict}"
        if mine.timing is None:
            rows.append((case, mine.kernel, "", f"not timed: {mine.refusal}", goal))
        elif peer is None:
            rows.append((case, mine.kernel, "", "no peer could be timed", goal))
        else:
            ratio = paired_ratio(_timing(peer), mine.timing)
            ratios[case] = ratio.median
            rows.append((case, mine.kernel, peer.contender, _ratio(ratio), goal))
    if not ratios:
        return None
    worst = min(ratios, key=ratios.__getitem__)
    notes = [
        f"geometric mean {geometric_mean(ratios.values()):.3f} over {len(ratios)} cases, "
        f"worst {ratios[worst]:.3f} ({worst})"
    ]
    if met:
        notes.append(f"{sum(met)} of {len(met)} goals met")
    header: tuple[str, ...] = ("case", "kernel", "best peer", "x as fast [95 %]", "goal")
    if not any(row[-1] for row in rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    how = f", {MODE_TITLES[mode]}" if mode in MODE_TITLES else ""
    return Table(f"{contender} against the best peer{how}", header, rows, tuple(notes))


def _without_empty_columns(table: Table) -> Table:
    """Removes empty columns: on a CPU, host time and peak memory are not measured."""
    kept = [c for c in range(len(table.header)) if any(row[c] for row in table.rows)]
    rows = [tuple(row[c] for c in kept) for row in table.rows]
    return replace(table, header=tuple(table.header[c] for c in kept), rows=rows)


def _notes(measurements: Sequence[Measurement]) -> tuple[str, ...]:
    notes = []
    if inaccurate := [m.contender for m in measurements if m.inaccurate]:
        notes.append(f"* {', '.join(inaccurate)}: not accurate enough for our gates, so not a peer to beat")
    refusals: dict[str, list[str]] = {}
    for m in measurements:
        if m.refusal:
            refusals.setdefault(m.refusal, []).append(m.contender)
    notes += [f"{', '.join(names)}: {reason}" for reason, names in refusals.items()]
    timed = next((m for m in measurements if m.timing is not None), None)
    if timed is not None and timed.gpu_before and timed.gpu_after:
        before, after = (_card(reading) for reading in (timed.gpu_before, timed.gpu_after))
        notes.append(f"card before: {before}; after: {after}")
    return tuple(notes)


def _card(reading: dict[str, object]) -> str:
    units = {"sm_mhz": "MHz", "power_w": "W", "temperature_c": "C"}
    parts = [f"{reading[key]:.0f} {unit}" for key, unit in units.items() if isinstance(reading.get(key), int | float)]
    throttle = reading.get("throttle")
    if isinstance(throttle, list) and throttle:
        parts.append(f"THROTTLED by {', '.join(throttle)}")
    return ", ".join(parts)


def _how(measurements: Sequence[Measurement]) -> str:
    timed = next((m for m in measurements if m.timing is not None and not m.is_yardstick), None)
    if timed is None or timed.timing is None:
        return ""
    t = timed.timing
    parts = [t.method if timed.mode == "auto" else MODE_TITLES.get(timed.mode, timed.mode)]
    if t.l2_flushed:
        parts.append("L2 flushed")
    if t.input_sets > 1:
        parts.append(f"{t.input_sets} sets of inputs in turn")
    return f" ({', '.join(parts)}, median of {len(t.samples_us)} rounds)"


def _against_one(one: Samples | None, two: Samples) -> str:
    """Returns the throughput of two streams relative to one, from the ratios of each round."""
    if one is None:
        return ""
    ratios = sorted(a / b for a, b in zip(one.samples_us, two.samples_us, strict=True))
    return f"{ratios[len(ratios) // 2]:.3f} x"


def _timing(m: Measurement) -> Samples:
    assert m.timing is not None  # callers pass only timed measurements
    return m.timing


def _is_numeric(table: Table, column: int) -> bool:
    return any(row[column][:1].isdigit() for row in table.rows)


def _figure(value: float | None) -> str:
    """Returns four digits, without an exponent."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _large(value: float | None) -> str:
    """Returns three digits and a suffix for thousands."""
    if value is None:
        return ""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def _ratio(ratio: Ratio) -> str:
    if ratio.low95 is None or ratio.high95 is None:
        return f"{ratio.median:.3f} [needs 6 rounds]"
    return f"{ratio.median:.3f} [{ratio.low95:.3f}, {ratio.high95:.3f}]"
