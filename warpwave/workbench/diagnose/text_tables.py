"""Finds the tables in a text: Markdown, CSV with any usual delimiter, box drawings, and columns aligned by spaces.

The text may come from anywhere, so bytes of several encodings are read, and characters that a wrong decoding has
damaged are repaired.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass

from warpwave.workbench.input_files import Unreadable

WRONG_DECODINGS = ("cp1252", "mac_roman")  # how UTF-8 most often has been read by mistake
SIZE = re.compile(r"\b([a-zA-Z]\w*)\s*[=:]\s*\d")
MEASUREMENT = re.compile(r"[~≈]?\s*\d[\d,.]*\s*([nuµμm]?s|msec|[tg]flop/?s|tflops)", re.I)
DECIMAL_COMMA = re.compile(r"[~≈]?\s*(0,\d+|\d+,\d{1,2})(?![,.\d])")
MOST_CELLS = 200_000  # of all tables of a file


@dataclass(frozen=True)
class TextTable:
    """A table as text.

    Attributes:
        caption: the nearest line of text above it; empty if there is none.
        header: the headings, cleaned.
        rows: the cells, cleaned; every row has as many as the header.
    """

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def decode(content: bytes) -> str:
    """Returns the text of a file of unknown encoding.

    Raises:
        Unreadable: the bytes are no text.
    """
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):  # what spreadsheets call "Unicode text"
        return content.decode("utf-16", errors="replace")
    if b"\x00" in content:
        raise Unreadable("no text: it has zero bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("cp1252", errors="replace")


def repaired(text: str) -> str:
    """Returns text whose runs of characters outside ASCII are what they were before a wrong decoding.

    A run is repaired if its bytes in the wrong encoding are valid UTF-8, which correct text almost never is.
    """
    return re.sub(r"[^\x00-\x7f]+", lambda run: _repaired_run(run.group()), text)


def _repaired_run(run: str) -> str:
    for encoding in WRONG_DECODINGS:
        try:
            return run.encode(encoding).decode("utf-8")
        except UnicodeError:
            continue
    return run


def cleaned(cell: str) -> str:
    """Returns a cell without emphasis, markup and surrounding space, with one spelling of micro, times and minus."""
    text = re.sub(r"<br\s*/?>", " ", cell)
    text = re.sub(r"</?[a-zA-Z][^>]*>|\*\*|__|~~|`|\$", "", text).strip()
    text = re.sub(r"^[*_](.*)[*_]$", r"\1", text)
    text = re.sub("(?<=\\d)[\u00a0\u202f\u2009](?=\\d{3})", "", text)  # divides thousands
    for odd, plain in (("μ", "u"), ("µ", "u"), ("×", "x"), ("✕", "x"), ("−", "-"), ("\u00a0", " "), ("\u202f", " ")):  # noqa: RUF001
        text = text.replace(odd, plain)
    return re.sub(r"\s+", " ", text).strip()


def text_tables(text: str) -> list[TextTable]:
    """Returns the tables of a text in order; a table has a heading and at least one row.

    Raises:
        Unreadable: the tables have too many cells.
    """
    lines = [line.rstrip() for line in repaired(text).splitlines()]
    parts: list[tuple[str, list[str], str, int]] = []  # caption, lines, kind and columns of each table
    caption, block, kind = "", list[str](), ""
    for line in [*lines, ""]:
        of_line = _kind(line)
        if of_line != kind and block:
            made = next(_text_table(caption, block, kind), None)
            if parts and kind == parts[-1][2] and _continues(parts[-1][3], block, kind):
                parts[-1][1].extend(block)
                caption = ""
            elif made is not None:
                parts.append((caption, block, kind, len(made.header)))
                caption = ""
            else:  # a line of text may have the commas of a table: "B=4, H=32, D=64, causal"
                caption = _caption(block[-1])
            block = []
        kind = of_line
        if kind:
            block.append(line)
        elif line.strip() and not _is_rule(line):
            caption = _caption(line)
    found = [table for above, part, of_part, _ in parts for table in _text_table(above, part, of_part)]
    if sum(len(table.header) * len(table.rows) for table in found) > MOST_CELLS:
        raise Unreadable(f"too large: its tables have more than {MOST_CELLS:,} cells")
    return found


def _continues(columns: int, block: list[str], kind: str) -> bool:
    """Returns whether lines are more rows of the table above a remark: as many cells, which all start with numbers."""
    first = next(iter(_split(block, kind)), [])
    return len(first) == columns and all(re.match(r"\s*[~≈]?[\d.]", cell) for cell in first)


def _caption(line: str) -> str:
    return cleaned(line.strip().lstrip("#").rstrip(":"))


BARS = re.compile("[│┃║┆|]")


def _kind(line: str) -> str:
    """Returns how a line's cells are divided; empty if it is no line of a table."""
    if BARS.search(line):
        return "|"
    if _is_rule(line):
        return "|" if "+" in line or not line.isascii() else ""
    for delimiter in ("\t", ";", ","):
        if len(line.split(delimiter)) > 2 and not re.search(r"[a-z]{3}[.?!]$", line):
            return delimiter
    if line.count(",") == 1 and not re.search(r",\s", line.strip()):
        return ","
    return "spaces" if len(re.split(r"\s{2,}", line.strip())) > 1 else ""


