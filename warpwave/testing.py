"""Checks for test suites: attention must be correct and reach a fraction of the device's bound.

    from warpwave.testing import assert_reaches

    def test_attention_is_fast():
        q, k, v = (torch.randn(4, 4096, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        assert_reaches(0.4, q, k, v, causal=True)

The bound is the roofline's: the time that the slowest of products, exponentials and memory needs at the rates of the
GPU's data sheet. pytest is imported only when a test has to be skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

import warpwave
from warpwave.errors import InvalidInput
from warpwave.gpu import Gpu, current_gpu
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.correctness import Sample
from warpwave.workbench.bench.inputs import make_operands
from warpwave.workbench.bench.timing import CaptureFailed, Samples, paired_ratio, time_interleaved
from warpwave.workbench.hardware import catalog
from warpwave.workbench.model.roofline import Roofline, data_sheet_rates, roofline

ROUNDS = 11


@dataclass(frozen=True)
class Reached:
    """The result of `assert_reaches`.

    Args:
        fraction: the bound's time over the median of the rounds.
        low95, high95: the 95 % interval of the fraction, between order statistics of the rounds.
        samples: the times.
        bound: the roofline at the data sheet's rates.
        arithmetic: the whole computation in words, one step a line.
    """

    fraction: float
    low95: float
    high95: float
    samples: Samples
    bound: Roofline
    arithmetic: str


def assert_reaches(
    fraction_of_bound: float,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    call: Callable[..., Tensor] | None = None,
    problem: AttentionProblem | None = None,
    rounds: int = ROUNDS,
    **options: Any,
) -> Reached:
    """Fails unless an attention call is correct and reaches a fraction of its roofline bound.

    The result is compared with float64 first. Then the call is timed in rounds, and fails only if the upper end of the
    95 % interval of the fraction is below the demand. One slow round does not fail the test. A call that just reaches
    the demand fails in less than one run of forty, and a call that is reliably slower fails in every run.

    Args:
        fraction_of_bound: demanded fraction of the bound, above 0 and at most 1: 0.5 is half of what the GPU could do.
        q, k, v: inputs on the GPU, as `warpwave.attention` takes them (or `attention_varlen`, with its arguments);
            `options` are its keyword arguments, `kernel` and `config` included.
        call: another implementation, `call(q, k, v) -> out`, in the layout of `warpwave.attention`. It requires
            `problem`: inputs are made for the problem, and the call must compute all of it.
        problem: the call as an `AttentionProblem`.
        rounds: at least 6.

    Returns:
        The result, so that a test may print it.

    Raises:
        AssertionError: the result is wrong, or too slow; the message holds the arithmetic.
        InvalidInput: the demand is not between 0 and 1, or the arguments contradict each other.

    Note:
        Skips the test, with the reason, if torch sees no GPU or the GPU has no data sheet. Times are device times
        (CUDA graphs for short calls, events with L2 flushed for long ones), so they exclude the host.

    Example:
        >>> def my_attention(q, k, v):  # (batch, seqlen, heads, head_dim)
        ...     q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        ...     return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        >>> problem = warpwave.AttentionProblem(
        ...     batch=1, seqlen_q=1024, seqlen_k=1024, num_heads_q=8, num_heads_kv=8, head_dim=64, head_dim_v=64,
        ...     dtype="float16", softmax_scale=0.125)
        >>> assert_reaches(0.2, call=my_attention, problem=problem)  # doctest: +SKIP
    """
    if not 0 < fraction_of_bound <= 1:
        raise InvalidInput(f"fraction_of_bound is {fraction_of_bound}; it must be above 0 and at most 1")
    if rounds < 6:
        raise InvalidInput(f"rounds is {rounds}; an interval needs at least 6")
    if (call is None) == (q is None):
        raise InvalidInput("give q, k and v for a call of warpwave, or call= and problem= for one of yours")
    if call is not None and problem is None:
        raise InvalidInput("call= was given without problem=, which states what it computes")
    if q is not None and (k is None or v is None or problem is not None):
        raise InvalidInput("q needs k and v, and no problem=, which follows from them")

    if not torch.cuda.is_available():
        _skip("it needs a GPU, and torch sees none")
    device = device_of(q)
    gpu = current_gpu(device)
    if gpu.is_cpu:
        raise InvalidInput(f"q is on {device}; move q, k and v to the GPU")
    sheet = catalog.data_sheet(gpu)
    if sheet is None:
        _skip(f"{gpu.name} has no data sheet in warpwave's catalog, so its bound is not known")

    if call is None:
        assert q is not None and k is not None and v is not None  # checked above
        options.pop("return_lse", None)  # an additional output that the bound does not include
        problem, operands, run = _ours(q, k, v, options)
    else:
        assert problem is not None  # checked above
        if options:
            raise InvalidInput(f"call= takes no {', '.join(options)}: problem= states what is computed")
        operands = make_operands(problem, device)
        theirs = call

        def run() -> Tensor:
            return theirs(*operands[:3])

    verdict = Sample(problem, operands).judge(run())
    assert verdict.passed, f"the result of {problem.describe()} is wrong: {verdict.reason}"
    try:
        samples = time_interleaved({"call": run}, device=device, rounds=rounds)["call"]
    except CaptureFailed as failure:
        raise InvalidInput(f"the call is too short to be timed outside a CUDA graph, and {failure.reason}") from failure
    reached = evaluate(problem, samples, gpu, sheet)
    assert reached.high95 >= fraction_of_bound, f"{reached.arithmetic}\n  demanded: {fraction_of_bound:.3f}"
    return reached


def device_of(q: Tensor | None) -> torch.device:
    """Returns the device of the call: that of q, or the current GPU."""
    return torch.device("cuda") if q is None else q.device


def evaluate(problem: AttentionProblem, samples: Samples, gpu: Gpu, sheet: catalog.DataSheet) -> Reached:
    """Returns the fraction of the bound that timed samples reach, with its arithmetic."""
    # Inside a graph the same inputs are read repeatedly, and may stay in L2.
    bound = roofline(problem, data_sheet_rates(sheet), gpu=gpu, hot=samples.method == "graph")
    if bound.binding is None:
        raise InvalidInput(f"no rate of {sheet.name} is known for {problem.describe()}")
    # The bound as a contender that takes the same time in every round.
    ratio = paired_ratio(replace(samples, samples_us=(bound.time_us,) * len(samples.samples_us)), samples)
    if ratio.low95 is None or ratio.high95 is None:
        raise InvalidInput(f"{len(samples.samples_us)} rounds are too few for an interval; at least 6 are needed")
    interval = f"95 % interval [{ratio.low95:.3f}, {ratio.high95:.3f}]"
    lines = [
        f"{problem.describe()} on {gpu.name} reaches {ratio.median:.3f} of its bound, {interval}",
        f"  time:     {samples.median_us:,.2f} us, median of {len(samples.samples_us)} rounds by {samples.method}"
        + (", L2 flushed" if samples.l2_flushed else ""),
        f"  bound:    {bound.time_us:,.2f} us by {bound.binding.resource}: {bound.binding.arithmetic}",
        f"  fraction: {bound.time_us:,.2f} / {samples.median_us:,.2f} = {bound.time_us / samples.median_us:.3f}",
    ]
    lines += [f"  others:   {b.resource}: {b.arithmetic}" for b in bound.bounds if b is not bound.binding]
    return Reached(ratio.median, ratio.low95, ratio.high95, samples, bound, "\n".join(lines))


def _ours(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> tuple[AttentionProblem, Operands, Callable[[], Tensor]]:
    """Returns the problem and the operands of a call of this package, and the call."""
    packed = options.get("cu_seqlens_q") is not None
    door = warpwave.attention_varlen if packed else warpwave.attention
    q, k, v = (x.detach() for x in (q, k, v))
    explanation = warpwave.explain(q, k, v, **{name: x for name, x in options.items() if name != "checked"})
    named = {name: options.get(name) for name in Operands._fields[3:]}

    def run() -> Tensor:
        with torch.no_grad():
            out: Tensor = door(q, k, v, **options)
        return out

    return explanation.problem, Operands(q, k, v, **named), run


def _skip(reason: str) -> NoReturn:
    import pytest

    pytest.skip(reason)
