"""Times from records of `warpwave bench`: the time of a call, and the losses of a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from warpwave import dispatch
from warpwave.errors import InvalidInput
from warpwave.gpu import Gpu
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.records import Measurement, RecordError, read_records
from warpwave.workbench.hardware.catalog import data_sheet
from warpwave.workbench.model.losses import Losses, split
from warpwave.workbench.model.predict import predict
from warpwave.workbench.model.roofline import data_sheet_rates, roofline


@dataclass(frozen=True)
class RecordedTime:
    """One measurement of ours, as far as `explain` needs it.

    Attributes:
        time_us: median.
        kernel, config: what ran.
        hot: whether the inputs could lie in L2.
        clock_mhz: SM clock read after it ran; None if it was not read.
    """

    time_us: float
    kernel: str
    config: Any
    hot: bool
    clock_mhz: float | None


def find(path: Path, problem: AttentionProblem, gpu: Gpu, kernel: str = "auto") -> RecordedTime:
    """Returns the last measurement of a call on a card.

    Raises:
        InvalidInput: the file is no record, or holds no time of ours of this call on this card; the message says which
            calls or cards it has.
    """
    try:
        records = read_records(path)
    except RecordError as error:
        raise InvalidInput(str(error)) from None
    wanted = _shape(problem)
    ours = [(e, m) for e, m in records.measurements if m.is_ours and m.timing is not None and m.kernel and m.config]
    alike = [
        (_card(records.environments[environment]), m)
        for environment, m in ours
        if _shape(m.problem) == wanted and kernel in ("auto", m.kernel)
    ]
    here = [m for card, m in alike if card in ("", gpu.name)]
    if alike and not here:
        cards = ", ".join(dict.fromkeys(card for card, _ in alike))
        raise InvalidInput(f"{path} has this call on {cards} and not on {gpu.name}; name the card of the record")
    if not here:
        cases = list(dict.fromkeys(m.case for _, m in ours))
        more = f", and {len(cases) - 5} more" if len(cases) > 5 else ""
        raise InvalidInput(f"{path} has no time of ours of this call; it has {', '.join(cases[:5]) or 'none'}{more}")
    found = here[-1]
    assert found.timing is not None and found.config is not None
    module = next((k for k in dispatch.KERNELS if found.kernel == k.NAME), None)
    if module is None:
        raise InvalidInput(f"{path}: {found.kernel} is not a kernel of this version")
    try:
        config = config_of(module, found.config)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{path}: {found.case}: not a config of {found.kernel}: {error}") from None
    return RecordedTime(found.timing.median_us, found.kernel, config, is_hot(found), clock_mhz(found))


def losses_of(m: Measurement, gpu: Gpu) -> Losses | None:
    """Splits a measurement of ours into losses; returns None if it has no device time, its card has no data sheet, or
    its kernel or config belongs to another version."""
    if m.timing is None or not m.is_ours or m.config is None or gpu.is_cpu or m.mode == "eager":
        return None
    kernel = next((k for k in dispatch.KERNELS if m.kernel == k.NAME), None)
    sheet = data_sheet(gpu)
    if kernel is None or sheet is None:
        return None
    hot = is_hot(m)
    try:
        prediction = predict(m.problem, kernel, config_of(kernel, m.config), gpu, hot=hot, graph=in_graph(m))
        if prediction is None:
            return None
        bounds = roofline(m.problem, data_sheet_rates(sheet), gpu=gpu, hot=hot)
        return split(m.timing.median_us, prediction, sheet, bounds, clock_mhz=clock_mhz(m))
    except (InvalidInput, TypeError, ValueError):  # a config that this version lacks, or a time below the bound
        return None


def config_of(kernel: Any, recorded: Mapping[str, Any]) -> Any:
    """Returns the config of a record. Fields that the kernel no longer has are dropped; new ones have their defaults.

    Raises:
        TypeError, ValueError: the kernel has no such config.
    """
    known = {field.name for field in fields(kernel.Config)}
    values = {key: value for key, value in recorded.items() if key in known}
    # A config of gradients has a tile for each launch.
    return kernel.Config(**{k: kernel.Tile(**v) if isinstance(v, Mapping) else v for k, v in values.items()})


def in_graph(m: Measurement) -> bool:
    """Returns whether a CUDA graph replayed the calls, so that their times exclude the host."""
    return m.timing is not None and m.timing.method in ("graph", "streams")


def is_hot(m: Measurement) -> bool:
    """Returns whether a measurement's inputs could stay in L2 from one call to the next."""
    return m.timing is not None and not m.timing.l2_flushed and m.timing.input_sets == 1


def clock_mhz(m: Measurement) -> float | None:
    """Returns the SM clock read right after the case's rounds."""
    clock = (m.gpu_after or {}).get("sm_mhz")
    return None if clock is None else float(clock)


def _card(environment: dict[str, Any]) -> str:
    return str((environment.get("gpu") or {}).get("name") or "")


def _shape(problem: AttentionProblem) -> AttentionProblem:
    """Returns the problem without outputs that the time does not depend on, so that equal work compares equal."""
    return replace(problem, return_lse=False, softmax_scale=1.0)
