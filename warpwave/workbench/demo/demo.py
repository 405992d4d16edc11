"""`warpwave demo`: a real transformer with our attention and with torch's, side by side.

Two dozen sentences go through a six-layer sentence encoder with either attention, padded and packed. The embeddings
have to agree with torch's and with float64. Then each kernel that can run here is checked and timed on the q, k and v
of those layers, and on two larger shapes. A kernel is timed only if its result on the same inputs is correct.

The demo prints its verdict first, in at most 30 lines; `-v` adds every table with its reasons.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean

import torch
from torch import Tensor

import warpwave
from warpwave.gpu import current_gpu
from warpwave.operands import Operands
from warpwave.workbench.bench import environment
from warpwave.workbench.bench.progress import Progress
from warpwave.workbench.bench.records import OURS, Measurement, RecordError, Records, environment_id
from warpwave.workbench.bench.table import print_table
from warpwave.workbench.demo import sentence_model
from warpwave.workbench.demo.comparison import Case, Comparison, compare, random_cases, small_random_case
from warpwave.workbench.demo.sentences import SENTENCES, Embedded, embed_and_compare
from warpwave.workbench.output_files import CannotWrite
from warpwave.workbench.report import command
from warpwave.workbench.report.content import Report, report
from warpwave.workbench.report.figures import listed
from warpwave.workbench.report.intake import shipped_source
from warpwave.workbench.report.machines import Source
from warpwave.workbench.report.page import TooLarge
from warpwave.workbench.terminal import columns, complain, say

MAX_LINES = 30  # without -v


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
