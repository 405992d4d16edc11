"""Progress of a run: one line that is rewritten on a terminal, one line per case elsewhere.

It does not use rich, whose live displays refresh from another thread: that thread would hold the interpreter lock
during host timings.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from warpwave.workbench.terminal import printable, say

BAR_WIDTH = 20
CLEAR_LINE = "\r\033[K"


class Progress:
    """Shows how many cases are done, and an estimate of the time left.

    Args:
        total: number of cases.
        stream: where the progress is printed; None is standard error, so that tables and records can be piped.
        clock: returns the time in seconds.
    """

    def __init__(self, total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock = total, clock
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._started, self._done, self._case = clock(), 0, ""

    def begin(self, case: str) -> None:
        """Starts a case."""
        self._case = case
        if self._terminal:
            self.say("")
        else:
            left = self._left()
            say(f"{self._done + 1}/{self._total} {case}{f' ({left})' if left else ''}", to=self._stream, flush=True)

    def say(self, detail: str) -> None:
        """Shows the current step of the case, on a terminal only."""
        if not self._terminal:
            return
        filled = BAR_WIDTH * self._done // max(1, self._total)
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        parts = [f"[{bar}] {self._done + 1}/{self._total} {self._case}", detail, self._left()]
        line = printable(", ".join(part for part in parts if part))
        # CLEAR_LINE clears one row of the terminal, so the line must not wrap.
        self._write(CLEAR_LINE + line[: shutil.get_terminal_size().columns - 1])

    def finish(self) -> None:
        """Ends the case."""
        self._done += 1
        self.clear()

    def clear(self) -> None:
        """Empties the line for the next output."""
        if self._terminal:
            self._write(CLEAR_LINE)

    @contextlib.contextmanager
    def logging_apart(self) -> Iterator[None]:
        """Prints the library's warnings on lines of their own: the progress line is cleared before each of them."""
        handler = _Above(self)
        logger = logging.getLogger("warpwave")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    def warn(self, message: str) -> None:
        """Prints a message on a line of its own."""
        self.clear()
        say(message, to=self._stream, flush=True)

    def _write(self, controls: str) -> None:
        say(end=controls, to=self._stream, flush=True)

    def _left(self) -> str:
        if self._done == 0:
            return ""
        seconds = (self._clock() - self._started) / self._done * (self._total - self._done)
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


class _Above(logging.Handler):
    """Prints log messages above the progress line."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.warn(record.getMessage())
