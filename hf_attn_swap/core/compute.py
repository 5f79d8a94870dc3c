"""How one swapped layer computes its heads: the readable pipeline, and the fused form where there is one.

scores -> carry -> mask -> normalise -> adjust -> dropout -> @ V, then the swap's read-out. `attend` takes the fused
form unless the weights are wanted or the call has something that the fused form cannot do; both are tested equal.
Axes: B batch, L token, H head, G key/value head, Q query, K key, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.dispatch import Form, Setting
from ..variants.base import Variant
from .call import Call, FusedSoftmax, Inputs
from .masks import traced


@dataclass(frozen=True, kw_only=True)
class Places:
    """Who changes what between the scores and the heads; None leaves ordinary attention."""

    carrier: Variant | None = None
    normaliser: Variant | None = None
    adjuster: Variant | None = None
    replacement: Variant | None = None

    def form(self, setting: Setting) -> Form:
        """The form that computes the heads in this setting."""
        if self.replacement is not None:
            return self.replacement.form(setting)
        changing = [each for each in (self.carrier, self.normaliser, self.adjuster) if each is not None]
        if not changing:
            return Form.SDPA
        return changing[0].form(setting) if len(changing) == 1 else Form.REFERENCE


def attend(
    places: Places, inputs: Inputs, call: Call, sdpa: FusedSoftmax, want_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Heads (B,Q,H,D) before the read-out step, and the weights if wanted; for variants with scores."""
    plain = inputs.softcap is None and inputs.position_bias is None and not want_weights and call.tap is None
    if not plain or places.form(Setting.of(inputs, call)) is Form.REFERENCE:
        return reference(places, inputs, call)
    doer = places.carrier or places.normaliser or places.adjuster
    if doer is None:
        return ordinary(inputs, sdpa), None
    heads = doer.heads(inputs, call.hand(_wide(inputs.query)), sdpa)
    return reference(places, inputs, call) if heads is None else (heads, None)


def ordinary(inputs: Inputs, sdpa: FusedSoftmax) -> Tensor:
    """Heads (B,Q,H,D) of ordinary attention by the stock fused function."""
    mask, causal = inputs.masks.dense()
    return sdpa(inputs.three, mask, causal)


def reference(places: Places, inputs: Inputs, call: Call) -> tuple[Tensor, Tensor]:
    """The readable pipeline, with every tensor in the open: heads (B,Q,H,D) and weights (B,H,Q,K).

    With nobody at any place it is ordinary attention, for stock layers whose weights are wanted.
    """
    key, value = inputs.repeated(inputs.key), inputs.repeated(inputs.value)
    scores = inputs.query @ key.transpose(2, 3) * inputs.scaling
    if inputs.softcap is not None:
        scores = torch.tanh(scores / inputs.softcap) * inputs.softcap
    if inputs.position_bias is not None:
        scores = scores + inputs.position_bias
    if places.carrier is not None:
        scores = places.carrier.carry(scores, call.hand(scores.dtype))
    scores = call.tapped("scores", scores)
    if (bias := inputs.masks.bias()) is not None:
        scores = scores + bias
    allowed = inputs.masks.allowed()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    wide = scores.to(_wide(scores))
    if places.normaliser is not None:
        weights = places.normaliser.normalise(wide, call.hand(wide.dtype))
    else:
        weights = torch.softmax(wide, -1)
    if places.adjuster is not None:
        weights = places.adjuster.adjust(weights, call.hand(weights.dtype))
    if allowed is not None:  # a query that may see nothing reads nothing, as in SDPA
        weights = weights.masked_fill(~allowed, 0.0)
    weights = call.tapped("probabilities", weights.to(value.dtype))
    return (F.dropout(weights, inputs.dropout) @ value).transpose(1, 2), weights


def replaced(variant: Variant, inputs: Inputs, call: Call, want_weights: bool) -> tuple[Tensor, Tensor | None]:
    """Heads without scores: linear in length for plain padding and causal order, quadratic for any other mask."""
    _refuse_bias(variant, inputs)
    if call.state is not None:
        return _decoded(variant, inputs, call, want_weights), None
    query, key, value = inputs.query, inputs.repeated(inputs.key), inputs.repeated(inputs.value)
    if inputs.masks.given is not None or want_weights:
        weights = variant.products(query, key, inputs.masks.allowed())
        heads = (weights @ value.to(weights.dtype)).to(value.dtype)
        return heads.transpose(1, 2), weights
    heads = variant.linear((query, key, value), inputs.masks.key_mask, inputs.masks.causal, None)
    return heads.transpose(1, 2), None


def _decoded(variant: Variant, inputs: Inputs, call: Call, want_weights: bool) -> Tensor:
    """Heads of the current tokens over a state that stands for all before them, which then takes them in."""
    if inputs.masks.given is not None or want_weights:
        raise ValueError(
            f"{variant.name}: a cache that holds a state has no keys to show or to mask one by one; give 4-D masks and "
            "ask for attention weights from the first token on, or use use_cache=False."
        )
    heads, queries = inputs.query.shape[1:3]
    key_mask = inputs.masks.key_mask
    real = key_mask[:, -queries:] if key_mask is not None else None
    key, value, past = inputs.repeated(inputs.key), inputs.repeated(inputs.value), call.state.past(heads)
    call.state.absorb(inputs.key, inputs.value, real)
    return variant.linear((inputs.query, key, value), real, True, past).transpose(1, 2)


def _refuse_bias(variant: Variant, inputs: Inputs) -> None:
    if inputs.softcap is not None or inputs.position_bias is not None:
        raise ValueError(
            f"{variant.name} has no scores, so a soft cap or a position bias has no place in it; "
            "swap this architecture with another variant."
        )
    if not traced() and inputs.masks.has_bias():
        raise ValueError(
            f"{variant.name} cannot add a bias to scores that it does not have: this 4-D float mask holds finite "
            "values other than 0; pass a bool mask, or 0 and the dtype's minimum."
        )


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
