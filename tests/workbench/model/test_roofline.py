"""Lower bounds: arithmetic worked out by hand, and the laws that any bound obeys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from warpwave.gpu import CPU, Gpu
from warpwave.kernels import flash_fwd
from warpwave.kernels.cost import Cost
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.explain.explanation import explain
from warpwave.workbench.hardware.catalog import catalog, find, gpu_of
from warpwave.workbench.hardware.measure import Ceilings
from warpwave.workbench.model.roofline import (
    PER_US,
    Rates,
    busy_share,
    byte,
    data_sheet_rates,
    figure,
    flop,
    measured_rates,
    product_path,
    roofline,
    tensor_bytes,
    us,
)

PLAIN = AttentionProblem(
    batch=1, seqlen_q=16384, seqlen_k=16384, num_heads_q=16, num_heads_kv=16, head_dim=128, head_dim_v=128,
    dtype="bfloat16", softmax_scale=128**-0.5,
)  # fmt: skip
DECODE = replace(PLAIN, seqlen_q=1, seqlen_k=8192, num_heads_q=32, num_heads_kv=8)


def sheet(key: str) -> tuple[Gpu, Rates]:
    found = find(key)
    assert found is not None
    return gpu_of(found), data_sheet_rates(found)


H200, H200_RATES = sheet("h200")


# By hand --------------------------------------------------------------------------------------------------------------


def test_prefill_on_an_h200_by_hand() -> None:
    line = roofline(PLAIN, H200_RATES, gpu=H200)
    pairs = 16 * 16384 * 16384
    times = {bound.resource: bound.time_us for bound in line.bounds}
    assert times == {
        "tensor cores": pytest.approx(2 * pairs * 256 / 989.4e12 * 1e6),
        "exponentials": pytest.approx(pairs / (132 * 16 * 1.98e9) * 1e6),
        "memory": pytest.approx(4 * 16384 * 16 * 128 * 2 / 4.8e12 * 1e6),
    }
    assert line.binding is not None and line.binding.resource == "tensor cores" and line.path == "bfloat16"
    assert line.time_us == pytest.approx(2222.6, abs=0.1)
    assert line.binding.arithmetic == (
        "2 x 1 x 16 heads x 16384 x 16384 pairs x (128 + 128) = 2.199 TFLOP / 989.4 TFLOP/s (bfloat16) = 2,223 us"
    )


def test_decode_on_an_h200_by_hand() -> None:
    line = roofline(DECODE, H200_RATES, gpu=H200)
    assert line.binding is not None and line.binding.resource == "memory"
    kv, q_and_out = 2 * 8192 * 8 * 128 * 2, 2 * 32 * 128 * 2
    assert line.time_us == pytest.approx((kv + q_and_out) / 4.8e12 * 1e6)
    assert line.binding.arithmetic.startswith(
        "33.57 MB (q 8.192 kB, k 16.78 MB, v 16.78 MB, out 8.192 kB) / 4,800 GB/s"
    )


@pytest.mark.parametrize(
    ("card", "precision", "path", "useful_tflops", "resource"),
    [
        ("h200", "default", "float16", 989.4 / 3, "tensor cores"),
        ("h200", "tf32x3", "float16", 989.4 / 3, "tensor cores"),  # as many bits, at twice the rate
        ("h200", "tf32", "float16", 989.4, "tensor cores"),
        ("h200", "bf16x6", "bfloat16", 989.4 / 6, "tensor cores"),
        ("h200", "ieee", "float32", 66.9, "float32 units"),
        ("rtx3060", "default", "float32", 12.7 * 2100 / 1777, "float32 units"),  # a third of its tf32 is less
        ("rtx3060", "tf32x3", "float32", 12.7 * 2100 / 1777, "float32 units"),
        ("mi210", "default", "float16", 181 / 3, "tensor cores"),
        ("mi210", "ieee", "float32_matrix", 45.3, "tensor cores"),
        ("mi210", "tf32", "float16", 181, "tensor cores"),  # there is no tf32, and float16 has as many bits
        ("t4", "default", "float16", 65 / 3, "tensor cores"),
    ],
)
def test_float32_takes_the_fastest_path_of_its_accuracy(
    card: str, precision: str, path: str, useful_tflops: float, resource: str
) -> None:
    problem = replace(PLAIN, dtype="float32", precision=precision)
    gpu, rates = sheet(card)
    line = roofline(problem, rates, gpu=gpu)
    bound = line.of(resource)
    assert bound is not None and line.path == path
    assert bound.time_us == pytest.approx(problem.flops / useful_tflops * 1e-6)
    assert ("3 x 2 x" in bound.arithmetic) == (useful_tflops == pytest.approx(rates.product_tflops[path] / 3))


def test_a_geforce_card_is_bound_by_its_highest_clock() -> None:
    """FlashAttention-2 on an RTX 4090 took 3,181 us where the stated peak allows 3,328."""
    gpu, highest = sheet("rtx4090")
    card = catalog()["rtx4090"]
    stated = data_sheet_rates(card, card.boost_clock_mhz)
    assert stated.product_tflops == card.peak_tflops and not stated.clock
    for path, peak in card.peak_tflops.items():
        assert highest.product_tflops[path] == pytest.approx(peak * 3105 / 2520)
    assert highest.exponentials_gops == pytest.approx(128 * 16 * 3.105) and highest.memory_gbps == 1008
    assert highest.clock == "the highest clock, 3105 MHz; peaks are stated at 2520"
    problem = replace(PLAIN, batch=4, num_heads_q=32, num_heads_kv=32, seqlen_q=4096, seqlen_k=4096, dtype="float16")
    problem = replace(problem, head_dim=64, head_dim_v=64)
    assert roofline(problem, highest, gpu=gpu).time_us < 3181 < roofline(problem, stated, gpu=gpu).time_us
    assert sheet("h200")[1].product_tflops == catalog()["h200"].peak_tflops


def test_bfloat16_without_tensor_cores_for_it_is_computed_in_float32() -> None:
    gpu, rates = sheet("t4")
    line = roofline(PLAIN, rates, gpu=gpu)
    assert line.path == "float32" and line.of("float32 units") is not None
    assert roofline(replace(PLAIN, dtype="float16"), rates, gpu=gpu).path == "float16"


def test_causal_counts_visible_pairs() -> None:
    line = roofline(replace(PLAIN, causal=Causal()), H200_RATES, gpu=H200)
    bound = line.of("tensor cores")
    assert bound is not None and bound.amount == 2 * 16 * (16384 * 16385 // 2) * 256
    assert "2,147,614,720 visible pairs" in bound.arithmetic


def test_what_is_hot_need_not_be_read_from_memory() -> None:
    fits = replace(DECODE, seqlen_k=1024)  # 4 MB of 60
    assert roofline(fits, H200_RATES, gpu=H200, hot=True).of("memory").time_us == 0  # type: ignore[union-attr]
    half = replace(DECODE, batch=2)  # 67 MB: what exceeds L2 has to come
    bound = roofline(half, H200_RATES, gpu=H200, hot=True).of("memory")
    assert bound is not None and bound.amount == half.compulsory_bytes - 60 * 2**20
    unknown = replace(H200_RATES, cache_bytes=0)
    assert roofline(fits, unknown, gpu=H200, hot=True).of("memory") is None, "nothing can be said"


def test_the_last_level_cache_counts_as_cache() -> None:
    gpu, rates = sheet("mi300x")
    assert rates.cache_bytes == (32 + 256) * 2**20
    assert roofline(replace(DECODE, batch=4), rates, gpu=gpu, hot=True).of("memory").time_us == 0  # type: ignore[union-attr]


# Of a kernel ----------------------------------------------------------------------------------------------------------


def test_a_grid_of_few_blocks_uses_few_sms() -> None:
    cost = Cost(blocks=32, flops=64 * DECODE.flops, exponentials=64 * DECODE.exponentials, read_bytes=1, write_bytes=0)
    line = roofline(DECODE, H200_RATES, gpu=H200, cost=cost)
    tiles, exponentials = line.of("tiles"), line.of("exponentials in tiles")
    assert tiles is not None and exponentials is not None
    assert tiles.time_us == pytest.approx(64 * DECODE.flops / (989.4e6 * 32 / 132))
    assert exponentials.time_us == pytest.approx(64 * DECODE.exponentials / (132 * 16 * 1980 * 32 / 132))
    assert tiles.arithmetic.endswith("64 x the work / (989.4 TFLOP/s x 32 / 132 SMs) = 35.8 us")
    assert line.binding is tiles
    assert line.of_problem.time_us == roofline(DECODE, H200_RATES, gpu=H200).time_us


@pytest.mark.parametrize(
    ("blocks", "share"), [(1, 1 / 132), (131, 131 / 132), (132, 1), (133, 133 / 264), (264, 1), (13200, 1), (0, 1)]
)
def test_equal_blocks_run_in_whole_rounds(blocks: int, share: float) -> None:
    assert busy_share(PLAIN, 132, blocks)[0] == pytest.approx(share)


def test_unequal_blocks_may_fill_the_last_round() -> None:
    assert busy_share(replace(PLAIN, causal=Causal()), 132, 133)[0] == 1
    assert busy_share(PLAIN, 0, 133)[0] == 1, "nobody knows how many SMs there are"


def test_l2_is_bound_by_what_the_kernel_reads() -> None:
    gpu, rates = sheet("a100")
    cost = Cost(blocks=1000, flops=PLAIN.flops, exponentials=1, read_bytes=7_000_000, write_bytes=219_000)
    bound = roofline(PLAIN, rates, gpu=gpu, cost=cost).of("L2")
    assert bound is not None and bound.of_kernel and bound.time_us == pytest.approx(7.219e6 / 7219e3)
    assert roofline(PLAIN, H200_RATES, gpu=H200, cost=cost).of("L2") is None, "no data sheet states it"


def test_a_kernel_is_bound_by_its_own_way_of_computing_float32() -> None:
    problem = replace(PLAIN, dtype="float32", seqlen_q=1024, seqlen_k=1024)
    gpu, rates = sheet("rtx3060")
    cost = flash_fwd.cost(problem, gpu, flash_fwd.configs(problem, gpu)[0])
    fast = roofline(problem, rates, gpu=gpu, cost=cost).of("tiles")
    slow = roofline(problem, rates, gpu=gpu, cost=cost, precision="tf32x3").of("tiles")
    assert fast is not None and slow is not None
    assert slow.time_us == pytest.approx(3 * fast.time_us)
    sixteen = replace(problem, dtype="float16")
    assert roofline(sixteen, rates, gpu=gpu, cost=cost, precision="ieee").of("tiles") == (
        roofline(sixteen, rates, gpu=gpu, cost=cost).of("tiles")
    )


# Measured -------------------------------------------------------------------------------------------------------------

CEILINGS = Ceilings(
    gpu="NVIDIA H200",
    arch="sm_90",
    date="2026-11-21T13:00:00+00:00",
    copy_gbps=4270.0,
    read_gbps=4480.0,
    l2_gbps=6000.0,
    product_tflops={"bfloat16": 800.0},
    exponentials_gops=4000.0,
    launch_us=1.5,
    environment={"gpu": {"l2_bytes": 62914560, "sm_count": 132}},
)


def test_measured_rates() -> None:
    rates = measured_rates(CEILINGS)
    assert rates.name == "measured 2026-11-21" and rates.memory_gbps == 4480.0 and rates.cache_bytes == 60 * 2**20
    line = roofline(PLAIN, rates, gpu=H200)
    assert line.time_us == pytest.approx(PLAIN.flops / 800e6)
    launch = line.of("launch")
    assert launch is not None and launch.time_us == 1.5
    tiny = replace(PLAIN, seqlen_q=4, seqlen_k=4, num_heads_q=1, num_heads_kv=1)
    assert roofline(tiny, rates, gpu=H200).binding == launch


def test_a_cpu_has_products_exponentials_memory_and_calls() -> None:
    rates = Rates("measured", "CPU", {"float32": 0.1, "float16": 0.001, "bfloat16": 0.2}, 1.0, 30.0, launch_us=2.0)
    line = roofline(replace(PLAIN, dtype="float16"), rates, gpu=CPU, cost=Cost(0, 1, 1, 1, 1))
    assert [bound.resource for bound in line.bounds] == ["products", "exponentials", "memory", "call"]
    assert line.of("products").rate == 0.1, "slow 16-bit arithmetic binds nobody: float32 is at hand"  # type: ignore[union-attr]


def test_without_rates_there_are_no_bounds() -> None:
    line = roofline(PLAIN, Rates("nothing", "?", {}), gpu=H200, cost=Cost(1, 1, 1, 1, 1))
    assert line.bounds == () and line.binding is None and line.time_us == 0 and line.path == ""
    assert product_path(PLAIN, line.rates, CPU) is None


# Laws -----------------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> AttentionProblem:
    size = st.integers(1, 300)
    kv = draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(["float16", "bfloat16", "float32"]))
    return AttentionProblem(
        batch=draw(st.integers(1, 4)),
        seqlen_q=draw(size),
        seqlen_k=draw(size),
        num_heads_q=kv * draw(st.integers(1, 4)),
        num_heads_kv=kv,
        head_dim=draw(st.integers(1, 256)),
        head_dim_v=draw(st.integers(1, 256)),
        dtype=dtype,
        softmax_scale=0.1,
        causal=draw(st.sampled_from([None, Causal(), Causal("top_left")])),
        window_size=draw(st.sampled_from([(-1, -1), (16, 0), (0, 8)])),
        precision=draw(st.sampled_from(["default", "ieee", "tf32"])) if dtype == "float32" else "default",
        return_lse=draw(st.booleans()),
    )


cards = st.sampled_from(list(catalog()))


@given(problems(), cards)
def test_the_binding_bound_is_the_longest_and_every_line_adds_up(problem: AttentionProblem, card: str) -> None:
    gpu, rates = sheet(card)
    cost = None
    if not flash_fwd.why_not(problem, gpu):
        cost = flash_fwd.cost(problem, gpu, flash_fwd.configs(problem, gpu)[0])
    line = roofline(problem, rates, gpu=gpu, cost=cost)
    assert line.binding is not None
    assert line.time_us == line.binding.time_us == max(bound.time_us for bound in line.bounds)
    assert line.of_problem.time_us <= line.time_us
    for bound in line.bounds:
        assert bound.time_us == pytest.approx(bound.amount / (bound.rate * PER_US[bound.rate_unit]))
        assert bound.arithmetic.endswith(f"= {us(bound.time_us)}")


@given(problems(), cards, st.sampled_from(["batch", "num_heads"]))
def test_twice_the_work_takes_twice_as_long(problem: AttentionProblem, card: str, axis: str) -> None:
    gpu, rates = sheet(card)
    names = ["batch"] if axis == "batch" else ["num_heads_q", "num_heads_kv"]
    twice = replace(problem, **{name: 2 * getattr(problem, name) for name in names})
    once, doubled = roofline(problem, rates, gpu=gpu), roofline(twice, rates, gpu=gpu)
    for a, b in zip(once.bounds, doubled.bounds, strict=True):
        assert b.time_us == pytest.approx(2 * a.time_us)


@given(problems(), cards)
def test_a_mask_never_raises_a_bound(problem: AttentionProblem, card: str) -> None:
    gpu, rates = sheet(card)
    full = roofline(replace(problem, causal=None, window_size=(-1, -1)), rates, gpu=gpu)
    masked = roofline(problem, rates, gpu=gpu)
    assert all(a.time_us <= b.time_us for a, b in zip(masked.bounds, full.bounds, strict=True))


@given(problems(), cards)
def test_hot_is_never_above_cold(problem: AttentionProblem, card: str) -> None:
    gpu, rates = sheet(card)
    assert roofline(problem, rates, gpu=gpu, hot=True).time_us <= roofline(problem, rates, gpu=gpu).time_us


@given(problems(), cards)
def test_less_accuracy_is_never_slower(problem: AttentionProblem, card: str) -> None:
    gpu, rates = sheet(card)
    times: dict[str, Any] = {
        precision: roofline(replace(problem, dtype="float32", precision=precision), rates, gpu=gpu).time_us
        for precision in ("ieee", "default", "tf32")
    }
    assert times["tf32"] <= times["default"] <= times["ieee"]


@given(problems())
def test_a_kernel_does_no_less_than_the_problem(problem: AttentionProblem) -> None:
    if flash_fwd.why_not(problem, H200):
        return
    cost = flash_fwd.cost(problem, H200, flash_fwd.configs(problem, H200)[0])
    line = roofline(problem, H200_RATES, gpu=H200, cost=cost)
    products = line.of("tensor cores") or line.of("float32 units")
    assert products is not None
    assert line.of("tiles").time_us >= products.time_us * 0.999999  # type: ignore[union-attr]
    assert line.of("exponentials in tiles").amount >= problem.visible_pairs  # type: ignore[union-attr]


# In words -------------------------------------------------------------------------------------------------------------


def test_figures_in_words() -> None:
    assert [us(t) for t in (0.0136, 1.234, 12.34, 123.4, 12345.6)] == [
        "0.014 us", "1.23 us", "12.3 us", "123 us", "12,346 us",
    ]  # fmt: skip
    assert [flop(n) for n in (12, 1234, 2.5e6, 68.72e9, 2.199e12, 5e15)] == [
        "12 FLOP", "1.234 kFLOP", "2.5 MFLOP", "68.72 GFLOP", "2.199 TFLOP", "5,000 TFLOP",
    ]  # fmt: skip
    assert byte(16777216) == "16.78 MB" and figure(10214.4) == "10,214" and figure(989.4) == "989.4"


def test_keys_and_values_of_a_cache_of_8_bits_are_a_byte_each() -> None:
    problem = AttentionProblem(
        batch=64, seqlen_q=1, seqlen_k=4096, num_heads_q=32, num_heads_kv=8, head_dim=128, head_dim_v=128,
        dtype="bfloat16", softmax_scale=0.1, page_size=16, dtype_kv="float8_e4m3fn", kv_factors="head",
    )  # fmt: skip
    cells, pages, factors = 64 * 4096 * 8 * 128, 4 * (64 * 256 + 64), 2 * 8 * 4
    row = 64 * 32 * 128 * 2
    assert tensor_bytes(problem) == {"q": row, "k": cells, "v": cells, "out": row, "the rest": pages + factors}


def test_values_that_are_part_of_keys_are_read_once() -> None:
    problem = AttentionProblem(
        batch=64, seqlen_q=1, seqlen_k=4096, num_heads_q=16, num_heads_kv=1, head_dim=576, head_dim_v=512,
        dtype="bfloat16", softmax_scale=0.1,
    )  # fmt: skip
    two, one = (tensor_bytes(replace(problem, v_in_k=in_k)) for in_k in (False, True))
    assert one == two | {"v": 0} and two["v"] == 64 * 4096 * 512 * 2
    assert (
        two["k"] + two["v"] - (one["k"] + one["v"])
        == problem.compulsory_bytes - replace(problem, v_in_k=True).compulsory_bytes
    )


def test_queries_that_see_no_key_are_not_read() -> None:
    """Causal masks end at the last key, so of 8,192 queries on 1,024 keys the first 7,168 see none."""
    problem = AttentionProblem(
        batch=1, seqlen_q=8192, seqlen_k=1024, num_heads_q=16, num_heads_kv=16, head_dim=128, head_dim_v=128,
        dtype="bfloat16", softmax_scale=0.1, causal=Causal(),
    )  # fmt: skip
    row = 16 * 128 * 2
    assert tensor_bytes(problem) == {"q": 1024 * row, "k": 1024 * row, "v": 1024 * row, "out": 8192 * row}
    assert problem.compulsory_bytes == sum(tensor_bytes(problem).values())
    backward = problem.work(is_backward=True)
    needed = {"dout": 1024 * row, "dq": 8192 * row, "dk": 1024 * row, "dv": 1024 * row}
    assert tensor_bytes(problem, backward).items() >= needed.items()
    assert backward.compulsory_bytes == sum(tensor_bytes(problem, backward).values())
    masked = replace(problem, causal=None, mask_shape=(1, 1, 8192, 1024), mask_visible_pairs=16 * 1024)
    assert masked.queries_needed == 16, "as few rows as these pairs can have"
    empty = replace(problem, causal=None, seqlen_k=0)
    assert "e+" not in str(explain(empty, gpu="h200")), "no ratio to a work of nothing"


@pytest.mark.parametrize(
    ("time_us", "said"),
    [(0.5, "0.500 us"), (99_999.0, "99,999 us"), (100_000.0, "100 ms"), (9.5e6, "9,500 ms"), (36_414_794.0, "36.4 s")],
)
def test_long_times_are_in_longer_units(time_us: float, said: str) -> None:
    assert us(time_us) == said
