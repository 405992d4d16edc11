"""Rules about the memory hierarchy: working sets, repeated loads, scores in memory, and stated memory figures."""

from __future__ import annotations

import math
from collections.abc import Iterator

from warpwave.workbench.diagnose.busy import own_groups
from warpwave.workbench.diagnose.facts import (
    Finding,
    kv_bytes_of_head,
    loaded_bytes,
    loads_of_a_key,
    score_bytes,
    tensor_bytes,
    time_us,
)
from warpwave.workbench.diagnose.implied import heads_by_scores
from warpwave.workbench.diagnose.parse import DTYPES, Document
from warpwave.workbench.model.roofline import byte, figure, us


def caches(document: Document) -> Iterator[Finding]:
    """Checks whether a call's working set fits the caches, and how much of shared memory is used."""
    device = document.device
    for series in dict.fromkeys(series for (_, series), _ in own_groups(document)):
        rows = [row for row in document.rows if row.series == series]
        sized = [row for row in rows if tensor_bytes(row.call)]
        if not sized or rows[0].kernel.scores == "memory":
            continue
        row = max(sized, key=lambda r: tensor_bytes(r.call) or 0.0)
        each = kv_bytes_of_head(row.call) or 0.0
        keys_and_values = each * row.call.batch * (row.call.heads_kv or row.call.heads or 1)
        holds = []
        if device.smem_per_sm_bytes:
            fits = "fits" if each <= device.smem_per_sm_bytes else "does not fit"
            holds.append(
                f"{byte(each)} of one head {fits} shared memory and L1 of one {device.unit_name} "
                f"({byte(device.smem_per_sm_bytes)})"
            )
        if device.l2_bytes:
            fits = "fits" if keys_and_values <= device.l2_bytes else "does not fit"
            holds.append(f"all {byte(keys_and_values)} of K and V {fits} L2 ({byte(device.l2_bytes)})")
        if holds:
            size = DTYPES[row.call.dtype]
            yield Finding(
                "working set",
                f"{row.name}: {'; '.join(holds)}",
                f"2 x {row.call.seqlen_k or row.call.seqlen} x {row.call.head_dim} x {size} = {byte(each)} a head",
                series,
            )
        used, have = row.kernel.smem_bytes, row.kernel.smem_available_bytes
        most = max((r for r in rows if r.kernel.smem_bytes), key=lambda r: r.kernel.smem_bytes or 0, default=None)
        if used and have and most is not None:
            used = most.kernel.smem_bytes or used
            yield Finding(
                "shared memory",
                f"{series}: {used:,} bytes of shared memory used of {have // 1024} KB: no tile is kept there for reuse",
                f"{used:,} / {have:,} = {used / have:.1%}",
                series,
            )


def intensities(document: Document) -> Iterator[Finding]:
    """Gives the operations per loaded byte of each product."""
    for (_, series), rows in own_groups(document):
        row = next((r for r in reversed(rows) if r.kernel.block_m == 1 and r.call.seqlen), None)
        if row is None:
            continue
        keys, size = row.call.seqlen_k or row.call.seqlen or 1, DTYPES[row.call.dtype]
        scores, values = 2 * keys / (size * (keys + 1)), 2 / size
        yield Finding(
            "intensity",
            f"{row.name}: {scores:.2f} FLOP a byte in Q K^T and {values:.2f} in P V: each loaded key or "
            "value is used once",
            f"2 x {keys} x d / ({size} x ({keys} + 1) x d) = {scores:.3f}; 2 x d / ({size} x d) = {values:.2f}",
            series,
        )


def rereads(document: Document) -> Iterator[Finding]:
    """Finds how often each key is loaded by the blocks of one head."""
    for series in dict.fromkeys(series for (_, series), _ in own_groups(document)):
        rows = [row for row in document.rows if row.series == series]
        loads = [
            (n, row) for row in rows if (n := loads_of_a_key(row)) is not None and row.kernel.grid == "query tiles"
        ]
        if not loads or max(n for n, _ in loads) < 8:
            continue
        (low, least), (high, most) = (pick(loads, key=lambda pair: pair[0]) for pick in (min, max))
        asked = loaded_bytes(most)
        words = f"{low} to {high}" if low != high else f"{high}"
        said = [f"ceil({r.call.seqlen} / {r.kernel.block_m}) = {n}" for n, r in ((low, least), (high, most))]
        yield Finding(
            "re-reads",
            f"{series}: each key is read {words} times, once per query tile of its head; taller query tiles divide "
            "that number",
            "; ".join(dict.fromkeys(said)) + (f"; {byte(asked)} asked of L2" if asked else ""),
            series,
        )


