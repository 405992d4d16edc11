"""`warpwave bench precision`: the error and the time of quantized attention.

Attention of four kinds of q, k and v is computed in 16 bits and in every way of quantizing. Each result is compared
with float64 on the original numbers, so its error includes that of quantizing. Attention and quantizing are timed
separately, only on a GPU.

    normal     N(0, 1)
    outliers   N(0, 1), with four channels of q, and four others of k, thirty times as large
    spikes     N(0, 1), and N(0, 100) added to one element of a thousand: the data of Shah et al., "FlashAttention-3"
               (2024), section 4.3
    model      every layer of the demo's sentence encoder, on one long text
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import warpwave
from warpwave.workbench.bench.run import UsageError, device_of
from warpwave.workbench.bench.table import Table, print_table
from warpwave.workbench.bench.timing import time_interleaved
from warpwave.workbench.demo import sentence_model
from warpwave.workbench.output_files import CannotWrite, Kind, check_output
from warpwave.workbench.terminal import complain, say

OUTLIER_CHANNELS, OUTLIER_SIZE = 4, 30.0
SPIKE_SHARE, SPIKE_SIZE = 1e-3, 10.0
ON_GPU = (1, 4096, 16, 128)  # batch, seqlen, heads, head_dim
ON_CPU = (1, 1024, 2, 64)

FP8, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
# Name -> the options of `warpwave.quantize`; None for 16 bits.
WAYS: dict[str, dict[str, Any] | None] = {
    "bfloat16": None,
    "fp8, tensor": {"granularity": "tensor"},
    "fp8, head": {"granularity": "head"},
    "fp8, block 128": {},
    "fp8, block 64": {"granularity": 64},
    "fp8, block 128, v e5m2": {"dtype_v": E5M2},
    "fp8, block 128, rotated": {"rotate": True},
    "fp8, block 128, smoothed": {"smooth_k": True},
    "fp8, block 128, smoothed, rotated": {"smooth_k": True, "rotate": True},
    "int8, tensor": {"dtype": INT8, "granularity": "tensor"},
    "int8, block 128": {"dtype": INT8},
    "int8, block 128, clipped": {"dtype": INT8, "percentile": 0.999},
    "int8, block 128, rotated": {"dtype": INT8, "rotate": True},
    "int8, block 128, smoothed": {"dtype": INT8, "smooth_k": True},
    "int8, block 128, smoothed, rotated": {"dtype": INT8, "smooth_k": True, "rotate": True},
    "int8 with v, block 128, smoothed, rotated": {"dtype": INT8, "dtype_v": INT8, "smooth_k": True, "rotate": True},
}


@dataclass(frozen=True)
class Row:
    """One way of computing one call.

    Args:
        data: kind of q, k and v.
        way: key of `WAYS`.
        relative_rms: |out - exact| / |exact|, Euclidean norms over all of out.
        rms: the RMS of out - exact.
        worst_row: the largest of the same ratio over single rows.
        attention_us, quantize_us: medians on the GPU; None on a CPU.
        saturated: values of q, k and v that saturated.
    """

    data: str
    way: str
    relative_rms: float
    rms: float
    worst_row: float
    attention_us: float | None
    quantize_us: float | None
    saturated: int


def inputs(device: torch.device) -> Iterator[tuple[str, tuple[Tensor, Tensor, Tensor]]]:
    """Yields kinds of q, k and v, in bfloat16. The model's come last, and not if its package is missing."""
    shape = ON_GPU if device.type == "cuda" else ON_CPU
    generator = torch.Generator(device).manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q, k, v = normal(), normal(), normal()
    yield "normal", (q.bfloat16(), k.bfloat16(), v.bfloat16())
    large = [x.clone() for x in (q, k)]
    for first, x in enumerate(large):
        x[..., first :: shape[-1] // OUTLIER_CHANNELS] *= OUTLIER_SIZE
    yield "outliers", (large[0].bfloat16(), large[1].bfloat16(), v.bfloat16())
    for x in (q, k, v):
        chosen = torch.rand(shape, generator=generator, device=device) < SPIKE_SHARE
        x += torch.where(chosen, SPIKE_SIZE * normal(), 0.0)
    yield "spikes", (q.bfloat16(), k.bfloat16(), v.bfloat16())
    try:
        yield "model", of_model(device)
    except sentence_model.ModelMissing as error:
        complain(f"no q, k and v of a model: {error}")


def of_model(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v of every layer of the demo's model, (layers, tokens, heads, head_dim)."""
    from warpwave.workbench.demo.sentences import SENTENCES

    model, tokenize = sentence_model.load()
    (ids,) = tokenize([" ".join(SENTENCES)])
    tokens = torch.tensor([ids])
    kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append((q, k, v))
        out: Tensor = warpwave.attention(q, k, v, kernel="eager")
        return out

    with torch.no_grad():
        model.forward(tokens, torch.arange(tokens.shape[1]), attend)
    q, k, v = (torch.cat(layers).to(device, torch.bfloat16) for layers in zip(*kept, strict=True))
    return q, k, v


def measure(data: str, q: Tensor, k: Tensor, v: Tensor, rounds: int, only: str = "") -> list[Row]:
    """Returns a row for each way whose name contains `only`."""
    exact = warpwave.attention(q.double(), k.double(), v.double())
    calls: dict[str, Callable[[], Any]] = {}
    found: list[tuple[str, float, float, float, int]] = []
    for way, options in WAYS.items():
        if only not in way:
            continue
        if options is None:
            attend, saturated = partial(warpwave.attention, q, k, v), 0
        else:
            quantized = warpwave.quantize(q, k, v, **options)
            attend = partial(warpwave.attention, **quantized.arguments())
            saturated = int(quantized.saturated.sum())
            calls[f"quantize {way}"] = partial(warpwave.quantize, q, k, v, **options)
        calls[way] = attend
        error = attend().double() - exact
        worst = (error.norm(dim=-1) / exact.norm(dim=-1)).max().item()
        rms = error.square().mean().sqrt().item()
        found.append((way, (error.norm() / exact.norm()).item(), rms, worst, saturated))
    times = {}
    if q.is_cuda:
        # Quantizing adds to counters and makes factors, launch by launch: a graph would time it too favorably.
        timed = time_interleaved(calls, device=q.device, rounds=rounds, mode="eager")
        times = {name: samples.median_us for name, samples in timed.items()}
    return [
        Row(data, way, relative, rms, worst, times.get(way), times.get(f"quantize {way}"), saturated)
        for way, relative, rms, worst, saturated in found
    ]


def table(rows: Sequence[Row]) -> Table:
    """Returns one kind of data as text."""

    def time(value: float | None) -> str:
        return "-" if value is None else f"{value:,.1f}"

    cells: list[tuple[str, ...]] = []
    for r in rows:
        errors = (f"{r.relative_rms:.2e}", f"{r.rms:.2e}", f"{r.worst_row:.2e}")
        cells.append((r.way, *errors, time(r.attention_us), time(r.quantize_us), f"{r.saturated:,}"))
    header = ("way", "relative RMS", "RMS", "worst row", "attention us", "quantize us", "saturated")
    return Table(f"{rows[0].data} q, k and v, beside float64", header, cells)


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Draws error against time, one panel for each kind of data. A line joins the ways that no other way beats in
    both. A color stands for a dtype and a granularity, a marker for the other options."""
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(row.data for row in rows))
    figure, panels = plt.subplots(1, len(kinds), figsize=(4 * len(kinds) + 3, 4), squeeze=False, sharey=True)
    ways = list(dict.fromkeys(row.way for row in rows))
    members: dict[str, list[str]] = {}
    for way in ways:
        members.setdefault(", ".join(way.split(", ")[:2]), []).append(way)
    styles = {
        way: {"color": f"C{color}", "marker": "os^Dv<>P*X"[shape]}
        for color, group in enumerate(members.values())
        for shape, way in enumerate(group)
    }
    for panel, kind in zip(panels[0], kinds, strict=True):
        points = sorted((r.attention_us or 0.0, r.relative_rms, r.way) for r in rows if r.data == kind)
        front = pareto(points)
        panel.plot([us for us, *_ in front], [error for _, error, _ in front], color="0.6", zorder=0)
        for us, error, way in points:
            panel.scatter(us, error, s=30, alpha=0.8, label=way, **styles[way])
        panel.set(title=kind, xlabel="attention, us", yscale="log")
    panels[0][0].set_ylabel("relative RMS error")
    handles, labels = panels[0][0].get_legend_handles_labels()
    in_order = sorted(zip(labels, handles, strict=True), key=lambda pair: ways.index(pair[0]))
    figure.tight_layout()
    figure.legend(
        [handle for _, handle in in_order], [way for way, _ in in_order], fontsize=7, loc="center left",
        bbox_to_anchor=(1.0, 0.5),
    )  # fmt: skip
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def pareto(points: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Returns the points with a smaller error than all faster ones. The points are sorted by time."""
    front: list[tuple[float, float, str]] = []
    for point in points:
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def main(*, out: Path | None, rounds: int, only: str, device: str | None, json_output: bool) -> int:
    """Runs the comparison; returns the exit code.

    Args:
        out: a new file for the rows, as JSON Lines. Times on a GPU are also drawn, beside it, with the suffix .svg.
        rounds: rounds of timing.
        only: measure only ways whose name contains this text.
    """
    try:
        place = device_of(device)
        if out is not None:
            check_output(out, Kind("new file", lambda path: False))
    except (UsageError, CannotWrite) as error:
        complain(error)
        return 2
    if not any(only in way for way in WAYS):
        complain(f"no way contains {only!r}; they are {'; '.join(WAYS)}")
        return 2
    rows: list[Row] = []
    for data, (q, k, v) in inputs(place):
        found = measure(data, q, k, v, rounds, only)
        rows += found
        lines = "\n".join(json.dumps(asdict(row)) for row in found)
        if json_output:
            say(lines)
        else:
            print_table(table(found))
        if out is not None:
            with out.open("a") as file:  # what is measured survives an interruption
                file.write(lines + "\n")
    if out is not None and place.type == "cuda":
        write_plot(rows, out.with_suffix(".svg"))
    return 0
