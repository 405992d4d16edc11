"""`explain`: which kernel serves a call, what bounds its time, and what to change."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from warpwave import dispatch
from warpwave.checks.calls import SCORES, describe_call
from warpwave.checks.problems import check_problem
from warpwave.errors import InvalidInput, InvalidType, UnsupportedProblem
from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import descales
from warpwave.kernels.cost import Cost
from warpwave.kernels.three_kernel import backward_memory
from warpwave.operands import AnyOperands, Operands, QuantizedOperands, is_part
from warpwave.options import (
    as_bool,
    as_logits,
    options_of,
    spell_scalars,
    spell_switches,
    unexpanded,
    with_positive_scale,
)
from warpwave.problem import DTYPE_BYTES, AttentionProblem, Band, Causal
from warpwave.workbench.explain import accuracy
from warpwave.workbench.explain.accuracy import Accuracy
from warpwave.workbench.explain.advice import Call, computed_in, recommendations
from warpwave.workbench.explain.backward import PASSES, Backward, Both, backward_of, both_of, saving_of
from warpwave.workbench.explain.near_misses import NearMiss, nearest, positional_band
from warpwave.workbench.hardware import catalog, measure
from warpwave.workbench.model.losses import Losses, split
from warpwave.workbench.model.predict import Prediction, predict
from warpwave.workbench.model.roofline import (
    Rates,
    Roofline,
    byte,
    data_sheet_rates,
    estimated,
    measured_rates,
    roofline,
)
from warpwave.workbench.model.steps import computes_gradients

THAT_RECOMPUTES = "no implementation that recomputes the scores"  # of a backward's bound
LOAD_BYTES = 16  # bytes that a thread loads at once from an address that is a multiple of 16


@dataclass(frozen=True)
class Memory:
    """Device memory of one call, in bytes, known before anything is allocated.

    Attributes:
        inputs: q, k, v and the other tensors.
        out, lse: the outputs; a kernel may write lse although the call does not return it.
        workspace: temporary memory, freed when the call returns.
        exact: whether these are the sizes of the allocations, or an estimate.
        gradients: of q, k, v and sinks if a GPU kernel computes them; else 0.
        backward: the largest workspace of its backward.
    """

    inputs: int
    out: int
    lse: int
    workspace: int
    exact: bool
    gradients: int = 0
    backward: int = 0

    @property
    def peak(self) -> int:
        """The largest memory above the inputs while the call runs."""
        return self.out + self.lse + self.workspace


@dataclass(frozen=True)
class Explanation:
    """Which kernel would run a call, what bounds its time, and what to change.

    Attributes:
        problem: the call.
        gpu: the device.
        kernel: the kernel that serves the call; None if the requested kernel cannot.
        config: its config.
        config_source: `"default"` or `"given"`.
        reasons: kernel name -> why it cannot run the call, in the order of preference; empty for kernels that can.
        cost: what the kernel moves and computes, including tiles and padding; None without a kernel.
        bounds: the lower bounds by the card's data sheet, followed by the kernel's own; None if the catalog has no
            such card.
        measured: the same by the ceilings that `warpwave roof` measured; None if there are none.
        memory: of the call; None without a kernel.
        near_misses: small changes with which a preferred kernel would serve the call.
        advice: what to change, most useful first.
        rates_missing: why `bounds` and `measured` are None; else empty.
        passed_over: kernel name -> why "auto" prefers a later kernel although this one could run the call.
        alternatives_us: kernel name -> predicted time, for the other kernels that could run the call.
        prediction: the time on the device, step by step from the bound; None without a data sheet or a kernel.
        losses: a measured time split into the same steps; None if no time was given.
        accuracy: of a float32 call: how products are computed, and the error of out; None for 16-bit inputs.
        gradients: the kernel that computes the gradients if it is not the kernel of the forward; else "".
        backward: its bounds, predicted time and losses; None for a call without gradients.
        both: forward and backward together; None for a call without gradients.
    """

    problem: AttentionProblem
    gpu: Gpu
    kernel: str | None
    config: Any
    config_source: str
    reasons: dict[str, list[str]]
    cost: Cost | None
    bounds: Roofline | None = None
    measured: Roofline | None = None
    memory: Memory | None = None
    near_misses: tuple[NearMiss, ...] = ()
    advice: tuple[str, ...] = ()
    rates_missing: str = ""
    passed_over: dict[str, list[str]] = field(default_factory=dict)
    alternatives_us: dict[str, float] = field(default_factory=dict)
    prediction: Prediction | None = None
    losses: Losses | None = None
    accuracy: Accuracy | None = None
    gradients: str = ""
    backward: Backward | None = None
    both: Both | None = None

    @property
    def flops(self) -> int:
        """FLOP of the two products over visible pairs."""
        return self.problem.flops

    @property
    def compulsory_bytes(self) -> int:
        """Bytes of reading each needed input once and writing each output once."""
        return self.problem.compulsory_bytes

    @property
    def roofline(self) -> Roofline | None:
        """The bounds by the data sheet; without one, the bounds as measured."""
        return self.bounds or self.measured

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON, including derived figures."""
        data = asdict(self) | _derived(self)
        if self.backward is not None:
            data["backward"] |= _derived(self.backward)
        return data

    def __str__(self) -> str:
        from warpwave.workbench.explain.text import text

        return text(self)


