"""Scaling experiments: one size grows, the others stay, and how time follows tells what binds.

    warpwave bench --scale blocks|seqlen|head_dim|batch

More heads of one length add blocks that all do the same: while time stays, SMs were idle; from where it grows with the
blocks, all are busy. Longer sequences multiply work by the square and bytes by the length: an exponent of 2 is
computing, of 1 moving bytes, of 0 a cost that no size changes. A wider head adds work and bytes alike, and a larger
batch everything. Exponents are fitted with 95 % intervals, over the sizes that the last kernel ran behind the flat
part: across two kernels or two causes there is no law. The rates reached at the largest size settle which resource it
is where the exponents of two agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.records import Measurement
from warpwave.workbench.bench.table import Table
from warpwave.workbench.bench.workloads import Case, Suite, case_name
from warpwave.workbench.model.fitting import PowerLaw, line, power_law
from warpwave.workbench.model.roofline import Rates, figure, product_path, us

AXES = ("blocks", "seqlen", "head_dim", "batch")
FLAT = 0.25  # an exponent below this is no growth
BUSY = 0.4  # share of a data sheet's or measured rate from which on a resource is what binds
STEEP = 0.5  # an exponent above the work's by more is not the work
FIXED = 0.5  # share of a time that no size changes, from which on it is the cause
CAUSES = {
    "idle SMs": "SMs were idle: what was added ran beside what was there",
    "launch": "a cost that no size changes: the launch, or the first and last wave",
    "bandwidth": "bytes: the memory is what binds",
    "L2": "bytes: they lie in L2, and L2 is what binds",
    "arithmetic": "products: the units that multiply are what binds",
    "cache": "more than the work: something leaves a cache, or is done again",
    "latency": "the loop itself: it grows with the work, and no unit is near its rate",
}


@dataclass(frozen=True)
class Point:
    """One size of an experiment.

    Attributes:
        size: along the axis.
        time_us: median.
        flops, bytes: of the call, at the least.
        blocks: that the kernel launches; 0 where nobody says.
        kernel: of ours that ran; empty for others.
        hot: whether the inputs could stay in L2 from one call to the next.
    """

    size: float
    time_us: float
    flops: float
    bytes: float
    blocks: int = 0
    kernel: str = ""
    hot: bool = False


@dataclass(frozen=True)
class Scaling:
    """What an experiment says.

    Attributes:
        axis, contender: what grew, and who was timed.
        points: by size.
        law: the exponent of time from `since` on.
        since: the first size of the last kernel that is not of a flat part; the first of all where that leaves fewer
            than three.
        steps: exponent from each size to the next.
        of_flops, of_bytes: the exponents of work and bytes over the same sizes as `law`.
        begin_cause, end_cause: what binds at the smallest sizes and at the largest: keys of `CAUSES`.
        turn: the size from which `end_cause` binds; None where one cause binds throughout.
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
        whole = self.since == self.points[0].size
        said = f"{self.contender}: time grows with {self.axis}^{self.law}{'' if whole else f' from {self.since:g} on'} "
        said += f"(work ^{self.of_flops:.2f}, bytes ^{self.of_bytes:.2f}). {self._kernels}"
        if self.turn is None:
            return f"{said}{'Throughout' if whole else 'There'}, {CAUSES[self.end_cause]} ({self.why})"
        return (
            f"{said}Up to {self.turn:g}, {CAUSES[self.begin_cause]}; from there on, {CAUSES[self.end_cause]} "
            f"({self.why})"
        )

    @property
    def _kernels(self) -> str:
        """Who ran which sizes, where it was not one throughout."""
        runs: list[tuple[str, float, float]] = []
        for p in self.points:
            first = runs.pop()[1] if runs and runs[-1][0] == p.kernel else p.size
            runs.append((p.kernel, first, p.size))
        if len(runs) < 2:
            return ""
        said = (f"{name or 'another'} at {a:g}" + ("" if a == b else f" to {b:g}") for name, a, b in runs)
        return f"It ran {', '.join(said)}. "


