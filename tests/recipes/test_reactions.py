"""The tokenizer of chemical reactions, and a masked model that is trained on rows of its token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AlbertConfig, AlbertForMaskedLM, AutoTokenizer

from tests.harness.recipes import NO_SAVING, RECIPES, needs_recipes, recipe

pytestmark = needs_recipes
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "C", "Cl", "c", "1", "(", ")", "=", "O", "[nH]", ".", ">>")


def test_a_masked_model_on_rows_of_reactions(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    from prepare_reactions import tokenizer_of

    (tmp_path / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    tokenizer_of(tmp_path / "vocab.txt").save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer("ClC(=O)c1[nH]c1.O>>CN")["input_ids"]
    shown = ["Cl", "C", "(", "=", "O", ")", "c", "1", "[nH]", "c", "1", ".", "O", ">>", "C", "[UNK]"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["[CLS]", *shown, "[SEP]"]

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = AlbertConfig(vocab_size=len(WORDS), embedding_size=8, **sizes)
    AlbertForMaskedLM(config).save_pretrained(tmp_path / "model")
    for split in ("train", "test"):
        Dataset.from_dict({"input_ids": [ids] * 8}).to_parquet(tmp_path / "data" / f"{split}.parquet")
    words = ["--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(tmp_path / "data")]
    words += ["--objective", "masked", "--text_column_names", "input_ids", "--max_seq_length", "16"]
    words += ["--max_steps", "2", "--variant", "belief", "--output_dir", str(tmp_path / "runs"), *NO_SAVING]
    recipe("language_modeling.py", words, monkeypatch)
    result = json.loads((tmp_path / "runs" / "belief" / "results.json").read_text("utf-8"))
    assert result["task"] == "fill-mask"
    assert result["converted"]["metrics"][0]["name"] == "perplexity"
    assert result["converted"]["metrics"][0]["values"][0] > 1
