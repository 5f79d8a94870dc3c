"""Turns scores into weights with exact zeros: sparsemax, 1.5-entmax, and alpha-entmax with any alpha from 1 to 2.

sparsemax: p = max(s - tau, 0). 1.5-entmax: p = max(s / 2 - tau, 0)^2. The threshold tau makes each row sum to 1.
If all scores of a row are equal, all give equal weights, as softmax does.
Martins & Astudillo (2016); Peters, Niculae & Martins (2019); Correia, Niculae & Martins (2019) for the gradient in
alpha. The scores are already scaled and masked, of any shape.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

LOWEST = -1e4  # below the maximum: exp(-1e4) is 0 in every dtype, and alpha-entmax gives less than softmax there
MOST_STEPS = 60  # of Newton's method for alpha-entmax, which mostly takes 3 to 8


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


def entmax(scores: Tensor, alpha: float | Tensor, dim: int = -1) -> Tensor:
    """Compute alpha-entmax: p = max((alpha - 1) s - tau, 0)^(1 / (alpha - 1)), with sum p = 1.

    alpha = 1 is softmax, 2 is sparsemax, and between them larger alpha gives more zeros. Values and gradients are exact
    up to rounding at both ends too, the gradient in alpha among them.

    Args:
        scores: any shape, scaled and masked.
        alpha: a number from 1 to 2, or a tensor of such numbers that broadcasts against the scores and has size 1 along
            `dim`, for example (H,1,1) for scores (B,H,Q,K). A tensor may be learned.
        dim: the key axis.

    Returns:
        Weights of the same shape. As with softmax, a row whose scores are all -inf is NaN.

    Raises:
        ValueError: alpha is a number outside [1, 2]. Tensors are not checked, because that waits for the device.

    Source: Peters, Niculae & Martins (2019), eq. 7 to 9; the generalised sparse Hopfield model of STanHop (Wu et al.,
    2024), whose layers learn alpha.
    """
    if not isinstance(alpha, Tensor):
        if not 1 <= alpha <= 2:
            raise ValueError(f"entmax needs alpha between 1 (softmax) and 2 (sparsemax), got {alpha}.")
        alpha = scores.new_tensor(alpha)
    weights: Tensor = _Entmax.apply(scores, alpha.to(scores.dtype), dim)  # type: ignore[no-untyped-call]
    return weights


class _Entmax(torch.autograd.Function):
    """alpha-entmax by Newton's method, with the gradients of Correia, Niculae & Martins (2019), Proposition 1.

    Let a = alpha - 1 and p = (1 + a (s - t))^(1 / a), which is exp(s - t) for a = 0. The norm |p^a|_(1 / a) =
    (sum p)^a is convex in t and falls, so that Newton's method for (sum p)^a = 1 rises to t and never steps over it.
    The backward pass is written with the weights alone, which are an output, so that second derivatives are right.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, alpha: Tensor, dim: int) -> Tensor:
        a = alpha - 1
        centred = (scores - scores.amax(dim, keepdim=True)).clamp_min(LOWEST)
        shift = torch.zeros_like(centred.narrow(dim, 0, 1))  # the weight of the maximum is at most 1
        for _ in range(MOST_STEPS):
            weights = _exponential(centred - shift, a)
            total = weights.sum(dim, keepdim=True)
            log = total.log()
            step = total * log * _ratio(-a * log) / _slopes(weights, alpha).sum(dim, keepdim=True)
            shift = shift + step
            if not bool((step > 4 * torch.finfo(step.dtype).eps * (1 + shift)).any()):
                break
        weights = _exponential(centred - shift, a)
        weights = weights / weights.sum(dim, keepdim=True)
        ctx.save_for_backward(weights, alpha)
        ctx.dim = dim
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        weights, alpha = ctx.saved_tensors
        slopes = _slopes(weights, alpha)
        shares = slopes / slopes.sum(ctx.dim, keepdim=True)
        of_scores = slopes * (grad - (shares * grad).sum(ctx.dim, keepdim=True))
        if not ctx.needs_input_grad[1]:
            return of_scores, None, None
        log = torch.where(weights > 0, weights, 1).log()
        direct = -weights * log.square() * _second_ratio((1 - alpha) * log)  # the derivative in alpha at a fixed t
        along = direct - shares * direct.sum(ctx.dim, keepdim=True)
        return of_scores, (grad * along).sum_to_size(alpha.shape), None


def _exponential(x: Tensor, a: Tensor) -> Tensor:
    """max(1 + a x, 0)^(1 / a) for x <= 0: exp(x) for a = 0, and 1 + x for a = 1."""
    u = (a * x).clamp_min(-1)
    return (x * torch.where(u == 0, 1, u.log1p() / u)).exp()


def _slopes(weights: Tensor, alpha: Tensor) -> Tensor:
    """p^(2 - alpha) where p > 0, and 0 elsewhere: the derivative of p in its score at a fixed threshold."""
    return torch.where(weights > 0, torch.where(weights > 0, weights, 1) ** (2 - alpha), 0)


def _ratio(x: Tensor) -> Tensor:
    """(exp(x) - 1) / x, which is 1 at 0."""
    return torch.where(x == 0, 1, x.expm1() / torch.where(x == 0, 1, x))


def _second_ratio(y: Tensor) -> Tensor:
    """(exp(y) - 1 - y) / y^2 for y >= 0, which is 1/2 at 0. Near 0 it is a series, because the difference cancels."""
    small = y < 0.1
    near = torch.where(small, y, 0)
    series = torch.zeros_like(near)
    for order in range(9, 1, -1):  # 1/2! + y/3! + ... + y^7/9!
        series = series * near + 1 / math.factorial(order)
    far = torch.where(small, 1, y)
    return torch.where(small, series, (far.expm1() - far) / far.square())


def _centred(scores: Tensor, dim: int) -> Tensor:
    """Scores minus their maximum, and at least -2. Lower scores get weight 0, as both thresholds are at least -1."""
    return (scores - scores.detach().amax(dim, keepdim=True)).clamp_min(-2.0)


def _ranks(ordered: Tensor, dim: int) -> Tensor:
    """The numbers 1, 2, 3, ... along `dim`."""
    shape = [1] * ordered.dim()
    shape[dim] = -1
    return torch.arange(1, ordered.shape[dim] + 1, device=ordered.device, dtype=ordered.dtype).view(shape)
