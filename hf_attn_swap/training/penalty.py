"""Trains under a penalty on large activations: the mean fourth power of what the norms read, beside the loss.

loss + weight * mean over norms, tokens and channels of (a / scale)^4; a are the sums of the residual stream.
TWEO (2025) trains with such a penalty from random weights on. Axes: B batch, L token, E model width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..measuring.batches import token_mask
from ..quantization.places import is_norm
from .soft_labels import SoftLabelTrainer


@dataclass(kw_only=True)
class PenaltyArguments:
    """The arguments of a recipe that can train under a penalty on large activations.

    Raises:
        ValueError: the penalty is below 0, or the scale is not above 0.
    """

    outlier_penalty: float = field(
        default=0.0, metadata={"help": "Weight of a penalty on large activations, such as 1; 0 is none."}
    )
    outlier_scale: float = field(default=10.0, metadata={"help": "Activations above it cost much under the penalty."})

    def __post_init__(self) -> None:
        if not (self.outlier_penalty >= 0 and self.outlier_scale > 0):
            raise ValueError(
                f"--outlier_penalty must be at least 0 and --outlier_scale above 0, got {self.outlier_penalty} and "
                f"{self.outlier_scale}."
            )

    @property
    def penalty(self) -> dict[str, float]:
        """The two numbers by name; nothing without a penalty."""
        both = {"outlier_penalty": self.outlier_penalty, "outlier_scale": self.outlier_scale}
        return both if self.outlier_penalty else {}


class PenalizedTrainer(SoftLabelTrainer):
    """A `Trainer` whose loss has the penalty as one more term while the model trains.

    The loss of the model must be a mean over rows, whatever the number of accumulated parts.

    Args:
        model: the model.
        args: as those of `Trainer`.
        outlier_penalty, outlier_scale: the weight of the penalty, and the number above which activations cost much.
        kwargs: as those of `Trainer`.
    """

    def __init__(
        self, model: nn.Module, *args: Any, outlier_penalty: float, outlier_scale: float = 10.0, **kwargs: Any
    ) -> None:
        super().__init__(model, *args, **kwargs)
        self.weight, self.scale = outlier_penalty, outlier_scale
        self.read: list[Tensor] = []
        model.register_forward_pre_hook(lambda *_: self.read.clear())
        for module in model.modules():
            if is_norm(module):
                module.register_forward_pre_hook(self._reads)

    def _reads(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].dim() == 3:  # norms of queries and keys read heads
            self.read.append(args[0])

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """The loss with the penalty of the batch, (), over its real tokens; with `return_outputs`, a pair as usual."""
        result = super().compute_loss(model, inputs, return_outputs, *args, **kwargs)
        if not self.weight or not model.training:
            return result
        real_BL = token_mask(inputs, self.read[0])
        penalties = [(read_BLE[real_BL] / self.scale).pow(4).mean() for read_BLE in self.read]
        penalty = self.weight * torch.stack(penalties).mean()
        return (result[0] + penalty, *result[1:]) if isinstance(result, tuple) else result + penalty
