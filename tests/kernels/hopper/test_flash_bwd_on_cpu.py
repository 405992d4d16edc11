"""The Hopper backward's own source on a CPU: its protocol and arithmetic, tile by tile, against the gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance import cases, harness
from tests.conformance.datasets import Data
from tests.conformance.gates import backward_references, judge_backward
from tests.kernels.hopper.gradients_on_cpu import CALLS, CPU, DROPPED, H200, SHORT, judge, on_cpu
from tests.marks import needs_triton, one_in
from warpwave.kernels import dropout
from warpwave.kernels.hopper import flash_bwd, host
from warpwave.kernels.hopper.flash_bwd import config as flash_bwd_config
from warpwave.kernels.hopper.flash_bwd import joint_launch
from warpwave.kernels.hopper.flash_bwd.config import is_broad
from warpwave.problem import AttentionProblem
from warpwave.workbench.verify.reference import oracle

pytestmark = needs_triton


def ascends_wherever_it_can(problem: AttentionProblem, config: flash_bwd.Config) -> bool:
    has_high = problem.causal is not None or problem.window_size[1] >= 0
    return problem.deterministic and has_high and not is_broad(problem)


@one_in(8)
@pytest.mark.parametrize(
    ("dims", "config", "deterministic"),
    [
        *(((64, 64), 0, True), ((40, 24), 0, True), ((24, 64), 0, False), ((32, 16), 0, True), ((128, 128), 0, True)),
        *(((64, 80), 0, False), ((24, 128), 0, False), ((72, 104), 0, True), ((96, 72), 0, False)),
        *(((192, 128), 0, True), ((160, 160), 0, False), ((40, 136), 0, False), ((192, 128), -1, True)),
        *(((40, 64), 1, True), ((64, 64), 0, False), ((128, 128), 0, False)),
    ],
    ids=str,
)
@pytest.mark.parametrize("features", CALLS)
def test_the_protocol_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, features: str, dims: tuple[int, int], config: int, deterministic: bool
) -> None:
    """In both directions: short calls and grouped ones would not walk from the first tile on."""
    monkeypatch.setattr(joint_launch, "ascends", ascends_wherever_it_can)
    call = cases.build(replace(SHORT, dims=dims, **CALLS[features]), "normal", CPU)
    g = torch.Generator().manual_seed(2)
    q = call.operands.q
    dout = torch.randn(*q.shape[:-1], call.problem.head_dim_v, generator=g).to(q.dtype)
    shape = dout.shape[:-1]
    dlse = torch.randn(shape, generator=g).transpose(-1, -2).contiguous() if features != "full" else None
    references = backward_references(call.problem, call.operands, dout, dlse)
    found = on_cpu(call, dout, dlse, config, deterministic=deterministic)
    verdict = judge_backward(call.problem, references, found)
    assert verdict.passed, str(verdict)


@one_in(2)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize(
    ("features", "ascends"),
    [("full", False), *(("window wider than a block", ascends) for ascends in (False, True)), ("packed", True)],
)
def test_sums_in_any_order_are_those_in_order(
    monkeypatch: pytest.MonkeyPatch, features: str, ascends: bool, dims: tuple[int, int]
) -> None:
    """Here programs run one after another, so that the sums of both have one order, and the same bits, if their blocks
    walk their queries in the same direction."""
    monkeypatch.setattr(joint_launch, "ascends", lambda problem, config: ascends)
    call = cases.build(replace(SHORT, dims=dims, **CALLS[features]), "normal", CPU)
    shape = *call.operands.q.shape[:-1], dims[1]
    dout = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(call.operands.q.dtype)
    one, other = (on_cpu(call, dout, None, 0, deterministic=wanted) for wanted in (False, True))
    assert harness.bits(*one[:3]) == harness.bits(*other[:3])


@one_in(4)
@pytest.mark.parametrize(("dims", "config"), [((64, 24), 0), ((128, 128), 0), ((40, 64), 1), ((192, 128), 0)], ids=str)
@pytest.mark.parametrize("features", DROPPED)
def test_dropout_on_a_cpu(features: str, dims: tuple[int, int], config: int) -> None:
    """Also with NaN in rows that see nothing or that nothing sees, where tiles begin."""
    call = cases.build(replace(SHORT, dims=dims, dropout=0.3, **DROPPED[features]), "normal", CPU)
    judge(call, torch.nan if "from" in features else None, more=False, config=config)


@pytest.mark.parametrize("features", [{"mask": "full"}, {"bias": "full", "alibi": "heads", "softcap": 15.0}], ids=str)
def test_dropout_with_masks_and_biases_on_a_cpu(features: dict[str, Any]) -> None:
    judge(cases.build(replace(SHORT, dims=(64, 40), dropout=0.3, lse=False, **features), "normal", CPU))


@pytest.mark.parametrize(("dims", "config"), [((64, 64), 0), ((128, 128), 0), ((64, 64), 1)], ids=str)
def test_gradients_drop_the_pairs_of_the_contract(dims: tuple[int, int], config: int) -> None:
    """With equal scores and the identity for dout, dv is what dropout keeps, in each position of a tile."""
    case = replace(SHORT, dims=dims, lengths=(dims[0], 330), heads=(1, 1), batch=2, dropout=0.4, lse=False)
    call = cases.build(case, "normal", CPU)
    operands = call.operands._replace(q=torch.zeros_like(call.operands.q))
    dout = torch.eye(dims[0], dtype=operands.q.dtype)[None, :, None].expand(2, -1, 1, -1).contiguous()
    got = on_cpu(call._replace(operands=operands), dout, None, config)
    expected = dropout.kept(0.4, operands.dropout_seed, range(2), range(1), range(dims[0]), range(330))
    assert torch.equal(got.dv[:, :, 0] != 0, expected[:, 0].transpose(1, 2))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("config", "dtype"), [(0, "float16"), (1, "float16"), (0, "float32:default")])
def test_nan_of_a_call_without_a_visible_pair_goes_nowhere(config: int, dtype: str, packed: bool) -> None:
    """Every window begins behind its query's causal edge, though keys before the last edge lie in some window."""
    case = replace(
        SHORT, dtype=dtype, lengths=(64, 194), causal="top_left", window=(70, 20), sinks=dtype == "float16",
        packed=packed,
    )  # fmt: skip
    call = cases.build(case, "normal", CPU)
    problem, q = replace(call.problem, return_lse=True), call.operands.q
    exact = oracle(problem, call.operands)
    operands = call.operands._replace(**{n: torch.full_like(getattr(call.operands, n), torch.nan) for n in "qkv"})
    dout, dlse = torch.full_like(q, torch.nan), torch.ones(exact.lse.shape)
    got = on_cpu(call._replace(operands=operands), dout, dlse, config, exact)
    assert not torch.stack([g.count_nonzero() for g in (got.dq, got.dk, got.dv)]).any()
    if problem.has_sinks:
        assert got.dsinks is not None and got.dsinks.tolist() == [q[..., 0, 0].numel()] * 2  # all of the log-sum-exp


