"""The demo's models as runs of `training`: one pretrained classifier per attention, all trained and measured alike."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ..training import ConversionArguments, DataArguments, ModelArguments, Outcome, Task, run
from ..training.run import TRAINED
from .data import Sentences
from .measure import Batch, outliers
from .options import CONTROL, DemoOptions

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
ROTTEN_TOMATOES = "cornell-movie-review-data/rotten_tomatoes"


class Progress(TrainerCallback):
    """One progress bar per training."""

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


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all models of one demo share.

    Attributes:
        task: data ready for the model, and how to measure.
        data: the data in words.
        training: budget and folder.
        options: of the demo.
        source: where the pretrained model is loaded from.
    """

    task: Task
    data: DataArguments
    training: TrainingArguments
    options: DemoOptions
    source: str

    def model(self, variant: str) -> ModelArguments:
        """The run of one attention."""
        name = MINILM if self.options.model is None else None
        return ModelArguments(model=self.source, base_name=name, variant=variant, seeds=[self.options.seed])

    def conversion(self, variant: str) -> ConversionArguments:
        """The strength rises as the model learns; the control has nothing to convert."""
        if variant == CONTROL or not self.options.ramp:
            return ConversionArguments()
        return ConversionArguments(schedule="linear", schedule_share=self.options.ramp)

    def fine_tune(self, variant: str) -> Outcome:
        """Train and measure one model; head, batch order and dropout depend on the demo's seed alone."""
        task = replace(self.task, progress=Progress(variant))
        return run(task, self.model(variant), self.conversion(variant), self.training, self.options.seed)

    def trained(self, variant: str) -> PreTrainedModel:
        """The model that `fine_tune` left in the folder."""
        run_folder = Path(self.training.output_dir or "") / self.model(variant).run_name
        folder = run_folder / f"seed-{self.options.seed}" / TRAINED
        model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(folder)
        model.to(self.training.device)  # type: ignore[arg-type]  # transformers wraps torch's `to` without its types
        return model

    def batch(self) -> Batch:
        """A batch of rather long held-out sentences, for timing and for the check of the reloaded model."""
        size, rows = self.options.batch_size, list(self.task.test)
        start = len(range(0, len(rows), size)) * 3 // 4 * size
        collated = self.task.collate(rows[start : start + size])
        return {key: tensor.to(self.training.device) for key, tensor in collated.items()}


def set_up(
    options: DemoOptions, sentences: Sentences, tokenizer: PreTrainedTokenizerBase, source: str, folder: Path
) -> Setup:
    """Tokenise the sentences and write down the budget; `folder` is for the trained models."""
    data = DataArguments(
        dataset=options.dataset or ROTTEN_TOMATOES,
        dataset_name=ROTTEN_TOMATOES if options.dataset is None else None,
        columns=[options.text_column],
        label_column=options.label_column,
        train_rows=options.train_size,
        test_rows=options.test_size,
        max_length=options.max_length,
    )
    load = functools.partial(
        AutoModelForSequenceClassification.from_pretrained,
        source,
        dtype=torch.float32,
        num_labels=len(sentences.classes),
        id2label=dict(enumerate(sentences.classes)),
        label2id={label: index for index, label in enumerate(sentences.classes)},
    )
    task = Task(
        load=load,
        train=encode(sentences.train, tokenizer, options.max_length),
        test=by_length(encode(sentences.test, tokenizer, options.max_length)),
        collate=DataCollatorWithPadding(tokenizer),
        metrics=data.metrics,
        predict=predict,
        settings=data.settings,
        processor=tokenizer,
        figures=outliers,
    )
    return Setup(task=task, data=data, training=_arguments(options, folder), options=options, source=source)


def encode(rows: list[tuple[str, int]], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """Tokenise without padding; batches are padded to their own longest sentence."""
    encoded = tokenizer([text for text, _ in rows], truncation=True, max_length=max_length)
    return Dataset.from_dict({**encoded, "labels": [label for _, label in rows]})


def by_length(rows: Dataset) -> Dataset:
    """Sentences of similar length together, so that there is less padding; the same order for every model."""
    lengths = [len(ids) for ids in rows["input_ids"]]
    return rows.select(sorted(range(len(lengths)), key=lengths.__getitem__))


def predict(trainer: Trainer, test: Dataset) -> tuple[Sequence[float], Sequence[float]]:
    """The predicted and the true class of every held-out sentence."""
    found = trainer.predict(test)
    classes: list[float] = np.asarray(found.predictions).argmax(-1).tolist()
    truth: list[float] = np.asarray(found.label_ids).tolist()
    return classes, truth


def _arguments(options: DemoOptions, folder: Path) -> TrainingArguments:
    steps = -(-options.train_size // options.batch_size)
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        warmup_steps=steps // 10,
        train_sampling_strategy="group_by_length",  # half the padding, and so half the time, on short sentences
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
