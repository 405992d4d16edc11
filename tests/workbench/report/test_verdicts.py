"""The word and the sentence of a case say what its interval supports, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workbench.report.samples import CPU, H200, RIGHT, WRONG, measurement, pair, problem, samples, source
from warpwave.workbench.bench.goals import Goal
from warpwave.workbench.bench.records import Measurement
from warpwave.workbench.hardware import measure
from warpwave.workbench.hardware.measure import Ceilings
from warpwave.workbench.report.bounds import rates_of
from warpwave.workbench.report.machines import machines
from warpwave.workbench.report.verdicts import CaseResult, case_results, how_fast, is_it_right, what_bounds_it


def results(measurements: list[Measurement], **options: Any) -> list[CaseResult]:
    (machine,) = machines([source(measurements, **options)])
    return case_results(machine, rates_of(machine).rates)


def only(measurements: list[Measurement], **options: Any) -> CaseResult:
    (result,) = results(measurements, **options)
    return result


@pytest.mark.parametrize(
    ("ours_us", "word"), [(400.0, "FASTER"), (500.0, "SAME"), (505.0, "SAME"), (495.0, "SAME"), (625.0, "SLOWER")]
)
def test_the_word_follows_the_interval(ours_us: float, word: str) -> None:
    result = only(pair(ours_us, 500.0))
    assert result.word == word
    assert f"{500 / ours_us:.2f}" in result.sentence


def test_an_interval_on_both_sides_of_one_is_unclear() -> None:
    ours = measurement(timing=samples(500.0, spread=0.05))
    theirs = measurement("sdpa_cudnn", timing=samples(500.0, spread=-0.05))
    assert only([ours, theirs]).word == "UNCLEAR"


def test_one_round_has_a_ratio_and_no_interval() -> None:
    result = only([measurement(timing=samples(400.0, rounds=1)), measurement("sdpa", timing=samples(500.0, rounds=1))])
    assert result.word == "UNCLEAR"
    assert "1.25 times" in result.sentence
    assert "too few rounds" in result.sentence
    assert "[" not in result.sentence


def test_the_best_peer_is_the_fastest_accurate_one() -> None:
    inaccurate = measurement("sloppy", 300.0, verdict=WRONG)
    result = only([*pair(400.0, 500.0), inaccurate, measurement("slow_peer", 900.0)])
    assert result.best is not None
    assert result.best.contender == "sdpa_cudnn"
    assert result.word == "FASTER"
    assert "sloppy" in " ".join(is_it_right([result]))


def test_auto_is_judged_before_a_faster_kernel_asked_for_by_name() -> None:
    result = only([measurement("warpwave tiled", 100.0, kernel="tiled"), *pair(400.0, 500.0)])
    assert result.ours is not None
    assert result.ours.contender == "warpwave auto"


def test_refused_and_wrong_contenders_are_told() -> None:
    refused = measurement(us=None, verdict=None, refusal="head_dim 1024 is above 256", kernel="")
    wrong = measurement("warpwave auto", None, verdict=WRONG, refusal="wrong, so not timed", case="another")
    first, second = results([refused, wrong])
    assert first.word == second.word == "NOT TIMED"
    assert "head_dim 1024 is above 256" in first.sentence
    assert is_it_right([first, second])[0].startswith("1 result of ours wrong")
    assert "No time of ours in 2 cases." in how_fast([first, second])


def test_without_a_peer_or_without_ours() -> None:
    alone, theirs = results([measurement(), measurement("sdpa_cudnn", 500.0, case="theirs")])
    assert alone.word == "NO PEER"
    assert "no peer was timed" in alone.sentence
    assert theirs.word == "NOT TIMED"
    assert "sdpa_cudnn" in theirs.sentence


def test_rounds_that_do_not_pair_are_not_compared() -> None:
    result = only([measurement(timing=samples(400.0, rounds=9)), measurement("sdpa", timing=samples(500.0, rounds=7))])
    assert result.ratio is None
    assert result.word == "UNCLEAR"
    assert "do not pair" in result.sentence


def test_modes_and_runs_are_cases_of_their_own() -> None:
    found = results([*pair(), *pair(mode="graph"), *pair(suite="another")])
    assert len(found) == 3
    assert len({case.name for case in found}) == 3


def test_a_yardstick_is_no_peer() -> None:
    result = only([measurement(us=3.0), measurement("yardstick empty_kernel", 2.0, verdict=None)])
    assert result.word == "NO PEER"


def test_a_goal_is_held_against() -> None:
    met, missed = results(
        pair(400.0, 500.0, goal=Goal(ratio=1.02)) + pair(600.0, 500.0, goal=Goal(ratio=1.02), case="b")
    )
    assert met.sentence.endswith("Goal 1.02 x: met.")
    assert missed.sentence.endswith("Goal 1.02 x: missed.")


def test_the_bound_comes_from_the_data_sheet() -> None:
    result = only(pair(612.3))
    # 4 x 16 heads x (4096 x 4097 / 2) visible pairs x 2 x (128 + 128) FLOP, by 989 dense TFLOP/s of bfloat16.
    bound_us = problem().flops / 989e6
    assert f"{bound_us / 612.3 * 100:.0f}\u202f% of the speed that the tensor cores allow" in result.sentence
    assert what_bounds_it([result])[0] == "The tensor cores."


def test_a_machine_without_data_sheet_says_so() -> None:
    (machine,) = machines([source(pair(), CPU)])
    known = rates_of(machine)
    assert known.rates == ()
    assert "no data sheet for a CPU" in known.notes[0]
    assert "roof" in known.notes[1]
    assert "allow" not in only(pair(), environment=CPU).sentence


def test_losses_are_in_the_first_screen() -> None:
    text = " ".join(how_fast(results(pair(400.0, 500.0) + pair(1000.0, 500.0, case="the bad one"))))
    assert "worst 0.50 (the bad one)" in text
    assert "slower in 1" in text.lower()


def test_the_error_is_in_units_of_the_rounding_model() -> None:
    assert RIGHT.error_ratio == pytest.approx(1.07)
    assert "at most 1.07 times" in " ".join(is_it_right(results(pair())))


def test_a_measured_ceiling_that_a_call_passes_is_raised_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Ceilings(
        gpu="a CPU", arch="cpu", date="2026-01-01T00:00:00", product_tflops={"float32": 0.001}, environment=CPU
    )
    monkeypatch.setattr(measure, "load", lambda gpu: slow)
    (machine,) = machines([source(pair(400.0, 500.0) + pair(900.0, 800.0, case="slower"), CPU)])
    known = rates_of(machine)
    reached = problem().flops / 400e6  # TFLOP/s of the fastest call: what was 0.001 is that now, and no share is cut
    assert known.rates[0].product_tflops["float32"] == pytest.approx(reached)
    first, second = case_results(machine, known.rates)
    assert "100\u202f% of the speed that the products allow" in first.sentence
    assert f"{400 / 900 * 100:.0f}\u202f% of the speed that the products allow" in second.sentence
    (said,) = known.passed
    assert "measured 2026-01-01: 0.001000 TFLOP/s" in said
    assert "flash_fwd" in said
    assert 'in "d128 4x4096 causal"' in said


def test_what_the_data_sheet_does_not_allow_has_no_share() -> None:
    least = problem().flops / 989e6
    (machine,) = machines([source(pair(least / 1.5, 2 * least))])
    known = rates_of(machine)
    result = case_results(machine, known.rates)[0]
    assert "allow" not in result.sentence
    text = " ".join([*what_bounds_it([result]), *known.passed])
    assert "where the data sheet allows" in text
    assert "It has no share" in text
    assert "150" not in text


def test_an_inaccurate_contender_raises_no_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings = Ceilings(
        gpu="NVIDIA H200", arch="sm_90", date="2026-01-01", product_tflops={"bfloat16": 500.0}, environment=H200
    )
    monkeypatch.setattr(measure, "load", lambda gpu: ceilings)
    sloppy = measurement("sloppy", problem().flops / 800e6, verdict=WRONG)
    (machine,) = machines([source([*pair(1000.0, 1200.0), sloppy])])
    known = rates_of(machine)
    assert known.rates[1].product_tflops["bfloat16"] == 500.0
    assert known.passed == ()


def test_another_cpus_ceilings_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    other = CPU | {"cpu": CPU["cpu"] | {"model": "another processor"}}
    ceilings = Ceilings(gpu="x", arch="cpu", date="2026-01-01", product_tflops={"float32": 9.0}, environment=other)
    monkeypatch.setattr(measure, "load", lambda gpu: ceilings)
    (machine,) = machines([source(pair(), CPU)])
    assert rates_of(machine).rates == ()


def test_the_launch_bounds_what_is_smaller_than_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings = Ceilings(
        gpu="NVIDIA H200", arch="sm_90", date="2026-01-01", copy_gbps=4200.0, launch_us=1.7, environment=H200
    )
    monkeypatch.setattr(measure, "load", lambda gpu: ceilings)
    tiny = pair(3.4, 5.0, problem=problem(batch=1, seqlen_q=64, seqlen_k=64, num_heads_q=1, num_heads_kv=1))
    assert "50\u202f% of the speed that the launch allows" in only(tiny).sentence
    assert "the tensor cores allow" in only(pair()).sentence
