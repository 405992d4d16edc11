"""The factors of quantized q, k and v: their shapes, and where a kernel finds the factor of a token.

    q = q8 * q_descale,  k = k8 * k_descale,  v = v8 * v_descale
    score = (q8 . k8) * q_descale * k_descale * softmax_scale,   out = sum(P v8 * v_descale) / sum(P)

A factor is shared by a whole tensor, by one head of one sequence, or by a block of 64 or 128 consecutive tokens of it,
counted from the first token of the sequence. A kernel reads all of them by strides, which are 0 where a factor is
shared. Factors are positive, so the maximum of products times a factor is the maximum of the scores.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from warpwave.errors import InvalidInput, InvalidType, UnsupportedProblem
from warpwave.kernels.primitives import IN_INTERPRETER, rounded
from warpwave.operands import NUM_COMMON, Operands, QuantizedOperands
from warpwave.problem import AttentionProblem
from warpwave.runtime.triton_or_stub import jit, tl

FLOAT8 = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
QUANTIZED = {**FLOAT8, torch.int8: "int8"}
SIXTEEN_BIT = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
OUT = {**SIXTEEN_BIT, **FLOAT8}
BLOCKS = (128, 64)  # of tokens that may share a factor; the first that fits a shape is taken
NAMES = ("q_descale", "k_descale", "v_descale")


# Arguments ------------------------------------------------------------------------------------------------------------


def dtypes_of_v(dtype: torch.dtype) -> dict[torch.dtype, str]:
    """Returns the dtypes that v may have beside quantized q and k of a dtype, and their names."""
    return {**(FLOAT8 if dtype in FLOAT8 else {torch.int8: "int8"}), **SIXTEEN_BIT}


def check_problem(problem: AttentionProblem) -> None:
    """Raises InvalidInput if no call can have a problem's quantized tensors."""
    p, is_8_bit = problem, problem.dtype in QUANTIZED.values()
    if is_8_bit != p.is_quantized or (not is_8_bit and (p.dtype_v or p.dtype_out)):
        raise InvalidInput(
            f"dtype is {p.dtype}, dtype_v {p.dtype_v}, dtype_out {p.dtype_out} and descale_blocks {p.descale_blocks}; "
            "quantized q and k, and no others, have all of them"
        )
    if p.descale_blocks is None:
        return
    allowed = dtypes_of_v(getattr(torch, p.dtype)).values()
    if p.dtype_of_v not in allowed or p.dtype_of_out not in OUT.values():
        raise InvalidInput(
            f"dtype_v is {p.dtype_of_v} and dtype_out {p.dtype_of_out}; beside {p.dtype}, v must be one of "
            f"{', '.join(allowed)}, and out one of {', '.join(OUT.values())}"
        )
    if len(p.descale_blocks) != 3 or not set(p.descale_blocks) <= {0, *BLOCKS}:
        raise InvalidInput(f"descale_blocks is {p.descale_blocks}; it must be three of 0, 64 and 128")
    if p.requires_grad or p.dropout_p or p.page_size or (p.packed and any(p.descale_blocks)):
        raise InvalidInput(
            "quantized calls have no gradients, no dropout and no paged cache, and packed ones no factors of blocks"
        )


def check_dtypes(operands: QuantizedOperands) -> None:
    """Raises InvalidType if q, k and v have dtypes that no quantized call can have, or factors are not float32."""
    q, k, v = operands[:3]
    if q.dtype not in QUANTIZED:
        raise InvalidType(
            f"q is {q.dtype}; with q_descale, k_descale, v_descale, out_descale or out_dtype it must be one of "
            f"{_text(QUANTIZED)}"
        )
    if k.dtype != q.dtype:
        raise InvalidType(f"k is {k.dtype} and q is {q.dtype}; quantized q and k must share one dtype")
    allowed = dtypes_of_v(q.dtype)
    if v.dtype not in allowed:
        raise InvalidType(f"v is {v.dtype} and q is {q.dtype}; v must be one of {_text(allowed)}")
    for name in (*NAMES, "out_descale"):
        factor = getattr(operands, name)
        if factor is not None and factor.dtype != torch.float32:
            raise InvalidType(f"{name} is {factor.dtype}; it must be torch.float32")


