"""Sequences of different lengths in one call, packed without padding.

    python examples/03_packed_sequences.py

cu_seqlens holds the offsets: sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1].
"""

import itertools

import torch

import warpwave

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
lengths = [17, 128, 1, 64]
offsets = [0, *itertools.accumulate(lengths)]
cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
q, k, v = (torch.randn(offsets[-1], 4, 64, device=device) for _ in range(3))  # (total_tokens, num_heads, head_dim)

out = warpwave.attention_varlen(
    q,
    k,
    v,
    cu_seqlens_q=cu_seqlens,
    cu_seqlens_k=cu_seqlens,
    max_seqlen_q=max(lengths),
    max_seqlen_k=max(lengths),
    causal=True,
    checked=True,  # reads the offsets first, which waits for the device; leave it out once they are right
)

for b, (start, end) in enumerate(itertools.pairwise(offsets)):
    alone = warpwave.attention(q[None, start:end], k[None, start:end], v[None, start:end], causal=True)[0]
    difference = (out[start:end] - alone).abs().max().item()
    print(f"sequence {b}, {lengths[b]:3} tokens: largest difference from a call of its own {difference:.1e}")
    assert difference < 1e-5

padded = len(lengths) * max(lengths)
print(f"{offsets[-1]} tokens packed; padding would compute {padded}")
