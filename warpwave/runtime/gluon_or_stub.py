"""Gluon where Triton has it, under one set of names: what Triton 3.6 to 3.9 call differently, and nothing else.

Without Triton every name is a stub, as in `triton_or_stub`, so that a kernel's claims and costs can be asked anywhere.
"""

from __future__ import annotations

from typing import Any

from warpwave.runtime.triton_or_stub import NO_TRITON, tl

if NO_TRITON is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.language.core import _aggregate as aggregate  # `gluon.aggregate` from 3.8 on

    # Renamed in 3.8; the old names raise from 3.9 on.
    tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
    tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
    block_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
    # What comes with 3.9 spills in loops over keys where half of Q stays in registers (hopper/flash_fwd/config.py).
    Q_FITS_REGISTERS = not hasattr(tma, "async_load")
    constexpr_function = gluon.constexpr_function
    jit: Any = gluon.jit
else:
    gluon = gl = mbarrier = tma = jit = constexpr_function = aggregate = tl
    fence_async_shared = warpgroup_mma = warpgroup_mma_wait = tma_load = tma_store = TensorDescriptor = tl
    block_barrier = tl
    Q_FITS_REGISTERS = True

__all__ = [
    "Q_FITS_REGISTERS",
    "TensorDescriptor",
    "aggregate",
    "block_barrier",
    "constexpr_function",
    "fence_async_shared",
    "gl",
    "jit",
    "mbarrier",
    "tma",
    "tma_load",
    "tma_store",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
