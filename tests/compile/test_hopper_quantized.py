"""The Hopper forward with quantized operands compiles to what makes it fast: 8-bit products of scores that start
together with the 16-bit products of values, no conversions of scores, and loops over keys without spills."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import pytest

from tests.compile.test_hopper import loops_over_keys
from tests.compile.test_targets import compile_all, job
from tests.marks import needs_triton, one_in
from warpwave.kernels.hopper.flash_fwd.config import Config
from warpwave.kernels.hopper.host import pieces

pytestmark = needs_triton

FEATURES = ("plain", "causal", "window", "alibi", "packed", "mask", "bias")
KINDS = (("int8", "bfloat16"), ("int8", "int8"), ("float8_e4m3fn", "float8_e4m3fn"), ("float8_e4m3fn", "bfloat16"))
SAMPLE = [
    *((KINDS[0], *point) for point in ((128, "causal", 128), (128, "window", 64), (256, "plain", 0))),
    (KINDS[2], 128, "causal", 128),
    (KINDS[2], 64, "plain", 0),
]
WIDTHS = (32, 64, 80, 96, 128, 192, 256)
FULL = [(kind, d, feature, block) for kind in KINDS for d in WIDTHS for feature in FEATURES for block in (0, 64, 128)]
# Configs that a benchmark compares, and defaults.
CONFIGS = [
    *((128, feature, (192, 64, 4)) for feature in ("plain", "causal", "window", "alibi")),
    *((128, feature, (128, 128, 3)) for feature in ("plain", "causal", "window")),
    *((64, feature, (192, 128, 3)) for feature in ("plain", "causal", "window")),
    (256, "plain", (128, 64, 3)),
]
# Bytes of local memory a thread may take: coordinates of a tile. Beside a mask at most 64, with Triton 3.6 and 3.7.
SPILL_BOUND = 128


def quantized_job(kind: tuple[str, str], head_dim: int, feature: str, block: int) -> dict[str, Any]:
    dtype, dtype_v = kind
    made = job("sm_90", dtype, head_dim, feature) | {"kernel": "hopper/flash_fwd", "listing": True}
    has_blocks_of_v = dtype_v != "bfloat16" and feature != "bias"
    blocks = (0, 0, 0) if feature == "packed" else (block, block, block if has_blocks_of_v else 0)
    made["problem"] |= {"dtype_v": dtype_v, "dtype_out": "bfloat16", "descale_blocks": blocks}
    if feature == "bias":
        made["problem"] |= {"bias_dtype": "bfloat16"}
    return made


def check(kind: tuple[str, str], head_dim: int, feature: str, block: int, facts: dict[str, Any]) -> None:
    what, instructions = f"{kind} head_dim {head_dim} {feature} {block} {facts['config']}", facts["instructions"]
    config = facts["config"]
    assert facts["smem_bytes"] <= facts["smem_bound"] <= facts["smem_limit"] // config["blocks_per_sm"], what
    assert facts["spill_bytes"] <= SPILL_BOUND, f"{what}: {facts['spill_bytes']} spilled"
    of_8_bits = instructions.get("IGMMA" if kind[0] == "int8" else "QGMMA", 0)
    assert of_8_bits > 0 and instructions["HGMMA"] > 0, f"{what}: no wgmma of 8 and 16 bits"
    if feature != "alibi":  # whose distances are converted
        assert instructions.get("I2FP", 0) < config["block_n"] // 2, f"{what}: scores are converted"
    assert instructions.get("UTMALDG", 0) > 0 and instructions.get("UTMASTG", 0) > 0, f"{what}: not by TMA"
    assert instructions.get("USETMAXREG", 0) > 0, f"{what}: registers are not handed to the consumers"
    assert not any(facts["mixed_descriptors"]), what
    loops = loops_over_keys(facts["listing"])
    # Where registers do not suffice, ptxas serializes: it waits for every wgmma before it starts the next.
    assert not any(re.search("HWHWHW", loop) for loop in loops), f"{what}: wgmma serialized"
    if config["block_m"] == 64:
        return
    of_scores = sum(pieces(head_dim, 32)) // 32
    of_values = len(pieces(head_dim, config["narrowest_v"])) * config["block_n"] // 16
    products = of_scores + of_values  # of a tile, which start together
    overlapped = [
        loop for loop in loops
        if loop.count("H") == products and re.search(f"H{{{products}}}W", loop.replace("S", ""))
    ]  # fmt: skip
    assert overlapped, f"{what}: {loops}"
    for loop in overlapped:
        # Beside a mask or bias a coordinate is read again, beside a window up to two.
        bound = {"mask": 1, "bias": 1, "window": 2}.get(feature, 0)
        assert loop.count("S") <= bound, f"{what}: the loop spills: {loop}"


@one_in(4)
@pytest.mark.parametrize(("kind", "head_dim", "feature", "block"), SAMPLE)
def test_sample(kind: tuple[str, str], head_dim: int, feature: str, block: int) -> None:
    (facts,) = compile_all([quantized_job(kind, head_dim, feature, block)])
    check(kind, head_dim, feature, block, facts)


@pytest.mark.parametrize(
    ("head_dim", "feature", "config"), [CONFIGS[0], *(pytest.param(*p, marks=pytest.mark.full) for p in CONFIGS[1:])]
)
def test_configs(head_dim: int, feature: str, config: tuple[int, int, int]) -> None:
    (facts,) = compile_all([quantized_job(KINDS[0], head_dim, feature, 0) | {"config": asdict(Config(*config))}])
    check(KINDS[0], head_dim, feature, 0, facts)


@pytest.mark.full
@pytest.mark.parametrize("feature", FEATURES)
def test_matrix(feature: str) -> None:
    points = [point for point in FULL if point[2] == feature and (feature != "packed" or point[3] == 0)]
    for point, facts in zip(points, compile_all([quantized_job(*point) for point in points]), strict=True):
        check(*point, facts)
