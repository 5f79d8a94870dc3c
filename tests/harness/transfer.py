"""A trainer of attention transfer on a few rows of a tiny model, and the loss of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from hf_attn_swap.conversion import AttentionTransferTrainer
from tests.contract.harness import batch_of


def trainer_of(model: Any, folder: Path, name: str = "bert", **arguments: Any) -> AttentionTransferTrainer:
    batch = batch_of(name, torch.float32)
    rows = [{key: value[row] for key, value in batch.items()} for row in (0, 1)] * 8
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=5,
        learning_rate=2e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    return AttentionTransferTrainer(model, args, train_dataset=rows, **arguments)


def loss_of(trainer: AttentionTransferTrainer, batch: dict[str, Any]) -> float:
    with torch.no_grad():
        return float(trainer.compute_loss(trainer.model, batch))
