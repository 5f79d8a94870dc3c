"""Computes attention with exact zeros among the weights, as in the sparse modern Hopfield models.

P' = (1 - s) softmax(S) + s sparse(S); s = 0 is ordinary attention.
Sparsemax: SparseHopfield (Hu et al., 2023). 1.5-entmax: STanHop (Wu et al., 2024). docs/mathematics.md, section
Normalizers.
Axes: B batch, H head, Q query, K key.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..core.call import Call
from ..functional import entmax15, sparsemax
from ..kernels.weighing import Rule
from .about import About
from .base import Variant, mix, register

FUSED = "the weights of a block of queries at a time, from thresholds that are found without a sort"


class SparseNormalizer(Variant):
    """The base class of the two variants below."""

    places = ("normalizer",)

    def sparse(self, scores_BHQK: Tensor) -> Tensor:
        """Turn masked scores (B,H,Q,K) into weights with exact zeros, of the same shape."""
        raise NotImplementedError

    def normalize(self, scores_BHQK: Tensor, call: Call) -> Tensor:
        sparse = self.sparse(scores_BHQK)
        if not call.between:
            return sparse
        return mix(torch.softmax(scores_BHQK, -1), sparse, call.strength_in(scores_BHQK.dtype))


@register("sparsemax", aliases=("sparse_hopfield",))
class Sparsemax(SparseNormalizer):
    """Softmax becomes sparsemax (no parameters)."""

    about = About(
        summary="softmax becomes sparsemax",
        formula="max(S - tau, 0)",
        paper="SparseHopfield (Hu et al., 2023)",
        fused=FUSED,
    )

    def sparse(self, scores_BHQK: Tensor) -> Tensor:
        return sparsemax(scores_BHQK)

    def rule(self, rule: Rule) -> Rule:
        return replace(rule, normalizer="sparsemax")


@register("entmax15", aliases=("entmax",))
class Entmax15(SparseNormalizer):
    """Softmax becomes 1.5-entmax (no parameters)."""

    about = About(
        summary="softmax becomes 1.5-entmax",
        formula="max(S / 2 - tau, 0)^2",
        paper="STanHop (Wu et al., 2024)",
        fused=FUSED,
    )

    def sparse(self, scores_BHQK: Tensor) -> Tensor:
        return entmax15(scores_BHQK)

    def rule(self, rule: Rule) -> Rule:
        return replace(rule, normalizer="entmax15")
