"""Marks that several tests carry."""

from __future__ import annotations

import pytest

from warpwave.runtime.triton_or_stub import NO_TRITON

needs_triton = pytest.mark.skipif(NO_TRITON is not None, reason="Triton is published for Linux only")


def one_in(cases: int) -> pytest.MarkDecorator:
    """Without a GPU, runs one of each `cases` consecutive cases of a slow test, the first to the last in turn, so that
    an axis of `cases` values is met with all of them. `make test-full` runs all cases."""
    return pytest.mark.one_in(cases)
