"""A small language model trained through warpwave and through torch's attention, from the same seed and data.

    python examples/train.py                          # a GPU if there is one: 134 million parameters, 4k context
    python examples/train.py --device cpu             # a tenth of a million, a few seconds
    python examples/train.py --context 16384 --compile --attention warpwave

The model is a decoder with grouped heads, rotary positions, RMSNorm and SwiGLU, over the bytes of Python's standard
library. A training step takes consecutive tokens of that text. With `--batches packed` its files are sequences of
different lengths in one tensor, and `attention_varlen` keeps them apart; with `--batches dense` each row is one
sequence. torch's attention is `scaled_dot_product_attention` for dense batches. For packed ones it is
`torch.nn.attention.varlen.varlen_attn` on a GPU, and one call for each sequence on a CPU.

With both attentions the loss curves are compared, and written to a page.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
import json
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from warpwave import InvalidInput, attention, attention_varlen

BYTES = 256  # the vocabulary: text is its UTF-8 bytes
PEAK_RATE, WARMUP = 1e-3, 0.1  # the largest learning rate, and the part of the steps in which it is reached

# Attention ------------------------------------------------------------------------------------------------------------

# q, k, v, (rows, context, heads, head_dim), or (tokens, heads, head_dim) with the int32 offsets of the sequences;
# the longest sequence -> out, shaped like q. Causal.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, int], Tensor]


def warpwave_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, longest: int) -> Tensor:
    """Returns causal attention by warpwave."""
    if offsets is None:
        out: Tensor = attention(q, k, v, causal=True)
    else:
        out = attention_varlen(
            q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
        )
    return out


# torch 2.10 has no window, and grouped heads have an argument since 2.12.
_KNOWN = inspect.signature(varlen_attn).parameters
VARLEN: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in _KNOWN else {"is_causal": True}
VARLEN |= {"enable_gqa": True} if "enable_gqa" in _KNOWN else {}


def torch_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, longest: int) -> Tensor:
    """Returns causal attention by torch."""
    if offsets is None:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    if q.is_cuda:
        out: Any = varlen_attn(q, k, v, offsets, offsets, longest, longest, **VARLEN)
        return out
    lengths = offsets.diff().tolist()
    parts = zip(*(t[None].split(lengths, dim=1) for t in (q, k, v)), strict=True)
    return torch.cat([torch_attention(q, k, v, None, longest) for q, k, v in parts], dim=1)[0]


ATTENTIONS: dict[str, Attend] = {"warpwave": warpwave_attention, "sdpa": torch_attention}

# The model ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder."""

    layers: int
    width: int
    heads_q: int
    heads_kv: int
    head_dim: int
    hidden: int  # width inside SwiGLU


SMALL = Sizes(layers=2, width=64, heads_q=4, heads_kv=2, head_dim=16, hidden=176)
FULL = Sizes(layers=12, width=1024, heads_q=8, heads_kv=2, head_dim=128, hidden=2816)


@dataclass(frozen=True)
class Batch:
    """The data of a training step."""

    tokens: Tensor  # int64, (rows, context), or (tokens,) if packed
    targets: Tensor  # the bytes that follow
    positions: Tensor  # of each token in its sequence
    offsets: Tensor | None  # of the packed sequences, int32; None for a dense batch
    longest: int  # an upper bound of the sequences' lengths


