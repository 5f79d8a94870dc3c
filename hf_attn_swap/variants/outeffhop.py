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
from ..core.call import Call, FusedSoftmax, Inputs, Three
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
        mask, causal = inputs.masks.dense()
        if recorded():  # keys of a group that are repeated after the zero key have strides that export cannot compare
            qkv = inputs.query, inputs.repeated(inputs.key), inputs.repeated(inputs.value)
        qkv, mask, shifted = self.with_zero_key(qkv, mask, causal, call)
        heads = sdpa(qkv, mask, shifted)
        return heads[:, 1:] if shifted else heads

    def with_zero_key(
        self, qkv: Three, mask: Tensor | None, causal: bool, call: Call
    ) -> tuple[Three, Tensor | None, bool]:
        """Add a key of zeros in front, for plain SDPA.

        Returns:
            Query, key and value; the mask; and the causal flag. If the flag is True, the query has a dummy row in
            front too, so that the causal order stays right. The caller must then drop the first row of the heads.
        """
        query, key, value = qkv
        extended_key = F.pad(key, (0, 0, 1, 0))
        extended_value = F.pad(value, (0, 0, 1, 0))
        strength = call.strength_in(wide(query))
        if isinstance(strength, Tensor):
            logit = strength.log().to(query.dtype)
            return (query, extended_key, extended_value), self._float_mask(query, key, mask, causal, logit), False
        if causal:
            return (F.pad(query, (0, 0, 1, 0)), extended_key, extended_value), None, True
        if mask is not None:
            mask = F.pad(mask, (1, 0), value=1.0 if mask.dtype == torch.bool else 0.0)
        return (query, extended_key, extended_value), mask, False

    @staticmethod
    def _float_mask(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, logit: Tensor) -> Tensor:
        """A mask of numbers to add, (B|1,1|H,1|Q,K + 1). The first column holds the score of the zero key."""
        queries, keys = query.shape[2], key.shape[2]
        if mask is None:
            mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device)
            mask = mask.tril() if causal else mask
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
        return torch.cat([logit.expand(*mask.shape[:-1], 1), mask], -1)
