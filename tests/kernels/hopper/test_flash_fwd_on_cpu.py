"""The Hopper forward's own source on a CPU: its protocol and arithmetic, tile by tile, against the gates."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import cases
from tests.conformance.cases import PLAIN
from tests.conformance.datasets import Data
from tests.conformance.gates import forward_references, judge_forward
from tests.kernels.hopper import gluon_on_cpu
from warpwave import precision
from warpwave.hardware.gpu import Gpu
from warpwave.kernels import split_ahead
from warpwave.kernels.hopper import flash_fwd, flash_fwd_configs, launcher
from warpwave.problem import AttentionProblem, Operands
from warpwave.reference import oracle

H200 = Gpu.for_arch("sm_90")
pytestmark = pytest.mark.skipif(flash_fwd.NO_TRITON is not None, reason="Triton is published for Linux only")


def split(x: Tensor, parts: int, shape: tuple[int, ...]) -> Tensor:
    """What the launch before leaves of an operand, in torch (test_flash_fwd.py holds the kernel to the same)."""
    x = (x if x.dim() == 4 else x[None]).transpose(1, 2)  # (batch, heads, rows, width)
    found = torch.zeros(shape, dtype=torch.bfloat16).unflatten(1, (-1, parts))
    for i in range(parts):
        found[:, :, i, :, : x.shape[-1]] = part = x.to(torch.bfloat16)
        x = x - part.float()
    return found.flatten(1, 2)


def on_cpu(problem: AttentionProblem, operands: Operands, config: flash_fwd.Config) -> tuple[Tensor, Tensor]:
    """out and lse by the source of the kernel's roles, one block after another."""
    from warpwave.kernels.hopper import parts as device_parts
    from warpwave.kernels.hopper import roles, rows, scheduler, serial, softmax, split_float32, visible

    modules = {m.__name__: m for m in (roles, serial, split_float32, device_parts, rows, scheduler, softmax, visible)}
    parts = flash_fwd_configs.num_parts(problem, H200)
    out = torch.full((*operands.q.shape[:-1], problem.head_dim_v), torch.nan, dtype=operands.q.dtype)
    lse = torch.full(
        (problem.num_heads_q, problem.total_q) if problem.packed else
        (problem.batch, problem.num_heads_q, problem.seqlen_q), torch.nan,
    )  # fmt: skip
    sources: tuple[Tensor, ...] = (*operands[:3], out)
    if parts == 1:
        plans = flash_fwd._plans(problem, config, operands, out)
    else:
        widths = [sum(flash_fwd.pieces(n)) for n in (problem.head_dim, problem.head_dim_v)]
        shapes = split_ahead.part_shapes(problem, precision.arithmetic(problem, H200), widths[0], widths[1])
        of_parts = tuple(split(x, parts, shape) for x, shape in zip(operands[:3], shapes, strict=True))
        plans = flash_fwd._plans_of_parts(problem, config, of_parts)
        sources = (*of_parts, out)
    maps = [[map_of(p, sources) for p in plans[i : i + 3] if p is not None] for i in range(0, 12, 3)]
    tiles = flash_fwd.query_tiles(problem, config)
    (
        slope_stride, lse_b, lse_h, num_tiles, heads, group, batch, per_head, in_l2, seqlen_q, seqlen_k, total_q,
        total_k, left, right, scale, softcap_log2,
    ) = flash_fwd._scalars(problem, operands, config, tiles, parts)  # fmt: skip
    constants = flash_fwd._constants(problem, config, parts)
    pointer = gluon_on_cpu.Pointer
    absent, counter = pointer(torch.zeros(1)), torch.zeros(1, dtype=torch.int64)
    groups, stages, block_n = config.groups, config.num_stages, config.block_n
    for program in range(2):
        block = gluon_on_cpu.Block(program, 2)
        names = gluon_on_cpu.functions(modules, block)
        schedule_names = names[scheduler.__name__]
        rules = names[visible.__name__].Rules(
            scale, softcap_log2, left, right, groups, block_n,
            *(constants[n] for n in ("HAS_LOW", "HAS_HIGH", "TOP_LEFT", "HAS_ALIBI", "HAS_SOFTCAP", "HAS_SINKS")),
            *(constants[n] for n in ("IS_VARLEN", "WRITE_LSE", "OWN_OUT", "VALUES_FIRST", "PARTS", "HEAD_DIM_V")),
        )  # fmt: skip
        schedule = schedule_names.Schedule(
            pointer(counter), num_tiles, heads, group, batch, per_head, in_l2, seqlen_q, seqlen_k, total_q, total_k,
            *(absent if x is None else pointer(x) for x in operands[7:9]),
        )  # fmt: skip
        rings = []
        for of_operand in maps[1:3]:
            rings.append(names[device_parts.__name__].Ring(
                buffers(block, of_operand, stages * parts), block.barriers(stages, 1), block.barriers(stages, groups),
                stages, 0, parts,
            ))  # fmt: skip
        q_tiles = buffers(block, maps[0], groups * parts)
        out_tiles = buffers(block, maps[3], groups) if constants["OWN_OUT"] and parts == 1 else q_tiles
        q_full, q_empty = block.barriers(groups, 1), block.barriers(groups, 1)
        words = block.tile([2 * 7, 1], torch.int64)
        box = schedule_names.Mailbox(words, block.barriers(2, 1), block.barriers(2, groups))
        slopes, sinks = (absent if x is None else pointer(x.flatten()) for x in operands[5:7])
        of_consumer = (
            maps[3], pointer(out.view(-1)), pointer(lse.view(-1)), slopes, sinks, slope_stride, lse_b, lse_h, heads,
            seqlen_q, seqlen_k, q_tiles, out_tiles, q_full, q_empty, *rings, box, rules,
        )  # fmt: skip
        roles_names = names[roles.__name__]
        gluon_on_cpu.run_roles([
            partial(roles_names.producer, *maps[:3], q_tiles, q_full, q_empty, *rings, box, schedule, rules),
            *(partial(roles_names.consumer, g, *of_consumer) for g in range(groups)),
        ])  # fmt: skip
    assert counter.item() == 0, "the tile counter was not put back"
    return out, lse


