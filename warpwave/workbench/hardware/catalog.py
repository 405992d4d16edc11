"""Data sheets: the peak rates that each card's maker states, with sources, read from the files of `cards`.

Peaks are dense (never with structured sparsity), in 10^12 operations a second; a fused multiply-add counts as two, and
products accumulate in float32, those of int8 in int32. Bandwidths are in 10^9 bytes a second; caches and shared memory
in KiB. A card has its documents by title and year. `compared` names the text that figures were compared with, and the
figures that agree with it. Three sources hold for every card:

- NVIDIA shared memory, registers and exponentials: CUDA C++ Programming Guide, release 13.0 (2025), "Technical
  Specifications per Compute Capability" and "Throughput of Native Arithmetic Instructions" (exp2f: 16 a clock and SM).
- AMD caches, LDS and registers: ROCm documentation, "AMD GPU specifications" (2025).
- AMD exponentials: transcendental instructions run at a quarter of the rate of a compute unit's 4 x 16 lanes, so 16 a
  clock (LLVM's SISchedule.td, WriteTrans32).

`card_file.py` reads a user's sheet.
"""

from __future__ import annotations

import difflib
import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from warpwave.gpu import ARCHS, CPU, Gpu

FOLDER = Path(__file__).with_name("cards")
FILES = ("nvidia_volta_turing", "nvidia_ampere", "nvidia_ada_hopper", "nvidia_blackwell", "amd")
# Arithmetic of the products, slowest last. Accumulation is in float32, of int8 in int32. "float32" is the plain
# floating-point units, "float32_matrix" the float32 matrix instructions of AMD's CDNA cards, "tf32" those of NVIDIA
# (and of CDNA 3).
PATHS = ("float16", "bfloat16", "fp8", "int8", "tf32", "float32_matrix", "float32")

# Fields that differ from card to card within an architecture.
OF_A_CARD = (
    *("num_sms", "boost_clock_mhz", "tensor_clock_mhz", "max_clock_mhz", "memory_gb", "bandwidth_gbps", "l2_bytes"),
    *("l2_gbps", "last_level_cache_bytes", "power_w"),
)


@dataclass(frozen=True, kw_only=True)
class DataSheet:
    """The figures that a card's maker states. Unpublished figures are None and listed in `left_out`.

    Attributes:
        key: the short name, `"h200"`.
        name: the full name; if one card holds several devices, the name says which part this is.
        vendor: `"nvidia"` or `"amd"`.
        arch: `"sm_90"`, `"gfx942"`.
        num_sms: streaming multiprocessors or compute units.
        boost_clock_mhz: the clock at which the peaks are stated.
        tensor_clock_mhz: the clock at which the matrix peaks are stated, if it is lower.
        max_clock_mhz: the highest clock that the driver allows, if the card exceeds `boost_clock_mhz` by itself, as
            GeForce cards do.
        memory_gb: device memory, 10^9 bytes.
        bandwidth_gbps: bandwidth of device memory, 10^9 bytes a second.
        l2_bytes: L2 capacity of the whole card.
        l2_gbps: read bandwidth of L2, 10^9 bytes a second, if published.
        last_level_cache_bytes: the cache between L2 and memory (AMD's Infinity Cache); 0 without one.
        smem_per_sm_bytes, smem_per_block_bytes: shared memory (LDS) per SM, and the limit per block.
        registers_per_sm: 32-bit registers.
        exponentials_per_clock_per_sm: float32 exponentials that the special function units start per clock.
        peak_tflops: path -> dense 10^12 operations a second, accumulated in float32 (int8: in int32). Paths as in
            `PATHS`.
        power_w: board power.
        sources: documents by title and year.
        aliases: other names that find the card.
        driver_names: the names that the driver gives the card.
        compared: text that was read -> figures of the sheet that agree with it, after rounding; `figures` has their
            names, and `"peak_tflops"` stands for all paths.
        derived: field -> its derivation, for figures that follow from published ones.
        left_out: field -> the reason why it has no figure.
    """

    key: str
    name: str
    vendor: str
    arch: str
    num_sms: int
    boost_clock_mhz: int
    memory_gb: float
    bandwidth_gbps: float
    l2_bytes: int
    smem_per_sm_bytes: int
    smem_per_block_bytes: int
    registers_per_sm: int
    peak_tflops: dict[str, float]
    power_w: int
    sources: tuple[str, ...]
    exponentials_per_clock_per_sm: int | None = None
    tensor_clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    l2_gbps: float | None = None
    last_level_cache_bytes: int = 0
    aliases: tuple[str, ...] = ()
    driver_names: tuple[str, ...] = ()
    compared: dict[str, list[str]] = field(default_factory=dict)
    derived: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def figures(self) -> tuple[str, ...]:
        """Returns the names of the figures that belong to this card alone, as the files spell them: a peak as
        `peak_tflops.float16`, sizes with `_kib`. What an architecture determines is not among them."""
        single = [name for name in OF_A_CARD if getattr(self, name)]
        peaks = [f"peak_tflops.{path}" for path in self.peak_tflops]
        return tuple(name.replace("_bytes", "_kib") for name in single) + tuple(peaks)

    @property
    def exponentials_gops(self) -> float | None:
        """10^9 exponentials a second at the boost clock, or None."""
        rate = self.exponentials_per_clock_per_sm
        return None if rate is None else self.num_sms * rate * self.boost_clock_mhz / 1000

    @property
    def headroom(self) -> float:
        """The highest clock over the boost clock, at least 1: the factor by which the card can exceed the stated
        rates."""
        return max(1.0, (self.max_clock_mhz or 0) / self.boost_clock_mhz)


