"""The first call: grouped-query attention with a causal mask, compared with torch's.

    python examples/01_first_call.py

Tensors are (batch, seqlen, num_heads, head_dim). torch's function takes (batch, num_heads, seqlen, head_dim).
"""

import torch

import warpwave

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
batch, seqlen, num_heads_q, num_heads_kv, head_dim = 2, 256, 8, 2, 64
q = torch.randn(batch, seqlen, num_heads_q, head_dim, device=device)
k = torch.randn(batch, seqlen, num_heads_kv, head_dim, device=device)
v = torch.randn(batch, seqlen, num_heads_kv, head_dim, device=device)

# Query head h reads kv head h // (num_heads_q // num_heads_kv). softmax_scale is 1 / sqrt(head_dim) by default.
out, lse = warpwave.attention(q, k, v, causal=True, return_lse=True)

expected = torch.nn.functional.scaled_dot_product_attention(
    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
).transpose(1, 2)

print(f"device {device}, kernel {warpwave.explain(q, k, v, causal=True).kernel}")
print(f"out {tuple(out.shape)} {out.dtype}, lse {tuple(lse.shape)} {lse.dtype}")
difference = (out - expected).abs().max().item()
print(f"largest difference from torch: {difference:.1e}")
assert difference < 1e-5
