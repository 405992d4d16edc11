"""What only a GPU shows: addresses far apart, streams, graphs, grid limits, repeats under load."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance import cases, harness
from tests.conformance.cases import PLAIN, Call, Case
from tests.conformance.harness import DEVICE, KERNELS, bits
from warpwave import attention
from warpwave.kernels.three_kernel.choice import own_products

# torch's kernel serves CPU tensors only: it has no claim here to test.
GPU_KERNELS = [name for name in KERNELS if name != "torch_sdpa"]
each_kernel = pytest.mark.parametrize("kernel", GPU_KERNELS)
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

CASE = replace(PLAIN, dtype="bfloat16", lengths=(257, 300), heads=(4, 2), batch=2, causal="bottom_right")
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ALiBi and sinks": {"alibi": "batch", "sinks": True},
    "mask, bias, ALiBi and sinks": {"mask": "full", "bias": "full", "alibi": "batch", "sinks": True},
    "packed": {"packed": True, "batch": 5},
}
each_feature = pytest.mark.parametrize("feature", FEATURES)


def built(feature: str, case: Case = CASE) -> Call:
    return cases.build(replace(case, **FEATURES[feature]), "normal", DEVICE)


@contextmanager
def busy_gpu() -> Iterator[None]:
    """A competing kernel on another stream for as long as the block runs."""
    x = torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = x @ x  # cuBLAS makes its handle and workspace, for which a capture is no place
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(50):
            y = x @ x
    with torch.cuda.stream(stream):
        for _ in range(200):
            graph.replay()
    yield
    torch.cuda.synchronize()
    del y


# Addresses ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("much_memory")
@each_kernel
@pytest.mark.parametrize("elements", [2**31, 2**32])
@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "bias", "alibi_slopes"])
def test_far_tensors(name: str, elements: int, kernel: str, request: pytest.FixtureRequest) -> None:
    """Every tensor argument with its last index of each axis past 2^31 or 2^32 elements: a view of one large buffer."""
    features = FEATURES["mask, bias, ALiBi and sinks" if name in ("mask", "bias") else "ALiBi and sinks"]
    call = cases.build(replace(CASE, lengths=(33, 40), **features), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    x = getattr(call.operands, name)
    config = harness.default_config(kernel, call)
    expected = bits(*harness.run(kernel, call, config))
    for axis in range(x.dim()):
        if x.shape[axis] == 1:
            continue
        stride = list(x.stride())
        stride[axis] = -(-elements // (x.shape[axis] - 1)) + 8
        size = 1 + sum((n - 1) * s for n, s in zip(x.shape, stride, strict=True))
        storage = torch.UntypedStorage(size * x.element_size(), device=DEVICE)
        far = torch.tensor([], dtype=x.dtype, device=DEVICE).set_(storage, 0, x.shape, stride).copy_(x)
        operands = call.operands._replace(**{name: far})
        assert bits(*harness.run(kernel, call._replace(operands=operands), config)) == expected, f"axis {axis}"


@pytest.mark.usefixtures("much_memory")
def test_far_outputs() -> None:
    """An output of more than 2^31 elements: its last rows equal the same rows alone."""
    rows = 2**31 // (8 * 128) + 1000
    q = torch.randn(1, rows, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    k = torch.randn(1, 16, 1, 128, device=DEVICE, dtype=torch.bfloat16)
    out, lse = attention(q, k, k, kernel="flash_fwd", return_lse=True)
    assert out.numel() > 2**31
    for part in (slice(0, 512), slice(rows - 512, rows)):
        alone = attention(q[:, part].contiguous(), k, k, kernel="flash_fwd", return_lse=True)
        assert bits(out[:, part], lse[:, :, part]) == bits(*alone)


@pytest.mark.parametrize("size", [65_535, 65_536])
@pytest.mark.parametrize("axis", ["batch", "heads", "tiles"])
def test_grid_limits(axis: str, size: int) -> None:
    """65,535 is the limit of a grid's second and third dimension: beyond, some kernels launch nothing."""
    batch, heads, seqlen = {"batch": (size, 1, 16), "heads": (1, size, 16), "tiles": (1, 1, size * 16)}[axis]
    q = torch.randn(batch, seqlen, heads, 16, device=DEVICE, dtype=torch.float16)
    k = torch.randn(1, 16, 1, 16, device=DEVICE, dtype=torch.float16).expand(batch, -1, heads, -1)
    config = KERNELS["flash_fwd"].Config(16, 16, 1, 1)
    out, lse = attention(q, k, k, kernel="flash_fwd", config=config, return_lse=True)
    last = attention(
        q[-1:, -16:, -1:], k[-1:, :, -1:], k[-1:, :, -1:], kernel="flash_fwd", config=config, return_lse=True
    )
    assert bits(out[-1:, -16:, -1:], lse[-1:, -1:, -16:]) == bits(*last)
    assert not out.isnan().any()
    assert lse.isfinite().all()


