"""Times a model whose layers have two head sizes, forward and with gradients, and names the kernel of each.

    python benchmarks/two_head_sizes.py [--seqlen 4096] [--layers 6] [--out RECORD.jsonl]

Every sixth layer attends to all previous keys, with 8 query heads of 512 on one kv head; the others to a window of
1,024 keys, with 8 heads of 256 on four; bfloat16. A layer is attention between two projections. The peers are eager,
and torch's scaled_dot_product_attention with a mask for the window. It prints the kernels that `explain` names, median
times of nine interleaved rounds, and the errors of out and gradients against eager's in float32.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import warpwave
from warpwave.workbench.explain.explanation import explain

WINDOW = 1024
Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


class Layer(torch.nn.Module):
    """x + attention of x, heads of `head_dim`; `wide` layers see all keys before them."""

    def __init__(self, width: int, head_dim: int, num_heads_q: int, num_heads_kv: int, *, wide: bool) -> None:
        super().__init__()
        self.head_dim, self.wide = head_dim, wide
        self.heads = (num_heads_q, num_heads_kv, num_heads_kv)
        self.into = torch.nn.Linear(width, head_dim * sum(self.heads), bias=False)
        self.back = torch.nn.Linear(head_dim * num_heads_q, width, bias=False)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v, (batch, seqlen, heads, head_dim)."""
        x = F.rms_norm(x, x.shape[-1:])
        q, k, v = self.into(x).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=-2)
        return q, k, v

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        return x + self.back(attend(*self.split(x), self.wide).flatten(-2))


def ours(kernel: str) -> Attend:
    """Returns a layer's attention by warpwave, with one kernel or `auto`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, wide: bool) -> Tensor:
        window = (-1, -1) if wide else (WINDOW - 1, 0)
        return warpwave.attention(q, k, v, causal=True, window_size=window, kernel=kernel)

    return attend


def by_torch(q: Tensor, k: Tensor, v: Tensor, wide: bool) -> Tensor:
    """Computes a layer's attention with torch, with a mask for the window."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = None
    if not wide:
        rows = torch.arange(q.shape[2], device=q.device)
        distance = rows[:, None] - rows[None, :]
        mask = (distance >= 0) & (distance < WINDOW)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=wide, enable_gqa=True)
    return out.transpose(1, 2)


def run(layers: torch.nn.ModuleList, x: Tensor, attend: Attend) -> Tensor:
    """Runs all layers in turn."""
    for layer in layers:
        x = layer(x, attend)
    return x


def gradient(layers: torch.nn.ModuleList, x: Tensor, attend: Attend) -> Tensor:
    """Returns the gradient of the sum of squares with respect to x; gradients of the weights are computed too."""
    leaf = x.detach().requires_grad_()
    found = torch.autograd.grad(run(layers, leaf, attend).float().square().sum(), [leaf, *layers.parameters()])
    return found[0]


def medians(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Returns the median ms of each call; calls are timed in turn."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: sorted(samples)[rounds // 2] for name, samples in times.items()}


def relative(a: Tensor, b: Tensor) -> float:
    """Returns |a - b| / |b|."""
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def main(arguments: list[str] | None = None) -> int:
    """Builds the model, says which kernels serve it, compares and times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = torch.device(a.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layers = torch.nn.ModuleList(
        Layer(a.width, 512, 8, 1, wide=True) if i % 6 == 5 else Layer(a.width, 256, 8, 4, wide=False)
        for i in range(a.layers)
    ).to(device, dtype)
    x = torch.randn(1, a.seqlen, a.width, device=device, dtype=dtype)

    chosen = {}
    for layer in {layer.wide: layer for layer in layers}.values():
        assert isinstance(layer, Layer)
        window = (-1, -1) if layer.wide else (WINDOW - 1, 0)
        for trained in (False, True):
            with torch.set_grad_enabled(trained):
                q, k, v = layer.split(x)
                found = explain(q, k, v, causal=True, window_size=window)
            what = "512, all keys" if layer.wide else "256, window"
            behind = f", then {found.gradients}" if found.gradients else ""
            chosen[what + (", gradients" if trained else "")] = f"{found.kernel}{behind}"
    for what, kernel in chosen.items():
        print(f"{what}: {kernel}")

    with torch.no_grad():
        forward = run(layers, x, ours("auto"))
    backward = gradient(layers, x, ours("auto"))
    exact_layers = torch.nn.ModuleList(layers).float()
    with torch.no_grad():
        exact = run(exact_layers, x.float(), ours("eager"))
    exact_gradient = gradient(exact_layers, x.float(), ours("eager"))
    layers.to(dtype)
    contenders: dict[str, Attend] = {"auto": ours("auto"), "eager": ours("eager"), "torch": by_torch}
    errors = {"auto": (relative(forward, exact), relative(backward, exact_gradient))}
    for name in ("eager", "torch"):
        with torch.no_grad():
            out = run(layers, x, contenders[name])
        errors[name] = relative(out, exact), relative(gradient(layers, x, contenders[name]), exact_gradient)
    for name, (of_out, of_gradient) in errors.items():
        print(f"{name}: out {of_out:.2e}, gradient {of_gradient:.2e} from eager's in float32")
    if device.type != "cuda":
        return 0

    def inference(attend: Attend) -> Callable[[], Any]:
        def call() -> None:
            with torch.no_grad():
                run(layers, x, attend)

        return call

    calls: dict[str, dict[str, Callable[[], Any]]] = {
        "forward": {name: inference(attend) for name, attend in contenders.items()},
        "forward and gradients": {name: partial(gradient, layers, x, attend) for name, attend in contenders.items()},
    }
    times = {what: medians(of_what, a.rounds) for what, of_what in calls.items()}
    for what, of_contenders in times.items():
        print(f"{what}: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in of_contenders.items()))
    if a.out is not None:
        line = {"seqlen": a.seqlen, "layers": a.layers, "kernels": chosen, "errors": errors, "median_ms": times,
                "gpu": torch.cuda.get_device_name(device), "torch": torch.__version__}  # fmt: skip
        with a.out.open("a") as record:
            record.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
