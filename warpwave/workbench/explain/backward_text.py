"""The backward of a call as text, in the form of the forward's sections; and forward and backward together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from warpwave import dispatch
from warpwave.workbench.explain.sections import (
    config_notes,
    config_words,
    foreseen,
    kernel_section,
    losses,
    predicted,
    rates_of,
    steps,
    table,
    verdict,
    wrapped,
)
from warpwave.workbench.model.roofline import byte, figure, flop, us

if TYPE_CHECKING:
    from warpwave.workbench.explain.backward import Backward, Both
    from warpwave.workbench.explain.explanation import Explanation


def backward_sections(said: Explanation) -> Iterator[Iterator[str]]:
    """Yields the sections of the backward; none for a call without gradients."""
    backward, both = said.backward, said.both
    if backward is None or both is None or not said.flops:
        return
    yield _head(backward)
    yield _bounds(backward)
    yield kernel_section(backward, f"BACKWARD   {backward.kernel}: what it computes and moves")
    yield predicted(backward, "BACKWARD   time on the device, and the losses between the bound and this time")
    yield losses(backward.losses, "BACKWARD  ")
    yield _both(backward, both)


def _head(backward: Backward) -> Iterator[str]:
    """Yields the kernel, what binds, the predicted time, the products and the kernels that are not used."""
    cost, values = backward.cost, config_words(backward.config)
    yield f"BACKWARD   {backward.kernel}" + (f", {values}" if values else "")
    module = next((kernel for kernel in dispatch.GRADIENT_KERNELS if kernel.NAME == backward.kernel), None)
    for note in config_notes(module, backward):
        yield from wrapped(note, "  config   ")
    yield from wrapped(verdict(backward), "  bound    ")
    if backward.prediction is not None:
        yield from wrapped(foreseen(backward.prediction), "  time     ")
    again = f"{backward.products:.3g} products of a visible tile where 5 are needed"
    yield f"  products {again}" + (": scores are computed again" if cost.repeated_flops else "")
    if cost.added_bytes:
        yield f"  sums     {byte(cost.added_bytes)} added to sums of dQ in L2"
    if backward.bias_us:
        yield f"  bias     its gradient adds {us(backward.bias_us)}, predicted; not in the times here"
    where, times = "before", backward.alternatives_us
    for name, why in backward.reasons.items():  # in the order of preference
        if name == backward.kernel:
            where = "after"
        elif name in times:
            yield f"  able, {where} {backward.kernel}: {name} ({us(times[name])} predicted)"
            if why:
                yield from wrapped("; ".join(why), f"  {name} is passed over: ")
        else:
            yield from (f"  not {name}: {reason}" for reason in why)


def _bounds(backward: Backward) -> Iterator[str]:
    if backward.roofline is None or not backward.roofline.bounds:
        return
    yield "BACKWARD   at least, for any implementation that recomputes the scores; the longest time is the bound"
    problem = backward.problem
    yield (
        f"  work     S, dP, dV, dQ and dK: {flop(backward.flops)}, {backward.flops / problem.flops:.3g} x the work of "
        f"the forward, over {byte(backward.compulsory_bytes)}"
    )
    yield from table(backward, of_kernel=False)
    yield from rates_of(backward)


def _both(backward: Backward, both: Both) -> Iterator[str]:
    """Yields the time of forward and backward together, and its losses."""
    p = both.prediction
    if p is None or backward.prediction is None:
        return
    yield "BOTH       forward + backward: time on the device, and the losses of both"
    flops = backward.flops + backward.problem.flops
    share = backward.prediction.time_us / p.time_us
    rate = f"{figure(flops / p.time_us * 1e-6)} TFLOP/s, {share:.0%} of it the backward"
    yield f"  time     {us(p.time_us)}, {rate}; nine in ten calls take between {us(p.low_us)} and {us(p.high_us)}"
    if both.losses is None:
        yield from steps([(name, f, p.times_us[name]) for name, f in p.factors.items()], p.bound_us)
    else:
        yield from losses(both.losses, " ")
