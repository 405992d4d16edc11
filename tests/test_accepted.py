"""What torch's own attention accepts and the calls accept too: negative scales, broadcast batches, float64, no softcap,
sinks in the dtype of q."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpwave

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def qkv(dtype: torch.dtype = torch.float32, batch: int = 2) -> Three:
    torch.manual_seed(0)
    q, k, v = torch.randn(batch, 9, 4, 16), torch.randn(batch, 12, 2, 16), torch.randn(batch, 12, 2, 8)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).transpose(1, 2)


def offsets(*ends: int) -> torch.Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32)


@pytest.mark.parametrize("kernel", ["auto", "eager", "flash_fwd"])
def test_a_negative_scale_negates_the_scores(kernel: str) -> None:
    q, k, v = qkv()
    mine = warpwave.attention(q, k, v, softmax_scale=-0.3, kernel=kernel)
    torch.testing.assert_close(mine, by_torch(q, k, v, scale=-0.3))
    assert torch.equal(mine, warpwave.attention(-q, k, v, softmax_scale=0.3, kernel=kernel))
    again = warpwave.attention(q, k, v, softmax_scale=-0.3, kernel=kernel)  # by the plan of the first call
    assert torch.equal(mine, again)


def test_a_negative_scale_has_gradients() -> None:
    q, k, v = (t.requires_grad_() for t in qkv(torch.float64))
    dout = torch.randn(2, 9, 4, 8, dtype=torch.float64)
    mine = torch.autograd.grad(warpwave.attention(q, k, v, softmax_scale=-0.3), (q, k, v), dout)
    torchs = torch.autograd.grad(by_torch(q, k, v, scale=-0.3), (q, k, v), dout)
    torch.testing.assert_close(mine, torchs)


def test_a_negative_scale_of_packed_and_cached_calls() -> None:
    q, k, v = qkv(batch=1)
    expected = warpwave.attention(-q, k, v, softmax_scale=0.3, causal=True)
    packed = warpwave.attention_varlen(
        q[0], k[0], v[0], cu_seqlens_q=offsets(9), cu_seqlens_k=offsets(12), max_seqlen_q=9, max_seqlen_k=12,
        softmax_scale=-0.3, causal=True,
    )  # fmt: skip
    torch.testing.assert_close(packed, expected[0])
    layer = warpwave.CacheLayer(k, v, offsets()[None], torch.tensor([12], dtype=torch.int32))
    cached = warpwave.attention_with_kv_cache(q, layer, softmax_scale=-0.3, causal=True)
    torch.testing.assert_close(cached, expected)


@pytest.mark.parametrize("kernel", ["auto", "eager", "flash_fwd"])
@pytest.mark.parametrize("shared", ["q", "k and v"])
def test_a_batch_may_be_broadcast(shared: str, kernel: str) -> None:
    q, k, v = qkv()
    if shared == "q":
        q = q[:1].expand_as(q)
    else:
        k, v = k[:1].expand_as(k), v[:1].expand_as(v)
    mine = warpwave.attention(q, k, v, causal=warpwave.Causal("top_left"), kernel=kernel)
    torch.testing.assert_close(mine, by_torch(q, k, v, is_causal=True))


@pytest.mark.parametrize("seqlens", [(9, 12), (1, 12), (9, 1)], ids=str)
def test_padding_may_be_expanded(seqlens: tuple[int, int]) -> None:
    """As transformers expands it: the kernels read it as one row of keys, or as one column of queries."""
    seqlen_q, seqlen_k = seqlens
    q, k, v = (t[:, :n] for t, n in zip(qkv(), (seqlen_q, seqlen_k, seqlen_k), strict=True))
    for small in ((2, 1, 1, seqlen_k), (2, 1, seqlen_q, 1), (1, 4, 1, 1)):
        mask = torch.rand(small) < 0.7
        expanded = mask.expand(2, 4, seqlen_q, seqlen_k)
        problem = warpwave.explain(q, k, v, mask=expanded).problem
        assert problem.mask_shape == small
        mine = warpwave.attention(q, k, v, mask=expanded)
        assert torch.equal(mine, warpwave.attention(q, k, v, mask=expanded.contiguous()))


def test_an_expanded_mask_of_another_shape_is_refused_by_its_shape() -> None:
    q, k, v = qkv()
    for shape in ((2, 4, 8, 12), (3, 4, 9, 12), (2, 3, 9, 12), (2, 4, 9, 13), (9, 12)):
        mask = torch.ones(1, dtype=torch.bool).expand(shape)
        with pytest.raises(warpwave.InvalidInput, match=f"mask has shape {re.escape(str(shape))}"):
            warpwave.attention(q, k, v, mask=mask)


def test_masks_of_other_layouts_are_refused_by_name() -> None:
    q, k, v = qkv()
    mask = torch.ones(2, 1, 9, 12, dtype=torch.bool)
    nested = torch.nested.nested_tensor([torch.ones(4, 9, 12), torch.ones(4, 5, 12)]).bool()
    for other, name in ((mask.to_sparse(), "sparse"), (nested, "nested"), (mask.float().to_mkldnn(), "mkldnn")):
        with pytest.raises(warpwave.InvalidType, match=f"mask is a .*{name}"):
            warpwave.attention(q, k, v, mask=other)
    nested_q = torch.nested.nested_tensor([torch.ones(9, 4, 16), torch.ones(5, 4, 16)])
    with pytest.raises(warpwave.InvalidType, match="q is a nested"):
        warpwave.attention(nested_q, k, v, mask=mask[:, :, :1].expand(2, 1, 9, 12))


def test_float64_is_computed_in_float64() -> None:
    q, k, v = qkv(torch.float64)
    out, lse = warpwave.attention(q, k, v, return_lse=True)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, by_torch(q, k, v), rtol=1e-13, atol=1e-13)
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 4
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-13, atol=1e-13)


def test_float64_passes_gradcheck() -> None:
    q, k, v = torch.randn(3, 1, 5, 2, 4, dtype=torch.float64)
    sinks, bias = torch.randn(2, dtype=torch.float64), torch.randn(1, 2, 5, 5, dtype=torch.float64)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, bias: torch.Tensor) -> Any:
        return warpwave.attention(q, k, v, causal=True, softcap=3.0, sinks=sinks, bias=bias, return_lse=True)

    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in (q, k, v, sinks, bias)])


def test_float64_of_packed_and_empty_calls() -> None:
    q, k, v = qkv(torch.float64, batch=1)
    out, lse = warpwave.attention_varlen(
        q[0], k[0], v[0], cu_seqlens_q=offsets(4, 9), cu_seqlens_k=offsets(0, 12), max_seqlen_q=5, max_seqlen_k=12,
        return_lse=True,
    )  # fmt: skip
    torch.testing.assert_close(out[4:], by_torch(q[:, 4:], k, v)[0], rtol=1e-13, atol=1e-13)
    assert out.dtype == lse.dtype == torch.float64 and not out[:4].any()
    assert warpwave.attention(q, k[:, :0], v[:, :0], return_lse=True)[1].dtype == torch.float64


@pytest.mark.parametrize("kernel", ["split_kv", "flash_fwd", "torch_sdpa", "naive"])
def test_no_other_kernel_takes_float64(kernel: str) -> None:
    with pytest.raises(warpwave.UnsupportedProblem, match="eager alone"):
        warpwave.attention(*qkv(torch.float64), kernel=kernel)


def test_a_cache_holds_no_float64() -> None:
    q, k, v = qkv(torch.float64, batch=1)
    layer = warpwave.CacheLayer(k, v, offsets()[None], torch.tensor([12], dtype=torch.int32))
    with pytest.raises(warpwave.InvalidType, match="float64"):
        warpwave.attention_with_kv_cache(q, layer)


def test_float64_is_explained() -> None:
    said = warpwave.explain(*qkv(torch.float64))
    assert said.kernel == "eager" and said.reasons["flash_fwd"] == ["dtype is float64, which eager alone computes"]


def test_softcap_none_is_no_softcap() -> None:
    q, k, v = qkv()
    assert torch.equal(warpwave.attention(q, k, v, softcap=None), warpwave.attention(q, k, v))
    assert warpwave.explain(q, k, v, softcap=None).problem.softcap == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sinks_may_have_the_dtype_of_q(dtype: torch.dtype) -> None:
    q, k, v = (t.requires_grad_() for t in qkv(dtype))
    sinks = torch.randn(4).to(dtype).requires_grad_()
    mine = warpwave.attention(q, k, v, sinks=sinks)
    assert torch.equal(mine, warpwave.attention(q, k, v, sinks=sinks.float()))
    (gradient,) = torch.autograd.grad(mine.float().sum(), sinks)
    assert gradient.dtype == dtype and gradient.any()


def test_compiled_calls_accept_the_same() -> None:
    q, k, v = qkv(torch.bfloat16)
    sinks = torch.randn(4, dtype=torch.bfloat16)

    def call(q: torch.Tensor) -> Any:
        return warpwave.attention(q, k, v, sinks=sinks, softmax_scale=-0.3, softcap=None)

    assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(q), call(q))
