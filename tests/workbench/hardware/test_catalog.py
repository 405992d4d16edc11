"""The data sheets agree with themselves, with the architectures they name, and with what a person types."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest

from warpwave.gpu import ARCHS, CPU, Gpu
from warpwave.workbench.hardware.catalog import PATHS, DataSheet, catalog, data_sheet, find, gpu_of, of_arch, resolve
from warpwave.workbench.model.families import is_limited

SHEETS_BY_KEY = catalog()
SHEETS = list(SHEETS_BY_KEY.values())
WANTED = {
    *(
        "t4",
        "a100-40gb",
        "a100-80gb",
        "a10",
        "l4",
        "rtx3060",
        "rtx3090",
        "rtx4090",
        "h100",
        "h100-pcie",
        "h200",
        "b200",
    ),
    *("h20", "h800", "a800", "h100-nvl", "h200-nvl", "gh200", "l40s", "l40", "l20", "a30", "a40", "a10g", "v100"),
    *("rtxa6000", "rtx6000ada", "rtx3080", "rtx4080", "rtx5080", "rtx5090", "rtxpro6000", "b300", "gb200", "gb10"),
    *("mi100", "mi210", "mi250", "mi250x", "mi300a", "mi300x", "mi325x", "mi350x", "mi355x"),
    *("rx7900xtx", "rx9070xt", "w7900"),
}
NO_KERNEL_COMPILES = {"sm_70", "sm_75"}  # in the catalog for its bounds

# Operations a clock of one SM, dense, accumulated in float32 (int8: in int32): by the white papers of the generations,
# apart from the catalog, whose peaks must be SMs x clock x these.
PER_CLOCK = {
    "sm_70": {"float16": 1024, "float32": 128},
    "sm_75": {"float16": 1024, "int8": 2048, "float32": 128},
    "sm_80": {"float16": 2048, "bfloat16": 2048, "int8": 4096, "tf32": 1024, "float32": 128},
    "sm_86": {"float16": 512, "bfloat16": 512, "int8": 2048, "tf32": 256, "float32": 256},  # GeForce
    "sm_87": {"float16": 2048, "bfloat16": 2048, "int8": 4096, "tf32": 1024, "float32": 256},
    "sm_89": {"float16": 512, "bfloat16": 512, "fp8": 1024, "int8": 2048, "tf32": 256, "float32": 256},
    "sm_90": {"float16": 4096, "bfloat16": 4096, "fp8": 8192, "int8": 8192, "tf32": 2048, "float32": 256},
    "sm_100": {"float16": 8192, "bfloat16": 8192, "fp8": 16384, "int8": 16384, "tf32": 4096, "float32": 256},
    "sm_103": {"float16": 8192, "bfloat16": 8192, "fp8": 16384, "tf32": 4096, "float32": 256},
    "sm_120": {"float16": 512, "bfloat16": 512, "fp8": 1024, "int8": 2048, "tf32": 256, "float32": 256},  # GeForce
    "gfx908": {"float16": 1024, "bfloat16": 512, "int8": 1024, "float32_matrix": 256, "float32": 128},
    "gfx90a": {"float16": 1024, "bfloat16": 1024, "int8": 1024, "float32_matrix": 256, "float32": 128},
    "gfx942": {
        "float16": 2048,
        "bfloat16": 2048,
        "fp8": 4096,
        "int8": 4096,
        "tf32": 1024,
        "float32_matrix": 256,
        "float32": 256,
    },
    "gfx950": {"float16": 4096, "bfloat16": 4096, "fp8": 8192, "int8": 8192, "float32_matrix": 256, "float32": 256},
    # Of two compute units, which are one for the driver.
    "gfx1100": {"float16": 1024, "bfloat16": 1024, "int8": 1024, "float32": 512},
    "gfx1201": {"float16": 2048, "bfloat16": 2048, "fp8": 4096, "int8": 4096, "float32": 512},
}
# The same chips as cards for data centers and workstations accumulate in float32 at the full rate.
AMPERE = {"float16": 1024, "bfloat16": 1024, "int8": 2048, "tf32": 512}
ADA = AMPERE | {"fp8": 2048}
FULL_RATE = dict.fromkeys(("a10", "a40", "rtxa4000", "rtxa5000", "rtxa6000"), AMPERE)
FULL_RATE |= dict.fromkeys(("l4", "l40s", "rtx5000ada", "rtx6000ada", "rtxpro6000"), ADA)
FULL_RATE["gb10"] = ADA | {"float32": 256}
FULL_RATE["rtx2080ti"] = {"float16": 512}
FULL_RATE |= {key: {"int8": 1024} for key in ("a10g", "l40", "l20")}  # limited as their other matrix rates are

# (bits of the memory bus, Gbit/s of a pin) -> cards, whose bandwidth is the product. GB200's and B300's are not known.
MEMORY = {
    (128, 17): "rtx4060",
    (192, 12.5): "l4",
    (192, 15): "rtx3060",
    (192, 21): "rtx4070 rtx4070ti",
    (192, 28): "rtx5070",
    (256, 6.4): "jetson-orin",
    (256, 8.533): "gb10",
    (256, 10): "t4",
    (256, 14): "rtx3070 rtxa4000",
    (256, 18): "rtx5000ada",
    (256, 20): "rx9070 rx9070xt",
    (256, 22.4): "rtx4080",
    (256, 28): "rtx5070ti",
    (256, 30): "rtx5080",
    (320, 19): "rtx3080",
    (320, 20): "rx7900xt",
    (352, 14): "rtx2080ti",
    (384, 12.5): "a10 a10g",
    (384, 14.5): "a40",
    (384, 16): "rtxa5000 rtxa6000",
    (384, 18): "l20 l40 l40s w7900",
    (384, 19): "rtx3080ti",
    (384, 19.5): "rtx3090",
    (384, 20): "rtx6000ada rx7900xtx",
    (384, 21): "rtx4090",
    (512, 28): "rtx5090 rtxpro6000",
    (3072, 2.43): "a30",
    (4096, 1.754): "v100 v100-16gb v100-pcie",
    (4096, 2.4): "mi100",
    (4096, 3.2): "mi210 mi250 mi250x",
    (5120, 2.43): "a100-40gb",
    (5120, 3.024): "a100-80gb-pcie a800-pcie",
    (5120, 3.186): "a100-80gb a800 h100-pcie",
    (5120, 5.238): "h100 h800",
    (6016, 5.238): "h100-nvl",
    (6016, 6.402): "h200 h200-nvl",
    (6144, 5.238): "h20 gh200",
    (6144, 6.4): "gh200-144gb",
    (7680, 7.992): "b200",
    (8192, 5.2): "mi300a mi300x",
    (8192, 6): "mi325x",
    (8192, 8): "mi350x mi355x",
}
BUS = {key: bus for bus, keys in MEMORY.items() for key in keys.split()}


def test_every_card_is_there() -> None:
    assert WANTED <= catalog().keys()


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.key)
def test_peaks_are_sms_times_clock_times_operations(sheet: DataSheet) -> None:
    if sheet.key == "h20":  # limited to about 958 a clock, and float32 as printed
        assert all(
            peak < 132 / 78 * SHEETS_BY_KEY["h100"].peak_tflops[path] for path, peak in sheet.peak_tflops.items()
        )
        return
    per_clock = PER_CLOCK.get(sheet.arch, {}) | FULL_RATE.get(sheet.key, {})
    assert sheet.peak_tflops.keys() == per_clock.keys()
    for path, peak in sheet.peak_tflops.items():
        clock = sheet.boost_clock_mhz if path == "float32" else sheet.tensor_clock_mhz or sheet.boost_clock_mhz
        assert peak == pytest.approx(sheet.num_sms * clock * per_clock[path] * 1e-6, rel=0.015), path


@pytest.mark.parametrize("sheet", [SHEETS_BY_KEY[key] for key in BUS], ids=lambda sheet: sheet.key)
def test_bandwidth_is_the_bus_times_the_rate_of_a_pin(sheet: DataSheet) -> None:
    assert SHEETS_BY_KEY.keys() - BUS.keys() == {"gb200", "b300"}
    bits, gbit_per_s = BUS[sheet.key]
    rounded = 0.025 if sheet.key in ("mi325x", "mi350x", "mi355x") else 0.008  # printed as 6 and 8 TB/s
    assert sheet.bandwidth_gbps == pytest.approx(bits / 8 * gbit_per_s, rel=rounded)


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.key)
def test_compared_figures_exist(sheet: DataSheet) -> None:
    for text, names in sheet.compared.items():
        assert names and set(names) <= {*sheet.figures, "peak_tflops"}, text


def test_the_page_states_how_many_figures_were_compared() -> None:
    page = (Path(__file__).parents[3] / "docs/workbench/roofline.md").read_text(encoding="utf-8")
    compared = 0
    for sheet in SHEETS:
        named = {name for names in sheet.compared.values() for name in names}
        compared += sum(figure in named or figure.split(".")[0] in named for figure in sheet.figures)
    total = sum(len(sheet.figures) for sheet in SHEETS)
    assert f"{compared} of the {total} figures" in " ".join(page.split())
    assert {sheet.key for sheet in SHEETS if not sheet.compared} == {"jetson-orin"}


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.key)
def test_a_sheet_is_plausible_and_accounts_for_its_gaps(sheet: DataSheet) -> None:
    assert set(sheet.peak_tflops) <= set(PATHS)
    assert 100 < sheet.bandwidth_gbps < 10_000 and 8 <= sheet.memory_gb < 300 and 50 <= sheet.power_w <= 1500
    assert 2**20 <= sheet.l2_bytes <= 2**28 and sheet.registers_per_sm in (65536, 131072, 196608)
    assert sheet.smem_per_block_bytes <= sheet.smem_per_sm_bytes
    assert (sheet.tensor_clock_mhz or 0) <= sheet.boost_clock_mhz <= (sheet.max_clock_mhz or sheet.boost_clock_mhz)
    assert (sheet.max_clock_mhz is not None) == ("max_clock_mhz" in sheet.derived), "a highest clock has its source"
    for field in ("exponentials_per_clock_per_sm", "l2_gbps"):
        assert (getattr(sheet, field) is None) == (field in sheet.left_out), field
    missing = {"bfloat16", "tf32", "fp8", "int8"} - sheet.peak_tflops.keys()
    assert missing <= sheet.left_out.keys(), "a peak is missing without a reason"
    assert sheet.sources and all("(20" in source for source in sheet.sources), "a document has a title and a year"


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.key)
def test_sheets_and_architectures_agree(sheet: DataSheet) -> None:
    gpu = gpu_of(sheet)
    assert (gpu.arch, gpu.vendor, gpu.num_sms) == (sheet.arch, sheet.vendor, sheet.num_sms)
    if sheet.arch in NO_KERNEL_COMPILES:
        assert sheet.arch not in ARCHS
        return
    vendor, smem, registers = ARCHS[sheet.arch]
    assert (sheet.vendor, sheet.smem_per_block_bytes, gpu.registers_per_thread) == (vendor, smem, registers)
    by_arch = Gpu.for_arch(sheet.arch)
    same = {"name", "num_sms", "memory_bytes"}
    assert all(getattr(gpu, f.name) == getattr(by_arch, f.name) for f in dataclasses.fields(Gpu) if f.name not in same)


def test_no_two_cards_answer_to_one_name() -> None:
    for sheet in SHEETS:
        for name in (sheet.key, sheet.name, *sheet.aliases, *sheet.driver_names):
            assert find(name) is sheet, name


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.key)
def test_the_driver_s_name_finds_the_sheet_of_the_whole_card_only(sheet: DataSheet) -> None:
    gpu = gpu_of(sheet)
    assert data_sheet(gpu) is sheet
    assert data_sheet(replace(gpu, num_sms=gpu.num_sms // 2)) is None, "a partition has not the card's rates"


@pytest.mark.parametrize(
    "name", ["NVIDIA A16", "NVIDIA H100L", "NVIDIA GeForce RTX 3060 Laptop GPU", "NVIDIA B100", "sm_90", "CPU"]
)
def test_a_near_name_is_another_card(name: str) -> None:
    assert data_sheet(Gpu(name, "nvidia", "sm_90", 0, 255, 0, 32)) is None


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("h200", "NVIDIA H200"),
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("GeForce 4090 24GB", "NVIDIA GeForce RTX 4090"),
        ("A6000", "NVIDIA RTX A6000"),
        ("H100 SXM", "NVIDIA H100 80GB HBM3"),
        ("L40S 48GB", "NVIDIA L40S"),
        ("Tesla V100-SXM2-32GB", "Tesla V100-SXM2-32GB"),
        ("MI300X", "AMD Instinct MI300X"),
        ("AMD Instinct MI300X OAM", "AMD Instinct MI300X"),
        ("7900 XTX", "AMD Radeon RX 7900 XTX"),
        ("dgx spark", "NVIDIA GB10"),
    ],
)
def test_people_spell_as_they_like(typed: str, name: str) -> None:
    assert resolve(typed).name == name


def test_architectures_and_the_cpu_are_names_too() -> None:
    assert resolve("sm_90") == Gpu.for_arch("sm_90") and resolve("GFX942").arch == "gfx942" and resolve("cpu") is CPU
    assert {sheet.key for sheet in of_arch("sm_90")} == {
        *("h100", "h100-pcie", "h100-nvl", "h200", "h200-nvl", "h800", "h20", "gh200", "gh200-144gb")
    }


@pytest.mark.parametrize(
    ("name", "similar"),
    [("h300", ["h200", "h100"]), ("sm_99", ["sm_90", "sm_89"]), ("sm_75", ["t4", "rtx2080ti"]), ("no such card", [])],
)
def test_an_unknown_name_is_refused_with_similar_names_and_where_the_list_is(name: str, similar: list[str]) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is not known") as refused:
        resolve(name)
    said = str(refused.value)
    assert all(word in said for word in similar) and "card.toml" in said and "--gpu card.toml" not in said
    assert "warpwave explain --gpu all" in said or name == "sm_75"
    assert len(said) < 250


def test_exponentials_are_a_product_of_three() -> None:
    assert catalog()["h200"].exponentials_gops == pytest.approx(132 * 16 * 1.98)
    assert catalog()["mi355x"].exponentials_gops is None


def test_half_rate_cards_are_known_as_such() -> None:
    limited = {sheet.key for sheet in SHEETS if is_limited(sheet)}
    assert {"rtx3060", "rtx4090", "rtx5090", "a10g", "l40", "l20", "h20"} <= limited
    assert not limited & {"a10", "l4", "l40s", "rtxa6000", "rtxpro6000", "gb10", "h100", "a100-80gb", "mi300x"}
