"""The Hopper forward's own source on a CPU: its protocol and arithmetic, tile by tile, against the gates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import cases, harness, paged
from tests.conformance.cases import PLAIN
from tests.conformance.datasets import Data
from tests.conformance.gates import forward_references, judge_forward
from tests.conformance.paged import PagedCase
from tests.kernels.hopper import gluon_on_cpu
from tests.marks import needs_triton, one_in
from warpwave import PagedKVCache, precision
from warpwave.gpu import Gpu
from warpwave.kernels import append_kv, dropout, quantize_tensor
from warpwave.kernels.hopper import (
    factors,
    flash_fwd,
    pages,
    parts,
    rows,
    scheduler,
    serial,
    softmax,
    split_float32,
    token_factors,
    visible,
    words,
)
from warpwave.kernels.hopper.flash_fwd import (
    consumer,
    float32_tiles,
    kernel,
    launches,
    mask_bias,
    producer,
    splits,
    widener,
)
from warpwave.kernels.hopper.flash_fwd.config import num_parts
from warpwave.kv_cache import new_tokens
from warpwave.operands import AnyOperands
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch
from warpwave.workbench.verify.reference import oracle

MODULES = (
    *(kernel, consumer, producer, mask_bias, factors, pages, parts, rows, scheduler, serial, softmax, split_float32),
    *(float32_tiles, splits, token_factors, visible, widener, words),
)
H200 = Gpu.for_arch("sm_90")
CPU = torch.device("cpu")
pytestmark = needs_triton


def on_cpu(
    problem: AttentionProblem,
    operands: AnyOperands,
    config: flash_fwd.Config,
    maps_of_keys: list[gluon_on_cpu.Map] | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse by the source of the kernel and its roles, one block after another; appends the maps of K and V."""
    out, lse = gluon_on_cpu.unwritten(problem, operands.q)
    if problem.dtype == "float32":
        specified = launches.specify_parts(problem, H200, operands, out, lse, config)
        ahead, attend = specified.before, specified.attend
        # What is not in use is not written, and whatever lies there must do no harm.
        inverses = attend.tensors[13 + 8]  # after the maps, out, lse, slopes, sinks, offsets, words and bias
        for written in (*specified.parts, *([] if inverses is None else [inverses])):
            written.fill_(torch.nan)
        if num_parts(problem, H200) == 2:  # a second part alone may hold NaN
            for part in specified.parts:
                part[:, ::2] = 7.0
    else:
        whole = flash_fwd.specify(problem, H200, operands, out, lse, config)
        *ahead, attend = (whole,) if isinstance(whole, launch.Launch) else whole
    merge = []
    if config.num_splits > 1:
        (attend, merging), ahead = (*ahead, attend), []
        merge = [merging._replace(constants={**merging.constants, "LAUNCHED_AHEAD": False})]  # not interpreted
        for partial in merging.tensors[:2]:  # what is not written must do no harm
            partial.fill_(torch.nan)
    for spec in ahead:
        launch.bind(spec)(*spec.tensors)
    maps = gluon_on_cpu.run_launch(attend, MODULES, 2, {})
    for spec in merge:
        launch.bind(spec)(*spec.tensors)
    if maps_of_keys is not None:
        maps_of_keys += [found for found in maps[3:9] if found is not None]
    return out, lse


def gate(case: cases.Case, config: flash_fwd.Config, data: Data = "normal") -> None:
    call = cases.build(case, data, CPU)
    out, lse = on_cpu(call.problem, call.operands, config)
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), out, lse)
    assert verdict.passed, str(verdict)


