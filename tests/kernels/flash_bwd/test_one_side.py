"""The joint launch whose tile holds all queries, or all keys, of a sequence and walks the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance import cases, harness
from tests.conformance.cases import Case, W, upstream
from tests.conformance.harness import DEVICE, bits
from tests.conformance.test_gradients import BLIND
from tests.conformance.test_poison import Guards
from tests.kernels.flash_bwd import test_gradients
from tests.kernels.flash_bwd.calls import ALL, CASE, differentiate, forward
from tests.kernels.flash_bwd.test_gradients import HIDDEN, check
from warpwave.kernels import flash_bwd
from warpwave.kernels.flash_bwd import Config, Tile
from warpwave.operands import Operands

KEYS = Config(Tile(128, 16, 4, 1), Tile(128, 16, 4, 1), joint=True)
QUERIES = Config(Tile(16, 128, 4, 1), Tile(16, 128, 4, 1), joint=True)
CONFIGS = [replace(config, splits=splits) for config in (KEYS, QUERIES) for splits in (1, 2)]
each = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.dq.block_m}x{c.dq.block_n} in {c.splits}")
BY_POSITION = [name for name in BLIND if name != "packed"]
ALONE = [name for name in HIDDEN if name not in ("bias", "packed", "mask, causal and window")]


def case_of(config: Config, **features: Any) -> Case:
    """A call of two items; heads are grouped where the launch may group them."""
    heads = (2, 2) if config.dq.block_m == 128 else (4, 2)
    return replace(CASE, **{"dtype": "float16", "heads": heads, "batch": 2, **features})


@pytest.mark.parametrize(
    "features",
    [
        *({}, {"causal": "bottom_right"}, {"causal": "top_left", "lengths": (50, 37)}, {"window": (W, 5)}),
        *({"softcap": 15.0}, {"scale": 0.3}, {"mask": "full"}, {"mask": "keys", "dropout": 0.25}),
        *({"dims": (80, 40)}, {"dims": (136, 160), "batch": 1}, {"layout": "one buffer", "dtype": "bfloat16"}),
    ],
    ids=str,
)
@each
def test_features(features: dict[str, Any], config: Config) -> None:
    check(case_of(config, **features), "sharp" if "mask" in features else "normal", config)


@pytest.mark.parametrize("tile", [(16, 16), (16, 64), (64, 16)], ids=str)
@pytest.mark.parametrize("splits", [1, 3, 5])
def test_more_parts_than_tiles_and_uneven_ones(tile: tuple[int, int], splits: int) -> None:
    """Seven tiles of 16 in three and five parts, two of 64 in five."""
    of_all = Tile(*tile, 4, 1)
    for lengths in ((of_all.block_m - 1, 100), (100, of_all.block_n)):
        case = replace(CASE, dtype="float16", heads=(2, 2), lengths=lengths, causal="bottom_right")
        check(case, "normal", Config(of_all, of_all, joint=True, splits=splits))


@pytest.mark.parametrize("blind", BY_POSITION)
@each
def test_rows_that_see_nothing(blind: str, config: Config) -> None:
    test_gradients.test_rows_that_see_nothing(blind, "float16", False, config)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("hidden", ALONE)
@each
def test_keys_that_no_query_sees_may_hold_anything(hidden: str, value: float, config: Config) -> None:
    test_gradients.test_keys_that_no_query_sees_may_hold_anything(hidden, "float16", value, config)


@each
def test_some_gradients_alone(config: Config) -> None:
    """Each gradient is the same whichever others are wanted, and has the same bits in every repeat."""
    call = cases.build(case_of(config, mask="full"), "normal", DEVICE)
    dout, dlse = upstream(call)
    whole = differentiate(call, dout, dlse, config=config)
    assert bits(*differentiate(call, dout, dlse, config=config)) == bits(*whole)
    for wanted in ((True, False, False), (False, True, False), (False, False, True), (False, True, True)):
        found = differentiate(call, dout, dlse, (*wanted, False, False, False), config)
        for want, one, expected in zip(wanted, found[:3], whole[:3], strict=True):
            assert (one is not None) == want
            assert one is None or (torch.allclose(one, expected, rtol=1e-2, atol=1e-2) if harness.ON_GPU
                                   else torch.equal(one, expected))  # fmt: skip


@each
def test_inputs_and_guards_stay_as_they_were(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    call = cases.build(case_of(config, mask="full", dims=(17, 40)), "normal", DEVICE)
    (out, lse), (dout, dlse) = forward(call), upstream(call)
    guards = Guards()
    operands = Operands(*(None if t is None else guards.place(t) for t in call.operands))
    given = [guards.place(t) for t in (out, lse, dout, dlse)]
    with monkeypatch.context() as patch:
        guards.watch(patch)
        guarded = call._replace(operands=operands)
        found = differentiate(guarded, given[2], given[3], ALL, config, (given[0], given[1]))
    guards.assert_intact()
    assert bits(*operands, *given) == bits(*call.operands, out, lse, dout, dlse)
    assert bits(*found) == bits(*differentiate(call, dout, dlse, ALL, config, (out, lse)))


@each
def test_not_finite_in_one_head_stays_there(config: Config) -> None:
    call = cases.build(case_of(config, lengths=(20, 33)), "normal", DEVICE)
    dout, dlse = upstream(call)
    clean = differentiate(call, dout, dlse, config=config)
    v = call.operands.v.clone()
    v[1, 3, 1, 2] = torch.nan
    found = differentiate(call._replace(operands=call.operands._replace(v=v)), dout, dlse, config=config)
    group = call.problem.num_heads_q // 2
    assert found.dq[1, :, group:].isnan().any(-1).all() and found.dk[1, 3, 1].isnan().all()
    for got, expected, heads in zip(found[:3], clean[:3], (group, 1, 1), strict=True):
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1, :, :heads], expected[1, :, :heads])


@pytest.mark.parametrize(
    ("tile", "features", "error"),
    [
        ((32, 32), {"heads": (2, 2)}, "must hold all queries or all keys of a sequence, 37 x 40"),
        ((64, 16), {"heads": (4, 2)}, "walks keys.* no keys of grouped heads"),
        ((16, 64), {"bias": "full", "heads": (2, 2)}, "walks queries, which takes no packed sequences, bias"),
        ((64, 16), {"sinks": True, "heads": (2, 2)}, "walks keys, which takes no packed sequences, bias"),
        ((64, 16), {"packed": True, "batch": 3, "heads": (2, 2)}, "walks keys, which takes no packed sequences"),
    ],
    ids=str,
)
def test_what_it_refuses(tile: tuple[int, int], features: dict[str, Any], error: str) -> None:
    call, of_all = cases.build(replace(CASE, **features), "normal", DEVICE), Tile(*tile, 4, 1)
    with pytest.raises(ValueError, match=error):
        flash_bwd.bind(call.problem, harness.GPU, call.operands, ALL, Config(of_all, of_all, joint=True))
