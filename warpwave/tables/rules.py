"""What the numbers of a table say: each rule a function of the document, each finding with its arithmetic.

No rule knows a file or a project. A rule speaks only where all it needs is given; what follows from knowledge of other
software and not from the figures is in `notes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from warpwave.roofline import byte, figure, flop, us
from warpwave.tables.facts import (
    Finding,
    blocks,
    exponent,
    flops,
    groups,
    kv_bytes_of_head,
    loaded_bytes,
    loads_of_a_key,
    memory_bytes,
    peak_tflops,
    rounds,
    score_bytes,
    spread,
    steps_of_block,
    tensor_bytes,
    time_us,
    varying,
)
from warpwave.tables.parse import DTYPES, Device, Document, Row

FLAT = 1.08  # times within this factor are the same
AGREE = 0.06  # relative difference of two figures for one thing, beside their rounding
BINDS = 0.5  # share of a rate from which on a resource is what binds
MOST_LAUNCH_US = 40.0  # a time above this is no launch
LEAST_LAUNCH_US = 0.5  # nor is one below it: an empty kernel takes 0.7 us inside a graph on an H200
KINDS = {
    "not comparable": "rows that differ in more than their column says",
    "contradiction": "figures that cannot both be right",
    "idle SMs": "multiprocessors without a block",
    "waves": "a last round of blocks that fills the card in part",
    "grid fills": "blocks enough for every multiprocessor",
    "idle threads": "threads of a block that do not compute",
    "memory": "bandwidth of device memory",
    "arithmetic": "the rate of the unit that multiplies",
    "launch": "a cost that no size changes",
    "latency": "a loop that waits: no unit is busy",
    "working set": "what the caches hold",
    "shared memory": "shared memory used of available",
    "intensity": "operations a byte, product by product",
    "re-reads": "bytes loaded more often than needed",
    "scaling": "growth that does not fit the algorithm",
    "scores in memory": "scores that live in L2, or no longer fit it",
    "share of peak": "how near to the card's rate",
    "peer": "what a peer's figures say",
    "figure explained": "where a figure comes from",
    "unverified": "what was not checked",
    "claim": "what the author concluded",
}


def diagnose(document: Document) -> list[Finding]:
    """Everything the numbers say, causes of slowness first and the largest of them first."""
    from warpwave.tables.claims import claims

    document = _with_heads(document)
    found = [finding for rule in RULES for finding in rule(document)]
    found += claims(document)
    unique = list({(f.kind, f.series, f.text): f for f in found}.values())
    return sorted(unique, key=lambda f: (not f.is_cause, -f.factor if f.is_cause else 0.0, list(KINDS).index(f.kind)))


def _with_heads(document: Document) -> Document:
    """The document with the number of heads that its figures of memory tell, where nobody states it."""
    if any(row.call.heads is not None for row in document.rows):
        return document
    told = {heads for row in document.rows if (heads := _heads_by_scores(row)) is not None}
    if len(told) != 1:
        return document
    heads = told.pop()
    return replace(document, rows=tuple(replace(r, call=replace(r.call, heads=heads)) for r in document.rows))


def _heads_by_scores(row: Row) -> int | None:
    """How many heads' scores a figure of memory holds, where it is a whole number."""
    call = row.call
    if row.memory_mb is None or row.kernel.scores != "memory" or call.seqlen is None:
        return None
    heads = row.memory_mb * 2**20 / (row.kernel.score_bytes * call.batch * call.seqlen * (call.seqlen_k or call.seqlen))
    return round(heads) if heads > 0.9 and abs(heads - round(heads)) < 0.07 * heads else None


def main_cause(document: Document, series: str) -> Finding | None:
    """Of why a series is slow, what explains most; None where nothing does."""
    causes = [f for f in diagnose(document) if f.is_cause and f.series == series]
    return max(causes, key=lambda f: f.factor, default=None)


def _sms(device: Device) -> str:
    assert device.num_sms is not None
    low, high = device.num_sms
    return f"{low} {device.unit_name}s" if low == high else f"{low} to {high} {device.unit_name}s"


def _ours(document: Document) -> Iterator[tuple[tuple[str, str], list[Row]]]:
    """Groups whose code is known, a library's left out."""
    for key, rows in groups(document).items():
        if not rows[0].kernel.is_peer:
            yield key, rows


# Can the rows be compared, and do they agree with themselves? ---------------------------------------------------------


