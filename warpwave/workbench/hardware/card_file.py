"""Reads the data sheet of a card that the catalog does not have, from a TOML file (`--gpu card.toml`).

`docs/workbench/explain.md` describes the file. It names the fields of `catalog.DataSheet`; `like = "h100"` takes all
others from a card of the catalog.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from warpwave.gpu import ARCHS
from warpwave.workbench.hardware.catalog import PATHS, DataSheet, find, give, of_arch, read
from warpwave.workbench.hardware.occupancy import MULTIPROCESSORS
from warpwave.workbench.input_files import read_toml

NEEDED = (
    *("name", "arch", "num_sms", "boost_clock_mhz", "memory_gb", "bandwidth_gbps", "l2_bytes", "peak_tflops"),
    "power_w",
)
TEXTS = ("name", "arch", "like")
MOST = 1e12  # no figure of a card is larger in its unit


def load(path: Path) -> DataSheet:
    """Returns the sheet of a file, and adds it to the cards that `catalog.data_sheet` finds.

    Raises:
        ValueError: the file is no sheet. The message names the file and the field.
    """
    data = read_toml(path)
    try:
        sheet = _sheet(path.stem.lower(), data)
    except ValueError as error:
        raise ValueError(f"{path} is no data sheet: {error}") from None
    give(sheet)
    return sheet


def _sheet(key: str, data: Mapping[str, Any]) -> DataSheet:
    given = {_in_bytes(name): value * 1024 if _in_kib(name, value) else value for name, value in data.items()}
    unknown = [name for name in given if name not in {f.name for f in fields(DataSheet)} | {"like"} or name == "key"]
    if unknown:
        needed = ", ".join(map(_in_file, NEEDED))
        raise ValueError(f"{unknown[0]!r} is no field; fields are {needed}, like, and those of the catalog")
    base: dict[str, Any] = {}
    if "like" in given:
        other = find(str(given["like"]))
        if other is None:
            raise ValueError(f"like is {given['like']!r}, which is no card of the catalog")
        base = {name: value for name, value in asdict(other).items() if name not in ("aliases", "driver_names")}
        base["name"] = f"{other.name} as in {key}.toml"
        del given["like"]
    if missing := [name for name in NEEDED if name not in base | given]:
        raise ValueError(f"{', '.join(map(_in_file, missing))} missing; give them, or like = a card of the catalog")
    _check({name: value for name, value in data.items() if name != "like"})  # messages name the fields of the file
    values = base | given
    arch = values["arch"]
    if arch not in ARCHS:
        raise ValueError(f"arch is {arch!r}; it must be one of {', '.join(ARCHS)}")
    values["peak_tflops"] = _rates_of_arch(arch, values["peak_tflops"]["float16"]) | values["peak_tflops"]
    vendor, smem_per_block, _ = ARCHS[arch]
    unit, lanes = MULTIPROCESSORS[arch], 64 if arch.startswith("gfx9") else 32
    by_arch = {
        "vendor": vendor,
        "smem_per_block_bytes": smem_per_block,
        "smem_per_sm_bytes": unit.smem_bytes,
        "registers_per_sm": unit.schedulers * unit.registers_per_lane * lanes * (1 + unit.separate_accumulators),
        "exponentials_per_clock_per_sm": 32 if unit.unit == "WGP" else 16,
        "sources": ("the file that describes it",),
    }
    return read(key, by_arch | {k: v for k, v in values.items() if k not in ("key", "vendor")})


def _rates_of_arch(arch: str, float16: float) -> dict[str, float]:
    """Returns the peaks of an architecture's paths beside a float16 peak. Without them, the products would be taken for
    those of the float32 units, and the bounds would be too long.

    Cards of one architecture may have different ratios. The largest of the catalog counts, so that bounds hold.
    """
    peaks = [sheet.peak_tflops for sheet in of_arch(arch)]
    ratios = {path: max((p[path] / p["float16"] for p in peaks if path in p), default=0.0) for path in PATHS}
    return {path: ratio * float16 for path, ratio in ratios.items() if ratio and path != "float32"}


def _in_bytes(name: str) -> str:
    return name.removesuffix("_kib") + "_bytes" if name.endswith("_kib") else name


def _in_file(name: str) -> str:
    """Returns the name that the documentation gives a field: L2 is stated in KiB."""
    return "l2_kib" if name == "l2_bytes" else name


def _in_kib(name: str, value: Any) -> bool:
    return name.endswith("_kib") and isinstance(value, int | float)


def _check(given: Mapping[str, Any]) -> None:
    """Raises ValueError for a value of the wrong kind, or a figure that is not above 0."""
    for name, value in given.items():
        if name in TEXTS:
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name} is {value!r}; it must be a text")
        elif name == "peak_tflops":
            if not isinstance(value, dict) or not {"float16", "float32"} <= value.keys() <= set(PATHS):
                raise ValueError(
                    f"peak_tflops is {value!r}; it must be a table with float16 and float32, and any of "
                    f"{', '.join(PATHS)}, in dense TFLOP/s with float32 accumulation"
                )
            for path, peak in value.items():
                _check_figure(f"peak_tflops.{path}", peak)
        elif name in ("sources", "aliases", "driver_names"):
            if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
                raise ValueError(f"{name} is {value!r}; it must be a list of texts")
        elif name in ("compared", "derived", "left_out"):
            if not isinstance(value, dict):
                raise ValueError(f"{name} is {value!r}; it must be a table")
        elif name != "vendor":
            _check_figure(name, value)
    for name in ("num_sms", "exponentials_per_clock_per_sm"):
        if name in given and not isinstance(given[name], int):
            raise ValueError(f"{name} is {given[name]!r}; it must be a whole number")


def _check_figure(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MOST or math.isnan(value):
        raise ValueError(f"{name} is {value!r}; it must be a number above 0")
