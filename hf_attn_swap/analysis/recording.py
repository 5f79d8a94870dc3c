"""The data of a recording: numbers per sample, layer and head, and no activations. Axes: N row, H head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..text.finite import finite
from .largest import Largest

BINS = 100
MOST_NATS = 10.0  # the entropy of 22,000 keys with equal weights


@dataclass
class Mean:
    """A running mean of tensors of one shape. Entries that are NaN are left out."""

    total: Tensor | None = None
    count: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """Add the rows of a tensor (N,...) to the mean."""
        values = values.detach().cpu().double()  # in this order: some devices (Apple's) have no fp64
        total, count = values.nan_to_num().sum(0), (~values.isnan()).sum(0)
        self.total = total if self.total is None else self.total + total
        self.count = count if self.count is None else self.count + count

    @property
    def value(self) -> Tensor:
        """The mean of all rows so far; NaN where no row had a number."""
        if self.total is None or self.count is None:
            return torch.tensor(math.nan, dtype=torch.float64)
        return self.total / self.count

    @property
    def known(self) -> list[float]:
        """The means that are numbers. The entropy of linear attention, for example, is not defined."""
        return [value for value in self.value.flatten().tolist() if math.isfinite(value)]


@dataclass
class Counts:
    """How many values lie in each of equal bins between two ends. A value beyond an end counts in the bin there."""

    low: float
    high: float
    counts: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.int64))

    def add(self, values: Tensor) -> None:
        """Count the values of a tensor of any shape, without NaN."""
        places = (values[~values.isnan()] - self.low) * (BINS / (self.high - self.low))
        self.counts += torch.bincount(places.long().clamp(0, BINS - 1), minlength=BINS).cpu()

    def to_dict(self) -> dict[str, Any]:
        """The ends and the counts for JSON."""
        return {"low": self.low, "high": self.high, "counts": self.counts.tolist()}


@dataclass
class Activation:
    """The outliers in one module's outputs, one number per sample."""

    kurtosis: list[float] = field(default_factory=list)
    max_inf_norm: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The means over samples for JSON."""
        return {"kurtosis": finite(mean(self.kurtosis)), "max_inf_norm": finite(mean(self.max_inf_norm))}


@dataclass
class Layer:
    """The measurements of one layer: numbers per sample, and means per head.

    Attributes:
        similarity, residual: token similarity and residual ratio of the block's output, one number per sample with more
            than one token.
        pairs, entropies: how many pairs of tokens have which cosine, and how many rows of weights which entropy.
        entropy, sinks: (H,), attention entropy and sink mass, as means over the rows of real queries.
        update_norm, update_angle: norm of W_o's output, and its angle with the layer's input: means over real tokens.
        largest: the largest activation of the block's output, and its token.
    """

    similarity: list[float] = field(default_factory=list)
    residual: list[float] = field(default_factory=list)
    entropy: Mean = field(default_factory=Mean)
    sinks: Mean = field(default_factory=Mean)
    update_norm: Mean = field(default_factory=Mean)
    update_angle: Mean = field(default_factory=Mean)
    largest: Largest = field(default_factory=Largest)
    pairs: Counts = field(default_factory=lambda: Counts(-1.0, 1.0))
    entropies: Counts = field(default_factory=lambda: Counts(0.0, MOST_NATS))

    def to_dict(self) -> dict[str, Any]:
        """The measurements as lists and numbers for JSON. None stands for a number that is missing or not defined."""
        values = {
            name: value.value.tolist() if isinstance(value, Mean) else value for name, value in vars(self).items()
        }
        values["largest"] = asdict(self.largest)
        values |= {"pairs": self.pairs.to_dict(), "entropies": self.entropies.to_dict()}
        return {name: finite(value) for name, value in values.items()}


@dataclass
class Recording:
    """The measurements so far: outliers by module path, and layers by their place in the pass."""

    activations: dict[str, Activation] = field(default_factory=dict)
    layers: dict[int, Layer] = field(default_factory=dict)
    samples: int = 0

    @property
    def in_order(self) -> list[Layer]:
        """The layers, in the order of the pass."""
        return [self.layers[place] for place in sorted(self.layers)]

    @property
    def kurtosis(self) -> float:
        """The kurtosis: mean over samples, then mean over modules."""
        return mean([mean(activation.kurtosis) for activation in self.activations.values()])

    @property
    def max_inf_norm(self) -> float:
        """The maximum infinity norm: mean over samples, then maximum over modules."""
        return max((mean(activation.max_inf_norm) for activation in self.activations.values()), default=math.nan)

    def summary(self) -> dict[str, float | None]:
        """One number per diagnostic.

        Token similarity is given after the first and after the last layer; entropy and sink mass are means over layers.
        """
        layers = self.in_order
        values = {
            "kurtosis": self.kurtosis,
            "max_inf_norm": self.max_inf_norm,
            "similarity_first": mean(layers[0].similarity),
            "similarity_last": mean(layers[-1].similarity),
            "entropy": mean([value for layer in layers for value in layer.entropy.known]),
            "sinks": mean([value for layer in layers for value in layer.sinks.known]),
        }
        return {name: finite(value) for name, value in values.items()}

    def to_dict(self) -> dict[str, Any]:
        """The recording as lists and numbers for JSON, with the layers in their order."""
        return {
            "samples": self.samples,
            "kurtosis": finite(self.kurtosis),
            "max_inf_norm": finite(self.max_inf_norm),
            "layers": [layer.to_dict() for layer in self.in_order],
            "modules": {path: activation.to_dict() for path, activation in self.activations.items()},
        }


def mean(values: Sequence[float]) -> float:
    """The mean; NaN without values."""
    return sum(values) / len(values) if values else math.nan
