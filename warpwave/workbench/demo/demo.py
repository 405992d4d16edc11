"""`warpwave demo`: a real transformer through our attention and through torch's, side by side.

Two dozen sentences go through a six-layer sentence encoder with either attention, padded and packed. The embeddings
have to agree with torch's and with float64. Then each kernel that can run here is checked and timed on the q, k and v
those layers really made, and on two larger shapes. Nothing is timed that has not been found correct on the same inputs.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import warpwave
from warpwave.gpu import current_gpu
from warpwave.problem import AttentionProblem, Operands
from warpwave.workbench.bench import environment
from warpwave.workbench.bench.correctness import Verdict
from warpwave.workbench.bench.records import OURS, Measurement, RecordError, Records, environment_id
from warpwave.workbench.bench.table import Table, print_table
from warpwave.workbench.bench.timing import CaptureFailed, Samples, time_interleaved
from warpwave.workbench.demo import sentence_model as demo_model
from warpwave.workbench.output_files import CannotWrite
from warpwave.workbench.report import command
from warpwave.workbench.report.content import Report, report
from warpwave.workbench.report.intake import shipped_source
from warpwave.workbench.report.machines import Source
from warpwave.workbench.report.page import TooLarge
from warpwave.workbench.terminal import columns, complain, say
from warpwave.workbench.verify import reference

# Two to four sentences on each of eight subjects, so that every one has a neighbour in meaning.
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
SHOWN_NEIGHBOURS = (0, 4, 7, 10, 13, 19)

BASELINE = "torch SDPA"
ERROR_FACTOR = 2.0  # a result may be this many times as far from float64 as torch's own
ROUNDS = 6  # the fewest that give an interval
SAMPLE_S = 0.01  # of each contender's turn: the whole demo has to end within a minute on two cores
INTERPRETED = "the interpreter's speed says nothing about any kernel"


@dataclass(frozen=True)
class Case:
    """Attention calls on one set of inputs, the same for every contender.

    Args:
        title: for the table.
        operands: one a layer; a contender's time is its time for all of them, divided by their number.
        causal: as in `attention`.
        packed: the layout, where the operands are packed.
        padded: the same tokens padded: what torch is given in place of the packed ones, which it has no call for.
    """

    title: str
    operands: Sequence[Operands]
    causal: bool = False
    packed: demo_model.Packed | None = None
    padded: tuple[demo_model.Padded, Sequence[Operands]] | None = None

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
        """torch's call for all layers, and a view of each of its results in the layout of ours."""
        operands = self.padded[1] if self.padded else self.operands
        # Its layout is made here, outside the timing.
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
        """Errors over all layers, and whether the largest keeps within the limit."""
        rms, largest, rows = _errors([_first_of_large(out) for out in outs], exact)
        model_rms, model_largest, _ = _errors(model, exact)
        reason = "" if largest <= limit else f"max error {largest:.1e} is above {limit:.1e}"
        if not math.isfinite(largest):
            return Verdict(False, "out has NaN or infinite elements", None, None, model_rms, model_largest, rows)
        return Verdict(not reason, reason, rms, largest, model_rms, model_largest, rows)

    def exact(self) -> list[Tensor]:
        """Float64 results, of the whole call or, where that would take long, of its first sequence and head."""
        return self._by(reference.oracle)

    def rounding_model(self) -> list[Tensor]:
        """The same with the roundings that no implementation in this dtype can avoid."""
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
    """Root of the mean square and largest distance from float64 over all layers, and the rows compared."""
    errors = torch.cat([(out.double() - e).reshape(-1, e.shape[-1]) for out, e in zip(outs, exact, strict=True)])
    largest = errors.abs().max().item()
    return errors.square().mean().sqrt().item(), math.inf if math.isnan(largest) else largest, len(errors)


def _is_large(x: Tensor) -> bool:
    return x.dim() == 4 and x.shape[1] >= 512


def _first_of_large(x: Tensor) -> Tensor:
    return x[:1, :, :1] if _is_large(x) else x


def _packed_arguments(packed: demo_model.Packed) -> dict[str, Any]:
    return {
        "cu_seqlens_q": packed.cu_seqlens,
        "cu_seqlens_k": packed.cu_seqlens,
        "max_seqlen_q": packed.max_seqlen,
        "max_seqlen_k": packed.max_seqlen,
    }


# Sentences through the model -----------------------------------------------------------------------------------------


