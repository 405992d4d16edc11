"""Records made for these tests: small, with figures that appear nowhere by chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.bench.correctness import Verdict
from warpwave.workbench.bench.records import Measurement, Records, RecordWriter, environment_id
from warpwave.workbench.bench.timing import Samples
from warpwave.workbench.report.machines import Source

H200: dict[str, Any] = {
    "date": "2026-01-02T03:04:05+00:00",
    "code": {"commit": "c0ffee12", "dirty": False, "source_sha256": "5eed5eed"},
    "python": "3.12.3",
    "platform": "Linux-test",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "cuda": "13.0",
    "hip": None,
    "cudnn": 91900,
    "device": "cuda",
    "gpu": {
        "name": "NVIDIA H200",
        "capability": "9.0",
        "sm_count": 132,
        "memory_bytes": 150109880320,
        "l2_bytes": 62914560,
        "driver": "580.1",
        "power_limit_w": 700.0,
    },
    "cpu": {"model": "Xeon", "cores": 16, "torch_threads": 2},
}
CPU: dict[str, Any] = {
    **H200,
    "device": "cpu",
    "gpu": None,
    "cpu": {"model": "A processor of these tests alone", "cores": 2, "torch_threads": 2},
}
BASE = AttentionProblem(
    batch=4,
    seqlen_q=4096,
    seqlen_k=4096,
    num_heads_q=16,
    num_heads_kv=16,
    head_dim=128,
    head_dim_v=128,
    dtype="bfloat16",
    softmax_scale=0.088,
    causal=Causal(),
)
RIGHT = Verdict(True, "", 1.07e-4, 6e-4, 1e-4, 6e-4, 512)
WRONG = Verdict(False, "RMS error 1e-2 is above the limit", 1e-2, 2e-2, 1e-4, 6e-4, 512)


def problem(**changes: Any) -> AttentionProblem:
    return replace(BASE, **changes)


def samples(us: float, *, rounds: int = 9, method: Any = "events", spread: float = 0.004) -> Samples:
    """Times around `us`, whose median is `us` where the number of rounds is odd."""
    times = tuple(us * (1 + spread * (i - rounds // 2)) for i in range(rounds))
    return Samples(times, method, 20, 1, method == "events")


def measurement(contender: str = "warpwave auto", us: float | None = 612.3, **changes: Any) -> Measurement:
    ours = contender.startswith("warpwave ")
    values: dict[str, Any] = {
        "suite": "forward",
        "case": "d128 4x4096 causal",
        "problem": problem(),
        "contender": contender,
        "kernel": "flash_fwd" if ours else "an_operator",
        "verdict": RIGHT,
        "timing": None if us is None else samples(us),
        "gpu_before": {"sm_mhz": 1980, "memory_mhz": 3201, "power_w": 124.7, "temperature_c": 33, "throttle": []},
        "gpu_after": {
            "sm_mhz": 1815,
            "memory_mhz": 3201,
            "power_w": 671.2,
            "temperature_c": 51,
            "throttle": ["power cap"],
        },
    }
    return Measurement(**(values | changes))


def pair(ours_us: float = 612.3, theirs_us: float = 500.0, **changes: Any) -> list[Measurement]:
    return [measurement(us=ours_us, **changes), measurement("sdpa_cudnn", theirs_us, **changes)]


def source(measurements: Sequence[Measurement], environment: dict[str, Any] = H200, **options: Any) -> Source:
    identity = environment_id(environment)
    return Source(Records({identity: environment}, [(identity, m) for m in measurements]), **options)


def write(path: Path, measurements: Sequence[Measurement], environment: dict[str, Any] = H200) -> Path:
    writer = RecordWriter(path, environment)
    for m in measurements:
        writer.write(m)
    return path
