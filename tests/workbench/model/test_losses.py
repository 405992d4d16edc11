"""A measurement split into losses: exact, named, and never above 100 % of a yardstick."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import warpwave
from warpwave import dispatch
from warpwave.errors import InvalidInput
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.records import read_records
from warpwave.workbench.cli import app
from warpwave.workbench.explain.explanation import explain
from warpwave.workbench.explain.recorded_time import clock_mhz, config_of, in_graph, is_hot
from warpwave.workbench.hardware.catalog import catalog, resolve
from warpwave.workbench.model.losses import REMEDIES, Losses, recommendation, split
from warpwave.workbench.model.predict import predict
from warpwave.workbench.model.roofline import data_sheet_rates, roofline
from warpwave.workbench.model.steps import LOSSES, aligned_loop
from warpwave.workbench.report import shipped

H200, SHEET = resolve("h200"), catalog()["h200"]


def _problem(seqlen: int = 1024, heads: int = 1) -> AttentionProblem:
    return AttentionProblem(
        batch=1, seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=heads, num_heads_kv=heads, head_dim=64, head_dim_v=64,
        dtype="bfloat16", softmax_scale=0.125,
    )  # fmt: skip


def _split(times_bound: float, problem: AttentionProblem | None = None, clock: float | None = None) -> Losses:
    problem = problem or _problem()
    choice = dispatch.choose(problem, H200)
    p = predict(problem, choice.kernel, choice.config, H200)
    assert p is not None
    bounds = roofline(problem, data_sheet_rates(SHEET), gpu=H200)
    return split(p.bound_us * times_bound, p, SHEET, bounds, clock_mhz=clock)


@settings(max_examples=40, deadline=None)
@given(st.floats(1.0, 1e5), st.sampled_from([64, 200, 1024, 4096]), st.sampled_from([1, 3, 64]))
def test_factors_multiply_to_the_ratio_and_no_share_passes_one(ratio: float, seqlen: int, heads: int) -> None:
    found = _split(ratio, _problem(seqlen, heads), clock=1500.0)
    assert math.prod(loss.factor for loss in found.losses) == pytest.approx(found.ratio, rel=1e-9)
    assert found.ratio == pytest.approx(ratio)
    assert all(0 < y.share <= 1 and y.least_us <= found.measured_us for y in found.yardsticks)
    assert all(loss.factor >= 1 for loss in found.losses[:-1])  # the remainder alone may help
    assert [loss.name for loss in found.losses] == [*LOSSES, "remainder"]
    ends = [(a.after_us, b.before_us) for a, b in zip(found.losses, found.losses[1:], strict=False)]
    assert all(a == b for a, b in ends)


def test_a_time_far_below_the_bound_is_refused_with_what_it_may_be() -> None:
    with pytest.raises(InvalidInput, match="no implementation of this call takes less than"):
        _split(0.86)
    choice = dispatch.choose(_problem(), H200)
    p = predict(_problem(), choice.kernel, choice.config, H200)
    assert p is not None
    for time in (0.0, -1.0, math.nan):
        with pytest.raises(InvalidInput, match="above 0"):
            split(time, p, SHEET)


def test_a_time_a_little_below_the_bound_is_split_with_a_warning() -> None:
    found = _split(0.9)
    assert found.warning.startswith("The measured time is 10.0% less than the bound") and "--hot" in found.warning
    assert math.prod(loss.factor for loss in found.losses) == pytest.approx(0.9)
    assert all(0 < y.share <= 1 for y in found.yardsticks) and found.remainder < 0.9
    assert not _split(1.01).warning


def test_a_time_below_an_estimated_bound_is_split() -> None:
    problem = replace(_problem(4096, 16), mask_shape=(1, 1, 4096, 4096))
    least = explain(problem, gpu="h200").bounds
    assert least is not None and not least.exact
    found = explain(problem, gpu="h200", measured_us=least.of_problem.time_us / 3)
    assert found.losses is not None and "estimate" in found.losses.warning and "the mask was not read" in str(found)
    counted = replace(problem, mask_visible_pairs=problem.visible_pairs)
    with pytest.raises(InvalidInput, match="no implementation"):
        explain(counted, gpu="h200", measured_us=least.of_problem.time_us / 3)
    said = str(explain(counted, gpu="h200"))
    assert "estimated" not in said, "a mask that was read is counted"


def test_a_time_on_a_latent_cache_is_not_refused() -> None:
    """The bound counts v beside k. 64 sequences of 4,096 latents, read once, took 81 us on an H200
    (2026-11-22-h200-latents.log)."""
    latent = replace(
        _problem(4096, 16), batch=64, seqlen_q=1, seqlen_k=4096, num_heads_kv=1, head_dim=576, head_dim_v=512
    )
    found = explain(latent, gpu="h200", measured_us=81)
    assert found.bounds is not None and found.bounds.of_problem.time_us > 1.15 * 81
    assert found.losses is not None and "v is part of k" in found.losses.warning
    assert "estimated: k and v count as two tensors" in " ".join(str(found).split())
    prompt = explain(replace(latent, batch=1, seqlen_q=4096), gpu="h200")
    assert "estimated:" not in str(prompt), "products bind, however many tensors are read"
    told = explain(replace(latent, v_in_k=True), gpu="h200", measured_us=81)
    assert told.bounds is not None and told.losses is not None and told.prediction is not None
    assert told.bounds.of_problem.time_us < 81 and not told.losses.warning and "estimated:" not in str(told)
    assert told.prediction.low_us < 81 < told.prediction.high_us
    several = replace(latent, num_heads_kv=2)
    with pytest.raises(InvalidInput, match="no implementation"):
        explain(several, gpu="h200", measured_us=81)


def test_a_time_below_the_bound_is_no_share_of_it() -> None:
    least = explain(_problem(4096, 16), gpu="h200").bounds
    assert least is not None
    said = str(explain(_problem(4096, 16), gpu="h200", measured_us=0.9 * least.of_problem.time_us))
    assert "10.0% less than the bound" in said and "100.0%" not in said
    assert "% of the data sheet bound" in str(explain(_problem(4096, 16), gpu="h200", measured_us=1000.0))


def test_the_power_matched_yardstick_follows_the_clock() -> None:
    problem = _problem(8192, 64)
    high, low = _split(3.0, problem, clock=1980.0), _split(3.0, problem, clock=1200.0)
    assert low.yardsticks[1].least_us == pytest.approx(low.bound_us * 1830 / 1200)
    assert high.yardsticks[1].share < low.yardsticks[1].share < 1
    # A clock read when the card had slowed already cannot make a share of more than one.
    assert _split(1.01, problem, clock=600.0).yardsticks[1].share == 1.0


def test_the_power_matched_yardstick_of_a_card_above_its_stated_clock() -> None:
    sheet, gpu = catalog()["rtx4090"], resolve("rtx4090")
    problem = _problem(8192, 64)
    choice = dispatch.choose(problem, gpu)
    p = predict(problem, choice.kernel, choice.config, gpu)
    assert p is not None
    bounds = roofline(problem, data_sheet_rates(sheet), gpu=gpu)
    found = split(2 * p.bound_us, p, sheet, bounds, clock_mhz=2520.0)
    assert found.yardsticks[1].least_us == pytest.approx(p.bound_us * 3105 / 2520)


def test_every_loss_has_a_remedy_that_promises_no_factor() -> None:
    assert set(REMEDIES) == set(LOSSES)
    assert not any(re.search(r"\d ?(x|times|%)", text) for text in REMEDIES.values())
    found = _split(400.0, _problem(1000, 3))
    assert found.largest is not None and found.largest.name == "idle SMs"
    said = recommendation(found.largest)
    assert "by the model" in said and REMEDIES["idle SMs"] in said
    assert recommendation(found.losses[-1]) == ""


def test_shipped_records_split_without_a_share_above_one() -> None:
    kernels = {k.NAME: k for k in dispatch.KERNELS}
    count = 0
    for path in shipped.paths():
        for _, m in read_records(Path(str(path))).measurements:
            if not m.is_ours or m.timing is None or m.config is None:
                continue
            kernel, hot = kernels[m.kernel], is_hot(m)
            p = predict(m.problem, kernel, config_of(kernel, m.config), H200, hot=hot, graph=in_graph(m))
            assert p is not None
            bounds = roofline(m.problem, data_sheet_rates(SHEET), gpu=H200, hot=hot)
            found = split(m.timing.median_us, p, SHEET, bounds, clock_mhz=clock_mhz(m))
            assert all(y.share <= 1 for y in found.yardsticks)
            count += 1
    assert count >= 60


def test_explain_splits_a_time_and_a_record() -> None:
    problem = replace(_problem(1024, 16), batch=16, head_dim=128, head_dim_v=128, softmax_scale=128**-0.5)
    said = explain(problem, gpu=H200, measured_us=300.0)
    assert said.losses is not None and said.losses.measured_us == 300.0
    assert "LOSSES" in str(said) and "remainder" in str(said)
    forward = Path(str(next(p for p in shipped.paths() if "forward" in p.name)))
    recorded = warpwave.explain(problem, gpu=H200, record=forward)
    name = "d128 16x1024 h16 bf16"
    ours = [m for _, m in read_records(forward).measurements if m.is_ours and m.timing is not None and m.case == name]
    assert ours[-1].timing is not None and recorded.losses is not None
    assert recorded.losses.measured_us == ours[-1].timing.median_us
    assert "MHz" in recorded.losses.yardsticks[1].note
    with pytest.raises(InvalidInput, match="not both"):
        explain(problem, gpu=H200, record=forward, measured_us=1.0)
    with pytest.raises(InvalidInput, match="no time of ours of this call"):
        explain(_problem(77), gpu=H200, record=forward)


def test_the_command_takes_a_time_and_answers_a_wrong_one_in_a_sentence() -> None:
    call = ["explain", "--gpu", "h200", "--seqlen-q", "1024", "--heads", "16"]
    said = CliRunner().invoke(app, [*call, "--measured-us", "100"])
    assert said.exit_code == 0 and "LOSSES" in said.output and "PREDICTED" in said.output
    assert isinstance(CliRunner().invoke(app, [*call, "--measured-us", "0.1"]).exception, InvalidInput)
    assert CliRunner().invoke(app, ["explain", "--gpu", "h200,l4", "--measured-us", "100"]).exit_code == 2


# Labels ---------------------------------------------------------------------------------------------------------------


def _of(gpu: str = "h200", **changes: Any) -> dict[str, float]:
    """Returns the factors of a call of 16 heads and 4,096 tokens."""
    widths = {"head_dim": 128, "head_dim_v": changes.get("head_dim", 128)}
    prediction = explain(replace(_problem(4096, 16), **(widths | changes)), gpu=gpu).prediction
    assert prediction is not None
    return prediction.factors


def test_rows_of_odd_sizes_are_no_loss_of_the_clocks() -> None:
    odd, even = _of(head_dim=385), _of(head_dim=392)
    assert odd["alignment"] > 5 and even["alignment"] == 1
    assert odd["clocks"] == pytest.approx(even["clocks"], rel=0.1)
    assert aligned_loop("odd rows") == aligned_loop("") == ""
    assert aligned_loop("library library odd") == "library library" and aligned_loop("few rows") == "few rows"


def test_the_reached_bandwidth_is_no_loss_of_the_clocks() -> None:
    decode = _of(batch=64, seqlen_q=1, seqlen_k=8192, num_heads_q=32, num_heads_kv=8)
    assert decode["bandwidth"] > 1.05 and decode["clocks"] == pytest.approx(1)
    assert _of()["bandwidth"] == 1 and _of()["clocks"] > 1.05


def test_operands_of_multiply_adds_are_no_passes_that_wait() -> None:
    single = _of(dtype="float32", precision="ieee")
    assert single["operands"] > 1.5 and single["separate passes"] == pytest.approx(1, abs=0.01)
    assert _of()["operands"] == 1


def test_no_remedy_of_the_fill_is_one_that_a_kernel_has() -> None:
    said = explain(_problem(4096, 16), gpu="h200")
    assert said.kernel == "hopper/flash_fwd" and said.cost is not None and said.cost.blocks < (said.cost.items or 0)
    assert "persistent" not in REMEDIES["fill"], "these blocks are persistent"
    assert "next tile" not in REMEDIES["fill"], "in a grid of fewer tiles than SMs no block has one"
