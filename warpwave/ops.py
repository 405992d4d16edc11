"""The torch operators `warpwave::attention` and `warpwave::attention_backward`, and the plans behind them.

torch.compile, export and opcheck see one node with a schema, a fake and a gradient. A call that needs none of that
(eager, no gradient, no tensor subclass, no mode) by-passes torch's dispatcher and goes straight to `attend`, which
looks up what it did the last time the same call was made: nothing is checked or chosen twice.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from warpwave import autograd as derivatives
from warpwave import dispatch, guards
from warpwave.autograd import absent, dispatch_modes, is_compiling, is_grad_enabled
from warpwave.checks import Options, describe_call, is_plain
from warpwave.errors import InvalidType
from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import flash_fwd
from warpwave.problem import AttentionProblem, Operands

log = logging.getLogger("warpwave")

Run = Callable[[Operands], tuple[torch.Tensor, torch.Tensor | None]]

# Enough for a model's layers at many lengths; beyond, the oldest goes, so memory stays flat however many shapes come.
MAX_PLANS = 4096
_plans: dict[tuple[Any, ...], Run] = {}
# (what was said and which tensors were given, shapes of q and k) -> plans, each with the check of its layouts; and of
# what was said and given, the last of them that ran.
_recent: dict[tuple[Any, ...], tuple[tuple[guards.Check, Run], ...]] = {}
_last: dict[tuple[Any, ...], tuple[guards.Check, Run]] = {}
MOST_LAYOUTS = 4  # of one shape
_planning = threading.Lock()
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_said: set[str] = set()


def attend(operands: Operands, options: Options, kernel: str, config: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs one call: the plan made for its like before, or a new one."""
    key = plan_key(operands, (options, kernel, config), dispatched=True)
    assert key is not None
    run = find_plan(key) or make_plan(key, operands, options, kernel, config, dispatched=True)
    return run(operands)


def plan_key(operands: tuple[Any, ...], said: tuple[Any, ...], dispatched: bool = False) -> tuple[Any, ...] | None:
    """What a plan may rely on: all that was said of the call, its tensors' layouts, their pointers as far as the
    compiler specialises on alignment, and which of them want gradients. None where torch's dispatcher must see the call
    and has not `dispatched` it: a tensor is a subclass."""
    grad = not dispatched and is_grad_enabled()
    key: list[Any] = [said]
    for t in operands:
        if t is None:
            key.append(None)
        elif not (type(t) is _Tensor or type(t) is _Parameter or dispatched) or not is_plain(t):
            return None
        else:
            key += (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15, grad and t.requires_grad)
    return tuple(key)


def find_plan(key: tuple[Any, ...]) -> Run | None:
    """The plan kept under a key."""
    return _plans.get(key)


def recall(operands: tuple[Any, ...], said: tuple[Any, ...]) -> Run | None:
    """The plan of a call that was `remember`ed: `plan_key` and `find_plan` at a fraction of their cost. None where
    there is none, for anything unusual, and where the call is not eager.

    First the plan of the last call that said the same is tried, then those for tensors of these shapes.
    """
    if is_compiling() or dispatch_modes() or forward_ad._current_level >= 0:
        return None  # a transform torch's guard notices by itself
    try:
        place, tensors = _place(operands, said)
        bits = 0
        for tensor in tensors:
            if tensor.is_nested:  # has no sizes, for want of which torch's guard ends the process
                return None
            bits |= tensor.data_ptr()
        same, run = _last[place]
        if not same(*tensors):
            same, run = _elsewhere(place, tensors)
            _last[place] = (same, run)
        return None if bits & guards.UNALIGNED else run
    except (AttributeError, KeyError, TypeError, RuntimeError):
        return None  # no plan, no tensor, no hash, or no memory: whoever checks the call says so


