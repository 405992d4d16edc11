"""Plans: a call that was made before is not checked, chosen or compiled again. One table serves every door.

A plan is `run(operands) -> (out, lse)`, a bound kernel. It may rely on what the caller said, and on the shapes,
strides, dtypes, devices and 16-byte alignment of the tensors; never on their contents. Two look-ups find it:

- `recall` compares layouts by torch's own guard, in one call into C++: 1.5 to 2.0 us on an H200's host
  (benchmarks/records/2026-11-22-h200-host-steps.log);
- `plan_key` spells the layouts out as a tuple, for the first call after `recall` has missed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch.autograd import forward_ad

from warpwave.autograd import dispatch_modes, is_compiling, is_grad_enabled
from warpwave.checks import is_plain
from warpwave.gpu import Gpu
from warpwave.problem import AttentionProblem
from warpwave.runtime.bounded import Bounded

log = logging.getLogger("warpwave")

Run = Callable[[Any], tuple[torch.Tensor, torch.Tensor | None]]
Check = Callable[..., bool]

# Enough for a model's layers at many lengths.
MAX_PLANS = 1024
MOST_LAYOUTS = 4  # of tensors of the same shapes
UNALIGNED = 15  # bits of an address that are 0 at a multiple of 16

_plans: Bounded[tuple[Any, ...], Run] = Bounded(MAX_PLANS)
# (what was said and which tensors were given, shapes of q and k) -> plans, each with the check of its layouts; and of
# what was said and given, the last of them that ran.
_recent: Bounded[tuple[Any, ...], tuple[tuple[Check, Run], ...]] = Bounded(MAX_PLANS)
_last: Bounded[tuple[Any, ...], tuple[Check, Run]] = Bounded(MAX_PLANS)
_planning = threading.Lock()
_told: set[str] = set()
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter


def plan_key(operands: tuple[Any, ...], said: tuple[Any, ...], dispatched: bool = False) -> tuple[Any, ...] | None:
    """Returns what a plan may rely on, or None where a tensor is a subclass, whose dispatcher must see the call.

    Args:
        operands: the tensors, None where absent.
        said: all other arguments, and whatever else distinguishes the call.
        dispatched: whether torch's dispatcher has seen the call, so that subclasses and gradients are its affair.
    """
    grad = not dispatched and is_grad_enabled()
    key: list[Any] = [said]
    for t in operands:
        if t is None:
            key.append(None)
        elif not (type(t) is _Tensor or type(t) is _Parameter or dispatched) or not is_plain(t):
            return None
        else:
            key += (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & UNALIGNED, grad and t.requires_grad)
    return tuple(key)


def planned(key: tuple[Any, ...] | None, make: Callable[[], Run]) -> Run:
    """Returns the plan kept under a key, or makes one and keeps it. Without a key, or with one that has no hash (a
    window given as a list, say), a plan is made and not kept."""
    run = find(key)
    if run is None:
        with _planning:
            run = find(key) or make()  # another thread may have been first
        if key is not None:
            with contextlib.suppress(TypeError):
                _plans.put(key, run)
    return run


def find(key: tuple[Any, ...] | None) -> Run | None:
    """Returns the plan kept under a key, or None."""
    try:
        return None if key is None else _plans.get(key)
    except TypeError:  # no hash
        return None


def recall(operands: tuple[Any, ...], said: tuple[Any, ...]) -> Run | None:
    """Returns the plan of a call that was `remember`ed. None where there is none, for anything unusual, and where the
    call is not eager.

    The plan of the last call that said the same is tried first, then those of tensors of these shapes.
    """
    if is_compiling() or dispatch_modes() or forward_ad._current_level >= 0:
        return None  # torch's guard notices a transform by itself
    try:
        place, tensors = _place(operands, said)
        bits = 0
        for tensor in tensors:
            if tensor.is_nested:  # torch's guard crashes on nested tensors
                return None
            bits |= tensor.data_ptr()
        found = _last.get(place)
        if found is None:
            return None
        if not found[0](*tensors):
            known = _recent.get((place, tensors[0].shape, tensors[1].shape)) or ()
            found = next((each for each in known if each[0](*tensors)), None)
            if found is None:
                return None
            _last.put(place, found)
        return None if bits & UNALIGNED else found[1]
    except (AttributeError, TypeError, RuntimeError):
        return None  # no tensor, no hash, or no memory: the checks of the call report it


def remember(operands: tuple[Any, ...], said: tuple[Any, ...], run: Run) -> None:
    """Lets `recall` find a plan, unless what was said has no hash."""
    try:
        place, tensors = _place(operands, said)
        if (same := guard(*tensors)) is None:
            return
        at = (place, tensors[0].shape, tensors[1].shape)
        _recent.put(at, (*(_recent.get(at) or ()), (same, run))[-MOST_LAYOUTS:])
        _last.put(place, (same, run))
    except TypeError:
        return


def _place(operands: tuple[Any, ...], said: tuple[Any, ...]) -> tuple[tuple[Any, ...], Sequence[torch.Tensor]]:
    """Returns what was said, with whether gradients are on and which tensors were given; and the tensors. Those that
    most calls have are found without a loop.

    Tensors are compared with `is` alone: `== None` on a tensor costs 17 us. torch's guard takes no tensor twice, and
    reads whether a tensor requires a gradient, not whether gradients are on.
    """
    q, k, v, mask, bias, slopes, sinks, offsets_q, offsets_k, *paging = operands
    asked = (said, is_grad_enabled())
    if mask is bias is slopes is sinks is None:
        if not paging:
            if offsets_q is None:
                return asked, (q, k, v)
            if offsets_q is offsets_k:
                return (asked, "shared offsets"), (q, k, v, offsets_q)
        elif offsets_q is None:
            table, used, rows = paging
            if rows is None:
                return (asked, "pages"), (q, k, v, table, used)
            return (asked, "rows of pages"), (q, k, v, table, used, rows)
    if offsets_k is offsets_q:
        operands = (q, k, v, mask, bias, slopes, sinks, offsets_q, *paging)
    return (asked, *[t is not None for t in operands]), [t for t in operands if t is not None]


# torch's guard --------------------------------------------------------------------------------------------------------


def guard(*tensors: torch.Tensor) -> Check | None:
    """Returns a function that compares the layouts of as many other tensors with these: dtype, device, sizes, strides,
    Python type, and whether a gradient is required.

    It is the guard that torch.compile uses, in C++: reading these through Python costs more than a launch. It does not
    notice every mode (fake tensors, make_fx); `recall` looks for those first. None where torch has no such guard, or
    where one of the tensors is not 16-byte aligned, for then alignment would have to be compared as well.
    """
    kind = tensor_guards()
    if kind is None or not aligned(tensors):
        return None
    return _guard(kind, *tensors)


def aligned(tensors: Iterable[torch.Tensor]) -> bool:
    """Returns whether all tensors begin at a multiple of 16 bytes."""
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return not bits & UNALIGNED


def _guard(kind: Any, *tensors: torch.Tensor) -> Check:
    sizes = [list(t.shape) for t in tensors]
    strides = [list(t.stride()) for t in tensors]
    same: Check = kind(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return same


@cache
def tensor_guards() -> Any:
    """Returns torch's guard class, None where it is missing or fails to tell some layouts apart. It is private to
    torch, so it is tried on tensors that differ in one thing each."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        with torch.inference_mode(False), torch.enable_grad():  # where the first call may not be
            x, y, z = (torch.zeros(2, 4, 2, 8, device="cpu") for _ in range(3))
            same = _guard(TensorGuards, x, y, z)
            others = [y[:1], y[:, :2], y.transpose(1, 2).contiguous().transpose(1, 2), y.half(), y.to("meta")]
            others += [torch._neg_view(y)]
            wanting = torch.zeros(2, 4, 2, 8, device="cpu", requires_grad=True)
            reliable = same(y, x, z) and not any(same(x, other, z) for other in (*others, wanting))
    except Exception:  # another version of torch may raise anything; plans are then found by `plan_key` alone
        reliable = False
    return TensorGuards if reliable else None


