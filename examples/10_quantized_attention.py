"""A small decoder on text it has not seen, with 16-bit and with quantized attention: how far its logits move.

    python examples/10_quantized_attention.py

The model is that of server.py, trained for a few seconds. Every prediction is teacher-forced: all ways read the same
bytes, so logits can be compared one by one. The scale is what attention contributes to the logits: a call that returned
zeros would be off by 1. See docs/guide/quantized.md.
"""

import torch
import torch.nn.functional as F
from server import FULL, SMALL, Attend, Decoder, corpus, plain_attention, rotated, train

from warpwave import Rotary, attention, quantize

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
sizes = FULL if device.type == "cuda" else SMALL
torch.manual_seed(0)
model = Decoder(sizes).to(device)
rotary = Rotary.of(sizes.head_dim, sizes.context, device=device)
text = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8).long().to(device)
train(model, text[: -8 * sizes.context], 10.0 if device.type == "cuda" else 3.0, rotary)
unseen = text[-8 * sizes.context :].view(8, sizes.context)


def quantized_attention(**options: object) -> Attend:
    """Returns an attention that quantizes q, k and v first."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        quantized = quantize(rotated(q, rotary), rotated(k, rotary), v, **options)  # type: ignore[arg-type]
        out: torch.Tensor = attention(**quantized.arguments(), causal=True)
        return out.to(q.dtype)

    return attend


@torch.no_grad()
def logits_by(attend: Attend) -> torch.Tensor:
    """Returns the logits after each byte of the unseen text, (rows, context, 256)."""
    return model.logits(model(unseen, attend)).float()


plain = logits_by(plain_attention(rotary))
scale = (plain - logits_by(lambda q, k, v, layer: torch.zeros_like(q))).norm()
# Name -> the largest allowed |difference| / scale, in Euclidean norms over all logits, and the attention.
ways = {
    "fp8": (0.05, quantized_attention()),
    "int8 q and k": (0.01, quantized_attention(dtype=torch.int8, smooth_k=True)),
    "int8 q, k and v": (0.02, quantized_attention(dtype=torch.int8, dtype_v=torch.int8, smooth_k=True)),
}
for name, (allowed, attend) in ways.items():
    logits = logits_by(attend)
    moved = ((logits - plain).norm() / scale).item()
    losses = [F.cross_entropy(x[:, :-1].flatten(0, 1), unseen[:, 1:].flatten()).item() for x in (plain, logits)]
    print(f"{name:15} moves logits by {moved:.1e} of attention's part, {allowed} is allowed; ", end="")
    print(f"loss {losses[1] - losses[0]:+.4f}")
    assert moved < allowed
