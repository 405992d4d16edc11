"""Training steps of examples/train.py by warpwave, torch's attention and FlashAttention-4, paired in one process.

    python -m benchmarks.train OUT [--seconds 190] [--rounds 7] [--steps 120]

OUT is a folder. It gets `train.json`, with the time of each round, and `train.html`, with the loss curves. Rows: 4k and
16k context, packed documents eager and compiled, dense batches eager; 32,768 tokens a step. A sample is the time of
whole steps: forward, backward, clipping and optimizer. Rounds are interleaved; a ratio is the median over rounds of the
peer's time over ours. The contender `none` replaces attention by a copy of v: the rest of its time is not attention.
FlashAttention-4 takes part if `flash_attn.cute` can be imported; torch.compile breaks the graph around it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gradients import paired
from warpwave.errors import InvalidInput
from warpwave.workbench.bench import environment
from warpwave.workbench.bench.peers.sdpa import operator_behind
from warpwave.workbench.report.command import check_writable
from warpwave.workbench.report.training import TrainingRun, write_training_page

example: Any = importlib.import_module("examples.train")
TOKENS = 32768  # of a step
BATCHES = 4  # that the timed steps go through, again and again
ROWS = (  # in the order of their weight: the last are left out if time runs short
    (4096, "packed", "eager"),
    (4096, "packed", "compiled"),
    (16384, "packed", "eager"),
    (16384, "packed", "compiled"),
    (4096, "dense", "eager"),
    (16384, "dense", "eager"),
)

SECONDS = {"eager": 12.0, "compiled": 40.0}  # that a row takes at most


def flash_attention_4() -> Callable[..., Tensor]:
    """Returns FlashAttention-4 in the form of the example's attentions.

    Raises:
        ImportError, RuntimeError: it is missing or its libraries are.
    """
    cute = importlib.import_module("flash_attn.cute")

    def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, longest: int) -> Tensor:
        if offsets is None:
            found = cute.flash_attn_func(q, k, v, causal=True)
        else:
            found = cute.flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest,
                causal=True,
            )  # fmt: skip
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out

    disabled: Callable[..., Tensor] = torch.compiler.disable(attend)
    return disabled


def no_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, longest: int) -> Tensor:
    """Returns v for each query head; q and k take part, so that their gradients exist."""
    group = q.shape[-2] // k.shape[-2]
    return v.repeat_interleave(group, dim=-2) + 0.0 * (q + k.repeat_interleave(group, dim=-2))


def first_line(error: BaseException) -> str:
    """Returns the type and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