def _is_rule(line: str) -> bool:
    return bool(line.strip()) and not re.sub(r"[\s|+=:\-─-╿]", "", line)


def _split(block: list[str], kind: str) -> list[list[str]]:
    """Returns the cells of the lines of a table."""
    if kind == "|":
        lines = [_cells(line) for line in block if not _is_rule(line)]
    elif kind == "spaces":
        lines = [re.split(r"\s{2,}", line.strip()) for line in block]
        if len(lines) > 1 and all(len(cells) == len(lines[0]) + 1 for cells in lines[1:]):
            lines[1:] = [cells[1:] for cells in lines[1:]]  # the numbers of the rows, as data frames print them
    else:
        lines = list(csv.reader(block, delimiter=kind, skipinitialspace=True))
        if kind == ";":  # where commas are decimal points, fields are separated by semicolons
            lines = [[_with_point(cell) for cell in cells] for cells in lines]
    return lines


def _text_table(caption: str, block: list[str], kind: str) -> Iterator[TextTable]:
    lines = _split(block, kind)
    rows = [tuple(cleaned(cell) for cell in cells) for cells in lines]
    rows = [cells for cells in rows if any(cells)]
    while rows and not _is_heading(rows[0]):
        caption = _caption(", ".join(filter(None, rows.pop(0))))
    if len(rows) < 2 or len(rows[0]) < 2:
        return
    header, width = rows[0], len(rows[0])
    columns = [_with_points(column) for column in zip(*((*c, *[""] * width)[:width] for c in rows[1:]), strict=True)]
    yield TextTable(caption, header, tuple(zip(*columns, strict=True)))


def _with_points(column: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the cells of a column with decimal points if one of them has a comma that cannot divide thousands."""
    return tuple(map(_with_point, column)) if any(DECIMAL_COMMA.match(cell) for cell in column) else column


def _with_point(cell: str) -> str:
    return re.sub(r"^(\s*[~≈]?\s*\d+),(\d+)(?![,\d])", r"\1.\2", cell)


def _is_heading(cells: tuple[str, ...]) -> bool:
    """Returns whether a first line names columns, instead of a configuration ("B=4, H=32") or measurements ("1.2 ms").

    Headings that state sizes ("D=64", "D=128") repeat the name.
    """
    sizes = [name.lower() for cell in cells for name in SIZE.findall(cell)]
    is_configuration = len(sizes) > 1 and len(set(sizes)) == len(sizes)
    return not is_configuration and not any(MEASUREMENT.fullmatch(cell) for cell in cells)


def _cells(line: str) -> list[str]:
    inner = BARS.sub("|", line.strip()).replace("\\|", " ")
    return inner.removeprefix("|").removesuffix("|").split("|")
