"""What `flash_fwd` says of itself: configs, tiles, costs. What it computes is tests/conformance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpwave.gpu import ARCHS, Gpu
from warpwave.kernels import flash_bwd, flash_fwd
from warpwave.kernels.cost import visited_tiles
from warpwave.kernels.flash_fwd import config as flash_fwd_configs
from warpwave.problem import AttentionProblem, Causal
from warpwave.runtime.launch import Launch
from warpwave.runtime.parameters import parameters

PROBLEM = AttentionProblem(
    batch=2, seqlen_q=300, seqlen_k=300, num_heads_q=4, num_heads_kv=2, head_dim=80, head_dim_v=64,
    dtype="bfloat16", softmax_scale=0.1,
)  # fmt: skip
H200 = Gpu.for_arch("sm_90")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ((48, 64, 4, 2), "block_m is 48; it must be a power of two, at least 16"),
        ((64, 8, 4, 2), "block_n is 8"),
        ((64, 64, 3, 2), "num_warps is 3"),
        ((64, 64, 4, 0), "num_stages is 0; it must be at least 1"),
    ],
)
@pytest.mark.parametrize("config", [flash_fwd.Config, flash_bwd.Tile])
def test_a_config_checks_itself(config: Any, fields: tuple[int, int, int, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        config(*fields)


@given(
    seqlen_q=st.integers(1, 70),
    seqlen_k=st.integers(1, 70),
    causal=st.sampled_from([None, Causal(), Causal("top_left")]),
    left=st.integers(-1, 40),
    right=st.integers(-1, 40),
)
@settings(max_examples=300, deadline=None)
def test_tiles_are_those_with_a_visible_pair(
    seqlen_q: int, seqlen_k: int, causal: Causal | None, left: int, right: int
) -> None:
    """Counted by brute force: a key tile is visited if it lies between the first and last key some query sees."""
    problem = replace(
        PROBLEM, batch=1, num_heads_q=1, num_heads_kv=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal,
        window_size=(left, right),
    )  # fmt: skip
    band = problem.band(seqlen_q, seqlen_k)
    expected = 0
    for row_begin in range(0, seqlen_q, 16):
        rows = range(row_begin, min(row_begin + 16, seqlen_q))
        expected += len({key // 16 for row in rows for key in band.keys(row, seqlen_k)})
    assert visited_tiles(problem, 16, 16) == expected


def test_cost_counts_whole_tiles_and_every_read() -> None:
    config = flash_fwd.Config(64, 32, 4, 2)
    cost = flash_fwd.cost(PROBLEM, H200, config)
    visited = 5 * 10 * 4 * 2  # query tiles, key tiles, heads, batch
    assert cost.blocks == 5 * 4 * 2
    assert cost.flops == 2 * visited * 64 * 32 * (128 + 64), "head_dim 80 is padded to 128"
    assert cost.exponentials == visited * 64 * 32
    assert cost.read_bytes == 2 * (2 * 300 * 4 * 80 + visited * 32 * (80 + 64))
    assert cost.write_bytes == 2 * 300 * 4 * 64 * 2


@pytest.mark.parametrize(("arithmetic", "parts"), [("bf16x3", 2), ("bf16x6", 3)])
def test_splitting_ahead_costs_a_launch_and_its_parts(arithmetic: str, parts: int) -> None:
    problem = replace(PROBLEM, dtype="float32", precision=arithmetic)
    config = flash_fwd.Config(64, 32, 4, 2)
    plain, ahead = (flash_fwd.cost(problem, H200, replace(config, split_ahead=a)) for a in (False, True))
    keys, widths = 2 * 300 * 2, 128 + 64  # head_dim 80 is padded to 128, in the parts too
    assert (plain.workspace_bytes, plain.launches) == (0, 1) and ahead.launches == 2
    assert ahead.workspace_bytes == keys * parts * 2 * widths
    assert ahead.write_bytes == plain.write_bytes + ahead.workspace_bytes
    visited = 5 * 10 * 4 * 2
    assert ahead.read_bytes - keys * 4 * (80 + 64) == plain.read_bytes + visited * 32 * (parts * 2 * widths - 4 * 144)
    specified = _specified(problem, replace(config, split_ahead=True))
    assert not isinstance(specified, Launch)
    bytes_of = [t.numel() * t.element_size() for t in specified[0].tensors[2:] if t is not None]
    assert sum(bytes_of) == ahead.workspace_bytes
    ieee = _specified(replace(problem, precision="ieee"), replace(config, split_ahead=True))
    assert isinstance(ieee, Launch), "there is nothing to split"


def _specified(problem: AttentionProblem, config: flash_fwd.Config) -> Any:
    from warpwave.cached_calls import operands_without_memory

    operands = operands_without_memory(problem)
    return flash_fwd.specify(problem, H200, operands, operands.q, None, config)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_the_default_is_the_one_of_the_table(arch: str, dtype: str, head_dim: int) -> None:
    """`configs` falls back to another candidate where the default does not fit; on no listed GPU may it have to."""
    gpu = Gpu.for_arch(arch)
    problem = replace(PROBLEM, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim)
    if flash_fwd.why_not(problem, gpu):
        return
    chosen, *others = flash_fwd.configs(problem, gpu)
    assert chosen == flash_fwd_configs.of_table(problem, gpu)
    assert chosen not in others and len(set(others)) == len(others)
    assert all(flash_fwd.smem_bytes(problem, gpu, c) <= gpu.smem_per_block_bytes for c in (chosen, *others))


def test_a_gpu_without_room_is_refused_with_the_figures() -> None:
    tiny = replace(H200, name="tiny", smem_per_block_bytes=4096)
    (reason,) = flash_fwd.why_not(replace(PROBLEM, head_dim=256), tiny)
    assert "KiB of shared memory and tiny has 4 for a block" in reason


@pytest.mark.parametrize("seqlen_k", [1, 1000])
@pytest.mark.parametrize("window", [(-1, -1), (2**62, 2**62)])
def test_no_argument_wraps(seqlen_k: int, window: tuple[int, int]) -> None:
    """What the kernel multiplies or adds in 32 bits: program ids, and positions with a window's sides."""
    from warpwave.cached_calls import operands_without_memory

    problem = replace(
        PROBLEM, batch=1, seqlen_q=2**20, seqlen_k=seqlen_k, head_dim=1, head_dim_v=1, causal=Causal("top_left"),
        window_size=window,
    )  # fmt: skip
    operands = operands_without_memory(problem)
    spec = flash_fwd.specify(problem, H200, operands, operands.q, None, flash_fwd.Config(16, 16, 4, 1))
    assert isinstance(spec, Launch)
    names = [parameter.name for parameter in parameters(spec.kernel) if parameter.kind == "scalar"]
    left, right, heads_in_l2 = (spec.scalars[names.index(name)] for name in ("left", "right", "heads_in_l2"))
    tiles = -(-problem.seqlen_q // 16)
    assert spec.grid < 2**31 and tiles * heads_in_l2 <= spec.grid
    assert problem.seqlen_q + left < 2**31 and problem.seqlen_q + right < 2**31


def test_a_grid_that_leaves_sms_idle_takes_smaller_tiles() -> None:
    card = replace(H200, num_sms=132)
    tiny = replace(
        PROBLEM, dtype="float32", batch=1, num_heads_q=1, num_heads_kv=1, seqlen_q=512, head_dim=64, head_dim_v=64
    )
    for name in ("default", "tf32", "bf16x6"):
        problem = replace(tiny, precision=name)
        small, usual = (flash_fwd.configs(p, card)[0] for p in (problem, replace(problem, batch=64)))
        assert small.block_m < usual.block_m
        assert flash_fwd.cost(problem, card, small).blocks >= 16
