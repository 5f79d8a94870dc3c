"""The control: ordinary softmax attention on the same path as every variant.

P = softmax(S + M). Vaswani et al. (2017), eq. 1.
"""

from __future__ import annotations

from .base import Variant, register


@register("softmax")
class Softmax(Variant):
    """Ordinary attention, swapped in: what every other variant is compared with."""

    summary = "nothing: the control, on the same path"
    formula = "softmax(S + M) V"
    paper = "Vaswani et al., 2017"
    fused = "SDPA"
    alone = True
