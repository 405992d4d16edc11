"""Lower bounds of the time of any implementation of a call on a device, one per resource.

Each bound is an amount of work over a rate. Amounts are the minimum for any implementation (visible pairs, compulsory
bytes). A kernel's `cost` gives further bounds for that kernel alone (its tiles, its grid, its L2 traffic). Resources
work in parallel, so the longest bound counts, not the sum: Williams, Waterman & Patterson, "Roofline: An Insightful
Visual Performance Model for Multicore Architectures" (2009).

`docs/workbench/roofline.md` explains each bound, the source of its rate, and what is not modeled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from warpwave import precision as arithmetics
from warpwave.gpu import Gpu
from warpwave.kernels.cost import Cost
from warpwave.problem import DTYPE_BYTES, AttentionProblem, Work
from warpwave.workbench.hardware.catalog import DataSheet, data_sheet
from warpwave.workbench.hardware.measure import Ceilings

FLOAT32_UNITS = "float32"  # the path without matrix instructions
# Arithmetic -> the units that can compute it, and their number of products for one float32 product.
FLOAT32_PATHS: dict[str, dict[str, int]] = {name: arithmetics.fewest([name]) for name in arithmetics.ARITHMETICS}


@dataclass(frozen=True)
class Rates:
    """The rate of each resource of a device, and their source; None for unknown rates.

    Attributes:
        name: `"data sheet"`, or `"measured 2026-11-21"`.
        device: the device.
        product_tflops: path -> 10^12 operations a second; paths as in `hardware.catalog.PATHS`.
        exponentials_gops: 10^9 exponentials a second.
        memory_gbps, l2_gbps: 10^9 bytes a second.
        launch_us: minimum time of a launch (on a CPU, of a call).
        cache_bytes: size of L2 and the last-level cache, which may keep data between calls. 0 if unknown.
        num_sms: number of SMs; 0 if unknown.
        clock: the clock of these rates in words, if it is not the one of the stated peaks.
    """

    name: str
    device: str
    product_tflops: Mapping[str, float]
    exponentials_gops: float | None = None
    memory_gbps: float | None = None
    l2_gbps: float | None = None
    launch_us: float | None = None
    cache_bytes: int = 0
    num_sms: int = 0
    clock: str = ""


def data_sheet_rates(sheet: DataSheet, clock_mhz: int | None = None) -> Rates:
    """Returns the rates that the maker states. None states launches, and few state L2.

    Args:
        clock_mhz: the clock of products and exponentials. None is the highest that the card can run at, so that nothing
            exceeds the rates.
    """
    over = sheet.headroom if clock_mhz is None else clock_mhz / sheet.boost_clock_mhz
    return Rates(
        "data sheet",
        sheet.name,
        {path: peak * over for path, peak in sheet.peak_tflops.items()},
        None if sheet.exponentials_gops is None else sheet.exponentials_gops * over,
        sheet.bandwidth_gbps,
        sheet.l2_gbps,
        None,
        sheet.l2_bytes + sheet.last_level_cache_bytes,
        sheet.num_sms,
        f"the highest clock, {sheet.max_clock_mhz} MHz; peaks are stated at {sheet.boost_clock_mhz}"
        if over > 1
        else "",
    )


def measured_rates(ceilings: Ceilings) -> Rates:
    """Returns the rates that this machine, or a card of its kind, reached. A good kernel may exceed them."""
    card = ceilings.environment.get("gpu") or {}
    return Rates(
        f"measured {ceilings.date[:10]}",
        ceilings.gpu,
        dict(ceilings.product_tflops),
        ceilings.exponentials_gops,
        max((rate for rate in (ceilings.read_gbps, ceilings.copy_gbps) if rate is not None), default=None),
        ceilings.l2_gbps,
        ceilings.launch_us,
        card.get("l2_bytes") or 0,
        card.get("sm_count") or 0,
    )


@dataclass(frozen=True)
class Bound:
    """The minimum time of one resource.

    Attributes:
        resource: `"tensor cores"` (matrix cores on AMD), `"float32 units"`, `"exponentials"`, `"memory"`, `"launch"`;
            on a CPU `"products"`, `"exponentials"`, `"memory"`, `"call"`. For a kernel: `"tiles"` (products over whole
            tiles, with padding and hidden pairs, on the SMs that have a block), `"exponentials in tiles"`, `"L2"`.
        amount, unit: the work, in FLOP, exponentials, bytes or launches.
        rate, rate_unit: the rate in TFLOP/s, Gexp/s or GB/s; for a launch, its time in us.
        time_us: amount over rate.
        arithmetic: the calculation in one line, checkable by hand.
        of_kernel: whether it holds only for the kernel, not for every implementation.
    """

    resource: str
    amount: float
    unit: str
    rate: float
    rate_unit: str
    time_us: float
    arithmetic: str
    of_kernel: bool = False


@dataclass(frozen=True)
class Roofline:
    """All bounds by one set of rates.

    Attributes:
        rates: the rates.
        bounds: bounds of the problem, then those of the kernel.
        path: path of the products, a key of `rates.product_tflops`; `""` if none fits.
        exact: False if lengths or a boolean mask are on the device and not counted; the bounds are then estimates.
    """

    rates: Rates
    bounds: tuple[Bound, ...]
    path: str = ""
    exact: bool = True

    @property
    def binding(self) -> Bound | None:
        """The longest bound; None if no rate is known."""
        return max(self.bounds, key=lambda bound: bound.time_us, default=None)

    @property
    def time_us(self) -> float:
        """The minimum time; 0 if no rate is known."""
        return 0.0 if self.binding is None else self.binding.time_us

    @property
    def of_problem(self) -> Roofline:
        """The bounds without those of the kernel, which hold for any implementation."""
        return Roofline(self.rates, tuple(b for b in self.bounds if not b.of_kernel), self.path, self.exact)

    def of(self, resource: str) -> Bound | None:
        """Returns the bound of one resource."""
        return next((bound for bound in self.bounds if bound.resource == resource), None)


def roofline(
    problem: AttentionProblem,
    rates: Rates,
    *,
    gpu: Gpu,
    cost: Cost | None = None,
    precision: str | None = None,
    widens: bool = False,
    hot: bool = False,
    is_backward: bool = False,
) -> Roofline:
    """Returns all lower bounds of a call's forward, or of its backward.

    Args:
        problem: the call.
        rates: `data_sheet_rates` or `measured_rates`.
        gpu: the device.
        cost: the cost of the kernel that serves the call; it adds that kernel's bounds.
        precision: that kernel's arithmetic of float32 products (a key of `FLOAT32_PATHS`); None is the fastest.
        widens: whether that kernel multiplies a v of 8 bits in float16.
        hot: whether the previous call used the same tensors, so that data in the caches need not be read again.
        is_backward: whether the bounds are those of the backward: of any implementation that recomputes the scores.
    """
    best = path = product_path(problem, rates, gpu)
    work = problem.work(is_backward)
    bounds = [*_products(problem, work, rates, gpu, path), *_exponentials(work, rates)]
    bounds += _memory(problem, work, rates, hot)
    if rates.launch_us is not None:
        once = f"1 {'call' if gpu.is_cpu else 'launch'} = {us(rates.launch_us)}"
        bounds.append(Bound("call" if gpu.is_cpu else "launch", 1, "", rates.launch_us, "us", rates.launch_us, once))
    if cost is not None and not gpu.is_cpu:
        if precision is not None and problem.dtype == "float32":
            path = fastest(FLOAT32_PATHS[precision], rates) or path
        elif problem.is_quantized and precision is not None:
            path = quantized_path_of_kernel(problem, rates, gpu, widens)
        bounds += _of_kernel(problem, work, rates, path, cost)
    return Roofline(rates, tuple(bounds), best.name if best else "", problem.pairs_are_exact)


def estimated(problem: AttentionProblem, known: Roofline | None) -> str:
    """Returns why a call's bound is an estimate; empty if it is exact.

    Args:
        known: the bounds, of which memory may depend on whether v is part of k. None leaves that out.
    """
    if why := uncounted(problem):
        return why
    binding = None if known is None else known.of_problem.binding
    if binding is not None and binding.resource == "memory" and problem.looks_latent and not problem.v_in_k:
        return "k and v count as two tensors; if v is part of k, as in a latent cache (--v-in-k), fewer bytes are read"
    return ""


def uncounted(problem: AttentionProblem) -> str:
    """Returns why the visible pairs of a call are an estimate; empty if they are exact."""
    if problem.pairs_are_exact:
        return ""
    if problem.packed and problem.lengths is None:
        return "the lengths were not read, and all sequences count as equally long"
    return "the mask was not read, and every pair counts as visible that it could show"


# Bounds of the problem ------------------------------------------------------------------------------------------------


class Path(NamedTuple):
    """A path of products: a key of `Rates.product_tflops`, and its number of products for one of the call's."""

    name: str
    products: int
    tflops: float

    @property
    def useful_tflops(self) -> float:
        return self.tflops / self.products


