"""The Hopper forward's own source on a CPU, with int8 q and k: its factors and masks, tile by tile."""

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
from warpwave import dispatch
from warpwave.gpu import Gpu
from warpwave.kernels.hopper import factors, flash_fwd, rows, scheduler, serial, softmax, split_float32, visible
from warpwave.kernels.hopper import parts as device_parts
from warpwave.kernels.hopper import words as device_words
from warpwave.kernels.hopper.flash_fwd import Config, config, consumer, kernel, mask_bias, producer
from warpwave.runtime import launch
from warpwave.runtime.triton_or_stub import NO_TRITON

H200 = Gpu.for_arch("sm_90")
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(NO_TRITON is not None, reason="Triton is published for Linux only")


def on_cpu(call: Call, chosen: Config) -> tuple[Tensor, Tensor]:
    """out and lse by the source of the kernel and its roles, one block after another. Blocks that share an SM would
    use named barriers, which `gluon_on_cpu` does not have."""
    problem, operands, chosen = call.problem, call.operands, replace(chosen, blocks_per_sm=1)
    out = torch.full(
        (*operands.q.shape[:-1], problem.head_dim_v), torch.nan, dtype=getattr(torch, problem.dtype_of_out)
    )
    rows_of_lse = (problem.total_q,) if problem.packed else (problem.seqlen_q,)
    batches = () if problem.packed else (problem.batch,)
    lse = torch.full((*batches, problem.num_heads_q, *rows_of_lse), torch.nan)
    specified = flash_fwd.specify(problem, H200, operands, out, lse, chosen)
    *ahead, attend = (specified,) if isinstance(specified, launch.Launch) else specified
    for spec in ahead:
        launch.bind(spec)(*spec.tensors)
    modules = (
        *(kernel, consumer, producer, mask_bias, factors, device_parts, rows, scheduler, serial, softmax),
        *(split_float32, visible, device_words),
    )
    gluon_on_cpu.run_launch(attend, modules, 2, {})
    return out, lse


def gate(call: Call, chosen: Config | None = None) -> tuple[Tensor, Tensor]:
    found = on_cpu(call, chosen or flash_fwd.configs(call.problem, H200)[0])
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), *found)
    assert verdict.passed, str(verdict)
    return found


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
}


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


def test_numbers_of_the_largest_magnitude() -> None:
    """256 products of 128 * 128: their sum is exact in float32, and 2^7 times the largest of float16."""
    call = cases.build(replace(PLAIN, dims=(256, 64), dtype="int8:float16:tensor"), "normal", CPU)
    signs = torch.where(call.operands.q[..., :1] < 0, 127, -128).to(torch.int8)
    q = signs.expand(call.operands.q.shape).contiguous()
    k = torch.where(call.operands.k[..., :1] < 0, 127, -128).to(torch.int8).expand(call.operands.k.shape).contiguous()
    small = torch.tensor(2.0**-9)
    operands = call.operands._replace(q=q, k=k, q_descale=small, k_descale=small)
    gate(call._replace(operands=operands))


@pytest.mark.parametrize("name", ["window, far", "window, far, 64", "packed window", "mask, window"])
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
        of_sequence[unseen] = torch.nan
    assert hidden > 0, "every key is seen"
    return call.operands._replace(v=v)


@pytest.mark.parametrize("block", [0, 64, 128])
@pytest.mark.parametrize("causal", ["", "bottom_right"])
def test_every_default_fits(causal: str, block: int) -> None:
    for width, width_v in product(range(16, 257, 16), repeat=2):
        for length in (330, 1024, 8192):
            call = cases.build(replace(PLAIN, causal=causal), "normal", CPU)
            problem = replace(
                call.problem, head_dim=width, head_dim_v=width_v, seqlen_q=length, seqlen_k=length,
                descale_blocks=(block, block, 0),
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
        ("int8:int8:head", {}, "v is int8"),
        ("int8:bfloat16:head", {"head_dim": 72}, "head_dim is 72; it must be a multiple of 16"),
        ("int8:bfloat16:head", {"head_dim_v": 72}, ""),
        ("int8:bfloat16:head", {"head_dim_v": 264}, "head_dim_v is 264"),
        ("int8:bfloat16:head", {"dtype_out": "float8_e5m2"}, "out is float8_e5m2"),
        ("float8_e4m3fn:float8_e4m3fn:head", {}, "its quantized products are int8"),
    ],
)
def test_claims(dtype: str, changes: dict[str, Any], reason: str) -> None:
    call = cases.build(replace(PLAIN, dtype=dtype, lengths=(1024, 1024)), "normal", CPU)
    problem = replace(call.problem, **changes)
    reasons = dispatch.why_not(flash_fwd, problem, H200)
    assert (len(reasons) == 1 and reason in reasons[0]) if reason else reasons == []
    assert (dispatch.choose(problem, H200).kernel.NAME == "hopper/flash_fwd") == (not reason)


def test_a_call_binds_its_factors_by_their_strides() -> None:
    """Factors lie in memory as the caller has them."""
    call = cases.build(replace(PLAIN, dtype="int8:float16:64", batch=2), "normal", CPU)
    chosen = flash_fwd.configs(call.problem, H200)[0]
    moved = {
        name: getattr(call.operands, name).transpose(0, -1).contiguous().transpose(0, -1)
        for name in ("q_descale", "k_descale")
    }
    expected = on_cpu(call, chosen)
    found = on_cpu(call._replace(operands=call.operands._replace(**moved)), chosen)
    assert harness.bits(*found) == harness.bits(*expected)


def test_cost_counts_each_tensor_by_its_own_bytes() -> None:
    call = cases.build(replace(PLAIN, dims=(128, 128), lse=False), "normal", CPU)
    int8, chosen = call.problem, Config(128, 64, 3)
    of_16_bits = replace(int8, dtype="bfloat16", dtype_v=None, dtype_out=None, descale_blocks=None)
    found, wide = (flash_fwd.cost(problem, H200, chosen) for problem in (int8, of_16_bits))
    rows, keys = 2 * 150, 2 * 2 * 6 * 64  # 6 tiles of keys for each of two tiles of queries of two heads
    assert (wide.read_bytes, found.read_bytes) == (rows * 256 + keys * 512, rows * 128 + keys * 384)
    assert (wide.write_bytes, found.write_bytes) == (rows * 256, rows * 256)
    assert wide.smem_bytes - found.smem_bytes == 128 * (128 + 3 * 64)
