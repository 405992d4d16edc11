"""hopper/flash_fwd on paged caches: gates over pages, tiles and features, bit-equal pairs, and where `auto` uses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance import paged
from tests.conformance.harness import DEVICE, bits
from tests.conformance.paged import PagedCase
from tests.conformance.test_paged import OF_HOPPER, check
from tests.marks import needs_triton
from warpwave import (
    CacheLayer,
    InvalidInput,
    UnsupportedProblem,
    attention_varlen,
    attention_with_kv_cache,
    cached_calls,
    dispatch,
)
from warpwave.cached_calls import operands_without_memory
from warpwave.gpu import Gpu
from warpwave.kernels.hopper.flash_fwd import Config, configs, specify
from warpwave.kernels.hopper.flash_fwd.config import runs
from warpwave.operands import CachedOperands
from warpwave.problem import AttentionProblem, Causal
from warpwave.runtime.launch import Launch

H200 = Gpu.for_arch("sm_90")
CHUNKS = ((300, 300), (129, 1000), (1, 77), (0, 40), (200, 200), (64, 900))
CACHES = ("float8_e4m3fn:head", "int8:head", "float8_e4m3fn:token", "int8:token")
ALIKE = ((200, 700), (200, 200), (200, 330))
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": "bottom_right"},
    "top-left": {"causal": "top_left"},
    "window": {"window": (100, 0)},
    "both sides": {"window": (70, 45)},
    "causal in a window": {"causal": "bottom_right", "window": (333, -1)},
    "ALiBi": {"alibi": True, "causal": "bottom_right"},
    "softcap": {"softcap": 20.0, "causal": "bottom_right"},
    "sinks": {"sinks": True, "window": (120, 0)},
}


def problem(**more: Any) -> AttentionProblem:
    said: dict[str, Any] = {
        "batch": 4, "seqlen_q": 1024, "seqlen_k": 4096, "num_heads_q": 32, "num_heads_kv": 8, "head_dim": 128,
        "head_dim_v": 128, "dtype": "bfloat16", "softmax_scale": 0.1, "causal": Causal("bottom_right"), "page_size": 16,
    }  # fmt: skip
    return AttentionProblem(**said | more)


each_page_size = pytest.mark.parametrize("page_size", [16, 32, 64, 128, 512])


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
@each_page_size
def test_features(page_size: int, feature: str, packed: bool) -> None:
    case = PagedCase(
        page_size, "bfloat16", (128, 128), (8, 2), CHUNKS if packed else ALIKE, packed, max_seqlen_k=1024,
        **FEATURES[feature],
    )  # fmt: skip
    check(OF_HOPPER, case, "sharp")


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(8, 8), (40, 40), (64, 64), (80, 80), (96, 64), (112, 112), (160, 160), (192, 128),
                                  (256, 256), (256, 64), (64, 256)], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_head_sizes(page_size: int, dtype: str, dims: tuple[int, int]) -> None:
    for more in ({"causal": "bottom_right"}, {"window": (90, 0), "softcap": 30.0}):
        case = PagedCase(page_size, dtype, dims, (6, 2), CHUNKS, True, max_seqlen_k=1024, **more)
        check(OF_HOPPER, case, "normal")


TILES = [(d, config) for d in (64, 128, 256) for config in configs(problem(head_dim=d, head_dim_v=d), H200)]


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "config"), TILES, ids=str)
@pytest.mark.parametrize("page_size", [16, 128])
def test_every_config(page_size: int, head_dim: int, config: Config) -> None:
    dims = (head_dim, head_dim)
    case = PagedCase(page_size, "bfloat16", dims, (8, 2), CHUNKS, True, "bottom_right", (150, 0), max_seqlen_k=1024)
    check(OF_HOPPER, case, "normal", config=replace(config, heads=4 if page_size == 16 else 1))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [Config(64, 64, 2, 2), Config(128, 128, 2), Config(192, 64, 4)], ids=str)
@each_page_size
def test_pages_equal_packed_keys(page_size: int, config: Config) -> None:
    """With the same tiles, bit for bit."""
    lengths = tuple((q, k) for q, k in CHUNKS if q)
    case = PagedCase(page_size, "bfloat16", (128, 128), (8, 2), lengths, True, "bottom_right", max_seqlen_k=1024)
    call = paged.build(case, "sharp", DEVICE)
    ends = torch.tensor([0, *(k for _, k in lengths)], device=DEVICE).cumsum(0).to(torch.int32)
    expected = attention_varlen(
        call.operands.q, torch.cat(call.keys), torch.cat(call.values), cu_seqlens_q=call.operands.cu_seqlens_q,
        cu_seqlens_k=ends, max_seqlen_q=300, max_seqlen_k=1000, causal=True, return_lse=True, kernel=OF_HOPPER,
        config=config,
    )  # fmt: skip
    assert bits(*paged.run(OF_HOPPER, call, config=config)) == bits(*expected)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [(-1, -1), (60, 0)], ids=str)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("cache", ["", *CACHES])
def test_repeats_are_bit_equal(cache: str, page_size: int, window: tuple[int, int]) -> None:
    case = PagedCase(
        page_size, "bfloat16", (128, 128), (8, 2), CHUNKS, True, "bottom_right", window, max_seqlen_k=1024, cache=cache
    )
    call = paged.build(case, "normal", DEVICE)
    first, first_lse = paged.run(OF_HOPPER, call)
    assert first_lse is not None
    for _ in range(2000):
        out, lse = paged.run(OF_HOPPER, call)
        assert torch.equal(out, first) and lse is not None and torch.equal(lse, first_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["", *CACHES])
def test_new_lengths_and_tables(cache: str) -> None:
    """Calls of one class, with other totals, tables and lengths, as a server makes them; an out of the caller's."""
    cases = [
        PagedCase(16, "bfloat16", (64, 64), (8, 2), tuple((q + n, k + 3 * n) for q, k in CHUNKS), True, "bottom_right",
                  max_seqlen_k=1024 + 16 * n, cache=cache)
        for n in (0, 1, 7, 16, 30)
    ]  # fmt: skip
    for case in cases * 2:
        check(OF_HOPPER, case)
        call = paged.build(case, "normal", DEVICE)
        out = torch.full_like(call.operands.q, torch.nan)
        expected, _ = paged.run(OF_HOPPER, call)
        found, _ = paged.run(OF_HOPPER, call, out=out)
        assert found is out and torch.equal(out, expected)


