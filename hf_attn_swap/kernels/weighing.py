"""Does to one block of scores what follows the mask: normalizer, clip and dropout, and back.

read = dropout(clip((zeta - gamma) P + gamma, 0, 1)). gamma = 0 and zeta = 1 change nothing.
At strength s, gamma becomes s gamma and zeta becomes 1 + s (zeta - 1).
Bondarenko et al. (2023), eq. 4. Axes: B batch, H head, Q query, K key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .normalizers import Normalizer, normalizer


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How scores become weights at full strength.

    Attributes:
        normalizer: "softmax", "softmax_n", "sparsemax" or "entmax15".
        n: the n of softmax_n.
        gamma, zeta: the ends of the stretched weights; 0 and 1 change nothing.
    """

    normalizer: str = "softmax"
    n: float = 1.0
    gamma: float = 0.0
    zeta: float = 1.0

    @property
    def clips(self) -> bool:
        """True if weights are stretched and clipped."""
        return self.gamma < 0 or self.zeta > 1


@dataclass(frozen=True)
class Weighing:
    """A rule at a strength, with dropout.

    Attributes:
        rule: how scores become weights.
        strength: a (1,) tensor between 0 and 1, or None for full strength.
        dropout: the probability that a weight is dropped.
        seed: decides what is dropped, together with the number of the block.
    """

    rule: Rule
    strength: Tensor | None = None
    dropout: float = 0.0
    seed: int = 0

    @property
    def normalizer(self) -> Normalizer:
        """The first step, from scores to weights that are not clipped."""
        return normalizer(self.rule.normalizer, self.strength, self.rule.n)

    def clipped(self, weights: Tensor) -> Tensor:
        """The clipped weights. The given weights stay."""
        return self._stretched(weights).clamp_(0.0, 1.0) if self.rule.clips else weights

    def clipped_back(self, weights: Tensor, grad: Tensor) -> Tensor:
        """From the gradient of the clipped weights to that of the weights, in place."""
        if not self.rule.clips:
            return grad
        stretched = self._stretched(weights)
        grad = grad.mul_(self._factor(weights)[0])
        # As in `functional.clip`, the slope at 0 and 1 themselves is that between them. This is far faster on a CPU
        # than to fill by a bool mask.
        lowest = -torch.finfo(grad.dtype).tiny
        grad = torch.ops.aten.threshold_backward(grad, stretched, lowest)
        return grad.masked_fill_(stretched > 1, 0.0) if self.rule.zeta > 1 else grad

    def kept(self, weights: Tensor, number: int) -> Tensor | None:
        """The factors of dropout for the block of this number, 0 or 1 / (1 - dropout); None without dropout."""
        if self.dropout == 0:
            return None
        generator = torch.Generator(weights.device).manual_seed(self.seed + number)
        stays = 1 - self.dropout
        return torch.empty_like(weights).bernoulli_(stays, generator=generator).div_(max(stays, self._tiny(weights)))

    def _stretched(self, weights: Tensor) -> Tensor:
        factor, gamma = self._factor(weights)
        return (weights * factor).add_(gamma)

    def _factor(self, weights: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """The factor zeta - gamma and the number gamma at this strength."""
        strength = 1.0 if self.strength is None else self.strength.to(weights.dtype)
        gamma = strength * self.rule.gamma
        return 1 + strength * (self.rule.zeta - 1) - gamma, gamma

    @staticmethod
    def _tiny(weights: Tensor) -> float:
        return torch.finfo(weights.dtype).tiny
