"""An explanation as text: sections in a fixed order, figures with their arithmetic."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from warpwave.problem import DTYPE_BYTES
from warpwave.workbench.model.losses import recommendation
from warpwave.workbench.model.roofline import Bound, Roofline, byte, figure, flop, us
from warpwave.workbench.model.steps import LOSSES
from warpwave.workbench.terminal import columns

if TYPE_CHECKING:
    from warpwave.workbench.explain.accuracy import Accuracy
    from warpwave.workbench.explain.explanation import Explanation
    from warpwave.workbench.model.predict import Prediction

WIDTH = 110


def text(said: Explanation) -> str:
    """Returns the text; empty sections are left out."""
    sections = (
        list(_head(said)),
        list(_work(said)),
        list(_bounds(said)),
        list(_kernel(said)),
        list(_predicted(said)),
        list(_losses(said)),
        list(_memory(said)),
        list(_others(said)),
        list(_changes(said)),
    )
    whole = "\n\n".join("\n".join(lines) for lines in sections if lines)
    return re.sub(r"\bSM(s?)\b", r"CU\1", whole) if said.gpu.vendor == "amd" else whole


def _head(said: Explanation) -> Iterator[str]:
    gpu = said.gpu
    sms = f", {gpu.num_sms} SMs" if gpu.num_sms else ""
    yield f"call       {said.problem.describe()}"
    yield f"device     {gpu.name}" + ("" if gpu.is_cpu or gpu.name == gpu.arch else f" ({gpu.arch})") + sms
    if said.kernel is None:
        yield "kernel     none"
    else:
        values = ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(said.config).items())
        yield f"kernel     {said.kernel}" + (f", {values} ({said.config_source})" if values else "")
        if said.gradients:
            yield f"gradients  {said.gradients}"
        for note in _notes(said):
            yield from _wrapped(note, "config     ")
    yield from _wrapped(_verdict(said), "bound by   ")
    if said.prediction is not None:
        yield from _wrapped(_foreseen(said.prediction), "predicted  ")
    if said.accuracy is not None:
        yield from _wrapped(_accuracy(said.accuracy), "accuracy   ")


def _foreseen(p: Prediction) -> str:
    """Returns the predicted time, its ratio to the bound, and the largest steps between them."""
    largest = sorted(((f, name) for name, f in p.factors.items() if f >= 1.05), reverse=True)[:2]
    most = " and ".join(f"{name} (x {factor:.2f})" for factor, name in largest)
    return f"{us(p.time_us)}, {p.time_us / p.bound_us:.3g} x the bound of the work" + (
        f"; the largest losses are {most}" if most else ""
    )


def _notes(said: Explanation) -> list[str]:
    """Returns the kernel's notes about its config, from its `notes(problem, gpu, config)` if it has one."""
    from warpwave import dispatch

    kernel = next(kernel for kernel in dispatch.KERNELS if kernel.NAME == said.kernel)
    notes: list[str] = kernel.notes(said.problem, said.gpu, said.config) if hasattr(kernel, "notes") else []
    return notes


def _accuracy(accuracy: Accuracy) -> str:
    text = f"precision {accuracy.asked}: {accuracy.arithmetic}, {accuracy.description}; relative error of out at most "
    text += f"{accuracy.promised:.2g}, for inputs with up to 3 x the spread of normal ones"
    if accuracy.measured is not None:
        text += f"; {accuracy.measured:.2g} measured on {accuracy.rows} rows of these tensors"
    others = ", ".join(f"{name} {error:.2g}" for name, error in accuracy.others)
    return f"{text}. {f'Other modes, cheapest first: {others}. ' if others else ''}{accuracy.note}"


def _verdict(said: Explanation) -> str:
    known = said.roofline
    if known is None or known.binding is None:
        return said.rates_missing or "unknown: no rate of this device is known"
    least = known.of_problem
    binding = least.binding
    assert binding is not None
    if said.flops == 0:
        return "nothing: no key is visible to any query"
    any_ = "no implementation with this accuracy" if said.problem.dtype == "float32" else "no implementation"
    sentence = f"{binding.resource}: {any_} takes less than {us(binding.time_us)} ({known.rates.name})"
    sentence += f", {_rate_allowed(said, binding.time_us)}"
    launch = None if said.measured is None else said.measured.of("launch")
    if launch is not None and launch.time_us > known.time_us:
        return f"the launch: {us(launch.time_us)} (measured); the work itself needs at least {us(known.time_us)}"
    if launch is None and least.time_us < 1 and not said.gpu.is_cpu:
        return f"{sentence}; the launch takes longer (`warpwave roof` measures it, no data sheet states it)"
    if said.kernel is not None and known.time_us > 1.05 * least.time_us:
        sentence += f"; {said.kernel} takes at least {us(known.time_us)}, see below"
    return sentence


