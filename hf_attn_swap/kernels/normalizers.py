"""Turns one block of scores into weights, and turns the gradient of the weights into that of the scores.

Each class keeps one to three numbers per row. With them, `recompute` makes the same weights from the same scores in a
few readings, so a backward pass needs no tensor of weights. Scores of -inf belong to keys that the query may not see;
a row of -inf alone gets weights 0. All gradients have one form: dS = d (dP - <d, dP> / c), where d depends on the
weights: softmax and softmax_n have d = P and c = 1; sparsemax has d = 1 on the support, and 1.5-entmax d = sqrt(P),
with c = sum d. All methods may overwrite the scores and the gradients that they are given.
Martins & Astudillo (2016), section 2.5; Peters, Niculae & Martins (2019), section 3.2.
Axes: B batch, H head, Q query, K key, R numbers that are kept per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .thresholds import entmax15_threshold, sparsemax_threshold

Weights = tuple[Tensor, ...]  # the weights (B,H,Q,K) of one normalizer, or of the two that are mixed


class Normalizer:
    """From one block of scores to weights, and back.

    Attributes:
        kept: R, how many numbers are kept per row.
    """

    kept: int

    def find(self, scores_BHQK: Tensor) -> tuple[Tensor, Tensor]:
        """The weights (B,H,Q,K), and what is kept (B,H,Q,R)."""
        raise NotImplementedError

    def recompute(self, scores_BHQK: Tensor, rows_BHQR: Tensor) -> Weights:
        """The weights from the same scores and what was kept."""
        raise NotImplementedError

    def mixed(self, weights: Weights) -> Tensor:
        """The mixed weights (B,H,Q,K)."""
        return weights[0]

    def backward(self, weights: Weights, grad_BHQK: Tensor) -> Tensor:
        """The gradient of the scores from the weights and their gradient, all (B,H,Q,K). The weights stay."""
        raise NotImplementedError


class _Exponential(Normalizer):
    """softmax, or softmax_n if n is given, a number or a (1,) tensor; keeps the log of each row's denominator."""

    kept = 1

    def __init__(self, n: float | Tensor | None = None) -> None:
        self.n = n

    def find(self, scores_BHQK: Tensor) -> tuple[Tensor, Tensor]:
        top = _top(scores_BHQK)
        if self.n is not None:  # a number is written where the scores are: to copy it there would wait for a GPU
            log_n = (self.n.to(top) if isinstance(self.n, Tensor) else top.new_full((1,), self.n)).log()
            top = torch.maximum(top, log_n)
        weights = scores_BHQK.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        if self.n is not None:
            total += (log_n - top).exp()
        total.clamp_min_(1.0)  # the greatest term is 1, except in a row without keys
        return weights.div_(total), top + total.log()

    def recompute(self, scores_BHQK: Tensor, rows_BHQR: Tensor) -> Weights:
        return (scores_BHQK.sub_(rows_BHQR).exp_(),)

    def backward(self, weights: Weights, grad_BHQK: Tensor) -> Tensor:
        return _back(weights[0], 1.0, grad_BHQK)


class _Sparsemax(Normalizer):
    """Sparsemax; keeps each row's greatest score, and the threshold below it."""

    kept = 2

    def find(self, scores_BHQK: Tensor) -> tuple[Tensor, Tensor]:
        top = _top(scores_BHQK)
        centred = scores_BHQK.sub_(top)
        threshold = sparsemax_threshold(centred)
        return centred.sub_(threshold).relu_(), torch.cat([top, threshold], -1)

    def recompute(self, scores_BHQK: Tensor, rows_BHQR: Tensor) -> Weights:
        top, threshold = rows_BHQR[..., :1], rows_BHQR[..., 1:]
        return (scores_BHQK.sub_(top).sub_(threshold).relu_(),)

    def backward(self, weights: Weights, grad_BHQK: Tensor) -> Tensor:
        support = weights[0].sign()
        return _back(support, _total(support), grad_BHQK)


