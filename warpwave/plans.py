"""Plans: a call that is repeated is not checked, chosen or compiled again. One table serves all public calls.

A plan is `run(operands) -> (out, lse)`, a bound kernel; for a call with `out=` it is `run(operands, out)`. It may
depend on the arguments that are not tensors, and on the shapes, strides, dtypes, devices and 16-byte alignment of the
tensors; never on their contents.

Calls that differ only in their lengths, and in strides that depend on lengths, are of one class. Its `Planner` checks
and describes the first of them and keeps what does not depend on lengths, so that only a few numbers are computed for a
new length. Two look-ups find plans:

- `recall` compares layouts by torch's own guard, in one call into C++: 1.5 to 2.0 us on an H200's host
  (benchmarks/records/2026-11-22-h200-host-steps.log). It makes the plan of a new length of a known class;
- `plan_key` returns the layouts as a tuple, for calls that `recall` cannot compare.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from warpwave import autograd, dispatch
from warpwave.autograd import dispatch_modes, is_compiling, is_grad_enabled
from warpwave.checks.calls import describe_call, is_plain, resized
from warpwave.checks.out import check_apart, check_out
from warpwave.gpu import Gpu, current_gpu
from warpwave.operands import CachedOperands, QuantizedOperands
from warpwave.options import Options
from warpwave.problem import AttentionProblem
from warpwave.runtime.bounded import Bounded

log = logging.getLogger("warpwave")

Run = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
Check = Callable[..., bool]
# A plan and the check of its layouts; the check is None if `plan_key` finds the plan, and until the plan of a class is
# called again.
Known = tuple[Run, Check | None]
# (operands, longest sequences, out) -> the plan of a call of one class, or None if its sizes contradict each other.
MakePlan = Callable[[Any, tuple[int, ...], torch.Tensor | None], Run | None]

# Enough for a model's layers at many lengths.
MAX_PLANS = 1024
MOST_LAYOUTS = 4  # of tensors of the same shapes
UNALIGNED = 15  # bits of an address that are 0 at a multiple of 16

# Key -> plan and the check of its layouts. A key is that of `plan_key`, which needs no check, or a class with sizes.
_plans: Bounded[tuple[Any, ...], Known] = Bounded(MAX_PLANS)
# Options and present tensors -> classes; the same with the longest sequences -> the plan of the last call.
_classes: Bounded[tuple[Any, ...], tuple[Class, ...]] = Bounded(MAX_PLANS)
_last: Bounded[tuple[Any, ...], tuple[Check, Run]] = Bounded(MAX_PLANS)
_planning = threading.Lock()
_told: set[str] = set()
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
# Whether torch fills new memory. A plan allocates by the mode in which it was made.
is_deterministic = torch._C._get_deterministic_algorithms


def _forget_planning() -> None:
    """Replaces the lock in a forked process, in which the thread that holds it does not exist."""
    global _planning
    _planning = threading.Lock()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget_planning)


class Class(NamedTuple):
    """Calls that differ only in lengths and in strides that depend on lengths.

    Attributes:
        same: checks all other properties of their tensors.
        planner: makes their plans; a `Planner`.
        sized: indices of the tensors that differ in sizes and strides.
    """

    same: Check
    planner: MakePlan
    sized: Sequence[int]


def plan_key(operands: tuple[Any, ...], said: tuple[Any, ...], dispatched: bool = False) -> tuple[Any, ...] | None:
    """Returns the key of a plan: all that it may depend on. Returns None if a tensor is a subclass, whose dispatcher
    must see the call.

    Args:
        operands: the tensors, None where absent.
        said: all other arguments, and whatever else distinguishes the call.
        dispatched: whether torch's dispatcher has seen the call, and so handles subclasses and gradients.
    """
    grad = not dispatched and is_grad_enabled()
    key: list[Any] = [said, is_deterministic()]
    for t in operands:
        if t is None:
            key.append(None)
        elif not (type(t) is _Tensor or type(t) is _Parameter or dispatched) or not is_plain(t):
            return None
        else:
            key += (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & UNALIGNED, grad and t.requires_grad)
    return tuple(key)


def planned(key: tuple[Any, ...] | None, make: Callable[[], Run]) -> Run:
    """Returns the plan kept under a key, or makes one and keeps it. If there is no key, or it has no hash (for example
    a window given as a list), the plan is made and not kept."""
    run = find(key)
    if run is None:
        with _planning:
            run = find(key) or make()  # another thread may have been first
        if key is not None:
            with contextlib.suppress(TypeError):
                _plans.put(key, (run, None))
    return run


def find(key: tuple[Any, ...] | None) -> Run | None:
    """Returns the plan kept under a key, or None."""
    try:
        known = None if key is None else _plans.get(key)
    except TypeError:  # no hash
        return None
    return None if known is None else known[0]


def recall(
    operands: tuple[Any, ...], said: tuple[Any, ...], longest: tuple[int, ...] = (), out: torch.Tensor | None = None
) -> Run | None:
    """Returns the plan of a call whose class is known to `remember`. Returns None if there is none, for unusual
    arguments, and if the call is not eager.

    The plan of the last call with the same options is tried first, then those of its class. For a new length the plan
    is made.

    Args:
        longest: the longest sequences, if the caller passes them.
        out: the tensor that the caller passes for the output.
    """
    if is_compiling() or dispatch_modes() or forward_ad._current_level >= 0:
        return None  # torch's guard notices a transform by itself
    try:
        place, tensors = _place(operands, said)
        if out is not None:
            place, tensors = (place, "out"), (*tensors, out)
        bits = 0
        for tensor in tensors:
            if tensor.is_nested:  # torch's guard crashes on nested tensors
                return None
            bits |= tensor.data_ptr()
        if bits & UNALIGNED:
            return None
        last = _last.get((place, longest))
        if last is not None and last[0](*tensors):
            return last[1]
        for found in _classes.get(place) or ():
            if found.same(*tensors):
                break
        else:
            return None
    except (AttributeError, TypeError, RuntimeError):
        return None  # no tensor, no hash, or no memory: the checks of the call report it
    key = _sizes(found, tensors, longest)
    known = _plans.get(key)
    if known is None:
        with _planning:
            run = found.planner(operands, longest, out)
        if run is not None:
            _plans.put(key, (run, None))
        return run
    run, same = known
    if same is None:  # the second call of a length: a guard costs 8 us, and most lengths are called once
        same = _guard(tensor_guards(), *tensors)
        _plans.put(key, (run, same))
    _last.put((place, longest), (same, run))
    return run


def remember(
    operands: tuple[Any, ...],
    said: tuple[Any, ...],
    longest: tuple[int, ...],
    run: Run,
    planner: Callable[[], MakePlan] | None = None,
    out: torch.Tensor | None = None,
) -> None:
    """Keeps a plan for `recall`, unless `said` has no hash.

    Args:
        out: as `recall` takes it.
        planner: returns the planner of the call's class. If None, the class contains only this layout.
    """
    try:
        place, tensors = _place(operands, said)
        if out is not None:
            place, tensors = (place, "out"), (*tensors, out)
        if (same := guard(*tensors)) is None:
            return
        known = _classes.get(place) or ()
        found = next((each for each in known if each.same(*tensors)), None)
        if found is None:
            if planner is None:
                found = Class(same, lambda *_: None, ())
            else:
                lengths = _lengths(operands)
                if out is not None:
                    lengths.append(lengths[0])  # those of q
                sized = tuple([i for i, count in enumerate(lengths) if count])
                found = Class(_guard(tensor_guards(), *tensors, lengths=lengths), planner(), sized)
            _classes.put(place, (*known, found)[-MOST_LAYOUTS:])
        _plans.put(_sizes(found, tensors, longest), (run, same))
        _last.put((place, longest), (same, run))
    except TypeError:
        return


def _sizes(found: Class, tensors: Sequence[torch.Tensor], longest: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns the key of a plan among those of a class."""
    key: list[Any] = [found.planner, longest]
    for i in found.sized:
        key += tensors[i].shape
        key += tensors[i].stride()
    return tuple(key)


