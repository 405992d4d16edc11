"""The gates of float8 calls, with Hopper's sums emulated: they pass, and sums or probabilities of fewer bits do not.

docs/accuracy.md compares the emulation with an H200.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.conformance import cases
from tests.conformance.cases import Call, Case
from tests.conformance.datasets import Data
from tests.conformance.gates import Verdict, forward_references, judge_forward
from warpwave.kernels import descales

CPU = torch.device("cpu")
BITS, STEP, TILE = 13, 32, 64  # of a sum's mantissa; products in a step; keys that share a maximum
BLOCKS, HEADS = "float8_e4m3fn:float8_e4m3fn:128", "float8_e4m3fn:float8_e4m3fn:head"
# Terms of one sign over a wide head, whose error is common to a row, and stands alone beside a sink; large scores of
# either sign; and small scores.
CASES: dict[str, tuple[Case, Data]] = {
    "one sign, sinks": (Case(dtype=HEADS, dims=(224, 224), lengths=(65, 130), sinks=True), "low"),
    "one sign": (Case(dtype=BLOCKS, dims=(256, 32), lengths=(130, 70)), "low"),
    "large scores": (Case(dtype=HEADS, dims=(64, 64), lengths=(129, 130), causal="bottom_right", scale=1.0), "sharp"),
    "small scores": (Case(dtype=BLOCKS, dims=(128, 64), lengths=(70, 150)), "normal"),
    # The result of a row may be near 0 although its values are not.
    "one column": (
        Case(dtype="float8_e4m3fn:bfloat16:head", dims=(227, 1), lengths=(1025, 200), heads=(4, 4)),
        "sharp",
    ),
}


def cut(x: Tensor, largest: Tensor, bits: int) -> Tensor:
    """Returns x toward zero, in multiples of 2^-bits of the power of two below `largest`."""
    unit = torch.exp2(largest.clamp(min=1e-30).log2().floor() - bits)
    return (x / unit).trunc() * unit


def summed(q: Tensor, k: Tensor, bits: int) -> Tensor:
    """Returns q k^T, [heads, rows, keys], as Hopper's matrix unit adds float8 products."""
    total = q.new_zeros(*q.shape[:2], k.shape[1])
    for first in range(0, q.shape[2], STEP):
        products = q[:, :, None, first : first + STEP] * k[:, None, :, first : first + STEP]
        largest = torch.maximum(products.abs().amax(-1), total.abs())
        total = cut(products, largest[..., None], bits).sum(-1) + cut(total, largest, bits)
        total = cut(total, total.abs(), bits)
    return total


def emulated(call: Call, bits: int = BITS, dtype_p: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Returns out and lse of a dense call without masks, biases and grouped heads."""
    problem, o = call.problem, call.operands
    _, numbers = descales.dequantized(problem, o, torch.float64)
    q, k, v = (x[0].transpose(0, 1).double() for x in (o.q, o.k, numbers.v))
    factors = (
        descales.of_tokens(x.double(), block, t)[0].transpose(0, 1)
        for x, block, t in zip(o[9:11], problem.descale_blocks or (), (o.q, o.k), strict=False)
    )
    of_q, of_k = factors
    scores = summed(q, k, bits) * of_q * of_k.transpose(1, 2) * problem.softmax_scale
    if problem.causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + problem.seqlen_k - problem.seqlen_q)
        scores = scores.masked_fill(hidden, -math.inf)
    # Probabilities are rounded relative to the largest score so far.
    so_far = torch.cat([t.amax(-1, keepdim=True).expand_as(t) for t in scores.split(TILE, -1)], -1).cummax(-1).values
    p = (torch.exp(scores - so_far) * descales.P_SCALE).to(dtype_p).double() / descales.P_SCALE
    lse = scores.logsumexp(-1)
    if o.sinks is not None:
        lse = torch.logaddexp(lse, o.sinks.double()[:, None])
    out = (p * torch.exp(so_far - lse[..., None])) @ v
    return out.transpose(0, 1)[None].bfloat16(), lse[None].float()


def verdict(name: str, bits: int = BITS, dtype_p: torch.dtype | None = None) -> Verdict:
    """Returns the verdict of an emulated call, with probabilities of v's dtype unless one is named."""
    case, data = CASES[name]
    call = cases.build(case, data, CPU)
    dtype_p = dtype_p or call.operands.v.dtype
    return judge_forward(call.problem, forward_references(call.problem, call.operands), *emulated(call, bits, dtype_p))


@pytest.mark.parametrize("name", CASES)
def test_sums_of_hopper_hold(name: str) -> None:
    found = verdict(name)
    assert found.passed, str(found)


@pytest.mark.parametrize("name", ["one sign, sinks", "one sign", "large scores", "one column"])
def test_sums_of_two_bits_fewer_do_not(name: str) -> None:
    assert not verdict(name, bits=BITS - 2).passed


@pytest.mark.parametrize("name", ["one sign", "large scores", "small scores"])
def test_probabilities_of_one_bit_fewer_do_not(name: str) -> None:
    assert not verdict(name, dtype_p=torch.float8_e5m2).passed
