"""The penalty on large activations: an option of the recipes for texts and images, and without it nothing changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, TrainingArguments

from hf_attn_swap.quantization.places import is_norm
from hf_attn_swap.training.penalty import PenalizedTrainer, PenaltyArguments
from tests import zoo
from tests.harness.recipes import NO_SAVING, needs_recipes, recipe

from .conftest import options


def largest(model: Any, inputs: torch.Tensor) -> float:
    """The largest number that a norm reads, of ids or of pixels."""
    results: list[float] = []
    for module in model.eval().modules():
        if is_norm(module):
            module.register_forward_pre_hook(lambda _, args: results.append(float(args[0].detach().abs().max())))
    with torch.no_grad():
        model(inputs)
    return max(results)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForSequenceClassification.from_pretrained(folder / "softmax" / "seed-0" / "model")
    return dict(model.state_dict())


@needs_recipes
def test_a_recipe_takes_it(tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """0 is the training without the option, bit for bit and by its settings; 1 is another, and the record says so."""
    for name, penalty in (("without", ()), ("zero", ("0.0",)), ("one", ("1.0", "--outlier_scale", "0.5"))):
        words = ("--outlier_penalty", *penalty) if penalty else ()
        recipe("text_classification.py", options(tiny, tmp_path / name, *words, *NO_SAVING), monkeypatch)
    without, zero, one = (weights(tmp_path / name) for name in ("without", "zero", "one"))
    assert all(torch.equal(without[name], zero[name]) for name in without)
    assert not all(torch.equal(without[name], one[name]) for name in without)
    records = [
        json.loads((tmp_path / name / "softmax" / "seed-0" / "outcome.json").read_text()) for name in ("zero", "one")
    ]
    assert "outlier_penalty" not in records[0]["settings"]
    assert records[1]["settings"]["outlier_penalty"] == "1.0"
    assert records[1]["conversion"][-1] == "The loss has a penalty on activations above 0.5, of weight 1."


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of one kind of model, with labels."""

    def __init__(self, name: str) -> None:
        self.batch = zoo.inputs(name, batch=16, **({"length": 7} if name == "bert" else {}))

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: tensor[row] for name, tensor in self.batch.items()} | {"labels": row % 2}


@pytest.mark.parametrize("name", ["bert", "vit"])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_the_largest_activation_falls(name: str, penalty: float, tmp_path: Path) -> None:
    model = zoo.build(name, head="classification")
    with torch.no_grad():
        block = model.bert.encoder.layer[0].output if name == "bert" else model.vit.layers[0].mlp
        block.get_submodule("dense" if name == "bert" else "fc2").bias[3] = 12.0
    rows = Rows(name)
    inputs = rows.batch["input_ids" if name == "bert" else "pixel_values"]
    before = largest(model, inputs)
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=10,
        per_device_train_batch_size=16,
        learning_rate=0.05,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    PenalizedTrainer(model, arguments, train_dataset=rows, outlier_penalty=penalty, outlier_scale=4.0).train()
    after = largest(model, inputs)
    assert after < 0.97 * before if penalty else after > 0.97 * before


def test_no_penalty_of_other_numbers() -> None:
    for wrong in ({"outlier_penalty": -1.0}, {"outlier_scale": 0.0}, {"outlier_penalty": float("nan")}):
        with pytest.raises(ValueError, match="outlier_penalty must be at least 0"):
            PenaltyArguments(**wrong)
    assert PenaltyArguments().penalty == {}
