"""The sweep of case report 2: its space, its lines, and that its stages are the call. Times need a GPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks import three_kernel_sweep as sweep
from warpwave.gpu import Gpu
from warpwave.kernels.three_kernel import host as three_kernel
from warpwave.kernels.three_kernel.plan import Config
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.inputs import make_operands

REPORT = AttentionProblem(
    batch=1, seqlen_q=1024, seqlen_k=1024, num_heads_q=16, num_heads_kv=16, head_dim=64, head_dim_v=64,
    dtype="float16", softmax_scale=0.125,
)  # fmt: skip


def test_the_space_holds_what_the_report_swept() -> None:
    configs = [config for config, refusal in sweep.space(REPORT, Gpu.for_arch("sm_90")) if not refusal]
    assert len(set(configs)) == len(configs)
    ours = [c for c in configs if c.scores == c.values == "triton"]
    tiles = {(c.block_m, c.block_n, c.block_k) for c in ours}
    assert len(tiles) == 15 and {shape[:3] for shape in sweep.REPORTED} <= tiles
    assert {c.softmax_warps * 32 for c in ours} == set(sweep.THREADS)
    assert all(c.softmax_rows == 1 and c.softmax_keys == 1024 for c in ours)


def test_what_does_not_fit_says_so() -> None:
    refusals = [refusal for _, refusal in sweep.space(REPORT, Gpu.for_arch("sm_86")) if refusal]
    assert refusals and all("KiB of shared memory, of 99" in refusal for refusal in refusals)


@pytest.mark.parametrize("way", sweep.WAYS)
def test_stages_in_order_are_the_call(way: tuple[str, str]) -> None:
    small = dataclasses.replace(REPORT, num_heads_q=2, num_heads_kv=2, seqlen_q=33, seqlen_k=40)
    operands = make_operands(small, "cpu" if not torch.cuda.is_available() else "cuda")
    config = Config(*way, 32, 32, 32, 32, 4, 1, 1, 4, 64, 1, 1 << 20)
    out, _ = three_kernel.bind(small, operands, config)(operands)
    stages = three_kernel.stage_calls(small, operands, config)
    assert list(stages) == (["scores", "values"] if way[0] == "fused" else ["scores", "softmax", "values"])
    (written,) = {id(call.args[2]): call.args[2] for call in stages.values()}.values()  # type: ignore[attr-defined]
    written.zero_()
    for call in stages.values():
        call()
    assert torch.equal(written, out)


def test_a_row_shows_stages_and_gaps() -> None:
    config = next(config for config, _ in sweep.space(REPORT, Gpu.for_arch("sm_90")))
    us = {"whole": 32.0, "scores": 8.0, "softmax": 8.0, "values": 12.0, "gaps": 4.0, "eager": 48.0}
    text = sweep.row(config, {"us": us}, 16, 32)
    assert text.startswith("triton/triton 64x128x64, 32 ")
    assert [float(x) for x in text.split()[-6:]] == [2.0, 0.5, 0.5, 0.75, 0.25, 3.0]
    assert sweep.row(config, {"refusal": "no"}, 16, 32).endswith(" no")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main([]) == 2
    assert "no GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sweep.main(["--seqlen", "0"])


@pytest.mark.gpu
def test_a_small_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "OTHERS", ())
    monkeypatch.setattr(sweep, "THREADS", (32,))
    assert sweep.main(["--seqlen", "256", "--rounds", "3", "--out", str(tmp_path / "sweep.jsonl")]) == 0
    about, *lines = map(json.loads, (tmp_path / "sweep.jsonl").read_text().splitlines())
    assert about["kind"] == "environment" and len(lines) == 3 * 4 + 1
    assert "not possible in Triton" in capsys.readouterr().out
    for line in lines:
        assert "refusal" in line or line["us"]["whole"] > 0
