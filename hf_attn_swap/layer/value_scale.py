"""Holds the scale of each value dimension of a swapped layer, for variants that project heads on values.

The rows of W_v may be multiplied by powers of two, and the columns of W_o divided by the same, and the pretrained layer
stays the same function, to the bit. A projection <y, v> / <v, v> does not stay the same: in the new scale it is
<y, S^2 v> / <v, S^2 v>. So the scale S is free. `hf_attn_swap.conversion.scale_values` chooses S; no weight changes.
docs/mathematics.md, section Scaled values. Axes: G key/value head, H head, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.call import Call, DeviceAndDtype, Geometry
from ..variants.base import Variant
from .fitted import CALL, Fitted, fitted

LARGEST_SCALE = 7  # S is 2^-7 to 2^7, so that S^2 is exact in fp16 too


@fitted("value_scale")
class ValueScale(Fitted):
    """The squares S^2 of the scales of one layer's values, a buffer `squares` (G,D). They start at 1.

    Args:
        geometry: the sizes of the attention module.
    """

    place = CALL
    squares: Tensor

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.group = geometry.heads // geometry.kv_heads
        self.register_buffer("squares", torch.ones(geometry.kv_heads, geometry.head_dim))

    @classmethod
    def check(cls, spec: Any, classes: tuple[type[Variant], ...], strength: float) -> None:
        if spec is not True or not any(variant.projects for variant in classes):
            raise ValueError(
                f"value_scale must be true, beside a variant that projects on values, got {spec!r} beside "
                f"{'+'.join(variant.name for variant in classes)!r}."
            )

    @classmethod
    def from_spec(cls, spec: Any, geometry: Geometry) -> ValueScale:
        return cls(geometry)

    def spec(self) -> bool:
        return True

    def words(self) -> str:
        return "values scaled for the projection"

    def sentence(self, layers: int) -> str:
        return f"The values of {layers} layers are scaled, so that the projection removes little."

    def placed_like(self, like: DeviceAndDtype | Tensor) -> ValueScale:
        """Move the scales to the device of `like`. They keep their dtype."""
        return self.to(like.device)

    def forward(self) -> Tensor:
        """S^2 of the value that each query head reads, (H,D)."""
        return self.squares if self.group == 1 else self.squares.repeat_interleave(self.group, 0)

    def prepare(self, call: Call) -> None:
        call.value_squares = self()  # a call of the module: programs that offload weights bring its buffer back for it
