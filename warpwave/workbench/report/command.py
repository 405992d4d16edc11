"""`warpwave report`: reads records and writes the page. It replaces a file only if that is an unedited report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from warpwave.workbench.bench.records import RecordError
from warpwave.workbench.output_files import (
    CannotWrite,
    Kind,
    check_different,
    check_output,
    is_sealed,
    sealed,
    write_output,
)
from warpwave.workbench.report.content import report
from warpwave.workbench.report.intake import given, shipped_source
from warpwave.workbench.report.machines import Source
from warpwave.workbench.report.markdown import markdown
from warpwave.workbench.report.page import TooLarge, html
from warpwave.workbench.terminal import complain, say

DEFAULT_NAME = "report.html"
REPORT = Kind("report of warpwave, or was edited since", is_sealed)
STANDARD_OUTPUT = Path("-")


def main(paths: Sequence[Path], *, out: Path | None = None, markdown_out: Path | None = None) -> int:
    """Reports on record files.

    Args:
        paths: record files; empty for the records that ship with the package.
        out: the page; None is `report.html` in the current directory, or no page if only Markdown is requested.
        markdown_out: the Markdown, or None; `-` is standard output.

    Returns:
        The exit code: 0, or 2 if a record is damaged or a file cannot be written.
    """
    if out is None and markdown_out is None:
        out = Path(DEFAULT_NAME)
    to_stdout = markdown_out == STANDARD_OUTPUT
    try:
        if out is not None and markdown_out is not None and not to_stdout:
            check_different(out, markdown_out)
        for path in (out, None if to_stdout else markdown_out):
            if path is not None:
                check_writable(path)
        sources = given(paths) if paths else [shipped_source()]
        if to_stdout:
            say(markdown(report(sources)), end="")
        elif markdown_out is not None:
            save(markdown_out, markdown(report(sources)))
            say(f"Markdown: {markdown_out}")
        if out is not None:
            say(f"report: {write_page(sources, out)}", to=sys.stderr if to_stdout else None)
    except (RecordError, TooLarge, CannotWrite) as error:
        complain(error)
        return 2
    return 0


def write_page(sources: Sequence[Source], path: Path) -> Path:
    """Writes the page.

    Returns:
        Its absolute path.

    Raises:
        TooLarge: the page would be too large.
        CannotWrite: the path cannot be written.
    """
    save(path, html(sources))
    return path.resolve()


def check_writable(path: Path) -> None:
    """Checks before a long run that `save` can write the page.

    Raises:
        CannotWrite: the file cannot be written.
    """
    check_output(path, REPORT)


def save(path: Path, content: str) -> None:
    """Writes a report atomically, with a seal that lets a later report replace it.

    Raises:
        CannotWrite: the file cannot be written, or exists and is not an unedited report.
    """
    write_output(path, sealed(content), REPORT)
