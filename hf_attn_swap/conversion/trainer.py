"""What the trainers that read no labels share: attention transfer and distillation."""

from __future__ import annotations

import copy
from typing import Any, cast

from torch import nn
from transformers import Trainer, TrainingArguments

from ..patch import need_installation
from .teacher import note_retrained, trains_the_original


class TrainerWithoutLabels(Trainer):
    """A `Trainer` whose loss comes from a teacher, as a mean over rows.

    Args:
        model: a patched model.
        args: as for `Trainer`.
        kwargs: the other arguments of `Trainer`.

    Raises:
        ValueError: the model is not patched.
    """

    def __init__(self, model: nn.Module, args: TrainingArguments | None = None, **kwargs: Any) -> None:
        self.installation = need_installation(model)
        if args is not None and args.ddp_find_unused_parameters is None:
            args = copy.copy(args)
            args.ddp_find_unused_parameters = False  # DDP searches the model's output, which has no losses
        super().__init__(model, args, **kwargs)
        self.model_accepts_loss_kwargs = False  # the loss is a mean, which Trainer divides by the accumulation steps
        self.can_return_loss = True  # without labels there is still a loss to evaluate
        self.label_names: list[str] = []

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in `Trainer`. Afterwards the swaps note whether strength 0 is still the original model."""
        changed = trains_the_original(cast(nn.Module, self.model))
        result = super().train(*args, **kwargs)
        if changed:
            note_retrained(self.installation)
        return result
