"""Computes softmax_1 attention (OutEffHop), in which a head can give all keys small weights at once.

p_j = exp(b s_j) / (s n + sum_k exp(b s_k)) with b = 1 + s (beta - 1) at the strength s; s = 0 is ordinary attention.
This is softmax attention with one more key, whose score is log(s n) and whose value is 0, so SDPA computes it exactly.
OutEffHop (Hu et al., 2024), eq. 2.11, remarks 2.1 and 2.3; docs/mathematics.md, section Normalizers.
Axes: B batch, H head, G key/value head, Q query, K key, D head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from ..core.call import Call, FusedSoftmax, Inputs
from ..core.masks import recorded
from ..core.options import Options
from ..functional.linear import wide
from ..kernels import softmax_n
from ..kernels.dispatch import Form, Setting, softmax_n_form
from ..kernels.weighing import Rule
from .about import About
from .base import Variant, register
from .stock_form import StockForm

SLOTS = 16  # up to so many further keys stand in front; more, or a part of one, are one key and a mask of numbers


@dataclass(frozen=True, kw_only=True)
class OutEffHopOptions(Options):
    """The options of softmax_1.

    Attributes:
        n: the number of slots of score 0, one for each kind of outlier.
        beta: the inverse temperature as a share of the model's own scaling of q k^T, which is beta = 1.

    Raises:
        ValueError: a number is not above 0.
    """

    n: float = 1.0
    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n", "beta"):
            if not getattr(self, name) > 0:
                raise ValueError(f"outeffhop: {name} must be above 0, got {getattr(self, name)}.")


@register("outeffhop", aliases=("softmax1", "softmax_1"))
class OutEffHop(Variant):
    """Adds n to the softmax denominator (no parameters)."""

    about = About(
        summary="softmax becomes softmax_1",
        formula="exp(beta S) / (n + sum exp(beta S))",
        paper="OutEffHop (Hu et al., 2024)",
        fused="SDPA rescaled by its log-sum-exp, or SDPA with a zero key",
    )
    places = ("normalizer",)
    Options = OutEffHopOptions
    options: OutEffHopOptions

    @property
    def sharpness(self) -> float:
        return self.options.beta

    def normalize(self, scores_BHQK: Tensor, call: Call) -> Tensor:
        return functional.softmax_n(scores_BHQK, self.options.n * call.strength_in(scores_BHQK.dtype))

    def rule(self, rule: Rule) -> Rule:
        return replace(rule, normalizer="softmax_n", n=float(self.options.n))

    def stock_form(self, strength: float) -> StockForm:
        return StockForm(score=torch.full((self.geometry.heads,), math.log(self.options.n * strength)))

    def form(self, setting: Setting) -> Form:
        return softmax_n_form(setting)

    def heads(self, inputs: Inputs, call: Call, sdpa: FusedSoftmax, form: Form) -> Tensor | None:
        """The heads (B,Q,H,D), by the log-sum-exp of a stock kernel if possible, otherwise by SDPA and a zero key."""
        qkv = inputs.three
        if form is Form.RESCALED:
            added, flag = inputs.masks.additive(inputs.query.dtype)
            numbers = (inputs.scaling, self.options.n * call.strength_in(wide(inputs.query)), inputs.dropout)
            rescaled = softmax_n.softmax_n_attention(*qkv, added, flag, *numbers)
            if rescaled is not None:
                return rescaled.transpose(1, 2)
        query, key, value = qkv
        if recorded():  # keys of a group that are repeated after the zero key have strides that export cannot compare
            key, value = inputs.repeated(key), inputs.repeated(value)
        slots, share = self._slots(call, query)
        front = (0, 0, slots, 0)
        key, value = F.pad(key, front), F.pad(value, front)
        if share is None and inputs.masks.dense()[1]:  # causal order alone: as many queries in front keep it right
            return sdpa((F.pad(query, front), key, value), None, True)[:, slots:]
        return sdpa((query, key, value), *inputs.masks.with_extra_keys(slots, share, query.dtype).dense())

    def _slots(self, call: Call, query: Tensor) -> tuple[int, Tensor | None]:
        """The number of zero keys, and the factor (1,) of the exponentials of their scores; None for 1."""
        n, strength = self.options.n, call.exact_strength
        if isinstance(strength, Tensor):
            return 1, n * strength
        if float(n).is_integer() and n <= SLOTS:
            return int(n), None
        return 1, torch.full((1,), n, dtype=torch.float32, device=query.device)
