"""`split_kv` where tensor maps bring K and V: the same results as by pointers, at every edge, whatever lies behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import paged
from tests.conformance.gates import forward_references, judge_forward
from tests.conformance.harness import DEVICE, ON_GPU
from tests.conformance.paged import PagedCase
from warpwave import Causal, attention, attention_varlen, plans
from warpwave.kernels import split_kv
from warpwave.kernels.split_kv import tensor_maps
from warpwave.runtime.bounded import Bounded

MAPS = split_kv.Config(16, 32, 4, 2, by_map=True)
CONFIGS = {
    "one": MAPS,
    "three": replace(MAPS, num_splits=3),
    "pieces": replace(MAPS, num_splits=2, pieces=5),
}
DIMS = ((64, 64), (128, 64)) if ON_GPU else ((16, 16), (24, 40))
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "top left": {"causal": Causal("top_left")},
    "window": {"window_size": (40, 0)},
    "window both sides, sinks": {"window_size": (33, 5), "sinks": True},
    "softcap, ALiBi": {"softcap": 9.0, "alibi": True},
}
Launched = list[tuple[tensor_maps.MapPlan, ...]]


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """The plans of every launch that is bound."""
    seen: Launched = []
    family = tensor_maps.family

    def noted(spec: Any, plans: Any) -> Any:
        seen.append(tuple(plans))
        return family(spec, plans)

    monkeypatch.setattr(tensor_maps, "family", noted)
    for table in ("_plans", "_classes", "_last"):  # a call of a known class binds nothing
        monkeypatch.setattr(plans, table, Bounded(plans.MAX_PLANS))
    yield seen


def normal(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=g, device=DEVICE).to(torch.float16)


def qkv(batch: int, seqlen_q: int, seqlen_k: int, dims: tuple[int, int] = DIMS[0]) -> list[Tensor]:
    rows = ((seqlen_q, 4, dims[0]), (seqlen_k, 2, dims[0]), (seqlen_k, 2, dims[1]))
    return [normal(batch, *row, seed=i) for i, row in enumerate(rows)]


def both(call: Callable[[split_kv.Config], tuple[Tensor, Tensor]], config: split_kv.Config) -> tuple[Tensor, Tensor]:
    """The result by maps, held against that by pointers. On a GPU the two loops are two pieces of machine code."""
    by_map, by_pointer = call(config), call(replace(config, by_map=False))
    for a, b in zip(by_map, by_pointer, strict=True):
        assert not a.isnan().any()
        if ON_GPU:
            torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)
        else:
            assert torch.equal(a, b)
    return by_map


def with_features(options: dict[str, Any]) -> dict[str, Any]:
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 1, 4, device=DEVICE)
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.linspace(0.1, 0.5, 4, device=DEVICE)
    return options


SAMPLE = (("three", (9, 70)), ("three", (1, 97)), ("one", (3, 20)))


@pytest.mark.parametrize("dims", [DIMS[0], pytest.param(DIMS[1], marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("config", "seqlen_q", "seqlen_k"),
    [
        pytest.param(config, *lengths, marks=() if (config, lengths) in SAMPLE else pytest.mark.full)
        for config in CONFIGS
        for lengths in ((1, 97), (1, 128), (9, 70), (3, 20))
    ],
)
def test_dense(seqlen_q: int, seqlen_k: int, mask: str, config: str, dims: tuple[int, int], mapped: Launched) -> None:
    """A sequence ends where its tensor does: zeros are behind it."""
    q, k, v = qkv(2, seqlen_q, seqlen_k, dims)
    options = with_features(MASKS[mask])
    both(
        lambda c: attention(q, k, v, return_lse=True, kernel="split_kv", config=c, **options),
        CONFIGS[config],
    )
    assert [bool(plans) for plans in mapped] == [True, False]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
def test_packed(config: str, causal: bool, mapped: Launched) -> None:
    """Behind a sequence lies another, whose values are NaN here: they have no effect on any but its own rows."""
    lengths_q, lengths_k = (1, 9, 0, 3), (65, 70, 31, 64)
    q = normal(sum(lengths_q), 4, 16)
    k, v = (normal(sum(lengths_k), 2, 16, seed=s) for s in (1, 2))
    k[65 + 70 : 65 + 70 + 31], v[65 + 70 : 65 + 70 + 31] = torch.nan, torch.nan  # a sequence without queries
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int().to(DEVICE) for n in (lengths_q, lengths_k))
    both(
        lambda c: attention_varlen(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=9, max_seqlen_k=70, causal=causal,
            return_lse=True, kernel="split_kv", config=c,
        ),
        CONFIGS[config],
    )  # fmt: skip
    assert [bool(plans) for plans in mapped] == [True, False]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("page_size", "config"),
    [
        # Of pages that go by pointers anyhow one config tells that they do.
        pytest.param(n, name, marks=() if n >= c.block_n or name == "three" else pytest.mark.full)
        for n in (16, 32, 64)
        for name, c in CONFIGS.items()
    ],
)
def test_pages(page_size: int, config: str, packed: bool, mapped: Launched) -> None:
    """Behind the used length of the last page lies NaN. Pages of fewer keys than a tile go by pointers."""
    lengths = ((1, 37), (5, 96), (2, 0), (3, 127)) if packed else ((3, 37), (3, 0), (3, 96), (3, 2))
    case = PagedCase(page_size, dims=DIMS[0], lengths=lengths, packed=packed, window=(45, 0), sinks=True)
    call = paged.build(case, "sharp", DEVICE)
    operands: Any = call.operands
    references = forward_references(call.problem, operands)

    def attend(config: split_kv.Config) -> tuple[Tensor, Tensor]:
        out, lse = paged.run("split_kv", call, config=config)
        verdict = judge_forward(call.problem, references, out, lse)
        assert verdict.passed and lse is not None, str(verdict)
        return out, lse.clamp_min(-1e30)

    both(attend, CONFIGS[config])
    assert [bool(plans) for plans in mapped] == [page_size >= CONFIGS[config].block_n, False]


def test_values_that_no_row_sees_are_not_read() -> None:
    """Left of a window and right of the diagonal lie NaN: tiles that a map would bring with them go by pointers."""
    for seqlen_q, window, hidden in (
        (2, (37, 0), slice(0, 59)),
        (1, (-1, -1), slice(98, 98)),
        (5, (70, 0), slice(0, 22)),
    ):
        q, k, v = qkv(1, seqlen_q, 98)
        k[:, hidden], v[:, hidden] = torch.nan, torch.nan
        both(
            lambda c, q=q, k=k, v=v, window=window: attention(  # type: ignore[misc]
                q, k, v, window_size=window, return_lse=True, kernel="split_kv", config=c
            ),
            MAPS,
        )


def test_layouts_that_maps_describe_and_those_they_do_not(mapped: Launched) -> None:
    """Views of a packed projection and heads first have maps; a last stride of 2, heads that repeat and an odd address
    have none, and go by pointers."""
    n, d = 70, 16
    together = normal(2, n, 8, d)
    heads_first = normal(2, 2, n, d, seed=3).transpose(1, 2)
    wide = normal(2, n, 2, 2 * d, seed=4)[..., ::2]
    repeated = normal(2, n, 1, d, seed=5).expand(2, n, 2, d)
    odd = normal(2 * n * 2 * d + 1, seed=6)[1:].view(2, n, 2, d)
    q = normal(2, 1, 4, d)
    for k, v, expected in (
        (together[:, :, 4:6], together[:, :, 6:], True),
        (heads_first, together[:, :, 6:], True),
        (wide, heads_first, False),
        (repeated, heads_first, False),
        (heads_first, odd, False),
    ):
        mapped.clear()
        both(lambda c, k=k, v=v: attention(q, k, v, return_lse=True, kernel="split_kv", config=c), CONFIGS["three"])  # type: ignore[misc]
        assert [bool(plans) for plans in mapped] == [expected, False]


def test_what_cannot_be_mapped(mapped: Launched) -> None:
    """A mask hides values that a map would bring; float32 has no products of TMA's tiles here."""
    q, k, v = qkv(1, 1, 70)
    mask = (torch.arange(70, device=DEVICE) % 3 == 0)[None, None, None]
    both(lambda c: attention(q, k, v, mask=mask, return_lse=True, kernel="split_kv", config=c), MAPS)
    both(lambda c: attention(*(x.float() for x in (q, k, v)), return_lse=True, kernel="split_kv", config=c), MAPS)
    assert not any(mapped)


@pytest.mark.gpu
def test_maps_follow_the_tensors() -> None:
    """One plan serves tensors at other addresses, more of them than maps are remembered, and in a graph."""
    config = replace(MAPS, num_splits=2)
    sets = [
        [normal(2, n, h, 64, seed=3 * i + j) for j, (n, h) in enumerate(((1, 4), (70, 2), (70, 2)))] for i in range(300)
    ]
    for _ in range(2):
        for q, k, v in sets:
            out = attention(q, k, v, kernel="split_kv", config=config)
            expected = attention(q, k, v, kernel="split_kv", config=replace(config, by_map=False))
            torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
    q, k, v = sets[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, kernel="split_kv", config=config)
    k.copy_(sets[1][1])
    graph.replay()
    expected = attention(q, k, v, kernel="split_kv", config=replace(config, by_map=False))
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
