"""Memory between the launches of a call: whose it is."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from warpwave.runtime import scratch

NEEDS = [((2, 3), torch.float32), ((5,), torch.float16), ((0,), torch.float32), ((4, 4), torch.int32)]


def test_a_buffer_grows_and_is_each_streams_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_buffers", scratch._Kept())
    device = torch.device("cpu")
    first = scratch.buffer(device, 1, 100)
    assert first.numel() >= 100 and scratch.buffer(device, 1, 50) is first
    assert scratch.buffer(device, 2, 50).data_ptr() != first.data_ptr()
    assert scratch.buffer(device, 1, 10_000).numel() >= 10_000


class Place:
    """Stands for a CUDA device whose memory is the CPU's."""

    type, index = "cuda", 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stream and a capture that a test may set."""

    class Now:
        stream, capturing = 3, False

    cpu = torch.device("cpu")
    buffer, maker = scratch.buffer, scratch.maker
    monkeypatch.setattr(scratch, "_buffers", scratch._Kept())
    monkeypatch.setattr(scratch, "buffer", lambda device, *args: buffer(cpu, *args))
    monkeypatch.setattr(scratch, "maker", lambda shape, dtype, device: maker(shape, dtype, cpu))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Now.capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: Now.stream, raising=False)
    return Now


def places(tensors: Any) -> list[int]:
    return [t.data_ptr() for t in tensors if t.numel()]


def test_calls_on_a_stream_share_and_streams_and_graphs_do_not(device: Any) -> None:
    memory = scratch.memory(NEEDS, Place())  # type: ignore[arg-type]
    first = memory()
    assert [(tuple(t.shape), t.dtype) for t in first] == [(tuple(shape), dtype) for shape, dtype in NEEDS]
    for i, t in enumerate(first):
        t.fill_(i)
    assert all((t == i).all() for i, t in enumerate(first)), "they overlap"
    assert all(place % 256 == places(first)[0] % 256 for place in places(first))
    assert places(memory()) == places(first)
    assert places(scratch.memory(NEEDS, Place())()) == places(first), "plans on a stream share"  # type: ignore[arg-type]
    device.stream = 4
    other = memory()
    device.capturing = True
    in_graph, in_another = memory(), memory()
    everywhere = [*places(first), *places(other), *places(in_graph), *places(in_another)]
    assert len(set(everywhere)) == len(everywhere)


def test_threads_on_one_stream_do_not_share(device: Any) -> None:
    """Between two launches of one thread's call another thread's may come."""
    from concurrent.futures import ThreadPoolExecutor

    memory = scratch.memory(NEEDS, Place())  # type: ignore[arg-type]
    mine = memory()
    with ThreadPoolExecutor(1) as pool:
        its = [pool.submit(memory).result() for _ in range(2)]
    assert places(its[0]) == places(its[1])
    assert set(places(mine)).isdisjoint(places(its[0]))
    assert places(memory()) == places(mine)


def test_large_needs_are_torchs_affair(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "LARGEST", 64)
    memory = scratch.memory(NEEDS, Place())  # type: ignore[arg-type]
    first = memory()
    assert not scratch._buffers.by_stream and set(places(first)).isdisjoint(places(memory()))


def test_memory_that_torch_fills_is_filled_for_each_call(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "is_deterministic", lambda: True)
    memory = scratch.memory(NEEDS, Place())  # type: ignore[arg-type]
    first = memory()
    assert set(places(first)).isdisjoint(places(memory()))


def test_what_is_made_of_it_is_kept_with_it(device: Any) -> None:
    made: list[Any] = []

    def finish(tensors: Any) -> Any:
        made.append(tensors[0][0])
        return made[-1]

    memory = scratch.memory(NEEDS, Place(), finish)  # type: ignore[arg-type]
    assert memory() is memory() is made[0]
    device.stream = 4
    assert memory() is memory() is made[1]
    device.capturing = True
    memory(), memory()
    assert len(made) == 4, "what belongs to a graph is not kept"


def test_plans_keep_no_part_of_a_buffer_that_was_outgrown(device: Any) -> None:
    """A plan that is not called again would hold the old buffer as long as the plan itself is kept."""
    small = scratch.memory([((8,), torch.float32)], Place())  # type: ignore[arg-type]
    small()
    outgrown = weakref.ref(scratch._buffers.by_stream[None, device.stream][0])
    large = scratch.memory([((10_000,), torch.float32)], Place())()  # type: ignore[arg-type]
    assert outgrown() is None
    assert places(small()) == places(large)


def test_parts_lie_inside_a_buffer_that_is_the_end_of_its_storage(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = torch.zeros(8192, dtype=torch.uint8)
    monkeypatch.setattr(scratch, "buffer", lambda *_: storage[4096:])
    for t in scratch.memory(NEEDS, Place())():  # type: ignore[arg-type]
        t.fill_(1)
    assert not storage[:4096].any() and storage[4096:].any()
