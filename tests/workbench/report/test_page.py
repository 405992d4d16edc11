"""The page: one well-formed file with nothing from outside, whose every figure follows from the record."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.workbench.report.samples import CPU, H200, measurement, pair, problem, samples, source
from warpwave.workbench.bench.records import Measurement, Records
from warpwave.workbench.report import page as page_module
from warpwave.workbench.report import shipped
from warpwave.workbench.report.content import report
from warpwave.workbench.report.machines import Source
from warpwave.workbench.report.markdown import markdown
from warpwave.workbench.report.page import LARGEST_BYTES, TooLarge, html
from warpwave.workbench.report.waterfall import COLUMNS

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Checker(HTMLParser):
    """Fails where tags do not nest, or an attribute or tag could load something."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.words: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base", "form"), tag
        for name, value in attrs:
            assert not name.startswith("on"), name
            assert name not in ("src", "srcset", "xlink:href", "action"), name
            assert name != "href" or (value or "").startswith("#"), value
            if name == "id":
                self.ids.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words.append(data)


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    for drawing in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        root = ElementTree.fromstring(drawing)
        for node in root.iter():
            for name, value in node.attrib.items():
                assert "nan" not in value.lower() or name in ("aria-labelledby", "id"), (name, value)
    style = "".join(re.findall(r"<style>(.*?)</style>", page, flags=re.DOTALL))
    assert "url(" not in style
    assert "@import" not in style
    assert len(page.encode()) <= LARGEST_BYTES
    return checker


def text(page: str) -> str:
    return " ".join(" ".join(check(page).words).split())


@pytest.fixture(scope="module")
def shipped_page() -> str:
    return html([Source(shipped.records(), "shipped")])


def test_the_shipped_record_makes_a_whole_page(shipped_page: str) -> None:
    words = text(shipped_page)
    measured = min(environment["date"] for environment in shipped.records().environments.values())[:10]
    assert f"Measured on an NVIDIA H200 on {measured}, not on this machine" in words
    for heading in ("Case by case", "Roofline", "Over length", "All measurements", "Not timed", "Environment"):
        assert heading in words
    assert "To reproduce" in words
    assert "warpwave bench forward --rounds 6" in words


@pytest.mark.parametrize(
    ("suite", "command"),
    [
        ("forward", "warpwave bench forward --rounds 9 --out RECORD.jsonl"),
        ("scale seqlen", "warpwave bench --scale seqlen --rounds 9 --out RECORD.jsonl"),
        ("my calls", "warpwave bench 'my calls.toml' --rounds 9 --out RECORD.jsonl"),
        ("verify", "warpwave verify --out RECORD.jsonl"),
    ],
)
def test_the_command_that_repeats_a_record_exists(suite: str, command: str) -> None:
    (section,) = report([source([measurement(suite=suite)])]).sections
    assert section.reproduce == [command, "warpwave report RECORD.jsonl"]


def test_two_runs_of_one_minute_have_different_names() -> None:
    runs = [source([measurement()], {**H200, "date": f"2026-01-02T03:04:{second}+00:00"}) for second in ("05", "46")]
    (section,) = report(runs).sections
    assert len({case.name for case in section.cases}) == 2


def test_the_shipped_records_are_the_packages_own() -> None:
    assert shipped.paths()
    for path in shipped.paths():
        assert path.is_relative_to(Path(shipped.__file__).parent)
    records = shipped.records()
    assert any(m.timing is not None for _, m in records.measurements)
    assert all((e.get("gpu") or {}).get("name") == "NVIDIA H200" for e in records.environments.values())


def test_both_themes_and_print_are_defined(shipped_page: str) -> None:
    colors = re.findall(r"--(s\d|ink|paper|muted|rule|grid|faster|slower):", shipped_page)
    assert {colors.count(name) for name in set(colors)} == {3}  # light, dark, print
    assert "prefers-color-scheme: dark" in shipped_page
    assert "@media print" in shipped_page


