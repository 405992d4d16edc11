"""Bad calls on a paged cache: the error names the argument, what it was and what it must be, before anything happens.

As in test_bad_input.py, nothing here is a bare assertion of the package's: the checks hold under `python -O`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import paged, test_bad_input
from tests.conformance.harness import DEVICE, KERNELS, ON_GPU, bits
from tests.conformance.paged import PagedCase
from tests.conformance.test_bad_input import rows
from tests.conformance.test_poison import Guards
from warpwave import (
    CacheLayer,
    InvalidInput,
    InvalidType,
    PagedKVCache,
    Rotary,
    UnsupportedProblem,
    attention_with_kv_cache,
)
from warpwave.kernels import append_kv, split_kv
from warpwave.operands import CachedOperands

Row = tuple[str, Callable[[], dict[str, Any]], list[str]]


def ones(*shape: int, dtype: torch.dtype = torch.float16, device: torch.device = DEVICE) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def call(**changes: Any) -> dict[str, Any]:
    """A good call, changed: 2 sequences of 20 and 9 tokens in 5 pages of 8, of rows 0 and 2 of 3."""
    parts: dict[str, Any] = {
        "k": ones(5, 8, 2, 16),
        "v": ones(5, 8, 2, 16),
        "page_table": torch.tensor([[0, 3, 1, 7], [9, 9, 9, 9], [2, 4, -5, 99]], dtype=torch.int32, device=DEVICE),
        "seqused_k": ints(20, 77, 9),
    }
    parts |= {name: changes.pop(name) for name in list(changes) if name in parts}
    arguments = {"q": ones(2, 3, 4, 16), "cache": CacheLayer(**parts), "rows": ints(0, 2)}
    return arguments | changes


def packed(**changes: Any) -> dict[str, Any]:
    return call(q=ones(5, 4, 16), **({"cu_seqlens_q": ints(0, 3, 5), "max_seqlen_q": 3} | changes))


def run(arguments: dict[str, Any]) -> Any:
    return attention_with_kv_cache(arguments["q"], arguments["cache"], **{
        name: value for name, value in arguments.items() if name not in ("q", "cache")
    })  # fmt: skip


def new_cache(**changes: Any) -> PagedKVCache:
    sizes: dict[str, Any] = {
        "num_pages": 4, "page_size": 8, "num_heads_kv": 2, "head_dim": 16, "max_batch": 3, "max_seqlen": 32,
        "dtype": torch.float16, "device": DEVICE,
    }  # fmt: skip
    cache = PagedKVCache(**(sizes | changes))
    for _ in range(3):
        cache.add()
    return cache


WRONG_TYPE: list[Row] = [
    ("no cache", lambda: call(cache=None), ["cache", "NoneType", "PagedKVCache", "CacheLayer"]),
    ("a list as q", lambda: call(q=[1.0]), ["q", "list", "torch.Tensor"]),
    ("no page table", lambda: call(page_table=None), ["page_table", "NoneType"]),
    ("long page table", lambda: call(page_table=ints(0, 1, 2).long()[:, None]), ["page_table", "int64", "int32"]),
    ("float lengths", lambda: call(seqused_k=ones(3)), ["seqused_k", "float16", "int32"]),
    ("long rows", lambda: call(rows=ints(0, 2).long()), ["rows", "int64", "int32"]),
    ("long offsets", lambda: packed(cu_seqlens_q=ints(0, 3, 5).long()), ["cu_seqlens_q", "int64", "int32"]),
    ("a cache of another dtype", lambda: call(k=ones(5, 8, 2, 16, dtype=torch.bfloat16)), ["k", "bfloat16", "float16"]),
    ("new keys of another dtype", lambda: call(k_new=ones(2, 3, 2, 16).float(), v_new=ones(2, 3, 2, 16)), ["k_new"]),
    ("rows on the device for an append", lambda: call(
        cache=new_cache(), k_new=ones(2, 3, 2, 16), v_new=ones(2, 3, 2, 16)), ["rows", "integers"]),
    ("half angles", lambda: call(rotary=Rotary(ones(32, 8), ones(32, 8))), ["rotary.cos", "float16", "float32"]),
    ("a list as new keys", lambda: call(k_new=[1], v_new=ones(2, 3, 2, 16)), ["k_new", "list", "torch.Tensor"]),
    ("a list as new values", lambda: call(k_new=ones(2, 3, 2, 16), v_new=[1]), ["v_new", "list", "torch.Tensor"]),
    ("new keys as a list for a cache", lambda: call(
        cache=new_cache(), rows=[0, 2], k_new=[1], v_new=ones(2, 3, 2, 16)), ["k_new", "list"]),
    ("a tuple as angles", lambda: call(rotary=(1, 2)), ["rotary", "tuple", "warpwave.Rotary"]),
    ("a fractional longest chunk", lambda: packed(max_seqlen_q=3.0), ["max_seqlen_q", "3.0", "integer"]),
    ("a truth as the longest chunk", lambda: packed(max_seqlen_q=True), ["max_seqlen_q", "True", "integer"]),
    ("a word as the longest sequence", lambda: call(max_seqlen_k="32"), ["max_seqlen_k", "'32'", "integer"]),
    ("a truth as splits", lambda: call(num_splits=True), ["num_splits", "True", "integer"]),
    ("no prefix at all", lambda: call(shared_prefix=None), ["shared_prefix", "None", "integer"]),
    ("an empty word as checked", lambda: call(checked=""), ["checked is ''", "True or False"]),
    ("a number as invariance", lambda: call(batch_invariant=1), ["batch_invariant", "1", "True or False"]),
    ("one number as rows", lambda: call(rows=5), ["rows", "5", "sequence of integers"]),
    ("fractional rows", lambda: call(rows=[0, 1.5]), ["row", "1.5", "integer"]),
    ("truths as rows", lambda: call(rows=[True, 2]), ["row", "True", "integer"]),
    ("one number as lengths", lambda: packed(seqlens_q=5), ["seqlens_q", "5", "sequence of integers"]),
    ("fractional lengths", lambda: packed(seqlens_q=[3, 2.0]), ["seqlens_q[1]", "2.0", "integer"]),
    ("a list as offsets", lambda: packed(cu_seqlens_q=[0, 3, 5], seqlens_q=[3, 2]), ["cu_seqlens_q", "list"]),
    ("config of another kernel", lambda: call(kernel="split_kv", config=KERNELS["eager"].Config(16, 16)), ["split_kv"]),
]  # fmt: skip
WRONG_VALUE: list[Row] = [
    ("q of rank 2", lambda: call(q=ones(4, 16)), ["q", "(4, 16)", "seqlen_q"]),
    ("a pool of rank 3", lambda: call(k=ones(40, 2, 16)), ["k", "num_pages", "page_size"]),
    ("pools of unequal pages", lambda: call(v=ones(5, 16, 2, 16)), ["v", "page_size", "8"]),
    ("head_dim of the pool", lambda: call(k=ones(5, 8, 2, 24)), ["k", "head_dim", "16"]),
    ("heads that do not divide", lambda: call(k=ones(5, 8, 3, 16), v=ones(5, 8, 3, 16)), ["3 heads", "4 heads"]),
    ("page_size 0", lambda: call(k=ones(5, 0, 2, 16), v=ones(5, 0, 2, 16)), ["page_size", "0", "at least 1"]),
    ("no pages", lambda: call(k=ones(0, 8, 2, 16), v=ones(0, 8, 2, 16)), ["num_pages", "0"]),
    ("lengths of other rows", lambda: call(seqused_k=ints(1, 2)), ["seqused_k", "cache_rows", "3"]),
    ("rows for another batch", lambda: call(rows=ints(0, 1, 2)), ["rows", "batch", "2"]),
    ("more sequences than rows", lambda: call(q=ones(4, 3, 4, 16), rows=None), ["4 sequences", "3 rows"]),
    ("no rows at all", lambda: call(page_table=ints().view(0, 3), seqused_k=ints()), ["2 sequences", "no rows"]),
    ("a strided table", lambda: call(page_table=ints(*range(12)).view(4, 3).t()), ["page_table", "contiguous"]),
    ("strided rows", lambda: call(rows=ints(0, 1, 2, 3)[::2]), ["rows", "contiguous"]),
    ("negative longest sequence", lambda: call(max_seqlen_k=-4), ["max_seqlen_k", "-4"]),
    ("packed without the longest", lambda: packed(max_seqlen_q=None), ["max_seqlen_q", "seqlens_q"]),
    ("host lengths alone", lambda: call(seqlens_q=[3, 3]), ["seqlens_q", "cu_seqlens_q"]),
    ("no splits", lambda: call(num_splits=0), ["num_splits", "0", "at least 1"]),
    ("more splits than fit", lambda: call(num_splits=2**40), ["num_splits", str(2**40), "at most 65536"]),
    ("splits, invariant", lambda: call(num_splits=2, batch_invariant=True), ["num_splits", "batch_invariant"]),
    ("splits beside a config", lambda: call(
        num_splits=2, kernel="split_kv", config=split_kv.Config(16, 16, 4, 1)), ["num_splits", "config"]),
    ("equal shares, invariant", lambda: call(
        batch_invariant=True, kernel="split_kv", config=split_kv.Config(16, 16, 4, 1)), ["pieces"]),
    ("negative prefix", lambda: call(shared_prefix=-1), ["shared_prefix", "-1"]),
    ("a kernel that reads no cache", lambda: call(kernel="flash_fwd"), ["flash_fwd", "split_kv", "eager"]),
    ("a layer of many", lambda: call(cache=new_cache(num_layers=2)), ["2 layers", "cache.layers[i]"]),
    ("new keys without values", lambda: call(k_new=ones(2, 3, 2, 16)), ["k_new", "v_new", "None"]),
    ("new keys of another batch", lambda: call(k_new=ones(3, 1, 2, 16), v_new=ones(3, 1, 2, 16)), ["same batch"]),
    ("rotated new keys of other tokens", lambda: call(
        k_new=ones(2, 1, 2, 16), v_new=ones(2, 1, 2, 16), rotary=Rotary.of(16, 99, device=DEVICE)), ["same tokens"]),
    ("a row without a sequence", lambda: call(
        cache=new_cache(max_batch=9), rows=[0, 7], k_new=ones(2, 3, 2, 16), v_new=ones(2, 3, 2, 16)), ["row 7"]),
    ("angles wider than the head", lambda: call(rotary=Rotary.of(32, 9, device=DEVICE)), ["rotary.cos", "= 16"]),
    ("negative scale", lambda: call(softmax_scale=float("-inf")), ["softmax_scale", "-inf"]),
    ("window below -1", lambda: call(window_size=(-2, 0)), ["window_size", "-2"]),
    ("sinks of kv heads", lambda: call(sinks=ones(2, dtype=torch.float32)), ["sinks", "num_heads_q", "4"]),
    ("rows beyond the table", lambda: call(rows=[0, 3]), ["rows[1]", "3", "3 rows"]),
    ("negative rows on the host", lambda: call(rows=[-1, 2]), ["rows[0]", "-1", "3 rows"]),
    ("lengths of fewer tokens", lambda: packed(seqlens_q=[3, 1]), ["seqlens_q", "sums to 4", "5", "q"]),
    ("a length beyond the longest", lambda: packed(seqlens_q=[1, 4]), ["seqlens_q[1]", "4", "max_seqlen_q is 3"]),
    ("a negative length on the host", lambda: packed(seqlens_q=[6, -1], max_seqlen_q=6), ["seqlens_q[1]", "-1"]),
    ("lengths of another batch", lambda: packed(seqlens_q=[3, 1, 1]), ["seqlens_q", "3 lengths", "3 offsets"]),
    ("tensors on two devices", lambda: call(rows=torch.zeros(2, dtype=torch.int32, device="meta")), ["rows", "meta"]),
]  # fmt: skip
WRONG_CONTENTS: list[Row] = [
    ("page id too large", lambda: call(seqused_k=ints(30, 0, 9)), ["page_table[0, 3]", "7", "5 pages"]),
    ("negative page id", lambda: call(seqused_k=ints(20, 0, 17)), ["page_table[2, 2]", "-5", "5 pages"]),
    ("row beyond the table", lambda: call(rows=ints(0, 3)), ["rows[1]", "3", "3 rows"]),
    ("negative row", lambda: call(rows=ints(-1, 2)), ["rows[0]", "-1"]),
    ("length above capacity", lambda: call(rows=ints(0, 1)), ["seqused_k[1]", "77", "32 tokens"]),
    ("negative length", lambda: call(seqused_k=ints(-3, 0, 9)), ["seqused_k[0]", "-3"]),
    ("longest too small", lambda: call(max_seqlen_k=16), ["seqused_k[0]", "20", "max_seqlen_k = 16"]),
    ("decreasing offsets", lambda: packed(cu_seqlens_q=ints(0, 6, 5), max_seqlen_q=9), ["cu_seqlens_q[2]", "5", "6"]),
    ("a chunk longer than said", lambda: packed(max_seqlen_q=2), ["sequence 0", "3 tokens", "max_seqlen_q = 2"]),
    ("offsets of other lengths", lambda: packed(
        cu_seqlens_q=ints(0, 2, 5), seqlens_q=[3, 2]), ["cu_seqlens_q[1] is 2", "seqlens_q", "3"]),
    ("offsets of other lengths of an append", lambda: packed(
        cache=new_cache(), rows=[0, 2], k_new=ones(5, 2, 16), v_new=ones(5, 2, 16), seqlens_q=[3, 2],
        cu_seqlens_q=ints(0, 3, 6)), ["cu_seqlens_q[2] is 6", "seqlens_q", "5"]),
    ("positions beyond the angles", lambda: call(rotary=Rotary.of(16, 19, device=DEVICE)), ["19 positions", "20"]),
    ("a prefix that is not shared", lambda: call(shared_prefix=6), ["rows 0 and 2", "do not share"]),
    ("a prefix into the queries", lambda: call(shared_prefix=20), ["row 0", "shared_prefix=20"]),
]  # fmt: skip


def refused(error: type[Exception], arguments: dict[str, Any], words: list[str], mp: pytest.MonkeyPatch) -> None:
    """The call raises this error and these words, no kernel is bound on the way and nothing of the cache is written."""
    test_bad_input.refused(error, arguments, words, mp, run)
    cache = arguments["cache"]
    if isinstance(cache, PagedKVCache) and any(cache.lengths.values()):
        pytest.fail("a refused call advanced the cache")


@rows(WRONG_TYPE)
def test_wrong_type(arguments: Any, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    refused(InvalidType, arguments(), words, monkeypatch)


@rows(WRONG_VALUE)
def test_wrong_value(arguments: Any, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    refused(InvalidInput, arguments(), words, monkeypatch)


@rows(WRONG_CONTENTS)
def test_wrong_contents_when_checked(arguments: Any, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    refused(InvalidInput, arguments() | {"checked": True}, words, monkeypatch)


def test_a_good_call_is_not_refused() -> None:
    """What every row above changes."""
    run(call(checked=True))
    run(packed(checked=True))
    run(call(cache=new_cache(), rows=[0, 2], k_new=ones(2, 3, 2, 16), v_new=ones(2, 3, 2, 16)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda: call(kernel="split_kv", q=ones(2, 3, 4, 320), k=ones(5, 8, 2, 320), v=ones(5, 8, 2, 300)),
         ["head_dim is 320", "head_dim_v is 300", "large_head_dim"]),
        (lambda: call(kernel="split_kv", k=ones(5, 6, 2, 16), v=ones(5, 6, 2, 16)), ["page_size is 6", "eager"]),
        (lambda: call(shared_prefix=8, window_size=(4, 0), alibi_slopes=ones(4, dtype=torch.float32)),
         ["window", "ALiBi", "without shared_prefix"]),
    ],
    ids=["wide heads", "odd pages", "a prefix behind a window"],
)  # fmt: skip
def test_a_refusal_lists_every_reason_and_what_would_run(arguments: Any, words: list[str]) -> None:
    with pytest.raises(UnsupportedProblem) as refusal:
        run(arguments())
    missing = [word for word in words if word not in str(refusal.value)]
    if missing:
        pytest.fail(f"{missing} not in {str(refusal.value)!r}")


def test_an_unknown_argument_is_an_error() -> None:
    with pytest.raises(TypeError, match="block_table"):
        run(call(block_table=ints(0)))


# Unchecked ------------------------------------------------------------------------------------------------------------

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
TABLES = ("cu_seqlens_q", "page_table", "seqused_k", "rows")
READERS = ("split_kv", "large_head_dim", "eager", pytest.param("hopper/flash_fwd", marks=pytest.mark.gpu))
SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 100))]


def any_numbers(like: Tensor, chance: random.Random, *sizes: int) -> Tensor:
    """Some numbers of a table, or all of them, replaced by any others, most of them close to where something ends."""
    edges = [0, INT_MIN, INT_MAX, *(sign * n + off for n in sizes for sign in (1, -1) for off in (-1, 0, 1))]
    edges += [INT_MIN + 1, INT_MAX - 1, 2**30, -(2**30)]
    share = chance.choice((0.2, 1.0))
    numbers = [
        n if chance.random() > share else chance.choice((chance.choice(edges), chance.randint(INT_MIN, INT_MAX)))
        for n in like.flatten().tolist()
    ]
    return torch.tensor(numbers, dtype=torch.int32, device=like.device).view(like.shape)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_any_numbers_unchecked_stay_inside_the_tensors(
    reader: str, appends: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are unspecified; nothing outside the outputs and the pools is written, and the call returns."""
    chance = random.Random(f"{reader} {appends} {seed}")
    lengths = ((1, 37), (0, 5), (9, 50), (5, 0), (7, 7)) if seed % 2 else ((3, 37), (3, 0), (3, 50))
    everywhere = reader != "hopper/flash_fwd"  # which has neither small pages nor float32
    case = PagedCase(
        chance.choice((1, 16)) if everywhere else 16,
        chance.choice(("float16", "float32:default")) if everywhere else "float16", heads=(2, 1), lengths=lengths,
        packed=seed % 2 == 1, window=chance.choice(((-1, -1), (5, 0))), causal=chance.choice(("", "bottom_right")),
        max_seqlen_k=64,
    )  # fmt: skip
    call = paged.build(case, "normal", DEVICE, seed)
    o, total = call.operands, len(call.operands.q)
    sizes = {
        "cu_seqlens_q": total, "page_table": len(o.k), "seqused_k": o.page_table.shape[1] * case.page_size,
        "rows": len(o.page_table),
    }  # fmt: skip
    wrong = chance.sample(TABLES, chance.randint(1, 4))
    changed = {
        name: any_numbers(getattr(o, name), chance, sizes[name], total)
        for name in wrong
        if getattr(o, name) is not None
    }
    guards = Guards()
    operands = CachedOperands(*(None if t is None else guards.place(t) for t in o._replace(**changed)))
    more: dict[str, Any] = {"max_seqlen_k": chance.choice((None, 17, INT_MAX))}
    if appends:
        monkeypatch.setattr(append_kv, "INTERPRETED", append_kv.INTERPRETED and chance.random() < 0.5)
        new = torch.randn(*o.q.shape[:-2], 1, 16, device=DEVICE).to(o.q.dtype)
        more |= {"k_new": guards.place(new), "v_new": guards.place(-new)}
        if chance.random() < 0.5:
            rotary = Rotary.of(chance.choice((16, 10)), chance.choice((1, 64)), device=DEVICE)
            more["rotary"] = Rotary(guards.place(rotary.cos), guards.place(rotary.sin), chance.random() < 0.5)
    if chance.random() < 0.3 and reader in ("split_kv", "eager"):
        more["batch_invariant"] = True
    inputs = [t for name, t in operands._asdict().items() if name not in ("k", "v")]
    before = bits(*inputs)
    longest = chance.choice((call.problem.seqlen_q, 1, 2 * total))
    guards.watch(monkeypatch)
    out, lse = paged.run(
        reader, call._replace(operands=operands, problem=replace(call.problem, seqlen_q=longest)), **more
    )
    if ON_GPU:
        torch.cuda.synchronize()
    guards.assert_intact()
    assert out.shape == (*o.q.shape[:-1], 16) and lse is not None
    assert bits(*inputs) == before, "a table or the queries were written"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("by_kernel", [True, False])
