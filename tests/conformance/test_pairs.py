"""Pairs of calls whose results must agree: bit for bit where the arithmetic is the same, within the gates where only
the mathematics is.

Both calls of a bit-equal pair run with the same config: a kernel may choose another tile for another problem.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance import cases, harness
from tests.conformance.cases import LAYOUTS, PLAIN, Call, Case, W, with_operands
from tests.conformance.gates import ForwardReferences, forward_references, judge_forward
from tests.conformance.harness import DEVICE, bits, each_kernel
from tests.marks import one_in

CASE = replace(PLAIN, dtype="bfloat16", dims=(40, 64), heads=(4, 2), batch=3 if harness.ON_GPU else 2, lengths=(67, 90))

each_lse = pytest.mark.parametrize("lse", [False, True])


def assert_bit_equal(kernel: str, call: Call, other: Call) -> None:
    config = harness.default_config(kernel, call)
    assert bits(*harness.run(kernel, call, config)) == bits(*harness.run(kernel, other, config))


def assert_gates(call: Call, references: ForwardReferences, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    verdict = judge_forward(call.problem, references, out, lse)
    assert verdict.passed, str(verdict)


# Bit for bit ----------------------------------------------------------------------------------------------------------


@one_in(4)
@each_kernel
@each_lse
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_contiguous(
    layout: str, packed: bool, lse: bool, kernel: str, request: pytest.FixtureRequest
) -> None:
    if packed and layout == "one item for all":
        layout = "one head for all"  # packed tensors have no batch axis
    call = cases.build(replace(CASE, layout=layout, packed=packed, lse=lse), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    q, k, v = (x.contiguous() for x in call.operands[:3])
    assert_bit_equal(kernel, call, with_operands(call, q=q, k=k, v=v))


@each_kernel
@pytest.mark.parametrize("name", ["q", "k", "v", "all"])
def test_lazily_negated_views_equal_their_values(name: str, kernel: str, request: pytest.FixtureRequest) -> None:
    """The imaginary part of a conjugate is a view that torch negates when it reads."""
    call = cases.build(replace(CASE, dtype="float32:ieee"), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    names = ("q", "k", "v") if name == "all" else (name,)
    lazy = {
        n: torch.complex(torch.zeros_like(x), -x).conj().imag
        for n in names
        if (x := getattr(call.operands, n)) is not None
    }
    assert all(x.is_neg() for x in lazy.values())
    harness.run(kernel, call)  # a plan for the same layouts may be there already
    assert_bit_equal(
        kernel, with_operands(call, **{n: x.resolve_neg() for n, x in lazy.items()}), with_operands(call, **lazy)
    )


@each_kernel
@pytest.mark.parametrize("features", [{"mask": "full", "bias": "full"}, {"packed": True, "batch": 5}], ids=str)
def test_other_operands_may_be_strided(features: dict[str, Any], kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(replace(CASE, alibi="batch", sinks=True, **features), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    spread = {}
    for name in ("mask", "bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k"):
        x = getattr(call.operands, name)
        if x is not None:
            spread[name] = x.new_zeros(*x.shape, 3)[..., 1].copy_(x)
    assert_bit_equal(kernel, call, with_operands(call, **spread))


@each_kernel
@pytest.mark.parametrize(
    ("keys", "row", "begin"), [(96, 128, 1), (96, 128, 8), (96, 128, 16), (96, 97, 0), (67, 128, 0), (67, 67, 1)]
)
def test_masks_and_biases_may_begin_anywhere(
    keys: int, row: int, begin: int, kernel: str, request: pytest.FixtureRequest
) -> None:
    """A thread may load 16 keys at once if the address and all strides are multiples of 16, and one key otherwise."""
    call = cases.build(replace(CASE, mask="full", bias="full", lengths=(67, keys)), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    moved = {}
    for name in ("mask", "bias"):
        x = getattr(call.operands, name)
        rows = x.new_zeros(*x.shape[:-1], row).flatten()
        rows = torch.cat((rows, rows.new_zeros(16)))[begin:]
        moved[name] = rows[: rows.numel() - 16 + begin].view(*x.shape[:-1], row)[..., :keys].copy_(x)
    assert_bit_equal(kernel, call, with_operands(call, **moved))


@each_kernel
@pytest.mark.parametrize("features", [{}, {"mask": "full", "bias": "full"}, {"packed": True, "batch": 5}], ids=str)
def test_other_batch_items_do_not_matter(features: dict[str, Any], kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(replace(CASE, causal="bottom_right", lse=not features, **features), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    changed = with_operands(call, **{name: getattr(call.operands, name).clone() for name in "qkv"})
    for x in changed.operands[:3]:
        for part in harness.by_sequence(changed, x)[1:]:
            part.mul_(-3)
    config = harness.default_config(kernel, call)
    (out, lse), (other_out, other_lse) = (harness.run(kernel, c, config) for c in (call, changed))
    first, other_first = (harness.by_sequence(call, x)[0] for x in (out, other_out))
    assert bits(first) == bits(other_first)
    assert bits(out) != bits(other_out), "the change had no effect at all"
    if lse is not None and other_lse is not None:
        assert bits(lse[0]) == bits(other_lse[0])


@each_kernel
@pytest.mark.parametrize("packed", [False, True])
def test_other_batch_items_may_hold_nan(packed: bool, kernel: str, request: pytest.FixtureRequest) -> None:
    """The last key tile of a packed sequence reaches into the next one, and 0 times its NaN would be NaN."""
    call = cases.build(replace(CASE, packed=packed, batch=5, lse=True), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    changed = with_operands(call, **{name: getattr(call.operands, name).clone() for name in "qkv"})
    for x in changed.operands[:3]:
        for part in harness.by_sequence(changed, x)[1:]:
            part.fill_(torch.nan)
    config = harness.default_config(kernel, call)
    outs = [harness.run(kernel, c, config)[0] for c in (call, changed)]
    first, other_first = (harness.by_sequence(call, out)[0] for out in outs)
    assert bits(first) == bits(other_first)
    assert outs[1].isnan().any()


UNSEEN: dict[str, dict[str, Any]] = {
    "causal top-left": {"causal": "top_left"},
    "window": {"window": (W, 0)},
    "mask of keys": {"mask": "keys"},
    "bias": {"bias": "heads", "heads": (2, 2)},
    "mask, causal and window": {"mask": "keys", "causal": "bottom_right", "window": (W, -1), "lengths": (200, 208)},
    "bias in whole groups": {"bias": "heads", "heads": (2, 2), "causal": "top_left", "lengths": (67, 96)},
    "nothing is seen": {"causal": "top_left", "window": (2, -1), "lengths": (3, 90)},
}


@one_in(3)
@each_kernel
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32:ieee"])
@pytest.mark.parametrize("feature", UNSEEN)
def test_keys_that_no_query_sees_may_hold_anything(
    feature: str, dtype: str, value: float, kernel: str, request: pytest.FixtureRequest
) -> None:
    call = cases.build(replace(CASE, dtype=dtype, **UNSEEN[feature]), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    group = call.problem.num_heads_q // call.problem.num_heads_kv
    k, v = call.operands.k.clone(), call.operands.v.clone()
    for b, shown in enumerate(harness.visible(call)):
        unseen = ~shown.any(1).unflatten(0, (-1, group)).any(1).T  # [keys, kv heads]
        k[b][unseen] = value
        v[b][unseen] = value
    assert not v.isfinite().all(), "a case of this test must hide some key"
    assert_bit_equal(kernel, call, with_operands(call, k=k, v=v))


@each_kernel
def test_doubled_values_double_the_output(kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(replace(CASE, causal="bottom_right", lse=False), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    doubled = with_operands(call, v=call.operands.v * 2)
    config = harness.default_config(kernel, call)
    (out, _), (twice, _) = (harness.run(kernel, c, config) for c in (call, doubled))
    assert bits(out * 2) == bits(twice)


@each_kernel
@pytest.mark.parametrize("features", [{}, {"causal": "bottom_right", "window": (W, -1), "alibi": "batch"}], ids=str)
def test_packed_equals_single_calls(features: dict[str, Any], kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(replace(CASE, packed=True, batch=5, **features), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    config = harness.default_config(kernel, call)
    out, lse = harness.run(kernel, call, config)
    assert lse is not None
    lengths = cases.packed_lengths(replace(CASE, batch=5))
    parts = zip(*(harness.by_sequence(call, x) for x in (*call.operands[:3], out)), strict=True)
    lses = lse.split([seqlen_q for seqlen_q, _ in lengths], dim=1)
    for b, ((q, k, v, packed_out), packed_lse) in enumerate(zip(parts, lses, strict=True)):
        slopes = call.operands.alibi_slopes
        operands = call.operands._replace(
            q=q[None], k=k[None], v=v[None], alibi_slopes=None if slopes is None else slopes[b : b + 1],
            cu_seqlens_q=None, cu_seqlens_k=None,
        )  # fmt: skip
        problem = replace(call.problem, packed=False, batch=1)
        single, single_lse = harness.attend(kernel, operands, call.options, problem, config)
        assert bits(single[0], single_lse) == bits(packed_out, packed_lse[None]), f"sequence {b}: {lengths[b]}"


# Within the gates -----------------------------------------------------------------------------------------------------

each_gate_case = pytest.mark.parametrize(
    "case", [CASE, replace(CASE, dtype="float16"), replace(CASE, dtype="float32:default")], ids=str
)


@each_kernel
@each_gate_case
def test_order_of_keys(case: Case, kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(replace(case, mask="full", bias="full"), "sharp", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    order = torch.randperm(call.problem.seqlen_k, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    shuffled = {name: getattr(call.operands, name)[:, order] for name in "kv"}
    shuffled |= {name: getattr(call.operands, name)[..., order] for name in ("mask", "bias")}
    out, lse = harness.run(kernel, with_operands(call, **shuffled))
    assert_gates(call, forward_references(call.problem, call.operands), out, lse)


@each_kernel
@each_gate_case
def test_one_vector_added_to_all_keys(case: Case, kernel: str, request: pytest.FixtureRequest) -> None:
    """Each logit of a row moves by the same amount, so out stays and lse moves with them."""
    call = cases.build(replace(case, causal="bottom_right"), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    operands = call.operands
    quarters = (operands.k * 4).round().clamp(-12, 12) / 4  # so that the sum is exact in every type
    vector = (torch.arange(call.problem.head_dim, device=DEVICE) % 5 - 2).to(operands.k.dtype)
    call = with_operands(call, k=quarters)
    references = forward_references(call.problem, call.operands)
    group = call.problem.num_heads_q // call.problem.num_heads_kv
    moved = call.problem.softmax_scale * (operands.q.double() @ vector.double()).transpose(1, 2)
    assert group * call.problem.num_heads_kv == moved.shape[1]
    exact = references.exact._replace(
        lse=references.exact.lse + moved, largest_logit=references.exact.largest_logit + moved.abs().max().item()
    )
    out, lse = harness.run(kernel, with_operands(call, k=quarters + vector))
    assert_gates(call, references._replace(exact=exact), out, lse)


@each_kernel
@each_gate_case
def test_grouped_heads_equal_repeated_heads(case: Case, kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(replace(case, causal="bottom_right"), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    group = call.problem.num_heads_q // call.problem.num_heads_kv
    repeated = {name: getattr(call.operands, name).repeat_interleave(group, dim=2) for name in "kv"}
    out, lse = harness.run(kernel, with_operands(call, **repeated))
    assert_gates(call, forward_references(call.problem, call.operands), out, lse)


@each_kernel
@each_gate_case
def test_causal_prefix_equals_the_prefix_alone(case: Case, kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(replace(case, causal="bottom_right", lengths=(130, 130)), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    n = 71
    problem = replace(call.problem, seqlen_q=n, seqlen_k=n)
    q, k, v = (x[:, :n] for x in call.operands[:3])
    references = forward_references(problem, call.operands._replace(q=q, k=k, v=v))
    out, lse = harness.run(kernel, call)
    assert lse is not None
    assert_gates(call, references, out[:, :n], lse[:, :, :n])


@each_kernel
def test_halves_merged_by_lse_equal_the_whole(kernel: str, request: pytest.FixtureRequest) -> None:
    """In float32, whose halves are exact enough for their merge to be held to the whole's gates."""
    call = cases.build(replace(CASE, dtype="float32:default"), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    n = call.problem.seqlen_k // 3
    halves = [
        harness.run(kernel, with_operands(call, k=call.operands.k[:, part], v=call.operands.v[:, part]))
        for part in (slice(None, n), slice(n, None))
    ]
    (out_a, lse_a), (out_b, lse_b) = halves
    assert lse_a is not None and lse_b is not None
    lse = torch.logaddexp(lse_a, lse_b)
    weights = (torch.exp(part - lse).transpose(1, 2)[..., None] for part in (lse_a, lse_b))
    out = out_a * next(weights) + out_b * next(weights)
    assert_gates(call, forward_references(call.problem, call.operands), out, lse)
