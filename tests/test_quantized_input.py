"""Bad input of quantized calls is refused before anything runs, with the argument's name and what it may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from warpwave import InvalidInput, InvalidType, UnsupportedProblem, attention, attention_varlen, quantize
from warpwave.checks import check_problem
from warpwave.gpu import Gpu
from warpwave.kernels import flash_fwd, reasons
from warpwave.problem import AttentionProblem

FP8 = torch.float8_e4m3fn


def arguments(**options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 150, heads, 32) for heads in (4, 2, 2))
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
        lambda: changed(q=torch.zeros(2, 150, 4, 32)), InvalidType, "q is torch.float32; with q_descale, .* it must be",
    ),
    "mixed dtypes": (
        lambda: changed(k=torch.zeros(2, 150, 2, 32, dtype=torch.int8)), InvalidType, "q and k must share one dtype",
    ),
    "v of another kind": (
        lambda: changed(v=torch.zeros(2, 150, 2, 32, dtype=torch.int8)), InvalidType, "v is torch.int8 and q is",
    ),
    "factor of 16 bits": (
        lambda: changed(k_descale=torch.ones(2, 2).half()), InvalidType, "k_descale is torch.float16; it must be",
    ),
    "factor of other heads": (
        lambda: changed(k_descale=torch.ones(2, 4)), InvalidInput, r"k_descale has shape \(2, 4\); it must be \(\)",
    ),
    "factor of other blocks": (
        lambda: changed(q_descale=torch.ones(2, 4, 5)), InvalidInput, r"q_descale has shape \(2, 4, 5\).* 2 or 3\)",
    ),
    "factor of 16-bit values": (
        lambda: arguments(dtype=torch.int8) | {"v_descale": torch.ones(())}, InvalidInput, "only quantized values have",
    ),
    "float8 out without its factor": (lambda: changed(out_dtype=FP8), InvalidInput, "out_descale is None and out is"),
    "factor of a 16-bit out": (lambda: changed(out_descale=torch.ones(())), InvalidInput, "out_descale is given"),
    "out of float32": (lambda: changed(out_dtype=torch.float32), InvalidType, "out_dtype is torch.float32; it must be"),
    "negative scale": (lambda: changed(softmax_scale=-1.0), InvalidInput, "negate q before it is quantized"),
    "gradients": (
        lambda: changed(q_descale=torch.ones((), requires_grad=True)), UnsupportedProblem, "has no gradients",
    ),
    "dropout": (lambda: changed(dropout_p=0.1), UnsupportedProblem, "has no dropout"),
    "another kernel": (lambda: changed(kernel="split_kv"), UnsupportedProblem, "are computed by .*flash_fwd, eager"),
    "factor that is zero": (
        lambda: changed(k_descale=torch.zeros(2, 2), checked=True), InvalidInput, r"k_descale\[0, 0\] is 0; ",
    ),
    "factor that is negative": (
        lambda: changed(v_descale=torch.tensor([[1.0, 1.0], [1.0, -1.0]]), checked=True),
        InvalidInput, r"v_descale\[1, 1\] is -1",
    ),
    "factor that is NaN": (
        lambda: changed(q_descale=torch.tensor(float("nan")), checked=True), InvalidInput, "q_descale is nan",
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
    offsets = torch.tensor([0, 70, 150], dtype=torch.int32)
    packed |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 80, "max_seqlen_k": 80}
    factors = {name: given[name] for name in ("q_descale", "k_descale", "v_descale")}
    assert attention_varlen(**packed, **factors, checked=True).dtype == torch.bfloat16
    with pytest.raises(UnsupportedProblem, match="blocks of packed tokens would belong to two sequences"):
        attention_varlen(**packed, **factors | {"k_descale": torch.ones(2, 2, 2)})


@pytest.mark.parametrize("block", [64, 128])
def test_new_lengths_and_batches_find_their_plans(block: int) -> None:
    """A second call with the same options and other sizes must not run with the first one's factors or lengths."""
    for batch, seqlen in ((2, 150), (2, 150), (1, 150), (3, 40), (2, 70), (2, 150)):
        for granularity in ("head", block):
            q, k, v = (torch.randn(batch, seqlen, heads, 32) for heads in (4, 2, 2))
            found = quantize(q, k, v, granularity=granularity)
            out = attention(**found.arguments())
            expected = attention(*found.dequantized())
            assert (out.float() - expected).norm() < 5e-3 * expected.norm()


def test_a_quantized_call_compiles_as_one_graph() -> None:
    given = arguments()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attention(q, k, v, **{n: x for n, x in given.items() if n not in "qkv"}, causal=True)
        return out

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    inputs = [given[name] for name in "qkv"]
    assert torch.equal(compiled(*inputs), call(*inputs))


def test_no_queries_or_keys() -> None:
    q, k, v = torch.zeros(1, 0, 2, 32), torch.zeros(1, 5, 2, 32), torch.zeros(1, 5, 2, 32)
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
        ({"dtype_v": "float16"}, "dtype_v is float16 and dtype_out bfloat16; beside float8_e4m3fn, v must be one of"),
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