def map_of(plan: launcher.MapPlan, sources: tuple[Tensor, ...]) -> gluon_on_cpu.Map:
    made: Any = gluon_on_cpu.Map(sources[plan.source].as_strided(plan.shape, plan.strides), list(plan.block))
    made.shape = [torch.tensor(n) for n in plan.shape]
    return made


def buffers(block: gluon_on_cpu.Block, maps: list[gluon_on_cpu.Map], count: int) -> tuple[gluon_on_cpu.Memory, ...]:
    return tuple(block.tile([count, *m.block_type.shape], m.dtype) for m in maps)


SHORT = replace(PLAIN, lengths=(150, 210), heads=(2, 1), lse=True)
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": "bottom_right", "sinks": True},
    "top left": {"causal": "top_left", "lengths": (210, 70)},
    "window": {"window": (60, 5), "alibi": "heads", "softcap": 3.0},
    "packed": {"packed": True, "batch": 4, "causal": "bottom_right"},
    "long rows of one query": {"lengths": (1, 300), "batch": 2},
}
KINDS: dict[str, tuple[str, tuple[int, int], flash_fwd.Config]] = {
    "bf16x6": ("float32:bf16x6", (40, 59), flash_fwd.Config(128, 64, 2)),
    "bf16x3, one stage": ("float32:bf16x3", (64, 112), flash_fwd.Config(192, 32, 1)),
    "bf16x6, wide": ("float32:default", (80, 256), flash_fwd.Config(64, 32, 1)),
    "16 bits, overlapped": ("float16", (64, 80), flash_fwd.Config(128, 64, 2)),
    "16 bits, serial": ("float16", (64, 352), flash_fwd.Config(128, 32, 2)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("features", CALLS)
def test_the_protocol_on_a_cpu(features: str, kind: str) -> None:
    dtype, dims, config = KINDS[kind]
    call = cases.build(replace(SHORT, dtype=dtype, dims=dims, **CALLS[features]), "normal", torch.device("cpu"))
    out, lse = on_cpu(call.problem, call.operands, config)
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), out, lse)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("data", ["sharp", "low"])
@pytest.mark.parametrize("arithmetic", ["bf16x3", "bf16x6"])
def test_promises_are_kept_on_a_cpu(arithmetic: str, data: Data) -> None:
    call = cases.build(replace(SHORT, dtype=f"float32:{arithmetic}"), data, torch.device("cpu"))
    references = forward_references(call.problem, call.operands)
    out, lse = on_cpu(call.problem, call.operands, flash_fwd.Config(128, 64, 2))
    assert judge_forward(call.problem, references, out, lse).passed
    exact = oracle(call.problem, call.operands).out
    error = ((out.double() - exact).norm() / exact.norm()).item()
    assert error <= precision.promised_error(arithmetic, call.problem)


def test_a_value_comes_back_to_the_bit() -> None:
    """In bf16x6 one key that leads by far gives its value, all 24 bits of it."""
    call = cases.build(replace(SHORT, dtype="float32:bf16x6"), "normal", torch.device("cpu"))
    q, k, v = call.operands[:3]
    q.fill_(4.0), k.zero_(), k[:, 77].fill_(4.0)  # a logit of 128 among zeros
    out, _ = on_cpu(call.problem, call.operands, flash_fwd.Config(128, 64, 2))
    assert torch.equal(out, v[:, 77:78].expand(out.shape))
