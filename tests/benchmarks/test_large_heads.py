"""benchmarks/large_heads.py: which points it draws, where it says that kernels cross, and what it does without any."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import large_heads
from tests.benchmarks.test_ladder import ENVIRONMENT, PASSED
from warpwave.workbench.bench.records import Measurement, RecordWriter
from warpwave.workbench.bench.timing import Samples
from warpwave.workbench.bench.workloads import load_suite

PROBLEMS = {case.name: case.problem for case in load_suite("large_head_dim").cases}
AT_512 = next(p for p in PROBLEMS.values() if p.head_dim == 512 and p.seqlen_k == 2048 and p.causal is None)


def measurement(contender: str, head_dim: int, us: float | None, **fields: Any) -> Measurement:
    problem = replace(AT_512, head_dim=head_dim, head_dim_v=head_dim, **fields.pop("problem", {}))
    timing = None if us is None else Samples((us,), "events", 1, 1, True)
    values: dict[str, Any] = {"verdict": PASSED, "timing": timing} | fields
    return Measurement(suite="large_head_dim", case=f"d{head_dim}", problem=problem, contender=contender, **values)


WRONG = replace(PASSED, passed=False, reason="too far")
MEASURED = [
    measurement("warpwave a", 512, 10.0),
    measurement("warpwave b", 512, 20.0),
    measurement("warpwave a", 1024, 50.0),
    measurement("warpwave b", 1024, 40.0),
    measurement("peer", 1024, 5.0, verdict=WRONG),
    measurement("warpwave b", 2048, None, verdict=None, refusal="too wide"),
    measurement("warpwave a", 512, 1.0, problem={"seqlen_q": 8192, "seqlen_k": 8192}),
]


def test_points_are_of_one_seqlen_and_have_a_time() -> None:
    found = large_heads.by_width(MEASURED)
    assert list(found) == ["full", "causal"] and not found["causal"]
    assert {name: sorted(of_width) for name, of_width in found["full"].items()} == {
        "warpwave a": [512, 1024], "warpwave b": [512, 1024], "peer": [1024],
    }  # fmt: skip


def test_the_crossover_is_between_accurate_contenders() -> None:
    assert large_heads.crossovers(large_heads.by_width(MEASURED)["full"]) == [
        (512, "warpwave a", 10.0),
        (1024, "warpwave b", 40.0),
    ]


def test_a_record_becomes_a_figure_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, figure = tmp_path / "record.jsonl", tmp_path / "figure.svg"
    writer = RecordWriter(record, ENVIRONMENT)
    for m in MEASURED:
        writer.write(m)
    large_heads.main([str(record), str(figure)])
    assert figure.read_text().startswith("<?xml")
    printed = capsys.readouterr().out
    assert "fastest at 1024, full: warpwave b, 40.0 us" in printed
    row = next(line for line in printed.splitlines() if line.startswith("| 1024"))
    assert "(" in row.split("|")[4], "a peer that is not accurate enough stands in brackets"


def test_a_record_of_something_else_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.jsonl"
    RecordWriter(record, ENVIRONMENT)
    with pytest.raises(SystemExit) as stop:
        large_heads.main([str(record), str(tmp_path / "figure.svg")])
    assert stop.value.code == 2 and "no times of the suite large_head_dim" in capsys.readouterr().err


def test_a_panel_for_each_number_of_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.jsonl"
    writer = RecordWriter(record, ENVIRONMENT)
    for case in load_suite("large_head_crossover").cases:
        for kernel, us in (("large_head_dim", 1.0 + case.problem.seqlen_q), ("three_kernel", 40.0)):
            timing = Samples((us,), "events", 1, 1, True)
            writer.write(
                Measurement(
                    suite="large_head_crossover", case=case.name, problem=case.problem, contender=kernel,
                    verdict=PASSED, timing=timing,
                )
            )  # fmt: skip
    assert large_heads.main([str(record), str(tmp_path / "figure.svg"), "--over", "seqlen_q"]) == 0
    printed = capsys.readouterr().out
    for keys in ("512", "2,048", "8,192"):
        assert f"fastest at 32, {keys} keys: large_head_dim, 33.0 us" in printed
        assert f"fastest at 64, {keys} keys: three_kernel, 40.0 us" in printed
