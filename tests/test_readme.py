"""README says what the registry says, and its Python runs as written, on a tiny local model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from docs.tables import published, written
from hf_attn_swap.variants.base import VARIANTS

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_tables_are_what_they_are_about() -> None:
    assert written(README) == README


def test_every_published_run_records_its_study_and_steps() -> None:
    """The tables sort by the one and print the other; neither is guessed from a name or a sentence."""
    assert all(run.study is not None and run.steps is not None for run in published())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT
@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # no accelerator here
def test_python_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    batch = torch.arange(48).view(4, 12)
    names: dict[str, object] = {"batches": [{"input_ids": batch}], "rows": [{"input_ids": row} for row in batch]}
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 9
    try:
        for block in blocks:
            exec(
                compile(block.replace("bert-base-uncased", "tiny").replace("300_000", "96"), "README.md", "exec"), names
            )
    finally:
        VARIANTS.pop("damped", None)
    assert (tmp_path / "my-model" / "model.safetensors").exists()
    assert names["Damped"] is not None
