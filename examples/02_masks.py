"""Which keys a query sees: causal masks, windows, boolean masks, and biases.

    python examples/02_masks.py

With q = 0 all visible keys have the same score, so exp(lse) is the number of keys that a query sees, and the output for
one-hot values shows which keys they are.
"""

from typing import Any

import torch

import warpwave

SEQLEN_Q, SEQLEN_K = 4, 8
q = torch.zeros(1, SEQLEN_Q, 1, 16)
k = torch.randn(1, SEQLEN_K, 1, 16)
v = torch.eye(SEQLEN_K)[None, :, None]  # (1, seqlen_k, 1, head_dim_v): key j is column j


def show(title: str, **options: Any) -> None:
    """Prints one row for each query: # for each visible key, and the number of visible keys."""
    out, lse = warpwave.attention(q, k, v, return_lse=True, **options)
    print(f"\n{title}")
    for i in range(SEQLEN_Q):
        row = "".join("#" if weight > 0 else "." for weight in out[0, i, 0])
        print(f"  query {i}  {row}  {lse[0, 0, i].exp().item():.0f} visible")


show("no mask")
show("causal=True: aligned to the last key", causal=True)
show('causal=Causal("top_left"): aligned to the first key, as torch does', causal=warpwave.Causal("top_left"))
show("window_size=(2, 0): the last three keys", window_size=(2, 0))
show("window_size=(1, 1): one key to either side", window_size=(1, 1))

mask = torch.ones(1, 1, 1, SEQLEN_K, dtype=torch.bool)  # broadcasts over batch, heads and queries
mask[..., :3] = False  # three padding keys
show("a boolean mask of keys: True is visible", mask=mask)
show("both: a pair is visible only if every mask shows it", mask=mask, causal=True)

bias = torch.zeros(1, 1, SEQLEN_Q, SEQLEN_K)
bias[..., 5] = float("-inf")
show("a bias of -inf hides a pair", bias=bias)

nothing = torch.zeros(1, 1, SEQLEN_Q, SEQLEN_K, dtype=torch.bool)
out, lse = warpwave.attention(q, k, v, mask=nothing, return_lse=True)
print(f"\nno visible key: out is {out.abs().max().item():.0f}, lse is {lse.max().item()}")
assert out.abs().max() == 0 and bool((lse == -torch.inf).all())
