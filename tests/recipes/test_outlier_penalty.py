"""The recipe that takes outliers out of a classifier: the largest sums fall, and the outputs stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification

from hf_attn_swap.quantization.places import is_norm
from tests import zoo
from tests.harness.byte_tokenizer import byte_tokenizer
from tests.harness.recipes import needs_recipes, recipe

pytestmark = needs_recipes
CHANNEL = 3  # of the outlier


def largest(model: Any, ids: torch.Tensor) -> float:
    """The largest number that a norm reads."""
    results: list[float] = []
    for module in model.eval().modules():
        if is_norm(module):
            module.register_forward_pre_hook(lambda _, args: results.append(float(args[0].detach().abs().max())))
    with torch.no_grad():
        model(input_ids=ids)
    return max(results)


def test_the_penalty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(97, 122, (256, 12), generator=torch.Generator().manual_seed(0))
    texts = ["".join(map(chr, row)) for row in ids.tolist()]
    Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "texts.parquet")
    model = zoo.build("bert", head="classification", vocab_size=256)
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.bias[CHANNEL] = 12.0
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer("right").save_pretrained(tmp_path / "model")
    words = [str(tmp_path / name) for name in ("model", "texts.parquet", "out")]
    options = ["--weight", "1.0", "--batch", "8", "--length", "16", "--learning-rate", "0.05", "--scale", "4"]
    recipe("outlier_penalty.py", [*words, *options], monkeypatch)
    trained = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert trained.config._attn_implementation == "sdpa"
    before, after = largest(model, ids), largest(trained, ids)
    assert before == pytest.approx(12, rel=0.2)
    assert after < 0.95 * before
