"""The doors to FlashAttention 2, 3 and 4 on caches: against the definition in its documentation computed in float64,
appended tokens cell by cell, and what leaves a cache as it was."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

import warpwave
from tests.integrations.test_flash_attn import assert_close, definition, offsets, qkv
from warpwave import UnsupportedProblem
from warpwave.integrations import caches, flash_attn, flash_attn_3, flash_attn_4


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, begin: int, interleaved: bool) -> torch.Tensor:
    """(tokens, heads, head_dim) at positions from `begin` on, by complex multiplication."""
    width = 2 * cos.shape[1]
    head, rest = x[..., :width].double(), x[..., width:].double()
    pairs = head.unflatten(-1, (-1, 2)) if interleaved else torch.stack(head.chunk(2, -1), -1)
    turns = torch.complex(cos.double(), sin.double())[begin : begin + len(x), None]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
    head = turned.flatten(-2) if interleaved else torch.cat(turned.unbind(-1), -1)
    return torch.cat([head, rest], -1)


KV_CACHES: dict[str, dict[str, Any]] = {
    "one length": {"before": 5},
    "all of it": {"before": None, "new": 0},
    "lengths": {},
    "no new tokens": {"new": 0},
    "more new tokens than queries": {"new": 4, "queries": 2},
    "fewer new tokens than queries": {"new": 1, "queries": 3},
    "rows": {"rows": [3, 0]},
    "left padding": {"leftpad": [2, 0]},
    "left padding, no new tokens": {"leftpad": [1, 4], "new": 0, "window": (3, 0)},
    "pages": {"pages": True},
    "odd length": {"length": 23},
    "by head": {"by_head": True},
    "a window": {"window": (4, 0)},
    "a window to both sides": {"window": (4, 2), "causal": False, "new": 0},
    "softcap and ALiBi": {"softcap": 3.0, "slopes": True},
    "no mask": {"causal": False},
    "rotation": {"rotary": "interleaved"},
    "rotation by halves": {"rotary": "halves", "queries": 1, "new": 1, "causal": False},
    "rotation in a window": {"rotary": "halves", "window": (5, -1), "causal": False, "pages": True},
}


def check_kvcache(
    name: str, version: str, device: str = "cpu", dtype: torch.dtype = torch.float32, width: int = 16
) -> None:
    """Compares a call on a cache with its definition: out, lse, and what is written."""
    case: dict[str, Any] = {"new": 2, "queries": 2, "length": 24, "window": (-1, -1), "causal": True, "softcap": 0.0}
    case |= KV_CACHES[name]
    torch.manual_seed(3)
    batch, rows, length, new = 2, 4, case["length"], case["new"]
    before = (
        [length, length] if "before" in case and case["before"] is None else [5, 5] if "before" in case else [7, 12]
    )
    q = torch.randn(batch, case["queries"], 4, width).to(dtype)
    k_new, v_new = torch.randn(2, batch, new, 2, width).to(dtype) if new else (None, None)
    table = None
    if case.get("pages"):
        k_cache, v_cache = torch.randn(2, 13, 4, 2, width).to(dtype)
        table = torch.randperm(13)[:12].view(2, 6).int()
    elif case.get("by_head"):
        k_cache, v_cache = torch.randn(2, rows, 2, length, width).to(dtype).transpose(2, 3)
    else:
        k_cache, v_cache = torch.randn(2, rows, length, 2, width).to(dtype)
    at = case.get("rows", [0, 1])
    pad = case.get("leftpad", [0, 0])
    said: dict[str, Any] = {"causal": case["causal"], "window_size": case["window"], "softcap": case["softcap"]}
    if "before" in case:
        said["cache_seqlens"] = case["before"]
    else:
        said["cache_seqlens"] = torch.tensor(before, dtype=torch.int32)
    if "rows" in case:
        said["cache_batch_idx"] = torch.tensor(at, dtype=torch.int32)
    if "leftpad" in case:
        said["cache_leftpad"] = torch.tensor(pad, dtype=torch.int32)
    slopes = torch.rand(4) if case.get("slopes") else None
    if version == "2" and slopes is not None:
        said["alibi_slopes"] = slopes
    elif slopes is not None:
        slopes = None
    cos, sin = (f(torch.rand(40, 4) * 6).bfloat16() for f in (torch.cos, torch.sin))
    if "rotary" in case:
        said |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": case["rotary"] == "interleaved"}
    if table is not None:
        said["block_table" if version == "2" else "page_table"] = table
    exact = []
    contents = []
    for b in range(batch):
        keys, values = (t[at[b]] if table is None else t[table[b].long()].flatten(0, 1) for t in (k_cache, v_cache))
        queries = q[b].double()
        keys, values = keys[pad[b] : before[b]].double(), values[pad[b] : before[b]].double()
        if k_new is not None and v_new is not None:
            fresh = k_new[b].double()
            if "rotary" in case:
                fresh = rotated(fresh, cos, sin, before[b], case["rotary"] == "interleaved")
                queries = rotated(queries, cos, sin, before[b], case["rotary"] == "interleaved")
            keys, values = torch.cat([keys, fresh]), torch.cat([values, v_new[b].double()])
        contents.append((keys, values))
        exact.append(definition(queries, keys, values, case["causal"], case["window"], case["softcap"], slopes))
    function: Any = (flash_attn if version == "2" else flash_attn_3).flash_attn_with_kvcache
    moved = [None if t is None else t.to(device) for t in (q, k_cache, v_cache, k_new, v_new)]
    said = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in said.items()}
    out, lse = function(*moved, return_softmax_lse=True, **said)
    split = function(*moved, num_splits=2, **said)
    k_cache, v_cache = (t.cpu() for t in moved[1:3] if t is not None)
    for b in range(batch):
        assert_close(out[b].cpu(), exact[b][0], dtype)
        assert_close(split[b].cpu(), exact[b][0], dtype)
        assert_close(lse[b].cpu(), exact[b][1], dtype)
        for cache, expected in zip((k_cache, v_cache), contents[b], strict=True):  # written in place
            row = cache[at[b]] if table is None else cache[table[b].long()].flatten(0, 1)
            assert_close(row[pad[b] : pad[b] + len(expected)], expected, dtype)


@pytest.mark.parametrize("name", KV_CACHES)
@pytest.mark.parametrize("version", ["2", "3"])
def test_kvcache(name: str, version: str) -> None:
    check_kvcache(name, version)


def test_packed_queries_on_a_contiguous_cache() -> None:
    q, (k_cache, v_cache) = torch.randn(5, 4, 16), torch.randn(2, 2, 16, 2, 16)
    new_k, new_v = torch.randn(2, 5, 2, 16)
    cu, used = offsets([4, 1]), torch.tensor([3, 9], dtype=torch.int32)
    said: Any = {"cache_seqlens": used, "cu_seqlens_q": cu, "cu_seqlens_k_new": cu, "causal": True}
    out = flash_attn_3.flash_attn_with_kvcache(q, k_cache, v_cache, new_k, new_v, **said)
    assert_close(out[:4], definition(q[:4], k_cache[0, :7], v_cache[0, :7], True)[0])
    assert_close(out[4:], definition(q[4:], k_cache[1, :10], v_cache[1, :10], True)[0])
    assert torch.equal(k_cache[0, 3:7], new_k[:4]) and torch.equal(v_cache[1, 9], new_v[4])


def test_sinks_of_4() -> None:
    q, k, v = qkv((5, 7))
    sink = torch.randn(4, dtype=torch.bfloat16)
    out, lse = flash_attn_4.flash_attn_func(q, k, v, learnable_sink=sink, return_lse=True)
    assert lse is not None
    for b in range(2):
        exact, exact_lse = definition(q[b], k[b], v[b], sink=sink)
        assert_close(out[b], exact)
        assert_close(lse[b], exact_lse)


def test_a_table_of_rotations_follows_its_changes() -> None:
    table = torch.rand(4, 2, dtype=torch.bfloat16)
    first = flash_attn._in_float32(table)
    assert flash_attn._in_float32(table) is first
    table += 1
    assert torch.equal(flash_attn._in_float32(table), table.float())
    with torch.inference_mode():  # whose tensors do not count their changes
        table = torch.rand(4, 2, dtype=torch.bfloat16)
        flash_attn._in_float32(table)
        table += 1
        assert torch.equal(flash_attn._in_float32(table), table.float())


def test_pages_of_a_contiguous_cache_are_views() -> None:
    k, v = torch.randn(2, 3, 48, 2, 8)
    k_pages, v_pages, table = caches.contiguous(k, v)
    assert k_pages.shape == (9, 16, 2, 8) and k_pages.data_ptr() == k.data_ptr() and v_pages.data_ptr() == v.data_ptr()
    assert torch.equal(k_pages[table.long()].flatten(1, 2), k)
    assert caches.contiguous(k, v)[2] is table
    with pytest.raises(warpwave.InvalidInput, match="whole number of tokens apart"):
        caches.contiguous(k, v.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(warpwave.InvalidInput, match="must hold a row and a token"):
        caches.contiguous(k[:, :0], v[:, :0])
    for other in (v[:, :32], v[:2], v[:, :, :1]):
        with pytest.raises(warpwave.InvalidInput, match="the same rows, length and heads"):
            caches.contiguous(k, other)
    with pytest.raises(warpwave.InvalidInput, match="tokens must not share memory"):
        caches.contiguous(k[:, :1].expand(-1, 48, -1, -1), v)


@pytest.mark.parametrize(
    ("used", "error", "text"),
    [(-1, "InvalidInput", "is -1"), (64, "InvalidInput", "has room for 64"), (1.5, "InvalidType", r"is 1\.5"),
     ("x", "InvalidType", "is 'x'")],
)  # fmt: skip
def test_a_length_on_the_host_is_checked(used: Any, error: str, text: str) -> None:
    k_cache, v_cache = torch.randn(2, 2, 64, 2, 16)
    q, (k, v) = torch.randn(2, 1, 4, 16), torch.randn(2, 2, 1, 2, 16)
    with pytest.raises(getattr(warpwave, error), match=text):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=used, causal=True)


def test_new_tokens_beyond_a_row_that_begins_late_are_not_written() -> None:
    """With cache_leftpad a sequence ends with its row, not as many tokens later."""
    k_cache, v_cache = torch.zeros(2, 2, 64, 2, 16)
    q, (k, v) = torch.randn(2, 1, 4, 16), torch.randn(2, 2, 3, 2, 16)
    lengths, begins = torch.tensor([62, 64], dtype=torch.int32), torch.tensor([10, 64], dtype=torch.int32)
    flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, cache_leftpad=begins, causal=True
    )
    for cache, new in ((k_cache, k), (v_cache, v)):
        expected = torch.zeros(2, 64, 2, 16)
        expected[0, 62:] = new[0, :2]
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("used", [5, 62, 63, 64])
def test_new_tokens_beyond_the_cache_are_not_written(used: int) -> None:
    """Three new tokens and one query."""
    k_cache, v_cache = torch.zeros(2, 2, 64, 2, 16)
    before = torch.randn_like(k_cache), torch.randn_like(v_cache)
    k_cache.copy_(before[0]), v_cache.copy_(before[1])
    q, (k, v) = torch.randn(2, 1, 4, 16), torch.randn(2, 2, 3, 2, 16)
    lengths = torch.tensor([used, 7], dtype=torch.int32)
    flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
    with pytest.raises(warpwave.InvalidType, match=r"v is torch.float16 and q torch.float32"):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v.half(), cache_seqlens=lengths, causal=True)
    fitting = min(3, 64 - used)
    for cache, old, new in zip((k_cache, v_cache), before, (k, v), strict=True):
        expected = old.clone()
        expected[0, used : used + fitting] = new[0, :fitting]
        expected[1, 7:10] = new[1]
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("tokens_new", [1, 2])
def test_a_cache_is_unchanged_by_a_refused_call(tokens_new: int) -> None:
    """Whether or not there are as many new tokens as queries."""
    two: Any = flash_attn.flash_attn_with_kvcache
    at = torch.tensor([3, 5], dtype=torch.int32)
    k_cache, v_cache = torch.zeros(2, 2, 16, 2, 16)
    q, new = torch.randn(2, 1, 4, 16), torch.randn(2, tokens_new, 2, 16)
    good: dict[str, Any] = {"k": new, "v": new, "cache_seqlens": at}
    wrong: list[tuple[Any, dict[str, Any]]] = [
        (q, {"k": new[:, :, :1]}), (q, {"k": new[..., :1]}), (q, {"k": new[:1]}), (q, {"v": new[:, :0]}),
        (q, {"k": new[0], "v": new[0]}), (q, {"v": new.repeat(1, 2, 1, 1)}), (q.half(), {}), (q[..., :8], {}),
        (q[:, :, :3], {}), (q, {"num_splits": -1}), (q, {"softmax_scale": math.nan}), (q, {"softcap": math.nan}),
        (q, {"alibi_slopes": torch.ones(3)}), (q, {"causal": "no"}), (q, {"window_size": None}),
        (q, {"cache_batch_idx": torch.tensor([0.0, 1.0])}), (q, {"cache_batch_idx": [0, 1]}),
        (q, {"cache_leftpad": 1}), (q, {"block_table": at}), (q, {"k": [1]}), (None, {}),
    ]  # fmt: skip
    for given, change in wrong:
        with pytest.raises((warpwave.InvalidInput, warpwave.InvalidType)):
            two(given, k_cache, v_cache, **{**good, **change})
    assert not k_cache.any() and not v_cache.any()
    two(q, k_cache, v_cache, **good)
    assert torch.equal(k_cache[0, 3 : 3 + tokens_new], new[0])
    wanting = two(q, k_cache, v_cache, **{**good, "k": new.clone().requires_grad_()})
    assert wanting.requires_grad
    with pytest.raises(UnsupportedProblem, match="no gradients"):
        wanting.sum().backward()


def test_max_seqlen_q_of_dense_queries_is_ignored() -> None:
    """As in FlashAttention-3."""
    k_cache, v_cache = torch.randn(2, 2, 16, 2, 16)
    q = torch.randn(2, 3, 4, 16)
    call: Any = functools.partial(flash_attn_3.flash_attn_with_kvcache, q, k_cache, v_cache, causal=True)
    assert torch.equal(call(max_seqlen_q=1), call())


@pytest.mark.parametrize("page", [-1, 99])
def test_new_tokens_without_a_page_are_not_written(page: int) -> None:
    pool = torch.randn(2, 6, 4, 2, 16)
    k_cache, v_cache = pool.clone()
    table = torch.tensor([[0, page]], dtype=torch.int32)
    q, new = torch.randn(1, 1, 4, 16), torch.ones(1, 2, 2, 16)
    lengths = torch.tensor([3], dtype=torch.int32)
    flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=lengths, block_table=table)
    pool[:, 0, 3] = 1  # the first of the two has a page
    assert torch.equal(torch.stack([k_cache, v_cache]), pool)


def test_what_would_not_fit_is_refused_where_the_host_knows_it() -> None:
    k_cache, v_cache = torch.zeros(2, 2, 16, 2, 16)
    cu, packed_new = offsets([1, 3]), torch.randn(4, 2, 16)
    three: Any = functools.partial(
        flash_attn_3.flash_attn_with_kvcache, torch.randn(4, 4, 16), k_cache, v_cache, packed_new, packed_new,
        cu_seqlens_q=cu, cu_seqlens_k_new=cu, max_seqlen_q=3, causal=True,
    )  # fmt: skip
    for length in (15, None):
        with pytest.raises(warpwave.InvalidInput, match=r"cache_seqlens is .* room for 16"):
            three(cache_seqlens=length)
    angles, new = torch.randn(2, 4), torch.randn(2, 1, 2, 16)
    rotated: Any = functools.partial(
        flash_attn.flash_attn_with_kvcache, torch.randn(2, 1, 4, 16), k_cache, v_cache, new, new, angles, angles
    )
    with pytest.raises(warpwave.InvalidInput, match="rotary_cos has 2 positions"):
        rotated(cache_seqlens=2)
    assert not k_cache.any()
    three(cache_seqlens=13)
    rotated(cache_seqlens=1)
    assert k_cache.any()


@pytest.mark.parametrize("version", ["2", "3"])
@pytest.mark.parametrize("row", [3, -1, -9])
def test_an_index_that_is_no_row_of_the_cache_is_named(version: str, row: int) -> None:
    function: Any = (flash_attn if version == "2" else flash_attn_3).flash_attn_with_kvcache
    k_cache, v_cache = torch.zeros(2, 3, 16, 2, 16)
    q, new = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16)
    at = torch.tensor([1, row])
    with pytest.raises(warpwave.InvalidInput, match=rf"cache_batch_idx\[1\] is {row}; the cache has 3 rows"):
        function(q, k_cache, v_cache, new, new, cache_seqlens=4, cache_batch_idx=at)
    assert not k_cache.any() and not v_cache.any()


@pytest.mark.parametrize("length", [64, 63, 1])
def test_a_slice_of_a_longer_cache_is_read_in_place(length: int) -> None:
    whole = torch.randn(2, 2, 100, 2, 16)
    sliced = whole[:, :, :length]
    q, new = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16)
    at = torch.tensor([0, length // 2], dtype=torch.int32)
    own = sliced.clone()
    run: Any = flash_attn.flash_attn_with_kvcache
    expected = run(q, *own, new, new, cache_seqlens=at)
    rest = whole[:, :, length:].clone()
    assert_close(run(q, *sliced, new, new, cache_seqlens=at), expected)
    assert torch.equal(sliced, own) and torch.equal(whole[:, :, length:], rest)


def test_packed_queries_of_sequences_without_keys() -> None:
    z, cu = torch.zeros(0, 2, 16), offsets([1, 3])
    none = torch.zeros(2, dtype=torch.int32)
    q = torch.randn(4, 4, 16)
    assert not flash_attn_3.flash_attn_varlen_func(q, z, z, cu, 0 * cu, 3, 0, seqused_k=none).any()
    assert not flash_attn_3.flash_attn_varlen_func(q, z, z, cu, 0 * cu, 3, 0).any()


def test_rows_that_share_one_cache() -> None:
    q, (k, v) = torch.randn(3, 1, 4, 16), torch.randn(2, 1, 24, 2, 16)
    shared = [t.expand(3, -1, -1, -1) for t in (k, v)]
    said: Any = {"cache_seqlens": torch.tensor([5, 24, 1], dtype=torch.int32)}
    own = [t.contiguous() for t in shared]
    assert_close(
        flash_attn.flash_attn_with_kvcache(q, *shared, **said), flash_attn.flash_attn_with_kvcache(q, *own, **said)
    )


def test_new_tokens_of_a_sequence_that_begins_after_its_end_are_not_written() -> None:
    k_cache, v_cache = torch.zeros(2, 2, 32, 2, 16)
    new, ints = torch.ones(2, 3, 2, 16), functools.partial(torch.tensor, dtype=torch.int32)
    out = flash_attn.flash_attn_with_kvcache(
        torch.randn(2, 3, 4, 16), k_cache, v_cache, new, new, cache_seqlens=ints([10, 12]),
        cache_leftpad=ints([40, 2]), causal=True,
    )  # fmt: skip
    assert not out[0].any() and not k_cache[0].any() and not v_cache[0].any()
    assert k_cache[1].any(dim=(1, 2)).nonzero().flatten().tolist() == [12, 13, 14]