SHORT = replace(PLAIN, lengths=(150, 210), heads=(2, 1), lse=True)
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": "bottom_right", "sinks": True},
    "top left": {"causal": "top_left", "lengths": (210, 70)},
    "window": {"window": (60, 5), "alibi": "heads", "softcap": 3.0},
    "packed": {"packed": True, "batch": 4, "causal": "bottom_right"},
    "long rows of one query": {"lengths": (1, 300), "batch": 2},
}
KINDS: dict[str, tuple[str, tuple[int, int], flash_fwd.Config]] = {
    "bf16x6": ("float32:bf16x6", (40, 59), flash_fwd.Config(128, 64, 2)),
    "fp16x3, one stage": ("float32:bf16x3", (192, 112), flash_fwd.Config(192, 32, 1)),
    "fp16x3, wide": ("float32:default", (80, 256), flash_fwd.Config(64, 32, 1)),
    "fp16x1": ("float32:tf32", (64, 80), flash_fwd.Config(128, 64, 2)),
    "fp16x1, three groups": ("float32:tf32", (40, 59), flash_fwd.Config(192, 128, 2)),
    "16 bits, overlapped": ("float16", (64, 80), flash_fwd.Config(128, 64, 2)),
    "16 bits, serial": ("float16", (64, 352), flash_fwd.Config(128, 32, 2)),
    "fp16x1, padded V": ("float32:tf32", (40, 112), flash_fwd.Config(128, 64, 2, narrowest_v=64)),
    "16 bits, padded": ("bfloat16", (48, 112), flash_fwd.Config(192, 64, 2, narrowest_v=64)),
    "16 bits, padded V": ("bfloat16", (112, 48), flash_fwd.Config(192, 64, 2, narrowest_v=64)),
    "16 bits, out in the memory of Q's first piece": ("bfloat16", (192, 128), flash_fwd.Config(128, 128, 2)),
    "16 bits, out by halves": ("bfloat16", (256, 256), flash_fwd.Config(128, 64, 2)),
}


