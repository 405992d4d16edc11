"""Data sheets: the peak rates that each card's maker states, with sources, read from `catalog.toml`."""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from warpwave.gpu import ARCHS, CPU, Gpu

FILE = Path(__file__).with_name("catalog.toml")
# Arithmetic of the products, slowest last. Accumulation is always in float32. "float32" is the plain floating-point
# units, "float32_matrix" the float32 matrix instructions of AMD's CDNA cards, "tf32" those of NVIDIA (and of CDNA 3).
PATHS = ("float16", "bfloat16", "fp8", "tf32", "float32_matrix", "float32")


@dataclass(frozen=True, kw_only=True)
class DataSheet:
    """The figures that a card's maker states. Unpublished figures are None and listed in `left_out`.

    Attributes:
        key: the short name, `"h200"`.
        name: the full name; if one card holds several devices, the name says which part this is.
        vendor: `"nvidia"` or `"amd"`.
        arch: `"sm_90"`, `"gfx942"`.
        num_sms: streaming multiprocessors or compute units.
        boost_clock_mhz: the highest clock.
        tensor_clock_mhz: the clock at which the matrix peaks are stated, if it is lower.
        memory_gb: device memory, 10^9 bytes.
        bandwidth_gbps: bandwidth of device memory, 10^9 bytes a second.
        l2_bytes: L2 capacity of the whole card.
        l2_gbps: read bandwidth of L2, 10^9 bytes a second, if published.
        last_level_cache_bytes: the cache between L2 and memory (AMD's Infinity Cache); 0 without one.
        smem_per_sm_bytes, smem_per_block_bytes: shared memory (LDS) per SM, and the limit per block.
        registers_per_sm: 32-bit registers.
        exponentials_per_clock_per_sm: float32 exponentials that the special function units start per clock.
        peak_tflops: path -> dense 10^12 operations a second with float32 accumulation. Paths as in `PATHS`.
        power_w: board power.
        sources: documents by title and year.
        aliases: other names that find the card.
        driver_names: the names that the driver gives the card.
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
    l2_gbps: float | None = None
    last_level_cache_bytes: int = 0
    aliases: tuple[str, ...] = ()
    driver_names: tuple[str, ...] = ()
    derived: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def exponentials_gops(self) -> float | None:
        """10^9 exponentials a second at the highest clock, or None."""
        rate = self.exponentials_per_clock_per_sm
        return None if rate is None else self.num_sms * rate * self.boost_clock_mhz / 1000


@functools.cache
def catalog() -> dict[str, DataSheet]:
    """Returns every data sheet by key, in the file's order."""
    cards = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {key: _read(key, values) for key, values in cards.items()}


def _read(key: str, values: dict[str, Any]) -> DataSheet:
    known = {f.name for f in fields(DataSheet)}
    arguments: dict[str, Any] = {"key": key}
    for name, value in values.items():
        if name.endswith("_kib"):
            name, value = name.removesuffix("_kib") + "_bytes", value * 1024
        if name not in known:
            raise ValueError(f"{FILE.name}: [{key}] has {name!r}, which is no field of a data sheet")
        arguments[name] = tuple(value) if isinstance(value, list) else value
    return DataSheet(**arguments)


def data_sheet(gpu: Gpu) -> DataSheet | None:
    """Returns a device's data sheet, found by the driver's name for it; None if the catalog has none.

    A partition of a card (MIG, or a compute partition of an MI300X) has fewer SMs than the card, and no data sheet.
    """
    for sheet in catalog().values():
        names = (sheet.name, *sheet.driver_names)
        if _plain(gpu.name) in map(_plain, names) and gpu.num_sms in (0, sheet.num_sms):
            return sheet
    return None


def find(text: str) -> DataSheet | None:
    """Returns the data sheet for a name such as `h200`, `H100-PCIe` or `rtx 4090`; None if the catalog has none."""
    for sheet in catalog().values():
        if _plain(text) in map(_plain, (sheet.key, sheet.name, *sheet.aliases, *sheet.driver_names)):
            return sheet
    return None


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
    """Returns the device for a name: a card of the catalog, an architecture, or `cpu`.

    Raises:
        ValueError: the name is unknown; the message lists the cards and the architectures.
    """
    sheet = find(text)
    if sheet is not None:
        return gpu_of(sheet)
    if text.lower() == "cpu":
        return CPU
    if text.lower() in ARCHS:
        return Gpu.for_arch(text.lower())
    raise ValueError(
        f"GPU {text!r} is not known; known are the cards {', '.join(catalog())}, the architectures "
        f"{', '.join(ARCHS)}, and cpu"
    )


def _plain(name: str) -> str:
    name = re.sub(r"[^a-z0-9]", "", name.lower())
    return name.removeprefix("nvidia").removeprefix("amd")
