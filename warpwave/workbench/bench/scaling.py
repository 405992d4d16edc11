"""Scaling experiments: one size grows, the others stay fixed, and the growth of time shows what binds.

    warpwave bench --scale blocks|seqlen|head_dim|batch

More heads of one length add equal blocks: while the time stays flat, SMs are idle; once it grows with the blocks, all
SMs are busy. With longer sequences, work grows with the square of the length and bytes with the length: an exponent of
2 means arithmetic, of 1 memory traffic, of 0 a fixed cost. A wider head adds work and bytes in proportion, and a larger
batch adds everything in proportion. Exponents are fitted with 95 % intervals, over the sizes after the flat part that
the last kernel ran: no law holds across two kernels or two causes. A resource binds only if its rate is reached at the
largest size. A conclusion from the growth alone needs intervals of the times, so at least 6 rounds. Otherwise the cause
is undecided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.records import Measurement
from warpwave.workbench.bench.table import Table
from warpwave.workbench.bench.timing import median_interval
from warpwave.workbench.bench.workloads import Case, Suite, case_name
from warpwave.workbench.model.fitting import PowerLaw, line, power_law
from warpwave.workbench.model.roofline import Rates, figure, product_path, us

AXES = ("blocks", "seqlen", "head_dim", "batch")
FLAT = 0.25  # an exponent below this counts as flat, and exponents that differ by less agree
BUSY = 0.4  # a resource binds from this share of its rate on, by the data sheet or as measured
STEEP = 0.5  # an exponent that exceeds the work's by more is not explained by the work
FIXED = 0.5  # a fixed cost is the cause from this share of the time on
CAUSES = {
    "idle SMs": "SMs were idle: the added blocks ran in parallel",
    "launch": "a fixed cost: the launch, or the first and last wave",
    "bandwidth": "bytes: memory bandwidth binds",
    "L2": "bytes: they stay in L2, and its bandwidth binds",
    "arithmetic": "products: the multiply units bind",
    "cache": "more than the work: data leaves a cache, or work is repeated",
    "latency": "latency: time grows with the work, and no unit is near its rate",
    "undecided": "what binds is undecided",
}


@dataclass(frozen=True)
class Point:
    """One size of an experiment.

    Attributes:
        size: the value on the axis.
        time_us: median time.
        flops, bytes: the call's minimum.
        blocks: blocks that the kernel launches; 0 if unknown.
        kernel: our kernel that ran; empty for peers.
        hot: whether the inputs could stay in L2 between calls.
        spread: half the 95 % interval of the time, as a share of it; None if there were too few rounds for one.
    """

    size: float
    time_us: float
    flops: float
    bytes: float
    blocks: int = 0
    kernel: str = ""
    hot: bool = False
    spread: float | None = 0.0


@dataclass(frozen=True)
class Scaling:
    """The result of an experiment for one contender.

    Attributes:
        axis, contender: the size that grew, and the contender.
        points: the points, ordered by size.
        law: the exponent of time from `since` on.
        since: the first size of the last kernel after the flat part; the first size of all if fewer than three would
            remain.
        steps: exponent from each size to the next.
        of_flops, of_bytes: the exponents of work and bytes over the same sizes as `law`.
        begin_cause, end_cause: what binds at the smallest and at the largest sizes, keys of `CAUSES`.
        turn: the size from which `end_cause` binds; None if one cause binds throughout.
        why: the arithmetic.
    """

    axis: str
    contender: str
    points: tuple[Point, ...]
    law: PowerLaw
    since: float
    steps: tuple[float, ...]
    of_flops: float
    of_bytes: float
    begin_cause: str
    end_cause: str
    turn: float | None
    why: str

    @property
    def sentence(self) -> str:
        """The verdict."""
        whole, last = self.since == self.points[0].size, self.points[-1].size
        agree = self.law.half <= FLAT  # otherwise no cause holds at all sizes of the law
        said = f"{self.contender}: time grows with {self.axis}^{self.law}{'' if whole else f' from {self.since:g} on'} "
        said += f"(work ^{self.of_flops:.2f}, bytes ^{self.of_bytes:.2f}). {self._kernels}"
        if self.turn is None:
            where = f"At {last:g}" if not agree else "Throughout" if whole else "There"
            return f"{said}{where}, {CAUSES[self.end_cause]} ({self.why})"
        where = "from there on" if agree else f"at {last:g}"
        return f"{said}Up to {self.turn:g}, {CAUSES[self.begin_cause]}; {where}, {CAUSES[self.end_cause]} ({self.why})"

    @property
    def _kernels(self) -> str:
        """Returns which kernel ran which sizes; empty if one kernel ran them all."""
        runs: list[tuple[str, float, float]] = []
        for p in self.points:
            first = runs.pop()[1] if runs and runs[-1][0] == p.kernel else p.size
            runs.append((p.kernel, first, p.size))
        if len(runs) < 2:
            return ""
        said = (f"{name or 'another'} at {a:g}" + ("" if a == b else f" to {b:g}") for name, a, b in runs)
        return f"It ran {', '.join(said)}. "


def suite(axis: str, *, on_cpu: bool, num_sms: int = 0) -> Suite:
    """Returns the suite of one experiment, sized for a CPU or a GPU.

    Args:
        axis: one of `AXES`.
        on_cpu: whether a CPU will run it.
        num_sms: the GPU's number of SMs, which the blocks exceed at the largest sizes.
    """
    base: dict[str, Any] = {"head_dim": 64, "heads": 2 if on_cpu else 16, "seqlen": 128 if on_cpu else 1024, "batch": 1}
    if axis == "blocks":
        most = 32 if on_cpu else 8 * max(num_sms, 64)
        values = [{"heads": 2**i, "seqlen": 64} for i in range(12) if 2**i <= most]
    elif axis == "seqlen":
        lengths = (64, 128, 256, 512, 1024) if on_cpu else (128, 256, 512, 1024, 2048, 4096, 8192)
        values = [{"seqlen": s} for s in lengths]
    elif axis == "head_dim":
        values = [{"head_dim": d} for d in (16, 32, 64, 128, 256)]
    elif axis == "batch":
        values = [{"batch": 2**i} for i in range(5 if on_cpu else 8)]
    else:
        raise ValueError(f"axis must be one of {', '.join(AXES)}, got {axis!r}")
    cases = []
    for value in values:
        size = base | value
        problem = AttentionProblem(
            batch=size["batch"],
            seqlen_q=size["seqlen"],
            seqlen_k=size["seqlen"],
            num_heads_q=size["heads"],
            num_heads_kv=size["heads"],
            head_dim=size["head_dim"],
            head_dim_v=size["head_dim"],
            dtype="float32" if on_cpu else "bfloat16",
            softmax_scale=size["head_dim"] ** -0.5,
        )
        cases.append(Case(case_name(problem), problem))
    return Suite(f"scale {axis}", f"time as {axis} grows", tuple(cases))


def size_of(axis: str, problem: AttentionProblem) -> float:
    """Returns a problem's value on an axis; for "blocks" the number of heads, which have equal numbers of blocks."""
    return float(
        {
            "blocks": problem.batch * problem.num_heads_q,
            "seqlen": problem.seqlen_q,
            "head_dim": problem.head_dim,
            "batch": problem.batch,
        }[axis]
    )


