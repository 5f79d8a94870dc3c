"""One training of a conversion, the same for `convert` and for the recipes: the stage says what is taught, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from transformers import PrinterCallback, TrainerCallback

from ..text.bar import silent
from .distillation import DistillationTrainer
from .lesson import Lesson, last_whole_checkpoint
from .parts import choose_trainable
from .stages import Align, Distil
from .state import State
from .teacher import Teacher
from .trainer import TrainerWithoutLabels
from .transfer import AttentionTransferTrainer


def teach(
    state: State,
    stage: Align | Distil,
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
    trainer: TrainerWithoutLabels
    given = {"train_dataset": lesson.rows, "data_collator": state.rows.collate, "callbacks": [*callbacks]}
    if isinstance(stage, Align):
        trainer = AttentionTransferTrainer(state.model, lesson.args, trainable=stage.trainable, **given)
    else:
        trainable = stage.trainable if stage.rank is None else None
        if stage.rank is not None and state.adapters is None:
            state.adapt(stage.rank)
        choose_trainable(state.student, trainable)
        _keep_what_trains(state)
        if state.taught is None:
            state.taught = Teacher(state.student, state.teacher, state.originals)
        trainer = DistillationTrainer(
            state.student,
            lesson.args,
            teacher=state.taught,
            losses=stage.losses,
            trainable=trainable,
            **given,
        )
    _keep_what_trains(state)
    if silent():
        trainer.remove_callback(PrinterCallback)
    prepare(trainer)
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(Path(trainer.args.output_dir or ".")))
    state.changed = True
    return int(trainer.state.global_step)


def _keep_what_trains(state: State) -> None:
    state.keep(each for each in state.student.parameters() if each.requires_grad)
