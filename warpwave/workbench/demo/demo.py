"""`warpwave demo`: a real transformer through our attention and through torch's, side by side.

Two dozen sentences go through a six-layer sentence encoder with either attention, padded and packed. The embeddings
have to agree with torch's and with float64. Then each kernel that can run here is checked and timed on the q, k and v
of those layers, and on two larger shapes. A kernel is timed only if its result on the same inputs is correct.

The demo prints its verdict first, in at most 30 lines; `-v` adds every table with its reasons.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import warpwave
from warpwave.gpu import current_gpu
from warpwave.problem import AttentionProblem, Operands
from warpwave.workbench.bench import environment
from warpwave.workbench.bench.correctness import Verdict
from warpwave.workbench.bench.progress import Progress
from warpwave.workbench.bench.records import OURS, Measurement, RecordError, Records, environment_id
from warpwave.workbench.bench.table import Table, print_table
from warpwave.workbench.bench.timing import CaptureFailed, Samples, time_interleaved
from warpwave.workbench.demo import sentence_model
from warpwave.workbench.output_files import CannotWrite
from warpwave.workbench.report import command
from warpwave.workbench.report.content import Report, report
from warpwave.workbench.report.figures import listed
from warpwave.workbench.report.intake import shipped_source
from warpwave.workbench.report.machines import Source
from warpwave.workbench.report.page import TooLarge
from warpwave.workbench.terminal import columns, complain, say
from warpwave.workbench.verify import reference

# Two to four sentences on each of eight subjects, so that every sentence has a similar one.
SENTENCES = (
    "The night train was late again.",
    "Our departure was put off by two hours because a tree had fallen on the railway line.",
    "Passengers waited on the cold platform, drank weak tea from paper cups, and asked one another whether anybody had "
    "heard when the express from the coast would finally come in.",
    "Bake the bread until the crust is dark.",
    "Knead the dough for ten minutes, let it rise under a damp cloth, and put it into a very hot oven.",
    "A pinch of salt brings out the taste of the tomatoes in the soup.",
    "Whales breathe air.",
    "A blue whale can hold its breath for more than half an hour while it looks for krill in deep water.",
    "Dolphins live in groups and call each other by whistles that work much like names.",
    "The telescope found a faint planet circling a red star.",
    "Because light from the far galaxies has travelled for billions of years, astronomers who look at them see the "
    "universe as it was when it was young, long before the Sun and the Earth had formed.",
    "Tonight the Moon will pass in front of Saturn.",
    "She planted beans and garlic along the south wall.",
    "After the last frost, move the seedlings into the garden, water them every morning, and cover them with straw so "
    "that the soil stays moist.",
    "Slugs ate every one of my young lettuces.",
    "The orchestra rehearsed the slow movement twice.",
    "A violin's sound depends on the wood, on the varnish, and a good deal on the person who plays it.",
    "He hums old songs.",
    "The program stopped with an error that nobody could reproduce.",
    "When two threads write to the same place in memory without a lock, the result depends on which of them comes "
    "last, and the fault may not show itself for weeks.",
    "A unit test that fails only on Fridays is telling you something about dates.",
    "Prices in the shops rose faster than wages this year.",
    "The central bank raised interest rates to slow inflation, and mortgages became dearer for families who had just "
    "bought their first home.",
    "Bread costs more.",
)
SHOWN_NEIGHBORS = (0, 4, 7, 10, 13, 19)

BASELINE = "torch SDPA"
ERROR_FACTOR = 2.0  # allowed error against float64, relative to torch's
ROUNDS = 6  # the smallest number that gives an interval
SAMPLE_S = 0.01  # per contender and round, so that the demo ends within a minute on two cores
INTERPRETED = "the interpreter's speed says nothing about any kernel"
MAX_LINES = 30  # without -v


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
        return function(o.q, o.k, o.v, causal=self.causal, **_packed_arguments(self.packed))

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


def _packed_arguments(packed: sentence_model.Packed) -> dict[str, Any]:
    return {
        "cu_seqlens_q": packed.cu_seqlens,
        "cu_seqlens_k": packed.cu_seqlens,
        "max_seqlen_q": packed.max_seqlen,
        "max_seqlen_k": packed.max_seqlen,
    }


# Sentences through the model -----------------------------------------------------------------------------------------


def sdpa_attention(mask: Tensor | None) -> sentence_model.AttentionFunction:
    """Returns torch's attention in our layout."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    return attention


