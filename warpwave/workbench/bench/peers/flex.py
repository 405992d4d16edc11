"""FlexAttention, compiled for the shape at hand, its masks given as functions and its block mask built beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from warpwave.problem import AttentionProblem, Band, Operands
from warpwave.workbench.bench.peers.peer import PeerUnavailable, Prepared, refuse_cpu, refuse_features

MASK_PAIRS = 1 << 31  # beyond, the full mask that is summed up into blocks would not fit: compiled, it is never built

Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_attention(problem: AttentionProblem, operands: Operands) -> Prepared:
    """`torch.nn.attention.flex_attention.flex_attention` under `torch.compile`: seconds of compilation a shape."""
    refuse_features(problem, ("packed sequences", "a sliding window", "softcap"))
    refuse_cpu(operands)
    from torch.nn.attention.flex_attention import create_block_mask

    tensors = (x.unsqueeze(0) if problem.packed else x for x in operands[:3])
    q, k, v = (x.transpose(1, 2).contiguous() for x in tensors)
    visible = visible_pairs(problem, operands)
    block_mask = None
    if visible is not None:
        pairs = q.shape[2] * k.shape[2]
        create = create_block_mask if pairs <= MASK_PAIRS else torch.compile(create_block_mask)
        block_mask = create(visible, None, None, q.shape[2], k.shape[2], device=q.device)
    call = partial(
        _compiled(problem),
        q,
        k,
        v,
        score_mod=_softcap(problem.softcap) if problem.softcap else None,
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
    """The problem's masks as FlexAttention takes them, `(batch, head, query, key) -> visible`; None shows all."""
    if problem.packed:
        return _packed(problem, operands)
    return _band(problem.band(problem.seqlen_q, problem.seqlen_k)) if problem.has_band else None


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
    """Each token sees its own sequence: looked up by token, with the positions both have in it."""
    starts_q, starts_k = (x.long() for x in (operands.cu_seqlens_q, operands.cu_seqlens_k))
    index = torch.arange(problem.batch, device=starts_q.device)
    sequence_q, sequence_k = index.repeat_interleave(starts_q.diff()), index.repeat_interleave(starts_k.diff())
    low, high = problem.band(0, 0)  # with equal lengths, where the diagonal is the same in every sequence
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


def _softcap(softcap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


@cache
def _last_compiled() -> dict[str, Any]:
    return {}


def _compiled(problem: AttentionProblem) -> Any:
    """FlexAttention compiled anew for each problem, and once for all sets of inputs of the same one.

    torch keeps what it compiled by function and gives up after a few shapes, to run uncompiled from then on; so what
    an earlier problem left is forgotten.
    """
    from torch.nn.attention.flex_attention import flex_attention as uncompiled

    kept = _last_compiled()
    # Precision is ours to choose, and makes no other kernel of theirs.
    problem = replace(problem, precision="default", error_budget=None)
    if kept.get("problem") != problem:
        torch.compiler.reset()
        kept.update(problem=problem, function=torch.compile(uncompiled, dynamic=False, fullgraph=True))
    return kept["function"]
