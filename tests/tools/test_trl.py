"""TRL's trainers train a converted language model: one step each, packed rows included."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_attn_swap import list_variants, set_strength, unpatch_model

trl = pytest.importorskip("trl", reason="TRL is not installed (the extra `tools`)")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of other packages
TEXTS = ["The film was a long one.", "A second text.", "Short.", "Another text, with some more words in it."]
PAIRS = {"prompt": TEXTS, "chosen": [" Yes."] * 4, "rejected": [" No, not at all."] * 4}
ARGUMENTS = dict(max_steps=1, per_device_train_batch_size=2, report_to="none", use_cpu=True, save_strategy="no", seed=0)


def sft(model: Any, tokenizer: Any, folder: Path, **arguments: Any) -> tuple[Any, float]:
    """One step of supervised fine-tuning. Returns the trainer and its loss."""
    args = trl.SFTConfig(output_dir=str(folder), max_length=64, **ARGUMENTS, **arguments)
    rows = Dataset.from_dict({"text": TEXTS})
    trainer = trl.SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    return trainer, trainer.train().training_loss


def load(folder: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("variant", [name for name in list_variants() if name != "softmax"])
def test_one_step_of_sft(variant: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """At strength 0 the loss is the stock model's; at strength 1 it is another, except for gates; the weights move."""
    model, tokenizer = load(checkpoint("llama", variant))
    stock = unpatch_model(copy.deepcopy(model))
    original = set_strength(copy.deepcopy(model), 0.0)
    _, wanted = sft(stock, tokenizer, tmp_path / "stock")
    _, at_zero = sft(original, tokenizer, tmp_path / "zero")
    before = {name: value.clone() for name, value in model.named_parameters()}
    trainer, at_one = sft(model, tokenizer, tmp_path / "one")
    assert at_zero == pytest.approx(wanted, rel=1e-6)
    assert variant == "gated" or abs(at_one - wanted) > 1e-6, "only gates start as the stock model"
    assert any(not torch.equal(value, before[name]) for name, value in model.named_parameters())
    trainer.save_model(str(tmp_path / "saved"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.attn_swap["swaps"][0]["variant"] == variant


@pytest.mark.parametrize("variant", ["belief", "simpletron_resl"])
def test_packed_rows_do_not_read_each_other(variant: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Texts packed into one row give the logits that they have alone."""
    model, tokenizer = load(checkpoint("llama", variant))
    arguments = dict(packing=True, packing_strategy="bfd", padding_free=False)
    args = trl.SFTConfig(output_dir=str(tmp_path), max_length=64, **ARGUMENTS, **arguments)
    rows = Dataset.from_dict({"text": TEXTS})
    trainer = trl.SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        packed = trainer.model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    ids, places = batch["input_ids"], batch["position_ids"]
    assert (places == 0).sum() > len(ids), "no row holds two texts"
    for row, place in zip(range(len(ids)), places, strict=True):
        starts = [*torch.nonzero(place == 0).flatten().tolist(), ids.shape[1]]
        for start, end in itertools.pairwise(starts):
            with torch.no_grad():
                alone = model(ids[row : row + 1, start:end]).logits
            torch.testing.assert_close(packed[row, start:end], alone[0], rtol=1e-4, atol=1e-4)


def test_one_step_of_dpo(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The reference model is a copy with the same swap, so the first loss is log 2."""
    model, tokenizer = load(checkpoint("llama", "belief"))
    args = trl.DPOConfig(output_dir=str(tmp_path), max_length=64, **ARGUMENTS)
    trainer = trl.DPOTrainer(model=model, args=args, train_dataset=Dataset.from_dict(PAIRS), processing_class=tokenizer)
    loss = trainer.train().training_loss
    assert loss == pytest.approx(0.6931, abs=1e-3)
