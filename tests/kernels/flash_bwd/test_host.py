"""What `flash_bwd` says of itself: configs, tiles, costs, reasons. No kernel runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from warpwave.gpu import ARCHS, CPU, INTERPRETER, Gpu
from warpwave.kernels import flash_bwd
from warpwave.kernels.flash_bwd import Config, Tile, choice
from warpwave.kernels.flash_bwd.config import splits_of
from warpwave.kernels.hopper import flash_bwd as hopper_flash_bwd
from warpwave.problem import AttentionProblem, Causal

PROBLEM = AttentionProblem(
    batch=2, seqlen_q=300, seqlen_k=290, num_heads_q=4, num_heads_kv=2, head_dim=80, head_dim_v=64,
    dtype="bfloat16", softmax_scale=0.1, requires_grad=True,
)  # fmt: skip
H200 = Gpu.for_arch("sm_90")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_every_gpu_has_a_default_that_fits(arch: str, dtype: str, head_dim: int) -> None:
    gpu = Gpu.for_arch(arch)
    for mask_shape in (None, (2, 1, 300, 290)):
        problem = replace(PROBLEM, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim, mask_shape=mask_shape)
        if mask_shape and (dtype, head_dim) == ("float32", 256) and gpu.vendor == "nvidia" and gpu.capability not in (
            80, 87, 90, 100, 103,
        ):  # fmt: skip
            (reason,) = flash_bwd.why_not(problem, gpu)
            assert "has 99 for a block" in reason
            continue
        assert flash_bwd.why_not(problem, gpu) == []
        chosen, *others = flash_bwd.configs(problem, gpu)
        assert chosen == flash_bwd.default(problem, gpu)
        assert chosen not in others and len(set(others)) == len(others)
        assert all(flash_bwd.smem_bytes(problem, gpu, c) <= gpu.smem_per_block_bytes for c in (chosen, *others))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("masked", [False, True])
def test_defaults_of_short_sequences_fit(arch: str, masked: bool) -> None:
    """128 queries on 16 keys at head_dim 256 took 272 KiB on Hopper, and 200 on 16 at 128 took 148 KiB of 99."""
    gpu = Gpu.for_arch(arch)
    for head_dim in (32, 40, 64, 80, 96, 128, 192, 256):
        for lengths in [
            *((16, 16), (64, 64), (16, 128), (128, 16), (64, 128), (16, 200), (200, 16), (500, 16)),
            *((32, 1000), (64, 1000), (128, 1000), (1000, 77), (1000, 128)),
        ]:
            short = replace(
                PROBLEM, seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=head_dim, head_dim_v=head_dim,
                mask_shape=(2, 1, 1, lengths[1]) if masked else None, num_heads_kv=4 if lengths[1] > 128 else 2,
            )  # fmt: skip
            for config in flash_bwd.configs(short, gpu):
                assert flash_bwd.smem_bytes(short, gpu, config) <= gpu.smem_per_block_bytes, (lengths, head_dim)
                holds_all = flash_bwd.walked_of(short, config) == ""
                assert not (config.joint and holds_all) or max(lengths) <= 128, "longer tiles were not timed"
                assert holds_all or gpu.capability == 90, "walks were not timed on other cards"


def test_the_default_is_the_one_of_the_table_on_hopper() -> None:
    for head_dim in (64, 128, 256):
        problem = replace(PROBLEM, head_dim=head_dim, head_dim_v=head_dim)
        assert flash_bwd.default(problem, H200) == choice.of_table(problem, H200)


def test_cost_by_hand() -> None:
    config = Config(Tile(64, 32, 4, 2), Tile(32, 64, 4, 2))
    cost = flash_bwd.cost(PROBLEM, H200, config)
    of_rows, of_keys = 5 * 10 * 4 * 2, 10 * 5 * 4 * 2  # query tiles, key tiles, heads, batch
    assert [part.blocks for part in cost.parts] == [5 * 4 * 2, 5 * 2 * 2]
    assert cost.flops == 2 * (of_rows + of_keys) * 64 * 32 * (128 + 64) + 2 * 64 * 32 * (
        of_rows * 128 + of_keys * (128 + 64)
    ), "head_dim 80 is padded to 128; dq takes three products, dk and dv four"
    assert cost.exponentials == (of_rows + of_keys) * 64 * 32
    assert cost.launches == 2 and cost.workspace_bytes == 4 * 2 * 300 * 8
    split = flash_bwd.cost(PROBLEM, H200, replace(config, split_dkv=True))
    assert split.launches == 3 and split.flops - cost.flops == 2 * of_keys * 64 * 32 * 128


def test_cost_of_a_joint_launch_by_hand() -> None:
    short = replace(PROBLEM, batch=500, seqlen_q=20, seqlen_k=50, head_dim=64)
    config = flash_bwd.default(short, H200)
    assert config == Config(Tile(32, 64, 4, 1), Tile(32, 64, 4, 1), joint=True)
    cost, heads = flash_bwd.cost(short, H200, config), 500 * 4
    assert cost.launches == 1 and cost.workspace_bytes == 0 and cost.blocks == 500 * 2
    assert cost.flops == 2 * heads * 32 * 64 * 5 * 64 and cost.exponentials == heads * 32 * 64
    q, k = heads * 20 * 64 * 2, heads * 50 * 64 * 2
    assert cost.read_bytes == 2 * q + 2 * k, "q and dO; K and V once for each query head"
    assert cost.write_bytes == q + k, "dQ; dK and dV of half as many heads"


def of_one_side(lengths: tuple[int, int], head_dim: int = 64, **changes: Any) -> AttentionProblem:
    sizes: dict[str, Any] = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "head_dim": head_dim}
    return replace(PROBLEM, **(sizes | {"head_dim_v": head_dim, "num_heads_kv": 4} | changes))


@pytest.mark.parametrize(
    ("lengths", "head_dim", "changes", "tile"),
    [
        ((64, 129), 64, {}, (64, 64)),
        ((64, 128), 128, {}, None),  # a tile holds the keys, too
        ((65, 1000), 64, {}, None),
        ((128, 1000), 32, {}, (128, 128)),
        ((128, 1000), 32, {"mask_shape": (2, 1, 1, 1000)}, (128, 128)),
        ((128, 1000), 32, {"mask_shape": (2, 1, 128, 1000)}, None),
        ((32, 1000), 128, {"mask_shape": (2, 1, 1, 1000)}, (32, 32)),
        ((32, 1000), 128, {"mask_shape": (2, 1, 32, 1000)}, (32, 32)),
        ((33, 1000), 96, {}, (64, 128)),
        ((64, 1000), 128, {"mask_shape": (2, 1, 1, 1000)}, (64, 128)),
        ((64, 1000), 128, {"mask_shape": (2, 1, 64, 1000)}, (64, 128)),
        ((20, 1000), 256, {}, (32, 64)),
        ((20, 1000), 256, {"mask_shape": (2, 1, 1, 1000)}, (32, 64)),
        ((20, 1000), 256, {"mask_shape": (2, 1, 20, 1000)}, (32, 64)),
        ((33, 1000), 256, {}, None),
        ((20, 1000), 64, {"num_heads_kv": 2}, None),  # grouped heads walk no keys
        ((1000, 20), 64, {"num_heads_kv": 2}, (64, 32)),
        ((1000, 16), 64, {}, (32, 16)),
        ((1000, 64), 112, {}, None),
        ((1000, 77), 40, {}, (64, 128)),
        ((1000, 77), 40, {"mask_shape": (2, 1, 1, 77)}, (64, 128)),
        ((1000, 128), 80, {"mask_shape": (2, 4, 1000, 128)}, (64, 128)),
        ((1000, 77), 64, {}, None),
        ((1000, 20), 64, {"alibi_shape": (4,)}, None),
        ((1000, 20), 64, {"has_sinks": True}, None),
        ((1000, 20), 64, {"bias_shape": (1, 1, 1000, 20), "bias_dtype": "bfloat16"}, None),
        ((1000, 20), 64, {"dtype": "float32"}, None),
    ],
    ids=str,
)
def test_which_calls_walk_one_side_on_hopper(
    lengths: tuple[int, int], head_dim: int, changes: dict[str, Any], tile: tuple[int, int] | None
) -> None:
    problem = of_one_side(lengths, head_dim, **changes)
    config = flash_bwd.default(problem, H200)
    assert config is not None
    walked = flash_bwd.walked_of(problem, config)
    assert walked == ("" if tile is None else "keys" if lengths[0] < lengths[1] else "queries")
    assert bool(hopper_flash_bwd.outrun(problem, H200)) == config.joint
    if tile is not None:
        assert (config.dq.block_m, config.dq.block_n) == tile
        assert "hopper/flash_bwd" in flash_bwd.notes(problem, H200, config)[0]
        assert {c.splits for c in flash_bwd.configs(problem, H200)} >= {config.splits, 2 * config.splits}


def test_splits_fill_the_gpu_once() -> None:
    """132 SMs: one block of eight warps on each, two of four warps, four of a small tile; two tiles in each part."""
    eight, four, small = Tile(64, 128, 8, 2), Tile(64, 64, 4, 3), Tile(16, 64, 4, 3)

    def splits(tile: Tile, lengths: tuple[int, int], **changes: Any) -> int:
        return splits_of(of_one_side(lengths, **changes), H200, tile)

    assert [splits(tile, (16, 8192)) for tile in (eight, four, small)] == [132 // 8, 264 // 8, 64]
    assert splits(small, (16, 1024)) == 8 and splits(small, (16, 130)) == 1
    assert splits(eight, (4096, 77)) == 16 and splits(eight, (4096, 77), num_heads_kv=2) == 33
    assert splits(eight, (4096, 77), batch=100) == 1 and splits(eight, (4096, 77), batch=0) == 32


def test_cost_of_walks_by_hand() -> None:
    tile = Tile(32, 64, 4, 3)
    problem, config = of_one_side((20, 1000)), Config(tile, tile, joint=True, splits=3)
    main, added = flash_bwd.cost(problem, H200, config).parts
    rows, keys = 8 * 20 * 64 * 2, 8 * 1000 * 64 * 2  # bytes of q and of k
    assert main.flops == 2 * 8 * 16 * 32 * 64 * 5 * 64 and main.blocks == 3 * 8 and main.steps == 8 * 16
    assert main.read_bytes == 3 * 3 * rows + 2 * keys + 8 * 8 * 20, "q, dO and out in each part, K and V once"
    assert main.write_bytes == 2 * keys + 3 * 2 * rows and main.scratch_bytes == 3 * 2 * rows, "float32 parts of dQ"
    assert added.read_bytes == 3 * 2 * rows and added.write_bytes == rows
    assert flash_bwd.cost(problem, H200, replace(config, splits=1)).launches == 1

    few_keys = of_one_side((1000, 20), num_heads_kv=2)
    tile = Tile(64, 32, 4, 1)
    main, added = flash_bwd.cost(few_keys, H200, Config(tile, tile, joint=True, splits=5)).parts
    rows, keys = 8 * 1000 * 64 * 2, 4 * 20 * 64 * 2
    assert main.flops == 2 * 8 * 16 * 64 * 32 * 5 * 64 and main.blocks == 5 * 4
    assert main.read_bytes == 5 * 2 * keys + 3 * rows + 8 * 8 * 1000
    assert main.write_bytes == rows + 5 * 2 * 2 * keys
    assert added.read_bytes == 5 * 2 * 2 * keys and added.write_bytes == 2 * keys


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("head_dim", "lengths", "change"),
    [
        *((64, (32, 20), {}), (128, (64, 64), {}), (128, (64, 65), {}), (64, (16, 9), {"dtype": "float32"})),
        (128, (16, 128), {}),
    ],
    ids=str,
)
def test_which_sequences_take_a_joint_launch(
    arch: str, head_dim: int, lengths: tuple[int, int], change: dict[str, Any]
) -> None:
    gpu = Gpu.for_arch(arch)
    sizes: dict[str, Any] = {
        "seqlen_q": lengths[0],
        "seqlen_k": lengths[1],
        "head_dim": head_dim,
        "head_dim_v": head_dim,
    }
    config = flash_bwd.default(replace(PROBLEM, **sizes, **change), gpu)
    assert config is not None
    expected = lengths == (16, 9) and gpu.capability == 90 if change else lengths == (32, 20)
    if lengths == (64, 64):
        expected = not gpu.is_rdna
    elif lengths == (16, 128):  # spills on other cards
        expected = gpu.capability == 90
    assert config.joint == expected
    if expected:
        others = flash_bwd.configs(replace(PROBLEM, **sizes, **change), gpu)
        assert {c.dq.num_warps for c in others} == {1, 2, 4, 8} and all(c.joint for c in others)


def test_a_bias_beside_grouped_heads_takes_launches_apart() -> None:
    short = replace(PROBLEM, seqlen_q=16, seqlen_k=16, bias_shape=(1, 4, 16, 16), bias_dtype="bfloat16")
    apart, joint = (flash_bwd.default(replace(short, num_heads_kv=heads), H200) for heads in (2, 4))
    assert apart is not None and joint is not None and (apart.joint, joint.joint) == (False, True)


def test_hidden_tiles_cost_nothing() -> None:
    square = replace(PROBLEM, seqlen_q=1024, seqlen_k=1024)
    config = Config(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2))
    full, causal = (flash_bwd.cost(p, H200, config) for p in (square, replace(square, causal=Causal())))
    assert causal.flops / full.flops == (16 * 17 / 2) / (16 * 16)


def test_what_it_refuses() -> None:
    assert flash_bwd.why_not(PROBLEM, INTERPRETER) == []
    assert any("found tensors on the CPU" in reason for reason in flash_bwd.why_not(PROBLEM, CPU))
    (reason,) = flash_bwd.why_not(replace(PROBLEM, head_dim=257), H200)
    assert reason.startswith("head_dim is 257")
    (reason,) = flash_bwd.why_not(PROBLEM, replace(H200, name="tiny", smem_per_block_bytes=4096))
    assert "KiB of shared memory and tiny has 4 for a block" in reason
