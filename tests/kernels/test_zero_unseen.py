"""Copies without tokens that nothing sees are made if such a token holds a large number, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.marks import needs_triton
from warpwave.kernels.prepass import zero_unseen
from warpwave.runtime import launch

pytestmark = needs_triton
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # interpreted on a CPU
BATCH, HEADS, GROUP, QUERIES, KEYS = 2, 4, 2, 70, 130
Sides = tuple[zero_unseen.Tensors, zero_unseen.Tensors]


def sides(dtype: torch.dtype, per_head: bool = True) -> Sides:
    """Tensors of queries and of keys, copies of NaN, and flags."""
    g = torch.Generator().manual_seed(1)

    def of(rows: int, heads: int) -> zero_unseen.Tensors:
        shapes = (BATCH, rows, heads, 24), (BATCH, rows, heads, 40)
        tokens = tuple(torch.randn(shape, generator=g).to(DEVICE, dtype) for shape in shapes)
        flags = (torch.rand(BATCH, HEADS if per_head else 1, rows, generator=g) < 0.5).to(DEVICE, torch.int8)
        copies = tuple(torch.full_like(t, torch.nan) for t in tokens)
        return zero_unseen.Tensors(tokens, copies, flags)  # type: ignore[arg-type]

    return of(QUERIES, HEADS), of(KEYS, HEADS // GROUP)


def seen(side: zero_unseen.Tensors) -> torch.Tensor:
    """[batch, tokens, heads], of the heads of the side's tensors."""
    heads = side.tokens[0].shape[2]
    return side.flags.bool().expand(-1, HEADS, -1).unflatten(1, (heads, -1)).any(2).transpose(1, 2)


def run(given: Sides, copies_needed: torch.Tensor) -> None:
    for of in zero_unseen.specify(*given, copies_needed):
        launch.bind(of)(*given[0].flat, *given[1].flat, copies_needed)


def hidden_place(given: Sides, side: int) -> Any:
    """The last token of a side that nothing sees."""
    return tuple((~seen(given[side])).nonzero()[-1])


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, 65600.0, 65504.0])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("side", [0, 1])
def test_a_large_number_of_any_operand_is_found(side: int, which: int, value: float) -> None:
    given = sides(torch.float32)
    given[side].tokens[which][hidden_place(given, side)][-1] = value
    copies_needed = torch.zeros(1, dtype=torch.int8, device=DEVICE)
    run(given, copies_needed)
    assert bool(copies_needed) == (value != 65504.0)
    for found in given:
        for token, copy in zip(found.tokens, found.copies, strict=True):
            expected = torch.where(seen(found)[..., None], token, 0.0)
            assert torch.equal(copy, expected) if copies_needed else copy.isnan().all()


@pytest.mark.parametrize("per_head", [True, False])
def test_numbers_of_tokens_that_are_seen_need_no_copies(per_head: bool) -> None:
    given = sides(torch.float16, per_head)
    for of in given:
        for token in of.tokens:
            token[seen(of)] = torch.nan
    copies_needed = torch.zeros(1, dtype=torch.int8, device=DEVICE)
    run(given, copies_needed)
    assert not copies_needed
