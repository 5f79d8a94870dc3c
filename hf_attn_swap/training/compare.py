"""Runs a variant and its softmax control over all seeds, publishes the record, and prints the metrics."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
from transformers import TrainingArguments

from ..publish.hub import push_folder
from ..publish.results import RESULTS_FILE, RunResult
from ..text.bar import visible
from ..writing import check_writable
from .arguments import CONTROL, ConversionArguments, DataArguments, ModelArguments, TextDataArguments, parse
from .publish import About, publish
from .run import TRAINED, Task, run


def compare(
    build: Callable[[], Task],
    about: About,
    model: ModelArguments,
    data: DataArguments,
    conversion: ConversionArguments,
    training: TrainingArguments,
) -> RunResult | None:
    """Run the variant and the softmax control for every seed, write the record and the card, and print the metrics.

    With `push_to_hub`, the first seed's model is published with the card of the whole run.

    Args:
        build: a function that reads and checks the data. It is called before anything is trained.
        about: the sentences of the card.
        model: the pretrained model and the variant. With the variant softmax, the control runs alone.
        data: the data to train and to measure on.
        conversion: the conversion steps of the variant. The control only freezes the same projections.
        training: the budget and the folder, the same for the variant and the control.

    Returns:
        The record. In a run of several processes, every process but the first returns None.

    Raises:
        SystemExit: with one line, if data, options, folders or packages do not fit.
    """
    transformers.utils.logging.set_verbosity_error()
    control = replace(model, variant=CONTROL, options="{}", layers=None, label=None)
    alone = model.run_name == control.run_name
    try:
        if training.push_to_hub and training.hub_model_id is None:
            raise ValueError("--push_to_hub needs --hub_model_id, the name on the Hub, such as me/bert-belief.")
        check_writable(Path(training.output_dir or "runs"))
        task = build()
        plain = ConversionArguments(freeze=conversion.freeze)
        controls = [run(task, control, plain, training, seed) for seed in model.seeds]
        outcomes = controls if alone else [run(task, model, conversion, training, seed) for seed in model.seeds]
    except (ValueError, OSError, ImportError) as problem:
        sys.exit(f"error: {' '.join(str(problem).split())}")
    if training.process_index:
        return None
    sibling, steps = ([], ()) if alone else (controls, conversion.steps)
    result = publish(outcomes, sibling, about, model, data, training, steps=steps, scratch=bool(task.scratch))
    seeds = ", ".join(map(str, model.seeds))
    for metric in result.converted.metrics:
        print(f"{result.name}: {metric.name} {metric.mean:.4f} (seeds {seeds})")
    if result.difference is not None:
        mean, low, high = result.difference.mean, result.difference.low, result.difference.high
        print(f"difference to the softmax control: {mean:+.4f} [{low:+.4f}, {high:+.4f}]")
    if training.push_to_hub:
        print(push_run(model, training))
    return result


def launch(
    own: type[Any],
    build: Callable[[ModelArguments, Any, Any], Task],
    about: Callable[[Any], About],
    argv: Sequence[str] | None = None,
    *,
    keep_columns: bool = False,
    recipe: str | None = None,
    data: type[DataArguments] = TextDataArguments,
) -> None:
    """Run a recipe from its command line: read the arguments, and compare.

    Args:
        own: dataclass of the recipe's own arguments.
        build: a function that makes the task from the arguments of model and data and the recipe's own.
        about: a function that makes the sentences of the card from the recipe's own arguments.
        argv: see `parse`.
        keep_columns: True keeps the columns of the data that the model does not take, because a transform of the data
            reads them when a row is used.
        recipe: the recipe's name, if it ships with the package and has configurations there.
        data: dataclass of the arguments of the data.
    """
    classes = (ModelArguments, data, ConversionArguments, own, TrainingArguments)
    model, rows, conversion, mine, training = parse(
        classes, argv, recipe=recipe, about=sys.modules[build.__module__].__doc__
    )
    training.remove_unused_columns = training.remove_unused_columns and not keep_columns
    training.disable_tqdm = training.disable_tqdm or not visible()
    compare(lambda: build(model, rows, mine), about(mine), model, rows, conversion, training)


def push_run(model: ModelArguments, training: TrainingArguments) -> str:
    """Publish the first seed's model with the card of the whole run, and return the address of the commit."""
    assert training.hub_model_id is not None
    folder = Path(training.output_dir or "runs") / model.run_name
    trained = folder / f"seed-{model.seeds[0]}" / TRAINED
    return push_folder(
        trained,
        training.hub_model_id,
        results=folder / RESULTS_FILE,
        private=bool(training.hub_private_repo),
        revision=training.hub_revision,
        token=training.hub_token,
    ).commit_url
