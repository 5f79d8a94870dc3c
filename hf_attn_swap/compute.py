"""How one swapped layer computes: the readable pipeline, and the exact fused form where there is one.

scores -> carry -> mask -> normalise -> adjust -> dropout -> @ V, then the swap's read-out. `attend` takes the fused
form unless the weights are wanted or the call has something it cannot do; both are tested equal.
Axes: B batch, L token, H head, G key/value head, Q query, K key, D head width, E model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .variants.base import Call, Variant


class FusedSoftmax(Protocol):
    """Ordinary attention by the stock fused function: heads (B,Q,H,D) from q, k, v, mask and causal flag."""

    def __call__(self, qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, causal: bool) -> Tensor:
        """One mask or the flag, never both."""
        ...


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


@dataclass
class Inputs:
    """What the attention function was given, with one meaning for every mask.

    Attributes:
        query, key, value: (B,H,Q,D), (B,G,K,D), (B,G,K,D), after rotary embedding and q/k norms.
        scaling: factor of q k^T.
        key_mask: (B,K) bool, or None; with `causal` it is aligned to the bottom right.
        mask: bool or additive float, broadcastable to (B,H,Q,K), or None. Never together with `key_mask`.
        causal: plain causal order on top of `key_mask`, or alone with as many keys as queries.
        dropout: probability, 0 in evaluation.
        softcap, position_bias: as the architecture passes them, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    key_mask: Tensor | None = None
    mask: Tensor | None = None
    causal: bool = False
    dropout: float = 0.0
    softcap: float | None = None
    position_bias: Tensor | None = None

    def dense_mask(self, call: Call) -> tuple[Tensor | None, bool]:
        """The mask for SDPA, with its causal flag: a 2-D mask is expanded once per forward pass."""
        if self.key_mask is None:
            return self.mask, self.causal
        seen = call.carried.key_mask if call.carried is not None else None
        if seen is not None and seen[0] is self.key_mask:
            return seen[1], False
        dense = expand_key_mask(self.key_mask, self.query.shape[2], self.causal)
        if call.carried is not None and self.causal:
            call.carried.key_mask = (self.key_mask, dense)
        return dense, False

    def allowed(self, call: Call) -> Tensor | None:
        """(B|1,1|H,Q,K) bool, True where the query may look; None means everywhere."""
        mask, causal = self.dense_mask(call)
        if causal:
            square = torch.ones(self.query.shape[2], self.key.shape[2], dtype=torch.bool, device=self.query.device)
            return square.tril()[None, None]
        if mask is None or mask.dtype == torch.bool:
            return mask
        return mask > torch.finfo(mask.dtype).min / 2

    def mask_bias(self) -> Tensor | None:
        """What an additive float mask adds where it does not forbid, or None."""
        if self.mask is None or self.mask.dtype == torch.bool:
            return None
        return self.mask.masked_fill(self.mask <= torch.finfo(self.mask.dtype).min / 2, 0.0)


def expand_key_mask(key_mask_BK: Tensor, queries: int, causal: bool) -> Tensor:
    """(B,K) bool to (B,1,Q,K) bool; causal order is aligned to the bottom right."""
    keys = key_mask_BK.shape[1]
    dense = key_mask_BK[:, None, None, :].expand(-1, 1, queries, keys)
    if not causal:
        return dense
    return dense & torch.ones(queries, keys, dtype=torch.bool, device=key_mask_BK.device).tril(keys - queries)


def attend(
    places: Places, inputs: Inputs, call: Call, sdpa: FusedSoftmax, want_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Heads (B,Q,H,D) before the read-out step, and the weights if wanted."""
    if places.replacement is not None:
        return _replaced(places.replacement, inputs, call, sdpa, want_weights)
    plain = inputs.softcap is None and inputs.position_bias is None and not want_weights and call.tap is None
    if not plain or places.explicit:
        return reference(places, inputs, call)
    normaliser = places.normaliser
    if places.carrier is not None:
        fused = _carried(places.carrier, inputs, call) if normaliser is None else None
        return reference(places, inputs, call) if fused is None else (fused, None)
    mask, causal = inputs.dense_mask(call)
    qkv = (inputs.query, inputs.key, inputs.value)
    if normaliser is None:
        return sdpa(qkv, mask, causal), None
    qkv, mask, shifted = normaliser.fuse(qkv, mask, causal, call)
    heads = sdpa(qkv, mask, shifted)
    return (heads[:, 1:] if shifted else heads), None


def _carried(carrier: Variant, inputs: Inputs, call: Call) -> Tensor | None:
    """softmax(H + M) V with H accumulated in place; None where `accumulate` cannot."""
    if inputs.mask_bias() is not None:
        return None
    key, value = _repeat(inputs.key, inputs), _repeat(inputs.value, inputs)
    hidden = carrier.accumulate(inputs.query, key, inputs.scaling, call)
    if hidden is None:
        return None
    allowed = inputs.allowed(call)
    scores = hidden if allowed is None else hidden.masked_fill(~allowed, torch.finfo(hidden.dtype).min)
    if not torch.is_grad_enabled() and inputs.dropout == 0:
        heads = F.scaled_dot_product_attention(torch.zeros_like(inputs.query), key, value, attn_mask=scores)
    else:
        weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
        heads = F.dropout(weights.to(value.dtype), inputs.dropout) @ value
    if allowed is not None:  # a row that may see nothing reads nothing, as in SDPA
        heads = heads.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return heads.transpose(1, 2)


def reference(places: Places, inputs: Inputs, call: Call) -> tuple[Tensor, Tensor]:
    """The readable pipeline, with every tensor in the open: heads (B,Q,H,D) and weights (B,H,Q,K).

    With nobody at any place it is ordinary attention, for stock layers whose weights are wanted.
    """
    key, value = _repeat(inputs.key, inputs), _repeat(inputs.value, inputs)
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
    query, key, value = inputs.query, _repeat(inputs.key, inputs), _repeat(inputs.value, inputs)
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
    queries, heads = inputs.query.shape[1:3][::-1]
    real = inputs.key_mask[:, -queries:] if inputs.key_mask is not None else None
    key, value, past = _repeat(inputs.key, inputs), _repeat(inputs.value, inputs), call.state.past(heads)
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


def _repeat(tensor_BGKD: Tensor, inputs: Inputs) -> Tensor:
    """Key or value heads repeated per group: (B,G,K,D) -> (B,H,K,D)."""
    groups = inputs.query.shape[1] // tensor_BGKD.shape[1]
    return tensor_BGKD if groups == 1 else tensor_BGKD.repeat_interleave(groups, 1)
