"""Reading records for a report. What no measurement can have made is refused here, so that no page is made of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from warpwave.bench.records import Measurement, RecordError, Records, read_records
from warpwave.report import shipped
from warpwave.report.machines import Source

CARD_FIGURES = ("sm_count", "memory_bytes", "l2_bytes", "power_limit_w")
SIZES = ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v", "total_q", "total_k")
READINGS = ("sm_mhz", "memory_mhz", "power_w", "temperature_c")


def given(paths: Sequence[Path]) -> list[Source]:
    """The records of some files, in their order; a file named twice is read once.

    Raises:
        RecordError: a file cannot be read, or a line of it is not a record of something measured.
    """
    return [Source(checked(path), "given", (path.name,)) for path in dict.fromkeys(paths)]


def shipped_source() -> Source:
    """The records that come with the package."""
    return Source(shipped.records(), "shipped", tuple(path.name for path in shipped.paths()))


def checked(path: Path) -> Records:
    """The records of a file.

    Raises:
        RecordError: as `given`.
    """
    records = read_records(path)
    for environment in records.environments.values():
        for fault in _faults_of_environment(environment):
            raise RecordError(f"{path}: {fault}")
    for _, m in records.measurements:
        for fault in _faults_of_measurement(m):
            raise RecordError(f"{path}: {m.contender} on {m.case}: {fault}")
    return records


def _faults_of_environment(environment: Any) -> Iterator[str]:
    if not isinstance(environment, Mapping):
        yield f"an environment must be a JSON object, got {environment!r:.40}"
        return
    for part in ("gpu", "cpu", "code", "peers"):
        if not isinstance(environment.get(part) or {}, Mapping):
            yield f"the environment's {part} must be a JSON object, got {environment[part]!r:.40}"
            return
    card = environment.get("gpu") or {}
    yield from (f"the GPU's {key} is {card[key]!r:.40}" for key in CARD_FIGURES if not _is_figure(card.get(key)))


def _faults_of_measurement(m: Measurement) -> Iterator[str]:
    texts: dict[str, Any] = {
        "suite": m.suite,
        "case": m.case,
        "contender": m.contender,
        "kernel": m.kernel,
        "mode": m.mode,
    }
    yield from (f"{name} is {text!r:.40}, and no text" for name, text in texts.items() if not isinstance(text, str))
    for name, samples in (("timing", m.timing), ("host", m.host)):
        if samples is not None and not samples.samples_us:
            yield f"{name} has no samples"
        elif samples is not None and not all(math.isfinite(us) and us > 0 for us in samples.samples_us):
            yield f"{name} has a sample that is no time: {samples.samples_us}"
    if m.verdict is not None:
        errors = (m.verdict.rms_error, m.verdict.max_error, m.verdict.model_rms_error, m.verdict.model_max_error)
        yield from (f"the verdict's error is {error!r:.40}" for error in errors if not _is_figure(error))
    if not _is_figure(m.peak_memory_bytes):
        yield f"peak_memory_bytes is {m.peak_memory_bytes!r:.40}"
    readings: tuple[Any, ...] = (m.gpu_before, m.gpu_after)
    for reading in readings:
        if not isinstance(reading or {}, Mapping):
            yield f"the card's reading is {reading!r:.40}"
        else:
            yield from (
                f"{key} is {reading[key]!r:.40}" for key in READINGS if reading and not _is_figure(reading.get(key))
            )
    sizes: dict[str, Any] = {name: getattr(m.problem, name) for name in SIZES}
    if wrong := [f"{name} {size!r:.40}" for name, size in sizes.items() if not isinstance(size, int) or size < 0]:
        yield f"its problem has {', '.join(wrong)}"
        return
    try:
        _ = m.problem.flops, m.problem.compulsory_bytes, m.problem.exponentials, m.problem.describe()
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        yield f"its problem makes no sense: {error!r}"


def _is_figure(value: Any) -> bool:
    """A number that means something, or nothing."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))