def comparable(document: Document) -> Iterator[Finding]:
    """Rows of one table that are different problems, in more than one size."""
    for (table, series), rows in groups(document).items():
        sizes = varying(rows)
        work = [flops(row.call) for row in rows]
        known = [w for w in work if w is not None]
        swept = [s for s in sizes if s in ("seqlen", "head_dim", "heads")]
        # batch and heads together are one size: blocks. A figure apart in one row is that row's.
        if len(swept) < 2 or len(known) < len(work) or len(set(known)) < 2:
            continue
        odd = [r for r in rows if sum(getattr(r.call, s) != _usual(rows, s) for s in swept) > 1]
        if not odd:
            continue
        figures = ", ".join(flop(w) for w in known)
        yield Finding(
            "not comparable",
            f"{table}: rows differ in {' and '.join(swept)} at once, so they are no trend; compare what each reaches "
            "of its own bound",
            f"4 x heads x seqlen^2 x head_dim = {figures}",
            series,
        )


def _usual(rows: Sequence[Row], size: str) -> object:
    values = [getattr(row.call, size) for row in rows]
    return max(values, key=values.count)


def amounts(document: Document) -> Iterator[Finding]:
    """Time times rate is an amount of work, and has to be the call's."""
    for (_, series), rows in groups(document).items():
        done: list[str] = []
        for row in rows:
            time = time_us(row)
            if time is None:
                continue
            if row.tflops is not None:
                amount = time * row.tflops * 1e6
                done.append(flop(amount))
                wanted = flops(row.call)
                if wanted is not None and abs(math.log(amount / wanted)) > AGREE + spread(row, "tflops", "time_ms"):
                    yield Finding(
                        "contradiction",
                        f"{row.label}: time times rate is {amount / wanted:.2f} x the work of the call",
                        f"{us(time)} x {figure(row.tflops)} TFLOP/s = {flop(amount)}; 4 x pairs x head_dim = {flop(wanted)}",
                        series,
                    )
            if row.tokens_per_s is not None and row.call.seqlen is not None:
                tokens, wanted = time * row.tokens_per_s * 1e-6, float(row.call.batch * row.call.seqlen)
                if abs(math.log(tokens / wanted)) > AGREE:
                    yield Finding(
                        "contradiction",
                        f"{row.series}: the throughput counts {tokens:,.0f} tokens where the call has {wanted:,.0f}",
                        f"{figure(row.tokens_per_s)} tokens/s x {us(time)} = {tokens:,.0f}, not {wanted:,.0f}",
                        series,
                    )
        if len(set(done)) > 1:
            yield Finding(
                "not comparable",
                f"{series}: time times rate gives {', '.join(done)}: different problems, not one with another size",
                "time x TFLOP/s, row by row",
                series,
            )


def ratios(document: Document) -> Iterator[Finding]:
    """Two rows compared by two figures for the same thing have to give one ratio."""
    rows = [row for row in document.rows if row.time_us is not None and row.tokens_per_s is not None]
    for a, b in pairwise(rows):
        assert a.time_us and b.time_us and a.tokens_per_s and b.tokens_per_s
        if a.call != b.call:
            continue
        by_time, by_rate = a.time_us / b.time_us, b.tokens_per_s / a.tokens_per_s
        if abs(math.log(by_time / by_rate)) > AGREE:
            yield Finding(
                "contradiction",
                f"{a.series} against {b.series}: {by_time:.1f} x by latency and {by_rate:.1f} x by throughput, of one "
                "call: the two must agree",
                f"{us(a.time_us)} / {us(b.time_us)} = {by_time:.2f}; {figure(b.tokens_per_s)} / "
                f"{figure(a.tokens_per_s)} tokens/s = {by_rate:.2f}",
            )


def parts(document: Document) -> Iterator[Finding]:
    """Parts of a time have to add up to one of the times."""
    if not document.parts:
        return
    total = sum(document.parts.values())
    sums = " + ".join(f"{name} {value:g}" for name, value in document.parts.items())
    times = [row for row in document.rows if row.time_us is not None and row.per_head]
    near = [row for row in times if row.time_us and abs(row.time_us / total - 1) < AGREE]
    if near:
        yield Finding("figure explained", f"the parts add up to {near[0].label}", f"{sums} = {total:.3g} us")
    elif times:
        best = min(times, key=lambda row: abs((row.time_us or 0) - total))
        yield Finding(
            "contradiction",
            f"the parts add up to {total:.3g} us, and no row takes that; the nearest is {best.label}, {best.time_us:g}",
            f"{sums} = {total:.3g} us",
        )


# What is busy? --------------------------------------------------------------------------------------------------------


