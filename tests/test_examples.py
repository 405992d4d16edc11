"""The examples run, say that their checks held, and import public names only."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NUMBERED = [path for path in EXAMPLES if path.name[0].isdigit()]

# What the output of each numbered example must contain, on a CPU or a GPU.
SHOWN = {
    "01_first_call.py": r"largest difference from torch: \S+e-0\d",
    "02_masks.py": r"query 0  #####\.\.\.  5 visible",
    "03_packed_sequences.py": r"sequence 3,  64 tokens",
    "04_gradients.py": r"step 60: loss 0\.00\d+, most attended distance 1",
    "05_precision.py": r"precision=1e-9 is refused",
    "06_decode_with_a_cache.py": r"after 5 steps: 45 tokens .*(?s:.)*all sequences freed: 16 pages free",
    "07_merge_partial_results.py": r"keys   0 to  100: \d+\.\d%",
    "08_explain.py": r"on an H200:\n  kernel hopper/flash_fwd",
    "09_test_your_kernel.py": r"right:(?s:.)*(speed not tested|reaches 0\.\d+ of its bound)",
}


def run(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / arguments[0]), *arguments[1:]],
        capture_output=True, text=True, env=environment, timeout=timeout, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.stem)
def test_a_numbered_example_runs(path: Path) -> None:
    result = run(path.name)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert re.search(SHOWN[path.name], result.stdout), result.stdout


def test_examples_are_numbered_without_gaps() -> None:
    assert [int(path.name[:2]) for path in NUMBERED] == list(range(1, len(NUMBERED) + 1))
    assert set(SHOWN) == {path.name for path in NUMBERED}


@pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.stem)
def test_a_numbered_example_is_short(path: Path) -> None:
    assert 20 <= len(path.read_text().splitlines()) <= 60


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_imports_public_names_only(path: Path) -> None:
    import warpwave
    import warpwave.testing

    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if alias.name.split(".")[0] == "warpwave"]
            assert set(modules) <= {"warpwave", "warpwave.testing"}, f"{path.name} imports {modules}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "warpwave":
            assert node.module in ("warpwave", "warpwave.testing"), f"{path.name} imports from {node.module}"
            names = {alias.name for alias in node.names}
            public = set(warpwave.__all__) if node.module == "warpwave" else {"assert_reaches", "Reached"}
            assert names <= public, f"{path.name} imports {names - public}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "warpwave":
            assert node.attr in warpwave.__all__, f"{path.name} uses warpwave.{node.attr}"


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
