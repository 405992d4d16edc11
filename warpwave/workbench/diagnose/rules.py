"""All rules, in order, and the diagnosis that they make together.

A rule is a function of the document. It applies only if all its inputs are given, and every finding has its arithmetic.
No rule is specific to one file or project. `notes` holds what is known about other software and does not follow from
the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from warpwave.workbench.diagnose.agreement import (
    amounts,
    comparable,
    parts,
    peaks,
    ratios,
    scaling,
    slow_peers,
    unverified,
)
from warpwave.workbench.diagnose.bound import binding, launch_parts, launches
from warpwave.workbench.diagnose.busy import grid, plateau, threads, tile_sweep, waves
from warpwave.workbench.diagnose.claims import claims
from warpwave.workbench.diagnose.facts import Finding
from warpwave.workbench.diagnose.implied import implied
from warpwave.workbench.diagnose.levels import caches, intensities, memory_figures, rereads, scores
from warpwave.workbench.diagnose.parse import Document

KINDS = {
    "not comparable": "rows that differ in more than their column says",
    "contradiction": "figures that cannot both be right",
    "idle SMs": "multiprocessors without a block",
    "waves": "a last wave that fills the card only in part",
    "grid fills": "enough blocks for every multiprocessor",
    "idle threads": "threads of a block that do not compute",
    "few warps": "too few warps to hide latency",
    "cache": "K and V that leave L2",
    "memory": "bandwidth of device memory",
    "scalar unit": "products on the scalar units of a card with matrix units",
    "arithmetic": "the rate of the unit that multiplies",
    "exponentials": "the rate of the special function units",
    "launch": "a cost that does not depend on the size",
    "latency": "a latency-bound loop: no unit is busy",
    "working set": "whether the working set fits the caches",
    "shared memory": "shared memory used of available",
    "intensity": "operations per byte, product by product",
    "re-reads": "bytes loaded more often than needed",
    "scaling": "growth that does not fit the algorithm",
    "scores in memory": "scores that live in L2, or no longer fit it",
    "share of peak": "how close to the card's rate",
    "peer": "what a peer's figures say",
    "figure explained": "where a figure comes from",
    "unverified": "what was not checked",
    "claim": "what the author concluded",
}
RULES: tuple[Callable[[Document], Iterator[Finding]], ...] = (
    comparable,
    amounts,
    ratios,
    parts,
    grid,
    plateau,
    waves,
    threads,
    binding,
    caches,
    intensities,
    rereads,
    scores,
    memory_figures,
    scaling,
    tile_sweep,
    launches,
    launch_parts,
    peaks,
    slow_peers,
    unverified,
)


SHOWN = ("cache", "waves")  # causes that differences between times show
UNLOCATED = 4.0


def diagnose(document: Document) -> list[Finding]:
    """Returns all findings, causes of slowness first, ordered by the factor that they explain.

    Latency is the remaining cause if no unit reaches half of its rate, and no figure locates it. A cause that the times
    of the same series show comes first, unless latency is `UNLOCATED` times as large.
    """
    document = implied(document)
    found = [finding for rule in RULES for finding in rule(document)]
    found += claims(document)
    unique = list({(f.kind, f.series, f.text): f for f in found}.values())
    shown = {f.series for f in unique if f.is_cause and f.kind in SHOWN}

    def rank(finding: Finding) -> float:
        is_rest = finding.kind == "latency" and finding.series in shown
        return finding.factor / UNLOCATED if is_rest else finding.factor

    return sorted(unique, key=lambda f: (not f.is_cause, -rank(f) if f.is_cause else 0.0, list(KINDS).index(f.kind)))


def main_cause(document: Document, series: str) -> Finding | None:
    """Returns the first cause of a series' slowness; None if there is none."""
    return next((f for f in diagnose(document) if f.is_cause and f.series == series), None)


# Knowledge, not arithmetic --------------------------------------------------------------------------------------------


def notes(document: Document) -> list[str]:
    """Returns known facts about the software in the table that do not follow from its figures."""
    found = []
    torch = [row for row in document.rows if any(name in row.series.lower() for name in ("torch", "sdpa"))]
    if any(row.call.head_dim and row.call.head_dim % 8 for row in torch):
        found.append(
            "PyTorch's fused kernels take head sizes that are a multiple of 8; others go through padding or its "
            "op-by-op path."
        )
    if any(row.call.dtype == "float32" and row.kernel.unit == "matrix" for row in torch) and document.device.has_tf32:
        found.append(
            "PyTorch's float32 attention multiplies split tf32 operands on tensor cores, which have another ceiling "
            "than the float32 units of a scalar kernel."
        )
    series = {row.series.lower() for row in document.rows}
    if any("sdpa" in name or "pytorch" in name for name in series) and any(
        "flashattention-3" in name for name in series
    ):
        found.append("SDPA does not use FlashAttention-3 unless it is activated, so the two are different kernels.")
    return found
