"""Times of gradients beside SDPA's backends, torch's varlen_attn and FlashAttention-4, paired in one process on a GPU.

    python -m benchmarks.gradients OUT.json [--groups rows drawn models ...] [--rounds 7] [--seed HASH]

Groups of rows; heads * head_dim = 2048 unless stated otherwise:
    rows      backward alone: 64 / 128 / 256 x {16 x 1024, 4 x 4096, 1 x 16384} x full / causal
    both      the same calls, forward and backward together
    between   backward alone, 16 heads, rows of 136 to 192 columns: 192/128, 160, 192, 136 in the same shapes
    grouped   backward alone, grouped heads: causal, 32 on 8 heads and others, and full
    drawn     backward of 40 shapes drawn from a commit's hash: grouped heads, odd lengths, head_dim 80 to 256, 192/128
    features  backward with packed documents, a window, a softcap, a mask, a bias, and in float32
    biases    backward with a bias for each score of a head, without and with its gradient
    models    backward of calls of published models as they are trained, replayed from CUDA graphs
    few       backward of few queries on many keys, or many queries on few keys, replayed from CUDA graphs
    steps     forward and backward of grouped heads; the host's time of a small step; peak memory

Everything goes through the public calls and torch.autograd. Rounds are interleaved; a ratio is the median over rounds
of the best peer's time over ours, of those whose gradients agree with ours. `deterministic` is ours with the same bits
in every run. FlashAttention-4 takes part if `flash_attn.cute` can be imported.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import warpwave
from warpwave.workbench.bench import environment
from warpwave.workbench.output_files import write_whole

SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
OURS = ("warpwave", "deterministic")
BIASES = ("bias", "trained bias")
MASKS = ("", "padding", "mask")
WRONG = 0.05  # a relative difference from our gradients that no rounding explains; such a peer is timed, not compared
SHAPES = ((16, 1024), (4, 4096), (1, 16384))
DRAWN = 40
Step = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """A call. `documents` are the lengths of packed sequences, in place of batch and seqlen. `keys` are the keys of a
    sequence, 0 for as many as queries. A `window` reaches both ways unless the call is causal."""

    head_dim: int
    batch: int
    seqlen: int
    causal: bool = False
    heads: int = 0
    kv_heads: int = 0
    head_dim_v: int = 0
    dtype: str = "bfloat16"
    window: int = -1
    softcap: float = 0.0
    # A "mask" or "bias" with an element for each score of a head, a "trained bias" whose gradient is wanted as well, or
    # a mask of "padding".
    beside: str = ""
    precision: str = "default"
    documents: tuple[int, ...] = field(default=())
    keys: int = 0

    @property
    def num_heads(self) -> tuple[int, int]:
        """Returns the query heads and the kv heads."""
        heads = self.heads or 2048 // self.head_dim
        return heads, self.kv_heads or heads

    @property
    def dim_v(self) -> int:
        """Returns the width of a value."""
        return self.head_dim_v or self.head_dim

    @property
    def name(self) -> str:
        """Returns what the row is called in a record."""
        dims = f"{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else "")
        shape = f"{len(self.documents)} documents" if self.documents else f"{self.batch} x {self.seqlen}"
        shape += f" on {self.keys} keys" if self.keys else ""
        more = [f"window {self.window}"] if self.window >= 0 else []
        more += [f"softcap {self.softcap:g}"] if self.softcap else []
        more += [x for x in (self.beside, "" if self.dtype == "bfloat16" else self.dtype) if x]
        more += [] if self.precision == "default" else [self.precision]
        heads = "" if self.heads == 0 else f", {self.num_heads[0]} on {self.num_heads[1]} heads"
        return ", ".join([f"{dims}, {shape}{heads}", "causal" if self.causal else "full", *more])

    def pairs(self) -> int:
        """Returns the visible pairs of a head, over all sequences; of a mask, all."""
        if self.keys:
            return self.batch * self.seqlen * self.keys
        lengths = self.documents or (self.seqlen,) * self.batch
        reach = self.window + 1 if self.window >= 0 else max(lengths)
        found = 0
        for n in lengths:
            short = min(n, reach)
            one_way = short * (short + 1) // 2 + (n - short) * short  # keys up to the query itself
            found += one_way if self.causal else 2 * one_way - n
        return found

    def flops(self) -> float:
        """Returns the useful FLOP of the backward: five products, three of them over head_dim."""
        return 2.0 * self.num_heads[0] * self.pairs() * (3 * self.head_dim + 2 * self.dim_v)


# Steps ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """The tensors that need gradients (q, k and v first), the gradient of out, and the other arguments of the call."""

    leaves: tuple[torch.Tensor, ...]
    dout: torch.Tensor
    offsets: torch.Tensor | None
    beside: torch.Tensor | None


def inputs(row: Row) -> Inputs:
    """Returns the tensors of a call."""
    dtype = getattr(torch, row.dtype)
    lead = (sum(row.documents),) if row.documents else (row.batch, row.seqlen)
    heads, kv_heads = row.num_heads
    lead_kv = (row.batch, row.keys) if row.keys else lead
    shapes = ((*lead, heads, row.head_dim), (*lead_kv, kv_heads, row.head_dim), (*lead_kv, kv_heads, row.dim_v),
              (*lead, heads, row.dim_v))  # fmt: skip
    q, k, v, dout = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in shapes)
    offsets = None
    if row.documents:
        ends = torch.tensor((0, *row.documents), device="cuda").cumsum(0)
        offsets = ends.to(torch.int32)
    beside = None
    keys = row.keys or row.seqlen
    if row.beside == "mask":
        beside = torch.rand(1, heads, row.seqlen, keys, device="cuda") < 0.9
    elif row.beside == "padding":
        lengths = torch.linspace(keys // 2, keys, row.batch, device="cuda")
        beside = (torch.arange(keys, device="cuda") < lengths[:, None])[:, None, None]
    elif row.beside in BIASES:
        beside = torch.randn(1, heads, row.seqlen, keys, device="cuda", dtype=dtype)
    leaves = (q, k, v) if beside is None or row.beside != "trained bias" else (q, k, v, beside)
    return Inputs(tuple(t.requires_grad_() for t in leaves), dout, offsets, beside)


def ours(row: Row, given: Inputs, deterministic: bool = False, package: Any = warpwave) -> Callable[[], torch.Tensor]:
    """Returns our forward; `package` may be that of another tree."""
    q, k, v = given.leaves[:3]
    options: dict[str, Any] = {"causal": row.causal, "softcap": row.softcap, "precision": row.precision}
    options["deterministic"] = deterministic
    if row.window >= 0:
        options["window_size"] = (row.window, 0 if row.causal else row.window)
    if given.offsets is not None:
        ends, longest = given.offsets, max(row.documents)
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return lambda: package.attention_varlen(q, k, v, **options)
    if row.beside:
        options["bias" if row.beside in BIASES else "mask"] = given.beside
    return lambda: package.attention(q, k, v, **options)


def peers(row: Row, given: Inputs) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Returns the forwards of peers with the features of the row; each may still refuse."""
    q, k, v = given.leaves[:3]
    if not row.documents and row.window < 0 and not row.softcap:

        def sdpa() -> torch.Tensor:
            a, b, c = (t.transpose(1, 2) for t in (q, k, v))
            grouped = row.num_heads[0] != row.num_heads[1]
            return F.scaled_dot_product_attention(
                a, b, c, given.beside, is_causal=row.causal, enable_gqa=grouped
            ).transpose(1, 2)

        for name, backend in SDPA.items():
            yield name, partial(_forced, backend, sdpa)
    if row.documents:
        varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        longest, grouped = max(row.documents), row.num_heads[0] != row.num_heads[1]
        of = (given.offsets, given.offsets, longest, longest)
        window = (-1, 0) if row.causal else (-1, -1)
        more = {"enable_gqa": True} if grouped else {}  # torch 2.11 has no such argument
        yield "varlen_attn", lambda: varlen(q, k, v, *of, window_size=window, **more)
    try:
        cute = importlib.import_module("flash_attn.cute")
    except ImportError:
        return
    options: dict[str, Any] = {"causal": row.causal, "softcap": row.softcap}
    if row.window >= 0:
        options["window_size"] = (row.window, 0 if row.causal else row.window)
    if row.beside or row.dtype == "float32":
        return
    if row.documents:
        of_varlen = {"cu_seqlens_q": given.offsets, "cu_seqlens_k": given.offsets, "max_seqlen_q": max(row.documents),
                     "max_seqlen_k": max(row.documents)}  # fmt: skip
        yield "flash_attention_4", lambda: _first(cute.flash_attn_varlen_func(q, k, v, **of_varlen, **options))
    else:
        yield "flash_attention_4", lambda: _first(cute.flash_attn_func(q, k, v, **options))


