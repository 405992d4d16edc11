"""The records of a report: those of named files, or those that ship with the package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from warpwave.workbench.bench.records import read_records
from warpwave.workbench.report import shipped
from warpwave.workbench.report.machines import Source
from warpwave.workbench.terminal import printable


def given(paths: Sequence[Path]) -> list[Source]:
    """Returns the records of files, in order; a file that is named twice is read once.

    Raises:
        RecordError: a file cannot be read, or a line of it is not a valid record.
    """
    return [Source(read_records(path), "given", (printable(path.name),)) for path in dict.fromkeys(paths)]


def shipped_source() -> Source:
    """Returns the records that ship with the package."""
    return Source(shipped.records(), "shipped", tuple(path.name for path in shipped.paths()))
