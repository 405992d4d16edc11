"""The references: R against independent formulas and finite differences, M and N against what defines them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from warpwave.operands import Operands
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.verify import reference

BATCH, SEQLEN_Q, SEQLEN_K, HEADS, HEADS_KV, HEAD_DIM, HEAD_DIM_V = 2, 5, 7, 4, 2, 8, 6

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": Causal()},
    "causal top-left": {"causal": Causal("top_left")},
    "window": {"window_size": (2, 1)},
    "causal and window": {"causal": Causal(), "window_size": (3, -1)},
    "mask": {"mask_shape": (1, HEADS, SEQLEN_Q, SEQLEN_K)},
    "mask of keys": {"mask_shape": (BATCH, 1, 1, SEQLEN_K)},
    "bias": {"bias_shape": (BATCH, 1, SEQLEN_Q, SEQLEN_K), "bias_dtype": "float64"},
    "bias of keys": {"bias_shape": (1, HEADS, 1, SEQLEN_K), "bias_dtype": "float64"},
    "alibi": {"alibi_shape": (HEADS,)},
    "alibi a batch item": {"alibi_shape": (BATCH, HEADS)},
    "softcap": {"softcap": 1.5},
    "sinks": {"has_sinks": True},
    "everything": {
        "causal": Causal(),
        "window_size": (4, -1),
        "bias_shape": (1, 1, SEQLEN_Q, SEQLEN_K),
        "bias_dtype": "float64",
        "alibi_shape": (HEADS,),
        "softcap": 2.0,
        "has_sinks": True,
    },
}


def make(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[AttentionProblem, Operands]:
    """A small problem with these options and operands that fit it."""
    problem = AttentionProblem(
        batch=BATCH,
        seqlen_q=SEQLEN_Q,
        seqlen_k=SEQLEN_K,
        num_heads_q=HEADS,
        num_heads_kv=HEADS_KV,
        head_dim=HEAD_DIM,
        head_dim_v=HEAD_DIM_V,
        dtype=str(dtype).removeprefix("torch."),
        softmax_scale=0.4,
        **options,
    )
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    return problem, Operands(
        q=normal(BATCH, SEQLEN_Q, HEADS, HEAD_DIM),
        k=normal(BATCH, SEQLEN_K, HEADS_KV, HEAD_DIM),
        v=normal(BATCH, SEQLEN_K, HEADS_KV, HEAD_DIM_V),
        mask=torch.rand(problem.mask_shape, generator=g) > 0.4 if problem.mask_shape else None,
        bias=normal(*problem.bias_shape) if problem.bias_shape else None,
        alibi_slopes=normal(*problem.alibi_shape).abs() if problem.alibi_shape else None,
        sinks=normal(HEADS) if problem.has_sinks else None,
    )


def attention_by_loops(problem: AttentionProblem, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, one (batch item, head, query, key) at a time; differentiable."""
    q, k, v, mask, bias, slopes, sinks, _, _ = operands
    out, lse = [], []
    for b in range(BATCH):
        for h in range(HEADS):
            kv = h // (HEADS // HEADS_KV)
            for i in range(SEQLEN_Q):
                logits, values = [], []
                for j in range(SEQLEN_K):
                    s = (q[b, i, h] * k[b, j, kv]).sum() * problem.softmax_scale
                    if problem.softcap:
                        s = problem.softcap * torch.tanh(s / problem.softcap)
                    if bias is not None:
                        s = s + bias.expand(BATCH, HEADS, SEQLEN_Q, SEQLEN_K)[b, h, i, j]
                    if slopes is not None:
                        s = s - slopes.expand(BATCH, HEADS)[b, h] * abs(i + SEQLEN_K - SEQLEN_Q - j)
                    left, right = problem.window_size
                    position = i + SEQLEN_K - SEQLEN_Q
                    visible = (left < 0 or position - left <= j) and (right < 0 or j <= position + right)
                    if problem.causal is not None:
                        visible &= j <= (i if problem.causal.alignment == "top_left" else position)
                    if mask is not None:
                        visible &= bool(mask.expand(BATCH, HEADS, SEQLEN_Q, SEQLEN_K)[b, h, i, j])
                    if visible:
                        logits.append(s)
                        values.append(v[b, j, kv])
                terms = [*logits, sinks[h]] if sinks is not None else logits
                row_lse = torch.stack(terms).logsumexp(0) if terms else torch.tensor(-math.inf, dtype=q.dtype)
                zero = torch.zeros(HEAD_DIM_V, dtype=q.dtype)
                out.append(sum((torch.exp(s - row_lse) * value for s, value in zip(logits, values, strict=True)), zero))
                lse.append(row_lse)
    return (
        torch.stack(out).view(BATCH, HEADS, SEQLEN_Q, HEAD_DIM_V).transpose(1, 2),
        torch.stack(lse).view(BATCH, HEADS, SEQLEN_Q),
    )


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_oracle_is_the_definition(options: dict[str, Any]) -> None:
    problem, operands = make(**options)
    out, lse = attention_by_loops(problem, operands)
    result = reference.oracle(problem, operands)
    torch.testing.assert_close(result.out, out)
    torch.testing.assert_close(result.lse, lse)


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_oracle_gradients_are_autograds_of_the_definition(options: dict[str, Any]) -> None:
    problem, operands = make(**options)
    out, lse = attention_by_loops(problem, leaves := operands._replace(**differentiable(operands)))
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    visible = lse > -math.inf
    ((out * dout).sum() + (lse * dlse)[visible].sum()).backward()
    result = reference.oracle_gradients(problem, operands, dout, dlse)
    for name, grad in zip(("q", "k", "v", "bias", "alibi_slopes", "sinks"), result, strict=True):
        expected = getattr(leaves, name)
        assert (grad is None) == (expected is None), name
        if grad is not None:
            torch.testing.assert_close(grad, expected.grad, msg=f"d{name}")


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "alibi_slopes", "sinks"])
def test_oracle_gradients_agree_with_finite_differences(name: str) -> None:
    problem, operands = make(**FEATURES["everything"])
    x = getattr(operands, name)
    dout = torch.randn(BATCH, SEQLEN_Q, HEADS, HEAD_DIM_V, dtype=torch.float64)
    direction = torch.randn_like(x)
    step = 1e-5

    def loss(at: torch.Tensor) -> float:
        return (reference.oracle(problem, operands._replace(**{name: at})).out * dout).sum().item()

    difference = (loss(x + step * direction) - loss(x - step * direction)) / (2 * step)
    fields = ("q", "k", "v", "bias", "alibi_slopes", "sinks")
    gradient = reference.oracle_gradients(problem, operands, dout)[fields.index(name)]
    assert gradient is not None
    assert (gradient * direction).sum().item() == pytest.approx(difference, rel=1e-7)


