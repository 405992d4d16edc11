"""The float32 scripts: what the Pareto plot calls best, and that the emulation does what the kernels do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import float32_error, float32_pareto, float32_sweep
from warpwave import precision
from warpwave.gpu import Gpu
from warpwave.kernels import flash_fwd
from warpwave.kernels.hopper import flash_fwd as hopper
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.records import read_records
from warpwave.workbench.bench.workloads import load_suite

RECORD = Path(__file__).parents[2] / "warpwave" / "workbench" / "report" / "shipped" / "2026-11-22-h200-float32.jsonl"


def test_points_are_in_units_of_sdpa_and_the_best_are_marked() -> None:
    found = float32_pareto.points(read_records(RECORD), "d64 4x2048 h16 fp32")
    by_name = {point.name: point for point in found}
    assert (by_name["SDPA"].time, by_name["SDPA"].error) == (1.0, 1.0)
    assert {"ieee", "tf32x3", "tf32"} <= by_name.keys()
    for point in found:
        beaten = any(o.time <= point.time and o.error <= point.error for o in found if o is not point)
        assert point.best == (not beaten), point
    fastest = min(found, key=lambda point: point.time)
    assert f"| {fastest.name} *" in float32_pareto.table(found), "the fastest is beaten by nothing"


def test_the_figure_is_the_same_every_time(tmp_path: Path) -> None:
    found = float32_pareto.points(read_records(RECORD), "d128 4x2048 h16 fp32")
    for name in ("a.svg", "b.svg"):
        float32_pareto.draw(found, "title", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_record_without_the_case_says_so() -> None:
    with pytest.raises(float32_pareto.NoPareto, match="no case 'd17"):
        float32_pareto.points(read_records(RECORD), "d17")


def test_every_candidate_of_the_sweep_fits() -> None:
    gpu = Gpu.for_arch("sm_90")
    for (arithmetic, head_dim), configs in float32_sweep.CANDIDATES.items():
        problem = AttentionProblem(
            batch=1, seqlen_q=64, seqlen_k=64, num_heads_q=1, num_heads_kv=1, head_dim=head_dim, head_dim_v=head_dim,
            dtype="float32", softmax_scale=0.1, precision=arithmetic,
        )  # fmt: skip
        assert set(configs) <= set(flash_fwd.configs(problem, gpu)), (arithmetic, head_dim)
        assert len(set(configs)) == len(configs)


def test_cutting_is_towards_zero_and_rounding_to_the_nearest() -> None:
    step = 2.0**-23
    x = torch.tensor([1 + 0.75 * step, -1 - 0.75 * step, 1.0, 0.0], dtype=torch.float64)
    assert float32_error.cut(x).tolist() == [1.0, -1.0, 1.0, 0.0]
    assert float32_error.nearest(x).tolist() == [1 + step, -1 - step, 1.0, 0.0]


@pytest.mark.parametrize(
    ("arithmetic", "bits"),
    [("tf32", 11), ("bf16x3", 16), ("tf32x3", 21), ("bf16x6", 24), ("fp16x1", 11), ("fp16x3", 22)],
)
def test_parts_add_up_to_so_many_bits(arithmetic: str, bits: int) -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).double()
    x = x[x.abs() > 1e-4][None]  # below, a second part of float16 has no normal numbers left
    left = (sum(float32_error.parts(x, arithmetic)) - x).abs() / x.abs()
    assert 2.0 ** -(bits + 3) * (arithmetic != "bf16x6") <= left.max().item() <= 2.0**-bits


def test_the_suite_has_names_and_budgets_under_names_of_their_own() -> None:
    suite = load_suite("float32")
    names = [case.name for case in suite.cases]
    assert len(set(names)) == len(names)
    budgets = {case.problem.error_budget: case.name for case in suite.cases if case.problem.error_budget}
    assert set(budgets) == {1e-2, 1e-4, 1e-6} and budgets[1e-4].endswith("error0.0001")
    h200 = Gpu.for_arch("sm_90")
    timed = {precision.arithmetic(case.problem, h200, (*hopper.ABLE, "ieee")) for case in suite.cases}
    assert timed == {*hopper.ABLE, "ieee"}, "every way of computing that auto may take on the card of the goals"
