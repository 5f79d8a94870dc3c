"""The stages of a recipe, each with its values. `convert(stages=[...])` takes one of them, a `Distil`.

A YAML file holds them as a list, in the order in which a run takes them. The name alone takes the usual values:

    stages:
      - {stage: calibrate, fit: gain}
      - {stage: distil, tokens: 300000, rank: 32, learning_rate: 5.0e-4}
      - fine_tune

On a command line, a stage is its name, or the same mapping as JSON. A list that starts with fine_tune converts the
fine-tuned control of the same seed, and needs no labels after that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from transformers import TrainingArguments

from ..conversion.calibrate import calibrate, first_batches
from ..conversion.config import Distil
from ..conversion.distill import fit_to_teacher
from ..conversion.rows import mean_length, select
from ..conversion.run import Run
from ..conversion.trainable import adapted_weights, preserve_training_flags
from ..layer.calibration import check_fit
from ..layer.fitted import CALL, sentences

FINE_TUNE = "fine_tune"


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Least squares per head, on the first training rows.

    Attributes:
        fit: "gain" or "map".
        rows: the number of training rows.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "calibrate"
    fit: str = "map"
    rows: int = 512

    def __post_init__(self) -> None:
        check_fit(self.fit)
        if not self.rows > 0:
            raise ValueError(f"calibrate: rows must be above 0, got {self.rows!r}.")


@dataclass(frozen=True, kw_only=True)
class FineTune:
    """The recipe's own training, with labels. First in the list, the run starts from the fine-tuned control."""

    name: ClassVar[str] = FINE_TUNE


Stage = Calibrate | Distil | FineTune
KINDS: dict[str, type[Stage]] = {kind.name: kind for kind in (Calibrate, Distil, FineTune)}


def read_stages(entries: Sequence[str]) -> tuple[Stage, ...]:
    """Read stages from names and JSON texts; see the head of this file.

    Raises:
        ValueError: a text is neither a name nor a JSON object, a stage or an option is unknown, a value is out of
            range, or fine_tune is neither first nor last.
    """
    stages = tuple(_read(entry) for entry in entries)
    for place, stage in enumerate(stages):
        if isinstance(stage, FineTune) and place not in (0, len(stages) - 1):
            raise ValueError("the stage fine_tune must be the first or the last.")
    return stages


def _read(entry: str) -> Stage:
    if entry in KINDS:
        return KINDS[entry]()
    try:
        values = json.loads(entry)
    except json.JSONDecodeError as problem:
        raise ValueError(
            f"a stage must be one of {', '.join(KINDS)}, or a JSON object, got {entry!r} ({problem})."
        ) from None
    name = values.pop("stage", None) if isinstance(values, dict) else None
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"a stage must name one of {', '.join(KINDS)}, got {entry!r}.")
    kind = KINDS[name]
    known = {field.name for field in fields(kind)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"the stage {name} has no option {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
    try:
        return kind(**values)
    except TypeError as problem:  # a value of another type, such as text instead of a number
        raise ValueError(f"the stage {name} cannot have these values: {entry} ({problem}).") from None


def _distil(run: Run, stage: Distil, name: str) -> None:
    """Distil by a stage of a recipe, which has epochs and arguments of its own.

    Raises:
        ValueError: the stage does not fit the model or the rows.
    """

    def work() -> None:
        rows, args, budget = epochs_of(run, stage, name)
        trained = f"{', '.join(stage.trainable)} trained"
        with preserve_training_flags(run.model):
            fit_to_teacher(run, stage, rows, args)
            if run.adapters is not None:
                trained = f"LoRA of rank {stage.rank}, merged"
                run.keep(adapted_weights(run.adapters))
                run.leave_adapters(merged=True)
        run.original = None  # what trains in the next stage is another part of the model
        run.say(
            f"Distilled without labels from the original model: {budget}, {trained}, loss "
            f"{stage.words}, learning rate {stage.learning_rate:g}."
        )

    run.apply(name, work)


def run_stage(run: Run, stage: Calibrate | Distil, number: int) -> None:
    """Take a stage of a recipe; the number is its place in the recipe."""
    name = f"stage-{number}-{stage.name}"
    if isinstance(stage, Calibrate):
        _calibrate(run, stage, name)
    else:
        _distil(run, stage, name)


def _calibrate(run: Run, stage: Calibrate, name: str) -> None:
    """Calibrate by a stage of a recipe."""

    def work() -> None:
        batches = first_batches(run.rows, stage.rows, run.args.train_batch_size)
        report = calibrate(run.model, batches, fit=stage.fit, progress=run.progress)
        first = [copies[0] for copies in run.swaps.values()]
        words = sentences(fit for swap in first for fit in swap.fitted.values() if fit.place == CALL)
        run.say(f"Calibrated: {report}{f' {words}' if words else ''}")

    run.apply(name, work)


def epochs_of(run: Run, stage: Distil, name: str) -> tuple[Any, TrainingArguments, str]:
    """The rows of a stage's epochs, or of its tokens; the recipe's own arguments for them; and the budget in words.

    Raises:
        ValueError: tokens are to be counted in rows that have none.
    """
    rows, args = run.rows.rows, run.args
    epochs, words = stage.epochs, f"{stage.epochs:g} epochs on {len(rows):,} training rows"
    if stage.tokens is not None:
        length = mean_length(rows)
        if not length:
            raise ValueError(f"{stage.name}: tokens counts tokens of text; give epochs for other data.")
        wanted = max(1, round(stage.tokens / length))
        epochs = 1.0 if wanted <= len(rows) else wanted / len(rows)
        rows = select(rows, range(min(wanted, len(rows))))
        words = f"{stage.tokens:,} tokens"
    args = replace(
        args,
        output_dir=str(run.folder / name),
        num_train_epochs=epochs,
        max_steps=-1,
        learning_rate=stage.learning_rate,
        per_device_train_batch_size=stage.batch or args.per_device_train_batch_size,
    )
    return rows, args, words
