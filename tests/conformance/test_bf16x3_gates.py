"""The gates of bf16x3, with its arithmetic computed exactly: three products pass, and two do not.

The sums here are float64, so the only error is that of the split: two bfloat16 parts per operand, and the largest three
of the four products of parts.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.conformance import cases
from tests.conformance.cases import PLAIN, Call
from tests.conformance.datasets import DATA_SETS, Data
from tests.conformance.gates import forward_references, judge_forward

CPU = torch.device("cpu")
# The hardest seen: long rows of large logits, most of which one key leads, so that the median row says little.
CASE = replace(PLAIN, dtype="float32:bf16x3", dims=(128, 128), lengths=(511, 512), causal="bottom_right", scale=1.0)


def parts(x: Tensor) -> tuple[Tensor, Tensor]:
    high = x.float().bfloat16().float()
    return high.double(), (x.float() - high).bfloat16().double()


def product(a: Tensor, b: Tensor, products: int) -> Tensor:
    (a_high, a_low), (b_high, b_low) = parts(a), parts(b)
    return a_high @ b_high + a_high @ b_low + (a_low @ b_high if products == 3 else 0)


def emulated(call: Call, products: int) -> tuple[Tensor, Tensor]:
    """out and lse, of a causal call whose heads are not grouped."""
    problem = call.problem
    q, k, v = (x.transpose(1, 2) for x in call.operands[:3])
    scores = (product(q, k.transpose(-1, -2), products).float() * problem.softmax_scale).double()
    hidden = torch.ones(problem.seqlen_q, problem.seqlen_k, dtype=torch.bool)
    scores = scores.masked_fill(hidden.triu(1 + problem.seqlen_k - problem.seqlen_q), -math.inf)
    largest = scores.amax(-1, keepdim=True)
    p = torch.exp(scores - largest).float()
    total = p.double().sum(-1, keepdim=True)
    out = (product(p, v, products) / total).float().transpose(1, 2)
    return out, (largest + torch.log(total)).squeeze(-1).float()


@pytest.mark.parametrize("data", DATA_SETS)
def test_three_products_hold(data: Data) -> None:
    call = cases.build(CASE, data, CPU)
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), *emulated(call, 3))
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("data", DATA_SETS)
def test_two_products_do_not(data: Data) -> None:
    """With q rounded to a single bfloat16 the errors are 2^-9, not 2^-17."""
    call = cases.build(CASE, data, CPU)
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), *emulated(call, 2))
    assert not verdict.passed