def _elsewhere(place: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> tuple[guards.Check, Run]:
    for same, run in _recent[place, tensors[0].shape, tensors[1].shape]:
        if same(*tensors):
            return same, run
    raise KeyError


def remember(operands: tuple[Any, ...], said: tuple[Any, ...], run: Run) -> None:
    """Lets `recall` find a plan."""
    place, tensors = _place(operands, said)
    if (same := guards.guard(*tensors)) is not None:
        if len(_recent) >= MAX_PLANS:
            _recent.clear()
            _last.clear()
        at = (place, tensors[0].shape, tensors[1].shape)
        _recent[at] = (*_recent.get(at, ()), (same, run))[-MOST_LAYOUTS:]
        _last[place] = (same, run)


def _place(operands: tuple[Any, ...], said: tuple[Any, ...]) -> tuple[tuple[Any, ...], Sequence[torch.Tensor]]:
    """What was said, whether gradients are on and which tensors were given, and the tensors; those that most calls have
    without a loop.

    No comparison may meet a tensor: asked whether it equals None it answers after 17 us. torch's guard takes no tensor
    twice, and asks a tensor whether it wants a gradient, not whether it would get one.
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


def make_plan(
    key: tuple[Any, ...], operands: Operands, options: Options, kernel: str, config: Any, dispatched: bool = False
) -> Run:
    """Checks the call, chooses and compiles its kernel, and keeps the plan under the key; with gradients, unless torch
    `dispatched` the call and sees to them."""
    with _planning:
        run = _plan(operands, options, kernel, config, dispatched)
        while len(_plans) >= MAX_PLANS:
            del _plans[next(iter(_plans))]
        _plans[key] = run
    return run


def _plan(operands: Operands, options: Options, kernel: str, config: Any, dispatched: bool) -> Run:
    whole = describe_call(operands, options)
    gpu = current_gpu(operands.q.device)
    problem, others = dispatch.forward_of(whole, gpu, kernel)
    if others and not dispatched:  # the operator returns lse beside every gradient; nobody else asks for it
        problem = dataclasses.replace(problem, return_lse=options.return_lse)
    run = _bind(problem, gpu, operands, kernel, config)
    if dispatched or not options.needs_grad:
        return run
    return derivatives.Plan(run, whole, gpu, options, kernel, operands)


def _bind(problem: AttentionProblem, gpu: Gpu, operands: Operands, kernel: str, config: Any) -> Run:
    choice = dispatch.choose(problem, gpu, kernel, config)
    if kernel == "auto" and not choice.kernel.NEEDS_GPU:
        _say_once(problem, gpu, choice.kernel.NAME)
    if problem.rows == 0 or problem.batch == 0 or (problem.total_k if problem.packed else problem.seqlen_k) == 0:
        return lambda operands: without_keys(problem, operands)
    return choice.kernel.bind(problem, operands, choice.config)


def _say_once(problem: AttentionProblem, gpu: Any, name: str) -> None:
    """That no GPU kernel serves, and why: once for CPU tensors, once for each reason on a GPU."""
    reason = "tensors on the CPU" if gpu.is_cpu else "; ".join(flash_fwd.why_not(problem, gpu))
    if reason not in _said:
        _said.add(reason)
        log.warning("attention is served by %s, not %s: %s", name, flash_fwd.NAME, reason)


def without_keys(problem: AttentionProblem, operands: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
    """No query or no key: nothing to launch. Rows see nothing, so out is 0 and lse is the sink, or minus infinity."""
    q = operands.q
    out = q.new_zeros((*q.shape[:-1], problem.head_dim_v))
    if not (problem.return_lse or problem.requires_grad):
        return out, None
    lse = q.new_full(lse_shape(problem.packed, q), float("-inf"), dtype=torch.float32)
    if operands.sinks is not None:
        lse.copy_(operands.sinks.detach()[:, None].expand(lse.shape))
    return out, lse


def lse_shape(packed: bool, q: torch.Tensor) -> tuple[int, ...]:
    """(num_heads_q, total_q) for packed calls, else (batch, num_heads_q, seqlen_q)."""
    return (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])


def encode_config(config: Any) -> str:
    """A config as the operator's schema carries it: JSON, empty for None.

    Raises:
        InvalidType: it is no config of any kernel.
    """
    if config is None:
        return ""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise InvalidType(f"config is a {type(config).__name__}; it must be a Config of the kernel named, or None")
    return json.dumps(dataclasses.asdict(config))


def _decode_config(kernel: str, config: str) -> Any:
    if not config:
        return None
    module = next(m for m in dispatch.KERNELS if m.NAME == kernel)
    return module.Config(**json.loads(config))


# The operators --------------------------------------------------------------------------------------------------------

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
)
_OPTIONS = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, str causal, SymInt window_left, SymInt window_right, float softcap, "
    "float? softmax_scale, str precision, bool return_lse, bool needs_grad"
)
_NUM_TENSORS, _NUM_OPTIONS = len(Operands._fields), len(Options._fields)


class _Library(torch.library.Library):
    """torch's, with gradients that refuse tangents: torch.library knows no forward mode, and would lose them."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: Any = "", **options: Any) -> Any:
        """As torch's."""
        if dispatch_key == "Autograd" and options.get("with_keyset"):
            fn = _refusing_tangents(fn)
        return super().impl(op_name, fn, dispatch_key, **options)


def _refusing_tangents(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def refusing(keyset: Any, *arguments: Any, **named: Any) -> Any:
        derivatives.refuse_tangents(arguments)
        return kernel(keyset, *arguments, **named)

    return refusing


_library = _Library("warpwave", "DEF")
_library.define(f"attention({_TENSORS}, {_OPTIONS}, str kernel_name, str config) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] wanted, {_TENSORS}, {_OPTIONS}, "
    "str kernel_name='auto') -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _attention(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    operands, options = _split(arguments)
    kernel, config = arguments[-2:]
    out, lse = attend(operands, options, kernel, _decode_config(kernel, config))
    return out, absent(operands.q) if lse is None else lse


def _attention_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    operands, options = _split(arguments)
    describe_call(operands, options)
    q = operands.q
    out = q.new_empty((*q.shape[:-1], operands.v.shape[-1]))
    if not (options.return_lse or options.needs_grad):
        return out, absent(q)
    return out, q.new_empty(lse_shape(operands.cu_seqlens_q is not None, q), dtype=torch.float32)


def _attention_backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, wanted: list[bool], *rest: Any
) -> tuple[torch.Tensor, ...]:
    operands, options = _split(rest)
    problem, gpu = describe_call(operands, options), current_gpu(out.device)
    # torch leaves a last argument out that is its default, as graphs do that were kept from before there was one.
    module = derivatives.module_of(problem, gpu, *rest[_NUM_TENSORS + _NUM_OPTIONS :])
    grads = derivatives.gradients(module, problem, gpu, operands, (out, lse), dout, dlse, wanted)
    return tuple(absent(out) if g is None else g for g in grads)


def _attention_backward_fake(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, wanted: list[bool], *rest: Any
) -> tuple[torch.Tensor, ...]:
    operands, _ = _split(rest)
    sources = (*operands[:3], *operands[4:7])
    return tuple(t.new_empty(t.shape) if want else absent(out) for t, want in zip(sources, wanted, strict=True))


def _split(arguments: tuple[Any, ...]) -> tuple[Operands, Options]:
    return Operands(*arguments[:_NUM_TENSORS]), Options(*arguments[_NUM_TENSORS : _NUM_TENSORS + _NUM_OPTIONS])


for _key in ("CPU", "CUDA"):
    _library.impl("attention", _attention, _key)
    _library.impl("attention_backward", _attention_backward, _key)
torch.library.register_fake("warpwave::attention", _attention_fake, lib=_library)
torch.library.register_fake("warpwave::attention_backward", _attention_backward_fake, lib=_library)
torch.library.register_autograd(
    "warpwave::attention", derivatives.differentiate, setup_context=derivatives.save, lib=_library
)
torch.library.register_autograd("warpwave::attention_backward", derivatives.no_second_derivative, lib=_library)
