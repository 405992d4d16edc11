"""The edge cases of the contract, with one or more tests per row of contract.py."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import cases, harness
from tests.conformance.cases import PLAIN, Call, Case, W, with_operands
from tests.conformance.gates import forward_references, judge_forward
from tests.conformance.harness import DEVICE, assert_gates, bits, each_kernel
from warpwave.kernels.flash_fwd import kernel as flash_fwd
from warpwave.kernels.hopper import host
from warpwave.problem import Causal

SMALL = replace(PLAIN, dtype="float32:ieee", dims=(16, 16), heads=(2, 1), batch=2, lengths=(37, 70))
each_type = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32:ieee"])
sinks_or_not = pytest.mark.parametrize("sinks", [False, True])


def with_bias(call: Call, bias: Tensor) -> Call:
    """The call with this bias."""
    dtype = str(bias.dtype).removeprefix("torch.")
    problem = replace(call.problem, bias_shape=tuple(bias.shape), bias_dtype=dtype)
    return with_operands(call, bias=bias)._replace(problem=problem)


# Rows that see nothing ------------------------------------------------------------------------------------------------

HIDES_ROWS: dict[str, dict[str, Any]] = {
    "causal, more queries than keys": {"causal": "bottom_right", "lengths": (70, 37)},
    "window beyond the keys": {"causal": "top_left", "window": (3, -1), "lengths": (37, 70)},
    "mask": {"mask": "rows"},
    "packed": {"packed": True, "batch": 5, "causal": "bottom_right", "lengths": (70, 37)},
}


@each_kernel
@sinks_or_not
@pytest.mark.parametrize("hides", HIDES_ROWS)
def test_rows_that_see_nothing(hides: str, sinks: bool, kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(replace(SMALL, sinks=sinks, **HIDES_ROWS[hides]), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    out, lse = assert_gates(kernel, call)
    assert lse is not None
    shown = [s.any(-1) for s in harness.visible(call)]  # [heads, rows] each
    seen = torch.cat(shown, dim=1) if call.problem.packed else torch.stack(shown)  # as lse
    assert not seen.all(), "a case of this test must hide some row"
    assert out.transpose(-3, -2)[~seen].eq(0).all()
    assert torch.equal(lse.isneginf(), ~seen & (not sinks))
    assert out.isfinite().all()


# Empty calls ----------------------------------------------------------------------------------------------------------


@each_kernel
@sinks_or_not
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(2, 5, 0), (2, 0, 5), (0, 5, 7), (2, 0, 0)])
@pytest.mark.parametrize("packed", [False, True])
def test_empty_sizes(
    packed: bool, batch: int, seqlen_q: int, seqlen_k: int, sinks: bool, kernel: str, request: pytest.FixtureRequest
) -> None:
    heads, dims = 2, (16, 24)
    tokens = ((batch * seqlen_q,), (batch * seqlen_k,)) if packed else ((batch, seqlen_q), (batch, seqlen_k))
    call = cases.build(replace(SMALL, dims=dims, sinks=sinks), "normal", DEVICE)
    problem = replace(
        call.problem, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, packed=packed,
        total_q=packed * batch * seqlen_q, total_k=packed * batch * seqlen_k,
    )  # fmt: skip
    q = torch.ones(*tokens[0], heads, dims[0], device=DEVICE)
    k = torch.ones(*tokens[1], 1, dims[0], device=DEVICE)
    v = torch.ones(*tokens[1], 1, dims[1], device=DEVICE)
    call = with_operands(call, q=q, k=k, v=v)._replace(problem=problem)
    if packed:
        ends = [torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * n for n in (seqlen_q, seqlen_k)]
        call = with_operands(call, cu_seqlens_q=ends[0].int(), cu_seqlens_k=ends[1].int())
    if harness.refuses(kernel, call, request):
        return
    out, lse = harness.run(kernel, call)
    assert lse is not None
    assert out.shape == (*tokens[0], heads, dims[1])
    assert out.eq(0).all()
    assert lse.shape == ((heads, batch * seqlen_q) if packed else (batch, heads, seqlen_q))
    expected = call.operands.sinks[:, None].expand(lse.shape) if sinks else torch.full_like(lse, -math.inf)
    assert torch.equal(lse, expected)


@each_kernel
@pytest.mark.parametrize("empty", ["first", "middle", "last"])
def test_empty_sequences_among_packed_ones(empty: str, kernel: str, request: pytest.FixtureRequest) -> None:
    """The others are bit-equal to a call without the empty ones, of either kind."""
    full = [(37, 50), (1, 70), (20, 3)]
    at = {"first": 0, "middle": 2, "last": 3}[empty]
    lengths = [*full[:at], (0, 9), (9, 0), (0, 0), *full[at:]]
    call = cases.build(replace(SMALL, causal="bottom_right"), "normal", DEVICE)
    g = torch.Generator(DEVICE).manual_seed(0)
    total_q, total_k = (sum(side) for side in zip(*lengths, strict=True))
    q = torch.randn(total_q, 2, 16, generator=g, device=DEVICE)
    k, v = (torch.randn(total_k, 1, 16, generator=g, device=DEVICE) for _ in range(2))

    def packed(parts: list[tuple[int, int]], q: Tensor, k: Tensor, v: Tensor) -> Call:
        ends = [torch.tensor([0, *side], device=DEVICE).cumsum(0).int() for side in zip(*parts, strict=True)]
        sizes: dict[str, Any] = {
            "batch": len(parts),
            "seqlen_q": 37,
            "seqlen_k": 70,
            "total_q": len(q),
            "total_k": len(k),
        }
        operands = call.operands._replace(q=q, k=k, v=v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
        return Call(replace(call.problem, packed=True, **sizes), operands, call.options)

    whole = packed(lengths, q, k, v)
    if harness.refuses(kernel, whole, request):
        return
    keep_q = torch.cat([torch.full((sq,), sq > 0 and sk > 0, device=DEVICE) for sq, sk in lengths])
    keep_k = torch.cat([torch.full((sk,), sq > 0 and sk > 0, device=DEVICE) for sq, sk in lengths])
    config = harness.default_config(kernel, whole)
    out, lse = harness.run(kernel, whole, config)
    expected = harness.run(kernel, packed(full, q[keep_q], k[keep_k], v[keep_k]), config)
    assert lse is not None
    assert bits(out[keep_q], lse[:, keep_q]) == bits(*expected)
    assert out[~keep_q].eq(0).all()
    assert lse[:, ~keep_q].eq(-math.inf).all()


# Extreme logits -------------------------------------------------------------------------------------------------------


@each_kernel
@each_type
@pytest.mark.parametrize("logit", [0.0, 1e4, -1e4, 6e4, -6e4, -2.45e5])
@pytest.mark.parametrize("seqlen_k", [1, 200])
def test_one_visible_key(seqlen_k: int, logit: float, dtype: str, kernel: str, request: pytest.FixtureRequest) -> None:
    """Its row of v comes back bit for bit, whatever the logit."""
    case = replace(PLAIN, dtype=dtype, dims=(16, 16), lengths=(seqlen_k, seqlen_k), window=(0, 0), scale=1.0)
    call = cases.build(case, "normal", DEVICE)
    call.operands.q.fill_(math.copysign(math.sqrt(abs(logit) / 16), logit))
    call.operands.k.fill_(math.sqrt(abs(logit) / 16))
    if harness.refuses(kernel, call, request):
        return
    out, _ = assert_gates(kernel, call)
    assert torch.equal(out, call.operands.v)


@each_kernel
@each_type
@pytest.mark.parametrize("logit", [-88.0, -200.0, -1e4, -2.45e5])
def test_first_tile_hidden_and_later_logits_low(
    logit: float, dtype: str, kernel: str, request: pytest.FixtureRequest
) -> None:
    """A running maximum that became 0 while nothing was seen would flush every later weight to 0."""
    case = replace(PLAIN, dtype=dtype, dims=(16, 16), lengths=(40, 300), mask="full", scale=1.0)
    call = cases.build(case, "normal", DEVICE)
    size = math.sqrt(-logit / 16)
    call.operands.q.fill_(-size)
    call.operands.k.fill_(size)
    call.operands.mask[:] = True
    call.operands.mask[..., :260] = False
    if harness.refuses(kernel, call, request):
        return
    assert_gates(kernel, call)


# NaN and Inf ----------------------------------------------------------------------------------------------------------

POISONS = [math.nan, math.inf, -math.inf]
SEES_SOME = replace(SMALL, heads=(4, 2), batch=2, lengths=(40, 40), causal="bottom_right", window=(W, -1))


@each_kernel
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("name", ["q", "k"])
def test_not_finite_in_q_or_k_reaches_the_rows_that_see_it(
    name: str, poison: float, kernel: str, request: pytest.FixtureRequest
) -> None:
    """Exactly those rows: all others are bit-equal to the clean run."""
    call = cases.build(SEES_SOME, "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    config = harness.default_config(kernel, call)
    clean, _ = harness.run(kernel, call, config)
    x = getattr(call.operands, name).clone()
    x[0, 30, 1] = poison  # batch item 0, position 30, head 1
    out, _ = harness.run(kernel, with_operands(call, **{name: x}), config)
    reached = torch.zeros(out.shape[:-1], dtype=torch.bool, device=DEVICE)
    if name == "q":
        reached[0, 30, 1] = True
    else:
        reached[0, :, 2:4] = harness.visible(call)[0][0, :, 30][:, None]  # kv head 1 serves query heads 2 and 3
    if poison != math.nan and name == "k":
        # An infinite logit of one sign hides or takes everything; where it is -inf the key merely vanishes.
        assert bits(out[~reached]) == bits(clean[~reached])
        assert not torch.equal(out[reached], clean[reached])
    else:
        assert torch.equal(out.isnan().all(-1), reached)
        assert bits(out[~reached]) == bits(clean[~reached])


@each_kernel
@pytest.mark.parametrize("poison", POISONS)
def test_not_finite_in_v_stays_in_its_head(poison: float, kernel: str, request: pytest.FixtureRequest) -> None:
    """It reaches every row that sees the key, and may reach rows of the same tile; never another head or batch item."""
    call = cases.build(SEES_SOME, "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    config = harness.default_config(kernel, call)
    clean, _ = harness.run(kernel, call, config)
    v = call.operands.v.clone()
    v[0, 30, 1, 5] = poison
    out, _ = harness.run(kernel, with_operands(call, v=v), config)
    sees = harness.visible(call)[0][0, :, 30]
    assert not out[0, sees, 2:4, 5].isfinite().any()
    assert bits(out[1], out[0, :, :2]) == bits(clean[1], clean[0, :, :2])
    other_columns = torch.arange(16, device=DEVICE) != 5
    assert bits(out[..., other_columns]) == bits(clean[..., other_columns])


@each_kernel
@pytest.mark.parametrize("hides", ["mask", "bias"])
def test_not_finite_in_v_stays_in_the_heads_that_see_it(
    hides: str, kernel: str, request: pytest.FixtureRequest
) -> None:
    """It does not reach another head that reads the same kv head."""
    features: dict[str, Any] = {hides: "full"}
    call = cases.build(replace(SMALL, **features), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    of_heads = torch.tensor([True, False] if hides == "mask" else [0.0, -math.inf], device=DEVICE)
    getattr(call.operands, hides)[..., 7] = of_heads[None, :, None]
    config = harness.default_config(kernel, call)
    clean, _ = harness.run(kernel, call, config)
    call.operands.v[:, 7] = math.nan
    out, _ = harness.run(kernel, call, config)
    assert out[:, :, 0].isnan().all()
    assert bits(out[:, :, 1]) == bits(clean[:, :, 1])


@each_kernel
@each_type
@pytest.mark.parametrize("shape", [(2, 2, 37, 70), (1, 2, 1, 70), (2, 1, 37, 1)], ids=str)
def test_minus_infinity_in_bias_hides(
    shape: tuple[int, ...], dtype: str, kernel: str, request: pytest.FixtureRequest
) -> None:
    """As a boolean mask does: the same references are met, and the same rows see nothing."""
    call = cases.build(replace(SMALL, dtype=dtype), "normal", DEVICE)
    hidden = torch.rand(shape, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE) < 0.4
    bias = torch.zeros(shape, device=DEVICE).masked_fill(hidden, -math.inf)
    biased = with_bias(call, bias)
    if harness.refuses(kernel, biased, request):
        return
    masked = with_operands(call, mask=~hidden)._replace(problem=replace(call.problem, mask_shape=shape))
    out, lse = harness.run(kernel, biased)
    verdict = judge_forward(masked.problem, forward_references(masked.problem, masked.operands), out, lse)
    assert verdict.passed, str(verdict)


@each_kernel
def test_plus_infinity_in_bias_is_nan_in_its_row(kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(replace(SMALL, bias="full"), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    clean, _ = harness.run(kernel, call)
    bias = call.operands.bias.clone()
    bias[1, 0, 5, 3] = math.inf
    out, _ = harness.run(kernel, with_operands(call, bias=bias))
    row = torch.zeros(out.shape[:-1], dtype=torch.bool, device=DEVICE)
    row[1, 5, 0] = True
    assert torch.equal(out.isnan().all(-1), row)
    assert bits(out[~row]) == bits(clean[~row])


@each_kernel
@pytest.mark.parametrize(
    ("dtype", "bias_dtype"),
    [("float16", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32:ieee", "float32")],
)
def test_the_lowest_number_as_a_bias_shows_its_pair(
    dtype: str, bias_dtype: str, kernel: str, request: pytest.FixtureRequest
) -> None:
    """`finfo.min`, the usual stand-in for minus infinity, gives a row of nothing else the mean of its values, as in
    torch; beside other biases it takes a key out, and minus infinity still hides."""
    call = cases.build(replace(SMALL, dtype=dtype, lengths=(70, 130)), "normal", DEVICE)
    stored = getattr(torch, bias_dtype)
    lowest = torch.finfo(stored).min
    bias = torch.randn(2, 2, 70, 130, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE).to(stored)
    bias[0, 0, 3], bias[0, 1, 5, 7:], bias[1, 0, 9, 20:] = lowest, lowest, lowest
    bias[1, 1, 11], bias[1, 1, 11, 60] = -math.inf, lowest
    biased = with_bias(call, bias)
    if harness.refuses(kernel, biased, request):
        return
    out, _ = assert_gates(kernel, biased)
    mean = call.operands.v[0, :, 0].double().mean(0)
    torch.testing.assert_close(out[0, 3, 0].double(), mean, rtol=1e-2, atol=1e-3)
    assert torch.equal(out[1, 11, 1], call.operands.v[1, 60, 0])


@each_kernel
def test_the_largest_number_as_a_bias_takes_the_row(kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(replace(SMALL, bias="full"), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    call.operands.bias[1, 0, 5, 3] = torch.finfo(torch.float32).max
    out, _ = harness.run(kernel, call)
    assert torch.equal(out[1, 5, 0], call.operands.v[1, 3, 0])


# Conventions ----------------------------------------------------------------------------------------------------------


def uniform_call(case: Case) -> Call:
    """A call whose visible keys all weigh the same, and whose v names each key: column j is 1 for key j alone."""
    call = cases.build(replace(case, dims=(16, case.lengths[1]), heads=(1, 1), batch=1), "normal", DEVICE)
    call.operands.q.zero_()
    call.operands.v.copy_(torch.eye(case.lengths[1], device=DEVICE)[:, None])
    return call


def keys_seen(kernel: str, call: Call) -> list[list[int]]:
    """For each query, the keys it sees."""
    out, _ = harness.run(kernel, call)
    return [row.nonzero().flatten().tolist() for row in out[0, :, 0]]


@each_kernel
@pytest.mark.parametrize(
    ("alignment", "lengths", "expected"),
    [
        ("bottom_right", (3, 5), [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]),
        ("top_left", (3, 5), [[0], [0, 1], [0, 1, 2]]),
        ("bottom_right", (5, 3), [[], [], [0], [0, 1], [0, 1, 2]]),
        ("top_left", (5, 3), [[0], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2]]),
    ],
)
def test_causal_alignment(
    alignment: str, lengths: tuple[int, int], expected: list[list[int]], kernel: str, request: pytest.FixtureRequest
) -> None:
    call = uniform_call(replace(SMALL, lengths=lengths, causal=alignment, lse=False))
    if harness.refuses(kernel, call, request):
        return
    assert keys_seen(kernel, call) == expected


@pytest.mark.parametrize("heads", [2, 3, 5])
@pytest.mark.parametrize("kernel", ["flash_fwd", "hopper/flash_fwd"])
def test_heads_left_over_by_groups_that_share_l2(
    heads: int, kernel: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Causal tiles go longest first within groups of heads: each is done once, whatever the groups leave over."""
    # Lengths of no other test: a call that is known is not planned anew.
    case = replace(PLAIN, dtype="float16", lengths=(117, 307), heads=(heads, heads), batch=1, causal="bottom_right")
    call = cases.build(case, "normal", DEVICE)
    two_heads = 2 * 2 * call.problem.seqlen_k * (call.problem.head_dim + call.problem.head_dim_v)
    monkeypatch.setattr(flash_fwd, "L2_BYTES", two_heads)
    monkeypatch.setattr(host, "L2_BYTES", two_heads)
    if harness.refuses(kernel, call, request):
        return
    out, lse = harness.run(kernel, call)
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), out, lse)
    assert verdict.passed, str(verdict)


