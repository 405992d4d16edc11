"""Converts the arguments of a call to the `AttentionProblem` they describe, or raises an error that names the argument.

Shapes are declared once as patterns of axis names and checked by one function, so no message names the wrong argument.
Nothing here reads the contents of a tensor, except `check_packed_lengths`, which `checked=True` requests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from warpwave.errors import InvalidInput, InvalidType
from warpwave.kernels import cache_descales, descales, dropout
from warpwave.operands import AnyOperands, CachedOperands, QuantizedOperands, is_part
from warpwave.options import LARGEST, Options, spell_precision
from warpwave.problem import PRECISIONS, AttentionProblem, Causal

DTYPE_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
NAMES_WITH_FLOAT64 = {**DTYPE_NAMES, torch.float64: "float64"}  # dense and packed calls
NAMES = NAMES_WITH_FLOAT64 | descales.QUANTIZED

DENSE = {
    "q": "batch seqlen_q num_heads_q head_dim",
    "k": "batch seqlen_k num_heads_kv head_dim",
    "v": "batch seqlen_k num_heads_kv head_dim_v",
}
PACKED = {
    "q": "total_q num_heads_q head_dim",
    "k": "total_k num_heads_kv head_dim",
    "v": "total_k num_heads_kv head_dim_v",
}
CACHED = {
    "k": "num_pages page_size num_heads_kv head_dim",
    "v": "num_pages page_size num_heads_kv head_dim_v",
    "page_table": "cache_rows pages_of_a_row",
    "seqused_k": "cache_rows",
}
DTYPES = {  # the others are float32; a bias may have the dtype of q, and the calls convert sinks from it
    "mask": torch.bool,
    "dropout_seed": torch.int64,
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "page_table", "seqused_k", "rows"), torch.int32),
}
SCORES = "batch num_heads_q seqlen_q seqlen_k"
SMALLEST = torch.finfo(torch.float32).tiny


def describe_call(operands: AnyOperands, options: Options) -> AttentionProblem:
    """Checks a call and returns the problem it describes.

    Raises:
        InvalidInput: a shape or a value that no attention call can have.
        InvalidType: a type or a dtype that no attention call can have.
    """
    _check_types(operands)
    packed = operands.cu_seqlens_q is not None or operands.cu_seqlens_k is not None
    axes: dict[str, tuple[int, str]] = {}
    for name, pattern in (PACKED if packed else DENSE).items():
        bind_axes(name, getattr(operands, name), pattern, axes)
    size = {axis: value for axis, (value, _) in axes.items()}
    check_heads(size["num_heads_q"], size["num_heads_kv"], size["head_dim"], size["head_dim_v"])

    if packed:
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            bind_axes(name, getattr(operands, name), "batch+1", axes)
        size["batch"] = axes["batch+1"][0] - 1
        size |= {"seqlen_q": options.max_seqlen_q, "seqlen_k": options.max_seqlen_k}
        _check_lengths(size["batch"], options)
    for name in ("mask", "bias"):
        if (tensor := getattr(operands, name)) is None:
            continue
        if packed:
            raise InvalidInput(
                f"{name} was given with cu_seqlens; packed calls have no {name}: use causal, window_size or ALiBi"
            )
        bind_axes(name, tensor, SCORES, axes, broadcast=True)
    _bind_heads(operands, axes | {"batch": (size["batch"], "q")})
    if operands.dropout_seed is not None:
        dropout.check_seed(operands.dropout_seed)
    quantized: dict[str, Any] = {}
    if isinstance(operands, QuantizedOperands):
        quantized = descales.describe(operands, size, packed, options)
    return AttentionProblem(
        **_fields_of_all_calls(operands, options, size),
        seqlen_q=size["seqlen_q"],
        seqlen_k=size["seqlen_k"],
        mask_shape=None if operands.mask is None else tuple(operands.mask.shape),
        bias_shape=None if operands.bias is None else tuple(operands.bias.shape),
        bias_dtype=None if operands.bias is None else NAMES_WITH_FLOAT64[operands.bias.dtype],
        packed=packed,
        total_k=size.get("total_k", 0),
        requires_grad=options.needs_grad,
        dropout_p=options.dropout_p,
        deterministic=options.needs_grad and options.must_repeat(),
        **quantized,
    )


def describe_cached_call(operands: CachedOperands, options: Options, batch_invariant: bool = False) -> AttentionProblem:
    """Checks a call on a paged cache and returns the problem it describes; `options.max_seqlen_k` is 0 for the table's
    capacity."""
    _check_types(operands)
    packed = operands.cu_seqlens_q is not None
    axes: dict[str, tuple[int, str]] = {}
    for name, pattern in {"q": (PACKED if packed else DENSE)["q"], **CACHED}.items():
        bind_axes(name, getattr(operands, name), pattern, axes)
    if packed:
        bind_axes("cu_seqlens_q", operands.cu_seqlens_q, "batch+1", axes)
        axes["batch"] = (axes["batch+1"][0] - 1, "cu_seqlens_q")
    if operands.rows is not None:
        bind_axes("rows", operands.rows, "batch", axes)
    _bind_heads(operands, axes)
    size = {axis: value for axis, (value, _) in axes.items()}
    check_heads(size["num_heads_q"], size["num_heads_kv"], size["head_dim"], size["head_dim_v"])
    _check_tables(operands, size, options)
    quantized: dict[str, Any] = cache_descales.describe(operands)
    capacity = size["pages_of_a_row"] * size["page_size"]
    seqlen_k = min(options.max_seqlen_k, capacity) if options.max_seqlen_k else capacity
    return AttentionProblem(
        **_fields_of_all_calls(operands, options, size),
        seqlen_q=options.max_seqlen_q if packed else size["seqlen_q"],
        seqlen_k=seqlen_k,
        packed=packed,
        total_k=size["batch"] * seqlen_k if packed else 0,
        page_size=size["page_size"],
        batch_invariant=batch_invariant,
        **quantized,
    )


def _bind_heads(operands: AnyOperands | CachedOperands, axes: dict[str, tuple[int, str]]) -> None:
    """Checks the shapes of the operands with one number for each query head."""
    if operands.alibi_slopes is not None:
        pattern = "num_heads_q" if operands.alibi_slopes.dim() == 1 else "batch num_heads_q"
        bind_axes("alibi_slopes", operands.alibi_slopes, pattern, axes)
    if operands.sinks is not None:
        bind_axes("sinks", operands.sinks, "num_heads_q", axes)


def _fields_of_all_calls(
    operands: AnyOperands | CachedOperands, options: Options, size: dict[str, int]
) -> dict[str, Any]:
    """Checks the numbers among the options and returns the fields of the problem that calls of all kinds have."""
    scale, window = resolve_scale(options.softmax_scale, size["head_dim"]), (options.window_left, options.window_right)
    dropout.check_probability(options.dropout_p)
    check_scalars(scale, options.softcap, window)
    # `looks_latent`, before there is a problem: other calls need not compare storages.
    may_be_latent = size["num_heads_kv"] == 1 and size["head_dim_v"] < size["head_dim"]
    return {
        **{name: size[name] for name in ("batch", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v")},
        "v_in_k": may_be_latent and is_part(operands.v, operands.k),
        "dtype": NAMES[operands.q.dtype],
        "softmax_scale": scale,
        "causal": Causal(options.causal) if options.causal else None,  # type: ignore[arg-type]
        "window_size": window,
        "alibi_shape": None if operands.alibi_slopes is None else tuple(operands.alibi_slopes.shape),
        "softcap": options.softcap,
        "has_sinks": operands.sinks is not None,
        "total_q": size.get("total_q", 0),
        "return_lse": options.return_lse,
        **_precision(options, operands),
    }


def resized(problem: AttentionProblem, operands: Any, longest: tuple[int, ...]) -> AttentionProblem | None:
    """Returns the problem of a call of the same class (plans.py) as a call that was checked.

    Args:
        problem: the checked call's, from `describe_call` or `describe_cached_call`.
        operands: differ from the checked call's only in lengths and in strides that depend on them.
        longest: `max_seqlen_q` and `max_seqlen_k` of a packed or cached call.

    Returns:
        None if sizes contradict each other; the full check then raises the error.
    """
    q, k, v, mask, bias, slopes, _, offsets_q, offsets_k, *more = operands
    if offsets_q is None:
        batch, seqlen_q, *_ = q.shape
        total_q = 0
    else:
        batch, seqlen_q, total_q = offsets_q.shape[0] - 1, longest[0], q.shape[0]
    if isinstance(operands, CachedOperands):
        table, used, rows = more[:3]
        cache_rows, pages = table.shape
        alike = 1 <= cache_rows == used.shape[0] and min(longest) >= 0
        alike &= table.stride(1) == used.stride(0) == 1 <= pages
        alike &= batch <= cache_rows if rows is None else batch == rows.shape[0] and rows.stride(0) == 1
        seqlen_k = min(longest[1] or pages * problem.page_size, pages * problem.page_size)
        total_k = 0 if offsets_q is None else batch * seqlen_k
    elif offsets_q is None:
        seqlen_k, total_k = k.shape[1], 0
        alike = batch == k.shape[0] == v.shape[0] and seqlen_k == v.shape[1]
    else:
        seqlen_k, total_k = longest[1], k.shape[0]
        alike = offsets_k.shape[0] == batch + 1 and total_k == v.shape[0] and seqlen_k >= 0
    if isinstance(operands, QuantizedOperands):
        alike &= all(t is None or t.dim() < 2 or t.shape[0] == batch for t in more)
    if not alike or batch < 0 or seqlen_q < 0 or (slopes is not None and slopes.dim() == 2 and len(slopes) != batch):
        return None
    sizes: dict[str, Any] = {
        "batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "total_q": total_q, "total_k": total_k,
        "_kind": problem.kind,
    }  # fmt: skip
    for name, tensor in (("mask_shape", mask), ("bias_shape", bias)):
        if tensor is not None:
            sizes[name] = tuple(tensor.shape)
            scores = (batch, problem.num_heads_q, seqlen_q, seqlen_k)
            # A kind of problems includes which axes are broadcast.
            for size, before, whole in zip(sizes[name], getattr(problem, name), scores, strict=True):
                if (size == 1) != (before == 1) or size not in (1, whole):
                    return None
    # `dataclasses.replace` would take as long as everything above.
    found: AttentionProblem = object.__new__(AttentionProblem)
    object.__setattr__(found, "__dict__", vars(problem) | sizes)
    return found


def _check_tables(operands: CachedOperands, size: dict[str, int], options: Options) -> None:
    for name in ("page_size", "num_pages", "pages_of_a_row"):
        if size[name] < 1:
            raise InvalidInput(f"the cache has {name} {size[name]}; it must be at least 1")
    if operands.page_table.stride(1) != 1 and size["pages_of_a_row"] > 1:
        raise InvalidInput("page_table is not contiguous along its rows; pass page_table.contiguous(), and keep that")
    for name in ("seqused_k", "rows"):
        tensor = getattr(operands, name)
        if tensor is not None and tensor.numel() > 1 and tensor.stride(0) != 1:
            raise InvalidInput(f"{name} is not contiguous; pass {name}.contiguous(), and keep that")
    _check_lengths(size["batch"], options)
    if operands.rows is None and size["batch"] > size["cache_rows"]:
        raise InvalidInput(
            f"q has {size['batch']} sequences and the cache {size['cache_rows']} rows; without rows, sequence b is row "
            "b of the cache"
        )
    if operands.rows is not None and size["batch"] and not size["cache_rows"]:
        raise InvalidInput(
            f"q has {size['batch']} sequences and the cache has no rows; page_table must have a row for each"
        )


def _check_lengths(batch: int, options: Options) -> None:
    """Checks the number and the greatest lengths of packed or cached sequences."""
    if batch < 0:
        raise InvalidInput("cu_seqlens_q is empty; it must hold batch + 1 offsets, the first of them 0")
    for name in ("max_seqlen_q", "max_seqlen_k"):
        longest = getattr(options, name)
        # torch.compile may not know the number, if it was read from a tensor. The compiled call checks it.
        if isinstance(longest, int) and longest < 0:
            raise InvalidInput(f"{name} is {longest}; it must be at least 0")


def resolve_scale(softmax_scale: float | None, head_dim: int) -> float:
    """Returns the caller's scale, or 1/sqrt of the caller's head_dim (never of a padded one). A scale that is denormal
    in float32 becomes 0, as on a GPU that flushes denormals."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    return 0.0 if 0 < softmax_scale < SMALLEST else softmax_scale


