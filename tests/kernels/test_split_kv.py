"""What `split_kv` says of itself: configs, splits, costs. What it computes is tests/conformance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpwave import dispatch, explain
from warpwave.gpu import ARCHS, Gpu
from warpwave.kernels import split_kv
from warpwave.kernels.split_kv import splits
from warpwave.kernels.split_kv.config import Config, longest_steps, one_step
from warpwave.problem import AttentionProblem, Causal

DECODE = AttentionProblem(
    batch=1, seqlen_q=1, seqlen_k=8192, num_heads_q=32, num_heads_kv=8, head_dim=128, head_dim_v=128,
    dtype="bfloat16", softmax_scale=0.1,
)  # fmt: skip
H200 = replace(Gpu.for_arch("sm_90"), num_sms=132)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"block_m": 48}, "block_m is 48; it must be a power of two, at least 16"),
        ({"block_n": 8}, "block_n is 8"),
        ({"num_warps": 3}, "num_warps is 3"),
        ({"num_stages": 0}, "num_stages is 0; it must be at least 1"),
        ({"num_splits": 0}, "num_splits is 0; it must be at least 1"),
        ({"pieces": 3, "num_splits": 4}, "pieces is 3; it must be 0, or at least 2 and num_splits = 4"),
        ({"pieces": 1}, "pieces is 1"),
    ],
)
def test_a_config_checks_itself(fields: dict[str, Any], text: str) -> None:
    good = {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 2}
    with pytest.raises(ValueError, match=text):
        Config(**(good | fields))


@pytest.mark.parametrize(
    ("batch", "seqlen_k", "least", "most"),
    [(1, 1024, 4, 16), (1, 8192, 16, 64), (1, 65_536, 32, 128), (16, 4096, 1, 1), (64, 8192, 1, 1), (128, 2048, 1, 1)],
)
def test_splits_fill_the_gpu_and_no_more(batch: int, seqlen_k: int, least: int, most: int) -> None:
    """Blocks for every place where there are few; where there are many, none that run nearly alone in the end."""
    problem = replace(DECODE, batch=batch, seqlen_k=seqlen_k)
    config = split_kv.configs(problem, H200)[0]
    assert least <= config.num_splits <= most
    assert split_kv.cost(problem, H200, config).blocks == batch * 8 * config.num_splits
    places = 132 * splits.blocks_per_sm(problem, H200, config)
    *_, note = split_kv.notes(problem, H200, config)
    assert (
        f"{batch * 8} tiles of rows for {places} resident blocks on 132 SMs" in note and str(config.num_splits) in note
    )


def test_a_small_last_wave_is_split_away() -> None:
    """512 blocks for 396 places leave 116 that cannot keep memory busy: 3.70 of 4.48 TB/s (record of 2026-11-21). By
    tensor maps one block an SM can, and there the last of four waves has nearly one for each."""
    problem = replace(DECODE, batch=64)
    config = splits.with_splits(problem, H200, Config(16, 64, 4, 3))
    places = 132 * splits.blocks_per_sm(problem, H200, config)
    alone = (512 * config.num_splits) % places
    assert 512 % places < 2 * 132 and (alone == 0 or alone >= 2 * 132)
    assert splits.with_splits(problem, H200, Config(16, 128, 4, 3, by_map=True)).num_splits == 1
    assert splits.with_splits(replace(problem, batch=24), H200, Config(16, 128, 4, 3, by_map=True)).num_splits > 1


def test_tiles_of_short_sequences_in_a_pack_are_not_counted_as_full() -> None:
    """A pack of one prompt and 63 sequences that decode has the prompt's tiles and one of each other."""
    packed = replace(DECODE, batch=64, packed=True, seqlen_q=512, total_q=512 + 63, page_size=16, causal=Causal())
    config = split_kv.configs(packed, H200)[0]
    assert config.block_m == 64
    reason = splits.choose_splits(packed, H200, config).reason
    assert reason.startswith(f"{8 * (575 * 4 // 64 + 64)} tiles of rows")


def test_splits_of_under_filled_prefill() -> None:
    """One head of 512 queries: 8 tiles of rows for 132 SMs."""
    problem = replace(
        DECODE, seqlen_q=512, seqlen_k=512, num_heads_q=1, num_heads_kv=1, head_dim=64, head_dim_v=64, dtype="float16"
    )
    config = split_kv.configs(problem, H200)[0]
    assert config.block_m == 64 and config.num_splits > 1


