"""Measures the cost of each resource of flash_fwd's loop without hardware counters: it times the loop without it.

Each ablation is the kernel compiled from an edited copy of its source (`EDITS`): without its exponentials, its second
product, its reads of K and V, its mask or its store (`steps.ABLATIONS`). The wrong results are discarded. The time that
an ablation saves is the marginal cost of the resource; it is 0 if another resource hides it. The model's prediction is
shown beside it.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from warpwave.errors import InvalidInput
from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import flash_fwd
from warpwave.problem import AttentionProblem
from warpwave.runtime.launch import Launch
from warpwave.runtime.triton_or_stub import INTERPRETED
from warpwave.workbench.model.predict import predict
from warpwave.workbench.model.roofline import us
from warpwave.workbench.model.steps import ABLATIONS
from warpwave.workbench.terminal import columns

AGREES = 1.5  # largest factor between the measured and the predicted change
SAME = 1.02  # smaller changes count as none

SOURCE = Path(flash_fwd.__file__).with_name("kernel.py")
# Ablation -> (a text that occurs exactly once in the kernel's source, its replacement).
EDITS: dict[str, tuple[str, str]] = {
    "exponentials": (
        "            p, alpha, m_i, l_i = softmax_step(scores, scale_left, m_i, l_i)\n",
        "            m_new = tl.maximum(m_i, tl.max(scores, 1) * scale_left)\n"
        "            p = scores * scale_left - m_new[:, None]\n"
        "            alpha = tl.math.exp2(m_i - m_new)\n"
        "            l_i = l_i * alpha + tl.sum(p, 1)\n"
        "            m_i = m_new\n",
    ),
    "values": (
        "acc = with_products(p, v, times(acc, alpha[:, None]), v_factor, PRECISION)",
        "acc = times(acc, alpha[:, None])",
    ),
    "loads": ("tile_offset = tl.cast(key_tile, tl.int64)", "tile_offset = tl.cast(key_tile, tl.int64) * 0"),
    "mask": (
        "            at_edge = WALK == 1\n"
        "            if WALK == 2 or not TWO_LOOPS:\n"
        "                at_edge = (key_tile < whole_begin) | (key_tile >= whole_end)\n",
        "            at_edge = False\n",
    ),
    # A sum is never negative, which the compiler cannot prove.
    "store": ("store_tiles(out_ptr, rows, seqlen_q,", "store_tiles(out_ptr, rows, tl.where(l_i < 0.0, seqlen_q, 0),"),
}


@dataclass(frozen=True)
class Ablation:
    """One ablation.

    Attributes:
        name: a key of `steps.ABLATIONS`.
        predicted, measured: time of the whole kernel over the time without the resource: 1.3 means that it costs 30 %;
            None if not predicted or not measured.
        measured_us: time without the resource.
    """

    name: str
    predicted: float | None
    measured: float | None = None
    measured_us: float | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether both change in the same direction and by the same factor within `AGREES`; None if one is missing."""
        if self.predicted is None or self.measured is None:
            return None
        ways = {_way(self.predicted), _way(self.measured)}
        return not {-1, 1} <= ways and abs(math.log(self.predicted / self.measured)) <= math.log(AGREES)


def _way(ratio: float) -> int:
    return 0 if 1 / SAME <= ratio <= SAME else 1 if ratio > 1 else -1


@dataclass(frozen=True)
class Ablations:
    """All ablations of one call.

    Attributes:
        problem, config: the call and flash_fwd's config.
        gpu: the device of the predictions and times.
        whole_us: measured time of the unchanged kernel; None without a GPU.
        predicted_us: its predicted time.
        found: the ablations.
    """

    problem: AttentionProblem
    config: Any
    gpu: Gpu
    whole_us: float | None
    predicted_us: float | None
    found: tuple[Ablation, ...]

    def __str__(self) -> str:
        lines = [
            f"call       {self.problem.describe()}",
            f"device     {self.gpu.name}",
            f"kernel     flash_fwd, {self.config}",
        ]
        whole = "" if self.whole_us is None else f"{us(self.whole_us)} measured"
        predicted = "" if self.predicted_us is None else f"{us(self.predicted_us)} predicted"
        lines += [f"whole      {', '.join(filter(None, (whole, predicted)))}", ""]
        rows = [("without", "measured x", "predicted x", "", "what is left out")]
        for a in self.found:
            measured = "-" if a.measured is None else f"{a.measured:.3f}"
            said = "-" if a.predicted is None else f"{a.predicted:.3f}"
            verdict = {None: "", True: "agrees", False: "DISAGREES"}[a.agrees]
            rows.append((a.name, measured, said, verdict, ABLATIONS[a.name]))
        lines += columns(rows, right=(1, 2))
        lines += ["", "x: the whole kernel's time over the time without; 1 means that another resource hides it."]
        if self.whole_us is None:
            lines.append("Nothing was timed: this machine does not have that GPU.")
        return "\n".join(lines)


