"""Computes belief attention: each token keeps only the part of the heads that is orthogonal to its own value.

delta_i = y_i - s (<y_i, v_i> / <v_i, v_i>) v_i; s = 0 is ordinary attention. Two ablations: the same for each head
alone, and the difference y_i - s v_i, which the paper argues against.
belief_star: out = delta W_o + b_o + s delta^s W_s, where delta^s is the same for each head alone.
BeliefFormer, section 3.2 and eq. 10, 13 and 15. docs/mathematics.md, section Belief attention.
Axes: B batch, L token, H head, D head width, E model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..core.call import Call, Geometry
from ..core.options import Options
from ..functional import belief_projection
from .about import About
from .base import Variant, mix, register, unset_linear


@dataclass(frozen=True, kw_only=True)
class BeliefOptions(Options):
    """The options of belief attention.

    Attributes:
        kind: what is subtracted from the heads of a token. "joined" is the projection of all heads, as one vector, on
            the token's own value, "per_head" that of each head alone, and "difference" the own value itself.
    """

    kind: Literal["joined", "per_head", "difference"] = "joined"


@register("belief", aliases=("beliefformer",))
class Belief(Variant):
    """Subtracts the projection of all heads, as one vector, on the token's own value (no parameters)."""

    about = About(
        summary="heads lose their projection on the token's own value",
        formula="Y - (<Y, V> / <V, V>) V",
        paper="BeliefFormer, eq. 10",
        fused="SDPA, then the projection",
        then="the projection",
    )
    places: ClassVar[tuple[str, ...]] = ("read",)
    projects: ClassVar[bool] = True
    Options: ClassVar[type[Any]] = BeliefOptions

    def read(self, heads_BLHD: Tensor, call: Call) -> Tensor:
        own_BLHD, kind = call.own_values(self.geometry.heads), self.options.kind
        if kind == "difference":
            projected = heads_BLHD - own_BLHD
        else:
            squares = call.value_squares
            projected = belief_projection(heads_BLHD, own_BLHD, per_head=kind == "per_head", squares=squares)
        return mix(heads_BLHD, projected, call.strength_in(heads_BLHD.dtype))


@register("belief_star", aliases=("beliefformer_star",))
class BeliefStar(Belief):
    """Adds a second output projection W_s, which reads the heads after each head was projected alone."""

    about = About(
        summary="belief, plus a second output projection of the heads projected one by one",
        formula="delta W_o + delta^s W_s",
        paper="BeliefFormer, eq. 15",
        parameters_added="H D E (no bias)",
        fused="SDPA, then both projections",
        then="both projections",
    )
    places = ("read", "write")
    Options = Variant.Options
    projections: ClassVar[tuple[str, ...]] = ("w_s",)

    def __init__(self, options: Any, geometry: Geometry) -> None:
        super().__init__(options, geometry)
        width = geometry.heads * geometry.head_dim
        self.w_s = unset_linear(width, geometry.hidden, bias=False)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        self.w_s.weight.zero_()

    def read(self, heads_BLHD: Tensor, call: Call) -> Tensor:
        own_BLHD = call.own_values(self.geometry.heads)
        per_head = belief_projection(heads_BLHD, own_BLHD, per_head=True, squares=call.value_squares)
        projected = belief_projection(heads_BLHD, own_BLHD, squares=call.value_squares)
        strength = call.strength_in(heads_BLHD.dtype)
        call.kept = mix(heads_BLHD, per_head, strength).flatten(2)
        return mix(heads_BLHD, projected, strength)

    def write(self, out_BLE: Tensor, call: Call) -> Tensor:
        assert call.kept is not None
        added: Tensor = self.w_s(call.kept)
        if call.dropout is not None:
            added = call.dropout(added)
        return out_BLE + (call.strength_in(out_BLE.dtype) * added).to(out_BLE.dtype)
