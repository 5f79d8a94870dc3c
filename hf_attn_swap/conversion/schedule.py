"""A `TrainerCallback` that moves the strength from start to end over a share of the training steps.

    linear:  s = start + (end - start) p
    cosine:  s = start + (end - start) (1 - cos(pi p)) / 2

Training step k (counted from 1) of n has p = k / (share n), at most 1. So the first one runs at a strength beyond
start, and that at which the share is complete, and all that follow, run at end.

All layers move together, or one after another: layer number j of m (counted from 0, in the chosen order) then has
p_j = m p - j, at least 0 and at most 1.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..patch import check_strength, need_installation, set_strength

SHAPES = ("linear", "cosine")
ORDERS = ("together", "up", "down")


class StrengthSchedule(TrainerCallback):
    """Moves the strength of every swapped layer while a `Trainer` trains.

    The strength is a function of the training step alone, so a resumed training continues at the right strength. A
    compiled model recompiles where the strength enters or leaves 0 and 1, and nowhere else.

    Args:
        start: the first strength, in [0, 1].
        end: the last strength, in [0, 1].
        share: the share of the training steps over which the strength moves, in [0, 1]; 0 sets `end` at once.
        shape: "linear" or "cosine".
        order: "together"; or one layer after another, "up" from the first layer or "down" from the last.

    Raises:
        ValueError: a strength or the share is out of range, or the shape or the order is unknown.
    """

    def __init__(
        self,
        start: float = 0.0,
        end: float = 1.0,
        share: float = 0.5,
        shape: str = "linear",
        order: str = "together",
    ) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"share is a part of the steps and must lie in [0, 1], got {share!r}.")
        if shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}.")
        if order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}.")
        self.start, self.end = check_strength(start), check_strength(end)
        self.share, self.shape, self.order = share, shape, order

    def strength(self, step: int, steps: int, place: int = 0, layers: int = 1) -> float:
        """The strength of training step number `step` (counted from 1) of `steps`.

        `place` is the layer's place in the order, from 0, among `layers` layers that move one after another.
        """
        last = round(self.share * steps)
        if step >= max(last, 1):
            return self.end
        done = min(max(layers * step / last - place, 0.0), 1.0)
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return self.start + (self.end - self.start) * done

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the strength of the training step that is about to run."""
        model, step = kwargs["model"], state.global_step + 1
        if self.order == "together":
            set_strength(model, self.strength(step, state.max_steps))
            return
        installation = need_installation(model)
        layers = installation.layers()[:: -1 if self.order == "down" else 1]
        installation.set_strength(
            {layer: self.strength(step, state.max_steps, place, len(layers)) for place, layer in enumerate(layers)}
        )