@pytest.mark.gpu
def test_strided_queries_and_pools_of_both() -> None:
    """Queries of a fused projection, and pools of pages that hold keys beside values, as vLLM has them."""
    g = torch.Generator(DEVICE).manual_seed(0)
    q = torch.randn(2, 200, 12, 64, generator=g, device=DEVICE).bfloat16()[:, :, :8]
    both = torch.randn(40, 2, 16, 2, 64, generator=g, device=DEVICE).bfloat16()
    table = torch.randperm(40, generator=g, device=DEVICE).to(torch.int32).view(2, 20)
    used = torch.tensor([320, 250], dtype=torch.int32, device=DEVICE)
    cache = CacheLayer(both[:, 0], both[:, 1], table, used)
    found = attention_with_kv_cache(q, cache, causal=True, kernel=OF_HOPPER)
    expected = attention_with_kv_cache(q, cache, causal=True, kernel="eager")
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    k, v = (pool.transpose(-1, -2).contiguous().transpose(-1, -2) for pool in (cache.k, cache.v))
    odd = CacheLayer(k, v, table, used)
    with pytest.raises(UnsupportedProblem, match="rows of stride 1"):
        attention_with_kv_cache(q, odd, causal=True, kernel=OF_HOPPER)
    torch.testing.assert_close(attention_with_kv_cache(q, odd, causal=True), expected, atol=0.02, rtol=0.02)


@pytest.mark.gpu
def test_pages_past_four_gibibytes() -> None:
    """Byte offsets of pages and of their rows past 2^32."""
    pages = 2**32 // (2 * 256 * 8 * 128) + 40
    pool = torch.zeros(pages, 256, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    table = torch.arange(pages - 4, pages, dtype=torch.int32, device=DEVICE)[None]
    pool[-4:] = torch.randn(4, 256, 8, 128, device=DEVICE).bfloat16()
    q = torch.randn(1, 300, 32, 128, device=DEVICE).bfloat16()
    used = torch.tensor([1000], dtype=torch.int32, device=DEVICE)
    found = attention_with_kv_cache(q, CacheLayer(pool, pool, table, used), causal=True, kernel=OF_HOPPER)
    near = pool[-4:].clone()
    table = torch.arange(4, dtype=torch.int32, device=DEVICE)[None]
    assert torch.equal(
        found, attention_with_kv_cache(q, CacheLayer(near, near, table, used), causal=True, kernel=OF_HOPPER)
    )


# 8-bit caches ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("page_size", [16, 64])
def test_8_bit_features(page_size: int, cache: str, feature: str, packed: bool) -> None:
    case = PagedCase(
        page_size, "bfloat16", (128, 128), (8, 2), CHUNKS if packed else ALIKE, packed, max_seqlen_k=1024,
        cache=cache, **FEATURES[feature],
    )  # fmt: skip
    check(OF_HOPPER, case, "sharp")


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(16, 16), (48, 48), (64, 64), (80, 112), (96, 64), (160, 160), (192, 128), (256, 256),
                                  (256, 64), (64, 256)], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("cache", CACHES)
