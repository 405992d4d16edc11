"""Other implementations of the same call, each one small function, given the best settings it supports.

A peer is `prepare(problem, operands) -> Prepared`: whatever a user would do once (layout, choice of backend, warm-up)
is done there, so the call that is timed does the attention and nothing else. A peer that cannot run the problem, or
would compute something else, raises `PeerUnavailable` with the reason, and the reason is printed in its place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from warpwave.problem import AttentionProblem, Operands

MATH_SCORE_BYTES = 4 << 30  # the largest scores in memory that are worth waiting for


class PeerUnavailable(Exception):
    """This peer cannot run this problem here. The message says why."""


@dataclass(frozen=True)
class Prepared:
    """A peer ready to be timed.

    Attributes:
        call: computes the attention, in the peer's own layout.
        to_out: views its result as `(batch, seqlen_q, num_heads_q, head_dim_v)`.
        kernel: what runs inside: an operator's or a kernel's name.
        eager: whether `call` is what a user would write, so that its host time means something.
        config: the kernel's config as plain data, where there is one.
    """

    call: Callable[[], Tensor]
    to_out: Callable[[Tensor], Tensor]
    kernel: str
    eager: bool
    config: dict[str, Any] | None = None


Peer = Callable[[AttentionProblem, Operands], Prepared]


def _sdpa(backend: SDPBackend | None, problem: AttentionProblem, operands: Operands) -> Prepared:
    """`torch.nn.functional.scaled_dot_product_attention`, one backend forced, or left to choose."""
    _refuse_what_sdpa_lacks(problem)
    if operands.q.device.type == "cpu" and backend in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        raise PeerUnavailable("it does not run on a CPU")
    if backend is SDPBackend.MATH:
        score_bytes = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_k * 4
        if score_bytes > MATH_SCORE_BYTES:
            raise PeerUnavailable(f"its scores in memory would take {score_bytes / 2**30:.1f} GiB")

    # Flash and efficient attention work on (batch, seqlen, heads, dim) inside, so a view of ours is what they like.
    # cuDNN takes any strides and math multiplies per head: each head contiguous, as torch's users have it.
    views = backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    q, k, v = (x.transpose(1, 2) if views else x.transpose(1, 2).contiguous() for x in operands[:3])
    attend = partial(
        scaled_dot_product_attention,
        q,
        k,
        v,
        is_causal=problem.causal is not None,
        scale=problem.softmax_scale,
        enable_gqa=problem.num_heads_q != problem.num_heads_kv,
    )

    def forced(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return attend()

    call = attend if backend is None else partial(forced, backend)
    return Prepared(
        call,
        to_out=lambda out: out.transpose(1, 2),
        kernel=_operator_behind(call),
        eager=backend is None,  # a user who forces a backend does so once for many calls, not in each
    )


PEERS: dict[str, Peer] = {
    "sdpa_default": partial(_sdpa, None),
    "sdpa_flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa_efficient": partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "sdpa_cudnn": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa_math": partial(_sdpa, SDPBackend.MATH),
}


def _refuse_what_sdpa_lacks(problem: AttentionProblem) -> None:
    causal = problem.causal
    if causal is not None and causal.alignment == "bottom_right" and problem.seqlen_q != problem.seqlen_k:
        raise PeerUnavailable(
            f"its causal mask is aligned to the first key, ours to the last: they differ at seqlen "
            f"{problem.seqlen_q} x {problem.seqlen_k}"
        )
    asked = {
        "packed sequences": problem.packed,
        "a sliding window": problem.window_size != (-1, -1),
        "softcap": problem.softcap != 0,
        "sinks": problem.has_sinks,
        "lse": problem.return_lse,
        "ALiBi": problem.alibi_shape is not None,
        "a boolean mask": problem.mask_shape is not None,
        "an additive bias": problem.bias_shape is not None,
        "gradients": problem.requires_grad,
    }
    refused = [feature for feature, is_asked in asked.items() if is_asked]
    if refused:
        raise PeerUnavailable(f"not compared on {', '.join(refused)}")


def _operator_behind(call: Callable[[], Tensor]) -> str:
    """Run once; returns the name of the operator that ran. A backend that refuses says why in warnings, then raises."""
    with warnings.catch_warnings(record=True) as caught, _Operators() as operators:
        warnings.simplefilter("always")
        try:
            call()
        except RuntimeError as error:
            reasons = [str(w.message).partition("(Triggered internally")[0].strip() for w in caught]
            reasons = [r for r in reasons if not r.endswith("because:")]  # headings of the reasons that follow
            raise PeerUnavailable("; ".join(reasons) or str(error).splitlines()[0]) from error
    return operators.attention or "math"


class _Operators(TorchDispatchMode):
    """Sees which attention operator SDPA turned into. torch offers no public question for its choice of backend."""

    attention = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "attention" in name:
            self.attention = name.removeprefix("_scaled_dot_product_")
        return func(*args, **(kwargs or {}))
