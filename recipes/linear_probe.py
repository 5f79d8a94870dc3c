"""Measures how much a frozen, swapped model still knows, by a logistic regression on its features.

    python recipes/linear_probe.py recipes/configs/ag_news.yaml --variant mha --calibrate map --output_dir runs/probe

The features of a row are the mean of the last hidden states over real tokens. The recipe prints the stock model, the
swapped model, and the swapped and calibrated model side by side. So a conversion can be judged in a minute, before any
fine-tuning.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer, DataCollatorWithPadding, TrainingArguments

from hf_attn_swap import patch_model
from hf_attn_swap.conversion import calibrate
from hf_attn_swap.core.typed import parse_layers
from hf_attn_swap.training import ConversionArguments, DataArguments, ModelArguments, load_splits, parse
from hf_attn_swap.training.metrics import paired_interval, scores

Batches = list[dict[str, torch.Tensor]]


def batches(split: Any, data: DataArguments, tokenizer: Any, size: int) -> tuple[Batches, list[int]]:
    """Batches of rows of similar length, and the labels in the same order."""
    encoded = tokenizer(*[list(split[c]) for c in data.columns], truncation=True, max_length=data.max_length)
    rows = [{name: encoded[name][index] for name in encoded} for index in range(len(split))]
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]["input_ids"]))
    collate = DataCollatorWithPadding(tokenizer)
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    return [dict(collate([rows[i] for i in part])) for part in parts], [split["labels"][i] for i in order]


@torch.no_grad()
def features(model: Any, found: Batches, title: str) -> np.ndarray:
    """The features (N,E): the mean of the last hidden states over real tokens."""
    means = []
    for batch in tqdm(found, desc=title, unit="batch", leave=False):
        states = model(**{name: value.to(model.device) for name, value in batch.items()}).last_hidden_state
        real = batch["attention_mask"].to(states)[..., None]
        means.append(((states * real).sum(1) / real.sum(1)).float().cpu())
    return torch.cat(means).numpy()


def main(argv: list[str] | None = None) -> None:
    model, data, conversion, training = parse(
        (ModelArguments, DataArguments, ConversionArguments, TrainingArguments), argv
    )
    transformers.utils.logging.set_verbosity_error()
    train, test, _ = load_splits(data)
    tokenizer = AutoTokenizer.from_pretrained(model.model)
    size = training.per_device_eval_batch_size
    train_batches, train_labels = batches(train, data, tokenizer, size)
    test_batches, test_labels = batches(test, data, tokenizer, size)
    predictions: dict[str, list[int]] = {}
    for stage in ("stock", "swapped", *(["calibrated"] if conversion.calibrate else [])):
        encoder = AutoModel.from_pretrained(model.model, dtype=torch.float32).eval().to(training.device)
        if stage != "stock":
            patch_model(
                encoder,
                model.variant,
                layers=parse_layers(model.layers),
                modules=model.modules,
                **model.option_values,
            )
        if stage == "calibrated":
            step = max(1, len(train_batches) * size // conversion.calibration_rows)
            print(calibrate(encoder, train_batches[::step], fit=conversion.calibrate, source=conversion.source))
        probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        probe.fit(features(encoder, train_batches, f"{stage}: train"), train_labels)
        predictions[stage] = probe.predict(features(encoder, test_batches, f"{stage}: test")).tolist()
    headline = data.metrics[0]
    rows = {}
    for stage, found in predictions.items():
        mean, low, high = paired_interval(headline, [found], [predictions["stock"]], test_labels)
        rows[stage] = {**scores(data.metrics, found, test_labels), "difference": mean, "low": low, "high": high}
        print(f"{stage}: {headline} {rows[stage][headline]:.4f}, to stock {mean:+.4f} [{low:+.4f}, {high:+.4f}]")
    folder = Path(training.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    record = {"model": model.published_name, "variant": model.variant, "options": model.option_values, "stages": rows}
    path = folder / f"probe-{model.run_name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
