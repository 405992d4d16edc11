"""The demo's BERT against torch's own encoder layer, and padded against packed, on small random weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import warpwave
from warpwave.workbench.demo import sentence_model
from warpwave.workbench.demo.sentence_model import AttentionFunction, Bert, ModelMissing, pack, pad

CPU = torch.device("cpu")
VOCABULARY, HIDDEN, HEADS, WIDE, LAYERS, LONGEST = 50, 24, 3, 40, 2, 16
SENTENCES = [[7, 3, 9, 11], [1, 2], [5], [8, 8, 4, 6, 2, 13, 40, 49, 0]]


@pytest.fixture
def bert() -> Bert:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embeddings.word_embeddings.weight": (VOCABULARY, HIDDEN),
        "embeddings.position_embeddings.weight": (LONGEST, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
        "embeddings.LayerNorm.weight": (HIDDEN,),
        "embeddings.LayerNorm.bias": (HIDDEN,),
    }
    for i in range(LAYERS):
        for name, (rows, columns) in {
            "attention.self.query": (HIDDEN, HIDDEN),
            "attention.self.key": (HIDDEN, HIDDEN),
            "attention.self.value": (HIDDEN, HIDDEN),
            "attention.output.dense": (HIDDEN, HIDDEN),
            "intermediate.dense": (WIDE, HIDDEN),
            "output.dense": (HIDDEN, WIDE),
        }.items():
            shapes |= {f"encoder.layer.{i}.{name}.weight": (rows, columns), f"encoder.layer.{i}.{name}.bias": (rows,)}
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"encoder.layer.{i}.{name}.weight": (HIDDEN,), f"encoder.layer.{i}.{name}.bias": (HIDDEN,)}
    weights = {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}
    return Bert(weights, LAYERS, HEADS, 1e-12)


def torchs_encoder(bert: Bert) -> torch.nn.TransformerEncoder:
    """The same weights in torch's own modules."""
    layer = torch.nn.TransformerEncoderLayer(
        HIDDEN, HEADS, WIDE, activation="gelu", layer_norm_eps=1e-12, batch_first=True
    )
    encoder = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()
    for i, module in enumerate(encoder.layers):
        w = {name.removeprefix(f"encoder.layer.{i}."): x for name, x in bert.weights.items()}
        qkv = [f"attention.self.{name}" for name in ("query", "key", "value")]
        module.load_state_dict(
            {
                "self_attn.in_proj_weight": torch.cat([w[f"{name}.weight"] for name in qkv]),
                "self_attn.in_proj_bias": torch.cat([w[f"{name}.bias"] for name in qkv]),
            }
            | {
                f"{ours}.{part}": w[f"{theirs}.{part}"]
                for ours, theirs in {
                    "self_attn.out_proj": "attention.output.dense",
                    "norm1": "attention.output.LayerNorm",
                    "linear1": "intermediate.dense",
                    "linear2": "output.dense",
                    "norm2": "output.LayerNorm",
                }.items()
                for part in ("weight", "bias")
            }
        )
    return encoder


def ours(mask: Tensor) -> AttentionFunction:
    attention: Callable[..., Any] = warpwave.attention
    return lambda q, k, v: attention(q, k, v, mask=mask)


@torch.no_grad()
def embed_padded(bert: Bert, sentences: list[list[int]]) -> Tensor:
    batch = pad(sentences, CPU)
    return batch.pool(bert.forward(batch.token_ids, batch.positions, ours(batch.key_mask)))


@torch.no_grad()
def test_forward_equals_torchs_encoder(bert: Bert) -> None:
    batch = pad(SENTENCES, CPU)
    w = bert.weights
    x = w["embeddings.word_embeddings.weight"][batch.token_ids] + w["embeddings.token_type_embeddings.weight"][0]
    x = x + w["embeddings.position_embeddings.weight"][: x.shape[1]]
    x = F.layer_norm(x, (HIDDEN,), w["embeddings.LayerNorm.weight"], w["embeddings.LayerNorm.bias"], 1e-12)
    expected = torchs_encoder(bert)(x, src_key_padding_mask=~batch.is_token)
    hidden = bert.forward(batch.token_ids, batch.positions, ours(batch.key_mask))
    torch.testing.assert_close(hidden[batch.is_token], expected[batch.is_token], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_packed_equals_padded(bert: Bert) -> None:
    batch = pack(SENTENCES, CPU)
    cu, longest = batch.cu_seqlens, batch.max_seqlen
    attention: Callable[..., Any] = warpwave.attention_varlen

    def ours_packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest)

    packed = batch.pool(bert.forward(batch.token_ids, batch.positions, ours_packed))
    torch.testing.assert_close(packed, embed_padded(bert, SENTENCES), rtol=1e-4, atol=1e-5)


def test_a_sentence_does_not_depend_on_its_neighbors(bert: Bert) -> None:
    together = embed_padded(bert, SENTENCES)
    for sentence, embedding in zip(SENTENCES, together, strict=True):
        torch.testing.assert_close(embed_padded(bert, [sentence])[0], embedding, rtol=1e-4, atol=1e-5)


def test_layouts() -> None:
    padded, packed = pad(SENTENCES, CPU), pack(SENTENCES, CPU)
    assert padded.token_ids.shape == (4, 9)
    assert padded.key_mask.shape == (4, 1, 1, 9)
    assert padded.is_token.sum(dim=1).tolist() == [4, 2, 1, 9]
    assert packed.cu_seqlens.tolist() == [0, 4, 6, 7, 16]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, *range(9)]
    assert packed.token_ids.tolist() == padded.token_ids[padded.is_token].tolist()


@pytest.mark.parametrize("package", ["safetensors.torch", "tokenizers", sentence_model.PACKAGE])
def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelMissing, match=package.split(".")[0]):
        sentence_model.load()
