"""What torch's CPU kernel is given, and what is settled around it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance import cases
from tests.conformance.cases import Case
from tests.conformance.datasets import DATA_SETS, Data
from tests.conformance.gates import forward_references, judge_forward
from warpwave import attention
from warpwave.gpu import CPU
from warpwave.kernels import eager, torch_sdpa
from warpwave.problem import Causal

PLAIN = Case(lengths=(37, 50), dims=(40, 40), heads=(4, 2), batch=3, lse=False)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "top_left"},
    "causal, from the last key": {"causal": "bottom_right"},
    "causal, more queries than keys": {"causal": "bottom_right", "lengths": (50, 37)},
    "window": {"window": (9, 5)},
    "a mask for each pair": {"mask": "full"},
    "a mask of keys": {"mask": "keys"},
    "a mask of rows": {"mask": "rows"},
    "bias": {"bias": "full"},
    "bias of keys in float32": {"bias": "heads"},
    "all of them": {"mask": "full", "bias": "full", "window": (20, 9), "causal": "bottom_right"},
    "packed": {"packed": True},
    "packed, causal": {"packed": True, "causal": "bottom_right", "window": (20, -1)},
    "values of another width": {"dims": (40, 24), "mask": "keys"},
    "strange strides": {"layout": "k and v differ", "mask": "full"},
}


@pytest.mark.parametrize("data", DATA_SETS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("features", CALLS)
def test_gates(features: str, dtype: str, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's kernel alone: eager is not there to fall back on."""
    monkeypatch.setattr(eager, "forward", None)
    call = cases.build(replace(PLAIN, dtype=dtype, **CALLS[features]), data, torch.device("cpu"))
    config = torch_sdpa.Config()
    out, lse = torch_sdpa.bind(call.problem, call.operands, config)(call.operands)
    assert lse is None
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), out, None)
    assert verdict.passed, verdict


def of_mask(hidden_row: int, hidden_key: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    mask[..., hidden_row, hidden_key] = False
    return [torch.randn(1, 8, 2, 16) for _ in range(3)], mask


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_key_that_is_not_finite_stays_with_the_rows_that_see_it(bad: float) -> None:
    (q, k, v), mask = of_mask(3, 5)
    wanted = attention(q, k, v, mask=mask, kernel="torch_sdpa")
    k[0, 5] = bad
    out = attention(q, k, v, mask=mask, kernel="torch_sdpa")
    assert torch.equal(out[0, 3].isfinite(), torch.ones(2, 16, dtype=torch.bool))
    torch.testing.assert_close(out[0, 3], wanted[0, 3])


@pytest.mark.parametrize("hide", ["mask", "bias", "causal"])
def test_what_nobody_sees_may_hold_anything(hide: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 16) for n in (5, 8, 8))
    shown = torch.ones(2, 1, 1, 8, dtype=torch.bool)
    shown[:, :, :, 5:] = False
    ways: dict[str, dict[str, Any]] = {
        "mask": {"mask": shown},
        "bias": {"bias": torch.where(shown, 0.0, -math.inf).expand(2, 2, 5, 8)},
        "causal": {"causal": Causal("top_left")},
    }
    options = ways[hide]
    wanted = attention(q, k, v, kernel="torch_sdpa", **options)
    k[:, 5:], v[:, 5:] = math.nan, math.inf
    torch.testing.assert_close(attention(q, k, v, kernel="torch_sdpa", **options), wanted)


def test_rows_that_see_nothing_are_zero() -> None:
    (q, k, v), mask = of_mask(0, 0)
    mask[..., 2, :] = False
    out = attention(q, k, v, mask=mask, kernel="torch_sdpa")
    assert not out[0, 2].any() and out[0, 1].all()


def test_long_windows_are_left_to_who_skips_what_they_hide() -> None:
    call = cases.build(replace(PLAIN, window=(9, 5)), "normal", torch.device("cpu"))
    long = replace(call.problem, seqlen_q=8192, seqlen_k=8192)
    assert any("mask of 8,192 x 8,192" in reason for reason in torch_sdpa.why_not(long, CPU))
    assert not torch_sdpa.why_not(replace(long, window_size=(-1, -1), causal=Causal("top_left")), CPU)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_query_that_is_not_finite_makes_no_zeros(bad: float) -> None:
    """torch's kernel takes a row of NaN scores for one that sees nothing, at some lengths."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    q[0, 1, 0, 3] = bad
    rows = attention(q, k, v, kernel="torch_sdpa").isnan().all(-1)
    assert rows[0, 1, 0] and rows.sum() == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("seqlen_k", [1, 4, 70])
def test_a_key_that_is_not_finite_makes_no_zeros(seqlen_k: int, bad: float) -> None:
    """Nothing is hidden, and a score that is NaN makes its row NaN, as eager has it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 8) for n in (4, seqlen_k, seqlen_k))
    k[0, 0, 1, 3] = bad
    out, expected = (attention(q, k, v, kernel=kernel) for kernel in ("torch_sdpa", "eager"))
    assert torch.equal(out.isnan(), expected.isnan())
    assert not math.isnan(bad) or out[0, :, 1].isnan().all()
