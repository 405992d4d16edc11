"""A call on a `PagedKVCache` that fails has changed nothing: whichever operation fails, in whatever mode torch is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.test_kv_cache import DEVICE, append, check_books, make, read, tokens, visible
from warpwave import CacheLayer, InvalidInput, PagedKVCache, Rotary, attention_with_kv_cache, cached_calls
from warpwave.kernels import append_kv


class FailsAt(TorchDispatchMode):
    """Lets the n-th operation of torch run out of memory."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.left = n

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError(f"injected into {func}")
        return func(*args, **(kwargs or {}))


def busy() -> PagedKVCache:
    """Rows 0 and 1 share pages, row 2 has lost some to eviction. Cells that nobody wrote hold 0."""
    cache = make(num_pages=20)
    cache.k.zero_()
    cache.v.zero_()
    for n in (10, 0, 22):
        row = cache.add()
        if n:
            append(cache, row, n, seed=n)
    cache.free(1)
    assert cache.fork(0, 7) == 1
    cache.evict(2, 6)
    return cache


def attend(cache: PagedKVCache, **more: Any) -> torch.Tensor:
    new = tokens(2, 3, 2, 8, seed=3)
    out: torch.Tensor = attention_with_kv_cache(
        new, cache, rows=[0, 1], k_new=new, v_new=-new, causal=True, kernel="eager", **more
    )
    return out


def attend_packed(cache: PagedKVCache) -> torch.Tensor:
    new, offsets = tokens(6, 2, 8, seed=3), torch.tensor([0, 5, 6], dtype=torch.int32, device=DEVICE)
    out: torch.Tensor = attention_with_kv_cache(
        new, cache, rows=[0, 2], k_new=new, v_new=-new, cu_seqlens_q=offsets, seqlens_q=[5, 1], window_size=(6, 0),
        causal=True, rotary=Rotary.of(8, 40, device=DEVICE), kernel="eager",
    )  # fmt: skip
    return out


CHANGES: dict[str, Callable[[PagedKVCache], Any]] = {
    "fork": lambda c: c.fork(0, 9),
    "free": lambda c: c.free([0, 2]),
    "truncate": lambda c: c.truncate(0, 5),
    "evict": lambda c: c.evict([0, 2], 3),
    "extend": lambda c: c.extend([0, 1, 2], [3, 1, 5]),
    "append": lambda c: c.append([1, 0], tokens(2, 3, 2, 8), tokens(2, 3, 2, 8, seed=1)),
    "append packed": lambda c: c.append(
        [1, 0], tokens(6, 2, 8), tokens(6, 2, 8), counts=[5, 1], rotary=Rotary.of(8, 40, device=DEVICE)
    ),
    "attend": attend,
    "attend packed": attend_packed,
}
each_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


@pytest.fixture(autouse=True)
def appends_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, by torch's operations, each of which can fail; an interpreted kernel is one call."""
    monkeypatch.setattr(append_kv, "INTERPRETED", False)


@each_change
def test_whichever_operation_fails_nothing_has_changed(change: Callable[[PagedKVCache], Any]) -> None:
    expected = busy()
    change(expected)  # also does what is done once in a process
    cache, failed = busy(), 0
    before = visible(cache)
    while True:
        try:
            with FailsAt(failed + 1) as injected:
                change(cache)
        except torch.OutOfMemoryError:
            failed += 1
            assert visible(cache) == before, f"operation {failed} failed, and the cache has changed"
            check_books(cache)
        else:
            break
    assert injected.left > 0, "an error was swallowed"
    assert failed >= 2
    assert visible(cache) == visible(expected), "a call that failed before does what it always does"
    check_books(cache)