# Calls without a GPU kernel -------------------------------------------------------------------------------------------


def tell_once(problem: AttentionProblem, gpu: Gpu, served_by: str, wanted: Any) -> None:
    """Logs that no GPU kernel serves, and why: once for CPU tensors, once for each reason on a GPU.

    Args:
        served_by: name of the kernel that runs the call.
        wanted: the portable kernel whose reasons are given.
    """
    reason = "tensors on the CPU" if gpu.is_cpu else "; ".join(wanted.why_not(problem, gpu))
    what = "attention on a cache" if problem.page_size else "attention"
    message = f"{what} is served by {served_by}, not {wanted.NAME}: {reason}"
    if message not in _told:
        _told.add(message)
        log.warning("%s", message)


def without_keys(problem: AttentionProblem, operands: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the result of a call without queries or keys. Nothing is launched: rows see nothing, so out is 0 and lse
    is the sink's logit, or minus infinity."""
    q = operands.q
    out = q.new_zeros((*q.shape[:-1], problem.head_dim_v))
    if not (problem.return_lse or problem.requires_grad):
        return out, None
    lse = q.new_full(lse_shape(problem.packed, q), float("-inf"), dtype=torch.float32)
    if operands.sinks is not None:
        lse.copy_(operands.sinks.detach()[:, None].expand(lse.shape))
    return out, lse


def lse_shape(packed: bool, q: torch.Tensor) -> tuple[int, ...]:
    """Returns (num_heads_q, total_q) for packed calls, else (batch, num_heads_q, seqlen_q)."""
    return (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
