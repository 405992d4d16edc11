"""What the eager kernel promises beside correctness: bounded memory, and settings left as they were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import warpwave
from warpwave.gpu import CPU
from warpwave.kernels import eager
from warpwave.problem import AttentionProblem

PROBLEM = AttentionProblem(
    batch=1, seqlen_q=100, seqlen_k=100, num_heads_q=2, num_heads_kv=2, head_dim=8, head_dim_v=8,
    dtype="float32", softmax_scale=0.3,
)  # fmt: skip


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("seqlen", [1024, 16384, 1_000_000])
@pytest.mark.parametrize("heads", [1, 16, 512])
def test_the_workspace_is_bounded_whatever_the_length(seqlen: int, heads: int) -> None:
    problem = replace(PROBLEM, seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=heads, num_heads_kv=heads)
    config = eager.configs(problem, CPU)[0]
    per_head = config.block_m * config.block_n
    assert per_head * heads <= max(2 * eager.TILE_ELEMENTS, 2 * 256 * 256 * heads)


def test_memory_grows_with_the_length_not_its_square() -> None:
    """The largest tensor alive at once, seen by a mode that watches every operation."""
    seen = []
    for seqlen in (2048, 4096):
        q = torch.randn(1, seqlen, 1, 8)
        with Largest() as largest:
            warpwave.attention(q, q, q, kernel="eager", config=eager.Config(256, 256))
        seen.append(largest.elements)
    assert seen[1] <= 2 * seen[0] and seen[1] < 4096 * 4096 // 16


@pytest.mark.parametrize("block", [(7, 5), (64, 33), (1000, 1000)])
def test_tiles_do_not_change_the_result(block: tuple[int, int]) -> None:
    q, k, v = (torch.randn(2, 90, 4, 16, dtype=torch.float64).float() for _ in range(3))
    kwargs: dict[str, Any] = {"causal": True, "window_size": (20, -1), "softcap": 3.0, "return_lse": True}
    out, lse = warpwave.attention(q, k, v, kernel="eager", **kwargs)
    tiled, tiled_lse = warpwave.attention(q, k, v, kernel="eager", config=eager.Config(*block), **kwargs)
    torch.testing.assert_close(tiled, out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tiled_lse, lse, rtol=1e-6, atol=1e-6)


def test_the_process_wide_matmul_precision_is_restored() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        q = torch.randn(1, 8, 1, 8)
        warpwave.attention(q, q, q, kernel="eager", precision="ieee")
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_float64_with_alibi_is_float64() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, 2, 16, dtype=torch.float64) for _ in range(3))
    slopes = torch.tensor([0.3, 0.7])
    distance = (torch.arange(64)[:, None] - torch.arange(64)).abs()
    bias = -slopes.double()[None, :, None, None] * distance
    with_slopes = warpwave.attention(q, k, v, alibi_slopes=slopes)
    torch.testing.assert_close(with_slopes, warpwave.attention(q, k, v, bias=bias), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_gradients_of_slopes_are_those_of_differences(sinks: bool, softcap: float) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 8, dtype=torch.float64) for n in (5, 9, 9))
    slopes = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    options: dict[str, Any] = {"sinks": torch.randn(2, dtype=torch.float64) if sinks else None, "softcap": softcap}
    assert torch.autograd.gradcheck(
        lambda s: warpwave.attention(q, k, v, alibi_slopes=s, causal=True, return_lse=True, **options), (slopes,)
    )


def test_a_config_checks_itself() -> None:
    with pytest.raises(ValueError, match=r"block_m is 8\.0; it must be an integer"):
        eager.Config(16 / 2, 16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="block_n is 0; it must be at least 1"):
        eager.Config(8, 0)
