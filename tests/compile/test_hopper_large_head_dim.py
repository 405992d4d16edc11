"""The Hopper kernel for large heads compiles to what makes it fast."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compile import test_targets
from tests.compile.test_hopper import loops_over_keys
from tests.compile.test_targets import compile_all
from tests.marks import needs_triton, one_in

pytestmark = needs_triton

# Bytes of local memory a thread may take, over Triton 3.6 to 3.9, none of them in a loop over keys without a mask. 3.6
# and 3.7 take up to 32 beside windows and packed sequences and none elsewhere; 3.9 keeps the coordinates of a tile.
SPILL_BOUND = 160
WIDTHS = {"512": (512, 512), "448": (448, 448), "640": (640, 640), "768": (768, 768), "latent": (576, 512)}
BEHIND, AHEAD = {"scores_ahead": False}, {"scores_ahead": True}
SAMPLE = [("512", "causal", BEHIND), ("512", "plain", AHEAD), ("640", "plain", BEHIND)]
FULL = [
    *((width, "causal", BEHIND) for width in WIDTHS),
    *((width, "causal", AHEAD) for width in WIDTHS if width in ("512", "448")),  # a tile of K fits
    *(
        ("512", feature, config)
        for feature in ("window", "alibi", "softcap and sinks", "packed")
        for config in (BEHIND, AHEAD)
    ),
]


def job(width: str, feature: str, config: dict[str, Any]) -> dict[str, Any]:
    head_dim, head_dim_v = WIDTHS[width]
    made = test_targets.job("sm_90", "bfloat16", head_dim, feature)
    stages = {512: 9, 448: 9, 576: 8, 640: 8, 768: 7}[head_dim]
    chosen = {"v_parts": -(-head_dim_v // 640), "num_stages": stages} | config
    made["problem"] |= {"head_dim_v": head_dim_v}
    return made | {"kernel": "hopper/large_head_dim", "config": chosen, "listing": True}


def check(facts: dict[str, Any], feature: str) -> None:
    what, instructions = f"{feature} {facts['config']}", facts["instructions"]
    assert facts["smem_bytes"] <= facts["smem_bound"] <= facts["smem_limit"], what
    assert facts["spill_bytes"] <= SPILL_BOUND, f"{what}: {facts['spill_bytes']} spilled"
    assert instructions.get("HGMMA", 0) > 0, f"{what}: no wgmma"
    assert instructions.get("UTMALDG", 0) > 0, f"{what}: K and V do not come by TMA"
    assert instructions.get("USETMAXREG", 0) > 0, f"{what}: registers are not handed to those who hold accumulators"
    values = [loop for loop in loops_over_keys(facts["listing"]) if "E" not in loop]
    assert len(values) == 2, f"{what}: two warpgroups multiply values, each in one loop"
    for loop in values:
        assert "S" not in loop, f"{what}: the loop spills: {loop}"
        assert "W" not in loop[: loop.rindex("H")], f"{what}: a product of values waits for the one before: {loop}"


@one_in(3)
@pytest.mark.parametrize(("width", "feature", "config"), SAMPLE, ids=str)
def test_sample(width: str, feature: str, config: dict[str, Any]) -> None:
    (facts,) = compile_all([job(width, feature, config)])
    check(facts, feature)
    if not config["scores_ahead"]:
        return
    # The next tile's scores are asked for before this one's exponentials, and waited for behind them.
    overlapped = [loop for loop in loops_over_keys(facts["listing"]) if "E" in loop and "H" in loop.split("E")[0]]
    assert overlapped
    for loop in overlapped[:1]:
        assert loop[: loop.index("W")].count("E") > 16, loop


@pytest.mark.full
def test_matrix() -> None:
    for point, facts in zip(FULL, compile_all([job(*point) for point in FULL]), strict=True):
        check(facts, point[1])
