"""benchmarks/bench_apart.py: cases are prepared together, timed apart, recorded as `warpwave bench` records them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import bench_apart
from warpwave.workbench.bench import environment
from warpwave.workbench.bench.contenders import contenders
from warpwave.workbench.bench.records import RecordWriter, read_records
from warpwave.workbench.bench.workloads import load_suite

SUITE = """
description = "small"
kernels = ["eager", "torch_sdpa"]
cases = [{ head_dim = 16, num_heads_q = 2, batch = 1, seqlen_q = [8, 16], dtype = "float32" }]
"""


def test_a_case_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every case once, under one environment; what is in the record is not measured again."""
    suite, record = tmp_path / "small.toml", tmp_path / "record.jsonl"
    suite.write_text(SUITE)
    command = [str(suite), "--out", str(record), "--peer", "none", "--rounds", "2", "--device", "cpu"]
    # One case already exists, as `warpwave bench` would have left it: every process that is spared is two seconds.
    cpu, kernels = torch.device("cpu"), ("eager", "torch_sdpa")
    (first,) = (case for case in load_suite(str(suite)).cases if "1x8 " in case.name)
    settings = bench_apart.Settings(cpu, ("auto",), 2, 60.0, host=False)
    writer = RecordWriter(record, environment.describe(cpu))
    for measurement in bench_apart.measure(first, "small", contenders(kernels, ()), settings):
        writer.write(measurement)
    assert bench_apart.main([*command, "--resume"]) == 0
    assert "1 cases to measure, 1 are in" in capsys.readouterr().err
    measured = [m for _, m in read_records(record).measurements]
    assert sorted((m.case.split()[1], m.contender) for m in measured) == [
        (case, f"warpwave {kernel}") for case in ("1x16", "1x8") for kernel in kernels
    ]
    assert all(m.timing is not None and len(m.timing.samples_us) == 2 and m.host is None for m in measured)
    assert bench_apart.main([*command, "--resume"]) == 0


def test_who_is_late_is_left_to_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite, record = tmp_path / "small.toml", tmp_path / "record.jsonl"
    suite.write_text(SUITE)
    command = [str(suite), "--out", str(record), "--peer", "none", "--rounds", "1", "--device", "cpu"]
    assert bench_apart.main([*command, "--only", "1x8 ", "--prepare", "0.01"]) == 1
    assert "not ready in time, left to --resume" in capsys.readouterr().err
    assert not list(read_records(record).measurements)
