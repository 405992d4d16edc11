"""`split_kv`, `partials` and `append_kv` compile for every target, within their limits. No GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from tests.compile.test_targets import TARGETS, compile_all, family, matrix_instructions
from tests.marks import one_in
from warpwave.gpu import ARCHS, Gpu
from warpwave.kernels import reasons
from warpwave.kernels.split_kv.config import Config, one_step, smem_bytes, smem_of_one_step
from warpwave.problem import AttentionProblem

CASES: dict[str, dict[str, Any]] = {
    "decode": {},
    "decode, paged": {"page_size": 16, "causal": "bottom_right"},
    "decode, a large batch": {"page_size": 32, "batch": 64},
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
INT8, FLOAT8 = {"dtype_kv": "int8"}, {"dtype_kv": "float8_e4m3fn"}
HEADS, TOKENS = {"kv_factors": "head"}, {"kv_factors": "token"}
CHUNK = {"seqlen_q": 512, "packed": True, "total_q": 600, "page_size": 16}
# Caches of 8-bit numbers, on the targets that have them.
EIGHT_BIT: dict[str, dict[str, Any]] = {
    "int8, decode": INT8 | TOKENS | {"page_size": 16, "causal": "bottom_right"},
    "float8, decode": FLOAT8 | TOKENS | {"page_size": 16, "causal": "bottom_right"},
    "int8, decode, factors of heads": INT8 | HEADS | {"page_size": 128, "window_size": (512, 0), "has_sinks": True},
    "float8, decode, factors of heads": FLOAT8 | HEADS | {"page_size": 128, "dtype": "float16"},
    "float8, decode, head_dim 64": FLOAT8 | TOKENS | {"head_dim": 64, "head_dim_v": 64, "page_size": 64},
    "float8, decode, head_dim 256": FLOAT8 | TOKENS | {"head_dim": 256, "head_dim_v": 256, "page_size": 16},
    "int8, decode, one token a page": INT8 | TOKENS | {"page_size": 1},
    "int8, batch-invariant": INT8 | HEADS | {"page_size": 16, "batch_invariant": True},
    "int8, chunk": INT8 | TOKENS | CHUNK,
    "float8, chunk": FLOAT8 | HEADS | CHUNK,
    "float8, chunk, head_dim 256": FLOAT8 | TOKENS | CHUNK | {"head_dim": 256, "head_dim_v": 256},
}
SAMPLE = ("decode, paged", "prefill, packed and paged", "int8, chunk")
SAMPLE_OF_FLOAT8 = ("float8, decode", "float8, decode, factors of heads")
# What each option adds to the code, alone and with others: the interpreter accepts what the compiler refuses, such as a
# variable that changes its shape inside a loop, or an absent pointer in a branch that is never taken.
MASK, BIAS = {"mask_shape": (2, 1, 1, 4096)}, {"bias_shape": (1, 8, 1, 4096)}
LONG = {"seqlen_q": 300, "causal": "bottom_right"}
FEATURES: dict[str, dict[str, Any]] = {
    "mask and bias": MASK | BIAS,
    "everything at once": MASK | {"bias_shape": (2, 8, 1, 4096), "bias_dtype": "float32", "alibi_shape": (2, 8)}
    | {"softcap": 15.0, "has_sinks": True, "window_size": (700, 5)},
    "everything at once, prefill": {
        "seqlen_q": 300, "mask_shape": (2, 8, 300, 4096), "bias_shape": (1, 1, 300, 4096), "alibi_shape": (8,),
        "softcap": 15.0, "has_sinks": True, "window_size": (700, 0), "causal": "top_left",
    },
    "everything of a cache, packed": LONG
    | {"packed": True, "total_q": 600, "page_size": 16, "alibi_shape": (2, 8), "softcap": 9.0, "has_sinks": True},
    "a mask over float32": MASK | {"dtype": "float32"},
    "mask": MASK,
    "mask of rows, prefill": {"seqlen_q": 300, "mask_shape": (2, 8, 300, 1)},
    "bias": BIAS,
    "bias, prefill": {"seqlen_q": 300, "bias_shape": (2, 8, 300, 4096)},
    "bias over tf32": BIAS | {"dtype": "float32", "precision": "tf32", "head_dim": 64, "head_dim_v": 64},
    "mask over three products": MASK | {"dtype": "float32", "precision": "tf32x3", "head_dim": 64, "head_dim_v": 64},
    "ALiBi": {"alibi_shape": (8,)},
    "ALiBi of each sequence, cached": {"alibi_shape": (2, 8), "page_size": 64},
    "softcap and window, float16": {"softcap": 15.0, "window_size": (0, 0), "dtype": "float16"},
    "sinks, no LSE": {"has_sinks": True, "return_lse": False},
    "a window of pages of one token": {"window_size": (100, 0), "page_size": 1, "causal": "bottom_right"},
    "packed": {"packed": True, "total_q": 2, "total_k": 8000},
    "packed prefill": {"seqlen_q": 300, "packed": True, "total_q": 500, "total_k": 8000, "causal": "top_left"},
    "batch-invariant": {"batch_invariant": True, "page_size": 16},
    "odd head sizes": {"head_dim": 59, "head_dim_v": 111, "page_size": 32},
    "one kv head": {"num_heads_kv": 1, "num_heads_q": 16, "causal": "bottom_right", "seqlen_q": 3},
}  # fmt: skip
SAMPLED_FEATURES = tuple(FEATURES)[:5]
EVERYTHING = ("everything at once", "everything of a cache, packed")
# Bytes of local memory a thread may take: about a quarter more than the most seen with Triton 3.7.1 on 2026-11-21. What
# is not listed takes none.
SPILL_BOUNDS = {
    ("nvidia", "float8, chunk"): 8,  # sm_120
    ("nvidia", "float8, decode, head_dim 64"): 10,  # sm_100's 8; none elsewhere
    ("nvidia", "decode, one token a page"): 20,  # sm_120's 16; none elsewhere
    ("nvidia", "decode, head_dim 64"): 10,  # sm_80's 8; none elsewhere
    ("nvidia", "decode, large pages"): 10,  # sm_120's 8; none elsewhere
    ("nvidia", "prefill, head_dim 256"): 240,
    ("nvidia", "prefill, packed and paged"): 112,  # sm_120's 88; sm_89's 56
    ("nvidia", "int8, chunk"): 128,  # sm_90's 112
    ("nvidia", "int8, decode, factors of heads"): 10,  # sm_90's 8
    ("nvidia", "float8, chunk, head_dim 256"): 640,  # sm_100's 504; sm_90's 336
    ("rdna", "prefill, head_dim 256"): 256,
    ("rdna", "decode, float32"): 1200,
    ("rdna", "int8, decode"): 256,  # gfx1100's 196; none with two warps
    ("rdna", "int8, decode, factors of heads"): 256,  # gfx1100's 208
    ("rdna", "int8, batch-invariant"): 420,  # gfx1100's 340
    ("rdna", "float8, chunk, head_dim 256"): 200,  # gfx1201's 156
}


def job(arch: str, name: str, **config: Any) -> dict[str, Any]:
    problem = {
        "batch": 2, "seqlen_q": 1, "seqlen_k": 4096, "num_heads_q": 8, "num_heads_kv": 2, "head_dim": 128,
        "head_dim_v": 128, "dtype": "bfloat16", "softmax_scale": 0.1, "return_lse": True,
    }  # fmt: skip
    found = {"kernel": "split_kv", "arch": arch, "problem": problem | (CASES | FEATURES | EIGHT_BIT)[name]}
    return found | {"config": config} if config else found


def check(name: str, arch: str, facts: dict[str, Any]) -> None:
    what = f"{arch} {name} {facts['config']}"
    assert facts["smem_bytes"] <= facts["smem_limit"], f"{what}: more shared memory than the GPU has"
    assert facts["smem_bytes"] <= facts["smem_bound"], f"{what}: smem_bytes() is no upper bound"
    assert facts["registers"] <= ARCHS[arch][2], what
    bound = SPILL_BOUNDS.get((family(arch), name), 0)
    assert facts["spill_bytes"] <= bound, f"{what}: {facts['spill_bytes']} bytes spilled, the bound is {bound}"
    merges = max(facts["config"]["num_splits"], facts["config"]["pieces"]) > 1
    assert len(facts["launches"]) == (2 if merges else 1)
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


@pytest.mark.full
@pytest.mark.parametrize("arch", TARGETS)
def test_caches_of_8_bits_compile_within_limits(arch: str) -> None:
    able = not reasons.of_float8(Gpu.for_arch(arch))
    compile_and_check(arch, tuple(name for name in EIGHT_BIT if able or "int8" in name))


def test_keys_are_copied_asynchronously_on_nvidia() -> None:
    """Through the page table too, and in 8 bits: losing it would leave memory's latency bare, and change no result."""
    names = ("decode", "decode, large pages", *SAMPLE_OF_FLOAT8)
    config = {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3}
    for name, facts in zip(names, compile_all([job("sm_90", name, **config) for name in names]), strict=True):
        assert facts["instructions"].get("LDGSTS", 0) > 0, f"{name}: K and V are not copied asynchronously"
        assert "float8" not in name or facts["spill_bytes"] == 0, name


