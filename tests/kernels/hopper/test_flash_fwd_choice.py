"""The config that the Hopper forward chooses for a call. No GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from warpwave import explain
from warpwave.gpu import Gpu
from warpwave.kernels.hopper import flash_fwd
from warpwave.kernels.hopper.flash_fwd import choice
from warpwave.kernels.hopper.flash_fwd import config as flash_fwd_configs
from warpwave.problem import AttentionProblem, Causal

H200 = Gpu.for_arch("sm_90")
PROBLEM = AttentionProblem(
    batch=2, seqlen_q=1000, seqlen_k=1000, num_heads_q=8, num_heads_kv=2, head_dim=128, head_dim_v=128,
    dtype="bfloat16", softmax_scale=0.1,
)  # fmt: skip


LARGE = replace(PROBLEM, seqlen_q=4096, seqlen_k=4096, batch=4, num_heads_q=16, num_heads_kv=16)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (192, 64)),
        ({"causal": Causal()}, (192, 64)),
        ({"window_size": (1024, 0)}, (192, 64)),
        ({"head_dim": 96, "head_dim_v": 96}, (192, 64)),
        # The busiest SM gets 1.125 times as many rows as from blocks of 128.
        ({"head_dim": 96, "head_dim_v": 96, "batch": 16, "seqlen_q": 1024, "seqlen_k": 1024}, (192, 64)),
        # Masks, float32, and rows of three pieces unless those of V are padded, are no faster so.
        ({"head_dim": 112, "head_dim_v": 112}, (192, 64)),
        ({"head_dim": 112, "head_dim_v": 64}, (128, 128)),
        ({"mask_shape": (1, 1, 4096, 4096)}, (128, 128)),
        ({"dtype": "float32", "precision": "tf32"}, (128, 128)),
        # 192 queries do not go round: few blocks, or none at all.
        ({"seqlen_q": 128, "batch": 8}, (128, 128)),
        ({"seqlen_q": 128, "batch": 4}, (64, 128)),
        ({"batch": 0}, (64, 128)),
    ],
)
def test_blocks_of_192_queries_where_they_go_round(change: dict[str, Any], expected: tuple[int, int]) -> None:
    config = flash_fwd.configs(replace(LARGE, **change), H200)[0]
    assert (config.block_m, config.block_n) == expected


@pytest.mark.parametrize(
    ("widths", "change", "expected"),
    [
        ((160, 160), {}, flash_fwd.Config(128, 128, 2)),
        ((136, 144), {"causal": Causal()}, flash_fwd.Config(128, 128, 2)),
        ((192, 128), {}, flash_fwd.Config(128, 128, 2)),
        ((192, 128), {"seqlen_k": 1024}, flash_fwd.Config(128, 128, 2)),
        ((192, 128), {"seqlen_k": 1000}, flash_fwd.Config(128, 64, 2)),
        ((192, 192), {}, flash_fwd.Config(128, 64, 3)),
        ((184, 184), {"seqlen_k": 2000}, flash_fwd.Config(128, 64, 3)),
        ((184, 184), {"causal": Causal(), "seqlen_k": 2000}, flash_fwd.Config(128, 64, 2)),
        ((208, 208), {"causal": Causal()}, flash_fwd.Config(128, 64, 3)),
        ((232, 232), {}, flash_fwd.Config(128, 64, 2)),
        ((96, 64), {}, flash_fwd.Config(192, 128, 3)),
        ((128, 64), {"causal": Causal()}, flash_fwd.Config(192, 128, 3)),
        ((128, 72), {"causal": Causal()}, flash_fwd.Config(192, 64, 4)),
        # All queries of a sequence in one block of 64, and more blocks than SMs.
        ((64, 128), {"seqlen_q": 46, "batch": 25}, flash_fwd.Config(64, 128, 2)),
        ((64, 128), {"seqlen_q": 46, "batch": 16}, flash_fwd.Config(64, 64, 3, 2)),
        ((64, 128), {"seqlen_q": 46, "batch": 25, "seqlen_k": 2047}, flash_fwd.Config(64, 64, 3, 2)),
        ((64, 128), {"seqlen_q": 65, "batch": 25}, flash_fwd.Config(128, 128, 2)),
        ((64, 128), {"seqlen_q": 46, "batch": 2, "seqlen_k": 1000}, flash_fwd.Config(64, 128, 2)),
        ((176, 176), {"seqlen_q": 40, "batch": 48}, flash_fwd.Config(64, 64, 2, 2)),
        ((192, 192), {"seqlen_q": 64, "batch": 25}, flash_fwd.Config(128, 64, 3)),
        ((152, 152), {"seqlen_q": 192, "batch": 26}, flash_fwd.Config(128, 128, 2)),
        ((256, 128), {}, flash_fwd.Config(128, 64, 2)),
        ((160, 160), {"softcap": 30.0}, flash_fwd.Config(128, 64, 2)),
        ((160, 160), {"window_size": (4096, 0)}, flash_fwd.Config(128, 64, 2)),
        ((176, 176), {}, flash_fwd.Config(128, 64, 2, narrowest_v=64)),
        ((112, 112), {}, flash_fwd.Config(192, 64, 4, narrowest_v=64)),
        ((112, 104), {"seqlen_q": 128, "batch": 8}, flash_fwd.Config(128, 128, 2, narrowest_v=64)),
        # Blocks of 64 queries: 128 and 160 for 132 SMs.
        ((112, 104), {"seqlen_q": 128, "batch": 4}, flash_fwd.Config(64, 128, 2, narrowest_v=64)),
        ((128, 128), {"seqlen_q": 640, "batch": 1}, flash_fwd.Config(128, 128, 2)),
        ((256, 256), {"seqlen_q": 512, "batch": 1}, flash_fwd.Config(64, 64, 3)),
        ((256, 256), {"seqlen_q": 640, "batch": 1}, flash_fwd.Config(128, 64, 2)),
        ((48, 48), {}, flash_fwd.Config(192, 128, 3, narrowest_v=64)),
        # Rows of 112 or 80 bytes begin between sectors, those of 96, 16 and 128 do not.
        ((56, 56), {"seqlen_k": 1024, "causal": Causal()}, flash_fwd.Config(128, 128, 3)),
        ((48, 40), {"seqlen_k": 1024, "causal": Causal()}, flash_fwd.Config(128, 128, 3, narrowest_v=64)),
        ((48, 48), {"seqlen_k": 1024, "causal": Causal()}, flash_fwd.Config(64, 64, 3, 3, narrowest_v=64)),
        ((8, 64), {"seqlen_k": 1024, "causal": Causal()}, flash_fwd.Config(64, 64, 3, 3)),
        ((56, 56), {"seqlen_q": 80, "seqlen_k": 1024, "batch": 1}, flash_fwd.Config(128, 128, 3)),
        ((56, 56), {}, flash_fwd.Config(192, 128, 3)),
        ((64, 64), {"softcap": 30.0, "causal": Causal()}, flash_fwd.Config(64, 64, 3, 3)),
        ((64, 64), {"softcap": 30.0}, flash_fwd.Config(192, 128, 3)),
        (
            (64, 64),
            {"softcap": 30.0, "causal": Causal(), "dtype": "float32", "precision": "tf32"},
            flash_fwd.Config(192, 128, 3),
        ),
        # Few keys; and chunks of queries at the end of many keys, which see nearly all of them.
        ((64, 64), {"seqlen_k": 640}, flash_fwd.Config(64, 64, 3, 3)),
        ((64, 64), {"seqlen_k": 641}, flash_fwd.Config(64, 64, 3, 3)),
        ((64, 64), {"seqlen_k": 1025}, flash_fwd.Config(192, 128, 3)),
        ((64, 64), {"seqlen_q": 768, "seqlen_k": 768, "batch": 33}, flash_fwd.Config(192, 128, 3)),
        ((64, 64), {"seqlen_k": 640, "mask_shape": (1, 1, 4096, 640)}, flash_fwd.Config(64, 64, 3, 3)),
        ((64, 64), {"seqlen_q": 128, "seqlen_k": 8192, "batch": 8}, flash_fwd.Config(128, 128, 3)),
        ((64, 64), {"seqlen_q": 128, "seqlen_k": 1000, "batch": 4}, flash_fwd.Config(64, 128, 2, 2)),
        ((64, 64), {"seqlen_q": 512, "seqlen_k": 2048, "batch": 16, "causal": Causal()}, flash_fwd.Config(192, 128, 3)),
        ((64, 64), {"seqlen_q": 1024, "seqlen_k": 2048, "causal": Causal()}, flash_fwd.Config(64, 64, 3, 3)),
        ((128, 128), {"seqlen_q": 1024, "seqlen_k": 8192, "causal": Causal()}, flash_fwd.Config(128, 128, 3)),
        ((128, 128), {"seqlen_q": 1024, "seqlen_k": 8191, "causal": Causal()}, flash_fwd.Config(192, 64, 4)),
        ((128, 128), {"seqlen_q": 1024, "seqlen_k": 8192, "window_size": (4096, 0)}, flash_fwd.Config(192, 64, 4)),
        ((128, 128), {"seqlen_q": 4096, "seqlen_k": 16384, "causal": Causal()}, flash_fwd.Config(192, 64, 4)),
        (
            (128, 128),
            {"seqlen_q": 1024, "seqlen_k": 8192, "page_size": 64, "dtype_kv": "int8", "kv_factors": "head"},
            flash_fwd.Config(192, 64, 4),
        ),
        # Packed calls of grouped heads.
        (
            (128, 128),
            {"packed": True, "total_q": 16384, "total_k": 16384, "num_heads_kv": 4},
            flash_fwd.Config(192, 64, 4, heads=4),
        ),
        (
            (128, 128),
            {"packed": True, "total_q": 16384, "total_k": 16384, "num_heads_kv": 4, "seqlen_k": 256},
            flash_fwd.Config(128, 128, 2, heads=4),
        ),
        ((128, 128), {"packed": True, "total_q": 16384, "total_k": 16384}, flash_fwd.Config(128, 128, 2)),
        ((48, 48), {"mask_shape": (1, 1, 4096, 4096)}, flash_fwd.Config(192, 128, 3)),
        ((48, 48), {"dtype": "float32", "precision": "tf32"}, flash_fwd.Config(192, 128, 3)),
        ((80, 80), {}, flash_fwd.Config(192, 64, 4)),
    ],
    ids=str,
)
def test_tiles_of_widths_between_the_powers_of_two(
    widths: tuple[int, int], change: dict[str, Any], expected: flash_fwd.Config
) -> None:
    problem = replace(LARGE, head_dim=widths[0], head_dim_v=widths[1], **change)
    config = flash_fwd.configs(problem, H200)[0]
    assert config == expected
    *_, said = choice.notes(problem, H200, config)
    assert ("rows of V are padded" in said) == (config.narrowest_v == 64)
    assert "the table would choose another" not in " ".join(choice.notes(problem, H200, config))


@pytest.mark.parametrize(
    ("width", "seqlen", "change", "tile"),
    [
        (32, 49, {"bias_shape": (1, 4, 49, 49), "bias_dtype": "float16"}, (64, 64, 3, 3)),
        (64, 4096, {"bias_shape": (1, 4, 4096, 4096), "bias_dtype": "float16"}, (64, 64, 2, 3)),
        (64, 256, {"bias_shape": (1, 4, 256, 256), "bias_dtype": "float32"}, (64, 64, 2, 3)),
        (64, 1025, {"bias_shape": (1, 4, 1025, 1025), "bias_dtype": "float32"}, (128, 128, 2, 1)),
        (64, 512, {"mask_shape": (8, 1, 1, 512)}, (64, 64, 3, 3)),
        (64, 2048, {"mask_shape": (8, 1, 1, 2048)}, (192, 128, 3, 1)),
        (128, 64, {"mask_shape": (8, 1, 1, 64)}, (64, 64, 2, 2)),
        (128, 256, {"bias_shape": (1, 4, 256, 256), "bias_dtype": "float16"}, (128, 64, 3, 1)),
        (40, 48, {}, (64, 64, 3, 3)),
        (40, 100, {}, (128, 128, 3, 1)),
    ],
    ids=str,
)
def test_tiles_of_short_sequences_masks_and_biases(
    width: int, seqlen: int, change: dict[str, Any], tile: tuple[int, ...]
) -> None:
    given: dict[str, Any] = {"head_dim": width, "head_dim_v": width, "seqlen_q": seqlen, "seqlen_k": seqlen}
    config = flash_fwd.configs(replace(PROBLEM, batch=512, num_heads_q=4, num_heads_kv=4, **given, **change), H200)[0]
    assert (config.block_m, config.block_n, config.num_stages, config.blocks_per_sm) == tile


@pytest.mark.parametrize("rules", [choice.RULES, choice.RULES_OF_PARTS], ids=["one part", "parts"])
def test_every_row_of_the_tables_has_a_record(rules: Any) -> None:
    records = Path(__file__).parents[3] / "benchmarks" / "records"
    for rule in rules:
        assert rule.choices and rule.gain, rule.where
        assert (records / rule.record).is_file(), rule.where
    assert len({rule.where for rule in rules}) == len(rules)


def test_keys_behind_the_last_query_do_not_change_the_tile() -> None:
    """With a causal mask aligned to the first key, no query sees them."""
    square = replace(
        PROBLEM, batch=16, head_dim=64, head_dim_v=64, seqlen_q=1024, seqlen_k=1024, causal=Causal("top_left")
    )
    assert choice.default(square, H200) == choice.default(replace(square, seqlen_k=65536), H200)


def test_explain_prints_the_row_that_decided() -> None:
    problem = replace(PROBLEM, batch=16, head_dim=64, head_dim_v=64, seqlen_q=1024, seqlen_k=1024, causal=Causal())
    config = choice.default(problem, H200)
    assert config is not None
    said, of_heads = choice.notes(problem, H200, config)
    assert "at most 2,048 keys a query" in said and choice.MASKS in said
    assert "4 query heads of a kv head share a tile" in of_heads and choice.TOGETHER in of_heads
    assert "at most 2,048 keys a query" in " ".join(str(explain(problem, gpu=H200)).split())
    (said,) = choice.notes(problem, H200, flash_fwd_configs.Config(128, 128, 2))
    assert "another config" in said


def test_only_a_triangle_has_the_tiles_of_triangles() -> None:
    """Blocks of 192 queries in one wave lose only if the longest takes twice as long as the mean: under a causal mask
    without a window, with as many keys as queries, in 16 bits."""
    one = replace(PROBLEM, batch=1, num_heads_q=16, num_heads_kv=16, causal=Causal())
    wave = replace(one, seqlen_q=1536, seqlen_k=1536)  # 128 blocks of 192
    short = replace(one, num_heads_q=32, num_heads_kv=8, seqlen_q=512, seqlen_k=512)
    in_turn = replace(one, num_heads_q=8, num_heads_kv=8, seqlen_q=1900, seqlen_k=1900)
    narrow = replace(one, head_dim=64, head_dim_v=64, seqlen_q=2304, seqlen_k=2304, num_heads_q=8, num_heads_kv=8)

    def tiles(problem: AttentionProblem) -> tuple[int, ...]:
        config = choice.default(problem, H200)
        assert config is not None
        return config.block_m, config.block_n, config.blocks_per_sm

    expected = [(128, 128, 1), (64, 64, 2), (64, 64, 1), (64, 128, 2)]
    assert [tiles(p) for p in (wave, short, in_turn, narrow)] == expected
    for problem, of_triangle in zip((wave, short, in_turn, narrow), expected, strict=True):
        alike: list[dict[str, Any]] = [
            {"softcap": 30.0}, {"packed": True, "total_q": problem.seqlen_q, "total_k": problem.seqlen_q},
        ]  # fmt: skip
        if problem is not narrow:
            alike.append({"alibi_shape": (problem.num_heads_q,)})
        for change in alike:
            if problem is narrow and "softcap" in change:  # its row is another
                continue
            assert tiles(replace(problem, **change)) == of_triangle, change
        others = {(128, 128, 1), (192, 64, 1), (192, 128, 1), (64, 64, 3)}
        for change in ({"window_size": (-1, 64)}, {"seqlen_k": problem.seqlen_q * 3 // 2}):
            assert tiles(replace(problem, **change)) in others, change
    assert tiles(replace(wave, causal=None)) == tiles(replace(wave, window_size=(-1, 64))) == (192, 64, 1)


@pytest.mark.parametrize(
    ("head_dim", "tile"), [(40, (192, 128)), (48, (64, 64)), (56, (192, 128)), (64, (64, 64))]
)  # fmt: skip
def test_full_calls_of_few_keys_take_small_tiles_unless_rows_begin_between_sectors(
    head_dim: int, tile: tuple[int, int]
) -> None:
    few = replace(
        PROBLEM, batch=8, num_heads_q=8, num_heads_kv=8, head_dim=head_dim, head_dim_v=head_dim, seqlen_q=1024,
        seqlen_k=1024, causal=None,
    )  # fmt: skip
    config = choice.default(few, H200)
    assert config is not None
    assert (config.block_m, config.block_n) == tile


@pytest.mark.parametrize(
    ("change", "tile", "splits"),
    [
        # Tiles of 128 rows: 16, 64, 80 and 92 for 132 SMs.
        ({"num_heads_q": 4, "num_heads_kv": 1}, (128, 128, 3, 1), 8),
        ({"num_heads_q": 8, "num_heads_kv": 1, "seqlen_q": 1024}, (128, 128, 3, 1), 2),
        ({"num_heads_q": 5, "num_heads_kv": 1, "seqlen_q": 2048, "causal": Causal()}, (128, 128, 3, 1), 3),
        ({"batch": 23, "num_heads_q": 4, "num_heads_kv": 4, "seqlen_q": 88}, (128, 128, 3, 1), 4),
        # Tiles of 64 rows, which hold all rows of a sequence.
        ({"batch": 4, "num_heads_q": 32, "num_heads_kv": 4, "seqlen_q": 8, "causal": Causal()}, (64, 128, 2, 1), 8),
        ({"head_dim": 256, "head_dim_v": 256, "seqlen_q": 512, "num_heads_q": 8}, (128, 64, 2, 1), 4),
        ({"head_dim": 64, "head_dim_v": 64, "num_heads_q": 4, "seqlen_q": 512}, (128, 128, 3, 1), 8),
        ({"head_dim": 160, "head_dim_v": 160, "seqlen_q": 512, "num_heads_q": 8}, (128, 128, 2, 1), 4),
        ({"packed": True, "total_q": 512, "total_k": 16384, "num_heads_q": 4}, (128, 128, 3, 1), 6),  # 5 tiles a head
        ({"page_size": 16, "num_heads_q": 4, "seqlen_q": 512}, (128, 128, 3, 1), 8),
        ({"seqlen_k": 2560, "num_heads_q": 4}, (128, 128, 3, 1), 5),  # 512 keys a split
        # Blocks for all SMs, few keys, and calls whose keys are not split.
        ({"num_heads_q": 32, "seqlen_q": 512}, None, 1),
        ({"num_heads_q": 32, "seqlen_q": 640}, None, 1),
        ({"seqlen_k": 1023, "num_heads_q": 4}, None, 1),
        ({"seqlen_q": 2048, "seqlen_k": 2048, "num_heads_q": 4, "causal": Causal()}, None, 1),
        ({"num_heads_q": 4, "window_size": (8000, 0)}, None, 1),
        ({"num_heads_q": 4, "causal": Causal("top_left")}, None, 1),
        ({"num_heads_q": 4, "mask_shape": (1, 1, 512, 16384)}, None, 1),
        ({"num_heads_q": 4, "bias_shape": (1, 1, 512, 16384)}, None, 1),
        ({"num_heads_q": 4, "dropout_p": 0.1}, None, 1),
        ({"num_heads_q": 4, "batch_invariant": True}, None, 1),
        ({"num_heads_q": 4, "dtype": "float32", "precision": "tf32"}, None, 1),
        ({"num_heads_q": 4, "page_size": 16, "dtype_kv": "int8", "kv_factors": "head"}, (128, 64, 3, 1), 8),
        (
            {"num_heads_q": 4, "page_size": 16, "dtype_kv": "int8", "kv_factors": "head", "window_size": (4000, 0)},
            None,
            1,
        ),
    ],
    ids=str,
)
def test_how_many_blocks_split_the_keys(
    change: dict[str, Any], tile: tuple[int, int, int, int] | None, splits: int
) -> None:
    call: dict[str, Any] = {"batch": 1, "seqlen_q": 512, "seqlen_k": 16384, "head_dim": 128, "head_dim_v": 128} | change
    problem = replace(LARGE, **({"num_heads_kv": call.get("num_heads_q", 4)} | call))
    config = flash_fwd.default(problem, H200)
    assert config is not None and config.num_splits == splits
    if tile is not None:
        assert (config.block_m, config.block_n, config.num_stages, config.blocks_per_sm) == tile
        assert flash_fwd.smem_bytes(problem, H200, config) + 1024 <= 228 * 1024 // config.blocks_per_sm
        said = choice.notes(problem, H200, config)
        assert any(f"num_splits = {splits}: " in line and "us with num_splits = 1" in line for line in said)
        other = choice.notes(problem, H200, replace(config, num_splits=splits + 1))
        assert any("as given" in line for line in other)
    cost = flash_fwd.cost(problem, H200, config)
    assert cost.launches == (2 if splits > 1 else cost.launches)


def test_the_cost_of_split_keys_counts_their_merge() -> None:
    problem = replace(LARGE, batch=1, seqlen_q=512, seqlen_k=16384, num_heads_q=4, num_heads_kv=4)
    whole, split = (flash_fwd.cost(problem, H200, flash_fwd.Config(128, 128, 2, num_splits=n)) for n in (1, 8))
    partial = 8 * 512 * 4 * (LARGE.head_dim_v + 2) * 4
    q = 7 * 512 * 4 * LARGE.head_dim * 2  # each split loads it
    attend, merge = split.parts
    assert split.workspace_bytes == attend.write_bytes == merge.read_bytes == partial
    assert split.write_bytes == whole.write_bytes + partial and split.read_bytes == whole.read_bytes + q + partial
    assert (whole.blocks, attend.blocks) == (16, 128) and attend.longest * 8 == whole.longest
