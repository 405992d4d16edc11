"""`split_kv`, `partials` and `append_kv` compile for every target, within their limits. No GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from tests.compile.test_targets import TARGETS, compile_all, family, matrix_instructions
from warpwave.hardware.gpu import ARCHS

CASES: dict[str, dict[str, Any]] = {
    "decode": {},
    "decode, paged": {"page_size": 16, "causal": "bottom_right"},
    "decode, one token a page": {"page_size": 1},
    "decode, large pages": {"page_size": 128, "window_size": (512, 0), "has_sinks": True},
    "decode, head_dim 64": {"head_dim": 64, "head_dim_v": 64},
    "decode, head_dim 256": {"head_dim": 256, "head_dim_v": 256, "page_size": 16},
    "decode, 192 and 128": {"head_dim": 192, "page_size": 64},
    "decode, mask": {"mask_shape": (2, 1, 1, 4096)},
    "decode, float32": {"dtype": "float32", "page_size": 16},
    "prefill": {"seqlen_q": 512, "causal": "bottom_right"},
    "prefill, packed and paged": {"seqlen_q": 512, "packed": True, "total_q": 600, "page_size": 16},
    "prefill, head_dim 64": {"seqlen_q": 512, "head_dim": 64, "head_dim_v": 64},
    "prefill, head_dim 256": {"seqlen_q": 512, "head_dim": 256, "head_dim_v": 256},
}
SAMPLE = ("decode, paged", "prefill, packed and paged")
# Bytes of local memory a thread may take: about a quarter more than the most seen with Triton 3.7.1 on 2026-11-21. What
# is not listed takes none.
SPILL_BOUNDS = {
    ("nvidia", "prefill, head_dim 256"): 32,
    ("nvidia", "prefill, packed and paged"): 32,
    ("rdna", "prefill, head_dim 256"): 256,
    ("rdna", "decode, float32"): 1200,
}


def job(arch: str, name: str, **config: Any) -> dict[str, Any]:
    problem = {
        "batch": 2, "seqlen_q": 1, "seqlen_k": 4096, "num_heads_q": 8, "num_heads_kv": 2, "head_dim": 128,
        "head_dim_v": 128, "dtype": "bfloat16", "softmax_scale": 0.1, "return_lse": True,
    }  # fmt: skip
    found = {"kernel": "split_kv", "arch": arch, "problem": problem | CASES[name]}
    return found | {"config": config} if config else found


def check(name: str, arch: str, facts: dict[str, Any]) -> None:
    what = f"{arch} {name} {facts['config']}"
    assert facts["smem_bytes"] <= facts["smem_limit"], f"{what}: more shared memory than the GPU has"
    assert facts["smem_bytes"] <= facts["smem_bound"], f"{what}: smem_bytes() is no upper bound"
    assert facts["registers"] <= ARCHS[arch][2], what
    bound = SPILL_BOUNDS.get((family(arch), name), 0)
    assert facts["spill_bytes"] <= bound, f"{what}: {facts['spill_bytes']} bytes spilled, the bound is {bound}"
    assert len(facts["launches"]) == (2 if facts["config"]["num_splits"] > 1 else 1)
    if "float32" not in name:
        assert matrix_instructions(facts["instructions"], arch) > 0, f"{what}: no matrix instruction"


def compile_and_check(arch: str, names: tuple[str, ...]) -> None:
    for name, facts in zip(names, compile_all([job(arch, name) for name in names]), strict=True):
        check(name, arch, facts)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_sample_compiles_within_limits(arch: str) -> None:
    compile_and_check(arch, SAMPLE)


@pytest.mark.full
@pytest.mark.parametrize("arch", TARGETS)
def test_matrix_compiles_within_limits(arch: str) -> None:
    compile_and_check(arch, tuple(CASES))


def test_keys_are_copied_asynchronously_on_nvidia() -> None:
    """Through the page table too: losing it would leave memory's latency bare, and change no result."""
    names = ("decode", "decode, large pages")
    for name, facts in zip(names, compile_all([job("sm_90", name) for name in names]), strict=True):
        assert facts["instructions"].get("LDGSTS", 0) > 0, f"{name}: K and V are not copied asynchronously"


def test_the_last_block_merges_in_the_same_launch() -> None:
    config = {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 2, "num_splits": 4, "merge": "last_block"}
    (facts,) = compile_all([job("sm_90", "decode", **config)])
    assert len(facts["launches"]) == 1 and facts["spill_bytes"] == 0
    assert any(name.startswith(("ATOM", "RED")) for name in facts["instructions"])


def test_append_compiles() -> None:
    code = (
        "import torch\n"
        "from warpwave.compiled import compile_launch\n"
        "from warpwave.hardware.gpu import Gpu\n"
        "from warpwave.kernels import append_kv as a\n"
        "e = lambda *s, d=torch.bfloat16: torch.empty(s, dtype=d, device='meta')\n"
        "i = torch.int32\n"
        "for arch in ('sm_90', 'gfx942'):\n"
        "    new = a.New(e(2, 1, 2, 128), e(2, 1, 2, 128), e(2, 1, 8, 128), e(2, 1, 8, 128), e(9, 16, 2, 128),\n"
        "        e(9, 16, 2, 128), e(4, 8, d=i), e(4, d=i), e(2, d=i), None, e(99, 64, d=torch.float32),\n"
        "        e(99, 64, d=torch.float32))\n"
        "    facts = compile_launch(a.specify(new, 0, True), Gpu.for_arch(arch)).facts\n"
        "    assert facts.spill_bytes == 0, (arch, facts)\n"
        "    print(arch)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert run.stdout.split() == ["sm_90", "gfx942"], run.stderr[-2000:]
