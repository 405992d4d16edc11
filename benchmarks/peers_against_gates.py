"""Applies the accuracy gates of our kernels to torch's own GPU kernels, on the same inputs.

    PYTHONPATH=. python benchmarks/peers_against_gates.py OUT.jsonl

It writes one JSON line for each backend, dtype, head_dim, data set and mask: the constant that each gate would have
needed (for C: the share of the allowed error). docs/accuracy.md cites the largest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.conformance import cases, harness
from tests.conformance.datasets import DATA_SETS
from tests.conformance.gates import forward_references, judge_forward


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Runs the FlashAttention-2 of torch; returns out and lse, (batch, heads, seqlen, ...)."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse


def cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Runs cuDNN; returns out and lse."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out, lse.reshape(q.shape[:3])


def efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Runs the memory-efficient kernel; returns out and lse, without its padding."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return out, lse[..., : q.shape[2]]


PEERS: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], tuple[str, ...]]] = {
    "sdpa_flash": (flash, ("float16", "bfloat16")),
    "sdpa_cudnn": (cudnn, ("float16", "bfloat16")),
    "sdpa_efficient": (efficient, ("float16", "bfloat16", "float32:default")),
}


def measure(case: cases.Case, data: Any, contender: str, call_peer: Callable[..., Any] | None) -> dict[str, Any]:
    """Returns the constants that one contender needs on one case."""
    call = cases.build(case, data, torch.device("cuda"))
    if call_peer is None:
        out, lse = harness.run("flash_fwd", call)
        assert lse is not None
    else:
        q, k, v = (t.transpose(1, 2) for t in call.operands[:3])
        out, lse = call_peer(q, k, v, bool(case.causal))
        out = out.transpose(1, 2).contiguous()
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), out, lse.contiguous())
    needed = {gate.name: gate.needed for gate in verdict.gates}
    return {"contender": contender, "case": str(case), "data": data, "passed": verdict.passed, "needed": needed}


def main() -> None:
    """Writes the lines."""
    plain = cases.Case(lengths=(1024, 1024), heads=(4, 4), batch=2)
    with open(sys.argv[1], "x", encoding="utf-8") as out:  # never overwrites a file
        for dtype in ("float16", "bfloat16", "float32:default"):
            contenders: dict[str, Any] = {"flash_fwd": None}
            contenders |= {name: call for name, (call, dtypes) in PEERS.items() if dtype in dtypes}
            for head_dim in (64, 128, 256):
                for causal in ("", "bottom_right"):
                    case = replace(plain, dtype=dtype, dims=(head_dim, head_dim), causal=causal)
                    for data in DATA_SETS:
                        for name, call_peer in contenders.items():
                            try:
                                line = measure(case, data, name, call_peer)
                            except RuntimeError as error:  # a backend that refuses a shape
                                line = {"contender": name, "case": str(case), "data": data, "refused": str(error)[:200]}
                            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
