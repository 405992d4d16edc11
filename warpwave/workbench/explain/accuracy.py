"""The accuracy of a float32 call, for `explain`: its arithmetic, the promised error, and the error on sampled rows.

The promise is that of warpwave.precision. It holds for inputs with at most the spread of the conformance suite's; only
a measurement shows the error for other inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from warpwave import precision
from warpwave.gpu import Gpu
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of a float32 call. Errors are |out - exact| / |exact|, Euclidean norms, exact from float64.

    Attributes:
        asked: the name or the budget that the call gave.
        arithmetic: the arithmetic of the products, a key of `precision.ARITHMETICS`.
        description: the arithmetic in words.
        promised: the promised error for the call.
        others: the other arithmetics of the device and their promised errors, cheapest first.
        note: about the device's family.
        measured: the error on sampled rows of the call's own tensors; None if the call was not run.
        rows: number of sampled rows, over all batches and heads.
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
    """Returns the accuracy of a call by the kernel that serves it; None for 16-bit inputs. A call with a budget and
    tensors is run once, and sampled rows are compared. A call with dropout is not run.

    Args:
        operands: the tensors; None if there are none, or if they are on another device than the kernel.
    """
    if problem.dtype != "float32":
        return None
    here = precision.target(gpu)
    measured, rows = None, 0
    runs = problem.error_budget is not None and problem.rows and not problem.dropout_p
    if runs and operands is not None and operands.q.device.type != "meta":
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
