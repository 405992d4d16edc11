"""The arguments of a call that are not tensors, each in one canonical form, and all of them as `Options`.

A plan is found by equality, and 1, 1.0, True and NumPy's 1 are equal. Each value is therefore converted to one type
before a look-up, or refused.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from warpwave.errors import InvalidInput, InvalidType
from warpwave.kernels import descales, dropout
from warpwave.problem import PRECISIONS, Causal

LARGEST = torch.finfo(torch.float32).max  # of the factors of scores: above, a factor would be infinite in float32
PRECISION_NAMES = ", ".join(map(repr, PRECISIONS))


class Options(NamedTuple):
    """All arguments of a call that are not tensors, in the order of the operator's schema."""

    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    causal: str = ""
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    softmax_scale: float | None = None
    precision: str = "default"
    return_lse: bool = False
    needs_grad: bool = False
    dropout_p: float = 0.0
    deterministic: bool | None = None
    out_dtype: str = ""  # of a call with quantized q, k and v; "" for the default

    def must_repeat(self) -> bool:
        """Returns whether gradients must repeat bit for bit: `deterministic`, or torch's setting now if None."""
        return torch.are_deterministic_algorithms_enabled() if self.deterministic is None else self.deterministic


def options_of(
    tensors: Iterable[Any],
    causal: bool | Causal,
    window_size: tuple[int, int] | None,
    softcap: float,
    softmax_scale: float | None,
    precision: str | float,
    return_lse: bool,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    out_dtype: torch.dtype | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> Options:
    """Returns the options of a call from the arguments that its caller gave.

    Args:
        tensors: all tensors of the call, None where absent. Whether one of them requires a gradient is an option.

    Raises:
        InvalidInput, InvalidType: a value that cannot be spelled in the operator's schema.
    """
    if causal is False:
        alignment = ""
    elif causal is True:
        alignment = "bottom_right"
    elif isinstance(causal, Causal):
        alignment = causal.alignment
    else:
        raise InvalidType(f"causal is {causal!r}; it must be True, False or a warpwave.Causal")
    left, right = as_window(window_size)
    needs_grad = torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)
    lengths, how = (max_seqlen_q, max_seqlen_k), spell_precision(precision)
    out = "" if out_dtype is None else descales.name_of(out_dtype)
    return Options(
        *(*lengths, alignment, left, right, softcap, softmax_scale, how, return_lse, needs_grad, dropout_p),
        *(deterministic, out),
    )


def spell_scalars(
    window_size: tuple[int, int] | None, softcap: float | None, softmax_scale: float | None, return_lse: bool
) -> tuple[tuple[int, int] | None, float, float | None, bool]:
    """Returns the scalars of a call in canonical types."""
    window = None if window_size is None else as_window(window_size)
    scale = None if softmax_scale is None else as_float("softmax_scale", softmax_scale)
    cap = 0.0 if softcap is None else as_float("softcap", softcap)
    return window, cap, scale, as_bool("return_lse", return_lse)


def spell_switches(
    dropout_p: float, deterministic: bool | None, dropout_seed: torch.Tensor | None
) -> tuple[float, bool | None]:
    """Returns dropout_p and deterministic in canonical types, and checks the seed."""
    if dropout_seed is not None:
        dropout.check_seed(dropout_seed)
    dropout_p = as_float("dropout_p", dropout_p)
    return dropout_p, None if deterministic is None else as_bool("deterministic", deterministic)


