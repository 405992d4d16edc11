"""The Hopper backward's own source on a CPU: its protocol and arithmetic, tile by tile, against the gates."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import cases, harness
from tests.conformance.cases import PLAIN, Call
from tests.conformance.datasets import Data
from tests.conformance.gates import backward_references, judge_backward
from tests.kernels.hopper import gluon_on_cpu
from tests.marks import needs_triton
from warpwave.gpu import Gpu
from warpwave.kernels import dropout
from warpwave.kernels.hopper import flash_bwd, host
from warpwave.kernels.hopper.flash_bwd import config as flash_bwd_config
from warpwave.kernels.hopper.flash_bwd import hidden, kernel
from warpwave.kernels.hopper.flash_bwd.launches import Tensors
from warpwave.problem import LARGEST_BIAS
from warpwave.runtime import launch
from warpwave.workbench.verify.reference import Forward, Gradients, oracle

H200 = Gpu.for_arch("sm_90")
CPU = torch.device("cpu")
pytestmark = needs_triton


def on_cpu(
    call: Call, dout: Tensor, dlse: Tensor | None, config: int, exact: Forward | None = None, more: bool = False,
    deterministic: bool = True,
) -> Gradients:  # fmt: skip
    """The gradients by the launches' own source, from out and lse of the reference, or from others. With `more`, those
    of bias and slopes as well."""
    from warpwave.kernels.hopper import parts, rows, scheduler, softmax, split_float32, words
    from warpwave.kernels.hopper.flash_bwd import (
        band,
        bias,
        dkv,
        dq,
        joint,
        joint_steps,
        producer,
        split_dkv,
        split_dq,
        split_steps,
        steps,
        turns,
    )

    problem = replace(call.problem, return_lse=True, deterministic=deterministic)
    exact = exact or oracle(problem, call.operands)
    out, lse = exact.out.to(call.operands.q.dtype), exact.lse.float()
    of = flash_bwd.configs(problem, H200)[config]
    workspace, grads = kernel.example(problem, of, CPU)
    for tensor in (*workspace[:-1], *workspace.hidden, *grads):  # what is not written must not be read
        if tensor is not None:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 77)
    tensors = Tensors(call.operands, out, lse.contiguous(), dout, dlse, workspace, *grads)
    for alike in kernel.to_zero(problem, tensors, kernel.has_hidden_rows(problem)):
        torch._foreach_zero_(alike)
    tensors = kernel.with_bias(problem, tensors, more)
    if workspace.hidden.q is not None:
        for step in hidden.steps(problem, tensors, of):
            launch.bind(step.launch)(*step.launch.tensors)
    if more:
        tensors = kernel.with_slopes(problem, tensors)
        if tensors.workspace.sums is not None and problem.dtype != "float32":
            tensors.workspace.sums.fill_(torch.nan)
    if tensors.dbias is not None and not problem.has_band and problem.mask_shape is None:
        tensors.dbias.fill_(torch.nan)
    for step in flash_bwd.specify(problem, H200, tensors, of):
        if step.plans:
            modules = (
                *(band, bias, dkv, dq, joint, joint_steps, parts, producer, rows, scheduler, steps, turns, words),
                *(softmax, split_dkv, split_dq, split_float32, split_steps),
            )
            gluon_on_cpu.run_launch(step.launch, modules, 2, {"meet": lambda: threading.Barrier(2).wait})
        else:
            launch.bind(step.launch)(*step.launch.tensors)
    of_sinks = workspace.of_sinks
    dsinks = None if of_sinks is None else of_sinks.view(-1, problem.num_heads_q, of_sinks.shape[1]).sum((0, 2))
    of_bias, of_slopes = kernel.bias_gradient(problem, tensors), kernel.slope_gradient(problem, tensors)
    return Gradients(tensors.dq, tensors.dk, tensors.dv, of_bias, of_slopes, dsinks)


SHORT = replace(PLAIN, lengths=(150, 330), heads=(2, 1), lse=True)
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": "bottom_right", "sinks": True},
    "more queries than keys": {"causal": "bottom_right", "lengths": (330, 150), "heads": (2, 2), "sinks": True},
    "top left": {"causal": "top_left", "lengths": (210, 70)},
    "window": {"window": (60, 5), "alibi": "heads", "softcap": 15.0},
    "window beyond the keys": {"causal": "top_left", "window": (3, -1), "lengths": (37, 170)},
    "window wider than a block": {"window": (300, 5), "lengths": (400, 600), "heads": (1, 1)},
    "packed": {"packed": True, "batch": 4, "heads": (4, 2), "causal": "bottom_right", "lengths": (150, 140)},
    "packed, no groups": {"packed": True, "batch": 4, "heads": (2, 2), "causal": "bottom_right", "lengths": (150, 140)},
    "packed window": {"packed": True, "batch": 5, "window": (20, 7), "lengths": (200, 300)},
    "one query": {"lengths": (1, 300), "batch": 2},
}
DROPPED: dict[str, dict[str, Any]] = {
    "causal": {"causal": "bottom_right", "sinks": True, "heads": (4, 2), "batch": 2},
    "queries from 183 on": {"causal": "bottom_right", "lengths": (333, 150), "softcap": 15.0},
    "keys from 142 on": {"window": (60, 5), "lengths": (130, 332), "alibi": "heads"},
    "packed": {"packed": True, "batch": 4, "heads": (4, 2), "causal": "bottom_right", "lengths": (150, 140)},
    "packed window": {"packed": True, "batch": 5, "window": (20, 7), "lengths": (200, 300)},
}
MASKED: dict[str, dict[str, Any]] = {
    "mask": {"mask": "full", "sinks": True},
    "mask of keys, causal": {"mask": "keys", "causal": "bottom_right", "lengths": (330, 150), "heads": (2, 1)},
    "mask of keys": {"mask": "keys", "heads": (4, 2), "batch": 2, "sinks": True},
    "mask of rows, window": {"mask": "rows", "window": (300, 5), "lengths": (400, 600), "softcap": 15.0},
    "mask of a head, alibi": {"mask": "full", "heads": (4, 2), "alibi": "heads", "batch": 2, "causal": "top_left"},
}


# Without a number above the largest finite float16 the launches read the originals, otherwise copies.
UNSEEN = [torch.nan, 60000.0]


def judge(
    call: Call, of_unseen: float | None = None, more: bool = True, config: int = -1, deterministic: bool = True
) -> None:
    """Judges the gradients, unless told otherwise by launches apart; with `of_unseen`, if given, in keys and values
    that no query sees, and in queries that see nothing."""
    q, k, v = call.operands[:3]
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=torch.Generator().manual_seed(2)).to(q.dtype)
    references = backward_references(call.problem, call.operands, dout, None)
    exact = oracle(replace(call.problem, return_lse=True), call.operands)
    if of_unseen is not None:
        shown = torch.stack(harness.visible(call))  # [batch, heads, queries, keys]
        unseen = ~shown.any(-1).transpose(1, 2), ~shown.any(2).unflatten(1, (k.shape[2], -1)).any(2).transpose(1, 2)
        q, k, v, dout = (t.clone() for t in (q, k, v, dout))
        for tensor, of in ((q, 0), (dout, 0), (k, 1), (v, 1)):
            tensor[unseen[of]] = of_unseen
        call = call._replace(operands=call.operands._replace(q=q, k=k, v=v))
    verdict = judge_backward(call.problem, references, on_cpu(call, dout, None, config, exact, more, deterministic))
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(("dims", "config"), [((64, 40), -1), ((192, 128), -1), ((64, 40), 0), ((128, 80), 0)], ids=str)
@pytest.mark.parametrize("of_unseen", UNSEEN)
@pytest.mark.parametrize("features", MASKED)
def test_masks_on_a_cpu(features: str, of_unseen: float, dims: tuple[int, int], config: int) -> None:
    call = cases.build(replace(SHORT, dims=dims, **MASKED[features]), "normal", CPU)
    judge(call, of_unseen, more=False, config=config, deterministic=config == -1)


@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=str)
def test_padding_of_each_head_on_a_cpu(heads: tuple[int, int]) -> None:
    """A block of keys reads its words once, unless the heads of a group differ."""
    call = cases.build(replace(SHORT, dims=(64, 40), heads=heads, batch=2, mask="keys", lse=False), "normal", CPU)
    lengths = torch.arange(20, 20 + 40 * 2 * heads[0], 40).view(2, heads[0], 1, 1)
    mask = torch.arange(330) < lengths
    judge(call._replace(
        problem=replace(call.problem, mask_shape=tuple(mask.shape)), operands=call.operands._replace(mask=mask)
    ), torch.nan, more=False, config=0, deterministic=False)  # fmt: skip


@pytest.mark.parametrize("dims", [(64, 40), (128, 128)], ids=str)
def test_keys_behind_the_end_of_a_mask_have_no_weight(dims: tuple[int, int]) -> None:
    """K is 0 there, and beside scores of -128 so would be infinite weights."""
    call = cases.build(replace(SHORT, dims=dims, mask="full", lse=False), "normal", CPU)
    q, k, v = call.operands[:3]
    size = (128 / (dims[0] * call.problem.softmax_scale)) ** 0.5
    call = call._replace(operands=call.operands._replace(q=torch.full_like(q, size), k=torch.full_like(k, -size)))
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=torch.Generator().manual_seed(2)).to(q.dtype)
    found = on_cpu(call, dout, None, 0, deterministic=False)
    assert all(gradient.isfinite().all() for gradient in (found.dq, found.dk, found.dv))


@pytest.mark.parametrize(
    ("dims", "config"),
    [
        *(((64, 64), 0), ((40, 24), 0), ((128, 128), 0), ((64, 80), 0)),
        *(((72, 104), 0), ((96, 72), 0), ((192, 128), 0), ((160, 160), 0), ((40, 136), 0)),
        *(((192, 128), -1), ((40, 64), 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("features", CALLS)
def test_the_protocol_on_a_cpu(features: str, dims: tuple[int, int], config: int) -> None:
    call = cases.build(replace(SHORT, dims=dims, **CALLS[features]), "normal", CPU)
    g = torch.Generator().manual_seed(2)
    q = call.operands.q
    dout = torch.randn(*q.shape[:-1], call.problem.head_dim_v, generator=g).to(q.dtype)
    shape = dout.shape[:-1]
    dlse = torch.randn(shape, generator=g).transpose(-1, -2).contiguous() if features != "full" else None
    references = backward_references(call.problem, call.operands, dout, dlse)
    verdict = judge_backward(call.problem, references, on_cpu(call, dout, dlse, config))
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("features", ["full", "window wider than a block", "packed"])
def test_sums_in_any_order_are_those_in_order(features: str, dims: tuple[int, int]) -> None:
    """Here programs run one after another, so that the sums of both have one order, and the same bits."""
    call = cases.build(replace(SHORT, dims=dims, **CALLS[features]), "normal", CPU)
    shape = *call.operands.q.shape[:-1], dims[1]
    dout = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(call.operands.q.dtype)
    one, other = (on_cpu(call, dout, None, 0, deterministic=wanted) for wanted in (False, True))
    assert harness.bits(*one[:3]) == harness.bits(*other[:3])


@pytest.mark.parametrize(("dims", "config"), [((64, 64), 0), ((128, 128), 0), ((40, 64), 1), ((192, 128), 0)], ids=str)
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


@pytest.mark.parametrize(("config", "dtype"), [(0, "float16"), (1, "float16"), (0, "float32:default")])
@pytest.mark.parametrize(
    ("features", "data"), [("full", "normal"), ("causal", "sharp"), ("packed", "normal"), ("window", "normal")]
)
def test_splits_of_a_group(monkeypatch: pytest.MonkeyPatch, features: str, data: Data, config: int, dtype: str) -> None:
    """As few and long blocks have them, here of a short call."""
    monkeypatch.setattr(flash_bwd_config, "LEAST_STEPS", 0)
    dims = (96, 80) if features == "packed" else SHORT.dims  # in pieces of columns
    if features == "full" and dtype == "float16":
        dims = (160, 160)
    heads: dict[str, Any] = {"heads": (8, 2), "dtype": dtype, "dims": dims}
    if dtype != "float16":
        heads |= {"sinks": False, "softcap": 0.0}
    call = cases.build(replace(SHORT, **{**CALLS[features], **heads}), data, CPU)
    of = flash_bwd.configs(call.problem, H200)[config]
    if flash_bwd_config.divides_steps(call.problem, of):
        pytest.skip("its blocks are divided by their steps")
    assert flash_bwd_config.group_splits(call.problem, of) == 4
    judge(call, more=False, config=config)


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
    for name, value in {"LEAST_STEPS": 0, "LEAST_STEPS_OF_PART": 1, "STEPS_OF_PART": 0.01}.items():
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
    for name, value in {"LEAST_STEPS": 0, "LEAST_STEPS_OF_PART": 1, "STEPS_OF_PART": 0.01}.items():
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


# float32, in parts ----------------------------------------------------------------------------------------------------


def in_float32(features: dict[str, Any], dims: tuple[int, int], data: Data = "normal") -> Call:
    """A call without softcap and sinks, and of at least 64 queries and keys: these launches take no others."""
    lengths = tuple(max(64, length) for length in features.get("lengths", SHORT.lengths))
    features = {**features, "lengths": lengths, "softcap": 0.0, "sinks": False}
    case = replace(SHORT, dtype="float32:default", dims=dims, **features)
    call = cases.build(case, data, CPU)
    assert not flash_bwd.why_not(call.problem, H200)
    return call


def upstream(call: Call, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """dout and dlse, of which dout has a few large rows."""
    g = torch.Generator().manual_seed(2)
    dout = torch.randn(*call.operands.q.shape[:-1], call.problem.head_dim_v, generator=g)
    dlse = torch.randn(dout.shape[:-1], generator=g).transpose(-1, -2).contiguous()
    dout.flatten(0, -3)[::16] *= 1000
    return dout * scale, dlse * scale


def judge_parts(call: Call, dout: Tensor, dlse: Tensor | None) -> Gradients:
    references = backward_references(call.problem, call.operands, dout, dlse)
    found = on_cpu(call, dout, dlse, 0)
    verdict = judge_backward(call.problem, references, found)
    assert verdict.passed, str(verdict)
    return found


SOME = ("causal", "window", "packed window")


@pytest.mark.parametrize(
    ("dims", "features"),
    [
        *((dims, name) for dims in ((64, 64), (40, 24)) for name in CALLS),
        *((dims, name) for dims in ((128, 128), (64, 80), (59, 111)) for name in SOME),
    ],
    ids=str,
)
def test_float32_on_a_cpu(features: str, dims: tuple[int, int]) -> None:
    call = in_float32(CALLS[features], dims)
    dout, dlse = upstream(call)
    judge_parts(call, dout, dlse if features != "full" else None)


@pytest.mark.parametrize("data", ["sharp", "low"])
@pytest.mark.parametrize("features", ["full", *SOME])
def test_float32_on_other_data(features: str, data: Data) -> None:
    call = in_float32({"heads": (4, 2), "batch": 2, **CALLS[features]}, (64, 64), data)
    judge_parts(call, *upstream(call))


@pytest.mark.parametrize("features", DROPPED)
def test_float32_with_dropout_on_a_cpu(features: str) -> None:
    """With NaN in rows that see nothing or that nothing sees, where tiles begin."""
    call = in_float32({**DROPPED[features], "dropout": 0.3, "lse": False}, (64, 40))
    judge(call, "from" in features, more=False)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e15])
def test_float32_of_any_magnitude(scale: float) -> None:
    """Columns of k, v and q span four decades, and what arrives may be as small or large as float32 holds."""
    call = in_float32({"lengths": (150, 200)}, (64, 64))
    q, k, v = call.operands[:3]
    for tensor, factor in ((q, 1 / 30), (k, 30.0), (v, 100.0)):
        tensor[..., 3] *= factor
    v *= 1e-3 / scale if scale > 1 else 1.0
    judge_parts(call, *upstream(call, scale))


def test_float32_of_a_loss_of_the_log_sum_exp_alone() -> None:
    call = in_float32({"causal": "bottom_right"}, (64, 64))
    dout, dlse = upstream(call)
    found = judge_parts(call, torch.zeros_like(dout), 1e6 * dlse)
    assert not found.dv.any()


def test_float32_of_rows_that_see_one_key() -> None:
    """dP - delta cancels in the first row of each head: its gradients are a rounding error."""
    call = in_float32({"causal": "top_left", "lengths": (64, 64), "heads": (2, 2), "batch": 2}, (64, 64), "sharp")
    dout, _ = upstream(call)
    found = judge_parts(call, dout, None)
    assert found.dq[:, 0].abs().max() < 1e-6 * found.dq.abs().max()


def test_float32_infinities_reach_the_rows_that_see_them() -> None:
    call = in_float32({"causal": "bottom_right", "lengths": (150, 150), "lse": False}, (64, 64))
    dout, _ = upstream(call)
    expected = on_cpu(call, dout, None, 0)
    exact = oracle(replace(call.problem, return_lse=True), call.operands)
    v = call.operands.v.clone()
    v[:, 100, 0, 7] = torch.inf
    changed = call._replace(operands=call.operands._replace(v=v))
    out = exact.out.clone()
    out[:, 100:, :, 7] = torch.inf
    found = on_cpu(changed, dout, None, 0, exact._replace(out=out))
    assert torch.equal(found.dq[:, :64], expected.dq[:, :64]) and not found.dq[:, 100:].isfinite().all(-1).any()


# Features; whether the bias has axes of batch, heads, queries and keys; its type if not the call's.
BIASED: dict[str, tuple[dict[str, Any], tuple[int, int, int, int], str]] = {
    "each score": ({"sinks": True, "heads": (2, 1), "batch": 2}, (1, 1, 1, 1), "float16"),
    "each score in float32, causal, softcap": (
        {"causal": "bottom_right", "softcap": 15.0, "lengths": (210, 70)}, (1, 1, 1, 1), "float32",
    ),
    "one for batch and heads, window": (
        {"window": (300, 5), "lengths": (400, 600), "heads": (4, 2), "batch": 2}, (0, 0, 1, 1), "float16",
    ),
    "each score, keys from an odd one on": (
        {"causal": "bottom_right", "window": (13, 13), "lengths": (3, 799)}, (1, 1, 1, 1), "float16",
    ),
    "one for the heads, mask": ({"mask": "full", "batch": 2}, (1, 0, 1, 1), "float16"),
    "queries from 70 on": ({"causal": "bottom_right", "lengths": (210, 140)}, (1, 1, 1, 1), "float16"),
    "keys, causal": ({"causal": "bottom_right", "lengths": (330, 150)}, (1, 1, 0, 1), "float16"),
    "queries": ({"lengths": (70, 130), "softcap": 15.0, "sinks": True}, (0, 1, 1, 0), "float32"),
    "one number a head": ({"lengths": (70, 130), "sinks": True}, (0, 1, 0, 0), "float32"),
    "one query": ({"lengths": (1, 300), "batch": 2}, (1, 1, 1, 1), "float16"),
}  # fmt: skip


def biased(name: str, dims: tuple[int, int]) -> Call:
    """A call whose bias is -inf here and there."""
    features, axes, dtype = BIASED[name]
    call = cases.build(replace(SHORT, dims=dims, lse=False, **features), "normal", CPU)
    p, g = call.problem, torch.Generator().manual_seed(5)
    sizes = (p.batch, p.num_heads_q, p.seqlen_q, p.seqlen_k)
    shape = tuple(size if has else 1 for size, has in zip(sizes, axes, strict=True))
    bias = torch.randn(shape, generator=g)
    if min(axes[2:]):
        bias.masked_fill_(torch.rand(shape, generator=g) < 0.1, -torch.inf)
    bias = bias.to(getattr(torch, dtype))
    return call._replace(
        problem=replace(p, bias_shape=shape, bias_dtype=dtype), operands=call.operands._replace(bias=bias)
    )


@pytest.mark.parametrize("of_head", [False, True])
def test_tiles_that_a_mask_hides_are_not_walked(of_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of 128, the last of which sees nothing, in both heads of a group or in the first."""
    call = cases.build(replace(SHORT, dims=(64, 64), lengths=(512, 512), mask="full", lse=False), "normal", CPU)
    document = torch.arange(512) // 128
    shown = (document[:, None] == document) & (document < 3)
    mask = torch.stack([shown, torch.ones_like(shown)])[None] if of_head else shown.expand(1, 2, -1, -1)
    call = call._replace(operands=call.operands._replace(mask=mask.contiguous()))
    walked = []
    read = gluon_on_cpu.Map.read

    def counted(self: gluon_on_cpu.Map, place: Any) -> Tensor:
        walked.append(self.block_type.shape[2:] == [128, 64])  # tiles of a step: others are of 64 rows or of statistics
        return read(self, place)

    monkeypatch.setattr(gluon_on_cpu.Map, "read", counted)
    judge(call, more=False)
    # K and V for each of 4 blocks of queries of a head; Q and dO for each of 8 blocks of keys. A block that sees
    # nothing walks one tile.
    diagonal, dense = (4, 8), (4 * 4, 8 * 4)
    steps = (diagonal[0] + dense[0], 3 * 2 + dense[1]) if of_head else (2 * diagonal[0], 2 * 3 * 2 + 2)
    assert sum(walked) == 2 * sum(steps)


