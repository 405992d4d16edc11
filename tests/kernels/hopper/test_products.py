"""three_kernel's two launches on Hopper: their protocol on a CPU, and what they refuse. On a GPU: test_large_heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.conformance import cases
from tests.conformance.cases import PLAIN
from tests.conformance.datasets import Data
from tests.conformance.gates import forward_references, judge_forward
from tests.kernels.hopper import gluon_on_cpu
from warpwave.hardware.gpu import Gpu
from warpwave.kernels import three_kernel_hopper
from warpwave.kernels.three_kernel_plan import Config, allocate_workspace, least_bytes, plan
from warpwave.problem import AttentionProblem, Operands

H200 = replace(Gpu.for_arch("sm_90"), num_sms=3)
CONFIG = Config("hopper", "hopper", 128, 256, 64, 256, 8, 3, 1, 1, 64, 4, 1 << 26)
triton_only = pytest.mark.skipif(three_kernel_hopper.NO_TRITON is not None, reason="Triton is published for Linux only")
WIDE = replace(PLAIN, dims=(136, 264), heads=(4, 2), batch=2, lengths=(200, 300))
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": "bottom_right", "sinks": True},
    "rows that see nothing": {"causal": "bottom_right", "lengths": (300, 100)},
    "right side of a window": {"window": (-1, 5), "heads": (3, 1), "batch": 1, "dims": (64, 520)},
    "one query": {"lengths": (1, 700), "sinks": True, "scale": 1.0},
}


def on_cpu(problem: AttentionProblem, operands: Operands, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by the source of both kernels' roles."""
    from warpwave.kernels.hopper import parts, products, softmax

    modules = {m.__name__: m for m in (products, parts, softmax)}
    q = operands.q
    out = torch.full((*q.shape[:-1], problem.head_dim_v), torch.nan, dtype=q.dtype)
    lse = torch.full((problem.batch, problem.num_heads_q, problem.seqlen_q), torch.nan)
    cut = plan(problem, config)
    workspace = allocate_workspace(problem, config, cut, q.device)
    for tensor in workspace.values():
        if tensor is not None:
            tensor.fill_(torch.nan)
    pointer = gluon_on_cpu.Pointer
    absent = pointer(torch.zeros(1))
    by_address = {t.data_ptr(): t for t in (*operands[:3], out, workspace["p"])}
    for chunk in cut.chunks:
        for launched, maps, sources in _launches(problem, operands, out, lse, cut, chunk, workspace):
            # A P that a launch leaves unwritten and another reads is NaN.
            described = []
            for spec in maps:
                tensor = by_address[sources[spec.source].data_ptr()]
                described.append(gluon_on_cpu.Map(tensor.as_strided(spec.shape, spec.strides), list(spec.block)))
            pointers = [absent if t is None else pointer(t.view(-1)) for t in launched.tensors[len(maps) : -1]]
            for program in range(launched.grid):
                block = gluon_on_cpu.Block(program, launched.grid)
                roles = gluon_on_cpu.functions(modules, block)[products.__name__]
                of_a, of_b, of_out = (m.block_type.shape for m in described)
                ring = roles.Ring(
                    block.tile([6, *of_a], q.dtype), block.tile([3, *of_b], q.dtype), block.barriers(3, 1),
                    block.barriers(3, 2),
                )  # fmt: skip
                stored = block.tile([2, *of_out], q.dtype)
                gluon_on_cpu.run_roles(_threads(launched, roles, described, pointers, stored, ring))
    return out, lse


def _launches(*arguments: Any) -> list[Any]:
    return three_kernel_hopper.launches(arguments[0], H200, *arguments[1:], described=False)


def _threads(launched: Any, roles: Any, maps: Any, pointers: Any, stored: Any, ring: Any) -> list[Callable[[], None]]:
    """The roles of a launch, as the kernel's body starts them."""
    first, second, third = maps
    if "WRITE_LSE" in launched.constants:
        *strides, num_tiles, chunk_rows, steps, scale = launched.scalars
        chunk, rules = roles.Chunk(*strides[2:]), roles.Rules(*launched.constants.values())
        consumer = (third, *pointers, *strides[:2], num_tiles, chunk_rows, scale, stored, ring, chunk, steps, rules)
        threads = [partial(roles.scores_consumer, group, *consumer) for group in range(2)]
        return [*threads, partial(roles.scores_producer, first, second, ring, chunk, steps)]
    *of_chunk, num_tiles, chunk_rows = launched.scalars
    chunk = roles.Chunk(*of_chunk)
    consumer = (third, *pointers, num_tiles, chunk_rows, stored, ring, chunk)
    threads = [partial(roles.values_consumer, group, *consumer) for group in range(2)]
    return [*threads, partial(roles.values_producer, first, second, ring, chunk)]


@triton_only
@pytest.mark.parametrize(("features", "data"), [(f, "sharp" if i % 2 else "normal") for i, f in enumerate(CALLS)])
def test_the_protocol_on_a_cpu(features: str, data: Data) -> None:
    """The source of the roles, with every step and barrier where the kernels have it, in one chunk and in several."""
    call = cases.build(replace(WIDE, **CALLS[features]), data, torch.device("cpu"))
    references = forward_references(call.problem, call.operands)
    for size in (1 << 26, 3 * least_bytes(call.problem, CONFIG)):
        out, lse = on_cpu(call.problem, call.operands, replace(CONFIG, workspace_bytes=size))
        verdict = judge_forward(call.problem, references, out, lse)
        assert verdict.passed, str(verdict)


@triton_only
def test_keys_that_nobody_sees_have_no_effect() -> None:
    """300 keys of which top-left causal queries see 200: NaN behind them changes no bit."""
    call = cases.build(replace(WIDE, causal="top_left", batch=1), "normal", torch.device("cpu"))
    clean = on_cpu(call.problem, call.operands, CONFIG)
    for tensor in call.operands[1:3]:
        tensor[:, 200:] = torch.nan
    for expected, got in zip(clean, on_cpu(call.problem, call.operands, CONFIG), strict=True):
        assert torch.equal(expected, got)


@pytest.mark.parametrize(
    ("change", "arch", "word"),
    [
        ({}, "sm_80", "Hopper"),
        ({}, "sm_100", "Hopper"),
        ({"dtype": "float32"}, "sm_90", "16-bit"),
        ({"window_size": (3, -1)}, "sm_90", "left side of a window"),
        ({"softcap": 3.0}, "sm_90", "softcap"),
        ({"head_dim": 500}, "sm_90", "head_dim is 500"),
    ],
)
def test_what_it_refuses(change: dict[str, Any], arch: str, word: str) -> None:
    call = cases.build(WIDE, "normal", torch.device("cpu"))
    (reason,) = three_kernel_hopper.cannot(replace(call.problem, **change), Gpu.for_arch(arch))
    assert word in reason
