"""The stack of transformers runs on a CPU in small, and its record holds what a reader needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'warpwave[integrations]'")

from benchmarks import llama_stack


def test_a_small_stack(tmp_path: Path) -> None:
    small = (
        "--rounds 1 --layers 2 --hidden 64 --heads 4 --kv-heads 2 --vocabulary 128 --seqlen 24 --steps 3 --device cpu"
    )
    llama_stack.main([str(tmp_path / "out.json"), *small.split()])
    record = json.loads((tmp_path / "out.json").read_text())
    assert [row["what"] for row in record["rows"]] == ["prefill", "decode", "train"]
    assert record["correct"] and record["not_run"]["warpwave"] == record["not_run"]["sdpa"] == ""
    for row in record["rows"]:
        assert len(row["ms"]["warpwave"]) == len(row["ms"]["sdpa"]) == 1 and row["ratio"]["sdpa"] > 0
    assert 0 < record["rows"][0]["attention_share"]["warpwave"] < 2
    assert 0 <= record["same_tokens_as_sdpa"] <= 1