@one_in(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("features", CALLS)
def test_the_protocol_on_a_cpu(features: str, kind: str) -> None:
    dtype, dims, config = KINDS[kind]
    gate(replace(SHORT, dtype=dtype, dims=dims, **CALLS[features]), config)


TOGETHER: dict[str, tuple[str, tuple[int, int], tuple[int, int], flash_fwd.Config]] = {
    "a group of 4": ("float16", (64, 80), (8, 2), flash_fwd.Config(128, 64, 2, heads=4)),
    "2 of a group of 6": ("bfloat16", (48, 112), (6, 1), flash_fwd.Config(192, 64, 2, narrowest_v=64, heads=2)),
    "a query a warpgroup": ("float16", (32, 32), (64, 1), flash_fwd.Config(128, 64, 2, heads=64)),
    "serial": ("float16", (64, 352), (4, 2), flash_fwd.Config(128, 32, 2, heads=2)),
    "out in the memory of Q's first piece": ("bfloat16", (192, 128), (8, 1), flash_fwd.Config(128, 128, 2, heads=8)),
    "out by halves": ("bfloat16", (256, 256), (4, 1), flash_fwd.Config(128, 64, 2, heads=4)),
}
OF_GROUPS: dict[str, dict[str, Any]] = {
    "full": {"softcap": 3.0},
    "causal": {"causal": "bottom_right", "sinks": True},
    "top left": {"causal": "top_left", "lengths": (70, 40)},
    "window": {"window": (60, 5), "sinks": True},
    "packed": {"packed": True, "batch": 4, "causal": "bottom_right"},
    "one query": {"lengths": (1, 300), "batch": 2},
}


@one_in(4)
@pytest.mark.parametrize("kind", TOGETHER)
@pytest.mark.parametrize("features", OF_GROUPS)
def test_heads_that_share_tiles_on_a_cpu(features: str, kind: str) -> None:
    dtype, dims, heads, config = TOGETHER[kind]
    gate(replace(SHORT, dtype=dtype, dims=dims, heads=heads, **{"lengths": (45, 130)} | OF_GROUPS[features]), config)


SPLIT: dict[str, tuple[str, tuple[int, int], tuple[int, int], flash_fwd.Config]] = {
    "of three": ("float16", (64, 80), (8, 2), flash_fwd.Config(128, 64, 2, heads=4, num_splits=3)),
    "of one block of 64": ("bfloat16", (40, 48), (2, 2), flash_fwd.Config(64, 64, 3, 3, num_splits=2)),
    "more than tiles": (
        "bfloat16",
        (48, 112),
        (6, 1),
        flash_fwd.Config(192, 64, 2, narrowest_v=64, heads=2, num_splits=9),
    ),
    "serial": ("float16", (64, 352), (4, 2), flash_fwd.Config(128, 32, 2, heads=2, num_splits=2)),
    "wide": ("bfloat16", (256, 256), (4, 1), flash_fwd.Config(128, 64, 2, heads=4, num_splits=3)),
}


@one_in(4)
@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize("features", OF_GROUPS)
def test_split_keys_on_a_cpu(features: str, kind: str) -> None:
    """Also splits without a tile, and rows that see none of a split's keys."""
    dtype, dims, heads, config = SPLIT[kind]
    gate(replace(SHORT, dtype=dtype, dims=dims, heads=heads, **{"lengths": (45, 330)} | OF_GROUPS[features]), config)


FROM_PAGES: dict[str, dict[str, Any]] = {
    "full": {"lengths": ((45, 130), (45, 60), (45, 0))},
    "causal": {"causal": "bottom_right", "sinks": True, "lengths": ((45, 130), (45, 45), (45, 20))},
    "window": {"window": (60, 5), "softcap": 3.0, "lengths": ((45, 200), (45, 45))},
    "packed": {"packed": True, "causal": "bottom_right", "lengths": ((70, 130), (0, 9), (1, 90), (33, 33))},
    "packed window": {"packed": True, "window": (40, 0), "alibi": True, "lengths": ((70, 230), (1, 90), (33, 33))},
}


@one_in(5)
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("features", FROM_PAGES)
@pytest.mark.parametrize(
    ("dims", "config"),
    [
        ((64, 80), flash_fwd.Config(128, 64, 2, heads=2)),
        ((80, 64), flash_fwd.Config(128, 64, 2, heads=2, num_splits=3)),
        ((192, 128), flash_fwd.Config(128, 128, 2)),
        ((256, 256), flash_fwd.Config(128, 64, 2, heads=2)),
        ((40, 48), flash_fwd.Config(192, 128, 3)),
    ],
    ids=str,
)
def test_pages_on_a_cpu(dims: tuple[int, int], config: flash_fwd.Config, features: str, page_size: int) -> None:
    """Sequences of other lengths in shuffled pages, NaN where no key is, and page ids far outside the pool."""
    gate_pages(PagedCase(page_size, "bfloat16", dims, (4, 2), max_seqlen_k=256, **FROM_PAGES[features]), config)


@one_in(4)
@pytest.mark.parametrize("features", FROM_PAGES)
@pytest.mark.parametrize(
    ("dtype", "cache", "page_size", "dims", "config"),
    [
        ("bfloat16", "float8_e4m3fn:head", 16, (64, 80), flash_fwd.Config(128, 64, 2, heads=2)),
        ("float16", "int8:head", 64, (192, 128), flash_fwd.Config(128, 64, 2)),
        ("bfloat16", "int8:token", 16, (48, 64), flash_fwd.Config(64, 64, 2, heads=2, num_splits=3)),
        ("bfloat16", "float8_e4m3fn:token", 16, (64, 80), flash_fwd.Config(128, 64, 2, heads=2)),
        ("float16", "int8:token", 256, (128, 128), flash_fwd.Config(192, 64, 3, heads=2)),
        ("float16", "float8_e4m3fn:token", 64, (48, 16), flash_fwd.Config(64, 128, 3)),
        ("bfloat16", "int8:token", 16, (256, 256), flash_fwd.Config(128, 32, 2)),
        ("bfloat16", "int8:head", 256, (128, 128), flash_fwd.Config(192, 64, 3, heads=2)),
        ("float16", "float8_e4m3fn:head", 32, (48, 16), flash_fwd.Config(64, 128, 3)),
    ],
    ids=str,
)
def test_8_bit_pages_on_a_cpu(
    dtype: str, cache: str, page_size: int, dims: tuple[int, int], config: flash_fwd.Config, features: str
) -> None:
    gate_pages(PagedCase(page_size, dtype, dims, (4, 2), max_seqlen_k=256, cache=cache, **FROM_PAGES[features]), config)


@pytest.mark.parametrize("bad", [math.inf, math.nan, 0.0])
def test_the_factor_of_a_token_is_for_rows_that_see_it(bad: float) -> None:
    """The factor of a token that contains Inf or NaN is infinite: rows that see it are NaN, others keep their bits."""
    case = PagedCase(16, "bfloat16", (64, 64), (4, 2), ((150, 200),), True, "bottom_right", max_seqlen_k=256,
                     cache="float8_e4m3fn:token")  # fmt: skip
    call = paged.build(case, "normal", CPU)
    o, config = call.operands, flash_fwd.Config(128, 64, 2)
    before, _ = on_cpu(call.problem, o, config)
    key = 120  # which queries from 70 on see
    spoiled = o.v_descale.clone()
    spoiled[int(o.page_table[0 if o.rows is None else int(o.rows[0]), key // 16]), key % 16] = bad
    after, lse = on_cpu(call.problem, o._replace(v_descale=spoiled), config)
    assert torch.equal(after[:70], before[:70])
    if bad == 0.0:  # the value is zero, and its probability counts
        verdict = judge_forward(
            call.problem, forward_references(call.problem, o._replace(v_descale=spoiled)), after, lse
        )
        assert verdict.passed, str(verdict)
        assert not after.isnan().any()
    else:
        assert after[70:].isnan().all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("zeros", "factor"), [("one token", None), ("one token", 1.0), ("most tokens", None), ("all tokens", 0.0)]
)
def test_tokens_whose_values_are_zero(dtype: str, zeros: str, factor: float | None) -> None:
    """Their factor is that of `PagedKVCache`, or one of another program. Beside a large one, probabilities of small
    values leave float16's range unless they are raised; weights of a small one must not overflow in a sum of many."""
    keys = 8448 if zeros == "all tokens" else 300
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, n, 1, 16, generator=g).to(getattr(torch, dtype)) for n in (40, keys))
    v = 0.008 * torch.randn(1, keys, 1, 16, generator=g).to(k.dtype)
    if zeros == "one token":
        v[:, 7] = 0
    else:
        v[:, 0 if zeros == "all tokens" else 5 :] = 0
    cache = PagedKVCache(
        num_pages=keys // 256 + 1, page_size=256, num_heads_kv=1, head_dim=16, dtype=torch.float8_e4m3fn, max_batch=1,
        max_seqlen=keys, device="cpu",
    )  # fmt: skip
    for unwritten in (cache.layer.k_descale, cache.layer.v_descale):
        assert unwritten is not None
        unwritten.view(torch.int32).fill_(0x7F800001)  # a signaling NaN
    row = cache.add()
    cache.extend([row], keys)
    new = new_tokens(cache.layer, k, v, rows=cache.index([row]))
    append_kv.write_torch(new, interleaved=False)  # the interpreter takes half a minute
    case = PagedCase(256, dtype, (16, 16), (1, 1), ((40, keys),), True, cache="float8_e4m3fn:token", max_seqlen_k=keys)
    call = paged.build(case, "normal", CPU)
    o, layer = call.operands, cache.layer
    if factor is not None:
        assert layer.v_descale is not None
        layer.v_descale[layer.v_descale == quantize_tensor.OF_ZEROS.value] = factor
    operands = o._replace(
        q=q[0], k=layer.k, v=layer.v, k_descale=layer.k_descale, v_descale=layer.v_descale,
        page_table=layer.page_table, seqused_k=layer.seqused_k, rows=cache.index([row]),
    )  # fmt: skip
    out, lse = on_cpu(call.problem, operands, flash_fwd.Config(64, 128, 2))
    verdict = judge_forward(call.problem, forward_references(call.problem, operands), out, lse)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_key_that_leads_a_row_has_no_error_of_its_own(dtype: str) -> None:
    """It leads by 3 bits and 0.97 of half a last place of float16. With a maximum that lags behind it, its probability
    would be rounded, and out with it."""
    case = PagedCase(256, dtype, (16, 64), (1, 1), ((64, 128),), True, cache="float8_e4m3fn:token")
    call = paged.build(case, "normal", CPU)
    q, (k, v, of_k, of_v) = (
        torch.zeros_like(call.operands.q),
        (x.clone() for x in (call.operands.k, call.operands.v, call.operands.k_descale, call.operands.v_descale)),
    )
    page = int(call.operands.page_table[int(call.operands.rows[0]), 0])
    bits = torch.full((128,), -60.0)
    bits[100], bits[10] = 0.0, 3 + math.log2(1 + 0.97 * 2.0**-11)  # tiles are visited from the last to the first
    q[..., 0] = 1.0
    k[page, :128] = torch.zeros_like(k[page, :128])
    k[page, :128, 0, 0] = bits.sign().add(0.5).sign().to(k.dtype)
    of_k[page, :128, 0] = bits.abs() * math.log(2) / call.problem.softmax_scale
    of_v[page, :128] = 2.0**-7
    operands = call.operands._replace(q=q, k=k, v=v, k_descale=of_k, v_descale=of_v)
    out, lse = on_cpu(call.problem, operands, flash_fwd.Config(64, 64, 2))
    verdict = judge_forward(call.problem, forward_references(call.problem, operands), out, lse)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("cache", ["float8_e4m3fn:head", "float8_e4m3fn:token"])
def test_queries_of_another_sequence_change_nothing(cache: str) -> None:
    case = PagedCase(16, "bfloat16", (64, 64), (4, 2), ((40, 130), (30, 90)), True, max_seqlen_k=256, cache=cache)
    call, config = paged.build(case, "normal", CPU), flash_fwd.Config(64, 64, 2)
    before, _ = on_cpu(call.problem, call.operands, config)
    q = call.operands.q.clone()
    q[40:] *= 1e12
    after, _ = on_cpu(call.problem, call.operands._replace(q=q), config)
    assert torch.equal(after[:40], before[:40])


def gate_pages(case: PagedCase, config: flash_fwd.Config) -> None:
    call = paged.build(case, "normal", CPU)
    problem, operands = call.problem, call.operands
    if not case.packed:  # as `host._bind_flat` does
        flat = replace(problem, packed=True, total_q=problem.rows, total_k=problem.batch * problem.seqlen_k)
        out, lse = on_cpu(flat, operands._replace(q=operands.q.flatten(0, 1)), config)
        out, lse = out.view(*operands.q.shape[:3], -1), lse.view(-1, *operands.q.shape[:2]).transpose(0, 1)
    else:
        out, lse = on_cpu(problem, operands, replace(config, heads=1) if case.alibi else config)
    references: Any = forward_references(problem, operands)
    verdict = judge_forward(problem, references, out, lse.contiguous())
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("scale", [1.0, 0.18033688])
def test_the_lead_of_a_row_is_the_exponent_of_its_largest_probability(scale: float) -> None:
    """By the same multiply-add, or one in the middle of two numbers of 16 bits is corrected in the wrong direction."""
    from warpwave.kernels.hopper import parts, softmax

    names = gluon_on_cpu.functions({m.__name__: m for m in (parts, softmax)}, gluon_on_cpu.Block(0, 1))
    of_softmax = names[softmax.__name__]
    scores = (300 * torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(0))).as_subclass(gluon_on_cpu.Value)
    m_i = torch.full((64,), -torch.inf).as_subclass(gluon_on_cpu.Value)
    lead, sums = torch.zeros_like(m_i), torch.zeros(64, 8).as_subclass(gluon_on_cpu.Value)
    own = [torch.zeros(64, 4).as_subclass(gluon_on_cpu.Value) + x for x in (-torch.inf, 0.0, 0.0)]  # of threads
    lagging = 0
    for tile in (scores[0], scores[0] + 2, scores[0] + 3, scores[1], scores[1] + 1, scores[2], scores[2] + 1):
        before = lead
        shift, alpha, m_i, lead = of_softmax.new_maximum(tile, scale, m_i, lead, True)
        p, sums = of_softmax.probabilities(tile, scale, shift, alpha, sums, 64)
        own[0], own_alpha, own[1] = of_softmax.settled_maximum(tile, scale, own[0], own[1])
        own_p, own[2] = of_softmax.own_probabilities(tile, scale, own[0], own_alpha, own[2], True, False)
        assert torch.equal(own_p, p) and torch.equal(of_softmax.of_rows(own[0], p), m_i)
        assert torch.equal(of_softmax.of_rows(own[1], p), lead)
        torch.testing.assert_close(own[2].sum(1), sums.sum(1))
        leads = lead > before  # this tile has the largest score, and the maximum stays behind it
        lagging += int(leads.sum())
        # torch's exp2 of a vector and of its last few elements differ by a bit.
        torch.testing.assert_close(torch.exp2(lead[leads]), p.amax(1)[leads], rtol=3e-7, atol=0)
    assert lagging > 64