def product_paths(problem: AttentionProblem) -> dict[str, int]:
    """Returns path -> number of products, for the paths that are accurate enough.

    16-bit products use matrix instructions, or float32 if a device has none for the dtype.
    """
    if problem.dtype != "float32":
        return {problem.dtype: 1}
    if problem.precision == "ieee" and problem.error_budget is None:
        return FLOAT32_PATHS["ieee"]
    return arithmetics.as_accurate_as(problem)  # another arithmetic may stand in for a named one


def product_path(problem: AttentionProblem, rates: Rates, gpu: Gpu) -> Path | None:
    """Returns the fastest of `product_paths` that the device has; else the fastest path that is as accurate; else plain
    float32. None for a quantized call on a device with an 8-bit unit whose rate is unknown."""
    if problem.is_quantized:
        return _quantized_path(problem, rates, gpu, *_units(problem))
    found = fastest(product_paths(problem), rates)
    if found is None and problem.dtype == "float32":
        found = fastest(arithmetics.as_accurate_as(problem), rates)
    return found or fastest(FLOAT32_PATHS["ieee"], rates)


def fastest(paths: Mapping[str, int], rates: Rates) -> Path | None:
    """Returns the path with the highest useful rate that the device has; None if it has none."""
    known = [Path(name, n, rates.product_tflops[name]) for name, n in paths.items() if name in rates.product_tflops]
    return max(known, key=lambda path: path.useful_tflops, default=None)