def as_float(name: str, value: Any) -> Any:
    """Returns a number as a float; a symbolic number of torch.compile unchanged.

    Raises:
        InvalidInput: the value is an integer beyond the range of a float.
        InvalidType: the value is a tensor, a bool, or not a real number.
    """
    if value.__class__ is float or isinstance(value, torch.SymFloat | torch.SymInt):
        return value
    if isinstance(value, torch.Tensor):
        raise InvalidType(
            f"{name} is a {type(value).__name__}; it must be a Python number. A tensor's gradient would be lost: "
            "multiply q by the tensor instead"
        )
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidType(f"{name} is {value!r}; it must be a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidInput(f"{name} is an integer beyond the range of a float; it must be smaller") from None


def as_int(name: str, value: Any) -> Any:
    """Returns an integer, NumPy's included, as an int; a symbolic one of torch.compile unchanged.

    Raises:
        InvalidType: the value is a tensor, a bool, or not an integer.
    """
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    try:
        if isinstance(value, bool | torch.Tensor):
            raise TypeError
        return operator.index(value)
    except TypeError:
        found = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
        raise InvalidType(f"{name} is {found}; it must be an integer") from None


def as_window(window_size: Any) -> tuple[Any, Any]:
    """Returns both sides of a window, (-1, -1) for None.

    Raises:
        InvalidType: the value is not a pair of integers.
        InvalidInput: a side has more than 63 bits.
    """
    if window_size is None:
        return (-1, -1)
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise InvalidType(f"window_size is {window_size!r}; it must be (left, right), -1 for unlimited") from None
    left, right = as_int("the left side of window_size", left), as_int("the right side of window_size", right)
    for side in (left, right):
        if type(side) is int and not -(2**63) <= side < 2**63:
            raise InvalidInput(f"window_size is {window_size!r}; each side must fit in 64 bits")
    return left, right


def as_bool(name: str, value: Any) -> bool:
    """Returns a bool, NumPy's included, as a bool.

    Raises:
        InvalidType: the value is anything else.
    """
    if value.__class__ is not bool and type(value).__name__ != "bool":  # NumPy's class has the same name
        raise InvalidType(f"{name} is {value!r}; it must be True or False")
    return bool(value)


def with_positive_scale(q: Any, softmax_scale: Any) -> tuple[Any, Any]:
    """Returns q and the scale, both negated if the scale is negative. Scores keep their bits, and kernels may take the
    maximum of the products before they scale it."""
    if softmax_scale is not None and -LARGEST <= softmax_scale < 0 and isinstance(q, torch.Tensor):
        if q.dtype in descales.QUANTIZED:
            raise InvalidInput(f"softmax_scale is {softmax_scale} and q is {q.dtype}; negate q before it is quantized")
        return -q, -softmax_scale
    return q, softmax_scale


def as_logits(sinks: Any, q: Any) -> Any:
    """Returns sinks in the 16-bit dtype of q as float32, which kernels read; anything else unchanged. With quantized q,
    and under autocast, which may still cast q, sinks of both 16-bit dtypes are converted."""
    if not (isinstance(sinks, torch.Tensor) and isinstance(q, torch.Tensor)):
        return sinks
    if sinks.dtype not in (torch.float16, torch.bfloat16):
        return sinks
    is_any = q.dtype in descales.QUANTIZED or torch.is_autocast_enabled(q.device.type)
    return sinks.float() if is_any or sinks.dtype == q.dtype else sinks


def unexpanded(mask: Any, q: Any, k: Any) -> Any:
    """Returns a mask with size 1 along each axis that `expand` repeats. A mask without such an axis, or one that the
    checks will refuse, is returned unchanged. Kernels choose by shapes how they read a mask, and transformers expands
    padding along queries."""
    is_plain = isinstance(mask, torch.Tensor) and mask.layout is torch.strided and not mask.is_nested
    if not is_plain or 0 not in mask.stride():  # few calls: every masked call pays for them
        return mask
    if not all(isinstance(t, torch.Tensor) and not t.is_nested and t.ndim == 4 for t in (mask, q, k)):
        return mask
    scores = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if all(size in (1, whole) for size, whole in zip(mask.shape, scores, strict=True)):
        for axis in range(4):
            if mask.stride(axis) == 0 and mask.shape[axis] > 1:
                mask = mask.narrow(axis, 0, 1)
    return mask


def spell_precision(precision: Any) -> str:
    """Returns the caller's `precision`, checked, in the form of `Options` and the operators' schema: a budget is the
    shortest text that parses to the same number.

    Raises:
        InvalidInput: an unknown name, or a budget that is not between 0 and 1.
        InvalidType: neither a name nor a number.
    """
    if isinstance(precision, str):
        if precision not in PRECISIONS:
            raise InvalidInput(f"precision is {precision!r}; it must be one of {PRECISION_NAMES}, or a number")
        return precision
    if isinstance(precision, bool) or not isinstance(precision, numbers.Real):
        raise InvalidType(
            f"precision is {precision!r}; it must be one of {PRECISION_NAMES}, or a number, the relative error that "
            "out may have"
        )
    budget = as_float("precision", precision)
    if not 0 < budget < 1:
        raise InvalidInput(
            f"precision is {precision!r}; as a number it is the relative error that out may have, between 0 and 1"
        )
    return repr(budget)
