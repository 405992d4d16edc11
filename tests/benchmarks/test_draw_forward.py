"""The shapes drawn from a commit's hash."""

import tomllib

from benchmarks.draw_forward import LENGTHS, SHAPES, WIDTH, suite
from warpwave.bench.workloads import parse_suite

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
