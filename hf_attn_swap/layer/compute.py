"""Computes the heads of one swapped layer, by a fused form or by the readable pipeline.

The pipeline is: further keys -> scores -> carry or score_mod -> mask -> normalize -> adjust -> dropout -> product
with V.
`layer/swap.py` does what follows. `attend` uses the fused form of a variant, unless the caller wants the weights or the
call needs something that the fused form cannot do. The tests hold that both ways give equal values and gradients.
Without any variant, the pipeline is ordinary attention. docs/mathematics.md, section Strength and exactness.
Axes: B batch, L token, H head, G key/value head, Q query, K key, D head width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.call import Call, FusedSoftmax, Inputs
from ..core.masks import Masks, traced, transformed
from ..functional.linear import widened
from ..kernels import softmax_n, weighted, windows
from ..kernels.dispatch import Form, Setting, formula_form, joined_form, weighted_form, windows_form
from ..kernels.formula import Formula
from ..kernels.weighing import Rule
from ..variants.base import Replacement, Variant, same_shape


class Places(NamedTuple):
    """The variants that change the steps between the scores and the heads, and what is known of them in advance.

    Attributes:
        keys: the variant that adds pairs beside the keys of the text, or None.
        carrier: the variant that carries scores across layers, or None.
        normalizer: the variant that turns scores into weights, or None for softmax.
        adjuster: the variant that changes the weights, or None.
        span: how far a query sees, if a variant hides keys; None if none does.
        rule: how scores become weights, or None if only the variants' methods say it.
        by_place: the variant whose `score_mod` changes scores, or None.
    """

    keys: Variant | None = None
    carrier: Variant | None = None
    normalizer: Variant | None = None
    adjuster: Variant | None = None
    span: windows.Span | None = None
    rule: Rule | None = Rule()
    by_place: Variant | None = None

    def form(self, setting: Setting) -> Form:
        """The form that computes the heads in this setting: the variant's own, or a general one for several."""
        if setting.transformed:  # kernels have no rule for vmap, no forward mode, or no second derivative
            return Form.REFERENCE
        if self.keys is not None:  # joined by the log-sum-exp if possible, otherwise the form for all keys
            if self.rule is not None and self.by_place is None and joined_form(setting, self.rule):
                return Form.JOINED
            form = self._replace(keys=None).form(setting)
            return Form.FURTHER_KEYS if form in (Form.SDPA, Form.RESCALED) else form
        if self.by_place is not None:
            return Form.REFERENCE if self.rule is None else formula_form(setting)
        variant = self.carrier or self.normalizer or self.adjuster
        if variant is None:
            return Form.SDPA
        if (self.carrier, self.normalizer, self.adjuster).count(None) == 2:
            return variant.form(setting)
        return Form.REFERENCE if self.rule is None else weighted_form(setting)

    def in_blocks(self, setting: Setting) -> bool:
        """True if this form computes blocks of queries with the keys of their window, one after the other."""
        if self.span is None or not self.anywhere or (self.span.full and not self.apart):
            return False
        return windows_form(setting)

    @property
    def anywhere(self) -> bool:
        """True if a score is changed in the same way wherever it stands, and by no other layer."""
        return self.carrier is None and self.by_place is None

    @property
    def apart(self) -> bool:
        """True if heads can be computed apart: nothing but a rule, which is that of every head, changes them."""
        return self.keys is None and self.rule is not None and self.anywhere


ORDINARY = Places()  # ordinary attention: no variant changes a step before the heads


