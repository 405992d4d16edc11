"""Ceilings: what measures them computes what it says, they are kept whole, and a bad file does no harm."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warpwave.gpu import CPU, Gpu
from warpwave.runtime.triton_or_stub import INTERPRETED
from warpwave.workbench.bench.timing import Samples
from warpwave.workbench.hardware import measure
from warpwave.workbench.hardware.catalog import find, gpu_of
from warpwave.workbench.hardware.ceilings_table import table
from warpwave.workbench.hardware.measure import Ceilings, cache_file, load, read, shipped, store, text

H200 = gpu_of(find("h200"))  # type: ignore[arg-type]
CEILINGS = Ceilings(
    gpu="NVIDIA H200",
    arch="sm_90",
    date="2026-11-21T13:00:00+00:00",
    copy_gbps=4270.0,
    read_gbps=4480.0,
    product_tflops={"bfloat16": 800.0, "tf32": 400.0},
    sustained_tflops={"bfloat16": 675.0},
    exponentials_gops=4000.0,
    launch_us=1.5,
    environment={"gpu": {"l2_bytes": 62914560, "sm_count": 132}, "product_sizes": {"bfloat16": 8192}},
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


# Keeping --------------------------------------------------------------------------------------------------------------


def test_what_is_stored_is_loaded() -> None:
    assert load(H200) is None
    path = store(CEILINGS)
    assert load(H200) == CEILINGS
    newer = replace(CEILINGS, date="2026-12-01T00:00:00+00:00")
    assert store(newer) == path and load(H200) == newer
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no temporary file stays behind"


def test_devices_do_not_share_a_file(cache: Path) -> None:
    store(CEILINGS)
    assert load(Gpu.for_arch("sm_90")) is None and load(gpu_of(find("h100"))) is None  # type: ignore[arg-type]
    assert cache_file("a b", "sm_90") != cache_file("a b", "sm_80")
    assert cache_file("x", "y").is_relative_to(cache)


def test_without_xdg_the_cache_is_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(cache_file("NVIDIA H200", "sm_90")) == "/home/someone/.cache/warpwave/ceilings/sm-90-nvidia-h200.json"


def test_a_write_that_fails_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(CEILINGS)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        store(replace(CEILINGS, date="2027-01-01"))
    assert load(H200) == CEILINGS
    assert len(list(path.parent.iterdir())) == 1


DAMAGE: dict[str, Any] = {
    "cut off": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "not JSON": lambda text: "GPU go brrr",
    "a list": lambda text: "[1, 2]",
    "another schema": lambda text: text.replace("ceilings 1", "ceilings 99"),
    "a negative rate": lambda text: text.replace("4270.0", "-1.0"),
    "a rate in words": lambda text: text.replace("4270.0", '"fast"'),
    "a rate that is no number": lambda text: text.replace("4270.0", "NaN"),
    "no name": lambda text: text.replace('"gpu": "NVIDIA H200"', '"gpu": null'),
    "a foreign field": lambda text: text.replace('"date"', '"color": "green", "date"'),
    "a foreign table": lambda text: text.replace('"bfloat16": 675.0', '"bfloat16": []'),
    "binary": lambda text: "\x00\x01",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_ignored(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = store(CEILINGS)
    path.write_text(DAMAGE[damage](path.read_text()))
    with caplog.at_level(logging.WARNING, "warpwave"):
        assert load(H200) is None
    assert str(path) in caplog.text and "warpwave roof" in caplog.text
    with pytest.raises(ValueError):
        read(path)


def test_a_file_of_another_device_is_named_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    path = store(CEILINGS)
    path.write_text(path.read_text().replace("NVIDIA H200", "NVIDIA B200"))
    assert load(H200) is None
    assert "it belongs to NVIDIA B200" in caplog.text


def test_a_file_that_cannot_be_read_is_named_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    path = store(CEILINGS)
    path.unlink()
    path.mkdir()
    assert load(H200) is None and str(path) in caplog.text


def test_shipped_ceilings_are_of_the_very_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SHIPPED", tmp_path)
    assert shipped(H200) is None
    (tmp_path / "h200.json").write_text(text(CEILINGS))
    assert shipped(H200) == CEILINGS
    assert shipped(replace(H200, name="NVIDIA H100 80GB HBM3")) is None


def test_a_damaged_shipped_file_is_named_and_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(measure, "SHIPPED", tmp_path)
    (tmp_path / "a.json").write_text('{"gpu": 7}')
    (tmp_path / "b.json").write_text(text(CEILINGS))
    assert shipped(H200) == CEILINGS
    assert "a.json is no file of ceilings" in caplog.text


def test_every_shipped_file_is_readable_and_below_the_data_sheet() -> None:
    for path in measure.SHIPPED.glob("*.json"):
        ceilings = read(path)
        sheet = find(ceilings.gpu)
        assert sheet is not None and shipped(gpu_of(sheet)) is not None
        assert all(rate <= sheet.peak_tflops[name] for name, rate in ceilings.product_tflops.items())
        assert (ceilings.read_gbps or 0) <= sheet.bandwidth_gbps


# Measuring ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small products and buffers: the figures mean nothing, the way to them is the same."""
    monkeypatch.setattr(measure, "CPU_STREAM_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "CPU_PRODUCT_US", 1.0)
    yield


@pytest.mark.usefixtures("quick")
def test_a_cpu_is_measured() -> None:
    said: list[str] = []
    ceilings = measure.measure("cpu", say=said.append)
    assert ceilings.arch == "cpu" and f"{torch.get_num_threads()} threads" in ceilings.gpu
    assert ceilings.product_tflops.keys() == {"float32", "bfloat16", "float16"}
    figures = [ceilings.copy_gbps, ceilings.read_gbps, ceilings.exponentials_gops, ceilings.launch_us]
    assert all(figure is not None and figure > 0 for figure in figures)
    assert ceilings.l2_gbps is None and not ceilings.sustained_tflops and ceilings.host_call_us is None
    assert "copy" in said and "exponentials" in said
    store(ceilings)
    assert load(CPU) == ceilings
    assert "read" in table(ceilings, None) and "TFLOP/s" in table(ceilings, None)


def test_rates_follow_from_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything takes 1000 us here, so every figure can be worked out by hand."""
    samples = Samples((1000.0, 1500.0, 1200.0), "host clock", 3, 1, False)

    def timed(call: Any, device: torch.device, **_: Any) -> Samples:
        call()
        return samples

    monkeypatch.setattr(measure, "_time", timed)
    monkeypatch.setattr(measure, "_product_size", lambda *_: 64)
    monkeypatch.setattr(measure, "CPU_STREAM_BYTES", 1 << 20)
    ceilings = measure.measure("cpu")
    assert ceilings.product_tflops["float32"] == pytest.approx(2 * 64**3 / 1e-3 * 1e-12)
    assert ceilings.copy_gbps == pytest.approx(2 * 2**20 / 1e-3 * 1e-9)
    assert ceilings.read_gbps == pytest.approx(2**20 / 1e-3 * 1e-9)
    assert ceilings.exponentials_gops == pytest.approx(2**18 / 1e-3 * 1e-9)
    assert ceilings.launch_us == 1200.0


@pytest.mark.parametrize(("trial_us", "expected"), [(1.0, 2048), (5000.0, 1024), (1e6, 512)])
def test_the_product_is_as_large_as_time_allows(
    monkeypatch: pytest.MonkeyPatch, trial_us: float, expected: int
) -> None:
    samples = Samples((trial_us,), "host clock", 3, 1, False)
    monkeypatch.setattr(measure, "_time", lambda *_, **__: samples)
    cpu = torch.device("cpu")
    assert measure._product_size(cpu, torch.float32, "float32", 2048, 80_000.0) == expected


def test_the_process_s_precision_comes_back() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with measure._products_in("tf32"):
        assert matmul.fp32_precision == "tf32"
    with measure._products_in("float32"):
        assert matmul.fp32_precision == "ieee"
    assert matmul.fp32_precision == before


@pytest.mark.parametrize(
    ("arch", "paths"),
    [
        ("sm_90", {"float16", "bfloat16", "tf32", "float32"}),
        ("sm_75", {"float16", "float32"}),
        ("gfx942", {"float16", "bfloat16", "float32_matrix"}),
        ("gfx1100", {"float16", "bfloat16", "float32"}),
    ],
)
def test_products_are_those_the_card_has(arch: str, paths: set[str]) -> None:
    gpu = gpu_of(find("t4")) if arch == "sm_75" else Gpu.for_arch(arch)  # type: ignore[arg-type]
    assert measure._product_paths(gpu).keys() == paths


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter (TRITON_INTERPRET=1) or a GPU")
@pytest.mark.parametrize("passes", [1, 3])
def test_the_reader_reads_everything_in_every_pass(passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    made: list[torch.Tensor] = []
    empty = torch.empty

    def kept(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(empty(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(torch, "empty", kept)
    x = torch.randint(0, 5, (11 * 4096 + 17,)).float()
    call, count = measure._reader(torch.device("cpu"), x, passes, block=1024)
    call()
    read = 5 * 8 * 1024  # whole rounds of the one SM's eight programs
    assert count == 4 * read * passes
    assert float(made[0].sum()) == passes * float(x[:read].sum())


@pytest.mark.parametrize(
    ("sms", "l2", "block", "each_sm"),
    [(132, 60 << 20, 4096, 8), (28, 3 << 20, 1024, 8), (304, 4 << 20, 1024, 1), (108, 40 << 20, 2048, 8)],
)
def test_what_is_read_from_l2_fits_it(
    sms: int, l2: int, block: int, each_sm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(multi_processor_count=sms, L2_cache_size=l2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    seen: list[tuple[int, int, int]] = []

    def reader(device: torch.device, x: torch.Tensor, passes: int, block: int, each_sm: int) -> tuple[Any, int]:
        seen.append((x.numel() * 4, block, each_sm))
        return None, 0

    monkeypatch.setattr(measure, "_reader", reader)
    assert measure._l2_reader(torch.device("cpu")) is not None
    ((size, used_block, used_each),) = seen
    assert size <= l2 / 3 and size % (4 * used_block * used_each * sms) == 0
    assert (used_block, used_each) == (block, each_sm)
    properties.L2_cache_size = 0
    assert measure._l2_reader(torch.device("cpu")) is None


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter (TRITON_INTERPRET=1) or a GPU")
def test_exponentials_are_computed_one_after_the_other() -> None:
    from warpwave.workbench.hardware.probes import exponentials_kernel

    out = torch.empty(128)
    exponentials_kernel[(2,)](out, 5, BLOCK=64)
    x = torch.arange(128) * 1e-6
    for _ in range(5):
        x = torch.exp2(-x)
    torch.testing.assert_close(out, x)


@pytest.mark.gpu
def test_a_gpu_is_measured_and_stays_below_its_data_sheet() -> None:
    ceilings = measure.measure("cuda")
    sheet = find(ceilings.gpu)
    for figure in ("copy_gbps", "read_gbps", "l2_gbps", "exponentials_gops", "launch_us", "host_call_us"):
        assert getattr(ceilings, figure) > 0, figure
    assert ceilings.sustained_tflops
    if sheet is not None:
        assert ceilings.read_gbps is not None and ceilings.exponentials_gops is not None
        assert ceilings.read_gbps <= sheet.bandwidth_gbps
        assert sheet.exponentials_gops is None or ceilings.exponentials_gops <= sheet.exponentials_gops
        assert all(rate <= sheet.peak_tflops[path] for path, rate in ceilings.product_tflops.items())


# Showing --------------------------------------------------------------------------------------------------------------


def test_the_table_has_the_share_of_the_data_sheet() -> None:
    text = table(CEILINGS, find("h200"))
    assert "product bfloat16, 8192^3" in text
    line = next(line for line in text.splitlines() if line.startswith("product bfloat16"))
    assert line.split()[-1] == f"{800 / 989.4:.0%}"
    assert "L2 read" not in text, "what was not measured has no line"


def test_a_cache_that_cannot_be_written_loses_no_figures(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from warpwave.workbench.hardware import ceilings_table

    (cache / "warpwave").write_text("a file where a folder should be")
    monkeypatch.setattr(measure, "measure", lambda device, say: CEILINGS)
    assert ceilings_table.run("cpu", cache / "out.json", True) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == asdict(CEILINGS)
    assert "not stored" in shown.err
    assert read(cache / "out.json") == CEILINGS
    assert stat.S_ISREG((cache / "out.json").stat().st_mode)
