"""Text on its way to a terminal or a log. Every line that the workbench prints goes through `say` or `complain`.

Records, tables, suites, file names and compilers' messages hold text that others wrote. A control character in it could
move the cursor, hide a line or retitle the window, so it is shown as an escape and never sent.
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
    """Standard output takes no more: the disk is full, or it was closed. The message is the system's."""


def printable(text: str) -> str:
    """Returns the text as one line, each control character in it replaced by an escape of its number.

    Line breaks, controls of the direction of writing, and characters that no UTF-8 can carry count as controls. A byte
    of a file name that is not UTF-8 is shown as that byte.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":  # a narrow space is no control
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how Python carries a byte that does not decode
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def say(text: object = "", *, end: str = "\n", to: TextIO | None = None, flush: bool = False) -> None:
    """Prints text, its line breaks kept and every other control character escaped.

    Args:
        text: what to print; `str` of it.
        end: printed behind it as it is.
        to: the stream; standard output if None.
        flush: whether a reader is to see the text at once.

    Raises:
        OutputLost: standard output takes no more. A message that standard error does not take is dropped, for there is
            nowhere to report it.
    """
    stream = sys.stdout if to is None else to
    lines = "\n".join(map(printable, str(text).split("\n")))
    try:
        print(lines, end=end, file=stream, flush=flush)
    except OSError as error:
        if stream is not sys.stderr:
            raise OutputLost(error.strerror or str(error)) from error


def complain(error: object) -> None:
    """Prints why a command cannot do what was asked, to standard error."""
    say(f"warpwave: {error}", to=sys.stderr)


def columns(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), indent: str = "") -> list[str]:
    """Returns a line for each row, its cells in columns as wide as their widest cell, so that cells never touch.

    Args:
        rows: cells as text; a row may end early.
        right: columns that are aligned to the right.
        indent: what each line begins with.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[c]) for row in cells if len(row) > c) for c in range(max(map(len, cells), default=0))]
    return [in_columns(row, widths, right=right, indent=indent) for row in cells]


def in_columns(row: Sequence[str], widths: Sequence[int], *, right: Collection[int] = (), indent: str = "") -> str:
    """Returns one line in columns of given widths, for rows that are printed before the last of them is known. A cell
    that is wider moves the cells behind it, and stays apart from them."""
    padded = [
        printable(cell).rjust(width) if c in right else printable(cell).ljust(width)
        for c, (cell, width) in enumerate(zip(row, widths, strict=False))
    ]
    return (indent + (" " * GAP).join(padded)).rstrip()


# Streams --------------------------------------------------------------------------------------------------------------


def prepare_streams() -> None:
    """Makes standard output and standard error safe to print to, whatever the process was started with.

    Raises:
        OutputLost: standard output is closed, so that nothing of the command would be seen.
    """
    closed = sys.stdout is None
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # A closed descriptor would go to the next file that is opened, and messages would be written into it.
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    codecs.register_error("warpwave.plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="warpwave.plain")  # a narrow space must not end a command in a traceback
    if closed:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        raise OutputLost("standard output is closed")


def discard_output() -> None:
    """Sends what is left of standard output to nowhere, so that flushing it at exit does not fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _plain(error: UnicodeError) -> tuple[str, int]:
    """What stands for characters that a terminal's encoding lacks: what they are variants of, or question marks."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    plain = (unicodedata.normalize("NFKD", x).encode("ascii", "ignore").decode() or "?" for x in lacking)
    return "".join(plain), error.end
