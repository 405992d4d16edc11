"""An explanation as text: sections in a fixed order, figures with their arithmetic."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from warpwave import dispatch
from warpwave.problem import DTYPE_BYTES
from warpwave.workbench.explain.backward_text import backward_sections
from warpwave.workbench.explain.sections import (
    config_notes,
    config_words,
    foreseen,
    kernel_section,
    losses,
    predicted,
    rates_of,
    table,
    verdict,
    wrapped,
)
from warpwave.workbench.hardware.occupancy import MULTIPROCESSORS
from warpwave.workbench.model.roofline import byte, estimated, figure, flop, uncounted, us

if TYPE_CHECKING:
    from warpwave.gpu import Gpu
    from warpwave.workbench.explain.accuracy import Accuracy
    from warpwave.workbench.explain.explanation import Explanation


def text(said: Explanation) -> str:
    """Returns the text; empty sections are left out."""
    sections = (
        list(_head(said)),
        list(_work(said)),
        list(_bounds(said)),
        list(kernel_section(said, f"KERNEL     {said.kernel}: what it computes and moves")),
        list(predicted(said, "PREDICTED  time on the device, and the losses between the bound and this time")),
        list(losses(said.losses, "LOSSES    ")),
        *map(list, backward_sections(said)),
        list(_memory(said)),
        list(_others(said)),
        list(_changes(said)),
    )
    whole = "\n\n".join("\n".join(lines) for lines in sections if lines)
    return in_words_of(said.gpu, whole)


def in_words_of(gpu: Gpu, text: str) -> str:
    """Returns a text with the maker's words for multiprocessors and matrix units."""
    if gpu.vendor != "amd":
        return text
    unit = MULTIPROCESSORS[gpu.arch].unit if gpu.arch in MULTIPROCESSORS else "CU"
    longer = len(unit) - len("SM")

    def renamed(found: re.Match[str]) -> str:
        padding = found[3] or ""  # of a column, which must keep its width
        return f"{'a ' if found[1] else ''}{unit}{found[2]}{padding[longer:]}"

    text = re.sub(r"\b(an )?SM(s?)\b( {2,})?", renamed, text)
    return text.replace("tensor cores", "matrix cores")


def _head(said: Explanation) -> Iterator[str]:
    gpu = said.gpu
    sms = f", {gpu.num_sms} SMs" if gpu.num_sms else ""
    yield f"call       {said.problem.describe()}"
    yield f"device     {gpu.name}" + ("" if gpu.is_cpu or gpu.name == gpu.arch else f" ({gpu.arch})") + sms
    if said.kernel is None:
        yield "kernel     none"
    else:
        values = config_words(said.config)
        yield f"kernel     {said.kernel}" + (f", {values} ({said.config_source})" if values else "")
        if said.backward is not None:
            yield f"gradients  {said.backward.kernel}"
        module = next(kernel for kernel in dispatch.KERNELS if kernel.NAME == said.kernel)
        for note in config_notes(module, said):
            yield from wrapped(note, "config     ")
    yield from wrapped(verdict(said), "bound by   ")
    if said.prediction is not None:
        yield from wrapped(foreseen(said.prediction), "predicted  ")
    elif said.problem.dropout_p and said.kernel is not None:
        yield "predicted  none: the model does not count the random numbers of dropout"
    if said.accuracy is not None:
        yield from wrapped(_accuracy(said.accuracy), "accuracy   ")


def _accuracy(accuracy: Accuracy) -> str:
    text = f"precision {accuracy.asked}: {accuracy.arithmetic}, {accuracy.description}; relative error of out at most "
    text += f"{accuracy.promised:.2g}, for inputs with up to 3 x the spread of normal ones"
    if accuracy.measured is not None:
        text += f"; {accuracy.measured:.2g} measured on {accuracy.rows} rows of these tensors"
    others = ", ".join(f"{name} {error:.2g}" for name, error in accuracy.others)
    return f"{text}. {f'Other modes, cheapest first: {others}. ' if others else ''}{accuracy.note}"


def _work(said: Explanation) -> Iterator[str]:
    problem = said.problem
    doubt = f" (estimated: {why})" if (why := uncounted(problem)) else ""
    everything = problem.num_heads_q * sum(sq * sk for sq, sk in problem.items())
    pairs, rows, keys = problem.visible_pairs, problem.rows * problem.num_heads_q, problem.keys_needed
    queries = problem.queries_needed
    yield "WORK       the minimum for any implementation"
    yield f"  pairs    {pairs:,} of {everything:,} (query, key) pairs are visible{doubt}"
    sizes = [DTYPE_BYTES[d] for d in (problem.dtype, problem.dtype_of_k, problem.dtype_of_v, problem.dtype_of_out)]
    of_scores, of_values = queries * sizes[0] + keys * sizes[1], keys * sizes[2] + rows * sizes[3]
    for name, operands, width, cells in (
        ("QK^T", "q and k", problem.head_dim, of_scores),
        ("PV", "v and out", problem.head_dim_v, of_values),
    ):
        moved = cells * width
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
    doubt = ", estimated" if estimated(said.problem, said.roofline) else ""
    yield f"AT LEAST   for any implementation{doubt}; resources work at the same time, so the longest time is the bound"
    yield from table(said, of_kernel=False)
    yield from rates_of(said)


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
            yield from wrapped(listed, f"  able{position}: ")
    for name, why in said.passed_over.items():
        if name != said.kernel:
            yield from wrapped("; ".join(why), f"  {name} is passed over: ")


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
            yield from wrapped(sentence, f"  {i}. ")
