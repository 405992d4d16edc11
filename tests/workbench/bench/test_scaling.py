"""Scaling experiments: planted causes are told apart, the model's own times too, and the command runs on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from warpwave.kernels import flash_fwd
from warpwave.workbench.bench.correctness import Verdict
from warpwave.workbench.bench.records import Measurement, read_records
from warpwave.workbench.bench.run import main
from warpwave.workbench.bench.scaling import AXES, CAUSES, Point, judge, points, suite, table
from warpwave.workbench.bench.timing import Samples
from warpwave.workbench.cli import app
from warpwave.workbench.hardware.catalog import catalog, resolve
from warpwave.workbench.model.predict import predict
from warpwave.workbench.model.roofline import data_sheet_rates

SHEET = catalog()["h200"]
RATES, SMS, PEAK = data_sheet_rates(SHEET), SHEET.num_sms, SHEET.peak_tflops["bfloat16"]
LAUNCH_US = 2.5
Formula = Callable[[float, float, int], float]  # of FLOP, bytes and blocks


def _points(axis: str, time: Formula) -> list[Point]:
    """Points of a real experiment's problems, their times by a formula of (flops, bytes, blocks)."""
    found = []
    for case in suite(axis, on_cpu=False, num_sms=SMS).cases:
        p = case.problem
        size = {"blocks": p.num_heads_q, "seqlen": p.seqlen_q, "head_dim": p.head_dim, "batch": p.batch}[axis]
        count = p.batch * p.num_heads_q * -(-p.seqlen_q // 64)
        us = time(p.flops, p.compulsory_bytes, count)
        found.append(Point(size, us, p.flops, p.compulsory_bytes, count))
    return found


def _arithmetic(flops: float, size: float, count: int) -> float:
    return LAUNCH_US + flops / (PEAK * 0.7e6)


def _bandwidth(flops: float, size: float, count: int) -> float:
    return LAUNCH_US + size / (SHEET.bandwidth_gbps * 0.8e3)


def _latency(flops: float, size: float, count: int) -> float:
    return LAUNCH_US + flops / (PEAK * 0.02e6)


def _waves(flops: float, size: float, count: int) -> float:
    return LAUNCH_US + 40.0 * -(-count // SMS)


def _constant(flops: float, size: float, count: int) -> float:
    return 12.0 + 1e-9 * flops / PEAK


@pytest.mark.parametrize("axis", ["seqlen", "batch", "head_dim"])
@pytest.mark.parametrize(("formula", "cause"), [(_arithmetic, "arithmetic"), (_latency, "latency")])
def test_what_grows_with_the_work_is_told_apart_by_its_rate(axis: str, formula: Formula, cause: str) -> None:
    points = [
        replace(p, flops=p.flops * 100, bytes=p.bytes) for p in _points(axis, lambda f, b, c: formula(f * 100, b, c))
    ]
    found = judge(axis, "planted", points, rates=RATES, peak_tflops=PEAK, num_sms=0)
    assert found is not None and found.end_cause == cause, found


def test_bytes_are_told_from_products() -> None:
    points = [replace(p, bytes=p.bytes * 1000) for p in _points("seqlen", lambda f, b, c: _bandwidth(f, b * 1000, c))]
    found = judge("seqlen", "planted", points, rates=RATES, peak_tflops=PEAK, num_sms=SMS)
    assert found is not None and found.end_cause == "bandwidth"
    assert found.law.exponent == pytest.approx(1.0, abs=0.1) and found.of_flops == pytest.approx(2.0, abs=0.01)


def test_idle_sms_are_seen_as_a_flat_part_that_ends_at_their_number() -> None:
    found = judge("blocks", "planted", _points("blocks", _waves), rates=RATES, peak_tflops=PEAK, num_sms=SMS)
    assert found is not None and found.begin_cause == "idle SMs"
    assert found.turn == 128  # the last size of no more than 132 blocks
    below = [s for s, p in zip(found.steps, found.points, strict=False) if 2 * p.blocks <= SMS]
    assert all(abs(step) < 0.01 for step in below)


def test_a_constant_is_a_launch_and_not_idle_sms() -> None:
    points = [replace(p, blocks=1000) for p in _points("seqlen", _constant)]
    found = judge("seqlen", "planted", points, rates=RATES, peak_tflops=PEAK, num_sms=SMS)
    assert found is not None and found.end_cause == "launch" and found.turn is None
    assert "fixed cost" in found.sentence


def test_without_any_rate_the_growth_is_stated_and_the_cause_is_undecided() -> None:
    square = judge("seqlen", "planted", _points("seqlen", lambda f, b, c: f * 1e-6))
    straight = judge("seqlen", "planted", _points("seqlen", lambda f, b, c: b * 1e-3))
    assert square is not None and straight is not None
    assert (square.end_cause, straight.end_cause) == ("undecided", "undecided")
    assert "of the work" in square.why and "of the bytes" in straight.why
    assert "warpwave roof" in square.why and "undecided" in square.sentence


def test_one_noisy_step_decides_nothing() -> None:
    # Times of a CPU: 0.3 GB/s and 0.07 TFLOP/s, with a last step that grows like the bytes.
    times = {64: 140.0, 128: 185.0, 256: 573.0, 512: 3500.0, 1024: 7000.0}
    points = [Point(n, us, 512.0 * n**2, 2048.0 * n, spread=None) for n, us in times.items()]
    found = judge("seqlen", "noisy", points)
    assert found is not None and found.end_cause == "undecided" and found.turn is None
    # Steps that disagree are no law, so the sentence is about the last size alone.
    assert "Throughout" not in found.sentence and "At 1024" in found.sentence


@pytest.mark.parametrize(
    ("formula", "cause"),
    [(_latency, "latency"), (lambda f, b, c: 5000.0, "launch"), (lambda f, b, c: (f * 1e-6) ** 1.5, "cache")],
)
def test_a_cause_that_only_the_growth_shows_needs_times_with_intervals(formula: Formula, cause: str) -> None:
    points = _points("seqlen", formula)
    causes = []
    for spread in (0.01, 0.5, None):
        found = judge("seqlen", "x", [replace(p, spread=spread) for p in points], rates=RATES, peak_tflops=PEAK)
        assert found is not None
        causes.append(found.end_cause)
    assert causes == [cause, "undecided", "undecided"]


def test_points_have_the_spread_of_their_samples() -> None:
    problem = suite("batch", on_cpu=True).cases[0].problem
    verdict = Verdict(True, "", 0.0, 0.0, 0.0, 0.0, 1)
    spreads = []
    for samples in ((10.0, 12.0), (9.0, 9.5, 10.0, 10.0, 10.5, 11.0)):
        timing = Samples(samples, "events", 1, 1, False)
        m = Measurement(suite="s", case="c", problem=problem, contender="warpwave auto", timing=timing, verdict=verdict)
        spreads.append(points("batch", [m])["warpwave auto"][0].spread)
    assert spreads == [None, pytest.approx(0.1)]  # two rounds have no interval; six have all their range


@pytest.mark.parametrize("axis", AXES)
def test_times_of_the_model_are_diagnosed_as_the_model_loses_them(axis: str) -> None:
    gpu, points = resolve("h200"), []
    for case in suite(axis, on_cpu=False, num_sms=SMS).cases:
        p = case.problem
        config = flash_fwd.configs(p, gpu)[0]
        predicted = predict(p, flash_fwd, config, gpu)
        assert predicted is not None
        size = {"blocks": p.num_heads_q, "seqlen": p.seqlen_q, "head_dim": p.head_dim, "batch": p.batch}[axis]
        count = flash_fwd.cost(p, gpu, config).blocks
        points.append(Point(size, predicted.time_us, p.flops, p.compulsory_bytes, count))
    found = judge(axis, "flash_fwd", points, rates=RATES, peak_tflops=PEAK, num_sms=SMS)
    assert found is not None
    if axis == "blocks":
        assert found.begin_cause == "idle SMs" and found.turn is not None and found.turn >= SMS / 2
    if axis in ("seqlen", "batch"):
        assert found.end_cause in ("arithmetic", "latency") and found.law.exponent > 0.4
    assert found.end_cause in CAUSES and found.sentence.startswith("flash_fwd: time grows with")
    assert table([found]).rows


def test_growth_beyond_the_work_is_a_cache_that_no_longer_holds() -> None:
    points = [replace(p, time_us=(p.size / 128) ** 3) for p in _points("seqlen", _arithmetic)]
    found = judge("seqlen", "planted", points)
    assert found is not None and found.end_cause == "cache" and "more than the work" in found.sentence


def test_a_law_is_of_one_kernel_and_behind_the_flat_part() -> None:
    times = {64: 2.0, 128: 2.1, 256: 9.7, 512: 6.5, 1024: 12.0, 2048: 48.0, 4096: 192.0}
    ran = {256: "split_kv", 1024: "hopper/flash_fwd", 2048: "hopper/flash_fwd", 4096: "hopper/flash_fwd"}
    points = [
        Point(size, us, 1e5 * size**2, 1e3 * size, kernel=ran.get(size, "flash_fwd")) for size, us in times.items()
    ]
    found = judge("seqlen", "auto", points, rates=RATES, peak_tflops=PEAK, num_sms=SMS)
    assert found is not None and found.since == 1024 and found.law.exponent == pytest.approx(2.0)
    assert "seqlen^2.00 +- 0.00 from 1024 on" in found.sentence
    assert "It ran flash_fwd at 64 to 128, split_kv at 256, flash_fwd at 512, hopper/flash_fwd at 1024 to 4096." in (
        found.sentence
    )


def test_bytes_that_lie_in_l2_are_held_against_l2() -> None:
    per_us = 0.5 * SHEET.bandwidth_gbps * 1e3
    points = [Point(n, 1 + n * 1e6 / per_us, n * 1e6, n * 1e6, hot=True) for n in (1, 2, 4, 8, 16, 32)]
    within = judge("blocks", "x", points, rates=RATES, peak_tflops=PEAK)
    beyond = judge("blocks", "x", [replace(p, hot=False) for p in points], rates=RATES, peak_tflops=PEAK)
    assert within is not None and beyond is not None
    assert beyond.end_cause == "bandwidth" and within.end_cause != "bandwidth" and "out of L2" in within.why


def test_fewer_than_three_sizes_say_nothing() -> None:
    assert judge("seqlen", "x", [Point(1, 1, 1, 1), Point(2, 2, 2, 2)]) is None
    with pytest.raises(ValueError, match="axis must be"):
        suite("width", on_cpu=True)


def test_the_command_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "scale.jsonl"
    code = main(None, out=out, rounds=1, peers=("none",), kernels=("auto",), device="cpu", scale="head_dim")
    said = capsys.readouterr().out
    assert code == 0 and "time as head_dim grows" in said and "time grows with head_dim^" in said
    assert len(read_records(out).measurements) == 5
    code = main(None, out=None, rounds=1, peers=("none",), device="cpu", scale="batch", json_output=True)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0 and last["kind"] == "scaling" and last["axis"] == "batch"


@pytest.mark.parametrize(
    "arguments", [["bench"], ["bench", "quick", "--scale", "seqlen"], ["bench", "--scale", "width"]]
)
def test_a_request_that_makes_no_sense_is_a_sentence(arguments: list[str]) -> None:
    said = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert said.exit_code == 2
