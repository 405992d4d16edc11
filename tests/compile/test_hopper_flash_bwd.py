"""The launches of `hopper/flash_bwd` compile within its limits, and add dQ by TMA. No GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compile.test_targets import compile_all, job
from tests.marks import needs_triton, one_in

pytestmark = needs_triton

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "features": {"causal": "bottom_right", "softcap": 30.0, "packed": True, "total_q": 2048, "total_k": 2048},
    "dropout": {"causal": "bottom_right", "dropout_p": 0.1},
    # Enough blocks without groups, which walk from the first tile on.
    "deterministic": {"causal": "bottom_right", "deterministic": True, "batch": 64, "num_heads_kv": 4},
    "no groups": {"causal": "bottom_right", "num_heads_kv": 4},
    "mask": {"causal": "bottom_right", "mask_shape": (2, 4, 1024, 1024)},
    "trained bias": {"causal": "bottom_right", "bias_shape": (2, 4, 1024, 1024), "bias_dtype": "bfloat16"},
    "mask and bias": {
        "causal": "bottom_right",
        "mask_shape": (2, 4, 1024, 1024),
        "bias_shape": (1, 4, 1024, 1024),
        "bias_dtype": "bfloat16",
    },
    "splits": {"batch": 1, "num_heads_q": 8, "num_heads_kv": 1},
    # Seven heads in four splits, or in two by launches apart.
    "uneven splits": {
        "batch": 1,
        "num_heads_q": 28,
        "num_heads_kv": 4,
        "causal": "bottom_right",
        "seqlen_q": 4096,
        "seqlen_k": 4096,
    },
}
# wgmma instructions of 64 x N x 16 in the loops of both groups: a joint kernel has a loop over cut tiles and another,
# with a mask, and at head_dim 128 under a band, one for both; the others one loop and the first scores before it.
PRODUCTS = {
    (64, 64): {"joint_kernel": 128, "dkv_kernel": 32, "dq_kernel": 40},
    # S and dP leave out padded slices of head_dim; dK and dV take an instruction of 64 columns and one of 16 or 32.
    (80, 80): {"joint_kernel": 136, "dkv_kernel": 52, "dq_kernel": 62},
    (96, 96): {"joint_kernel": 144, "dkv_kernel": 56, "dq_kernel": 68},
    (128, 128): {"joint_kernel": 128, "dkv_kernel": 48, "dq_kernel": 64},
    (160, 160): {"joint_kernel": 248, "dkv_kernel": 56, "dq_kernel": 76},
    (192, 128): {"joint_kernel": 224, "dkv_kernel": 52, "dq_kernel": 80},
    (256, 256): {"dkv_kernel": 72, "dq_kernel": 104},
}
# Additions to dQ by two warps, in copies as long as the shortest piece of a group's share.
ADDITIONS = {64: 4, 80: 2 * (4 + 1), 96: 2 * (2 + 1), 128: 4, 160: 2 * 2 * (4 + 1), 192: 2 * 2 * (2 + 1)}
# The launch of dQ takes fewer keys a step where tiles of the bias need the room.
WITH_BIAS = PRODUCTS | {(256, 256): PRODUCTS[256, 256] | {"dq_kernel": 100}}
# Bytes of local memory a thread may take, most of it outside the main loop: without and with other features than a
# plain call's. Triton 3.6 and 3.7 take up to 296 and 632, and up to 128 with a bias (3.9: 152) and 152 with a mask
# (3.9: 208). With dropout, up to 608 in the joint launch and 176 in that of dQ (3.6).
SPILL_BOUNDS = {
    "plain": 384, "deterministic": 384, "no groups": 384, "features": 768, "trained bias": 192, "mask": 256,
    "dropout": 640, "splits": 384, "uneven splits": 384, "mask and bias": 256,
}  # fmt: skip
# Of the joint launch at head_dim 128, all in all; up to 16, 120 and 56 (3.9: 72). Descriptors that are computed before
# the loop took 192, 264 and 224, and their loads delay the products (docs/notes/backward.md).
WIDE_SPILL_BOUNDS = {
    "plain": 64, "deterministic": 64, "no groups": 64, "features": 192, "dropout": 128, "splits": 64,
    "uneven splits": 64, "mask": 64, "trained bias": 64, "mask and bias": 96,
}  # fmt: skip
# Above head_dim 128, outside the main loop but for a few words; up to 216 by Triton 3.6 and 3.7, 192 by 3.9.
BROAD_SPILL_BOUND = 256

# Instructions of the joint launch of a packed call with a softcap, by head_dim; up to 11,704, 5,600, 5,680 and 6,136 by
# Triton 3.6 and 3.7. An unrolled loop over the rows past the end of a sequence adds a fourth.
PACKED_BOUNDS = {64: 12500, 80: 6200, 96: 6200, 128: 6700}

# In float32 each product is three. Both groups of the launch of dK and dV have two products, those of dQ three.
PRODUCTS_OF_PARTS = {
    (64, 64): {"split_dkv_kernel": 3 * 4 * 4, "split_dq_kernel": 3 * 6 * 4},
    (128, 128): {"split_dkv_kernel": 3 * (2 * 8 + 2 * 2 * 4), "split_dq_kernel": 3 * 2 * (2 * 8 + 2 * 4)},
}
FEATURES_OF_PARTS = FEATURES | {"features": FEATURES["features"] | {
    "softcap": 0.0, "alibi_shape": (4,), "window_size": (200, -1),
}}  # fmt: skip
# Bytes of local memory. Without features up to 8 by Triton 3.6 to 3.8 and 56 by 3.9; with a window and ALiBi up to 160,
# with dropout up to 136 (3.6), with a mask up to 56 (3.6).
SPILL_BOUNDS_OF_PARTS = {"plain": 64, "features": 192, "dropout": 192, "mask": 96}


# Dropout where it costs the most registers: beside two products of one tile in flight.
SAMPLE = (
    *(((80, 80), "features"), ((128, 128), "plain"), ((128, 128), "dropout"), ((256, 256), "plain")),
    *(((192, 128), "plain"), ((160, 160), "no groups"), ((64, 64), "uneven splits")),
)
# Above head_dim 128: the calls that a joint kernel serves.
BROAD = ("plain", "no groups", "splits", "uneven splits", "deterministic")


@one_in(4)
@pytest.mark.parametrize(
    ("dims", "features"),
    [
        pytest.param(dims, features, marks=[] if (dims, features) in SAMPLE else [pytest.mark.full])
        for dims in PRODUCTS
        for features in FEATURES
    ],
    ids=str,
)
def test_it_compiles_within_its_limits(dims: tuple[int, int], features: str) -> None:
    a_job = job("sm_90", "bfloat16", dims[0], "plain") | {"kernel": "hopper/flash_bwd"}
    a_job["problem"] |= {"head_dim_v": dims[1]} | FEATURES[features]
    a_job["of_bias"] = features == "trained bias"
    (found,) = compile_all([a_job])
    products = (WITH_BIAS if "bias_shape" in FEATURES[features] else PRODUCTS)[dims]
    is_wide = 64 < dims[0] <= 128
    if "joint_kernel" in products and (features.startswith("mask") or (is_wide and "causal" in FEATURES[features])):
        products = products | {"joint_kernel": products["joint_kernel"] // 2}
    is_joint = dims[0] <= 128 or (dims[0] < 256 and features in BROAD)
    assert is_joint == any("joint_kernel" in facts["launches"] for facts in found["configs"])
    for facts in found["configs"]:
        for name, launch in facts["launches"].items():
            assert not launch["mixed_descriptors"]
            if name not in products:
                assert launch["spill_bytes"] == 0, name
                continue
            instructions = launch["instructions"]
            bound = (WIDE_SPILL_BOUNDS if is_wide and name == "joint_kernel" else SPILL_BOUNDS)[features]
            if dims[0] > 128 and name == "joint_kernel":
                bound = BROAD_SPILL_BOUND
            assert launch["spill_bytes"] <= bound, name
            assert launch["smem_bytes"] <= facts["bound"] <= 227 * 1024, name
            assert instructions["HGMMA"] == products[name], name
            # ptxas that lacks registers waits for each product before the next, with two such instructions each.
            assert instructions["WARPGROUP"] < instructions["HGMMA"], f"{name}: products one after another"
            if name == "joint_kernel":
                assert instructions["UTMAREDG"] == ADDITIONS[dims[0]]
                assert features != "features" or sum(instructions.values()) <= PACKED_BOUNDS[dims[0]]
            if name != "dq_kernel":
                # Each producer has a draw and the reset; of draws at two places of one, ptxas diverges a warp.
                producers = 2 if {"mask_shape", "bias_shape"} & FEATURES[features].keys() else 1
                assert instructions["ATOMG"] == 2 * producers


@one_in(2)
@pytest.mark.parametrize(
    ("dims", "features"),
    [
        pytest.param(dims, features, marks=[] if (dims, features) in SAMPLE else [pytest.mark.full])
        for dims in PRODUCTS_OF_PARTS
        for features in SPILL_BOUNDS_OF_PARTS
    ],
    ids=str,
)
def test_float32_compiles_within_its_limits(dims: tuple[int, int], features: str) -> None:
    a_job = job("sm_90", "float32", dims[0], "plain") | {"kernel": "hopper/flash_bwd"}
    a_job["problem"] |= FEATURES_OF_PARTS[features]
    (found,) = compile_all([a_job])
    (facts,) = found["configs"]
    products = PRODUCTS_OF_PARTS[dims]
    last = "zero_unwritten_kernel" if a_job["problem"].get("packed") else "sum_splits_kernel"
    lasts = [] if features == "mask" else [last]  # a group of heads has one block there
    assert facts["launches"].keys() == {"maxima_kernel", "split_rows_kernel", *products, *lasts}
    for name, launch in facts["launches"].items():
        assert not launch["mixed_descriptors"]
        if name not in products:
            assert launch["spill_bytes"] == 0, name
            continue
        instructions = launch["instructions"]
        assert launch["spill_bytes"] <= SPILL_BOUNDS_OF_PARTS[features], name
        assert launch["smem_bytes"] <= facts["bound"] <= 227 * 1024, name
        assert instructions["HGMMA"] == products[name], name
        # Two such instructions a product and slice: ptxas that lacks registers waits for each wgmma.
        assert instructions["WARPGROUP"] < instructions["HGMMA"], f"{name}: products one after another"