@each_kernel
def test_causal_true_is_bottom_right(kernel: str, request: pytest.FixtureRequest) -> None:
    call = uniform_call(replace(SMALL, lengths=(3, 5), causal="bottom_right", lse=False))
    if harness.refuses(kernel, call, request):
        return
    plain = call._replace(options=call.options | {"causal": True})
    named = call._replace(options=call.options | {"causal": Causal()})
    assert keys_seen(kernel, plain) == keys_seen(kernel, named) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


@each_kernel
@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ((0, 0), [[2], [3], [4]]),
        ((1, 0), [[1, 2], [2, 3], [3, 4]]),
        ((0, 1), [[2, 3], [3, 4], [4]]),
        ((1, 1), [[1, 2, 3], [2, 3, 4], [3, 4]]),
        ((-1, 0), [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]),
        ((1, -1), [[1, 2, 3, 4], [2, 3, 4], [3, 4]]),
    ],
)
def test_window_is_inclusive_and_follows_the_last_key(
    window: tuple[int, int], expected: list[list[int]], kernel: str, request: pytest.FixtureRequest
) -> None:
    call = uniform_call(replace(SMALL, lengths=(3, 5), window=window, lse=False))
    if harness.refuses(kernel, call, request):
        return
    assert keys_seen(kernel, call) == expected


