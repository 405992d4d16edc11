"""The torch operators `warpwave::attention`, `quantized_attention`, those that store to a given out, and
`attention_backward`.

torch.compile, export and opcheck see one node with a schema, a fake implementation and a gradient. An eager call on
plain tensors needs no dispatcher: api.py runs its plan directly (plans.py).
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from warpwave import autograd, dispatch
from warpwave.autograd import NUM_OPTIONS, NUM_TENSORS, absent
from warpwave.checks.calls import describe_call
from warpwave.checks.out import check_out
from warpwave.errors import InvalidType
from warpwave.gpu import current_gpu
from warpwave.operands import AnyOperands, DropoutOperands, Operands, QuantizedOperands, differentiable
from warpwave.options import Options
from warpwave.plans import Planner, lse_dtype, lse_shape, plan_key, planned


def attend(
    operands: AnyOperands, options: Options, kernel: str, config: Any, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs a call that torch has dispatched, with a plan made for an equal earlier call or with a new one."""
    key = plan_key((*operands, out), (options, kernel, config), dispatched=True)
    run = planned(key, lambda: Planner(options, kernel, config, dispatched=True).first(operands, out))
    return run(operands) if out is None else run(operands, out)


def encode_config(config: Any) -> str:
    """Returns a config in the form of the operator's schema: a JSON object, empty for None. Dynamo cannot trace
    `json.dumps`.

    Raises:
        InvalidType: it is not a config of any kernel.
    """
    if config is None:
        return ""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise InvalidType(f"config is a {type(config).__name__}; it must be a Config of the kernel named, or None")
    values = [(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)]
    return "{" + ", ".join([f'"{name}": {_encode(value)}' for name, value in values]) + "}"


def _encode(value: int | bool | str) -> str:
    """Returns a value of a config as JSON."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(operator.index(value))  # Dynamo makes it a constant


def _decode_config(kernel: str, config: str) -> Any:
    if not config:
        return None
    module = next(m for m in dispatch.KERNELS if m.NAME == kernel)
    return module.Config(**json.loads(config))


Split = Callable[[tuple[Any, ...]], tuple[AnyOperands, Options]]


# The operators --------------------------------------------------------------------------------------------------------

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? dropout_seed, Tensor? dropout_probability"
)
_QUANTIZED_TENSORS = _TENSORS.replace(
    "Tensor? dropout_seed, Tensor? dropout_probability",
    "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, Tensor? out_descale",
)
_OPTIONS = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, str causal, SymInt window_left, SymInt window_right, float softcap, "
    "float? softmax_scale, str precision, bool return_lse, bool needs_grad, float dropout_p, bool? deterministic, "
    "str out_dtype"
)


class _Library(torch.library.Library):
    """torch's library class, with gradients that refuse tangents: torch.library has no forward mode and would lose
    them."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: Any = "", **options: Any) -> Any:
        """Registers a kernel, as torch's method does."""
        if dispatch_key == "Autograd" and options.get("with_keyset"):
            fn = _refusing_tangents(fn)
        return super().impl(op_name, fn, dispatch_key, **options)


def _refusing_tangents(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def refusing(keyset: Any, *arguments: Any, **named: Any) -> Any:
        autograd.refuse_tangents(arguments)
        autograd.refuse_transforms(arguments)
        return kernel(keyset, *arguments, **named)

    return refusing


_library = _Library("warpwave", "DEF")


def _attend(split: Split, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    operands, options = split(arguments)
    kernel, config = arguments[-2:]
    out, lse = attend(operands, options, kernel, _decode_config(kernel, config))
    return out, absent(operands.q) if lse is None else lse


def _store(split: Split, *arguments: Any) -> torch.Tensor:
    """Stores to the last argument, and returns the log-sum-exp."""
    operands, options = split(arguments)
    kernel, config, out = arguments[-3:]
    _, lse = attend(operands, options, kernel, _decode_config(kernel, config), out)
    return absent(operands.q) if lse is None else lse


def _attend_fake(split: Split, *arguments: Any, given: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns results without contents, and checks the caller's out if one is given."""
    operands, options = split(arguments)
    problem = describe_call(operands, options)
    if given is not None:
        check_out(given, operands, options.needs_grad, problem.dtype_of_out if problem.is_quantized else None)
    q = operands.q
    out = q.new_empty((*q.shape[:-1], operands.v.shape[-1]), dtype=getattr(torch, problem.dtype_of_out))
    if not (options.return_lse or options.needs_grad):
        return out, absent(q)
    return out, q.new_empty(lse_shape(operands.cu_seqlens_q is not None, q), dtype=lse_dtype(q))


def _store_fake(split: Split, *arguments: Any) -> torch.Tensor:
    return _attend_fake(split, *arguments, given=arguments[-1])[1]


def _attention_backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, wanted: list[bool], *rest: Any
) -> tuple[torch.Tensor, ...]:
    operands, options = _split(rest)
    # torch omits a last argument that equals its default, and older saved graphs do not have this one.
    kernel = "auto" if len(rest) == NUM_TENSORS + NUM_OPTIONS else rest[-1]
    said = ("gradients", options, kernel, *wanted)  # torch's deterministic mode is in every key

    def bind() -> Any:
        problem, gpu = describe_call(operands, options), current_gpu(out.device)
        return autograd.bind_gradients(problem, gpu, operands, wanted, kernel)

    compute: Any = planned(plan_key(operands, said, dispatched=True), bind)
    dout, dlse = dout.resolve_neg(), None if dlse is None else dlse.resolve_neg()
    grads = compute(operands, (out, lse), dout, dlse)
    return tuple(absent(out) if g is None else g for g in grads)


def _attention_backward_fake(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, wanted: list[bool], *rest: Any
) -> tuple[torch.Tensor, ...]:
    operands, _ = _split(rest, is_fake=True)
    sources = zip(differentiable(operands), wanted, strict=True)
    return tuple(t.new_empty(t.shape) if want else absent(out) for t, want in sources)


def _split(arguments: tuple[Any, ...], is_fake: bool = False) -> tuple[AnyOperands, Options]:
    """Returns the operands and options of an operator's arguments. Without dropout a seed has no effect.

    Args:
        is_fake: whether the tensors have no contents. The probability of dropout may then have any value.

    Raises:
        RuntimeError: a CUDA graph is being captured, and the probability of dropout is an input of the compiled graph.
    """
    operands, probability = DropoutOperands(*arguments[: NUM_TENSORS - 1]), arguments[NUM_TENSORS - 1]
    options = Options(*arguments[NUM_TENSORS : NUM_TENSORS + NUM_OPTIONS])
    if probability is not None:
        if not is_fake and operands.q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "dropout_p changed between calls of a compiled function, and a CUDA graph is being captured, which "
                "would keep one value: compile with one dropout_p, or without CUDA graphs"
            )
        options = options._replace(dropout_p=0.5 if is_fake else float(probability))
    return operands if options.dropout_p else Operands(*operands[:-1]), options


def _split_quantized(arguments: tuple[Any, ...]) -> tuple[AnyOperands, Options]:
    count = len(QuantizedOperands._fields)
    return QuantizedOperands(*arguments[:count]), Options(*arguments[count : count + NUM_OPTIONS])


def _define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _library.define(f"{name}{schema}")
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"warpwave::{name}", fake, lib=_library)


