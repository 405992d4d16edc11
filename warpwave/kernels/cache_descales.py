"""The factors of a paged cache of 8-bit numbers: their shapes, and how kernels and torch apply them.

    k = k8 * k_descale,  v = v8 * v_descale,   score = softmax_scale * (q . k8) * k_descale

A factor belongs to a kv head, or to a kv head of one token. Both are in tensors that never move, and kernels read them
by strides. A number of 8 bits is exact in 16 bits, so kernels multiply K and V by 16-bit operands; the factors multiply
float32 scores and float32 probabilities or sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from warpwave.errors import InvalidInput, InvalidType, UnsupportedProblem
from warpwave.gpu import current_gpu
from warpwave.kernels import descales, reasons
from warpwave.operands import CachedOperands
from warpwave.problem import AttentionProblem

DTYPES = {torch.float8_e4m3fn: "float8_e4m3fn", torch.int8: "int8"}
FACTORS = ("head", "token")

# Arguments ------------------------------------------------------------------------------------------------------------


def check_problem(problem: AttentionProblem) -> None:
    """Raises InvalidInput if no call can have a problem's cache of 8-bit numbers."""
    p = problem
    if p.dtype_kv is None and p.kv_factors is None:
        return
    if p.dtype_kv not in DTYPES.values() or p.kv_factors not in FACTORS:
        raise InvalidInput(
            f"dtype_kv is {p.dtype_kv!r} and kv_factors {p.kv_factors!r}; they must both be None, or one of "
            f"{', '.join(DTYPES.values())}, and one of {', '.join(FACTORS)}"
        )
    if not p.page_size or p.dtype not in descales.SIXTEEN_BIT.values():
        raise InvalidInput(
            f"dtype_kv is {p.dtype_kv}, page_size {p.page_size} and dtype {p.dtype}; a cache of 8-bit numbers has "
            "pages, and queries of float16 or bfloat16"
        )


def check_dtypes(operands: CachedOperands) -> None:
    """Raises InvalidType if q, k and v have dtypes that no call on a cache with factors can have."""
    q, k, v = operands[:3]
    if k.dtype not in DTYPES:
        raise InvalidType(
            f"the cache's k is {k.dtype} and k_descale or v_descale was given; only pools of {_text(DTYPES)} have them"
        )
    if v.dtype != k.dtype:
        raise InvalidType(f"the cache's v is {v.dtype} and its k {k.dtype}; both pools must share one dtype")
    if q.dtype not in descales.SIXTEEN_BIT:
        raise InvalidType(f"q is {q.dtype}; on a cache of {k.dtype} it must be one of {_text(descales.SIXTEEN_BIT)}")


def describe(operands: CachedOperands) -> dict[str, str]:
    """Checks the shapes of the factors and returns the fields of the problem that describe the cache; none without
    factors.

    Raises:
        InvalidInput: a factor is missing, or has a shape that no cache can have, or K and V share theirs differently.
    """
    if operands.k_descale is None and operands.v_descale is None:
        return {}
    kind = check_same_kind(operands.k_descale, operands.v_descale, tuple(operands.k.shape[:3]))
    return {"dtype_kv": DTYPES[operands.k.dtype], "kv_factors": kind}


def check_same_kind(k_descale: torch.Tensor | None, v_descale: torch.Tensor | None, pool: tuple[int, ...]) -> str:
    """Returns what shares a factor, `"head"` or `"token"`, for K and V alike.

    Args:
        pool: (num_pages, page_size, num_heads_kv).

    Raises:
        InvalidInput: a factor is missing, or has a shape that no cache can have, or K and V share theirs differently.
    """
    of_k, of_v = _kind_of("k_descale", k_descale, pool), _kind_of("v_descale", v_descale, pool)
    if of_k != of_v:
        raise InvalidInput(
            f"k_descale is of each {of_k} and v_descale of each {of_v}; both must be of heads, or both of tokens"
        )
    return of_k


