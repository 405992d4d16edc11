"""The Hopper forward with quantized q, k and v on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance import cases, harness
from tests.conformance.cases import Call, Case
from tests.conformance.gates import forward_references, judge_forward
from tests.kernels.hopper.test_flash_fwd_quantized_on_cpu import CASES, PLAIN, WINDOWS, with_nan_where_unseen
from warpwave import attention, dispatch, quantize
from warpwave.gpu import current_gpu
from warpwave.kernels.hopper import flash_fwd

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
GPU = torch.device("cuda")
BASE = replace(PLAIN, lengths=(1000, 1920), heads=(6, 3), batch=2)
PACKED = replace(BASE, dtype="int8:bfloat16:head", packed=True, batch=5, causal="bottom_right")
LARGE: dict[str, Case] = {
    **{f"{d} {causal}": replace(BASE, dims=(d, d), causal=causal)
       for d in (64, 128, 256, 96, 192, 80, 160, 224, 32, 16) for causal in ("", "bottom_right")},
    **{f"factors {d} {kind}": replace(BASE, dims=(d, d), dtype=f"int8:float16:{kind}")
       for d in (64, 128, 256) for kind in ("64", "head", "tensor")},
    **{f"packed {d}": replace(PACKED, dims=(d, d)) for d in (64, 128, 256)},
    "head_dim_v": replace(BASE, dims=(128, 72), softcap=5.0),
    **{f"float8 {d} {causal}": replace(BASE, dims=(d, d), causal=causal, dtype="float8_e4m3fn:float8_e4m3fn:128")
       for d in (64, 128, 256, 96, 192, 80, 160, 224, 32, 16) for causal in ("", "bottom_right")},
    **{f"float8 {d} {kind}": replace(BASE, dims=(d, d), dtype=f"float8_e4m3fn:float8_e5m2:{kind}")
       for d in (64, 128, 256) for kind in ("64", "head", "tensor")},
    **{f"float8 packed {d}": replace(PACKED, dims=(d, d), dtype="float8_e4m3fn:float8_e4m3fn:head")
       for d in (64, 128, 256)},
    **{f"int8 values {d}": replace(BASE, dims=(d, d), causal="bottom_right", dtype="int8:int8:64")
       for d in (64, 128, 256)},
    "float8, 65,536 keys": replace(
        BASE, lengths=(128, 65536), heads=(1, 1), batch=1, dims=(128, 128), dtype="float8_e4m3fn:float8_e4m3fn:128"
    ),
    **{name: replace(PLAIN, **changes) for name, changes in CASES.items()},
}  # fmt: skip
# What `auto` leaves to flash_fwd.
SHORT = ("causal, sinks", "window", "packed window", "one query", "scale 0", "float8, top left", "float8, window",
         "float8, packed window", "float8, no keys")  # fmt: skip


def judged(call: Call, config: Any = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    out, lse = harness.run(flash_fwd.NAME, call, config)
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), out, lse)
    assert verdict.passed, str(verdict)
    return out, lse


@pytest.mark.parametrize("name", LARGE)
def test_values(name: str) -> None:
    call = cases.build(LARGE[name], "sharp", GPU)
    chosen = dispatch.choose(call.problem, current_gpu(GPU)).kernel.NAME
    assert chosen == ("flash_fwd" if name in SHORT else flash_fwd.NAME)
    first = harness.bits(*judged(call))
    for _ in range(20):
        assert harness.bits(*harness.run(flash_fwd.NAME, call)) == first, "not the same bits"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", ["", "bottom_right"])
@pytest.mark.parametrize("dtype", ["int8:bfloat16:128", "float8_e4m3fn:float8_e4m3fn:128"])
def test_every_config(dtype: str, head_dim: int, causal: str) -> None:
    call = cases.build(replace(BASE, dims=(head_dim, head_dim), causal=causal, dtype=dtype), "normal", GPU)
    for config in flash_fwd.configs(call.problem, current_gpu(GPU)):
        judged(call, config)


@pytest.mark.parametrize("name", WINDOWS)
def test_values_that_no_query_sees_may_be_nan(name: str) -> None:
    call = cases.build(LARGE[name], "normal", GPU)
    poisoned = call._replace(operands=with_nan_where_unseen(call))
    results = [harness.bits(*harness.run(flash_fwd.NAME, x)) for x in (call, poisoned)]
    assert results[0] == results[1]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_many_launches_of_calls_that_alternate(dtype: torch.dtype, head_dim: int) -> None:
    """Calls of one stream share the memory of V in float16."""
    calls = []
    for i, causal in enumerate((False, True) * 3):
        g = torch.Generator(GPU).manual_seed(i)
        shape = (2, 300 + 977 * i, 8, head_dim)
        q, k, v = (torch.randn(shape, generator=g, device=GPU).bfloat16() for _ in range(3))
        arguments = quantize(q, k, v, dtype=dtype).arguments()
        calls.append((arguments, causal, attention(**arguments, causal=causal, kernel=flash_fwd.NAME)))
    for _ in range(100):
        for arguments, causal, expected in calls:
            found = attention(**arguments, causal=causal, kernel=flash_fwd.NAME)
            assert torch.equal(found, expected), "not the same bits"
