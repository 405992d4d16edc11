"""`assert_reaches` without a GPU: the clock and the card are planted, the arithmetic and the verdicts are real."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from warpwave import testing
from warpwave.errors import InvalidInput
from warpwave.gpu import Gpu, current_gpu
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.timing import Samples
from warpwave.workbench.hardware import catalog
from warpwave.workbench.model.roofline import data_sheet_rates, roofline

PROBLEM = AttentionProblem(
    batch=1,
    seqlen_q=256,
    seqlen_k=256,
    num_heads_q=2,
    num_heads_kv=2,
    head_dim=64,
    head_dim_v=64,
    dtype="float16",
    softmax_scale=0.125,
)
H200 = catalog.catalog()["h200"]
BOUND_US = roofline(PROBLEM, data_sheet_rates(H200), gpu=catalog.gpu_of(H200)).time_us


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """An H200 made of this CPU; returns the list of fractions of the bound that its clock will show, round by round."""
    fractions = [0.5] * 11

    def timed(callables: Mapping[str, Any], **options: Any) -> dict[str, Samples]:
        return {name: Samples(tuple(BOUND_US / f for f in fractions), "events", 3, 1, True) for name in callables}

    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(testing, "device_of", lambda q: cpu)
    monkeypatch.setattr(testing, "current_gpu", lambda device: catalog.gpu_of(H200))
    monkeypatch.setattr(testing, "time_interleaved", timed)
    return fractions


def test_a_fast_and_right_call_passes(h200: list[float]) -> None:
    reached = testing.assert_reaches(0.45, call=sdpa, problem=PROBLEM)
    assert reached.fraction == pytest.approx(0.5)
    assert (reached.low95, reached.high95) == pytest.approx((0.5, 0.5))


def test_a_slow_call_fails_with_the_arithmetic(h200: list[float]) -> None:
    with pytest.raises(AssertionError) as failure:
        testing.assert_reaches(0.6, call=sdpa, problem=PROBLEM)
    message = str(failure.value)
    assert "reaches 0.500 of its bound" in message
    assert "demanded: 0.600" in message
    assert "memory" in message
    assert f"{2 * BOUND_US:,.2f} us, median of 11 rounds by events" in message
    assert "H200" in message


def test_noise_around_the_demand_does_not_fail(h200: list[float]) -> None:
    h200[:] = [0.40, 0.45, 0.48, 0.49, 0.49, 0.50, 0.51, 0.52, 0.55, 0.56, 0.60]
    testing.assert_reaches(0.55, call=sdpa, problem=PROBLEM)  # the median is 0.50, the interval reaches 0.55
    with pytest.raises(AssertionError, match="demanded"):
        testing.assert_reaches(0.58, call=sdpa, problem=PROBLEM)


def test_one_hiccup_does_not_fail(h200: list[float]) -> None:
    h200[3] = 0.01
    testing.assert_reaches(0.5, call=sdpa, problem=PROBLEM)


def test_a_wrong_result_fails_whatever_its_speed(h200: list[float]) -> None:
    def without_scale(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q * 8, k, v)

    with pytest.raises(AssertionError, match="is wrong: RMS error"):
        testing.assert_reaches(0.01, call=without_scale, problem=PROBLEM)


def test_a_call_of_ours_is_described_by_its_arguments(h200: list[float]) -> None:
    q, k, v = (torch.randn(1, 256, 2, 64, dtype=torch.float16) for _ in range(3))
    reached = testing.assert_reaches(0.01, q, k, v, causal=True, window_size=(32, 0), kernel="eager")
    assert "causal" in reached.arithmetic
    assert "visible pairs" in reached.arithmetic


def test_masks_and_packed_calls_are_judged_too(h200: list[float]) -> None:
    q, k, v = (torch.randn(2, 40, 2, 64, dtype=torch.float16) for _ in range(3))
    testing.assert_reaches(0.001, q, k, v, mask=torch.rand(2, 1, 40, 40) < 0.5, kernel="eager")
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    offsets = torch.tensor([0, 30, 80], dtype=torch.int32)
    testing.assert_reaches(
        0.001,
        *packed,
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        max_seqlen_q=50,
        max_seqlen_k=50,
        causal=True,
        kernel="eager",
    )


@pytest.mark.parametrize("demand", [0, 1.2, float("nan")])
def test_a_demand_that_makes_no_sense_is_refused(demand: float) -> None:
    with pytest.raises(InvalidInput, match="fraction_of_bound"):
        testing.assert_reaches(demand, call=sdpa, problem=PROBLEM)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "give q, k and v"),
        ({"call": sdpa}, "without problem="),
        ({"q": torch.zeros(1, 2, 1, 16)}, "q needs k and v"),
        ({"call": sdpa, "problem": PROBLEM, "rounds": 5}, "at least 6"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        testing.assert_reaches(0.5, **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_skips_and_says_why() -> None:
    with pytest.raises(pytest.skip.Exception, match="torch sees none"):
        testing.assert_reaches(0.5, call=sdpa, problem=PROBLEM)


def test_a_card_without_data_sheet_skips(monkeypatch: pytest.MonkeyPatch, h200: list[float]) -> None:
    unknown = Gpu("Card of tomorrow", "nvidia", "sm_90", 1 << 17, 255, 1, 32)
    monkeypatch.setattr(testing, "current_gpu", lambda device: unknown)
    with pytest.raises(pytest.skip.Exception, match="Card of tomorrow has no data sheet"):
        testing.assert_reaches(0.5, call=sdpa, problem=PROBLEM)


def test_pytest_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, warpwave, warpwave.testing; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
def test_the_real_clock_and_the_real_card() -> None:
    """Half of what any of our kernels reaches on any card it was measured on; and a demand nobody can meet."""
    q, k, v = (torch.randn(4, 4096, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    reached = testing.assert_reaches(0.15, q, k, v, causal=True)
    assert 0 < reached.low95 <= reached.fraction <= reached.high95 <= 1
    with pytest.raises(AssertionError, match=r"demanded: 1\.000"):
        testing.assert_reaches(1.0, q, k, v, causal=True)
    assert current_gpu(q.device).name in reached.arithmetic
