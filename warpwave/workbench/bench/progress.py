"""How far a run has come: on a terminal one line that is rewritten, elsewhere one line a case.

Written by hand, for rich's live displays refresh from a thread of their own, which would share the interpreter lock
with host timings.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from warpwave.workbench.terminal import printable, say

BAR_WIDTH = 20
CLEAR_LINE = "\r\033[K"


class Progress:
    """Cases done, of how many, and about how long the rest will take.

    Args:
        total: cases to measure.
        stream: where it goes; standard error if None, so that tables and records can be piped.
        clock: seconds.
    """

    def __init__(self, total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock = total, clock
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._started, self._done, self._case = clock(), 0, ""

    def begin(self, case: str) -> None:
        """A case starts."""
        self._case = case
        if self._terminal:
            self.say("")
        else:
            left = self._left()
            say(f"{self._done + 1}/{self._total} {case}{f' ({left})' if left else ''}", to=self._stream, flush=True)

    def say(self, detail: str) -> None:
        """What is under way in it: seen on a terminal alone."""
        if not self._terminal:
            return
        filled = BAR_WIDTH * self._done // max(1, self._total)
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        parts = [f"[{bar}] {self._done + 1}/{self._total} {self._case}", detail, self._left()]
        line = printable(", ".join(part for part in parts if part))
        # A line that the terminal breaks in two could not be cleared.
        self._write(CLEAR_LINE + line[: shutil.get_terminal_size().columns - 1])

    def finish(self) -> None:
        """The case is done."""
        self._done += 1
        self.clear()

    def clear(self) -> None:
        """Leave the line empty for what is printed next."""
        if self._terminal:
            self._write(CLEAR_LINE)

    def _write(self, controls: str) -> None:
        say(end=controls, to=self._stream, flush=True)

    def _left(self) -> str:
        if self._done == 0:
            return ""
        seconds = (self._clock() - self._started) / self._done * (self._total - self._done)
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"
