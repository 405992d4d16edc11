"""Calls on a paged cache as the packed calls they are: what has no page tables of its own (eager, the references, the
checks of contents) reads them so, by gathering the pages on the host's word of the lengths."""

from __future__ import annotations

from dataclasses import replace

import torch

from warpwave.problem import AttentionProblem, CachedOperands, Operands


def as_packed(problem: AttentionProblem, operands: CachedOperands) -> tuple[AttentionProblem, Operands]:
    """The same call with the keys and values of each sequence gathered and packed. Waits for the device.

    Lengths and page ids that are none are clamped, as the kernels do.

    Raises:
        RuntimeError: a CUDA graph is being captured, which cannot record what the host reads.
    """
    q, k, v = operands[:3]
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("kernel 'eager' reads a cache's lengths on the host, which a CUDA graph cannot capture")
    page_size, capacity = problem.page_size, min(problem.seqlen_k, operands.page_table.shape[1] * problem.page_size)
    rows = torch.arange(problem.batch, device=q.device)
    if operands.rows is not None:
        rows = operands.rows.long().clamp(0, len(operands.page_table) - 1)
    lengths = operands.seqused_k[rows].clamp(0, capacity)
    keys, values = [k.new_empty(0, *k.shape[2:])], [v.new_empty(0, *v.shape[2:])]
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        positions = torch.arange(length, device=q.device)
        pages = operands.page_table[row, positions // page_size].long().clamp(0, len(k) - 1)
        keys.append(k[pages, positions % page_size])
        values.append(v[pages, positions % page_size])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    cu_seqlens_q = operands.cu_seqlens_q
    if not problem.packed:
        cu_seqlens_q = torch.arange(problem.batch + 1, device=q.device, dtype=torch.int32) * problem.seqlen_q
        q = q.flatten(0, 1)
    packed = replace(
        problem,
        packed=True,
        page_size=0,
        total_q=q.shape[0],
        total_k=int(lengths.sum()),
        lengths=tuple(zip(cu_seqlens_q.diff().tolist(), lengths.tolist(), strict=True)),
    )
    slopes, sinks = operands.alibi_slopes, operands.sinks
    return packed, Operands(q, torch.cat(keys), torch.cat(values), None, None, slopes, sinks, cu_seqlens_q, offsets)


def as_cached(
    problem: AttentionProblem, out: torch.Tensor, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the packed call returned, in the shapes of the call on the cache that it stands for."""
    if problem.packed:
        return out, lse
    out = out.unflatten(0, (problem.batch, problem.seqlen_q))
    if lse is not None:
        lse = lse.unflatten(1, (problem.batch, problem.seqlen_q)).transpose(0, 1).contiguous()
    return out, lse
