"""What no measurement can have made: figures of a record file that are no figures, found when it is read, so that
nothing is told of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from warpwave.problem import PRECISIONS

if TYPE_CHECKING:
    from warpwave.bench.records import Measurement

CARD_FIGURES = ("sm_count", "memory_bytes", "l2_bytes", "power_limit_w")
SIZES = ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v", "total_q", "total_k")
SWITCHES = ("has_sinks", "packed", "return_lse", "requires_grad", "batch_invariant")
READINGS = ("sm_mhz", "memory_mhz", "power_w", "temperature_c")


def faults_of_environment(environment: Any) -> Iterator[str]:
    """What is wrong with an environment, a sentence each."""
    if not isinstance(environment, Mapping):
        yield f"an environment must be a JSON object, got {environment!r:.40}"
        return
    for part in ("gpu", "cpu", "code", "peers"):
        if not isinstance(environment.get(part) or {}, Mapping):
            yield f"the environment's {part} must be a JSON object, got {environment[part]!r:.40}"
            return
    card = environment.get("gpu") or {}
    yield from (f"the GPU's {key} is {card[key]!r:.40}" for key in CARD_FIGURES if not _is_figure(card.get(key)))


def faults_of_measurement(m: Measurement) -> Iterator[str]:
    """What is wrong with a measurement, a sentence each."""
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
        if samples is not None:
            counts = (samples.repeats, samples.calls_per_repeat, samples.input_sets)
            if not isinstance(samples.method, str) or not all(isinstance(n, int) and n > 0 for n in counts):
                yield f"{name} is by {samples.method!r:.40}, of {', '.join(f'{n!r:.20}' for n in counts)}"
    if m.verdict is not None:
        errors = (m.verdict.rms_error, m.verdict.max_error, m.verdict.model_rms_error, m.verdict.model_max_error)
        yield from (f"the verdict's error is {error!r:.40}" for error in errors if not _is_figure(error))
    if m.config is not None and not (isinstance(m.config, Mapping) and all(map(_is_setting, m.config.values()))):
        yield f"config is {m.config!r:.200}"
    if m.goal is not None:
        goals = [figure for figure in (m.goal.ratio, m.goal.over_launch_us) if figure is not None]
        if not goals or not all(map(_is_figure, goals)):
            yield f"its goal is {goals!r:.40}"
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
            causes = (reading or {}).get("throttle") or []
            if not isinstance(causes, list) or not all(isinstance(cause, str) for cause in causes):
                yield f"throttle is {causes!r:.40}"
    sizes: dict[str, Any] = {name: getattr(m.problem, name) for name in SIZES}
    if wrong := [
        f"{name} {size!r:.40}" for name, size in sizes.items() if not isinstance(size, int) or not 0 <= size < 1 << 48
    ]:
        yield f"its problem has {', '.join(wrong)}"
        return
    switches = {name: getattr(m.problem, name) for name in SWITCHES}
    if wrong := [f"{name} {switch!r:.40}" for name, switch in switches.items() if not isinstance(switch, bool)]:
        yield f"its problem has {', '.join(wrong)}"
        return
    shown = m.problem.mask_visible_pairs
    if shown is not None and not (isinstance(shown, int) and shown >= 0):
        yield f"its problem has mask_visible_pairs {shown!r:.40}"
        return
    if m.problem.precision not in PRECISIONS:
        yield f"its problem's precision is {m.problem.precision!r:.40}"
        return
    try:
        _ = m.problem.flops, m.problem.compulsory_bytes, m.problem.exponentials, m.problem.describe()
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        yield f"its problem makes no sense: {error!r}"


def _is_figure(value: Any) -> bool:
    """A number that means something, or nothing."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))


def _is_setting(value: Any) -> bool:
    """What a field of a config may be."""
    return value is None or isinstance(value, bool | str) or (isinstance(value, int) and abs(value) < 1 << 31)
