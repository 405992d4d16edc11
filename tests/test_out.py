"""`out=`: a call stores to the caller's tensor what it would have returned, to the bit, and refuses one that it cannot
store to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.library import opcheck

import warpwave
from tests.conformance.harness import DEVICE, ON_GPU
from tests.recalls import recalled
from tests.test_ops import CASES
from warpwave import CacheLayer, InvalidInput, InvalidType, PagedKVCache, Rotary, UnsupportedProblem, plans
from warpwave.runtime import triton_or_stub
from warpwave.workbench.bench.peers.peer import OperatorNames

__all__ = ["recalled"]  # fixture

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
INTERPRETED = triton_or_stub.NO_TRITON is None
ANYWHERE = ["auto", "eager", *(() if ON_GPU else ("torch_sdpa",))]
PORTABLE = ["split_kv", "flash_fwd", "large_head_dim", "three_kernel", "tiled", "naive"] if INTERPRETED else []
each_kernel = pytest.mark.parametrize("reader", [*ANYWHERE, *PORTABLE])
each_reader = pytest.mark.parametrize(
    "reader", ["eager", *(k for k in PORTABLE if k in ("split_kv", "large_head_dim"))]
)


def qkv(batch: int = 2, seqlen: int = 5, heads: int = 2, dtype: torch.dtype = torch.float16) -> Three:
    torch.manual_seed(seqlen)
    q, k, v = torch.randn(3, batch, seqlen, heads, 16, device=DEVICE).to(dtype)
    return q, k, v


def blank(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def offsets(*ends: int) -> torch.Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32, device=DEVICE)


# Where it may lie: a dense out of (2, 5, 2, 16), and what lies beside it.
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: blank(2, 5, 2, 16),
    "heads first": lambda: blank(2, 2, 5, 16).transpose(1, 2),
    "columns of wider rows": lambda: blank(2, 5, 4, 24)[:, :, 1:3, 4:20],
    "every other column": lambda: blank(2, 5, 2, 32)[..., ::2],
    "off alignment": lambda: blank(2 * 5 * 2 * 16 + 1)[1:].view(2, 5, 2, 16),
}


def beside(out: torch.Tensor) -> torch.Tensor:
    """Returns the elements of out's storage that do not belong to out."""
    whole = out.new_empty(0).set_(out.untyped_storage())
    mine = torch.zeros_like(whole, dtype=torch.bool)
    mine.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(True)
    return whole[~mine]


# What it stores -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@each_kernel
def test_dense_calls_store_to_any_layout(reader: str, layout: str) -> None:
    q, k, v = qkv()
    expected = warpwave.attention(q, k, v, causal=True, kernel=reader)
    for _ in range(2):  # the second call is recalled
        out = LAYOUTS[layout]()
        assert warpwave.attention(q, k, v, causal=True, kernel=reader, out=out) is out
        assert torch.equal(out, expected)
        assert beside(out).isnan().all()


@each_kernel
def test_packed_calls_store_rows_of_a_longer_buffer(reader: str) -> None:
    q, k, v = (t.flatten(0, 1) for t in qkv())
    lengths: dict[str, Any] = {
        "cu_seqlens_q": offsets(3, 10), "cu_seqlens_k": offsets(3, 10), "max_seqlen_q": 7, "max_seqlen_k": 7,
        "kernel": reader,
    }  # fmt: skip
    expected = warpwave.attention_varlen(q, k, v, **lengths)
    whole = blank(16, 2, 16)
    out = whole[4:14]
    assert warpwave.attention_varlen(q, k, v, **lengths, out=out) is out
    assert torch.equal(out, expected)
    assert beside(out).isnan().all()


@each_reader
def test_cached_calls_store_and_append(reader: str) -> None:
    q, k, v = qkv(batch=2, seqlen=3)
    rotary = Rotary.of(16, 32, device=DEVICE)
    made = {}
    for given in (False, True):
        cache = PagedKVCache(
            num_pages=8, page_size=4, num_heads_kv=2, head_dim=16, max_batch=2, max_seqlen=16, dtype=torch.float16,
            device=DEVICE,
        )  # fmt: skip
        rows = [cache.add(), cache.add()]
        out = blank(2, 3, 4, 16)[:, :, ::2] if given else None
        warpwave.attention_with_kv_cache(
            q, cache, rows=rows, k_new=k, v_new=v, rotary=rotary, causal=True, kernel=reader, out=out
        )
        for _ in range(2):
            result = warpwave.attention_with_kv_cache(q, cache, rows=rows, causal=True, kernel=reader, out=out)
        assert not given or result is out
        made[given] = result.clone()
    assert torch.equal(made[True], made[False])


