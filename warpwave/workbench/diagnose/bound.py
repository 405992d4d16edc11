"""Rules about what bounds the time: a unit, a bandwidth, a fixed cost, a cache that is left, or latency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from warpwave.workbench.diagnose.busy import LEAST_LAUNCH_US, batched, in_words, own_groups
from warpwave.workbench.diagnose.facts import (
    AGREE,
    BINDS,
    MORE_THAN_ALL,
    OFFERS,
    Finding,
    all_kv_bytes,
    balance,
    blocks,
    busy_sms,
    busy_threads,
    kv_bytes_of_head,
    loaded_bytes,
    matrix_tflops,
    memory_bytes,
    peak_tflops,
    special_functions,
    tensor_bytes,
    time_us,
    work,
)
from warpwave.workbench.diagnose.fixed import fixed_cost
from warpwave.workbench.diagnose.parse import Device, Document, Row
from warpwave.workbench.model.roofline import byte, figure, flop, us

AT_RATE = 0.6  # share of the scalar units' rate from which products that are stated as "matrix" may run on them
CLIFF = 1.3  # a unit of work this much slower beyond a cache's size
SCHEDULERS = 4  # of an SM; each starts an instruction of one of its warps every clock
PROFILE = (
    "no unit is busy, the most used one below half of its rate. Spills, bank conflicts, too few warps, a serial loop "
    "or repeated loads can cause that; only a profile tells which"
)


@dataclass(frozen=True)
class _Use:
    """The shares of its bounds that a row uses.

    Attributes:
        row, time_us, work: the row, its time and its operations.
        peak_tflops: rate of its unit; None if unknown.
        busy, busy_threads: shares of the multiprocessors that compute, in the mean over the time, and of the threads.
        moved: bytes that cross the memory bus at least, with caches as good as they can be; None if unknown.
        arithmetic, bandwidth: shares of the busy units' rate and of the bandwidth; 0 if unknown.
        exponentials: share of the special function units' rate; 0 if unknown.
    """

    row: Row
    time_us: float
    work: float
    peak_tflops: float | None
    busy: float
    busy_threads: float
    moved: float | None
    arithmetic: float
    bandwidth: float
    exponentials: float


def _use(row: Row, device: Device) -> _Use:
    time, amount, peak = time_us(row), work(row), peak_tflops(row, device)
    assert time is not None and amount is not None
    busy, threads = busy_sms(row, device) * balance(row, device), busy_threads(row)
    of_exponentials, rate = special_functions(row.call), device.exponentials_gops
    exponentials = 0.0 if of_exponentials is None or rate is None else of_exponentials / (time * rate * 1e3) / busy
    moved, bandwidth = memory_bytes(row, device), 0.0
    if moved is not None and device.bandwidth_gbps is not None:
        most = MORE_THAN_ALL * time * device.bandwidth_gbps * 1e3
        # If the bandwidth does not allow for all of them, the caches kept more than the estimate.
        moved = moved if moved <= most else min(moved, tensor_bytes(row.call) or moved)
        bandwidth = moved / (time * device.bandwidth_gbps * 1e3)
    return _Use(
        row,
        time,
        amount,
        peak,
        busy,
        threads,
        moved,
        0.0 if peak is None else amount / (time * peak * 1e6) / busy / threads,
        bandwidth if bandwidth <= MORE_THAN_ALL else 0.0,  # the call's tensors stayed in L2
        exponentials if exponentials <= MORE_THAN_ALL else 0.0,  # some were computed by polynomials on other units
    )


def binding(document: Document) -> Iterator[Finding]:
    """Finds what bounds the row with most work: a fixed cost, a unit, the bandwidth, or latency if none is busy."""
    device = document.device
    for (_, series), rows in own_groups(document):
        known = [row for row in rows if time_us(row) and work(row)]
        if not known:
            continue
        fixed = fixed_cost(device, known)
        if fixed is not None:
            yield fixed
            continue
        # Of rows with the same work, the fastest; `busy.tile_sweep` compares it with the others.
        use = _use(max(known, key=lambda r: (work(r) or 0.0, -(time_us(r) or 0.0))), device)
        cliff = _cliff(document, series, known)
        if cliff is not None:
            yield cliff
        if use.arithmetic > MORE_THAN_ALL:
            if use.busy * use.busy_threads < 1:  # `agreement.peaks` reports a rate above that of the whole card
                yield Finding(
                    "contradiction",
                    f"{use.row.name}: more than the busy {device.unit_name}s and threads can do, so more blocks or "
                    "threads work than the table states",
                    _of_arithmetic(use),
                    series,
                )
            continue
        if (impossible := _more_than_memory(use, device)) is not None:
            yield impossible
            continue
        reread = _reread(document, use, has_cliff=cliff is not None)
        most = max(use.arithmetic, use.bandwidth, use.exponentials)
        explained = 1.0 if cliff is None else cliff.factor
        if reread is not None and reread[0] >= max(use.arithmetic, use.exponentials):
            yield reread[1]
        elif BINDS <= most <= MORE_THAN_ALL:
            if use.bandwidth == most:
                yield _memory(use, device)
            elif use.exponentials == most:
                yield _exponentials(use, device)
            elif (on_matrix_units := _if_on_matrix_units(use, device)) is not None:
                yield _latency(document, on_matrix_units, rows, explained)
            else:
                yield _bound(use, device)
        elif reread is not None:
            yield reread[1]
        elif use.peak_tflops is not None and 0 < use.arithmetic:
            yield _latency(document, use, rows, explained)


def _of_arithmetic(use: _Use) -> str:
    busy = use.busy * use.busy_threads
    share = f" / {busy:.3g} busy" if busy < 1 else ""
    return (
        f"{flop(use.work)} / {us(use.time_us)} / {figure(use.peak_tflops or 0)} TFLOP/s{share} = {use.arithmetic:.1%}"
    )


def _matrix_units_offer(use: _Use, device: Device) -> float:
    """Returns how many times as fast matrix units are as the scalar units of a row; 1 if that makes no difference."""
    row, offers = use.row, matrix_tflops(use.row.call.dtype, device)
    if row.kernel.unit != "scalar" or row.call.dtype == "float32" or not offers:
        return 1.0
    factor = offers / (use.peak_tflops or offers)
    return factor if factor > 1.5 else 1.0


def _if_on_matrix_units(use: _Use, device: Device) -> _Use | None:
    """Returns what the row uses if its products run on matrix units; None if a fact or the card excludes that."""
    row = use.row
    if not row.is_unit_assumed or _matrix_units_offer(use, device) == 1:
        return None
    return _use(replace(row, kernel=replace(row.kernel, unit="matrix")), device)


def _bound(use: _Use, device: Device) -> Finding:
    """Returns the unit that multiplies as the bound, and the faster unit of the card if there is one."""
    row, factor = use.row, _matrix_units_offer(use, device)
    text = f"{use.row.name}: the {row.kernel.unit} unit binds, at {use.arithmetic:.0%} of what the busy "
    text += f"{device.unit_name}s can do"
    if factor > 1:
        offers = factor * (use.peak_tflops or 0)
        text += f"; the matrix units offer {factor:.3g} x for {row.call.dtype}"
        said = f"{_of_arithmetic(use)}; {figure(offers)} / {figure(use.peak_tflops or 0)} = {factor:.3g}"
        return Finding("scalar unit", text, said, row.series, factor, is_cause=True)
    return Finding("arithmetic", text, _of_arithmetic(use), row.series, max(1.0, 1 / use.arithmetic), is_cause=True)


def _exponentials(use: _Use, device: Device) -> Finding:
    """Returns the special function units as the bound."""
    row, count = use.row, special_functions(use.row.call) or 0.0
    each = "an exponential and a tanh for each pair" if row.call.softcap else "one for each pair"
    busy = f" / {use.busy:.3g} busy" if use.busy < 1 else ""
    return Finding(
        "exponentials",
        f"{row.name}: exponentials bind, at {use.exponentials:.0%} of what the busy {device.unit_name}s can do; only "
        "polynomials on other units, or fewer pairs, lower them",
        f"{figure(count * 1e-9)} Gexp ({each}) / {us(use.time_us)} / {figure(device.exponentials_gops or 0)} Gexp/s"
        f"{busy} = {use.exponentials:.1%}",
        row.series,
        max(1.0, 1 / use.exponentials),
        is_cause=True,
    )


def _memory(use: _Use, device: Device) -> Finding:
    moved, least = use.moved or 0.0, tensor_bytes(use.row.call)
    again = moved / (least or moved)
    text = f"{use.row.name}: memory binds, at {use.bandwidth:.0%} of the bandwidth"
    text += f"; it moves {figure(again)} x the minimum" if again > 1.5 else ""
    rate = f"{figure(device.bandwidth_gbps or 0)} GB/s"
    said = f"{byte(moved)} / {us(use.time_us)} / {rate} = {use.bandwidth:.1%}"
    kind = "re-reads" if again > 1.5 and use.row.kernel.scores == "chip" else "memory"
    return Finding(kind, text, said, use.row.series, max(again, 1 / use.bandwidth), is_cause=True)


def _more_than_memory(use: _Use, device: Device) -> Finding | None:
    """Returns the finding for tensors that neither L2 nor the bandwidth can supply in the time; None if they can."""
    least, rate = tensor_bytes(use.row.call), device.bandwidth_gbps
    if least is None or rate is None or device.l2_bytes is None:
        return None
    beyond = least - device.l2_bytes
    if beyond <= MORE_THAN_ALL * use.time_us * rate * 1e3:
        return None
    return Finding(
        "contradiction",
        f"{use.row.name}: q, k, v and out need more than the bandwidth of the card even with L2 full of them: the "
        "time, a size, the dtype or the number of kv heads (heads_kv, by default heads) is wrong",
        f"({byte(least)} - {byte(device.l2_bytes)} of L2) / {us(use.time_us)} = {figure(beyond / use.time_us * 1e-3)} "
        f"GB/s > {figure(rate)} GB/s",
        use.row.series,
    )


def _reread(document: Document, use: _Use, has_cliff: bool) -> tuple[float, Finding] | None:
    """Returns the share of the bandwidth if every repeated load of K and V comes from memory, and this finding, if the
    bandwidth allows for it.

    Blocks of one head stream through the same K and V. If the K and V of the heads that run at once exceed L2, it keeps
    none of them for the next block.
    """
    row, device = use.row, document.device
    asked, least = loaded_bytes(row), tensor_bytes(row.call)
    all_kv, one_kv = all_kv_bytes(row.call), kv_bytes_of_head(row.call)
    if not (asked and least and all_kv and one_kv and device.l2_bytes and device.bandwidth_gbps and device.num_sms):
        return None
    count = blocks(row)
    at_once = min(1.0, device.num_sms[0] / count) if count else 1.0
    in_flight = all_kv if has_cliff else max(one_kv, all_kv * at_once)
    rate = asked / use.time_us * 1e-3
    share, have = rate / device.bandwidth_gbps, figure(device.bandwidth_gbps)
    if in_flight <= device.l2_bytes or asked < 2 * least or not BINDS <= share <= MORE_THAN_ALL:
        return None
    found = Finding(
        "re-reads",
        f"{use.row.name}: K and V are read from memory again for every query tile: {byte(in_flight)} in use at once do "
        f"not stay in L2 ({byte(device.l2_bytes)}), and these loads are {share:.0%} of the bandwidth; taller query "
        "tiles divide them",
        f"{byte(asked)} / {us(use.time_us)} = {figure(rate)} GB/s; {figure(rate)} GB/s / {have} GB/s = "
        f"{share:.1%}; {byte(asked)} / {byte(least)} = {figure(asked / least)} x the minimum",
        row.series,
        asked / least,
        is_cause=True,
    )
    return share, found


def _cliff(document: Document, series: str, rows: Sequence[Row]) -> Finding | None:
    """Returns where a unit of work becomes slower once K and V of all heads exceed L2; None if it does not."""
    capacity = document.device.l2_bytes
    sized = [(size, (time_us(r) or 0.0) / (work(r) or 1.0), r) for r in rows if (size := all_kv_bytes(r.call))]
    if capacity is None or any(r.kernel.scores == "memory" for r in rows):
        return None
    inside = max((entry for entry in sized if entry[0] <= capacity), key=lambda e: e[0], default=None)
    outside = [entry for entry in sized if entry[0] > capacity]
    if inside is None or not outside or inside[2].call == outside[0][2].call:
        return None
    # Beyond the edge every row must be slower; otherwise the slow one has another cause.
    slower = [entry[1] / inside[1] for entry in outside]
    if max(slower) < CLIFF or min(slower) < 1.1:
        return None
    first, last = min(outside, key=lambda e: e[0]), outside[slower.index(max(slower))]
    return Finding(
        "cache",
        f"{series}: a unit of work takes {max(slower):.3g} x as long from {first[2].label} on, where K and V leave L2: "
        f"{byte(first[0])} against {byte(capacity)}; before, at {inside[2].label}, they are {byte(inside[0])}",
        f"{inside[2].label}: {us(time_us(inside[2]) or 0)} / {flop(work(inside[2]) or 0)}; {last[2].label}: "
        f"{us(time_us(last[2]) or 0)} / {flop(work(last[2]) or 0)}; ratio {max(slower):.3g}",
        series,
        max(slower),
        is_cause=True,
    )


def _latency(document: Document, use: _Use, rows: Sequence[Row], explained: float) -> Finding:
    """Returns the finding for a row of which no unit is half used: on the scalar units, with few warps, or unknown."""
    row, device = use.row, document.device
    rest = max(1 / max(use.arithmetic, use.bandwidth, use.exponentials) / explained, 1.0)
    said = f"{_of_arithmetic(use)} of the busy {row.kernel.unit} units"
    if use.moved is not None and device.bandwidth_gbps is not None:
        rate = figure(use.moved / use.time_us * 1e-3)
        said += f"; {byte(use.moved)} / {us(use.time_us)} = {rate} GB/s"
        have = f"{figure(device.bandwidth_gbps)} GB/s"
        said += f"; {rate} GB/s / {have} = {use.bandwidth:.2%}" if use.bandwidth else f" > {have}, so L2 holds a part"
    if use.exponentials > max(use.arithmetic, use.bandwidth):
        said += f"; {use.exponentials:.1%} of the rate of exponentials"
    at_rate = BINDS if row.is_unit_assumed else AT_RATE
    if row.kernel.unit == "matrix" and at_rate <= (share := _of_scalar(use, device)) <= MORE_THAN_ALL:
        scalar = device.tflops["scalar"]
        ratio = (use.peak_tflops or 0) / scalar
        said += f"; {share:.0%} of the rate of the scalar units"
        on_matrix_units = _on_matrix_units(document, use, rows, share)
        said += f"; {on_matrix_units}" if on_matrix_units else ""
        if ratio >= OFFERS and not on_matrix_units:
            state = ", and --code unit=matrix or unit=scalar states it here" if row.is_unit_assumed else ""
            return Finding(
                "scalar unit",
                f"{use.row.name}: {share:.0%} of the scalar units' rate and {use.arithmetic:.1%} of the matrix "
                f"units': check that the products run on matrix units, which offer {ratio:.3g} x. A slow kernel on "
                f"matrix units may have this rate too ({rest:.3g} x by latency), and these rows do not tell the two "
                f"apart; the machine code does, by HMMA, HGMMA or MFMA instructions{state}",
                f"{said}; {figure(use.peak_tflops or 0)} / {figure(scalar)} = {ratio:.3g}",
                row.series,
                ratio,
                is_cause=True,
            )
    if (warps := _few_warps(row, rows, device)) is not None:
        text = f"{use.row.name}: {warps[0]}; {rest:.3g} x remain"
        return Finding("few warps", text, f"{warps[1]}; {said}", row.series, rest, is_cause=True)
    without = f" without idle {device.unit_name}s and threads" if use.busy * use.busy_threads < 1 else ""
    text = f"{use.row.name}: latency-bound by {rest:.3g} x{without}: {PROFILE}"
    if use.moved is not None and device.bandwidth_gbps is not None and not use.bandwidth:
        text += ". The loads exceed the bandwidth of memory, so the bandwidth of L2 may bind"
    if (offers := _matrix_units_offer(use, device)) > 1:
        text += f". The products are taken to run on the scalar units; the matrix units offer {offers:.3g} x more"
        said += f"; {figure(offers * (use.peak_tflops or 0))} / {figure(use.peak_tflops or 0)} = {offers:.3g}"
    return Finding("latency", text, said, row.series, rest, is_cause=True)


def _of_scalar(use: _Use, device: Device) -> float:
    """Returns the share of the scalar units' rate that the busy multiprocessors reach; 0 if the rate is unknown."""
    scalar = device.tflops.get("scalar")
    return use.work / (use.time_us * scalar * 1e6) / use.busy / use.busy_threads if scalar else 0.0


