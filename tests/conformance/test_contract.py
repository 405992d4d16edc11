"""Compares the table of contract.py with the existing tests and seeded faults."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.conformance.contract import TABLE
from tests.mutants.mutants import MUTANTS

HERE = Path(__file__).parent
WHOLE_FILES = ("test_edges.py", "test_bad_input.py")  # every test in them belongs to a row


def functions_in(file: str) -> set[str]:
    tree = ast.parse((HERE / file).read_text())
    return {f"{file}::{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef) and "test_" in node.name}


def test_every_row_names_tests_and_faults_that_exist() -> None:
    names = {mutant.name for mutant in MUTANTS}
    for row in TABLE:
        assert row.tests
        assert row.mutants
        for test in row.tests:
            assert test in functions_in(test.split("::")[0]), row.promise
        assert set(row.mutants) <= names, row.promise


def test_a_rows_faults_are_caught_by_its_own_tests() -> None:
    caught_by = {mutant.name: mutant.test for mutant in MUTANTS}
    for row in TABLE:
        for name in row.mutants:
            assert caught_by[name] in row.tests, f"{row.promise}: {name}"


def test_every_test_and_fault_of_the_two_files_has_a_row() -> None:
    named = {test for row in TABLE for test in row.tests}
    for file in WHOLE_FILES:
        assert functions_in(file) <= named
    proven = {name for row in TABLE for name in row.mutants}
    assert {m.name for m in MUTANTS if m.test.startswith(WHOLE_FILES)} <= proven
