"""Round constants follow from a card's sheet and family, and are an H200's own where nothing else is known."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest

from warpwave.kernels import flash_fwd
from warpwave.problem import AttentionProblem
from warpwave.workbench.hardware.catalog import catalog, gpu_of
from warpwave.workbench.model import published
from warpwave.workbench.model.calibration import UNCALIBRATED, Machine, calibrations, machine_of_round_constants
from warpwave.workbench.model.families import constants, is_fitted, is_lent, power_for_products
from warpwave.workbench.model.predict import predict

CARDS = catalog()


def test_an_h200_has_the_round_constants_that_its_measurements_judge() -> None:
    assert constants(CARDS["h200"]) == UNCALIBRATED


def test_the_round_constants_of_a_calibrated_card_are_not_its_fitted_ones() -> None:
    shipped = calibrations()["h200"]
    for kernel in ("hopper/flash_fwd", "hopper/flash_bwd", "eager backward"):
        rough = machine_of_round_constants(CARDS["h200"], kernel, shipped)
        assert replace(rough.constants, host_us=0.0) == UNCALIBRATED and not rough.fitted
        assert rough.calibration == shipped and (rough.constants.host_us > 0) == (kernel == "eager backward")


def test_power_follows_the_watts_for_a_product() -> None:
    h200, pcie = CARDS["h200"], CARDS["h100-pcie"]
    assert power_for_products(h200) == pytest.approx(1.0)
    assert power_for_products(pcie) == pytest.approx(350 / 756 / (700 / 989.4))
    assert constants(pcie).power == pytest.approx(UNCALIBRATED.power * power_for_products(pcie))
    assert power_for_products(replace(h200, power_w=350)) == pytest.approx(0.5)
    for key in ("rtx3060", "rtx3090", "rtx4090", "rtx5090"):
        assert constants(CARDS[key]).power > 1.5, "no power limit at half rate"


def test_geforce_cards_run_above_their_stated_clock() -> None:
    fast = constants(CARDS["rtx4090"])
    assert fast.matrix["other"] == pytest.approx(0.97 * (1 + 0.4 * (3105 / 2520 - 1)))
    assert fast.matrix["other"] < CARDS["rtx4090"].headroom, "less than the highest clock, which bounds"
    assert constants(CARDS["l40"]).matrix["other"] == 0.97 and constants(CARDS["l40s"]).matrix["other"] == 0.8


def test_a_hopper_card_has_the_constants_of_an_h200_at_its_own_power() -> None:
    lent, own = constants(CARDS["h100-pcie"], "flash_fwd"), calibrations()["h200"].kernels["flash_fwd"]
    assert lent == replace(own, power=own.power * power_for_products(CARDS["h100-pcie"]))
    assert is_lent(CARDS["gh200"], "hopper/flash_fwd") and not is_lent(CARDS["h20"], "hopper/flash_fwd")
    assert not is_lent(CARDS["b200"], "flash_fwd") and not is_lent(CARDS["h200"], "nobody")


@pytest.mark.parametrize(("card", "family"), [("mi300x", "gfx942"), ("mi100", "gfx90a"), ("rx9070xt", "gfx1100")])
def test_amd_cards_take_what_was_fitted_to_their_family(card: str, family: str) -> None:
    values = published.families()[family].values
    found = constants(CARDS[card], "flash_fwd")
    assert found == replace(UNCALIBRATED, power=math.inf, serial=values["serial"], fill_us=values["fill_us"])
    assert is_fitted(CARDS[card], "flash_fwd") and not is_fitted(CARDS[card], "three_kernel")
    assert constants(CARDS[card], "three_kernel").serial == 0


def test_blocks_that_hide_nothing_of_each_other_take_their_time_one_after_the_other() -> None:
    problem = AttentionProblem(
        batch=8, seqlen_q=8192, seqlen_k=8192, num_heads_q=32, num_heads_kv=32, head_dim=64, head_dim_v=64,
        dtype="bfloat16", softmax_scale=0.125,
    )  # fmt: skip
    sheet = CARDS["mi300x"]
    gpu, config = gpu_of(sheet), flash_fwd.configs(problem, gpu_of(sheet))[0]

    def time(serial: float) -> float:
        of = Machine(sheet, replace(UNCALIBRATED, power=math.inf, step_us=20.0, serial=serial), None, False)
        found = predict(problem, flash_fwd, config, gpu, of=of)
        assert found is not None and found.blocks_per_sm == 4
        return found.time_us

    assert time(1.0) == pytest.approx(4 * time(0.0), rel=0.02), "waits of 20 us a step are all of the time"
    assert time(0.0) < time(0.5) < time(1.0)


def test_the_model_imports_no_torch() -> None:
    """Loading torch takes seconds, and a prediction needs none of it."""
    code = "import sys, warpwave.workbench.model.predict; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
