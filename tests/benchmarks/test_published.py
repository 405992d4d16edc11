"""Predictions beside published times: the files are what the points give, and the goals that they hold to."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from benchmarks import published as bench
from benchmarks.published import (
    Compared,
    Point,
    check,
    checks,
    compare,
    dumped,
    families,
    files,
    pairs,
    points,
    violations,
)
from warpwave.workbench.model import published

FOUND = points()
COMPARED = list(compare(FOUND))
LEAST_POINTS = 5
# Published kernels of wide heads on this card differ by 1.8 times from each other, so no prediction suits all.
APART = ("rtx4090", "three_kernel")


def _known() -> dict[str, object]:
    data: dict[str, object] = json.loads(published.FILE.read_text(encoding="utf-8"))["families"]
    return data


def test_the_files_are_what_the_points_and_the_model_give() -> None:
    for path, text in files(FOUND, COMPARED, _known()).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m benchmarks.published"


def test_the_families_are_what_their_points_fit() -> None:
    assert json.loads(dumped(families(FOUND), {}))["families"] == _known(), "run python -m benchmarks.published --fit"


def test_no_kernel_that_accumulates_in_float32_beats_a_bound() -> None:
    slower, least = violations(FOUND)
    assert least > 1 and all(p.cls == "fp16acc" for p, _ in slower)
    wrong = [replace(p, time_us=p.time_us / 20) for p in FOUND]
    assert len(violations(wrong)[0]) > len(FOUND) / 2, "a violation would be found"


def test_each_card_with_five_points_is_near_the_published_times() -> None:
    for card, kernels in checks(COMPARED).items():
        for kernel, figures in kernels.items():
            if figures["points"] >= LEAST_POINTS:
                assert 0.845 <= figures["median"] <= 1.15, (card, kernel, figures)
                assert figures["within_30"] >= (0.5 if (card, kernel) == APART else 0.8), (card, kernel, figures)


def test_the_halves_that_judge_are_near_too() -> None:
    for arch, family in published.families().items():
        assert family.fitted.points >= family.judged.points >= 2
        assert 0.85 <= family.judged.median <= 1.15 and family.judged.within_30 >= 0.8, arch


def test_cards_are_predicted_in_the_published_order() -> None:
    right, total = pairs(COMPARED)
    assert total >= 40 and right >= 0.95 * total


def test_an_order_that_is_wrong_is_counted_as_such() -> None:
    (a, b) = (
        next(c for c in COMPARED if c.point.sheet.key == key and c.ours == "flash_fwd") for key in ("h100", "mi300x")
    )
    same = a.point.problem
    fast, slow = (Point("", c.point.sheet, "", "triton", same, time) for c, time in ((a, 100.0), (b, 200.0)))
    assert pairs([Compared(fast, "flash_fwd", 1.0), Compared(slow, "flash_fwd", 1.0)]) == (1, 1)
    assert pairs([Compared(fast, "flash_fwd", 3.0), Compared(slow, "flash_fwd", 1.0)]) == (0, 1)
    assert pairs([Compared(fast, "flash_fwd", 1.0), Compared(slow, "tiled", 1.0)]) == (0, 0)
    close = Point("", b.point.sheet, "", "triton", same, 105.0)
    assert pairs([Compared(fast, "flash_fwd", 1.0), Compared(close, "flash_fwd", 1.0)]) == (0, 0)


def test_figures_of_ratios_by_hand() -> None:
    found = check([0.5, 0.8, 1.0, 1.25, 1.6])
    assert (found.points, found.median, found.least, found.most) == (5, 1.0, 0.5, 1.6)
    assert (found.within_30, found.factor_90) == (0.6, 2.0)
    assert check([0.5]).factor_90 == check([2.0]).factor_90 == 2.0


def test_every_point_has_its_source_and_its_rate_fits_its_time() -> None:
    with bench.POINTS.open(encoding="utf-8", newline="") as file:
        rows = list(bench.csv.DictReader(file))
    assert len(rows) == len(FOUND) > 200 and all(row["source"] for row in rows)
    for row, p in zip(rows, FOUND, strict=True):
        assert p.tflops == pytest.approx(float(row["tflops"]), rel=0.02), row


def test_a_card_that_the_catalog_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="the catalog has no h900"):
        bench.point({"gpu": "h900"})


def test_the_drawing_has_a_dot_for_each_point_and_a_stroke_for_each_row() -> None:
    root = ElementTree.fromstring(bench.published_page.DRAWING.read_text(encoding="utf-8"))
    classes = [element.get("class") for element in root]
    assert classes.count("p") == len(COMPARED) and classes.count("m") == len(bench.published_page.by_row(COMPARED))
    width = float(root.get("viewBox", "").split()[2])
    assert all(0 <= float(dot.get("cx", "-1")) <= width for dot in root if dot.get("class") == "p")