def test_lse_comes_beside_out_and_nothing_to_see_is_zero() -> None:
    q, k, v = qkv()
    out = blank(2, 5, 2, 16)
    expected = warpwave.attention(q, k, v, return_lse=True)
    found, lse = warpwave.attention(q, k, v, return_lse=True, out=out)
    assert found is out
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    warpwave.attention(q, k[:, :0], v[:, :0], out=out)
    assert not out.any()


@pytest.mark.parametrize("seed", [None, (3, 4)])
def test_dropout_stores_to_out(seed: Any) -> None:
    q, k, v = qkv(dtype=torch.float32)
    out = blank(2, 5, 2, 16, dtype=torch.float32)
    options: dict[str, Any] = {
        "dropout_p": 0.4,
        "dropout_seed": None if seed is None else torch.tensor(seed, device=DEVICE),
    }
    torch.manual_seed(0)
    expected = warpwave.attention(q, k, v, **options)
    torch.manual_seed(0)
    assert torch.equal(warpwave.attention(q, k, v, **options, out=out), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reader", ["eager", *(k for k in PORTABLE if k in ("flash_fwd", "split_kv"))])
def test_only_layouts_that_a_kernel_cannot_store_to_are_copied(
    reader: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[torch.Tensor] = []
    copy = torch.Tensor.copy_

    def counted(into: torch.Tensor, *given: Any) -> torch.Tensor:
        copies.append(into)
        return copy(into, *given)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    out = LAYOUTS[layout]()
    warpwave.attention(*qkv(), kernel=reader, out=out)
    in_place = ["contiguous"]
    if reader != "split_kv":
        in_place += ["heads first", "columns of wider rows", "off alignment"]
    assert any(into is out for into in copies) == (layout not in in_place)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "heads first"])
@pytest.mark.parametrize("head_dim", [64, 128, 320])
def test_a_cuda_graph_stores_to_out(head_dim: int, layout: str) -> None:
    """By whichever kernel `auto` takes: Hopper's store to a contiguous out, and copy to others."""
    q, k, v = torch.randn(3, 2, 160, 4, head_dim, device=DEVICE).to(torch.bfloat16)
    out = torch.full_like(q, torch.nan)
    if layout == "heads first":
        out = torch.full((2, 4, 160, head_dim), torch.nan, device=DEVICE, dtype=q.dtype).transpose(1, 2)
    warpwave.attention(q, k, v, causal=True, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        warpwave.attention(q, k, v, causal=True, out=out)
    q.neg_()
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, warpwave.attention(q, k, v, causal=True))


# Plans ----------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(plans.tensor_guards() is None, reason="this torch has no guard that tells layouts apart")
def test_calls_with_out_are_recalled_apart_from_others(recalled: list[bool]) -> None:
    q, k, v = qkv()
    out = blank(2, 5, 2, 16)
    warpwave.attention(q, k, v)
    warpwave.attention(q, k, v, out=out)  # another class
    warpwave.attention(q, k, v, out=out.clone())
    warpwave.attention(q, k, v)
    assert recalled == [False, False, True, True]
    recalled.clear()
    longer = qkv(seqlen=9)
    out = blank(2, 9, 2, 16)
    assert torch.equal(warpwave.attention(*longer, out=out), warpwave.attention(*longer))  # a new length of both
    assert recalled == [True, True]
    recalled.clear()
    wide = blank(2, 2, 9, 16).transpose(1, 2)
    assert torch.equal(warpwave.attention(*longer, out=wide), out)
    assert recalled == [False]
    for wrong in (blank(2, 8, 2, 16), blank(3, 9, 2, 16)):  # by the plan of a class, as without one
        with pytest.raises(InvalidInput, match="out has shape"):
            warpwave.attention(*longer, out=wrong)


def test_a_plan_does_not_keep_the_memory_of_out() -> None:
    q, k, v = qkv(dtype=torch.float32)
    for kernel in ("eager", *(("large_head_dim",) if INTERPRETED else ())):
        out = blank(2, 5, 2, 16, dtype=torch.float32)
        warpwave.attention(q, k, v, kernel=kernel, out=out)
        gone = weakref.ref(out)
        del out
        assert gone() is None


