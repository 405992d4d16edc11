"""Proof that the tests bite: each seeded fault, alone in a copy of the package, must turn its tests red."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mutants.mutant import Mutant
from tests.mutants.mutants import MUTANTS, NAMED

ROOT = Path(__file__).parents[2]
BY_ASSERTION = ("AssertionError", "assert ", "Failed: ")
BY_INTERPRETER = "triton.runtime.errors.InterpreterError"  # it asserts that integers do not overflow


def parameters() -> list[Any]:
    """The eleven named ones in every run, the others in the full matrix."""
    found = []
    for mutant in MUTANTS:
        marks = [] if mutant in NAMED else [pytest.mark.full]
        if mutant.needs_gpu:
            marks = [pytest.mark.gpu]
        if mutant.needs_package:
            missing = importlib.util.find_spec(mutant.needs_package) is None
            marks.append(pytest.mark.skipif(missing, reason=f"{mutant.needs_package} is not installed"))
        found.append(pytest.param(mutant, marks=marks, id=mutant.name))
    return found


def failures(mutant: Mutant, folder: Path) -> list[str]:
    """Applies the fault to a copy of the package in the folder and returns what its tests say when they fail."""
    for part in ("warpwave", "tests"):
        # With the bytecode, which Python compares with the source's time and size, but not what is being written.
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("*.pyc.*"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    source = folder / "warpwave" / mutant.file
    source.write_text(source.read_text().replace(mutant.old, mutant.new))

    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", f"tests/conformance/{mutant.test}", "-k", mutant.select, "-m", ""]
    command += ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", f"--junitxml={report}"]
    environment = os.environ | {"PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(folder / "cache")}
    environment.pop("PYTEST_ADDOPTS", None)
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1, f"pytest ended with {run.returncode}, not with a failed test:\n{run.stdout[-3000:]}"
    cases = ElementTree.parse(report).iter("testcase")
    return [e.get("message", "") + (e.text or "") for case in cases for e in case if e.tag in ("failure", "error")]


@pytest.mark.parametrize("mutant", parameters())
def test_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    found = failures(mutant, tmp_path)
    assert found
    for message in found:
        asserted = message.startswith(BY_INTERPRETER) and "AssertionError" in message.splitlines()[0]
        assert asserted or message.startswith(BY_ASSERTION), (
            f"ended by something else than an assertion:\n{message[:2000]}"
        )
    assert any(mutant.shows in message for message in found), f"none says {mutant.shows!r}:\n{found[0][:2000]}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_changes_one_place(mutant: Mutant) -> None:
    text = (ROOT / "warpwave" / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert mutant.new not in text or mutant.new in mutant.old


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_names_a_test(mutant: Mutant) -> None:
    file, _, function = mutant.test.partition("::")
    text = (ROOT / "tests/conformance" / file).read_text()
    assert not function or f"def {function}(" in text


def test_there_are_enough() -> None:
    assert len(NAMED) == 11
    assert len(MUTANTS) >= 40
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the same on any machine")
def test_the_tests_pass_without_a_fault(tmp_path: Path) -> None:
    """Else a red test would prove nothing."""
    unchanged = Mutant("none", "ops.py", "", "", "test_edges.py::test_causal_alignment", "flash_fwd")
    with pytest.raises(AssertionError, match="pytest ended with 0"):
        failures(unchanged, tmp_path)
