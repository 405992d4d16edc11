"""Draws where the kernels for wide heads cross, from records of `warpwave bench`, and prints the table.

    python benchmarks/large_heads.py benchmarks/records/RECORD.jsonl docs/img/large_head_dim.svg
    python benchmarks/large_heads.py benchmarks/records/RECORD.jsonl docs/img/large_head_queries.svg --over seqlen_q

The suite `large_head_dim` gives one panel for full calls and one for causal, at the seqlen with the most widths: median
device time against head_dim. `large_head_crossover` gives one panel for each number of keys: time against queries. Both
axes are logarithmic, and times are relative to the fastest contender, which removes the size of the work. A contender
that was refused has no point; one that was not accurate enough is hollow.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from warpwave.workbench.bench.records import Measurement, read_records

COLORS = ("#1f6f8b", "#e0a458", "#6a994e", "#8a5a83", "#c1121f", "#8a8d91", "#2f3e46", "#b08968", "#577590")


Panels = dict[str, dict[str, dict[int, Measurement]]]  # title -> contender -> place on the axis -> its measurement


def by_width(measurements: Iterable[Measurement]) -> Panels:
    """Returns the timed 16-bit calls over head_dim, full and causal, at the seqlen at which most widths were timed."""
    timed = [m for m in measurements if m.timing is not None and m.problem.dtype != "float32" and not m.is_yardstick]
    widths: dict[int, set[int]] = collections.defaultdict(set)
    for m in timed:
        widths[m.problem.seqlen_k].add(m.problem.head_dim)
    if not widths:
        return {}
    seqlen = max(widths, key=lambda length: (len(widths[length]), -length))
    found: Panels = {"full": {}, "causal": {}}
    for m in timed:
        if m.problem.seqlen_k == seqlen:
            of_mask = found["full" if m.problem.causal is None else "causal"]
            of_mask.setdefault(m.contender, {})[m.problem.head_dim] = m
    return found


def by_queries(measurements: Iterable[Measurement]) -> Panels:
    """Returns the timed calls over seqlen_q, for each number of keys."""
    found: Panels = {}
    for m in sorted((m for m in measurements if m.timing is not None), key=lambda m: m.problem.seqlen_k):
        of_keys = found.setdefault(f"{m.problem.seqlen_k:,} keys", {})
        of_keys.setdefault(m.contender, {})[m.problem.seqlen_q] = m
    return found


OVER = {
    "head_dim": ("large_head_dim", by_width, "head_dim"),
    "seqlen_q": ("large_head_crossover", by_queries, "queries a sequence"),
}


def crossovers(of_contenders: dict[str, dict[int, Measurement]]) -> list[tuple[int, str, float]]:
    """Returns the fastest accurate contender and its time in us, for each place on the axis."""
    best: dict[int, tuple[str, float]] = {}
    for contender, of_width in of_contenders.items():
        for width, m in of_width.items():
            assert m.timing is not None
            accurate = m.verdict is not None and m.verdict.passed
            if accurate and (width not in best or m.timing.median_us < best[width][1]):
                best[width] = (contender, m.timing.median_us)
    return [(width, *best[width]) for width in sorted(best)]


def draw(found: Panels, title: str, label: str, path: Path) -> None:
    """Draws all panels."""
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "warpwave", "svg.fonttype": "path"})
    figure, panels = plt.subplots(1, len(found), figsize=(9, 4.2), sharey=True, layout="constrained", squeeze=False)
    names = list(dict.fromkeys(name for of_panel in found.values() for name in of_panel))
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    for axes, (heading, of_contenders) in zip(panels[0], found.items(), strict=True):
        best = {place: us for place, _, us in crossovers(of_contenders)}
        for name, of_place in of_contenders.items():
            points = [(x, m) for x, m in sorted(of_place.items()) if x in best and m.timing is not None]
            ratios = [m.timing.median_us / best[x] for x, m in points if m.timing is not None]
            axes.plot([x for x, _ in points], ratios, color=colors[name], linewidth=1.2, label=name)
            for (x, m), ratio in zip(points, ratios, strict=True):
                right = m.verdict is not None and m.verdict.passed
                axes.plot(x, ratio, "o", color=colors[name], markerfacecolor=None if right else "white", markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        ticks = sorted(best)
        axes.set_xticks(ticks, [str(x) for x in ticks], fontsize=8, rotation=45)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_title(heading, fontsize=10)
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(linewidth=0.4, alpha=0.6)
        axes.set_axisbelow(True)
    panels[0][0].set_ylabel("time, in units of the fastest accurate one")
    figure.suptitle(title, fontsize=9)
    handles = {h.get_label(): h for axes in panels[0] for h in axes.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), frameon=False, ncols=4, loc="outside lower center")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def table(found: Panels, label: str) -> str:
    """Returns the TFLOP/s of every contender at every place as Markdown; brackets mark those not accurate enough."""
    names = list(dict.fromkeys(name for of_panel in found.values() for name in of_panel))
    lines = [f"| {label} | {' | '.join(names)} |", "| --- " * (1 + len(names)) + "|"]
    for heading, of_contenders in found.items():
        for place in sorted({place for of_place in of_contenders.values() for place in of_place}):
            cells = []
            for name in names:
                m = of_contenders.get(name, {}).get(place)
                right = m is not None and m.verdict is not None and m.verdict.passed
                rate = "-" if m is None or m.tflops is None else f"{m.tflops:.0f}"
                cells.append(rate if right or m is None else f"({rate})")
            lines.append(f"| {place}, {heading} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--over", choices=OVER, default="head_dim")
    a = parser.parse_args(arguments)
    suite, choose, label = OVER[a.over]
    records = read_records(a.record)
    found = choose(m for _, m in records.measurements if m.suite == suite)
    if not any(found.values()):
        parser.error(f"{a.record} has no times of the suite {suite}")
    environment = next(iter(records.environments.values()))
    problem = next(
        m.problem for of_panel in found.values() for of_place in of_panel.values() for m in of_place.values()
    )
    shape = f"{problem.seqlen_q} queries x {problem.seqlen_k} keys"
    title = (
        f"batch {problem.batch}, {problem.num_heads_q} heads, "
        f"{shape if a.over == 'head_dim' else f'head_dim {problem.head_dim}'}, {problem.dtype}\n"
        f"{environment['gpu']['name']}, torch {environment['torch']}, Triton {environment['triton']}, "
        f"{environment['date'][:10]}"
    )
    draw(found, title, label, a.out)
    print(table(found, label))
    for heading, of_contenders in found.items():
        for place, name, us in crossovers(of_contenders):
            print(f"fastest at {place}, {heading}: {name}, {us:.1f} us")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
