"""Bound launchers: that they launch what was compiled, and refuse in words what cannot be launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warpwave
from warpwave import launch
from warpwave.kernels import flash_fwd

CONFIG = flash_fwd.Config(32, 32, 4, 1)


def qkv(device: str = "cpu", seqlen: int = 40, head_dim: int = 16, dtype: torch.dtype = torch.float16) -> list[Any]:
    return [torch.randn(2, seqlen, 2, head_dim, device=device, dtype=dtype) for _ in range(3)]


@pytest.mark.gpu
def test_a_bound_launcher_gives_the_bits_of_tritons_own_call() -> None:
    """Twice through the bound launcher, once through the public call path, which a listening profiler asks for."""
    from warpwave.kernels.triton_or_stub import triton

    q, k, v = qkv("cuda")
    first = warpwave.attention(q, k, v, kernel="flash_fwd", config=CONFIG)
    again = warpwave.attention(q, k, v, kernel="flash_fwd", config=CONFIG)
    heard: list[str] = []
    hook = triton.knobs.runtime.launch_enter_hook

    def listen(metadata: Any) -> None:
        heard.append(metadata.get()["name"])

    hook.add(listen)
    try:
        public = warpwave.attention(q, k, v, kernel="flash_fwd", config=CONFIG)
    finally:
        hook.remove(listen)
    assert heard == ["flash_fwd_kernel"], "a profiler must see the launch"
    assert torch.equal(first, again) and torch.equal(first, public)


@pytest.mark.gpu
def test_a_config_that_does_not_fit_is_refused_in_words() -> None:
    q, k, v = qkv("cuda", seqlen=512, head_dim=256)
    with pytest.raises(warpwave.UnsupportedProblem, match=r"does not fit this GPU[\s\S]*smaller block_m or block_n"):
        warpwave.attention(q, k, v, kernel="flash_fwd", config=flash_fwd.Config(128, 128, 8, 4))


@pytest.mark.gpu
def test_a_new_length_compiles_nothing() -> None:
    """Lengths in the code, or in the alignment of a batch stride, would stall a server at every new request."""
    warpwave.attention(*qkv("cuda", seqlen=40), causal=True, return_lse=True, kernel="flash_fwd", config=CONFIG)
    compiled = set(launch._compiled)
    for seqlen in (1, 33, 48, 1000):
        warpwave.attention(*qkv("cuda", seqlen=seqlen), causal=True, return_lse=True, kernel="flash_fwd", config=CONFIG)
    assert launch._compiled == compiled


class _Run:
    """Stands for `compiled.run` of one Triton version."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = "cooperative", "pdl"
    arg_annotations, kernel_signature = "annotations", "signature"

    def __init__(self) -> None:
        self.called: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.called.append(("run", *arguments))

    def launch(self, *arguments: Any) -> None:
        self.called.append(("launch", *arguments))


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (
            "3.6.0",
            (
                "launch",
                7,
                1,
                1,
                "stream",
                "function",
                "cooperative",
                "pdl",
                None,
                None,
                "metadata",
                None,
                None,
                None,
                1,
                2,
            ),
        ),
        (
            "3.9.1",
            (
                *("launch", 7, 1, 1, "stream", "function", "cooperative", "pdl", "metadata"),
                *(None, None, None, None, None, "annotations", "signature", (1, 2)),
            ),
        ),
        ("4.0.0", ("run", 7, 1, 1, "stream", "function", "metadata", None, None, None, 1, 2)),
    ],
)
def test_an_unknown_triton_is_started_by_its_public_call(
    version: str, expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.triton, "__version__", version)
    run = _Run()
    launch.starter(run, run.launch, "function", "metadata")(7, "stream", (1, 2))  # type: ignore[arg-type]
    assert run.called == [expected]


@pytest.mark.parametrize("wish", ["global_scratch_size", "profile_scratch_size", "gsan_enabled"])
def test_what_triton_has_to_allocate_goes_through_its_own_call(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.triton, "__version__", "3.6.0")
    run = _Run()
    setattr(run, wish, 64)
    launch.starter(run, run.launch, "function", "metadata")(7, "stream", ())  # type: ignore[arg-type]
    assert run.called[0][0] == "run"
