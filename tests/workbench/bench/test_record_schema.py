"""Records with odd values that parse: each is refused in a sentence, or every command copes with it."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from tests.workbench.report.samples import measurement, pair, problem, write
from warpwave.errors import InvalidInput
from warpwave.workbench.bench.comparison_text import main as compare
from warpwave.workbench.bench.goals import Goal
from warpwave.workbench.bench.records import RecordError, read_records
from warpwave.workbench.bench.resume import finished_cases
from warpwave.workbench.bench.workloads import load_suite
from warpwave.workbench.explain.recorded_time import find
from warpwave.workbench.hardware.catalog import resolve
from warpwave.workbench.report.command import main as report
from warpwave.workbench.verify import verify

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 1 << 31, 1 << 62, 10**30, 10**300, -(10**300), 1e-320, 1e308, -0.0, 0.5,
    float("nan"), float("inf"), "", "x", "x" * 100_000, "\x1b[31mred", "\u202eevil", "\ud800", "a\r\n\r\n<script>b",
    "<img src=x onerror=alert(1)>", [], {}, [1], [[1]], ["x"], [None], [0, 0], [1, 2, 3, 4], [-1, -1], {"a": 1},
    {"a": {"b": ["\x1b]0;title\x07"]}},
)  # fmt: skip
SWEPT = 600  # mutations, drawn anew only when the lists above change
FOLLOWED = 20  # of those that are accepted, as many are told by every command


def sample(path: Path) -> list[Any]:
    """Lines with every part of a record: masks, windows, goals, packed sequences, configs, refusals."""
    masked = problem(mask_shape=(4, 1, 1, 4096), mask_visible_pairs=1000, window_size=(5, 0))
    packed = problem(
        packed=True, batch=2, total_q=300, total_k=300, seqlen_q=200, seqlen_k=200, lengths=((200, 200), (100, 100))
    )
    config = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}
    measured = [
        *pair(),
        *pair(case="masked", problem=masked, goal=Goal(ratio=1.0)),
        *pair(case="packed", problem=packed, config=config),
        measurement(case="refused", us=None, verdict=None, refusal="no"),
        measurement("yardstick empty_kernel", case="tiny", goal=Goal(over_launch_us=2.0)),
    ]
    return [json.loads(line) for line in write(path, measured).read_text().splitlines()]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*place, key))
    elif isinstance(value, list):
        for index, item in enumerate(value[:2]):
            yield from places(item, (*place, index))


def changed(lines: list[Any], place: tuple[Any, ...], value: Any) -> list[Any]:
    lines = copy.deepcopy(lines)
    target: Any = lines
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    return lines


def put(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_every_odd_value_at_every_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = sample(tmp_path / "whole.jsonl")
    every = [(place, value) for place in places(lines) if place for value in ODD]
    rng = random.Random(0)
    accepted = []
    for place, value in rng.sample(every, SWEPT):
        odd = put(tmp_path / "odd.jsonl", changed(lines, place, value))
        try:
            read_records(odd)
        except RecordError as error:
            assert str(error).isprintable() and len(str(error)) < 1000
        else:
            accepted.append((place, value))
    assert SWEPT * 0.05 < len(accepted) < SWEPT * 0.3
    for place, value in rng.sample(accepted, FOLLOWED):
        told(put(tmp_path / "odd.jsonl", changed(lines, place, value)), tmp_path, capsys)


def told(odd: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What every command says of a record: none fails, and no control character and no HTML comes through."""
    whole = folder / "whole.jsonl"
    for a, b, options in (
        (whole, odd, {}),
        (odd, whole, {"json_output": True}),
        (odd, None, {"contenders": ("warpwave auto", "sdpa_cudnn")}),
    ):
        assert compare(str(a), None if b is None else str(b), **options) in (0, 1, 2)
    page, notes = folder / "r.html", folder / "r.md"
    assert report([odd], out=page, markdown_out=notes) == 0
    records = read_records(odd)
    for environment in records.environments.values():
        finished_cases(odd, load_suite("forward"), ("auto",), environment)
    verify.shipped_cases(records, "NVIDIA H200")
    for _, m in records.measurements:
        try:
            find(odd, m.problem, resolve("h200"))
        except InvalidInput as error:
            assert str(error).isprintable()
    printed = capsys.readouterr()
    for text in (printed.out, printed.err, page.read_text(), notes.read_text()):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", text)
    assert_no_html(notes.read_text())
    page.unlink()
    notes.unlink()