def _forced(backend: SDPBackend, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    with sdpa_kernel(backend):
        return call()


def _first(result: Any) -> torch.Tensor:
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found


def backward(forward: Callable[[], torch.Tensor], given: Inputs) -> Step:
    """Returns the backward alone, from kept results of the forward."""
    out = forward()
    return lambda: torch.autograd.grad(out, given.leaves, given.dout, retain_graph=True)


def both(forward: Callable[[], torch.Tensor], given: Inputs) -> Step:
    """Returns forward and backward together."""
    return lambda: torch.autograd.grad(forward(), given.leaves, given.dout)


def captured(forward: Callable[[], torch.Tensor], given: Inputs) -> Step:
    """Returns a replay of the backward alone, so that short calls do not wait for the host."""
    # The backward runs on the stream of its forward, so both take the stream of the capture.
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step = backward(forward, given)
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        results = step()

    def replay(kept: Step = step) -> Any:  # the graph reads what `step` keeps of the forward
        graph.replay()
        return results

    return replay


# Timing ---------------------------------------------------------------------------------------------------------------


def elapsed(step: Step, repeats: int) -> float:
    """Returns milliseconds a call, by events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def paired(steps: dict[str, Step], rounds: int, budget_ms: float = 8.0) -> dict[str, list[float]]:
    """Returns the times of each step. Rounds alternate between both directions, and begin at another step each
    time, because a call is a little slower behind a hotter one."""
    for step in steps.values():
        step()
        step()
    repeats = {name: max(2, min(100, int(budget_ms / elapsed(step, 2)))) for name, step in steps.items()}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds):
        names = list(steps)[:: 1 if i % 2 else -1]
        first = i // 2 % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(elapsed(steps[name], repeats[name]))
    return found


def measured(row: Row, made: Callable[..., Step], rounds: int) -> dict[str, Any]:
    """Returns one row of the record."""
    given = inputs(row)
    steps = {"warpwave": made(ours(row, given), given)}
    steps["deterministic"] = made(ours(row, given, deterministic=True), given)
    expected, errors, refused = steps["warpwave"](), {}, {}
    for name, forward in peers(row, given):
        try:
            step = made(forward, given)
            errors[name] = largest_difference(expected, step())
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        steps[name] = step
    if not row.beside and "flash" in steps:
        steps.pop("efficient", None)  # it is here for what the others refuse
    times = paired(steps, rounds)
    median = {n: statistics.median(t) for n, t in times.items()}
    ratio = ratios(times, errors)
    tflops = {n: row.flops() * (1.0 if made is not both else 1.4) / t / 1e9 for n, t in median.items()}
    shown = {n: round(x, 3) for n, x in ratio.items()}
    print(row.name, {n: round(x) for n, x in tflops.items()}, shown, flush=True)
    return {
        "case": row.name, "ms": times, "tflops": tflops, "ratio": ratio, "difference": errors, "refused": refused,
    }  # fmt: skip


def ratios(times: dict[str, list[float]], errors: dict[str, float]) -> dict[str, float]:
    """Returns the median of the best peer's time over ours, in all rounds; empty without a peer that is right."""
    of_peers = [n for n in times if n not in OURS and errors.get(n, 0.0) <= WRONG]
    if not of_peers:
        return {}
    best = min(of_peers, key=lambda n: statistics.median(times[n]))
    return {n: statistics.median(b / t for b, t in zip(times[best], times[n], strict=True)) for n in OURS}


def largest_difference(ours: Any, theirs: Any) -> float:
    """Returns the largest relative difference of dq, dk and dv."""
    pairs = zip(ours, theirs, strict=True)
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)


