"""`compare` names the term that moved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from warpwave.workbench.bench.compare import compare, load_run
from warpwave.workbench.bench.comparison_text import comparison_table
from warpwave.workbench.bench.moved import moved
from warpwave.workbench.bench.records import Measurement, read_records
from warpwave.workbench.bench.timing import Samples
from warpwave.workbench.report import shipped

FORWARD = Path(str(next(path for path in shipped.paths() if "forward" in path.name)))
LADDER = Path(__file__).parents[3] / "benchmarks" / "records" / "2026-11-21-h200-ladder.jsonl"
CARD = {"gpu": {"name": "NVIDIA H200"}}


def _measurement(case: str) -> Measurement:
    return next(m for _, m in read_records(FORWARD).measurements if m.case == case and m.is_ours)


def _times(m: Measurement, factor: float) -> Measurement:
    assert m.timing is not None
    timing: Samples = replace(m.timing, samples_us=tuple(t * factor for t in m.timing.samples_us))
    return replace(m, timing=timing)


def test_another_config_moves_the_term_that_it_changes() -> None:
    a = _measurement("d64 16x1024 h32 bf16 causal")
    wide = {"block_m": 192, "block_n": 128, "num_stages": 3, "blocks_per_sm": 1}
    b = replace(_times(a, 1.2), config=wide)
    assert moved(a, b, CARD, CARD).startswith(("hidden pairs", "softmax", "idle SMs", "fill"))


def test_the_same_kernel_and_config_can_move_the_remainder_alone() -> None:
    a = _measurement("d128 4x4096 h16 bf16")
    assert moved(a, a, CARD, CARD) == "no term moved"
    slower = replace(_times(a, 1.1), gpu_after={"sm_mhz": 1600})
    said = moved(a, slower, CARD, CARD)
    assert said.startswith("remainder") and "1600 MHz" in said
    assert moved(a, replace(_times(a, 1.1), gpu_after=a.gpu_after), CARD, CARD).endswith("nothing the model sees")


def test_what_cannot_be_split_has_no_term() -> None:
    a = _measurement("d128 4x4096 h16 bf16")
    peer = next(m for _, m in read_records(FORWARD).measurements if m.is_peer and m.timing is not None)
    assert moved(a, peer, CARD, CARD) == "" and moved(a, a, CARD, {}) == ""
    assert moved(a, _times(a, 0.01), CARD, CARD) == ""  # faster than anything can be


def test_the_table_of_compare_has_the_term() -> None:
    run = load_run(str(LADDER))
    comparison = compare(run, run, ["warpwave flash_fwd", "warpwave tiled"])  # fused, and scores in memory
    slow = next(c for c in comparison.cases if c.case == "d64 1x4096 h16 bf16")
    assert slow.outcome == "SLOWER" and slow.moved.startswith("traffic")
    assert "term that moved" in comparison_table(comparison, 0.02).header
