"""The two-head-size model's script, on a CPU: which kernels it names, and that it compares what it says."""

from __future__ import annotations

import pytest
import torch

from benchmarks import two_head_sizes


def test_names_kernels_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--seqlen", "20", "--layers", "6", "--width", "32"]
    assert two_head_sizes.main(options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:4]] == [
        "256, window", "256, window, gradients", "512, all keys", "512, all keys, gradients",
    ]  # fmt: skip
    errors = {line.split(":")[0]: line.split()[2] for line in lines if "from eager's in float32" in line}
    assert set(errors) == {"auto", "eager", "torch"}
    assert all(float(error.rstrip(",")) < 1e-5 for error in errors.values())


def test_a_window_hides_what_lies_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's contender, whose mask is made by hand, beside ours."""
    monkeypatch.setattr(two_head_sizes, "WINDOW", 5)
    q, k, v = two_head_sizes.Layer(16, 8, 4, 2, wide=False).split(torch.randn(1, 12, 16))
    expected = two_head_sizes.ours("eager")(q, k, v, False)
    torch.testing.assert_close(two_head_sizes.by_torch(q, k, v, False), expected)
