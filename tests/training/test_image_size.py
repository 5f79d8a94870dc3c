"""Another image size: the outputs are those of interpolated positions, and a saved model takes images by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BeitConfig,
    BeitModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    PreTrainedModel,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from hf_attn_swap.training.recipes.image_classification import resized
from tests.contract.harness import refused

SIZES: dict[str, Any] = {"image_size": 16, "patch_size": 4, "hidden_size": 16, "num_attention_heads": 2}
MODELS = {
    "vit": (ViTForImageClassification, ViTConfig, SIZES | {"num_hidden_layers": 2, "intermediate_size": 32}),
    "dinov2": (Dinov2ForImageClassification, Dinov2Config, SIZES | {"num_hidden_layers": 2}),
    "swin": (
        SwinForImageClassification,
        SwinConfig,
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 2},
    ),
}


def made(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model, config, sizes = MODELS[name]
    return model(config(**sizes, num_labels=2)).eval()


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_interpolated_positions(name: str, tmp_path: Path) -> None:
    """To the bit, also after save and load."""
    model, pixels = made(name), torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(1))
    more = {} if name == "dinov2" else {"interpolate_pos_encoding": True}  # DINOv2 always interpolates
    with torch.no_grad():
        wanted = model(pixels, **more).logits
        own = resized(model, 24)
        assert torch.equal(own(pixels).logits, wanted)
        own.save_pretrained(tmp_path)
        assert torch.equal(type(model).from_pretrained(tmp_path)(pixels).logits, wanted)
    assert own.config.image_size == 24
    assert model.config.image_size == 16, "the model that was given stays as it is"


def test_weights_that_depend_on_the_size_are_refused() -> None:
    sizes = SIZES | {"num_hidden_layers": 1, "intermediate_size": 32, "use_relative_position_bias": True}
    with refused("BeitModel cannot take images of 24 pixels instead of 16; leave out --image_size."):
        resized(BeitModel(BeitConfig(**sizes)), 24)
