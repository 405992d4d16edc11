"""Small models of diffusers with random weights, by torch's name of the function and by their attention processors."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("diffusers", reason="diffusers is not installed")

from warpwave import InvalidInput, InvalidType
from warpwave.integrations import diffusers as door
from warpwave.integrations import pytorch


def flux() -> tuple[Any, dict[str, Any]]:
    import diffusers

    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 6, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([1.0]), "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }  # fmt: skip
    return model, inputs


def stable_diffusion_3() -> tuple[Any, dict[str, Any]]:
    import diffusers

    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 6, 16),
        "pooled_projections": torch.randn(1, 16), "timestep": torch.tensor([1.0]),
    }  # fmt: skip
    return model, inputs


def unet() -> tuple[Any, dict[str, Any]]:
    import diffusers

    model = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, cross_attention_dim=12,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip
    inputs = {
        "sample": torch.randn(2, 4, 8, 8), "timestep": 3, "encoder_hidden_states": torch.randn(2, 5, 12),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
    }  # fmt: skip
    return model, inputs


def autoencoder() -> tuple[Any, dict[str, Any]]:
    import diffusers

    model = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=2)
    return model, {"sample": torch.randn(1, 3, 16, 16)}


MODELS = {"Flux": flux, "Stable Diffusion 3": stable_diffusion_3, "UNet": unet, "autoencoder": autoencoder}


def make(name: str) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return model.eval(), inputs


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Attention calls that reach warpwave."""
    found: list[Any] = []
    attention = pytorch.attention

    def counted(*given: Any, **said: Any) -> Any:
        found.append(said)
        return attention(*given, **said)

    monkeypatch.setattr(pytorch, "attention", counted)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_processors(name: str, calls: list[Any]) -> None:
    model, inputs = make(name)
    replaced = dict(model.attn_processors)
    with torch.no_grad():
        expected = model(**inputs).sample
        routing = door.route(model)
        mine = model(**inputs).sample
        count = len(calls)
        assert count >= len(replaced) > 0, "the model's layers do not reach warpwave"
        torch.testing.assert_close(mine, expected)
        with pytest.raises(InvalidInput, match="is routed already"):
            door.route(model)
        make(name)[0](**inputs)  # another model is not routed
        routing.remove()
        assert torch.equal(model(**inputs).sample, expected) and len(calls) == count
    assert {key: id(processor) for key, processor in model.attn_processors.items()} == {
        key: id(processor) for key, processor in replaced.items()
    }
    routing.remove()


@pytest.mark.parametrize("name", MODELS)
def test_torchs_name(name: str, calls: list[Any]) -> None:
    model, inputs = make(name)
    with torch.no_grad():
        expected = model(**inputs).sample
        assert not calls
        with pytorch.sdpa(), torch.device("cpu"):  # a device context is a mode of torch's functions too
            mine = model(**inputs).sample
    assert len(calls) >= len(model.attn_processors)
    torch.testing.assert_close(mine, expected)


def test_checkpointed_training(calls: list[Any]) -> None:
    """Layers that are computed again in the backward pass are routed again."""
    gradients = []
    for checkpointing, routed in ((False, False), (False, True), (True, True)):
        model, inputs = make("Flux")
        model.train()
        if checkpointing:
            model.enable_gradient_checkpointing()
        if routed:
            door.route(model)
        calls.clear()
        model(**inputs).sample.square().mean().backward()
        assert len(calls) == (0, 2, 4)[routed + checkpointing]
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for torchs, once, again in zip(*gradients, strict=True):
        torch.testing.assert_close(once, torchs)
        assert torch.equal(once, again)


def test_compiled() -> None:
    model, inputs = make("Flux")
    graphs: list[Any] = []

    def keep(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph

    with torch.no_grad():
        expected = model(**inputs).sample
        door.route(model)
        compiled = torch.compile(model, backend=keep, fullgraph=True)
        torch.testing.assert_close(compiled(**inputs).sample, expected)
    (graph,) = graphs
    assert sum("warpwave.attention" in str(node.target) for node in graph.graph.nodes) == 2


def test_processors_that_came_later_stay() -> None:
    model, _ = make("Flux")
    first, second = model.attn_processors
    before = dict(model.attn_processors)
    routing = door.route(model)
    own = type(before[first])()
    model.set_attn_processor({**model.attn_processors, first: own})
    routing.remove()
    assert model.attn_processors[first] is own and model.attn_processors[second] is before[second]


def test_a_routed_model_is_copied_and_pickled(calls: list[Any]) -> None:
    model, inputs = make("UNet")
    door.route(model)
    first = model(**inputs).sample
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        calls.clear()
        assert torch.equal(copied(**inputs).sample, first) and calls
        assert copied.attn_processors.keys() == model.attn_processors.keys()


def test_what_cannot_be_routed_is_refused() -> None:
    import diffusers

    with pytest.raises(InvalidType, match="Linear, which has no attn_processors"):
        door.route(torch.nn.Linear(2, 2))
    plain = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(4,), norm_num_groups=2, layers_per_block=1, add_attention=False,
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
    )  # fmt: skip
    with pytest.raises((InvalidType, InvalidInput), match="UNet2DModel"):
        door.route(plain)
