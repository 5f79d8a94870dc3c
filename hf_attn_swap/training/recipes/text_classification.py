"""Fine-tunes a classifier of texts or pairs of texts with a swapped attention, and the softmax control beside it.

    hf-attn-swap train text-classification ag_news --variant belief --seeds 0 1 2
    accelerate launch -m hf_attn_swap_cli train text-classification glue_sst2 --variant belief

The arguments are a configuration that ships or a YAML file, and then options; an option replaces the value in the file.
Every seed of the variant and of the control is one run in `<output_dir>/<variant>/seed-<n>`. A finished run is not done
again. A killed run continues from its last checkpoint.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
)

from .. import (
    About,
    ModelArguments,
    Task,
    TextDataArguments,
    json_object,
    launch,
    load_splits,
    made_of,
    scratch_config,
)


@dataclass(kw_only=True)
class RecipeArguments:
    """Arguments of this recipe alone."""

    card_name: str = field(default="classifier", metadata={"help": "Start of the run's name on its card."})
    regression: bool = field(default=False, metadata={"help": "The labels are numbers (STS-B)."})
    from_scratch: bool = field(default=False, metadata={"help": "Random weights instead of the checkpoint's."})
    config_overrides: str = field(
        default="{}", metadata={"help": 'Config values as JSON; {"num_hidden_layers": 2} keeps the first two layers.'}
    )

    def changed(self) -> dict[str, Any]:
        """The arguments on which the metrics depend, if they differ from the default."""
        usual = RecipeArguments()
        names = ("regression", "from_scratch", "config_overrides")
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(usual, name)}


def encode(dataset: Any, tokenizer: Any, data: TextDataArguments) -> Any:
    """Replace texts by token ids, truncated and without padding."""

    def tokens(rows: dict[str, list[Any]]) -> Any:
        texts = [list(map(str, rows[column])) for column in data.input_columns]
        return tokenizer(*texts, truncation=True, max_length=data.max_seq_length)

    keep = [name for name in dataset.column_names if name != "labels"]
    return dataset.map(tokens, batched=True, remove_columns=keep, desc="tokenise")


def by_length(dataset: Any) -> Any:
    """Sort rows by length, so that there is less padding. The order is the same for every model."""
    lengths = [len(ids) for ids in dataset["input_ids"]]
    return dataset.select(sorted(range(len(lengths)), key=lengths.__getitem__))


def predict(trainer: Any, test: Any) -> tuple[list[float], list[float]]:
    """The predicted and the true class of every held-out row; in a regression the predicted and the true number."""
    found = trainer.predict(test)
    logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    numbers = logits[:, 0] if logits.shape[1] == 1 else logits.argmax(-1)
    return numbers.tolist(), found.label_ids.tolist()


def build_task(model: ModelArguments, data: TextDataArguments, own: RecipeArguments) -> Task:
    """Read and check the data and the options, before any training."""
    train, test, classes = load_splits(data, labelled=not own.regression)
    if own.regression:
        train, test = (
            split.map(lambda row: {"labels": float(row[data.label_column_name])}, desc="labels")
            for split in (train, test)
        )
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path)
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
    values = {"num_labels": 1} if own.regression else {"num_labels": len(classes), **names}
    auto = AutoModelForSequenceClassification
    if own.from_scratch:
        config = scratch_config(model.model_name_or_path, own.config_overrides, **values)
        load = functools.partial(auto.from_config, config, dtype=torch.float32)
    else:
        values |= json_object(own.config_overrides, "--config_overrides")
        load = functools.partial(auto.from_pretrained, model.model_name_or_path, dtype=model.dtype, **values)
    return Task(
        load=load,
        train=encode(train, tokenizer, data),
        test=by_length(encode(test, tokenizer, data)),
        collate=DataCollatorWithPadding(tokenizer),
        metrics=data.metrics,
        predict=predict,
        settings=data.settings | own.changed(),
        processor=tokenizer,
        scratch=made_of(model.model_name_or_path, own.config_overrides) if own.from_scratch else "",
    )


def about(own: RecipeArguments) -> About:
    """The sentences of the card."""
    return About(
        prefix=own.card_name,
        task="text-classification",
        auto_class="AutoModelForSequenceClassification",
        intended_use="Compares attentions on this task; a classifier of texts like those it was trained on.",
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the recipe with these words, or with those of the command line."""
    launch(RecipeArguments, build_task, about, arguments, recipe="text_classification")
