"""Predicted time of one call by one kernel: its bound, and what is added on the way from the bound to the clock.

The model walks from the bound of `roofline` to a time in named steps (`LOSSES`), each of which takes one idealisation
away: the clock under load, padding, hidden pairs, idle SMs, traffic, exponentials that nothing hides, latency, filling,
launching. The time after the last step is the prediction, and the ratio of two neighbouring times is what that step
costs: `losses.py` holds a measurement against the same ladder.

Everything about a kernel comes from its own `cost`; constants that no shape tells come from `calibration.py`.
`docs/model.md` has the equations, what is not modelled, and how far predictions were off. Imports no torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from warpwave.calibration import (
    UNCALIBRATED,
    Calibration,
    Constants,
    calibrations,
    constant_of,
    worst_uncalibrated,
)
from warpwave.hardware.catalog import DataSheet, data_sheet
from warpwave.hardware.gpu import KIB, Gpu
from warpwave.hardware.occupancy import occupancy
from warpwave.kernels.cost import Cost
from warpwave.problem import AttentionProblem
from warpwave.roofline import FLOAT32_PATHS, Path, data_sheet_rates, fastest, product_path, roofline

# What is lost between the bound and a time, in the order in which the ladder climbs: name -> what it is.
LOSSES: dict[str, str] = {
    "clocks": "what power, clocks and instruction order leave of the data sheet's rates",
    "head padding": "products over columns that pad head_dim to what the tiles are made of",
    "hidden pairs": "pairs of edge tiles that the mask hides, computed all the same",
    "ragged tiles": "rows and keys beyond the end of a sequence, in its last tiles",
    "separate passes": "passes that wait for each other, and cannot overlap products with exponentials",
    "idle SMs": "SMs without a block, and the last wave",
    "traffic": "tiles read again through L2 and memory, where that takes longer than computing",
    "softmax": "exponentials and arithmetic on scores that products do not hide",
    "latency": "steps that wait for each other, with too few streams of instructions an SM to fill the wait",
    "fill": "first loads and last stores of each tile of queries",
    "launches": "launching, and the first wave",
}
STEP = {name: place for place, name in enumerate(LOSSES)}
ALL = len(LOSSES)
SMOOTH = 8.0  # exponent with which "as long as the longer of two" is rounded at the corner
SMEM_SLACK = 1.05  # kernels state an upper bound on shared memory, up to this much above what compiles
L2_BYTES_PER_CLOCK = 32  # of an SM, where nobody states or measured L2: 8.4 of the 8.0 TB/s measured on an H200
L2_SHARE = 0.8  # of L2 that a working set can hold before lines fall out
SCALAR_KERNELS = ("naive",)  # whose products run on the plain float32 units, whatever the dtype


@dataclass(frozen=True)
class Machine:
    """A card as the model sees it: rates at their best, and the share of them that is had under load.

    Attributes:
        sheet: its data sheet.
        constants: of the kernel that runs.
        calibration: where they come from; None where the card has none.
        fitted: whether the constants are this kernel's own on this card.
    """

    sheet: DataSheet
    constants: Constants
    calibration: Calibration | None
    fitted: bool

    @property
    def memory_gbps(self) -> float:
        return self.sheet.bandwidth_gbps * (0.9 if self.calibration is None else self.calibration.memory)

    @property
    def l2_gbps(self) -> float:
        if self.calibration is not None and self.calibration.l2_gbps is not None:
            return self.calibration.l2_gbps
        return self.sheet.l2_gbps or self.sheet.num_sms * L2_BYTES_PER_CLOCK * self.sheet.boost_clock_mhz * 1e-3

    @property
    def launch_us(self) -> float:
        return 0.8 if self.calibration is None else self.calibration.launch_us


def machine(sheet: DataSheet, kernel: str, loop: str = "", calibration: Calibration | None = None) -> Machine:
    """The card with the constants of a kernel's loop, or of the kernel; round numbers where it has none.

    Args:
        loop: `Cost.loop`.
        calibration: of the card; the one that comes with the package if None.
    """
    calibration = calibration or calibrations().get(sheet.key)
    known = {} if calibration is None else calibration.kernels
    key = key_of(kernel, loop)
    constants = known.get(key, known.get(kernel, UNCALIBRATED))
    return Machine(sheet, constants, calibration, key in known or kernel in known)


def key_of(kernel: str, loop: str) -> str:
    """The key of `Calibration.kernels` for one of a kernel's loops."""
    return f"{kernel} {loop}" if loop else kernel


