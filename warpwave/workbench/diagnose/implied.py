"""Facts that a table does not state but its figures imply: the number of heads, and the unit that multiplies."""

from __future__ import annotations

from dataclasses import replace

from warpwave.workbench.diagnose.facts import MORE_THAN_ALL, flops, spread, time_us, work
from warpwave.workbench.diagnose.parse import Document, Row


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
    """Returns the document with a unit for each series: "matrix" if its best rate exceeds that of the scalar units."""
    scalar, best = document.device.tflops.get("scalar"), dict[str, float]()
    for row in document.rows:
        amount, time = work(row), time_us(row)
        rate = row.tflops if amount is None or time is None else amount / time * 1e-6
        best[row.series] = max(best.get(row.series, 0.0), rate or 0.0)
    faster = {name for name, rate in best.items() if scalar is not None and rate > MORE_THAN_ALL * scalar}

    def resolved(row: Row) -> Row:
        unit = row.kernel.unit or ("matrix" if row.series in faster else "scalar")
        return replace(row, kernel=replace(row.kernel, unit=unit))

    unknown = [
        f"scalar units of {name}"
        for name in document.series
        if name not in faster
        and any(r.series == name and not r.kernel.unit and r.call.dtype != "float32" for r in document.rows)
    ]
    rows = tuple(resolved(row) for row in document.rows)
    return replace(document, rows=rows, assumed=(*document.assumed, *unknown))
