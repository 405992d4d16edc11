"""What the Hopper kernel for large heads has to show: its protocol on a CPU, its claims, and its races on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.conformance import cases, harness
from tests.conformance.cases import PLAIN
from tests.conformance.gates import forward_references, judge_forward
from tests.kernels.hopper import gluon_on_cpu
from tests.kernels.hopper.test_flash_fwd import hopper
from tests.marks import needs_triton, one_in
from warpwave import UnsupportedProblem, attention
from warpwave.cached_calls import operands_without_memory
from warpwave.gpu import CPU, Gpu
from warpwave.kernels.hopper import parts, rows, scheduler, softmax, visible
from warpwave.kernels.hopper.large_head_dim import config as large_head_dim_configs
from warpwave.kernels.hopper.large_head_dim import kernel as large_head_dim
from warpwave.kernels.hopper.large_head_dim import roles
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem

H200 = Gpu.for_arch("sm_90")
PROBLEM = AttentionProblem(
    batch=1, seqlen_q=150, seqlen_k=210, num_heads_q=2, num_heads_kv=1, head_dim=512, head_dim_v=512,
    dtype="bfloat16", softmax_scale=0.05, return_lse=True,
)  # fmt: skip


# The protocol, on a CPU -----------------------------------------------------------------------------------------------


def on_cpu(
    problem: AttentionProblem, operands: Operands, config: large_head_dim.Config
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by the source of the kernel's roles, one block after another."""
    out, lse = gluon_on_cpu.unwritten(problem, operands.q)
    spec = large_head_dim.specify(problem, H200, operands, out, lse, config)
    gluon_on_cpu.run_launch(spec, (large_head_dim, roles, parts, rows, scheduler, softmax, visible), 2, {})
    return out, lse


WIDE = replace(PLAIN, dtype="float16", dims=(512, 512), lengths=(150, 210), heads=(2, 1))
CONFIGS = {
    "alone": large_head_dim.Config(1, 9),
    "ahead": large_head_dim.Config(1, 9, True),
}
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": "bottom_right", "sinks": True},
    "top left": {"causal": "top_left", "lengths": (210, 70)},
    "window": {"window": (60, 5), "alibi": "heads", "softcap": 3.0},
    "packed": {"packed": True, "batch": 4, "causal": "bottom_right"},
    "odd widths": {"dims": (448, 640)},
    "wide values": {"dims": (576, 768), "lengths": (40, 100)},
}


@one_in(4)
@needs_triton
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("features", CALLS)
def test_the_protocol_on_a_cpu(features: str, config: str) -> None:
    """The source of the roles, with every chunk, message and barrier where the kernel has it."""
    call = cases.build(replace(WIDE, **CALLS[features]), "normal", torch.device("cpu"))
    chosen = CONFIGS[config]
    if call.problem.head_dim_v > large_head_dim_configs.MAX_COLUMNS:
        chosen = replace(chosen, v_parts=2)
    chosen = replace(chosen, num_stages=7 if features == "wide values" else 8)
    if reason := large_head_dim_configs.cannot(call.problem, chosen):
        assert chosen.scores_ahead, reason
        return
    out, lse = on_cpu(call.problem, call.operands, chosen)
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), out, lse)
    assert verdict.passed, str(verdict)


@needs_triton
@pytest.mark.parametrize("config", CONFIGS)
def test_a_packed_sequence_does_not_see_its_neighbors(config: str) -> None:
    """NaN in the keys and values of one sequence, some of which lie in the last chunk of the one before."""
    call = cases.build(replace(WIDE, packed=True, batch=4), "normal", torch.device("cpu"))
    clean, _ = on_cpu(call.problem, call.operands, CONFIGS[config])
    ends = call.operands.cu_seqlens_k
    assert ends[1] % 64 and ends[1] < ends[2], "the last chunk of the first sequence reaches into the second"
    for x in call.operands.k, call.operands.v:
        x[ends[1] : ends[2]] = torch.nan
    out, _ = on_cpu(call.problem, call.operands, CONFIGS[config])
    rows = call.operands.cu_seqlens_q.tolist()
    others = [*range(rows[1]), *range(rows[2], rows[-1])]
    assert torch.equal(out[others], clean[others])