@pytest.mark.parametrize("config", [flash_fwd.Config(128, 64, 2), flash_fwd.Config(192, 128, 3)], ids=str)
@pytest.mark.parametrize("window", [(60, 5), (0, 0), (64, -1), (-1, 3)], ids=str)
def test_keys_of_a_window_are_counted_on_a_cpu(window: tuple[int, int], config: flash_fwd.Config) -> None:
    """Logits of 0, so that the log-sum-exp counts the keys that a query sees."""
    call = cases.build(replace(SHORT, dims=(16, 16), window=window, heads=(1, 1)), "normal", torch.device("cpu"))
    call.operands.q.zero_()
    _, lse = on_cpu(call.problem, call.operands, config)
    assert torch.equal(lse.exp().round().long(), torch.stack(harness.visible(call)).sum(-1))


DROPPED: dict[str, dict[str, Any]] = {
    "causal, sinks": {"causal": "bottom_right", "sinks": True, "heads": (4, 2), "batch": 2},
    "window from key 142 on": {"window": (60, 5), "lengths": (130, 332), "alibi": "heads", "softcap": 3.0},
    "packed": {"packed": True, "batch": 4, "causal": "bottom_right", "lengths": (150, 140)},
    "packed windows": {"packed": True, "batch": 5, "window": (20, 7), "lengths": (200, 300)},
    "mask, bias": {"mask": "full", "bias": "heads", "window": (60, 5), "batch": 2},
}


