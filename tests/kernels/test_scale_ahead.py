"""The launches that bring float32 to scaled float16 parts: what they write, and what they must not look at."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import cases
from tests.conformance.cases import PLAIN, Call
from tests.conformance.harness import by_sequence
from tests.marks import needs_triton
from warpwave.gpu import current_gpu
from warpwave.kernels.hopper import host
from warpwave.kernels.prepass import scale_ahead, split_ahead
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch

pytestmark = needs_triton
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BITS = {"fp16x1": 2.0**-11, "fp16x3": 2.0**-22}


def widths(problem: AttentionProblem) -> tuple[int, int]:
    return sum(host.pieces(problem.head_dim)), sum(host.pieces(problem.head_dim_v))


def scaled(problem: AttentionProblem, operands: Operands, arithmetic: str = "fp16x3") -> scale_ahead.Scaling:
    """What the launches leave, on memory that held NaN."""
    shapes = split_ahead.part_shapes(problem, scale_ahead.PARTS[arithmetic], *widths(problem))
    made = scale_ahead.specify(problem, current_gpu(DEVICE), operands, arithmetic, shapes)
    for memory in (*made.parts, made.inverses, *(() if made.maxima is None else (made.maxima,))):
        memory.fill_(torch.nan)
    for spec in made.launches:
        launch.bind(spec)(*spec.tensors)
    return made


def of_sequences(call: Call, made: scale_ahead.Scaling) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For q, k and v of each sequence: operand, parts (rows, heads, parts, width), and inverses (rows, heads)."""
    p, found = call.problem, []
    of_keys, of_tiles = made.inverses.split([p.batch * 2 * p.num_heads_kv, scale_ahead.num_tiles(p)[0]])
    k_inverses, v_inverses = of_keys.view(p.batch, -1, 2).unbind(-1)
    begins = call.operands.cu_seqlens_q.tolist() if p.packed else []
    for x, part, inverses in zip(call.operands[:3], made.parts, (None, k_inverses, v_inverses), strict=True):
        heads = x.shape[-2]
        rows = part.unflatten(1, (heads, -1)).permute(0, 3, 1, 2, 4)  # (batch, rows, heads, parts, width)
        rows = rows[0] if p.packed else rows
        for b, (one, its_parts) in enumerate(zip(by_sequence(call, x), by_sequence(call, rows), strict=True)):
            tile = torch.arange(len(one), device=DEVICE)[:, None] // 64
            head = torch.arange(heads, device=DEVICE)
            if inverses is not None:
                inverse = inverses[b].expand(len(one), -1)
            elif p.packed:
                inverse = of_tiles[(begins[b] // 64 + b + tile) * heads + head]
            else:
                inverse = of_tiles[(b * heads + head) * -(-p.seqlen_q // 64) + tile]
            found.append((one, its_parts, inverse))
    return found


def largest_of(x: Tensor, inverse: Tensor) -> Tensor:
    """For each row and head, the largest magnitude of the rows that share its scale: all of a head, or 64 of q."""
    largest = x.abs().amax(-1)
    groups = largest.split(64) if not torch.equal(inverse, inverse[:1].expand_as(inverse)) else (largest,)
    return torch.cat([group.amax(0, keepdim=True).expand_as(group) for group in groups])


def own_and_launched(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    monkeypatch.setattr(scale_ahead, "OWN_MAXIMUM_BYTES", 2**40 if own else 0)
    monkeypatch.setattr(scale_ahead, "ALL_OWN_BYTES", 2**40)


CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "one buffer": {"layout": "one buffer", "dims": (40, 24)},
    "last stride 2": {"layout": "last stride 2", "dims": (59, 59)},
    "wide": {"dims": (192, 256), "lengths": (10, 20), "batch": 1},
    "packed": {"packed": True, "batch": 4},
}


@pytest.mark.parametrize("own", [True, False], ids=["own maximum", "launched maxima"])
@pytest.mark.parametrize("arithmetic", scale_ahead.PARTS)
@pytest.mark.parametrize("features", CALLS)
def test_parts_and_scales(features: str, arithmetic: str, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own_and_launched(monkeypatch, own)
    case = replace(PLAIN, dtype="float32:default", lengths=(70, 70), heads=(2, 1), batch=2)
    call = cases.build(replace(case, **CALLS[features]), "sharp", DEVICE)
    call.operands.q[:5] *= 1e3  # no other tile's concern
    made = scaled(call.problem, call.operands, arithmetic)
    assert len(made.launches) == (1 if own else 2)
    queries = [len(one) for one in by_sequence(call, call.operands.q)] * 3  # of each sequence, for q, k and v
    for (x, parts, inverse), seen_by in zip(of_sequences(call, made), queries, strict=True):
        if 0 in (len(x), seen_by):  # keys that no query sees are not written
            continue
        largest = largest_of(x, inverse).double()
        assert torch.equal((largest / inverse).log2().floor(), torch.full_like(largest, 14.0)), "to [2^14, 2^15)"
        assert torch.equal(inverse.log2(), inverse.log2().round()), "a power of two"
        assert not parts[..., x.shape[-1] :].any(), "zero behind the operand"
        summed = parts[..., : x.shape[-1]].double().sum(-2) * inverse[..., None]
        # A remainder that float16 holds as no normal number is off by half of its smallest one.
        floor = 2.0**-25 * inverse[..., None]
        assert ((summed - x).abs() <= torch.maximum(BITS[arithmetic] * x.abs(), floor)).all()


@pytest.mark.parametrize("own", [True, False], ids=["own maximum", "launched maxima"])
@pytest.mark.parametrize(
    "features",
    [{"window": (5, 3)}, {"causal": "top_left"}, {"packed": True, "batch": 4, "window": (5, 3)}],
    ids=str,
)  # fmt: skip
def test_what_nobody_sees_has_no_say(features: dict[str, Any], own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite garbage in keys that no query sees leaves scales and used rows as they are."""
    own_and_launched(monkeypatch, own)
    case = replace(PLAIN, dtype="float32:default", lengths=(10, 70), heads=(2, 1), batch=1)
    call = cases.build(replace(case, **features), "normal", DEVICE)
    before, parts_before = scaled(call.problem, call.operands), []
    for x, parts, _ in of_sequences(call, before):
        used = parts[..., 0, 0].isfinite().all(-1)  # what nobody sees is not written
        parts_before.append((used, parts.clone()))
        x[~used] = 1e30
    assert any(not used.all() for used, _ in parts_before), "nothing was garbage"
    after = scaled(call.problem, call.operands)
    assert torch.equal(before.inverses.nan_to_num(0), after.inverses.nan_to_num(0))
    for (used, parts), (_, again, _) in zip(parts_before, of_sequences(call, after), strict=True):
        assert torch.equal(parts[used], again[used])


@pytest.mark.parametrize("own", [True, False], ids=["own maximum", "launched maxima"])
def test_nan_and_inf_stay_and_do_not_count(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own_and_launched(monkeypatch, own)
    call = cases.build(replace(PLAIN, dtype="float32:default", lengths=(70, 70), heads=(1, 1)), "normal", DEVICE)
    clean = scaled(call.problem, call.operands, "fp16x3")
    for x in call.operands[:3]:
        x[0, 3, 0, 5], x[0, 66, 0, 1], x[0, 67, 0, 2] = torch.nan, torch.inf, -torch.inf
    made = scaled(call.problem, call.operands, "fp16x3")
    changed = torch.zeros(70, 64, dtype=torch.bool, device=DEVICE)
    changed[3, 5] = changed[66, 1] = changed[67, 2] = True
    assert torch.equal(made.inverses, clean.inverses)
    for part, before in zip(made.parts, clean.parts, strict=True):
        large = part[0, 0]
        assert large[3, 5].isnan() and large[66, 1] == torch.inf and large[67, 2] == -torch.inf
        same = ~changed[: len(large)]
        assert torch.equal(part[0][:, same], before[0][:, same])


@pytest.mark.parametrize("size", [0.0, 2.0**-149, 2.0**-126, 1e-30, 1.0, 1e30, torch.finfo(torch.float32).max])
def test_magnitudes_of_any_size(size: float) -> None:
    """Scales are powers of two whose inverses float32 holds."""
    call = cases.build(replace(PLAIN, dtype="float32:default", lengths=(20, 20), heads=(1, 1)), "normal", DEVICE)
    for x in call.operands[:3]:
        x.mul_(0.2).clamp_(-1, 1)[0, 7, 0, 3] = 1.0
        x.mul_(size)
    made = scaled(call.problem, call.operands, "fp16x3")
    for x, parts, inverses in of_sequences(call, made):
        inverse = inverses[0, 0]
        scale = 1 / inverse.item()
        assert 2.0**-113 <= scale <= 2.0**115 and math.frexp(scale)[0] == 0.5
        assert parts.isfinite().all() and parts.abs().max() <= 2.0**15
        error = (parts.double().sum(-2)[..., :64] * inverse.double() - x.double()).abs()
        assert (error <= torch.maximum(2.0**-22 * x.abs().double(), 2.0**-25 * inverse.double())).all()


def test_a_sequence_is_scaled_like_a_call_of_its_own() -> None:
    case = replace(PLAIN, dtype="float32:default", lengths=(10, 70), heads=(2, 1), packed=True, batch=4)
    call = cases.build(case, "sharp", DEVICE)
    call.operands.k[:5] *= 1e6  # no other sequence's concern
    together = of_sequences(call, scaled(call.problem, call.operands))
    count = call.problem.batch
    for b in range(count):
        q, k, v = (together[i * count + b][0][None] for i in range(3))
        if not q.numel() or not k.numel():
            continue
        alone = replace(
            call.problem, packed=False, total_q=0, total_k=0, batch=1, seqlen_q=q.shape[1], seqlen_k=k.shape[1]
        )
        made = of_sequences(call._replace(problem=alone, operands=Operands(q, k, v)), scaled(alone, Operands(q, k, v)))
        for i in range(3):
            assert torch.equal(together[i * count + b][1], made[i][1]) and torch.equal(
                together[i * count + b][2], made[i][2]
            )


def test_short_calls_take_one_launch_and_long_ones_two() -> None:
    plain = AttentionProblem(
        batch=1, seqlen_q=512, seqlen_k=512, num_heads_q=1, num_heads_kv=1, head_dim=64, head_dim_v=64,
        dtype="float32", softmax_scale=0.1,
    )  # fmt: skip
    assert scale_ahead.own_maximum(plain)
    assert not scale_ahead.own_maximum(replace(plain, seqlen_k=1024)), "one program reads for too long"
    assert not scale_ahead.own_maximum(replace(plain, batch=8, num_heads_q=16, num_heads_kv=16)), "all read too much"
    assert scale_ahead.own_maximum(replace(plain, seqlen_q=4096)), "each tile of q has a scale of its own"
