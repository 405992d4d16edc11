import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.workbench.bench.test_compare import ENVIRONMENT, write
from tests.workbench.bench.test_table import PROBLEM, measured
from warpwave.workbench.bench.records import RecordError
from warpwave.workbench.bench.resume import STOPPING, Journal, finished_cases
from warpwave.workbench.bench.workloads import Case, Suite

SUITE = Suite("s", "two cases", tuple(Case(name, PROBLEM) for name in ("one", "two")))


def test_what_the_same_code_measured_on_the_same_card_is_finished(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [measured("warpwave auto", 1.0, "one"), measured("p", 1.0, "two")])
    assert finished_cases(path, SUITE, ("auto",), {**ENVIRONMENT, "date": "later"}).keys() == {"one", "two"}
    assert finished_cases(path, replace(SUITE, name="other"), ("auto",), ENVIRONMENT) == {}
    assert finished_cases(path, SUITE, ("auto", "eager"), ENVIRONMENT) == {}
    changes: list[dict[str, Any]] = [
        {"code": {"source_sha256": "ffff"}},
        {"gpu": {"name": "NVIDIA H100"}},
        {"torch": "2.12.0"},
    ]
    for change in changes:
        assert finished_cases(path, SUITE, ("auto",), {**ENVIRONMENT, **change}) == {}
    assert finished_cases(tmp_path / "none.jsonl", SUITE, ("auto",), ENVIRONMENT) == {}


def test_a_case_that_the_suite_changed_under_the_same_name_is_not_finished(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [measured("warpwave auto", 1.0, "one"), measured("p", 1.0, "two")])
    changed = replace(SUITE, cases=(SUITE.cases[0], Case("two", replace(PROBLEM, softcap=30.0))))
    assert finished_cases(path, changed, ("auto",), ENVIRONMENT).keys() == {"one"}


def test_whoever_ended_the_process_is_left_out_the_next_time(tmp_path: Path) -> None:
    records = tmp_path / "r.jsonl"
    first = Journal(records, resume=False)
    first.about_to("one", "p")
    first.about_to("one", "q")  # and here the process dies
    second = Journal(records, resume=True)
    assert second.skip("one") == {"q": "it ended the process last time"} and second.skip("two") == {}
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
    journal = Journal(tmp_path / "r.jsonl", resume=False)
    journal.about_to("one", "p")
    path = tmp_path / "r.jsonl.underway"
    path.write_text(path.read_text() + '{"case": 7}\n')
    with pytest.raises(RecordError, match=r"r\.jsonl\.underway: 'contender' is missing; remove it to go on"):
        Journal(tmp_path / "r.jsonl", resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_a_file_of_the_journals_name_that_is_none_is_left_alone(resume: bool, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl.underway"
    path.write_text('notes: {"kind": "warpwave bench journal", "schema_version": 1}\n')
    with pytest.raises(RecordError, match="already exists and is not a journal of `warpwave bench`"):
        Journal(tmp_path / "r.jsonl", resume=resume)
    assert path.read_text().startswith("notes")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows ends a process in another way")
@pytest.mark.parametrize("number", [*STOPPING, signal.SIGALRM])
def test_who_ran_when_the_process_was_told_to_stop_is_not_to_blame(number: int, tmp_path: Path) -> None:
    """The C handler notes the signal, although Python runs no more before the process is killed. The signal of a time
    limit stops nothing."""
    records = tmp_path / "r.jsonl"
    child = os.fork()
    if child == 0:
        for handled in (number, signal.SIGALRM):
            signal.signal(handled, lambda *_: None)
        journal = Journal(records, resume=False)
        with journal.noting_signals():
            journal.about_to("one", "p")
            os.kill(os.getpid(), signal.SIGALRM)
            journal.about_to("two", "q")
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    resumed = Journal(records, resume=True)
    assert list(resumed.skip("two")) == (["q"] if number == signal.SIGALRM else [])
    assert resumed.skip("one") == {}


def test_what_ended_an_earlier_run_outlives_one_that_is_stopped(tmp_path: Path) -> None:
    records = tmp_path / "r.jsonl"
    Journal(records, resume=False).about_to("one", "p")
    second = Journal(records, resume=True)
    second.about_to("two", "q")
    second.stop()
    assert [list(Journal(records, resume=True).skip(case)) for case in ("one", "two")] == [["p"], []]
    fresh = Journal(records, resume=False)
    fresh.about_to("one", "p")
    fresh.stop()
    assert list(tmp_path.iterdir()) == []
