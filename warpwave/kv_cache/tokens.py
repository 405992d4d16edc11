"""One layer's cache, the tokens that are written to it, and their rotation: the tensors, and their checks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from warpwave.checks.calls import bind_axes, is_plain
from warpwave.errors import InvalidInput, InvalidType
from warpwave.kernels import append_kv, cache_descales, descales
from warpwave.operands import is_part
from warpwave.options import as_bool, as_int


def integers(name: str, values: Any, each: str = "") -> list[int]:
    """Returns the numbers of a sequence on the host as a list of ints.

    Args:
        name: the argument's name, for messages.
        values: a sequence of integers.
        each: name of one number in messages; `name[i]` if empty.

    Raises:
        InvalidType: the values are not a sequence, or one of them is not an integer.
    """
    try:
        listed = list(values)
    except TypeError:
        raise InvalidType(f"{name} is {values!r}; it must be a sequence of integers") from None
    if {*map(type, listed)} <= {int}:  # a fifth of the loop's time
        return listed
    return [as_int(each or f"{name}[{i}]", v) for i, v in enumerate(listed)]


def integer_or_integers(name: str, value: Any, each: str = "") -> int | list[int]:
    """Returns one number as an int, or the numbers of a sequence as a list, like `as_int` and `integers`."""
    if isinstance(value, Iterable):
        return integers(name, value, each)
    number: int = as_int(each or name, value)
    return number


def one_or_many(rows: Any) -> list[int]:
    """Returns one row, or the rows of a sequence, as a list."""
    listed = integer_or_integers("rows", rows, "a row")
    return [listed] if isinstance(listed, int) else listed


class Rotary(NamedTuple):
    """Rotary position embedding: the angle of each pair of elements of a head at each position.

    Attributes:
        cos, sin: float32 (positions, rotary_dim / 2), rotary_dim at most head_dim: elements past it are not rotated.
        interleaved: whether pairs are adjacent (2i, 2i + 1), or (i, i + rotary_dim / 2) as in GPT-NeoX and Llama.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False

    @staticmethod
    def of(
        rotary_dim: int,
        positions: int,
        base: float = 10_000.0,
        interleaved: bool = False,
        device: torch.device | str = "cpu",
    ) -> Rotary:
        """Returns the usual angles, `position * base^(-2i / rotary_dim)` (Su et al., "RoFormer", 2021).

        Raises:
            InvalidInput: rotary_dim is not even and positive, positions is negative, or base is not positive.
            InvalidType: rotary_dim or positions is not an integer.
        """
        rotary_dim, positions = as_int("rotary_dim", rotary_dim), as_int("positions", positions)
        if isinstance(base, bool) or not isinstance(base, int | float):
            raise InvalidType(f"base is {base!r}; it must be a number")
        if rotary_dim < 2 or rotary_dim % 2 or positions < 0 or not 0 < base < math.inf:
            raise InvalidInput(
                f"rotary_dim is {rotary_dim}, positions {positions} and base {base}; rotary_dim must be even and "
                "positive, positions not negative, and base positive and finite"
            )
        frequencies = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim)
        angles = torch.arange(positions, dtype=torch.float64, device="cpu")[:, None] * frequencies
        return Rotary(angles.cos().float().to(device), angles.sin().float().to(device), interleaved)


@dataclass(frozen=True, eq=False)
class CacheLayer:
    """The tensors of one layer's cache, as kernels read them: allocated by the caller, or a layer of a `PagedKVCache`.

    Args:
        k: (num_pages, page_size, num_heads_kv, head_dim).
        v: (num_pages, page_size, num_heads_kv, head_dim_v).
        page_table: int32 (rows, pages_of_a_row): `page_table[row, i]` is the page that holds tokens `i * page_size` to
            `(i + 1) * page_size` of a row's sequence.
        seqused_k: int32 (rows,): number of tokens of each row.
        k_descale, v_descale: of pools of float8_e4m3fn or int8: float32, positive; `k * k_descale` and `v * v_descale`
            are the keys and values. (), (1,) or (num_heads_kv,) for factors that the caller chose, or (num_pages,
            page_size, num_heads_kv) for factors that are computed and written with each token.
    """

    k: torch.Tensor
    v: torch.Tensor
    page_table: torch.Tensor
    seqused_k: torch.Tensor
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None


