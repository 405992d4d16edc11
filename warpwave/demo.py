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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import warpwave
from warpwave import demo_model, reference
from warpwave.bench.table import Table, print_table
from warpwave.bench.timing import CaptureFailed, Samples, time_interleaved
from warpwave.hardware.gpu import current_gpu
from warpwave.problem import Operands

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
ROUNDS = 5


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

    def worst_error(self, outs: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
        """The largest distance from float64 over all layers; infinite where a result is not finite."""
        errors = [(_first_of_large(out).double() - e).abs().max() for out, e in zip(outs, exact, strict=True)]
        worst = torch.stack(errors).max().item()
        return math.inf if math.isnan(worst) else worst

    def exact(self) -> list[Tensor]:
        """Float64 results, of the whole call or, where that would take long, of its first sequence and head."""
        problem = self.explain().problem
        if _is_large(self.operands[0].q):
            problem = replace(problem, batch=1, num_heads_q=1, num_heads_kv=1)
        cut = [
            o._replace(q=_first_of_large(o.q), k=_first_of_large(o.k), v=_first_of_large(o.v)) for o in self.operands
        ]
        return [reference.oracle(problem, o).out for o in cut]


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
    print(
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
    print("Nearest sentences by the packed embeddings, with their cosine")
    for i in SHOWN_NEIGHBOURS:
        score, j = similarity[i].max(dim=0)
        print(f"  {_clip(SENTENCES[i], 50):50}  {score.item():.2f}  {_clip(SENTENCES[int(j)], 52)}")
    print()


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


def compare(case: Case, device: torch.device) -> tuple[bool, Table]:
    """Check, then time, every kernel that can run the case, and note why which kernel ran."""
    explanation = case.explain()
    able = [name for name, reasons in explanation.reasons.items() if not reasons]
    dtype = case.operands[0].q.dtype
    exact = case.exact()
    call, to_ours = case.torchs()
    baseline_error = case.worst_error([to_ours(out) for out in call()], exact)
    errors = {name: case.worst_error(case.ours(name), exact) for name in able}
    right = {name: error <= ERROR_FACTOR * baseline_error + torch.finfo(dtype).eps for name, error in errors.items()}

    contenders = {BASELINE: call} | {name: partial(case.ours, name) for name in able if right[name]}
    notes = [f"auto runs {explanation.kernel}"]
    if case.padded:
        notes.append("torch's call takes no packed sequences: it is given the padded ones")
    notes += [f"not {name}: {reason}" for name, reasons in explanation.reasons.items() for reason in reasons]
    times: dict[str, Samples] = {}
    if explanation.gpu.vendor == "interpreter":
        notes.append("no times: the interpreter's speed says nothing about any kernel")
    else:
        times, refusals = time_contenders(contenders, device)
        notes += refusals

    title = f"{case.title} ({times[BASELINE].method}, median of {ROUNDS} rounds)" if times else case.title
    rows: list[tuple[str, ...]] = []
    for name in (BASELINE, *able):
        chosen = " (auto)" if name == explanation.kernel else ""
        verdict = "baseline" if name == BASELINE else "pass" if right[name] else "FAIL"
        timing = ("", "")
        if name in times:
            us = times[name].median_us / len(case.operands)
            timing = (f"{us:,.1f}", f"{times[BASELINE].median_us / times[name].median_us:.2f}")
        rows.append((name + chosen, f"{errors.get(name, baseline_error):.1e}", verdict, *timing))
    unit = "us a layer" if len(case.operands) > 1 else "us"
    return all(right.values()), Table(
        title, ("kernel", "max error", "verdict", unit, "speed / torch's"), rows, tuple(notes)
    )


def time_contenders(
    contenders: dict[str, Callable[[], object]], device: torch.device
) -> tuple[dict[str, Samples], list[str]]:
    """Interleaved times, and why some were left out: short calls are timed inside a CUDA graph, which not all allow."""
    refusals: list[str] = []
    while True:
        try:
            return time_interleaved(contenders, device=device, rounds=ROUNDS), refusals
        except CaptureFailed as error:
            refusals.append(f"not timed: {error}")
            contenders = {name: call for name, call in contenders.items() if name != error.name}


def check_in_interpreter(device: torch.device) -> bool:
    """Without a GPU, the GPU kernel's own code still runs, in Triton's interpreter.

    In a process of its own: Triton decides on its interpreter while it is imported.
    """
    if device.type != "cpu" or importlib.util.find_spec("triton") is None:
        return True
    command = [sys.executable, "-c", "import warpwave.demo as demo; raise SystemExit(demo.run_interpreted())"]
    sys.stdout.flush()  # what is printed so far comes before what that process prints
    return subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=False).returncode == 0


def run_interpreted() -> int:
    """What the process of `check_in_interpreter` does."""
    device = torch.device("cpu")
    with torch.inference_mode():
        right, table = compare(interpreted_case(device), device)
    print_table(table)
    return 0 if right else 1


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


def run(device_name: str | None = None) -> int:
    """The whole demo. Returns the exit code: 1 if a check failed."""
    device = torch.device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = current_gpu(device)
    dtype = torch.float32 if gpu.is_cpu else torch.float16
    print(f"warpwave {warpwave.__version__} on {gpu.name} ({gpu.arch}), torch {torch.__version__}")
    with torch.inference_mode():
        try:
            all_right, cases = embed_and_compare(device, dtype)
        except demo_model.ModelMissing as error:
            print(f"\nNo sentence model here: {error}. Random q, k, v stand in for its layers'.")
            print("To get it: python3 bootstrap.py --force\n")
            all_right, cases = True, [small_random_case(device, dtype)]
        for case in cases + ([] if gpu.vendor == "interpreter" else random_cases(device)):
            case_right, table = compare(case, device)
            all_right &= case_right
            print_table(table)
    all_right &= check_in_interpreter(device)
    print("Every check passed." if all_right else "A check FAILED: see the tables above.")
    return 0 if all_right else 1
