from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_compare import ENVIRONMENT, write
from tests.bench.test_table import measured
from warpwave.bench.records import RecordError
from warpwave.bench.resume import Journal, finished_cases


def test_what_the_same_code_measured_on_the_same_card_is_finished(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [measured("warpwave auto", 1.0, "one"), measured("p", 1.0, "two")])
    assert finished_cases(path, "s", ("auto",), {**ENVIRONMENT, "date": "later"}) == {"one", "two"}
    assert finished_cases(path, "other", ("auto",), ENVIRONMENT) == set()
    assert finished_cases(path, "s", ("auto", "eager"), ENVIRONMENT) == set()
    changes: list[dict[str, Any]] = [
        {"code": {"source_sha256": "ffff"}},
        {"gpu": {"name": "NVIDIA H100"}},
        {"torch": "2.12.0"},
    ]
    for change in changes:
        assert finished_cases(path, "s", ("auto",), {**ENVIRONMENT, **change}) == set()
    assert finished_cases(tmp_path / "none.jsonl", "s", ("auto",), ENVIRONMENT) == set()


def test_whoever_ended_the_process_is_left_out_the_next_time(tmp_path: Path) -> None:
    records = tmp_path / "r.jsonl"
    first = Journal(records, resume=False)
    first.about_to("one", "p")
    first.about_to("one", "q")  # and here the process dies
    second = Journal(records, resume=True)
    assert second.skip("one") == {"q": "it ended the process the last time"} and second.skip("two") == {}
    second.about_to("one", "p")
    second.about_to("two", "r")
    third = Journal(records, resume=True)
    assert list(third.skip("one")) == ["q"] and list(third.skip("two")) == ["r"]
    third.about_to("three", "p")
    third.about_to("three", "")
    third.close()
    assert list(tmp_path.iterdir()) == []


def test_a_fresh_run_forgets(tmp_path: Path) -> None:
    records = tmp_path / "r.jsonl"
    Journal(records, resume=False).about_to("one", "p")
    assert Journal(records, resume=False).skip("one") == {}
    assert Journal(None, resume=True).skip("one") == {}


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl.underway").write_text("[[1]]")
    with pytest.raises(RecordError, match=r"r\.jsonl\.underway: .*; remove it to go on"):
        Journal(tmp_path / "r.jsonl", resume=True)
