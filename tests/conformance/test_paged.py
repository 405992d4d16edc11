"""Calls on a paged cache: gates, exact probes and bit-equal pairs over page sizes and splits.

All kernels that read caches run them: split_kv (in the interpreter where there is no GPU), large_head_dim, eager, and
on a GPU hopper/flash_fwd, where it claims the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance import paged
from tests.conformance.gates import ForwardReferences, forward_references, judge_forward
from tests.conformance.harness import DEVICE, GPU, ON_GPU, bits
from tests.conformance.paged import PagedCase
from tests.conformance.test_poison import Guards
from warpwave import (
    CacheLayer,
    PagedKVCache,
    UnsupportedProblem,
    attention,
    attention_with_kv_cache,
    dispatch,
    merge_states,
)
from warpwave.kernels import split_kv

PAGE_SIZES = (1, 16, 32, 64, 128, 256)
OF_HOPPER = "hopper/flash_fwd"
READERS = ("split_kv", "large_head_dim", "eager", pytest.param(OF_HOPPER, marks=pytest.mark.gpu))
each_reader = pytest.mark.parametrize("reader", READERS)
each_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)
TILE = split_kv.Config(16, 32, 4, 1)
SPLITS = {
    "one": replace(TILE, num_splits=1),
    "two": replace(TILE, num_splits=2),
    "three": replace(TILE, num_splits=3),
    "more than tiles": replace(TILE, num_splits=9),
    "pieces": replace(TILE, num_splits=2, pieces=5),
    "two in several turns, by tensor maps": replace(TILE, block_n=16, num_splits=2, by_map=True),
    "three, by tensor maps": replace(TILE, block_n=16, num_splits=3, by_map=True),
    "auto": None,
}
SEVERAL = ((3, 37), (3, 0), (3, 90), (3, 2))
MIXED = ((1, 37), (0, 5), (9, 90), (5, 0), (7, 7))
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": "bottom_right"},
    "causal top-left": {"causal": "top_left"},
    "window": {"window": (20, 0)},
    "window both sides": {"window": (17, 3)},
    "causal and window": {"causal": "bottom_right", "window": (33, -1)},
}


def crossed(page_sizes: Sequence[int], others: Sequence[str], each_with: Sequence[str], all_with: Sequence[int]) -> Any:
    """Every page size with some of the others and all of them with some page sizes; the rest in the full matrix."""
    return [
        pytest.param(size, other, marks=() if size in all_with or other in each_with else pytest.mark.full)
        for size in page_sizes
        for other in others
    ]


each_mask = pytest.mark.parametrize("mask", MASKS)


def references(call: paged.PagedCall) -> ForwardReferences:
    operands: Any = call.operands
    return forward_references(call.problem, operands)


def skip_unclaimed(reader: str, call: paged.PagedCall) -> None:
    """Skips a call that Hopper's kernel refuses, and says so by the public call too."""
    if reader == OF_HOPPER and dispatch.why_not(dispatch.hopper_flash_fwd, call.problem, GPU):
        with pytest.raises(UnsupportedProblem):
            paged.run(reader, call)
        pytest.skip("not for this kernel")


def check(reader: str, case: PagedCase, data: Any = "normal", **more: Any) -> None:
    call = paged.build(case, data, DEVICE)
    skip_unclaimed(reader, call)
    out, lse = paged.run(reader, call, **more)
    verdict = judge_forward(call.problem, references(call), out, lse)
    assert verdict.passed, f"{reader} on {case}: {verdict}"


# Gates ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page_size", "splits"), crossed(PAGE_SIZES, list(SPLITS), ("three",), (16,)))
def test_page_sizes_and_splits(page_size: int, splits: str) -> None:
    case = PagedCase(page_size, lengths=SEVERAL, causal="bottom_right", sinks=True)
    check("split_kv", case, "sharp", config=SPLITS[splits])


@each_reader
@each_mask
@pytest.mark.parametrize("packed", [False, True])
def test_masks(packed: bool, mask: str, reader: str) -> None:
    case = PagedCase(16, dtype="bfloat16", lengths=MIXED if packed else SEVERAL, packed=packed, **MASKS[mask])
    check(reader, case, "sharp")


