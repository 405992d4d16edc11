"""The torch operators `warpwave::attention` and `warpwave::attention_backward`, and the plans behind them.

torch.compile, export and opcheck see one node with a schema, a fake and a gradient. A call that needs none of that
(eager, no gradient, no tensor subclass, no mode) by-passes torch's dispatcher and goes straight to `attend`, which
looks up what it did the last time the same call was made: nothing is checked or chosen twice.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from warpwave import dispatch, guards
from warpwave.checks import Options, describe_call
from warpwave.errors import InvalidType
from warpwave.hardware.gpu import Gpu, current_gpu
from warpwave.kernels import eager, flash_fwd
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
        elif not (type(t) is _Tensor or type(t) is _Parameter or dispatched):
            return None
        else:
            key += (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15, grad and t.requires_grad)
    return tuple(key)


def find_plan(key: tuple[Any, ...]) -> Run | None:
    """The plan kept under a key."""
    return _plans.get(key)


def is_eager() -> bool:
    """Whether nothing stands between a call and its kernel: no tracing, no mode, no transform."""
    return not (is_compiling() or dispatch_modes() or transforms() is not None)


is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
dispatch_modes, transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack


def recall(operands: tuple[Any, ...], said: tuple[Any, ...]) -> Run | None:
    """The plan of a call that was `remember`ed: `plan_key` and `find_plan` at a fraction of their cost. None where
    there is none, for anything unusual, and where the call is not eager.

    First the plan of the last call that said the same is tried, then those for tensors of these shapes.
    """
    if is_compiling() or dispatch_modes():  # a transform torch's guard notices by itself
        return None
    try:
        place, tensors = _place(operands, said)
        same, run = _last[place]
        if not same(*tensors):
            same, run = _elsewhere(place, tensors)
            _last[place] = (same, run)
        bits = 0
        for tensor in tensors:
            bits |= tensor.data_ptr()
        return None if bits & guards.UNALIGNED else run
    except (AttributeError, KeyError, TypeError):  # no plan, no tensor, or no hash: whoever checks the call says so
        return None


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
        run = _plan(operands, options, kernel, config)
        if options.needs_grad and not dispatched:
            run = _with_gradients(run, options, kernel)
        while len(_plans) >= MAX_PLANS:
            del _plans[next(iter(_plans))]
        _plans[key] = run
    return run


def _plan(operands: Operands, options: Options, kernel: str, config: Any) -> Run:
    problem = describe_call(operands, options)
    device = operands.q.device
    gpu = current_gpu(device)
    problem, _ = dispatch.forward_of(problem, gpu, kernel)
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

_library = torch.library.Library("warpwave", "DEF")
_library.define(f"attention({_TENSORS}, {_OPTIONS}, str kernel, str config) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] wanted, {_TENSORS}, {_OPTIONS}, "
    "str kernel='auto') -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _attention(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    operands, options = _split(arguments)
    kernel, config = arguments[-2:]
    out, lse = attend(operands, options, kernel, _decode_config(kernel, config))
    return out, _absent(operands.q) if lse is None else lse


def _attention_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    operands, options = _split(arguments)
    describe_call(operands, options)
    q = operands.q
    out = q.new_empty((*q.shape[:-1], operands.v.shape[-1]))
    if not (options.return_lse or options.needs_grad):
        return out, _absent(q)
    return out, q.new_empty(lse_shape(operands.cu_seqlens_q is not None, q), dtype=torch.float32)


@functools.lru_cache(MAX_PLANS)
def _chosen(problem: AttentionProblem, gpu: Gpu, kernel: str = "auto") -> Any:
    """The kernel of a call with gradients: to choose and configure one takes milliseconds, in every step anew."""
    return dispatch.choose(problem, gpu, kernel).kernel


def _attention_backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, wanted: list[bool], *rest: Any
) -> tuple[torch.Tensor, ...]:
    operands, options = _split(rest)
    problem, gpu = describe_call(operands, options), current_gpu(out.device)
    # torch leaves a last argument out that is its default, as graphs do that were kept from before there was one.
    module = _chosen(problem, gpu, *rest[_NUM_TENSORS + _NUM_OPTIONS :])
    grads: Sequence[torch.Tensor | None]
    if hasattr(module, "gradients") and not module.gradients_why_not(problem, gpu):
        grads = module.gradients(problem, gpu, operands, dout, dlse, wanted)
    else:
        config = eager.configs(problem, gpu)[0]
        if module is not eager:
            # Its gradients take P and delta from lse and out. These must come from the very products that its scores
            # do, or what should cancel leaves the other kernel's rounding, times the values.
            out, lse = eager.forward(problem, operands, config)
        grads = eager.backward(problem, operands, config, out, lse, dout, dlse, wanted)
    return tuple(_absent(out) if g is None else g for g in grads)


def _attention_backward_fake(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, wanted: list[bool], *rest: Any
) -> tuple[torch.Tensor, ...]:
    operands, _ = _split(rest)
    sources = (*operands[:3], *operands[4:7])
    return tuple(t.new_empty(t.shape) if want else _absent(out) for t, want in zip(sources, wanted, strict=True))


def _split(arguments: tuple[Any, ...]) -> tuple[Operands, Options]:
    return Operands(*arguments[:_NUM_TENSORS]), Options(*arguments[_NUM_TENSORS : _NUM_TENSORS + _NUM_OPTIONS])


def _absent(like: torch.Tensor) -> torch.Tensor:
    """Stands for None: an operator's results cannot be optional."""
    return like.new_empty((0,), dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _save(ctx, inputs[:_NUM_TENSORS], output, inputs[_NUM_TENSORS : _NUM_TENSORS + _NUM_OPTIONS], inputs[-2])


def _save(ctx: Any, tensors: tuple[Any, ...], output: Any, options: tuple[Any, ...], kernel: str) -> None:
    ctx.save_for_backward(*tensors, *output)
    ctx.options, ctx.kernel = options, kernel
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    results: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
    differentiable = (0, 1, 2, 4, 5, 6)  # q k v bias alibi_slopes sinks
    wanted = [ctx.needs_input_grad[i] for i in differentiable]
    if dout is None and dlse is None:
        return tuple(results)
    if dout is None:
        dout = torch.zeros_like(out)
    grads = torch.ops.warpwave.attention_backward(dout, dlse, out, lse, wanted, *tensors, *ctx.options, ctx.kernel)
    for i, want, grad in zip(differentiable, wanted, grads, strict=True):
        results[i] = grad if want else None
    return tuple(results)


class _Attention(torch.autograd.Function):
    """The operator's gradient for eager calls, which by-pass the operator: that takes torch ten times as long."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the tensors of a call, its plan, options and kernel: (out, lse or a stand-in)."""
        *tensors, run, options, kernel = arguments
        out, lse = run(tuple.__new__(Operands, tensors))
        lse = _absent(out) if lse is None else lse
        _save(ctx, tuple(tensors), (out, lse), options, kernel)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        """As the operator's."""
        return _differentiate(ctx, *grads)


# What `Function.apply` comes to where no transform is active, which whoever takes a plan has made sure of.
_apply = super(torch.autograd.Function, _Attention).apply


def _with_gradients(run: Run, options: Options, kernel: str) -> Run:
    return lambda operands: _apply(*operands, run, options, kernel)


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise RuntimeError("warpwave.attention has first derivatives only; its gradient cannot be differentiated again")


for _key in ("CPU", "CUDA"):
    _library.impl("attention", _attention, _key)
    _library.impl("attention_backward", _attention_backward, _key)
torch.library.register_fake("warpwave::attention", _attention_fake, lib=_library)
torch.library.register_fake("warpwave::attention_backward", _attention_backward_fake, lib=_library)
torch.library.register_autograd("warpwave::attention", _differentiate, setup_context=_save_for_backward, lib=_library)
torch.library.register_autograd("warpwave::attention_backward", _no_second_derivative, lib=_library)
