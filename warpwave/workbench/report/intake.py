"""Whose records a report tells: those of files that were named, or those that come with the package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from warpwave.workbench.bench.records import read_records
from warpwave.workbench.report import shipped
from warpwave.workbench.report.machines import Source
from warpwave.workbench.terminal import printable


def given(paths: Sequence[Path]) -> list[Source]:
    """The records of some files, in their order; a file named twice is read once.

    Raises:
        RecordError: a file cannot be read, or a line of it is not a record of something measured.
    """
    return [Source(read_records(path), "given", (printable(path.name),)) for path in dict.fromkeys(paths)]


def shipped_source() -> Source:
    """The records that come with the package."""
    return Source(shipped.records(), "shipped", tuple(path.name for path in shipped.paths()))
