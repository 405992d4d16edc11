"""Attention as three torch calls: baddbmm, softmax, bmm. The scores are in memory, in the dtype of the inputs.

The two products run at the speed of the vendor's matrix multiplication, which is hard to beat at large head_dim. With
16-bit inputs the scores are rounded to 16 bits, an error that flash kernels do not have and that our gates reject. It
is timed and marked as inaccurate, and never counts as the best peer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from warpwave.operands import Operands
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.peers.peer import PeerUnavailable, Prepared, refuse_features

CHUNK_SCORE_BYTES = 1 << 30  # limit of the scores of the heads in one batch


def prepare(problem: AttentionProblem, operands: Operands) -> Prepared:
    """Prepares baddbmm, softmax and bmm, over as many heads at once as fit."""
    refuse_features(problem, ("a sliding window",))
    q, k, v = (_per_head(x, problem.num_heads_q) for x in operands[:3])  # [batch * num_heads_q, seqlen, width]
    score_bytes = problem.seqlen_q * problem.seqlen_k * q.element_size()
    if score_bytes > CHUNK_SCORE_BYTES:
        raise PeerUnavailable(f"the scores of one head alone would take {score_bytes / 2**30:.1f} GiB")
    heads_at_once = CHUNK_SCORE_BYTES // score_bytes
    hidden = _hidden(problem, q)

    def call() -> Tensor:
        chunks = []
        for start in range(0, q.shape[0], heads_at_once):
            heads = slice(start, start + heads_at_once)
            scores = torch.baddbmm(
                hidden, q[heads], k[heads].transpose(1, 2), beta=int(problem.has_band), alpha=problem.softmax_scale
            )
            chunks.append(torch.bmm(torch.softmax(scores, dim=-1), v[heads]))
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    call()

    def to_out(out: Tensor) -> Tensor:
        heads_first = out.view(problem.batch, problem.num_heads_q, problem.seqlen_q, problem.head_dim_v)
        return heads_first.transpose(1, 2)

    return Prepared(call, to_out, kernel="baddbmm, softmax, bmm", eager=True, timed_if_wrong=True)


def _per_head(x: Tensor, num_heads_q: int) -> Tensor:
    """Returns [batch * num_heads_q, seqlen, width], contiguous; kv heads are repeated for their query heads."""
    x = x.transpose(1, 2).repeat_interleave(num_heads_q // x.shape[2], dim=1)
    return x.flatten(0, 1).contiguous()


def _hidden(problem: AttentionProblem, q: Tensor) -> Tensor:
    """Returns the summand of baddbmm: 0 for visible pairs, else minus infinity; [1, seqlen_q, seqlen_k]."""
    if not problem.has_band:
        return q.new_zeros(1, 1, 1)
    distance = (
        torch.arange(problem.seqlen_k, device=q.device) - torch.arange(problem.seqlen_q, device=q.device)[:, None]
    )
    band = problem.band(problem.seqlen_q, problem.seqlen_k)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if band.low is not None:
        hidden |= distance < band.low
    if band.high is not None:
        hidden |= distance > band.high
    return q.new_zeros(1, 1, 1).masked_fill(hidden, -torch.inf)
