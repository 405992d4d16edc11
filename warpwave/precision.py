"""The arithmetics of float32 products: their cost, their error, and the one that a `precision` selects on each GPU.
Kernels, checks, bounds and `explain` all read this one table.

A matrix unit multiplies short numbers: tf32 and float16 have 11 significant bits, bfloat16 8, float32 24. A float32
operand is either rounded to one short number, or split into a few whose sum approximates it better; then each product
becomes a few:

    x = x0 + x1 (+ x2);   x y ~ x0 y0 + (x0 y1 + x1 y0) (+ x1 y1 + x0 y2 + x2 y0)

Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations"
(2019); Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores" (2022). docs/notes/float32.md
derives the figures and shows the measurements.

The promised error is |out - exact| / |exact|, in Euclidean norms over the whole of out, with exact computed in float64
from the same inputs. It holds for inputs no sharper than the conformance suite's: logits of standard deviation 9, or
all near -40. For sharper inputs, the error of a logit grows with the logit, and `explain` measures it on the call's own
rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from warpwave.gpu import Gpu
from warpwave.problem import AttentionProblem


@dataclass(frozen=True)
class Arithmetic:
    """One way to compute float32 products.

    Attributes:
        name: its name in `precision`.
        description: what is multiplied, in words.
        products: matrix-unit products for each product of the call.
        units: the units that can compute them, keys of `workbench.hardware.catalog.PATHS`.
        significant_bits: of each operand, of float32's 24. In float16 they hold down to 2^-28 of the largest magnitude
            of its head (in two parts, 2^-17), which a power of two scales to the end of float16's range.
        operand: relative error of out from rounding probabilities and values.
        logit, logit_per_dim: the additional error from the logits, constant and per element of head_dim: sums over it
            are rounded as they grow.
        per_key, key_power: the additional error from summing over the keys: `per_key * keys ** key_power`.
    """

    name: str
    description: str
    products: int
    units: tuple[str, ...]
    significant_bits: int
    operand: float
    logit: float
    logit_per_dim: float = 0.0
    per_key: float = 0.0
    key_power: float = 1.0


# Errors: upper bounds of the largest errors in emulation on the contract's data, calls of 16 rows and more
# (benchmarks/float32_error.py, which assumes that tensor cores truncate more than an H200's were seen to; tests
# compare the bounds with its record, benchmarks/records/2026-11-21-float32-emulation.jsonl).
ARITHMETICS: dict[str, Arithmetic] = {
    a.name: a
    for a in (
        # Probabilities times values are summed over all keys in one accumulator, which truncates each sum.
        Arithmetic("tf32", "one product of operands rounded to tf32", 1, ("tf32",), 11, 4e-4, 1.3e-3, 0.0, 1.2e-8),
        Arithmetic(
            "bf16x3", "three products of two bfloat16 parts each, x1 y1 left out", 3, ("bfloat16",), 16, 8e-6, 2.2e-5
        ),
        Arithmetic(
            "tf32x3", "three products of two tf32 parts each, x1 y1 left out", 3, ("tf32",), 22, 4e-7, 7e-7, 4.2e-9
        ),
        Arithmetic(
            "bf16x6", "six products of three bfloat16 parts each, the three smallest left out", 6, ("bfloat16",), 24,
            1e-7, 4.2e-7, 2.2e-9, 1e-9, 0.5,
        ),
        # Like tf32, which has as many bits.
        Arithmetic(
            "fp16x1", "one product of operands scaled by powers of two and rounded to float16", 1, ("float16",), 11,
            4e-4, 1.3e-3, 0.0, 1.2e-8,
        ),
        Arithmetic(
            "fp16x3", "three products of two float16 parts each, of operands scaled by powers of two, x1 y1 left out",
            3, ("float16",), 22, 1.5e-7, 7e-7, 0.0, 5e-10, 0.5,
        ),
        # Sums over head_dim and over the keys are rounded once for each element.
        Arithmetic(
            "ieee", "float32 multiply-adds", 1, ("float32_matrix", "float32"), 24, 1e-7, 9e-7, 7.5e-9, 1.9e-8, 0.5
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """The properties of float32 products on one family of devices.

    Attributes:
        name: name of the family, for people.
        archs: prefixes of `Gpu.arch`, or vendors.
        default: the fastest arithmetic whose error is at most that of torch's own kernel.
        costs: arithmetic -> time of a product, in units of one 16-bit product, by the makers' rates. An arithmetic is
            absent if the device, or Triton's compiler for it, lacks it, or if one at least as accurate takes less time.
            `standing_for` gives its replacement.
        note: the reason.
    """

    name: str
    archs: tuple[str, ...]
    default: str
    costs: Mapping[str, float]
    note: str


def _costs(tf32: float | None, ieee: float) -> dict[str, float]:
    """Returns the costs from the cost of a tf32 product, None if there is none, and of a float32 product."""
    costs = {} if tf32 is None else {"tf32": tf32, "tf32x3": 3 * tf32}
    return costs | {"bf16x3": 3.0, "bf16x6": 6.0, "ieee": ieee}


# The arithmetics that Triton kernels can compute, assumed for a kernel that does not state others: all except those of
# float16, whose scales only `hopper/flash_fwd` computes.
PORTABLE = tuple(name for name, a in ARITHMETICS.items() if a.units != ("float16",))

# The first entry that matches is used.
TARGETS: tuple[Target, ...] = (
    Target(
        "Hopper", ("sm_90",), "fp16x3", {"fp16x1": 1.0, "fp16x3": 3.0, **_costs(None, 14.8)},
        "wgmma reads tf32 operands from shared memory only with the summed axis contiguous, so V would go through "
        "registers to be transposed; 16-bit operands come either way round, scaled float16 has as many bits as tf32 at "
        "twice its rate, and bfloat16, which needs no scale, takes less time in kernels that find none",
    ),
    Target(
        "Blackwell, data center", ("sm_100", "sm_103"), "tf32x3", _costs(2, 30),
        "tf32 at half the rate of bfloat16, float32 units at a thirtieth",
    ),
    Target(
        "Ampere, data center", ("sm_80", "sm_87"), "tf32x3", _costs(2, 16),
        "mma.sync: tf32 at half the rate of bfloat16, float32 units at a sixteenth",
    ),
    Target(
        "GeForce and workstation cards", ("sm_86", "sm_89", "sm_120", "sm_121"), "tf32x3", _costs(2, 2),
        "float32 units are rated like tf32, half of bfloat16, but softmax needs them too",
    ),
    Target(
        "CDNA 1", ("gfx908",), "ieee", _costs(None, 2),
        "float32 matrix instructions run at half the rate of bfloat16, and there is no tf32",
    ),
    Target(
        "CDNA 2", ("gfx90a",), "ieee", _costs(None, 4),
        "float32 matrix instructions run at a quarter of the rate of bfloat16, and there is no tf32",
    ),
    Target(
        "CDNA 3", ("gfx942",), "ieee", {"tf32": 2.0, **_costs(None, 8)},
        "tf32 at half the rate of bfloat16, which Triton compiles, but not split; float32 matrix instructions at an "
        "eighth",
    ),
    Target(
        "CDNA 4", ("gfx950",), "ieee", _costs(None, 16),
        "tf32 is gone; float32 matrix instructions run at a sixteenth of the rate of bfloat16",
    ),
    Target(
        "RDNA", ("gfx11", "gfx12", "gfx10"), "ieee", {"ieee": 1.0},
        "matrix instructions take 16-bit operands only, and float32 units are rated at half of them: splitting gains "
        "nothing",
    ),
    Target(
        "other NVIDIA GPUs", ("nvidia",), "tf32x3", _costs(2, 16), "taken to be like sm_80",
    ),
    Target(
        "other AMD GPUs", ("amd",), "ieee", {"ieee": 1.0},
        "nothing is known but that they have float32",
    ),
    # Nothing is timed there, and every arithmetic must be testable: those of Hopper, by their names.
    Target("Triton's interpreter", ("interpreter",), "ieee", _costs(2, 14.8), "tests"),
    Target(
        "CPU", ("cpu",), "ieee", {"ieee": 1.0},
        "torch's own float32 products",
    ),
)  # fmt: skip

# The error of a few rows varies: single rows were almost five times as far off as many together.
FEW_ROWS = 4.0


def target(gpu: Gpu) -> Target:
    """Returns the row of the table for a device."""
    return next(t for t in TARGETS if gpu.vendor in t.archs or gpu.arch.startswith(t.archs))


def arithmetic(problem: AttentionProblem, gpu: Gpu, able: Iterable[str] = PORTABLE) -> str:
    """Returns the name of the arithmetic that `problem.precision`, or the budget, selects on a device: "ieee" for
    16-bit inputs, whose products need none.

    Args:
        able: the arithmetics that the kernel can compute.

    If nothing keeps the budget it is the most accurate one, which `why_not` refuses.
    """
    if problem.dtype != "float32":
        return "ieee"
    if problem.error_budget is not None:
        return cheapest(problem, gpu, able) or most_accurate(problem, gpu, able) or "ieee"
    name = target(gpu).default if problem.precision == "default" else problem.precision
    return standing_for(name, gpu, able)


def standing_for(name: str, gpu: Gpu, able: Iterable[str] = PORTABLE) -> str:
    """Returns a named arithmetic. If a device or a kernel lacks it, returns the cheapest that is at least as accurate;
    of several equally cheap ones, the most accurate."""
    bits = {a.name: a.significant_bits for a in ARITHMETICS.values()}
    costs = target(gpu).costs
    there = [n for n in able if n in costs]
    if name in there or name == "ieee":
        return name
    as_accurate = [n for n in there if bits[n] >= bits[name]]
    return min(as_accurate, key=lambda n: (costs[n], -bits[n]), default="ieee")


def promised_error(name: str, problem: AttentionProblem) -> float:
    """Returns the relative error of out that an arithmetic keeps on a call (see this module's docstring for the
    norm)."""
    a = ARITHMETICS[name]
    keys = max(1, problem.seqlen_k)
    rows = max(1, problem.rows * problem.num_heads_q)
    # By default logits have the spread of the data; a larger scale spreads them and their errors.
    spread = max(1.0, problem.softmax_scale * math.sqrt(problem.head_dim))
    error = a.operand + spread * (a.logit + a.logit_per_dim * problem.head_dim) + a.per_key * keys**a.key_power
    return error * (1 + FEW_ROWS / math.sqrt(rows))


def keeping(problem: AttentionProblem, budget: float, able: Iterable[str] = PORTABLE) -> list[str]:
    """Returns the arithmetics that promise a call's error within a budget."""
    return [name for name in able if promised_error(name, problem) <= budget]


