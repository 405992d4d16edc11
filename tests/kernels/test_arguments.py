"""What kernels derive from tensors before a launch (`warpwave.kernels.arguments`)."""

from __future__ import annotations

import torch

from warpwave.kernels.arguments import PAIR_GROUP, pair_group


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
