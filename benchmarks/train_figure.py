"""Draws the loss curves of a record of benchmarks/train.py, and prints its table.

PYTHONPATH=. python benchmarks/train_figure.py benchmarks/records/RECORD.json docs/img/training.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PEERS = {"sdpa": "torch", "flash_attention_4": "FlashAttention-4"}
STYLES = {  # of the curves: label, color, width, dashes
    "sdpa": ("torch", "#e0a458", 4.0, "-"),
    "warpwave": ("warpwave", "#1f6f8b", 1.4, "-"),
    "sdpa again": ("torch, second run", "#8a8d91", 1.0, "--"),
    "flash_attention_4": ("FlashAttention-4", "#b5616a", 1.0, ":"),
}


def draw(record: dict[str, Any], path: Path) -> None:
    """Draws the losses one over the other, and each run's differences from torch's first run."""
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "warpwave", "svg.fonttype": "path"})
    runs = {run["attention"]: run["losses"] for run in record["curves"]}
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7.5, 5), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    for name, (label, color, width, dashes) in STYLES.items():
        if name not in runs:
            continue
        steps = range(1, len(runs[name]) + 1)
        above.plot(steps, runs[name], dashes, label=label, color=color, linewidth=width)
        if name != "sdpa":
            apart = [abs(a - b) for a, b in zip(runs[name], runs["sdpa"], strict=True)]
            below.plot(steps, apart, dashes, color=color, linewidth=max(1.0, width))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", linewidth=0.4, alpha=0.6)
    above.set_ylabel("loss, nats a byte")
    above.legend(frameon=False)
    below.set_ylabel("difference from torch")
    below.set_xlabel("step")
    environment = record["environment"]
    figure.suptitle(
        f"{environment['gpu']['name']}, torch {environment['torch']}, Triton {environment['triton']}", fontsize=9
    )
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def table(record: dict[str, Any]) -> str:
    """Returns a Markdown table: our tokens a second, our speed relative to each peer, the memory of a step."""
    lines = [
        "| context, batches | warpwave, thousand tokens a second | x torch | x FlashAttention-4 | x no attention "
        "| GiB of a step: warpwave, torch, FlashAttention-4 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in record["rows"]:
        ratios = [f"{row['ratio'][name]:.2f}" if name in row["ratio"] else "-" for name in (*PEERS, "none")]
        peaks = [row["step_peak_mib"].get(name) for name in ("warpwave", *PEERS)]
        memory = ", ".join("-" if peak is None else f"{peak / 1024:.1f}" for peak in peaks)
        rate = row["tokens_per_second"]["warpwave"] / 1e3
        what = f"{row['context']:,} {row['batches']}, {row['mode']}"
        lines.append(f"| {what} | {rate:,.0f} | {' | '.join(ratios)} | {memory} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    record = json.loads(arguments.record.read_text())
    draw(record, arguments.out)
    print(table(record))


if __name__ == "__main__":
    main()