@given(
    batch=st.integers(1, 300), seqlen_k=st.integers(1, 200_000), kv=st.sampled_from([1, 2, 8]), sms=st.integers(1, 300)
)
@settings(max_examples=100, deadline=None)
def test_the_choice_is_the_best_of_its_own_formula(batch: int, seqlen_k: int, kv: int, sms: int) -> None:
    problem, gpu = replace(DECODE, batch=batch, seqlen_k=seqlen_k, num_heads_kv=kv), replace(H200, num_sms=sms)
    config, c = Config(16, 64, 4, 2), splits
    chosen = c.choose_splits(problem, gpu, config).num_splits
    steps, blocks = -(-seqlen_k // 64), batch * kv * -(-32 // kv // 16)
    places = c.blocks_per_sm(problem, gpu, config) * sms
    saturating = min(places, c.SATURATING_BLOCKS * sms)

    def walked(s: int) -> float:
        """Wave by wave."""
        walk, left, waves, total = -(-steps // s), blocks * s, 0, 0.0
        while left:
            wave = min(left, places)
            if waves == 0:
                total += max(1, -(-wave // sms) * sms / saturating) * (walk + c.START_STEPS)
            else:
                total += wave / saturating * (walk + c.HIDDEN_START_STEPS)
            left -= wave
            if left == 0 and waves and wave < places:
                total += walk * (c.UNEVEN / waves * max(0, 1 - wave / saturating) + c.DRIFT)
            waves += 1
        return total + (c.MERGE_STEPS + s / c.PARTS_PER_STEP) * (s > 1)

    assert 1 <= chosen <= min(steps, c.MAX_SPLITS)
    assert all(walked(chosen) <= walked(s) + 1e-6 for s in range(1, min(steps, c.MAX_SPLITS) + 1))


@pytest.mark.parametrize("seqlen_k", [1000, 8192])
@pytest.mark.parametrize("page_size", [0, 16, 64, 128])
@pytest.mark.parametrize("batch", [2, 16, 64, 200])
def test_invariant_configs_know_nothing_of_the_batch(batch: int, page_size: int, seqlen_k: int) -> None:
    """But how many blocks share the pieces, which bits do not depend on."""
    for packed in (False, True) if page_size else (False,):
        one = replace(DECODE, batch_invariant=True, packed=packed, total_q=1, page_size=page_size, seqlen_k=seqlen_k)
        many = replace(one, batch=batch, total_q=900, seqlen_q=500 if packed else 1)
        (alone,), (among,) = split_kv.configs(one, H200), split_kv.configs(many, H200)
        assert replace(alone, num_splits=1) == replace(among, num_splits=1)
        assert alone.pieces >= alone.num_splits and among.pieces >= among.num_splits
        assert packed or batch < 16 or alone.num_splits > among.num_splits
        for problem, config in ((one, alone), (many, among)):
            cost = split_kv.cost(problem, H200, config)
            rows = problem.rows * 32
            assert cost.workspace_bytes == 4 * config.pieces * rows * (128 + 2)
            assert cost.launches == 2


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "gfx942"])
def test_invariant_configs_fit_with_their_pieces(arch: str) -> None:
    gpu = Gpu.for_arch(arch)
    problem = replace(
        DECODE, batch_invariant=True, batch=3, seqlen_q=20, seqlen_k=4096, num_heads_kv=1, page_size=16, softcap=9.0
    )
    config = split_kv.default(problem, gpu)
    assert config.pieces and split_kv.smem_bytes(problem, gpu, config) <= gpu.smem_per_block_bytes


@pytest.mark.parametrize(
    ("batch", "heads", "dtype", "splits"),
    [(11, 9, "bfloat16", False), (8, 4, "bfloat16", True), (8, 5, "bfloat16", False), (1, 4, "float32", True)],
)
def test_prompts_are_split_only_if_each_split_has_an_sm(batch: int, heads: int, dtype: str, splits: bool) -> None:
    problem = replace(
        DECODE, batch=batch, num_heads_q=heads, num_heads_kv=heads, seqlen_q=64, seqlen_k=896, dtype=dtype
    )  # fmt: skip
    reasons = split_kv.outrun(problem, H200)
    assert (not reasons) == splits
    assert splits or reasons[0].startswith(
        "hopper/flash_fwd is faster" if batch == 11 else "64 queries and 896 keys a sequence would give num_splits"
    )


@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({"seqlen_q": 512}, "hopper/flash_fwd"),
        ({"seqlen_q": 2048, "num_heads_q": 1}, "hopper/flash_fwd"),
        ({"seqlen_q": 2049, "num_heads_q": 1}, "split_kv"),  # tiles of unlike length, which the other does not split
        ({"seqlen_q": 2049, "num_heads_q": 1, "causal": None}, "hopper/flash_fwd"),
        ({"seqlen_q": 512, "seqlen_k": 1980}, "hopper/flash_fwd"),  # 64 tiles, 960 keys for each of 132 SMs
        ({"seqlen_q": 512, "seqlen_k": 1979}, "split_kv"),
        ({"seqlen_q": 512, "num_heads_q": 1, "mask_shape": (1, 1, 512, 4096)}, "split_kv"),
        ({"seqlen_q": 512, "dtype": "float32", "seqlen_k": 1000}, "split_kv"),
        ({"seqlen_q": 512, "packed": True, "total_q": 512, "total_k": 4096}, "hopper/flash_fwd"),
    ],
    ids=str,
)
def test_prompts_with_few_tiles(change: dict[str, Any], kernel: str) -> None:
    prompt: dict[str, Any] = {
        "seqlen_k": 4096, "num_heads_q": 8, "num_heads_kv": 1, "causal": Causal("bottom_right"), **change
    }  # fmt: skip
    assert dispatch.choose(replace(DECODE, batch=1, **prompt), H200).kernel.NAME == kernel