def test_autograd_notices_the_write() -> None:
    q, k, v = qkv(dtype=torch.float32)
    x = blank(2, 5, 2, 16, dtype=torch.float32)
    w = torch.ones_like(x, requires_grad=True)
    product = (w * x).sum()
    warpwave.attention(q, k, v, out=x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        warpwave.attention(q, k, v, out=torch.empty_like(x))


# What is refused ------------------------------------------------------------------------------------------------------


def refused() -> dict[str, tuple[Callable[[Three], Any], type[Exception], str]]:
    return {
        "a list": (lambda t: [1.0], InvalidType, "out is a list"),
        "a shape": (lambda t: blank(2, 5, 2, 8), InvalidInput, r"out has shape \(2, 5, 2, 8\); it must have"),
        "a dtype": (lambda t: blank(2, 5, 2, 16, dtype=torch.float32), InvalidType, "out is torch.float32"),
        "a device": (lambda t: torch.empty(2, 5, 2, 16, device="meta").half(), InvalidInput, "out is on meta"),
        "an expanded one": (lambda t: blank(2, 1, 2, 16).expand(2, 5, 2, 16), InvalidInput, "share memory"),
        "windows": (lambda t: blank(99).as_strided((2, 5, 2, 16), (1, 2, 8, 1)), InvalidInput, "share memory"),
        "q itself": (lambda t: t[0], InvalidInput, "out shares memory with q"),
        "v itself": (lambda t: t[2], InvalidInput, "out shares memory with v"),
        "a sparse one": (lambda t: blank(2, 5, 2, 16).to_sparse(), InvalidType, "out is a nested, sparse"),
        "a leaf": (lambda t: blank(2, 5, 2, 16).requires_grad_(), UnsupportedProblem, "requires a gradient"),
    }


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("what", refused())
def test_what_cannot_receive_the_output_is_refused(what: str, known: bool) -> None:
    made, error, words = refused()[what]
    tensors = qkv()
    if known:
        for _ in range(2):
            warpwave.attention(*tensors, out=blank(2, 5, 2, 16))
    before = [t.clone() for t in tensors]
    with pytest.raises(error, match=words):
        warpwave.attention(*tensors, out=made(tensors))
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


def test_the_dtype_that_a_call_under_autocast_returns_is_named() -> None:
    """It is not the dtype of the caller's q."""
    q, k, v = qkv(dtype=torch.float32)
    message = "out is torch.float32; out must have torch.bfloat16"
    with torch.autocast(DEVICE.type, torch.bfloat16), pytest.raises(InvalidType, match=message):
        warpwave.attention(q, k.half(), v, out=torch.empty_like(q))


def test_arguments_with_gradients_are_refused() -> None:
    q, k, v = qkv()
    q.requires_grad_()
    out = blank(2, 5, 2, 16)
    with pytest.raises(RuntimeError, match="an argument requires a gradient"):  # as torch's functions raise
        warpwave.attention(q, k, v, out=out)
    with torch.no_grad():
        warpwave.attention(q, k, v, out=out)
    with pytest.raises(UnsupportedProblem, match="a transform of torch"):
        torch.func.vmap(lambda q: warpwave.attention(q, k, v, out=out))(q.detach()[None])
    pool = torch.randn(4, 4, 2, 16, device=DEVICE).half()
    layer = CacheLayer(pool, pool.clone(), offsets(1)[None], offsets()[:1] + 5)
    lengths = layer.seqused_k.clone()
    with pytest.raises(UnsupportedProblem, match="requires a gradient"):
        warpwave.attention_with_kv_cache(q[:1], layer, k_new=k[:1], v_new=v[:1], out=out[:1])
    assert torch.equal(layer.seqused_k, lengths) and torch.equal(layer.k, pool)


@pytest.mark.parametrize("reader", ["eager", *(("flash_fwd",) if INTERPRETED else ())])
def test_an_out_of_inference_mode_is_refused_outside_of_it(reader: str) -> None:
    """torch refuses the writes of its own functions. A kernel that writes by the address would not notice."""
    q, k, v = qkv()
    with torch.inference_mode():
        out = torch.zeros_like(q)
        warpwave.attention(q, k, v, kernel=reader, out=out)
        out.zero_()
    with pytest.raises(InvalidInput, match="out was made in inference mode"):
        warpwave.attention(q, k, v, kernel=reader, out=out)
    assert not out.any()


def test_new_tokens_are_checked_before_their_memory() -> None:
    q, k, v = qkv(batch=1)
    pool = torch.randn(4, 4, 2, 16, device=DEVICE).half()
    layer = CacheLayer(pool, pool.clone(), offsets(1, 2)[1:][None], offsets()[:1] + 5)
    rows: tuple[tuple[Any, str], ...] = (
        ([1.0], "k_new is a list"),
        (k.to_sparse(), "k_new is no plain strided tensor"),
    )
    for wrong, words in rows:
        for _ in range(2):  # the second call finds a plan
            with pytest.raises(InvalidType, match=words):
                warpwave.attention_with_kv_cache(q, layer, k_new=wrong, v_new=v, out=torch.empty_like(q))
            warpwave.attention_with_kv_cache(q, layer, out=torch.empty_like(q))
    assert torch.equal(layer.k, pool)


def test_memory_of_new_tokens_is_refused_before_they_are_written() -> None:
    q, k, v = qkv(batch=1)
    pool = torch.randn(4, 4, 2, 16, device=DEVICE).half()
    layer = CacheLayer(pool, pool.clone(), offsets(1)[None], offsets()[:1] + 5)
    for name, out in (("k_new", k), ("v_new", v), ("q", q)):
        with pytest.raises(InvalidInput, match=f"out shares memory with {name}"):
            warpwave.attention_with_kv_cache(q, layer, k_new=k, v_new=v, out=out)
    with pytest.raises(InvalidInput, match="out shares memory with k"):
        warpwave.attention_with_kv_cache(q[:, :4], layer, out=layer.k[1:2])
    assert torch.equal(layer.k, pool)


def test_parts_of_one_buffer_are_apart_where_they_share_no_element() -> None:
    """An engine keeps q, k, v and the output in one projection's rows."""
    rows = torch.randn(2, 5, 4, 2, 16, device=DEVICE)
    q, k, v, out = rows.unbind(2)
    expected = warpwave.attention(q, k, v)
    assert torch.equal(warpwave.attention(q, k, v, out=out), expected)
    for shift in (0, 1, 31):
        crossed = rows.flatten(2)[..., 32 - shift : 64 - shift].unflatten(2, (2, 16))
        with pytest.raises(InvalidInput, match=f"out shares memory with {'q' if shift else 'k'}"):
            warpwave.attention(q, k, v, out=crossed)
    halves = torch.randn(4, 5, 2, 16, device=DEVICE)
    warpwave.attention(halves[:2], halves[:2], halves[:2], out=halves[2:])
    for begin in (0, 1):
        with pytest.raises(InvalidInput, match="out shares memory with q"):
            warpwave.attention(halves[:2], halves[:2], halves[:2], out=halves[begin : begin + 2])


def test_operators_refuse_an_out_with_a_gradient() -> None:
    """An operator's plan does not depend on which tensors require a gradient: its options say whether one does."""
    q, k, v = qkv()
    with OperatorNames():
        warpwave.attention(q, k, v, out=torch.empty_like(q))
    out = torch.zeros_like(q).requires_grad_()
    with OperatorNames(), pytest.raises(UnsupportedProblem, match="an argument requires a gradient"):
        warpwave.attention(q, k, v, out=out)
    assert not out.any()
    with OperatorNames(), torch.no_grad():
        warpwave.attention(q, k, v, out=out)
    assert torch.equal(out, warpwave.attention(q, k, v))


# Behind torch's compiler ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_graph_stores_to_out(dynamic: bool) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        _, lse = warpwave.attention(q + 1, k, v, causal=True, return_lse=True, out=out)
        return out.sum() + lse.sum()

    for seqlen in (5, 9):
        q, k, v = qkv(seqlen=seqlen, dtype=torch.float32)
        out = blank(2, seqlen, 2, 16, dtype=torch.float32)
        found = step(q, k, v, out)
        expected, lse = warpwave.attention(q + 1, k, v, causal=True, return_lse=True)
        assert torch.equal(out, expected)
        torch.testing.assert_close(found, expected.sum() + lse.sum())


def test_a_compiled_graph_stores_packed_results_to_a_slice() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, whole: torch.Tensor) -> None:
        warpwave.attention_varlen(
            q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=7, max_seqlen_k=7, out=whole[2:12]
        )

    q, k, v = (t.flatten(0, 1) for t in qkv(dtype=torch.float32))
    ends, whole = offsets(3, 10), blank(14, 2, 16, dtype=torch.float32)
    step(q, k, v, ends, whole)
    expected = warpwave.attention_varlen(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=7, max_seqlen_k=7)
    assert torch.equal(whole[2:12], expected)
    assert whole[:2].isnan().all() and whole[12:].isnan().all()


def test_a_compiled_graph_refuses_gradients() -> None:
    q, k, v = qkv(dtype=torch.float32)
    step = torch.compile(warpwave.attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="requires a gradient"):
        step(q.requires_grad_(), k, v, out=torch.empty_like(q))


@pytest.mark.parametrize("case", ["plain", "with lse", "packed", "everything"])
def test_opcheck(case: str) -> None:
    arguments = CASES[case]()
    out = torch.empty_like(arguments[0], memory_format=torch.contiguous_format)
    results = opcheck(torch.ops.warpwave.attention_out.default, (*arguments, out))
    assert set(results.values()) == {"SUCCESS"}, results
