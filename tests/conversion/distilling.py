"""What the tests of distillation share: a trainer on a few rows of a tiny model, and the loss of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from hf_attn_swap.conversion import DistillationTrainer, Losses
from tests import zoo
from tests.contract.harness import batch_of
from tests.harness.adapters import lora

HIDDEN = Losses(logits=0.0, hidden=1.0)
EVERY = Losses(logits=1.0, hidden=0.5, layers=0.25)


def rows_of(batch: dict[str, Any], times: int = 8) -> list[dict[str, Any]]:
    """The rows of a batch, several times."""
    count = len(next(iter(batch.values())))
    return [{key: value[row] for key, value in batch.items()} for row in range(count)] * times


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    given = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 5,
        "learning_rate": 2e-3,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
        "logging_steps": 10**6,
    }
    return TrainingArguments(output_dir=str(folder), **(given | more))


def distiller(
    model: Any, folder: Path, name: str = "bert", *, args: dict[str, Any] | None = None, **more: Any
) -> DistillationTrainer:
    more.setdefault("train_dataset", rows_of(batch_of(name, torch.float32)))
    return DistillationTrainer(model, arguments(folder, **(args or {})), **more)


def loss_of(trainer: DistillationTrainer, batch: dict[str, Any]) -> float:
    """The loss of a batch in evaluation mode, without gradients."""
    trainer.model.eval()
    with torch.no_grad():
        return float(trainer.compute_loss(trainer.model, batch))


def teacher_of(trainer: DistillationTrainer, batch: dict[str, Any]) -> Tensor:
    """What the teacher gives."""
    return zoo.output(trainer.teacher(trainer.model, trainer.model, batch))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def moved(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    """The names of what changed."""
    return {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}


def adapted(model: Any, name: str = "bert", **more: Any) -> Any:
    """The model with LoRA adapters on its attention projections, which change nothing yet."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return peft.get_peft_model(model, lora(name, **more))
