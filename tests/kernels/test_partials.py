"""The launch that merges parts of rows, against the same sum in float64: few parts and more than are loaded at once."""

from __future__ import annotations

import math

import pytest
import torch

from warpwave.kernels import partials
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("num_parts", "head_dim_v"), [(2, 16), (9, 40), (33, 128), (70, 128), (5, 1024), (20, 576)])
def test_parts_become_one(num_parts: int, head_dim_v: int, batch_invariant: bool, sinks: bool) -> None:
    problem = AttentionProblem(
        batch=1, seqlen_q=3, seqlen_k=num_parts, num_heads_q=2, num_heads_kv=1, head_dim=16, head_dim_v=head_dim_v,
        dtype="float32", softmax_scale=1.0, return_lse=True, has_sinks=sinks, batch_invariant=batch_invariant,
    )  # fmt: skip
    g = torch.Generator(DEVICE).manual_seed(num_parts)
    acc, state = partials.allocate(problem, num_parts, DEVICE)
    acc.normal_(generator=g)
    # In one head a few parts have all the weight, in the other every part has some.
    spread = torch.tensor([40.0, 1.0], device=DEVICE)
    state[:, 0] = spread * torch.randn(num_parts, 3, 2, generator=g, device=DEVICE)
    state[:, 1] = torch.rand(num_parts, 3, 2, generator=g, device=DEVICE) + 0.5
    nothing = torch.rand(num_parts, 3, 2, generator=g, device=DEVICE) < 0.3
    nothing[:, 2, 1] = True  # a row that no part saw
    state[:, 0][nothing], state[:, 1][nothing], acc[nothing] = -math.inf, 0.0, math.nan
    out, lse = torch.empty(1, 3, 2, head_dim_v, device=DEVICE), torch.empty(1, 2, 3, device=DEVICE)
    sink = torch.randn(2, generator=g, device=DEVICE) if sinks else None
    spec = partials.specify_merge(problem, num_parts, acc, state, out, lse, sink)
    launch.bind(spec)(acc, state, out, lse, sink)

    m, sums, acc = state[:, 0].double(), state[:, 1].double(), torch.where(nothing[..., None], 0.0, acc.double())
    if sink is not None:
        m = torch.cat([m, (sink.double() / math.log(2)).expand(1, 3, 2)])
        sums, acc = torch.cat([sums, torch.ones_like(sums[:1])]), torch.cat([acc, torch.zeros_like(acc[:1])])
    top = m.amax(0)
    weight = torch.exp2(m - torch.where(top == -math.inf, 0.0, top))
    total = (weight * sums).sum(0)
    expected = (weight[..., None] * acc).sum(0) / torch.where(total == 0, 1.0, total)[..., None]
    torch.testing.assert_close(out[0].double(), expected, atol=2e-6, rtol=2e-6)
    logs = (top + total.log2()) * math.log(2)
    torch.testing.assert_close(lse[0].double(), logs.T, atol=1e-5, rtol=1e-6)
