"""Every Triton kernel compiles for every target, within its limits. No GPU is needed.

Compiling does not check that shared memory fits, nor that nothing spills: both are asserted here, on the config each
target gets by default. 16-bit types up to head_dim 128 do not spill anywhere, whatever the mask; what does spill is
listed in SPILL_BOUNDS with what it may take, so that a change of kernel or compiler cannot quietly make it worse.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from tests.marks import needs_triton, one_in
from warpwave.gpu import ARCHS

pytestmark = needs_triton

TARGETS = (
    *("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"),
    *("gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"),
)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"causal": "bottom_right", "window_size": (128, -1)},
    "mask": {"mask_shape": (2, 1, 1024, 1024)},
    "bias": {"bias_shape": (1, 4, 1024, 1024), "bias_dtype": "float32"},
    "alibi": {"causal": "bottom_right", "alibi_shape": (4,)},
    "softcap and sinks": {"causal": "bottom_right", "softcap": 15.0, "has_sinks": True},
    "packed": {"packed": True, "total_q": 2048, "total_k": 2048, "causal": "bottom_right"},
}
# What flash_fwd and flash_bwd take besides.
FLASH_FEATURES = FEATURES | {"dropout": {"causal": "bottom_right", "dropout_p": 0.1}}
# Bytes of local memory a thread may take, by target family, dtype and head_dim, over all features. About a quarter more
# than the most seen with Triton 3.7.1 on 2026-11-23. What is not listed takes none.
SPILL_BOUNDS = {
    ("nvidia", "16-bit", 192): 352,
    ("nvidia", "16-bit", 256): 352,
    ("nvidia", "float32", 40): 64,
    ("nvidia", "float32", 64): 64,
    ("nvidia", "float32", 128): 320,
    ("nvidia", "float32", 192): 1200,
    ("nvidia", "float32", 256): 1200,
    ("cdna", "16-bit", 192): 64,
    ("cdna", "16-bit", 256): 64,
    ("rdna", "16-bit", 192): 800,
    ("rdna", "16-bit", 256): 800,
    ("rdna", "float32", 40): 64,
    ("rdna", "float32", 64): 64,
    ("rdna", "float32", 128): 1200,
    ("rdna", "float32", 192): 3600,
    ("rdna", "float32", 256): 3600,
}
# The same in 16 bits on cards with `mma` instructions: hardly touched in the loop over whole tiles.
SPILL_BOUNDS_OF_MMA = {40: 320, 64: 320, 80: 192, 128: 192}
WITH_MMA = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_120", "sm_121")


def job(arch: str, dtype: str, head_dim: int, feature: str) -> dict[str, Any]:
    problem = {
        "batch": 2,
        "seqlen_q": 1024,
        "seqlen_k": 1024,
        "num_heads_q": 4,
        "num_heads_kv": 2,
        "head_dim": head_dim,
        "head_dim_v": head_dim,
        "dtype": dtype,
        "softmax_scale": head_dim**-0.5,
        "return_lse": True,
    }
    return {"kernel": "flash_fwd", "arch": arch, "problem": problem | FLASH_FEATURES[feature]}


_workers: list[subprocess.Popen[str]] = []  # one, or none yet


def worker() -> subprocess.Popen[str]:
    """The process that compiles for all tests of this one: to start one takes longer than most kernels do."""
    if not _workers:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        command, pipe = [sys.executable, "-m", "tests.compile.worker"], subprocess.PIPE
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment
        )
        atexit.register(process.kill)
        _workers.append(process)
    return _workers[0]


def compile_all(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What tests/compile/worker.py says of each job. No code for Hopper may read a register that nothing wrote
    (docs/notes/descriptors.md)."""
    process = worker()
    assert process.stdin is not None and process.stdout is not None
    late = threading.Timer(550, process.kill)
    late.start()
    found, said = [], ""
    try:
        for one in jobs:
            process.stdin.write(json.dumps(one) + "\n")
            process.stdin.flush()
            while not (line := process.stdout.readline()).startswith("{"):  # a warning, or a traceback
                said += line
                if not line:
                    raise OSError
            found.append(json.loads(line))
    except OSError:
        _workers.clear()
        pytest.fail(f"the compiler ended at {one}: {said[-2000:]}")
    finally:
        late.cancel()
    for one, facts in zip(jobs, found, strict=True):
        assert not facts.get("unwritten_registers"), (one, facts["unwritten_registers"])
    return found


