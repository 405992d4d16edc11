"""Costs of gradients, against counts that enumerate tiles and products against the kernels' own docstrings."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from warpwave.gpu import Gpu
from warpwave.kernels import eager, eager_backward_cost, flash_bwd
from warpwave.kernels.cost import in_turn, launch_order_by_keys, walk_by_keys
from warpwave.kernels.flash_bwd.config import parts_of_bias
from warpwave.kernels.gradient_costs import of_keys, of_queries
from warpwave.kernels.hopper import flash_bwd as hopper_flash_bwd
from warpwave.kernels.three_kernel import gradients as three_kernel_gradients
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.model.steps import computes_gradients

H200 = replace(Gpu.for_arch("sm_90"), num_sms=132)
PLAIN = AttentionProblem(
    batch=2, seqlen_q=512, seqlen_k=512, num_heads_q=4, num_heads_kv=4, head_dim=64, head_dim_v=64, dtype="bfloat16",
    softmax_scale=0.125, return_lse=True,
)  # fmt: skip


def costs(problem: AttentionProblem, module: Any) -> Any:
    return module.cost(problem, H200, module.default(problem, H200))


# Tiles ----------------------------------------------------------------------------------------------------------------

BANDS: list[dict[str, Any]] = [
    {},
    {"causal": Causal()},
    {"causal": Causal("top_left")},
    {"window_size": (100, 0)},
    {"window_size": (30, 200)},
    {"causal": Causal(), "window_size": (64, -1)},
]
LENGTHS = [(512, 512), (100, 700), (700, 100), (513, 1), (1, 513), (300, 301)]


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("block", [(64, 128), (128, 128), (32, 64), (128, 16)], ids=str)
def test_tiles_of_blocks_that_own_keys_are_those_with_a_visible_pair(
    band: dict[str, Any], block: tuple[int, int]
) -> None:
    block_m, block_n = block
    for seqlen_q, seqlen_k in LENGTHS:
        problem = replace(PLAIN, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_kv=2, **band)
        found = walk_by_keys(problem, block_m, block_n)
        low, high = problem.band(seqlen_q, seqlen_k)
        each = []
        for key in range(0, seqlen_k, block_n):
            last = min(key + block_n, seqlen_k) - 1
            # Queries i with low <= j - i <= high for a key j of the tile; the walk ends with the band.
            begin = 0 if high is None else max(0, key - high)
            end = seqlen_q if low is None else min(seqlen_q, last - low + 1)
            each.append(max(0, -(-end // block_m) - begin // block_m))
        heads = problem.batch * problem.num_heads_q
        assert found.tiles == heads * sum(each)
        assert found.longest == 2 * max(each), "the queries of both heads of a group"
        assert found.items == problem.batch * problem.num_heads_kv * sum(count > 0 for count in each)


def test_packed_tiles_are_those_of_each_sequence() -> None:
    lengths = ((100, 100), (700, 512), (1, 64))
    packed = replace(
        PLAIN, batch=3, seqlen_q=700, seqlen_k=512, packed=True, total_q=801, total_k=676, lengths=lengths,
        causal=Causal(),
    )  # fmt: skip
    alone = [replace(PLAIN, batch=1, seqlen_q=q, seqlen_k=k, causal=Causal()) for q, k in lengths]
    each = [walk_by_keys(problem, 64, 128) for problem in alone]
    found = walk_by_keys(packed, 64, 128)
    assert found.tiles == sum(one.tiles for one in each) and found.items == sum(one.items for one in each)
    assert found.longest == max(one.longest for one in each)


def test_blocks_that_own_keys_come_in_their_order() -> None:
    lengths = ((100, 100), (300, 300))
    packed = replace(
        PLAIN, batch=2, seqlen_q=300, seqlen_k=300, packed=True, total_q=400, total_k=400, lengths=lengths,
        num_heads_kv=2, causal=Causal(),
    )  # fmt: skip
    # Tiles of 128 keys are seen by queries from 0, 128 and 256 on, in steps of 64; both heads of a group are walked.
    each = {100: (2 * 2,), 300: (2 * 5, 2 * 3, 2 * 1)}
    assert launch_order_by_keys(packed, 64, 128) == ((each[100], 2), (each[300], 2))
    pairs = tuple(step for step in each[300] for _ in range(2))
    assert launch_order_by_keys(packed, 64, 128, all_heads=True) == ((pairs, 1), (each[100] * 2, 1))
    found = walk_by_keys(packed, 64, 128)
    assert sum(sum(steps) * times for steps, times in launch_order_by_keys(packed, 64, 128)) == found.tiles
    huge = replace(PLAIN, seqlen_k=1 << 24, seqlen_q=1 << 24)
    assert launch_order_by_keys(huge, 64, 16) == ()


def test_gradients_that_no_block_writes_take_a_launch() -> None:
    packed = replace(PLAIN, packed=True, total_q=1024, total_k=1024, lengths=((512, 512),) * 2)
    hidden = replace(PLAIN, causal=Causal(), seqlen_q=512, seqlen_k=300)  # the first queries see nothing
    for problem, module, launches in (
        (packed, hopper_flash_bwd, 4), (packed, flash_bwd, 3), (hidden, hopper_flash_bwd, 4), (hidden, flash_bwd, 2),
        (PLAIN, hopper_flash_bwd, 3), (PLAIN, flash_bwd, 2),
    ):  # fmt: skip
        assert costs(problem, module).launches == launches


# Products, and what is computed again ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "changes", "products", "exponentials"),
    [
        (hopper_flash_bwd, {}, 5, 1),
        (hopper_flash_bwd, {"head_dim": 256, "head_dim_v": 256}, 7, 2),
        (flash_bwd, {}, 7, 2),
        (flash_bwd, {"dtype": "float32"}, 9, 3),
        (flash_bwd, {"head_dim": 256, "head_dim_v": 256}, 8, 3),
        (three_kernel_gradients, {"head_dim": 512, "head_dim_v": 512}, 5, 1),
        (eager_backward_cost, {}, 5, 1),
    ],
    ids=lambda value: getattr(value, "NAME", None),
)
def test_each_kernel_computes_the_products_that_its_page_states(
    module: Any, changes: dict[str, Any], products: int, exponentials: int
) -> None:
    problem = replace(PLAIN, **changes)
    found, work = costs(problem, module), problem.work(is_backward=True)
    assert 5 * found.flops == products * work.flops
    assert found.exponentials == exponentials * work.exponentials
    assert found.flops - found.repeated_flops == work.flops
    assert found.exponentials - found.repeated_exponentials == work.exponentials
    assert sum(part.flops for part in found.parts) == found.flops
    assert computes_gradients(module) and not computes_gradients(eager)


def test_two_head_sizes_are_counted_apart() -> None:
    problem = replace(PLAIN, head_dim=128, head_dim_v=64)
    pairs = problem.visible_pairs
    assert problem.work(is_backward=True).flops == 2 * pairs * (3 * 128 + 2 * 64)
    queries, keys = of_queries(problem, 64, 64, (128, 64)), of_keys(problem, 64, 64, (128, 64))
    assert queries.flops == 2 * pairs * (2 * 128 + 64) and queries.repeated_flops == 2 * pairs * (128 + 64)
    assert keys.flops == 2 * pairs * (2 * 128 + 2 * 64) and keys.repeated_flops == 0
    assert in_turn((queries, keys), 0).flops == problem.work(is_backward=True).flops + queries.repeated_flops


# Bytes ----------------------------------------------------------------------------------------------------------------


def test_the_least_bytes_of_a_backward_are_its_tensors() -> None:
    problem = replace(PLAIN, num_heads_kv=2, seqlen_k=300, head_dim_v=32)
    of_q, of_k = 2 * 4 * 512, 2 * 2 * 300
    tensors = of_q * (64 + 32) + of_k * (64 + 32) + of_q * 64 + of_k * (64 + 32)  # q dO, k v, dQ, dK dV
    assert problem.work(is_backward=True).compulsory_bytes == 2 * tensors
    assert problem.work() == (problem.flops, problem.exponentials, problem.compulsory_bytes, 1, 1)


def test_hopper_moves_what_its_launches_do() -> None:
    problem, rows, keys = PLAIN, 2 * 4 * 512, 2 * 4 * 512
    statistics, joint, finish = costs(problem, hopper_flash_bwd).parts
    turns = 4 * 2 * 4 * 4  # a number for each head and tile of queries
    assert statistics.read_bytes == rows * (2 * 2 * 64 + 4) and statistics.write_bytes == rows * 8 + turns
    assert finish.read_bytes == rows * 4 * 64 and finish.write_bytes == rows * 2 * 64
    steps = 2 * 4 * 4 * 4  # heads, tiles of 128 keys, tiles of 128 queries
    assert joint.steps == steps and joint.items == 2 * 4 * 4 and joint.longest == 4
    assert joint.added_bytes == steps * 128 * 64 * 4
    assert joint.write_bytes == joint.added_bytes + keys * 2 * 2 * 64
    assert joint.read_bytes == 2 * 2 * 64 * (keys + steps * 128) + 8 * steps * 128
    assert costs(problem, hopper_flash_bwd).workspace_bytes == rows * (4 * 64 + 8) + turns


def test_flash_bwd_moves_what_its_launches_do() -> None:
    config = flash_bwd.Config(flash_bwd.Tile(64, 64, 4, 2), flash_bwd.Tile(64, 64, 4, 2))
    queries, keys = flash_bwd.cost(PLAIN, H200, config).parts
    rows, visited = 2 * 4 * 512, 2 * 4 * 8 * 8
    # q, dO and out once; K and V of each tile; delta and the log-sum-exp.
    assert queries.read_bytes == 2 * (3 * rows * 64 + visited * 64 * 2 * 64) + 4 * rows
    assert queries.write_bytes == rows * (2 * 64 + 4)
    assert keys.read_bytes == 2 * 2 * 64 * (rows + visited * 64) + 8 * visited * 64
    assert keys.write_bytes == 2 * 2 * rows * 64
    assert queries.first_bytes == 2 * (rows * 64 * 4 + rows * 2 * 64) + 8 * rows
    assert keys.first_bytes == 2 * (2 * rows * 64 * 2 + rows * 2 * 64) + 8 * rows


def test_a_bias_is_read_by_every_launch_and_its_gradient_is_a_launch() -> None:
    bias = replace(PLAIN, bias_shape=(1, 4, 512, 512), bias_dtype="bfloat16")
    with_bias, config = costs(bias, flash_bwd), flash_bwd.default(bias, H200)
    assert config is not None
    cells = 2 * 4 * 512 * 512
    for part, bare in zip(with_bias.parts, flash_bwd.cost(PLAIN, H200, config).parts, strict=True):
        assert part.read_bytes - bare.read_bytes == 2 * cells
        assert part.first_bytes - bare.first_bytes == cells, "the batch shares a bias"
    of_bias = flash_bwd.cost_of_bias(bias, H200, config)
    assert of_bias.flops == 2 * bias.visible_pairs * 2 * 64, "S and dP"
    assert of_bias.write_bytes == cells
    few = replace(PLAIN, seqlen_q=64, seqlen_k=64, bias_shape=(1, 4, 64, 64), bias_dtype="bfloat16")
    of_few = flash_bwd.cost_of_bias(few, H200, config)
    assert of_few.write_bytes == 4 * 64 * 64 * (2 + 2 * 4), "the gradient, and a sum of each batch item"


@pytest.mark.parametrize(
    ("batch", "shape", "parts"),
    [
        (2048, (1, 4, 64, 64), 528 // (4 * 1 * 2)),
        (2, (1, 4, 64, 64), 2),
        (2048, (2048, 4, 64, 64), 1),
        (16, (1, 1, 1, 512), 33),
        (2, (1, 4, 8192, 8192), 1),
    ],
    ids=str,
)  # fmt: skip
def test_a_bias_of_few_tiles_is_divided(batch: int, shape: tuple[int, ...], parts: int) -> None:
    """Four blocks for each of 132 SMs, unless there are fewer items, of batch and heads, to divide."""
    problem = replace(PLAIN, batch=batch, bias_shape=shape, bias_dtype="bfloat16")
    config = flash_bwd.Config(flash_bwd.Tile(64, 32, 4, 2), flash_bwd.Tile(32, 64, 4, 2))
    assert parts_of_bias(problem, H200, config) == parts


@pytest.mark.parametrize("module", [hopper_flash_bwd, flash_bwd, three_kernel_gradients, eager_backward_cost])
def test_costs_of_every_option_are_sums_of_parts(module: Any) -> None:
    for band, group, lengths in product(BANDS[:4], (1, 4), ((512, 512), (33, 700))):
        problem = replace(PLAIN, num_heads_kv=4 // group, seqlen_q=lengths[0], seqlen_k=lengths[1], **band)
        if module is three_kernel_gradients:
            problem = replace(problem, head_dim=512, head_dim_v=512)
        found = costs(problem, module)
        for name in ("flops", "exponentials", "read_bytes", "write_bytes", "scratch_bytes"):
            assert getattr(found, name) == sum(getattr(part, name) for part in found.parts)
        assert found.flops - found.repeated_flops >= problem.work(is_backward=True).flops
        assert all(part.first_bytes <= part.read_bytes + part.write_bytes for part in found.parts)


@pytest.mark.parametrize("shape", [(2, 4, 512, 512), (2, 1, 1, 512)], ids=str)
def test_launches_on_a_packed_mask_read_its_bits(shape: tuple[int, ...]) -> None:
    """A bit for each score of a step, out of the workspace. The mask itself is read by the launches that pack it."""
    masked = replace(PLAIN, mask_shape=shape)
    for config in hopper_flash_bwd.configs(PLAIN, H200):
        ours, without = (hopper_flash_bwd.cost(p, H200, config).parts for p in (masked, PLAIN))
        for of_scores in (-2,) if config.is_joint else (-2, -1):
            part, other = ours[of_scores], without[of_scores]
            words = 2 * 4 * 512 * 512 // 8
            assert part.read_bytes == other.read_bytes + words
            assert part.scratch_bytes == other.scratch_bytes + words
            assert part.first_bytes == other.first_bytes


@pytest.mark.parametrize("splits", [3, 4, 7])
def test_splits_of_a_group_have_all_of_its_heads(splits: int) -> None:
    """Whether or not they divide them: the blocks' steps are those of the call, and the longest has the most heads."""
    call = AttentionProblem(
        batch=2, seqlen_q=1024, seqlen_k=1000, num_heads_q=7, num_heads_kv=splits, head_dim=128, head_dim_v=128,
        dtype="bfloat16", softmax_scale=0.1, causal=Causal(),
    )  # fmt: skip
    walked = walk_by_keys(call, 64, 128)
    order = launch_order_by_keys(call, 64, 128, all_heads=True)
    steps = [step for of_sequence, times in order for step in of_sequence * times]
    assert sum(steps) == walked[0] == walk_by_keys(replace(call, num_heads_kv=1), 64, 128)[0]
    assert max(steps) == walked[1] == -(-7 // splits) * 16
    assert len(steps) == 2 * 8 * splits


def test_blocks_of_the_last_keys_first_end_with_the_longest() -> None:
    call = AttentionProblem(
        batch=2, seqlen_q=1024, seqlen_k=1024, num_heads_q=132, num_heads_kv=132, head_dim=128, head_dim_v=128,
        dtype="bfloat16", softmax_scale=0.1, causal=Causal(), deterministic=True,
    )  # fmt: skip
    config = hopper_flash_bwd.Config(64, 3)
    orders = [
        [part.order for part in hopper_flash_bwd.cost(one, H200, config).parts if part.order]
        for one in (call, replace(call, deterministic=False), replace(call, batch=1, num_heads_q=66, num_heads_kv=66))
    ]
    assert orders[1:] == [[], []], "the longest first"
    ((of_items,),) = orders[:1]
    for lengths, times in of_items:
        assert times == 1 and len(lengths) == 8 * 132 and list(lengths) == sorted(lengths)
    assert len(of_items) == 2
