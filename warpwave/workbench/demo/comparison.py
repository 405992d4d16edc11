"""Checks and times every kernel that can run a case, next to torch's attention on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import warpwave
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench import environment
from warpwave.workbench.bench.correctness import Verdict
from warpwave.workbench.bench.records import OURS, Measurement
from warpwave.workbench.bench.table import Table
from warpwave.workbench.bench.timing import CaptureFailed, Samples, time_interleaved
from warpwave.workbench.demo import sentence_model
from warpwave.workbench.verify import reference

BASELINE = "torch SDPA"
ERROR_FACTOR = 2.0  # allowed error against float64, relative to torch's
ROUNDS = 6  # the smallest number that gives an interval
SAMPLE_S = 0.01  # per contender and round, so that the demo ends within a minute on two cores
INTERPRETED = "the interpreter's speed says nothing about any kernel"


@dataclass(frozen=True)
class Case:
    """Attention calls on one set of inputs, the same for every contender.

    Args:
        title: title of the table.
        operands: one per layer; a contender's time is that of all layers, divided by their number.
        causal: as in `attention`.
        packed: the layout, if the operands are packed.
        padded: the same tokens padded, for torch, which has no call for packed ones.
    """

    title: str
    operands: Sequence[Operands]
    causal: bool = False
    packed: sentence_model.Packed | None = None
    padded: tuple[sentence_model.Padded, Sequence[Operands]] | None = None

    def ours(self, kernel: str) -> list[Tensor]:
        door = warpwave.attention if self.packed is None else warpwave.attention_varlen
        return [self._call(partial(door, kernel=kernel), o) for o in self.operands]

    def explain(self) -> Any:
        return self._call(warpwave.explain, self.operands[0])

    def _call(self, function: Callable[..., Any], o: Operands) -> Any:
        if self.packed is None:
            return function(o.q, o.k, o.v, causal=self.causal, mask=o.mask)
        return function(o.q, o.k, o.v, causal=self.causal, **packed_arguments(self.packed))

    def torchs(self) -> tuple[Callable[[], list[Tensor]], Callable[[Tensor], Tensor]]:
        """Returns torch's call for all layers, and a function that views each result in our layout."""
        operands = self.padded[1] if self.padded else self.operands
        # Its layout is prepared here, outside the timing.
        inputs = [
            (*(x.transpose(1, 2).contiguous() for x in (o.q, o.k, o.v)), o.mask, 0.0, self.causal) for o in operands
        ]

        def call() -> list[Tensor]:
            return [F.scaled_dot_product_attention(*arguments) for arguments in inputs]

        if self.padded is None:
            return call, lambda out: out.transpose(1, 2)
        is_token = self.padded[0].is_token
        return call, lambda out: out.transpose(1, 2)[is_token]

    def verdict(
        self, outs: Sequence[Tensor], exact: Sequence[Tensor], model: Sequence[Tensor], limit: float = math.inf
    ) -> Verdict:
        """Returns the errors over all layers, and whether the largest is within the limit."""
        rms, largest, rows = _errors([_first_of_large(out) for out in outs], exact)
        model_rms, model_largest, _ = _errors(model, exact)
        reason = "" if largest <= limit else f"max error {largest:.1e} is above {limit:.1e}"
        if not math.isfinite(largest):
            return Verdict(False, "out has NaN or infinite elements", None, None, model_rms, model_largest, rows)
        return Verdict(not reason, reason, rms, largest, model_rms, model_largest, rows)

    def exact(self) -> list[Tensor]:
        """Returns float64 results, of the whole call or, if it is large, of its first sequence and head."""
        return self._by(reference.oracle)

    def rounding_model(self) -> list[Tensor]:
        """Returns the results with the unavoidable roundings of the dtype."""
        return self._by(reference.rounding_model)

    def _by(self, formula: Callable[[AttentionProblem, Operands], Any]) -> list[Tensor]:
        problem = self.explain().problem
        if _is_large(self.operands[0].q):
            problem = replace(problem, batch=1, num_heads_q=1, num_heads_kv=1)
        cut = [
            o._replace(q=_first_of_large(o.q), k=_first_of_large(o.k), v=_first_of_large(o.v)) for o in self.operands
        ]
        return [formula(problem, o).out for o in cut]