@one_in(4)
@pytest.mark.parametrize(
    ("dims", "config"),
    [((64, 40), flash_fwd.Config(192, 128, 3)), ((256, 256), flash_fwd.Config(128, 64, 2))],
    ids=str,
)
@pytest.mark.parametrize("features", DROPPED)
def test_dropout_on_a_cpu(features: str, dims: tuple[int, int], config: flash_fwd.Config) -> None:
    """Also with NaN in the rows before the first key of a window, where tiles begin."""
    case = replace(SHORT, dims=dims, dropout=0.3, **DROPPED[features])
    call = cases.build(case, "normal", CPU)
    references = forward_references(call.problem, call.operands)
    operands = call.operands
    if features == "window from key 142 on":
        k, v = operands.k.clone(), operands.v.clone()
        k[:, :142] = v[:, :142] = torch.nan
        operands = operands._replace(k=k, v=v)
    out, lse = on_cpu(call.problem, operands, config)
    verdict = judge_forward(call.problem, references, out, lse)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_forward_drops_the_pairs_of_the_contract(p: float) -> None:
    """With equal scores and the identity for V, out is what dropout keeps, in each position of a tile."""
    case = replace(SHORT, dims=(16, 256), lengths=(150, 256), heads=(2, 1), batch=2, dtype="float16", dropout=p)
    call = cases.build(case, "normal", CPU)
    q, v = torch.zeros_like(call.operands.q), torch.eye(256, dtype=torch.float16)[None, :, None].expand(2, -1, 1, -1)
    out, _ = on_cpu(call.problem, call.operands._replace(q=q, v=v.contiguous()), flash_fwd.Config(128, 64, 2))
    seed = call.operands.dropout_seed
    expected = dropout.kept(p, seed, range(2), range(2), range(150), range(256))
    assert torch.equal(out.transpose(1, 2) != 0, expected)
    torch.testing.assert_close(
        out[out != 0].float(), torch.full((int(expected.sum()),), 1 / 256 / (1 - p)), rtol=2e-3, atol=0
    )


