"""The pools of a `PagedKVCache`, and the factors of 8-bit ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from warpwave.checks.calls import DTYPE_NAMES
from warpwave.errors import InvalidInput, InvalidType
from warpwave.gpu import present_device
from warpwave.kernels import cache_descales, descales
from warpwave.options import as_bool

Pair = tuple[torch.Tensor | None, torch.Tensor | None]


def check_given(
    dtype: torch.dtype, device: torch.device | str, given: Pair, num_layers: int, num_heads_kv: int
) -> Pair:
    """Checks the dtype of a cache and the factors of heads that were given with it.

    Args:
        given: k_descale and v_descale.

    Returns:
        The factors on the device, (num_layers, num_heads_kv); None where none were given.

    Raises:
        InvalidType: the dtype is none that a cache can have, or a factor is not a float32 tensor.
        InvalidInput: one factor was given without the other, or has a wrong shape or a value that is not positive and
            finite; or the device is a GPU and there is none.
        UnsupportedProblem: the device has no float8.
    """
    known = (*DTYPE_NAMES, *cache_descales.DTYPES)
    if dtype not in known:
        raise InvalidType(f"dtype is {dtype}; it must be one of {', '.join(map(str, known))}")
    cache_descales.check_device(dtype, present_device(device))
    named = dict(zip(("k_descale", "v_descale"), given, strict=True))
    if dtype not in cache_descales.DTYPES and any(factor is not None for factor in given):
        raise InvalidInput(f"k_descale or v_descale was given and dtype is {dtype}; only 8-bit caches have factors")
    if (given[0] is None) != (given[1] is None):
        missing = next(name for name, factor in named.items() if factor is None)
        raise InvalidInput(f"{missing} is None and the other factor was given; give both, or none")
    found: list[torch.Tensor | None] = []
    for name, factor in named.items():
        if factor is None:
            found.append(None)
            continue
        if not isinstance(factor, torch.Tensor) or factor.dtype != torch.float32:
            raise InvalidType(f"{name} is {getattr(factor, 'dtype', type(factor).__name__)}; it must be float32")
        shapes = ((num_heads_kv,), (num_layers, num_heads_kv))
        if tuple(factor.shape) not in shapes:
            raise InvalidInput(f"{name} has shape {tuple(factor.shape)}; it must be {shapes[0]} or {shapes[1]}")
        descales.check_positive(name, factor)
        found.append(factor.detach().to(device).expand(num_layers, num_heads_kv))
    return found[0], found[1]


def check_latent(v_in_k: bool, dtype: torch.dtype, head_dim: int, head_dim_v: int) -> None:
    """Raises InvalidType or InvalidInput if no cache can have V in K with this dtype and these widths."""
    v_in_k = as_bool("v_in_k", v_in_k)
    if v_in_k and head_dim_v > head_dim:
        raise InvalidInput(f"head_dim_v is {head_dim_v} and v_in_k True; it must be at most head_dim, {head_dim}")
    if v_in_k and dtype in cache_descales.DTYPES:
        raise InvalidInput(f"v_in_k is True and dtype is {dtype}; a cache with V in K has 16 or 32 bits")


def of_layer(
    dtype: torch.dtype,
    device: torch.device | str,
    cells: tuple[int, int, int],
    widths: tuple[int, int],
    given: Pair,
    layer: int,
    v_in_k: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Returns new pools of K and V of a layer, and their factors: those that were given, or memory for one of each head
    of each token; None for a cache of 16 or 32 bits. V is None if it is part of K.

    Args:
        cells: (num_pages, page_size, num_heads_kv).
        widths: head_dim and head_dim_v.
        given: as `check_given` returns them.
    """
    k = torch.empty(*cells, widths[0], dtype=dtype, device=device)
    v = None if v_in_k else torch.empty(*cells, widths[1], dtype=dtype, device=device)
    if dtype not in cache_descales.DTYPES:
        return k, v, None, None
    of_k, of_v = (
        torch.empty(cells, dtype=torch.float32, device=device) if factor is None else factor[layer].clone()
        for factor in given
    )
    return k, v, of_k, of_v


def copy_pages(layers: Iterable[tuple[torch.Tensor | None, ...]], old: torch.Tensor, new: torch.Tensor) -> None:
    """Copies pages `old` of every pool to pages `new`, with the factors of their tokens."""
    for pool in (pool for layer in layers for pool in layer):
        if pool is not None and pool.dim() > 1:  # the factors of heads have no pages
            pool[new] = pool[old]
