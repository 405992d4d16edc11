"""What the Hopper forward alone has to show: its claims without a GPU, and its races on one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.marks import needs_triton
from warpwave import UnsupportedProblem, attention, attention_varlen
from warpwave.cached_calls import operands_without_memory
from warpwave.gpu import CPU, Gpu, current_gpu
from warpwave.kernels.cost import walk
from warpwave.kernels.hopper import flash_fwd, host
from warpwave.kernels.hopper.flash_fwd import config as flash_fwd_configs
from warpwave.kernels.hopper.flash_fwd import launches
from warpwave.kernels.prepass import scale_ahead, split_ahead
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem, Causal
from warpwave.runtime import launch

H200 = Gpu.for_arch("sm_90")
PROBLEM = AttentionProblem(
    batch=2, seqlen_q=1000, seqlen_k=1000, num_heads_q=8, num_heads_kv=2, head_dim=128, head_dim_v=128,
    dtype="bfloat16", softmax_scale=0.1,
)  # fmt: skip


# What it claims -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "gpu", "word"),
    [
        ({}, Gpu.for_arch("sm_80"), "Hopper"),
        ({}, Gpu.for_arch("sm_100"), "Hopper"),
        ({}, CPU, "Hopper"),
        ({"dtype": "float32", "precision": "ieee"}, H200, "fp16x1, fp16x3, bf16x6"),
        ({"dtype": "float32", "error_budget": 1e-9}, H200, "relative error of 1e-09"),
        ({"dtype": "float32", "head_dim": 264}, H200, "at most 256 in float32"),
        ({"head_dim": 59}, H200, "head_dim is 59"),
        ({"head_dim_v": 392}, H200, "head_dim_v is 392"),
        ({"bias_shape": (1, 1, 1, 1000), "bias_dtype": "float32", "dtype": "float32"}, H200, "only in 16-bit types"),
        ({"mask_shape": (1, 8, 1, 1000), "num_heads_q": 8, "num_heads_kv": 2, "dtype": "float32"}, H200, "a kv head"),
        (
            {"bias_shape": (1, 1, 1, 1000), "bias_dtype": "float32", "head_dim_v": 264},
            H200,
            "a bias only up to head_dim 256",
        ),
        ({"requires_grad": True}, H200, "gradients"),
    ],
)
def test_says_why_not(change: dict[str, Any], gpu: Gpu, word: str) -> None:
    assert any(word in reason for reason in flash_fwd.why_not(replace(PROBLEM, **change), gpu))


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("bfloat16", "default"), ("float32", "default"), ("float32", "tf32"), ("float32", "bf16x6")],
    ids=str,
)
@pytest.mark.parametrize(
    "widths",
    [*((n, n) for n in (8, 16, 40, 64, 80, 96, 112, 128, 192, 240, 256, 272, 320, 384)), (320, 384), (64, 384)],
    ids=str,
)
def test_every_head_dim_has_a_config_that_fits(widths: tuple[int, int], dtype: str, precision: str) -> None:
    problem = replace(PROBLEM, head_dim=widths[0], head_dim_v=widths[1], dtype=dtype, precision=precision)
    if dtype == "float32" and max(widths) > 256:
        assert flash_fwd.why_not(problem, H200) != []
        return
    assert flash_fwd.why_not(problem, H200) == []
    for config in flash_fwd.configs(problem, H200):
        assert flash_fwd.smem_bytes(problem, H200, config) <= H200.smem_per_block_bytes // config.blocks_per_sm


@pytest.mark.parametrize(
    ("head_dim", "expected"),
    [(8, (16,)), (64, (64,)), (80, (64, 16)), (96, (64, 32)), (112, (64, 32, 16)), (192, (128, 64)), (240, (256,))],
)
def test_widths_are_sums_of_powers_of_two(head_dim: int, expected: tuple[int, ...]) -> None:
    assert host.pieces(head_dim) == expected


PADDED = {(48, 64): (64,), (80, 32): (64, 32), (112, 64): (128,), (160, 64): (128, 64), (176, 64): (128, 64),
          (8, 32): (32,)}  # fmt: skip


@pytest.mark.parametrize(("head_dim", "narrowest"), PADDED, ids=str)
def test_narrow_pieces_are_padded(head_dim: int, narrowest: int) -> None:
    expected = PADDED[head_dim, narrowest]
    assert host.pieces(head_dim, narrowest) == expected
    problem, plain = replace(PROBLEM, head_dim=head_dim, head_dim_v=head_dim), flash_fwd.Config(128, 64, 2)
    config = replace(plain, narrowest_v=narrowest)
    assert flash_fwd_configs.row_pieces(problem, config) == (host.pieces(head_dim), expected)
    assert flash_fwd.smem_bytes(problem, H200, config) > flash_fwd.smem_bytes(problem, H200, plain)
    assert flash_fwd.cost(problem, H200, config).flops > flash_fwd.cost(problem, H200, plain).flops


@pytest.mark.parametrize(
    ("widths", "block_n", "columns"), [((192, 128), 64, 128), ((192, 128), 128, 0), ((128, 192), 64, 192)]
)
def test_out_may_use_the_memory_of_the_first_pieces_of_q(widths: tuple[int, int], block_n: int, columns: int) -> None:
    problem = replace(PROBLEM, head_dim=widths[0], head_dim_v=widths[1])
    assert flash_fwd_configs.out_columns(problem, flash_fwd.Config(128, block_n, 2)) == columns


@pytest.mark.parametrize(
    "changes",
    [
        {"block_m": 96},
        {"block_n": 16},
        {"num_stages": 0},
        {"blocks_per_sm": 4},
        {"block_m": 128, "blocks_per_sm": 2},
        {"narrowest_v": 8},
    ],
    ids=str,
)
def test_configs_check_themselves(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must be|needs|barriers"):
        flash_fwd.Config(**({"block_m": 64, "block_n": 64, "num_stages": 2} | changes))


@pytest.mark.parametrize(
    ("change", "columns"),
    [
        ({}, 128),
        ({"causal": Causal()}, 128),
        ({"head_dim": 248, "head_dim_v": 240}, 128),
        ({"window_size": (99, 0)}, 128),
        ({"softcap": 5.0}, 128),
        ({"bias_shape": (1, 4, 4096, 4096), "bias_dtype": "bfloat16"}, 0),
        ({"head_dim_v": 128}, 128),
        ({"head_dim": 192, "head_dim_v": 192}, 0),
        ({"head_dim": 176, "head_dim_v": 192}, 192),
        ({"head_dim": 320, "head_dim_v": 320}, 0),
    ],
)
def test_columns_of_out_in_shared_memory_at_head_dim_256(change: dict[str, Any], columns: int) -> None:
    given = {"head_dim": 256, "head_dim_v": 256, "seqlen_q": 4096, "seqlen_k": 4096} | change
    problem = replace(PROBLEM, batch=4, num_heads_q=4, num_heads_kv=4, **given)
    config = flash_fwd.configs(problem, H200)[0]
    assert flash_fwd_configs.out_columns(problem, config) == columns
    assert sum(flash_fwd_configs.out_pieces(problem, config)) == sum(host.pieces(problem.head_dim_v))
    assert flash_fwd.smem_bytes(problem, H200, config) + 1024 <= flash_fwd_configs.SMEM_PER_SM


def test_a_bias_is_copied_only_where_no_map_describes_it() -> None:
    """What is the same along an axis is described once; rows of an odd number of elements are copied to even ones."""
    as_is = launches.bias_for_maps
    bias = torch.randn(2, 3, 40, 48)
    assert as_is(bias) is bias
    expanded = torch.randn(40, 48)[None, None].expand(2, 3, 40, 48)
    once = as_is(expanded)
    assert once is not None and once.shape == (1, 1, 40, 48) and once.data_ptr() == expanded.data_ptr()
    plan = launches._bias_plan(once, flash_fwd.Config(128, 64, 2))
    assert plan is not None and all(stride % 4 == 0 and stride > 0 for stride in plan.strides[:-1])
    odd = torch.randn(1, 3, 40, 45)
    copied = as_is(odd)
    assert copied is not None and copied.stride(2) == 48 and torch.equal(copied, odd)
    keys = torch.randn(1, 3, 1, 45)
    assert as_is(keys) is keys, "read by plain loads"


def test_a_single_stage_is_for_several_parts() -> None:
    """In 16 bits K comes a tile ahead of V: with one stage each would wait for the other."""
    for problem in (PROBLEM, replace(PROBLEM, dtype="float32", precision="tf32")):
        operands = operands_without_memory(problem)
        with pytest.raises(UnsupportedProblem, match="num_stages is 1; it must be at least 2"):
            flash_fwd.specify(problem, H200, operands, operands.q, None, flash_fwd.Config(64, 64, 1))
    for precision, parts in (("default", 2), ("bf16x6", 3)):
        float32 = replace(PROBLEM, dtype="float32", precision=precision)
        operands = operands_without_memory(float32)
        launches: Any = flash_fwd.specify(float32, H200, operands, operands.q, None, flash_fwd.Config(64, 64, 1))
        attend = launches[-1]
        assert attend.constants["STAGES"] == 1 and attend.constants["PARTS"] == parts
        assert launches[-2].constants["PARTS"] == parts


@pytest.mark.parametrize(
    ("heads", "change", "together"),
    [
        ((8, 2), {"causal": Causal(), "window_size": (100, 0)}, 4),
        ((8, 2), {"has_sinks": True, "softcap": 30.0}, 4),
        ((12, 2), {}, 2),
        ((12, 4), {}, 1),
        ((128, 1), {"packed": True, "total_q": 1900, "total_k": 1900}, 64),
        ((8, 8), {}, 1),
        ((8, 2), {"alibi_shape": (1, 8)}, 1),
        ((8, 2), {"mask_shape": (1, 1, 1, 1000)}, 1),
        ((8, 2), {"bias_shape": (1, 1, 1, 1000), "bias_dtype": "bfloat16"}, 1),
        ((8, 2), {"dropout_p": 0.1}, 1),
        ((8, 2), {"dtype": "float32", "precision": "tf32"}, 1),
        ((8, 2), {"dtype": "int8", "dtype_v": "bfloat16", "dtype_out": "bfloat16", "descale_blocks": (0, 0, 0)}, 1),
    ],
    ids=str,
)
def test_heads_that_share_tiles(heads: tuple[int, int], change: dict[str, Any], together: int) -> None:
    problem = replace(PROBLEM, num_heads_q=heads[0], num_heads_kv=heads[1], **change)
    assert {config.heads for config in flash_fwd.configs(problem, H200)} == {together}


def test_more_heads_than_can_share_a_tile_are_refused() -> None:
    float32 = {"dtype": "float32", "precision": "tf32"}
    for change, most in (({"num_heads_kv": 4}, 2), ({"alibi_shape": (1, 8)}, 1), (float32, 1)):
        problem = replace(PROBLEM, **change)
        operands = operands_without_memory(problem)
        with pytest.raises(UnsupportedProblem, match=f"heads is 4; at most {most} heads"):
            flash_fwd.specify(problem, H200, operands, operands.q, None, flash_fwd.Config(128, 64, 2, heads=4))
    with pytest.raises(ValueError, match="heads is 3"):
        flash_fwd.Config(128, 64, 2, heads=3)


def test_heads_that_share_tiles_leave_fewer_rows_empty() -> None:
    """144 queries of 8 heads fill 9 tiles of 128 rows. One head a tile, they take 16, and 8 warpgroups skip theirs."""
    problem = replace(PROBLEM, seqlen_q=144, num_heads_q=16, batch=1)
    together, apart = (flash_fwd.cost(problem, H200, flash_fwd.Config(128, 64, 2, heads=heads)) for heads in (8, 1))
    assert (together.items, apart.items) == (18, 32) and 4 * together.flops == 3 * apart.flops


@pytest.mark.parametrize(
    ("precision", "parts"),
    [("default", 2), ("bf16x6", 3), ("tf32x3", 2), ("bf16x3", 2), ("tf32", 1), ("fp16x1", 1), (1e-2, 1), (1e-4, 2)],
)
def test_float32_is_computed_in_the_parts_its_precision_means(precision: str | float, parts: int) -> None:
    asked: Any = {"error_budget": precision} if isinstance(precision, float) else {"precision": precision}
    problem = replace(PROBLEM, dtype="float32", **asked)
    assert flash_fwd.why_not(problem, H200) == []
    config = flash_fwd.configs(problem, H200)[0]
    cost = flash_fwd.cost(problem, H200, config)
    rows, keys = 2 * 1000 * 8, 2 * 1000 * 2
    numbers = sum(scale_ahead.workspace_floats(problem)) if parts < 3 else 0
    assert cost.workspace_bytes == 2 * parts * 128 * (rows + 2 * keys) + 4 * numbers, "the parts of q, k and v"
    assert cost.launches == (3 if parts < 3 else 2)
    one_head = replace(problem, batch=1, num_heads_q=1, num_heads_kv=1, seqlen_q=128, seqlen_k=128)
    assert flash_fwd.cost(one_head, H200, config).launches == 2


def test_parts_of_a_head_lie_side_by_side() -> None:
    """What the maps describe is what the split writes, for rows of any length."""
    shapes = split_ahead.part_shapes(replace(PROBLEM, dtype="float32", seqlen_k=77), 3, 128, 80)
    assert shapes == ((2, 24, 1000, 128), (2, 6, 77, 128), (2, 6, 77, 80))
    packed = replace(PROBLEM, dtype="float32", packed=True, total_q=5, total_k=9)
    assert split_ahead.part_shapes(packed, 2, 16, 32) == ((1, 16, 5, 16), (1, 4, 9, 16), (1, 4, 9, 32))


@pytest.mark.parametrize("arithmetic", ["bf16x3", "bf16x6"])
@pytest.mark.parametrize("packed", [False, True])
def test_parts_add_up_to_the_operands(packed: bool, arithmetic: str) -> None:
    """In the interpreter, or on a GPU: q, k and v of any strides, in rows padded with zeros."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = current_gpu(device)
    wide = torch.randn(2, 13, 3, 2 * 40, device=device)
    q, k, v = wide[..., ::2], wide[:, :7, :1, :40].transpose(1, 2).contiguous().transpose(1, 2), wide[:, :7, 1:2, 3:11]
    fields: dict[str, Any] = {"seqlen_q": 13, "seqlen_k": 7}
    if packed:
        q, k, v = q[0], k[0], v[0]
        fields |= {"packed": True, "total_q": 13, "total_k": 7, "batch": 1}
    problem = replace(
        PROBLEM, **fields, num_heads_q=3, num_heads_kv=1, head_dim=40, head_dim_v=8, dtype="float32",
        precision=arithmetic,
    )  # fmt: skip
    operands = Operands(q, k, v, None, None, None, None, None, None)
    spec, parts = split_ahead.specify_all(problem, gpu, operands, arithmetic, 48, 16)
    for part in parts:
        part.fill_(torch.nan)
    launch.bind(spec)(q, k, v, *parts)
    for x, part in zip((q, k, v), parts, strict=True):
        count = {"bf16x3": 2, "bf16x6": 3}[arithmetic]
        heads = (x[None] if packed else x).transpose(1, 2)  # (batch, heads, rows, width)
        summed = part.double().unflatten(1, (-1, count)).sum(2)
        assert part.isfinite().all() and not summed[..., x.shape[-1] :].any(), "zero behind the operand"
        error = (summed[..., : x.shape[-1]] - heads).abs() / heads.abs()
        assert error.max() <= {"bf16x3": 2.0**-16, "bf16x6": 0.0}[arithmetic]


