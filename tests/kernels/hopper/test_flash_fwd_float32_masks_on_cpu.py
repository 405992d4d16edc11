"""The Hopper forward in float32 with boolean masks: its own source on a CPU, tile by tile, against the gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance import cases, harness
from tests.conformance.gates import forward_references, judge_forward
from tests.kernels.hopper.test_flash_fwd_on_cpu import CPU, H200, SHORT, on_cpu
from tests.marks import needs_triton, one_in
from warpwave.kernels.hopper import flash_fwd

pytestmark = needs_triton

MASKED: dict[str, dict[str, Any]] = {
    "mask": {"mask": "full", "batch": 2, "sinks": True, "heads": (2, 2)},
    "mask of keys, window": {"mask": "keys", "batch": 2, "window": (60, 5), "lengths": (90, 340)},
    "mask of keys, grouped heads": {"mask": "keys", "batch": 2, "heads": (4, 2), "softcap": 3.0},
    "mask of rows, ALiBi": {"mask": "rows", "alibi": "heads", "softcap": 3.0, "heads": (2, 2)},
    "mask of heads, causal": {"mask": "full", "heads": (3, 3), "causal": "top_left"},
}
FLOAT32 = {
    "fp16x3": ("float32:default", (40, 80), flash_fwd.Config(128, 128, 2)),
    "fp16x3, one stage": ("float32:default", (96, 72), flash_fwd.Config(128, 64, 1)),
    "fp16x3, short steps": ("float32:default", (16, 200), flash_fwd.Config(64, 32, 1)),
    "fp16x1": ("float32:tf32", (64, 80), flash_fwd.Config(128, 64, 2)),
    "bf16x6": ("float32:bf16x6", (40, 59), flash_fwd.Config(64, 64, 1)),
}


@one_in(5)
@pytest.mark.parametrize("kind", FLOAT32)
@pytest.mark.parametrize("features", MASKED)
def test_float32_under_masks_on_a_cpu(features: str, kind: str) -> None:
    """What a mask hides from all queries has no effect, also on the scales of keys and values."""
    dtype, dims, config = FLOAT32[kind]
    call = cases.build(replace(SHORT, dtype=dtype, dims=dims, **MASKED[features]), "normal", CPU)
    mask = call.operands.mask
    if mask.shape[-1] > 1:
        mask[..., 3] = mask[:, -1, :, 7] = False  # the second key of one head alone
    assert not flash_fwd.why_not(call.problem, H200)
    out, lse = on_cpu(call.problem, call.operands, config)
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), out, lse)
    assert verdict.passed, str(verdict)
    seen = torch.stack(harness.visible(call)).any(2)  # [batch, heads, keys]
    unseen = ~seen.unflatten(1, (call.problem.num_heads_kv, -1)).any(2).transpose(1, 2)
    assert mask.shape[-1] == 1 or unseen[:, 3].all()
    for value in (torch.nan, torch.inf, 1e30):
        k, v = call.operands.k.clone(), call.operands.v.clone()
        k[unseen], v[unseen] = value, -value
        found = on_cpu(call.problem, call.operands._replace(k=k, v=v), config)
        assert torch.equal(found[0], out) and torch.equal(found[1], lse), value


@pytest.mark.parametrize("kind", FLOAT32)
def test_float32_values_that_a_block_does_not_see(kind: str) -> None:
    """Another block sees them, so their parts are not zeros."""
    dtype, dims, config = FLOAT32[kind]
    call = cases.build(replace(SHORT, dtype=dtype, dims=dims, heads=(2, 2), mask="full"), "normal", CPU)
    mask, rows = call.operands.mask, config.block_m
    mask[..., :rows, 5] = False
    mask[..., rows:, 5] = True
    out, lse = on_cpu(call.problem, call.operands, config)
    v = call.operands.v.clone()
    v[:, 5] = torch.inf
    found = on_cpu(call.problem, call.operands._replace(v=v), config)
    assert torch.equal(found[0][:, :rows], out[:, :rows]) and torch.equal(found[1], lse)
    assert bool((found[0][:, rows:] == torch.inf).all())


def test_a_scale_of_0_under_a_mask() -> None:
    """Hidden scores of minus infinity are multiplied by the scale too, and the data's own scale may be tiny."""
    for kind in ("fp16x3", "fp16x1", "bf16x6"):
        dtype, dims, config = FLOAT32[kind]
        call = cases.build(replace(SHORT, dtype=dtype, dims=dims, heads=(2, 2), mask="full", scale=0.0), "normal", CPU)
        small = call.operands._replace(q=call.operands.q * 1e-30, k=call.operands.k * 1e-30)
        for operands in (call.operands, small):
            out, lse = on_cpu(call.problem, operands, config)
            verdict = judge_forward(call.problem, forward_references(call.problem, operands), out, lse)
            assert verdict.passed, f"{kind}: {verdict}"
