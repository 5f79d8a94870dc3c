"""Swaps the attention of one pretrained classifier and fine-tunes it, while the strength rises."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from .. import patch_model
from ..conversion import StrengthSchedule
from .data import Sentences
from .measure import Batch
from .options import DemoOptions


@dataclass(frozen=True)
class Trained:
    """One fine-tuned model, with its training loss and the seconds of its training."""

    model: PreTrainedModel
    parameters_added: int
    train_loss: float
    seconds: float


class Progress(TrainerCallback):
    """Shows one progress bar per training. The Trainer prints nothing else."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bar: tqdm[Any] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the bar."""
        self.bar = tqdm(total=state.max_steps, desc=f"{self.name}: train", unit="step", leave=False)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar."""
        assert self.bar is not None
        self.bar.update()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the bar."""
        assert self.bar is not None
        self.bar.close()


def encode(rows: list[tuple[str, int]], tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[dict[str, Any]]:
    """Tokenise without padding. A batch is padded later, to its own longest sentence."""
    encoded = tokenizer([text for text, _ in rows], truncation=True, max_length=max_length)
    return [{key: encoded[key][i] for key in encoded} | {"labels": label} for i, (_, label) in enumerate(rows)]


def held_out_batches(
    rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, batch_size: int, device: torch.device
) -> list[Batch]:
    """Batches of sentences of similar length, the same for every model."""
    collate = DataCollatorWithPadding(tokenizer)
    ordered = sorted(rows, key=lambda row: len(row["input_ids"]))
    starts = range(0, len(ordered), batch_size)
    batches = (collate(ordered[start : start + batch_size]) for start in starts)
    return [{key: tensor.to(device) for key, tensor in batch.items()} for batch in batches]


def fine_tune(
    name: str, source: str, sentences: Sentences, tokenizer: PreTrainedTokenizerBase, options: DemoOptions
) -> Trained:
    """Load the pretrained model, swap its attention for `name`, and fine-tune it for one pass over the training part.

    The new head, the order of the batches and the dropout depend on `options.seed` alone. So two models differ only in
    their attention.
    """
    set_seed(options.seed)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
        source, num_labels=len(sentences.classes), dtype=torch.float32
    )
    model.config.id2label = dict(enumerate(sentences.classes))
    model.config.label2id = {label: index for index, label in enumerate(sentences.classes)}
    before = _count(model)
    patch_model(model, name, strength=0.0 if options.ramp else 1.0)
    rows = encode(sentences.train, tokenizer, options.max_length)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=_arguments(options, folder, steps=-(-len(rows) // options.batch_size)),
            train_dataset=rows,
            data_collator=DataCollatorWithPadding(tokenizer),
            callbacks=[StrengthSchedule(share=options.ramp), Progress(name)],
        )
        trainer.remove_callback(PrinterCallback)
        result = trainer.train()
    return Trained(model, _count(model) - before, result.training_loss, result.metrics["train_runtime"])


def _arguments(options: DemoOptions, folder: str, steps: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        num_train_epochs=1,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        warmup_steps=steps // 10,
        seed=options.seed,
        train_sampling_strategy="group_by_length",  # half the padding, and so half the time, on short sentences
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
