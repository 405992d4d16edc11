"""FFPA: the `ffpa-attn` package, made for head_dim above 256.

It silently falls back to SDPA or to another of its backends, also if the import of a backend fails. Therefore the
operator that ran is checked before a result is attributed to it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from warpwave.operands import Operands
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.peers.peer import (
    OperatorNames,
    PeerUnavailable,
    Prepared,
    refuse_cpu,
    refuse_features,
    require_installed,
)

SMALLEST_HEAD_DIM, LARGEST_HEAD_DIM = 257, 1024


def ffpa_cute(problem: AttentionProblem, operands: Operands) -> Prepared:
    """Prepares its CuTe DSL backend, its fastest on Hopper up to head_dim 512."""
    _refuse(problem, operands)
    from ffpa_attn import CuTeDSLBackend  # type: ignore[import-not-found, unused-ignore]

    backends = {"forward_backend": CuTeDSLBackend(forward=True), "backward_backend": CuTeDSLBackend(backward=True)}
    return _prepare(problem, operands, backends, "_fwd_cute")


def ffpa_triton(problem: AttentionProblem, operands: Operands) -> Prepared:
    """Prepares its Triton backend with TMA, tuned by its own tuner, which can take minutes per shape."""
    _refuse(problem, operands)
    if problem.head_dim <= 512:
        raise PeerUnavailable("its CuTe DSL backend is faster up to head_dim 512")
    from ffpa_attn import TritonBackend

    return _prepare(
        problem,
        operands,
        {"forward_backend": TritonBackend(forward=True, autotune=True, enable_tma=True)},
        "_fwd_triton",
    )


def _refuse(problem: AttentionProblem, operands: Operands) -> None:
    refuse_features(problem)
    if not SMALLEST_HEAD_DIM <= problem.head_dim <= LARGEST_HEAD_DIM:
        raise PeerUnavailable("it is for head_dim 257 to 1024")
    refuse_cpu(operands)
    if problem.dtype == "float32":
        raise PeerUnavailable("it takes float16 and bfloat16")
    if problem.head_dim_v != problem.head_dim:
        raise PeerUnavailable("it takes one head_dim for q, k and v")
    causal = problem.causal
    if causal is not None and problem.seqlen_q != problem.seqlen_k and causal.alignment == "top_left":
        raise PeerUnavailable("its causal mask is aligned to the last key")
    require_installed("ffpa_attn", "ffpa-attn")


def _prepare(problem: AttentionProblem, operands: Operands, backends: dict[str, Any], operator: str) -> Prepared:
    from ffpa_attn import ffpa_attn_func

    q, k, v = (x.transpose(1, 2).contiguous() for x in operands[:3])
    call = partial(
        ffpa_attn_func,
        q,
        k,
        v,
        is_causal=problem.causal is not None,
        scale=problem.softmax_scale,
        enable_gqa=problem.num_heads_q != problem.num_heads_kv,
        **backends,
    )
    with _no_fallback():
        call()  # compiles, and tunes if requested
        with OperatorNames() as operators:
            call()
    if operator not in operators.names:
        raise PeerUnavailable(f"asked for {operator}, and it ran {', '.join(operators.names) or 'nothing'}")
    return Prepared(call, to_out=lambda out: out.transpose(1, 2), kernel=f"ffpa{operator}", eager=True)


@contextmanager
def _no_fallback() -> Iterator[None]:
    """Makes it raise instead of falling back to SDPA."""
    name = "FFPA_FORCE_NO_SDPA_FALLBACK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
