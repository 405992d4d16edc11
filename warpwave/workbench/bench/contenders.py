"""The contenders: warpwave's kernels through the public call, the peers, and the empty kernel as a yardstick."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from warpwave import (
    CacheLayer,
    InvalidInput,
    InvalidType,
    UnsupportedProblem,
    attention,
    attention_varlen,
    attention_with_kv_cache,
    explain,
)
from warpwave.gpu import current_gpu
from warpwave.operands import CachedOperands, Operands
from warpwave.problem import AttentionProblem
from warpwave.runtime.triton_or_stub import NO_TRITON, jit, tl
from warpwave.workbench.bench.inputs import call_arguments
from warpwave.workbench.bench.peers import PEERS, Peer, PeerUnavailable, Prepared
from warpwave.workbench.bench.records import OURS, YARDSTICK

EMPTY_KERNEL = YARDSTICK + "empty_kernel"


class TimeLimit(BaseException):
    """Preparation took too long. It is not an `Exception`, because a library might catch that while compiling."""


def contenders(kernels: Sequence[str], peers: Sequence[str]) -> dict[str, Peer]:
    """Returns warpwave's kernels and the named peers, in that order, by their names in tables and records."""
    return {OURS + kernel: partial(ours, kernel) for kernel in kernels} | {name: PEERS[name] for name in peers}


def ours(kernel: str, problem: AttentionProblem, operands: Operands | CachedOperands) -> Prepared:
    """Returns warpwave's own contender: the public call, as a user writes it."""
    options = {"kernel": kernel, **call_arguments(problem, operands)}
    function: Any
    tensors: tuple[Any, ...]
    if isinstance(operands, CachedOperands):
        function = attention_with_kv_cache
        o = operands
        tensors = (o.q, CacheLayer(o.k, o.v, o.page_table, o.seqused_k, o.k_descale, o.v_descale))
    else:
        function, tensors = attention_varlen if problem.packed else attention, operands[:3]
    # Without return_lse the public call returns a tensor, which its annotation does not show.
    call = cast(Callable[[], Tensor], partial(function, *tensors, **options))
    try:
        call()
        if problem.page_size:
            explanation = explain(problem, kernel=kernel, gpu=current_gpu(operands.q.device))
        else:
            explanation = explain(*tensors, **options)
    except UnsupportedProblem as error:
        raise PeerUnavailable("; ".join(error.reasons.get(kernel, [])) or str(error)) from error
    except (InvalidType, InvalidInput) as error:  # a GPU kernel with CPU tensors, or one without paged caches
        raise PeerUnavailable(f"{type(error).__name__}: {error}") from error
    return Prepared(
        call,
        to_out=lambda out: out,
        kernel=explanation.kernel or "",
        eager=True,
        config=dataclasses.asdict(explanation.config),
    )


def empty_kernel(device: torch.device) -> Callable[[], object]:
    """Returns a launch of a Triton kernel that does nothing: a lower bound of the time of any call.

    Raises:
        PeerUnavailable: there is no GPU, or no Triton.
    """
    if device.type == "cpu":
        raise PeerUnavailable("there is nothing to launch on a CPU")
    if NO_TRITON is not None:
        raise PeerUnavailable(NO_TRITON)
    word = torch.zeros(1, dtype=torch.int32, device=device)  # its device is the device of the launch
    return lambda: _does_nothing[(1,)](word)


@jit
def _does_nothing(word_ptr: tl.tensor) -> None:
    pass


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raises `TimeLimit` if the block runs longer than `seconds`; unlimited outside the main thread and on Windows.

    Python handles the signal between bytecodes: a single call into compiled code is not interrupted, a tuner's loop is.
    """
    import signal
    import threading

    usable = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if seconds is None or not usable:
        yield
        return

    def expired(*_: Any) -> NoReturn:
        raise TimeLimit

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