@pytest.mark.parametrize(
    ("change", "tiling"),
    [
        ({"batch": 16}, (64, 4, 3)),  # by roles, an SM for nearly every tile of rows
        ({"batch": 48}, (128, 4, 3)),
        ({"batch": 128, "seqlen_k": 2048, "page_size": 16}, (64, 4, 3)),  # by roles, a copy for each page
        ({"batch": 64, "page_size": 32}, (64, 4, 3)),
        ({"batch": 64, "page_size": 128}, (128, 4, 3)),
        ({"batch": 64, "page_size": 64}, (64, 4, 4)),
        ({}, (64, 2, 3)),  # few tiles, split over all SMs
        ({"seqlen_k": 1024}, (128, 4, 2)),  # a tile of keys for each share
        ({"batch": 12, "seqlen_k": 2048}, (64, 4, 3)),
        ({"batch": 11, "seqlen_k": 900}, (64, 2, 3)),  # 88 tiles of rows, or 48, leave SMs idle
        ({"batch": 6, "seqlen_k": 2048, "page_size": 64}, (64, 2, 3)),
        ({"batch": 20, "seqlen_k": 1024}, (64, 4, 2)),
        ({"batch": 8}, (128, 4, 3)),  # in two shares 64 do not
        ({"batch": 4, "seqlen_k": 4096, "page_size": 64}, (64, 2, 3)),
        ({"batch": 200, "seqlen_k": 1000, "page_size": 64}, (64, 4, 4)),
        ({"batch": 48, "head_dim": 64, "head_dim_v": 64}, (64, 2, 3)),  # more tiles than SMs
        ({"batch": 48, "head_dim": 64, "head_dim_v": 64, "page_size": 64}, (64, 2, 3)),
        ({"batch": 50, "head_dim": 64, "head_dim_v": 64}, (128, 4, 3)),  # by roles, three tiles an SM and more
        ({"batch": 50, "head_dim": 40, "head_dim_v": 48, "seqlen_k": 129}, (128, 4, 3)),
        ({"batch": 50, "head_dim": 64, "head_dim_v": 64, "seqlen_k": 128}, (64, 2, 3)),
        ({"batch": 50, "head_dim": 32, "head_dim_v": 32}, (64, 2, 3)),
        ({"batch": 50, "head_dim": 64, "head_dim_v": 64, "page_size": 64}, (64, 2, 3)),
        ({"batch": 50, "head_dim": 64, "head_dim_v": 64, "seqlen_q": 5}, (128, 4, 3)),  # of 32 rows, by maps
        ({"batch": 48, "head_dim": 64, "head_dim_v": 64, "seqlen_q": 5}, (128, 4, 3)),  # of 32 rows
        ({"batch": 10, "head_dim": 64, "head_dim_v": 64}, (128, 4, 3)),
        ({"batch": 16, "head_dim": 256, "head_dim_v": 256}, (64, 4, 3)),
        ({"seqlen_q": 500, "page_size": 64}, (64, 4, 3)),
        ({"batch": 16, "window_size": (4000, 0)}, (64, 4, 3)),
        ({"batch": 48, "window_size": (4000, 0)}, (128, 4, 3)),
        ({"batch": 90, "seqlen_q": 8, "seqlen_k": 1024, "page_size": 64}, (64, 4, 3)),  # of 32 rows
        ({"batch": 24, "seqlen_q": 4, "seqlen_k": 5001, "num_heads_q": 64}, (64, 2, 3)),  # some tiles would end late
    ],
)
def test_tensor_maps_by_default(change: dict[str, Any], tiling: tuple[int, int, int]) -> None:
    problem = replace(DECODE, **change)
    config = split_kv.configs(problem, H200)[0]
    assert config.by_map and (config.block_n, config.num_warps, config.num_stages) == tiling
    assert split_kv.smem_bytes(problem, H200, config) <= H200.smem_per_block_bytes
    for other in (replace(Gpu.for_arch("sm_80"), num_sms=108), Gpu.for_arch("sm_100"), Gpu.for_arch("gfx942")):
        assert not split_kv.configs(problem, other)[0].by_map, "not measured there"


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float32"}, {"page_size": 1}, {"page_size": 16, "alibi_shape": (32,)},
        {"page_size": 32, "batch": 16, "seqlen_q": 9}, {"page_size": 16, "head_dim": 36},
        {"page_size": 16, "batch": 64, "batch_invariant": True},
        {"mask_shape": (1, 1, 1, 8192)}, {"head_dim": 36},
        {"bias_shape": (1, 1, 1, 1)}, {"seqlen_q": 500}, {"window_size": (500, 0)},
    ],
)  # fmt: skip
def test_pointers_where_maps_cannot_serve_or_were_not_ahead(change: dict[str, Any]) -> None:
    assert not split_kv.configs(replace(DECODE, **change), H200)[0].by_map


