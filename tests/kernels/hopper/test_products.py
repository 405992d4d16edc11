"""three_kernel's launches on Hopper: their protocol on a CPU, and what they refuse. On a GPU: test_large_heads."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from tests.conformance import cases
from tests.conformance.cases import PLAIN
from tests.conformance.datasets import Data
from tests.conformance.gates import forward_references, judge_forward
from tests.kernels.hopper import gluon_on_cpu
from tests.marks import needs_triton, one_in
from warpwave.gpu import Gpu
from warpwave.kernels.three_kernel import hopper_host as three_kernel_hopper
from warpwave.kernels.three_kernel.plan import Config, allocate_workspace, key_tiles_before, least_bytes, plan
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch

H200 = replace(Gpu.for_arch("sm_90"), num_sms=3)
CONFIG = Config("hopper", "hopper", 128, 256, 64, 256, 8, 3, 1, 1, 64, 4, 1 << 26)
STAGES = 4
WIDE = replace(PLAIN, dims=(136, 264), heads=(4, 2), batch=2, lengths=(200, 300))
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": "bottom_right", "sinks": True},
    "rows that see nothing": {"causal": "bottom_right", "lengths": (300, 100)},
    "right side of a window": {"window": (-1, 5), "heads": (3, 1), "batch": 1, "dims": (64, 520)},
    "one key": {"lengths": (300, 1), "sinks": True, "dims": (72, 72), "heads": (1, 1), "dtype": "float16"},
    "one query": {"lengths": (1, 700), "sinks": True, "scale": 1.0},
}


def on_cpu(problem: AttentionProblem, operands: Operands, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by the source of both products' roles, and the statistics as Triton's interpreter runs them."""
    from warpwave.kernels.hopper import parts, softmax
    from warpwave.kernels.three_kernel import hopper_products as products
    from warpwave.kernels.three_kernel import hopper_tiles as product_tiles

    modules = {m.__name__: m for m in (products, product_tiles, parts, softmax)}
    q = operands.q
    out, lse = gluon_on_cpu.unwritten(problem, q)
    cut = plan(problem, config)
    workspace = allocate_workspace(problem, config, cut, q.device)
    for tensor in workspace:
        if tensor is not None:
            tensor.fill_(torch.nan)
    assert workspace.p is not None
    by_address = {t.data_ptr(): t for t in (*operands[:3], out, workspace.p)}
    for chunk in cut.chunks:
        for launched, maps, sources in three_kernel_hopper.launches(
            problem, H200, operands, out, lse, cut, chunk, workspace, described=False
        ):
            if not maps:
                launch.bind(launched)(*launched.tensors)
                continue
            # A P that a launch leaves unwritten and another reads is NaN.
            described = []
            for spec in maps:
                assert spec is not None
                tensor = by_address[sources[spec.source].data_ptr()]
                described.append(gluon_on_cpu.Map(tensor.as_strided(spec.shape, spec.strides), list(spec.block)))
            pointers = [gluon_on_cpu.Pointer(t.view(-1)) for t in launched.tensors[len(maps) :] if t is not None]
            for program in range(launched.grid):
                block = gluon_on_cpu.Block(program, launched.grid)
                own = {
                    "quarters": lambda x: x.split(64, 1),
                    "quantum_of": lambda dtype: (64.0, 32.0) if dtype == torch.bfloat16 else (14.0, 0.0),
                }
                roles = gluon_on_cpu.functions(modules, block, own)[products.__name__]
                of_a, of_b, of_out = (m.block_type.shape for m in described)
                ring = roles.Ring(
                    block.tile([2 * STAGES, *of_a], q.dtype), block.tile([STAGES, *of_b], q.dtype),
                    block.barriers(STAGES, 1), block.barriers(STAGES, 2),
                )  # fmt: skip
                buffers = block.tile([4, *of_out], q.dtype)
                gluon_on_cpu.run_roles(_threads(launched, roles, described, pointers, buffers, ring))
    return out, lse


def _threads(launched: Any, roles: Any, maps: Any, pointers: Any, buffers: Any, ring: Any) -> list[Callable[[], None]]:
    """The roles of a launch, as the kernel's body starts them."""
    first, second, third = maps
    has_high = launched.constants["HAS_HIGH"]
    chunk, (chunk_rows, *rest) = roles.Chunk(launched.scalars[:11]), launched.scalars[11:]
    if rest:
        *_, all_tiles, steps, _scale = rest
        consumer = (third, *pointers, chunk_rows, *rest, buffers, ring, chunk, has_high)
        threads = [partial(roles.scores_consumer, group, *consumer) for group in range(2)]
        return [*threads, partial(roles.scores_producer, first, second, ring, chunk, all_tiles, steps, has_high)]
    consumer = (third, *pointers, chunk_rows, buffers, ring, chunk, has_high)
    threads = [partial(roles.values_consumer, group, *consumer) for group in range(2)]
    return [*threads, partial(roles.values_producer, first, second, ring, chunk, has_high)]