def grid(document: Document) -> Iterator[Finding]:
    """Blocks against multiprocessors: too few, a last round that is part empty, or enough."""
    device = document.device
    if device.num_sms is None:
        return
    low, _ = device.num_sms
    for (_, series), rows in _ours(document):
        counted = [(row, count) for row in rows if (count := blocks(row)) is not None]
        if not counted or any(row.kernel.launch_heads == "" for row in rows):
            continue
        idle = [(row, count) for row, count in counted if count < low]
        if idle:
            # The row with most work is what a reader cares about; the emptiest grid is named beside it.
            row, count = max(idle, key=lambda pair: (flops(pair[0].call) or 0.0, -pair[1]))
            yield _idle(document, series, row, count, low, is_cause=True)
            emptiest, fewest = min(idle, key=lambda pair: pair[1])
            if fewest < count:
                yield _idle(document, series, emptiest, fewest, low, is_cause=False)
        full = [(row, count) for row, count in counted if count >= device.num_sms[1]]
        for row, count in full[:1]:
            yield Finding(
                "grid fills",
                f"{series}, {row.label}: {count:,} blocks fill {_sms(device)}; idle {device.unit_name}s are not it",
                f"{count:,} >= {device.num_sms[1]}",
                series,
            )
        for row, count in full:
            turns = rounds(count, device) or 1
            share = turns * low / count
            if share > 1.3:
                yield Finding(
                    "waves",
                    f"{series}, {row.label}: {count} blocks take {turns} rounds of {low}, the last part empty",
                    f"{turns} x {low} / {count} = {share:.2f}",
                    series,
                    share,
                    is_cause=True,
                )


def _idle(document: Document, series: str, row: Row, count: int, low: int, is_cause: bool) -> Finding:
    device, factor = document.device, low / count
    nothing = f"{low - count}" if device.num_sms == (low, low) else f"{low - count} or more"
    return Finding(
        "idle SMs",
        f"{series}, {row.label}: {count} block{'s' * (count > 1)} on {_sms(device)}, so {nothing} have nothing to do: "
        f"{factor:.3g} x{_inside_loop(document, row, factor)}",
        f"{low} / {count} = {factor:.3g}",
        series,
        factor,
        is_cause,
    )


def _inside_loop(document: Document, row: Row, idle: float) -> str:
    """What is left against a peer of the same call, once idle SMs are taken out; and the time of a tile."""
    time, words = time_us(row), ""
    peers = [r for r in document.rows if r.series != row.series and r.call == row.call and time_us(r)]
    if time and peers:
        best = min(peers, key=lambda r: time_us(r) or math.inf)
        against = time / (time_us(best) or math.inf)
        if against > idle:
            words = f". Against {best.series} it is {against:.3g} x, so the other {against / idle:.2g} x is inside the block"
    steps = steps_of_block(row)
    if time and steps and row.kernel.block_m and row.kernel.block_n:
        tile = f"{row.kernel.block_m} x {row.kernel.block_n} x {row.call.head_dim}"
        words += f"; a {tile} tile takes {us(time / steps)}"
    return words


def plateau(document: Document) -> Iterator[Finding]:
    """Times that stay while blocks grow, and rise once blocks meet the SMs: the grid was under-filled."""
    device = document.device
    if device.num_sms is None:
        return
    for (table, series), rows in _ours(document):
        known = [(count, time_us(row) or 0.0, row) for row in rows if (count := blocks(row)) and time_us(row)]
        # Each block does the same; only their number changes.
        if len(known) < 3 or {"seqlen", "seqlen_k", "head_dim"} & set(varying(rows)):
            continue
        known.sort(key=lambda entry: entry[0])
        below = [entry for entry in known if entry[0] <= device.num_sms[1]]
        above = [entry for entry in known if entry[0] > device.num_sms[1]]
        if len(below) < 2 or below[-1][0] < 2 * below[0][0]:
            continue
        (first, first_us, _), (last, last_us, _) = below[0], below[-1]
        figures = ", ".join(f"{count} blocks {us(time)}" for count, time, _ in known)
        if last_us < FLAT * first_us:
            step = f", then a step at {above[0][0]}" if above and above[0][1] > FLAT * last_us else ""
            yield Finding(
                "idle SMs",
                f"{table}: {series} is flat from {first} to {last} blocks{step}: more work costs nothing while SMs are "
                f"idle, so the grid is under-filled ({_sms(device)})",
                figures,
                series,
                device.num_sms[0] / first,
                is_cause=True,
            )
        elif last_us > 0.7 * last / first * first_us:
            yield Finding(
                "contradiction",
                f"{table}: {series} grows with its blocks below the number of SMs, as if they ran one after another: "
                f"launched one by one, or one resource that all of them share",
                figures,
                series,
            )