@pytest.mark.parametrize(
    ("batch", "seqlen_k", "number"),
    [(29, 2000, 2), (30, 2000, 1), (30, 8192, 1), (48, 2000, 1), (50, 2000, 1), (200, 777, 1)],
)
def test_tiles_of_narrow_heads_that_fill_the_sms_are_not_split(batch: int, seqlen_k: int, number: int) -> None:
    problem = replace(DECODE, batch=batch, seqlen_k=seqlen_k, head_dim=64, head_dim_v=64)
    config = split_kv.configs(problem, H200)[0]
    assert config.num_splits == number and config.roles is (batch >= 50)


@pytest.mark.parametrize(
    ("batch", "seqlen_k", "number"),
    [(18, 8192, 1), (19, 8192, 7), (24, 8192, 7), (25, 8192, 1), (20, 8128, 1)],
)
def test_long_keys_of_tiles_that_would_end_late_are_split(batch: int, seqlen_k: int, number: int) -> None:
    problem = replace(DECODE, batch=batch, seqlen_k=seqlen_k)
    config = split_kv.configs(problem, H200)[0]
    assert config.roles and config.num_splits == number
    ends_together = "waves they end together" in split_kv.notes(problem, H200, config)[-1]
    assert ends_together is (number > 1)


@pytest.mark.parametrize(
    ("change", "tile"),
    [
        ({"batch": 16, "seqlen_k": 4096}, (64, 3, 1)),  # a block for nearly every SM
        ({"batch": 4, "seqlen_k": 4096}, (64, 2, 4)),
        ({"batch": 3}, (64, 2, 5)),
        ({"batch": 10}, (64, 2, 3)),  # one block an SM would leave four in ten idle
        ({"batch": 10, "seqlen_k": 4096}, (64, 2, 3)),
        ({"batch": 10, "seqlen_k": 4032}, (64, 2, 1)),
        ({"batch": 6}, (64, 2, 5)),
        ({"batch": 11, "seqlen_k": 2048}, (64, 2, 1)),  # too few keys to pay for the merge
        ({}, (64, 2, 33)),  # two blocks an SM of few tiles
        ({"seqlen_k": 65536}, (64, 2, 33)),
        ({"seqlen_k": 65536, "num_heads_q": 16, "num_heads_kv": 2}, (64, 2, 64)),
        ({"seqlen_k": 65536, "num_heads_q": 8, "num_heads_kv": 1}, (64, 2, 128)),  # a single long tile
        ({"seqlen_k": 65472, "num_heads_q": 8, "num_heads_kv": 1}, (64, 2, 64)),
        ({"batch": 12, "seqlen_k": 2048}, (64, 3, 1)),
        ({"batch": 20, "seqlen_k": 1024}, (64, 2, 1)),  # some SMs have two, smaller ones
        ({"batch": 20, "seqlen_k": 8192}, (64, 2, 1)),  # perhaps far fewer keys
        ({"batch": 32, "seqlen_k": 3000}, (64, 3, 1)),
        ({"seqlen_k": 1024}, (128, 1, 8)),  # splits of one step, or two
        ({"seqlen_k": 2048}, (128, 1, 8)),
        ({"batch": 16, "seqlen_k": 4096, "num_heads_kv": 2, "window_size": (100, 0)}, (128, 1, 1)),
        ({"batch": 16, "seqlen_k": 4096, "seqlen_q": 4}, (64, 3, 1)),
        ({"batch": 4, "seqlen_k": 4096, "head_dim": 64, "head_dim_v": 64}, (64, 4, 8)),  # two blocks an SM
        ({"batch": 16, "seqlen_k": 4096, "seqlen_q": 8}, (64, 3, 1)),  # 32 rows
        ({"batch": 64, "seqlen_k": 2048, "seqlen_q": 5}, (64, 3, 1)),
        ({"batch": 8, "seqlen_k": 4096, "seqlen_q": 8}, (64, 3, 2)),
        ({"seqlen_k": 1024, "seqlen_q": 8, "head_dim_v": 64}, (128, 1, 8)),
        ({"batch": 4, "seqlen_k": 4096, "head_dim_v": 64}, (64, 2, 4)),  # as at head_dim 128
        ({"batch": 16, "seqlen_k": 2048, "head_dim": 64, "head_dim_v": 64}, (128, 3, 1)),  # tiles of as many bytes
    ],
)
@pytest.mark.parametrize("page_size", [16, 32])
def test_small_pages_come_by_roles(change: dict[str, Any], tile: tuple[int, int, int], page_size: int) -> None:
    problem = replace(DECODE, page_size=page_size, **change)
    config = split_kv.configs(problem, H200)[0]
    assert config.roles and (config.block_n, config.num_stages, config.num_splits) == tile and config.launched_ahead
    assert split_kv.smem_bytes(problem, H200, config) <= H200.smem_per_block_bytes
    for other in (replace(Gpu.for_arch("sm_80"), num_sms=108), Gpu.for_arch("sm_100"), Gpu.for_arch("gfx942")):
        assert not split_kv.configs(problem, other)[0].roles, "not measured there"