def sdpa_attention(mask: Tensor | None) -> demo_model.AttentionFunction:
    """torch's attention in our layout."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    return attention


def embed_and_compare(device: torch.device, dtype: torch.dtype) -> tuple[bool, list[Case]]:
    """Embed the sentences with torch's attention and with ours, and compare.

    Returns:
        whether every embedding is right, and the layers' own q, k, v as cases to time.
    """
    loaded, tokenize = demo_model.load()
    bert = loaded.to(device, dtype)
    sentences = tokenize(SENTENCES)
    padded, packed = demo_model.pad(sentences, device), demo_model.pack(sentences, device)
    caught_padded: list[Operands] = []
    caught_packed: list[Operands] = []

    def ours_padded(q: Tensor, k: Tensor, v: Tensor) -> Any:
        caught_padded.append(Operands(q, k, v, mask=padded.key_mask))
        return warpwave.attention(q, k, v, mask=padded.key_mask)

    def ours_packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        caught_packed.append(Operands(q, k, v, cu_seqlens_q=packed.cu_seqlens, cu_seqlens_k=packed.cu_seqlens))
        return warpwave.attention_varlen(q, k, v, **_packed_arguments(packed))

    def embed(model: demo_model.Bert, batch: Any, attention: demo_model.AttentionFunction) -> Tensor:
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
    say(
        f"\n{len(SENTENCES)} sentences of {min(map(len, sentences))} to {packed.max_seqlen} tokens through "
        f"all-MiniLM-L6-v2 ({layers} layers of {heads} heads x {head_dim}, {_short(dtype)}):\n"
        f"padded to {tuple(padded.token_ids.shape)}, {filling:.0%} of it filling, or {tokens} tokens packed\n"
    )
    baseline_error = (baseline - exact).abs().max().item()
    limit = ERROR_FACTOR * baseline_error + torch.finfo(dtype).eps
    rows: list[tuple[str, ...]] = []
    all_right = True
    for name, embedding in runs.items():
        error = (embedding - exact).abs().max().item()
        right = error <= limit
        all_right &= right
        difference = (embedding - baseline).abs().max().item()
        cosine = F.cosine_similarity(embedding, baseline).min().item()
        verdict = "baseline" if embedding is baseline else "pass" if right else "FAIL"
        rows.append((name, f"{difference:.1e}", f"{cosine:.7f}", f"{error:.1e}", verdict))
    columns = ("embeddings by", "max diff to torch", "least cosine to torch", "max error to float64", "verdict")
    rule = f"pass: error at most {ERROR_FACTOR:g} x torch's, plus one rounding step of {_short(dtype)}"
    print_table(Table("Sentence embeddings", columns, rows, (rule,)))
    show_neighbours(runs["warpwave.attention_varlen, packed"])

    cases = [
        Case(f"the {layers} layers' q, k, v, padded", caught_padded),
        Case(f"the {layers} layers' q, k, v, packed", caught_packed, packed=packed, padded=(padded, caught_padded)),
    ]
    return all_right, cases


def show_neighbours(embeddings: Tensor) -> None:
    """The nearest other sentence of a few, so that a person sees the embeddings mean something."""
    similarity = (embeddings @ embeddings.T).fill_diagonal_(-1)
    say("Nearest sentences by the packed embeddings, with their cosine")
    rows = []
    for i in SHOWN_NEIGHBOURS:
        score, j = similarity[i].max(dim=0)
        rows.append((_clip(SENTENCES[i], 50), f"{score.item():.2f}", _clip(SENTENCES[int(j)], 52)))
    say("\n".join(columns(rows, indent="  ")))
    say()


# Kernels on one input ------------------------------------------------------------------------------------------------


def random_cases(device: torch.device) -> list[Case]:
    """Two shapes larger than the model's, and on a GPU large enough to be limited by it."""
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
    """Stands in for the model's layers where there is no model."""
    generator = torch.Generator(device).manual_seed(0)
    layers = [
        Operands(*(torch.randn(24, 48, 12, 32, device=device, dtype=dtype, generator=generator) for _ in range(3)))
        for _ in range(6)
    ]
    return Case(f"6 layers' worth of random q, k, v, 24 x 48 tokens, 12 heads x 32, {_short(dtype)}", layers)


@dataclass(frozen=True)
class Comparison:
    """What came of one case.

    Attributes:
        title: the case's.
        measurements: torch's first, then every kernel that can run the case; times are of one layer's call.
        notes: what a reader has to know besides.
    """

    title: str
    measurements: Sequence[Measurement]
    notes: Sequence[str]

    @property
    def right(self) -> bool:
        """Whether no kernel was wrong."""
        return all(m.verdict is not None and m.verdict.passed for m in self.measurements)

    def table(self, unit: str) -> Table:
        """For the terminal."""
        baseline = self.measurements[0].timing
        how = "" if baseline is None else f" ({baseline.method}, median of {len(baseline.samples_us)} rounds)"
        columns = ("kernel", "max error", "verdict", unit, "speed / torch's")
        rows = [_row(m, baseline) for m in self.measurements]
        return Table(self.title + how, columns, rows, tuple(self.notes))


def _row(m: Measurement, baseline: Samples | None) -> tuple[str, ...]:
    assert m.verdict is not None  # compare gives every contender one
    name = m.contender if m.contender == BASELINE else m.kernel + (" (auto)" if m.contender == f"{OURS}auto" else "")
    verdict = "FAIL" if not m.verdict.passed else "baseline" if m.contender == BASELINE else "pass"
    largest = math.inf if m.verdict.max_error is None else m.verdict.max_error
    if m.timing is None or baseline is None:
        return (name, f"{largest:.1e}", verdict, "", "")
    speed = baseline.median_us / m.timing.median_us
    return (name, f"{largest:.1e}", verdict, f"{m.timing.median_us:,.1f}", f"{speed:.2f}")