def threads(document: Document) -> Iterator[Finding]:
    """Threads of a block that have nothing to compute."""
    for series, kernel in document.kernels.items():
        if kernel.threads and kernel.busy_threads and kernel.busy_threads < kernel.threads:
            idle, factor = kernel.threads - kernel.busy_threads, kernel.threads / kernel.busy_threads
            yield Finding(
                "idle threads",
                f"{series}: {idle} of {kernel.threads} threads idle while the others compute: a cause of its own",
                f"{kernel.busy_threads} / {kernel.threads} = {1 / factor:.0%} busy",
                series,
                factor,
                is_cause=True,
            )
        elif kernel.threads and kernel.threads <= 64 and kernel.grid == "heads":
            yield Finding(
                "idle threads",
                f"{series}: {kernel.threads} threads a block are {-(-kernel.threads // 32)} warp"
                f"{'s' * (kernel.threads > 32)}, where an SM hides latency with many",
                f"{kernel.threads} / 32",
                series,
            )


def binding(document: Document) -> Iterator[Finding]:
    """Which resource is busy in the row with most work; none at all is a loop that waits."""
    device = document.device
    for (_, series), rows in _ours(document):
        known = [row for row in rows if time_us(row) and flops(row.call)]
        if not known:
            continue
        row = max(known, key=lambda r: flops(r.call) or 0.0)
        time, work, peak = time_us(row), flops(row.call), peak_tflops(row, device)
        assert time is not None and work is not None
        count = blocks(row) if row.kernel.launch_heads != "" else None
        busy = 1.0 if count is None or device.num_sms is None else min(1.0, count / device.num_sms[0])
        idle_threads = (row.kernel.busy_threads or 1) / (row.kernel.threads or 1) if row.kernel.busy_threads else 1.0
        arithmetic = 0.0 if peak is None else work / (time * peak * 1e6) / busy / idle_threads
        moved = memory_bytes(row, device)
        bandwidth = 0.0
        if device.bandwidth_gbps is not None and moved is not None:
            bandwidth = moved / (time * device.bandwidth_gbps * 1e3)
        fixed = _fixed_us(rows)
        if fixed is not None and fixed > BINDS * time:
            continue  # `constant` speaks of it
        if max(arithmetic, bandwidth) >= BINDS:
            name, share = max((("arithmetic", arithmetic), ("memory", bandwidth)), key=lambda pair: pair[1])
            if name == "memory":
                again = moved / (tensor_bytes(row.call) or moved) if moved else 1.0
                said = f"{byte(moved or 0)} in {us(time)} / {figure(device.bandwidth_gbps or 0)} GB/s = {share:.0%}"
                text = f"{series}, {row.label}: memory binds, at {share:.0%} of the bandwidth"
                text += f"; it moves {again:.3g} x what it must" if again > 1.5 else ""
                yield Finding("memory", text, said, series, max(again, 1.01 + share), is_cause=True)
            else:
                said = f"{flop(work)} / {us(time)} / {figure(peak or 0)} TFLOP/s / {busy:.2g} busy = {share:.0%}"
                text = f"{series}, {row.label}: the {row.kernel.unit} unit binds, at {share:.0%} of what the busy SMs can do"
                yield Finding("arithmetic", text, said, series, 1.01 + share, is_cause=True)
        elif peak is not None and max(arithmetic, bandwidth) > 0:
            rest = 1 / max(arithmetic, bandwidth)
            yield Finding(
                "latency",
                f"{series}, {row.label}: no unit is busy, so the loop waits for itself: {rest:.3g} x are left when idle "
                f"{device.unit_name}s and threads are taken out",
                f"{flop(work)} / {us(time)} = {figure(work / time * 1e-6)} TFLOP/s, {arithmetic:.2g} of the busy "
                f"{row.kernel.unit} units; {figure((moved or 0) / time * 1e-3)} GB/s, {bandwidth:.2g} of the bandwidth",
                series,
                rest,
                is_cause=True,
            )


