"""Sections of an explanation that the forward and the backward of a call share: figures with their arithmetic."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from warpwave.workbench.explain.advice import FAR
from warpwave.workbench.model.losses import NOTICEABLE, recommendation
from warpwave.workbench.model.roofline import (
    FLOAT32_UNITS,
    Bound,
    Roofline,
    byte,
    estimated,
    figure,
    flop,
    multiple,
    ratio,
    us,
)
from warpwave.workbench.model.steps import LOSSES
from warpwave.workbench.terminal import columns

if TYPE_CHECKING:
    from warpwave.workbench.explain.backward import Backward
    from warpwave.workbench.explain.explanation import Explanation
    from warpwave.workbench.model.losses import Losses
    from warpwave.workbench.model.predict import Prediction

    Pass: TypeAlias = Explanation | Backward

WIDTH = 110


def config_notes(module: Any, said: Pass) -> Iterator[str]:
    """Yields what a kernel's `notes` state about the config: the rows of its tables that chose it."""
    if hasattr(module, "notes"):
        yield from module.notes(said.problem, said.gpu, said.config)


def foreseen(p: Prediction) -> str:
    """Returns the predicted time, its ratio to the bound, and the largest steps between them."""
    largest = sorted(((f, name) for name, f in p.factors.items() if f >= 1.05), reverse=True)[:2]
    most = " and ".join(f"{name} (x {factor:.2f})" for factor, name in largest)
    return f"{us(p.time_us)}, {multiple(p.time_us / p.bound_us)} x the bound of the work" + (
        f"; the largest losses are {most}" if most else ""
    )


def verdict(said: Pass) -> str:
    """Returns the resource that binds, and the least time."""
    known = said.roofline
    if known is None or known.binding is None:
        return said.rates_missing or "unknown: no rate of this device is known"
    least = known.of_problem
    binding = least.binding
    assert binding is not None
    if said.flops == 0:
        return "nothing: no key is visible to any query"
    any_ = "no implementation with this accuracy" if said.problem.dtype == "float32" else "no implementation"
    if binding.resource == "tensor cores" and said.problem.dtype == "float16":
        any_ += " that accumulates in float32"
    if binding.resource == "exponentials":
        any_ += " that computes every exponential on the special function units"
    if is_backward(said):
        any_ += " that recomputes the scores"
    rates = known.rates.name + (f"; estimated: {why}" if (why := estimated(said.problem, known)) else "")
    sentence = f"{binding.resource}: {any_} takes less than {us(binding.time_us)} ({rates})"
    sentence += f", {_rate_allowed(said, binding.time_us)}"
    launch = None if said.measured is None else said.measured.of("launch")
    if launch is not None and launch.time_us > known.time_us:
        return f"the launch: {us(launch.time_us)} (measured); the work itself needs at least {us(least.time_us)}"
    if launch is None and least.time_us < 1 and not said.gpu.is_cpu:
        return f"{sentence}; the launch takes longer (`warpwave roof` measures it, no data sheet states it)"
    if said.kernel is not None and known.time_us > 1.05 * least.time_us:
        sentence += f"; {said.kernel} takes at least {us(known.time_us)}, see below"
    return sentence


def _rate_allowed(said: Pass, time_us: float) -> str:
    tflops, gbps = said.flops / time_us * 1e-6, said.compulsory_bytes / time_us * 1e-3
    return f"which is {figure(tflops)} TFLOP/s and {figure(gbps)} GB/s"


def kernel_section(said: Pass, title: str) -> Iterator[str]:
    """Yields the kernel's own bounds, its grid and its work."""
    cost = said.cost
    if cost is None or said.kernel is None:
        return
    yield title
    yield from table(said, of_kernel=True)
    sms = said.gpu.num_sms
    each = [f"{part.blocks:,}" for part in cost.parts if part.blocks]  # torch's operators state none
    if len(each) > 1 and is_backward(said):
        yield f"  grid     launches of {', '.join(each[:-1])} and {each[-1]} blocks" + (f" on {sms} SMs" if sms else "")
    elif cost.blocks:
        yield f"  grid     {cost.blocks:,} block{'s' if cost.blocks > 1 else ''}" + (
            f" on {sms} SMs, {multiple(cost.blocks / sms)} each" if sms else ""
        )
    moved = cost.read_bytes + cost.write_bytes
    yield (
        f"  work     {flop(cost.flops)} computed, {ratio(cost.flops, said.flops)} x the work; "
        f"{byte(moved)} read and written through the caches, {multiple(moved / max(1, said.compulsory_bytes))} x the "
        "minimum"
    )


def predicted(said: Pass, title: str) -> Iterator[str]:
    """Yields the time, its error bar, and each step from the bound that costs something."""
    p = said.prediction
    if p is None:
        return
    yield title
    rate = f"{figure(said.flops / p.time_us * 1e-6)} TFLOP/s"
    yield f"  time     {us(p.time_us)}, {rate}; nine in ten calls take between {us(p.low_us)} and {us(p.high_us)}"
    yield from wrapped(p.validated, "  basis    ")
    if p.waves:
        why = "as the kernel launches them" if p.limit == "launch" else f"limited by {p.limit}"
        yield (
            f"  waves    {multiple(p.waves)} rounds of tiles over {said.gpu.num_sms} SMs x {p.blocks_per_sm} resident "
            f"block{'s' * (p.blocks_per_sm > 1)}, {why}"
        )
    for t in p.traffic:
        if t.level == "memory":
            yield f"  memory   {byte(t.bytes)} from and to memory, {multiple(t.redundancy)} x the minimum"
        elif t.level == "L2":
            fits = "fits" if t.working_set <= t.capacity else "does not fit"
            set_ = f"the working set of {byte(t.working_set)} {fits} {byte(t.capacity)}"
            if not t.working_set:
                set_ = "all blocks of a head run together and read its keys from memory once"
            yield f"  L2       {byte(t.bytes)} requested, {multiple(t.redundancy)} x the minimum; {set_}"
        else:
            label = {"shared memory": "smem", "registers": "regs"}[t.level]
            yield f"  {label:8} {byte(t.bytes)} a block, {byte(t.working_set)} of {byte(t.capacity)} an SM"
    if said.losses is None:
        yield from steps([(name, f, p.times_us[name]) for name, f in p.factors.items()], p.bound_us)


