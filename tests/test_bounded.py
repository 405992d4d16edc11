"""`Bounded`: how much it keeps, and in how many threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from warpwave.runtime.bounded import Bounded


@pytest.fixture
def threads_that_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_what_was_put_longest_ago_goes_first() -> None:
    kept: Bounded[str, int] = Bounded(2)
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        kept.put(key, value)
    assert [kept.get(key) for key in "abc"] == [3, None, 4] and len(kept) == 2


def test_what_is_used_stays() -> None:
    """A model's hot plan beside any number of lengths that come once."""
    kept: Bounded[object, int] = Bounded(8)
    kept.put("hot", 0)
    for key in range(100):
        kept.put(key, key)
        assert kept.get("hot") == 0 and kept.get(key) == key and len(kept) <= 8
    unused: Bounded[object, int] = Bounded(8)
    for key in ("cold", *range(8)):
        unused.put(key, 0)
    assert unused.get("cold") is None and unused.get(7) == 0


def test_threads_that_put_more_than_is_kept(threads_that_take_turns_often: None) -> None:
    kept: Bounded[int, int] = Bounded(8)
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for key in range(first, first + 4000):
                kept.put(key, key)
                assert kept.get(key) in (key, None)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(10_000 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and len(kept) == 8
