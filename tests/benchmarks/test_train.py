"""benchmarks/train.py: its ratios, its curves and its peers, with a small model on a CPU in place of the clock's."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import warpwave
from benchmarks import train, train_figure

TIMES = {"warpwave": [2.0, 4.0, 2.0], "sdpa": [3.0, 8.0, 4.0], "none": [1.0, 1.0, 1.0], "flash_attention_4": [1.0] * 3}


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> train.Study:
    """With a `flash_attn.cute` that is ours, and without a GPU's clock and memory."""
    cute: Any = types.ModuleType("flash_attn.cute")
    cute.flash_attn_func = lambda q, k, v, causal: (warpwave.attention(q, k, v, causal=causal), None)
    cute.flash_attn_varlen_func = warpwave.attention_varlen
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)

    def paired(steps: dict[str, Callable[[], Any]], rounds: int, budget_ms: float) -> dict[str, list[float]]:
        for step in steps.values():
            assert step().isfinite()
        return {name: TIMES[name] for name in steps}

    monkeypatch.setattr(train, "paired", paired)
    monkeypatch.setattr(train.Study, "_peak_mib", lambda self, step: 0.0)
    return train.Study(60.0, 3, train.example.SMALL, torch.device("cpu"))


@pytest.mark.parametrize("batches", ["packed", "dense"])
def test_a_row_is_made_of_its_rounds(batches: str, study: train.Study) -> None:
    row = study.row(64, batches, "eager", tokens=256)
    assert row["tokens"] == 256 and len(row["sequences"]) == train.BATCHES
    assert all(n >= 4 for n in row["sequences"])
    assert set(row["ms"]) == set(TIMES) and not row["refused"]
    assert row["ratio"] == {"sdpa": 2.0, "none": 0.5, "flash_attention_4": 0.5}
    assert row["torch_runs"] == ("a call for each sequence" if batches == "packed" else "flash_attention_for_cpu")
    assert row["tokens_per_second"]["warpwave"] == pytest.approx(256 / 2e-3)
    assert 0 < row["gradient_from_sdpa"]["warpwave"] < 1e-4
    assert row["gradient_from_sdpa"]["flash_attention_4"] == row["gradient_from_sdpa"]["warpwave"]


def test_a_peer_that_refuses_is_named(study: train.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("no kernel for this\nand more")

    monkeypatch.setitem(study.attentions, "flash_attention_4", refuse)
    row = study.row(64, "packed", "eager", tokens=256)
    assert row["refused"] == {"flash_attention_4": "RuntimeError: no kernel for this"}
    assert set(row["ms"]) == {"warpwave", "sdpa", "none"}
    runs = study.curves(3, 64, 256)
    assert [run.attention for run in runs] == ["warpwave", "sdpa", "sdpa again"]
    assert study.unavailable == {"flash_attention_4, loss curve": "RuntimeError: no kernel for this"}


def test_curves_begin_alike_and_the_first_two_are_never_left_out(study: train.Study) -> None:
    runs = study.curves(4, 64, 256)
    assert [run.attention for run in runs] == ["warpwave", "sdpa", "sdpa again", "flash_attention_4"]
    assert len({len(run.losses) for run in runs}) == 1
    found = train.differences(runs)
    assert found["sdpa again"] == 0.0
    assert found["warpwave"] < 1e-4
    study.end = 0.0
    assert [run.attention for run in study.curves(2, 64, 256)] == ["warpwave", "sdpa"]
    assert study.unavailable["flash_attention_4, loss curve"] == "no time left"


@pytest.mark.parametrize(
    ("has_gpu", "said"), [(False, "torch sees no GPU"), (True, "train.html already exists and is not a report")]
)
def test_what_cannot_run_is_a_sentence(
    has_gpu: bool, said: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.html").write_text("mine")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(sys, "argv", ["train", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        train.main()
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_an_absent_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    study = train.Study(1.0, 1, train.example.SMALL, torch.device("cpu"))
    assert "flash_attention_4" not in study.attentions
    assert "flash_attn" in study.unavailable["flash_attention_4"]


def test_the_table_and_the_figure(tmp_path: Any) -> None:
    row = {
        "context": 4096,
        "batches": "packed",
        "mode": "compiled",
        "tokens_per_second": {"warpwave": 250_400.0, "sdpa": 200_000.0},
        "ratio": {"sdpa": 1.252},
        "step_peak_mib": {"warpwave": 1024.0, "sdpa": 2048.0},
    }
    curves = [{"attention": name, "losses": [5.5, 2.0]} for name in ("warpwave", "sdpa", "sdpa again")]
    record = {"rows": [row], "curves": curves, "environment": {"gpu": {"name": "a card"}, "torch": "2", "triton": "3"}}
    assert "| 4,096 packed, compiled | 250 | 1.25 | - | - | 1.0, 2.0, - |" in train_figure.table(record)
    train_figure.draw(record, tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_text().count("<path") > 10