def _rate_allowed(said: Explanation, time_us: float) -> str:
    tflops, gbps = said.flops / time_us * 1e-6, said.compulsory_bytes / time_us * 1e-3
    return f"which is {figure(tflops)} TFLOP/s and {figure(gbps)} GB/s"


def _work(said: Explanation) -> Iterator[str]:
    problem, size = said.problem, DTYPE_BYTES[said.problem.dtype]
    estimated = "" if problem.pairs_are_exact else " (estimated: the mask or the lengths were not read)"
    everything = problem.num_heads_q * sum(sq * sk for sq, sk in problem.items())
    pairs, rows, keys = problem.visible_pairs, problem.rows * problem.num_heads_q, problem.keys_needed
    yield "WORK       the minimum for any implementation"
    yield f"  pairs    {pairs:,} of {everything:,} (query, key) pairs are visible{estimated}"
    for name, operands, width in (("QK^T", "q and k", problem.head_dim), ("PV", "v and out", problem.head_dim_v)):
        moved = (rows + keys) * width * size
        yield (
            f"  {name:8} {flop(2 * pairs * width)} over {byte(moved)} of {operands}: "
            f"{figure(2 * pairs * width / max(1, moved))} FLOP a byte"
        )
    known = said.roofline
    if known is not None and known.path and known.rates.memory_gbps:
        products = next((b for b in known.bounds if b.unit == "FLOP"), None)
        if products is not None and problem.flops:
            rate = products.rate * problem.flops / products.amount
            memory = known.rates.memory_gbps
            balance = f"{figure(rate * 1e3 / memory)} FLOP a byte = {figure(rate)} TFLOP/s / {figure(memory)} GB/s"
            yield f"  balance  {balance}; below that, memory binds before the products do"


def _bounds(said: Explanation) -> Iterator[str]:
    if said.roofline is None or not said.roofline.bounds:
        return
    yield "AT LEAST   for any implementation; resources work at the same time, so the longest time is the bound"
    yield from _table(said, of_kernel=False)


def _kernel(said: Explanation) -> Iterator[str]:
    cost = said.cost
    if cost is None or said.kernel is None:
        return
    yield f"KERNEL     {said.kernel}: what it computes and moves"
    yield from _table(said, of_kernel=True)
    if cost.blocks:
        sms = said.gpu.num_sms
        yield f"  grid     {cost.blocks:,} block{'s' if cost.blocks > 1 else ''}" + (
            f" on {sms} SMs, {cost.blocks / sms:,.3g} each" if sms else ""
        )
    moved = cost.read_bytes + cost.write_bytes
    yield (
        f"  work     {flop(cost.flops)} computed, {cost.flops / max(1, said.flops):,.3g} x the work; "
        f"{byte(moved)} read and written through the caches, {moved / max(1, said.compulsory_bytes):,.3g} x the "
        "minimum"
    )


def _predicted(said: Explanation) -> Iterator[str]:
    """Yields the time, its error bar, and each step from the bound that costs something."""
    p = said.prediction
    if p is None:
        return
    yield "PREDICTED  time on the device, and the losses between the bound and this time"
    rate = f"{figure(said.flops / p.time_us * 1e-6)} TFLOP/s"
    yield f"  time     {us(p.time_us)}, {rate}; nine in ten calls take between {us(p.low_us)} and {us(p.high_us)}"
    yield from _wrapped(p.validated, "  basis    ")
    if p.waves:
        yield (
            f"  waves    {p.waves:.3g} of {said.gpu.num_sms} SMs x {p.blocks_per_sm} block"
            f"{'s' * (p.blocks_per_sm > 1)} each, limited by {p.limit}"
        )
    for t in p.traffic:
        if t.level == "memory":
            yield f"  memory   {byte(t.bytes)} from and to memory, {t.redundancy:.3g} x the minimum"
        elif t.level == "L2":
            fits = "fits" if t.working_set <= t.capacity else "does not fit"
            yield (
                f"  L2       {byte(t.bytes)} requested, {t.redundancy:.3g} x the minimum; the working set of "
                f"{byte(t.working_set)} {fits} {byte(t.capacity)}"
            )
        else:
            label = {"shared memory": "smem", "registers": "regs"}[t.level]
            yield f"  {label:8} {byte(t.bytes)} a block, {byte(t.working_set)} of {byte(t.capacity)} an SM"
    if said.losses is None:
        yield from _steps([(name, f, p.times_us[name]) for name, f in p.factors.items()], p.bound_us)