def name_of(out_dtype: Any) -> str:
    """Returns the name of the dtype of out.

    Raises:
        InvalidType: out cannot have it.
    """
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in OUT:
        raise InvalidType(f"out_dtype is {out_dtype!r}; it must be one of {_text(OUT)}")
    return OUT[out_dtype]


def describe(operands: QuantizedOperands, size: dict[str, int], packed: bool, options: Any) -> dict[str, Any]:
    """Checks the factors of a call and returns the fields of the problem that describe them.

    Args:
        size: axis -> size, as `checks.describe_call` has bound them.
        options: the `warpwave.options.Options` of the call.

    Raises:
        InvalidInput: a factor is missing, or has a shape or a place that no quantized call can have.
        UnsupportedProblem: the call has gradients or dropout, or is packed and has factors of blocks.
    """
    if options.needs_grad:
        raise UnsupportedProblem("attention of quantized q, k and v has no gradients", {}, "torch.no_grad()")
    if options.dropout_p:
        raise UnsupportedProblem("attention of quantized q, k and v has no dropout", {}, "dropout_p=0")
    dtype_v = operands.v.dtype
    blocks = tuple(
        _block(name, operands, size, packed) if not (name == "v_descale" and dtype_v in SIXTEEN_BIT) else 0
        for name in NAMES
    )
    if dtype_v in SIXTEEN_BIT and operands.v_descale is not None:
        raise InvalidInput(f"v_descale was given and v is {dtype_v}; only quantized values have factors")
    dtype_out = options.out_dtype or SIXTEEN_BIT.get(dtype_v, "bfloat16")
    scaled = dtype_out in FLOAT8.values()
    if scaled != (operands.out_descale is not None):
        found = "None" if scaled else "given"
        raise InvalidInput(
            f"out_descale is {found} and out is {dtype_out}; float8 results, and no others, have a factor"
        )
    if scaled and operands.out_descale.numel() != 1:
        raise InvalidInput(f"out_descale has shape {tuple(operands.out_descale.shape)}; it must be one number")
    names = QUANTIZED | SIXTEEN_BIT
    return {"dtype_v": names[dtype_v], "dtype_out": dtype_out, "descale_blocks": blocks}


