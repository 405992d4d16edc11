"""Triton if it is installed; otherwise names that let a kernel file be imported but not launched.

Triton has no build for macOS and Windows, but each kernel file states what the kernel can do, what it costs and how it
is configured, and these must be available on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

try:
    import triton
    import triton.language as tl

    jit = triton.jit
    _version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    # None, or why no kernel may be launched. Names and launchers differ below and above this range.
    NO_TRITON = None if (3, 6) <= _version < (3, 10) else f"found Triton {triton.__version__}; it needs >= 3.6, < 3.10"
    INTERPRETED = NO_TRITON is None and bool(triton.knobs.runtime.interpret)
except ImportError:

    @dataclass(frozen=True)
    class _Constexpr:
        """Replaces a compile-time constant: claims, configs and costs read its value."""

        value: Any

    class _Stub:
        """Replaces any attribute of Triton in annotations and decorators."""

        constexpr = _Constexpr

        @staticmethod
        def constexpr_function(function: Any) -> Any:
            """Returns the function, which the host calls too."""
            return function

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self

    triton = tl = jit = _Stub()
    NO_TRITON = "Triton is not installed (it is published for Linux only); it needs >= 3.6, < 3.10"
    INTERPRETED = False

__all__ = ["INTERPRETED", "NO_TRITON", "jit", "tl", "triton"]
