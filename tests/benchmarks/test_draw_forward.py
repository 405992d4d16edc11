"""The shapes drawn from a commit's hash."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.draw_forward import LENGTHS, SHAPES, WIDTH, mean_over_best_peer, suite, verdict
from warpwave.workbench.bench.records import read_records
from warpwave.workbench.bench.timing import Samples
from warpwave.workbench.bench.workloads import parse_suite

A, B = "0" * 40, "f" * 40


def test_a_hash_draws_one_set_of_shapes() -> None:
    assert suite(A) == suite(A)
    assert suite(A) != suite(B)


def test_the_shapes_are_a_suite() -> None:
    drawn = parse_suite("drawn", tomllib.loads(suite(A)), source="drawn")
    assert len(drawn.cases) == SHAPES
    problems = [case.problem for case in drawn.cases]
    assert {p.head_dim for p in problems} == {64, 128, 256}
    assert {p.causal is None for p in problems} == {True, False}
    assert all(LENGTHS[0] <= p.seqlen_q <= LENGTHS[1] + 63 for p in problems)
    assert any(p.seqlen_q % 64 for p in problems) and any(p.seqlen_q % 64 == 0 for p in problems)
    assert all(WIDTH[0] <= p.num_heads_q * p.head_dim <= WIDTH[1] for p in problems)


def test_drawn_shapes_are_held_against_the_table() -> None:
    records = sorted(Path(__file__).parents[2].glob("benchmarks/records/*-forward*.jsonl"))
    table = [m for _, m in read_records(records[-1]).measurements]
    mean = mean_over_best_peer(table)
    assert mean is not None
    assert verdict(table, table).endswith(f"{mean:.3f} of the best peer in the geometric mean: within 5 %")
    slower = [replace(m, timing=m.timing and slowed(m.timing, 1.06 if m.is_ours else 1.0)) for m in table]
    assert "not within 5 %" in verdict(slower, table)
    assert mean_over_best_peer(slower) == pytest.approx(mean / 1.06)
    assert verdict([m for m in table if m.is_ours], table).startswith("no comparison")


def slowed(timing: Samples, factor: float) -> Samples:
    return replace(timing, samples_us=tuple(factor * x for x in timing.samples_us))