def _units(problem: AttentionProblem) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the paths on which each of the two products of a quantized call is exact, or rounds probabilities as the
    call allows. float16 holds every number of int8 and of both float8 formats."""
    eight = "int8" if problem.dtype == "int8" else "fp8"
    if problem.dtype_of_v in ("float16", "bfloat16"):
        return (eight, "float16"), (problem.dtype_of_v,)
    return (eight, "float16"), ("float16",) if problem.dtype_of_v == "int8" else ("fp8", "float16")


def quantized_path_of_kernel(problem: AttentionProblem, rates: Rates, gpu: Gpu, widens: bool = False) -> Path | None:
    """Returns the path of a kernel, which multiplies 8-bit numbers as they are; as float16 on gfx942, whose matrix unit
    has other float8 formats.

    Args:
        widens: whether the kernel multiplies a v of 8 bits in float16.
    """
    of_scores, of_values = (units[:1] for units in _units(problem))
    if widens and of_values == ("fp8",):
        of_values = ("float16",)
    if gpu.arch == "gfx942":
        of_scores, of_values = (("float16",) if units == ("fp8",) else units for units in (of_scores, of_values))
    return _quantized_path(problem, rates, gpu, of_scores, of_values) or product_path(problem, rates, gpu)


def _quantized_path(
    problem: AttentionProblem, rates: Rates, gpu: Gpu, of_scores: Sequence[str], of_values: Sequence[str]
) -> Path | None:
    """Returns both products of a quantized call as one path, whose rate is that of one product after the other."""
    units, sheet = {*of_scores, *of_values}, data_sheet(gpu)
    if sheet is not None:
        units &= sheet.peak_tflops.keys()
    if units - rates.product_tflops.keys() and not gpu.is_cpu:
        return None
    qk, pv = (fastest(dict.fromkeys(paths, 1), rates) for paths in (of_scores, of_values))
    if qk is None or pv is None:  # a CPU, or a card from before bfloat16
        return fastest(FLOAT32_PATHS["ieee"], rates)
    width, width_v = problem.head_dim, problem.head_dim_v
    rate = (width + width_v) / (width / qk.tflops + width_v / pv.tflops)
    return Path(qk.name if qk.name == pv.name else f"{qk.name} and {pv.name}", 1, rate)


def _products(problem: AttentionProblem, work: Work, rates: Rates, gpu: Gpu, path: Path | None) -> Iterator[Bound]:
    if path is None:
        return
    if gpu.is_cpu:
        # A CPU kernel may convert its operands first, so slow 16-bit arithmetic is not a bound.
        path = max((path, Path(FLOAT32_UNITS, 1, rates.product_tflops.get(FLOAT32_UNITS, 0.0))), key=lambda p: p.tflops)
    resource = "products" if gpu.is_cpu else "float32 units" if path.name == FLOAT32_UNITS else "tensor cores"
    flops = path.products * work.flops
    times = f"{path.products} x " if path.products > 1 else ""
    sides = ((work.over_head_dim, problem.head_dim), (work.over_head_dim_v, problem.head_dim_v))
    widths = " + ".join(f"{n} x {size}" if n > 1 else f"{size}" for n, size in sides)
    said = f"{times}2 x {_pairs(problem)} x ({widths}) = {flop(flops)}"
    yield _bound(resource, flops, "FLOP", path.tflops, "TFLOP/s", said, note=f" ({path.name})")


def _pairs(problem: AttentionProblem) -> str:
    if problem.packed or problem.has_band or problem.mask_shape is not None:
        return f"{problem.visible_pairs:,} visible pairs"
    return f"{problem.batch} x {problem.num_heads_q} heads x {problem.seqlen_q} x {problem.seqlen_k} pairs"


def _exponentials(work: Work, rates: Rates) -> Iterator[Bound]:
    if rates.exponentials_gops is not None:
        said = f"{count(work.exponentials, 'exp')}, one a pair"
        yield _bound("exponentials", work.exponentials, "exp", rates.exponentials_gops, "Gexp/s", said)


def _memory(problem: AttentionProblem, work: Work, rates: Rates, hot: bool) -> Iterator[Bound]:
    if rates.memory_gbps is None or (hot and not rates.cache_bytes):
        return
    least = work.compulsory_bytes
    parts = ", ".join(f"{name} {byte(size)}" for name, size in tensor_bytes(problem, work).items())
    said = f"{byte(least)} ({parts})"
    if hot:
        said = f"{byte(least)}, less {byte(rates.cache_bytes)} that may still be in cache"
        least = max(0, least - rates.cache_bytes)
    yield _bound("memory", least, "byte", rates.memory_gbps, "GB/s", said)


def tensor_bytes(problem: AttentionProblem, work: Work | None = None) -> dict[str, int]:
    """Returns each tensor's bytes that must cross the memory bus; `compulsory_bytes` is their sum.

    Args:
        work: `problem.work()` of the pass; None is the forward's.
    """
    work = work or problem.work()
    size = DTYPE_BYTES[problem.dtype]
    rows = problem.rows * problem.num_heads_q
    queries, keys = problem.queries_needed, problem.keys_needed
    read_or_written = ("dout", queries) if work.is_backward else ("out", rows)
    parts = {
        "q": queries * problem.head_dim * size,
        "k": keys * problem.head_dim * DTYPE_BYTES[problem.dtype_of_k],
        "v": keys * problem.bytes_of_value,
        read_or_written[0]: read_or_written[1] * problem.head_dim_v * DTYPE_BYTES[problem.dtype_of_out],
    }
    if work.is_backward:
        every_key = (problem.total_k if problem.packed else problem.batch * problem.seqlen_k) * problem.num_heads_kv
        parts |= {
            "dq": rows * problem.head_dim * size,
            "dk": every_key * problem.head_dim * size,
            "dv": every_key * problem.head_dim_v * size,
        }
    rest = work.compulsory_bytes - sum(parts.values())
    return parts | ({"the rest": rest} if rest else {})


# Bounds of a kernel ---------------------------------------------------------------------------------------------------


def _of_kernel(problem: AttentionProblem, work: Work, rates: Rates, path: Path | None, cost: Cost) -> Iterator[Bound]:
    """Yields the bounds by a kernel's `cost`."""
    share, where = busy_share(problem, rates.num_sms, cost.blocks)
    if path is not None:
        flops = path.products * cost.flops
        times = f"{path.products} x " if path.products > 1 else ""
        said = f"{times}{flop(cost.flops)} over whole tiles, {ratio(cost.flops, work.flops)} x the work"
        how = f" ({path.name}){where}" if problem.dtype == "float32" or problem.is_quantized else where
        yield _bound("tiles", flops, "FLOP", path.tflops, "TFLOP/s", said, share, how, of_kernel=True)
    if rates.exponentials_gops is not None:
        said = f"{count(cost.exponentials, 'exp')} over whole tiles"
        rate = rates.exponentials_gops
        yield _bound(
            "exponentials in tiles", cost.exponentials, "exp", rate, "Gexp/s", said, share, where, of_kernel=True
        )
    if rates.l2_gbps is not None:
        total = cost.read_bytes + cost.write_bytes
        said = f"{byte(total)}, each tile as often as it is read or written"
        yield _bound("L2", total, "byte", rates.l2_gbps, "GB/s", said, of_kernel=True)


