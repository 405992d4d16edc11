"""Derivatives of attention for calls that bypass the operator, and for torch.func's transforms.

torch.library registers a gradient for the operator, but calling it takes ten times as long as a thin
`torch.autograd.Function`, which eager calls use instead. The plan of a call already holds what its backward needs, so
nothing is described or chosen twice. A backward under a mode, a tracer or another derivative goes through the operator
`warpwave::attention_backward`.

Only first derivatives in reverse mode are supported; others raise an error that states this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from warpwave import dispatch
from warpwave.errors import UnsupportedProblem
from warpwave.gpu import Gpu
from warpwave.operands import DIFFERENTIABLE, NUM_COMMON, AnyOperands, DropoutOperands, Operands, differentiable
from warpwave.options import Options
from warpwave.problem import AttentionProblem
from warpwave.runtime.bounded import Bounded

Run = Callable[[AnyOperands], tuple[torch.Tensor, torch.Tensor | None]]
PLACES = tuple(map(Operands._fields.index, DIFFERENTIABLE))  # among the operands
MAX_LAYOUTS = 8  # of saved tensors, for which a plan keeps bound gradients
# Of the operators' arguments: the tensors of `schema_tensors`, and then the options.
NUM_TENSORS, NUM_OPTIONS = len(DropoutOperands._fields) + 1, len(Options._fields)

is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
dispatch_modes, transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
is_batched = torch._C._functorch.is_legacy_batchedtensor
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter


def is_eager() -> bool:
    """Returns whether a call can run its kernel directly: no tracing, no mode, no transform, no tangents."""
    return not (is_compiling() or dispatch_modes() or forward_ad._current_level >= 0 or transforms() is not None)


# The kernel of the gradients ------------------------------------------------------------------------------------------


@functools.lru_cache(4096)
def module_of(problem: AttentionProblem, gpu: Gpu, kernel: str = "auto") -> Any:
    """Returns the kernel of a call with gradients. It is cached, because choosing takes milliseconds."""
    return dispatch.choose(problem, gpu, kernel).kernel


Gradients = Sequence[torch.Tensor | None]
Compute = Callable[[AnyOperands, Any, torch.Tensor, torch.Tensor | None], Gradients]


def bind_gradients(
    problem: AttentionProblem, gpu: Gpu, operands: AnyOperands, wanted: Sequence[bool], kernel: str
) -> Compute:
    """Returns `compute(operands, (out, lse), dout, dlse)`, the gradients of sum(out * dout) + sum(lse * dlse) by the
    `DIFFERENTIABLE` operands, None where not wanted.

    Args:
        problem: of the call, with gradients.
        operands: tensors of the layout that `compute` takes.
        kernel: of the forward, as the caller named it. out and lse are its results; None where it keeps none.
    """
    if operands.q.is_meta:  # the offsets of packed sequences have no contents
        return functools.partial(_without_contents, wanted)
    names = {name for name, want in zip(DIFFERENTIABLE, wanted, strict=True) if want}
    for module in dispatch.gradient_kernels(problem, gpu, kernel):
        if names <= set(module.GRADIENTS):
            forward = replace(problem, requires_grad=False, return_lse=True)
            bound: Compute = module.bind(forward, gpu, operands, wanted, module.default(forward, gpu))
            return bound
    own = module_of(problem, gpu, kernel)

    def compute(operands: AnyOperands, results: Any, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
        eager = dispatch.eager
        config = eager.configs(problem, gpu)[0]
        if own.NAME != eager.NAME:
            # eager's gradients compute P and delta from lse and out, which must come from the same products as its
            # scores. Otherwise terms that should cancel leave the other kernel's rounding error times the values.
            results = eager.forward(problem, operands, config)
        out, lse = results
        assert out is not None and lse is not None
        return eager.backward(problem, operands, config, out, lse, dout, dlse, wanted)

    return compute


def _without_contents(wanted: Sequence[bool], operands: AnyOperands, *_: Any) -> Gradients:
    """Returns the gradients of a call on device "meta"."""
    return [t.new_empty(t.shape) if want else None for t, want in zip(differentiable(operands), wanted, strict=True)]


def absent(like: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor in place of None, because an operator's results cannot be optional."""
    return like.new_empty((0,), dtype=torch.float32)


# Eager calls ----------------------------------------------------------------------------------------------------------


