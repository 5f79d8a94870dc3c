"""Attention transfer, as a stage of a recipe: every swapped layer learns what the original attention gives."""

from __future__ import annotations

from ..engine import Step
from ..lesson import epochs_of
from ..preserve_training_state import preserve_training_flags
from ..stages import Align
from ..state import State
from ..teach import teach


def aligned(stage: Align, name: str) -> Step:
    """The step that takes an `Align` of a recipe."""

    def run(state: State) -> None:
        lesson = epochs_of(state, stage, name)
        with preserve_training_flags(state.model):
            teach(state, stage, lesson)
        state.say(f"Attention transfer without labels: {lesson.words} ({', '.join(stage.trainable)}).")

    run.__name__ = name
    return run
