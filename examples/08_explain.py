"""Which kernel runs a call, and why: on this machine, and on a GPU that this machine does not have.

    python examples/08_explain.py

The same on the command line: warpwave explain --gpu h200 --batch 4 --head-dim 128 --causal
"""

import torch

import warpwave

device = "cuda" if torch.cuda.is_available() else "cpu"
q, k, v = (torch.randn(1, 256, 4, 64, device=device) for _ in range(3))
here = warpwave.explain(q, k, v, causal=True)  # takes the arguments of warpwave.attention; launches nothing
print(f"here: {here.kernel}")
for name, reasons in here.reasons.items():
    if reasons:
        print(f"  not {name}: {reasons[0]}")

# A problem describes a call without tensors, and a Gpu describes a device without a driver.
problem = warpwave.AttentionProblem(
    batch=4,
    seqlen_q=4096,
    seqlen_k=4096,
    num_heads_q=16,
    num_heads_kv=16,
    head_dim=128,
    head_dim_v=128,
    dtype="bfloat16",
    softmax_scale=128**-0.5,
    causal=warpwave.Causal(),
)
h200 = warpwave.Gpu(
    name="NVIDIA H200",
    vendor="nvidia",
    arch="sm_90",
    smem_per_block_bytes=232_448,
    registers_per_thread=255,
    num_sms=132,
    warp_size=32,
)
there = warpwave.explain(problem, gpu=h200)
print(f"\n{problem.describe()}, on an H200:")
print(f"  kernel {there.kernel}, {there.config}")
assert there.bounds and there.prediction
bound_us = there.bounds.of_problem.time_us
print(f"  at least {bound_us:.0f} us by the data sheet, {there.prediction.time_us:.0f} us predicted")
print(f"  first advice: {there.advice[0]}")
assert here.kernel and there.kernel == "hopper/flash_fwd"
