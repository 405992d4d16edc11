"""`explain` says what `attention` does, with figures a reader can check by hand."""

from __future__ import annotations

import pytest
import torch

import warpwave
from warpwave import AttentionProblem, Gpu


def tensors(seqlen_q: int = 8, seqlen_k: int = 8) -> list[torch.Tensor]:
    return [torch.randn(2, n, 4, 16) for n in (seqlen_q, seqlen_k, seqlen_k)]


def test_it_names_the_kernel_the_call_takes_and_every_other_reason() -> None:
    said = warpwave.explain(*tensors())
    assert said.kernel == "torch_sdpa"
    assert set(said.reasons) == {"flash_fwd", "torch_sdpa", "eager"}
    text = str(said)
    assert "torch_sdpa" in text and "not eager: it could, and comes behind torch_sdpa" in text


def test_flops_and_bytes_are_the_problem_s() -> None:
    said = warpwave.explain(*tensors(), causal=True)
    assert said.flops == 2 * 2 * 4 * (8 * 9 // 2) * (16 + 16)
    assert said.compulsory_bytes == 4 * 2 * 8 * 4 * 16 * 4
    assert "288 of 512 (query, key) pairs are visible" in str(said)


def test_a_boolean_mask_is_counted() -> None:
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    mask[..., :3] = True
    q, k, v = tensors()
    assert warpwave.explain(q, k, v, mask=mask).problem.visible_pairs == 2 * 4 * 8 * 3
    both = warpwave.explain(q, k, v, mask=mask, causal=True).problem
    assert both.visible_pairs == 2 * 4 * (1 + 2 + 6 * 3) and both.pairs_are_exact


def test_packed_lengths_are_read() -> None:
    q, k, v = (torch.randn(12, 2, 16) for _ in range(3))
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    said = warpwave.explain(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=7, max_seqlen_k=7)
    assert said.problem.visible_pairs == 2 * (25 + 49)


def test_gradients_are_served_by_eager_and_it_says_so() -> None:
    q, k, v = tensors()
    said = warpwave.explain(q.requires_grad_(), k, v)
    assert said.kernel == "eager"
    assert any("gradients" in reason for reason in said.reasons["flash_fwd"])


def test_a_refused_kernel_is_explained_not_raised() -> None:
    said = warpwave.explain(*tensors(), kernel="flash_fwd")
    if said.gpu.vendor == "interpreter":
        assert said.kernel == "flash_fwd"
    else:
        assert said.kernel is None and said.reasons["flash_fwd"]
        assert "kernel    none" in str(said)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_a_problem_needs_no_tensors_and_no_gpu(arch: str) -> None:
    problem = AttentionProblem(
        batch=4, seqlen_q=4096, seqlen_k=4096, num_heads_q=16, num_heads_kv=16, head_dim=128, head_dim_v=128,
        dtype="bfloat16", softmax_scale=128**-0.5,
    )  # fmt: skip
    said = warpwave.explain(problem, gpu=Gpu.for_arch(arch))
    assert said.kernel == "flash_fwd"
    assert said.cost is not None and said.cost.flops == problem.flops, "every tile is whole: no padding"


def test_wrong_arguments_raise_as_the_call_does() -> None:
    q, k, v = tensors()
    with pytest.raises(warpwave.InvalidInput, match="softcap is -1"):
        warpwave.explain(q, k, v, softcap=-1.0)
    with pytest.raises(warpwave.InvalidInput, match="kernel is 'nonsense'"):
        warpwave.explain(q, k, v, kernel="nonsense")
