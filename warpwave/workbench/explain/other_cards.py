"""The same call on other cards: predicted time with an error bar, the bound, and the validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from warpwave import dispatch
from warpwave.errors import InvalidInput, UnsupportedProblem
from warpwave.gpu import Gpu
from warpwave.problem import AttentionProblem
from warpwave.workbench.explain.backward import both_of, saving_of
from warpwave.workbench.explain.text import in_words_of
from warpwave.workbench.hardware.catalog import DataSheet, catalog, data_sheet, gpu_of, hint, sheet_of
from warpwave.workbench.model.predict import Prediction, predict
from warpwave.workbench.model.roofline import Roofline, data_sheet_rates, estimated, figure, roofline, us
from warpwave.workbench.terminal import columns


@dataclass(frozen=True)
class Row:
    """The explanation of the call on one card.

    Attributes:
        card: key of its data sheet.
        kernel, config: the kernel that would serve the call, and its config; empty and None if none does.
        prediction: its predicted time; None if the model does not cover the kernel.
        bounds: the bounds by the data sheet; of the forward.
        gpu: the card as the dispatcher sees it.
        refusal: the reason why no kernel serves it.
        gradients: of a call with gradients, the kernel that computes them; `prediction` is then of both passes.
    """

    card: str
    kernel: str
    config: Any
    prediction: Prediction | None
    bounds: Roofline
    gpu: Gpu
    refusal: str = ""
    gradients: str = ""


def cards(names: str) -> list[DataSheet]:
    """Returns the cards of a list such as "l4,h100,card.toml"; "all" is the whole catalog.

    Raises:
        InvalidInput: a name is not a card.
    """
    if names.strip().lower() == "all":
        return list(catalog().values())
    found = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        try:
            sheet = sheet_of(name) or _by_prefix(name)
        except ValueError as error:
            raise InvalidInput(str(error)) from None
        if sheet is None:
            raise InvalidInput(f"GPU {name!r} is not in the catalog, and a list has only cards; {hint(name)}")
        found.append(sheet)
    if not found:
        raise InvalidInput(f"{names!r} names no card; {hint(names)}")
    return list({sheet.key: sheet for sheet in found}.values())


def _by_prefix(name: str) -> DataSheet | None:
    """Returns the last sheet of a name that several sheets share, such as a100, leaving out PCIe boards."""
    alike = [s for s in catalog().values() if s.key.startswith(f"{name.lower()}-") and not s.key.endswith("pcie")]
    return alike[-1] if alike else None


def explain_on(
    problem: AttentionProblem, sheets: Sequence[DataSheet], *, kernel: str = "auto", hot: bool = False
) -> list[Row]:
    """Explains the call on each card, with the kernel that would serve it there."""
    rows = []
    for sheet in sheets:
        gpu = gpu_of(sheet)
        bounds = roofline(problem, data_sheet_rates(sheet), gpu=gpu, hot=hot).of_problem
        try:
            forward, _ = dispatch.forward_of(problem, gpu, kernel)
            choice = dispatch.choose(forward, gpu, kernel, None)
        except UnsupportedProblem as error:
            rows.append(Row(sheet.key, "", None, None, bounds, gpu, str(error)))
            continue
        found = predict(forward, choice.kernel, choice.config, gpu, hot=hot, sheet=data_sheet(gpu) or sheet)
        gradients = ""
        if problem.requires_grad:
            module, of_pass = dispatch.gradients_for(problem, gpu, kernel), saving_of(problem)
            found = both_of(found, predict(of_pass, module, module.default(of_pass, gpu), gpu, hot=hot))
            gradients = module.NAME
        rows.append(Row(sheet.key, choice.kernel.NAME, choice.config, found, bounds, gpu, gradients=gradients))
    return rows


def _unchecked(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Returns error bar -> cards whose predictions have it and rest on no time of the card."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if (p := row.prediction) is not None and not p.points:
            found.setdefault(f"{p.high_us / p.time_us:.2f}", []).append(row.card)
    return found


def text(problem: AttentionProblem, rows: Sequence[Row]) -> str:
    """Returns one line per card, followed by the basis of the error bars."""
    lines = [f"call       {problem.describe()}", ""]
    cells = [("card", "kernel", "predicted", "nine in ten", "TFLOP/s", "bound", "binds", "most lost by")]
    for row in rows:
        least, binding = us(row.bounds.time_us), row.bounds.binding
        served = " + ".join(filter(None, (row.kernel, row.gradients)))
        binds = "" if binding is None else in_words_of(row.gpu, binding.resource)
        if row.prediction is None:
            why = "no kernel serves it" if row.refusal else "no work, or no model"
            cells.append((row.card, served or "-", "-", why, "", least, binds, ""))
            continue
        p = row.prediction
        (low, unit), high = us(p.low_us).split(), us(p.high_us)
        span = f"{low} to {high}" if high.endswith(f" {unit}") else f"{low} {unit} to {high}"
        most = max(p.factors, key=p.factors.__getitem__)
        flops = problem.flops + (problem.work(is_backward=True).flops if row.gradients else 0)
        rate = figure(flops / p.time_us * 1e-6)
        star = "" if p.points else " *"
        lost = f"{most} ({p.factors[most]:.2f} x)"
        cells.append((row.card + star, served, us(p.time_us), span, rate, us(p.bound_us), binds, lost))
    lines += [*columns(cells, right=(2, 3, 4, 5)), ""]
    validated = [row for row in rows if row.prediction is not None and row.prediction.points]
    for row in validated:
        assert row.prediction is not None
        lines.append(f"checked    {row.card}: {row.prediction.validated}")
    for factor, names in _unchecked(rows).items():
        why = f"few or no times are known there; nine in ten within a factor {factor} elsewhere"
        if problem.is_quantized:
            why = f"no calibration has quantized calls; the error bar is a factor {factor}"
        lines.append(f"* {why}: {', '.join(names)}")
    if problem.requires_grad:
        lines.append("Times and bounds are of forward and backward.")
    doubts = dict.fromkeys(why for row in rows if (why := estimated(problem, row.bounds)))
    lines += [f"Bounds are estimates: {why}." for why in doubts]
    lines.append("Bounds follow from the data sheets. The kernel is the one that warpwave would choose on the card.")
    return "\n".join(lines)
