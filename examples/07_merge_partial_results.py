"""Attention over parts of the keys, merged: the building block of split keys, shared prefixes, and several devices.

    python examples/07_merge_partial_results.py

Each part is exact over its own keys; its log-sum-exp determines its weight.
"""

import itertools

import torch

import warpwave

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
q = torch.randn(2, 16, 4, 64, device=device)
k, v = (torch.randn(2, 1000, 4, 64, device=device) for _ in range(2))
whole, whole_lse = warpwave.attention(q, k, v, return_lse=True)

bounds = [0, 100, 600, 1000]
outs, lses = [], []
for start, end in itertools.pairwise(bounds):
    out, lse = warpwave.attention(q, k[:, start:end], v[:, start:end], return_lse=True)
    outs.append(out)
    lses.append(lse)
    share = (lse - whole_lse).exp().mean().item()
    print(f"keys {start:3} to {end:4}: {share:.1%} of the softmax's weight on average")

out, lse = warpwave.merge_states(outs, lses)
print(f"largest difference of out from one call: {(out - whole).abs().max().item():.1e}")
print(f"largest difference of lse from one call: {(lse - whole_lse).abs().max().item():.1e}")
assert torch.allclose(out, whole, atol=1e-5) and torch.allclose(lse, whole_lse, atol=1e-4)
