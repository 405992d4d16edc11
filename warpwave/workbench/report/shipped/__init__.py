"""The H200's records, shipped with the package so that they can stand beside what your hardware does.

The files of this folder are the only copy: `benchmarks/records/README.md` lists them with the other records.
"""

from __future__ import annotations

from pathlib import Path

from warpwave.workbench.bench.records import Records, read_records

FOLDER = Path(__file__).parent


def paths() -> list[Path]:
    """The record files, by name."""
    return sorted(FOLDER.glob("*.jsonl"))


def records() -> Records:
    """Everything in them, as one.

    Raises:
        RecordError: a file is damaged; the message names file and line.
    """
    together = Records({}, [])
    for path in paths():
        found = read_records(path)
        together.environments.update(found.environments)
        together.measurements.extend(found.measurements)
    return together
