"""Gradients of ALiBi's slopes where all visible keys are far away, and beside NaN, by the kernel of the forward.

The exact dS of a row add up to a known number. out is rounded, and what the computed dS add up to in excess must not be
multiplied by whole distances.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance import cases
from tests.conformance.cases import PLAIN
from tests.conformance.harness import DEVICE, ON_GPU
from tests.conformance.test_gradients import differentiate, refuses, upstream

KERNELS = ("hopper/flash_fwd", "flash_fwd", "eager")
FAR = 2048 if ON_GPU else 256
DISTANT: dict[str, dict[str, Any]] = {
    "causal": {"causal": "top_left", "lengths": (16, FAR)},
    "mask": {"mask": "keys", "lengths": (16, FAR)},
    "log-sum-exp": {"causal": "top_left", "lengths": (16, FAR), "lse": True},
    "sinks": {"causal": "top_left", "lengths": (16, FAR), "lse": True, "sinks": True},
    "dropout": {"causal": "top_left", "lengths": (16, FAR), "dropout": 0.25},
    "blind rows": {"causal": "bottom_right", "lengths": (FAR, 16), "sinks": True, "lse": True},
    "packed": {"causal": "top_left", "packed": True, "batch": 3, "lengths": (40, FAR)},
    "two tiles": {"causal": "top_left", "lengths": (96, FAR)},
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32:ieee", "float32:default"])
@pytest.mark.parametrize("distant", DISTANT)
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_of_slopes_depend_on_differences_of_distances(
    kernel: str, distant: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    case = replace(PLAIN, dtype=dtype, alibi="heads", **{"lse": False, "heads": (2, 1), **DISTANT[distant]})
    call = cases.build(case, "normal", DEVICE)
    operands = call.operands
    if operands.mask is not None:
        operands = operands._replace(mask=(torch.arange(FAR, device=DEVICE) < 20)[None, None, None])
    slopes = torch.tensor([0.5, 0.125], device=DEVICE)
    if distant == "sinks":  # as large as the scores of keys so far away
        operands = operands._replace(sinks=-slopes * (FAR - 16))
    call = call._replace(operands=operands._replace(alibi_slopes=slopes))
    if refuses(kernel, call, request):
        return
    dout, dlse = upstream(call)
    exact_dout = dout.double()
    if distant == "blind rows":  # what arrives there has no effect
        dout[:, : FAR - 16], exact_dout[:, : FAR - 16] = torch.nan, 0.0
    found = differentiate(kernel, call, dout, dlse, ("alibi_slopes",)).dalibi_slopes
    wide = {name: getattr(call.operands, name) for name in ("q", "k", "v", "alibi_slopes", "sinks")}
    wide = {name: t if t is None else t.double() for name, t in wide.items()}
    exact_call = call._replace(
        operands=call.operands._replace(**wide), problem=replace(call.problem, dtype="float64"),
        options={**call.options, "precision": "default"},
    )  # fmt: skip
    expected = differentiate(
        "eager", exact_call, exact_dout, None if dlse is None else dlse.double(), ("alibi_slopes",)
    ).dalibi_slopes
    assert found is not None and expected is not None
    # float32 rounds each row's sum of terms as large as the distances.
    torch.testing.assert_close(found.double(), expected.double(), rtol=2e-3, atol=2e-6 * FAR)
