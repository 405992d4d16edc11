"""Measurements on disk: JSON Lines, one self-contained measurement per line, with all raw samples.

A file begins with an environment record, and each run that appends to it adds another; a measurement refers to its
environment by id. Lines are never rewritten. Each is appended by one write, so a run that is interrupted leaves every
finished measurement intact.

Derived figures (TFLOP/s, GB/s) are stored for readers without this package and always follow from the samples.
`record_schema` is the schema of a line; a line that could not be read back is not written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.correctness import Verdict
from warpwave.workbench.bench.goals import Goal
from warpwave.workbench.bench.record_schema import (
    ENVIRONMENT_LINE,
    LINE,
    MEASUREMENT_LINE,
    READABLE_VERSIONS,
    problem_of,
)
from warpwave.workbench.bench.timing import Samples
from warpwave.workbench.input_files import Unreadable, parse_json, read_text
from warpwave.workbench.output_files import CannotWrite, Kind, check_output
from warpwave.workbench.schema import Mismatch, Table, check, quoted
from warpwave.workbench.terminal import printable

SCHEMA_VERSION = 2
OURS = "warpwave "  # prefix of the names of our own contenders
YARDSTICK = "yardstick "  # prefix of references that are not attention
SHOWN_KEYS = 5  # of data of another kind, in a message
LONGEST_LINE = 1 << 20  # per environment; usual are 2 KB


class RecordError(ValueError):
    """A record file cannot be read, or must not be appended to. The message names the file and the line."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One contender on one case.

    Attributes:
        suite, case: the origin of the problem.
        problem: the call.
        contender: `"warpwave auto"`, or the peer's name, or `"yardstick empty_kernel"`.
        kernel: our kernel or the peer's operator that ran; empty if unknown.
        config: the kernel's config as plain data, or None.
        seed: seed of the inputs.
        verdict: correctness on this problem; None if nothing ran.
        refusal: the reason why there is no timing, else empty. A wrong result of our kernels is a refusal.
        timing: the samples of its mode. A peer may have a timing although its verdict failed; a comparison must then
            say that it is not accurate enough.
        host: host time of an eager call; None if not measured.
        gpu_before, gpu_after: clocks, power and temperature around the case's rounds.
        mode: one of `timing.MODES`.
        peak_memory_bytes: peak device memory that one call allocates on top of the memory before it: output and
            workspaces, not the inputs. None if not measured.
        goal: the goal that the suite sets for our contenders, or None.
    """

    suite: str
    case: str
    problem: AttentionProblem
    contender: str
    kernel: str = ""
    config: dict[str, Any] | None = None
    seed: int = 0
    verdict: Verdict | None = None
    refusal: str = ""
    timing: Samples | None = None
    host: Samples | None = None
    gpu_before: dict[str, Any] | None = None
    gpu_after: dict[str, Any] | None = None
    mode: str = "auto"
    peak_memory_bytes: int | None = None
    goal: Goal | None = None

    def __post_init__(self) -> None:
        checked = self.verdict is not None and (self.verdict.passed or not self.is_ours)
        if self.timing is not None and not checked and not self.is_yardstick:
            raise ValueError(f"{self.contender} on {self.case}: no time is recorded for a result not known to be right")

    @property
    def is_ours(self) -> bool:
        """Whether the contender is a kernel of this package."""
        return self.contender.startswith(OURS)

    @property
    def is_yardstick(self) -> bool:
        """Whether the contender is a reference that computes no attention."""
        return self.contender.startswith(YARDSTICK)

    @property
    def is_peer(self) -> bool:
        """Whether the contender is another implementation of the call."""
        return not self.is_ours and not self.is_yardstick

    @property
    def inaccurate(self) -> bool:
        """Whether it was timed although its result failed a gate."""
        return self.timing is not None and self.verdict is not None and not self.verdict.passed

    @property
    def tflops(self) -> float | None:
        """10^12 operations a second, counting visible pairs only."""
        if self.timing is None or self.is_yardstick:
            return None
        return self.problem.flops / self.timing.median_us * 1e-6

    @property
    def bandwidth_gbps(self) -> float | None:
        """10^9 compulsory bytes a second: a lower bound of the bandwidth reached."""
        if self.timing is None or self.is_yardstick:
            return None
        return self.problem.compulsory_bytes / self.timing.median_us * 1e-3

    @property
    def tokens_per_s(self) -> float | None:
        """Query tokens a second, over the whole batch."""
        if self.timing is None or self.is_yardstick:
            return None
        return self.problem.rows / self.timing.median_us * 1e6

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON, including derived figures."""
        data = asdict(self)
        for part in ("timing", "host"):
            samples = getattr(self, part)
            if samples is not None:
                data[part]["median_us"] = samples.median_us
        derived = {
            "tflops": self.tflops,
            "bandwidth_gbps": self.bandwidth_gbps,
            "tokens_per_s": self.tokens_per_s,
        }
        return data | derived

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """Returns the measurement of a `to_dict` that `MEASUREMENT_LINE` allows.

        Raises:
            Mismatch: the values are valid, but not a valid measurement together.
        """
        values = {f.name: data[f.name] for f in fields(cls) if f.name in data}  # missing fields get their defaults
        values["problem"] = problem_of(values["problem"])
        values["verdict"] = None if values["verdict"] is None else Verdict(**values["verdict"])
        for part in ("timing", "host"):
            values[part] = None if values[part] is None else _samples(values[part])
        if values.get("goal") is not None:
            values["goal"] = Goal(**values["goal"])
            if (values["goal"].ratio is None) == (values["goal"].over_launch_us is None):
                raise Mismatch("goal must have a ratio or an over_launch_us, and not both")
        try:
            return cls(**values)
        except ValueError as error:
            raise Mismatch(str(error)) from None