@pytest.mark.parametrize("cap", [1.0, 15.0, 50.0])
@pytest.mark.parametrize("data", ["normal", "sharp"])
@pytest.mark.parametrize(
    "features",
    [{"causal": "bottom_right", "sinks": True}, {"packed": True, "batch": 4, "window": (60, 5)}, {"mask": "full"}],
    ids=str,
)
def test_softcaps_on_a_cpu(features: dict[str, Any], data: Data, cap: float) -> None:
    """By the tanh of 16-bit types, whose error is larger than that of float32, within the gates of out and LSE."""
    case = replace(SHORT, dtype="bfloat16", dims=(64, 64), softcap=cap, **features)
    gate(case, flash_fwd.Config(128, 64, 2), data)


MASKED: dict[str, dict[str, Any]] = {
    "mask": {"mask": "full"},
    "mask of keys, window": {"mask": "keys", "batch": 2, "window": (60, 5), "lengths": (90, 340)},
    "mask of rows, ALiBi": {"mask": "rows", "alibi": "heads"},
    "bias, causal": {"bias": "full", "causal": "bottom_right", "softcap": 3.0},
    "bias of heads": {"bias": "heads", "alibi": "heads", "sinks": True},
    "both": {"bias": "full", "mask": "full", "causal": "top_left", "batch": 2},
}


