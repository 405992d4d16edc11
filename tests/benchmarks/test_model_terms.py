"""Terms of the model that sweeps of the H200 taught, each by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.calibration_points import problem_of
from warpwave.gpu import Gpu
from warpwave.kernels import flash_fwd, large_head_dim, split_kv, three_kernel
from warpwave.kernels.cost import ODD_ROWS, WARP_US, line_bytes, merging, waits_for_memory
from warpwave.kernels.ladder import tiled
from warpwave.kernels.three_kernel.library import tiles_of_product
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.hardware.catalog import find, gpu_of
from warpwave.workbench.model.calibration import UNCALIBRATED, calibrations, machine, nearest
from warpwave.workbench.model.predict import predict
from warpwave.workbench.model.schedule import companies
from warpwave.workbench.model.steps import EVENTS_US, FAR_US, Steps

_found = find("h200")
assert _found is not None
SHEET = _found
H200: Gpu = gpu_of(SHEET)
WHERE = machine(SHEET, "split_kv", "few rows")


def decode(**changes: Any) -> AttentionProblem:
    problem = problem_of(128, 16, 4000, 16, "bfloat16", None)
    return replace(problem, seqlen_q=1, num_heads_kv=2, page_size=64, **changes)


def time_us(problem: AttentionProblem, kernel: Any, **options: Any) -> float:
    found = predict(problem, kernel, kernel.configs(problem, H200)[0], H200, **options)
    assert found is not None
    return found.time_us


def test_a_call_behind_a_flush_pays_for_what_the_flush_wrote() -> None:
    """31.8 us between events, 21.9 in a graph over cold sets of inputs."""
    events, graph = time_us(decode(), split_kv), time_us(decode(), split_kv, graph=True)
    assert 5 < events - graph < 13
    # What arithmetic binds hides it, all but the events themselves.
    long = problem_of(128, 4, 4096, 16, "bfloat16", Causal())
    assert time_us(long, flash_fwd) - time_us(long, flash_fwd, graph=True) == pytest.approx(EVENTS_US, abs=0.5)


def test_bytes_told_of_a_call_are_its_own() -> None:
    p = predict(decode(), split_kv, split_kv.configs(decode(), H200)[0], H200)
    assert p is not None
    memory = next(level for level in p.traffic if level.level == "memory")
    assert memory.redundancy < 1.1, "lines that somebody else left in L2 are not counted"


def test_merging_grows_with_rows_and_parts_and_hardly_with_bytes() -> None:
    def us(rows: int, parts: int, size: int) -> float:
        tiny = replace(decode(), batch=1, seqlen_k=64)  # whose own bound is below any merge
        cost = merging(rows, parts, size, size)
        walk = Steps(tiny, split_kv, split_kv.configs(tiny, H200)[0], H200, cost, WHERE, True, graph=True)
        return walk.time_us()

    first = us(1_320, 2, 10_000)
    assert us(13_200, 2, 10_000) - first == pytest.approx(90 * 0.16, rel=0.1)
    assert us(13_200, 8, 10_000) > 1.8 * us(13_200, 2, 10_000)
    assert us(13_200, 8, 1_000_000) < 1.1 * us(13_200, 8, 10_000)


def test_blocks_that_begin_at_once_keep_company_in_their_order() -> None:
    # Two sequences of two heads, of three tiles and of one, in a grid of three tiles a head, on four SMs.
    order = (((5, 5, 5), 2), ((2,), 2))
    assert companies(order, 12, 4, 3) == ((5, 5), (5, 5, 2), (5, 2), (5,))
    assert companies(order, 12, 4, 2) == (), "they do not all begin at once"
    assert companies((), 12, 4, 3) == (), "nobody said in what order they come"


def test_rows_that_lie_across_lines_are_read_as_whole_lines() -> None:
    assert [line_bytes(2 * width) for width in (64, 128, 256)] == [128, 256, 512]
    assert line_bytes(32) == 128, "16 columns are a quarter of a line"
    # 80 columns begin at 0, 32, 64 or 96 bytes: a box of 128 in one line or two, and one of 32.
    assert line_bytes(160) == 128 * (1 + 3 * 2 + 4) // 4


def test_two_stages_wait_for_memory_in_each_step_and_three_hardly() -> None:
    assert waits_for_memory(2) == 1 and waits_for_memory(3) == 0.25 and waits_for_memory(1) == 1
    problem = problem_of(256, 1, 1536, 3, "bfloat16", None)
    config = flash_fwd.configs(problem, H200)[0]
    assert config.num_stages == 2
    cold, hot = (predict(problem, flash_fwd, config, H200, graph=True, hot=hot) for hot in (False, True))
    assert cold is not None and hot is not None
    assert cold.time_us - hot.time_us == pytest.approx(FAR_US * 1536 / config.block_n, rel=0.3)


def test_torch_s_products_have_tiles_that_even_out_rounds() -> None:
    assert tiles_of_product(6, 768, 768, 132, False) == 132
    assert tiles_of_product(24, 768, 768, 132, False) == 3 * 132, "14 million scores in tiles of 192 x 192 at most"
    assert tiles_of_product(4, 1, 1200, 132, False) == 4 * 19, "8 rows are the least, of 64 columns"
    assert tiles_of_product(3, 60, 2500, 132, True) == 3 * 40


def test_small_blocks_take_their_sm_as_long_as_they_take_to_begin() -> None:
    problem = problem_of(64, 1, 768, 24, "bfloat16", None)  # 18,432 rows: 22 us of softmax, 12.5 of scaling
    config = next(c for c in three_kernel.configs(problem, H200) if c.scores == c.values == "library")
    cost = three_kernel.cost(problem, H200, config)
    where = replace(WHERE, constants=UNCALIBRATED)
    walk = Steps(problem, three_kernel, config, H200, cost, where, True, graph=True)
    softmax, scaling = (walk._launch(part, slots, 99) for _, part, slots in (walk.parts[1], walk.parts[3]))
    assert config.softmax_rows == 1
    assert softmax == pytest.approx(config.softmax_warps * WARP_US * 18_432 / 132, rel=0.2)
    assert scaling == pytest.approx(WARP_US * 18_432 / 132, rel=0.1)


def test_a_card_of_the_same_chip_has_another_s_constants_and_bars_of_its_own() -> None:
    sheet, lent = find("h100"), calibrations()["h100"]
    assert sheet is not None and lent.constants_of == "h200" and not lent.kernels
    assert machine(sheet, "split_kv", "few rows").constants == WHERE.constants
    assert lent.residuals != calibrations()["h200"].residuals and lent.residuals["all"].points == 86


def test_a_launch_begun_ahead_is_shorter() -> None:
    problem = replace(decode(), page_size=0)
    config = split_kv.configs(problem, H200)[0]
    assert config.launched_ahead
    ahead, behind = (
        predict(problem, split_kv, replace(config, launched_ahead=a), H200, hot=True, graph=True) for a in (True, False)
    )
    assert ahead is not None and behind is not None and ahead.time_us < behind.time_us


def test_rows_that_are_no_multiple_of_32_bytes_have_a_loop_of_their_own() -> None:
    for kernel in (flash_fwd, large_head_dim, tiled):
        loops = []
        for head_dim in (72, 80):
            problem = problem_of(head_dim, 2, 1000, 8, "bfloat16", None)
            loops.append(kernel.cost(problem, H200, kernel.configs(problem, H200)[0]).loop)
        assert loops[0] == ODD_ROWS and loops[1] == "", kernel.NAME


def test_a_loop_that_nobody_measured_is_predicted_by_the_nearest() -> None:
    known = {"split_kv": 1, "split_kv few rows": 2}
    assert nearest(known, "split_kv few rows pages") == "split_kv few rows"
    assert nearest(known, "split_kv many rows") == "split_kv"
    assert nearest(known, "naive one query") == "naive"
    assert SHEET is not None
    shipped = calibrations()["h200"].kernels
    assert machine(SHEET, "split_kv", "few rows never seen").constants == shipped["split_kv few rows"]
    assert machine(SHEET, "nobody").constants == UNCALIBRATED
