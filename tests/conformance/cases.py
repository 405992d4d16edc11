"""The case grid: the cases of the gates, the values of each feature, and lists that cover every pair of values.

A `Case` is plain data. `build` turns it into the tensors and arguments of a call, which are the same for every kernel.
Each kernel states which calls it supports (`why_not`), and the tests check that statement.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.conformance.datasets import Data, fill
from warpwave import quantize
from warpwave.operands import DropoutOperands, Operands, QuantizedOperands
from warpwave.problem import QUANTIZED_DTYPES, AttentionProblem, Causal

Lengths = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """One attention call, as data. The defaults are the plainest call.

    Args:
        dtype: with the precision for float32: "float16", "float32:tf32"; of quantized calls that of q and k, that of v,
            and what shares a factor: "int8:float16:64".
        lengths: (seqlen_q, seqlen_k), of the longest sequence where packed.
        packed: whether sequences of different lengths, some of them empty, are packed.
        causal: "", "bottom_right" or "top_left".
        mask: "", "full" (a bit for each cell), "keys" (padding of each batch item) or "rows" (whole rows hidden).
        bias: "", "full" (in the call's dtype) or "heads" (float32, one row for all queries); both with some -inf.
        alibi: "", "heads" or "batch", the axes of the slopes.
        scale: softmax_scale, None for the default.
        layout: how q, k and v lie in memory: a key of `LAYOUTS`.
        dropout: dropout_p.
        v_in_k: whether v is the first columns of k, as in a latent cache.
    """

    dtype: str = "float16"
    dims: tuple[int, int] = (64, 64)
    lengths: Lengths = (64, 64)
    heads: tuple[int, int] = (2, 2)
    batch: int = 1
    packed: bool = False
    causal: str = ""
    window: tuple[int, int] = (-1, -1)
    mask: str = ""
    bias: str = ""
    alibi: str = ""
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    layout: str = "bshd"
    lse: bool = True
    dropout: float = 0.0
    v_in_k: bool = False

    def __str__(self) -> str:
        """Returns the features that differ from the plainest call, for test ids."""
        parts = [self.dtype, "x".join(map(str, self.lengths)), "d" + "x".join(map(str, dict.fromkeys(self.dims)))]
        parts += [f"h{'x'.join(map(str, self.heads))}", f"b{self.batch}"]
        for name in (
            "packed",
            "causal",
            "window",
            "mask",
            "bias",
            "alibi",
            "softcap",
            "sinks",
            "scale",
            "layout",
            "lse",
            "dropout",
            "v_in_k",
        ):
            value = getattr(self, name)
            if value != getattr(PLAIN, name):
                value = "x".join(map(str, value)) if isinstance(value, tuple) else value
                parts.append(name if value is True else f"{name}={value}")
        return "-".join(parts)


PLAIN = Case()


class Call(NamedTuple):
    """A case as tensors: the call as a problem with operands, and as arguments of the public functions."""

    problem: AttentionProblem
    operands: Any  # Operands, DropoutOperands or QuantizedOperands
    options: dict[str, Any]  # keyword arguments of attention() or attention_varlen(), tensors excepted


def with_operands(call: Call, **operands: Any) -> Call:
    """Returns the same call on other tensors."""
    return call._replace(operands=call.operands._replace(**operands))


def upstream(call: Call) -> tuple[Tensor, Tensor]:
    """Returns dout and dlse, from a fixed seed."""
    q = call.operands.q
    g = torch.Generator(q.device).manual_seed(2)
    dout = torch.randn(*q.shape[:-1], call.problem.head_dim_v, generator=g, device=q.device)
    dlse = torch.randn(dout.shape[:-1], generator=g, device=q.device).transpose(-1, -2).contiguous()
    return dout.to(q.dtype), dlse


# Building -------------------------------------------------------------------------------------------------------------


def build(case: Case, data: Data, device: torch.device, seed: int = 0) -> Call:
    """Returns the tensors and arguments of a case, from a fixed seed."""
    g = torch.Generator(device).manual_seed(seed)
    dtype_name, _, precision = case.dtype.partition(":")
    is_quantized = dtype_name in QUANTIZED_DTYPES
    dtype = torch.float32 if is_quantized else getattr(torch, dtype_name)
    (seqlen_q, seqlen_k), (heads_q, heads_kv), (head_dim, head_dim_v) = case.lengths, case.heads, case.dims
    sequences = packed_lengths(case) if case.packed else ()
    total_q, total_k = sum(q for q, _ in sequences), sum(k for _, k in sequences)
    rows, keys = ((total_q,), (total_k,)) if case.packed else ((case.batch, seqlen_q), (case.batch, seqlen_k))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device)

    q, k, v = normal(*rows, heads_q, head_dim), normal(*keys, heads_kv, head_dim), normal(*keys, heads_kv, head_dim_v)
    fill(data, head_dim, q, k, v)
    factors: dict[str, Any] = {}
    if not is_quantized:
        q, k, v = LAYOUTS[case.layout](q.to(dtype), k.to(dtype), v.to(dtype))
    if case.v_in_k:
        v = k[..., :head_dim_v]

    def scattered(share: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, device=device) < share

    mask = bias = slopes = None
    if case.mask == "full":
        mask = scattered(0.7, case.batch, heads_q, seqlen_q, seqlen_k)
    elif case.mask == "keys":
        used = torch.tensor([max(1, seqlen_k - b * (seqlen_k // 3)) for b in range(case.batch)], device=device)
        mask = (torch.arange(seqlen_k, device=device) < used[:, None])[:, None, None]
    elif case.mask == "rows":
        mask = scattered(0.8, 1, heads_q, seqlen_q, 1)
    if case.bias == "full":
        bias = normal(case.batch, heads_q, seqlen_q, seqlen_k).to(dtype)
    elif case.bias == "heads":
        bias = normal(1, heads_q, 1, seqlen_k)
    if bias is not None:
        bias.masked_fill_(scattered(0.1, *bias.shape), -math.inf)
    if case.alibi:
        slopes = 2.0 ** -torch.arange(1, heads_q + 1, device=device, dtype=torch.float32)
        if case.alibi == "batch":
            slopes = slopes * torch.linspace(0.5, 1.5, case.batch, device=device)[:, None]
    sinks = normal(heads_q) if case.sinks else None
    cu_seqlens = [
        torch.tensor([0, *itertools.accumulate(side)], dtype=torch.int32, device=device)
        for side in zip(*sequences, strict=True)
    ]

    quantized: dict[str, Any] = {}
    if is_quantized:
        q, k, v, factors, quantized = quantized_inputs(case, q, k, v, cu_seqlens)
        precision = ""
    problem = AttentionProblem(
        batch=case.batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype_name,
        softmax_scale=head_dim**-0.5 if case.scale is None else case.scale,
        causal=Causal(case.causal) if case.causal else None,  # type: ignore[arg-type]
        window_size=case.window,
        mask_shape=None if mask is None else tuple(mask.shape),
        bias_shape=None if bias is None else tuple(bias.shape),
        bias_dtype=None if bias is None else str(bias.dtype).removeprefix("torch."),
        alibi_shape=None if slopes is None else tuple(slopes.shape),
        softcap=case.softcap,
        has_sinks=case.sinks,
        precision=precision or "default",
        packed=case.packed,
        total_q=total_q,
        total_k=total_k,
        return_lse=case.lse,
        dropout_p=case.dropout,
        **quantized,
    )
    options = {
        "causal": problem.causal or False,
        "window_size": None if case.window == (-1, -1) else case.window,
        "softcap": case.softcap,
        "softmax_scale": case.scale,
        "precision": problem.precision,
        "return_lse": case.lse,
    }
    operands = Operands(q, k, v, mask, bias, slopes, sinks, *cu_seqlens)
    if is_quantized:
        return Call(problem, QuantizedOperands(*operands, **factors), options)
    if not case.dropout:
        return Call(problem, operands, options)
    dropout_seed = torch.tensor([seed - 2**62, 2**40 + 3], device=device)  # both halves of both numbers matter
    return Call(problem, DropoutOperands(*operands, dropout_seed), options | {"dropout_p": case.dropout})


def quantized_inputs(
    case: Case, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor], dict[str, Any]]:
    """Returns quantized q, k and v, their factors by name, and the fields of the problem."""
    names = case.dtype.split(":")
    dtype, dtype_v = (getattr(torch, name) for name in names[:2])
    granularity = int(names[2]) if names[2].isdigit() else names[2]
    offsets = {}
    if case.packed:
        offsets = {"cu_seqlens_q": cu_seqlens[0], "cu_seqlens_k": cu_seqlens[1]}
        offsets |= {"max_seqlen_q": case.lengths[0], "max_seqlen_k": case.lengths[1]}  # type: ignore[dict-item]
    found = quantize(q, k, v, dtype=dtype, dtype_v=dtype_v, granularity=granularity, **offsets)  # type: ignore[arg-type]
    arguments = found.arguments()
    q, k, v = LAYOUTS[case.layout](*(arguments.pop(name) for name in "qkv"))
    block = granularity if isinstance(granularity, int) else 0
    # A factor of one block is that of 128 tokens.
    blocks = [128 if block and n <= 64 else block for n in (case.lengths[0], case.lengths[1], case.lengths[1])]
    blocks[2] = 0 if found.v_descale is None else blocks[2]
    dtype_out = names[1] if found.v_descale is None else "bfloat16"
    fields = {"dtype_v": names[1], "dtype_out": dtype_out, "descale_blocks": tuple(blocks)}
    return q, k, v, arguments, fields


def packed_lengths(case: Case) -> list[Lengths]:
    """Returns the lengths of the packed sequences: the longest, one without queries, one without keys, shorter ones;
    then these shorter ones again."""
    seqlen_q, seqlen_k = case.lengths
    others = [(0, seqlen_k // 2), (seqlen_q // 2, 0), (seqlen_q // 3 + 1, seqlen_k // 2 + 1), (1, seqlen_k)]
    return [(seqlen_q, seqlen_k), *itertools.islice(itertools.cycle(others), case.batch - 1)]


Layout = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def _poison(x: Tensor) -> float:
    return math.nan if x.dtype.is_floating_point else -128


def _heads_first(x: Tensor) -> Tensor:
    """Returns the same values with each head contiguous: (batch, heads, seqlen, head_dim) in memory."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def _one_buffer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views of one projection's output, in which a token's q, k and v are adjacent; v apart if it has another
    dtype."""
    if v.dtype != q.dtype:
        return (*_one_buffer(q, k, k)[:2], v)
    tokens = max(q.shape[-3], k.shape[-3])
    widths = [x.shape[-2] * x.shape[-1] for x in (q, k, v)]
    buffer = q.new_full((*q.shape[:-3], tokens, sum(widths)), _poison(q))
    views = []
    for x, part in zip((q, k, v), buffer.split(widths, dim=-1), strict=True):
        view = part[..., : x.shape[-3], :].unflatten(-1, x.shape[-2:])
        views.append(view.copy_(x))
    return views[0], views[1], views[2]


def _every_other(x: Tensor) -> Tensor:
    buffer = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), _poison(x))
    return buffer[..., ::2].copy_(x)


def _shifted(x: Tensor) -> Tensor:
    buffer = x.new_full((x.numel() + 1,), _poison(x))
    return buffer[1:].view(x.shape).copy_(x)


# Memory beside a view holds NaN.
LAYOUTS: dict[str, Layout] = {
    "bshd": lambda q, k, v: (q, k, v),
    "bhsd": lambda q, k, v: (_heads_first(q), _heads_first(k), _heads_first(v)),
    "one buffer": _one_buffer,
    "k and v differ": lambda q, k, v: (q, k, _heads_first(v)),
    "one head for all": lambda q, k, v: (q, k[..., :1, :].expand(k.shape), v[..., :1, :].expand(v.shape)),
    "one item for all": lambda q, k, v: (q, k[:1].expand(k.shape), v[:1].expand(v.shape)),
    "last stride 2": lambda q, k, v: (_every_other(q), _every_other(k), _every_other(v)),
    "offset 1": lambda q, k, v: (_shifted(q), _shifted(k), _shifted(v)),
}

# The grid -------------------------------------------------------------------------------------------------------------

W = 13  # a window that is no multiple of any tile

# Features both grids share. Each value is here because somebody's kernel was once wrong at it.
FEATURES: dict[str, Sequence[Any]] = {
    "packed": (False, True),
    "causal": ("", "bottom_right", "top_left"),
    "mask": ("", "full", "keys", "rows"),
    "bias": ("", "full", "heads"),
    "alibi": ("", "heads", "batch"),
    "softcap": (0.0, 15.0, 50.0),
    "sinks": (False, True),
    "scale": (None, 1.0, 0.3),
    "layout": tuple(LAYOUTS),
    "lse": (True, False),
    "dtype": (
        *("float16", "bfloat16", "float32:default", "float32:ieee", "float32:tf32x3", "float32:tf32"),
        *("float32:bf16x6", "float32:bf16x3"),
    ),
}


def windows(t: int) -> tuple[tuple[int, int], ...]:
    """Returns windows: none, the narrowest, around a tile of t keys, both sides, right side only."""
    return ((-1, -1), (0, 0), (1, 0), (t - 1, 0), (t, 0), (t + 1, 0), (W, W), (-1, 5))


SMALL: dict[str, Sequence[Any]] = {
    **FEATURES,
    "dims": ((16, 16), (40, 40), (59, 59), (64, 64), (111, 111), (128, 128), (64, 128), (128, 64), (192, 128)),
    "lengths": ((1, 1), (1, 128), (3, 199), (64, 128), (33, 65), (113, 103), (128, 117), (139, 1), (199, 3), (65, 65)),
    "heads": ((1, 1), (2, 2), (6, 2), (3, 1)),
    "batch": (1, 2, 5),
    "window": windows(64),
}
FULL: dict[str, Sequence[Any]] = {
    **FEATURES,
    "dims": (
        *((d, d) for d in (16, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)),
        *((192, 128), (64, 128), (128, 64)),
    ),
    "lengths": (
        *((1, 1), (1, 128), (1, 1023), (3, 799), (64, 128), (113, 203), (128, 217), (239, 1), (799, 3)),
        *((257, 257), (1023, 1024), (1024, 1023), (2048, 2048)),
    ),
    "heads": ((1, 1), (4, 4), (6, 2), (8, 1), (12, 3), (32, 8)),
    "batch": (1, 2, 5),
    "window": windows(128),
}


# The Hopper forward takes masks and biases in 16-bit types up to head_dim 256, so grids without them for the rest:
# float32 by parts, and the widest rows of 16 bits.
_WITHOUT_MASKS: dict[str, Sequence[Any]] = {**FULL, "mask": ("",), "bias": ("",)}
SPLIT_FLOAT32 = _WITHOUT_MASKS | {
    "dtype": ("float32:default", "float32:tf32", "float32:bf16x6"),
    "dims": (*FULL["dims"], (111, 40), (256, 64)),
    "window": windows(64),
}
WIDE_ROWS = _WITHOUT_MASKS | {
    "dtype": ("float16", "bfloat16"),
    "dims": ((264, 264), (320, 320), (352, 352), (384, 384), (384, 128), (128, 384), (272, 368)),
    "window": windows(64),
}


# Few kernels compute quantized calls. Blocks of packed tokens have no factors.
QUANTIZED_DTYPES_OF_A_GRID = (
    *("float8_e4m3fn:float8_e4m3fn:128", "float8_e4m3fn:float8_e5m2:64", "float8_e5m2:float8_e5m2:tensor"),
    *("float8_e4m3fn:float8_e4m3fn:head", "int8:int8:head", "int8:int8:64", "int8:float16:128", "int8:bfloat16:tensor"),
    "float8_e4m3fn:bfloat16:128",
)
QUANTIZED_SMALL: dict[str, Sequence[Any]] = SMALL | {
    "dtype": QUANTIZED_DTYPES_OF_A_GRID,
    "layout": ("bshd", "bhsd", "last stride 2", "offset 1"),
    "dims": ((16, 16), (40, 40), (64, 64), (111, 111), (128, 64)),
    "window": ((-1, -1), (0, 0), (W, W)),
}
QUANTIZED_FULL: dict[str, Sequence[Any]] = FULL | {"dtype": QUANTIZED_DTYPES_OF_A_GRID}

# Few kernels have dropout, so it is no feature of the grids, half of which the others would then refuse.
DROPOUT = [
    Case(dropout=0.2, dtype="float32:ieee", lengths=(33, 65)),
    Case(dropout=0.5, dtype="bfloat16", lengths=(65, 49), dims=(40, 64), heads=(4, 2), batch=2, causal="bottom_right"),
    Case(dropout=0.9, lengths=(49, 70), sinks=True, alibi="heads", window=(W, W)),
    Case(dropout=0.1, dtype="float32:default", lengths=(40, 70), mask="full", bias="heads", softcap=15.0, batch=2),
    Case(dropout=0.3, lengths=(65, 70), packed=True, batch=5, heads=(3, 1), causal="top_left"),
    # Of Hopper's kernels: launches together and apart, and tiles that begin before what is seen first.
    Case(dropout=0.1, dtype="bfloat16", lengths=(150, 141), dims=(128, 128), heads=(4, 2), causal="bottom_right"),
    Case(dropout=0.4, lengths=(70, 205), dims=(64, 64), batch=2, window=(20, 7), softcap=15.0),
    Case(dropout=0.2, lengths=(65, 130), dims=(192, 128), mask="full", bias="heads"),
    Case(dropout=0.6, dtype="bfloat16", lengths=(90, 75), dims=(256, 256), packed=True, batch=3, causal="bottom_right"),
]


def excluded(a: str, x: Any, b: str, y: Any) -> bool:
    """Whether feature a at x excludes feature b at y: packed calls take no mask, no bias and no factors of blocks, and
    have no batch axis to broadcast."""
    pair = {a: x, b: y}
    if pair.get("packed") is True and str(pair.get("dtype")).endswith((":64", ":128")):
        return True
    return pair.get("packed") is True and bool(
        pair.get("mask") or pair.get("bias") or pair.get("layout") == "one item for all"
    )


Pair = tuple[str, Any, str, Any]


def valid_pairs(features: Mapping[str, Sequence[Any]]) -> Iterator[Pair]:
    """Returns every valid pair of values of different features."""
    for a, b in itertools.combinations(features, 2):
        for x, y in itertools.product(features[a], features[b]):
            if not excluded(a, x, b, y):
                yield (a, x, b, y)


def pairwise(features: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Returns cases that cover every valid pair of values, by a greedy, deterministic search.

    Each case starts from the first pair that has not met yet; every other feature then takes the value that meets most
    new pairs with those already chosen, the least used one where several do.
    """
    missing = dict.fromkeys(valid_pairs(features))  # a set that keeps its order
    used: dict[tuple[str, Any], int] = {}
    cases = []
    while missing:
        a, x, b, y = next(iter(missing))
        chosen: dict[str, Any] = {a: x, b: y}
        for name in sorted(features.keys() - chosen.keys(), key=lambda n: (-len(features[n]), n)):

            def meets(value: Any, name: str = name, chosen: dict[str, Any] = chosen) -> tuple[int, int]:
                new = sum(_ordered(features, name, value, other, at) in missing for other, at in chosen.items())
                return -new, used.get((name, value), 0)

            allowed = [v for v in features[name] if not any(excluded(name, v, o, at) for o, at in chosen.items())]
            chosen[name] = min(allowed, key=meets)
        for (name, value), (other, at) in itertools.combinations(chosen.items(), 2):
            missing.pop(_ordered(features, name, value, other, at), None)
        for item in chosen.items():
            used[item] = used.get(item, 0) + 1
        cases.append(Case(**chosen))
    return cases


def singles(features: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Returns a plain call with each single value of each feature, so that a failure names the feature."""
    plain = replace(PLAIN, lengths=(113, 103), batch=2, heads=(2, 1))
    return [replace(plain, **{name: value}) for name, values in features.items() for value in values]


def _ordered(features: Mapping[str, Sequence[Any]], a: str, x: Any, b: str, y: Any) -> Pair:
    """Returns the pair in the order of `valid_pairs`: the feature that comes first in the mapping is first."""
    for name in features:
        if name == a:
            return (a, x, b, y)
        if name == b:
            return (b, y, a, x)
    raise KeyError((a, b))


def at_tile_edges(tile: int, dtype: str) -> list[Case]:
    """Returns lengths around the size of one tile and of two, with each mask that determines the visited tiles."""
    lengths = (tile - 1, tile, tile + 1, 2 * tile + 1)
    masks: tuple[dict[str, Any], ...] = (
        {},
        {"causal": "bottom_right"},
        {"window": (tile, 0)},
        {"causal": "top_left", "window": (W, 5)},
        {"packed": True, "batch": 4, "heads": (1, 1)},
    )
    plain = Case(dtype=dtype, dims=(16, 16), heads=(2, 1))
    return [replace(plain, lengths=(n, n), **m) for n in lengths for m in masks]


LARGEST_TILE = 256  # larger ones are eager's, whose tiles are no more than slices


def long() -> list[Case]:
    """Returns lengths past 2^15 and 2^16 for queries and for keys, where a narrow index type would wrap."""
    plain = replace(PLAIN, dtype="bfloat16", heads=(2, 1), lse=True)
    shapes = ((3, 33_000), (33_000, 3), (129, 65_537), (65_537, 129))
    masks: tuple[dict[str, Any], ...] = (
        {},
        {"causal": "bottom_right"},
        {"causal": "top_left"},
        {"window": (700, 0)},
        {"alibi": "heads"},
        {"mask": "keys"},
        {"bias": "heads"},
        {"packed": True, "batch": 2},
    )
    return [replace(plain, lengths=n, **m) for n in shapes for m in masks]


# One for each way a kernel's choice of configs can go: element size, head_dim, and what a mask adds.
FOR_CONFIGS = [
    replace(PLAIN, dtype=dtype, dims=(d, d), lengths=(257, 300), causal=causal)
    for dtype in ("bfloat16", "float32:default")
    for d in (64, 128, 256)
    for causal in ("", "bottom_right")
]