def busy_share(problem: AttentionProblem, num_sms: int, blocks: int) -> tuple[float, str]:
    """Returns the share of all SMs that are busy, and its arithmetic. A block runs on one SM: an SM without a block is
    idle, and with equal blocks, the SM that gets one more than the others determines the end."""
    if not num_sms or not blocks:
        return 1.0, ""
    if blocks < num_sms:
        return blocks / num_sms, f" x {blocks} / {num_sms} SMs"
    alike = not problem.has_band and not problem.packed
    rounds = -(-blocks // num_sms)
    share = blocks / (rounds * num_sms)
    if not alike or share > 0.995:
        return 1.0, ""
    return share, f" x {blocks:,} blocks / {rounds:,} rounds of {num_sms}"


# Arithmetic in words --------------------------------------------------------------------------------------------------

PER_US = {"TFLOP/s": 1e6, "Gexp/s": 1e3, "GB/s": 1e3}  # work per microsecond at a rate of 1


def _bound(
    resource: str,
    amount: float,
    unit: str,
    rate: float,
    rate_unit: str,
    work: str,
    share: float = 1.0,
    note: str = "",
    of_kernel: bool = False,
) -> Bound:
    time_us = amount / (rate * share * PER_US[rate_unit])
    by = f"{figure(rate)} {rate_unit}"
    arithmetic = f"{work} / {f'({by}{note})' if share != 1 else f'{by}{note}'} = {us(time_us)}"
    return Bound(resource, amount, unit, rate * share, rate_unit, time_us, arithmetic, of_kernel)


def us(time_us: float) -> str:
    """Returns a time with at least three digits: in us, from 100,000 us on in ms, from 10,000 ms on in s."""
    value, unit = (
        (time_us * 1e-6, "s") if time_us >= 1e7 else (time_us * 1e-3, "ms") if time_us >= 1e5 else (time_us, "us")
    )
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f} {unit}"


def flop(amount: float) -> str:
    """Returns a number of operations with a decimal prefix."""
    return _scaled(amount, "FLOP")


def byte(amount: float) -> str:
    """Returns a number of bytes with a decimal prefix."""
    return _scaled(amount, "B")


def count(amount: float, of: str) -> str:
    """Returns a number of things with a decimal prefix."""
    return _scaled(amount, of)


def ratio(a: float, b: float) -> str:
    """Returns a over b, or a dash if b is 0."""
    return multiple(a / b) if b else "-"


def _scaled(amount: float, unit: str) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if amount >= size:
            return f"{figure(amount / size)} {prefix}{unit}"
    return f"{amount:,.0f} {unit}"


def figure(value: float) -> str:
    """Returns four digits, and more only before the decimal point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def multiple(value: float) -> str:
    """Returns three digits, and more only before the decimal point."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"
