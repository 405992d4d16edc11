"""A lower limit for the speed of your own kernel, as a test in your own suite.

    python examples/09_test_your_kernel.py        # or: pytest examples/09_test_your_kernel.py

assert_reaches compares the result with float64, times the call on the GPU, and fails if the call is slower than the
given share of its roofline bound. Without a GPU it skips the test.
"""

import pytest
import torch

import warpwave
from warpwave.testing import assert_reaches


def my_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Stands for your kernel; (batch, seqlen, num_heads, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def test_my_attention_is_right() -> None:
    """Compares the kernel with warpwave's on the CPU."""
    q, k, v = (torch.randn(2, 100, 4, 64) for _ in range(3))
    torch.testing.assert_close(my_attention(q, k, v), warpwave.attention(q, k, v))


def test_my_attention_reaches_a_fifth_of_its_bound() -> None:
    """Demands 20 % of the roofline bound; the test needs a GPU."""
    problem = warpwave.AttentionProblem(
        batch=4,
        seqlen_q=2048,
        seqlen_k=2048,
        num_heads_q=16,
        num_heads_kv=16,
        head_dim=128,
        head_dim_v=128,
        dtype="bfloat16",
        softmax_scale=128**-0.5,
    )
    print(assert_reaches(0.2, call=my_attention, problem=problem).arithmetic)


if __name__ == "__main__":
    test_my_attention_is_right()
    print("right: as close to warpwave.attention as float32 allows")
    try:
        test_my_attention_reaches_a_fifth_of_its_bound()
    except pytest.skip.Exception as reason:
        print(f"speed not tested: {reason}")
