"""`explain` of quantized calls: bytes by each tensor's element size, both products' own rates, and no claim of a
measurement."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import warpwave
from warpwave import AttentionProblem, Explanation
from warpwave.gpu import CPU
from warpwave.kernels import eager, flash_fwd
from warpwave.kernels.hopper import flash_fwd as hopper_flash_fwd
from warpwave.problem import Causal
from warpwave.workbench import cli
from warpwave.workbench.hardware import measure
from warpwave.workbench.hardware.catalog import catalog, resolve
from warpwave.workbench.model.predict import predict
from warpwave.workbench.model.roofline import data_sheet_rates, measured_rates, product_path
from warpwave.workbench.model.steps import path_of

RECORDS = sorted((Path(__file__).parents[3] / "benchmarks" / "records").glob("2026-11-26-h200-quantized-tiles.json"))
PLAIN: dict[str, Any] = {
    "batch": 1, "seqlen_q": 4096, "seqlen_k": 4096, "num_heads_q": 8, "num_heads_kv": 8, "head_dim": 128,
    "head_dim_v": 128, "softmax_scale": 128**-0.5,
}  # fmt: skip


def problem(dtype: str = "float8_e4m3fn", dtype_v: str | None = None, **options: Any) -> AttentionProblem:
    dtypes = {"dtype": dtype, "dtype_v": dtype_v or dtype, "dtype_out": "bfloat16", "descale_blocks": (128, 128, 128)}
    return AttentionProblem(**PLAIN | dtypes | options)


def on(card: str, *dtypes: str, **options: Any) -> Explanation:
    return warpwave.explain(problem(*dtypes, **options), gpu=resolve(card))


def bound_us(said: Explanation, resource: str) -> float:
    assert said.bounds is not None
    bound = said.bounds.of(resource)
    assert bound is not None
    return bound.time_us


def test_the_bound_of_a_kernel_has_the_rate_at_which_it_multiplies_values() -> None:
    """hopper/flash_fwd multiplies float8 values in float16, flash_fwd in float8; the bound of the work is the same."""
    hopper, portable = (
        warpwave.explain(problem(descale_blocks=(0, 0, 0)), gpu=resolve("h200"), kernel=kernel)
        for kernel in ("hopper/flash_fwd", "flash_fwd")
    )
    assert bound_us(hopper, "tensor cores") == bound_us(portable, "tensor cores")
    assert bound_us(hopper, "tiles") > 1.49 * bound_us(hopper, "tensor cores")
    assert bound_us(portable, "tiles") < 1.1 * bound_us(portable, "tensor cores")


def test_recorded_times_lie_in_the_error_bar() -> None:
    ratios = []
    for point in (point for record in RECORDS for point in json.loads(record.read_text(encoding="utf-8"))["points"]):
        heads, width, block = 2048 // point["head_dim"], point["head_dim"], point["block"]
        sizes = {
            "batch": point["batch"], "seqlen_q": point["seqlen"], "seqlen_k": point["seqlen"], "num_heads_q": heads,
            "num_heads_kv": heads, "head_dim": width, "head_dim_v": width, "softmax_scale": width**-0.5,
        }  # fmt: skip
        for way, name in point["defaults"].items():
            dtype = "int8" if way.startswith("int8") else "float8_e4m3fn"
            dtype_v = "bfloat16" if way.endswith("bfloat16") else dtype
            blocks = (block, block, 0 if dtype_v == "bfloat16" else block)
            call = problem(dtype, dtype_v, **sizes, causal=Causal() if point["causal"] else None, descale_blocks=blocks)
            gpu, config = resolve("h200"), hopper_flash_fwd.Config(*map(int, re.findall(r"\d+", name.split(": ")[1])))
            assert config in hopper_flash_fwd.configs(call, gpu)
            p, time_us = predict(call, hopper_flash_fwd, config, gpu), statistics.median(point[name]["us"])
            assert p is not None and p.low_us <= time_us <= p.high_us
            ratios.append(time_us / p.time_us)
    assert len(ratios) == 36 * 4
    # docs/workbench/model.md states both.
    assert (round(min(ratios), 1), round(max(ratios), 1)) == (1.0, 1.7)


@pytest.mark.parametrize(
    ("card", "dtypes", "path", "tflops"),
    [
        ("h200", ("float8_e4m3fn",), "fp8", 1978.9),
        ("h200", ("float8_e4m3fn", "float8_e5m2"), "fp8", 1978.9),
        ("h200", ("int8", "bfloat16"), "int8 and bfloat16", 2 / (1 / 1978.9 + 1 / 989.4)),
        ("h200", ("int8", "int8"), "int8 and float16", 2 / (1 / 1978.9 + 1 / 989.4)),
        ("a100-80gb", ("int8", "float16"), "int8 and float16", 2 / (1 / 624 + 1 / 312)),
        ("a100-80gb", ("float8_e4m3fn",), "float16", 312),  # float16 holds every float8 number
        ("b300", ("int8", "bfloat16"), "float16 and bfloat16", 2250),  # faster than its int8 unit
        ("rx7900xtx", ("int8", "int8"), "int8 and float16", 122.8),
    ],
)
def test_the_bound_of_products_is_by_the_units_of_the_card(
    card: str, dtypes: tuple[str, ...], path: str, tflops: float
) -> None:
    said = on(card, *dtypes)
    sheet = catalog()[card]
    assert said.bounds is not None and said.bounds.path == path
    resource = "tensor cores" if said.bounds.of("tensor cores") else "matrix cores"
    assert bound_us(said, resource) == pytest.approx(said.flops / (tflops * sheet.headroom * 1e6), rel=1e-4)
    assert f"({path})" in str(said)


def test_unequal_widths_weigh_the_two_rates() -> None:
    """Of 192 columns of int8 and 64 of bfloat16."""
    path = product_path(
        problem("int8", "bfloat16", head_dim=192, head_dim_v=64), data_sheet_rates(catalog()["h200"]), resolve("h200")
    )
    assert path is not None and path.tflops == pytest.approx(256 / (192 / 1978.9 + 64 / 989.4))


def test_no_bound_is_made_of_rates_that_nobody_measured() -> None:
    """The shipped ceilings of an H200 hold no 8-bit products. Those of 16 bits would be no lower bound."""
    ceilings = measure.shipped(resolve("h200"))
    assert ceilings is not None
    assert product_path(problem(), measured_rates(ceilings), resolve("h200")) is None
    said = on("h200")
    assert said.measured is not None and said.measured.of("tensor cores") is None and said.measured.of("tiles") is None


def test_the_hopper_kernel_multiplies_values_in_float16() -> None:
    gpu, sheet = resolve("h200"), catalog()["h200"]
    assert path_of(problem(), hopper_flash_fwd, gpu, sheet).name == "fp8 and float16"
    assert path_of(problem(), flash_fwd, gpu, sheet).name == "fp8"


def test_a_kernel_on_gfx942_multiplies_these_float8_formats_in_float16() -> None:
    gpu, sheet = resolve("mi300x"), catalog()["mi300x"]
    assert path_of(problem(), flash_fwd, gpu, sheet).name == "float16"
    assert path_of(problem("int8"), flash_fwd, gpu, sheet).name == "int8 and float16"
    assert path_of(problem(), eager, gpu, sheet).name == "float32_matrix"
    assert path_of(problem(), flash_fwd, resolve("mi355x"), catalog()["mi355x"]).name == "fp8"


@pytest.mark.parametrize(("dtypes", "of_a_key"), [(("float8_e4m3fn",), 256), (("int8", "float16"), 384)])
def test_bytes_are_by_the_size_of_each_tensor(dtypes: tuple[str, ...], of_a_key: int) -> None:
    call = problem(*dtypes)
    config = flash_fwd.configs(call, resolve("h200"))[0]
    cost = flash_fwd.cost(call, resolve("h200"), config)
    rows = 8 * 4096
    tiles = rows // config.block_m * 4096 // config.block_n
    assert call.bytes_of_key == of_a_key
    assert cost.read_bytes == rows * 128 + tiles * config.block_n * of_a_key
    assert cost.write_bytes == rows * 128 * 2
    said = on("h200", *dtypes)
    factors = 4 * 8 * 32 * (3 if dtypes == ("float8_e4m3fn",) else 2)
    assert said.memory is not None and said.memory.out == rows * 256
    assert said.memory.inputs == pytest.approx(rows * (128 + of_a_key) + factors, abs=4 * 8 * 32)
    of_values = rows * (of_a_key - 128 + 256)
    assert f"over {of_values / 1e6:.4g}".rstrip("0") in str(said)


def test_values_of_int8_are_converted_in_the_loop() -> None:
    costs = {v: flash_fwd.cost(c := problem("int8", v), h := resolve("h200"), flash_fwd.configs(c, h)[0])
             for v in ("int8", "float16")}  # fmt: skip
    assert costs["int8"].conversions == costs["int8"].steps * 64 * 128 and costs["float16"].conversions == 0


def test_eager_makes_float32_numbers_first() -> None:
    call = problem(seqlen_q=512, seqlen_k=512)
    config = eager.configs(call, CPU)[0]
    wide = AttentionProblem(**PLAIN | {"dtype": "float32", "seqlen_q": 512, "seqlen_k": 512})
    cost, plain = eager.cost(call, CPU, config), eager.cost(wide, CPU, config)
    assert cost.flops == plain.flops and cost.launches == plain.launches + 7
    elements = 3 * 8 * 512 * 128
    outs = 8 * 512 * 128
    assert cost.read_bytes - plain.read_bytes == elements * (1 + 4) + 4 * outs


def test_a_prediction_claims_no_measurement() -> None:
    for card in ("h200", "h100", "a100-80gb", "rtx4090", "mi300x"):
        said = on(card, "int8", "float16")
        assert said.prediction is not None and said.prediction.points == 0
        assert "never validated: no calibration has quantized calls" in said.prediction.validated
        assert said.prediction.high_us == pytest.approx(3 * said.prediction.time_us)
    faster, plain = (
        on("h200").prediction,
        warpwave.explain(
            AttentionProblem(**PLAIN, dtype="bfloat16"), gpu=resolve("h200"), kernel="flash_fwd"
        ).prediction,
    )
    assert faster is not None and plain is not None and faster.time_us < plain.time_us


def test_tensors_are_explained_as_attention_takes_them() -> None:
    q, k, v = (torch.randn(1, 130, 2, 32) for _ in range(3))
    quantized = warpwave.quantize(q, k, v, dtype=torch.int8)
    said = warpwave.explain(**quantized.arguments(), causal=True, out_dtype=torch.float16)
    assert said.kernel == "eager" and said.problem.descale_blocks == (128, 128, 0)
    assert (said.problem.dtype_of_v, said.problem.dtype_of_out) == ("bfloat16", "float16")
    with pytest.raises(warpwave.InvalidInput, match="k_descale is None"):
        warpwave.explain(**quantized.arguments() | {"k_descale": None})
    with pytest.raises(warpwave.InvalidInput, match="AttentionProblem, which holds all options"):
        warpwave.explain(problem(), q_descale=torch.ones(()))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["explain", "--gpu", "h200", *arguments])


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("--dtype", "fp8"), "float8_e4m3fn, v float8_e4m3fn, out bfloat16, factors of q, k, v: one of 128 tokens"),
        (("--dtype", "int8"), "int8, v bfloat16, out bfloat16, factors of q, k, v: one of 128 tokens, one of 128"),
        (("--dtype", "int8", "--dtype-v", "int8", "--granularity", "64"), "int8, v int8, out bfloat16, .* 64 tokens"),
        (("--dtype", "float8_e5m2", "--packed"), "float8_e5m2, v float8_e5m2, .*: one of a head, one of a head"),
    ],
)
def test_the_command_describes_quantized_calls(arguments: tuple[str, ...], shown: str) -> None:
    import re

    result = run(*arguments)
    assert result.exit_code == 0 and re.search(shown, result.output), result.output


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("--dtype-v", "int8"), "dtype is bfloat16; --dtype-v belongs to a quantized one"),
        (("--dtype", "int8", "--granularity", "32"), "'32' is not allowed; use tensor, head, 64, 128"),
        (("--dtype", "int8", "--dtype-v", "int4"), "'int4' is not a dtype"),
    ],
)
def test_the_command_refuses_what_no_call_can_have(arguments: tuple[str, ...], shown: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and shown in result.output.replace("\n", " "), result.output
