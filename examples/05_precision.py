"""float32 products by name, or by an error budget.

    python examples/05_precision.py

On a CPU every name is served by torch's float32 products. On a GPU the names differ in time and error; see
docs/guide/precision.md.
"""

import torch

import warpwave

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
q, k, v = (torch.randn(1, 512, 4, 64, device=device) for _ in range(3))

scores = q.double().transpose(1, 2) @ k.double().transpose(1, 2).transpose(-1, -2) / 8
exact = (scores.softmax(-1) @ v.double().transpose(1, 2)).transpose(1, 2)

for precision in ("default", "ieee", "tf32x3", "tf32", 1e-2, 1e-4):
    out = warpwave.attention(q, k, v, precision=precision)
    accuracy = warpwave.explain(q, k, v, precision=precision).accuracy
    assert accuracy is not None  # only 16-bit calls have none
    error = ((out.double() - exact).norm() / exact.norm()).item()
    print(f"precision={precision!r:9}: relative error {error:.1e}, at most {accuracy.promised:.1e} is promised")
    assert error <= accuracy.promised

try:
    warpwave.attention(q, k, v, precision=1e-9)
except warpwave.UnsupportedProblem as error:
    print(f"\nprecision=1e-9 is refused:\n{error}")
