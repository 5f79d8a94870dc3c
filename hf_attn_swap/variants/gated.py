"""Computes gated attention: a learned gate, which reads the layer's input, scales each head.

Y_h <- (1 + s (g_h - 1)) Y_h, g = sigmoid(G(x)) / pi_init. s = 0 is ordinary attention, and so is the initial gate.
Bondarenko et al. (2023), section 4.2; with softmax_1 in place of softmax, this is Gated OutEffHop.
The published code draws the gate's weights from N(0, 0.01^2), which changes the output of a pretrained model. Here the
weights start at zero, and the factor 1 / pi_init makes the gate start at exactly 1. docs/mathematics.md, section Gates.
Axes: B batch, L token, H head, D head width, E model width, F = E / H the slice of x per head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.call import Call, Geometry
from ..core.options import Options
from ..functional.linear import without_autocast
from .about import About
from .base import Variant, register


@dataclass(frozen=True, kw_only=True)
class GatedOptions(Options):
    """The options of gated attention.

    Attributes:
        kind: the function G. "linear" and "mlp" read each head's slice of the input, "all_features" reads the whole
            input, and "per_head" is one constant per head.
        pi_init: the sigmoid at the start, before the division by pi_init; in (0, 1).

    Raises:
        ValueError: a value lies outside its range.
    """

    kind: Literal["linear", "mlp", "all_features", "per_head"] = "linear"
    pi_init: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.pi_init < 1:
            raise ValueError(f"gated: pi_init must lie between 0 and 1, got {self.pi_init}.")


class Wide(nn.Linear):
    """A Linear that computes in the dtype of its input, even if its parameters have another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (...,in) to (...,out)."""
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class PerHead(nn.Module):
    """One affine map per head.

    The parameters are weight (H,out,in) and bias (H,out). Without `out`, they are weight (H,in) and bias (H,).
    """

    def __init__(self, heads: int, width: int, out: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, width) if out is None else torch.zeros(heads, out, width))
        self.bias = nn.Parameter(torch.zeros(heads) if out is None else torch.zeros(heads, out))

    def forward(self, x_BLHF: Tensor) -> Tensor:
        """Map (B,L,H,in) to (B,L,H,out), or to (B,L,H) without `out`, in the dtype of the input."""
        weight, bias = self.weight.to(x_BLHF.dtype), self.bias.to(x_BLHF.dtype)
        if weight.dim() == 2:
            return (x_BLHF * weight).sum(-1) + bias
        return (x_BLHF.transpose(1, 2) @ weight.transpose(1, 2)).transpose(1, 2) + bias


class Constant(nn.Module):
    """One constant logit per head, which does not depend on the input: bias (H,)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads))

    def forward(self, x_BLE: Tensor) -> Tensor:
        """The logits (H,), in the dtype of the input."""
        return self.bias.to(x_BLE.dtype)


@register("gated", aliases=("gated_attention",))
class Gated(Variant):
    """Scales each head of each token by a learned gate, before W_o."""

    about = About(
        summary="heads are scaled by a learned gate",
        formula="g_h Y_h, g = sigmoid(G(x)) / pi_init",
        paper="Bondarenko et al., 2023; OutEffHop (Hu et al., 2024)",
        parameters_added="E + H (linear), about E^2 / (4 H) (mlp), E H + H (all_features), H (per_head)",
        fused="SDPA, then the gate",
        then="the gate",
    )
    places = ("read",)
    Options = GatedOptions
    options: GatedOptions

    def __init__(self, options: Any, geometry: Geometry) -> None:
        super().__init__(options, geometry)
        heads = geometry.heads
        slice_ = geometry.hidden // heads
        if options.kind == "linear":
            self.gate: nn.Module = PerHead(heads, slice_)
        elif options.kind == "mlp":
            self.hidden = PerHead(heads, slice_, slice_ // 4)
            self.gate = PerHead(heads, slice_ // 4)
        elif options.kind == "all_features":
            self.gate = nn.utils.skip_init(Wide, geometry.hidden, heads)  # type: ignore[no-untyped-call]  # torch's
        else:
            self.gate = Constant(heads)

    @classmethod
    def check(cls, options: Any, geometry: Geometry) -> None:
        heads, hidden = geometry.heads, geometry.hidden
        if options.kind in ("linear", "mlp") and hidden % heads:
            raise ValueError(
                f"gated: kind {options.kind!r} cuts the input into one slice per head, but {heads} heads do not divide "
                f"the width {hidden}; use kind='all_features' or 'per_head'."
            )
        if options.kind == "mlp" and hidden // heads < 4:
            raise ValueError(
                f"gated: kind 'mlp' needs at least 4 features per head, got {hidden // heads}; use kind='linear'."
            )

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        pi = self.options.pi_init
        assert isinstance(self.gate.bias, Tensor)
        self.gate.bias.fill_(math.log(pi / (1 - pi)))
        if isinstance(weight := getattr(self.gate, "weight", None), Tensor):
            weight.zero_()
        if self.options.kind == "mlp":  # nn.Linear's default initialisation, from our own generator
            bound = 1 / math.sqrt(self.hidden.weight.shape[-1])
            for tensor in (self.hidden.weight, self.hidden.bias):
                drawn = torch.empty(tensor.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
                tensor.copy_(drawn)

    def logits(self, x_BLE: Tensor) -> Tensor:
        """G(x), (B,L,H) or (H,), in fp32 at least, also in models of half precision and under autocast."""
        wide = torch.promote_types(x_BLE.dtype, torch.float32)
        with without_autocast(x_BLE.device):
            x = x_BLE.to(wide)
            if self.options.kind in ("linear", "mlp"):
                x = x.view(*x.shape[:-1], self.geometry.heads, -1)
            if self.options.kind == "mlp":
                x = self.hidden(x).relu()
            # The gate is called as a module, because accelerate loads offloaded weights when a module is called.
            return torch.as_tensor(self.gate(x))

    def read(self, heads_BLHD: Tensor, call: Call) -> Tensor:
        gate = torch.sigmoid(self.logits(call.x)) / self.options.pi_init
        if call.between:
            gate = 1 + call.strength_in(heads_BLHD.dtype) * (gate - 1)
        return heads_BLHD * gate.unsqueeze(-1).to(heads_BLHD.dtype)