def attend(
    places: Places, inputs: Inputs, call: Call, sdpa: FusedSoftmax, want_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the heads of variants that have scores.

    Returns:
        The heads (B,Q,H,D), before the place `read`; and the weights (B,H,Q,K). The weights are None if a fused form
        ran, which only happens if `want_weights` is False.

    Raises:
        ValueError: the cache holds the keys of a window alone, and the call needs others.
    """
    biased = inputs.softcap is not None or inputs.position_bias is not None
    readable = biased or want_weights or call.probe is not None
    if places is ORDINARY and not readable and not transformed(inputs.query, inputs.key, inputs.value):
        return ordinary(inputs, sdpa), None
    setting = Setting.of(inputs, call)
    form = Form.REFERENCE if readable else places.form(setting)
    span = places.span
    if span is None:
        return _attended(places, inputs, call, sdpa, want_weights, form)
    in_blocks = not readable and places.in_blocks(setting) and windows.fits(inputs, call)
    places = places._replace(span=None)
    held, whole = windows.ALL, None
    whole_text = inputs.position_bias is not None or inputs.own_window is not None
    _settle_state("window", inputs.masks, call, whole_text or want_weights or call.probe is not None)
    in_blocks = in_blocks or call.state is not None
    if span.full and (call.state is not None or (in_blocks and inputs.masks.keys > span.window)):
        whole, inputs = windows.parted(inputs, span)
    if call.state is not None:
        inputs, held = call.state.joined(inputs)
        whole = None if whole is None else call.state.joined_whole(whole)
    if in_blocks and inputs.masks.keys > span.window:
        heads, weights = _in_blocks(places, inputs, call, sdpa, form, span.alone, held), None
    else:
        inputs = inputs if in_blocks else windows.narrowed(inputs, span, call)
        heads, weights = _attended(places, inputs, call, sdpa, want_weights, form)
    if whole is not None:
        heads = windows.united(span, _attended(places, whole, call, sdpa, False, form)[0], heads)
    if call.state is not None:
        call.state.absorb(inputs, whole)
    return heads, weights


def _settle_state(name: str, masks: Masks, call: Call, by_key: bool) -> None:
    """Let an empty state in the cache give its place up to single keys, if this call needs them.

    Args:
        name: the name of the variant, for errors.
        masks: the masks of the call.
        call: the call, whose state is None afterwards if it gave its place up.
        by_key: True if the call needs all keys one by one, whatever its masks are.

    Raises:
        ValueError: the state has absorbed tokens already, and cannot answer this call.
    """
    state = call.state
    if state is None:
        return
    if by_key or masks.given is not None or not (masks.causal or masks.queries == 1):
        if state.give_up():
            call.state = None
            return
        raise ValueError(
            f"{name}: the cache holds {state.holds}, and no other keys to show or to mask one by one; pass 4-D masks, "
            "is_causal=False and output_attentions=True from the first token on, or use use_cache=False."
        )
    padded = masks.key_mask is not None or state.visible is not None
    if padded and not masks.once(("remembers", state.length), lambda: state.remembers(masks.key_mask)):
        raise ValueError(
            f"{name}: the mask hides or shows other earlier tokens than when they went into the cache, which has not "
            "kept all of them; start a new cache for these tokens, or use use_cache=False."
        )


def _in_blocks(
    places: Places, inputs: Inputs, call: Call, sdpa: FusedSoftmax, form: Form, span: windows.Span, held: windows.Held
) -> Tensor:
    """The heads (B,Q,H,D) in a window, by blocks of queries with the keys of their window."""
    next_token = windows.next_token(inputs, span, held)
    if next_token is not None:
        return _attended(places, next_token, call, sdpa, False, form)[0]
    if form is Form.SDPA and places == ORDINARY:
        return windows.attend(inputs, span, held)
    blocks, inside = windows.folded(inputs, span, held)
    return windows.unfolded(blocks, _attended(places, inside, call, sdpa, False, form)[0])


def _attended(
    places: Places, inputs: Inputs, call: Call, sdpa: FusedSoftmax, want_weights: bool, form: Form
) -> tuple[Tensor, Tensor | None]:
    """As `attend`, by this form, with the masks as they are."""
    if places.keys is not None:
        return _with_pairs(places, places.keys, inputs, call, sdpa, want_weights, form)
    if form is Form.REFERENCE:
        return reference(places, inputs, call)
    if form is Form.WEIGHTED:
        if places.rule is None or not weighted.fits(inputs):
            return reference(places, inputs, call)
        return weighted.attend(places.rule, inputs, call, _formula(places, inputs, call)), None
    variant = places.carrier or places.normalizer or places.adjuster
    if variant is None:
        return ordinary(inputs, sdpa), None
    heads = variant.heads(inputs, call, sdpa, form)
    if heads is None:
        return reference(places, inputs, call)
    return heads, None


def _with_pairs(
    places: Places, variant: Variant, inputs: Inputs, call: Call, sdpa: FusedSoftmax, want_weights: bool, form: Form
) -> tuple[Tensor, Tensor | None]:
    """As `attend`, with the pairs of a variant beside the keys of the text. The weights are those of the text."""
    pairs = variant.extra_kv(inputs, call)
    if form is Form.JOINED:
        added, causal = inputs.masks.additive(inputs.query.dtype)
        values = None if pairs.value is None else pairs.value.to(inputs.value.dtype)
        further = softmax_n.Further(pairs.scores(inputs), values)
        assert places.rule is not None, "`joined_form` takes a rule"
        n = 0.0 if places.normalizer is None else places.rule.n * call.exact_strength
        heads = softmax_n.softmax_n_attention(*inputs.three, added, causal, inputs.scaling, n, further=further)
        if heads is not None:
            return heads.transpose(1, 2), None
    heads, weights = attend(places._replace(keys=None), pairs.before(inputs), call, sdpa, want_weights)
    return heads, None if weights is None else weights[..., pairs.count :]


def ordinary(inputs: Inputs, sdpa: FusedSoftmax) -> Tensor:
    """The heads (B,Q,H,D) of ordinary attention, by the stock fused function."""
    mask, causal = inputs.masks.dense()
    return sdpa((inputs.query, inputs.key, inputs.value), mask, causal)


def reference(places: Places, inputs: Inputs, call: Call) -> tuple[Tensor, Tensor]:
    """Compute heads (B,Q,H,D) and weights (B,H,Q,K) step by step: the readable pipeline.

    If `places` names no variant, this is ordinary attention. Stock layers use that when the caller wants their weights.
    """
    key, value = inputs.repeated(inputs.key), inputs.repeated(inputs.value)
    scores = _products(inputs.query, key, inputs.further) * inputs.scaling
    if inputs.softcap is not None:
        scores = torch.tanh(scores / inputs.softcap) * inputs.softcap
    if inputs.position_bias is not None:
        scores = scores + inputs.position_bias
    if places.carrier is not None:
        scores = same_shape(places.carrier, "carry", scores, places.carrier.carry(scores, call))
    formula = _formula(places, inputs, call)
    if formula is not None:
        scores = formula(widened(scores))
    scores = call.probed("scores", scores)
    hidden = None if formula is None else scores == -torch.inf  # before the numbers of the mask
    if (bias := inputs.masks.bias()) is not None:
        scores = scores + bias
    allowed = inputs.masks.allowed()
    if hidden is not None:
        allowed = ~hidden if allowed is None else allowed & ~hidden
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    wide = widened(scores)
    if places.normalizer is not None:
        weights = same_shape(places.normalizer, "normalize", wide, places.normalizer.normalize(wide, call))
    else:
        weights = torch.softmax(wide, -1)
    if places.adjuster is not None:
        weights = same_shape(places.adjuster, "adjust", weights, places.adjuster.adjust(weights, call))
    if allowed is not None:  # a query that may see no key reads zeros, as in SDPA
        weights = weights.masked_fill(~allowed, 0.0)
    weights = call.probed("probabilities", weights.to(value.dtype))
    return (F.dropout(weights, inputs.dropout) @ value).transpose(1, 2), weights


def _formula(places: Places, inputs: Inputs, call: Call) -> Formula | None:
    """How a `score_mod` changes the scores of this call, or None."""
    variant = places.by_place
    return None if variant is None else Formula.of(variant.modified, variant.parameters(), inputs, call)


def _products(query: Tensor, key: Tensor, further: int) -> Tensor:
    """The products q k^T (B,H,Q,K). Those with the text are to the bit what they are without further keys."""
    if not further:
        return query @ key.transpose(2, 3)
    extra, text = key.tensor_split([further], 2)
    return torch.cat([query @ extra.transpose(2, 3), query @ text.transpose(2, 3)], -1)


def replaced(variant: Replacement, inputs: Inputs, call: Call, want_weights: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the heads of a variant that has no scores.

    Time and memory are linear in the length if the mask is padding or causal order. They are quadratic for any other
    mask, and if the caller wants the weights.

    Returns:
        The heads (B,Q,H,D); and the factors of V (B,H,Q,K) if they were computed, otherwise None.

    Raises:
        ValueError: the architecture or the mask adds numbers to scores, or the cache holds a state while the caller
            wants weights or gives a mask of queries and keys.
    """
    raw = inputs.query / variant.geometry.query_scale if variant.geometry.query_scale != 1 else inputs.query
    inputs = replace(inputs, query=raw, masks=inputs.masks.closed())
    _refuse_bias(variant, inputs)
    _settle_state(variant.name, inputs.masks, call, want_weights)
    query, key, value = inputs.query, inputs.repeated(inputs.key), inputs.repeated(inputs.value)
    key_mask, causal, past = inputs.masks.key_mask, inputs.masks.causal, None
    if call.state is not None:
        key_mask, causal, past = None if key_mask is None else key_mask[:, -query.shape[2] :], True, call.state.past()
    elif inputs.masks.given is not None or want_weights:
        weights = variant.products(query, key, inputs.masks.allowed())
        heads = (weights @ value.to(weights.dtype)).to(value.dtype)
        return heads.transpose(1, 2), weights
    heads = variant.linear((query, key, value), key_mask, causal, past, variant.form(Setting.of(inputs, call)))
    if call.state is not None:  # afterwards: the sums may change in place
        call.state.absorb(inputs.key, inputs.value, key_mask, inputs.masks.key_mask)
    return heads.transpose(1, 2), None


def _refuse_bias(variant: Variant, inputs: Inputs) -> None:
    if inputs.softcap is not None or inputs.position_bias is not None:
        raise ValueError(
            f"{variant.name} has no scores, so a soft cap or a position bias has no place in it; "
            "swap this architecture with another variant."
        )
    if not traced() and inputs.masks.has_bias():
        raise ValueError(
            f"{variant.name} has no scores, so it cannot add a bias to them: this 4-D float mask holds finite "
            "values other than 0; pass a bool mask, or a float mask of 0 and the dtype's minimum."
        )