def points(axis: str, measurements: Sequence[Measurement], gpu: Any = None) -> dict[str, list[Point]]:
    """Returns contender -> its timed points, ordered by size."""
    from warpwave import dispatch
    from warpwave.workbench.explain.recorded_time import config_of

    kernels = {kernel.NAME: kernel for kernel in dispatch.KERNELS}
    found: dict[str, list[Point]] = {}
    for m in measurements:
        if m.timing is None or m.is_yardstick:
            continue
        count = 0
        if m.is_ours and gpu is not None and m.kernel in kernels and m.config is not None:
            kernel = kernels[m.kernel]
            cost = kernel.cost(m.problem, gpu, config_of(kernel, m.config))
            count = cost.items or cost.blocks
        size, hot = size_of(axis, m.problem), not m.timing.l2_flushed and m.timing.input_sets == 1
        ran = (m.kernel or "") if m.is_ours else ""
        time, interval = m.timing.median_us, median_interval(m.timing.samples_us)
        spread = None if interval is None else (interval[1] - interval[0]) / 2 / time
        point = Point(size, time, m.problem.flops, m.problem.compulsory_bytes, count, ran, hot, spread)
        found.setdefault(m.contender, []).append(point)
    return {name: sorted(line, key=lambda p: p.size) for name, line in found.items()}


