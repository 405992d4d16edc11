"""Going on where a run ended: which cases a record file holds already, and what was under way when a process died.

Beside the records lies, as long as a run lasts, a small file that names the contender being prepared. A compiler that
takes the whole process with it is known by it: the next run with `--resume` leaves that contender out of that case.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from warpwave.bench.records import RecordError, read_records


def finished_cases(path: Path, suite: str, modes: Sequence[str], environment: Mapping[str, Any]) -> set[str]:
    """Names of the suite's cases that the file holds, in all these modes, from the same code on the same device.

    Raises:
        RecordError: the file is there and cannot be read.
    """
    if not path.exists() or not path.stat().st_size:
        return set()
    records = read_records(path)
    seen: dict[str, set[str]] = {}
    for environment_id, m in records.measurements:
        if m.suite == suite and _identity(records.environments[environment_id]) == _identity(environment):
            seen.setdefault(m.case, set()).add(m.mode)
    return {case for case, found in seen.items() if found >= set(modes)}


def _identity(environment: Mapping[str, Any]) -> tuple[Any, ...]:
    gpu, cpu = environment.get("gpu") or {}, environment.get("cpu") or {}
    device = gpu.get("name") or cpu.get("model")
    code = environment.get("code") or {}
    return (code.get("source_sha256"), environment.get("torch"), environment.get("device"), device)


class Journal:
    """What is under way, on disk, and what ended a process before.

    Args:
        records: the record file it lies beside; None keeps no journal.
        resume: read what the last run left; else forget it.
    """

    def __init__(self, records: Path | None, *, resume: bool) -> None:
        self._path = None if records is None else records.with_name(f"{records.name}.underway")
        self._ended: list[list[str]] = []
        if self._path is None or not self._path.exists():
            return
        if resume:
            self._ended = _read(self._path)
        self._path.unlink()

    def skip(self, case: str) -> dict[str, str]:
        """Contender -> reason, for those that ended a process on this case."""
        return {name: "it ended the process the last time" for c, name in self._ended if c == case}

    def about_to(self, case: str, contender: str) -> None:
        """Note the contender that is about to run; "" for none."""
        if self._path is not None and (contender or self._path.exists()):
            now = [[case, contender]] if contender else []
            self._path.write_text(json.dumps(self._ended + now), encoding="utf-8")

    def close(self) -> None:
        """Nothing is under way any more."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _read(path: Path) -> list[list[str]]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [[str(case), str(contender)] for case, contender in entries]
    except (OSError, ValueError, TypeError) as error:
        raise RecordError(f"{path}: {error}; remove it to go on") from error
