"""The launches of `hopper/flash_bwd` compile within its limits, and add dQ by TMA. No GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is published for Linux only")

# Compiles calls in a process of its own, for the interpreter replaces the compiler for a whole process.
CODE = """
import json, sys, torch
from warpwave.cached_calls import operands_without_memory
from warpwave.gpu import Gpu
from warpwave.kernels.hopper import flash_bwd
from warpwave.kernels.hopper.flash_bwd import kernel
from warpwave.kernels.hopper.flash_bwd.launches import Tensors
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.inspect.compiled import compile_launch, mixed_descriptors
gpu = Gpu.for_arch("sm_90")
for head_dim in map(int, sys.argv[1:]):
    problem = AttentionProblem(
        batch=2, seqlen_q=1024, seqlen_k=1024, num_heads_q=4, num_heads_kv=2, head_dim=head_dim, head_dim_v=head_dim,
        dtype="bfloat16", softmax_scale=head_dim**-0.5, return_lse=True, causal=Causal(),
    )
    config, given = flash_bwd.default(problem, gpu), operands_without_memory(problem)
    workspace, grads = kernel.example(problem, config, "meta")
    out, rows = torch.empty_like(given.q), torch.empty(16, dtype=torch.float32, device="meta")
    found = []
    for step in flash_bwd.specify(problem, gpu, Tensors(given, out, rows, out, rows, workspace, *grads), config):
        compiled = compile_launch(step.launch, gpu)
        found.append(vars(compiled.facts) | {"mixed_descriptors": mixed_descriptors(compiled.texts["ptx"])})
    print(json.dumps({"launches": found, "bound": flash_bwd.smem_bytes(problem, config)}), flush=True)
"""
# Bytes of local memory a thread may take, by head_dim, most of it outside the main loop. With Triton 3.7.1 184 to 368.
SPILL_BOUND = 512


@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.full), 128])
def test_it_compiles_within_its_limits(head_dim: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", CODE, str(head_dim)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    facts: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    statistics, gradients, finish = facts["launches"]
    assert statistics["spill_bytes"] == finish["spill_bytes"] == 0
    assert gradients["spill_bytes"] <= SPILL_BOUND
    assert gradients["smem_bytes"] <= facts["bound"] <= 227 * 1024
    assert gradients["instructions"]["UTMAREDG"] == 2, "each group's share of dQ is added by the copy engine"
    # Five products of a tile, in wgmma instructions of 64 x N x 16: in the loop over cut tiles and in the other, of
    # two groups.
    assert gradients["instructions"]["HGMMA"] == 4 * {64: 40, 128: 32}[head_dim]
    assert not any(launch["mixed_descriptors"] for launch in facts["launches"])
