"""Groups runs by machine: figures of two machines never share a table."""

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
    """Records and their origin.

    Attributes:
        records: the measurements.
        origin: `"given"` by the user, measured `"here"` and now, or `"shipped"` with the package.
        names: names of the files; empty without files.
        command: the command that measured them, if it is not `warpwave bench`.
    """

    records: Records
    origin: Origin = "given"
    names: tuple[str, ...] = ()
    command: str = ""


@dataclass(frozen=True)
class Run:
    """One run: its environment and its measurements, in order."""

    environment: Mapping[str, Any]
    measurements: Sequence[Measurement]

    @property
    def date(self) -> str:
        """The date in UTC, ISO 8601; empty if the record has none."""
        return str(self.environment.get("date") or "")


@dataclass(frozen=True)
class Machine:
    """Runs whose environments differ only in their date."""

    source: Source
    runs: Sequence[Run]

    @property
    def environment(self) -> Mapping[str, Any]:
        """The environment of the first run; the others differ only in the date."""
        return self.runs[0].environment

    @property
    def is_cpu(self) -> bool:
        return not self.environment.get("gpu")

    @property
    def name(self) -> str:
        """The driver's name of the GPU, or the processor's model."""
        part = self.environment.get("gpu") or self.environment.get("cpu") or {}
        return str(part.get("name") or part.get("model") or self.environment.get("device") or "unknown device")

    @property
    def dates(self) -> tuple[str, ...]:
        """The days of its runs."""
        return tuple(dict.fromkeys(run.date[:10] for run in self.runs if run.date))

    @property
    def gpu(self) -> Gpu:
        """The GPU's description, as far as the record has it."""
        return gpu_of(self.environment)


def machines(sources: Sequence[Source]) -> list[Machine]:
    """Returns the machines of all sources, in order of appearance. Runs without measurements are left out."""
    found: dict[str, Machine] = {}
    for index, source in enumerate(sources):
        for identity, environment in source.records.environments.items():
            measured = [m for owner, m in source.records.measurements if owner == identity]
            if not measured:
                continue
            # Given files may share a machine; shipped records and measurements from here are always separate.
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
    # Files come in any order, so runs are sorted by date.
    return [replace(machine, runs=sorted(machine.runs, key=lambda run: run.date)) for machine in found.values()]


def gpu_of(environment: Mapping[str, Any]) -> Gpu:
    """Returns the device of an environment. Its name finds the data sheet."""
    card = environment.get("gpu")
    if not card:
        return CPU
    name, num_sms = str(card.get("name", "")), int(card.get("sm_count") or 0)
    if environment.get("hip"):
        # torch gives gfx942 and gfx940 the same capability, "9.4"; only the name in the catalog distinguishes them.
        return Gpu(name, "amd", str(card.get("arch") or "amd"), 0, 0, num_sms, 64)
    arch = f"sm_{str(card.get('capability') or '').replace('.', '')}"
    if arch not in ARCHS:
        return Gpu(name, "nvidia", arch, 0, 0, num_sms, 32)
    known = Gpu.for_arch(arch)
    return Gpu(name, "nvidia", arch, known.smem_per_block_bytes, known.registers_per_thread, num_sms, 32)
