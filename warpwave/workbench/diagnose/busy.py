"""Rules about idle resources: blocks against multiprocessors, waves of blocks, tiles, and threads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from warpwave.workbench.diagnose.facts import (
    Finding,
    balance,
    blocks,
    groups,
    most_resident,
    steps_of_block,
    time_us,
    varying,
    work,
)
from warpwave.workbench.diagnose.fixed import FLAT, fixed_cost, flat_beyond
from warpwave.workbench.diagnose.parse import Device, Document, Row
from warpwave.workbench.model.roofline import us

WASTEFUL = 1.15  # a last wave that costs less is no cause
LEAST_LAUNCH_US = 0.5  # the shortest; an empty kernel takes 0.7 us inside a graph on an H200


def in_words(device: Device) -> str:
    """Returns the number of multiprocessors as text; the number must be known."""
    assert device.num_sms is not None
    low, high = device.num_sms
    return f"{low} {device.unit_name}s" if low == high else f"{low} to {high} {device.unit_name}s"


def own_groups(document: Document) -> Iterator[tuple[tuple[str, str], list[Row]]]:
    """Yields the groups whose code is known, which excludes libraries."""
    for key, rows in groups(document).items():
        if not rows[0].kernel.is_peer:
            yield key, rows


def grid(document: Document) -> Iterator[Finding]:
    """Compares blocks with multiprocessors: too few, a partly empty last wave, or enough."""
    device = document.device
    if device.num_sms is None:
        return
    low, _ = device.num_sms
    for (_, series), rows in own_groups(document):
        counted = [(row, count) for row in rows if (count := blocks(row)) is not None]
        if not counted or any(row.kernel.launch_heads == "" for row in rows):
            continue
        idle = [(row, count) for row, count in counted if count < low]
        if idle:
            # The row with most work matters most to a reader; the emptiest grid is reported too.
            row, count = max(idle, key=lambda pair: (work(pair[0]) or 0.0, -pair[1]))
            # More blocks do not reduce a fixed cost, nor the latency of a block.
            fills_help = flat_beyond(rows, device) is None and fixed_cost(device, rows) is None
            # A small size of a sweep whose largest size fills the card is not why the series is slow.
            is_largest = work(row) is None or not any((work(r) or 0.0) > (work(row) or 0.0) for r, _ in counted)
            yield _idle(document, series, row, count, low, is_cause=fills_help and is_largest)
            if fills_help and is_largest:
                yield from _uneven(row, device)
            emptiest, fewest = min(idle, key=lambda pair: pair[1])
            if fewest < count:
                yield _idle(document, series, emptiest, fewest, low, is_cause=False)
        full = [(row, count) for row, count in counted if count >= device.num_sms[1]]
        for row, count in sorted(full, key=lambda pair: pair[1])[:1]:
            yield Finding(
                "grid fills",
                f"{row.name}: {count:,} blocks fill {in_words(device)}, so idle {device.unit_name}s are not the cause",
                f"{count:,} >= {device.num_sms[1]}",
                series,
            )


def _idle(document: Document, series: str, row: Row, count: int, low: int, is_cause: bool) -> Finding:
    device, factor = document.device, low / count
    nothing = f"{low - count}" if device.num_sms == (low, low) else f"{low - count} or more"
    return Finding(
        "idle SMs",
        f"{row.name}: {count} block{'s' * (count > 1)} on {in_words(device)}, so {nothing} are idle: "
        f"{factor:.3g} x{_inside_loop(document, row, factor)}",
        f"{low} / {count} = {factor:.3g}",
        series,
        factor,
        is_cause,
    )


def _uneven(row: Row, device: Device) -> Iterator[Finding]:
    """Yields the finding for blocks of different lengths that all run at once, so that the longest sets the time."""
    share, call = balance(row, device), row.call
    if share * WASTEFUL > 1:
        return
    keys = call.seqlen_k or call.seqlen or 1
    yield Finding(
        "idle SMs",
        f"{row.name}: all blocks run at once, and with a causal mask the longest has {1 / share:.3g} x the work of the "
        f"mean, so {device.unit_name}s wait for it; shorter query tiles, or keys split over blocks, even them out",
        f"{call.seqlen} x {keys} / {(call.seqlen or 1) * keys * share:,.0f} visible pairs of a head = {1 / share:.3g}",
        row.series,
        1 / share,
        is_cause=True,
    )


def _inside_loop(document: Document, row: Row, idle: float) -> str:
    """Returns the factor that remains against a peer beyond idle SMs, and the time of a tile."""
    time, words = time_us(row), ""
    peers = [r for r in document.rows if r.series != row.series and r.call == row.call and time_us(r)]
    if time and peers:
        best = min(peers, key=lambda r: time_us(r) or math.inf)
        against = time / (time_us(best) or math.inf)
        if against > idle:
            words = f". It takes {against:.3g} x as long as {best.series}, "
            words += f"so the other {against / idle:.2g} x is inside the block"
    steps = steps_of_block(row)
    if time and steps and row.kernel.block_m and row.kernel.block_n:
        tile = f"{row.kernel.block_m} x {row.kernel.block_n} x {row.call.head_dim}"
        words += f"; a {tile} tile takes {us(time / steps)}"
    return words


def plateau(document: Document) -> Iterator[Finding]:
    """Finds times that stay flat while blocks grow and rise at the number of SMs: the grid was under-filled."""
    device = document.device
    if device.num_sms is None:
        return
    for (table, series), rows in own_groups(document):
        known = [(count, time_us(row) or 0.0, row) for row in rows if (count := blocks(row)) and time_us(row)]
        # Every block must do the same work, so that only the number of blocks changes.
        if len(known) < 3 or {"seqlen", "seqlen_k", "head_dim"} & set(varying(rows)):
            continue
        known.sort(key=lambda entry: entry[0])
        below = [entry for entry in known if entry[0] <= device.num_sms[1]]
        above = [entry for entry in known if entry[0] > device.num_sms[1]]
        if len(below) < 2 or below[-1][0] < 2 * below[0][0]:
            continue
        (first, first_us, _), (last, last_us, _) = below[0], below[-1]
        figures = ", ".join(f"{count} blocks {us(time)}" for count, time, _ in known)
        if (beyond := flat_beyond(rows, device)) is not None:
            share = beyond / device.num_sms[0]
            yield Finding(
                "latency",
                f"{table}: {series} is flat from {first} to {beyond} blocks, {share:.2g} per {device.unit_name}: one "
                f"block leaves its {device.unit_name} waiting, so the loop is latency-bound and idle "
                f"{device.unit_name}s are not the cause",
                f"{figures}; {beyond} / {device.num_sms[0]} = {share:.3g}",
                series,
                share,
                is_cause=True,
            )
        elif last_us < FLAT * first_us and fixed_cost(device, rows) is None:
            step = f", then a step at {above[0][0]}" if above and above[0][1] > FLAT * last_us else ""
            yield Finding(
                "idle SMs",
                f"{table}: {series} is flat from {first} to {last} blocks{step}: more work costs nothing while "
                f"{device.unit_name}s are idle, so the grid is under-filled ({in_words(device)})",
                figures,
                series,
                device.num_sms[0] / first,
                is_cause=True,
            )
        elif last_us > 0.7 * last / first * first_us:
            yield Finding(
                "contradiction",
                f"{table}: {series} grows with its blocks below the number of SMs, as if they ran one after another: "
                f"they are launched one by one, or share one resource",
                figures,
                series,
            )


def waves(document: Document) -> Iterator[Finding]:
    """Finds a last wave that is partly empty, by comparing times; without times to compare, only if an SM certainly
    holds one block."""
    device = document.device
    if device.num_sms is None or device.num_sms[0] != device.num_sms[1]:
        return
    sms = device.num_sms[0]
    for (_, series), rows in own_groups(document):
        known = [(row, count) for row in rows if (count := blocks(row)) is not None and row.kernel.launch_heads != ""]
        partly = [(-(-count // sms) * sms / count, row, count) for row, count in known if count > sms]
        for share, row, count in sorted(partly, key=lambda entry: -entry[0]):
            turns = -(-count // sms)
            shown = _seen_waves(row, count, known, sms)
            if share < WASTEFUL or shown is False or (shown is None and most_resident(row.kernel, device) != 1):
                continue
            text = f"{row.name}: {count} blocks take {turns} waves of {sms}; the last one is partly empty"
            said = f"{turns} x {sms} / {count} = {share:.2f}"
            if isinstance(shown, str):
                text, said = f"{text}, and the times show it", f"{said}; {shown}"
            yield Finding("waves", text, said, series, share, is_cause=True)
            break


def _seen_waves(row: Row, count: int, known: Sequence[tuple[Row, int]], sms: int) -> str | bool | None:
    """Returns the figures if the time of a row steps up with its waves, False if it does not, None if no row tells."""
    best: tuple[float, int, Row] | None = None  # how far the two readings are apart, blocks and row of the other time
    turns, smooth = -(-count // sms), max(1.0, count / sms)
    for other, fewer in known:
        if not time_us(other) or other.call.head_dim != row.call.head_dim or other.kernel != row.kernel:
            continue
        expected = turns / -(-fewer // sms)
        apart = round(expected / (smooth / max(1.0, fewer / sms)), 3)
        if expected > 1 and apart >= 1.2 and (best is None or (apart, fewer) > best[:2]):
            best = (apart, fewer, other)
    if best is None or not time_us(row):
        return None
    apart, fewer, other = best
    steps = (steps_of_block(row) or 1) / (steps_of_block(other) or 1)
    ratio, expected = (time_us(row) or 0) / (time_us(other) or 1) / steps, turns / -(-fewer // sms)
    if ratio < expected / math.sqrt(apart):  # nearer to the ratio of the blocks than to that of the waves
        return False
    each = f", for {steps:.3g} x the steps" if steps != 1 else ""
    return (
        f"{us(time_us(row) or 0)} at {count} blocks / {us(time_us(other) or 0)} at {fewer}{each} = {ratio:.2f} x "
        f"for {count / fewer:.3g} x the blocks"
    )


def threads(document: Document) -> Iterator[Finding]:
    """Finds threads of a block that have nothing to compute."""
    for series, kernel in {row.series: row.kernel for row in document.rows}.items():
        if kernel.threads and kernel.busy_threads and kernel.busy_threads < kernel.threads:
            idle, factor = kernel.threads - kernel.busy_threads, kernel.threads / kernel.busy_threads
            yield Finding(
                "idle threads",
                f"{series}: {idle} of {kernel.threads} threads idle while the others compute, a separate cause",
                f"{kernel.busy_threads} / {kernel.threads} = {1 / factor:.0%} busy",
                series,
                factor,
                is_cause=True,
            )
        elif kernel.threads and kernel.threads <= 64 and kernel.grid == "heads":
            yield Finding(
                "idle threads",
                f"{series}: {kernel.threads} threads per block are {-(-kernel.threads // 32)} warp"
                f"{'s' * (kernel.threads > 32)}, and an SM needs many warps to hide latency",
                f"{kernel.threads} / 32",
                series,
            )


def tile_sweep(document: Document) -> Iterator[Finding]:
    """Compares the tiles of one call: how much their grids explain, for each way the heads may have been launched."""
    device = document.device
    if device.num_sms is None:
        return
    for (_, series), rows in own_groups(document):
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
                f"{series}, {readings[reading]}: the slowest tile has {few:,} blocks against {many:,}, which "
                "explains at "
                f"most {max(idle, 1.0):.2g} x of the {times:.2g} x; {times / max(1.0, idle):.2g} x remain"
                if idle > 1.05
                else f"{series}, {readings[reading]}: {few:,} and {many:,} blocks both fill {in_words(device)}; the "
                f"whole {times:.2g} x remains",
                f"({slow.label}) {us(slow.time_us or 0)} / ({fast.label}) {us(fast.time_us or 0)} = {times:.2f}; "
                f"{many:,} / {few:,} = {many / few:.2g}",
                series,
                idle,
                is_cause=idle > 1.05,
            )
        launched = document.parts.get("launches")
        if fast.kernel.launch_heads == "" and launched is not None and launched < LEAST_LAUNCH_US:
            yield batched(series, launched, fast.call.heads or 1)


def batched(series: str, launch_us: float, heads: int) -> Finding:
    """Returns what a launch cost per head below that of any launch shows."""
    return Finding(
        "figure explained",
        f"{series}: {launch_us:g} us to launch a head is less than any launch takes, so heads were batched",
        f"{launch_us:g} us x {heads} heads = {launch_us * heads:.2g} us, against some {LEAST_LAUNCH_US:g} us at the "
        "least for each launch",
        series,
    )
