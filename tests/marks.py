"""Marks that several tests carry."""

from __future__ import annotations

import pytest

from warpwave.runtime.triton_or_stub import NO_TRITON

needs_triton = pytest.mark.skipif(NO_TRITON is not None, reason="Triton is published for Linux only")
