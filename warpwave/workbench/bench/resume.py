"""Resumes a run: finds the cases that a record file already holds, and the contender that ended the last process.

During a run, a journal beside the records names the contender being prepared. If a compiler crashes the whole process,
the journal identifies it, and the next run with `--resume` leaves that contender out of that case. A process that was
stopped by a signal is not a crash. The C signal handler itself writes the signal to the journal, so the entry exists
even if the process is killed before Python runs again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from warpwave.workbench.bench.record_schema import WORD
from warpwave.workbench.bench.records import Measurement, RecordError, read_records
from warpwave.workbench.bench.workloads import Suite
from warpwave.workbench.input_files import Unreadable, parse_json, read_text
from warpwave.workbench.output_files import CannotWrite, Kind, check_output
from warpwave.workbench.schema import Mismatch, OneOf, Table, check

SUFFIX = ".underway"
# The signals that stop a process: Ctrl-C, `kill` and a batch system's time limit, a closed terminal.
STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


def finished_cases(
    path: Path, suite: Suite, modes: Sequence[str], environment: Mapping[str, Any]
) -> dict[str, list[Measurement]]:
    """Returns the suite's cases that the file holds in all these modes, from the same code on the same device, with
    their measurements. A case that the suite changed since, under the same name, is not among them.

    Raises:
        RecordError: the file exists and cannot be read.
    """
    if not path.exists() or not path.stat().st_size:
        return {}
    records = read_records(path)
    problems = {case.name: case.problem for case in suite.cases}
    found: dict[str, list[Measurement]] = {}
    for environment_id, m in records.measurements:
        same_case = m.suite == suite.name and m.problem == problems.get(m.case)
        if same_case and _identity(records.environments[environment_id]) == _identity(environment):
            found.setdefault(m.case, []).append(m)
    return {case: of_case for case, of_case in found.items() if {m.mode for m in of_case} >= set(modes)}


def _identity(environment: Mapping[str, Any]) -> tuple[Any, ...]:
    gpu, cpu = environment.get("gpu") or {}, environment.get("cpu") or {}
    device = gpu.get("name") or cpu.get("model")
    code = environment.get("code") or {}
    return (code.get("source_sha256"), environment.get("torch"), environment.get("device"), device)


# The journal ----------------------------------------------------------------------------------------------------------

HEAD = {"kind": "warpwave bench journal", "schema_version": 1}
# The first line is `HEAD`. Each other line names the contender that is prepared from then on, "" for none; or, with
# `ended`, the contender that ended a process of an earlier run. The bytes of signals may follow.
FIRST = Table(required={name: OneOf((value,)) for name, value in HEAD.items()})
ENTRY = Table(required={"case": WORD, "contender": WORD}, optional={"ended": OneOf((True,))})
SIGNALS = "".join(map(chr, range(1, 32)))  # numbers of signals, at the beginning of a line


class Journal:
    """The journal: the contender being prepared, and those that ended an earlier process.

    Args:
        records: the record file that it belongs to; None keeps no journal.
        resume: whether to read the journal of the last run; otherwise it is discarded.

    Raises:
        RecordError: a file of that name is not a journal, or cannot be read or written.
    """

    def __init__(self, records: Path | None, *, resume: bool) -> None:
        self._path = None if records is None else records.with_name(records.name + SUFFIX)
        self._file: int | None = None
        self._ended: list[tuple[str, str]] = []
        if self._path is None:
            return
        try:
            check_output(self._path, Kind("journal of `warpwave bench`", _is_journal))
            if self._path.exists():
                self._ended = _ended(self._path) if resume else []
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | getattr(os, "O_NONBLOCK", 0)
            self._file = os.open(self._path, flags, 0o644)
        except CannotWrite as error:
            raise RecordError(str(error)) from error
        except (OSError, Unreadable, Mismatch) as error:
            raise RecordError(f"{self._path}: {error}; remove it to go on") from error
        self._append(HEAD)
        for case, contender in self._ended:
            self._append({"case": case, "contender": contender, "ended": True})

    def skip(self, case: str) -> dict[str, str]:
        """Returns contender -> reason, for the contenders that ended a process on this case."""
        return {name: "it ended the process last time" for c, name in self._ended if c == case}

    def about_to(self, case: str, contender: str) -> None:
        """Notes the contender that is about to run; "" for none."""
        self._append({"case": case, "contender": contender})

    def close(self) -> None:
        """Ends the journal after the last case."""
        if self._path is not None and self._file is not None:
            os.close(self._file)
            self._file = None
            self._path.unlink(missing_ok=True)

    def stop(self) -> None:
        """Ends the journal of a run that was stopped early. It keeps the contenders that ended earlier runs."""
        if self._ended:
            self.about_to("", "")
        else:
            self.close()

    @contextlib.contextmanager
    def noting_signals(self) -> Iterator[None]:
        """Makes each signal that Python handles inside the block write its number to the journal, as one byte."""
        if self._file is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.set_wakeup_fd(self._file, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)

    def _append(self, entry: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            os.write(self._file, json.dumps(entry).encode() + b"\n")
        except OSError as error:
            raise RecordError(f"{self._path} cannot be written: {error.strerror or error}") from error


def _is_journal(path: Path) -> bool:
    try:
        check(FIRST, parse_json(read_text(path).partition("\n")[0]))
    except (Unreadable, Mismatch):
        return False
    return True


def _ended(path: Path) -> list[tuple[str, str]]:
    """Returns the (case, contender) pairs that ended a process.

    Raises:
        Unreadable, Mismatch: a line is not a journal entry.
    """
    _, *lines = read_text(path).split("\n")  # an empty file has only its first line
    rest = lines.pop() if lines else ""
    stopped = {chr(number) for number in STOPPING}
    ended: list[tuple[str, str]] = []
    running: list[tuple[str, str]] = []
    for line in lines:
        entry = parse_json(line.lstrip(SIGNALS))
        check(ENTRY, entry)
        pair = (entry["case"], entry["contender"])
        if entry.get("ended"):
            ended.append(pair)
        else:
            running = [pair] if entry["contender"] else []
    return ended + ([] if stopped & set(rest) else running)