def test_tiles_are_those_that_some_query_sees() -> None:
    one_head = replace(PROBLEM, batch=1, num_heads_q=1, num_heads_kv=1, seqlen_q=256, seqlen_k=256)

    def tiles(**changes: Any) -> int:
        return walk(replace(one_head, **changes), 64, 64, from_first=True).tiles

    assert tiles() == 16
    assert tiles(causal=Causal()) == 10
    assert tiles(window_size=(0, 0)) == 4
    # Rows that see nothing get one tile, all masked.
    assert tiles(causal=Causal(), seqlen_k=64) == 4


# Races ----------------------------------------------------------------------------------------------------------------


def hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not hopper(), reason="needs a Hopper GPU")
def test_no_tile_is_lost_among_mixed_launches() -> None:
    """2,000 launches that change variant each time, with up to three blocks an SM.

    A barrier that was initialized and never used once had its memory handed out again as scratch, with its bits in it:
    the first tile drawn was garbage in 5 % of launches, and only where variants took turns.
    """
    calls: list[Callable[[], torch.Tensor]] = []
    configs = [flash_fwd.Config(64, 64, 3, 3), flash_fwd.Config(64, 128, 2, 2), flash_fwd.Config(192, 128, 3), None]
    for heads, head_dim in ((48, 64), (24, 128)):  # more tiles than blocks, so that the counter is drawn from
        q, k, v = (torch.randn(2, 777, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        ends = torch.tensor([0, 500, 501, 1554], device="cuda", dtype=torch.int32)
        for config in configs if head_dim == 64 else [None]:
            for causal in (False, True):
                options: Any = {"kernel": "hopper/flash_fwd", "config": config, "causal": causal}
                calls.append(partial(attention, q, k, v, **options))
                lengths: Any = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 1053, "max_seqlen_k": 1053}
                packed: Any = [x.flatten(0, 1) for x in (q, k, v)]
                calls.append(partial(attention_varlen, packed[0], packed[1], packed[2], **lengths, **options))
        x: Any = torch.randn(2, 777, heads, head_dim, device="cuda")
        calls += [partial(attention, x, x, x, kernel="hopper/flash_fwd", precision=p) for p in flash_fwd.ABLE]
    expected = [call() for call in calls]
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(2000):
        n = (i * 7) % len(calls)
        different += (calls[n]().view(torch.int16) != expected[n].view(torch.int16)).any()
    assert different.item() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not hopper(), reason="needs a Hopper GPU")