def scores(document: Document) -> Iterator[Finding]:
    """Checks whether scores can have been in memory, and the length at which they exceed L2."""
    device = document.device
    for (_, series), rows in own_groups(document):
        stored = [row for row in rows if row.kernel.scores == "memory" and score_bytes(row.call, row.kernel)]
        if not stored or device.l2_bytes is None:
            continue
        row = min(stored, key=lambda r: time_us(r) or math.inf)
        total, heads = score_bytes(row.call, row.kernel) or 0.0, row.call.batch * (row.call.heads or 1)
        square = row.kernel.score_bytes * heads
        edge = math.sqrt(device.l2_bytes / square)
        one, time = total / heads, time_us(row)
        if device.bandwidth_gbps and time and total <= device.l2_bytes:
            slow = 4 * total / device.bandwidth_gbps * 1e-3
            if slow > time * 0.9:
                yield Finding(
                    "scores in memory",
                    f"{row.name}: scores and probabilities move {byte(4 * one)} a head, "
                    f"{us(slow / heads)} at memory "
                    f"speed, but the whole took {us(time / heads)}: only possible because {heads} heads x "
                    f"{byte(one)} stay in L2",
                    f"4 x {row.kernel.score_bytes} x {row.call.seqlen}^2 = {byte(4 * one)}; "
                    f"{byte(4 * one)} / {figure(device.bandwidth_gbps)} GB/s = {us(slow / heads)}; "
                    f"{byte(total)} of {byte(device.l2_bytes)}",
                    series,
                )
        longest = max(r.call.seqlen or 0 for r in stored)
        if longest <= edge:
            yield Finding(
                "scores in memory",
                f"{series}: expect a cliff near seqlen {edge:,.0f}, where scores of {heads} heads leave L2",
                f"sqrt({device.l2_bytes:,} / ({row.kernel.score_bytes} x {heads})) = {edge:,.0f}",
                series,
            )
        elif time and device.bandwidth_gbps:
            beyond = max(stored, key=lambda r: r.call.seqlen or 0)
            yield Finding(
                "scores in memory",
                f"{series}: scores left L2 at seqlen {edge:,.0f}; from there on they go through memory",
                f"{byte(score_bytes(beyond.call, beyond.kernel) or 0)} at {beyond.call.seqlen} against "
                f"{byte(device.l2_bytes)}",
                series,
            )


def memory_figures(document: Document) -> Iterator[Finding]:
    """Explains a memory figure by the tensors that add up to it."""
    for row in document.rows:
        if row.memory_mb is None:
            continue
        size, call, heads = row.memory_mb * 2**20, row.call, heads_by_scores(row)
        if heads is not None:
            yield Finding(
                "figure explained",
                f"{row.series}: {row.memory_mb:g} MB at {call.seqlen} are the scores of {heads} heads in "
                f"{row.kernel.score_bytes} bytes each",
                f"{row.memory_mb:g} MiB / ({row.kernel.score_bytes} x {call.seqlen}^2) = {heads}",
                row.series,
            )
            continue
        tensors, of_scores = tensor_bytes(call), score_bytes(call, row.kernel)
        if tensors is None or of_scores is None or row.kernel.is_peer:
            continue
        if size < 0.9 * tensors:
            yield Finding(
                "figure explained",
                f"{row.series}: {row.memory_mb:g} MB are less than q, k, v and out in {call.dtype}, so this is not the "
                "memory of the whole call, or the dtype is narrower",
                f"{byte(tensors)} / {byte(size)} = {tensors / size:.3g}",
                row.series,
            )
        total = tensors + of_scores
        if size > 4 * total:
            yield Finding(
                "figure explained",
                f"{row.series}: q, k, v, out and even all scores are {total / 2**20:.2g} MB together, so "
                f"{row.memory_mb:g} MB says nothing about the kernel",
                f"{byte(tensors)} + {byte(of_scores)} = {byte(total)}",
                row.series,
            )