def cheapest(problem: AttentionProblem, gpu: Gpu, able: Iterable[str] = PORTABLE) -> str | None:
    """Returns the cheapest arithmetic of a device that keeps the call's budget; None if there is none."""
    assert problem.error_budget is not None
    costs = target(gpu).costs
    # At equal cost prefer the matrix unit, which leaves the other units to the softmax; then the more accurate one.
    found = [name for name in keeping(problem, problem.error_budget, able) if name in costs]
    return min(found, key=lambda n: (costs[n], n == "ieee", promised_error(n, problem)), default=None)


def most_accurate(problem: AttentionProblem, gpu: Gpu, able: Iterable[str] = PORTABLE) -> str | None:
    """Returns the arithmetic of a device with the smallest promised error; None if the device has none of them."""
    return min((n for n in able if n in target(gpu).costs), key=lambda n: promised_error(n, problem), default=None)


def why_not(problem: AttentionProblem, gpu: Gpu, able: Iterable[str] = PORTABLE) -> list[str]:
    """Returns why a kernel that can compute `able` cannot keep the requested precision on a GPU; empty if it can."""
    if problem.dtype != "float32" or problem.error_budget is None or cheapest(problem, gpu, able):
        return []
    best = most_accurate(problem, gpu, able)
    if best is None:
        return [f"it has no float32 arithmetic on {gpu.name}"]
    return [
        f"no float32 arithmetic it has on {gpu.name} keeps a relative error of {problem.error_budget:g}: its smallest "
        f"promised error for this call is {promised_error(best, problem):.2g}, by {best}"
    ]


def as_accurate_as(problem: AttentionProblem) -> dict[str, int]:
    """Returns unit -> the fewest of its products that any implementation needs for the requested precision, on any
    device. Bounds are computed from it."""
    if problem.error_budget is not None:
        names = keeping(problem, problem.error_budget, ARITHMETICS)
    elif problem.precision == "default":
        names = ["ieee", "tf32x3", "bf16x6", "fp16x3"]
    else:
        bits = ARITHMETICS[problem.precision].significant_bits
        names = [a.name for a in ARITHMETICS.values() if a.significant_bits >= bits]
    return fewest(names or ["ieee"])


def fewest(names: Iterable[str]) -> dict[str, int]:
    """Returns unit -> the fewest products on it by any of these arithmetics."""
    found: dict[str, int] = {}
    for name in names:
        for unit in ARITHMETICS[name].units:
            found[unit] = min(found.get(unit, 99), ARITHMETICS[name].products)
    return found
