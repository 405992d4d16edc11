"""`warpwave report`: reads records, writes the page. Nothing is overwritten that is not a report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from warpwave.bench.records import RecordError
from warpwave.output_files import CannotWrite, check_output, write_whole
from warpwave.report.content import report
from warpwave.report.intake import given, shipped_source
from warpwave.report.machines import Source
from warpwave.report.markdown import MADE_BY, markdown
from warpwave.report.page import GENERATOR, TooLarge, html

DEFAULT_NAME = "report.html"


def main(paths: Sequence[Path], *, out: Path | None = None, markdown_out: Path | None = None) -> int:
    """Reports on record files.

    Args:
        paths: record files; none means the records that come with the package.
        out: the page; None is `report.html` in the current directory, or no page where Markdown alone is asked for.
        markdown_out: the Markdown, or None; `-` is standard output.

    Returns:
        The process's exit code: 0, or 2 where a record is damaged or a file cannot be written.
    """
    try:
        sources = given(paths) if paths else [shipped_source()]
        if out is None and markdown_out is None:
            out = Path(DEFAULT_NAME)
        if markdown_out == Path("-"):
            print(markdown(report(sources)), end="")
        elif markdown_out is not None:
            save(markdown_out, markdown(report(sources)))
            print(f"Markdown: {markdown_out}")
        if out is not None:
            print(f"report: {write_page(sources, out)}", file=sys.stderr if markdown_out == Path("-") else sys.stdout)
    except (RecordError, TooLarge, CannotWrite) as error:
        print(f"warpwave: {error}", file=sys.stderr)
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
    check_output(path, is_ours=is_ours, what="report of warpwave")


def is_ours(path: Path) -> bool:
    """Whether a file is an earlier report, HTML or Markdown, which may be replaced. An empty file is nobody's."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return not content or any(mark.encode() in content for mark in (f'content="{GENERATOR}"', MADE_BY))


def save(path: Path, content: str) -> None:
    """Writes a file whole or not at all.

    Raises:
        CannotWrite: it cannot be written, or something is there that is no report.
    """
    check_writable(path)
    try:
        write_whole(path, content)
    except OSError as error:
        raise CannotWrite(f"{path} cannot be written: {error.strerror or error}") from error