@dataclass(frozen=True)
class Embedded:
    """The sentences' embeddings by torch's attention and by ours.

    Attributes:
        wrong: the contenders whose embeddings are wrong.
        introduction: description of the model's input.
        table: one row per contender.
        neighbors: the nearest sentence of a few sentences, which shows that the embeddings are meaningful.
        cases: the layers' q, k, v, for timing.
    """

    wrong: Sequence[str]
    introduction: str
    table: Table
    neighbors: str
    cases: Sequence[Case]


def embed_and_compare(device: torch.device, dtype: torch.dtype) -> Embedded:
    """Embeds the sentences with torch's attention and with ours, and compares the embeddings."""
    loaded, tokenize = sentence_model.load()
    bert = loaded.to(device, dtype)
    sentences = tokenize(SENTENCES)
    padded, packed = sentence_model.pad(sentences, device), sentence_model.pack(sentences, device)
    caught_padded: list[Operands] = []
    caught_packed: list[Operands] = []

    def ours_padded(q: Tensor, k: Tensor, v: Tensor) -> Any:
        caught_padded.append(Operands(q, k, v, mask=padded.key_mask))
        return warpwave.attention(q, k, v, mask=padded.key_mask)

    def ours_packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        caught_packed.append(Operands(q, k, v, cu_seqlens_q=packed.cu_seqlens, cu_seqlens_k=packed.cu_seqlens))
        return warpwave.attention_varlen(q, k, v, **_packed_arguments(packed))

    def embed(model: sentence_model.Bert, batch: Any, attention: sentence_model.AttentionFunction) -> Tensor:
        return batch.pool(model.forward(batch.token_ids, batch.positions, attention)).double()

    torchs = sdpa_attention(padded.key_mask)
    exact = embed(loaded.to(device, torch.float64), padded, torchs)
    baseline = embed(bert, padded, torchs)
    runs = {
        f"{BASELINE}, padded": baseline,
        "warpwave.attention, padded": embed(bert, padded, ours_padded),
        "warpwave.attention_varlen, packed": embed(bert, packed, ours_packed),
    }

    layers, heads, head_dim = bert.num_layers, bert.num_heads, caught_padded[0].q.shape[-1]
    tokens, filling = len(packed.token_ids), (~padded.is_token).double().mean().item()
    introduction = (
        f"{len(SENTENCES)} sentences of {min(map(len, sentences))} to {packed.max_seqlen} tokens through "
        f"all-MiniLM-L6-v2 ({layers} layers, {heads} heads x {head_dim}, {_short(dtype)}),\n"
        f"padded to {tuple(padded.token_ids.shape)}, {filling:.0%} of it padding, or packed into {tokens} tokens"
    )
    baseline_error = (baseline - exact).abs().max().item()
    limit = ERROR_FACTOR * baseline_error + torch.finfo(dtype).eps
    rows: list[tuple[str, ...]] = []
    wrong = []
    for name, embedding in runs.items():
        error = (embedding - exact).abs().max().item()
        right = error <= limit
        if not right:
            wrong.append(name)
        difference = (embedding - baseline).abs().max().item()
        cosine = F.cosine_similarity(embedding, baseline).min().item()
        verdict = "baseline" if embedding is baseline else "pass" if right else "FAIL"
        rows.append((name, f"{difference:.1e}", f"{cosine:.7f}", f"{error:.1e}", verdict))
    header = ("embeddings by", "max diff to torch", "least cosine to torch", "max error to float64", "verdict")
    rule = f"pass: error at most {ERROR_FACTOR:g} x torch's, plus one rounding step of {_short(dtype)}"
    cases = [
        Case(f"the {layers} layers' q, k, v, padded", caught_padded),
        Case(f"the {layers} layers' q, k, v, packed", caught_packed, packed=packed, padded=(padded, caught_padded)),
    ]
    table = Table("Sentence embeddings", header, rows, (rule,))
    return Embedded(wrong, introduction, table, neighbors(runs["warpwave.attention_varlen, packed"]), cases)


def neighbors(embeddings: Tensor) -> str:
    """Returns the nearest other sentence of a few sentences, one per line."""
    similarity = (embeddings @ embeddings.T).fill_diagonal_(-1)
    rows = []
    for i in SHOWN_NEIGHBORS:
        score, j = similarity[i].max(dim=0)
        rows.append((_clip(SENTENCES[i], 50), f"{score.item():.2f}", _clip(SENTENCES[int(j)], 52)))
    return "\n".join(["Nearest sentences by the packed embeddings, with their cosine", *columns(rows, indent="  ")])


# Kernels on one input ------------------------------------------------------------------------------------------------


