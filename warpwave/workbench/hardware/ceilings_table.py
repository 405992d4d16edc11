"""The command `roof`: measures this machine's ceilings, stores them, and shows them beside the data sheet."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from warpwave.errors import InvalidInput
from warpwave.gpu import CPU, current_gpu
from warpwave.workbench.hardware import measure
from warpwave.workbench.hardware.catalog import DataSheet, data_sheet
from warpwave.workbench.hardware.measure import Ceilings
from warpwave.workbench.input_files import Unreadable
from warpwave.workbench.output_files import Kind, check_output, write_output
from warpwave.workbench.terminal import columns, say


def run(device: str | None, out: Path | None, as_json: bool) -> int:
    """Measures and prints; progress goes to standard error. Returns the exit code.

    Raises:
        InvalidInput: the device does not exist, a file cannot be written, or too little memory is free.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise InvalidInput(f"{device!r} is not a device; use cpu or cuda")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InvalidInput(f"torch sees no GPU {index or 0} here; use --device cpu")
    if out is not None:
        check_output(out, CEILINGS)
    try:
        ceilings = measure.measure(device, say=_say)
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info(device)
        raise InvalidInput(
            f"{free >> 20} of the GPU's {total >> 20} MiB are free, too little to measure with; end what holds the rest"
        ) from None
    if out is not None:
        write_output(out, measure.text(ceilings), CEILINGS)
    try:
        kept = f"kept in {measure.store(ceilings)}"
    except OSError as error:
        kept = f"not stored, because the cache cannot be written: {error}"
    gpu = current_gpu(torch.device(device)) if kind == "cuda" else CPU
    say(json.dumps(asdict(ceilings), indent=2) if as_json else table(ceilings, data_sheet(gpu)))
    say(kept, to=sys.stderr if as_json else sys.stdout)
    return 0


def _is_ours(path: Path) -> bool:
    """Returns whether a file holds ceilings, so that it may be replaced."""
    try:
        measure.read(path)
    except Unreadable:
        return False
    return True


CEILINGS = Kind("file of `warpwave roof`", _is_ours)


def _say(line: str) -> None:
    say(f"measuring {line} ...", to=sys.stderr)


def table(ceilings: Ceilings, sheet: DataSheet | None) -> str:
    """Returns the measured figures, the data sheet's, and their ratio. If a measured rate is above the data sheet's,
    the latter is not a ceiling of this card, and no ratio is shown."""
    lines = [f"{ceilings.gpu} ({ceilings.arch}), {ceilings.date}"]
    if sheet is None and ceilings.arch != "cpu":
        lines.append("the catalog has no data sheet of this card")
    rows = [("", "measured", "data sheet", "share")]
    for name, value, stated, unit in _rows(ceilings, sheet):
        if value is None:
            continue
        said = "" if stated is None else f"{_figure(stated)} {unit}"
        share = "" if stated is None else f"{value / stated:.0%}" if value <= stated else "beyond"
        rows.append((name, f"{_figure(value)} {unit}", said, share))
    lines += ["", *columns(rows, right=(1, 2, 3))]
    readings = ceilings.environment.get("snapshots", {})
    seen = [(when, reading) for when, reading in readings.items() if reading]
    if seen:
        cells = [("", "SM clock", "power", "temperature", "held back by")]
        for when, reading in sorted(seen, key=lambda item: ("before", "sustained", "after").index(item[0])):
            units = (("sm_mhz", "MHz"), ("power_w", "W"), ("temperature_c", "C"))
            figures = (_reading(reading.get(key), unit) for key, unit in units)
            cells.append((when, *figures, ", ".join(reading.get("throttle") or []) or "-"))
        lines += ["", *columns(cells, right=(1, 2, 3))]
    return "\n".join(lines)


def _rows(ceilings: Ceilings, sheet: DataSheet | None) -> Iterator[tuple[str, float | None, float | None, str]]:
    sizes = ceilings.environment.get("product_sizes", {})
    peaks = {} if sheet is None else sheet.peak_tflops
    for path, rate in ceilings.product_tflops.items():
        size = f", {sizes[path]}^3" if path in sizes else ""
        yield f"product {path}{size}", rate, peaks.get(path), "TFLOP/s"
    for path, rate in ceilings.sustained_tflops.items():
        yield f"  sustained {path}", rate, peaks.get(path), "TFLOP/s"
    bandwidth = None if sheet is None else sheet.bandwidth_gbps
    yield "read", ceilings.read_gbps, bandwidth, "GB/s"
    yield "copy (read + written)", ceilings.copy_gbps, bandwidth, "GB/s"
    yield "L2 read", ceilings.l2_gbps, None if sheet is None else sheet.l2_gbps, "GB/s"
    yield "exponentials", ceilings.exponentials_gops, None if sheet is None else sheet.exponentials_gops, "Gexp/s"
    empty = "an empty call" if ceilings.arch == "cpu" else "empty kernel, in a graph"
    yield empty, ceilings.launch_us, None, "us"
    yield "launching it, host", ceilings.host_call_us, None, "us"


def _figure(value: float) -> str:
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 2 if value >= 0.1 else 4}f}"


def _reading(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.0f} {unit}"
