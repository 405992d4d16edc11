"""A cache whose values are part of its keys: one pool, tokens without `v_new`, and what keeps them one tensor."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from warpwave import AttentionProblem, PagedKVCache, attention_with_kv_cache
from warpwave.cached_calls import blank_operands
from warpwave.errors import InvalidInput, InvalidType
from warpwave.operands import is_part
from warpwave.workbench.bench.inputs import make_operands

HEAD_DIM, HEAD_DIM_V, HEADS = 24, 16, 5


def make(**changes: Any) -> PagedKVCache:
    sizes: dict[str, Any] = {"num_pages": 12, "page_size": 4, "max_batch": 4, "max_seqlen": 40}
    return PagedKVCache(
        num_heads_kv=1, head_dim=HEAD_DIM, head_dim_v=HEAD_DIM_V, v_in_k=True, dtype=torch.float32, device="cpu",
        **sizes | changes,
    )  # fmt: skip


def expected(q: Tensor, latents: Tensor) -> Tensor:
    """The last queries of a sequence, (queries, heads, head_dim), on its latents, (tokens, head_dim), in float64."""
    q, latents = q.double(), latents.double()
    scores = torch.einsum("qhd,kd->hqk", q, latents) * HEAD_DIM**-0.5
    first = len(latents) - len(q)
    hidden = torch.arange(len(latents)) > first + torch.arange(len(q))[:, None]
    return torch.einsum("hqk,kd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), latents[:, :HEAD_DIM_V])


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_one_pool_and_tokens_without_values() -> None:
    """A prompt, a fork that copies a shared page when it grows, and a step of both."""
    cache = make()
    assert is_part(cache.v, cache.k) and cache.v.shape[-1] == HEAD_DIM_V
    latents, q = random(1, 6, 1, HEAD_DIM), random(1, 6, HEADS, HEAD_DIM)
    row = cache.add()
    out = attention_with_kv_cache(q, cache, rows=[row], k_new=latents, causal=True)
    torch.testing.assert_close(out[0].double(), expected(q[0], latents[0, :, 0]), atol=1e-5, rtol=1e-5)

    fork = cache.fork(row)
    new, q = random(2, 2, 1, HEAD_DIM), random(2, 2, HEADS, HEAD_DIM)
    out = attention_with_kv_cache(q, cache, rows=[row, fork], k_new=new, causal=True)
    for b in range(2):
        seen = torch.cat([latents[0, :, 0], new[b, :, 0]])
        torch.testing.assert_close(out[b].double(), expected(q[b], seen), atol=1e-5, rtol=1e-5)


def test_packed_tokens_and_layers() -> None:
    cache = make(num_layers=2)
    rows = [cache.add(), cache.add()]
    counts = [3, 5]
    cache.extend(rows, counts)
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    for i, layer in enumerate(cache.layers):
        latents, q = random(8, 1, HEAD_DIM) + i, random(8, HEADS, HEAD_DIM)
        out = attention_with_kv_cache(
            q, layer, rows=cache.index(rows), k_new=latents, cu_seqlens_q=offsets, max_seqlen_q=5, causal=True
        )
        for part, of_q, seen in zip(out.split(counts), q.split(counts), latents[:, 0].split(counts), strict=True):
            torch.testing.assert_close(part.double(), expected(of_q, seen), atol=1e-5, rtol=1e-5)


def test_append_takes_keys_alone() -> None:
    cache = make()
    row = cache.add()
    cache.append([row], random(1, 3, 1, HEAD_DIM))
    assert cache.lengths == {row: 3} and torch.equal(cache.v[cache.pages(row)[0], :3], random(1, 3, 1, 24)[0, ..., :16])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_is_one_pool_too(copied: Any) -> None:
    cache = make()
    row = cache.add()
    cache.append([row], random(1, 3, 1, HEAD_DIM))
    other = copied(cache)
    assert is_part(other.v, other.k) and not is_part(other.v, cache.k)
    assert torch.equal(other.k[other.pages(row)][0, :3], cache.k[cache.pages(row)][0, :3])


def test_what_no_such_cache_can_be() -> None:
    with pytest.raises(InvalidInput, match="head_dim_v is 32 and v_in_k True; it must be at most head_dim, 24"):
        PagedKVCache(
            num_pages=1, page_size=4, num_heads_kv=1, head_dim=24, head_dim_v=32, v_in_k=True, max_batch=1,
            max_seqlen=4, device="cpu",
        )  # fmt: skip
    with pytest.raises(InvalidInput, match="a cache with V in K has 16 or 32 bits"):
        PagedKVCache(
            num_pages=1, page_size=4, num_heads_kv=1, head_dim=24, v_in_k=True, max_batch=1, max_seqlen=4,
            dtype=torch.int8, device="cpu",
        )  # fmt: skip
    with pytest.raises(InvalidType, match="v_in_k is 1"):
        PagedKVCache(
            num_pages=1, page_size=4, num_heads_kv=1, head_dim=24, v_in_k=1, max_batch=1, max_seqlen=4,  # type: ignore[arg-type]
            device="cpu",
        )  # fmt: skip


def test_values_that_are_not_in_the_keys_are_refused() -> None:
    """They would be written over the keys."""
    cache = make()
    row, q, k = cache.add(), random(1, 3, HEADS, HEAD_DIM), random(1, 3, 1, HEAD_DIM)
    for v in (k[..., :HEAD_DIM_V].clone(), k[..., -HEAD_DIM_V:]):
        with pytest.raises(InvalidInput, match=r"omit v_new, or pass k_new\[..., :16\]"):
            attention_with_kv_cache(q, cache, rows=[row], k_new=k, v_new=v, causal=True)
        with pytest.raises(InvalidInput, match="v_new is not the first columns"):
            cache.append([row], k, v)
    assert cache.lengths == {row: 0}
    cache.append([row], k, k[..., :HEAD_DIM_V])


def test_other_caches_need_values() -> None:
    cache = PagedKVCache(
        num_pages=2, page_size=4, num_heads_kv=1, head_dim=24, max_batch=1, max_seqlen=8, dtype=torch.float32,
        device="cpu",
    )  # fmt: skip
    row, k = cache.add(), random(1, 3, 1, 24)
    with pytest.raises(InvalidInput, match="must be given together"):
        attention_with_kv_cache(random(1, 3, 2, 24), cache, rows=[row], k_new=k)
    with pytest.raises(InvalidType, match="v_new is a NoneType"):
        cache.append([row], k)
    assert cache.lengths == {row: 0}


@pytest.mark.parametrize("page_size", [0, 16])
def test_made_inputs_are_one_tensor(page_size: int) -> None:
    """Those that bench times, and those that warmup compiles for."""
    problem = AttentionProblem(
        batch=2, seqlen_q=1, seqlen_k=20, num_heads_q=4, num_heads_kv=1, head_dim=24, head_dim_v=16, dtype="float32",
        softmax_scale=0.2, page_size=page_size, v_in_k=True,
    )  # fmt: skip
    for operands in (make_operands(problem, "cpu"), blank_operands(problem, torch.device("cpu"))):
        assert is_part(operands.v, operands.k) and operands.v.shape[-1] == 16
    apart = replace(problem, v_in_k=False)
    assert not is_part(*reversed(make_operands(apart, "cpu")[1:3]))
