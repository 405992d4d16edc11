"""What is timed beside 16 bits, and how it is shown; nothing runs."""

from __future__ import annotations

from itertools import product

import torch

from tests.conformance import cases
from tests.kernels.hopper.test_flash_fwd_quantized_on_cpu import PLAIN, replace
from tests.marks import needs_triton
from warpwave.gpu import Gpu
from warpwave.kernels.hopper import flash_fwd

pytestmark = needs_triton


def test_no_two_configs_share_a_name() -> None:
    from benchmarks import quantized_beside_16_bits as program

    for head_dim, kind in product((64, 128, 256), ("head", "64")):
        case = replace(PLAIN, dims=(head_dim, head_dim), dtype=f"float8_e4m3fn:float8_e4m3fn:{kind}")
        problem = cases.build(case, "normal", torch.device("cpu")).problem
        configs = flash_fwd.configs(problem, Gpu.for_arch("sm_90"))
        assert len({program.name_of("float8", config) for config in configs}) == len(configs)


def test_a_wrong_result_is_marked() -> None:
    from benchmarks import quantized_beside_16_bits as program

    point = {"head_dim": 64, "batch": 4, "seqlen": 512, "causal": True, "block": 0, "varied": (), "defaults": {}}
    times = {program.SIXTEEN_BITS: (500.0, 1.0, True), "float8: a": (600.0, 1.2, True), "int8: b": (900.0, 1.8, False)}
    shown = [dict(zip(("tflops", "speedup", "is_right"), x, strict=True)) for x in times.values()]
    line = program.table([point | dict(zip(times, shown, strict=True))])
    assert line == ("4 x 512, head_dim 64, causal: 500 TFLOP/s; bfloat16 1.00; float8: a 1.20; int8: b 1.80 WRONG")
