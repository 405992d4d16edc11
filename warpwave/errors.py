"""The errors of public calls, each a subclass of the built-in exception that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class InvalidInput(ValueError):
    """An argument has a value or a shape that no attention call can have."""


class InvalidType(TypeError):
    """An argument has a type or a dtype that no attention call can have."""


class OutOfPages(RuntimeError):
    """A paged cache has too few free pages for an append. Nothing was changed.

    Attributes:
        needed: pages that the call needs.
        free: pages that are free.
    """

    def __init__(self, needed: int, free: int, num_pages: int) -> None:
        self.needed, self.free = needed, free
        self._said = (needed, free, num_pages)
        super().__init__(
            f"{needed} pages are needed and {free} of the cache's {num_pages} are free: free sequences, evict what no "
            "window sees, or make the cache with more pages"
        )

    def __reduce__(self) -> Any:
        return type(self), self._said


class UnsupportedProblem(NotImplementedError):
    """A valid call that the requested kernels cannot run on this device.

    Attributes:
        reasons: kernel name -> every reason that kernel gave.
    """

    def __init__(self, headline: str, reasons: Mapping[str, Sequence[str]], nearest: str = "") -> None:
        self.reasons = {name: list(why) for name, why in reasons.items()}
        self._said = (headline, self.reasons, nearest)
        lines = [headline]
        for name, why in self.reasons.items():
            lines += [f"  {name}: {reason}" for reason in why]
        if nearest:
            lines.append(f"Nearest supported choice: {nearest}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> Any:  # for worker processes; pickle would otherwise pass on only the message
        return type(self), self._said
