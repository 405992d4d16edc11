"""Records of an H200 that ship with the package, for comparison with other hardware.

The files in this folder are the only copies; `benchmarks/records/README.md` lists them with the other records.
"""

from __future__ import annotations

from pathlib import Path

from warpwave.workbench.bench.records import Records, read_records

FOLDER = Path(__file__).parent


def paths() -> list[Path]:
    """Returns the record files, the newest date first, those of a date by name."""
    by_name = sorted(FOLDER.glob("*.jsonl"))
    return sorted(by_name, key=lambda path: path.name[: len("2026-11-29")], reverse=True)  # stable


def records() -> Records:
    """Returns the records of all files.

    Raises:
        RecordError: a file is damaged; the message names file and line.
    """
    together = Records({}, [])
    for path in paths():
        found = read_records(path)
        together.environments.update(found.environments)
        together.measurements.extend(found.measurements)
    return together