def check_counts(name: str, counts: list[int], total: int, of: str, longest: int | None = None) -> None:
    """Raises InvalidInput if the lengths of packed sequences, host integers, do not add up to a packed tensor.

    Args:
        name: the argument's name.
        counts: tokens of each sequence.
        total: tokens of the packed tensor.
        of: the packed tensor's name, for messages.
        longest: max_seqlen_q, if it was given.
    """
    for i, count in enumerate(counts):
        if count < 0:
            raise InvalidInput(f"{name}[{i}] is {count}; it must be at least 0")
        if longest is not None and count > longest:
            raise InvalidInput(f"{name}[{i}] is {count}; max_seqlen_q is {longest}, and must be at least as large")
    if sum(counts) != total:
        raise InvalidInput(f"{name} sums to {sum(counts)}; it must sum to {total}, the tokens of {of}")


def check_offsets_tensor(offsets: Any, batch: int) -> None:
    """Raises InvalidInput or InvalidType if offsets of packed sequences are not int32 (batch + 1,)."""
    if not isinstance(offsets, torch.Tensor):
        raise InvalidType(f"cu_seqlens is a {type(offsets).__name__}; it must be a torch.Tensor")
    if offsets.dtype != torch.int32:
        raise InvalidType(f"cu_seqlens is {offsets.dtype}; it must be torch.int32")
    if offsets.dim() != 1 or len(offsets) != batch + 1:
        raise InvalidInput(f"cu_seqlens has shape {tuple(offsets.shape)} for {batch} rows; it must be ({batch + 1},)")


def values_in(layer: CacheLayer, k_new: torch.Tensor) -> torch.Tensor | None:
    """Returns the values of new tokens of a latent cache, the first columns of their keys; None for any other cache."""
    return k_new[..., : layer.v.shape[-1]] if k_new.dim() and is_part(layer.v, layer.k) else None


def new_tokens(
    layer: CacheLayer,
    k_new: torch.Tensor | None,
    v_new: torch.Tensor | None,
    *,
    q: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    packed: bool = False,
    rotary: Rotary | None = None,
) -> append_kv.New:
    """Checks new tokens against a cache and describes their launch; q, if given, is also rotated, into a new tensor.

    Args:
        cu_seqlens: offsets of packed tokens on the device.
        packed: whether the tokens are packed although the offsets come later.

    Raises:
        InvalidInput, InvalidType: naming the argument that does not fit.
    """
    axes: dict[str, tuple[int, str]] = {}
    bind_axes("the cache's k", layer.k, "num_pages page_size num_heads_kv head_dim", axes)
    bind_axes("the cache's v", layer.v, "num_pages page_size num_heads_kv head_dim_v", axes)
    allowed = _check_pools(layer)
    packed = packed or cu_seqlens is not None
    leading = "total" if packed else "batch seqlen"
    if (k_new is None) != (v_new is None):
        raise InvalidInput("k_new and v_new must be given together; one of them is None")
    tensors = {
        "k_new": (k_new, f"{leading} num_heads_kv head_dim"),
        "v_new": (v_new, f"{leading} num_heads_kv head_dim_v"),
    }
    if rotary is None:
        q = None
    for name, (tensor, pattern) in {**tensors, "q": (q, f"{leading} num_heads_q head_dim")}.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise InvalidType(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor.is_nested or tensor.layout is not torch.strided:
            raise InvalidType(f"{name} is no plain strided tensor; it must be one, as to_dense() returns it")
        if tensor.dtype not in allowed:
            must = "they must share one dtype" if len(allowed) == 1 else f"it must be {' or '.join(map(str, allowed))}"
            raise InvalidType(f"{name} is {tensor.dtype} and the cache {layer.k.dtype}; {must}")
        if tensor.device != layer.k.device:
            raise InvalidInput(f"{name} is on {tensor.device} and the cache on {layer.k.device}")
        bind_axes(name, tensor, pattern, axes)
    if rows is not None and not packed:
        bind_axes("rows", rows, "batch", axes)
    if cu_seqlens is not None:
        check_offsets_tensor(cu_seqlens, len(cu_seqlens) - 1 if rows is None else len(rows))
    is_latent = layer.k.data_ptr() == layer.v.data_ptr() != 0  # 0 without memory
    if is_latent and k_new is not None and not is_part(v_new, k_new):
        width = layer.v.shape[-1]
        raise InvalidInput(
            f"v_new is not the first columns of k_new, and a latent cache stores both once; omit v_new, or pass "
            f"k_new[..., :{width}]"
        )
    if rotary is not None:
        _check_rotary(rotary, layer)
        if k_new is not None and is_latent:
            raise InvalidInput(
                "rotary rotates the first columns of k_new, and in a latent cache these are its v; rotate the columns "
                "after those of v, of q and of k_new, before the call"
            )
    # Kernels read memory directly, but torch may have deferred a negation.
    k_new, v_new, q = (None if t is None else t.resolve_neg() for t in (k_new, v_new, q))
    return append_kv.New(
        k_new,
        v_new,
        q,
        None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device),
        layer.k,
        layer.v,
        layer.page_table,
        layer.seqused_k,
        rows,
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        None if rotary is None else rotary.cos,
        None if rotary is None else rotary.sin,
        layer.k_descale,
        layer.v_descale,
    )


