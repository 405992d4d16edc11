"""What `naive` and `tiled` say of themselves: configs, costs, refusals. What they compute is tests/conformance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from warpwave import dispatch
from warpwave.cached_calls import operands_without_memory
from warpwave.gpu import ARCHS, CPU, INTERPRETER, Gpu
from warpwave.kernels.ladder import naive, three_passes, tiled
from warpwave.problem import AttentionProblem, Causal

PROBLEM = AttentionProblem(
    batch=2, seqlen_q=300, seqlen_k=290, num_heads_q=4, num_heads_kv=2, head_dim=80, head_dim_v=64,
    dtype="bfloat16", softmax_scale=0.1,
)  # fmt: skip
H200 = Gpu.for_arch("sm_90")
both = pytest.mark.parametrize("rung", [naive, tiled], ids=lambda kernel: kernel.NAME)


@pytest.mark.parametrize(
    ("rung", "fields", "text"),
    [
        (naive, (8, 16, 4), "block_m is 8; it must be a power of two, at least 16"),
        (naive, (16, 48, 4), "block_n is 48"),
        (naive, (16, 16, 3), "num_warps is 3"),
        (tiled, (64, 64, 8, 4, 2), "block_k is 8"),
        (tiled, (64, 64, 32, 4, 0), "num_stages is 0; it must be at least 1"),
    ],
)
def test_a_config_checks_itself(rung: Any, fields: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        rung.Config(*fields)


def test_cost_counts_every_read_of_keys_and_scores() -> None:
    """By hand, for 5 x 5 tiles of 64 a head, of 300 x 290 scores."""
    cost = tiled.cost(PROBLEM, H200, tiled.Config(64, 64, 32, 4, 2))
    heads, tiles = 2 * 4, 5 * 5
    covered = 300 * 290 * heads  # of the rows of whole query tiles, those that are there
    assert cost.blocks == heads * (tiles + 5 + 19), "scores, output in one tile of columns, softmax in 16 rows"
    assert cost.flops == 2 * heads * (tiles * 64 * 64 * 96 + 5 * 64 * 320 * 64), "head_dim 80 is three steps of 32"
    assert cost.exponentials == covered
    q_and_k = heads * tiles * (64 + 64) * 80 * 2
    p_and_v = heads * 320 * (300 * 4 + 5 * 64 * 2)
    assert cost.read_bytes == q_and_k + 2 * covered * 4 + p_and_v
    rows = 2 * 300 * 4
    assert cost.write_bytes == 4 * (heads * 300 * 320 + covered) + rows * (4 + 64 * 2)
    assert cost.workspace_bytes == 4 * heads * 300 * (304 + 1), "rows of 290 scores are 304 apart"


@both
def test_the_workspace_is_what_is_allocated(rung: Any) -> None:
    operands = operands_without_memory(PROBLEM)
    config = rung.configs(PROBLEM, H200)[0]
    specs = rung.specify(PROBLEM, H200, operands, operands.q, None, config)
    scores, row_scale = specs[1].tensors[:2]
    allocated = scores.numel() * scores.element_size() + row_scale.numel() * row_scale.element_size()
    assert rung.cost(PROBLEM, H200, config).workspace_bytes == allocated


@both
def test_hidden_tiles_cost_nothing(rung: Any) -> None:
    """Half of the tiles of a causal square, and the diagonal's."""
    square = replace(PROBLEM, seqlen_q=1024, seqlen_k=1024)
    config = rung.Config(64, 64, 4) if rung is naive else rung.Config(64, 64, 64, 4, 2)
    full, causal = (rung.cost(p, H200, config) for p in (square, replace(square, causal=Causal())))
    assert causal.flops / full.flops == (16 * 17 / 2) / (16 * 16)
    assert causal.workspace_bytes == full.workspace_bytes