# Groups ---------------------------------------------------------------------------------------------------------------


def table() -> list[Row]:
    """Returns the 18 rows."""
    return [Row(d, b, n, causal) for d in (64, 128, 256) for b, n in SHAPES for causal in (False, True)]


def between() -> list[Row]:
    """Returns calls whose rows of Q and K, or of all tensors, have 136 to 192 columns."""
    dims = ((192, 128), (160, 160), (192, 192), (136, 136))
    return [Row(d, b, n, causal, 16, 16, v) for d, v in dims for b, n in SHAPES for causal in (False, True)]


def grouped() -> list[Row]:
    """Returns causal calls of grouped heads, as language models are trained, and full calls in few waves of blocks."""
    rows = [Row(d, b, n, True, 32, 8) for d in (64, 128) for b, n in ((8, 2048), (2, 8192), (1, 16384))]
    broad = [Row(192, 2, 8192, True, 16, heads, 128) for heads in (8, 4)]
    full = ((128, 14, 1254, 12, 3), (64, 6, 3490, 16, 4), (128, 3, 5895, 12, 3), (96, 12, 1480, 8, 2))
    rows += [Row(d, b, n, False, heads, kv_heads) for d, b, n, heads, kv_heads in full]
    waves = [Row(128, 1, 7417, False, 12, 12), Row(160, 4, 4862, False, 8, 8)]
    long = [Row(160, 7, 4392, True, 8, 2), Row(192, 1, 14692, True, 16, 8, 128), Row(192, 2, 12867, True, 12, 12, 128)]
    return [*rows, Row(128, 2, 8192, True, 32, 16), *broad, Row(160, 2, 8192, True, 16, 4), *long, *waves]