FEATURES: dict[str, dict[str, Any]] = {
    "ALiBi": {"alibi": True, "causal": "bottom_right"},
    "softcap and sinks": {"softcap": 15.0, "sinks": True, "page_size": 1},
    "without lse": {"lse": False, "page_size": 64},
    "head_dim 192 and 128": {"dims": (192, 128), "dtype": "bfloat16"},
    "head_dim 256": {"dims": (256, 256), "lengths": ((1, 50),)},
    "head_dim 40": {"dims": (40, 59), "heads": (6, 2)},
    "one head": {"heads": (1, 1)},
    "a large group": {"heads": (24, 1), "lengths": SEVERAL, "causal": "bottom_right"},
    "float32": {"dtype": "float32:default"},
    "float32 ieee": {"dtype": "float32:ieee", "page_size": 128},
    "float32 tf32x3": {"dtype": "float32:tf32x3"},
    "float32 tf32": {"dtype": "float32:tf32", "lengths": SEVERAL},
}


@each_reader
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("data", ["normal", pytest.param("low", marks=pytest.mark.full)])
def test_features(feature: str, data: Any, reader: str) -> None:
    check(reader, replace(PagedCase(), **FEATURES[feature]), data)


@pytest.mark.gpu
@pytest.mark.parametrize("data", ["normal", "sharp", "low"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32:default"])
@each_page_size
def test_long_caches(page_size: int, dtype: str, dims: tuple[int, int], data: Any) -> None:
    lengths = ((1, 8191), (1, 1), (1, 33_000), (1, 512))
    case = PagedCase(page_size, dtype, dims, (8, 2), lengths, causal="bottom_right", max_seqlen_k=33_024)
    check("split_kv", case, data)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", ["three", "auto"])
@pytest.mark.parametrize("packed", [False, True])
def test_repeats_are_bit_equal(packed: bool, splits: str) -> None:
    case = PagedCase(16, "bfloat16", (128, 128), (8, 2), MIXED if packed else SEVERAL, packed, "bottom_right")
    call = paged.build(case, "normal", DEVICE)
    first, first_lse = paged.run("split_kv", call, config=SPLITS[splits])
    assert first_lse is not None
    for _ in range(3000):
        out, lse = paged.run("split_kv", call, config=SPLITS[splits])
        assert torch.equal(out, first) and lse is not None and torch.equal(lse, first_lse)


# Exact probes ---------------------------------------------------------------------------------------------------------


@each_reader
@pytest.mark.parametrize(("page_size", "mask"), crossed(PAGE_SIZES, list(MASKS), ("window",), (16,)))
def test_count(page_size: int, mask: str, reader: str) -> None:
    """With q = 0 every visible key counts 1; what nobody may see holds NaN."""
    call = paged.build(PagedCase(page_size, lengths=MIXED, packed=True, heads=(2, 1), **MASKS[mask]), "normal", DEVICE)
    skip_unclaimed(reader, call)
    call.operands.q.zero_()
    more = {"config": SPLITS["three"]} if reader == "split_kv" else {}
    _, lse = paged.run(reader, call, **more)
    assert lse is not None
    counted = torch.exp(lse.double()).round().long()
    expected = torch.cat([shown.sum(-1) for shown in paged.visible(call)])
    assert torch.equal(counted, expected.expand(2, -1))


@each_reader
@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("mask", ["causal", "window"])
def test_support(mask: str, page_size: int, reader: str) -> None:
    """With one-hot values an output is 0 if and only if that key is hidden: over page, tile and split edges."""
    case = PagedCase(page_size, dims=(16, 128), lengths=((3, 37), (3, 100)), heads=(2, 1), lse=False, **MASKS[mask])
    call = paged.build(case, "normal", DEVICE)
    skip_unclaimed(reader, call)
    call.operands.q.zero_()
    o = call.operands
    o.v.masked_fill_(~o.v.isnan(), 0.0)
    for b, (_, n) in enumerate(case.lengths):
        assert o.rows is not None
        at = torch.arange(n, device=DEVICE)
        pages = o.page_table[o.rows[b].long(), at // page_size].long()
        o.v[pages, at % page_size] = torch.eye(n, 128, dtype=o.v.dtype, device=DEVICE)[:, None]
    more = {"config": SPLITS["two"]} if reader == "split_kv" else {}
    out, _ = paged.run(reader, call, **more)
    for result, shown in zip(out, paged.visible(call), strict=True):
        assert torch.equal(result[..., : shown.shape[1]] != 0, shown[:, None].expand(-1, 2, -1))


@each_reader
@each_page_size
def test_retrieval(page_size: int, reader: str) -> None:
    """Where one key leads by more than exp2's range, the output is that row of V, bit for bit, wherever it lies."""
    call = paged.build(PagedCase(page_size, dims=(64, 16), lengths=((5, 120), (5, 64)), lse=False), "normal", DEVICE)
    skip_unclaimed(reader, call)
    o, g = call.operands, torch.Generator(DEVICE).manual_seed(1)
    expected = torch.zeros(2, 5, 4, 16, dtype=o.v.dtype, device=DEVICE)
    for b, (keys, values) in enumerate(zip(call.keys, call.values, strict=True)):
        codes = torch.randint(0, 2, keys.shape, generator=g, device=DEVICE).to(o.k.dtype) * 2 - 1
        at = torch.arange(len(keys), device=DEVICE)
        o.k[o.page_table[o.rows[b].long(), at // page_size].long(), at % page_size] = codes
        for i in range(5):
            for h in range(4):
                target = int(torch.randint(0, len(keys), (), generator=g, device=DEVICE))
                o.q[b, i, h] = 64 * codes[target, h // 2]
                expected[b, i, h] = values[target, h // 2]
    more = {"config": SPLITS["three"]} if reader == "split_kv" else {}
    out, _ = paged.run(reader, call, **more)
    assert torch.equal(out, expected)


# Pairs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page_size", "splits"), crossed(PAGE_SIZES, [name for name in SPLITS if name != "auto"], ("two",), (16,))
)
def test_paged_equals_dense(page_size: int, splits: str) -> None:
    """With the same tiles and splits, bit for bit."""
    case = PagedCase(page_size, lengths=((3, 90), (3, 90)), window=(40, 0), sinks=True, alibi=True, max_seqlen_k=90)
    if splits in ("pieces", "more than tiles") and not ON_GPU:  # as many blocks as the interpreter has time for
        case = replace(case, heads=(2, 1))
    call = paged.build(case, "normal", DEVICE)
    o = call.operands
    dense = attention(
        o.q, torch.stack(call.keys), torch.stack(call.values), window_size=(40, 0), sinks=o.sinks,
        alibi_slopes=o.alibi_slopes, return_lse=True, kernel="split_kv", config=SPLITS[splits],
    )  # fmt: skip
    assert bits(*paged.run("split_kv", call, config=SPLITS[splits])) == bits(*dense)


@each_reader
def test_empty_sequences_do_not_matter(reader: str) -> None:
    """Rows of an empty sequence are 0 and minus infinity, the others bit-equal to a run without it."""
    case = PagedCase(16, lengths=((2, 37), (2, 0), (2, 90)))
    call = paged.build(case, "normal", DEVICE)
    out, lse = paged.run(reader, call, **({"config": SPLITS["two"]} if reader == "split_kv" else {}))
    assert lse is not None and call.operands.rows is not None
    assert not out[1].any() and (lse[1] == -torch.inf).all()
    kept = [0, 2]
    o = call.operands._replace(q=call.operands.q[kept], rows=call.operands.rows[kept])
    without = call._replace(operands=o)
    alone = paged.run(reader, without, **({"config": SPLITS["two"]} if reader == "split_kv" else {}))
    assert bits(out[kept], lse[kept]) == bits(*alone)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.full), "float32:default"])
@pytest.mark.parametrize("reader", READERS[:3])
def test_batch_invariance(reader: str, dtype: str, packed: bool) -> None:
    """A sequence alone, first, last and among others: bit-equal. 64 of them on a GPU, and every order of few."""
    many = [(1 + 2 * (i % 3 == 0) * packed, 1 + 37 * i % 300) for i in range(64 if ON_GPU else 4)]
    lengths = ((3 if packed else 1, 290), *many)
    case = PagedCase(16, dtype, lengths=tuple(lengths), packed=packed, causal="bottom_right", max_seqlen_k=304)
    call = paged.build(case, "normal", DEVICE)
    o = call.operands
    assert o.rows is not None
    if reader == "large_head_dim" and packed:
        with pytest.raises(UnsupportedProblem, match="batch_invariant cannot be kept"):
            paged.run(reader, call, batch_invariant=True)
        return
    results = []
    pairs = [[0, 1], [*range(1, len(lengths)), 0]] if ON_GPU else []
    for order in ([0], [1, 0], *pairs, list(range(len(lengths)))):
        q = [paged.by_sequence(call, o.q)[b] for b in order]
        some = o._replace(q=torch.cat(q) if packed else torch.stack(q), rows=o.rows[order].contiguous())
        if packed:
            ends = torch.tensor([0, *(lengths[b][0] for b in order)], device=DEVICE).cumsum(0)
            some = some._replace(cu_seqlens_q=ends.to(torch.int32))
        problem = replace(call.problem, lengths=tuple(lengths[b] for b in order), batch=len(order))
        problem = replace(problem, seqlen_q=max(lengths[b][0] for b in order))
        out, lse = paged.run(reader, call._replace(operands=some, problem=problem), batch_invariant=True)
        assert lse is not None
        at = order.index(0)
        first = sum(lengths[b][0] for b in order[:at])
        lse_of = lse[:, first : first + lengths[0][0]] if packed else lse[at]
        results.append(bits(paged.by_sequence(call._replace(problem=problem), out)[at], lse_of))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(("dtype", "by_map"), [("float16", False), ("float16", True), ("float32:ieee", False)])
@pytest.mark.parametrize("window", [(-1, -1), (75, 0)])
def test_bits_of_pieces_do_not_depend_on_shares(window: tuple[int, int], dtype: str, by_map: bool) -> None:
    """Sequences of fewer tiles than pieces, of as many, and of more; a tile of rows that sees a part of them. Rounding
    to 16 bits would hide most differences."""
    lengths = ((3, 127), (3, 0), (3, 33), (3, 160))
    case = PagedCase(32, heads=(2, 1), lengths=lengths, window=window, sinks=True, max_seqlen_k=160, dtype=dtype)
    call = paged.build(case, "normal", DEVICE)
    config = replace(TILE, pieces=5, by_map=by_map)
    out, lse = paged.run("split_kv", call, config=config)
    verdict = judge_forward(call.problem, references(call), out, lse)
    assert verdict.passed, str(verdict)
    for shares in (2, 5):
        again = paged.run("split_kv", call, config=replace(config, num_splits=shares))
        assert bits(*again) == bits(out, lse), shares


@pytest.mark.parametrize("page_size", [*(pytest.param(n, marks=pytest.mark.full) for n in (1, 32, 64, 128, 256)), 16])
def test_shared_and_evicted_pages(page_size: int) -> None:
    """Forks that share pages, and a window whose pages behind it are gone: as the same tokens in pages of their own."""
    cache = PagedKVCache(
        num_pages=600 // page_size + 8, page_size=page_size, num_heads_kv=2, head_dim=16, max_batch=4, max_seqlen=300,
        dtype=torch.float16, device=DEVICE,
    )  # fmt: skip
    g = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=DEVICE).half()

    first = cache.add()
    k, v = normal(1, 101, 2, 16), normal(1, 101, 2, 16)
    cache.append([first], k, v)
    rows = [first, cache.fork(first), cache.fork(first, 77)]
    k_new, v_new = normal(3, 20, 2, 16), normal(3, 20, 2, 16)
    cache.append(rows, k_new, v_new)
    shared = cache.shared_prefix(rows)
    assert shared == 77 // page_size * page_size
    keys = [torch.cat([k[0, :n], k_new[i]]) for i, n in enumerate((101, 101, 77))]
    values = [torch.cat([v[0, :n], v_new[i]]) for i, n in enumerate((101, 101, 77))]
    q = normal(3, 2, 4, 16)
    config = SPLITS["two"]

    def expected(i: int) -> list[str]:
        table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
        used = torch.tensor([len(keys[i])], dtype=torch.int32, device=DEVICE)
        alone = CacheLayer(_one_page(keys[i]), _one_page(values[i]), table, used)
        return bits(
            *attention_with_kv_cache(
                q[i : i + 1], alone, causal=True, window_size=(30, 0), return_lse=True, kernel="split_kv", config=config
            )
        )

    for _ in range(2):  # the second time with pages gone
        out, lse = attention_with_kv_cache(
            q, cache, rows=rows, causal=True, window_size=(30, 0), return_lse=True, kernel="split_kv", config=config,
            checked=True,
        )  # fmt: skip
        for i in range(3):
            assert bits(out[i : i + 1], lse[i : i + 1]) == expected(i)
        # The next token sees one key less; what is asked again here are the last two.
        assert cache.evict(rows, 32) >= 0
    assert all(cache.pages(row)[0] == -1 for row in rows) or page_size > 64


def _one_page(x: torch.Tensor) -> torch.Tensor:
    """A pool of one page that holds a whole sequence, a power of two long."""
    size = 1 << (len(x) - 1).bit_length()
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, size - len(x)), value=torch.nan)[None]