def family(arch: str) -> str:
    return "rdna" if arch.startswith("gfx1") else "cdna" if arch.startswith("gfx") else "nvidia"


def check(job: dict[str, Any], facts: dict[str, Any], feature: str) -> None:
    arch, dtype, head_dim = job["arch"], job["problem"]["dtype"], job["problem"]["head_dim"]
    what = f"{arch} {dtype} head_dim {head_dim} {feature} {facts['config']}"
    assert facts["smem_bytes"] <= facts["smem_limit"], f"{what}: more shared memory than the GPU has"
    assert facts["smem_bytes"] <= facts["smem_bound"], f"{what}: smem_bytes() is no upper bound"
    assert facts["registers"] <= ARCHS[arch][2], what
    bound = SPILL_BOUNDS.get((family(arch), dtype if dtype == "float32" else "16-bit", head_dim), 0)
    if arch in WITH_MMA and dtype != "float32":
        bound = max(bound, SPILL_BOUNDS_OF_MMA.get(head_dim, 0))
    assert facts["spill_bytes"] <= bound, f"{what}: {facts['spill_bytes']} bytes spilled, the bound is {bound}"
    if dtype != "float32":
        assert matrix_instructions(facts["instructions"], arch) > 0, f"{what}: no matrix instruction"


def matrix_instructions(instructions: dict[str, int], arch: str) -> int:
    names = {"nvidia": ("HMMA", "HGMMA", "UTCHMMA", "UTCQMMA"), "cdna": ("v_mfma",), "rdna": ("v_wmma",)}[family(arch)]
    return sum(count for name, count in instructions.items() if name.startswith(names))


SAMPLE = [("bfloat16", 128, "causal"), ("float16", 64, "mask"), ("bfloat16", 80, "packed")]
WHOLE_SAMPLE = ("sm_80", "sm_90", "gfx942", "gfx1100")  # the other targets take the first point and another, in turn
FULL = [
    (dtype, head_dim, feature)
    for dtype in ("bfloat16", "float16", "float32")
    for head_dim in (40, 64, 128, 192, 256)
    for feature in FLASH_FEATURES
    # float16 differs from bfloat16 in no instruction count; one feature shows that it compiles.
    if not (dtype == "float16" and feature not in ("plain", "mask"))
]


@one_in(3)
@pytest.mark.parametrize("arch", TARGETS)
def test_sample_compiles_within_limits(arch: str) -> None:
    points = SAMPLE if arch in WHOLE_SAMPLE else [SAMPLE[0], SAMPLE[1 + TARGETS.index(arch) % 2]]
    jobs = [job(arch, *point) for point in points]
    for a_job, facts, point in zip(jobs, compile_all(jobs), points, strict=True):
        check(a_job, facts, point[2])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_dropout_compiles_within_limits(arch: str) -> None:
    """A call takes 7 multiplications. A thread of a wgmma instruction uses its four numbers, 1.75 a pair, and one of an
    mma instruction two of them, 3.5. Unshared there would be 7. The keys take three calls."""
    a_job = job(arch, "bfloat16", 128, "dropout")
    (facts,) = compile_all([a_job | {"ptx": not arch.startswith("gfx")}])
    check(a_job, facts, "dropout")
    if "ptx" in facts:
        config = facts["config"]
        pairs = config["block_m"] * config["block_n"] // (32 * config["num_warps"])
        products = facts["ptx"].count("mul.hi.u32") + facts["ptx"].count("mul.wide.u32")
        of_pair = {"sm_80": 3.5, "sm_90": 1.75}[arch]
        assert 0.8 * of_pair * pairs < products <= of_pair * pairs + 21, f"{products} products for {pairs} pairs"


