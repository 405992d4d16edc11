"""Tables that nobody wrote a rule for: causes planted by a simulator, and times that our own model predicts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.workbench.diagnose.generated import NAMES, Planted, table
from warpwave.kernels import flash_fwd
from warpwave.problem import AttentionProblem
from warpwave.workbench.diagnose.parse import Document, parse
from warpwave.workbench.diagnose.rules import diagnose, main_cause
from warpwave.workbench.hardware.catalog import catalog, gpu_of
from warpwave.workbench.model.predict import predict

SURE = [(cause, seed) for cause in NAMES for seed in range(2)]


def _is_named_first(planted: Planted) -> bool:
    found = main_cause(planted.document, "theirs")
    return found is not None and found.kind in NAMES[planted.cause]


def _contradicted(planted: Planted) -> list[str]:
    """Returns the findings that the simulator knows to be false."""
    false = []
    for finding in diagnose(planted.document):
        shares = [float(share) for share in re.findall(r"at ([\d.]+)%", finding.text)]
        if (
            finding.kind == "contradiction"
            or (finding.is_cause and any(share > 105 for share in shares))
            or (finding.is_cause and finding.kind == "waves" and planted.resident > 1)
            or (finding.is_cause and finding.kind == "idle SMs" and planted.cause in ("launch", "latency loop"))
        ):
            false.append(f"{planted.document.title}: {finding.kind}: {finding.text}")
    return false


@pytest.mark.parametrize(("cause", "seed"), SURE)
def test_a_planted_cause_is_named_first(cause: str, seed: int) -> None:
    planted = table(cause, seed)
    assert _is_named_first(planted), [(f.kind, f.factor, f.text) for f in diagnose(planted.document) if f.is_cause]
    assert not _contradicted(planted)


@pytest.mark.parametrize("seeds", [5, pytest.param(100, marks=pytest.mark.full)])
def test_nine_in_ten_planted_causes_are_named_first_and_no_table_contradicts_its_causes(seeds: int) -> None:
    drawn = [table(cause, seed) for cause in NAMES for seed in range(seeds)]
    assert [false for planted in drawn for false in _contradicted(planted)] == []
    missed = [planted.document.title for planted in drawn if not _is_named_first(planted)]
    assert len(missed) <= 0.1 * len(drawn), missed
    for cause in NAMES:  # no cause may be missed as a rule while the others make up for it
        assert sum(title.startswith(cause) for title in missed) <= 0.2 * seeds, missed


def _predicted(card: str, heads: int, lengths: list[int], config: flash_fwd.Config) -> Document:
    """A table of what the model says of flash_fwd, as somebody who measured it would write it down."""
    sheet = catalog()[card]
    gpu = gpu_of(sheet)
    rows = []
    for seqlen in lengths:
        problem = AttentionProblem(
            batch=1, seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=heads, num_heads_kv=heads, head_dim=64,
            head_dim_v=64, dtype="bfloat16", softmax_scale=0.125,
        )  # fmt: skip
        prediction = predict(problem, flash_fwd, config, gpu)
        assert prediction is not None
        rows.append([seqlen, prediction.time_us])
    kernel = {"block_m": config.block_m, "block_n": config.block_n, "unit": "matrix", "threads": 32 * config.num_warps}
    data: dict[str, Any] = {
        "title": "predicted",
        "gpu": card,
        "call": {"heads": heads, "head_dim": 64, "dtype": "bfloat16"},
        "kernels": {"theirs": kernel},
        "tables": [{"name": "seqlen", "columns": ["seqlen", "time_us"], "rows": rows}],
    }
    return parse(data, source="predicted")


@pytest.mark.parametrize("card", ["a100-80gb", "h100", "h200", "b200"])
def test_what_our_model_predicts_of_few_blocks_is_found_to_be_idle_sms(card: str) -> None:
    document = _predicted(card, 1, [256, 512, 1024], flash_fwd.Config(128, 64, 8, 2))
    found = main_cause(document, "theirs")
    assert found is not None and found.kind == "idle SMs"
    assert found.factor == pytest.approx(catalog()[card].num_sms / 8)  # 1024 / 128 blocks


@pytest.mark.parametrize("card", ["a100-80gb", "h100", "h200"])
def test_what_our_model_predicts_of_a_full_card_is_not_idle(card: str) -> None:
    document = _predicted(card, 64, [2048, 4096, 8192], flash_fwd.Config(64, 64, 4, 3))
    kinds = {f.kind for f in diagnose(document) if f.is_cause}
    assert "idle SMs" not in kinds and "launch" not in kinds
    assert kinds & {"arithmetic", "latency"}
