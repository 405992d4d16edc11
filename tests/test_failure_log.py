"""`--failures` keeps what failed in a run that does not reach its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from tests.conftest import FailureLog


def report(name: str, outcome: Literal["passed", "failed", "skipped"], why: Any = None) -> pytest.TestReport:
    return pytest.TestReport(name, ("a.py", 1, name), {}, outcome, why, "call")


def test_failures_are_written_as_they_come(tmp_path: Path) -> None:
    log = FailureLog(tmp_path / "failures")
    log.pytest_runtest_logreport(report("passes", "passed"))
    assert not log.file.exists()
    for i in range(2):
        log.pytest_runtest_logreport(report(f"fails[{i}]", "failed", f"for reason {i}"))
        assert log.file.read_text().endswith(f"FAILED fails[{i}] (call)\nfor reason {i}\n\n")
    assert log.file.read_text().count("FAILED") == 2