@one_in(4)
@pytest.mark.parametrize(
    ("dims", "config", "dtype"),
    [
        *((dims, 0, "float16") for dims in ((64, 64), (128, 128), (192, 128))),
        ((192, 128), -1, "float16"),
        ((64, 64), 0, "float32:default"),
    ],
    ids=str,
)
@pytest.mark.parametrize("features", [{}, {"causal": "bottom_right"}, {"window": (20, 7)}], ids=str)
def test_nan_of_a_neighbor_stays_there(
    features: dict[str, Any], dims: tuple[int, int], config: int, dtype: str
) -> None:
    """Tiles that reach into the next packed sequence take nothing from it."""
    case = replace(SHORT, dtype=dtype, dims=dims, packed=True, batch=5, lengths=(70, 150), lse=False, **features)
    call = cases.build(case, "normal", CPU)
    dout = torch.randn(*call.operands.q.shape[:-1], dims[1], generator=torch.Generator().manual_seed(2))
    dout = dout.to(call.operands.q.dtype)
    expected = on_cpu(call, dout, None, config)
    of_queries, of_keys = (o.tolist() for o in (call.operands.cu_seqlens_q, call.operands.cu_seqlens_k))
    q, k, v, dout = (t.clone() for t in (*call.operands[:3], dout))
    for tensor, offsets in ((q, of_queries), (dout, of_queries), (k, of_keys), (v, of_keys)):
        assert offsets[4] > offsets[1]
        tensor[offsets[1] : offsets[4]] = torch.nan
    got = on_cpu(call._replace(operands=call.operands._replace(q=q, k=k, v=v)), dout, None, config)
    for name, offsets in (("dq", of_queries), ("dk", of_keys), ("dv", of_keys)):
        for begin, end in ((0, offsets[1]), (offsets[4], offsets[5])):
            assert torch.equal(getattr(got, name)[begin:end], getattr(expected, name)[begin:end]), name


# Query heads of a group in several blocks ----------------------------------------------------------------------------


