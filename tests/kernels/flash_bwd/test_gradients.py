"""The gradients of `flash_bwd` against the gates and exact probes of the conformance suite, on short sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance import cases, harness
from tests.conformance.cases import LAYOUTS, Case, W, upstream, with_operands
from tests.conformance.datasets import DATA_SETS
from tests.conformance.gates import backward_references, judge_backward
from tests.conformance.harness import DEVICE, bits
from tests.conformance.test_gradients import BLIND, NAMES
from tests.conformance.test_poison import Guards
from tests.conformance.test_probes import retrieval
from tests.kernels.flash_bwd.calls import ALL, CASE, JOINT, SMALL, differentiate, flash_forward, forward
from tests.marks import one_in
from warpwave.kernels import flash_bwd
from warpwave.kernels.flash_bwd import Config, Tile, host
from warpwave.operands import Operands
from warpwave.workbench.verify import reference

GRID: dict[str, Any] = {
    **cases.FEATURES,
    "dims": ((16, 16), (17, 33)),
    "lengths": ((20, 80), (40, 33)),
    "heads": ((2, 2), (2, 1)),  # a gradient of a sink is one number a head, too few for the peer rule alone
    "batch": (1, 2),
    "window": ((-1, -1), (20, 0), (W, W)),
    "alibi": ("", "heads"),
    "softcap": (0.0, 15.0),
    "layout": ("bshd", "one buffer"),
    "dtype": ("float16", "bfloat16", "float32:ieee"),
    "dropout": (0.0, 0.25),
}
del GRID["scale"], GRID["lse"]
# One feature alone, in float32, whose gates tell a wrong term from rounding at once.
ALONE: list[dict[str, Any]] = [
    {},
    {"scale": 0.3},
    {"scale": 0.0},
    {"causal": "bottom_right"},
    {"causal": "top_left", "lengths": (50, 37)},
    {"window": (W, 5)},
    {"packed": True, "batch": 4},
    {"softcap": 15.0},
    {"sinks": True},
    {"alibi": "batch", "batch": 2},
    {"mask": "full"},
    {"bias": "full"},
    {"bias": "heads", "causal": "bottom_right"},
    {"dropout": 0.25},
    {"dropout": 0.5, "packed": True, "batch": 4, "heads": (3, 1)},
    {"dtype": "float32:tf32"},
    {"dtype": "float32:bf16x3"},
    {"dtype": "float32:bf16x6"},
]

BOTH = pytest.mark.parametrize("config", [SMALL, JOINT], ids=["apart", "joint"])
SAMPLE = [f for f in ALONE if {"scale", "dtype", "packed"} & f.keys()]  # what no other test has


def check(case: Case, data: Any, config: Config = SMALL, results: Any = None) -> None:
    call = cases.build(case, data, DEVICE)
    dout, dlse = upstream(call)
    references = backward_references(call.problem, call.operands, dout, dlse)
    verdict = judge_backward(call.problem, references, differentiate(call, dout, dlse, ALL, config, results))
    assert verdict.passed, f"{case}, {data}: {verdict}"


@one_in(4)
@pytest.mark.parametrize(("nth", "case"), list(enumerate(cases.pairwise(GRID))), ids=str)
def test_pairs_of_features(nth: int, case: Case) -> None:
    check(case, DATA_SETS[nth % 3])


FULL = pytest.mark.full


@pytest.mark.parametrize("features", [pytest.param(f, marks=[] if f in SAMPLE else [FULL]) for f in ALONE], ids=str)
@BOTH
def test_each_feature_alone(features: dict[str, Any], config: Config) -> None:
    check(replace(CASE, **{"dtype": "float32:ieee", **features}), "sharp", config)


@pytest.mark.parametrize("dims", [(1, 1), (17, 33), (59, 40), (80, 96), (129, 129), (192, 128), (16, 200)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32:ieee", marks=FULL)])
def test_head_sizes(dims: tuple[int, int], dtype: str) -> None:
    case = replace(CASE, dtype=dtype, dims=dims, heads=(1, 1), lengths=(33, 40), causal="bottom_right", batch=1)
    check(case, "normal", Config(Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)))


@pytest.mark.parametrize("dtype", ["float16", "float32:ieee", pytest.param("float32:tf32x3", marks=FULL)])
@pytest.mark.parametrize("features", [{"sinks": True}, {"packed": True, "batch": 3}], ids=str)
def test_behind_the_portable_forward(dtype: str, features: dict[str, Any]) -> None:
    """Out and the log-sum-exp of any exact kernel serve."""
    case = replace(CASE, dtype=dtype, causal="bottom_right", heads=(1, 1), **features)
    check(case, "sharp", results=flash_forward(cases.build(case, "sharp", DEVICE)))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("tiles", [(16, 64), (128, 16)], ids=str)
def test_tiles(tiles: tuple[int, int], split: bool) -> None:
    tile = Tile(*tiles, 4, 1)
    check(replace(CASE, causal="bottom_right", window=(W, -1), heads=(1, 1)), "normal", Config(tile, tile, split))


SHAPES = [(b, h, m, n) for b in (1, 2) for h in (1, 2) for m in (1, 37) for n in (1, 40)]


BOTH_AXES = [s for s in SHAPES if s[0] + s[1] == 3]


@pytest.mark.parametrize("shape", [pytest.param(s, marks=[] if s in BOTH_AXES else [FULL]) for s in SHAPES], ids=str)
@BOTH
def test_bias_of_any_shape(shape: tuple[int, ...], config: Config) -> None:
    """Its gradient is summed over every axis that is broadcast."""
    heads = (2, 2) if config.joint else CASE.heads
    case = replace(CASE, dtype="float16", causal="bottom_right", batch=2, heads=heads)
    call = cases.build(case, "normal", DEVICE)
    bias = torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(5), device=DEVICE)
    problem = replace(call.problem, bias_shape=shape, bias_dtype="float32")
    call = with_operands(call, bias=bias)._replace(problem=problem)
    dout, _ = upstream(call)
    expected = backward_references(problem, call.operands, dout, None)
    found = differentiate(call, dout, None, (False, False, False, True, False, False), config)
    verdict = judge_backward(problem, expected, found)
    assert found.dbias is not None and found.dbias.shape == shape
    # A bias without an axis of keys changes no probability: its gradient cancels to 0, which has no scale.
    assert verdict.passed or shape[3] == 1, str(verdict)


@pytest.mark.parametrize("parts", [1, 4, 10])
@BOTH
def test_parts_of_a_gradient_of_a_bias_sum_all_batch_items_once(
    monkeypatch: pytest.MonkeyPatch, parts: int, config: Config
) -> None:
    """Ten items: all in one part, parts of two and three, and of one."""
    monkeypatch.setattr(host, "parts_of_bias", lambda *_: parts)
    heads = (2, 2) if config.joint else (2, 1)
    call = cases.build(replace(CASE, dtype="float16", lengths=(20, 40), batch=5, heads=heads), "normal", DEVICE)
    bias = torch.randn(1, 1, 20, 40, generator=torch.Generator(DEVICE).manual_seed(5), device=DEVICE)
    problem = replace(call.problem, bias_shape=(1, 1, 20, 40), bias_dtype="float32")
    call = with_operands(call, bias=bias)._replace(problem=problem)
    dout, _ = upstream(call)
    wanted = (True, True, True, True, False, False)
    expected = backward_references(problem, call.operands, dout, None)
    found = differentiate(call, dout, None, wanted, config)
    verdict = judge_backward(problem, expected, found)
    assert verdict.passed, str(verdict)
    assert bits(*found[:4]) == bits(*differentiate(call, dout, None, wanted, config)[:4])


@pytest.mark.parametrize("tile", [(16, 16, 1), (32, 32, 2), (64, 64, 4), (16, 128, 4), (128, 32, 4)], ids=str)
@pytest.mark.parametrize("change", [{}, {"causal": "bottom_right"}, {"softcap": 15.0, "sinks": True}], ids=str)
def test_sequences_in_one_tile(tile: tuple[int, int, int], change: dict[str, Any]) -> None:
    of_all = Tile(*tile, 1)
    for lengths in ((of_all.block_m - 3, of_all.block_n - 1), (of_all.block_m, of_all.block_n)):
        case = replace(CASE, dtype="float16", lengths=lengths, batch=3, heads=(2, 1), **change)
        check(case, "normal", Config(of_all, of_all, joint=True))


def test_a_joint_launch_refuses_what_its_block_cannot_add_up() -> None:
    call, tile = cases.build(replace(CASE, bias="heads", lengths=(20, 30)), "normal", DEVICE), Tile(32, 64, 4, 1)
    with pytest.raises(ValueError, match="no bias beside grouped heads"):
        flash_bwd.bind(call.problem, harness.GPU, call.operands, ALL, Config(tile, tile, joint=True))


WANTED = [tuple(i == j for j in range(6)) for i in range(6)] + [
    (True, False, True, False, False, False),
    (False, True, False, False, False, True),
    (False, False, False, False, False, False),
    (False, True, True, True, True, False),
]


@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32:ieee", marks=FULL)])
@BOTH
def test_some_gradients_alone(dtype: str, config: Config) -> None:
    """Each gradient is the same whichever others are wanted, which are None, and has the same bits in every repeat. A
    GPU's compiler may fuse other operations where fewer are wanted."""
    case = replace(CASE, dtype=dtype, bias="heads", alibi="heads", sinks=True, heads=(1, 1), lengths=(20, 33))
    call = cases.build(case, "normal", DEVICE)
    dout, dlse = upstream(call)
    whole = differentiate(call, dout, dlse, config=config)
    assert bits(*differentiate(call, dout, dlse, config=config)) == bits(*whole)
    for wanted in WANTED:
        for want, name, one, expected in zip(
            wanted, NAMES, differentiate(call, dout, dlse, wanted, config), whole, strict=True
        ):
            assert (one is not None) == want, (wanted, name)
            if one is not None and expected is not None:
                torch.testing.assert_close(one, expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()))
                assert DEVICE.type != "cpu" or bits(one) == bits(expected), (wanted, name)


