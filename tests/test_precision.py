"""The table of float32 arithmetics: that it is whole, that its errors are those of the record, and what it chooses."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import warpwave
from benchmarks.float32_error import relative_errors
from tests.conformance.datasets import DATA_SETS, Data
from warpwave import precision
from warpwave.gpu import ARCHS, CPU, INTERPRETER, Gpu
from warpwave.kernels import flash_fwd
from warpwave.kernels.hopper import flash_fwd as hopper
from warpwave.problem import PRECISIONS, AttentionProblem
from warpwave.workbench.hardware import catalog

RECORD = Path(__file__).parents[1] / "benchmarks" / "records" / "2026-11-21-float32-emulation.jsonl"
PLAIN = AttentionProblem(
    batch=4, seqlen_q=2048, seqlen_k=2048, num_heads_q=16, num_heads_kv=16, head_dim=64, head_dim_v=64,
    dtype="float32", softmax_scale=64**-0.5,
)  # fmt: skip
DEVICES = [*map(Gpu.for_arch, ARCHS), CPU, INTERPRETER, replace(Gpu.for_arch("sm_80"), arch="sm_75")]


def budget_of(budget: float, **changes: Any) -> AttentionProblem:
    return replace(PLAIN, error_budget=budget, **changes)


def test_every_name_is_in_the_table() -> None:
    assert set(PRECISIONS) == {"default", *precision.ARITHMETICS}
    for arithmetic in precision.ARITHMETICS.values():
        assert set(arithmetic.units) <= set(catalog.PATHS)


@pytest.mark.parametrize("gpu", DEVICES, ids=lambda gpu: f"{gpu.name}-{gpu.arch}")
def test_every_name_means_something_everywhere(gpu: Gpu) -> None:
    """What stands for a name is there and at least as accurate as what was asked for, and nothing such is cheaper."""
    here = precision.target(gpu)
    assert here.default in here.costs and here.costs.keys() <= precision.ARITHMETICS.keys()
    bits = {n: a.significant_bits for n, a in precision.ARITHMETICS.items()}
    for able in (precision.PORTABLE, hopper.ABLE, ("ieee",)):
        for name in precision.ARITHMETICS:
            taken = precision.arithmetic(replace(PLAIN, precision=name), gpu, able)
            there = [n for n in able if n in here.costs]
            if name in there or name == "ieee":
                assert taken == name, "what a kernel has is not replaced"
            elif taken != "ieee":
                assert taken in there and bits[taken] >= bits[name]
                assert all(here.costs[taken] <= here.costs[n] for n in there if bits[n] >= bits[name])


def test_what_names_mean_on_hopper() -> None:
    h200 = Gpu.for_arch("sm_90")
    meant = {
        name: tuple(precision.arithmetic(replace(PLAIN, precision=name), h200, able)
                    for able in (hopper.ABLE, precision.PORTABLE))
        for name in PRECISIONS
    }  # fmt: skip
    assert meant == {
        "default": ("fp16x3", "bf16x6"),
        "ieee": ("ieee", "ieee"),
        "tf32": ("fp16x1", "bf16x3"),
        "tf32x3": ("fp16x3", "bf16x6"),
        "bf16x3": ("fp16x3", "bf16x3"),
        "bf16x6": ("bf16x6", "bf16x6"),
        "fp16x1": ("fp16x1", "bf16x3"),
        "fp16x3": ("fp16x3", "bf16x6"),
    }


# Of cards of one architecture, these have another ratio of 16-bit to float32 rates than the rest: the workstation and
# server cards beside GeForce's, whose tensor cores run at half the rate, and the H20.
OF_OTHER_RATES = {
    *("a10", "a40", "rtxa4000", "rtxa5000", "rtxa6000", "jetson-orin", "l4", "l40s", "rtx5000ada", "rtx6000ada"),
    *("h20", "rtxpro6000", "gb10"),
}


@pytest.mark.parametrize("key", catalog.catalog())
def test_costs_are_those_of_the_data_sheets(key: str) -> None:
    """A cost is the ratio of bfloat16's rate to the unit's, times the products."""
    sheet = catalog.catalog()[key]
    costs = precision.target(catalog.gpu_of(sheet)).costs
    rates = sheet.peak_tflops
    if "bfloat16" not in rates or set(costs) == {"ieee"}:
        return
    for name, cost in costs.items():
        arithmetic = precision.ARITHMETICS[name]
        unit = next(unit for unit in arithmetic.units if unit in rates)
        exact = rates["bfloat16"] / rates[unit] * arithmetic.products
        assert cost == pytest.approx(exact, rel=0.25) or key in OF_OTHER_RATES, (name, exact)


# Errors ---------------------------------------------------------------------------------------------------------------


def test_the_promise_covers_the_record() -> None:
    rows = [json.loads(line) for line in RECORD.read_text().splitlines()]
    assert {row["arithmetic"] for row in rows} == precision.ARITHMETICS.keys()
    closest: dict[str, float] = {}
    for row in rows:
        problem = replace(
            PLAIN, batch=1, num_heads_q=1, num_heads_kv=1, seqlen_q=row["rows"], seqlen_k=row["keys"],
            head_dim=row["head_dim"], softmax_scale=row["head_dim"] ** -0.5,
        )  # fmt: skip
        promised = precision.promised_error(row["arithmetic"], problem)
        assert row["max"] <= promised, row
        closest[row["arithmetic"]] = max(closest.get(row["arithmetic"], 0.0), row["max"] / promised)
    assert min(closest.values()) > 0.5, "a promise nobody comes near promises too little"


@pytest.mark.parametrize("data", DATA_SETS)
@pytest.mark.parametrize("arithmetic", precision.ARITHMETICS)
def test_the_record_is_what_the_emulation_gives(arithmetic: str, data: Data) -> None:
    rows = map(json.loads, RECORD.read_text().splitlines())
    at = {"arithmetic": arithmetic, "data": data, "head_dim": 64, "rows": 32, "keys": 64}
    (row,) = (row for row in rows if at.items() <= row.items())
    errors = relative_errors(arithmetic, data, 64, 8, 32, 64, seed=0)
    assert 0.5 * row["median"] <= errors.median().item() <= errors.max().item() <= 1.0001 * row["max"]


def test_the_promise_grows_with_what_makes_errors_grow() -> None:
    for name in precision.ARITHMETICS:
        promised = precision.promised_error(name, PLAIN)
        assert precision.promised_error(name, replace(PLAIN, softmax_scale=1.0)) > promised, "sharper logits"
        assert precision.promised_error(name, replace(PLAIN, batch=1, num_heads_q=1, seqlen_q=1)) > promised, "one draw"


# Choices --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [2.0**-10, np.float32(2.0**-10), np.float64(2.0**-10), Fraction(1, 1024)])
def test_a_budget_is_any_real_number(budget: Any) -> None:
    q = torch.ones(1, 3, 1, 8, device="cpu")
    explanation = warpwave.explain(q, q, q, precision=budget)
    assert explanation.problem.error_budget == 2.0**-10
    assert torch.equal(warpwave.attention(q, q, q, precision=budget), q)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("changes", [{}, {"head_dim": 128}, {"head_dim": 16}, {"seqlen_k": 16384}, {"seqlen_q": 16}])
def test_budgets_take_the_arithmetic_that_fits(arch: str, changes: dict[str, int]) -> None:
    changes = {**changes, "softmax_scale": changes.get("head_dim", 64) ** -0.5}
    chosen = [precision.cheapest(budget_of(b, **changes), Gpu.for_arch(arch)) for b in (1e-2, 1e-4, 1e-6)]
    assert chosen == ["bf16x3" if arch == "sm_90" else "tf32", "bf16x3", "bf16x6"]


@pytest.mark.parametrize(
    "changes", [{}, {"head_dim": 128}, {"head_dim": 256}, {"head_dim": 16}, {"seqlen_k": 16384}, {"seqlen_q": 16}]
)
def test_budgets_of_the_hopper_kernel(changes: dict[str, int]) -> None:
    """Three products of float16 promise 1e-6 too, and nothing cheaper promises 1e-4: one way serves both."""
    changes = {**changes, "softmax_scale": changes.get("head_dim", 64) ** -0.5}
    h200 = Gpu.for_arch("sm_90")
    chosen = [precision.cheapest(budget_of(b, **changes), h200, hopper.ABLE) for b in (1e-2, 1e-4, 1e-6)]
    assert chosen == ["fp16x1", "fp16x3", "fp16x3"]
    few_rows = budget_of(1e-6, **(changes | {"batch": 1, "num_heads_q": 1, "num_heads_kv": 1, "seqlen_q": 100}))
    assert precision.cheapest(few_rows, h200, hopper.ABLE) in ("bf16x6", None)


@pytest.mark.parametrize("gpu", DEVICES, ids=lambda gpu: f"{gpu.name}-{gpu.arch}")
@pytest.mark.parametrize("budget", [0.5, 1e-2, 1e-3, 1e-5, 2e-6, 1e-6])
@pytest.mark.parametrize("able", [precision.PORTABLE, hopper.ABLE], ids=["portable", "Hopper's"])
def test_the_choice_is_the_cheapest_that_keeps_the_budget(able: tuple[str, ...], budget: float, gpu: Gpu) -> None:
    problem, costs = budget_of(budget), precision.target(gpu).costs
    if not set(able) & costs.keys():
        return  # nothing that this kernel has is there
    chosen = precision.cheapest(problem, gpu, able)
    keep = {n: c for n, c in costs.items() if precision.promised_error(n, problem) <= budget and n in able}
    assert (chosen is None) == (not keep) == bool(precision.why_not(problem, gpu, able))
    if chosen is not None:
        assert costs[chosen] == min(keep.values())
        assert precision.arithmetic(problem, gpu, able) == chosen


def test_16_bit_inputs_have_no_choice() -> None:
    for gpu in DEVICES:
        assert precision.arithmetic(replace(PLAIN, dtype="bfloat16"), gpu) == "ieee"


def test_a_kernel_that_cannot_split_is_asked_what_it_can() -> None:
    problem = budget_of(1e-6)
    (reason,) = precision.why_not(problem, Gpu.for_arch("sm_90"), ("ieee",))
    assert "by ieee" in reason and "1e-06" in reason
    assert precision.why_not(problem, Gpu.for_arch("sm_90")) == []


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", [16, 40, 64, 128, 192, 256])
@pytest.mark.parametrize("name", precision.PORTABLE)
def test_flash_fwd_has_a_config_for_every_name(name: str, head_dim: int, arch: str) -> None:
    gpu = Gpu.for_arch(arch)
    problem = replace(PLAIN, precision=name, head_dim=head_dim, head_dim_v=head_dim)
    assert flash_fwd.why_not(problem, gpu) == []
    chosen, *others = flash_fwd.configs(problem, gpu)
    assert flash_fwd.smem_bytes(problem, gpu, chosen) <= gpu.smem_per_block_bytes
    assert chosen not in others
    ahead = {config.split_ahead for config in (chosen, *others)}
    assert ahead == ({False, True} if precision.arithmetic(problem, gpu).startswith("bf16") else {False})


def test_a_budget_where_a_kernel_has_no_arithmetic_is_a_reason() -> None:
    assert hopper.why_not(budget_of(1e-12), CPU)
    assert precision.why_not(budget_of(1e-2), CPU, ("fp16x1",)) == [f"it has no float32 arithmetic on {CPU.name}"]
