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
@pytest.mark.parametrize(("num_parts", "head_dim_v"), [(2, 16), (9, 40), (33, 128), (70, 128), (5, 1024)])
def test_parts_become_one(num_parts: int, head_dim_v: int, batch_invariant: bool, sinks: bool) -> None:
    problem = AttentionProblem(
        batch=1, seqlen_q=3, seqlen_k=num_parts, num_heads_q=2, num_heads_kv=1, head_dim=16, head_dim_v=head_dim_v,
        dtype="float32", softmax_scale=1.0, return_lse=True, has_sinks=sinks, batch_invariant=batch_invariant,
    )  # fmt: skip
    g = torch.Generator(DEVICE).manual_seed(num_parts)
    acc, state = partials.allocate(problem, num_parts, DEVICE)
    acc.normal_(generator=g)
    state[:, 0] = 40 * torch.randn(num_parts, 3, 2, generator=g, device=DEVICE)
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


def test_counters_of_captured_launches_are_shared_by_address_alone() -> None:
    """Launches that torch gives the same memory follow one another; no others may count in the same place."""
    kept = partials._Kept(torch.device("cpu"))
    assert not kept.arrived_in_graph(512, 3).any(), "before the first launch outside a graph: zeroed by the graph"
    kept.for_graphs = torch.zeros(10, dtype=torch.int32)
    kept.CAPTURED = 10
    a, b, again, larger = (kept.arrived_in_graph(*args) for args in ((512, 3), (1024, 3), (512, 2), (512, 4)))
    assert again.data_ptr() == a.data_ptr() and len({x.data_ptr() for x in (a, b, larger)}) == 3
    for x in (a, b, larger):
        x += 1
    assert kept.for_graphs.tolist() == [1] * 10, "neither more nor less than was asked for, and nothing twice"
    none_left = kept.arrived_in_graph(2048, 1)
    assert none_left.tolist() == [0] and 2048 not in kept.of_address
