"""Dropout of Hopper's kernels on a Hopper GPU: the mask of the contract, bit for bit, by every config and launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warpwave
from tests.conformance.harness import DEVICE, GPU
from warpwave import dispatch
from warpwave.kernels import dropout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPU.arch != "sm_90", reason="needs a Hopper GPU")]

SEED = torch.tensor([0x1234_5678_9ABC_DEF0, 0x0FED_CBA9_8765_4321], device=DEVICE)


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("dims", [(64, 256), (256, 256), (128, 128), (64, 64)], ids=str)
def test_hoppers_forward_drops_the_same_pairs(dims: tuple[int, int], number: int) -> None:
    """With equal scores and v the identity, out is the mask, by every config."""
    keys, p = dims[1], 0.4
    q = torch.zeros(2, 333, 4, dims[0], device=DEVICE, dtype=torch.float16)
    k = torch.zeros(2, keys, 2, dims[0], device=DEVICE, dtype=torch.float16)
    v = torch.eye(keys, device=DEVICE, dtype=torch.float16)[None, :, None].expand(2, -1, 2, -1).contiguous()
    options: dict[str, Any] = {"dropout_p": p, "dropout_seed": SEED, "kernel": "hopper/flash_fwd"}
    problem = warpwave.explain(q, k, v, **options).problem
    configs = dispatch.hopper_flash_fwd.configs(problem, GPU)
    if number >= len(configs):
        pytest.skip("this head size has fewer configs")
    out = warpwave.attention(q, k, v, config=configs[number], **options)
    kept = dropout.kept(p, SEED, range(2), range(4), range(333), range(keys))
    assert torch.equal(out.transpose(1, 2) != 0, kept)
    torch.testing.assert_close(out[out != 0].float(), torch.full_like(out[out != 0].float(), 1 / keys / (1 - p)),
                               rtol=2e-3, atol=0)  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hoppers_gradients_drop_the_same_pairs(head_dim: int, packed: bool, deterministic: bool) -> None:
    """With equal scores and dout the identity, dv is the mask; dq and dk are eager's."""
    keys, p = 333, 0.4
    given = [torch.zeros(2, head_dim, 2, head_dim, device=DEVICE, dtype=torch.float16).requires_grad_()]
    given += [torch.randn(2, keys, 2, head_dim, device=DEVICE, dtype=torch.float16).requires_grad_() for _ in "kv"]
    dout = torch.eye(head_dim, device=DEVICE, dtype=torch.float16)[None, :, None].expand(2, -1, 2, -1)
    found = []
    for kernel in ("auto", "eager"):
        options: dict[str, Any] = {"dropout_p": p, "dropout_seed": SEED, "kernel": kernel}
        if packed:
            ends = [torch.arange(3, dtype=torch.int32, device=DEVICE) * n for n in (head_dim, keys)]
            sizes: dict[str, Any] = {
                "cu_seqlens_q": ends[0],
                "cu_seqlens_k": ends[1],
                "max_seqlen_q": head_dim,
                "max_seqlen_k": keys,
            }
            q, k, v = (t.flatten(0, 1) for t in given)
            out = warpwave.attention_varlen(q, k, v, deterministic=deterministic, **sizes, **options)
            out = out.unflatten(0, (2, head_dim))
        else:
            out = warpwave.attention(*given, deterministic=deterministic, **options)
        found.append(torch.autograd.grad(out, given, dout))
    kept = dropout.kept(p, SEED, range(2), range(2), range(head_dim), range(keys))
    assert torch.equal(found[0][2].permute(0, 2, 3, 1) != 0, kept)
    for ours, expected in zip(*found, strict=True):
        assert (ours - expected).float().norm() <= 2e-3 * expected.float().norm()
