"""Compiles a sample of every kernel for every target with the Triton of this environment, and records the results.

    PYTHONPATH=. python benchmarks/compile_record.py benchmarks/records/RECORD.jsonl

It appends one line per launch. Run it in one environment per version of Triton to collect them in one file.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.compile.test_targets import TARGETS, job
from tests.compile.worker import problem_of
from warpwave import dispatch
from warpwave.gpu import Gpu
from warpwave.problem import AttentionProblem
from warpwave.workbench.inspect.compiled import compile_launches, toolchain
from warpwave.workbench.inspect.inspection import group

SAMPLE = [("bfloat16", 128, "causal")]


def jobs() -> Iterator[tuple[Any, Gpu, tuple[str, int, str], AttentionProblem]]:
    """Returns every kernel with its own code, on every target and point that it accepts."""
    for kernel in dispatch.KERNELS:
        for arch in TARGETS:
            gpu = Gpu.for_arch(arch)
            for point in SAMPLE:
                problem = problem_of(job(arch, *point)["problem"])
                if hasattr(kernel, "specify") and not kernel.why_not(problem, gpu):
                    yield kernel, gpu, point, problem


def compile_one(job: tuple[Any, Gpu, tuple[str, int, str], AttentionProblem]) -> list[dict[str, Any]]:
    """Compiles one point; returns a line for each launch."""
    kernel, gpu, (dtype, head_dim, feature), problem = job
    lines = []
    for facts, _ in compile_launches(kernel, problem, gpu, kernel.configs(problem, gpu)[0]):
        mix = group(facts.instructions)
        lines.append(
            {
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                **toolchain(gpu),
                "kernel": kernel.NAME,
                "launch": facts.name,
                "arch": gpu.arch,
                "dtype": dtype,
                "head_dim": head_dim,
                "feature": feature,
                "registers": facts.registers,
                "spill_bytes": facts.spill_bytes,
                "smem_bytes": facts.smem_bytes,
                "matrix": mix.get("matrix", 0),
                "instructions": facts.instructions.total(),
            }
        )
    return lines


def main(path: Path) -> None:
    """Appends to the record, each job's lines as it ends."""
    wanted = list(jobs())
    with ThreadPoolExecutor(os.cpu_count()) as pool, path.open("a", encoding="utf-8") as file:
        for done, lines in enumerate(pool.map(compile_one, wanted), start=1):
            file.writelines(json.dumps(line) + "\n" for line in lines)
            print(f"{done} of {len(wanted)}", end="\r", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
