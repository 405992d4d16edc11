"""`warpwave report`: reads records, writes the page. A file is replaced only if it is a report as it was written."""

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
        paths: record files; none means the records that come with the package.
        out: the page; None is `report.html` in the current directory, or no page where Markdown alone is asked for.
        markdown_out: the Markdown, or None; `-` is standard output.

    Returns:
        The process's exit code: 0, or 2 where a record is damaged or a file cannot be written.
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
        where it is, in full.

    Raises:
        TooLarge: it would be.
        CannotWrite: it cannot be written there.
    """
    save(path, html(sources))
    return path.resolve()


def check_writable(path: Path) -> None:
    """Says before a long run what `save` would say after it.

    Raises:
        CannotWrite: nothing can be written there.
    """
    check_output(path, REPORT)


def save(path: Path, content: str) -> None:
    """Writes a report whole or not at all, with the seal by which the next one may replace it.

    Raises:
        CannotWrite: it cannot be written, or something is there that is no report as it was written.
    """
    write_output(path, sealed(content), REPORT)
