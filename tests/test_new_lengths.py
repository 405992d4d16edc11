"""What a length that was never seen before costs the host, on an H200 that is made up: calls of Python functions, what
is compiled, what is launched, and memory. `benchmarks/new_lengths.py` measures the time on a GPU."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch

import warpwave
from tests.marks import needs_triton
from tests.test_driver import Device, Driver, Run, device, known
from warpwave import gpu, plans
from warpwave.kernels import arguments
from warpwave.kernels.hopper import host
from warpwave.runtime import driver, launch, parameters, scratch, tensor_maps, triton_or_stub
from warpwave.runtime.bounded import Bounded

__all__ = ["device", "known"]  # fixtures
H200 = gpu.Gpu("NVIDIA H200", "nvidia", "sm_90", 227 * 1024, 255, 132, 32)
pytestmark = [
    needs_triton,
    pytest.mark.skipif(plans.tensor_guards() is None, reason="this torch has no guard that tells layouts apart"),
]


class Place:
    """Stands for a CUDA device whose memory is the CPU's."""

    type, index = "cuda", None


class Card:
    """What was compiled, bound and launched."""

    def __init__(self) -> None:
        self.compiled: list[launch.Launch] = []
        self.bound: list[Any] = []  # function, grid, tensor maps and numbers of launches; the same of what is launched
        self.launched: list[Any] = []
        self.prepared: Any = WeakValueDictionary()  # address -> the launches of which one was laid out there

    def start(self, config: int, *rest: Any) -> int:
        """Stands for the driver's call."""
        self.launched.append(self.prepared[config].described)
        return 0

    def load(self, spec: launch.Launch, device: Any) -> tuple[Any, Any]:
        """Stands for `launch._load`: a kernel whose signature is the launch's own."""
        self.compiled.append(spec)
        left = {"tensor": iter(spec.tensors), "scalar": iter(spec.scalars)}
        signature: dict[str, str] = {}
        for i, parameter in enumerate(parameters.parameters(spec.kernel)):
            value = next(left[parameter.kind]) if parameter.kind in left else None
            mapped = isinstance(value, launch.Mapped)
            number = "fp32" if isinstance(value, float) else "i32"
            kind = number if parameter.kind == "scalar" else "tensordesc<>" if mapped else "*fp16"
            signature[f"a{i}"] = "constexpr" if value is None else kind
        metas: list[dict[str, Any]] = [{} for tensor in spec.tensors if isinstance(tensor, launch.Mapped)]
        found = SimpleNamespace(
            function=len(self.compiled),
            packed_metadata=None,
            src=SimpleNamespace(signature=signature),
            metadata=SimpleNamespace(num_warps=4, shared=2048, num_ctas=1, tensordesc_meta=metas),
        )
        return found, Run()


