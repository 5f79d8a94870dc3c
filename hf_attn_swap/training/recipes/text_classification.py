"""Fine-tunes a classifier of texts or pairs of texts with a swapped attention, and the softmax control beside it.

    hf-attn-swap train text-classification ag_news --variant belief --seeds 0 1 2
    accelerate launch -m hf_attn_swap_cli train text-classification glue_sst2 --variant belief

The arguments are a configuration that ships or a YAML file, and then options; an option replaces the value in the file.
Every seed of the variant and of the control is one run in `<output_dir>/<variant>/seed-<n>`. A finished run is not done
again. A killed run continues from its last checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
    ScratchArguments,
    Task,
    TextDataArguments,
    launch,
    load_splits,
    made_of,
    scratch_config,
)
from ..metrics import scores
from ..penalty import PenaltyArguments


@dataclass(kw_only=True)
class RecipeArguments(PenaltyArguments, ScratchArguments):
    """Arguments of this recipe alone."""

    second_test_split_name: str | None = field(
        default=None, metadata={"help": "Split to measure on too, such as MNLI's validation_mismatched."}
    )
    regression: bool = field(default=False, metadata={"help": "The labels are numbers (STS-B)."})

    def changed(self) -> dict[str, Any]:
        """The arguments on which the metrics depend, if they differ from the default."""
        defaults = vars(RecipeArguments())
        names = ("second_test_split_name", "regression", "from_scratch", "config_overrides")
        return {name: getattr(self, name) for name in names if getattr(self, name) != defaults[name]} | self.penalty


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
    output = trainer.predict(test)
    logits = output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
    numbers = logits[:, 0] if logits.shape[1] == 1 else logits.argmax(-1)
    return numbers.tolist(), output.label_ids.tolist()


def second_figures(trainer: Any, _: Any, second: Any, split: str, metrics: Sequence[str]) -> dict[str, float]:
    """The metrics on the second held-out split, by names that end in the split's."""
    measured = scores(metrics, *predict(trainer, second))
    return {f"{name}_{split}": value for name, value in measured.items()}


def pad_alike(tokenizer: Any, config: Any, name: str) -> None:
    """Give tokenizer and config one padding token, as both are saved. A decoder classifies at the last other token.

    Where the tokenizer has none (GPT-2, LLaMA), it is the config's, or else the end of the text.

    Raises:
        ValueError: there is no such token, or the model has no embedding of it.
    """
    text = config.get_text_config()
    if tokenizer.pad_token is None:
        stated = getattr(text, "pad_token_id", None)
        named = stated is not None and 0 <= stated < len(tokenizer)  # some configs say -1
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(stated) if named else tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise ValueError(
            f"the tokenizer of {name!r} has neither a padding token nor an end of the text; save it with one, by "
            'tokenizer.pad_token = "..." and tokenizer.save_pretrained.'
        )
    if tokenizer.pad_token_id >= text.vocab_size:
        raise ValueError(
            f"the padding token {tokenizer.pad_token!r} of {name!r} is number {tokenizer.pad_token_id}, but the model "
            f"has {text.vocab_size} embeddings; save the tokenizer with a token that the model knows."
        )
    text.pad_token_id = tokenizer.pad_token_id


def build_task(model: ModelArguments, data: TextDataArguments, own: RecipeArguments) -> Task:
    """Read and check the data and the options, before any training."""
    train, test, classes = load_splits(data, regression=own.regression)
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path)
    ready = functools.partial(encode, tokenizer=tokenizer, data=data)
    figures = None
    if (split := own.second_test_split_name) is not None:
        second = by_length(ready(load_splits(replace(data, test_split_name=split), regression=own.regression)[1]))
        figures = functools.partial(second_figures, second=second, split=split, metrics=data.metrics)
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
    values = {"num_labels": 1} if own.regression else {"num_labels": len(classes), **names}
    auto = AutoModelForSequenceClassification
    config = scratch_config(model.model_name_or_path, own.config_overrides, scratch=own.from_scratch, **values)
    pad_alike(tokenizer, config, model.model_name_or_path)
    if own.from_scratch:
        load = functools.partial(auto.from_config, config, dtype=torch.float32)
    else:
        load = functools.partial(auto.from_pretrained, model.model_name_or_path, config=config, dtype=model.dtype)
    return Task(
        load=load,
        train=ready(train),
        test=by_length(ready(test)),
        collate=DataCollatorWithPadding(tokenizer),
        metrics=data.metrics,
        predict=predict,
        settings=data.settings | own.changed(),
        processor=tokenizer,
        figures=figures,
        scratch=made_of(model.published_name, own.config_overrides) if own.from_scratch else "",
        penalty=own.penalty,
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