def _lengths(operands: tuple[Any, ...]) -> list[int]:
    """Returns the number of leading axes of each present tensor that differ within a class: batch and length of dense
    q, k and v, tokens of packed ones, and all axes of masks, biases, offsets and tables. It is 0 for pools of pages,
    and for every tensor of a call with factors of blocks. Factors of heads differ in the batch."""
    q, k, _, _, _, _, _, offsets_q, offsets_k, *more = operands
    factors = more if isinstance(operands, QuantizedOperands) else ()
    of_factors = [0 if t is None else max(0, t.dim() - 1) for t in factors]
    if max(of_factors, default=0) > 1:
        return [0 for t in operands if t is not None]
    in_pages = isinstance(operands, CachedOperands)
    keys = 0 if in_pages else k.dim() - 2
    offsets_k = None if offsets_k is offsets_q else offsets_k
    counts = [q.dim() - 2, keys, keys, 4, 4, 0, 0, 1, 1, *((2, 1, 1, 0, 0) if in_pages else of_factors or (0,))]
    tensors = (*operands[:8], offsets_k, *more)
    return [count for count, t in zip(counts, tensors, strict=False) if t is not None]


def _place(operands: tuple[Any, ...], said: tuple[Any, ...]) -> tuple[tuple[Any, ...], Sequence[torch.Tensor]]:
    """Returns the place of a call in `_classes` (options, torch's modes, and which tensors are present), and its
    tensors. The common combinations are found without a loop.

    Tensors are compared with `is` alone: `== None` on a tensor costs 17 us. torch's guard accepts no tensor twice, and
    compares whether a tensor requires a gradient, but not whether grad mode is on.
    """
    q, k, v, mask, bias, slopes, sinks, offsets_q, offsets_k, *more = operands
    asked = (said, is_grad_enabled(), is_deterministic())
    if mask is bias is slopes is sinks is None:
        if not more:
            if offsets_q is None:
                return asked, (q, k, v)
            if offsets_q is offsets_k:
                return (asked, "shared offsets"), (q, k, v, offsets_q)
        elif offsets_q is None and operands.__class__ is CachedOperands:
            table, used, rows, k_descale, v_descale = more
            if k_descale is v_descale is None:
                if rows is None:
                    return (asked, "pages"), (q, k, v, table, used)
                return (asked, "rows of pages"), (q, k, v, table, used, rows)
    if offsets_k is offsets_q:
        operands = (q, k, v, mask, bias, slopes, sinks, offsets_q, *more)
    return (asked, *[t is not None for t in operands]), [t for t in operands if t is not None]


