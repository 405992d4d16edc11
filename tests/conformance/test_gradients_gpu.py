"""What only a GPU shows of gradients: addresses far apart, repeats under load, streams."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance import cases
from tests.conformance.cases import PLAIN, Call, Case
from tests.conformance.gates import OTHER_ORDER, backward_references, judge_backward
from tests.conformance.harness import DEVICE, bits
from tests.conformance.test_gpu import busy_gpu
from tests.conformance.test_gradients import NAMES, differentiate, refuses, upstream
from warpwave.workbench.verify.reference import Gradients

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
each_kernel = pytest.mark.parametrize("kernel", ["hopper/flash_fwd", "flash_fwd", "three_kernel"])

# Every launch of hopper/flash_bwd: jointly, apart, in pieces of a head size, with bits of a mask, with a bias.
CASES = {
    "head_dim 64": replace(PLAIN, lengths=(500, 600), heads=(4, 2), batch=2, causal="bottom_right"),
    "head_dim 128, packed": replace(PLAIN, dims=(128, 128), lengths=(400, 500), heads=(4, 2), packed=True, batch=5),
    "192 and 128, sinks": replace(PLAIN, dims=(192, 128), lengths=(300, 400), heads=(4, 2), sinks=True),
    "head_dim 256, window": replace(PLAIN, dims=(256, 256), lengths=(500, 500), heads=(2, 1), window=(100, 0)),
    "mask": replace(PLAIN, dims=(128, 128), lengths=(500, 600), heads=(4, 2), batch=2, mask="full"),
    "bias and ALiBi": replace(PLAIN, lengths=(500, 600), heads=(4, 2), batch=2, bias="full", alibi="batch"),
}
each_case = pytest.mark.parametrize("case", [replace(c, dtype="bfloat16") for c in CASES.values()], ids=list(CASES))
REPEATS = 3000  # see a one-in-a-thousand race with 95 % certainty


def deterministic(call: Call, wanted: bool) -> Call:
    """The same call, whose gradients have the same bits in every run, or need not."""
    problem = replace(call.problem, deterministic=wanted)
    return call._replace(problem=problem, options=call.options | {"deterministic": wanted})


@each_kernel
@each_case
@pytest.mark.parametrize("same_bits", [False, True])
def test_repeats_under_load(same_bits: bool, case: Case, kernel: str, request: pytest.FixtureRequest) -> None:
    """Deterministic gradients have the same bits each time. Others differ from the first, which is within the gates, by
    roundings. A slow kernel gets what half a minute holds."""
    call = deterministic(cases.build(case, "normal", DEVICE), same_bits)
    if refuses(kernel, call, request):
        return
    dout, dlse = upstream(call)
    references = backward_references(call.problem, call.operands, dout, dlse)
    first = differentiate(kernel, call, dout, dlse)
    verdict = judge_backward(call.problem, references, first)
    assert verdict.passed, str(verdict)
    worst = torch.zeros(len(NAMES), device=DEVICE)
    repeats, start = 0, time.monotonic()
    with busy_gpu():
        while repeats < REPEATS and time.monotonic() - start < 30:
            for _ in range(100):
                again = differentiate(kernel, call, dout, dlse)
                for i, (a, b) in enumerate(zip(again, first, strict=True)):
                    if a is not None and b is not None:
                        a, b = a.float(), b.float()
                        # NaN must not pass for equal.
                        off = (a - b).abs().amax() / b.abs().amax().clamp_min(1e-30)
                        worst[i] = torch.maximum(worst[i], off.nan_to_num(torch.inf))
            torch.cuda.synchronize()
            repeats += 100
    largest = 0.0 if same_bits else OTHER_ORDER
    assert worst.max().item() <= largest, (dict(zip(NAMES, worst.tolist(), strict=True)), repeats)
    last = judge_backward(call.problem, references, differentiate(kernel, call, dout, dlse))
    assert last.passed, str(last)


FAR = replace(PLAIN, dtype="bfloat16", lengths=(33, 40), heads=(4, 2), batch=2, causal="bottom_right", sinks=True)


@pytest.mark.usefixtures("much_memory")
@each_kernel
@pytest.mark.parametrize("dims", [(64, 64), (256, 256)], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "mask", "dout"])
def test_far_tensors(name: str, dims: tuple[int, int], kernel: str, request: pytest.FixtureRequest) -> None:
    """Every tensor with its last index of each axis past 2^31 elements: a view of one large buffer."""
    features: dict[str, Any] = {name: "full"} if name in ("mask", "bias") else {}
    call = deterministic(cases.build(replace(FAR, dims=dims, **features), "normal", DEVICE), True)
    if refuses(kernel, call, request):
        return
    dout, dlse = upstream(call)
    expected = differentiate(kernel, call, dout, dlse)
    x = dout if name == "dout" else getattr(call.operands, name)
    for axis in range(x.dim()):
        if x.shape[axis] == 1:
            continue
        far = spread(x, axis, 2**31)
        if name == "dout":
            found = differentiate(kernel, call, far, dlse)
        else:
            found = differentiate(kernel, call._replace(operands=call.operands._replace(**{name: far})), dout, dlse)
        assert close(found, expected), f"axis {axis}"
        del far, found


def spread(x: torch.Tensor, axis: int, elements: int) -> torch.Tensor:
    """Returns a copy whose last index of the axis lies this many elements behind its first."""
    stride = list(x.stride())
    stride[axis] = (elements // (x.shape[axis] - 1) // 16 + 1) * 16  # as tensor maps need it, or they get a copy
    size = 1 + sum((n - 1) * s for n, s in zip(x.shape, stride, strict=True))
    storage = torch.UntypedStorage(size * x.element_size(), device=DEVICE)
    return torch.tensor([], dtype=x.dtype, device=DEVICE).set_(storage, 0, x.shape, stride).copy_(x)


def close(found: Gradients, expected: Gradients) -> bool:
    """Whether gradients are equal but for roundings: other strides may choose another launch."""
    pairs = [(a.float(), b.float()) for a, b in zip(found, expected, strict=True) if a is not None and b is not None]
    return all(bool(((a - b).abs() <= OTHER_ORDER * b.abs().amax()).all()) for a, b in pairs) and bool(pairs)


@each_kernel
@each_case
def test_waits_for_the_stream_it_is_called_on(case: Case, kernel: str, request: pytest.FixtureRequest) -> None:
    """Upstream gradients that arrive late on a side stream, behind a long sleep, are seen."""
    call = deterministic(cases.build(case, "normal", DEVICE), True)
    if refuses(kernel, call, request):
        return
    dout, dlse = upstream(call)
    expected = bits(*differentiate(kernel, call, dout, dlse))
    late = torch.zeros_like(dout)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        late.copy_(dout)
        found: Any = differentiate(kernel, call, late, dlse)
    torch.cuda.current_stream().wait_stream(side)
    assert bits(*found) == expected
