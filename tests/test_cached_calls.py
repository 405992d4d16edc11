"""`attention_with_kv_cache` and the numbers that its callers give: on the host, on the device, and both of them."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.test_eager import Largest
from tests.test_kv_cache import DEVICE, append, check_books, make, read, tokens, visible
from warpwave import (
    InvalidInput,
    PagedKVCache,
    Rotary,
    UnsupportedProblem,
    api,
    attention,
    attention_varlen,
    attention_with_kv_cache,
    dispatch,
    plans,
    warmup,
)
from warpwave.gpu import Gpu
from warpwave.kernels import append_kv
from warpwave.kernels.paging import offsets_within
from warpwave.kv_cache import new_tokens
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch
from warpwave.runtime.bounded import Bounded
from warpwave.runtime.triton_or_stub import INTERPRETED

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
WRITERS = {"kernel": True, "torch": False}
each_writer = pytest.mark.parametrize("by_kernel", WRITERS.values(), ids=WRITERS)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def two_rows() -> PagedKVCache:
    """Rows of 6 and 9 tokens; row 2 shares the pages of row 1. Cells that nobody wrote hold 0."""
    cache = make(num_pages=20)
    cache.k.zero_()
    cache.v.zero_()
    append(cache, cache.add(), 6, seed=1)
    append(cache, cache.add(), 9, seed=3)
    cache.fork(1)
    return cache


# Lengths on the host and offsets on the device ------------------------------------------------------------------------

DISAGREEING = {
    "another length": ((0, 2, 3), "cu_seqlens_q[1] is 2; by seqlens_q it must be 1"),
    "beyond the end": ((0, 4, 3), "cu_seqlens_q[1] is 4"),
    "a late begin": ((1, 1, 3), "cu_seqlens_q[0] is 1"),
    "an early end": ((0, 1, 2), "cu_seqlens_q[2] is 2; by seqlens_q it must be 3"),
    "negative": ((0, INT_MIN, 3), f"cu_seqlens_q[1] is {INT_MIN}"),
    "far away": ((0, 1, INT_MAX), f"cu_seqlens_q[2] is {INT_MAX}"),
    "garbage": ((INT_MAX, INT_MIN, -1), f"cu_seqlens_q[0] is {INT_MAX}"),
}


@each_writer
@pytest.mark.parametrize(("offsets", "words"), DISAGREEING.values(), ids=DISAGREEING)
def test_lengths_on_the_host_say_what_is_appended(
    offsets: tuple[int, ...], words: str, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets that disagree wrote keys into other rows and cells, or raised after the lengths had advanced."""
    monkeypatch.setattr(append_kv, "INTERPRETED", by_kernel and append_kv.INTERPRETED)
    cache, new = two_rows(), tokens(3, 2, 8, seed=7)
    rotary = Rotary.of(8, 40, device=DEVICE)
    call: dict[str, Any] = {"rows": [0, 1], "k_new": new, "v_new": -new, "seqlens_q": [1, 2], "rotary": rotary}
    before = visible(cache)
    with pytest.raises(InvalidInput) as refusal:
        attention_with_kv_cache(new, cache, **call, cu_seqlens_q=ints(*offsets), checked=True)
    assert words in str(refusal.value)
    assert visible(cache) == before

    out = attention_with_kv_cache(new, cache, **call, cu_seqlens_q=ints(*offsets))
    right = two_rows()
    expected = attention_with_kv_cache(new, right, **call, cu_seqlens_q=ints(0, 1, 3), checked=True)
    assert visible(cache) == visible(right)
    assert torch.equal(out, expected)
    check_books(cache)


def test_the_offsets_of_an_append_are_not_looked_at() -> None:
    cache, new = make(), tokens(5, 2, 8)
    rows = [cache.add(), cache.add()]
    cache.append(rows, new, -new, cu_seqlens=ints(INT_MAX, INT_MIN, 7), counts=[2, 3])
    cache.append(rows, new, -new, counts=[4, 1])
    assert torch.equal(read(cache, rows[0])[0], new[[0, 1, 0, 1, 2, 3]])
    assert torch.equal(read(cache, rows[1])[1], -new[[2, 3, 4, 4]])


