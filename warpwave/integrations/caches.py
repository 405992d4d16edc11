"""Presents caches of other libraries as pages that warpwave's kernels read: views and page tables, never copies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from warpwave.checks.calls import bind_axes
from warpwave.errors import InvalidInput, InvalidType
from warpwave.runtime.bounded import Bounded

MAX_TABLES = 256
_tables: Bounded[tuple[int, int, int, torch.device], torch.Tensor] = Bounded(MAX_TABLES)

INT32, FLOATS = (torch.int32,), (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Arguments, by FlashAttention-2's names, whose dtype is not that of q.
DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "cache_seqlens", "cache_leftpad"), INT32),
    "block_table": INT32,
    "cache_batch_idx": (torch.int32, torch.int64),
    "rotary_cos": FLOATS,
    "rotary_sin": FLOATS,
}


def wrong_argument(
    function: str, given: Mapping[str, tuple[Any, str]], names: Mapping[str, str]
) -> InvalidInput | InvalidType | None:
    """Returns the error of the first tensor of a refused call that does not fit, under its caller's name; None if all
    fit. The core checks every call, but its messages name its own arguments.

    Args:
        function: the caller's function, for messages.
        given: argument, by FlashAttention-2's name -> (its value, the names of its axes). The first is q. Offsets,
            whose axis is "batch+1", come before what has the axis "batch".
        names: argument -> the caller's name of it, where that differs.
    """
    try:
        _check_tensors(function, given, names)
    except (InvalidInput, InvalidType) as error:
        return error
    return None


def _check_tensors(function: str, given: Mapping[str, tuple[Any, str]], names: Mapping[str, str]) -> None:
    axes: dict[str, tuple[int, str]] = {}
    q = given["q"][0]
    for name, (tensor, pattern) in given.items():
        said = names.get(name, name)
        if not isinstance(tensor, torch.Tensor):
            raise InvalidType(f"{function}: {said} is a {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise InvalidType(f"{function}: {said} is a sparse or nested tensor; it must be a plain strided one")
        if name in DTYPES:
            if tensor.dtype not in DTYPES[name]:
                allowed = " or ".join(map(str, DTYPES[name]))
                raise InvalidType(f"{function}: {said} is {tensor.dtype}; it must be {allowed}")
        elif tensor.dtype != q.dtype:
            of_q = names.get("q", "q")
            raise InvalidType(f"{function}: {said} is {tensor.dtype} and {of_q} {q.dtype}; they must share one dtype")
        if tensor.device != q.device:
            raise InvalidInput(f"{function}: {said} is on {tensor.device}; it must be on {q.device}, as all tensors")
        bind_axes(said, tensor, pattern, axes)
        if pattern == "batch+1":
            if not len(tensor):
                raise InvalidInput(f"{function}: {said} is empty; it must hold batch + 1 offsets, the first of them 0")
            axes["batch"] = len(tensor) - 1, said
    (batch, of_batch), (rows, of_rows) = axes["batch"], axes.get("cache_rows", (0, ""))
    if of_rows and "cache_batch_idx" not in given and batch > rows:
        raise InvalidInput(
            f"{function}: {of_batch} has {batch} sequences and {of_rows} {rows} rows; without cache_batch_idx, "
            "sequence b is row b"
        )


def contiguous(
    k_cache: torch.Tensor, v_cache: torch.Tensor, page_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a cache with one sequence a row as pools of pages, and its page table.

    Args:
        k_cache, v_cache: (rows, length, num_heads_kv, head_dim), tokens at a constant stride.
        page_size: a divisor of the length and of the tokens from one row to the next; their largest power of two if
            None. Kernels are fastest from 64 on.

    Returns:
        k, v: (num_pages, page_size, num_heads_kv, head_dim), views.
        table: int32, (rows, length / page_size). It is kept: the caller must not write it.

    Raises:
        InvalidInput: no single page table describes both tensors.
    """
    rows, length = k_cache.shape[:2]
    if 0 in (rows, length):
        raise InvalidInput(f"the cache has shape {tuple(k_cache.shape)}; it must hold a row and a token")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise InvalidInput(
            f"v_cache has shape {tuple(v_cache.shape)} and k_cache {tuple(k_cache.shape)}; they must have the same "
            "rows, length and heads"
        )
    if length > 1 and 0 in (k_cache.stride(1), v_cache.stride(1)):
        raise InvalidInput(
            f"k_cache and v_cache have strides {k_cache.stride()} and {v_cache.stride()}; tokens must not share memory"
        )
    # Tokens from one row to the next: a slice of a longer cache skips some, and in memory ordered by head, those of
    # other heads are in between.
    stride = {t: t.stride(1) if length > 1 else t.stride(0) for t in (k_cache, v_cache)}
    apart = {t.stride(0) / max(1, stride[t]) for t in stride} if rows > 1 else {float(length)}
    tokens_apart = apart.pop()
    if apart or not tokens_apart.is_integer():
        raise InvalidInput(
            f"k_cache and v_cache have strides {k_cache.stride()} and {v_cache.stride()}; their rows must be a whole "
            "number of tokens apart, the same number in both"
        )
    common = math.gcd(length, int(tokens_apart))
    size = page_size or (common & -common)
    count, step = length // size, int(tokens_apart) // size
    pages = step * (rows - 1) + count
    pools = [
        t.as_strided((pages, size, *t.shape[2:]), (size * stride[t], *t.stride()[1:]), t.storage_offset())
        for t in (k_cache, v_cache)
    ]
    return pools[0], pools[1], _table(rows, step, count, k_cache.device)


def _table(rows: int, step: int, count: int, device: torch.device) -> torch.Tensor:
    """Returns int32 (rows, count): page i of a row is `row * step + i`."""
    key = (rows, step, count, device)
    table = _tables.get(key)
    if table is None:
        with torch.inference_mode(False):
            begin = torch.arange(rows, dtype=torch.int32, device=device) * step
            table = begin[:, None] + torch.arange(count, dtype=torch.int32, device=device)
        # Memory from a graph's pool is overwritten by the graph's later kernels.
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _tables.put(key, table)
    return table


def tokens(k: torch.Tensor, v: torch.Tensor, begin: torch.Tensor, longest: int) -> tuple[torch.Tensor, ...]:
    """Returns packed keys and values as pools of one-token pages, and the page table of sequences that begin at any
    token.

    Args:
        k, v: (total, num_heads_kv, head_dim).
        begin: int32, (batch,): the first token of each sequence.
        longest: the most tokens of a sequence.
    """
    if not len(k):  # a pool must have a page
        k, v = k.new_zeros((1, *k.shape[1:])), v.new_zeros((1, *v.shape[1:]))
    following = torch.arange(max(1, min(longest, len(k))), dtype=torch.int32, device=k.device)
    return k[:, None], v[:, None], (begin[:, None] + following).clamp(max=max(0, len(k) - 1))
