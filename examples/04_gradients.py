"""Training: gradients with respect to q, k, v and a learned bias.

    python examples/04_gradients.py

A layer learns to copy the previous token: the only input is a relative-position bias, one number for each distance.
"""

import torch

import warpwave

torch.manual_seed(0)
SEQLEN, HEAD_DIM = 32, 16
distance = torch.arange(SEQLEN)[:, None] - torch.arange(SEQLEN)[None]  # [seqlen_q, seqlen_k]
table = torch.zeros(SEQLEN, requires_grad=True)  # a bias for each distance from 0 to SEQLEN - 1
optimizer = torch.optim.Adam([table], lr=0.1)

for step in range(61):
    v = torch.randn(4, SEQLEN, 1, HEAD_DIM)
    q = torch.zeros(4, SEQLEN, 1, HEAD_DIM)
    k = torch.zeros(4, SEQLEN, 1, HEAD_DIM)
    bias = table[distance.clamp(min=0)][None, None]  # (1, 1, seqlen_q, seqlen_k)
    out = warpwave.attention(q, k, v, bias=bias, causal=True)
    loss = (out[:, 1:] - v[:, :-1]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step:2}: loss {loss.item():.4f}, most attended distance {table.argmax().item()}")

assert loss.item() < 0.01 and table.argmax().item() == 1
print("the layer attends to the token before")
