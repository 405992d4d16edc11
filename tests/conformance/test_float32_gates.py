"""The gates of float32, with its arithmetic: products summed in order pass, and one part too few does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.conformance import cases
from tests.conformance.cases import PLAIN, Call
from tests.conformance.datasets import DATA_SETS, Data
from tests.conformance.gates import forward_references, judge_forward

CPU = torch.device("cpu")
# The hardest for sums in order: wide heads, logits near -180, and rows of at most three keys, which average nothing.
CASE = replace(PLAIN, dtype="float32", dims=(192, 64), lengths=(199, 3), heads=(6, 6), batch=3, scale=0.3)


def in_order(q: Tensor, k: Tensor) -> Tensor:
    """Scores whose terms are added one after another in float32."""
    total = torch.zeros(*q.shape[:-1], k.shape[-2])
    for column in range(q.shape[-1]):
        total = total + q[..., column, None] * k[..., None, :, column]
    return total


def out_and_lse(call: Call, scores: Tensor) -> tuple[Tensor, Tensor]:
    scores = (scores * call.problem.softmax_scale).double()
    out = torch.softmax(scores, -1) @ call.operands.v.transpose(1, 2).double()
    return out.float().transpose(1, 2), torch.logsumexp(scores, -1).float()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("data", DATA_SETS)
def test_sums_in_order_hold(data: Data, seed: int) -> None:
    call = cases.build(CASE, data, CPU, seed)
    q, k = (x.transpose(1, 2) for x in call.operands[:2])
    verdict = judge_forward(
        call.problem, forward_references(call.problem, call.operands), *out_and_lse(call, in_order(q, k))
    )
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("data", ["normal", "sharp"])
def test_operands_of_sixteen_bits_do_not(data: Data) -> None:
    """What bf16x3 keeps of q and k, two bfloat16 parts, is an error of 2^-17, not one of the order of adding.

    Where all logits are near -180 that is no more than float32's own rounding of them: `low` cannot tell.
    """
    call = cases.build(replace(CASE, lengths=(199, 65)), data, CPU)
    q, k = (kept(x.transpose(1, 2)) for x in call.operands[:2])
    scores = q.double() @ k.transpose(-1, -2).double()
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), *out_and_lse(call, scores))
    assert not verdict.passed, str(verdict)


def kept(x: Tensor) -> Tensor:
    high = x.bfloat16().float()
    return high + (x - high).bfloat16().float()
