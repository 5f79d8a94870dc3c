"""The callback of outliers in any `Trainer` logs what `record` says of the same batches, and leaves nothing behind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import accelerate.utils
import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_attn_swap import patch_model
from hf_attn_swap.analysis import OutlierCallback, record
from tests import zoo
from tests.contract.harness import fresh

ROWS, BATCH = 16, 2


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of 7 tokens with padding at the end."""

    def __init__(self) -> None:
        batch = zoo.inputs("bert", batch=ROWS, length=7, padded="right")
        self.batch = {**batch, "labels": batch["input_ids"]}

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: tensor[row] for name, tensor in self.batch.items()}


def trained(model: Any, folder: Path, every: int, **options: Any) -> Any:
    """A trainer after eight batches, with the rows in their order."""
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.add_callback(OutlierCallback(trainer, every=every))
    trainer.train()
    return trainer


def logged(trainer: Any) -> dict[int, tuple[float, float]]:
    return {
        entry["step"]: (entry["kurtosis"], entry["max_inf_norm"])
        for entry in trainer.state.log_history
        if "kurtosis" in entry
    }


def hooks(model: Any) -> list[tuple[int, int]]:
    return [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]


@pytest.mark.parametrize("variant", [None, "outeffhop"])
def test_it_logs_what_record_says(variant: str | None, tmp_path: Path) -> None:
    """Each of four steps accumulates two batches; evaluations between them, of other weights, do not count."""
    model = fresh("bert", torch.float32)
    if variant is not None:
        patch_model(model, variant)
    first, before = copy.deepcopy(model), hooks(model)
    options = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.05}
    trainer = trained(model, tmp_path, 2, **options)
    found = logged(trainer)
    assert list(found) == [1, 2, 4]
    assert hooks(model) == before, "no hook is left"
    rows = Rows()
    with record(first) as recording, torch.no_grad():
        for start in (0, BATCH):
            first(**{name: tensor[start : start + BATCH] for name, tensor in rows.batch.items()})
    assert found[1] == pytest.approx((recording.kurtosis, recording.max_inf_norm), rel=1e-5)
    assert found[2] != pytest.approx(found[1], rel=1e-3), "the weights have changed"
    losses = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == [1, 2, 3, 4], "the log of the loss stays"


def test_processes_are_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process whose numbers are all 100 times as large: means over both, and the largest mean."""
    alone = logged(trained(fresh("bert", torch.float32), tmp_path, 4))

    def gathered(own: list[Any]) -> list[Any]:
        (other,) = copy.deepcopy(own)
        for activation in other.values():
            activation.kurtosis = [100 * value for value in activation.kurtosis]
            activation.max_inf_norm = [100 * value for value in activation.max_inf_norm]
        return [*own, other]

    monkeypatch.setattr(accelerate.utils, "gather_object", gathered)
    both = logged(trained(fresh("bert", torch.float32), tmp_path, 4))
    assert list(both) == list(alone) == [1, 4, 8]
    for step, values in both.items():
        assert values == pytest.approx([50.5 * value for value in alone[step]], rel=1e-5)


def test_activations_that_are_not_finite_do_not_end_a_training(tmp_path: Path) -> None:
    model = fresh("bert", torch.float32)
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.bias[0] = float("inf")
    (values, *_) = logged(trained(model, tmp_path, 100)).values()
    assert not torch.isfinite(torch.tensor(values)).all()
