"""`Bounded`: a dict that forgets its oldest entry, safe to use from several threads."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(Generic[K, V]):
    """A dict of at most `limit` entries; `put` drops the oldest ones.

    Args:
        limit: the most entries.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: dict[K, V] = {}
        self._lock = threading.Lock()  # a dict must not change in one thread while another one iterates over it

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Returns the entry of a key, or None."""
        return self._entries.get(key)

    def clear(self) -> None:
        """Drops all entries."""
        with self._lock:
            self._entries.clear()

    def put(self, key: K, value: V) -> None:
        """Stores an entry as the latest one."""
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = value
            while len(self._entries) > self.limit:
                del self._entries[next(iter(self._entries))]
