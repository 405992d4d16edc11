"""What transformers' layers cost the host in warpwave, on an H200 that is made up: calls of Python functions in a
decode step, and copies in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'warpwave[integrations]'")

from tests.test_new_lengths import Card, calls_of, card, device, known, pytestmark
from warpwave.integrations import transformers as door

__all__ = ["card", "device", "known", "pytestmark"]  # fixtures
LAYERS = 4
# Most calls of Python functions in the first layer of a step, which makes the plan of the new length; in the second,
# which makes its guard; and in each other layer. Launches at new addresses take some calls more.
MOST = {False: (144, 56, 38), True: (148, 76, 63)}


def decode_step(layer: Any, length: int, padded: bool) -> list[int]:
    """Returns the calls in each layer of a decode step, with keys as transformers' dynamic cache has them: each layer
    concatenates its own anew."""
    batch = 2 if padded else 1
    q = torch.empty(batch, 1, 32, 128, dtype=torch.bfloat16).transpose(1, 2)
    caches = [[torch.empty(batch, 8, length, 128, dtype=torch.bfloat16) for _ in "kv"] for _ in range(LAYERS)]
    visible = (torch.arange(length) >= torch.tensor([[3], [0]])) if padded else None
    door.register().remove()  # imports the module that `make_mask` reads
    mask = door.make_mask(batch, 1, length, length - 1, attention_mask=visible)
    assert (mask is not None) is padded
    said: Any = {"scaling": 128**-0.5, "use_cache": True, "position_ids": None}
    return [calls_of(lambda: door.attend(layer, q, k, v, mask, **said)) for k, v in caches]  # noqa: B023


@pytest.mark.parametrize("padded", [False, True])
def test_a_decode_step_makes_one_plan(padded: bool, card: Card) -> None:
    layer, steps = torch.nn.Module(), []
    for length in range(700, 720):
        card.bound.clear()
        steps.append(decode_step(layer, length, padded))
    assert 1 <= len(card.bound) <= 2, "more than the launches of one plan: keys in splits, and their merge if it is new"
    # The least of several steps: where the allocator places a cache decides whether a launch has a new address.
    calls = [min(of_layer) for of_layer in zip(*steps[5:], strict=True)]
    first, second, each = MOST[padded]
    assert calls[0] <= first and calls[1] <= second and max(calls[2:]) <= each, calls


def copies(layer: Any, given: list[torch.Tensor], dout: torch.Tensor) -> list[Any]:
    """Returns the shapes that torch copies in a layer's forward and backward."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as watched:
        q, k, v = given
        out, _ = door.attend(layer, q, k, v, None, scaling=128**-0.5)
        torch.autograd.grad(out, given, dout)
    return [event.input_shapes[0] for event in watched.events() or () if event.name == "aten::copy_"]


@pytest.mark.parametrize("seqlen", [4096, 512], ids=["whole groups", "splits of a group"])
def test_training_copies_nothing(card: Card, seqlen: int) -> None:
    """q, k, v and the gradient of out as a Llama layer passes them on: views of (batch, seqlen, heads, head_dim)."""
    layer = torch.nn.Module()
    given = [torch.randn(1, seqlen, heads, 128, dtype=torch.bfloat16).transpose(1, 2) for heads in (32, 8, 8)]
    for tensor in given:
        tensor.requires_grad_()
    dout = torch.randn(1, seqlen, 32 * 128, dtype=torch.bfloat16).view(1, seqlen, 32, 128)
    copies(layer, given, dout)  # binds the launches
    assert not copies(layer, given, dout)
    by_head = dout.transpose(1, 2).contiguous().transpose(1, 2)
    assert copies(layer, given, by_head) == [[1, seqlen, 32, 128]]  # such a copy is seen