class Study:
    """The rows and curves of one run of this program, until its time is over.

    Args:
        seconds: after which no row begins.
        sizes: of the model.
    """

    def __init__(self, seconds: float, rounds: int, sizes: Any, device: torch.device) -> None:
        self.end, self.rounds, self.sizes, self.device = time.monotonic() + seconds, rounds, sizes, device
        self.attentions: dict[str, Any] = dict(example.ATTENTIONS)
        self.unavailable: dict[str, str] = {}
        try:
            self.attentions["flash_attention_4"] = flash_attention_4()
        except Exception as error:  # an absent package, or CuTe DSL without its libraries
            self.unavailable["flash_attention_4"] = first_line(error)

    def left(self) -> float:
        """Returns the seconds that are left."""
        return self.end - time.monotonic()

    def row(self, context: int, batches: str, mode: str, tokens: int = TOKENS) -> dict[str, Any]:
        """Returns times, memory and agreement of every attention, training on the same few batches."""
        data = example.Data(max(1, tokens // context), context, batches == "packed", self.device)
        given = [data.batch(step) for step in range(BATCHES)]
        attentions = self.attentions | ({"none": no_attention} if mode == "eager" else {})
        trainers: dict[str, Any] = {}
        gradients: dict[str, Tensor] = {}
        refused: dict[str, str] = {}
        began = time.monotonic()
        for name, attend in attentions.items():
            trainer = example.Trainer(self.sizes, context, attend, self.device, mode == "compiled", False)
            try:
                trainer.step(given[0])
            except Exception as error:  # whatever a peer refuses by
                refused[name] = first_line(error)
                continue
            trainers[name] = trainer
            gradients[name] = trainer.model.layers[0].qkv.weight.grad.float()
        compile_seconds = time.monotonic() - began
        steps = {name: self._stepping(trainer, given) for name, trainer in trainers.items()}
        times = paired(steps, self.rounds, budget_ms=250.0)
        peaks = {name: self._peak_mib(step) for name, step in steps.items()}
        median = {name: statistics.median(found) for name, found in times.items()}
        ours = times.get("warpwave", [])
        row = {
            "context": context,
            "batches": batches,
            "mode": mode,
            "tokens": data.rows * context,
            "sequences": [data.rows if b.offsets is None else len(b.offsets) - 1 for b in given],
            "ms": times,
            "tokens_per_second": {name: data.rows * context / t * 1e3 for name, t in median.items()},
            "ratio": {
                name: statistics.median(a / b for a, b in zip(found, ours, strict=True))
                for name, found in times.items()
                if name != "warpwave" and ours
            },
            "step_peak_mib": peaks,
            "gradient_from_sdpa": {
                name: ((g - gradients["sdpa"]).norm() / gradients["sdpa"].norm()).item()
                for name, g in gradients.items()
                if name not in ("sdpa", "none") and "sdpa" in gradients
            },
            "torch_runs": self._torch_runs(context, data),
            "refused": refused,
            "first_steps_s": compile_seconds,
        }
        shown = {name: f"{rate / 1e3:,.0f}k" for name, rate in row["tokens_per_second"].items()}
        ratios = {name: round(value, 3) for name, value in row["ratio"].items()}
        print(f"{context} {batches} {mode}: tokens a second {shown}, times as fast as {ratios}", flush=True)
        memory = {name: round(peak) for name, peak in peaks.items()}
        print(f"    step's peak MiB {memory}, gradients {row['gradient_from_sdpa']}, refused {refused}", flush=True)
        print(f"    first steps {compile_seconds:.0f} s, {self.left():.0f} s left", flush=True)
        return row

    def _torch_runs(self, context: int, data: Any) -> str:
        """Returns what torch's attention of these batches is on this device."""
        if data.packed:
            return "varlen_attn" if self.device.type == "cuda" else "a call for each sequence"
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        heads = (self.sizes.heads_q, self.sizes.heads_kv, self.sizes.heads_kv)
        given = [
            torch.zeros(data.rows, context, n, self.sizes.head_dim, dtype=dtype, device=self.device, requires_grad=True)
            for n in heads
        ]
        return operator_behind(lambda: example.torch_attention(*given, None, context))

    @staticmethod
    def _stepping(trainer: Any, given: list[Any]) -> Callable[[], Any]:
        count = 0

        def step() -> Any:
            nonlocal count
            count += 1
            return trainer.step(given[count % len(given)], 1e-4)

        return step

    def _peak_mib(self, step: Callable[[], Any]) -> float:
        """Returns the memory that a step takes above what is held before it, gradients included."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def curves(self, steps: int, context: int = 4096, tokens: int = TOKENS) -> list[Any]:
        """Returns runs from the same weights and data: each attention, and torch's once more, whose difference from its
        first run is what rounding in another order costs."""
        data = example.Data(max(1, tokens // context), context, True, self.device)
        runs: list[Any] = []
        took = 0.0
        for name in ("warpwave", "sdpa", "sdpa again", *list(self.attentions)[2:]):
            if len(runs) >= 2 and self.left() < 1.2 * took:
                self.unavailable[f"{name}, loss curve"] = "no time left"
                continue
            began, attend = time.monotonic(), self.attentions[name.removesuffix(" again")]
            trainer = example.Trainer(self.sizes, context, attend, self.device, False, False)
            try:
                runs.append(example.train(trainer, data, steps, name))
            except Exception as error:  # whatever a peer refuses by
                self.unavailable[f"{name}, loss curve"] = first_line(error)
                continue
            took = time.monotonic() - began
            print(f"{name}: last loss {runs[-1].losses[-1]:.4f}, {runs[-1].tokens_per_second:,.0f} tokens a second, "
                  f"{self.left():.0f} s left", flush=True)  # fmt: skip
        return runs


def differences(runs: list[Any]) -> dict[str, float]:
    """Returns the largest difference of a step's loss from torch's, for every other run."""
    sdpa = next(run for run in runs if run.attention == "sdpa")
    return {run.attention: example.largest_difference(run, sdpa) for run in runs if run is not sdpa}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=190.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=120, help="of the loss curves")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU; the times need one")
    page = arguments.out / "train.html"
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        check_writable(page)
    except (OSError, InvalidInput) as error:
        parser.error(f"OUT: {error}")
    study = Study(arguments.seconds, arguments.rounds, example.FULL, torch.device("cuda"))
    record: dict[str, Any] = {"sizes": asdict(study.sizes), "rows": [], "left_out": []}
    record |= {"unavailable": study.unavailable, "environment": environment.describe("cuda")}

    def save() -> None:
        (arguments.out / "train.json").write_text(json.dumps(record, indent=1))

    for i, (context, batches, mode) in enumerate(ROWS):
        if i == 4:  # the curves come before the dense rows
            runs = study.curves(arguments.steps)
            record |= {"curves": [asdict(run) for run in runs], "largest_difference": differences(runs)}
            print("largest difference of a step's loss from torch's:", record["largest_difference"], flush=True)
            save()
            shown = [TrainingRun(r.attention, r.losses, r.tokens_per_second, r.peak_mib) for r in runs]
            title = f"{torch.cuda.get_device_name()}, 8 x 4096 tokens a step, packed, eager"
            write_training_page(page, title, shown)
        if study.left() < SECONDS[mode]:
            record["left_out"].append([context, batches, mode])
            continue
        torch._dynamo.reset()
        record["rows"].append(study.row(context, batches, mode))
        torch.cuda.empty_cache()
        save()
    save()


if __name__ == "__main__":
    main()
