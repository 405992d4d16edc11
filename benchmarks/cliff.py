"""Measures where scores in memory leave L2: three_kernel unchunked, stage by stage, below and above L2's size.

    PYTHONPATH=. python -m benchmarks.cliff --out benchmarks/records/FILE.jsonl
    PYTHONPATH=. python -m benchmarks.cliff --read benchmarks/records/FILE.jsonl

Scores are kept in two ways: as 16-bit probabilities from the first product's epilogue (2 bytes per score), and as
float32 scores that probabilities overwrite (4 bytes). Before the measurement, the cliff is predicted at the length
where all scores fill L2:

    seqlen = sqrt(bytes of L2 / (bytes a score x heads x batch)).

There are two experiments. In the first, 16 heads have a growing seqlen, as in practice; partly filled waves then have
as large an effect as a cliff. In the second, heads of 512 queries and keys come in multiples of 33, whose 132 tiles are
whole waves on 132 SMs, so that only the bytes change. Each stage's time per score is fitted with
`a + b * (1 - capacity / bytes of scores)` beyond the capacity and with `a` before it: the share that does not fit
crosses the bus. A stage without a cliff has a `b` near zero.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels.three_kernel import host as three_kernel
from warpwave.kernels.three_kernel.plan import Config
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench import environment
from warpwave.workbench.bench.correctness import Sample
from warpwave.workbench.bench.inputs import make_operands
from warpwave.workbench.bench.timing import time_modes
from warpwave.workbench.output_files import write_whole

BYTES_A_SCORE = {"fused": 2, "triton": 4}  # by who computes the scores
HEADS = 16
EXPERIMENTS: dict[str, tuple[tuple[int, int], ...]] = {  # (heads, seqlen)
    "seqlen": tuple((HEADS, seqlen) for seqlen in range(512, 2561, 128)),
    "heads": tuple((33 * rounds, 512) for rounds in range(1, 11)),
}
UNCHUNKED = 1 << 32  # bytes of workspace


def config_of(problem: AttentionProblem, gpu: Gpu, scores: str) -> Config:
    """Returns the config of our own three launches, with all scores at once."""
    width = max(512, 1 << (problem.seqlen_k - 1).bit_length())
    return dataclasses.replace(
        three_kernel.configs(problem, gpu)[0],
        scores=scores,
        values="triton",
        split_d=1,
        workspace_bytes=UNCHUNKED,
        block_m=128,
        block_n=128,
        block_k=64,
        block_v=64,
        num_warps=8,
        num_stages=3,
        softmax_rows=1,
        softmax_keys=width,
        softmax_warps=max(4, width // 512),
    )


def measure(experiment: str, heads: int, seqlen: int, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Returns one line for each way: us of the whole call and of each stage, for each round."""
    problem = AttentionProblem(
        batch=1, seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=heads, num_heads_kv=heads, head_dim=64, head_dim_v=64,
        dtype="float16", softmax_scale=0.125,
    )  # fmt: skip
    gpu, operands = current_gpu(device), make_operands(problem, device)
    sample, lines = Sample(problem, operands), []
    calls: dict[str, Callable[[], object]] = {}
    for scores in BYTES_A_SCORE:
        config = config_of(problem, gpu, scores)
        run = three_kernel.bind(problem, operands, config)
        line = {"kind": "cliff", "experiment": experiment, "scores": scores, "heads": heads, "seqlen": seqlen}
        verdict = sample.judge(run(operands)[0])
        lines.append(line | {"config": dataclasses.asdict(config), "passed": verdict.passed})
        stages: dict[str, Callable[[], object]] = {"whole": partial(run, operands)}
        stages |= three_kernel.stage_calls(problem, operands, config)
        calls |= {f"{scores} {name}": call for name, call in stages.items()}
    times = time_modes(
        calls, ("graph",), device=device, rounds=rounds, flush_l2=False, warmup_s=0.02, sample_s=0.004
    ).popitem()[1]
    for line in lines:
        prefix = f"{line['scores']} "
        line["us"] = {name.removeprefix(prefix): t.samples_us for name, t in times.items() if name.startswith(prefix)}
    return lines


def fit(score_bytes: Sequence[float], ps_a_score: Sequence[float]) -> tuple[float, float, float]:
    """Returns (capacity in bytes, b / a, RMS error relative to a) of the least squares fit."""
    x, y = np.asarray(score_bytes, float), np.asarray(ps_a_score, float)
    found = []
    for capacity in np.geomspace(x[1], x[-2], 200):
        outside = np.clip(1 - capacity / x, 0, None)
        (a, b), *_ = np.linalg.lstsq(np.stack([np.ones_like(x), outside], 1), y, rcond=None)
        found.append((float(np.sqrt(np.mean((a + b * outside - y) ** 2)) / a), float(capacity), float(b / a)))
    error, capacity, rise = min(found)
    return capacity, rise, error


def summary(lines: Iterable[dict[str, Any]], l2_bytes: int) -> list[str]:
    """Returns each stage's times per score, and the fitted capacity next to that of L2."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        if line.get("kind") == "cliff":
            groups.setdefault((line["experiment"], line["scores"]), []).append(line)
    text = []
    for (experiment, scores), points in groups.items():
        each = BYTES_A_SCORE[scores]
        count = [p["heads"] * p["seqlen"] ** 2 for p in points]
        text.append(f"{experiment}, scores {scores}: {each} bytes a score, L2 {l2_bytes / 2**20:.0f} MiB")
        if experiment == "seqlen":
            text[-1] += f", cliff predicted at seqlen {math.sqrt(l2_bytes / (each * HEADS)):.0f}"
        if wrong := [(p["heads"], p["seqlen"]) for p in points if not p["passed"]]:
            text.append(f"  WRONG results at {wrong}")
        text.append(f"  {experiment:8} " + " ".join(f"{p[experiment]:6d}" for p in points))
        text.append("  MiB      " + " ".join(f"{each * n / 2**20:6.0f}" for n in count))
        for stage in points[0]["us"]:
            ps = [float(np.median(p["us"][stage])) * 1e6 / n for p, n in zip(points, count, strict=True)]
            capacity, rise, error = fit([each * n for n in count], ps)
            text.append(f"  {stage:8} " + " ".join(f"{x:6.2f}" for x in ps) + " ps a score")
            text.append(f"           capacity fitted {capacity / 2**20:.0f} MiB, rise {rise:+.2f}, error {error:.3f}")
    return text


def main(arguments: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--experiment", choices=tuple(EXPERIMENTS), help="one of them alone")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="a file for the record, JSON lines")
    parser.add_argument("--read", type=Path, help="a record: summarize it, measure nothing")
    a = parser.parse_args(arguments)
    if a.read is not None:
        lines = [json.loads(line) for line in a.read.read_text(encoding="utf-8").splitlines()]
        print("\n".join(summary(lines, next(line["l2_bytes"] for line in lines if line["kind"] == "environment"))))
        return 0
    if a.out is not None and a.out.exists():
        parser.error(f"{a.out} already exists; name another file")
    if not torch.cuda.is_available():
        print("there is no GPU here to time three_kernel on", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    lines = [{"kind": "environment", "l2_bytes": l2_bytes, **environment.describe(device)}]
    for experiment, points in EXPERIMENTS.items():
        for heads, seqlen in points if a.experiment in (None, experiment) else ():
            lines += measure(experiment, heads, seqlen, device, a.rounds)
            if a.out is not None:
                text = "".join(json.dumps(line, default=str) + "\n" for line in lines)
                write_whole(a.out, text)
    print("\n".join(summary(lines, l2_bytes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
