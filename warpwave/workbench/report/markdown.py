"""The report as Markdown, for a pull request or a README: without HTML, figures right-aligned."""

from __future__ import annotations

import re
from collections.abc import Sequence

from warpwave.workbench.report.content import Column, MachineSection, Report, Table
from warpwave.workbench.terminal import printable


def markdown(content: Report) -> str:
    """Returns the report as Markdown."""
    lines = [f"# {text(content.title)}", ""]
    if not content.sections:
        lines += ["The record holds no measurement.", ""]
    for section in content.sections:
        lines += _section(section)
    origin = f" from {', '.join(text(name) for name in content.files)}" if content.files else ""
    lines.append(
        f"Made by warpwave {content.version}{origin}. Every figure follows from the raw samples of the records."
    )
    return "\n".join(lines) + "\n"


def _section(s: MachineSection) -> list[str]:
    lines = [f"## {text(s.heading or s.name)}", "", text(s.provenance), ""]
    for question, sentences in s.answers:
        lines.append(f"- **{question}** {text(' '.join(sentences))}")
    lines += ["", "### Case by case", ""]
    verdicts = [Column("verdict", False), Column("case", False), Column("in a sentence", False)]
    lines += _rows(verdicts, [[c.word, c.name, c.sentence] for c in s.cases])
    if s.roofline.ceilings:
        lines += ["### Ceilings", ""]
        ceilings = [[c.label, c.figure, c.rates] for c in s.roofline.ceilings]
        lines += _rows([Column("resource", False), Column("rate"), Column("by", False)], ceilings)
    lines += [f"{text(note)}" for note in s.rates_notes] + [""] * bool(s.rates_notes)
    for family in s.families:
        lines += [f"### {text(family.unit)} over length: {text(family.title)}, {text(family.held)}", ""]
        lengths = sorted({length for curve in family.curves.values() for length, _ in curve})
        columns = [Column("contender", False), *(Column(f"{length:,}") for length in lengths)]
        lines += _rows(columns, [[name, *family.figures(name, lengths)] for name in family.curves])
    for table in (*s.tables, s.bounds, s.untimed):
        if table is not None:
            lines += _table(table)
    lines += ["### Environment", ""]
    lines += _rows([Column("what", False), Column("value", False)], [list(fact) for fact in s.environment])
    lines += ["### To reproduce", "", *(f"    {text(command)}" for command in s.reproduce), ""]
    lines += [line for note in s.reproduce_notes for line in (text(note), "")]
    return lines


def _table(table: Table) -> list[str]:
    lines = [f"### {text(table.title)}", ""]
    if table.note:
        lines += [text(table.note), ""]
    if any(group.heading for group in table.groups):
        columns = [Column("case", False), *table.columns]
        lines += _rows(columns, [[group.heading, *row] for group in table.groups for row in group.rows])
        lines += [f"- {text(group.heading)}: {text(group.remark)}" for group in table.groups]
        return [*lines, ""]
    return lines + _rows(table.columns, [list(row) for group in table.groups for row in group.rows])


def _rows(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [
        f"| {' | '.join(text(column.name) for column in columns)} |",
        f"| {' | '.join('---:' if column.is_figure else '---' for column in columns)} |",
    ]
    return [*lines, *(f"| {' | '.join(text(cell) for cell in row)} |" for row in rows), ""]


# Markdown's special characters. A bracket alone makes no link, and an underscore is emphasis only at the edge of a
# word.
SPECIAL = re.compile(r"[\\`*|~]|\](?=[(\[:])|(?<!\w)_|_(?!\w)")


def text(words: str) -> str:
    """Returns text of a record on one line, escaped for Markdown and HTML. All foreign text goes through this
    function."""
    escaped = printable(words).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return SPECIAL.sub(r"\\\g<0>", escaped)