# Making plans ---------------------------------------------------------------------------------------------------------


class Planner:
    """Makes the plans of one class of dense or packed calls, or of a single call.

    Args:
        options: the options of the first call.
        kernel, config: the kernel and config that the calls name.
        dispatched: whether torch's dispatcher has seen the call and provides its gradients; otherwise plans do.
    """

    portable: Any = dispatch.flash_fwd  # the GPU kernel whose reasons are logged if no GPU kernel serves

    def __init__(self, options: Options, kernel: str, config: Any, dispatched: bool = False) -> None:
        self.options, self.kernel, self.config, self.dispatched = options, kernel, config, dispatched
        self.problem: AttentionProblem | None = None
        self.binders: dict[str, Any] = {}

    def describe(self, operands: Any, options: Options) -> AttentionProblem:
        """Checks a call in full and returns the problem it describes."""
        return describe_call(operands, options)

    def choose(self, problem: AttentionProblem, operands: Any) -> dispatch.Choice:
        """Returns the kernel and the config."""
        return dispatch.choose(problem, self.gpu, self.kernel, self.config)

    def first(self, operands: Any, out: torch.Tensor | None = None) -> Run:
        """Checks a call, and chooses, configures and compiles its kernel.

        Args:
            out: the tensor that the caller passes for the output.
        """
        self.problem, self.gpu = self.describe(operands, self.options), current_gpu(operands.q.device)
        return self._plan(self.problem, operands, (), out)

    def __call__(self, operands: Any, longest: tuple[int, ...], out: torch.Tensor | None = None) -> Run | None:
        """Returns the plan of a call of the class; None if its sizes contradict each other."""
        if self.problem is None:  # another planner made the first plan
            self.problem, self.gpu = self.describe(operands, self._of(longest)), current_gpu(operands.q.device)
        problem = resized(self.problem, operands, longest)
        return None if problem is None else self._plan(problem, operands, longest, out)

    def _of(self, longest: tuple[int, ...]) -> Options:
        return self.options._replace(max_seqlen_q=longest[0], max_seqlen_k=longest[1]) if longest else self.options

    def _plan(self, whole: AttentionProblem, operands: Any, longest: tuple[int, ...], out: torch.Tensor | None) -> Run:
        problem, gpu, kernel = whole, self.gpu, self.kernel
        if out is not None:
            check_out(out, operands, self.options.needs_grad, whole.dtype_of_out if whole.is_quantized else None)
        if whole.requires_grad:
            problem, _ = dispatch.forward_of(whole, gpu, kernel)
            if self.dispatched and not problem.requires_grad:  # the operator returns lse with every gradient
                problem = replace(problem, return_lse=True)
        choice = self.choose(problem, operands)
        if kernel == "auto" and not choice.kernel.NEEDS_GPU:
            tell_once(problem, gpu, choice.kernel.NAME, self.portable)
        run: Run
        keys = problem.total_k if problem.packed else problem.seqlen_k
        if operands.q.is_meta or 0 in (problem.rows, problem.batch, keys):
            run = partial(without_keys, problem)
        else:
            run = dispatch.bind(choice, problem, gpu, operands, self.binders, out)
        if out is not None:
            return storing(run)
        if self.dispatched or not whole.requires_grad:
            return run
        return autograd.Plan(run, whole, gpu, self._of(longest), kernel, operands)


# torch's guard --------------------------------------------------------------------------------------------------------


