r"""Outliers, token similarity and entropy of fine-tuned models, and what 8 bits cost each of them.

    hf-attn-swap train text-classification ag_news --variant outeffhop      # and the others
    python recipes/outliers.py text_classification ag_news --max_eval_samples 2000 \
        --runs softmax outeffhop clipped gated outeffhop-gated --figures recipes/figures/minilm.json

Another recipe trained the models into `<output_dir>/<run>/seed-<seed>/model`. The first run named is the control. This
recipe measures of each model:

- the diagnostics of docs/mathematics.md, section Diagnostics, on held-out rows;
- the metric in full precision;
- the metric with static 8-bit weights and activations in fake quantisation, whose ranges come from training rows;
- the metric in 8-bit integers with a range per token.

The cost of 8 bits has a paired 95 % interval over the rows.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import Trainer, TrainingArguments

from hf_attn_swap.analysis import record
from hf_attn_swap.publish.results import hardware, versions
from hf_attn_swap.quantization import fake_w8a8, int8_dynamic
from hf_attn_swap.training import ImageDataArguments, ModelArguments, Task, TextDataArguments, parse
from hf_attn_swap.training.metrics import paired_interval, scores


@dataclass(kw_only=True)
class OutlierArguments:
    """Arguments of this recipe alone."""

    runs: list[str] = field(default_factory=lambda: ["softmax"], metadata={"help": "Names of runs, the control first."})
    seed_of_runs: int = field(default=0, metadata={"help": "The seed whose model of each run is measured."})
    record_rows: int = field(default=256, metadata={"help": "Number of held-out rows for the diagnostics."})
    range_rows: int = field(
        default=512, metadata={"help": "Number of training rows for the 8-bit ranges (in the paper 16 x 32)."}
    )
    integer: bool = field(default=True, metadata={"help": "Measure 8-bit integers with a range per token, too."})
    figures: str = field(default="outliers.json", metadata={"help": "File to write the figures into."})


def batches(rows: Any, task: Task, size: int, device: torch.device) -> list[dict[str, Any]]:
    """The rows as batches on the device, without labels."""
    inputs = []
    for start in range(0, len(rows), size):
        batch = task.collate([rows[index] for index in range(start, min(start + size, len(rows)))])
        moved = {name: value.to(device) if hasattr(value, "to") else value for name, value in batch.items()}
        inputs.append({name: value for name, value in moved.items() if name != "labels"})
    return inputs


@torch.no_grad()
def diagnostics(model: Any, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    """Diagnostics of the model on some held-out rows: one figure each for the model, and two figures per layer."""
    with record(model) as recording:
        for batch in tqdm(inputs, desc="record", leave=False):
            model(**batch)
    layers = [recording.layers[place] for place in sorted(recording.layers)]
    similarity = [sum(layer.similarity) / max(len(layer.similarity), 1) for layer in layers]
    entropy = [sum(layer.entropy.known) / max(len(layer.entropy.known), 1) for layer in layers]
    return {**recording.summary(), "similarity": similarity, "entropy_by_layer": entropy}


def measure(task: Task, training: TrainingArguments, own: OutlierArguments) -> dict[str, Any]:
    """All figures of one model."""
    transformers.set_seed(
        own.seed_of_runs
    )  # rows for the ranges may be augmented at random; the seed makes them the same for every model
    model = task.load().eval()
    trainer = Trainer(model, training, task.collate)
    size = training.per_device_eval_batch_size
    count = min(own.record_rows, len(task.test))
    spread = [index * len(task.test) // count for index in range(count)]  # the rows may be sorted by length
    figures = diagnostics(model, batches(task.test.select(spread), task, size, training.device))
    metric, (plain, references) = task.metrics[0], task.predict(trainer, task.test)
    figures |= scores([metric], plain, references)
    ranges = batches(task.train.select(range(min(own.range_rows, len(task.train)))), task, 32, training.device)
    with fake_w8a8(model, ranges):
        rounded, _ = task.predict(trainer, task.test)
    figures["fake_w8a8"] = scores([metric], rounded, references)[metric]
    figures["fake_cost"] = paired_interval(metric, [rounded], [plain], references)
    if own.integer:
        integer, _ = task.predict(Trainer(int8_dynamic(model), training, task.collate), task.test)
        figures["int8_dynamic"] = scores([metric], integer, references)[metric]
        figures["integer_cost"] = paired_interval(metric, [integer], [plain], references)
    return figures


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "text_classification"
    recipe = importlib.import_module(f"hf_attn_swap.training.recipes.{name}")
    data_of = ImageDataArguments if name == "image_classification" else TextDataArguments
    classes = (ModelArguments, data_of, recipe.RecipeArguments, OutlierArguments, TrainingArguments)
    model, data, its, own, training = parse(classes, sys.argv[2:], recipe=name)
    training.remove_unused_columns = name != "image_classification"
    training.train_sampling_strategy = "random"  # grouping by length would shuffle the held-out rows
    transformers.utils.logging.set_verbosity_error()
    figures: dict[str, Any] = {}
    try:
        for run in own.runs:
            folder = Path(training.output_dir or "runs") / run / f"seed-{own.seed_of_runs}" / "model"
            if not folder.is_dir():
                raise ValueError(f"there is no model in {folder}; train it first, or name other --runs.")
            figures[run] = measure(
                recipe.build_task(replace(model, model_name_or_path=str(folder)), data, its), training, own
            )
            print(f"{run}: {json.dumps(figures[run])}", flush=True)
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {' '.join(str(problem).split())}")
    about = {
        "model": model.published_name,
        "data": data.published_name,
        "metric": data.metrics[0] if name != "language_modeling" else "perplexity",
        "record_rows": own.record_rows,
        "range_rows": own.range_rows,
        "seed": own.seed_of_runs,
        "hardware": hardware(training),
        "versions": versions(),
    }
    Path(own.figures).parent.mkdir(parents=True, exist_ok=True)
    Path(own.figures).write_text(json.dumps({**about, "runs": figures}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
