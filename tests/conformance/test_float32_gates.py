"""The gates of float32, with its arithmetic: products summed in order pass, and one part too few does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.conformance import cases, harness
from tests.conformance.cases import PLAIN, Call
from tests.conformance.datasets import DATA_SETS, Data
from tests.conformance.gates import backward_references, forward_references, judge_backward, judge_forward
from tests.conformance.test_gradients import differentiate, upstream
from warpwave.kernels import eager

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


# The mask leaves one key to all rows of two items, so that dS is dP - delta of 138 rows whose exact difference is 0.
ONE_KEY = replace(
    PLAIN, dtype="float32", dims=(152, 448), lengths=(200, 138), heads=(2, 2), batch=5, causal="bottom_right",
    mask="keys",
)  # fmt: skip


@pytest.mark.parametrize("sixteen_bits", [False, True])
def test_gradients_of_rows_that_see_one_key(sixteen_bits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 products pass, though their dP - delta is not exactly 0 as autograd's is. Operands of 16 bits, off by a
    few times as much, fail in both gradients that dS enters."""
    call = cases.build(ONE_KEY, "normal", CPU, 1552)
    assert 1 in [int(shown.sum(-1).max()) for shown in harness.visible(call)]
    dout, dlse = upstream(call)
    references = backward_references(call.problem, call.operands, dout, dlse)
    if sixteen_bits:
        product = eager.product
        monkeypatch.setattr(eager, "product", lambda a, b: product(kept(a), kept(b)))
    verdict = judge_backward(call.problem, references, differentiate("eager", call, dout, dlse))
    failed = {gate.name for gate in verdict.gates if not gate.passed}
    if sixteen_bits:
        assert {"B1 maximum of dq", "B1 maximum of dk"} <= failed, str(verdict)
    else:
        assert not failed, str(verdict)


def kept(x: Tensor) -> Tensor:
    high = x.bfloat16().float()
    return high + (x - high).bfloat16().float()