def test_8_bit_head_sizes(cache: str, dtype: str, dims: tuple[int, int]) -> None:
    for page_size, more in ((16, {"causal": "bottom_right"}), (256, {"window": (90, 0), "softcap": 30.0})):
        case = PagedCase(page_size, dtype, dims, (6, 2), CHUNKS, True, max_seqlen_k=1024, cache=cache, **more)
        check(OF_HOPPER, case, "normal")


NARROW = {"dtype_kv": "float8_e4m3fn", "kv_factors": "head"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "config"),
    [
        *((d, c) for d in (16, 48, 64, 128, 256) for c in configs(problem(head_dim=d, head_dim_v=d, **NARROW), H200)),
        (64, Config(192, 128, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("page_size", [16, 128])
def test_8_bit_every_config(page_size: int, cache: str, head_dim: int, config: Config) -> None:
    described = problem(head_dim=head_dim, head_dim_v=head_dim, **NARROW | {"kv_factors": cache.partition(":")[2]})
    if not runs(described, H200, config):
        pytest.skip("shared memory does not hold factors of tokens too")
    case = PagedCase(
        page_size, "bfloat16", (head_dim, head_dim), (8, 2), CHUNKS, True, "bottom_right", (150, 0), max_seqlen_k=1024,
        cache=cache,
    )  # fmt: skip
    check(OF_HOPPER, case, "normal", config=replace(config, heads=4 if page_size == 16 else 1))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [Config(64, 64, 2), Config(128, 64, 3), Config(192, 64, 3)], ids=str)
@pytest.mark.parametrize("cache", CACHES[:2])
def test_8_bit_pages_equal_pages_of_16_bits(cache: str, config: Config) -> None:
    """With factors of 1 and the same tiles, bit for bit: float16 holds every number."""
    case = PagedCase(16, "float16", (128, 128), (8, 2), CHUNKS, True, "bottom_right", max_seqlen_k=1024, cache=cache)
    call = paged.build(case, "normal", DEVICE)
    o = call.operands
    one = torch.ones(2, device=DEVICE)
    k, v = (x.to(torch.float16) / (32 if x.dtype == torch.int8 else 1) for x in (o.k, o.v))
    scale = one / 32 if o.k.dtype == torch.int8 else one
    expected = paged.run(OF_HOPPER, call._replace(operands=o._replace(k=k, v=v, k_descale=None, v_descale=None)),
                         config=config)  # fmt: skip
    found = paged.run(OF_HOPPER, call._replace(operands=o._replace(k_descale=scale, v_descale=scale)), config=config)
    assert bits(*found) == bits(*expected)


# Choice ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"batch": 8, "seqlen_q": 32}, ""),
        ({"batch": 1, "seqlen_q": 256}, ""),
        ({"batch": 64, "packed": True, "total_q": 8256, "total_k": 64 * 4096}, ""),
        ({"batch": 64, "seqlen_q": 8}, ""),
        ({"batch": 1, "seqlen_q": 128}, ""),  # 64 tiles, 1,985 keys for each of 132 SMs
        ({"batch": 1, "seqlen_q": 128, "seqlen_k": 16384, "num_heads_q": 8}, ""),  # the keys are split
        ({"batch": 1, "seqlen_q": 32, "seqlen_k": 16384}, ""),
        ({"batch": 8, "seqlen_q": 128, "seqlen_k": 128}, ""),
        ({"batch": 64, "seqlen_q": 1}, "64 rows, 4 a sequence"),
        ({"batch": 64, "packed": True, "total_q": 320, "total_k": 64 * 4096}, "64 rows, 20 a sequence"),
        ({"batch": 64, "seqlen_q": 8, "num_heads_q": 24}, "64 rows, 8 a sequence"),  # heads do not share tiles
        ({"batch": 1, "seqlen_q": 128, "num_heads_q": 8}, "16 tiles of 64 rows"),
        ({"batch": 1, "seqlen_q": 128, "window_size": (4000, 0)}, "64 tiles of 64 rows"),  # its keys are not split
        ({"batch": 1, "seqlen_q": 128, "dtype_kv": "int8", "kv_factors": "head"}, ""),  # the keys are split
        (
            {"batch": 1, "seqlen_q": 128, "dtype_kv": "int8", "kv_factors": "head", "window_size": (4000, 0)},
            "64 tiles of 64 rows",
        ),
        ({"batch": 8, "seqlen_q": 64, "seqlen_k": 64}, "few keys"),
        ({"batch": 1, "seqlen_q": 256, "seqlen_k": 256}, "few keys"),
    ],
)
def test_prefill_is_for_hopper_and_decode_for_split_kv(change: dict[str, Any], reason: str) -> None:
    found = dispatch.outrun(dispatch.hopper_flash_fwd, problem(**change), H200)
    assert any(reason in why for why in found) if reason else not found
    assert dispatch.choose(problem(**change), H200).kernel.NAME == ("split_kv" if reason else OF_HOPPER)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"page_size": 8}, "pages of 8"),
        ({"page_size": 48}, "power of two"),
        ({"dtype": "float32"}, "float32"),
        ({"batch_invariant": True}, "do not depend on the batch"),
        ({"head_dim": 320, "head_dim_v": 320}, "above 256"),
        ({"head_dim": 100, "head_dim_v": 100}, "multiple of 8"),
    ],
)
def test_refusals(change: dict[str, Any], reason: str) -> None:
    assert any(reason in why for why in dispatch.why_not(dispatch.hopper_flash_fwd, problem(**change), H200))


