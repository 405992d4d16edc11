"""Bad input of quantized calls is refused before anything runs, with the argument's name and what it may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.library import opcheck

from warpwave import InvalidInput, InvalidType, UnsupportedProblem, attention, attention_varlen, quantize
from warpwave.checks.problems import check_problem
from warpwave.gpu import Gpu
from warpwave.kernels import flash_fwd, reasons
from warpwave.operands import QuantizedOperands
from warpwave.options import options_of
from warpwave.problem import AttentionProblem
from warpwave.runtime.triton_or_stub import NO_TRITON
from warpwave.workbench.bench.peers.peer import OperatorNames

FP8 = torch.float8_e4m3fn
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Factors and values of cases: tensors on two devices are refused first.
ones, zeros, randn = (partial(make, device=DEVICE) for make in (torch.ones, torch.zeros, torch.randn))
tensor = partial(torch.tensor, device=DEVICE)


def arguments(**options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    q, k, v = (randn(2, 150, heads, 32) for heads in (4, 2, 2))
    return quantize(q, k, v, **options).arguments()


def changed(**changes: Any) -> dict[str, Any]:
    return arguments() | changes


CASES: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "no factors": (
        lambda: {n: x for n, x in arguments().items() if n in "qkv"},
        InvalidType,
        "q is torch.float8_e4m3fn; .* or quantized with its factors q_descale, k_descale and v_descale",
    ),
    "one factor is missing": (lambda: changed(k_descale=None), InvalidInput, "k_descale is None and k is torch.float8"),
    "factors of 16 bits": (
        lambda: changed(q=zeros(2, 150, 4, 32)), InvalidType, "q is torch.float32; with q_descale, .* it must be",
    ),
    "mixed dtypes": (
        lambda: changed(k=zeros(2, 150, 2, 32, dtype=torch.int8)), InvalidType, "q and k must share one dtype",
    ),
    "v of another kind": (
        lambda: changed(v=zeros(2, 150, 2, 32, dtype=torch.int8)), InvalidType, "v is torch.int8 and q is",
    ),
    "factor of 16 bits": (
        lambda: changed(k_descale=ones(2, 2).half()), InvalidType, "k_descale is torch.float16; it must be",
    ),
    "factor of other heads": (
        lambda: changed(k_descale=ones(2, 4)), InvalidInput, r"k_descale has shape \(2, 4\); it must be \(\)",
    ),
    "factor of other blocks": (
        lambda: changed(q_descale=ones(2, 4, 5)), InvalidInput, r"q_descale has shape \(2, 4, 5\).* 2 or 3\)",
    ),
    "factor of 16-bit values": (
        lambda: arguments(dtype=torch.int8) | {"v_descale": ones(())}, InvalidInput, "only quantized values have",
    ),
    "float8 out without its factor": (lambda: changed(out_dtype=FP8), InvalidInput, "out_descale is None and out is"),
    "factor of a 16-bit out": (lambda: changed(out_descale=ones(())), InvalidInput, "out_descale is given"),
    "out of float32": (lambda: changed(out_dtype=torch.float32), InvalidType, "out_dtype is torch.float32; it must be"),
    "out dtype in a list": (lambda: changed(out_dtype=[FP8]), InvalidType, r"out_dtype is \[torch.float8_e4m3fn\]"),
    "negative scale": (lambda: changed(softmax_scale=-1.0), InvalidInput, "negate q before it is quantized"),
    "an error budget": (
        lambda: changed(precision=1e-3), InvalidInput, r"precision is 0\.001.*; k is torch\.\w+: pass no precision$",
    ),
    "gradients": (
        lambda: changed(q_descale=ones((), requires_grad=True)), UnsupportedProblem, "has no gradients",
    ),
    "dropout": (lambda: changed(dropout_p=0.1), UnsupportedProblem, "has no dropout"),
    "another kernel": (lambda: changed(kernel="split_kv"), UnsupportedProblem, "are computed by .*flash_fwd, eager"),
    "factor that is zero": (
        lambda: changed(k_descale=zeros(2, 2), checked=True), InvalidInput, r"k_descale\[0, 0\] is 0; ",
    ),
    "factor that is negative": (
        lambda: changed(v_descale=tensor([[1.0, 1.0], [1.0, -1.0]]), checked=True),
        InvalidInput, r"v_descale\[1, 1\] is -1",
    ),
    "factor that is NaN": (
        lambda: changed(q_descale=tensor(float("nan")), checked=True), InvalidInput, "q_descale is nan",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case: str) -> None:
    make, error, text = CASES[case]
    with pytest.raises(error, match=text):
        attention(**make())


def test_packed_calls_take_no_factors_of_blocks() -> None:
    given = arguments(granularity="head")
    packed: dict[str, Any] = {name: given[name][0] for name in "qkv"}
    offsets = tensor([0, 70, 150], dtype=torch.int32)
    packed |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 80, "max_seqlen_k": 80}
    factors = {name: given[name] for name in ("q_descale", "k_descale", "v_descale")}
    assert attention_varlen(**packed, **factors, checked=True).dtype == torch.bfloat16
    with pytest.raises(UnsupportedProblem, match="blocks of packed tokens would belong to two sequences"):
        attention_varlen(**packed, **factors | {"k_descale": ones(2, 2, 2)})


@pytest.mark.parametrize("block", [64, 128])
def test_new_lengths_and_batches_find_their_plans(block: int) -> None:
    """A second call with the same options and other sizes must not run with the first one's factors or lengths. In
    int8, whose probabilities have 16 bits on a GPU too."""
    for batch, seqlen in ((2, 150), (2, 150), (1, 150), (3, 40), (2, 70), (2, 150)):
        for granularity in ("head", block):
            q, k, v = (randn(batch, seqlen, heads, 32) for heads in (4, 2, 2))
            found = quantize(q, k, v, dtype=torch.int8, dtype_v=torch.int8, granularity=granularity)
            out = attention(**found.arguments())
            expected = attention(*found.dequantized())
            assert (out.float() - expected).norm() < 5e-3 * expected.norm()


@pytest.mark.parametrize("granularity", ["tensor", "head", 64])
def test_a_quantized_call_compiles_as_one_graph(granularity: str | int) -> None:
    """The second length makes sizes symbols of the graph."""

    def call(**given: Any) -> torch.Tensor:
        out: torch.Tensor = attention(**given, causal=True)
        return out

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    for batch, seqlen in ((2, 150), (3, 200), (4, 333)):
        found = quantize(*(randn(batch, seqlen, heads, 32) for heads in (4, 2, 2)), granularity=granularity)
        assert torch.equal(compiled(**found.arguments()), call(**found.arguments()))


@pytest.mark.parametrize("kernel", ["eager", "flash_fwd"])
def test_out_receives_the_dtype_of_the_output(kernel: str) -> None:
    if kernel == "flash_fwd" and NO_TRITON is not None:
        pytest.skip(NO_TRITON)
    given = arguments()
    expected = attention(**given, kernel=kernel)
    out = torch.full_like(expected, float("nan"))
    assert attention(**given, kernel=kernel, out=out) is out
    assert torch.equal(out, expected)
    with pytest.raises(InvalidType, match=r"out must have torch\.bfloat16"):
        attention(**given, kernel=kernel, out=torch.empty_like(expected, dtype=FP8))
    if kernel == "eager":
        stored = torch.empty_like(expected)
        compiled = torch.compile(attention, backend="eager", fullgraph=True)
        assert torch.equal(compiled(**given, kernel=kernel, out=stored), expected)
        assert torch.equal(stored, expected)


OUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "another dtype": (lambda x: x.float(), "out must have torch.bfloat16"),
    "more axes": (lambda x: x.expand(3, *x.shape).clone(), r"out has shape .*; it must have \(2, 150, 4, 32\)"),
    "a leaf": (lambda x: x.clone().requires_grad_(), "has no gradients"),
}


@pytest.mark.parametrize("way", ["mode", "graph"])
@pytest.mark.parametrize("what", OUTS)
def test_operators_refuse_what_eager_calls_refuse_as_out(what: str, way: str) -> None:
    """A copy to out would convert its dtype, and repeat the result along more axes."""
    given = arguments()
    change, text = OUTS[what]
    out = change(attention(**given))
    if way == "mode":
        with OperatorNames(), pytest.raises((InvalidInput, InvalidType, UnsupportedProblem), match=text):
            attention(**given, out=out)
    else:
        torch._dynamo.reset()
        with pytest.raises(Exception, match=text):
            torch.compile(attention, backend="eager", fullgraph=True)(**given, out=out)


def test_operators_store_every_layout_and_dtype_of_out() -> None:
    given = arguments() | {"out_dtype": FP8, "out_descale": tensor([0.01])}
    expected = attention(**given)
    wide = zeros(2, 150, 4, 64, dtype=FP8)
    with OperatorNames():
        assert attention(**given, out=wide[..., ::2]).data_ptr() == wide.data_ptr()
    assert torch.equal(wide[..., ::2].float(), expected.float()) and not wide[..., 1::2].float().any()
    with OperatorNames(), pytest.raises(InvalidInput, match="out shares memory with q"):
        attention(**given, out=given["q"])
    with pytest.raises(UnsupportedProblem, match="a transform of torch"):
        torch.func.vmap(lambda q: attention(**given | {"q": q}, out=expected))(given["q"][None])


def test_opcheck() -> None:
    given = arguments(granularity="head", dtype=torch.int8)
    tensors = [given.get(name) for name in QuantizedOperands._fields]
    options = options_of(QuantizedOperands(*tensors), False, None, 0.0, None, "default", True)
    out = zeros(2, 150, 4, 32, dtype=torch.bfloat16)
    for operator, more in (("quantized_attention", ()), ("quantized_attention_out", (out,))):
        overload = getattr(torch.ops.warpwave, operator).default
        results = opcheck(overload, (*tensors, *options, "auto", "", *more))
        assert set(results.values()) == {"SUCCESS"}, results


def test_no_queries_or_keys() -> None:
    q, k, v = zeros(1, 0, 2, 32), zeros(1, 5, 2, 32), zeros(1, 5, 2, 32)
    for rows, keys in ((q, k), (k, q)):
        found = quantize(rows, keys, v[:, : keys.shape[1]])
        out, lse = attention(**found.arguments(), return_lse=True)
        assert out.shape == rows.shape and out.dtype == torch.bfloat16 and lse.shape == (1, 2, rows.shape[1])


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "gfx90a", "gfx1100"])
def test_float8_needs_a_card_that_has_it(arch: str) -> None:
    problem = AttentionProblem(
        batch=1, seqlen_q=64, seqlen_k=64, num_heads_q=1, num_heads_kv=1, head_dim=64, head_dim_v=64, softmax_scale=0.1,
        dtype="float8_e4m3fn", dtype_v="float8_e4m3fn", dtype_out="bfloat16", descale_blocks=(0, 0, 0),
    )  # fmt: skip
    (reason,) = flash_fwd.why_not(problem, Gpu.for_arch(arch))
    assert reason == reasons.of_quantized(problem, Gpu.for_arch(arch))[0] and "float8 needs NVIDIA sm_89" in reason
    assert problem.compulsory_bytes == 64 * 64 * (1 + 1 + 1 + 2) + 3 * 4


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"descale_blocks": None}, "quantized q and k, and no others, have all of them"),
        ({"dtype": "bfloat16"}, "quantized q and k, and no others, have all of them"),
        ({"dtype_v": "int8"}, "dtype_v is int8 and dtype_out bfloat16; beside float8_e4m3fn, v must be one of"),
        ({"dtype_out": "int8"}, "and out one of float16, bfloat16, float8_e4m3fn, float8_e5m2"),
        ({"descale_blocks": (0, 0, 32)}, "it must be three of 0, 64 and 128"),
        ({"dropout_p": 0.1}, "quantized calls have no gradients, no dropout"),
    ],
)
def test_problems_that_no_call_can_have(change: dict[str, Any], text: str) -> None:
    fine = AttentionProblem(
        batch=1, seqlen_q=64, seqlen_k=64, num_heads_q=1, num_heads_kv=1, head_dim=64, head_dim_v=64, softmax_scale=0.1,
        dtype="float8_e4m3fn", dtype_v="float8_e4m3fn", dtype_out="bfloat16", descale_blocks=(0, 64, 128),
    )  # fmt: skip
    check_problem(fine)
    with pytest.raises(InvalidInput, match=text):
        check_problem(replace(fine, **change))
