"""The page of training runs: well-formed, nothing from outside, its figures and curves those of the runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.workbench.report.test_page import check, text
from warpwave.errors import InvalidInput
from warpwave.workbench.output_files import CannotWrite
from warpwave.workbench.report.figures import tick
from warpwave.workbench.report.training import TrainingRun, over_steps, training_page, write_training_page

RUNS = [
    TrainingRun("warpwave", [5.5, 4.0, 3.0, 2.0], 123456.0, 1000.0),
    TrainingRun("sdpa", [5.5, 4.25, 3.0, 2.0], 100000.0, 1500.0),
    TrainingRun("another <run>", [5.5, 4.0, 2.5, 2.125], 90000.0),
]


def lines(drawing: str) -> list[list[tuple[float, float]]]:
    found = re.findall(r'<polyline class="[^"]*" points="([^"]*)"', drawing)
    return [[(float(x), float(y)) for x, y in (pair.split(",") for pair in points.split())] for points in found]


def test_the_page_holds_the_runs() -> None:
    page = training_page("a card, 8 x 4096 tokens", RUNS)
    words = text(page)
    assert "a card, 8 x 4096 tokens" in words
    assert "largest difference from warpwave" in words
    assert "warpwave 123,456 1,000 5.50 2.00 -" in words
    assert "sdpa 100,000 1,500 5.50 2.00 0.250" in words
    assert "another <run> 90,000 - 5.50 2.12 0.500" in words
    assert check(page).ids == ["losses", "differences"]
    assert len(lines(page)) == 3 + 2  # a loss curve of each run, a difference of each but the first


def test_curves_stand_where_their_values_are() -> None:
    ((a, b, c),) = lines(over_steps({"run": [4.0, 2.0, 0.0]}, ["run"], "loss", name="x"))
    assert a[0] < b[0] < c[0] and b[0] - a[0] == pytest.approx(c[0] - b[0], abs=0.2)
    assert a[1] < b[1] < c[1] and b[1] - a[1] == pytest.approx(c[1] - b[1], abs=0.2)


def test_a_run_keeps_its_color_where_the_first_is_not_drawn() -> None:
    page = training_page("runs", RUNS)
    classes = re.findall(r'<polyline class="(l s\d)"', page)
    assert classes == ["l s0", "l s1", "l s2", "l s1", "l s2"]


def test_equal_runs_have_a_flat_difference() -> None:
    words = text(training_page("runs", [RUNS[0], TrainingRun("again", RUNS[0].losses, 1.0)]))
    assert "again 1.00 - 5.50 2.00 0" in words


def test_ticks_are_not_rounded() -> None:
    assert [tick(value) for value in (0.25, 2.5, 2, 10000)] == ["0.25", "2.5", "2", "10,000"]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "equally many"),
        (RUNS[:1], "equally many"),
        ([RUNS[0], TrainingRun("short", [1.0, 2.0], 1.0)], "equally many"),
        ([RUNS[0], RUNS[0]], "another name"),
        ([RUNS[0], TrainingRun("diverged", [5.5, 4.0, float("nan"), 2.0], 1.0)], "diverged is negative or not finite"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(runs: list[TrainingRun], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        training_page("runs", runs)


def test_no_foreign_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert write_training_page(path, "first", RUNS) == path
    write_training_page(path, "second", RUNS)
    assert "second" in path.read_text()
    path.write_text("mine")
    with pytest.raises(CannotWrite, match="already exists"):
        write_training_page(path, "third", RUNS)
    assert path.read_text() == "mine"
