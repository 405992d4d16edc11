"""The demo's verdicts: what is wrong is called wrong, is not timed, and ends in exit code 1."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import warpwave
from warpwave.gpu import CPU as CPU_GPU
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.correctness import Verdict
from warpwave.workbench.bench.records import Measurement
from warpwave.workbench.bench.timing import Samples
from warpwave.workbench.demo import demo, sentence_model
from warpwave.workbench.demo.comparison import BASELINE, Case, Comparison, compare
from warpwave.workbench.demo.sentences import embed_and_compare
from warpwave.workbench.report import shipped

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Restores the level of the library's log, which the command raises for its process."""
    logger = logging.getLogger("warpwave")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwave.workbench.demo.comparison.ROUNDS", 1)


@pytest.fixture
def case() -> Case:
    q, k, v = torch.randn(3, 2, 9, 2, 16, generator=torch.Generator().manual_seed(0))
    return Case("two sequences", [Operands(q, k, v)], causal=True)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explain for a CPU, though these tests run with Triton's interpreter on, which would be reported instead."""
    explain = Case.explain
    monkeypatch.setattr(Case, "explain", lambda self: warpwave.explain(explain(self).problem, gpu=CPU_GPU))


@pytest.mark.usefixtures("on_cpu")
def test_right_kernels_are_timed(case: Case) -> None:
    comparison = compare(case, CPU)
    assert comparison.right
    table = comparison.table("us")
    assert table.rows[0][0] == BASELINE
    assert any("(auto)" in row[0] for row in table.rows)
    assert all(row[2] in ("baseline", "pass") and float(row[3].replace(",", "")) > 0 for row in table.rows)
    assert any(note.startswith("not flash_fwd: ") for note in table.notes)


@pytest.mark.usefixtures("on_cpu")
def test_times_and_errors_are_those_of_the_measurements(case: Case) -> None:
    layers = Case("three layers", [*case.operands] * 3, causal=True)
    comparison = compare(layers, CPU)
    assert comparison.measurements[0].contender == BASELINE
    assert sum(m.contender == "warpwave auto" for m in comparison.measurements) == 1
    for row, m in zip(comparison.table("us").rows, comparison.measurements, strict=True):
        assert m.suite == "demo"
        assert m.problem.seqlen_q == 9
        assert m.timing is not None
        assert m.timing.calls_per_repeat % 3 == 0  # a sample is a layer's time
        assert m.timing.input_sets == 3
        assert row[3] == f"{m.timing.median_us:,.1f}"
        assert m.verdict is not None
        assert m.verdict.rows == 3 * 2 * 9 * 2
        assert m.verdict.error_ratio is not None
        assert 0.1 < m.verdict.error_ratio < 10


def test_no_time_is_shown_for_the_interpreter(case: Case) -> None:
    if warpwave.explain(case.operands[0].q, *case.operands[0][1:3]).gpu.vendor != "interpreter":
        pytest.skip("Triton's interpreter is off in this run")
    comparison = compare(case, CPU)
    assert comparison.right
    rows = comparison.table("us").rows
    assert "flash_fwd" in [row[0] for row in rows]
    assert all(row[3:] == ("", "") for row in rows)
    assert all(m.timing is None and m.refusal for m in comparison.measurements)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("spoil", [lambda out: out + 1e-3, lambda out: out * math.nan])
def test_a_wrong_result_fails_and_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, case: Case, spoil: Callable[[Tensor], Tensor]
) -> None:
    honest = Case.ours

    def ours(self: Case, kernel: str) -> list[Tensor]:
        return [spoil(out) if kernel == "eager" else out for out in honest(self, kernel)]

    monkeypatch.setattr(Case, "ours", ours)
    comparison = compare(case, CPU)
    assert not comparison.right
    (row,) = [row for row in comparison.table("us").rows if row[0].startswith("eager")]
    assert row[2:] == ("FAIL", "", "")
    (wrong,) = [m for m in comparison.measurements if m.verdict is not None and not m.verdict.passed]
    assert wrong.kernel == "eager"
    assert wrong.refusal.startswith("wrong, so not timed: ")


def no_model() -> None:
    raise sentence_model.ModelMissing("the package x is not installed")


RIGHT = Verdict(True, "", 1e-7, 2e-7, 1e-7, 2e-7, 8)
WRONG = Verdict(False, "max error", 1e-2, 2e-2, 1e-7, 2e-7, 8)
PROBLEM = AttentionProblem(
    batch=1,
    seqlen_q=8,
    seqlen_k=8,
    num_heads_q=1,
    num_heads_kv=1,
    head_dim=8,
    head_dim_v=8,
    dtype="float32",
    softmax_scale=1.0,
)