NARROW: dict[str, Any] = {"head_dim": 64, "head_dim_v": 64, "page_size": 64}


@pytest.mark.parametrize(
    ("change", "tile"),
    [
        ({"batch": 12, "seqlen_k": 129}, (64, 3)),
        ({"batch": 12, "seqlen_k": 128}, None),  # all keys are one step
        ({"batch": 11, "seqlen_k": 960}, None),
        ({"batch": 33, "seqlen_k": 961}, (64, 3)),
        ({"batch": 34, "seqlen_k": 961}, None),
        ({"batch": 34, "seqlen_k": 960}, (64, 3)),
        ({"batch": 200, "seqlen_k": 960}, (64, 3)),
        ({"batch": 8, "seqlen_k": 960, "page_size": 128}, (64, 2)),  # 64 tiles of rows for 132 SMs
        ({"batch": 8, "seqlen_k": 961, "page_size": 128}, None),
        ({"batch": 8, "seqlen_k": 128, "page_size": 128}, None),
        ({"batch": 7, "seqlen_k": 960, "page_size": 128}, None),
        ({"batch": 19, "seqlen_q": 8, "seqlen_k": 960}, None),  # some of 152 tiles of 32 rows would end late
        ({"batch": 4, "seqlen_k": 4224}, (64, 2)),  # 1,024 keys a multiprocessor
        ({"batch": 4, "seqlen_k": 4160}, None),
        ({"batch": 7}, (64, 2)),
        ({"batch": 8}, None),  # 64 tiles of rows for 132 SMs
        ({"batch": 7, "seqlen_q": 8}, None),  # 32 rows
        ({"batch": 7, "head_dim": 64, "head_dim_v": 64}, None),
        ({"batch": 12, **NARROW}, (128, 3)),
        ({"batch": 12, "seqlen_k": 100, **NARROW}, (128, 3)),
        ({"batch": 33, "seqlen_q": 8, **NARROW}, (128, 3)),
        ({"batch": 34, **NARROW}, None),
        ({"batch": 34, "seqlen_k": 900, **NARROW}, None),
        ({"batch": 11, **NARROW}, None),
        ({"batch": 34, **NARROW, "page_size": 16}, None),
        ({"batch": 16, **NARROW, "page_size": 128}, (128, 3)),
        ({"batch": 12, "seqlen_k": 129, **NARROW, "page_size": 0}, (128, 3)),
        ({"batch": 12, "seqlen_k": 128, **NARROW, "page_size": 0}, None),
        ({"batch": 17, **NARROW, "page_size": 0}, None),  # 136 tiles of rows for 132 SMs
    ],
)
def test_which_tiles_of_few_rows_come_by_roles(change: dict[str, Any], tile: tuple[int, int] | None) -> None:
    config = split_kv.default(replace(DECODE, **change), H200)
    assert config.roles == (tile is not None)
    assert tile is None or (config.block_n, config.num_stages) == tile


