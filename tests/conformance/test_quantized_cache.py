"""Calls on caches of 8-bit numbers, held to the gates of the queries' 16 bits: the cache's numbers are exact inputs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance import paged
from tests.conformance.gates import forward_references, judge_forward
from tests.conformance.harness import DEVICE, GPU, ON_GPU, bits
from tests.conformance.paged import PagedCase
from tests.conformance.test_paged import (
    FEATURES,
    MASKS,
    MIXED,
    OF_HOPPER,
    PAGE_SIZES,
    SEVERAL,
    SPLITS,
    check,
    skip_unclaimed,
)
from warpwave import CacheLayer, UnsupportedProblem, attention_with_kv_cache, dispatch
from warpwave.gpu import Gpu
from warpwave.kernels import reasons, split_kv
from warpwave.problem import AttentionProblem

READERS = ("split_kv", "eager", pytest.param(OF_HOPPER, marks=pytest.mark.gpu))
CACHES = tuple(f"{dtype}:{kind}" for dtype in ("float8_e4m3fn", "int8") for kind in ("head", "token"))
REFUSED = reasons.of_float8(GPU)
each_reader = pytest.mark.parametrize("reader", READERS)
CACHE_PARAMS = [
    pytest.param(c, marks=pytest.mark.skipif(bool(REFUSED) and "float8" in c, reason=str(REFUSED))) for c in CACHES
]
each_cache = pytest.mark.parametrize("cache", CACHE_PARAMS)


def sampled(items: Any, every: int) -> list[Any]:
    """All items on a GPU; in the interpreter one of so many, the others in the full matrix."""
    every = 1 if ON_GPU else every
    return [pytest.param(item, marks=[pytest.mark.full] if i % every else []) for i, item in enumerate(items)]


def judge(reader: str, call: paged.PagedCall) -> None:
    skip_unclaimed(reader, call)
    operands: Any = call.operands
    verdict = judge_forward(call.problem, forward_references(call.problem, operands), *paged.run(reader, call))
    assert verdict.passed, str(verdict)


@each_reader
@each_cache
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decode(dtype: str, cache: str, reader: str) -> None:
    check(reader, PagedCase(16, dtype, lengths=SEVERAL, causal="bottom_right", cache=cache), "sharp")


@each_cache
@pytest.mark.parametrize("splits", sampled(SPLITS, 3))
def test_splits(splits: str, cache: str) -> None:
    """Also pieces, and configs by tensor maps, which are loaded by pointers here."""
    case = PagedCase(16, lengths=SEVERAL, causal="bottom_right", sinks=True, cache=cache)
    check("split_kv", case, "sharp", config=SPLITS[splits])


@pytest.mark.parametrize("cache", CACHE_PARAMS[::3])
@pytest.mark.parametrize("page_size", sampled(PAGE_SIZES, 2))
def test_page_sizes(page_size: int, cache: str) -> None:
    check("split_kv", PagedCase(page_size, "bfloat16", cache=cache), config=SPLITS["three"])


@each_reader
@pytest.mark.parametrize("cache", CACHE_PARAMS[1:3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", sampled(MASKS, 2))
def test_masks(mask: str, packed: bool, cache: str, reader: str) -> None:
    lengths = MIXED if packed else SEVERAL
    check(reader, PagedCase(16, "bfloat16", lengths=lengths, packed=packed, cache=cache, **MASKS[mask]), "sharp")


@each_reader
@pytest.mark.parametrize("cache", CACHE_PARAMS[1:3])
@pytest.mark.parametrize("feature", sampled([name for name in FEATURES if "float32" not in name], 2))
def test_features(feature: str, cache: str, reader: str) -> None:
    check(reader, replace(PagedCase(), cache=cache, **FEATURES[feature]))


@each_reader
@pytest.mark.parametrize("cache", CACHE_PARAMS[1::2])
def test_tokens_whose_factors_differ_by_powers_of_ten(cache: str, reader: str) -> None:
    """Small ones would be lost among 16-bit probabilities if these were multiplied by a factor first."""
    case = PagedCase(16, lengths=SEVERAL, cache=cache)
    call = paged.build(case, "normal", DEVICE)
    scale = 10.0 ** -(torch.arange(call.operands.v_descale.shape[1], device=DEVICE) % 4 + 3)
    o = call.operands._replace(v_descale=call.operands.v_descale * scale[:, None])
    judge(reader, call._replace(operands=o))


@each_reader
@each_cache
def test_a_key_far_above_all_others_leaves_their_values(cache: str, reader: str) -> None:
    """As attention sinks do: its probability is 1 and its value 0, and those of the others are 2^-28."""
    dtype, kind = cache.split(":")
    n, shape = 200, (16, 16, 2, 32)
    k, v = (torch.zeros(shape, device=DEVICE) for _ in range(2))
    k[0, 0], v[:] = 4, 1
    v[0, 0] = 0
    factor = torch.ones(shape[:3] if kind == "token" else shape[2:3], device=DEVICE)
    table = torch.arange(16, dtype=torch.int32, device=DEVICE)[None]
    used = torch.tensor([n], dtype=torch.int32, device=DEVICE)
    k, v = (x.to(getattr(torch, dtype)) for x in (k, v))
    layer = CacheLayer(k, v, table, used, factor, factor)
    q = torch.ones(1, 1, 2, 32, dtype=torch.bfloat16, device=DEVICE)
    out = attention_with_kv_cache(q, layer, kernel=reader, softmax_scale=28 * math.log(2) / 128)
    torch.testing.assert_close(out.float(), torch.full_like(out, (n - 1) * 2.0**-28).float(), rtol=2e-2, atol=0)


@each_reader
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_one_factor_for_all_heads(dtype: str, reader: str) -> None:
    """The shapes of vLLM's factors; equal to the bit to the same factor for each head."""
    call = paged.build(PagedCase(16, lengths=SEVERAL, cache=f"{dtype}:head"), "normal", DEVICE)
    found = []
    for shape in ((), (1,), (2,)):
        factors = {
            name: torch.full(shape, value, device=DEVICE) for name, value in (("k_descale", 0.01), ("v_descale", 0.2))
        }
        found.append(bits(*paged.run(reader, call._replace(operands=call.operands._replace(**factors)))))
    assert found[0] == found[1] == found[2]