def _derived(of: Explanation | Backward) -> dict[str, Any]:
    """Returns the derived figures of one pass, for JSON."""
    known = of.roofline
    binding = None if known is None else known.of_problem.binding  # as `least_us`, and as the text's "bound by"
    return {
        "flops": of.flops,
        "compulsory_bytes": of.compulsory_bytes,
        "binding": None if binding is None else binding.resource,
        "least_us": None if known is None else known.of_problem.time_us,
        "least_us_by_this_kernel": None if known is None else known.time_us,
    }


def explain(
    q: torch.Tensor | AttentionProblem,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    causal: bool | Causal = False,
    window_size: tuple[int, int] | None = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    softcap: float | None = 0.0,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    precision: str | float = "default",
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    deterministic: bool | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out_descale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    kernel: str = "auto",
    config: Any = None,
    return_lse: bool = False,
    gpu: Gpu | str | None = None,
    measured_us: float | None = None,
    record: Path | None = None,
    hot: bool = False,
    passes: str = "forward",
) -> Explanation:
    """Explains which kernel a call would run, what bounds its time, and what to change.

    The call is not run, with one exception: a float32 call with an error budget and tensors runs once, to measure its
    error on sampled rows.

    Args:
        q: the call's first tensor, followed by the other arguments of `attention` or `attention_varlen`; or an
            `AttentionProblem`, which needs no tensors. Boolean masks and packed offsets are read to count pairs
            exactly, which waits for the device.
        gpu: the device to explain for, or its name, as `warpwave explain --gpu` takes it. None: the device of the
            tensors; for a problem, this machine's.
        measured_us: device time of the call, to be split into losses.
        passes: the passes that `measured_us` is the time of: `"forward"`, `"backward"` or `"both"`. The last two need a
            call with gradients.
        record: a file of `warpwave bench` with the call's time, kernel and config.
        hot: assume that the previous call used the same tensors, so that data that fits L2 is not read from memory.

    Returns:
        An `Explanation`; `print` it, or read its fields.

    Raises:
        InvalidInput, InvalidType: the call itself would raise it, the measured time is shorter than the bound, or the
            record lacks this call. A call that would raise `UnsupportedProblem` is explained.
    """
    hot = as_bool("hot", hot)
    gpu = _named(gpu) if isinstance(gpu, str) else gpu
    if not (gpu is None or isinstance(gpu, Gpu)):
        raise InvalidType(f"gpu is a {type(gpu).__name__}; it must be a Gpu, the name of one, or None")
    mask_band: Band | None = None
    layout: tuple[str, ...] = ()
    copied = 0
    operands: AnyOperands | None = None
    factors = (q_descale, k_descale, v_descale, out_descale)
    if isinstance(q, AttentionProblem):
        absent = (k, v, mask, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, window_size, softmax_scale,
                  dropout_seed, deterministic, *factors, out_dtype)  # fmt: skip
        options_of_call = (causal, softcap, precision, max_seqlen_q, max_seqlen_k, return_lse, dropout_p)
        if any(x is not None for x in absent) or options_of_call != (False, 0.0, "default", 0, 0, False, 0.0):
            raise InvalidInput("q is an AttentionProblem, which holds all options of its call; change them there")
        problem = q
        check_problem(problem)
        gpu = gpu or current_gpu(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    else:
        window_size, cap, softmax_scale, return_lse = spell_scalars(window_size, softcap, softmax_scale, return_lse)
        dropout_p, deterministic = spell_switches(dropout_p, deterministic, dropout_seed)
        tensor, softmax_scale = with_positive_scale(q, softmax_scale)
        sinks, mask = as_logits(sinks, q), unexpanded(mask, q, k)
        operands = Operands(tensor, k, v, mask, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k)
        if out_dtype is not None or any(t is not None for t in factors):
            operands = QuantizedOperands(*operands, *factors)
        scores = (causal, window_size, cap, softmax_scale, precision)
        options = options_of(operands, *scores, return_lse, dropout_p, deterministic, out_dtype)
        problem = describe_call(operands, options._replace(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k))
        problem = replace(_counted(problem, operands), v_in_k=is_part(operands.v, operands.k))
        gpu = gpu or current_gpu(q.device)
        if mask is not None and _has_contents(mask):
            mask_band = positional_band(mask, problem.seqlen_q, problem.seqlen_k)
    _check_passes(passes, problem, measured_us, record)
    clock_mhz: float | None = None
    if record is not None:
        from warpwave.workbench.explain import recorded_time

        if measured_us is not None:
            raise InvalidInput("give measured_us or record, not both")
        found = recorded_time.find(record, problem, gpu, kernel)
        measured_us, kernel, hot, clock_mhz = found.time_us, found.kernel, found.hot, found.clock_mhz
        config = found.config if config is None else config
    asked = problem
    problem, gradients = dispatch.forward_of(problem, gpu, kernel)
    reasons = dispatch.reasons_against(problem, gpu)
    rooflines = functools.partial(_rooflines, hot=hot)
    bounds, measured, missing = rooflines(problem, gpu)
    try:
        choice = dispatch.choose(problem, gpu, kernel, config)
    except (UnsupportedProblem, InvalidType):
        if kernel not in reasons or not reasons[kernel]:
            raise
        return Explanation(
            problem,
            gpu,
            None,
            None,
            "",
            {kernel: reasons.pop(kernel), **reasons},
            None,
            bounds,
            measured,
            near_misses=tuple(nearest(problem, gpu, [_module(kernel)], mask_band)),
            rates_missing=missing,
            passed_over=dispatch.passed_over(problem, gpu),
        )
    module = choice.kernel
    if operands is not None and not gpu.is_cpu:
        layout, copied = _layout(operands, module)
    cost = module.cost(problem, gpu, choice.config)
    bounds, measured, missing = rooflines(problem, gpu, module, cost)
    launch = None if measured is None else measured.rates.launch_us
    near_misses = nearest(problem, gpu, _ahead(module, problem), mask_band)
    known = bounds or measured
    call = Call(problem, gpu, module, choice.config, cost, known, launch, mask_band, layout, hot=hot)
    prediction = predict(problem, module, choice.config, gpu, hot=hot)
    if prediction is not None and measured is not None:
        # The interval starts at no less than the measured bound, as long as the prediction itself is above it.
        least = min(measured.time_us, prediction.time_us)
        prediction = replace(prediction, low_us=max(prediction.low_us, least))
    alternatives = _alternatives(problem, gpu, module, hot)
    backward_pass = both = None
    if asked.requires_grad:
        backward_pass = backward_of(asked, saving_of(asked), gpu, kernel, hot, rooflines)
        both = Both(both_of(prediction, backward_pass.prediction))
    of_backward = None if backward_pass is None else backward_pass.prediction
    call = replace(call, prediction=prediction, alternatives_us=alternatives, backward=of_backward)
    losses = None
    if measured_us is not None:
        if passes == "forward":
            losses = _losses(measured_us, prediction, problem, gpu, bounds, clock_mhz)
        elif passes == "backward":
            assert backward_pass is not None
            p, of_pass = backward_pass.prediction, backward_pass.bounds
            split_backward = _losses(measured_us, p, problem, gpu, of_pass, None, THAT_RECOMPUTES)
            backward_pass = replace(backward_pass, losses=split_backward)
        else:
            assert both is not None
            of_both = _losses(measured_us, both.prediction, problem, gpu, None, None, THAT_RECOMPUTES)
            both = replace(both, losses=of_both)
    return Explanation(
        problem,
        gpu,
        module.NAME,
        choice.config,
        choice.config_source,
        reasons,
        cost,
        bounds,
        measured,
        _with_backward(_memory(problem, module, cost, copied), backward_pass),
        tuple(near_misses),
        tuple(recommendations(call)),
        missing,
        passed_over=dispatch.passed_over(problem, gpu),
        alternatives_us=alternatives,
        prediction=prediction,
        losses=losses,
        accuracy=accuracy.of_call(
            problem,
            gpu,
            module,
            choice.config,
            computed_in(module, problem, gpu),
            operands if isinstance(operands, Operands) and gpu == current_gpu(operands.q.device) else None,
        ),
        gradients=gradients,
        backward=backward_pass,
        both=both,
    )


def _check_passes(passes: str, problem: AttentionProblem, measured_us: float | None, record: Path | None) -> None:
    """Raises InvalidInput if the call has no such passes, or nothing was measured of them."""
    if passes not in PASSES:
        raise InvalidInput(f"passes is {passes!r}; it must be one of {', '.join(map(repr, PASSES))}")
    if passes == "forward":
        return
    if record is not None:
        raise InvalidInput(f"passes is {passes!r}, and a record of bench holds times of forwards; give measured_us")
    if measured_us is None:
        raise InvalidInput(f"passes is {passes!r}; give measured_us too, the time of these passes")
    if not problem.requires_grad:
        raise InvalidInput(f"passes is {passes!r}, and the call has no gradients; let its inputs require them")


def _losses(
    measured_us: float,
    prediction: Prediction | None,
    problem: AttentionProblem,
    gpu: Gpu,
    bounds: Roofline | None,
    clock_mhz: float | None,
    none: str = "no implementation",
) -> Losses:
    """Splits a measured time. Raises InvalidInput if there is no model of the card, or no work."""
    sheet = catalog.data_sheet(gpu)
    if prediction is None or sheet is None:
        if problem.dropout_p:
            raise InvalidInput("a measured time needs a model of its call, and dropout has none")
        raise InvalidInput(
            f"a measured time needs a model of its card, and {gpu.name} has none{_cards_of(gpu)}"
            if problem.flops
            else "a measured time needs work to be split by, and this call has none"
        )
    doubt = estimated(problem, bounds)
    return split(measured_us, prediction, sheet, bounds, clock_mhz=clock_mhz, none=none, estimated=doubt)


def _named(name: str) -> Gpu:
    try:
        return catalog.resolve(name)
    except ValueError as error:
        raise InvalidInput(str(error)) from None


def _cards_of(gpu: Gpu) -> str:
    """Returns the end of a sentence that names the cards of an architecture; empty for a card."""
    cards = ", ".join(sheet.key for sheet in catalog.of_arch(gpu.arch)) if gpu.name == gpu.arch else ""
    return f"; for times name a card: {cards}" if cards else ""


def _alternatives(problem: AttentionProblem, gpu: Gpu, chosen: Any, hot: bool) -> dict[str, float]:
    """Returns the predicted times of the other GPU kernels that could run the call, with their default configs."""
    found = {}
    for kernel in dispatch.kernels_for(problem):
        if kernel is not chosen and kernel.NEEDS_GPU and not dispatch.why_not(kernel, problem, gpu):
            other = predict(problem, kernel, dispatch.default_config(kernel, problem, gpu), gpu, hot=hot)
            if other is not None:
                found[kernel.NAME] = other.time_us
    return found


def _module(name: str) -> Any:
    return next(module for module in dispatch.KERNELS if module.NAME == name)


def _ahead(module: Any, problem: AttentionProblem) -> list[Any]:
    kernels = dispatch.kernels_for(problem)
    return list(kernels[: kernels.index(module)])


def _rooflines(
    problem: AttentionProblem, gpu: Gpu, kernel: Any = None, cost: Cost | None = None, *, hot: bool
) -> tuple[Roofline | None, Roofline | None, str]:
    """Returns the bounds by the data sheet, the bounds as measured, and why both are missing."""
    precision = None if kernel is None else computed_in(kernel, problem, gpu)
    widens = getattr(kernel, "WIDENS_VALUES", False)
    is_backward = kernel is not None and computes_gradients(kernel)

    def by(rates: Rates) -> Roofline:
        return roofline(
            problem, rates, gpu=gpu, cost=cost, precision=precision, widens=widens, hot=hot, is_backward=is_backward
        )

    sheet = catalog.data_sheet(gpu)
    bounds = None if sheet is None else by(data_sheet_rates(sheet))
    measured = None
    if (ceilings := measure.load(gpu)) is not None:
        measured = by(measured_rates(ceilings))
    elif (ceilings := measure.shipped(gpu)) is not None:
        rates = measured_rates(ceilings)
        measured = by(replace(rates, name=f"{rates.name}, shipped"))
    if bounds is not None or measured is not None:
        return bounds, measured, ""
    if gpu.is_cpu:
        missing = "the rates of this CPU are unknown; `warpwave roof --device cpu` measures them in ten seconds"
    elif gpu.name == gpu.arch:
        missing = f"{gpu.arch} is an architecture, not a card{_cards_of(gpu)}"
    else:
        missing = f"the catalog has no {gpu.name}; `warpwave roof` measures its ceilings in half a minute"
    return None, None, missing


def _memory(problem: AttentionProblem, kernel: Any, cost: Cost, copied: int) -> Memory:
    p, size = problem, DTYPE_BYTES[problem.dtype]
    rows = p.rows * p.num_heads_q
    keys = (p.total_k if p.packed else p.batch * p.seqlen_k) * p.num_heads_kv
    inputs = rows * p.head_dim * size + keys * p.bytes_of_key
    if p.is_quantized:
        inputs += 4 * sum(math.prod(shape) for shape in descales.shapes(p) if shape is not None)
    for shape, cell in ((p.mask_shape, 1), (p.bias_shape, DTYPE_BYTES[p.bias_dtype or p.dtype]), (p.alibi_shape, 4)):
        inputs += 0 if shape is None else math.prod(shape) * cell
    inputs += 4 * p.num_heads_q * p.has_sinks + 8 * (p.batch + 1) * p.packed
    ours = bool(kernel.NEEDS_GPU)  # torch's operations also allocate intermediates
    lse = p.lse_bytes if p.return_lse or p.requires_grad else 0
    out = rows * p.head_dim_v * DTYPE_BYTES[p.dtype_of_out]
    return Memory(inputs, out, lse, cost.workspace_bytes + copied, ours)


def _with_backward(memory: Memory, backward: Backward | None) -> Memory:
    """Adds the memory of the backward if a GPU kernel computes the gradients; eager's depends on torch's operations."""
    if backward is None or backward.kernel == dispatch.eager_backward.NAME:
        return memory
    gradients = backward_memory.gradient_bytes(backward.problem)
    return replace(memory, gradients=gradients, backward=backward.cost.workspace_bytes)


def _layout(operands: AnyOperands, kernel: Any) -> tuple[tuple[str, ...], int]:
    """Returns notes about strides that cost time, and the bytes of the copies that they cause."""
    strided: list[str] = []
    ragged: list[str] = []
    shifted: list[str] = []
    for name in ("q", "k", "v"):
        tensor = getattr(operands, name)
        *outer, inner = tensor.stride()
        size = tensor.element_size()
        if inner != 1 and tensor.shape[-1] > 1:
            strided.append(name)
        elif any(stride * size % LOAD_BYTES for stride, n in zip(outer, tensor.shape, strict=False) if n > 1):
            (ragged if tensor.shape[-1] * size % LOAD_BYTES else shifted).append(name)
    # No TMA descriptor describes such a tensor, so the kernels that use TMA copy the tensor first. float32 tensors are
    # split into parts in a workspace anyway.
    maps = kernel.NAME.startswith("hopper/") and operands.q.dtype != torch.float32
    copied = sum(_bytes(getattr(operands, name)) for name in (*strided, *shifted)) if maps else 0
    by_copy = f"every call copies them first, {byte(copied)}" if maps else ""
    notes = []
    if strided:
        stride = getattr(operands, strided[0]).stride(-1)
        notes.append(
            f"{_names(strided)} with stride {stride} along head_dim: "
            f"{by_copy or 'rows are read one element at a time'}. Pass {strided[0]}.contiguous(), or keep head_dim "
            "last in memory"
        )
    if ragged:
        tensor = getattr(operands, ragged[0])
        width, size = tensor.shape[-1], tensor.element_size()
        padded = -(-width * size // LOAD_BYTES) * LOAD_BYTES // size
        notes.append(
            f"{_names(ragged)} with rows of {width} x {size} = {width * size} bytes, not a multiple of {LOAD_BYTES}: "
            f"they are read in pieces. Pad head_dim to {padded} with zeros, with softmax_scale given"
        )
    if shifted:
        notes.append(
            f"{_names(shifted)} with rows that do not start at multiples of {LOAD_BYTES} bytes: "
            f"{by_copy or 'they are read in pieces'}. Pass {shifted[0]}.contiguous()"
        )
    for name in ("mask", "bias"):
        tensor = getattr(operands, name)
        if kernel.NEEDS_GPU and tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) > 1:
            copied += _bytes(tensor)
            notes.append(
                f"The {name} is not contiguous along the keys, so every call copies it. Pass {name}.contiguous()"
            )
    bias = operands.bias
    strides = () if bias is None else zip(SCORES.split(), bias.shape, bias.stride(), strict=True)
    if expanded := [axis for axis, size, stride in strides if size > 1 and stride == 0]:
        notes.append(
            f"The bias is expanded along {' and '.join(expanded)}. Pass it with size 1 there: the bounds above count "
            "each copy as memory"
        )
    return tuple(notes), copied


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _names(names: list[str]) -> str:
    return f"You pass {' and '.join(names)}"


def _has_contents(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor can be read: false on device "meta" and under `FakeTensorMode`."""
    return not (tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor))


def _counted(problem: AttentionProblem, operands: AnyOperands) -> AttentionProblem:
    """Adds what only the contents of tensors show: packed lengths, and the pairs that a boolean mask shows."""
    read = operands[7:9] if problem.packed else (operands.mask,)
    if not all(tensor is not None and _has_contents(tensor) for tensor in read):
        return problem
    if problem.packed:
        lengths = [offsets.diff().tolist() for offsets in read]
        return replace(problem, lengths=tuple(zip(*lengths, strict=True)))
    shown = operands.mask
    if problem.has_band:
        low, high = problem.band(problem.seqlen_q, problem.seqlen_k)
        rows = torch.arange(problem.seqlen_q, device=shown.device)[:, None]
        distance = torch.arange(problem.seqlen_k, device=shown.device) - rows
        shown = shown.expand(*shown.shape[:2], problem.seqlen_q, problem.seqlen_k)
        if low is not None:
            shown = shown & (distance >= low)
        if high is not None:
            shown = shown & (distance <= high)
    everything = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_k
    return replace(problem, mask_visible_pairs=int(shown.sum()) * everything // max(1, shown.numel()))
