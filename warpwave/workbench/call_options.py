"""Command-line options that describe an attention call, for every command that takes one.

Only typer is imported before a command runs, as in cli.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from warpwave.problem import AttentionProblem

DTYPES = {
    "float16": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float32": "float32",
    "fp32": "float32",
}


QUANTIZED_DTYPES = {
    "float8_e4m3fn": "float8_e4m3fn",
    "fp8": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "int8": "int8",
}
GRANULARITIES = ("tensor", "head", "64", "128")


def describes_a_call(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of a call to a command. The command receives the problem as its argument `problem`.

    The command's parameters must be annotated, its own options with typer's annotations.
    """
    own, call = _parameters(command), _parameters(_describe)
    del own["problem"]

    def with_a_call(**given: Any) -> None:
        described = {name: given.pop(name) for name in call}
        # A table of measurements describes its own calls, and needs no torch.
        command(problem=None if given.get("from_table") else _describe(**described), **given)

    # typer reads the options from the signature.
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own.values(), *call.values())]
    with_a_call.__name__, with_a_call.__doc__ = command.__name__, command.__doc__
    with_a_call.__annotations__ = {p.name: p.annotation for p in parameters}
    with_a_call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_a_call


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns the parameters, with typer's annotations evaluated; others may name what only type checkers import."""

    def evaluated(parameter: inspect.Parameter) -> inspect.Parameter:
        if "typer." not in parameter.annotation:
            return parameter
        return parameter.replace(annotation=eval(parameter.annotation, function.__globals__))

    return {name: evaluated(p) for name, p in inspect.signature(function).parameters.items()}