def _fixed_us(rows: Sequence[Row]) -> float | None:
    """The part of the times that no size changes, from a straight line through time over work; None where unknown."""
    known = sorted((flops(r.call) or 0.0, time_us(r) or 0.0) for r in rows if flops(r.call) and time_us(r))
    if len(known) < 3 or known[-1][0] < 4 * known[0][0]:
        return None
    # Least squares on relative errors, so that the largest row does not decide alone.
    weights = [1 / t**2 for _, t in known]
    sw, sx = sum(weights), sum(w * x for w, (x, _) in zip(weights, known, strict=True))
    sy = sum(w * t for w, (_, t) in zip(weights, known, strict=True))
    sxx = sum(w * x * x for w, (x, _) in zip(weights, known, strict=True))
    sxy = sum(w * x * t for w, (x, t) in zip(weights, known, strict=True))
    slope = (sw * sxy - sx * sy) / (sw * sxx - sx * sx)
    return max(0.0, (sy - slope * sx) / sw)


def constant(document: Document) -> Iterator[Finding]:
    """A time that work hardly changes, on a grid that SMs do not explain."""
    for (table, series), rows in _ours(document):
        fixed = _fixed_us(rows)
        known = [row for row in rows if time_us(row) and flops(row.call)]
        if fixed is None:
            continue
        row = max(known, key=lambda r: flops(r.call) or 0.0)
        time = time_us(row) or 0.0
        counts = {blocks(r) for r in known}
        if fixed < BINDS * time or time > MOST_LAUNCH_US or None in counts:
            continue
        steps = [steps_of_block(r) for r in known]
        if None not in steps and len(set(steps)) < len(steps) and len(counts) > 1:
            continue  # the same in every block: `plateau`
        least = min(known, key=lambda r: flops(r.call) or 0.0)
        more = (flops(row.call) or 0) / (flops(least.call) or 1)
        yield Finding(
            "launch",
            f"{table}: {series} hardly changes with the work: {us(fixed)} of {us(time)} are there whatever it computes",
            f"{more:.3g} x the work in {time / (time_us(least) or 1):.3g} x the time; a straight line meets no work at "
            f"{us(fixed)}",
            series,
            time / max(time - fixed, 0.02 * time),
            is_cause=True,
        )


# Memory ---------------------------------------------------------------------------------------------------------------


def caches(document: Document) -> Iterator[Finding]:
    """Whether what a call touches fits the caches, and how much of shared memory is used."""
    device = document.device
    for series in dict.fromkeys(series for (_, series), _ in _ours(document)):
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
                f"{byte(each)} of one head {fits} an SM's shared memory and L1 ({byte(device.smem_per_sm_bytes)})"
            )
        if device.l2_bytes:
            fits = "fits" if keys_and_values <= device.l2_bytes else "does not fit"
            holds.append(f"all {byte(keys_and_values)} of K and V {fits} L2 ({byte(device.l2_bytes)})")
        if holds:
            size = DTYPES[row.call.dtype]
            yield Finding(
                "working set",
                f"{series}, {row.label}: {'; '.join(holds)}",
                f"2 x {row.call.seqlen_k or row.call.seqlen} x {row.call.head_dim} x {size} = {byte(each)} a head",
                series,
            )
        used, have = row.kernel.smem_bytes, row.kernel.smem_available_bytes
        most = max((r for r in rows if r.kernel.smem_bytes), key=lambda r: r.kernel.smem_bytes or 0, default=None)
        if used and have and most is not None:
            used = most.kernel.smem_bytes or used
            yield Finding(
                "shared memory",
                f"{series}: {used:,} bytes of shared memory used of {have // 1024} KB: nothing is kept there to share",
                f"{used:,} / {have:,} = {used / have:.1%}",
                series,
            )


def intensities(document: Document) -> Iterator[Finding]:
    """Operations a byte loaded, of each product, as the kernel loads."""
    for (_, series), rows in _ours(document):
        row = next((r for r in reversed(rows) if r.kernel.block_m == 1 and r.call.seqlen), None)
        if row is None:
            continue
        keys, size = row.call.seqlen_k or row.call.seqlen or 1, DTYPES[row.call.dtype]
        scores, values = 2 * keys / (size * (keys + 1)), 2 / size
        yield Finding(
            "intensity",
            f"{series}, {row.label}: {scores:.2f} FLOP a byte in Q K^T and {values:.2f} in P V: a key or value is used "
            "once for each time it is loaded",
            f"2 x {keys} x d / ({size} x ({keys} + 1) x d) = {scores:.3f}; 2 x d / ({size} x d) = {values:.2f}",
            series,
        )


