"""One training of a conversion, the same for `convert` and for the recipes: the stage says what is taught, and how."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import nn
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from ..text.bar import silent
from .distillation import DistillationTrainer
from .lesson import Lesson, last_whole_checkpoint
from .parts import choose_trainable
from .split_copy import SplitCopy, splitting
from .stages import Distil
from .state import State
from .teacher import Teacher, note_retrained, trains_the_original
from .trainer import TrainerWithoutLabels


def teach(
    state: State,
    stage: Distil,
    lesson: Lesson,
    *,
    callbacks: Iterable[TrainerCallback] = (),
    prepare: Callable[[TrainerWithoutLabels], None] = lambda _: None,
) -> int:
    """Train the model by one stage, from the last checkpoint of a killed run if there is one.

    Args:
        state: the conversion. Adapters of the stage's rank are put around the model, if there are none yet.
        stage: what is taught.
        lesson: what is read.
        callbacks: of the trainer.
        prepare: what else is done to the trainer before it trains.

    Returns:
        The number of training steps.

    Raises:
        ValueError: the stage does not fit the model; see the trainers.
    """
    trainable = stage.trainable if stage.rank is None else None
    if stage.rank is not None and state.adapters is None:
        state.adapt(stage.rank)
    choose_trainable(state.student, trainable)
    _keep_what_trains(state)
    student, teacher = _student_and_teacher(state, lesson.args)
    trainer = DistillationTrainer(
        student,
        lesson.args,
        teacher=teacher,
        losses=stage.losses,
        trainable=trainable,
        train_dataset=lesson.rows,
        data_collator=state.rows.collate,
        callbacks=[*callbacks],
    )
    _keep_what_trains(state)
    if silent():
        trainer.remove_callback(PrinterCallback)
    prepare(trainer)
    try:
        with contextlib.nullcontext() if state.fsdp is None else splitting(trainer, state.fsdp):
            trainer.train(resume_from_checkpoint=last_whole_checkpoint(Path(trainer.args.output_dir or ".")))
            if state.apart is not None:
                state.apart.gather()
                if trains_the_original(state.student):
                    note_retrained(state.installation)
    finally:
        state.apart = None
    state.changed = True
    return int(trainer.state.global_step)


def _student_and_teacher(state: State, args: TrainingArguments) -> tuple[nn.Module, Teacher]:
    """What trains, and what teaches it."""
    if state.fsdp is None:
        if state.taught is None:
            state.taught = Teacher(state.student, state.teacher, state.originals)
        return state.student, state.taught
    state.model.to(args.device)  # as a trainer does with a model that it trains whole
    taught = state.taught  # the step has chosen another teacher
    itself = taught is None and state.teacher is None
    state.apart = SplitCopy(state.student, state.originals, teaches=itself)
    if taught is None:
        taught = Teacher(state.student, state.teacher, state.apart.originals, apart=True)
    return state.apart.model, taught


def _keep_what_trains(state: State) -> None:
    state.keep(each for each in state.student.parameters() if each.requires_grad)
