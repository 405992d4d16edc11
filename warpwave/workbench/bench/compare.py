"""Compares one run with another, or one contender with another, case by case: faster, slower, the same, or unclear.

Contenders of one run were timed in turns, so they are compared by the ratios within each round (`timing.paired_ratio`).
Two runs were not: in one of them the card may have been warmer, or a different card. Their common peers, whose code did
not change, serve as the reference. Each time is divided by the geometric mean of the common peers' times in its round,
which cancels whatever slows all contenders alike, and the two sets of quotients are compared by ranks
(`unpaired.unpaired_ratio`). The peers also move against each other although their code is unchanged; that movement
widens the interval (`unpaired.Spread`). If there is no common peer, or the peers' versions or the device differ, the
raw times are compared and the result says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from warpwave.workbench.bench.moved import moved
from warpwave.workbench.bench.records import Measurement, RecordError, read_records
from warpwave.workbench.bench.timing import Ratio, Samples, paired_ratio
from warpwave.workbench.bench.unpaired import MARGIN, Outcome, Spread, outcome, unpaired_ratio

Key = tuple[str, str]  # case, mode
PEERS_DEPEND_ON = ("torch", "triton", "cuda", "hip", "cudnn", "peers", "device", "gpu.name", "cpu.model")
TOLD = (*PEERS_DEPEND_ON, "gpu.driver", "gpu.power_limit_w", "cpu.torch_threads", "python", "platform", "code.commit")


class CompareError(ValueError):
    """A comparison is not possible. The message lists what is available."""


@dataclass(frozen=True)
class Run:
    """The part of a record file that is one side of a comparison.

    Attributes:
        name: the argument that selected it.
        environments: id -> environment.
        measurements: the latest measurement of each (case, mode) and contender, with the id of its environment.
    """

    name: str
    environments: dict[str, dict[str, Any]]
    measurements: dict[tuple[Key, str], tuple[str, Measurement]]


@dataclass(frozen=True)
class CaseComparison:
    """The comparison of one case.

    Attributes:
        case, mode: the case and the timing mode.
        contender_a, contender_b: the two contenders.
        a_us, b_us: their median times; None if not timed.
        ratio: time of a over time of b: above 1 if b is faster. None if the two cannot be compared.
        outcome: the result for b; LOST if a was timed and b was not.
        how: the statistical method, or why there is no ratio.
        moved: the model's term that changed most between the two; empty if unknown.
    """

    case: str
    mode: str
    contender_a: str
    contender_b: str
    a_us: float | None
    b_us: float | None
    ratio: Ratio | None
    outcome: Outcome | str
    how: str
    moved: str = ""


@dataclass(frozen=True)
class Comparison:
    """The comparison of two runs, and the differences of their environments.

    Attributes:
        a, b: names of the two sides.
        cases: the comparisons, in the order of b's run.
        only_a, only_b: cases that only one side has.
        differences: differences of the environments: name -> (in a, in b).
        spread: how far the common peers moved against each other from a to b.
    """

    a: str
    b: str
    cases: tuple[CaseComparison, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    differences: dict[str, tuple[Any, Any]]
    spread: Spread

    def failed(self, fail_on: str) -> bool:
        """Returns whether a case is as bad as `fail_on`: "slower" (or no longer timed), "unclear" (or slower), "never".

        A comparison without any comparable case also fails, because it has shown nothing.
        """
        if fail_on == "never":
            return False
        bad = {"slower": ("SLOWER", "LOST"), "unclear": ("SLOWER", "LOST", "UNCLEAR")}[fail_on]
        return any(c.outcome in bad for c in self.cases) or all(c.ratio is None for c in self.cases)


def load_run(spec: str) -> Run:
    """Loads `FILE`, or `FILE@REF`: the part of it with this commit, source hash or environment id, or prefix of one.

    Raises:
        CompareError: there is no such file, or no such ref in it.
        RecordError: the file cannot be read.
    """
    path, ref = Path(spec), ""
    if not os.path.exists(path) and "@" in spec:
        name, _, ref = spec.rpartition("@")
        path = Path(name)
    if not os.path.isfile(path):
        raise CompareError(f"there is no record file {path}")
    records = read_records(path)
    chosen = {key: e for key, e in records.environments.items() if not ref or _refers(ref, key, e)}
    if not chosen:
        codes = {key: e.get("code") or {} for key, e in records.environments.items()}
        known = dict.fromkeys(str(code.get("commit") or key)[:12] for key, code in codes.items())
        raise CompareError(f"{path} has no records of {ref!r}; it has {', '.join(known)}")
    latest = {
        ((m.case, m.mode), m.contender): (environment, m)
        for environment, m in records.measurements
        if environment in chosen
    }
    return Run(spec, chosen, latest)


def compare(a: Run, b: Run, contenders: Sequence[str] = (), margin: float = MARGIN) -> Comparison:
    """Compares each contender of `b` with the same contender of `a`; or, if two are named, the second with the first.

    Args:
        a, b: the two runs; the same object to compare two contenders of one run.
        contenders: one name, to compare only that one; two, to compare the second in b with the first in a; empty for
            warpwave's kernels.
        margin: largest distance of a ratio from 1 that counts as the same.

    Raises:
        CompareError: the runs have nothing in common to compare.
    """
    pairs = _pairs(a, b, contenders)
    spread = _spread(a, b)
    cases, only_a, only_b = [], [], []
    for name_a, name_b in pairs:
        keys_a, keys_b = ([key for key, name in run.measurements if name == n] for run, n in ((a, name_a), (b, name_b)))
        only_a += [_label(key) for key in keys_a if key not in keys_b]
        only_b += [_label(key) for key in keys_b if key not in keys_a]
        cases += [_compare_case(a, b, key, name_a, name_b, margin, spread) for key in keys_b if key in keys_a]
    if not cases:
        raise CompareError(
            f"{a.name} and {b.name} have no case in common; they have {_listed(only_a)} and {_listed(only_b)}"
        )
    names = (f"{a.name} {pairs[0][0]}", f"{b.name} {pairs[0][1]}") if len(contenders) == 2 else (a.name, b.name)
    return Comparison(
        *names,
        tuple(cases),
        tuple(dict.fromkeys(only_a)),
        tuple(dict.fromkeys(only_b)),
        _differences(a.environments.values(), b.environments.values(), TOLD),
        spread,
    )


def _refers(ref: str, key: str, environment: Mapping[str, Any]) -> bool:
    code = environment.get("code") or {}
    return any(str(name).startswith(ref) for name in (code.get("commit"), code.get("source_sha256"), key) if name)


def _pairs(a: Run, b: Run, contenders: Sequence[str]) -> list[tuple[str, str]]:
    there = [list(dict.fromkeys(name for _, name in run.measurements)) for run in (a, b)]
    if len(contenders) > 2:
        raise CompareError(f"at most two contenders can be compared, got {', '.join(contenders)}")
    for run, names, asked in zip((a, b), there, (contenders[:1], contenders[-1:]), strict=True):
        if missing := [name for name in asked if name not in names]:
            raise CompareError(f"{run.name} has no contender {missing[0]!r}; it has {', '.join(names)}")
    if len(contenders) == 2:
        return [(contenders[0], contenders[1])]
    if a is b:
        raise CompareError(f"to compare a run with itself, name two contenders of {', '.join(there[0])}")
    ours = {m.contender for _, m in b.measurements.values() if m.is_ours}
    wanted = list(contenders) or [name for name in there[1] if name in ours and name in there[0]]
    if not wanted:
        raise CompareError(f"{a.name} and {b.name} have no kernel of warpwave in common; name a contender")
    return [(name, name) for name in wanted]


def _compare_case(a: Run, b: Run, key: Key, name_a: str, name_b: str, margin: float, spread: Spread) -> CaseComparison:
    environment_a, in_a = a.measurements[key, name_a]
    environment_b, in_b = b.measurements[key, name_b]

    def result(ratio: Ratio | None, found: str, how: str) -> CaseComparison:
        a_us, b_us = (None if m.timing is None else m.timing.median_us for m in (in_a, in_b))
        term = ""
        if in_a.timing is not None and in_b.timing is not None and in_a.problem == in_b.problem:
            term = moved(in_a, in_b, a.environments[environment_a], b.environments[environment_b])
        return CaseComparison(*key, name_a, name_b, a_us, b_us, ratio, found, how, term)

    if in_a.problem != in_b.problem:
        return result(None, "UNCLEAR", "the two runs have different problems under this name")
    if in_b.timing is None:
        return result(None, "UNCLEAR" if in_a.timing is None else "LOST", f"not timed: {in_b.refusal}")
    if in_a.timing is None:
        return result(None, "UNCLEAR", f"was not timed: {in_a.refusal}")
    if _way(in_a.timing) != _way(in_b.timing):
        return result(None, "UNCLEAR", "timed by different methods")
    if environment_a == environment_b and len(in_a.timing.samples_us) == len(in_b.timing.samples_us):
        ratio = paired_ratio(in_a.timing, in_b.timing)
        return result(ratio, outcome(ratio, margin), "paired within rounds")
    times_a, times_b = list(in_a.timing.samples_us), list(in_b.timing.samples_us)
    peers = [
        pair
        for pair in _common_peers(a, b, key, (environment_a, environment_b))
        if [len(peer.samples_us) for peer in pair] == [len(times_a), len(times_b)]  # the same rounds as the contenders
    ]
    if not peers:
        changed = _changed(a, b, environment_a, environment_b)
        how = f"as measured: {', '.join(changed)} differ" if changed else "as measured: no common peer"
        ratio = unpaired_ratio(times_a, times_b)
        return result(ratio, outcome(ratio, margin), how)
    times_a = _normalized(times_a, [in_peer for in_peer, _ in peers])
    times_b = _normalized(times_b, [in_peer for _, in_peer in peers])
    ratio = spread.widen(unpaired_ratio(times_a, times_b), len(peers))
    return result(ratio, outcome(ratio, margin), f"normalized by {len(peers)} common peer{'s' * (len(peers) > 1)}")


def _spread(a: Run, b: Run) -> Spread:
    """Returns the spread of the common peers, over all cases that both runs have."""
    groups = []
    for key in dict.fromkeys(key for key, _ in a.measurements):
        ids = [{e for (k, _), (e, _) in run.measurements.items() if k == key} for run in (a, b)]
        pairs = [p for e_a in ids[0] for e_b in ids[1] if e_a != e_b for p in _common_peers(a, b, key, (e_a, e_b))]
        groups.append([in_a.median_us / in_b.median_us for in_a, in_b in pairs])
    return Spread.of(groups)


def _changed(a: Run, b: Run, environment_a: str, environment_b: str) -> dict[str, tuple[Any, Any]]:
    return _differences([a.environments[environment_a]], [b.environments[environment_b]], PEERS_DEPEND_ON)


def _way(samples: Samples) -> tuple[Any, ...]:
    return samples.method, samples.l2_flushed, samples.input_sets > 1


def _common_peers(a: Run, b: Run, key: Key, environments: tuple[str, str]) -> list[tuple[Samples, Samples]]:
    """Returns the times of every peer that both runs timed on this case, with the same operator and version."""
    found: list[tuple[Samples, Samples]] = []
    if _changed(a, b, *environments):
        return found
    for (other, name), (environment_a, in_a) in a.measurements.items():
        if other != key or not in_a.is_peer or (key, name) not in b.measurements:
            continue
        environment_b, in_b = b.measurements[key, name]
        same_runs = (environment_a, environment_b) == environments
        if not same_runs or in_a.timing is None or in_b.timing is None:
            continue
        if in_a.kernel == in_b.kernel and in_a.config == in_b.config and _way(in_a.timing) == _way(in_b.timing):
            found.append((in_a.timing, in_b.timing))
    return found


def _normalized(times_us: Sequence[float], peers: Sequence[Samples]) -> list[float]:
    """Returns the times divided by the peers' mean of the same round."""
    return [t / geometric_mean(peer.samples_us[r] for peer in peers) for r, t in enumerate(times_us)]


def _differences(
    a: Iterable[Mapping[str, Any]], b: Iterable[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, tuple[Any, Any]]:
    """Returns the differences between the environments of two runs; the last environment of each run counts."""
    last_a, last_b = list(a)[-1], list(b)[-1]
    pairs = {name: (_look_up(last_a, name), _look_up(last_b, name)) for name in names}
    # A figure that older records lack is not a difference.
    return {name: pair for name, pair in pairs.items() if None not in pair and pair[0] != pair[1]}


def _look_up(environment: Mapping[str, Any], name: str) -> Any:
    value: Any = environment
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _label(key: Key) -> str:
    case, mode = key
    return case if mode == "auto" else f"{case} ({mode})"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) or "nothing"
    return f"{shown}, and {len(names) - 3} more" if len(names) > 3 else shown


__all__ = ["CaseComparison", "CompareError", "Comparison", "RecordError", "Run", "compare", "load_run"]