def contrast(one: str, other: str) -> float:
    def luminance(color: str) -> float:
        digits = color if len(color) == 6 else "".join(c * 2 for c in color)
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colors_can_be_read_in_every_theme(shipped_page: str) -> None:
    themes = re.findall(r":root \{(.*?)\}", shipped_page, flags=re.DOTALL)
    assert len(themes) == 3
    for theme in themes:
        colors = dict(re.findall(r"--([\w-]+): #([0-9a-f]{3,6})", theme))
        for name in ("ink", "muted", "faster", "slower"):  # text: WCAG AA
            assert contrast(colors[name], colors["paper"]) >= 4.5, name
        for name in (f"s{i}" for i in range(9)):  # marks and lines
            assert contrast(colors[name], colors["paper"]) >= 3, name


def changed(m: Measurement, factor: float) -> Measurement:
    assert m.timing is not None
    return replace(m, timing=replace(m.timing, samples_us=tuple(us * factor for us in m.timing.samples_us)))


@pytest.mark.parametrize("index", [0, 1])
def test_another_sample_is_another_page(index: int) -> None:
    before = pair(400.0, 500.0)
    after = [changed(m, 1.37) if i == index else m for i, m in enumerate(before)]
    first, second = (html([source(ms)]) for ms in (before, after))
    old, new = (f"{us:,.1f}" for us in (400.0 if index == 0 else 500.0, 548.0 if index == 0 else 685.0))
    assert old in text(first)
    assert old not in text(second)
    assert new in text(second)
    drawings = [re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL) for page in (first, second)]
    assert drawings[0] != drawings[1]  # the plots move with it
    bars = [re.findall(r"--at:[\d.]+%", page) for page in (first, second)]
    assert bars[0] != bars[1]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peak_memory_bytes": 123_400_000}, "123"),
        ({"host": samples(13.57, method="host clock")}, "13.6"),
        ({"kernel": "hopper/flash_fwd"}, "hopper/flash_fwd"),
        ({"gpu_after": {"power_w": 654.3, "temperature_c": 77, "throttle": ["hardware thermal"]}}, "hardware thermal"),
        ({"refusal": "it said no", "timing": None}, "it said no"),
        ({"mode": "streams"}, "streams"),
        ({"problem": problem(softcap=30.0)}, "softcap 30"),
    ],
)
def test_each_fact_of_a_measurement_reaches_both_renderings(changes: dict[str, Any], told: str) -> None:
    plain, told_of = ([measurement(), replace(measurement(), case="second", **c)] for c in ({}, changes))
    assert told not in text(html([source(plain)]))
    assert told in text(html([source(told_of)]))
    assert told in markdown(report([source(told_of)]))


@pytest.mark.parametrize("key", ["date", "torch", "triton", "python", "platform", "cuda"])
def test_each_fact_of_the_environment_reaches_both_renderings(key: str) -> None:
    value = "1999-09-09T09:09:09+00:00" if key == "date" else "9.87.654"
    told = value[:10]
    environment = H200 | {key: value}
    assert told in text(html([source(pair(), environment)]))
    assert told in markdown(report([source(pair(), environment)]))


def test_machines_are_kept_apart() -> None:
    own = source(pair(90000.0, 91000.0), CPU, origin="here", command="warpwave demo")
    page = html([own, Source(shipped.records(), "shipped")])
    words = text(page)
    assert "This machine's own numbers" in words
    assert words.index("This machine's own numbers") < words.index("not on this machine")
    first, *others = re.findall(r"<article.*?</article>", page, flags=re.DOTALL)
    assert "90,000" in first
    assert others
    assert not any("90,000" in other for other in others)
    assert "H200" not in first
    assert "warpwave demo" in first


def test_hostile_names_stay_text() -> None:
    evil = '</title><script>alert(1)</script>"&<b>|x|`y`\n# no heading'
    ms = [*pair(case=evil, suite=evil), measurement(evil, None, refusal=evil, case=evil)]
    environment = H200 | {"platform": evil, "gpu": H200["gpu"] | {"name": evil}}
    page = html([source(ms, environment, names=(evil,))])
    check(page)
    assert "<script" not in page
    assert "alert(1)" in text(page)
    written = markdown(report([source(ms, environment, names=(evil,))]))
    assert "\n# no heading" not in written
    outside_code = re.sub(r"`[^`\n]*`|^    .*$", "", written.replace("\\`", ""), flags=re.MULTILINE)
    assert not re.search(r"(?<!\\)<", outside_code)


