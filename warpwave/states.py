"""`merge_states`: merges attention over parts of the keys into attention over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from warpwave.checks.calls import DTYPE_NAMES
from warpwave.errors import InvalidInput, InvalidType
from warpwave.options import as_bool


def merge_states(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], *, packed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges partial results, each of the same queries over different keys, into the result over all the keys.

    `out = sum(exp(lse_s - lse) * out_s)` with `lse = log(sum(exp(lse_s)))`. A part that saw no key of a row (lse minus
    infinity) adds nothing to it, whatever its out holds; a row that no part saw is 0 and minus infinity. Parts must not
    overlap, and a sink must be in only one of them.

    Args:
        outs: partial outputs, (batch, seqlen_q, num_heads_q, head_dim_v) each, or (total_q, num_heads_q, head_dim_v)
            with `packed`; float16, bfloat16 or float32. In float32 nothing is lost between the parts.
        lses: their natural log-sum-exps, float32, (batch, num_heads_q, seqlen_q), or (num_heads_q, total_q).
        packed: whether the tensors are those of `attention_varlen`.

    Returns:
        out: shaped as the parts, in their dtype, the sum computed in float32 in the order given.
        lse: float32.

    Raises:
        InvalidInput: no parts, not as many outs as lses, or shapes that differ or do not fit.
        InvalidType: not tensors, or a wrong dtype.

    Note:
        Differentiable by torch's autograd in every out and lse. Dao et al., "Flash-Decoding" (2023).

    Example:
        >>> import torch, warpwave
        >>> q, k, v = (torch.randn(1, 100, 2, 16) for _ in range(3))
        >>> halves = [warpwave.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(60), slice(60, None))]
        >>> out, lse = warpwave.merge_states(*zip(*halves))
        >>> torch.allclose(out, warpwave.attention(q, k, v), atol=1e-5)
        True
    """
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, Iterable) or getattr(parts, "ndim", 1) == 0:  # a tensor without axes has no items
            raise InvalidType(f"{name} is a {type(parts).__name__}; it must be a sequence of tensors")
    outs, lses = list(outs), list(lses)
    packed = as_bool("packed", packed)
    _check(outs, lses, packed)
    lse = torch.stack(lses)  # [parts, ...]
    largest = lse.amax(0)
    # Covers rows that no part saw. Rows whose LSE is plus infinity give NaN.
    shift = torch.where(largest == -torch.inf, 0.0, largest).detach()
    weights = torch.exp(lse - shift)
    total = weights.sum(0)
    out = torch.zeros(outs[0].shape, dtype=torch.float32, device=outs[0].device)
    for weight, part in zip(weights, outs, strict=True):
        by_row = _as_rows(weight, packed)
        # A part without weight is removed before the product, not after it: its NaN would reach the weight's gradient
        # as 0 * NaN.
        out = out + by_row * torch.where(by_row == 0, 0.0, part.float())
    out = out / _as_rows(torch.where(total == 0, 1.0, total), packed)
    merged = torch.where(total == 0, -torch.inf, shift + torch.log(torch.where(total == 0, 1.0, total)))
    return out.to(outs[0].dtype), merged


def _as_rows(x: torch.Tensor, packed: bool) -> torch.Tensor:
    """Returns a tensor in the layout of lse as one that broadcasts over out."""
    return (x.transpose(0, 1) if packed else x.transpose(1, 2))[..., None]


def _check(outs: list[torch.Tensor], lses: list[torch.Tensor], packed: bool) -> None:
    if not outs or len(outs) != len(lses):
        raise InvalidInput(f"{len(outs)} outs and {len(lses)} lses were given; there must be as many, at least one")
    for name, tensors in (("outs", outs), ("lses", lses)):
        for i, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                raise InvalidType(f"{name}[{i}] is a {type(tensor).__name__}; it must be a torch.Tensor")
            if tensor.is_nested or tensor.layout is not torch.strided:
                raise InvalidType(f"{name}[{i}] is a nested or sparse tensor; it must be a plain strided one")
            if tensor.device != outs[0].device:
                raise InvalidInput(f"{name}[{i}] is on {tensor.device} and outs[0] on {outs[0].device}")
    axes = "(total_q, num_heads_q, head_dim_v)" if packed else "(batch, seqlen_q, num_heads_q, head_dim_v)"
    first = outs[0]
    if first.dim() != (3 if packed else 4):
        raise InvalidInput(f"outs[0] has shape {tuple(first.shape)}; it must be {axes}")
    wanted = (first.shape[1], first.shape[0]) if packed else (first.shape[0], first.shape[2], first.shape[1])
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.dtype not in DTYPE_NAMES or out.dtype != first.dtype:
            raise InvalidType(
                f"outs[{i}] is {out.dtype}; outs must share one dtype of {', '.join(map(str, DTYPE_NAMES))}"
            )
        if lse.dtype != torch.float32:
            raise InvalidType(f"lses[{i}] is {lse.dtype}; it must be torch.float32")
        if out.shape != first.shape:
            raise InvalidInput(f"outs[{i}] has shape {tuple(out.shape)} and outs[0] {tuple(first.shape)}")
        if tuple(lse.shape) != wanted:
            names = "(num_heads_q, total_q)" if packed else "(batch, num_heads_q, seqlen_q)"
            raise InvalidInput(f"lses[{i}] has shape {tuple(lse.shape)}; it must be {names}, {wanted}")
