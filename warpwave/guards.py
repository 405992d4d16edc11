"""Whether a call's tensors are laid out as they were the last time, asked in one call into torch.

To read shape, stride, dtype and device of three tensors through Python costs more than to launch a kernel on them.
torch has the same question for its compiler, answered in C++: dtype, device, sizes, strides, Python type, and whether a
gradient is wanted. It does not notice every mode (fake tensors, make_fx): who asks looks for those first. That guard is
private to torch, so it is tried out once, and where it does not tell tensors apart as it should, there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

Check = Callable[..., bool]
UNALIGNED = 15  # bits of an address that are 0 at a multiple of 16


def guard(*tensors: torch.Tensor) -> Check | None:
    """A function that says of as many other tensors whether a plan for these serves them too; None where torch has none
    to offer, or where one of these is not 16-byte aligned (then their alignment would have to be compared as well)."""
    kind = tensor_guards()
    if kind is None or not aligned(tensors):
        return None
    return _guard(kind, *tensors)


def aligned(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all of them begin at a multiple of 16 bytes."""
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return not bits & UNALIGNED


def _guard(kind: Any, *tensors: torch.Tensor) -> Check:
    sizes = [list(t.shape) for t in tensors]
    strides = [list(t.stride()) for t in tensors]
    same: Check = kind(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return same


@cache
def tensor_guards() -> Any:
    """torch's guard, if it is there and notices every change that matters; else None."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        with torch.inference_mode(False), torch.enable_grad():  # where the first call may not be
            x, y, z = (torch.zeros(2, 4, 2, 8, device="cpu") for _ in range(3))
            same = _guard(TensorGuards, x, y, z)
            others = [y[:1], y[:, :2], y.transpose(1, 2).contiguous().transpose(1, 2), y.half(), y.to("meta")]
            others += [torch._neg_view(y)]
            wanting = torch.zeros(2, 4, 2, 8, device="cpu", requires_grad=True)
            reliable = same(y, x, z) and not any(same(x, other, z) for other in (*others, wanting))
    except Exception:  # of another torch: whatever it is, calls are found without
        reliable = False
    return TensorGuards if reliable else None
