"""`PagedKVCache` and `CacheLayer` of float8 and int8: appended tokens, their factors, and what is refused by name."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.test_kv_cache import DEVICE, check_books, tokens
from warpwave import (
    AttentionProblem,
    CacheLayer,
    InvalidInput,
    InvalidType,
    PagedKVCache,
    Rotary,
    UnsupportedProblem,
    attention,
    attention_with_kv_cache,
    explain,
    plans,
    warmup,
)
from warpwave.checks.problems import check_problem
from warpwave.gpu import Gpu
from warpwave.kernels import append_kv, cache_descales, split_kv
from warpwave.kv_cache import new_tokens

SIZES: dict[str, Any] = {
    "num_pages": 12, "page_size": 4, "num_heads_kv": 2, "head_dim": 16, "head_dim_v": 24, "max_batch": 4,
    "max_seqlen": 40, "device": DEVICE,
}  # fmt: skip
DTYPES = [torch.float8_e4m3fn, torch.int8]
HEADS = {"k_descale": torch.tensor([0.04, 0.06]), "v_descale": torch.tensor([0.035, 0.08])}
# The largest rounding, as a share of a number and in units of the factor.
ROUNDING = {torch.float8_e4m3fn: (2.0**-4, 2.0**-10), torch.int8: (0.0, 0.5)}
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_kind = pytest.mark.parametrize("kind", ["head", "token"])
PROBLEM = AttentionProblem(
    batch=2, seqlen_q=1, seqlen_k=64, num_heads_q=4, num_heads_kv=2, head_dim=64, head_dim_v=64, dtype="bfloat16",
    softmax_scale=0.125, page_size=16, dtype_kv="int8", kv_factors="token",
)  # fmt: skip


def make(dtype: torch.dtype, kind: str = "token", **changes: Any) -> PagedKVCache:
    return PagedKVCache(**SIZES | {"dtype": dtype} | (HEADS if kind == "head" else {}) | changes)


def new(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = tokens(1, n, 2, 16, seed=seed), tokens(1, n, 2, 24, seed=seed + 1)
    return k.bfloat16(), v.bfloat16()


def numbers(cache: PagedKVCache, row: int) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """The numbers of a row's keys and values, in float32, and the steps of their 8 bits."""
    at = torch.arange(int(cache.seqused_k[row]), device=DEVICE)
    cells = (cache.page_table[row, at // cache.page_size].long(), at % cache.page_size)
    found = []
    for pool, factor in ((cache.k, cache.layer.k_descale), (cache.v, cache.layer.v_descale)):
        assert factor is not None
        step = (factor[cells] if factor.dim() == 3 else factor.expand(len(at), 2))[..., None]
        found.append((cache_descales.of_cells(pool, factor, cells, torch.float32), step))
    return tuple(found)


@each_kind
@each_dtype
def test_what_is_appended_is_read(dtype: torch.dtype, kind: str) -> None:
    """To a rounding: of a float8 number 2^-4 of it, of an int8 number half a factor. Numbers of tokens have factors by
    which the largest of a head is the largest of the dtype."""
    cache = make(dtype, kind)
    rows = cache.add(), cache.add()
    given: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {row: [] for row in rows}
    for step, n in enumerate((3, 6)):
        for row in rows:
            k, v = new(n, 10 * step + row)
            cache.append([row], k, v)
            given[row].append((k[0], v[0]))
    relative, absolute = ROUNDING[dtype]
    for row in rows:
        for (got, unit), parts in zip(numbers(cache, row), zip(*given[row], strict=True), strict=True):
            exact = torch.cat(parts).float()
            assert ((got - exact).abs() <= relative * exact.abs() + absolute * unit * 1.001).all()
            if kind == "token":
                assert torch.allclose(got.abs().amax(-1), exact.abs().amax(-1), rtol=1e-6)
    check_books(cache)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rotation", ["none", "halves", "interleaved"])
@each_kind
@each_dtype
def test_the_kernel_writes_what_torch_writes(dtype: torch.dtype, kind: str, rotation: str, packed: bool) -> None:
    """Every bit of the numbers, of the factors and of the rotated queries, where a sequence has the token; no other
    cell."""
    rotary = None if rotation == "none" else Rotary.of(16, 40, interleaved=rotation == "interleaved", device=DEVICE)
    found = []
    for by_kernel in (True, False):
        cache = make(dtype, kind, page_size=8)
        layer = cache.layer
        cache.k.view(torch.uint8).fill_(77)
        cache.v.view(torch.uint8).fill_(77)
        if kind == "token":
            assert layer.k_descale is not None and layer.v_descale is not None
            layer.k_descale.fill_(7.0)
            layer.v_descale.fill_(7.0)
        rows = [cache.add(), cache.add(), cache.add()]
        cache.extend(rows, [9, 9, 17])
        offsets = torch.tensor([0, 3, 3, 6] if packed else [0, 2, 4, 6], dtype=torch.int32, device=DEVICE)
        k, v, q = tokens(6, 2, 16).half(), tokens(6, 2, 24, seed=1).half(), tokens(6, 4, 16, seed=2).half()
        k[1, 0] = 0.0
        if not packed:
            k, v, q = (t.unflatten(0, (3, 2)) for t in (k, v, q))
        made = new_tokens(
            layer, k, v, q=q, rows=cache.index(rows), cu_seqlens=offsets if packed else None, rotary=rotary
        )
        interleaved = rotation == "interleaved"
        write = (
            append_kv.prepare(made, 3, interleaved)
            if by_kernel
            else partial(append_kv.write_torch, interleaved=interleaved)
        )
        write(made)
        found.append((cache.k.float(), cache.v.float(), layer.k_descale, layer.v_descale, made.q_out))
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    untouched = (found[0][0] == torch.tensor(77, dtype=torch.uint8).view(dtype).float()).all(-1).sum()
    assert untouched == 12 * 8 * 2 - 6 * 2


@each_dtype
def test_tokens_that_are_not_finite_and_zeros(dtype: torch.dtype) -> None:
    """A token with NaN or Inf makes attention to it NaN, as in a 16-bit cache; a token of zeros stays zero."""
    cache = make(dtype)
    row = cache.add()
    k, v = new(3)
    k[0, 0, 0], v[0, 1, 1, 5] = 0.0, torch.inf
    cache.append([row], k, v)
    assert not numbers(cache, row)[0][0][0, 0].any()
    q = tokens(1, 1, 2, 16).bfloat16()
    for kernel in ("split_kv", "eager"):
        out = attention_with_kv_cache(q, cache, rows=[row], kernel=kernel)
        assert out[0, 0, 0].isfinite().all() and out[0, 0, 1].isnan().all()


@each_dtype
def test_numbers_beyond_a_heads_factor_saturate(dtype: torch.dtype) -> None:
    cache = make(dtype, "head")
    row = cache.add()
    k, v = new(2)
    k[0, 1, 0, 3], v[0, 0, 1, 2] = 1e4, -torch.inf
    cache.append([row], k, v)
    (keys, of_keys), (values, of_values) = numbers(cache, row)
    largest = {torch.float8_e4m3fn: 448, torch.int8: 127}[dtype]
    assert keys[1, 0, 3] == largest * of_keys[1, 0, 0] and values[0, 1, 2] == -largest * of_values[0, 1, 0]


@each_dtype
def test_a_fork_copies_the_factors_of_its_page(dtype: torch.dtype) -> None:
    cache = make(dtype)
    row = cache.add()
    cache.append([row], *new(6))
    before = [t.clone() for t, _ in numbers(cache, row)]
    child = cache.fork(row, 5)
    k, v = new(2, 7)
    cache.append([child], 100 * k, 100 * v)
    assert all(torch.equal(a, b) for a, (b, _) in zip(before, numbers(cache, row), strict=True))
    assert all(torch.equal(a[:5], b[:5]) for a, (b, _) in zip(before, numbers(cache, child), strict=True))
    check_books(cache)
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert copied.k.dtype == cache.k.dtype
        for (a, _), (b, _) in zip(numbers(cache, child), numbers(copied, child), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("kernel", ["split_kv", "eager"])
@each_kind
@each_dtype
def test_append_rotate_and_attend_in_one_call(dtype: torch.dtype, kind: str, kernel: str) -> None:
    """Prefill, then decode, is attention over the rotated and quantized tokens."""
    rotary, cache = Rotary.of(16, 40, device=DEVICE), make(dtype, kind, head_dim_v=16)
    row = cache.add()
    for seed, n in enumerate((11, 1)):
        q = tokens(1, n, 4, 16, seed=seed).bfloat16()
        k, v = tokens(1, n, 2, 16, seed=seed + 5).bfloat16(), tokens(1, n, 2, 16, seed=seed + 9).bfloat16()
        out = attention_with_kv_cache(
            q, cache, rows=[row], k_new=k, v_new=v, rotary=rotary, causal=True, kernel=kernel, checked=True
        )
        at = torch.arange(cache.lengths[row] - n, cache.lengths[row], device=DEVICE)
        q = append_kv.rotated(q[0], at, rotary.cos, rotary.sin, False)
        keys, values = (t[None].double() for t, _ in numbers(cache, row))
        expected = attention(q[None].double(), keys, values, causal=True)
        assert (out.double() - expected).norm() < 6e-3 * expected.norm()


@each_dtype
def test_calls_made_before_are_recalled(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at another length, whose plan the class of calls makes."""
    cache = make(dtype)
    rows = [cache.add(), cache.add()]
    for row in rows:
        cache.append([row], *new(9, row))
    q = tokens(2, 1, 2, 16).bfloat16()
    expected = [
        attention_with_kv_cache(q, cache, rows=cache.index(rows), kernel="split_kv", max_seqlen_k=n) for n in (16, 36)
    ]
    attention_with_kv_cache(q, cache, rows=cache.index(rows), kernel="split_kv", max_seqlen_k=16)

    def refuse(*given: Any) -> Any:
        raise AssertionError("the call was planned again")

    monkeypatch.setattr(plans, "planned", refuse)
    again = [
        attention_with_kv_cache(q, cache, rows=cache.index(rows), kernel="split_kv", max_seqlen_k=n)
        for n in (16, 36, 20)
    ]
    assert torch.equal(again[0], expected[0]) and torch.equal(again[1], expected[1])


def test_layers_have_their_own_factors() -> None:
    factors = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    cache = make(torch.int8, num_layers=2, k_descale=factors, v_descale=2 * factors)
    for i, layer in enumerate(cache.layers):
        assert layer.k_descale is not None and layer.v_descale is not None
        assert torch.equal(layer.k_descale.cpu(), factors[i]) and torch.equal(layer.v_descale.cpu(), 2 * factors[i])
        assert layer.k_descale.data_ptr() % 16 == 0
    factors.zero_()
    assert cache.layers[0].k_descale is not None and cache.layers[0].k_descale.all()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"dtype": torch.float8_e5m2}, InvalidType, "dtype is torch.float8_e5m2; it must be one of"),
        ({"dtype": torch.float16}, InvalidInput, "dtype is torch.float16; only 8-bit caches have factors"),
        ({"v_descale": None}, InvalidInput, "v_descale is None and the other factor was given"),
        ({"k_descale": 0.1}, InvalidType, "k_descale is float; it must be float32"),
        ({"k_descale": torch.ones(2).double()}, InvalidType, "k_descale is torch.float64; it must be float32"),
        ({"k_descale": torch.ones(3)}, InvalidInput, r"k_descale has shape \(3,\); it must be \(2,\) or \(1, 2\)"),
        ({"k_descale": torch.tensor([1.0, 0.0])}, InvalidInput, r"k_descale\[1\] is 0; factors must be positive"),
        ({"v_descale": torch.tensor([torch.nan, 1.0])}, InvalidInput, r"v_descale\[0\] is nan"),
        ({"v_descale": torch.tensor([1.0, -2.0])}, InvalidInput, r"v_descale\[1\] is -2"),
    ],
)
def test_bad_factors_of_a_cache(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        PagedKVCache(**SIZES | {"dtype": torch.int8} | HEADS | changes)


def layer_of(cache: PagedKVCache, **changes: Any) -> CacheLayer:
    return replace(cache.layer, **changes)


ones = partial(torch.ones, device=DEVICE)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"k_descale": None}, InvalidInput, "k_descale is None; it must be float32 of shape"),
        (
            {"k_descale": None, "v_descale": None},
            InvalidType,
            "a cache of torch.int8 needs factors: give the CacheLayer",
        ),
        ({"k_descale": ones(3)}, InvalidInput, r"k_descale has shape \(3,\); it must be float32 of shape \(\), "),
        ({"k_descale": ones(2)}, InvalidInput, "k_descale is of each head and v_descale of each token"),
        ({"k_descale": ones(2).half()}, InvalidType, "k_descale is torch.float16; it must be torch.float32"),
        ({"k_descale": 1.0}, InvalidType, "k_descale is a float; it must be a torch.Tensor"),
        ({"k_descale": torch.ones(2, device="meta")}, InvalidInput, "k_descale is on meta and q on"),
    ],
)
def test_bad_factors_of_a_layer(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    cache = make(torch.int8)
    cache.extend([cache.add()], 3)
    with pytest.raises(error, match=words):
        attention_with_kv_cache(tokens(1, 1, 2, 16).half(), layer_of(cache, **changes))


def test_bad_operands_of_a_call() -> None:
    cache = make(torch.int8)
    cache.extend([cache.add()], 3)
    with pytest.raises(InvalidType, match=r"q is torch.float32; on a cache of torch.int8 it must be one of"):
        attention_with_kv_cache(tokens(1, 1, 2, 16), cache, rows=[0])
    with pytest.raises(InvalidType, match=r"the cache's v is torch.float8_e4m3fn and its k torch.int8"):
        attention_with_kv_cache(tokens(1, 1, 2, 16).half(), layer_of(cache, v=cache.v.view(torch.float8_e4m3fn)))
    with pytest.raises(InvalidType, match=r"the cache's k is torch\.float16 and k_descale or v_descale was given"):
        attention_with_kv_cache(tokens(1, 1, 2, 16).half(), layer_of(cache, k=cache.k.half(), v=cache.v.half()))
    k, v = new(1)
    with pytest.raises(InvalidType, match=r"k_new is torch.float32 and the cache torch.int8; it must be torch.float16"):
        cache.append([0], k.float(), v)
    q, bare = tokens(1, 1, 2, 16).half(), layer_of(cache, k_descale=None, v_descale=None)
    with pytest.raises(
        InvalidType, match=r"k_descale is NoneType and the cache torch\.int8; it must be a float32 tensor"
    ):
        new_tokens(bare, k, v, q=q)
    assert cache.lengths == {0: 3}


@each_kind
def test_checked_calls_read_the_factors(kind: str) -> None:
    """Of tokens those that queries see: memory that holds no token may hold anything."""
    cache = make(torch.int8, kind)
    row = cache.add()
    cache.append([row], *new(6))
    q, factor = tokens(1, 1, 2, 16).bfloat16(), cache.layer.v_descale
    assert factor is not None
    attention_with_kv_cache(q, cache, rows=[row], checked=True)
    page = cache.pages(row)[1]
    if kind == "token":
        factor[page, 3, 0] = -1.0  # no token is there
        attention_with_kv_cache(q, cache, rows=[row], checked=True)
    at = (page, 0, 1) if kind == "token" else (1,)
    factor[at] = 0.0
    place = ", ".join(map(str, at))
    with pytest.raises(InvalidInput, match=rf"v_descale\[{place}\] is 0; factors must be positive and finite"):
        attention_with_kv_cache(q, cache, rows=[row], checked=True)


def test_problems_that_no_call_has() -> None:
    check_problem(PROBLEM)
    for changes, words in (
        ({"kv_factors": None}, "dtype_kv is 'int8' and kv_factors None"),
        ({"dtype_kv": "float8_e5m2"}, "dtype_kv is 'float8_e5m2'"),
        ({"page_size": 0}, "a cache of 8-bit numbers has pages"),
        ({"dtype": "float32"}, "queries of float16 or bfloat16"),
    ):
        with pytest.raises(InvalidInput, match=words):
            check_problem(replace(PROBLEM, **changes))


def test_bytes_follow_the_type_of_the_cache() -> None:
    """Compulsory bytes by hand; what split_kv reads; and the sentence that names the cache."""
    wide = replace(PROBLEM, dtype_kv=None, kv_factors=None)
    keys = 2 * 2 * 64  # sequences, heads, tokens
    assert wide.compulsory_bytes - PROBLEM.compulsory_bytes == keys * (128 * 2 - (128 + 8))
    of_heads = replace(PROBLEM, kv_factors="head")
    assert wide.compulsory_bytes - of_heads.compulsory_bytes == keys * 128 - 2 * 8
    gpu, config = Gpu.for_arch("sm_90"), split_kv.Config(16, 64, 4, 3)
    read = [split_kv.cost(p, gpu, config).read_bytes for p in (wide, PROBLEM)]
    assert read[0] - read[1] == keys * (128 * 2 - (128 + 8))
    assert "k and v int8, a factor for each token" in PROBLEM.describe()
    text = str(explain(PROBLEM, gpu=gpu))
    assert "split_kv" in text and "such caches are read by hopper/flash_fwd, split_kv, eager" in text


def test_float8_needs_a_gpu_that_has_it() -> None:
    float8 = replace(PROBLEM, dtype_kv="float8_e4m3fn")
    assert "float8 needs NVIDIA sm_89 or newer" in split_kv.why_not(float8, Gpu.for_arch("sm_80"))[0]
    assert not split_kv.why_not(PROBLEM, Gpu.for_arch("sm_80")) and not split_kv.why_not(float8, Gpu.for_arch("sm_89"))
    with pytest.raises(UnsupportedProblem, match=r"a cache of torch\.float8_e4m3fn cannot be on this device"):
        refuse_device()


def refuse_device() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(cache_descales, "current_gpu", lambda device: Gpu.for_arch("sm_80"))
        PagedKVCache(**SIZES | {"dtype": torch.float8_e4m3fn, "device": "cuda"})


@pytest.mark.parametrize("kind", ["head", "token"])
def test_warmup(kind: str) -> None:
    problem = replace(PROBLEM, kv_factors=kind)
    assert warmup([problem], DEVICE, kernel="split_kv") == 1


def test_a_checked_call_reads_the_factors_of_a_page_before_it_is_copied() -> None:
    """A call that appends to a forked sequence copies the shared page first; its check comes before that."""
    cache = make(torch.int8)
    for factor in (cache.layer.k_descale, cache.layer.v_descale):
        assert factor is not None
        factor.fill_(-1)  # no factor: memory that nobody has written
    row = cache.add()
    cache.append([row], *new(6))
    other = cache.fork(row)
    q, (k, v) = tokens(1, 1, 4, 16).bfloat16(), new(1, seed=9)
    said: dict[str, Any] = {"rows": [other], "k_new": k, "v_new": v}
    attention_with_kv_cache(q, cache, checked=True, **said)
    third = cache.fork(row)
    shared = cache.pages(row)[1]
    assert cache.layer.k_descale is not None
    cache.layer.k_descale[shared, 1, 0] = float("inf")
    with pytest.raises(InvalidInput, match=rf"k_descale\[{shared}, 1, 0\] is inf"):
        attention_with_kv_cache(q, cache, checked=True, **{**said, "rows": [third]})
    assert cache.lengths[third] == 6


@pytest.mark.parametrize(("queries", "tokens_new", "refused"), [(6, 1, True), (1, 3, False), (3, 3, False)])
def test_a_checked_call_reads_the_factors_of_all_tokens_that_it_does_not_write(
    queries: int, tokens_new: int, refused: bool
) -> None:
    """Cells 3 to 5 have no factor. One new token leaves two of them unwritten, three do not."""
    cache = make(torch.int8)
    row = cache.add()
    cache.append([row], *new(3))
    cache.extend([row], 3)
    layer = cache.layer
    for factor in (layer.k_descale, layer.v_descale):
        assert factor is not None
        factor[cache.pages(row)[0], 3] = -1
        factor[cache.pages(row)[1]] = -1
    q, (k, v) = tokens(1, queries, 4, 16).bfloat16(), new(tokens_new, seed=9)
    said: dict[str, Any] = {"rows": [row], "k_new": k, "v_new": v, "checked": True}
    if refused:
        with pytest.raises(InvalidInput, match=r"k_descale.* is -1"):
            attention_with_kv_cache(q, layer, **said)
    else:
        attention_with_kv_cache(q, layer, **said)
    k, v = new(7)
    with pytest.raises(InvalidInput, match="less than the 7 new tokens"):
        attention_with_kv_cache(q, layer, **{**said, "k_new": k, "v_new": v})
