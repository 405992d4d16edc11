"""Checks of the tensor that a caller passes for the output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from warpwave.checks.calls import is_plain
from warpwave.errors import InvalidInput, InvalidType, UnsupportedProblem
from warpwave.operands import AnyOperands, CachedOperands


def check_out_is_writable(out: Any) -> None:
    """Checks the properties of out that no plan depends on, before a plan is looked up.

    Raises:
        InvalidType: out is not a plain strided tensor.
        InvalidInput: out was made in inference mode, outside of which torch refuses every write to it.
    """
    if not isinstance(out, torch.Tensor):
        raise InvalidType(f"out is a {type(out).__name__}; it must be a torch.Tensor")
    if not is_plain(out):
        raise InvalidType("out is a nested, sparse or lazily negated tensor; it must be a plain strided one")
    if not torch.compiler.is_compiling() and out.is_inference() and not torch.is_inference_mode_enabled():
        raise InvalidInput("out was made in inference mode; call in inference mode, or make out outside of it")


def check_out(
    out: torch.Tensor,
    operands: AnyOperands | CachedOperands,
    needs_grad: bool,
    dtype: str | None = None,
) -> None:
    """Checks the writable tensor that receives the output of a call whose operands were checked.

    Args:
        needs_grad: whether an operand requires a gradient.
        dtype: name of the output's dtype; None for the dtype of q.

    Raises:
        InvalidInput: its shape or device is not the output's, or two elements share memory.
        InvalidType: its dtype is not the output's.
        UnsupportedProblem: a gradient would be lost.
    """
    q, v = operands.q, operands.v
    if needs_grad or (torch.is_grad_enabled() and out.requires_grad):
        raise UnsupportedProblem(
            "out was given and an argument requires a gradient: autograd cannot follow a write to out",
            {},
            "torch.no_grad() around the call, or the call without out",
        )
    shape = (*q.shape[:-1], v.shape[-1])
    if out.shape != shape:
        raise InvalidInput(f"out has shape {tuple(out.shape)}; it must have {tuple(shape)}, q's with head_dim_v")
    if out.device != q.device:
        raise InvalidInput(f"out is on {out.device} and q on {q.device}; all tensors must share one device")
    returned = q.dtype if dtype is None else getattr(torch, dtype)
    if out.dtype != returned:  # autocast may have cast the caller's q
        raise InvalidType(f"out is {out.dtype}; out must have {returned}, which the call returns without out")
    if torch.compiler.is_compiling():
        return  # the call itself checks its strides
    extent = 1  # elements from the first to the last of the axes with smaller strides
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1 and stride < extent:
            raise InvalidInput(
                f"out has shape {tuple(out.shape)} and strides {out.stride()}, with which elements may share "
                "memory; a larger stride must skip all axes of smaller ones"
            )
        extent += (size - 1) * stride


def check_apart(out: torch.Tensor, tensors: Mapping[str, Any]) -> None:
    """Raises InvalidInput naming a tensor that shares memory with out. The kernel may still read it after it has stored
    a part of out.

    Args:
        tensors: argument -> tensor of the same device, or None.
    """
    begin = out.data_ptr()
    end = begin + _extent_bytes(out)
    for name, tensor in tensors.items():
        if tensor is None or (first := tensor.data_ptr()) >= end or first + _extent_bytes(tensor) <= begin:
            continue
        if not _are_interleaved(out, tensor):
            raise InvalidInput(f"out shares memory with {name}, which is read while out is written; pass other memory")


def _extent_bytes(tensor: torch.Tensor, period: int = 0) -> int:
    """Returns the bytes from the first element to the end of the last one; 0 if there is no element. Axes whose stride
    in bytes is a multiple of `period` are left out."""
    size = tensor.element_size()
    if not period and tensor.is_contiguous():
        return tensor.nbytes
    strides = [stride * size for stride in tensor.stride()]
    steps = (
        (length - 1) * step for length, step in zip(tensor.shape, strides, strict=True) if not period or step % period
    )
    return sum(steps) + size if tensor.numel() else 0


def _are_interleaved(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors are different columns of the rows of one buffer, such as the parts of a packed
    projection: modulo the bytes of a row, they lie apart."""
    for period in {stride * a.element_size() for stride in a.stride()} - {0}:
        distance = (b.data_ptr() - a.data_ptr()) % period
        if _extent_bytes(a, period) <= distance and distance + _extent_bytes(b, period) <= period:
            return True
    return False
