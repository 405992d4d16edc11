"""The stack of transformers runs on a CPU in small, and its record holds what a reader needs, even of a run that ends
early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'warpwave[integrations]'")

from benchmarks import llama_stack

SMALL = {
    "layers": 2, "hidden": 64, "heads": 4, "kv-heads": 2, "vocabulary": 128, "seqlen": 24, "steps": 3, "device": "cpu"
}  # fmt: skip


def run(out: Path, *more: str) -> dict[str, Any]:
    llama_stack.main([str(out), *(f"--{name}={value}" for name, value in SMALL.items()), *more])
    record: dict[str, Any] = json.loads(out.read_text())
    return record


def test_a_small_stack(tmp_path: Path) -> None:
    record = run(tmp_path / "new" / "out.json", "--rounds", "2")
    assert [row["what"] for row in record["rows"]] == list(llama_stack.ROWS) and record["complete"]
    assert record["correct"] and record["not_run"]["warpwave"] == record["not_run"]["sdpa"] == ""
    for row in record["rows"]:
        assert len(row["ms"]["warpwave"]) == len(row["ms"]["sdpa"]) == 2 and row["ratio"]["sdpa"] > 0
        assert row["what"] == "generate" or 0 < row["attention_share"]["warpwave"] < 2
        assert not row["failed"]
    assert 0 <= record["same_tokens_as_sdpa"] <= 1


def test_a_run_out_of_time_takes_one_round(tmp_path: Path) -> None:
    record = run(tmp_path / "out.json", "--rounds", "50", "--seconds", "0")
    assert record["complete"] and all(len(row["ms"]["warpwave"]) == 1 for row in record["rows"])
    record = run(tmp_path / "out.json", "--rounds", "1", "--rows", "generate", "prefill")
    assert record["complete"] and [row["what"] for row in record["rows"]] == ["generate", "prefill"]


def test_a_peer_that_fails_is_left_out_and_what_was_measured_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer fails in training, with an error that has lines. Then our own decoding fails, which ends the run."""
    from transformers import AttentionInterface

    from warpwave.integrations import transformers as door

    peer = "warpwave_peer"
    registration = door.register(peer)

    def attend(module: Any, q: torch.Tensor, *given: Any, **said: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("no backward\nhere")
        return door.attend(module, q, *given, **said)

    AttentionInterface.register(peer, attend)
    monkeypatch.setattr(llama_stack, "NAMES", (*llama_stack.NAMES[:2], peer))
    record = run(tmp_path / "out.json", "--rounds", "1")
    assert [row["failed"] for row in record["rows"]] == [{}, {peer: "RuntimeError: no backward"}, {}, {}]
    assert [set(row["median_ms"]) for row in record["rows"]] == [
        {"warpwave", "sdpa", peer}, {"warpwave", "sdpa"}, {"warpwave", "sdpa", peer}, {"warpwave", "sdpa", peer}
    ]  # fmt: skip

    def fail(*given: Any) -> float:
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(llama_stack, "decode", fail)
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        run(tmp_path / "out.json", "--rounds", "1")
    registration.remove()
    record = json.loads((tmp_path / "out.json").read_text())
    assert not record["complete"] and [row["what"] for row in record["rows"]] == ["prefill", "train"]