class Layer(nn.Module):
    """Attention and SwiGLU, each with an RMSNorm before it and a residual."""

    def __init__(self, sizes: Sizes, attend: Attend) -> None:
        super().__init__()
        self.sizes, self.attend = sizes, attend
        q_width, self.kv_width = sizes.heads_q * sizes.head_dim, sizes.heads_kv * sizes.head_dim
        self.norm, self.norm2 = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.qkv = nn.Linear(sizes.width, q_width + 2 * self.kv_width, bias=False)
        self.out = nn.Linear(q_width, sizes.width, bias=False)
        self.gate_up = nn.Linear(sizes.width, 2 * sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, offsets: Tensor | None, longest: int) -> Tensor:
        """Returns x, (..., width), after the layer; cos and sin are (..., 1, head_dim / 2)."""
        q, k, v = self.qkv(self.norm(x)).split((self.out.in_features, self.kv_width, self.kv_width), dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.sizes.head_dim)) for t in (q, k, v))
        out = self.attend(rotated(q, cos, sin), rotated(k, cos, sin), v, offsets, longest)
        x = x + self.out(out.flatten(-2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x, (..., heads, head_dim), with rotary positions."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Decoder(nn.Module):
    """A Llama-like decoder over bytes; the embedding is also the head."""

    def __init__(self, sizes: Sizes, context: int, attend: Attend, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(BYTES, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes, attend) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        angles = torch.arange(context)[:, None] * 10000.0 ** -torch.linspace(0, 1, sizes.head_dim // 2 + 1)[:-1]
        self.angles: Tensor
        self.register_buffer("angles", angles[:, None], persistent=False)  # [context, 1, head_dim / 2]
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = (2 * sizes.layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, batch: Batch) -> Tensor:
        """Returns the mean loss of the next byte, in nats."""
        angles = self.angles[batch.positions]
        x, given = self.embedding(batch.tokens), (angles.cos(), angles.sin(), batch.offsets, batch.longest)
        for layer in self.layers:
            x = checkpoint(layer, x, *given, use_reentrant=False) if self.checkpointing else layer(x, *given)
        logits = self.norm(x) @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, -2).float(), batch.targets.flatten())


# The data -------------------------------------------------------------------------------------------------------------


@functools.cache
def documents() -> tuple[bytes, ...]:
    """Returns the modules of Python's standard library, in the order of their paths. Tests are left out: some
    distributions do not install them."""
    library = Path(sysconfig.get_path("stdlib"))
    foreign = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    paths = [path.relative_to(library) for path in library.rglob("*.py")]
    return tuple((library / path).read_bytes() for path in sorted(paths) if not foreign & set(path.parts))


def cuts(text: bytes, context: int) -> Iterator[int]:
    """Yields where a document is cut into sequences of at most context bytes: after the last empty line that fits."""
    begin = 0
    while begin < len(text):
        yield begin
        end = begin + context
        line = text.rfind(b"\n\n", begin, end) if end < len(text) else -1
        begin = end if line < 0 else line + 2


class Data:
    """Batches of consecutive tokens of the shuffled documents, each of which begins with a zero byte.

    Args:
        rows, context: a step takes rows * context tokens. No sequence is longer than context.
        packed: whether the sequences are documents, cut to fit; otherwise each row is one sequence.
    """

    def __init__(self, rows: int, context: int, packed: bool, device: torch.device) -> None:
        texts, order = documents(), torch.randperm(len(documents()), generator=torch.Generator().manual_seed(0))
        shuffled = [b"\0" + texts[i] for i in order.tolist()]
        self.text = torch.frombuffer(bytearray(b"".join(shuffled)), dtype=torch.uint8).to(device)
        begins = [0, *itertools.accumulate(map(len, shuffled))]
        self.starts = torch.tensor([begins[i] + cut for i, text in enumerate(shuffled) for cut in cuts(text, context)])
        self.rows, self.context, self.packed, self.device = rows, context, packed, device
        if len(self.text) <= rows * context:
            raise SystemExit(f"{rows} rows of {context} tokens are more than the text, {len(self.text)} bytes")

    def batch(self, step: int) -> Batch:
        """Returns the batch of a step; the text begins again when it ends."""
        total = self.rows * self.context
        begin = step * total % (len(self.text) - total)
        tokens, targets = (self.text[begin + i : begin + i + total].long() for i in (0, 1))
        places = torch.arange(total, device=self.device)
        if not self.packed:
            shape = (self.rows, self.context)
            return Batch(tokens.view(shape), targets.view(shape), places.view(shape) % self.context, None, self.context)
        inside = self.starts[(self.starts > begin) & (self.starts < begin + total)] - begin
        offsets = torch.tensor([0, *inside.tolist(), total], dtype=torch.int32).to(self.device)
        positions = places - offsets[torch.searchsorted(offsets, places, right=True) - 1]
        torch._dynamo.maybe_mark_dynamic(offsets, 0)  # torch.compile: one graph for any number of documents
        return Batch(tokens, targets, positions, offsets, self.context)


# Training -------------------------------------------------------------------------------------------------------------


class Trainer:
    """A model with its optimizer. Layers are compiled one by one: they share one graph, so it is compiled once."""

    def __init__(
        self, sizes: Sizes, context: int, attend: Attend, device: torch.device, compiled: bool, checkpointing: bool
    ) -> None:
        torch.manual_seed(0)
        self.model = Decoder(sizes, context, attend, checkpointing).to(device)
        cuda = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), fused=cuda)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=cuda)
        if compiled:
            for layer in self.model.layers:
                layer.compile()

    def step(self, batch: Batch, rate: float = PEAK_RATE) -> Tensor:
        """Trains on a batch; returns its loss before the step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        with self.autocast:
            loss: Tensor = self.model(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()


@dataclass(frozen=True)
class Run:
    """What a training run gave."""

    attention: str
    losses: list[float]  # of each step, in nats a byte
    tokens_per_second: float  # without the first tenth of the steps, which compile kernels
    peak_mib: float | None  # the most memory that torch held at once; None on a CPU


def train(trainer: Trainer, data: Data, steps: int, name: str, tell: Callable[[str], None] = lambda line: None) -> Run:
    """Returns a run of that many steps, whose learning rate rises and then falls to zero along a cosine."""
    cuda = data.device.type == "cuda"
    warm, begin, losses = max(1, steps // 10), 0.0, list[Tensor]()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for step in range(steps):
        if step == warm:
            _ = losses[-1].item()  # waits for the device
            begin = time.perf_counter()
        risen, fallen = (step + 1) / (WARMUP * steps), (1 + math.cos(math.pi * step / steps)) / 2
        losses.append(trainer.step(data.batch(step), PEAK_RATE * min(risen, fallen)))
        if step % warm == 0 or step == steps - 1:
            tell(f"{name}: step {step + 1:4d} of {steps}, loss {losses[-1].item():.4f}")
    found = torch.stack(losses).tolist()  # waits for the device
    rate = (steps - warm) * data.rows * data.context / (time.perf_counter() - begin)
    return Run(name, found, rate, torch.cuda.max_memory_allocated() / 2**20 if cuda else None)


def largest_difference(a: Run, b: Run) -> float:
    """Returns the largest difference of a step's losses."""
    return max(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True))


