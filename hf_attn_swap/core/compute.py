"""How one swapped layer computes: the readable pipeline, and the exact fused form where there is one.

scores -> carry -> mask -> normalise -> adjust -> dropout -> @ V, then the swap's read-out. `attend` takes the fused
form unless the weights are wanted or the call has something it cannot do; both are tested equal.
Axes: B batch, L token, H head, G key/value head, Q query, K key, D head width, E model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..variants.base import Variant
from .call import Call, FusedSoftmax, Inputs


@dataclass(frozen=True, kw_only=True)
class Places:
    """Who changes what between the scores and the heads; None leaves ordinary attention."""

    carrier: Variant | None = None
    normaliser: Variant | None = None
    adjuster: Variant | None = None
    replacement: Variant | None = None

    @property
    def explicit(self) -> bool:
        """True if somebody needs the weights as a tensor."""
        return any(v is not None and v.explicit for v in (self.carrier, self.normaliser, self.adjuster))


def attend(
    places: Places, inputs: Inputs, call: Call, sdpa: FusedSoftmax, want_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Heads (B,Q,H,D) before the read-out step, and the weights if wanted."""
    if places.replacement is not None:
        return _replaced(places.replacement, inputs, call, sdpa, want_weights)
    plain = inputs.softcap is None and inputs.position_bias is None and not want_weights and call.tap is None
    if not plain or places.explicit:
        return reference(places, inputs, call)
    doers = [variant for variant in (places.carrier, places.normaliser) if variant is not None]
    if not doers:
        mask, causal = inputs.dense_mask(call)
        return sdpa((inputs.query, inputs.key, inputs.value), mask, causal), None
    heads = doers[0].heads(inputs, call, sdpa) if len(doers) == 1 else None
    return reference(places, inputs, call) if heads is None else (heads, None)


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
    carrier, normaliser, adjuster = places.carrier, places.normaliser, places.adjuster
    if carrier is not None:
        scores = carrier.carry(scores, call)
    scores = scores if call.tap is None else call.tap("scores", scores)
    if (bias := inputs.mask_bias()) is not None:
        scores = scores + bias
    allowed = inputs.allowed(call)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    weights = normaliser.normalise(wide, call) if normaliser is not None else torch.softmax(wide, -1)
    weights = adjuster.adjust(weights, call) if adjuster is not None else weights
    if allowed is not None:  # a row that may see nothing reads nothing, as in SDPA
        weights = weights.masked_fill(~allowed, 0.0)
    weights = weights.to(value.dtype)
    weights = weights if call.tap is None else call.tap("probabilities", weights)
    return (F.dropout(weights, inputs.dropout) @ value).transpose(1, 2), weights


def _replaced(
    variant: Variant, inputs: Inputs, call: Call, sdpa: FusedSoftmax, want_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Heads without scores: linear in length for plain padding and causal order, quadratic for any other mask."""
    _refuse_bias(variant, inputs)
    if isinstance(call.strength, Tensor):
        mask, causal = inputs.dense_mask(call)
        call.kept["ordinary"] = sdpa((inputs.query, inputs.key, inputs.value), mask, causal)
    if call.state is not None:
        return _decoded(variant, inputs, call, want_weights), None
    query, key, value = inputs.query, inputs.repeated(inputs.key), inputs.repeated(inputs.value)
    if inputs.mask is not None or want_weights:
        weights = variant.products(query, key, inputs.allowed(call))
        return (weights @ value).transpose(1, 2), weights
    return variant.linear((query, key, value), inputs.key_mask, inputs.causal, None).transpose(1, 2), None


def _decoded(variant: Variant, inputs: Inputs, call: Call, want_weights: bool) -> Tensor:
    """Heads of the current tokens over a state that stands for all before them, which then takes them in."""
    if inputs.mask is not None or want_weights:
        raise ValueError(
            f"{variant.name}: a cache that holds a state has no keys to show or to mask one by one; give 4-D masks and "
            "ask for attention weights from the first token on, or use use_cache=False."
        )
    heads, queries = inputs.query.shape[1:3]
    real = inputs.key_mask[:, -queries:] if inputs.key_mask is not None else None
    key, value, past = inputs.repeated(inputs.key), inputs.repeated(inputs.value), call.state.past(heads)
    call.state.absorb(inputs.key, inputs.value, real)
    return variant.linear((inputs.query, key, value), real, True, past).transpose(1, 2)


def _refuse_bias(variant: Variant, inputs: Inputs) -> None:
    if inputs.softcap is not None or inputs.position_bias is not None:
        raise ValueError(
            f"{variant.name} has no scores, so a soft cap or a position bias has no place in it; "
            "swap this architecture with another variant."
        )
    if inputs.mask is None or inputs.mask.dtype == torch.bool or torch.compiler.is_compiling():
        return
    bias = inputs.mask_bias()
    if bias is not None and bool(bias.any()):
        raise ValueError(
            f"{variant.name} cannot add a bias to scores that it does not have: this 4-D float mask holds finite "
            "values other than 0; pass a bool mask, or 0 and the dtype's minimum."
        )
