"""The examples run, and say that their checks held."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / arguments[0]), *arguments[1:]],
        capture_output=True, text=True, env=environment, timeout=timeout, check=False,
    )  # fmt: skip


def test_server_serves_and_checks_itself() -> None:
    small = ("--device", "cpu", "--requests", "6", "--tokens", "6", "--train-seconds", "1")
    result = run("server.py", *small)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert re.search(r"served 6 requests in [\d.]+ s, 36 tokens, [\d,]+ tokens a second", result.stdout)
    assert "36 of 36 tokens are the same alone as among all" in result.stdout


def test_server_refuses_what_makes_no_sense() -> None:
    result = run("server.py", "--requests", "0")
    assert result.returncode == 2 and "--requests" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.gpu
def test_server_on_a_gpu() -> None:
    result = run("server.py", timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
