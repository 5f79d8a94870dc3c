"""SetFit trains a classifier on a converted encoder, and saves and loads it with its swap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from hf_attn_swap import describe

setfit = pytest.importorskip("setfit", reason="SetFit is not installed (the extra `tools`)")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of other packages
TEXTS = ["good film", "dull film", "a fine day", "a bad day, and a longer text"]


def attentions(model: setfit.SetFitModel) -> list[str]:
    return [row.attention for row in describe(model.model_body[0].auto_model).rows]


@pytest.mark.parametrize("variant", ["belief", "modern_hopfield"])
def test_trained_saved_and_loaded(variant: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = setfit.SetFitModel.from_pretrained(str(checkpoint("bert", variant, head="base")), device="cpu")
    before = model.encode(TEXTS)
    arguments = setfit.TrainingArguments(output_dir=str(tmp_path / "run"), num_epochs=1, batch_size=2, report_to="none")
    data = Dataset.from_dict({"text": TEXTS, "label": [1, 0, 1, 0]})
    setfit.Trainer(model=model, args=arguments, train_dataset=data).train()
    assert set(attentions(model)) == {variant}
    assert abs(model.encode(TEXTS) - before).max() > 0
    model.save_pretrained(str(tmp_path / "saved"))
    again = setfit.SetFitModel.from_pretrained(str(tmp_path / "saved"), device="cpu")
    assert attentions(again) == attentions(model)
    assert torch.equal(torch.as_tensor(again.predict_proba(TEXTS)), torch.as_tensor(model.predict_proba(TEXTS)))
