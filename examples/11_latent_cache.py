"""Decode with a latent cache, as DeepSeek's models have it (MLA): all heads read one latent, whose first columns are v.

    python examples/11_latent_cache.py

A token's latent is its compressed keys and values (512 columns in DeepSeek-V3, 48 here) with the rotated columns of its
key (64 there, 16 here). The caller absorbs the up-projection of k into q, and applies that of v to the result.
"""

import torch

import warpwave

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
HEADS, COMPRESSED, ROTATED, PER_HEAD = 16, 48, 16, 32
PROMPT, STEP = 40, 2  # two queries a step, as in speculative decoding
tokens = PROMPT + 3 * STEP
latents = torch.randn(1, tokens, 1, COMPRESSED + ROTATED, device=device)
q_plain, q_rotated = (torch.randn(1, tokens, HEADS, width, device=device) for width in (PER_HEAD, ROTATED))
up_k, up_v = (torch.randn(HEADS, COMPRESSED, PER_HEAD, device=device) * COMPRESSED**-0.5 for _ in "kv")
scale = (PER_HEAD + ROTATED) ** -0.5

cache = warpwave.PagedKVCache(
    num_pages=16,
    page_size=16,
    num_heads_kv=1,
    head_dim=COMPRESSED + ROTATED,
    head_dim_v=COMPRESSED,
    v_in_k=True,  # one pool
    max_batch=4,
    max_seqlen=128,
    dtype=torch.float32,
    device=device,
)
row = cache.add()

q = torch.cat([torch.einsum("bthp,hcp->bthc", q_plain, up_k), q_rotated], -1)
outs = []
for begin, end in [(0, PROMPT), *((i, i + STEP) for i in range(PROMPT, tokens, STEP))]:
    step = slice(begin, end)
    compressed = warpwave.attention_with_kv_cache(
        q[:, step], cache, rows=[row], k_new=latents[:, step], causal=True, softmax_scale=scale
    )
    outs.append(torch.einsum("bthc,hcp->bthp", compressed, up_v))
print(f"{cache.lengths[row]} tokens in {len(cache.pages(row))} pages of {cache.k.shape[-1]} columns each, no pool of v")

# The same with every head's own keys and values, as in training.
k_plain, v = (torch.einsum("btc,hcp->bthp", latents[:, :, 0, :COMPRESSED], up) for up in (up_k, up_v))
k = torch.cat([k_plain, latents[..., COMPRESSED:].expand(-1, -1, HEADS, -1)], -1)
expected = warpwave.attention(torch.cat([q_plain, q_rotated], -1), k, v, causal=True, softmax_scale=scale)
difference = (torch.cat(outs, 1) - expected).abs().max().item()
print(f"largest difference from attention on each head's own keys: {difference:.1e}")
assert difference < 1e-4
