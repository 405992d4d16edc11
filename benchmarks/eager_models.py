"""Eager models of eight layers with runtime/graphs.py and without it, to decide whether its graphs stay.

    PYTHONPATH=. python3 -m benchmarks.eager_models [--rounds 24]

Layers have the shapes of Llama 3.2 1B. Calls of several launches are those in float32: decode (split_kv and its merge)
and prompts (scale, split, attend). Decode in bfloat16 takes no graphs and shows the noise. Both variants run in turn in
one process, and their results must be equal. Prints us of a step, all launches queued, and the ratio of the variants.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import warpwave
from warpwave import plans
from warpwave.runtime import graphs
from warpwave.runtime.bounded import Bounded

LAYERS, HIDDEN, INNER, HEADS_Q, HEADS_KV, HEAD_DIM = 8, 2048, 8192, 32, 8, 64
STEPS = 10  # of a sample
Step = Callable[[], torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(torch.nn.Module):
    """One layer of Llama; how it attends is an argument of its forward."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()

        def linear(columns: int, rows: int) -> torch.nn.Linear:
            return torch.nn.Linear(columns, rows, bias=False, device="cuda", dtype=dtype)

        self.qkv, self.out = linear(HIDDEN, (HEADS_Q + 2 * HEADS_KV) * HEAD_DIM), linear(HEADS_Q * HEAD_DIM, HIDDEN)
        self.up, self.down = linear(HIDDEN, 2 * INNER), linear(INNER, HIDDEN)
        self.norms = [torch.ones(HIDDEN, device="cuda", dtype=dtype) for _ in range(2)]

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Returns the layer's output for x, (batch, tokens, HIDDEN)."""
        batch, tokens, _ = x.shape
        heads = self.qkv(F.rms_norm(x, (HIDDEN,), self.norms[0])).view(batch, tokens, -1, HEAD_DIM)
        q, k, v = heads.split((HEADS_Q, HEADS_KV, HEADS_KV), 2)
        x = x + self.out(attend(q, k, v).reshape(batch, tokens, -1))
        gate, up = self.up(F.rms_norm(x, (HIDDEN,), self.norms[1])).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Returns x rotated, as a model does it in eager mode."""
    a, b = x.chunk(2, -1)
    cos, sin = angles
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def decode(batch: int, tokens: int, dtype: torch.dtype) -> Step:
    """One token of each sequence; the model writes it into a static cache of `tokens` tokens."""
    layers = [Layer(dtype) for _ in range(LAYERS)]
    shape = (batch, tokens, HEADS_KV, HEAD_DIM)
    caches = [[torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2)] for _ in range(LAYERS)]
    x = torch.randn(batch, 1, HIDDEN, device="cuda", dtype=dtype)
    angles, last = torch.randn(2, 1, HEAD_DIM // 2, device="cuda", dtype=dtype), torch.tensor([tokens - 1]).cuda()

    def step() -> torch.Tensor:
        found = x
        for layer, (k_cache, v_cache) in zip(layers, caches, strict=True):

            def attend(
                q: torch.Tensor,
                k: torch.Tensor,
                v: torch.Tensor,
                keys: torch.Tensor = k_cache,
                values: torch.Tensor = v_cache,
            ) -> torch.Tensor:
                keys.index_copy_(1, last, rotated(k, angles))
                values.index_copy_(1, last, v)
                found: torch.Tensor = warpwave.attention(rotated(q, angles), keys, values, causal=True)
                return found

            found = layer(found, attend)
        return found

    return step


def prompt(tokens: int) -> Step:
    """The tokens of one sequence, in float32."""
    layers = [Layer(torch.float32) for _ in range(LAYERS)]
    x = torch.randn(1, tokens, HIDDEN, device="cuda")
    angles = torch.randn(2, tokens, 1, HEAD_DIM // 2, device="cuda")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = warpwave.attention(rotated(q, angles), rotated(k, angles), v, causal=True)
        return found

    def step() -> torch.Tensor:
        found = x
        for layer in layers:
            found = layer(found, attend)
        return found

    return step


CASES: dict[str, Callable[[], Step]] = {
    "decode, batch 1, 2048 tokens": lambda: decode(1, 2048, torch.float32),
    "decode, batch 4, 1024 tokens": lambda: decode(4, 1024, torch.float32),
    "prompt of 64 tokens": lambda: prompt(64),
    "prompt of 256 tokens": lambda: prompt(256),
    "decode, bfloat16, batch 1": lambda: decode(1, 2048, torch.bfloat16),
}


class Variant:
    """Plans whose launches become a graph after so many calls."""

    def __init__(self, made_after: int) -> None:
        self.tables = [Bounded[tuple, object](plans.MAX_PLANS) for _ in range(3)]
        self.made_after = made_after
        self.samples: list[float] = []

    def use(self) -> None:
        """Makes these the plans of the process."""
        plans._plans, plans._classes, plans._last = self.tables  # type: ignore[assignment]
        graphs.MADE_AFTER = self.made_after


def compare(step: Step, rounds: int) -> list[float]:
    """Returns the median us of a step with graphs and without, and the quartiles of their ratio."""
    variants = [Variant(graphs.MADE_AFTER), Variant(1 << 60)]
    results = []
    for variant in variants:
        variant.use()
        results.append([step() for _ in range(3 * variants[0].made_after)][-1])
    assert torch.equal(*results)
    for i in range(2 * rounds):
        variant = variants[(i + i // 2) % 2]  # 0 1 1 0 ...
        variant.use()
        step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        variant.samples.append((time.perf_counter() - start) / STEPS * 1e6)
    variants[0].use()
    ratios = [one / other for one, other in zip(variants[0].samples, variants[1].samples, strict=True)]
    return [*(statistics.median(variant.samples) for variant in variants), *statistics.quantiles(ratios, n=4)]


def main() -> None:
    """Prints a line for each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=24)
    rounds = parser.parse_args().rounds
    print(torch.cuda.get_device_name(), torch.__version__)
    with torch.no_grad():
        for name, make in CASES.items():
            graph, alone, *quartiles = compare(make(), rounds)
            spread = " ".join(f"{each:.3f}" for each in quartiles)
            print(f"{name:30} graphs {graph:7.1f} us, without {alone:7.1f} us, ratio (quartiles) {spread}", flush=True)


if __name__ == "__main__":
    main()
