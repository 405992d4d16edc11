"""The tensors of one call, and the tuples in which kernels get them."""

from __future__ import annotations

from typing import Any, NamedTuple

DIFFERENTIABLE = ("q", "k", "v", "bias", "alibi_slopes", "sinks")  # in the order of `wanted` and of gradients


class Operands(NamedTuple):
    """The tensors of one call, in the order of every kernel. Absent ones are None.

    `DropoutOperands`, `QuantizedOperands` and `CachedOperands` repeat these fields: a NamedTuple cannot extend another.
    """

    q: Any
    k: Any
    v: Any
    mask: Any = None
    bias: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None

    @property
    def dropout_seed(self) -> None:
        """None: the tensors of a call with dropout are `DropoutOperands`."""
        return None


NUM_COMMON = len(Operands._fields)  # the tensors that all calls have come first


class DropoutOperands(NamedTuple):
    """The tensors of one call with dropout: those of `Operands`, and the seed. Only kernels with dropout get them."""

    q: Any
    k: Any
    v: Any
    mask: Any = None
    bias: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    dropout_seed: Any = None


class QuantizedOperands(NamedTuple):
    """The tensors of one call with quantized q and k: those of `Operands`, and the factors. Only kernels with
    `QUANTIZED` get them."""

    q: Any
    k: Any
    v: Any
    mask: Any = None
    bias: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None
    out_descale: Any = None

    @property
    def dropout_seed(self) -> None:
        """None: quantized calls have no dropout."""
        return None


class CachedOperands(NamedTuple):
    """The tensors of one call on a paged cache: those of `Operands`, with k and v as pools of pages, the tables, and
    the factors of 8-bit pools."""

    q: Any
    k: Any
    v: Any
    mask: Any = None
    bias: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    page_table: Any = None
    seqused_k: Any = None
    rows: Any = None
    k_descale: Any = None
    v_descale: Any = None

    @property
    def dropout_seed(self) -> None:
        """None: calls on a cache have no dropout."""
        return None


AnyOperands = Operands | DropoutOperands | QuantizedOperands | CachedOperands


def differentiable(operands: AnyOperands) -> tuple[Any, ...]:
    """Returns the `DIFFERENTIABLE` operands."""
    q, k, v, _, bias, slopes, sinks, *_ = operands
    return q, k, v, bias, slopes, sinks


def is_part(v: Any, k: Any) -> bool:
    """Returns whether v is the first columns of k, as in a latent cache, also for tensors without memory."""
    same = v.untyped_storage()._cdata == k.untyped_storage()._cdata and v.storage_offset() == k.storage_offset()
    return same and v.stride() == k.stride() and v.shape[-1] <= k.shape[-1] and v.dtype == k.dtype
