"""Modern Hopfield attention (MHA): scores are carried across layers, and the layer's input is mixed back in.

H_l = a' H_{l-1} + (1 - a') S_l, P = softmax(H_l + M), out = a x + (1 - a)(Y W_o + b_o); a -> s alpha and
a' -> s alpha'. a = a' = 0 is ordinary attention. scheme "forward_forward": H_l = alpha' H_{l-1} + (1 - alpha') S_{l-1}
and scores (1 - s) S_l + s H_l.
Modern Hopfield attention, eq. 10 and appendix F (its recursive eq. 32 scales twice: a slip against its own sum).
Axes: B batch, H head, Q query, K key, D head width, E model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..functional import hopfield_scores
from .base import Call, Variant, in_dtype, mix, register

FORWARD = ("forward_backward", "forward_forward")


@dataclass(frozen=True, kw_only=True)
class MhaOptions:
    """alpha and alpha_prime in [0, 1]; init: H below the first layer; skip: what is mixed back; scheme: appendix F."""

    alpha: float = 0.5
    alpha_prime: float = 0.5
    init: str = "zero"
    skip: str = "input"
    scheme: str = "forward_backward"

    def __post_init__(self) -> None:
        for name in ("alpha", "alpha_prime"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"mha: {name} must lie in [0, 1], got {getattr(self, name)}.")
        for name, known in (("init", ("zero", "first")), ("skip", ("input", "residual"))):
            if getattr(self, name) not in known:
                raise ValueError(f"mha: unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}.")
        if self.scheme not in FORWARD:
            raise ValueError(
                f"mha: scheme {self.scheme!r} is not available; known: {', '.join(FORWARD)}. The central scheme grows "
                "without bound over layers, and the backward-visible ones are not feed-forward."
            )


@register("mha")
class Mha(Variant):
    """Carries scores from layer to layer and adds a skip of the layer's input (no parameters)."""

    summary = "scores are carried across layers, the input is mixed back in"
    formula = "softmax(a' H + (1 - a') S), a x + (1 - a) out"
    paper = "modern Hopfield attention, eq. 10"
    fused = "in-place baddbmm into H, then softmax (or SDPA with H as mask, without gradients)"
    places = ("scores", "write")
    Options = MhaOptions
    options: MhaOptions

    @property
    def carries(self) -> bool:
        return self.options.scheme == "forward_forward" or self.options.alpha_prime > 0

    @property
    def writes(self) -> bool:
        return self.options.alpha > 0

    @property
    def runs(self) -> str:
        if self.options.scheme != "forward_backward":
            return "reference (explicit scores)"
        return self.fused if self.carries else "SDPA, then the skip"

    @property
    def wants_residual(self) -> bool:
        return self.options.skip == "residual" and self.writes

    @property
    def shares(self) -> tuple[float, float]:
        return self.options.alpha, 1 - self.options.alpha

    def warn(self) -> str | None:
        if not self.wants_residual:
            return None
        return (
            "mha: skip='residual' makes the residual stream grow by (1 + alpha) per layer; it is meant for models "
            "trained from scratch, not for pretrained ones (use skip='input')."
        )

    def carry(self, scores_BHQK: Tensor, call: Call) -> Tensor:
        previous = self.previous(call)
        if self.options.scheme == "forward_forward":
            return self._forward_forward(scores_BHQK, previous, call)
        share = self.options.alpha_prime * in_dtype(call.strength, scores_BHQK)
        if previous is not None:
            hidden = hopfield_scores(scores_BHQK, _like(previous, scores_BHQK), share)
        else:
            hidden = scores_BHQK if self.options.init == "first" else (1 - share) * scores_BHQK
        return self.keep(hidden, call)

    def _forward_forward(self, scores_BHQK: Tensor, previous: Tensor | None, call: Call) -> Tensor:
        assert call.carried is not None
        if previous is not None:
            below = call.carried.raw[call.order - 1]
            previous, below = _like(previous, scores_BHQK), _like(below, scores_BHQK)
            hidden = hopfield_scores(below, previous, self.options.alpha_prime)
        else:
            hidden = scores_BHQK if self.options.init == "first" else torch.zeros_like(scores_BHQK)
        call.carried.raw[call.order] = scores_BHQK
        return mix(scores_BHQK, self.keep(hidden, call), call.strength)

    def accumulate(self, query_BHQD: Tensor, key_BHKD: Tensor, scaling: float, call: Call) -> Tensor | None:
        """H_l by one `baddbmm`, in place of H_{l-1} where nothing needs that any more; None if it cannot.

        In place is safe for gradients: softmax keeps its output, masking its mask, never H. A checkpointed layer
        is computed again from H_{l-1}, so there H_l is a new tensor.
        """
        if isinstance(call.strength, Tensor) or self.options.scheme != "forward_backward":
            return None
        share = self.options.alpha_prime
        previous = self.previous(call)
        batch, heads, queries, _ = query_BHQD.shape
        keys = key_BHKD.shape[2]
        q, k = query_BHQD.flatten(0, 1), key_BHKD.flatten(0, 1).transpose(1, 2)
        weight = scaling if previous is None and self.options.init == "first" else scaling * (1 - share)
        if previous is None:
            hidden = torch.baddbmm(q.new_empty(1, 1, 1), q, k, beta=0, alpha=weight)
        else:
            flat = _like(previous, query_BHQD, keys).flatten(0, 1)
            traced = torch.compiler.is_compiling()  # the compiler plans memory itself, and cannot ask is_inference
            fresh = call.recomputed or traced or flat.is_inference() or previous.dtype != q.dtype
            step = torch.baddbmm if fresh else Tensor.baddbmm_
            hidden = step(flat, q, k, beta=share, alpha=weight)
            if not fresh and call.carried is not None:
                del call.carried.scores[call.order - 1]
        return self.keep(hidden.view(batch, heads, queries, keys), call)

    def previous(self, call: Call) -> Tensor | None:
        """H of the layer below, None below the first."""
        if call.carried is None:
            raise ValueError(
                "mha: this architecture does not pass keyword arguments from the model to its attention layers, so "
                "scores cannot be carried across layers; use another variant, or mha with alpha_prime=0."
            )
        if call.order == 0:
            return None
        if call.order - 1 not in call.carried.scores:
            raise ValueError(
                f"mha: the scores of carrying layer {call.order - 1} are missing in this pass. Layers that are skipped "
                "(layer-drop), run alone, or run again by hand-made activation checkpointing cannot carry scores: set "
                "layerdrop to 0, and checkpoint with model.gradient_checkpointing_enable()."
            )
        return call.carried.scores[call.order - 1]

    def keep(self, hidden_BHQK: Tensor, call: Call) -> Tensor:
        """Leave H for the layer above; without gradients, drop the one below."""
        assert call.carried is not None
        call.carried.scores[call.order] = hidden_BHQK
        if not torch.is_grad_enabled():
            call.carried.scores.pop(call.order - 1, None)
            call.carried.raw.pop(call.order - 1, None)
        return hidden_BHQK

    def write(self, out_BLE: Tensor, call: Call) -> Tensor:
        skipped = call.residual if self.wants_residual else call.x
        if skipped is None:
            raise ValueError("mha: this architecture hands no residual stream to its attention; use skip='input'.")
        return mix(out_BLE, skipped.to(out_BLE), self.options.alpha * in_dtype(call.strength, out_BLE))


def _like(carried_BHQK: Tensor, wanted: Tensor, keys: int | None = None) -> Tensor:
    """The carried scores on the device of `wanted`; ValueError if the layers see different keys."""
    keys = wanted.shape[-1] if keys is None else keys
    if carried_BHQK.shape[:3] != wanted.shape[:3] or carried_BHQK.shape[-1] != keys:
        raise ValueError(
            f"mha: the layers do not see the same keys or heads (scores {tuple(carried_BHQK.shape)} below, "
            f"{(*wanted.shape[:3], keys)} here), as with hybrid sliding-window caches; swap only layers that agree, "
            "or generate with use_cache=False."
        )
    return carried_BHQK.to(wanted.device)
