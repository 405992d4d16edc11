"""Compares the author's conclusions, given as data, with the author's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from warpwave.workbench.diagnose.busy import grid, in_words, plateau
from warpwave.workbench.diagnose.facts import AGREE, BINDS, Finding, blocks, loads_of_a_key, tensor_bytes, time_us
from warpwave.workbench.diagnose.parse import LEAST, MEASURED, MOST, Document, TableError
from warpwave.workbench.model.roofline import byte
from warpwave.workbench.schema import quoted

Claim = Mapping[str, Any]


def claims(document: Document) -> list[Finding]:
    """Returns a finding for each claim that the figures can confirm or refute.

    Raises:
        TableError: a claim of an unknown kind.
    """
    found: list[Finding] = []
    for claim in document.claims:
        kind = next((key for key in KINDS if key in claim), None)
        if kind is None:
            raise TableError(f"the claim {quoted(claim['says'])} must have one of {', '.join(KINDS)}")
        try:
            found += KINDS[kind](document, claim)
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise TableError(f"the claim {quoted(claim['says'])} cannot be read: {error}") from None
    return found


def _number(value: Any) -> float:
    """Returns a figure of a claim."""
    if not LEAST <= float(value) <= MOST:
        raise ValueError(f"{quoted(value)} is no number above 0")
    return float(value)


def _said(claim: Claim, answer: str, arithmetic: str, series: str = "") -> Finding:
    return Finding("claim", f'"{claim["says"]}": {answer}', arithmetic, series, of_author=True)


def _bandwidth(document: Document, claim: Claim) -> Iterator[Finding]:
    rate, have = _number(claim["bandwidth_gbps"]), document.device.bandwidth_gbps
    if have is None:
        return
    share = rate / have
    sized = [size for row in document.rows if (size := tensor_bytes(row.call)) is not None]
    caches = ""
    if sized and document.device.l2_bytes and min(sized) <= document.device.l2_bytes:
        caches = f", and a call of {byte(min(sized))} fits an L2 of {byte(document.device.l2_bytes)}"
    verdict = "so bandwidth does not bind" if share < BINDS else "so bandwidth may bind"
    said = f"{rate:g} GB/s / {have:g} GB/s = {share:.1%}"
    yield _said(claim, f"{share:.1%} of the bandwidth{caches}, {verdict}", said)


def _beyond_cache(document: Document, claim: Claim) -> Iterator[Finding]:
    sized = [(size, row) for row in document.rows if (size := tensor_bytes(row.call)) is not None]
    if not sized or document.device.l2_bytes is None:
        return
    size, row = max(sized, key=lambda pair: pair[0])
    inside = size <= document.device.l2_bytes
    yield _said(
        claim,
        f"the largest, {row.label}, is {byte(size)} and {'fits' if inside else 'does not fit'} L2",
        f"{byte(size)} against {byte(document.device.l2_bytes)}",
    )


def _idle_blocks(document: Document, claim: Claim) -> Iterator[Finding]:
    count, sms = int(claim["idle_blocks"]), document.device.num_sms
    if sms is None:
        return
    right = count < sms[0]
    yield _said(
        claim,
        f"{count} blocks on {in_words(document.device)} {'leave some idle' if right else 'leave none idle'}",
        f"{count} {'<' if right else '>='} {sms[0] if right else sms[1]}",
    )


def _not_idle(document: Document, claim: Claim) -> Iterator[Finding]:
    idle = [f for rule in (plateau, grid) for f in rule(document) if f.kind == "idle SMs"]
    if idle:
        yield _said(claim, f"it is not: {idle[0].text}", idle[0].arithmetic, idle[0].series)
    else:
        yield _said(claim, "no figure contradicts it", "-")


def _growth(document: Document, claim: Claim) -> Iterator[Finding]:
    data, time = _number(claim["data_factor"]), _number(claim["time_factor"])
    work = data * data
    yield _said(
        claim,
        f"work grows with the square of the length, {work:.3g} x, so {time / work:.3g} x need an explanation, not "
        f"{time / data:.3g} x",
        f"{data:g}^2 = {work:.3g}; {time:g} / {work:.3g} = {time / work:.3g}",
    )


def _exact(document: Document, claim: Claim) -> Iterator[Finding]:
    claimed = float(claim["max_difference"])
    for series, kernel in document.kernels.items():
        if kernel.max_difference is not None and kernel.max_difference > claimed:
            yield _said(
                claim,
                f"the table states a difference of {kernel.max_difference:g}",
                f"{kernel.max_difference:g} > {claimed:g}",
                series,
            )


def _dimensions(document: Document, claim: Claim) -> Iterator[Finding]:
    asked = int(claim["grid_dimensions"])
    if asked > 3:
        yield _said(claim, "a grid has three dimensions in CUDA and HIP; fold the indices", f"{asked} > 3")


def _loads(document: Document, claim: Claim) -> Iterator[Finding]:
    asked = int(claim["key_loads"])
    for row in document.rows:
        loads = loads_of_a_key(row)
        if loads is None or ("seqlen" in claim and row.call.seqlen != claim["seqlen"]):
            continue
        if loads != asked:
            count = blocks(row)
            yield _said(
                claim,
                f"at seqlen {row.call.seqlen} each key is loaded {loads} times; other blocks belong to other heads",
                f"ceil({row.call.seqlen} / {row.kernel.block_m}) = {loads}"
                + (f" of {count} blocks" if count is not None else ""),
                row.series,
            )
            return


def _part(document: Document, claim: Claim) -> Iterator[Finding]:
    name, value = str(claim["part"]), _number(claim["part_us"])
    known = document.parts.get(name)
    if known is not None and abs(known / value - 1) > AGREE:
        yield Finding(
            "contradiction",
            f"{name} is given as {known:g} and, alone, as {value:g} us",
            f"{value:g} / {known:g} = {value / known:.2f}",
            of_author=True,
        )


def _less(document: Document, claim: Claim) -> Iterator[Finding]:
    if claim["of"] not in MEASURED or claim["of"] == "time_ms":  # rows hold times in us
        known = ", ".join(m for m in MEASURED if m != "time_ms")
        raise ValueError(f"of is {quoted(claim['of'])}; it must be one of {known}")
    rows = [row for row in document.rows if getattr(row, claim["of"]) is not None]
    if len(rows) < 2:
        return
    first, second = (float(getattr(row, claim["of"])) for row in rows[:2])
    less, said = 1 - first / second, _number(claim["less"])
    if abs(less - said) > AGREE / 2:
        yield _said(claim, f"it is {less:.0%} less, not {said:.0%}", f"{first:g} / {second:g} = {first / second:.3f}")


def _faster(document: Document, claim: Claim) -> Iterator[Finding]:
    low, high = (_number(x) for x in claim["times_faster"])
    slow, fast = (str(x) for x in claim["of"])
    found = []
    for row in document.rows:
        other = next((r for r in document.rows if r.series == fast and r.call == row.call and time_us(r)), None)
        if row.series == slow and other is not None and time_us(row):
            found.append(((time_us(row) or 0) / (time_us(other) or 1), row))
    outside = [(r, row) for r, row in found if not low * (1 - AGREE) <= r <= high * (1 + AGREE)]
    if outside:
        most, row = max(outside, key=lambda pair: max(pair[0] / high, low / pair[0]))
        yield _said(
            claim,
            f"its table says {most:.2g} x at {row.label}",
            ", ".join(f"{r:.2g} x ({row.label})" for r, row in found),
        )
    elif found:
        yield _said(claim, "its table agrees", ", ".join(f"{r:.2g} x" for r, _ in found))


def _fits(document: Document, claim: Claim) -> Iterator[Finding]:
    level, size, device = str(claim["fits_in"]).upper(), _number(claim["working_set_mb"]) * 2**20, document.device
    if level not in ("L1", "L2"):
        raise ValueError(f"fits_in is {quoted(claim['fits_in'])}; it must be L1 or L2")
    have = device.smem_per_sm_bytes if level == "L1" else device.l2_bytes
    if have is None or (size <= have) == bool(claim["answer"]):
        return
    name = "an SM's shared memory and L1" if level == "L1" else "L2"
    yield _said(
        claim,
        f"{byte(size)} {'fits' if size <= have else 'does not fit'} {name} of {byte(have)}",
        f"{byte(size)} {'<=' if size <= have else '>'} {byte(have)}",
    )


KINDS: dict[str, Callable[[Document, Claim], Iterator[Finding]]] = {
    "bandwidth_gbps": _bandwidth,
    "beyond_cache": _beyond_cache,
    "idle_blocks": _idle_blocks,
    "not_idle": _not_idle,
    "data_factor": _growth,
    "max_difference": _exact,
    "grid_dimensions": _dimensions,
    "key_loads": _loads,
    "part": _part,
    "less": _less,
    "times_faster": _faster,
    "fits_in": _fits,
}
