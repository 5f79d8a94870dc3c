"""Fine-tunes the demo's control, which keeps its own attention, by `training.run`; and measures any classifier."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from .. import unpatch_model
from ..conversion.trainer import Bar
from ..measuring.batches import evaluating, forward, without_labels
from ..text.bar import bar
from ..training import ConversionArguments, ModelArguments, Outcome, Task, run
from ..training.run import TRAINED
from .data import Rows, Sentences
from .options import DemoOptions


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all models of one demo share.

    Attributes:
        options: of the demo.
        sentences: to fine-tune and to measure on.
        source: where the pretrained model is loaded from.
        tokenizer: of the pretrained model.
        folder: for files that are needed during the run alone.
    """

    options: DemoOptions
    sentences: Sentences
    source: str
    tokenizer: PreTrainedTokenizerBase
    folder: Path

    def fine_tune(self) -> tuple[PreTrainedModel, Outcome]:
        """The fine-tuned control as a stock model, and its predictions on the held-out sentences."""
        seed = self.options.seed
        model = ModelArguments(model_name_or_path=self.source, seeds=[seed])
        outcome = run(self._task(), model, ConversionArguments(), self._arguments(), seed)
        trained = self.folder / model.run_name / f"seed-{seed}" / TRAINED
        control: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(trained)
        return unpatch_model(control), outcome

    def logits(self, model: PreTrainedModel, name: str) -> Tensor:
        """The logits (rows, classes) of a model on the held-out sentences; `name` stands beside the progress bar."""
        loader = DataLoader(
            self._encoded(self.sentences.test),
            batch_size=self.options.batch_size,
            collate_fn=DataCollatorWithPadding(self.tokenizer),
        )
        with evaluating(model):
            found = [
                forward(model, without_labels(batch)).logits.float().cpu()
                for batch in bar(loader, desc=name, unit="batch", leave=False)
            ]
        return torch.cat(found)

    def _task(self) -> Task:
        classes = self.sentences.classes
        load = functools.partial(
            AutoModelForSequenceClassification.from_pretrained,
            self.source,
            dtype=torch.float32,
            num_labels=len(classes),
            id2label=dict(enumerate(classes)),
            label2id={label: index for index, label in enumerate(classes)},
        )
        return Task(
            load=load,
            train=self._encoded(self.sentences.train),
            test=self._encoded(self.sentences.test),
            collate=DataCollatorWithPadding(self.tokenizer),
            metrics=("accuracy",),
            predict=self._predict,
            settings={},
            progress=Bar("fine-tune"),
        )

    def _predict(self, trainer: Trainer, test: Dataset) -> tuple[Sequence[float], Sequence[float]]:
        """The predicted and the true class of every held-out sentence."""
        assert isinstance(trainer.model, PreTrainedModel)
        return self.logits(trainer.model, "control").argmax(-1).tolist(), test["labels"]

    def _encoded(self, rows: Rows) -> Dataset:
        """Token ids without padding; batches are padded to their own longest sentence."""
        encoded = self.tokenizer([text for text, _ in rows], truncation=True, max_length=self.options.max_length)
        return Dataset.from_dict({**encoded, "labels": [label for _, label in rows]})

    def _arguments(self) -> TrainingArguments:
        steps = -(-self.options.train_size // self.options.batch_size)
        return TrainingArguments(
            output_dir=str(self.folder),
            num_train_epochs=1,
            per_device_train_batch_size=self.options.batch_size,
            learning_rate=self.options.learning_rate,
            warmup_steps=steps // 10,
            train_sampling_strategy="group_by_length",  # half the padding, and so half the time, on short sentences
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,  # the task brings its own bar
            dataloader_pin_memory=torch.cuda.is_available(),
        )