def random_cases(device: torch.device) -> list[Case]:
    """Returns two cases that are larger than the model's, and large enough to fill a GPU."""
    generator = torch.Generator(device).manual_seed(0)

    def case(batch: int, seqlen: int, heads: int, head_dim: int, dtype: torch.dtype, causal: bool) -> Case:
        shape = (batch, seqlen, heads, head_dim)
        q, k, v = (torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(3))
        title = f"{batch} x {seqlen} tokens, {heads} heads x {head_dim}, {_short(dtype)}{', causal' if causal else ''}"
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
    return Case(f"6 layers' worth of random q, k, v, 24 x 48 tokens, 12 heads x 32, {_short(dtype)}", layers)


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


@dataclass(frozen=True)
class Interpreted:
    """The result of a kernel's code in Triton's interpreter: whether it is right, and the table as text."""

    right: bool
    text: str


def check_in_interpreter(device: torch.device) -> Interpreted | None:
    """Without a GPU, runs the GPU kernel's code in Triton's interpreter; returns None if that is not possible.

    It runs in another process, because Triton chooses between compiler and interpreter when it is imported.
    """
    if device.type != "cpu" or any(importlib.util.find_spec(name) is None for name in ("triton", "numpy")):
        return None
    command = [
        sys.executable,
        "-c",
        "from warpwave.workbench.demo import demo; raise SystemExit(demo.run_interpreted())",
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return Interpreted(done.returncode == 0, f"{done.stdout}{done.stderr if done.returncode else ''}".rstrip())


def run_interpreted() -> int:
    """Runs in the process that `check_in_interpreter` starts."""
    # numpy warns about hidden rows, where minus infinity and NaN are intended.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")
    device = torch.device("cpu")
    with torch.inference_mode():
        comparison = compare(interpreted_case(device), device)
    print_table(comparison.table("us"))
    return 0 if comparison.right else 1


def interpreted_case(device: torch.device) -> Case:
    """Returns a case that is small enough for the interpreter: the first layer's q, k, v of three sentences."""
    title = "flash_fwd's own code in Triton's interpreter"
    try:
        bert, tokenize = sentence_model.load()
    except sentence_model.ModelMissing:
        return Case(f"{title}: random q, k, v", [Operands(*torch.randn(3, 3, 30, 12, 32).unbind())])
    padded = sentence_model.pad(tokenize(SENTENCES[:3]), device)
    caught: list[Operands] = []

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        caught.append(Operands(q, k, v, mask=padded.key_mask))
        return q

    replace(bert, num_layers=1).forward(padded.token_ids, padded.positions, attention)
    return Case(f"{title}: the first layer's q, k, v of 3 sentences", caught)


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The report ----------------------------------------------------------------------------------------------------------


def sources(measurements: Sequence[Measurement], device: torch.device) -> list[Source]:
    """Returns this machine's records, and without a GPU also those of an H200, which ship with the package."""
    facts = environment.describe(device)
    identity = environment_id(facts)
    own = Source(Records({identity: facts}, [(identity, m) for m in measurements]), "here", (), "warpwave demo")
    return [own, shipped_source()] if device.type == "cpu" else [own]


def verdict(wrong: Sequence[str], checks: int) -> str:
    """Returns the first line of the demo: whether every result is right."""
    if wrong:
        return f"FAILED: {len(wrong)} of {checks} checks found wrong results: {'; '.join(wrong)}."
    return f"PASS: all {checks} checks agree with torch's attention and with float64."


def speeds(content: Report) -> list[str]:
    """Returns one line per machine: the origin of the numbers, and our speed by suite."""
    by_machine: dict[tuple[bool, str], list[str]] = {}
    for s in content.sections:
        ratios = [case.ratio.median for case in s.cases if case.ratio is not None]
        if ratios:
            said = (
                f"{geometric_mean(ratios):.2f} ({listed(s.suites)})"
                if s.is_shipped
                else f"{geometric_mean(ratios):.2f}"
            )
            by_machine.setdefault((s.is_shipped, s.name), []).append(said)
    lines = []
    for (is_shipped, name), means in by_machine.items():
        whose = f"{name} (a record that comes with warpwave, not this machine)" if is_shipped else f"{name} (here)"
        peer = "the best peer" if is_shipped else "torch SDPA"
        lines.append(f"{whose}: {', '.join(means)} times as fast as {peer}, geometric mean")
    return lines


@dataclass(frozen=True)
class Outcome:
    """The results of the demo."""

    device: str
    embedded: Embedded | None
    missing: str
    comparisons: Sequence[Comparison]
    interpreted: Interpreted | None

    @property
    def wrong(self) -> list[str]:
        """The wrong results, with their cases."""
        found = [] if self.embedded is None else [f"embeddings by {name}" for name in self.embedded.wrong]
        found += [f"{name} on {c.title}" for c in self.comparisons for name in c.wrong]
        if self.interpreted is not None and not self.interpreted.right:
            found.append("flash_fwd in Triton's interpreter")
        return found

    @property
    def checks(self) -> int:
        """Number of our results that were checked."""
        embedded = 0 if self.embedded is None else len(self.embedded.table.rows) - 1
        kernels = sum(m.contender.startswith(OURS) for c in self.comparisons for m in c.measurements)
        return embedded + kernels + (self.interpreted is not None)

    def lines(self) -> list[str]:
        """Returns the summary of the checks, below the verdict."""
        lines = [f"warpwave {warpwave.__version__} on {self.device}, torch {torch.__version__}"]
        if all(c.auto is not None and c.auto.kernel == "torch_sdpa" for c in self.comparisons):
            lines.append("Here auto runs torch's own kernel, so a ratio near 1 is expected.")
        lines.append("")
        if self.embedded is None:
            lines += [f"No sentence model here: {self.missing}. Random q, k, v stand in for its layers'."]
            lines += ["To get the model: python3 bootstrap.py --force"]
        else:
            rows = [self.embedded.table.header, *self.embedded.table.rows]
            lines += [*self.embedded.introduction.split("\n"), *columns(rows, right=(1, 2, 3), indent="  ")]
        header = ("attention on", "auto runs", "torch SDPA", "ours", "x as fast", "unit", "results")
        lines += ["", *columns([header, *(c.summary() for c in self.comparisons)], right=(2, 3, 4), indent="  ")]
        if self.interpreted is not None:
            said = "right" if self.interpreted.right else "WRONG"
            lines.append(f"  flash_fwd's own code in Triton's interpreter is {said} on the first layer's q, k, v")
        return lines

    def details(self) -> None:
        """Prints all tables with their reasons."""
        if self.embedded is not None:
            print_table(self.embedded.table)
            say(f"{self.embedded.neighbors}\n")
        for comparison in self.comparisons:
            print_table(comparison.table(comparison.unit))
        if self.interpreted is not None:
            say(f"{self.interpreted.text}\n")


def measure(device: torch.device) -> Outcome:
    """Runs all checks and timings of the demo."""
    gpu = current_gpu(device)
    dtype = torch.float32 if gpu.is_cpu else torch.float16
    embedded, missing = None, ""
    with torch.inference_mode():
        try:
            embedded = embed_and_compare(device, dtype)
            cases = [*embedded.cases]
        except sentence_model.ModelMissing as error:
            missing, cases = str(error), [small_random_case(device, dtype)]
        cases += [] if gpu.vendor == "interpreter" else random_cases(device)
        comparisons = []
        progress = Progress(len(cases)) if sys.stderr.isatty() else None
        with contextlib.nullcontext() if progress is None else progress.logging_apart():
            for case in cases:
                if progress is not None:
                    progress.begin(case.title)
                    progress.say("")
                comparisons.append(compare(case, device))
                if progress is not None:
                    progress.finish()
    return Outcome(f"{gpu.name} ({gpu.arch})", embedded, missing, comparisons, check_in_interpreter(device))


def run(device_name: str | None = None, out: Path | None = None, verbose: bool = False) -> int:
    """Runs the demo and prints the verdict, a summary of the checks, and the path of the report.

    Args:
        device_name: `"cpu"` or `"cuda"`; None is the GPU if there is one.
        out: path of the report; None is `report.html` in the current directory.
        verbose: also print every table, and why each kernel did not run.

    Returns:
        The exit code: 1 if a check failed; 2 if the report cannot be written, which is checked before anything runs.
    """
    out = Path(command.DEFAULT_NAME) if out is None else out
    try:
        command.check_writable(out)
    except CannotWrite as error:
        complain(error)
        return 2
    device = torch.device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not verbose:
        # The table names the kernel that ran, so the library's warning about a missing GPU kernel is redundant.
        logging.getLogger("warpwave").setLevel(logging.ERROR)
    outcome = measure(device)
    say(verdict(outcome.wrong, outcome.checks))
    try:
        told = sources([m for c in outcome.comparisons for m in c.measurements], device)
        content = report(told)
        say("\n".join([*speeds(content), *outcome.lines()]))
        if verbose:
            say()
            outcome.details()
        else:
            say("  why each other kernel did not run: warpwave demo -v")
        say(f"\nThe report: {command.write_page(told, out)}")
    except (RecordError, TooLarge, CannotWrite) as error:
        complain(error)
        return 1 if outcome.wrong else 2
    return 1 if outcome.wrong else 0
