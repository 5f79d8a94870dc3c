"""Sparse normalisers: rows with exact zeros, as in the sparse modern Hopfield models.

P' = (1 - s) softmax(S) + s sparse(S); s = 0 is ordinary attention.
Sparsemax: SparseHopfield (Hu et al., 2023). 1.5-entmax: STanHop (Wu et al., 2024). Axes: B, H head, Q query, K key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from ..functional import entmax15, sparsemax
from .base import Call, Variant, mix, register


class SparseNormaliser(Variant):
    """Shared by the two registrations below."""

    fused = "none: needs the weights"
    places = ("normaliser",)
    explicit = True
    normaliser: ClassVar[Callable[[Tensor], Tensor]]

    def normalise(self, scores_BHQK: Tensor, call: Call) -> Tensor:
        sparse = type(self).normaliser(scores_BHQK)
        if call.strength == 1.0:
            return sparse
        return mix(torch.softmax(scores_BHQK, -1), sparse, call.strength)


@register("sparse_hopfield")
class SparseHopfield(SparseNormaliser):
    """Softmax becomes sparsemax (no parameters)."""

    summary = "softmax becomes sparsemax"
    formula = "max(S - tau, 0)"
    paper = "SparseHopfield (Hu et al., 2023)"
    normaliser = staticmethod(sparsemax)


@register("entmax")
class Entmax(SparseNormaliser):
    """Softmax becomes 1.5-entmax (no parameters)."""

    summary = "softmax becomes 1.5-entmax"
    formula = "max(S / 2 - tau, 0)^2"
    paper = "STanHop (Wu et al., 2024)"
    normaliser = staticmethod(entmax15)