def steps(losses: Sequence[tuple[str, float, float]], bound_us: float) -> list[str]:
    """Returns a line for the bound and for each (name, factor, time after it) that costs something."""
    shown = [step for step in losses if step[1] >= 1.005 or step[0] == "remainder"]
    rows = [
        (name, us(after), f"x {factor:.3f}", LOSSES.get(name, "what the model did not predict"))
        for name, factor, after in shown
    ]
    return columns([("bound", us(bound_us)), *rows], right=(1,), indent="  ")


def losses(split: Losses | None, label: str) -> Iterator[str]:
    """Yields a measured time, split into losses. If the model is off by more than any loss, that comes first."""
    if split is None:
        return
    bounds = f"{multiple(split.ratio)} x the bound"
    yield f"{label} measured {us(split.measured_us)} = {bounds}, the product of these factors"
    if split.warning:
        yield from wrapped(split.warning, "  warning  ")
    unexplained = split.remainder > max(FAR, *(loss.factor for loss in split.losses[:-1]))
    if unexplained:
        yield from wrapped(
            f"Remainder, {split.remainder:.3g} x, {us(split.losses[-1].before_us)} to {us(split.measured_us)}: larger "
            "than every loss of this kernel, so this is not this kernel's loss. Check that the time is of this kernel "
            "and this call, on the device. For the times of other code, use warpwave explain --from-table FILE.",
            "  first    ",
        )
    too_slow = split.largest is not None and split.remainder * split.largest.factor < NOTICEABLE
    if too_slow:
        yield from wrapped(
            f"Remainder, {split.remainder:.3g} x: the call took {us(split.measured_us)} where the model predicts "
            f"{us(split.losses[-1].before_us)}. No loss is larger than this error, so none is named.",
            "  first    ",
        )
    yield from steps([(loss.name, loss.factor, loss.after_us) for loss in split.losses], split.bound_us)
    for yardstick in () if split.warning else split.yardsticks:  # a time below the bound is no share of it
        yield from wrapped(
            f"{yardstick.share:.1%} of the {yardstick.name} bound, {us(yardstick.least_us)}: {yardstick.note}",
            "  share    ",
        )
    if not (unexplained or too_slow) and split.largest is not None and (advice := recommendation(split.largest)):
        if split.remainder < 1 / NOTICEABLE:
            least = split.remainder * split.largest.factor
            advice += f" The call is faster than predicted, so this loss may be as small as {least:.3g} x."
        yield from wrapped(advice, "  first    ")


def table(said: Pass, of_kernel: bool) -> Iterator[str]:
    """Yields a line per resource: its time by each set of rates (the longest marked), and the arithmetic."""
    sets = [known for known in (said.bounds, said.measured) if known is not None]
    by_set = [{b.resource: b for b in known.bounds if b.of_kernel == of_kernel} for known in sets]
    names = list(dict.fromkeys(name for of_set in by_set for name in of_set))
    if not names:
        return
    rows = [("", *(known.rates.name for known in sets), "arithmetic")]
    for name in names:
        cells = (_cell(of_set.get(name), known, of_kernel) for of_set, known in zip(by_set, sets, strict=True))
        rows.append((name, *cells, next(of_set[name] for of_set in by_set if name in of_set).arithmetic))
    yield from columns(rows, indent="  ")


def rates_of(said: Pass) -> Iterator[str]:
    """Yields the conditions of the rates: accumulation in float32, and a clock above the stated one."""
    known = said.bounds
    if known is None or not known.path:
        return
    parts = []
    if known.path != FLOAT32_UNITS:
        sums = "int32 and float32" if known.path.startswith("int8") else "float32"
        parts.append(f"products of {known.path} accumulated in {sums}")
    if known.rates.clock:
        parts.append(known.rates.clock)
    if parts:
        yield f"  rates    {', at '.join(parts) if len(parts) > 1 else parts[0]}"


def _cell(bound: Bound | None, known: Roofline, of_kernel: bool) -> str:
    if bound is None:
        return "-"
    longest = known.of_problem.binding if not of_kernel else known.binding
    return us(bound.time_us) + (" *" if bound == longest and bound.time_us else "")


def is_backward(said: Pass) -> bool:
    """Returns whether the pass is a backward; an explanation is of the forward."""
    return hasattr(said, "products")


def config_words(config: Any) -> str:
    """Returns a config in words, with the tiles of several launches in brackets, without fields that have no effect."""
    found, left_out = [], getattr(config, "without_effect", ())
    for name, value in dataclasses.asdict(config).items():
        if name in left_out:
            continue
        if isinstance(value, dict):
            value = f"({', '.join(f'{key}={each}' for key, each in value.items())})"
        found.append(f"{name}={value}")
    return ", ".join(found)


def wrapped(sentence: str, label: str) -> list[str]:
    """Returns a sentence in lines of at most `WIDTH`, indented after its label."""
    return textwrap.wrap(sentence, WIDTH, initial_indent=label, subsequent_indent=" " * len(label))
