"""Facts that a table does not state but its figures imply: the number of heads, and the unit that multiplies."""

from __future__ import annotations

from dataclasses import replace

from warpwave.workbench.diagnose.facts import (
    BINDS,
    MORE_THAN_ALL,
    OFFERS,
    balance,
    busy_sms,
    busy_threads,
    flops,
    matrix_tflops,
    spread,
    time_us,
    work,
)
from warpwave.workbench.diagnose.parse import Device, Document, Row


def heads_by_scores(row: Row) -> int | None:
    """Returns how many heads' scores a memory figure holds, if it is a whole number."""
    call = row.call
    if row.memory_mb is None or row.kernel.scores != "memory" or call.seqlen is None:
        return None
    heads = row.memory_mb * 2**20 / (row.kernel.score_bytes * call.batch * call.seqlen * (call.seqlen_k or call.seqlen))
    return round(heads) if heads > 0.9 and abs(heads - round(heads)) < 0.07 * heads else None


MOST_OFF = 0.1  # rougher figures tell no number of heads


def _heads_by_rate(row: Row) -> int | None:
    """Returns how many heads a row's time times its rate is the work of, if it is a whole number."""
    time, one = time_us(row), flops(replace(row.call, heads=1))
    if time is None or row.tflops is None or one is None or row.per_head:
        return None
    heads, off = time * row.tflops * 1e6 / one, min(0.02 + spread(row, "tflops", "time_us", "time_ms"), MOST_OFF)
    return round(heads) if heads > 0.9 and abs(heads - round(heads)) < off * heads else None


def implied(document: Document) -> Document:
    """Returns the document with the facts that its figures imply."""
    return _with_units(_with_heads(document))


def _with_heads(document: Document) -> Document:
    """Returns the document with the numbers of heads that memory figures or rates imply, if it states none."""
    if any(row.call.heads is not None for row in document.rows):
        return document
    told = {heads for row in document.rows if (heads := heads_by_scores(row)) is not None}
    if len(told) == 1:
        heads = told.pop()
        return replace(document, rows=tuple(replace(r, call=replace(r.call, heads=heads)) for r in document.rows))
    by_rate = [_heads_by_rate(row) for row in document.rows]
    if None in by_rate:
        return document
    rows = zip(document.rows, by_rate, strict=True)
    return replace(document, rows=tuple(replace(r, call=replace(r.call, heads=heads)) for r, heads in rows))


def _with_units(document: Document) -> Document:
    """Returns the document with a unit for each series: "matrix" if the best rate of its busy multiprocessors is too
    high for the scalar units."""
    device, best = document.device, dict[str, float]()
    for row in document.rows:
        amount, time = work(row), time_us(row)
        rate = row.tflops if amount is None or time is None else amount / time * 1e-6
        of_busy = (rate or 0.0) / busy_sms(row, device) / balance(row, device) / busy_threads(row)
        best[row.series] = max(best.get(row.series, 0.0), of_busy / _most_scalar(row, device))
    faster = {name for name, share in best.items() if share > 1}

    def resolved(row: Row) -> Row:
        if row.kernel.unit:
            return row
        unit = "matrix" if row.series in faster else "scalar"
        return replace(row, kernel=replace(row.kernel, unit=unit), is_unit_assumed=True)

    unknown = [
        f"{'matrix' if name in faster else 'scalar'} units of {name}"
        for name in document.series
        if any(r.series == name and not r.kernel.unit and r.call.dtype != "float32" for r in document.rows)
    ]
    rows = tuple(resolved(row) for row in document.rows)
    return replace(document, rows=rows, assumed=(*document.assumed, *unknown))


def _most_scalar(row: Row, device: Device) -> float:
    """Returns the rate in TFLOP/s above which products of the row's dtype are taken to run on matrix units.

    No attention kernel comes close to the rate of the scalar units. If the matrix units are not much faster, a slow
    kernel on them reaches the same rate, and is the more likely reading of 16-bit products.
    """
    scalar = device.tflops.get("scalar")
    if scalar is None:
        return float("inf")
    matrix = 0.0 if row.call.dtype == "float32" else matrix_tflops(row.call.dtype, device) or 0.0
    return scalar * (BINDS if scalar < matrix < OFFERS * scalar else MORE_THAN_ALL)
