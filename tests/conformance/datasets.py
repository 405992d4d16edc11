"""The three data sets of every gate case. Uniform [0, 1) is not used: attention averages positive data, hiding faults.

normal   q, k, v from N(0, 1);
sharp    q and k three times as large: a few keys dominate each row, as in trained models;
low      every logit near -40 at the default scale, v around 1: a running maximum that starts at 0, or a padding key
         with logit 0, would dominate each sum.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

Data = Literal["normal", "sharp", "low"]
DATA_SETS: tuple[Data, ...] = get_args(Data)


def fill(data: Data, head_dim: int, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Changes q, k and v, drawn from N(0, 1), into the named data set, in place."""
    if data == "sharp":
        q.mul_(3)
        k.mul_(3)
    elif data == "low":
        q.mul_(0.3).add_(1)
        k.mul_(0.3).sub_(40 / head_dim**0.5)
        v.add_(1)
