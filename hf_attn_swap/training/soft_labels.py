"""Trains a classifier on soft labels: a share per class in place of one class.

loss = -sum_c y_c log p_c, with y smoothed as `label_smoothing_factor` says. Axes: B batch, C class.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer


class SoftLabelTrainer(Trainer):
    """A `Trainer` that also takes labels (B,C) of shares. Other labels go to the model, as ever.

    A head of transformers would take labels (B,C) for several classes at once, and train each by itself.
    """

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """The loss of the batch, (); with `return_outputs`, a pair as usual."""
        labels: Tensor | None = inputs.get("labels")
        if labels is None or labels.dim() != 2 or not labels.is_floating_point():
            return super().compute_loss(model, inputs, return_outputs, *args, **kwargs)
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        loss = F.cross_entropy(outputs.logits, labels, label_smoothing=self.args.label_smoothing_factor)
        return (loss, outputs) if return_outputs else loss
