"""The shapes drawn from a commit's hash, the calls that lost before, and the configs that are timed on them."""

import argparse
import pickle
import sys
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import draw_forward, drawn
from benchmarks.draw_forward import (
    ANY_SHAPES,
    HEAD_DIMS,
    LENGTHS,
    MOST_HEADS,
    PAIRS,
    WIDTH,
    any_head_dim,
    config,
    contenders_of,
    mean_over_best_peer,
    named,
    suite,
    verdict,
)
from benchmarks.drawn import SHAPES
from tests.benchmarks.test_draw_decode import slowed
from warpwave.kernels.hopper import flash_fwd
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.records import Measurement, read_records
from warpwave.workbench.bench.workloads import Case, parse_suite

A, B = "0" * 40, "f" * 40


def test_a_hash_draws_one_set_of_shapes() -> None:
    assert suite(A) == suite(A)
    assert suite(A) != suite(B)


def test_the_shapes_are_a_suite() -> None:
    shapes = parse_suite("drawn", tomllib.loads(suite(A)), source="drawn")
    assert len(shapes.cases) == SHAPES
    problems = [case.problem for case in shapes.cases]
    assert {p.head_dim for p in problems} == {64, 128, 256}
    assert {p.causal is None for p in problems} == {True, False}
    assert all(LENGTHS[0] <= p.seqlen_q <= LENGTHS[1] + 63 for p in problems)
    assert any(p.seqlen_q % 64 for p in problems) and any(p.seqlen_q % 64 == 0 for p in problems)
    assert all(WIDTH[0] <= p.num_heads_q * p.head_dim <= WIDTH[1] for p in problems)


def problems(text: str) -> list[AttentionProblem]:
    return [case.problem for case in parse_suite("drawn", tomllib.loads(text), source="drawn").cases]


def test_shapes_of_any_head_dim_are_of_every_kind() -> None:
    assert any_head_dim(A) == any_head_dim(A) != any_head_dim(B)
    found = problems(any_head_dim(A)) + problems(any_head_dim(B))
    assert len(found) == 2 * ANY_SHAPES
    assert {(p.head_dim, p.head_dim_v) for p in found if p.head_dim != p.head_dim_v} == set(PAIRS)
    alike = {p.head_dim for p in found if p.head_dim == p.head_dim_v}
    assert alike <= set(HEAD_DIMS) and len(alike) > 24 and len(HEAD_DIMS) == 32
    assert {p.num_heads_q // p.num_heads_kv for p in found} == {1, 2, 4, 8}
    assert all(p.num_heads_q <= MOST_HEADS for p in found)
    chunks = [p for p in found if p.seqlen_q < p.seqlen_k]
    assert len(found) / 6 < len(chunks) < len(found) / 2 and {p.causal is None for p in chunks} == {True, False}
    assert any(p.seqlen_k % 64 for p in found) and any(p.batch > 8 for p in found)


def test_named_calls_are_those_that_lost() -> None:
    found = problems(named(A))
    assert len(found) == 39
    assert {48, 80, 96, 112, 160, 176} <= {p.head_dim for p in found}
    assert {p.head_dim for p in found if p.softcap} == {64, 128, 256} == {
        p.head_dim for p in found if p.window_size == (1023, 0) and p.seqlen_k == 16384
    }  # fmt: skip
    sizes = {(p.batch, p.seqlen_q, p.seqlen_k) for p in found}
    assert {(200, 1, 777), (2, 512, 12288), (32, 700, 700), (1, 1024, 1024)} <= sizes
    assert any((p.head_dim, p.head_dim_v, p.causal is not None) == (192, 128, True) for p in found)


def test_configs_are_contenders_that_can_be_sent_to_other_processes() -> None:
    found = contenders_of([config("128,64,2"), config("64,64,3,3")], Case("call", problems(named(A))[0], None))
    assert len(pickle.loads(pickle.dumps(dict(found)))) == 2
    assert all(name.startswith("warpwave hopper/flash_fwd Config(block_m=") for name in found)
    assert config("192,64,4") == flash_fwd.Config(192, 64, 4)
    for wrong in ("100,64,2", "128", "a,b,c"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no config of hopper/flash_fwd"):
            config(wrong)


def test_the_command_times_the_calls_that_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def timed(*given: Any) -> list[Measurement]:
        asked.append(given)
        return []

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(draw_forward, "timed", timed)
    out, record = str(tmp_path / "calls.toml"), str(tmp_path / "record.jsonl")
    given = ["draw_forward", out, "--seed", A, "--named", "--only", "d160", "--time", record, "--config", "128,128,2"]
    monkeypatch.setattr(sys, "argv", given)
    assert draw_forward.main() == 0
    ((name, cases, path, rounds, _, more),) = asked
    assert (name, str(path), rounds) == ("named forward", record, 6)
    assert len(cases) == 4 and all(case.problem.head_dim == 160 for case in cases)
    assert len(more(cases[0])) == 1
    monkeypatch.setattr(sys, "argv", [*given[:6], "no such call"])
    with pytest.raises(SystemExit):
        draw_forward.main()


def test_each_call_is_timed_with_its_configs_in_the_rounds_of_its_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measured(case: Case, suite: str, contenders: dict[str, Any], settings: Any) -> list[Measurement]:
        asked.append((case.name, suite, list(contenders), settings.rounds, settings.host))
        return []

    monkeypatch.setattr(drawn, "measure", measured)
    monkeypatch.setattr(drawn, "_compile", lambda *given: None)
    monkeypatch.setattr(drawn.environment, "describe", lambda device: {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    cases = parse_suite("named", tomllib.loads(named(A)), source="named").cases[:2]
    more = partial(contenders_of, (config("128,64,2"),))
    assert drawn.timed("named forward", cases, tmp_path / "record.jsonl", 3, ("sdpa_cudnn",), more) == []
    names = ["warpwave auto", f"warpwave hopper/flash_fwd {config('128,64,2')}", "sdpa_cudnn"]
    assert asked == [(case.name, "named forward", names, 3, False) for case in cases]


def test_calls_for_which_a_peer_compiles_other_code_are_told_apart() -> None:
    plain = problems(suite(A))[0]
    changes: tuple[dict[str, Any], ...] = (
        {"seqlen_k": 65}, {"head_dim_v": 8}, {"softcap": 30.0}, {"window_size": (9, 0)},
    )  # fmt: skip
    others = [replace(plain, **change) for change in changes]
    alike = [drawn._kind_of_code(other) == drawn._kind_of_code(plain) for other in others]
    assert alike == [True, False, False, False]


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
