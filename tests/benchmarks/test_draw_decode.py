"""The calls of few queries drawn from a commit's hash, and the configs that are timed on them."""

import pickle
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.draw_decode import (
    BATCHES,
    KEYS,
    MORE_NAMED,
    MOST_BYTES,
    NAMED,
    QUERIES,
    contenders_of_others,
    named,
    others,
    suite,
)
from benchmarks.drawn import SHAPES, configured, gains, goal_verdict
from tests.conformance.harness import DEVICE
from warpwave.gpu import Gpu
from warpwave.kernels import split_kv
from warpwave.kernels.split_kv.splits import MAX_SPLITS
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.inputs import make_operands
from warpwave.workbench.bench.records import OURS, Measurement, read_records
from warpwave.workbench.bench.timing import Samples
from warpwave.workbench.bench.workloads import Case, parse_suite

A, B = "0" * 40, "f" * 40
H200 = replace(Gpu.for_arch("sm_90"), num_sms=132)


def drawn(seed: str) -> list[AttentionProblem]:
    return [case.problem for case in parse_suite("drawn", tomllib.loads(suite(seed)), source="drawn").cases]


def test_a_hash_draws_one_set_of_calls() -> None:
    assert suite(A) == suite(A) != suite(B)
    problems = drawn(A)
    assert len(problems) == SHAPES
    assert {p.num_heads_q // p.num_heads_kv for p in problems} == {1, 4, 8}
    assert {p.page_size for p in problems} == {0, 16, 64, 128, 256}
    for p in problems:
        assert (
            1 <= p.batch <= BATCHES[1] and KEYS[0] <= p.seqlen_k <= KEYS[1] and p.seqlen_q in range(1, QUERIES[1] + 1)
        )
        assert p.batch * p.seqlen_k * p.num_heads_kv * p.bytes_of_key <= MOST_BYTES
        assert p.causal is None or p.seqlen_q > 1
    assert any(p.causal for p in problems) and any(p.batch * p.num_heads_kv > 264 for p in problems)


def test_named_calls_are_a_suite() -> None:
    cases = parse_suite("named", tomllib.loads(named(A)), source="named").cases
    assert [(c.problem.batch, c.problem.seqlen_k, c.problem.page_size) for c in cases] == [
        (batch, keys, page_size) for batch, _, keys, _, _, page_size in NAMED
    ] + [(call["batch"], call["seqlen_k"], call.get("page_size", 0)) for call in MORE_NAMED]


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120"])
def test_tiles_of_other_cards_load_by_pointers(arch: str) -> None:
    gpu = replace(Gpu.for_arch(arch), num_sms=132)
    for case in parse_suite("named", tomllib.loads(named(A)), source="named").cases:
        found = others(case.problem, gpu).values()
        assert len({config.block_n for config in found}) > 1 and len({config.num_warps for config in found}) == 2
        assert not any(config.by_map or config.roles for config in found)


def test_other_configs_fit_and_differ_from_the_default() -> None:
    ways = set()
    for problem in drawn(A) + drawn(B):
        found = others(problem, H200)
        assert split_kv.default(problem, H200) not in found.values() and len(set(found.values())) == len(found) > 0
        for config in found.values():
            assert split_kv.smem_bytes(problem, H200, config) <= H200.smem_per_block_bytes
            assert config.num_splits <= MAX_SPLITS and config.block_m == split_kv.default(problem, H200).block_m
            ways.add((config.roles, config.by_map))
    assert ways == {(True, True), (False, True), (False, False)}


@pytest.mark.parametrize("page_size", [0, 16])
def test_a_config_runs_by_the_public_call(page_size: int) -> None:
    problem = AttentionProblem(
        batch=1, seqlen_q=2, seqlen_k=40, num_heads_q=2, num_heads_kv=1, head_dim=16, head_dim_v=16, dtype="float16",
        softmax_scale=0.25, page_size=page_size,
    )  # fmt: skip
    operands = make_operands(problem, DEVICE)
    prepared = configured("split_kv", split_kv.Config(16, 32, 4, 2, num_splits=2), problem, operands)
    assert prepared.config is not None and prepared.config["num_splits"] == 2
    assert torch.isfinite(prepared.to_out(prepared.call())).all()


def test_contenders_can_be_sent_to_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.draw_decode.current_gpu", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = contenders_of_others(Case("call", drawn(A)[0], None))
    assert found and set(pickle.loads(pickle.dumps(dict(found)))) == set(found)
    assert all(name.startswith(f"{OURS}split_kv ") for name in found)


def test_losses_and_gains_are_named() -> None:
    records = Path(__file__).parents[2] / "benchmarks/records/2026-11-22-h200-decode.jsonl"
    measured = [m for _, m in read_records(records).measurements if m.contender != f"{OURS}split_kv"]
    said = goal_verdict(measured)
    assert "of the best peer in the geometric mean of" in said
    slow = [replace(m, timing=slowed(m.timing, 2.0)) if m.is_ours and m.timing else m for m in measured]
    assert "missed" in goal_verdict(slow) and len(goal_verdict(slow).splitlines()) > len(said.splitlines())
    assert goal_verdict([m for m in measured if m.is_ours]).startswith("no comparison")
    auto = [m for m in measured if m.contender == f"{OURS}auto" and m.timing is not None]
    faster = [faster_than(m, factor) for m, factor in zip(auto, (0.9, 0.99), strict=False)]
    first, second, *_ = gains([*auto, *faster])
    assert first.endswith("split_kv other 1.111") and second.endswith("no config gains 3 %")


def faster_than(m: Measurement, factor: float) -> Measurement:
    assert m.timing is not None
    return replace(m, contender=f"{OURS}split_kv other", timing=slowed(m.timing, factor))


def slowed(timing: Samples, factor: float) -> Samples:
    return replace(timing, samples_us=tuple(factor * x for x in timing.samples_us))
