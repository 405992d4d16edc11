"""How accurate a float32 call is: what computes it, what that promises, and what it keeps on this call's own rows.

For `explain`. The promise is that of warpwave.precision; it is made for inputs no sharper than the conformance suite's,
and only a measurement can say whether a call's own inputs are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from warpwave import precision
from warpwave.gpu import Gpu
from warpwave.problem import AttentionProblem, Operands


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of a float32 call. Errors are |out - exact| / |exact|, Euclidean norms, exact from float64.

    Attributes:
        asked: the name or the budget that the call gave.
        arithmetic: what computes the products, a key of `precision.ARITHMETICS`.
        description: what that multiplies, in words.
        promised: the error it promises for the call.
        others: the other arithmetics of the device and what they promise, the cheapest first.
        note: what the device's family is like.
        measured: the error on sampled rows of the call's own tensors; None where it was not run.
        rows: how many were sampled, over all batches and heads.
    """

    asked: str
    arithmetic: str
    description: str
    promised: float
    others: tuple[tuple[str, float], ...]
    note: str
    measured: float | None = None
    rows: int = 0


def of_call(
    problem: AttentionProblem, gpu: Gpu, kernel: Any, config: Any, arithmetic: str, operands: Operands | None
) -> Accuracy | None:
    """The accuracy of a call by the kernel that serves it; None for 16-bit inputs. With a budget and tensors at hand
    the call is run once, and rows of it are compared.

    Args:
        operands: the tensors, or None where there are none or the kernel would run on another device than theirs.
    """
    if problem.dtype != "float32":
        return None
    here = precision.target(gpu)
    measured, rows = None, 0
    if operands is not None and problem.error_budget is not None and operands.q.device.type != "meta" and problem.rows:
        measured, rows = _measure(problem, kernel, config, operands)
    by_cost = sorted((n for n in here.costs if n != arithmetic), key=lambda n: here.costs[n])
    return Accuracy(
        problem.precision if problem.error_budget is None else f"{problem.error_budget:g}",
        arithmetic,
        precision.ARITHMETICS[arithmetic].description,
        precision.promised_error(arithmetic, problem),
        tuple((name, precision.promised_error(name, problem)) for name in by_cost),
        f"{here.name}: {here.note}",
        measured,
        rows,
    )


def _measure(problem: AttentionProblem, kernel: Any, config: Any, operands: Operands) -> tuple[float, int]:
    from warpwave.workbench.bench.correctness import Sample

    sample = Sample(problem, operands)
    with torch.no_grad():
        out, _ = kernel.bind(problem, operands, config)(operands)
    return sample.relative_error(out), sample.rows
