"""The host code of `hopper/flash_bwd`, on an H200 that is made up: what a training step launches, copies and keeps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import warpwave
from tests.test_new_lengths import Card, card, device, known, pytestmark
from warpwave.kernels.hopper.flash_bwd import kernel

__all__ = ["card", "device", "known", "pytestmark"]  # fixtures
BACKWARD = ["statistics_kernel", "joint_kernel", "finish_dq_kernel"]  # in the order in which they are compiled


def compiled(card: Card) -> list[str]:
    return [spec.kernel.__name__ for spec in card.compiled]


def inputs(seqlen: int = 2048) -> list[torch.Tensor]:
    return [torch.randn(2, seqlen, 4, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]


def test_a_step_takes_four_launches(card: Card) -> None:
    q, k, v = inputs()
    for _ in range(2):
        grads = torch.autograd.grad(warpwave.attention(q, k, v, causal=True).sum(), (q, k, v))
    assert compiled(card) == ["hopper_flash_fwd_kernel", *BACKWARD]
    assert [(g.shape, g.dtype, g.is_contiguous()) for g in grads] == [(t.shape, t.dtype, True) for t in (q, k, v)]


def test_a_loss_of_the_log_sum_exp_is_another_launch(card: Card) -> None:
    q, k, v = inputs()
    out, lse = warpwave.attention(q, k, v, return_lse=True)
    torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    assert compiled(card)[1:] == [*BACKWARD, "statistics_kernel"]


def test_what_arrives_may_lie_anywhere(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches are compiled for multiples of 16 bytes and contiguous rows."""
    q, k, v = inputs()
    out = warpwave.attention(q, k, v)
    taken: list[Any] = []
    specify = kernel.specify

    def spy(*arguments: Any) -> Any:
        taken.append(arguments[2].dout)
        return specify(*arguments)

    monkeypatch.setattr(kernel, "specify", spy)
    shifted = torch.zeros(out.numel() + 1, dtype=out.dtype)[1:].view_as(out)
    for dout in (shifted, torch.zeros(1, dtype=out.dtype).expand(out.shape)):
        torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    assert taken[0].data_ptr() % 16 == 0 and taken[0].is_contiguous()


def test_tensors_of_a_call_are_not_kept(card: Card) -> None:
    q, k, v = inputs()
    warpwave.attention(q, k, v).sum().backward()
    kept = [weakref.ref(t) for t in (q, k, v)]
    card.compiled.clear()
    card.launched.clear()
    del q, k, v
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3


def test_deterministic_mode_takes_the_kernel_without_atomics(card: Card) -> None:
    q, k, v = inputs()
    try:
        torch.use_deterministic_algorithms(True)
        torch.autograd.grad(warpwave.attention(q, k, v).sum(), (q, k, v))
    finally:
        torch.use_deterministic_algorithms(False)
    assert compiled(card)[1:] == ["flash_bwd_dq_kernel", "flash_bwd_dkv_kernel"]


def test_layouts_that_hooks_bring_back_are_bound_anew(card: Card) -> None:
    """Views of one tensor that come back contiguous, as from the CPU, are another layout of the same plan."""
    qkv = torch.randn(2, 256, 12, 64, dtype=torch.bfloat16).requires_grad_()
    parts = qkv.split(4, 2)
    out = warpwave.attention(*parts)
    torch.autograd.grad(out.sum(), qkv, retain_graph=True)
    strides = [maps for name, maps in zip(compiled(card), card.launched, strict=False) if name == "joint_kernel"]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.contiguous()):
        other = warpwave.attention(*parts)
        torch.autograd.grad(other.sum(), qkv)
    launched = [maps for _, _, maps, _ in card.launched if len(maps) == 9]
    assert strides and launched[0][0][1] != launched[1][0][1], "the strides of q in its tensor map"
