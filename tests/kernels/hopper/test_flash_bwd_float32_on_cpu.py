"""The Hopper backward in float32, in parts: its own source on a CPU, tile by tile, against the gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import cases
from tests.conformance.cases import Call
from tests.conformance.datasets import Data
from tests.conformance.gates import backward_references, judge_backward
from tests.kernels.hopper.gradients_on_cpu import CALLS, CPU, DROPPED, H200, SHORT, judge, on_cpu
from tests.marks import needs_triton, one_in
from warpwave.kernels.hopper import flash_bwd
from warpwave.workbench.verify.reference import Gradients, oracle

pytestmark = needs_triton


def in_float32(features: dict[str, Any], dims: tuple[int, int], data: Data = "normal") -> Call:
    """A call without softcap and sinks, and of at least 64 queries and keys: these launches take no others."""
    lengths = tuple(max(64, length) for length in features.get("lengths", SHORT.lengths))
    features = {**features, "lengths": lengths, "softcap": 0.0, "sinks": False}
    case = replace(SHORT, dtype="float32:default", dims=dims, **features)
    call = cases.build(case, data, CPU)
    assert not flash_bwd.why_not(call.problem, H200)
    return call


def upstream(call: Call, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """dout and dlse, of which dout has a few large rows."""
    g = torch.Generator().manual_seed(2)
    dout = torch.randn(*call.operands.q.shape[:-1], call.problem.head_dim_v, generator=g)
    dlse = torch.randn(dout.shape[:-1], generator=g).transpose(-1, -2).contiguous()
    dout.flatten(0, -3)[::16] *= 1000
    return dout * scale, dlse * scale


def judge_parts(call: Call, dout: Tensor, dlse: Tensor | None) -> Gradients:
    references = backward_references(call.problem, call.operands, dout, dlse)
    found = on_cpu(call, dout, dlse, 0)
    verdict = judge_backward(call.problem, references, found)
    assert verdict.passed, str(verdict)
    return found


SOME = ("causal", "window", "packed window")


@one_in(4)
@pytest.mark.parametrize(
    ("dims", "features"),
    [
        *((dims, name) for dims in ((64, 64), (40, 24)) for name in CALLS),
        *((dims, name) for dims in ((128, 128), (64, 80), (59, 111)) for name in SOME),
    ],
    ids=str,
)
def test_float32_on_a_cpu(features: str, dims: tuple[int, int]) -> None:
    call = in_float32(CALLS[features], dims)
    dout, dlse = upstream(call)
    judge_parts(call, dout, dlse if features != "full" else None)


@one_in(4)
@pytest.mark.parametrize("data", ["sharp", "low"])
@pytest.mark.parametrize("features", ["full", *SOME])
def test_float32_on_other_data(features: str, data: Data) -> None:
    call = in_float32({"heads": (4, 2), "batch": 2, **CALLS[features]}, (64, 64), data)
    judge_parts(call, *upstream(call))


@one_in(4)
@pytest.mark.parametrize("features", DROPPED)
def test_float32_with_dropout_on_a_cpu(features: str) -> None:
    """With NaN in rows that see nothing or that nothing sees, where tiles begin."""
    call = in_float32({**DROPPED[features], "dropout": 0.3, "lse": False}, (64, 40))
    judge(call, "from" in features, more=False)


MASKED: dict[str, dict[str, Any]] = {
    "mask": {"mask": "full", "batch": 2, "heads": (2, 2)},
    "mask of keys, causal": {"mask": "keys", "causal": "bottom_right", "lengths": (330, 150), "heads": (2, 1)},
    "mask of keys": {"mask": "keys", "heads": (4, 2), "batch": 2},
    "mask of rows": {"mask": "rows", "heads": (2, 2), "lengths": (400, 600)},
    "mask of rows, window": {"mask": "rows", "heads": (2, 2), "window": (300, 5), "lengths": (400, 600)},
    "mask of a head, alibi": {"mask": "full", "heads": (3, 3), "alibi": "heads", "batch": 2, "causal": "top_left"},
    "mask, dropout": {"mask": "full", "heads": (2, 2), "window": (60, 90), "lengths": (200, 460), "dropout": 0.3},
}


@one_in(6)
@pytest.mark.parametrize("dims", [(64, 40), (128, 128), (59, 111)], ids=str)
@pytest.mark.parametrize("of_unseen", [torch.nan, 1e30])
@pytest.mark.parametrize("features", MASKED)
def test_float32_under_masks_on_a_cpu(features: str, of_unseen: float, dims: tuple[int, int]) -> None:
    """What the mask hides entirely has no effect, neither as NaN nor, by its size, on the scales of the others."""
    call = in_float32({**MASKED[features], "lse": False}, dims)
    judge(call, of_unseen, more="alibi" in features)


def test_float32_queries_and_keys_that_a_mask_hides() -> None:
    """Whole tiles of queries, and the first tiles of keys, as padding at the left does, of all heads of two groups."""
    call = in_float32({"lengths": (400, 330), "mask": "keys", "heads": (4, 2), "lse": False}, (64, 64))
    mask = torch.rand(1, 1, 400, 330, generator=torch.Generator().manual_seed(4)) < 0.7
    mask[..., :140] = mask[:, :, 128:256] = False
    problem = replace(call.problem, mask_shape=tuple(mask.shape))
    judge(call._replace(problem=problem, operands=call.operands._replace(mask=mask)), torch.nan, more=False)


@pytest.mark.parametrize("hidden", [64, 130, 600])
def test_float32_center_of_the_keys_behind_padding(hidden: int) -> None:
    """Keys that are nearly equal, behind padding at the left: their center is not that of the first tile."""
    call = in_float32({"lengths": (400, 700), "mask": "keys", "lse": False}, (64, 64), "low")
    mask = (torch.arange(700) >= hidden)[None, None, None]
    dout, _ = upstream(call)
    judge_parts(call._replace(operands=call.operands._replace(mask=mask)), dout, None)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e15])
def test_float32_of_any_magnitude(scale: float) -> None:
    """Columns of k, v and q span four decades, and what arrives may be as small or large as float32 holds."""
    call = in_float32({"lengths": (150, 200)}, (64, 64))
    q, k, v = call.operands[:3]
    for tensor, factor in ((q, 1 / 30), (k, 30.0), (v, 100.0)):
        tensor[..., 3] *= factor
    v *= 1e-3 / scale if scale > 1 else 1.0
    judge_parts(call, *upstream(call, scale))


def test_float32_of_a_loss_of_the_log_sum_exp_alone() -> None:
    call = in_float32({"causal": "bottom_right"}, (64, 64))
    dout, dlse = upstream(call)
    found = judge_parts(call, torch.zeros_like(dout), 1e6 * dlse)
    assert not found.dv.any()


def test_float32_of_rows_that_see_one_key() -> None:
    """dP - delta cancels in the first row of each head: its gradients are a rounding error."""
    call = in_float32({"causal": "top_left", "lengths": (64, 64), "heads": (2, 2), "batch": 2}, (64, 64), "sharp")
    dout, _ = upstream(call)
    found = judge_parts(call, dout, None)
    assert found.dq[:, 0].abs().max() < 1e-6 * found.dq.abs().max()


def test_float32_infinities_reach_the_rows_that_see_them() -> None:
    call = in_float32({"causal": "bottom_right", "lengths": (150, 150), "lse": False}, (64, 64))
    dout, _ = upstream(call)
    expected = on_cpu(call, dout, None, 0)
    exact = oracle(replace(call.problem, return_lse=True), call.operands)
    v = call.operands.v.clone()
    v[:, 100, 0, 7] = torch.inf
    changed = call._replace(operands=call.operands._replace(v=v))
    out = exact.out.clone()
    out[:, 100:, :, 7] = torch.inf
    found = on_cpu(changed, dout, None, 0, exact._replace(out=out))
    assert torch.equal(found.dq[:, :64], expected.dq[:, :64]) and not found.dq[:, 100:].isfinite().all(-1).any()
