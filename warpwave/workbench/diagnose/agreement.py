"""Rules that compare figures: with themselves, with each other, and with the algorithm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from warpwave.workbench.diagnose.facts import (
    AGREE,
    FLOPS,
    Finding,
    blocks,
    flops,
    groups,
    peak_tflops,
    spread,
    time_us,
    varying,
)
from warpwave.workbench.diagnose.parse import Document, Row
from warpwave.workbench.model.fitting import power_law
from warpwave.workbench.model.roofline import figure, flop, us


def comparable(document: Document) -> Iterator[Finding]:
    """Finds rows of one table that differ in more than one size and are therefore different problems."""
    for (table, series), rows in groups(document).items():
        sizes = varying(rows)
        work = [flops(row.call) for row in rows]
        known = [w for w in work if w is not None]
        swept = [s for s in sizes if s in ("seqlen", "head_dim", "heads")]
        # batch and heads together are one size, the number of blocks. A size that differs in a single row is ignored.
        if len(swept) < 2 or len(known) < len(work) or len(set(known)) < 2:
            continue
        odd = [r for r in rows if sum(getattr(r.call, s) != usual(rows, s) for s in swept) > 1]
        if not odd:
            continue
        figures = ", ".join(flop(w) for w in known)
        yield Finding(
            "not comparable",
            f"{table}: rows differ in {' and '.join(swept)} at once and form no trend; compare each with its own bound",
            f"4 x heads x seqlen^2 x head_dim = {figures}",
            series,
        )


def usual(rows: Sequence[Row], size: str) -> object:
    """Returns the value that most rows have for a size."""
    values = [getattr(row.call, size) for row in rows]
    return max(values, key=values.count)


def amounts(document: Document) -> Iterator[Finding]:
    """Checks that time times rate is the work of the call."""
    for (_, series), rows in groups(document).items():
        done: list[tuple[float, Row]] = []
        for row in rows:
            time = time_us(row)
            if time is None or row.time_us is None:
                continue
            if row.tflops is not None:
                amount = time * row.tflops * 1e6
                done.append((amount, row))
                wanted = flops(row.call)
                if wanted is not None and abs(math.log(amount / wanted)) > AGREE + _rounding(row):
                    yield Finding(
                        "contradiction",
                        f"{row.label}: time times rate is {amount / wanted:.2f} x the work of the call",
                        f"{us(time)} x {figure(row.tflops)} TFLOP/s = {flop(amount)}; "
                        f"{FLOPS[row.call.passes]} x pairs x head_dim = {flop(wanted)}",
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
        said = [flop(amount) for amount, _ in done]
        if len(set(said)) > 1 and not _one_problem(done):
            yield Finding(
                "not comparable",
                f"{series}: time times rate gives {', '.join(said)}: the rows are different problems, not sizes of one "
                "problem",
                "time x TFLOP/s, row by row",
                series,
            )


def _rounding(row: Row) -> float:
    return spread(row, "tflops", "time_ms", "time_us")


def _one_problem(done: Sequence[tuple[float, Row]]) -> bool:
    """Returns whether amounts of work are those of the rows' calls, or grow with the one size that differs between
    them."""
    rows = [row for _, row in done]
    wanted = [flops(row.call) for row in rows]
    if all(want is not None and abs(amount / want - 1) < AGREE for (amount, _), want in zip(done, wanted, strict=True)):
        return True
    if len(varying(rows)) != 1:
        return False
    # Sizes that are not stated are the same for all rows and divide out.
    known = [replace(r.call, heads=r.call.heads or 1, seqlen=r.call.seqlen or 1, head_dim=r.call.head_dim or 1)
             for r in rows]  # fmt: skip
    rest = [amount / (flops(call) or 1.0) for (amount, _), call in zip(done, known, strict=True)]
    return math.log(max(rest) / min(rest)) <= AGREE + 2 * max(_rounding(row) for row in rows)


def ratios(document: Document) -> Iterator[Finding]:
    """Checks that the ratio of two rows is the same by latency and by throughput."""
    rows = [row for row in document.rows if row.time_us is not None and row.tokens_per_s is not None]
    for a, b in pairwise(rows):
        assert a.time_us and b.time_us and a.tokens_per_s and b.tokens_per_s
        if a.call != b.call:
            continue
        by_time, by_rate = a.time_us / b.time_us, b.tokens_per_s / a.tokens_per_s
        if abs(math.log(by_time / by_rate)) > AGREE:
            yield Finding(
                "contradiction",
                f"{a.series} against {b.series}: {by_time:.1f} x by latency and {by_rate:.1f} x by throughput, for "
                "the same call: the two must agree",
                f"{us(a.time_us)} / {us(b.time_us)} = {by_time:.2f}; {figure(b.tokens_per_s)} / "
                f"{figure(a.tokens_per_s)} tokens/s = {by_rate:.2f}",
            )


def parts(document: Document) -> Iterator[Finding]:
    """Checks that the parts of a time add up to one of the times."""
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
            f"the parts add up to {total:.3g} us, and no row has that time; the nearest is {best.label}, "
            f"{best.time_us:g}",
            f"{sums} = {total:.3g} us",
        )


def scaling(document: Document) -> Iterator[Finding]:
    """Compares the exponent of time over one size with the exponent that the algorithm must have."""
    for (table, series), rows in groups(document).items():
        sizes = varying(rows)
        axis = next((s for s in ("seqlen", "head_dim") if s in sizes), None)
        sized = [r for r in rows if axis and getattr(r.call, axis) is not None]
        known = [(float(getattr(r.call, axis or "")), time_us(r) or 0.0, r) for r in sized if time_us(r)]
        known = [k for k in known if all(getattr(k[2].call, s) == usual(rows, s) for s in sizes if s != axis)]
        if len(known) < 3 or len({k[0] for k in known}) < 3:
            continue
        known.sort(key=lambda k: k[0])
        law = power_law([k[0] for k in known], [k[1] for k in known])
        found, half = law.exponent, law.half
        wanted = 2.0 if axis == "seqlen" else 1.0
        figures = ", ".join(f"{size:g}: {us(time)}" for size, time, _ in known)
        doubling = 2**found
        if rows[0].kernel.is_peer:
            continue
        if abs(found - wanted) <= max(0.15, 0.0 if math.isinf(half) else min(half, 0.3)):
            yield Finding(
                "scaling",
                f"{table}: {series} grows {doubling:.2g} x per doubling of {axis}, as the work does",
                f"exponent {law} over {figures}",
                series,
            )
        elif found < wanted:
            first, last = known[0], known[-1]
            per_work = (first[1] / (flops(first[2].call) or first[0] ** wanted)) / (
                last[1] / (flops(last[2].call) or last[0] ** wanted)
            )
            counts = [blocks(k[2]) for k in (first, last)]
            sms, why = document.device.num_sms, "small sizes under-fill the GPU, or the figures are rough"
            if sms is not None and counts[0] is not None and counts[1] is not None:
                if counts[0] < sms[0] and counts[1] <= sms[0]:
                    why = f"blocks grow with {axis} on idle SMs ({counts[0]} to {counts[1]} blocks), "
                    why += "so part of the extra work is free"
                elif counts[0] < sms[0]:
                    why = f"the smallest size has {counts[0]} blocks and under-fills the GPU"
                else:
                    why = (
                        f"{counts[0]} blocks already fill the card at the smallest size, so a fixed cost or rough "
                        "figures explain it"
                    )
            yield Finding(
                "scaling",
                f"{table}: {series} grows {doubling:.2g} x per doubling of {axis} where the work grows "
                f"{2**wanted:g} x: {why}",
                f"exponent {law} instead of {wanted:g} over {figures}; a unit of work takes "
                f"{per_work:.2g} x as long in the first as in the last",
                series,
            )
        else:
            yield Finding(
                "scaling",
                f"{table}: {series} grows {doubling:.2g} x per doubling of {axis}, more than its work: data "
                "leaves a cache, or work is repeated",
                f"exponent {law} instead of {wanted:g} over {figures}",
                series,
            )


def peaks(document: Document) -> Iterator[Finding]:
    """Gives the fastest row as a share of the card's peak."""
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
                f"{row.name}: {figure(rate)} TFLOP/s are more than the card has ({figure(peak)}): the "
                "stated time or shape is wrong",
                f"{flop(flops(row.call) or 0)} / {us(time_us(row) or 0)}",
                series,
            )
            continue
        yield Finding(
            "share of peak",
            f"{row.name}: {figure(rate)} TFLOP/s, {rate / peak:.2%} of the {row.kernel.unit} peak",
            f"{flop(flops(row.call) or 0)} / {us(time_us(row) or 0)} / {figure(peak)} TFLOP/s",
            series,
        )


def slow_peers(document: Document) -> Iterator[Finding]:
    """Finds peers that take longer for less work: they took a slow path, and a win over it means little."""
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
                    f"{row.name}: takes {us(time_us(row) or 0)} where {big.label} takes "
                    f"{us(time_us(big) or 0)}: it takes a "
                    "slow path there, and a win at this size is a win over that path",
                    f"{(time_us(row) or 0) / (time_us(big) or 1):.2g} x the time for "
                    f"{(flops(row.call) or 0) / (flops(big.call) or 1):.2g} x the work",
                    series,
                )
                break


def unverified(document: Document) -> Iterator[Finding]:
    """Finds series without a verified result, and series that did not compute all rows."""
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
            f"{', '.join(unchecked)}: no accuracy is given, so the result is unverified",
            "-",
            one,
        )