def assert_no_html(text: str) -> None:
    text = text[: text.rindex("<!--")]  # the seal, which is ours
    assert "<" not in text
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    kinds = {token.type for one in tokens for token in (one, *(one.children or ()))}
    assert not kinds & {"html_block", "html_inline", "link_open", "image"}


@pytest.mark.parametrize("value", ["<img src=x onerror=alert(1)>", "a|b`c`*d*_e_[f](g)~~h~~&lt;", "\\", "# a"])
@pytest.mark.parametrize("name", ["suite", "case", "contender", "kernel", "refusal"])
def test_markup_of_a_record_is_text_in_a_report(
    name: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = sample(tmp_path / "whole.jsonl")
    told(put(tmp_path / "odd.jsonl", changed(lines, (1, name), value)), tmp_path, capsys)


@pytest.mark.parametrize(
    ("line", "place", "value", "said"),
    [
        (1, ("problem", "num_heads_kv"), False, "problem.num_heads_kv is False; it must be a whole number"),
        (1, ("problem", "num_heads_kv"), 0, "problem: k has 0 heads"),
        (1, ("problem", "num_heads_kv"), 3, "problem: k has 3 heads, which does not divide the 16 heads of q"),
        (1, ("problem", "error_budget"), [1e-3], r"problem.error_budget is \[0.001\]; it must be a number"),
        (1, ("problem", "bias_dtype"), {"a": 1}, r"problem.bias_dtype is \{'a': 1\}; it must be one of 'float16'"),
        (1, ("problem", "page_size"), 1e-320, "problem.page_size is 1e-320; it must be a whole number"),
        (1, ("problem", "seqlen_q"), 1 << 31, "problem.seqlen_q is 2147483648; it must be a whole number from 0 to"),
        (1, ("problem", "seqlen_q"), 1 << 28, "problem: q would take 4.4 TB, more than any GPU has"),
        (1, ("problem", "batch"), 1 << 21, "problem: batch is 2,097,152; a call can have 1,048,576 sequences"),
        (1, ("problem", "mask_shape"), [1, 2, 3, 4], r"problem: mask_shape is \(1, 2, 3, 4\); it must be"),
        (1, ("problem", "alibi_shape"), [3], r"problem: alibi_shape is \(3,\); it must be"),
        (3, ("problem", "mask_visible_pairs"), 1 << 70, "mask_visible_pairs is 1,180,591,620,717,411,303,424 of"),
        (5, ("problem", "lengths"), [[1, 1], [2, 2]], "problem.lengths are of 2 sequences"),
        (3, ("goal",), {"ratio": 1, "over_launch_us": 1}, "goal must have a ratio or an over_launch_us, and not both"),
        (1, ("case",), "\x1b[31m", r"case is '\\x1b\[31m'; it must be one line of"),
        (1, ("timing", "samples_us"), [1.0] * 2000, r"samples_us is \[1.0, .*; it must be a list of 1 to 1,000"),
        (0, ("environment", "peers"), {"a": 7}, "environment.peers.a is 7; it must be one line of"),
        (0, ("environment", "gpu", "sm_count"), 10**30, "environment.gpu.sm_count is 10000"),
        (0, ("schema_version",), True, "schema_version is True; it must be one of 1, 2"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(
    line: int, place: tuple[Any, ...], value: Any, said: str, tmp_path: Path
) -> None:
    lines = sample(tmp_path / "whole.jsonl")
    odd = put(tmp_path / "odd.jsonl", changed(lines, (line, *place), value))
    with pytest.raises(RecordError, match=rf"odd\.jsonl:{line + 1}: .*{said}"):
        read_records(odd)


def test_every_record_of_the_repository_is_read() -> None:
    root = Path(verify.__file__).parents[3]
    paths = [
        *(root / "benchmarks" / "records").glob("*.jsonl"),
        *(root / "warpwave/workbench/report/shipped").glob("*.jsonl"),
    ]
    read = [path for path in paths if '"schema_version"' in path.open().readline()]
    assert len(read) > 50
    assert all(read_records(path).environments for path in read)
