"""torch's flash operators, computed by warpwave: what `pytorch.register` registers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from warpwave import autograd
from warpwave.api import attention
from warpwave.errors import InvalidInput, UnsupportedProblem
from warpwave.integrations.pytorch import varlen
from warpwave.kernels import dropout
from warpwave.operands import DIFFERENTIABLE, DropoutOperands, Operands
from warpwave.options import Options, with_positive_scale


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
            return varlen(
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
