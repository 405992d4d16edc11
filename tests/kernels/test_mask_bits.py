"""Masks packed into bits: every bit stands where a thread of the Hopper forward looks for it."""

from __future__ import annotations

import collections
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.marks import needs_triton, one_in
from warpwave.kernels.prepass import mask_bits, mask_steps
from warpwave.problem import AttentionProblem, Causal
from warpwave.runtime import launch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # interpreted on a CPU
PROBLEM = AttentionProblem(
    batch=2, seqlen_q=70, seqlen_k=201, num_heads_q=3, num_heads_kv=3, head_dim=64, head_dim_v=64, dtype="float16",
    softmax_scale=0.1,
)  # fmt: skip


@needs_triton
@pytest.mark.parametrize("band", [{}, {"causal": Causal(), "window_size": (20, -1)}], ids=["", "window"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 70, 201), (1, 1, 1, 201), (2, 1, 70, 1), (2, 3, 70, 204)], ids=str)
def test_every_cell_has_its_bit(shape: tuple[int, ...], strided: bool, transposed: bool, band: dict[str, Any]) -> None:
    problem = replace(PROBLEM, **band, mask_shape=shape, seqlen_k=shape[-1] if shape[-1] > 1 else 201)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.6
    if strided:  # heads lie within queries
        mask = mask.transpose(1, 2).contiguous().transpose(1, 2)
    p = mask_bits.packed(problem, transposed)
    batch, heads, tiles, rows = p.batch, p.heads, p.tiles, p.rows
    packed = torch.full((p.size,), 77, dtype=torch.int32, device=DEVICE)
    of_queries, of_keys = (torch.zeros(s, dtype=torch.int8, device=DEVICE) for s in mask_bits.seen_shapes(problem))
    seen = of_queries, of_keys
    seen_by = seen if transposed else (None, None)
    packing = mask_bits.specify(problem, mask, packed, transposed, seen_by)
    launch.bind(packing)(mask, packed, *seen_by)
    words = packed[: p.flags_begin].view(batch, heads, tiles, rows, 4)
    flags = packed[p.flags_begin :].view(batch, heads, p.row_blocks, tiles)
    columns = torch.arange(tiles * 128, device=DEVICE)
    of_column = words[:, :, columns // 128, :, columns % 8 // 2]  # [columns, batch, heads, rows]
    bit = columns % 128 // 8 * 2 + columns % 2
    found = (of_column >> bit[:, None, None, None]) & 1 != 0
    lengths = [70, problem.seqlen_k]
    lengths[transposed] = rows  # broadcast rows are packed once
    shown = mask.expand(*shape[:2], *lengths)
    if problem.has_band:
        i, j = torch.arange(70, device=DEVICE)[:, None], torch.arange(problem.seqlen_k, device=DEVICE)
        shown = shown & (j - i <= problem.seqlen_k - 70) & (j - i >= problem.seqlen_k - 70 - 20)
    shown = shown.mT if transposed else shown
    expected = torch.nn.functional.pad(shown, (0, len(columns) - shown.shape[-1]))
    assert torch.equal(found.permute(1, 2, 3, 0), expected)
    blocks = torch.nn.functional.pad(expected, (0, 0, 0, -rows % 64)).view(batch, heads, -1, 64, tiles, 128)
    assert torch.equal(flags, blocks.any(-1).any(3).int())
    assert packing.constants["ALIGNED"] == (mask.stride(3) == 1 and shape[3] % 4 == 0 and problem.seqlen_k % 4 == 0)
    if transposed:
        assert torch.equal(seen[0].bool(), shown.any(-2)) and torch.equal(seen[1].bool(), shown.any(-1))


@needs_triton
@pytest.mark.parametrize("transposed", [False, True])
def test_a_byte_of_any_bits_is_true(transposed: bool) -> None:
    """As for torch: a view of other bytes may be a mask."""
    problem = replace(PROBLEM, mask_shape=(1, 1, 70, 128), seqlen_k=128)
    values = torch.randint(0, 9, (1, 1, 70, 128), generator=torch.Generator().manual_seed(0))
    values = torch.where(values < 8, 1 << values, 0).to(torch.uint8).to(DEVICE)
    found = []
    for mask in (values.view(torch.bool), values != 0):
        packed = torch.zeros(mask_bits.packed(problem, transposed).size, dtype=torch.int32, device=DEVICE)
        packing = mask_bits.specify(problem, mask, packed, transposed)  # without flags of queries and keys
        assert packing.constants["ALIGNED"]
        launch.bind(packing)(mask, packed)
        found.append(packed)
    assert torch.equal(*found)


def test_broadcast_axes_are_packed_once() -> None:
    """And have the stride 0; rows do not where position hides something."""
    packed = mask_bits.packed(replace(PROBLEM, mask_shape=(2, 1, 1, 201)))
    assert packed.word_strides == (8, 0, 4, 0) and packed.flag_strides == (2, 0, 0)
    assert packed.size == 2 * 8 + 2 * 2
    packed = mask_bits.packed(replace(PROBLEM, mask_shape=(2, 1, 1, 201), causal=Causal()))
    assert packed.word_strides == (560, 0, 280, 4) and packed.flag_strides == (4, 0, 2)


@one_in(4)
@needs_triton
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("shape", [(2, 6, 300, 530), (1, 1, 300, 530), (2, 1, 1, 530), (1, 6, 300, 1)], ids=str)
def test_steps_that_show_a_pair_are_listed(shape: tuple[int, ...], group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks of two row blocks and steps of 64 columns, with the number of earlier blocks that list them; a block
    that shows nothing has step 0 and rank -1. Rows of a mask of one row are all listed."""
    monkeypatch.setattr(mask_steps, "CHUNK", 4)
    monkeypatch.setattr(mask_steps, "EARLIER", 2)
    problem = replace(PROBLEM, seqlen_q=300, seqlen_k=530, num_heads_q=6, num_heads_kv=6 // group, mask_shape=shape)
    cells = torch.rand(*shape[:2], -(-shape[2] // 64), -(-shape[3] // 128), generator=torch.Generator().manual_seed(1))
    shown = (cells < 0.4).repeat_interleave(64, 2).repeat_interleave(128, 3)[:, :, : shape[2], : shape[3]].to(DEVICE)
    p = mask_bits.packed(problem)
    words = torch.full((p.size,), 77, dtype=torch.int32, device=DEVICE)
    launch.bind(mask_bits.specify(problem, shown, words))(shown, words)
    of = mask_steps.Lists(p, 5, 2, 2, 2 * p.tiles - 1, group)  # 300 rows
    lists = torch.full(of.shape, -1, dtype=torch.int32, device=DEVICE)
    launch.bind(mask_steps.specify(of, words, lists))(words, lists)
    flags = words[p.flags_begin :].view(p.batch, p.heads, p.row_blocks, p.tiles).ne(0).expand(-1, -1, 5, -1)
    assert of.shape[2] == 3
    for b in range(of.shape[0]):
        for head in range(of.shape[1]):
            before: collections.Counter[int] = collections.Counter()
            for block in range(of.shape[2]):
                steps = [
                    tile * group + g
                    for tile in reversed(range(of.steps))
                    for g in reversed(range(group))
                    if flags[b, (head * group + g) % p.heads, 2 * block : 2 * block + 2, tile // 2].any()
                ]
                expected = [number for step in steps for number in (step, before[step])] or [0, -1]
                found = lists[b, head, block, : 1 + len(expected)].tolist()
                assert found == [len(expected) // 2, *expected]
                before.update(steps)
