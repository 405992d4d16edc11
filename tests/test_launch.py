"""Bound launchers: that they launch what was compiled, and refuse in words what cannot be launched."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import warpwave
from warpwave.kernels import flash_fwd
from warpwave.runtime import launch

CONFIG = flash_fwd.Config(32, 32, 4, 1)


def qkv(device: str = "cpu", seqlen: int = 40, head_dim: int = 16, dtype: torch.dtype = torch.float16) -> list[Any]:
    return [torch.randn(2, seqlen, 2, head_dim, device=device, dtype=dtype) for _ in range(3)]


@pytest.mark.gpu
def test_a_bound_launcher_gives_the_bits_of_tritons_own_call() -> None:
    """Twice through the bound launcher, once through the public call path, which a listening profiler asks for."""
    from warpwave.runtime.triton_or_stub import triton

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
    compiled = len(launch._variants)
    for seqlen in (1, 33, 48, 1000):
        warpwave.attention(*qkv("cuda", seqlen=seqlen), causal=True, return_lse=True, kernel="flash_fwd", config=CONFIG)
    assert len(launch._variants) == compiled


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash_fwd", "hopper/flash_fwd", "split_kv"])
def test_a_thread_that_never_used_the_device_may_call(kernel: str) -> None:
    """It has no context, and its memory comes from torch's cache: neither a launch nor a tensor map may need one."""
    q, k, v = qkv("cuda", head_dim=64)
    if warpwave.explain(q, k, v).reasons[kernel]:
        pytest.skip(f"{kernel} does not run here")
    expected = warpwave.attention(q, k, v, kernel=kernel)
    copies = [t.clone() for t in (q, k, v)]  # at addresses of which nothing is prepared
    spare = torch.empty_like(expected)
    del spare
    torch.cuda.synchronize()
    outs: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: outs.append(warpwave.attention(*copies, kernel=kernel)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(outs[0], expected)


@pytest.mark.gpu
def test_threads_on_one_stream_do_not_disturb_each_other() -> None:
    """Calls of two and three launches, whose launches come in turns: what one leaves for the next is its own."""
    from concurrent.futures import ThreadPoolExecutor

    def inputs(seed: int) -> list[list[torch.Tensor]]:
        g = torch.Generator("cuda").manual_seed(seed)
        shapes = ((1, 1, 8, 64), (1, 4096, 2, 64), torch.float16), ((1, 300, 2, 64), (1, 300, 2, 64), torch.float32)
        return [
            [torch.randn(*shape, generator=g, device="cuda").to(dtype) for shape in (q, k, k)] for q, k, dtype in shapes
        ]

    def attend(seed: int) -> list[torch.Tensor]:
        return [warpwave.attention(*three) for _ in range(50) for three in inputs(seed)]

    alone = [attend(seed) for seed in range(8)]
    torch.cuda.synchronize()
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(attend, range(8)))
    torch.cuda.synchronize()
    for outs, expected in zip(together, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))


def test_threads_compile_different_variants_at_once_and_each_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread waits for one that compiles the same, and compiles itself if that one failed."""
    fails_once = 2
    compiled: list[int] = []
    both = threading.Barrier(2, timeout=20)  # of variants 0 and 1: neither waits for the other

    def compile_slowly(spec: int, *_: Any) -> int:
        compiled.append(spec)
        if spec != fails_once:
            both.wait()
        elif compiled.count(spec) == 1:
            time.sleep(0.01)
            raise RuntimeError("no memory")
        return spec

    monkeypatch.setattr(launch, "_key_of", lambda spec, *_: spec)
    monkeypatch.setattr(launch, "_compiled_variant", compile_slowly)
    monkeypatch.setattr(launch, "_variants", launch.Bounded(8))

    def variant(spec: Any) -> Any:
        return launch.variant_of(spec, (), torch.device("cpu"))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(variant, [0, 1] * 4)) == [0, 1] * 4
        failing = [pool.submit(variant, fails_once) for _ in range(3)]
    assert sorted(compiled) == [0, 1, fails_once, fails_once]
    assert sum(one.exception() is not None for one in failing) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("requires_grad", [False, True])
def test_warmup_in_threads_leaves_nothing_to_compile(requires_grad: bool) -> None:
    problems = [
        warpwave.AttentionProblem(
            batch=2, seqlen_q=200, seqlen_k=200, num_heads_q=4, num_heads_kv=2, head_dim=head_dim, head_dim_v=head_dim,
            dtype="bfloat16", softmax_scale=0.125, requires_grad=requires_grad,
        )
        for head_dim in (40, 40, 72, 104, 136)
    ]  # fmt: skip
    assert warpwave.warmup(problems, workers=4) == len(problems)
    compiled = len(launch._variants)
    for problem in problems:
        q, k, v = (
            torch.randn(
                (2, 200, heads, problem.head_dim), device="cuda", dtype=torch.bfloat16, requires_grad=requires_grad
            )
            for heads in (4, 2, 2)
        )
        out = warpwave.attention(q, k, v, softmax_scale=0.125)
        if requires_grad:
            out.backward(torch.randn_like(out))
    assert len(launch._variants) == compiled