@pytest.mark.parametrize("kind", ["head", "token"])
def test_8_bit_prefill_is_for_hopper(kind: str) -> None:
    assert dispatch.choose(problem(dtype_kv="int8", kv_factors=kind), H200).kernel.NAME == OF_HOPPER


def test_cost_counts_the_widener() -> None:
    """Tiles of keys have half the bytes, and blocks convert them; two blocks of an SM do so side by side."""
    wide, narrow = (dispatch.hopper_flash_fwd.cost(problem(**more), H200, Config(64, 64, 2)) for more in ({}, NARROW))
    keys = wide.steps * 64 * 2 * 128
    assert wide.read_bytes - narrow.read_bytes == keys
    assert wide.widener_us == 0 < narrow.widener_us
    shared = dispatch.hopper_flash_fwd.cost(problem(**NARROW), H200, Config(64, 64, 2, 2))
    assert narrow.widener_us / 2 < shared.widener_us < narrow.widener_us


@pytest.mark.parametrize("serving", [{"num_splits": 3}, {"shared_prefix": 64}])
def test_splits_and_prefixes_are_for_split_kv(serving: dict[str, Any]) -> None:
    choice = cached_calls.choose(problem(), H200, cached_calls.Serving(**serving))
    assert choice.kernel.NAME == "split_kv"
    if "num_splits" in serving:
        assert choice.config.num_splits == 3


def test_a_named_kernel_takes_its_own_number_of_splits() -> None:
    choice = cached_calls.choose(problem(), H200, cached_calls.Serving(num_splits=3), OF_HOPPER)
    assert choice.kernel.NAME == OF_HOPPER and choice.config.num_splits == 3
    with pytest.raises(InvalidInput, match=r"hopper/flash_fwd.*must be 1 to 64"):
        cached_calls.choose(problem(), H200, cached_calls.Serving(num_splits=65), OF_HOPPER)


def test_pools_that_tma_cannot_read_are_for_split_kv() -> None:
    """auto takes split_kv, and a call that names the kernel is told why not."""
    pool = torch.zeros(8, 16, 8, 128, dtype=torch.bfloat16)
    table, used = torch.zeros(4, 256, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    q = torch.zeros(4, 1024, 32, 128, dtype=torch.bfloat16)
    straight = CachedOperands(q, pool, pool, page_table=table, seqused_k=used)
    crossed = pool.transpose(2, 3).contiguous().transpose(2, 3)
    serving = cached_calls.Serving()
    assert cached_calls.choose(problem(), H200, serving, operands=straight).kernel.NAME == OF_HOPPER
    odd = straight._replace(v=crossed)
    assert cached_calls.choose(problem(), H200, serving, operands=odd).kernel.NAME == "split_kv"
    with pytest.raises(UnsupportedProblem, match="v has strides"):
        cached_calls.choose(problem(), H200, serving, OF_HOPPER, operands=odd)


@needs_triton
def test_what_is_compiled_without_a_gpu_is_what_runs() -> None:
    """Queries that are not packed are processed as packed ones, by one compiled kernel."""
    calls = problem(), problem(packed=True, total_q=4096, total_k=4 * 4096)
    specs = []
    for call in calls:
        operands = operands_without_memory(call)
        out = torch.empty_like(operands.q)
        specs.append(specify(call, H200, operands, out, None, Config(128, 128, 2)))
    dense, packed = (spec.constants for spec in specs if isinstance(spec, Launch))
    assert dense == packed and dense["IS_VARLEN"]
