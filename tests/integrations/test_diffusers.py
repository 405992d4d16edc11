"""A small Flux transformer of diffusers, whose default backend calls torch's function by name."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("diffusers", reason="diffusers is not installed")

from warpwave.integrations import pytorch


def test_flux(monkeypatch: pytest.MonkeyPatch) -> None:
    import diffusers

    torch.manual_seed(0)
    model: Any = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    ).eval()  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 6, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([1.0]), "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }  # fmt: skip
    calls: list[Any] = []
    attention = pytorch.attention

    def counted(*given: Any, **said: Any) -> Any:
        calls.append(said)
        return attention(*given, **said)

    monkeypatch.setattr(pytorch, "attention", counted)
    with torch.no_grad():
        expected = model(**inputs).sample
        assert not calls
        with pytorch.sdpa():
            mine = model(**inputs).sample
    assert len(calls) == 2
    torch.testing.assert_close(mine, expected)
