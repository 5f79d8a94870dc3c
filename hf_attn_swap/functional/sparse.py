"""Turns scores into weights with exact zeros: sparsemax and 1.5-entmax.

sparsemax: p = max(s - tau, 0). 1.5-entmax: p = max(s / 2 - tau, 0)^2. The threshold tau makes each row sum to 1.
If all scores of a row are equal, both give equal weights, as softmax does.
Martins & Astudillo (2016); Peters, Niculae & Martins (2019). The scores are already scaled and masked, of any shape.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sparsemax(scores: Tensor, dim: int = -1) -> Tensor:
    """Project each row of scores on the simplex: p = max(s - tau, 0), with sum p = 1.

    Args:
        scores: any shape, scaled and masked.
        dim: the key axis.

    Returns:
        Weights of the same shape.

    Source: Martins & Astudillo (2016); the separation function of SparseHopfield (Hu et al., 2023).
    """
    centred = _centred(scores, dim)
    with torch.no_grad():
        ordered = centred.sort(dim, descending=True).values
        rank = _ranks(ordered, dim)
        total = ordered.cumsum(dim)
        size = (1 + rank * ordered > total).sum(dim, keepdim=True)
        threshold = (total.gather(dim, size - 1) - 1) / size
    inside = (centred - threshold).relu()  # a score equal to the threshold gets weight 0 and gradient 0
    # One Newton step on the condition sum p = 1 keeps the threshold's value and gives the threshold its exact gradient.
    threshold = threshold + (inside.sum(dim, keepdim=True) - 1) / (inside > 0).sum(dim, keepdim=True)
    return (centred - threshold).relu()


def entmax15(scores: Tensor, dim: int = -1) -> Tensor:
    """Compute 1.5-entmax, which lies between softmax and sparsemax: p = max(s / 2 - tau, 0)^2, with sum p = 1.

    Args:
        scores: any shape, scaled and masked.
        dim: the key axis.

    Returns:
        Weights of the same shape.

    Source: Peters, Niculae & Martins (2019); the separation function of STanHop (Wu et al., 2024) at alpha = 1.5.
    """
    centred = _centred(scores / 2, dim)
    with torch.no_grad():
        ordered = centred.sort(dim, descending=True).values
        rank = _ranks(ordered, dim)
        mean = ordered.cumsum(dim) / rank
        variance = ordered.square().cumsum(dim) - rank * mean.square()
        thresholds = mean - ((1 - variance) / rank).clamp_min(0).sqrt()
        size = (thresholds <= ordered).sum(dim, keepdim=True)
        threshold = thresholds.gather(dim, size - 1)
    # A Newton step on the condition sum p = 1 keeps the threshold's value and makes its first derivative exact; one
    # more step makes the second and the third exact.
    for _ in range(2):
        inside = (centred - threshold).clamp_min(0)
        over = inside.square().sum(dim, keepdim=True) - 1
        threshold = threshold + over / (2 * inside.sum(dim, keepdim=True))
    return (centred - threshold).clamp_min(0).square()


def _centred(scores: Tensor, dim: int) -> Tensor:
    """Scores minus their maximum, and at least -2. Lower scores get weight 0, as both thresholds are at least -1."""
    return (scores - scores.detach().amax(dim, keepdim=True)).clamp_min(-2.0)


def _ranks(ordered: Tensor, dim: int) -> Tensor:
    """The numbers 1, 2, 3, ... along `dim`."""
    shape = [1] * ordered.dim()
    shape[dim] = -1
    return torch.arange(1, ordered.shape[dim] + 1, device=ordered.device, dtype=ordered.dtype).view(shape)
