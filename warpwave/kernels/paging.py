"""Converts calls on a paged cache to packed calls for a kernel that reads no page tables (eager): the pages of each
sequence are gathered. Also clamps numbers that the host reads from the device, before they are used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from warpwave.kernels import cache_descales
from warpwave.operands import CachedOperands, Operands
from warpwave.problem import AttentionProblem


def offsets_within(cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    """Returns offsets of packed sequences as int64 that begin at 0, end at `total` or before, and do not decrease.

    Valid offsets are returned unchanged. Others, over the whole range of int32, become valid, so that the code that
    uses them neither allocates by invalid sizes nor leaves the tensors. Tokens after the last offset belong to no
    sequence, as in the kernels: an engine's q has room for more tokens than a step brings.
    """
    offsets = cu_seqlens.long().clamp(0, total).cummax(0).values
    offsets[0] = 0
    return offsets


def as_packed(problem: AttentionProblem, operands: CachedOperands) -> tuple[AttentionProblem, Operands]:
    """Returns the same call with the keys and values of each sequence gathered and packed, in float32 if the cache has
    8-bit numbers. Waits for the device.

    Offsets, rows, lengths and page ids may be any int32; the packed call is always valid.

    Raises:
        RuntimeError: a CUDA graph is being captured, which cannot record what the host reads.
    """
    q, k, v = operands[:3]
    dtype = q.dtype if problem.dtype_kv is None else torch.float32
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("kernel 'eager' reads a cache's lengths on the host, which a CUDA graph cannot capture")
    page_size, capacity = problem.page_size, min(problem.seqlen_k, operands.page_table.shape[1] * problem.page_size)
    rows = torch.arange(problem.batch, device=q.device)
    if operands.rows is not None:
        rows = operands.rows.long().clamp(0, len(operands.page_table) - 1)
    lengths = operands.seqused_k[rows].long().clamp(0, capacity)
    keys, values = [q.new_empty(0, *k.shape[2:], dtype=dtype)], [q.new_empty(0, *v.shape[2:], dtype=dtype)]
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        positions = torch.arange(length, device=q.device)
        pages = operands.page_table[row, positions // page_size].long().clamp(0, len(k) - 1)
        cells = (pages, positions % page_size)
        keys.append(cache_descales.of_cells(k, operands.k_descale, cells, dtype))
        values.append(cache_descales.of_cells(v, operands.v_descale, cells, dtype))
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    if problem.packed:
        cu_seqlens_q = offsets_within(operands.cu_seqlens_q, len(q)).to(torch.int32)
    else:
        cu_seqlens_q = torch.arange(problem.batch + 1, device=q.device, dtype=torch.int32) * problem.seqlen_q
        q = q.flatten(0, 1)
    packed = replace(
        problem,
        packed=True,
        page_size=0,
        dtype=str(dtype).removeprefix("torch."),
        dtype_kv=None,
        kv_factors=None,
        total_q=q.shape[0],
        total_k=int(lengths.sum()),
        lengths=tuple(zip(cu_seqlens_q.diff().tolist(), lengths.tolist(), strict=True)),
    )
    slopes, sinks = operands.alibi_slopes, operands.sinks
    return packed, Operands(
        q.to(dtype), torch.cat(keys), torch.cat(values), None, None, slopes, sinks, cu_seqlens_q, offsets
    )


def one_by_one(problem: AttentionProblem, operands: Operands) -> Iterator[tuple[AttentionProblem, Operands]]:
    """Yields each sequence of a packed call as a packed call of one sequence, its tensors copied."""
    at_q = at_k = 0
    for b, (seqlen_q, seqlen_k) in enumerate(problem.lengths or ()):
        q = operands.q[at_q : at_q + seqlen_q].clone()
        k, v = (t[at_k : at_k + seqlen_k].clone() for t in (operands.k, operands.v))
        at_q, at_k = at_q + seqlen_q, at_k + seqlen_k
        slopes = operands.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b : b + 1]
        ends = (torch.tensor([0, n], dtype=torch.int32, device=q.device) for n in (seqlen_q, seqlen_k))
        one = replace(
            problem, batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, total_q=seqlen_q, total_k=seqlen_k,
            lengths=((seqlen_q, seqlen_k),), alibi_shape=None if slopes is None else tuple(slopes.shape),
        )  # fmt: skip
        yield one, Operands(q, k, v, None, None, slopes, operands.sinks, *ends)


def as_cached(
    problem: AttentionProblem, out: torch.Tensor, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the packed call's results in the shapes of the original call on the cache."""
    if problem.packed:
        return out, lse
    out = out.unflatten(0, (problem.batch, problem.seqlen_q))
    if lse is not None:
        lse = lse.unflatten(1, (problem.batch, problem.seqlen_q)).transpose(0, 1).contiguous()
    return out, lse
