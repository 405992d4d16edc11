"""Calls on a paged cache for conformance tests: sequences of unequal length in shuffled pages, NaN elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.conformance.datasets import Data, fill
from tests.conformance.harness import band
from warpwave import AttentionProblem, CacheLayer, Causal, attention_with_kv_cache
from warpwave.checks.calls import describe_cached_call
from warpwave.kernels import quantize_tensor
from warpwave.operands import CachedOperands
from warpwave.options import Options


@dataclass(frozen=True)
class PagedCase:
    """One call on a cache, as data.

    Args:
        lengths: (queries, tokens in the cache) of each sequence.
        packed: whether queries are packed; else all sequences have as many as the first.
        capacity: pages of a row of the table.
        cache: dtype of the pools and what shares a factor, `"int8:token"`; "" for pools of `dtype`.
    """

    page_size: int = 16
    dtype: str = "float16"
    dims: tuple[int, int] = (16, 16)
    heads: tuple[int, int] = (4, 2)
    lengths: tuple[tuple[int, int], ...] = ((1, 37), (1, 0), (1, 90))
    packed: bool = False
    causal: str = ""
    window: tuple[int, int] = (-1, -1)
    alibi: bool = False
    softcap: float = 0.0
    sinks: bool = False
    lse: bool = True
    max_seqlen_k: int = 128
    cache: str = ""
    v_in_k: bool = False

    def __str__(self) -> str:
        plain = PagedCase()
        parts = [f"page{self.page_size}", self.dtype, "_".join(f"{q}x{k}" for q, k in self.lengths)]
        for name in (
            "dims",
            "heads",
            "packed",
            "causal",
            "window",
            "alibi",
            "softcap",
            "sinks",
            "lse",
            "cache",
            "v_in_k",
        ):
            value = getattr(self, name)
            if value != getattr(plain, name):
                value = "x".join(map(str, value)) if isinstance(value, tuple) else value
                parts.append(name if value is True else f"{name}={value}")
        return "-".join(parts)


class PagedCall(NamedTuple):
    """A case as tensors."""

    problem: AttentionProblem
    operands: CachedOperands
    options: dict[str, Any]
    keys: list[Tensor]  # [tokens, num_heads_kv, head_dim] of each sequence
    values: list[Tensor]

    @property
    def layer(self) -> CacheLayer:
        o = self.operands
        return CacheLayer(o.k, o.v, o.page_table, o.seqused_k, o.k_descale, o.v_descale)


def build(case: PagedCase, data: Data, device: torch.device, seed: int = 0) -> PagedCall:
    """Returns the tensors of a case. Rows of the table are shuffled too. Slots beyond a sequence's length and unused
    pages hold NaN, and unused entries of the table name pages far outside the pool."""
    g = torch.Generator(device).manual_seed(seed)
    dtype_name, _, precision = case.dtype.partition(":")
    dtype = getattr(torch, dtype_name)
    (heads_q, heads_kv), (head_dim, head_dim_v), batch = case.heads, case.dims, len(case.lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device)

    rows_q = (sum(q for q, _ in case.lengths),) if case.packed else (batch, case.lengths[0][0])
    longest = max(k for _, k in case.lengths)
    q, k, v = normal(*rows_q, heads_q, head_dim), normal(batch, longest, heads_kv, head_dim), None
    v = normal(batch, longest, heads_kv, head_dim_v)
    fill(data, head_dim, q, k, v)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    columns = -(-case.max_seqlen_k // case.page_size)
    counts = [-(-n // case.page_size) for _, n in case.lengths]
    num_pages = sum(counts) + 3
    shuffled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
    rows = torch.randperm(batch + 2, generator=torch.Generator().manual_seed(seed + 1))[:batch].to(device)
    table = torch.full((batch + 2, columns), 2**30, dtype=torch.int32, device=device)
    seqused = torch.full((batch + 2,), 2**30, dtype=torch.int32, device=device)
    shape = (num_pages, case.page_size, heads_kv)
    factors: list[Tensor | None] = [None, None]
    parts: list[tuple[Tensor, Tensor | None]] = [(k, None), (v, None)]  # numbers and the factors of their tokens
    if case.cache:
        pool_dtype, _, kind = case.cache.partition(":")
        parts = [quantized(x, getattr(torch, pool_dtype), kind) for x in (k, v)]
        factors = [f if kind == "head" else torch.full(shape, torch.nan, device=device) for _, f in parts]
    pools = [
        torch.full((*shape, x.shape[-1]), torch.nan if x.dtype.is_floating_point else 127, dtype=x.dtype, device=device)
        for x, _ in parts
    ]
    for b, (_, n) in enumerate(case.lengths):
        pages = torch.tensor([shuffled.pop() for _ in range(counts[b])], dtype=torch.int64, device=device)
        table[rows[b], : counts[b]] = pages.to(torch.int32)
        seqused[rows[b]] = n
        at = torch.arange(n, device=device)
        for pool, factor, (x, of_tokens) in zip(pools, factors, parts, strict=True):
            pool[pages[at // case.page_size], at % case.page_size] = x[b, :n]
            if factor is not None and of_tokens is not None and factor.dim() == 3:
                factor[pages[at // case.page_size], at % case.page_size] = of_tokens[b, :n]
    cu_seqlens = None
    if case.packed:
        ends = torch.tensor([0, *(q for q, _ in case.lengths)], device=device).cumsum(0)
        cu_seqlens = ends.to(torch.int32)
    operands = CachedOperands(
        q, pools[0], pools[0][..., :head_dim_v] if case.v_in_k else pools[1],
        alibi_slopes=2.0 ** -torch.arange(1, heads_q + 1, device=device, dtype=torch.float32) if case.alibi else None,
        sinks=normal(heads_q) if case.sinks else None,
        cu_seqlens_q=cu_seqlens, page_table=table, seqused_k=seqused, rows=rows.to(torch.int32),
        k_descale=factors[0], v_descale=factors[1],
    )  # fmt: skip
    options = {
        "causal": Causal(case.causal) if case.causal else False,  # type: ignore[arg-type]
        "window_size": None if case.window == (-1, -1) else case.window,
        "softcap": case.softcap,
        "precision": precision or "default",
        "return_lse": case.lse,
    }
    said = Options(
        max(q for q, _ in case.lengths) if case.packed else 0, 0, case.causal, *case.window, case.softcap, None,
        precision or "default", case.lse,
    )  # fmt: skip
    problem = replace(describe_cached_call(operands, said), lengths=case.lengths if case.packed else None)
    if case.cache:
        k, v = (x.float() * (1 if f is None else f[..., None]) for x, f in parts)
    if case.v_in_k:
        v = k[..., :head_dim_v]
    keys, values = ([x[b, :n] for b, (_, n) in enumerate(case.lengths)] for x in (k, v))
    return PagedCall(problem, operands, options, keys, values)


def quantized(x: Tensor, dtype: torch.dtype, kind: str) -> tuple[Tensor, Tensor]:
    """Returns keys or values, (batch, tokens, heads, width), in 8 bits, and the factors of heads, (heads,), or of heads
    of tokens, (batch, tokens, heads)."""
    magnitudes = x.float().abs()
    factor = magnitudes.amax((0, 1, 3)) if kind == "head" else magnitudes.amax(-1)
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    factor = torch.where(factor > 0, factor / largest, quantize_tensor.OF_ZEROS.value)
    numbers = x.float() / factor[..., None]
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype), factor


def run(kernel: str, call: PagedCall, **more: Any) -> tuple[Tensor, Tensor | None]:
    """Returns out and lse (None unless requested) of a public call."""
    o = call.operands
    tensors: dict[str, Any] = {"alibi_slopes": o.alibi_slopes, "sinks": o.sinks, "rows": o.rows}
    if call.problem.packed:
        tensors |= {"cu_seqlens_q": o.cu_seqlens_q, "max_seqlen_q": call.problem.seqlen_q}
    result = attention_with_kv_cache(o.q, call.layer, **tensors, **call.options, kernel=kernel, **more)
    return result if call.options["return_lse"] else (result, None)


def visible(call: PagedCall) -> list[Tensor]:
    """Returns the visible pairs by the documented definition: bool [queries, keys] of each sequence."""
    problem, found = call.problem, []
    for b, keys in enumerate(call.keys):
        seqlen_q = problem.lengths[b][0] if problem.lengths else problem.seqlen_q
        found.append(band(problem, seqlen_q, len(keys), keys.device))
    return found


def by_sequence(call: PagedCall, x: Tensor) -> list[Tensor]:
    """Returns the sequences of a tensor with the layout of q, each [queries, heads, width]."""
    if call.problem.packed:
        return list(x.split([q for q, _ in call.problem.lengths or ()]))
    return list(x)
