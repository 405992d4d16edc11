"""The picture of all measured rows: the committed files are what the records give, and no dot hides another."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rows_figure
from benchmarks.measured_rows import FOLDERS, Row, newest_rows, rows_of
from benchmarks.rows_figure import BEYOND, HIGH, LABEL_AT, PLOT, RADIUS, SECTIONS, WIDTH, files, lanes, swarm

SVG = "{http://www.w3.org/2000/svg}"
Rows = dict[tuple[str, str], list[Row]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    """All rows, from all records; not read where the tests are only collected."""
    return newest_rows()


def test_the_committed_files_are_what_the_records_give(rows: Rows) -> None:
    for path, text in files(rows).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m benchmarks.rows_figure"


def test_every_suite_has_its_place_and_is_drawn_once(rows: Rows) -> None:
    assert {suite for suite, _ in rows} <= {suite for suites in SECTIONS.values() for suite in suites}
    drawn = [row for _, _, of_lane in lanes(rows) for row in of_lane]
    assert sorted(map(repr, drawn)) == sorted(map(repr, every(rows)))
    unknown = {("new suite", "NVIDIA H200"): rows["tiny", "NVIDIA H200"]}
    assert [(section, label) for section, label, _ in lanes(unknown)] == [("Other", "new suite")]


def test_ratios_are_those_of_the_records_that_the_documents_quote(rows: Rows) -> None:
    least = {key: min(row.ratio for row in found) for key, found in rows.items()}
    assert least["forward", "NVIDIA H200"] == pytest.approx(1.007, abs=5e-4)
    assert least["decode", "NVIDIA H100 80GB HBM3"] == pytest.approx(0.995, abs=5e-4)
    assert least["float32", "NVIDIA H200"] == pytest.approx(0.272, abs=5e-4)
    worst = min(rows["backward", "NVIDIA H100 80GB HBM3"], key=lambda row: row.ratio)
    assert (worst.case, worst.peer) == ("64, 1 x 16384, full", "flash_attention_4") and worst.is_loss


def test_each_dot_is_in_its_part_and_hides_no_other(rows: Rows) -> None:
    for found in rows.values():
        dots = swarm(found)
        assert len(dots) == len(found)
        for x, _, row in dots:
            low, high = BEYOND if row.ratio > HIGH else PLOT
            assert low <= x <= high
        for (x1, y1, a), (x2, y2, b) in combinations(dots, 2):
            least = rows_figure.radius(a) + rows_figure.radius(b)
            assert (x1 - x2) ** 2 + (y1 - y2) ** 2 >= least**2, (a, b)


def test_losses_have_rings_and_every_text_has_room(rows: Rows) -> None:
    root = ElementTree.fromstring(rows_figure.DRAWING.read_text(encoding="utf-8"))
    losses = sum(row.is_loss for row in every(rows))
    assert sum(ring.get("class") == "loss" for ring in root.iter(f"{SVG}circle")) == losses + 1  # one in the legend
    titles = [title.text or "" for path in root.iter(f"{SVG}path") for title in path]
    assert len(titles) == len(every(rows)) and all(f"{row.ratio:.3f}" in " ".join(titles) for row in every(rows))
    boxes = [_box(text) for text in root.iter(f"{SVG}text")]
    for left, right, _, text in boxes:
        assert 0 <= left and right <= WIDTH, text
    for a, b in combinations(boxes, 2):
        assert abs(a[2] - b[2]) >= 13 or a[1] <= b[0] or b[1] <= a[0], (a, b)


def every(rows: Rows) -> list[Row]:
    return [row for found in rows.values() for row in found]


def _box(text: ElementTree.Element) -> tuple[float, float, float, str]:
    """Returns the left and right end and the base line of a text, for letters of the usual width."""
    said, x = text.text or "", float(text.get("x", ""))
    wide = 6.6 * len(said)
    left = x - {"end": wide, "middle": wide / 2}.get(text.get("text-anchor", ""), 0.0)
    return left, left + wide, float(text.get("y", "")), said


def test_a_whole_record_is_taken_before_a_newer_one_that_was_ended(tmp_path: Path) -> None:
    write(tmp_path / "old.json", "2026-01-01", ("a", "b"))
    write(tmp_path / "whole.json", "2026-01-02", ("a", "b"))
    write(tmp_path / "ended.json", "2026-01-03", ("a",))
    (rows,) = newest_rows([tmp_path]).values()
    assert [(row.case, row.record) for row in rows] == [("a", "whole.json"), ("b", "whole.json")]
    assert [row.suite for row in rows] == ["backward", "backward"]


def test_the_best_peer_and_the_ratio_by_hand(tmp_path: Path) -> None:
    write(tmp_path / "one.json", "2026-01-01", ("a",))
    (row,) = rows_of(tmp_path / "one.json")
    assert (row.peer, row.ours_us, row.peer_us) == ("flash_attention_4", 2000.0, 1800.0)
    assert row.ratio == pytest.approx(0.9) and row.is_loss
    assert not replace(row, ratio=1.0).is_loss


def test_files_without_peers_have_no_rows() -> None:
    paths = {path.name: path for folder in FOLDERS for path in folder.glob("*.json*")}
    for name in ("2026-11-22-h200-model-grid-5.jsonl", "2026-11-21-h200-cliff.jsonl", "2026-11-22-h200-house.json"):
        assert not list(rows_of(paths[name]))


def test_a_peer_that_is_too_inaccurate_is_no_best_peer() -> None:
    path = next(folder / "2026-11-22-h200-large-head-dim.jsonl" for folder in FOLDERS[1:])
    found: list[Row] = list(rows_of(path))
    assert len(found) == 13 and "three_calls" not in {row.peer for row in found}


def write(path: Path, date: str, cases: tuple[str, ...]) -> None:
    ms: dict[str, Any] = {
        "warpwave": [2.0, 2.1, 1.9],
        "deterministic": [1.0, 1.0, 1.0],
        "cudnn": [3.0, 3.0, 3.0],
        "flash_attention_4": [1.8, 1.7, 1.9],
    }
    environment = {"gpu": {"name": "NVIDIA H200"}, "date": date}
    rows = [{"case": case, "ms": ms} for case in cases]
    path.write_text(json.dumps({"environment": environment, "rows": rows}), encoding="utf-8")


def test_lanes_of_other_cards_are_named(rows: Rows) -> None:
    labels = [label for _, label, _ in lanes(rows)]
    assert "the tuned rows" in labels and "the tuned rows, H100" in labels
    assert RADIUS < rows_figure.RING and LABEL_AT < PLOT[0]