def rereads(document: Document) -> Iterator[Finding]:
    """How often each key is loaded by blocks of one head."""
    for series in dict.fromkeys(series for (_, series), _ in _ours(document)):
        rows = [row for row in document.rows if row.series == series]
        loads = [
            (n, row) for row in rows if (n := loads_of_a_key(row)) is not None and row.kernel.grid == "query tiles"
        ]
        if not loads or max(n for n, _ in loads) < 8:
            continue
        low, high = min(n for n, _ in loads), max(n for n, _ in loads)
        words = f"{low} to {high}" if low != high else f"{high}"
        asked = loaded_bytes(max(loads, key=lambda pair: pair[0])[1])
        yield Finding(
            "re-reads",
            f"{series}: each key is read {words} times, once for each tile of queries of its head; tiles of several "
            "queries that share it divide that",
            f"ceil(seqlen / block_m) = {words}" + (f"; {byte(asked)} asked of L2" if asked else ""),
            series,
        )


def scores(document: Document) -> Iterator[Finding]:
    """Scores in memory: whether they can have been there, and where they leave L2."""
    device = document.device
    for (_, series), rows in _ours(document):
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
                    f"{series}, {row.label}: scores and probabilities move {byte(4 * one)} a head, {us(slow / heads)} at memory "
                    f"speed, and all of it took {us(time / heads)}: only possible because {heads} heads x {byte(one)} stay in L2",
                    f"4 x {row.kernel.score_bytes} x {row.call.seqlen}^2 = {byte(4 * one)}; / {figure(device.bandwidth_gbps)} "
                    f"GB/s = {us(slow / heads)}; {byte(total)} of {byte(device.l2_bytes)}",
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
                f"{series}: scores left L2 at seqlen {edge:,.0f}; from there memory carries them",
                f"{byte(score_bytes(beyond.call, beyond.kernel) or 0)} at {beyond.call.seqlen} against "
                f"{byte(device.l2_bytes)}",
                series,
            )


def memory_figures(document: Document) -> Iterator[Finding]:
    """What a figure of memory can be made of."""
    for row in document.rows:
        if row.memory_mb is None:
            continue
        size, call, heads = row.memory_mb * 2**20, row.call, _heads_by_scores(row)
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
        total = tensors + of_scores
        if size > 4 * total:
            yield Finding(
                "figure explained",
                f"{row.series}: q, k, v, out and even all scores are {total / 2**20:.2g} MB together, so "
                f"{row.memory_mb:g} MB says nothing about the kernel",
                f"{byte(tensors)} + {byte(of_scores)} = {byte(total)}",
                row.series,
            )


# Growth, tiles, launches ----------------------------------------------------------------------------------------------


def scaling(document: Document) -> Iterator[Finding]:
    """The exponent of time over one size, held against what the algorithm must show."""
    for (table, series), rows in groups(document).items():
        sizes = varying(rows)
        axis = next((s for s in ("seqlen", "head_dim") if s in sizes), None)
        known = [(float(getattr(r.call, axis)), time_us(r) or 0.0, r) for r in rows if time_us(r)] if axis else []
        known = [k for k in known if all(getattr(k[2].call, s) == _usual(rows, s) for s in sizes if s != axis)]
        if len(known) < 3 or len({k[0] for k in known}) < 3:
            continue
        known.sort(key=lambda k: k[0])
        found, half = exponent([k[0] for k in known], [k[1] for k in known])
        wanted = 2.0 if axis == "seqlen" else 1.0
        figures = ", ".join(f"{size:g}: {us(time)}" for size, time, _ in known)
        interval = "" if math.isinf(half) else f" +- {half:.2f}"
        doubling = 2**found
        if rows[0].kernel.is_peer:
            continue
        if abs(found - wanted) <= max(0.15, 0.0 if math.isinf(half) else min(half, 0.3)):
            yield Finding(
                "scaling",
                f"{table}: {series} grows {doubling:.2g} x a doubling of {axis}, as the work does",
                f"exponent {found:.2f}{interval} over {figures}",
                series,
            )
        elif found < wanted:
            first, last = known[0], known[-1]
            per_work = (first[1] / (flops(first[2].call) or first[0] ** wanted)) / (
                last[1] / (flops(last[2].call) or last[0] ** wanted)
            )
            counts = [blocks(k[2]) for k in (first, last)]
            sms, why = document.device.num_sms, "small sizes are under-filled, or the figures are rough"
            if sms is not None and counts[0] is not None and counts[1] is not None:
                if counts[0] < sms[0] and counts[1] <= sms[0]:
                    why = f"blocks grow with {axis} on idle SMs ({counts[0]} to {counts[1]} blocks), so part of the work is free"
                elif counts[0] < sms[0]:
                    why = f"the smallest has {counts[0]} blocks and is under-filled"
                else:
                    why = (
                        f"{counts[0]} blocks fill the card already at the smallest, so it is a cost that does not grow, "
                        "or rough figures"
                    )
            yield Finding(
                "scaling",
                f"{table}: {series} grows {doubling:.2g} x a doubling of {axis} where the work grows {2**wanted:g} x: {why}",
                f"exponent {found:.2f}{interval} instead of {wanted:g} over {figures}; work of the first takes "
                f"{per_work:.2g} x as long as of the last",
                series,
            )
        else:
            yield Finding(
                "scaling",
                f"{table}: {series} grows {doubling:.2g} x a doubling of {axis}, more than its work: something leaves a "
                "cache, or is done again",
                f"exponent {found:.2f}{interval} instead of {wanted:g} over {figures}",
                series,
            )


