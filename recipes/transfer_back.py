"""Repeats SimpleTRON's test of what q, k and v learn: train with `simpletron*`, go back to softmax, retrain the rest.

    python recipes/transfer_back.py ag_news --variant simpletron_resl --output_dir runs/back

There are four runs per seed, with the same budget: the variant; softmax from the variant's weights with q, k and v
frozen; as the control, softmax from the weights at the start (pretrained or random) with q, k and v frozen; and softmax
with nothing frozen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import transformers
from transformers import PreTrainedModel, TrainingArguments

from hf_attn_swap import unpatch_model
from hf_attn_swap.training import About, ConversionArguments, ModelArguments, Outcome, TextDataArguments, parse, run
from hf_attn_swap.training.compare import publish
from hf_attn_swap.training.recipes.text_classification import RecipeArguments, build_task

QKV = ["query", "key", "value"]
AS_SAVED = {"from_scratch": False, "config_overrides": "{}"}  # a trained model is read as a pretrained one


def unswapped(load: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """The trained model with its own attention again."""
    return unpatch_model(load())


def main(argv: list[str] | None = None) -> None:
    model, data, conversion, own, training = parse(
        (ModelArguments, TextDataArguments, ConversionArguments, RecipeArguments, TrainingArguments), argv
    )
    transformers.utils.logging.set_verbosity_error()
    softmax = replace(model, variant="softmax", options="{}")
    back = replace(softmax, label=f"softmax-from-{model.run_name}")
    still = replace(softmax, label="softmax-frozen")
    frozen = ConversionArguments(freeze=QKV)
    outcomes_of: dict[str, list[Outcome]] = {"there": [], "back": [], "control": [], "usual": []}
    try:
        task = build_task(model, data, own)
        for seed in model.seeds:
            outcomes_of["there"].append(run(task, model, conversion, training, seed))
            trained = Path(training.output_dir) / model.run_name / f"seed-{seed}" / "model"
            there, as_saved = replace(model, model_name_or_path=str(trained)), replace(own, **AS_SAVED)
            load = partial(unswapped, build_task(there, data, as_saved).load)
            outcomes_of["back"].append(run(replace(task, load=load, scratch=""), back, frozen, training, seed))
            outcomes_of["control"].append(run(task, still, frozen, training, seed))
            outcomes_of["usual"].append(run(task, softmax, ConversionArguments(), training, seed))
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {' '.join(str(problem).split())}")
    if training.process_index:
        return
    about = About(
        prefix=own.card_name,
        task="text-classification",
        auto_class="AutoModelForSequenceClassification",
        intended_use="Shows what queries, keys and values learn under another attention.",
    )
    both = outcomes_of["back"], outcomes_of["control"]
    publish(*both, about, back, data, training, steps=frozen.steps, scratch=own.from_scratch)
    for name, outcomes in outcomes_of.items():
        print(
            f"{name}: {data.metrics[0]} {', '.join(f'{outcome.metrics[data.metrics[0]]:.4f}' for outcome in outcomes)}"
        )


if __name__ == "__main__":
    main()
