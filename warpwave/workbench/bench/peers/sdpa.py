"""torch's own attention: `scaled_dot_product_attention`, with its own or a forced backend, and `varlen_attn`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from warpwave.operands import Operands
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.peers.peer import (
    OperatorNames,
    PeerUnavailable,
    Prepared,
    refuse_cpu,
    refuse_features,
    with_four_axes,
)

MATH_SCORE_BYTES = 4 << 30  # limit of the scores in memory


def sdpa(backend: SDPBackend | None, problem: AttentionProblem, operands: Operands) -> Prepared:
    """Prepares `torch.nn.functional.scaled_dot_product_attention`; None leaves the backend to torch."""
    refuse_features(problem, ("gradients", "a boolean mask", "an additive bias"))
    causal = problem.causal
    if causal is not None and causal.alignment == "bottom_right" and problem.seqlen_q != problem.seqlen_k:
        raise PeerUnavailable(
            f"its causal mask is aligned to the first key, ours to the last: they differ at seqlen "
            f"{problem.seqlen_q} x {problem.seqlen_k}"
        )
    if backend in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        refuse_cpu(operands)
    if backend is SDPBackend.MATH:
        score_bytes = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_k * 4
        if score_bytes > MATH_SCORE_BYTES:
            raise PeerUnavailable(f"its scores in memory would take {score_bytes / 2**30:.1f} GiB")

    # Flash and efficient attention use (batch, seqlen, heads, dim) internally, so they get a view of our layout. cuDNN
    # takes any strides and math multiplies per head, so they get contiguous heads, as torch's users have them.
    views = backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    heads = (x.detach().transpose(1, 2) for x in operands[:3])
    q, k, v = ((x if views else x.contiguous()).requires_grad_(problem.requires_grad) for x in heads)
    added = attn_mask(problem, operands)
    attend = partial(
        scaled_dot_product_attention,
        q,
        k,
        v,
        attn_mask=added,
        is_causal=problem.causal is not None and added is None,
        scale=problem.softmax_scale,
        enable_gqa=problem.num_heads_q != problem.num_heads_kv,
    )

    def forced(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return attend()

    call = attend if backend is None else partial(forced, backend)
    return Prepared(
        call,
        to_out=lambda out: out.transpose(1, 2),
        kernel=operator_behind(call),
        eager=backend is None,  # users force a backend once for many calls, not in each
    )


def attn_mask(problem: AttentionProblem, operands: Operands) -> Tensor | None:
    """Returns SDPA's `attn_mask` of four axes: the boolean mask, or the bias with minus infinity where a pair is
    hidden. SDPA refuses a causal mask beside it, so it includes that. None without a mask and a bias."""
    mask, bias = operands.mask, operands.bias
    if mask is None and bias is None:
        return None
    if problem.causal is not None:
        rows, keys = (torch.arange(n, device=operands.q.device) for n in (problem.seqlen_q, problem.seqlen_k))
        shown = keys <= rows[:, None]  # both alignments: lengths that tell them apart are refused
        mask = shown if mask is None else mask & shown
    if bias is not None:
        bias = bias.detach().to(operands.q.dtype)
        added = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    else:
        assert mask is not None
        added = mask
    return with_four_axes(added)


def varlen(problem: AttentionProblem, operands: Operands) -> Prepared:
    """Prepares `torch.nn.attention.varlen.varlen_attn`, torch's FlashAttention on packed sequences."""
    if not problem.packed:
        raise PeerUnavailable("it is for packed sequences")
    refuse_features(problem, ("packed sequences", "a sliding window"))
    refuse_cpu(operands)
    if problem.causal is not None and problem.window_size != (-1, -1):
        raise PeerUnavailable("it takes a causal mask or a window")
    if problem.causal is not None and problem.causal.alignment == "top_left" and not _square(problem):
        raise PeerUnavailable("its causal mask is aligned to the last key")
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": problem.softmax_scale}
    options["window_size"] = problem.window_size if problem.causal is None else (-1, 0)
    if problem.num_heads_q != problem.num_heads_kv:
        options["enable_gqa"] = True
    call = partial(
        varlen_attn,
        *operands[:3],
        operands.cu_seqlens_q,
        operands.cu_seqlens_k,
        problem.seqlen_q,
        problem.seqlen_k,
        **options,
    )
    try:
        call()
    except TypeError as error:  # torch 2.10 takes no scale or window, 2.11 no grouped heads
        raise PeerUnavailable(f"this varlen_attn does not support the call: {str(error).splitlines()[0]}") from error
    return Prepared(call, to_out=lambda out: out, kernel="varlen_attn", eager=True)


def _square(problem: AttentionProblem) -> bool:
    return all(seqlen_q == seqlen_k for seqlen_q, seqlen_k in problem.items())


def operator_behind(call: Callable[[], Any]) -> str:
    """Runs the call once and returns the operator that ran. A backend that refuses warns with reasons, then raises."""
    with warnings.catch_warnings(record=True) as caught, OperatorNames() as operators:
        warnings.simplefilter("always")
        try:
            call()
        except RuntimeError as error:
            reasons = [str(w.message).partition("(Triggered internally")[0].strip() for w in caught]
            reasons = [r for r in reasons if not r.endswith("because:")]  # headings of the reasons that follow
            raise PeerUnavailable("; ".join(reasons) or str(error).splitlines()[0]) from error
    found = next((name for name in reversed(operators.names) if "attention" in name), "math")
    return found.removeprefix("_scaled_dot_product_")