def parse(given: list[str]) -> argparse.Namespace:
    """Returns the arguments, with the defaults of the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", choices=[*ATTENTIONS, "both"], default="both")
    parser.add_argument("--batches", choices=["packed", "dense"], default="packed")
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument("--device", choices=devices, default=devices[0])
    parser.add_argument("--steps", type=int, help="200 on a GPU, 30 on a CPU")
    parser.add_argument("--context", type=int, help="tokens of the longest sequence; 4096 on a GPU, 128 on a CPU")
    parser.add_argument("--rows", type=int, help="a step takes rows * context tokens; 32768 on a GPU, 512 on a CPU")
    parser.add_argument("--compile", action="store_true", help="torch.compile each layer")
    parser.add_argument("--checkpoint", action="store_true", help="recompute each layer in the backward")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--page", type=Path, default=Path("train.html"), help="where both loss curves are drawn")
    arguments = parser.parse_args(given)
    on_gpu = torch.device(arguments.device).type == "cuda"
    arguments.steps = (200 if on_gpu else 30) if arguments.steps is None else arguments.steps
    arguments.context = (4096 if on_gpu else 128) if arguments.context is None else arguments.context
    rows = max(1, (32768 if on_gpu else 512) // max(1, arguments.context))
    arguments.rows = rows if arguments.rows is None else arguments.rows
    if min(arguments.context, arguments.rows) < 1 or arguments.steps < 2:
        parser.error("--context and --rows must be at least 1, and --steps at least 2: the first step is not timed")
    return arguments


def main(given: list[str]) -> None:
    """Runs the command."""
    arguments = parse(given)
    device = torch.device(arguments.device)
    sizes = FULL if device.type == "cuda" else SMALL
    names = list(ATTENTIONS) if arguments.attention == "both" else [arguments.attention]
    if len(names) == 2:  # before the training, so that a page that cannot be written does not cost it
        from warpwave.workbench.report.command import check_writable
        from warpwave.workbench.report.training import TrainingRun, write_training_page

        try:
            check_writable(arguments.page)
        except InvalidInput as error:
            raise SystemExit(f"--page: {error}") from None
    data = Data(arguments.rows, arguments.context, arguments.batches == "packed", device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    how = "compiled" * arguments.compile or "eager"
    title = f"{where}, {arguments.rows} x {arguments.context} tokens a step, {arguments.batches}, {how}"
    tell = (lambda line: None) if arguments.json else functools.partial(print, flush=True)
    tell(title)
    runs = []
    for name in names:
        trainer = Trainer(sizes, arguments.context, ATTENTIONS[name], device, arguments.compile, arguments.checkpoint)
        runs.append(train(trainer, data, arguments.steps, name, tell))
        memory = "" if runs[-1].peak_mib is None else f", {runs[-1].peak_mib:,.0f} MiB at the peak"
        tell(f"{name}: {runs[-1].tokens_per_second:,.0f} tokens a second{memory}")
        del trainer
    found: dict[str, Any] = {"title": title, "sizes": asdict(sizes), "runs": [asdict(run) for run in runs]}
    if len(runs) == 2:
        found["largest_difference"] = largest_difference(*runs)
        tell(f"largest difference of the losses of a step: {found['largest_difference']:.2g}")
        shown = [TrainingRun(r.attention, r.losses, r.tokens_per_second, r.peak_mib) for r in runs]
        tell(f"page: {write_training_page(arguments.page, title, shown)}")
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
