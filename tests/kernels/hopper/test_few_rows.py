"""split_kv's launch of roles for few rows on Hopper: its protocol on a CPU, what it refuses, what it compiles to. On a
GPU: tests/conformance/test_few_rows.py."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.compile.test_targets import compile_all
from tests.conformance import cases
from tests.conformance.cases import PLAIN
from tests.conformance.gates import forward_references, judge_forward
from tests.kernels.hopper import gluon_on_cpu
from tests.marks import needs_triton, one_in
from warpwave.gpu import Gpu
from warpwave.kernels import partials, split_kv
from warpwave.kernels.split_kv import few_rows_host as few_rows
from warpwave.operands import CachedOperands
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch
from warpwave.runtime.triton_or_stub import INTERPRETED

H200 = replace(Gpu.for_arch("sm_90"), num_sms=132)
BASE = replace(PLAIN, dtype="bfloat16", dims=(72, 72), heads=(4, 2), batch=2, lengths=(1, 200))
# A call, keys of a page, keys of a tile, splits.
CALLS: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "contiguous": ({}, 0, 64, 1),
    "pages of 16": ({"sinks": True}, 16, 64, 3),
    "pages of 16, long tiles": ({"lengths": (2, 200), "causal": "bottom_right"}, 16, 128, 1),
    "pages of 32": ({"heads": (16, 1), "dims": (64, 128)}, 32, 64, 2),
    "a page a tile": ({"lengths": (3, 150), "causal": "top_left", "dtype": "float16"}, 64, 64, 2),
    "a part of a page": ({"softcap": 20.0, "heads": (3, 1)}, 256, 64, 2),
    "window": ({"lengths": (4, 200), "window": (70, 0), "sinks": True}, 16, 64, 2),
    "window of contiguous keys": ({"lengths": (2, 200), "window": (70, 3)}, 0, 128, 2),
    "window that shows nothing": ({"window": (5, 0), "causal": "top_left", "sinks": True}, 16, 64, 1),
    "32 rows": ({"heads": (16, 2), "lengths": (4, 200), "causal": "bottom_right", "sinks": True}, 0, 64, 1),
    "17 rows": ({"heads": (17, 1), "lengths": (1, 150), "softcap": 20.0}, 16, 64, 2),
    "24 rows": ({"heads": (6, 1), "lengths": (4, 200), "window": (70, 0), "dims": (128, 64)}, 64, 128, 1),
    "more splits than tiles": ({"lengths": (1, 65)}, 16, 64, 5),
    "one key": ({"lengths": (1, 1)}, 16, 64, 1),
}


def in_pages(call: cases.Call, page_size: int, used: list[int]) -> tuple[AttentionProblem, CachedOperands]:
    """The call's keys and values in pages that lie in no order, of which sequence b has `used[b]`, NaN wherever no key
    is, and page ids far outside the pool where there is no page."""
    k, v = call.operands.k, call.operands.v
    batch, length, heads, _ = k.shape
    pages = -(-length // page_size)
    order = torch.randperm(batch * pages + 3, generator=torch.Generator().manual_seed(0))
    table = order[: batch * pages].view(batch, pages).to(torch.int32)
    of_k, of_v = (torch.full((len(order), page_size, heads, x.shape[-1]), torch.nan, dtype=x.dtype) for x in (k, v))
    for b in range(batch):
        at = torch.arange(used[b])
        for pool, x in ((of_k, k), (of_v, v)):
            pool[table[b, at // page_size].long(), at % page_size] = x[b, : used[b]]
        table[b, -(-used[b] // page_size) :] = 2**30
    seqused = torch.tensor(used, dtype=torch.int32)
    cached = CachedOperands(call.operands.q, of_k, of_v, page_table=table, seqused_k=seqused, sinks=call.operands.sinks)
    return replace(call.problem, page_size=page_size), cached


def device_modules() -> tuple[Any, ...]:
    from warpwave.kernels.hopper import pages, parts, rows, softmax
    from warpwave.kernels.split_kv import few_rows_device

    return few_rows_device, pages, parts, rows, softmax


def on_cpu(
    problem: AttentionProblem, operands: Any, config: split_kv.Config, first_key: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by the source of the kernel, and the merge as Triton's interpreter runs it."""
    out, lse = gluon_on_cpu.unwritten(problem, operands.q)
    acc, state = partials.allocate(problem, config.num_splits, "cpu") if config.num_splits > 1 else (None, None)
    for tensor in (acc, state):
        if tensor is not None:
            tensor.fill_(torch.nan)
    arguments = (*operands[:3], out, lse, acc, state, *operands[3:], *[None] * (12 - len(operands)))
    spec = few_rows.specify(problem, H200, operands, arguments, config, first_key)
    own = {"neighbor": lambda: lambda what, threads=128: None}
    gluon_on_cpu.run_launch(spec, device_modules(), spec.grid, own)
    if config.num_splits > 1:
        merge = partials.specify_merge(problem, config.num_splits, acc, state, out, lse, operands.sinks)  # type: ignore[arg-type]
        launch.bind(merge)(*merge.tensors)
    return out, lse


