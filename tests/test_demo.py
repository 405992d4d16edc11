"""The demo's verdicts: what is wrong is called wrong, is not timed, and ends in exit code 1."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import warpwave
from warpwave import demo, demo_model
from warpwave.hardware.gpu import CPU as CPU_GPU
from warpwave.problem import Operands

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ROUNDS", 1)


@pytest.fixture
def case() -> demo.Case:
    q, k, v = torch.randn(3, 2, 9, 2, 16, generator=torch.Generator().manual_seed(0))
    return demo.Case("two sequences", [Operands(q, k, v)], causal=True)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explain for a CPU, though these tests run with Triton's interpreter on, which would be reported instead."""
    explain = demo.Case.explain
    monkeypatch.setattr(demo.Case, "explain", lambda self: warpwave.explain(explain(self).problem, gpu=CPU_GPU))


@pytest.mark.usefixtures("on_cpu")
def test_right_kernels_are_timed(case: demo.Case) -> None:
    right, table = demo.compare(case, CPU)
    assert right
    assert table.rows[0][0] == demo.BASELINE
    assert any("(auto)" in row[0] for row in table.rows)
    assert all(row[2] in ("baseline", "pass") and float(row[3].replace(",", "")) > 0 for row in table.rows)
    assert any(note.startswith("not flash_fwd: ") for note in table.notes)


def test_no_time_is_shown_for_the_interpreter(case: demo.Case) -> None:
    if warpwave.explain(case.operands[0].q, *case.operands[0][1:3]).gpu.vendor != "interpreter":
        pytest.skip("Triton's interpreter is off in this run")
    right, table = demo.compare(case, CPU)
    assert right
    assert "flash_fwd" in [row[0] for row in table.rows]
    assert all(row[3:] == ("", "") for row in table.rows)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("spoil", [lambda out: out + 1e-3, lambda out: out * math.nan])
def test_a_wrong_result_fails_and_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, case: demo.Case, spoil: Callable[[Tensor], Tensor]
) -> None:
    honest = demo.Case.ours

    def ours(self: demo.Case, kernel: str) -> list[Tensor]:
        return [spoil(out) if kernel == "eager" else out for out in honest(self, kernel)]

    monkeypatch.setattr(demo.Case, "ours", ours)
    right, table = demo.compare(case, CPU)
    assert not right
    (row,) = [row for row in table.rows if row[0].startswith("eager")]
    assert row[2:] == ("FAIL", "", "")


def no_model() -> None:
    raise demo_model.ModelMissing("the package x is not installed")


@pytest.mark.parametrize(("right", "code"), [(True, 0), (False, 1)])
def test_without_the_model_it_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], right: bool, code: int
) -> None:
    table = demo.Table("a case", ("kernel",), [("eager",)])
    monkeypatch.setattr(demo_model, "load", no_model)
    monkeypatch.setattr(demo, "check_in_interpreter", lambda device: True)
    monkeypatch.setattr(demo, "compare", lambda case, device: (right, table))
    assert demo.run("cpu") == code
    printed = capsys.readouterr().out
    assert "the package x is not installed" in printed
    assert ("FAILED" in printed) == (not right)


def test_the_real_model_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(demo_model.PACKAGE, reason="the demo's model is not installed")
    with torch.inference_mode():
        right, cases = demo.embed_and_compare(CPU, torch.float32)
    assert right
    assert [len(case.operands) for case in cases] == [6, 6]
    printed = capsys.readouterr().out
    assert "Sentence embeddings" in printed
    assert "\x1b" not in printed
