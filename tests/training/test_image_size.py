"""Another image size: the outputs are those of interpolated positions, and a saved model takes images by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Picture
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    BeitConfig,
    BeitModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    PreTrainedModel,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
    pipeline,
)

from hf_attn_swap.training.image_size import resized
from tests.contract.harness import refused
from tests.harness.recipes import recipe

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


def test_a_recipe_saves_a_model_that_takes_images_by_itself(tmp_path: Path, monkeypatch: Any) -> None:
    """A pipeline, which knows nothing of the recipe, gives the predictions that the recipe measured."""
    made("vit").save_pretrained(tmp_path / "stock")
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "stock")
    try:
        transformers.AutoImageProcessor.from_pretrained(tmp_path / "stock")
    except ImportError as problem:
        pytest.skip(f"transformers {transformers.__version__} reads images with torchvision alone: {str(problem)[:60]}")
    noise = torch.randint(0, 256, (24, 24, 24, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    pictures = [Picture.fromarray(each.numpy()) for each in noise]
    features = Features({"image": Image(), "label": ClassLabel(names=["dark", "bright"])})
    for split in ("train", "test"):
        rows = [{"image": picture, "label": place % 2} for place, picture in enumerate(pictures)]
        Dataset.from_list(rows, features=features).to_parquet(tmp_path / "data" / f"{split}.parquet")
    words = ["--model_name_or_path", str(tmp_path / "stock"), "--dataset_name", str(tmp_path / "data")]
    words += ["--image_size", "8", "--max_steps", "3", "--variant", "softmax", "--seeds", "0", "--use_cpu", "true"]
    recipe("image_classification.py", [*words, "--output_dir", str(tmp_path / "out")], monkeypatch)
    seed = tmp_path / "out" / "softmax" / "seed-0"
    measured = json.loads((seed / "outcome.json").read_text("utf-8"))["predictions"]
    model = AutoModelForImageClassification.from_pretrained(seed / "model")
    processor = AutoImageProcessor.from_pretrained(seed / "model")
    found = pipeline("image-classification", model, image_processor=processor, device="cpu")(pictures, top_k=1)
    assert [model.config.label2id[best["label"]] for (best,) in found] == measured
    assert model.config.image_size == 8