def short() -> list[Row]:
    """Returns calls with few blocks of keys: few kv heads, or few tokens. Also full calls whose last wave of blocks is
    incomplete."""
    full = [
        *(Row(64, b, n, False, h, h) for b, n, h in ((1, 1024, 8), (1, 2048, 4), (1, 2048, 10), (1, 1536, 16))),
        *(Row(128, 1, n, False, h, h) for n, h in ((1024, 4), (1024, 8), (1024, 20), (1536, 16))),
        *(Row(d, 2, 1024, False, 12, 12) for d in (64, 128)),
        Row(96, 1, 1024, False, 12, 12),
        *(Row(160, b, n, False, h, h) for b, n, h in ((1, 1024, 4), (1, 1024, 8), (2, 512, 8), (4, 256, 8))),
        *(Row(64, b, n, False, 32, 32) for b, n in ((4, 4096), (1, 16384), (1, 4992))),
        *(Row(128, b, n, False, 16, 16) for b, n in ((4, 4096), (1, 16384))),
        Row(128, 1, 20000, False, 24, 24),
        Row(128, 1, 2048, False, 16, 4),
    ]
    # Falcon, Qwen 2.5, and others.
    grouped = ((64, 1, 2048, 71, 1), (64, 4, 2048, 71, 1), (64, 1, 1024, 14, 2), (64, 1, 2048, 14, 2),
               (64, 4, 2048, 14, 2), (128, 1, 1024, 28, 4), (128, 1, 2048, 28, 4), (128, 2, 2048, 28, 4),
               (128, 1, 4096, 28, 4), (128, 1, 8192, 28, 4), (128, 1, 2048, 40, 8), (128, 1, 8192, 16, 1),
               (128, 1, 1024, 32, 8), (128, 1, 4096, 64, 8), (256, 1, 2048, 16, 2))  # fmt: skip
    documents = Row(128, 0, 0, True, 28, 4, documents=(256, 700, 1500, 900, 740))
    wide = [Row(160, 1, 2048, True, 8, 8), Row(192, 1, 1024, True, 16, 16, 128)]
    return [*full, *wide, *(Row(d, b, n, True, h, kv) for d, b, n, h, kv in grouped), documents]