def bind_axes(
    name: str, tensor: torch.Tensor, pattern: str, axes: dict[str, tuple[int, str]], *, broadcast: bool = False
) -> None:
    """Checks a shape against a pattern of axis names and records the axes that are new.

    Args:
        name: the argument's name, for the message.
        tensor: the argument.
        pattern: axis names separated by blanks: `"batch seqlen_q num_heads_q head_dim"`.
        axes: axis -> (size, the argument that set it); extended in place.
        broadcast: whether an axis may also have size 1.

    Raises:
        InvalidInput: naming the argument, its shape, and what was expected.
    """
    names = _split(pattern)
    shape = tensor.shape
    if len(shape) != len(names):
        raise InvalidInput(
            f"{name} has shape {tuple(shape)}, {len(shape)} axes; it must have {len(names)}: {_text(names)}"
        )
    for axis, size in zip(names, shape, strict=True):
        known, source = axes.setdefault(axis, (size, name))
        if size != known and not (broadcast and size == 1):
            allowed = f"{known} or 1" if broadcast else f"{known}"
            raise InvalidInput(
                f"{name} has shape {tuple(shape)}, so its {axis} is {size}; {source} has {axis} {known}, and {name} "
                f"must be {_text(names)} with {axis} {allowed}"
            )


_split = functools.cache(str.split)


