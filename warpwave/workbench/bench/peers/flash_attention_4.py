"""FlashAttention-4: the `flash-attn-4` package, CuTe DSL kernels for Hopper and newer, compiled on their first call."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from warpwave.operands import CachedOperands, Operands
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.peers.peer import (
    PeerUnavailable,
    Prepared,
    refuse_cpu,
    refuse_features,
    require_installed,
)


def prepare(problem: AttentionProblem, operands: Operands | CachedOperands) -> Prepared:
    """Prepares `flash_attn.cute`, whose layout is ours. It chooses the number of splits if it can."""
    refuse_features(problem, ("packed sequences", "a sliding window", "softcap", "sinks", "a paged cache"))
    refuse_cpu(operands)
    if problem.dtype == "float32":
        raise PeerUnavailable("it takes float16 and bfloat16")
    if problem.causal is not None and problem.causal.alignment == "top_left" and problem.seqlen_q != problem.seqlen_k:
        raise PeerUnavailable("its causal mask is aligned to the last key")
    require_installed("flash_attn", "flash-attn-4")
    try:
        from flash_attn import cute  # type: ignore[import-not-found, unused-ignore]
    except Exception as error:  # FlashAttention-2 has the package but not the module; CuTe DSL may lack its libraries
        raise PeerUnavailable(f"flash_attn.cute cannot be imported: {_first_line(error)}") from error

    left, right = (None if side < 0 else side for side in problem.window_size)
    options: dict[str, Any] = {
        "softmax_scale": problem.softmax_scale,
        "causal": problem.causal is not None,
        "window_size": (left, right),
        "softcap": problem.softcap,
        "learnable_sink": operands.sinks,
    }
    if problem.packed:
        options |= {"cu_seqlens_q": operands.cu_seqlens_q, "max_seqlen_q": problem.seqlen_q}
    if isinstance(operands, CachedOperands):
        options |= {"page_table": operands.page_table, "seqused_k": operands.seqused_k}
    elif problem.packed:
        options |= {"cu_seqlens_k": operands.cu_seqlens_k, "max_seqlen_k": problem.seqlen_k}
    function = cute.flash_attn_varlen_func if problem.packed or problem.page_size else cute.flash_attn_func
    failures = []
    for num_splits in (0, 1):  # 0 is its own heuristic, which may choose splits that its kernel for this card lacks
        call = partial(function, *operands[:3], num_splits=num_splits, **options)
        try:
            call()
            torch.cuda.synchronize(operands.q.device)
        except Exception as error:
            failures.append(_first_line(error))
            continue
        return Prepared(call, to_out=_out, kernel="flash_attn.cute", eager=True, config={"num_splits": num_splits})
    raise PeerUnavailable("; ".join(dict.fromkeys(failures)))


def _out(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Returns out. Some versions return a tuple of out and the log-sum-exp, or None."""
    return result[0] if isinstance(result, tuple) else result


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
