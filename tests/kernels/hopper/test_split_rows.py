"""The launch before float32 gradients on Hopper: what it writes, tile by tile, and what it must not look at."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import cases
from tests.conformance.cases import PLAIN, Call, upstream
from tests.marks import needs_triton
from warpwave.gpu import Gpu
from warpwave.kernels.hopper import flash_bwd
from warpwave.kernels.hopper.flash_bwd import kernel, split_launch, split_rows
from warpwave.kernels.hopper.flash_bwd.launches import Tensors, Workspace
from warpwave.runtime import launch
from warpwave.workbench.verify.reference import oracle

pytestmark = needs_triton
H200 = Gpu.for_arch("sm_90")
CPU = torch.device("cpu")
CASE = replace(PLAIN, dtype="float32:default", lengths=(150, 130), heads=(2, 1), batch=2, lse=True)
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "one buffer": {"layout": "one buffer", "dims": (40, 24)},
    "last stride 2": {"layout": "last stride 2", "dims": (59, 59)},
    "queries from 80 on": {"causal": "bottom_right", "lengths": (210, 130)},
    "keys from 75 on": {"window": (5, 3), "lengths": (50, 130)},
    "packed": {"packed": True, "batch": 4, "causal": "bottom_right"},
}


def written(call: Call, dout: Tensor, dlse: Tensor, of: Call | None = None) -> tuple[Workspace, Tensor, Tensor]:
    """What the launch leaves on memory that held NaN, with the out and lse that it read: of another call, if given."""
    problem = replace(call.problem, return_lse=True)
    exact = oracle(problem, (of or call).operands)
    out, lse = exact.out.float(), exact.lse.float().contiguous()
    (config,) = flash_bwd.configs(problem, H200)
    workspace, grads = kernel.example(problem, config, CPU)
    for tensor in workspace[:-1]:
        if tensor is not None:
            tensor.fill_(torch.nan)
    tensors = Tensors(call.operands, out, lse, dout, dlse, workspace, *grads)
    for step in split_launch.steps(problem, H200, tensors, config)[:2]:
        launch.bind(step.launch)(*step.launch.tensors)
    return workspace, out, lse


def places(call: Call) -> list[tuple[slice, slice, slice, slice, int]]:
    """Of each sequence: its queries that see a key and their rows of parts, its keys in use and their rows, and its
    batch item; rows of whole tiles."""
    p, found = call.problem, []
    if not p.packed:
        sequences = [(b, 0, p.seqlen_q, 0, p.seqlen_k) for b in range(p.batch)]
    else:
        ends_q, ends_k = (o.tolist() for o in (call.operands.cu_seqlens_q, call.operands.cu_seqlens_k))
        sequences = [(b, *ends_q[b : b + 2], *ends_k[b : b + 2]) for b in range(p.batch)]
    for b, q_begin, q_end, k_begin, k_end in sequences:
        m, n = q_end - q_begin, k_end - k_begin
        band = p.band(m, n)
        first_q = 0 if band.high is None else min(max(0, -band.high), m)
        last_q = m if band.low is None else max(min(m, n - band.low), first_q)
        first_k = 0 if band.low is None else max(0, band.low)
        last_k = n if band.high is None else max(min(n, m + band.high), first_k)
        at_q, at_k = ((begin // 64 + b) * 64 if p.packed else 0 for begin in (q_begin, k_begin))
        if n == 0 or m == 0:
            continue
        found.append((
            slice(q_begin + first_q, q_begin + last_q), slice(at_q, at_q + last_q - first_q),
            slice(k_begin + first_k, k_begin + last_k), slice(at_k, at_k + last_k - first_k), b,
        ))  # fmt: skip
    return found


def rows_of(call: Call, x: Tensor, b: int, rows: slice) -> Tensor:
    """Rows of an operand or of parts, [heads, rows, width]."""
    return x[rows].transpose(0, 1) if call.problem.packed else x[b, rows].transpose(0, 1)


def check(x: Tensor, parts: Tensor, exponent: Tensor) -> None:
    """Two parts add up to x * 2^exponent; what is behind x is 0. `exponent`: of each head and row."""
    heads, width = x.shape[0], x.shape[-1]
    summed = parts.unflatten(0, (heads, 2)).double().sum(1)
    assert not summed[..., width:].any()
    scaled = x.double() * 2.0 ** exponent[..., None]
    assert scaled.abs().max() < 2**15
    assert ((summed[..., :width] - scaled).abs() <= (2.0**-22 * scaled.abs()).clamp_min(2.0**-25)).all()


@pytest.mark.parametrize("features", CALLS)
def test_parts_statistics_and_units(features: str) -> None:
    call = cases.build(replace(CASE, **CALLS[features]), "sharp", CPU)
    dout, dlse = upstream(call)
    dout.flatten(0, -3)[:5] *= 1e3  # no other tile's concern
    work, out, lse = written(call, dout, dlse)
    assert work.q_parts is not None and work.k_parts is not None and work.v_parts is not None
    assert work.dout_parts is not None and work.units is not None and work.sums is not None
    assert work.centers is not None
    q, k, v = call.operands[:3]
    heads, heads_kv = q.shape[-2], k.shape[-2]
    for queries, at_q, keys, at_k, b in places(call):
        item = 0 if call.problem.packed else b
        of_keys = [rows_of(call, x, b, keys) for x in (k, v)]
        k_exponent, v_exponent = (14 - x.abs().amax((1, 2)).log2().floor() for x in of_keys)  # of a head
        for x, parts, exponent in zip(of_keys, (work.k_parts, work.v_parts), (k_exponent, v_exponent), strict=True):
            check(x, parts[item][:, at_k], exponent[:, None].expand(-1, x.shape[1]))
            tail = parts[item][:, at_k.stop : -(-at_k.stop // 64) * 64]
            assert not tail.any(), "rows behind the last are zeros"
        center = of_keys[0][:, :64].mean(1)
        centers = work.centers.unflatten(0, (-1, heads_kv))[b]
        assert torch.allclose(centers[:, : k.shape[-1]], center, rtol=1e-5, atol=1e-5 * center.abs().max().item())
        for first in range(0, at_q.stop - at_q.start, 64):
            rows = slice(queries.start + first, min(queries.start + first + 64, queries.stop))
            at = slice(at_q.start + first, at_q.start + first + rows.stop - rows.start)
            of_q, of_dout, of_out = (rows_of(call, x, b, rows) for x in (q, dout, out))
            lines = slice(item * heads, (item + 1) * heads)
            units = work.units[lines, at.start // 64].double()
            q_exponent, exponent = (14 - x.abs().amax((1, 2)).log2().floor() for x in (of_q, of_dout))
            check(of_q, work.q_parts[item][:, at], q_exponent[:, None].expand(-1, of_q.shape[1]))
            check(of_dout, work.dout_parts[item][:, at], exponent[:, None].expand(-1, of_q.shape[1]))
            assert not work.q_parts[item][:, at.stop : at.start + 64].any()
            of_k, of_v = (x.repeat_interleave(heads // heads_kv) for x in (k_exponent, v_exponent))
            expected = {
                split_rows.OF_SCORES: 2.0 ** -(q_exponent + of_k),
                split_rows.OF_VALUES: 2.0 ** -(15 + exponent),
                split_rows.OF_DK: -(exponent + of_v + q_exponent),
                split_rows.OF_DQ: -(exponent + of_v + of_k),
                split_rows.OF_DS: -(exponent + of_v),
            }
            for number, value in expected.items():
                assert torch.allclose(units[:, number.value], value.double(), rtol=1e-6)
            own_lse, own_dlse = (x[..., rows] if call.problem.packed else x[b][..., rows] for x in (lse, dlse))
            assert torch.allclose(work.lse_log2[lines, at], own_lse * math.log2(math.e))
            unit = 2.0 ** (exponent + of_v)[:, None].double()
            assert torch.allclose(work.sums[lines, at] / unit, own_dlse.double(), rtol=1e-6)
            delta = (of_dout.double() * of_out).sum(-1) - own_dlse
            allowed = 1e-6 * (of_dout.abs() * of_out.abs()).sum(-1) + 1e-6
            assert ((work.delta[lines, at] / unit - delta).abs() <= allowed).all()
            assert work.lse_log2[lines, at.stop : at.start + 64].eq(torch.inf).all()


@pytest.mark.parametrize(("of_v", "of_dout", "of_dlse"), [(56, None, 20), (-60, -100, -20), (100, -110, -126)])
def test_scales_far_apart_overflow_nowhere(of_v: int, of_dout: int | None, of_dlse: int) -> None:
    """Powers of two of V, of dO (None: dO is zero) and of the gradient of the log-sum-exp."""
    call = cases.build(CASE, "normal", CPU)
    dout, dlse = upstream(call)
    call = call._replace(operands=call.operands._replace(v=call.operands.v * 2.0**of_v))
    dout, dlse = dout * (0.0 if of_dout is None else 2.0**of_dout), dlse * 2.0**of_dlse
    work = written(call, dout, dlse)[0]
    assert work.sums is not None
    assert work.delta.isfinite().all()
    assert work.sums.isfinite().all()
    assert work.sums.any()


@pytest.mark.parametrize("features", ["queries from 80 on", "keys from 75 on", "packed"])
def test_what_nobody_sees_has_no_say(features: str) -> None:
    """NaN and finite garbage leave what is written as it is."""
    call = cases.build(replace(CASE, **CALLS[features]), "normal", CPU)
    dout, dlse = upstream(call)
    expected = written(call, dout, dlse)[0]
    used_q, used_k = (torch.zeros(x.shape[:-2], dtype=torch.bool) for x in call.operands[:2])
    for queries, _, keys, _, b in places(call):
        for used, rows in ((used_q, queries), (used_k, keys)):
            (used if call.problem.packed else used[b])[rows] = True
    if call.problem.packed:  # keys of a sequence without queries are written, but no block reads them
        ends_q, ends_k = (o.tolist() for o in (call.operands.cu_seqlens_q, call.operands.cu_seqlens_k))
        for b in range(call.problem.batch):
            used_k[ends_k[b] : ends_k[b + 1]] |= ends_q[b] == ends_q[b + 1]
    assert not (used_q.all() and used_k.all())
    q, k, v, given = (x.clone() for x in (*call.operands[:3], dout))
    for garbage in (torch.nan, 1e30):
        q[~used_q], given[~used_q], k[~used_k], v[~used_k] = (garbage,) * 4
        changed = call._replace(operands=call.operands._replace(q=q, k=k, v=v))
        found = written(changed, given, dlse, call)[0]
        for name in ("q_parts", "k_parts", "v_parts", "dout_parts", "delta", "lse_log2", "units", "centers"):
            one, other = getattr(found, name), getattr(expected, name)
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), name
