"""Which unit, clock and card the shares of a table are of: small tables with one cause each, computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.workbench.hardware.test_card_file import forgotten
from warpwave.workbench.cli import app
from warpwave.workbench.diagnose.facts import Finding
from warpwave.workbench.diagnose.parse import Document, Given, TableError, load, parse
from warpwave.workbench.diagnose.rules import diagnose, main_cause
from warpwave.workbench.hardware import catalog

__all__ = ["forgotten"]  # fixture


def _table(card: str, sizes: str, rows: list[list[float]], kernel: dict[str, Any], **call: Any) -> Document:
    data = {
        "title": card,
        "gpu": card,
        "call": {"dtype": "float16", **call},
        "kernels": {"theirs": kernel},
        "tables": [{"name": "times", "columns": [sizes, "time_us"], "rows": rows}],
    }
    return parse(data, source="test")


def _first(document: Document) -> Finding:
    found = main_cause(document, "theirs")
    assert found is not None
    return found


def _kinds(document: Document) -> list[str]:
    return [finding.kind for finding in diagnose(document)]


def test_busy_sms_that_exceed_the_scalar_rate_use_matrix_units() -> None:
    # 22 blocks of 132: 11.2 TFLOP/s of the card are 67.1 of a full one, above the 66.9 of the scalar units.
    document = _table("h100", "seqlen", [[2816, 181.0]], {"block_m": 128, "block_n": 64}, heads=1, head_dim=64)
    rate = 4 * 2816**2 * 64 / 181.0 * 1e-6
    assert rate < 66.9 < rate * 132 / 22
    assert document.rows[0].kernel.unit == ""
    faster = _table("h100", "seqlen", [[2816, 20.0]], {"block_m": 128, "block_n": 64}, heads=1, head_dim=64)
    assert "contradiction" not in _kinds(faster)
    assert _first(faster).kind == "idle SMs"
    assert any("peak" in f.kind and "matrix peak" in f.text for f in diagnose(faster))


@pytest.mark.parametrize(("card", "unit"), [("rtx4070", "matrix"), ("v100", "scalar"), ("h100", "scalar")])
def test_a_rate_below_the_scalar_one_is_read_by_how_much_faster_matrix_units_are(card: str, unit: str) -> None:
    sheet = catalog.catalog()[card]
    rate = 0.9 * sheet.peak_tflops["float32"] * sheet.headroom
    time = 4 * 64 * 4096**2 * 64 / rate * 1e-6
    document = _table(card, "seqlen", [[4096, time]], {"block_m": 64, "block_n": 64}, heads=64, head_dim=64)
    assert any(f"of the {unit} peak" in f.text for f in diagnose(document))
    assert (_first(document).kind == "scalar unit") == (unit == "scalar")


KERNEL_64 = {"block_m": 64, "block_n": 64, "unit": "matrix"}


def _at_share(share: float, seqlen: int, heads: int, head_dim: int) -> float:
    return 4 * heads * seqlen**2 * head_dim / (share * 66.9) * 1e-6


def test_a_slow_kernel_on_matrix_units_at_the_scalar_rate_is_told_apart_where_rows_show_it() -> None:
    # 80 % of the scalar rate, 5.4 % of the matrix rate: the row alone does not tell which units it has.
    alone = [[4096, _at_share(0.8, 4096, 64, 64)]]
    unknown = _first(_table("h100", "seqlen", alone, KERNEL_64, heads=64, head_dim=64))
    assert unknown.kind == "scalar unit" and "do not tell the two apart" in unknown.text
    # A shorter row at 150 %: no scalar unit does that.
    faster = [[2048, _at_share(1.5, 2048, 64, 64)], *alone]
    found = _first(_table("h100", "seqlen", faster, KERNEL_64, heads=64, head_dim=64))
    assert found.kind == "latency" and "at 150% of that rate" in found.arithmetic
    # Twice the width for 1.2 times the time: the steps wait, and no unit's rate limits them.
    wider = [[64, _at_share(0.48, 4096, 64, 64)], [128, _at_share(0.8, 4096, 64, 128)]]
    found = _first(_table("h100", "head_dim", wider, KERNEL_64, heads=64, seqlen=4096))
    assert found.kind == "latency" and "takes 1.2 x the time, below 1.41 x" in found.arithmetic
    constant = [[64, _at_share(0.8, 4096, 64, 64)], [128, _at_share(0.8, 4096, 64, 128)]]
    assert _first(_table("h100", "head_dim", constant, KERNEL_64, heads=64, seqlen=4096)).kind == "scalar unit"
    # One warp on each of 64 SMs: a quarter of the scalar units at most.
    few = [[64, _at_share(0.8 * 64 / 132, 64, 64, 64)]]
    found = _first(_table("h100", "seqlen", few, KERNEL_64 | {"threads": 32}, heads=64, head_dim=64))
    assert found.kind == "few warps" and "(1) keep 25% of the scalar units busy" in found.arithmetic


@pytest.mark.parametrize("share", [0.55, 0.9])
def test_without_a_fact_about_the_unit_both_readings_are_stated(share: float) -> None:
    code, times = {"block_m": 64, "block_n": 64}, [[4096, _at_share(share, 4096, 64, 64)]]
    unknown = _first(_table("h100", "seqlen", times, code, heads=64, head_dim=64))
    assert unknown.kind == "scalar unit" and "do not tell the two apart" in unknown.text
    assert f"{share:.0%} of the scalar units' rate" in unknown.text and "by latency" in unknown.text
    # A fact about the unit leaves one reading.
    scalar = _first(_table("h100", "seqlen", times, code | {"unit": "scalar"}, heads=64, head_dim=64))
    assert scalar.kind == "scalar unit" and "the scalar unit binds" in scalar.text
    assert "by latency" not in scalar.text
    # So do float32 products, which the scalar units compute.
    exact = _first(_table("h100", "seqlen", times, code, heads=64, head_dim=64, dtype="float32"))
    assert exact.kind == "arithmetic"


def test_rows_that_exclude_the_scalar_units_leave_one_reading_of_an_unknown_unit() -> None:
    code = {"block_m": 64, "block_n": 64}
    # Twice the width for 1.2 times the time: no unit's rate limits that.
    wider = [[64, _at_share(0.48, 4096, 64, 64)], [128, _at_share(0.8, 4096, 64, 128)]]
    assert _first(_table("h100", "head_dim", wider, code, heads=64, seqlen=4096)).kind == "latency"
    few = [[64, _at_share(0.8 * 64 / 132, 64, 64, 64)]]
    assert _first(_table("h100", "seqlen", few, code | {"threads": 32}, heads=64, head_dim=64)).kind == "few warps"


def test_a_geforce_card_above_its_stated_clock_is_no_contradiction() -> None:
    # 185 TFLOP/s: above the 165.2 at 2520 MHz, below the 203.5 at 3105 MHz.
    time = 4 * 32 * 8192**2 * 128 / 185 * 1e-6
    document = _table("rtx4090", "seqlen", [[8192, time]], {"block_m": 128, "block_n": 64}, heads=32, head_dim=128)
    found = diagnose(document)
    assert "contradiction" not in [f.kind for f in found]
    assert "90.89%" in next(f.text for f in found if f.kind == "share of peak")
    assert document.device.clock.startswith("the highest clock, 3105 MHz")


def test_rdna_has_wgps_and_waves_of_32() -> None:
    kernel = {"block_m": 16, "block_n": 64, "threads": 32, "unit": "matrix"}
    document = _table("rx7900xtx", "seqlen", [[2048, 9000.0]], kernel, heads=16, head_dim=64)
    assert document.device.unit_name == "WGP"
    found = _first(document)
    assert found.kind == "few warps" and "a block of 32 threads is 1 warp" in found.text


def test_exponentials_bind_where_matrix_units_are_many_times_as_fast() -> None:
    # B200, head_dim 64: 64 x 8192^2 pairs at 0.8 of 4,689 Gexp/s; the products take a third of their rate.
    pairs = 64 * 8192**2
    time = pairs / (0.8 * 4689e3)
    document = _table("b200", "seqlen", [[8192, time]], {"block_m": 128, "block_n": 64, "unit": "matrix"}, heads=64,
                      head_dim=64)  # fmt: skip
    found = _first(document)
    assert found.kind == "exponentials" and "at 80%" in found.text
    assert f"{pairs * 1e-9:.4g} Gexp" in found.arithmetic


def test_a_softcap_is_a_second_special_function_of_a_pair() -> None:
    pairs = 32 * 8192**2
    time = 2 * pairs / (0.8 * 4182e3)
    kernel = {"block_m": 128, "block_n": 64, "unit": "matrix"}
    plain = _table("h100", "seqlen", [[8192, time]], kernel, heads=32, head_dim=64)
    capped = _table("h100", "seqlen", [[8192, time]], kernel, heads=32, head_dim=64, softcap=True)
    assert _first(plain).kind != "exponentials"
    assert _first(capped).kind == "exponentials" and "a tanh" in _first(capped).arithmetic


def test_causal_blocks_that_all_run_at_once_wait_for_the_longest() -> None:
    kernel = {"block_m": 128, "block_n": 64, "unit": "matrix"}
    rows = [[2816, 27.7]]
    causal = _table("h100", "seqlen", rows, kernel, heads=2, head_dim=64, causal=True)
    found = diagnose(causal)
    uneven = next(f for f in found if "the longest has" in f.text)
    assert uneven.is_cause and uneven.kind == "idle SMs" and uneven.factor == pytest.approx(2 * 2816 / 2817)
    # 2.031 GFLOP / 27.7 us / 989.4 / (44 / 132 busy) is 22.2 %; a busy SM works for half of the time.
    assert "44.4%" in next(f for f in found if f.kind in ("latency", "arithmetic")).arithmetic
    plain = _table("h100", "seqlen", rows, kernel, heads=2, head_dim=64)
    assert not any("the longest has" in f.text for f in diagnose(plain))


def test_tensors_that_neither_l2_nor_memory_can_supply_are_a_contradiction() -> None:
    """32 heads' K and V of 16 sequences are 4.29 GB, four times what an H100 moves in 400 us."""
    sizes = {"batch": 16, "heads": 32, "seqlen": 1, "head_dim": 128}
    found = diagnose(_table("h100", "seqlen_k", [[16384, 400.0]], {}, **sizes))
    assert not any(f.is_cause for f in found)
    wrong = next(f for f in found if f.kind == "contradiction")
    assert "heads_kv" in wrong.text and "/ 400 us = " in wrong.arithmetic and "GB/s > 3,352 GB/s" in wrong.arithmetic
    assert _first(_table("h100", "seqlen_k", [[16384, 400.0]], {}, **sizes, heads_kv=8)).kind == "memory"


