"""What `PagedKVCache` refuses by name before anything changes, and which numbers it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.test_kv_cache import DEVICE, SIZES, check_books, make, state, tokens
from warpwave import CacheLayer, InvalidInput, InvalidType, Rotary, attention_with_kv_cache, quantize


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (InvalidInput, "row 3 holds no sequence; rows that do are \\[0\\]", lambda c: c.free(3)),
        (InvalidInput, "row 0 is named 2 times", lambda c: c.extend([0, 0])),
        (InvalidType, "a row is 'a'", lambda c: c.free(["a"])),
        (InvalidInput, "counts has 2 numbers for 1 rows", lambda c: c.extend([0], [1, 2])),
        (InvalidInput, "would grow by -1 tokens", lambda c: c.extend([0], -1)),
        (InvalidInput, "has 0 tokens to share", lambda c: c.fork(0, 1)),
        (InvalidInput, "all 1 rows", lambda c: c.add()),
        (InvalidType, "k_new is torch.float16", lambda c: c.append([0], tokens(1, 1, 2, 8).half(), tokens(1, 1, 2, 8))),
        (InvalidInput, "v_new has shape", lambda c: c.append([0], tokens(1, 1, 2, 8), tokens(1, 1, 2, 9))),
        (InvalidInput, "rows has shape", lambda c: c.append([0], tokens(2, 1, 2, 8), tokens(2, 1, 2, 8))),
        (InvalidInput, "v_new has shape", lambda c: c.append([0], tokens(1, 2, 2, 8), tokens(1, 1, 2, 8))),
        (InvalidType, "k_new is a list", lambda c: c.append([0], [1], tokens(1, 1, 2, 8))),
        (InvalidType, "length is 0.0; it must be an integer", lambda c: c.fork(0, 0.0)),
        (InvalidType, "length is True", lambda c: c.truncate(0, True)),
        (InvalidType, "a row is True", lambda c: c.fork(True)),
        (InvalidType, "a row is False", lambda c: c.index([False])),
        (InvalidType, "a row is a Tensor", lambda c: c.free(torch.tensor([0]))),
        (InvalidType, "rows is None; it must be a sequence", lambda c: c.extend(None)),
        (InvalidType, r"counts\[0\] is 1.5; it must be an integer", lambda c: c.extend([0], [1.5])),
        (InvalidType, "counts is 1.5", lambda c: c.extend([0], 1.5)),
        (InvalidType, "counts is True", lambda c: c.extend([0], True)),
        (InvalidType, "window_left is 2.0", lambda c: c.evict(0, 2.0)),
        (InvalidType, "max_truncate is '1'", lambda c: c.evict(0, 2, "1")),
        (InvalidType, "rotary is a tuple", lambda c: c.append(
            [0], tokens(1, 1, 2, 8), tokens(1, 1, 2, 8), rotary=(1, 2))),
        (InvalidInput, "counts sums to 2; it must sum to 3", lambda c: c.append(
            [0], tokens(3, 2, 8), tokens(3, 2, 8), counts=[2])),
        (InvalidInput, r"counts\[0\] is -3; it must be at least 0", lambda c: c.append(
            [0], tokens(3, 2, 8), tokens(3, 2, 8), counts=[-3])),
        (InvalidInput, r"k_new has shape \(1, 3, 2, 8\), 4 axes; it must have 3", lambda c: c.append(
            [0], tokens(1, 3, 2, 8), tokens(1, 3, 2, 8), counts=[3])),
        (InvalidInput, "cu_seqlens was given without counts", lambda c: c.append(
            [0], tokens(3, 2, 8), tokens(3, 2, 8), cu_seqlens=torch.zeros(2))),
        (InvalidType, "cu_seqlens is torch.int64", lambda c: c.append(
            [0], tokens(3, 2, 8), tokens(3, 2, 8), cu_seqlens=torch.tensor([0, 3], device=DEVICE), counts=[3])),
        (InvalidInput, r"cu_seqlens has shape \(3,\) for 1 rows", lambda c: c.append(
            [0], tokens(3, 2, 8), tokens(3, 2, 8), cu_seqlens=torch.zeros(3).int(), counts=[3])),
        (InvalidType, "k_new is no plain strided tensor", lambda c: c.append(
            [0], tokens(1, 1, 2, 8).to_sparse(), tokens(1, 1, 2, 8))),
    ],
)  # fmt: skip
def test_bad_input(error: type[Exception], words: str, call: Any) -> None:
    cache = make(max_batch=1)
    cache.add()
    before = state(cache)
    with pytest.raises(error, match=words):
        call(cache)
    assert state(cache) == before


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"page_size": 0}, InvalidInput, "page_size is 0"),
        ({"page_size": 48}, InvalidInput, "page_size is 48; it must be a power of two"),
        ({"num_pages": 2.5}, InvalidType, "num_pages is 2.5"),
        ({"max_batch": 0}, InvalidInput, "max_batch is 0"),
        ({"dtype": torch.int16}, InvalidType, "dtype is torch.int16"),
    ],
)
def test_bad_sizes(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make(**changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_cache_on_a_gpu_that_is_not_there() -> None:
    with pytest.raises(InvalidInput, match="device is cuda, and there is no GPU; pass device='cpu'"):
        make(device="cuda")


def test_integers_of_numpy_are_integers() -> None:
    sizes = {name: np.int64(size) for name, size in SIZES.items() if isinstance(size, int)}
    cache = make(**sizes)
    row: Any = np.uint8(cache.add())
    numbers: Any = np.array([9, 1, 6, 8, 3, 2], dtype=np.int16)
    cache.extend([row], numbers[:1])
    cache.extend(np.array([row]), numbers[1])  # type: ignore[arg-type]
    child = cache.fork(row, numbers[2])
    cache.truncate(row, numbers[3])
    assert cache.evict(row, numbers[4]) == 0 and cache.pages(row)[0] == -1
    assert cache.lengths == {0: 8, child: 6}
    q = tokens(1, 1, 2, 8)
    whole = attention_with_kv_cache(q, cache, rows=[1], num_splits=2, max_seqlen_k=12)
    rows: Any = np.array([1])
    again = attention_with_kv_cache(q, cache, rows=rows, num_splits=numbers[5], max_seqlen_k=2 * numbers[2])
    assert torch.equal(whole.nan_to_num(), again.nan_to_num())
    cache.free(rows - 1)
    cache.free(rows)
    check_books(cache)


def test_rows_on_the_host_are_checked() -> None:
    cache = make()
    cache.add()
    for error, rows in ((InvalidInput, [4]), (InvalidInput, [-1]), (InvalidType, [1.5])):
        with pytest.raises(error, match="row"):
            attention_with_kv_cache(tokens(1, 1, 2, 8), cache, rows=rows)  # type: ignore[arg-type]


def test_rotated_keys_of_a_latent_cache_are_refused() -> None:
    """Its values are the first columns of its keys, which would be rotated. Queries may be rotated."""
    pool, table = tokens(2, 16, 1, 24), torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE)
    layer = CacheLayer(pool, pool[..., :16], table, table[0, 1:] + 8)
    q, k, rotary = tokens(1, 1, 2, 24), tokens(1, 1, 1, 24), Rotary.of(8, 32, device=DEVICE)
    before = pool.clone()
    with pytest.raises(InvalidInput, match="in a latent cache these are its v"):
        attention_with_kv_cache(q, layer, k_new=k, v_new=k[..., :16], rotary=rotary)
    assert torch.equal(pool, before)
    attention_with_kv_cache(q, layer, rotary=rotary)
    attention_with_kv_cache(q, layer, k_new=k, v_new=k[..., :16])
    assert torch.equal(pool[0, 8], k[0, 0])


def test_the_default_device_changes_nothing() -> None:
    torch.manual_seed(0)
    cache, (q, k) = make(), (torch.randn(1, 3, 2, 8, device=DEVICE) for _ in range(2))
    row = cache.add()
    with torch.device("meta"):
        rotary = Rotary.of(8, 16, device=DEVICE)
        out = attention_with_kv_cache(q, cache, rows=[row], k_new=k, v_new=k, rotary=rotary, causal=True)
        child = cache.fork(row)
        quantized = quantize(q, k, k, dtype=torch.int8, smooth_k=True, rotate=True, percentile=0.9)
    assert out.isfinite().all() and cache.lengths == {row: 3, child: 3}
    assert quantized.q.device.type == DEVICE.type


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"rotary_dim": 7}, InvalidInput, "rotary_dim is 7"),
        ({"rotary_dim": 0}, InvalidInput, "rotary_dim is 0"),
        ({"rotary_dim": "x"}, InvalidType, "rotary_dim is 'x'"),
        ({"positions": -1}, InvalidInput, "positions -1"),
        ({"base": 0.0}, InvalidInput, r"base 0\.0"),
        ({"base": "x"}, InvalidType, "base is 'x'"),
    ],
)
def test_angles_of_wrong_numbers(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Rotary.of(**({"rotary_dim": 8, "positions": 5} | arguments))