def _errors(outs: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[float, float, int]:
    """Returns the RMS and the largest error over all layers, and the number of rows compared."""
    errors = torch.cat([(out.double() - e).reshape(-1, e.shape[-1]) for out, e in zip(outs, exact, strict=True)])
    largest = errors.abs().max().item()
    return errors.square().mean().sqrt().item(), math.inf if math.isnan(largest) else largest, len(errors)


def _is_large(x: Tensor) -> bool:
    return x.dim() == 4 and x.shape[1] >= 512


def _first_of_large(x: Tensor) -> Tensor:
    return x[:1, :, :1] if _is_large(x) else x


def packed_arguments(packed: sentence_model.Packed) -> dict[str, Any]:
    """Returns the arguments of `attention_varlen` that describe the layout."""
    return {
        "cu_seqlens_q": packed.cu_seqlens,
        "cu_seqlens_k": packed.cu_seqlens,
        "max_seqlen_q": packed.max_seqlen,
        "max_seqlen_k": packed.max_seqlen,
    }


def random_cases(device: torch.device) -> list[Case]:
    """Returns two cases that are larger than the model's, and large enough to fill a GPU."""
    generator = torch.Generator(device).manual_seed(0)

    def case(batch: int, seqlen: int, heads: int, head_dim: int, dtype: torch.dtype, causal: bool) -> Case:
        shape = (batch, seqlen, heads, head_dim)
        q, k, v = (torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(3))
        title = f"{batch} x {seqlen} tokens, {heads} heads x {head_dim}, {short(dtype)}{', causal' if causal else ''}"
        return Case(title, [Operands(q, k, v)], causal)

    if device.type == "cpu":
        return [case(1, 1024, 12, 64, torch.float32, True), case(1, 2048, 4, 64, torch.float32, False)]
    return [case(4, 4096, 16, 128, torch.bfloat16, True), case(1, 16384, 16, 128, torch.bfloat16, False)]


def small_random_case(device: torch.device, dtype: torch.dtype) -> Case:
    """Returns a replacement for the model's layers if the model is missing."""
    generator = torch.Generator(device).manual_seed(0)
    layers = [
        Operands(*(torch.randn(24, 48, 12, 32, device=device, dtype=dtype, generator=generator) for _ in range(3)))
        for _ in range(6)
    ]
    return Case(f"6 layers' worth of random q, k, v, 24 x 48 tokens, 12 heads x 32, {short(dtype)}", layers)


@dataclass(frozen=True)
class Comparison:
    """The results of one case.

    Attributes:
        title: title of the case.
        measurements: torch's first, then every kernel that can run the case; times are of one layer's call.
        notes: which kernel `auto` chose, and why every other kernel did not run.
        unit: unit of the times.
    """

    title: str
    measurements: Sequence[Measurement]
    notes: Sequence[str]
    unit: str = "us"

    @property
    def wrong(self) -> list[str]:
        """The kernels whose results are wrong."""
        return [m.kernel or m.contender for m in self.measurements if m.verdict is None or not m.verdict.passed]

    @property
    def right(self) -> bool:
        """Whether every result is right."""
        return not self.wrong

    @property
    def auto(self) -> Measurement | None:
        """The measurement of the kernel that `auto` chooses; None if it could not be measured."""
        return next((m for m in self.measurements if m.contender == f"{OURS}auto"), None)

    def summary(self) -> tuple[str, ...]:
        """Returns the cells of the case in the short table: torch's time, ours, the ratio, and the verdict."""
        baseline, auto = self.measurements[0].timing, self.auto
        times = ["", "", ""]
        if auto is not None and auto.timing is not None and baseline is not None:
            ratio = baseline.median_us / auto.timing.median_us
            times = [f"{baseline.median_us:,.1f}", f"{auto.timing.median_us:,.1f}", f"{ratio:.2f}"]
        checked = sum(m.contender.startswith(OURS) for m in self.measurements)
        verdict = f"FAIL: {', '.join(self.wrong)}" if self.wrong else f"{checked} of {checked} kernels pass"
        return (self.title, "" if auto is None else auto.kernel, *times, self.unit, verdict)

    def table(self, unit: str) -> Table:
        """Returns the table of every kernel, with the reasons of those that did not run."""
        baseline = self.measurements[0].timing
        how = "" if baseline is None else f" ({baseline.method}, median of {len(baseline.samples_us)} rounds)"
        columns = ("kernel", "max error", "verdict", unit, "speed / torch's")
        rows = [_row(m, baseline) for m in self.measurements]
        return Table(self.title + how, columns, rows, tuple(self.notes))


def _row(m: Measurement, baseline: Samples | None) -> tuple[str, ...]:
    assert m.verdict is not None  # `compare` sets a verdict for every contender
    name = m.contender if m.contender == BASELINE else m.kernel + (" (auto)" if m.contender == f"{OURS}auto" else "")
    verdict = "FAIL" if not m.verdict.passed else "baseline" if m.contender == BASELINE else "pass"
    largest = math.inf if m.verdict.max_error is None else m.verdict.max_error
    if m.timing is None or baseline is None:
        return (name, f"{largest:.1e}", verdict, "", "")
    speed = baseline.median_us / m.timing.median_us
    return (name, f"{largest:.1e}", verdict, f"{m.timing.median_us:,.1f}", f"{speed:.2f}")


def compare(case: Case, device: torch.device) -> Comparison:
    """Checks and times every kernel that can run the case, and notes why the others did not run."""
    explanation = case.explain()
    able = [name for name, reasons in explanation.reasons.items() if not reasons]
    exact, model = case.exact(), case.rounding_model()
    call, to_ours = case.torchs()
    baseline = case.verdict([to_ours(out) for out in call()], exact, model)
    limit = ERROR_FACTOR * (baseline.max_error or 0.0) + torch.finfo(case.operands[0].q.dtype).eps
    verdicts = {BASELINE: baseline} | {name: case.verdict(case.ours(name), exact, model, limit) for name in able}

    contenders = {BASELINE: call} | {name: partial(case.ours, name) for name in able if verdicts[name].passed}
    notes = [f"auto runs {explanation.kernel}"]
    if case.padded:
        notes.append("torch's call takes no packed sequences: it is given the padded ones")
    notes += [f"not {name}: {reason}" for name, reasons in explanation.reasons.items() for reason in reasons]
    times: dict[str, Samples] = {}
    refusals = {name: f"wrong, so not timed: {v.reason}" for name, v in verdicts.items() if not v.passed}
    before = environment.snapshot(device)
    if explanation.gpu.vendor == "interpreter":
        notes.append(f"no times: {INTERPRETED}")
        refusals = dict.fromkeys(contenders, INTERPRETED) | refusals
    else:
        times, dropped = time_contenders(contenders, device)
        notes += [f"not timed: {name} {reason}" for name, reason in dropped.items()]
        refusals |= dropped
    after = environment.snapshot(device) if times else None

    measurements = []
    for name, verdict in verdicts.items():
        ours = "" if name == BASELINE else "auto" if name == explanation.kernel else name
        measurements.append(
            Measurement(
                suite="demo",
                case=case.title,
                problem=explanation.problem,
                contender=f"{OURS}{ours}" if ours else BASELINE,
                kernel=name if ours else "",
                verdict=verdict,
                refusal=refusals.get(name, ""),
                timing=_a_layer(times[name], len(case.operands)) if name in times else None,
                gpu_before=before if name in times else None,
                gpu_after=after if name in times else None,
            )
        )
    return Comparison(case.title, measurements, notes, "us a layer" if len(case.operands) > 1 else "us")


def _a_layer(timing: Samples, layers: int) -> Samples:
    """Returns the time of one layer's call from the time of all layers."""
    return replace(
        timing,
        samples_us=tuple(us / layers for us in timing.samples_us),
        calls_per_repeat=timing.calls_per_repeat * layers,
        input_sets=layers,
    )


def time_contenders(
    contenders: dict[str, Callable[[], object]], device: torch.device
) -> tuple[dict[str, Samples], dict[str, str]]:
    """Returns interleaved times, and why some are missing: short calls need a CUDA graph, which may not capture."""
    refusals: dict[str, str] = {}
    while True:
        try:
            return time_interleaved(contenders, device=device, rounds=ROUNDS, sample_s=SAMPLE_S), refusals
        except CaptureFailed as error:
            refusals[error.name] = error.reason
            contenders = {name: call for name, call in contenders.items() if name != error.name}


def short(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")