def test_tensors_that_come_from_l2_have_no_share_of_memorys_bandwidth() -> None:
    found = _first(_table("h100", "seqlen_k", [[2048, 8.0]], {}, heads=32, seqlen=1, head_dim=128))
    assert found.kind == "latency" and "the bandwidth of L2 may bind" in found.text
    assert "GB/s > 3,352 GB/s, so L2 holds a part" in found.arithmetic and "0.00%" not in found.arithmetic


def test_the_full_card_of_a_table_does_not_depend_on_the_order_of_its_rows() -> None:
    rows = [[8192, 9000.0], [1024, 200.0], [2048, 600.0]]
    kernel = {"block_m": 64, "block_n": 64, "unit": "matrix"}
    said = [
        next(f.text for f in diagnose(_table("l4", "seqlen", order, kernel, heads=16, head_dim=64)) if "fill" in f.kind)
        for order in (rows, rows[::-1])
    ]
    assert said[0] == said[1] and "256 blocks fill 58 SMs" in said[0]


def test_times_in_mixed_units_have_no_fixed_cost() -> None:
    """A time that was written in the wrong unit makes the least squares of relative errors singular."""
    rows = [[512, 1.2e6], [1024, 0.9e6], [2048, 0.5]]
    document = _table("l4", "seqlen", rows, {"block_m": 64, "block_n": 64}, heads=16, head_dim=64)
    assert "launch" not in _kinds(document) and "contradiction" in _kinds(document)


