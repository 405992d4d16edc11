"""Measures the constants that the gates need.

    python -m tests.conformance.calibrate --seeds 20 --out FILE
    python -m tests.conformance.calibrate --quantized --jobs 15 --out FILE

For each kernel and dtype, over seeds x the three data sets x a sample of cases: the largest and the 99th percentile of
the constant that each gate would have needed. The committed results justify the table in gates.py: calibration.json,
and for quantized calls, which few kernels compute, calibration_quantized.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.conformance import cases, harness
from tests.conformance.cases import FEATURES, PLAIN, QUANTIZED_DTYPES_OF_A_GRID, Case
from tests.conformance.datasets import DATA_SETS
from tests.conformance.gates import (
    TABLE,
    Verdict,
    backward_references,
    forward_references,
    judge_backward,
    judge_forward,
)
from tests.conformance.harness import DEVICE, GPU, KERNELS, ON_GPU
from tests.conformance.test_gradients import differentiate, upstream
from warpwave import dispatch

# What moves an accuracy ratio: the width of a row, its length, how many keys it sees, and what is done to its logits.
LENGTHS = ((1, 1023), (113, 203), (257, 257), (1023, 1024)) if ON_GPU else ((1, 128), (113, 103))
MASKS: tuple[dict[str, Any], ...] = ({}, {"causal": "bottom_right"})
OPTIONS: tuple[dict[str, Any], ...] = (
    {"window": (13, 13)},
    {"mask": "full", "bias": "full"},
    {"alibi": "heads", "sinks": True},
    {"softcap": 15.0},
    {"packed": True, "causal": "bottom_right"},
)
SAMPLE = [
    replace(PLAIN, dims=(d, d), lengths=n, heads=(4, 2), batch=2, **features)
    for d, n in ((16, LENGTHS[1]), (64, LENGTHS[0]), (64, LENGTHS[-1]), (128, LENGTHS[-1]), (256, LENGTHS[1]))
    for features in MASKS
] + [replace(PLAIN, lengths=LENGTHS[1], heads=(4, 2), batch=2, **features) for features in OPTIONS]
GRADIENT_SAMPLE = [case for case in SAMPLE if case.lengths in LENGTHS[:2] and case.dims[0] <= 128]


QUANTIZED_KERNELS = [name for name, module in KERNELS.items() if getattr(module, "QUANTIZED", False)]


class Tally:
    """Returns the needed constants by gate."""

    def __init__(self) -> None:
        self.needed: dict[str, list[float]] = defaultdict(list)
        self.failed: list[str] = []

    def add(self, verdict: Verdict, what: str) -> None:
        for gate in verdict.gates:
            self.needed[gate.name].append(gate.needed)
            if not gate.passed:
                self.failed.append(f"{what}: {gate.name} needs {gate.needed:.3g}")

    def summary(self) -> dict[str, Any]:
        gates = {}
        for name, values in sorted(self.needed.items()):
            x = torch.tensor(values, dtype=torch.float64)
            gates[name] = {"max": x.max().item(), "p99": x.quantile(0.99).item(), "verdicts": len(values)}
        return {"gates": gates, "failed": self.failed}


def of_dtype(sample: list[Case], dtype: str) -> list[Case]:
    return [replace(c, dtype=dtype) for c in sample if not cases.excluded("packed", c.packed, "dtype", dtype)]


def measure(kernel: str, dtype: str, seeds: int) -> dict[str, Any]:
    forward, backward = Tally(), Tally()
    for seed in range(seeds):
        for data in DATA_SETS:
            for case in of_dtype(SAMPLE, dtype):
                call = cases.build(case, data, DEVICE, seed)
                if dispatch.why_not(KERNELS[kernel], call.problem, GPU):
                    continue
                references = forward_references(call.problem, call.operands)
                out, lse = harness.run(kernel, call)
                forward.add(judge_forward(call.problem, references, out, lse), f"{case} {data} seed {seed}")
            for case in of_dtype(GRADIENT_SAMPLE, dtype) if dtype in FEATURES["dtype"] else ():
                call = cases.build(case, data, DEVICE, seed)
                if KERNELS[kernel].why_not(replace(call.problem, requires_grad=True), GPU):
                    continue
                backward.add(judge_gradients(kernel, call), f"{case} {data} seed {seed}")
    return {name: t.summary() for name, t in (("forward", forward), ("backward", backward)) if t.needed}


def judge_gradients(kernel: str, call: cases.Call) -> Verdict:
    dout, dlse = upstream(call)
    references = backward_references(call.problem, call.operands, dout, dlse)
    return judge_backward(call.problem, references, differentiate(kernel, call, dout, dlse))


def environment() -> dict[str, str]:
    device = torch.cuda.get_device_name() if ON_GPU else platform.processor() or platform.machine()
    triton = __import__("triton").__version__
    return {"device": device, "torch": torch.__version__, "triton": triton, "python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernel", choices=KERNELS, action="append", help="only this kernel; may be repeated")
    parser.add_argument("--quantized", action="store_true", help="quantized calls, instead of all others")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with one kernel and dtype at a time")
    asked = parser.parse_args()
    dtypes = QUANTIZED_DTYPES_OF_A_GRID if asked.quantized else FEATURES["dtype"]
    kernels = asked.kernel or (QUANTIZED_KERNELS if asked.quantized else list(KERNELS))
    tasks = [(kernel, dtype, asked.seeds) for kernel in kernels for dtype in dtypes]
    with ProcessPoolExecutor(asked.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(measure, *zip(*tasks, strict=True)))
    measured: dict[str, dict[str, Any]] = {kernel: {} for kernel in kernels}
    for (kernel, dtype, _), found in zip(tasks, results, strict=True):
        measured[kernel][dtype] = found
    table = {", ".join(key): c._asdict() for key, c in TABLE.items()}
    record = {"environment": environment(), "seeds": asked.seeds, "table": table, "measured": measured}
    asked.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
