"""hopper/flash_fwd with the keys of a tile divided over blocks: gates over features, tiles and pages, equal bits, new
lengths, graphs, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance import cases, harness, paged
from tests.conformance.cases import PLAIN, Case
from tests.conformance.gates import forward_references, judge_forward
from tests.conformance.harness import DEVICE, bits
from tests.conformance.paged import PagedCase
from tests.conformance.test_paged import OF_HOPPER
from tests.conformance.test_paged import check as check_pages
from tests.kernels.hopper import gluon_on_cpu
from tests.marks import needs_triton
from warpwave import Causal, UnsupportedProblem, attention, dispatch
from warpwave.gpu import Gpu
from warpwave.kernels.hopper.flash_fwd import Config, default, specify
from warpwave.kernels.hopper.flash_fwd import config as flash_fwd_config
from warpwave.problem import AttentionProblem

CHUNK = replace(PLAIN, dtype="bfloat16", dims=(128, 128), lengths=(70, 3000), heads=(8, 2), batch=3)
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": "bottom_right"},
    "top-left": {"causal": "top_left", "lengths": (700, 650)},
    "window": {"window": (1000, 0)},
    "both sides": {"window": (170, 45)},
    "ALiBi": {"alibi": "heads", "causal": "bottom_right"},
    "softcap": {"softcap": 20.0, "causal": "bottom_right"},
    "sinks": {"sinks": True, "window": (220, 0)},
    "packed": {"packed": True, "batch": 6, "lengths": (400, 1500), "causal": "bottom_right"},
    "packed window": {"packed": True, "batch": 6, "lengths": (400, 1500), "window": (90, 3), "sinks": True},
    "one key": {"lengths": (5, 1)},
}
TILES = (
    Config(128, 128, 2, heads=4, num_splits=5),
    Config(192, 64, 4, num_splits=2),
    Config(64, 64, 3, 2, heads=2, num_splits=9),
    Config(64, 128, 2, num_splits=30),
)
PAGED = ((300, 300), (129, 1000), (1, 77), (0, 40), (200, 200), (64, 900))


def check(case: Case, config: Config, data: Any = "normal") -> None:
    call = cases.build(case, data, DEVICE)
    out, lse = harness.run(OF_HOPPER, call, config)
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), out, lse)
    assert verdict.passed, f"{config} on {case}: {verdict}"


@pytest.mark.gpu
@pytest.mark.parametrize("config", TILES, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str, config: Config) -> None:
    case = replace(CHUNK, **FEATURES[feature])
    check(case, replace(config, heads=1) if case.alibi else config, "sharp")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("dims", "config"),
    [
        ((8, 8), Config(64, 64, 3, 3, num_splits=3)),
        ((64, 64), Config(192, 128, 3, num_splits=3)),
        ((80, 48), Config(128, 128, 2, num_splits=4)),
        ((112, 112), Config(192, 64, 3, narrowest_v=64, num_splits=2)),
        ((192, 128), Config(128, 128, 2, heads=2, num_splits=3)),
        ((256, 256), Config(128, 64, 2, heads=4, num_splits=7)),
        ((64, 384), Config(128, 32, 2, num_splits=2)),
    ],
    ids=str,
)
def test_head_sizes(dims: tuple[int, int], config: Config, dtype: str) -> None:
    for more in ({"causal": "bottom_right"}, {"packed": True, "window": (90, 0), "softcap": 30.0}):
        check(replace(CHUNK, dims=dims, dtype=dtype, **more), config)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [2, 3, 16])
@pytest.mark.parametrize("cache", ["", "float8_e4m3fn:head", "int8:token"])
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("packed", [False, True])
def test_pages(packed: bool, page_size: int, cache: str, splits: int) -> None:
    lengths = PAGED if packed else ((100, 700), (100, 100), (100, 330))
    case = PagedCase(
        page_size, "bfloat16", (128, 128), (8, 2), lengths, packed, "bottom_right", max_seqlen_k=1024, cache=cache
    )
    check_pages(OF_HOPPER, case, "normal", config=Config(128, 64, 2, heads=2, num_splits=splits))


CACHES_OF_8_BITS = ("float8_e4m3fn:head", "int8:head", "int8:token")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("queries", [5, 16, 70])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("cache", CACHES_OF_8_BITS)
def test_default_splits_of_8_bits(cache: str, page_size: int, queries: int, head_dim: int) -> None:
    lengths = ((queries, 4000), (queries, 0), (queries, 2777))
    case = PagedCase(
        page_size, "bfloat16", (head_dim, head_dim), (8, 2), lengths, False, "bottom_right", max_seqlen_k=4096,
        cache=cache,
    )  # fmt: skip
    call = paged.build(case, "normal", DEVICE)
    config = default(call.problem, harness.GPU)
    assert harness.GPU.capability != 90 or (config is not None and config.num_splits > 1)
    check_pages(OF_HOPPER, case, "sharp")


H200 = replace(Gpu.for_arch("sm_90"), num_sms=132)
CACHED = AttentionProblem(
    batch=4, seqlen_q=16, seqlen_k=8000, num_heads_q=16, num_heads_kv=4, head_dim=128, head_dim_v=128, dtype="bfloat16",
    softmax_scale=0.1, causal=Causal("bottom_right"), page_size=64, dtype_kv="int8", kv_factors="token",
)  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", [("float8_e4m3fn", "head"), ("int8", "head"), ("int8", "token")], ids=str)
def test_auto_splits_keys_of_8_bits(kind: tuple[str, str], head_dim: int) -> None:
    """Several queries of grouped heads; decode, windows and wide heads stay with split_kv."""
    problem = replace(CACHED, dtype_kv=kind[0], kv_factors=kind[1], head_dim=head_dim, head_dim_v=head_dim)
    for seqlen_q in (5, 16):
        choice = dispatch.choose(replace(problem, seqlen_q=seqlen_q), H200)
        assert choice.kernel.NAME == OF_HOPPER and choice.config.num_splits > 1
        assert flash_fwd_config.runs(problem, H200, choice.config)
    others: tuple[dict[str, Any], ...] = (
        {"seqlen_q": 1}, {"head_dim": 256, "head_dim_v": 256}, {"window_size": (100, 0)}, {"seqlen_k": 400},
    )  # fmt: skip
    for change in others:
        assert dispatch.choose(replace(problem, **change), H200).kernel.NAME == "split_kv"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (64, 64, 3, 1, 8)),
        ({"seqlen_k": 2300}, (64, 64, 3, 1, 4)),  # of at least 512 keys
        ({"seqlen_q": 70}, (128, 64, 3, 1, 5)),
        ({"head_dim": 64, "head_dim_v": 64}, (64, 64, 3, 2, 15)),
        ({"head_dim": 64, "head_dim_v": 64, "seqlen_q": 70}, (128, 128, 2, 1, 5)),
        # As fast without splits if bytes alone counted.
        (
            {"head_dim": 64, "head_dim_v": 64, "batch": 3, "num_heads_q": 32, "num_heads_kv": 8, "seqlen_k": 2081},
            (64, 64, 3, 2, 4),
        ),
    ],
)
def test_tiles_and_splits_of_8_bits(change: dict[str, Any], expected: tuple[int, ...]) -> None:
    config = default(replace(CACHED, **change), H200)
    assert config is not None
    tile = config.block_m, config.block_n, config.num_stages, config.blocks_per_sm
    assert (*tile, config.num_splits) == expected


def test_few_tiles_of_8_bits_whose_keys_are_not_split_stay_with_split_kv() -> None:
    narrow = replace(CACHED, batch=2, seqlen_q=128, seqlen_k=1024, num_heads_kv=1, head_dim=64, head_dim_v=64)
    for problem, name in ((narrow, "split_kv"), (replace(narrow, dtype_kv=None, kv_factors=None, batch=8), OF_HOPPER)):
        choice = dispatch.choose(problem, H200)
        assert choice.kernel.NAME == name and default(problem, H200).num_splits == 1  # type: ignore[union-attr]


@pytest.mark.gpu
def test_new_lengths() -> None:
    """Calls of one class with other lengths, numbers of splits and batches, each twice, with the same bits."""
    for packed in (False, True):
        for n in (0, 1, 7, 100, 333):
            case = replace(CHUNK, causal="bottom_right", lengths=(70 + n, 2000 + 5 * n), batch=1 + n % 3, packed=packed)
            config = Config(128, 128, 2, heads=4, num_splits=2 + n % 9)
            check(case, config)
            call = cases.build(case, "normal", DEVICE)
            assert bits(*harness.run(OF_HOPPER, call, config)) == bits(*harness.run(OF_HOPPER, call, config))


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [0, 16])
def test_repeats_are_bit_equal(page_size: int) -> None:
    config = Config(128, 128, 2, heads=4, num_splits=6)
    if page_size:
        of_pages = PagedCase(page_size, "bfloat16", (128, 128), (8, 2), PAGED, True, "bottom_right", max_seqlen_k=1024)
        call = paged.build(of_pages, "normal", DEVICE)
        run: Any = lambda: paged.run(OF_HOPPER, call, config=config)  # noqa: E731
    else:
        dense = cases.build(replace(CHUNK, causal="bottom_right"), "normal", DEVICE)
        run = lambda: harness.run(OF_HOPPER, dense, config)  # noqa: E731
    out, lse = run()
    for _ in range(1500):
        again, lse_again = run()
        assert torch.equal(again, out) and torch.equal(lse_again, lse)


@pytest.mark.gpu
def test_replays_of_a_graph() -> None:
    """Partial results of a captured call are the graph's own: calls between replays change nothing."""
    g = torch.Generator(DEVICE).manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 128, generator=g, device=DEVICE).half() for n, h in ((64, 8), (4000, 2), (4000, 2)))
    config = Config(128, 128, 2, heads=4, num_splits=4)
    run = lambda *a: attention(*a, kernel=OF_HOPPER, config=config)  # noqa: E731
    expected, other = run(q, k, v), run(q + 1, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(q, k, v)
    for _ in range(200):
        out.zero_()
        graph.replay()
        assert torch.equal(run(q + 1, k, v), other)
        assert torch.equal(out, expected)


@needs_triton
@pytest.mark.parametrize(
    "change",
    [{"mask": "full"}, {"bias": "heads"}, {"dtype": "float32:tf32"}, {"dropout": 0.1}, {"dtype": "int8:int8:head"}],
    ids=str,
)
def test_calls_whose_keys_are_not_split(change: dict[str, Any]) -> None:
    call = cases.build(replace(CHUNK, lengths=(70, 300), **change), "normal", torch.device("cpu"))
    out, lse = gluon_on_cpu.unwritten(call.problem, call.operands.q)
    config = Config(128, 64, 2, num_splits=2)
    with pytest.raises(UnsupportedProblem, match="num_splits is 2"):
        specify(call.problem, Gpu.for_arch("sm_90"), call.operands, out, lse, config)


@pytest.mark.parametrize("splits", [0, 65])
def test_numbers_of_splits_are_checked(splits: int) -> None:
    with pytest.raises(ValueError, match="num_splits is"):
        Config(128, 64, 2, num_splits=splits)
