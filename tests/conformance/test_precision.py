"""float32 by split products and by budget: the error asked for is kept on every data set, and Inf stays Inf."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import cases, harness
from tests.conformance.cases import PLAIN, Call
from tests.conformance.datasets import DATA_SETS, Data
from tests.conformance.harness import DEVICE, GPU
from tests.conformance.harness import KERNELS as KERNELS_BY_NAME
from tests.marks import one_in
from warpwave import InvalidInput, InvalidType, UnsupportedProblem, attention, explain, precision
from warpwave.kernels import flash_fwd
from warpwave.workbench.explain.advice import computed_in
from warpwave.workbench.verify.reference import oracle

BUDGETS = (1e-2, 1e-4, 1e-6)
SPLIT = ("tf32x3", "bf16x3", "bf16x6", *(("fp16x1", "fp16x3") if harness.ON_GPU else ()))
# Rows enough that the error is no single draw, in few programs of the interpreter; one length is no multiple of a tile.
SHAPES = ((64, (64, 70)), (16, (64, 2)), (96, (64, 21))) + (((256, (300, 2048)),) if harness.ON_GPU else ())
AHEAD = flash_fwd.Config(64, 32, 4, 2, split_ahead=True)
IN_LOOP = flash_fwd.Config(64, 32, 4, 2)
WAYS: dict[str, tuple[str, Any]] = {"in the loop": ("flash_fwd", IN_LOOP), "ahead": ("flash_fwd", AHEAD)}
KERNELS = ["flash_fwd"]
if GPU.arch == "sm_90":
    KERNELS.append("hopper/flash_fwd")
    WAYS["on Hopper"] = ("hopper/flash_fwd", None)


@functools.lru_cache(maxsize=8)
def built(head_dim: int, lengths: tuple[int, int], data: Data) -> tuple[Call, Tensor]:
    """A call and the exact result."""
    case = replace(PLAIN, dtype="float32:default", dims=(head_dim, head_dim), lengths=lengths, heads=(4, 4))
    call = cases.build(case, data, DEVICE)
    return call, oracle(call.problem, call.operands).out


def relative_error(out: Tensor, exact: Tensor) -> float:
    return ((out.double() - exact).norm() / exact.norm()).item()


@one_in(4)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("data", DATA_SETS)
@pytest.mark.parametrize(("head_dim", "lengths"), SHAPES, ids=[f"d{d}-{q}x{k}" for d, (q, k) in SHAPES])
def test_a_budget_is_kept(head_dim: int, lengths: tuple[int, int], data: Data, kernel: str) -> None:
    """What each of three budgets takes is within it, or the kernel has none that promises it and says so."""
    call, exact = built(head_dim, lengths, data)
    taken = []
    for budget in BUDGETS:
        asked = replace(call.problem, error_budget=budget)
        taken.append(computed_in(KERNELS_BY_NAME[kernel], asked, GPU))
        if reasons := KERNELS_BY_NAME[kernel].why_not(asked, GPU):
            assert budget == min(BUDGETS), reasons
            with pytest.raises(UnsupportedProblem, match="keeps a relative error"):
                attention(*call.operands[:3], precision=budget, kernel=kernel)
            continue
        out = attention(*call.operands[:3], precision=budget, kernel=kernel)
        assert relative_error(out, exact) <= budget, f"{taken[-1]} does not keep {budget:g}"
    several = {"cpu": 3, "sm_80": 3, "sm_90": 2, "sm_100": 3}.get(GPU.arch, 1)
    assert len(set(taken)) >= several, taken


@one_in(4)
@pytest.mark.parametrize("data", DATA_SETS)
@pytest.mark.parametrize("arithmetic", precision.ARITHMETICS)
def test_every_arithmetic_keeps_its_promise(arithmetic: str, data: Data) -> None:
    call, exact = built(64, (64, 70), data)
    named = replace(call.problem, precision=arithmetic)
    for kernel, config in WAYS.values():
        if KERNELS_BY_NAME[kernel].why_not(named, GPU):
            continue
        promised = precision.promised_error(computed_in(KERNELS_BY_NAME[kernel], named, GPU), named)
        out = attention(*call.operands[:3], precision=arithmetic, kernel=kernel, config=config)
        assert relative_error(out, exact) <= promised, "the promise is broken"


FEATURES: tuple[dict[str, Any], ...] = (
    {"causal": "bottom_right", "window": (13, 0)},
    {"mask": "full", "bias": "full"},
    {"packed": True, "batch": 4, "causal": "bottom_right"},
    {"layout": "one buffer", "dims": (40, 24)},
    {"layout": "last stride 2", "dims": (59, 59)},
)


@pytest.mark.parametrize("features", FEATURES, ids=lambda f: "-".join(map(str, f)))
@pytest.mark.parametrize("arithmetic", ["bf16x3", "bf16x6"])
def test_splitting_ahead_changes_no_bit(arithmetic: str, features: dict[str, Any]) -> None:
    fields = {"heads": (2, 1), "batch": 2, "dims": (40, 40), "lengths": (33, 40), **features}
    call = cases.build(replace(PLAIN, dtype=f"float32:{arithmetic}", **fields), "normal", DEVICE)
    in_loop, ahead = (harness.run("flash_fwd", call, config) for config in (IN_LOOP, AHEAD))
    assert harness.bits(*in_loop) == harness.bits(*ahead)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("arithmetic", SPLIT)
def test_inf_stays_inf(arithmetic: str, way: str) -> None:
    """Where float32 makes Inf, so does a split: Inf times a remainder of 0 must not make it NaN."""
    kernel, config = WAYS[way]
    q, k = torch.zeros(1, 16, 1, 16, device=DEVICE), torch.zeros(1, 48, 1, 16, device=DEVICE)
    v = torch.ones(1, 48, 1, 16, device=DEVICE)
    v[0, 3, 0, 2], v[0, 40, 0, 5], v[0, 7, 0, 9] = torch.inf, -torch.inf, torch.nan
    expected = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k), -1) @ v.transpose(1, 2)
    out = attention(q, k, v, precision=arithmetic, kernel=kernel, config=config)
    assert torch.equal(out.isposinf(), expected.transpose(1, 2).isposinf()), "Inf did not stay Inf"
    assert torch.equal(out.isneginf(), expected.transpose(1, 2).isneginf())
    assert torch.equal(out.isnan(), expected.transpose(1, 2).isnan())
    # In scores: +Inf makes NaN of its rows alone, -Inf hides its key.
    q[0, 5, 0, 0], k[0, 9, 0, 0], v = 1.0, -torch.inf, v.nan_to_num(1.0, 1.0, 1.0)
    q[0, :5, 0, 0], q[0, 6:, 0, 0] = 2.0, 3.0
    out, lse = attention(q, k, v, precision=arithmetic, kernel=kernel, config=config, return_lse=True)
    seen = torch.tensor(47.0, device=DEVICE).log()  # every key but one scores 0
    assert out.isfinite().all() and torch.allclose(lse, seen.expand_as(lse), atol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("arithmetic", SPLIT)
def test_values_of_any_size_keep_their_bits(arithmetic: str, scale: float) -> None:
    """bfloat16 has the range of float32, so no scale of v changes the relative error by much."""
    call, exact = built(64, (64, 70), "normal")
    q, k, v = call.operands[:3]
    out = attention(q, k, v * scale, precision=arithmetic, kernel="flash_fwd", config=IN_LOOP)
    name = precision.arithmetic(replace(call.problem, precision=arithmetic), GPU)
    promised = precision.promised_error(name, call.problem)
    assert relative_error(out.double() / scale, exact) <= 2 * promised


# What is refused ------------------------------------------------------------------------------------------------------

Q = torch.zeros(1, 4, 1, 16)


@pytest.mark.parametrize("budget", [0, 0.0, -1e-3, 1, 1.5, float("nan"), float("inf"), "1e-4", "fp32", ""])
def test_a_budget_that_is_none(budget: Any) -> None:
    with pytest.raises(InvalidInput, match="precision is"):
        attention(Q, Q, Q, precision=budget)


@pytest.mark.parametrize("budget", [True, False, None, [1e-4], torch.tensor(1e-4)])
def test_a_budget_of_a_wrong_type(budget: Any) -> None:
    with pytest.raises(InvalidType, match="precision is"):
        attention(Q, Q, Q, precision=budget)


def test_a_budget_for_16_bit_inputs_says_what_to_do() -> None:
    half = Q.half()
    with pytest.raises(InvalidInput, match=r"float32 inputs can keep; q is torch.float16.*q.float\(\)"):
        attention(half, half, half, precision=1e-4)


@pytest.mark.parametrize("kernel", ["flash_fwd", "tiled", "naive", "eager", "auto"])
def test_a_budget_nothing_keeps_names_what_is_kept(kernel: str) -> None:
    x = Q.to(DEVICE)
    with pytest.raises(
        UnsupportedProblem, match=r"keeps a relative error of 1e-09: its smallest promised error .* by \w+"
    ):
        attention(x, x, x, precision=1e-9, kernel=kernel)


# Through the other doors ----------------------------------------------------------------------------------------------


def test_explain_names_the_arithmetic_and_measures_it() -> None:
    call, _ = built(64, (64, 70), "normal")
    said = explain(*call.operands[:3], precision=1e-4, kernel="flash_fwd")
    accuracy = said.accuracy
    assert accuracy is not None and accuracy.measured is not None
    assert accuracy.arithmetic == precision.arithmetic(said.problem, GPU)
    assert 0 < accuracy.measured <= accuracy.promised <= 1e-4
    text = str(said)
    assert f"precision 0.0001: {accuracy.arithmetic}" in text and "measured on" in text
    assert explain(said.problem).accuracy.measured is None  # type: ignore[union-attr]


def test_a_budget_reaches_the_operator() -> None:
    """With a gradient the call goes through torch's dispatcher, whose schema carries the budget."""
    call, exact = built(64, (64, 70), "normal")
    q, k, v = (x.clone().requires_grad_() for x in call.operands[:3])
    out = attention(q, k, v, precision=1e-4)
    assert relative_error(out.detach(), exact) <= 1e-4
    out.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()
    with pytest.raises(UnsupportedProblem, match="1e-09"):
        attention(q, k, v, precision=1e-9)