def _text(names: Sequence[str]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def check_packed_lengths(operands: AnyOperands, options: Options) -> None:
    """Reads the contents of cu_seqlens, which waits for the device, and refuses offsets that would read out of bounds.

    Raises:
        InvalidInput: naming the first index that is wrong.
    """
    for name, total, longest in (
        ("cu_seqlens_q", operands.q.shape[0], options.max_seqlen_q),
        ("cu_seqlens_k", operands.k.shape[0], options.max_seqlen_k),
    ):
        check_offsets(name, getattr(operands, name).tolist(), total, longest)


def check_offsets(name: str, offsets: list[int], total: int, longest: int) -> None:
    """Raises InvalidInput naming the first wrong offset of packed sequences.

    Args:
        name: `"cu_seqlens_q"` or `"cu_seqlens_k"`.
        offsets: batch + 1 of them.
        total: tokens of the packed tensor.
        longest: the most tokens a sequence may have.
    """
    if offsets[0] != 0:
        raise InvalidInput(f"{name}[0] is {offsets[0]}; the first offset must be 0")
    for i in range(1, len(offsets)):
        length = offsets[i] - offsets[i - 1]
        if length < 0:
            raise InvalidInput(
                f"{name}[{i}] is {offsets[i]}, less than {name}[{i - 1}] = {offsets[i - 1]}; offsets must not decrease"
            )
        if length > longest:
            raise InvalidInput(
                f"sequence {i - 1} has {length} tokens by {name}[{i}], more than max_seqlen_{name[-1]} = {longest}"
            )
    if offsets[-1] != total:
        raise InvalidInput(
            f"{name}[{len(offsets) - 1}] is {offsets[-1]}; the last offset must be {total}, the tokens of {name[-1]}"
        )


def check_are_tensors(operands: AnyOperands | CachedOperands) -> None:
    """Raises InvalidType naming the first operand that is not a tensor. q, k, v, a cache's tables and the seed of a
    call with dropout are required."""
    for name, tensor in zip(operands._fields, operands, strict=True):
        needed = name in ("q", "k", "v", "page_table", "seqused_k", "dropout_seed")
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or needed):
            raise InvalidType(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
        if isinstance(tensor, torch.Tensor) and not is_plain(tensor):
            if tensor.is_nested:
                found, remedy = "nested", "pack its sequences for attention_varlen"
            elif tensor.layout is not torch.strided:
                found, remedy = str(tensor.layout).removeprefix("torch."), f"pass {name}.to_dense()"
            else:
                found, remedy = "lazily negated", f"pass {name}.resolve_neg()"
            raise InvalidType(f"{name} is a {found} tensor; it must be a plain strided one: {remedy}")


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's elements are found by its strides in one storage."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return torch.compiler.is_compiling() or not tensor.is_neg()  # compiled graphs have no lazily negated tensor


def settled(operands: AnyOperands) -> AnyOperands:
    """Returns the operands of a call in the form that kernels take.

    Views that torch negates lazily (`x.conj().imag`) are resolved. Under autocast, q, k and v of different dtypes are
    cast to the autocast dtype, as torch casts the operands of its own attention; operands of one dtype keep it.
    """
    if not torch.compiler.is_compiling() and any(map(_is_lazy, operands)):
        operands = type(operands)(*[t.resolve_neg() if _is_lazy(t) else t for t in operands])
    vectors = operands[:3]
    if all(isinstance(t, torch.Tensor) for t in vectors) and len({t.dtype for t in vectors}) > 1:
        kind = operands.q.device.type
        if torch.is_autocast_enabled(kind) and all(t.dtype in DTYPE_NAMES for t in vectors):
            q, k, v = (t.to(torch.get_autocast_dtype(kind)) for t in vectors)
            operands = operands._replace(q=q, k=k, v=v)
    return operands


def _is_lazy(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and not tensor.is_nested and tensor.is_neg()


def _check_types(operands: AnyOperands | CachedOperands) -> None:
    check_are_tensors(operands)
    q = operands.q
    device = q.device
    for name, tensor in zip(operands._fields, operands, strict=True):
        if tensor is not None and tensor.device != device:
            raise InvalidInput(f"{name} is on {tensor.device} and q on {q.device}; all tensors must share one device")
    known = DTYPE_NAMES if isinstance(operands, CachedOperands) else NAMES_WITH_FLOAT64
    if isinstance(operands, QuantizedOperands):
        descales.check_dtypes(operands)
    elif isinstance(operands, CachedOperands) and (operands.k_descale is not None or operands.v_descale is not None):
        cache_descales.check_dtypes(operands)
    elif q.dtype not in known:
        quantized = q.dtype in descales.QUANTIZED and known is NAMES_WITH_FLOAT64
        hint = ", or quantized with its factors q_descale, k_descale and v_descale" if quantized else ""
        raise InvalidType(f"q is {q.dtype}; it must be one of {', '.join(map(str, known))}{hint}")
    else:
        for name in ("k", "v"):
            dtype = getattr(operands, name).dtype
            if dtype != q.dtype:
                hint = cache_descales.missing(dtype) if isinstance(operands, CachedOperands) else ""
                raise InvalidType(f"{name} is {dtype} and q is {q.dtype}; q, k and v must share one dtype{hint}")
    for name, tensor in zip(operands._fields[3:], operands[3:], strict=True):
        if tensor is None:
            continue
        dtypes: tuple[torch.dtype, ...] = (DTYPES.get(name, torch.float32),)
        if name == "bias" and isinstance(operands, QuantizedOperands):
            dtypes = (torch.float16, torch.bfloat16, torch.float32)
        elif name == "bias" or (name in ("sinks", "alibi_slopes") and q.dtype == torch.float64):
            dtypes = tuple(dict.fromkeys((q.dtype, torch.float32)))
        if tensor.dtype not in dtypes:
            hint = "; an additive mask goes in bias=" if name == "mask" and tensor.is_floating_point() else ""
            hint = "; a boolean mask goes in mask=" if name == "bias" and tensor.dtype == torch.bool else hint
            raise InvalidType(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}{hint}")


def check_heads(num_heads_q: int, num_heads_kv: int, head_dim: int, head_dim_v: int) -> None:
    """Raises InvalidInput for numbers of heads or widths that no call can have."""
    for name, size in (("q", num_heads_q), ("k", num_heads_kv)):
        if size == 0:
            raise InvalidInput(f"{name} has 0 heads; it must have at least one")
    if num_heads_q % num_heads_kv:
        raise InvalidInput(
            f"k has {num_heads_kv} heads, which does not divide the {num_heads_q} heads of q; num_heads_q must be a "
            "multiple of num_heads_kv"
        )
    for name, size in (("q", head_dim), ("v", head_dim_v)):
        if size == 0:
            raise InvalidInput(f"{name} has head_dim 0; it must be at least 1")


def check_scalars(scale: float, softcap: float, window: tuple[int, int]) -> None:
    """Raises InvalidInput for a scale, softcap or window that no call can have."""
    if not 0 <= scale <= LARGEST:
        raise InvalidInput(
            f"softmax_scale is {scale}; it must be finite, and not negative in a problem (the calls negate q: the "
            "maximum of products times a negative scale is no maximum)"
        )
    if not 0 <= softcap <= LARGEST:
        raise InvalidInput(f"softcap is {softcap}; it must be finite and not negative, 0 for none")
    if window[0] < -1 or window[1] < -1:
        raise InvalidInput(f"window_size is {window}; each side must be at least -1 (-1 is unlimited)")


def _precision(options: Options, operands: AnyOperands | CachedOperands) -> dict[str, Any]:
    """Returns the fields of the problem that define how float32 products are computed; other inputs leave no
    choice."""
    dtype = operands.q.dtype
    if options.precision in PRECISIONS:
        return {"precision": options.precision if dtype == torch.float32 else "default"}
    try:
        budget = float(options.precision)
    except ValueError:
        budget = math.nan
    if not 0 < budget < 1:
        spell_precision(options.precision)
    if dtype != torch.float32:
        is_quantized = operands.k.dtype in descales.QUANTIZED  # or on a cache of 8 bits
        found = f"k is {operands.k.dtype}" if is_quantized else f"q is {dtype}, which rounds each number of out"
        remedy = "pass no precision" if is_quantized else "pass q.float(), k.float() and v.float(), or no precision"
        raise InvalidInput(
            f"precision is {budget:g}, an error budget, which float32 inputs can keep; {found}: {remedy}"
        )
    return {"error_budget": budget}