@pytest.fixture
def card(device: Device, known: Driver, monkeypatch: pytest.MonkeyPatch) -> Card:
    """An H200 whose memory is the CPU's."""
    found, cpu = Card(), torch.device("cpu")
    maker, memory, buffer = scratch.maker, scratch.memory, scratch.buffer
    counters = SimpleNamespace(of_stream={}, for_graphs=torch.zeros(1, dtype=torch.int32))
    counters.get = lambda stream: counters.of_stream.setdefault(stream, torch.zeros(1, dtype=torch.int32))

    def encoder(meta: Any) -> Any:
        return lambda plan, address: bytes(300)

    def empty(shape: Any, dtype: torch.dtype, device: Any) -> Callable[[], torch.Tensor]:
        place: Any = cpu if torch.are_deterministic_algorithms_enabled() else Place()
        return maker(shape, dtype, place)

    class Launches(driver.Launches):
        def __init__(self, layout: Any, index: Any, grid: int, values: Any, maps: Any) -> None:
            super().__init__(layout, index, grid, values, maps)
            described = [(plan.shape, plan.strides, plan.block) for plan in maps]
            self.described = (self.function, grid, described, [v for v in values if isinstance(v, int | float)])
            found.bound.append(self.described)

        def prepare(self, key: Any) -> Any:
            prepared = super().prepare(key)
            found.prepared[prepared[0]] = self
            return prepared

    guards = getattr(torch._C._dynamo, "guards")  # noqa: B009 - not in torch's stubs
    monkeypatch.setattr(driver, "Launches", Launches)
    monkeypatch.setattr(driver, "_encoder", encoder)
    monkeypatch.setattr(known, "start", found.start)
    monkeypatch.setattr(gpu, "CPU", H200)
    monkeypatch.setattr(triton_or_stub, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_load", found.load)
    monkeypatch.setattr(launch, "_variants", Bounded(launch.MAX_VARIANTS))
    monkeypatch.setattr(launch, "_specialized", lambda kernel: ())  # interpreted kernels do not say
    monkeypatch.setattr(scratch, "empty_strided", guards._empty_strided_cpu)
    monkeypatch.setattr(scratch, "_buffers", scratch._Kept())
    monkeypatch.setattr(scratch, "buffer", lambda device, *rest: buffer(cpu, *rest))
    monkeypatch.setattr(scratch, "memory", lambda needs, device, *rest: memory(needs, Place(), *rest))  # type: ignore
    for module in (scratch, arguments):
        monkeypatch.setattr(module, "maker", empty)
    for module in (tensor_maps, host):
        monkeypatch.setattr(module, "counters_of", lambda device: counters)
    forget(monkeypatch)
    return found


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("_plans", "_classes", "_last"):
        monkeypatch.setattr(plans, table, Bounded(plans.MAX_PLANS))


Call = Callable[[], Any]


def dense(seqlen: int, head_dim: int = 128, by_head: bool = False) -> Call:
    q, k, v = (torch.empty(1, seqlen, 8, head_dim, dtype=torch.bfloat16) for _ in range(3))
    if by_head:
        k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
    return lambda: warpwave.attention(q, k, v, causal=True)


def decode(seqlen: int) -> Call:
    q = torch.empty(2, 1, 8, 128, dtype=torch.bfloat16)
    k, v = (torch.empty(2, seqlen, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    return lambda: warpwave.attention(q, k, v, return_lse=True)


def decode_by_head(seqlen: int, padded: bool = False) -> Call:
    """As transformers' caches are laid out, and with the mask of a padded batch."""
    q = torch.empty(2, 1, 8, 128, dtype=torch.bfloat16)
    k, v = (torch.empty(2, 2, seqlen, 128, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    mask = torch.ones(2, seqlen, dtype=torch.bool)[:, None, None] if padded else None
    return lambda: warpwave.attention(q, k, v, mask=mask)


def packed(tokens: int) -> Call:
    q, k, v = (torch.empty(tokens, 8, 128, dtype=torch.bfloat16) for _ in range(3))
    offsets = torch.zeros(5, dtype=torch.int32)
    half = tokens // 2
    return lambda: warpwave.attention_varlen(
        q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=half, max_seqlen_k=half, causal=True
    )


def cached(tokens: int, page_size: int = 16) -> Call:
    """One query a sequence on a table that has room for so many tokens of each."""
    k, v = (torch.empty(4, page_size, 8, 128, dtype=torch.bfloat16) for _ in range(2))
    q, used = torch.empty(8, 1, 32, 128, dtype=torch.bfloat16), torch.ones(8, dtype=torch.int32)
    layer = warpwave.CacheLayer(k, v, torch.zeros(8, -(-tokens // page_size), dtype=torch.int32), used)
    return lambda: warpwave.attention_with_kv_cache(q, layer, causal=True)


def prefill(tokens: int, is_packed: bool = False) -> Call:
    """A prompt on a table that has room for it."""
    k, v = (torch.empty(4, 16, 8, 128, dtype=torch.bfloat16) for _ in range(2))
    table, used = torch.zeros(1, -(-tokens // 16), dtype=torch.int32), torch.full((1,), tokens, dtype=torch.int32)
    layer, q = warpwave.CacheLayer(k, v, table, used), torch.empty(1, tokens, 32, 128, dtype=torch.bfloat16)
    if not is_packed:
        return lambda: warpwave.attention_with_kv_cache(q, layer, causal=True)
    ends = torch.tensor([0, tokens], dtype=torch.int32)
    return lambda: warpwave.attention_with_kv_cache(
        q[0], layer, cu_seqlens_q=ends, max_seqlen_q=tokens, max_seqlen_k=tokens, causal=True
    )


# Most calls of Python functions at a new length; of the test's own stand-ins for Triton and the driver 15 to 25.
# Eight more than counted alone: finalizers of other tests' objects are calls, too.
CASES: dict[str, tuple[Callable[[int], Call], int]] = {
    "dense": (dense, 117),
    "dense, head_dim 64": (lambda n: dense(n, 64), 118),
    "packed": (packed, 106),
    "cached, pages of 16": (cached, 116),
    "cached, pages of 64": (lambda n: cached(n, 64), 128),
    "prefill from pages": (prefill, 138),
    "prefill from pages, packed": (lambda n: prefill(n, True), 140),
    "decode": (decode, 190),
    "decode, keys by head": (decode_by_head, 157),
    "decode, keys by head, padded": (lambda n: decode_by_head(n, padded=True), 143),
    "dense, by head": (lambda n: dense(n, by_head=True), 117),
}
LENGTHS = (2048, 3001, 3333, 4321, 5000, 6001, 6500, 8888)


def calls_of(call: Call) -> int:
    """Calls of Python functions, as a profiler counts them."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("case", CASES)
def test_a_new_length_takes_few_calls(case: str, card: Card) -> None:
    make, most = CASES[case]
    for length in LENGTHS:
        make(length)()
    compiled = len(card.compiled)
    # The least of three, of different numbers of pages: finalizers of earlier tests' objects are calls, too, and
    # launches whose results have another address are laid out again.
    assert min(calls_of(make(length)) for length in (7777, 7877, 7977)) <= most
    assert len(card.compiled) == compiled, "a length was compiled in"


@pytest.mark.parametrize("case", ["dense", "packed"])
def test_the_second_length_takes_as_few_as_later_ones(case: str, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of a class leaves its planner what the second needs."""
    make, most = CASES[case]
    make(2048)()  # rules by kind
    counts = []
    for length in (7777, 7877, 7977):
        forget(monkeypatch)
        make(5000)()
        counts.append(calls_of(make(length)))
    assert min(counts) <= most


@pytest.mark.parametrize("case", CASES)
def test_a_class_launches_what_a_call_by_itself_does(case: str, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernel, grid, tensor maps and numbers, whether or not other lengths were called before."""
    make, _ = CASES[case]
    for length in (*LENGTHS, 7777, 9001):
        make(length)()
    for length in (7900, 40, 9202, 700, 130, 300):
        card.launched.clear()
        make(length)()
        of_class = card.launched.copy()
        with monkeypatch.context() as alone:
            forget(alone)
            card.launched.clear()
            make(length)()
            assert of_class == card.launched and of_class, length


@pytest.mark.parametrize("strided", [False, True])
def test_a_new_length_of_calls_with_out(strided: bool, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch is that of the call by itself, to the caller's memory; Hopper's kernel cannot store to strides."""
    addresses: list[int] = []
    prepare = driver.Launches.prepare

    def prepared(launches: driver.Launches, key: tuple[int, ...]) -> Any:
        addresses.extend(key)
        return prepare(launches, key)

    monkeypatch.setattr(driver.Launches, "prepare", prepared)
    for length in (*LENGTHS, 7777):
        q, k, v = (torch.empty(1, length, 8, 128, dtype=torch.bfloat16) for _ in range(3))
        out = torch.empty(1, 8, length, 128, dtype=q.dtype).transpose(1, 2) if strided else torch.empty_like(q)
        card.launched.clear()
        addresses.clear()
        count = calls_of(lambda: warpwave.attention(q, k, v, causal=True, out=out))  # noqa: B023
        assert (out.data_ptr() in addresses) is not strided
        with_out = card.launched.copy()
        card.launched.clear()
        with monkeypatch.context() as alone:
            forget(alone)
            warpwave.attention(q, k, v, causal=True)
        assert with_out == card.launched
    assert strided or count <= CASES["dense"][1] + 30  # a stride between heads that depends on the length has no class


def test_a_prompt_on_a_cache_returns_the_callers_out(card: Card) -> None:
    """Its queries are processed as packed ones, and out has the caller's shape."""
    k, v = (torch.empty(4, 16, 8, 128, dtype=torch.bfloat16) for _ in range(2))
    layer = warpwave.CacheLayer(k, v, torch.zeros(1, 64, dtype=torch.int32), torch.full((1,), 640, dtype=torch.int32))
    for length in (512, 640, 640):
        q = torch.empty(1, length, 32, 128, dtype=torch.bfloat16)
        out = torch.empty_like(q)
        assert warpwave.attention_with_kv_cache(q, layer, causal=True, out=out) is out
        assert "hopper" in card.compiled[-1].kernel.__name__


def test_sizes_that_contradict_each_other_are_refused_in_a_known_class(card: Card) -> None:
    for length in LENGTHS[:3]:
        dense(length)()
        packed(length)()
        cached(length)()
    q, k, v = (torch.empty(1, n, 8, 128, dtype=torch.bfloat16) for n in (40, 50, 60))
    with pytest.raises(warpwave.InvalidInput, match=r"v has shape.*seqlen_k is 60"):
        warpwave.attention(q, k, v, causal=True)
    with pytest.raises(warpwave.InvalidInput, match="batch"):
        warpwave.attention(q.expand(2, -1, -1, -1).contiguous(), k, k, causal=True)
    for length in LENGTHS[:3]:
        decode_by_head(length, padded=True)()
    q2, k2 = torch.empty(2, 1, 8, 128, dtype=k.dtype), torch.empty(2, 2, 70, 128, dtype=k.dtype).transpose(1, 2)
    with pytest.raises(warpwave.InvalidInput, match="mask has shape"):
        warpwave.attention(q2, k2, k2.clone(), mask=torch.ones(2, 1, 1, 71, dtype=torch.bool))
    offsets = torch.zeros(5, dtype=torch.int32)
    with pytest.raises(warpwave.InvalidInput, match="max_seqlen_k is -1"):
        warpwave.attention_varlen(
            q[0], k[0], k[0], cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=4, max_seqlen_k=-1, causal=True
        )
    pool = torch.empty(4, 16, 8, 128, dtype=torch.bfloat16)
    layer = warpwave.CacheLayer(pool, pool.clone(), torch.zeros(8, 3, dtype=torch.int32), torch.ones(8).int())
    with pytest.raises(warpwave.InvalidInput, match="q has 9 sequences and the cache 8 rows"):
        warpwave.attention_with_kv_cache(torch.empty(9, 1, 32, 128, dtype=torch.bfloat16), layer, causal=True)


def test_torchs_deterministic_mode_is_part_of_a_call(card: Card) -> None:
    """A plan allocates as torch does in the mode that it was made in."""
    call = dense(2048)
    call()
    bound = len(card.bound)
    torch.use_deterministic_algorithms(True)
    try:
        call()
        assert len(card.bound) == bound + 1
    finally:
        torch.use_deterministic_algorithms(False)
    call()
    assert len(card.bound) == bound + 1


def test_memory_is_flat_over_many_lengths(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "bound", Forgetful())
    monkeypatch.setattr(card, "launched", Forgetful())
    for table in ("_plans", "_last"):
        monkeypatch.setattr(plans, table, Bounded(64))

    def used(lengths: range) -> int:
        for length in lengths:
            for make in (packed, cached):
                make(length)()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    used(range(1000, 1100))
    tracemalloc.start()
    try:
        first, second, third = (used(lengths) for lengths in (range(1100, 1300), range(1300, 2100), range(2100, 2900)))
        # Objects of earlier tests may come and go in one of the two, a leak is in both.
        assert min(second - first, third - second) < 150_000, (
            "a hundred bytes a length and call would be 1,600 times as many"
        )
    finally:
        tracemalloc.stop()


class Forgetful(list[Any]):
    """A list that keeps nothing."""

    def append(self, item: Any) -> None:
        """Drops it."""
