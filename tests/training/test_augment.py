"""Soft labels have the loss of their formula, and an augmented training changes the rows to train on alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import TrainingArguments, ViTForImageClassification, ViTImageProcessorPil

from hf_attn_swap.training import augment
from hf_attn_swap.training.augment import AugmentArguments, Augmentation, with_drop_path
from hf_attn_swap.training.penalty import PenalizedTrainer
from hf_attn_swap.training.recipes.image_classification import prepare
from hf_attn_swap.training.soft_labels import SoftLabelTrainer
from tests import zoo
from tests.harness.recipes import NO_SAVING, needs_recipes, recipe

from .conftest import pictures

ALL = {"rand_augment": 9, "random_erasing": 0.25, "mixup": 0.8, "cutmix": 1.0, "drop_path": 0.5}
SIZES = (
    '{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8}'
)


@pytest.fixture
def torchvision() -> Any:
    try:
        return augment._torchvision()
    except ImportError as problem:
        pytest.skip(f"no torchvision that fits torch (the extra `augment`): {problem.__cause__}")


def trainer_of(model: Any, folder: Path, smoothing: float = 0.0, **penalty: float) -> Any:
    args = TrainingArguments(str(folder), use_cpu=True, report_to="none", label_smoothing_factor=smoothing)
    return (PenalizedTrainer if penalty else SoftLabelTrainer)(model, args, **penalty)


def rows_of(own: AugmentArguments, flip: bool) -> dict[str, Any]:
    """Two rows of pixels (3,16,16) with their labels."""
    images = [Image.effect_noise((16, 16), 60).convert("RGB") for _ in range(2)]
    processor = ViTImageProcessorPil(size={"height": 16, "width": 16})
    return prepare({"img": images, "labels": [0, 1]}, "img", processor, flip, Augmentation(own, 2))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_mixed_rows_by_hand(smoothing: float, tmp_path: Path) -> None:
    """A row that is 0.7 of one class and 0.3 of another costs 0.7 and 0.3 of what these cost; smoothing included.

    Under a penalty, the penalty comes to it. Hard labels have the loss of the model, or of Trainer's own smoothing.
    """
    model = zoo.build("vit", head="classification")
    pixels, share, other = zoo.inputs("vit", batch=4)["pixel_values"], 0.7, torch.tensor([1, 1, 0, 0])
    one = torch.tensor([0, 1, 1, 0])
    soft = share * F.one_hot(one, model.num_labels) + (1 - share) * F.one_hot(other, model.num_labels)
    with torch.no_grad():
        logs = model(pixels).logits.log_softmax(-1)

        def cost(labels: torch.Tensor) -> torch.Tensor:
            chosen = logs.gather(1, labels[:, None])[:, 0]
            return -((1 - smoothing) * chosen + smoothing * logs.mean(-1)).mean()

        wanted = share * cost(one) + (1 - share) * cost(other)
        trainer = trainer_of(model, tmp_path, smoothing)
        loss, outputs = trainer.compute_loss(model, {"pixel_values": pixels, "labels": soft}, return_outputs=True)
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(outputs.logits.log_softmax(-1), logs)
        hard = trainer.compute_loss(model, {"pixel_values": pixels, "labels": one})
        torch.testing.assert_close(hard, cost(one))
        model.train()
        penalized = trainer_of(model, tmp_path, smoothing, outlier_penalty=1.0)
        more = penalized.compute_loss(model, {"pixel_values": pixels, "labels": soft})
        assert more > wanted, "the model has no dropout"


@needs_recipes
def test_without_torchvision(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    data = pictures(tmp_path / "a.parquet", 4)
    words = ["cifar10", "--train_file", str(data), "--test_file", str(data), "--model_name_or_path", "vit"]
    words += ["--from_scratch", "true", "--config_overrides", SIZES, "--image_size", "16", "--use_cpu", "true"]
    with pytest.raises(SystemExit, match=r'error: .*needs? a torchvision that fits torch: pip install "hf-attn-swap\['):
        recipe("image_classification.py", [*words, "--mixup", "0.8", "--output_dir", str(tmp_path)], monkeypatch)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rand_augment": 11}, "--rand_augment must lie in 0 to 10, got 11"),
        ({"drop_path": 1.0}, "--drop_path must be at least 0 and below 1, got 1.0"),
        ({"mixup": -1.0}, "--mixup and --cutmix must be at least 0"),
    ],
)
def test_values_outside_their_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AugmentArguments(**values)


def test_rows_to_train_on(torchvision: Any) -> None:
    """Erasing with certainty leaves noise in a rectangle, and RandAugment another picture; labels get a share."""
    torch.manual_seed(0)
    erased = rows_of(AugmentArguments(random_erasing=0.999), flip=False)
    assert erased["labels"] == [0, 1], "hard labels without a mix"
    changed = rows_of(AugmentArguments(rand_augment=9, cutmix=1.0), flip=False)
    assert torch.equal(torch.stack(changed["labels"]), torch.eye(2))
    batch = Augmentation(AugmentArguments(mixup=0.8), 2).collate(
        [{"pixel_values": torch.full((3, 4, 4), float(i)), "labels": label} for i, label in enumerate(torch.eye(2))]
    )
    share = batch["labels"][0, 0]
    assert 0 < share < 1
    torch.testing.assert_close(batch["pixel_values"][0], (1 - share).expand(3, 4, 4))
    torch.testing.assert_close(batch["labels"].sum(-1), torch.ones(2))


def test_paths_are_dropped_in_training_alone(torchvision: Any) -> None:
    """By a rate that rises with the depth; a dropped row passes the layer as it came."""
    model = zoo.build("vit", head="classification")
    pixels = zoo.inputs("vit", batch=64)["pixel_values"]
    with torch.no_grad():
        wanted = model(pixels).logits
        assert isinstance(with_drop_path(model, 0.9), ViTForImageClassification)
        assert torch.equal(model(pixels).logits, wanted)
        rates = [layer.dropout[1].p for layer in model.vit.layers]
        assert rates == pytest.approx([0, 0.45, 0.9])
        torch.manual_seed(0)
        states = torch.randn(64, 5, model.config.hidden_size)
        same = (model.vit.layers[2].train()(states) == states).flatten(1).all(1)
        assert 40 <= same.sum() < 64, "0.81 of them, about"
    with pytest.raises(ValueError, match="--drop_path is for the architecture vit"):
        with_drop_path(zoo.build("bert"), 0.1)


@needs_recipes
def test_a_run_with_all_of_it(torchvision: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The weights differ from those of a plain run, the held-out rows do not, and the record says what was done."""
    words = ["cifar10", "--train_file", str(pictures(tmp_path / "a.parquet", 16)), "--model_name_or_path", "vit"]
    words += ["--test_file", str(pictures(tmp_path / "b.parquet", 6)), "--from_scratch", "true", "--image_size", "16"]
    words += ["--config_overrides", SIZES, "--use_cpu", "true", "--per_device_train_batch_size", "8", *NO_SAVING]
    more = [word for name, value in ALL.items() for word in (f"--{name}", str(value))]
    more += ["--label_smoothing_factor", "0.1"]
    records = []
    for name, own in (("plain", []), ("all", more)):
        recipe("image_classification.py", [*words, *own, "--output_dir", str(tmp_path / name)], monkeypatch)
        records.append(json.loads((tmp_path / name / "softmax" / "seed-0" / "outcome.json").read_text()))
    plain, augmented = records
    assert augmented["references"] == plain["references"] == [0, 1] * 3
    names = {"label_smoothing": "0.1", **{name: str(value) for name, value in ALL.items()}}
    assert {name: augmented["settings"][name] for name in names} == names
    assert not names.keys() & plain["settings"].keys()
    weights = [
        ViTForImageClassification.from_pretrained(tmp_path / name / "softmax" / "seed-0" / "model").state_dict()
        for name in ("plain", "all")
    ]
    assert not all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