def test_a_launch_finds_the_counter_as_the_one_before_found_it() -> None:
    """A tile that a later launch leaves out stays NaN: what out's memory held before is not the right result."""
    q = torch.randn(2, 777, 48, 64, device="cuda", dtype=torch.bfloat16)  # more tiles than blocks: some are drawn
    call = partial(attention, q, q, q, kernel="hopper/flash_fwd", config=flash_fwd.Config(64, 64, 3, 3))
    expected = call().clone()
    for _ in range(3):
        out = call()
        memory = out.data_ptr()
        out.fill_(torch.nan)
        del out
        again = call()
        assert again.data_ptr() == memory, "the allocator gave other memory, so nothing was tested"
        assert torch.equal(again, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not hopper(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_captured_launch_shares_its_counter_with_nobody(dtype: torch.dtype) -> None:
    """A graph replayed on one stream beside eager calls on the stream it was captured from; in float32 no workspace
    either."""
    q = torch.randn(4, 1500, 16, 64, device="cuda", dtype=dtype)
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = attention(q, q, q, causal=True, kernel="hopper/flash_fwd")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            captured = attention(q, q, q, causal=True, kernel="hopper/flash_fwd")
    for _ in range(50):
        with torch.cuda.stream(other):
            graph.replay()
        with torch.cuda.stream(side):
            eager = attention(q, q, q, causal=True, kernel="hopper/flash_fwd")
    torch.cuda.synchronize()
    assert torch.equal(eager, expected)
    assert torch.equal(captured, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not hopper(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("head_dim", "keys"), [(64, 2999), (64, 3072), (32, 1001), (128, 2999)])
def test_equal_calls_with_a_bias_are_equal(head_dim: int, keys: int, dtype: str) -> None:
    """A tile of a bias was overwritten before it was read, in 1 of 20 calls of 64 columns and 2,999 keys."""
    q, k, v = (torch.randn(1, n, 8, head_dim, device="cuda", dtype=torch.bfloat16) for n in (4500, keys, keys))
    bias = torch.randn(1, 8, 4500, keys, device="cuda").to(getattr(torch, dtype))
    expected = attention(q, k, v, bias=bias, kernel="hopper/flash_fwd")
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(400):
        found = attention(q, k, v, bias=bias, kernel="hopper/flash_fwd")
        different += (found.view(torch.int16) != expected.view(torch.int16)).any()
    assert different.item() == 0
