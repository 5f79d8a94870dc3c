"""Trains on three tasks of the Long Range Arena (Tay et al. 2020) from random weights, at SimpleTRON's sizes.

    python recipes/listops.py data/listops
    python recipes/lra.py recipes/configs/lra_listops.yaml --variant simpletron
    python recipes/lra.py recipes/configs/lra_text_small.yaml --variant simpletron_resl --seeds 0 1 2

`--task listops` reads operators, digits and `]`. `--task text` reads the bytes of a text in UTF-8. `--task matching`
reads the bytes of two texts with one encoder. A row starts with [CLS], has at most `--max_seq_length` tokens with
[CLS], and is padded per batch. The softmax control is trained beside the variant. A run that is finished is not done
again, as in text_classification.py.

Differences from LRA:

- BERT's layers normalize after each sum, and not before; the attention has biases.
- All weights start from one normal distribution.
- [CLS] goes through BERT's tanh pooler; in matching, through LRA's two ReLU layers.
- The layers in ListOps are not tied.
- `]` is a token; LRA's tokenizer drops it.
- Rows are padded to the longest row of the batch, and gradients are clipped.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from listops import TOKENS, tokens
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import BertForSequenceClassification, BertModel, BertPreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput as Output

from hf_attn_swap.training import (
    About,
    ModelArguments,
    Task,
    TextDataArguments,
    launch,
    load_splits,
    made_of,
    scratch_config,
)
from hf_attn_swap.training.recipes.text_classification import by_length, predict

PAD, CLS, SPECIAL = 0, 1, 2
NUMBERS = {token: SPECIAL + index for index, token in enumerate(TOKENS)}


@dataclass(kw_only=True)
class RecipeArguments:
    """Arguments of this recipe alone."""

    task: Literal["listops", "text", "matching"] = field(metadata={"help": "Task of the Long Range Arena."})
    card_name: str = field(default="bert-lra", metadata={"help": "Start of the run's name on its card."})
    config_overrides: str = field(default="{}", metadata={"help": "Values of BertConfig, such as its sizes, as JSON."})


class Matcher(BertPreTrainedModel):
    """Compares two texts with one encoder: two ReLU layers on [a, b, a * b, a - b] of the [CLS] states a and b."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        width, half = config.intermediate_size, config.intermediate_size // 2
        layers = [nn.Linear(4 * config.hidden_size, width), nn.ReLU(), nn.Linear(width, half), nn.ReLU()]
        self.head = nn.Sequential(*layers, nn.Linear(half, config.num_labels))
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        """The loss and the logits. Ids and mask are (B, 2, L)."""
        states = self.bert(input_ids.flatten(0, 1), attention_mask.flatten(0, 1)).last_hidden_state
        a, b = states[0::2, 0], states[1::2, 0]
        logits = self.head(torch.cat([a, b, a * b, a - b], -1))
        return Output(None if labels is None else cross_entropy(logits, labels), logits)


def read(task: str, text: str) -> list[int]:
    """The numbers of a text's tokens, or of its bytes."""
    if task == "listops":
        return [NUMBERS[token] for token in tokens(text)]
    return [SPECIAL + byte for byte in text.encode("utf-8")]


def encode(dataset: Any, task: str, data: TextDataArguments) -> Any:
    """Replace texts by numbers, truncated and without padding. A row of matching becomes two lists."""

    def numbers(row: dict[str, Any], index: int) -> dict[str, Any]:
        try:
            if None in (texts := [row[column] for column in data.input_columns]):
                raise ValueError("a text is missing; fill it in, or leave the row out.")
            ids_of_texts = [[CLS, *read(task, str(text))][: data.max_seq_length] for text in texts]
        except ValueError as problem:
            raise ValueError(f"row {index}: {problem}") from None
        return {"input_ids": ids_of_texts if task == "matching" else ids_of_texts[0]}

    return dataset.map(numbers, with_indices=True, remove_columns=data.input_columns, desc="read")


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Make a batch of rows: ids (B, L), or (B, 2, L) for matching."""
    pairs = isinstance(rows[0]["input_ids"][0], list)
    texts = [torch.tensor(text) for row in rows for text in (row["input_ids"] if pairs else [row["input_ids"]])]
    ids = pad_sequence(texts, batch_first=True, padding_value=PAD)
    ids = ids.view(len(rows), 2, -1) if pairs else ids
    labels = {"labels": torch.tensor([row["labels"] for row in rows])} if "labels" in rows[0] else {}
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), **labels}


def build_task(model: ModelArguments, data: TextDataArguments, own: RecipeArguments) -> Task:
    """Read and check the data and the options, before any training."""
    if model.model_name_or_path != "bert":
        raise ValueError(
            f"these tasks take a BERT of random weights: --model_name_or_path is bert, not {model.model_name_or_path}."
        )
    if len(data.input_columns) != (count := 2 if own.task == "matching" else 1):
        raise ValueError(f"--task {own.task} reads {count} of --text_column_names, got {' '.join(data.input_columns)}.")
    train, test, classes = load_splits(data)
    values: dict[str, Any] = {
        "vocab_size": SPECIAL + (len(TOKENS) if own.task == "listops" else 256),
        "max_position_embeddings": data.max_seq_length,
        "type_vocab_size": 1,
        "pad_token_id": PAD,
        "id2label": dict(enumerate(classes)),
        "label2id": {name: index for index, name in enumerate(classes)},
    }
    config = scratch_config(model.model_name_or_path, own.config_overrides, **values)
    return Task(
        load=functools.partial(Matcher if own.task == "matching" else BertForSequenceClassification, config),
        train=encode(train, own.task, data),
        test=by_length(encode(test, own.task, data)),
        collate=collate,
        metrics=data.metrics,
        predict=predict,
        settings={**data.settings, "task": own.task, "config_overrides": own.config_overrides},
        scratch=made_of(model.model_name_or_path, own.config_overrides),
    )


def about(own: RecipeArguments) -> About:
    """The sentences of the card."""
    return About(
        prefix=own.card_name,
        task="text-classification",
        auto_class="lra.Matcher" if own.task == "matching" else "AutoModelForSequenceClassification",
        intended_use="Compares attentions on this task of the Long Range Arena; it is of no other use.",
        language=(),
    )


def main(argv: list[str] | None = None) -> None:
    launch(RecipeArguments, build_task, about, argv)


if __name__ == "__main__":
    main()
