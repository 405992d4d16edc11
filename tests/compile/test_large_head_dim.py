"""The kernels for large heads compile for every target within its limits, use the matrix unit, and do not spill.

Points of the full matrix are few: widths differ in the number of pieces, and features are tried at one width.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.compile import test_targets
from tests.compile.test_hopper import loops_over_keys
from tests.compile.test_targets import TARGETS, compile_all, matrix_instructions
from tests.marks import needs_triton, one_in

pytestmark = needs_triton

# Calls beside those of test_targets.FEATURES: a step of decoding, whose query heads share tiles and whose keys are
# split, and the same with a latent's two widths.
DECODE: dict[str, Any] = {"seqlen_q": 1, "seqlen_k": 8192, "num_heads_q": 16, "num_heads_kv": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "decode": DECODE,
    "decode, latent": DECODE | {"head_dim_v": 512},
    "decode, latent in pages": DECODE | {"head_dim_v": 512, "page_size": 64},
    "gradients": {"requires_grad": True, "causal": "bottom_right"},
}
# Bytes of local memory a thread may take, by kernel, target, dtype, over all widths and features: a little more than
# seen with Triton 3.7.1. On NVIDIA it is a few words, beside a mask and at 640; on RDNA, where head_dim is no multiple
# of 128, much of the accumulator. What is not listed takes none.
SPILL_BOUNDS = {
    **{("large_head_dim", arch, "bfloat16"): 24 for arch in ("sm_86", "sm_89", "sm_90", "sm_120")},
    **{("large_head_dim", arch, "float32"): 32 for arch in TARGETS if arch.startswith("sm_")},
    ("large_head_dim", "gfx1100", "bfloat16"): 720,
    ("large_head_dim", "gfx1201", "float32"): 16,
    ("three_kernel", "sm_100", "float32"): 32,
    **{("three_kernel", arch, "float32"): 8 for arch in ("sm_80", "sm_86", "sm_89", "sm_120")},
    ("three_kernel", "sm_100", "bfloat16"): 24,
    ("three_kernel", "sm_120", "bfloat16"): 24,
}
SAMPLE = [
    ("large_head_dim", "bfloat16", 512, "causal"),
    ("three_kernel", "bfloat16", 320, "causal"),  # fused where two accumulators have room
    ("large_head_dim", "bfloat16", 576, "decode, latent in pages"),
    ("three_kernel", "bfloat16", 1024, "causal"),
    ("three_kernel", "float32", 1024, "plain"),
]
FULL = [
    *(("large_head_dim", "bfloat16", head_dim, "plain") for head_dim in (257, 320, 384, 640, 1024, 8192)),
    *(("large_head_dim", "bfloat16", 512, feature) for feature in (*test_targets.FEATURES, "decode")),
    *(("large_head_dim", "float32", head_dim, "plain") for head_dim in (320, 512)),
    *(("large_head_dim", "float32", 512, feature) for feature in ("mask", "decode")),
    *(("large_head_dim", dtype, 576, "decode, latent") for dtype in ("bfloat16", "float16")),
    *(("three_kernel", "bfloat16", 1024, feature) for feature in (*test_targets.FEATURES, "decode", "gradients")),
    *(("three_kernel", "float32", 1024, feature) for feature in ("plain", "mask", "decode")),
    *(("three_kernel", "bfloat16", head_dim, "causal") for head_dim in (320, 4096)),
    ("three_kernel", "bfloat16", 320, "softcap and sinks"),
]


def job(arch: str, kernel: str, dtype: str, head_dim: int, feature: str) -> dict[str, Any]:
    # What torch multiplies by default would leave little to compile: three_kernel's own products are.
    ours = {"kernel": kernel, "own_products": kernel == "three_kernel"}
    if feature not in SHAPES:
        return test_targets.job(arch, dtype, head_dim, feature) | ours
    plain = test_targets.job(arch, dtype, head_dim, "plain")
    return plain | ours | {"problem": plain["problem"] | SHAPES[feature]}


def check(kernel: str, dtype: str, head_dim: int, feature: str, arch: str, facts: dict[str, Any]) -> None:
    what = f"{kernel} {arch} {dtype} head_dim {head_dim} {feature} {facts['config']}"
    assert facts["smem_bytes"] <= facts["smem_limit"], f"{what}: more shared memory than the GPU has"
    assert facts["smem_bytes"] <= facts["smem_bound"] <= facts["smem_limit"], f"{what}: smem_bytes() is no upper bound"
    bound = SPILL_BOUNDS.get((kernel, arch, dtype), 0)
    assert facts["spill_bytes"] <= bound, f"{what}: {facts['spill_bytes']} bytes spilled, the bound is {bound}"
    if dtype != "float32":
        assert matrix_instructions(facts["instructions"], arch) > 0, f"{what}: no matrix instruction"


def compile_and_check(points: list[tuple[str, str, int, str]], archs: tuple[str, ...]) -> None:
    pairs = [(arch, point) for arch in archs for point in points]
    found = compile_all([job(arch, *point) for arch, point in pairs])
    for (arch, point), facts in zip(pairs, found, strict=True):
        check(*point, arch, facts)


@one_in(3)
@pytest.mark.parametrize("arch", ["sm_86", "sm_90", "gfx942"])
def test_sample_compiles_within_limits(arch: str) -> None:
    """On Hopper all points, elsewhere one of each kernel: in the other architecture, and in less shared memory."""
    compile_and_check(SAMPLE if arch == "sm_90" else SAMPLE[:2], (arch,))


@pytest.mark.full
@pytest.mark.parametrize("arch", TARGETS)
def test_matrix_compiles_within_limits(arch: str) -> None:
    compile_and_check(FULL, (arch,))


@pytest.mark.parametrize(("kernel", "head_dim"), [("large_head_dim", 512), ("three_kernel", 1024)])
def test_hopper_uses_its_own_matrix_instruction(kernel: str, head_dim: int) -> None:
    """Losing wgmma, or asynchronous copies, would halve the speed and change no result."""
    (facts,) = compile_all([job("sm_90", kernel, "bfloat16", head_dim, "plain")])
    products = [launch for launch in facts["launches"] if "softmax" not in launch["name"]]
    assert products
    for launch in products:
        assert launch["instructions"].get("HGMMA", 0) > 0, launch["name"]
        assert launch["instructions"].get("LDGSTS", 0) > 0, f"{launch['name']}: operands are not copied asynchronously"


HOPPER = {"scores": "hopper", "values": "hopper", "block_m": 128, "block_n": 256}


@one_in(2)
@pytest.mark.parametrize("feature", ["plain", "causal"])
def test_hoppers_own_launches(feature: str) -> None:
    """Operands by TMA, no spills, steps multiplied while the one before is handed back, tiles leaving as matrices."""
    point = job("sm_90", "three_kernel", "bfloat16", 1024, feature)
    (facts,) = compile_all([point | {"changes": HOPPER, "listing": True}])
    check("three_kernel", "bfloat16", 1024, feature, "sm_90", facts)
    scores, statistics, values = facts["launches"]
    assert statistics["spill_bytes"] == 0
    for loop in loops_over_keys(facts["listing"]):
        assert "HWHWHW" not in loop and "S" not in loop, f"serialized, or spilled: {loop}"
    for launch in (scores, values):
        instructions = launch["instructions"]
        assert launch["spill_bytes"] == 0, launch["name"]
        assert instructions.get("HGMMA", 0) > 0 and instructions.get("UTMALDG", 0) > 0, launch["name"]
        assert instructions.get("UTMASTG", 0) == 8, f"{launch['name']}: four pieces of each warpgroup"
        assert instructions.get("STSM", 0) == 32, f"{launch['name']}: 64 x 64 x 2 bytes a piece, 16 a thread at once"
        assert instructions.get("USETMAXREG", 0) > 0, f"{launch['name']}: registers are not handed to the consumers"
    assert 256 < scores["instructions"]["MUFU.EX2"] < 300, "a tile of 128 scores a thread, in two warpgroups"


PACKED = {"seqlen_q": 4, "page_size": 64, "packed": True, "total_q": 40}
BY_MAP = {"block_m": 16, "block_n": 64, "block_d": 64, "v_parts": 1, "num_splits": 16, "q_resident": True,
          "num_warps": 4, "num_stages": 2, "by_map": True}  # fmt: skip


@pytest.mark.parametrize("page_size", [0, 64])
def test_latents_on_hopper(page_size: int) -> None:
    """A box of K serves both products: 9 for scores and 8 for values, of 4 instructions each; q and K come by TMA; two
    blocks of 256 threads have a multiprocessor's registers and shared memory."""
    point = job("sm_90", "large_head_dim", "bfloat16", 576, "decode, latent")
    point["problem"] |= {"page_size": page_size}
    (facts,) = compile_all([point | {"config": BY_MAP}])
    attend, merge = facts["launches"]
    assert attend["name"] == "latent_decode_kernel"
    assert attend["spill_bytes"] == merge["spill_bytes"] == 0
    assert attend["registers"] <= 128 and attend["num_warps"] == 8
    assert 2 * (attend["smem_bytes"] + 1024) <= 228 * 1024
    instructions = attend["instructions"]
    assert instructions["HGMMA"] == 4 * (9 + 8) and instructions["UTMALDG"] == 9 + 9
    assert instructions.get("USETMAXREG", 0) > 0


