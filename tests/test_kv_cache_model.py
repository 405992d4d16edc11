"""Every method of `PagedKVCache`, in any order and with errors in between, against lists of tokens.

The model of a sequence is the list of its tokens, as a user thinks of it; no page occurs there. After each step the
cache's books, the device's tables and every token that can be read through them must be what the lists say.

`WARPWAVE_STEPS=10000 pytest tests/test_kv_cache_model.py` for as many steps.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.test_kv_cache import DEVICE, check_books, read, visible
from tests.test_kv_cache_errors import FailsAt
from warpwave import InvalidInput, InvalidType, OutOfPages, PagedKVCache, Rotary, attention_with_kv_cache
from warpwave.kernels import append_kv

STEPS = int(os.environ.get("WARPWAVE_STEPS", "1000"))
STEPS_OF_A_RUN = 40
MAX_BATCH, MAX_SEQLEN, NUM_PAGES, HEAD_DIM = 5, 40, {1: 60, 4: 18, 16: 8}, 4
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
ROTARY = Rotary.of(HEAD_DIM, MAX_SEQLEN, device=DEVICE)
BANK = torch.randn(512, HEAD_DIM, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def bank(numbers: list[int]) -> torch.Tensor:
    """(tokens, head_dim)."""
    return BANK[torch.tensor(numbers, dtype=torch.int64, device=DEVICE)]


class Token(NamedTuple):
    """A token: its number in the bank, and whether its key was rotated to its position."""

    number: int
    rotated: bool


@dataclass
class Row:
    """What a sequence holds.

    Attributes:
        tokens: all of its tokens.
        lost: how many of the first ones were evicted.
        window: keys that later queries may see before their own, where some were.
    """

    tokens: list[Token] = field(default_factory=list)
    lost: int = 0
    window: int = MAX_SEQLEN

    def can_be_cut_to(self, length: int) -> bool:
        """Whether a query at that position finds all keys of its window."""
        return length == 0 or max(0, length - self.window) >= self.lost

    def lengths(self) -> st.SearchStrategy[int]:
        """Lengths to cut to, one too many among them; most often those around what is allowed."""
        n, shortest = len(self.tokens), self.lost + self.window
        edges = {0, 1, self.lost, shortest - 1, shortest, n - 1, n, n + 1}
        return st.one_of(st.sampled_from(sorted(edges & {*range(n + 2)})), st.integers(0, n + 1))

    def cut(self, length: int) -> Row:
        return Row(self.tokens[:length], self.lost if length else 0, self.window)

    def keys(self) -> torch.Tensor:
        """(tokens, head_dim), as they are stored."""
        plain = bank([token.number for token in self.tokens])
        at = torch.arange(len(plain), device=DEVICE)
        turned = append_kv.rotated(plain[:, None], at, ROTARY.cos, ROTARY.sin, False)[:, 0]
        rotated = torch.tensor([t.rotated for t in self.tokens], dtype=torch.bool, device=DEVICE)
        return torch.where(rotated[:, None], turned, plain)

    def values(self) -> torch.Tensor:
        return -bank([token.number for token in self.tokens])


Refusal = type[Exception] | tuple[type[Exception], ...] | None


class Around(NamedTuple):
    """How a step is carried out.

    Attributes:
        inference_mode: whether torch's mode is on.
        in_thread: whether another thread does it.
        fails_at: which of torch's operations runs out of memory; 0 for none.
        by_kernel: whether appends go through the Triton kernel, where that is interpreted.
    """

    inference_mode: bool
    in_thread: bool
    fails_at: int
    by_kernel: bool


AROUND = st.builds(
    Around,
    st.booleans(),
    st.integers(0, 7).map(lambda n: n == 0),
    st.integers(-40, 24).map(lambda n: max(n, 0)),
    st.integers(0, 24).map(lambda n: n == 0),
)
COUNT = st.integers(0, 9)
# Numbers of a caller gone wrong: of any size, and of types that are no integers.
WRONG = st.one_of(
    st.sampled_from([INT_MIN, INT_MAX, -1, 2**70, MAX_BATCH, MAX_SEQLEN + 1]),
    st.integers(INT_MIN, INT_MAX),
    st.sampled_from([1.5, 2.0, True, None, "1", torch.tensor(1)]),
)


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.happened: Counter[str] = HAPPENED
        self.rows: dict[int, Row] = {}
        self.next = 0

    @initialize(page_size=st.sampled_from(list(NUM_PAGES)), inference_mode=st.booleans())
    def make(self, page_size: int, inference_mode: bool) -> None:
        with torch.inference_mode(inference_mode):
            self.cache = PagedKVCache(
                num_pages=NUM_PAGES[page_size], page_size=page_size, num_heads_kv=1, head_dim=HEAD_DIM,
                max_batch=MAX_BATCH, max_seqlen=MAX_SEQLEN, dtype=torch.float32, device=DEVICE,
            )  # fmt: skip
        self.addresses = self._addresses()

    # How a step is carried out ---------------------------------------------------------------------------------------

    def _addresses(self) -> list[int]:
        c = self.cache
        return [t.data_ptr() for t in (c.page_table, c.seqused_k, c.k, c.v)]

    def step(self, name: str, around: Around, call: Callable[[], Any], refused: Refusal = None) -> Any:
        """Carries out a call. It must end with the error that the model expects, or with the one that was injected;
        then the cache is as it was and the result is `FAILED`."""
        before = visible(self.cache)
        result, error = self._carried_out(around, call)
        if error is None:
            assert refused is None, f"{name} was accepted"
            self.happened[name] += 1
            return result
        assert visible(self.cache) == before, f"{name} raised {error!r}, and the cache has changed"
        if isinstance(error, torch.OutOfMemoryError):
            assert around.fails_at
            self.happened["failed operation"] += 1
        else:
            assert refused is not None and isinstance(error, refused), f"{name} raised {error!r}"
            self.happened[f"{name.split()[0]}: {type(error).__name__}"] += 1
        return FAILED

    def _carried_out(self, around: Around, call: Callable[[], Any]) -> tuple[Any, Exception | None]:
        found: list[tuple[Any, Exception | None]] = []

        def work() -> None:
            failing = FailsAt(around.fails_at) if around.fails_at else contextlib.nullcontext()
            try:
                with torch.inference_mode(around.inference_mode), failing:
                    found.append((call(), None))
            except Exception as error:
                found.append((None, error))

        with self._appends_by(around.by_kernel):
            if around.in_thread:
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
            else:
                work()
        return found[0]

    @contextlib.contextmanager
    def _appends_by(self, kernel: bool) -> Iterator[None]:
        interpreted, append_kv.INTERPRETED = append_kv.INTERPRETED, kernel and append_kv.INTERPRETED
        try:
            yield
        finally:
            append_kv.INTERPRETED = interpreted

    def some(self, data: st.DataObject, least: int = 1) -> list[int]:
        """Distinct rows that hold sequences, in any order."""
        rows = sorted(self.rows)
        return data.draw(st.lists(st.sampled_from(rows), min_size=min(least, len(rows)), unique=True))

    def new(self, n: int, rotated: bool) -> list[Token]:
        self.next += n
        return [Token(number % len(BANK), rotated) for number in range(self.next - n, self.next)]

    def pages_for(self, rows: list[int], counts: list[int]) -> int:
        """Pages that an extension takes: whole new ones, and a copy of each shared page for each writer but the last of
        its holders."""
        size, held = self.cache.page_size, Counter(page for row in self.rows for page in self.cache.pages(row))
        needed, writers = 0, Counter[int]()
        for row, count in zip(rows, counts, strict=True):
            n = len(self.rows[row].tokens)
            needed += -(-(n + count) // size) - -(-n // size)
            if count and n % size:
                writers[self.cache.pages(row)[-1]] += 1
        return needed + sum(min(n, held[page] - 1) for page, n in writers.items())

    def why_not_grow(self, rows: list[int], counts: list[int]) -> Refusal:
        if any(len(self.rows[row].tokens) + n > MAX_SEQLEN for row, n in zip(rows, counts, strict=True)):
            return InvalidInput
        return OutOfPages if self.pages_for(rows, counts) > self.cache.num_free_pages else None

    # Sequences come and go -------------------------------------------------------------------------------------------

    @rule(around=AROUND)
    @precondition(lambda self: len(self.rows) < MAX_BATCH)
    def add(self, around: Around) -> None:
        row = self.step("add", around, self.cache.add)
        if row is not FAILED:
            assert row not in self.rows
            self.rows[row] = Row()

    @rule(around=AROUND, data=st.data(), whole=st.booleans())
    @precondition(lambda self: self.rows)
    def fork(self, around: Around, data: st.DataObject, whole: bool) -> None:
        parent = self.some(data)[0]
        held = self.rows[parent]
        n = len(held.tokens)
        length = None if whole else data.draw(held.lengths())
        end = n if length is None else length
        allowed = end <= n and len(self.rows) < MAX_BATCH and held.can_be_cut_to(end)
        row = self.step("fork", around, lambda: self.cache.fork(parent, length), None if allowed else InvalidInput)
        if row is not FAILED:
            assert row not in self.rows
            self.rows[row] = held.cut(end)

    @rule(around=AROUND, data=st.data())
    @precondition(lambda self: self.rows)
    def free(self, around: Around, data: st.DataObject) -> None:
        rows = self.some(data, 0)[: data.draw(st.integers(0, 2))]
        one = len(rows) == 1 and data.draw(st.booleans())
        if self.step("free", around, lambda: self.cache.free(rows[0] if one else rows)) is not FAILED:
            for row in rows:
                del self.rows[row]

    @rule(around=AROUND, data=st.data())
    @precondition(lambda self: self.rows)
    def truncate(self, around: Around, data: st.DataObject) -> None:
        row = self.some(data)[0]
        n = len(self.rows[row].tokens)
        length = data.draw(self.rows[row].lengths())
        allowed = length <= n and self.rows[row].can_be_cut_to(length)
        done = self.step(
            "truncate", around, lambda: self.cache.truncate(row, length), None if allowed else InvalidInput
        )
        if done is not FAILED:
            self.rows[row] = self.rows[row].cut(length)

    @rule(around=AROUND, data=st.data(), window=st.integers(0, 12), back=st.integers(0, 6))
    @precondition(lambda self: self.rows)
    def evict(self, around: Around, data: st.DataObject, window: int, back: int) -> None:
        rows, size = self.some(data), self.cache.page_size
        held = [self.rows[row] for row in rows]
        allowed = all(max(0, len(h.tokens) - window) >= h.lost for h in held)
        free = self.cache.num_free_pages
        freed = self.step(
            "evict", around, lambda: self.cache.evict(rows, window, back), None if allowed else InvalidInput
        )
        if freed is not FAILED:
            assert self.cache.num_free_pages == free + freed
            for row, h in zip(rows, held, strict=True):
                lost = max(0, len(h.tokens) - back - window) // size * size
                self.rows[row] = replace(h, lost=max(h.lost, lost), window=window if lost or h.lost else MAX_SEQLEN)

    # Tokens come -----------------------------------------------------------------------------------------------------

    @rule(around=AROUND, data=st.data(), one_count=st.booleans())
    @precondition(lambda self: self.rows)
    def extend(self, around: Around, data: st.DataObject, one_count: bool) -> None:
        """Lengths first, and the tokens by a call on the layer, as models of several layers do it."""
        rows = self.some(data, 0)
        counts = [data.draw(COUNT)] * len(rows) if one_count else [data.draw(COUNT) for _ in rows]
        needed, refused = self.pages_for(rows, counts), self.why_not_grow(rows, counts)
        free = self.cache.num_free_pages
        said = counts[0] if one_count and rows else counts
        if self.step("extend", around, lambda: self.cache.extend(rows, said), refused) is FAILED:
            return
        assert self.cache.num_free_pages == free - needed
        added = [self.new(n, False) for n in counts]
        for row, more in zip(rows, added, strict=True):
            self.rows[row].tokens += more
        numbers = [token.number for more in added for token in more]
        if numbers:
            offsets = torch.tensor([0, *counts], device=DEVICE).cumsum(0).to(torch.int32)
            k = bank(numbers)[:, None]
            attention_with_kv_cache(
                k, self.cache.layers[0], rows=self.cache.index(rows), k_new=k, v_new=-k, cu_seqlens_q=offsets,
                max_seqlen_q=max(counts),
            )  # fmt: skip

    @rule(around=AROUND, data=st.data(), packed=st.booleans(), rotated=st.booleans())
    @precondition(lambda self: self.rows)
    def append(self, around: Around, data: st.DataObject, packed: bool, rotated: bool) -> None:
        self._append(around, data, packed, rotated, attends=False)

    @rule(around=AROUND, data=st.data(), packed=st.booleans(), rotated=st.booleans())
    @precondition(lambda self: self.rows)
    def attend(self, around: Around, data: st.DataObject, packed: bool, rotated: bool) -> None:
        self._append(around, data, packed, rotated, attends=True)

    def _append(self, around: Around, data: st.DataObject, packed: bool, rotated: bool, attends: bool) -> None:
        rows = self.some(data)
        counts = [data.draw(COUNT) for _ in rows] if packed else [data.draw(COUNT)] * len(rows)
        needed, refused = self.pages_for(rows, counts), self.why_not_grow(rows, counts)
        free = self.cache.num_free_pages
        added = [self.new(n, rotated) for n in counts]
        k = bank([token.number for more in added for token in more])[:, None]
        k = k if packed else k.unflatten(0, (len(rows), counts[0]))
        offsets = torch.tensor([0, *counts], device=DEVICE).cumsum(0).to(torch.int32)
        # A gradient that somebody wants elsewhere does not matter here.
        k = k.requires_grad_(not around.inference_mode and data.draw(st.booleans()))
        rotary = ROTARY if rotated else None
        window = min(self.rows[row].window for row in rows)
        k_new = torch._neg_view(-k) if data.draw(st.booleans()) else k  # not negated before somebody reads it
        given = offsets if packed and data.draw(st.booleans()) else None

        def attend() -> torch.Tensor:
            lengths: dict[str, Any] = {"cu_seqlens_q": offsets, "seqlens_q": counts} if packed else {}
            out: torch.Tensor = attention_with_kv_cache(
                k.detach(), self.cache, rows=rows, k_new=k_new, v_new=-k, causal=True, window_size=(window, -1),
                rotary=rotary, checked=True, **lengths,
            )  # fmt: skip
            return out

        def append() -> None:
            self.cache.append(rows, k_new, -k, cu_seqlens=given, counts=counts if packed else None, rotary=rotary)

        out = self.step("attend" if attends else "append", around, attend if attends else append, refused)
        if out is FAILED:
            return
        assert self.cache.num_free_pages == free - needed
        for row, more_tokens in zip(rows, added, strict=True):
            self.rows[row].tokens += more_tokens
        if attends:
            self.check_attention(rows, counts, k.detach().reshape(-1, HEAD_DIM), out, rotated, window)

    @rule(around=AROUND, data=st.data(), n=st.integers(1, 3), rotated=st.booleans())
    @precondition(lambda self: self.rows)
    def attend_again(self, around: Around, data: st.DataObject, n: int, rotated: bool) -> None:
        """The last tokens ask, and nothing is written."""
        rows = [row for row in self.some(data) if len(self.rows[row].tokens) >= n]
        window = min((self.rows[row].window for row in rows), default=0)
        rows = [r for r in rows if max(0, len(self.rows[r].tokens) - n - window) >= self.rows[r].lost]
        if not rows:
            return
        q = BANK[: len(rows) * n].view(len(rows), n, 1, HEAD_DIM)
        before = visible(self.cache)

        def call() -> torch.Tensor:
            out: torch.Tensor = attention_with_kv_cache(
                q, self.cache, rows=rows, causal=True, window_size=(window, -1), rotary=ROTARY if rotated else None,
                checked=True,
            )  # fmt: skip
            return out

        out = self.step("attend again", around, call)
        assert visible(self.cache) == before
        if out is not FAILED:
            self.check_attention(rows, [n] * len(rows), q.reshape(-1, HEAD_DIM), out, rotated, window)

    def check_attention(
        self, rows: list[int], counts: list[int], q: torch.Tensor, out: torch.Tensor, rotated: bool, window: int
    ) -> None:
        """The output of queries that are the last tokens of their rows, against the formula in float64."""
        out, at = out.detach().reshape(-1, HEAD_DIM), 0
        for row, count in zip(rows, counts, strict=True):
            held = self.rows[row]
            n = len(held.tokens)
            position = torch.arange(n - count, n, device=DEVICE)
            asked = q[at : at + count]
            if rotated:
                asked = append_kv.rotated(asked[:, None], position, ROTARY.cos, ROTARY.sin, False)[:, 0]
            keys = torch.arange(n, device=DEVICE)
            seen = (keys <= position[:, None]) & (keys >= position[:, None] - window)
            assert not seen[:, : held.lost].any()
            scores = (asked.double() @ held.keys().double().T) * HEAD_DIM**-0.5
            p = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
            expected = p @ held.values().double()
            torch.testing.assert_close(out[at : at + count].double(), expected, atol=1e-5, rtol=1e-5)
            at += count

    # What else is public ---------------------------------------------------------------------------------------------

    @rule(around=AROUND, data=st.data())
    @precondition(lambda self: self.rows)
    def index(self, around: Around, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, MAX_BATCH - 1), max_size=4))
        found = self.step("index", around, lambda: self.cache.index(rows))
        if found is not FAILED:
            assert found.tolist() == rows and found.dtype == torch.int32
            assert self.cache.index(tuple(rows)) is found

    @rule(data=st.data())
    @precondition(lambda self: self.rows)
    def shared_prefix(self, data: st.DataObject) -> None:
        """Never more than the sequences have in common, and not less than the whole pages that a fork shares."""
        rows = self.some(data, 2)
        shared = self.cache.shared_prefix(rows)
        held = [self.rows[row] for row in rows]
        assert all(h.tokens[:shared] == held[0].tokens[:shared] and len(h.tokens) >= shared for h in held)
        if any(h.lost for h in held):
            assert shared == 0
        elif rows:
            assert (
                shared >= len(self.cache.pages(rows[0])) * self.cache.page_size
                or len(rows) > 1
                or (shared == len(held[0].tokens))
            )

    # Callers gone wrong ----------------------------------------------------------------------------------------------

    @rule(around=AROUND, data=st.data(), wrong=WRONG)
    @precondition(lambda self: self.rows)
    def wrong_call(self, around: Around, data: st.DataObject, wrong: Any) -> None:
        """A number that is none in the place of a row, a length or a count."""
        cache, row = self.cache, self.some(data)[0]
        x = BANK[:2].view(1, 2, 1, HEAD_DIM)
        offsets = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
        no_length: Any = "" if wrong is None else _no_count(wrong)
        bad_row = wrong if wrong not in self.rows or wrong is True or wrong == 2.0 else -1
        calls: dict[str, Callable[[], Any]] = {
            "row of free": lambda: cache.free([bad_row]),
            "row of fork": lambda: cache.fork(bad_row),
            "row of truncate": lambda: cache.truncate(bad_row, 0),
            "row of extend": lambda: cache.extend([bad_row], 1),
            "row of append": lambda: cache.append([bad_row], x, x),
            "row of pages": lambda: cache.pages(bad_row),
            "row of attention": lambda: attention_with_kv_cache(x, cache, rows=[bad_row], k_new=x, v_new=x),
            "row named twice": lambda: cache.extend([row, row], 1),
            "row named twice to free": lambda: cache.free([row, row]),
            "count": lambda: cache.extend([row], [_no_count(wrong)]),
            "counts": lambda: cache.append([row], x[0], x[0], counts=[_no_count(wrong)]),
            "length of fork": lambda: cache.fork(row, no_length),
            "length of truncate": lambda: cache.truncate(row, _no_count(wrong)),
            "window": lambda: cache.evict(row, wrong if not _is_natural(wrong) else -wrong - 1),
            "max_truncate": lambda: cache.evict(row, 3, wrong if not _is_natural(wrong) else -wrong - 1),
            "seqlens_q": lambda: attention_with_kv_cache(
                x[0], cache, rows=[row], k_new=x[0], v_new=x[0], seqlens_q=[_no_count(wrong)], cu_seqlens_q=offsets),
            "values of other tokens": lambda: cache.append([row], x, x[:, :1]),
            "keys of another dtype": lambda: cache.append([row], x.half(), x),
            "an option": lambda: attention_with_kv_cache(x, cache, rows=[row], k_new=x, v_new=x, softcap=-1.0),
            "offsets of other lengths": lambda: attention_with_kv_cache(
                x[0], cache, rows=[row], k_new=x[0], v_new=x[0], seqlens_q=[2], checked=True,
                cu_seqlens_q=torch.tensor([0, wrong if _is_int32(wrong) else 1], dtype=torch.int32, device=DEVICE)),
        }  # fmt: skip
        name = data.draw(st.sampled_from(sorted(calls)))
        self.step(f"wrong {name}", around, calls[name], (InvalidInput, InvalidType, OutOfPages))

    # What holds after every step -------------------------------------------------------------------------------------

    @invariant()
    def books(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.happened["steps"] += 1
        cache = self.cache
        assert cache.rows == sorted(self.rows)
        assert cache.lengths == {row: len(self.rows[row].tokens) for row in sorted(self.rows)}
        check_books(cache)
        assert len(set(cache._free)) == len(cache._free) == cache.num_free_pages
        assert self._addresses() == self.addresses
        assert not (cache.k.requires_grad or cache.v.requires_grad)
        for row, held in self.rows.items():
            assert cache.pages(row).count(-1) * cache.page_size == held.lost
            k, v = read(cache, row, held.lost)
            assert torch.equal(v[:, 0], held.values()[held.lost :])
            torch.testing.assert_close(k[:, 0], held.keys()[held.lost :], atol=1e-6, rtol=0)


FAILED = object()
HAPPENED: Counter[str] = Counter()
METHODS = ("add", "fork", "free", "truncate", "evict", "extend", "append", "attend", "attend again", "index")
ERRORS = (
    "failed operation", "append: OutOfPages", "extend: OutOfPages", "attend: OutOfPages", "append: InvalidInput",
    "fork: InvalidInput", "truncate: InvalidInput", "evict: InvalidInput", "wrong: InvalidInput", "wrong: InvalidType",
)  # fmt: skip


def _is_natural(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_int32(value: Any) -> bool:
    return type(value) is int and INT_MIN <= value <= INT_MAX and value != 2


def _no_count(value: Any) -> Any:
    """A number that is no count of tokens here."""
    return value if not _is_natural(value) or value > MAX_SEQLEN else MAX_SEQLEN + 1 + value


def test_the_cache_is_what_lists_of_tokens_say(monkeypatch: pytest.MonkeyPatch) -> None:
    HAPPENED.clear()
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=STEPS // 25, stateful_step_count=STEPS_OF_A_RUN, derandomize=True, deadline=None,
            database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
        ),
    )  # fmt: skip
    print(dict(HAPPENED.most_common()))
    assert HAPPENED["steps"] >= STEPS
    assert all(HAPPENED[name] for name in METHODS), HAPPENED
    if STEPS >= 10_000:
        assert all(HAPPENED[name] for name in ERRORS), HAPPENED