@each_kernel
@pytest.mark.parametrize("packed", [False, True])
def test_lse_is_the_natural_logarithm_in_float32(packed: bool, kernel: str, request: pytest.FixtureRequest) -> None:
    """Of a sum of 70 ones, or as many as the sequence has keys; laid out heads before rows."""
    call = cases.build(replace(SMALL, dtype="float16", packed=packed), "normal", DEVICE)
    call.operands.q.zero_()
    if harness.refuses(kernel, call, request):
        return
    _, lse = harness.run(kernel, call)
    assert lse is not None
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    if packed:
        assert lse.shape == (2, call.problem.total_q)
        lse = lse[:, :37]  # the first sequence, which has all 70 keys
    else:
        assert lse.shape == (2, 2, 37)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(70)))


@each_kernel
@pytest.mark.parametrize("head_dim", [1, 3, 17, 40, 80, 111, 192])
def test_default_scale_is_of_the_callers_head_dim(head_dim: int, kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(replace(SMALL, dims=(head_dim, 16), lse=False), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    explicit = call._replace(options=call.options | {"softmax_scale": 1 / math.sqrt(head_dim)})
    assert bits(harness.run(kernel, call)[0]) == bits(harness.run(kernel, explicit)[0])
    assert_gates(kernel, call)


@each_kernel
@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-45])
@pytest.mark.parametrize("features", [{"causal": "bottom_right"}, {"causal": "top_left", "packed": True}], ids=str)
def test_a_scale_of_nothing_leaves_no_nan(
    features: dict[str, Any], scale: float, kernel: str, request: pytest.FixtureRequest
) -> None:
    """Without an lse, which some kernels do not have."""
    call = cases.build(replace(SMALL, scale=scale, lse=False, **features), "normal", DEVICE)
    if not harness.refuses(kernel, call, request):
        assert_gates(kernel, call)


