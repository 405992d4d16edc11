"""`warpwave bench precision`: its rows, its order of ways, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from warpwave.workbench.bench import precision
from warpwave.workbench.bench.precision import WAYS, Row, main, measure, pareto, write_plot


def test_errors_are_those_of_the_result() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 130, 2, 32).bfloat16() for _ in range(3))
    rows = {row.way: row for row in measure("normal", q, k, v, rounds=1)}
    assert list(rows) == list(WAYS)
    assert rows["bfloat16"].relative_rms < 4e-3 < rows["int8, block 128"].relative_rms < 2e-2
    assert 2e-2 < rows["fp8, tensor"].relative_rms < rows["fp8, tensor"].worst_row
    assert rows["int8, block 128, clipped"].saturated > 0 == rows["int8, block 128"].saturated
    assert all(row.attention_us is None for row in rows.values()), "a CPU's times say nothing"


def test_rotation_helps_int8_with_outlier_channels() -> None:
    _, (_, (q, k, v)), *_ = precision.inputs(torch.device("cpu"))
    q, k, v = (x[:, :256] for x in (q, k, v))
    errors = [
        measure("outliers", q, k, v, 1, only)[-1].relative_rms for only in ("int8, block 128, rot", "int8, tensor")
    ]
    assert errors[0] < 0.6 * errors[1]


def test_the_front_has_no_way_that_another_beats() -> None:
    points = [(1.0, 0.5, "a"), (2.0, 0.6, "b"), (3.0, 0.1, "c"), (4.0, 0.1, "d")]
    assert [name for *_, name in pareto(points)] == ["a", "c"]


def test_rows_and_plot_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "ON_CPU", (1, 64, 1, 32))
    out = tmp_path / "rows.jsonl"
    assert main(out=out, rounds=1, only="bfloat16", device="cpu", json_output=True) == 0
    rows = [Row(**json.loads(line)) for line in out.read_text().splitlines()]
    assert {"normal", "outliers", "spikes"} <= {row.data for row in rows}
    assert main(out=out, rounds=1, only="bfloat16", device="cpu", json_output=True) == 2, "never over another file"
    assert main(out=None, rounds=1, only="fp4", device="cpu", json_output=True) == 2
    pytest.importorskip("matplotlib")
    write_plot(rows, tmp_path / "rows.svg")
    assert "relative RMS error" in (tmp_path / "rows.svg").read_text()


def test_what_cannot_be_measured_or_written_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(precision, "inputs", None)  # nothing is measured
    for device, out, said in (
        ("xyz", None, "'xyz' is no device"),
        ("meta", None, "not on meta"),
        ("cuda:99", None, "device cuda:99 was asked for"),
        ("cpu", tmp_path / "none" / "rows.jsonl", "there is no directory"),
        ("cpu", tmp_path, "is a directory"),
    ):
        assert main(out=out, rounds=1, only="", device=device, json_output=True) == 2
        assert said in capsys.readouterr().err


def test_rows_survive_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(device: torch.device):  # type: ignore[no-untyped-def]
        yield "normal", tuple(torch.randn(1, 64, 1, 32).bfloat16() for _ in range(3))
        raise KeyboardInterrupt

    monkeypatch.setattr(precision, "inputs", interrupted)
    out = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        main(out=out, rounds=1, only="int8", device="cpu", json_output=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["way"] for row in rows] == [way for way in WAYS if "int8" in way]
