"""The books of `PagedKVCache`: pages come and go, all of an append or nothing, tables on the device as on the host."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch

from warpwave import (
    InvalidInput,
    InvalidType,
    OutOfPages,
    PagedKVCache,
    Rotary,
    UnsupportedProblem,
    attention,
    attention_with_kv_cache,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES: dict[str, Any] = {
    "num_pages": 12, "page_size": 4, "num_heads_kv": 2, "head_dim": 8, "max_batch": 4, "max_seqlen": 40,
    "dtype": torch.float32, "device": DEVICE,
}  # fmt: skip


def make(**changes: Any) -> PagedKVCache:
    return PagedKVCache(**(SIZES | changes))


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=g, device=DEVICE)


def append(cache: PagedKVCache, row: int, n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = tokens(1, n, 2, 8, seed=seed), tokens(1, n, 2, 8, seed=seed + 1)
    cache.append([row], k, v)
    return k[0], v[0]


def read(cache: PagedKVCache, row: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a row, as the device's table says."""
    at = torch.arange(first, int(cache.seqused_k[row]), device=DEVICE)
    pages = cache.page_table[row, at // cache.page_size].long()
    return cache.k[pages, at % cache.page_size], cache.v[pages, at % cache.page_size]


def state(cache: PagedKVCache) -> tuple[Any, ...]:
    """Everything a failed call must leave as it was."""
    books = [None if s is None else (s.length, list(s.pages)) for s in cache._sequences]
    device = (cache.page_table.clone(), cache.seqused_k.clone(), *(t.clone() for t in (cache.k, cache.v)))
    return books, list(cache._free), list(cache._references), [t.nan_to_num(7.0).tolist() for t in device]


def visible(cache: PagedKVCache) -> tuple[Any, ...]:
    """The books, and what the device shows of them: lengths, page ids and tokens that are not evicted."""
    books = [None if s is None else (s.length, list(s.pages), s.evicted) for s in cache._sequences]
    shown = []
    for row in cache.rows:
        table = cache.page_table[row, : len(cache.pages(row))].tolist()
        live = [t.tolist() for t in read(cache, row, first_live(cache, row))]
        shown.append((int(cache.seqused_k[row]), table, live))
    return books, list(cache._free), list(cache._references), shown


def first_live(cache: PagedKVCache, row: int) -> int:
    """The first token of a row that was not evicted."""
    return cache.pages(row).count(-1) * cache.page_size


def check_books(cache: PagedKVCache) -> None:
    """References are what the sequences hold, the rest is free, and the device knows the same."""
    held = [0] * cache.num_pages
    for row, sequence in enumerate(cache._sequences):
        length = 0 if sequence is None else sequence.length
        assert int(cache.seqused_k[row]) == length
        if sequence is None:
            continue
        assert len(sequence.pages) == -(-length // cache.page_size)
        assert cache.page_table[row, : len(sequence.pages)].tolist() == sequence.pages
        assert [page == -1 for page in sequence.pages] == [i < sequence.evicted for i in range(len(sequence.pages))]
        for page in sequence.pages:
            if page != -1:
                held[page] += 1
    assert held == cache._references
    assert sorted(cache._free) == [page for page, n in enumerate(held) if n == 0]


def test_what_is_appended_is_read() -> None:
    cache = make()
    a, b = cache.add(), cache.add()
    parts = [append(cache, a, 3, 0), append(cache, b, 5, 2), append(cache, a, 6, 4)]
    for got, want in zip(read(cache, a), zip(parts[0], parts[2], strict=True), strict=True):
        assert torch.equal(got, torch.cat(want))
    for got, one in zip(read(cache, b), parts[1], strict=True):
        assert torch.equal(got, one)
    assert cache.lengths == {a: 9, b: 5} and cache.num_free_pages == 12 - 3 - 2
    check_books(cache)


def test_packed_tokens_go_to_their_rows() -> None:
    cache = make()
    rows = [cache.add() for _ in range(3)]
    k, v = tokens(9, 2, 8), tokens(9, 2, 8, seed=1)
    ends = torch.tensor([0, 5, 5, 9], dtype=torch.int32, device=DEVICE)
    cache.append(rows, k, v, cu_seqlens=ends, counts=[5, 0, 4])
    assert cache.lengths == {rows[0]: 5, rows[1]: 0, rows[2]: 4}
    assert torch.equal(read(cache, rows[0])[0], k[:5]) and torch.equal(read(cache, rows[2])[1], v[5:])
    check_books(cache)


def test_out_of_pages_changes_nothing() -> None:
    cache = make()
    a, b = cache.add(), cache.add()
    append(cache, a, 30)
    append(cache, b, 6)
    before = state(cache)
    with pytest.raises(OutOfPages, match="4 pages are needed and 2 of the cache's 12 are free") as error:
        cache.append([b, a], tokens(2, 10, 2, 8), tokens(2, 10, 2, 8))
    assert (error.value.needed, error.value.free) == (4, 2) and isinstance(error.value, RuntimeError)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    assert state(cache) == before
    with pytest.raises(OutOfPages):
        attention_with_kv_cache(
            tokens(2, 10, 2, 8), cache, rows=[b, a], k_new=tokens(2, 10, 2, 8), v_new=tokens(2, 10, 2, 8)
        )
    assert state(cache) == before
    cache.append([b], tokens(1, 10, 2, 8), tokens(1, 10, 2, 8))


def test_a_call_that_is_refused_changes_nothing() -> None:
    cache = make()
    row = cache.add()
    append(cache, row, 5)
    before = state(cache)
    q = new = tokens(1, 2, 2, 8)
    for error, arguments in (
        (InvalidInput, {"softmax_scale": float("nan")}),
        (InvalidInput, {"kernel": "flash_fwd"}),
        (InvalidInput, {"sinks": torch.zeros(3, device=DEVICE)}),
        (UnsupportedProblem, {"shared_prefix": 4, "window_size": (2, 0)}),
        (InvalidInput, {"num_splits": 0}),
    ):
        with pytest.raises(error):
            attention_with_kv_cache(q, cache, rows=[row], k_new=new, v_new=new, **arguments)
        assert state(cache) == before
    with pytest.raises(InvalidInput, match="max_seqlen is 40"):
        cache.append([row], tokens(1, 36, 2, 8), tokens(1, 36, 2, 8))
    rotary = Rotary.of(8, 6, device=DEVICE)
    with pytest.raises(InvalidInput, match="6 positions and a sequence would have 7"):
        cache.append([row], new, new, rotary=rotary)
    assert state(cache) == before


@pytest.mark.parametrize("length", [None, 4, 7, 0])
def test_forks_share_pages_until_one_writes(length: int | None) -> None:
    cache = make()
    a = cache.add()
    k, _ = append(cache, a, 10)
    b = cache.fork(a, length)
    n = 10 if length is None else length
    assert cache.num_free_pages == 12 - 3, "a fork takes no page"
    assert torch.equal(read(cache, b)[0], k[:n])
    k_b, _ = append(cache, b, 3, seed=5)
    copied = n % 4 != 0
    assert cache.num_free_pages == 9 - (-(-(n + 3) // 4) - -(-n // 4)) - copied, "a page is copied only where shared"
    k_a, _ = append(cache, a, 1, seed=9)
    assert torch.equal(read(cache, a)[0], torch.cat([k, k_a])) and torch.equal(
        read(cache, b)[0], torch.cat([k[:n], k_b])
    )
    check_books(cache)
    cache.free(a)
    assert torch.equal(read(cache, b)[0], torch.cat([k[:n], k_b])), "pages that b shares stay"
    cache.free([b])
    assert cache.num_free_pages == 12 and cache.rows == []
    check_books(cache)


def test_the_last_to_write_keeps_the_shared_page() -> None:
    """Three sequences in one page that all write in one call: two copies, not three."""
    cache = make()
    a = cache.add()
    append(cache, a, 5)
    rows = [a, cache.fork(a), cache.fork(a)]
    cache.append(rows, tokens(3, 1, 2, 8), tokens(3, 1, 2, 8))
    assert cache.num_free_pages == 12 - 2 - 2
    assert cache.shared_prefix(rows) == 4
    check_books(cache)


def test_truncate_and_evict() -> None:
    cache = make()
    a = cache.add()
    k, _ = append(cache, a, 18)
    cache.truncate(a, 9)
    assert cache.num_free_pages == 12 - 3 and torch.equal(read(cache, a)[0], k[:9])
    assert cache.evict(a, 4) == 1, "the token at 9 sees keys from 5, in the second page"
    assert cache.pages(a)[0] == -1 and cache.evict(a, 4) == 0
    assert torch.equal(read(cache, a, first=5)[0], k[5:9])
    append(cache, a, 4)
    assert cache.evict(a, 0) == 2
    with pytest.raises(InvalidInput, match="were evicted"):
        cache.truncate(a, 3)
    with pytest.raises(InvalidInput, match="window_left is -1"):
        cache.evict(a, -1)
    check_books(cache)
    # With a window, what was evicted is not looked at; without one, checked mode says what is missing.
    q = tokens(1, 1, 2, 8)
    attention_with_kv_cache(q, cache, rows=[a], window_size=(0, 0), checked=True)
    with pytest.raises(InvalidInput, match=r"page_table\[0, 0\] is -1"):
        attention_with_kv_cache(q, cache, rows=cache.index([a]), checked=True)
    # The host knows what it evicted, and how long a sequence is.
    for window in (None, (1, 0), (-1, 0)):
        with pytest.raises(InvalidInput, match="tokens of row 0 before 12 were evicted"):
            attention_with_kv_cache(q, cache, rows=[a], window_size=window)
    with pytest.raises(InvalidInput, match="and 2 queries at the end of its 13 tokens"):
        attention_with_kv_cache(tokens(1, 2, 2, 8), cache, rows=[a], window_size=(0, 0))
    empty = next(row for row in range(cache.max_batch) if row not in cache.rows)
    assert not attention_with_kv_cache(q, cache, rows=[empty], max_seqlen_k=4).any(), "a row without a sequence"
    with pytest.raises(InvalidInput, match="max_seqlen_k is 4 and row 0 has 13 tokens; it must be at least 13"):
        attention_with_kv_cache(q, cache, rows=[a], window_size=(0, 0), max_seqlen_k=4)
    with pytest.raises(InvalidInput, match="max_seqlen_k is 13 and row 0 has 14 tokens"):
        new = tokens(1, 1, 2, 8)
        attention_with_kv_cache(q, cache, rows=[a], k_new=new, v_new=new, window_size=(0, 0), max_seqlen_k=13)
    assert cache.lengths[a] == 13


def test_a_fork_of_evicted_tokens_frees_no_page_of_another() -> None:
    """Such a fork counted page -1, which is the last page: another request's page became free while in use."""
    cache = make(num_pages=6, page_size=16, max_batch=5, max_seqlen=96)
    a = cache.add()
    append(cache, a, 64)
    x = cache.add()
    append(cache, x, 32, seed=2)
    y = cache.fork(x)
    cache.evict([a], 0)
    before = visible(cache)
    with pytest.raises(InvalidInput, match="length is 20; the tokens of row 0 before 64 were evicted") as refusal:
        cache.fork(a, 20)
    assert "length must be 0 or from 64 to 64" in str(refusal.value)
    assert visible(cache) == before
    check_books(cache)
    whole, empty = cache.fork(a), cache.fork(a, 0)
    assert cache.pages(whole) == [-1] * 4 and cache.pages(empty) == []
    cache.extend([empty, whole], [1, 1])
    cache.free([x, whole, empty, a])
    check_books(cache)
    assert torch.equal(read(cache, y)[0], tokens(1, 32, 2, 8, seed=2)[0])


@pytest.mark.parametrize("cut", ["truncate", "fork"])
def test_a_sequence_is_cut_only_as_far_as_its_window_is_there(cut: str) -> None:
    """After eviction for a window of 8 the next query of a shorter sequence would see keys that are gone."""

    def shortened(cache: PagedKVCache, row: int, length: int) -> int:
        if cut == "fork":
            return cache.fork(row, length)
        cache.truncate(row, length)
        return row

    cache = make()
    row = cache.add()
    k, v = append(cache, row, 30)
    assert cache.evict(row, 8) == 5, "the token at 30 sees keys from 22, in the sixth page"
    before = visible(cache)
    for length in (25, 27, 20, 1):
        with pytest.raises(InvalidInput, match=f"length is {length}; the tokens of row 0 before 20 were evicted for a"):
            shortened(cache, row, length)
        assert visible(cache) == before
    row = shortened(cache, row, 28)
    q = tokens(1, 1, 2, 8, seed=7)
    out = attention_with_kv_cache(q, cache, rows=[row], k_new=q, v_new=q, window_size=(8, 0), checked=True)
    keys, values = (torch.cat([t[20:28], q[0]])[None] for t in (k, v))
    torch.testing.assert_close(out, attention(q, keys, values))
    check_books(cache)
    row = shortened(cache, row, 0)
    append(cache, row, 3)
    assert cache.pages(row)[0] != -1, "a sequence cut to nothing begins anew"


def test_tokens_that_may_be_taken_back_keep_their_window() -> None:
    cache = make()
    row = cache.add()
    k, v = append(cache, row, 30)
    assert cache.evict(row, 8, max_truncate=7) == 3, "the token at 23 sees keys from 15, in the fourth page"
    for length in (26, 23):
        cache.truncate(row, length)
        q = tokens(1, 1, 2, 8, seed=length)
        out = attention_with_kv_cache(q, cache, rows=[row], k_new=q, v_new=q, window_size=(8, 0), checked=True)
        keys, values = (torch.cat([t[length - 8 : length], q[0]])[None] for t in (k, v))
        torch.testing.assert_close(out, attention(q, keys, values))
    with pytest.raises(InvalidInput, match="from 20 to 24"):
        cache.truncate(row, 19)


def test_a_window_that_reaches_into_evicted_tokens_is_refused() -> None:
    cache = make()
    row = cache.add()
    append(cache, row, 30)
    cache.evict(row, 4)
    before = visible(cache)
    with pytest.raises(InvalidInput, match="window_left is 8; the tokens of row 0 before 24 were evicted, so the next"):
        cache.evict(row, 8)
    with pytest.raises(InvalidInput, match="max_truncate is -1"):
        cache.evict(row, 4, max_truncate=-1)
    assert visible(cache) == before
    assert cache.evict(row, 6) == 0
    append(cache, row, 2)
    cache.evict(row, 8)
    check_books(cache)


def test_a_checked_append_looks_at_the_pages_that_the_call_will_find() -> None:
    """Pages that the appended queries' window does not reach may be evicted."""
    cache = make()
    row = cache.add()
    append(cache, row, 16)
    assert cache.evict(row, 4) == 3
    new = tokens(1, 5, 2, 8)
    out = attention_with_kv_cache(
        new, cache, rows=[row], k_new=new, v_new=new, causal=True, window_size=(4, 0), checked=True
    )
    assert torch.equal(out, attention_with_kv_cache(new, cache, rows=[row], causal=True, window_size=(4, 0)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_is_a_cache_of_its_own(copied: Any) -> None:
    cache = make()
    row = cache.add()
    append(cache, row, 6)
    before = visible(cache)
    other = copied(cache)
    assert visible(other) == before
    append(other, row, 5)
    check_books(other)
    assert other.layer.page_table is other.page_table and other.layer.seqused_k is other.seqused_k
    assert visible(cache) == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_made_in_inference_mode_works_outside(copied: Any) -> None:
    cache = make()
    row = cache.add()
    append(cache, row, 5)
    with torch.inference_mode():
        twin = copied(cache)
    k, v = append(twin, row, 2, seed=7)
    assert twin.lengths[row] == int(twin.seqused_k[row]) == 7 and cache.lengths[row] == 5
    for got, new, old in zip(read(twin, row), (k, v), read(cache, row), strict=True):
        assert torch.equal(got, torch.cat([old, new]))
    check_books(twin)


def test_rows_that_the_cache_does_not_have_are_refused_by_name() -> None:
    cache = make()
    for row in (-1, cache.max_batch):
        with pytest.raises(InvalidInput, match=f"row {row}"):
            cache.kept(row)
    wrong: Any = 0
    with pytest.raises(InvalidType, match="rows"):
        cache.shared_prefix(wrong)


def test_tables_never_move() -> None:
    cache = make()
    addresses = [t.data_ptr() for t in (cache.page_table, cache.seqused_k, cache.k, cache.v)]
    rows = [cache.add(), cache.add()]
    append(cache, rows[0], 20)
    cache.free(cache.fork(rows[0]))
    cache.evict(rows[0], 3)
    assert [t.data_ptr() for t in (cache.page_table, cache.seqused_k, cache.k, cache.v)] == addresses
    assert cache.index(rows) is cache.index(rows)


@pytest.mark.parametrize("shared", [8, 7])  # of 7 tokens, the append writes to the last shared page, a copy of it
def test_a_shared_prefix_before_what_is_appended_is_accepted(shared: int) -> None:
    cache = make()
    first = cache.add()
    append(cache, first, shared)
    rows = [first, cache.fork(first)]
    assert cache.shared_prefix(rows) == shared
    new = tokens(2, 3, 2, 8)
    out = attention_with_kv_cache(
        new, cache, rows=rows, k_new=new, v_new=new, causal=True, shared_prefix=shared, checked=True
    )
    # On a GPU, the prefix and the rest are merged in another order than splits of all keys.
    torch.testing.assert_close(out, attention_with_kv_cache(new, cache, rows=rows, causal=True))


def test_a_shared_prefix_into_what_is_appended_is_refused() -> None:
    cache = make()
    first = cache.add()
    append(cache, first, 5)
    rows = [first, cache.fork(first)]
    new = tokens(2, 3, 2, 8)
    with pytest.raises(InvalidInput, match="do not share the pages of their first 7 tokens"):
        attention_with_kv_cache(
            new[:, :1], cache, rows=rows, k_new=new, v_new=new, causal=True, shared_prefix=7, checked=True
        )
    check_books(cache)


def test_layers_share_tables() -> None:
    cache = make(num_layers=2)
    row = cache.add()
    with pytest.raises(InvalidInput, match="has 2 layers"):
        _ = cache.k
    with pytest.raises(InvalidInput, match="after extend if tokens are appended"):
        cache.append([row], tokens(1, 6, 2, 8), tokens(1, 6, 2, 8))
    for n in (6, 1):
        cache.extend([row], n)
        for i, layer in enumerate(cache.layers):
            x = tokens(1, n, 2, 8, seed=i)
            attention_with_kv_cache(x, layer, rows=cache.index([row]), k_new=x, v_new=-x, causal=True)
    for i, layer in enumerate(cache.layers):
        pages = cache.pages(row)
        wrote = torch.cat([tokens(1, n, 2, 8, seed=i)[0] for n in (6, 1)])
        assert torch.equal(layer.k[pages].flatten(0, 1)[:7], wrote)
        assert torch.equal(layer.v[pages].flatten(0, 1)[:7], -wrote)


# Soak -----------------------------------------------------------------------------------------------------------------


def test_soak(request: pytest.FixtureRequest) -> None:
    """Random appends, forks, evictions, truncations and ends; samples checked against a plain list of tokens.

    `pytest tests/test_kv_cache.py -k soak --soak 100000` for as many steps.
    """
    steps = request.config.getoption("--soak")
    chance = random.Random(0)
    cache = make(num_pages=64, max_batch=8, max_seqlen=64, head_dim=4)
    g = torch.Generator(DEVICE).manual_seed(0)
    model: dict[int, torch.Tensor] = {}  # keys of each row; values are their negatives
    refused = attended = 0
    memory = None
    for step in range(steps):
        action = chance.choice(("append", "append", "append", "add", "fork", "free", "evict", "truncate"))
        rows = sorted(model)
        try:
            if action == "add":
                row = cache.add()
                model[row] = torch.empty(0, 2, 4, device=DEVICE)
            elif not rows:
                continue
            elif action == "append":
                some = chance.sample(rows, chance.randint(1, len(rows)))
                n = chance.randint(1, 5)
                k = torch.randn(len(some), n, 2, 4, generator=g, device=DEVICE)
                cache.append(some, k, -k)
                for row, new in zip(some, k, strict=True):
                    model[row] = torch.cat([model[row], new])
            elif action == "fork":
                parent = chance.choice(rows)
                n = chance.randint(0, len(model[parent]))
                row = cache.fork(parent, n)
                model[row] = model[parent][:n]
            elif action == "free":
                cache.free(row := chance.choice(rows))
                del model[row]
            elif action == "evict":
                cache.evict(chance.choice(rows), 7, max_truncate=6)
            else:
                row = chance.choice(rows)
                n = chance.randint(max(0, len(model[row]) - 6), len(model[row]))
                cache.truncate(row, n)
                model[row] = model[row][:n]
        except (OutOfPages, InvalidInput):
            refused += 1
        if step % 50 == 0:
            check_books(cache)
        live = [row for row in model if len(model[row]) and all(p != -1 for p in cache.pages(row)[-3:])]
        if live and step % 25 == 0:
            row = chance.choice(live)
            q = torch.randn(1, 1, 2, 4, generator=g, device=DEVICE)
            out = attention_with_kv_cache(q, cache, rows=[row], window_size=(7, 0), checked=True)
            k = model[row][-8:]
            p = torch.softmax(torch.einsum("hd,khd->hk", q[0, 0], k) / 2, -1)
            torch.testing.assert_close(out[0, 0], torch.einsum("hk,khd->hd", p, -k), atol=1e-5, rtol=1e-5)
            attended += 1
        if DEVICE.type == "cuda" and step % 1000 == 999:
            torch.cuda.synchronize()
            memory = memory or torch.cuda.memory_allocated()
            assert torch.cuda.memory_allocated() <= memory + 2**20, f"memory grew by step {step}"
    check_books(cache)
    assert attended >= steps // 200 and refused < steps // 2
