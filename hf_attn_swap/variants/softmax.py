"""Computes ordinary softmax attention on the same path as every variant, as a control.

P = softmax(S + M) at every strength. Vaswani et al. (2017), eq. 1.
"""

from __future__ import annotations

from .about import About
from .base import Variant, register


@register("softmax")
class Softmax(Variant):
    """Ordinary attention as a variant. Comparisons use this variant as their baseline (no parameters)."""

    about = About(
        summary="nothing: the control, on the same path",
        formula="softmax(S + M) V",
        paper="Vaswani et al., 2017",
        fused="SDPA",
    )
    alone = True