def _block(name: str, operands: QuantizedOperands, size: dict[str, int], packed: bool) -> int:
    """Returns how many tokens share a factor; 0 for all of a head."""
    side = name[0]
    factor, tensor = getattr(operands, name), getattr(operands, side)
    batch, heads, seqlen = size["batch"], size["num_heads_q" if side == "q" else "num_heads_kv"], tensor.shape[-3]
    wanted = f"(), (1,), (batch, num_heads) = ({batch}, {heads})"
    if side == "q" and size["num_heads_kv"] != heads:
        wanted += f", (batch, num_heads_kv) = ({batch}, {size['num_heads_kv']})"
    if not packed:
        counts = [-(-seqlen // block) for block in BLOCKS]
        of_blocks = counts[0] if counts[0] == counts[1] else f"{counts[0]} or {counts[1]}"
        wanted += f" or (batch, num_heads, blocks) = ({batch}, {heads}, {of_blocks})"
    if factor is None:
        raise InvalidInput(f"{name} is None and {side} is {tensor.dtype}; it must be float32 of shape {wanted}")
    shape = tuple(factor.shape)  # of symbols in a graph of torch.compile: they have no hash
    if shape in ((), (1,), (batch, heads)):
        return 0
    if side == "q" and shape == (batch, size["num_heads_kv"]):
        return 0  # one factor for the query heads of a group, as in FlashAttention-3
    if len(shape) == 3 and packed:
        raise UnsupportedProblem(
            f"{name} has shape {shape} in a packed call: blocks of packed tokens would belong to two sequences",
            {},
            f"one factor for each sequence and head, ({batch}, {heads})",
        )
    if shape[:2] == (batch, heads) and len(shape) == 3:
        for block, count in zip(BLOCKS, counts, strict=True):
            if shape[2] == count:
                return block
    raise InvalidInput(f"{name} has shape {shape}; it must be {wanted}")


def check_contents(operands: QuantizedOperands) -> None:
    """Reads the factors (this waits for the device) and refuses those that are not positive and finite.

    Raises:
        InvalidInput: naming the first index that is wrong.
    """
    for name in (*NAMES, "out_descale"):
        factor = getattr(operands, name)
        if factor is not None:
            check_positive(name, factor)


def check_positive(name: str, factor: torch.Tensor, read: torch.Tensor | None = None) -> None:
    """Raises InvalidInput naming the first factor that is not positive and finite.

    Args:
        read: which factors are checked, broadcastable to them; None for all.
    """
    wrong = ~(factor.isfinite() & (factor > 0))
    if read is not None:
        wrong &= read
    if wrong.any():
        index = wrong.nonzero()[0].tolist()
        place = f"{name}[{', '.join(map(str, index))}]" if index else name
        raise InvalidInput(f"{place} is {factor[tuple(index)].item():g}; factors must be positive and finite")


def _text(dtypes: Any) -> str:
    return ", ".join(map(str, dtypes))


# Device code ----------------------------------------------------------------------------------------------------------


@jit
def probabilities(p, DTYPE: tl.constexpr, SCALE: tl.constexpr):
    """Returns unnormalized probabilities, at most 1, as the operand of their product with values: in DTYPE, and times
    SCALE, which moves float8 to the upper end of its range, where fewest are subnormal or 0."""
    p = rounded(p * SCALE, DTYPE)
    return p.to(tl.float32) if IN_INTERPRETER else p


@jit
def float8_out(out, out_descale_ptr, LARGEST: tl.constexpr):
    """Returns a result in units of its factor, saturated to the range of float8; NaN stays NaN."""
    out = out / tl.load(out_descale_ptr)
    bounded = tl.minimum(tl.maximum(out, -LARGEST), LARGEST)
    return tl.where(out == out, bounded, out)


# Strides --------------------------------------------------------------------------------------------------------------


def strides_of_q(problem: AttentionProblem, factor: torch.Tensor) -> tuple[int, int, int, int]:
    """Returns the strides of q's factors: (batch, kv head, query head of its group, block)."""
    if factor.dim() < 2:
        return (0, 0, 0, 0)
    batch, head, *block = factor.stride()
    group = problem.num_heads_q // problem.num_heads_kv
    of_each = factor.shape[1] == problem.num_heads_q
    return (batch, head * group if of_each else head, head if of_each else 0, *(block or (0,)))


def strides_of_keys(factor: torch.Tensor | None) -> tuple[int, int, int]:
    """Returns the strides of the factors of k or v: (batch, kv head, block)."""
    if factor is None or factor.dim() < 2:
        return (0, 0, 0)
    batch, head, *block = factor.stride()
    return (batch, head, *(block or (0,)))


def strides(problem: AttentionProblem, operands: Any) -> list[int | None]:
    """Returns the run-time arguments of a kernel: the strides of all factors, None for a call without."""
    if not problem.is_quantized:
        return [None] * 10
    of_keys = (*strides_of_keys(operands.k_descale), *strides_of_keys(operands.v_descale))
    return [*strides_of_q(problem, operands.q_descale), *of_keys]


P_SCALE = 256  # of probabilities in e4m3: the largest power of two in its range


def constants(problem: AttentionProblem) -> dict[str, int]:
    """Returns the compile-time arguments of a kernel. A factor of a whole head has stride 0 over blocks of any size."""
    blocks = problem.descale_blocks or (0, 0, 0)
    largest = torch.finfo(getattr(torch, problem.dtype_of_out)).max if problem.dtype_of_out in FLOAT8.values() else 0
    return {
        "QUANTIZED": problem.is_quantized,
        **{f"{side}_BLOCK": block or 1 for side, block in zip("QKV", blocks, strict=True)},
        "P_SCALE": P_SCALE if problem.dtype_of_v in FLOAT8.values() else 1,
        "LARGEST_OUT": int(largest),
    }


def shapes(problem: AttentionProblem) -> tuple[tuple[int, ...] | None, ...]:
    """Returns a shape that each factor of a quantized call may have, in the order of `QuantizedOperands`; None if there
    is no such factor. A factor of a head is not shared by others."""
    p = problem
    assert p.descale_blocks is not None
    sizes = ((p.num_heads_q, p.seqlen_q), (p.num_heads_kv, p.seqlen_k), (p.num_heads_kv, p.seqlen_k))
    found: list[tuple[int, ...] | None] = [
        (p.batch, heads, -(-seqlen // block)) if block else (p.batch, heads)
        for (heads, seqlen), block in zip(sizes, p.descale_blocks, strict=True)
    ]
    if p.dtype_of_v in SIXTEEN_BIT.values():
        found[2] = None
    return (*found, () if p.dtype_of_out in FLOAT8.values() else None)


# Host -----------------------------------------------------------------------------------------------------------------


def dequantized(
    problem: AttentionProblem, operands: QuantizedOperands, dtype: torch.dtype
) -> tuple[AttentionProblem, Operands]:
    """Returns a quantized call as an ordinary call on the dequantized numbers.

    Args:
        dtype: torch.float32, or torch.float64 in which the products with the factors are exact.
    """
    assert problem.descale_blocks is not None
    numbers = []
    offsets = (operands.cu_seqlens_q, operands.cu_seqlens_k, operands.cu_seqlens_k)
    factors = (operands.q_descale, operands.k_descale, operands.v_descale)
    for t, factor, block, starts in zip(operands[:3], factors, problem.descale_blocks, offsets, strict=True):
        wide = t.to(dtype)
        numbers.append(wide if factor is None else wide * of_tokens(factor.to(dtype), block, t, starts))
    of_call = {"dtype": str(dtype).removeprefix("torch."), "dtype_v": None, "dtype_out": None, "descale_blocks": None}
    q, k, v = numbers
    return replace(problem, **of_call), Operands(q, k, v, *operands[3:NUM_COMMON])  # type: ignore[arg-type]


def of_tokens(
    factor: torch.Tensor, block: int, t: torch.Tensor, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the factor of every token, broadcastable to the tensor.

    Args:
        factor: as a call takes it.
        block: tokens that share a factor, 0 for all of a head.
        t: q, k or v; packed if there are offsets.
    """
    if factor.dim() < 2:
        return factor
    factor = factor.repeat_interleave(t.shape[-2] // factor.shape[1], dim=1)
    if cu_seqlens is not None:
        return factor[sequence_of_tokens(cu_seqlens, len(t))][..., None]
    if block:
        return factor.repeat_interleave(block, dim=2)[:, :, : t.shape[1]].transpose(1, 2)[..., None]
    return factor[:, None, :, None]


def sequence_of_tokens(cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    """Returns the sequence of each packed token, (total,)."""
    tokens = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True).clamp(max=len(cu_seqlens) - 2)


def to_out(out: torch.Tensor, problem: AttentionProblem, factor: torch.Tensor | None) -> torch.Tensor:
    """Returns a result in the dtype of out. A float8 one is divided by its factor, and saturates."""
    dtype = getattr(torch, problem.dtype_of_out)
    if factor is not None:
        largest = torch.finfo(dtype).max
        out = (out / factor).clamp(-largest, largest)
    return out.to(dtype)
