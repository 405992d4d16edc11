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
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from warpwave import autograd
from warpwave.api import attention
from warpwave.errors import InvalidInput, InvalidType, UnsupportedProblem
from warpwave.integrations.flash_attn import check_is_tensor, packed
from warpwave.kernels import dropout
from warpwave.operands import DIFFERENTIABLE, DropoutOperands, Operands
from warpwave.options import LARGEST, Options, as_float, as_window, with_positive_scale
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
    found: Any = _varlen(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, as_window(window_size), seqused_k, block_table,
        num_splits, return_lse,
    )  # fmt: skip
    return found


def _varlen(
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

NAME = "warpwave"


def register() -> None:
    """Registers warpwave as an implementation of torch's flash attention, under the name "warpwave".

    Nothing changes until `torch.nn.attention.activate_flash_attention_impl("warpwave")`. From then on warpwave computes
    the calls of torch's flash backend on CUDA devices, forward and backward. torch decides which calls these are
    (`torch.nn.attention.sdpa_kernel`): no masks, no float32, head_dim up to 256. `restore_flash_attention_impl()`
    (torch 2.11), or `.remove()` of the handle that `activate` returns internally, undoes it.
    """
    from torch.nn.attention import register_flash_attention_impl

    register_flash_attention_impl(NAME, register_fn=override)


class Handle:
    """Keeps torch's flash operators overridden until `remove`."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        """Restores the operators' previous kernels. May be called again."""
        self._library = None  # deleting a library removes its kernels


def override(device: str = "CUDA") -> Handle:
    """Overrides torch's flash operators and returns the handle that restores them.

    Args:
        device: dispatch key of the devices, `"CUDA"` or `"CPU"`.
    """
    library = torch.library.Library("aten", "IMPL", device)
    kernels = _Overrides(device)
    for name in _OPERATORS:
        if hasattr(torch.ops.aten, name):
            library.impl(name, getattr(kernels, name.lstrip("_")), device, with_keyset=True)
    return Handle(library)


_OPERATORS = (
    "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace",  # from torch 2.13
    "_flash_attention_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
)


class _Overrides:
    """The kernels of torch's flash operators. Calls with a debug mask or ALiBi go to the previous kernels.

    They run below torch's autograd, which calls the backward operators with what the forward ones returned. The random
    state of a call with dropout is warpwave's seed, with the dtype and shape of torch's own on CUDA: uint64, (2,).
    """

    def __init__(self, device: str) -> None:
        self.previous: dict[str, Any] = {}
        find = getattr(torch.library, "get_kernel", None)  # from torch 2.11
        for name in _OPERATORS:
            if find is not None and hasattr(torch.ops.aten, name):
                with contextlib.suppress(RuntimeError):  # the device has none
                    self.previous[name] = find(getattr(torch.ops.aten, name).default, device)

    def _call_previous(
        self, name: str, reason: str, dropout_p: float, keyset: Any, arguments: Sequence[Any], named: Any
    ) -> Any:
        if dropout_p != 0.0:  # the backward, which is warpwave's, would drop other pairs than the previous kernel
            reason += " with dropout_p"
        if dropout_p != 0.0 or name not in self.previous:
            raise UnsupportedProblem(
                f"aten::{name}: warpwave takes no {reason}", {}, "torch.nn.attention.restore_flash_attention_impl()"
            )
        return self.previous[name].call_boxed(keyset, *arguments, **named)

    def scaled_dot_product_flash_attention(
        self, keyset: Any, query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False,
        return_debug_mask: bool = False, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        """Computes attention of (batch, heads, seqlen, head_dim) tensors; out has the memory layout of the query."""
        if return_debug_mask:
            given = (query, key, value, dropout_p, is_causal, return_debug_mask)
            return self._call_previous(_OPERATORS[3], "return_debug_mask", dropout_p, keyset, given, {"scale": scale})
        seed = _seed(dropout_p, query)
        with torch.no_grad():
            out, lse = attention(
                *(t.transpose(1, 2) for t in (query, key, value)),
                causal=is_causal, softmax_scale=scale, dropout_p=dropout_p, dropout_seed=seed, return_lse=True,
            )  # fmt: skip
        out = _in_layout(out.transpose(1, 2), query)
        return out, lse, None, None, query.shape[2], key.shape[2], *_random_state(seed, query)

    def scaled_dot_product_flash_attention_backward(
        self, keyset: Any, grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any,
        cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Any,
        philox_offset: Any, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        """Computes the gradients of (batch, heads, seqlen, head_dim) tensors."""
        grad_out, query, key, value, out = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
        options = Options(causal="bottom_right" if is_causal else "", softmax_scale=scale, dropout_p=dropout_p)
        grads = _gradients(grad_out, out, logsumexp, Operands(query, key, value), philox_seed, options)
        return tuple(grad.transpose(1, 2) for grad in grads)

    def flash_attention_forward(
        self, keyset: Any, query: Any, key: Any, value: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int,
        dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
        window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Any = None,
        alibi_slopes: Any = None, block_table: Any = None, num_splits: int | None = None,
    ) -> Any:  # fmt: skip
        """Computes attention of (batch, seqlen, heads, head_dim) tensors, or of packed ones with offsets."""
        on_cache_with_dropout = dropout_p != 0.0 and (seqused_k is not None or block_table is not None)
        if reason := _beyond(return_debug_mask, alibi_slopes, on_cache_with_dropout):
            given = (query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask)
            said = {
                "scale": scale, "window_size_left": window_size_left, "window_size_right": window_size_right,
                "seqused_k": seqused_k, "alibi_slopes": alibi_slopes,
            }  # fmt: skip
            later = {"block_table": block_table, "num_splits": num_splits}  # arguments from torch 2.13 on
            said |= {name: argument for name, argument in later.items() if argument is not None}
            return self._call_previous(_OPERATORS[0], reason, dropout_p, keyset, given, said)
        seed = _seed(dropout_p, query)
        out, lse = _flash_forward(
            query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, seed, scale,
            _window(window_size_left, window_size_right, is_causal), seqused_k, block_table, num_splits,
        )  # fmt: skip
        return out, lse, *_random_state(seed, query)

    def flash_attention_forward_no_dropout_inplace(
        self, keyset: Any, out: Any, query: Any, key: Any, value: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int,
        max_k: int, dropout_p: float, *arguments: Any, **named: Any,
    ) -> Any:  # fmt: skip
        """Writes out and returns the log-sum-exp."""
        if dropout_p != 0.0:
            raise InvalidInput(f"aten::{_OPERATORS[1]}: dropout_p is {dropout_p}; it must be 0")
        given = (query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p)
        found, lse, *_ = self.flash_attention_forward(keyset, *given, *arguments, **named)
        out.copy_(found)
        return lse

    def flash_attention_backward(
        self, keyset: Any, grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any,
        cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Any, unused: Any, *,
        scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
    ) -> Any:  # fmt: skip
        """Computes the gradients of `flash_attention_forward`."""
        left, right = _window(window_size_left, window_size_right, is_causal)
        options = Options(window_left=left, window_right=right, softmax_scale=scale, dropout_p=dropout_p)
        if cum_seq_q is not None:
            options = options._replace(max_seqlen_q=max_q, max_seqlen_k=max_k)
        operands = Operands(query, key, value, cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k)
        return _gradients(grad_out, out, logsumexp, operands, rng_state, options)


def _beyond(return_debug_mask: bool, alibi_slopes: Any, on_cache_with_dropout: bool) -> str:
    """Returns the argument of a flash operator that warpwave does not support; empty if it computes the call."""
    if return_debug_mask:
        return "return_debug_mask"
    if alibi_slopes is not None:
        return "alibi_slopes"
    return "seqused_k or block_table" if on_cache_with_dropout else ""


def _window(left: int | None, right: int | None, is_causal: bool) -> tuple[int, int]:
    """Returns a window with -1 for unlimited sides; a causal mask, aligned to the last key, is a right side of 0."""
    return -1 if left is None else left, 0 if is_causal else -1 if right is None else right


def _flash_forward(
    query: Any, key: Any, value: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float,
    seed: torch.Tensor | None, scale: float | None, window: tuple[int, int], seqused_k: Any, block_table: Any,
    num_splits: int | None,
) -> Any:  # fmt: skip
    with torch.no_grad():
        if cum_seq_q is not None:
            return _varlen(
                query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, scale, window, seqused_k, block_table,
                num_splits, True, dropout_p, seed,
            )  # fmt: skip
        if seqused_k is not None or block_table is not None:
            raise UnsupportedProblem(
                "aten::_flash_attention_forward: seqused_k and block_table need packed queries", {}, "cum_seq_q"
            )
        return attention(
            query, key, value, window_size=window, softmax_scale=scale, dropout_p=dropout_p, dropout_seed=seed,
            return_lse=True,
        )  # fmt: skip


def _gradients(
    dout: Any, out: Any, lse: Any, operands: Operands, random_state: torch.Tensor, options: Options
) -> tuple[torch.Tensor, ...]:
    """Returns the gradients of q, k and v from the results of the forward, its random state included."""
    wanted = [name in ("q", "k", "v") for name in DIFFERENTIABLE]
    q, scale = with_positive_scale(operands.q, options.softmax_scale)  # as in the forward
    options = options._replace(return_lse=True, needs_grad=True, softmax_scale=scale)
    given = operands._replace(q=q)
    seeded = DropoutOperands(*given, random_state.view(torch.int64)) if options.dropout_p else given
    tensors = autograd.schema_tensors(seeded)
    found = autograd.operator_gradients(dout, None, out, lse, wanted, tensors, options, "auto")
    dq, dk, dv = (grad for grad in found[:3] if grad is not None)
    return dq if q is operands.q else -dq, dk, dv


def _in_layout(out: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Returns out in the memory layout that compiled graphs expect, the query's."""
    expected = torch.empty_like(query, device="meta")
    if out.stride() == expected.stride():
        return out
    return torch.empty_like(query).copy_(out)


def _seed(dropout_p: float, query: torch.Tensor) -> torch.Tensor | None:
    """Returns a new seed for a call with dropout, None for a call without."""
    return dropout.draw_seed(query.device) if dropout_p else None


def _random_state(seed: torch.Tensor | None, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the random state of a call, a number that is not used, and no debug mask."""
    state = torch.zeros(2, dtype=torch.uint64, device=query.device) if seed is None else seed.view(torch.uint64)
    return state, torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)