def test_oracle_agrees_with_torch_sdpa() -> None:
    problem, operands = make(mask_shape=(BATCH, HEADS, SEQLEN_Q, SEQLEN_K))
    operands.mask[..., 0] = True  # sdpa is asked about rows that see something
    q, k, v = (x.transpose(1, 2) for x in operands[:3])
    expected = F.scaled_dot_product_attention(q, k, v, operands.mask, scale=problem.softmax_scale, enable_gqa=True)
    torch.testing.assert_close(reference.oracle(problem, operands).out, expected.transpose(1, 2))


def test_packed_sequences_are_separate_calls() -> None:
    lengths = ((3, 4), (0, 2), (2, 0), (5, 7))
    whole, operands = make(causal=Causal(), alibi_shape=(len(lengths), HEADS), has_sinks=True)
    total_q, total_k = (sum(side) for side in zip(*lengths, strict=True))
    g = torch.Generator().manual_seed(1)
    q = torch.randn(total_q, HEADS, HEAD_DIM, generator=g, dtype=torch.float64)
    k = torch.randn(total_k, HEADS_KV, HEAD_DIM, generator=g, dtype=torch.float64)
    v = torch.randn(total_k, HEADS_KV, HEAD_DIM_V, generator=g, dtype=torch.float64)
    slopes = torch.rand(len(lengths), HEADS, generator=g, dtype=torch.float64)
    cu = [torch.tensor([0, *side], dtype=torch.int32).cumsum(0).int() for side in zip(*lengths, strict=True)]
    packed = replace(
        whole,
        batch=len(lengths),
        packed=True,
        total_q=total_q,
        total_k=total_k,
        seqlen_q=5,
        seqlen_k=7,
        lengths=lengths,
    )
    arguments = Operands(q, k, v, None, None, slopes, operands.sinks, *cu)
    result = reference.oracle(packed, arguments)
    dout = torch.randn(total_q, HEADS, HEAD_DIM_V, generator=g, dtype=torch.float64)
    gradients = reference.oracle_gradients(packed, arguments, dout)

    dsinks = torch.zeros(HEADS, dtype=torch.float64)
    for b, (seqlen_q, seqlen_k) in enumerate(lengths):
        rows, keys = slice(cu[0][b], cu[0][b + 1]), slice(cu[1][b], cu[1][b + 1])
        one = replace(whole, batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, alibi_shape=(HEADS,))
        alone = Operands(q[None, rows], k[None, keys], v[None, keys], alibi_slopes=slopes[b], sinks=operands.sinks)
        expected = reference.oracle(one, alone)
        torch.testing.assert_close(result.out[rows], expected.out[0])
        torch.testing.assert_close(result.lse[:, rows], expected.lse[0])
        single = reference.oracle_gradients(one, alone, dout[None, rows])
        torch.testing.assert_close(gradients.dq[rows], single.dq[0])
        torch.testing.assert_close(gradients.dk[keys], single.dk[0])
        torch.testing.assert_close(gradients.dv[keys], single.dv[0])
        assert single.dsinks is not None
        dsinks += single.dsinks
    assert gradients.dsinks is not None
    torch.testing.assert_close(gradients.dsinks, dsinks)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("reference_of", [reference.oracle, reference.rounding_model])
