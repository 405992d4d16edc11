"""The 8-bit Hopper forward compiles to what makes it fast: 8-bit wgmma under way together, loops over keys without
spills, and a launch before that moves 16 bytes at a time."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from typing import Any

import pytest

from tests.compile.test_hopper import loops_over_keys
from tests.compile.test_targets import compile_all, job
from warpwave.kernels.hopper.flash_fwd_fp8.config import Config, pieces

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is published for Linux only")

FEATURES = ("plain", "causal", "window", "alibi", "packed")
SAMPLE = [(128, "causal", 128), (256, "plain", 0)]
FULL = [(d, feature, block) for d in (32, 64, 96, 128, 192, 256) for feature in FEATURES for block in (0, 64, 128)]
# Bytes of local memory a thread may take: coordinates of a tile, outside the loops over keys.
SPILL_BOUND = 320


# Configs that are no default at the sizes of `fp8_job`: three warpgroups, and others that a benchmark compares.
CONFIGS = [
    (64, "plain", (192, 128, 3)),
    (64, "causal", (192, 128, 4)),
    (64, "packed", (192, 128, 4)),
    (64, "window", (192, 64, 4)),
    (128, "plain", (128, 128, 2)),
    (256, "plain", (128, 64, 2)),
]


def fp8_job(head_dim: int, feature: str, block: int) -> dict[str, Any]:
    made = job("sm_90", "float8_e4m3fn", head_dim, feature) | {"kernel": "hopper/flash_fwd_fp8", "listing": True}
    blocks = (0, 0, 0) if feature == "packed" else (block, block, block)
    made["problem"] |= {"dtype_v": "float8_e4m3fn", "dtype_out": "bfloat16", "descale_blocks": blocks}
    made["problem"] |= {"seqlen_q": 4096, "seqlen_k": 4096}  # enough for the config of large calls
    made["problem"] |= {"total_q": 8192, "total_k": 8192} if feature == "packed" else {}
    return made


def check(head_dim: int, feature: str, block: int, facts: dict[str, Any]) -> None:
    what, instructions = f"head_dim {head_dim} {feature} {block} {facts['config']}", facts["instructions"]
    ahead, _ = facts["launches"]
    assert ahead["instructions"].get("PREEXIT", 0) == 1, f"{what}: the attention waits for the launch before"
    assert ahead["spill_bytes"] == 0, f"{what}: {ahead['spill_bytes']} spilled by the launch before"
    assert facts["smem_bytes"] <= facts["smem_bound"] <= facts["smem_limit"], what
    assert facts["spill_bytes"] <= SPILL_BOUND, f"{what}: {facts['spill_bytes']} spilled"
    assert instructions["QGMMA"] > 0 and "HGMMA" not in instructions, f"{what}: no wgmma of 8 bits"
    assert instructions.get("UTMALDG", 0) > 0 and instructions.get("UTMASTG", 0) > 0, f"{what}: not by TMA"
    assert instructions.get("USETMAXREG", 0) > 0, f"{what}: registers are not handed to the consumers"
    assert not any(facts["mixed_descriptors"]), what
    if facts["config"]["block_m"] == 64:
        return
    block_n = facts["config"]["block_n"]
    loops = loops_over_keys(facts["listing"], **{"SYNCS.PHASECHK": "p", "SYNCS.ARRIVE": "a"})
    # Where registers do not suffice, ptxas serializes: it waits for every wgmma before it starts the next.
    assert not any(re.search("HWHWHW", loop) for loop in loops), f"{what}: wgmma serialized"
    widths = pieces(head_dim)
    scores, of_chunk = sum(widths) // 32, block_n // 32
    together = sum(widths) <= 128
    many = len(widths) if together else sum(-(-width // 64) for width in widths)
    products = scores + many * of_chunk
    # Behind the wait for K: the products of a tile; above 128 columns the first chunk and the scores, then the next
    # chunk.
    begin = f"pH{{{products}}}W" if together else f"pH{{{scores + of_chunk}}}WH{{{of_chunk}}}W"
    overlapped = [loop for loop in loops if loop.count("H") == products and re.search(begin, loop.replace("S", ""))]
    assert len(overlapped) >= 1, f"{what}: {loops}"
    for loop in overlapped:
        # With windows and factors of blocks a coordinate is read again, and one in the fullest tile of packed calls.
        reads = feature == "window" or (feature == "packed" and facts["config"]["block_m"] == 192)
        assert loop.count("S") <= reads, f"{what}: the loop spills: {loop}"
        assert loop.count("W") == (2 if together else many + 1), f"{what}: {loop}"
        if (feature, block) == ("plain", 0) and head_dim in (64, 128, 256):
            # Products that start together are waited for before most exponentials; the last chunk has some beside it.
            # In other loops ptxas may move exponentials below the wait.
            after, least = (-1, block_n // 4) if together else (-2, 8)
            assert loop.split("W")[after].count("E") > least, f"{what}: {loop}"


@pytest.mark.parametrize(("head_dim", "feature", "block"), SAMPLE)
def test_sample(head_dim: int, feature: str, block: int) -> None:
    (facts,) = compile_all([fp8_job(head_dim, feature, block)])
    check(head_dim, feature, block, facts)


@pytest.mark.full
@pytest.mark.parametrize(("head_dim", "feature", "config"), CONFIGS)
def test_configs(head_dim: int, feature: str, config: tuple[Any, ...]) -> None:
    (facts,) = compile_all([fp8_job(head_dim, feature, 0) | {"config": asdict(Config(*config))}])
    check(head_dim, feature, 0, facts)


@pytest.mark.full
@pytest.mark.parametrize("feature", FEATURES)
def test_matrix(feature: str) -> None:
    points = [point for point in FULL if point[1] == feature and (feature != "packed" or point[2] == 0)]
    for point, facts in zip(points, compile_all([fp8_job(*point) for point in points]), strict=True):
        check(*point, facts)
