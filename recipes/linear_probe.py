r"""Measures how much a frozen, swapped model still knows, by a logistic regression on its features.

    python recipes/linear_probe.py ag_news --variant modern_hopfield --stages calibrate --output_dir runs/probe
    python recipes/linear_probe.py recipes/configs/probe_cifar10.yaml --variant belief

The recipe prints the stock model, the swapped model, and the model after each stage of the conversion side by side. So
a conversion can be judged before any fine-tuning. The features of a text are the mean of the last hidden states over
real tokens; the features of an image (`--image_size`) are the last hidden state of its class token. A distillation
needs `{"logits": 0, "hidden": 1.0}`, because the model has no head.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer, DataCollatorWithPadding, TrainingArguments, default_data_collator

from hf_attn_swap import patch_model
from hf_attn_swap.conversion.config import ConvertConfig
from hf_attn_swap.conversion.journal import Journal
from hf_attn_swap.conversion.rows import ready_rows
from hf_attn_swap.conversion.run import Run
from hf_attn_swap.text.typed import parse_layers
from hf_attn_swap.training import ConversionArguments, ModelArguments, TextDataArguments, load_splits, parse
from hf_attn_swap.training.metrics import paired_interval, scores
from hf_attn_swap.training.recipes.image_classification import image_processor, prepare, resized
from hf_attn_swap.training.stages import FineTune, run_stage

Collator = Callable[[list[dict[str, Any]]], dict[str, Any]]


@dataclass(kw_only=True)
class ProbeDataArguments(TextDataArguments):
    """Data with columns of text, or with a column of images."""

    image_column_name: str = field(default="image", metadata={"help": "Column of the images, with --image_size."})


@dataclass(kw_only=True)
class RecipeArguments:
    """Arguments of this recipe alone."""

    image_size: int | None = field(default=None, metadata={"help": "Side in pixels, for a model of images."})
    penalty: float = field(default=1.0, metadata={"help": "C of the logistic regression; small is a large penalty."})


def texts(data: ProbeDataArguments, name: str) -> tuple[Any, Any, Collator]:
    """Encoded rows to train and to test on, sorted by length, and the function that makes batches."""
    tokenizer = AutoTokenizer.from_pretrained(name)

    def encode(rows: dict[str, list[Any]]) -> Any:
        return tokenizer(
            *[rows[column] for column in data.input_columns], truncation=True, max_length=data.max_seq_length
        )

    splits = []
    for split in load_splits(data)[:2]:
        drop = [column for column in split.column_names if column != "labels"]
        rows = split.map(encode, batched=True, remove_columns=drop)
        lengths = [len(ids) for ids in rows["input_ids"]]
        splits.append(rows.select(sorted(range(len(rows)), key=lengths.__getitem__)))
    return splits[0], splits[1], DataCollatorWithPadding(tokenizer)


def images(data: ProbeDataArguments, name: str, size: int) -> tuple[Any, Any, Collator]:
    """Rows of pixels to train and to test on, and the function that makes batches."""
    processor = image_processor(name, size)
    ready = functools.partial(prepare, column=data.image_column_name, processor=processor, flip=False)
    train, test, _ = load_splits(replace(data, text_column_names=[data.image_column_name]))
    return train.with_transform(ready), test.with_transform(ready), default_data_collator


@torch.no_grad()
def features(model: Any, rows: Any, collate: Collator, size: int, title: str) -> np.ndarray:
    """The features (N,E) of all rows."""
    vectors = []
    model.eval()
    for start in tqdm(range(0, len(rows), size), desc=title, unit="batch", leave=False):
        batch = collate([rows[index] for index in range(start, min(start + size, len(rows)))])
        batch.pop("labels", None)
        inputs = {key: value.to(model.device) if hasattr(value, "to") else value for key, value in batch.items()}
        states = model(**inputs).last_hidden_state
        if "attention_mask" in inputs:
            real = inputs["attention_mask"].to(states)[..., None]
            vectors.append(((states * real).sum(1) / real.sum(1)).float().cpu())
        else:
            vectors.append(states[:, 0].float().cpu())
    return torch.cat(vectors).numpy()


def main(argv: list[str] | None = None) -> None:
    model, data, conversion, own, training = parse(
        (ModelArguments, ProbeDataArguments, ConversionArguments, RecipeArguments, TrainingArguments), argv
    )
    transformers.utils.logging.set_verbosity_error()
    folder = Path(training.output_dir)
    if own.image_size is None:
        train, test, collate = texts(data, model.model_name_or_path)
    else:
        train, test, collate = images(data, model.model_name_or_path, own.image_size)
        training.remove_unused_columns = False
    labels, truth = train["labels"][:], test["labels"][:]
    size = training.per_device_eval_batch_size
    stock = AutoModel.from_pretrained(model.model_name_or_path, dtype=model.dtype).eval()
    encoder = resized(stock, own.image_size).to(training.device)
    predictions: dict[str, list[int]] = {}

    def measure(stage: str) -> None:
        probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000, C=own.penalty))
        probe.fit(features(encoder, train, collate, size, f"{stage}: train"), labels)
        predictions[stage] = probe.predict(features(encoder, test, collate, size, f"{stage}: test")).tolist()

    measure("stock")
    layers = parse_layers(model.layers)
    patch_model(encoder, model.variant, layers=layers, **model.option_values)
    measure("swapped")
    run = Run(
        model=encoder,
        config=ConvertConfig(variant=model.variant),
        rows=ready_rows(train, collate),
        args=replace(training, seed=model.seeds[0]),
        folder=folder / model.run_name,
        journal=Journal(None, {}),
    )
    stages = [stage for stage in conversion.plan if not isinstance(stage, FineTune)]
    for number, stage in enumerate(stages, 1):
        run_stage(run, stage, number)
        print(run.sentences[-1])
        measure(f"{number}: {stage.name}")
    headline = data.metrics[0]
    rows = {}
    for stage, classes in predictions.items():
        mean, low, high = paired_interval(headline, [classes], [predictions["stock"]], truth)
        rows[stage] = {**scores(data.metrics, classes, truth), "difference": mean, "low": low, "high": high}
        print(f"{stage}: {headline} {rows[stage][headline]:.4f}, to stock {mean:+.4f} [{low:+.4f}, {high:+.4f}]")
    folder.mkdir(parents=True, exist_ok=True)
    about = {"model": model.published_name, "variant": model.variant, "options": model.option_values}
    path = folder / f"probe-{model.run_name}.json"
    path.write_text(json.dumps({**about, "steps": run.sentences, "stages": rows}, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
