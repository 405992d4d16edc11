"""For every conformance test: memory that nobody wrote holds NaN, so that a cell left unwritten shows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every allocation torch leaves uninitialised is filled with NaN (the largest integer, for integers).

    torch has a switch for this (`torch.utils.deterministic.fill_uninitialized_memory`), but it comes with
    deterministic algorithms, which are not what users run.
    """
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        if tensor.dtype.is_floating_point:
            return tensor.fill_(torch.nan)
        return tensor if tensor.dtype is torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)

    return allocate_poisoned