_CALL = f"{_OPTIONS}, str kernel_name, str config"
for _name, _tensors, _real, _empty in (
    ("attention", _TENSORS, _split, partial(_split, is_fake=True)),
    ("quantized_attention", _QUANTIZED_TENSORS, _split_quantized, _split_quantized),
):
    _define(_name, f"({_tensors}, {_CALL}) -> (Tensor, Tensor)", partial(_attend, _real), partial(_attend_fake, _empty))
    _define(
        f"{_name}_out", f"({_tensors}, {_CALL}, Tensor(a!) out) -> Tensor", partial(_store, _real),
        partial(_store_fake, _empty),
    )  # fmt: skip
_define(
    "attention_backward",
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] wanted, {_TENSORS}, {_OPTIONS}, "
    "str kernel_name='auto') -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _attention_backward,
    _attention_backward_fake,
)
torch.library.register_autograd(
    "warpwave::attention", autograd.differentiate, setup_context=autograd.save, lib=_library
)
torch.library.register_autograd("warpwave::attention_backward", autograd.no_second_derivative, lib=_library)


# FLOP for torch.utils.flop_counter, by the formulas of torch's SDPA: masks are not considered -------------------------


def _pairs(operands: AnyOperands, options: Options) -> int:
    """Returns the pairs of a query and a key, over all heads. Offsets are read, which waits for the device; offsets
    without contents stand for sequences of the greatest lengths."""
    q, k, offsets_q, offsets_k = operands.q, operands.k, operands.cu_seqlens_q, operands.cu_seqlens_k
    if offsets_q is None or offsets_k is None:
        return q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
    if any(type(t) is not torch.Tensor or t.device.type == "meta" for t in (offsets_q, offsets_k)):
        return (offsets_q.shape[0] - 1) * q.shape[1] * options.max_seqlen_q * options.max_seqlen_k
    lengths = zip(offsets_q.diff().tolist(), offsets_k.diff().tolist(), strict=True)
    return q.shape[1] * sum(seqlen_q * seqlen_k for seqlen_q, seqlen_k in lengths)


def _flops(split: Split, *arguments: Any, out_val: Any) -> int:
    operands, options = split(arguments)
    return 2 * _pairs(operands, options) * (operands.q.shape[-1] + operands.v.shape[-1])


def _flops_backward(dout: Any, dlse: Any, out: Any, lse: Any, wanted: list[bool], *rest: Any, out_val: Any) -> int:
    """The scores again, dP, and the gradients of q, k and v, wanted or not."""
    operands, options = _split(rest, is_fake=True)
    return 2 * _pairs(operands, options) * (3 * operands.q.shape[-1] + 2 * operands.v.shape[-1])


register_flop_formula([torch.ops.warpwave.attention, torch.ops.warpwave.attention_out], get_raw=True)(
    partial(_flops, partial(_split, is_fake=True))
)
register_flop_formula(
    [torch.ops.warpwave.quantized_attention, torch.ops.warpwave.quantized_attention_out], get_raw=True
)(partial(_flops, _split_quantized))
register_flop_formula(torch.ops.warpwave.attention_backward, get_raw=True)(_flops_backward)