@one_in(4)
@needs_triton
@pytest.mark.parametrize("name", CALLS)
def test_the_protocol_on_a_cpu(name: str) -> None:
    """The source of the roles, every step and barrier where the kernel has it, NaN in memory that nobody wrote; where
    keys lie in pages the second sequence is shorter."""
    features, page_size, keys, splits = CALLS[name]
    if splits > 1 and not INTERPRETED:
        pytest.skip("the merge runs in Triton's interpreter, which is off if there is a GPU")
    call = cases.build(replace(BASE, **features), "sharp" if splits > 1 else "normal", torch.device("cpu"))
    problem, operands = replace(call.problem, return_lse=True), call.operands
    rows = 16 if few_rows.rows_of(problem) <= 16 else 32
    config = split_kv.Config(rows, keys, 4, 2, splits, by_map=True, roles=True)
    if not page_size:
        verdict = judge_forward(problem, forward_references(problem, operands), *on_cpu(problem, operands, config))
        assert verdict.passed, str(verdict)
        return
    length = problem.seqlen_k
    used = [length, max(problem.seqlen_q, length - 37)]
    cached, pages = in_pages(call._replace(problem=problem), page_size, used)
    assert not few_rows.cannot(cached, H200)
    out, lse = on_cpu(cached, pages, config)
    for b in range(2):
        alone = replace(problem, batch=1, seqlen_k=used[b])
        of_alone = operands._replace(
            q=operands.q[b : b + 1], k=operands.k[b : b + 1, : used[b]], v=operands.v[b : b + 1, : used[b]]
        )
        verdict = judge_forward(alone, forward_references(alone, of_alone), out[b : b + 1], lse[b : b + 1])
        assert verdict.passed, f"sequence {b}: {verdict}"


@needs_triton
@pytest.mark.skipif(not INTERPRETED, reason="the merge runs in Triton's interpreter, which is off if there is a GPU")
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("change", [{}, {"window": (70, 0)}, {"window": (70, 3), "heads": (6, 1)}], ids=str)
@pytest.mark.parametrize("queries", [(4, 1), (0, 3), (2, 0), (1, 1)], ids=str)
def test_packed_queries_on_a_cpu(queries: tuple[int, int], change: dict[str, Any], splits: int) -> None:
    """Sequences of different numbers of queries, none of one too, and a token that belongs to no sequence."""
    features: dict[str, Any] = {"lengths": (4, 200), "causal": "bottom_right", "sinks": True} | change
    call = cases.build(replace(BASE, **features), "normal", torch.device("cpu"))
    padded = replace(call.problem, return_lse=True)
    used = [padded.seqlen_k, padded.seqlen_k - 37]
    cached, pages = in_pages(call._replace(problem=padded), 16, used)
    tokens = [call.operands.q[b, :count] for b, count in enumerate(queries)] + [call.operands.q[0, :1]]
    total = sum(queries)
    problem = replace(cached, packed=True, seqlen_q=max(queries), total_q=total + 1)
    cu_seqlens_q = torch.tensor([0, queries[0], total], dtype=torch.int32)
    operands = pages._replace(q=torch.cat(tokens), cu_seqlens_q=cu_seqlens_q)
    assert not few_rows.cannot(problem, H200)
    rows = 16 if few_rows.rows_of(problem) <= 16 else 32
    out, lse = on_cpu(problem, operands, split_kv.Config(rows, 64, 4, 2, splits, by_map=True, roles=True))
    assert splits > 1 or (out[total:].isnan().all() and lse[:, total:].isnan().all()), "not a row of any sequence"
    for b, (begin, count) in enumerate(((0, queries[0]), (queries[0], queries[1]))):
        if count:
            alone = replace(padded, batch=1, seqlen_q=count, seqlen_k=used[b])
            of_alone = call.operands._replace(
                q=call.operands.q[b : b + 1, :count], k=call.operands.k[b : b + 1, : used[b]],
                v=call.operands.v[b : b + 1, : used[b]],
            )  # fmt: skip
            mine = slice(begin, begin + count)
            verdict = judge_forward(alone, forward_references(alone, of_alone), out[None, mine], lse[None, :, mine])
            assert verdict.passed, f"sequence {b}: {verdict}"