def judge(
    axis: str,
    contender: str,
    measured: Sequence[Point],
    *,
    rates: Rates | None = None,
    peak_tflops: float | None = None,
    num_sms: int = 0,
) -> Scaling | None:
    """Interprets the times of one contender; None with fewer than three sizes.

    Args:
        rates: the machine's rates, for the shares reached at the largest size.
        peak_tflops: peak of the path that its products take.
        num_sms: the GPU's number of SMs; 0 if unknown.
    """
    if len({p.size for p in measured}) < 3:
        return None
    pts = sorted(measured, key=lambda p: p.size)
    steps = tuple(power_law([a.size, b.size], [a.time_us, b.time_us]).exponent for a, b in pairwise(pts))
    errors = tuple(_step_error(a, b) for a, b in pairwise(pts))
    # A step whose time is not known well is not flat, so a cause of flat times needs intervals.
    flat = next((i for i in range(len(steps)) if steps[i] + errors[i] >= FLAT), len(steps))
    lawful = _lawful(pts, flat)
    sizes = [p.size for p in lawful]
    law = power_law(sizes, [p.time_us for p in lawful])
    of_flops, of_bytes = (power_law(sizes, [getattr(p, name) for p in lawful]).exponent for name in ("flops", "bytes"))
    end, why = _end_cause(pts, steps, errors, law, of_flops, of_bytes, rates, peak_tflops, num_sms)
    turn, begin = None, end
    if 0 < flat < len(steps):
        turn = pts[flat].size
        begin = _flat_cause(pts[: flat + 1], num_sms)
    return Scaling(axis, contender, tuple(pts), law, lawful[0].size, steps, of_flops, of_bytes, begin, end, turn, why)


def _lawful(pts: Sequence[Point], flat: int) -> Sequence[Point]:
    """Returns the points that can share one law: those after the flat part, by the kernel of the largest size."""
    own = next((i for i in range(len(pts) - 1, 0, -1) if pts[i - 1].kernel != pts[-1].kernel), 0)
    enough = [first for first in (max(own, flat if flat < len(pts) - 1 else 0), own) if len(pts) - first >= 3]
    return pts[enough[0] :] if enough else pts


def _flat_cause(flat: Sequence[Point], num_sms: int) -> str:
    """Returns why times stay flat: idle SMs if the added blocks are fewer than the SMs, else a fixed cost."""
    grows = flat[-1].blocks > flat[0].blocks
    return "idle SMs" if grows and num_sms and flat[0].blocks < num_sms else "launch"


def _share(part: float) -> str:
    """Returns a share of a measured rate as text. A share above 1 shows that the measured rate is too low."""
    return f"{part:.0%}" if part <= 1 else "more than all"


def _step_error(a: Point, b: Point) -> float:
    """Returns how far the exponent from one size to the next may be off; infinite if the times have no intervals."""
    if a.spread is None or b.spread is None:
        return math.inf
    return (a.spread + b.spread) / math.log(b.size / a.size)


def _unreliable(errors: Sequence[float]) -> str:
    """Returns why the steps do not support a conclusion; "" if they do."""
    most = max(errors)
    if math.isinf(most):
        return "fewer than 6 rounds give no interval of the growth"
    return f"the growth of a step is known to +- {most:.2f} only, which more rounds narrow" if most > FLAT else ""


def _fits(law: PowerLaw, of_flops: float, of_bytes: float) -> str:
    """Returns which growth lies in the interval of the law, in words."""
    work, size = (abs(law.exponent - exponent) <= law.half for exponent in (of_flops, of_bytes))
    named = {(True, False): "that of the work", (False, True): "that of the bytes", (True, True): "either"}
    return f"the growth fits {named.get((work, size), 'neither the work nor the bytes')}"