@pytest.mark.parametrize(
    ("batch", "heads", "keys", "tile"),
    [
        (1, 1, 128, (16, 128)),
        (4, 4, 128, (16, 128)),
        (8, 4, 128, (64, 64)),  # a longer step gains 2 % there
        (1, 1, 64, (16, 64)),
        (1, 1, 30, (16, 32)),
        (16, 16, 30, (32, 32)),
        (1, 1, 4, (16, 16)),
        (40, 8, 50, (64, 64)),
    ],
)
def test_short_prompts_walk_their_keys_in_one_step(batch: int, heads: int, keys: int, tile: tuple[int, int]) -> None:
    """By narrow tiles as long as they all run at once; a sequence whose bits may not depend on the batch keeps its."""
    prompt = replace(
        DECODE, batch=batch, seqlen_q=keys, seqlen_k=keys, num_heads_q=heads, num_heads_kv=heads, head_dim=64,
        head_dim_v=64, dtype="float16",
    )  # fmt: skip
    config = split_kv.configs(prompt, H200)[0]
    assert (config.block_m, config.block_n) == tile and config.num_splits == 1 and config.launched_ahead
    for change in ({"batch_invariant": True}, {"head_dim": 128}):
        other = split_kv.configs(replace(prompt, **change), H200)[0]
        assert (other.block_m, other.block_n) == (64, 64) or keys <= 32


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({"batch": 47, "seqlen_q": 4, "seqlen_k": 4093, "num_heads_q": 64}, 2),
        ({"batch": 64, "seqlen_q": 7, "seqlen_k": 4096, "head_dim": 64, "head_dim_v": 64}, 2),
    ],
)
def test_parts_of_32_rows_cost_as_much_as_their_bytes(change: dict[str, Any], number: int) -> None:
    """Without these bytes, the tiles are split more."""
    problem = replace(DECODE, page_size=64, **change)
    config = split_kv.default(problem, H200)
    assert config.block_m == 32 and not config.roles and config.num_splits == number
    of, tiles = splits.pace(problem, H200, config, False), splits.blocks_with_rows(problem, config)
    free = splits._soonest(0, tiles, longest_steps(problem, config), 132, of._replace(part_of_tile=0.0))
    assert of.part_of_tile > 0 and free > number


@pytest.mark.parametrize("of_tile", [0.0, 0.001, 0.01, 0.1])
@pytest.mark.parametrize("blocks", [1, 8, 40, 100, 376, 800])
@pytest.mark.parametrize("longest", [3, 64, 1000])
def test_the_search_ends_with_the_least(of_tile: float, blocks: int, longest: int) -> None:
    for together in (0.0, 0.9):
        of = splits.Pace(264, 132, 1.2, 0.1, 0.0, 2.4, of_tile, together)
        steps = [splits._steps(s, 0, blocks, longest, 132, of) for s in range(1, min(splits.MAX_SPLITS, longest) + 1)]
        assert steps[splits._soonest(0, blocks, longest, 132, of) - 1] == min(steps)


def test_launches_of_few_rows_begin_ahead_from_pages_too() -> None:
    for change in ({"page_size": 64}, {"page_size": 16}, {"seqlen_q": 500, "page_size": 64}):
        assert split_kv.configs(replace(DECODE, **change), H200)[0].launched_ahead  # type: ignore[arg-type]


def test_queries_come_beside_keys_where_a_share_has_one_step() -> None:
    """As many shares as tiles of keys, whatever brings them; not where a loop would ask for the queries again."""
    config = Config(16, 64, 4, 2, num_splits=16)
    for change, one in (
        ({}, True),
        ({"seqlen_k": 1025}, False),
        ({"page_size": 16}, True),
        ({"dtype": "float32"}, False),
    ):
        assert one_step(replace(DECODE, **{"seqlen_k": 1024} | change), H200, config) == one
    for other in (replace(config, num_stages=1), replace(config, pieces=16)):
        assert not one_step(replace(DECODE, seqlen_k=1024), H200, other)


@pytest.mark.parametrize(
    ("change", "tile"),
    [
        ({"seqlen_k": 1024, "page_size": 64}, (32, 2, 2, 32)),  # each step a block
        ({"seqlen_k": 1024, "page_size": 128}, (128, 4, 2, 8)),
        ({"seqlen_k": 1024, "page_size": 16, "alibi_shape": (32,)}, (32, 2, 2, 32)),
        ({"seqlen_k": 1100, "page_size": 16, "alibi_shape": (32,)}, (64, 4, 2, 18)),  # too many steps for that
        ({"seqlen_k": 8192, "page_size": 16, "alibi_shape": (32,)}, (64, 4, 3, 32)),
        ({"seqlen_k": 65536, "page_size": 16, "alibi_shape": (32,)}, (64, 4, 3, 32)),
    ],
)
def test_short_caches_in_pages(change: dict[str, Any], tile: tuple[int, int, int, int]) -> None:
    config = split_kv.configs(replace(DECODE, **change), H200)[0]
    assert (config.block_n, config.num_warps, config.num_stages, config.num_splits) == tile and config.launched_ahead


def test_blocks_by_maps_end_together() -> None:
    """Nine in ten of the blocks that keep memory busy are enough: 128 tiles for 132 SMs are not split (64 x 8,192 keys
    in pages of 16: 485 us by one share, 491 by two), nor 64 into more than two (8 x 8,192: 66.4 by two, 68.0 by
    four)."""
    assert split_kv.configs(replace(DECODE, batch=8), H200)[0].num_splits == 2


