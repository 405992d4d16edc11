"""Paged caches of keys and values: `PagedKVCache` and its host records, a layer's tensors, and the tokens written to
them."""

from warpwave.kv_cache.cache import PagedKVCache
from warpwave.kv_cache.contents import check_cache_contents
from warpwave.kv_cache.tokens import (
    CacheLayer,
    Rotary,
    check_counts,
    check_positions,
    integers,
    new_tokens,
    values_in,
)

__all__ = [
    "CacheLayer",
    "PagedKVCache",
    "Rotary",
    "check_cache_contents",
    "check_counts",
    "check_positions",
    "integers",
    "new_tokens",
    "values_in",
]
