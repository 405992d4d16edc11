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
from warpwave.kernels.hopper.flash_bwd import kernel, launches
from warpwave.kernels.hopper.flash_bwd.launches import Tensors
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.inspect.compiled import compile_launch, mixed_descriptors
gpu = Gpu.for_arch("sm_90")
head_dim, head_dim_v = map(int, sys.argv[1:3])
features = {"causal": Causal(), "softcap": 30.0, "packed": True, "total_q": 2048, "total_k": 2048}
if sys.argv[3] == "plain":
    features = {}
if sys.argv[3] == "dropout":
    features = {"causal": Causal(), "dropout_p": 0.1}
if sys.argv[3] == "mask":
    features = {"causal": Causal(), "mask_shape": (2, 4, 1024, 1024)}
if sys.argv[3] == "trained bias":
    features = {"causal": Causal(), "bias_shape": (2, 4, 1024, 1024), "bias_dtype": "bfloat16"}
problem = AttentionProblem(
    batch=2, seqlen_q=1024, seqlen_k=1024, num_heads_q=4, num_heads_kv=2, head_dim=head_dim, head_dim_v=head_dim_v,
    dtype="bfloat16", softmax_scale=head_dim**-0.5, return_lse=True, **features,
)
given = operands_without_memory(problem)
out = torch.empty(*given.q.shape[:-1], head_dim_v, dtype=given.q.dtype, device="meta")
rows = torch.empty(16, dtype=torch.float32, device="meta")
for config in flash_bwd.configs(problem, gpu):
    workspace, grads = kernel.example(problem, config, "meta")
    tensors = Tensors(given, out, rows, out, rows, workspace, *grads)
    tensors = launches.with_walks(problem, kernel.with_bias(problem, tensors, is_wanted=True), config)
    found = {}
    for step in flash_bwd.specify(problem, gpu, tensors, config):
        compiled = compile_launch(step.launch, gpu)
        mixed = mixed_descriptors(compiled.texts["ptx"])
        found[step.launch.kernel.__name__] = vars(compiled.facts) | {"mixed_descriptors": mixed}
    print(json.dumps({"launches": found, "bound": flash_bwd.smem_bytes(problem, config)}), flush=True)
"""
# wgmma instructions of 64 x N x 16 in the loops of both groups: a joint kernel has a loop over cut tiles and another,
# the others one loop and the first scores before it.
PRODUCTS = {
    (64, 64): {"joint_kernel": 160, "dkv_kernel": 32, "dq_kernel": 40},
    (128, 128): {"joint_kernel": 128, "dkv_kernel": 48, "dq_kernel": 64},
    (192, 128): {"dkv_kernel": 52, "dq_kernel": 80},
    (256, 256): {"dkv_kernel": 72, "dq_kernel": 104},
}
# The launch of dQ takes fewer keys a step where tiles of the bias need the room.
WITH_BIAS = PRODUCTS | {(256, 256): PRODUCTS[256, 256] | {"dq_kernel": 100}}
# Bytes of local memory a thread may take, most of it outside the main loop: without and with other features than a
# plain call's. Triton 3.6 and 3.7 take up to 296 and 632, and up to 56 with a bias (3.9: 104)
# and 64 with a mask (3.9: 208). With dropout, up to 448 in the joint launch and 176 in that of dQ (3.6).
SPILL_BOUNDS = {"plain": 384, "features": 768, "trained bias": 192, "mask": 256, "dropout": 512}


@pytest.mark.parametrize(
    "features",
    ["plain", "dropout", *(pytest.param(f, marks=pytest.mark.full) for f in ("features", "trained bias", "mask"))],
)
@pytest.mark.parametrize(
    "dims",
    [(128, 128), (256, 256), *(pytest.param(d, marks=pytest.mark.full) for d in ((64, 64), (192, 128)))],
    ids=str,
)
def test_it_compiles_within_its_limits(dims: tuple[int, int], features: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", CODE, *map(str, dims), features]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    products = (WITH_BIAS if features == "trained bias" else PRODUCTS)[dims]
    for line in run.stdout.splitlines():
        facts: dict[str, Any] = json.loads(line)
        for name, launch in facts["launches"].items():
            assert not launch["mixed_descriptors"]
            if name not in products:
                assert launch["spill_bytes"] == 0, name
                continue
            instructions = launch["instructions"]
            assert launch["spill_bytes"] <= SPILL_BOUNDS[features], name
            assert launch["smem_bytes"] <= facts["bound"] <= 227 * 1024, name
            assert instructions["HGMMA"] == products[name], name
            # ptxas that lacks registers waits for each product before the next, with two such instructions each.
            assert instructions["WARPGROUP"] < instructions["HGMMA"], f"{name}: products one after another"
            if name == "joint_kernel":
                assert instructions["UTMAREDG"] == 2, "each group's share of dQ is added by the copy engine"