def test_a_block_by_maps_keeps_an_sm_busy() -> None:
    """Two tiles of 64 KB in flight are enough; blocks of 64 and 96 KB count as two and one."""
    problem = replace(DECODE, batch=16)
    for config, per_sm in ((Config(16, 128, 4, 3, by_map=True), 1), (Config(16, 64, 2, 3, by_map=True), 2)):
        pace = splits.pace(problem, H200, config, True)
        assert pace.saturating == per_sm * 132 and pace.start == splits.MAPPED_START_STEPS
    paged = replace(problem, page_size=64)
    pace = splits.pace(paged, H200, Config(16, 64, 4, 7, by_map=True), True)
    assert pace.saturating == 132 and pace.start == 2 * splits.MAPPED_START_STEPS, "its steps are half as long"
    by_pointer = splits.pace(paged, H200, Config(16, 64, 4, 7), True)
    assert by_pointer.start == splits.START_STEPS


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("seqlen_q", [1, 512])
def test_configs_fit(arch: str, dtype: str, head_dim: int, seqlen_q: int) -> None:
    gpu = Gpu.for_arch(arch)
    problem = replace(DECODE, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim, seqlen_q=seqlen_q, page_size=16)
    assert not split_kv.why_not(problem, gpu)
    found = split_kv.configs(problem, gpu)
    assert len(set(found)) == len(found)
    assert all(split_kv.smem_bytes(problem, gpu, c) <= gpu.smem_per_block_bytes for c in found)


def test_cost_reads_keys_once_for_the_group() -> None:
    config = Config(16, 64, 4, 3, num_splits=4)
    cost = split_kv.cost(DECODE, H200, config)
    attend, merge = cost.parts
    rows, parts = 32, 4
    scratch = 4 * parts * rows * (128 + 2)
    assert attend.blocks == 8 * 4 and merge.blocks == rows
    assert attend.read_bytes == 2 * rows * 128 + 8 * 8192 * (128 + 128) * 2
    assert attend.write_bytes == attend.scratch_bytes == merge.read_bytes == scratch == cost.workspace_bytes
    assert cost.write_bytes == scratch + rows * 128 * 2
    assert attend.steps == 8 * 128 and attend.longest == 32
    windowed = split_kv.cost(replace(DECODE, window_size=(63, 0)), H200, config)
    assert windowed.parts[0].steps == 8, "a window of 64 keys at a tile's end is one tile of each kv head"


@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({}, "hopper/flash_fwd"),
        ({"seqlen_q": 9}, "hopper/flash_fwd"),
        ({"packed": True, "total_q": 113 * 10, "total_k": 113 * 4000}, "hopper/flash_fwd"),
        ({"packed": True, "total_q": 113 * 7, "total_k": 113 * 4000}, "split_kv"),  # 56 rows a sequence on average
        ({"window_size": (100, 0)}, "split_kv"),
        ({"causal": Causal("top_left")}, "split_kv"),
        ({"causal": Causal("bottom_right")}, "hopper/flash_fwd"),
        ({"seqlen_q": 3}, "hopper/flash_fwd"),
        ({"seqlen_q": 2}, "split_kv"),  # 16 rows
        ({"seqlen_q": 7, "num_heads_q": 24}, "split_kv"),  # 7 of 21 rows share a tile
        ({"batch": 2, "seqlen_k": 3960}, "hopper/flash_fwd"),  # 32 tiles, 960 keys for each of 132 SMs
        ({"batch": 2, "seqlen_k": 3959}, "split_kv"),
        ({"batch": 2, "seqlen_k": 4950, "head_dim": 64, "head_dim_v": 64}, "hopper/flash_fwd"),  # 1,200
        ({"batch": 2, "seqlen_k": 4949, "head_dim": 64, "head_dim_v": 64}, "split_kv"),
        ({"batch": 13, "seqlen_k": 305}, "hopper/flash_fwd"),  # 208 tiles, 480 keys for each SM
        ({"batch": 13, "seqlen_k": 304}, "split_kv"),
        ({"num_heads_q": 71, "num_heads_kv": 1}, "split_kv"),  # no two heads share a tile of the other kernel
        ({"mask_shape": (113, 1, 1, 4357)}, "split_kv"),
        ({"head_dim": 100}, "split_kv"),
        ({"head_dim_v": 100}, "split_kv"),
        ({"batch_invariant": True}, "split_kv"),
    ],
    ids=str,
)
def test_few_queries_of_many_heads_take_larger_tiles(change: dict[str, Any], kernel: str) -> None:
    call = replace(DECODE, **({"batch": 113, "seqlen_q": 12, "seqlen_k": 4357, "num_heads_q": 64} | change))
    assert dispatch.choose(call, H200).kernel.NAME == kernel
    reasons = split_kv.outrun(call, H200)
    assert bool(reasons) == (kernel != "split_kv")
    assert not reasons or "enough rows and keys" in reasons[0]
    assert not split_kv.outrun(call, replace(Gpu.for_arch("sm_80"), num_sms=108))


