import io
import logging

import pytest

from warpwave.workbench.bench.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_a_case_where_there_is_no_terminal() -> None:
    now = [0.0]
    out = io.StringIO()
    progress = Progress(3, out, lambda: now[0])
    progress.begin("a")
    progress.say("round 1 of 9")
    now[0] = 20.0
    progress.finish()
    progress.begin("b")
    now[0] = 600.0
    progress.finish()
    progress.begin("c")
    assert out.getvalue() == "1/3 a\n2/3 b (about 40 s left)\n3/3 c (about 5 min left)\n"


def test_one_rewritten_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    progress = Progress(4, out, lambda: 0.0)
    progress.begin("a")
    progress.say("checking p")
    progress.finish()
    progress.begin("b")
    progress.clear()
    lines = out.getvalue().split("\r\033[K")
    assert "[....................] 1/4 a, checking p" in lines
    assert any(line.startswith("[#####...............] 2/4 b") for line in lines)
    assert "\n" not in out.getvalue() and lines[-1] == ""


def test_a_warning_gets_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, logger = Terminal(), logging.getLogger("warpwave")
    progress = Progress(2, out, lambda: 0.0)
    with progress.logging_apart():
        progress.begin("a")
        logger.warning("attention is served by %s", "eager")
        logger.info("a detail")
        progress.say("round 1 of 9")
    assert "\r\033[Kattention is served by eager\n\r\033[K[....................] 1/2 a, round 1 of 9" in out.getvalue()
    assert "detail" not in out.getvalue()
    shown = out.getvalue()
    logger.warning("afterwards")
    assert out.getvalue() == shown


def test_a_terminal_without_controls_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    progress = Progress(1, out, lambda: 0.0)
    progress.begin("a")
    progress.say("round 1 of 9")
    progress.finish()
    assert out.getvalue() == "1/1 a\n"
