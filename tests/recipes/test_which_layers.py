"""The recipe that compares rules for which layers to convert, on a tiny language model; and its tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import BertTokenizerFast, LlamaConfig, LlamaForCausalLM

from docs.tables import conversions
from tests.harness.recipes import needs_recipes, recipe

pytestmark = needs_recipes
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "film", "was", "fine", "and", "dull"]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The arguments that name a tiny model and a few texts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, pad_token_id=0
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    vocabulary = {word: place for place, word in enumerate(WORDS)}
    BertTokenizerFast(vocab=vocabulary).save_pretrained(tmp_path / "model")
    for split in ("train", "test"):
        texts = ["the film was fine and the film was dull"] * 20
        Dataset.from_dict({"text": texts}).to_parquet(str(tmp_path / "data" / f"{split}.parquet"))
    sizes = ["--tokens", "512", "--fit_rows", "4", "--length", "16", "--test_length", "16", "--test_rows", "4"]
    return ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "data"), "--rank", "4", *sizes]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT
@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # no accelerator here
def test_rules_are_compared(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A second call runs only what is not there, and other options need another file."""
    out = tmp_path / "found.json"
    recipe("which_layers.py", [*words, "--counts", "2", "--rules", "auto", "last", "--out", str(out)], monkeypatch)
    record = json.loads(out.read_text())
    by_name = {(run["rule"], run["count"]): run for run in record["runs"]}
    assert set(by_name) == {("auto", 2), ("last", 2)}
    assert by_name["last", 2]["layers"] == [2, 3]
    costs = {int(index): lost["divergence"] for index, lost in record["sensitivity"]["layers"].items()}
    assert by_name["auto", 2]["layers"] == sorted(sorted(costs, key=lambda index: costs[index])[:2])
    assert all(run["tokens"] == 512 and run["of"] == 4 for run in by_name.values())
    assert out.with_suffix(".png").stat().st_size > 5_000
    said = capsys.readouterr().out
    assert "last, 2 layers" in said
    assert "layers  auto" in said
    recipe("which_layers.py", [*words, "--counts", "2", "4", "--rules", "auto", "--out", str(out)], monkeypatch)
    again = json.loads(out.read_text())["runs"]
    assert again[:2] == record["runs"]
    assert [(run["rule"], run["count"]) for run in again[2:]] == [("auto", 4)]
    with pytest.raises(SystemExit, match="made with another hidden"):
        recipe("which_layers.py", [*words, "--hidden", "1", "--out", str(out)], monkeypatch)
    monkeypatch.setattr(conversions, "LAYERS", (out,))
    assert conversions.layers_table().count("| 2 of 4 |") == 2
