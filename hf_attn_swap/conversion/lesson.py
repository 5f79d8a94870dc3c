"""What one training reads, and its arguments: a share of `convert`'s budget, or the epochs of a recipe's stage."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from .rows import Rows, mean_length, select
from .stages import Align, Distil
from .state import State

SAVE_EVERY = 100  # training steps between two checkpoints
FEW_TOKENS = 256  # per training step: a small batch makes more of every token


@dataclass(frozen=True)
class Lesson:
    """One training.

    Attributes:
        rows: what it reads, in this order or drawn by the arguments.
        args: its arguments, with the folder of its checkpoints.
        words: its budget in words.
    """

    rows: Any
    args: TrainingArguments
    words: str = ""


def without_secrets(args: TrainingArguments) -> TrainingArguments:
    """The same arguments without tokens: a `Trainer` writes its arguments beside all weights that it saves.

    The fields are those that `TrainingArguments.to_dict` hides, too.
    """
    secrets: dict[str, Any] = {each.name: None for each in fields(args) if each.name.endswith("_token")}
    return replace(args, **secrets)


def rows_per_step(stage: Distil, rows: Rows, processes: int = 1) -> int:
    """The rows of a training step of `convert`. Each process reads as many as one alone would."""
    return processes * (stage.batch or max(1, round(FEW_TOKENS / (rows.length or FEW_TOKENS))))


def exhausted(state: State, *, whole: bool = False) -> bool:
    """True if what is free of the budget, or the whole of what is left, is less than one training step."""
    left = state.budget.left if whole else state.budget.free
    return left < (state.rows.length or 1) * _step(state, state.config.plan.last)


def share_of_budget(state: State, stage: Distil, tokens: int, name: str) -> Lesson:
    """The next rows of `convert`'s fixed order, of at most so many tokens, once.

    Several processes read whole steps: of a last step that lacks rows, one of them would read rows twice.
    """
    count = max(1, int(min(tokens, state.budget.free) / (state.rows.length or 1)))
    if state.args.world_size > 1 and count > (step := _step(state, stage)):
        count -= count % step
    order = state.rows.order(_step(state, state.config.plan.last))
    chosen = list(itertools.islice(order, state.budget.read, state.budget.read + count))
    return Lesson(state.rows.some(chosen).rows, _arguments(state, stage, name))


def rows_read(lesson: Lesson, training_steps: int) -> int:
    """The rows that a training has read after so many training steps."""
    args = lesson.args
    each = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    return min(len(lesson.rows), int(training_steps * each))


def epochs_of(state: State, stage: Align | Distil, name: str) -> Lesson:
    """The epochs, or the tokens, of a stage of a recipe, with the recipe's own arguments.

    Raises:
        ValueError: tokens are to be counted in rows that have none.
    """
    rows, args = state.rows.rows, state.args
    epochs, words = stage.epochs, f"{stage.epochs:g} epochs on {len(rows):,} training rows"
    if stage.tokens is not None:
        each = mean_length(rows)
        if not each:
            raise ValueError(f"{stage.name}: tokens counts tokens of text; give epochs for other data.")
        wanted = max(1, round(stage.tokens / each))
        epochs = 1.0 if wanted <= len(rows) else wanted / len(rows)
        rows = select(rows, range(min(wanted, len(rows))))
        words = f"{stage.tokens:,} tokens"
    own = replace(
        args,
        output_dir=str(state.folder / name),
        num_train_epochs=epochs,
        max_steps=-1,
        learning_rate=stage.learning_rate,
        per_device_train_batch_size=getattr(stage, "batch", None) or args.per_device_train_batch_size,
    )
    return Lesson(rows, own, words)


def last_whole_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint, or None. Incomplete checkpoints of a killed run are removed."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    for path in found:
        try:  # the Trainer writes this file last
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            shutil.rmtree(path, ignore_errors=True)  # the other processes remove it, too
        else:
            return str(path)
    return None


def _step(state: State, stage: Distil) -> int:
    """The rows of a training step of all processes together."""
    return rows_per_step(stage, state.rows, state.args.world_size)


def _arguments(state: State, stage: Distil, name: str) -> TrainingArguments:
    """The arguments of one training of `convert`."""
    rows = rows_per_step(stage, state.rows)
    memory: dict[str, Any] = {"per_device_train_batch_size": rows}
    if state.config.low_memory:
        new = hasattr(state.args, "activation_checkpointing")  # the name since transformers 5.23
        memory = {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": rows,
            "activation_checkpointing" if new else "gradient_checkpointing": True,
        }
    return replace(
        without_secrets(state.args),
        output_dir=str(state.folder / name.replace(" ", "-")),
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
        save_strategy="no" if state.journal.folder is None else "steps",
        save_steps=SAVE_EVERY,
        save_total_limit=1,
        eval_strategy="no",
        eval_on_start=False,
        load_best_model_at_end=False,
        logging_strategy="steps",  # the same in all processes, whichever of them shows its progress: logging gathers
        logging_steps=10,
        disable_tqdm=not state.progress,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
