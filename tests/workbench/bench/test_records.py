import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.bench.correctness import Verdict
from warpwave.workbench.bench.goals import Goal
from warpwave.workbench.bench.records import Measurement, RecordError, RecordWriter, environment_id, read_records
from warpwave.workbench.bench.timing import Samples

PROBLEM = AttentionProblem(
    batch=2,
    seqlen_q=64,
    seqlen_k=64,
    num_heads_q=4,
    num_heads_kv=2,
    head_dim=32,
    head_dim_v=32,
    dtype="bfloat16",
    softmax_scale=0.17,
    causal=Causal("top_left"),
    window_size=(5, -1),
    mask_shape=(1, 1, 64, 64),
    lengths=((1, 2), (3, 4)),
)
RIGHT = Verdict(True, "", 1e-3, 2e-3, 1e-3, 2e-3, 64)
TIMING = Samples((100.0, 101.5, 99.0), "events", repeats=20, calls_per_repeat=1, l2_flushed=True)
MEASUREMENT = Measurement(
    suite="s",
    case="c",
    problem=PROBLEM,
    contender="warpwave auto",
    kernel="flash_fwd",
    config={"block_m": 64},
    verdict=RIGHT,
    timing=TIMING,
    host=Samples((5.0, 5.1, 5.2), "host clock", 3, 64, False),
    gpu_before={"sm_mhz": 1980},
)
REFUSED = Measurement(suite="s", case="c", problem=PROBLEM, contender="sdpa_math", refusal="too large")
ENVIRONMENT = {"date": "2026-11-21", "torch": "2.11.0"}


def write(path: Path, *measurements: Measurement) -> None:
    writer = RecordWriter(path, ENVIRONMENT)
    for m in measurements:
        writer.write(m)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.jsonl"
    write(path, MEASUREMENT, REFUSED)
    records = read_records(path)
    name = environment_id(ENVIRONMENT)
    assert records.environments == {name: ENVIRONMENT}
    assert records.measurements == [(name, MEASUREMENT), (name, REFUSED)]


