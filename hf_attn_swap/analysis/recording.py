"""What a recording holds: numbers per sample, layer and head, never activations. Axes: N row, H head."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Mean:
    """A running mean of equally shaped tensors; NaN entries are left out."""

    total: Tensor | None = None
    count: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """Count the rows of (N,...)."""
        values = values.detach().cpu().double()  # in this order: some devices (Apple's) have no fp64
        total, count = values.nan_to_num().sum(0), (~values.isnan()).sum(0)
        self.total = total if self.total is None else self.total + total
        self.count = count if self.count is None else self.count + count

    @property
    def value(self) -> Tensor:
        """The mean so far; NaN where nothing was counted."""
        if self.total is None or self.count is None:
            return torch.tensor(float("nan"), dtype=torch.float64)
        return self.total / self.count

    @property
    def known(self) -> list[float]:
        """The values that are defined (a linear attention has no entropy)."""
        return [value for value in self.value.flatten().tolist() if math.isfinite(value)]


@dataclass
class Activation:
    """One module's outputs: a number per sample."""

    kurtosis: list[float] = field(default_factory=list)
    max_infinity_norm: list[float] = field(default_factory=list)


@dataclass
class Layer:
    """One call of an attention layer: numbers per sample, and means per head over rows.

    Attributes:
        similarity, residual: of the block's output, per sample with more than one token.
        entropy, sinks: (H,) means over the rows of real queries.
        update_norm, update_angle: of W_o's output against the layer's input, means over real tokens.
    """

    similarity: list[float] = field(default_factory=list)
    residual: list[float] = field(default_factory=list)
    entropy: Mean = field(default_factory=Mean)
    sinks: Mean = field(default_factory=Mean)
    update_norm: Mean = field(default_factory=Mean)
    update_angle: Mean = field(default_factory=Mean)

    def to_dict(self) -> dict[str, Any]:
        """Lists and numbers for JSON, None for what was not recorded or is not defined."""
        values = {
            name: value.value.tolist() if isinstance(value, Mean) else value for name, value in vars(self).items()
        }
        return {name: plain(value) for name, value in values.items()}


@dataclass
class Recording:
    """What was recorded so far: activations by module path, layers by their place in the pass."""

    activations: dict[str, Activation] = field(default_factory=dict)
    layers: dict[int, Layer] = field(default_factory=dict)
    samples: int = 0

    @property
    def kurtosis(self) -> float:
        """Mean over samples, then over modules."""
        return _mean([_mean(each.kurtosis) for each in self.activations.values()])

    @property
    def max_infinity_norm(self) -> float:
        """Mean over samples, then the maximum over modules."""
        return max((_mean(each.max_infinity_norm) for each in self.activations.values()), default=float("nan"))

    def summary(self) -> dict[str, float | None]:
        """One number per diagnostic: the outliers, similarity after the first and last layer, means of the rest."""
        layers = [self.layers[place] for place in sorted(self.layers)]
        values = {
            "kurtosis": self.kurtosis,
            "max_infinity_norm": self.max_infinity_norm,
            "similarity_first": _mean(layers[0].similarity),
            "similarity_last": _mean(layers[-1].similarity),
            "entropy": _mean([value for layer in layers for value in layer.entropy.known]),
            "sinks": _mean([value for layer in layers for value in layer.sinks.known]),
        }
        return {name: plain(value) for name, value in values.items()}

    def to_dict(self) -> dict[str, Any]:
        """Lists and numbers for JSON, layers in their order."""
        return {
            "samples": self.samples,
            "kurtosis": plain(self.kurtosis),
            "max_infinity_norm": plain(self.max_infinity_norm),
            "layers": [self.layers[place].to_dict() for place in sorted(self.layers)],
            "modules": {
                path: {
                    "kurtosis": plain(_mean(each.kurtosis)),
                    "max_infinity_norm": plain(_mean(each.max_infinity_norm)),
                }
                for path, each in self.activations.items()
            },
        }


def plain(value: Any) -> Any:
    """NaN and infinity, which JSON does not know, as None."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
