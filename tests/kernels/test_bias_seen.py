"""What a bias of minus infinity hides from everything is found, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.marks import needs_triton
from warpwave.kernels.prepass import bias_seen
from warpwave.problem import AttentionProblem, Causal
from warpwave.runtime import launch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # interpreted on a CPU
PROBLEM = AttentionProblem(
    batch=2, seqlen_q=170, seqlen_k=301, num_heads_q=3, num_heads_kv=3, head_dim=64, head_dim_v=64, dtype="float16",
    softmax_scale=0.1,
)  # fmt: skip


@needs_triton
@pytest.mark.parametrize("band", [{}, {"causal": Causal(), "window_size": (20, -1)}], ids=["", "window"])
@pytest.mark.parametrize("shape", [(2, 3, 170, 301), (1, 3, 1, 301), (2, 1, 170, 1), (1, 1, 1, 1)], ids=str)
def test_queries_and_keys_that_some_pair_shows(shape: tuple[int, ...], band: dict[str, Any]) -> None:
    problem = replace(PROBLEM, **band, bias_shape=shape, bias_dtype="float32")
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    bias[..., 5:9], bias[..., :, 128:140], bias[..., 150:153, :] = torch.nan, -torch.inf, -torch.inf
    if shape[2] > 1:
        bias[:, 0, :100, 200:260] = -torch.inf  # a window hides these keys from all others
    flags = [torch.zeros(s, dtype=torch.int8, device=DEVICE) for s in bias_seen.shapes(problem)]
    launch.bind(bias_seen.specify(problem, bias, None, *flags))(bias, None, *flags)
    lengths = (170, 301) if problem.has_band else shape[2:]
    shown = (bias != -torch.inf).expand(*shape[:2], *lengths)
    if problem.has_band:
        distance = torch.arange(301, device=DEVICE) - torch.arange(170, device=DEVICE)[:, None]
        shown = shown & (distance <= 131) & (distance >= 131 - 20)
    for found, axis in zip(flags, (3, 2), strict=True):
        assert torch.equal(found, shown.any(axis).to(torch.int8))


@needs_triton
@pytest.mark.parametrize("shape", [(2, 1, 1, 301), (1, 3, 170, 1), (1, 1, 1, 1), (2, 3, 170, 301)], ids=str)
def test_queries_and_keys_that_bias_and_mask_show_together(shape: tuple[int, ...]) -> None:
    of_bias = 1, 3, 170, 301
    problem = replace(PROBLEM, bias_shape=of_bias, bias_dtype="float16", mask_shape=shape)
    g = torch.Generator().manual_seed(0)
    bias = torch.where(torch.rand(of_bias, generator=g) < 0.02, 0.0, -torch.inf).to(DEVICE, torch.float16)
    mask = (torch.rand(shape, generator=g) < 0.3).to(DEVICE)
    flags = [torch.zeros(s, dtype=torch.int8, device=DEVICE) for s in bias_seen.shapes(problem)]
    launch.bind(bias_seen.specify(problem, bias, mask, *flags))(bias, mask, *flags)
    shown = (bias != -torch.inf) & mask
    for found, axis in zip(flags, (3, 2), strict=True):
        assert torch.equal(found, shown.any(axis).to(torch.int8))