class Plan:
    """The run of an eager call with gradients, and what its backward needs."""

    def __init__(
        self, run: Run, problem: AttentionProblem, gpu: Gpu, options: Options, kernel: str, operands: AnyOperands
    ) -> None:
        self.run, self.problem, self.gpu, self.options, self.kernel = run, problem, gpu, options, kernel
        self.kind = type(operands)
        # Absent operands after the last present one are not passed through torch, which checks each argument.
        self.count = max(i for i, t in enumerate(operands) if t is not None) + 1
        self.absent = (None,) * (len(operands) - self.count)
        if dispatch.gradient_kernels(problem, gpu, kernel):
            self.keeps_results = dispatch.reads_results(problem, gpu, kernel)
        else:  # eager's gradients read the results of eager alone
            self.keeps_results = module_of(problem, gpu, kernel).NAME == dispatch.eager.NAME
        self.bound: Bounded[tuple[Any, ...], Compute] = Bounded(MAX_LAYOUTS)
        self.apply = _apply_both if options.return_lse else _apply_out

    def __call__(self, operands: AnyOperands) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns (out, lse), differentiable; lse is None unless the call returns it."""
        returned = self.apply(self, *operands[: self.count])
        return returned if self.options.return_lse else (returned, None)

    def forward(self, ctx: Any, tensors: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the call and saves what its backward needs."""
        results = self.run(tuple.__new__(self.kind, tensors + self.absent))
        ctx.plan = self
        if self.keeps_results:
            ctx.save_for_backward(*tensors, *results)
        else:
            ctx.save_for_backward(*tensors)
        return results

    def backward(self, ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        """Returns the gradients of (plan, *operands), as a `torch.autograd.Function` must."""
        saved, count = ctx.saved_tensors, self.count
        operands: Any = tuple.__new__(self.kind, saved[:count] + self.absent)
        results = saved[count:] or (None, None)
        needs = ctx.needs_input_grad[1:] + self.absent
        wanted = [bool(needs[i]) for i in PLACES]
        q, v = operands[0], operands[2]
        if dout is None:
            if dlse is None:
                return (None,) * (1 + count)
            dout = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        if is_grad_enabled() or not is_eager() or not _are_plain((dout, dlse, *saved)):
            out, lse = (absent(q) if t is None else t for t in results)
            tensors = schema_tensors(operands)
            found: Sequence[Any] = operator_gradients(dout, dlse, out, lse, wanted, tensors, self.options, self.kernel)
        else:
            # Hooks on saved tensors may bring them back with other strides.
            layouts = [(t.stride(), t.data_ptr() & 15) for t in operands if t is not None]
            deterministic = self.options.must_repeat()
            key = (deterministic, *wanted, *layouts)
            compute = self.bound.get(key)
            if compute is None:
                problem = replace(self.problem, deterministic=deterministic)
                compute = bind_gradients(problem, self.gpu, operands, wanted, self.kernel)
                self.bound.put(key, compute)
            found = compute(operands, results, dout.resolve_neg(), None if dlse is None else dlse.resolve_neg())
        dq, dk, dv, dbias, dslopes, dsinks = found
        return (None, dq, dk, dv, None, dbias, dslopes, dsinks, None, None, None)[: 1 + count]


def _are_plain(tensors: Sequence[Any]) -> bool:
    """Returns whether the saved tensors and the incoming gradients are ordinary tensors: a hook or the next layer may
    return others, and `is_grads_batched` passes batches of gradients whose type is that of ordinary tensors."""
    for t in tensors:  # faster than `all` with a generator
        kind = type(t)
        if kind is _Tensor:
            if is_batched(t):
                return False
        elif t is not None and kind is not _Parameter:
            return False
    return True


# The names of the classes appear in torch's errors, profiles and `grad_fn`.


class WarpwaveAttention(torch.autograd.Function):
    """Computes only out, which takes 2 us less than two results."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Any) -> torch.Tensor:
        return plan.forward(ctx, tensors)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        plan: Plan = ctx.plan
        return plan.backward(ctx, grads[0], None)


class WarpwaveAttentionAndLse(torch.autograd.Function):
    """Computes out and lse."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        return plan.forward(ctx, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        plan: Plan = ctx.plan
        return plan.backward(ctx, *grads)


# `Function.apply` without its check for transforms: a plan is used only if none is active.
_apply_out = super(torch.autograd.Function, WarpwaveAttention).apply
_apply_both = super(torch.autograd.Function, WarpwaveAttentionAndLse).apply


# The operator, and transforms of it -----------------------------------------------------------------------------------


def schema_tensors(operands: AnyOperands, dropout_probability: Any = None) -> tuple[torch.Tensor | None, ...]:
    """Returns the tensors of a call as the operators' schemas take them.

    Args:
        dropout_probability: from `changing_probability`.
    """
    return (*operands[:NUM_COMMON], operands.dropout_seed, dropout_probability)


def changing_probability(dropout_p: Any) -> torch.Tensor | None:
    """Returns the probability of dropout as a tensor if torch.compile has made it an input of the graph, else None.

    A number in an operator's schema is a constant of the graph, so each value would be compiled anew. The product of
    the number and a tensor is not a constant: torch makes it a tensor on the host.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if not dropout_p or statically_known_true(dropout_p > 0):  # a symbol is not known
        return None
    return torch.ones((), dtype=torch.float64, device="cpu") * dropout_p


def operator_gradients(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    wanted: Sequence[bool],
    tensors: Sequence[Any],
    options: Sequence[Any],
    kernel: str,
) -> list[torch.Tensor | None]:
    """Calls `warpwave::attention_backward` with the tensors of `schema_tensors`; unwanted gradients are None."""
    found = torch.ops.warpwave.attention_backward(dout, dlse, out, lse, list(wanted), *tensors, *options, kernel)
    return [grad if want else None for want, grad in zip(wanted, found, strict=True)]


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Saves what the operator's backward needs; it is the operator's `setup_context`."""
    ctx.save_for_backward(*inputs[:NUM_TENSORS], *output)
    ctx.options, ctx.kernel = inputs[NUM_TENSORS : NUM_TENSORS + NUM_OPTIONS], inputs[-2]
    ctx.set_materialize_grads(False)


def differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Returns the operator's gradients; it is the operator's `backward`."""
    return _differentiate(ctx, dout, dlse, operator_gradients)


def _differentiate(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, compute: Callable[..., Any]
) -> tuple[torch.Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    results: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
    wanted = [ctx.needs_input_grad[i] for i in PLACES]
    if dout is None and dlse is None:
        return tuple(results)
    if dout is None:
        dout = torch.zeros_like(out)
    grads = compute(dout, dlse, out, lse, wanted, tensors, ctx.options, ctx.kernel)
    for i, want, grad in zip(PLACES, wanted, grads, strict=True):
        results[i] = grad if want else None
    return tuple(results)


def no_second_derivative(ctx: Any, *grads: Any) -> None:
    """Raises RuntimeError; it is the backward of the backward."""
    raise RuntimeError("warpwave.attention has first derivatives only; its gradient cannot be differentiated again")


def refuse_tangents(tensors: Sequence[Any]) -> None:
    """Raises UnsupportedProblem if a tensor carries a tangent, which would otherwise be lost silently."""
    if has_tangents(tensors):
        no_forward_mode()


def refuse_transforms(tensors: Sequence[Any]) -> None:
    """Raises UnsupportedProblem if torch.func would differentiate the operator: torch.library wraps it in a Function
    that no transform accepts."""
    if transforms() is None or not is_grad_enabled():
        return
    if any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        raise UnsupportedProblem(
            "the operator warpwave::attention, which torch.compile calls, has no gradients by torch.func",
            {},
            "torch.func.grad outside of the compiled function, or backward() in it",
        )


def has_tangents(tensors: Sequence[Any]) -> bool:
    """Returns whether a tensor carries a tangent and forward mode is not switched off."""
    if forward_ad._current_level < 0 or not torch._C._is_fwd_grad_enabled():
        return False
    return any(isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def no_forward_mode() -> None:
    """Raises UnsupportedProblem; it is the forward-mode derivative."""
    raise UnsupportedProblem(
        "attention has no forward-mode derivatives (torch.func.jvp, jacfwd and hessian; torch.autograd.forward_ad)",
        {},
        "reverse mode: backward(), torch.func.grad, vjp and jacrev",
    )


def is_transformed() -> bool:
    """Returns whether a differentiating transform of torch.func is active, which the Functions of eager calls do not
    support."""
    kinds = torch._C._functorch.TransformType
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(interpreter.key() == kinds.Grad for interpreter in stack)


class _Transformed(torch.autograd.Function):
    """The operator as a Function that torch.func's transforms accept. They refuse torch.library's own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.ops.warpwave.attention(*inputs)
        return out, lse

    setup_context = staticmethod(save)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        dout, dlse = grads
        return _differentiate(ctx, dout, dlse, _transformed_gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        no_forward_mode()


class _TransformedGradients(torch.autograd.Function):
    """The backward of `_Transformed`, which has no derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
        dout, dlse, out, lse, wanted, *rest = inputs
        return tuple(torch.ops.warpwave.attention_backward(dout, dlse, out, lse, list(wanted), *rest))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = staticmethod(no_second_derivative)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        no_forward_mode()


def _transformed_gradients(
    dout: Any, dlse: Any, out: Any, lse: Any, wanted: Sequence[bool], tensors: Any, options: Any, kernel: str
) -> Any:
    return _TransformedGradients.apply(dout, dlse, out, lse, tuple(wanted), *tensors, *options, kernel)


transformed = _Transformed.apply  # the operator's inputs -> (out, lse)
