"""What kernels derive from tensors before a launch (`warpwave.kernels.arguments`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warpwave.gpu import Gpu
from warpwave.kernels.arguments import PAIR_GROUP, column_widths, pair_group, straightener, total_widths
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem


def test_masks_and_biases_are_read_in_groups_where_all_strides_allow_it() -> None:
    """The compiler is told that they are multiples of a group, and a group is read to its end."""
    whole, odd = torch.ones(2, 3, 5, 48, dtype=torch.bool), torch.ones(2, 3, 5, 40, dtype=torch.bool)
    assert pair_group(whole, None) == pair_group(None, whole) == pair_group(whole, whole[:1, :1, :1]) == PAIR_GROUP
    assert pair_group(whole[:, :, :, :32], None) == PAIR_GROUP, "a part of the keys"
    assert pair_group(odd[:1, :1, :1, :32], None) == PAIR_GROUP, "strides of axes that are broadcast do not count"
    for mask, bias in (
        (None, None),
        (odd, None),
        (whole, odd),
        (odd[..., :32], None),
        (whole[..., ::3], None),
        (whole.transpose(2, 3).contiguous().transpose(2, 3), None),
        (whole[..., :1], None),
    ):
        assert pair_group(mask, bias) == 1


def test_masks_and_biases_that_groups_cannot_read_are_copied() -> None:
    """Whatever their layout, the kernel then has the same code, and so the same bits."""
    q = torch.empty(2, 5, 3, 64)
    rows = torch.arange(2 * 3 * 5 * 64 + 16, dtype=torch.float32)
    whole = rows[: 2 * 3 * 5 * 48].view(2, 3, 5, 48)
    for name, bias, is_copied in (
        ("contiguous", whole, False),
        ("a part of the keys", whole[..., :32], False),
        ("another address", rows[1 : 1 + 2 * 3 * 5 * 48].view(2, 3, 5, 48), True),
        ("rows of 49", rows[: 2 * 3 * 5 * 49].view(2, 3, 5, 49)[..., :48], True),
        ("rows of 49, broadcast", rows[: 3 * 5 * 49].view(1, 3, 5, 49)[..., :48].expand(2, -1, -1, -1), True),
        ("40 keys, which no group divides", rows[1 : 1 + 2 * 3 * 5 * 40].view(2, 3, 5, 40), False),
    ):
        straight = straightener(Operands(q, q, q, None, bias), in_groups=True)
        found = straight(Operands(q, q, q, None, bias)).bias
        assert torch.equal(found, bias)
        assert (found.data_ptr() != bias.data_ptr()) == is_copied, f"{name}: whether it is not copied"
        if is_copied:
            assert pair_group(None, found) == PAIR_GROUP
            assert [n == 0 for n in found.stride()] == [n == 0 for n in bias.stride()]
    mask, moved = torch.ones(2, 3, 5, 1, dtype=torch.bool), rows[1 : 1 + 2 * 3 * 5 * 48].view(2, 3, 5, 48)
    operands = Operands(q, q, q, mask, moved)
    assert straightener(operands, in_groups=True)(operands) is operands, "the mask has no groups"


def test_slopes_that_are_one_number_are_copied() -> None:
    q, slopes = torch.empty(2, 5, 3, 64), torch.ones(1).expand(3)
    straight = straightener(Operands(q, q, q, None, None, slopes))
    assert straight(Operands(q, q, q, None, None, slopes)).alibi_slopes.stride() == (1,)


def problem_of(head_dim: int, head_dim_v: int, **others: Any) -> AttentionProblem:
    sizes: dict[str, Any] = {"batch": 1, "seqlen_q": 64, "seqlen_k": 64, "num_heads_q": 1, "num_heads_kv": 1}
    fields = {"dtype": "bfloat16", "softmax_scale": 1.0, "head_dim": head_dim, "head_dim_v": head_dim_v}
    return AttentionProblem(**(sizes | fields | others))


@pytest.mark.parametrize(
    ("arch", "head_dims", "others", "expected"),
    [
        ("sm_80", (40, 80), {}, ((32, 16), (64, 16))),
        ("sm_80", (64, 65), {}, ((64, 0), (64, 16))),
        ("sm_80", (96, 97), {}, ((64, 32), (128, 0))),
        ("sm_80", (192, 128), {}, ((128, 64), (128, 0))),
        ("sm_80", (192, 193), {"dtype": "float32"}, ((128, 64), (256, 0))),
        ("sm_80", (160, 160), {"mask_shape": (1, 1, 64, 64)}, ((256, 0), (256, 0))),
        ("sm_80", (160, 160), {"dtype": "float32", "precision": "bf16x6"}, ((256, 0), (256, 0))),
        ("sm_80", (130, 160), {}, ((128, 32), (128, 32))),
        ("sm_90", (80, 130), {}, ((128, 0), (128, 64))),
        ("sm_100", (160, 160), {}, ((256, 0), (256, 0))),
        ("gfx942", (80, 160), {}, ((64, 32), (128, 32))),
        ("gfx942", (40, 72), {}, ((64, 0), (64, 32))),
    ],
)
def test_columns_between_powers_of_two_are_in_two_tiles(
    arch: str, head_dims: tuple[int, int], others: dict[str, Any], expected: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    problem, gpu = problem_of(*head_dims, **others), Gpu.for_arch(arch)
    assert column_widths(problem, gpu, 64) == expected
    assert total_widths(problem, gpu, 64) == (sum(expected[0]), sum(expected[1]))