def suite(axis: str, *, on_cpu: bool, num_sms: int = 0) -> Suite:
    """The cases of one experiment, small enough for a CPU or large enough for a GPU.

    Args:
        axis: one of `AXES`.
        on_cpu: whether a CPU will time them.
        num_sms: of the GPU, so that the blocks pass it.
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
    """Where a problem stands on an axis; of "blocks", its heads, each with as many blocks as any other."""
    return float(
        {
            "blocks": problem.batch * problem.num_heads_q,
            "seqlen": problem.seqlen_q,
            "head_dim": problem.head_dim,
            "batch": problem.batch,
        }[axis]
    )


def points(axis: str, measurements: Sequence[Measurement], gpu: Any = None) -> dict[str, list[Point]]:
    """Contender -> its points by size; what was not timed is left out."""
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
        point = Point(size, m.timing.median_us, m.problem.flops, m.problem.compulsory_bytes, count, ran, hot)
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
    """What the times of one contender say; None with fewer than three sizes.

    Args:
        rates: of the machine, for the shares reached at the largest size.
        peak_tflops: of the path its products take.
        num_sms: of the GPU; 0 where unknown.
    """
    if len({p.size for p in measured}) < 3:
        return None
    pts = sorted(measured, key=lambda p: p.size)
    steps = tuple(power_law([a.size, b.size], [a.time_us, b.time_us]).exponent for a, b in pairwise(pts))
    flat = next((i for i, step in enumerate(steps) if step >= FLAT), len(steps))
    lawful = _lawful(pts, flat)
    sizes = [p.size for p in lawful]
    law = power_law(sizes, [p.time_us for p in lawful])
    of_flops, of_bytes = (power_law(sizes, [getattr(p, name) for p in lawful]).exponent for name in ("flops", "bytes"))
    end, why = _end_cause(pts, steps, of_flops, of_bytes, rates, peak_tflops, num_sms)
    turn, begin = None, end
    if 0 < flat < len(steps):
        turn = pts[flat].size
        begin = _flat_cause(pts[: flat + 1], num_sms)
    return Scaling(axis, contender, tuple(pts), law, lawful[0].size, steps, of_flops, of_bytes, begin, end, turn, why)


def _lawful(pts: Sequence[Point], flat: int) -> Sequence[Point]:
    """The points that one law can hold for: of the kernel that ran the largest size, behind the flat part."""
    own = next((i for i in range(len(pts) - 1, 0, -1) if pts[i - 1].kernel != pts[-1].kernel), 0)
    enough = [first for first in (max(own, flat if flat < len(pts) - 1 else 0), own) if len(pts) - first >= 3]
    return pts[enough[0] :] if enough else pts


def _flat_cause(flat: Sequence[Point], num_sms: int) -> str:
    """Why times stay although work grows: idle SMs where blocks were added below their number, else a fixed cost."""
    grows = flat[-1].blocks > flat[0].blocks
    return "idle SMs" if grows and num_sms and flat[0].blocks < num_sms else "launch"


def _share(part: float) -> str:
    """Of a rate that was measured; a call that goes faster has shown that rate to be too low, and is no share of it."""
    return f"{part:.0%}" if part <= 1 else "more than all"


def _end_cause(
    pts: Sequence[Point],
    steps: Sequence[float],
    of_flops: float,
    of_bytes: float,
    rates: Rates | None,
    peak_tflops: float | None,
    num_sms: int,
) -> tuple[str, str]:
    last = pts[-1]
    if all(step < FLAT for step in steps):
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
    if steps[-1] > of_work + STEEP:
        return "cache", f"the last step grows ^{steps[-1]:.2f} where the work grows ^{of_work:.2f}; {reached}"
    if max(memory, products) >= BUSY:
        return ("arithmetic" if memory <= products else "L2" if in_l2 else "bandwidth"), reached
    if num_sms and 0 < last.blocks < num_sms:
        return "idle SMs", f"{last.blocks} blocks on {num_sms} SMs at the largest; {reached}"
    try:
        start, _ = line([p.flops for p in pts], [p.time_us for p in pts])
    except ValueError:
        start = 0.0
    if start >= FIXED * last.time_us:
        return "launch", f"{us(start)} of {us(last.time_us)} are there whatever the work; {reached}"
    if peak_tflops or (rates is not None and rates.memory_gbps):
        return "latency", reached
    # No rate is known: the exponent alone speaks, where work and bytes differ in it.
    tail = steps[-1]
    if abs(of_flops - of_bytes) > 0.4:
        return ("arithmetic" if abs(tail - of_flops) <= abs(tail - of_bytes) else "bandwidth"), (
            f"the last step grows ^{tail:.2f}; {reached}; no rate of this machine is known"
        )
    return "latency", f"{reached}; no rate of this machine is known: `warpwave roof` measures them"


def table(found: Sequence[Scaling]) -> Table:
    """A row a size, a column a contender; the verdicts below."""
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
    """Every contender of an experiment."""
    found = []
    for name, line_ in points(axis, measurements, gpu).items():
        problem = next(m.problem for m in measurements if m.contender == name)
        path = None if rates is None else product_path(problem, rates)
        peak = None if path is None else path.useful_tflops
        sms = 0 if gpu is None or gpu.is_cpu else gpu.num_sms
        one = judge(axis, name, line_, rates=rates, peak_tflops=peak, num_sms=sms)
        if one is not None:
            found.append(one)
    return found