def test_sizes_follow_tensors_and_not_their_contents() -> None:
    """A crafted offset made a list of 2^31 numbers."""
    cache, new = two_rows(), tokens(3, 2, 8)
    allowed = cache.k.numel()
    calls: list[dict[str, Any]] = [
        {"cu_seqlens_q": ints(0, 1, 5_000)},
        {"cu_seqlens_q": ints(-5_000, 1, 3)},
        {"cu_seqlens_q": ints(0, 1, 3), "rows": ints(-7, 5_000)},
    ]
    for contents in calls:
        seen = Largest()
        with seen:
            append_kv.write_torch(
                new_tokens(cache.layer, new, new, rows=contents.get("rows"), cu_seqlens=contents["cu_seqlens_q"])
            )
            attention_with_kv_cache(new, cache.layer, max_seqlen_q=3, kernel="eager", batch_invariant=True, **contents)
        assert seen.elements <= allowed, contents


@pytest.mark.parametrize(
    "offsets", [(0, 2, 5), (0, 0, 5), (INT_MIN, INT_MAX, 5), (5, 4, 3), (INT_MAX, INT_MIN, 0), (7,)]
)
def test_any_offsets_become_offsets(offsets: tuple[int, ...]) -> None:
    total = 5 if len(offsets) > 1 else 0
    within = offsets_within(ints(*offsets), total).tolist()
    assert within[0] == 0 and within[-1] <= total and within == sorted(within)
    assert offsets[0] != 0 or within == list(offsets)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("reader", ["eager", "split_kv", "large_head_dim"])
