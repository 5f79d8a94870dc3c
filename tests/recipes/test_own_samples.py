"""A language model writes its own tokens, is distilled on them, and its loss is drawn against the tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_dataset
from transformers import LlamaConfig, LlamaForCausalLM

from tests.harness.recipes import NO_SAVING, needs_recipes, recipe

pytestmark = needs_recipes


@pytest.fixture
def tiny_lm(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(30.0)  # a random model's distributions are all but uniform
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def samples(tiny_lm: Path, tmp_path: Path, monkeypatch: Any) -> Path:
    sizes = ["--tokens", "640", "--test_tokens", "64", "--length", "16", "--batch", "8"]
    recipe("sample_tokens.py", [str(tiny_lm), str(tmp_path / "own"), *sizes], monkeypatch)
    return tmp_path / "own"


def test_samples_follow_the_model(tiny_lm: Path, samples: Path) -> None:
    """Rows start with the first token, and the model finds them likelier than shuffled rows."""
    rows = torch.tensor(
        load_dataset("parquet", data_files=str(samples / "train.parquet"), split="train")["input_ids"][:]
    )
    assert rows.shape == (40, 16)
    assert (rows[:, 0] == 1).all()
    assert len(rows.unique(dim=0)) == len(rows)
    model = LlamaForCausalLM.from_pretrained(tiny_lm)
    shuffled = rows[:, torch.randperm(15, generator=torch.Generator().manual_seed(0)) + 1]
    with torch.no_grad():
        own = model(input_ids=rows, labels=rows).loss
        other = model(input_ids=shuffled, labels=shuffled).loss
    assert own < other - 0.1


@pytest.mark.slow
def test_curve(tiny_lm: Path, samples: Path, tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "curve.json"
    words = ["--model", str(tiny_lm), "--data", str(samples), "--tokens", "20480", "--rows", "8", "--out", str(out)]
    recipe("distil_curve.py", [*words, "--variants", "belief", "simpletron_resl@1"], monkeypatch)
    record = json.loads(out.read_text())
    for variant in ("belief", "simpletron_resl@1"):
        points = record["runs"][variant]
        assert [point["tokens"] for point in points] == [0, 10112, 20480]
        assert points[-1]["kl"] < points[0]["kl"]
    assert out.with_suffix(".png").stat().st_size > 5_000
    before = out.read_text()
    recipe("distil_curve.py", [*words, "--variants", "belief"], monkeypatch)
    assert json.loads(out.read_text())["runs"] == json.loads(before)["runs"], "what is there is not run again"
    with pytest.raises(SystemExit, match="made with another rows"):
        recipe("distil_curve.py", [*words[:-1], str(out), "--rows", "4", "--variants", "belief"], monkeypatch)


def reading(model: Path, samples: Path) -> list[str]:
    """The arguments of the recipe that name the model and its rows of 16 token ids."""
    data = ["--dataset_name", str(samples), "--text_column_names", "input_ids", "--max_seq_length", "16"]
    return ["--model_name_or_path", str(model), *data]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT
def test_language_model_recipe_reads_token_ids(tiny_lm: Path, samples: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """And measures KL and agreement beside the perplexity; the control, which is not trained, has lost nothing."""
    words = [
        *reading(tiny_lm, samples),
        *("--variant", "belief", "--stages", '{"stage": "distil", "tokens": 320, "rank": 4}', "fine_tune"),
        *("--num_train_epochs", "0", "--per_device_train_batch_size", "4", "--report_to", "none", "--use_cpu", "true"),
        *("--dataloader_pin_memory", "false", "--disable_tqdm", "true", "--output_dir", str(tmp_path / "run")),
        *NO_SAVING,
    ]
    recipe("language_modeling.py", words, monkeypatch)
    result = json.loads((tmp_path / "run" / "belief" / "results.json").read_text())
    measured = {metric["name"]: metric["values"][0] for metric in result["converted"]["metrics"]}
    control = {metric["name"]: metric["values"][0] for metric in result["control"]["metrics"]}
    assert control["kl_to_pretrained"] == pytest.approx(0, abs=1e-5)
    assert control["agreement"] == 1
    assert measured["kl_to_pretrained"] > 0
    assert 0 < measured["agreement"] < 1
    assert result["steps"] == ["distil"]
    assert any("320 tokens, LoRA of rank 4" in sentence for sentence in result["conversion"])
