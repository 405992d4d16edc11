"""What `large_head_dim` says of itself: pieces, splits, costs, choices. What it computes is tests/conformance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from warpwave import cached_calls, dispatch
from warpwave.checks.calls import describe_call
from warpwave.gpu import ARCHS, CPU, INTERPRETER, Gpu
from warpwave.kernels import three_kernel
from warpwave.kernels.large_head_dim import choice, claims
from warpwave.kernels.large_head_dim import host as large_head_dim
from warpwave.kernels.large_head_dim.config import Config, piece_of
from warpwave.operands import Operands
from warpwave.options import Options
from warpwave.problem import AttentionProblem, Causal

PROBLEM = AttentionProblem(
    batch=2, seqlen_q=300, seqlen_k=290, num_heads_q=4, num_heads_kv=2, head_dim=576, head_dim_v=512,
    dtype="bfloat16", softmax_scale=0.1,
)  # fmt: skip
H200 = replace(Gpu.for_arch("sm_90"), num_sms=132)
CONFIG = Config(64, 32, 64, 1, 1, False, 8, 2)
DECODE = replace(PROBLEM, batch=1, seqlen_q=1, seqlen_k=65_536, num_heads_q=16, num_heads_kv=1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"block_m": 48}, "block_m is 48; it must be a power of two, at least 16"),
        ({"block_d": 8}, "block_d is 8"),
        ({"num_warps": 3}, "num_warps is 3"),
        ({"v_parts": 0}, "v_parts is 0; it must be at least 1"),
        ({"num_splits": 0}, "num_splits is 0"),
    ],
)
def test_a_config_checks_itself(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(CONFIG, **changes)


def test_pieces_leave_little_over() -> None:
    widths = {320: 64, 384: 128, 512: 512, 576: 64, 640: 128, 1000: 512, 1024: 512}
    assert {width: piece_of(width, 512) for width in widths} == widths
    for width in range(257, 1025):
        assert -(-width // piece_of(width, 512)) * piece_of(width, 512) - width < 64


def test_cost_by_hand() -> None:
    """Rows of two query heads share a tile: 10 tiles of 600 rows, 10 of 32 keys each, for 2 kv heads of 2 items."""
    cost = large_head_dim.cost(PROBLEM, H200, CONFIG)
    visited = 2 * 2 * 10 * 10
    assert cost.blocks == 2 * 2 * 10
    assert cost.flops == 2 * visited * 64 * 32 * (576 + 512)
    assert cost.read_bytes == 2 * (visited * (64 + 32) * 576 + visited * 32 * 512)
    resident = large_head_dim.cost(PROBLEM, H200, replace(CONFIG, q_resident=True))
    assert cost.read_bytes - resident.read_bytes == 2 * 576 * (visited * 64 - 2 * 300 * 4)
    assert cost.write_bytes == 2 * 300 * 4 * 512 * 2


def test_a_second_part_of_the_columns_costs_the_scores_again() -> None:
    one, two = (large_head_dim.cost(PROBLEM, H200, replace(CONFIG, v_parts=n)) for n in (1, 2))
    assert two.exponentials == 2 * one.exponentials
    assert two.flops / one.flops == (2 * 576 + 512) / (576 + 512)


def test_hidden_tiles_cost_nothing() -> None:
    square = replace(PROBLEM, seqlen_q=1024, seqlen_k=1024, num_heads_kv=4)
    config = replace(CONFIG, block_n=64)
    full, causal = (large_head_dim.cost(p, H200, config) for p in (square, replace(square, causal=Causal())))
    assert causal.flops / full.flops == (16 * 17 / 2) / (16 * 16)


def test_splits_fill_the_gpu_once() -> None:
    """16 query heads of one kv head are one tile: each multiprocessor takes two shares of the keys, for two blocks lie
    beside one another, or one where shares would be many and short, and a batch that fills the GPU is not split. Of
    rows twice as wide it holds one."""
    splits = {b: choice.configs(replace(DECODE, batch=b), H200)[0].num_splits for b in (1, 16, 64, 132, 264)}
    assert splits == {1: 132, 16: 16, 64: 4, 132: 2, 264: 1}
    short = replace(DECODE, seqlen_k=4096)
    splits = {b: choice.configs(replace(short, batch=b), H200)[0].num_splits for b in (1, 8, 16, 32, 64)}
    assert splits == {1: 32, 8: 16, 16: 8, 32: 8, 64: 4}
    assert choice.configs(replace(DECODE, seqlen_k=16_384), H200)[0].num_splits == 67
    wide = replace(DECODE, head_dim=1024, head_dim_v=1024)
    assert choice.configs(replace(wide, batch=16), H200)[0].num_splits == 4, "512 columns of v a block"
    assert choice.configs(replace(DECODE, seqlen_k=100), H200)[0].num_splits == 1
    cost = large_head_dim.cost(DECODE, H200, choice.configs(DECODE, H200)[0])
    assert cost.workspace_bytes == 132 * 16 * (512 + 2) * 4
    assert [part.blocks for part in cost.parts] == [132, 16 * 8], "blocks of 64 columns merge 132 splits"


@pytest.mark.parametrize("seqlen_k", [1024, 65_536])
@pytest.mark.parametrize("queries", [1, 2])
def test_invariant_configs_know_nothing_of_the_batch(queries: int, seqlen_k: int) -> None:
    """Nor does the config that replaces the one of latent caches."""
    one = replace(DECODE, batch_invariant=True, seqlen_q=queries, num_heads_q=8, seqlen_k=seqlen_k)
    problems = [replace(one, batch=batch) for batch in (1, 2, 64, 500)]
    for by_map in (True, False):
        assert len({choice.of_table(problem, H200, by_map) for problem in problems}) == 1


def test_a_step_of_decoding_reads_keys_once() -> None:
    config = choice.configs(DECODE, H200)[0]
    cost = large_head_dim.cost(DECODE, H200, config)
    keys = 65_536 * (576 + 512) * 2
    assert keys <= cost.parts[0].read_bytes <= 1.001 * keys


def test_what_the_scores_in_memory_outrun() -> None:
    """On AMD, two parts of 512 columns each cost 2 * head_dim FLOP a score more: too much from head_dim 501 on. On
    NVIDIA, by measurement, more queries than a few."""
    wide, amd = replace(PROBLEM, head_dim_v=1024), Gpu.for_arch("gfx942")
    assert claims.outrun(PROBLEM, amd) == []
    assert claims.outrun(replace(wide, head_dim=500), amd) == []
    (reason,) = claims.outrun(replace(wide, head_dim=1024), amd)
    assert "2048 FLOP a score more" in reason
    few = replace(PROBLEM, seqlen_q=64, seqlen_k=4096)
    assert claims.outrun(few, H200) == [] == claims.outrun(replace(few, packed=True), H200)
    sm_80 = Gpu.for_arch("sm_80")
    for many, gpu in ((replace(few, seqlen_q=65), H200), (replace(few, seqlen_k=512), sm_80)):
        assert "three_kernel is faster" in claims.outrun(many, gpu)[0]
    # On Hopper by what either takes: 38 us and 28 where heads share keys, with half the queries 26 and 28.
    grouped = replace(PROBLEM, batch=1, seqlen_q=64, seqlen_k=1024, num_heads_q=32, num_heads_kv=8, head_dim_v=512)
    (reason,) = claims.outrun(grouped, H200)
    assert "three_kernel 20" in reason
    assert claims.outrun(replace(grouped, seqlen_q=32), H200) == []


def test_what_it_refuses() -> None:
    assert claims.why_not(PROBLEM, INTERPRETER) == []
    assert any("found tensors on the CPU" in reason for reason in claims.why_not(PROBLEM, CPU))
    assert any("no gradients" in r for r in claims.why_not(replace(PROBLEM, requires_grad=True), H200))
    assert claims.why_not(replace(PROBLEM, page_size=16), H200) == []
    assert any("power of two" in r for r in claims.why_not(replace(PROBLEM, page_size=48), H200))
    invariant = replace(PROBLEM, page_size=16, packed=True, batch_invariant=True, total_q=PROBLEM.batch)
    assert any("batch_invariant cannot be kept" in r for r in claims.why_not(invariant, H200))
    (reason,) = claims.why_not(replace(PROBLEM, head_dim=8193), H200)
    assert "head_dim is 8193; it must be at most 8192" in reason


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("change", [{}, {"head_dim": 1024, "head_dim_v": 1024}, {"seqlen_q": 1}, {"head_dim": 8192}])
def test_the_default_fits_every_gpu(arch: str, dtype: str, change: dict[str, Any]) -> None:
    gpu, problem = Gpu.for_arch(arch), replace(PROBLEM, dtype=dtype, **change)
    chosen, *others = choice.configs(problem, gpu)
    assert chosen == choice.of_table(problem, gpu), "the default itself must fit"
    assert chosen not in others and len(set(others)) == len(others)
    for config in (chosen, *others):
        assert large_head_dim.smem_bytes(problem, gpu, config) <= gpu.smem_per_block_bytes


def test_a_cached_call_takes_the_splits_it_is_given() -> None:
    """num_splits is the door's, whichever kernel reads the cache."""
    problem = AttentionProblem(batch=16, seqlen_q=1, seqlen_k=4096, num_heads_q=16, num_heads_kv=1, head_dim=576,
                               head_dim_v=512, dtype="bfloat16", softmax_scale=0.04, page_size=64)  # fmt: skip
    gpu = Gpu.for_arch("sm_90")
    given = cached_calls.choose(problem, gpu, cached_calls.Serving(num_splits=3))
    assert given.kernel.NAME == large_head_dim.NAME and given.config.num_splits == 3 and given.config_source == "given"
    assert cached_calls.choose(problem, gpu, cached_calls.Serving()).config.num_splits > 3


