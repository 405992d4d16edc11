"""`Bounded`: a dict that evicts the least recently used entry, safe to use from several threads."""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(Generic[K, V]):
    """A dict of at most `limit` entries; `put` evicts the least recently used one (LRU).

    Time is counted in calls of `put`, so `get` takes no lock and hashes its key once. `put` sorts the entries by their
    last use once for many evictions, and skips those that were used since.

    Args:
        limit: the most entries.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: dict[K, list[Any]] = {}  # [value, time of the last use]
        self._puts = 0
        self._oldest: list[tuple[K, int]] = []  # keys and times of the last use, the oldest at the end
        self._lock = threading.Lock()  # a dict must not change in one thread while another one iterates over it

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Returns the entry of a key, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry[1] = self._puts
        value: V = entry[0]
        return value

    def clear(self) -> None:
        """Drops all entries."""
        with self._lock:
            self._entries.clear()
            self._oldest.clear()

    def put(self, key: K, value: V) -> None:
        """Stores an entry as the latest one."""
        with self._lock:
            self._entries.pop(key, None)
            while len(self._entries) >= self.limit:
                self._evict()
            self._puts += 1
            self._entries[key] = [value, self._puts]

    def _evict(self) -> None:
        """Drops the entry at the end of `_oldest`, unless it was used meanwhile."""
        if not self._oldest:
            used = sorted(((key, entry[1]) for key, entry in self._entries.items()), key=lambda each: each[1])
            self._oldest = used[len(used) // 2 :: -1]
        key, used_last = self._oldest.pop()
        entry = self._entries.get(key)
        if entry is not None and entry[1] == used_last:
            del self._entries[key]
