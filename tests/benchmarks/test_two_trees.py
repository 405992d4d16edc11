"""Another tree beside this one: it is imported under another name, gets the same tensors, and is compared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import needs_triton

pytestmark = needs_triton
ROOT = Path(__file__).parents[2]
# In a process of its own: torch's operators of the other tree cannot be unregistered.
PROGRAM = """
import importlib, sys, tempfile
from pathlib import Path
import torch, warpwave
from benchmarks import two_trees

two_trees.make_operands = lambda problem, device, made=two_trees.make_operands: made(problem, "cpu")
place = tempfile.mkdtemp()
two_trees.copied(Path(sys.argv[1]), Path(place))
sys.path.insert(0, place)
before = importlib.import_module(two_trees.OTHER)
assert before.__file__.startswith(place) and before.attention is not warpwave.attention
for row in two_trees.rows(["tiny", "decode_paged"], [sys.argv[2]]):
    new, old = (row.make(package)() for package in (warpwave, before))
    print(row.suite, "|", row.case, "|", torch.equal(new, old))
"""


@pytest.mark.parametrize(("only", "suite"), [("d64 1x64 h1", "tiny"), ("1x1/1024 h32/8 bf16 page16", "decode_paged")])
def test_both_trees_get_the_same_call(only: str, suite: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(ROOT), only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines and all(line.startswith(suite) and line.endswith("True") for line in lines), lines


def test_rows_come_from_the_named_suites() -> None:
    from benchmarks import two_trees

    assert len(list(two_trees.rows(["quantized"], [""]))) == 2 * 4 * 3 * 3 * 2
    assert len(list(two_trees.rows(["gradients"], [""]))) == 18 + 4 * 3 * 2 + 19 + 40 + 15 + 7 + 56
    found = list(two_trees.rows(["host", "tiny"], ["gradients"]))
    assert found and all(row.suite == "host" and "gradients" in row.case for row in found)


def test_the_summary_states_means_and_what_differs() -> None:
    from benchmarks import two_trees

    rows = [
        {"suite": "tiny", "case": "a", "speed": 2.0, "difference": 0.0},
        {"suite": "tiny", "case": "b", "speed": 0.5, "difference": 0.02},
        {"suite": "host", "case": "c", "speed": 1.1, "difference": float("nan")},
    ]
    assert two_trees.summary(rows).splitlines() == [
        "tiny: speed 1.000 in the mean of 2, 0.500 to 2.000",
        "host: speed 1.100 in the mean of 1, 1.100 to 1.100",
        "DIFFERS by 2.00e-02: tiny, b",
        "DIFFERS by nan: host, c",
    ]
