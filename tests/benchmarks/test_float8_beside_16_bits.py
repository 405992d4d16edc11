"""What is timed beside 16 bits, and how it is shown; nothing runs."""

from __future__ import annotations

from itertools import product

import pytest

from tests.kernels.hopper.test_flash_fwd_fp8_on_cpu import call
from warpwave.gpu import Gpu
from warpwave.kernels.hopper import flash_fwd_fp8
from warpwave.runtime.triton_or_stub import NO_TRITON

pytestmark = pytest.mark.skipif(NO_TRITON is not None, reason="Triton is published for Linux only")


def test_no_two_configs_share_a_name() -> None:
    from benchmarks import float8_beside_16_bits as program

    for head_dim, block in product((64, 128, 256), (0, 64)):
        problem, _ = call(dims=(head_dim, head_dim), blocks=(block, block, block))
        configs = flash_fwd_fp8.configs(problem, Gpu.for_arch("sm_90"))
        assert len({program.name_of(config) for config in configs}) == len(configs)


def test_a_wrong_result_is_marked() -> None:
    from benchmarks import float8_beside_16_bits as program

    point = {"head_dim": 64, "batch": 4, "seqlen": 512, "causal": True, "block": 0, "varied": ()}
    times = {program.SIXTEEN_BITS: (500.0, 1.0, True), "float8 a": (600.0, 1.2, True), "float8 b": (900.0, 1.8, False)}
    shown = [dict(zip(("tflops", "speedup", "is_right"), x, strict=True)) for x in times.values()]
    line = program.table([point | dict(zip(times, shown, strict=True))])
    assert line == ("4 x 512, head_dim 64, causal: 500 TFLOP/s; bfloat16 1.00; float8 a 1.20; float8 b 1.80 WRONG")