def test_a_second_run_appends_its_own_environment(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write(path, MEASUREMENT)
    first = path.read_bytes()
    later = {**ENVIRONMENT, "date": "2026-11-22"}
    RecordWriter(path, later).write(REFUSED)
    assert path.read_bytes().startswith(first)
    assert [name for name, _ in read_records(path).measurements] == [environment_id(ENVIRONMENT), environment_id(later)]


def test_figures_for_other_readers(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write(path, MEASUREMENT)
    environment, measurement = (json.loads(line) for line in path.read_text().splitlines())
    assert environment["kind"] == "environment"
    assert measurement["timing"]["samples_us"] == [100.0, 101.5, 99.0]
    assert measurement["timing"]["median_us"] == 100.0
    assert measurement["tflops"] == pytest.approx(PROBLEM.flops / 100e-6 / 1e12)
    assert measurement["bandwidth_gbps"] == pytest.approx(PROBLEM.compulsory_bytes / 100e-6 / 1e9)
    assert measurement["problem"]["causal"] == {"alignment": "top_left"}


def test_no_speed_without_a_right_result() -> None:
    for verdict in (None, replace(RIGHT, passed=False, reason="wrong")):
        with pytest.raises(ValueError, match="no time is recorded for a result not known to be right"):
            replace(MEASUREMENT, verdict=verdict)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: "{", r"r\.jsonl:2: not JSON: .*column 2"),
        (lambda r: "[1]", r"r\.jsonl:2: it is \[1\]; it must be a table"),
        (lambda r: {**r, "schema_version": 3}, "schema_version is 3; this version reads 1 and 2"),
        (lambda r: {**r, "kind": "note"}, "kind is 'note'; it must be one of 'environment', 'measurement'"),
        (lambda r: {**r, "environment_id": "x"}, "no environment 'x' above this measurement"),
        (lambda r: {k: v for k, v in r.items() if k != "problem"}, "'problem' is missing"),
        (
            lambda r: {**r, "problem": {**r["problem"], "heads": 3}},
            "problem has an entry 'heads', which this version",
        ),
        (lambda r: {**r, "problem": 3}, r"r\.jsonl:2: "),
        (
            lambda r: {**r, "timing": {**r["timing"], "samples_us": ["fast"]}},
            r"samples_us\[0\] is 'fast'; it must be a number",
        ),
        (lambda r: {**r, "verdict": None}, "no time is recorded"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, spoil: Callable[[Any], Any], message: str) -> None:
    path = tmp_path / "r.jsonl"
    write(path, MEASUREMENT)
    first, second = path.read_text().splitlines()
    spoilt = spoil(json.loads(second))
    path.write_text(first + "\n" + (spoilt if isinstance(spoilt, str) else json.dumps(spoilt)) + "\n")
    with pytest.raises(RecordError, match=message):
        read_records(path)


def test_files_that_are_no_records(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"none\.jsonl cannot be read: No such file or directory"):
        read_records(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(RecordError, match="the file is empty"):
        read_records(tmp_path / "empty.jsonl")


def test_a_cut_off_file_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write(path, MEASUREMENT)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(RecordError, match="last line was cut off"):
        RecordWriter(path, ENVIRONMENT)


def test_what_is_no_record_is_not_appended_to(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.md"
    thesis.write_text("# Attention\n")
    with pytest.raises(RecordError, match=r"already exists and is not a record"):
        RecordWriter(thesis, ENVIRONMENT)
    assert thesis.read_text() == "# Attention\n"
    with pytest.raises(RecordError, match="is a directory"):
        RecordWriter(tmp_path, ENVIRONMENT)
    with pytest.raises(RecordError, match="there is no directory"):
        RecordWriter(thesis / "r.jsonl", ENVIRONMENT)


@pytest.mark.parametrize(
    "first",
    [
        '{"schema_version": "1.4.0", "id": "CVE-2026-1", "affected": []}',  # an OSV record
        '{"schema_version": 2, "kind": "environment", "id": "x"}',
        '{"schema_version": 2, "kind": "environment", "id": "x", "environment": {}, "mine": 1}',
        '# {"schema_version": 2, "kind": "environment", "id": "x", "environment": {}}',
        "[" * 5000,
    ],
)
def test_only_what_begins_as_a_record_is_appended_to(first: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.json"
    theirs.write_text(first + "\n")
    with pytest.raises(RecordError, match="already exists and is not a record"):
        RecordWriter(theirs, ENVIRONMENT)
    assert theirs.read_text() == first + "\n"


def test_what_could_not_be_read_is_neither_appended_to_nor_written(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write(path, MEASUREMENT)
    whole = path.read_text()
    path.write_text(whole + "my remark\n")
    with pytest.raises(RecordError, match=r"r\.jsonl:3: not JSON"):
        RecordWriter(path, ENVIRONMENT)
    path.write_text(whole)
    with pytest.raises(RecordError, match=r"could not be read back: case is .*; it must be one line of"):
        RecordWriter(path, ENVIRONMENT).write(replace(MEASUREMENT, case="two\nlines"))
    assert len(read_records(path).measurements) == 1


def test_a_disk_that_is_full_is_an_error_of_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RecordWriter(tmp_path / "r.jsonl", ENVIRONMENT)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RecordError, match=r"r\.jsonl cannot be written: No space left on device"):
        writer.write(MEASUREMENT)


def test_a_record_of_version_1_reads_as_it_was_meant(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write(path, MEASUREMENT)
    lines = []
    for line in path.read_text().splitlines():
        record = json.loads(line) | {"schema_version": 1}
        for added in ("mode", "peak_memory_bytes", "goal", "tokens_per_s"):
            record.pop(added, None)
        for part in ("timing", "host"):
            record.get(part, {}).pop("input_sets", None)
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines) + "\n")
    assert [m for _, m in read_records(path).measurements] == [MEASUREMENT]


def test_what_version_2_added_survives(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    full = replace(MEASUREMENT, mode="graph", peak_memory_bytes=1 << 20, goal=Goal(over_launch_us=2.0))
    write(path, full)
    ((_, read),) = read_records(path).measurements
    assert read == full and read.tokens_per_s == pytest.approx(2 * 64 / 100e-6)
    assert json.loads(path.read_text().splitlines()[-1])["tokens_per_s"] == read.tokens_per_s


def test_who_may_have_a_time_beside_a_result_that_is_wrong() -> None:
    wrong = replace(RIGHT, passed=False, reason="no")
    with pytest.raises(ValueError, match="no time is recorded for a result not known to be right"):
        replace(MEASUREMENT, verdict=wrong)
    peer = replace(MEASUREMENT, contender="three_calls", verdict=wrong)
    assert peer.inaccurate and peer.is_peer
    yardstick = replace(MEASUREMENT, contender="yardstick empty_kernel", verdict=None)
    assert yardstick.tflops is None and yardstick.bandwidth_gbps is None and not yardstick.is_peer
    with pytest.raises(ValueError, match="no time is recorded"):
        replace(MEASUREMENT, contender="peer", verdict=None)


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"data": "normal", "way": "bfloat16", "rms": 6e-05}, "data, way, rms"),
        ({"kind": "environment", "date": "2026-11-23", "code": {}}, "kind, date, code"),
        (dict.fromkeys("abcdefg", 1), "a, b, c, d, e, ..."),
        ({"\x1b[2J": 1}, "\\x1b[2J"),
        ({}, "none"),
    ],
)
def test_rows_of_another_kind_are_named_by_their_keys(tmp_path: Path, row: dict[str, object], keys: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(RecordError) as refused:
        read_records(path)
    said = str(refused.value)
    assert said.startswith(f"{path}:1: ") and "bench SUITE" in said and said.endswith(f"its keys are {keys}")
