"""The context of a call does not affect it: autocast, the process's precision of products, replaced functions, threads.
And no call changes its context."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import warpwave
from tests.conformance import cases, harness
from tests.conformance.cases import PLAIN, Call, Case
from tests.conformance.gates import forward_references, judge_forward
from tests.conformance.harness import DEVICE, ON_GPU, bits, each_kernel
from tests.conformance.test_gradients import differentiate, upstream
from tests.conformance.test_gradients import each_kernel as each_forward
from tests.conformance.test_gradients import refuses as refuses_gradients
from warpwave.kernels import torch_products

CASE = replace(PLAIN, dims=(40, 64), heads=(4, 2), batch=2, lengths=(67, 90), causal="bottom_right")
CASES = {
    "float32": replace(CASE, dtype="float32:ieee"),
    "bfloat16": replace(CASE, dtype="bfloat16"),
    "packed": replace(CASE, dtype="float32:ieee", packed=True, batch=3),
    "mask and bias": replace(CASE, dtype="float32:ieee", mask="full", bias="heads", sinks=True),
    "without lse": replace(CASE, dtype="float32:ieee", lse=False),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


# Autocast -------------------------------------------------------------------------------------------------------------


@each_kernel
@each_case
@each_dtype
def test_autocast_changes_no_bit(dtype: torch.dtype, case: Case, kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(case, "sharp", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    expected = harness.run(kernel, call)
    with torch.autocast(DEVICE.type, dtype=dtype):
        got = harness.run(kernel, call)
        assert torch.is_autocast_enabled(DEVICE.type)
    assert got[0].dtype == call.operands.q.dtype
    assert bits(*got) == bits(*expected)


@each_forward
@each_case
@each_dtype
def test_autocast_changes_no_gradient(
    dtype: torch.dtype, case: Case, kernel: str, request: pytest.FixtureRequest
) -> None:
    call = cases.build(case, "normal", DEVICE)
    if refuses_gradients(kernel, call, request):
        return
    dout, dlse = upstream(call)
    expected = differentiate(kernel, call, dout, dlse)
    with torch.autocast(DEVICE.type, dtype=dtype):
        assert bits(*differentiate(kernel, call, dout, dlse)) == bits(*expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_and_the_operator(compiled: bool) -> None:
    """Under torch.compile, and through the dispatcher."""
    q, k, v = (torch.randn(1, 33, 2, 16, device=DEVICE) for _ in range(3))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return warpwave.attention(q, k, v, precision="ieee")

    expected = attend(q, k, v)
    run = torch.compile(attend, backend="eager", fullgraph=True) if compiled else attend
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        got = run(q, k, v)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_operands_of_several_dtypes_meet_in_that_of_autocast() -> None:
    """As torch's own attention has it: a rotation under autocast leaves q and k in float32, v in 16 bits."""
    q, k, v = (torch.randn(1, 33, 2, 16, device=DEVICE) for _ in range(3))
    with pytest.raises(warpwave.InvalidType, match=r"v is torch\.bfloat16 and q is torch\.float32"):
        warpwave.attention(q, k, v.bfloat16())
    q.requires_grad_()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        out = warpwave.attention(q, k, v.bfloat16())
    assert bits(out) == bits(warpwave.attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    out.sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32
    # Sinks are checked against the dtype that q has in the end, and against q's own.
    sinks = torch.randn(2, device=DEVICE).bfloat16()
    for given in (q, q.bfloat16()):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            out = warpwave.attention(given, k.bfloat16(), v.bfloat16(), sinks=sinks)
        three = [t.bfloat16() for t in (q, k, v)]
        assert bits(out) == bits(warpwave.attention(*three, sinks=sinks.float()))


def test_a_graph_casts_operands_of_several_dtypes_likewise() -> None:
    q, k, v = (torch.randn(1, 33, 2, 16, device=DEVICE) for _ in range(3))
    q.requires_grad_()
    run = torch.compile(warpwave.attention, backend="aot_eager", fullgraph=True)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        out = run(q, k, v.bfloat16())
    assert bits(out) == bits(warpwave.attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    out.sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32


def test_a_checked_call_takes_what_an_unchecked_one_takes() -> None:
    """Operands of several dtypes under autocast, and views that torch negates lazily."""
    q, k, v = (torch.randn(1, 33, 2, 16, device=DEVICE) for _ in range(3))
    offsets = torch.tensor([0, 33], dtype=torch.int32, device=DEVICE)
    packed: Any = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 33, "max_seqlen_k": 33}
    negated = torch.complex(torch.zeros_like(q), -q).conj().imag
    assert negated.is_neg()
    for given in (q.bfloat16(), negated):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            for call, three, lengths in (
                (warpwave.attention, (given, k, v), {}),
                (warpwave.attention_varlen, (given[0], k[0], v[0]), packed),
            ):
                assert bits(call(*three, **lengths, checked=True)) == bits(call(*three, **lengths))


# The process's precision of products ----------------------------------------------------------------------------------


@pytest.fixture(params=["tf32", "all tf32", "medium"])
def rounded_products(request: pytest.FixtureRequest) -> Iterator[str]:
    """A process that lets float32 products drop bits, in each of the ways that torch has for it."""
    backends: Any = torch.backends
    before = (backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision, backends.fp32_precision)
    if request.param == "tf32":
        backends.cuda.matmul.fp32_precision = backends.mkldnn.matmul.fp32_precision = "tf32"
    elif request.param == "all tf32":
        backends.cuda.matmul.fp32_precision = backends.mkldnn.matmul.fp32_precision = (
            "none"  # goes before all backends'
        )
        backends.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision("medium")
    yield request.param
    torch.set_float32_matmul_precision("highest")
    backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision, backends.fp32_precision = before


def settings() -> tuple[str, ...]:
    backends: Any = torch.backends
    return (backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision, backends.fp32_precision)


@each_kernel
@pytest.mark.parametrize("features", [{}, {"lse": False, "causal": "bottom_right"}], ids=str)
def test_float32_keeps_its_bits_whatever_the_process_allows(
    features: dict[str, Any], rounded_products: str, kernel: str, request: pytest.FixtureRequest
) -> None:
    call = cases.build(replace(CASES["float32"], **features), "sharp", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    before = settings()
    out, lse = harness.run(kernel, call)
    assert settings() == before
    references = forward_references_in_ieee(call)
    verdict = judge_forward(call.problem, references, out, lse)
    assert verdict.passed, str(verdict)


def forward_references_in_ieee(call: Call) -> Any:
    """The references, whose float32 one is torch's own products in full precision."""
    kept = settings()
    torch.set_float32_matmul_precision("highest")
    references = forward_references(call.problem, call.operands)
    backends: Any = torch.backends
    backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision, backends.fp32_precision = kept
    return references


def test_which_settings_keep_float32(rounded_products: str) -> None:
    assert not torch_products.keeps_float32(DEVICE)


def test_by_default_float32_is_kept() -> None:
    assert torch_products.keeps_float32(DEVICE)


def test_rounded_settings_take_products_to_float64(rounded_products: str) -> None:
    """On this machine torch may have no TF32 to show the difference: the way taken does."""
    a, b = (torch.randn(3, 17, 33, device=DEVICE) for _ in range(2))
    exact = a.double() @ b.double().transpose(1, 2)
    into, total = torch.empty(3, 17, 17, device=DEVICE), torch.ones(3, 17, 17, device=DEVICE)
    torch_products.product_into(into, a, b.transpose(1, 2))
    torch_products.add_product(total, a, b.transpose(1, 2))
    for got in (torch_products.product(a, b.transpose(1, 2)), into, total - 1):
        assert (got.double() - exact).abs().max() < 3e-6
    assert torch.equal(into, exact.float())


@pytest.mark.parametrize("gradients", [False, True])
def test_threads_never_meet_a_changed_setting(gradients: bool) -> None:
    """No call changes a setting of the process, not even while it runs."""
    seen: set[tuple[str, ...]] = set()
    running = threading.Event()
    running.set()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        expected = settings()

        def watch() -> None:
            while running.is_set():
                seen.add(settings())

        def attend() -> None:
            q, k, v = (torch.randn(1, 40, 2, 16, device=DEVICE, requires_grad=gradients) for _ in range(3))
            for _ in range(20):
                out = warpwave.attention(q, k, v, causal=True, kernel="eager")
                if gradients:
                    out.sum().backward()

        watcher = threading.Thread(target=watch)
        watcher.start()
        workers = [threading.Thread(target=attend) for _ in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        running.clear()
        watcher.join()
        assert seen == {expected}
        assert settings() == expected
    finally:
        running.clear()
        torch.backends.cuda.matmul.fp32_precision = "none"


# Functions that others replaced ---------------------------------------------------------------------------------------


@pytest.mark.skipif(ON_GPU, reason="torch's function serves CPU tensors only")
def test_torch_s_function_may_be_replaced_by_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose `scaled_dot_product_attention` calls us must not call itself."""
    q, k, v = (torch.randn(1, 2, 33, 16) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        return warpwave.attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", ours)
    got = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(got, expected)


# Threads in the interpreter -------------------------------------------------------------------------------------------


@pytest.mark.skipif(ON_GPU, reason="the interpreter serves machines without a GPU")
@pytest.mark.parametrize("kernel", ["flash_fwd", "split_kv"])
def test_sixteen_threads_share_the_interpreter(kernel: str) -> None:
    call = cases.build(replace(CASES["float32"], lengths=(20, 20), batch=1), "normal", DEVICE)
    expected = bits(*harness.run(kernel, call))
    found: list[list[str]] = []
    threads = [threading.Thread(target=lambda: found.append(bits(*harness.run(kernel, call)))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 16