@pytest.fixture
def quick_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """The demo without its minute of measuring: runs it in an empty folder, with a result that is right or wrong."""

    def run(right: bool, verbose: bool = False) -> int:
        timing = Samples((1234.5, 1234.5), "host clock", 3, 1, False)
        peer = Measurement(
            suite="demo", case="a case", problem=PROBLEM, contender=BASELINE, verdict=RIGHT, timing=timing
        )
        ours = replace(
            peer,
            contender="warpwave auto",
            kernel="eager",
            verdict=RIGHT if right else WRONG,
            timing=timing if right else None,
        )
        monkeypatch.setattr(sentence_model, "load", no_model)
        monkeypatch.setattr(demo, "check_in_interpreter", lambda device: demo.Interpreted(True, "the interpreter"))
        monkeypatch.setattr(
            demo, "compare", lambda case, device: Comparison("a case", [peer, ours], ["not flash_fwd: a reason"])
        )
        return demo.run("cpu", verbose=verbose)

    monkeypatch.chdir(tmp_path)
    return run


@pytest.mark.parametrize(("right", "code"), [(True, 0), (False, 1)])
def test_without_the_model_it_says_so_and_goes_on(
    quick_demo: Callable[..., int], capsys: pytest.CaptureFixture[str], right: bool, code: int
) -> None:
    assert quick_demo(right) == code
    printed = capsys.readouterr().out
    assert "the package x is not installed" in printed
    assert printed.startswith("PASS" if right else "FAILED")
    assert ("eager on a case" in printed.splitlines()[0]) == (not right)


def test_it_prints_the_verdict_first_and_the_page_last_in_few_lines(
    quick_demo: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert quick_demo(True) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].startswith("PASS") and len(lines) <= demo.MAX_LINES
    assert lines[-1] == f"The report: {Path('report.html').resolve()}"
    assert "not flash_fwd: a reason" not in printed.out
    Path("report.html").unlink()
    assert quick_demo(True, verbose=True) == 0
    verbose = capsys.readouterr().out.splitlines()
    assert verbose[0] == lines[0] and verbose[-1] == lines[-1]
    assert any("not flash_fwd: a reason" in line for line in verbose) and "the interpreter" in verbose


def test_without_a_gpu_it_ends_with_a_report_of_its_own_numbers_beside_the_h200s(
    quick_demo: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert quick_demo(True) == 0
    printed = capsys.readouterr().out
    page = Path("report.html")
    assert f"The report: {page.resolve()}\n" in printed
    measured = min(environment["date"] for environment in shipped.records().environments.values())[:10]
    assert "(here)" in printed
    assert "NVIDIA H200" in printed and "not this machine" in printed
    text = page.read_text()
    assert "This machine&#39;s own numbers" in text
    assert f"Measured on an NVIDIA H200 on {measured}, not on this machine" in text
    own, *others = page.read_text().split("<article")[1:]  # of the shipped records, one article a version measured
    assert "1,235" in own or "1,234" in own
    assert "warpwave demo" in own
    assert others
    assert all("flash_fwd" in article for article in others)


def test_a_report_that_cannot_be_written_is_said_before_anything_is_run(
    quick_demo: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("report.html").write_text("mine")
    assert quick_demo(True) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("warpwave: report.html already exists")
    assert Path("report.html").read_text() == "mine"


def test_the_real_model_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(sentence_model.PACKAGE, reason="the demo's model is not installed")
    with torch.inference_mode():
        embedded = embed_and_compare(CPU, torch.float32)
    assert not embedded.wrong
    assert [len(case.operands) for case in embedded.cases] == [6, 6]
    assert [row[-1] for row in embedded.table.rows] == ["baseline", "pass", "pass"]
    comparison = Comparison("the 6 layers' q, k, v, packed", [ours("eager")] * 3, [], "us a layer")
    outcome = demo.Outcome("CPU", embedded, "", [comparison] * 4, demo.Interpreted(True, ""))
    machines = 5  # at most, with the shipped records; and the verdict, a blank line, and where the report is
    assert len(outcome.lines()) + machines + 4 <= demo.MAX_LINES
    assert capsys.readouterr().out == ""


def ours(kernel: str) -> Measurement:
    return Measurement(
        suite="demo", case="a case", problem=PROBLEM, contender="warpwave auto", kernel=kernel, verdict=RIGHT
    )
