"""The launches of `flash_bwd` compile for every target, within its limits. No GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.compile.test_targets import FLASH_FEATURES, TARGETS, matrix_instructions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is published for Linux only")

# Compiles one call in a process of its own, for the interpreter replaces the compiler for a whole process.
CODE = """
import json, sys, torch
from warpwave.cached_calls import operands_without_memory
from warpwave.gpu import Gpu
from warpwave.kernels import flash_bwd
from warpwave.kernels.flash_bwd.host import Outputs
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.inspect.compiled import compile_launch, mixed_descriptors
for line in sys.stdin:
    job = json.loads(line)
    fields = job["problem"]
    if fields.get("causal"):
        fields["causal"] = Causal(fields["causal"])
    for name in ("mask_shape", "bias_shape", "alibi_shape", "window_size"):
        if name in fields:
            fields[name] = tuple(fields[name])
    problem, gpu = AttentionProblem(**fields), Gpu.for_arch(job["arch"])
    config, given = flash_bwd.default(problem, gpu), operands_without_memory(problem)
    def like(t):
        return None if t is None else torch.empty(t.shape, dtype=t.dtype, device="meta")
    out = torch.empty((*given.q.shape[:-1], problem.head_dim_v), dtype=given.q.dtype, device="meta")
    rows = torch.empty(16, dtype=torch.float32, device="meta")
    outputs = Outputs(
        like(given.q), like(given.k), like(given.v), like(given.bias), rows,
        rows if problem.dtype == "float32" else None,
        None if given.alibi_slopes is None else rows, None if given.sinks is None else rows,
    )
    specs = flash_bwd.specify(problem, gpu, given, (out, rows), out, rows, outputs, config)
    found = []
    for compiled in (compile_launch(spec, gpu) for spec in specs):
        mixed = mixed_descriptors(compiled.texts["ptx"]) if job["arch"] == "sm_90" else {}
        found.append(vars(compiled.facts) | {"mixed_descriptors": mixed})
    limits = {"bound": flash_bwd.smem_bytes(problem, gpu, config), "limit": gpu.smem_per_block_bytes}
    print(json.dumps({"launches": found, "config": str(config), **limits}), flush=True)
"""
# Bytes of local memory a thread may take, by dtype and head_dim, where not none. With Triton 3.7.1.
SAMPLE = ("sm_80", "gfx942")
SPILL_BOUNDS = {("sm_90", "bfloat16", 256): 192}


def compile_all(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    lines = "".join(json.dumps(job) + "\n" for job in jobs)
    run = subprocess.run(
        [sys.executable, "-c", CODE], input=lines, env=environment, capture_output=True, text=True, timeout=550
    )
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(jobs), run.stderr[-2000:]
    return found


def job(arch: str, dtype: str, head_dim: int, feature: str) -> dict[str, Any]:
    problem = {
        "batch": 2, "seqlen_q": 1024, "seqlen_k": 1024, "num_heads_q": 4, "num_heads_kv": 2, "head_dim": head_dim,
        "head_dim_v": head_dim, "dtype": dtype, "softmax_scale": head_dim**-0.5,
    }  # fmt: skip
    return {"arch": arch, "problem": problem | FLASH_FEATURES[feature]}


def check(job: dict[str, Any], facts: dict[str, Any]) -> None:
    for launch in facts["launches"]:
        what = f"{job} {facts['config']} {launch['name']}: {launch['smem_bytes']} bytes of shared memory"
        assert launch["smem_bytes"] <= min(facts["bound"], facts["limit"]), what
        assert not launch["mixed_descriptors"], what
        if job["problem"]["dtype"] != "float32":
            assert matrix_instructions(launch["instructions"], job["arch"]) > 0, what


def test_hopper_spills_nothing_at_the_usual_head_sizes() -> None:
    points = [("sm_90", "bfloat16", head_dim) for head_dim in (64, 128, 256)]
    jobs = [job(*point, "causal") for point in points]
    for a_job, facts, point in zip(jobs, compile_all(jobs), points, strict=True):
        check(a_job, facts)
        for launch in facts["launches"]:
            what = f"{point} {facts['config']} {launch['name']}: {launch['spill_bytes']} bytes spilled"
            assert launch["spill_bytes"] <= SPILL_BOUNDS.get(point, 0), what
            assert launch["instructions"].get("HGMMA", 0) > 0 and launch["instructions"].get("LDGSTS", 0) > 0


@pytest.mark.parametrize("arch", [pytest.param(a, marks=[] if a in SAMPLE else [pytest.mark.full]) for a in TARGETS])
def test_sample_compiles_within_limits(arch: str) -> None:
    jobs = [job(arch, "bfloat16", 128, "bias")]
    for a_job, facts in zip(jobs, compile_all(jobs), strict=True):
        check(a_job, facts)


# Bytes of local memory a thread of a launch may take with dropout at head_dim 128, with Triton 3.7.1.
SPILLED_WITH_DROPOUT = {"sm_80": 32, "sm_90": 80, "gfx942": 0}


def test_dropout_compiles_within_limits() -> None:
    jobs = [job(arch, "bfloat16", 128, "dropout") for arch in SPILLED_WITH_DROPOUT]
    for a_job, facts in zip(jobs, compile_all(jobs), strict=True):
        check(a_job, facts)
        for launch in facts["launches"]:
            what = f"{a_job['arch']} {launch['name']}: {launch['spill_bytes']} bytes spilled"
            assert launch["spill_bytes"] <= SPILLED_WITH_DROPOUT[a_job["arch"]], what


@pytest.mark.full
@pytest.mark.parametrize("feature", FLASH_FEATURES)
@pytest.mark.parametrize("arch", TARGETS)
def test_matrix_compiles_within_limits(arch: str, feature: str) -> None:
    jobs = [job(arch, dtype, d, feature) for dtype in ("bfloat16", "float32") for d in (40, 64, 128, 256)]
    for a_job, facts in zip(jobs, compile_all(jobs), strict=True):
        check(a_job, facts)
