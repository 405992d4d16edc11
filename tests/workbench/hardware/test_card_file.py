"""A card that the catalog does not have, described in a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from warpwave.workbench.cli import app
from warpwave.workbench.hardware import catalog
from warpwave.workbench.hardware.card_file import load
from warpwave.workbench.hardware.catalog import data_sheet, gpu_of, resolve

WHOLE = """
name = "Radeon RX 7800 XT"
arch = "gfx1100"
num_sms = 30
boost_clock_mhz = 2430
memory_gb = 16
bandwidth_gbps = 624
l2_kib = 4096
power_w = 263
[peak_tflops]
float16 = 74.7
float32 = 37.3
"""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    before = dict(catalog._given)
    yield
    catalog._given.clear()
    catalog._given.update(before)


def _written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_whole_sheet_takes_from_the_architecture_what_it_leaves_out(tmp_path: Path) -> None:
    sheet = load(_written(tmp_path, WHOLE))
    like = catalog.catalog()["rx7900xtx"]
    assert (sheet.key, sheet.vendor, sheet.l2_bytes) == ("mine", "amd", 4 << 20)
    for name in ("smem_per_block_bytes", "smem_per_sm_bytes", "registers_per_sm", "exponentials_per_clock_per_sm"):
        assert getattr(sheet, name) == getattr(like, name), name
    assert data_sheet(gpu_of(sheet)) is sheet


@pytest.mark.parametrize("key", ["l4", "h200", "a100-80gb", "mi300x", "mi100", "rtx4090"])
def test_missing_rates_follow_from_float16(key: str, tmp_path: Path) -> None:
    like = catalog.catalog()[key]
    needed = {path: like.peak_tflops[path] for path in ("float16", "float32")}
    rates = "".join(f"{path} = {peak}\n" for path, peak in needed.items())
    sheet = load(_written(tmp_path, f'like = "{key}"\n[peak_tflops]\n{rates}'))
    assert sheet.peak_tflops.keys() == like.peak_tflops.keys(), "a unit that the architecture lacks has no rate"
    for path, peak in like.peak_tflops.items():
        # Some cards of an architecture have less; a rate that is too high leaves the bound a bound.
        assert sheet.peak_tflops[path] >= 0.995 * peak, path
        assert path in ("int8", "fp8", "tf32") or sheet.peak_tflops[path] == pytest.approx(peak, rel=0.01)
    stated = load(_written(tmp_path, f'like = "{key}"\n[peak_tflops]\n{rates}int8 = 7\n'))
    assert stated.peak_tflops["int8"] == 7


@pytest.mark.parametrize("sheet", catalog.catalog().values(), ids=lambda sheet: sheet.key)
def test_what_follows_from_the_architecture_is_what_the_catalog_has(sheet: catalog.DataSheet, tmp_path: Path) -> None:
    if sheet.arch not in catalog.ARCHS:
        pytest.skip("no kernel compiles for it")
    peaks = "".join(f"{path} = {peak}\n" for path, peak in sheet.peak_tflops.items())
    read = load(
        _written(
            tmp_path,
            f'name = "a card"\narch = "{sheet.arch}"\nnum_sms = {sheet.num_sms}\nmemory_gb = 1\nl2_kib = 1\n'
            f"boost_clock_mhz = 1000\nbandwidth_gbps = 1\npower_w = 1\n[peak_tflops]\n{peaks}",
        )
    )
    assert read.registers_per_sm == sheet.registers_per_sm and read.smem_per_sm_bytes == sheet.smem_per_sm_bytes
    if sheet.key != "b300" and sheet.exponentials_per_clock_per_sm is not None:
        assert read.exponentials_per_clock_per_sm == sheet.exponentials_per_clock_per_sm


def test_a_sheet_like_another_changes_what_it_names(tmp_path: Path) -> None:
    path = _written(tmp_path, 'name = "an H100 with less"\nlike = "h100"\npower_w = 500\nmemory_gb = 64')
    gpu = resolve(str(path))
    sheet = data_sheet(gpu)
    assert sheet is not None and sheet.key == "mine" and sheet.power_w == 500
    assert sheet.peak_tflops == catalog.catalog()["h100"].peak_tflops and gpu.memory_bytes == 64 * 10**9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name =", "not TOML"),
        ('name = "x"', "arch, num_sms, boost_clock_mhz, .* l2_kib, .* missing"),
        ('name = "x"\nlike = "h100"\nl2_kib = -5', "l2_kib is -5; it must be a number above 0"),
        (WHOLE.replace("gfx1100", "gfx1"), "arch is 'gfx1'; it must be one of sm_80"),
        (WHOLE.replace("= 30", "= 30.5"), "num_sms is 30.5; it must be a whole number"),
        (WHOLE.replace("= 624", "= -1"), "bandwidth_gbps is -1; it must be a number above 0"),
        (WHOLE.replace("= 624", "= nan"), "bandwidth_gbps is nan"),
        (WHOLE.replace("= 624", "= true"), "bandwidth_gbps is True"),
        (WHOLE.replace("float32", "float99"), "peak_tflops is .* with float16 and float32"),
        (WHOLE.replace("74.7", "'many'"), "peak_tflops.float16 is 'many'"),
        (f"watts = 3\n{WHOLE}", "'watts' is no field"),
        ('like = "h300"', "like is 'h300', which is no card"),
    ],
)
def test_a_file_that_is_no_sheet_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        load(_written(tmp_path, text))
    assert "mine.toml" in str(raised.value)


def test_the_command_takes_a_file_alone_and_beside_others(tmp_path: Path) -> None:
    path = _written(tmp_path, WHOLE)
    alone = CliRunner().invoke(app, ["explain", "--gpu", str(path), "--seqlen-q", "512"])
    assert alone.exit_code == 0 and "Radeon RX 7800 XT (gfx1100), 30 WGPs" in alone.output
    both = CliRunner().invoke(app, ["explain", "--gpu", f"h200,{path}", "--seqlen-q", "512"])
    assert both.exit_code == 0 and "mine *" in both.output
    wrong = CliRunner().invoke(app, ["explain", "--gpu", str(tmp_path / "none.toml")])
    assert wrong.exit_code == 2 and "none.toml" in wrong.output
