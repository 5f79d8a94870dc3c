"""A vision tower that packs images: a variant that needs the row of each token is refused."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from hf_attn_swap import list_variants, patch_model, unpatch_model
from hf_attn_swap.layer.registry import parse, tiny_options

IMAGES = {"grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}
SIZES = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}


def tower() -> tuple[Any, torch.Tensor]:
    """Two images of 16 patches in one row of 32, without a batch axis."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2VisionTransformerPretrainedModel(Qwen2VLVisionConfig(**SIZES)).eval()
        return model, torch.randn(32, 3 * 2 * 4 * 4)


def run(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(pixels, **IMAGES).last_hidden_state
    return result


@pytest.mark.parametrize("variant", list_variants())
def test_rows_are_not_guessed(variant: str) -> None:
    stock, pixels = tower()
    wanted = run(stock, pixels)
    model = copy.deepcopy(stock)
    if not any({"scores", "mask", "read", "write"} & set(cls.places) for cls in parse(variant)):
        assert torch.equal(run(patch_model(model, variant, strength=0.0, **tiny_options(variant)), pixels), wanted)
        assert torch.allclose(run(patch_model(model, variant, **tiny_options(variant)), pixels), wanted, atol=1e-6) == (
            variant == "softmax"
        )
        return
    with pytest.raises(ValueError, match=re.compile("not one row per query|W_o")):
        run(patch_model(model, variant, **tiny_options(variant)), pixels)
    if "attn_swap" in model.config.to_dict():
        unpatch_model(model)
    assert torch.equal(run(model, pixels), wanted)
