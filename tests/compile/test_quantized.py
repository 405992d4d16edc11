"""Quantized launches compile for every target that has their numbers, within its limits and by its 8-bit instructions.
No GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.compile.test_targets import FEATURES, TARGETS, WITH_MMA, compile_all, family
from tests.compile.test_targets import job as job_of
from tests.marks import one_in
from warpwave.gpu import ARCHS, Gpu
from warpwave.kernels import reasons
from warpwave.kernels.quantize_tensor import Source, smem_bytes, specify

# (dtype of q and k, of v, of out)
KINDS = (
    ("float8_e4m3fn", "float8_e4m3fn", "bfloat16"),
    ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fn"),
    ("float8_e5m2", "float8_e5m2", "float16"),
    ("int8", "int8", "bfloat16"),
    ("int8", "float16", "float16"),
    ("int8", "bfloat16", "bfloat16"),
    ("float8_e4m3fn", "bfloat16", "bfloat16"),
)
SAMPLE = [(KINDS[0], 128, "causal"), (KINDS[3], 64, "mask"), (KINDS[4], 128, "packed")]
FULL = [(kind, head_dim, feature) for kind in KINDS for head_dim in (40, 64, 128, 256) for feature in FEATURES]
# Instructions of the first product, by target; Triton multiplies float8 in float16 on gfx942, whose own float8 has
# other exponents.
EIGHT_BIT = {
    "float8": (
        "QMMA",
        "QGMMA",
        "UTCQMMA",
        "v_mfma_f32_32x32x64_f8f6f4",
        "v_wmma_f32_16x16x16_fp8",
        "v_wmma_f32_16x16x16_bf8",
    ),
    "int8": ("IMMA", "IGMMA", "v_mfma_i32", "v_wmma_i32"),
}
# Bytes of local memory of a thread, by target family and head_dim. What is not listed takes none.
SPILL_BOUNDS = {("nvidia", 256): 800, ("cdna", 256): 400, ("rdna", 256): 1600}
MASKED = 300  # with a tile of mask or bias
OF_MMA = 208  # on cards with `mma` instructions; tiles were measured in 16 bits


def job(arch: str, kind: tuple[str, str, str], head_dim: int, feature: str) -> dict[str, Any]:
    dtype, dtype_v, dtype_out = kind
    a_job = job_of(arch, dtype, head_dim, feature)
    block = 0 if feature == "packed" else 64
    a_job["problem"] |= {"dtype_v": dtype_v, "dtype_out": dtype_out}
    a_job["problem"]["descale_blocks"] = (block, block, block if dtype_v in (*KINDS[1], "int8", "float8_e5m2") else 0)
    return a_job


def able(arch: str, dtype: str) -> bool:
    gpu = Gpu.for_arch(arch)
    return dtype == "int8" or gpu.capability >= reasons.FLOAT8_CAPABILITY or arch in reasons.FLOAT8_ON_AMD


def check(a_job: dict[str, Any], facts: dict[str, Any], feature: str) -> None:
    arch, dtype, head_dim = a_job["arch"], a_job["problem"]["dtype"], a_job["problem"]["head_dim"]
    what = f"{arch} {dtype} v {a_job['problem']['dtype_v']} head_dim {head_dim} {feature} {facts['config']}"
    assert facts["smem_bytes"] <= facts["smem_limit"], f"{what}: more shared memory than the GPU has"
    assert facts["smem_bytes"] <= facts["smem_bound"], f"{what}: smem_bytes() is no upper bound"
    assert facts["registers"] <= ARCHS[arch][2], what
    bound = SPILL_BOUNDS.get((family(arch), head_dim), 0)
    if arch in WITH_MMA:
        bound = max(bound, OF_MMA)
    if feature in ("mask", "bias"):
        bound = max(bound, MASKED)
    assert facts["spill_bytes"] <= bound, f"{what}: {facts['spill_bytes']} bytes spilled, the bound is {bound}"
    names = EIGHT_BIT["int8" if dtype == "int8" else "float8"]
    found = sum(count for name, count in facts["instructions"].items() if name.startswith(names))
    assert found or (arch == "gfx942" and dtype != "int8"), f"{what}: no matrix instruction of 8 bits"
    assert not any(facts.get("mixed_descriptors", ())), what


@one_in(3)
@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=[] if a in ("sm_80", "sm_90", "gfx942") else [pytest.mark.full]) for a in TARGETS]
)
def test_sample_compiles_within_limits(arch: str) -> None:
    points = [point for point in SAMPLE if able(arch, point[0][0])]
    jobs = [job(arch, *point) for point in points]
    for a_job, facts, point in zip(jobs, compile_all(jobs), points, strict=True):
        check(a_job, facts, point[2])


@pytest.mark.full
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("arch", TARGETS)
def test_matrix_compiles_within_limits(arch: str, feature: str) -> None:
    points = [point for point in FULL if point[2] == feature and able(arch, point[0][0])]
    jobs = [job(arch, *point) for point in points]
    for a_job, facts, point in zip(jobs, compile_all(jobs), points, strict=True):
        check(a_job, facts, point[2])


@pytest.mark.parametrize("head_dim", [16, 48, 64, 128, 256])
def test_a_quantizing_launch_reads_and_writes_whole_rows(head_dim: int) -> None:
    """Its strides have the unit that lets the compiler see aligned rows, and its shared memory is stated."""
    x = torch.empty(2, 300, 4, head_dim, dtype=torch.bfloat16, device="meta")
    source = Source(x, torch.float8_e4m3fn, 128, None, False, 1.0, None, 0)
    factor = torch.empty(2, 4, 3, device="meta")
    counts = torch.zeros(1, dtype=torch.int64, device="meta")
    tensors = (x, x.to(source.dtype), factor, None, None, None, counts, None)
    launch = specify(source, "block", tensors, 128, 3)
    assert launch.grid == 3 * 4 * 2 and launch.constants["STRIDE_UNIT"] == 16
    assert smem_bytes(source) >= 2 * 128 * head_dim
