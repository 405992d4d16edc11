"""Waterfalls: exact, on one axis, with what removes each ceiling; in the page and in the Markdown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.workbench.report.samples import CPU, measurement, source
from warpwave.workbench import report as report_package
from warpwave.workbench.model.losses import REMEDIES
from warpwave.workbench.report import shipped
from warpwave.workbench.report.content import report, section
from warpwave.workbench.report.machines import Source, machines
from warpwave.workbench.report.markdown import markdown
from warpwave.workbench.report.page import html
from warpwave.workbench.report.waterfall import NAMES, note, shown

SHIPPED = Source(shipped.records(), "shipped")


def test_every_case_of_ours_has_a_waterfall_whose_pieces_add_up() -> None:
    found = [fall for machine in machines([SHIPPED]) for fall in section(machine).falls]
    assert len(found) >= 18
    for fall in found:
        assert all(0 <= s.start <= 100 and s.start + s.wide <= 100.0001 for s in fall.segments)
        total = 1.0
        for loss in fall.losses.losses:
            total *= loss.factor
        assert total == pytest.approx(fall.losses.ratio, rel=1e-9)
        assert all(y.share <= 1 for y in fall.losses.yardsticks)
    assert {number for number, _ in shown(found)} <= set(range(len(NAMES)))
    assert any(remedy in note(found) for remedy in REMEDIES.values())


def test_page_and_markdown_tell_where_the_time_went() -> None:
    page, text = html([SHIPPED]), markdown(report([SHIPPED]))
    for said in (page, text):
        assert "Where the time went" in said and "remainder" in said
    assert page.count('class="fall"') >= 18


def test_a_cpu_record_has_none() -> None:
    machine = machines([source([measurement("warpwave auto", 100.0)], CPU)])[0]
    assert not section(machine).falls


def test_every_loss_has_a_color_of_its_own() -> None:
    style = (Path(report_package.__file__).parent / "style.css").read_text()
    colors = re.findall(r"\.falls \.f(\d+) \{ background: (#\w+); \}", style)
    assert [int(number) for number, _ in colors] == list(range(len(NAMES)))
    assert len({color for _, color in colors}) == len(colors)
    assert f".falls .f{len(NAMES) - 1} {{ opacity" in style, "the remainder, which no model explains, is paler"
