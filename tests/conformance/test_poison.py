"""What a kernel touches: every cell of its outputs, nothing around them, and nothing of its inputs.

Uninitialized memory holds NaN throughout these tests (conftest.py). Here every tensor also lies between guard regions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import cases, harness
from tests.conformance.cases import PLAIN, Call, Case, W
from tests.conformance.harness import DEVICE, bits, each_kernel
from warpwave.operands import Operands
from warpwave.runtime import scratch

GUARD_BYTES = 4096
PATTERN = 0xA5  # reads as a small negative number in every float type, so a value taken from a guard shows too


class Guards:
    """Tensors between guard regions."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def place(self, x: Tensor) -> Tensor:
        """A tensor like x, its values and strides, between guards."""
        size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        buffer = torch.full((size * x.element_size() + 2 * GUARD_BYTES,), PATTERN, dtype=torch.uint8, device=x.device)
        inside = buffer[GUARD_BYTES : len(buffer) - GUARD_BYTES].view(x.dtype)
        placed = inside.as_strided(x.shape, x.stride())
        if size:
            inside.copy_(x.as_strided((size,), (1,)))
        self.buffers.append(buffer)
        return placed

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Has what kernels allocate lie between guards as well."""
        for name in ("empty", "empty_like"):
            patch.setattr(torch, name, functools.partial(self._placed, getattr(torch, name)))
        patch.setattr(scratch, "empty_strided", functools.partial(self._placed, scratch.empty_strided))

    def _placed(self, allocate: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return self.place(allocate(*args, **kwargs))

    def holds(self, x: Tensor) -> bool:
        return any(x.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for b in self.buffers)

    def assert_intact(self) -> None:
        for buffer in self.buffers:
            for guard in (buffer[:GUARD_BYTES], buffer[len(buffer) - GUARD_BYTES :]):
                if not guard.eq(PATTERN).all():  # no assert: test_bad_input.py runs under python -O as well
                    raise AssertionError("a guard region was written")


CASES = [
    replace(PLAIN, lengths=(33, 65), heads=(4, 2), batch=2, lse=False),
    replace(PLAIN, lengths=(33, 65), dims=(40, 59), heads=(4, 2), batch=2, causal="bottom_right"),
    replace(PLAIN, dtype="float32:default", lengths=(65, 33), dims=(59, 40), causal="top_left", window=(W, W)),
    replace(PLAIN, dtype="bfloat16", lengths=(70, 131), dims=(111, 16), batch=5, heads=(2, 1), packed=True, sinks=True),
    replace(PLAIN, lengths=(33, 65), mask="full", bias="full", alibi="batch", sinks=True, softcap=15.0, batch=2),
    replace(PLAIN, lengths=(1, 200), mask="keys", bias="heads", alibi="heads", batch=2),
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def guarded_run(
    kernel: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor | None, Guards, Operands]:
    """The call on guarded operands, with every allocation of the kernel guarded as well."""
    guards = Guards()
    operands = Operands(*(None if x is None else guards.place(x) for x in call.operands))
    with monkeypatch.context() as patch:
        guards.watch(patch)
        out, lse = harness.run(kernel, call._replace(operands=operands))
    return out, lse, guards, operands


@each_kernel
@each_case
def test_guards_and_inputs_stay_as_they_were(
    case: Case, kernel: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    call = cases.build(case, "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    out, lse, guards, operands = guarded_run(kernel, call, monkeypatch)
    guards.assert_intact()
    assert bits(*operands) == bits(*call.operands), "an input was written"
    assert bits(out, lse) == bits(*harness.run(kernel, call))
    if kernel != "torch_sdpa":  # whose outputs torch allocates where nobody can reach
        assert all(guards.holds(x) for x in (out, lse) if x is not None)


@each_kernel
@each_case
def test_every_cell_is_written(case: Case, kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(case, "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    out, lse = harness.run(kernel, call)
    assert not out.isnan().any()
    assert lse is None or not lse.isnan().any()


@each_kernel
@each_case
def test_a_second_run_is_bit_equal(case: Case, kernel: str, request: pytest.FixtureRequest) -> None:
    """Memory that the first run left dirty is reused by the second."""
    call = cases.build(case, "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    config = harness.default_config(kernel, call)
    first = bits(*harness.run(kernel, call, config))
    assert bits(*harness.run(kernel, call, config)) == first


def test_guards_notice_a_write() -> None:
    guards = Guards()
    placed = guards.place(torch.zeros(3, 5))
    guards.assert_intact()
    placed.as_strided((1,), (1,), placed.storage_offset() + 15).fill_(1)
    with pytest.raises(AssertionError, match="guard"):
        guards.assert_intact()
