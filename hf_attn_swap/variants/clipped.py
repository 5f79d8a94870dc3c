"""Computes clipped softmax: weights are stretched and clipped, so that scores need not be extreme for weights 0 and 1.

P' = clip((zeta - gamma) P + gamma, 0, 1). At strength s, gamma becomes s gamma and zeta becomes 1 + s (zeta - 1);
s = 0 is ordinary attention.
Bondarenko et al. (2023), eq. 4. With softmax_1 in place of softmax, this is Clipped OutEffHop.
Axes: B batch, H head, Q query, K key.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.call import Call
from ..core.options import Options
from ..functional import check_clip, clip
from .base import Variant, register


@dataclass(frozen=True, kw_only=True)
class ClippedOptions(Options):
    """The options of clipped softmax.

    Attributes:
        gamma: the lower end of the stretched weights, at most 0.
        zeta: the upper end of the stretched weights, at least 1.
        alpha, length: if given, gamma is -alpha / length. `length` is a constant, such as the training length.

    Raises:
        ValueError: a number lies outside its range, or only one of `alpha` and `length` is given.
    """

    gamma: float = -0.025
    zeta: float = 1.0
    alpha: float | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.alpha is None) != (self.length is None):
            raise ValueError("clipped: alpha and length go together (gamma = -alpha / length).")
        if self.alpha is not None and (self.alpha < 0 or self.length is None or self.length < 1):
            raise ValueError(f"clipped: alpha must be >= 0 and length >= 1, got {self.alpha} and {self.length}.")
        check_clip(self.stretch, self.zeta)

    @property
    def stretch(self) -> float:
        """The lower end of the stretched weights: -alpha / length if both are given, otherwise gamma."""
        if self.alpha is None or self.length is None:
            return self.gamma
        return -self.alpha / self.length


@register("clipped")
class Clipped(Variant):
    """Clips the stretched weights to [0, 1] (no parameters)."""

    summary = "weights are stretched and clipped"
    formula = "clip((zeta - gamma) P + gamma, 0, 1)"
    paper = "Bondarenko et al., 2023; OutEffHop (Hu et al., 2024)"
    fused = "none: needs the weights"
    places = ("weights",)
    explicit = True
    Options = ClippedOptions
    options: ClippedOptions

    def adjust(self, weights_BHQK: Tensor, call: Call) -> Tensor:
        gamma = call.strength * self.options.stretch
        zeta = 1 + call.strength * (self.options.zeta - 1)
        return clip(weights_BHQK, gamma, zeta)
