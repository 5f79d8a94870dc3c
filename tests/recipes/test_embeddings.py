"""The study of sentence embeddings: what a conversion costs the correlation with people's scores of pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests import zoo
from tests.harness.byte_tokenizer import byte_tokenizer
from tests.harness.recipes import needs_recipes, recipe

pytestmark = needs_recipes
WORDS = ("A man plays.", "It rains.", "Rain falls.", "Somebody sings a song.", "No.")
PAIRS = [(one, two, float(abs(len(one) - len(two)))) for one in WORDS for two in WORDS]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A tiny encoder, texts to convert on, and scored pairs."""
    tokenizer = byte_tokenizer("right")
    model = zoo.build("bert", torch.float32, head="base", vocab_size=len(tokenizer), max_position_embeddings=128)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for name in ("texts", "pairs"):
        (tmp_path / name).mkdir()
    Dataset.from_dict({"text": [f"Row number {place} of the texts." for place in range(40)]}).to_parquet(
        tmp_path / "texts" / "train.parquet"
    )
    first, second, labels = zip(*PAIRS, strict=True)
    rows = {"sentence1": list(first), "sentence2": list(second), "label": list(labels)}
    Dataset.from_dict(rows).to_parquet(tmp_path / "pairs" / "validation.parquet")
    return tmp_path / "model", tmp_path / "texts", tmp_path / "pairs"


@pytest.mark.slow
def test_record(folders: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    model, texts, pairs = map(str, folders)
    out = tmp_path / "out.json"
    words = ["--model", model, "--texts", texts, "--sts", pairs, "--variants", "gated", "--tokens", "700"]
    recipe("embeddings.py", [*words, "--out", str(out)], monkeypatch)
    record = json.loads(out.read_text())
    assert record["pairs"] == len(PAIRS)
    assert record["runs"]["gated"]["patched"] == pytest.approx(record["stock"]), "gates start as the stock model"
    for run in record["runs"].values():
        assert run["difference"] == pytest.approx(run["converted"] - record["stock"])
        assert 0 < run["tokens"] <= 700
    assert "| `gated` |" in capsys.readouterr().out