@one_in(4)
@needs_triton
@pytest.mark.parametrize(("features", "data"), [(f, "sharp" if i % 2 else "normal") for i, f in enumerate(CALLS)])
def test_the_protocol_on_a_cpu(features: str, data: Data) -> None:
    """The source of the roles, with every step and barrier where the kernels have it, in one chunk and in several."""
    call = cases.build(replace(WIDE, **CALLS[features]), data, torch.device("cpu"))
    references = forward_references(call.problem, call.operands)
    for size in (1 << 26, 3 * least_bytes(call.problem, CONFIG)):
        out, lse = on_cpu(call.problem, call.operands, replace(CONFIG, workspace_bytes=size))
        verdict = judge_forward(call.problem, references, out, lse)
        assert verdict.passed, str(verdict)


def ladder(call: cases.Call, step: float) -> cases.Call:
    """The call with the keys of each 256 scored `step` bits above those before, whose own scores are small."""
    q, k = call.operands.q, call.operands.k
    bits = torch.arange(k.shape[1]) // 256 * step
    q.mul_(0.05)[..., 0] = 1.0
    k[..., 0] = (bits * math.log(2) / call.problem.softmax_scale).to(k.dtype)[None, :, None]
    return call


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "step"), [("float16", 9.0), ("float16", -9.0), ("bfloat16", 40.0), ("bfloat16", -40.0)]
)
def test_tiles_with_references_of_their_own(dtype: str, step: float) -> None:
    """Rows whose tiles lie far apart: P is lowered, or what was summed before matters no more."""
    case = replace(WIDE, dtype=dtype, lengths=(70, 900), heads=(1, 1), batch=1, dims=(72, 72))
    call = ladder(cases.build(case, "normal", torch.device("cpu")), step)
    out, lse = on_cpu(call.problem, call.operands, CONFIG)
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), out, lse)
    assert verdict.passed, str(verdict)


@needs_triton
@pytest.mark.parametrize("data", ["sharp", "low"])
def test_float16(data: Data) -> None:
    """Whose references are 14 bits apart."""
    call = cases.build(replace(WIDE, dtype="float16", batch=1), data, torch.device("cpu"))
    out, lse = on_cpu(call.problem, call.operands, CONFIG)
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), out, lse)
    assert verdict.passed, str(verdict)


@needs_triton
def test_every_tile_is_dealt_out_once() -> None:
    """Of scores those that some row sees and no other, and of out all; with as many tiles of keys as its rows see."""
    from warpwave.kernels.three_kernel import hopper_tiles as product_tiles

    modules = {product_tiles.__name__: product_tiles}
    block_m, block_n, _ = three_kernel_hopper.TILE
    generator = random.Random(0)
    for _ in range(60):
        heads, blocks, key_tiles = (generator.randint(1, n) for n in (3, 20, 9))
        has_high, together = generator.random() < 0.7, generator.choice((1, 2, 16))
        row_begin = block_m * generator.randint(0, 3)
        high = generator.randint(-900, 2500) if has_high else three_kernel_hopper.FAR
        diagonal = (row_begin + block_m - 1 + high) // block_m + 2 if has_high else 2 * key_tiles
        sees = [
            min(key_tiles, max(1, (row_begin + (block + 1) * block_m - 1 + high) // block_n + 1))
            for block in range(blocks)
        ]
        all_tiles = key_tiles_before(blocks, diagonal, key_tiles)
        assert all_tiles == sum(sees)
        columns, programs = generator.randint(1, 9), generator.randint(1, 7)
        found: dict[str, list[tuple[int, ...]]] = {"scores": [], "values": []}
        for program in range(programs):
            roles = gluon_on_cpu.functions(modules, gluon_on_cpu.Block(program, programs))[product_tiles.__name__]
            of_scores = roles.Chunk((0, row_begin, 0, 1, 1, heads, blocks, key_tiles, together, diagonal, key_tiles))
            of_values = roles.Chunk((0, row_begin, 0, 1, 1, heads, blocks, columns, together, diagonal, key_tiles))
            for item in range(program, heads * all_tiles, programs):
                found["scores"].append(tuple(map(int, roles.place_scores(of_scores, item, all_tiles, has_high))))
            for turn in range(roles.value_turns(of_values)):
                head, block, column, tiles = map(int, roles.place_values(of_values, turn, has_high))
                if tiles:
                    assert tiles == sees[block]
                    found["values"].append((head, block, column))
        assert sorted(found["scores"]) == [
            (head, block, tile) for head in range(heads) for block in range(blocks) for tile in range(sees[block])
        ]
        assert sorted(found["values"]) == sorted(product(range(heads), range(blocks), range(columns)))


@needs_triton
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