def drawn(seed: str) -> list[Row]:
    """Returns drawn shapes, to which no rule can have been fitted."""
    draw = random.Random(seed)
    rows = []
    for _ in range(DRAWN):
        head_dim, head_dim_v = draw.choice([(d, 0) for d in (64, 80, 96, 128, 128, 160, 192, 256)] + [(192, 128)])
        heads = draw.choice((8, 12, 16, 32))
        group = draw.choice((1, 1, 2, 4))
        seqlen = round(2 ** draw.uniform(10, 14))
        batch = max(1, round(2 ** draw.uniform(13, 15) / seqlen))
        rows.append(Row(head_dim, batch, seqlen, draw.random() < 0.5, heads, heads // group, head_dim_v,
                        draw.choice(("bfloat16", "float16"))))  # fmt: skip
    return rows


def features() -> list[Row]:
    """Returns calls with more than a causal mask. The dense and the causal row of the same work stand beside them."""
    documents = tuple(random.Random(0).choices((256, 512, 1024, 2048, 4096), k=12))
    return [
        Row(128, 1, 16384, causal=True),
        Row(128, 1, 16384, causal=True, window=1024),
        Row(128, 0, 0, documents=documents),
        Row(128, 0, 0, causal=True, documents=documents),
        Row(64, 0, 0, causal=True, documents=documents),
        Row(128, 4, 4096, causal=True, softcap=30.0),
        Row(64, 2, 2048, beside="mask"),
        Row(64, 2, 2048, beside="bias"),
        Row(128, 2, 2048, beside="mask"),
        Row(128, 8, 2048, beside="padding"),
        Row(256, 4, 2048, beside="padding"),
        Row(64, 4, 2048, dtype="float32"),
        Row(128, 4, 2048, dtype="float32"),
        Row(64, 4, 2048, dtype="float32", precision="tf32"),
        Row(128, 4, 2048, causal=True, dtype="float32"),
    ]


def biases() -> list[Row]:
    """Returns calls with a bias that all batch items share."""
    shapes = ((64, 16, 1024), (64, 2, 4096), (128, 16, 1024), (128, 4, 4096), (256, 4, 4096))
    return [Row(d, b, n, beside=kind) for d, b, n in shapes for kind in BIASES]


