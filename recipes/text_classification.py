"""Fine-tune a classifier of texts or pairs of texts with a swapped attention, and the softmax control beside it.

    python recipes/text_classification.py recipes/configs/ag_news.yaml --variant belief --seeds 0 1 2
    accelerate launch recipes/text_classification.py recipes/configs/glue_sst2.yaml --variant mha --calibrate map

A YAML file first, then options, which win. Every seed of the variant and of the control is one run in
`<output_dir>/<variant>/seed-<n>`; what was done is not done again, what was killed goes on from its last checkpoint.
"""

from __future__ import annotations

import functools
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, TrainingArguments

from hf_attn_swap.hub import push_folder
from hf_attn_swap.training import ConversionArguments, DataArguments, ModelArguments, Task, load_splits, parse, run
from hf_attn_swap.training.publish import About, publish


@dataclass(kw_only=True)
class RecipeArguments:
    """What is this recipe's own."""

    card_name: str = field(default="classifier", metadata={"help": "Start of the run's name on its card."})
    regression: bool = field(default=False, metadata={"help": "The labels are numbers (STS-B)."})
    push_to: str | None = field(default=None, metadata={"help": "Push the first seed's model and card there."})


def encode(dataset: Any, tokenizer: Any, data: DataArguments) -> Any:
    """Token ids instead of text, truncated, without padding."""

    def tokens(rows: dict[str, list[Any]]) -> Any:
        texts = [list(map(str, rows[column])) for column in data.columns]
        return tokenizer(*texts, truncation=True, max_length=data.max_length)

    keep = [name for name in dataset.column_names if name != "labels"]
    return dataset.map(tokens, batched=True, remove_columns=keep, desc="tokenise")


def predict(trainer: Any, test: Any) -> tuple[list[float], list[float]]:
    """The predicted and the true class of every held-out row, or the two numbers."""
    found = trainer.predict(test)
    logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    numbers = logits[:, 0] if logits.shape[1] == 1 else logits.argmax(-1)
    return numbers.tolist(), found.label_ids.tolist()


def build_task(model: ModelArguments, data: DataArguments, own: RecipeArguments) -> Task:
    """Everything is read and checked here, before any training."""
    train, test, classes = load_splits(data, labelled=not own.regression)
    if own.regression:
        train, test = (
            split.map(lambda row: {"labels": float(row[data.label_column])}, desc="labels") for split in (train, test)
        )
    tokenizer = AutoTokenizer.from_pretrained(model.model)
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
    return Task(
        load=functools.partial(
            AutoModelForSequenceClassification.from_pretrained,
            model.model,
            num_labels=1 if own.regression else len(classes),
            dtype="float32",
            **({} if own.regression else names),
        ),
        train=encode(train, tokenizer, data),
        test=encode(test, tokenizer, data),
        collate=DataCollatorWithPadding(tokenizer),
        metrics=data.metrics,
        predict=predict,
        settings={name: value for name, value in vars(data).items() if not name.endswith("_name")},
        processor=tokenizer,
    )


def main(argv: list[str] | None = None) -> None:
    model, data, conversion, own, training = parse(
        (ModelArguments, DataArguments, ConversionArguments, RecipeArguments, TrainingArguments), argv
    )
    transformers.utils.logging.set_verbosity_error()
    try:
        task = build_task(model, data, own)
        control = replace(model, variant="softmax", options="{}", layers=None, label=None)
        plain = ConversionArguments(freeze=conversion.freeze)
        controls = [run(task, control, plain, training, seed) for seed in model.seeds]
        alone = model.run_name == control.run_name
        outcomes = controls if alone else [run(task, model, conversion, training, seed) for seed in model.seeds]
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {' '.join(str(problem).split())}")
    if training.process_index:
        return
    about = About(
        prefix=own.card_name,
        task="text-classification",
        auto_class="AutoModelForSequenceClassification",
        intended_use="Compares attentions on this task; a classifier of texts like those it was trained on.",
    )
    result = publish(outcomes, [] if alone else controls, about, model, data, training)
    for metric in result.converted.metrics:
        print(f"{result.name}: {metric.name} {metric.mean:.4f} over seeds {', '.join(map(str, model.seeds))}")
    if result.difference is not None:
        low, mean, high = result.difference.low, result.difference.mean, result.difference.high
        print(f"difference to softmax: {mean:+.4f} [{low:+.4f}, {high:+.4f}]")
    if own.push_to:
        folder = Path(training.output_dir) / model.run_name
        trained = folder / f"seed-{model.seeds[0]}" / "model"
        shutil.copyfile(folder / "results.json", trained / "results.json")
        print(push_folder(trained, own.push_to).commit_url)


if __name__ == "__main__":
    main()