def test_pages_that_are_no_power_of_two_are_refused() -> None:
    (reason,) = split_kv.why_not(replace(DECODE, page_size=48), H200)
    assert "page_size is 48" in reason


@pytest.mark.parametrize("seqlen_k", [17, 64])
def test_few_queries_on_one_tile_of_keys_have_nothing_to_split(seqlen_k: int) -> None:
    (reason,) = split_kv.outrun(replace(DECODE, batch=64, num_heads_kv=32, seqlen_q=1, seqlen_k=seqlen_k), H200)
    assert "nothing to split" in reason and "faster" not in reason and "1 query " in reason
    (long,) = split_kv.outrun(replace(DECODE, seqlen_q=4096, seqlen_k=4096), H200)
    assert "faster at 16 queries or fewer" in long


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", "256 keys or more"), ("float32", "256 to 1024 keys")])
def test_the_reason_states_which_prompts_of_the_dtype_are_split(dtype: str, most: str) -> None:
    """In float32 long prompts stay with tiles of queries, even if these leave most SMs idle."""
    prompt = replace(DECODE, batch=1, seqlen_q=64, seqlen_k=2048, dtype=dtype)
    assert bool(split_kv.outrun(prompt, H200)) == (dtype == "float32")
    (reason,) = split_kv.outrun(replace(prompt, batch=64, seqlen_q=4096), H200)
    assert reason.endswith(f"if few tiles of rows see {most}")


@pytest.mark.parametrize(
    ("change", "tile"),
    [
        ({"seqlen_q": 16, "seqlen_k": 16}, (16, 16, 1)),
        ({"seqlen_q": 16, "seqlen_k": 16, "num_heads_kv": 8}, (16, 16, 1)),
        ({"seqlen_q": 1, "seqlen_k": 9}, (16, 16, 1)),
        ({"seqlen_q": 12, "seqlen_k": 12, "mask_shape": (64, 1, 1, 12)}, (16, 16, 1)),
        ({"seqlen_q": 17, "seqlen_k": 17, "head_dim": 64, "head_dim_v": 64}, (32, 32, 2)),
        ({"seqlen_q": 8, "seqlen_k": 32, "head_dim": 64, "head_dim_v": 64}, (16, 32, 1)),
        ({"seqlen_q": 17, "seqlen_k": 17}, None),
        ({"seqlen_q": 33, "seqlen_k": 33, "head_dim": 64, "head_dim_v": 64}, None),
        ({"seqlen_q": 16, "seqlen_k": 16, "dtype": "float32"}, None),
        ({"seqlen_q": 16, "seqlen_k": 16, "batch_invariant": True}, None),
        ({"seqlen_q": 16, "seqlen_k": 16, "packed": True, "total_q": 900, "total_k": 900}, (16, 16, 1)),
        ({"seqlen_q": 32, "seqlen_k": 32, "packed": True, "total_q": 900, "total_k": 900}, (32, 32, 2)),
        (
            {"seqlen_q": 32, "seqlen_k": 32, "head_dim": 256, "packed": True, "total_q": 900, "total_k": 900},
            (32, 32, 2),
        ),
        ({"seqlen_q": 64, "seqlen_k": 64, "packed": True, "total_q": 3840, "total_k": 3840}, (64, 32, 4)),
        ({"seqlen_q": 64, "seqlen_k": 64, "packed": True, "total_q": 3841, "total_k": 3841}, None),
        ({"seqlen_q": 64, "seqlen_k": 65, "packed": True, "total_q": 900, "total_k": 900}, None),
    ],
    ids=str,
)
def test_a_sequence_in_one_tile_has_a_warp_for_16_rows(change: dict[str, Any], tile: tuple[int, ...] | None) -> None:
    problem = replace(DECODE, batch=64, **({"num_heads_kv": 32} | change))
    chosen, config, _ = dispatch.choose(problem, H200)
    assert (chosen.NAME == "split_kv") == (tile is not None)
    if tile is not None:
        assert (config.block_m, config.block_n, config.num_warps) == tile and config.num_splits == 1


def test_explain_prints_the_splits_and_their_reason() -> None:
    """For a cache split_kv serves, for a dense call where it is asked for; eager's part is to be named behind it."""
    said = explain(replace(DECODE, page_size=16), gpu=H200)
    assert said.kernel == "split_kv" and list(said.reasons) == [
        "hopper/flash_fwd",
        "split_kv",
        "large_head_dim",
        "eager",
    ]
    text = " ".join(str(said).split())
    assert f"config num_splits = {said.config.num_splits}: 8 tiles of rows for 396 resident blocks on 132 SMs" in text
    assert "cache in pages of 16" in text
    given = explain(DECODE, gpu=H200, kernel="split_kv", config=Config(16, 64, 4, 2, 3))
    assert "num_splits = 3, as given" in " ".join(str(given).split())
