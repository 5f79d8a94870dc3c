"""Holds the scale of the skip of one layer after a neutral start: a variant that adds its input x adds 2^-k x.

`hf_attn_swap.conversion.neutral_start` chooses the layers. docs/mathematics.md, section Neutral start.
"""

from __future__ import annotations

from typing import Any

from ..core.call import Call, Geometry
from ..core.checks import is_whole
from ..variants.base import Variant
from .fitted import CALL, Fitted, fitted

LARGEST_EXPONENT = 60  # 2^-60 is far above the smallest number of fp32 and bf16


@fitted("neutral_start")
class SkipScale(Fitted):
    """The factor 2^-k of the skip.

    Args:
        exponent: k, from 1 to `LARGEST_EXPONENT`.
    """

    place = CALL

    def __init__(self, exponent: int) -> None:
        super().__init__()
        self.exponent = exponent

    @classmethod
    def check(cls, spec: Any, classes: tuple[type[Variant], ...], strength: float) -> None:
        if not is_whole(spec) or not 1 <= spec <= LARGEST_EXPONENT:
            raise ValueError(f"neutral_start must be a whole number from 1 to {LARGEST_EXPONENT}, got {spec!r}.")

    @classmethod
    def from_spec(cls, spec: Any, geometry: Geometry) -> SkipScale:
        return cls(spec)

    def spec(self) -> int:
        return self.exponent

    def words(self) -> str:
        return f"neutral start (the skip adds 2^-{self.exponent} of the input)"

    def sentence(self, layers: int) -> str:
        return f"The skip of {layers} layers starts at 2^-{self.exponent} of the input (neutral start)."

    @property
    def factor(self) -> float:
        """The factor of the input in the skip: 2^-k."""
        return 2.0**-self.exponent

    def prepare(self, call: Call) -> None:
        call.skip_scale = self.factor
