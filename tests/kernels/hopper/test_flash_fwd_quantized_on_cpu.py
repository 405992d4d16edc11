"""The Hopper forward's own source on a CPU, with quantized q, k and v: its factors and masks, tile by tile."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import cases, harness
from tests.conformance.cases import Call, Case
from tests.conformance.gates import forward_references, judge_forward
from tests.kernels.hopper import gluon_on_cpu
from tests.kernels.hopper.test_flash_fwd_on_cpu import MODULES
from tests.marks import needs_triton, one_in
from warpwave import dispatch
from warpwave.gpu import Gpu
from warpwave.kernels import quantize_tensor
from warpwave.kernels.hopper import flash_fwd
from warpwave.kernels.hopper.flash_fwd import Config, config
from warpwave.kernels.prepass import widen_values
from warpwave.runtime import launch

H200 = Gpu.for_arch("sm_90")
CPU = torch.device("cpu")
pytestmark = needs_triton


def on_cpu(call: Call, chosen: Config) -> tuple[Tensor, Tensor]:
    """out and lse by the source of the kernel and its roles, one block after another."""
    problem, operands = call.problem, call.operands
    out, lse = gluon_on_cpu.unwritten(problem, operands.q)
    specified = flash_fwd.specify(problem, H200, operands, out, lse, chosen)
    *ahead, attend = (specified,) if isinstance(specified, launch.Launch) else specified
    for spec in ahead:
        launch.bind(spec)(*spec.tensors)
    gluon_on_cpu.run_launch(attend, MODULES, 2, {})
    return out, lse


def gate(call: Call, chosen: Config | None = None) -> tuple[Tensor, Tensor]:
    found = on_cpu(call, chosen or flash_fwd.configs(call.problem, H200)[0])
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), *found)
    assert verdict.passed, str(verdict)
    if call.problem.dtype_of_v.startswith("float8") and not call.problem.has_sinks:
        # The gates allow for probabilities that are rounded to float8; this kernel rounds them to float16.
        (of_all,) = (gate for gate in verdict.gates if gate.name.startswith("B2"))
        assert of_all.needed < 0.4, str(verdict)
    return found


BIAS = {"bias_shape": (1, 1, 1024, 1024), "bias_dtype": "bfloat16"}
PLAIN = Case(dtype="int8:bfloat16:128", lengths=(150, 330), heads=(2, 1))
CASES: dict[str, dict[str, Any]] = {
    "full": {"dims": (128, 128), "batch": 2},
    "one factor for the tensor": {"dtype": "int8:float16:tensor", "heads": (4, 2), "dims": (96, 64)},
    "causal, sinks": {"dtype": "int8:float16:64", "causal": "bottom_right", "sinks": True},
    "more queries than keys": {"causal": "bottom_right", "lengths": (330, 150), "dims": (256, 256)},
    "top left": {"causal": "top_left", "lengths": (210, 70), "dims": (48, 112)},
    "window": {"window": (52, 5), "alibi": "heads", "softcap": 3.0},
    "window, far": {"window": (150, -1), "lengths": (70, 600), "dims": (192, 96)},
    "window, far, 64": {"window": (150, -1), "lengths": (70, 600), "dtype": "int8:float16:64"},
    "packed": {"dtype": "int8:bfloat16:head", "packed": True, "batch": 4, "causal": "bottom_right", "dims": (32, 160)},
    "packed window": {"dtype": "int8:bfloat16:tensor", "packed": True, "batch": 4, "window": (40, 3)},
    "one query": {"lengths": (1, 300)},
    "mask": {"mask": "full", "dims": (128, 128)},
    "mask, window": {"mask": "full", "window": (40, 3), "dtype": "int8:bfloat16:64"},
    "bias": {"bias": "full", "dims": (128, 64)},
    "bias of heads": {"bias": "heads", "causal": "bottom_right", "dtype": "int8:float16:64"},
    "scale 0": {"scale": 0.0},
    "int8 values": {"dtype": "int8:int8:head", "causal": "bottom_right", "dims": (64, 72)},
    "int8 values, 64": {"dtype": "int8:int8:64", "causal": "bottom_right", "sinks": True, "dims": (128, 128)},
    "float8": {"dtype": "float8_e4m3fn:float8_e4m3fn:128", "dims": (128, 128), "batch": 2},
    "float8, 64, causal": {"dtype": "float8_e4m3fn:float8_e5m2:64", "causal": "bottom_right", "dims": (256, 256)},
    "float8, top left": {"dtype": "float8_e5m2:float8_e5m2:tensor", "causal": "top_left", "lengths": (210, 70)},
    "float8, window, far": {
        "dtype": "float8_e4m3fn:float8_e4m3fn:64", "window": (150, -1), "lengths": (70, 600), "dims": (192, 96),
    },
    "float8, window": {"dtype": "float8_e4m3fn:float8_e4m3fn:128", "window": (52, 5), "alibi": "heads", "softcap": 3.0},
    "float8, packed": {
        "dtype": "float8_e4m3fn:float8_e4m3fn:head", "packed": True, "batch": 4, "causal": "bottom_right",
        "dims": (32, 160),
    },
    "float8, packed window": {
        "dtype": "float8_e4m3fn:float8_e4m3fn:tensor", "packed": True, "batch": 4, "window": (40, 3),
    },
    "float8, mask": {"dtype": "float8_e4m3fn:float8_e4m3fn:128", "mask": "full", "dims": (128, 128)},
    "float8, bias": {"dtype": "float8_e4m3fn:float8_e4m3fn:head", "bias": "full", "dims": (128, 64)},
    "float8, 16-bit values": {"dtype": "float8_e4m3fn:bfloat16:128", "causal": "bottom_right", "dims": (128, 128)},
    "float8, no keys": {"dtype": "float8_e4m3fn:float8_e4m3fn:head", "lengths": (70, 0)},
    "int8, no keys, blocks": {"dtype": "int8:int8:64", "lengths": (70, 0)},
}  # fmt: skip


@one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_the_protocol_on_a_cpu(name: str) -> None:
    gate(cases.build(replace(PLAIN, **CASES[name]), "normal", CPU))


@pytest.mark.parametrize(
    ("dims", "chosen"),
    [
        ((64, 64), Config(192, 128, 3)),
        ((128, 128), Config(192, 64, 4)),
        ((128, 128), Config(128, 128, 3)),
        ((112, 48), Config(64, 64, 2, narrowest_v=64)),
        ((256, 256), Config(128, 64, 2)),
    ],
)
def test_configs(dims: tuple[int, int], chosen: Config) -> None:
    gate(cases.build(replace(PLAIN, dims=dims, causal="bottom_right"), "sharp", CPU), chosen)


@pytest.mark.parametrize("dtype", ["int8:float16:128", "int8:float16:tensor", "int8:int8:64"])
def test_large_scores(dtype: str) -> None:
    """The zero of a tile's scores is so large here that a maximum is off by 2^-9 bits."""
    gate(cases.build(replace(PLAIN, dims=(128, 128), lengths=(150, 650), dtype=dtype), "sharp", CPU))


