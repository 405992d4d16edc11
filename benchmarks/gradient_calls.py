"""The calls whose gradients are timed: a call and its name in a record, and groups of calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

BIASES = ("bias", "trained bias")
MASKS = ("", "padding", "mask")
SHAPES = ((16, 1024), (4, 4096), (1, 16384))
DRAWN = 40


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


# By the names of `benchmarks.gradients`; `drawn` takes a seed.
GROUPS: dict[str, Callable[..., list[Row]]] = {
    "rows": table,
    "both": table,
    "between": between,
    "grouped": grouped,
    "drawn": drawn,
    "features": features,
    "biases": biases,
    "models": models,
    "few": few,
    "padded": padded,
    "short": short,
}