def test_a_kernel_that_fails_behind_an_append_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever tries again appends the tokens twice."""
    cache = busy()
    before = visible(cache)

    def fail(operands: Any) -> Any:
        assert int(cache.seqused_k[0]) == 13, "the kernel sees the new tokens"
        raise torch.OutOfMemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(cached_calls.Planner, "first", lambda *_: fail)
        with pytest.raises(torch.OutOfMemoryError):
            attend(cache, window_size=(99, 0))
    assert visible(cache) == before
    attend(cache)
    assert cache.lengths == {0: 13, 1: 10, 2: 22}
    check_books(cache)


@each_change
@pytest.mark.parametrize("made_in_inference_mode", [True, False])
def test_inference_mode_does_not_matter(change: Callable[[PagedKVCache], Any], made_in_inference_mode: bool) -> None:
    """The mode belongs to a thread: a cache made in one is used in another."""
    with torch.inference_mode(made_in_inference_mode):
        cache = busy()
    with torch.inference_mode(not made_in_inference_mode):
        change(cache)
    expected = busy()
    change(expected)
    assert visible(cache) == visible(expected)
    check_books(cache)


def test_another_thread_than_the_one_that_made_it_in_inference_mode() -> None:
    with torch.inference_mode():
        cache, layers = busy(), make(num_layers=2)
        row = layers.add()
    found: list[BaseException | None] = []

    def work() -> None:
        try:
            for change in CHANGES.values():
                change(cache)
                for taken in cache.rows[3:]:
                    cache.free(taken)
                cache.free(cache.rows)
                for n in (10, 7, 22):
                    append(cache, cache.add(), n)
            x = tokens(1, 2, 2, 8)
            layers.extend([row], 2)
            attention_with_kv_cache(x, layers.layers[1], rows=layers.index([row]), k_new=x, v_new=x)
            found.append(None)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None]
    check_books(cache)
    check_books(layers)


def test_a_layer_made_in_inference_mode_is_written_outside_of_it() -> None:
    with torch.inference_mode():
        ints = {"dtype": torch.int32, "device": DEVICE}
        pools = (torch.zeros(4, 4, 2, 8, device=DEVICE), torch.zeros(4, 4, 2, 8, device=DEVICE))
        layer = CacheLayer(*pools, torch.tensor([[0, 1]], **ints), torch.tensor([6], **ints))  # type: ignore[arg-type]
    x = tokens(1, 6, 2, 8)
    attention_with_kv_cache(x, layer, k_new=x, v_new=x)
    assert torch.equal(layer.k[:2].flatten(0, 1)[:6], x[0])


# Gradients ------------------------------------------------------------------------------------------------------------


def learned_rotary() -> Rotary:
    cos, sin, _ = Rotary.of(8, 40, device=DEVICE)
    return Rotary(cos.requires_grad_(), sin.requires_grad_())


@pytest.mark.parametrize("by_kernel", [True, False])
def test_the_pool_stays_out_of_every_graph(by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appended tensors that require a gradient made the pool require one; attention refused it from then on."""
    if by_kernel:
        monkeypatch.undo()
    cache = make()
    row = cache.add()
    k, v = tokens(1, 5, 2, 8).requires_grad_(), tokens(1, 5, 2, 8, seed=1).requires_grad_() * 2
    rotary = learned_rotary()
    cache.append([row], k, v)
    cache.append([row], k, v, rotary=rotary)
    attention_with_kv_cache(k, cache, rows=[row], k_new=k, v_new=v, rotary=rotary)
    for tensor in (cache.k, cache.v, cache.page_table, cache.seqused_k):
        assert not tensor.requires_grad and tensor.grad_fn is None
    assert torch.equal(read(cache, row)[1], torch.cat([v[0]] * 3))
    assert torch.equal(read(cache, row)[0][:5], k[0])


def results(cache: PagedKVCache, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call: dict[str, Any] = {"q": tokens(1, 1, 2, 8), "rows": [0], "return_lse": True}
    out, lse = attention_with_kv_cache(cache=cache, **(call | arguments))
    return out, lse


WANTING: dict[str, Callable[[], dict[str, Any]]] = {
    "q": lambda: {"q": tokens(1, 1, 2, 8).requires_grad_()},
    "sinks": lambda: {"sinks": torch.zeros(2, device=DEVICE, requires_grad=True)},
    "alibi_slopes": lambda: {"alibi_slopes": torch.ones(2, device=DEVICE, requires_grad=True)},
    "k_new": lambda: {"k_new": tokens(1, 1, 2, 8).requires_grad_(), "v_new": tokens(1, 1, 2, 8)},
    "v_new": lambda: {"k_new": tokens(1, 1, 2, 8), "v_new": tokens(1, 1, 2, 8).requires_grad_()},
    "rotary": lambda: {"rotary": learned_rotary()},
}


@pytest.mark.parametrize("arguments", WANTING.values(), ids=WANTING)
def test_backward_says_that_there_is_no_gradient(arguments: Callable[[], dict[str, Any]]) -> None:
    cache = busy()
    plain = {name: t.detach() if isinstance(t, torch.Tensor) else t for name, t in arguments().items()}
    if "rotary" in plain:
        plain["rotary"] = Rotary.of(8, 40, device=DEVICE)
    for _ in range(3):  # planned, found by its key, recalled
        out, lse = results(cache, **arguments())
        for result in (out, lse):
            assert result.requires_grad
            with pytest.raises(RuntimeError, match="attention_with_kv_cache computes no gradients") as refusal:
                result.sum().backward()
            assert "torch.no_grad()" in str(refusal.value)
        alone: dict[str, Any] = {"q": tokens(1, 1, 2, 8), "rows": [0]} | arguments()
        assert attention_with_kv_cache(cache=cache, **alone).grad_fn is not None
        if "k_new" in plain:
            cache.truncate(0, 10)
        expected = results(cache, **plain)
        assert all(not t.requires_grad and t.grad_fn is None for t in expected)
        if "k_new" in plain:
            cache.truncate(0, 10)
        with torch.no_grad():
            unasked = results(cache, **arguments())
        assert all(not t.requires_grad for t in unasked)
        if "k_new" in plain:
            cache.truncate(0, 10)
        assert torch.equal(out, expected[0]) and torch.equal(lse, unasked[1])


def test_nothing_is_lost_in_a_transform() -> None:
    """torch.func's gradient of a call without one would be zero."""
    cache = busy()
    before = visible(cache)
    x = tokens(1, 1, 2, 8)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: torch.func.grad(lambda q: attention_with_kv_cache(q, cache, rows=[0]).sum())(x),
        lambda: torch.func.grad(lambda k: attention_with_kv_cache(x, cache, rows=[0], k_new=k, v_new=x).sum())(x),
        lambda: torch.vmap(lambda q: attention_with_kv_cache(q, cache, rows=[0]))(x[None]),
    )
    for call in calls:
        with pytest.raises(InvalidInput, match="a transform of torch"):
            call()
    assert visible(cache) == before