@pytest.mark.parametrize(
    ("name", "dims"),
    [*((name, (64, 40)) for name in BIASED), *((name, (256, 256)) for name in list(BIASED)[:2]),
     *((name, (128, 128)) for name in list(BIASED)[:2])],
    ids=str,
)  # fmt: skip
def test_biases_on_a_cpu(name: str, dims: tuple[int, int]) -> None:
    judge(biased(name, dims))


@pytest.mark.parametrize(
    ("name", "dims", "config", "deterministic"),
    [
        *((name, dims, 0, False) for name in BIASED for dims in ((40, 64), (128, 72))),
        *((name, (64, 64), 0, True) for name in ("each score", "one for batch and heads, window")),
        *((name, (40, 64), -1, True) for name in ("keys, causal", "queries", "one number a head", "each score")),
    ],
    ids=str,
)
def test_a_bias_whose_gradient_is_not_wanted(
    name: str, dims: tuple[int, int], config: int, deterministic: bool
) -> None:
    judge(biased(name, dims), more=False, config=config, deterministic=deterministic)


@pytest.mark.parametrize(
    "name", ["each score", "keys, causal", "each score, keys from an odd one on", "one for the heads, mask"]
)
@pytest.mark.parametrize(("of_unseen", "more"), [(torch.nan, True), (torch.nan, False), (60000.0, True)])
def test_what_a_bias_hides_goes_nowhere(name: str, of_unseen: float, more: bool) -> None:
    call = biased(name, (64, 40))
    bias = call.operands.bias
    for lines in (bias[..., 20:23], bias[:, :, 5:7]) if bias.shape[2] > 1 else (bias[..., 20:23],):
        lines.fill_(-torch.inf)
    judge(call, of_unseen, more=more, config=-1 if more else 0, deterministic=False)


