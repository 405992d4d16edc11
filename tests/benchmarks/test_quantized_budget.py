"""Why no error budget selects a quantized call (docs/notes/quantized.md): the record's figures come out again, and
16-bit calls refuse a budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import warpwave
from benchmarks import quantized_budget
from benchmarks.quantized_budget import WAYS, bound, relative_error, twins

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "records" / "2026-11-23-cpu-quantized-budget.json"
INT8 = "int8, block 128"


def test_calls_with_the_same_rows_have_errors_that_differ_by_a_factor() -> None:
    calls = list(twins().values())
    for tensors in zip(*calls, strict=True):
        rows = [sorted(t[0, :, 0].float().tolist()) for t in tensors]
        assert rows[0] == rows[1] == rows[2]
    first, *_, last = (relative_error(*call, WAYS[INT8]) for call in calls)
    assert first < 2e-3 and last > 30 * first


def test_the_bound_holds_and_is_useless() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 256, 1, 64).bfloat16() for _ in range(3))
    options = WAYS[INT8]
    assert options is not None
    assert 0.005 < relative_error(q, k, v, options) < 0.02 and 1 < bound(q, k, v, options) < 20


def test_the_note_has_the_figures_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(RECORD.read_text(encoding="utf-8"))
    note = (ROOT / "docs" / "notes" / "quantized.md").read_text(encoding="utf-8")
    ways = ("bfloat16", INT8, "fp8, block 128")
    for cells in ([f"{of[way]:.1e}".replace("e-0", "e-") for way in ways] for of in found["twins"].values()):
        assert f"| {' | '.join(cells)} |" in note
    low, *_, high = (of[INT8] for of in found["twins"].values())
    assert f"a factor of {high / low:.0f}." in note
    for ways_of in found["bounds"].values():
        assert all(most > 1 > error for error, most in ways_of.values())
    small = dict(list(twins().items())[:1])
    monkeypatch.setattr(quantized_budget, "twins", lambda: small)
    (name,) = small
    assert relative_error(*small[name], WAYS[INT8]) == pytest.approx(found["twins"][name][INT8], rel=0.1)


def test_a_budget_of_a_16_bit_call_is_refused() -> None:
    q = torch.randn(1, 16, 1, 16).bfloat16()
    with pytest.raises(
        warpwave.InvalidInput, match=r"precision is 0\.01, an error budget, which float32 inputs can keep"
    ):
        warpwave.attention(q, q, q, precision=1e-2)
    with pytest.raises(TypeError, match="allow_quantized"):
        warpwave.attention(q, q, q, precision=1e-2, allow_quantized=True)  # type: ignore[call-arg]
