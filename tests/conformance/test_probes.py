"""Exact probes: inputs whose result is known without arithmetic, so that nothing has to be tolerated.

    count      with q = 0 every visible key counts 1: exp(lse) is their number;
    support    with q = 0 and one-hot values, an output is exactly 0 if and only if that one key is hidden;
    retrieval  where one key leads by more than the exponent range, the output is that row of v, bit for bit.

A key too many or too few, or a tile lost, shows in each of them; random data would hide it in the rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import cases, harness
from tests.conformance.cases import LAYOUTS, PLAIN, Call, Case, W
from tests.conformance.harness import DEVICE, LONG, each_kernel

# Each mask alone and the ones that cut each other, at lengths that end inside a tile on both sides.
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": "bottom_right"},
    "causal top-left": {"causal": "top_left"},
    "window (0, 0)": {"window": (0, 0)},
    "window (1, 0)": {"window": (1, 0)},
    "window (63, 0)": {"window": (63, 0)},
    "window (64, 0)": {"window": (64, 0)},
    "window (65, 0)": {"window": (65, 0)},
    "window both sides": {"window": (W, W)},
    "window to the right": {"window": (-1, 5)},
    "causal and window": {"causal": "bottom_right", "window": (W, -1)},
    "causal top-left and window": {"causal": "top_left", "window": (W, 5)},
    "mask": {"mask": "full"},
    "mask of keys": {"mask": "keys"},
    "mask of rows": {"mask": "rows"},
    "bias": {"bias": "full"},
    "bias and causal": {"bias": "heads", "causal": "bottom_right"},
    "packed": {"packed": True, "batch": 5},
    "packed, causal and window": {"packed": True, "batch": 5, "causal": "bottom_right", "window": (W, -1)},
}
LENGTHS = [(113, 140), (140, 113), (1, 129), (129, 1)]

each_mask = pytest.mark.parametrize("mask", MASKS)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def probe(case: Case) -> Call:
    """A call whose logits are all 0 where visible."""
    call = cases.build(case, "normal", DEVICE)
    call.operands.q.zero_()
    if call.operands.bias is not None:
        call.operands.bias.copy_(torch.where(call.operands.bias == -torch.inf, -torch.inf, 0.0))
    return call


def check_count(kernel: str, case: Case, request: pytest.FixtureRequest) -> None:
    call = probe(case)
    if harness.refuses(kernel, call, request):
        return
    _, lse = harness.run(kernel, call)
    assert lse is not None
    counted = torch.exp(lse.double()).round().long()
    expected = [shown.sum(-1) for shown in harness.visible(call)]
    assert torch.equal(counted, torch.cat(expected, dim=-1) if case.packed else torch.stack(expected))


@each_kernel
@each_mask
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_count(kernel: str, lengths: tuple[int, int], mask: str, request: pytest.FixtureRequest) -> None:
    case = replace(PLAIN, dims=(16, 16), heads=(2, 1), batch=2, lengths=lengths)
    check_count(kernel, replace(case, **MASKS[mask]), request)


@each_kernel
@pytest.mark.parametrize("mask", ["none", "causal", "window to the right", "mask of keys", "packed"])
def test_count_many_keys(kernel: str, mask: str, request: pytest.FixtureRequest) -> None:
    """As many keys as float32 can tell apart by their logarithm."""
    case = replace(PLAIN, dims=(16, 16), heads=(1, 1), lengths=(5, LONG))
    check_count(kernel, replace(case, **MASKS[mask]), request)


@each_kernel
@each_layout
def test_count_in_every_layout(kernel: str, layout: str, request: pytest.FixtureRequest) -> None:
    case = replace(PLAIN, dims=(16, 16), heads=(2, 2), batch=2, lengths=(113, 140), causal="bottom_right")
    check_count(kernel, replace(case, layout=layout), request)


def check_support(kernel: str, case: Case, request: pytest.FixtureRequest) -> None:
    call = probe(case)
    if harness.refuses(kernel, call, request):
        return
    width, value = case.dims[1], call.operands.v
    # Every key in turn is the one whose value is not zero, `width` of them a call.
    for first in range(0, case.lengths[1], width):
        value.zero_()
        for v in harness.by_sequence(call, value):
            n = max(0, min(width, len(v) - first))
            v[first : first + n, :, :n] = torch.eye(n, dtype=v.dtype, device=v.device)[:, None]
        out, _ = harness.run(kernel, call)
        for result, shown in zip(harness.by_sequence(call, out), harness.visible(call), strict=True):
            seen = shown[:, :, first : first + width].transpose(0, 1)
            assert torch.equal(result[..., : seen.shape[-1]] != 0, seen), f"keys from {first}"


@each_kernel
@each_mask
@pytest.mark.parametrize("lengths", LENGTHS[:2], ids=str)
def test_support(kernel: str, lengths: tuple[int, int], mask: str, request: pytest.FixtureRequest) -> None:
    case = replace(PLAIN, dims=(16, 128), heads=(2, 1), lengths=lengths, lse=False)
    check_support(kernel, replace(case, **MASKS[mask]), request)


@each_kernel
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.endswith("for all")])  # v is written by cell
def test_support_in_every_layout(kernel: str, layout: str, request: pytest.FixtureRequest) -> None:
    case = replace(PLAIN, dims=(16, 128), heads=(2, 2), batch=2, lengths=(113, 140), window=(W, 5), lse=False)
    check_support(kernel, replace(case, layout=layout), request)


def codes(k: Tensor, g: torch.Generator) -> Tensor:
    """For each key a vector of +-1, any two of a sequence far apart; the same for every batch item."""
    return torch.randint(0, 2, k.shape[-3:], generator=g, device=DEVICE) * 2.0 - 1


def retrieval(case: Case) -> tuple[Call, Tensor]:
    """A call in which each query asks for one key that it sees, and what it must get; a query that sees none gets 0."""
    call = cases.build(replace(case, scale=1.0, layout="bshd"), "normal", DEVICE)
    problem, operands = call.problem, call.operands
    g = torch.Generator(DEVICE).manual_seed(1)
    group = problem.num_heads_q // problem.num_heads_kv
    operands.k.copy_(codes(operands.k, g))
    q, k, v = LAYOUTS[case.layout](*operands[:3])
    call = call._replace(operands=(operands := operands._replace(q=q, k=k, v=v)))
    expected = torch.zeros(*operands.q.shape[:-1], problem.head_dim_v, dtype=operands.q.dtype, device=DEVICE)
    parts = (harness.by_sequence(call, x) for x in (operands.q, operands.k, operands.v, expected))
    for q, k, v, want, shown in zip(*parts, harness.visible(call), strict=True):
        seqlen_k = shown.shape[-1]
        if not len(q) or not seqlen_k:
            continue
        wish = torch.rand(shown.shape, generator=g, device=DEVICE).masked_fill(~shown, -1.0)
        target = wish.argmax(-1)  # [heads, rows]: a visible key each, where there is one
        sees = shown.any(-1)
        for h in range(problem.num_heads_q):
            q[:, h] = 8 * k[target[h], h // group]
            want[:, h] = torch.where(sees[h, :, None], v[target[h], h // group], 0.0)
    # Any other key is behind by 8 * 2 * (places in which the codes differ), more than exp2's whole range.
    return call, expected


def check_retrieval(kernel: str, case: Case, request: pytest.FixtureRequest) -> None:
    call, expected = retrieval(case)
    if harness.refuses(kernel, call, request):
        return
    out, _ = harness.run(kernel, call)
    assert torch.equal(out, expected)


# bf16x6 loses no bit of one value either; interpreted it takes minutes.
SPLIT = ["float32:bf16x6"] if harness.ON_GPU else []
each_exact_type = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32:ieee", *SPLIT])


@each_kernel
@each_exact_type
@each_mask
def test_retrieval(kernel: str, mask: str, dtype: str, request: pytest.FixtureRequest) -> None:
    case = replace(PLAIN, dtype=dtype, dims=(64, 40), heads=(4, 2), batch=2, lengths=(113, 140), lse=False)
    check_retrieval(kernel, replace(case, **MASKS[mask]), request)


@each_kernel
@each_layout
@pytest.mark.parametrize("causal", ["", "bottom_right"])
def test_retrieval_in_every_layout(kernel: str, layout: str, causal: str, request: pytest.FixtureRequest) -> None:
    case = replace(PLAIN, dims=(64, 64), heads=(4, 2), batch=2, lengths=(65, 65), causal=causal, lse=False)
    check_retrieval(kernel, replace(case, layout=layout), request)


@each_kernel
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (8, 1), (12, 3)], ids=str)
def test_retrieval_across_heads(kernel: str, heads: tuple[int, int], request: pytest.FixtureRequest) -> None:
    """Each query head must read its own kv head: the codes differ from head to head."""
    check_retrieval(kernel, replace(PLAIN, heads=heads, lengths=(33, 65), batch=2, lse=False), request)