@needs_triton
@pytest.mark.parametrize("offsets", [(0, 3, 7), (-5, 2, 2), (6, 1, 9), (0, 7, 3), (2**31 - 1, -(2**31), 4), (3, 99, 1)])
@pytest.mark.parametrize("queries", [2, 4])
def test_any_offsets_stay_inside_the_tensors(offsets: tuple[int, int, int], queries: int) -> None:
    """Of seven tokens, in two sequences of at most so many queries."""
    modules = {module.__name__: module for module in device_modules()}
    total, group, heads_kv = 7, 3, 2
    cu_seqlens_q = gluon_on_cpu.Pointer(torch.tensor(offsets))
    for batch in range(2):
        device = gluon_on_cpu.functions(modules, gluon_on_cpu.Block(batch, 2))[device_modules()[0].__name__]
        rows_heads = torch.tensor(total * group * heads_kv)
        call = device.Call(torch.tensor(batch), 0, 0, 1, queries, 64, heads_kv, rows_heads, 0)
        first, count = device.queries_of_sequence(cu_seqlens_q, call, SimpleNamespace(PACKED=True, GROUP=group))
        begin = min(max(offsets[batch], 0), total)
        assert first == begin and count == min(max(min(offsets[batch + 1], total) - begin, 0), queries)


@needs_triton
@pytest.mark.parametrize("page_size", [0, 16])
def test_keys_before_the_first_are_left_to_another_launch(page_size: int) -> None:
    call = cases.build(replace(BASE, lengths=(1, 200)), "normal", torch.device("cpu"))
    problem, operands, first = replace(call.problem, return_lse=True), call.operands, 128
    keys: Any = operands
    given = problem
    if page_size:
        given, keys = in_pages(call._replace(problem=problem), page_size, [200, 200])
    out, lse = on_cpu(given, keys, split_kv.Config(16, 64, 4, 2, by_map=True, roles=True), first)
    rest = operands._replace(k=operands.k[:, first:], v=operands.v[:, first:])
    of_rest = replace(problem, seqlen_k=200 - first)
    verdict = judge_forward(of_rest, forward_references(of_rest, rest), out, lse)
    assert verdict.passed, str(verdict)


DECODE = AttentionProblem(
    batch=16, seqlen_q=1, seqlen_k=4096, num_heads_q=32, num_heads_kv=8, head_dim=128, head_dim_v=128, dtype="bfloat16",
    softmax_scale=0.1, page_size=16,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"seqlen_q": 9}, "36 queries"),
        ({"packed": True, "total_q": 16, "total_k": 65536, "page_size": 0}, "packed keys"),
        ({"mask_shape": (1, 1, 1, 4096)}, "a mask"),
        ({"bias_shape": (1, 1, 1, 4096)}, "a bias"),
        ({"alibi_shape": (32,)}, "ALiBi"),
        ({"batch_invariant": True}, "pieces"),
        ({"page_size": 1}, "pages of 1"),
        ({"head_dim": 100}, "head_dim 100"),
        ({"head_dim_v": 264}, "head_dim_v 264"),
    ],
)
def test_what_it_refuses(change: dict[str, Any], said: str) -> None:
    (reason,) = few_rows.cannot(replace(DECODE, **change), H200)
    assert said in reason
    assert few_rows.cannot(DECODE, Gpu.for_arch("sm_100")) and not few_rows.cannot(DECODE, H200)


def test_a_config_of_fewer_rows_than_the_call_goes_by_pointers() -> None:
    call = cases.build(replace(BASE, lengths=(5, 200), heads=(8, 2)), "normal", torch.device("cpu"))
    kernels = []
    for rows in few_rows.ROWS:
        config = split_kv.Config(rows, 64, 4, 2, by_map=True, roles=True)
        attend, *_ = split_kv.specify(
            call.problem, H200, call.operands, torch.empty_like(call.operands.q), None, config
        )
        kernels.append(attend.kernel.__name__)
    assert kernels == ["split_kv_kernel", "few_rows_kernel"]


