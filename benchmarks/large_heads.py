"""Draws where the kernels for wide heads cross, from records of `warpwave bench large_head_dim`, and prints the table.

    python benchmarks/large_heads.py benchmarks/records/RECORD.jsonl docs/img/large_head_dim.svg

One panel for full calls and one for causal, at the seqlen with the most widths: median device time against head_dim,
both logarithmic, over what the fastest contender needs at each, so that what binds is not read as the size of the work.
A contender that was refused at a width has no point there; one that was not accurate enough is drawn hollow.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from warpwave.bench.records import Measurement, read_records

COLOURS = ("#1f6f8b", "#e0a458", "#6a994e", "#8a5a83", "#c1121f", "#8a8d91", "#2f3e46", "#b08968", "#577590")


def chosen(measurements: Iterable[Measurement]) -> dict[bool, dict[str, dict[int, Measurement]]]:
    """causal -> contender -> head_dim -> its measurement, of 16-bit calls at the seqlen that most widths were timed at;
    those with a time alone."""
    timed = [m for m in measurements if m.timing is not None and m.problem.dtype != "float32" and not m.is_yardstick]
    widths: dict[int, set[int]] = collections.defaultdict(set)
    for m in timed:
        widths[m.problem.seqlen_k].add(m.problem.head_dim)
    if not widths:
        return {}
    seqlen = max(widths, key=lambda length: (len(widths[length]), -length))
    found: dict[bool, dict[str, dict[int, Measurement]]] = {}
    for m in timed:
        if m.problem.seqlen_k == seqlen:
            of_mask = found.setdefault(m.problem.causal is not None, {})
            of_mask.setdefault(m.contender, {})[m.problem.head_dim] = m
    return found


def crossovers(of_contenders: dict[str, dict[int, Measurement]]) -> list[tuple[int, str, float]]:
    """For each width, the fastest accurate contender and its time in us."""
    best: dict[int, tuple[str, float]] = {}
    for contender, of_width in of_contenders.items():
        for width, m in of_width.items():
            assert m.timing is not None
            accurate = m.verdict is not None and m.verdict.passed
            if accurate and (width not in best or m.timing.median_us < best[width][1]):
                best[width] = (contender, m.timing.median_us)
    return [(width, *best[width]) for width in sorted(best)]


def draw(found: dict[bool, dict[str, dict[int, Measurement]]], title: str, path: Path) -> None:
    """Both panels."""
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "warpwave", "svg.fonttype": "path"})
    figure, panels = plt.subplots(1, 2, figsize=(9, 4.2), sharey=True, layout="constrained")
    names = list(dict.fromkeys(name for of_mask in found.values() for name in of_mask))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    for axes, causal in zip(panels, (False, True), strict=True):
        of_contenders = found.get(causal, {})
        best = {width: us for width, _, us in crossovers(of_contenders)}
        for name, of_width in of_contenders.items():
            points = [(w, m) for w, m in sorted(of_width.items()) if w in best and m.timing is not None]
            ratios = [m.timing.median_us / best[w] for w, m in points if m.timing is not None]
            axes.plot([w for w, _ in points], ratios, color=colours[name], linewidth=1.2, label=name)
            for (width, m), ratio in zip(points, ratios, strict=True):
                right = m.verdict is not None and m.verdict.passed
                axes.plot(
                    width, ratio, "o", color=colours[name], markerfacecolor=None if right else "white", markersize=4
                )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        ticks = sorted(best)
        axes.set_xticks(ticks, [str(width) for width in ticks], fontsize=8, rotation=45)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_title("causal" if causal else "full", fontsize=10)
        axes.set_xlabel("head_dim")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(linewidth=0.4, alpha=0.6)
        axes.set_axisbelow(True)
    panels[0].set_ylabel("time, in units of the fastest accurate one")
    figure.suptitle(title, fontsize=9)
    handles = {h.get_label(): h for axes in panels for h in axes.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), frameon=False, ncols=4, loc="outside lower center")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def table(found: dict[bool, dict[str, dict[int, Measurement]]]) -> str:
    """Markdown: TFLOP/s of every contender at every width, those not accurate enough in brackets."""
    names = list(dict.fromkeys(name for of_mask in found.values() for name in of_mask))
    lines = [f"| head_dim | {' | '.join(names)} |", "| --- " * (1 + len(names)) + "|"]
    for causal, of_contenders in sorted(found.items()):
        widths = sorted({width for of_width in of_contenders.values() for width in of_width})
        for width in widths:
            cells = []
            for name in names:
                m = of_contenders.get(name, {}).get(width)
                right = m is not None and m.verdict is not None and m.verdict.passed
                rate = "-" if m is None or m.tflops is None else f"{m.tflops:.0f}"
                cells.append(rate if right or m is None else f"({rate})")
            lines.append(f"| {width}{', causal' if causal else ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Reads the two paths and does it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("out", type=Path)
    a = parser.parse_args(arguments)
    records = read_records(a.record)
    found = chosen(m for _, m in records.measurements if m.suite == "large_head_dim")
    if not found:
        parser.error(f"{a.record} has no times of the suite large_head_dim")
    environment = next(iter(records.environments.values()))
    problem = next(iter(next(iter(next(iter(found.values())).values())).values())).problem
    title = (
        f"batch {problem.batch}, {problem.num_heads_q} heads, {problem.seqlen_q} queries x {problem.seqlen_k} keys, "
        f"{problem.dtype}\n{environment['gpu']['name']}, torch {environment['torch']}, Triton "
        f"{environment['triton']}, {environment['date'][:10]}"
    )
    draw(found, title, a.out)
    print(table(found))
    for causal, of_contenders in sorted(found.items()):
        for width, name, us in crossovers(of_contenders):
            print(f"fastest at {width}{', causal' if causal else ''}: {name}, {us:.0f} us")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