def _on_matrix_units(document: Document, use: _Use, rows: Sequence[Row], share: float) -> str:
    """Returns why a rate that the scalar units can reach is one of the matrix units; "" if the rows do not show it."""
    row, device = use.row, document.device
    for other in document.rows:
        alike = (other.series, other.call.dtype) == (row.series, row.call.dtype)
        if alike and time_us(other) and work(other) and (of := _of_scalar(_use(other, device), device)) > MORE_THAN_ALL:
            return f"matrix units: {other.label} is at {of:.0%} of that rate"
    warps = _most_warps(row, device)
    if warps is not None and warps < SCHEDULERS and share > MORE_THAN_ALL * warps / SCHEDULERS:
        return f"matrix units: warps of an SM ({warps}) keep {warps / SCHEDULERS:.0%} of the scalar units busy at most"
    for other in rows:
        width, wide = other.call.head_dim, row.call.head_dim
        if width and wide and width < wide and replace(other.call, head_dim=wide) == row.call and time_us(other):
            grown, least = use.time_us / (time_us(other) or 1.0), (wide / width) ** 0.5
            if grown < least:
                return f"no unit's rate: head_dim {width} to {wide} takes {grown:.3g} x the time, below {least:.3g} x"
    return ""


def _few_warps(row: Row, rows: Sequence[Row], device: Device) -> tuple[str, str] | None:
    """Returns a sentence and its figures if schedulers have no warp, or a block has one warp."""
    threads, wave = row.kernel.threads, _lanes(device)
    if threads is None or any(
        (other.kernel.threads or 0) >= 2 * threads and other.call == row.call
        and (time_us(other) or 0) >= 0.95 * (time_us(row) or 0) for other in rows
    ):  # fmt: skip
        return None  # unknown, or the table itself shows that more threads change nothing
    warps, count, most = -(-threads // wave), blocks(row), _most_warps(row, device)
    if warps > 1 and (most is None or most >= SCHEDULERS):
        return None
    one = f"a block of {threads} threads is {warps} warp{'s' * (warps > 1)}"
    figures = f"{threads} / {wave} = {warps}"
    if most is not None and most < SCHEDULERS:
        one += f", and each {device.unit_name} has at most {most} for its {SCHEDULERS} schedulers"
        figures += f"; {count} blocks on {in_words(device)}"
    return f"{one}: nothing runs while a warp waits for memory or for its own last instruction", figures


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


def launch_parts(document: Document) -> Iterator[Finding]:
    """Compares parts of a row's time with the whole, and parts named launch with each other: a launch costs the same
    for every tile."""
    launched: list[tuple[float, Row]] = []
    for row in document.rows:
        if not row.parts or row.time_us is None:
            continue
        total = sum(row.parts.values())
        sums = " + ".join(f"{name} {value:g}" for name, value in row.parts.items())
        if abs(total / row.time_us - 1) > AGREE:
            yield Finding(
                "contradiction",
                f"{row.name}: its parts add up to {total:.3g} us, and it took {row.time_us:.3g} us",
                f"{sums} = {total:.3g}",
                row.series,
            )
        launched += [(value, row) for name, value in row.parts.items() if "launch" in name.lower()]
    if len(launched) < 2:
        return
    (low, quick), (high, slow) = min(launched, key=lambda p: p[0]), max(launched, key=lambda p: p[0])
    if high > 2 * low and quick.call == slow.call:
        yield Finding(
            "contradiction",
            f"{slow.series}: launching is given as {high:g} us for {slow.label} and as {low:g} us for {quick.label}, "
            "but a launch costs the same for every tile: what differs is not launching",
            f"{high:g} / {low:g} = {high / low:.3g}",
            slow.series,
        )
    if quick.per_head and low < LEAST_LAUNCH_US and quick.call.heads and quick.call.heads > 1:
        yield batched(quick.series, low, quick.call.heads)


def _most_warps(row: Row, device: Device) -> int | None:
    """Returns the most warps that a multiprocessor has; None if threads, blocks or multiprocessors are unknown."""
    threads, count = row.kernel.threads, blocks(row)
    if threads is None or count is None or device.num_sms is None:
        return None
    return -(-threads // _lanes(device)) * -(-count // device.num_sms[0])


def _lanes(device: Device) -> int:
    return 64 if device.unit_name == "CU" else 32  # of a CDNA wave; RDNA's have 32
