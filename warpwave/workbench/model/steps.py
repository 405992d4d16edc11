"""The steps from the bound of a call to its predicted time, and the equations of each step.

`Steps` holds one prediction: padding, waves over SMs, the resources of a loop and of the whole card, and the bytes at
each level of memory. `docs/workbench/model.md` has the equations. Imports no torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from warpwave.gpu import KIB, Gpu
from warpwave.kernels.cost import Cost
from warpwave.problem import AttentionProblem
from warpwave.workbench.hardware.catalog import DataSheet
from warpwave.workbench.hardware.occupancy import occupancy
from warpwave.workbench.model import compiled
from warpwave.workbench.model.calibration import Constants, Machine, constant_of, machine
from warpwave.workbench.model.padding import padding
from warpwave.workbench.model.roofline import (
    FLOAT32_PATHS,
    Path,
    data_sheet_rates,
    fastest,
    product_path,
    quantized_path_of_kernel,
    roofline,
)
from warpwave.workbench.model.schedule import companies, lateness

# The losses between the bound and the predicted time, in the order of the steps: name -> meaning.
LOSSES: dict[str, str] = {
    "arithmetic": "products in more parts, or on slower units, than the fastest arithmetic as accurate needs",
    "bandwidth": "the stated bandwidth of memory, of which reads reach only a part",
    "clocks": "power, clocks and instruction order, which keep the card below the data sheet's rates",
    "alignment": "rows that do not start at multiples of 16 bytes (32 in some loops), which are read in pieces",
    "recomputation": "scores that a second launch or walk computes again, with their products",
    "head padding": "products over columns that pad head_dim to the width of the tiles",
    "hidden pairs": "hidden pairs of edge tiles, which are computed all the same",
    "ragged tiles": "rows and keys beyond the end of a sequence, in its last tiles",
    "operands": "operands that multiply-adds read from shared memory",
    "separate passes": "passes that wait for each other, and cannot overlap products with exponentials",
    "idle SMs": "SMs without a block, and the last wave",
    "traffic": "repeated reads of tiles through L2 and memory, if they take longer than computing",
    "reductions": "sums in L2 that blocks add to, if that takes longer than computing",
    "softmax": "exponentials and arithmetic on scores that products do not hide",
    "conversions": "tiles of 8 bits that two warps of a block convert, if that takes longer than computing",
    "latency": "steps that wait for each other, with too few instruction streams per SM to hide the wait",
    "fill": "first loads and last stores of each query tile",
    "launches": "launching, and the first wave",
}
STEP = {name: place for place, name in enumerate(LOSSES)}
ALL = len(LOSSES)
OF_THE_CARD = ("bandwidth", "clocks")  # losses that no grid, tile or loop changes
SMOOTH = 8.0  # exponent of the smooth maximum of two times
CONVERSION_OPS = 4  # instructions per part of an operand; on sm_90, float32 takes 3.4 to 4.3 more than bfloat16
FAR_US = 0.45  # latency of memory on top of L2
TRIP_US = 0.5  # round trip to L2 or memory
EMPTY_US = 0.7  # time of a block beyond the end of its sequence: launch, a load from L2, exit
AHEAD = 0.3  # share of launching and the first wave that a launch saves by overlapping the previous one
SMEM_SLACK = 1.05  # kernels state an upper bound of shared memory, up to this factor above the compiled size
WRITTEN_BACK = 0.45  # share of L2 that a flush leaves dirty, which a call must write back first
FLUSH_US = 75.0  # duration of `bench`'s flush of 256 MiB
EVENTS_US = 4.0  # overhead between two events, without a graph
KEPT, GONE = 0.65, 0.8  # inputs up to the first share of L2 are still there at the next call, beyond the second none
L2_SHARE = 0.8  # share of L2 that a working set can fill before lines are evicted
SCALAR_KERNELS = ("naive",)  # kernels whose products always run on the plain float32 units


@dataclass(frozen=True)
class Traffic:
    """The traffic of one level of memory.

    Attributes:
        level: `"L2"`, `"memory"`, `"registers"`, `"shared memory"`.
        bytes: bytes that cross it; for registers and shared memory, bytes that a block holds.
        redundancy: ratio to the compulsory bytes, at least 1; for registers and shared memory, the share in use.
        working_set: bytes that must stay in it for this redundancy.
        capacity: its size in bytes.
    """

    level: str
    bytes: float
    redundancy: float
    working_set: float
    capacity: float


class Steps:
    """One prediction of the time of a call.

    Of several launches of gradients, waves and occupancy are those of the launch with most products.
    """

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
        cost = _as_compiled(cost, compiled.resources(kernel.NAME, problem, gpu, config))
        self.problem, self.cost, self.gpu, self.where, self.hot = problem, cost, gpu, where, hot
        self.without, self.graph = without, graph
        is_backward = computes_gradients(kernel)
        work = problem.work(is_backward)
        self.flops, self.exponentials, self.least = work.flops, work.exponentials, work.compulsory_bytes
        self.path = path_of(problem, kernel, gpu, where.sheet)
        self.padding = padding(problem, kernel, config, gpu, cost, computes_gradients(kernel))
        aligned = machine(where.sheet, kernel.NAME, aligned_loop(cost.loop), where.calibration)
        self.aligned = aligned.constants if where.fitted and aligned.fitted else where.constants
        parts = cost.parts or (cost,)
        self.main = main = max(parts, key=lambda part: part.flops) if is_backward and cost.blocks else cost
        self.items = main.items or main.blocks
        self.resident = blocks_per_sm(main, gpu)
        if without:
            parts = tuple(_ablated(part, problem, without) for part in parts)
        self._late: dict[Cost, float] = {}
        self._companies: dict[Cost, tuple[tuple[int, ...], ...]] = {}
        self.flushed = not (hot or graph)  # `bench` flushes L2 before long calls
        # In a graph every launch follows another; otherwise the first cannot overlap the flush or the caller's work.
        self.ahead = sum(part.launches for i, part in enumerate(parts) if part.ahead and (graph or i))
        self.launches = max(cost.launches, sum(part.launches for part in parts))
        # (number of launches, cost of one launch, its blocks per SM)
        self.parts = tuple((part.launches, _of_one_launch(part), blocks_per_sm(part, gpu)[0]) for part in parts)
        rates = data_sheet_rates(where.sheet)
        self.bound = roofline(problem, rates, gpu=gpu, hot=hot, is_backward=is_backward).time_us
        self.waves = self.items / (where.sheet.num_sms * self.resident[0])

    def times(self) -> dict[str, float]:
        """Returns the time after each loss. Times never fall, because every step removes an idealization."""
        times = {"bound": self.bound}
        least = self.bound if not self.without else 0.0
        for name, place in STEP.items():
            whole = place <= STEP["operands"]  # these steps ignore ablations
            least = max(least, 0.0 if self.without and whole else self._time(place))
            times[name] = least
        return times

    def time_us(self) -> float:
        """Returns the time after the last step, for fits that need it thousands of times.

        It ignores a later step that would shorten the time of an earlier one.
        """
        return max(self.bound, self._time(STEP["operands"]), self._time(STEP["launches"]))

    def _time(self, step: int) -> float:
        if step <= STEP["operands"]:
            return self._whole(step)
        time = sum(launches * self._launch(part, slots, step) for launches, part, slots in self.parts)
        if step < STEP["launches"]:
            return time
        time += (self.launches - AHEAD * self.ahead) * (self.where.launch_us + self.where.constants.start_us)
        if self.graph:
            return time
        ahead = FLUSH_US * self.flushed  # the host launches during the flush
        return max(time + EVENTS_US * self.flushed, self.launches * self.where.constants.host_us - ahead)

    def _whole(self, step: int) -> float:
        """Returns the time as a single pass on the whole card, with the padding that `step` includes."""
        if step < STEP["clocks"]:  # at the clock of the bound
            products = self.flops / (self.path.useful_tflops * self.where.sheet.headroom * 1e6)
            return max(products, self._memory_us(self._least_bytes()) if step >= STEP["bandwidth"] else 0.0)
        p = self.padding
        again, again_exp = (p.again, p.again_exp) if step >= STEP["recomputation"] else (1.0, 1.0)
        heads = p.heads if step >= STEP["head padding"] else 1.0
        pairs = p.hidden if step >= STEP["hidden pairs"] else 1.0
        pairs *= p.ragged if step >= STEP["ragged tiles"] else 1.0
        multiplied = self.flops * again * heads * pairs
        products = self._products_us(multiplied)
        if step < STEP["alignment"]:
            products = min(products, self._products_us(multiplied, self.aligned))
        return max(
            products,
            self._operands_us(self.cost.operand_bytes) if step >= STEP["operands"] else 0.0,
            self._power_us(self.flops * again, self.exponentials * again_exp),
            self._exponentials_us(self.exponentials * again_exp * pairs),
            self._memory_us(self._least_bytes()),
        )

    def _launch(self, cost: Cost, slots: int, step: int) -> float:
        """Returns the time of one launch, on its SMs and on the resources that they share."""
        products, exponentials = self._products_us(cost.flops), self._exponentials_us(cost.exponentials)
        if self.without == "exponentials":
            exponentials = 0.0
        resources = [products, exponentials, self._operands_us(cost.operand_bytes)]
        busy = max(resources)
        if step >= STEP["softmax"]:
            resources.append(self._arithmetic_us(cost.exponentials, cost.conversions))
            busy = max(resources)
            busy += self.where.constants.exposed * (sum(resources) - busy)
        from_l2 = cost.read_bytes / (self.where.sheet.num_sms * self._drawn_by_an_sm)
        alone = sum(resources) + from_l2 + self._arithmetic_us(0, cost.conversions)  # without any overlap
        if step >= STEP["latency"]:
            busy = _longer(busy, from_l2)
        busy = max(busy, self._power_of(cost))
        if step >= STEP["conversions"]:
            busy = _longer(busy, cost.widener_us / self.where.sheet.num_sms)
        time = self._on_sms(cost, slots, busy, alone, step)
        if step >= STEP["fill"] and cost.block_us:
            # Small blocks take longer to start than to compute, and only the last block's round trips are exposed.
            begun = cost.block_us * -(-cost.blocks // self.where.sheet.num_sms)
            time = _longer(time, begun) + cost.trips * TRIP_US
        across = self._memory_bytes(cost, step)
        shared = [self._memory_us(across + self._written_back(cost, across, step))]
        if step >= STEP["traffic"]:
            drawn = self.where.l2_gbps * self.where.constants.l2
            # A sum in L2 is read and written for each addition to it.
            added = cost.added_bytes if step >= STEP["reductions"] else -cost.added_bytes
            shared.append((cost.read_bytes + cost.write_bytes + added) / (drawn * 1e3))
        if step >= STEP["fill"] and cost.steps:  # memory is idle until the first blocks start
            shared.append(max(shared) + self.where.constants.fill_us)
        if step >= STEP["latency"]:
            return _longer(time, max(shared))
        return max(time, *shared)

    def _power_of(self, cost: Cost) -> float:
        """Returns a launch's share of the power-limited time. Padding multiplies zeros, which draw little power."""
        return self._power_us(
            self.flops * self.padding.again * cost.flops / max(1, self.cost.flops),
            self.exponentials * self.padding.again_exp * cost.exponentials / max(1, self.cost.exponentials),
        )

    def _on_sms(self, cost: Cost, slots: int, busy: float, alone: float, step: int) -> float:
        """Returns the time on the SMs of work that would keep the whole card busy for `busy` us.

        Args:
            slots: blocks that share an SM.
            alone: the time of the same work without any overlap, as for a single instruction stream.
        """
        sms, constants = self.where.sheet.num_sms, self.where.constants
        items = cost.items or cost.blocks
        if step < STEP["idle SMs"] or not items:
            return busy
        resident = max(1, min(slots, -(-items // sms)))
        steps: float = cost.steps or items
        mean = steps / items
        one = busy * sms / steps  # one step of one block that has an SM to itself
        stream = alone * sms / steps / cost.chains + constants.step_us * (cost.steps > 0) + self._far_us(cost)

        def together(blocks: int) -> float:
            """Returns the time of one step of each of `blocks` blocks on one SM."""
            waits = stream * (1 + constants.serial * (blocks - 1))
            return _longer(blocks * one, waits) if step >= STEP["latency"] else blocks * one

        def masked(blocks: int) -> float:
            """Returns the extra time of a masked step of each: arithmetic, which fills waits."""
            return blocks * one

        empty, fill = 0.0, cost.trips * TRIP_US if step >= STEP["fill"] else 0.0
        if cost.block_us:  # see _launch
            fill = 0.0
        if step >= STEP["fill"] and cost.steps:
            empty = EMPTY_US * max(0, cost.blocks - items - cost.divided * (cost.last_parts - 1)) / (sms * slots)
            empty += fill  # once, because the next tile's waits overlap this tile
            fill = constants.fill_us + cost.write_bytes / items / self._drawn_by_an_sm
        even = not self.problem.has_band and not self.problem.packed
        if even or cost.longest <= mean:
            edges = constants.edge_steps * cost.cut / items if step >= STEP["softmax"] else 0.0
            if cost.divided:
                return empty + self._with_parts(cost, items, mean * together(1) + edges * masked(1), fill)
            whole, rest = divmod(items, sms * resident)
            time = whole * (mean * together(resident) + edges * masked(resident) + fill)
            last = -(-rest // sms)
            return time + empty + (mean * together(last) + edges * masked(last) + fill if rest else 0.0)
        # Blocks of unequal length fill each other's gaps, except for the longest.
        longest, edges = float(cost.longest), 0.0
        if step >= STEP["softmax"] and cost.steps:
            edges = constants.edge_steps * cost.cut / items
        rounds = items / (sms * resident)
        alone = longest * together(1) + edges * masked(1)
        if items > sms:  # it shares its SM for the mean length of a block
            alone += mean * (together(resident) - together(1)) + edges * (masked(resident) - masked(1))
        # With blocks in the order of heads, a long block may start last, while the SMs empty.
        tail = 0.0
        if rounds > 1 and self._of_order(cost, slots) > 0:
            tail = self._of_order(cost, slots) * mean * (together(resident) + together(1)) / 2
        walk = mean * together(resident) + edges * masked(resident)
        if companies := self._companies_of(cost, slots):
            longest /= max(company[0] for company in companies)  # steps of a tile
            times = [together(blocks) * longest for blocks in range(1, len(max(companies, key=len)) + 1)]
            alone = max(
                sum((a - b) * of for a, b, of in zip(company, (*company[1:], 0), times, strict=False))
                + edges * masked(len(company))
                for company in companies
            )
        return empty + max(rounds * (walk + fill) + tail, alone + fill)

    def _with_parts(self, cost: Cost, items: int, one: float, fill: float) -> float:
        """Returns the time of items that take `one` us each, the last of which are divided into parts."""
        sms, parts = self.where.sheet.num_sms, cost.last_parts
        whole, rest = divmod(items - cost.divided, sms)
        # On a card with another number of SMs, parts run beside the last whole items. Each of these counts as `parts`.
        last = -(-(rest + cost.divided) * parts // sms) * (one / parts + fill)
        return whole * (one + fill) + (max(last, one + fill) if rest else last)

    def _of_order(self, cost: Cost, slots: int) -> float:
        """Returns how much longer the blocks of a launch take in their order than evenly distributed, in units of their
        mean length."""
        if cost not in self._late:
            self._late[cost] = lateness(cost.order, self.where.sheet.num_sms * slots)
        return self._late[cost]

    def _companies_of(self, cost: Cost, slots: int) -> tuple[tuple[int, ...], ...]:
        if cost not in self._companies:
            self._companies[cost] = companies(cost.order, cost.blocks, self.where.sheet.num_sms, slots)
        return self._companies[cost]

    # Resources of the whole card --------------------------------------------------------------------------------------

    @property
    def _clock_ghz(self) -> float:
        return self.where.sheet.boost_clock_mhz * 1e-3

    @property
    def _drawn_by_an_sm(self) -> float:
        """Returns the bytes per us between one SM and L2."""
        return self.where.constants.smem_bytes_per_clock * self._clock_ghz * 1e3

    def _products_us(self, flops: float, constants: Constants | None = None) -> float:
        share = (constants or self.where.constants).of_path(self.path.name, self.path.products)
        return flops / (self.path.useful_tflops * share * 1e6)

    def _power_us(self, flops: float, scores: float) -> float:
        """Returns the time of 16-bit products and their softmax at the power limit."""
        if constant_of(self.path.name, 1) != "bfloat16":
            return 0.0
        drawn = self.path.products * flops + self.where.constants.power_of_score * scores
        items, sms = self.items + self.main.divided * (self.main.last_parts - 1), self.where.sheet.num_sms
        drawing = min(1.0, items / sms) if items else 1.0  # fewer busy SMs draw less power and run at full clocks
        return drawing * drawn / (self.path.tflops * self.where.constants.power * 1e6)

    def _exponentials_us(self, count: float) -> float:
        rate = self.where.sheet.exponentials_gops
        if rate is None:  # MI355X: taken to have as many per clock as its predecessors
            rate = self.where.sheet.num_sms * 16 * self._clock_ghz
        share = 0.95 if self.where.calibration is None else self.where.calibration.exponentials
        return count / (rate * share * 1e3)

    def _arithmetic_us(self, scores: float, conversions: float) -> float:
        lanes = self.where.sheet.num_sms * (64 if self.gpu.arch.startswith("gfx9") else 128)
        operations = scores * self.where.constants.softmax_ops + conversions * CONVERSION_OPS
        return operations / (lanes * self._clock_ghz * 1e3)

    def _operands_us(self, size: float) -> float:
        """Returns the time of multiply-adds' reads from shared memory, 128 bytes per clock; both share issue slots."""
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
        return self.least * self._evicted(self.hot)

    def _evicted(self, hot: bool) -> float:
        """Returns the share of the compulsory bytes that L2 does not hold, if the call before used the same ones."""
        if not hot:
            return 1.0
        # Data that is read repeatedly in the same order evicts itself. It does so before L2 is full, because both
        # halves of L2 keep copies of some lines: on an H200 (60 MiB) nearly all of 43 MB was still there, and nothing
        # of 50 MB.
        filled = self.least / self._l2_bytes
        return min(1.0, max(0.0, (filled - KEPT) / (GONE - KEPT)))

    def _memory_bytes(self, cost: Cost, step: int) -> float:
        """Returns the bytes that cross the memory bus in one launch: first reads, and reads of evicted data."""
        share = cost.read_bytes / max(1, self.cost.read_bytes)
        once = self.least * share
        least = self._least_bytes() * share
        scratch = cost.scratch_bytes * _missing(self.cost.workspace_bytes, self._l2_bytes)
        if cost.first_bytes:
            # What fits L2 is there still when the next launch reads it, as for calls with the same inputs.
            once = cost.first_bytes
            least = once * self._evicted(self.hot or cost is not self.parts[0][1]) + scratch
            scratch = 0.0
        if step < STEP["traffic"]:
            return least
        asked = cost.read_bytes + cost.write_bytes - cost.scratch_bytes - cost.added_bytes
        again = max(0.0, asked - once)
        missed = _missing(self._working_set_of(cost), self._l2_bytes * L2_SHARE)
        return least + again * missed + scratch

    def _written_back(self, cost: Cost, across: float, step: int) -> float:
        """Returns the dirty bytes that a flush left in L2 and that must be written back to make room."""
        if not self.flushed or step < STEP["traffic"]:
            return 0.0
        share = cost.read_bytes / max(1, self.cost.read_bytes)
        return min(across, share * WRITTEN_BACK * self._l2_bytes)

    def _far_us(self, cost: Cost) -> float:
        """Returns the extra latency of a step whose keys come from memory instead of L2."""
        return FAR_US * cost.far * self._least_bytes() / max(1, self.least)

    def _working_set_of(self, cost: Cost) -> float:
        """Returns the working set of a launch: what the blocks of a head walk, unless all of them run together."""
        if not cost.walked_bytes:
            return self.working_set
        slots = self.where.sheet.num_sms * blocks_per_sm(cost, self.gpu)[0]
        return 0.0 if (cost.items or cost.blocks) <= slots * cost.walked_heads else cost.walked_bytes

    @functools.cached_property
    def working_set(self) -> float:
        """Returns the bytes of K and V of the heads that blocks work on at the same time. L2 must hold them so that
        each is read only once from memory. 0 if all blocks of a head run together, because they then read its keys at
        the same time."""
        problem = self.problem
        of_head = problem.seqlen_k * problem.bytes_of_key
        heads = max(1, problem.batch * problem.num_heads_q)
        items = max(1, self.cost.items or self.cost.blocks)
        slots = self.where.sheet.num_sms * self.resident[0]
        if items * problem.num_heads_q <= slots * heads * problem.num_heads_kv:
            return 0.0
        at_once = min(items, self.where.sheet.num_sms * self.resident[0]) / max(1.0, items / heads)
        group = problem.num_heads_q / problem.num_heads_kv
        return of_head * max(1.0, at_once / group)

    def traffic(self) -> list[Traffic]:
        """Returns the traffic of each level."""
        cost, sheet, least = self.cost, self.where.sheet, max(1, self.least)
        parts = cost.parts or (cost,)
        # What the last launch leaves in L2 is written back after it, outside of the time.
        memory = max(sum(self._memory_bytes(part, ALL) for part in parts), self._least_bytes())
        moved = cost.read_bytes + cost.write_bytes
        working_set = max(map(self._working_set_of, parts))
        found = [
            Traffic("L2", moved, moved / least, working_set + cost.workspace_bytes, self._l2_bytes),
            Traffic("memory", memory, memory / least, 0.0, sheet.memory_gb * 1e9),
        ]
        if self.main.smem_bytes:
            each, of = used_smem(self.main), sheet.smem_per_block_bytes
            found.append(Traffic("shared memory", each, each / of, each * self.resident[0], sheet.smem_per_sm_bytes))
        if self.main.registers and self.main.threads:
            each, of = 4 * self.main.registers * self.main.threads, 4 * sheet.registers_per_sm
            found.append(Traffic("registers", each, each / of, each * self.resident[0], of))
        return found


# The ablations of a loop.
ABLATIONS: dict[str, str] = {
    "exponentials": "no exponentials: the second product takes scores minus their maximum",
    "values": "no second product, and therefore no reads of V",
    "loads": "K and V always from the same tile, which stays in L1 and L2",
    "mask": "no mask: hidden pairs of edge tiles count as visible",
    "store": "no store of the output",
}


SHARED_OUT = (  # fields of a `Cost` that are divided among several launches
    "blocks", "flops", "exponentials", "read_bytes", "write_bytes", "items", "steps", "cut", "scratch_bytes",
    "operand_bytes", "conversions", "widener_us",
)  # fmt: skip


def _of_one_launch(cost: Cost) -> Cost:
    """Returns the cost of one launch of a part that is launched several times."""
    if cost.launches < 2:
        return cost
    return replace(cost, launches=1, **{name: -(-getattr(cost, name) // cost.launches) for name in SHARED_OUT})


def _ablated(cost: Cost, problem: AttentionProblem, without: str) -> Cost:
    """Returns the cost without one resource. The caller handles exponentials."""
    keys = problem.head_dim / (problem.head_dim + problem.head_dim_v)
    if without == "values":
        return replace(cost, flops=int(cost.flops * keys), read_bytes=int(cost.read_bytes * keys))
    if without == "loads":
        return replace(cost, read_bytes=0)
    if without == "mask":
        return replace(cost, cut=0)
    return replace(cost, write_bytes=0) if without == "store" else cost


def path_of(problem: AttentionProblem, kernel: Any, gpu: Gpu, sheet: DataSheet) -> Path:
    """Returns the path of a kernel's products on a card."""
    from warpwave.workbench.explain.advice import computed_in

    rates = data_sheet_rates(sheet, sheet.boost_clock_mhz)
    if kernel.NAME in SCALAR_KERNELS:
        paths: Mapping[str, int] = {"float32": 1}
    elif problem.dtype == "float32":
        paths = FLOAT32_PATHS.get(computed_in(kernel, problem, gpu), FLOAT32_PATHS["ieee"])
    elif problem.is_quantized:
        widens = getattr(kernel, "WIDENS_VALUES", False)
        path = quantized_path_of_kernel(problem, rates, gpu, widens) if kernel.NEEDS_GPU else None
        if path is not None:
            return path
        paths = FLOAT32_PATHS["ieee"]  # torch's operations multiply the numbers as float32
    else:
        paths = {problem.dtype: 1}
    found = fastest(paths, rates) or product_path(problem, rates, gpu)
    assert found is not None  # every data sheet states float32
    return found


def blocks_per_sm(cost: Cost, gpu: Gpu) -> tuple[int, str]:
    """Returns the number of resident blocks per SM, and what limits it."""
    if cost.blocks_per_sm:
        return cost.blocks_per_sm, "launch"
    threads = cost.threads or 128
    fits = occupancy(
        gpu,
        registers=cost.registers or 64,
        accumulators=0,
        num_warps=max(1, threads // gpu.warp_size),
        smem_bytes=min(used_smem(cost), gpu.smem_per_block_bytes),
    )
    if fits is None:
        return 1, "nothing known"
    return max(1, fits.blocks), fits.limit


def used_smem(cost: Cost) -> int:
    """Returns the shared memory of a block, in bytes: the compiler's figure, or about what it will use of the upper
    bound that the kernel states."""
    smem = cost.smem_bytes - cost.smem_margin
    if cost.compiled or cost.smem_margin or smem <= KIB:
        return smem
    return int(smem / SMEM_SLACK)


def _as_compiled(cost: Cost, found: compiled.Resources | None) -> Cost:
    """Returns a cost with what its launch with the products compiles to."""
    if found is None or cost.compiled:
        return cost
    main = max(cost.parts, key=lambda part: part.flops, default=None)
    parts = tuple(_as_compiled(part, found) if part is main else part for part in cost.parts)
    registers, smem_bytes = found.registers, found.smem_bytes
    return replace(cost, parts=parts, registers=registers, smem_bytes=smem_bytes, smem_margin=0, compiled=True)


def aligned_loop(loop: str) -> str:
    """Returns the name of the same loop with rows that start at multiples of 16 bytes (`Cost.loop`)."""
    return loop.removesuffix("rows").rstrip().removesuffix("odd").rstrip() if "odd" in loop else loop


def computes_gradients(kernel: Any) -> bool:
    """Returns whether a module is one of gradients: `dispatch.GRADIENT_KERNELS`, and those of other kernels' own."""
    return hasattr(kernel, "GRADIENTS")


def _missing(wanted: float, capacity: float) -> float:
    """Returns the share of repeated reads that miss a cache: 0 while all fits, then the share that does not fit."""
    return 0.0 if wanted <= capacity or not wanted else 1 - capacity / wanted


def _longer(a: float, b: float) -> float:
    """Returns the smooth maximum of two overlapping times: if they are similar, neither hides the other."""
    if min(a, b) <= 0:
        return max(a, b)
    most = max(a, b)
    return most * math.pow((a / most) ** SMOOTH + (b / most) ** SMOOTH, 1 / SMOOTH)
