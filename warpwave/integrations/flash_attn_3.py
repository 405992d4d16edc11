"""FlashAttention-3: the functions of `flash_attn_interface`, computed by warpwave, for programs that change one import.

    from warpwave.integrations.flash_attn_3 import flash_attn_func   # was: from flash_attn_interface import ...

`warpwave.integrations.flash_attn` states what is common. The fourth positional argument is softmax_scale. `pack_gqa`,
`sm_margin`, `scheduler_metadata` and, for calls without a cache, `num_splits` change no result and are ignored.
"""

from __future__ import annotations

from typing import Any

import torch

from warpwave.api import attention
from warpwave.errors import InvalidInput, UnsupportedProblem
from warpwave.integrations.flash_attn import (
    UNLIMITED,
    Window,
    check_is_tensor,
    for_training,
    options,
    packed,
    refuse,
    with_kvcache,
)
from warpwave.options import as_int

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Computes attention of (batch, seqlen, num_heads, head_dim) tensors; k and v may have fewer heads.

    Returns:
        out; with return_attn_probs (out, lse).

    Raises:
        UnsupportedProblem: qv, a descale or attention_chunk.
    """
    refuse(
        "flash_attn_func", qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        attention_chunk=attention_chunk,
    )  # fmt: skip
    said = options(softmax_scale, causal, window_size, softcap) | for_training(deterministic)
    return attention(q, k, v, return_lse=return_attn_probs, **said)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Computes `flash_attn_func` of qkv, (batch, seqlen, 3, num_heads, head_dim), or with num_heads_q (batch, seqlen,
    num_heads_q + 2 * num_heads_kv, head_dim)."""
    check_is_tensor("qkv", qkv)
    num_heads_q = None if num_heads_q is None else as_int("num_heads_q", num_heads_q)
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif qkv.dim() == 4 and num_heads_q is not None and qkv.shape[2] > num_heads_q > 0:
        heads = (qkv.shape[2] - num_heads_q) // 2
        if num_heads_q + 2 * heads != qkv.shape[2]:
            raise InvalidInput(f"qkv has {qkv.shape[2]} heads, which are not num_heads_q = {num_heads_q} and two equal")
        q, k, v = qkv.split([num_heads_q, heads, heads], dim=2)
    else:
        raise InvalidInput(
            f"qkv has shape {tuple(qkv.shape)}; it must be (batch, seqlen, 3, num_heads, head_dim), or (batch, seqlen, "
            f"heads, head_dim) with num_heads_q, of which more than 0 and fewer than all; num_heads_q is {num_heads_q}"
        )
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Computes attention of packed sequences: (total, num_heads, head_dim) tensors and int32 (batch + 1,) offsets. With
    seqused_k, int32 (batch,), only so many keys of each sequence are used, and there are no gradients.

    Returns:
        out; with return_attn_probs (out, lse).

    Raises:
        UnsupportedProblem: seqused_q, qv, a descale or attention_chunk.
    """
    refuse(
        "flash_attn_varlen_func", seqused_q=seqused_q, qv=qv, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, attention_chunk=attention_chunk,
    )  # fmt: skip
    return packed(
        "flash_attn_varlen_func", q, k, v, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k),
        options(softmax_scale, causal, window_size, softcap), for_training(deterministic), seqused_k=seqused_k,
        return_lse=return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Computes attention to a cache as FlashAttention-2's function does, with q optionally packed.

    Args:
        cu_seqlens_q: int32 (batch + 1,): q is (total_q, num_heads, head_dim). New tokens, if any, are the queries'
            tokens: cu_seqlens_k_new must be the same tensor.
        max_seqlen_q: the most queries of a sequence, with cu_seqlens_q; all of q if None.

    Returns:
        out; with return_softmax_lse (out, lse).

    Raises:
        UnsupportedProblem: qv, a descale, attention_chunk, rotary_seqlens, other cu_seqlens_k_new; and what
            FlashAttention-2's function here refuses.
    """
    function = "flash_attn_with_kvcache"
    refuse(
        function, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
        rotary_seqlens=rotary_seqlens,
    )  # fmt: skip
    if cu_seqlens_k_new is not None and cu_seqlens_k_new is not cu_seqlens_q:
        raise UnsupportedProblem(
            f"{function}: cu_seqlens_k_new is another tensor than cu_seqlens_q; the new tokens must be those of the "
            "queries", {}, "the same tensor for both",
        )  # fmt: skip
    return with_kvcache(
        function, q, k_cache, v_cache, k, v, (rotary_cos, rotary_sin, rotary_interleaved), cache_seqlens,
        cache_batch_idx, cache_leftpad, page_table, options(softmax_scale, causal, window_size, softcap),
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, num_splits=num_splits, return_lse=return_softmax_lse,
        names={"block_table": "page_table"},
    )  # fmt: skip
