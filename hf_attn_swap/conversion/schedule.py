"""A `TrainerCallback` that moves the strength from start to end over a share of the training steps.

    linear:  s = start + (end - start) p
    cosine:  s = start + (end - start) (1 - cos(pi p)) / 2

Step k (counted from 1) of n steps has p = k / (share n), at most 1. So the first step runs at a strength beyond start,
and the step at which the share is complete, and all steps after it, run at end.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..patch import check_strength, set_strength

SHAPES = ("linear", "cosine")


class StrengthSchedule(TrainerCallback):
    """Moves the strength of every swapped layer while a `Trainer` trains.

    The strength is a function of the step alone, so a resumed training continues at the right strength. A compiled
    model recompiles where the strength enters or leaves 0 and 1, and nowhere else.

    Args:
        start, end: the first and the last strength, in [0, 1].
        share: the share of the steps over which the strength moves, in [0, 1]; 0 sets `end` at once.
        shape: "linear" or "cosine".

    Raises:
        ValueError: a strength or the share is out of range, or the shape is unknown.
    """

    def __init__(self, start: float = 0.0, end: float = 1.0, share: float = 0.5, shape: str = "linear") -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"share is a part of the steps and must lie in [0, 1], got {share!r}.")
        if shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}.")
        self.start, self.end = check_strength(start), check_strength(end)
        self.share, self.shape = share, shape

    def strength(self, step: int, steps: int) -> float:
        """The strength of step number `step` (counted from 1) of a training of `steps` steps."""
        last = round(self.share * steps)
        if step >= max(last, 1):
            return self.end
        done = step / last
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return self.start + (self.end - self.start) * done

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the strength of the step that is about to run."""
        set_strength(kwargs["model"], self.strength(state.global_step + 1, state.max_steps))