def _end_cause(
    pts: Sequence[Point],
    steps: Sequence[float],
    errors: Sequence[float],
    law: PowerLaw,
    of_flops: float,
    of_bytes: float,
    rates: Rates | None,
    peak_tflops: float | None,
    num_sms: int,
) -> tuple[str, str]:
    last = pts[-1]
    if all(step + error < FLAT for step, error in zip(steps, errors, strict=True)):
        cause = _flat_cause(pts, num_sms)
        return cause, f"{us(pts[0].time_us)} to {us(last.time_us)} for {last.flops / pts[0].flops:.3g} x the work"
    gbps, tflops = last.bytes / last.time_us * 1e-3, last.flops / last.time_us * 1e-6
    in_l2 = rates is not None and last.hot and last.bytes <= rates.cache_bytes
    level = None if rates is None else rates.l2_gbps if in_l2 else rates.memory_gbps
    memory = gbps / level if level else 0.0
    products = tflops / peak_tflops if peak_tflops else 0.0
    reached = f"{figure(tflops)} TFLOP/s"
    reached += f", {_share(products)} of the rate" if peak_tflops else ""
    reached += f"; {figure(gbps)} GB/s" + (" out of L2" if in_l2 else "") + (f", {_share(memory)}" if memory else "")
    of_work = power_law([p.size for p in pts[-2:]], [p.flops for p in pts[-2:]]).exponent
    if steps[-1] - errors[-1] > of_work + STEEP:
        return "cache", f"the last step grows ^{steps[-1]:.2f} where the work grows ^{of_work:.2f}; {reached}"
    if max(memory, products) >= BUSY:
        return ("arithmetic" if memory <= products else "L2" if in_l2 else "bandwidth"), reached
    if num_sms and 0 < last.blocks < num_sms:
        return "idle SMs", f"{last.blocks} blocks on {num_sms} SMs at the largest; {reached}"
    if not (unreliable := _unreliable(errors)):
        try:
            start, _ = line([p.flops for p in pts], [p.time_us for p in pts])
        except ValueError:
            start = 0.0
        if start >= FIXED * last.time_us:
            return "launch", f"{us(start)} of {us(last.time_us)} do not depend on the work; {reached}"
        if peak_tflops or (rates is not None and rates.memory_gbps):
            return "latency", reached
    missing = "" if peak_tflops or level else "no rate of this machine is known: `warpwave roof` measures them"
    return "undecided", "; ".join(filter(None, (_fits(law, of_flops, of_bytes), reached, unreliable, missing)))


def table(found: Sequence[Scaling]) -> Table:
    """Returns a table with one row per size and one column per contender, and the verdicts as notes."""
    axis = found[0].axis
    sizes = sorted({p.size for s in found for p in s.points})
    rows = []
    for size in sizes:
        cells = []
        for s in found:
            index = next((i for i, p in enumerate(s.points) if p.size == size), None)
            step = "" if not index else f"^{s.steps[index - 1]:.2f}"
            cells += ["", ""] if index is None else [us(s.points[index].time_us), step]
        rows.append((f"{size:g}", *cells))
    heads = [cell for s in found for cell in (s.contender, "growth")]
    return Table(f"time as {axis} grows", (axis, *heads), rows, tuple(s.sentence for s in found))


def judged(axis: str, measurements: Sequence[Measurement], gpu: Any, rates: Rates | None) -> list[Scaling]:
    """Judges every contender of an experiment."""
    found = []
    for name, line_ in points(axis, measurements, gpu).items():
        problem = next(m.problem for m in measurements if m.contender == name)
        path = None if rates is None else product_path(problem, rates, gpu)
        peak = None if path is None else path.useful_tflops
        sms = 0 if gpu is None or gpu.is_cpu else gpu.num_sms
        one = judge(axis, name, line_, rates=rates, peak_tflops=peak, num_sms=sms)
        if one is not None:
            found.append(one)
    return found