@dataclass(frozen=True)
class Traffic:
    """Bytes of one level of memory, and how often the same bytes cross it.

    Attributes:
        level: `"L2"`, `"memory"`, `"registers"`, `"shared memory"`.
        bytes: that cross it; of registers and shared memory, that a block holds.
        redundancy: over the compulsory bytes; 1 is the least. Of registers and shared memory, the share taken.
        working_set: what has to stay in it for that.
        capacity: what it holds.
    """

    level: str
    bytes: float
    redundancy: float
    working_set: float
    capacity: float


@dataclass(frozen=True)
class Prediction:
    """The time of a call by one kernel, and how it comes about.

    Attributes:
        kernel: its name.
        gpu: key of the data sheet.
        time_us: predicted, on the device, the host left out.
        low_us, high_us: nine in ten calls lay within, where the model was checked.
        times_us: loss -> the time with it and all before it; begins with `"bound"`, ends at `time_us`.
        waves: rounds of blocks over the card, the last counted by what it fills.
        blocks_per_sm: that run together.
        limit: what allows no more of them: `"shared memory"`, ..., `"launch"` where the kernel asks for no more,
            `"grid"` where there are no more.
        traffic: by level.
        validated: what the error bar rests on, in words.
        points: measurements on this very card and kernel behind it; 0 is none.
    """

    kernel: str
    gpu: str
    time_us: float
    low_us: float
    high_us: float
    times_us: Mapping[str, float]
    waves: float
    blocks_per_sm: int
    limit: str
    traffic: tuple[Traffic, ...]
    validated: str
    points: int

    @property
    def bound_us(self) -> float:
        return self.times_us["bound"]

    @property
    def factors(self) -> dict[str, float]:
        """Loss -> the ratio it costs; their product is `time_us` over the bound, exactly."""
        names = list(self.times_us)
        return {name: self.times_us[name] / self.times_us[before] for before, name in pairwise(names)}


def predict(
    problem: AttentionProblem,
    kernel: Any,
    config: Any,
    gpu: Gpu,
    *,
    hot: bool = False,
    graph: bool = False,
    sheet: DataSheet | None = None,
    registers: int | None = None,
    smem_bytes: int | None = None,
    of: Machine | None = None,
    without: str = "",
) -> Prediction | None:
    """The time of a call, or None where the card has no data sheet or the call no work.

    Args:
        problem: the call.
        kernel, config: the module that serves it and one of its configs.
        gpu: where.
        hot: the same tensors were used by the call before.
        graph: a CUDA graph replays the call, so that nobody waits for the host.
        sheet: the card's data sheet; looked up if None.
        registers, smem_bytes: of the compiled kernel, in place of what its `cost` estimates.
        of: the card with other constants, for fitting them.
        without: one of `ABLATIONS`: the time if the kernel's loop left that out.
    """
    sheet = sheet or data_sheet(gpu)
    if sheet is None or gpu.is_cpu or problem.flops == 0:
        return None
    cost = kernel.cost(problem, gpu, config)
    where = of or machine(sheet, kernel.NAME, cost.loop)
    if registers is not None or smem_bytes is not None:
        cost = replace(cost, registers=registers or cost.registers, smem_bytes=smem_bytes or cost.smem_bytes)
    walk = _Walk(problem, kernel, config, gpu, cost, where, hot, without, graph)
    times = walk.ladder()
    time_us = times["launches"]
    low, high, words, points = _bar(where, kernel.NAME, time_us, times["bound"])
    return Prediction(
        kernel.NAME,
        sheet.key,
        time_us,
        low,
        high,
        times,
        walk.waves,
        walk.resident[0],
        walk.resident[1],
        tuple(walk.traffic()),
        words,
        points,
    )


def timer(
    problem: AttentionProblem, kernel: Any, config: Any, gpu: Gpu, of: Machine, *, hot: bool, graph: bool
) -> Callable[[Machine], float]:
    """The time of a call as a function of the card's constants, for fitting them: what no constant changes is computed
    once. The arguments are those of `predict`."""
    walk = _Walk(problem, kernel, config, gpu, kernel.cost(problem, gpu, config), of, hot, "", graph)

    def time_us(where: Machine) -> float:
        walk.where = where
        return walk.ladder()["launches"]

    return time_us


