"""Computes modern Hopfield attention: scores are carried across layers, and the layer's input is added again.

H_l = a' H_{l-1} + (1 - a') S_l, P = softmax(H_l + M), out = a x + (1 - a)(Y W_o + b_o). At strength s, a = s alpha and
a' = s alpha_prime; a = a' = 0 is ordinary attention.
The scheme "forward_forward" has H_l = alpha' H_{l-1} + (1 - alpha') S_{l-1}, and normalizes (1 - s) S_l + s H_l.
Modern Hopfield attention, eq. 10 and appendix F. The paper's recursive eq. 32 scales the carried part twice, against
the sum that it is derived from; this file follows the sum. docs/mathematics.md, section Modern Hopfield attention.
With matched heads, H keeps the order of the first layer's heads, and each layer puts its own heads into this order
before S meets H, and back into its own after: docs/mathematics.md, section Matched heads.
Axes: B batch, H head, Q query, K key, D head width, E model width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..core.call import Call, FusedSoftmax, Hidden, Inputs, heads_in_order
from ..core.options import REASON, Options
from ..functional import hopfield_scores
from ..kernels import carried
from ..kernels.dispatch import Form, Setting, carried_form
from .about import About
from .base import Variant, mix, register

NOT_AVAILABLE = (
    "The central scheme grows without bound over layers, and the backward-visible schemes are not feed-forward."
)


@dataclass(frozen=True, kw_only=True)
class ModernHopfieldOptions(Options):
    """The options of modern Hopfield attention.

    Attributes:
        alpha: the share of the skip in the layer's output, in [0, 1].
        alpha_prime: the share of the carried scores, in [0, 1].
        init: the first layer's H. "zero" starts from H = 0 below the first layer; "first" uses the first layer's own
            scores.
        skip: the tensor that is added again. "input" is the layer's input x, "residual" is the block's residual stream.
        scheme: how scores are carried, as the paper's appendix F names the schemes.
        memory: "low" never holds a tensor of queries and keys when 512 tokens or more read each other. Memory is then
            linear in the length, and layer l computes the products of all l layers again. "auto" does so from 4,096
            tokens on. The results are equal.

    Raises:
        ValueError: a value lies outside its range.
    """

    alpha: float = 0.5
    alpha_prime: float = 0.5
    init: Literal["zero", "first"] = "zero"
    skip: Literal["input", "residual"] = "input"
    scheme: Literal["forward_backward", "forward_forward"] = field(
        default="forward_backward", metadata={REASON: NOT_AVAILABLE}
    )
    memory: Literal["auto", "low"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha", "alpha_prime"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"modern_hopfield: {name} must lie in [0, 1], got {getattr(self, name)}.")


@register("modern_hopfield", aliases=("mha",))
class ModernHopfield(Variant):
    """Carries scores from layer to layer, and adds the layer's input to its output (no parameters)."""

    about = About(
        summary="scores are carried across layers, the input is mixed back in",
        formula="softmax(a' H + (1 - a') S), a x + (1 - a) out",
        paper="modern Hopfield attention, eq. 10",
        fused="H moved on in place by baddbmm, then softmax (or SDPA with H as mask, without gradients)",
    )
    places = ("scores", "write")
    Options = ModernHopfieldOptions
    options: ModernHopfieldOptions

    @property
    def changes(self) -> tuple[str, ...]:
        carries = self.options.scheme == "forward_forward" or self.options.alpha_prime > 0
        return ("scores",) * carries + ("write",) * (self.options.alpha > 0)

    def form(self, setting: Setting) -> Form:
        if self.options.scheme == "forward_backward":
            return carried_form(setting, low=self.options.memory == "low")
        return Form.REFERENCE

    @property
    def wants_residual(self) -> bool:
        return self.options.skip == "residual" and self.options.alpha > 0

    @property
    def shares(self) -> tuple[float, float]:
        return self.options.alpha, 1 - self.options.alpha

    def warn(self) -> str | None:
        if not self.wants_residual:
            return None
        return (
            "modern_hopfield: skip='residual' makes the residual stream grow by (1 + alpha) per layer; it is meant "
            "for models trained from scratch, not for pretrained ones (use skip='input')."
        )

    def carry(self, scores_BHQK: Tensor, call: Call) -> Tensor:
        order = call.head_order
        if order is None:
            return self._carry(scores_BHQK, call)
        return heads_in_order(self._carry(heads_in_order(scores_BHQK, order), call), _inverse(order))

    def _carry(self, scores_BHQK: Tensor, call: Call) -> Tensor:
        """`carry`, for scores whose heads are in the order of the carried scores."""
        below = self.previous(call)
        previous = None if below is None else _like(below.plain(), scores_BHQK)
        if self.options.scheme == "forward_forward":
            return self._forward_forward(scores_BHQK, previous, call)
        share = self.options.alpha_prime * call.strength_in(scores_BHQK.dtype)
        if previous is not None:
            hidden = hopfield_scores(scores_BHQK, previous, share)
        elif self.options.init == "first":
            hidden = scores_BHQK
        else:
            hidden = (1 - share) * scores_BHQK
        return self.keep(hidden, call)

    def _forward_forward(self, scores_BHQK: Tensor, previous: Tensor | None, call: Call) -> Tensor:
        """`carry` for the scheme "forward_forward". `previous` is H of the layer below, or None."""
        assert call.context is not None
        if previous is not None:
            below = _like(call.context.raw[call.order - 1], scores_BHQK)
            hidden = hopfield_scores(below, previous, self.options.alpha_prime)
        elif self.options.init == "first":
            hidden = scores_BHQK
        else:
            hidden = torch.zeros_like(scores_BHQK)
        call.context.raw[call.order] = scores_BHQK
        return mix(scores_BHQK, self.keep(hidden, call), call.strength_in(scores_BHQK.dtype))

    def keep(self, hidden_BHQK: Tensor, call: Call) -> Tensor:
        """Keep H (B,H,Q,K) for the layer above, and return H."""
        carried.leave(Hidden(hidden_BHQK), call, drop=not torch.is_grad_enabled())
        return hidden_BHQK

    def previous(self, call: Call) -> Hidden | None:
        """H of the layer below; None for the first layer.

        Raises:
            ValueError: the layer below left no H in this pass.
        """
        if call.context is None:
            raise ValueError(
                "modern_hopfield: nothing arrived that could carry scores across the layers. If the program calls "
                "model.forward(...), call model(...). If it calls model(...), this architecture does not pass keyword "
                "arguments on to its attention layers: use another variant, or modern_hopfield with alpha_prime=0."
            )
        if call.first:
            return None
        if call.order - 1 not in call.context.scores:
            raise ValueError(
                f"modern_hopfield: the scores of carrying layer {call.order - 1} are missing in this pass. Layers that "
                "are skipped (layer-drop), run alone, or run again by hand-made activation checkpointing cannot carry "
                "scores: set layerdrop to 0, and checkpoint with model.gradient_checkpointing_enable()."
            )
        return call.context.scores[call.order - 1]

    def heads(self, inputs: Inputs, call: Call, sdpa: FusedSoftmax, form: Form) -> Tensor | None:
        """The heads (B,Q,H,D) by a fused form of `kernels.carried`; None if the readable pipeline must run."""
        if inputs.masks.bias() is not None:
            return None
        if inputs.masks.per_head:  # a fused form writes the mask into H, where matched heads have another order
            return None
        below = self.previous(call)
        decay = self.options.alpha_prime
        if below is not None:
            _check((*inputs.query.shape[:3], inputs.key.shape[2]), below.shape)
        share = 1.0 if below is None and self.options.init == "first" else 1 - decay
        order = call.head_order
        if order is None:
            return carried.attend(form, inputs, call, sdpa, below, decay, share)
        heads = carried.attend(form, inputs.in_order(order), call, sdpa, below, decay, share)
        return None if heads is None else heads_in_order(heads, _inverse(order), 2)

    def write(self, out_BLE: Tensor, call: Call) -> Tensor:
        skipped = call.residual if self.wants_residual else call.skipped
        if skipped is None:
            raise ValueError(
                "modern_hopfield: no residual stream was found around this attention module; use skip='input'."
            )
        return mix(out_BLE, skipped.to(out_BLE), self.options.alpha * call.strength_in(out_BLE.dtype))


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """The place of each head in an order: the order that leads back."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _like(carried_BHQK: Tensor, wanted: Tensor) -> Tensor:
    """The carried scores (B,H,Q,K) on the device of `wanted`.

    Raises:
        ValueError: the layers do not see the same keys or heads.
    """
    _check(tuple(wanted.shape), tuple(carried_BHQK.shape))
    return carried_BHQK.to(wanted.device)


def _check(here: tuple[int, ...], below: tuple[int, ...]) -> None:
    """Compare the shapes of the scores of this layer and of the layer below.

    Raises:
        ValueError: the shapes differ.
    """
    if below != here:
        raise ValueError(
            f"modern_hopfield: the layers do not see the same keys or heads (scores {below} below, {here} here), as "
            "with hybrid sliding-window caches; swap only layers that agree, or generate with use_cache=False."
        )
