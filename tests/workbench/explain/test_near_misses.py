"""The nearest fast path is one that the kernel itself accepts, and masks are recognized for what they are."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warpwave import dispatch
from warpwave.gpu import CPU, Gpu
from warpwave.kernels import flash_fwd
from warpwave.problem import AttentionProblem, Band, Causal
from warpwave.workbench.explain.near_misses import as_positional, nearest, positional_band

SM_90 = Gpu.for_arch("sm_90")
PLAIN = AttentionProblem(
    batch=2, seqlen_q=64, seqlen_k=96, num_heads_q=4, num_heads_kv=2, head_dim=64, head_dim_v=64, dtype="bfloat16",
    softmax_scale=0.125,
)  # fmt: skip


def aligned(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """A kernel that takes rows of whole 16 bytes, no gradients and no lse."""
    reasons = [f"head_dim {d}" for d in (problem.head_dim, problem.head_dim_v) if d % 8]
    reasons += ["gradients"] * problem.requires_grad + ["lse"] * problem.return_lse
    return reasons + ["mask"] * (problem.mask_shape is not None) + ["sinks"] * problem.has_sinks


KERNEL = SimpleNamespace(NAME="fast", NEEDS_GPU=True, why_not=aligned)


def changes(**options: Any) -> list[tuple[str, ...]]:
    return [path.changes for path in nearest(replace(PLAIN, **options), SM_90, [KERNEL])]


def test_a_kernel_that_takes_the_call_has_no_path() -> None:
    assert changes() == []


def test_each_refusal_has_its_change() -> None:
    assert changes(requires_grad=True) == [("call under torch.no_grad() if gradients are not needed",)]
    ((padding,),) = changes(head_dim=59, head_dim_v=59)
    assert padding == (
        "pad q and k with zeros from head_dim 59 to 64, pad v from 59 to 64 and cut the output back, "
        "with softmax_scale=0.125 given"
    )
    ((only_v,),) = changes(head_dim_v=60)
    assert "pad v from 60 to 64" in only_v and "pad q" not in only_v


def test_several_refusals_take_several_changes() -> None:
    ((text,),) = changes(head_dim=59, head_dim_v=59, requires_grad=True, return_lse=True)
    assert "no_grad" in text and "return_lse" in text and "to 64" in text


def test_what_no_change_mends_is_not_promised() -> None:
    assert changes(has_sinks=True, requires_grad=True) == []


def test_cpu_tensors_are_told_to_move() -> None:
    (path,) = nearest(PLAIN, CPU, [flash_fwd])
    assert path.changes == ("move q, k and v to a GPU (.cuda())",)
    assert str(path) == "flash_fwd would serve this call: move q, k and v to a GPU (.cuda())"
    assert nearest(replace(PLAIN, requires_grad=True), CPU, [flash_fwd]) == [path], "GPUs have flash_bwd"


@pytest.mark.parametrize(
    "options", [{"requires_grad": True}, {"head_dim": 59, "requires_grad": True}, {"head_dim": 300}]
)
def test_paths_of_real_kernels_are_accepted_by_them(options: dict[str, Any]) -> None:
    problem = replace(PLAIN, seqlen_q=3000, seqlen_k=3000, **options)
    ahead = list(dispatch.KERNELS[: dispatch.KERNELS.index(dispatch.eager)])
    found = {path.kernel for path in nearest(problem, SM_90, ahead)}
    able = {"hopper/flash_fwd", "flash_fwd"} & {kernel.NAME for kernel in ahead}
    assert found == ({"hopper/flash_fwd"} if options.get("head_dim") == 300 else able)  # by padding to 304


def test_paths_to_kernels_that_auto_would_pass_over_are_not_named() -> None:
    ahead = list(dispatch.KERNELS[: dispatch.KERNELS.index(dispatch.eager)])
    prompt = replace(PLAIN, seqlen_q=3000, seqlen_k=3000, requires_grad=True)
    assert "split_kv" not in {path.kernel for path in nearest(prompt, SM_90, ahead)}
    assert "split_kv" in {path.kernel for path in nearest(replace(prompt, seqlen_q=1), SM_90, ahead)}


# Masks ----------------------------------------------------------------------------------------------------------------


def mask_of(band: Band, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    mask = torch.zeros(1, 1, seqlen_q, seqlen_k, dtype=torch.bool)
    for i in range(seqlen_q):
        keys = band.keys(i, seqlen_k)
        mask[..., i, keys.start : keys.stop] = True
    return mask


@pytest.mark.parametrize("lengths", [(8, 8), (5, 9), (9, 5), (1, 7), (7, 1)])
@pytest.mark.parametrize("band", [(None, None), (None, 0), (None, 4), (-2, 0), (-1, 2), (2, 4), (None, -4), (-3, None)])
def test_a_band_is_found_or_an_equal_one(band: tuple[int | None, int | None], lengths: tuple[int, int]) -> None:
    mask = mask_of(Band(*band), *lengths)
    found = positional_band(mask, *lengths)
    if not mask.any():
        assert found is None
    elif found is not None:
        assert torch.equal(mask_of(found, *lengths), mask)
    else:  # only where some row sees nothing while its neighbors' edges lie outside: no band says that unaided
        assert not mask.any(-1).all()


def test_masks_that_are_no_band() -> None:
    mask = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(1)) < 0.5
    assert positional_band(mask, 16, 16) is None
    causal = mask_of(Band(None, 0), 8, 8)
    assert positional_band(torch.cat([causal, ~causal], 1), 8, 8) is None, "every head alike, or it is none"
    assert positional_band(torch.cat([causal, causal], 1), 8, 8) == Band(None, 0)
    assert positional_band(torch.ones(1, 1, 1, 1, dtype=torch.bool), 8, 8) == Band(None, None)
    assert positional_band(torch.zeros(1, 1, 0, 8, dtype=torch.bool), 0, 8) is None


@pytest.mark.parametrize(
    ("band", "expected", "how"),
    [
        (Band(None, 32), {"causal": Causal()}, "causal=True"),
        (Band(None, 0), {"causal": Causal("top_left")}, 'Causal("top_left")'),
        (Band(32 - 7, 32), {"window_size": (7, 0)}, "window_size=(7, 0)"),
        (Band(32 - 7, None), {"window_size": (7, -1)}, "window_size=(7, -1)"),
    ],
)
def test_a_band_is_written_as_the_option_that_shows_the_same_pairs(
    band: Band, expected: dict[str, Any], how: str
) -> None:
    counted = band.pairs(64, 96) * 2 * 4
    masked = replace(PLAIN, mask_shape=(1, 1, 64, 96), mask_visible_pairs=counted)
    changed = as_positional(masked, band)
    assert changed is not None and how in changed[1]
    assert changed[0] == replace(PLAIN, **expected) and changed[0].visible_pairs == counted


def test_a_mask_that_hides_nothing_is_dropped() -> None:
    masked = replace(PLAIN, mask_shape=(1, 1, 1, 1), mask_visible_pairs=PLAIN.visible_pairs)
    assert as_positional(masked, None) == (PLAIN, "drop the mask: it hides nothing")
    causal = replace(PLAIN, causal=Causal())
    both = replace(causal, mask_shape=(1, 1, 64, 96), mask_visible_pairs=causal.visible_pairs)
    changed = as_positional(both, Band(None, 32))
    assert changed is not None and changed[0] == causal and "beyond the positional mask" in changed[1]


def test_what_position_cannot_say_stays_a_mask() -> None:
    masked = replace(PLAIN, mask_shape=(1, 1, 64, 96), mask_visible_pairs=17)
    assert as_positional(masked, None) is None
    assert as_positional(masked, Band(40, 50)) is None, "a window is around the diagonal"
    assert as_positional(PLAIN, None) is None