def models() -> list[Row]:
    """Returns calls of published models as they are trained."""
    half = "float16"
    return [
        # Stable Diffusion XL, self-attention and cross-attention to 77 tokens of text; Stable Diffusion 3.5, FLUX.1.
        *(Row(64, 4, n, heads=h, dtype=half, keys=keys) for n, h in ((4096, 10), (1024, 20)) for keys in (0, 77)),
        Row(64, 2, 4429, heads=38),
        Row(128, 1, 4608, heads=24),
        # Wan 2.1: a short video, and cross-attention to text.
        Row(128, 1, 16384, heads=40),
        Row(128, 1, 16384, heads=40, keys=512),
        # ViT-L, ViT-B, SigLIP, DiT-XL, SAM.
        Row(64, 64, 257, heads=16),
        Row(64, 128, 197, heads=12),
        Row(72, 16, 729, heads=16),
        Row(72, 64, 256, heads=16),
        Row(80, 1, 4096, heads=16),
        # Whisper large: encoder, decoder, cross-attention.
        Row(64, 8, 1500, heads=20, dtype=half),
        Row(64, 16, 448, True, heads=20, dtype=half),
        Row(64, 16, 448, heads=20, dtype=half, keys=1500),
        # BERT-large, BERT-base, ModernBERT, CLIP's text.
        Row(64, 32, 512, heads=16, dtype=half),
        Row(64, 64, 128, heads=12, dtype=half),
        Row(64, 8, 8192, heads=12, window=64),
        Row(64, 512, 77, True, heads=12, dtype=half),
        # GPT-2, Llama 2 7B, Llama 3 8B, Qwen3 30B, Gemma 3 4B, Phi-3, gpt-oss, StarCoder, DeepSeek-V3.
        Row(64, 16, 1024, True, heads=12),
        Row(128, 4, 4096, True, heads=32),
        Row(128, 1, 8192, True, heads=32, kv_heads=8),
        Row(128, 2, 4096, True, heads=32, kv_heads=4),
        Row(256, 1, 4096, True, heads=8, kv_heads=4),
        Row(256, 1, 8192, True, heads=8, kv_heads=4, window=1023),
        Row(96, 2, 4096, True, heads=32),
        Row(64, 1, 4096, True, heads=64, kv_heads=8),
        Row(64, 1, 4096, True, heads=64, kv_heads=8, window=127),
        Row(128, 1, 8192, True, heads=48, kv_heads=1),
        Row(192, 1, 4096, True, heads=16, head_dim_v=128),
        # AnimateDiff over 16 frames, Swin's windows, AlphaFold's triangles.
        Row(40, 8192, 16, heads=8, dtype=half),
        Row(32, 2048, 49, heads=4, dtype=half, beside="trained bias"),
        Row(32, 256, 256, heads=4, beside="trained bias"),
    ]


def few() -> list[Row]:
    """Returns calls with few queries on many keys, or many queries on few keys."""
    half = "float16"
    return [
        # SAM's decoder, Q-Former, DETR, Mask2Former, resamplers; with padding and a mask of each query.
        Row(16, 16, 7, heads=8, keys=4096),
        Row(16, 16, 4096, heads=8, keys=7),
        Row(64, 64, 32, heads=12, keys=257, dtype=half),
        Row(64, 32, 32, heads=12, keys=1025),
        Row(64, 256, 16, heads=12, keys=197),
        Row(64, 2, 8, heads=8, keys=1024),
        *(Row(32, 16, 100, heads=8, keys=850, dtype=half, beside=beside) for beside in ("", "padding")),
        *(Row(32, 8, 100, heads=8, keys=16384, dtype=half, beside=beside) for beside in MASKS),
        *(Row(64, 16, 64, heads=8, keys=1601, beside=beside) for beside in MASKS),
        *(Row(96, 4, 64, heads=16, keys=729, beside=beside) for beside in MASKS),
        *(Row(128, 64, 16, heads=16, keys=576, beside=beside) for beside in MASKS),
        *(Row(128, 64, 64, heads=16, keys=512, beside=beside) for beside in MASKS),
        *(Row(128, 1, 64, heads=8, keys=4096, beside=beside) for beside in MASKS),
        *(Row(256, 8, 32, heads=8, keys=2048, beside=beside) for beside in MASKS),
        # Stable Diffusion on text, with and without padding; IP-Adapter, PVT, text encoders of 120 tokens.
        *(Row(40, 4, 4096, heads=8, keys=77, dtype=half, beside=beside) for beside in MASKS),
        *(Row(80, 4, 1024, heads=8, keys=77, dtype=half, beside=beside) for beside in MASKS),
        Row(160, 4, 256, heads=8, keys=77, dtype=half),
        Row(40, 4, 4096, heads=8, keys=4, dtype=half),
        Row(64, 32, 3136, heads=1, keys=49),
        Row(64, 32, 784, heads=2, keys=49),
        *(Row(64, 8, 2048, heads=8, keys=64, beside=beside) for beside in ("", "padding")),
        *(Row(72, 4, 1024, heads=16, keys=120, beside=beside) for beside in MASKS),
        Row(128, 8, 1024, heads=16, keys=32),
        Row(128, 8, 1024, heads=32, kv_heads=8, keys=32),
        # Of other sizes.
        *(Row(48, 4, 1024, heads=16, keys=100, beside=beside) for beside in MASKS),
        Row(112, 4, 1024, heads=16, keys=64),
        Row(144, 4, 1024, heads=12, keys=80),
        Row(24, 16, 50, heads=8, keys=1000),
        Row(80, 16, 20, heads=16, keys=600),
        *(Row(192, 8, 16, heads=8, keys=1024, beside=beside) for beside in MASKS),
    ]