def tile_sweep(document: Document) -> Iterator[Finding]:
    """Tiles of one call against each other: what the grids explain, in every reading of who launches what."""
    device = document.device
    if device.num_sms is None:
        return
    for (_, series), rows in _ours(document):
        sweep = [r for r in rows if time_us(r) and blocks(r) and not r.launch_saving]
        if len({(r.kernel.block_m, r.kernel.block_n) for r in sweep}) < 2 or varying(rows):
            continue
        fast, slow = (pick(sweep, key=lambda r: time_us(r) or 0.0) for pick in (min, max))
        times = (time_us(slow) or 0.0) / (time_us(fast) or 1.0)
        readings = {"one": "heads one at a time", "all": "heads in one launch", "": ""}
        for reading in ("one", "all") if fast.kernel.launch_heads == "" else (fast.kernel.launch_heads,):
            heads = 1 if reading == "one" else None
            many, few = blocks(fast, heads) or 1, blocks(slow, heads) or 1
            sms = device.num_sms[0]
            idle = max(1.0, sms / few) / max(1.0, sms / many)
            yield Finding(
                "idle SMs" if idle > 1.05 else "grid fills",
                f"{series}, {readings[reading]}: the slowest tile has {few:,} blocks against {many:,}, which explains at "
                f"most {max(idle, 1.0):.2g} x of the {times:.2g} x; {times / max(1.0, idle):.2g} x remain"
                if idle > 1.05
                else f"{series}, {readings[reading]}: {few:,} and {many:,} blocks both fill {_sms(device)}; the whole "
                f"{times:.2g} x remains",
                f"({slow.label}) {us(slow.time_us or 0)} / ({fast.label}) {us(fast.time_us or 0)} = {times:.2f}; "
                f"{many:,} / {few:,} = {many / few:.2g}",
                series,
                idle,
                is_cause=idle > 1.05,
            )
        launched = document.parts.get("launches")
        if fast.kernel.launch_heads == "" and launched is not None and launched < LEAST_LAUNCH_US:
            every = launched * (fast.call.heads or 1)
            yield Finding(
                "figure explained",
                f"{series}: {launched:g} us of launching a head is less than any launch takes, so heads were batched",
                f"{launched:g} x {fast.call.heads} heads = {every:.2g} us, against some {LEAST_LAUNCH_US:g} us at the "
                "least for each launch",
                series,
            )


def launches(document: Document) -> Iterator[Finding]:
    """Cheaper launches that change nothing: then launching was not it."""
    for (_, series), rows in _ours(document):
        for saved in [r for r in rows if r.launch_saving and r.time_us]:
            plain = next(
                (
                    r
                    for r in rows
                    if not r.launch_saving and r.kernel == saved.kernel and r.call == saved.call and r.time_us
                ),
                None,
            )
            if plain is None or not plain.time_us or not saved.time_us:
                continue
            gain = plain.time_us / saved.time_us
            spared = plain.time_us - saved.time_us
            figures = f"{us(plain.time_us)} to {us(saved.time_us)}"
            if gain < 1.1:
                yield Finding(
                    "launch",
                    f"{series}: launching is not it: {saved.launch_saving} take {plain.label} from {plain.time_us:g} to "
                    f"{saved.time_us:g} us",
                    figures,
                    series,
                )
            else:
                text = f"{series}: launching is {spared / plain.time_us:.0%} of it: {saved.launch_saving} spare {us(spared)}"
                yield Finding("launch", text, figures, series, gain, is_cause=True)