def _kind_of(name: str, factor: torch.Tensor | None, pool: tuple[int, ...]) -> str:
    heads = pool[2]
    wanted = (
        f"float32 of shape (), (1,), (num_heads_kv,) = ({heads},), or (num_pages, page_size, num_heads_kv) = {pool}"
    )
    if factor is None:
        raise InvalidInput(f"{name} is None; it must be {wanted}")
    shape = tuple(factor.shape)
    if shape in ((), (1,), (heads,)):
        return "head"
    if shape == pool:
        return "token"
    raise InvalidInput(f"{name} has shape {shape}; it must be {wanted}")


def missing(dtype: torch.dtype) -> str:
    """Returns what to do about an 8-bit pool without factors; "" for another pool."""
    if dtype not in descales.QUANTIZED:
        return ""
    if dtype not in DTYPES:
        return f"; a cache of 8-bit numbers must be one of {_text(DTYPES)}"
    return f"; a cache of {dtype} needs factors: give the CacheLayer k_descale and v_descale"


def check_device(dtype: torch.dtype, device: torch.device) -> None:
    """Raises UnsupportedProblem if a device cannot convert the numbers of a cache."""
    if dtype in descales.FLOAT8 and device.type == "cuda" and (why := reasons.of_float8(current_gpu(device))):
        raise UnsupportedProblem(f"a cache of {dtype} cannot be on this device", {"append_kv": why}, "torch.int8")


def check_contents(operands: CachedOperands, cells: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Reads the factors (this waits for the device) and refuses those that are not positive and finite.

    Args:
        cells: page and slot of the tokens of each sequence whose factors are read.

    Raises:
        InvalidInput: naming the first index that is wrong.
    """
    for name in ("k_descale", "v_descale"):
        factor = getattr(operands, name)
        if factor is None:
            continue
        read = None
        if factor.dim() == 3:
            read = torch.zeros(factor.shape[:2], dtype=torch.bool, device=factor.device)
            for pages, slots in cells:
                read[pages, slots] = True
            read = read[..., None]
        descales.check_positive(name, factor, read)


def _text(dtypes: Any) -> str:
    return ", ".join(map(str, dtypes))


# Host -----------------------------------------------------------------------------------------------------------------


def strides(*factors: torch.Tensor | None) -> list[int | None]:
    """Returns the strides of each factor of K or V: page, slot and kv head, 0 where it is shared, None without
    factors."""
    found: list[int | None] = []
    for factor in factors:
        if factor is None:
            found += (None, None, None)
        elif factor.dim() == 3:
            found += factor.stride()
        else:
            found += (0, 0, factor.stride(0) if factor.numel() > 1 else 0)
    return found


def kind_of(factor: torch.Tensor | None) -> str:
    """Returns what shares a factor that was checked: `"head"`, `"token"`, or `""` without factors."""
    return "" if factor is None else "token" if factor.dim() == 3 else "head"


def of_cells(pool: torch.Tensor, factor: torch.Tensor | None, cells: Any, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values of the cells of a pool, in `dtype`; in the pool's own dtype if it has no factors.

    Args:
        cells: an index of (page, slot).
    """
    found = pool[cells]
    if factor is None:
        return found
    factor = factor.to(dtype)
    return found.to(dtype) * (factor[cells] if factor.dim() == 3 else factor)[..., None]


def dequantized(
    problem: AttentionProblem, operands: CachedOperands, dtype: torch.dtype
) -> tuple[AttentionProblem, CachedOperands]:
    """Returns a call on a cache of 8-bit numbers as a call on the dequantized numbers; other calls unchanged.

    Args:
        dtype: of the new pools.
    """
    if problem.dtype_kv is None:
        return problem, operands
    wide = torch.promote_types(dtype, torch.float32)
    k, v = (
        of_cells(pool, factor, slice(None), wide).to(dtype)
        for pool, factor in ((operands.k, operands.k_descale), (operands.v, operands.v_descale))
    )
    return replace(problem, dtype_kv=None, kv_factors=None), operands._replace(k=k, v=v, k_descale=None, v_descale=None)
