"""Runs of one machine together, machines apart: figures of two machines never stand in one table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from warpwave.gpu import ARCHS, CPU, Gpu
from warpwave.workbench.bench.records import Measurement, Records

Origin = Literal["given", "here", "shipped"]


@dataclass(frozen=True)
class Source:
    """Records, and where they come from.

    Attributes:
        records: what was measured.
        origin: `"given"` by the user, measured `"here"` and now, or `"shipped"` with the package.
        names: of the files, empty where there is none.
        command: what measured them, where that is not `warpwave bench`.
    """

    records: Records
    origin: Origin = "given"
    names: tuple[str, ...] = ()
    command: str = ""


@dataclass(frozen=True)
class Run:
    """One run of a program: its environment, and what it measured, in order."""

    environment: Mapping[str, Any]
    measurements: Sequence[Measurement]

    @property
    def date(self) -> str:
        """UTC, ISO 8601; empty where the record does not say."""
        return str(self.environment.get("date") or "")


@dataclass(frozen=True)
class Machine:
    """Runs whose environments differ in nothing but their date."""

    source: Source
    runs: Sequence[Run]

    @property
    def environment(self) -> Mapping[str, Any]:
        """Of the first run; the others' are the same but for the date."""
        return self.runs[0].environment

    @property
    def is_cpu(self) -> bool:
        return not self.environment.get("gpu")

    @property
    def name(self) -> str:
        """What the driver calls the GPU, or the processor's model."""
        part = self.environment.get("gpu") or self.environment.get("cpu") or {}
        return str(part.get("name") or part.get("model") or self.environment.get("device") or "unknown device")

    @property
    def dates(self) -> tuple[str, ...]:
        """The days of its runs."""
        return tuple(dict.fromkeys(run.date[:10] for run in self.runs if run.date))

    @property
    def gpu(self) -> Gpu:
        """Its description, as far as the record has it."""
        return gpu_of(self.environment)


def machines(sources: Sequence[Source]) -> list[Machine]:
    """The machines of all sources, in order of appearance. Runs without a measurement are left out."""
    found: dict[str, Machine] = {}
    for index, source in enumerate(sources):
        for identity, environment in source.records.environments.items():
            measured = [m for owner, m in source.records.measurements if owner == identity]
            if not measured:
                continue
            # Files given together may be of one machine; what is shipped or measured here always stands apart.
            group = source.origin if source.origin == "given" else f"{source.origin} {index}"
            lasting = {key: value for key, value in environment.items() if key != "date"}
            key = group + json.dumps(lasting, sort_keys=True, default=str)
            run = Run(environment, measured)
            if key in found:
                names = tuple(dict.fromkeys(found[key].source.names + source.names))
                together = Source(source.records, source.origin, names, found[key].source.command)
                found[key] = Machine(together, [*found[key].runs, run])
            else:
                found[key] = Machine(source, [run])
    # Files come in any order; a run's date says when it was.
    return [replace(machine, runs=sorted(machine.runs, key=lambda run: run.date)) for machine in found.values()]


def gpu_of(environment: Mapping[str, Any]) -> Gpu:
    """The device an environment describes. Its name is what a data sheet is looked up by."""
    card = environment.get("gpu")
    if not card:
        return CPU
    name, num_sms = str(card.get("name", "")), int(card.get("sm_count") or 0)
    if environment.get("hip"):
        # torch gives an AMD architecture as "9.4" too: gfx942 and gfx940 are told apart by the catalogue's name alone.
        return Gpu(name, "amd", str(card.get("arch") or "amd"), 0, 0, num_sms, 64)
    arch = f"sm_{str(card.get('capability') or '').replace('.', '')}"
    if arch not in ARCHS:
        return Gpu(name, "nvidia", arch, 0, 0, num_sms, 32)
    known = Gpu.for_arch(arch)
    return Gpu(name, "nvidia", arch, known.smem_per_block_bytes, known.registers_per_thread, num_sms, 32)
