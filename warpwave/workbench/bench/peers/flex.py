"""FlexAttention, compiled per shape. Masks, biases, ALiBi and softcap are functions, and the block mask is built before
timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from warpwave.operands import Operands
from warpwave.problem import AttentionProblem, Band
from warpwave.workbench.bench.peers.peer import (
    PeerUnavailable,
    Prepared,
    refuse_cpu,
    refuse_features,
    with_four_axes,
)

MASK_PAIRS = 1 << 31  # above this the full mask would not fit in memory; a compiled block mask does not need it

Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_attention(problem: AttentionProblem, operands: Operands) -> Prepared:
    """Prepares `torch.nn.attention.flex_attention.flex_attention` under `torch.compile`, seconds per shape."""
    supported = ("packed sequences", "a sliding window", "softcap")
    of_dense = ("a boolean mask", "an additive bias", "ALiBi")
    refuse_features(problem, supported if problem.packed else (*supported, *of_dense))
    refuse_cpu(operands)
    from torch.nn.attention.flex_attention import create_block_mask

    tensors = (x.unsqueeze(0) if problem.packed else x for x in operands[:3])
    q, k, v = (x.transpose(1, 2).contiguous() for x in tensors)
    visible = visible_pairs(problem, operands)
    block_mask = None
    if visible is not None:
        pairs = q.shape[2] * k.shape[2]
        create = create_block_mask if pairs <= MASK_PAIRS else torch.compile(create_block_mask)
        sizes = (1, 1) if operands.mask is None else with_four_axes(operands.mask).shape[:2]
        batch, heads = (size if size > 1 else None for size in sizes)  # None: the same for all
        block_mask = create(visible, batch, heads, q.shape[2], k.shape[2], device=q.device)
    call = partial(
        _compiled(problem),
        q,
        k,
        v,
        score_mod=changed_scores(problem, operands),
        block_mask=block_mask,
        scale=problem.softmax_scale,
        enable_gqa=problem.num_heads_q != problem.num_heads_kv,
    )

    @torch.no_grad()
    def attend() -> Any:
        return call()

    try:
        attend()
    except Exception as error:
        raise PeerUnavailable(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
    return Prepared(
        attend,
        to_out=lambda out: out.transpose(1, 2).squeeze(0) if problem.packed else out.transpose(1, 2),
        kernel="flex_attention, compiled",
        eager=True,
    )


def visible_pairs(problem: AttentionProblem, operands: Operands) -> Visible | None:
    """Returns the masks for FlexAttention, `(batch, head, query, key) -> visible`; None if every pair is visible."""
    if problem.packed:
        return _packed(problem, operands)
    by_position = _band(problem.band(problem.seqlen_q, problem.seqlen_k)) if problem.has_band else None
    if operands.mask is None:
        return by_position
    at = _reader(operands.mask)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        shown = at(b, h, q, k)
        return shown if by_position is None else shown & by_position(b, h, q, k)

    return visible


def _reader(x: Tensor) -> Visible:
    """Returns a function that reads a mask or a bias, whose axes of size 1 are the same for all."""
    whole = with_four_axes(x.detach())

    def at(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return whole[tuple(i if size > 1 else i - i for i, size in zip((b, h, q, k), whole.shape, strict=True))]

    return at


def _band(band: Band) -> Visible:
    low, high = band

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        shown = k == k
        if low is not None:
            shown = shown & (k - q >= low)
        if high is not None:
            shown = shown & (k - q <= high)
        return shown

    return visible


def _packed(problem: AttentionProblem, operands: Operands) -> Visible:
    """Returns the mask of packed sequences, from tables of each token's sequence and position."""
    starts_q, starts_k = (x.long() for x in (operands.cu_seqlens_q, operands.cu_seqlens_k))
    index = torch.arange(problem.batch, device=starts_q.device)
    sequence_q, sequence_k = index.repeat_interleave(starts_q.diff()), index.repeat_interleave(starts_k.diff())
    low, high = problem.band(0, 0)  # for equal lengths, which have the same diagonal in every sequence
    if problem.has_band and any(seqlen_q != seqlen_k for seqlen_q, seqlen_k in problem.items()):
        raise PeerUnavailable("not compared on masks by position in packed sequences with seqlen_q != seqlen_k")

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        shown = sequence_q[q] == sequence_k[k]
        distance = (k - starts_k[sequence_k[k]]) - (q - starts_q[sequence_q[q]])
        if low is not None:
            shown = shown & (distance >= low)
        if high is not None:
            shown = shown & (distance <= high)
        return shown

    return visible


def changed_scores(problem: AttentionProblem, operands: Operands) -> Callable[..., Tensor] | None:
    """Returns the `score_mod` of softcap, bias and ALiBi, in this order; None without them."""
    softcap, slopes = problem.softcap, operands.alibi_slopes
    bias = None if operands.bias is None else _reader(operands.bias)
    alibi = None if slopes is None else _reader(slopes.detach()[..., None, None])
    diagonal = problem.seqlen_k - problem.seqlen_q
    if not softcap and bias is None and alibi is None:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = score + bias(b, h, q, k)
        if alibi is not None:
            score = score - alibi(b, h, q, k) * (k - q - diagonal).abs()
        return score

    return score_mod


@cache
def _last_compiled() -> dict[str, Any]:
    return {}


def _compiled(problem: AttentionProblem) -> Any:
    """Returns FlexAttention compiled for this problem; its sets of inputs share the compiled function.

    torch caches compiled code per function and runs uncompiled after a few shapes, so the cache of an earlier problem
    is cleared.
    """
    from torch.nn.attention.flex_attention import flex_attention as uncompiled

    kept = _last_compiled()
    # The precision is a setting of ours, not another kernel.
    problem = replace(problem, precision="default", error_budget=None)
    if kept.get("problem") != problem:
        torch.compiler.reset()
        kept.update(problem=problem, function=torch.compile(uncompiled, dynamic=False, fullgraph=True))
    return kept["function"]
