"""The benchmark of quantized calls checks each output before it times it, and writes what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import quantized
from benchmarks.quantized import COPY, MORE, PLAIN, TOGETHER, WAYS, measure, problems

CPU = torch.device("cpu")


def test_the_calls_are_those_of_the_goals() -> None:
    found = list(problems(16_384, 2048))
    shapes = {(p.batch, p.seqlen_q, p.head_dim, p.num_heads_q, p.causal is not None) for p in found}
    assert len(found) == len(shapes) == 18
    assert {(1, 16_384, 128, 16, True), (16, 1024, 256, 8, False), (1, 16_384, 64, 32, False)} <= shapes


def test_a_record_has_errors_times_and_traffic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = next(problems(64, 64))
    monkeypatch.setattr(quantized, "problems", lambda *of: [replace(one, batch=1, seqlen_q=64, seqlen_k=64)])
    out = tmp_path / "record.jsonl"
    arguments = ["--device", "cpu", "--tokens", "64", "--width", "64", "--rounds", "1", "--out", str(out)]
    assert quantized.main(arguments) == 0
    environment, line = map(json.loads, out.read_text().splitlines())
    assert "date" in environment["environment"]
    attends = {PLAIN, *WAYS, *(f"quantize, then {name}" for name in TOGETHER)}
    assert line["errors"].keys() == line["over_bfloat16"].keys() == attends and line["wrong"] == []
    assert line["times_us"].keys() == attends | {f"quantize {name}" for name in (*WAYS, *MORE)} | {COPY}
    assert line["over_bfloat16"][PLAIN] == 1
    elements = 64 * 64
    assert line["moved_bytes"][COPY] == 12 * elements
    assert line["moved_bytes"]["quantize fp8, block 128"] == 9 * elements
    with pytest.raises(SystemExit):
        quantized.main(arguments)


def test_a_wrong_output_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors that are off by a half give a result of the right size, and no time."""
    one = replace(next(problems(64, 64)), batch=1, seqlen_q=64, seqlen_k=64)
    monkeypatch.setattr(quantized, "MORE", {})
    monkeypatch.setattr(quantized, "WAYS", {"int8, v int8": WAYS["int8, v int8"]})
    attention = quantized.warpwave.attention

    def off(*arguments: torch.Tensor, **options: object) -> torch.Tensor:
        factor = options.get("v_descale")
        if isinstance(factor, torch.Tensor):
            options["v_descale"] = factor * 1.5
        out: torch.Tensor = attention(*arguments, **options)  # type: ignore[arg-type]
        return out

    monkeypatch.setattr(quantized.warpwave, "attention", off)
    line = measure(one, CPU, 1)
    assert line["wrong"] == ["int8, v int8"] and "int8, v int8" not in line["median_us"]
    assert ("int8, v int8", "wrong") == quantized.table(line).rows[-1][:2]
