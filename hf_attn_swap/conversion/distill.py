"""The trainings of a conversion: the original model teaches the swapped model, group of layers by group of layers.

If the tokens are used up before a group is within the budget, the group is taken back. Where no budget chooses the
layers, the model gets back the weights with which it lost least: before the training, or after an earlier part of it.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from ..patch import set_strength
from ..text.bar import silent
from .config import Distil
from .journal import Snapshot
from .report import UNDONE, StepRecord, in_words
from .run import Run, rows_per_step
from .sensitivity import LayerSelection
from .trainable import choose_trainable
from .trainer import DistillationTrainer, Teacher, quiet

CHECKS = 4  # measurements within one training
SAVE_EVERY = 100  # training steps between two checkpoints
ROUNDING = 1e-4  # KL or relative error: smaller losses are within the rounding, and count as equal
COSTLY, ABOVE = "its swap costs most", "the loss would be above the budget"
WHOLE = "all its heads keep all keys"


def distil(run: Run, selection: LayerSelection) -> None:
    """Distil group after group, as far as the budgets go."""
    groups, config = selection.groups, run.config
    every = list(run.swaps)
    why = COSTLY if config.heads is None else WHOLE
    run.kept = {number: why for number in every if not any(number in group for group in groups)}
    for place in range(len(groups)):
        before = run.snapshot() if selection.by_budget else None
        running = list(itertools.chain(*groups[: place + 1]))
        if sorted(running) != sorted(run.layers):  # else these layers together have been measured already
            name = f"group {place + 1} swapped" if selection.by_budget else "layers chosen"
            run.apply(name, partial(_run_in, run, running), again=True)
        _distil_group(run, place, len(groups) - place, by_budget=selection.by_budget)
        if before is not None and not run.within:
            running = list(itertools.chain(*groups[:place]))
            run.apply("last group taken back", partial(_take_back, run, before, running), again=True)
            run.kept |= {number: ABOVE for later in groups[place:] for number in later}
            break


def _distil_group(run: Run, place: int, groups_left: int, *, by_budget: bool) -> None:
    """Train, and train again while a budget needs it, as long as tokens are free.

    The first part takes an equal share of what is free for each group that is left. Each further part, which the loss
    of this group needs, takes all that is free. Without a choice by a budget, the weights with which the model lost
    least are the result.
    """
    best, weights = run.record[-1], None
    for number in itertools.count(1):
        if exhausted(run, run.budget.free) or run.within:
            break
        if not by_budget and best is run.record[-1]:
            weights = run.snapshot()
        tokens = run.budget.free // groups_left if number == 1 else run.budget.free
        name = f"distil {f'{place + 1}.{number}' if by_budget else number}"
        run.apply(name, partial(train, run, run.config.distil, max(1, tokens), name))
        if _order(run, run.record[-1]) <= _order(run, best):
            best = run.record[-1]
    if weights is not None and best is not run.record[-1]:
        run.apply(UNDONE, partial(_undo_training, run, weights, best, run.record[-1]), again=True)


def _run_in(run: Run, layers: Sequence[int]) -> None:
    """Let the variant run in these layers alone."""
    set_strength(run.model, 0.0)
    if layers:
        set_strength(run.model, 1.0, layers=layers)


def _take_back(run: Run, before: Snapshot, running: Sequence[int]) -> None:
    """Undo the last group: its layers run their own attention again, with the weights from before."""
    run.restore(before)
    _run_in(run, running)


def _undo_training(run: Run, weights: Snapshot, best: StepRecord, last: StepRecord) -> None:
    """Go back to the weights with which the model lost least."""
    run.restore(weights)
    if not run.changed:
        run.leave_adapters(merged=False)
    run.say(
        f"Training hurt, so it was taken back to {best.name!r}: {in_words(best.lost)} lost there "
        f"({best.lost.divergence_or_error:.3g} by the loss that trains), {in_words(last.lost)} after {last.name!r} "
        f"({last.lost.divergence_or_error:.3g})."
    )
    run.measured(UNDONE, best.lost)


def _order(run: Run, row: StepRecord) -> tuple[bool, float]:
    """The smaller, the better: what is within a budget comes first, then what loses less; no number comes last."""
    cost = math.inf if math.isnan(row.lost.divergence_or_error) else max(ROUNDING, row.lost.divergence_or_error)
    return not run.config.allows(row.lost), cost


# -- One training ------------------------------------------------------------------------------------------------------


class StopWithin(TrainerCallback):
    """Measures the loss a few times during a training, and stops the training when it is within the budget."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure at each quarter of the training steps."""
        config = self.run.config
        every = max(1, state.max_steps // CHECKS)
        if not config.budgeted or state.global_step % every or state.global_step >= state.max_steps:
            return
        if config.allows(self.run.lost()):
            control.should_training_stop = True
            control.should_save = False  # a run that goes on from this very training step would not stop here


def train(run: Run, stage: Distil, tokens: int, name: str) -> None:
    """Distil for at most so many tokens."""
    rows, args = next_rows(run, stage, tokens), training_arguments(run, stage, name)
    steps = fit_to_teacher(run, stage, rows, args, [StopWithin(run)], title=name)
    read = min(len(rows), steps * args.train_batch_size * args.gradient_accumulation_steps * args.world_size)
    run.budget.read += read
    run.budget.left -= round(read * (run.rows.length or 1))


def fit_to_teacher(
    run: Run,
    stage: Distil,
    rows: Any,
    args: TrainingArguments,
    callbacks: Iterable[TrainerCallback] = (),
    title: str | None = None,
) -> int:
    """Train the model by one stage, from the last checkpoint of a killed run if there is one.

    Args:
        run: the conversion. Adapters of the stage's rank are put around the model, if there are none yet.
        stage: what is trained, and by which losses.
        rows: what is read, in this order or drawn by the arguments.
        args: of the training, with the folder of its checkpoints.
        callbacks: of the trainer.
        title: of one bar in place of the lines that a trainer prints.

    Returns:
        The number of training steps.

    Raises:
        ValueError: the stage does not fit the model; see the trainer.
    """
    trainable = stage.trainable if stage.rank is None else None
    if stage.rank is not None and run.adapters is None:
        run.adapt(stage.rank)
    choose_trainable(run.student, trainable)
    run.keep(parameter for parameter in run.student.parameters() if parameter.requires_grad)
    if run.original is None:
        run.original = Teacher(run.student, run.teacher, run.originals)
    trainer = DistillationTrainer(
        run.student,
        args,
        teacher=run.original,
        losses=stage,
        trainable=trainable,
        train_dataset=rows,
        data_collator=run.rows.collate,
        callbacks=[*callbacks],
    )
    if silent():
        trainer.remove_callback(PrinterCallback)
    if title is not None:
        quiet(trainer, title, shown=run.progress)
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(Path(trainer.args.output_dir or ".")))
    run.changed = True
    return int(trainer.state.global_step)


