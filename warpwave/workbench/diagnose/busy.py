"""Rules about idle resources: blocks against multiprocessors, threads, units, and fixed costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from warpwave.workbench.diagnose.facts import (
    BINDS,
    Finding,
    blocks,
    flops,
    groups,
    memory_bytes,
    peak_tflops,
    rounds,
    steps_of_block,
    tensor_bytes,
    time_us,
    varying,
)
from warpwave.workbench.diagnose.parse import Device, Document, Row
from warpwave.workbench.model.fitting import line
from warpwave.workbench.model.roofline import byte, figure, flop, us

FLAT = 1.08  # times within this factor count as equal
MOST_LAUNCH_US = 40.0  # the longest time that can be a launch
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
            row, count = max(idle, key=lambda pair: (flops(pair[0].call) or 0.0, -pair[1]))
            yield _idle(document, series, row, count, low, is_cause=True)
            emptiest, fewest = min(idle, key=lambda pair: pair[1])
            if fewest < count:
                yield _idle(document, series, emptiest, fewest, low, is_cause=False)
        full = [(row, count) for row, count in counted if count >= device.num_sms[1]]
        for row, count in full[:1]:
            yield Finding(
                "grid fills",
                f"{series}, {row.label}: {count:,} blocks fill {in_words(device)}, so idle {device.unit_name}s are not "
                "the cause",
                f"{count:,} >= {device.num_sms[1]}",
                series,
            )
        for row, count in full:
            turns = rounds(count, device) or 1
            share = turns * low / count
            if share > 1.3:
                yield Finding(
                    "waves",
                    f"{series}, {row.label}: {count} blocks take {turns} waves of {low}; the last one is partly empty",
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
        f"{series}, {row.label}: {count} block{'s' * (count > 1)} on {in_words(device)}, so {nothing} are idle: "
        f"{factor:.3g} x{_inside_loop(document, row, factor)}",
        f"{low} / {count} = {factor:.3g}",
        series,
        factor,
        is_cause,
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
        if last_us < FLAT * first_us:
            step = f", then a step at {above[0][0]}" if above and above[0][1] > FLAT * last_us else ""
            yield Finding(
                "idle SMs",
                f"{table}: {series} is flat from {first} to {last} blocks{step}: more work costs nothing while SMs are "
                f"idle, so the grid is under-filled ({in_words(device)})",
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


def threads(document: Document) -> Iterator[Finding]:
    """Finds threads of a block that have nothing to compute."""
    for series, kernel in document.kernels.items():
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


def binding(document: Document) -> Iterator[Finding]:
    """Finds the resource that binds the row with most work; if none is busy, the loop is latency-bound."""
    device = document.device
    for (_, series), rows in own_groups(document):
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
            continue  # `constant` reports it
        if max(arithmetic, bandwidth) >= BINDS:
            name, share = max((("arithmetic", arithmetic), ("memory", bandwidth)), key=lambda pair: pair[1])
            if name == "memory":
                again = moved / (tensor_bytes(row.call) or moved) if moved else 1.0
                said = f"{byte(moved or 0)} in {us(time)} / {figure(device.bandwidth_gbps or 0)} GB/s = {share:.0%}"
                text = f"{series}, {row.label}: memory binds, at {share:.0%} of the bandwidth"
                text += f"; it moves {again:.3g} x the minimum" if again > 1.5 else ""
                yield Finding("memory", text, said, series, max(again, 1.01 + share), is_cause=True)
            else:
                said = f"{flop(work)} / {us(time)} / {figure(peak or 0)} TFLOP/s / {busy:.2g} busy = {share:.0%}"
                text = f"{series}, {row.label}: the {row.kernel.unit} unit binds, "
                text += f"at {share:.0%} of what the busy SMs can do"
                yield Finding("arithmetic", text, said, series, 1.01 + share, is_cause=True)
        elif peak is not None and max(arithmetic, bandwidth) > 0:
            rest = 1 / max(arithmetic, bandwidth)
            yield Finding(
                "latency",
                f"{series}, {row.label}: no unit is busy, so the loop is latency-bound: {rest:.3g} x remain "
                f"without idle {device.unit_name}s and threads",
                f"{flop(work)} / {us(time)} = {figure(work / time * 1e-6)} TFLOP/s, {arithmetic:.2g} of the busy "
                f"{row.kernel.unit} units; {figure((moved or 0) / time * 1e-3)} GB/s, {bandwidth:.2g} of the bandwidth",
                series,
                rest,
                is_cause=True,
            )


def _fixed_us(rows: Sequence[Row]) -> float | None:
    """Returns the fixed part of the times, from a straight-line fit of time over work; None if unknown."""
    known = sorted((flops(r.call) or 0.0, time_us(r) or 0.0) for r in rows if flops(r.call) and time_us(r))
    if len(known) < 3 or known[-1][0] < 4 * known[0][0]:
        return None
    # Least squares on relative errors, so that the largest row does not dominate.
    return line([work for work, _ in known], [time for _, time in known])[0]


def constant(document: Document) -> Iterator[Finding]:
    """Finds a time that hardly changes with the work although the SMs are filled."""
    for (table, series), rows in own_groups(document):
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
            continue  # every block does the same work, which `plateau` handles
        least = min(known, key=lambda r: flops(r.call) or 0.0)
        more = (flops(row.call) or 0) / (flops(least.call) or 1)
        yield Finding(
            "launch",
            f"{table}: {series} hardly changes with the work: {us(fixed)} of {us(time)} do not depend on it",
            f"{more:.3g} x the work in {time / (time_us(least) or 1):.3g} x the time; a straight-line fit gives "
            f"{us(fixed)} at zero work",
            series,
            time / max(time - fixed, 0.02 * time),
            is_cause=True,
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
            every = launched * (fast.call.heads or 1)
            yield Finding(
                "figure explained",
                f"{series}: {launched:g} us to launch a head is less than any launch takes, so heads were batched",
                f"{launched:g} x {fast.call.heads} heads = {every:.2g} us, against some {LEAST_LAUNCH_US:g} us at the "
                "least for each launch",
                series,
            )


def launches(document: Document) -> Iterator[Finding]:
    """Finds cheaper launches that change nothing, which rules out launch cost."""
    for (_, series), rows in own_groups(document):
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
                    f"{series}: launching is not the cause: {saved.launch_saving} take {plain.label} from "
                    f"{plain.time_us:g} to {saved.time_us:g} us",
                    figures,
                    series,
                )
            else:
                text = f"{series}: launching is {spared / plain.time_us:.0%} of it: "
                text += f"{saved.launch_saving} spare {us(spared)}"
                yield Finding("launch", text, figures, series, gain, is_cause=True)