@each_kernel
@pytest.mark.parametrize("features", [{}, {"causal": "bottom_right"}, {"mask": "full"}, {"window": (W, 0)}], ids=str)
def test_scale_zero_is_uniform_over_what_is_visible(
    features: dict[str, Any], kernel: str, request: pytest.FixtureRequest
) -> None:
    call = cases.build(replace(SMALL, scale=0.0, **features), "sharp", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    _, lse = assert_gates(kernel, call)
    assert lse is not None
    counts = torch.stack([shown.sum(-1) for shown in harness.visible(call)])
    assert torch.equal(lse.exp().round().long(), counts)


@each_kernel
@pytest.mark.parametrize("heads", [(6, 2), (6, 3), (8, 1), (4, 4)], ids=str)
def test_query_heads_share_kv_heads_in_groups(
    heads: tuple[int, int], kernel: str, request: pytest.FixtureRequest
) -> None:
    """Query head h reads kv head h // (num_heads_q / num_heads_kv): each head's v is its own number."""
    heads_q, heads_kv = heads
    call = cases.build(replace(SMALL, heads=heads, lse=False), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    call.operands.v.copy_(torch.arange(heads_kv, device=DEVICE)[:, None].expand(call.operands.v.shape))
    out, _ = harness.run(kernel, call)
    expected = torch.arange(heads_q, device=DEVICE) // (heads_q // heads_kv)
    assert torch.equal(out.round(), expected[:, None].expand(out.shape).to(out.dtype))


@each_kernel
@each_type
@pytest.mark.parametrize("sink", [-50.0, 0.0, 50.0, -math.inf])
def test_sinks_far_from_the_logits(sink: float, dtype: str, kernel: str, request: pytest.FixtureRequest) -> None:
    call = cases.build(replace(SMALL, dtype=dtype, sinks=True, causal="bottom_right"), "normal", DEVICE)
    call.operands.sinks.fill_(sink)
    if harness.refuses(kernel, call, request):
        return
    _, lse = harness.run(kernel, call)
    exact = forward_references(call.problem, call.operands).exact
    assert lse is not None
    if sink < 50:
        assert_gates(kernel, call)
    else:
        torch.testing.assert_close(lse.double(), exact.lse)


# Far addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("much_memory")
@each_kernel
@pytest.mark.parametrize("elements", [2**31, 2**32])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_offsets_past_32_bits(name: str, axis: int, elements: int, kernel: str, request: pytest.FixtureRequest) -> None:
    """The last index of an axis lies past 2^31 or 2^32 elements."""
    call = cases.build(replace(SMALL, dtype="float16", heads=(2, 2), lengths=(3, 5)), "normal", DEVICE)
    if harness.refuses(kernel, call, request):
        return
    config = harness.default_config(kernel, call)
    x = getattr(call.operands, name)
    stride = list(x.stride())
    stride[axis] = -(-elements // (x.shape[axis] - 1)) + 8
    size = 1 + sum((n - 1) * s for n, s in zip(x.shape, stride, strict=True))
    storage = torch.UntypedStorage(size * x.element_size(), device=DEVICE)
    far = torch.tensor([], dtype=x.dtype, device=DEVICE).set_(storage, 0, x.shape, stride).copy_(x)
    expected = bits(*harness.run(kernel, call, config))
    assert bits(*harness.run(kernel, with_operands(call, **{name: far}), config)) == expected