def test_rows_that_see_nothing(reference_of: Any, sinks: bool) -> None:
    problem, operands = make(torch.bfloat16, mask_shape=(1, 1, SEQLEN_Q, 1), has_sinks=sinks)
    operands.mask[:] = True
    operands.mask[0, 0, 2] = False
    result = reference_of(problem, operands)
    assert result.out[:, 2].eq(0).all()
    expected = operands.sinks.double().expand(BATCH, HEADS) if sinks else torch.full((BATCH, HEADS), -math.inf)
    torch.testing.assert_close(result.lse[:, :, 2], expected.double())
    assert reference.naive(problem, operands)[:, 2].eq(0).all()
    for gradients_of in (reference.oracle_gradients, reference.rounding_model_gradients, reference.naive_gradients):
        gradients = gradients_of(problem, operands, torch.ones_like(result.out).to(operands.q.dtype))
        assert gradients.dq[:, 2].eq(0).all()
        assert all(g is None or g.isfinite().all() for g in gradients)


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_empty_sizes(batch: int, seqlen_q: int, seqlen_k: int) -> None:
    problem, _ = make(torch.float16)
    problem = replace(problem, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    operands = Operands(
        torch.ones(batch, seqlen_q, HEADS, HEAD_DIM, dtype=torch.float16),
        torch.ones(batch, seqlen_k, HEADS_KV, HEAD_DIM, dtype=torch.float16),
        torch.ones(batch, seqlen_k, HEADS_KV, HEAD_DIM_V, dtype=torch.float16),
    )
    shape = (batch, seqlen_q, HEADS, HEAD_DIM_V)
    for result in (reference.oracle(problem, operands), reference.rounding_model(problem, operands)):
        assert result.out.shape == shape
        assert result.out.eq(0).all()
        assert result.lse.eq(-math.inf).all()
    assert reference.naive(problem, operands).shape == shape
    for gradients_of in (reference.oracle_gradients, reference.rounding_model_gradients, reference.naive_gradients):
        gradients = gradients_of(problem, operands, torch.ones(shape, dtype=torch.float16))
        assert all(g is None or g.eq(0).all() for g in gradients)


def test_row_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, operands = make(**FEATURES["everything"])
    dout = torch.randn(BATCH, SEQLEN_Q, HEADS, HEAD_DIM_V, dtype=torch.float64)
    whole = reference.oracle(problem, operands)
    gradients = reference.oracle_gradients(problem, operands, dout)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 2 * HEADS * SEQLEN_K)
    chunked = reference.oracle(problem, operands)
    torch.testing.assert_close(chunked.out, whole.out)
    torch.testing.assert_close(chunked.lse, whole.lse)
    assert chunked.largest_logit == whole.largest_logit
    for a, b in zip(reference.oracle_gradients(problem, operands, dout), gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_model_rounds_once_where_one_key_is_visible(dtype: torch.dtype) -> None:
    """P is then exactly 1, so M must return that row of v bit for bit."""
    problem, operands = make(dtype, window_size=(0, 0))
    out = reference.rounding_model(problem, operands).out
    assert out.dtype == dtype
    last = operands.v[:, SEQLEN_K - SEQLEN_Q :].repeat_interleave(HEADS // HEADS_KV, dim=2)
    assert torch.equal(out, last)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_errors_are_ordered_and_of_the_types_size(dtype: torch.dtype, precision: str) -> None:
    """R is exact, M is off by about one rounding of the type, N by more than M. For IEEE float32, M is N."""
    problem, operands = make(dtype, precision=precision)
    eps = 2.0**-11 if dtype == torch.float32 and precision == "tf32" else torch.finfo(dtype).eps
    exact = reference.oracle(problem, operands).out

    def rms(x: torch.Tensor) -> float:
        return ((x.double() - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()).item()

    model, naive = rms(reference.rounding_model(problem, operands).out), rms(reference.naive(problem, operands))
    assert eps / 16 < model < eps
    assert model <= naive < 16 * eps
    assert (model == naive) == (dtype == torch.float32 and precision == "ieee")


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradient_errors_are_of_the_types_size(dtype: torch.dtype, precision: str) -> None:
    problem, operands = make(dtype, precision=precision, **FEATURES["everything"] | {"bias_dtype": "float32"})
    eps = 2.0**-11 if dtype == torch.float32 and precision == "tf32" else torch.finfo(dtype).eps
    shape, generator = (BATCH, SEQLEN_Q, HEADS, HEAD_DIM_V), torch.Generator().manual_seed(1)
    dout = torch.randn(shape, generator=generator).to(dtype)
    exact = reference.oracle_gradients(problem, operands, dout)
    for gradients_of in (reference.rounding_model_gradients, reference.naive_gradients):
        for grad, expected in zip(gradients_of(problem, operands, dout), exact, strict=True):
            assert grad is not None and expected is not None
            error = (grad.double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
            assert eps / 64 < error.item() < 16 * eps


def test_tf32_rounding_is_to_the_nearest_ten_bit_mantissa() -> None:
    one = torch.tensor(1.0)
    step = 2.0**-10
    assert reference.round_to_tf32(one + step) == 1 + step
    assert reference.round_to_tf32(one + 0.49 * step) == 1
    assert reference.round_to_tf32(one + 0.51 * step) == 1 + step
    assert reference.round_to_tf32(one + 0.5 * step) == 1, "a tie goes to the even mantissa"
    assert reference.round_to_tf32(-(one + 1.5 * step)) == -(1 + 2 * step)
    assert reference.round_to_tf32(torch.zeros(3)).eq(0).all()


def test_no_reference_uses_tf32() -> None:
    a, b = torch.randn(2, 17, 33), torch.randn(2, 33, 5)
    torch.set_float32_matmul_precision("high")
    try:
        assert torch.equal(reference._product(a, b), (a.double() @ b.double()).float())
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def differentiable(operands: Operands) -> dict[str, torch.Tensor]:
    fields = ("q", "k", "v", "bias", "alibi_slopes", "sinks")
    return {n: getattr(operands, n).clone().requires_grad_() for n in fields if getattr(operands, n) is not None}