@pytest.mark.parametrize("changes", [{"seqlen_q": 4}, PACKED], ids=str)
def test_latents_of_many_rows_on_hopper(changes: dict[str, Any]) -> None:
    """Scores are 36 instructions a step; values are 4 of each piece, of which either warpgroup has two."""
    point = job("sm_90", "large_head_dim", "bfloat16", 576, "decode, latent")
    point["problem"] |= {"causal": "bottom_right"} | changes
    (facts,) = compile_all([point | {"config": BY_MAP | {"block_m": 64, "num_warps": 16}}])
    attend, merge = facts["launches"]
    assert attend["name"] == "latent_rows_kernel"
    assert attend["spill_bytes"] == merge["spill_bytes"] == 0
    assert attend["num_warps"] == 16 and attend["smem_bytes"] <= facts["smem_bound"] <= facts["smem_limit"]
    instructions = attend["instructions"]
    assert instructions["HGMMA"] == 4 * (9 + 4) and instructions["UTMALDG"] == 9 + 9
    assert instructions.get("USETMAXREG", 0) > 0


def test_the_softmax_moves_whole_vectors() -> None:
    """A row of 2,048 scores: four loads of 16 bytes a thread, and two stores beside the row's two numbers."""
    point = job("sm_90", "three_kernel", "bfloat16", 1024, "plain") | {"own_products": False}
    point["problem"] |= {"seqlen_q": 2048, "seqlen_k": 2048}
    (facts,) = compile_all([point | {"changes": {"scores": "library", "values": "library"}}])
    softmax = next(launch for launch in facts["launches"] if "softmax" in launch["name"])
    assert softmax["instructions"]["LDG"] == 4 and softmax["instructions"]["STG"] <= 4
    assert softmax["spill_bytes"] == 0 and softmax["registers"] <= 64