@each_reader
@each_cache
def test_layouts_are_equal_to_the_bit(cache: str, reader: str) -> None:
    """Pools and factors are read by their strides."""
    call = paged.build(PagedCase(16, lengths=SEVERAL, cache=cache), "normal", DEVICE)
    skip_unclaimed(reader, call)
    expected = bits(*paged.run(reader, call))
    o = call.operands
    strided = {
        name: getattr(o, name).transpose(0, -1).contiguous().transpose(0, -1) for name in ("k_descale", "v_descale")
    }
    strided |= {name: getattr(o, name).transpose(1, 2).contiguous().transpose(1, 2) for name in ("k", "v")}
    assert bits(*paged.run(reader, call._replace(operands=o._replace(**strided)))) == expected


@each_cache
def test_a_shared_prefix(cache: str) -> None:
    """Read once for all sequences, and merged with the rest of each."""
    case = PagedCase(16, lengths=((2, 90), (2, 70)), causal="bottom_right", cache=cache)
    call = paged.build(case, "normal", DEVICE)
    o = call.operands
    first, second = o.rows.tolist()
    o.page_table[second, :2] = o.page_table[first, :2]
    judge("split_kv", call)
    expected, _ = paged.run("eager", call)
    out, _ = paged.run("split_kv", call, shared_prefix=32)
    assert (out.double() - expected.double()).norm() < 2e-3 * expected.double().norm()


@each_cache
def test_results_do_not_depend_on_the_batch(cache: str) -> None:
    case = PagedCase(16, lengths=SEVERAL, causal="bottom_right", cache=cache)
    call = paged.build(case, "normal", DEVICE)
    out, lse = paged.run("split_kv", call, batch_invariant=True)
    for b in range(len(SEVERAL)):
        o = call.operands
        alone = call._replace(operands=o._replace(q=o.q[b : b + 1], rows=o.rows[b : b + 1]))
        assert lse is not None
        assert bits(*paged.run("split_kv", alone, batch_invariant=True)) == bits(out[b : b + 1], lse[b : b + 1])


def test_wide_heads_are_left_to_eager() -> None:
    call = paged.build(PagedCase(16, dims=(320, 320), heads=(2, 1), cache="int8:token"), "normal", DEVICE)
    with pytest.raises(UnsupportedProblem, match="such caches are read by hopper/flash_fwd, split_kv, eager"):
        paged.run("large_head_dim", call)
    assert dispatch.choose(call.problem, GPU).kernel.NAME == "eager"
    judge("eager", call)


@pytest.mark.gpu
@each_cache
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_long_caches(page_size: int, dims: tuple[int, int], dtype: str, cache: str) -> None:
    lengths = ((1, 8191), (1, 1), (1, 33_000), (1, 512))
    case = PagedCase(page_size, dtype, dims, (8, 2), lengths, causal="bottom_right", max_seqlen_k=33_024, cache=cache)
    check("split_kv", case, "sharp")


@pytest.mark.gpu
@each_cache
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("reader", ["split_kv", OF_HOPPER])
def test_chunks_beside_decode(reader: str, page_size: int, cache: str) -> None:
    """split_kv has tiles of 64 rows here, whose operands Hopper's matrix unit reads from shared memory."""
    lengths = ((512, 4096), (1, 8192), (1, 1024), (300, 300), (0, 5), (1, 3000))
    case = PagedCase(
        page_size, "bfloat16", (128, 128), (32, 8), lengths, True, "bottom_right", max_seqlen_k=8192, cache=cache
    )
    check(reader, case, "sharp")


def test_split_kv_has_no_tensor_maps_for_8_bits() -> None:
    """Neither by the portable kernel nor by the launch with roles: both are for pools of 16 bits."""
    problem = AttentionProblem(
        batch=16, seqlen_q=1, seqlen_k=4096, num_heads_q=32, num_heads_kv=8, head_dim=128, head_dim_v=128,
        dtype="bfloat16", softmax_scale=0.1, page_size=64, dtype_kv="int8", kv_factors="token",
    )  # fmt: skip
    gpu = Gpu.for_arch("sm_90")
    wide = split_kv.default(replace(problem, dtype_kv=None, kv_factors=None), gpu)
    found = split_kv.default(problem, gpu)
    assert wide is not None and wide.by_map and found is not None and not (found.by_map or found.roles)
