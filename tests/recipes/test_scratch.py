"""Models from random weights: bytes for language models, small ViTs with and without residual connections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Picture

from hf_attn_swap import patch_model
from hf_attn_swap.training.recipes import skip_free
from tests.harness.recipes import NO_SAVING, needs_recipes, recipe

pytestmark = needs_recipes
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
VIT = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "patch_size": 4,
}
USUAL = (
    *("--from_scratch", "true", "--report_to", "none", "--disable_tqdm", "true", "--use_cpu", "true"),
    *("--dataloader_pin_memory", "false", "--per_device_train_batch_size", "8", "--learning_rate", "1e-2", *NO_SAVING),
)


def test_a_language_model_of_bytes(tmp_path: Path, monkeypatch: Any) -> None:
    text = tmp_path / "rows.txt"
    text.write_text("abcd " * 300, encoding="utf-8")
    words = (
        *(
            "--model_name_or_path",
            "llama",
            "--config_overrides",
            json.dumps(SIZES),
            "--tokenizer_name",
            "bytes",
            "--max_seq_length",
            "25",
        ),
        *("--train_file", str(text), "--test_file", str(text), "--max_steps", "30", "--variant", "modern_hopfield"),
    )
    recipe("language_modeling.py", [*words, *USUAL, "--output_dir", str(tmp_path)], monkeypatch)
    result = json.loads((tmp_path / "modern-hopfield" / "results.json").read_text("utf-8"))
    assert result["base"]["relation"] == "scratch"
    assert result["base"]["name"] == "llama"
    for measured in (result["converted"], result["control"]):
        (metric,) = measured["metrics"]
        assert metric["name"] == "perplexity", "before the training there is nothing to convert"
        assert metric["values"][0] < 20, "five bytes that repeat are soon learnt; chance is 384"
    card = (tmp_path / "modern-hopfield" / "README.md").read_text("utf-8")
    assert "from random weights" in card
    assert "16" in result["conversion"][0]
    assert "bytes as tokens" in result["conversion"][0]
    assert result["conversion"][1].startswith("Trained for 30 steps on ")
    assert "base_model" not in card


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bright and dark images of 8 pixels."""
    folder = tmp_path_factory.mktemp("pictures")
    for split, count in (("train", 32), ("test", 16)):
        rows = [{"img": Picture.new("RGB", (8, 8), (250 * (i % 2),) * 3), "label": i % 2} for i in range(count)]
        features = Features({"img": Image(), "label": ClassLabel(names=["dark", "bright"])})
        Dataset.from_list(rows, features=features).to_parquet(folder / f"{split}.parquet")
    return folder


def test_a_layer_without_skips_loses_what_attention_does_not_read() -> None:
    torch.manual_seed(0)
    sizes = {**VIT, "num_hidden_layers": 1, "image_size": 8, "num_labels": 2}
    model = skip_free.SkipFreeViTForImageClassification(skip_free.SkipFreeConfig(**sizes)).eval()
    (layer,) = (module for module in model.modules() if isinstance(module, skip_free.SkipFreeLayer))
    x = torch.randn(1, 5, 16)
    read = layer.attention(layer.layernorm_before(x), None)[0]
    torch.testing.assert_close(layer(x), layer.mlp(layer.layernorm_after(read)))
    patch_model(model, "modern_hopfield", alpha=1.0)  # the whole update is the input: what attention reads is left out
    pixels = torch.randn(1, 3, 8, 8)
    normed = layer.layernorm_before(model.vit.embeddings(pixels))
    expected = model.classifier(model.vit.layernorm(layer.mlp(layer.layernorm_after(normed)))[:, 0])
    torch.testing.assert_close(model(pixels).logits, expected)
