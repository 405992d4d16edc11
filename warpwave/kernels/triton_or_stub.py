"""Triton where it is installed; elsewhere names that let a kernel file be read but not launched.

Triton has no build for macOS and Windows, yet what a kernel can do, costs and how it is configured is stated in the
kernel's own file and asked for on any machine.
"""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl

    jit = triton.jit
    TRITON_VERSION: str | None = triton.__version__
    INTERPRETED = bool(triton.knobs.runtime.interpret)
except ImportError:

    class _Stub:
        """Stands for any attribute of Triton in annotations and decorators."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self

    triton = tl = jit = _Stub()
    TRITON_VERSION = None
    INTERPRETED = False

__all__ = ["INTERPRETED", "TRITON_VERSION", "jit", "tl", "triton"]