def guard(*tensors: torch.Tensor) -> Check | None:
    """Returns a function that compares the layouts of other tensors with these: dtype, device, sizes, strides, Python
    type, and whether a gradient is required.

    It is the C++ guard of torch.compile: comparing in Python would cost more than a launch. It does not notice every
    mode (fake tensors, make_fx), so `recall` checks for those first. Returns None if torch has no such guard, or if a
    tensor is not 16-byte aligned, because the guard does not compare alignment.
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


def _guard(kind: Any, *tensors: torch.Tensor, lengths: Sequence[int] = ()) -> Check:
    """Returns the check of torch's guard class `kind`.

    Args:
        lengths: number of leading axes of each tensor that may have any size; strides that depend on them may differ
            too.
    """
    sizes: list[list[int | None]] = [list(t.shape) for t in tensors]
    strides: list[list[int | None]] = [list(t.stride()) for t in tensors]
    for count, size, stride, tensor in zip(lengths, sizes, strides, tensors, strict=False):
        size[:count] = [None] * count
        for axis in _strided_by_length(tensor, count):
            stride[axis] = None
    same: Check = kind(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return same


def _strided_by_length(tensor: torch.Tensor, count: int) -> Sequence[int]:
    """Returns the axes whose strides depend on the sizes of the first `count` axes: the batch, and heads that lie
    outside of the tokens in memory, as in the caches of transformers."""
    if not count:
        return ()
    token = tensor.stride(count - 1)
    return [axis for axis in range(tensor.dim() - 1) if axis < count - 1 or tensor.stride(axis) > token]


@cache
def tensor_guards() -> Any:
    """Returns torch's guard class, or None if it is missing or does not distinguish all layouts. It is private to
    torch, so it is tested here on tensors that differ in one property each."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        with torch.inference_mode(False), torch.enable_grad():  # the first call may be in other modes
            x, y, z = (torch.zeros(2, 4, 2, 8, device="cpu") for _ in range(3))
            same = _guard(TensorGuards, x, y, z)
            others = [y[:1], y[:, :2], y.transpose(1, 2).contiguous().transpose(1, 2), y.half(), y.to("meta")]
            others += [torch._neg_view(y)]
            wanting = torch.zeros(2, 4, 2, 8, device="cpu", requires_grad=True)
            reliable = same(y, x, z) and not any(same(x, other, z) for other in (*others, wanting))
            of_class = _guard(TensorGuards, x, y, z, lengths=(2, 2, 2))
            longer, wider = torch.zeros(3, 5, 2, 8, device="cpu"), torch.zeros(3, 5, 2, 16, device="cpu")
            reliable = reliable and of_class(longer, x, z) and not of_class(wider, x, z)
    except Exception:  # another version of torch may raise anything; plans are then found by `plan_key` alone
        reliable = False
    return TensorGuards if reliable else None


# Calls without a GPU kernel -------------------------------------------------------------------------------------------


def tell_once(problem: AttentionProblem, gpu: Gpu, served_by: str, wanted: Any) -> None:
    """Logs why no GPU kernel serves a call, once for each reason.

    Args:
        served_by: name of the kernel that runs the call.
        wanted: the portable kernel whose reasons are given.
    """
    reason = "tensors on the CPU" if gpu.is_cpu else "; ".join(dispatch.why_not(wanted, problem, gpu))
    what = "attention on a cache" if problem.page_size else "attention"
    message = f"{what} is served by {served_by}, not {wanted.NAME}: {reason}"
    if message not in _told:
        _told.add(message)
        log.warning("%s", message)


def storing(run: Run) -> Run:
    """Returns the plan of a call with `out=`. Each call refuses an out that shares memory with an operand, because
    plans do not depend on addresses. It also marks out as changed for autograd, as torch's own functions do."""

    def run_into(operands: Any, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        check_apart(out, operands._asdict())
        results = run(operands, out)
        torch.autograd.graph.increment_version(out)
        return results

    return run_into


def without_keys(
    problem: AttentionProblem, operands: Any, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the result of a call without queries or keys, or on device "meta". Nothing is launched: no row sees a
    key, so out is 0 and lse is the sink's logit, or minus infinity."""
    q = operands.q
    dtype = getattr(torch, problem.dtype_of_out)
    out = q.new_zeros((*q.shape[:-1], problem.head_dim_v), dtype=dtype) if out is None else out.zero_()
    if not (problem.return_lse or problem.requires_grad):
        return out, None
    lse = q.new_full(lse_shape(problem.packed, q), float("-inf"), dtype=lse_dtype(q))
    if operands.sinks is not None:
        lse.copy_(operands.sinks.detach()[:, None].expand(lse.shape))
    return out, lse


def lse_dtype(q: torch.Tensor) -> torch.dtype:
    """Returns the dtype of the log-sum-exp: float32, or float64 for float64 inputs."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def lse_shape(packed: bool, q: torch.Tensor) -> tuple[int, ...]:
    """Returns (num_heads_q, total_q) for packed calls, else (batch, num_heads_q, seqlen_q)."""
    return (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
