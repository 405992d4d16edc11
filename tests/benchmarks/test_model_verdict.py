"""The tables of docs/notes/model.md are what their files say, and a verdict is made once and counted right."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import model_verdict
from benchmarks.draw_model_grid import SUITES
from benchmarks.model_verdict import DOC, ROOT, Judged, NoVerdict, judge, kind_of, predictions, tables, written
from warpwave import dispatch
from warpwave.workbench.bench.records import read_records
from warpwave.workbench.bench.workloads import load_suite
from warpwave.workbench.explain.recorded_time import config_of, in_graph

RECORD = ROOT / "benchmarks" / "records" / "2026-11-21-h200-scale-blocks.jsonl"


def _data(ratios: list[float], **changes: object) -> dict[str, object]:
    points = [asdict(Judged(f"case {i}", "tiled", "full", 100 * r, 100.0)) for i, r in enumerate(ratios)]
    return {
        "record": "grid.jsonl", "device": "a card", "measured": "2026-11-21", "calibrated": "2026-11-20",
        "fitted_to": ["other.jsonl"], "points": points,
    } | changes  # fmt: skip


def test_the_tables_of_the_document_are_what_their_files_say() -> None:
    document = DOC.read_text(encoding="utf-8")
    assert written(document) == document, "run python -m benchmarks.model_verdict"
    assert document.count("<!-- judged in") == 7 and "<!-- fit of h200 -->" in document


def test_a_verdict_is_counted_over_all_points_and_shows_the_worst() -> None:
    said = tables(_data([1.05] * 9 + [0.5]))
    assert "10 points" in said and "**median error 5.0%, 90% within 20 %** (goals: 10 % and 90 %; both met)" in said
    assert "| case 9 | `tiled` | 50 | 100 | 2.00 |" in said and "| full | 10 |" in said
    assert "neither met" in tables(_data([1.3] * 10)) and "the share is not" in tables(_data([1.05] * 6 + [2.0] * 4))
    assert "which was fitted to them" in tables(_data([1.0], fitted_to=["grid.jsonl"]))


def test_every_case_of_the_grids_has_its_kind() -> None:
    kinds = {
        kind_of(case.problem)
        for name in ("model_grid", "model_grid_2", "model_grid_3", "model_grid_4", "model_grid_5")
        for case in load_suite(SUITES / f"{name}.toml").cases
    }
    assert kinds == {
        "packed", "float32", "one query", "very wide heads", "window", "odd sizes", "GQA", "under-filled", "causal",
        "full",
    }  # fmt: skip


def test_a_record_is_judged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, document = tmp_path / "grid.jsonl", tmp_path / "model.md"
    shutil.copy(RECORD, record)
    document.write_text("<!-- judged in nowhere.json -->\n<!-- end of judged -->\n", encoding="utf-8")
    monkeypatch.setattr(model_verdict, "DOC", document)
    monkeypatch.setattr(sys, "argv", ["model_verdict", "--judge", str(record)])
    assert model_verdict.main() == 0
    kept = json.loads((tmp_path / "grid-judged.json").read_text(encoding="utf-8"))
    assert kept["device"] == "NVIDIA H200" and len(kept["points"]) == 11
    assert all(0.2 < point["predicted_us"] / point["measured_us"] < 5 for point in kept["points"])
    assert "Not measured yet." in document.read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        model_verdict.main()


def test_what_cannot_be_judged_is_said(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.jsonl"
    nothing.write_text(RECORD.read_text(encoding="utf-8").splitlines()[0] + "\n", encoding="utf-8")
    with pytest.raises(NoVerdict, match=r"nothing\.jsonl has no times of our kernels"):
        judge(nothing)
    with pytest.raises(NoVerdict, match="no section"):
        written("nothing")


def test_predictions_written_before_are_the_ones_judged(tmp_path: Path) -> None:
    record = tmp_path / "grid.jsonl"
    record.write_text(RECORD.read_text(encoding="utf-8"), encoding="utf-8")
    before = judge(record)
    data = predictions(SUITES / "model_grid_4.toml")
    ways: dict[tuple[str, str], set[bool]] = {}
    for point in data["points"]:
        ways.setdefault((point["case"], point["kernel"]), set()).add(point["graph"])
        assert point["predicted_us"] > 0
    assert len(ways) >= 70
    assert all(modes == {True, False} for modes in ways.values()), "which way it is timed is not known before"
    kernels = {kernel.NAME: kernel for kernel in dispatch.KERNELS}
    said: list[dict[str, Any]] = []
    for _, m in read_records(record).measurements:
        if m.is_ours and m.timing is not None:
            config = asdict(config_of(kernels[m.kernel], m.config or {}))
            graph = in_graph(m)
            said.append({"case": m.case, "kernel": m.kernel, "config": config, "graph": graph, "predicted_us": 7.0})
            said.append({"case": m.case, "kernel": m.kernel, "config": config, "graph": not graph, "predicted_us": 8.0})
    beside = tmp_path / "grid-predicted.json"
    beside.write_text(json.dumps(data | {"points": said}), encoding="utf-8")
    judged = judge(record)
    assert {p["predicted_us"] for p in judged["points"]} == {7.0} and judged["fitted_to"] == data["fitted_to"]
    assert [p["measured_us"] for p in judged["points"]] == [p["measured_us"] for p in before["points"]]
    said[0]["config"] = {}
    beside.write_text(json.dumps(data | {"points": said}), encoding="utf-8")
    with pytest.raises(NoVerdict, match="has no prediction of"):
        judge(record)