def compare(case: Case, device: torch.device) -> Comparison:
    """Check, then time, every kernel that can run the case, and note why which kernel ran."""
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
    return Comparison(case.title, measurements, notes)


def _a_layer(timing: Samples, layers: int) -> Samples:
    """The time of one layer's call, out of that of all."""
    return replace(
        timing,
        samples_us=tuple(us / layers for us in timing.samples_us),
        calls_per_repeat=timing.calls_per_repeat * layers,
        input_sets=layers,
    )


def time_contenders(
    contenders: dict[str, Callable[[], object]], device: torch.device
) -> tuple[dict[str, Samples], dict[str, str]]:
    """Interleaved times, and why some were left out: short calls are timed inside a CUDA graph, which not all allow."""
    refusals: dict[str, str] = {}
    while True:
        try:
            return time_interleaved(contenders, device=device, rounds=ROUNDS, sample_s=SAMPLE_S), refusals
        except CaptureFailed as error:
            refusals[error.name] = error.reason
            contenders = {name: call for name, call in contenders.items() if name != error.name}


def check_in_interpreter(device: torch.device) -> bool:
    """Without a GPU, the GPU kernel's own code still runs, in Triton's interpreter.

    In a process of its own: Triton decides on its interpreter while it is imported.
    """
    if device.type != "cpu" or importlib.util.find_spec("triton") is None:
        return True
    command = [
        sys.executable,
        "-c",
        "import warpwave.workbench.demo.demo as demo; raise SystemExit(demo.run_interpreted())",
    ]
    sys.stdout.flush()  # what is printed so far comes before what that process prints
    return subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=False).returncode == 0


def run_interpreted() -> int:
    """What the process of `check_in_interpreter` does."""
    # numpy's word on rows that a mask hides: minus infinity and NaN are meant where they come up there.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")
    device = torch.device("cpu")
    with torch.inference_mode():
        comparison = compare(interpreted_case(device), device)
    print_table(comparison.table("us"))
    return 0 if comparison.right else 1


def interpreted_case(device: torch.device) -> Case:
    """Little enough for an interpreter: the first layer's q, k, v of three sentences."""
    title = "flash_fwd's own code in Triton's interpreter"
    try:
        bert, tokenize = demo_model.load()
    except demo_model.ModelMissing:
        return Case(f"{title}: random q, k, v", [Operands(*torch.randn(3, 3, 30, 12, 32).unbind())])
    padded = demo_model.pad(tokenize(SENTENCES[:3]), device)
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
    """This machine's own records; where it has no GPU, an H200's beside them, which come with the package."""
    facts = environment.describe(device)
    identity = environment_id(facts)
    own = Source(Records({identity: facts}, [(identity, m) for m in measurements]), "here", (), "warpwave demo")
    return [own, shipped_source()] if device.type == "cpu" else [own]


def print_summary(content: Report) -> None:
    """The first screen of the report: whose numbers, and the three answers."""
    for section in content.sections:
        say(f"{section.name}: {section.provenance}")
        rows = [(question, " ".join(sentences)) for question, sentences in section.answers]
        say("\n".join(columns(rows, indent="  ")))
        say()


def run(device_name: str | None = None, out: Path | None = None) -> int:
    """The whole demo.

    Args:
        device_name: `"cpu"` or `"cuda"`; None is the GPU if there is one.
        out: where the report goes; None is `report.html` in the current directory.

    Returns:
        The exit code: 1 if a check failed, 2 if the report cannot be written, which is said before anything is run.
    """
    out = Path(command.DEFAULT_NAME) if out is None else out
    try:
        command.check_writable(out)
    except CannotWrite as error:
        complain(error)
        return 2
    device = torch.device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = current_gpu(device)
    dtype = torch.float32 if gpu.is_cpu else torch.float16
    say(f"warpwave {warpwave.__version__} on {gpu.name} ({gpu.arch}), torch {torch.__version__}")
    measurements: list[Measurement] = []
    with torch.inference_mode():
        try:
            all_right, cases = embed_and_compare(device, dtype)
        except demo_model.ModelMissing as error:
            say(f"\nNo sentence model here: {error}. Random q, k, v stand in for its layers'.")
            say("To get it: python3 bootstrap.py --force\n")
            all_right, cases = True, [small_random_case(device, dtype)]
        for case in cases + ([] if gpu.vendor == "interpreter" else random_cases(device)):
            comparison = compare(case, device)
            all_right &= comparison.right
            measurements += comparison.measurements
            print_table(comparison.table("us a layer" if len(case.operands) > 1 else "us"))
    all_right &= check_in_interpreter(device)
    try:
        told = sources(measurements, device)
        print_summary(report(told))
        say(f"The report: {command.write_page(told, out)}")
    except (RecordError, TooLarge, CannotWrite) as error:
        complain(error)
        return 2 if all_right else 1
    say("Every check passed." if all_right else "A check FAILED: see the tables above.")
    return 0 if all_right else 1
