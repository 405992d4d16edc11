"""Draws time against error for every arithmetic of a float32 call, from a record of `warpwave bench float32`.

    PYTHONPATH=. python benchmarks/float32_pareto.py RECORD.jsonl docs/img/float32.svg [--case "d64 4x2048 h16 fp32"]

Both axes are relative to SDPA in the same run: left of 1 is faster, below 1 more accurate. Points that another point
beats in both are hollow; a line joins the others.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from warpwave.workbench.bench.records import Measurement, Records, read_records

OURS, REFERENCE = "warpwave auto", "sdpa_default"
PEERS = {"sdpa_math": "SDPA math", "flex_attention": "FlexAttention", "three_calls": "three torch calls"}


class NoPareto(ValueError):
    """The record has no case of that name, or SDPA was not measured in it."""


@dataclass(frozen=True)
class Point:
    """One contender of the call.

    Attributes:
        name: the precision of ours, or the peer.
        time, error: in units of SDPA's.
        ours: whether it is a kernel of warpwave.
        best: whether no other point has less of one and no more of the other.
    """

    name: str
    time: float
    error: float
    ours: bool
    best: bool


def points(records: Records, case: str) -> list[Point]:
    """Returns the measured contenders of the case: ours once per precision, each peer once."""
    measured: dict[str, tuple[Measurement, bool]] = {}
    reference = None
    for _, m in records.measurements:
        if not m.case.startswith(case) or m.timing is None or m.verdict is None or m.verdict.rms_error is None:
            continue
        rest = m.case.removeprefix(case).split()
        if any(word in ("hot", "cold", "causal") for word in rest):
            continue
        if m.contender == OURS and len(rest) == 1:
            measured[rest[0]] = (m, True)
        elif m.contender == REFERENCE:
            reference = m
        elif m.contender in PEERS:
            measured[PEERS[m.contender]] = (m, False)
    if not measured or reference is None or reference.timing is None or reference.verdict is None:
        raise NoPareto(f"no case {case!r} with {REFERENCE} beside it in this record")
    measured["SDPA"] = (reference, False)
    found = []
    for name, (m, ours) in measured.items():
        assert m.timing is not None and m.verdict is not None and m.verdict.rms_error is not None
        assert reference.verdict.rms_error
        time = m.timing.median_us / reference.timing.median_us
        found.append((name, time, m.verdict.rms_error / reference.verdict.rms_error, ours))
    return sorted(
        (
            Point(n, t, e, o, not any(t2 <= t and e2 <= e and (t2, e2) != (t, e) for _, t2, e2, _ in found))
            for n, t, e, o in found
        ),
        key=lambda point: point.time,
    )


def draw(found: list[Point], title: str, path: Path) -> None:
    """Draws the figure; equal points give equal bytes."""
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "warpwave", "svg.fonttype": "path"})
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    best = [point for point in found if point.best]
    axes.plot([p.time for p in best], [p.error for p in best], color="#1f6f8b", linewidth=0.8, zorder=1)
    for p in found:
        color = "#1f6f8b" if p.ours else "#e0a458"
        axes.scatter([p.time], [p.error], s=34, color=color if p.best else "white", edgecolor=color, zorder=2)
        axes.annotate(p.name, (p.time, p.error), textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.axhline(1, color="#8a8d91", linewidth=0.6)
    axes.axvline(1, color="#8a8d91", linewidth=0.6)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("time, in units of SDPA's")
    axes.set_ylabel("RMS error, in units of SDPA's")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def table(found: list[Point]) -> str:
    """Returns the points as a Markdown table."""
    lines = ["| | time / SDPA's | RMS error / SDPA's |", "| --- | --- | --- |"]
    return "\n".join(lines + [f"| {p.name}{' *' if p.best else ''} | {p.time:.3f} | {p.error:.3g} |" for p in found])


def main() -> None:
    """Draws the figure and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--case", default="d64 4x2048 h16 fp32")
    arguments = parser.parse_args()
    try:
        found = points(read_records(arguments.record), arguments.case)
    except NoPareto as error:
        raise SystemExit(str(error)) from None
    draw(found, f"{arguments.case}: {arguments.record.name}", arguments.out)
    print(table(found))


if __name__ == "__main__":
    main()
