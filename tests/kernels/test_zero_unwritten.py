"""Gradients of the tokens that no launch writes become zeros, and no others do."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Literal

import pytest
import torch
from torch import Tensor

from tests.marks import needs_triton
from warpwave.kernels.prepass import zero_unwritten
from warpwave.problem import AttentionProblem, Causal
from warpwave.runtime import launch

pytestmark = needs_triton
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # interpreted on a CPU
HEADS, HEADS_KV, HEAD_DIM, HEAD_DIM_V = 4, 2, 24, 40
OFFSETS_Q, OFFSETS_K = [3, 3, 40, 41, 90, 90], [0, 30, 30, 200, 210, 230]  # and a total of 100, and of 250
Alignment = Literal["bottom_right", "top_left"]
BANDS: list[tuple[Alignment | None, tuple[int, int]]] = [
    (None, (-1, -1)), ("bottom_right", (-1, -1)), ("top_left", (-1, -1)), ("bottom_right", (20, 0)), (None, (7, 5)),
    (None, (-1, 3)), (None, (9, -1)), ("top_left", (3, -1)),
]  # fmt: skip


def problem_of(
    causal: Alignment | None, window: tuple[int, int], lengths: tuple[int, int], packed: bool
) -> AttentionProblem:
    return AttentionProblem(
        batch=5 if packed else 3, seqlen_q=lengths[0], seqlen_k=lengths[1], num_heads_q=HEADS, num_heads_kv=HEADS_KV,
        head_dim=HEAD_DIM, head_dim_v=HEAD_DIM_V, dtype="float16", softmax_scale=1.0,
        causal=None if causal is None else Causal(causal), window_size=window, packed=packed,
        total_q=100 if packed else 0, total_k=250 if packed else 0,
    )  # fmt: skip


def seen(problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """Whether each query sees a key, and each key is seen, in the order of their tokens."""
    spans = [
        (b * problem.seqlen_q, (b + 1) * problem.seqlen_q, b * problem.seqlen_k, (b + 1) * problem.seqlen_k)
        for b in range(problem.batch)
    ]
    tokens = problem.batch * problem.seqlen_q, problem.batch * problem.seqlen_k
    if problem.packed:
        tokens = problem.total_q, problem.total_k
        spans = [(*q, *k) for q, k in zip(pairwise(OFFSETS_Q), pairwise(OFFSETS_K), strict=True)]
    pairs = torch.zeros(tokens, dtype=torch.bool)
    for q_begin, q_end, k_begin, k_end in spans:
        band = problem.band(q_end - q_begin, k_end - k_begin)
        distance = torch.arange(k_end - k_begin) - torch.arange(q_end - q_begin)[:, None]
        inside = torch.ones_like(distance, dtype=torch.bool)
        if band.low is not None:
            inside &= distance >= band.low
        if band.high is not None:
            inside &= distance <= band.high
        pairs[q_begin:q_end, k_begin:k_end] = inside
    return pairs.any(1), pairs.any(0)


def check(problem: AttentionProblem, wanted: tuple[bool, bool, bool] = (True, True, True)) -> None:
    shown_q, shown_k = seen(problem)
    shapes = (
        (len(shown_q), HEADS, HEAD_DIM, torch.float16), (len(shown_k), 2 * HEADS_KV, HEAD_DIM, torch.float32),
        (len(shown_k), HEADS_KV, HEAD_DIM_V, torch.float16),
    )  # fmt: skip
    guarded = [torch.full((tokens + 2, heads, d), 7.0, dtype=t, device=DEVICE) for tokens, heads, d, t in shapes]
    gradients = [t[1:-1] if want else None for t, want in zip(guarded, wanted, strict=True)]
    offsets: tuple[Tensor | None, ...] = (None, None)
    if problem.packed:
        offsets = tuple(torch.tensor(o, dtype=torch.int32, device=DEVICE) for o in (OFFSETS_Q, OFFSETS_K))
    launch.bind(zero_unwritten.specify(problem, gradients, offsets))(*gradients, *offsets)
    for whole, shown, want in zip(guarded, (shown_q, shown_k, shown_k), wanted, strict=True):
        of_token = whole.flatten(1)
        assert (of_token == of_token[:, :1]).all()
        kept = torch.cat((torch.ones(1, dtype=torch.bool), shown | (not want), torch.ones(1, dtype=torch.bool)))
        assert torch.equal(of_token[:, 0].cpu() == 7, kept)
        assert torch.equal(of_token[:, 0].cpu() == 0, ~kept)


@pytest.mark.parametrize(("causal", "window"), BANDS)
@pytest.mark.parametrize("lengths", [(30, 80), (80, 30), (50, 50), (1, 20)])
def test_dense_tokens_that_see_nothing(
    causal: Alignment | None, window: tuple[int, int], lengths: tuple[int, int]
) -> None:
    check(problem_of(causal, window, lengths, packed=False))


@pytest.mark.parametrize(("causal", "window"), BANDS)
def test_packed_tokens_that_see_nothing_and_tokens_of_no_sequence(
    causal: Alignment | None, window: tuple[int, int]
) -> None:
    check(problem_of(causal, window, (49, 170), packed=True))


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_gradients_that_are_not_wanted(wanted: tuple[bool, bool, bool]) -> None:
    check(problem_of("bottom_right", (-1, -1), (49, 170), packed=True), wanted)


def test_programs_share_a_long_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are short and programs few, so that each takes several blocks of a range."""
    monkeypatch.setattr(zero_unwritten, "BLOCK", 128)
    monkeypatch.setattr(zero_unwritten, "MOST_PROGRAMS", 12)
    problem = problem_of("bottom_right", (-1, -1), (80, 3), packed=False)
    assert zero_unwritten.specify(problem, (None, None, torch.empty(9, 2, 40)), (None, None)).grid == 3 * 4
    check(problem)
    check(problem_of("bottom_right", (-1, -1), (49, 170), packed=True))


def test_more_sequences_than_programs() -> None:
    """Each program takes a sequence, and its part of the tokens behind the last."""
    batch = zero_unwritten.MOST_PROGRAMS + 1
    offsets = tuple(torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    offsets[1][-1] -= 1  # the last sequence has no key
    problem = replace(problem_of(None, (-1, -1), (1, 1), packed=True), batch=batch, total_q=batch + 40, total_k=batch)
    dq = torch.full((batch + 40, 1, 16), 7.0, device=DEVICE)
    given = (dq, None, None)
    launch.bind(zero_unwritten.specify(problem, given, offsets))(*given, *offsets)
    assert dq[: batch - 1].eq(7).all() and dq[batch - 1 :].eq(0).all()


def test_queries_beyond_the_stated_longest_sequence() -> None:
    """No block of flash_bwd owns them."""
    problem = problem_of(None, (-1, -1), (20, 170), packed=True)
    dq = torch.full((100, 1, 16), 7.0, device=DEVICE)
    offsets = tuple(torch.tensor(o, dtype=torch.int32, device=DEVICE) for o in (OFFSETS_Q, OFFSETS_K))
    given = (dq, None, None)
    launch.bind(zero_unwritten.specify(problem, given, offsets))(*given, *offsets)
    kept = seen(problem_of(None, (-1, -1), (49, 170), packed=True))[0]
    kept[41 + 20 : 90] = False
    assert torch.equal(dq[:, 0, 0].cpu() == 7, kept)
