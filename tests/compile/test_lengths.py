"""The launcher compiles a kernel once for all lengths, by Triton's own call, and to the code that `inspect` shows."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.marks import needs_triton

pytestmark = needs_triton

# Triton's own call without a GPU: a driver that names the target and launches nothing. A process of its own, for the
# interpreter replaces the compiler for a whole process.
CODE = """
from types import SimpleNamespace
import torch, triton
from triton.backends.compiler import GPUTarget
from warpwave.cached_calls import operands_without_memory
from warpwave.gpu import Gpu
from warpwave.kernels import flash_fwd
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch
from warpwave.workbench.inspect import compiled
torch.cuda.is_current_stream_capturing = lambda: False
triton.runtime.driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0, get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
))
def spec(seqlen, device):
    problem = AttentionProblem(
        batch=2, seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=1, num_heads_kv=1, head_dim=64, head_dim_v=64,
        dtype="float16", softmax_scale=0.125,
    )
    given = operands_without_memory(problem)
    given = type(given)(*[None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
                          for t in given])
    out = torch.empty_like(given.q)
    return flash_fwd.specify(problem, Gpu.for_arch("sm_90"), given, out, None, flash_fwd.Config(64, 64, 4, 1))
found = [launch._compile(spec(seqlen, "cpu")) for seqlen in (1, 16, 33, 48, 1000)]
assert len({id(one) for one in found}) == 1, "another length compiles again"
inspected = compiled._compile(spec(33, "meta"), Gpu.for_arch("sm_90"))
code, shown = (one.asm["ptx"].partition("\\t.file")[0] for one in (found[0], inspected))  # paths come after it
assert code == shown, "inspect shows other code than the launcher launches"
print("compiled once")
"""


def test_lengths_compile_once() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout.endswith("compiled once\n"), run.stderr[-2000:]