def peaks(document: Document) -> Iterator[Finding]:
    """The best row as a share of what the card could do."""
    for series in document.series:
        rows = [r for r in document.rows if r.series == series]
        known = [r for r in rows if time_us(r) and flops(r.call) and peak_tflops(r, document.device)]
        if not known:
            continue
        row = max(known, key=lambda r: (flops(r.call) or 0) / (time_us(r) or math.inf))
        rate = (flops(row.call) or 0) / (time_us(row) or 1) * 1e-6
        peak = peak_tflops(row, document.device) or 1.0
        if rate > peak * 1.05:
            yield Finding(
                "contradiction",
                f"{series}, {row.label}: {figure(rate)} TFLOP/s are more than the card has ({figure(peak)}): the time or the "
                "shape is not what it says",
                f"{flop(flops(row.call) or 0)} / {us(time_us(row) or 0)}",
                series,
            )
            continue
        yield Finding(
            "share of peak",
            f"{series}, {row.label}: {figure(rate)} TFLOP/s, {rate / peak:.2%} of the {row.kernel.unit} peak",
            f"{flop(flops(row.call) or 0)} / {us(time_us(row) or 0)} / {figure(peak)} TFLOP/s",
            series,
        )


def slow_peers(document: Document) -> Iterator[Finding]:
    """A peer that takes longer for less work: it is on another path there, and beating it there says little."""
    for (_, series), rows in groups(document).items():
        known = [r for r in rows if time_us(r) and flops(r.call)]
        for row in known:
            easier = [
                r for r in known if (flops(r.call) or 0) > 4 * (flops(row.call) or 0)
                and (time_us(r) or 0) * 2 < (time_us(row) or 0)
            ]  # fmt: skip
            others = [r for r in document.rows if r.series != series and r.call == row.call and time_us(r)]
            if easier and others and min(time_us(r) or 0 for r in others) < (time_us(row) or 0):
                big = max(easier, key=lambda r: flops(r.call) or 0)
                yield Finding(
                    "peer",
                    f"{series}, {row.label}: takes {us(time_us(row) or 0)} where {big.label} takes {us(time_us(big) or 0)}: it is "
                    "on a slow path there, and a win at this size is over that",
                    f"{(time_us(row) or 0) / (time_us(big) or 1):.2g} x the time for "
                    f"{(flops(row.call) or 0) / (flops(big.call) or 1):.2g} x the work",
                    series,
                )
                break


def unverified(document: Document) -> Iterator[Finding]:
    """Series whose result nobody checked, or that did not compute all of it."""
    unchecked = []
    for series in document.series:
        row = next(r for r in document.rows if r.series == series)
        kernel, call = row.kernel, row.call
        if kernel.is_peer:
            continue
        if kernel.max_difference is None:
            unchecked.append(series)
        if kernel.softmax_rows and call.heads and call.seqlen:
            rows = call.batch * call.heads * call.seqlen
            if kernel.softmax_rows < rows:
                yield Finding(
                    "unverified",
                    f"{series}: its softmax launch covers {kernel.softmax_rows:,} of {rows:,} rows, those of "
                    f"{kernel.softmax_rows / (call.batch * call.seqlen):.3g} of {call.heads} heads",
                    f"{call.batch} x {call.heads} x {call.seqlen} = {rows:,}",
                    series,
                )
    if unchecked:
        one = unchecked[0] if len(unchecked) == 1 else ""
        yield Finding(
            "unverified",
            f"{', '.join(unchecked)}: no accuracy is given, so nothing says that it is right",
            "-",
            one,
        )


RULES: tuple[Callable[[Document], Iterator[Finding]], ...] = (
    comparable,
    amounts,
    ratios,
    parts,
    grid,
    plateau,
    threads,
    binding,
    constant,
    caches,
    intensities,
    rereads,
    scores,
    memory_figures,
    scaling,
    tile_sweep,
    launches,
    peaks,
    slow_peers,
    unverified,
)


# Knowledge, not arithmetic --------------------------------------------------------------------------------------------


def notes(document: Document) -> list[str]:
    """What is known of the software in the table beside its figures, said apart from them."""
    found = []
    torch = [row for row in document.rows if any(name in row.series.lower() for name in ("torch", "sdpa"))]
    if any(row.call.head_dim and row.call.head_dim % 8 for row in torch):
        found.append(
            "PyTorch's fused kernels take head sizes that are a multiple of 8; others go through padding or its op-by-op path."
        )
    if any(row.call.dtype == "float32" and row.kernel.unit == "matrix" for row in torch) and document.device.has_tf32:
        found.append(
            "PyTorch's float32 attention multiplies split tf32 operands on tensor cores: another unit than a scalar kernel's, "
            "with another ceiling."
        )
    series = {row.series.lower() for row in document.rows}
    if any("sdpa" in name or "pytorch" in name for name in series) and any(
        "flashattention-3" in name for name in series
    ):
        found.append("SDPA does not use FlashAttention-3 unless it is activated, so the two are different kernels.")
    return found
