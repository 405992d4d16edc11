"""Gradients: gates, exact probes, and what autograd asks for, by the kernel of the forward.

hopper/flash_fwd and flash_fwd stand for all kernels whose gradients come from hopper/flash_bwd and flash_bwd.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import cases, harness
from tests.conformance.cases import FEATURES, PLAIN, Call, Case, W
from tests.conformance.datasets import DATA_SETS, Data
from tests.conformance.gates import backward_references, judge_backward
from tests.conformance.harness import DEVICE, ON_GPU, bits
from tests.conformance.test_probes import retrieval
from warpwave.workbench.verify import reference
from warpwave.workbench.verify.reference import Gradients

FORWARDS: tuple[str, ...] = ("hopper/flash_fwd", "flash_fwd", "three_kernel", "torch_sdpa", "eager")
if not ON_GPU:  # interpreted gradients take seconds: tests/kernels/flash_bwd samples them, with the same gates
    FORWARDS = tuple(name for name in FORWARDS if name != "flash_fwd")
each_kernel = pytest.mark.parametrize("kernel", FORWARDS)
NAMES = ("q", "k", "v", "bias", "alibi_slopes", "sinks")

# Where a query sees a single key, dq and dk are differences that cancel to 0 and have no scale to hold their rounding
# against; test_retrieval_gradients covers that exactly. Hence no short seqlen_k and no window (0, 0). And where a
# softcap saturates, its derivative 1 - tanh^2 cancels likewise: other scales do not meet it (see SCALES).
GRID: dict[str, Any] = {
    **FEATURES,
    "dims": ((16, 16), (59, 59), (64, 64), (128, 128), (64, 128), (192, 128)),
    "lengths": ((3, 99), (33, 65), (65, 48), (49, 49), (99, 33)),
    "heads": ((1, 1), (2, 2), (4, 2), (3, 1)),
    "batch": (1, 2, 3),
    "window": ((-1, -1), (64, 0), (W, W), (-1, 5)),
}
del GRID["scale"]
SCALES = [
    replace(PLAIN, dtype=dtype, scale=scale, lengths=(65, 113)) for dtype in FEATURES["dtype"] for scale in (1.0, 0.3)
]
if ON_GPU:
    GRID |= {"lengths": (*GRID["lengths"], (3, 799), (257, 257), (1023, 1024), (1024, 1023), (2048, 2048))}
    GRID |= {"heads": (*GRID["heads"], (12, 3), (32, 8))}


def differentiate(
    kernel: str, call: Call, dout: Tensor, dlse: Tensor | None = None, wanted: tuple[str, ...] = NAMES
) -> Gradients:
    """The gradients of sum(out * dout) + sum(lse * dlse) by the operands named."""
    given = {name: getattr(call.operands, name) for name in NAMES}
    leaves = {n: x.detach().requires_grad_(n in wanted) for n, x in given.items() if x is not None}
    out, lse = harness.run(kernel, call._replace(operands=call.operands._replace(**leaves)))
    results, upstreams = [out], [dout]
    if lse is not None and dlse is not None:
        results, upstreams = [out, lse], [dout, dlse]
    torch.autograd.backward(results, upstreams)  # which hands over dout with the strides it has
    return Gradients(*(leaves[n].grad if n in leaves else None for n in NAMES))  # type: ignore[arg-type]


def refuses(kernel: str, call: Call, request: pytest.FixtureRequest) -> bool:
    """As harness.refuses, for the same call with gradients."""
    problem = replace(call.problem, requires_grad=True)
    operands = call.operands._replace(q=call.operands.q.detach().requires_grad_())
    return harness.refuses(kernel, call._replace(problem=problem, operands=operands), request)


def upstream(call: Call) -> tuple[Tensor, Tensor | None]:
    """dout, and dlse where the call has an lse."""
    dout, dlse = cases.upstream(call)
    return dout, dlse if call.problem.return_lse else None


@each_kernel
@pytest.mark.parametrize("data", DATA_SETS)
@pytest.mark.parametrize("case", cases.pairwise(GRID) + SCALES + cases.DROPOUT, ids=str)
def test_gates(case: Case, data: Data, kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(case, data, DEVICE)
    if refuses(kernel, call, request):
        return
    dout, dlse = upstream(call)
    references = backward_references(call.problem, call.operands, dout, dlse)
    verdict = judge_backward(call.problem, references, differentiate(kernel, call, dout, dlse))
    assert verdict.passed, f"{kernel} on {case}, {data}: {verdict}"


BLIND: dict[str, dict[str, Any]] = {
    "more queries than keys": {"causal": "bottom_right", "lengths": (70, 37)},
    "window beyond the keys": {"causal": "top_left", "window": (3, -1), "lengths": (37, 70)},
    "mask": {"mask": "rows", "lengths": (70, 70)},
    "packed": {"packed": True, "batch": 3, "causal": "bottom_right", "lengths": (70, 37)},
}


@each_kernel
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("poisoned", ["q", "dout"])
@pytest.mark.parametrize("blind", BLIND)
def test_rows_that_see_nothing_pass_no_nan_on(
    blind: str, poisoned: str, sinks: bool, kernel: str, request: pytest.FixtureRequest
) -> None:
    """NaN in a row of q that sees no key, as of padding, or in what arrives there, has no effect on any gradient."""
    case = replace(PLAIN, dtype="float32:ieee", dims=(16, 24), heads=(4, 2), sinks=sinks, lse=False, **BLIND[blind])
    call = cases.build(case, "normal", DEVICE)
    if refuses(kernel, call, request):
        return
    seen = [shown.any(-1).T for shown in harness.visible(call)]  # [rows, heads] each
    unseen = ~(torch.cat(seen) if call.problem.packed else torch.stack(seen))
    assert unseen.any()
    dout, _ = upstream(call)
    expected = differentiate(kernel, call, dout)
    q, dout_with_nan = call.operands.q.clone(), dout.clone()
    (q if poisoned == "q" else dout_with_nan)[unseen] = torch.nan
    got = differentiate(kernel, call._replace(operands=call.operands._replace(q=q)), dout_with_nan)
    assert bits(*got) == bits(*expected)


HIDDEN: dict[str, dict[str, Any]] = {
    "mask": {"mask": "keys", "heads": (4, 2), "lengths": (70, 70)},
    "mask in whole groups": {"mask": "keys", "heads": (4, 2), "lengths": (70, 80)},
    "bias": {"bias": "heads", "heads": (2, 2), "lengths": (70, 80), "alibi": "heads"},
}


@each_kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32:ieee"])
@pytest.mark.parametrize("poisoned", ["k", "v"])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_keys_that_no_row_sees_pass_no_nan_on(
    hidden: str, poisoned: str, dtype: str, kernel: str, request: pytest.FixtureRequest
) -> None:
    """NaN in a key or value that no query sees has no effect on any gradient."""
    case = replace(PLAIN, dtype=dtype, dims=(16, 24), batch=3, lse=False, **HIDDEN[hidden])
    call = cases.build(case, "normal", DEVICE)
    if refuses(kernel, call, request):
        return
    group = call.problem.num_heads_q // call.problem.num_heads_kv
    unseen = torch.stack(
        [~shown.any(1).unflatten(0, (-1, group)).any(1).T for shown in harness.visible(call)]
    )  # [batch, keys, kv heads]
    assert unseen.any()
    dout, _ = upstream(call)
    expected = differentiate(kernel, call, dout)
    tensor = getattr(call.operands, poisoned).clone()
    tensor[unseen] = torch.nan
    got = differentiate(kernel, call._replace(operands=call.operands._replace(**{poisoned: tensor})), dout)
    assert bits(*got) == bits(*expected)


CASE = replace(PLAIN, dims=(40, 64), heads=(4, 2), batch=2, lengths=(67, 90), bias="heads", alibi="heads", sinks=True)


@each_kernel
@pytest.mark.parametrize("wanted", [(n,) for n in NAMES] + [("q", "v"), ("k", "sinks")], ids="-".join)
def test_some_gradients_alone(wanted: tuple[str, ...], kernel: str, request: pytest.FixtureRequest) -> None:
    """Each gradient is the same, bit for bit, whichever others are asked for; those not asked for are not made."""
    call = cases.build(CASE, "normal", DEVICE)
    if refuses(kernel, call, request):
        return
    dout, dlse = upstream(call)
    whole = differentiate(kernel, call, dout, dlse)
    part = differentiate(kernel, call, dout, dlse, wanted)
    for name, one, expected in zip(NAMES, part, whole, strict=True):
        if name in wanted:
            assert bits(one) == bits(expected), name
        else:
            assert one is None, name


@each_kernel
def test_lse_alone_in_the_loss(kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(replace(CASE, dtype="float32:ieee"), "normal", DEVICE)
    if refuses(kernel, call, request):
        return
    dout, dlse = upstream(call)
    leaves = [getattr(call.operands, name).detach().requires_grad_() for name in NAMES]
    operands = call.operands._replace(**dict(zip(NAMES, leaves, strict=True)))
    _, lse = harness.run(kernel, call._replace(operands=operands))
    assert lse is not None and dlse is not None
    (lse * dlse).sum().backward()
    got = Gradients(*(x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves))
    assert got.dv.eq(0).all(), "the log-sum-exp does not depend on v"
    references = backward_references(call.problem, call.operands, torch.zeros_like(dout), dlse)
    verdict = judge_backward(call.problem, references, got)
    assert verdict.passed, str(verdict)


@each_kernel
def test_second_derivative_is_refused(kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(replace(PLAIN, lengths=(5, 7), lse=False), "normal", DEVICE)
    if refuses(kernel, call, request):
        return
    q = call.operands.q.detach().requires_grad_()
    out, _ = harness.run(kernel, call._replace(operands=call.operands._replace(q=q)))
    (dq,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        dq.float().square().sum().backward()


@each_kernel
@pytest.mark.parametrize("layout", ["transposed", "stride 0", "last stride 2"])
@pytest.mark.parametrize("packed", [False, True])
def test_layouts_of_dout(packed: bool, layout: str, kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(replace(PLAIN, lengths=(67, 90), batch=3, packed=packed, heads=(4, 2)), "normal", DEVICE)
    if refuses(kernel, call, request):
        return
    dout, dlse = upstream(call)
    if layout == "transposed":
        dout = dout.transpose(-3, -2).contiguous().transpose(-3, -2)
    elif layout == "stride 0":
        dout = dout[..., :1].expand(dout.shape)
    else:
        dout = torch.stack([dout, dout], dim=-1)[..., 0]
    assert not dout.is_contiguous()
    got, expected = (differentiate(kernel, call, d, dlse) for d in (dout, dout.contiguous()))
    assert bits(*got) == bits(*expected)


@each_kernel
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32:ieee"])
@pytest.mark.parametrize("features", [{}, {"causal": "bottom_right"}, {"packed": True}], ids=str)
def test_retrieval_gradients(features: dict[str, Any], dtype: str, kernel: str, request: pytest.FixtureRequest) -> None:
    """Each query takes one row of v whole: dv sums the dout of those that took it, and nothing depends on q and k."""
    case = replace(PLAIN, dtype=dtype, dims=(64, 40), heads=(4, 2), batch=3, lengths=(65, 90), lse=False, **features)
    call, _ = retrieval(case)
    if refuses(kernel, call, request):
        return
    call.operands.v.copy_(call.operands.v.round())
    g = torch.Generator(DEVICE).manual_seed(3)
    dout = torch.randint(-2, 3, (*call.operands.q.shape[:-1], 40), generator=g, device=DEVICE).to(call.operands.q.dtype)
    got = differentiate(kernel, call, dout)
    assert got.dq.eq(0).all()
    assert got.dk.eq(0).all()
    expected = reference.oracle_gradients(call.problem, call.operands, dout).dv.round()
    assert torch.equal(got.dv.double(), expected)


@each_kernel
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("lengths", [(0, 7), (5, 0), (5, 7)], ids=str)
@pytest.mark.parametrize("batch", [0, 2])
def test_gradients_of_empty_calls(
    batch: int, lengths: tuple[int, int], sinks: bool, kernel: str, request: pytest.FixtureRequest
) -> None:
    case = replace(PLAIN, lengths=lengths, batch=max(1, batch), sinks=sinks)
    call = cases.build(case, "normal", DEVICE)
    if batch == 0:
        q, k, v = (x[:0] for x in call.operands[:3])
        call = call._replace(problem=replace(call.problem, batch=0), operands=call.operands._replace(q=q, k=k, v=v))
    elif 0 not in lengths:
        mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=DEVICE)
        problem = replace(call.problem, mask_shape=(1, 1, 1, 1))
        call = call._replace(problem=problem, operands=call.operands._replace(mask=mask))
    if refuses(kernel, call, request):
        return
    dout, dlse = upstream(call)
    got = differentiate(kernel, call, dout, dlse)
    for grad in got[:3]:
        assert grad is not None and grad.eq(0).all()
    if sinks:
        assert got.dsinks is not None and dlse is not None
        # Nothing but the sink is seen: lse is the sink, so its gradient is what arrives at lse.
        torch.testing.assert_close(got.dsinks, dlse.sum((0, 2)))
