"""That launches by the driver lay out the parameters that compiled kernels have, one by one: nothing else would notice
a Triton that drops one or adds one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.marks import needs_triton

pytestmark = needs_triton

PROBLEM = {
    "batch": 2, "seqlen_q": 1024, "seqlen_k": 1024, "num_heads_q": 4, "num_heads_kv": 4, "head_dim": 64,
    "head_dim_v": 64, "dtype": "float16", "softmax_scale": 0.125,
}  # fmt: skip
JOBS: dict[str, dict[str, Any]] = {
    "flash_fwd": {"kernel": "flash_fwd", "problem": PROBLEM},
    "split_kv, by maps and merged": {
        "kernel": "split_kv", "problem": PROBLEM | {"batch": 1, "seqlen_q": 1, "num_heads_kv": 1, "seqlen_k": 4096},
    },
    "hopper/flash_fwd": {"kernel": "hopper/flash_fwd", "problem": PROBLEM},
    "hopper/flash_fwd, float32": {"kernel": "hopper/flash_fwd", "problem": PROBLEM | {"dtype": "float32"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def worker() -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.compile.parameters"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    yield process
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    process.wait()


@pytest.mark.parametrize("job", JOBS)
def test_parameters_are_those_of_the_compiled_kernel(job: str, worker: Any) -> None:
    worker.stdin.write(json.dumps(JOBS[job]) + "\n")
    worker.stdin.flush()
    launches = json.loads(worker.stdout.readline())
    assert launches
    for laid_out, in_ptx in launches:
        assert laid_out == in_ptx
    maps = sum(size == 128 for sizes, _ in launches for size in sizes)
    assert bool(maps) == (job != "flash_fwd")