def predicted(problem: AttentionProblem, gpu: Gpu, config: Any) -> dict[str, float]:
    """Returns ablation -> predicted time of the whole kernel over the time without; empty if the card is unknown."""
    whole = predict(problem, flash_fwd, config, gpu)
    if whole is None:
        return {}
    ratios = {}
    for name in ABLATIONS:
        less = predict(problem, flash_fwd, config, gpu, without=name)
        assert less is not None  # the card and call are the same
        ratios[name] = whole.time_us / less.time_us
    return ratios


def ablate(problem: AttentionProblem, gpu: Gpu | None = None, *, rounds: int = 9) -> Ablations:
    """Predicts each ablation, and times it if this machine has the GPU.

    Args:
        problem: a call that flash_fwd supports.
        gpu: the device to predict for; None is this machine's GPU.
        rounds: number of timing rounds.

    Raises:
        InvalidInput: flash_fwd does not support the call, or there is no GPU and none is named.
    """
    here = current_gpu(torch.device("cuda")) if torch.cuda.is_available() and not INTERPRETED else None
    asked = gpu or here
    if asked is None:
        raise InvalidInput("an ablation is timed on a GPU and there is none here; name one with --gpu for predictions")
    reasons = flash_fwd.why_not(problem, asked)
    if reasons:
        raise InvalidInput(f"flash_fwd, whose loop is ablated, does not take this call: {'; '.join(reasons)}")
    config = flash_fwd.configs(problem, asked)[0]
    ratios = predicted(problem, asked, config)
    whole = predict(problem, flash_fwd, config, asked)
    times = _timed(problem, config, rounds) if here is not None and here.name == asked.name else {}
    found = tuple(
        Ablation(
            name,
            ratios.get(name),
            times[""] / times[name] if name in times else None,
            times.get(name),
        )
        for name in ABLATIONS
    )
    return Ablations(problem, config, asked, times.get(""), None if whole is None else whole.time_us, found)


def variants(problem: AttentionProblem, gpu: Gpu, operands: Any, out: torch.Tensor, config: Any) -> Mapping[str, Any]:
    """Returns the launches of the unchanged kernel, under "", and of each ablation. Tensors may have no storage.

    Raises:
        InvalidInput: the call takes two launches (operands are split first), and only one would be ablated.
    """
    lse = torch.empty(1, dtype=torch.float32, device=out.device) if problem.return_lse else None
    spec = flash_fwd.specify(problem, gpu, operands, out, lse, config)
    if isinstance(spec, tuple) and not isinstance(spec, Launch):
        raise InvalidInput("this call splits K and V in a launch of its own; ablate one whose precision needs no split")
    return {"": spec} | {name: spec._replace(kernel=kernel_without(name)) for name in ABLATIONS}


@functools.cache
def kernel_without(name: str) -> Any:
    """Returns `flash_fwd_kernel` compiled from its source with one of `EDITS`.

    Triton reads a kernel's source from its file when the module is imported; the file is not needed afterwards.
    """
    text = SOURCE.read_text(encoding="utf-8").replace(*EDITS[name])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"flash_fwd_without_{name}.py"
        path.write_text(text, encoding="utf-8")
        specification = importlib.util.spec_from_file_location(path.stem, path)
        assert specification is not None and specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
    return module.flash_fwd_kernel


def _timed(problem: AttentionProblem, config: Any, rounds: int) -> dict[str, float]:
    """Returns variant -> median us, timed interleaved."""
    from dataclasses import replace

    from warpwave.runtime import launch
    from warpwave.workbench.bench.inputs import make_operands
    from warpwave.workbench.bench.timing import time_interleaved

    problem = replace(problem, return_lse=False)
    device = torch.device("cuda")
    operands = make_operands(problem, device=device, seed=0)
    out = torch.empty((*operands.q.shape[:-1], problem.head_dim_v), dtype=operands.q.dtype, device=device)
    arguments = (*operands[:3], out, None, *operands[3:])
    launchers = {
        name: launch.bind(spec) for name, spec in variants(problem, current_gpu(device), operands, out, config).items()
    }
    calls = {name: (lambda run=run: run(*arguments)) for name, run in launchers.items()}
    samples = time_interleaved(calls, device=device, rounds=rounds)
    return {name: taken.median_us for name, taken in samples.items()}
