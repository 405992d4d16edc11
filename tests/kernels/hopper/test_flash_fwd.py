"""What the Hopper forward alone has to show: its claims without a GPU, and its races on one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from warpwave import attention, attention_varlen
from warpwave.hardware.gpu import CPU, Gpu
from warpwave.kernels.hopper import flash_fwd
from warpwave.problem import AttentionProblem, Causal

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
        ({"dtype": "float32"}, H200, "float16 and bfloat16"),
        ({"head_dim": 59}, H200, "head_dim is 59"),
        ({"head_dim_v": 264}, H200, "head_dim_v is 264"),
        ({"mask_shape": (1, 1, 1000, 1000)}, H200, "boolean mask"),
        ({"bias_shape": (1, 1, 1000, 1000), "bias_dtype": "bfloat16"}, H200, "bias"),
        ({"requires_grad": True}, H200, "gradients"),
    ],
)
def test_says_why_not(change: dict[str, Any], gpu: Gpu, word: str) -> None:
    assert any(word in reason for reason in flash_fwd.why_not(replace(PROBLEM, **change), gpu))


@pytest.mark.skipif(flash_fwd.NO_TRITON is not None, reason="Triton is published for Linux only")
@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 80, 96, 112, 128, 192, 240, 256])
def test_every_head_dim_has_a_config_that_fits(head_dim: int) -> None:
    problem = replace(PROBLEM, head_dim=head_dim, head_dim_v=head_dim)
    assert flash_fwd.why_not(problem, H200) == []
    for config in flash_fwd.configs(problem, H200):
        assert flash_fwd.smem_bytes(problem, H200, config) <= H200.smem_per_block_bytes // config.blocks_per_sm


@pytest.mark.parametrize(
    ("head_dim", "expected"),
    [(8, (16,)), (64, (64,)), (80, (64, 16)), (96, (64, 32)), (112, (64, 32, 16)), (192, (128, 64)), (240, (256,))],
)
def test_widths_are_sums_of_powers_of_two(head_dim: int, expected: tuple[int, ...]) -> None:
    assert flash_fwd.pieces(head_dim) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"block_m": 96},
        {"block_n": 32},
        {"num_stages": 1},
        {"blocks_per_sm": 4},
        {"block_m": 128, "blocks_per_sm": 2},
    ],
    ids=str,
)
def test_configs_check_themselves(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must be|needs|barriers"):
        flash_fwd.Config(**({"block_m": 64, "block_n": 64, "num_stages": 2} | changes))


def test_tiles_are_those_that_some_query_sees() -> None:
    config = flash_fwd.Config(64, 64, 2)
    one_head = replace(PROBLEM, batch=1, num_heads_q=1, num_heads_kv=1, seqlen_q=256, seqlen_k=256)
    assert flash_fwd.tiles(one_head, config) == 16
    assert flash_fwd.tiles(replace(one_head, causal=Causal()), config) == 10
    assert flash_fwd.tiles(replace(one_head, window_size=(0, 0)), config) == 4
    # Rows that see nothing get one tile, all masked.
    assert flash_fwd.tiles(replace(one_head, causal=Causal(), seqlen_k=64), config) == 4


# Races ----------------------------------------------------------------------------------------------------------------


def hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not hopper(), reason="needs a Hopper GPU")
def test_no_tile_is_lost_among_mixed_launches() -> None:
    """2,000 launches that change variant each time, with up to three blocks an SM.

    A barrier that was initialised and never used once had its memory handed out again as scratch, with its bits in it:
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
    expected = [call() for call in calls]
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(2000):
        n = (i * 7) % len(calls)
        different += (calls[n]().view(torch.int16) != expected[n].view(torch.int16)).any()
    assert different.item() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not hopper(), reason="needs a Hopper GPU")
def test_a_captured_launch_shares_its_counter_with_nobody() -> None:
    """A graph replayed on one stream beside eager calls on the stream it was captured from."""
    q = torch.randn(4, 1500, 16, 64, device="cuda", dtype=torch.bfloat16)
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