# Repeats and streams --------------------------------------------------------------------------------------------------


@each_kernel
@each_feature
def test_repeats_are_bit_equal_under_load(feature: str, kernel: str, request: pytest.FixtureRequest) -> None:
    """3,000 repeats see a one-in-a-thousand race with 95 % certainty; a slow kernel gets what half a minute holds."""
    call = built(feature)
    if harness.refuses(kernel, call, request):
        return
    config = harness.default_config(kernel, call)
    first, first_lse = harness.run(kernel, call, config)
    assert first_lse is not None
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    start, repeats = time.monotonic(), 0
    with busy_gpu():
        while repeats < 3000 and time.monotonic() - start < 30:
            for _ in range(100):
                out, lse = harness.run(kernel, call, config)
                assert lse is not None
                different += (out.view(torch.int16) != first.view(torch.int16)).any()
                different += (lse.view(torch.int32) != first_lse.view(torch.int32)).any()
            torch.cuda.synchronize()
            repeats += 100
    assert different.item() == 0, f"of {repeats} repeats"
    assert repeats == 3000 or kernel == "eager"


@each_kernel
@each_feature
def test_waits_for_the_stream_it_is_called_on(feature: str, kernel: str, request: pytest.FixtureRequest) -> None:
    """Inputs that arrive late on a side stream, behind a long sleep, are seen."""
    call = built(feature)
    if harness.refuses(kernel, call, request):
        return
    config = harness.default_config(kernel, call)
    expected = bits(*harness.run(kernel, call, config))
    late = call.operands._replace(**{name: torch.zeros_like(getattr(call.operands, name)) for name in "qkv"})
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        for name in "qkv":
            getattr(late, name).copy_(getattr(call.operands, name))
        result = harness.run(kernel, call._replace(operands=late), config)
    torch.cuda.current_stream().wait_stream(side)
    assert bits(*result) == expected


