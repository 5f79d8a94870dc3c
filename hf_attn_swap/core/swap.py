"""The child `attn_swap` of a swapped attention module: its variants, their parameters, and the strength.

Axes: B batch, L token, H head, Q query, K key, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.dispatch import Form, Setting
from ..variants.base import Variant, mix
from .calibration import Calibration
from .call import Call, Carried, FusedSoftmax, Geometry, Inputs
from .compute import Places, attend, ordinary, replaced
from .registry import Options, build_options

STOCK = "attn_swap_stock"  # True in the keyword arguments of an attention module: run it as if it were not swapped


class Phase(str, Enum):
    """Where the strength is: all that code may branch on, so that a compiler sees three cases."""

    OFF = "off"
    BETWEEN = "between"
    FULL = "full"


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """Where one swap sits in its model.

    Attributes:
        order: place among the layers that carry scores; None for a shared module, which counts its calls.
        last: True for the last of these layers.
        uniform: True if all layers of the model are under the same masks.
        cache_position: of the cache among the container's positional arguments, or None.
        mask_position: likewise of the attention mask.
        dropout_path: of the hidden dropout behind W_o, from the container, or None.
        folded_path: of W_o from the container, or of W_v from the core where the variant has no W_o, or None.
    """

    order: int | None = 0
    last: bool = False
    uniform: bool = False
    cache_position: int | None = None
    mask_position: int | None = None
    dropout_path: str | None = None
    folded_path: str | None = None


class Swap(nn.Module):
    """The child `attn_swap` of a swapped attention module: its variants, their parameters, and the strength.

    The Python float `strength` is the truth; the fp32 buffer `strength_value` mirrors the float for the computation,
    and `phase` is all that code branches on. `wiring` is None while the swap is in no model.
    """

    strength_value: Tensor
    calibration: Calibration | None

    def __init__(self, classes: tuple[type[Variant], ...], options: Options, geometry: Geometry) -> None:
        super().__init__()
        self.names = tuple(cls.name for cls in classes)
        self.geometry = geometry
        self.wiring: Wiring | None = None
        self.fresh = True  # no training step and no checkpoint has moved the new parameters
        self.merged: str | None = None  # the fit that was folded into the weights
        self.selection: str | None = None  # the `modules` argument that chose this layer
        self.strength, self.phase = 1.0, Phase.FULL
        self.options = options
        for cls in classes:
            self.add_module(cls.name, cls(build_options(cls, options[cls.name]), geometry))
        self.register_module("calibration", None)
        self.register_buffer("strength_value", torch.ones(1, dtype=torch.float32), persistent=False)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants, in the order of the name."""
        return tuple(child for child in self.children() if isinstance(child, Variant))

    def at(self, place: str) -> Variant | None:
        """The variant that changes this place, if any."""
        return next((variant for variant in self.variants if place in variant.places), None)

    def places(self) -> Places:
        """Who changes what, for the computation."""
        replacement = self.variants[0] if self.variants[0].replaces else None
        scores, normaliser, weights = (self.at(place) for place in ("scores", "normaliser", "weights"))
        carrier = scores if scores is not None and scores.carries else None
        return Places(carrier=carrier, normaliser=normaliser, adjuster=weights, replacement=replacement)

    @property
    def carries(self) -> bool:
        """True if scores travel between layers."""
        return any(variant.carries for variant in self.variants)

    @property
    def writes(self) -> bool:
        """True if something comes after W_o."""
        return any(variant.writes for variant in self.variants)

    @property
    def keeps_projection(self) -> bool:
        """False if the read-out is the layer's output, without W_o."""
        return all(variant.keeps_projection for variant in self.variants)

    @property
    def wants_residual(self) -> bool:
        """True if the block's residual stream must be handed in."""
        return any(variant.wants_residual for variant in self.variants)

    def place_in(self, carried: Carried | None) -> int:
        """The layer's place among those that carry scores; a shared module counts its calls.

        Raises:
            ValueError: a shared module is computed again after the pass.
        """
        order = self.wiring.order if self.wiring is not None else 0
        if order is not None or carried is None:
            return order or 0
        if carried.closed and self.carries:
            raise ValueError(
                "a module that serves several layers was computed again after the pass (activation checkpointing): "
                "its place is not known any more; train this model without checkpointing, or with another variant "
                "than mha."
            )
        carried.calls += 1
        return carried.calls - 1

    def spec(self) -> dict[str, Any]:
        """What config.json says of this layer: variant, options and strength."""
        spec = {"variant": "+".join(self.names), "options": self.options, "strength": self.strength}
        if self.selection is not None:
            spec["modules"] = self.selection
        fit = self.calibration.fit if self.calibration is not None else self.merged
        if fit is not None:
            spec["calibration"] = {"fit": fit, "merged": self.calibration is None}
        return spec

    def calibrate(self, fit: str, like: Tensor) -> Calibration:
        """Put a neutral calibration in, on the device and in the dtype of `like`."""
        self.calibration = Calibration(fit, self.geometry).to(like)
        return self.calibration

    def set_strength(self, strength: float, *, never_off: bool = False) -> None:
        """Set s; `never_off` keeps the layer computing at s = 0, for a neighbour that reads its scores."""
        self.strength = float(strength)
        if strength == 1:
            self.phase = Phase.FULL
        elif strength == 0 and not never_off:
            self.phase = Phase.OFF
        else:
            self.phase = Phase.BETWEEN
        self.refill()

    def refill(self) -> None:
        """Write the strength into its buffer again: a load or a cast leaves it without its value."""
        if self.strength_value.dtype != torch.float32:
            self.strength_value = torch.empty(1, dtype=torch.float32, device=self.strength_value.device)
        if not self.strength_value.is_meta:
            self.strength_value.fill_(self.strength)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Swap:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.refill()  # a cast to bf16 would round the strength, `to_empty` would lose it
        return self

    def forward(
        self, inputs: Inputs, call: Call, sdpa: FusedSoftmax, want_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Heads (B,Q,H,D) as W_o is given them, and the weights (B,H,Q,K) where wanted."""
        call.exact_strength = 1.0 if self.phase == Phase.FULL else self.strength_value
        call.value = inputs.value
        places = self.places()
        if places.replacement is not None:
            return self._replaced(places.replacement, inputs, call, sdpa, want_weights)
        heads, weights = attend(places, inputs, call, sdpa, want_weights)
        heads = call.tapped("context", heads)
        reader = self.at("read")
        if reader is not None:
            heads = reader.read(heads, call.hand(heads.dtype))
        if self.calibration is not None:
            heads = mix(heads, self.calibration(heads), call.hand(heads.dtype).strength)
        return heads, weights

    def _replaced(
        self, variant: Variant, inputs: Inputs, call: Call, sdpa: FusedSoftmax, want_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The same for a variant without scores; the calibration belongs to the variant's heads alone."""
        heads, weights = replaced(variant, inputs, call, want_weights)
        heads = call.tapped("context", heads)
        if self.calibration is not None:
            heads = self.calibration(heads)
        call.hand(heads.dtype)
        if call.between:
            return variant.read_between(ordinary(inputs, sdpa), heads, call), weights
        return variant.read(heads, call), weights

    def write(self, out_BLE: Tensor, call: Call) -> Tensor:
        """What comes after W_o."""
        for variant in self.variants:
            if variant.writes:
                out_BLE = variant.write(out_BLE, call.hand(out_BLE.dtype))
        return out_BLE

    def form(self, setting: Setting) -> Form:
        """The form that computes this layer's heads in this setting."""
        return Form.STOCK if self.phase == Phase.OFF else self.places().form(setting)
