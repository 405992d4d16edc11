"""Embeds sentences with torch's attention and with ours, and compares the embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import warpwave
from warpwave.operands import Operands
from warpwave.workbench.bench.table import Table
from warpwave.workbench.demo import sentence_model
from warpwave.workbench.demo.comparison import BASELINE, ERROR_FACTOR, Case, packed_arguments, short
from warpwave.workbench.terminal import columns

# Two to four sentences on each of eight subjects, so that every sentence has a similar one.
SENTENCES = (
    "The night train was late again.",
    "Our departure was put off by two hours because a tree had fallen on the railway line.",
    "Passengers waited on the cold platform, drank weak tea from paper cups, and asked one another whether anybody had "
    "heard when the express from the coast would finally come in.",
    "Bake the bread until the crust is dark.",
    "Knead the dough for ten minutes, let it rise under a damp cloth, and put it into a very hot oven.",
    "A pinch of salt brings out the taste of the tomatoes in the soup.",
    "Whales breathe air.",
    "A blue whale can hold its breath for more than half an hour while it looks for krill in deep water.",
    "Dolphins live in groups and call each other by whistles that work much like names.",
    "The telescope found a faint planet circling a red star.",
    "Because light from the far galaxies has travelled for billions of years, astronomers who look at them see the "
    "universe as it was when it was young, long before the Sun and the Earth had formed.",
    "Tonight the Moon will pass in front of Saturn.",
    "She planted beans and garlic along the south wall.",
    "After the last frost, move the seedlings into the garden, water them every morning, and cover them with straw so "
    "that the soil stays moist.",
    "Slugs ate every one of my young lettuces.",
    "The orchestra rehearsed the slow movement twice.",
    "A violin's sound depends on the wood, on the varnish, and a good deal on the person who plays it.",
    "He hums old songs.",
    "The program stopped with an error that nobody could reproduce.",
    "When two threads write to the same place in memory without a lock, the result depends on which of them comes "
    "last, and the fault may not show itself for weeks.",
    "A unit test that fails only on Fridays is telling you something about dates.",
    "Prices in the shops rose faster than wages this year.",
    "The central bank raised interest rates to slow inflation, and mortgages became dearer for families who had just "
    "bought their first home.",
    "Bread costs more.",
)
SHOWN_NEIGHBORS = (0, 4, 7, 10, 13, 19)


def sdpa_attention(mask: Tensor | None) -> sentence_model.AttentionFunction:
    """Returns torch's attention in our layout."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    return attention


@dataclass(frozen=True)
class Embedded:
    """The sentences' embeddings by torch's attention and by ours.

    Attributes:
        wrong: the contenders whose embeddings are wrong.
        introduction: description of the model's input.
        table: one row per contender.
        neighbors: the nearest sentence of a few sentences, which shows that the embeddings are meaningful.
        cases: the layers' q, k, v, for timing.
    """

    wrong: Sequence[str]
    introduction: str
    table: Table
    neighbors: str
    cases: Sequence[Case]


def embed_and_compare(device: torch.device, dtype: torch.dtype) -> Embedded:
    """Embeds the sentences with torch's attention and with ours, and compares the embeddings."""
    loaded, tokenize = sentence_model.load()
    bert = loaded.to(device, dtype)
    sentences = tokenize(SENTENCES)
    padded, packed = sentence_model.pad(sentences, device), sentence_model.pack(sentences, device)
    caught_padded: list[Operands] = []
    caught_packed: list[Operands] = []

    def ours_padded(q: Tensor, k: Tensor, v: Tensor) -> Any:
        caught_padded.append(Operands(q, k, v, mask=padded.key_mask))
        return warpwave.attention(q, k, v, mask=padded.key_mask)

    def ours_packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        caught_packed.append(Operands(q, k, v, cu_seqlens_q=packed.cu_seqlens, cu_seqlens_k=packed.cu_seqlens))
        return warpwave.attention_varlen(q, k, v, **packed_arguments(packed))

    def embed(model: sentence_model.Bert, batch: Any, attention: sentence_model.AttentionFunction) -> Tensor:
        return batch.pool(model.forward(batch.token_ids, batch.positions, attention)).double()

    torchs = sdpa_attention(padded.key_mask)
    exact = embed(loaded.to(device, torch.float64), padded, torchs)
    baseline = embed(bert, padded, torchs)
    runs = {
        f"{BASELINE}, padded": baseline,
        "warpwave.attention, padded": embed(bert, padded, ours_padded),
        "warpwave.attention_varlen, packed": embed(bert, packed, ours_packed),
    }

    layers, heads, head_dim = bert.num_layers, bert.num_heads, caught_padded[0].q.shape[-1]
    tokens, filling = len(packed.token_ids), (~padded.is_token).double().mean().item()
    introduction = (
        f"{len(SENTENCES)} sentences of {min(map(len, sentences))} to {packed.max_seqlen} tokens through "
        f"all-MiniLM-L6-v2 ({layers} layers, {heads} heads x {head_dim}, {short(dtype)}),\n"
        f"padded to {tuple(padded.token_ids.shape)}, {filling:.0%} of it padding, or packed into {tokens} tokens"
    )
    baseline_error = (baseline - exact).abs().max().item()
    limit = ERROR_FACTOR * baseline_error + torch.finfo(dtype).eps
    rows: list[tuple[str, ...]] = []
    wrong = []
    for name, embedding in runs.items():
        error = (embedding - exact).abs().max().item()
        right = error <= limit
        if not right:
            wrong.append(name)
        difference = (embedding - baseline).abs().max().item()
        cosine = F.cosine_similarity(embedding, baseline).min().item()
        verdict = "baseline" if embedding is baseline else "pass" if right else "FAIL"
        rows.append((name, f"{difference:.1e}", f"{cosine:.7f}", f"{error:.1e}", verdict))
    header = ("embeddings by", "max diff to torch", "least cosine to torch", "max error to float64", "verdict")
    rule = f"pass: error at most {ERROR_FACTOR:g} x torch's, plus one rounding step of {short(dtype)}"
    cases = [
        Case(f"the {layers} layers' q, k, v, padded", caught_padded),
        Case(f"the {layers} layers' q, k, v, packed", caught_packed, packed=packed, padded=(padded, caught_padded)),
    ]
    table = Table("Sentence embeddings", header, rows, (rule,))
    return Embedded(wrong, introduction, table, neighbors(runs["warpwave.attention_varlen, packed"]), cases)


def neighbors(embeddings: Tensor) -> str:
    """Returns the nearest other sentence of a few sentences, one per line."""
    similarity = (embeddings @ embeddings.T).fill_diagonal_(-1)
    rows = []
    for i in SHOWN_NEIGHBORS:
        score, j = similarity[i].max(dim=0)
        rows.append((_clip(SENTENCES[i], 50), f"{score.item():.2f}", _clip(SENTENCES[int(j)], 52)))
    return "\n".join(["Nearest sentences by the packed embeddings, with their cosine", *columns(rows, indent="  ")])


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."
