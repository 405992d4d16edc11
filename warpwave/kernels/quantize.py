"""Quantizes q, k and v for attention: float8 or int8 numbers, and the factors that undo it.

A factor is the largest magnitude among the numbers that share it, over the largest number of the dtype. Three options
make the numbers that share a factor more alike, and none of them changes the softmax:

- smoothing subtracts from k its mean over the keys: `q . (k - mean)` differs from `q . k` by one number for each row.
  Zhang et al., "SageAttention" (2024), section 4.2.
- rotation multiplies q and k by one orthogonal matrix, which spreads a channel of outliers over all channels:
  `(q R) . (k R) = q . k`. R is a Hadamard matrix with random signs. Ashkboos et al., "QuaRot" (2024), section 4.
- clipping ignores the largest magnitudes of a block: they saturate, and all others keep more bits.

A separate pass computes the mean of k; quantize_tensor.py does the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from warpwave.errors import InvalidInput, InvalidType, UnsupportedProblem
from warpwave.kernels import descales
from warpwave.kernels.quantize_tensor import (
    LARGEST,
    Rounding,
    Source,
    is_eager,
    prepare,
    rotated,
    rotation_block,
)
from warpwave.options import as_bool, as_int
from warpwave.problem import DTYPE_BYTES
from warpwave.runtime import launch
from warpwave.runtime.bounded import Bounded

SOURCES = (torch.float16, torch.bfloat16, torch.float32)
GRANULARITIES = ("tensor", "head", 64, 128)


@dataclass(frozen=True)
class Quantized:
    """Quantized q, k and v, and what undoes the quantizing.

    Args:
        q, k, v: of the shapes of the originals, contiguous.
        q_descale, k_descale, v_descale: float32 factors, as `warpwave.attention` takes them; v_descale is None if v
            kept its 16 bits.
        k_mean: what was subtracted from k before it was rotated, float32 (batch, num_heads_kv, head_dim), packed
            (num_heads_kv, head_dim); None without smoothing.
        rotated: whether q and k are rotated.
        saturated: int64 (3,), how many values of q, k and v saturated, on the device; 0 without clipping.
        moved_bytes: bytes that quantizing read from and wrote to memory, without the factors.
        cu_seqlens_q, cu_seqlens_k: of packed calls.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor | None
    k_mean: torch.Tensor | None
    rotated: bool
    saturated: torch.Tensor
    moved_bytes: int
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        """Returns q, k, v and the factors by the names of `warpwave.attention`'s arguments."""
        names = ("q", "k", "v", "q_descale", "k_descale", "v_descale")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def dequantized(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns q, k and v in float32, with factors, rotation and smoothing undone."""
        q, k, v = (
            t.float() if factor is None else t.float() * descales.of_tokens(factor, _block_of(t, factor), t, offsets)
            for t, factor, offsets in (
                (self.q, self.q_descale, self.cu_seqlens_q),
                (self.k, self.k_descale, self.cu_seqlens_k),
                (self.v, self.v_descale, self.cu_seqlens_k),
            )
        )
        if self.rotated:
            q, k = rotated(q, inverse=True), rotated(k, inverse=True)
        if self.k_mean is not None:
            k = k + (self.k_mean if k.dim() == 3 else self.k_mean[:, None])
        return q, k, v


def quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    dtype_v: torch.dtype | None = None,
    granularity: str | int = 128,
    smooth_k: bool = False,
    rotate: bool = False,
    percentile: float = 1.0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Quantized:
    """Quantizes q, k and v for `warpwave.attention`.

    Args:
        q, k, v: float16, bfloat16 or float32, as `warpwave.attention` takes them, or packed with offsets.
        dtype: of q and k: torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8.
        dtype_v: of v: float8 beside float8, int8 beside int8, float16 or bfloat16. None: `dtype` beside float8;
            beside int8 the dtype of v if it has 16 bits, otherwise bfloat16.
        granularity: what shares a factor: `"tensor"`, `"head"` (of one sequence), or 64 or 128 consecutive tokens of a
            head, which packed calls do not have.
        smooth_k: subtract from k its mean over the keys. out does not change, except under a softcap or with sinks,
            which compare scores with a fixed number; lse is lower by `softmax_scale * q . mean`.
        rotate: multiply q and k by a Hadamard matrix with random signs, over the largest power of two of channels, up
            to 128, that divides head_dim.
        percentile: the share of the magnitudes of a block that keep their value, above 0.5 and at most 1; the others
            saturate, and are counted. Less than 1 needs a granularity of blocks.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: of packed tensors, as in `attention_varlen`.

    Returns:
        A `Quantized`: `warpwave.attention(**quantized.arguments(), causal=True)`.

    Raises:
        InvalidInput: a shape or a value that no call can have.
        InvalidType: a type that no call can have, or a dtype that cannot be quantized, or be quantized to.
        UnsupportedProblem: a gradient would be lost.

    Note:
        A block that contains Inf or NaN gets an infinite factor, which `checked=True` of the call refuses.
        Repeatable bit for bit.

    Example:
        >>> import torch, warpwave
        >>> q, k, v = (torch.randn(1, 256, 4, 64) for _ in range(3))
        >>> quantized = warpwave.quantize(q, k, v, rotate=True)
        >>> warpwave.attention(**quantized.arguments(), causal=True).dtype
        torch.bfloat16
    """
    smooth_k, rotate = as_bool("smooth_k", smooth_k), as_bool("rotate", rotate)
    offsets, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    key, plan = None, None
    with contextlib.suppress(AttributeError, TypeError, RuntimeError):  # bad input is reported by `_check`
        tensors = _straightened(q, k, v, offsets)
        if is_eager():
            # Types too, because True equals 1 and 64.0 equals 64.
            said = dtype, dtype_v, granularity, smooth_k, rotate, percentile, *longest
            key = *said, *map(type, said), *launch.layouts(tensors)
            plan = _plans.get(key)
    if plan is None:
        to_v = _check(q, k, v, dtype, dtype_v, granularity, percentile, offsets, longest)
        if rotate and rotation_block(q.shape[-1]) == 1:
            raise InvalidInput(f"rotate is True and head_dim is {q.shape[-1]}; it mixes a power of two of channels")
        tensors = _straightened(q, k, v, offsets)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise UnsupportedProblem(
            "quantize has no gradients, and q, k or v requires one", {}, "torch.no_grad() around it, or x.detach()"
        )
    mean = _mean_of_keys(tensors[1]) if smooth_k else None
    saturated = torch.zeros(3, dtype=torch.int64, device=q.device)
    if plan is None:
        plan = Plan(tensors, (dtype, dtype, to_v), granularity, mean, rotate, percentile, longest, saturated)
        if key is not None:
            _plans.put(key, plan)
    return plan(tensors, mean, saturated, offsets)


def _straightened(q: Any, k: Any, v: Any, offsets: tuple[Any, Any]) -> tuple[Any, ...]:
    """Returns the tensors as a launch reads them: numbers with their sign, and contiguous offsets."""
    return *(x.resolve_neg() for x in (q, k, v)), *(None if t is None else t.contiguous() for t in offsets)


class Plan:
    """The run of calls of one layout: their tensors are neither checked nor described again.

    Args:
        tensors: q, k, v and contiguous offsets. Of tensors, only the layout is kept.
        dtypes: of the results.
        mean: of the keys, not rotated; None without smoothing.
        longest: max_seqlen_q and max_seqlen_k.
        granularity, rotate, percentile: as `quantize` takes them.
        saturated: the counts of q, k and v, as in `Quantized`.
    """

    def __init__(
        self,
        tensors: Sequence[Any],
        dtypes: Sequence[torch.dtype],
        granularity: str | int,
        mean: torch.Tensor | None,
        rotate: bool,
        percentile: float,
        longest: Sequence[int | None],
        saturated: torch.Tensor,
    ) -> None:
        *operands, offset_q, offset_k = tensors
        self.dtypes, self.rotate, self.clips = dtypes, rotate, percentile < 1
        self.moved = 0 if mean is None else operands[1].numel() * operands[1].element_size()
        self.roundings: list[Rounding | None] = []
        shifted = self._shift(mean)
        for i, (x, to) in enumerate(zip(operands, dtypes, strict=True)):
            if to not in LARGEST:
                self.roundings.append(None)
                continue
            source = Source(
                x, to, granularity, shifted if i == 1 else None, rotate and i < 2, percentile,
                offset_k if i else offset_q, longest[min(i, 1)] or 0,
            )  # fmt: skip
            self.roundings.append(prepare(source, self._counter(saturated, i)))
            reads = 1 if source.is_block else 2
            self.moved += x.numel() * (reads * x.element_size() + DTYPE_BYTES[descales.QUANTIZED[to]])

    def _shift(self, mean: torch.Tensor | None) -> torch.Tensor | None:
        """Returns what is subtracted from k when it has been rotated."""
        return rotated(mean) if mean is not None and self.rotate else mean

    def _counter(self, saturated: torch.Tensor, i: int) -> torch.Tensor | None:
        return saturated[i : i + 1] if self.clips else None

    def __call__(
        self, tensors: Sequence[Any], mean: torch.Tensor | None, saturated: torch.Tensor, offsets: Sequence[Any]
    ) -> Quantized:
        """Returns the result. `offsets` are the caller's."""
        *operands, offset_q, offset_k = tensors
        shifted = self._shift(mean)
        found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for i, (x, rounding) in enumerate(zip(operands, self.roundings, strict=True)):
            if rounding is None:
                found.append((x.to(self.dtypes[i]), None))
            else:
                counter = self._counter(saturated, i)
                found.append(rounding(x, shifted if i == 1 else None, offset_k if i else offset_q, counter))
        (q8, q_descale), (k8, k_descale), (v8, v_descale) = found
        assert q_descale is not None and k_descale is not None
        moved, mixed = self.moved, self.rotate
        return Quantized(q8, k8, v8, q_descale, k_descale, v_descale, mean, mixed, saturated, moved, *offsets)


_plans: Bounded[tuple[Any, ...], Plan] = Bounded(256)


def _mean_of_keys(k: torch.Tensor) -> torch.Tensor:
    """Returns the mean of the keys of each head, and of each sequence of a dense batch. Packed sequences share one,
    because subtracting the same vector from all keys of a sequence does not change its softmax."""
    along = k.dim() - 3
    if not k.shape[along]:
        return k.new_zeros((*k.shape[:along], *k.shape[-2:]), dtype=torch.float32)
    return k.mean(along, dtype=torch.float32)


def _block_of(t: torch.Tensor, factor: torch.Tensor) -> int:
    """Returns how many tokens of a dense tensor share a factor; 0 for all of a head."""
    if factor.dim() < 3:
        return 0
    return next(block for block in descales.BLOCKS if -(-t.shape[1] // block) == factor.shape[2])


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dtype: torch.dtype,
    dtype_v: torch.dtype | None,
    granularity: str | int,
    percentile: Any,
    offsets: tuple[Any, Any],
    longest: tuple[Any, Any],
) -> torch.dtype:
    """Checks the arguments of `quantize`; returns the dtype of v."""
    for name, x in zip("qkv", (q, k, v), strict=True):
        if not isinstance(x, torch.Tensor):
            raise InvalidType(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
        if x.layout is not torch.strided or x.is_nested:
            raise InvalidType(f"{name} is a sparse or nested tensor; it must be a plain strided one")
        if x.dtype not in SOURCES:
            raise InvalidType(f"{name} is {x.dtype}; it must be one of {', '.join(map(str, SOURCES))}")
        if x.device != q.device:
            raise InvalidInput(f"{name} is on {x.device} and q on {q.device}; all tensors must share one device")
        if x.dim() not in (3, 4) or x.dim() != q.dim() or 0 in x.shape[-2:]:
            raise InvalidInput(
                f"{name} has shape {tuple(x.shape)}; q, k and v must be (batch, seqlen, num_heads, head_dim), or "
                "packed (total_tokens, num_heads, head_dim)"
            )
    if k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1] or (q.dim() == 4 and len(q) != len(k)):
        raise InvalidInput(
            f"q is {tuple(q.shape)}, k is {tuple(k.shape)} and v is {tuple(v.shape)}; q and k must share head_dim, k "
            "and v tokens and heads, and all three the batch"
        )
    if not isinstance(dtype, torch.dtype) or dtype not in LARGEST:
        raise InvalidType(f"dtype is {dtype}; it must be one of {', '.join(map(str, LARGEST))}")
    if dtype_v is None:
        dtype_v = dtype if dtype in descales.FLOAT8 else v.dtype if v.dtype in descales.SIXTEEN_BIT else torch.bfloat16
    allowed = descales.dtypes_of_v(dtype)
    if not isinstance(dtype_v, torch.dtype) or dtype_v not in allowed:
        raise InvalidType(
            f"dtype_v is {dtype_v} and dtype is {dtype}; it must be one of {', '.join(map(str, allowed))}"
        )
    # 64.0 and True equal an allowed value or an int, and would select another granularity.
    if type(granularity) not in (str, int) or granularity not in GRANULARITIES:
        raise InvalidInput(f"granularity is {granularity!r}; it must be one of {', '.join(map(repr, GRANULARITIES))}")
    if isinstance(percentile, bool) or not isinstance(percentile, (int, float)):
        raise InvalidType(f"percentile is {percentile!r}; it must be a number")
    if not 0.5 < percentile <= 1:
        raise InvalidInput(f"percentile is {percentile}; it must be above 0.5 and at most 1")
    if percentile < 1 and isinstance(granularity, str):
        raise InvalidInput(f"percentile is {percentile} and granularity {granularity!r}; clipping needs 64 or 128")
    packed = q.dim() == 3
    for side, offset, length in zip("qk", offsets, longest, strict=True):
        if packed != (offset is not None) or packed != (length is not None):
            raise InvalidInput(
                f"q has {q.dim()} axes, cu_seqlens_{side} is {'None' if offset is None else 'given'} and "
                f"max_seqlen_{side} is {length}; packed tensors, and no others, need both"
            )
        if offset is None:
            continue
        if not isinstance(offset, torch.Tensor):
            raise InvalidType(f"cu_seqlens_{side} is a {type(offset).__name__}; it must be a torch.Tensor")
        if offset.dtype != torch.int32 or offset.dim() != 1 or not len(offset):
            raise InvalidType(
                f"cu_seqlens_{side} is {offset.dtype} {tuple(offset.shape)}; it must be int32 (batch + 1,)"
            )
        if offset.device != q.device:
            raise InvalidInput(
                f"cu_seqlens_{side} is on {offset.device} and q on {q.device}; all tensors must share one device"
            )
        if as_int(f"max_seqlen_{side}", length) < 0:
            raise InvalidInput(f"max_seqlen_{side} is {length}; it must be at least 0")
    if packed and isinstance(granularity, int):
        raise InvalidInput(f"granularity is {granularity} in a packed call; it must be 'tensor' or 'head'")
    return dtype_v
