"""The first rungs of the ladder compile for every target within its limits, and are what they say: `tiled` multiplies
by the matrix unit out of shared memory, `naive` by neither."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compile import test_targets
from tests.compile.test_targets import TARGETS, compile_all, family, matrix_instructions
from tests.marks import needs_triton

pytestmark = needs_triton

SAMPLE = [("tiled", "bfloat16", 128, "causal"), ("naive", "float32", 64, "mask")]
FULL = [
    (kernel, dtype, head_dim, feature)
    for kernel, head_dims in (("tiled", (40, 64, 128, 256)), ("naive", (64,)))  # naive walks head_dim one by one
    for dtype in ("bfloat16", "float16", "float32")
    for head_dim in head_dims
    for feature in test_targets.FEATURES
    # What is done to scores is done in one launch, which knows neither dtype nor head_dim. float16 differs from
    # bfloat16 in no instruction count; one point shows that it compiles.
    if (feature in ("plain", "packed") and dtype != "float16") or (feature, head_dim) == ("plain", 64)
    or (dtype, head_dim) == ("bfloat16", 64)
]  # fmt: skip


def check(kernel: str, dtype: str, head_dim: int, feature: str, arch: str, facts: dict[str, Any]) -> None:
    job = test_targets.job(arch, dtype, head_dim, feature) | {"kernel": kernel}
    what = f"{kernel} {arch} {dtype} head_dim {head_dim} {feature} {facts['config']}"
    scores, softmax, values = facts["launches"]
    assert softmax["spill_bytes"] == 0, what
    if kernel == "tiled":
        test_targets.check(job, facts, feature)
        # RDNA has none for float32; ieee precision, which takes NVIDIA's matrix unit away, is not the default.
        if not (family(arch) == "rdna" and dtype == "float32"):
            assert matrix_instructions(scores["instructions"], arch) > 0, what
            assert matrix_instructions(values["instructions"], arch) > 0, what
        assert min(scores["smem_bytes"], values["smem_bytes"]) > 0, what
    else:
        assert facts["spill_bytes"] == 0, what
        assert facts["smem_bytes"] <= facts["smem_bound"], what
        assert scores["smem_bytes"] == values["smem_bytes"] == 0, what
        assert matrix_instructions(facts["instructions"], arch) == 0, what


def compile_and_check(points: list[tuple[str, str, int, str]], archs: tuple[str, ...]) -> None:
    pairs = [(arch, point) for arch in archs for point in points]
    jobs = [test_targets.job(arch, *point[1:]) | {"kernel": point[0]} for arch, point in pairs]
    for (arch, point), facts in zip(pairs, compile_all(jobs), strict=True):
        check(*point, arch, facts)


def test_sample_compiles_within_limits() -> None:
    compile_and_check(SAMPLE, ("sm_90", "gfx942"))


@pytest.mark.full
@pytest.mark.parametrize("arch", TARGETS)
def test_matrix_compiles_within_limits(arch: str) -> None:
    compile_and_check(FULL, (arch,))


def test_scores_move_sixteen_bytes_a_thread() -> None:
    """Their traffic bounds the kernel; one element at a time would treble the instructions and change no result."""
    (facts,) = compile_all([test_targets.job("sm_90", "bfloat16", 64, "causal") | {"kernel": "tiled"}])
    scores, softmax, values = (launch["instructions"] for launch in facts["launches"])
    # 128 x 128 scores over 256 threads, 4 a store; 16 x 128 over 256 threads, 4 a store; P in three stages of 32 keys,
    # 4 a copy, beside v, 8 a copy.
    assert scores["STG"] == 128 * 128 // 256 // 4
    assert softmax["STG"] == 16 * 128 // 256 // 4 + 2
    assert values["LDGSTS"] <= 3 * (128 * 32 // 256 // 4 + 2)