def test_the_probability_of_dropout_does_not_recompile() -> None:
    """Nor does the seed, which is in memory. Without dropout its arguments are absent."""
    from warpwave.cached_calls import operands_without_memory
    from warpwave.gpu import Gpu
    from warpwave.kernels import flash_fwd
    from warpwave.problem import AttentionProblem
    from warpwave.runtime.launch import Launch
    from warpwave.runtime.parameters import parameters

    gpu = Gpu.for_arch("sm_90")
    fields = job("sm_90", "bfloat16", 128, "plain")["problem"]
    specs = []
    for p in (0.0, 1e-9, 0.1, 0.5, 0.75, 0.999):
        problem = AttentionProblem(**fields, dropout_p=p)
        operands = operands_without_memory(problem)
        spec = flash_fwd.specify(problem, gpu, operands, operands.q, None, flash_fwd.Config(64, 64, 4, 3))
        assert isinstance(spec, Launch)
        specs.append(spec)
    without, *others = specs
    assert all((spec.constants, spec.options) == (others[0].constants, others[0].options) for spec in others)
    scalars = [parameter for parameter in parameters(without.kernel) if parameter.kind == "scalar"]
    names = [parameter.name for parameter in scalars]
    threshold, scale = names.index("threshold"), names.index("scale")
    assert all(-(2**31) <= spec.scalars[threshold] < 2**31 for spec in others), "one width of integers"
    assert not scalars[threshold].specialized
    assert without.scalars[threshold] is None and without.scalars[scale] is None and without.tensors[11] is None


@pytest.mark.full
@pytest.mark.parametrize("feature", FLASH_FEATURES)
@pytest.mark.parametrize("arch", TARGETS)
def test_matrix_compiles_within_limits(arch: str, feature: str) -> None:
    points = [point for point in FULL if point[2] == feature]
    jobs = [job(arch, *point) for point in points]
    for a_job, facts, point in zip(jobs, compile_all(jobs), points, strict=True):
        check(a_job, facts, point[2])


def test_hopper_uses_its_own_matrix_instruction() -> None:
    """Losing wgmma would halve the speed and change no result."""
    (facts,) = compile_all([job("sm_90", "bfloat16", 128, "causal")])
    assert facts["instructions"].get("HGMMA", 0) > 0
    assert facts["instructions"].get("LDGSTS", 0) > 0, "K and V are not copied asynchronously"


def test_cdna_computes_scores_once() -> None:
    """64 x 32 scores on four waves are less than one matrix instruction of 32 x 32 a wave. With those, Triton would
    compute the first product twice."""
    (facts,) = compile_all([job("gfx942", "bfloat16", 256, "causal")])
    config, head_dim = facts["config"], 256
    found = {name: count for name, count in facts["instructions"].items() if name.startswith("v_mfma")}
    pairs = config["block_m"] * config["block_n"]
    assert pairs < 32 * 32 * config["num_warps"] and list(found) == ["v_mfma_f32_16x16x16_bf16"]
    assert sum(found.values()) == 2 * pairs * head_dim // (16**3 * config["num_warps"])


def test_lengths_and_causality_do_not_recompile() -> None:
    """A causal mask and a window to the right of 0 are one variant, and no length is baked into the code."""
    from warpwave.cached_calls import operands_without_memory
    from warpwave.gpu import Gpu
    from warpwave.kernels import flash_fwd
    from warpwave.problem import AttentionProblem, Causal
    from warpwave.runtime.launch import Launch

    gpu = Gpu.for_arch("sm_90")
    fields = job("sm_90", "bfloat16", 128, "plain")["problem"]
    variants = []
    for change in ({"causal": Causal()}, {"window_size": (-1, 0)}, {"causal": Causal(), "seqlen_k": 999}):
        problem = AttentionProblem(**(fields | change))
        operands = operands_without_memory(problem)
        spec = flash_fwd.specify(problem, gpu, operands, operands.q, None, flash_fwd.Config(64, 64, 4, 3))
        assert isinstance(spec, Launch)
        variants.append((spec.constants, spec.options))
    assert variants[0] == variants[1] == variants[2]


