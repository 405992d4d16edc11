"""The public calls: `attention` for dense batches, `attention_varlen` for packed sequences, `attention_with_kv_cache`;
and `warmup`, which compiles ahead of them.

The calls return a tensor or, with `return_lse`, a pair. The annotation is Any, because every typed caller would have to
narrow a union.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from warpwave import autograd, cached_calls, dispatch, ops, plans
from warpwave.checks.calls import check_are_tensors, check_packed_lengths, describe_call, settled
from warpwave.checks.out import check_out_is_writable
from warpwave.checks.problems import check_problem
from warpwave.errors import InvalidInput, InvalidType, UnsupportedProblem
from warpwave.gpu import current_gpu, present_device
from warpwave.kernels import descales, dropout
from warpwave.kv_cache import CacheLayer, PagedKVCache, Rotary, integers
from warpwave.operands import AnyOperands, CachedOperands, DropoutOperands, Operands, QuantizedOperands
from warpwave.options import (
    as_bool,
    as_int,
    as_logits,
    options_of,
    spell_scalars,
    spell_switches,
    unexpanded,
    with_positive_scale,
)
from warpwave.problem import AttentionProblem, Causal

_new: Any = tuple.__new__  # takes a third of the time of a named tuple's constructor


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | Causal = False,
    window_size: tuple[int, int] | None = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    softcap: float | None = 0.0,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    precision: str | float = "default",
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    deterministic: bool | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out_descale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    checked: bool = False,
    kernel: str = "auto",
    config: Any = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> Any:
    """Computes exact attention, `softmax(softmax_scale * q k^T + ...) v`, on any device.

    The score of query i and key j is `softmax_scale * q_i.k_j`; then `softcap * tanh(score / softcap)`; then `+ bias`;
    then ALiBi, `- slope * |i + seqlen_k - seqlen_q - j|`; then the masks, all of which must show the pair. A query that
    sees no key gives 0.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), float16, bfloat16, float32, or float64 (only `eager`, in float64
            throughout). Any strides.
        k: (batch, seqlen_k, num_heads_kv, head_dim), the dtype of q. Query head h reads kv head
            `h // (num_heads_q // num_heads_kv)`.
        v: (batch, seqlen_k, num_heads_kv, head_dim_v), the dtype of q.
        causal: True aligns the mask to the last key: query i sees keys `j <= i + seqlen_k - seqlen_q`.
            `Causal("top_left")` aligns it to the first, `j <= i`, as torch's `is_causal` does.
        window_size: (left, right): query i sees keys from `i + seqlen_k - seqlen_q - left` to
            `i + seqlen_k - seqlen_q + right`, both included; -1 is unlimited.
        mask: bool, True = visible, (batch, num_heads_q, seqlen_q, seqlen_k); any of the four axes may be 1.
        bias: added to the scores, in the dtype of q or float32, shaped likewise. -inf hides a pair; a finite
            bias does not, so a row whose biases are all `finfo.min` gives the mean of its values. Finite biases
            are clamped to magnitudes of at most 2.35e38.
        alibi_slopes: float32, or float64 with float64 q, (num_heads_q,) or (batch, num_heads_q).
        softcap: 0 or None for none.
        sinks: float32 or the dtype of q, (num_heads_q,): one additional logit per head in the denominator, natural-log
            and unscaled.
        softmax_scale: 1/sqrt(head_dim) if None. A negative scale costs a negated copy of q.
        precision: how float32 products are computed: `"ieee"`, `"tf32x3"`, `"fp16x3"` or `"bf16x6"` (split operands,
            float32 accuracy), `"bf16x3"` (16 bits of each operand), `"tf32"` or `"fp16x1"` (11 bits), or `"default"`:
            the fastest known to be as accurate as torch's own. If a device or kernel lacks the named mode, the cheapest
            mode that is at least as accurate is used. A number is the relative error that out may have, |out - exact| /
            |exact| in Euclidean norms; the cheapest mode that keeps it is used (docs/guide/precision.md).
        dropout_p: probability with which each probability is set to 0 after the softmax, at least 0 and less than 1.
            The others are multiplied by `1 / (1 - dropout_p)`. It counts in units of 2^-16. lse is that of the softmax
            without dropout. There is no training flag: pass 0 for inference.
        dropout_seed: int64, (2,), on the device of q: a seed and an offset, which determine what is dropped
            (docs/guide/dropout.md). Drawn from torch's default generator of the device if None. Ignored if dropout_p
            is 0.
        deterministic: True for gradients with the same bits in every run; False for the fastest gradients; None for
            what `torch.are_deterministic_algorithms_enabled()` returns when the gradients are computed.
        q_descale, k_descale, v_descale: float32, positive; the factors of quantized tensors (docs/guide/quantized.md):
            the call uses `q * q_descale`, `k * k_descale` and `v * v_descale`. q and k may be float8_e4m3fn,
            float8_e5m2 or int8; v may be float8 beside float8, int8 beside int8, float16 or bfloat16. A factor is (),
            (1,), (batch, num_heads) of its tensor, or (batch, num_heads, blocks) for blocks of 64 or 128 tokens.
            q_descale may also be (batch, num_heads_kv). `warpwave.quantize` makes them. v_descale is None if v is not
            quantized.
        out_descale: float32, one number, for a float8 out: `out * out_descale` is the result, and larger magnitudes
            than float8 has saturate.
        out_dtype: of a call with factors: bfloat16, float16, or with out_descale float8. None: the dtype of v if it
            has 16 bits, otherwise bfloat16.
        checked: check the contents of the factors first, which waits for the device, and raise InvalidInput naming the
            first that is not positive and finite. Unchecked, wrong factors give unspecified values. Under torch.compile
            the check is a break in the graph, which `fullgraph=True` refuses.
        kernel: `"auto"`, or the name of the kernel that must run the call; `warpwave.explain` lists them.
        config: a `Config` of the kernel named.
        return_lse: also return the log-sum-exp.
        out: receives the output and is returned: (batch, seqlen_q, num_heads_q, head_dim_v), the dtype of the output,
            any strides. It must share no memory with another argument, and no argument may require a gradient.
            docs/guide/serving.md states which layouts cost a copy.

    Returns:
        out: (batch, seqlen_q, num_heads_q, head_dim_v), the dtype of q, or out_dtype; contiguous unless given.
        lse: if `return_lse`: natural logarithm, float32 (float64 if q is), (batch, num_heads_q, seqlen_q), minus
            infinity for a query that sees no key.

    Raises:
        InvalidInput: (a ValueError) a shape or value no call can have; the message names the argument.
        InvalidType: (a TypeError) a type or dtype no call can have.
        UnsupportedProblem: (a NotImplementedError) the requested kernel cannot run this; carries every reason.
        RuntimeError: the call must compile and a CUDA graph is being captured.

    Note:
        Scores, softmax and sums are float32; with 16-bit inputs the unnormalized probabilities are rounded to the
        inputs' dtype before the second product. Forward results are repeatable bit for bit. First derivatives of out
        and lse exist with respect to q, k, v, bias, alibi_slopes and sinks, in reverse mode: `backward`,
        `torch.func.grad`, `vjp` and `jacrev`. With dropout, the same probabilities are dropped in forward and backward.
        Dao, "FlashAttention-2" (2023); Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).

    Example:
        >>> import torch, warpwave
        >>> q, k, v = (torch.randn(2, 128, 4, 64) for _ in range(3))
        >>> warpwave.attention(q, k, v, causal=True).shape
        torch.Size([2, 128, 4, 64])
    """
    if not (
        window_size is None
        and deterministic is None
        and dropout_seed is None
        and type(softcap) is type(dropout_p) is float
        and (softmax_scale is None or (softmax_scale.__class__ is float and softmax_scale >= 0))
        and return_lse.__class__ is bool
    ):
        window_size, softcap, softmax_scale, return_lse = spell_scalars(window_size, softcap, softmax_scale, return_lse)
        dropout_p, deterministic = spell_switches(dropout_p, deterministic, dropout_seed)
        q, softmax_scale = with_positive_scale(q, softmax_scale)
    if mask is not None:
        mask = unexpanded(mask, q, k)
    if sinks is not None:
        sinks = as_logits(sinks, q)
    operands: Any = _new(Operands, (q, k, v, mask, bias, alibi_slopes, sinks, None, None))
    if not (out_dtype is None and q_descale is k_descale is v_descale is out_descale is None):
        operands = _new(QuantizedOperands, (*operands, q_descale, k_descale, v_descale, out_descale))
    elif dropout_p:
        operands = _with_seed(operands, dropout_p, dropout_seed)
    # 1 == True, so the key includes the type of causal.
    said = (causal, window_size, softcap, softmax_scale, precision, return_lse, dropout_p, deterministic, out_dtype,
            causal.__class__, kernel, config)  # fmt: skip
    if checked is not False and as_bool("checked", checked):
        _check_contents(operands, said)
    if out is not None:
        check_out_is_writable(out)
    run = plans.recall(operands, said, (), out)
    if run is None:
        out, lse = _call(operands, said, out=out)
    else:
        out, lse = run(operands) if out is None else run(operands, out)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool | Causal = False,
    window_size: tuple[int, int] | None = None,
    alibi_slopes: torch.Tensor | None = None,
    softcap: float | None = 0.0,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    precision: str | float = "default",
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    deterministic: bool | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out_descale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    checked: bool = False,
    kernel: str = "auto",
    config: Any = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> Any:
    """Computes `attention` over sequences of different lengths that are packed into one tensor.

    Args:
        q: (total_q, num_heads_q, head_dim).
        k: (total_k, num_heads_kv, head_dim).
        v: (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_q: int32, (batch + 1,): sequence b is rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` of q.
        cu_seqlens_k: the same for k and v.
        max_seqlen_q, max_seqlen_k: the longest sequences, as host integers.
        checked: check the contents of the offsets and of factors first, which waits for the device, and raise
            InvalidInput naming the first wrong index. Unchecked, wrong ones give unspecified values, and every access
            stays inside the tensors. Under torch.compile the check is a break in the graph, which `fullgraph=True`
            refuses.

    The other arguments, errors and notes are those of `attention`. With the same dropout_seed, sequence b drops the
    same pairs as item b of a dense batch.

    Returns:
        out: (total_q, num_heads_q, head_dim_v); the caller's if given.
        lse: if `return_lse`: (num_heads_q, total_q).
    """
    if not (
        window_size is None
        and deterministic is None
        and dropout_seed is None
        and type(softcap) is type(dropout_p) is float
        and (softmax_scale is None or (softmax_scale.__class__ is float and softmax_scale >= 0))
        and return_lse.__class__ is bool
    ):
        window_size, softcap, softmax_scale, return_lse = spell_scalars(window_size, softcap, softmax_scale, return_lse)
        dropout_p, deterministic = spell_switches(dropout_p, deterministic, dropout_seed)
        q, softmax_scale = with_positive_scale(q, softmax_scale)
    if sinks is not None:
        sinks = as_logits(sinks, q)
    operands: Any = _new(Operands, (q, k, v, None, None, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k))
    max_seqlen_q, max_seqlen_k = as_int("max_seqlen_q", max_seqlen_q), as_int("max_seqlen_k", max_seqlen_k)
    if not (out_dtype is None and q_descale is k_descale is v_descale is out_descale is None):
        operands = _new(QuantizedOperands, (*operands, q_descale, k_descale, v_descale, out_descale))
    elif dropout_p:
        operands = _with_seed(operands, dropout_p, dropout_seed)
    said = (causal, window_size, softcap, softmax_scale, precision, return_lse, dropout_p, deterministic, out_dtype,
            causal.__class__, kernel, config)  # fmt: skip
    longest = (max_seqlen_q, max_seqlen_k)
    if operands.cu_seqlens_q is None or operands.cu_seqlens_k is None:
        name = "cu_seqlens_q" if operands.cu_seqlens_q is None else "cu_seqlens_k"
        raise InvalidType(f"{name} is None; it must be an int32 torch.Tensor of batch + 1 offsets")
    if checked is not False and as_bool("checked", checked):
        _check_contents(operands, said, longest)
    if out is not None:
        check_out_is_writable(out)
    run = plans.recall(operands, said, longest, out)
    if run is None:
        out, lse = _call(operands, said, longest, out)
    else:
        out, lse = run(operands) if out is None else run(operands, out)
    return (out, lse) if return_lse else out


@cached_calls.outside_graphs
def attention_with_kv_cache(
    q: torch.Tensor,
    cache: PagedKVCache | CacheLayer,
    *,
    rows: Sequence[int] | torch.Tensor | None = None,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    seqlens_q: Sequence[int] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool | Causal = False,
    window_size: tuple[int, int] | None = None,
    alibi_slopes: torch.Tensor | None = None,
    softcap: float | None = 0.0,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    precision: str | float = "default",
    num_splits: int | None = None,
    batch_invariant: bool = False,
    shared_prefix: int = 0,
    checked: bool = False,
    kernel: str = "auto",
    config: Any = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> Any:
    """Computes attention of the last tokens of each sequence to all its tokens in a paged cache: decode, chunked
    prefill, and batches that mix the two. There are no gradients: if an argument requires one, `backward` on a result
    raises.

    A sequence's queries are its last tokens: query i of seqlen_q is at position `seqused_k - seqlen_q + i`, and masks
    count from there as in `attention`.

    `k_new` and `v_new`, if given, are written first. In a `PagedKVCache` they are appended: pages are taken and lengths
    advanced; if the call raises an error, nothing changes. In a `CacheLayer` they are written into the last cells of
    each sequence, whose length the caller has already advanced (`PagedKVCache.extend`). This is for models of several
    layers, and for CUDA graphs. The cache stores values and takes no part in autograd.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), the dtype of the cache, float16 or bfloat16 if that has 8 bits; or
            packed with `cu_seqlens_q`, (total_q, num_heads_q, head_dim), for sequences with different numbers of
            queries.
        cache: a `PagedKVCache` of one layer, or one layer's `CacheLayer`.
        rows: the row of the cache of each sequence of q: integers, or int32 (batch,) on the device; row b for sequence
            b if None. Must be integers if k_new is appended to a `PagedKVCache`.
        k_new: keys of new tokens, (batch, seqlen_new, num_heads_kv, head_dim), packed if q is, in a dtype that q could
            have. There are as many as queries if they are packed or rotated. Otherwise there may be more, for example
            a prompt of which only the last query is needed, or fewer.
        v_new: their values, (batch, seqlen_new, num_heads_kv, head_dim_v). None if v is the first columns of k, as in a
            latent cache: the values are then the first columns of k_new.
        rotary: rotates q, and k_new if given, to the tokens' positions. Its table must reach the longest sequence: a
            shorter one is an error if the host knows the lengths, and otherwise with `checked`; unchecked, positions
            past the table use its last angle. If v is the first columns of k, rotated k_new is an error.
        cu_seqlens_q: int32, (batch + 1,): sequence b is rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` of q. Rows
            after the last offset belong to no sequence; their results are unspecified.
        seqlens_q: the same lengths as host integers; needed to append packed tokens to a `PagedKVCache`. In that case
            they alone decide which tokens belong to which sequence, and the contents of cu_seqlens_q are not used.
        max_seqlen_q: the most queries of a sequence, with cu_seqlens_q only; the largest of seqlens_q if None.
        max_seqlen_k: the longest sequence that may occur, in tokens; the capacity of the page table if None. It
            determines the launch: for graphs leave it at the capacity; for a batch known to be short give a multiple of
            some hundreds, because each value makes another plan.
        num_splits: the number of splits of the keys, one block each, from 1 to 65536; None for the closed form that
            `warpwave.explain` prints. Each split of a row needs `4 * (head_dim_v + 2)` bytes of workspace. If it is
            given, `"auto"` does not take `"hopper/flash_fwd"`, which has at most 64. Named kernels that split
            no keys ignore it.
        batch_invariant: split keys at fixed places, so that a sequence's result has the same bits alone and in a batch.
            Packed and dense calls differ from each other; each is invariant in itself. Above head_dim 256 the places
            also depend on the capacity of the page table, or on max_seqlen_k if it is given.
        shared_prefix: tokens at the beginning of every sequence that are the same tokens in the same pages before the
            call (`PagedKVCache.fork`, `PagedKVCache.shared_prefix`), before all queries: `split_kv` reads them once for
            the batch, other kernels for each sequence.
        checked: check offsets, lengths, rows and page ids first, which waits for the device, and raise InvalidInput
            naming the first wrong index; offsets that disagree with seqlens_q are wrong. Unchecked, wrong ones give
            unspecified values but stay inside the tensors.
        kernel: `"auto"`, `"hopper/flash_fwd"`, `"split_kv"`, `"large_head_dim"` or `"eager"`.

    The other arguments are those of `attention`.

    Returns:
        out: shaped as q, with head_dim_v; the caller's if given.
        lse: if `return_lse`: natural logarithm, float32, (batch, num_heads_q, seqlen_q), packed (num_heads_q, total_q).

    Raises:
        InvalidInput, InvalidType, UnsupportedProblem, RuntimeError: as `attention`.
        OutOfPages: (a RuntimeError) the cache has too few free pages for k_new; nothing was changed.

    Note:
        Numerics are those of `attention`; partial results of splits are merged in float32, in a fixed order.
        Results are repeatable bit for bit. torch.compile breaks its graph at this call.
    """
    if not isinstance(q, torch.Tensor):
        raise InvalidType(f"q is a {type(q).__name__}; it must be a torch.Tensor")
    layer, index = cached_calls.layer_of(cache), rows
    if rows is not None and not isinstance(rows, torch.Tensor):
        rows = rows if rows.__class__ in (list, tuple) else integers("rows", rows, "a row")
        index = cached_calls.index_of(cache, rows)
    if not (
        window_size is None
        and max_seqlen_q is max_seqlen_k is num_splits is None
        and softcap.__class__ is float
        and (softmax_scale is None or (softmax_scale.__class__ is float and softmax_scale >= 0))
        and return_lse.__class__ is batch_invariant.__class__ is checked.__class__ is bool
        and shared_prefix.__class__ is int
    ):
        window_size, softcap, softmax_scale, return_lse = spell_scalars(window_size, softcap, softmax_scale, return_lse)
        q, softmax_scale = with_positive_scale(q, softmax_scale)
        batch_invariant, checked = as_bool("batch_invariant", batch_invariant), as_bool("checked", checked)
        shared_prefix = as_int("shared_prefix", shared_prefix)
        max_seqlen_q = None if max_seqlen_q is None else as_int("max_seqlen_q", max_seqlen_q)
        max_seqlen_k = None if max_seqlen_k is None else as_int("max_seqlen_k", max_seqlen_k)
        num_splits = None if num_splits is None else as_int("num_splits", num_splits)
    if sinks is not None:
        sinks = as_logits(sinks, q)
    lengths = None if seqlens_q is None else integers("seqlens_q", seqlens_q)
    operands = _new(
        CachedOperands,
        (q, layer.k, layer.v, None, None, alibi_slopes, sinks, cu_seqlens_q, None, layer.page_table, layer.seqused_k,
         index, layer.k_descale, layer.v_descale),
    )  # fmt: skip
    if isinstance(cache, PagedKVCache) and (max_seqlen_k or cache.has_evicted) and isinstance(rows, list | tuple):
        counts, appended = lengths, None if k_new is None else lengths
        if cu_seqlens_q is None and q.dim() == 4:
            counts = [q.shape[1]] * len(rows)
            if isinstance(k_new, torch.Tensor) and k_new.dim() == 4:
                appended = [k_new.shape[1]] * len(rows)
        left = -1 if window_size is None else window_size[0]
        cached_calls.check_records(cache, rows, counts, appended, left, max_seqlen_k)
    longest = (cached_calls.longest_query(q, cu_seqlens_q, lengths, max_seqlen_q), max_seqlen_k or 0)
    said = (causal, window_size, softcap, softmax_scale, precision, return_lse)
    # 1 == True, so the key includes the type of causal. Rotated queries are in a separate tensor.
    full = (said, causal.__class__, num_splits, batch_invariant, shared_prefix, kernel, config, rotary is None)
    if out is not None:
        check_out_is_writable(out)
    run = plans.recall(operands, full, longest, out)
    writes = k_new is not None or v_new is not None or rotary is not None
    if run is not None and not (writes or checked):
        out, lse = run(operands) if out is None else run(operands, out)
        return (out, lse) if return_lse else out
    given = (*operands, k_new, v_new, *(rotary if isinstance(rotary, Rotary) else ()))
    cached_calls.check_transforms(given)
    wanting = cached_calls.wanting_gradients(given)
    serving = cached_calls.Serving(num_splits, batch_invariant, shared_prefix)
    if q.is_neg():
        operands = operands._replace(q=q.resolve_neg())
    key = plans.plan_key((*operands, out), (full, longest)) if run is None else None
    known = run or plans.find(key)
    if known is None or checked:
        options = options_of(operands, *said, 0.0, None, None, *longest)
        cached_calls.check(operands, options, serving)
    new = cached_calls.NewTokens(operands)
    if writes:
        new = cached_calls.prepare_new(cache, operands, longest[0], rows, k_new, v_new, rotary, lengths)
        if out is not None:
            cached_calls.check_apart_from_new(out, operands, k_new, v_new, rotary, wanting)
    if checked:
        cached_calls.check_contents(operands, new, options, serving, lengths, k_new, rotary)
    asked, operands = operands, new.operands  # they differ if queries are rotated; `recall` compares `asked`
    if run is None:
        attended = operands

        @functools.cache
        def planner() -> cached_calls.Planner:
            return cached_calls.Planner(options_of(asked, *said, 0.0, None, None, *longest), serving, kernel, config)

        run = known or plans.planned(key, lambda: planner().first(attended, out))
        if key is not None and not wanting:
            plans.remember(asked, full, longest, run, planner if attended is asked else None, out)
    with new.written():  # the first change; it is undone if a kernel fails
        out, lse = run(operands) if out is None else run(operands, out)
    if wanting:
        out, lse = cached_calls.refusing_gradients((out, lse), wanting)
    return (out, lse) if return_lse else out


def _check_contents(operands: Any, said: tuple[Any, ...], longest: tuple[int, ...] = ()) -> None:
    """Raises InvalidInput if offsets or factors have contents that no call can have; waits for the device. The
    arguments are those of `_call`."""
    *scalars, _, _, _ = said
    options = options_of(operands, *scalars, *longest)
    describe_call(settled(operands), options)
    if longest:
        check_packed_lengths(operands, options)
    if isinstance(operands, QuantizedOperands):
        descales.check_contents(operands)


def _with_seed(operands: Operands, dropout_p: float, seed: torch.Tensor | None) -> AnyOperands:
    """Returns the operands of a call with dropout, whose seed is drawn if None. If q is not a tensor, the operands stay
    as they are, and the checks of the call raise the error."""
    dropout.check_probability(dropout_p)
    if seed is None:
        if not isinstance(operands.q, torch.Tensor):
            return operands
        seed = dropout.draw_seed(operands.q.device)
    return DropoutOperands(*operands, seed)


def _call(
    operands: Any, said: tuple[Any, ...], longest: tuple[int, ...] = (), out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs a call that `plans.recall` did not find. It reuses the plan of an equal earlier call; if there is none, it
    checks the arguments and makes one.

    Args:
        said: the arguments of `options_of` after the operands, as the caller gave them; the class of causal; the
            kernel; its config.
        longest: max_seqlen_q and max_seqlen_k of a packed call.
    """
    *scalars, _, kernel, config = said
    operands = settled(operands)
    if autograd.is_eager() and (key := plans.plan_key((*operands, out), (said, longest))) is not None:

        @functools.cache
        def planner() -> plans.Planner:
            return plans.Planner(options_of(operands, *scalars, *longest), kernel, config)

        run = plans.planned(key, lambda: planner().first(operands, out))
        plans.remember(operands, said, longest, run, planner, out)
        return run(operands) if out is None else run(operands, out)
    check_are_tensors(operands)
    if out is not None and not autograd.is_compiling() and autograd.transforms() is not None:
        raise UnsupportedProblem(
            "out was given inside a transform of torch.func, which cannot follow a write to it",
            {},
            "the call without out",
        )
    # An operator's plans read from the options alone whether a tensor, or out, requires a gradient.
    chosen, encoded = options_of((*operands, out), *scalars, *longest), ops.encode_config(config)
    if isinstance(operands, QuantizedOperands):
        if out is None:
            return torch.ops.warpwave.quantized_attention(*operands, *chosen, kernel, encoded)
        return out, torch.ops.warpwave.quantized_attention_out(*operands, *chosen, kernel, encoded, out)
    probability = None
    if autograd.is_compiling() and (probability := autograd.changing_probability(chosen.dropout_p)) is not None:
        chosen = chosen._replace(dropout_p=0.0)
    tensors = autograd.schema_tensors(operands, probability)
    if out is not None:
        return out, torch.ops.warpwave.attention_out(*tensors, *chosen, kernel, encoded, out)
    if not autograd.is_compiling() and autograd.is_transformed():
        out, lse = autograd.transformed(*tensors, *chosen._replace(needs_grad=True), kernel, encoded)
    else:
        out, lse = torch.ops.warpwave.attention(*tensors, *chosen, kernel, encoded)
    return out, lse


def warmup(
    problems: Iterable[AttentionProblem], device: torch.device | str = "cuda", *, workers: int = 1, **options: Any
) -> int:
    """Compiles what calls will need, before requests arrive or a CUDA graph is captured.

    Args:
        problems: problems of dense, packed or cached calls. Tensors are assumed contiguous; K and V of a cached problem
            are in a pool as `PagedKVCache` makes it, and its call names its rows. With `requires_grad`, gradients of
            q, k, v and sinks are compiled too: they are computed once, of zeros. With `return_lse`, they are compiled
            with and without a gradient of the log-sum-exp. Gradients of a bias and of ALiBi slopes compile in their
            first backward.
        device: device of the calls; without a number, the current one.
        workers: threads that compile. LLVM and ptxas, which take most of the time, release Python's lock. Each thread
            allocates the tensors of one problem at a time.
        options: `kernel`, `config`, and for cached problems `num_splits`, with the calls' values.

    Returns:
        How many plans were made.

    Raises:
        UnsupportedProblem: naming the problem that no kernel, or not the requested one, can run. Nothing is compiled.
        InvalidInput: `workers` is not positive, no call can have an option or a problem, or the device is a GPU and
            there is none.
        InvalidType: `problems` is no sequence, such as a single problem, or `workers` or `num_splits` is not an
            integer.
    """
    if isinstance(problems, AttentionProblem) or not isinstance(problems, Iterable):
        raise InvalidType(f"problems is of type {type(problems).__name__}; it must be a sequence of AttentionProblem")
    unknown = options.keys() - {"kernel", "config", "num_splits"}
    if unknown:
        raise InvalidInput(f"warmup takes kernel, config and num_splits; {', '.join(sorted(unknown))} is none of them")
    if as_int("workers", workers) < 1:
        raise InvalidInput(f"workers is {workers}; it must be at least 1")
    device = present_device(device)
    if device == torch.device("cuda"):  # threads begin with device 0
        device = torch.device("cuda", torch.cuda.current_device())
    kernel, config, num_splits = options.get("kernel", "auto"), options.get("config"), options.get("num_splits")
    num_splits = None if num_splits is None else as_int("num_splits", num_splits)
    gpu, chosen = current_gpu(device), []
    for problem in problems:
        check_problem(problem)
        serving = cached_calls.Serving(num_splits, problem.batch_invariant)
        cached_calls.check_splits(serving)
        forward, gradients = dispatch.forward_of(problem, gpu, kernel)
        if problem.page_size:
            choice = cached_calls.choose(problem, gpu, serving, kernel, config)
        else:
            choice = dispatch.choose(forward, gpu, kernel, config)
        if problem.rows and problem.batch:
            chosen.append((problem, forward, choice, gradients))

    def compile_for(
        problem: AttentionProblem, forward: AttentionProblem, choice: dispatch.Choice, gradients: str
    ) -> None:
        operands = cached_calls.blank_operands(problem, device)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            choice.kernel.bind(forward, operands, choice.config)
            if gradients:  # their kernels compile in the first run; eager's gradients compile nothing
                wanted = (True, True, True, False, False, problem.has_sinks)
                compute = autograd.bind_gradients(problem, gpu, operands, wanted, kernel)
                out = operands.q.new_zeros((*operands.q.shape[:-1], problem.head_dim_v))
                lse = operands.q.new_zeros(plans.lse_shape(problem.packed, operands.q), dtype=torch.float32)
                for dlse in (None, lse) if problem.return_lse else (None,):
                    compute(operands, (out, lse), out, dlse)

    with ThreadPoolExecutor(workers) as pool:
        return sum(1 for _ in pool.map(compile_for, *zip(*chosen, strict=True)))