def _describe(
    batch: Annotated[int, typer.Option(min=0, help="Number of sequences.")] = 1,
    seqlen_q: Annotated[int, typer.Option(min=0, help="Queries per sequence.")] = 4096,
    seqlen_k: Annotated[int | None, typer.Option(min=0, help="Keys per sequence. Default: seqlen-q.")] = None,
    heads: Annotated[int, typer.Option(min=0, help="Number of query heads.")] = 16,
    heads_kv: Annotated[int | None, typer.Option(min=0, help="Number of key and value heads. Default: heads.")] = None,
    head_dim: Annotated[int, typer.Option(min=0, help="Head dimension of q and k.")] = 128,
    head_dim_v: Annotated[
        int | None, typer.Option(min=0, help="Head dimension of v and out. Default: head-dim.")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="float16 (fp16), bfloat16 (bf16) or float32 (fp32); quantized: float8_e4m3fn (fp8), float8_e5m2 or "
            "int8."
        ),
    ] = "bfloat16",
    dtype_v: Annotated[
        str | None,
        typer.Option(help="With a quantized dtype, that of v. Default: dtype beside float8, bfloat16 beside int8."),
    ] = None,
    granularity: Annotated[
        str | None,
        typer.Option(
            help="With a quantized dtype, what shares a factor: tensor, head, or 64 or 128 tokens. Default: 128, or "
            "head with --packed."
        ),
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="Causal mask, aligned to the last key (bottom right).")
    ] = False,
    causal_top_left: Annotated[
        bool, typer.Option("--causal-top-left", help="Causal mask, aligned to the first key, like torch's is_causal.")
    ] = False,
    window: Annotated[
        str, typer.Option(metavar="LEFT,RIGHT", help="Sliding window: visible keys before and after; -1 is unlimited.")
    ] = "-1,-1",
    mask: Annotated[bool, typer.Option("--mask", help="Boolean mask over queries and keys.")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="float32 bias over heads, queries and keys.")] = False,
    packed: Annotated[
        bool, typer.Option("--packed", help="Packed sequences of equal length, as attention_varlen takes them.")
    ] = False,
    page_size: Annotated[
        int,
        typer.Option(
            min=0, metavar="TOKENS", help="Keys and values are in a paged cache, in pages of so many tokens; 0: not."
        ),
    ] = 0,
    v_in_k: Annotated[
        bool, typer.Option("--v-in-k", help="Values are the first columns of the keys, as in a latent cache.")
    ] = False,
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE:FACTORS",
            help="With --page-size, a cache of 8 bits: float8_e4m3fn or int8, and what shares a factor, head or token: "
            "int8:token.",
        ),
    ] = None,
    softcap: Annotated[float, typer.Option(help="Replace scores by softcap * tanh(score / softcap); 0 is off.")] = 0.0,
    sinks: Annotated[
        bool, typer.Option("--sinks", help="Attention sinks: one extra logit per head in the denominator.")
    ] = False,
    alibi: Annotated[bool, typer.Option("--alibi", help="ALiBi with one slope per head.")] = False,
    lse: Annotated[bool, typer.Option("--lse", help="Also return the log-sum-exp.")] = False,
    grad: Annotated[bool, typer.Option("--grad", help="The inputs require gradients.")] = False,
    dropout: Annotated[float, typer.Option(help="Drop probabilities after the softmax, with this probability.")] = 0.0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Gradients must have the same bits in every run.")
    ] = False,
    precision: Annotated[
        str,
        typer.Option(
            help="For float32: default, ieee, tf32(x3), bf16x3, bf16x6, fp16x1, fp16x3, or an error budget: 1e-4."
        ),
    ] = "default",
) -> AttentionProblem:
    """Returns the problem. It passes the same checks as a real call, on tensors without storage."""
    names = DTYPES | QUANTIZED_DTYPES
    for option, value in (("--dtype", dtype), ("--dtype-v", dtype_v)):
        if value is not None and value not in names:
            raise typer.BadParameter(f"{value!r} is not a dtype; use {', '.join(names)}", param_hint=option)
    if dtype in DTYPES:
        for option, value in (("--dtype-v", dtype_v), ("--granularity", granularity)):
            if value is not None:
                raise typer.BadParameter(f"dtype is {dtype}; {option} belongs to a quantized one", param_hint=option)
    if granularity is not None and granularity not in GRANULARITIES:
        allowed = ", ".join(GRANULARITIES)
        raise typer.BadParameter(f"{granularity!r} is not allowed; use {allowed}", param_hint="--granularity")
    if causal and causal_top_left:
        raise typer.BadParameter("give --causal or --causal-top-left, not both", param_hint="--causal-top-left")
    if deterministic and not grad:
        raise typer.BadParameter("only gradients can be deterministic; add --grad", param_hint="--deterministic")
    if cache is not None and not page_size:
        raise typer.BadParameter("a cache of 8 bits has pages; add --page-size", param_hint="--cache")
    if page_size:
        others = {
            "--mask": mask,
            "--bias": bias,
            "--grad": grad,
            "--dropout": dropout,
            "quantized --dtype": dtype not in DTYPES,
        }
        for option, given in others.items():
            if given:
                raise typer.BadParameter(f"a call on a cache has no {option}", param_hint="--page-size")
    left, right = _window(window)
    from dataclasses import replace

    import torch

    from warpwave.checks.calls import describe_cached_call, describe_call
    from warpwave.checks.problems import check_problem
    from warpwave.errors import InvalidInput
    from warpwave.operands import CachedOperands, Operands, QuantizedOperands
    from warpwave.options import Options, spell_precision
    from warpwave.workbench.bench.workloads import CACHES
    from warpwave.workbench.limits import check_size

    arithmetic = spell_precision(_number_or_name(precision))
    if arithmetic != "default" and names[dtype] != "float32":
        raise typer.BadParameter(f"dtype is {dtype}; --precision belongs to float32", param_hint="--precision")
    if cache is not None and cache not in CACHES:
        raise typer.BadParameter(f"{cache!r} is not allowed; use {', '.join(CACHES)}", param_hint="--cache")
    of_v = names[dtype_v or ("bfloat16" if dtype == "int8" else dtype)]

    def tensor(*shape: int, dtype: str = names[dtype]) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        except (RuntimeError, TypeError):  # torch's errors for sizes beyond 64 bits
            raise typer.BadParameter(f"no tensor can have {' x '.join(map(str, shape))} elements") from None

    keys, kv_heads = seqlen_q if seqlen_k is None else seqlen_k, heads if heads_kv is None else heads_kv
    rows_q, rows_k = ((batch * seqlen_q,), (batch * keys,)) if packed else ((batch, seqlen_q), (batch, keys))
    offsets = tensor(batch + 1, dtype="int32") if packed else None
    operands: Operands | QuantizedOperands = Operands(
        q=tensor(*rows_q, heads, head_dim),
        k=tensor(*rows_k, kv_heads, head_dim),
        v=tensor(*rows_k, kv_heads, head_dim if head_dim_v is None else head_dim_v, dtype=of_v),
        mask=tensor(1, 1, seqlen_q, keys, dtype="bool") if mask else None,
        bias=tensor(1, heads, seqlen_q, keys, dtype="float32") if bias else None,
        alibi_slopes=tensor(heads, dtype="float32") if alibi else None,
        sinks=tensor(heads, dtype="float32") if sinks else None,
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
    )
    if dtype in QUANTIZED_DTYPES:
        shared = granularity or ("head" if packed else "128")

        def factor(heads: int, tokens: int) -> torch.Tensor:
            if shared == "tensor":
                return tensor(1, dtype="float32")
            return tensor(batch, heads, *(() if shared == "head" else (-(-tokens // int(shared)),)), dtype="float32")

        of_values = factor(kv_heads, keys) if of_v in QUANTIZED_DTYPES.values() else None
        operands = QuantizedOperands(
            **operands._asdict(), q_descale=factor(heads, seqlen_q), k_descale=factor(kv_heads, keys),
            v_descale=of_values,
        )  # fmt: skip
    options = Options(
        max_seqlen_q=seqlen_q if packed else 0,
        max_seqlen_k=keys if packed or page_size else 0,
        causal="bottom_right" if causal else "top_left" if causal_top_left else "",
        window_left=left,
        window_right=right,
        softcap=softcap,
        precision=arithmetic,
        return_lse=lse,
        needs_grad=grad,
        dropout_p=dropout,
        deterministic=deterministic,
    )
    if page_size:
        of_cache, shared = CACHES.get(cache or "", (names[dtype], ""))
        width_v = head_dim if head_dim_v is None else head_dim_v
        k, v = (tensor(1, page_size, kv_heads, width, dtype=of_cache) for width in (head_dim, width_v))
        of_factors = (1, page_size, kv_heads) if shared == "token" else (kv_heads,)
        k_descale, v_descale = (tensor(*of_factors, dtype="float32") if shared else None for _ in "kv")
        in_pages = CachedOperands(
            operands.q, k, v, alibi_slopes=operands.alibi_slopes, sinks=operands.sinks, cu_seqlens_q=offsets,
            page_table=tensor(batch, max(1, -(-keys // page_size)), dtype="int32"),
            seqused_k=tensor(batch, dtype="int32"), k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip
        problem = describe_cached_call(in_pages, options)
    else:
        problem = describe_call(operands, options)
    problem = replace(problem, v_in_k=v_in_k)
    try:
        check_problem(problem)
        check_size(problem)
    except InvalidInput as error:
        raise typer.BadParameter(str(error)) from None
    return replace(problem, lengths=((seqlen_q, keys),) * batch) if packed else problem


def _number_or_name(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _window(text: str) -> tuple[int, int]:
    try:
        left, right = (int(side) for side in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not two whole numbers; write 128,0", param_hint="--window") from None
    return left, right