def _bar(where: Machine, kernel: str, time_us: float, bound_us: float) -> tuple[float, float, str, int]:
    """Error bar, and what it rests on. Nothing is faster than the bound."""
    name = where.sheet.name
    if where.calibration is not None and kernel in where.calibration.residuals:
        known = where.calibration.residuals[kernel]
        words = (
            f"{known.points} measurements of {kernel} on an {name} that it was not fitted to: median error "
            f"{known.median:.0%}, nine in ten within a factor {known.factor_90:.2f}"
        )
        factor, points = known.factor_90, known.points
    elif where.fitted and where.calibration is not None and kernel in where.calibration.cross_validated:
        known = where.calibration.cross_validated[kernel]
        words = f"{known.points} measurements of {kernel} on an {name}, each left out of the fit that predicts it"
        factor, points = known.factor_90, known.points
    else:
        rough = worst_uncalibrated()
        factor, points = (3.0 if rough is None else rough.factor_90), 0
        words = f"never validated: {kernel} was not measured on an {name}; round constants, which elsewhere "
        words += "nobody checked" if rough is None else f"were within a factor {factor:.2f} in nine of ten calls"
    return max(bound_us, time_us / factor), time_us * factor, words, points


# The ladder -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Padding:
    """How many times as many products as visible pairs need: by columns, by hidden pairs, by ends of sequences."""

    heads: float
    hidden: float
    ragged: float