@BOTH
def test_some_gradients_of_packed_sequences_alone(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of gradients holds NaN before the call, and the last tokens belong to no sequence."""

    def of_nan(shape: Any, dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
        return lambda: torch.full(
            tuple(shape), torch.nan if dtype.is_floating_point else 77, dtype=dtype, device=device
        )

    monkeypatch.setattr(host.scratch, "maker", of_nan)
    case = replace(CASE, packed=True, batch=3, alibi="heads", sinks=True, heads=(1, 1), lengths=(20, 33))
    call = cases.build(case, "normal", DEVICE)
    dout, dlse = upstream(call)
    cu_seqlens_q, cu_seqlens_k = (torch.minimum(t, t[-1] - 9) for t in call.operands[-2:])
    call = with_operands(call, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    whole = differentiate(call, dout, dlse, config=config)
    assert all(grad[-9:].eq(0).all() and grad.isfinite().all() for grad in whole[:3])
    for wanted in (wanted for wanted in WANTED if not wanted[3]):  # there is no bias
        found = differentiate(call, dout, dlse, wanted, config)
        for want, name, one, expected in zip(wanted, NAMES, found, whole, strict=True):
            assert (one is not None) == want, (wanted, name)
            if one is not None and expected is not None:
                torch.testing.assert_close(one, expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()))


def test_a_joint_launch_has_no_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    needs: list[Any] = []

    def memory(given: Any, device: Any) -> Any:
        needs.append(given)

    monkeypatch.setattr(host.scratch, "memory", memory)
    call = cases.build(CASE, "normal", DEVICE)
    for config in (SMALL, JOINT):
        flash_bwd.bind(call.problem, harness.GPU, call.operands, ALL, config)
    assert [len(given) for given in needs] == [1, 0]


def test_gradients_of_absent_operands_are_none() -> None:
    call = cases.build(CASE, "normal", DEVICE)
    assert differentiate(call, upstream(call)[0])[3:] == (None, None, None)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=FULL)])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("bshd", "one item for all")])
@BOTH
def test_layouts_of_operands(layout: str, packed: bool, config: Config) -> None:
    call = cases.build(replace(CASE, layout=layout, packed=packed, heads=(2, 2), lengths=(20, 33)), "normal", DEVICE)
    dout, dlse = upstream(call)
    q, k, v = (x.contiguous() for x in call.operands[:3])
    found = differentiate(call, dout, dlse, config=config)
    assert bits(*found) == bits(*differentiate(with_operands(call, q=q, k=k, v=v), dout, dlse, config=config))
    assert all(grad.is_contiguous() for grad in found[:3])


def test_layouts_of_what_arrives() -> None:
    """One bound call takes every layout of out, lse, dout and dlse, one after another."""
    call = cases.build(replace(CASE, heads=(2, 2), lengths=(20, 33)), "normal", DEVICE)
    (out, lse), (dout, dlse) = forward(call), upstream(call)
    run = flash_bwd.bind(call.problem, harness.GPU, call.operands, ALL, SMALL)
    expected = bits(*run(call.operands, (out, lse), dout, dlse))

    def heads_first(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def every_other(t: torch.Tensor) -> torch.Tensor:
        return torch.stack([t, t.new_full(t.shape, torch.nan)], dim=-1)[..., 0]

    for change in (heads_first, every_other):
        changed = [change(t) for t in (out, lse, dout, dlse)]
        assert bits(*run(call.operands, (changed[0], changed[1]), changed[2], changed[3])) == expected
    for ones in (dout[..., :1].expand(dout.shape), dout[:1, :1, :1, :1].expand(dout.shape)):
        several = run(call.operands, (out, lse), ones, None)
        assert bits(*several) == bits(*run(call.operands, (out, lse), ones.contiguous(), None))


@pytest.mark.parametrize(("dtype", "sinks"), [("float16", True), ("float32:ieee", False)])
@pytest.mark.parametrize("blind", BLIND)
@BOTH
def test_rows_that_see_nothing(blind: str, dtype: str, sinks: bool, config: Config) -> None:
    """Their dq is 0, and NaN in them or in what arrives there has no effect on any gradient."""
    case = replace(CASE, dtype=dtype, sinks=sinks, heads=(1, 1), **BLIND[blind])
    call = cases.build(case, "normal", DEVICE)
    seen = [shown.any(-1).T for shown in harness.visible(call)]  # [rows, heads] each
    unseen = ~(torch.cat(seen) if call.problem.packed else torch.stack(seen))
    assert unseen.any()
    dout, dlse = upstream(call)
    expected = differentiate(call, dout, dlse, config=config)
    assert expected.dq[unseen].eq(0).all()
    q, dout_with_nan = call.operands.q.clone(), dout.clone()
    q[unseen] = dout_with_nan[unseen] = torch.nan
    results = forward(call)
    poisoned = with_operands(call, q=q)
    assert bits(*differentiate(poisoned, dout_with_nan, dlse, config=config, results=results)) == bits(*expected)


HIDDEN: dict[str, dict[str, Any]] = {
    "window": {"causal": "top_left", "window": (3, -1), "lengths": (37, 70)},
    "causal": {"causal": "top_left", "lengths": (37, 70)},
    "mask": {"mask": "keys", "batch": 2},
    "mask, causal and window": {"mask": "keys", "batch": 2, "window": (W, 0), "lengths": (170, 176)},
    "mask in whole groups of keys": {"mask": "keys", "batch": 2, "causal": "top_left", "lengths": (37, 48)},
    "bias": {"bias": "heads", "alibi": "heads"},
    "packed": {"packed": True, "batch": 3},
}


@pytest.mark.parametrize(("dtype", "value"), [("float16", torch.inf), ("float32:ieee", torch.nan)])
@pytest.mark.parametrize("hidden", HIDDEN)
@BOTH
def test_keys_that_no_query_sees_may_hold_anything(hidden: str, dtype: str, value: float, config: Config) -> None:
    if config == JOINT and max(HIDDEN[hidden].get("lengths", (0,))) > config.dq.block_n:
        pytest.skip("no tile holds the sequence")
    call = cases.build(replace(CASE, dtype=dtype, heads=(1, 1), **HIDDEN[hidden]), "normal", DEVICE)
    shown = [rows.any(1).T for rows in harness.visible(call)]  # [keys, heads] each
    unseen = ~(torch.cat(shown) if call.problem.packed else torch.stack(shown))
    assert unseen.any()
    dout, dlse = upstream(call)
    results = forward(call)
    expected = differentiate(call, dout, dlse, config=config, results=results)
    k, v = call.operands.k.clone(), call.operands.v.clone()
    k[unseen] = v[unseen] = value
    found = differentiate(with_operands(call, k=k, v=v), dout, dlse, config=config, results=results)
    assert bits(*found) == bits(*expected)
    assert found.dk[unseen].eq(0).all() and found.dv[unseen].eq(0).all()


@pytest.mark.parametrize("dtype", ["float16", "float32:ieee"])
@pytest.mark.parametrize("results", [forward, flash_forward])
@pytest.mark.parametrize("features", [{"causal": "bottom_right"}, pytest.param({}, marks=FULL)], ids=str)
def test_retrieval(features: dict[str, Any], results: Any, dtype: str) -> None:
    """Each query takes one row of v whole: dv sums the dout of those that took it, and nothing depends on q and k."""
    case = replace(CASE, dtype=dtype, dims=(64, 40), lengths=(33, 40), **features)
    call, _ = retrieval(case)
    call.operands.v.copy_(call.operands.v.round())
    g = torch.Generator(DEVICE).manual_seed(3)
    dout = torch.randint(-2, 3, (*call.operands.q.shape[:-1], 40), generator=g, device=DEVICE).to(call.operands.q.dtype)
    got = differentiate(call, dout, results=results(call))
    assert got.dq.eq(0).all() and got.dk.eq(0).all()
    assert torch.equal(got.dv.double(), reference.oracle_gradients(call.problem, call.operands, dout).dv.round())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lengths", [(0, 7), (5, 0)], ids=str)
def test_empty_calls(lengths: tuple[int, int], packed: bool) -> None:
    call = cases.build(replace(CASE, lengths=lengths, sinks=True, packed=packed), "normal", DEVICE)
    dout, dlse = upstream(call)
    found = differentiate(call, dout, dlse)
    for grad, of in zip(found[:3], call.operands[:3], strict=True):
        assert grad.shape == of.shape and grad.eq(0).all()
    # Nothing but the sink is seen: lse is the sink, so its gradient is what arrives at lse.
    assert found.dsinks is not None
    torch.testing.assert_close(found.dsinks, dlse.sum(1) if packed else dlse.sum((0, 2)))


def test_no_batch() -> None:
    call = cases.build(CASE, "normal", DEVICE)
    q, k, v = (x[:0] for x in call.operands[:3])
    call = with_operands(call, q=q, k=k, v=v)._replace(problem=replace(call.problem, batch=0))
    assert [grad.shape for grad in differentiate(call, q.new_zeros(0, 37, 2, 24))[:3]] == [q.shape, k.shape, v.shape]


@BOTH
def test_tokens_of_no_sequence_get_zeros(config: Config) -> None:
    call = cases.build(replace(CASE, packed=True, batch=3), "normal", DEVICE)
    dout, dlse = upstream(call)
    cu_seqlens_q, cu_seqlens_k = (torch.minimum(t, t[-1] - 9) for t in call.operands[-2:])
    call = with_operands(call, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    found = differentiate(call, dout, dlse, config=config)
    assert all(grad[-9:].eq(0).all() and not grad.isnan().any() for grad in found[:3])


@BOTH
def test_any_numbers_as_offsets_stay_inside_the_tensors(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    call = cases.build(replace(CASE, packed=True, batch=3, sinks=True, alibi="batch", heads=(1, 1)), "normal", DEVICE)
    dout, dlse = upstream(call)
    results = forward(call)
    guards = Guards()
    guards.watch(monkeypatch)
    ends = (2**31 - 1, -(2**31))
    for offsets in ([*ends, 3, 10], [7, ends[1], 0, 10], [ends[1], ends[0], 0, 10], [0, 10**6, 5, -4]):
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
        operands = call.operands._replace(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens.flip(0))
        placed = Operands(*(None if t is None else guards.place(t) for t in operands))
        given = [guards.place(t) for t in (*results, dout, dlse)]
        differentiate(call._replace(operands=placed), given[2], given[3], results=(given[0], given[1]), config=config)
        guards.assert_intact()
        guards.buffers.clear()


@pytest.mark.parametrize(
    "features", [{"mask": "full", "bias": "full", "alibi": "batch"}, {"packed": True, "batch": 3}], ids=str
)
@BOTH
def test_inputs_and_guards_stay_as_they_were(
    features: dict[str, Any], monkeypatch: pytest.MonkeyPatch, config: Config
) -> None:
    heads = (2, 2) if config.joint else CASE.heads
    call = cases.build(replace(CASE, sinks=True, dims=(17, 40), heads=heads, **features), "normal", DEVICE)
    (out, lse), (dout, dlse) = forward(call), upstream(call)
    guards = Guards()
    operands = Operands(*(None if t is None else guards.place(t) for t in call.operands))
    given = [guards.place(t) for t in (out, lse, dout, dlse)]
    with monkeypatch.context() as patch:
        guards.watch(patch)
        found = differentiate(
            call._replace(operands=operands), given[2], given[3], results=(given[0], given[1]), config=config
        )
    guards.assert_intact()
    assert bits(*operands, *given) == bits(*call.operands, out, lse, dout, dlse)
    assert bits(*found) == bits(*differentiate(call, dout, dlse, results=(out, lse), config=config))


@BOTH
def test_not_finite_in_one_head_stays_there(config: Config) -> None:
    call = cases.build(replace(CASE, heads=(4, 2), batch=2, lengths=(20, 33)), "normal", DEVICE)
    dout, dlse = upstream(call)
    clean = differentiate(call, dout, dlse, config=config)
    v = call.operands.v.clone()
    v[1, 3, 1, 2] = torch.nan
    found = differentiate(with_operands(call, v=v), dout, dlse, config=config)
    assert found.dq[1, :, 2:].isnan().any(-1).all() and found.dk[1, 3, 1].isnan().all()
    for got, expected, heads in zip(found[:3], clean[:3], (2, 1, 1), strict=True):
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1, :, :heads], expected[1, :, :heads])
