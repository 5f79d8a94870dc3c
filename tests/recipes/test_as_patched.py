"""The recipe that shows what options do as patched: its figures against the same ones worked out here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset, Image
from PIL import Image as Picture
from transformers import ViTImageProcessor

from hf_attn_swap import patch_model, unpatch_model
from hf_attn_swap.conversion import scale_values
from tests import zoo
from tests.harness.recipes import needs_recipes, recipe

from .printed import rows

pytestmark = needs_recipes
CHOICES = (
    '{"variant": "clipped_softmax"}',
    '{"variant": "clipped_softmax", "gamma": -0.2}',
    '{"variant": "modern_hopfield", "alpha_prime": 0.1}',
)


def test_perplexity_of_token_ids(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    model = zoo.build("llama", head="lm")
    model.save_pretrained(tmp_path / "model")
    ids = zoo.inputs("llama", batch=6, length=9)["input_ids"]
    Dataset.from_dict({"ids": ids.tolist()}).to_parquet(tmp_path / "test.parquet")
    where = [str(tmp_path / "model"), str(tmp_path / "test.parquet"), "--column", "ids", "--length", "8"]
    recipe("as_patched.py", [*where, "--rows", "3", "--try", *CHOICES], monkeypatch)
    table = rows(capsys.readouterr().out)
    measured = [{"input_ids": row[None, :8]} for row in ids[:3]]
    eager = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    with torch.no_grad():
        attentions = [eager(**row, output_attentions=True).attentions for row in measured]
    layers = [torch.cat(layer) for layer in zip(*attentions, strict=True)]
    shares = [float(torch.minimum(p, 12 / 512 * (1 - p)).sum() / p.sum()) for p in layers]
    with torch.no_grad():
        losses = [float(model(**row, labels=row["input_ids"]).loss) for row in measured]
        patch_model(model, "clipped_softmax", gamma=-12 / 512)
        clipped = [float(model(**row, labels=row["input_ids"]).loss) for row in measured]
    assert list(table) == ["stock", *CHOICES]
    assert table["stock"] == ["–", "–", f"{math.exp(sum(losses) / 3):.4g}"]
    assert table[CHOICES[0]] == [f"{sum(shares) / 3:.2%}", f"{max(shares):.2%}", f"{math.exp(sum(clipped) / 3):.4g}"]
    recipe("as_patched.py", [*where, "--rows", "3", "--fit", "gain", "--try", CHOICES[2]], monkeypatch)
    fitted = rows(capsys.readouterr().out)[CHOICES[2]]
    assert fitted[:2] == ["–", "–"]
    assert fitted != table[CHOICES[2]]
    belief = '{"variant": "belief"}'
    recipe("as_patched.py", [*where, "--rows", "3", "--fit", "scale", "--try", belief], monkeypatch)
    shown = capsys.readouterr()
    patch_model(unpatch_model(model), "belief")
    scale_values(model, [{"input_ids": row[None, :8]} for row in ids[3:]], progress=False)
    with torch.no_grad():
        scaled = [float(model(**row, labels=row["input_ids"]).loss) for row in measured]
    assert rows(shown.out)[belief][2] == f"{math.exp(sum(scaled) / 3):.4g}"
    assert "values of 3 layers are scaled" in shown.err
    with pytest.raises(ValueError, match="has 6 rows, but 8 are needed"):
        recipe("as_patched.py", [*where, "--rows", "4", "--fit", "gain"], monkeypatch)


def test_relative_error_of_images(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    model = zoo.build("vit", head="base")
    model.save_pretrained(tmp_path / "model")
    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    processor.save_pretrained(tmp_path / "model")
    try:
        transformers.AutoImageProcessor.from_pretrained(tmp_path / "model")
    except ImportError as problem:
        pytest.skip(f"transformers {transformers.__version__} reads images with torchvision alone: {str(problem)[:60]}")
    pictures = [Picture.effect_noise((16, 16), 60 + 20 * index).convert("RGB") for index in range(2)]
    data = Dataset.from_dict({"img": pictures}).cast_column("img", Image())
    data.to_parquet(tmp_path / "test.parquet")
    where = [str(tmp_path / "model"), str(tmp_path / "test.parquet"), "--column", "img", "--rows", "2"]
    recipe("as_patched.py", [*where, "--try", *CHOICES[:2]], monkeypatch)
    found = rows(capsys.readouterr().out)
    pixels = processor(pictures, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        wanted = model(pixel_values=pixels)[0]
        got = patch_model(model, "clipped_softmax", gamma=-0.2)(pixel_values=pixels)[0]
    assert found["stock"][-1] == "0"
    assert float(found[CHOICES[1]][-1]) == pytest.approx(float((got - wanted).norm() / wanted.norm()), rel=1e-3)
    assert 0 < float(found[CHOICES[0]][-1]) < 0.01 < float(found[CHOICES[1]][-1])