def test_a_small_size_that_leaves_sms_idle_is_no_cause_if_the_largest_fills_the_card() -> None:
    rows = [[128, 20.0], [4096, 9000.0]]
    document = _table("l4", "seqlen", rows, {"block_m": 64, "block_n": 64, "unit": "matrix"}, heads=16, head_dim=64)
    idle = next(f for f in diagnose(document) if f.kind == "idle SMs")
    assert not idle.is_cause and "32 blocks on 58 SMs" in idle.text


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_a_long_cost_that_more_steps_do_not_change_is_fixed(scale: float) -> None:
    rows = [[64, 38.3 * scale], [128, 39.2 * scale], [256, 41.9 * scale]]
    document = _table("h20", "seqlen", rows, {"block_m": 64, "block_n": 32}, heads=8, head_dim=128)
    assert _first(document).kind == "launch"


def test_fp8_has_one_byte_and_its_own_rate() -> None:
    kernel = {"block_m": 128, "block_n": 64, "unit": "matrix"}
    row = [[8192, 4 * 32 * 8192**2 * 128 / 1000 * 1e-6]]
    on_h100 = _table("h100", "seqlen", row, kernel, heads=32, head_dim=128, dtype="fp8")
    on_a100 = _table("a100-80gb", "seqlen", [[8192, 4 * row[0][1]]], kernel, heads=32, head_dim=128, dtype="fp8")
    assert "50.53% of the matrix peak" in next(f.text for f in diagnose(on_h100) if f.kind == "share of peak")
    assert "80.13% of the matrix peak" in next(f.text for f in diagnose(on_a100) if f.kind == "share of peak")
    assert "x 128 x 1 = 2.097 MB a head" in next(f.arithmetic for f in diagnose(on_h100) if f.kind == "working set")