@one_in(4)
@pytest.mark.parametrize("config", [flash_fwd.Config(128, 64, 2), flash_fwd.Config(192, 128, 3)], ids=str)
@pytest.mark.parametrize("features", MASKED)
def test_masks_and_biases_on_a_cpu(features: str, config: flash_fwd.Config) -> None:
    """And the same bits where values that nobody sees are not finite: blocks are brought again."""
    call = cases.build(replace(SHORT, dims=(64, 80), **MASKED[features]), "normal", torch.device("cpu"))
    out, lse = on_cpu(call.problem, call.operands, config)
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), out, lse)
    assert verdict.passed, str(verdict)
    unseen = ~torch.stack(harness.visible(call)).any(2).any(1)  # [batch, keys], of no head and row
    unseen[:, 3] = True
    hidden = call.operands
    if hidden.mask is not None and hidden.mask.shape[-1] > 1:
        hidden.mask[..., 3] = False
    elif hidden.bias is not None:
        hidden.bias[..., 3] = -torch.inf
    else:
        return  # this mask hides no key from everybody
    expected = on_cpu(call.problem, hidden, config)
    k, v = hidden.k.clone(), hidden.v.clone()
    k[unseen], v[unseen] = torch.nan, torch.inf
    found = on_cpu(call.problem, hidden._replace(k=k, v=v), config)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@one_in(4)
@pytest.mark.parametrize("config", [flash_fwd.Config(128, 64, 2), flash_fwd.Config(64, 128, 2, 2)], ids=str)
@pytest.mark.parametrize("causal", ["", "bottom_right"])
def test_tiles_that_a_mask_hides_are_not_visited(causal: str, config: flash_fwd.Config) -> None:
    """Rows see two distant ranges of keys, none, or one; what lies between may hold anything, and is not loaded."""
    case = replace(SHORT, dims=(16, 16), heads=(1, 1), lengths=(200, 5000), mask="full", causal=causal)
    call = cases.build(case, "normal", torch.device("cpu"))
    mask = call.operands.mask
    mask[:] = False
    mask[..., :64, 3:100] = mask[..., :64, 4600:4900] = mask[..., 128:, 700:710] = True
    out, lse = on_cpu(call.problem, call.operands, config)
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), out, lse)
    assert verdict.passed, str(verdict)
    k, v = call.operands.k.clone(), call.operands.v.clone()
    for x in (k, v):
        x[:, 128:640] = x[:, 768:4480] = torch.nan  # whole tiles
    maps: list[gluon_on_cpu.Map] = []
    found = on_cpu(call.problem, call.operands._replace(k=k, v=v), config, maps)
    assert torch.equal(found[0], out) and torch.equal(found[1], lse)
    read = {row for m in maps for row in m.rows_read}
    assert read and not any(128 <= row < 640 or 768 <= row < 4480 for row in read)


