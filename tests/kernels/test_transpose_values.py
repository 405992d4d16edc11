"""The launch that transposes V for 8-bit products: what it writes, and what it must not look at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.hopper.test_flash_fwd_fp8_on_cpu import call, transposed
from warpwave.gpu import current_gpu
from warpwave.kernels.prepass import transpose_values
from warpwave.problem import AttentionProblem, QuantizedOperands
from warpwave.runtime import launch
from warpwave.runtime.triton_or_stub import NO_TRITON

pytestmark = pytest.mark.skipif(NO_TRITON is not None, reason="Triton is published for Linux only")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = 0x7F
CALLS: dict[str, dict[str, Any]] = {
    "full": {"lengths": (70, 300), "dims": (64, 128)},
    "e5m2, odd width": {"lengths": (70, 257), "dims": (64, 80), "dtype_v": torch.float8_e5m2},
    "causal": {"lengths": (330, 150), "causal": "bottom_right"},
    "top left": {"lengths": (210, 600), "causal": "top_left", "dims": (48, 112)},
    "window": {"lengths": (70, 600), "window_left": 146, "window_right": 5, "dims": (64, 256)},
    "packed": {"packed": 5, "lengths": (150, 330), "heads": (4, 2), "dims": (32, 160)},
    "packed window": {"packed": 7, "lengths": (90, 500), "window_left": 30, "causal": "bottom_right"},
}


def launched(problem: AttentionProblem, operands: QuantizedOperands) -> Tensor:
    """What the launch leaves, on memory that held NaN."""
    there = QuantizedOperands(*(None if t is None else t.to(DEVICE) for t in operands))
    out = torch.full(transpose_values.shape(problem), NAN, dtype=torch.uint8, device=DEVICE)
    spec = transpose_values.specify(problem, current_gpu(DEVICE), there, out.view(operands.v.dtype))
    launch.bind(spec)(*spec.tensors)
    return out.cpu()


@pytest.mark.parametrize("name", CALLS)
def test_bytes(name: str) -> None:
    problem, operands = call(**CALLS[name])
    assert torch.equal(launched(problem, operands), transposed(problem, operands).view(torch.uint8))


def test_values_of_any_strides() -> None:
    problem, operands = call(**CALLS["full"])
    apart = torch.zeros((*operands.v.shape[:-1], 3 * operands.v.shape[-1]), dtype=torch.uint8)
    strided = apart[..., 1::3].copy_(operands.v.view(torch.uint8)).view(operands.v.dtype)
    assert strided.stride(-1) == 3
    expected = transposed(problem, operands).view(torch.uint8)
    assert torch.equal(launched(problem, operands._replace(v=strided)), expected)


def test_offsets_beyond_the_tensors_stay_inside_them() -> None:
    """Lengths on the device are not checked: an offset beyond the packed tensor is clamped to it."""
    problem, operands = call(packed=3, lengths=(70, 290))
    assert operands.cu_seqlens_k is not None
    beyond = operands.cu_seqlens_k.clone()
    beyond[-1] += 5000
    problem = replace(problem, lengths=None)
    assert torch.equal(launched(problem, operands), launched(problem, operands._replace(cu_seqlens_k=beyond)))