def test_one_part_of_two_launches_is_left_to_the_merge() -> None:
    """Where another launch attends to a shared prefix, a launch that splits nothing writes a part, not the output."""
    call = cases.build(replace(BASE, lengths=(1, 200), sinks=True), "normal", torch.device("cpu"))
    config = replace(split_kv.configs(call.problem, H200)[0], roles=True, num_splits=1)
    out = torch.empty_like(call.operands.q)
    space = partials.allocate(call.problem, 1, "cpu")
    alone, *_ = split_kv.specify(call.problem, H200, call.operands, out, None, config)
    part, *_ = split_kv.specify(call.problem, H200, call.operands, out, None, config, space, 64)
    assert not alone.constants["SPLIT"] and part.constants["SPLIT"]


def test_configs_with_roles_check_themselves() -> None:
    config = split_kv.Config(16, 64, 4, 2, 3, by_map=True, roles=True)
    assert replace(config, block_m=32).roles and replace(config, block_n=256).roles
    for change in ({"block_m": 64}, {"block_n": 32}, {"num_warps": 2}, {"by_map": False}):
        with pytest.raises(ValueError, match="has roles"):
            replace(config, **change)


@pytest.mark.parametrize("rows", few_rows.ROWS)
@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_rings_fill_a_multiprocessor(rows: int, keys: int, blocks: int) -> None:
    stages = few_rows.stages(DECODE, H200, rows, keys, blocks)
    config = split_kv.Config(rows, keys, 4, max(1, stages), by_map=True, roles=True)
    expected = {(16, 64): (6, 3, 2), (16, 128): (3, 1, 1), (32, 64): (6, 3, 1), (32, 128): (3, 1, 0)}
    assert stages == expected[rows, keys][blocks - 1]
    per_sm = few_rows.blocks_per_sm(DECODE, H200, config)
    assert stages == 0 or per_sm == min(blocks, 3 if keys == 64 and rows == 16 else 2)
    one_more = few_rows.smem_bytes(DECODE, rows, keys, stages + 1)
    assert blocks * (one_more + 1024) > H200.smem_per_block_bytes + 1024
    assert few_rows.registers(DECODE, H200, config) * few_rows.THREADS * per_sm <= 65536


@needs_triton
def test_it_compiles_without_spills_and_by_tensor_maps() -> None:
    """With and without each of its features; on as many registers as it asks for."""
    problem = {
        "batch": 16, "seqlen_q": 1, "seqlen_k": 4096, "num_heads_q": 32, "num_heads_kv": 8, "head_dim": 128,
        "head_dim_v": 128, "dtype": "bfloat16", "softmax_scale": 0.1, "page_size": 16,
    }  # fmt: skip
    everything = {
        "seqlen_q": 4, "causal": "bottom_right", "window_size": (500, -1), "softcap": 30.0, "has_sinks": True,
        "return_lse": True, "dtype": "float16",
    }  # fmt: skip
    cases: tuple[tuple[dict[str, Any], int, int, int], ...] = (
        (everything, 64, 2, 1), ({"head_dim": 72, "head_dim_v": 40, "page_size": 0}, 128, 1, 4),
        ({"head_dim": 256, "head_dim_v": 256, "page_size": 64}, 64, 3, 2), (everything | {"seqlen_q": 8}, 64, 3, 3),
        ({"seqlen_q": 5, "head_dim": 64, "head_dim_v": 64}, 64, 6, 1),
        (everything | {"packed": True, "total_q": 40, "total_k": 65536}, 64, 2, 4),
    )  # fmt: skip
    config = {"num_warps": 4, "launched_ahead": True, "by_map": True, "roles": True}
    jobs = [
        {"kernel": "split_kv", "arch": "sm_90", "problem": problem | change}
        | {
            "config": config
            | {"block_m": 32 if change.get("seqlen_q", 1) > 4 else 16, "block_n": keys}
            | {"num_stages": stages, "num_splits": splits}
        }
        for change, keys, stages, splits in cases
    ]
    for (*_, splits), facts in zip(cases, compile_all(jobs), strict=True):
        attend, *merge = facts["launches"]
        assert len(merge) == (splits > 1) and attend["name"] == "few_rows_kernel"
        assert attend["spill_bytes"] == 0 and attend["smem_bytes"] <= facts["smem_bound"] <= facts["smem_limit"]
        found = attend["instructions"]
        assert found["UTMALDG"] >= 2 and "ACQBULK" in found and any(name.startswith("HGMMA") for name in found)