def test_any_numbers_unchecked_write_no_token_of_other_rows(
    by_kernel: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows and page ids that are right, lengths and offsets of any size write pages of these rows alone."""
    monkeypatch.setattr(append_kv, "INTERPRETED", by_kernel and append_kv.INTERPRETED)
    chance = random.Random(seed)
    cache = PagedKVCache(
        num_pages=24, page_size=4, num_heads_kv=1, head_dim=16, max_batch=5, max_seqlen=32, dtype=torch.float32,
        device=DEVICE,
    )  # fmt: skip
    rows = [cache.add() for _ in range(5)]
    cache.extend(rows, [9, 4, 30, 1, 12])
    for pool in (cache.k, cache.v):
        pool.zero_()
    used = [rows[i] for i in chance.sample(range(5), 3)]
    lengths, offsets = any_numbers(cache.seqused_k, chance, 32), any_numbers(ints(0, 2, 3, 6), chance, 6)
    layer = CacheLayer(cache.k, cache.v, cache.page_table, lengths)
    new = torch.ones(6, 1, 16, device=DEVICE)
    attention_with_kv_cache(
        new, layer, rows=cache.index(used), k_new=new, v_new=new, cu_seqlens_q=offsets, max_seqlen_q=6, kernel="eager"
    )
    # Beyond their own pages, the table of a row holds 0, which is page 0.
    theirs = {0, *(page for row in used for page in cache.pages(row))}
    others = [page for page in range(24) if page not in theirs]
    assert not cache.k[others].any() and not cache.v[others].any()