def _check_pools(layer: CacheLayer) -> tuple[torch.dtype, ...]:
    """Checks the dtypes and factors of a cache that tokens are written to; returns the dtypes that tokens may have."""
    dtype, factors = layer.k.dtype, {"k_descale": layer.k_descale, "v_descale": layer.v_descale}
    if layer.v.dtype != dtype:
        raise InvalidType(f"the cache's v is {layer.v.dtype} and its k {dtype}; both pools must share one dtype")
    if dtype not in cache_descales.DTYPES:
        return (dtype,)
    for name, factor in factors.items():
        if not isinstance(factor, torch.Tensor) or factor.dtype != torch.float32:
            found = getattr(factor, "dtype", type(factor).__name__)
            raise InvalidType(f"{name} is {found} and the cache {dtype}; it must be a float32 tensor")
        if factor.device != layer.k.device:
            raise InvalidInput(f"{name} is on {factor.device} and the cache on {layer.k.device}")
    cache_descales.check_same_kind(layer.k_descale, layer.v_descale, tuple(layer.k.shape[:3]))
    cache_descales.check_device(dtype, layer.k.device)
    return tuple(descales.SIXTEEN_BIT)


def check_positions(rotary: Rotary, longest: int) -> None:
    """Raises InvalidInput if a sequence of `longest` tokens has positions past the table of angles."""
    if longest > len(rotary.cos):
        raise InvalidInput(
            f"rotary has angles for {len(rotary.cos)} positions and a sequence would have {longest} tokens"
        )


def _check_rotary(rotary: Rotary, layer: CacheLayer) -> None:
    if not isinstance(rotary, Rotary):
        raise InvalidType(f"rotary is a {type(rotary).__name__}; it must be a warpwave.Rotary")
    as_bool("rotary.interleaved", rotary.interleaved)
    axes: dict[str, tuple[int, str]] = {}
    for name in ("cos", "sin"):
        tensor = getattr(rotary, name)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
            raise InvalidType(f"rotary.{name} is {getattr(tensor, 'dtype', type(tensor).__name__)}; it must be float32")
        if not is_plain(tensor):
            raise InvalidType(
                f"rotary.{name} is a subclass, sparse, nested or lazily negated; it must be a plain strided tensor "
                "(resolve_neg() negates)"
            )
        if tensor.device != layer.k.device:
            raise InvalidInput(f"rotary.{name} is on {tensor.device} and the cache on {layer.k.device}")
        bind_axes(f"rotary.{name}", tensor, "positions rotary_dim/2", axes)
        if not tensor.is_contiguous():
            raise InvalidInput(f"rotary.{name} is not contiguous; pass rotary.{name}.contiguous()")
    positions, half = axes["positions"][0], axes["rotary_dim/2"][0]
    if positions < 1 or not 0 < 2 * half <= layer.k.shape[-1]:
        raise InvalidInput(
            f"rotary.cos has shape ({positions}, {half}); it must hold at least one position and rotate 2 to "
            f"head_dim = {layer.k.shape[-1]} elements, two a column"
        )
