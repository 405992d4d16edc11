"""The 8-bit Hopper forward compiles to what makes it fast: 8-bit wgmma under way together, a transposition by matrix
loads and stores, and loops over keys without spills."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.compile.test_hopper import loops_over_keys
from tests.compile.test_targets import compile_all, job
from warpwave.kernels.hopper.flash_fwd_fp8.config import pieces

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is published for Linux only")

FEATURES = ("plain", "causal", "window", "alibi", "packed")
SAMPLE = [(128, "causal", 128), (256, "plain", 0)]
FULL = [(d, feature, block) for d in (32, 64, 96, 128, 192, 256) for feature in FEATURES for block in (0, 64, 128)]
# Bytes of local memory a thread may take: coordinates of a tile, outside the loops over keys.
SPILL_BOUND = 320


def fp8_job(head_dim: int, feature: str, block: int) -> dict[str, Any]:
    made = job("sm_90", "float8_e4m3fn", head_dim, feature) | {"kernel": "hopper/flash_fwd_fp8", "listing": True}
    blocks = (0, 0, 0) if feature == "packed" else (block, block, block)
    made["problem"] |= {"dtype_v": "float8_e4m3fn", "dtype_out": "bfloat16", "descale_blocks": blocks}
    made["problem"] |= {"seqlen_q": 4096, "seqlen_k": 4096}  # enough for the config of large calls
    made["problem"] |= {"total_q": 8192, "total_k": 8192} if feature == "packed" else {}
    return made


def check(head_dim: int, feature: str, block: int, facts: dict[str, Any]) -> None:
    what, instructions = f"head_dim {head_dim} {feature} {block} {facts['config']}", facts["instructions"]
    assert facts["smem_bytes"] <= facts["smem_bound"] <= facts["smem_limit"], what
    assert facts["spill_bytes"] <= SPILL_BOUND, f"{what}: {facts['spill_bytes']} spilled"
    assert instructions["QGMMA"] > 0 and "HGMMA" not in instructions, f"{what}: no wgmma of 8 bits"
    assert instructions.get("LDSM", 0) > 0 and instructions.get("STSM", 0) > 0, f"{what}: V transposed by bytes"
    assert instructions.get("UTMALDG", 0) > 0 and instructions.get("UTMASTG", 0) > 0, f"{what}: not by TMA"
    assert instructions.get("USETMAXREG", 0) > 0, f"{what}: registers are not handed to the consumers"
    assert not any(facts["mixed_descriptors"]), what
    if facts["config"]["block_m"] == 64:
        return
    width = -(-head_dim // 32) * 32
    block_n = facts["config"]["block_n"]
    # Scores of a tile and the first product with V before the wait, then the other chunks of V one by one.
    scores, of_chunk = width // 32, block_n // 32
    many = sum(-(-piece // 64) for piece in pieces(head_dim))
    loops = loops_over_keys(facts["listing"])
    # Where registers do not suffice, ptxas serializes: it waits for every wgmma before it starts the next.
    assert not any("HWHWHW" in loop for loop in loops), f"{what}: wgmma serialized"
    begin, products = "H" * (scores + of_chunk), scores + many * of_chunk
    overlapped = [loop for loop in loops if loop.lstrip("S").startswith(begin) and loop.count("H") == products]
    assert len(overlapped) >= 1, f"{what}: {loops}"
    for loop in overlapped:
        # With windows and factors of blocks at head_dim 256 a coordinate is read again.
        assert loop.count("S") <= (head_dim == 256 and feature == "window"), f"{what}: the loop spills: {loop}"
        assert loop.count("W") == 1 + many, f"{what}: {loop}"


@pytest.mark.parametrize(("head_dim", "feature", "block"), SAMPLE)
def test_sample(head_dim: int, feature: str, block: int) -> None:
    (facts,) = compile_all([fp8_job(head_dim, feature, block)])
    check(head_dim, feature, block, facts)


@pytest.mark.full
@pytest.mark.parametrize("feature", FEATURES)
def test_matrix(feature: str) -> None:
    points = [point for point in FULL if point[1] == feature and (feature != "packed" or point[2] == 0)]
    for point, facts in zip(points, compile_all([fp8_job(*point) for point in points]), strict=True):
        check(*point, facts)
