"""Computes softmax_1 attention (OutEffHop), in which a head can give all keys small weights at once.

p_j = exp(s_j) / (n + sum_k exp(s_k)), where n is the strength; n = 0 is ordinary attention.
This is softmax attention with one more key, whose score is log n and whose value is 0, so SDPA computes it exactly.
OutEffHop (Hu et al., 2024), eq. 2.11; docs/mathematics.md, section Normalizers.
Axes: B batch, H head, G key/value head, Q query, K key, D head width.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from ..core.call import Call, FusedSoftmax, Inputs
from ..core.masks import recorded
from ..functional.linear import wide
from ..kernels import softmax_n
from ..kernels.dispatch import Form, Setting, softmax_n_form
from ..kernels.weighing import Rule
from .about import About
from .base import Variant, register
from .stock_form import StockForm


@register("outeffhop", aliases=("softmax1", "softmax_1"))
class OutEffHop(Variant):
    """Adds 1 to the softmax denominator (no parameters)."""

    about = About(
        summary="softmax becomes softmax_1",
        formula="exp(S) / (s + sum exp(S))",
        paper="OutEffHop (Hu et al., 2024)",
        fused="SDPA rescaled by its log-sum-exp, or SDPA with a zero key",
    )
    places = ("normalizer",)

    def normalize(self, scores_BHQK: Tensor, call: Call) -> Tensor:
        return functional.softmax_n(scores_BHQK, call.strength_in(scores_BHQK.dtype))

    def rule(self, rule: Rule) -> Rule:
        return replace(rule, normalizer="softmax_n")

    def stock_form(self, strength: float) -> StockForm:
        return StockForm(score=torch.full((self.geometry.heads,), math.log(strength)))

    def form(self, setting: Setting) -> Form:
        return softmax_n_form(setting)

    def heads(self, inputs: Inputs, call: Call, sdpa: FusedSoftmax, form: Form) -> Tensor | None:
        """The heads (B,Q,H,D), by the log-sum-exp of a stock kernel if possible, otherwise by SDPA and a zero key."""
        qkv = inputs.three
        if form is Form.RESCALED:
            added, flag = inputs.masks.additive(inputs.query.dtype)
            numbers = (inputs.scaling, call.strength_in(wide(inputs.query)), inputs.dropout)
            rescaled = softmax_n.softmax_n_attention(*qkv, added, flag, *numbers)
            if rescaled is not None:
                return rescaled.transpose(1, 2)
        query, key, value = qkv
        if recorded():  # keys of a group that are repeated after the zero key have strides that export cannot compare
            key, value = inputs.repeated(key), inputs.repeated(value)
        key, value = F.pad(key, (0, 0, 1, 0)), F.pad(value, (0, 0, 1, 0))
        share = call.exact_strength if isinstance(call.exact_strength, Tensor) else None
        if share is None and inputs.masks.dense()[1]:  # causal order alone: one more query in front keeps it right
            return sdpa((F.pad(query, (0, 0, 1, 0)), key, value), None, True)[:, 1:]
        return sdpa((query, key, value), *inputs.masks.with_extra_keys(1, share, query.dtype).dense())
