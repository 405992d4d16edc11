"""Checks of an `AttentionProblem` that a user wrote."""

from __future__ import annotations

from warpwave.checks.calls import DTYPE_NAMES, NAMES, check_heads, check_scalars
from warpwave.errors import InvalidInput, InvalidType
from warpwave.kernels import cache_descales, descales, dropout
from warpwave.options import PRECISION_NAMES
from warpwave.problem import PRECISIONS, AttentionProblem, Causal


def check_problem(problem: AttentionProblem) -> None:
    """Raises InvalidInput or InvalidType if no call can have a problem that a user wrote."""
    if not isinstance(problem, AttentionProblem):
        raise InvalidType(f"problem is a {type(problem).__name__}; it must be an AttentionProblem")
    sizes = ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v")
    for name in (*sizes, "total_q", "total_k", "page_size"):
        size = getattr(problem, name)
        if not isinstance(size, int) or size < 0:
            raise InvalidInput(f"{name} is {size!r}; it must be a whole number, not negative")
    for name, number in (("softmax_scale", problem.softmax_scale), ("softcap", problem.softcap)):
        if not isinstance(number, int | float):
            raise InvalidType(f"{name} is {number!r}; it must be a number")
    window = problem.window_size
    if not (isinstance(window, tuple) and len(window) == 2 and all(isinstance(side, int) for side in window)):
        raise InvalidType(f"window_size is {window!r}; in a problem it must be two whole numbers (left, right)")
    known = (DTYPE_NAMES if problem.page_size else NAMES).values()
    if problem.dtype not in known:
        raise InvalidInput(f"dtype is {problem.dtype!r}; it must be one of {', '.join(known)}")
    if problem.precision not in PRECISIONS:
        raise InvalidInput(f"precision is {problem.precision!r}; it must be one of {PRECISION_NAMES}")
    budget = problem.error_budget
    if budget is not None and not (0 < budget < 1 and problem.dtype == "float32" and problem.precision == "default"):
        raise InvalidInput(
            f"error_budget is {budget!r}, dtype {problem.dtype} and precision {problem.precision!r}; a budget is "
            "between 0 and 1, of float32 inputs, instead of a named precision"
        )
    if problem.v_in_k and (problem.head_dim_v > problem.head_dim or problem.dtype_of_v != problem.dtype_of_k):
        raise InvalidInput(
            f"v_in_k is True, and v has head_dim {problem.head_dim_v} and dtype {problem.dtype_of_v}, k has "
            f"{problem.head_dim} and {problem.dtype_of_k}; v must be the first columns of k"
        )
    dropout.check_problem(problem)
    descales.check_problem(problem)
    cache_descales.check_problem(problem)
    if not (problem.causal is None or isinstance(problem.causal, Causal)):
        raise InvalidType(f"causal is {problem.causal!r}; in a problem it must be a Causal, or None")
    check_heads(problem.num_heads_q, problem.num_heads_kv, problem.head_dim, problem.head_dim_v)
    check_scalars(problem.softmax_scale, problem.softcap, window)
    _check_shapes(problem)


def _check_shapes(problem: AttentionProblem) -> None:
    """Checks the shapes that a problem states of its mask, bias and slopes, and the dtype of the bias."""
    p = problem
    scores = (p.batch, p.num_heads_q, p.seqlen_q, p.seqlen_k)
    for name in ("mask_shape", "bias_shape"):
        shape = getattr(p, name)
        if shape is None:
            continue
        if p.packed or p.page_size:
            raise InvalidInput(f"{name} is {shape}; packed calls and calls on a paged cache have no mask and no bias")
        if len(shape) != 4 or any(size not in (1, whole) for size, whole in zip(shape, scores, strict=True)):
            raise InvalidInput(f"{name} is {shape}; it must be {scores}, and any axis may be 1")
    if p.alibi_shape not in (None, (p.num_heads_q,), (p.batch, p.num_heads_q)):
        raise InvalidInput(
            f"alibi_shape is {p.alibi_shape}; it must be {(p.num_heads_q,)} or {(p.batch, p.num_heads_q)}, or None"
        )
    of_bias = ("float16", "bfloat16", "float32") if p.is_quantized else (p.dtype, "float32")
    if p.bias_dtype not in (None, *of_bias):
        raise InvalidInput(f"bias_dtype is {p.bias_dtype!r}; it must be {' or '.join(of_bias)}")
