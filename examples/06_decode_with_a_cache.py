"""Generation with a paged KV cache: a prompt, decode steps, and a fork that shares the prompt's pages.

    python examples/06_decode_with_a_cache.py

docs/guide/serving.md has the rest: models of several layers, chunked prefill, CUDA graphs, sliding windows.
"""

import torch

import warpwave

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
PROMPT, STEPS, HEADS_Q, HEADS_KV, HEAD_DIM = 40, 5, 8, 2, 64
tokens = PROMPT + STEPS
q = torch.randn(1, tokens, HEADS_Q, HEAD_DIM, device=device)
k, v = (torch.randn(1, tokens, HEADS_KV, HEAD_DIM, device=device) for _ in range(2))

cache = warpwave.PagedKVCache(
    num_pages=16,
    page_size=16,
    num_heads_kv=HEADS_KV,
    head_dim=HEAD_DIM,
    max_batch=4,
    max_seqlen=128,
    dtype=torch.float32,
    device=device,
)
row = cache.add()  # an empty sequence

# The prompt: k_new and v_new are appended to the cache, then all queries attend.
outs = [
    warpwave.attention_with_kv_cache(
        q[:, :PROMPT], cache, rows=[row], k_new=k[:, :PROMPT], v_new=v[:, :PROMPT], causal=True
    )
]
fork = cache.fork(row)  # shares the prompt's pages; a shared page is copied when one of the two writes into it
print(f"after the prompt: {cache.lengths[row]} tokens in pages {cache.pages(row)}, {cache.num_free_pages} pages free")

for i in range(PROMPT, tokens):
    step = slice(i, i + 1)
    outs.append(warpwave.attention_with_kv_cache(q[:, step], cache, rows=[row], k_new=k[:, step], v_new=v[:, step]))
print(f"after {STEPS} steps: {cache.lengths[row]} tokens in pages {cache.pages(row)}; the fork has {cache.pages(fork)}")

expected = warpwave.attention(q, k, v, causal=True)
difference = (torch.cat(outs, 1) - expected).abs().max().item()
print(f"largest difference from one call over all tokens: {difference:.1e}")
assert difference < 1e-5
cache.free([row, fork])
print(f"all sequences freed: {cache.num_free_pages} pages free")