@each_writer
def test_queries_after_the_last_offset_belong_to_no_sequence(
    by_kernel: bool, reader: str, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`eager` took them for queries of the last sequence, whose other queries then saw other keys."""
    if reader == "large_head_dim" and batch_invariant:
        pytest.skip("it has no batch_invariant packed calls")
    monkeypatch.setattr(append_kv, "INTERPRETED", by_kernel and append_kv.INTERPRETED)
    new, found = tokens(7, 2, 8, seed=7), []
    rotary = Rotary.of(8, 64, device=DEVICE)
    for total in (3, 7):
        cache = two_rows()
        cache.extend([0, 1], [1, 2])
        given = new[:total]
        out, lse = attention_with_kv_cache(
            given, cache.layer, rows=cache.index([0, 1]), k_new=given, v_new=given, cu_seqlens_q=ints(0, 1, 3),
            max_seqlen_q=2, causal=True, rotary=rotary, batch_invariant=batch_invariant, kernel=reader,
            return_lse=True,
        )  # fmt: skip
        assert out.shape == given.shape and lse.shape == (2, total)
        found.append((out[:3], lse[:, :3], visible(cache)))
        if reader == "eager":
            assert not out[3:].any() and (lse[:, 3:] == -torch.inf).all()
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]


@each_writer
def test_offsets_may_have_any_stride(by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel read what lies between them."""
    monkeypatch.setattr(append_kv, "INTERPRETED", by_kernel and append_kv.INTERPRETED)
    new, found = tokens(3, 2, 8, seed=7), []
    for offsets in (ints(0, 1, 3), ints(0, 9, 1, 9, 3, 9)[::2]):
        cache = two_rows()
        cache.extend([0, 1], [1, 2])
        out = attention_with_kv_cache(
            new, cache.layer, rows=cache.index([0, 1]), k_new=new, v_new=new, cu_seqlens_q=offsets, max_seqlen_q=2
        )
        found.append((out, visible(cache)))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


# Rotation -------------------------------------------------------------------------------------------------------------


def test_queries_beyond_the_table_of_angles_are_refused() -> None:
    """They were rotated by the last angle."""
    cache, q = two_rows(), tokens(1, 1, 2, 8)
    short, enough = Rotary.of(8, 8, device=DEVICE), Rotary.of(8, 9, device=DEVICE)
    words = "rotary has angles for 8 positions and a sequence would have 9 tokens"
    beyond: list[dict[str, Any]] = [
        {"rows": [1]},
        {"rows": None, "q": tokens(2, 1, 2, 8)},
        {"rows": ints(1), "checked": True},
        {"rows": ints(1), "checked": True, "cache": cache.layer},
        {"rows": ints(1), "checked": True, "cache": cache.layer, "k_new": q, "v_new": q},
    ]
    for changes in beyond:
        call: dict[str, Any] = {"q": q, "cache": cache, "rotary": short} | changes
        with pytest.raises(InvalidInput, match=words):
            attention_with_kv_cache(**call)
    attention_with_kv_cache(q, cache, rows=[0], rotary=short)
    attention_with_kv_cache(q, cache, rows=[1], rotary=enough)
    attention_with_kv_cache(q, cache.layer, rows=ints(1), rotary=enough, checked=True)


# Tensors as torch has them --------------------------------------------------------------------------------------------


@each_writer
def test_signs_that_torch_has_put_off(by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view like `x.conj().imag` is negated as it is read; kernels read memory."""
    monkeypatch.setattr(append_kv, "INTERPRETED", by_kernel and append_kv.INTERPRETED)
    x = tokens(1, 3, 2, 8)
    lazy, plain = torch._neg_view(x), -x
    assert lazy.is_neg()
    found = []
    for t in (lazy, plain):
        cache = two_rows()
        rotary = Rotary.of(8, 40, device=DEVICE)
        out = attention_with_kv_cache(t, cache, rows=[0], k_new=t, v_new=t, rotary=rotary)
        cache.append([0], t, t)
        found.append((out, attention_with_kv_cache(t, cache, rows=[0]), *read(cache, 0)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@each_writer
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=str)
def test_autocast_of_another_dtype_changes_no_bit(
    dtype: torch.dtype, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses to concatenate float16 tensors under autocast to bfloat16."""
    monkeypatch.setattr(append_kv, "INTERPRETED", by_kernel and append_kv.INTERPRETED)
    q, found = tokens(1, 5, 2, 8).half(), []
    for autocast in (False, True):
        cache = make(dtype=dtype)
        call: dict[str, Any] = {
            "rows": [cache.add()],
            "k_new": q,
            "v_new": -q,
            "rotary": Rotary.of(4, 40, device=DEVICE),
        }
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            out = attention_with_kv_cache(q, cache, **call, causal=True, kernel="eager")
        found.append((out, *read(cache, 0)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# Plans ----------------------------------------------------------------------------------------------------------------


def test_threads_that_make_more_plans_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, q = two_rows(), tokens(1, 1, 2, 8)
    monkeypatch.setattr(plans, "_plans", Bounded(2))
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for n in range(first, first + 40):
                attention_with_kv_cache(q, cache.layer, max_seqlen_k=9 + n, rows=cache.index([n % 3]))
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(40 * i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert len(plans._plans) == 2


def test_a_refused_number_does_not_serve_its_equal() -> None:
    cache, q = two_rows(), tokens(1, 1, 2, 8)
    for name, wrong, right in (
        ("num_splits", True, 1), ("num_splits", 2.0, 2), ("max_seqlen_k", 16.0, 16), ("shared_prefix", False, 0),
        ("softcap", True, 1.0), ("return_lse", 1, True), ("batch_invariant", 1, True), ("max_seqlen_q", 1.0, 1),
    ):  # fmt: skip
        for value in (wrong, right, right, wrong):
            call: dict[str, Any] = {"q": q, "cache": cache, "rows": [0], name: value}
            if name == "max_seqlen_q":
                call |= {"q": q[0], "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)}
            if value is wrong:
                with pytest.raises(TypeError, match=name):
                    attention_with_kv_cache(**call)
            else:
                attention_with_kv_cache(**call)


@pytest.mark.parametrize(("name", "value"), [("max_seqlen_q", 1), ("seqlens_q", [1])])
def test_lengths_of_packed_queries_are_refused_without_offsets(name: str, value: Any) -> None:
    """A dense call ignored max_seqlen_q."""
    cache, new = two_rows(), tokens(1, 1, 2, 8)
    before = cache.lengths
    wrong: dict[str, Any] = {name: value}
    with pytest.raises(InvalidInput, match=f"{name} was given without cu_seqlens_q"):
        attention_with_kv_cache(new, cache, rows=[0], k_new=new, v_new=new, **wrong)
    assert cache.lengths == before


def test_warmup_makes_the_plans_of_a_server() -> None:
    problems = [
        AttentionProblem(
            batch=2, seqlen_q=n, seqlen_k=64, num_heads_q=4, num_heads_kv=2, head_dim=16, head_dim_v=16,
            dtype="float32", softmax_scale=0.25, page_size=page_size,
        )
        for n in (1, 8)
        for page_size in (0, 16)
    ]  # fmt: skip
    assert warmup(problems, DEVICE) == 4
    assert warmup(problems, DEVICE, workers=3) == 4
    assert warmup([], DEVICE) == 0
    with pytest.raises(InvalidInput, match="workers is 0; it must be at least 1"):
        warmup(problems, DEVICE, workers=0)
    wrong: Any
    for wrong in (problems[0], None, 5):
        with pytest.raises(TypeError, match=f"problems is of type {type(wrong).__name__}; it must be a sequence"):
            warmup(wrong, DEVICE)
    if not torch.cuda.is_available():
        with pytest.raises(InvalidInput, match="there is no GPU"):
            warmup(problems)
    with pytest.raises(TypeError, match=r"workers is 1\.5"):
        warmup(problems, DEVICE, workers=1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="num_warps is none of them"):
        warmup(problems, DEVICE, num_warps=3)
    for number, error, text in ((0, InvalidInput, "num_splits is 0; it must be at least 1"), ("2", TypeError, "'2'")):
        with pytest.raises(error, match=text):
            warmup(problems, DEVICE, kernel="large_head_dim", num_splits=number)
    with pytest.raises(InvalidInput, match="num_splits was given with batch_invariant=True"):
        warmup([replace(problems[1], batch_invariant=True)], DEVICE, num_splits=2)
    with pytest.raises(UnsupportedProblem):
        wide = replace(problems[1], head_dim=300)
        warmup([wide], DEVICE, kernel="split_kv")


@pytest.mark.parametrize(("seqlen", "kernel"), [(64, "flash_bwd"), (128, "hopper/flash_bwd")])
def test_warmup_compiles_what_a_call_with_gradients_runs(
    monkeypatch: pytest.MonkeyPatch, seqlen: int, kernel: str
) -> None:
    """Gradient kernels compile in their first run, so that it must take place."""
    problem = AttentionProblem(
        batch=2, seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=4, num_heads_kv=2, head_dim=64, head_dim_v=64,
        dtype="bfloat16", softmax_scale=0.25, requires_grad=True,
    )  # fmt: skip
    bound: list[tuple[str, AttentionProblem]] = []
    run: list[tuple[str, bool]] = []  # name and whether there is a gradient of the log-sum-exp
    for family in (*dispatch.KERNELS, *dispatch.GRADIENT_KERNELS):
        name = family.NAME

        def bind(problem: AttentionProblem, *rest: Any, name: str = name) -> Any:
            bound.append((name, problem))
            return lambda operands, results, dout, dlse: run.append((name, dlse is not None))

        monkeypatch.setitem(vars(family), "bind", bind)
    monkeypatch.setattr(api, "current_gpu", lambda device: Gpu.for_arch("sm_90"))
    assert warmup([problem], "cpu") == 1
    forward, gradients = dispatch.forward_of(problem, Gpu.for_arch("sm_90"))
    assert bound == [(dispatch.choose(forward, Gpu.for_arch("sm_90")).kernel.NAME, forward), (gradients, forward)]
    assert gradients == kernel and forward.return_lse
    assert run == [(kernel, False)]
    warmup([replace(problem, return_lse=True)], "cpu")
    assert run[1:] == [(kernel, False), (kernel, True)]


@pytest.mark.skipif(not INTERPRETED, reason="counts the launches of Triton's interpreter")
@pytest.mark.parametrize("packed", [False, True])
def test_warmup_binds_every_launch_of_a_training_step(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    shape = (32, 2, 16) if packed else (2, 16, 2, 16)
    problem = AttentionProblem(
        batch=2, seqlen_q=16, seqlen_k=16, num_heads_q=2, num_heads_kv=2, head_dim=16, head_dim_v=16, dtype="float16",
        softmax_scale=0.25, packed=packed, total_q=32 * packed, total_k=32 * packed, has_sinks=True, return_lse=True,
        requires_grad=True,
    )  # fmt: skip
    bound: list[Any] = []
    bind = launch.bind

    def note(spec: launch.Launch, *rest: Any) -> Any:
        bound.append((spec.kernel, spec.grid, spec.scalars, spec.constants, spec.options))
        return bind(spec, *rest)

    monkeypatch.setattr(launch, "bind", note)
    assert warmup([problem], "cpu", kernel="flash_fwd") == 1
    warm = bound.copy()
    bound.clear()
    q, k, v = (torch.randn(shape, dtype=torch.float16, requires_grad=True) for _ in range(3))
    sinks = torch.zeros(2, requires_grad=True)
    call: dict[str, Any] = {"sinks": sinks, "softmax_scale": 0.25, "kernel": "flash_fwd", "return_lse": True}
    if packed:
        offsets = torch.tensor([0, 16, 32], dtype=torch.int32)
        call |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 16, "max_seqlen_k": 16}
    out, lse = (attention_varlen if packed else attention)(q, k, v, **call)
    torch.autograd.backward([out], [torch.randn_like(out)], retain_graph=True)
    torch.autograd.backward([out, lse], [torch.randn_like(out), torch.randn_like(lse)])
    assert len(bound) > 2 and all(found in warm for found in bound)


def test_calls_made_before_are_recalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not looked at again while their layouts are the same; looked at where anything differs that a plan relies on."""
    cache = make(num_layers=2)
    rows = [cache.add(), cache.add()]
    cache.extend(rows, 5)
    q, index = tokens(2, 1, 4, 8), cache.index(rows)
    for layer in cache.layers:
        layer.k.normal_()
        layer.v.normal_()

    def call(q: torch.Tensor = q, layer: int = 0, **more: Any) -> torch.Tensor:
        options: dict[str, Any] = {"rows": index, "window_size": (2, 0)} | more
        out: torch.Tensor = attention_with_kv_cache(q, cache.layers[layer], **options)
        return out

    first = call()
    unaligned = torch.cat([torch.zeros(1, device=DEVICE), q.flatten()])[1:].view(q.shape)
    assert call(unaligned).equal(first)
    with monkeypatch.context() as patch:
        patch.setattr(plans, "plan_key", lambda *_: pytest.fail("the call was described again"))
        assert call().equal(first)
        assert not call(layer=1).equal(first)
        assert call(q.repeat(1, 2, 1, 1))[:, 1:].equal(first), "another length is of the same class"
        others: list[dict[str, Any]] = [
            {"q": unaligned}, {"q": q.transpose(1, 2).contiguous().transpose(1, 2).half()},
            {"window_size": (3, 0)}, {"causal": True}, {"rows": None}, {"rows": index.long()}, {"num_splits": 2},
            {"sinks": tokens(4)},
        ]  # fmt: skip
        for other in others:
            with pytest.raises(pytest.fail.Exception, match="described again"):
                call(**other)
    cache.extend(rows, 1)  # lengths are no part of a plan
    assert not call().equal(first)


# More or fewer new tokens than queries --------------------------------------------------------------------------------


@pytest.mark.parametrize("seqlen_new", [1, 5, 9])
@pytest.mark.parametrize("owner", ["PagedKVCache", "CacheLayer"])
def test_new_tokens_need_not_be_as_many_as_queries(owner: str, seqlen_new: int) -> None:
    """The queries are the last tokens of the grown sequence, as if the tokens had been appended before."""
    apart, together = two_rows(), two_rows()
    q = tokens(2, 3, 4, 8)
    k, v = tokens(2, seqlen_new, 2, 8, seed=5), tokens(2, seqlen_new, 2, 8, seed=6)
    apart.append([0, 1], k, v)
    expected = attention_with_kv_cache(q, apart, rows=[0, 1], causal=True)
    cache: Any = together
    if owner == "CacheLayer":
        together.extend([0, 1], seqlen_new)
        cache = together.layer
    rows: Any = [0, 1]
    found = attention_with_kv_cache(q, cache, rows=rows, k_new=k, v_new=v, causal=True, checked=True)
    assert torch.equal(found, expected)
    for row in rows:
        assert all(map(torch.equal, read(together, row), read(apart, row)))
    check_books(together)
    before = visible(together)
    for change, named in (
        ({"k_new": k[:1]}, "k_new"),
        ({"v_new": v[:, :0]}, "v_new"),
        ({"rotary": Rotary.of(8, 64, device=DEVICE)}, "k_new"),
    ):
        with pytest.raises(InvalidInput, match=named):
            attention_with_kv_cache(q, cache, rows=rows, **{"k_new": k, "v_new": v, **change})  # type: ignore[arg-type]
        assert visible(together) == before


def test_what_the_cache_knows_counts_the_tokens_that_are_appended() -> None:
    cache = two_rows()
    q, new = tokens(1, 1, 4, 8), tokens(1, 3, 2, 8)
    said: dict[str, Any] = {"rows": [0], "k_new": new, "v_new": new, "causal": True}
    with pytest.raises(InvalidInput, match="max_seqlen_k is 8 and row 0 has 9"):
        attention_with_kv_cache(q, cache, max_seqlen_k=8, **said)
    assert cache.lengths[0] == 6
    attention_with_kv_cache(q, cache, max_seqlen_k=9, **said)
    assert cache.lengths[0] == 9


def test_a_row_without_queries_needs_no_evicted_token() -> None:
    cache = two_rows()
    cache.evict(1, 2)
    q, offsets = tokens(2, 4, 8), ints(0, 0, 2)
    said: dict[str, Any] = {"cu_seqlens_q": offsets, "causal": True}
    found = attention_with_kv_cache(q, cache, rows=[1, 0], seqlens_q=[0, 2], **said)
    assert torch.equal(found, attention_with_kv_cache(q[None], cache, rows=[0], causal=True)[0])
    with pytest.raises(InvalidInput, match="evicted"):
        attention_with_kv_cache(q, cache, rows=[1, 0], seqlens_q=[2, 0], cu_seqlens_q=ints(0, 2, 2), causal=True)
    with pytest.raises(InvalidInput, match="evicted"):
        attention_with_kv_cache(
            q, cache, rows=[1, 0], max_seqlen_q=2, **said
        )  # which row has queries is not known on the host


def test_a_compiled_call_breaks_the_graph_once() -> None:
    """Dynamo traces nothing of the host's work, and the parts before and after the call are one graph each."""
    cache, q = two_rows(), tokens(2, 1, 4, 8, seed=5)
    graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def call(q: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attention_with_kv_cache(2 * q, cache, rows=[0, 1])
        return out + 1

    compiled = torch.compile(call, backend=count)
    assert torch.equal(compiled(q), call(q))
    assert torch.equal(compiled(-q), call(-q))
    assert len(graphs) == 2