def padded() -> list[Row]:
    """Returns calls whose batch items have keys of different lengths, as a mask of keys states them."""
    half = "float16"
    return [
        Row(64, 32, 512, heads=16, dtype=half, beside="padding"),
        *(Row(64, b, n, heads=12, dtype=half, beside="padding") for b, n in ((64, 128), (256, 128), (128, 32))),
        Row(32, 256, 64, heads=12, dtype=half, beside="padding"),
        Row(32, 16, 850, heads=8, dtype=half, beside="padding"),
        Row(64, 8, 2048, heads=16, beside="padding"),
    ]


def whole_steps(rounds: int) -> list[dict[str, Any]]:
    """Returns forward and backward of grouped heads, the host's time of a small step, and peak memory."""
    found = []
    for row in (Row(128, 1, 8192, causal=True, heads=32, kv_heads=8), Row(128, 1, 128, causal=True)):
        record = measured(row, both, rounds)
        given = inputs(row)
        forwards = {"warpwave": ours(row, given), **dict(peers(row, given))}
        for name in record["ms"]:
            if name == "deterministic":
                continue
            step = both(forwards[name], given)
            step()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            torch.cuda.synchronize()
            record.setdefault("peak_mib", {})[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            samples = []
            for _ in range(rounds):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(50):
                    step()
                samples.append((time.perf_counter() - begin) / 50 * 1e6)
                torch.cuda.synchronize()
            record.setdefault("host_us", {})[name] = samples
        host = {n: round(statistics.median(s)) for n, s in record["host_us"].items()}
        print("  host us", host, "peak MiB", {n: round(x) for n, x in record["peak_mib"].items()}, flush=True)
        found.append(record)
    return found


CAPTURED = ("models", "few", "padded", "short")  # groups whose calls are replayed from CUDA graphs


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    names = (
        "rows",
        "both",
        "between",
        "grouped",
        "drawn",
        "features",
        "biases",
        "models",
        "few",
        "padded",
        "short",
        "steps",
    )
    parser.add_argument("--groups", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", help="a commit's hash; default: HEAD's")
    asked = parser.parse_args()
    seed = asked.seed or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    record: dict[str, Any] = {"seed": seed, "environment": environment.describe("cuda")}
    groups = {
        "rows": table(),
        "both": table(),
        "between": between(),
        "grouped": grouped(),
        "drawn": drawn(seed),
        "features": features(),
        "biases": biases(),
        "models": models(),
        "few": few(),
        "padded": padded(),
        "short": short(),
    }
    for name in asked.groups:
        if name == "steps":
            record[name] = whole_steps(asked.rounds)
        else:
            made = captured if name in CAPTURED else both if name == "both" else backward
            record[name] = []
            for row in groups[name]:
                record[name].append(measured(row, made, asked.rounds))
                write_whole(asked.out, json.dumps(record, indent=1) + "\n")  # the clock may end a run
        ratios = [r["ratio"] for r in record[name] if r["ratio"]]
        mean = {n: statistics.geometric_mean([r[n] for r in ratios]) for n in OURS}
        record[f"geometric_mean_of_{name}"] = mean
        print(f"{name}: best peer's time over ours, geometric mean", {n: round(x, 3) for n, x in mean.items()})
        write_whole(asked.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
