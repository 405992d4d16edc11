"""`warpwave.quantize`: its launch and torch's operations agree, what it returns is undone, and bad input is refused."""

from __future__ import annotations

import gc
import math
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from warpwave import InvalidInput, InvalidType, Quantized, UnsupportedProblem, quantize
from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import quantize as quantize_module
from warpwave.kernels import quantize_tensor, reasons
from warpwave.kernels.quantize_tensor import (
    LARGEST,
    Source,
    by_torch,
    by_triton,
    has_launch,
    prepare,
    rotated,
    rotation_block,
    rotation_signs,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = tuple(LARGEST)
# What the launch is compiled for: where the factor comes from, rotation with a mean, clipping, and packing.
WAYS: list[tuple[str | int, bool, float, bool]] = [
    *(("tensor", False, 1.0, False), ("head", True, 1.0, False), (64, True, 1.0, False), (128, False, 1.0, False)),
    *((64, True, 0.99, False), (128, False, 0.9, False), ("head", True, 1.0, True), ("tensor", False, 1.0, True)),
]


def numbers(*shape: int) -> torch.Tensor:
    """Returns numbers with a channel of outliers, and one of zeros."""
    x = torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)
    x[..., 3] *= 30
    x[..., 5] = 0
    return x


def qkv(dtype: torch.dtype = torch.float32, seqlen: int = 150) -> tuple[torch.Tensor, ...]:
    return tuple(numbers(2, seqlen, heads, 48).to(dtype) for heads in (4, 2, 2))


