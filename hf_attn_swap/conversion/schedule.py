"""A `TrainerCallback` that moves the strength from start to end over a share of the steps.

linear: s = start + (end - start) p; cosine: s = start + (end - start) (1 - cos(pi p)) / 2, p the share that is done.
The first step runs at the first rung above start, the last one of the share and all after it at end.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..patch import check_strength, set_strength

SHAPES = ("linear", "cosine")


class StrengthSchedule(TrainerCallback):
    """Moves the strength of every swapped layer while a `Trainer` trains.

    The strength is a function of the step alone, so a resumed run continues where it was; a compiled model
    recompiles where the strength enters or leaves 0 and 1, and nowhere else.

    Args:
        start, end: strengths in [0, 1].
        share: of the steps over which it moves, in [0, 1]; 0 sets `end` at once.
        shape: "linear" or "cosine".

    Raises:
        ValueError: a strength or share out of range, or an unknown shape.
    """

    def __init__(self, start: float = 0.0, end: float = 1.0, share: float = 0.5, shape: str = "linear") -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"share is a part of the steps and must lie in [0, 1], got {share!r}.")
        if shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}.")
        self.start, self.end = check_strength(start), check_strength(end)
        self.share, self.shape = share, shape

    def strength(self, step: int, steps: int) -> float:
        """The strength of a step (counted from 1) of so many."""
        last = round(self.share * steps)
        if step >= max(last, 1):
            return self.end
        done = step / last
        done = done if self.shape == "linear" else (1 - math.cos(math.pi * done)) / 2
        return self.start + (self.end - self.start) * done

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the strength of the step that is about to run."""
        set_strength(kwargs["model"], self.strength(state.global_step + 1, state.max_steps))
