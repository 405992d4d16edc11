"""Draws README's figure and prints its table from a record of `warpwave bench forward`.

    python benchmarks/figure.py benchmarks/records/RECORD.jsonl docs/img/forward.svg

Every bar is a median of the record's raw samples; a contender that was refused or unavailable has none.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from warpwave.workbench.bench.records import Measurement, read_records
from warpwave.workbench.bench.timing import paired_ratio

OURS = "warpwave auto"
PEERS = {
    "sdpa_cudnn": ("SDPA cuDNN", "#8a8d91"),
    "flash_attention_4": ("FlashAttention-4", "#b5616a"),
    "sdpa_flash": ("SDPA flash", "#e0a458"),
    "sdpa_efficient": ("SDPA efficient", "#c9cbce"),
}


def by_case(measurements: list[Measurement]) -> dict[str, dict[str, Measurement]]:
    """Returns case name -> contender -> its timed measurement, in the record's order."""
    cases: dict[str, dict[str, Measurement]] = {}
    for m in measurements:
        if m.timing is not None:
            cases.setdefault(m.case, {})[m.contender] = m
    return cases


def peers_of(cases: dict[str, dict[str, Measurement]]) -> list[str]:
    """Returns the peers that have a time in the record."""
    return [peer for peer in PEERS if any(peer in found for found in cases.values())]


def draw(cases: dict[str, dict[str, Measurement]], title: str, path: Path) -> None:
    """Draws grouped bars of TFLOP/s, full and causal side by side."""
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "warpwave", "svg.fonttype": "path"})
    contenders = {OURS: ("warpwave", "#1f6f8b")} | {peer: PEERS[peer] for peer in peers_of(cases)}
    figure, (full, causal) = plt.subplots(1, 2, figsize=(9, 4.2), sharey=True, layout="constrained")
    for axes, heading in ((full, "full"), (causal, "causal")):
        names = [name for name in cases if name.endswith("causal") == (heading == "causal")]
        width = 0.8 / len(contenders)
        for i, (contender, (label, color)) in enumerate(contenders.items()):
            heights = [cases[name][contender].tflops if contender in cases[name] else 0 for name in names]
            places = [x + (i - (len(contenders) - 1) / 2) * width for x in range(len(names))]
            axes.bar(places, heights, width, label=label, color=color)
        axes.set_xticks(range(len(names)), [_tick(name) for name in names], fontsize=8)
        axes.set_title(heading, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", linewidth=0.4, alpha=0.6)
        axes.set_axisbelow(True)
    full.set_ylabel("TFLOP/s")
    figure.suptitle(title, fontsize=9)
    figure.legend(*full.get_legend_handles_labels(), frameon=False, ncols=4, loc="outside lower center")
    figure.savefig(path, metadata={"Date": None})


def _tick(case: str) -> str:
    head_dim, shape, *_ = case.split()
    batch, seqlen = shape.split("x")
    return f"{head_dim.removeprefix('d')}\n{batch} x\n{seqlen}"


def table(cases: dict[str, dict[str, Measurement]]) -> str:
    """Returns a Markdown table of our TFLOP/s and our speed relative to each peer, by paired rounds."""
    peers = peers_of(cases)
    lines = [
        f"| head_dim, batch x seqlen | warpwave TFLOP/s | {' | '.join(f'x {PEERS[peer][0]}' for peer in peers)} |",
        "| --- " * (2 + len(peers)) + "|",
    ]
    ratios: dict[str, list[float]] = {peer: [] for peer in peers}
    for name, found in cases.items():
        ours = found[OURS]
        cells = []
        for peer in peers:
            if peer not in found or ours.timing is None or (theirs := found[peer].timing) is None:
                cells.append("-")
                continue
            ratio = paired_ratio(theirs, ours.timing).median
            ratios[peer].append(ratio)
            cells.append(f"{ratio:.2f}")
        head_dim, shape, *_ = name.split()
        mask = ", causal" if name.endswith("causal") else ""
        where = f"{head_dim.removeprefix('d')}, {shape.replace('x', ' x ')}{mask}"
        lines.append(f"| {where} | {ours.tflops:.0f} | {' | '.join(cells)} |")
    means = [f"{statistics.geometric_mean(r):.2f}" if r else "-" for r in ratios.values()]
    lines.append(f"| geometric mean | | {' | '.join(means)} |")
    return "\n".join(lines)


def main() -> None:
    """Reads the two paths, draws the figure and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    records = read_records(arguments.record)
    environment = next(iter(records.environments.values()))
    title = (
        f"bfloat16 forward, heads x head_dim = 2048; below each group: head_dim, batch x seqlen\n"
        f"{environment['gpu']['name']}, torch {environment['torch']}, Triton {environment['triton']}, "
        f"{environment['date'][:10]}"
    )
    cases = by_case([m for _, m in records.measurements])
    draw(cases, title, arguments.out)
    print(table(cases))


if __name__ == "__main__":
    main()
