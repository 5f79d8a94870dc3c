"""Finds the thresholds of sparsemax and 1.5-entmax without sorting the scores.

Sparsemax: sum_j max(z_j - t, 0) = 1. 1.5-entmax: sum_j max(z_j - t, 0)^2 = 1, with z = s / 2.
The left sides, for 1.5-entmax its square root, are convex and fall in t. So Newton's method from below rises to the
threshold and never steps over it. Its last step is exact for sparsemax, because the left side is linear near the
threshold; for 1.5-entmax, each step squares the error. A step reads the scores a few times and needs no second tensor
of their size but one. The idea of 1.5-entmax without a sort is AdaSplash's (Goncalves et al., 2025), which has Halley's
method with bisection in place of Newton's.
Axes: ... any rows, K key.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

STEPS = 100  # more than any row needs: a step of Newton's method divides (value x slope) by 4 at least
PRECISE = 16  # the condition may be missed by this many roundings before the last step
LOWEST = -2.0  # scores below this level get weight 0, as both thresholds are at least -1


def sparsemax_threshold(centred: Tensor) -> Tensor:
    """The threshold t of sparsemax, with sum_j max(z_j - t, 0) = 1.

    Args:
        centred: z, (...,K): rows whose greatest number is 0. -inf stands for a key without weight.

    Returns:
        (...,1), from -1 to 0. A row of -inf alone has the threshold -1.

    Source: Martins & Astudillo (2016), proposition 1.
    """

    def step(above: Tensor) -> tuple[Tensor, Tensor]:
        over = above.sum(-1, keepdim=True) - 1
        return over, above.sign_().sum(-1, keepdim=True)

    return _newton(centred, 1 / centred.shape[-1], step)


def entmax15_threshold(centred: Tensor) -> Tensor:
    """The threshold t of 1.5-entmax, with sum_j max(z_j - t, 0)^2 = 1.

    Args:
        centred: z, half the scores, (...,K): rows whose greatest number is 0. -inf stands for a key without weight.

    Returns:
        (...,1), from -1 to 0. A row of -inf alone has the threshold -1.

    Source: Peters, Niculae & Martins (2019), section 3; AdaSplash (Goncalves et al., 2025).
    """

    def step(above: Tensor) -> tuple[Tensor, Tensor]:
        length = torch.linalg.vector_norm(above, dim=-1, keepdim=True)
        tiny = torch.finfo(above.dtype).tiny
        return length - 1, above.sum(-1, keepdim=True) / length.clamp_min(tiny)

    return _newton(centred, centred.shape[-1] ** -0.5, step)


def _newton(centred: Tensor, share: float, step: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Newton's method from below.

    Args:
        centred: the rows, (...,K).
        share: the threshold of K equal scores lies this much below them.
        step: from max(z - t, 0), which `step` may overwrite, to how much its size exceeds 1, and to minus the slope of
            the size in t.
    """
    # The method's first step from far below leads to the mean minus `share`.
    threshold = (centred.clamp_min(LOWEST).mean(-1, keepdim=True) - share).clamp_min_(-1.0)
    enough = PRECISE * torch.finfo(centred.dtype).eps
    above = torch.empty_like(centred)
    for _ in range(STEPS):
        torch.sub(centred, threshold, out=above)
        over, slope = step(above.relu_())
        threshold += (over / slope.clamp_min(torch.finfo(centred.dtype).tiny)).clamp_min_(0.0)
        if not bool((over > enough).any()):
            break
    return threshold
