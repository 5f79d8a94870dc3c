"""Watches outliers while a model trains: a callback for any `Trainer`, with the measures of `record`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..wiring.install import model_root
from .record import Recorder
from .recording import Activation, Recording

if TYPE_CHECKING:
    from transformers import Trainer


class OutlierCallback(TrainerCallback):
    """Logs `kurtosis` and `max_inf_norm` of the training batches, by `Trainer.log`, in the first and each n-th step.

    The figures are then in `trainer.state.log_history` and in all that `report_to` names. They are those of the step's
    own batches, of all processes and accumulated parts, in the passes that train: no pass runs for them. Between two
    measured steps, and in evaluations, the model has no hooks.

        trainer = Trainer(model, args, train_dataset=rows)
        trainer.add_callback(OutlierCallback(trainer, every=100))
        trainer.train()

    Args:
        trainer: the trainer, whose model is stock or swapped.
        every: measure the first step, and each step whose number is a multiple of this one.
        modules: as in `record`.

    Raises:
        ValueError: `every` is below 1.

    Source: OutEffHop (Hu et al., 2024), section 4 and figures 2 to 4.
    """

    def __init__(self, trainer: Trainer, *, every: int = 100, modules: str | None = None) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}.")
        self.trainer, self.every, self.modules = trainer, every, modules
        self.hooks, self.recording = contextlib.ExitStack(), Recording()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Place the hooks, if this step is measured."""
        number = state.global_step + 1
        if number == 1 or number % self.every == 0:
            self.recording = Recording()
            Recorder(model_root(model), self.recording, finite=False).hook_activations(self.hooks, self.modules)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remove the hooks, and log what they saw."""
        self.hooks.close()
        if not self.recording.activations:
            return
        from accelerate.utils import gather_object  # Trainer needs it, and this package does not

        parts, self.recording = gather_object([self.recording.activations]), Recording()
        whole = Recording()
        for part in parts:
            for path, activation in part.items():
                joined = whole.activations.setdefault(path, Activation())
                joined.kurtosis += activation.kurtosis
                joined.max_inf_norm += activation.max_inf_norm
        due = control.should_log  # this log is beside those of the loss
        self.trainer.log({"kurtosis": whole.kurtosis, "max_inf_norm": whole.max_inf_norm})
        control.should_log = due

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove hooks that a step which did not end left."""
        self.hooks.close()
