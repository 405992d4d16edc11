"""Peers: other implementations of the same call, with the best settings they support.

A peer is a function `prepare(problem, operands) -> Prepared`. It does everything that a user would do once (layout,
choice of backend, compilation, warm-up), so the timed call computes only the attention. A peer that cannot run the
problem, or would compute something else, raises `PeerUnavailable` with the reason, which is shown instead of a time.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from warpwave.operands import CachedOperands, Operands
from warpwave.problem import AttentionProblem


class PeerUnavailable(Exception):
    """The peer cannot run the problem here. The message gives the reason."""


class OperatorNames(TorchDispatchMode):
    """Records the names of all operators that run inside. torch has no public function for that."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Prepared:
    """A peer ready to be timed.

    Attributes:
        call: computes the attention, in the peer's own layout.
        to_out: returns its result as a view in our layout of out.
        kernel: name of the operator or kernel that runs.
        eager: whether `call` is what a user would write, so that its host time is meaningful.
        config: the kernel's config as plain data, or None.
        timed_if_wrong: time it even if its result fails a gate. It is then marked and never the best peer.
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
    "dropout": lambda p: p.dropout_p != 0,
    "a paged cache": lambda p: p.page_size != 0,
    "a cache of 8-bit numbers": lambda p: p.dtype_kv is not None,
}


def refuse_features(problem: AttentionProblem, supported: Collection[str] = ()) -> None:
    """Raises `PeerUnavailable` if the problem has features that are not in `supported` (keys of FEATURES)."""
    refused = [name for name, asked in FEATURES.items() if name not in supported and asked(problem)]
    if refused:
        raise PeerUnavailable(f"not compared on {', '.join(refused)}")


def with_four_axes(x: Tensor) -> Tensor:
    """Returns a mask or a bias as (batch, head, query, key); axes that it lacks have size 1."""
    return x[(None,) * (4 - x.dim())]


def refuse_cpu(operands: Operands | CachedOperands) -> None:
    """Raises `PeerUnavailable` for CPU tensors."""
    if operands.q.device.type == "cpu":
        raise PeerUnavailable("it does not run on a CPU")


def require_installed(package: str, distribution: str) -> None:
    """Raises `PeerUnavailable` if a package is not installed; a broken package fails at its import."""
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        raise PeerUnavailable(f"{distribution} is not installed")