def _steps(steps: list[tuple[str, float, float]], bound_us: float) -> list[str]:
    shown = [step for step in steps if step[1] >= 1.005 or step[0] == "remainder"]
    rows = [
        (name, us(after), f"x {factor:.3f}", LOSSES.get(name, "what the model did not predict"))
        for name, factor, after in shown
    ]
    return columns([("bound", us(bound_us)), *rows], right=(1,), indent="  ")


def _losses(said: Explanation) -> Iterator[str]:
    """Yields a measured time, split into losses."""
    split = said.losses
    if split is None:
        return
    yield f"LOSSES     measured {us(split.measured_us)} = {split.ratio:.3g} x the bound, the product of these factors"
    yield from _steps([(loss.name, loss.factor, loss.after_us) for loss in split.losses], split.bound_us)
    for yardstick in split.yardsticks:
        yield from _wrapped(
            f"{yardstick.share:.1%} of the {yardstick.name} bound, {us(yardstick.least_us)}: {yardstick.note}",
            "  share    ",
        )
    if split.largest is not None and (advice := recommendation(split.largest)):
        yield from _wrapped(advice, "  first    ")


def _table(said: Explanation, of_kernel: bool) -> Iterator[str]:
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


def _cell(bound: Bound | None, known: Roofline, of_kernel: bool) -> str:
    if bound is None:
        return "-"
    longest = known.of_problem.binding if not of_kernel else known.binding
    return us(bound.time_us) + (" *" if bound == longest and bound.time_us else "")


def _memory(said: Explanation) -> Iterator[str]:
    memory = said.memory
    if memory is None:
        return
    yield "MEMORY     before anything is allocated"
    parts = [f"out {byte(memory.out)}"] + [
        f"{name} {byte(size)}" for name, size in (("lse", memory.lse), ("workspace", memory.workspace)) if size
    ]
    how = "exactly" if memory.exact else "about"
    yield f"  inputs   {byte(memory.inputs)}"
    yield f"  peak     {how} {byte(memory.peak)} more: {', '.join(parts)}" + (
        "" if memory.workspace else "; no workspace"
    )
    if memory.gradients:
        yield (f"  backward {byte(memory.gradients)} of gradients, and at most {byte(memory.backward)} of workspace")
    have = said.gpu.memory_bytes
    if have and memory.inputs + memory.peak > have:
        yield f"  too much {byte(memory.inputs + memory.peak)} in all, and the device has {byte(have)}"


def _others(said: Explanation) -> Iterator[str]:
    refused = [f"  not {name}: {reason}" for name, why in said.reasons.items() for reason in why]
    able = [name for name, why in said.reasons.items() if not why]
    if refused or len(able) > 1 or (able and said.kernel is None):
        yield "OTHERS     in the order of preference"
        yield from refused
    place = able.index(said.kernel) if said.kernel in able else 0
    for names, where in ((able[:place], "before"), (able[place + (said.kernel is not None) :], "after")):
        if names:
            position = "" if said.kernel is None else f", {where} {said.kernel}"
            times = said.alternatives_us
            listed = ", ".join(f"{name} ({us(times[name])} predicted)" if name in times else name for name in names)
            yield from _wrapped(listed, f"  able{position}: ")
    for name, why in said.passed_over.items():
        if name != said.kernel:
            yield from _wrapped("; ".join(why), f"  {name} is passed over: ")


def _changes(said: Explanation) -> Iterator[str]:
    advice = list(said.advice)
    paths = []
    for path in said.near_misses:
        # A change that is both a near miss and advice is printed once, with its figures.
        change = path.changes[0][0].upper() + path.changes[0][1:]
        same = [i for i, sentence in enumerate(advice) if len(path.changes) == 1 and sentence.startswith(change)]
        if same:
            advice[same[0]] += f" {path.kernel} would then serve it."
        else:
            paths.append(f"{path}.")
    if paths or advice:
        yield "TO CHANGE"
        for i, sentence in enumerate((*paths, *advice), 1):
            yield from _wrapped(sentence, f"  {i}. ")


def _wrapped(sentence: str, label: str) -> list[str]:
    return textwrap.wrap(sentence, WIDTH, initial_indent=label, subsequent_indent=" " * len(label))