@functools.cache
def catalog() -> dict[str, DataSheet]:
    """Returns every data sheet by key, in the order of the files."""
    found: dict[str, DataSheet] = {}
    for name in FILES:
        cards = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
        found |= {key: read(key, values) for key, values in cards.items()}
    return found


def read(key: str, values: Mapping[str, Any]) -> DataSheet:
    """Returns a data sheet from a table of its fields; sizes may be in KiB (`l2_kib` for `l2_bytes`).

    Raises:
        ValueError: a field does not exist.
    """
    known = {f.name for f in fields(DataSheet)}
    arguments: dict[str, Any] = {"key": key}
    for name, value in values.items():
        if name.endswith("_kib"):
            name, value = name.removesuffix("_kib") + "_bytes", value * 1024
        if name not in known:
            raise ValueError(f"[{key}] has {name!r}, which is no field of a data sheet")
        arguments[name] = tuple(value) if isinstance(value, list) else value
    return DataSheet(**arguments)


_given: dict[str, DataSheet] = {}  # by plain name of the card


def give(sheet: DataSheet) -> None:
    """Adds a sheet that is not in the catalog, so that `data_sheet` finds it for the rest of the process."""
    _given[_plain(sheet.name)] = sheet


def data_sheet(gpu: Gpu) -> DataSheet | None:
    """Returns a device's data sheet, found by the driver's name for it; None if the catalog has none.

    A partition of a card (MIG, or a compute partition of an MI300X) has fewer SMs than the card, and no data sheet.
    """
    found = _given.get(_plain(gpu.name)) or _by_driver_name().get(_plain(gpu.name))
    return found if found is not None and gpu.num_sms in (0, found.num_sms) else None


@functools.cache
def _by_driver_name() -> dict[str, DataSheet]:
    return {_plain(name): sheet for sheet in catalog().values() for name in (sheet.name, *sheet.driver_names)}


@functools.cache
def _by_name() -> dict[str, DataSheet]:
    found = {_plain(name): s for s in catalog().values() for name in (s.key, s.name, *s.aliases, *s.driver_names)}
    # A name with a redundant capacity, as "L40S 48GB", finds the card too.
    sizes = {f"{name}{sheet.memory_gb:g}gb": sheet for name, sheet in found.items()}
    return sizes | found


def find(text: str) -> DataSheet | None:
    """Returns the data sheet for a name such as `h200`, `H100-PCIe`, `rtx 4090` or `Radeon RX 7900 XTX`; None if the
    catalog has none."""
    return _by_name().get(_plain(text))


def of_arch(arch: str) -> list[DataSheet]:
    """Returns the cards of one architecture."""
    return [sheet for sheet in catalog().values() if sheet.arch == arch]


def gpu_of(sheet: DataSheet) -> Gpu:
    """Returns the description that the dispatcher needs, also for architectures without kernels, such as a T4's."""
    registers = ARCHS[sheet.arch][2] if sheet.arch in ARCHS else 255
    warp_size = 64 if sheet.vendor == "amd" and sheet.arch.startswith("gfx9") else 32
    name = sheet.driver_names[0] if sheet.driver_names else sheet.name
    return Gpu(
        name,
        sheet.vendor,
        sheet.arch,
        sheet.smem_per_block_bytes,
        registers,
        sheet.num_sms,
        warp_size,
        int(sheet.memory_gb * 1e9),
    )


def resolve(text: str) -> Gpu:
    """Returns the device for a name: a card of the catalog, a file with a card's sheet (`card_file`), an architecture,
    or `cpu`.

    Raises:
        ValueError: the name is unknown, or the file is no sheet; the message has similar names.
    """
    sheet = sheet_of(text)
    if sheet is not None:
        return gpu_of(sheet)
    if text.lower() == "cpu":
        return CPU
    if text.lower() in ARCHS:
        return Gpu.for_arch(text.lower())
    raise ValueError(
        f"GPU {text!r} is not known; {hint(text)}; a card that is not there can be described in a file, card.toml"
    )


def hint(text: str) -> str:
    """Returns what to write instead of a name that stands for no card: cards of this architecture, or similar names."""
    listed = "`warpwave explain --gpu all` lists the cards"
    if alike := of_arch(text.lower()):
        return f"name a card of {text.lower()}: {', '.join(sheet.key for sheet in alike)}"
    close = difflib.get_close_matches(text.lower(), (*catalog(), *ARCHS), n=3)
    return f"did you mean {' or '.join(close)}? {listed}" if close else listed


def sheet_of(text: str) -> DataSheet | None:
    """Returns the data sheet that a name or the path of a TOML file stands for; None for an unknown name.

    Raises:
        ValueError: the file is no sheet.
    """
    if text.lower().endswith(".toml"):
        from warpwave.workbench.hardware import card_file

        return card_file.load(Path(text))
    return find(text)


# Words of full names that people leave out.
LEFT_OUT = r"nvidia|amd|geforce|tesla|instinct|radeon|oam|gpu|graphics|generation"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", re.sub(LEFT_OUT, "", name.lower()))