def test_scaling_needs_cases_that_differ_in_length_alone() -> None:
    lengths = (1024, 2048, 4096)
    ms = [m for n in lengths for m in pair(0.1 * n, 0.08 * n, case=f"n{n}", problem=problem(seqlen_q=n, seqlen_k=n))]
    assert "Over length" in text(html([source(ms)]))
    assert "Over length" not in text(html([source(ms[:4])]))
    others = [replace(m, problem=replace(m.problem, head_dim=64 * (1 + i // 2))) for i, m in enumerate(ms)]
    assert "Over length" not in text(html([source(others)]))


def test_decode_scales_in_bandwidth() -> None:
    ms = [
        measurement(us=n / 100, case=f"k{n}", problem=problem(seqlen_q=1, seqlen_k=n, causal=None))
        for n in (1024, 8192, 65536)
    ]
    (section,) = report([source(ms)]).sections
    (family,) = section.families
    assert family.unit == "GB/s"
    assert "1 query a sequence" in family.held


def test_nothing_measured_and_nothing_timed() -> None:
    assert "no measurement" in text(html([Source(Records({}, []))]))
    assert "no measurement" in markdown(report([Source(Records({}, []))]))
    refused = [measurement(us=None, verdict=None, refusal="no such kernel")]
    words = text(html([source(refused)]))
    assert "no such kernel" in words
    assert "Roofline" not in words


def test_a_cpu_record() -> None:
    ms = [replace(m, timing=samples(50_000.0, method="host clock"), gpu_before=None, gpu_after=None) for m in pair()]
    words = text(html([source(ms, CPU)]))
    assert "no data sheet for a CPU" in words
    assert "--device cpu" in words


def test_one_round_says_that_there_is_no_interval() -> None:
    ms = [measurement(timing=samples(400.0, rounds=1)), measurement("sdpa", timing=samples(500.0, rounds=1))]
    assert "1.25 [needs 6 rounds]" in text(html([source(ms)]))


def test_a_large_record_is_shortened_and_a_larger_one_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "LARGEST_BYTES", LARGEST_BYTES // 5)

    def cases(n: int, peers: int) -> list[Measurement]:
        return [
            m
            for i in range(n)
            for m in (
                *pair(case=f"case {i}"),
                *(measurement(f"peer {p}", 700.0, case=f"case {i}") for p in range(peers)),
            )
        ]

    words = text(html([source(cases(12, 40))]))
    assert "Shortened" in words
    with pytest.raises(TooLarge, match="fewer files"):
        html([source(cases(180, 1))])


def test_markdown_has_the_same_facts_and_no_html(shipped_page: str) -> None:
    content = report([Source(shipped.records(), "shipped")])
    written = markdown(content)
    assert not re.search(r"</?[a-z]+[^>]*>", written)
    shown = text(shipped_page).replace("\u202f", " ")
    plain = " ".join(re.sub(r"\\(.)", r"\1", written).split())
    for section in content.sections:
        facts = [sentence for _, sentences in section.answers for sentence in sentences]
        facts += [case.sentence for case in section.cases]
        tables = [t for t in (*section.tables, section.bounds, section.untimed) if t is not None]
        facts += [cell for t in tables for g in t.groups for row in g.rows for cell in row]
        facts += [value for _, value in section.environment]
        for fact in {" ".join(fact.split()) for fact in facts}:
            assert fact in plain
            assert fact in shown


def test_every_table_row_of_markdown_has_its_columns(shipped_page: str) -> None:
    columns = 0
    for line in markdown(report([Source(shipped.records(), "shipped")])).splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) - 1
        if not line.startswith("|"):
            columns = 0
        elif columns:
            assert cells == columns, line
        else:
            columns = cells


def test_the_contents_lead_to_every_part_and_details_are_collapsed(shipped_page: str) -> None:
    checker = check(shipped_page)
    links = re.findall(r'href="#([^"]+)"', shipped_page)
    assert len(links) > 20 and set(links) <= set(checker.ids)
    assert shipped_page.count("<main>") == 1 and shipped_page.count("<h1>") == 1
    for title in ("All measurements", "Where the time went", "Bounds", "Environment"):
        (details, *_) = re.findall(rf"<details([^>]*)>\s*<summary><h3>{title}</h3>", shipped_page)
        assert details == "", f"{title} is open"


def test_headings_skip_no_level_and_no_two_regions_share_a_name(shipped_page: str) -> None:
    levels = [int(level) for level in re.findall(r"<h([1-6])[ >]", shipped_page)]
    assert levels[0] == 1 and all(b <= a + 1 for a, b in itertools.pairwise(levels))
    regions = re.findall(r'role="region" aria-label="([^"]+)"', shipped_page)
    assert regions and len(regions) == len(set(regions))
    assert shipped_page.count("<pre ") == shipped_page.count('<pre tabindex="0"')


def test_machines_of_one_name_are_told_apart_by_their_suites(shipped_page: str) -> None:
    headings = re.findall(r"<article[^>]*>\s*<h2>(.*?)</h2>", shipped_page)
    assert len(headings) > 1 and len(headings) == len(set(headings))


def test_the_column_that_says_what_to_change_comes_before_the_shares() -> None:
    names = list(COLUMNS)
    assert names.index("first to change") < names.index("lost by") < names.index("of data sheet")


def test_cases_without_a_time_for_one_reason_share_a_row() -> None:
    refused = [measurement(us=None, refusal="checked, not timed", case=f"case {i}") for i in range(30)]
    words = text(html([source(refused)]))
    assert "30 cases" in words and "1-30" in words
    assert words.count("checked, not timed") <= 2  # in the list, and in the table of what was not timed
    assert all(f"case {i}" in words for i in range(30))


def test_a_raised_ceiling_is_not_dated_as_measured() -> None:
    sections = report([Source(shipped.records(), "shipped")]).sections
    beyond = [s for s in sections if any("went beyond it" in sentence for _, said in s.answers for sentence in said)]
    raised = {c.rates for s in beyond for c in s.roofline.ceilings if c.rates != "data sheet"}
    assert raised and all(name.endswith("or here") for name in raised)


def test_each_mark_of_ours_is_hollow_and_numbered_where_there_is_room(shipped_page: str) -> None:
    drawing = re.findall(r'<svg class="wide".*?</svg>', shipped_page, flags=re.DOTALL)[0]
    (section, *_) = report([Source(shipped.records(), "shipped")]).sections
    ours = [p for p in section.roofline.points if p.contender == "warpwave auto"]
    assert drawing.count(" hollow") == len(ours)
    labels = {int(n) for n in re.findall(r'text-anchor="middle">(\d+)</text>', drawing)}
    assert len(labels & set(range(1, len(section.cases) + 1))) > 5


MEASURE = """<script>addEventListener("load", () => {
  for (const d of document.querySelectorAll("details")) d.open = true;
  const wide = [...document.querySelectorAll(".scroll")].filter((s) => s.scrollWidth > s.clientWidth);
  const page = document.documentElement;
  document.body.dataset.wide = [page.scrollWidth > page.clientWidth, ...wide.map((s) => s.ariaLabel)].join("|");
});</script>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here to lay the page out")
def test_no_table_scrolls_at_1280_pixels(shipped_page: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(re.sub(r"<meta http-equiv[^>]*>", "", shipped_page).replace("</body>", MEASURE + "</body>"))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"]
    command += ["--virtual-time-budget=5000", f"--user-data-dir={tmp_path}", "--dump-dom", file.as_uri()]
    laid_out = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert re.findall(r'<body data-wide="([^"]*)"', laid_out) == ["false"]
