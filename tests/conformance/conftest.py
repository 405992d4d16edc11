"""Fixtures of the conformance tests: uninitialized memory holds NaN, small calls are cut as large ones are, and tests
that need much memory take turns."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from warpwave.kernels.three_kernel import plan
from warpwave.runtime import scratch


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills every uninitialized allocation of torch with NaN (integers: the largest value).

    torch has a switch for this (`torch.utils.deterministic.fill_uninitialized_memory`), but it comes with
    deterministic algorithms, which are not what users run.
    """
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    monkeypatch.setattr(scratch, "empty_strided", poisoned(scratch.empty_strided))


@pytest.fixture(autouse=True)
def rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts the rows of small calls with a band into parts, which three_kernel does with large ones."""
    monkeypatch.setattr(plan, "TWO_STARTS", {2: 1, 4: 1})


def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        if tensor.dtype.is_floating_point:
            return tensor.fill_(torch.nan)
        return tensor if tensor.dtype is torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)

    return allocate_poisoned


@pytest.fixture
def much_memory() -> Iterator[None]:
    """On a GPU, runs one test of many gigabytes at a time, over all of pytest-xdist's processes.

    On a CPU such tests take address space only.
    """
    if not torch.cuda.is_available():
        yield
        return
    import fcntl  # not on Windows, where no GPU kernel runs either

    with (Path(tempfile.gettempdir()) / "warpwave-tests-much-memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()
