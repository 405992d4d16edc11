"""Whether an error budget can choose a quantized call for 16-bit inputs: what can be promised, beside what happens.

    PYTHONPATH=. python -m benchmarks.quantized_budget --out RECORD.json

docs/notes/quantized.md explains both parts. `bounds` compares the error of attention on quantized inputs with a bound
that holds whatever the signs of the rounding errors are. `twins` builds calls whose q, k and v have the same rows, in
another order of v, so that statistics of each tensor cannot tell them apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import warpwave
from warpwave.workbench.bench import precision

COMPARED = ("bfloat16", "fp8, block 128", "int8, block 128", "int8, block 128, smoothed, rotated")
WAYS = {name: precision.WAYS[name] for name in COMPARED}
TWINS = (1, 1024, 1, 64)  # batch, seqlen, heads, head_dim


def relative_error(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any] | None) -> float:
    """Returns |out - exact| / |exact|, Euclidean norms over all of out; options of None are 16-bit attention."""
    exact = warpwave.attention(q.double(), k.double(), v.double())
    if options is None:
        out = warpwave.attention(q, k, v)
    else:
        out = warpwave.attention(**warpwave.quantize(q, k, v, **options).arguments(), out_dtype=torch.float16)
    return ((out.double() - exact).norm() / exact.norm()).item()


def bound(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> float:
    """Returns a bound of `relative_error` that holds whatever the signs of the roundings are.

    A score is wrong by at most d = scale * (|dq| |k + dk| + |q| |dk|), with the rounding errors dq and dk, which are
    known. All scores of a row within d change its probabilities by e^(2d) - 1 in total, and out by that times the
    largest value; a value is wrong by |dv| in addition.
    """
    found = warpwave.quantize(q, k, v, **options).dequantized()
    dq, dk, dv = (new.double() - old.double() for new, old in zip(found, (q, k, v), strict=True))
    exact = warpwave.attention(q.double(), k.double(), v.double())
    norms = [x.double().norm(dim=-1) for x in (q, dq, found[1], dk, v, dv)]  # (batch, seqlen, heads)
    of_q, of_dq, of_k, of_dk, of_v, of_dv = norms
    scores = (of_dq * of_k.amax(1, keepdim=True) + of_q * of_dk.amax(1, keepdim=True)) * q.shape[-1] ** -0.5
    rows = torch.expm1(2 * scores) * of_v.amax(1, keepdim=True) + of_dv.amax(1, keepdim=True)
    return (rows.norm() / exact.norm()).item()


def twins() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Returns calls with the same rows of q, k and v. Half of the values are w, half -w. In the first call the
    keys with the highest scores have w; in the second, keys that follow one another by score have w and -w in turn; in
    the third, each key has the sign that brings the sum of its probability and those before closer to 0."""
    g = torch.Generator().manual_seed(0)
    k, w = torch.randn(TWINS, generator=g), torch.randn(TWINS[-1], generator=g)
    query = torch.randn(TWINS[-1], generator=g)
    q = (query + 0.1 * torch.randn(TWINS, generator=g)).bfloat16()
    scores, order = (k[0, :, 0] @ query * TWINS[-1] ** -0.5).sort(descending=True)
    place = torch.arange(len(order))
    found = {}
    for name, signs in (
        ("values by score", place < len(order) // 2),
        ("values in turn", place % 2 == 0),
        ("values in balance", balanced(scores.double().softmax(0))),
    ):
        v = torch.empty(TWINS)
        v[0, order, 0] = torch.where(signs[:, None], w, -w)
        found[name] = (q, k.bfloat16(), v.bfloat16())
    return found


def balanced(probabilities: Tensor) -> Tensor:
    """Returns half of the keys, whose probabilities add up to nearly one half. Probabilities descend."""
    chosen, total = torch.zeros(len(probabilities), dtype=torch.bool), 0.0
    for i, p in enumerate(probabilities.tolist()):
        rest, wanted = len(chosen) - i, len(chosen) // 2 - int(chosen.sum())
        chosen[i] = wanted == rest or (wanted > 0 and total <= 0)
        total += p if chosen[i] else -p
    return chosen


def measure() -> dict[str, Any]:
    """Returns every figure of docs/notes/quantized.md."""
    kinds = dict(precision.inputs(torch.device("cpu")))
    return {
        "shape": precision.ON_CPU,
        "bounds": {
            kind: {
                way: [relative_error(*call, options), bound(*call, options)]
                for way, options in WAYS.items()
                if options is not None
            }
            for kind, call in kinds.items()
        },
        "twins": {
            name: {way: relative_error(*call, options) for way, options in WAYS.items()}
            for name, call in twins().items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the figures, and writes them as JSON."""
    parser = argparse.ArgumentParser(description="What an error budget could promise of quantized attention.")
    parser.add_argument("--out", type=Path, help="also write them there, as JSON")
    asked = parser.parse_args(arguments)
    found = measure()
    for kind, ways in found["bounds"].items():
        for way, (error, most) in ways.items():
            print(f"{kind:10} {way:36} error {error:.2e}, bound {most:.2e}")
    for name, ways in found["twins"].items():
        for way, error in ways.items():
            print(f"{name:20} {way:36} error {error:.2e}")
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