@each_kernel
def test_two_streams_at_once(kernel: str, request: pytest.FixtureRequest) -> None:
    calls = [cases.build(CASE, "normal", DEVICE, seed) for seed in (0, 1)]
    if harness.refuses(kernel, calls[0], request):
        return
    config = harness.default_config(kernel, calls[0])
    expected = [bits(*harness.run(kernel, call, config)) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    results: list[list[Any]] = [[], []]
    for _ in range(20):
        for stream, call, kept in zip(streams, calls, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(harness.run(kernel, call, config))
    torch.cuda.synchronize()
    for kept, want in zip(results, expected, strict=True):
        assert all(bits(*result) == want for result in kept)


# Graphs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [name for name in GPU_KERNELS if name.endswith("flash_fwd")])
@each_feature
def test_capture_and_replay(feature: str, kernel: str, request: pytest.FixtureRequest) -> None:
    """A captured call replays on changed contents: q, k, v, and the lengths of packed sequences."""
    call = built(feature)
    if harness.refuses(kernel, call, request):
        return
    config = harness.default_config(kernel, call)
    harness.run(kernel, call, config)  # warm up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = harness.run(kernel, call, config)
    assert lse is not None
    for seed in (1, 2):
        other = cases.build(replace(CASE, **FEATURES[feature]), "normal", DEVICE, seed)
        for x, y in zip(call.operands, other.operands, strict=True):
            if x is not None:
                x.copy_(y)
        if call.problem.packed and seed == 2:
            # Other lengths within the same totals and maxima: the last two sequences trade a token.
            for ends in (call.operands.cu_seqlens_q, call.operands.cu_seqlens_k):
                ends[-2] -= 1
        graph.replay()
        torch.cuda.synchronize()
        captured = bits(out, lse)
        assert captured == bits(*harness.run(kernel, call, config))


def test_compiling_during_capture_is_refused_and_the_capture_survives() -> None:
    case = replace(CASE, dims=(96, 96), softcap=7.0, window=(99, 3), sinks=True)  # a variant nobody else compiles
    cold = cases.build(case, "normal", DEVICE)
    warm = built("plain")
    expected = bits(*harness.run("flash_fwd", warm))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="before the capture"):
            harness.run("flash_fwd", cold)
        out, lse = harness.run("flash_fwd", warm)
    graph.replay()
    torch.cuda.synchronize()
    assert bits(out, lse) == expected
    harness.run("flash_fwd", cold)  # and outside the capture it compiles


# Calls of several launches, which pass tensors to one another in memory of the thread and stream, or of the graph.
SEVERAL_LAUNCHES = {
    "hopper/flash_fwd": replace(PLAIN, dtype="float32", lengths=(1016, 1016), heads=(4, 4)),
    "split_kv": replace(PLAIN, dtype="float32", lengths=(504, 504), heads=(1, 1)),
    "three_kernel": replace(PLAIN, dtype="bfloat16", lengths=(248, 248), dims=(512, 512)),
}


@pytest.mark.parametrize("kernel", SEVERAL_LAUNCHES)
def test_calls_of_several_launches_share_no_memory(kernel: str, request: pytest.FixtureRequest) -> None:
    """On two streams in turns, and in a graph that replays beside eager calls."""
    calls = [cases.build(SEVERAL_LAUNCHES[kernel], "normal", DEVICE, seed) for seed in (0, 1)]
    if harness.refuses(kernel, calls[0], request):
        return
    if kernel == "three_kernel":  # its default may be torch's products
        config = own_products(calls[0].problem, harness.GPU)
    else:
        config = harness.default_config(kernel, calls[0])
    streams, graph = [torch.cuda.Stream() for _ in calls], torch.cuda.CUDAGraph()
    expected = [bits(*harness.run(kernel, call, config)) for call in calls]
    torch.cuda.synchronize()
    results: list[list[Any]] = [[], []]
    for _ in range(20):
        for stream, call, kept in zip(streams, calls, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(harness.run(kernel, call, config))
    torch.cuda.synchronize()
    for kept, want in zip(results, expected, strict=True):
        assert all(bits(*result) == want for result in kept)
    with torch.cuda.graph(graph, stream=streams[0]):
        captured = harness.run(kernel, calls[0], config)
    for call in calls:
        call.operands.v.neg_()
    expected = [bits(*harness.run(kernel, call, config)) for call in calls]
    torch.cuda.synchronize()
    kept = []
    for _ in range(20):
        with torch.cuda.stream(streams[0]):
            graph.replay()
        with torch.cuda.stream(streams[1]):
            kept.append(harness.run(kernel, calls[1], config))
    torch.cuda.synchronize()
    assert bits(*captured) == expected[0]
    assert all(bits(*result) == expected[1] for result in kept)


# Another device -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["flash_fwd"])
def test_cpu_tensors_for_a_gpu_kernel(kernel: str) -> None:
    q = torch.ones(1, 4, 1, 16)
    with pytest.raises(TypeError, match=r"\.cuda\(\)"):
        attention(q, q, q, kernel=kernel)


@each_kernel
def test_mixed_devices_are_refused(kernel: str) -> None:
    q = torch.ones(1, 4, 1, 16, device=DEVICE)
    with pytest.raises(ValueError, match="one device"):
        attention(q, q.cpu(), q, kernel=kernel)