@pytest.mark.parametrize("packed", [False, True])
def test_a_shared_prefix_is_read_once(packed: bool) -> None:
    """The same result within the gates, sinks counted once, for a prefix that ends inside a page too."""
    case = PagedCase(16, lengths=((2, 100), (2, 70), (2, 66)), packed=packed, causal="bottom_right", sinks=True)
    call = paged.build(case, "normal", DEVICE)
    o = call.operands
    assert o.rows is not None
    rows = o.rows.long()
    o.page_table[rows[1:], :4] = o.page_table[rows[0], :4]
    expected = references(call)
    for shared in (64, 50):
        out, lse = paged.run("split_kv", call, shared_prefix=shared, checked=True)
        verdict = judge_forward(call.problem, expected, out, lse)
        assert verdict.passed, f"{shared}: {verdict}"
    with pytest.raises(UnsupportedProblem, match="window"):
        paged.run("split_kv", call._replace(options=call.options | {"window_size": (9, 0)}), shared_prefix=64)


@pytest.mark.parametrize("reader", READERS[:3])  # in float32
def test_chunked_prefill_equals_prefill(reader: str) -> None:
    """Chunks of a prompt, each with the cache so far, meet the gates of the whole; with tokens one by one."""
    g = torch.Generator(DEVICE).manual_seed(0)
    q, k, v = (torch.randn(1, 40, heads, 16, generator=g, device=DEVICE) for heads in (4, 2, 2))
    cache = PagedKVCache(
        num_pages=8, page_size=16, num_heads_kv=2, head_dim=16, max_batch=1, max_seqlen=128, dtype=torch.float32,
        device=DEVICE,
    )  # fmt: skip
    row, outs, at = cache.add(), [], 0
    for chunk in (20, 17, 1, 1, 1):
        part = slice(at, at + chunk)
        outs.append(
            attention_with_kv_cache(
                q[:, part], cache, rows=[row], k_new=k[:, part], v_new=v[:, part], causal=True, kernel=reader
            )
        )
        at += chunk
    whole = attention(q, k, v, causal=True)
    torch.testing.assert_close(torch.cat(outs, 1), whole, atol=2e-6, rtol=2e-5)