def exhausted(run: Run, tokens: int) -> bool:
    """True if so many tokens are less than one training step of all processes."""
    return tokens < (run.rows.length or 1) * rows_per_step(run.config.distil, run.rows, run.args.world_size)


def next_rows(run: Run, stage: Distil, tokens: int) -> Any:
    """The next rows of `convert`'s fixed order, of at most so many tokens, once.

    Several processes read whole steps: of a last step that lacks rows, one of them would read rows twice.
    """
    processes = run.args.world_size
    count = max(1, int(min(tokens, run.budget.free) / (run.rows.length or 1)))
    if processes > 1 and count > (step := rows_per_step(stage, run.rows, processes)):
        count -= count % step
    order = run.rows.order(rows_per_step(run.config.distil, run.rows, processes))
    return run.rows.some(list(itertools.islice(order, run.budget.read, run.budget.read + count))).rows


def last_whole_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint, or None. Incomplete checkpoints of a killed run are removed."""
    newest_first = sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.rpartition("-")[2]))
    for path in newest_first:
        try:  # the Trainer writes this file last
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            shutil.rmtree(path, ignore_errors=True)  # the other processes remove it, too
        else:
            return str(path)
    return None


def without_secrets(args: TrainingArguments) -> TrainingArguments:
    """The same arguments without tokens: a `Trainer` writes its arguments beside all weights that it saves.

    The fields are those that `TrainingArguments.to_dict` hides, too.
    """
    secrets: dict[str, Any] = {option.name: None for option in fields(args) if option.name.endswith("_token")}
    return replace(args, **secrets)


def training_arguments(run: Run, stage: Distil, name: str) -> TrainingArguments:
    """The arguments of one training of `convert`."""
    rows = rows_per_step(stage, run.rows)
    memory: dict[str, Any] = {"per_device_train_batch_size": rows}
    if run.config.low_memory:
        new = hasattr(run.args, "activation_checkpointing")  # the name since transformers 5.23
        memory = {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": rows,
            "activation_checkpointing" if new else "gradient_checkpointing": True,
        }
    return replace(
        without_secrets(run.args),
        output_dir=str(run.folder / name.replace(" ", "-")),
        num_train_epochs=1,
        max_steps=-1,
        train_sampling_strategy="sequential",  # the rows are in a random order already
        learning_rate=stage.learning_rate,
        lr_scheduler_type="cosine",
        lr_scheduler_kwargs=None,
        warmup_steps=0.05,
        weight_decay=0.0,
        **memory,
        remove_unused_columns=False,  # the collator leaves out what the model does not take
        save_strategy="no" if run.journal.folder is None else "steps",
        save_steps=SAVE_EVERY,
        save_total_limit=1,
        eval_strategy="no",
        eval_on_start=False,
        load_best_model_at_end=False,
        logging_strategy="steps",  # the same in all processes, whichever of them shows its progress: logging gathers
        logging_steps=10,
        disable_tqdm=not run.progress,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
