"""Quantized calls: every kernel that computes them, over masks, lengths, layouts and kinds of factors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance import cases, harness
from tests.conformance.cases import Call, Case
from tests.conformance.datasets import DATA_SETS
from tests.conformance.gates import forward_references, judge_forward
from tests.conformance.harness import DEVICE, KERNELS, ON_GPU, assert_gates, bits
from warpwave import attention, quantize
from warpwave.kernels import descales
from warpwave.operands import QuantizedOperands

QUANTIZED_KERNELS = [name for name, module in KERNELS.items() if getattr(module, "QUANTIZED", False)]
GRID = cases.pairwise(cases.QUANTIZED_FULL if ON_GPU else cases.QUANTIZED_SMALL)
# The interpreter takes half a second a case: one in so many runs in `make test`, the others in `make test-full`.
SAMPLED = 1 if ON_GPU else 4

each_kernel = pytest.mark.parametrize("kernel", QUANTIZED_KERNELS)
each_dtype = pytest.mark.parametrize("dtype", cases.QUANTIZED_DTYPES_OF_A_GRID)


@each_kernel
@pytest.mark.parametrize(
    ("nth", "case"),
    [
        pytest.param(i, case, marks=[pytest.mark.full] if i % SAMPLED else [], id=str(case))
        for i, case in enumerate(GRID)
    ],
)
def test_case_grid(nth: int, case: Case, kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(case, DATA_SETS[nth // SAMPLED % 3], DEVICE)
    if harness.refuses(kernel, call, request):
        return
    assert_gates(kernel, call)


@each_kernel
@each_dtype
@pytest.mark.parametrize("data", DATA_SETS)
def test_plain_calls(data: Any, dtype: str, kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(Case(dtype=dtype, lengths=(70, 150), heads=(2, 1), causal="bottom_right"), data, DEVICE)
    if harness.refuses(kernel, call, request):
        return
    assert_gates(kernel, call)


@each_kernel
@each_dtype
def test_layouts_are_equal_to_the_bit(dtype: str, kernel: str, request: pytest.FixtureRequest) -> None:
    """Also those of the factors: they are read by their strides."""
    case = Case(dtype=dtype, dims=(32, 32), lengths=(70, 150), heads=(2, 1), causal="bottom_right")
    call = cases.build(case, "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    expected = bits(*harness.run(kernel, call))
    other = cases.build(replace(case, layout="bhsd"), "normal", DEVICE)
    assert bits(*harness.run(kernel, other)) == expected
    strided = {
        name: factor.transpose(0, -1).contiguous().transpose(0, -1)
        for name, factor in call.operands._asdict().items()
        if name.endswith("_descale") and factor is not None and factor.dim()
    }
    assert bits(*harness.run(kernel, call._replace(operands=call.operands._replace(**strided)))) == expected


@each_kernel
@pytest.mark.parametrize("dtype", ["float8_e4m3fn:float8_e4m3fn:head", "int8:int8:head"])
def test_one_factor_of_q_for_a_group_of_heads(dtype: str, kernel: str, request: pytest.FixtureRequest) -> None:
    """The shape that FlashAttention-3 takes."""
    call = cases.build(Case(dtype=dtype, lengths=(33, 65), heads=(6, 2), batch=2), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    of_groups = call.operands.q_descale[:, ::3].contiguous()
    shared = call.operands._replace(q_descale=of_groups)
    each = call.operands._replace(q_descale=of_groups.repeat_interleave(3, dim=1))
    results = [bits(*harness.run(kernel, call._replace(operands=o))) for o in (shared, each)]
    assert results[0] == results[1]
    assert_gates(kernel, call._replace(operands=shared))


@each_kernel
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_out_in_other_dtypes(out_dtype: torch.dtype, kernel: str, request: pytest.FixtureRequest) -> None:
    """A float8 out saturates: a tenth of the values here are larger than it holds."""
    call = cases.build(Case(dtype="float8_e4m3fn:float8_e4m3fn:64", lengths=(70, 90), lse=False), "normal", DEVICE)
    name = str(out_dtype).removeprefix("torch.")
    problem, operands = replace(call.problem, dtype_out=name), call.operands
    if out_dtype in descales.FLOAT8:
        plain = forward_references(call.problem, operands).exact.out
        largest = torch.finfo(out_dtype).max
        operands = operands._replace(out_descale=plain.float().abs().flatten().quantile(0.9) / largest)
    call = Call(problem, operands, call.options | {"out_dtype": out_dtype})
    if harness.refuses(kernel, call, request):
        return
    out, _ = harness.run(kernel, call)
    verdict = judge_forward(problem, forward_references(problem, operands), out)
    assert verdict.passed or out_dtype in descales.FLOAT8, str(verdict)
    if out_dtype in descales.FLOAT8:
        exact = forward_references(problem, operands).exact.out
        beyond = exact.abs() > largest * 1.05
        assert beyond.sum() > 100 and (out.double()[beyond].abs() == largest).all()
        error = (out.double() - exact)[~beyond]
        assert error.square().mean().sqrt() < exact.square().mean().sqrt() * torch.finfo(out_dtype).eps / 2


@each_kernel
@each_dtype
def test_keys_that_no_query_sees_have_no_effect(dtype: str, kernel: str, request: pytest.FixtureRequest) -> None:
    """Nor have their factors: the block of a hidden tile may have any."""
    case = Case(dtype=dtype, lengths=(128, 256), causal="top_left", batch=2)
    call = cases.build(case, "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    expected = bits(*harness.run(kernel, call))
    operands: QuantizedOperands = call.operands
    hidden = {}
    for name in "kv":
        tensor = getattr(operands, name).clone()
        tensor[:, 128:] = float("nan") if tensor.dtype.is_floating_point else -128
        hidden[name] = tensor
        factor = getattr(operands, f"{name}_descale")
        if factor is not None and factor.dim() == 3:
            factor = factor.clone()
            factor[:, :, factor.shape[2] // 2 :] = float("nan")
            hidden[f"{name}_descale"] = factor
    if kernel == "eager":  # multiplies all keys by their factors first, and masks 0 * NaN
        hidden = {name: t for name, t in hidden.items() if t.dtype != torch.float32}
    assert bits(*harness.run(kernel, call._replace(operands=operands._replace(**hidden)))) == expected


@each_kernel
@pytest.mark.parametrize("dtype", ["float8_e4m3fn:float8_e4m3fn:128", "int8:int8:128"])
def test_each_block_has_its_own_factor(dtype: str, kernel: str, request: pytest.FixtureRequest) -> None:
    """Blocks whose factors differ by powers of 16: another block's factor would be far off."""
    call = cases.build(Case(dtype=dtype, lengths=(300, 400), dims=(32, 32), heads=(2, 1)), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    scaled = {}
    for name in ("q_descale", "k_descale", "v_descale"):
        factor = getattr(call.operands, name)
        scaled[name] = factor * 4.0 ** torch.arange(factor.shape[2], device=factor.device)
    assert_gates(kernel, call._replace(operands=call.operands._replace(**scaled)))


@each_kernel
def test_65536_keys(kernel: str, request: pytest.FixtureRequest) -> None:
    """float8 sums are kept in float32 from tile to tile."""
    keys = 65_536 if ON_GPU else 4_096
    call = cases.build(Case(dtype="float8_e4m3fn:float8_e4m3fn:128", lengths=(64, keys)), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    assert_gates(kernel, call)


@pytest.mark.parametrize("options", [{}, {"rotate": True}, {"smooth_k": True, "rotate": True}, {"dtype": torch.int8}])
def test_quantize_then_attend_is_close_to_the_original(options: dict[str, Any]) -> None:
    """The bounds are what the roundings of the inputs cost: 2^-4 of a float8 number at most, 1 / 254 of a block's
    largest int8."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 200, heads, 64, device=DEVICE) for heads in (4, 2, 2))
    expected = attention(q.double(), k.double(), v.double(), causal=True)
    out = attention(**quantize(q, k, v, **options).arguments(), causal=True)
    error = ((out.double() - expected).norm() / expected.norm()).item()
    assert error < (0.02 if "dtype" in options else 0.06)