def test_tensor_maps_bring_keys() -> None:
    """All of them where a dense sequence ends with its tensor; what lies at edges also by pointers."""
    config = {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3, "by_map": True}
    mapped = [("sm_90", "decode"), ("sm_90", "decode, large pages"), ("sm_100", "decode"), ("sm_120", "decode")]
    unserved = ("decode, mask", "decode, paged", "decode, float32")  # which maps cannot serve
    jobs = [job(arch, name, **config) for arch, name in mapped]
    jobs += [job("sm_90", name, **(config | {"block_n": 32})) for name in unserved]
    found = compile_all(jobs)  # in one process, whose start takes longer than a kernel does
    for (arch, name), facts in zip(mapped, found, strict=False):
        assert facts["instructions"]["UTMALDG"] >= 4 and facts["spill_bytes"] <= 16, (arch, name, facts)
        assert facts["smem_bytes"] <= facts["smem_bound"] and matrix_instructions(facts["instructions"], arch) > 0
    for name, facts in zip(unserved, found[len(mapped) :], strict=True):
        assert "UTMALDG" not in facts["instructions"], name


@one_in(3)
@pytest.mark.parametrize("arch", ["sm_86", "sm_90", "gfx942"])
def test_queries_that_come_beside_keys_fit_shared_memory(arch: str) -> None:
    """Where each split has one tile of keys, Q has as many buffers as the keys, if these fit."""
    sizes, found = {"seqlen_q": 64, "seqlen_k": 64, "num_heads_kv": 8}, set()
    config = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_splits": 2}
    jobs = [
        a_job | {"problem": a_job["problem"] | sizes | {"head_dim": width, "head_dim_v": width}}
        for width in (64, 128, 256)
        for a_job in (job(arch, "decode", **config, num_stages=stages) for stages in (2, 4))
    ]
    for a_job, facts in zip(jobs, compile_all(jobs), strict=True):
        given = AttentionProblem(**a_job["problem"]), Gpu.for_arch(arch), Config(**a_job["config"])
        is_beside = one_step(*given)
        found.add(is_beside)
        assert facts["smem_bytes"] <= (smem_of_one_step if is_beside else smem_bytes)(*given)
        assert not is_beside or facts["smem_bytes"] <= facts["smem_limit"]
    assert found == {True, False}


