"""Reads a cache's tables and factors for `checked=True`, which waits for the device."""

from __future__ import annotations

import itertools

import torch

from warpwave.checks.calls import check_offsets
from warpwave.errors import InvalidInput
from warpwave.kernels import cache_descales
from warpwave.operands import CachedOperands
from warpwave.problem import AttentionProblem


def check_cache_contents(
    problem: AttentionProblem, operands: CachedOperands, present_table: torch.Tensor, num_new: int = 0
) -> None:
    """Reads a cache's tables and factors and refuses contents that would be read incorrectly. Factors of new tokens, or
    of the queries' own tokens if none are known, are not read, because these tokens may not be written yet.

    Args:
        operands: with the page table and the lengths that the call will see.
        present_table: the page table before the call. A page that the call will copy has its contents there.
        num_new: the tokens that the call writes for each sequence; 0 if it writes none, or packed ones.

    Raises:
        InvalidInput: naming the first index that is wrong.
    """
    table, num_pages, page_size = operands.page_table, operands.k.shape[0], problem.page_size
    capacity = table.shape[1] * page_size
    seqlens_q = [problem.seqlen_q] * problem.batch
    if operands.cu_seqlens_q is not None:
        offsets = operands.cu_seqlens_q.tolist()
        check_offsets("cu_seqlens_q", offsets, operands.q.shape[0], problem.seqlen_q)
        seqlens_q = [end - begin for begin, end in itertools.pairwise(offsets)]
    rows = list(range(problem.batch)) if operands.rows is None else operands.rows.tolist()
    used, pages = operands.seqused_k.tolist(), table.tolist()
    cells = []  # of the tokens before the queries that some query sees
    for b, (row, seqlen_q) in enumerate(zip(rows, seqlens_q, strict=True)):
        if not 0 <= row < len(used):
            raise InvalidInput(f"rows[{b}] is {row}; the cache has {len(used)} rows")
        if not 0 <= used[row] <= capacity:
            raise InvalidInput(
                f"seqused_k[{row}] is {used[row]}; a row of the page table holds {table.shape[1]} pages of {page_size},"
                f" {capacity} tokens"
            )
        if used[row] < num_new:
            raise InvalidInput(f"seqused_k[{row}] is {used[row]}, less than the {num_new} new tokens that it includes")
        if used[row] > problem.seqlen_k:
            raise InvalidInput(f"seqused_k[{row}] is {used[row]}, more than max_seqlen_k = {problem.seqlen_k}")
        low, high = problem.band(seqlen_q, used[row])
        first = 0 if low is None else max(0, low)
        last = used[row] if high is None else min(used[row], seqlen_q + high)
        for i in range(first // page_size, -(-last // page_size) if last > first else 0):
            if not 0 <= pages[row][i] < num_pages:
                raise InvalidInput(f"page_table[{row}, {i}] is {pages[row][i]}; the cache has {num_pages} pages")
        if problem.kv_factors == "token":
            written = used[row] - (num_new or seqlen_q)
            positions = torch.arange(first, max(first, min(last, written)), device=table.device)
            cells.append((present_table[row, positions // page_size].long(), positions % page_size))
    cache_descales.check_contents(operands, cells)