# Memory ---------------------------------------------------------------------------------------------------------------

FAR = {
    "page ids": lambda o: o._replace(page_table=torch.full_like(o.page_table, 2**31 - 1)),
    "negative page ids": lambda o: o._replace(page_table=torch.full_like(o.page_table, -(2**31))),
    "lengths": lambda o: o._replace(seqused_k=torch.full_like(o.seqused_k, 2**31 - 1)),
    "negative lengths": lambda o: o._replace(seqused_k=torch.full_like(o.seqused_k, -5)),
    "rows": lambda o: o._replace(rows=torch.full_like(o.rows, 2**31 - 1)),
    "negative rows": lambda o: o._replace(rows=torch.full_like(o.rows, -(2**31))),
}


@each_reader
@pytest.mark.parametrize("what", FAR)
@pytest.mark.parametrize("page_size", [pytest.param(1, marks=pytest.mark.full), 64])
def test_wrong_contents_unchecked_stay_inside_the_tensors(
    page_size: int, what: str, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are unspecified; nothing outside the outputs is written, no read faults, and the call returns."""
    call = paged.build(PagedCase(page_size, lengths=((2, 37), (2, 90))), "normal", DEVICE)
    skip_unclaimed(reader, call)
    guards = Guards()
    guards.watch(monkeypatch)
    operands = FAR[what](call.operands)
    operands = type(operands)(*(None if t is None else guards.place(t) for t in operands))
    paged.run(reader, call._replace(operands=operands))
    if ON_GPU:
        torch.cuda.synchronize()
    guards.assert_intact()


@pytest.mark.parametrize("case", [PagedCase(16, lengths=SEVERAL), PagedCase(1, lengths=MIXED, packed=True)], ids=str)
@pytest.mark.parametrize("splits", ["one", "three", "pieces", "auto"])
def test_every_cell_is_written_and_no_input(case: PagedCase, splits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = paged.build(case, "normal", DEVICE)
    guards = Guards()
    before = bits(*call.operands)
    with monkeypatch.context() as patch:
        guards.watch(patch)
        out, lse = paged.run("split_kv", call, config=SPLITS[splits])
    guards.assert_intact()
    assert not out.isnan().any() and lse is not None and not lse.isnan().any()
    assert bits(*call.operands) == before, "an input was written"


# Graphs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("launched_ahead", [False, True])
def test_replay_sees_changed_lengths_and_tables(launched_ahead: bool, page_size: int) -> None:
    """A decode step captured once, append and all; sequences grow, end and begin between replays."""
    cache = PagedKVCache(
        num_pages=64, page_size=page_size, num_heads_kv=2, head_dim=64, max_batch=4, max_seqlen=256, device=DEVICE
    )
    layer = cache.layers[0]
    q, k, v = (torch.zeros(4, 1, heads, 64, dtype=torch.bfloat16, device=DEVICE) for heads in (8, 2, 2))
    config = split_kv.Config(16, 64, 4, 2, 3, 0, launched_ahead, by_map=page_size == 64)

    def step() -> torch.Tensor:
        return attention_with_kv_cache(q, layer, k_new=k, v_new=v, kernel="split_kv", config=config)

    rows = [cache.add() for _ in range(4)]
    cache.extend(rows)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    g = torch.Generator(DEVICE).manual_seed(0)
    memory = None
    for turn in range(60):
        if turn % 7 == 6:
            cache.free(turn % 4)
            assert cache.add() == turn % 4
        cache.extend(rows, 1 + turn % 3)
        for x in (q, k, v):
            x.copy_(torch.randn(x.shape, generator=g, device=DEVICE))
        graph.replay()
        replayed = bits(out, layer.k[cache.pages(0)[-1]])
        assert replayed == bits(step(), layer.k[cache.pages(0)[-1]])
        memory = memory or torch.cuda.memory_allocated()
        assert torch.cuda.memory_allocated() <= memory + 4096


@pytest.mark.gpu
@pytest.mark.parametrize("launched_ahead", [False, True])
def test_partial_results_of_streams_and_graphs_are_their_own(launched_ahead: bool) -> None:
    """Calls of several sizes run on two streams at once, and in two graphs beside them."""
    config = split_kv.Config(16, 64, 4, 3, 7, 0, launched_ahead)
    g = torch.Generator(DEVICE).manual_seed(0)
    calls = []
    for batch in (1, 40, 3):
        q = torch.randn(batch, 1, 8, 64, generator=g, device=DEVICE, dtype=torch.bfloat16)
        k, v = (torch.randn(batch, 900, 2, 64, generator=g, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        calls.append(lambda q=q, k=k, v=v: attention(q, k, v, kernel="split_kv", config=config))
    expected = [bits(call()) for call in calls]
    streams, graphs = [torch.cuda.Stream() for _ in range(2)], []
    for order in (calls, calls[::-1]):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [call() for call in order]
        graphs.append((graph, outs if order is calls else outs[::-1]))
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                found += [[call() for call in calls] for _ in range(5)]
                graph.replay()
        torch.cuda.synchronize()
        for outs in (*found, *(outs for _, outs in graphs)):
            assert [bits(out) for out in outs] == expected


@pytest.mark.gpu
def test_the_books_are_not_captured() -> None:
    cache = PagedKVCache(
        num_pages=4, page_size=16, num_heads_kv=1, head_dim=64, max_batch=1, max_seqlen=32, device=DEVICE
    )
    row = cache.add()
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(1, device=DEVICE)
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="before the replay"):
            cache.extend([row])
        x += 1
    assert cache.lengths == {row: 0}


# Merging --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", READERS[:3])  # in float32
def test_merged_parts_equal_the_whole(reader: str) -> None:
    """Keys of a cache attended to in parts by two calls, merged by `merge_states`, against the whole."""
    case = PagedCase(16, dtype="float32:ieee", lengths=((2, 96), (2, 96)))
    call = paged.build(case, "normal", DEVICE)
    o = call.operands
    parts = []
    for begin, pages in ((0, 2), (2, 4)):
        table = o.page_table[:, begin:].contiguous()
        used = torch.where(o.seqused_k == 96, 16 * pages, 0).to(torch.int32)
        parts.append(paged.run(reader, call._replace(operands=o._replace(page_table=table, seqused_k=used))))
    outs, lses = zip(*parts, strict=True)
    out, lse = merge_states(outs, lses)
    verdict = judge_forward(call.problem, references(call), out, lse)
    assert verdict.passed, str(verdict)


def test_what_split_kv_claims() -> None:
    """A kernel that refused everything would pass whatever compares it."""
    for feature in FEATURES.values():
        call = paged.build(replace(PagedCase(), **feature), "normal", DEVICE)
        assert not split_kv.why_not(call.problem, GPU)
