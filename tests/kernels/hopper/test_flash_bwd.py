"""The Hopper backward on a Hopper GPU: the contract's gates over a grid of its own, from the forward's results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import cases, harness
from tests.conformance.cases import FEATURES, PLAIN, Call, Case
from tests.conformance.datasets import DATA_SETS, Data
from tests.conformance.gates import backward_references, judge_backward
from tests.conformance.harness import DEVICE, GPU, bits
from warpwave.kernels.hopper import flash_bwd
from warpwave.workbench.verify.reference import Gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPU.arch != "sm_90", reason="needs a Hopper GPU"),
]

GRID: dict[str, Any] = {name: values for name, values in FEATURES.items() if name not in ("bias", "scale", "lse")} | {
    "dtype": ("float16", "bfloat16"),
    "dims": (
        *((8, 8), (64, 64), (80, 80), (96, 96), (128, 128), (64, 128), (128, 64), (40, 24)),
        *((256, 256), (192, 128), (160, 160), (136, 248), (64, 256), (256, 64), (208, 208)),
    ),
    # Gradients of a query that sees a single key cancel to 0, and among three queries they have no scale.
    "lengths": (
        *((9, 99), (33, 65), (65, 49), (799, 3), (3, 799), (257, 257), (1023, 1024), (1024, 1023), (2048, 2048)),
    ),
    "heads": ((1, 1), (2, 2), (4, 2), (3, 1), (12, 3), (32, 8)),
    "batch": (1, 2, 5),
    "window": ((-1, -1), (64, 0), (13, 13), (-1, 5), (127, 128)),
}


def gradients(call: Call, dout: Tensor, dlse: Tensor | None, config: int = 0) -> Gradients:
    """By the kernel itself, from out and log-sum-exp of the kernel that `auto` chooses for the forward."""
    problem = replace(call.problem, return_lse=True)
    out, lse = harness.run("auto", call._replace(problem=problem, options=call.options | {"return_lse": True}))
    assert lse is not None
    wanted = (True, True, True, False, False, call.operands.sinks is not None)
    run = flash_bwd.bind(problem, GPU, call.operands, wanted, flash_bwd.configs(problem, GPU)[config])
    return Gradients(*run(call.operands, (out, lse), dout, dlse))  # type: ignore[arg-type]


def upstream(call: Call) -> tuple[Tensor, Tensor]:
    """dout and dlse."""
    g = torch.Generator(DEVICE).manual_seed(2)
    q = call.operands.q
    dout = torch.randn(*q.shape[:-1], call.problem.head_dim_v, generator=g, device=DEVICE).to(q.dtype)
    return dout, torch.randn(dout.shape[:-1], generator=g, device=DEVICE).transpose(-1, -2).contiguous()


@pytest.mark.parametrize(("data", "config"), [*((data, 0) for data in DATA_SETS), ("normal", 1), ("low", 1)])
@pytest.mark.parametrize("case", cases.pairwise(GRID), ids=str)
def test_gates(case: Case, data: Data, config: int) -> None:
    call = cases.build(case, data, DEVICE)
    assert not flash_bwd.why_not(call.problem, GPU)
    if config >= len(flash_bwd.configs(call.problem, GPU)):
        pytest.skip("the head size has no such config")
    dout, dlse = upstream(call)
    references = backward_references(call.problem, call.operands, dout, dlse)
    verdict = judge_backward(call.problem, references, gradients(call, dout, dlse, config))
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("features", [{}, {"causal": "bottom_right"}, {"packed": True, "batch": 7}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_keys_repeat_bit_for_bit(dims: tuple[int, int], features: dict[str, Any]) -> None:
    """dK and dV are sums of one block, in one order; dQ stays within rounding of float32 sums."""
    case = replace(PLAIN, dtype="bfloat16", dims=dims, lengths=(1500, 1400), heads=(8, 4), **features)
    call = cases.build(case, "normal", DEVICE)
    dout, dlse = upstream(call)
    first = gradients(call, dout, dlse)
    scale = first.dq.float().abs().max()
    for _ in range(200):
        again = gradients(call, dout, dlse)
        assert bits(again.dk, again.dv) == bits(first.dk, first.dv)
        assert (again.dq.float() - first.dq.float()).abs().max() <= 0.01 * scale


@pytest.mark.parametrize("features", [{}, {"causal": "bottom_right"}, {"packed": True, "batch": 7}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (256, 256), (192, 128)], ids=str)
def test_launches_apart_repeat_bit_for_bit(dims: tuple[int, int], features: dict[str, Any]) -> None:
    case = replace(PLAIN, dtype="bfloat16", dims=dims, lengths=(1500, 1400), heads=(8, 4), **features)
    call = cases.build(case, "normal", DEVICE)
    dout, dlse = upstream(call)
    first = gradients(call, dout, dlse, config=-1)
    for _ in range(300):
        again = gradients(call, dout, dlse, config=-1)
        assert bits(again.dq, again.dk, again.dv) == bits(first.dq, first.dk, first.dv)
