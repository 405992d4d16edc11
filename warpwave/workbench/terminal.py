"""Prints text to a terminal or a log. Every line that the workbench prints goes through `say` or `complain`.

Records, tables, suites, file names and compiler messages hold foreign text. A control character in it could move the
cursor, hide a line or change the window's title, so control characters are printed as escapes.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import unicodedata
from collections.abc import Collection, Sequence
from typing import TextIO

GAP = 2  # blanks between columns


class OutputLost(Exception):
    """Standard output cannot be written: the disk is full, or it was closed. The message is the system's."""


def printable(text: str) -> str:
    """Returns the text as one line, with each control character replaced by an escape of its code.

    Line breaks, controls of the writing direction, and characters that UTF-8 cannot encode count as control characters.
    A byte of a file name that is not UTF-8 is shown as an escape of that byte.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":  # a narrow space is not a control character
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # Python's encoding of a byte that does not decode
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def say(text: object = "", *, end: str = "\n", to: TextIO | None = None, flush: bool = False) -> None:
    """Prints text. Line breaks are kept; every other control character is escaped.

    Args:
        text: what to print; `str` of it.
        end: printed after the text, without escaping.
        to: the stream; standard output if None.
        flush: whether to flush the stream.

    Raises:
        OutputLost: standard output cannot be written. A message to standard error that cannot be written is dropped.
    """
    stream = sys.stdout if to is None else to
    lines = "\n".join(map(printable, str(text).split("\n")))
    try:
        print(lines, end=end, file=stream, flush=flush)
    except OSError as error:
        if stream is not sys.stderr:
            raise OutputLost(error.strerror or str(error)) from error


def complain(error: object) -> None:
    """Prints the reason why a command cannot run to standard error."""
    say(f"warpwave: {error}", to=sys.stderr)


def columns(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), indent: str = "") -> list[str]:
    """Returns one line per row. Each column is as wide as its widest cell, so cells never touch.

    Args:
        rows: cells as text; a row may have fewer cells than others.
        right: indices of the columns that are right-aligned.
        indent: text at the beginning of each line.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[c]) for row in cells if len(row) > c) for c in range(max(map(len, cells), default=0))]
    return [in_columns(row, widths, right=right, indent=indent) for row in cells]


def in_columns(row: Sequence[str], widths: Sequence[int], *, right: Collection[int] = (), indent: str = "") -> str:
    """Returns one line in columns of given widths, for rows that are printed one by one. A cell that is too wide shifts
    the cells after it."""
    padded = [
        printable(cell).rjust(width) if c in right else printable(cell).ljust(width)
        for c, (cell, width) in enumerate(zip(row, widths, strict=False))
    ]
    return (indent + (" " * GAP).join(padded)).rstrip()


# Streams --------------------------------------------------------------------------------------------------------------


def prepare_streams() -> None:
    """Makes standard output and standard error safe to print to, even if the process was started without them.

    Raises:
        OutputLost: standard output is closed, so nobody would see the output.
    """
    closed = sys.stdout is None
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The next file to be opened would get the closed descriptor, and messages would be written into it.
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    codecs.register_error("warpwave.plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="warpwave.plain")  # a narrow space must not cause a traceback
    if closed:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        raise OutputLost("standard output is closed")


def discard_output() -> None:
    """Discards the rest of standard output, so that flushing it at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Replaces characters that a terminal's encoding lacks by their plain variants, or by question marks."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    plain = (unicodedata.normalize("NFKD", x).encode("ascii", "ignore").decode() or "?" for x in lacking)
    return "".join(plain), error.end
