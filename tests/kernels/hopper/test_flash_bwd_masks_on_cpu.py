"""Masks, biases and slopes in the Hopper backward's own source on a CPU, tile by tile, against the gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import cases
from tests.conformance.cases import Call
from tests.conformance.gates import backward_references
from tests.kernels.hopper import gluon_on_cpu
from tests.kernels.hopper.gradients_on_cpu import CPU, SHORT, judge, on_cpu
from tests.marks import needs_triton, one_in
from warpwave.problem import LARGEST_BIAS
from warpwave.workbench.verify.reference import oracle

pytestmark = needs_triton


MASKED: dict[str, dict[str, Any]] = {
    "mask": {"mask": "full", "sinks": True},
    "mask of keys, causal": {"mask": "keys", "causal": "bottom_right", "lengths": (330, 150), "heads": (2, 1)},
    "mask of keys": {"mask": "keys", "heads": (4, 2), "batch": 2, "sinks": True},
    "mask of rows": {"mask": "rows", "heads": (4, 2), "lengths": (400, 600)},
    "mask of rows, window": {"mask": "rows", "window": (300, 5), "lengths": (400, 600), "softcap": 15.0},
    "mask of a head, alibi": {"mask": "full", "heads": (4, 2), "alibi": "heads", "batch": 2, "causal": "top_left"},
}


# Without a number above the largest finite float16 the launches read the originals, otherwise copies.
UNSEEN = [torch.nan, 60000.0]


@one_in(6)
@pytest.mark.parametrize(
    ("dims", "config", "deterministic"),
    [((192, 128), -1, True), ((64, 40), 0, False), ((32, 32), 0, True), ((128, 80), 0, True)],
    ids=str,
)
@pytest.mark.parametrize("of_unseen", UNSEEN)
@pytest.mark.parametrize("features", MASKED)
def test_masks_on_a_cpu(
    features: str, of_unseen: float, dims: tuple[int, int], config: int, deterministic: bool
) -> None:
    call = cases.build(replace(SHORT, dims=dims, **MASKED[features]), "normal", CPU)
    judge(call, of_unseen, more=False, config=config, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=str)
def test_padding_of_each_head_on_a_cpu(heads: tuple[int, int], deterministic: bool) -> None:
    """A block of keys reads its words once, unless the heads of a group differ."""
    call = cases.build(replace(SHORT, dims=(64, 40), heads=heads, batch=2, mask="keys", lse=False), "normal", CPU)
    lengths = torch.arange(20, 20 + 40 * 2 * heads[0], 40).view(2, heads[0], 1, 1)
    mask = torch.arange(330) < lengths
    judge(call._replace(
        problem=replace(call.problem, mask_shape=tuple(mask.shape)), operands=call.operands._replace(mask=mask)
    ), torch.nan, more=False, config=0, deterministic=deterministic)  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", [(32, 32), (64, 40), (128, 80)], ids=str)
def test_queries_that_no_block_sees_have_no_gradient(dims: tuple[int, int], deterministic: bool) -> None:
    """A whole tile of them, for which no block stores a sum of dQ."""
    call = cases.build(replace(SHORT, dims=dims, lengths=(400, 330), mask="full", lse=False), "normal", CPU)
    mask = call.operands.mask.clone()
    mask[:, :, 128:256] = False
    call = call._replace(operands=call.operands._replace(mask=mask))
    judge(call, torch.nan, more=False, config=0, deterministic=deterministic)


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


@one_in(4)
@pytest.mark.parametrize(
    ("name", "dims"),
    [*((name, (64, 40)) for name in BIASED), *((name, (256, 256)) for name in list(BIASED)[:2]),
     *((name, (128, 128)) for name in list(BIASED)[:2])],
    ids=str,
)  # fmt: skip
def test_biases_on_a_cpu(name: str, dims: tuple[int, int]) -> None:
    judge(biased(name, dims))


@one_in(4)
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


@one_in(4)
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


@pytest.mark.parametrize("config", [0, -1])
def test_what_mask_and_bias_hide_together_goes_nowhere(config: int) -> None:
    """The mask shows a key to one query, the bias to another."""
    features: dict[str, Any] = {
        "dims": (64, 64),
        "lengths": (140, 140),
        "heads": (2, 2),
        "mask": "full",
        "bias": "full",
    }
    call = cases.build(replace(SHORT, lse=False, **features), "normal", CPU)
    mask, bias = call.operands.mask, call.operands.bias
    mask[..., 5], bias[..., 5] = False, -torch.inf
    mask[:, :, 0, 5], bias[:, :, 1, 5] = True, 0.0
    judge(call, torch.nan, more=False, config=config, deterministic=config == -1)


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
