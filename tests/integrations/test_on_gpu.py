"""What only a GPU can show of the integrations: torch's grid in 16 bits, SDPA's flash backend, caches read by GPU
kernels, and models of transformers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import warpwave
from tests.integrations.families import FAMILIES, inputs_of, make, output
from tests.integrations.test_flash_attn_caches import KV_CACHES, check_kvcache
from tests.integrations.test_pytorch import MASKS, SHAPES, TORCHS, mine_of
from warpwave.integrations import pytorch
from warpwave.integrations import transformers as door
from warpwave.integrations.flash_attn import flash_attn_with_kvcache

pytestmark = pytest.mark.gpu
WIDER = 2.0  # the most error against float64, in units of the error of torch's own function, and a rounding


def errors(found: Any, exact: Any) -> list[float]:
    """Returns the RMS errors of tensors."""
    return [float((a.detach().double() - b.detach()).square().mean().sqrt()) for a, b in zip(found, exact, strict=True)]


def assert_no_worse(mine: Any, torchs: Any, exact: Any, least: float = 0.0) -> None:
    """Compares out and gradients with float64, and with what torch's own errors are. Values count as `least` at least,
    where they are 0 by cancellation."""
    for ours, theirs, values in zip(errors(mine, exact), errors(torchs, exact), exact, strict=True):
        size = max(least, float(values.detach().square().mean().sqrt()))
        assert ours <= WIDER * theirs + torch.finfo(mine[0].dtype).eps * size, (ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_torchs_grid(name: str, dtype: torch.dtype) -> None:
    *_, queries, _ = SHAPES[name][0]
    keys = SHAPES[name][1][-2]
    for mask, is_causal in itertools.product(MASKS, (False, True)):
        if is_causal and mask != "none":
            continue
        torch.manual_seed(2)
        given: Any = [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in SHAPES[name]]
        made = MASKS[mask](queries, keys)
        made = None if made is None else made.cuda().to(torch.bool if made.dtype == torch.bool else dtype)
        wide = [t.detach().double().requires_grad_() for t in given]
        wide_mask = made if made is None or made.dtype == torch.bool else made.double()
        exact = TORCHS(*(*wide, wide_mask, 0.0, is_causal))
        dout = torch.randn_like(exact)
        outs = [mine_of(given, made, 0.0, is_causal), TORCHS(*(*given, made, 0.0, is_causal))]
        mine, torchs = [(out, *torch.autograd.grad(out, given, dout.to(dtype))) for out in outs]
        assert_no_worse(mine, torchs, (exact, *torch.autograd.grad(exact, wide, dout)))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpas_flash_backend(head_dim: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = torch.nn.attention
    if not hasattr(attention, "restore_flash_attention_impl"):
        pytest.skip("torch 2.10 cannot restore its flash backend")
    calls: list[Any] = []
    call = pytorch.attention

    def counted(*tensors: Any, **said: Any) -> Any:
        calls.append(said)
        return call(*tensors, **said)

    monkeypatch.setattr(pytorch, "attention", counted)
    # (batch, heads, seqlen, head_dim) in memory ordered by token, as models have it, and by head.
    for by_head in (False, True):
        shape = (2, 8, 300, head_dim) if by_head else (2, 300, 8, head_dim)
        given: Any = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        given = [(t if by_head else t.transpose(1, 2)).requires_grad_() for t in given]
        wide = [t.detach().double().requires_grad_() for t in given]
        exact = F.scaled_dot_product_attention(*(*wide, None, 0.0, is_causal))
        dout = torch.randn_like(exact)

        def run(given: Any = given, dout: Any = dout) -> Any:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = F.scaled_dot_product_attention(*(*given, None, 0.0, is_causal))
                return out, *torch.autograd.grad(out, given, dout.to(out.dtype))

        before = run()
        assert not calls
        pytorch.register()
        attention.activate_flash_attention_impl("warpwave")
        try:
            mine = run()
            compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal))
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.no_grad():
                torch.testing.assert_close(compiled(*given), mine[0])
            assert calls
        finally:
            attention.restore_flash_attention_impl()
        assert_no_worse(mine, before, (exact, *torch.autograd.grad(exact, wide, dout)))
        calls.clear()
        assert torch.equal(run()[0], before[0]) and not calls


@pytest.mark.parametrize("compiled", [False, True])
def test_sdpas_flash_backend_with_dropout(compiled: bool) -> None:
    """torch keeps warpwave's seed between forward and backward, also in a compiled graph."""
    attention = torch.nn.attention
    if not hasattr(attention, "restore_flash_attention_impl"):
        pytest.skip("torch 2.10 cannot restore its flash backend")
    given = [torch.randn(2, 8, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    dout = torch.randn_like(given[0])

    def through_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)

    def direct(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        tokens = (t.transpose(1, 2) for t in (q, k, v))
        out: torch.Tensor = warpwave.attention(*tokens, causal=True, dropout_p=0.2)
        return out.transpose(1, 2)

    def run(call: Any) -> Any:
        torch.manual_seed(4)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = call(*given)
        return (out, *torch.autograd.grad(out, given, dout))

    expected = run(direct)
    pytorch.register()
    attention.activate_flash_attention_impl("warpwave")
    try:
        found = run(torch.compile(through_torch, backend="aot_eager") if compiled else through_torch)
    finally:
        attention.restore_flash_attention_impl()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", KV_CACHES)
def test_caches(name: str, dtype: torch.dtype, width: int) -> None:
    for version in ("2", "3"):
        check_kvcache(name, version, "cuda", dtype, width)


def test_a_decode_step_in_a_graph() -> None:
    """Lengths on the device, a contiguous cache: the graph sees later lengths."""
    q = torch.randn(2, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    k_cache, v_cache = torch.randn(2, 2, 512, 2, 64, device="cuda", dtype=torch.bfloat16)
    used = torch.tensor([17, 300], dtype=torch.int32, device="cuda")
    flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=used)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=used)
    for lengths in ([17, 300], [400, 1]):
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        torch.testing.assert_close(out, flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=used))


@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_transformers(name: str) -> None:
    """Each family on the GPU, against its eager attention, both in float32."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'warpwave[integrations]'")
    registration = door.register()
    try:
        model = make(name).cuda()
        inputs = {key: value.cuda() for key, value in inputs_of(name).items()}
        results, gradients = [], []
        for implementation in ("eager", "warpwave"):
            out = output(model, implementation, **inputs)
            model.zero_grad()
            out.square().mean().backward()
            results.append(out.detach())
            gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-3)
        largest = max(float(g.abs().max()) for g in gradients[0])
        for mine, eager in zip(gradients[1], gradients[0], strict=True):
            torch.testing.assert_close(mine, eager, rtol=1e-2, atol=1e-3 * largest)
    finally:
        registration.remove()


@pytest.mark.parametrize("name", ["Llama", "Gemma-2"])
def test_generation_by_compiled_decode_steps(name: str) -> None:
    """`generate` compiles the steps on a static cache, by Inductor and in CUDA graphs, where it runs on a GPU."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'warpwave[integrations]'")
    registration = door.register()
    try:
        model, ids = make(name).cuda(), inputs_of(name)["input_ids"].cuda()
        found = []
        for implementation in ("eager", "warpwave"):
            model.set_attn_implementation(implementation)
            found.append(
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False,
                    cache_implementation="static",
                )
            )  # fmt: skip
        assert torch.equal(*found)
    finally:
        registration.remove()