@pytest.mark.parametrize("largest", [1e9, torch.finfo(torch.float32).max])
def test_biases_of_large_magnitude_stay_finite(largest: float) -> None:
    """The usual stand-ins for minus infinity, in a row of nothing else, and a bias that takes everything."""
    call = biased("each score in float32, causal, softcap", (64, 64))
    bias = call.operands.bias.nan_to_num_(neginf=0.0)
    bias[:, :, 180], bias[:, :, 190, 20] = -largest, largest
    q = call.operands.q
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).to(q.dtype)
    exact = oracle(replace(call.problem, return_lse=True), call.operands)
    exact.lse.clamp_(-LARGEST_BIAS, LARGEST_BIAS)  # as kernels bound it
    found = on_cpu(call, dout, None, 0, exact, more=True)
    assert found.dbias is not None
    for gradient in (found.dq, found.dk, found.dv, found.dbias):
        assert gradient.isfinite().all() and gradient.abs().max() < 1000
    assert found.dq[:, 190].abs().max() < 1e-2, "one key takes everything, so no score changes anything"


@pytest.mark.parametrize("dtype", ["float16", "float32:default"])
@pytest.mark.parametrize(
    "features", [{}, {"packed": True, "batch": 4, "causal": "top_left", "alibi": "batch"}], ids=str
)
def test_slopes_on_a_cpu(features: dict[str, Any], dtype: str) -> None:
    softcap = 15.0 if dtype == "float16" else 0.0
    case = replace(
        SHORT, dtype=dtype, heads=(4, 2), dims=(64, 40), lse=False, **{"alibi": "heads", "softcap": softcap, **features}
    )
    judge(cases.build(case, "normal", CPU))


