"""The script that measures pages, batch invariance, shared prefixes and host time: all of it runs; wrong ones stop."""

from __future__ import annotations

import pytest
import torch

from benchmarks import serving


def test_every_line_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    serving.main(["--device", "cuda" if torch.cuda.is_available() else "cpu", "--rounds", "1", "--small"])
    pages, invariance, prefix, host = capsys.readouterr().out.splitlines()
    assert pages.startswith("pages of, 2 x 64: contiguous") and all(f"   {n} " in pages for n in (16, 32, 64))
    assert invariance.startswith("batch invariance, 2 x 64") and "batch-invariant" in invariance
    assert prefix.startswith("2 requests share 128 of 192 tokens")
    assert host.startswith("host time, 2 x 64: SDPA") and "and writing to it" in host


def test_a_variant_that_computes_something_else_is_not_timed() -> None:
    one = torch.ones(4)
    with pytest.raises(SystemExit, match="b differs from a by 1"):
        serving.agree({"a": lambda: one, "b": lambda: one * 2})
    serving.agree({"a": lambda: one, "b": lambda: one * 1.001})
