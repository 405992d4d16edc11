"""docs/kernels/ladder.md holds what benchmarks/ladder.py makes of its record, and the script makes the right thing."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ladder
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.correctness import Verdict
from warpwave.workbench.bench.records import Measurement, RecordWriter
from warpwave.workbench.bench.timing import Samples
from warpwave.workbench.bench.workloads import load_suite

ENVIRONMENT = {
    "date": "2026-11-21T11:04:04+00:00",
    "code": {"commit": "0123456789abcdef", "dirty": False, "source_sha256": "eed4759afd6f53d8"},
    "torch": "2.11.0", "triton": "3.6.0", "device": "cuda", "gpu": {"name": "NVIDIA H200"}, "cpu": {"model": "a CPU"},
}  # fmt: skip
PASSED = Verdict(
    passed=True, reason="", rms_error=1e-8, max_error=1e-7, model_rms_error=1e-8, model_max_error=1e-7, rows=8
)
BF16_2048 = next(
    case.problem
    for case in load_suite("ladder").cases
    if case.problem.dtype == "bfloat16" and case.problem.seqlen_q == 2048
)


def measurement(contender: str, kernel: str, times_us: tuple[float, ...], **fields: Any) -> Measurement:
    timing = Samples(times_us, "events", 1, 1, True)
    values: dict[str, Any] = {"verdict": PASSED, "timing": timing, "peak_memory_bytes": 4_194_304} | fields
    problem: AttentionProblem = BF16_2048
    return Measurement(
        suite="ladder", case="d64 1x2048 h16 bf16", problem=problem, contender=f"warpwave {contender}", kernel=kernel,
        **values,
    )  # fmt: skip


def record(folder: Path, *measurements: Measurement) -> Path:
    path = folder / "record.jsonl"
    writer = RecordWriter(path, ENVIRONMENT)
    for m in measurements:
        writer.write(m)
    return path


def test_the_document_is_what_the_script_makes_of_its_record() -> None:
    document = ladder.DOC.read_text(encoding="utf-8")
    found = ladder.SECTION.search(document)
    assert found is not None
    name = found["record"]
    assert ladder.written(document, None if name == ladder.NO_RECORD else ladder.ROOT / name) == document
    if name == ladder.NO_RECORD:
        folders = (
            ladder.ROOT / "benchmarks" / "records",
            ladder.ROOT / "warpwave" / "workbench" / "report" / "shipped",
        )
        kept = sorted(path for folder in folders for path in folder.glob("*-ladder.jsonl"))
        assert not kept, f"the figures are there: python benchmarks/ladder.py {kept[-1].relative_to(ladder.ROOT)}"


def test_the_suite_measures_every_rung() -> None:
    suite = load_suite("ladder")
    assert set(ladder.RUNGS[:3]) | {"auto"} == set(suite.kernels), "auto is the fastest rung of the GPU at hand"
    shapes = {(c.problem.seqlen_q, c.problem.num_heads_q, c.problem.head_dim, c.problem.dtype) for c in suite.cases}
    expected = {(n, 16, 64, dtype) for n in (1024, 2048, 4096, 8192) for dtype in ("float32", "bfloat16")}
    assert shapes == expected
    assert {(c.problem.dtype, c.problem.precision) for c in suite.cases} == set(ladder.DTYPES)


def test_a_row_shows_times_paired_gains_rates_and_memory(tmp_path: Path) -> None:
    naive = (9000.0, 8000.0, 30_000.0)
    tiled = (1000.0, 1000.0, 3000.0)
    path = record(
        tmp_path,
        measurement("naive", "naive", naive, peak_memory_bytes=272_760_832),
        measurement("tiled", "tiled", tiled, peak_memory_bytes=None),
        measurement("flash_fwd", "flash_fwd", (500.0, 250.0, 500.0)),
        measurement("auto", "hopper/flash_fwd", (250.0, 250.0, 250.0)),
    )
    text = ladder.section(path)
    assert "NVIDIA H200, torch 2.11.0, Triton 3.6.0, 2026-11-21, commit 0123456." in text
    assert "| bfloat16 | naive | tiled | flash_fwd | hopper/flash_fwd |" in text
    rate = BF16_2048.flops / 9e-3 / 1e12
    gain = statistics.median(a / b for a, b in zip(naive, tiled, strict=True))
    assert gain == 9.0, "9, 8 and 10: by rounds, not 9000 / 1000"
    cells = [part.strip() for part in text.splitlines()[-1].strip("|").split("|")]
    assert cells == [
        "2048",
        f"9.000 ms, {rate:.1f} TFLOP/s, 272.8 MB",
        f"1.000 ms, x 9.00, {rate * 9:.1f} TFLOP/s",
        f"0.500 ms, x 4.00, {rate * 18:.1f} TFLOP/s, 4.2 MB",
        f"0.250 ms, x 2.00, {rate * 36:.1f} TFLOP/s, 4.2 MB",
    ]


def test_a_rung_without_a_time_says_why(tmp_path: Path) -> None:
    path = record(
        tmp_path,
        measurement("naive", "naive", (1.0,), timing=None, verdict=None, refusal="its scores would take 64.0 GiB"),
        measurement("flash_fwd", "flash_fwd", (500.0,)),
        measurement("auto", "flash_fwd", (250.0,)),
    )
    last = ladder.section(path).splitlines()[-1]
    assert last.startswith("| 2048 | its scores would take 64.0 GiB | 0.500 ms, "), "by name before auto"


def test_the_section_is_replaced_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "ROOT", tmp_path)
    path = record(tmp_path, measurement("naive", "naive", (9000.0,)))
    document = "before\n<!-- measured from no record yet -->\nold\n<!-- end of measured -->\nafter\n"
    new = ladder.written(document, path)
    assert new.startswith("before\n<!-- measured from record.jsonl -->\nNVIDIA H200")
    assert new.endswith("<!-- end of measured -->\nafter\n") and "old" not in new
    assert ladder.written(new, None) == document.replace("old\n", ladder.NOT_MEASURED)


def test_a_record_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ladder.NoLadder, match="no measurement of the suite 'ladder'"):
        ladder.section(record(tmp_path))
    with pytest.raises(ladder.NoLadder, match="no section between"):
        ladder.written("nothing here", None)
