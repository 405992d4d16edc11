"""`split_kv`: keys split over thread blocks, for decode, paged caches and prompts of few rows.

Bound: memory at decode, latency if the cache is short (host.py).
"""

from warpwave.kernels.split_kv.host import (
    NAME,
    NEEDS_GPU,
    Binder,
    Config,
    bind,
    bind_with_prefix,
    choose_splits,
    configs,
    cost,
    default,
    notes,
    outrun,
    smem_bytes,
    specify,
    why_not,
)

__all__ = [
    "NAME",
    "NEEDS_GPU",
    "Binder",
    "Config",
    "bind",
    "bind_with_prefix",
    "choose_splits",
    "configs",
    "cost",
    "default",
    "notes",
    "outrun",
    "smem_bytes",
    "specify",
    "why_not",
]