@pytest.mark.parametrize("features", [{}, {"sinks": True}, {"dropout": 0.25, "packed": True, "batch": 2}], ids=str)
def test_slopes_of_distant_keys_on_a_cpu(features: dict[str, Any]) -> None:
    """What dS of a row adds up to in excess is not multiplied by whole distances."""
    case = replace(SHORT, dtype="bfloat16", lengths=(16, 500), alibi="heads", causal="top_left", **features)
    call = cases.build(case, "normal", CPU)
    slopes = torch.tensor([0.5, 0.125])
    operands = call.operands._replace(alibi_slopes=slopes)
    if operands.sinks is not None:  # as large as the scores of keys so far away
        operands = operands._replace(sinks=-slopes * (500 - 16))
    call = call._replace(operands=operands)
    g = torch.Generator().manual_seed(2)
    dout = torch.randn(call.operands.q.shape, generator=g).to(torch.bfloat16)
    dlse = torch.randn(oracle(call.problem, call.operands).lse.shape, generator=g)
    found = on_cpu(call, dout, dlse, -1, more=True).dalibi_slopes
    expected = backward_references(call.problem, call.operands, dout, dlse).exact.dalibi_slopes
    assert found is not None and expected is not None
    torch.testing.assert_close(found.double(), expected.double(), rtol=2e-3, atol=2e-3)


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
