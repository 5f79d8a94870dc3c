"""Holds which head of one layer meets which head of the carried scores, for variants that carry scores across layers.

`hf_attn_swap.conversion.match_heads` chooses the order. docs/mathematics.md, section Matched heads.
"""

from __future__ import annotations

from typing import Any

from ..core.call import Call, Geometry
from ..core.checks import is_whole
from ..variants.base import Variant
from .fitted import CALL, Fitted, fitted


@fitted("head_order")
class MatchedHeads(Fitted):
    """The order in which the heads of one layer meet the carried scores.

    Args:
        order: by the number of each head of the carried scores, the head of this layer that meets it.
    """

    place = CALL

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.order = order

    @classmethod
    def check(cls, spec: Any, classes: tuple[type[Variant], ...], strength: float) -> None:
        if not isinstance(spec, list) or not all(map(is_whole, spec)) or sorted(spec) != list(range(len(spec))):
            raise ValueError(f"head_order must name every head once, got {spec!r}.")

    @classmethod
    def from_spec(cls, spec: Any, geometry: Geometry) -> MatchedHeads:
        if len(spec) != geometry.heads:
            raise ValueError(f"head_order must name {geometry.heads} heads, got {len(spec)}.")
        return cls(tuple(spec))

    def spec(self) -> list[int]:
        return list(self.order)

    def words(self) -> str:
        return "heads matched to the carried scores"

    def sentence(self, layers: int) -> str:
        return f"The heads of {layers} layers meet the carried scores that are most like their own."

    def prepare(self, call: Call) -> None:
        call.head_order = self.order