@dataclass(frozen=True)
class Records:
    """The content of a file: measurements in order, each with the id of its environment."""

    environments: dict[str, dict[str, Any]]
    measurements: list[tuple[str, Measurement]]


class RecordWriter:
    """Appends one run's measurements to a file, under that run's environment.

    Raises:
        RecordError: the path holds another kind of file; the file ends in the middle of a line, so that appending
            would spoil two records; or a line could not be written completely.
    """

    def __init__(self, path: Path, environment: Mapping[str, Any]) -> None:
        check_appendable(path)
        self._path = path
        self._environment_id = environment_id(environment)
        self._append(environment_line(environment))

    def write(self, measurement: Measurement) -> None:
        self._append(measurement_line(self._environment_id, measurement))

    def _append(self, line: str) -> None:
        data = line.encode() + b"\n"
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                written = os.write(file, data)  # a single write in append mode keeps the lines of two writers apart
            finally:
                os.close(file)
        except OSError as error:
            raise RecordError(f"{self._path} cannot be written: {error.strerror or error}") from error
        if written != len(data):
            raise RecordError(f"{self._path}: only part of a record could be written; is the disk full?")


def check_appendable(path: Path) -> None:
    """Creates the file's directory if it is missing, and refuses a file that must not be appended to.

    Raises:
        RecordError: the message gives the reason.
    """
    try:
        with contextlib.suppress(FileExistsError):  # a file; the check below reports it
            path.parent.mkdir(parents=True, exist_ok=True)
        check_output(path, RECORD)
        if path.exists() and path.stat().st_size:
            if not _ends_with_newline(path):
                raise RecordError(f"{path}: its last line was cut off; remove that line, or write to another file")
            read_records(path)  # a damaged file could not be read back
    except CannotWrite as error:
        raise RecordError(str(error)) from error
    except OSError as error:
        raise RecordError(f"{path} cannot be written: {error.strerror or error}") from error


def environment_line(environment: Mapping[str, Any]) -> str:
    """Returns the line of an environment's record.

    Raises:
        RecordError: it could not be read back.
    """
    record = {"kind": "environment", "id": environment_id(environment), "environment": dict(environment)}
    return _line(record, ENVIRONMENT_LINE)


def measurement_line(environment_id: str, measurement: Measurement) -> str:
    """Returns the line of a measurement's record.

    Raises:
        RecordError: it could not be read back.
    """
    record = {"kind": "measurement", "environment_id": environment_id, **measurement.to_dict()}
    return _line(record, MEASUREMENT_LINE)


def environment_id(environment: Mapping[str, Any]) -> str:
    """Returns a short id of an environment. It differs from run to run, because it includes the date."""
    return hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:12]


def read_records(path: Path) -> Records:
    """Reads a record file.

    Raises:
        RecordError: the file cannot be read, or a line is not a valid record; the message names the line and the
            fault.
    """
    records = Records({}, [])
    try:
        text = read_text(path)
    except Unreadable as error:
        raise RecordError(str(error)) from error
    if not text:
        raise RecordError(f"{path}: the file is empty")
    # Split at line feeds only: JSON strings may contain other line breaks, such as U+2028.
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        try:
            _read_line(line, records)
        except (Unreadable, Mismatch) as error:
            raise RecordError(f"{path}:{number}: {error}") from error
    return records


def _read_line(line: str, records: Records) -> None:
    record = parse_json(line)
    if isinstance(record, dict) and "schema_version" not in record:
        shown = ", ".join(map(printable, list(record)[:SHOWN_KEYS])) or "none"
        raise Mismatch(
            f"this line is no record of `warpwave bench SUITE` but data of another kind; its keys are {shown}"
            + (", ..." if len(record) > SHOWN_KEYS else "")
        )
    if isinstance(record, dict) and (version := record.get("schema_version", "")) not in ("", *READABLE_VERSIONS):
        known = " and ".join(map(str, READABLE_VERSIONS))
        raise Mismatch(f"schema_version is {quoted(version)}; this version reads {known}")
    check(LINE, record)
    if record["kind"] == "environment":
        check(ENVIRONMENT_LINE, record)
        records.environments[record["id"]] = record["environment"]
        return
    check(MEASUREMENT_LINE, record)
    if record["environment_id"] not in records.environments:
        raise Mismatch(f"no environment {record['environment_id']!r} above this measurement")
    measurement = Measurement.from_dict(record)
    records.measurements.append((record["environment_id"], measurement))


def _line(record: Mapping[str, Any], schema: Table) -> str:
    line = json.dumps({"schema_version": SCHEMA_VERSION, **record})
    try:
        check(schema, json.loads(line))
    except Mismatch as error:
        raise RecordError(f"this could not be read back: {error}") from error
    return line


def _samples(data: Mapping[str, Any]) -> Samples:
    values = {f.name: data[f.name] for f in fields(Samples) if f.name in data}
    return Samples(**{**values, "samples_us": tuple(float(x) for x in values["samples_us"])})


def _is_record(path: Path) -> bool:
    """Returns whether a file begins with a complete environment record."""
    with path.open("rb") as file:
        first = file.readline(LONGEST_LINE)
    try:
        check(ENVIRONMENT_LINE, parse_json(first.decode()))
    except (Unreadable, Mismatch, UnicodeDecodeError):
        return False
    return True


RECORD = Kind("record of `warpwave bench`", _is_record)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