def compile_features(arch: str, names: tuple[str, ...]) -> None:
    """Compiles each by the default config and, where that one does not split the keys, with three splits."""
    jobs = [job(arch, name) for name in names]
    found = compile_all(jobs)
    others = [
        one | {"config": facts["config"] | {"num_splits": 3}}
        for one, facts in zip(jobs, found, strict=True)
        if facts["config"]["num_splits"] == 1 and not (facts["config"]["pieces"] or facts["config"]["roles"])
    ]
    for one, facts in zip((*jobs, *others), (*found, *compile_all(others)), strict=True):
        what = f"{arch} {one['problem']} {facts['config']}"
        assert facts["smem_bytes"] <= facts["smem_limit"] and facts["smem_bytes"] <= facts["smem_bound"], what
        assert facts["registers"] <= ARCHS[arch][2], what


@one_in(2)
@pytest.mark.parametrize(("arch", "names"), [("sm_90", SAMPLED_FEATURES), ("gfx942", EVERYTHING)])
def test_sampled_features_compile(arch: str, names: tuple[str, ...]) -> None:
    compile_features(arch, names)


@pytest.mark.full
@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "gfx942"])
def test_every_feature_compiles(arch: str) -> None:
    compile_features(arch, tuple(FEATURES))


def test_launches_ahead_wait_for_the_one_before() -> None:
    """What begins before the launch in front of it has ended must not read what that writes."""
    config = {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 2, "num_splits": 4, "launched_ahead": True}
    cases = (("decode", True), ("decode, paged", False))
    found = compile_all([job("sm_90", name, **(config | {"launched_ahead": ahead})) for name, ahead in cases])
    for (name, ahead), facts in zip(cases, found, strict=True):
        assert all(("ACQBULK" in launch["instructions"]) == ahead for launch in facts["launches"]), name