class _Entmax15(Normalizer):
    """1.5-entmax; keeps each row's greatest score, and the threshold below its half."""

    kept = 2

    def find(self, scores_BHQK: Tensor) -> tuple[Tensor, Tensor]:
        top = _top(scores_BHQK)
        centred = scores_BHQK.sub_(top).mul_(0.5)
        threshold = entmax15_threshold(centred)
        return centred.sub_(threshold).relu_().square_(), torch.cat([top, threshold], -1)

    def recompute(self, scores_BHQK: Tensor, rows_BHQR: Tensor) -> Weights:
        top, threshold = rows_BHQR[..., :1], rows_BHQR[..., 1:]
        return (scores_BHQK.sub_(top).mul_(0.5).sub_(threshold).relu_().square_(),)

    def backward(self, weights: Weights, grad_BHQK: Tensor) -> Tensor:
        roots = weights[0].sqrt()
        return _back(roots, _total(roots), grad_BHQK)


class _Mixed(Normalizer):
    """(1 - s) softmax + s sparse, for a strength s between 0 and 1, a (1,) tensor."""

    def __init__(self, sparse: Normalizer, strength: Tensor) -> None:
        self.softmax, self.sparse, self.strength = _Exponential(), sparse, strength
        self.kept = self.softmax.kept + sparse.kept

    def find(self, scores_BHQK: Tensor) -> tuple[Tensor, Tensor]:
        soft, total = self.softmax.find(scores_BHQK.clone())
        sparse, rows = self.sparse.find(scores_BHQK)
        return self.mixed((soft, sparse)), torch.cat([total, rows], -1)

    def recompute(self, scores_BHQK: Tensor, rows_BHQR: Tensor) -> Weights:
        total, rows = rows_BHQR[..., :1], rows_BHQR[..., 1:]
        return *self.softmax.recompute(scores_BHQK.clone(), total), *self.sparse.recompute(scores_BHQK, rows)

    def mixed(self, weights: Weights) -> Tensor:
        soft, sparse = weights
        return torch.lerp(soft, sparse, self.strength.to(soft.dtype))

    def backward(self, weights: Weights, grad_BHQK: Tensor) -> Tensor:
        soft = self.softmax.backward(weights[:1], grad_BHQK.clone())
        sparse = self.sparse.backward(weights[1:], grad_BHQK)
        return torch.lerp(soft, sparse, self.strength.to(soft.dtype))


def normalizer(name: str, strength: Tensor | None, n: float = 1.0) -> Normalizer:
    """The normalizer of this name.

    Args:
        name: "softmax", "softmax_n", "sparsemax" or "entmax15".
        strength: a (1,) tensor between 0 and 1, or None for full strength.
        n: the n of softmax_n at full strength.
    """
    if name == "softmax":
        return _Exponential()
    if name == "softmax_n":
        return _Exponential(n * (1.0 if strength is None else strength))
    sparse: Normalizer = {"sparsemax": _Sparsemax, "entmax15": _Entmax15}[name]()
    return sparse if strength is None else _Mixed(sparse, strength)


def _top(scores_BHQK: Tensor) -> Tensor:
    """The greatest score of each row (B,H,Q,1). It is finite for a row of -inf too, so that no row becomes NaN."""
    return scores_BHQK.amax(-1, keepdim=True).clamp_min_(torch.finfo(scores_BHQK.dtype).min)


def _total(slopes_BHQK: Tensor) -> Tensor:
    """The sum of each row (B,H,Q,1), and a positive number for a row of zeros."""
    return slopes_BHQK.sum(-1, keepdim=True).clamp_min_(torch.finfo(slopes_BHQK.dtype).tiny)


def _back(slopes_BHQK: Tensor, total: Tensor | float, grad_BHQK: Tensor) -> Tensor:
    """The gradient of scores, d (dP - <d, dP> / c)."""
    product = grad_BHQK.mul_(slopes_BHQK)
    return product.addcmul_(slopes_BHQK, product.sum(-1, keepdim=True) / total, value=-1)
