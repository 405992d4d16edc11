"""What a peer is: another implementation of the same call, given the best settings it supports.

A peer is `prepare(problem, operands) -> Prepared`: whatever a user would do once (layout, choice of backend,
compilation, warm-up) is done there, so the call that is timed does the attention and nothing else. A peer that cannot
run the problem, or would compute something else, raises `PeerUnavailable` with the reason, which is shown in its place.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from warpwave.problem import AttentionProblem, CachedOperands, Operands


class PeerUnavailable(Exception):
    """This peer cannot run this problem here. The message says why."""


@dataclass(frozen=True)
class Prepared:
    """A peer ready to be timed.

    Attributes:
        call: computes the attention, in the peer's own layout.
        to_out: views its result as our layout of out.
        kernel: what runs inside: an operator's or a kernel's name.
        eager: whether `call` is what a user would write, so that its host time means something.
        config: the kernel's config as plain data, where there is one.
        timed_if_wrong: time it even where its result misses the gates. It is then marked, and is nobody's best peer.
    """

    call: Callable[[], Any]
    to_out: Callable[[Any], Tensor]
    kernel: str
    eager: bool
    config: dict[str, Any] | None = None
    timed_if_wrong: bool = False


Peer = Callable[[AttentionProblem, Operands], Prepared]

FEATURES: dict[str, Callable[[AttentionProblem], bool]] = {
    "packed sequences": lambda p: p.packed,
    "a sliding window": lambda p: p.window_size != (-1, -1),
    "softcap": lambda p: p.softcap != 0,
    "sinks": lambda p: p.has_sinks,
    "lse": lambda p: p.return_lse,
    "ALiBi": lambda p: p.alibi_shape is not None,
    "a boolean mask": lambda p: p.mask_shape is not None,
    "an additive bias": lambda p: p.bias_shape is not None,
    "gradients": lambda p: p.requires_grad,
    "a paged cache": lambda p: p.page_size != 0,
}


def refuse_features(problem: AttentionProblem, supported: Collection[str] = ()) -> None:
    """Raise `PeerUnavailable` naming everything the problem asks for that is not in `supported` (keys of FEATURES)."""
    refused = [name for name, asked in FEATURES.items() if name not in supported and asked(problem)]
    if refused:
        raise PeerUnavailable(f"not compared on {', '.join(refused)}")


def refuse_cpu(operands: Operands | CachedOperands) -> None:
    """Raise `PeerUnavailable` for CPU tensors."""
    if operands.q.device.type == "cpu":
        raise PeerUnavailable("it does not run on a CPU")


def require_installed(package: str, distribution: str) -> None:
    """Raise `PeerUnavailable` where a package is absent; where it is there and broken, its import will say so."""
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        raise PeerUnavailable(f"{distribution} is not installed")
