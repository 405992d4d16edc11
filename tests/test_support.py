"""docs/support.md says what the kernels, the tests and the records say now."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import support_matrix
from warpwave import dispatch
from warpwave.gpu import Gpu
from warpwave.kernels import eager, flash_fwd
from warpwave.problem import AttentionProblem


def test_the_page_is_up_to_date() -> None:
    assert support_matrix.PAGE.read_text() == support_matrix.page(), "PYTHONPATH=. python benchmarks/support_matrix.py"


def test_a_changed_refusal_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
        return flash_fwd.why_not(problem, gpu) or (["it is Tuesday"] if problem.softcap else [])

    changed = SimpleNamespace(**(vars(flash_fwd) | {"why_not": why_not}))
    monkeypatch.setattr(
        dispatch, "KERNELS", tuple(changed if kernel is dispatch.flash_fwd else kernel for kernel in dispatch.KERNELS)
    )
    monkeypatch.setattr(support_matrix, "DIMS", support_matrix.DIMS[:1])  # the tables of head sizes take seconds
    assert "it is Tuesday" in support_matrix.page()


def test_amd_is_said_never_to_have_been_run() -> None:
    page = support_matrix.PAGE.read_text()  # which is up to date, as the first test says
    assert "Kernels for AMD GPUs are compiled and inspected, and have never been run." in page
    for line in page.splitlines():
        if line.startswith("| gfx") and "| no" not in line:
            assert " R " not in line
            assert "run on" not in line


def test_what_ran_comes_from_the_log() -> None:
    (run, *_) = support_matrix.runs()
    assert run.passed["flash_fwd"] > 1000
    assert "naive" not in run.passed or run.passed["naive"] > 0


@pytest.mark.parametrize(
    ("module", "arch", "dims", "shown"),
    [
        (flash_fwd, "sm_90", (80, 80), support_matrix.RUN),
        (flash_fwd, "gfx942", (128, 128), support_matrix.COMPILED),
        (flash_fwd, "gfx942", (96, 96), support_matrix.ACCEPTED),
        (flash_fwd, "sm_121", (128, 128), support_matrix.ACCEPTED),
        (eager, "gfx942", (128, 128), support_matrix.ACCEPTED),
        (eager, "sm_90", (512, 512), support_matrix.ACCEPTED),
    ],
)
def test_evidence_is_no_more_than_there_is(module: Any, arch: str, dims: tuple[int, int], shown: str) -> None:
    found = support_matrix.evidence(
        module,
        Gpu.for_arch(arch),
        conformance=(("dtype", "bfloat16"), ("dims", dims)),
        point=("bfloat16", dims[0], "plain"),
    )
    assert found == shown


def test_a_failed_kernel_has_not_passed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    log = tmp_path / "run.log"
    log.write_text(
        "eager: attempted 3, passed 2, refused as documented 0, failed 1, skipped 0\n"
        "eager: attempted 9, passed 9, refused as documented 0, failed 0, skipped 0\n"
        "flash_fwd: attempted 2, passed 2, refused as documented 0, failed 0, skipped 0\n"
        "flash_fwd: attempted 3, passed 3, refused as documented 0, failed 0, skipped 0\n"
    )
    facts = tmp_path / "support.toml"
    facts.write_text(
        f'[[run]]\ngpu = "X"\narch = "sm_90"\ndate = 2026-01-01\ntorch = "1"\ntriton = "2"\nrecord = "{log}"\n'
    )
    monkeypatch.setattr(support_matrix, "FACTS", facts)
    support_matrix.runs.cache_clear()
    try:
        assert support_matrix.runs()[0].passed == {"flash_fwd": 5}
    finally:
        support_matrix.runs.cache_clear()


def test_what_compiles_says_so() -> None:
    """`split_kv` has a grid of its own kind in tests/compile, which counts as the others do."""
    assert "sm_80" in support_matrix.compiled_archs("split_kv")
    points = {point[1:] for point in support_matrix.compiled_points() if point[0] == "split_kv"}
    assert {("bfloat16", 64, "plain"), ("bfloat16", 128, "mask")} <= points
    assert ("bfloat16", 128, "causal") in points, "a prompt"
    assert not any(dtype == "float16" and feature == "plain" for dtype, _, feature in points)