@pytest.mark.parametrize("factor", [1e-40, 1e-30, 1e30])
def test_factors_of_values_of_any_size(factor: float) -> None:
    call = cases.build(replace(PLAIN, lengths=(70, 330), dtype="float8_e4m3fn:float8_e4m3fn:128"), "normal", CPU)
    assert call.operands.v_descale is not None
    expected, lse = on_cpu(call, flash_fwd.configs(call.problem, H200)[0])
    scaled = call.operands._replace(v_descale=call.operands.v_descale * factor)
    found, same_lse = on_cpu(call._replace(operands=scaled), flash_fwd.configs(call.problem, H200)[0])
    torch.testing.assert_close(same_lse, lse)
    if factor > 1e-38:
        torch.testing.assert_close(found.float() / factor, expected.float(), rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("size", [1e-3, 1e9])
@pytest.mark.parametrize("zeros", [slice(64), slice(64, None)])
def test_blocks_of_zeros(zeros: slice, size: float) -> None:
    """Beside the factor 1, small values lose precision. Beside one of 1e-30, sums of probabilities overflow."""
    call = cases.build(replace(PLAIN, dtype="int8:int8:64"), "normal", CPU)
    v = size * torch.randn(call.operands.v.shape, generator=torch.Generator().manual_seed(0))
    v[:, zeros] = 0
    source = quantize_tensor.Source(v, torch.int8, 64, None, False, 1.0, None, 0)
    numbers, factors = quantize_tensor.by_torch(source, None)
    gate(call._replace(operands=call.operands._replace(v=numbers, v_descale=factors)))


def test_raw_integers() -> None:
    """Factors of 1 make one score outweigh all others; factors of V stay exact."""
    call = cases.build(replace(PLAIN, lengths=(64, 650), dtype="int8:int8:128"), "normal", CPU)
    ones = {name: torch.ones_like(getattr(call.operands, name)) for name in ("q_descale", "k_descale")}
    gate(call._replace(operands=call.operands._replace(**ones)))


def test_numbers_of_the_largest_magnitude() -> None:
    """256 products of 128 * 128: their sum is exact in float32, and 2^7 times the largest of float16."""
    call = cases.build(replace(PLAIN, dims=(256, 64), dtype="int8:float16:tensor"), "normal", CPU)
    signs = torch.where(call.operands.q[..., :1] < 0, 127, -128).to(torch.int8)
    q = signs.expand(call.operands.q.shape).contiguous()
    k = torch.where(call.operands.k[..., :1] < 0, 127, -128).to(torch.int8).expand(call.operands.k.shape).contiguous()
    small = torch.tensor(2.0**-9)
    operands = call.operands._replace(q=q, k=k, q_descale=small, k_descale=small)
    gate(call._replace(operands=operands))


WINDOWS = (
    *("window, far", "window, far, 64", "packed window", "mask, window"),
    *("float8, window, far", "float8, packed window"),
)


@pytest.mark.parametrize("name", WINDOWS)
def test_values_that_no_query_sees_may_be_nan(name: str) -> None:
    call = cases.build(replace(PLAIN, **CASES[name]), "normal", CPU)
    chosen = flash_fwd.configs(call.problem, H200)[0]
    poisoned = call._replace(operands=with_nan_where_unseen(call))
    assert all(torch.equal(a, b) for a, b in zip(on_cpu(call, chosen), on_cpu(poisoned, chosen), strict=True))


def with_nan_where_unseen(call: Call) -> Any:
    """The operands with values that are not numbers where no query of their sequence sees them."""
    problem, v = call.problem, call.operands.v.clone()
    cu_q, cu_k = (
        x.tolist() if problem.packed else [] for x in (call.operands.cu_seqlens_q, call.operands.cu_seqlens_k)
    )
    hidden = 0
    for b in range(problem.batch):
        length_q = cu_q[b + 1] - cu_q[b] if problem.packed else problem.seqlen_q
        length_k = cu_k[b + 1] - cu_k[b] if problem.packed else problem.seqlen_k
        band = problem.band(length_q, length_k)
        end = length_k if band.high is None else max(0, length_q + band.high)
        unseen = torch.ones(length_k, dtype=torch.bool, device=v.device)
        unseen[max(0, band.low or 0) : end] = False
        hidden += int(unseen.sum())
        of_sequence = v[cu_k[b] : cu_k[b + 1]] if problem.packed else v[b]
        if v.element_size() == 1:  # torch sets no chosen elements of float8, where 0x7F is NaN
            of_sequence.view(torch.uint8)[unseen] = 0x7F
        else:
            of_sequence[unseen] = torch.nan
    assert hidden > 0, "every key is seen"
    return call.operands._replace(v=v)


@one_in(4)
@pytest.mark.parametrize("block", [0, 64, 128])
@pytest.mark.parametrize("causal", ["", "bottom_right"])
def test_every_default_fits(causal: str, block: int) -> None:
    for width, width_v in product(range(16, 257, 16), repeat=2):
        for length in (330, 1024, 8192):
            call = cases.build(replace(PLAIN, causal=causal), "normal", CPU)
            problem = replace(
                call.problem, head_dim=width, head_dim_v=width_v, seqlen_q=length, seqlen_k=length,
                dtype_v="int8", descale_blocks=(block, block, block),
            )  # fmt: skip
            chosen = flash_fwd.default(problem, H200)
            assert chosen is not None and config._fits(problem, H200, replace(chosen, narrowest_v=16)), (
                f"{problem.describe()}: {chosen}"
            )
            assert block % chosen.block_n == 0


@pytest.mark.parametrize(
    ("dtype", "changes", "reason"),
    [
        ("int8:bfloat16:head", {}, ""),
        ("int8:int8:head", {}, ""),
        ("int8:int8:head", {"head_dim_v": 72}, ""),
        ("int8:bfloat16:head", {"head_dim": 72}, "head_dim is 72; it must be a multiple of 16"),
        ("int8:bfloat16:head", {"head_dim_v": 72}, ""),
        ("int8:bfloat16:head", {"head_dim_v": 264}, "head_dim_v is 264"),
        ("int8:bfloat16:head", {"dtype_out": "float8_e5m2"}, "out is float8_e5m2"),
        ("float8_e4m3fn:float8_e4m3fn:head", {}, ""),
        ("float8_e4m3fn:float8_e5m2:64", {"dtype_out": "float16"}, ""),
        (
            "float8_e4m3fn:float8_e5m2:64",
            {"bias_shape": (1, 1, 1024, 1024), "bias_dtype": "bfloat16"},
            "it takes no bias",
        ),
        ("float8_e4m3fn:float8_e5m2:head", {"bias_shape": (1, 1, 1024, 1024), "bias_dtype": "bfloat16"}, ""),
    ],
)
def test_claims(dtype: str, changes: dict[str, Any], reason: str) -> None:
    call = cases.build(replace(PLAIN, dtype=dtype, lengths=(1024, 1024)), "normal", CPU)
    problem = replace(call.problem, **changes)
    reasons = dispatch.why_not(flash_fwd, problem, H200)
    assert (len(reasons) == 1 and reason in reasons[0]) if reason else reasons == []
    assert (dispatch.choose(problem, H200).kernel.NAME == "hopper/flash_fwd") == (not reason)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "last stride 2", "offset 1"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_widened_values(dtype: str, layout: str) -> None:
    """Every number in any layout. Triton's interpreter converts neither NaN nor subnormal numbers of float8."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    v = torch.arange(2 * 37 * 3 * 40, device=device).to(torch.uint8).view(2, 37, 3, 40).view(getattr(torch, dtype))
    v = cases.LAYOUTS[layout](v, v, v)[2]
    call = cases.build(replace(PLAIN, dims=(64, 40), heads=(6, 3), batch=2, lengths=(5, 37)), "normal", CPU)
    problem = replace(call.problem, dtype="int8" if dtype == "int8" else "float8_e4m3fn", dtype_v=dtype)
    wide = torch.full(v.shape, torch.nan, dtype=torch.float16, device=device)
    spec = widen_values.specify(problem, H200, call.operands._replace(v=v), wide)
    launch.bind(spec)(*spec.tensors)
    expected = v.to(torch.float16)
    if device.type == "cpu":
        known = expected.isfinite() & ((expected == 0) | (expected.abs() >= 2.0**-14))
        expected, wide = expected[known], wide[known]
    assert torch.equal(wide.nan_to_num(), expected.nan_to_num())


def test_a_call_binds_its_factors_by_their_strides() -> None:
    """Factors lie in memory as the caller has them."""
    call = cases.build(replace(PLAIN, dtype="int8:int8:64", batch=2), "normal", CPU)
    chosen = flash_fwd.configs(call.problem, H200)[0]
    moved = {
        name: getattr(call.operands, name).transpose(0, -1).contiguous().transpose(0, -1)
        for name in ("q_descale", "k_descale", "v_descale")
    }
    expected = on_cpu(call, chosen)
    found = on_cpu(call._replace(operands=call.operands._replace(**moved)), chosen)
    assert harness.bits(*found) == harness.bits(*expected)


@pytest.mark.parametrize(("queries", "chosen"), [(127, "flash_fwd"), (128, "hopper/flash_fwd")])
def test_few_queries_do_not_pay_for_widening_values(queries: int, chosen: str) -> None:
    case = replace(PLAIN, dims=(128, 128), lengths=(queries, 1024), heads=(1, 1))
    for dtype, expected in (("int8:int8:head", chosen), ("int8:bfloat16:head", "hopper/flash_fwd")):
        call = cases.build(replace(case, dtype=dtype), "normal", CPU)
        assert dispatch.choose(call.problem, H200).kernel.NAME == expected


def test_cost_counts_the_launch_that_widens_values() -> None:
    case = replace(PLAIN, dims=(128, 128), dtype="float8_e4m3fn:float8_e4m3fn:head", lse=False)
    problem, chosen = cases.build(case, "normal", CPU).problem, Config(128, 64, 3)
    found = flash_fwd.cost(problem, H200, chosen)
    narrow = flash_fwd.cost(replace(problem, dtype_v="bfloat16"), H200, chosen)
    values = 330 * 128
    assert (found.launches, narrow.launches) == (2, 1)
    assert (found.read_bytes - narrow.read_bytes, found.write_bytes - narrow.write_bytes) == (values, 2 * values)
    masked = replace(problem, mask_shape=(1, 1, 150, 330))
    assert flash_fwd.cost(masked, H200, chosen).launches == 3


def test_cost_counts_each_tensor_by_its_own_bytes() -> None:
    call = cases.build(replace(PLAIN, dims=(128, 128), lse=False), "normal", CPU)
    int8, chosen = call.problem, Config(128, 64, 3)
    of_16_bits = replace(int8, dtype="bfloat16", dtype_v=None, dtype_out=None, descale_blocks=None)
    found, wide = (flash_fwd.cost(problem, H200, chosen) for problem in (int8, of_16_bits))
    rows, keys = 2 * 150, 2 * 2 * 6 * 64  # 6 tiles of keys for each of two tiles of queries of two heads
    assert (wide.read_bytes, found.read_bytes) == (rows * 256 + keys * 512, rows * 128 + keys * 384)
    assert (wide.write_bytes, found.write_bytes) == (rows * 256, rows * 256)
    assert wide.smem_bytes - found.smem_bytes == 128 * (128 + 3 * 64)
