"""A variant and its control, over all seeds: run, publish, print."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import transformers
from transformers import TrainingArguments

from ..hub import push_folder
from ..results import RESULTS_FILE, RunResult
from .arguments import CONTROL, ConversionArguments, DataArguments, ModelArguments
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
    """Run the variant and the softmax control for every seed, write the record and the card, print the figures.

    Args:
        build: reads and checks the data; called before anything is trained.
        about: the words of the card.
        model: the variant; softmax itself runs the control alone.
        data: what is trained and measured on.
        conversion: of the variant; of it, the control takes what is frozen.
        training: budget and folder, the same for both.

    Returns:
        The record; None in all but the first process.

    Raises:
        SystemExit: with one line, for data, options, folders or packages that do not fit.
    """
    transformers.utils.logging.set_verbosity_error()
    control = replace(model, variant=CONTROL, options="{}", layers=None, label=None)
    alone = model.run_name == control.run_name
    try:
        task = build()
        plain = ConversionArguments(freeze=conversion.freeze)
        controls = [run(task, control, plain, training, seed) for seed in model.seeds]
        outcomes = controls if alone else [run(task, model, conversion, training, seed) for seed in model.seeds]
    except (ValueError, OSError, ImportError) as problem:
        sys.exit(f"error: {' '.join(str(problem).split())}")
    if training.process_index:
        return None
    result = publish(outcomes, [] if alone else controls, about, model, data, training, scratch=bool(task.scratch))
    seeds = ", ".join(map(str, model.seeds))
    for metric in result.converted.metrics:
        print(f"{result.name}: {metric.name} {metric.mean:.4f} (seeds {seeds})")
    if result.difference is not None:
        mean, low, high = result.difference.mean, result.difference.low, result.difference.high
        print(f"difference to the softmax control: {mean:+.4f} [{low:+.4f}, {high:+.4f}]")
    return result


def push_run(repo_id: str, model: ModelArguments, training: TrainingArguments) -> str:
    """Publish the first seed's model with the card of the whole run; returns the commit's address."""
    folder = Path(training.output_dir or "runs") / model.run_name
    trained = folder / f"seed-{model.seeds[0]}" / TRAINED
    shutil.copyfile(folder / RESULTS_FILE, trained / RESULTS_FILE)
    return push_folder(trained, repo_id).commit_url
