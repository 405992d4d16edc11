"""Which calls find a plan by `plans.recall`."""

from __future__ import annotations

from typing import Any

import pytest

from warpwave import plans


def forget() -> None:
    """Forgets which calls were made before, but not their plans."""
    plans._classes.clear()
    plans._last.clear()


@pytest.fixture
def recalled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call was recalled, without reading its tensors' layouts one by one."""
    seen: list[bool] = []
    recall = plans.recall

    def watch(*arguments: Any) -> Any:
        run = recall(*arguments)
        seen.append(run is not None)
        return run

    monkeypatch.setattr(plans, "recall", watch)
    forget()
    return seen