# What it claims -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "gpu", "word"),
    [
        ({}, Gpu.for_arch("sm_80"), "Hopper"),
        ({}, Gpu.for_arch("sm_100"), "Hopper"),
        ({}, CPU, "Hopper"),
        ({"dtype": "float32"}, H200, "float16 and bfloat16"),
        ({"head_dim": 500}, H200, "head_dim is 500"),
        ({"head_dim": 776}, H200, "head_dim is 776"),
        ({"head_dim_v": 2056}, H200, "head_dim_v is 2056"),
        ({"mask_shape": (1, 1, 150, 210)}, H200, "boolean mask"),
        ({"bias_shape": (1, 1, 150, 210), "bias_dtype": "bfloat16"}, H200, "bias"),
        ({"requires_grad": True}, H200, "gradients"),
    ],
)
def test_says_why_not(change: dict[str, Any], gpu: Gpu, word: str) -> None:
    assert any(word in reason for reason in large_head_dim.why_not(replace(PROBLEM, **change), gpu))


@needs_triton
@pytest.mark.parametrize(
    "dims",
    [(8, 512), (264, 264), (392, 392), (448, 448), (512, 512), (576, 512), (640, 640), (768, 768), (768, 2048)],
    ids=str,
)
def test_every_width_has_configs_that_fit(dims: tuple[int, int]) -> None:
    problem = replace(PROBLEM, head_dim=dims[0], head_dim_v=dims[1])
    assert large_head_dim.why_not(problem, H200) == []
    for config in large_head_dim_configs.configs(problem, H200):
        assert large_head_dim.smem_bytes(problem, H200, config) <= H200.smem_per_block_bytes
        assert large_head_dim_configs.v_chunks_of(problem, config.v_parts) * 128 <= large_head_dim_configs.MAX_COLUMNS


@pytest.mark.parametrize("changes", [{"v_parts": 0}, {"num_stages": 1}, {"num_stages": 13}], ids=str)
def test_configs_check_themselves(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        large_head_dim.Config(**({"v_parts": 1, "num_stages": 8} | changes))


@needs_triton
def test_refuses_a_config_that_cannot_run() -> None:
    problem = replace(PROBLEM, head_dim_v=768)  # 384 columns a warpgroup
    operands = operands_without_memory(problem)
    with pytest.raises(UnsupportedProblem, match="cannot run"):
        large_head_dim.specify(problem, H200, operands, operands.q, None, large_head_dim.Config(1, 7))


def test_parts_of_the_columns_compute_scores_anew() -> None:
    one_head = replace(PROBLEM, num_heads_q=1, seqlen_q=256, seqlen_k=256)
    once, twice = (large_head_dim.cost(one_head, H200, large_head_dim.Config(parts, 9)) for parts in (1, 2))
    assert twice.exponentials == 2 * once.exponentials
    assert 2 * twice.flops == 3 * once.flops


# Races ----------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not hopper(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("width", [264, 320, 384, 448, 512, 576, 640, 768])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_width_on_a_gpu(width: int, config: str) -> None:
    case = replace(WIDE, dims=(width, width), lengths=(1100, 1203), heads=(4, 2), causal="bottom_right")
    for dtype in ("bfloat16", "float16"):
        call = cases.build(replace(case, dtype=dtype), "sharp", torch.device("cuda"))
        default = large_head_dim_configs.configs(call.problem, H200)[0]
        chosen = replace(default, scores_ahead=CONFIGS[config].scores_ahead)
        if chosen.scores_ahead and large_head_dim_configs.cannot(call.problem, chosen):
            return
        out, lse = harness.run("hopper/large_head_dim", call, chosen)
        verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), out, lse)
        assert verdict.passed, str(verdict)


@pytest.mark.gpu
@pytest.mark.skipif(not hopper(), reason="needs a Hopper GPU")
def test_repeats_of_mixed_launches_are_bit_equal() -> None:
    """600 launches that change variant each time: what moves is a race."""
    q, k, v = (torch.randn(1, 1500, 12, 512, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    calls = [
        partial(attention, q, k, v, kernel="hopper/large_head_dim", config=config, causal=causal)
        for config in CONFIGS.values()
        for causal in (False, True)
    ]
    expected = [call() for call in calls]
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(600):
        n = (i * 3) % len(calls)
        different += (calls[n]().view(torch.int16) != expected[n].view(torch.int16)).any()
    assert different.item() == 0