class _Walk:
    """One prediction under way."""

    def __init__(
        self,
        problem: AttentionProblem,
        kernel: Any,
        config: Any,
        gpu: Gpu,
        cost: Cost,
        where: Machine,
        hot: bool,
        without: str = "",
        graph: bool = False,
    ) -> None:
        self.problem, self.cost, self.gpu, self.where, self.hot = problem, cost, gpu, where, hot
        self.without, self.graph = without, graph
        self.flops, self.exponentials, self.least = problem.flops, problem.exponentials, problem.compulsory_bytes
        self.path = path_of(problem, kernel, gpu, where.sheet)
        self.padding = _padding(problem, kernel, config, gpu, cost)
        self.resident = blocks_per_sm(cost, gpu)
        self.bound = roofline(problem, data_sheet_rates(where.sheet), gpu=gpu, hot=hot).time_us
        items = cost.items or cost.blocks
        self.waves = items / (where.sheet.num_sms * self.resident[0]) if items else 0.0

    def ladder(self) -> dict[str, float]:
        """Time after each loss; never falls, for every step takes an idealisation away."""
        times = {"bound": self.bound}
        least = self.bound if not self.without else 0.0
        for name, place in STEP.items():
            whole = place < STEP["separate passes"]  # which knows of nothing left out
            least = max(least, 0.0 if self.without and whole else self._time(place))
            times[name] = least
        return times

    def _time(self, step: int) -> float:
        if step < STEP["separate passes"]:
            return self._whole(step)
        parts = self.cost.parts or (self.cost,)
        if self.without:
            parts = tuple(_ablated(part, self.problem, self.without) for part in parts)
        time = sum(part.launches * self._launch(_of_one_launch(part), step) for part in parts)
        time += self._launching(step, parts)
        if step >= STEP["launches"] and not self.graph:
            return max(time, self._launches(parts) * self.where.constants.host_us)
        return time

    def _whole(self, step: int) -> float:
        """As one pass over as much of the padding as `step` counts, on the whole card."""
        p = self.padding
        heads = p.heads if step >= STEP["head padding"] else 1.0
        pairs = p.hidden if step >= STEP["hidden pairs"] else 1.0
        pairs *= p.ragged if step >= STEP["ragged tiles"] else 1.0
        return max(
            self._products_us(self.flops * heads * pairs),
            self._power_us(self.flops, self.exponentials),
            self._exponentials_us(self.exponentials * pairs),
            self._memory_us(self._least_bytes()),
        )

    def _launch(self, cost: Cost, step: int) -> float:
        """One launch: its SMs, and what all of them share."""
        products, exponentials = self._products_us(cost.flops), self._exponentials_us(cost.exponentials)
        if self.without == "exponentials":
            exponentials = 0.0
        resources = [products, exponentials, self._operands_us(cost.operand_bytes)]
        busy = max(resources)
        if step >= STEP["softmax"]:
            resources.append(self._arithmetic_us(cost.exponentials))
            busy = max(resources)
            busy += self.where.constants.exposed * (sum(resources) - busy)
        from_l2 = cost.read_bytes / (self.where.sheet.num_sms * self._drawn_by_an_sm)
        if step >= STEP["latency"]:
            busy = _longer(busy, from_l2)
        busy = max(busy, self._power_of(cost))
        time = self._on_sms(cost, busy, sum(resources) + from_l2, step)
        shared = [self._memory_us(self._memory_bytes(cost, step))]
        if step >= STEP["traffic"]:
            drawn = self.where.l2_gbps * self.where.constants.l2
            shared.append((cost.read_bytes + cost.write_bytes) / (drawn * 1e3))
        if step >= STEP["latency"]:
            return _longer(time, max(shared))
        return max(time, *shared)

    def _power_of(self, cost: Cost) -> float:
        """Of a launch: its share of what the call needs; padding multiplies zeros, which draws little."""
        return self._power_us(
            self.flops * cost.flops / max(1, self.cost.flops),
            self.exponentials * cost.exponentials / max(1, self.cost.exponentials),
        )

    def _on_sms(self, cost: Cost, busy: float, alone: float, step: int) -> float:
        """Time on the SMs of work that keeps the whole card busy for `busy` us.

        Args:
            alone: the same with nothing hidden behind anything, as one stream of instructions sees it.
        """
        sms, constants = self.where.sheet.num_sms, self.where.constants
        items = cost.items or cost.blocks
        if step < STEP["idle SMs"] or not items:
            return busy
        slots = blocks_per_sm(cost, self.gpu)[0]
        resident = max(1, min(slots, -(-items // sms)))
        steps: float = cost.steps or items
        mean = steps / items
        one = busy * sms / steps  # of one step of one block, an SM to itself
        stream = alone * sms / steps / cost.chains + constants.step_us * (cost.steps > 0)

        def together(blocks: int) -> float:
            """A step of each of `blocks` blocks on one SM."""
            return _longer(blocks * one, stream) if step >= STEP["latency"] else blocks * one

        fill = 0.0
        if step >= STEP["fill"] and cost.steps:
            fill = constants.fill_us + cost.write_bytes / items / self._drawn_by_an_sm
        even = not self.problem.has_band and not self.problem.packed
        if even or cost.longest <= mean:
            edges = constants.edge_steps * cost.cut / items if step >= STEP["softmax"] else 0.0
            whole, rest = divmod(items, sms * resident)
            time = whole * ((mean + edges) * together(resident) + fill)
            return time + ((mean + edges) * together(-(-rest // sms)) + fill if rest else 0.0)
        # Blocks of unequal length fill each other's gaps, but for the longest of them.
        longest = float(cost.longest)
        if step >= STEP["softmax"] and cost.steps:
            edges = constants.edge_steps * cost.cut / items
            mean, longest = mean + edges, longest + edges
        rounds = items / (sms * resident)
        alone = longest * together(1)
        if items > sms:  # it has company as long as most blocks last
            alone += mean * (together(resident) - together(1))
        unsorted = (cost.unsorted or self.problem.packed) and rounds > 1
        tail = (longest - mean) * together(1) if unsorted else 0.0
        return max(rounds * (mean * together(resident) + fill) + tail, alone + fill)

    def _launching(self, step: int, parts: tuple[Cost, ...]) -> float:
        if step < STEP["launches"]:
            return 0.0
        return self._launches(parts) * (self.where.launch_us + self.where.constants.start_us)

    def _launches(self, parts: tuple[Cost, ...]) -> int:
        return max(self.cost.launches, sum(part.launches for part in parts))

    # Resources, of the whole card -------------------------------------------------------------------------------------

    @property
    def _clock_ghz(self) -> float:
        return self.where.sheet.boost_clock_mhz * 1e-3

    @property
    def _drawn_by_an_sm(self) -> float:
        """Bytes a us between one SM and L2."""
        return self.where.constants.smem_bytes_per_clock * self._clock_ghz * 1e3

    def _products_us(self, flops: float) -> float:
        share = self.where.constants.of_path(self.path.name, self.path.products)
        return flops / (self.path.useful_tflops * share * 1e6)

    def _power_us(self, flops: float, scores: float) -> float:
        """What the power limit allows of 16-bit products and their softmax."""
        if constant_of(self.path.name, 1) != "bfloat16":
            return 0.0
        drawn = self.path.products * flops + self.where.constants.power_of_score * scores
        items, sms = self.cost.items or self.cost.blocks, self.where.sheet.num_sms
        drawing = min(1.0, items / sms) if items else 1.0  # fewer busy SMs draw less, and run at full clocks
        return drawing * drawn / (self.path.tflops * self.where.constants.power * 1e6)

    def _exponentials_us(self, count: float) -> float:
        rate = self.where.sheet.exponentials_gops
        if rate is None:  # MI355X: as many a clock as its forerunners
            rate = self.where.sheet.num_sms * 16 * self._clock_ghz
        share = 0.95 if self.where.calibration is None else self.where.calibration.exponentials
        return count / (rate * share * 1e3)

    def _arithmetic_us(self, scores: float) -> float:
        lanes = self.where.sheet.num_sms * 128 if self.gpu.vendor == "nvidia" else self.where.sheet.num_sms * 64
        return scores * self.where.constants.softmax_ops / (lanes * self._clock_ghz * 1e3)

    def _operands_us(self, size: float) -> float:
        """What multiply-adds read from shared memory, 128 bytes a clock; they share the slots in which both issue."""
        if not size:
            return 0.0
        share = self.where.constants.of_path(self.path.name, self.path.products)
        return size / (self.where.sheet.num_sms * 128 * self._clock_ghz * share * 1e3)

    def _memory_us(self, size: float) -> float:
        return size / (self.where.memory_gbps * 1e3)

    # Bytes ------------------------------------------------------------------------------------------------------------

    @property
    def _l2_bytes(self) -> int:
        return self.where.sheet.l2_bytes + self.where.sheet.last_level_cache_bytes

    def _least_bytes(self) -> float:
        least = self.least
        # What is read again and again in the same order pushes itself out: of twice L2 nothing is there any more.
        return least * min(1.0, 2 * _missing(least, self._l2_bytes)) if self.hot else least

    def _memory_bytes(self, cost: Cost, step: int) -> float:
        """Across the memory bus in one launch: what is new to the card, and what fell out of L2."""
        share = cost.read_bytes / max(1, self.cost.read_bytes)
        least = self._least_bytes() * share
        if step < STEP["traffic"]:
            return least
        asked = cost.read_bytes + cost.write_bytes - cost.scratch_bytes
        again = max(0.0, asked - self.least * share)
        missed = _missing(self.working_set, self._l2_bytes * L2_SHARE)
        scratch = _missing(self.cost.workspace_bytes, self._l2_bytes)
        return least + again * missed + cost.scratch_bytes * scratch

    @property
    def working_set(self) -> float:
        """K and V of the heads that blocks work on at once: what L2 must keep so that each is read from memory once.
        Nothing where all blocks that read a head run together: they walk its keys at one pace."""
        problem = self.problem
        size = 4 if problem.dtype == "float32" else 2
        of_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * size
        heads = max(1, problem.batch * problem.num_heads_q)
        items = max(1, self.cost.items or self.cost.blocks)
        slots = self.where.sheet.num_sms * self.resident[0]
        if items * problem.num_heads_q <= slots * heads * problem.num_heads_kv:
            return 0.0
        at_once = min(items, self.where.sheet.num_sms * self.resident[0]) / max(1.0, items / heads)
        group = problem.num_heads_q / problem.num_heads_kv
        return of_head * max(1.0, at_once / group)

    def traffic(self) -> list[Traffic]:
        """Redundancy of each level, and how full it is."""
        cost, sheet, least = self.cost, self.where.sheet, max(1, self.least)
        parts = cost.parts or (cost,)
        memory = sum(self._memory_bytes(part, ALL) for part in parts)
        moved = cost.read_bytes + cost.write_bytes
        found = [
            Traffic("L2", moved, moved / least, self.working_set + cost.workspace_bytes, self._l2_bytes),
            Traffic("memory", memory, memory / least, 0.0, sheet.memory_gb * 1e9),
        ]
        if cost.smem_bytes:
            each, of = cost.smem_bytes, sheet.smem_per_block_bytes
            found.append(Traffic("shared memory", each, each / of, each * self.resident[0], sheet.smem_per_sm_bytes))
        if cost.registers and cost.threads:
            each, of = 4 * cost.registers * cost.threads, 4 * sheet.registers_per_sm
            found.append(Traffic("registers", each, each / of, each * self.resident[0], of))
        return found


# What `ablation` leaves out of a loop, one at a time.
ABLATIONS: dict[str, str] = {
    "exponentials": "no exponentials: scores less their maximum go into the second product",
    "values": "no second product, and with it no reads of V",
    "loads": "K and V pinned to one tile, which L1 and L2 hold",
    "mask": "no mask: hidden pairs of edge tiles count",
    "store": "no store of the output",
}


@functools.lru_cache(4096)
def _of_one_launch(cost: Cost) -> Cost:
    """Of a part that is launched several times, one after another, the share of one."""
    if cost.launches < 2:
        return cost
    split = ("blocks", "flops", "exponentials", "read_bytes", "write_bytes", "items", "steps", "cut", "scratch_bytes")
    return replace(cost, launches=1, **{name: -(-getattr(cost, name) // cost.launches) for name in split})


def _ablated(cost: Cost, problem: AttentionProblem, without: str) -> Cost:
    """The cost without one resource. Exponentials are left out by the caller."""
    keys = problem.head_dim / (problem.head_dim + problem.head_dim_v)
    if without == "values":
        return replace(cost, flops=int(cost.flops * keys), read_bytes=int(cost.read_bytes * keys))
    if without == "loads":
        return replace(cost, read_bytes=0)
    if without == "mask":
        return replace(cost, cut=0)
    return replace(cost, write_bytes=0) if without == "store" else cost


def path_of(problem: AttentionProblem, kernel: Any, gpu: Gpu, sheet: DataSheet) -> Path:
    """How a kernel computes its products on a card."""
    from warpwave.advice import computed_in

    rates = data_sheet_rates(sheet)
    if kernel.NAME in SCALAR_KERNELS:
        paths: Mapping[str, int] = {"float32": 1}
    elif problem.dtype == "float32":
        paths = FLOAT32_PATHS.get(computed_in(kernel, problem, gpu), FLOAT32_PATHS["ieee"])
    else:
        paths = {problem.dtype: 1}
    found = fastest(paths, rates) or product_path(problem, rates)
    assert found is not None  # every data sheet states float32
    return found


def blocks_per_sm(cost: Cost, gpu: Gpu) -> tuple[int, str]:
    """How many blocks of a launch share an SM, and what allows no more."""
    if cost.blocks_per_sm:
        return cost.blocks_per_sm, "launch"
    threads = cost.threads or 128
    smem = cost.smem_bytes - cost.smem_margin
    if not cost.smem_margin and smem > KIB:
        smem = int(smem / SMEM_SLACK)
    fits = occupancy(
        gpu,
        registers=cost.registers or 64,
        accumulators=0,
        num_warps=max(1, threads // gpu.warp_size),
        smem_bytes=min(smem, gpu.smem_per_block_bytes),
    )
    if fits is None:
        return 1, "nothing known"
    return max(1, fits.blocks), fits.limit


def _padding(problem: AttentionProblem, kernel: Any, config: Any, gpu: Gpu, cost: Cost) -> _Padding:
    """Splits the products a kernel computes over those a call needs, by asking its `cost` about simpler calls."""
    if not cost.flops:
        return _Padding(1.0, 1.0, 1.0)
    whole = replace(
        problem,
        batch=1,
        seqlen_q=1536,  # a multiple of every block of queries and keys
        seqlen_k=1536,
        num_heads_q=1,
        num_heads_kv=1,
        causal=None,
        window_size=(-1, -1),
        mask_shape=None,
        mask_visible_pairs=None,
        bias_shape=None,
        packed=False,
        total_q=0,
        total_k=0,
        lengths=None,
        page_size=0,
    )
    heads = max(1.0, kernel.cost(whole, gpu, config).flops / whole.flops)
    total = max(1.0, cost.flops / (problem.flops * heads))
    if not problem.has_band:
        if problem.mask_visible_pairs is None:
            return _Padding(heads, 1.0, total)
        shown = replace(problem, mask_visible_pairs=None).visible_pairs / max(1, problem.visible_pairs)
        return _Padding(heads, min(total, shown), max(1.0, total / shown))
    bare = replace(problem, causal=None, window_size=(-1, -1), mask_shape=None, mask_visible_pairs=None)
    ragged = min(total, max(1.0, kernel.cost(bare, gpu, config).flops / (bare.flops * heads)))
    return _Padding(heads, total / ragged, ragged)


def _missing(wanted: float, capacity: float) -> float:
    """The share of re-reads that a cache does not serve: none while all fits, and what does not fit beyond."""
    return 0.0 if wanted <= capacity or not wanted else 1 - capacity / wanted


def _longer(a: float, b: float) -> float:
    """The longer of two times that overlap, with a rounded corner: where both are alike neither hides the other."""
    if min(a, b) <= 0:
        return max(a, b)
    most = max(a, b)
    return most * math.pow((a / most) ** SMOOTH + (b / most) ** SMOOTH, 1 / SMOOTH)