def test_the_option_takes_the_file_of_a_card_and_a_table_does_not(tmp_path: Path) -> None:
    card, table = tmp_path / "mine.toml", tmp_path / "times.csv"
    card.write_text('name = "Mine"\nlike = "h100"\nnum_sms = 100\nbandwidth_gbps = 2020\n', encoding="utf-8")
    table.write_text("seqlen,ours (ms)\n1024,1.1\n4096,17\n", encoding="utf-8")
    document = load(table, Given(gpu=str(card)))
    assert (document.device.name, document.device.num_sms) == ("Mine", (100, 100))
    assert document.device.bandwidth_gbps == 2020
    said = CliRunner().invoke(app, ["explain", "--from-table", str(table), "--gpu", str(tmp_path / "none.toml")])
    assert said.exit_code != 0 and not isinstance(said.exception, TableError)
    with pytest.raises(TableError, match=r"none\.toml cannot be read"):
        load(table, Given(gpu=str(tmp_path / "none.toml")))
    with pytest.raises(TableError, match="--gpu 'h1000' is not in the catalog"):
        load(table, Given(gpu="h1000"))
    data = {"title": "t", "gpu": str(card), "tables": [{"columns": ["seqlen", "time_us"], "rows": [[1, 2]]}]}
    with pytest.raises(TableError, match=r"is not in the catalog; .*--gpu also takes a card's file"):
        parse(data, source="s")
