"""Computes clipped softmax: weights are stretched and clipped, so that scores need not be extreme for weights 0 and 1.

P' = clip((zeta - gamma) P + gamma, 0, 1). At strength s, gamma becomes s gamma and zeta becomes 1 + s (zeta - 1);
s = 0 is ordinary attention.
Bondarenko et al. (2023), eq. 4. With softmax_1 in place of softmax, this is Clipped OutEffHop.
Axes: B batch, H head, Q query, K key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ..core.call import Call
from ..core.kind import Kind
from ..core.options import Options
from ..functional import check_clip, clip
from ..kernels.weighing import Rule
from .about import About
from .base import Variant, register

# The gammas of the papers' runs: BERT -0.025, OPT -12 / 512, ViT -0.00001.
PUBLISHED = {Kind.ENCODER: -0.025, Kind.DECODER: -12 / 512, Kind.IMAGE: -1e-5}


@dataclass(frozen=True, kw_only=True)
class ClippedSoftmaxOptions(Options):
    """The options of clipped softmax.

    Attributes:
        gamma: the lower end of the stretched weights, at most 0. None means the gamma of `PUBLISHED` for the kind of
            the attention module; a swap that is in a model holds this number.
        zeta: the upper end of the stretched weights, at least 1.
        alpha: if given, gamma is -alpha / length, whatever `gamma` says.
        length: goes with `alpha`; a constant, such as the training length.

    Raises:
        ValueError: a number lies outside its range, or only one of `alpha` and `length` is given.
    """

    gamma: float | None = None
    zeta: float = 1.0
    alpha: float | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.alpha is None) != (self.length is None):
            raise ValueError("clipped_softmax: alpha and length go together (gamma = -alpha / length).")
        if self.alpha is not None and (self.alpha < 0 or self.length is None or self.length < 1):
            raise ValueError(
                f"clipped_softmax: alpha must be >= 0 and length >= 1, got {self.alpha} and {self.length}."
            )
        check_clip(0.0 if self.gamma is None else self.gamma, self.zeta)

    @property
    def stretch(self) -> float | None:
        """The lower end of the stretched weights: -alpha / length if both are given, otherwise gamma."""
        if self.alpha is None or self.length is None:
            return self.gamma
        return -self.alpha / self.length


@register("clipped_softmax", aliases=("clipped",))
class ClippedSoftmax(Variant):
    """Clips the stretched weights to [0, 1] (no parameters)."""

    about = About(
        summary="weights are stretched and clipped",
        formula="clip((zeta - gamma) P + gamma, 0, 1)",
        paper="Bondarenko et al., 2023; OutEffHop (Hu et al., 2024)",
        fused="the weights of a block of queries at a time, never of all queries",
    )
    places = ("weights",)
    Options = ClippedSoftmaxOptions
    options: ClippedSoftmaxOptions

    @classmethod
    def fit_options(cls, options: ClippedSoftmaxOptions, kind: Kind) -> ClippedSoftmaxOptions:
        if options.gamma is not None:
            return options
        return replace(options, gamma=PUBLISHED[kind] if options.stretch is None else options.stretch)

    def rule(self, rule: Rule) -> Rule:
        assert self.options.stretch is not None, "build_swap fits the options first"
        return replace(rule, gamma=self.options.stretch, zeta=self.options.zeta)

    def adjust(self, weights_BHQK: Tensor, call: Call) -> Tensor:
        assert self.options.stretch is not None, "build_swap fits the options first"
        strength = call.strength_in(weights_BHQK.dtype)
        gamma = strength * self.options.stretch
        zeta = 1 + strength * (self.options.zeta - 1)
        return clip(weights_BHQK, gamma, zeta)