# What each way of computing float32 products compiles to, by its default config: registers a thread, and bytes spilled.
# On Hopper 128 registers on eight warps let two blocks share an SM. CDNA and RDNA spill nothing at these sizes.
FLOAT32_FACTS: dict[tuple[str, str, int], tuple[int, int]] = {
    ("sm_90", "bf16x3", 64): (128, 0),
    ("sm_90", "bf16x6", 64): (128, 0),
    ("sm_90", "bf16x3", 128): (255, 0),
    ("sm_90", "bf16x6", 128): (255, 0),
    ("sm_90", "bf16x6", 256): (255, 1200),
    ("sm_90", "tf32", 64): (128, 0),  # which bf16x3 stands for
    ("sm_90", "tf32x3", 64): (128, 0),  # which bf16x6 stands for
    ("sm_80", "bf16x3", 64): (255, 0),
    ("sm_80", "bf16x6", 64): (255, 0),
    **{("sm_80", "tf32", head_dim): (255, spilled) for head_dim, spilled in ((64, 0), (128, 0), (256, 256))},
    **{("sm_89", "tf32", head_dim): (255, 0) for head_dim in (64, 128, 256)},
    ("sm_86", "bf16x6", 128): (255, 320),
    ("sm_100", "bf16x6", 64): (255, 0),
    ("sm_120", "bf16x3", 128): (255, 160),
    ("gfx908", "bf16x6", 64): (512, 0),
    ("gfx90a", "tf32", 128): (512, 0),  # which bf16x3 stands for
    ("gfx942", "bf16x6", 128): (512, 0),
    ("gfx942", "tf32x3", 256): (512, 0),  # which bf16x6 stands for
    ("gfx942", "tf32", 64): (512, 0),
    ("gfx950", "bf16x3", 256): (512, 0),
}


@one_in(2)
@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(arch, marks=[] if arch in ("sm_90", "gfx942") else [pytest.mark.full])
        for arch in dict.fromkeys(arch for arch, *_ in FLOAT32_FACTS)
    ],
)
def test_float32_products_compile_within_limits(arch: str) -> None:
    points = [point for point in FLOAT32_FACTS if point[0] == arch]
    jobs = [job(arch, "float32", head_dim, "plain") for _, _, head_dim in points]
    for a_job, (_, name, _) in zip(jobs, points, strict=True):
        a_job["problem"]["precision"] = name
    for facts, point in zip(compile_all(jobs), points, strict=True):
        registers, spilled = FLOAT32_FACTS[point]
        what = f"{point} {facts['config']}: {facts['registers']} registers, {facts['spill_bytes']} bytes spilled"
        assert facts["registers"] <= registers and facts["spill_bytes"] <= spilled, what
        assert facts["smem_bytes"] <= min(facts["smem_bound"], facts["smem_limit"]), what
        attend = facts["launches"][-1]["instructions"]
        assert matrix_instructions(attend, arch) > 0, f"{what}: no matrix instruction"
        if arch == "sm_90":
            assert attend.get("HGMMA", 0) > 0, f"{what}: not Hopper's own matrix instruction"
        if facts["config"]["split_ahead"] and point == ("sm_90", "bf16x6", 64):
            assert attend.get("LDGSTS", 0) > 0, "the parts are not copied asynchronously"
            assert attend.get("F2F", 0) == 0, "parts are converted one by one"


def test_triton_for_amd_takes_the_products_that_the_table_gives_it() -> None:
    """tf32x3 nowhere, tf32 on gfx942 alone: why other arithmetics stand for them (warpwave.precision)."""
    from triton.backends.amd.compiler import HIPBackend
    from triton.backends.compiler import GPUTarget

    from warpwave.gpu import Gpu
    from warpwave.precision import target

    for arch in (arch for arch in TARGETS if arch.startswith("gfx9")):
        allowed = HIPBackend(GPUTarget("hip", arch, 64)).parse_options({}).allowed_dot_input_precisions
        assert "tf32x3" not in allowed and {"ieee", "bf16x3", "bf16x6"} <= set(allowed)
        assert ("tf32" in allowed) == ("tf32" in target(Gpu.for_arch(arch)).costs)
