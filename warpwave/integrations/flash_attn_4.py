"""FlashAttention-4: the functions of `flash_attn.cute`, computed by warpwave, for programs that change one import.

    from warpwave.integrations.flash_attn_4 import flash_attn_func   # was: from flash_attn.cute import flash_attn_func

`warpwave.integrations.flash_attn` states what is common. Arguments have the order of flash-attn-4 4.0.0b36; earlier
pre-releases had fewer, and softmax_scale in place of qv. Only None is an unlimited side of window_size: if both sides
are given and their sum is negative, there is no window, and any other negative side is a distance, which is refused.
Every function returns (out, lse), with lse None unless return_lse. `pack_gqa`, `min_seqlen_k`, the scheduler's
arguments and, for calls without a cache, `num_splits` change no result and are ignored.
"""

from __future__ import annotations

from typing import Any

import torch

from warpwave.api import attention
from warpwave.errors import InvalidInput, UnsupportedProblem
from warpwave.integrations.flash_attn import (
    Window,
    check_is_tensor,
    for_training,
    options,
    packed,
    refuse,
    with_kvcache,
)
from warpwave.options import as_int

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]

UNLIMITED: Window = (None, None)
# Names of arguments, by FlashAttention-2's.
NAMES = {"block_table": "page_table"}
DENSE_NAMES = NAMES | {"k_cache": "k", "v_cache": "v", "cache_seqlens": "seqused_k"}


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes attention of (batch, seqlen, num_heads, head_dim) tensors; k and v may have fewer heads.

    Args:
        learnable_sink: (num_heads,), any float: one additional logit per head in the denominator.

    Returns:
        out, and lse or None.

    Raises:
        UnsupportedProblem: qv, gathered keys, score_mod, mask_mod, block sparsity, or a window that excludes a query's
            own position.
    """
    refuse(
        "flash_attn_func", qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd, gather_bwd_recompute_p=gather_bwd_recompute_p,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
    said = _options(q, softmax_scale, causal, window_size, softcap, learnable_sink)
    found = attention(q, k, v, return_lse=return_lse, **said, **for_training(deterministic))
    return found if return_lse else (found, None)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes attention of sequences of different lengths: q packed with cu_seqlens_q, or dense without it; keys
    packed with cu_seqlens_k, in pages with page_table, or dense with seqused_k.

    Args:
        max_seqlen_q, max_seqlen_k: the longest sequences; all tokens if None, which is slower.
        seqused_k: int32 (batch,): the used keys of each sequence. There are no gradients then, nor with page_table, nor
            for dense keys of packed queries.

    Returns:
        out, and lse or None.

    Raises:
        UnsupportedProblem: qv, gathered keys, seqused_q, score_mod, mask_mod, block sparsity; a window that excludes a
            query's own position; packed keys without packed queries.
    """
    function = "flash_attn_varlen_func"
    refuse(
        function, qv=qv, seqused_q=seqused_q, gather_kv_indices=gather_kv_indices, score_mod=score_mod,
        score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors, aux_scalars=aux_scalars, gather_bwd_recompute_p=gather_bwd_recompute_p,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
    said = _options(q, softmax_scale, causal, window_size, softcap, learnable_sink)
    if cu_seqlens_q is None:
        refuse(f"{function} without cu_seqlens_q", cu_seqlens_k=cu_seqlens_k)
    training = for_training(deterministic)
    splits = None if num_splits is None or as_int("num_splits", num_splits) <= 1 else num_splits
    if cu_seqlens_q is None and seqused_k is None and page_table is None:
        found = attention(q, k, v, return_lse=return_lse, **said, **training)
    elif cu_seqlens_q is None or (cu_seqlens_k is None and page_table is None):
        found = with_kvcache(
            function, q, k, v, None, None, (None, None, False), seqused_k, None, None, page_table, said,
            cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, num_splits=splits, return_lse=return_lse,
            names=DENSE_NAMES,
        )  # fmt: skip
    else:
        if max_seqlen_q is None:
            max_seqlen_q = _num_tokens("q", q)
        if max_seqlen_k is None:
            max_seqlen_k = _num_tokens("k", k) if page_table is None else 0
        found = packed(
            function, q, k, v, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), said, training,
            seqused_k=seqused_k, table=page_table, num_splits=splits, return_lse=return_lse, names=NAMES,
        )  # fmt: skip
    return found if return_lse else (found, None)


def _options(
    q: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    learnable_sink: torch.Tensor | None,
) -> dict[str, Any]:
    """Returns these arguments in the form of warpwave's calls, in which a negative side of a window is unlimited."""
    said = options(softmax_scale, causal, window_size, softcap, learnable_sink=learnable_sink)
    check_is_tensor("q", q)
    if learnable_sink is not None and learnable_sink.shape != q.shape[-2:-1]:
        raise InvalidInput(
            f"learnable_sink has shape {tuple(learnable_sink.shape)}; it must have one number for each head of q, of "
            f"shape {tuple(q.shape)}"
        )
    left, right = window_size[0], 0 if said["causal"] else window_size[1]
    if left is not None and right is not None and left + right < 0:
        return said | {"window_size": (-1, -1)}
    if (left or 0) < 0 or (right or 0) < 0:
        raise UnsupportedProblem(
            f"window_size is {tuple(window_size)}; a negative side, which excludes a query's own position, is not "
            "supported", {}, "None for an unlimited side",
        )  # fmt: skip
    return said


def _num_tokens(name: str, tensor: torch.Tensor) -> int:
    check_is_tensor(name, tensor)
    return tensor.shape[0] if tensor.dim() else 0  # the call refuses a tensor without axes