def test_the_default_of_latents_is_of_latents_alone() -> None:
    """By maps where the widths are a latent's, in blocks of 64 rows for more than one query or 16 heads; its other
    default serves a v that is no part of k."""
    config = choice.configs(DECODE, H200)[0]
    assert config.by_map and not choice.configs(replace(DECODE, head_dim_v=576), H200)[0].by_map
    for rows, call in ((16, DECODE), (64, replace(DECODE, seqlen_q=2)), (64, replace(DECODE, num_heads_q=17))):
        default = choice.configs(call, H200)[0]
        assert default.by_map and default.block_m == rows
    many = [choice.configs(replace(DECODE, batch=n, seqlen_k=4096), H200)[0].num_splits for n in (128, 150, 256)]
    assert many == [2, 3, 1]
    short = replace(DECODE, batch=16, seqlen_k=4096)
    apart = large_head_dim._by_pointers(short, H200, choice.configs(short, H200)[0])
    assert not apart.by_map and apart.num_splits == 16
    assert large_head_dim._by_pointers(short, H200, replace(config, num_splits=3)).num_splits == 3


def test_a_dense_call_on_latents_is_not_three_kernels() -> None:
    """Only if v is part of k: elsewhere tiles of many rows by pointers are slower (4 x 64 queries, 128 heads)."""
    call = replace(DECODE, batch=4, seqlen_q=64, seqlen_k=8192, num_heads_q=128, causal=Causal())
    assert dispatch.choose(call, H200).kernel.NAME == three_kernel.NAME
    assert dispatch.choose(replace(call, v_in_k=True), H200).kernel.NAME == large_head_dim.NAME
    few = replace(call, batch=1, seqlen_q=4, num_heads_q=64, seqlen_k=32768)
    assert dispatch.choose(few, H200).kernel.NAME == large_head_dim.NAME, "of which three_kernel has no estimate"


def test_a_call_states_whether_v_is_part_of_k() -> None:
    q, k = torch.zeros(1, 2, 4, 24), torch.zeros(1, 5, 1, 24)
    assert describe_call(Operands(q, k, k[..., :16]), Options()).v_in_k
    assert not describe_call(Operands(q, k, k[..., 8:]), Options()).v_in_k
    assert not describe_call(Operands(q, k, k.clone()[..., :16]), Options()).v_in_k
