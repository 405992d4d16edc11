"""The launches of `flash_bwd` compile for every target, within its limits. No GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compile import test_targets
from tests.compile.test_hopper import loops_over_keys
from tests.compile.test_targets import FLASH_FEATURES, TARGETS, WITH_MMA, compile_all, matrix_instructions
from tests.marks import needs_triton, one_in

pytestmark = needs_triton

# Bytes of local memory a thread may take, by dtype and head_dim, where not none. With Triton 3.7.1.
SAMPLE = ("sm_80", "gfx942")
SPILL_BOUNDS = {64: 192, 128: 272, 256: 256}  # on Hopper, outside the loops over tiles


def job(arch: str, dtype: str, head_dim: int, feature: str) -> dict[str, Any]:
    return test_targets.job(arch, dtype, head_dim, feature) | {"kernel": "flash_bwd"}


def check(job: dict[str, Any], facts: dict[str, Any]) -> None:
    for launch in facts["launches"]:
        what = f"{job} {facts['config']} {launch['name']}: {launch['smem_bytes']} bytes of shared memory"
        assert launch["smem_bytes"] <= min(facts["bound"], facts["limit"]), what
        assert not launch["mixed_descriptors"], what
        if launch["name"] == "zero_unwritten_kernel":
            assert launch["spill_bytes"] == 0, what
        elif job["problem"]["dtype"] != "float32":
            assert matrix_instructions(launch["instructions"], job["arch"]) > 0, what
            if job["arch"] in WITH_MMA:  # ptxas sometimes gives a thread 32 registers, and spills thousands of bytes
                most = 1024 if "dbias" in launch["name"] else 640  # of a bias, hardly in the loop
                assert launch["spill_bytes"] <= most, f"{what}, {launch['spill_bytes']} bytes spilled"


@one_in(3)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_loops_on_hopper_have_no_mask_in_whole_tiles_and_spill_nothing(head_dim: int) -> None:
    (facts,) = compile_all([job("sm_90", "bfloat16", head_dim, "causal") | {"listing": True}])
    check(job("sm_90", "bfloat16", head_dim, "causal"), facts)
    for launch in facts["launches"]:
        what = f"{facts['config']} {launch['name']}: {launch['spill_bytes']} bytes spilled"
        assert launch["spill_bytes"] <= SPILL_BOUNDS[head_dim], what
        assert launch["instructions"].get("LDGSTS", 0) > 0, what
        loops = loops_over_keys(launch["listing"], FSEL="s")
        assert len(loops) == 2 and not any("S" in loop for loop in loops), what
        assert sorted("s" in loop for loop in loops) == [False, True], what


@one_in(2)
@pytest.mark.parametrize("arch", [pytest.param(a, marks=[] if a in SAMPLE else [pytest.mark.full]) for a in TARGETS])
def test_sample_compiles_within_limits(arch: str) -> None:
    jobs = [job(arch, "bfloat16", 128, "bias"), job(arch, "bfloat16", 96, "causal")]
    for a_job, facts in zip(jobs, compile_all(jobs), strict=True):
        check(a_job, facts)


# Bytes of local memory a thread of a launch may take with dropout at head_dim 128, with Triton 3.7.1.
SPILLED_WITH_DROPOUT = {"sm_80": 400, "sm_90": 272, "gfx942": 0}


@pytest.mark.parametrize("arch", ["sm_90", *(pytest.param(a, marks=pytest.mark.full) for a in ("sm_80", "gfx942"))])
def test_dropout_compiles_within_limits(arch: str) -> None:
    a_job = job(arch, "bfloat16", 128, "dropout")
    (facts,) = compile_all([a_job])
    check(a_job, facts)
    for launch in facts["launches"]:
        what = f"{arch} {launch['name']}: {launch['spill_bytes']} bytes spilled"
        assert launch["spill_bytes"] <= SPILLED_WITH_DROPOUT[arch], what


@pytest.mark.full
@pytest.mark.parametrize("feature", FLASH_FEATURES)
@pytest.mark.parametrize("arch", TARGETS)
def test_matrix_compiles_within_limits(arch: str, feature: str) -> None:
    jobs = [
        job(arch, dtype, d, feature) for dtype in ("bfloat16", "float32") for d in (40, 64, 80, 96, 128, 160, 192, 256)
    ]
    if feature in ("mask", "bias") and arch in ("sm_86", "sm_89", "sm_120"):
        del jobs[-3:]  # float32 above head_dim 128, which no tile fits (tests/kernels/flash_bwd/test_host.py)
    for a_job, facts in zip(jobs, compile_all(jobs), strict=True):
        check(a_job, facts)


# (queries, keys, head_dim) -> bytes of local memory a thread of the joint launch may take without a mask and groups.
# 128 rows on few keys take the most shared memory on Hopper: a gradient beside the operands.
JOINT = {
    "sm_80": {(16, 16, 64): 0, (64, 64, 128): 0},
    "sm_90": {(128, 16, 128): 0, (128, 32, 128): 0, (64, 64, 256): 320, (64, 128, 64): 0},
    "gfx942": {(16, 16, 64): 0, (64, 64, 128): 0},
    "gfx1100": {(32, 32, 64): 0},
}


# (queries, keys, head_dim, feature) of calls whose blocks walk one side -> bytes of local memory a thread may take.
ONE_SIDE = {
    (7, 4096, 16, "plain"): 0,
    (32, 257, 64, "padding"): 0,
    (64, 1601, 64, "padding"): 0,
    (64, 1601, 64, "mask"): 340,
    (100, 850, 32, "plain"): 128,
    (100, 850, 32, "padding"): 240,
    (16, 576, 128, "dropout"): 0,
    (64, 512, 128, "plain"): 64,
    (64, 512, 128, "padding"): 176,
    (64, 512, 128, "mask"): 176,
    (32, 2048, 256, "plain"): 0,
    (32, 2048, 256, "padding"): 240,
    (32, 2048, 256, "mask"): 340,
    (4096, 7, 16, "padding"): 0,
    (3136, 49, 64, "padding"): 0,
    (1024, 32, 128, "plain"): 256,
    (1024, 16, 72, "plain"): 160,
    (4096, 77, 40, "plain"): 0,
    (1024, 77, 80, "plain"): 288,
    (1024, 77, 80, "padding"): 288,
}
MOST_COMPILED = 4  # of these in every run


@pytest.mark.parametrize(
    ("call", "spill_bytes"),
    [
        pytest.param(*item, marks=[pytest.mark.full] if n >= MOST_COMPILED else [])
        for n, item in enumerate(ONE_SIDE.items())
    ],
    ids=str,
)
def test_joint_launches_of_one_side_compile_within_limits(call: tuple[int, int, int, str], spill_bytes: int) -> None:
    seqlen_q, seqlen_k, head_dim, feature = call
    plain = job("sm_90", "bfloat16", head_dim, "mask" if feature == "padding" else feature)
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "num_heads_kv": plain["problem"]["num_heads_q"]}
    if feature == "mask":
        sizes["mask_shape"] = (1, 1, seqlen_q, seqlen_k)
    elif feature == "padding":
        sizes["mask_shape"] = (1, 1, 1, seqlen_k)
    (facts,) = compile_all([plain | {"problem": plain["problem"] | sizes}])
    check(plain, facts | {"launches": facts["launches"][:1]})  # the addition of parts has no products
    assert facts["launches"][0]["name"] == "flash_bwd_one_side_kernel"
    assert facts["launches"][0]["spill_bytes"] <= spill_bytes, facts["launches"][0]["spill_bytes"]


@pytest.mark.parametrize("arch", [pytest.param(a, marks=[] if a == "sm_90" else [pytest.mark.full]) for a in JOINT])
def test_joint_launches_compile_within_limits(arch: str) -> None:
    jobs = []
    for seqlen_q, seqlen_k, head_dim in JOINT[arch]:
        plain = job(arch, "bfloat16", head_dim, "plain")
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "num_heads_kv": plain["problem"]["num_heads_q"]}
        jobs.append(plain | {"problem": plain["problem"] | sizes})
    for a_job, spill_bytes, facts in zip(jobs, JOINT[arch].values(), compile_all(jobs), strict=True):
        check(a_job, facts)
        (launch,) = facts["launches"]
        assert launch["spill_bytes"] <= spill_bytes, f"{a_job}: {launch['spill_bytes']} bytes spilled"
