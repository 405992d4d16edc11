"""What reaches a terminal: no control character of a text that others wrote, and no two cells that touch."""

from __future__ import annotations

import ast
import io
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import warpwave
from warpwave.workbench.terminal import GAP, OutputLost, columns, complain, in_columns, printable, say


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, µs, 12\u202fµs, 例", "plain, µs, 12\u202fµs, 例"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("one\ntwo\r\tthree", r"one\x0atwo\x0d\x09three"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),  # the escape sequence of one byte
        ("\u202eright to left", r"\u202eright to left"),
        ("line\u2028break", r"line\u2028break"),
        ("a byte \udcff, a half \ud800", r"a byte \xff, a half \ud800"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_control_characters_are_shown_and_not_sent(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_what_is_printable_can_be_written_and_is_one_line(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert len(shown.splitlines()) <= 1 and printable(shown) == shown


def test_a_text_keeps_its_lines_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    say("one\n\x1b[31mtwo", end="\r")
    complain("\x1b[31mno\nnot at all")
    assert capsys.readouterr() == ("one\n\\x1b[31mtwo\r", "warpwave: \\x1b[31mno\nnot at all\n")


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_an_error_for_output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutputLost, match="No space left on device"):
        say("figures", to=Full())
    monkeypatch.setattr(sys, "stderr", Full())
    complain("nobody can be told")


cells = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30)


@given(st.lists(st.lists(cells, max_size=5), max_size=6), st.sets(st.integers(0, 4)))
def test_cells_never_touch_and_columns_begin_or_end_together(rows: list[list[str]], right: set[int]) -> None:
    lines = columns(rows, right=right)
    assert len(lines) == len(rows)
    for row, line in zip(rows, lines, strict=True):
        assert [cell for cell in row if cell] == line.split()
    widths = [max((len(row[c]) for row in rows if len(row) > c), default=0) for c in range(5)]
    for row, line in zip(rows, lines, strict=True):
        begin = 0
        for c, cell in enumerate(row):
            place = line[begin : begin + widths[c]]
            assert (place.lstrip() if c in right else place.rstrip()) == cell
            assert not line[begin + widths[c] : begin + widths[c] + GAP].strip()
            begin += widths[c] + GAP


def test_a_cell_wider_than_its_column_stays_apart() -> None:
    assert in_columns(("a", "hopper/large_head_dim", "cannot"), (4, 8, 9)) == "a     hopper/large_head_dim  cannot"


def test_nothing_prints_but_through_one_function() -> None:
    """What another module sends to a stream by itself could hold an escape sequence of a record."""
    package = Path(warpwave.__file__).parent
    found = []
    for path in package.rglob("*.py"):
        if path.name == "terminal.py" or path.relative_to(package).parts[0] == "kernels":  # device code
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and re.fullmatch(r"print|(sys\.std\w+|typer|click)\.(write|w?echo|secho)",
                                                           ast.unparse(node.func)):  # fmt: skip
                found.append(f"{path.relative_to(package)}:{node.lineno}")
    assert found == []