@both
def test_memory_for_scores_is_bounded(rung: Any) -> None:
    fits = replace(PROBLEM, batch=1, num_heads_q=16, seqlen_q=16384, seqlen_k=16384)
    assert three_passes.scores_bytes(fits) == three_passes.MAX_SCORES_BYTES
    assert rung.why_not(fits, H200) == []
    (reason,) = rung.why_not(replace(fits, seqlen_q=16385), H200)
    assert "its scores would take 16.0 GiB of memory; the limit is 16.0" in reason
    assert "use flash_fwd" in reason
    small = replace(H200, name="a small one", memory_bytes=8 * 1024**3)
    (reason,) = rung.why_not(fits, small)
    assert "would take 16.0 GiB" in reason and "the limit is 8.0 on a small one" in reason


@both
def test_what_it_refuses(rung: Any) -> None:
    assert any("found tensors on the CPU" in reason for reason in rung.why_not(PROBLEM, CPU))
    assert any("no gradients" in reason for reason in rung.why_not(replace(PROBLEM, requires_grad=True), H200))
    assert rung.why_not(PROBLEM, INTERPRETER) == []


def test_only_tiled_needs_a_matrix_unit() -> None:
    turing = replace(H200, name="Tesla T4", arch="sm_75", smem_per_block_bytes=64 * 1024)
    assert naive.why_not(PROBLEM, turing) == []
    assert any("sm_80 or newer" in reason for reason in tiled.why_not(PROBLEM, turing))
    split = replace(PROBLEM, dtype="float32", precision="tf32x3")
    assert naive.why_not(split, Gpu.for_arch("gfx942")) == []
    assert tiled.why_not(split, Gpu.for_arch("gfx942")) == [], "bf16x6 stands for it there"
    strict = replace(PROBLEM, dtype="float32", error_budget=1e-9)
    for rung in (naive, tiled):
        assert any("keeps a relative error of 1e-09" in reason for reason in rung.why_not(strict, H200))
    cramped = replace(H200, name="tiny", smem_per_block_bytes=2048)
    (reason,) = tiled.why_not(PROBLEM, cramped)
    assert "KiB of shared memory and tiny has 2 for a block" in reason


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_the_default_fits_every_gpu(arch: str, dtype: str, head_dim: int) -> None:
    gpu, problem = Gpu.for_arch(arch), replace(PROBLEM, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim)
    for kernel in (naive, tiled):
        chosen, *others = kernel.configs(problem, gpu)
        assert chosen not in others and len(set(others)) == len(others)
        assert all(kernel.smem_bytes(problem, gpu, c) <= gpu.smem_per_block_bytes for c in (chosen, *others))
    assert tiled.configs(problem, gpu)[0] == tiled._default(problem, gpu)


def test_a_naive_block_has_a_thread_for_each_element() -> None:
    for arch in ("sm_90", "gfx942", "gfx1100"):
        gpu = Gpu.for_arch(arch)
        config = naive.configs(PROBLEM, gpu)[0]
        assert config.num_warps * gpu.warp_size == config.block_m * config.block_n == 256


def test_auto_takes_neither() -> None:
    """They stand behind eager, which runs everything."""
    names = [kernel.NAME for kernel in dispatch.KERNELS]
    assert names.index("eager") < names.index("tiled") < names.index("naive")


@both
@pytest.mark.parametrize("window", [(-1, -1), (2**62, 2**62)])
def test_no_argument_wraps(rung: Any, window: tuple[int, int]) -> None:
    """What the kernels multiply or add in 32 bits: program ids, and positions with a window's sides."""
    problem = replace(
        PROBLEM, batch=1, seqlen_q=2**20, seqlen_k=1000, head_dim=1, head_dim_v=1, causal=Causal("top_left"),
        window_size=window,
    )  # fmt: skip
    assert three_passes.scores_bytes(problem) < three_passes.MAX_SCORES_BYTES
    operands = operands_without_memory(problem)
    config = rung.Config(16, 16, 4) if rung is naive else rung.Config(16, 16, 16, 4, 1)
    for spec in rung.specify(problem, H200, operands, operands.q, None, config):
        assert spec.grid < 2**31
        left, right = next(
            (a, b) for a, b in zip(spec.scalars, spec.scalars[1:], strict=False) if a >= 2**20 and b >= 2**30
        )
        assert problem.seqlen_q + left < 2**31 and problem.seqlen_q + right < 2**31