@one_in(8)
@pytest.mark.parametrize(("config", "dtype"), [(0, "float16"), (1, "float16"), (0, "float32:default")])
@pytest.mark.parametrize(("group", "splits"), [(4, 4), (4, 2), (5, 3), (3, 1)])
@pytest.mark.parametrize(
    ("features", "data"), [("full", "normal"), ("causal", "sharp"), ("packed", "normal"), ("window", "normal")]
)
def test_splits_of_a_group(
    monkeypatch: pytest.MonkeyPatch, features: str, data: Data, group: int, splits: int, config: int, dtype: str
) -> None:
    """As few and long blocks have them, here of a short call. Of three splits of five heads, one has one head. With
    fewer splits than heads, a block walks several heads."""
    dims = (96, 80) if features == "packed" else SHORT.dims  # in pieces of columns
    if features == "full" and dtype == "float16":
        dims = (160, 160)
    heads: dict[str, Any] = {"heads": (2 * group, 2), "dtype": dtype, "dims": dims}
    if dtype != "float16":
        heads |= {"sinks": False, "softcap": 0.0}
    call = cases.build(replace(SHORT, **{**CALLS[features], **heads}), data, CPU)
    of = flash_bwd.configs(call.problem, H200)[config]
    if flash_bwd_config.divides_steps(call.problem, of):
        pytest.skip("its blocks are divided by their steps")

    for steps in range(50):
        monkeypatch.setattr(flash_bwd_config, "STEPS_OF_SUMMAND", steps)
        if flash_bwd_config.group_splits(call.problem, of) == splits:
            break
    assert flash_bwd_config.group_splits(call.problem, of) == splits
    judge(call, more=False, config=config)


FREE_PARTS = {"STEPS_OF_SUM": 0, "STEPS_OF_SUMMAND": 0, "LEAST_STEPS_OF_PART": 1, "STEPS_OF_PART": 0.01}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("dims", "heads", "multiprocessors", "expected"),
    [((160, 160), (3, 1), 2, (2, 2)), ((64, 64), (4, 2), 5, (5, 5)), ((128, 96), (2, 1), 132, (0, 10))],
    ids=str,
)
def test_parts_of_blocks(
    monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int], heads: tuple[int, int], multiprocessors: int,
    expected: tuple[int, int], deterministic: bool,
) -> None:  # fmt: skip
    """Those of the last wave of a GPU with few multiprocessors; whole blocks run before."""
    for name, value in FREE_PARTS.items():
        monkeypatch.setattr(flash_bwd_config, name, value)
    monkeypatch.setattr(flash_bwd_config, "NUM_SMS", multiprocessors)
    case = replace(SHORT, dtype="float16", lengths=(300, 330), dims=dims, heads=heads, batch=1)
    call = cases.build(case, "normal", CPU)
    assert flash_bwd_config.divided_tail(call.problem, flash_bwd.configs(call.problem, H200)[0]) == expected
    judge(call, more=False, config=0, deterministic=deterministic)


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize(("multiprocessors", "expected"), [(5, (5, 5)), (132, (0, 6))])
def test_parts_of_blocks_where_not_all_heads_run_together(
    monkeypatch: pytest.MonkeyPatch, multiprocessors: int, expected: tuple[int, int], together: int
) -> None:
    """Of three kv heads: the launch that adds up the parts takes their blocks in the order of the joint launch."""
    for name, value in FREE_PARTS.items():
        monkeypatch.setattr(flash_bwd_config, name, value)
    monkeypatch.setattr(flash_bwd_config, "NUM_SMS", multiprocessors)
    case = replace(SHORT, dtype="float16", lengths=(300, 330), dims=(64, 64), heads=(6, 3), batch=1)
    call = cases.build(case, "normal", CPU)
    assert flash_bwd_config.divided_tail(call.problem, flash_bwd.configs(call.problem, H200)[0]) == expected
    of_head = call.problem.seqlen_q * (2 * (64 + 64) + 4 * 64)  # Q, dO and dQ's sums
    monkeypatch.setattr(host, "L2_BYTES", together * of_head)
    seen: list[int] = []
    of_host = host.heads_in_l2

    def heads_in_l2(*given: Any) -> int:
        seen.append(of_host(*given))
        return seen[-1]

    monkeypatch.setattr(host, "heads_in_l2", heads_in_l2)
    judge(call, more=False, config=0)
    assert seen == [together, together]  # of the joint launch and of the sums


@pytest.mark.parametrize(
    "features",
    [
        {"causal": "bottom_right", "lengths": (183, 100), "dtype": "bfloat16"},
        {"window": (60, 5), "lengths": (300, 150), "dtype": "float16"},
    ],
    ids=str,
)
def test_nan_that_arrives_at_rows_that_see_nothing_stays_there(features: dict[str, Any]) -> None:
    """With dropout, tiles begin before the first query that sees a key; with a sink, its log-sum-exp is finite."""
    case = replace(SHORT, heads=(2, 2), dims=(64, 64), sinks=True, alibi="heads", dropout=0.25, lse=False, **features)
    call = cases.build(case, "normal", CPU)
    q = call.operands.q
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).to(q.dtype)
    unseen = ~torch.stack(harness.visible(call)).any(-1).transpose(1, 2)
    assert unseen.any()
    expected = on_cpu(call, torch.where(unseen[..., None], 0.0, dout), None, -1, more=True)
    got = on_cpu(call, torch.where(unseen[..., None], torch.nan, dout), None, -1, more=True)
    assert harness.bits(*got) == harness.bits(*expected)