@pytest.mark.parametrize("config", [flash_fwd.Config(128, 64, 2), flash_fwd.Config(192, 128, 3)], ids=str)
@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -3e37, -1e9, torch.finfo(torch.float32).max])
def test_rows_of_one_bias_far_from_the_scores(lowest: float, config: flash_fwd.Config) -> None:
    """Each is the mean of its values, whatever the number that stands for minus infinity.

    Rows of the same block are computed in bits then: they stay as they were but for rounding."""
    call = cases.build(replace(SHORT, bias="full"), "normal", CPU)
    bias = call.operands.bias.float().masked_fill(call.operands.bias == -math.inf, 0.0)
    problem = replace(call.problem, bias_dtype="float32")
    expected, expected_lse = on_cpu(problem, call.operands._replace(bias=bias), config)
    bias = bias.clone()
    bias[0, 0, 3], bias[0, 1, 70:90] = lowest, lowest
    out, lse = on_cpu(problem, call.operands._replace(bias=bias), config)
    rows = torch.zeros(out.shape[:-1], dtype=torch.bool)
    rows[0, 3, 0] = rows[0, 70:90, 1] = True
    mean = call.operands.v[0, :, 0].double().mean(0)
    torch.testing.assert_close(out[rows].double(), mean.expand(int(rows.sum()), -1), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(out[~rows], expected[~rows], rtol=2e-3, atol=1e-4)
    lse, expected_lse = lse.transpose(1, 2)[~rows], expected_lse.transpose(1, 2)[~rows]
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("value", "dtype"), [(math.inf, "float16"), (math.nan, "float32")])
def test_a_bias_that_is_not_finite_spoils_its_row_alone(value: float, dtype: str) -> None:
    call = cases.build(replace(SHORT, bias="full"), "normal", torch.device("cpu"))
    bias = call.operands.bias.to(getattr(torch, dtype))
    problem = replace(call.problem, bias_dtype=dtype)
    config = flash_fwd.Config(128, 64, 2)
    clean, _ = on_cpu(problem, call.operands._replace(bias=bias), config)
    bias = bias.clone()
    bias[0, 1, 70, 3] = value
    out, _ = on_cpu(problem, call.operands._replace(bias=bias), config)
    row = torch.zeros(out.shape[:-1], dtype=torch.bool)
    row[0, 70, 1] = True
    assert torch.equal(out.isnan().all(-1), row)
    torch.testing.assert_close(out[~row], clean[~row], rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("data", ["sharp", "low"])
@pytest.mark.parametrize("arithmetic", ["fp16x1", "fp16x3", "bf16x6"])
def test_promises_are_kept_on_a_cpu(arithmetic: str, data: Data) -> None:
    call = cases.build(replace(SHORT, dtype=f"float32:{arithmetic}"), data, torch.device("cpu"))
    references = forward_references(call.problem, call.operands)
    out, lse = on_cpu(call.problem, call.operands, flash_fwd.Config(128, 64, 2))
    assert judge_forward(call.problem, references, out, lse).passed
    exact = oracle(call.problem, call.operands).out
    error = ((out.double() - exact).norm() / exact.norm()).item()
    assert error <= precision.promised_error(arithmetic, call.problem)


def test_a_value_comes_back_to_the_bit() -> None:
    """In bf16x6 one key that leads by far gives its value, all 24 bits of it."""
    call = cases.build(replace(SHORT, dtype="float32:bf16x6"), "normal", torch.device("cpu"))
    q, k, v = call.operands[:3]
    q.fill_(4.0), k.zero_(), k[:, 77].fill_(4.0)  # a logit of 128 among zeros
    out, _ = on_cpu(call.problem, call.operands, flash_fwd.Config(128, 64, 2))
    assert torch.equal(out, v[:, 77:78].expand(out.shape))


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("features", [{"window": (20, 0)}, {"packed": True, "batch": 4, "window": (20, 0)}], ids=str)
@pytest.mark.parametrize("arithmetic", ["fp16x1", "fp16x3"])
def test_what_nobody_sees_changes_no_bit_of_float32(arithmetic: str, features: dict[str, Any], garbage: float) -> None:
    """Neither scales nor sums: keys outside the window of every query."""
    call = cases.build(replace(SHORT, dtype=f"float32:{arithmetic}", lengths=(60, 210), **features), "normal", CPU)
    operands = call.operands
    before = on_cpu(call.problem, operands, flash_fwd.Config(128, 64, 2))
    k, v = operands.k.clone(), operands.v.clone()
    lengths = [operands.cu_seqlens_q, operands.cu_seqlens_k] if call.problem.packed else []
    ends = [x.tolist() for x in lengths] or [[0, 60], [0, 210]]
    unseen = 0
    for b in range(len(ends[0]) - 1):
        q_rows, k_rows = (x[b + 1] - x[b] for x in ends)
        hidden = slice(ends[1][b], ends[1][b] + (max(0, k_rows - q_rows - 20) if q_rows else k_rows))
        for x in (k, v):
            (x if call.problem.packed else x[0])[hidden] = garbage
        unseen += hidden.stop - hidden.start
    assert unseen > 0
    after = on_cpu(call.problem, operands._replace(k=k, v=v), flash_fwd.Config(128, 64, 2))
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "sizes", [(2.0**-90, 2.0**90, 1.0), (2.0**100, 2.0**-100, 2.0**-100), (1.0, 1.0, 2.0**110)], ids=str
)
@pytest.mark.parametrize("arithmetic", ["fp16x1", "fp16x3"])
def test_powers_of_two_change_no_bit_of_float32(arithmetic: str, sizes: tuple[float, float, float]) -> None:
    """Far outside of float16's range, and of what two scales' product may be."""
    call = cases.build(replace(SHORT, dtype=f"float32:{arithmetic}", lengths=(70, 90)), "normal", CPU)
    before, lse_before = on_cpu(call.problem, call.operands, flash_fwd.Config(128, 64, 2))
    q, k, v = (x * size for x, size in zip(call.operands[:3], sizes, strict=True))
    out, lse = on_cpu(call.problem, call.operands._replace(q=q, k=k, v=v), flash_fwd.Config(128, 64, 2))
    assert torch.equal(out, before * sizes[2]) and torch.equal(lse, lse_before)