def test_append_compiles() -> None:
    """With new keys, with queries to rotate, with both; packed or not, rows named or not, rotated or not. And into
    pages of 8 bits, with factors of heads and of tokens. gfx942 takes both parts at once only."""
    code = (
        "import itertools, torch\n"
        "from warpwave.workbench.inspect.compiled import compile_launch\n"
        "from warpwave.gpu import Gpu\n"
        "from warpwave.kernels import append_kv as a\n"
        "e = lambda *s, d=torch.bfloat16: torch.empty(s, dtype=d, device='meta')\n"
        "i, f = torch.int32, torch.float32\n"
        "for arch, what, packed in itertools.product(('sm_90', 'gfx942'), ('kv', 'q', 'kvq'), (False, True)):\n"
        "    if arch == 'gfx942' and what != 'kvq':\n"
        "        continue\n"
        "    lead = (9,) if packed else (2, 1)\n"
        "    kv = e(*lead, 2, 128) if 'k' in what else None\n"
        "    q = e(*lead, 8, 128) if 'q' in what else None\n"
        "    angles = e(99, 64, d=f) if 'q' in what else None\n"
        "    new = a.New(kv, kv, q, q, e(9, 16, 2, 128), e(9, 16, 2, 128), e(4, 8, d=i), e(4, d=i),\n"
        "        None if packed else e(2, d=i), e(3, d=i) if packed else None, angles, angles)\n"
        "    facts = compile_launch(a.specify(new, 5, True), Gpu.for_arch(arch)).facts\n"
        "    assert facts.spill_bytes == 0, (arch, what, packed, facts)\n"
        "    print(arch, what, packed)\n"
        "for arch, dtype, factors in itertools.product(('sm_90', 'gfx942'), (torch.int8, torch.float8_e4m3fn), 'ht'):\n"
        "    kv, pool = e(2, 1, 2, 128), e(9, 16, 2, 128, d=dtype)\n"
        "    factor = e(2, d=f) if factors == 'h' else e(9, 16, 2, d=f)\n"
        "    q, angles = e(2, 1, 8, 128), e(99, 64, d=f)\n"
        "    new = a.New(kv, kv, q, q, pool, pool, e(4, 8, d=i), e(4, d=i), e(2, d=i), None,\n"
        "        angles, angles, factor, factor)\n"
        "    facts = compile_launch(a.specify(new, 5, True), Gpu.for_arch(arch)).facts\n"
        "    assert facts.spill_bytes == 0, (arch, dtype, factors, facts)\n"
        "    print(arch, dtype, factors)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert len(run.stdout.splitlines()) == 16, run.stderr[-2000:]
