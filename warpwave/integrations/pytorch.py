"""torch's attention functions, computed by warpwave.

    from warpwave.integrations import pytorch

    out = pytorch.scaled_dot_product_attention(q, k, v, is_causal=True)   # torch's signature and meaning
    with pytorch.sdpa():                                                  # everything that calls torch's function
        model(x)
    pytorch.register()                                                    # SDPA's flash backend, on CUDA
    torch.nn.attention.activate_flash_attention_impl("warpwave")
    torch.nn.attention.restore_flash_attention_impl()                     # as before

If `scaled_dot_product_attention` declines a call, torch's own function computes it; `declined()` counts the reasons.
The other functions of this module raise an error instead.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from warpwave import autograd
from warpwave.api import attention
from warpwave.errors import InvalidInput, InvalidType
from warpwave.integrations.flash_attn import check_is_tensor, packed
from warpwave.options import LARGEST, as_float, as_window
from warpwave.problem import Causal

__all__ = ["declined", "register", "scaled_dot_product_attention", "sdpa", "varlen_attn"]

log = logging.getLogger("warpwave")

# torch's function itself: torch.nn.functional's name may be replaced, by `sdpa` among others.
of_torch: Any = torch._C._nn.scaled_dot_product_attention
_TOP_LEFT = Causal("top_left")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# scaled_dot_product_attention -----------------------------------------------------------------------------------------

_declined: Counter[str] = Counter()
_counting = threading.Lock()


def declined() -> dict[str, int]:
    """Returns reason -> number of calls of `scaled_dot_product_attention` that torch's own function computed for it, in
    this process. Calls inside a compiled graph are not counted."""
    with _counting:
        return dict(_declined)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Computes `torch.nn.functional.scaled_dot_product_attention` by warpwave.

    Args:
        query: (batch, num_heads_q, seqlen_q, head_dim) or (batch, seqlen_q, head_dim), float16, bfloat16, float32 or
            float64.
        key: (batch, num_heads_kv, seqlen_k, head_dim). Batch and heads may be 1, as torch broadcasts them.
        value: (batch, num_heads_kv, seqlen_k, head_dim_v).
        attn_mask: boolean, True = visible, or a float that is added to the scores; broadcastable to (batch,
            num_heads_q, seqlen_q, seqlen_k). Or a `torch.nn.attention.bias.CausalBias`.
        dropout_p: probability with which each attention probability is set to 0; from 1 on the call is declined. A
            call with dropout draws a seed from torch's generator, but drops other pairs than torch's kernels
            (docs/guide/dropout.md).
        is_causal: query i sees keys `j <= i`, whatever the lengths: aligned to the first key.
        scale: 1/sqrt(head_dim) if None.
        enable_gqa: whether num_heads_q may be a multiple of num_heads_kv.

    Returns:
        (batch, num_heads_q, seqlen_q, head_dim_v), a view of (batch, seqlen_q, num_heads_q, head_dim_v).

    Raises:
        InvalidInput: (a ValueError) a `CausalBias` together with is_causal.
        What torch raises: any other invalid call is declined.

    Note:
        A query that sees no key gives 0, as in torch. The first call declined for a reason logs a warning.
    """
    if type(attn_mask).__name__ == "CausalBias":
        attn_mask, is_causal = _of_causal_bias(attn_mask, query, is_causal)
    reason = _why_not(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if reason:
        if not torch.compiler.is_compiling():
            _count(reason)
        out: torch.Tensor = of_torch(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return out
    without_heads = query.dim() == 3
    if without_heads:
        query, key, value = query[:, None], key[:, None], value[:, None]
        attn_mask = attn_mask[:, None] if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
    cast = _autocast_dtype(query)
    if cast is not None:
        query, key, value = (t.to(_cast_dtype(t, cast)) for t in (query, key, value))
        attn_mask = None if attn_mask is None else attn_mask.to(_cast_dtype(attn_mask, cast))
    query, key, value = _broadcast(query, key, value)
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    out = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        causal=_TOP_LEFT if is_causal else False,
        mask=attn_mask if boolean else None,
        bias=None if boolean else attn_mask,
        softmax_scale=scale,
        dropout_p=dropout_p,
    ).transpose(1, 2)
    return out[:, 0] if without_heads else out


def _of_causal_bias(bias: Any, query: Any, is_causal: bool) -> tuple[torch.Tensor | None, bool]:
    """Returns attn_mask and is_causal of torch's class of causal masks, a tensor without contents. The class's own code
    compares the function with the name in torch.nn.functional, which `sdpa` replaces."""
    if is_causal:
        raise InvalidInput("attn_mask is a CausalBias and is_causal is True; give one of them")
    ahead = bias.seq_len_kv - bias.seq_len_q
    if ahead == 0 or bias.variant.name == "UPPER_LEFT":
        return None, True
    device = query.device if isinstance(query, torch.Tensor) else None
    return torch.ones(bias.seq_len_q, bias.seq_len_kv, dtype=torch.bool, device=device).tril(ahead), False


def _why_not(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any
) -> str:
    """Returns why torch's own function computes a call; empty if warpwave does."""
    given = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if not all(isinstance(t, torch.Tensor) for t in given):
        return "an argument is not a tensor"
    if not torch.compiler.is_compiling():
        if any(map(_is_wrapper, given)):
            return "a tensor subclass"
        if autograd.transforms() is not None or autograd.has_tangents(given):
            return "a transform of torch.func, or forward-mode derivatives"
    if any(t.layout is not torch.strided or t.is_nested for t in given):
        return "a nested or sparse tensor"
    if any(t.device != query.device for t in given) or query.device.type not in ("cpu", "cuda", "meta"):
        return "the device"
    cast = _autocast_dtype(query)
    dtype = _cast_dtype(query, cast)
    if dtype not in _FLOATS or _cast_dtype(key, cast) != dtype or _cast_dtype(value, cast) != dtype:
        return "the dtypes"
    if isinstance(dropout_p, bool) or not (isinstance(dropout_p, (int, float)) and 0.0 <= dropout_p < 1.0):
        return "dropout_p"
    if isinstance(scale, bool) or not (scale is None or (isinstance(scale, (int, float)) and abs(scale) <= LARGEST)):
        return "the scale"
    if not (isinstance(is_causal, bool) and isinstance(enable_gqa, bool)):
        return "is_causal or enable_gqa"
    if attn_mask is not None:
        if is_causal:
            return "attn_mask together with is_causal"
        if _cast_dtype(attn_mask, cast) not in (torch.bool, torch.float32, dtype):
            return "the dtype of attn_mask"
    return _why_not_shapes(query, key, value, attn_mask, enable_gqa)


def _why_not_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, enable_gqa: bool
) -> str:
    axes = query.dim()
    if axes not in (3, 4) or key.dim() != axes or value.dim() != axes:
        return "the number of axes"
    of_q, of_k, of_v = query.shape, key.shape, value.shape
    if of_q[-1] != of_k[-1] or of_k[-2] != of_v[-2] or 0 in (of_q[-1], of_v[-1]):
        return "the shapes"
    batches, heads = (of_q[0], of_k[0], of_v[0]), 1
    batch = max(batches)
    if any(size not in (1, batch) for size in batches):  # no sets: symbolic sizes of torch.export have no hash
        return "the shapes"
    if axes == 4:
        heads = of_q[1]
        if enable_gqa:
            if of_k[1] != of_v[1] or of_k[1] == 0 or heads % of_k[1]:
                return "the heads"
        else:
            heads = max(of_q[1], of_k[1], of_v[1])
            if heads == 0 or any(size not in (1, heads) for size in (of_q[1], of_k[1], of_v[1])):
                return "the heads"
    if attn_mask is not None:
        allowed = (batch, heads, of_q[-2], of_k[-2]) if axes == 4 else (batch, of_q[-2], of_k[-2])
        sizes = attn_mask.shape
        if not 2 <= len(sizes) <= axes or any(
            size not in (1, most) for size, most in zip(sizes[::-1], allowed[::-1], strict=False)
        ):
            return "the shape of attn_mask"
    return ""


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's subclass overrides operators, as DTensor does. torch's fake tensors for tracing do not
    count."""
    kind = type(tensor)
    return kind not in (torch.Tensor, torch.nn.Parameter) and not kind.__module__.startswith("torch._subclasses")


def _autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Returns the dtype to which autocast casts arguments of torch's function, None where it is off."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # autocast has no state for the meta device
        return None
    return torch.get_autocast_dtype(device)


def _cast_dtype(tensor: torch.Tensor, cast: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of a tensor after autocast, which leaves float64 and booleans unchanged."""
    if cast is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor.dtype
    return cast