@pytest.mark.parametrize(("granularity", "rotate", "percentile", "packed"), WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_launch_agrees_with_torch(
    dtype: torch.dtype, granularity: str | int, rotate: bool, percentile: float, packed: bool
) -> None:
    """To the bit without rotation. Rotation sums in another order, which a rounding may amplify to one step."""
    x = numbers(2, 150, 3, 48).to(torch.float16)
    x = x.transpose(1, 2).contiguous().transpose(1, 2)
    x = x[0] if packed else x
    mean = rotated(x.float().mean(-3)) if rotate else None
    offsets = torch.tensor([0, 70, 70, 150], dtype=torch.int32, device=DEVICE) if packed else None
    source = Source(x, dtype, granularity, mean, rotate, percentile, offsets, 80 if packed else 0)
    if dtype != torch.int8 and reasons.of_float8(current_gpu(x.device)):
        pytest.skip("this GPU has no float8")
    counts = [torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    counted = counts if percentile < 1 else [None, None]
    ours, factor = by_triton(source, counted[0])(x, mean, offsets, counted[0])
    expected, expected_factor = by_torch(source, counted[1])
    assert factor.shape == expected_factor.shape
    torch.testing.assert_close(factor, expected_factor, rtol=1e-6 if rotate else 0, atol=0)
    differ = ours.float() != expected.float()
    assert differ.float().mean() <= (1e-3 if rotate else 0)
    assert counts[0] == counts[1] and (counts[0] > 0) == (percentile < 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_on_a_gpu_without_it_is_rounded_by_torch(dtype: torch.dtype) -> None:
    source = Source(numbers(1, 8, 2, 16), dtype, 128, None, False, 1.0, None, 0)
    with_float8 = {arch: has_launch(source, Gpu.for_arch(arch)) for arch in ("sm_89", "sm_90", "gfx942", "gfx950")}
    without = {arch: has_launch(source, Gpu.for_arch(arch)) for arch in ("sm_80", "sm_86", "gfx90a", "gfx1100")}
    assert all(with_float8.values()) and set(without.values()) == {dtype == torch.int8}


def test_lazily_negated_tensors_and_strided_offsets_are_straightened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch reads memory as it is."""
    monkeypatch.setattr(quantize_module, "prepare", by_triton)
    q, k, v = (x[0] for x in qkv(torch.bfloat16))
    offsets = torch.tensor([[0, 9], [70, 9], [150, 9]], dtype=torch.int32, device=DEVICE)[:, 0]
    options: dict[str, Any] = {"dtype": torch.int8, "granularity": "head", "max_seqlen_q": 80, "max_seqlen_k": 80}
    straight = offsets.contiguous()
    expected = quantize(-q, -k, -v, cu_seqlens_q=straight, cu_seqlens_k=straight, **options)
    lazy = [torch._neg_view(x) for x in (q, k, v)]
    found = quantize(*lazy, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **options)
    for name in ("q", "k", "v", "q_descale", "k_descale", "v_descale"):
        ours, wanted = getattr(found, name), getattr(expected, name)
        assert ours is wanted or torch.equal(ours, wanted), name


@pytest.mark.parametrize("granularity", ["tensor", "head", 64])
def test_no_tokens_have_the_factor_of_zeros(granularity: str | int) -> None:
    source = Source(numbers(2, 0, 3, 48).half(), torch.int8, granularity, None, False, 1.0, None, 0)
    out, factor = by_triton(source, None)(source.x, None, None, None)
    assert out.shape == (2, 0, 3, 48) and torch.equal(factor, by_torch(source, None)[1])
    assert (factor == 2.0**-40).all()


@pytest.mark.parametrize("way", [by_torch, by_triton])
def test_a_layout_is_planned_once_for_any_numbers(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan keeps no tensor, and accepts nothing that the first call would not."""
    planned: list[Source] = []

    def prepared(source: Source, saturated: torch.Tensor | None) -> Any:
        planned.append(source._replace(x=torch.empty(0), mean=None, cu_seqlens=None))
        return by_triton(source, saturated) if way is by_triton else prepare(source, saturated)

    monkeypatch.setattr(quantize_module, "prepare", prepared)
    quantize_module._plans.clear()
    options: dict[str, Any] = {"dtype": torch.int8, "dtype_v": torch.int8, "granularity": 64, "smooth_k": True}
    first = qkv(torch.float16, 70)
    gone = [weakref.ref(x) for x in first]
    quantize(*first, **options)
    del first
    gc.collect()
    assert not any(ref() is not None for ref in gone)
    count = len(planned)
    other = [(3 * x).roll(1, 1) for x in qkv(torch.float16, 70)]
    again = quantize(*other, **options)
    assert len(planned) == count
    for got, x in zip(again.dequantized(), other, strict=True):
        assert (got - x).norm() < 0.06 * x.norm(), "int8 beside an outlier thirty times as large"
    for change in ({"percentile": True}, {"granularity": 64.0}):
        with pytest.raises((InvalidInput, InvalidType), match=next(iter(change))):
            quantize(*other, **{**options, **change})
    with pytest.raises(UnsupportedProblem, match="gradient"):
        quantize(other[0].requires_grad_(), *other[1:], **options)
    wide = [torch._neg_view(x.detach()[:, :, :1].expand(-1, -1, 2, -1)) for x in other]
    plain = [x.detach()[:, :, :1].expand(-1, -1, 2, -1) for x in other]
    quantize(*plain, **options)
    for got, x in zip(quantize(*wide, **options).dequantized(), plain, strict=True):
        assert (got + x).norm() < 0.06 * x.norm(), "int8 beside an outlier thirty times as large"


def test_a_factor_is_the_largest_magnitude_of_its_block() -> None:
    q, k, v = qkv()
    found = quantize(q, k, v, dtype=torch.int8, dtype_v=torch.int8, granularity=64)
    assert found.k_descale.shape == (2, 2, 3) and found.saturated.tolist() == [0, 0, 0]
    for block in range(3):
        tokens = slice(64 * block, 64 * block + 64)
        torch.testing.assert_close(found.k_descale[:, :, block], k[:, tokens].abs().amax((1, 3)) / 127)
        assert found.k[:, tokens].abs().amax((1, 3)).eq(127).all()
    heads = quantize(q, k, v, granularity="head")
    torch.testing.assert_close(heads.q_descale, q.abs().amax((1, 3)) / 448)
    assert quantize(q, k, v, granularity="tensor").v_descale is not None
    torch.testing.assert_close(quantize(q, k, v, granularity="tensor").q_descale, q.abs().amax() / 448)


@pytest.mark.parametrize("granularity", ["tensor", "head", 64, 128])
@pytest.mark.parametrize("options", [{}, {"rotate": True}, {"smooth_k": True}, {"smooth_k": True, "rotate": True}])
def test_dequantized_undoes_everything(options: dict[str, Any], granularity: str | int) -> None:
    given = qkv()
    found = quantize(*given, granularity=granularity, **options)
    for got, x in zip(found.dequantized(), given, strict=True):
        assert (got - x).norm() < 0.04 * x.norm(), "e4m3 rounds by 2.5 % in the RMS"


def test_dequantized_of_packed_tensors() -> None:
    q, k, v = (x[0] for x in qkv())
    offsets = torch.tensor([0, 70, 150], dtype=torch.int32, device=DEVICE)
    found = quantize(
        q, k, v, granularity="head", cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=80, max_seqlen_k=80,
        smooth_k=True,
    )  # fmt: skip
    assert found.q_descale.shape == (2, 4)
    for got, x in zip(found.dequantized(), (q, k, v), strict=True):
        assert (got - x).norm() < 0.04 * x.norm()


@pytest.mark.parametrize("head_dim", [2, 48, 64, 256])
def test_rotation_keeps_products_and_spreads_outliers(head_dim: int) -> None:
    block = rotation_block(head_dim)
    assert head_dim % block == 0 and block <= 128
    signs = rotation_signs(block, DEVICE)
    assert torch.equal(signs @ signs.T, block * torch.eye(block, device=DEVICE))
    x = torch.zeros(1, head_dim, device=DEVICE)
    x[0, 1] = 8.0
    torch.testing.assert_close(rotated(x)[0, :block].abs(), torch.full((block,), 8 * block**-0.5, device=DEVICE))
    torch.testing.assert_close(rotated(rotated(x), inverse=True), x)


@pytest.mark.parametrize("setting", ["autocast", "fp32_precision", "default dtype"])
def test_rotation_keeps_float32_whatever_the_process_allows(setting: str) -> None:
    """In torch's operations: a product in 16 bits would round q and k before they are quantized, and what is undone."""
    x = numbers(2, 150, 4, 48).cpu()
    exact = rotated(x.double())
    backends: Any = torch.backends
    matmul = backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16" if setting == "fp32_precision" else before
    torch.set_default_dtype(torch.float64 if setting == "default dtype" else torch.float32)
    quantize_tensor._kept_signs.cache_clear()
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=setting == "autocast"):
            found, back = rotated(x), rotated(exact.float(), inverse=True)
    finally:
        matmul.fp32_precision = before
        torch.set_default_dtype(torch.float32)
    assert found.dtype == back.dtype == torch.float32
    torch.testing.assert_close(found, exact.float())
    torch.testing.assert_close(back, x)


def test_rotation_in_a_graph_and_without_contents() -> None:
    """Tensors of a mode or of a graph must not be kept for later calls."""
    quantize_tensor._kept_signs.cache_clear()
    with FakeTensorMode():
        fake = quantize(*(torch.zeros(1, 70, 2, 32, device="cpu") for _ in range(3)), rotate=True, smooth_k=True)
    assert fake.q.shape == (1, 70, 2, 32)
    q, k, v = (x.cpu() for x in qkv())
    torch._dynamo.reset()
    compiled = torch.compile(partial(quantize, rotate=True, smooth_k=True), backend="eager", fullgraph=True)
    for found in (compiled(q, k, v), quantize(q, k, v, rotate=True, smooth_k=True)):
        for got, x in zip(found.dequantized(), (q, k, v), strict=True):
            assert (got - x).norm() < 0.04 * x.norm()


def test_clipping_counts_what_saturates() -> None:
    q, k, v = qkv()
    found = quantize(q, k, v, dtype=torch.int8, granularity=64, percentile=0.9)
    share = found.saturated[0].item() / q.numel()
    assert 0 < share <= 0.1 and found.saturated[2] == 0, "v keeps its 16 bits"
    assert (found.q.abs() == 127).sum() >= found.saturated[0]


def test_zeros_and_numbers_that_are_not_finite() -> None:
    q, k, v = qkv()
    k[0, :64] = 0
    v[1, 70, 1, 0] = math.nan
    q[0, 0, 0, 0] = math.inf
    found = quantize(q, k, v, granularity=64)
    assert found.k_descale[0, :, 0].eq(2.0**-40).all() and found.k[0, :64].float().eq(0).all()
    assert found.v_descale is not None and found.v_descale[1, 1, 1].isinf() and found.q_descale[0, 0, 0].isinf()
    assert found.q_descale.isinf().sum() == found.v_descale.isinf().sum() == 1, "of its block alone"


def test_bytes_that_are_moved() -> None:
    q, k, v = qkv(torch.float16)
    elements = q.numel() + k.numel() + v.numel()
    assert quantize(q, k, v).moved_bytes == elements * (2 + 1)
    assert quantize(q, k, v, granularity="head").moved_bytes == elements * (2 * 2 + 1)
    assert quantize(q, k, v, smooth_k=True).moved_bytes == elements * 3 + 2 * k.numel()
    kept: Quantized = quantize(q, k, v, dtype=torch.int8)
    assert kept.v.dtype == torch.float16 and kept.moved_bytes == 3 * (q.numel() + k.numel())


def packed(**changes: Any) -> dict[str, Any]:
    x = torch.ones(3, 2, 32, device=DEVICE)
    offsets = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 3, "max_seqlen_k": 3}
    return {"q": x, "k": x, "v": x, "granularity": "head", **lengths, **changes}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"dtype": torch.float16}, InvalidType, "dtype is torch.float16; it must be one of torch.float8_e4m3fn"),
        ({"dtype_v": torch.int8}, InvalidType, "dtype_v is torch.int8 and dtype is torch.float8_e4m3fn"),
        ({"granularity": 32}, InvalidInput, "granularity is 32; it must be one of 'tensor', 'head', 64, 128"),
        ({"percentile": 0.3}, InvalidInput, "percentile is 0.3; it must be above 0.5 and at most 1"),
        ({"percentile": 0.9, "granularity": "head"}, InvalidInput, "clipping needs 64 or 128"),
        ({"max_seqlen_q": 3}, InvalidInput, "packed tensors, and no others, need both"),
        ({"q": torch.zeros(2, 3, 4, 48, dtype=torch.int8)}, InvalidType, "q is torch.int8; it must be one of"),
        ({"q": torch.zeros(2, 3, 4, 32)}, InvalidInput, "q and k must share head_dim"),
        ({"q": torch.zeros(4, 48)}, InvalidInput, "q has shape"),
        ({"q": None}, InvalidType, "q is a NoneType; it must be a torch.Tensor"),
        ({"q": torch.zeros(2, 3, 4, 48).to_sparse()}, InvalidType, "q is a sparse or nested tensor"),
        ({"dtype": ["int8"]}, InvalidType, r"dtype is \['int8'\]; it must be one of torch.float8_e4m3fn"),
        ({"dtype_v": ["int8"]}, InvalidType, r"dtype_v is \['int8'\] and dtype is"),
        ({"granularity": 64.0}, InvalidInput, "granularity is 64.0; it must be one of"),
        ({"rotate": "no"}, InvalidType, "rotate is 'no'; it must be True or False"),
        ({"smooth_k": torch.ones(2)}, InvalidType, "smooth_k is tensor.*; it must be True or False"),
        ({"percentile": None}, InvalidType, "percentile is None; it must be a number"),
        ({"percentile": torch.tensor(0.9)}, InvalidType, "percentile is tensor"),
        (packed(cu_seqlens_q=[0, 3]), InvalidType, "cu_seqlens_q is a list; it must be a torch.Tensor"),
        (packed(cu_seqlens_k=torch.zeros(2).int().to("meta")), InvalidInput, "cu_seqlens_k is on meta and q on"),
        (packed(max_seqlen_q="3"), InvalidType, "max_seqlen_q is '3'; it must be an integer"),
        (packed(max_seqlen_k=True), InvalidType, "max_seqlen_k is True; it must be an integer"),
        (packed(max_seqlen_k=-1), InvalidInput, "max_seqlen_k is -1; it must be at least 0"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], text: str) -> None:
    q, k, v = qkv()
    given = {"q": q, "k": k, "v": v} | {
        n: x.to(DEVICE) if isinstance(x, torch.Tensor) and not x.is_meta else x for n, x in options.items()
    }
    with pytest.raises(error, match=text):
        quantize(**given)


def test_a_gradient_is_not_lost_silently() -> None:
    q, k, v = qkv()
    with pytest.raises(UnsupportedProblem, match="quantize has no gradients"):
        quantize(q, k, v.requires_grad_())
    with torch.no_grad():
        quantize(q, k, v)


def test_an_odd_head_dim_has_no_rotation() -> None:
    q, k, v = (torch.zeros(1, 8, 1, 15, device=DEVICE) for _ in range(3))
    with pytest.raises(InvalidInput, match="rotate is True and head_dim is 15"):
        quantize(q, k, v, rotate=True)