def _broadcast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the tensors with one batch, and with heads that warpwave groups; expanded axes are not copied."""
    if query.shape[:2] == key.shape[:2] == value.shape[:2]:
        return query, key, value
    batch = max(query.shape[0], key.shape[0], value.shape[0])
    heads = max(key.shape[1], value.shape[1])
    query = query.expand(batch, max(query.shape[1], heads), -1, -1)
    return query, key.expand(batch, heads, -1, -1), value.expand(batch, heads, -1, -1)


def _count(reason: str) -> None:
    with _counting:
        _declined[reason] += 1
        first = _declined[reason] == 1
    if first:
        log.warning("torch's own scaled_dot_product_attention computes the call, not warpwave: %s", reason)


# Routing torch's name -------------------------------------------------------------------------------------------------

_routing = threading.Lock()
_routes = 0  # contexts that are open, in all threads
_replaced: Any = of_torch  # what torch.nn.functional held before


def _routed(*args: Any, **named: Any) -> torch.Tensor:
    """Replaces torch's function while a `sdpa` context is open. Code that keeps it longer calls the function that was
    there before."""
    if _routes == 0:
        out: torch.Tensor = _replaced(*args, **named)
        return out
    return scaled_dot_product_attention(*args, **named)


@contextlib.contextmanager
def sdpa() -> Iterator[None]:
    """Routes torch's name of the function, `torch.nn.functional.scaled_dot_product_attention`, through warpwave, as a
    context or as a decorator.

    The name belongs to the process: while a context is open in one thread, all threads are routed. Checkpointing needs
    this, because it computes layers again in a backward thread. Contexts may be nested and may overlap; when the last
    one closes, the name is what it was before the first. Code that imported the function by itself, before, is not
    routed, and neither is the inference fast path of `torch.nn.TransformerEncoderLayer` and `MultiheadAttention`, which
    is one C++ function.
    """
    global _routes, _replaced
    with _routing:
        if _routes == 0 and F.scaled_dot_product_attention is not _routed:
            _replaced = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = _routed
        _routes += 1
    try:
        yield
    finally:
        with _routing:
            _routes -= 1
            # A replacement made inside the context stays.
            if _routes == 0 and F.scaled_dot_product_attention is _routed:
                F.scaled_dot_product_attention = _replaced


# varlen_attn ----------------------------------------------------------------------------------------------------------


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """Computes `torch.nn.attention.varlen.varlen_attn` by warpwave, on any device.

    Args:
        query: (total_q, num_heads_q, head_dim).
        key, value: (total_k, num_heads_kv, head_dim); with block_table (num_pages, page_size, num_heads_kv, head_dim).
        cu_seq_q, cu_seq_k: int32, (batch + 1,) offsets; cu_seq_k is not read with block_table.
        max_q, max_k: the longest sequences, as host integers.
        return_aux: torch's `AuxRequest`, or None; with `lse=True` the log-sum-exp is returned too.
        scale: 1/sqrt(head_dim) if None.
        window_size: (left, right) keys, -1 for unlimited, aligned to the last key; (-1, 0) is causal.
        enable_gqa: whether num_heads_q may be a multiple of num_heads_kv.
        seqused_k: int32, (batch,): only so many keys of each sequence are used. Has no gradients.
        block_table: int32, (batch, pages of a sequence); needs seqused_k. Has no gradients.
        num_splits: splits of the keys of a call with seqused_k; the packed kernels split no keys.

    Returns:
        out: (total_q, num_heads_q, head_dim).
        lse: if requested: float32, natural logarithm, (num_heads_q, total_q).

    Raises:
        InvalidInput: (a ValueError) unequal heads without enable_gqa, block_table without seqused_k, cu_seq_k missing.
        InvalidType, UnsupportedProblem: as `attention_varlen`.
    """
    for name, tensor in (("query", query), ("key", key)):
        check_is_tensor(name, tensor)
        if tensor.dim() < 2:
            raise InvalidInput(f"{name} has shape {tuple(tensor.shape)}; it must be packed tokens, with 3 axes")
    heads_q, heads_kv = query.shape[-2], key.shape[-2]
    if not enable_gqa and heads_q != heads_kv:
        raise InvalidInput(f"query has {heads_q} heads and key {heads_kv}; pass enable_gqa=True to group them")
    if return_aux is not None and not hasattr(return_aux, "lse"):
        raise InvalidType(f"return_aux is {return_aux!r}; it must be torch's AuxRequest, or None")
    return_lse = return_aux is not None and bool(return_aux.lse)
    scale = None if scale is None else as_float("scale", scale)
    found: Any = varlen(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, as_window(window_size), seqused_k, block_table,
        num_splits, return_lse,
    )  # fmt: skip
    return found


def varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    scale: float | None,
    window_size: tuple[int, int],
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    num_splits: int | None,
    return_lse: bool,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
) -> Any:
    """Computes `varlen_attn` of checked scalars, with dropout."""
    if block_table is not None and seqused_k is None:
        raise InvalidInput("block_table was given without seqused_k, the number of tokens of each sequence")
    if block_table is None and cu_seq_k is None:
        raise InvalidInput("cu_seq_k is None; without block_table it must hold the offsets of the keys")
    return packed(
        "varlen_attn", query, key, value, cu_seq_q, cu_seq_k if block_table is None else None, (max_q, max_k),
        {"softmax_scale": scale, "window_size": window_size}, {"dropout_p": dropout_p, "dropout_seed": dropout_seed},
        seqused_k=seqused_k, table=block_table, num_splits=num_splits, return_lse=return_lse, names=_VARLEN_NAMES,
    )  # fmt: skip


_VARLEN_NAMES = {
    "q": "query", "k": "key", "v": "value", "cu_seqlens_q": "cu_seq_q", "cu_seqlens_k": "cu_seq_k",
    "max_seqlen_q": "max_q", "max_seqlen_k": "max_k",
}  # fmt: skip


# SDPA's flash backend -------------------------------------------------------------------------------------------------


def register() -> None:
    """Registers warpwave as an implementation of torch's flash attention, under the name "warpwave".

    Nothing changes until `torch.nn.attention.activate_flash_attention_impl("warpwave")`. From then on warpwave computes
    the calls of torch's flash backend on CUDA devices, forward and backward. torch decides which calls these are
    (`torch.nn.attention.sdpa_kernel`): no masks, no float32, head_dim up to 256. `restore_flash_attention_impl()`
    (torch 2.11), or `.remove()` of the handle that `activate` returns internally, undoes it.
    """
    from torch.nn.attention import register_flash_attention_impl

    from warpwave.integrations.pytorch_flash import override

    register_flash_attention_impl("warpwave", register_fn=override)
